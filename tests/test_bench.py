# SPDX-License-Identifier: Apache-2.0
"""bench.py measures what a run would use."""
import types

import jax
import pytest

import bench


@pytest.mark.parametrize("platform, capability, dtype, attention", [
    ("gpu", "9.0", "bfloat16", "cudnn"), ("gpu", "gfx942", "bfloat16", "xla"),
    ("cpu", "", "mixed", "xla"),
])
def test_ours_has_the_attention_and_dtype_of_the_device(platform, capability, dtype, attention,
                                                        monkeypatch):
    """In 16 bits: cuDNN's attention on an NVIDIA GPU, and bfloat16 products alone on a CPU.

    Break: tests/bench.py: choose_attention(cfg, kind)) => choose_attention(cfg, kind == "cuda"))
    """
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    cfg = bench.our_config("char", "bfloat16")
    assert (cfg.dtype, cfg.attention) == (dtype, attention)


@pytest.mark.slow
def test_the_start_of_pytorch_is_measured():
    """PyTorch's first step of the character model ends, and is printed.

    Break: tests/bench.py: torch_train_step(SHAPES["char"], => torch_train_step("char",
    """
    pytest.importorskip("torch", reason="PyTorch is not installed")
    assert bench.start_torch() > 0
