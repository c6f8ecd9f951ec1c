# SPDX-License-Identifier: Apache-2.0
"""Hooks to use or to change: early stopping, freezing after a step, a new metric.

python train.py --hooks tests/recipes/hooks.py:early_stopping tests/recipes/hooks.py:weight_norm
"""
import json
from fnmatch import fnmatch
from pathlib import Path

import jax.numpy as jnp
import optax


def stop_early(patience):
    """Return a hook that ends a run whose validation loss has not improved in `patience`
    evaluations. A resumed run counts the evaluations before it.
    """
    losses = []

    def hook(event, row):
        if event == "start":
            losses.extend(earlier_losses(row["config"]["out_dir"], row["step"]))
        if event == "eval":
            losses.append(row["val_loss"])
            best = min(losses)
            if len(losses) - losses.index(best) > patience:
                return row | {"stop": f"no better in {patience} evaluations than {best:.4f}"}

    return hook


def earlier_losses(out_dir, step):
    """Validation losses up to a step, from the log of a run."""
    log = Path(out_dir, "metrics.jsonl")
    if not log.exists():
        return []
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [row["val_loss"] for row in rows if row["event"] == "eval" and row["step"] <= step]


def freeze_after(step, pattern):
    """Return a hook that stops training the matching parameters after `step`."""
    def hook(event, train_step):
        if event != "train_step":
            return

        def frozen_step(state, batch):
            new, metrics = train_step(state, batch)
            params = dict(new["params"])
            for name, x in params.items():
                if fnmatch(name, pattern):
                    params[name] = jnp.where(state["step"] < step, x, state["params"][name])
            return new | {"params": params}, metrics

        return frozen_step

    return hook


def weight_norm(event, loss_fn):
    """Add the norm of all parameters to the metrics of training and evaluation."""
    if event != "loss_fn":
        return

    def loss_and_norm(params, batch, cfg):
        sums, counts = loss_fn(params, batch, cfg)
        return sums | {"weight_norm": optax.tree.norm(params)}, counts | {"weight_norm": 1.0}

    return loss_and_norm


early_stopping = stop_early(patience=3)
freeze_embed = freeze_after(step=100, pattern="embed")
