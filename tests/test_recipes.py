# SPDX-License-Identifier: Apache-2.0
"""Each recipe runs as users run it, without edits of the six files."""
import dataclasses
import itertools
import json
import math
import os
import queue
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import audit
import ckpt
import conftest  # noqa: F401  the devices of runs in processes that killed_and_resumed forks
import digits
import grow
import hooks
import on_ray
import train
import tune
from test_train import FORKS, arrays, same

# What tests/test_ray.py expects a run to print. It needs Ray; the test of a worker here does not.
RESUMED = "from its own checkpoint, at step 4\n"
NO_DATA = "data 'missing.txt': no such file"


def kill_at(step):
    """A hook that kills the process at the metrics of `step`."""
    def hook(event, value):
        if event == "step" and value["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)
    return hook


def killed_and_resumed(cfg, kill_step, run):
    """Launch run(cfg, kill_step), which dies by SIGKILL; the summary of a second launch."""
    first = FORKS.Process(target=run, args=(cfg, kill_step), daemon=True)
    first.start()
    first.join(120)
    assert first.exitcode == -signal.SIGKILL
    assert ckpt.latest(f"{cfg.out_dir}/ckpt") < kill_step
    return run(cfg)


def copy_at(step, cfg):
    """A hook that copies the folder of a run to that of copy_of(cfg) at the metrics of `step`, as a
    SIGKILL would leave it. No save may begin at this step or the next.
    """
    root, copy = f"{cfg.out_dir}/ckpt", copy_of(cfg).out_dir
    saved = (step - 1) // cfg.save_every * cfg.save_every

    def hook(event, value):
        while event == "step" and value["step"] == step and not Path(copy).exists():
            if ckpt.latest(root) != saved:
                time.sleep(0.01)
                continue
            try:
                shutil.copytree(cfg.out_dir, f"{copy}_part")
                os.rename(f"{copy}_part", copy)
            except shutil.Error:  # the save still deletes files
                shutil.rmtree(f"{copy}_part")
    return hook


def copy_of(cfg):
    return dataclasses.replace(cfg, out_dir=cfg.out_dir + "_copy")


def assert_same_arrays(cfg, other):
    assert same(arrays(cfg.out_dir), arrays(other.out_dir))


@pytest.mark.slow
def test_digits(tmp_path, cache_dir, monkeypatch):
    """Over 8 devices validation accuracy exceeds 95%; without scikit-learn one sentence.

    Break: tests/recipes/digits.py: hit_B = logp_BV.argmax( => hit_B = logp_BV.argmin(
    """
    cfg = digits.DigitsConfig(out_dir=str(tmp_path / "out"), cache_dir=cache_dir, dp=1, fsdp=4,
                              tp=2, dtype="float32", save_every=0, eval_every=0, log_every=50,
                              steps=200, lr=5e-3)
    summary = train.main(cfg, task=digits.TASK)
    assert summary["val_acc"] > 0.95 and summary["val_n_labels"] == 360
    w1 = summary["state"]["params"]["w1"]
    assert w1.addressable_shards[0].data.shape == (16, 64) and len(jax.devices()) == 8
    with pytest.raises(ValueError, match="d_hidden 0: must be at least 1"):
        train.config.validate(dataclasses.replace(cfg, d_hidden=0), None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match="needs `pip install scikit-learn`"):
        digits.open_digits(("train",), cfg)


def test_hooks_remember_the_launch_before():
    """Evaluations without progress, and the loss before a jump, count across a resume. One that is
    not finite is no progress, and other validation data begins again.

    Break: tests/recipes/hooks.py: kept.update(saved) => pass
    """
    first, resumed = hooks.stop_early(2), hooks.stop_early(2)
    first("start", {"step": 0, "validation": {"": ["a", 9]}})
    found = [first("eval", {"val_loss": loss}) for loss in (math.nan, 3.0, 2.0, -math.inf)]
    saved = json.loads(json.dumps(first("before_save", {"step": 3, "hooks": {}})))
    stops = []
    for data in ("a", "b"):
        resumed("start", {"step": 3, "validation": {"": [data, 9]}})
        resumed("resume", saved)
        stops.append(resumed("eval", {"val_loss": 2.25}))
    assert found == [None] * 4 and stops == [
        {"val_loss": 2.25, "stop": "no better in 2 evaluations than 2.0000"}, None]
    first, resumed = hooks.evaluate_on_jump(1.5), hooks.evaluate_on_jump(1.5)
    first("start", {"step": 0})
    found = [first("log", {"loss": loss}) for loss in (3.0, 2.0)]
    saved = first("before_save", {"step": 2, "hooks": {"other": 1}})
    assert saved == {"step": 2, "hooks": {"other": 1, "evaluate_on_jump": [2.0]}}
    resumed("resume", saved)
    found += [resumed("log", {"loss": loss}) for loss in (4.0, 4.0)]
    assert found == [None, None, {"loss": 4.0, "request": ["eval", "save"]}, None]


def test_frozen_parameters_and_a_new_metric(tiny):
    """The embedding changes in steps 1 and 2 only; the norm equals NumPy's in float64.

    Break: tests/recipes/hooks.py: jnp.where(state["step"] < step, x => jnp.where(True, x
    """
    states = []

    def keep(event, state):
        if event in ("load", "state"):
            states.append({name: np.array(x) for name, x in state["params"].items()})

    cfg = tiny(steps=4, batch_size=16, grad_accum_steps=2)
    train.main(cfg, [hooks.freeze_after(2, "emb*"), hooks.weight_norm, keep])
    changed = {name: [not np.array_equal(old[name], new[name])
                      for old, new in itertools.pairwise(states)] for name in states[0]}
    assert changed.pop("embed") == [True, True, False, False]
    assert all(map(all, changed.values()))
    norms = [sum((np.float64(x)**2).sum() for x in params.values())**0.5 for params in states]
    rows = {row["event"]: row for row in ckpt.read_log(cfg.out_dir)}
    np.testing.assert_allclose(rows["log"]["weight_norm"], norms[3], rtol=1e-5)
    np.testing.assert_allclose(rows["eval"]["val_weight_norm"], norms[4], rtol=1e-5)


def test_an_average_of_the_parameters_is_evaluated_and_resumed_on_another_mesh(tiny):
    """It is NumPy's; an evaluation has its loss, which "eval_batch" adds up to.

    Break: train.py: ckpt.flatten(state | {"hooks": planned["arrays"]}) => ckpt.flatten(state)
    """
    ema = {}
    losses = []
    saved = []

    def follow(event, value):
        if event == "load" and not ema:
            ema.update({name: np.float64(x) for name, x in value["params"].items()})
        if event == "state":
            step = int(value["step"])
            kept_frac = min(0.5, step / (9 + step))
            for name, x in value["params"].items():
                ema[name] = kept_frac * ema[name] + (1 - kept_frac) * np.float64(x)
        if event == "eval_batch":
            losses.append(value["sums"]["loss"])
        if event == "eval":
            total, n = np.float64(losses).sum(axis=0)
            np.testing.assert_allclose(value["val_loss"], total / n, rtol=1e-6)
            losses.clear()
        if event == "saved":
            saved.append((value["kind"], value["step"]))
            ckpt.read_meta(cfg.out_dir + "/ckpt", value["step"])  # is whole

    cfg = tiny(steps=8, eval_every=8, save_every=4, dp=1, dtype="float32", stop=("5",))
    train.main(cfg, [hooks.average_params(0.5), follow])
    cfg = dataclasses.replace(cfg, dp=2, stop=())
    summary = train.main(cfg, [hooks.average_params(0.5), follow])
    assert saved == [("save", 4), ("save", 5), ("save", 8)]
    like = {"hooks": {"ema": {name: np.zeros(x.shape, np.float32) for name, x in ema.items()}}}
    kept = ckpt.restore(cfg.out_dir + "/ckpt", 8, like)["hooks"]["ema"]
    for name, x in ema.items():
        np.testing.assert_allclose(kept[name], x, rtol=2e-5, atol=1e-7, err_msg=name)
    own = [hooks.average_params(0.5), hooks.stop_early(2)]
    again = train.main(dataclasses.replace(cfg, mode="eval"), own)
    assert again["val_loss"] == summary["val_loss"]
    again = train.main(dataclasses.replace(cfg, mode="eval"), params=kept)
    np.testing.assert_allclose(summary["val_loss"], again["val_loss"], rtol=1e-6)


def test_a_worker_for_ray_sends_rows_texts_and_errors(tiny, monkeypatch):
    """Without Ray, a worker that is alone trains, resumes, and sends a user's error.

    Break: tests/recipes/on_ray.py: for name in ("state", "mesh"): => for name in ("mesh",):
    """
    def ended(code):
        raise SystemExit(code)

    def work(cfg):
        """{kind: values} that the worker sends for its caller."""
        box = queue.SimpleQueue()
        try:
            on_ray.work(cfg, 0, 1, "", os.getcwd(), box)
        except SystemExit as e:
            assert e.code == 1
        sent = {}
        while not box.empty():
            kind, value = box.get()
            sent.setdefault(kind, []).append(value)
        return sent

    monkeypatch.setattr(os, "_exit", ended)
    handler = signal.getsignal(signal.SIGINT)
    try:
        work(tiny(steps=4))
        sent = work(tiny(steps=8))
        failed = work(tiny(data=("missing.txt",), out_dir=tiny().out_dir + "2"))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert RESUMED in "".join(sent["text"])
    assert [row["step"] for row in sent["log"]] == [5, 6, 7, 8]
    assert [row["step"] for row in sent["eval"]] == [8]
    summary, = sent["summary"]
    assert (summary["step"], summary["val_loss"]) == (8, sent["eval"][0]["val_loss"])
    assert "state" not in summary and "summary" not in failed
    assert failed["error"][0].startswith(NO_DATA) and len(failed["error"]) == 1


def test_a_sweep_that_can_stop_no_trial_is_refused():
    """Before any trial runs, with the bound. One step less is legal.

    Break: tests/recipes/tune.py: cfg.grace_steps >= cfg.steps => cfg.grace_steps > cfg.steps
    """
    cfg = tune.SweepConfig(steps=100, grace_steps=100)
    with pytest.raises(ValueError, match="grace_steps 100: must be below steps 100, or no trial"):
        tune.make_trials(cfg)
    assert len(tune.make_trials(dataclasses.replace(cfg, grace_steps=99))) == cfg.n_trials


def stop_after(step):
    """Return metrics for a task that send SIGTERM to this process at the log row of a step."""
    n_rows = []

    def metrics(means, source):
        n_rows.append(means)
        if len(n_rows) == step - 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return {}

    return metrics


def identical(n_log_rows, n_digests):
    return {"differences": [], "n_log_rows": n_log_rows, "n_digests": n_digests}


@pytest.mark.slow
def test_an_audit_finds_the_first_step_that_differs(tiny):
    """A stretch trained again is identical, and differs from the step after one changed bit.

    Break: tests/recipes/audit.py: equal = saved == value or => equal = True or
    """
    cfg = tiny(steps=12, save_every=4, max_to_keep=0, log_every=1, sample_every=3, sample_tokens=4)
    train.main(cfg)
    assert audit.audit(cfg.out_dir, 4, 12) == identical(8, 2)
    train.main(dataclasses.replace(cfg, steps=16), task=train.TEXT)
    assert audit.audit(cfg.out_dir, 12, 16) == identical(4, 1)

    def disturb(event, state):
        if event == "state" and int(state["step"]) == 6:
            norm = state["params"]["final_norm"]
            bits = jax.lax.bitcast_convert_type(norm, jnp.uint32) ^ jnp.uint32(1 << 22)
            norm = jax.lax.bitcast_convert_type(bits, jnp.float32)
            return state | {"params": state["params"] | {"final_norm": norm}}

    other = dataclasses.replace(cfg, out_dir=cfg.out_dir + "2")
    train.main(other, hooks=[disturb])
    differences = audit.audit(other.out_dir, 4, 12)["differences"]
    assert differences[0].startswith("step 7: loss was ")
    with pytest.raises(ValueError, match=r"ended at step 8 .*after 4 of 8 log rows: nothing is"):
        audit.audit(cfg.out_dir, 4, 12, task=train.TEXT | {"metrics": stop_after(8)})
    for first, last, words in (
            (5, 12, r"--first 5: .*ckpt has the checkpoints of steps \[4, 8, 12, 16\]"),
            (4, 11, "--last 11: must be the step of a save of"),
            (8, 16, "--last 16: the run was resumed at step 12 with another steps")):
        with pytest.raises(ValueError, match=words):
            audit.audit(cfg.out_dir, first, last)

    # Logs that were edited: values that were not finite, and fields of another task.
    log = Path(cfg.out_dir, "metrics.jsonl")
    log.write_text(log.read_text().replace('"grad_norm": ', '"grad_norm": null, "was": '))
    differences = audit.audit(cfg.out_dir, 4, 12)["differences"]
    assert differences[0].startswith("step 5: grad_norm was None")
    log.write_text(log.read_text().replace('"mode": "train"', '"mode": "train", "d_hidden": 3'))
    with pytest.raises(ValueError, match="has fields that Config lacks: d_hidden"):
        audit.audit(cfg.out_dir, 4, 12)


def grow_until_killed(cfg, step):
    grow.main(cfg, [kill_at(step)])


@pytest.mark.slow
def test_a_model_that_grows(tiny):
    """The deeper model begins as the same function. Killed before or after it grows, the run ends
    bit for bit like one that was not; train.py resumes it.

    Break: tests/recipes/grow.py: 0 * added if names[-1] in OUTPUTS else added => added
    """
    plain = tiny(n_layers=3, steps=12, eval_every=6, save_every=2, dtype="float32")
    cfg = grow.GrowConfig(**vars(plain), grow_at=6)
    found = []

    def compare(event, value):
        if event == "load" and int(value["step"]) == 6:
            depths = [(value["params"], plain),
                      (first_layer(value["params"]), dataclasses.replace(plain, n_layers=1))]
            batch = {"tokens": np.arange(64, dtype=np.int32).reshape(4, 16)}
            found.extend(train.model.forward(params, batch, train.setup_run(one).cfg)
                         for params, one in depths)

    def first_layer(params):
        return {name: x[:1] if name.startswith("layers.") else x for name, x in params.items()}

    straight = grow.main(cfg, [compare])
    assert np.array_equal(*found)
    killed = copy_of(cfg)
    for kill_step in (4, 11):
        process = FORKS.Process(target=grow_until_killed, args=(killed, kill_step), daemon=True)
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    resumed = train.main(dataclasses.replace(plain, out_dir=killed.out_dir))
    assert_same_arrays(cfg, killed)
    assert resumed["val_loss"] == straight["val_loss"]
    new = dataclasses.replace(cfg, out_dir=f"{cfg.out_dir}_new")
    for wrong, message in (({"grow_at": 12}, "grow_at 12: must be below steps 12"),
                           ({"grow_from": 3}, "grow_from 3: must be below n_layers 3"),
                           ({"epochs": 1.0}, "epochs 1: must be 0; set steps"),
                           ({"resume": "overwrite"}, "overwrite: not with two runs")):
        with pytest.raises(ValueError, match=message):
            grow.main(dataclasses.replace(new, **wrong))
