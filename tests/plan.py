# SPDX-License-Identifier: Apache-2.0
"""Predict what a training step sends and how long it takes, from the compiled program.

    python tests/plan.py --config llama-70b --plan_for v5p:8x8x8 --fsdp 64 --tp 8
    python tests/plan.py --config llama-8b --plan_for h100:8x8 --batch_size 128  # 8 hosts of 8 GPUs

Takes the flags of train.py. Compiles the step that would run and allocates nothing. The time of a
step follows from what it computes, reads, writes and sends, from the vendors' rates, and from
step.MATMUL_FRAC and EXPOSED, which are fitted to published runs (tests/RESULTS.md). Collectives
count as rings. Without the compiler of GPUs, the plan is an estimate from shapes.
"""
import ast
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

from train import config, steplib

# GB/s of one device: "memory" to and from its memory, "near" to its neighbours, "far" between
# slices (for GPUs: between hosts), "host" to and from its host. The first prefix of the device's
# kind applies. Source: the vendors' data sheets; for the PCIe of TPUs Austin et al. 2025, How to
# Scale Your Model, chapter 2.
BANDWIDTHS = {
    "NVIDIA A100": {"memory": 2039, "near": 300, "far": 25, "host": 32},
    "NVIDIA H100": {"memory": 3350, "near": 450, "far": 50, "host": 64},
    "NVIDIA H200": {"memory": 4800, "near": 450, "far": 50, "host": 64},
    "NVIDIA GeForce RTX 4080": {"memory": 717, "near": 32, "far": 1.25, "host": 32},
    "NVIDIA GeForce RTX 4090": {"memory": 1008, "near": 32, "far": 1.25, "host": 32},
    "NVIDIA B200": {"memory": 7672, "near": 900, "far": 50, "host": 64},
    "TPU v4": {"memory": 1228, "near": 150, "far": 6.25, "host": 15},
    "TPU v5 lite": {"memory": 819, "near": 100, "far": 3.125, "host": 15},
    "TPU v5": {"memory": 2765, "near": 300, "far": 6.25, "host": 15},
    "TPU v6": {"memory": 1640, "near": 224, "far": 12.5, "host": 15},
}

# Bytes that each of n devices sends in a ring, for a result of `size` bytes.
SENT = {
    "all-gather": lambda n, size: size * (n - 1) / n,
    "reduce-scatter": lambda n, size: size * (n - 1),
    "all-reduce": lambda n, size: 2 * size * (n - 1) / n,
    "all-to-all": lambda n, size: size * (n - 1) / n,
    "collective-permute": lambda n, size: size,
}
# Fraction of the time for memory, network and host that does not overlap with matmuls.
EXPOSED = 0.5
MISSING_COMPILER = (
    "estimated from shapes, without the buffers of collectives: pip install 'jax[cuda12]<0.13' "
    "adds the memory of the compiled program, what it sends, and the expected time of a step")
CROSS_SLICE = " (slow network)"  # suffix of the axes of a collective that uses the slow network
# Operations that write nothing to memory.
NO_WRITE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while",
            "conditional")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(config.Config):
    # TPU slice or GPUs, as v5p:8x8x8 or h100:8x8 (8 hosts of 8); empty: the available devices
    plan_for: str = ""


def main(cfg, hooks=(), task=train.TEXT):
    """Print the plan of a step; return what `measure` returns, and "exit_code"."""
    if cfg.mode not in ("train", "plan"):
        config.raise_if_errors([f"mode {cfg.mode}: only training can be planned; remove --mode"])
    cfg = dataclasses.replace(cfg, mode="plan")
    run = train.setup_run(cfg, task, planned_devices(cfg) if cfg.plan_for else None)
    train.print_outlook(run)
    cost = measure(run)
    train.print_estimate(run, cost)
    for (kind, axes), (count, n_bytes) in cost["collectives"].items():
        train.print0(f"  {n_bytes / 2**30:10,.4g} GiB  sent by {count} {kind} over {axes}")
    tokens = run.cfg.batch_size * run.cfg.seq_len
    if "step_s" in cost:
        seconds = ", ".join(f"{name} {s:.4g} s" for name, s in cost["seconds"].items())
        rate = tokens / cost["step_s"]
        train.print0(f"at full rates: {seconds}\na step: about {cost['step_s']:.4g} s, "
                     f"{rate:,.0f} tokens/s, MFU {cost['mfu']:.1%}")
        train.print0(train.time_of_run(run, cost["step_s"]) + "; such plans were up to 31% off")
    if "products_s" in cost:
        train.print0(f"products at the peak rate: {cost['products_s']:.4g} s of a step, so at most "
                     f"{tokens / cost['products_s']:,.0f} tokens/s")
    if cfg.plan_for and run.cfg.dtype == "float32":
        train.print0("no time in float32: the known rates are those of bfloat16, which "
                     "--dtype bfloat16 plans for")
    if isinstance(run.mesh.devices.flat[0], AbsentGpu):
        train.print0(MISSING_COMPILER)
    return cost | {"exit_code": int(not cost["fits"])}


def planned_devices(cfg):
    """The TPU slices or GPUs that cfg.plan_for names; AbsentGpus without the compiler of GPUs."""
    name, _, shape = cfg.plan_for.partition(":")
    is_gpu = name in GPUS
    compiler = importlib.util.find_spec("jax_cuda12_plugin" if is_gpu else "libtpu")
    error = ""
    if name not in (*GPUS, *TPUS):
        error = f"unknown device {name!r} ({config.did_you_mean(name, (*GPUS, *TPUS))})"
    elif is_gpu and not re.fullmatch(r"([1-9]\d*x)?[1-9]\d*", shape):
        error = f"write {name}:8 for one host of 8 GPUs, {name}:4x8 for 4 such hosts"
    elif is_gpu and hosts_and_gpus(cfg.plan_for)[1] > MAX_GPUS:
        error = f"a host has at most {MAX_GPUS} GPUs; write {name}:4x8 for 4 hosts of 8"
    elif not is_gpu and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        error = f"write the sides of a slice, as in {name}:4x4"
    elif not is_gpu and not compiler:
        error = "its compiler is missing: pip install 'jax[tpu]<0.13'"
    elif is_gpu and compiler and cfg.offload_optimizer:
        error = ("with --offload_optimizer, absent GPUs cannot be planned: JAX does not know their "
                 "host's memory; plan without it, or where such a GPU is")
    if not error:
        jax.config.update("jax_platforms", "cpu")
        make = slice_devices if not is_gpu else gpus if compiler else absent_gpus
        try:
            return make(cfg)
        except (RuntimeError, ValueError) as e:
            error = f"{name} has no such shape ({str(e).splitlines()[0]})"
    config.raise_if_errors([config.field_error(cfg, "plan_for", error)])


def hosts_and_gpus(plan_for):
    """(hosts, GPUs of each): h100:8x4 has 8 hosts of 4, h100:8 has one host of 8."""
    *n_hosts, per_host = plan_for.partition(":")[2].split("x")
    return int(n_hosts[0]) if n_hosts else 1, int(per_host)


@dataclasses.dataclass(frozen=True)
class AbsentGpu:
    """A GPU for which nothing can be compiled, with the attributes of a JAX device."""
    id: int
    process_index: int
    device_kind: str
    compute_capability: str
    platform: str = "gpu"


def absent_gpus(cfg):
    gpu = GPUS[cfg.plan_for.partition(":")[0]]
    hosts, per_host = hosts_and_gpus(cfg.plan_for)
    capability = "{}.{}".format(*gpu["capability"])
    return [AbsentGpu(i, i // per_host, gpu["kind"], capability) for i in range(hosts * per_host)]


def slice_devices(cfg):
    # Keep libtpu from probing for hardware, and allow several planners at a time.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
                      TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_HOSTNAMES="localhost")
    options = {}
    if cfg.plan_for.startswith("v4"):
        # One device for the two cores of a chip, which is the default for v5p.
        options["chip_config_name"] = "megacore"
    return topologies.get_topology_desc(
        cfg.plan_for, "tpu", num_slices=cfg.slices, **options).devices


TPUS = ("v2", "v3", "v4", "v5e", "v5p", "v6e")
MAX_GPUS = 16  # of one host
# What the compiler needs to know of a GPU. Source: the vendor's data sheets and XLA's descriptions.
GPUS = {
    "a100": {"kind": "NVIDIA A100-SXM4-80GB", "capability": (8, 0), "multiprocessors": 108,
             "fp32_units": 64, "shared_kib": 164, "l2_mib": 40, "clock_ghz": 1.41,
             "memory_gib": 79.3},
    "h100": {"kind": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "multiprocessors": 132,
             "fp32_units": 128, "shared_kib": 228, "l2_mib": 50, "clock_ghz": 1.98,
             "memory_gib": 79.1},
    "h200": {"kind": "NVIDIA H200", "capability": (9, 0), "multiprocessors": 132,
             "fp32_units": 128, "shared_kib": 228, "l2_mib": 50, "clock_ghz": 1.98,
             "memory_gib": 141},
    "b200": {"kind": "NVIDIA B200", "capability": (10, 0), "multiprocessors": 148,
             "fp32_units": 128, "shared_kib": 228, "l2_mib": 126.5, "clock_ghz": 1.965,
             "memory_gib": 178.4},
    "rtx4080": {"kind": "NVIDIA GeForce RTX 4080", "capability": (8, 9), "multiprocessors": 76,
                "fp32_units": 128, "shared_kib": 100, "l2_mib": 64, "clock_ghz": 2.505,
                "memory_gib": 16},
    "rtx4090": {"kind": "NVIDIA GeForce RTX 4090", "capability": (8, 9), "multiprocessors": 128,
                "fp32_units": 128, "shared_kib": 100, "l2_mib": 72, "clock_ghz": 2.52,
                "memory_gib": 24},
}


def gpus(cfg):
    """The GPUs that cfg.plan_for names. Autotuning is off, as it would run on a GPU."""
    from jax._src import xla_bridge
    gpu = GPUS[cfg.plan_for.partition(":")[0]]
    numbers = dict(
        threads_per_block_limit=1024, threads_per_warp=32, threads_per_core_limit=2048,
        shared_memory_per_block=48 * 2**10, shared_memory_per_core=gpu["shared_kib"] * 2**10,
        shared_memory_per_block_optin=(gpu["shared_kib"] - 1) * 2**10,
        core_count=gpu["multiprocessors"], fpus_per_core=gpu["fp32_units"],
        block_dim_limit_x=2**31 - 1, block_dim_limit_y=2**16 - 1, block_dim_limit_z=2**16 - 1,
        thread_dim_limit_x=1024, thread_dim_limit_y=1024, thread_dim_limit_z=64,
        registers_per_core_limit=2**16, registers_per_block_limit=2**16,
        l2_cache_size=int(gpu["l2_mib"] * 2**20), clock_rate_ghz=gpu["clock_ghz"],
        memory_bandwidth=first_prefix(BANDWIDTHS, gpu["kind"])["memory"] * 10**9,
        device_memory_size=int(gpu["memory_gib"] * 2**30))
    major, minor = gpu["capability"]
    target = (
        "gpu_device_info { " + " ".join(f"{k}: {v}" for k, v in numbers.items())
        + f" cuda_compute_capability {{ major: {major} minor: {minor} }} "
        "runtime_version: '12.9.0' dnn_version: '9.10.0' } platform_name: 'CUDA' "
        "dnn_version_info { major: 9 minor: 10 } "
        f"device_description_str: '{gpu['kind']}'")
    # Such programs can be written to the cache, but not read.
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # or the plug-in requires a driver
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    # Lowering asks for the platform of the backend of this machine, which is a CPU.
    canonicalize = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda p: "cuda" if p == "gpu" else canonicalize(p)
    hosts, per_host = hosts_and_gpus(cfg.plan_for)
    return topologies.get_topology_desc(
        "", "cuda", target_config=target, topology=f"{hosts}x1x{per_host}").devices


def measure(run):
    """The result of train.estimate, `traffic` and `roofline` of the compiled step."""
    mesh = run.mesh
    if isinstance(mesh.devices.flat[0], AbsentGpu):
        return estimate_from_shapes(run)
    cost = train.estimate(run)
    compiled_step = cost.get("programs", {}).get("a step")
    if compiled_step is None:  # it does not fit, or cannot be compiled
        return cost | {"collectives": {}, "sent_bytes": 0}
    n_slices = run.cfg.slices
    plan_for = run.cfg.plan_for
    if plan_for.partition(":")[0] in GPUS:  # the slow network is between hosts
        n_slices, _ = hosts_and_gpus(plan_for)
    cost |= traffic(compiled_step.as_text(), mesh, n_slices)
    if run.cfg.dtype == "float32":  # the rates are those of bfloat16
        return cost
    return cost | roofline(cost, mesh.devices.flat[0].device_kind)


def estimate_from_shapes(run):
    """Estimate without a compiler what `measure` returns; of the time only "products_s"."""
    cfg, mesh, task = run.cfg, run.mesh, run.task
    memory = train.memory_from_shapes(run)
    cost = {"flop": train.step_flop(run), "collectives": {}, "sent_bytes": 0}
    limit = steplib.memory_limit(mesh)
    if cfg.dtype != "float32":  # the peak is that of bfloat16
        tflops, _ = steplib.peaks(mesh.devices.flat[0].device_kind)
        cost["products_s"] = sum(cost["flop"].values()) / tflops / 1e12

    def peak_with(changes):
        changed = train.changed_run(run, cfg=dataclasses.replace(cfg, **changes))
        return train.memory_from_shapes(changed)["total"]

    cost |= {"memory": memory, "peaks": {"a step": memory["total"]}}
    cost["fits"] = memory["total"] <= limit
    if not cost["fits"]:
        flags = steplib.memory_flags(cfg, mesh, task["memory_flags"](mesh.shape["sp"], cfg))
        advice = steplib.as_advice(*steplib.suggest_flags(flags, peak_with, limit), limit)
        cost["error"] = f"does not fit in {limit / 2**30:.4g} GiB; this may: {advice}"
    return cost


def roofline(cost, kind):
    """{"seconds": {resource: seconds at its full rate}, "step_s", "mfu"}; {} without rates."""
    tflops, _ = steplib.peaks(kind)
    gbps = first_prefix(BANDWIDTHS, kind)
    if not tflops or not gbps:
        return {}
    far = sum(n_bytes for (_, axes), (_, n_bytes) in cost["collectives"].items()
              if axes.endswith(CROSS_SLICE))
    seconds = {"compute": sum(cost["flop"].values()) / tflops / 1e12,
               "memory": cost["memory_traffic_bytes"] / gbps["memory"] / 1e9,
               "network": (cost["sent_bytes"] - far) / gbps["near"] / 1e9}
    if far:
        seconds["slow network"] = far / gbps["far"] / 1e9
    if cost["host_bytes"]:
        seconds["host"] = cost["host_bytes"] / gbps["host"] / 1e9
    exposed_s = sum(seconds.values()) - seconds["compute"]
    step_s = seconds["compute"] / steplib.matmul_frac(kind) + EXPOSED * exposed_s
    model_flop = next(iter(cost["flop"].values()))
    return {"seconds": seconds, "step_s": step_s, "mfu": model_flop / step_s / tflops / 1e12}


def first_prefix(table, kind):
    """The value of the first key that `kind` starts with, or None."""
    for prefix, value in table.items():
        if kind.startswith(prefix):
            return value
    return None


# ---- reading compiled text (HLO)

def traffic(text, mesh, slices=1):
    """Count what a compiled program sends, reads and writes, without branches of conditionals.

    "collectives": {(kind, axes joined by "+", and CROSS_SLICE if slices are crossed): [count, bytes
    that a device sends]}, most bytes first. "host_bytes": to or from the host's memory.
    """
    collectives = {}
    written = 0
    hosted = 0
    slice_of = slice_numbers(mesh, slices)
    for op, result, line, times, fused in _operations(text):
        found = _collective(op, result, line, mesh, slice_of)
        if found:
            kind, axes, n_bytes = found
            row = collectives.setdefault((kind, axes), [0, 0.0])
            row[0] += times
            row[1] += times * n_bytes
        if "S(5)" in line and op.endswith("-start"):  # S(5): host memory; the smallest array moves
            hosted += times * min((n for n in jax.tree.leaves(result) if n > 8), default=0)
        in_place = re.search("dynamic.update.slice", line.partition("=")[0] + op)
        if not (fused or in_place or op in NO_WRITE or op.endswith(("-start", "-update"))):
            written += times * sum(jax.tree.leaves(result))
    return {
        "collectives": dict(sorted(collectives.items(), key=lambda row: -row[1][1])),
        "sent_bytes": sum(n_bytes for _, n_bytes in collectives.values()),
        "memory_traffic_bytes": 2 * written,  # each value is read about once
        "host_bytes": hosted,
    }


def slice_numbers(mesh, n_slices):
    """The number of each device's slice (for GPUs: of its host), in the form of the mesh."""
    devices = sorted(mesh.devices.flat,
                     key=lambda device: (getattr(device, "slice_index", None) or 0, device.id))
    number = {device.id: i * n_slices // len(devices) for i, device in enumerate(devices)}
    return np.vectorize(lambda device: number[device.id])(mesh.devices)


def _operations(text):
    """Yield (operation, result bytes, line, times it runs, whether it is fused) for each line that
    runs. The operation that calls a fused one counts its writes.
    """
    # {name of a computation: its text}
    bodies = {body[1]: body[2] for body in re.finditer(
        r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}(?:$|,)", text, re.M | re.S)}

    def walk(name, times, fused):
        for line in bodies.get(name, "").splitlines():
            match = re.match(r"\s*(?:ROOT )?%?\S+ = (.*?) ([a-z][\w\-]*)\(", line)
            if not match:
                continue
            result, op = match.groups()
            yield op, _result_bytes(result), line, times, fused
            if op in ("async-update", "async-done"):  # they repeat the callee of async-start
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


def _collective(op, result, line, mesh, slice_of):
    """(kind, axes, bytes that a device sends) of a collective; None for other operations."""
    sizes = list(mesh.shape.values())
    kind = op.removesuffix("-start")
    # Between slices of TPUs a collective is a send through the host. Its line does not say along
    # which axes: these are all that cross slices.
    through_host = re.search(r'megascale_transfer_type="(\w+)"', line)
    if op == "send" and through_host:
        kind = through_host[1].lower().replace("_", "-")
        crossing = [name for i, name in enumerate(mesh.shape) if np.diff(slice_of, axis=i).any()]
        n_bytes = SENT[kind](len(set(slice_of.flat)), jax.tree.leaves(result)[0])
        return kind, "+".join(crossing) + CROSS_SLICE, n_bytes
    if kind not in SENT:
        return None
    # A pair is (operands, results, contexts ...), but an all-reduce-start has only its results.
    pair = op != kind and isinstance(result, tuple)
    if pair and (kind != "all-reduce" or isinstance(result[0], tuple)):
        result = result[1]
    group = _first_group(line, math.prod(sizes))
    coordinates = np.unravel_index(group, sizes)  # for each axis, those of the group's devices
    axes = "+".join(axis for axis, at in zip(mesh.shape, coordinates) if len(set(at)) > 1)
    n_bytes = SENT[kind](len(group), sum(jax.tree.leaves(result)))
    crossed = {int(slice_of.flat[i]) for i in group}  # slices that the group spans
    if len(crossed) > 1:
        axes += CROSS_SLICE
        n_bytes *= len(crossed) / len(group)  # the devices of a slice divide what leaves it
    return kind, axes, n_bytes


def _first_group(line, n):
    """Device numbers of one group of a collective, in any notation of HLO."""
    def numbers(text):
        return [int(i) for i in re.findall(r"\d+", text or "")]

    def iota(dims, order):
        ids = np.arange(math.prod(numbers(dims))).reshape(numbers(dims))
        return ids.transpose(numbers(order) or range(ids.ndim))

    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    if pairs:
        ends = np.reshape(numbers(pairs[1]), (-1, 2)).tolist()
        return next((pair for pair in ends if pair[0] != pair[1]), ends[0])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return numbers(listed[1])
    reshaped = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\])(T\([\d,]+\))?", line)
    if reshaped:
        return iota(reshaped[2], reshaped[3]).reshape(numbers(reshaped[1]))[0].tolist()
    named = re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\]"
                      r"(?:T\(([\d,]+)\))?\))? ?\{(.*?)\}", line)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        at = {name: [0] for name in sizes}  # coordinates of the group along each axis
        for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", named[4]):
            size = int(size or sizes[name])
            stride = sizes[name] // (int(before or 1) * size)
            at[name] = [i + j * stride for i in at[name] for j in range(size)]
        ids = iota(named[2] or str(math.prod(sizes.values())), named[3])
        return ids.reshape(list(sizes.values()))[np.ix_(*at.values())].ravel().tolist()
    assert "replica_groups={}" in line or "replica_groups" not in line, line
    return list(range(n))


def _trip_count(line, bodies):
    """Number of iterations of a while loop, from XLA, or from the constant in its condition."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known[1])
    condition = bodies[re.search(r"condition=%?([\w.\-]+)", line)[1]]
    return max(map(int, re.findall(r"[su]32\[\]\S* constant\((\d+)\)", condition)), default=1)


if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], kind=PlanConfig, main=main))
