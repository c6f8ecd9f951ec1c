# SPDX-License-Identifier: Apache-2.0
"""Until the merge: gives today's core the interfaces that tests/plan.py is written against.
Delete this file and the line of tests/plan.py that imports it.
"""
import dataclasses
import math
import time
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


def estimate(run):
    """What an update of `run` needs of a device: {"flop", "memory" (by kind), "fits"}, and
    "compiled" and "compile_s", or where the compiler runs out of memory "fault" in words.
    """
    cfg, mesh = run["cfg"], run["mesh"]
    state, lower, _ = step.lower_steps(*train.program_parts(run))
    flops, recomputed, formula = model.flops_per_token(cfg, cfg.seq_len)
    tokens = cfg.batch_size * cfg.seq_len / mesh.size
    cost = {"flop": {f"the model's: {formula}": flops * tokens, "remat's": recomputed * tokens},
            "memory": memory_by_kind(state), "fits": False}
    began = time.perf_counter()
    try:
        compiled = lower["train_step"]().compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return cost | {"fault": str(e).splitlines()[0]}
    memory = memory_by_kind(state, compiled)
    _, memory_gib = step.peaks(mesh.devices.flat[0].device_kind)
    return cost | {"memory": memory, "compiled": compiled, "compile_s": time.perf_counter() - began,
                   "fits": memory["total"] <= (memory_gib or math.inf) * 2**30}


def show_estimate(run, cost):
    """Print an estimate."""
    say, cfg, mesh = train.say, run["cfg"], run["mesh"]
    say(train.headline(run) + "; for each device:")
    for name, flop in cost["flop"].items():
        say(f"  {flop / 1e12:10,.4g} TFLOP  {name}")
    for name, n_bytes in cost["memory"].items():
        say(f"  {n_bytes / 2**30:10,.4g} GiB  {name}")
    say(cost["fault"] if "fault" in cost else f"compiled in {cost['compile_s']:.0f} s")
    _, memory_gib = step.peaks(mesh.devices.flat[0].device_kind)
    say("no memory size is known for this device" if not memory_gib
        else f"fits in {memory_gib} GiB" if cost["fits"]
        else f"does not fit in {memory_gib} GiB; first to change: "
        + _remedy(cfg, mesh, {"bytes": cost["memory"]}, memory_gib))


def cli(argv, kind=Config, main=train.main):
    """train.cli for a Config and a main of one's own."""
    old, train.main = train.main, main
    old_parse, config.parse = config.parse, lambda argv: parse(argv, kind)
    try:
        return _cli(argv)
    finally:
        train.main, config.parse = old, old_parse


config.Config, config.parse, _cli, train.cli = Config, parse, train.cli, cli
model.param_table = lambda cfg: {k: Row(row) for k, row in _table(cfg).items()}
train.plan_devices, train.TEXT = plan_devices, None
train.prepare = lambda cfg, task, devices: _setup(cfg, devices)
train.estimate, train.show_estimate = estimate, show_estimate
step.peaks, step.memory_by_kind = (lambda kind: _peaks(kind)[:2]), memory_by_kind
