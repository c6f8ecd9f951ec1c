# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests: eight fake CPU devices, quick compilation, one cache of compiled programs,
no implicit broadcasting, and the project's folder on the path.
"""
import functools
import gc
import math
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

# The older fusion emitters halve the compile time. `--xla_cpu_use_fusion_emitters=false` selects
# them only up to jax 0.10. An unknown flag ends the process; an unknown extra option does not.
# Code generation is not split over threads: the split costs a seventh of the compile time, and
# another test worker uses the other core.
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"])
os.environ["JAX_PLATFORMS"] = "cpu"
# Programs without the source location of each operation compile a tenth faster.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# All workers and the processes that tests start share a cache of compiled programs. It is new in
# each session, unless JAX_COMPILATION_CACHE_DIR names a folder.
MADE_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if MADE_CACHE:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="sixfile-programs-")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
CACHE_DIR = os.environ["JAX_COMPILATION_CACHE_DIR"]
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/recipes")]

import jax
import pytest

import config
import step
import train

jax.config.update("jax_numpy_rank_promotion", "raise")
# A suite in the background of a script inherits that SIGINT is ignored; its processes must not.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(50_000, 20, 20)  # tracing allocates many objects, few of them in cycles


def pytest_collection_modifyitems(items):
    """Run slow tests first: most of them wait for processes while other tests use the cores."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    gc.freeze()  # full collections need not visit imported objects


def pytest_unconfigure():
    if MADE_CACHE:
        shutil.rmtree(CACHE_DIR, ignore_errors=True)


def on_devices_of_the_mesh(setup_run):
    """setup_run on as many devices as the mesh names, -1 as 1, since few are several times faster.
    On one CPU device the loop does not run ahead: a test of the step that follows sets dp=2.
    """
    @functools.wraps(setup_run)
    def setup(cfg, task=train.TEXT, devices=None, hooks=(), progress=None):
        if devices is None and jax.process_count() == 1:
            n_devices = math.prod(max(getattr(cfg, axis), 1) for axis in config.AXES)
            devices = jax.devices()[:n_devices]
        return setup_run(cfg, task, devices, hooks, progress)

    return setup


train.setup_run = on_devices_of_the_mesh(train.setup_run)


@pytest.fixture(autouse=True)
def use_cache():
    """Return to the cache of the session, after a test of another one."""
    if not (jax.config.jax_compilation_cache_dir or "").startswith(CACHE_DIR):
        step.enable_compilation_cache(CACHE_DIR)


@pytest.fixture(scope="session")
def cache_dir():
    """The folder of the compilation cache."""
    return CACHE_DIR


@pytest.fixture
def tiny(tmp_path, cache_dir, monkeypatch):
    """tiny(**changes) returns a Config that trains in seconds, without the plot, which is slow."""
    monkeypatch.setattr(train, "OBSERVERS", train.OBSERVERS[:-1])  # no plot
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} bottles of beer on the wall, {i} bottles of beer. "
                            for i in range(400)))
    base = dict(
        data=(str(text),), out_dir=str(tmp_path / "out"), cache_dir=cache_dir, steps=8,
        batch_size=8, seq_len=16, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2,
        schedule="constant", warmup_steps=2.0, eval_batches=2, log_every=1, eval_every=4,
        save_every=4, sample_every=0, sample_tokens=0, dp=-1, fsdp=1, optimizer="adamw", lr=2e-3,
        dtype="float32")

    def make(**changes):
        return config.Config(**base | changes)

    return make
