# SPDX-License-Identifier: Apache-2.0
"""The recipe for Direct Preference Optimization, and the log-probabilities of labels in it."""
import dataclasses
import json
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import config
import dpo
import model
import train
from test_real_data import chat_tokenizer, form_template, write_rows
from test_recipes import assert_same_arrays, copy_at, copy_of

SMALL = config.derive_text(dpo.DpoConfig(
    d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50, seq_len=12, batch_size=4,
    beta=0.3, dtype="float32", attention="xla"))


def write_pairs(path, rows):
    path.write_text("".join(json.dumps(dict(zip(("prompt", "chosen", "rejected"), row))) + "\n"
                            for row in rows))
    return str(path)


def letter_pairs(n):
    """Pairs in which the chosen answer has the letter that the prompt asks for."""
    rng = random.Random(0)
    asked = [rng.sample("abcdefgh", 2) for _ in range(n)]
    return [(f"{rng.randrange(1000)} say {a}:", f" {a}{a}", f" {b}{b}") for a, b in asked]


def make_base(tiny, steps, **changes):
    """A run of the text task that learns the form of an answer, and not which answer is right."""
    cfg = tiny(**dict(steps=steps, out_dir=str(Path(tiny().out_dir).parent / "base"), val_frac=0.0,
                      save_every=0, dtype="float32") | changes)
    rng = random.Random(1)
    Path(cfg.data[0]).write_text("\n".join(
        f"{i} say {rng.choice('abcdefgh')}: {rng.choice('abcdefgh') * 2}" for i in range(2000)))
    train.main(cfg)
    return cfg


def make_dpo(base, pairs, out, **changes):
    return dpo.DpoConfig(**dataclasses.asdict(base) | dict(
        data=(pairs,), init_from=(base.out_dir,), out_dir=str(out), val_frac=0.1, eval_batches=0,
        eval_every=0, log_every=50) | changes)


def random_batch(rng):
    """Four pairs with prompts and answers of any length. The last pair has no labels."""
    tokens = rng.integers(0, SMALL.vocab_size, (4, 2, 12))
    labels = rng.integers(0, SMALL.vocab_size, (4, 2, 12))
    for row, side in np.ndindex(4, 2):
        start, stop = sorted(rng.choice(np.arange(13), 2, replace=False))
        labels[row, side, :start] = labels[row, side, stop:] = model.IGNORE
    labels[3] = model.IGNORE
    return {"tokens": jnp.int32(tokens), "labels": jnp.int32(labels),
            "reference": jnp.float32(rng.normal(-30, 10, (4, 2)))}


@pytest.mark.parametrize("n_tiles", [1, 4])
def test_loss_and_gradient(n_tiles):
    """Loss, metrics and gradients equal NumPy's in float64 and finite differences, to 1e-5.

    Break: tests/recipes/dpo.py: -jax.nn.log_sigmoid(margin_B) => jax.nn.softplus(margin_B)
    """
    cfg = dataclasses.replace(SMALL, logit_tiles=n_tiles)
    params, batch = model.init(jax.random.key(0), cfg), random_batch(np.random.default_rng(0))
    rows = {name: batch[name].reshape(8, 12) for name in ("tokens", "labels")}
    logits, pull_back = jax.vjp(jax.jit(lambda p: model.forward(p, rows, cfg)), params)
    logits, labels = np.float64(logits), np.array(rows["labels"])
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    labelled = labels != model.IGNORE
    hit = labelled[..., None] & (labels[..., None] == np.arange(cfg.vocab_size))
    answers = np.where(hit, logp, 0).sum(axis=(1, 2)).reshape(4, 2)
    reference = np.float64(batch["reference"])

    def loss_64(answers):
        margins = cfg.beta * ((answers - reference) @ [1, -1])
        return np.log1p(np.exp(-margins))[:3].sum()

    def objective(params):
        sums, counts = dpo.loss(params, batch, cfg)
        return sums["objective"], (sums, counts)

    (_, (sums, counts)), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    rewards = (cfg.beta * (answers - reference))[:3]
    expected = {"objective": loss_64(answers), "loss": loss_64(answers),
                "margin": (rewards @ [1, -1]).sum(), "acc": (rewards @ [1, -1] > 0).sum(),
                "chosen_reward": rewards[:, 0].sum(), "rejected_reward": rewards[:, 1].sum()}
    assert sums.keys() == expected.keys() and set(map(float, counts.values())) == {3.0}
    for name in expected:
        np.testing.assert_allclose(sums[name], expected[name], rtol=0, atol=1e-5, err_msg=name)

    slope = np.zeros((4, 2))
    slope[:3] = -cfg.beta / (1 + np.exp(rewards @ [1, -1]))[:, None] * [1, -1]
    for at in np.ndindex(4, 2):
        nudge = np.zeros((4, 2))
        nudge[at] = 1e-4
        by_difference = (loss_64(answers + nudge) - loss_64(answers - nudge)) / 2e-4
        np.testing.assert_allclose(slope[at], by_difference, rtol=0, atol=1e-8)
    d_logits = (hit - np.exp(logp) * labelled[..., None]) * slope.reshape(8, 1, 1)
    for name, want in pull_back(jnp.float32(d_logits))[0].items():
        np.testing.assert_allclose(grads[name], want, rtol=0, atol=1e-5 * np.abs(want).max(),
                                   err_msg=name)


def test_rows(tmp_path, capsys):
    """Rows of 7 bytes written by hand; dots are ends and padding, dashes ignored labels.

    Break: tests/recipes/dpo.py: [longest - T - 1:] => [longest - T:]
    """
    path = write_pairs(tmp_path / "p.jsonl", [
        ("ab", "cd", "e"), ("abcdefgh", "ij", "klm"), ("ab", "cdefghij", "k"), ("", "a", "b")])
    cfg = dpo.DpoConfig(seq_len=7)
    pairs = dpo.read_pairs((path,), cfg)
    batch = dpo.build_batch(pairs, np.float32([[0, 1], [2, 3], [4, 5], [6, 7]]), 7,
                            [3, 0, 1, 2, 0], [True] * 4 + [False])

    def text(ids):
        return "".join("-" if i == model.IGNORE else "." if i == 0 else chr(i) for i in ids)

    assert [text(ids) for ids in batch["tokens"].reshape(-1, 7)[:8]] == [
        ".a.....", ".b.....", ".abcd..", ".abe...", "efghij.", "efghklm", "bcdefgh", "bk....."]
    assert [text(ids) for ids in batch["labels"].reshape(-1, 7)] == [
        "a.-----", "b.-----", "--cd.--", "--e.---", "---ij.-", "---klm.", "cdefghi", "k.-----",
        "-------", "-------"]
    assert f"{path}: 1 answers are cut, longer than --seq_len 7" in capsys.readouterr().out
    assert batch["reference"].tolist() == [[6, 7], [0, 1], [2, 3], [4, 5], [0, 1]]


CHOSEN = [{"role": "assistant", "content": "lower"}]
REJECTED = [{"role": "assistant", "content": "lowest"}, {"role": "user", "content": "no"},
            {"role": "assistant", "content": "low"}]
PROMPT = [{"role": "user", "content": "low"}, {"role": "assistant", "content": "so"},
          {"role": "user", "content": "more"}]


def test_rows_of_messages(tmp_path):
    """A pair may be two conversations; labels are the answers after the prompt, each with its end.

    Break: tests/recipes/dpo.py: common = prompt + common => pass
    """
    tokenizer = chat_tokenizer(tmp_path / "t")
    decode = tokenizer["decode"]
    apart = {"prompt": PROMPT, "chosen": CHOSEN, "rejected": REJECTED}
    rows = [
        apart,
        {"chosen": PROMPT + CHOSEN, "rejected": PROMPT + REJECTED},
        {"prompt": PROMPT, "chosen": PROMPT + CHOSEN, "rejected": PROMPT + REJECTED},
        {"prompt": PROMPT[:2], "chosen": PROMPT[2:] + CHOSEN, "rejected": PROMPT[2:] + REJECTED},
        {"prompt": "more", "chosen": PROMPT + CHOSEN, "rejected": PROMPT + REJECTED},
        {name: json.dumps(messages) for name, messages in apart.items()},
        {name: [{"from": message["role"], "value": message["content"]} for message in messages]
         for name, messages in apart.items()},
    ]
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    pairs = dpo.read_pairs((str(path),), dpo.DpoConfig(seq_len=200, tokenizer=tokenizer["name"]))
    start = ("<|im_start|>user\nlow<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
             "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    for row, (chosen, rejected) in zip(rows, pairs, strict=True):
        assert decode(chosen[0]) == start + "lower<|im_end|>\n", row
        assert decode(chosen[0][chosen[1]]) == "lower<|im_end|>", row
        assert decode(rejected[0][rejected[1]]) == "lowest<|im_end|>low<|im_end|>", row
    batch = dpo.build_batch(pairs, np.zeros((len(rows), 2), np.float32), 200, [0])
    labels = batch["labels"][0, 1]
    assert decode(labels[labels != model.IGNORE]) == "lowest<|im_end|>low<|im_end|>"
    # Where the template ends no answer, the end of a document does.
    endless = chat_tokenizer(tmp_path / "u", form_template("<|{}|>\n", ("", ""), "header"))
    (chosen, _), *_ = dpo.read_pairs((str(path),), dpo.DpoConfig(tokenizer=endless["name"]))
    assert decode(chosen[0][chosen[1]]) == "lower<|endoftext|>"
    write_rows(path, [{"chosen": PROMPT + CHOSEN, "rejected": PROMPT + CHOSEN}])
    with pytest.raises(ValueError, match="line 1: chosen has no label: it needs"):
        dpo.read_pairs((str(path),), dpo.DpoConfig(tokenizer=tokenizer["name"]))


@pytest.mark.parametrize("line, error", [  # a second line, or flags
    ('{"prompt": "a", "chosen": "b"}', "rejected is None; must be a text or a list"),
    ('{"chosen": "a", "rejected": "b"}', "prompt is missing beside answers of text"),
    ('{"prompt": "a", "chosen": "b", "rejected": ""}', "rejected is ''"),
    ('{"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "c"}]}',
     "rejected: messages need a chat template"),
    ('{"system": "x", "prompt": "a", "chosen": "b", "rejected": "c"}', "the column system"),
    ('["a", "b", "c"]', "prompt is None; must be a text"),
    ("--data {pairs}", "init_from: is missing; name the --out_dir of a trained run"),
    ("--data {pairs} --init_from {tmp}/nowhere", "nowhere: holds no checkpoint and no weights"),
    ("--init_from base", "data '': no pair to train on; name a .jsonl"),
    ("--data {pairs} --init_from base --z_loss 0.1", "z_loss: has no effect on pairs"),
    ("--data {pairs} --init_from base --vocab_size 90", "token id 97 is not in [0, 90)"),
    ("--data {pairs} --init_from base --beta 0", "beta 0.0: must be above 0"),
    ("--data {pairs} --init_from base --val_data {pairs}", "is in two sets, of data and val_data"),
])
def test_a_malformed_pair_or_flag_is_rejected(line, error, tiny, tmp_path, capsys):
    """The error names file, line and rule; the exit code is 2, before anything is compiled.

    Break: tests/recipes/dpo.py: if not isinstance(value, str | list) or not value: =>
    if not isinstance(value, str | list):
    """
    path, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    pairs = write_pairs(path, [("a", "b", "c"), ("d", "e", "f")])
    flags = line.format(pairs=pairs, tmp=tmp_path) if line.startswith("--") else ""
    if not flags:
        path.write_text(path.read_text() + "\n" + line + "\n")
        flags = f"--data {path} --init_from base"
    code = train.cli([*flags.split(), "--out_dir", str(out), "--cache_dir", tiny().cache_dir],
                     task=dpo.TASK, kind=dpo.DpoConfig)
    printed = capsys.readouterr().err
    assert code == 2 and error in printed
    assert line.startswith("--") or f"error: {path} line 4: " in printed
    assert not ckpt.steps(out / "ckpt") and not (out / "config.json").exists()


@pytest.mark.slow
def test_a_preference_is_learnt(tiny, tmp_path):
    """The base run prefers half of 200 chosen answers, the tuned run more than 95%.

    Break: tests/recipes/dpo.py: margin_B = chosen_B - rejected_B =>
    margin_B = rejected_B - chosen_B
    """
    base = make_base(tiny, 60, seq_len=32, batch_size=16, lr=5e-3)
    cfg = make_dpo(base, write_pairs(tmp_path / "p.jsonl", letter_pairs(600)), tmp_path / "tuned",
                   steps=60, batch_size=32, lr=3e-3, beta=0.2, val_frac=1 / 3, save_every=0)
    summary = train.main(cfg, task=dpo.TASK)
    root = Path(cfg.out_dir, "ckpt/reference")
    reference = ckpt.restore(root, 0, {"log_probs": np.zeros((600, 2), np.float32)})["log_probs"]
    assert 0.4 < np.mean(reference[:200, 0] > reference[:200, 1]) < 0.6
    assert summary["val_acc"] > 0.95 and summary["val_margin"] > 1
    assert summary["val_chosen_reward"] > summary["val_rejected_reward"] + 1
    assert summary["val_n_labels"] == 200


@pytest.mark.slow
def test_resumed_equals_straight_and_another_mesh_agrees(tiny, tmp_path):
    """Bit-exactly though its base run changed, and another mesh agrees to 1e-4.

    Break: tests/recipes/dpo.py: if is_known and saved.startswith( =>
    if False and saved.startswith(
    """
    base = make_base(tiny, 3, save_every=2, dp=1, fsdp=2, tp=2)
    newest = Path(base.out_dir, "ckpt/000000003")
    newest.rename(tmp_path / "newest")  # as if the base run were still at step 2
    pairs = write_pairs(tmp_path / "p.jsonl", letter_pairs(100))
    cfg = make_dpo(base, pairs, tmp_path / "straight", grad_accum_steps=2, steps=6, save_every=3,
                   log_every=2, lr=1e-2)
    straight = train.main(cfg, [copy_at(4, cfg)], dpo.TASK)
    assert straight["state"]["params"]["layers.w_up"].addressable_shards[0].data.size * 4 == (
        straight["state"]["params"]["layers.w_up"].size)
    other = train.main(dataclasses.replace(
        cfg, out_dir=str(tmp_path / "other"), fsdp=2, tp=1, sp=2, grad_accum_steps=1,
        logit_tiles=4, save_every=0, eval_batch_size=12), task=dpo.TASK)
    assert straight["val_loss"] < 0.65
    for name in ("val_loss", "val_margin", "val_chosen_reward", "loss", "grad_norm"):
        np.testing.assert_allclose(straight[name], other[name], rtol=1e-4, atol=1e-5)
    (tmp_path / "newest").rename(newest)  # the base run is trained further
    resumed = train.main(copy_of(cfg), task=dpo.TASK)
    assert resumed["val_loss"] == straight["val_loss"] != 0
    assert_same_arrays(cfg, copy_of(cfg))
    again = dataclasses.replace(copy_of(cfg), mode="eval")
    assert train.main(again, task=dpo.TASK)["val_loss"] == straight["val_loss"]
    shutil.rmtree(f"{again.out_dir}/ckpt/reference")
    with pytest.raises(ValueError, match="init_from was .* at step 2 .* at step 3 .*restore it"):
        train.main(again, task=dpo.TASK)
