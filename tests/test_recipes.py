# SPDX-License-Identifier: Apache-2.0
"""Every recipe is run for real, and edits none of the six files."""
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import ckpt
import train
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests/recipes"))
import digits


def saved_arrays(out):
    root = Path(out) / "ckpt"
    like = {name: np.zeros(d["shape"], d["dtype"])
            for name, d in ckpt.read_meta(root, ckpt.latest(root))["arrays"].items()
            if name != ckpt.SMALL}
    return ckpt.restore(root, ckpt.latest(root), like)


def kill_at(step):
    """A hook that kills the process by SIGKILL when it reads the metrics of `step`."""
    def hook(event, value):
        if event == "step" and value["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)
    return hook


def train_digits(cfg, kill_step):
    train.main(cfg, [kill_at(kill_step)], digits.TASK)


@pytest.mark.slow
def test_digits(tmp_path, cache_dir):
    """An image classifier over 8 devices learns to above 95% held-out accuracy; killed in the
    middle and started again, it ends equal to the bit to one that never was.

    Break: data.py: return step * batch_size + rows.astype(np.int64) =>
    return step * batch_size + rows.astype(np.int64) + os.getpid()
    """
    cfg = digits.DigitsConfig(out_dir=str(tmp_path / "straight"), cache_dir=cache_dir, dp=1, fsdp=4,
                              tp=2, dtype="float32", save_every=50, eval_every=100, log_every=50,
                              steps=200, lr=5e-3)
    summary = train.main(cfg, task=digits.TASK)
    assert summary["val_acc"] > 0.95 and summary["val_n_labels"] == 360
    killed = dataclasses.replace(cfg, out_dir=str(tmp_path / "killed"))
    forks = multiprocessing.get_context("forkserver")
    (run := forks.Process(target=train_digits, args=(killed, 120), daemon=True)).start()
    run.join(120)
    assert run.exitcode == -signal.SIGKILL
    assert 0 < ckpt.latest(tmp_path / "killed/ckpt") < 120
    again = train.main(killed, task=digits.TASK)
    assert again["val_loss"] == summary["val_loss"]
    straight, resumed = saved_arrays(cfg.out_dir), saved_arrays(killed.out_dir)
    assert straight.keys() == resumed.keys()
    assert all(np.array_equal(straight[k], resumed[k]) for k in straight)
    w1 = summary["state"]["params"]["w1"]
    assert w1.addressable_shards[0].data.shape == (16, 64) and len(jax.devices()) == 8


@pytest.mark.slow
def test_digits_by_its_command_line(tmp_path):
    """The line of the README, shortened; its own field is a flag, with a bound.

    Break: tests/recipes/digits.py: kind=DigitsConfig => kind=config.Config
    """
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    call = [sys.executable, str(ROOT / "tests/recipes/digits.py"), "--out_dir", str(tmp_path / "o")]
    run = subprocess.run([*call, "--d_hidden", "64", "--steps", "20"], env=env, cwd=tmp_path,
                         capture_output=True, text=True)
    assert run.returncode == 0 and "done: all 20 steps are done" in run.stdout, run.stderr[-2000:]
    run = subprocess.run([*call, "--d_hidden", "0"], env=env, cwd=tmp_path, capture_output=True,
                         text=True)
    assert run.returncode == 2 and "d_hidden 0: must be at least 1" in run.stderr
