# SPDX-License-Identifier: Apache-2.0
"""bench.py measures what a run would use."""
import itertools
import os
import signal
from pathlib import Path

import pytest

import bench


def test_a_step_is_that_of_a_run():
    """Peers multiply in bfloat16 under autocast: on a CPU the same is dtype mixed.

    Break: tests/bench.py: dtype = "mixed" => dtype = "float32"
    """
    cfg = bench.our_run("bfloat16", "char").cfg
    assert (cfg.dtype, cfg.attention, cfg.vocab_size) == ("mixed", "xla", 65)


def write_script(monkeypatch, path, *lines):
    """Write a script that results_of calls in place of bench.py; lines: what it changes first."""
    path.write_text("\n".join([
        "import os, sys", f"sys.path.insert(0, {str(Path(bench.__file__).parent)!r})",
        "import bench", *lines, "bench.serve(sys.argv[2], sys.argv[3:])"]))
    monkeypatch.setattr(bench, "__file__", str(path))


def test_a_process_yields_all_its_results_before_another_starts(tmp_path, monkeypatch):
    """What else it prints is ignored. Its exception, or its death, becomes a RuntimeError.

    Break: tests/bench.py: if not sys.stdin.readline(): => if True:
    """
    write_script(monkeypatch, tmp_path / "bench_of_two.py",
                 "bench.pids = lambda: (print('words') or os.getpid() for _ in range(2))",
                 "bench.broken = lambda: 1 / 0")
    pids = bench.results_of("pids")
    a, b, c, d = itertools.islice(pids, 4)
    assert a == b != c == d
    with pytest.raises(RuntimeError, match="broken: ZeroDivisionError: division by zero"):
        next(bench.results_of("broken"))
    os.kill(next(pids), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="pids"):
        next(pids)


def test_the_start_of_pytorch_is_measured(tmp_path, monkeypatch):
    """The measure ends with PyTorch's first step of a small character model.

    Break: tests/bench.py: return "first step" => print("first step")
    """
    pytest.importorskip("torch", reason="PyTorch is not installed")
    write_script(monkeypatch, tmp_path / "bench_of_a_small_model.py",
                 "bench.SHAPES['char'] |= dict(n_layers=1, d_model=24, seq_len=16)")
    assert bench.start_torch() > 0
    with pytest.raises(RuntimeError, match="ended before it printed 'first step'"):
        bench.seconds_until("first step", "-c", "")
