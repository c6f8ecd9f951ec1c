# SPDX-License-Identifier: Apache-2.0
"""Evaluation: validation sets with names, batches of another size, and the best loss of a run."""
import contextlib
import dataclasses
import json
import math
import os
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import config
import data
import model
import step as steplib
import train
from test_data import make_bpe, write_rows
from test_model import as_f32, np_logits, random_params

# ---- validation sets with names


def test_entries_with_names_become_sets(tmp_path, monkeypatch):
    """Entries with the same name are one set; an existing path with "=" is a path.

    Break: data.py: if named and not _matches(text) else => if named else
    """
    monkeypatch.chdir(tmp_path)
    os.makedirs("lang=en")
    for name in ("code=a.txt", "lang=en/b.txt", "c.txt"):
        (tmp_path / name).write_text("some text")
    paths = ("code=a.txt", "lang=en/b.txt", "lang=en/*.txt", "lang=en", "c.txt")
    assert data.named_sets(paths) == {"": [*paths]} and data.named_sets(()) == {}
    hub = "hf://datasets/o/d@main/val/*.txt"
    named = ("code=c.txt", f"web={hub}", "code=d/*.py", "x.y-z=lang=en/b.txt")
    assert data.named_sets(named) == {
        "code": ["c.txt", "d/*.py"], "web": [hub], "x.y-z": ["lang=en/b.txt"]}
    words = "val_data 'c.txt': name each entry, as NAME=PATTERN, or none"
    with pytest.raises(ValueError, match=re.escape(words)):
        data.named_sets(("code=d.txt", "c.txt"))


@pytest.mark.parametrize("changes", [
    dict(packing="best_fit"), dict(data=("text.txt=1", "more.txt=1"))], ids=str)
def test_sets_with_names_have_the_sequences_of_their_files(changes, tiny, tmp_path, monkeypatch):
    """Each set has the batches of its files alone; a file may not be in two sets.

    Break: data.py: (open_files(files, field="val_data"), eval => (open_files(files[:1]), eval
    """
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "more.txt", "last.txt"):
        (tmp_path / name).write_text(f"{name} " * 200)
    for name in ("aa.jsonl", "bbbb.jsonl"):
        (tmp_path / name).write_text(f'{{"text": "{name}"}}\n' * 50)
    np.full(300, 7, np.uint16).tofile("ids.bin")
    second = "last.txt" if "packing" in changes else "ids.bin"  # documents, or tokens
    files = {"code": ("aa.jsonl",), "prose": ("bbbb.jsonl", second)}
    entries = [f"{name}={file}" for name in files for file in files[name]]
    cfg = tiny(**dict(data=("more.txt",), vocab_size=256, val_data=tuple(entries)) | changes)
    parts = data.open_text(("val",), cfg)["val"]
    assert [*parts] == ["code", "prose"]
    for name, part in parts.items():
        alone = data.open_text(("val",), dataclasses.replace(cfg, val_data=files[name]))["val"][""]
        assert part["n"] == alone["n"]
        for index in range(2):
            found, expected = (x["batch"](index, np.arange(8)) for x in (part, alone))
            assert found.keys() == expected.keys()
            assert all((found[key] == expected[key]).all() for key in found)
    for change, words in (
            (dict(val_data=("a=aa.jsonl", "b=./aa.jsonl")), "two sets, of val_data and val_data"),
            (dict(val_data=("a=text.txt",), data=("text.txt",)), "sets, of data and val_data"),
            (dict(val_data=("a=no.txt",)), "val_data 'no.txt': no such file")):
        with pytest.raises(ValueError, match=words):
            data.open_text(("train", "val"), dataclasses.replace(cfg, **change))


# ---- evaluation of a model that NumPy can follow: a probability for each byte


def unigram_loss(params, batch, cfg):
    labels_BT = batch["labels"]
    is_label_BT = labels_BT >= 0
    nll_BT = -jax.nn.log_softmax(params["w"])[jnp.maximum(labels_BT, 0)]
    hit_BT = labels_BT == params["w"].argmax()
    sums = {"loss": jnp.where(is_label_BT, nll_BT, 0).sum(),
            "acc": hit_BT.sum(dtype=jnp.float32)}
    sums["objective"] = sums["loss"]
    return sums, dict.fromkeys(sums, is_label_BT.sum(dtype=jnp.float32))


UNIGRAM = train.TEXT | {
    "table": lambda cfg: {"w": dict(shape=(256,), spec=P(), init=("normal", 1.0))},
    "init": lambda key, cfg: {"w": jnp.zeros(256)},
    "loss": unigram_loss,
    "flops": lambda means, cfg: (6e6, "2e6 forward, 4e6 backward"),
    "sample": None,
    "memory_flags": lambda sp, cfg: [],
}


@pytest.mark.parametrize("size, accum", [(0, 2), (24, 2)])
def test_means_of_sets_are_those_of_numpy(size, accum, tiny, tmp_path, capsys, monkeypatch):
    """Loss, accuracy and labels of each set and of all, in the summary and on the screen. The bar
    moves with each batch, and hooks get the events of an evaluation.

    Break: train.py: sums_of[""] = jax.tree.map(lambda *values: sum(values), *sums_of.values()) =>
    sums_of[""] = jax.tree.map(lambda *values: max(values), *sums_of.values())
    """
    texts = {"code": "def f(x): return x + 1\n" * 30, "prose": "some words, and more. " * 11}
    entries = []
    labels = {}
    for name, text in texts.items():
        for i, piece in enumerate((text[:100], text[100:])):  # two files in each set
            (tmp_path / f"{name}{i}.txt").write_text(piece)
            entries.append(f"{name}={tmp_path}/{name}{i}.txt")
        documents = f"{text[:100]}\0{text[100:]}\0"  # 0 ends a document
        labels[name] = np.frombuffer(documents.encode(), np.uint8)
    w = np.random.default_rng(0).normal(size=256).astype(np.float32)
    cfg = tiny(mode="eval", data=(), val_data=tuple(entries), eval_batches=0, batch_size=16,
               grad_accum_steps=accum, eval_batch_size=size)
    moved, events = [], []
    monkeypatch.setattr(train, "eval_bar", lambda n: contextlib.nullcontext(
        types.SimpleNamespace(update=lambda: moved.append(n))))

    def note(event, value):
        if event in ("load", "start", "before_eval", "end"):
            events.append(event)
        return value | {"noted": True} if event == "end" else None

    found = train.main(cfg, [note], UNIGRAM, params={"w": w})
    assert events == ["load", "start", "before_eval", "end"] and found["noted"]

    nll = np.log(np.exp(w.astype(np.float64)).sum()) - w.astype(np.float64)
    screen = capsys.readouterr().out.splitlines()
    labels[""] = np.concatenate([*labels.values()])
    for name, ids in labels.items():
        end = f"/{name}" if name else ""
        assert found[f"val_n_labels{end}"] == len(ids)
        assert found[f"val_loss{end}"] == pytest.approx(nll[ids].mean(), rel=1e-5)
        assert found[f"val_acc{end}"] == pytest.approx((ids == w.argmax()).mean(), rel=1e-6)
        head = f"             {name:<5}" if name else "step      0"
        accuracy = (ids == w.argmax()).mean()
        line = f"{head}  validation loss {nll[ids].mean():.4f}  accuracy {accuracy:.3f}"
        if name:  # a byte is a token
            bits = nll[ids].mean() / math.log(2)
            assert found[f"val_bits_per_byte{end}"] == pytest.approx(bits, rel=1e-5)
            line += f"  {bits:.3f} bits/byte"
        assert line in screen, f"edit `line` here, if evaluations have new metrics: {screen}"
    n_tokens = 16 * (size or 16)  # of a batch
    n_batches = sum(math.ceil(len(labels[name]) / n_tokens) for name in ("code", "prose"))
    assert moved == [n_batches] * n_batches
    assert found["eval_tokens_per_s"] == pytest.approx(n_batches * n_tokens / found["eval_s"])
    tflops = 2e6 * found["eval_tokens_per_s"] / jax.device_count() / 1e12  # forward alone
    assert found["eval_tflops_per_device"] == pytest.approx(tflops)
    assert json.loads(screen[-1]) == found

    first = train.main(dataclasses.replace(cfg, eval_batches=1), task=UNIGRAM, params={"w": w})
    assert first["val_n_labels/prose"] == min(len(labels["prose"]), 16 * (size or 16))
    assert first["val_n_labels/code"] <= 16 * (size or 16) < len(labels["code"])


# ---- values per example


def np_nats(params, ids, cfg):
    """The loss of each id but the first, in float64."""
    logits, = np_logits(params, np.array([ids[:-1]]), cfg)
    return np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("changes", [
    dict(packing="best_fit", padding_side="left", grad_accum_steps=2, logit_tiles=2),
    dict(packing="none", dp=2, tp=2, sp=2, grad_accum_steps=4, logit_tiles=4),
    dict(packing="stream", dp=4, fsdp=2, eval_batch_size=16),
], ids=lambda changes: changes["packing"])
def test_the_values_of_each_text_are_those_of_numpy(changes, tiny, tmp_path):
    """Documents, or sequences of the stream, have the loss of float64, their labels and bytes, in
    the order of the data. They add up to val_loss. Padding is not written. Hooks get the loss of
    each position.

    Break: step.py: lambda x: x.swapaxes(0, 1).reshape( => lambda x: x.reshape(
    """
    tok = make_bpe()
    tok.save(str(tmp_path / "t.json"))
    rng = np.random.default_rng(0)
    texts, entries = {}, []
    for name, n in (("web", 21), ("code", 9)):
        texts[name] = [" ".join(rng.choice(["lower", "low", "löw est", "q"], size))
                       for size in rng.integers(1, 5, n)]
        rows = [{"text": text} for text in ("", *texts[name])]  # an empty one is no document
        entries.append(f"{name}={write_rows(tmp_path / f'{name}.jsonl', rows)}")
    cfg = tiny(mode="eval", data=(), val_data=tuple(entries), tokenizer=str(tmp_path / "t.json"),
               examples_file=str(tmp_path / "new/examples.jsonl"), eval_batches=0, dtype="float32",
               **dict(dp=1) | changes)
    model_cfg = train.setup_run(cfg).cfg
    params = random_params(model_cfg)
    shapes = set()

    def watch(event, row):
        if event == "eval_batch":
            shapes.update((name, x.shape) for name, x in row["examples"].items())

    summary = train.main(cfg, [watch], params=as_f32(params))
    lines = (tmp_path / "new/examples.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    expected = []
    eos, T = tok.token_to_id("<|endoftext|>"), cfg.seq_len
    for name in texts:
        ids = [[*tok.encode(text, add_special_tokens=False).ids, eos] for text in texts[name]]
        n_bytes = [len(text.encode()) + 1 for text in texts[name]]
        rows = [row for row in found if row["set"] == name]
        if cfg.packing == "stream":
            stream = np.concatenate([[eos], *ids])
            for i, first in enumerate(range(1, len(stream), T)):
                start = min(first - 1, len(stream) - 1 - T)
                nats = np_nats(params, stream[start : start + T + 1], model_cfg)
                expected.append((name, i, nats[first - 1 - start :]))
            assert sum(row["bytes"] for row in rows) == pytest.approx(sum(n_bytes), abs=len(rows))
            continue
        for i, one in enumerate(ids):
            expected.append((name, i, np_nats(params, [eos, *one][: T + 1], model_cfg)))
            is_cut = len(one) > T
            assert rows[i]["bytes"] < n_bytes[i] if is_cut else rows[i]["bytes"] == n_bytes[i]
    assert [(row["set"], row["id"], row["n_labels"]) for row in found] == [
        (name, i, len(nats)) for name, i, nats in expected]
    np.testing.assert_allclose([row["nats"] for row in found],
                               [nats.sum() for *_, nats in expected], rtol=1e-5)
    mean = sum(row["nats"] for row in found) / sum(row["n_labels"] for row in found)
    assert summary["val_loss"] == pytest.approx(mean, rel=1e-6)
    assert shapes == {("nats", (cfg.eval_batch_size or cfg.batch_size, T))}


def test_a_task_without_values_per_example_is_refused(tiny, tmp_path):
    """Its loss takes no `examples`, or its source has none; and a file that cannot be written.

    Break: train.py: if not all(is_given): => if not any(is_given):
    """
    def open_without(parts, cfg):
        opened = data.open_text(parts, cfg)
        del opened["val"][""]["examples"]
        return opened

    for task in (UNIGRAM, train.TEXT | {"open": open_without}):
        with pytest.raises(ValueError, match="examples_file: this task has no values per example"):
            train.main(tiny(mode="eval", examples_file="e.jsonl"), (), task, params={})
    with pytest.raises(ValueError, match="examples_file .*: cannot be written: .*irectory"):
        train.main(tiny(mode="eval", examples_file=str(tmp_path)), params={})


# ---- batches of another size


def test_an_evaluation_batch_must_fit_the_mesh_and_keeps_the_divisor_of_a_sequence():
    """--eval_batch_size must fit the devices; each sequence counts as in training.

    Break: config.py: loss_divisor=cfg.loss_divisor * size / cfg.batch_size) =>
    loss_divisor=cfg.loss_divisor)
    """
    cfg = config.Config(batch_size=32, grad_accum_steps=4, dp=2, fsdp=4, loss_norm="constant",
                        loss_divisor=77.0)
    assert config.mesh_sizes(dataclasses.replace(cfg, eval_batch_size=24), 8)[1] == []
    error, = config.mesh_sizes(dataclasses.replace(cfg, eval_batch_size=12), 8)[1]
    assert error.startswith("eval_batch_size 12: must be a multiple of dp x fsdp x ep")
    assert error.endswith(", as 8 or 16")
    assert config.evaluation_config(cfg) is cfg
    eval_cfg = config.evaluation_config(dataclasses.replace(cfg, eval_batch_size=24))
    assert (eval_cfg.batch_size, eval_cfg.grad_accum_steps) == (24, 1)
    in_training = float(model._other_loss_norm(np.zeros((8, 4)), cfg)[1])
    assert float(model._other_loss_norm(np.zeros((8, 4)), eval_cfg)[1]) == in_training


def test_the_memory_of_an_evaluation_is_that_of_its_batches(tiny, monkeypatch):
    """The estimate counts batches of --eval_batch_size, and the advice is the batches of training.

    Break: train.py: flags.insert(0, {"eval_batch_size": 0}) => pass
    """
    cfg = tiny(mode="eval", dp=1, seq_len=512)
    peaks = {}
    for name, change in (("small", {}), ("large", dict(eval_batch_size=64)),
                         ("as_large", dict(batch_size=64))):
        run = train.setup_run(dataclasses.replace(cfg, **change), UNIGRAM, jax.devices()[:1])
        peaks[name] = train.count_programs(run)["peaks"]["evaluation"]
    assert peaks["large"] == peaks["as_large"] > 4 * peaks["small"]
    monkeypatch.setattr(steplib, "memory_limit", lambda mesh: peaks["small"])
    run = train.setup_run(dataclasses.replace(cfg, eval_batch_size=64), UNIGRAM, jax.devices()[:1])
    assert train.memory_advice(run).startswith("--eval_batch_size 0 (")
    run.cfg = dataclasses.replace(run.cfg, steps=77)
    assert train.evaluation_of(run)["cfg"].steps == 77


# ---- on the screen


def test_a_long_evaluation_has_a_progress_bar_on_a_terminal(monkeypatch, capsys):
    """The bar appears on a terminal after LONG_EVAL_S, and is gone afterwards.

    Break: train.py: delay=LONG_EVAL_S, leave=False, => delay=LONG_EVAL_S, leave=True,
    """
    def screen(seconds, is_terminal=True):
        monkeypatch.setattr(train, "LONG_EVAL_S", seconds)
        monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
        with train.eval_bar(3) as bar:
            for _ in range(3):
                bar.update()
        return capsys.readouterr().err

    shown, *_, cleared, _ = screen(0.0).removeprefix("\r").split("\r")
    assert shown.startswith("evaluating 0/3 |") and cleared.strip() == ""
    assert screen(60.0) == "" == screen(0.0, is_terminal=False)
