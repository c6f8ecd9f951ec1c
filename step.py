# SPDX-License-Identifier: Apache-2.0
"""What is compiled, and the mesh it is compiled for.

Owns the update (gradient, accumulation, precision, clipping, optimizer, the gate against non-finite
numbers), its schedules and its shardings. Knows no model: loss_fn, init_fn and the parameter table
come in. `cfg`: any object with the fields that stand under "optimizer" and "mesh" in config.py, and
dtype steps micro_batches watch log_every. Invariant: one call of `train_step` is one step;
everything is keyed on state["step"].
"""
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial, update_wrapper
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from optax import contrib

AXES = ("dp", "fsdp", "ep", "tp", "sp")
BATCH = P(("dp", "fsdp", "ep"), "sp")  # how [B, T] arrays of a batch are split
FP16_SCALE, FP16_PATIENCE = 2.0**15, 2000  # first loss scale; finite updates before it doubles


def make_mesh(cfg, devices=None):
    """The mesh of all devices over AXES; a size of -1 takes what the others leave. Of cfg.slices
    groups with a slow network between them, each holds a part of dp, or of fsdp where dp is 1.

    Raises ValueError when the sizes do not use every device, or slices is not what the devices say.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(cfg, a) for a in AXES]
    fixed = prod(n for n in sizes if n > 0)
    sizes = [len(devices) // fixed if n == -1 else n for n in sizes]
    if prod(sizes) != len(devices):
        mesh = dict(zip(AXES, sizes))
        raise ValueError(f"mesh {mesh} uses {prod(sizes)} of {len(devices)} devices")
    slice_of = lambda d: getattr(d, "slice_index", None) or 0
    n_slices = len(set(map(slice_of, devices)))
    if devices[0].platform == "tpu" and cfg.slices != n_slices:
        raise ValueError(f"slices {cfg.slices}: the devices are of {n_slices}; "
                         f"set --slices {n_slices}")
    outer = int(sizes[0] == 1)  # the place in AXES of what goes over the slow network
    inner = [n // cfg.slices if i == outer else n for i, n in enumerate(sizes)]
    groups = np.split(np.array(sorted(devices, key=slice_of)), cfg.slices)
    # Not jax.make_mesh: it refuses an axis of 8 on a slice whose every side is 16 long.
    parts = [mesh_utils.create_device_mesh(inner, list(group), allow_split_physical_axes=True)
             for group in groups]
    return Mesh(np.concatenate(parts, axis=outer), AXES,
                axis_types=(AxisType.Auto,) * len(AXES))


# The share of the peak rate at progress p in [0, 1], `done` updates after a warm-up of `warm`
# updates.
SCHEDULES = {
    "constant": lambda cfg, p, done, warm: 1.0,
    "linear": lambda cfg, p, done, warm: 1 - p,
    "cosine": lambda cfg, p, done, warm: 0.5 * (1 + jnp.cos(jnp.pi * p)),
    "polynomial": lambda cfg, p, done, warm: (1 - p) ** cfg.poly_power,
    "inverse_sqrt": lambda cfg, p, done, warm: jax.lax.rsqrt(1 + done / max(warm, 1)),
    "wsd": lambda cfg, p, done, warm: jnp.clip(
        (cfg.steps - warm - done) / (cfg.decay_frac * cfg.steps), 0, 1),
}


def lr_at(step, cfg):
    """The learning rate of the update from `step` to `step + 1`: linear warm-up, then cfg.schedule
    down to min_lr_frac.

    Warm-up ends at lr exactly; the horizon is cfg.steps updates.
    """
    warm = round(cfg.warmup_steps * (cfg.steps if cfg.warmup_steps < 1 else 1))
    step = jnp.asarray(step, jnp.float32)
    done = jnp.maximum(step - warm, 0)
    progress = jnp.clip(done / max(cfg.steps - warm, 1), 0, 1)
    share = SCHEDULES[cfg.schedule](cfg, progress, done, warm)
    after = cfg.min_lr_frac + (1 - cfg.min_lr_frac) * share
    return cfg.lr * jnp.where(step < warm, (step + 1) / max(warm, 1), after)


def _muon(cfg, stacked):
    """Matrices stacked over layers by Muon, at Adam's size so that they share a rate, the rest by
    Adam.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; size, Liu et al. 2025,
    arXiv:2502.16982, equation 4.
    """
    dims = lambda tree: jax.tree.map(lambda _: contrib.MuonDimensionNumbers(-2, -1), tree)
    size = lambda u, _: jax.tree.map(lambda x: 0.2 * max(x.shape[-2:]) ** 0.5 * x, u)
    muon = optax.chain(
        contrib.scale_by_muon(
            beta=cfg.b1, mu_dtype=cfg.moment_dtype, weight_dimension_numbers=dims),
        optax.stateless(size))
    kinds = {name: "muon" if is_stacked else "adam" for name, is_stacked in stacked.items()}
    return optax.partition({"muon": muon, "adam": OPTIMIZERS["adamw"](cfg, stacked)}, kinds)


# Each gives a descent direction, to which decay is added; train_step multiplies it by -lr_at(step).
# stacked: {name: whether it is a matrix for each layer}.
OPTIMIZERS = {
    "adamw": lambda cfg, stacked: optax.scale_by_adam(
        cfg.b1, cfg.b2, cfg.eps, mu_dtype=cfg.moment_dtype),
    "adafactor": lambda cfg, stacked: optax.chain(  # without a first moment
        optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
    "lion": lambda cfg, stacked: optax.scale_by_lion(cfg.b1, cfg.b2, mu_dtype=cfg.moment_dtype),
    "muon": _muon,
    "rmsprop": lambda cfg, stacked: optax.scale_by_rms(cfg.b2, cfg.eps),
    "sgd": lambda cfg, stacked: optax.trace(cfg.b1, accumulator_dtype=cfg.moment_dtype),
}


def make_optimizer(cfg, table):
    """Of the trained parameters in table: {name: (shape, spec, init, trained)}. Only what starts
    from a ("normal", std) init is decayed.
    """
    table = {name: row for name, row in table.items() if row[3]}
    decays = {name: init[0] == "normal" for name, (_, _, init, _) in table.items()}
    stacked = {name: decays[name] and len(row[0]) > 2 for name, row in table.items()}
    return optax.chain(OPTIMIZERS[cfg.optimizer](cfg, stacked),
                       optax.add_decayed_weights(cfg.weight_decay, decays))


def _f32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _trained(params, table):
    return {name: x for name, x in params.items() if table[name][3]}


def init_state(key, cfg, init_fn, optimizer, table, params=()):
    """{"step", "params", "opt", "skipped"}, and "scale" for float16. Moments are float32, of
    trained parameters alone. params: those that do not start from init_fn.
    """
    params = init_fn(key, cfg) | dict(params)
    zero = jnp.zeros((), jnp.int32)
    opt = optimizer.init(_f32(_trained(params, table)))
    state = {"step": zero, "params": params, "opt": opt, "skipped": zero}
    if cfg.dtype == "float16":
        state["scale"] = {"value": jnp.float32(FP16_SCALE), "good": zero}
    return state


def moment_specs(table, mesh):
    """{name: spec} of moments and gradients: a parameter's own, but dp, over which parameters are
    whole, splits further what fsdp splits, where it can.

    So dp is ZeRO-2, fsdp ZeRO-3. Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
    """
    def wider(n, axes):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        wide = (*axes, "dp") if "fsdp" in axes else axes
        return wide if n % prod(mesh.shape[a] for a in wide) == 0 else axes

    return {name: P(*map(wider, shape, spec)) for name, (shape, spec, *_) in table.items()}


def state_shardings(state, table, mesh, moments_on="device"):
    """Shardings of a state: parameters by their spec, each moment under a parameter's name and of
    its shape by moment_specs, the rest on every device.
    """
    whole, specs = NamedSharding(mesh, P()), moment_specs(table, mesh)
    kind = {"memory_kind": "pinned_host"} if moments_on == "host" else {}

    def like_parameter(path, moment):
        names = [key.key for key in path if getattr(key, "key", None) in specs]
        same = names and moment.shape == state["params"][names[-1]].shape
        return NamedSharding(mesh, specs[names[-1]], **kind) if same else whole

    shardings = jax.tree.map(lambda _: whole, {k: v for k, v in state.items() if k != "params"})
    params = {name: NamedSharding(mesh, spec) for name, (_, spec, *_) in table.items()}
    opt = jax.tree_util.tree_map_with_path(like_parameter, state["opt"])
    return shardings | {"params": params, "opt": opt}


def _value_and_grad(params, batch, cfg, loss_fn, factor, table):
    """Sums, counts and the float32 gradient, of trained parameters, of factor x the summed
    objective, over cfg.micro_batches.
    """
    mesh = jax.sharding.get_abstract_mesh()
    specs = {} if mesh.empty else _trained(moment_specs(table, mesh), table)

    def one(micro):
        def objective(trained):
            sums, counts = loss_fn(params | trained, micro, cfg)
            return sums["objective"] * factor, (sums, counts)

        (_, aux), grads = jax.value_and_grad(objective, has_aux=True)(_trained(params, table))
        if specs:  # each device sums up its own part only
            grads = jax.lax.with_sharding_constraint(grads, specs)
        return *aux, _f32(grads)

    A = cfg.micro_batches
    if A == 1:
        return one(batch)
    # Row b goes to microbatch b mod A: every device keeps its own rows, and nothing moves.
    micros = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, A, *x.shape[1:]), 1, 0), batch)
    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], micros))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    add = lambda total, micro: (jax.tree.map(jnp.add, total, one(micro)), None)
    return jax.lax.scan(add, zeros, micros)[0]


def _next_scale(scale, finite):
    """Dynamic loss scale: halved on overflow, doubled after FP16_PATIENCE finite updates in a row.
    """
    good = jnp.where(finite, scale["good"] + 1, 0)
    grown = jnp.where(good == FP16_PATIENCE, scale["value"] * 2, scale["value"])
    value = jnp.where(finite, grown, jnp.maximum(scale["value"] / 2, 2.0**-14))
    return {"value": value, "good": jnp.where(good == FP16_PATIENCE, 0, good)}


def _histogram(x, grad):
    """Of a parameter: 64 counts between its least and its largest value, both of these, mean,
    standard deviation, and the norm of its gradient.
    """
    x = x.astype(jnp.float32)
    low, high = x.min(), x.max()
    share = (x - low) / jnp.maximum(high - low, 1e-30)
    bins = jnp.minimum((64 * share).astype(jnp.int32), 63)
    counts = jax.lax.map(lambda i: (bins == i).sum(dtype=jnp.float32), jnp.arange(64))
    return {"counts": counts, "min": low, "max": high, "mean": x.mean(), "std": x.std(),
            "grad_norm": optax.tree.norm(grad)}


def _watched(step, params, grads, cfg):
    """{name: _histogram} of the parameters that cfg.watch names, at updates that are logged; at all
    others zeros, which cost nothing.
    """
    def look():
        return _f32({name: _histogram(params[name], grads.get(name, jnp.zeros(())))
                     for name in cfg.watch})

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(look))
    return jax.lax.cond(step % cfg.log_every == 0, look, lambda: nothing)


def train_step(state, batch, cfg, loss_fn, optimizer, table):
    """One update: (state, metrics). Metrics are float32 scalars: the means of loss_fn's sums, and
    lr, grad_norm (before clipping), tokens (labelled), skipped (updates ever gated), finite,
    loss_scale; and "watch", what _watched gives.

    A non-finite loss or gradient leaves parameters and moments as they were; step still counts,
    since its batch is spent. In float16 that is an overflow: the scale halves, and finite is 0 only
    once the scale is below 1.
    """
    size = max((x.size for x in jax.tree.leaves(batch)), default=1)
    scale = state["scale"]["value"] if "scale" in state else 1.0
    factor = scale / size if "scale" in state else 1.0  # keeps float16 cotangents near the scale
    old = _trained(state["params"], table)
    sums, counts, grads = _value_and_grad(state["params"], batch, cfg, loss_fn, factor, table)
    counts = {k: jnp.where(n == 0, 1, n) for k, n in counts.items()}
    means = {k: sums[k] / counts[k] for k in sums}
    grads = jax.tree.map(lambda g: g / (factor * counts["objective"]), grads)
    grad_norm = optax.tree.norm(grads)
    if cfg.watch and cfg.log_every:
        means["watch"] = _watched(state["step"] + 1, state["params"], grads, cfg)
    finite = jnp.isfinite(means["objective"]) & jnp.isfinite(grad_norm)
    if cfg.clip_norm:
        clip = jnp.minimum(1.0, cfg.clip_norm / (grad_norm + 1e-30))
        grads = jax.tree.map(lambda g: g * clip, grads)
    lr = lr_at(state["step"], cfg)
    updates, opt = optimizer.update(grads, state["opt"], _f32(old))
    params = jax.tree.map(lambda p, u: (p.astype(jnp.float32) - lr * u).astype(p.dtype),
                          old, updates)
    kept = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    new = {"step": state["step"] + 1, "params": state["params"] | kept(params, old),
           "opt": kept(opt, state["opt"]), "skipped": state["skipped"] + ~finite}
    metrics = means | {"lr": lr, "grad_norm": grad_norm, "skipped": new["skipped"],
                       "tokens": counts.get("loss", counts["objective"]), "finite": finite}
    if "scale" in state:
        new["scale"] = _next_scale(state["scale"], finite)
        metrics |= {"loss_scale": scale, "finite": finite | (scale >= 1)}
    return new, jax.tree.map(partial(jnp.asarray, dtype=jnp.float32), metrics)


def eval_step(params, batch, cfg, loss_fn):
    """{name: (sum, count)} over one batch."""
    sums, counts = loss_fn(params, batch, cfg)
    return {k: (sums[k], counts[k]) for k in sums}


def evaluate(eval_step, params, batches, stopped=lambda: False):
    """{name: [sum, count]} in float64 over all batches; None when stopped() came true on the way.
    """
    totals, ahead = {}, {}

    def add(result):
        for name, pair in jax.device_get(result).items():
            totals[name] = totals.get(name, 0) + np.asarray(pair, np.float64)

    for batch in batches:
        if stopped():
            return None
        result = eval_step(params, batch)
        add(ahead)  # while the device works on this one
        ahead = result
    add(ahead)
    return totals


def check_shapes(table, mesh):
    """Faults, in words, of parameters whose dims the mesh cannot split evenly."""
    faults = []
    for name, (shape, spec, *_) in table.items():
        for n, axes in zip(shape, spec):
            ways = prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes or ()))
            if n % ways:
                faults.append(f"{name} {shape}: dim {n} cannot be split over {axes}={ways}; "
                              f"nearest: {n // ways * ways or ways} or {-(-n // ways) * ways}")
    return faults


def lower_steps(cfg, mesh, table, loss_fn, init_fn, batch_shapes, change=lambda name, value: value):
    """Everything that runs on the mesh, from shapes alone: (state: shapes with shardings,
    {"train_step", "eval_step", "init"}: functions that lower it, from_params: jitted).
    batch_shapes: {name: ShapeDtypeStruct}, split as BATCH.

    change(name, value) is given "loss_fn", the "optimizer" (optax), and "train_step" (state, batch)
    -> (state, metrics), and returns what to use instead: the place for pruning and the like.
    """
    loss_fn = change("loss_fn", loss_fn)
    optimizer = change("optimizer", make_optimizer(cfg, table))
    bind = lambda f, **fixed: update_wrapper(partial(f, cfg=cfg, **fixed), f)  # keeps f's name
    fresh = bind(init_state, init_fn=init_fn, optimizer=optimizer, table=table)
    update = change("train_step", bind(
        train_step, loss_fn=loss_fn, optimizer=optimizer, table=table))
    sums = bind(eval_step, loss_fn=loss_fn)
    whole = NamedSharding(mesh, P())
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    with jax.set_mesh(mesh):
        key = jax.eval_shape(jax.random.key, 0)
        shapes = jax.eval_shape(fresh, key)
        shardings = state_shardings(shapes, table, mesh, cfg.moments_on)
        state = jax.tree.map(place, shapes, shardings)
        batch = jax.tree.map(lambda x: place(x, NamedSharding(mesh, BATCH)), batch_shapes)
        if cfg.moments_on == "host":
            update = _from_host(update, state_shardings(shapes, table, mesh)["opt"])

    def lower(f, args, out_shardings, donate_argnums=()):
        with jax.set_mesh(mesh):
            return jax.jit(f, donate_argnums=donate_argnums, out_shardings=out_shardings).lower(
                *args)

    lowered = {
        "train_step": partial(lower, update, (state, batch), (shardings, whole), donate_argnums=0),
        "eval_step": partial(lower, sums, (state["params"], batch), whole),
        "init": partial(lower, fresh, (key,), shardings),
    }
    return state, lowered, jax.jit(lambda key, params: fresh(key, params=params),
                                   out_shardings=shardings)


def _from_host(update, on_device):
    """The same train_step, for moments that lie in the host's memory between updates."""
    def train_step(state, batch):
        return update(state | {"opt": jax.device_put(state["opt"], on_device)}, batch)
    return train_step


def compile_steps(cfg, mesh, table, loss_fn, init_fn, batch_shapes,
                  change=lambda name, value: value):
    """lower_steps, compiled before an array exists, but eval_step, which is compiled in the
    background once the others are ready.

    Returns {"state": shapes with shardings, "init": fn(key), "from_params": fn(key, params),
    "train_step", "eval_step", "memory": bytes per device by kind}. train_step donates its state:
    use what it returns.
    """
    state, lower, from_params = lower_steps(
        cfg, mesh, table, loss_fn, init_fn, batch_shapes, change)
    pool = ThreadPoolExecutor()  # XLA compiles without Python's lock
    first = {name: pool.submit(lower[name]().compile, options) for name, options in (
        ("train_step", None), ("init", {"xla_backend_optimization_level": 1}))}  # init runs once
    evaluation = lower["eval_step"]()
    programs = {name: program.result() for name, program in first.items()}
    later = pool.submit(evaluation.compile)
    pool.shutdown(wait=False)
    return programs | {"state": state, "memory": memory(programs["train_step"]),
                       "from_params": from_params,
                       "eval_step": lambda params, batch: later.result()(params, batch)}


def memory(compiled):
    """Bytes per device of a compiled program, by kind; empty where the backend does not say."""
    stats = compiled.memory_analysis()
    if stats is None:
        return {}
    parts = {"arguments": stats.argument_size_in_bytes, "temporaries": stats.temp_size_in_bytes,
             "outputs": stats.output_size_in_bytes, "aliased": -stats.alias_size_in_bytes}
    return parts | {"total": sum(parts.values())}


# ---- what a compiled program does

# Of one device: dense bfloat16 TFLOP/s; GiB of memory for a program; GB/s of memory; GB/s sent to
# its neighbours; GB/s sent between slices, or hosts of GPUs. Source: the makers' data sheets; of
# TPUs' memory, XLA.
PEAKS = {"NVIDIA A100": (312, 80, 2039, 300, 25), "NVIDIA H100": (989, 80, 3350, 450, 50),
         "NVIDIA H200": (989, 141, 4800, 450, 50), "TPU v4": (275, 30.75, 1228, 150, 6.25),
         "TPU v5 lite": (197, 15.75, 819, 100, 3.125), "TPU v5": (459, 95, 2765, 300, 6.25),
         "TPU v6": (918, 31.25, 1640, 224, 12.5)}


def peaks(kind):
    """The row of PEAKS of a device of this kind, or Nones."""
    return next((row for name, row in PEAKS.items() if kind.startswith(name)), (None,) * 5)


# Bytes that a device sends, of n that take part, for a result of `size` bytes: rings.
SENT = {
    "all-gather": lambda n, size: size * (n - 1) / n,
    "reduce-scatter": lambda n, size: size * (n - 1),
    "all-reduce": lambda n, size: 2 * size * (n - 1) / n,
    "all-to-all": lambda n, size: size * (n - 1) / n,
    "collective-permute": lambda n, size: size,
}
BETWEEN = " between slices"
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional")


def _result_bytes(shapes):
    """Bytes of each array in the text of an HLO result."""
    bits = lambda dtype: 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return [bits(dtype) * prod(map(int, filter(None, dims.split(",")))) // 8
            for dtype, dims in re.findall(r"\b(pred|[sufb]+\d+)\w*\[([\d,]*)\]", shapes)]


def _group(line, n):
    """Device numbers of one group of a collective, which HLO writes as pairs, a list, an iota that
    is folded and turned, or axes of a mesh of such an iota.
    """
    numbers = lambda words: [int(i) for i in words.split(",")]

    def iota(dims, turn):
        dims, turn = numbers(dims), numbers(turn) if turn else None
        return np.arange(prod(dims)).reshape(dims).transpose(turn)

    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        ends = [numbers(pair) for pair in re.findall(r"\d+,\d+", pairs[1])]
        return next((pair for pair in ends if pair[0] != pair[1]), ends[0])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return numbers(listed[1])
    if folded := re.search(
            r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return iota(*folded.groups()[1:]).reshape(numbers(folded[1]))[0].tolist()
    if named := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\]"
                          r"(?:T\(([\d,]+)\))?\))? ?\{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        strides = dict(zip(sizes, np.cumprod([1, *list(sizes.values())[:0:-1]])[::-1].tolist()))
        group = [0]
        for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", named[4]):
            size = int(size or sizes[name])
            stride = strides[name] * (sizes[name] // (int(before or 1) * size))
            group = [first + i * stride for first in group for i in range(size)]
        return iota(named[2], named[3]).ravel()[group].tolist() if named[2] else group
    assert "replica_groups={}" in line or "replica_groups" not in line, line
    return list(range(n))


def _turns(line, bodies):
    """How often a loop turns: as XLA says, or the number that its condition compares with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = bodies[re.search(r"condition=%?([\w.\-]+)", line)[1]]
    return max(map(int, re.findall(r"[su]32\[\]\S* constant\((\d+)\)", condition)), default=1)


def traffic(text, mesh, slices=1):
    """({(collective, axes): [count, bytes a device sends]}, bytes that its operations write) of a
    step, from its compiled text; what stands in a loop counts as often as the loop turns.

    axes: names of the mesh axes that differ within a group, joined by "+", and BETWEEN where the
    group spans several slices of the mesh.
    """
    sizes = list(mesh.shape.values())
    outer = int(sizes[0] == 1)
    bodies = {m[1]: m[2] for m in re.finditer(
        r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}(?:$|,)", text, re.M | re.S)}
    collectives, written = {}, 0

    def count(kind, axes, times, n_bytes):
        row = collectives.setdefault((kind, axes), [0, 0.0])
        row[0] += times
        row[1] += times * n_bytes

    def walk(name, times, fused):
        nonlocal written
        for line in bodies.get(name, "").splitlines():
            op = re.match(r"\s*(?:ROOT )?%?\S+ = (.*?) ([a-z][\w\-]*)\(", line)
            if not op:
                continue
            results, kind = _result_bytes(op[1]), op[2].removesuffix("-start")
            # Between slices of TPUs a collective is a send through the host.
            far = re.search(r'megascale_transfer_type="(\w+)"', line)
            if far and kind == "send":
                sent = far[1].lower().replace("_", "-")
                count(sent, AXES[outer] + BETWEEN, times, SENT[sent](slices, results[0]))
            if kind in SENT:
                started = op[2] != kind and len(results) > 1  # (operand, result, ...)
                group = _group(line, prod(sizes))
                places = np.array(np.unravel_index(group, sizes)).T
                axes = "+".join(a for a, p in zip(mesh.shape, places.T) if len(set(p)) > 1)
                if len(set(places[:, outer] // (sizes[outer] // slices))) > 1:
                    axes += BETWEEN
                count(kind, axes, times,
                      SENT[kind](len(group), results[1] if started else sum(results)))
            in_place = "dynamic-update-slice" in line.partition("=")[0] + kind
            if not fused and not in_place and kind not in FREE and not op[2].endswith("-start"):
                written += times * sum(results)
            turns = _turns(line, bodies) if kind == "while" else 1
            for called in re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", line):
                walk(called, times * turns, fused or kind != "while")

    walk(re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)[1], 1, False)
    return collectives, written


def requirements(state, lowered, mesh, slices=1):
    """Compile a step and tell what a device needs: {"bytes" by kind, "collectives" {(kind, axes):
    [count, bytes sent]} from the most bytes to the least, "sent_bytes", "memory_traffic" (bytes:
    twice what its operations write), "compile_s"}; where it does not fit, "fault" in words.

    state: shapes with shardings; its parameters and moments are told apart.
    """
    def on_a_device(tree, where):
        return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                   for x in jax.tree.leaves(tree)
                   if (x.sharding.memory_kind == "pinned_host") == (where == "host"))

    took = {"bytes": {"parameters": on_a_device(state["params"], "device"),
                      "moments": on_a_device(state["opt"], "device")}, "collectives": {},
            "sent_bytes": 0, "memory_traffic": 0}
    if on_host := on_a_device(state["opt"], "host"):
        took["bytes"]["moments in the host's memory"] = on_host
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return took | {"fault": str(e).splitlines()[0]}
    parts, stats = memory(compiled), compiled.memory_analysis()
    took["bytes"] |= {"gradients, activations and other temporaries": parts["temporaries"]}
    if stats.host_temp_size_in_bytes:
        took["bytes"]["temporaries in the host's memory"] = stats.host_temp_size_in_bytes
    took["bytes"]["in all"] = parts["total"]
    sent, written = traffic(compiled.as_text(), mesh, slices)
    sent = dict(sorted(sent.items(), key=lambda row: -row[1][1]))
    return took | {"collectives": sent, "sent_bytes": sum(row[1] for row in sent.values()),
                   "memory_traffic": 2 * written, "compile_s": time.perf_counter() - began}


def implied(took, kind):
    """What requirements and "flop" imply on a device of this kind: {"fits"}, and where its rates
    are known {"seconds": by what bounds them, "step_s", "mfu": (all overlapped, none)}.
    """
    tflops, memory_gib, memory_gbps, near_gbps, far_gbps = peaks(kind)
    fits = "fault" not in took and took["bytes"]["in all"] <= (memory_gib or np.inf) * 2**30
    if "fault" in took or not tflops:
        return {"fits": fits}
    far = sum(row[1] for (_, axes), row in took["collectives"].items() if axes.endswith(BETWEEN))
    seconds = {"compute": sum(took["flop"].values()) / tflops / 1e12,
               "memory": took["memory_traffic"] / memory_gbps / 1e9,
               "network": (took["sent_bytes"] - far) / near_gbps / 1e9}
    seconds |= {"slow network": far / far_gbps / 1e9} if far else {}
    step_s = max(seconds.values()), sum(seconds.values())
    model_flop = next(iter(took["flop"].values()))
    return {"fits": fits, "seconds": seconds, "step_s": step_s,
            "mfu": tuple(model_flop / s / tflops / 1e12 for s in step_s)}


def factorisations(n, k=len(AXES)):
    """All tuples of k sizes whose product is n."""
    if k == 1:
        return [(n,)]
    return [(d, *rest) for d in range(1, n + 1) if n % d == 0
            for rest in factorisations(n // d, k - 1)]


def theory(cfg, table, sizes):
    """{"mesh" (without devices), "state_bytes" of a device, "sent": bytes that a device sends in an
    update, by what for} with rings over a mesh of these sizes: "weights" gathered for each pass and
    their gradients summed, in cfg.dtype, for each microbatch; activations summed over "tp", turned
    over "sp" and "ep".
    """
    mesh = jax.sharding.AbstractMesh(sizes, AXES)
    n, ring = mesh.shape, lambda ways: (ways - 1) / ways
    itemsize = 2 if "16" in cfg.dtype else 4
    again = cfg.remat in ("full", "offload")
    passes = (3 + again) * cfg.micro_batches  # forward, again, backward, sum
    weights, state_bytes, specs = 0.0, 0.0, moment_specs(table, mesh)
    for name, (shape, spec, _, trained) in table.items():
        part = prod(NamedSharding(mesh, spec).shard_shape(shape))
        moments = prod(NamedSharding(mesh, specs[name]).shard_shape(shape))
        state_bytes += 4 * part + 8 * moments * trained
        gathered = prod(n[a] for axes in spec if "fsdp" in (axes or ()) for a in (
            axes if isinstance(axes, tuple) else (axes,)))
        weights += itemsize * part * (passes * gathered * ring(gathered) + 2 * ring(n["dp"]))
    layer = itemsize * cfg.batch_size * cfg.seq_len / prod(n[a] for a in ("dp", "fsdp", "ep", "sp"))
    turn = 4 * cfg.n_layers * layer * cfg.d_model  # forward there and back, backward there and back
    heads = (cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim / cfg.d_model
    slots = cfg.experts_per_token * (cfg.capacity_factor or 1) if cfg.n_experts else 0
    return {"mesh": mesh, "state_bytes": state_bytes, "sent": {
        "weights": weights, "tp": turn * ring(n["tp"]) * (1 + (slots or 1)),
        "sp": turn * ring(n["sp"]) * heads / n["tp"], "ep": turn * ring(n["ep"]) * slots}}
