# SPDX-License-Identifier: Apache-2.0
"""bench.py measures what a run would use."""
import itertools
from pathlib import Path

import pytest

import bench


def test_a_step_is_that_of_a_run():
    """Peers multiply in bfloat16 under autocast: on a CPU the same is dtype mixed.

    Break: tests/bench.py: dtype = "mixed" => dtype = "float32"
    """
    cfg = bench.our_run("bfloat16", "char").cfg
    assert (cfg.dtype, cfg.attention, cfg.vocab_size) == ("mixed", "xla", 65)


def test_a_process_gives_all_that_it_yields(tmp_path, monkeypatch):
    """Then a new one begins. What it prints is no result, and its exception is the caller's.

    Break: tests/bench.py: if not sys.stdin.readline(): => if True:
    """
    script = tmp_path / "bench_of_two.py"
    script.write_text(f"import os, sys; sys.path.insert(0, {str(Path(bench.__file__).parent)!r})\n"
                      "import bench\n"
                      "bench.pids = lambda: (print('words') or os.getpid() for _ in range(2))\n"
                      "bench.broken = lambda: 1 / 0\n"
                      "bench.serve(sys.argv[2], sys.argv[3:])\n")
    monkeypatch.setattr(bench, "__file__", str(script))
    a, b, c, d = itertools.islice(bench.turns("pids"), 4)
    assert a == b != c == d
    with pytest.raises(RuntimeError, match="broken: ZeroDivisionError: division by zero"):
        next(bench.turns("broken"))


def test_the_start_of_pytorch_is_measured(monkeypatch, capsys):
    """PyTorch's first step of a small character model ends, and is printed, which ends the measure.

    Break: tests/bench.py: torch_train_step(SHAPES["char"], => torch_train_step("char",
    """
    pytest.importorskip("torch", reason="PyTorch is not installed")
    small = dict(n_layers=1, d_model=24, seq_len=16)
    monkeypatch.setitem(bench.SHAPES, "char", bench.SHAPES["char"] | small)
    bench.first_torch("")
    printed = capsys.readouterr().out
    assert bench.seconds_until("first step", "-c", f"print({printed!r})") > 0
    with pytest.raises(RuntimeError, match="ended before it printed 'first step'"):
        bench.seconds_until("first step", "-c", "")
