# SPDX-License-Identifier: Apache-2.0
"""Magnitude pruning on a schedule: a growing fraction of each matrix becomes and stays zero.

python train.py --hooks tests/recipes/prune.py:prune

The zeros are the mask. There is no other state, so checkpoints are as without pruning, and a
resumed run continues with the same mask. For other numbers write `prune = prune_to(...)` in a file
of your own.
"""
import sys

import jax
import jax.numpy as jnp

from train import model


def sparsity_at(step, sparsity, first, last):
    """Source: Zhu & Gupta 2017, arXiv:1710.01878, equation 1, with an initial sparsity of 0."""
    remaining = jnp.clip((last - step) / (last - first), 0, 1)
    return sparsity * (1 - remaining**3)


def prune_to(sparsity, first, last, every=10, patterns=("layers.w*",)):
    """Return a hook that sets the smallest weights of each matching matrix to zero, `every` steps
    after `first` and at `last`. The metric "sparsity" is the fraction of zeros in these matrices.
    """
    if not (0 <= sparsity < 1 and 0 <= first < last and every > 0):
        raise ValueError(f"prune_to({sparsity=}, {first=}, {last=}, {every=}): must be 0 <= "
                         "sparsity < 1, 0 <= first < last and every > 0")

    def hook(event, value):
        if event == "start" and value["config"]["steps"] < last:
            print(f"prune: its schedule ends at step {last}, after the run", file=sys.stderr)
        if event == "train_step":
            return prune_in(value)

    def prune_in(train_step):
        def pruned_step(state, batch, lr):
            new, metrics = train_step(state, batch, lr)
            names = sorted(model.matching("prune", patterns, state["params"]))

            # What was zero before the step is zero after it.
            weights = {}
            for name in names:
                was_pruned = (state["params"][name] == 0) & (state["step"] > first)
                weights[name] = jnp.where(was_pruned, 0, new["params"][name])

            # Prune further at the steps of the schedule.
            step = new["step"]
            target = sparsity_at(step, sparsity, first, last)
            is_due = (step < last) & ((step - first) % every == 0) | (step == last)
            weights = jax.lax.cond(is_due, lambda: zero_smallest_of_each(weights, target),
                                   lambda: weights)

            n_zero = sum((w == 0).sum(dtype=jnp.float32) for w in weights.values())
            n_total = sum(w.size for w in weights.values())
            metrics = metrics | {"sparsity": n_zero / n_total}
            return new | {"params": new["params"] | weights}, metrics

        return pruned_step

    return hook


def zero_smallest_of_each(weights, fraction):
    return {name: zero_smallest(w, fraction) for name, w in weights.items()}


def zero_smallest(w, fraction):
    """Set the smallest round(fraction * in * out) weights of each matrix of w [..., in, out] to
    zero. Among equal weights the first ones become zero.
    """
    rows, columns = w.shape[-2:]
    n = jnp.int32(jnp.round(fraction * (rows * columns)))
    # As integers, the bits of non-negative floats have the same order as the floats.
    magnitude = jax.lax.bitcast_convert_type(jnp.abs(w).astype(jnp.float32), jnp.int32)
    bound = largest_bound(magnitude, n)
    is_below = magnitude < bound
    is_equal = magnitude == bound

    # Fill up with the first of the weights that are equal to the bound.
    row = jax.lax.broadcasted_iota(jnp.int32, w.shape, w.ndim - 2)
    column = jax.lax.broadcasted_iota(jnp.int32, w.shape, w.ndim - 1)
    position = jnp.where(is_equal, columns * row + column, 2**31 - 1)
    n_more = n - is_below.sum(axis=(-2, -1), keepdims=True)
    is_first = position < largest_bound(position, n_more)
    return jnp.where(is_below | is_first, 0, w)


def largest_bound(keys, n):
    """The largest bound below which each matrix has at most n keys. keys: int32, at least 0.

    Found bit by bit, so that devices exchange only counts: a sort would gather a sharded matrix.
    """
    def add_bit(i, bound):
        candidate = bound | (1 << (30 - i))
        n_below = (keys < candidate).sum(axis=(-2, -1), keepdims=True)
        return jnp.where(n_below <= n, candidate, bound)

    return jax.lax.fori_loop(0, 31, add_bit, jnp.zeros((*keys.shape[:-2], 1, 1), jnp.int32))


prune = prune_to(sparsity=0.5, first=100, last=400)
