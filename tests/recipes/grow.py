# SPDX-License-Identifier: Apache-2.0
"""Train few layers first, then all: the deeper model begins as the same function.

python tests/recipes/grow.py --grow_from 1 --grow_at 600

The first run, in out_dir/shallow, has grow_from layers and stops at step grow_at. Its state gets
new layers above, whose output projections and moments are zero. An ordinary run in out_dir
continues with it, at the same step, rate and batch. Source: arXiv:2511.04981. The same command
resumes either run, and `python train.py --out_dir DIR` the second.
"""
import dataclasses
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import jax.numpy as jnp

from train import ckpt, config, steplib

OUTPUTS = ("layers.wo", "layers.w_down")  # a layer adds their products to the residual


@dataclass(frozen=True, kw_only=True)
class GrowConfig(config.Config):
    grow_from: config.PosInt = 1  # layers until then
    grow_at: config.PosInt = 500  # the step at which the model grows


def main(cfg, hooks=(), task=train.TEXT):
    """train.main of both runs, or of the one that is left. cfg: a GrowConfig."""
    cfg = config.resolve_paths(cfg)
    errors = []
    if cfg.coordinator:
        errors.append(f"coordinator {cfg.coordinator}: must be empty; grow.py has one process")
    if cfg.epochs:
        errors.append(f"epochs {cfg.epochs:g}: must be 0; set steps")
    if cfg.resume == "overwrite":
        errors.append("resume overwrite: not with two runs; delete their folder")
    config.raise_if_errors(errors)
    fields = [field.name for field in dataclasses.fields(config.Config)]
    deep = config.Config(**{name: getattr(cfg, name) for name in fields})
    has_grown = ckpt.newest_meta(ckpt.ckpt_root(deep.out_dir, deep.ckpt_dir))
    if deep.mode != "train" or has_grown:
        return train.main(deep, hooks, task)
    if cfg.grow_at >= cfg.steps:
        errors.append(f"grow_at {cfg.grow_at}: must be below steps {cfg.steps}")
    if cfg.grow_from >= cfg.n_layers:
        errors.append(f"grow_from {cfg.grow_from}: must be below n_layers {cfg.n_layers}")
    config.raise_if_errors(errors)
    shallow = replace(deep, n_layers=cfg.grow_from, out_dir=f"{deep.out_dir}/shallow",
                      ckpt_dir=deep.ckpt_dir and f"{deep.ckpt_dir}/shallow", export="",
                      export_every=0, stop=(*deep.stop, str(cfg.grow_at)))
    summary = train.main(shallow, hooks, task)
    if summary["step"] > cfg.grow_at:
        config.raise_if_errors([f"grow_at {cfg.grow_at}: {shallow.out_dir} is at step "
                                f"{summary['step']}; set that, or another --out_dir"])
    if summary["step"] < cfg.grow_at or summary["exit_code"]:
        return summary  # stopped earlier
    train.print0(f"step {cfg.grow_at}: {cfg.grow_from} of {cfg.n_layers} layers are trained")
    return train.main(replace(deep, resume="auto"), (*hooks, save_first), task,
                      state=grow(summary["state"], deep, task))


def grow(state, cfg, task=train.TEXT):
    """The state of the model of cfg, whose first layers are those of `state`."""
    run = train.setup_run(cfg, task)
    initial = steplib.lower_steps(*train.step_args(run))["init"](jax.random.key(cfg.seed))

    def extend(path, old, new):
        if old.shape == new.shape:
            return old
        # Moments may be in host memory.
        old, new = (jax.device_put(x, x.sharding.with_memory_kind("device")) for x in (old, new))
        added = new[len(old):]
        names = [getattr(part, "key", None) for part in path]
        return jnp.concatenate([old, 0 * added if names[-1] in OUTPUTS else added])

    return jax.tree_util.tree_map_with_path(extend, state, initial)


def save_first(event, row):  # so that train.py finds the deeper model
    return row | {"request": ["save"]} if event == "start" else None


if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], kind=GrowConfig, main=main))
