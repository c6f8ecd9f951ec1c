# SPDX-License-Identifier: Apache-2.0
"""Launchers that start all processes of a run, for real: --coordinator auto."""
import contextlib
import dataclasses
import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
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


def words_of(cfg):
    """The command line of a process that runs train.py for cfg."""
    path = Path(cfg.out_dir + ".json")
    path.write_text(config.to_json(cfg))
    return [sys.executable, str(ROOT / "train.py"), "--config", str(path)]


def mpirun(cfg):
    """(process, log): mpirun with two processes, started."""
    log = Path(cfg.out_dir + ".log")
    with log.open("w") as file:
        return subprocess.Popen(
            ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
             "--mca", "odls_base_sigkill_timeout", str(KILL_S), "-n", "2", *words_of(cfg)],
            stdout=file, stderr=file, env=os.environ | ONE), log


def logged(cfg, n_starts=1):
    """Whether the last of so many starts of a run has logged a step."""
    events = [row["event"] for row in ckpt.read_log(cfg.out_dir)]
    return events.count("start") == n_starts and events[-1] == "log"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed: Open MPI has it")
def test_mpirun_starts_a_run(tiny):
    """Two processes train as one with two devices, to float32 rounding; SIGTERM ends them saved.

    Break: train.py: if not cfg.coordinator: => if cfg.n_processes == 1:
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
        wait_for(lambda: logged(cfg), 240)
    finally:
        two.send_signal(signal.SIGTERM)  # nothing, when it has ended
        two.wait(60)
    end, = rows(cfg.out_dir, "end")
    assert end["reason"] == "SIGTERM" and rows(cfg.out_dir, "save")[-1]["step"] == end["step"]
    assert ckpt.steps(Path(cfg.out_dir) / "ckpt") == [end["step"]]


# ---- Slurm

SLURM = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


def free_ports(n):
    with contextlib.ExitStack() as held:
        return [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                for _ in range(n)]


@pytest.fixture
def slurm(monkeypatch):
    """A cluster of this machine alone, of two CPUs whatever it has."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        text = SLURM.format(folder=folder, host=socket.gethostname().split(".")[0],
                            user=getpass.getuser(), ports=free_ports(2))
        Path(folder, "slurm.conf").write_text(text)
        monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
        for name in ("state", "spool"):
            Path(folder, name).mkdir()
        key = Path(folder, "key")
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        path = os.environ["PATH"] + ":/usr/sbin"  # where Debian has them
        daemons = [subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"PATH": path})
                   for words in (["munged", "-F", "--force", f"--key-file={key}",
                                  f"--socket={folder}/munge", f"--pid-file={folder}/munged.pid",
                                  f"--seed-file={folder}/seed"],
                                 ["slurmctld", "-D", "-i"], ["slurmd", "-D"])]
        try:
            wait_for(lambda: "idle" in ask("sinfo", "-h", "-o", "%T"))
            yield
        finally:
            print(Path(folder, "log").read_text())
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(60)


def ask(*words):
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, env=os.environ | ONE).stdout


def submit_until_saved(cfg, n_starts):
    """The step that a job's run saves when it gets a signal after its first steps."""
    said = Path(cfg.out_dir + ".log")
    job = ask("sbatch", "--parsable", "-n", "2", "-o", str(said), "--wrap",
              f"srun {shlex.join(words_of(cfg))}").strip()
    wait_for(lambda: logged(cfg, n_starts) or not ask("squeue", "-h"), 240)
    ask("scancel", "--signal=TERM", job)
    wait_for(lambda: not ask("squeue", "-h"), 240)
    assert "stopped: SIGTERM" in said.read_text(), said.read_text()
    return rows(cfg.out_dir, "save")[-1]["step"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin"),
                    reason="slurmctld is not installed")
def test_slurm_starts_a_run_and_ends_it_saved(tiny, slurm):
    """A job of two processes, submitted twice: the signal before its end saves, the second resumes.

    Break: train.py: if not cfg.coordinator: => if cfg.n_processes == 1:
    """
    cfg = tiny(dp=1, fsdp=2, coordinator="auto", steps=10**6, save_every=0, eval_every=0)
    saved = [submit_until_saved(cfg, n_starts) for n_starts in (1, 2)]
    starts = rows(cfg.out_dir, "start")
    assert [row["processes"] for row in starts] == [2, 2]
    assert starts[1]["step"] == saved[0] < saved[1]


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

TINY_RUN = ["--steps", "1", "--d_model", "32", "--n_layers", "1", "--n_heads", "2", "--batch_size",
            "4", "--seq_len", "16", "--eval_batches", "1"]


def test_a_locale_without_utf_8(tmp_path, cache_dir):
    """In the locale C, files, a prompt and a hook that are not ASCII work and print escapes.

    Break: train.py: stream.reconfigure(errors="backslashreplace") => pass
    """
    (tmp_path / "é.txt").write_text("être ou ne pas être " * 99, encoding="utf-8")
    (tmp_path / "hé.py").write_text("def h(event, row):\n    print(event, 'é')\n", encoding="utf-8")
    settings = {"data": ["é.txt"], "prompt": "é", "hooks": ["hé.py:h"], "cache_dir": cache_dir}
    (tmp_path / "c.json").write_text(json.dumps(settings), encoding="utf-8")
    env = os.environ | ONE | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    flags = ["--sample_tokens", "9", "--data", "é.txt", "--hooks", "hé.py:h"]
    run = subprocess.run([sys.executable, str(ROOT / "train.py"), "--config", "c.json", *TINY_RUN,
                          *flags], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "- sample --------\n\\xe9" in run.stdout and "end \\xe9\n" in run.stdout
    assert "Unicode" not in run.stdout + run.stderr
