# SPDX-License-Identifier: Apache-2.0
"""The recipe for reinforcement learning."""
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import config
import model
import rl
import train
from conftest import ROOT
from test_real_data import chat_tokenizer, write_rows
from test_recipes import assert_same_arrays, copy_at, copy_of

SUMS = json.loads((ROOT / "tests/recipes/sums.json").read_text()) | {"dtype": "float32"}
REWARDS = """
def score(prompt, answer, row):
    assert prompt == row["shown"], (prompt, row)
    return row["scale"] * len(answer)

def none(prompt, answer, row):
    return 1e300 if row.pop("label") else -1
"""


def log_softmax_64(logits):
    logits = np.float64(logits)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_answers_loss_and_gradient():
    """Labels are an answer and its end, advantages leave its own reward out. The clipped objective,
    the divergence k3 and their gradient equal NumPy's in float64 and finite differences.

    Break: tests/recipes/rl.py: jnp.exp(log_ratio_BT) - log_ratio_BT - 1 => -log_ratio_BT
    """
    cfg = rl.RlConfig(**SUMS | dict(kl=0.3, inner_steps=2, attention="xla"))
    cfg = config.derive_text(cfg)
    mesh = train.steplib.make_mesh(dataclasses.replace(cfg, fsdp=1), jax.devices()[:1])
    shapes = train.batch_structs({"batch": rl.batch_shapes}, cfg, mesh)
    task, hook = rl.make_task()
    source = task["open"](("train",), cfg)["train"]
    asked = train.make_batch_at(SimpleNamespace(cfg=cfg, batch=shapes), source)(2)
    first, drawing, params = (model.init(jax.random.key(i), cfg) for i in range(3))
    hook("load", {"params": first, "step": np.int32(0)})
    hook("start", {"config": dataclasses.asdict(cfg)})
    hook("state", {"params": drawing, "step": np.int32(2)})
    batch = hook("data", asked)
    hook("state", {"params": params, "step": np.int32(3)})
    assert hook("data", asked) is batch  # the second step on these answers

    # The answers.
    got = jax.tree.map(np.asarray, batch)
    labelled = got["labels"] != model.IGNORE
    n_prompt = 1 + len("1+2=")
    for i, at in enumerate(labelled):
        ids = got["labels"][i, at].tolist()
        assert np.flatnonzero(at).tolist() == [*range(n_prompt - 1, n_prompt - 1 + len(ids))]
        assert got["tokens"][i, n_prompt:][: len(ids) - 1].tolist() == ids[:-1]
        assert ids.index(0) == len(ids) - 1 if 0 in ids else len(ids) == 3
        assert got["is_cut"][i] == (0 not in ids)
        prompt = bytes(got["tokens"][i, 1:n_prompt].tolist()).decode()
        right = f"{eval(prompt[:-1])}\0"
        answer = bytes(ids).decode()
        n_right = max(n for n in range(4) if answer[:n] == right[:n] and n <= len(right))
        assert got["rewards"][i] == np.float32(n_right / len(right))
    groups = got["rewards"].reshape(-1, cfg.group_size)
    assert 0 < got["is_cut"].sum() < 256 and groups.any() and (got["example"] < 90).all()
    for group, advantages in zip(groups, got["advantage"].reshape(groups.shape)):
        for i, advantage in enumerate(advantages):
            np.testing.assert_allclose(
                advantage, group[i] - np.delete(group, i).mean(), atol=1e-6)

    # The objective, of the log-probabilities of the labels. Larger advantages: more are clipped.
    batch = batch | {"advantage": jax.random.normal(jax.random.key(3), (256,))}
    hit = labelled[..., None] & (got["labels"][..., None] == np.arange(cfg.vocab_size))

    def logp_64(logits):
        return np.where(hit, log_softmax_64(logits), 0).sum(axis=-1)

    advantage_B1 = np.float64(batch["advantage"])[:, None]
    forward = jax.jit(lambda params: model.forward(params, batch, cfg))
    reference_BT, old_BT = (logp_64(forward(x)) for x in (first, drawing))

    def terms_64(logp_BT):
        ratio = np.exp(logp_BT - old_BT)
        clipped = np.minimum(np.maximum(ratio, 0.8), 1.2)
        divergence = np.exp(reference_BT - logp_BT) - (reference_BT - logp_BT) - 1
        gain = np.minimum(ratio * advantage_B1, clipped * advantage_B1)
        return labelled * (0.3 * divergence - gain), labelled * divergence

    def objective(params):
        sums, counts = rl.loss(params, batch, cfg)
        return sums["objective"], (sums, counts)

    logits, pull_back = jax.vjp(forward, params)
    (_, (sums, counts)), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    logp_BT = logp_64(logits)
    expected, divergence = terms_64(logp_BT)
    np.testing.assert_allclose(sums["objective"], expected.sum(), rtol=1e-4)
    np.testing.assert_allclose(sums["kl"], divergence.sum(), rtol=1e-4)
    np.testing.assert_allclose(sums["loss"], -logp_BT.sum(), rtol=1e-5)
    assert sums["cut_frac"] == got["is_cut"].sum() and sums["answer_len"] == labelled.sum()
    assert counts["objective"] == 256 and counts["kl"] == labelled.sum()
    slope = (terms_64(logp_BT + 1e-5)[0] - terms_64(logp_BT - 1e-5)[0]) / 2e-5
    is_clipped = np.isclose(slope, 0.3 * (1 - np.exp(reference_BT - logp_BT)))[labelled]
    assert 0.1 < is_clipped.mean() < 0.9
    d_logits = (hit - np.exp(log_softmax_64(logits)) * labelled[..., None]) * slope[..., None]
    for name, want in pull_back(jnp.float32(d_logits))[0].items():
        np.testing.assert_allclose(grads[name], want, atol=1e-4 * np.abs(want).max(), err_msg=name)


def write_prompts(folder, tokenizer, n=20):
    """A file of chats with columns for the reward, and one of rewards."""
    rows = []
    for i in range(n):
        question = ["low", "lower", "so"][i % 3]
        shown = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        rows.append({"chat": [{"role": "user", "content": question}], "shown": shown, "scale": 0.5,
                     "label": False, "images": "of the reward alone"})
    (folder / "my_reward.py").write_text(REWARDS)
    return str(write_rows(folder / "prompts.jsonl", rows)), f"{folder}/my_reward.py:"


def test_chats_with_rewards_of_a_file(tiny, tmp_path, capsys):
    """Two rewards get the rendered prompt, the answer and the row; both are metrics, and their sum
    is evaluated, kept and sampled. A text run is evaluated and sampled by them.

    Break: tests/recipes/rl.py: value = function(prompt["text"], answer, dict( =>
    value = function(answer, prompt["text"], dict(
    """
    tokenizer = chat_tokenizer(tmp_path / "t")
    prompts, rewards = write_prompts(tmp_path, tokenizer)
    base = dataclasses.asdict(tiny(tokenizer=tokenizer["name"], steps=2, eval_every=2,
                                   sample_tokens=1, seq_len=40, eval_batches=0))
    cfg = rl.RlConfig(**base | dict(
        data=(prompts,), columns=("messages=chat",), group_size=4, answer_tokens=6,
        reward=(rewards + "score", rewards + "none"), val_frac=0.3, keep_best="val_reward",
        temperature=0.0))
    task, hook = rl.make_task()
    summary = train.main(cfg, [hook], task)
    rows = {row["event"]: row for row in ckpt.read_log(cfg.out_dir)}
    for row, prefix in ((rows["log"], ""), (rows["eval"], "val_")):
        both = row[prefix + "reward_score"] + row[prefix + "reward_none"]
        assert row[prefix + "reward_none"] == -1 and np.isclose(row[prefix + "reward"], both)
        assert 0 <= row[prefix + "cut_frac"] <= 1 and row[prefix + "answer_len"] <= 6
    assert summary["best_val_reward"] == rows["eval"]["val_reward"] and summary["val_n_labels"] == 6
    sample = rows["sample"]
    for text, prompt, reward in zip(sample["texts"], sample["prompts"], sample["rewards"]):
        assert reward == 0.5 * len(text[len(prompt):]) - 1
    assert sample["sample_reward"] == np.mean(sample["rewards"]) and len(sample["texts"]) == 4

    # A run of train.py, by greedy answers.
    text = dataclasses.asdict(tiny(**base | {"out_dir": str(tmp_path / "text")}))
    train.main(config.Config(**text))
    text |= dict(columns=cfg.columns, reward=cfg.reward[:1], answer_tokens=6, temperature=0.0)
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    rows = [row | {"messages": row["chat"], "images": ""} for row in rows]
    asked, samples = write_rows(tmp_path / "asked.jsonl", rows), tmp_path / "samples.jsonl"
    task, hook = rl.make_task()
    found = train.main(rl.RlConfig(**text | dict(
        mode="sample", prompts=str(asked), samples_file=str(samples))), [hook], task)
    task, hook = rl.make_task()
    evaluated = train.main(rl.RlConfig(**text | dict(mode="eval", val_data=(prompts,))),
                           [hook], task)
    written = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [row["reward"] for row in written] == found["rewards"] and len(written) == 20
    np.testing.assert_allclose(evaluated["val_reward"], found["sample_reward"], rtol=1e-6)
    assert f"mean reward of 20 samples: {found['sample_reward']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("flags, error", [
    ("--data {prompts}", "reward: is missing; name a function"),
    ("--data {prompts} --reward {rewards}none", "reward none: is 1e+300 for the prompt '<|im_st"),
    ("--data {prompts} --reward {rewards}no", "the file has no function 'no' (legal: score, none)"),
    ("--data {prompts} --reward {rewards}none {rewards}none", "two functions have one name"),
    ("--reward {rewards}none", "data '': no prompt to train on"),
    ("--data {prompts} --reward {rewards}none --seq_len 30 --answer_tokens 29",
     "no prompt to train on"),
    ("--config {sums} --answer_tokens 8", "answer_tokens 8: must be at most seq_len 7"),
    ("--group_size 3", "group_size 3: must be at least 2, and divide batch_size 64"),
    ("--z_loss 0.1", "z_loss: has no effect on answers"),
    ("--config {sums} --vocab_size 50", "': token id "),
])
def test_a_wrong_flag_or_reward_is_one_sentence(flags, error, tmp_path, cache_dir, capsys):
    """The exit code is 2, and the message names field or function.

    Break: tests/recipes/rl.py: if not abs(number) <= float(np.finfo(np.float32).max): => if False:
    """
    tokenizer = chat_tokenizer(tmp_path / "t")
    prompts, rewards = write_prompts(tmp_path, tokenizer)
    Path(prompts).write_text(Path(prompts).read_text().replace("false", "true"))
    flags = flags.format(prompts=prompts, rewards=rewards,
                         sums=ROOT / "tests/recipes/sums.json").split()
    if "--data" in flags:
        flags += ["--tokenizer", tokenizer["name"], "--columns", "messages=chat"]
        flags += [] if "--seq_len" in flags else ["--seq_len", "40", "--answer_tokens", "6"]
    task, hook = rl.make_task()
    code = train.cli(
        ["--d_model=32", "--n_layers=1", f"--out_dir={tmp_path}/out", f"--cache_dir={cache_dir}",
         *flags], [hook], task, rl.RlConfig)
    assert code == 2 and error in capsys.readouterr().err


@pytest.mark.slow
def test_resumed_within_a_group_of_steps_equals_straight(tmp_path, cache_dir):
    """A run over two devices with a reference and three steps on each batch of answers, as it was
    at step 6, resumes from step 4 bit-identically.

    Break: tests/recipes/rl.py: elif "answers" not in run["kept"]: => elif False:
    """
    cfg = rl.RlConfig(**SUMS | dict(
        out_dir=str(tmp_path / "straight"), cache_dir=cache_dir, inner_steps=3, steps=8,
        save_every=4, eval_every=0, log_every=1, d_model=32, n_layers=1, fsdp=2, sample_every=0,
        batch_size=64))
    task, hook = rl.make_task()
    straight = train.main(cfg, [hook, copy_at(6, cfg)], task)
    task, hook = rl.make_task()
    resumed = train.main(copy_of(cfg), [hook], task)
    assert_same_arrays(cfg, copy_of(cfg))
    assert resumed["val_kl"] == straight["val_kl"] > 0
    assert resumed["reward"] == straight["reward"] > 0


@pytest.mark.slow
def test_a_model_learns_to_add(tmp_path, cache_dir):
    """The mean reward rises from below 0.02 to above 0.04 in 30 steps.

    Break: tests/recipes/rl.py: (cfg.kl * kl_BT - gain_BT) => (cfg.kl * kl_BT + gain_BT)
    """
    task, hook = rl.make_task()
    cfg = rl.RlConfig(**SUMS | dict(
        out_dir=str(tmp_path / "out"), cache_dir=cache_dir, steps=30, n_layers=1,
        schedule="constant", kl=0.0, eval_every=0, save_every=0, sample_every=0))
    train.main(cfg, [hook], task)
    rewards = [row["reward"] for row in ckpt.read_log(cfg.out_dir) if row["event"] == "log"]
    assert rewards[0] < 0.02 and rewards[-1] > 0.04
