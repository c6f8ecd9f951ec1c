# SPDX-License-Identifier: Apache-2.0
"""Shape suffixes that cannot lie: every local `name_XYZ` of model.py has the shape that its suffix
says. And the linter.
"""
import re
import subprocess
import sys

import jax
import jax.numpy as jnp

import config
import model
import mutate
from conftest import ROOT

T, N_NEW = 11, 13
SIZES = {"B": 5, "D": 29, "F": 19, "N": 6, "K": 3, "G": 2, "H": 10, "V": 23, "L": 7, "1": 1,
         "E": 31, "P": 1, "n": 8, "t": 2, "s": 2}


def locals_that_lie(call, lengths):
    """Wrong names, and all names seen, of model.py while `call` runs.

    lengths: the pairs that (T, S) may be.
    """
    wrong, seen = set(), set()

    def at_return(frame, event, _):
        if event != "return" or frame.f_code.co_filename != model.__file__:
            return
        for name, value in frame.f_locals.items():
            suffix = re.search(r"_([BTSDFNKHVLEAGPC1nts]+)$", name)
            if suffix and hasattr(value, "shape"):
                seen.add(name)
                legal = [tuple((SIZES | {"T": t, "S": s, "C": t}).get(c) for c in suffix[1])
                         for t, s in lengths]
                if value.shape not in legal:
                    wrong.add(f"{frame.f_code.co_name}: {name} has shape {value.shape}, "
                              f"not {legal}")

    sys.setprofile(at_return)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(wrong), seen


def test_suffixes_are_shapes(monkeypatch):
    """Each suffixed local of loss_fn and generate has the dims of its letters, at sizes that no two
    letters share.

    T is the prompt's length, half of it in attention, 1 when decoding, or the new tokens; S is T,
    the first half, or the length of the cache; C, the capacity of an expert, is all T. At least 20
    names. By blocks, whose gradient is traced too, attention has n parts of t queries and s keys.
    Break: model.py: q_BKGTH = H**-0.5 * q_BNTH.reshape(B, K, N // K, T, H) =>
    q_BKGTH = H**-0.5 * q_BNTH.reshape(B, N // K, K, T, H).swapaxes(1, 1)
    """
    cfg = config.derive_text(config.Config(
        d_model=SIZES["D"], n_heads=SIZES["N"], n_kv_heads=SIZES["K"], head_dim=SIZES["H"],
        d_ff=SIZES["F"], n_layers=SIZES["L"], vocab_size=SIZES["V"], qkv_bias=True,
        n_experts=SIZES["E"], capacity_factor=0.0, label_smoothing=0.1, rope_factor=2.0,
        dtype="float32"))
    key, ids = jax.random.key(0), jax.ShapeDtypeStruct((SIZES["B"], T), jnp.int32)
    lengths = jax.ShapeDtypeStruct((SIZES["B"],), jnp.int32)
    params = jax.eval_shape(lambda k: model.init(k, cfg), key)
    def loss(p, x):
        return model.loss_fn(p, {"tokens": x, "labels": x}, cfg)
    # Unjitted: a trace in the cache of jit would run no Python.
    def generate(p, x, n, k):
        return model._generate(p, x, n, cfg, k, N_NEW)
    wrong, seen = locals_that_lie(lambda: jax.eval_shape(loss, params, ids),
                                    [(T, T), (6, 6), (5, T)])
    more_wrong, more_seen = locals_that_lie(
        lambda: jax.eval_shape(generate, params, ids, lengths, key),
        [(t, T + N_NEW) for t in (T, 1, N_NEW)])
    monkeypatch.setattr(model, "DENSE_LEN", 0)
    packed = jax.jit(jax.grad(lambda p, x: model.loss_fn(
        p, {"tokens": x, "labels": x, "segments": x}, cfg)[0]["objective"]))
    in_blocks, names = locals_that_lie(lambda: jax.eval_shape(packed, params, ids), [(T, T)])
    assert not wrong + more_wrong + in_blocks, "\n".join(wrong + more_wrong + in_blocks)
    assert len(seen | more_seen) >= 20, sorted(seen | more_seen)
    assert {"ds_BKGts", "scale_BKGt1", "high_Bn", "ids_Bnt"} <= names, sorted(names)


def test_every_break_is_a_line_of_the_code():
    """What each test names as the break that makes it fail stands exactly once in its file, so that
    tests/mutate.py can apply it.

    Break: train.py: stopped=stopped_while_waiting, => stopped = stopped_while_waiting,
    """
    named, missing = mutate.named_breaks()
    wrong = [f"{test}: {old!r} stands {count} times in {file}" for test, file, old, _ in named
             if (count := (ROOT / file).read_text().count(old)) != 1]
    assert not wrong + missing, "\n".join(wrong + missing)


def test_ruff():
    """Ruff finds nothing in the project under the rules of .ruff.toml.

    Break: data.py: import zlib => import string, zlib
    """
    run = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format",
                          "concise", str(ROOT)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
