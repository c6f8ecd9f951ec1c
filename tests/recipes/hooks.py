# SPDX-License-Identifier: Apache-2.0
"""Hooks to use or to change: early stopping, an evaluation when the loss jumps, an average of the
parameters, freezing after a step, a new metric.

python train.py --hooks tests/recipes/hooks.py:early_stopping tests/recipes/hooks.py:weight_norm
"""
import contextlib
import math
from fnmatch import fnmatch
from functools import wraps

import jax
import jax.numpy as jnp
import optax

import ckpt


def stop_early(patience):
    """Return a hook that ends a run whose validation loss has not improved in `patience`
    evaluations. Checkpoints have the losses so far, so a resumed run continues to count, unless its
    validation data is another.
    """
    kept = {}

    def hook(event, row):
        if event == "start":  # of this run: the same hook may have watched another one
            kept.update(losses=[], validation=row["validation"])
        if event == "resume":
            saved = row["hooks"].get("early_stopping")
            if saved and saved["validation"] == kept["validation"]:
                kept.update(saved)
        if event == "before_save":
            return row | {"hooks": row["hooks"] | {"early_stopping": kept}}
        if event == "eval":
            losses = kept["losses"]
            # A loss that is not finite counts as an evaluation, and as the worst.
            losses.append(row["val_loss"] if math.isfinite(row["val_loss"]) else math.inf)
            best = min(losses)
            if len(losses) - losses.index(best) > patience:
                return row | {"stop": f"no better in {patience} evaluations than {best:.4f}"}

    return hook


def evaluate_on_jump(factor):
    """Return a hook that requests an evaluation and a checkpoint when the loss of a log row is
    `factor` times that of the row before.
    """
    last = []

    def hook(event, row):
        if event == "start":
            last.clear()
        if event == "resume":
            last.extend(row["hooks"].get("evaluate_on_jump", []))
        if event == "before_save":
            return row | {"hooks": row["hooks"] | {"evaluate_on_jump": last}}
        if event == "log":
            has_jumped = bool(last) and row["loss"] > factor * last[0]
            last[:] = [row["loss"]]
            if has_jumped:
                return row | {"request": ["eval", "save"]}

    return hook


def freeze_after(step, pattern):
    """Return a hook that stops training the matching parameters after `step`."""
    def hook(event, train_step):
        if event != "train_step":
            return

        def frozen_step(state, batch, lr):
            new, metrics = train_step(state, batch, lr)
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

    @wraps(loss_fn)  # so that it also takes train_keys if loss_fn does
    def loss_and_norm(params, batch, cfg, **options):
        sums, counts = loss_fn(params, batch, cfg, **options)
        return sums | {"weight_norm": optax.tree.norm(params)}, counts | {"weight_norm": 1.0}

    return loss_and_norm


def average_params(decay):
    """Return a hook that evaluates the average of the parameters over about 1 / (1 - decay) steps,
    at the beginning over fewer. Checkpoints have it as hooks/ema, so that a run resumes with it, on
    any mesh, and mode eval evaluates it. It is float32, in which small moves count, also of
    parameters in bfloat16. An export has the parameters, not their average.
    """
    kept = {}

    @jax.jit
    def add(ema, state):
        kept_frac = jnp.minimum(decay, state["step"] / (9 + state["step"]))
        return jax.tree.map(lambda a, b: kept_frac * a + (1 - kept_frac) * b, ema, state["params"])

    def hook(event, value):
        if event == "load":
            kept["ema"] = jax.tree.map(lambda x: jnp.array(x, jnp.float32), value["params"])
        if event == "resume":
            like = {"hooks": kept}
            with contextlib.suppress(KeyError):  # new to the run: the average begins here
                kept.update(ckpt.restore(value["root"], value["step"], like)["hooks"])
        if event == "state":
            kept["ema"] = add(kept["ema"], value)
        if event == "before_save":
            return value | {"arrays": value["arrays"] | kept}
        if event == "before_eval":
            params = {}
            for name, x in value["params"].items():
                params[name] = kept["ema"][name].astype(x.dtype)
            return value | {"params": params}

    return hook


early_stopping = stop_early(patience=3)
eval_on_jump = evaluate_on_jump(factor=1.5)
ema = average_params(decay=0.99)
freeze_embed = freeze_after(step=100, pattern="embed")
