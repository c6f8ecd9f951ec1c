# SPDX-License-Identifier: Apache-2.0
"""The two recipes for Ray, on one cluster of one host."""
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ckpt
import config
import train
from conftest import ROOT
from test_recipes import NO_DATA, RESUMED
from test_train import arrays, same

if not importlib.util.find_spec("ray"):
    pytest.skip("ray is not installed: pip install 'ray[tune]'", allow_module_level=True)
import on_ray
import tune

pytestmark = pytest.mark.slow
TINY = dict(data=("text.txt",), steps=8, batch_size=8, seq_len=16, d_model=32, n_layers=1,
            n_heads=4, warmup_steps=2.0, eval_batches=2, log_every=1, eval_every=4, save_every=4,
            sample_every=0, sample_tokens=0, dtype="float32")
TEXT = "".join(f"{i} bottles of beer on the wall, {i} bottles of beer. " for i in range(400))
# A process of the cluster has one CPU device.
FLAGS = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")


@pytest.fixture(scope="module")
def address():
    """The address of a cluster that counts four CPUs, to which this process is connected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", FLAGS)
        ray = on_ray.connect("", 4)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a text."""
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def events(out_dir, *names):
    return [row for row in ckpt.read_log(out_dir) if row["event"] in names]


def losses(out_dir):
    return [(row["step"], row.get("loss"), row.get("val_loss"))
            for row in events(out_dir, "log", "eval")]


KILL = """
import os, pathlib, signal, time, jax
def once(event, value):
    mark, saved = pathlib.Path("killed"), pathlib.Path("killed_run/ckpt/000000004/meta.json")
    if event == "step" and value["step"] == 6 and jax.process_index() == 1 and not mark.exists():
        while not saved.exists():
            time.sleep(0.01)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
def always(event, value):
    if event == "step" and value["step"] == 2 and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_two_workers_train_as_one_process_and_a_killed_one_changes_no_bit(
        folder, address, cache_dir, capfd):
    """The job restarts from the save after a kill, and is bit-identical.

    Break: tests/recipes/on_ray.py: if "start" in received: => if False:
    """
    cfg = on_ray.RayConfig(**TINY, out_dir="two", cache_dir=cache_dir)
    received = []
    summary, restarts = on_ray.run(
        cfg, lambda event, row: received.append((event, row, time.time())))
    assert restarts == 0 and summary["step"] == 8 and summary["exit_code"] == 0
    rows = [(row["step"], row.get("loss"), row.get("val_loss")) for _, row, _ in received]
    assert rows == losses("two") and len(rows) == 10
    assert {row["processes"] for row in events("two", "start")} == {2}
    # The first row arrived during the run.
    assert received[0][2] < Path("two/ckpt/000000008/meta.json").stat().st_mtime
    alone = config.Config(**TINY, out_dir="one", cache_dir=cache_dir)
    train.main(alone)
    for two, one in zip(losses("two"), losses("one"), strict=True):
        np.testing.assert_allclose(np.float64(two), np.float64(one), rtol=2e-6)
    capfd.readouterr()
    Path("kill.py").write_text(KILL)
    killed = replace(cfg, out_dir="killed_run", hooks=("kill.py:once",), resume="never")
    again, restarts = on_ray.run(killed)
    out, err = capfd.readouterr()
    assert restarts == 1 and Path("killed").exists()
    died = re.findall("\nworker [01] died: restart 1 of 3, from the last save\n", out)
    assert len(died) == 1
    assert RESUMED in out
    assert "raylet" not in out + err and "Traceback" not in out + err
    assert losses("killed_run") == losses("two") and again["val_loss"] == summary["val_loss"]
    assert same(arrays("two"), arrays("killed_run"))


def test_workers_get_other_resources(folder, address):
    """As TPUs, in amounts; the cluster has none of these, so no room. Other texts are refused.

    Break: tests/recipes/on_ray.py: | other_resources(cfg) => | {}
    """
    import ray

    make = on_ray.RayConfig
    assert on_ray.other_resources(make(resources='{"TPU": 4}')) == {"TPU": 4}
    for text in ("TPU", "[4]", '{"TPU": 0}', '{"TPU": "4"}'):
        with pytest.raises(ValueError, match="resources.*: must be JSON of amounts above 0, as"):
            on_ray.other_resources(make(resources=text))
    _, group = on_ray.place_workers(ray, make(n_workers="1", resources='{"TPU": 4}'))
    assert group.bundle_specs == [{"CPU": 1.0, "GPU": 0.0, "TPU": 4.0}] and not group.wait(0)
    ray.util.remove_placement_group(group)


def test_deaths_beyond_max_restarts_and_user_errors_are_printed_in_one_sentence(
        folder, address, cache_dir, capfd):
    """The exit codes are 1 and 2. A user's error causes no restart.

    Break: tests/recipes/on_ray.py: restarts == cfg.max_restarts => restarts > cfg.max_restarts
    """
    Path("kill.py").write_text(KILL)
    cfg = on_ray.RayConfig(**TINY, out_dir="dead", cache_dir=cache_dir, hooks=("kill.py:always",),
                           max_restarts=0)
    with pytest.raises(SystemExit, match="^error: worker [01] died, after 0 of 0 restarts$"):
        on_ray.run(cfg)  # Python ends with code 1 and prints it
    assert "restart 1" not in capfd.readouterr().out
    flags = ["--n_workers", "1", "--out_dir", "none", "--data", "missing.txt"]
    code = train.cli(flags, kind=on_ray.RayConfig, main=on_ray.main)
    out, err = capfd.readouterr()
    assert code == 2 and "restart" not in out
    assert err.startswith(f"error: {NO_DATA}") and err.count("\n") == 1


def test_a_signal_to_the_caller_stops_the_workers_saved(folder, address, cache_dir):
    """After SIGTERM all workers finish the same step and save. The exit code is 0.

    Break: tests/recipes/on_ray.py: ray.cancel(workers[0], force=False) =>
    ray.cancel(workers[0], force=True)
    """
    given = TINY | dict(out_dir="long", steps=10**6, log_every=5, save_every=0, eval_every=0,
                        cache_dir=cache_dir, ray_address=address, data="text.txt")
    flags = [f"--{name}={value}" for name, value in given.items()]
    env = os.environ | {"XLA_FLAGS": FLAGS}
    with subprocess.Popen([sys.executable, str(ROOT / "tests/recipes/on_ray.py"), *flags], env=env,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        while not events("long", "log") and run.poll() is None:
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=120)
    assert run.returncode == 0, out + err
    stop = events("long", "stop")[-1]
    assert stop["step"] % 5 == 0 and f"saved in long/ckpt/{stop['step']:09d}" in out
    meta = ckpt.read_meta("long/ckpt", stop["step"])
    assert meta["config"]["steps"] == 10**6 and "n_workers" not in meta["config"]
    assert err.strip() == "SIGTERM: finishing the step and saving; again to end at once"


def test_a_sweep_stops_bad_trials_and_prints_the_best(folder, address, cache_dir, capfd):
    """The two worst of four stop after grace_steps; the last line repeats the best.

    Break: tests/recipes/tune.py: grace_period=cfg.grace_steps => grace_period=cfg.steps
    """
    cfg = tune.SweepConfig(
        **TINY, out_dir="sweep", cache_dir=cache_dir, n_trials=4, grace_steps=4, n_cpus=2,
        seed=61, sweep=("lr=1e-3,3e-3,1e-9", "max_to_keep=2:99"))
    rows = {row["trial"]: row for row in tune.run(cfg)}
    out = capfd.readouterr().out.splitlines()
    assert [rows[i]["values"]["lr"] for i in range(4)] == [3e-3, 3e-3, 1e-9, 1e-3]
    for i, state, step in ((0, "done", 8), (1, "done", 8), (2, "stopped", 4), (3, "stopped", 4)):
        assert (rows[i]["state"], rows[i]["step"]) == (state, step)
        ends = events(f"sweep/{i}", "end")
        assert [row["val_loss"] for row in ends] == [rows[i]["val_loss"]] * (state == "done")
    head, *table = out[-6:-1]
    assert head.split() == ["trial", "step", "validation", "loss", "lr", "max_to_keep"]
    assert [int(line.split()[0]) for line in table] == [*rows] == [0, 1, 3, 2]
    assert len({row["values"]["max_to_keep"] for row in rows.values()}) > 1
    assert all(2 <= row["values"]["max_to_keep"] <= 99 for row in rows.values())
    assert all(len(line) <= 80 for line in out[:-1])
    best, _, line = out[-1].partition("; to repeat it: ")
    assert best == "best: trial 0"
    assert train.cli([*shlex.split(line)[2:], "--fsdp", "-1"]) == 0
    again = events("sweep/0-again", "end")[-1]["val_loss"]
    np.testing.assert_allclose(again, rows[0]["val_loss"], rtol=2e-6)


def test_a_run_goes_on_with_fewer_workers_when_a_host_is_lost(
        folder, cache_dir, capfd, monkeypatch):
    """With 1:2 workers, and the losses of one process.

    Break: tests/recipes/on_ray.py: if n != counts[-1]: => if False:
    """
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()  # leave the cluster of the tests above
    monkeypatch.setenv("XLA_FLAGS", FLAGS)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    lost = cluster.add_node(num_cpus=1)
    given = TINY | {"eval_every": 0}
    cfg = on_ray.RayConfig(**given, out_dir="fewer", cache_dir=cache_dir, n_workers="1:2",
                           wait_s=5.0, ray_address=cluster.address)
    hosts = [lost]

    def lose_host(event, row):
        if hosts and event == "log" and row["step"] >= 5:
            cluster.remove_node(hosts.pop(), allow_graceful=False)

    summary, restarts = on_ray.run(cfg, lose_host)
    ray.shutdown()
    cluster.shutdown()
    out = capfd.readouterr().out
    assert "no room for 2 workers: trying fewer" in out and "restart 1 of 3" in out
    assert restarts == 1 and summary["step"] == 8
    assert [row["processes"] for row in events("fewer", "start")] == [2, 1]
    train.main(config.Config(**given, out_dir="one", cache_dir=cache_dir))
    for fewer, one in zip(losses("fewer"), losses("one"), strict=True):
        np.testing.assert_allclose(np.float64(fewer), np.float64(one), rtol=2e-6)
