# SPDX-License-Identifier: Apache-2.0
"""Launchers that start all processes of a run, for real: --coordinator auto."""
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt
import config
from conftest import ROOT
from test_train import command, ended, losses, rows, wait_for

KILL_S = 10  # from a SIGTERM to mpirun to that of its processes, and from there to their SIGKILL
# A process that a launcher starts has one device.
ONE = {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")}


def launch(cfg, before=(), **env):
    """A process that runs train.py for cfg, or a launcher of it, with one device each."""
    path = Path(cfg.out_dir + ".json")
    path.write_text(config.to_json(cfg))
    words = [*before, sys.executable, str(ROOT / "train.py"), "--config", str(path)]
    with open(cfg.out_dir + ".log", "a") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | ONE | env)


def by_slurm(cfg):
    """Two processes with what Slurm's srun puts into their environments."""
    job = dict(SLURM_JOB_ID=str(random.randrange(10**6)), SLURM_STEP_NODELIST="localhost",
               SLURM_NTASKS="2")
    return [launch(cfg, **job, SLURM_PROCID=i, SLURM_LOCALID=i) for i in "01"]


def by_mpirun(cfg):
    return [launch(cfg, ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
                         "--mca", "odls_base_sigkill_timeout", str(KILL_S), "-n", "2"])]


needs_mpirun = pytest.mark.skipif(
    not shutil.which("mpirun"), reason="mpirun is not installed: Open MPI has it")


@pytest.mark.slow
@pytest.mark.parametrize("start", [by_slurm, pytest.param(by_mpirun, marks=needs_mpirun)])
def test_a_launcher_starts_a_run(start, tiny):
    """Two processes train as one with two devices, to float32 rounding; SIGTERM ends them saved.

    Break: train.py: if not cfg.coordinator: => if cfg.n_processes == 1:
    """
    cfg = tiny(dp=1, fsdp=2, dtype="float32", coordinator="auto", steps=10**6, save_every=0)
    alone = dataclasses.replace(cfg, out_dir=cfg.out_dir + "_alone", coordinator="", stop=("8",))
    one, two = command(alone, 2), start(cfg)
    try:
        log = Path(cfg.out_dir + ".log")
        wait_for(lambda: "step      9 " in log.read_text(), 240)
        assert ended(*one)[0] == 0
    finally:
        for run in two:
            run.terminate()
        for run in two:
            run.wait(60)
    for found, expected in zip(losses(cfg.out_dir)[:2], losses(alone.out_dir)[:2], strict=True):
        np.testing.assert_allclose(found[:len(expected)], expected, rtol=2e-6)
    assert rows(cfg.out_dir, "start")[0]["processes"] == 2
    end, = rows(cfg.out_dir, "end")
    assert end["reason"] == "SIGTERM" and rows(cfg.out_dir, "save")[-1]["step"] == end["step"]
    assert ckpt.steps(Path(cfg.out_dir) / "ckpt") == [end["step"]]


def test_the_kubernetes_job_is_a_command_line_of_every_process():
    """Both processes know where process 0 is, from the name that the Service gives its pod.

    Break: tests/recipes/job.yaml: --n_processes, "2" => --n_processes, "3"
    """
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    service, job = yaml.safe_load_all((ROOT / "tests/recipes/job.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    _, script, *argv = pod["containers"][0]["command"]
    cfgs = [config.parse([word.replace("$(JOB_COMPLETION_INDEX)", str(i)) for word in argv])
            for i in range(spec["completions"])]
    name = job["metadata"]["name"]
    assert (ROOT / script).is_file() and spec["completionMode"] == "Indexed"
    assert [(cfg.n_processes, cfg.process_id) for cfg in cfgs] == [(2, 0), (2, 1)]
    assert {cfg.coordinator for cfg in cfgs} == {f"{name}-0.{pod['subdomain']}:1234"}
    assert service["metadata"]["name"] == pod["subdomain"] and spec["parallelism"] == 2
    assert service["spec"]["selector"] == {"job-name": name}


# ---- the user's environment

def test_a_locale_without_utf_8(tmp_path, cache_dir):
    """In the locale C, files, a prompt and a hook that are not ASCII work and print escapes.

    Break: train.py: stream.reconfigure(errors="backslashreplace") => pass
    """
    (tmp_path / "é.txt").write_text("être ou ne pas être " * 99, encoding="utf-8")
    (tmp_path / "hé.py").write_text("def h(event, row):\n    print(event, 'é')\n", encoding="utf-8")
    settings = {"data": ["é.txt"], "prompt": "é", "hooks": ["hé.py:h"], "cache_dir": cache_dir}
    (tmp_path / "c.json").write_text(json.dumps(settings), encoding="utf-8")
    env = os.environ | ONE | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    flags = ("--config c.json --steps 1 --d_model 32 --n_layers 1 --n_heads 2 --batch_size 4 "
             "--seq_len 16 --eval_batches 1 --sample_tokens 9 --data é.txt --hooks hé.py:h")
    run = subprocess.run([sys.executable, str(ROOT / "train.py"), *flags.split()], cwd=tmp_path,
                         env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "- sample --------\n\\xe9" in run.stdout and "end \\xe9\n" in run.stdout
    assert "Unicode" not in run.stdout + run.stderr
