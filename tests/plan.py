# SPDX-License-Identifier: Apache-2.0
"""What a training step would send and how long it should take, read off the compiled program.

    python tests/plan.py --config llama-70b --plan_for v5p:8x8x8 --fsdp 64 --tp 8
    python tests/plan.py --config llama-8b --plan_for h100:8x8 --batch_size 128  # 8 hosts of 8 GPUs
    python tests/plan.py --config debug --plan_sweep 6  # compare the six most promising meshes

Takes the flags of train.py. Compiles the step that would run and allocates nothing. The time of a
step follows from what it computes, reads, writes and sends, from the makers' rates, and from SHARE
and EXPOSED, which are fitted to published runs (tests/RESULTS.md); collectives are rings.
"""
import ast
import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train  # isort: skip  sets the allocator before JAX starts its threads
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding

import config
import step as steplib

# GB/s of one device: to and from its memory, sent to its neighbours, sent between slices (of GPUs:
# between hosts), to and from its host. Source: the makers' data sheets; a TPU's PCIe: Austin et al.
# 2025, How to Scale Your Model, chapter 2.
BANDWIDTHS = {"NVIDIA A100": (2039, 300, 25, 32), "NVIDIA H100": (3350, 450, 50, 64),
              "NVIDIA H200": (4800, 450, 50, 64), "NVIDIA B200": (7672, 900, 50, 64),
              "TPU v4": (1228, 150, 6.25, 15),
              "TPU v5 lite": (819, 100, 3.125, 15), "TPU v5": (2765, 300, 6.25, 15),
              "TPU v6": (1640, 224, 12.5, 15)}

# Bytes that each of n devices sends in a ring, for a result of `size` bytes.
SENT = {
    "all-gather": lambda n, size: size * (n - 1) / n,
    "reduce-scatter": lambda n, size: size * (n - 1),
    "all-reduce": lambda n, size: 2 * size * (n - 1) / n,
    "all-to-all": lambda n, size: size * (n - 1) / n,
    "collective-permute": lambda n, size: size,
}
# Fraction of the peak FLOP/s that large products of matrices reach; fraction of the time for
# memory, network and host that does not overlap with them.
SHARE = {"NVIDIA": 0.62, "TPU v6": 0.74, "TPU": 0.9}
EXPOSED = 0.5

CROSS_SLICE = " (slow network)"  # ends the axes of a collective that uses the slow network
NO_WRITE = "parameter tuple get-tuple-element bitcast constant while conditional".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(config.Config):
    plan_for: str = ""  # TPU slice or GPUs: v5p:8x8x8, h100:8x8 (8 hosts); empty: those at hand
    plan_sweep: config.NonNegInt = 0  # meshes to compile for and compare; 0: the one given


def main(cfg, hooks=(), task=train.TEXT):
    """Plan one mesh, or compare several; a dict with at least "exit_code".

    Raises ValueError for a mode other than training, and for whatever train.main would refuse.
    """
    if cfg.mode not in ("train", "plan"):
        config.raise_if_errors([f"mode {cfg.mode}: only training can be planned; leave out --mode"])
    run = train.setup_run(cfg, task, planned_devices(cfg) if cfg.plan_for else None)
    if cfg.plan_sweep:
        return {"exit_code": 0, "meshes": sweep(run, cfg.plan_sweep)}
    cost = measure(run)
    train.print_estimate(run, cost)
    for (kind, axes), (count, n_bytes) in cost["collectives"].items():
        train.print0(f"  {n_bytes / 2**30:10,.4g} GiB  sent by {count} {kind} over {axes}")
    if "seconds" in cost:
        words = ", ".join(f"{what} {s:.4g} s" for what, s in cost["seconds"].items())
        train.print0(f"at full rates: {words}\na step: about {cost['step_s']:.4g} s, MFU "
                  f"{cost['mfu']:.1%}")
    return cost | {"exit_code": int(not cost["fits"])}


def planned_devices(cfg):
    """The TPU slices or GPUs that cfg.plan_for names, which need not be here, to compile for.

    Raises ValueError without their compiler, or for names and shapes that there are not.
    """
    def refuse(words):
        config.raise_if_errors([config.field_error(cfg, "plan_for", words)])

    name, _, shape = cfg.plan_for.partition(":")
    package, extra = ("jax_cuda12_plugin", "cuda12") if name in GPUS else ("libtpu", "tpu")
    if not importlib.util.find_spec(package):
        refuse(f"its compiler is missing: pip install 'jax[{extra}]'")
    legal = f"TPU slices as v5p:8x8x8, v6e:16x16; hosts x GPUs of {', '.join(GPUS)} as h100:8x8"
    if name in GPUS and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
        refuse(f"must be hosts x GPUs; legal are {legal}")
    jax.config.update("jax_platforms", "cpu")
    try:
        return (gpus(name, *map(int, shape.split("x"))) if name in GPUS else
                slice_devices(cfg.plan_for, cfg.slices))
    except (RuntimeError, ValueError) as e:
        refuse(f"unknown ({str(e).splitlines()[0]}); legal are {legal}")


def slice_devices(name, n_slices):
    # Stop libtpu probing for hardware; allow planners to run side by side.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
                      TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_HOSTNAMES="localhost")
    # The two cores of a v4 chip are one device, as they are of a v5p chip unasked.
    cores = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    return topologies.get_topology_desc(name, "tpu", num_slices=n_slices, **cores).devices


# What the compiler asks of a GPU: its name, compute capability, multiprocessors, FP32 units and KiB
# of shared memory of each, MiB of L2 cache, GHz, TB/s of memory, GiB. Source: the maker's
# data sheets and XLA's own descriptions.
GPUS = {"a100": ("NVIDIA A100-SXM4-80GB", 8, 108, 64, 164, 40, 1.41, 2.039, 79.3),
        "h100": ("NVIDIA H100 80GB HBM3", 9, 132, 128, 228, 50, 1.98, 3.352, 79.1),
        "h200": ("NVIDIA H200", 9, 132, 128, 228, 50, 1.98, 4.8, 141),
        "b200": ("NVIDIA B200", 10, 148, 128, 228, 126.5, 1.965, 7.672, 178.4)}


def gpus(name, hosts, per_host):
    """hosts * per_host GPUs of GPUS[name], not autotuned: that would need one."""
    from jax._src import xla_bridge
    kind, capability, cores, units, shared, cache, ghz, bandwidth, memory = GPUS[name]
    numbers = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "threads_per_core_limit": 2048,
        "shared_memory_per_block": 48 * 2**10, "shared_memory_per_core": shared * 2**10,
        "shared_memory_per_block_optin": (shared - 1) * 2**10, "core_count": cores,
        "fpus_per_core": units, "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1, "thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64, "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16, "l2_cache_size": int(cache * 2**20),
        "clock_rate_ghz": ghz, "memory_bandwidth": int(bandwidth * 1e12),
        "device_memory_size": int(memory * 2**30)}
    target = (
        "gpu_device_info { " + " ".join(f"{k}: {v}" for k, v in numbers.items())
        + f" cuda_compute_capability {{ major: {capability} minor: 0 }} runtime_version: '12.9.0' "
        f"dnn_version: '9.10.0' }} platform_name: 'CUDA' dnn_version_info {{ major: 9 minor: 10 }} "
        f"device_description_str: '{kind}'")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # or the plug-in wants a driver
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    # Lowering asks for the platform of the backend at hand, which is a CPU.
    theirs = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda p: "cuda" if p == "gpu" else theirs(p)
    return topologies.get_topology_desc(
        "", "cuda", target_config=target, topology=f"{hosts}x1x{per_host}").devices


def measure(run):
    """train.estimate of `run` ("memory", "flop", "fits"; "error" where it cannot be compiled), and
    "collectives" {(kind, axes): [count, bytes a device sends]} from the most bytes to the least,
    "sent_bytes", "memory_traffic_bytes", "host_bytes", and the roofline where rates are known.
    """
    cost, mesh = train.estimate(run), run["mesh"]
    if "compiled" not in cost:
        return cost | {"collectives": {}, "sent_bytes": 0, "memory_traffic_bytes": 0,
                       "host_bytes": 0}
    groups, (name, _, shape) = run["cfg"].slices, run["cfg"].plan_for.partition(":")
    if name in GPUS:
        groups = int(shape.split("x")[0])
    sent, written, hosted = traffic(cost.pop("compiled").as_text(), mesh, groups)
    cost |= {"collectives": sent, "sent_bytes": sum(n_bytes for _, n_bytes in sent.values()),
             "memory_traffic_bytes": 2 * written,  # what is written is read about once
             "host_bytes": hosted}
    return cost | roofline(cost, mesh.devices.flat[0].device_kind)


def roofline(cost, kind):
    """{"seconds" (at full rates, by what bounds them), "step_s", "mfu"} on a device of this kind;
    {} where its rates are not known.
    """
    tflops, _ = steplib.peaks(kind)
    rates = next((row for name, row in BANDWIDTHS.items() if kind.startswith(name)), None)
    if not tflops or not rates:
        return {}
    memory_gbps, near_gbps, far_gbps, host_gbps = rates
    far = sum(row[1] for (_, axes), row in cost["collectives"].items()
              if axes.endswith(CROSS_SLICE))
    seconds = {"compute": sum(cost["flop"].values()) / tflops / 1e12,
               "memory": cost["memory_traffic_bytes"] / memory_gbps / 1e9,
               "network": (cost["sent_bytes"] - far) / near_gbps / 1e9}
    seconds |= {"slow network": far / far_gbps / 1e9} if far else {}
    seconds |= {"host": cost["host_bytes"] / host_gbps / 1e9} if cost["host_bytes"] else {}
    share = next(share for name, share in SHARE.items() if kind.startswith(name))
    step_s = seconds["compute"] / share + EXPOSED * (sum(seconds.values()) - seconds["compute"])
    model_flop = next(iter(cost["flop"].values()))
    return {"seconds": seconds, "step_s": step_s, "mfu": model_flop / step_s / tflops / 1e12}


# ---- comparing meshes

def sweep(run, n_meshes):
    """Print a line for each of the n_meshes that promise most, by the time of a step; the rows."""
    cfg, devices, axes = run["cfg"], list(run["mesh"].devices.flat), steplib.AXES
    _, memory_gib = steplib.peaks(devices[0].device_kind)
    candidates, rows = [], []
    for sizes in factorizations(len(devices), len(axes)):
        other = dataclasses.replace(cfg, **dict(zip(axes, sizes)))
        with contextlib.suppress(ValueError):  # this mesh and this model do not fit
            config.validate(other, len(devices), (), run["task"]["validate"])
            mesh, state_bytes, sent = predicted_traffic(other, run["table"], sizes)
            if not steplib.check_shapes(run["table"], mesh):
                too_large = state_bytes > (memory_gib or math.inf) * 2**30
                candidates.append((too_large, sum(sent.values()), state_bytes, sizes, other))
    train.print0(train.run_summary(run) + f"; legal meshes: {len(candidates)}")
    for *_, sizes, other in sorted(candidates, key=lambda c: c[:3])[:n_meshes]:
        cost = measure(train.setup_run(other, run["task"], devices))
        # Bytes where no rate is known.
        rows.append((not cost["fits"], cost.get("step_s", cost["sent_bytes"]), sizes, cost))
    rows.sort(key=lambda row: row[:2])
    mesh_words = "  ".join(["{:>4}"] * len(axes))
    train.print0(mesh_words.format(*axes)
              + "      GiB  sent GiB  step s")
    for too_large, _, sizes, cost in rows:
        total, sent = cost["memory"].get("total", math.nan), cost["sent_bytes"]
        times = f"  {cost['step_s']:.4g}" if "step_s" in cost else ""
        train.print0(f"{mesh_words.format(*sizes)}  {total / 2**30:7.4g}  {sent / 2**30:8.4g}"
                  + ("  does not fit" if too_large else times))
    return rows


def factorizations(n, k):
    """All tuples of k sizes whose product is n."""
    if k == 1:
        return [(n,)]
    return [(d, *rest) for d in range(1, n + 1) if n % d == 0
            for rest in factorizations(n // d, k - 1)]


def predicted_traffic(cfg, table, sizes):
    """(mesh of these sizes without devices, bytes of state on a device, {what for: bytes that a
    device sends in an update}), from shapes alone.

    "weights": gathered for each pass over each microbatch, and their gradients summed; "tp":
    activations summed; "sp", "ep": activations moved by all-to-alls.
    """
    mesh = jax.sharding.AbstractMesh(sizes, steplib.AXES)
    n, specs = mesh.shape, steplib.moment_specs(table, mesh)
    itemsize = 2 if "16" in cfg.dtype else 4
    # Forward, remat, backward, sum of gradients.
    passes = (3 + (cfg.remat in ("full", "offload"))) * cfg.grad_accum_steps
    weights, state_bytes = 0.0, 0.0
    for name, row in table.items():
        held, moments = (math.prod(NamedSharding(mesh, spec).shard_shape(row["shape"]))
                         for spec in (row["spec"], specs[name]))
        state_bytes += 4 * held + 8 * moments * row.get("trained", True)
        gathered = math.prod(n[a] for axes in row["spec"] if "fsdp" in (axes or ())
                             for a in (axes if isinstance(axes, tuple) else (axes,)))
        weights += passes * SENT["all-gather"](gathered, gathered * itemsize * held)
        weights += SENT["all-reduce"](n["dp"], itemsize * held)
    tokens = cfg.batch_size * cfg.seq_len / math.prod(n[a] for a in ("dp", "fsdp", "ep", "sp"))
    moved = 4 * cfg.n_layers * itemsize * tokens * cfg.d_model  # twice forward, twice backward
    heads = (cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim / cfg.d_model / n["tp"]
    slots = cfg.experts_per_token * (cfg.capacity_factor or 1) if cfg.n_experts else 0
    return mesh, state_bytes, {
        "weights": weights, "tp": SENT["all-reduce"](n["tp"], moved * (1 + (slots or 1)) / 2),
        "sp": SENT["all-to-all"](n["sp"], moved * heads),
        "ep": SENT["all-to-all"](n["ep"], moved * slots)}


# ---- reading compiled text (HLO)

def traffic(text, mesh, slices=1):
    """({(collective, axes): [count, bytes a device sends]} from the most bytes to the least, bytes
    that operations write to memory, bytes that go to the host's memory or come from there) of one
    run of a compiled program.

    axes: the mesh axes along which a group extends, joined by "+", and CROSS_SLICE where it spans
    slices. Both branches of a conditional are left out.
    """
    collectives, written, hosted = {}, 0, 0
    for op, result, line, times, fused in _operations(text):
        if found := _collective(op, result, line, mesh, slices):
            kind, axes, n_bytes = found
            row = collectives.setdefault((kind, axes), [0, 0.0])
            row[0] += times
            row[1] += times * n_bytes
        if "S(5)" in line and op.endswith("-start"):  # S(5): host memory; the smallest array moves
            hosted += times * min((n for n in jax.tree.leaves(result) if n > 8), default=0)
        in_place = re.search("dynamic.update.slice", line.partition("=")[0] + op)
        if not (fused or in_place or op in NO_WRITE or op.endswith(("-start", "-update"))):
            written += times * sum(jax.tree.leaves(result))
    return dict(sorted(collectives.items(), key=lambda row: -row[1][1])), written, hosted


def _operations(text):
    """(operation, result bytes, line, times it runs, whether a caller stands for its writes) of
    each line that runs.
    """
    bodies = {m[1]: m[2] for m in re.finditer(
        r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}(?:$|,)", text, re.M | re.S)}

    def walk(name, times, fused):
        for line in bodies.get(name, "").splitlines():
            if not (m := re.match(r"\s*(?:ROOT )?%?\S+ = (.*?) ([a-z][\w\-]*)\(", line)):
                continue
            op = m[2]
            yield op, _result_bytes(m[1]), line, times, fused
            if op in ("async-update", "async-done"):  # they name what async-start has called
                continue
            trips = _trip_count(line, bodies) if op == "while" else 1
            for called in re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", line):
                yield from walk(called, times * trips, fused or op != "while")

    return walk(re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)[1], 1, False)


def _result_bytes(text):
    """Bytes of an HLO result: a number for an array, a tuple for a tuple."""
    def n_bytes(array):
        dtype, dims = array.groups()
        bits = 8 if dtype == "pred" else int((re.findall(r"\d+", dtype) or [0])[0])  # token: 0
        return str(bits * math.prod(map(int, re.findall(r"\d+", dims))) // 8)

    plain = re.sub(r"\{[^{}]*\}|/\*.*?\*/|\s", "", text)  # no layouts, no comments
    sized = re.sub(r"(\w+)\[([^\]]*)\]", n_bytes, plain)
    return ast.literal_eval(sized.replace(")", ",)").replace("(,)", "()"))


def _collective(op, result, line, mesh, slices):
    """(kind, axes, bytes that a device sends) of an operation; None when it is no collective."""
    sizes, kind = list(mesh.shape.values()), op.removesuffix("-start")
    outer = int(sizes[0] == 1)  # the axis that is laid over slices
    # Between slices of TPUs a collective is a send through the host.
    if op == "send" and (through_host := re.search(r'megascale_transfer_type="(\w+)"', line)):
        kind = through_host[1].lower().replace("_", "-")
        n_bytes = SENT[kind](slices, jax.tree.leaves(result)[0])
        return kind, list(mesh.shape)[outer] + CROSS_SLICE, n_bytes
    if kind not in SENT:
        return None
    # (operands, results, contexts ...), but an all-reduce-start has its results alone.
    pair = op != kind and isinstance(result, tuple)
    if pair and (kind != "all-reduce" or isinstance(result[0], tuple)):
        result = result[1]
    group = _first_group(line, math.prod(sizes))
    places = np.array(np.unravel_index(group, sizes)).T
    axes = "+".join(a for a, at in zip(mesh.shape, places.T) if len(set(at)) > 1)
    n_bytes = SENT[kind](len(group), sum(jax.tree.leaves(result)))
    crossed = {i * slices // math.prod(sizes) for i in group}  # the slices that it spans
    if len(crossed) > 1:
        axes += CROSS_SLICE
        n_bytes *= len(crossed) / len(group)  # its devices within a slice share what leaves it
    return kind, axes, n_bytes


def _first_group(line, n):
    """Device numbers of one group of a collective. HLO writes groups as pairs, as a list, as an
    iota reshaped and transposed, or as axes of a mesh over such an iota.
    """
    def numbers(words):
        return [int(i) for i in re.findall(r"\d+", words or "")]

    def iota(dims, order):
        ids = np.arange(math.prod(numbers(dims))).reshape(numbers(dims))
        return ids.transpose(numbers(order) or range(ids.ndim))

    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        ends = np.reshape(numbers(pairs[1]), (-1, 2)).tolist()
        return next((pair for pair in ends if pair[0] != pair[1]), ends[0])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return numbers(listed[1])
    if reshaped := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\])(T\([\d,]+\))?", line):
        return iota(reshaped[2], reshaped[3]).reshape(numbers(reshaped[1]))[0].tolist()
    if named := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\]"
                          r"(?:T\(([\d,]+)\))?\))? ?\{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        at = {name: [0] for name in sizes}  # places of the group along each axis
        for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", named[4]):
            size = int(size or sizes[name])
            stride = sizes[name] // (int(before or 1) * size)
            at[name] = [i + j * stride for i in at[name] for j in range(size)]
        ids = iota(named[2] or str(math.prod(sizes.values())), named[3])
        return ids.reshape(list(sizes.values()))[np.ix_(*at.values())].ravel().tolist()
    assert "replica_groups={}" in line or "replica_groups" not in line, line
    return list(range(n))


def _trip_count(line, bodies):
    """How often a while loop runs: what XLA knows, or the number its condition compares with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = bodies[re.search(r"condition=%?([\w.\-]+)", line)[1]]
    return max(map(int, re.findall(r"[su]32\[\]\S* constant\((\d+)\)", condition)), default=1)


if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], kind=PlanConfig, main=main))
