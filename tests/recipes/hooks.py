# SPDX-License-Identifier: Apache-2.0
"""Hooks to take or to change: early stopping, freezing from a step on, a metric of one's own.

python train.py --hooks tests/recipes/hooks.py:early_stopping tests/recipes/hooks.py:weight_norm
"""
import json
from fnmatch import fnmatch
from pathlib import Path

import jax.numpy as jnp
import optax


def stop_early(patience):
    """A hook that ends a run whose validation loss has not fallen in so many evaluations; a resumed
    run counts those before it.
    """
    losses = []

    def hook(event, row):
        if event == "start":
            log = Path(row["config"]["out_dir"], "metrics.jsonl")
            rows = map(json.loads, log.read_text().splitlines() if log.exists() else ())
            losses.extend(old["val_loss"] for old in rows
                          if old["event"] == "eval" and old["step"] <= row["step"])
        if event == "eval":
            losses.append(row["val_loss"])
            if len(losses) - losses.index(min(losses)) > patience:
                return row | {"stop": f"no better in {patience} evaluations than {min(losses):.4f}"}

    return hook


def freeze_after(step, pattern):
    """A hook: parameters whose name matches stay as they are after that many updates."""
    def hook(event, train_step):
        if event != "train_step":
            return

        def frozen_step(state, batch):
            new, metrics = train_step(state, batch)
            kept = {name: jnp.where(state["step"] < step, x, state["params"][name])
                    for name, x in new["params"].items() if fnmatch(name, pattern)}
            return new | {"params": new["params"] | kept}, metrics

        return frozen_step

    return hook


def weight_norm(event, loss_fn):
    """A metric of every row, of training and evaluation: the norm of all parameters."""
    if event != "loss_fn":
        return

    def loss_and_norm(params, batch, cfg):
        sums, counts = loss_fn(params, batch, cfg)
        return sums | {"weight_norm": optax.tree.norm(params)}, counts | {"weight_norm": 1.0}

    return loss_and_norm


early_stopping = stop_early(patience=3)
freeze_embed = freeze_after(step=100, pattern="embed")
