# SPDX-License-Identifier: Apache-2.0
"""Tests of whole runs through train.py: output, hooks, stops, resumes, kills, many processes."""
import contextlib
import dataclasses
import errno
import fcntl
import gc
import gzip
import itertools
import json
import multiprocessing
import os
import platform
import pty
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import types
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec as P
from matplotlib.figure import Figure

import ckpt
import config
import data
import model
import step as steplib
import train

ROOT = Path(__file__).resolve().parent.parent
NEW_EVENT = "if you added an event to the loop, add it to the expected ones in this test"


def complete_rows(out):
    """Return the complete rows of out/metrics.jsonl, to which a run may still write."""
    text = (Path(out) / "metrics.jsonl").read_text()
    return map(json.loads, text[: text.rfind("\n") + 1].splitlines())


def rows(out, event):
    """Return the rows of one event in out/metrics.jsonl."""
    return [row for row in complete_rows(out) if row["event"] == event]


def event_steps(out, events):
    """Return (event, step) of these events, in the order of metrics.jsonl."""
    return [(row["event"], row["step"]) for row in complete_rows(out)
            if row["event"] in events.split()]


def losses(out):
    """Return what must be bit-identical: losses, rates, evaluations, the last save's digest."""
    saves = [(r["step"], r["digest"]) for r in rows(out, "save") if r["kind"] == "save"]
    return ([(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in rows(out, "log")],
            [(r["step"], r["val_loss"], r["val_acc"]) for r in rows(out, "eval")], saves[-1:])


def arrays(out):
    """Return {name: NumPy array} of the newest checkpoint."""
    root = Path(out) / "ckpt"
    step = ckpt.latest(root)
    like = {name: np.zeros(d["shape"], d["dtype"])
            for name, d in ckpt.read_meta(root, step)["arrays"].items()}
    return ckpt.restore(root, step, like)


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def stop_at(step, at="save"):
    """Return a hook that stops the run by a signal at an event of `step`."""
    def hook(event, value):
        if event == at and value["step"] == step:
            signal.raise_signal(signal.SIGTERM)
    return hook


def crash_at(at, step):
    """Return a hook that raises at an event of `step`."""
    def hook(event, value):
        if event == at and value["step"] == step:
            raise RuntimeError("crash")
    return hook


def refused(words, *args, **given):
    """Check that train.main raises a ValueError with these words."""
    with pytest.raises(ValueError, match=words):
        train.main(*args, **given)


def wait_for(ready, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert ready()


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train"])  # import once, before JAX has devices or threads


def _run(argv, devices, log):
    for stream, mode in ((1, os.O_CREAT | os.O_TRUNC), (2, os.O_APPEND)):
        os.dup2(os.open(log, os.O_WRONLY | mode), stream)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests' parent may ignore SIGHUP
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(
        "device_count=8", f"device_count={devices}")
    train.OBSERVERS = train.OBSERVERS[:-1]  # no plot, as in the fixture `tiny`
    code = train.cli(argv)
    jax.distributed.shutdown()  # waits for the other processes; a fork skips JAX's exit handlers
    sys.exit(code)


def command(cfg, devices=1, flags=()):
    """Start a real process of train.py's command line; return it and the path of its log."""
    Path(cfg.out_dir).parent.mkdir(parents=True, exist_ok=True)
    path, log = Path(cfg.out_dir + ".json"), Path(f"{cfg.out_dir}{'.'.join(flags[-1:])}.log")
    path.write_text(config.to_json(cfg))
    run = FORKS.Process(target=_run, args=(["--config", str(path), *flags], devices, log),
                        daemon=True)
    log.write_text("")
    run.start()
    return run, log


def ended(run, log, timeout_s=120):
    """Wait for a process of `command`; return (exit code, output)."""
    run.join(timeout_s)
    if run.exitcode is None:
        run.kill()
        raise TimeoutError(f"still running after {timeout_s} s: {log.read_text()}")
    return run.exitcode, log.read_text()


# ---- a run

def test_a_run_writes_its_events_checkpoints_and_plot(tiny, capsys, monkeypatch):
    """Events, fields, files and printed lines; metrics are read while the next step runs.

    Break: train.py: "epoch": step * cfg.batch_size / run.train_data["n"], => "epoch_": 0,
    """
    monkeypatch.undo()  # `tiny` disables the plot
    cfg = tiny(steps=10, max_to_keep=2, sample_tokens=5, sample_every=5, dp=8,
               watch=("*_norm", "!layers*"))
    batches, lags = [], []

    def hook(event, value):
        if event == "data":
            batches.append(value)
        if event == "step":
            lags.append(len(batches) - value["step"])

    summary = train.main(cfg, hooks=[hook])
    assert lags == [1, 1, 1, 0, 0, 1, 1, 0, 1, 0]
    for x in batches[0].values():  # each device has a row of its own
        assert x.sharding.shard_shape(x.shape) == (1, 16)
    out, output = Path(cfg.out_dir), capsys.readouterr().out
    assert {"start", "log", "eval", "save", "sample", "stop", "end"} == {
        row["event"] for row in complete_rows(out)}, NEW_EVENT
    for event, steps, fields in (
            ("start", [0], "versions devices mesh n_params tokens_per_step flops_per_token "
             "flops_formula compile_s memory_bytes_per_device config run_id"),
            ("log", [*range(1, 11)], "loss lr grad_norm tokens epoch tokens_per_s step_s "
             "data_wait_s model_tflops_per_device mfu ppl memory_peak_bytes acc goodput"),
            ("eval", [4, 8, 10], "val_loss val_ppl val_acc val_n_labels val_bits_per_byte"),
            ("save", [4, 8, 10], "kind why digest"), ("sample", [5, 10], "texts prompts")):
        assert [row["step"] for row in rows(out, event)] == steps
        assert not set(fields.split()) - set(rows(out, event)[0])
    assert ckpt.steps(out / "ckpt") == [8, 10]
    assert config.from_json((out / "config.json").read_text()).steps == 10
    assert (out / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    start, log, evals = rows(out, "start")[0], rows(out, "log"), rows(out, "eval")
    assert (start["devices"], start["processes"], start["unit"]) == ("8 x cpu", 1, "token")
    assert start["n_params"] == 256 * 32 + 32 * (2 * 32 + 2 * 16 + 3 * 96) + 3 * 32 + 2 * 8, (
        "if you added a parameter, edit the number in this test")
    assert start["tokens_per_step"] == 8 * 16 and re.fullmatch("[0-9a-f]{8}", start["run_id"])
    assert start["versions"]["python"] == platform.python_version()
    assert summary["checkpoint"] == str(out / "ckpt/000000010") and summary["mesh"].size == 8
    assert summary["loss"] == log[-1]["loss"] and summary["val_loss"] == evals[-1]["val_loss"]
    assert [row["lr"] for row in log[:3]] == pytest.approx([1e-3, 2e-3, 2e-3])
    assert not {"finite", "stop", "eval_s", "eval_tokens_per_s"} & set(summary)
    flags = " ".join(config.changed_flags(cfg))
    assert output.startswith(f"run {out}\nconfig: {flags}\n") and " --steps 10 " in flags
    lines = output[output.index("0.02M"):].splitlines()
    assert lines[:4] == [
        "0.02M parameters on 8 x cpu, mesh dp=8 fsdp=1 ep=1 tp=1 sp=1",
        f"{start['config']['dtype']}, attention xla, 128 tokens per step",
        "train data: 19,244 tokens, 1,203 sequences, 1 documents",
        "val data: 2,138 tokens, 134 sequences"], "if you changed what is printed, edit it here"
    compiling = lines.index("compiling the training step, for 10 steps ...")
    assert "per device; from a fresh initialization, at step 0" in lines[compiling + 1]
    for row in log:
        assert list(row["watch"]) == ["final_norm"] and row["mfu"] is None
        assert sum(row["watch"]["final_norm"]["counts"]) == 32
        assert 0 < row["watch"]["final_norm"]["grad_norm"] < row["grad_norm"]
        assert f"step {row['step']:6}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  " in output
    assert output.count(" sample -") == 2
    assert lines[-1].startswith("done: all 10 steps are done; ")


def test_metrics_jsonl_has_correct_tokens_times_and_rates(tiny, monkeypatch):
    """Tokens, times and rates follow from a simulated clock and 8 devices of 2 TFLOP/s.

    Break: train.py: flops * units_per_s / jax.device_count() / 1e12 => flops * units_per_s / 1e12
    """
    monkeypatch.setattr(steplib, "peaks", lambda kind: (2.0, None))
    now, waits = [100.0], itertools.count(0, 0.125)  # each wait for data takes 0.125 s
    monkeypatch.setattr(resource, "getrusage", lambda who: types.SimpleNamespace(ru_maxrss=70_000))
    monkeypatch.setattr(train, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(data, "time", types.SimpleNamespace(perf_counter=lambda: next(waits)))
    seconds = {"loss_fn": 3, "load": 5, "start": 7, "data": 1, "save": 10, "eval": 100,
               "stop": 1000}
    begun = []

    def spend(event, value):
        now[0] += seconds.get(event, 0)
        if event == "before_epoch":
            begun.append((value["step"], value["epoch"]))

    cfg = tiny(steps=config.Config.steps, epochs=2.1, log_every=4, remat="full")
    text = Path(cfg.data[0])
    text.write_text(text.read_text()[:530])  # 477 tokens to train on, in 30 rows
    train.main(cfg, hooks=[spend])
    start, (four, eight) = rows(cfg.out_dir, "start")[0], rows(cfg.out_dir, "log")
    flops, _ = model.flops_per_token(train.setup_run(cfg).cfg, 16)
    opened = data.open_text(("train", "val"), cfg)["train"]
    assert flops == start["flops_per_token"] and start["compile_s"] == 3
    # Each step takes 1 s, of which 0.125 s is a wait for data. The launch takes 15 s. The save and
    # the evaluation after step 4 take 110 s.
    for row, goodput in ((four, 3.5 / 19), (eight, 7 / 133)):
        assert row["tokens"] == row["step"] * 8 * 16 and row["epoch"] == row["step"] * 8 / 30
        assert (row["step_s"], row["tokens_per_s"], row["data_wait_s"]) == (1, 128, 0.125)
        assert row["goodput"] == goodput and row["memory_peak_bytes"] == 70_000 * 1024
        np.testing.assert_allclose(row["model_tflops_per_device"], 128 * flops / 8 / 1e12)
        np.testing.assert_allclose(row["mfu"], 128 * flops / 8 / 1e12 / 2)
        np.testing.assert_allclose(row["ppl"], np.exp(row["loss"]), rtol=1e-6)
        batches = [opened["batch"](i, np.arange(8)) for i in range(row["step"] - 4, row["step"])]
        assert row["n_labels"] == sum((batch["labels"] != -100).sum() for batch in batches)
    ended = [(row["step"], row["epoch"]) for row in rows(cfg.out_dir, "epoch")]
    assert begun == [(0, 1), (4, 2)] and ended == [(4, 1), (8, 2)]
    assert eight["time_s"] == {"start": 12, "compile": 3, "step": 7, "data": 1, "save": 10,
                               "eval": 100, "other": 0}
    assert rows(cfg.out_dir, "end")[0]["wall_s"] == 1243 and not rows(cfg.out_dir, "sample")
    assert ckpt.read_meta(Path(cfg.out_dir) / "ckpt", 4)["data"] | {"fingerprint": ""} == {
        "fingerprint": "", "epoch": 1, "sequence": 2}


def write_texts(tmp_path, texts):
    """Write each text as a document of a file; return its path."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_logged_values_are_means_over_the_steps_since_the_last_row(tiny, tmp_path):
    """A log row has NumPy's means by labels, also over a resume, and FLOPs of attended keys alone.

    Break: train.py: in saved["since_log"].items(): => in ():
    """
    steps = {}

    def keep(event, row):
        if event == "step":
            steps[row["step"]] = dict(row)

    lengths = np.arange(2, 34) % 31 + 2  # with bos: an epoch of 32 documents is 4 steps
    texts = ["a" * (n - 1) for n in lengths]
    make = partial(
        tiny, data=(write_texts(tmp_path, texts),), packing="none", seq_len=32, val_frac=0.0,
        dtype="float32", log_every=4, eval_every=0, save_every=3)
    straight = make(out_dir=str(tmp_path / "straight"))
    train.main(straight, hooks=[keep])
    start, logged = rows(straight.out_dir, "start")[0], rows(straight.out_dir, "log")
    assert [row["step"] for row in logged] == [4, 8]
    for row in logged:
        window = [steps[row["step"] - i] for i in (3, 2, 1, 0)]
        labels = np.array([step["n_labels"] for step in window])
        assert len(set(labels)) > 1 and row["n_labels"] == labels.sum()
        for name in ("loss", "acc", "z", "objective"):
            mean = np.average([step[name] for step in window], weights=labels)
            np.testing.assert_allclose(row[name], mean, rtol=1e-12)
        assert (row["lr"], row["grad_norm"]) == (window[-1]["lr"], window[-1]["grad_norm"])
        assert row["padding"] == pytest.approx(1 - lengths.sum() / 32**2)
        keys = (lengths * (lengths + 1) / 2).sum() / 32**2
        assert row["attended_keys"] == pytest.approx(keys)
        flops = row["model_tflops_per_device"] * 1e12 * 8 / row["tokens_per_s"]
        per_key = 12 * straight.n_layers * straight.d_model
        assert flops == pytest.approx(start["flops_per_token"] + per_key * (keys - 16))
    train.main(make(), hooks=[stop_at(3)])
    train.main(make())
    assert rows(make().out_dir, "start")[-1]["step"] == 3
    assert losses(make().out_dir) == losses(straight.out_dir)


def test_without_log_every_only_a_step_that_is_not_finite_has_a_row(tiny):
    """With log_every 0 only a step that is not finite gets a row, with null for such numbers.

    Break: ckpt.py: json.loads(text, parse_constant=lambda _: None) => json.loads(text)
    """
    def spoil(event, value):
        if event == "state" and int(value["step"]) == 6:
            params = value["params"]
            return value | {"params": params | {"final_norm": params["final_norm"] * np.nan}}
        deep = {"list": [1.0, np.float32("-inf")], 1: 3}
        return value | {"deep": deep} if event == "log" else None

    cfg = tiny(log_every=0, on_nonfinite="skip", save_every=2, eval_every=0)
    summary = train.main(cfg, hooks=[spoil])
    assert summary["reason"].endswith("done; 2 updates were not finite, and were skipped")
    text = Path(cfg.out_dir, "metrics.jsonl").read_text()
    parsed = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    logged = [row for row in parsed if row["event"] == "log"]
    assert [(row["step"], row["n_labels"], row["loss"]) for row in logged] == [
        (7, 7 * 128, None), (8, 128, None)]
    assert logged[0]["deep"] == {"list": [1.0, None], "1": 3}


def test_a_run_compiles_its_step_once_and_the_evaluation_when_it_is_needed(tiny, caplog):
    """train_step and init are compiled once, and on a CPU eval_step just before its first use.

    Break: step.py: compiled_step = future.result() =>
    compiled_step = future.result(); steps["lower_eval_step"]().compile()
    """
    order = []

    def compilations(name):
        words = f"Finished XLA compilation of jit({name})"
        return sum(words in record.getMessage() for record in caplog.records)

    def note(event, row):
        if event == "log":
            time.sleep(0.1)  # enough time for a compilation in the background
            order.append(compilations("eval_step"))

    # The context manager has no effect in the compiler's threads.
    jax.config.update("jax_log_compiles", True)
    try:
        train.main(tiny(cache_dir=""), hooks=[note])
    finally:
        jax.config.update("jax_log_compiles", False)
    assert order == [0] * 4 + [1] * 4
    assert compilations("train_step") == compilations("init_state") == 1
    start, end = rows(tiny().out_dir, "start")[0], rows(tiny().out_dir, "end")[0]
    assert end["time_s"]["compile"] > start["time_s"]["compile"]


def test_epochs_set_the_steps(tiny):
    """--epochs counts as it was typed, rounded up to a batch.

    Break: train.py: train_data["n"] / cfg.batch_size, 6) => train_data["n"] / cfg.batch_size, 60)
    """
    for epochs, steps in ((1.1, 11), (1.12, 12)):
        assert train.set_steps(tiny(epochs=epochs, batch_size=10), {"n": 100}).steps == steps


def test_a_sample_shows_control_characters_as_escapes(capsys):
    """Samples keep tabs, newlines and letters; characters that control a terminal are escaped.

    Break: train.py: c if c.isprintable() or c in "\\t\\n" else repr(c)[1:-1] => c
    """
    shown = train.printable("def f():\n\treturn 'é', '字'\x1b[2J\x0e\x07\r\x9b\ud800")
    assert shown == "def f():\n\treturn 'é', '字'\\x1b[2J\\x0e\\x07\\r\\x9b\\ud800"
    samples = {"texts": ["a\x07b"], "prompts": ["a\x07"]}
    train.print_samples(samples)
    assert capsys.readouterr().out.splitlines()[1] == "a\\x07{+b+}"


def test_sample_mode_continues_the_prompt(tiny, tmp_path, capsys):
    """--mode sample needs no training data, and prints the same text for the same seed.

    Break: train.py: [sample["prompt"] + sample["text"] for => [sample["text"] for
    """
    cfg = tiny(sample_tokens=8, temperature=0.0, log_every=8)
    train.main(cfg)
    preview = rows(cfg.out_dir, "sample")[-1]
    prompt, = preview["prompts"]
    assert len(prompt) == 8 and prompt in (tmp_path / "text.txt").read_text()
    assert len(preview["texts"][0]) == 16 and preview["texts"][0].startswith(prompt)
    output = capsys.readouterr().out
    assert f" sample --------\n{prompt}{{+{preview['texts'][0][8:]}+}}\n" in output
    (tmp_path / "text.txt").unlink()
    flags = (f"--mode sample --out_dir {cfg.out_dir} --n_samples 2 --sample_tokens 8 "
             f"--temperature 1 --samples_file {tmp_path}/new/s.jsonl --prompt").split()
    printed = []
    for _ in range(2):
        assert train.cli([*flags, "12 bottles"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and printed[0].count("12 bottles{+") == 2
    saved = [json.loads(line) for line in (tmp_path / "new/s.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in saved] == ["12 bottles"] * 2
    for row in saved:
        assert f"12 bottles{{+{train.printable(row['text'])}+}}\n" in printed[0]
    with pytest.raises(ValueError, match="mode sample: this task has no samples"):
        train.main(tiny(mode="sample", sample_tokens=1), (), train.TEXT | {"sample": None})


def test_modes_without_training_use_a_state_parameters_a_checkpoint_or_init_from(tiny, tmp_path):
    """All give the same; sources that are not used are refused.

    Break: train.py: progress=progress), state, params) => progress=progress))
    """
    first, other = tiny(steps=4), tiny(steps=1, seed=5, out_dir=str(tmp_path / "other"))
    state = train.main(first)["state"]
    train.main(other)
    params = {name: np.asarray(x) for name, x in state["params"].items()}

    def run(cfg, mode, step, **given):
        changes = dict(mode=mode, seed=0, sample_tokens=8, temperature=1.0)
        summary = train.main(dataclasses.replace(cfg, **changes), **given)
        assert summary["step"] == step
        return summary.get("val_loss", summary.get("texts"))

    new = tiny(out_dir=str(tmp_path / "new"), init_from=(first.out_dir,))
    loss = run(first, "eval", 4)
    assert loss == run(new, "eval", 0) and not (tmp_path / "new").exists()
    assert loss == run(other, "eval", 4, state=state) == run(other, "eval", 0, params=params)
    assert run(first, "sample", 4) == run(other, "sample", 0, params=params)
    folder = tmp_path / "hf"
    run(dataclasses.replace(other, export=f"{folder}/"), "export", 4, state=state)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    assert (tensors["model.norm.weight"] == params["final_norm"]).all()
    assert {"config.json", "sixfile.json"} <= {*os.listdir(folder)}

    with pytest.raises(ValueError, match="init_from is not used, as the run has a checkpoint"):
        run(dataclasses.replace(first, init_from=(str(tmp_path / "elsewhere"),)), "eval", 4)
    refused("mode eval: val_frac 0.0 leaves no data; set --val_data",
            dataclasses.replace(first, mode="eval", val_frac=0.0))
    with pytest.raises(ValueError, match="no source in init_from has final_norm"):
        run(dataclasses.replace(new, init_from=(f"{first.out_dir} exclude=final_norm",)), "eval", 0)
    changed = dataclasses.replace(first, rope_theta=10.0, export=f"{folder}2")
    for mode in ("eval", "sample", "export"):
        with pytest.raises(ValueError, match=r"ckpt: rope_theta was 10000.0, is "):
            run(changed, mode, 4)
    run(dataclasses.replace(changed, allow_change=("rope_theta",)), "eval", 4)

    # In training a given state comes first, then given parameters, then init_from.
    again = dataclasses.replace(other, resume="overwrite", steps=5)
    assert train.main(again, state=state, params={})["step"] == 5
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    again = dataclasses.replace(new, init_from=(other.out_dir,), steps=1, lr=0.0)
    assert same(train.main(again, params=params)["state"]["params"], params)


def test_wrong_parameters_are_explained(tiny):
    """Errors list wrong names, shapes and types of given parameters.

    Break: train.py: if jax.numpy.issubdtype(x.dtype, np.floating)} => }
    """
    cfg = tiny(mode="eval")
    params = {name: np.zeros(row["shape"], np.float32)
              for name, row in train.setup_run(cfg).table.items()}
    wrong = {name: x for name, x in params.items() if name != "embed"}
    wrong |= {"embedd": params["embed"], "final_norm": np.zeros(3)}
    for given, words in (
            (wrong, r"\('embed', .*\('embedd', .*\('final_norm', \(3,\)\)"),
            (params | {"embed": np.int32(params["embed"])}, r"\[\('embed', \(256, 32\)\)\]")):
        refused(f"must be floats .*{words}", cfg, params=given)
    with pytest.raises(KeyError):
        train.main(tiny(), state={"step": np.int32(0), "params": params})


def test_a_resume_prints_what_changed_in_software_and_machine(tiny, monkeypatch, capsys):
    """A resume prints the differences of the machine; other data is an error unless allowed.

    Break: train.py: for part in ("versions", "machine", "mesh"): => for part in ():
    """
    train.main(tiny(steps=4))
    meta = ckpt.read_meta(Path(tiny().out_dir) / "ckpt", 4)
    assert meta["machine"].keys() == {"cpu", "threads", "driver", "device", "xla_flags"}
    assert meta["machine"]["xla_flags"] == os.environ["XLA_FLAGS"] and meta["versions"]["jaxlib"]
    assert capsys.readouterr().out.count("\nexample ") == 2
    train.main(tiny(steps=5))
    printed = capsys.readouterr().out
    assert "\nexample " not in printed and "since the checkpoint" not in printed
    machine = steplib.describe_machine
    monkeypatch.setattr(steplib, "describe_machine", lambda device: machine(device) | {
        "threads": 99, "driver": "new"})
    text = Path(tiny().data[0])
    text.write_text(text.read_text().replace("beer", "wine"))
    refused("from other data or parameters: data was", tiny(steps=6))
    capsys.readouterr()
    assert train.main(tiny(steps=6, allow_change=("data",)))["step"] == 6
    printed = capsys.readouterr().out
    assert f"since the checkpoint: threads was {meta['machine']['threads']}, is 99; " in printed
    assert "is 'new'. The run continues" in printed


def test_hooks_receive_every_event_and_saves_have_their_digest(tiny):
    """A hook may replace rows and the state; the digest of a save is the same on another mesh.

    Break: train.py: state = emit(run, "state", new_state) =>
    state = new_state
    """
    seen, batches, dispatched, first = [], set(), [], []

    def hook(event, value):
        seen.append(event)
        if event == "load":
            first.append(jax.tree.map(jnp.copy, value["params"]))
        if event == "data":
            batches.add(np.asarray(value["tokens"]).tobytes())
        if event == "dispatch":
            dispatched.append(value["step"])
        if event == "state":
            return value | {"params": jax.tree.map(jnp.copy, first[0])}
        return value | {"extra": 1} if event == "eval" else None

    cfg = tiny(sample_tokens=2, weights_every=4)
    summary = train.main(cfg, hooks=[hook])
    assert len(batches) == 8 and dispatched == list(range(1, 9))
    assert {*seen} == {*"loss_fn optimizer train_step load start data val_data dispatch state step"
                       " log save saved eval eval_batch sample stop end before_epoch before_save"
                       " before_eval".split()}, NEW_EVENT
    assert seen.count("data") == seen.count("step") == seen.count("state") == 8
    assert all(row["extra"] == 1 for row in rows(cfg.out_dir, "eval"))
    for row in rows(cfg.out_dir, "save"):
        root = Path(cfg.out_dir, "ckpt", *["weights"] * (row["kind"] == "weights"))
        assert row["digest"] == ckpt.read_meta(root, row["step"])["digest"]
        parts = {"params"} if row["kind"] == "weights" else summary["state"].keys()
        assert row["digest"].keys() == parts
    like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), summary["state"])
    read = ckpt.restore(Path(cfg.out_dir) / "ckpt", 8, like)
    assert all(map(np.array_equal, jax.tree.leaves(read), jax.tree.leaves(summary["state"])))
    assert same(read["params"], first[0]) and arrays(cfg.out_dir)["opt/0/mu/embed"].any()
    saved = ckpt.read_meta(Path(cfg.out_dir) / "ckpt", 8)["digest"]
    assert steplib.digest(steplib.digest_sums(jax.tree.map(jnp.asarray, read))) == saved
    other = tiny(out_dir=cfg.out_dir + "2", dp=2, fsdp=4, init_from=(cfg.out_dir,), lr=0.0, steps=1)
    train.main(other)
    assert rows(other.out_dir, "save")[-1]["digest"]["params"] == saved["params"]


def test_hooks_are_loaded_from_the_command_line(tiny, tmp_path, capsys):
    """Functions of --hooks share globals and import neighbors; errors are one sentence.

    Break: train.py: hooks = (*hooks, *load_functions("hooks", cfg.hooks)) => pass
    """
    (tmp_path / "beside_it.py").write_text("FACTOR = 2\n")
    hook_file = tmp_path / "my_hooks.py"
    hook_file.write_text("import beside_it\nseen = []\n"
                         "def one(event, row):\n    seen.append(event)\n"
                         "def double(event, row):\n    if event == 'log' and seen:\n"
                         "        return row | {'twice': beside_it.FACTOR * row['loss']}\n")
    Path(tiny().out_dir + ".json").write_text(config.to_json(tiny(eval_every=0)))
    argv = ["--config", tiny().out_dir + ".json", "--hooks"]
    assert train.cli([*argv, f"{hook_file}:one", f"{hook_file}:double"]) == 0
    assert all(r["twice"] == 2 * r["loss"] for r in rows(tiny().out_dir, "log"))
    for name, words in ((f"{hook_file}:duoble", "has no function 'duoble' (nearest: double)"),
                        (f"{tmp_path}/none.py:f", "must be file.py:function; there is no file")):
        assert train.cli([*argv, name]) == 2
        assert words in capsys.readouterr().err
    assert train.cli(argv[:2]) == 2 and "hooks was [" in capsys.readouterr().err  # no --hooks


def test_only_errors_that_the_six_files_raise_are_one_sentence(monkeypatch, capsys):
    """A ValueError that no `raise` of the six files made keeps its traceback.

    Break: train.py: is_ours and last.line.startswith("raise") => True
    """
    def interrupt():
        raise KeyboardInterrupt

    for fail, words in ((lambda: train.format_metrics({"loss": "high"}, ["loss"]), "Unknown"),
                        (lambda: shutil.make_archive("none", "no such format"), "unknown archive")):
        with pytest.raises(ValueError, match=words):
            train.cli([], main=lambda *_, fail=fail: fail())
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    train.cli([], main=lambda *_: interrupt())
    assert codes == [130]
    assert capsys.readouterr().err.endswith("SIGINT: ended; nothing to save\n")


@pytest.mark.slow
def test_lora_tunes_a_trained_model_and_saves_only_its_factors(tiny, tmp_path, capsys):
    """LoRA saves only its factors; a resume loads the rest from init_from and is bit-identical.

    Break: ckpt.py: absent = paths_of(missing, wanted) | => absent = set() |
    """
    base = tiny(steps=8, eval_every=0)
    old = train.main(base)["state"]["params"]
    make = partial(tiny, init_from=(base.out_dir,), lora_rank=4, save_exclude=("*", "!*.lora_?"),
                   lr=0.02)
    straight = train.main(make(out_dir=str(tmp_path / "straight")))
    new = straight["state"]["params"]
    moved = {k for k in new if k not in old or not np.array_equal(old[k], new[k])}
    assert moved == {f"{k}.lora_{end}" for k in old for end in "ab" if k.startswith("layers.w")}
    half = make(steps=4, out_dir=str(tmp_path / "half"))
    before = train.main(half)["val_loss"]
    names = ckpt.newest_meta(half.out_dir + "/ckpt")["arrays"]
    assert all(".lora_" in name for name in names if name.startswith("params/"))
    capsys.readouterr()
    summary = train.main(make(out_dir=half.out_dir))
    assert same(summary["state"]["params"], new) and rows(half.out_dir, "start")[-1]["step"] == 4
    row = train.main(make(mode="eval", out_dir=half.out_dir))
    assert row["val_loss"] == straight["val_loss"] < before
    output = " ".join(capsys.readouterr().out.split())
    assert "from its own checkpoint, at step 4" in output
    assert f"{len(old)} of {len(new)} parameters from " in output
    _, _, output = output.partition("parameters on")  # after the flags of the run
    assert ".lora_" not in output  # parameters of its own checkpoint are not listed
    more = make(mode="eval", init_from=(base.out_dir, half.out_dir), out_dir=str(tmp_path / "more"))
    assert train.main(more)["val_loss"] == straight["val_loss"]
    with pytest.raises(ValueError, match="lora_alpha was 16.0, is 8.0"):
        train.main(dataclasses.replace(more, lora_alpha=8.0, out_dir=str(tmp_path / "none")))
    train.main(dataclasses.replace(base, steps=9))  # the base run gets a newer checkpoint
    refused(r"init_from was \[.*, is \[.* \(on purpose", make(steps=9, out_dir=half.out_dir))


@pytest.mark.parametrize("platform, capability, dtype, user, name, precision", [
    ("gpu", "9.0", "float32", None, "cuda", "highest"),
    ("gpu", "9.0", "float32", "tensorfloat32", "cuda", None),
    ("gpu", "gfx942", "bfloat16", None, "gpu", None),
    ("cpu", "", "float32", None, "cpu", None)])
def test_the_platform_of_a_task_and_the_precision_of_float32(
        tiny, monkeypatch, platform, capability, dtype, user, name, precision):
    """The task's "resolve" gets "cuda" on NVIDIA GPUs. On a GPU or a TPU a run in float32
    multiplies in float32, unless the user has chosen another precision.

    Break: step.py: jax.config.update("jax_default_matmul_precision", "highest") => pass
    """
    device = types.SimpleNamespace(platform=platform, compute_capability=capability,
                                   device_kind="abacus", addressable_memories=list)
    changed, seen = {}, []

    def resolve(platform, cfg):
        seen.append(platform)
        return cfg

    def stop(cfg, devices):
        raise StopIteration

    monkeypatch.setattr(steplib, "make_mesh", stop)
    monkeypatch.setattr(jax.config, "update", changed.__setitem__)
    with jax.default_matmul_precision(user), pytest.raises(StopIteration):
        cfg = tiny(dtype=dtype, fsdp=1, dp=1)
        train.setup_run(cfg, train.TEXT | {"resolve": resolve}, [device])
    assert seen == [name] and changed.get("jax_default_matmul_precision") == precision


# ---- the loop

def test_an_implicit_transfer_in_the_loop_is_an_error(tiny):
    """The transfer guard raises an error for a batch that is still on the host at dispatch.

    Break: train.py: jax.transfer_guard("disallow") => jax.transfer_guard("allow")
    """
    def to_host(event, value):
        return {k: np.asarray(v) for k, v in value.items()} if event == "data" else None

    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train.main(tiny(), hooks=[to_host])


# ---- observers

def test_the_profiler_starts_and_stops_at_the_requested_steps(monkeypatch, tmp_path, capsys):
    """It also writes a memory profile when it stops, and after errors.

    Break: step.py: if not traced: => if True:
    """
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    monkeypatch.setattr(jax.profiler, "save_device_memory_profile",
                        lambda path: calls.append(str(path.relative_to(tmp_path))))

    def feed(profile, *events):
        observe = train.trace_profile(config.Config(profile=profile, out_dir=str(tmp_path)))
        seen = []
        for event, step in events:
            observe(event, {"step": step, "error": "RuntimeError: out of luck"})
            seen += [f"{event} {step}: {call}" for call in calls]
            calls.clear()
        return seen

    loop = [(event, i + ahead) for i in range(8) for event, ahead in (("dispatch", 1), ("step", 0))]
    expected = ["dispatch 3: start", "step 5: stop", "step 5: profile/memory_5.prof"]
    assert feed("3:5", *loop, ("stop", 7)) == expected
    assert capsys.readouterr().out == f"traced steps 3 to 5 into {tmp_path}/profile\n"
    assert feed("3:5", *loop[:8], ("log", 4), ("stop", 4)) == [
        expected[0], "stop 4: stop", "stop 4: profile/memory_4.prof"]
    failure = "error 4: profile/memory_at_failure.prof"
    assert feed("3:5", *loop[:8], ("error", 4)) == [
        expected[0], "error 4: stop", "error 4: profile/memory_4.prof", failure]
    assert feed("9:9", *loop, ("error", 4)) == [failure]
    capsys.readouterr()
    assert feed("3:5", ("start", 3), *loop[8:], ("stop", 7)) == ["dispatch 5: start", *expected[1:]]
    assert feed("3:5", ("start", 5), *loop[10:], ("stop", 7)) == []
    assert capsys.readouterr().out == (f"traced steps 5 to 5 into {tmp_path}/profile\n"
                                       "nothing is traced: steps 3 to 5 are already done\n")
    assert feed("", *loop, ("error", 4)) == []


def test_an_observer_neither_changes_nor_ends_a_run(tiny, monkeypatch, capsys):
    """An observer that changes rows changes neither the run nor the rows of the next one. What
    observers and a sample raise is printed once with its event, and the others continue.

    Break: train.py: observe(event, copied) => observe(event, row)
    """
    calls, seen, tracked = [], [], []

    def spoil(event, row):
        row.update(loss=-1.0, step=-1, stop="stop of an observer", spoiled=True)
        row.get("config", {}).clear()
        return {"step": 5}

    def chart(event, row):
        calls.append(event)
        if event == "log":
            raise KeyError("no such chart")

    def last(event, row):
        seen.append({"event": event} | row)

    def odd(event, row):
        endless = []
        endless.append(endless)
        if event == "log":  # the console skips values that are no numbers
            return row | {"at": Path("a")} | ({"endless": endless} if row["step"] == 3 else {})

    monkeypatch.setattr(train, "OBSERVERS", (
        lambda cfg: spoil, lambda cfg: chart, *train.OBSERVERS, lambda cfg: last))
    monkeypatch.setitem(train.TRACKERS, "own", lambda cfg: lambda event, row: tracked.append(event))
    cfg = tiny(eval_every=0, save_every=0, sample_tokens=10**15, track=("own",))
    summary = train.main(cfg, [odd])
    assert (summary["reason"], summary["exit_code"]) == ("all 8 steps are done", 0)
    output = capsys.readouterr().out
    assert output.count("observer ") == 2 and "no sample: " in output
    assert "chart: at the event log: KeyError('no such chart'); it is" in output
    assert "jsonl.<locals>.observe: at the event log: ValueError(" in output
    assert calls.count("log") == 1 and calls[-1] == "log"
    logged = [row for row in seen if row["event"] == "log"]
    assert [row["step"] for row in logged] == list(range(1, 9)) and logged[0]["loss"] > 0
    assert "error" in next(row for row in seen if row["event"] == "nonfatal_error")
    assert tracked[0] == "start" and tracked[-1] == "end"
    assert not any("spoiled" in row for row in [*seen, *complete_rows(cfg.out_dir)])
    asked_for = dataclasses.asdict(train.setup_run(cfg).cfg)
    meta = ckpt.read_meta(Path(cfg.out_dir) / "ckpt", 8)
    assert meta["config"] == json.loads(json.dumps(asked_for))
    assert [(row["step"], row["at"]) for row in rows(cfg.out_dir, "log")] == [(1, "a"), (2, "a")]
    assert not rows(cfg.out_dir, "end")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert train.make_observers(cfg) == []  # only process 0 has observers


def test_an_observer_that_raises_hides_no_error_of_the_run(tiny, monkeypatch, capsys):
    """If an observer raises at the error that ends the run, that error is still raised.

    Break: train.py: except Exception as error: => except KeyError as error:
    """
    def fails(event, row):
        assert event != "error", "no room"

    monkeypatch.setattr(train, "OBSERVERS", (lambda cfg: fails, *train.OBSERVERS))
    with pytest.raises(RuntimeError, match="crash"):
        train.main(tiny(), [crash_at("state", 2)])
    assert rows(tiny().out_dir, "error")[0]["error"] == "RuntimeError: crash"
    assert "at the event error: AssertionError(" in capsys.readouterr().out


def test_metrics_jsonl_resumes_at_the_step_of_the_run(tmp_path):
    """A resume removes rows of later steps, of a stop, an end or an error, and torn lines.

    Break: ckpt.py: if row["step"] <= step and => if row["step"] < step and
    """
    def line(event, **row):
        return json.dumps({"event": event, **row}) + "\n"

    path, kept = tmp_path / "metrics.jsonl", line("start", step=0) + line("log", step=2, loss=0.1)
    cut = line("stop", step=2) + line("end", step=2) + line("log", step=3)
    path.write_bytes((kept + cut + line("error", error="of it") + "null\n").encode()
                     + b'{"event": "\xe2\x81')
    assert [row["event"] for row in ckpt.read_log(tmp_path)] == "start log stop end log".split()
    observe = train.jsonl(types.SimpleNamespace(out_dir=tmp_path))
    for event in ("start", "dispatch", "step", "log"):
        observe(event, {"step": 2, "loss": 0.1 + 0.2})
    more = line("start", step=2, loss=0.1 + 0.2) + line("log", step=2, loss=0.1 + 0.2)
    assert path.read_text() == kept + more and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_the_plot_shows_the_log(tmp_path, monkeypatch):
    """The plot shows losses, with bits/byte on the right, rate, gradient norm and throughput, once
    a run ends. Early losses do not flatten the rest. Its texts are no formulas.

    Break: train.py: len(line.get_ydata()) // 20:] => 0:]
    """
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    out_dir = tmp_path / "$\\frac$"
    out_dir.mkdir()
    (out_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (
        {"event": "start", "step": 0, "unit": "_$\\frac$"},
        {"event": "log", "step": 1, "loss": 3.0, "lr": 0.5, "_$\\frac$s_per_s": 70},
        {"event": "log", "step": 2, "loss": 2.0, "lr": 0.25, "_$\\frac$s_per_s": 90},
        {"event": "log", "step": 3}, {"event": "eval", "step": 2, "val_loss": 2.5},
        {"event": "end", "step": 3, "loss": 9.0, "val_loss": 9.0})))
    observe = train.plot(types.SimpleNamespace(out_dir=out_dir))
    observe("eval", {})
    assert not drawn
    observe("end", {})
    figure, = drawn
    lines = {line.get_label(): line.get_xydata().tolist()
             for axes in figure.axes for line in axes.lines}
    assert lines == {"loss": [[1, 3], [2, 2]], "val_loss": [[2, 2.5]],
                     "lr": [[1, 0.5], [2, 0.25]],
                     "_$\\frac$s_per_s": [[1, 70], [2, 90]]}
    losses = figure.axes[0]
    assert [text.get_text() for text in losses.get_legend().texts] == ["loss", "val_loss"]
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "loss", "learning rate", "gradient norm", "_$\\frac$s/s"]
    figure.draw_without_rendering()

    # 40 rows of a text: the first two are above the picture.
    (out_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (
        {"event": "start", "step": 0, "unit": "token"},
        *({"event": "log", "step": i, "loss": 100 / i, "bits_per_byte": 150 / i}
          for i in range(1, 41)))))
    observe("end", {})
    losses = drawn[1].axes[0]
    assert losses.get_ylim()[1] == pytest.approx(100 / 3 + 0.05 * (100 / 3 - 100 / 40))
    right, = losses.child_axes
    drawn[1].draw_without_rendering()
    assert right.get_ylim() == pytest.approx(np.multiply(losses.get_ylim(), 1.5))


def test_the_console_prints_lines_and_a_progress_bar(monkeypatch, capsys):
    """Each event has its exact line; a terminal also has a progress bar.

    Break: train.py: initial=row["step"], disable=None, => initial=0, disable=None,
    """
    class Bar:
        write = staticmethod(train.tqdm.write)

        def __init__(self, **options):
            self.disable = options["disable"]
            calls.append(("bar", options.get("total"), options.get("initial"), self.disable))

        def __getattr__(self, name):
            return lambda *args, **options: calls.append((name, *args, *options.items()))

    start = {"step": 3, "unit": "pixel", "memory_bytes_per_device": {"total": 5.5e9},
             "compile_s": 1.25, "origin": "nothing"}
    row = {"step": 4, "loss": 2.34567, "lr": 1.5e-3, "pixels_per_s": 12345.6, "data_wait_s": 0.0123}
    evaluated = {"step": 4, "val_acc": 0.25, "val_loss": 2.5, "val_bits_per_byte": 1.5,
                 "val_ppl": 12.0}
    in_parts = {"val_loss/code": 2.0, "eval_s": 2.5, "eval_pixels_per_s": 2345.6,
                "val_note": "no number"}
    end = row | evaluated | {
        "loss_step": 3, "best_val_loss": 2.25, "best_val_step": 3, "reason": "SIGTERM",
        "exit_code": 0,
        "wall_s": 61.6, "checkpoint": "it",
        "time_s": {"start": 10.0, "compile": 0.25, "other": 989.75}}
    events = [("start", start), ("step", row), ("log", row), ("eval", evaluated | in_parts),
              ("sample", {"step": 4, "texts": ["one", "two"], "prompts": ["", "t"]}),
              ("nonfatal_error", {"step": 4, "error": "no sample: none left"}),
              ("save", {"step": 4, "why": "step"}), ("save", {"step": 4, "why": "request"})]
    compiled = "compiled in 1.2 s, 5,245 MiB per device; from nothing, at step 3\n"
    log = "step      4  loss 2.3457  lr 1.50e-03  12,346 pixels/s  data wait 0.0123 s\n"
    rest = ("step      4  validation loss 2.5000  accuracy 0.250  1.500 bits/byte\n"
            "             code  validation loss 2.0000\n"
            "-------- sample --------\n{+one+}\n\n-------- sample --------\nt{+wo+}\n\n"
            "step      4  no sample: none left\n"
            "step      4  saved, as requested\n")
    done = ("   start compile   other  total\n    1.0%    0.0%   99.0%  1,000 s\n"
            "step      4  loss 2.3457  of step 3  validation loss 2.5000  1.500 bits/byte\n"
            "best validation loss 2.2500  of step 3\n")
    cfg, calls = types.SimpleNamespace(
        steps=90, out_dir="out", ckpt_dir="", resume="auto", stop=()), []
    monkeypatch.setattr(train, "tqdm", Bar)

    def printed_by(observe, *events):
        calls.clear()
        for event in events:
            observe(*event)
        return capsys.readouterr().out

    observe = train.console(cfg)
    assert calls == [("bar", None, None, True)]  # the bar appears with the event "start"
    assert printed_by(observe, *events) == compiled + log + rest
    assert calls == [("bar", 90, 3, None), ("update",), (
        "set_postfix_str", "loss 2.3457  12,346 pixels/s", ("refresh", False))]
    assert printed_by(observe, ("error", {"error": "of it"})) == "" and calls == [("close",)]
    for change, words in (
            ({}, "stopped: SIGTERM; 62 s, saved in it\n"
                 "the same command, without --stop and --resume, continues from here\n"),
            ({"exit_code": 1}, "stopped: SIGTERM; 62 s, saved in it\n"),
            ({"reason": "all 4 steps are done"}, "done: all 4 steps are done; 62 s, saved in it\n"),
            ({"exit_code": 1, "checkpoint": None}, "stopped: SIGTERM; 62 s, not saved\n")):
        assert printed_by(observe, ("end", end | change)) == done + words and calls == [("close",)]


# ---- bad numbers

def test_on_nonfinite_stops_or_raises(tiny, capsys):
    """"stop" saves and exits with 1, "raise" raises; the parameters never change in such a step.

    Break: train.py: progress.is_finite and cfg.on_nonfinite == "stop" =>
    progress.is_finite and cfg.on_nonfinite == "skip"
    """
    def poison(event, value):
        if event == "load":
            params = value["params"]
            return value | {"params": params | {"final_norm": params["final_norm"] * np.nan}}

    stops = tiny(on_nonfinite="stop", eval_every=0, log_every=0)
    for cfg in (stops, dataclasses.replace(stops, steps=1, out_dir=stops.out_dir + "1")):
        summary = train.main(cfg, hooks=[poison])
        assert (summary["exit_code"], summary["step"]) == (1, 1)
        assert summary["reason"].endswith("near step 1; that update was skipped")
    assert [r["step"] for r in rows(stops.out_dir, "log")] == [1]
    saved = arrays(stops.out_dir)
    assert saved["skipped"] == saved["step"] == 1
    assert not saved["opt/0/mu/embed"].any() and np.isfinite(saved["params/embed"]).all()

    cfg = dataclasses.replace(stops, on_nonfinite="raise", out_dir=stops.out_dir + "2")
    words = "step 1: the loss or a gradient is not finite"
    with pytest.raises(FloatingPointError, match=words):
        train.main(cfg, hooks=[poison])
    assert rows(cfg.out_dir, "error")[0]["error"].startswith(f"FloatingPointError: {words}")
    words = "step      1  loss nan, or a gradient, is not finite; try a lower --lr"
    assert words in capsys.readouterr().out


# ---- resume

def test_the_same_command_with_more_steps_continues_the_run(tiny, capsys):
    """It makes up for a missed evaluation; launches that would start over are refused.

    Break: train.py: return meta["progress"]["last_metrics"] | { => return {
    """
    out = Path(tiny().out_dir)
    summary = train.main(tiny(steps=4), hooks=[stop_at(4, "log")])
    assert (summary["reason"], summary["exit_code"]) == ("SIGTERM", 0)
    assert event_steps(out, "save eval") == [("save", 4)]
    partial_save = out / "ckpt/000000099/save-abcd0123"  # as of a process killed during a save
    partial_save.mkdir(parents=True)
    assert train.main(tiny(), hooks=[stop_at(8, "log")])["step"] == 8
    assert not partial_save.parent.exists()
    summary = train.main(tiny())
    assert (summary["reason"], summary["step"]) == ("all 8 steps are done", 8)
    assert "val_loss" in summary and summary["checkpoint"] == str(out / "ckpt/000000008")
    assert event_steps(out, "log") == [("log", i) for i in range(1, 9)]
    assert event_steps(out, "save eval") == [
        ("save", 4), ("eval", 4), ("save", 8), ("eval", 8), ("save", 8)]
    starts = rows(out, "start")
    assert [r["step"] for r in starts] == [0, 4, 8] and len({r["run_id"] for r in starts}) == 1
    times = [ckpt.read_meta(out / "ckpt", step)["progress"]["time_s"] for step in (4, 8)]
    assert starts[1]["time_s"]["step"] == times[0]["step"] < times[1]["step"]
    capsys.readouterr()
    for steps in (8, 6):
        again = train.main(tiny(steps=steps))
        assert (again["step"], again["reason"], again["exit_code"]) == (8, "already finished", 0)
        for name in ("val_loss", "best_val_loss", "checkpoint"):
            assert again[name] == summary[name]
        output = capsys.readouterr().out
        assert "is finished, at step 8. To train further: more --steps" in output
    for change, given, words in (
            (dict(resume="never"), {}, "resume never: .* holds a run at step 8"),
            ({}, dict(state={}), "holds a run at step 8, which this launch"),
            ({}, dict(params={}), "holds a run at step 8, which this launch"),
            (dict(lr=1e-2), {}, r"lr was 0.002, is 0.01 \(on purpose: --allow_change lr\)"),
            (dict(seed=5, d_model=64), {}, "d_model was 32, is 64(.|\n)*seed was 0, is 5"),
            (dict(n_experts=2, sp=2), {}, "sp was 1, is 2"),  # experts would drop other tokens
            (dict(resume="must", out_dir=str(out / "new")), {}, "resume must: .* no checkpoint")):
        refused(words, tiny(**change), **given)
    assert ckpt.steps(out / "ckpt") == [4, 8] and rows(out, "end")


def test_resume_overwrite_starts_a_new_run(tiny, tmp_path):
    """It deletes nothing if the launch fails, and its config.json continues the new run. A second
    run is refused while the first is alive, also by its ckpt_dir alone.

    Break: ckpt.py: for path in (out_dir, root) if _is_local(path)} =>
    for path in (out_dir,)}
    """
    root = Path(tiny().out_dir) / "ckpt"

    def second(event, value):
        if event == "start":
            for change in ({}, dict(ckpt_dir=str(root), out_dir=str(tmp_path / "other"))):
                refused("another run is writing to it", tiny(**change))

    train.main(tiny(steps=4), hooks=[second])
    with pytest.raises(RuntimeError, match="crash"):
        train.main(tiny(steps=4, resume="overwrite"), hooks=[crash_at("load", 0)])
    assert ckpt.steps(root) == [4] and rows(tiny().out_dir, "end")
    train.main(tiny(resume="overwrite", steps=2, seed=1))
    assert ckpt.steps(root) == [2] and len(rows(tiny().out_dir, "start")) == 1
    assert train.cli(["--config", f"{tiny().out_dir}/config.json", "--steps", "3"]) == 0
    assert [r["step"] for r in rows(tiny().out_dir, "start")] == [0, 2]


def test_overwrite_deletes_no_other_run(tiny, tmp_path):
    """Of a folder of checkpoints that two runs name, each overwrites and resumes its own alone. A
    run whose out_dir has moved resumes from its ckpt_dir.

    Break: ckpt.py: if not is_own and (is_in_use or resume == "overwrite"): => if False:
    """
    shared = str(tmp_path / "big")
    cfg = tiny(steps=2, ckpt_dir=shared, eval_every=0)
    train.main(cfg)
    other = dataclasses.replace(cfg, out_dir=str(tmp_path / "second"), resume="overwrite", seed=1)
    words = "ckpt_dir .*/big: has the checkpoints of the run .*out, not of"
    refused(words, other)
    refused(words, dataclasses.replace(other, resume="auto", seed=0))
    assert ckpt.steps(shared) == [2] and not (tmp_path / "second").exists()
    Path(cfg.out_dir).rename(tmp_path / "elsewhere")
    train.main(dataclasses.replace(cfg, out_dir=str(tmp_path / "elsewhere"), steps=3))
    assert ckpt.steps(shared) == [2, 3]
    shutil.rmtree(tmp_path / "elsewhere")
    shutil.rmtree(shared)
    train.main(cfg)
    train.main(dataclasses.replace(cfg, steps=1, resume="overwrite", seed=1))
    assert ckpt.steps(shared) == [1]
    Path(cfg.out_dir).rename(tmp_path / "moved")
    own = tiny(steps=2, eval_every=0, out_dir=str(tmp_path / "own"))
    train.main(own)
    Path(own.out_dir).rename(tmp_path / "renamed")
    moved = dataclasses.replace(own, out_dir=str(tmp_path / "renamed"), steps=1, resume="overwrite")
    train.main(moved)
    assert ckpt.steps(tmp_path / "renamed/ckpt") == [1]


@pytest.mark.parametrize("error", [SystemExit("no budget"), KeyboardInterrupt(), OSError("full")])
def test_a_hook_that_ends_the_process_loses_no_step(error, tiny):
    """The steps that are done are saved, whatever a hook raises.

    Break: train.py: except BaseException: => except Exception:
    """
    def leave(event, row):
        if event == "step" and row["step"] == 3:
            raise error

    cfg = tiny(eval_every=0, save_every=0, log_every=1)
    with pytest.raises(type(error)):
        train.main(cfg, hooks=[leave])
    assert ckpt.latest(Path(cfg.out_dir) / "ckpt") in (3, 4)


def test_a_run_that_fails_waits_for_its_save(tiny, monkeypatch):
    """A second run in this process finds the pending save complete.

    Break: train.py: pending["future"].exception() => pass
    """
    def slowly(*args, commit=ckpt._commit):
        time.sleep(1)
        return commit(*args)

    monkeypatch.setattr(ckpt, "_commit", slowly)
    cfg = tiny(eval_every=0, save_every=1)
    with pytest.raises(RuntimeError, match="crash"):
        train.main(cfg, hooks=[crash_at("state", 2)])
    assert ckpt.steps(Path(cfg.out_dir) / "ckpt") == [1]


def custom_task(loss=None, row=(), batch=None, **changes):
    """Return a task with parameters w and v of shape (4,), whose batches are 8 floats."""
    def own_loss(params, batch, cfg):
        objective = ((params["w"] + params["v"]).sum() * batch["x"]).sum()
        return {"objective": objective}, {"objective": jnp.float32(8)}

    row = dict(shape=(4,), spec=P(), init=("normal", 1.0)) | dict(row)
    batch = np.ones(8, np.float32) if batch is None else batch
    source = {"n": np.int64(64), "fingerprint": "x", "batch": lambda step, rows: {"x": batch}}
    return {"table": lambda cfg: {"w": row, "v": row}, "loss": loss or own_loss,
            "batch": lambda cfg: {"x": ((8,), jnp.float32, P())},
            "open": lambda parts, cfg: {"train": source}} | changes


@pytest.mark.parametrize("change, words", [
    (dict(units=1), r"task: unknown key 'units' \(nearest: unit\)"),
    (dict(row={"trainde": True}), r"table: w: unknown key 'trainde' \(nearest: trained\)"),
    (dict(row={"init": ("uniform", 3.0)}), "w: init 'uniform': must be 'normal' or 'constant'"),
    (dict(open=lambda parts, cfg: {"validation": None}), "task: open: unknown key 'validation'"),
    (dict(init=lambda key, cfg: {"w": jnp.ones(3)}), r"init: w is \(3,\)"),
    (dict(loss=lambda *args: (dict(objective=1.0, lr=1.0), dict(objective=1, lr=1))),
     r"loss: sums named \['lr'\]: these names are reserved"),
    (dict(row={"trained": False}), "task: table: no parameter is trained"),
    (dict(batch=np.zeros(8)), r"batch 0 is .*float64.*, must be .*float32"),
])
def test_errors_in_a_custom_task_are_explained(tiny, change, words):
    """Each raises one clear sentence, where JAX would raise something unclear or nothing.

    Break: train.py: f"table: {name}: ", row, known, => f"table: {name}: ", row, row,
    """
    with pytest.raises((ValueError, AssertionError), match=words):
        train.main(tiny(steps=1, eval_every=0), task=custom_task(**change))


def test_a_custom_task_may_freeze_parameters_and_use_numpy_integers(tiny):
    """--freeze works for any task; the number of examples may be a NumPy integer.

    Break: model.py: in matching("freeze", cfg.freeze, table): => in ():
    """
    task = custom_task()
    cfg = tiny(steps=2, freeze=("w",), eval_every=0, dp=1, fsdp=8)
    params = train.main(cfg, task=task)["state"]["params"]
    begun = model.init(jax.random.key(cfg.seed), cfg, task["table"](cfg))
    moved = {name: float(abs(params[name] - begun[name]).max()) for name in begun}
    assert moved["w"] < 1e-6 and moved["v"] > 1e-3  # `init` rounds differently when it is compiled
    with pytest.raises(ValueError, match="freeze 'nosuch': matches no parameter; there are w, v"):
        train.main(tiny(freeze=("nosuch",)), task=task)
    for key in task:  # which has the required ones alone
        with pytest.raises(ValueError, match=f"task: no '{key}'"):
            train.complete_task({name: x for name, x in task.items() if name != key})


@pytest.mark.slow
def test_hooks_request_events_and_stops(tiny):
    """Requested events happen at the next step, then the stop; evaluation batches may be replaced.

    Break: train.py: (is_waiting or not events): => True:
    """
    cfg = tiny(dp=2, steps=12, log_every=2, save_every=0, eval_every=0, sample_tokens=2,
               eval_batches=1)
    text = Path(cfg.data[0])
    text.write_text(text.read_text()[:565])  # 508 tokens to train on, in 32 rows

    def first(event, row):
        if event == "log" and row["step"] == 8:
            return row | {"request": ["save"]}
        return row | {"stop": "three epochs"} if event == "epoch" and row["epoch"] == 3 else None

    def second(event, row):
        if event == "log" and row["step"] == 8:
            return row | {"request": ["eval", "sample"], "stop": "enough"}

    def without_labels(event, batch):
        if event == "val_data":
            assert (batch["labels"] >= 0).any()
            return batch | {"labels": 0 * batch["labels"] + data.IGNORE}

    summary = train.main(cfg, hooks=[first, second, without_labels])
    assert (summary["step"], summary["reason"]) == (9, "enough")
    happened = [name for name, _ in event_steps(cfg.out_dir, "save eval sample")]
    assert happened == ["eval", "sample", "save"]
    assert [row["request"] for row in rows(cfg.out_dir, "log") if "request" in row] == [
        ["eval", "sample", "save"]]
    evaluation, = rows(cfg.out_dir, "eval")
    assert evaluation["val_n_labels"] == 0 and evaluation["val_loss"] is None
    summary = train.main(cfg, hooks=[first])
    assert (summary["step"], summary["reason"]) == (12, "three epochs")
    assert event_steps(cfg.out_dir, "epoch") == [("epoch", 4), ("epoch", 8), ("epoch", 12)]


@pytest.mark.slow
def test_hooks_skip_saves_and_evaluations(tiny, capsys):
    """A hook gets each before it begins; the same command repeats the steps.

    Break: train.py: if progress.saved_step == step and "save" not in errors: => if True:
    """
    cfg, seen = tiny(dp=2, save_every=2, log_every=2), []

    def skip(event, row):
        if event.startswith("before_"):
            seen.append((event, row["step"], row.get("why")))
        if event == "before_save" and row["step"] != 4:
            return row | {"skip": "too early"}
        return row | {"skip": "too slow"} if event == "before_eval" and row["step"] == 4 else None

    summary = train.main(cfg, hooks=[skip])
    assert summary["step"] == 8 and summary["checkpoint"] is None and summary["exit_code"] == 0
    output = capsys.readouterr().out
    assert "step      4  no eval: too slow\n" in output and "s, not saved\n" in output
    assert ckpt.steps(Path(cfg.out_dir) / "ckpt") == [4]
    assert event_steps(cfg.out_dir, "save eval skip") == [
        ("skip", 2), ("skip", 4), ("save", 4), ("skip", 6), ("eval", 8), ("skip", 8)]
    assert seen == [("before_epoch", 0, None), ("before_save", 2, "step"), ("before_eval", 4, None),
                    ("before_save", 4, "step"), ("before_save", 6, "step"),
                    ("before_eval", 8, None), ("before_save", 8, "end")]
    first = losses(cfg.out_dir)[0]
    assert train.main(cfg)["checkpoint"] == f"{cfg.out_dir}/ckpt/000000008"
    assert losses(cfg.out_dir)[0] == first
    assert "from its own checkpoint, at step 4" in capsys.readouterr().out


def counting(counts):
    """Return a hook that counts the events of a run and keeps the counts in its checkpoints. The
    log row of step 4 requests a sample, the evaluation of step 4 another evaluation.
    """
    def hook(event, value):
        if event in ("loss_fn", "optimizer", "train_step", "load", "start", "val_data"):
            return None
        if event == "resume":
            counts.update(value["hooks"]["counts"])
            return None
        counts[event] = counts.get(event, 0) + 1
        if event == "before_save":
            return value | {"hooks": value["hooks"] | {"counts": counts}}
        if event in ("eval", "log") and value["step"] == 4:
            return value | {"request": ["eval" if event == "eval" else "sample"]}
        return None
    return hook


@pytest.mark.slow
def test_the_state_of_a_hook_resumes_with_its_run(tiny):
    """The counts and requests of a hook resume after a crash as if there was none.

    Break: train.py: progress.requests.update(saved["requests"]) => pass
    """
    def make(name):
        return tiny(out_dir=str(Path(tiny().out_dir, name)), eval_batches=1, sample_tokens=1,
                    sample_every=4, log_every=2)

    text = Path(tiny().data[0])
    text.write_text(text.read_text()[:530])  # 477 tokens to train on, in 30 rows
    straight, crashed = {}, {}
    train.main(make("straight"), hooks=[counting(straight)])
    with pytest.raises(RuntimeError, match="crash"):
        train.main(make("crashed"), hooks=[counting({}), crash_at("dispatch", 5)])
    train.main(make("crashed"), hooks=[counting(crashed)])
    assert straight["eval"] == straight["before_eval"] == straight["sample"] == 3
    for event in ("save", "saved"):  # they come after the checkpoint
        assert straight.pop(event) == crashed.pop(event) + 1 == 2
    assert crashed == straight
    assert losses(make("crashed").out_dir) == losses(make("straight").out_dir)


def test_wrong_hooks_are_named(tiny):
    """An exception has a note with the hook and the event.

    Break: train.py: e.add_note( => str(
    """
    def forgets(event, row):
        return {"bits": 1.0} if event == "log" else None

    def adds(event, row):
        more = {"stop": None, "a": np.float32(3), "b": jnp.ones(2), "c": jnp.float32(5)}
        return row | more if event == "log" else None

    with pytest.raises(RuntimeError) as e:
        train.main(tiny(), [crash_at("dispatch", 1)])
    assert e.value.__notes__ == ["in the hook crash_at.<locals>.hook, at the event dispatch"]
    with pytest.raises(AssertionError, match="lacks .*loss.*; return None, or") as e:
        train.main(tiny(eval_every=0, save_every=0), [forgets])
    assert "forgets, at the event log" in e.value.__notes__[0]
    def takes_no_train_keys(event, loss):
        return (lambda params, batch, cfg: loss(params, batch, cfg)) if event == "loss_fn" else None

    with pytest.raises(ValueError, match="dropout 0.25: the loss takes no train_keys, so it would"):
        train.main(tiny(dropout=0.25, out_dir=tiny().out_dir + "2"), [takes_no_train_keys])
    with pytest.raises(AssertionError, match="hooks request {'evall'}: events are"):
        run = types.SimpleNamespace(
            cfg=config.Config(), hooks=[lambda event, row: row | {"request": ["evall"]}])
        train.emit(run, "log", {"step": 4})
    cfg = tiny(eval_every=0, resume="overwrite", save_every=0, log_every=4)
    assert train.main(cfg, [adds])["step"] == 8
    assert [(r["a"], r["b"], r["c"]) for r in rows(cfg.out_dir, "log")] == [(3, [1, 1], 5)] * 2

    def mistaken(event, value):
        if event == "loss_fn":
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="^wrong") as e:  # with its traceback
        train.main(dataclasses.replace(cfg, mode="eval", resume="auto"), [mistaken])
    assert "mistaken, at the event loss_fn" in e.value.__notes__[0]


def test_parameters_of_another_architecture_are_refused(tiny, tmp_path):
    """The error lists the differences, even if all shapes fit; --allow_change permits some.

    Break: ckpt.py: errors = [*source.get("mismatches", ())] => errors = []
    """
    base = tiny(steps=1, eval_every=0, save_every=0, rope_theta=5e5, norm_eps=1e-5)
    train.main(base)
    fits = dict(out_dir=str(tmp_path / "next"), init_from=(base.out_dir,), steps=1)
    differs = dict(n_heads=8, head_dim=4, qk_norm=False)
    for change, listed in (({}, ["rope_theta was 500000.0, is 10000.0", "norm_eps was 1e-05"]),
                           (differs, ["n_heads was 4, is 8", "head_dim was 8, is 4",
                                      "layers.q_norm is not a parameter", "qk_norm was True"])):
        with pytest.raises(ValueError) as e:
            train.main(tiny(**fits | change))
        assert [words for words in listed if words not in str(e.value)] == [], str(e.value)
    train.main(tiny(**fits, allow_change=("rope_theta", "norm_eps")))


def test_config_json_is_replaced_atomically(tmp_path):
    """If its text cannot be written, the old config.json remains.

    Break: ckpt.py: partial_path.write_text(text, encoding="utf-8") =>
    path.write_text(text, encoding="utf-8")
    """
    (tmp_path / "config.json").write_text("the old one")
    with pytest.raises(UnicodeEncodeError):
        ckpt.begin_out_dir(str(tmp_path), f"{tmp_path}/ckpt", "\ud800")
    assert Path(tmp_path, "config.json").read_text() == "the old one"


def test_an_export_that_fails_is_reported(tiny, monkeypatch, capsys):
    """The run saves its checkpoint and ends with exit code 1 and the reason, on a file system
    without locks too.

    Break: train.py: reason = "; ".join([reason, *errors.values()]) => pass
    """
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    train.main(tiny(mode="data"))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    cfg = tiny(steps=config.Config.steps, epochs=1e-6, eval_every=0, export_every=1,
               export=str(Path(tiny().out_dir + "_hf")))

    def full(params, cfg):
        if params is not None:
            raise ValueError("export: the disk is full")

    summary = train.main(cfg, task=train.TEXT | {"export": full})
    assert summary["exit_code"] == 1 and summary["reason"].endswith("; export: the disk is full")
    assert summary["checkpoint"] and ckpt.latest(Path(cfg.out_dir) / "ckpt") == 1
    assert "has no locks (No locks available)" in capsys.readouterr().out


def test_the_folder_of_compiled_programs(tmp_path, monkeypatch):
    """JAX keeps each program in a folder for the number of threads it was compiled for.

    Break: step.py: /threads{_count_threads()}" => /threads"
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    allowed = os.sched_getaffinity(0)
    for cpus in {next(iter(allowed))}, allowed:
        os.sched_setaffinity(0, cpus)
        steplib.enable_compilation_cache("~/some/cache")
        jax.jit(lambda x: x * 2 + 1)(3.0)
    for n in (1, len(allowed)):  # once the affinity is as before
        assert any((tmp_path / f"some/cache/threads{n}").iterdir())


@pytest.mark.slow
def test_a_step_on_one_cpu_reuses_its_memory(tiny, tmp_path):
    """From the fourth step on almost no memory page is new, although each step takes 140 MiB.

    Break: train.py: jax.config.update("jax_cpu_enable_async_dispatch", False) => None
    """
    hook, pages = tmp_path / "pages.py", tmp_path / "pages"
    hook.write_text(
        "import resource\n"
        "def log(event, row):\n"
        "    if event in ('dispatch', 'step'):\n"
        "        pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        f"        print(event, row['step'], pages, file=open({str(pages)!r}, 'a'))\n")
    cfg = tiny(steps=6, d_model=64, batch_size=32, seq_len=256, logit_tiles=1, dtype="float32",
               eval_every=0, save_every=0, val_frac=0, hooks=(f"{hook}:log",))
    code, output = ended(*command(cfg))
    assert code == 0, output
    seen = [line.split() for line in pages.read_text().splitlines()]
    assert [(event, int(step)) for event, step, _ in seen] == [
        (event, step) for step in range(1, 7) for event in ("dispatch", "step")]
    assert int(seen[-1][2]) - int(seen[6][2]) < 5000  # a step uses 35,000 pages


@pytest.mark.slow
def test_the_console_fits_80_columns(tiny, tmp_path):
    """On a terminal of 80 columns no line wraps.

    Break: train.py: |{bar}| {elapsed}<{remaining}{postfix}" => |{bar}| {rate_fmt:>60}{postfix}"
    """
    cfg = tiny(steps=20, eval_every=0, log_every=4)
    Path(cfg.out_dir + ".json").write_text(config.to_json(cfg))
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    run = subprocess.Popen([sys.executable, str(ROOT / "train.py"), "--config",
                            cfg.out_dir + ".json"], stdout=child, stderr=child, close_fds=True)
    os.close(child)
    seen = b""
    with contextlib.suppress(OSError):  # os.read raises at the end
        while part := os.read(parent, 4096):
            seen += part
    assert run.wait() == 0
    lines = [line for line in re.split(r"[\r\n]+", seen.decode()) if line.strip()]
    lines = [re.sub(r"\x1b\[\w*", "", line) for line in lines]
    plain = [line for line in lines if str(tmp_path) not in line and "of beer" not in line]
    assert max(map(len, plain)) <= 80, (
        "shorten it, or add its metric to HIDDEN_METRICS in train.py", max(plain, key=len))
    steps = re.findall(r"^step +(\d+)  loss .* tokens/s", "\n".join(lines), re.M)
    assert steps == ["4", "8", "12", "16", "20"]
    bars = [line for line in lines if re.match(r"\d+/20 \|", line)]
    assert bars and all(len(line.split("|")[1]) > 10 for line in bars), bars
    assert any("loss" in line and "tokens/s" in line for line in bars)


def flip(folder):
    """Flip one bit of the embedding in a checkpoint."""
    chunk = next(folder.glob("*/params/embed/c/0/0"))
    content = bytearray(chunk.read_bytes())
    content[7] ^= 1
    chunk.write_bytes(content)


@pytest.mark.slow
def test_a_run_skips_a_corrupted_checkpoint_and_ends_bit_identical(tiny, tmp_path, capsys):
    """It resumes from the checkpoint before, between two log rows, also with dropout and a hook of
    the loss. init_from reads what it has chosen.

    Break: train.py: return ckpt.read_meta(start.root, step), state => return meta, state
    """
    make = partial(tiny, steps=12, schedule="cosine", log_every=3, dropout=0.25,
                   hooks=(f"{ROOT}/tests/recipes/hooks.py:weight_norm",))
    straight = make(out_dir=str(tmp_path / "straight"))
    train.main(straight)
    root = Path(tiny().out_dir) / "ckpt"
    train.main(make(), hooks=[stop_at(8)])
    assert ckpt.steps(root) == [4, 8]
    flip(root / "000000008")
    assert train.main(make(mode="eval"))["step"] == 4
    capsys.readouterr()
    train.main(make())
    output = capsys.readouterr().out
    assert "skipping a corrupted checkpoint: " in output and "000000008: array " in output
    assert losses(tiny().out_dir) == losses(straight.out_dir)
    assert same(arrays(tiny().out_dir), arrays(straight.out_dir))
    assert "weight_norm" in rows(straight.out_dir, "log")[0] and ckpt.steps(root) == [8, 12]
    flip(root / "000000012")
    new = make(mode="eval", init_from=(tiny().out_dir,), out_dir=str(tmp_path / "new"))
    refused("000000012: array .* is corrupted", new)
    flip(root / "000000008")
    refused("no checkpoint can be read", make(steps=13))
    assert ckpt.steps(root) == [8, 12]


def test_the_run_continues_after_a_failed_save(tiny, monkeypatch, capsys):
    """The failure is logged at the next step; if the last save fails, the exit code is 1.

    Break: train.py: progress.pending_save["future"].done(): => False:
    """
    futures, save, events, root = [], ckpt.save, [], Path(tiny().out_dir) / "ckpt"

    def noted(*args, **options):
        futures.append(save(*args, **options))
        return futures[-1]

    def block(event, value):
        if event == "state" and int(value["step"]) in (4, 12):
            root.mkdir(exist_ok=True)
            (root / f"{int(value['step']):09d}").write_text("in the way")
        if event in ("save", "nonfatal_error", "dispatch"):
            events.append((event, value["step"]))
        if event == "dispatch" and value["step"] == 5:
            futures[0].exception()

    monkeypatch.setattr(ckpt, "save", noted)
    assert train.main(tiny(eval_every=0), hooks=[block])["exit_code"] == 0
    begin = events.index(("save", 4))
    assert events[begin : begin + 4] == [
        ("save", 4), ("dispatch", 5), ("nonfatal_error", 4), ("dispatch", 6)]
    assert "000000004 could not be written" in capsys.readouterr().out
    summary = train.main(tiny(eval_every=0, steps=12), hooks=[block])
    assert summary["exit_code"] == 1 and summary["checkpoint"] is None
    assert "000000012 could not be written" in summary["reason"]
    assert ckpt.steps(root) == [8]


# ---- intervals, excluded parameters, sources

def due(step, last=(), second=0.0, requested=(), **fields):
    """Return due_events of a run of 20 steps, with epochs of 2.5 steps and windows of 3."""
    cfg = config.Config(**dict(steps=20, batch_size=4, eval_every=0, save_every=0, sample_every=0)
                        | fields)
    train_data = {"n": 10, "n_finished": lambda step: step // 3}
    progress = train.init_progress(0.0)
    progress.last_done = {event: at for event, (at, _) in dict(last).items()}
    progress.last_done_s = {event: at_s for event, (_, at_s) in dict(last).items()}
    progress.polled = {"elapsed_s": second, "events": list(requested)}
    return train.due_events(types.SimpleNamespace(
        cfg=cfg, train_data=train_data, intervals=train.event_intervals(cfg), is_branch=False,
        progress=progress), step)


def test_due_events_by_steps_epochs_windows_and_seconds():
    """Intervals and requests give the expected events, with epochs of 2.5 steps.

    Break: train.py: return completed(run, unit, step) // n > completed(run, unit, step - 1) // n
    => return completed(run, unit, step) % n == 0
    """
    def steps(**fields):
        event, = fields
        event = event.removesuffix("_every")
        return [step for step in range(1, 20) if event in due(step, **fields)]

    assert steps(save_every=7) == [7, 14] and steps(save_every=0) == []
    assert steps(save_every="1epoch") == steps(reload_every="1epoch") == [3, 5, 8, 10, 13, 15, 18]
    assert steps(save_every="1.2epochs") == [3, 6, 9, 12, 15, 18]  # 1.2 // 0.4 is 2 in floats
    assert steps(reload_every="2windows") == [6, 12, 18]
    assert steps(eval_every=0) == [3, 6, 9, 12, 15, 18]  # windows set the evaluations
    assert steps(weights_every="5,1window") == [3, 5, 6, 9, 10, 12, 15, 18]
    assert due(4, {"save": (4, 0.0)}, save_every=4) == {}
    assert due(4, {"save": (3, 60.0)}, 119.9, save_every="1m") == {}
    assert due(4, {"save": (3, 60.0)}, 120, save_every="1m") == {"save": "second"}
    asked = ("save", "eval", "reload")
    assert due(2, requested=asked) == dict.fromkeys(asked, "request")
    last = {"save": (3, 60.0), "eval": (4, 0.0)}
    assert due(4, last, 120, ("save", "eval"), save_every="1m") == {"save": "request"}
    for every in ("4,1m", "1m,4"):  # a time makes no checkpoint that a step makes
        assert due(4, {"save": (3, 60.0)}, 120, save_every=every) == {"save": "step"}
    assert due(3) == {"epoch": "epoch", "window": "window", "eval": "window"}
    assert due(3, dict.fromkeys(("epoch", "window", "eval"), (3, 0.0))) == {}
    ends = {"epoch": "epoch"} | dict.fromkeys(("save", "eval", "sample"), "end")
    assert due(20) == ends, NEW_EVENT
    assert due(20, weights_every=7, export="there") == ends | {"weights": "end", "export": "end"}


def test_rows_that_do_not_fit_on_the_disk_are_written_later(tiny, capsys):
    """While the file cannot grow, rows are kept in memory, and written as soon as it can.

    Break: train.py: print0(f"{file.name}: {e}; make room: only => raise e; print0(f"{e}: only
    """
    cfg = tiny()
    path, observe = Path(cfg.out_dir, "metrics.jsonl"), train.jsonl(cfg)
    path.parent.mkdir()
    observe("start", {"step": 0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        for step in (1, 2):
            observe("log", {"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().out.count("metrics.jsonl: [Errno") == 2
    observe("log", {"step": 3})
    assert [row["step"] for row in rows(cfg.out_dir, "log")] == [1, 2, 3]


def test_saved_arrays_that_a_run_lacks_are_an_error(tiny):
    """As after an edit of the model. --allow_change state drops them.

    Break: ckpt.py: if unknown and not drops_unknown: => if False:
    """
    cfg = tiny(steps=1, eval_every=0, dtype="float32")
    train.main(cfg)
    root = f"{cfg.out_dir}/ckpt"
    tree, meta = ckpt.restore(root, 1), ckpt.read_meta(root, 1)
    for key in ("step", "folder", "arrays"):
        meta.pop(key)
    tree["params"]["old"] = tree["opt"]["0"]["mu"]["old"] = tree["gone"] = np.zeros(3)
    ckpt.wait(ckpt.save(root, 1, tree, meta))
    more = dataclasses.replace(cfg, steps=2)
    refused("lacks: gone, opt/0/mu/old, params/old; to drop", more)
    with pytest.raises(ValueError, match="lacks: params/old; to drop them on purpose: --allow_ch"):
        train.main(dataclasses.replace(cfg, mode="eval"))
    assert train.main(dataclasses.replace(more, allow_change=("state",)))["step"] == 2
    assert "params/old" not in ckpt.read_meta(root, 2)["arrays"]


@pytest.mark.slow
def test_a_resumed_float16_run_is_bit_identical(tiny, tmp_path, monkeypatch):
    """It begins after a float32 step and stops between two doublings of its scale.

    Break: ckpt.py: | (others - meta["arrays"].keys()) => | set()
    """
    monkeypatch.setattr(steplib, "FP16_PATIENCE", 3)
    monkeypatch.setattr(steplib, "FP16_SCALE", 2.0**4)
    make = partial(tiny, allow_change=("dtype",), eval_every=0)
    straight = str(tmp_path / "straight")
    train.main(make(dtype="float32", steps=1))
    shutil.copytree(tiny().out_dir, straight)
    train.main(make(dtype="float16", out_dir=straight))
    train.main(make(dtype="float16"), hooks=[stop_at(5, "log")])
    half = arrays(tiny().out_dir)
    assert (half["step"], half["scale/value"], half["scale/good"]) == (5, 2.0**5, 1)
    train.main(make(dtype="float16"))
    assert same(arrays(tiny().out_dir), arrays(straight))
    assert losses(tiny().out_dir) == losses(straight)
    assert "scale" not in train.main(make(dtype="float32", steps=9))["state"]


def test_a_trained_parameter_that_is_not_saved(tiny, capsys):
    """A resume initializes it, an evaluation refuses.

    Break: train.py: errors.append(f"no source in init_from has {name}") => pass
    """
    train.main(tiny(steps=1, eval_every=0, save_exclude=("embed",)))
    train.main(tiny(steps=2, eval_every=0, save_exclude=("embed",)))
    assert re.search(r"\n1 of \d+ parameters from a fresh initialization: embed\n",
                     capsys.readouterr().out)
    refused("no source in init_from has embed", tiny(mode="eval", save_exclude=("embed",)))


def test_a_run_with_another_ckpt_dir_is_not_started_anew(tiny, tmp_path):
    """init_from finds it by its out_dir. Checkpoints of another program are refused.

    Break: ckpt.py: if is_elsewhere and => if False and
    """
    cfg = tiny(steps=1, eval_every=0, ckpt_dir=str(tmp_path / "elsewhere"))
    train.main(cfg)
    again = train.main(dataclasses.replace(cfg, ckpt_dir=f"{tmp_path}/./elsewhere/"))
    assert again["reason"] == "already finished"
    refused(r"the checkpoints of its run are in .*elsewhere; set", tiny(steps=2))
    other = tiny(steps=1, eval_every=0, init_from=(cfg.out_dir,), out_dir=str(tmp_path / "next"))
    assert train.main(other)["step"] == 1
    with pytest.raises(ValueError, match="none: holds no checkpoint and no .* without --init_from"):
        train.main(tiny(init_from=(str(tmp_path / "none"),), out_dir=str(tmp_path / "third")))
    ckpt.wait(ckpt.save(tmp_path / "foreign", 7, {"a": np.ones(3)}))
    for mode in ("train", "sample"):
        with pytest.raises(ValueError, match="foreign: checkpoint 7 was not saved by a run"):
            train.main(tiny(mode=mode, out_dir=str(tmp_path / "fourth"), sample_tokens=1,
                            ckpt_dir=str(tmp_path / "foreign")))


def test_a_checkpoint_of_an_own_loop_with_its_config_is_evaluated(tiny, tmp_path):
    """Its meta has nothing else: a resume and a branch are refused in a sentence.

    Break: ckpt.py: if meta and missing: => if False:
    """
    cfg = tiny(steps=2)
    state = train.main(cfg)["state"]
    meta = {"config": dataclasses.asdict(train.setup_run(cfg).cfg)}
    own = dataclasses.replace(cfg, out_dir=str(tmp_path / "own"))
    ckpt.wait(ckpt.save(tmp_path / "own/ckpt", 2, state, meta))
    val_loss = rows(cfg.out_dir, "eval")[-1]["val_loss"]
    assert train.main(dataclasses.replace(own, mode="eval"))["val_loss"] == val_loss
    refused("own/ckpt: checkpoint 2 was not saved by a run: .* no data, hooks, progress;",
            dataclasses.replace(own, steps=3))
    refused("own/ckpt: checkpoint 2 was not saved by a run", tiny(
        steps=3, out_dir=str(tmp_path / "branch"), branch_from=f"{tmp_path}/own@2"))


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_text("")])
def test_a_lost_config_json_is_that_of_the_checkpoint(spoil, tiny, capsys):
    """The run resumes by its folder alone, and has the file again.

    Break: config.py: return json.dumps(content["body"]["config_file"]) => return None
    """
    cfg = tiny(steps=2, eval_every=0, lr=1e-3, stop=("9",))
    train.main(cfg)
    path = Path(cfg.out_dir, "config.json")
    text = path.read_text()
    spoil(path)
    assert train.cli(["--out_dir", cfg.out_dir, "--steps", "3"]) == 0
    assert f"{path} was missing or empty: it is written again" in capsys.readouterr().out
    assert ckpt.latest(f"{cfg.out_dir}/ckpt") == 3
    found, expected = json.loads(path.read_text()), json.loads(text)
    assert found == expected | {"steps": 3}
    spoil(path)  # and the newest checkpoint is corrupted too
    meta = Path(cfg.out_dir, "ckpt/000000003/meta.json")
    meta.write_text(meta.read_text().replace('"d_ff": 0', '"d_ff": 7'))
    assert train.cli(["--out_dir", cfg.out_dir, "--steps", "3"]) == 0
    assert json.loads(path.read_text()) == expected | {"steps": 3}


def test_a_run_keeps_its_automatic_dtype_on_another_cpu(tiny, monkeypatch):
    """It resumes by its folder alone with the dtype that it began with.

    Break: train.py: typed = dataclasses.replace(run.typed, dtype=cfg.dtype) =>
    typed = run.typed
    """
    cfg = tiny(steps=1, eval_every=0, dtype="auto")
    monkeypatch.setattr(steplib, "_cpuinfo", lambda: "vendor_id : AuthenticAMD avx512_bf16")
    train.main(cfg)
    monkeypatch.setattr(steplib, "_cpuinfo", lambda: "vendor_id : GenuineIntel avx2")
    assert train.cli(["--out_dir", cfg.out_dir, "--steps", "2"]) == 0
    assert [row["config"]["dtype"] for row in rows(cfg.out_dir, "start")] == ["mixed"] * 2


@pytest.mark.parametrize("n, n_launches, evals, saves, kept", [
    (7, 2, [13], [(7, "second"), (13, "second"), (14, "stop")], [14]),
    (6, 3, [12], [(6, "stop"), (12, "stop"), (18, "stop")], [12, 18])])
def test_an_interval_in_time_counts_all_launches(n, n_launches, evals, saves, kept, tiny,
                                                 monkeypatch):
    """An evaluation every two hours comes in the second launch of 70 minutes, and a checkpoint that
    a time made passes. A step that a stop saved is not saved again.

    Break: train.py: progress.earlier_s = sum(saved["time_s"].values()) => pass
    """
    clock, past = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + past[0])

    def slow(event, row):
        if event == "step":
            past[0] += 600

    cfg = tiny(steps=20, eval_every="2h", save_every="1h", stop=(f"+{n}",), dtype="float32")
    for _ in range(n_launches):
        train.main(cfg, hooks=[slow])
    assert [row["step"] for row in rows(cfg.out_dir, "eval")] == evals
    assert [(row["step"], row["why"]) for row in rows(cfg.out_dir, "save")] == saves
    assert ckpt.steps(f"{cfg.out_dir}/ckpt") == kept


@pytest.mark.parametrize("name, package", [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_a_tracker_without_its_package_says_what_to_install(name, package, tiny, monkeypatch):
    """Before the data is opened, and no folder is left.

    Break: train.py: data.require("wandb", "track wandb") => __import__("wandb")
    """
    monkeypatch.setitem(sys.modules, package, None)
    refused(f"track {name}: needs `pip install {package}`", tiny(track=(name,)))
    assert not Path(tiny().out_dir).exists()


def test_a_refused_launch_leaves_only_folders_that_were_there(tiny):
    """Its own are deleted with their lock.

    Break: ckpt.py: if is_new: => if True:
    """
    out = Path(tiny().out_dir)
    refused("resume must", tiny(resume="must"))
    assert not out.exists()
    out.mkdir()
    refused("resume must", tiny(resume="must"))
    assert [path.name for path in out.iterdir()] == [".lock"]
    refused("as a /", tiny(out_dir=f"{out}/$\\frac$"))


@pytest.mark.slow
def test_a_dynamic_source_is_loaded_again(tiny, tmp_path, capsys):
    """A reload keeps step and moments; training continues if the source cannot be read.

    Break: train.py: open_sources(run) if source["dynamic"]] =>
    open_sources(run) if not source["dynamic"]]
    """
    other, states = str(tmp_path / "other"), []

    def save(step, value):
        params = {name: np.full(shape, value, np.float32)
                  for name, shape in (("embed", (256, 32)), ("final_norm", (32,)))}
        ckpt.wait(ckpt.save(other, step, {"params": params}))

    def watch(event, value):
        if event == "state":
            states.append(jax.device_get(value))
            if len(states) == 2:
                save(2, 0.5)
        if event == "reload":
            shutil.rmtree(other)

    save(1, 0.25)
    cfg = tiny(steps=6, eval_every=0, save_every=0, reload_every=3, lr=0.0,
               init_from=(f"{other} load=embed,final_norm dynamic=yes",))
    summary = train.main(cfg, hooks=[watch])
    assert (summary["step"], summary["exit_code"]) == (6, 0)
    assert event_steps(cfg.out_dir, "reload nonfatal_error") == [
        ("reload", 3), ("nonfatal_error", 6)]
    before, after = states[2], states[3]
    for name in ("embed", "final_norm"):
        assert (before["params"][name] == 0.25).all() and (after["params"][name] == 0.5).all()
    assert (after["params"]["layers.wq"] == before["params"]["layers.wq"]).all()
    assert after["step"] == 4
    moments, _ = ckpt.flatten(after["opt"])
    assert any(abs(x).max() > 0 for path, x in moments.items() if "embed" in path)
    words = f"reload: init_from {other}: holds no checkpoint and no weights"
    assert rows(cfg.out_dir, "nonfatal_error")[0]["error"].startswith(words)
    assert f"step      6  {words}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_keeps_its_checkpoints_in_an_object_store(tiny, tmp_path, monkeypatch):
    """A resume is bit-identical, and a run whose lock names another process ends.

    Break: train.py: run.check_lock() => pass
    """
    from test_ckpt import s3_server  # a late import: test_ckpt initializes the devices
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.setenv(key, "true")
    make = partial(tiny, eval_every=0)
    params = train.main(make(out_dir=str(tmp_path / "local")))["state"]["params"]
    with s3_server() as address:
        root = address.format("bucket").replace("some/run", "another/run")
        assert train.main(make(steps=4, ckpt_dir=root))["step"] == 4
        summary = train.main(make(ckpt_dir=root))
        assert same(summary["state"]["params"], params)
        assert ckpt.steps(root) == [4, 8] and not Path(tiny().out_dir, "ckpt").exists()
        assert summary["checkpoint"] == ckpt.join_path(root, "000000008")
        other = make(steps=1, lr=0.0, init_from=(root,), out_dir=str(tmp_path / "next"))
        assert same(train.main(other)["state"]["params"], params)

        def take(event, row):
            if event == "dispatch" and row["step"] == 10:
                other = json.dumps({"out_dir": tiny().out_dir, "process": "7 on b"})
                ckpt._open(root).write(".lock", other.encode()).result()

        refused("names another process, .*7 on b", make(ckpt_dir=root, steps=12), hooks=[take])
        assert ckpt.steps(root) == [4, 8]
        with pytest.raises(ValueError, match="another run is writing to it, .*7 on b"):
            train.main(make(ckpt_dir=root, out_dir=str(tmp_path / "another")))
    refused(r"out_dir 's3://a/b': must be on this machine", tiny(out_dir="s3://a/b"))


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_bit_identical(tiny, tmp_path):
    """A run with 3 SIGKILLs ends as an uninterrupted one.

    Break: data.py: return step * batch_size + rows.astype(np.int64) =>
    return step * batch_size + rows.astype(np.int64) + time.time_ns() % 7
    """
    base = dict(steps=30, save_every=1, eval_every=10, max_to_keep=2, schedule="cosine")
    straight = tiny(**base, out_dir=str(tmp_path / "straight"))
    train.main(straight)
    killed, rng = tiny(**base), random.Random(0)
    root = f"{killed.out_dir}/ckpt"
    for _ in range(3):
        saved = ckpt.latest(root)
        run, _ = command(killed)
        wait_for(lambda saved=saved: ckpt.latest(root) != saved)
        time.sleep(rng.uniform(0, 0.05))
        run.kill()
        run.join()
        assert run.exitcode == -signal.SIGKILL
    code, output = ended(*command(killed))
    assert code == 0, output
    assert losses(killed.out_dir) == losses(straight.out_dir)
    assert same(arrays(killed.out_dir), arrays(straight.out_dir))


@pytest.mark.slow
def test_an_error_in_an_evaluation_saves_first(tiny, monkeypatch):
    """A step or an evaluation raises, or does not fit; the next launch evaluates.

    Break: train.py: save_state(run, state, step, "error") => pass
    """
    def shrink(event, value):
        if event == "start":
            patch.setattr(steplib, "memory_limit", lambda mesh: 1)

    straight = tiny(out_dir=f"{tiny().out_dir}/straight", eval_every=3, save_every=0)
    train.main(straight)
    cfg = tiny(eval_every=3, save_every=0)
    with pytest.raises(RuntimeError, match="crash"):
        train.main(cfg, [crash_at("before_eval", 3)])
    assert ckpt.steps(Path(cfg.out_dir) / "ckpt") == [3]
    assert rows(cfg.out_dir, "save")[-1]["why"] == "error"
    monkeypatch.setattr(train, "memory_advice", lambda *args: "")  # its trials take 10 s
    with monkeypatch.context() as patch, pytest.raises(
            ValueError, match="does not fit: evaluation needs .* parameters take"):
        train.main(cfg, [shrink])
    assert not rows(cfg.out_dir, "eval")
    train.main(cfg)
    assert event_steps(cfg.out_dir, "eval") == [("eval", 3), ("eval", 6), ("eval", 8)]
    assert losses(cfg.out_dir) == losses(straight.out_dir)

    for step, saved in ((1, []), (4, [3])):  # dp=2: the row of step 3 is pending
        cfg = tiny(out_dir=f"{tiny().out_dir}/{step}", dp=2, eval_every=0, save_every=0)
        with pytest.raises(RuntimeError, match="crash"):
            train.main(cfg, [crash_at("dispatch", step)])
        assert ckpt.steps(Path(cfg.out_dir) / "ckpt") == saved
        assert [row["step"] for row in rows(cfg.out_dir, "log")] == list(range(1, step))


@pytest.mark.slow
def test_the_best_checkpoint_belongs_to_its_validation_data(tiny, tmp_path):
    """With other data the best values begin again; a finished run evaluates them.

    Break: train.py: if saved["validation"] == run.validation: => if True:
    """
    for name, text in (("easy", "a" * 4000), ("hard", "The quick brown fox. " * 200)):
        (tmp_path / f"{name}.txt").write_text(text)
    base = dict(keep_best="val_loss", eval_every=4, eval_batches=2, n_layers=1)
    train.main(tiny(**base, steps=4, val_data=(f"{tmp_path}/easy.txt",)))
    summary = train.main(tiny(**base, steps=8, val_data=(f"{tmp_path}/hard.txt",),
                              allow_change=("val_data",)))
    assert summary["best_val_step"] == 8
    assert ckpt.steps(Path(tiny().out_dir) / "ckpt" / "best") == [8]
    cfg = tiny(**base | {"eval_batches": 1}, steps=9, val_data=(f"{tmp_path}/hard.txt",))
    assert train.main(cfg)["best_val_step"] == 9
    assert train.main(cfg)["reason"] == "already finished"
    again = train.main(dataclasses.replace(cfg, eval_batches=2))
    assert (again["reason"], again["val_n_labels"]) == ("all 9 steps are done", 256)
    larger = dataclasses.replace(cfg, eval_batches=2, eval_batch_size=16)
    assert train.main(larger)["val_n_labels"] == 512


@pytest.mark.slow
def test_a_run_stops_as_requested_and_continues(tiny):
    """A metric, a number of steps, the stop file; a condition that holds ends a resume.

    Break: train.py: progress.last_metrics = saved["last_metrics"] => pass
    """
    cfg = tiny(stop=("val_loss<9",), save_every=0)
    out = Path(cfg.out_dir)

    def request(event, value):
        if event == "step" and value["step"] == 6:
            (out / "stop").touch()

    assert train.main(cfg)["step"] == 4
    summary = train.main(cfg)
    assert (summary["step"], summary["exit_code"]) == (4, 0)
    assert summary["reason"].startswith("val_loss ") and " is below " in summary["reason"]
    assert rows(out, "stop")[-1]["reason"] == summary["reason"]
    other = dataclasses.replace(cfg, eval_batches=1, stop=("val_loss<9", "+1"))
    assert train.main(other)["step"] == 4  # its own validation loss is measured first
    assert event_steps(out, "eval") == [("eval", 4), ("eval", 4)]
    summary = train.main(dataclasses.replace(cfg, stop=()), [request])
    assert (summary["step"], summary["reason"]) == (6, f"{out}/stop exists")
    assert not (out / "stop").exists() and ckpt.steps(out / "ckpt") == [4, 6]
    summary = train.main(tiny(stop=("los<3",), eval_every=0, out_dir=f"{out}_los"))
    assert summary["reason"].startswith("--stop los<3: unknown metric los (nearest: loss)")
    assert summary["exit_code"] == 2 and ckpt.latest(summary["checkpoint"][:-10]) < 4
    for change, words in (
            ({"stop": ("val_loss<3",), "val_frac": 0.0}, "val_loss<3: the run has no valid"),
            ({"keep_best": "val_lossy"}, "keep_best val_lossy: evaluations have no such metric")):
        refused(words, tiny(**change, out_dir=f"{out}_other"))


@pytest.mark.slow
def test_a_run_resumes_bit_identical_on_its_mesh_and_within_rounding_on_others(tiny, tmp_path):
    """On fewer devices losses of packed documents agree to 2e-6.

    Break: ckpt.py: ranges = [range(n)[part] for => ranges = [range(n) for
    """
    texts = [f"{i} and {i + 1}" for i in range(300)]
    make = partial(tiny, data=(write_texts(tmp_path, texts),), document_mask=True, n_kv_heads=4,
                   schedule="cosine", dtype="float32", dp=1)
    mesh = dict(tp=2, sp=2)
    straight = make(**mesh, out_dir=str(tmp_path / "straight"))
    train.main(straight)
    half = make(**mesh, out_dir=str(tmp_path / "half"))
    train.main(half, hooks=[stop_at(4)])
    assert 1 < rows(half.out_dir, "log")[0]["attended_keys"] < 8.5
    for sizes in (mesh, dict(tp=1, sp=1)):
        out = tmp_path / f"tp{sizes['tp']}"
        shutil.copytree(half.out_dir, out)
        train.main(dataclasses.replace(half, out_dir=str(out), **sizes))
        for actual, expected in zip(losses(out)[:2], losses(straight.out_dir)[:2], strict=True):
            np.testing.assert_allclose(np.array(actual), np.array(expected), rtol=2e-6)
        if sizes is mesh:
            assert losses(out) == losses(straight.out_dir)
            assert same(arrays(out), arrays(straight.out_dir))


TWO = dict(dp=1, fsdp=2, dtype="float32")  # of all runs of two processes, which share programs


def two(cfg, *flags, of_one=()):
    """Start both processes of a run, of which process 1 has more flags, as `command` does."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    flags = [*flags, "--coordinator", f"127.0.0.1:{port}", "--n_processes", "2", "--process_id"]
    return [command(cfg, 1, [*more, *flags, str(i)]) for i, more in enumerate(((), of_one))]


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name in actual:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_two_processes_train_like_one(tiny, tmp_path):
    """Losses, arrays, samples and the export agree up to float32 rounding. Values per example of
    the same checkpoint are identical.

    Break: train.py: batch = source["batch"](0 if pinned else index, rows) =>
    batch = source["batch"](index, rows - rows.min())
    """
    cfg = tiny(**TWO, sample_tokens=6, sample_every=4, temperature=0.0, profile="3:3",
               log_all_processes=True,
               out_dir=str(tmp_path / "two"), export=str(tmp_path / "two_exported"))
    runs = two(cfg)
    alone = dataclasses.replace(cfg, out_dir=str(tmp_path / "one"), profile="",
                                log_all_processes=False,
                                export=str(tmp_path / "one_exported"))
    train.main(alone)
    (code_0, output_0), (code_1, output_1) = [ended(*run) for run in runs]
    assert (code_0, code_1) == (0, 0), output_0 + output_1
    assert "done:" in output_0 and "done:" not in output_1
    assert output_1.count("process 1  step ") == cfg.steps and "process 0 " not in output_0
    folders = [Path(cfg.out_dir, "profile"), Path(cfg.out_dir, "profile/process_1")]
    assert [len(list(folder.glob("plugins/**/*.xplane.pb"))) for folder in folders] == [1, 1]
    for actual, expected in zip(losses(cfg.out_dir)[:2], losses(alone.out_dir)[:2], strict=True):
        np.testing.assert_allclose(np.array(actual), np.array(expected), rtol=2e-6)
    saved, expected = arrays(cfg.out_dir), arrays(alone.out_dir)
    assert_close(saved, expected)
    texts = [[r.get("texts") for r in rows(c.out_dir, "sample")] for c in (cfg, alone)]
    assert texts[0] == texts[1] and len(texts[0]) == 2 and texts[0][0]
    exported, expected = (safetensors.numpy.load_file(f"{c.export}/model.safetensors")
                          for c in (cfg, alone))
    assert_close(exported, expected)
    np.testing.assert_array_equal(exported["model.embed_tokens.weight"], saved["params/embed"])
    flags = ["--mode", "eval", "--eval_batches", "0", "--examples_file"]
    runs = two(cfg, *flags, f"{tmp_path}/two.jsonl")
    assert train.cli(["--out_dir", cfg.out_dir, *flags, f"{tmp_path}/one.jsonl"]) == 0
    assert [ended(*run)[0] for run in runs] == [0, 0]
    examples = [(tmp_path / f"{name}.jsonl").read_text() for name in ("two", "one")]
    assert examples[0] == examples[1] != ""


@pytest.mark.slow
def test_processes_agree_on_the_length_of_the_data_and_on_a_stop(tiny):
    """Both use process 0's length, and stop at one step after a signal to process 1.

    Break: train.py: step % (cfg.log_every or 10): => step % (cfg.log_every or 10) != 1:
    """
    cfg = tiny(**TWO | dict(epochs=1.0, save_every=0, log_every=7))
    hook = Path(cfg.out_dir + "_hook.py")
    hook.write_text("import jax, os, signal, train\ndef stop(event, value):\n"
                    "    if event == 'start':\n"
                    "        print('of', value['config']['steps'], 'steps', flush=True)\n"
                    "    if event == 'log' and jax.process_index() and value['step'] == 14:\n"
                    "        os.kill(os.getpid(), signal.SIGTERM)\n"
                    "    if event == 'log' and jax.process_index() and value['step'] == 7:\n"
                    "        return value | {'request': ['save']}\n"
                    "    if event == 'before_save' and value['why'] == 'request':\n"
                    "        return value | {'skip': '' if jax.process_index() else 'not now'}\n"
                    "def more(cfg, parts):\n"
                    "    sources = opened(cfg, parts)\n"
                    "    sources['train']['n'] *= 1 + jax.process_index()\n"
                    "    return sources\n"
                    "opened, train.TEXT['open'] = train.TEXT['open'], more\n")
    runs = two(cfg, "--hooks", f"{hook}:stop")
    (code_0, output_0), (code_1, output_1) = [ended(*run) for run in runs]
    assert (code_0, code_1) == (0, 0), output_0 + output_1
    assert re.search("of .* steps", output_0)[0] in output_1
    stop = rows(cfg.out_dir, "stop")[-1]
    assert stop["reason"] == "SIGTERM" and stop["step"] % 7 == 0
    skip, = rows(cfg.out_dir, "skip")
    assert (skip["reason"], skip["step"] % 7) == ("not now", 1)
    assert 14 <= stop["step"] < 50 and ckpt.latest(Path(cfg.out_dir) / "ckpt") == stop["step"]


# ---- signals

def test_the_first_signal_stops_the_run_and_the_second_ends_the_process(monkeypatch, capfd):
    """Under nohup signals are ignored; handlers are restored.

    Break: train.py: os._exit(128 + number) => os._exit(number)
    """
    codes, names = [], (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(n) for n in names]
    monkeypatch.setattr(os, "_exit", codes.append)
    progress = train.init_progress(0.0)
    with train.catch_signals(progress):
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
        progress.in_loop, progress.signal = True, None
        for n in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):  # `timeout` sends two
            os.kill(os.getpid(), n)
        wait_for(lambda: progress.signal == "SIGTERM" and progress.requests == {"save"})
        assert not codes
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)
    assert codes == [130]
    assert capfd.readouterr().err.endswith("\nSIGINT again: ending at once\n")
    assert [signal.getsignal(n) for n in names] == handlers

    def elsewhere():
        with train.catch_signals(progress):
            codes.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert codes[1:] == [handlers[1]]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with train.catch_signals(progress):
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, handlers[2])


def test_a_signal_whose_exception_is_lost_stops_the_loop(tiny):
    """Python ignores one that is raised in a callback of the garbage collector.

    Break: train.py: progress.signal = name => pass
    """
    def lose(event, row):
        if event == "start":
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)

    summary = train.main(tiny(), hooks=[lose])
    assert (summary["reason"], summary["step"], summary["checkpoint"]) == ("SIGTERM", 0, None)


def test_a_closed_terminal_ends_no_run(tiny, monkeypatch):
    """A broken pipe or a closed terminal ends no run, with lines or with the progress bar.

    Break: train.py: os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno()) => pass
    """
    start = {"step": 0, "unit": "token", "origin": "nothing", "compile_s": 1,
             "memory_bytes_per_device": {"total": 1}}
    log = {"step": 1, "loss": 1.0, "lr": 1e-3, "tokens_per_s": 1.0, "data_wait_s": 0.0}
    for make in (os.pipe, pty.openpty):
        reading_end, writing_end = make()
        with open(writing_end, "w") as stdout, open(os.dup(writing_end), "w") as stderr, \
                monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "stderr", stderr)
            observe = train.console(tiny())
            observe("start", start)
            assert b"compiled in 1.0 s" in os.read(reading_end, 10**4)
            os.close(reading_end)
            for _ in range(2):
                train.print0("a line")
                observe("step", {"step": 1})
                observe("log", log)
            observe("error", {})


def test_processes_combine_their_requests_at_multiples_of_log_every(tiny, monkeypatch):
    """Both processes get the later time, the stop and all events.

    Break: train.py: max(found["elapsed_s"] for found in everywhere) =>
    everywhere[1]["elapsed_s"]
    """
    gathered, other = [], {"elapsed_s": 250.0, "stop": "enough", "events": ["eval"]}

    def gather(found):
        gathered.append(found)
        return [other, found]

    progress = train.init_progress(0.0)
    run = types.SimpleNamespace(
        cfg=tiny(log_every=7, steps=50), first_step=0, stop_conditions=[], progress=progress)

    def poll(step, is_waiting=False):
        found = train.poll_requests(run, step, is_waiting)
        return found and found[0], progress.polled["events"]

    monkeypatch.setattr(ckpt, "gather", gather)
    monkeypatch.setattr(train, "time", types.SimpleNamespace(perf_counter=lambda: 100.0))
    progress.requests |= {"sample", "save"}
    progress.hook_stop = "a hook"
    assert poll(4) == (None, ["sample", "save"]) and progress.polled["elapsed_s"] == 100
    assert poll(4, is_waiting=True) == ("a hook", ["sample", "save"])
    stop = Path(tiny().out_dir) / "stop"
    stop.parent.mkdir()
    stop.touch()
    assert poll(5) == (f"{stop} exists", ["sample", "save"])
    progress.signal = "SIGINT"
    assert poll(6)[0] == "SIGINT" and train.signal_received(progress)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not train.signal_received(progress)
    assert poll(7, is_waiting=True)[0] is None
    stop.unlink()
    progress.signal = None
    progress.polled = {"elapsed_s": 5.0, "stop": None, "events": ["save"]}
    assert poll(8) == (None, []) and not gathered
    assert poll(14) == ("enough", ["eval", "sample", "save"])
    assert progress.polled["elapsed_s"] == 250 and gathered[0]["stop"] is None


def test_a_signal_during_an_evaluation_ends_it(tiny):
    """A signal ends the last evaluation without a result, and the next launch runs it.

    Break: train.py: return signal_received(progress) => return False
    """
    batches = []

    def hook(event, value):
        if event == "val_data":
            batches.append(value)
            if len(batches) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # time for the signal thread

    cfg = tiny(steps=2, eval_batches=0)
    summary = train.main(cfg, [hook])
    assert summary["exit_code"] == 0 and "val_loss" not in summary
    assert event_steps(cfg.out_dir, "save eval") == [("save", 2)]
    assert "val_loss" in train.main(cfg)
    assert event_steps(cfg.out_dir, "save eval") == [("save", 2), ("eval", 2), ("save", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["data", "compile"])
def test_a_signal_before_the_first_step_ends_at_once(tiny, moment):
    """During tokenization or compilation; no config.json is left.

    Break: train.py: elif not progress.in_loop: => elif False:
    """
    cfg = tiny(steps=2, n_layers=48, d_model=256, seq_len=256, cache_dir="", eval_every=0)
    if moment == "data":
        Path(cfg.data[0]).write_text("a word and " * 10**7)
        cfg = dataclasses.replace(cfg, token_cache=str(Path(cfg.out_dir).parent / "token_cache"))
    (run, log), out = command(cfg), Path(cfg.out_dir)
    words = "compiling the training step"
    wait_for(lambda: (out / ".lock").exists() and (moment == "data" or words in log.read_text()))
    time.sleep(0.3)
    os.kill(run.pid, signal.SIGTERM)
    code, output = ended(run, log, 5)
    assert code == 0 and output.endswith("SIGTERM: ended; nothing to save\n"), output
    assert (words in output) == (moment == "compile") and not (out / "config.json").exists()


# ---- errors of the user

def test_bad_input_is_a_one_line_error(tiny, tmp_path, capsys, monkeypatch):
    """Bad values and unreadable files give exit code 2 and a sentence before compilation.

    Break: train.py: return isinstance(error, ValueError) and => return False and
    """
    (tmp_path / "file").write_text("")
    (tmp_path / "ids.bin").write_bytes(np.full(1000, 999, np.uint16).tobytes())
    Path(tiny().out_dir + ".json").write_text(config.to_json(tiny()))
    for flags, words in {
        "--n_heads 3": "d_model 32: must be a multiple of 2 x n_heads = 6",
        "--dp 3 --tp 3": "must multiply to 8 devices",
        "--dp 8 --batch_size 9":
            "batch_size 9: must be a multiple of grad_accum_steps x dp x fsdp x ep",
        "--attention pallas": "attention pallas: cannot run on this device (cpu)",
        "--freeze *": "no parameter is trained; freeze fewer",
        "--lora_rank 2 --lora_targets wq": "lora_targets 'wq': matches no parameter",
        "--lora_rank 2": "lora_rank 2: a fresh initialization has nothing to tune; name the",
        "--lr_mult embd=2": "lr_mult 'embd': matches no parameter; there are",
        "--decay_mult embed": "'embed' is not a number",
        "--lr_mult embed=-1": "lr_mult 'embed=-1': must be at least 0, and finite",
        "--decay_mult embed=1e400": "decay_mult 'embed=1e400': must be at least 0, and finite",
        "--optimizers embed=adamm": "optimizers 'embed=adamm': unknown (nearest: adamw",
        "--vocab_size 255 --dp 1 --tp 2 --fsdp -1":
            "embed (255, 32): dim 255 must be a multiple of the size of tp = 2",
        f"--data {tmp_path}/file": " tokens, and no sequence of 16",
        f"--data {tmp_path}/ids.bin": "token id 999 is not in [0, 256)",
        f"--val_data {tmp_path}/ids.bin": "token id 999 is not in [0, 256)",
        f"--data {'x' * 300}": "no such file",
        f"--out_dir {tmp_path}/file/out": "cannot be written",
        f"--init_from {tmp_path}": "holds no checkpoint",
        "--mode eval --out_dir /nonexistent": "holds no checkpoint",
    }.items():
        code = train.cli(["--config", tiny().out_dir + ".json", *flags.split()])
        output = capsys.readouterr()
        assert code == 2, (flags, output)
        assert output.err.startswith("error: ") and words in output.err, (
            "if you changed the error, edit it in this test", flags, output)
        assert "compil" not in output.out
    assert train.cli(["--config", "/proc/sys/vm/drop_caches"]) == 2  # not even root may read it
    assert "error: " in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)  # the project's folder may have a run out/default
    monkeypatch.setattr(sys, "argv", ["train.py", "--n_layers", "0"])
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert e.value.code == 2 and capsys.readouterr().err.startswith("error: config: n_layers 0: ")


@pytest.mark.slow
def test_data_mode_tokenizes_without_a_device(tiny):
    """--mode data tokenizes and ends even if JAX has no device; training does not tokenize again.

    Break: train.py: ("train", "val")), print, with_examples=True) => ("train", "val")), print0,
    with_examples=True)
    """
    cfg = tiny(token_cache=str(Path(tiny().out_dir).parent / "token_cache"))
    flags = f"--mode data --data {cfg.data[0]} --seq_len 16 --batch_size 8 --fsdp 64 --dp 1"
    run = subprocess.run(
        [sys.executable, ROOT / "train.py", *flags.split(), "--token_cache", cfg.token_cache],
        env=os.environ | {"JAX_PLATFORMS": "no_such_device"}, capture_output=True, text=True)
    n = len(Path(cfg.data[0]).read_bytes()) + 2
    n_train = round(0.9 * n)
    assert run.stdout.splitlines()[:4] == [
        f"train data: {n_train:,} tokens, {-(-(n_train - 1) // 16):,} sequences, 1 documents",
        f"val data: {n - n_train:,} tokens, {-(-(n - n_train - 1) // 16):,} sequences",
        "example 1, labels within {+ +}:", "\\x00{+0 bottles of bee+}"], run.stderr
    made = {p: p.stat().st_mtime_ns for p in Path(cfg.token_cache).rglob("*")
            if p.suffix != ".lock"}
    data.open_text(("train", "val"), cfg)
    assert made == {p: p.stat().st_mtime_ns for p in made}


def test_data_mode_adopts_the_config_of_init_from(tiny, capsys):
    """--mode data prepares the data as training will read it.

    Break: train.py: # as in training => if False else cfg
    """
    shorter = {"update_config": lambda cfg: dataclasses.replace(cfg, seq_len=9)}
    for changes, n in (({}, "1,203 sequences"), (shorter, "2,139 sequences")):
        train.main(tiny(mode="data"), (), train.TEXT | changes)
        assert n in capsys.readouterr().out


@pytest.mark.slow
def test_samples_on_a_mesh_equal_those_on_one_device(tiny, capfd):
    """Greedy samples of 3 rows, although tp x sp exceeds the number of KV heads.

    Break: model.py: K = lcm(cfg.n_kv_heads, _axis_size("tp", "sp")) => K = cfg.n_kv_heads
    """
    cfg = tiny(n_heads=8, temperature=0.0, sample_tokens=6, n_samples=3, prompt="beer")
    texts = []
    for mesh in (dict(dp=1), dict(dp=1, tp=2, sp=2)):
        run = train.setup_run(dataclasses.replace(cfg, **mesh))
        place = {name: NamedSharding(run.mesh, row["spec"])
                 for name, row in run.table.items()}
        init = jax.jit(partial(model.init, cfg=run.cfg), out_shardings=place)
        with jax.set_mesh(run.mesh):
            texts.append(run.task["sample"](
                init(jax.random.key(0)), jax.random.key(1), None, run.cfg))
    assert texts[0] == texts[1]
    assert "rematerialization" not in capfd.readouterr().err


# ---- plans and memory

@pytest.mark.slow
def test_a_plan_counts_the_memory_of_the_step(tiny):
    """As by hand and as a run logs it; a plan allocates no array.

    Break: step.py: x.sharding.shard_shape(x.shape) => x.shape
    """
    cfg = tiny(mode="plan", dp=1, fsdp=2, tp=2, n_kv_heads=4)
    gc.collect()  # arrays of other tests must not be freed later
    before = len(jax.live_arrays())
    cost = train.main(dataclasses.replace(cfg, data=("/nowhere",)))
    assert len(jax.live_arrays()) == before and not Path(cfg.out_dir).exists()
    full = config.derive_text(dataclasses.replace(cfg, vocab_size=256))
    by_hand = sum(4 * np.prod(row["shape"]) // 2 ** sum(
        f"'{axis}'" in str(row["spec"]) for axis in config.AXES if getattr(cfg, axis) == 2)
                  for row in model.param_table(full).values())
    assert cost["memory"]["parameters"] == by_hand
    assert cost["memory"]["moments"] == 2 * by_hand + 4  # Adam counts its steps
    train.main(dataclasses.replace(cfg, mode="train", steps=1))
    assert cost["memory"] == rows(cfg.out_dir, "start")[0]["memory_bytes_per_device"]


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_refused_before_allocation(tiny, monkeypatch, capsys):
    """With one byte too few, a run and a plan suggest a legal change.

    Break: step.py: check_fits(memory, {"a step": memory["total"]}, steps["mesh"]) => pass
    """
    cfg = tiny(batch_size=64, remat="full")
    cost = train.main(dataclasses.replace(cfg, mode="plan"))
    needed, output = cost["memory"]["total"], capsys.readouterr().out.splitlines()
    assert (cost["step"], cost["reason"], cost["exit_code"], cost["fits"]) == (0, "plan", 0, True)
    flops, formula = model.flops_per_token(train.setup_run(cfg).cfg, 16)
    assert cost["flop"] == {f"model: {formula}": flops * 1024,  # 64 x 16 tokens
                            "recomputed by remat": flops * 1024 / 3}
    assert f"  {flops * 1024 / 1e12:10,.4g} TFLOP  model: {formula}" in output
    in_all = {"in all during a step": needed,
              "in all during evaluation": cost["peaks"]["evaluation"]}
    amounts = {kind: n for kind, n in cost["memory"].items() if kind != "total"} | in_all
    shown = [f"  {n / 2**30:10,.4g} GiB  {of}" for of, n in amounts.items()]
    assert output[-1 - len(shown):-1] == shown
    assert output[-1].startswith("fits in ")
    monkeypatch.setattr(steplib, "memory_limit", lambda mesh: needed - 1)
    cost = train.main(dataclasses.replace(cfg, mode="plan"))
    assert cost["exit_code"] == 1 and not cost["fits"]
    assert "to change: --grad_accum_steps 2 (0.0" in capsys.readouterr().out
    monkeypatch.setattr(train, "memory_advice", lambda *args: "as planned")  # its trials take 5 s
    words = "a step needs .* GiB on each device, which has .*; to change: as planned"
    refused(words, dataclasses.replace(cfg, epochs=1.0, steps=config.Config.steps))
    assert not ckpt.steps(Path(cfg.out_dir) / "ckpt")
    assert not Path(cfg.out_dir, "metrics.jsonl").exists()


@pytest.mark.slow
def test_an_evaluation_alone_needs_only_its_own_memory(tiny, monkeypatch):
    """With one byte less it is refused before the parameters are read.

    Break: train.py: steplib.check_fits(counted["memory"], counted["peaks"], run.mesh) => pass
    """
    cfg = tiny(steps=1)
    train.main(cfg)
    cost, alone = (train.count_programs(train.setup_run(dataclasses.replace(cfg, mode=mode)))
                   for mode in ("plan", "eval"))
    assert list(cost["peaks"]) == ["a step", "evaluation"]
    n_params = 256 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96 + 3 * 32 + 2 * 8
    state, params = 3 * 4 * n_params + 4 + 8, 4 * n_params  # Adam's count, step and skipped
    evaluation = cost["programs"]["evaluation"].memory_analysis()
    assert cost["memory"]["parameters"] == params, "if you added a parameter, edit n_params here"
    assert cost["peaks"]["evaluation"] == (
        state + 2 * 4 * 8 * 16 + evaluation.temp_size_in_bytes + evaluation.output_size_in_bytes
    ), "if you added to the state, edit `state` in this test"
    needed = cost["peaks"]["evaluation"] - (state - params)
    assert alone["peaks"] == {"evaluation": needed}
    cfg = dataclasses.replace(cfg, mode="eval")
    monkeypatch.setattr(steplib, "memory_limit", lambda mesh: needed)
    assert train.main(cfg)["exit_code"] == 0
    monkeypatch.setattr(steplib, "memory_limit", lambda mesh: needed - 1)
    monkeypatch.setattr(train, "load_saved", lambda *args: pytest.fail("parameters were read"))
    refused("does not fit: evaluation needs .*; to change: ", cfg)


def deep_loss(params, batch, cfg):
    """Apply wide layers to the rows of x, in cfg.mlp_tiles parts one after the other."""
    @jax.checkpoint
    def part(x):
        for _ in range(4):
            x = jnp.tanh(x @ params["up"]) @ params["up"].T
        return (x * x).sum()

    x = batch["x"]
    parts = jax.lax.map(part, x.reshape(cfg.mlp_tiles, len(x), -1, 8))
    return {"objective": parts.sum()}, {"objective": jnp.float32(x.size)}


@pytest.mark.slow
def test_a_plan_combines_flags_until_the_step_fits(tiny, monkeypatch):
    """The fewest microbatches that fit, or also the flag that helps, and no flag in vain.

    Break: train.py: changed = dataclasses.replace(cfg, **({"epochs": 0.0} | changes)) =>
    changed = cfg
    """
    # A task whose step compiles quickly. --remat saves it no memory.
    task = {"table": lambda cfg: {"up": dict(shape=(8, 256), spec=P(), init=("normal", 1.0))},
            "loss": deep_loss, "open": None,
            "batch": lambda cfg: {"x": ((cfg.batch_size, 64, 8), jnp.float32, P("fsdp"))},
            "memory_flags": lambda sp, cfg: [{"remat": "full"}, {"mlp_tiles": 8}]}

    def planned(**changes):
        return train.estimate(train.setup_run(tiny(batch_size=64, mode="plan", **changes), task))

    all_at_once, rows, least = (planned(**changes)["peaks"]["a step"] for changes in (
        {}, dict(grad_accum_steps=64), dict(grad_accum_steps=64, mlp_tiles=8)))
    assert least < rows < all_at_once / 4
    for limit, names in (((all_at_once + rows) // 2, ["grad_accum_steps"]),
                         ((rows + least) // 2, ["grad_accum_steps", "mlp_tiles"])):
        monkeypatch.setattr(steplib, "memory_limit", lambda mesh, limit=limit: limit)
        flags = planned()["error"].partition("to change: ")[2]
        found = {name: int(value) for name, value in re.findall(r"--(\w+) (\S+)", flags)}
        assert list(found) == names, flags
        fitting = planned(**found)
        assert fitting["fits"] and f"({fitting['peaks']['a step'] / 2**30:,.4g} GiB)" in flags
        found.popitem()
        assert not planned(**found)["fits"]


def test_the_last_pattern_sets_the_group_of_a_parameter():
    """The last pattern that matches a parameter wins.

    Break: model.py: for text in getattr(cfg, field): => for text in reversed(getattr(cfg, field)):
    """
    cfg = config.Config(lr_mult=("*=2", "embed=0.5"), optimizers=("layers.w*=muon",))
    table = train.setup_run(cfg, devices=jax.devices()[:1]).table
    assert {name: row["lr_mult"] for name, row in table.items()} == {
        name: 0.5 if name == "embed" else 2 for name in table}
    assert {name for name, row in table.items() if "optimizer" in row} == {
        name for name in table if name.startswith("layers.w")}


# ---- stops

@pytest.mark.parametrize("stop, values, reason, code", [
    ("", {"step": 20}, "all 20 steps are done", 0),
    ("9", {"step": 9}, "step 9 has reached 9", 0),
    ("+3", {"step": 7}, "new_steps 3 has reached 3", 0),
    ("1h30m", {"elapsed_s": 5400.0}, "second 5400 has reached 5400", 0),
    ("1h30m", {"elapsed_s": 5399.0}, None, None),
    ("", {"stop": "SIGTERM"}, "SIGTERM", 0),
    ("val_loss<2.5", {"val_loss": 2.4375}, "val_loss 2.4375 is below 2.5", 0),
    ("val_loss<2.5", {"val_loss": 2.5}, None, None),
    ("loss>9", {"loss": 12.0}, "loss 12 is above 9", 1),
    ("loss<9", {"loss": np.nan}, None, None),
    ("", {"is_finite": False}, "a loss or gradient is not finite near step 4; that update was "
                            "skipped", 1),
    # If several apply: the first condition, a request, the last step.
    ("loss<9 loss>0.5 1s", {"elapsed_s": 1.0, "loss": 1.0}, "loss 1 is below 9", 0),
    ("loss>0.5", {"step": 20, "loss": 1.0, "stop": "x"}, "loss 1 is above 0.5", 1),
    ("", {"step": 20, "stop": "enough"}, "enough", 0)])
def test_each_stop_has_its_reason_and_exit_code(stop, values, reason, code):
    """If several conditions apply, the first in a fixed order wins.

    Break: config.py: {"<": operator.lt, => {"<": operator.le,
    """
    cfg = config.Config(steps=20, out_dir="runs{x}", stop=tuple(stop.split()))
    config.validate(cfg, 1)
    polled = {"elapsed_s": 0.0, "stop": None, "events": []}
    polled |= {k: values[k] for k in polled.keys() & values.keys()}
    metrics = {k: x for k, x in values.items() if k not in ("step", "is_finite", *polled)}
    progress = types.SimpleNamespace(
        polled=polled, last_metrics=metrics, is_finite=values.get("is_finite", True))
    found = train.stop_reason(types.SimpleNamespace(
        cfg=cfg, first_step=4, stop_conditions=config.parse_stops(cfg), progress=progress),
        values.get("step", 4))
    assert found == (reason and (reason, code))


def test_a_metric_that_meets_a_stop_condition_once_stops_the_run(tiny):
    """A run stops even if the metrics of the step that ran meanwhile no longer meet the condition.

    Break: train.py: stop_reason(run, step) or stop => stop_reason(run, step)
    """
    cfg = tiny(stop=("odd>0",), log_every=1, save_every=0, eval_every=0, dp=2)
    summary = train.main(cfg, [lambda event, row: row | {"odd": float(row["step"] == 3)}
                               if event == "log" else None])
    assert (summary["step"], summary["exit_code"]) == (4, 0)
    assert summary["reason"] == "odd 1 is above 0" == rows(cfg.out_dir, "stop")[0]["reason"]


# ---- events, time, trackers

def wandb_records(file):
    """Wait until wandb's process has written the exit record; return all records of the file, which
    is a LevelDB log in one block: of each record a checksum, the length, the kind 1, the content.
    """
    from wandb.proto import wandb_internal_pb2

    def read():
        text, found = file.read_bytes()[7:], []
        while len(text) >= 7:
            length, kind = struct.unpack("<HB", text[4:7])
            assert kind == 1
            found.append(wandb_internal_pb2.Record.FromString(text[7:7 + length]))
            text = text[7 + length:]
        return found

    wait_for(lambda: any(record.HasField("exit") for record in read()))
    return read()


SAMPLE = "# a title\n  def f():\n    return 'é'"
WEIGHTS = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)


def run_failing_tracker(make, cfg, start=0):
    """Pass a tracker the events of a launch from step `start` that an exception ends after step 2.
    The rows have the statistics of WEIGHTS, with the gradient 2 WEIGHTS, and of a constant.
    """
    Path(cfg.out_dir).mkdir(exist_ok=True)
    observe = make(cfg)
    observe("start", {"step": start, "run_id": "0badcafe", "config": {"lr": 0.5}})
    params = {"w": jnp.asarray(WEIGHTS), "gain": jnp.ones(8)}
    stats = steplib.weight_stats(
        1, params, {name: 2 * x for name, x in params.items()},
        types.SimpleNamespace(watch=("w", "gain"), log_every=1, steps=2))
    watch = jax.tree.map(lambda x: np.asarray(x).tolist(), stats)
    for step in range(start + 1, 3):
        observe("log", {"step": step, "loss": 3.0 - step, "watch": watch})
    observe("eval", {"step": 2, "val_loss": 0.25})
    rewards = {"rewards": [0.5, 1.0], "sample_reward": 0.75}
    observe("sample", {"step": 2, "texts": [SAMPLE, "the second"]} | rewards)
    observe("error", {"error": "RuntimeError: out of luck"})


def check_histogram(counts, edges, constant_edges):
    """Check the histogram of WEIGHTS against NumPy's, and that edges increase."""
    assert len(edges) == len(counts) + 1 == 65
    np.testing.assert_allclose(edges, np.linspace(WEIGHTS.min(), WEIGHTS.max(), 65), rtol=1e-5,
                               atol=1e-6)
    expected, _ = np.histogram(WEIGHTS, 64)
    # A weight on an edge may fall on its other side by rounding.
    assert sum(counts) == WEIGHTS.size and np.abs(np.subtract(counts, expected)).sum() <= 4
    assert (np.diff(constant_edges) > 0).all() and constant_edges[0] <= 1 <= constant_edges[-1]


@pytest.mark.slow
def test_wandb_has_histograms_and_samples_of_a_run_that_an_exception_ends(tiny, monkeypatch):
    """Offline, its file holds losses, histograms, a sample and exit code 1.

    Break: train.py: name = os.environ.get("WANDB_NAME") or Path(cfg.out_dir).name =>
    name = Path(cfg.out_dir).name
    """
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in dict(MODE="offline", SILENT="true", NAME="ninety-nine").items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # it reads the variables once per process, perhaps in an earlier test
    cfg, given = tiny(), {}

    def init(init=wandb.init, **options):
        given.update(options)
        return init(**options)

    monkeypatch.setattr(wandb, "init", init)
    run_failing_tracker(train.log_to_wandb, cfg)
    assert given["resume"] == "allow"  # without effect offline
    file, = Path(cfg.out_dir, "wandb").glob("offline-run-*/run-0badcafe.wandb")
    records = wandb_records(file)
    started = records[[record.HasField("run") for record in records].index(True)].run
    assert (started.display_name, started.run_id) == ("ninety-nine", "0badcafe")
    settings = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert settings["lr"] == 0.5
    logged = [{item.key or "|".join(item.nested_key): json.loads(item.value_json)
               for item in record.history.item} for record in records]
    assert [row["loss"] for row in logged if "loss" in row] == [2.0, 1.0]
    assert [row["val_loss"] for row in logged if "val_loss" in row] == [0.25]
    first = next(row for row in logged if "loss" in row)
    check_histogram(first["watch/w|values"], first["watch/w|bins"], first["watch/gain|bins"])
    np.testing.assert_allclose(
        first["watch/w/grad_norm"], 2 * np.linalg.norm(np.float64(WEIGHTS)), rtol=1e-6)
    table, = file.parent.glob("files/media/table/samples_*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["step", "text", "reward"], "data": [[2, SAMPLE, 0.5], [2, "the second", 1.0]]}
    assert [row["sample_reward"] for row in logged if "sample_reward" in row] == [0.75]
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1]


def test_tensorboard_has_histograms_and_samples_of_a_run_that_an_exception_ends(tiny):
    """Its own reader finds them, also of a launch that repeats a step.

    Break: train.py: purge_step=row["step"] + 1 => purge_step=None
    """
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator",
                                 reason="TensorBoard is not installed")
    cfg = tiny()
    run_failing_tracker(train.log_to_tensorboard, cfg)
    time.sleep(1.1)  # a file is named by its second
    run_failing_tracker(train.log_to_tensorboard, cfg, start=1)
    found = reader.EventAccumulator(str(Path(cfg.out_dir) / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert [(e.step, e.value) for e in found.Scalars("val_loss")] == [(2, 0.25)]
    assert found.Histograms("watch/w")[-1].step == 2
    w = found.Histograms("watch/w")[0].histogram_value
    gain = found.Histograms("watch/gain")[0].histogram_value
    check_histogram(w.bucket, [w.min, *w.bucket_limit], [gain.min, *gain.bucket_limit])
    exact = np.float64(WEIGHTS)
    assert (w.num, w.min, w.max) == (WEIGHTS.size, WEIGHTS.min(), WEIGHTS.max())
    np.testing.assert_allclose(w.sum, exact.sum(), rtol=1e-4)
    np.testing.assert_allclose(w.sum_squares, (exact**2).sum(), rtol=1e-5)
    *_, sample = found.Tensors("sample/0/text_summary")
    assert sample.step == 2 and sample.tensor_proto.string_val[0].decode() == (
        "    # a title\n      def f():\n        return 'é'")
    second = found.Tensors("sample/1/text_summary")[-1]
    assert second.tensor_proto.string_val[0] == b"    the second"


# ---- out of memory during the run

@pytest.mark.slow
def test_a_step_that_runs_out_of_memory_suggests_flags(tiny):
    """With too little address space; a memory profile is written.

    Break: step.py: if event == "error" and (first or "RESOURCE_EXHAUSTED" in row["error"]): =>
    if event == "error" and first:
    """
    cfg = tiny(batch_size=512, seq_len=256, eval_every=0)
    hook = Path(cfg.out_dir + "_hook.py")
    hook.write_text("import resource\ndef shrink(event, value):\n"
                    "    if event == 'start':\n"
                    "        used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
                    "        resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, 2**62))\n"
                    "    if event == 'error': resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n")
    code, output = ended(*command(dataclasses.replace(cfg, hooks=(f"{hook}:shrink",))))
    assert code == 2 and "does not fit: RESOURCE_EXHAUSTED" in output, output
    profile = Path(cfg.out_dir, "profile/memory_at_failure.prof")
    assert f"at the failure, for pprof: {profile}" in output, output
    assert b"to_device" in gzip.decompress(profile.read_bytes())  # it made the batches
    assert re.search(r"to change: --grad_accum_steps \d+ \(.* GiB\)", output), output
    assert "does not fit" in rows(cfg.out_dir, "error")[0]["error"]


# ---- many processes

@pytest.mark.slow
def test_two_processes_killed_at_any_moment_end_bit_identical(tmp_path):
    """tests/stress.py kills one or both of two processes; the resumed run is bit-identical.

    Break: data.py: return step * batch_size + rows.astype(np.int64) =>
    return step * batch_size + rows.astype(np.int64) + time.time_ns() % 7
    """
    done = subprocess.run([sys.executable, "tests/stress.py", "--kills", "0", "--damage", "0",
                           "--run_kills", "1"], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("     1 step ") == 1 and "runs that ended" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("how, words", [
    ("STOP", ""), ("hang", "_hook.py"), ("data", ""),
    ("KILL", r"error: process 1 of 2 has died or is stuck .* continues from step [1-9]\d*\n$")])
def test_a_process_that_is_lost_ends_the_other(tiny, how, words):
    """If a process is stopped, stuck, killed, or fails in its data, the other ends within a minute;
    of a killed one it prints a sentence.

    Break: train.py: faulthandler.dump_traceback_later(cfg.peer_timeout_s, exit=True, file=2) =>
    pass
    """
    cfg = tiny(**TWO | dict(steps=10**6, save_every=2, peer_timeout_s=8.0))
    hook = Path(cfg.out_dir + "_hook.py")
    hook.write_text("import jax, time\ndef lose(event, value):\n"
                    "    late = event == 'step' and value['step'] * jax.process_index() == 6\n"
                    f"    if late and {how == 'hang'}: time.sleep(99)\n"
                    "def failing(step, rows):\n"
                    "    if step * jax.process_index() == 6: raise ValueError('oh')\n"
                    "    return batch(step, rows)\n"
                    "def failing_open(cfg, parts):\n"
                    "    global batch\n"
                    "    sources = opened(cfg, parts)\n"
                    "    batch, sources['train']['batch'] = sources['train']['batch'], failing\n"
                    "    return sources\n"
                    f"if {how == 'data'}:\n"
                    "    import train\n"
                    "    opened, train.TEXT['open'] = train.TEXT['open'], failing_open\n")
    (run, log), lost = two(cfg, "--hooks", f"{hook}:lose")
    wait_for(lambda: ckpt.steps(Path(cfg.out_dir) / "ckpt"))
    try:
        if how == "STOP":
            os.kill(lost[0].pid, signal.SIGSTOP)
        if how == "KILL":
            lost[0].kill()
        code, output = ended(run, log, 90)
    finally:
        lost[0].kill()
    assert code in (1, -signal.SIGABRT), output
    assert re.search(words, output + lost[1].read_text() * (how != "KILL")), output
    assert ckpt.steps(Path(cfg.out_dir) / "ckpt")
    if how == "KILL":
        assert "process 1 of 2 has died" in rows(cfg.out_dir, "error")[0]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("flags, of_one, words", [
    ([], ["--lr", "0.5"], "lr is 0.5 in process 1, 0.002 in 0"),
    ([], [], "data is "),
    (["--out_dir", "relative"], [], "process 1 does not find in relative/ckpt what process 0")])
def test_processes_with_different_flags_data_or_folders_do_not_train(tiny, flags, of_one, words):
    """Both print what differs, exit with 2, and write no config.json.

    Break: train.py: if other[name] != value: => if False:
    """
    cfg = tiny(**TWO)
    hook = Path(cfg.out_dir + "_hook.py")
    hook.write_text("import dataclasses, jax, os, train\n"
                    f"folder = {cfg.out_dir!r} + str(jax.process_index())\n"
                    "os.mkdir(folder)\nos.chdir(folder)\n"
                    "with open('text.txt', 'w') as file: file.write(folder * 400)\n"
                    "def other_file(parts, cfg):\n"
                    "    cfg = dataclasses.replace(cfg, data=(folder + '/text.txt',))\n"
                    "    return opened(parts, cfg)\n"
                    "opened, train.TEXT['open'] = train.TEXT['open'], other_file\n"
                    "def nothing(event, value): pass\n")
    runs = two(cfg, "--hooks", f"{hook}:nothing", *flags, of_one=of_one)
    for code, output in [ended(*run) for run in runs]:
        assert code == 2 and words in output, output
    assert not Path(cfg.out_dir).exists() and not Path(f"{cfg.out_dir}0/relative").exists()
