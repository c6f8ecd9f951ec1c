# SPDX-License-Identifier: Apache-2.0
"""Magnitude pruning on a schedule: a growing share of each matrix is set to zero and stays zero.

python train.py --hooks tests/recipes/prune.py:prune

The zeros are the mask: there is no other state, so checkpoints are as without pruning, and a
resumed run goes on with the same mask. Other numbers: `prune = prune_to(...)` in a file of yours.
"""
import sys

import jax
import jax.numpy as jnp

import model


def sparsity_at(step, sparsity, first, last):
    """Source: Zhu & Gupta 2017, arXiv:1710.01878, equation 1, from an initial sparsity of 0."""
    left = jnp.clip((last - step) / (last - first), 0, 1)
    return sparsity * (1 - left**3)


def prune_to(sparsity, first, last, every=10, patterns=("layers.w*",)):
    """A hook: of each matrix of the parameters that match, the smallest weights are set to zero
    every so many updates after `first`, and at `last`; "sparsity" is the share of zeros in them.
    """
    if not (0 <= sparsity < 1 and 0 <= first < last and every > 0):
        raise ValueError(f"prune_to({sparsity=}, {first=}, {last=}, {every=}): must be 0 <= "
                         "sparsity < 1, 0 <= first < last and every > 0")

    def hook(event, train_step):
        if event == "start" and train_step["config"]["steps"] < last:
            print(f"prune: its schedule ends at step {last}, after the run", file=sys.stderr)
        if event != "train_step":
            return

        def pruned_step(state, batch):
            new, metrics = train_step(state, batch)
            step, old = new["step"], state["params"]
            names = sorted(model.matching("prune", patterns, old))
            pruned = {name: (old[name] == 0) & (state["step"] > first) for name in names}
            kept = {name: jnp.where(pruned[name], 0, new["params"][name]) for name in names}
            due = (step < last) & ((step - first) % every == 0) | (step == last)
            share = sparsity_at(step, sparsity, first, last)
            kept = jax.lax.cond(due, lambda: {name: zero_smallest(w, share)
                                              for name, w in kept.items()}, lambda: kept)
            n_zero = sum((x == 0).sum(dtype=jnp.float32) for x in kept.values())
            metrics = metrics | {"sparsity": n_zero / sum(x.size for x in kept.values())}
            return new | {"params": new["params"] | kept}, metrics

        return pruned_step

    return hook


def zero_smallest(w, share):
    """w [..., in, out] with round(share x in x out) weights of each matrix set to zero, the
    smallest; of equal ones the first.
    """
    rows, columns = w.shape[-2:]
    n = jnp.int32(jnp.round(share * (rows * columns)))
    size = jax.lax.bitcast_convert_type(jnp.abs(w).astype(jnp.float32), jnp.int32)
    bound = largest_bound(size, n)
    below, equal = size < bound, size == bound
    place = (columns * jax.lax.broadcasted_iota(jnp.int32, w.shape, w.ndim - 2)
             + jax.lax.broadcasted_iota(jnp.int32, w.shape, w.ndim - 1))
    place = jnp.where(equal, place, 2**31 - 1)
    left = n - below.sum(axis=(-2, -1), keepdims=True)
    return jnp.where(below | (place < largest_bound(place, left)), 0, w)


def largest_bound(keys, n):
    """The largest bound that at most n keys of each matrix are below. keys: int32 from 0 on.

    Bit by bit, so that of a sharded matrix only counts are sent: a sort would gather it.
    """
    def add_bit(i, bound):
        more = bound | (1 << (30 - i))
        return jnp.where((keys < more).sum(axis=(-2, -1), keepdims=True) <= n, more, bound)

    return jax.lax.fori_loop(0, 31, add_bit, jnp.zeros((*keys.shape[:-2], 1, 1), jnp.int32))


prune = prune_to(sparsity=0.5, first=100, last=400)
