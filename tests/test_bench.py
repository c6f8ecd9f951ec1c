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


@pytest.mark.slow
def test_the_start_of_pytorch_is_measured():
    """PyTorch's first step of the character model ends, and is printed.

    Break: tests/bench.py: torch_train_step(SHAPES["char"], => torch_train_step("char",
    """
    pytest.importorskip("torch", reason="PyTorch is not installed")
    assert bench.start_torch() > 0
