# SPDX-License-Identifier: Apache-2.0
"""Launchers that start all processes of a run, for real: --coordinator auto."""
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt
import config
from conftest import ROOT
from test_train import command, ended, losses, rows, wait_for

pytestmark = pytest.mark.slow
KILL_S = 10  # from a SIGTERM to mpirun to that of its processes, and from there to their SIGKILL


def mpirun(cfg):
    """(process, log): mpirun with two processes of one device that run train.py for cfg, started.
    """
    path, log = Path(cfg.out_dir + ".json"), Path(cfg.out_dir + ".log")
    path.write_text(config.to_json(cfg))
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    with log.open("w") as file:
        return subprocess.Popen(
            ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
             "--mca", "odls_base_sigkill_timeout", str(KILL_S), "-n", "2",
             sys.executable, str(ROOT / "train.py"), "--config", str(path)],
            stdout=file, stderr=file, env=os.environ | {"XLA_FLAGS": flags}), log


@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed: Open MPI has it")
def test_mpirun_starts_a_run(tiny):
    """Two processes that find each other by Open MPI's variables train as one process with two
    devices, to float32 rounding; a long run to which mpirun passes on SIGTERM ends saved.

    Break: train.py: if cfg.coordinator:  # before => if cfg.n_processes > 1:  # before
    """
    cfg = tiny(dp=1, fsdp=2, dtype="float32", coordinator="auto")
    alone = dataclasses.replace(cfg, out_dir=cfg.out_dir + "_alone", coordinator="")
    one, (two, log) = command(alone, 2), mpirun(cfg)
    try:
        assert two.wait(240) == 0, log.read_text()
        assert ended(*one)[0] == 0
        for found, expected in zip(losses(cfg.out_dir), losses(alone.out_dir), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-6)
        assert rows(cfg.out_dir, "start")[0]["processes"] == 2
        cfg = dataclasses.replace(cfg, out_dir=cfg.out_dir + "_long", steps=10**6, save_every=0)
        two, log = mpirun(cfg)
        wait_for(lambda: Path(cfg.out_dir, "metrics.jsonl").exists() and rows(cfg.out_dir, "log"))
    finally:
        two.send_signal(signal.SIGTERM)  # nothing, when it has ended
        two.wait(60)
    end, = rows(cfg.out_dir, "end")
    assert end["reason"] == "SIGTERM" and rows(cfg.out_dir, "save")[-1]["step"] == end["step"]
    assert ckpt.steps(Path(cfg.out_dir) / "ckpt") == [end["step"]]
