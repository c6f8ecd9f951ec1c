# SPDX-License-Identifier: Apache-2.0
"""bench.py measures what a run would use."""
import pytest

import bench


def test_a_step_is_that_of_a_run():
    """Peers multiply in bfloat16 under autocast: on a CPU the same is dtype mixed.

    Break: tests/bench.py: dtype = "mixed" => dtype = "float32"
    """
    cfg = bench.our_run("bfloat16", "char").cfg
    assert (cfg.dtype, cfg.attention, cfg.vocab_size) == ("mixed", "xla", 65)


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
