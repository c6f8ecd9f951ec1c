# SPDX-License-Identifier: Apache-2.0
"""Until the merge: gives today's core the interfaces that tests/plan.py is written against.
Delete this file and the line of tests/plan.py that imports it.
"""
import dataclasses
from dataclasses import dataclass

import jax

import config
import model
import step
import train

_parse, _table, _devices = config.parse, model.param_table, train.plan_devices
_remedy, _peaks, _setup = train.first_remedy, step.peaks, train.setup


@dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    plan_for: str = ""  # TPU slice to plan for, such as v5p:8x8x8; empty: the devices at hand


class Row(tuple):
    def __getitem__(self, i):
        return tuple.__getitem__(self, ("shape", "spec", "init", "trained").index(i)
                                 if isinstance(i, str) else i)


def parse(argv, kind=Config):
    old, config.Config = config.Config, kind
    try:
        return _parse(argv)
    finally:
        config.Config = old


def plan_devices(cfg):
    try:
        return _devices(dataclasses.replace(cfg, plan=cfg.plan_for))
    except ValueError as e:
        raise ValueError(str(e).replace("plan ", "plan_for ", 1)) from None


def memory_by_kind(state, compiled=None):
    def _n(x):
        n = x.dtype.itemsize
        for d in x.sharding.shard_shape(x.shape):
            n *= d
        return n

    on_a_device = lambda tree, where: sum(
        _n(x) for x in jax.tree.leaves(tree)
        if (x.sharding.memory_kind == "pinned_host") == (where == "host"))
    parts = {"parameters": on_a_device(state["params"], "device"),
             "moments": on_a_device(state["opt"], "device")}
    if host := on_a_device(state["opt"], "host"):
        parts["moments in host memory"] = host
    if compiled:
        now, stats = step.memory(compiled), compiled.memory_analysis()
        parts["temporaries"] = now["temporaries"]
        if stats.host_temp_size_in_bytes:
            parts["temporaries in host memory"] = stats.host_temp_size_in_bytes
        parts["total"] = now["total"]
    return parts


config.Config, config.parse = Config, parse
model.param_table = lambda cfg: {k: Row(row) for k, row in _table(cfg).items()}
train.plan_devices, train.TEXT = plan_devices, None
train.prepare = lambda cfg, task, devices: _setup(cfg, devices)
train.first_remedy = lambda cfg, mesh, memory, gib: _remedy(cfg, mesh, {"bytes": memory}, gib)
step.peaks, step.memory_by_kind = (lambda kind: _peaks(kind)[:2]), memory_by_kind
