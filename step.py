# SPDX-License-Identifier: Apache-2.0
"""What is compiled, and the mesh it is compiled for.

Owns the update (gradient, accumulation, precision, clipping, optimizer, the gate against non-finite
numbers), its schedules and its shardings. Knows no model: loss_fn, init_fn and the parameter table
{name: {"shape", "spec", "init", "trained", "ids"}} come in. `cfg`: any object with the fields under
"optimizer" and "mesh" in config.py, and dtype deterministic steps grad_accum_steps watch log_every.
Invariant: one call of `train_step` is one step; everything is keyed on state["step"].
"""
import contextlib
import hashlib
import importlib.metadata
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, update_wrapper
from math import inf, prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

AXES = ("dp", "fsdp", "ep", "tp", "sp")


def make_mesh(cfg, devices=None):
    """A mesh of all devices over AXES; one size of -1 is inferred. cfg.slices splits dp, or fsdp
    where dp is 1, over groups of devices with a slow network between them.

    Raises ValueError when the sizes do not use every device, or slices is not what the devices say.
    """
    devices = np.array(jax.devices() if devices is None else devices)
    sizes = list(devices.reshape([getattr(cfg, a) for a in AXES]).shape)
    slices = [getattr(device, "slice_index", None) or 0 for device in devices]
    n_slices = len(set(slices))
    if devices[0].platform == "tpu" and cfg.slices != n_slices:
        raise ValueError(f"slices {cfg.slices}: the devices have {n_slices}; set it to {n_slices}")
    outer = int(sizes[0] == 1)  # index in AXES of the axis that crosses the slow network
    sizes[outer] //= cfg.slices
    groups = np.split(devices[np.argsort(slices, kind="stable")], cfg.slices)
    # Not jax.make_mesh: it refuses an axis of 8 on a slice whose every side is 16 long.
    parts = [mesh_utils.create_device_mesh(sizes, list(group), allow_split_physical_axes=True)
             for group in groups]
    return Mesh(np.concatenate(parts, axis=outer), AXES, axis_types=(AxisType.Auto,) * len(AXES))


# Share of the peak rate at progress p in [0, 1], `done` updates after `warm` updates of warm-up.
SCHEDULES = {
    "constant": lambda cfg, p, done, warm: 1.0,
    "linear": lambda cfg, p, done, warm: 1 - p,
    "cosine": lambda cfg, p, done, warm: 0.5 * (1 + jnp.cos(jnp.pi * p)),
    "polynomial": lambda cfg, p, done, warm: (1 - p) ** cfg.poly_power,
    "inverse_sqrt": lambda cfg, p, done, warm: jax.lax.rsqrt(1 + done / max(warm, 1)),
    "wsd": lambda cfg, p, done, warm: jnp.clip((cfg.steps - warm - done) / min(
        cfg.decay_frac * cfg.steps, max(cfg.steps - warm, 1)), 0, 1),
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
    peak = DEFAULT_LR[cfg.optimizer] if cfg.lr == -1 else cfg.lr
    return peak * jnp.where(step < warm, (step + 1) / max(warm, 1), after)


# Update directions before weight decay and the factor -lr_at(step), which train_step applies.
OPTIMIZERS = {
    "adamw": lambda cfg: optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps, mu_dtype=cfg.moment_dtype),
    "adafactor": lambda cfg: optax.chain(  # no first moment
        optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
    "lion": lambda cfg: optax.scale_by_lion(cfg.b1, cfg.b2, mu_dtype=cfg.moment_dtype),
    "muon": lambda cfg: _muon(cfg),  # of stacks of matrices, one per layer; of the rest, adamw
    "rmsprop": lambda cfg: optax.scale_by_rms(cfg.b2, cfg.eps, eps_in_sqrt=False),
    "sgd": lambda cfg: optax.trace(cfg.b1, accumulator_dtype=cfg.moment_dtype),
}


def make_optimizer(cfg, table):
    """The optax optimizer of the trained parameters. Their rows may have an "optimizer" of their
    own, and "lr_mult" and "decay_mult"; by default only those of a ("normal", std) init decay.
    """
    kinds, decay, rate = {}, {}, {}
    for name, row in _trained(table, table).items():
        is_matrix, kind = row["init"][0] == "normal", row.get("optimizer", cfg.optimizer)
        is_stack = is_matrix and len(row["shape"]) > 2
        kinds[name] = "adamw" if kind == "muon" and not is_stack else kind
        decay[name] = cfg.weight_decay * row.get("decay_mult", float(is_matrix))
        rate[name] = row.get("lr_mult", 1.0) * _relative_rate(cfg, kind)

    def finish(updates, params):
        return {name: rate[name] * (u + decay[name] * params[name] if decay[name] else u)
                for name, u in updates.items()}

    parts = {kind: OPTIMIZERS[kind](cfg) for kind in sorted({*kinds.values()})}
    direction = optax.partition(parts, kinds) if len(parts) > 1 else next(
        iter(parts.values()), optax.identity())
    return optax.chain(direction, optax.stateless(finish))


def init_state(key, cfg, init_fn, optimizer, table, params=()):
    """{"step", "params", "opt", "skipped"}, and "scale" for float16. Only trained parameters have
    moments. params: values that replace init_fn's.
    """
    params = init_fn(key, cfg) | dict(params)
    zero = jnp.zeros((), jnp.int32)
    opt = optimizer.init(_f32(_trained(params, table)))
    state = {"step": zero, "params": params, "opt": opt, "skipped": zero}
    if cfg.dtype == "float16":
        state["scale"] = {"value": jnp.float32(FP16_SCALE), "good": zero}
    return state


def moment_specs(table, mesh):
    """{name: spec} of moments and gradients: the parameter's spec, with its fsdp dims also split
    over dp where divisible.

    So dp is ZeRO-2, fsdp ZeRO-3. Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
    """
    def wider(n, axes):
        wide = (*jax.tree.leaves(axes), "dp")
        fits = "fsdp" in wide and n % prod(mesh.shape[a] for a in wide) == 0
        return wide if fits else axes

    return {name: P(*map(wider, row["shape"], row["spec"])) for name, row in table.items()}


def state_shardings(state, table, mesh, offload_optimizer=False):
    """Shardings of a state: parameters by their spec, moments of a parameter's shape by
    moment_specs, the rest replicated.
    """
    replicated, specs = NamedSharding(mesh, P()), moment_specs(table, mesh)
    kind = {"memory_kind": "pinned_host"} if offload_optimizer else {}

    def like_parameter(path, moment):
        names = [key.key for key in path if getattr(key, "key", None) in specs]
        same = names and moment.shape == state["params"][names[-1]].shape
        return NamedSharding(mesh, specs[names[-1]], **kind) if same else replicated

    params = {name: NamedSharding(mesh, row["spec"]) for name, row in table.items()}
    opt = jax.tree_util.tree_map_with_path(like_parameter, state["opt"])
    return jax.tree.map(lambda _: replicated, state) | {"params": params, "opt": opt}


def _value_and_grad(params, batch, cfg, loss_fn, loss_scale, table):
    """Sums, counts, and the float32 gradient of loss_scale x the summed objective with respect to
    the trained parameters, accumulated over cfg.grad_accum_steps.
    """
    mesh = jax.sharding.get_abstract_mesh()
    specs = {} if mesh.empty else _trained(moment_specs(table, mesh), table)
    specs |= {name: P() for name in specs if "ids" in table[name]}  # few rows, of any device

    def one(micro):
        def objective(trained):
            sums, counts = loss_fn(params | trained, micro, cfg)
            return sums["objective"] * loss_scale, (sums, counts)

        (_, aux), grads = jax.value_and_grad(objective, has_aux=True)(_trained(params, table))
        if specs:  # a reduce-scatter: each device sums only its own part
            grads = jax.lax.with_sharding_constraint(grads, specs)
        return *aux, _f32(grads)

    return _over_microbatches(one, batch, cfg.grad_accum_steps)


def _over_microbatches(f, batch, A):
    """The sums of f(microbatch) over A microbatches of a batch, one after the other."""
    if A == 1:
        return f(batch)
    # Row b goes to microbatch b mod A, so that every device keeps its own rows.
    micros = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, A, *x.shape[1:]), 1, 0), batch)
    shapes = jax.eval_shape(f, jax.tree.map(lambda x: x[0], micros))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)

    def add(total, micro):
        return jax.tree.map(jnp.add, total, f(micro)), None

    return jax.lax.scan(add, zeros, micros)[0]


def train_step(state, batch, cfg, loss_fn, optimizer, table):
    """One update: (state, metrics). Metrics are float32: the means of loss_fn's sums, and lr,
    grad_norm (before clipping), n_labels (the loss's count), skipped (non-finite updates so far),
    finite, loss_scale; "counts", {name: count} of each mean; and "watch", what _weight_stats gives.

    A non-finite loss or gradient leaves parameters and moments as they were; step still counts,
    since its batch is spent. In float16 that is an overflow: the scale halves, and finite is 0 only
    once the scale is below 1.
    """
    size = max((x.size for x in jax.tree.leaves(batch)), default=1)
    scale = state["scale"]["value"] if "scale" in state else 1.0
    loss_scale = scale / size if "scale" in state else 1.0  # of a sum, so that it stays in float16
    params, old_opt, batch, put_back = gather_rows(state, batch, table)
    old = _trained(params, table)
    sums, counts, grads = _value_and_grad(params, batch, cfg, loss_fn, loss_scale, table)
    divisors = {k: jnp.where(n == 0, 1, n) for k, n in counts.items()}
    metrics = {k: sums[k] / divisors[k] for k in sums}
    if taken := RESERVED_METRICS & sums.keys():
        raise ValueError(f"loss: sums named {sorted(taken)}: others give these; rename them")
    grads = jax.tree.map(lambda g: g / (loss_scale * divisors["objective"]), grads)
    grad_norm = optax.tree.norm(grads)
    if cfg.watch and cfg.log_every:
        metrics["watch"] = _weight_stats(state["step"] + 1, state["params"], grads, cfg)
    finite = jnp.isfinite(metrics["objective"]) & jnp.isfinite(grad_norm)
    if cfg.clip_norm:
        clip = jnp.minimum(1.0, cfg.clip_norm / (grad_norm + 1e-30))
        grads = jax.tree.map(lambda g: g * clip, grads)
    lr = lr_at(state["step"], cfg)
    updates, opt = optimizer.update(grads, old_opt, _f32(old))
    new = jax.tree.map(lambda p, u: (p.astype(jnp.float32) - lr * u).astype(p.dtype), old, updates)
    new, opt = jax.tree.map(lambda new, old: jnp.where(finite, new, old),
                            (new, opt), (old, old_opt))
    params, opt = put_back((params | new, opt))
    new = {"step": state["step"] + 1, "params": params, "opt": opt,
           "skipped": state["skipped"] + ~finite}
    metrics |= {"lr": lr, "grad_norm": grad_norm, "skipped": new["skipped"], "counts": counts,
                "n_labels": counts.get("loss", counts["objective"]), "finite": finite}
    if "scale" in state:
        new["scale"] = _next_scale(state["scale"], finite)
        metrics |= {"loss_scale": scale, "finite": finite | (scale >= 1)}
    return new, jax.tree.map(jnp.float32, metrics)


def eval_step(params, batch, cfg, loss_fn):
    """{name: (sum, count)} over one batch, in microbatches as train_step takes it: their memory is
    enough for both.
    """
    sums, counts = _over_microbatches(
        lambda micro: loss_fn(params, micro, cfg), batch, cfg.grad_accum_steps)
    return {k: (sums[k], counts[k]) for k in sums}


def lower_steps(cfg, mesh, table, loss_fn, init_fn, batch, override=lambda name, value: value):
    """Trace everything that runs on the mesh, allocating nothing: (the state as shapes with
    shardings; {"train_step", "eval_step", "init", "digest"}: functions that lower that program;
    from_params,
    a jitted (key, params=) -> state, which takes the memory of params).

    batch: {name: ShapeDtypeStruct with a sharding}. override(name, value) is given "loss_fn",
    the "optimizer" (optax), and "train_step" (state, batch) -> (state, metrics), and returns what
    to use instead: the place for pruning and the like.
    """
    loss_fn = override("loss_fn", loss_fn)
    optimizer = override("optimizer", make_optimizer(cfg, table))

    def bind(f, **fixed):  # keeps f's name
        return update_wrapper(partial(f, cfg=cfg, **fixed), f)

    fresh = bind(init_state, init_fn=init_fn, optimizer=optimizer, table=table)
    update = override("train_step", bind(
        train_step, loss_fn=loss_fn, optimizer=optimizer, table=table))
    digest = digest_sums
    sums = bind(eval_step, loss_fn=loss_fn)
    replicated = NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        key = jax.eval_shape(jax.random.key, 0)
        shapes = jax.eval_shape(fresh, key)
        for name, x in shapes["params"].items():
            assert x.shape == (*table[name]["shape"],), f"init: {name} is {x.shape}, unlike its row"
        shardings = state_shardings(shapes, table, mesh, cfg.offload_optimizer)
        state = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings)
        if cfg.offload_optimizer:
            on_device = state_shardings(shapes, table, mesh)["opt"]
            update, digest = _from_host(update, on_device), _from_host(digest, on_device)

    options = compiler_options(cfg, mesh.devices.flat[0])

    def lower(f, args, out_shardings, donate=()):
        with jax.set_mesh(mesh):
            return jax.jit(f, donate_argnums=donate, out_shardings=out_shardings,
                           compiler_options=options).lower(*args)

    from_params = jax.jit(fresh, donate_argnames="params", out_shardings=shardings,
                          compiler_options=options)
    return state, {
        "train_step": partial(lower, update, (state, batch), (shardings, replicated), donate=0),
        "eval_step": partial(lower, sums, (state["params"], batch), replicated),
        "init": partial(lower, fresh, (key,), shardings),
        "digest": partial(lower, digest, (state,), replicated)}, from_params


# ---- optional

# The peak learning rate of each optimizer where cfg.lr is -1; muon's is also that of the adamw to
# which it leaves the rest.
DEFAULT_LR = dict(adamw=2e-3, adafactor=3e-3, lion=5e-4, muon=1e-2, rmsprop=2e-3, sgd=0.1)


def _relative_rate(cfg, kind):
    """The rate of parameters that name this optimizer, as a multiple of lr_at."""
    return DEFAULT_LR[kind] / DEFAULT_LR[cfg.optimizer] if cfg.lr == -1 else 1.0


def _trained(params, table):
    return {name: x for name, x in params.items() if table[name].get("trained", True)}


_f32 = partial(optax.tree.cast, dtype=jnp.float32)


def gather_rows(state, batch, table):
    """Cut an update down to the rows that its batch looks up: (params, moments, batch, put_back).

    A table row with "ids" names arrays of the batch that hold indices into its parameter. Of such a
    parameter and its moments only the rows looked up are returned, as many as there are ids; in the
    batch returned the ids are indices into these. Gradients of equal ids are summed. An id that is
    the table's size or more is padding: its row is zeros and is dropped. put_back((params,
    moments)) writes the rows back into the state's arrays and returns these. So the time of an
    update does not depend on the size of the table.

    Raises ValueError when parameters with different "ids" share an array, and when moments do not
    have their parameter's shape.
    """
    rows, places, no_row = {}, {}, jnp.int32(2**31 - 1)
    for names in dict.fromkeys(row["ids"] for row in table.values() if "ids" in row):
        assert not {*names} & {*places}, f"ids {names}: other ids share one; give these a copy"
        ids = jnp.sort(jnp.concatenate([batch[name].ravel() for name in names]))
        # The first of equal ids has the row, the others none: nothing needs to be counted.
        firsts = jnp.where(jnp.diff(ids, prepend=-1) != 0, ids, no_row)
        rows |= {name: firsts for name, row in table.items() if row.get("ids") == names}
        places |= {name: jnp.searchsorted(ids, batch[name]) for name in names}

    def of_rows(f, *trees):
        def leaf(path, x, *more):
            name = next((key.key for key in path if getattr(key, "key", None) in rows), None)
            if name and x.shape != state["params"][name].shape:
                raise ValueError(f"{name}: has ids, but moments of another shape, {x.shape}; take "
                                 "adamw, lion, rmsprop or sgd, which keep a row for each")
            return f(rows[name], x, *more) if name else (x, *more)[-1]
        return jax.tree_util.tree_map_with_path(leaf, *trees)

    whole = state["params"], state["opt"]
    params, opt = of_rows(lambda ids, x: x.at[ids].get(mode="fill", fill_value=0), whole)
    return params, opt, batch | places, partial(
        of_rows, lambda ids, x, new: x.at[ids].set(new, mode="drop"), whole)


def compile_steps(cfg, mesh, table, loss_fn, init_fn, batch, override=lambda name, value: value):
    """lower_steps, compiled before an array exists; "eval_step" and "digest" later:
    "eval_step" raises MemoryError when it does not fit beside the state.

    Returns {"state": shapes with shardings, "init": fn(key), "from_params": fn(key, params=),
    "train_step", "eval_step", "digest": fn(state) of digest_sums, "memory": memory_by_kind,
    "metrics": shapes of train_step's;
    "compile_eval" and "compile_digest": fn() that waits until that one is compiled}. train_step
    donates its state: use what it returns.
    """
    state, lower, from_params = lower_steps(cfg, mesh, table, loss_fn, init_fn, batch, override)
    pool = ThreadPoolExecutor()  # XLA compiles without Python's lock
    update = lower["train_step"]()
    train = pool.submit(update.compile)
    init = pool.submit(lower["init"]().compile, {"xla_backend_optimization_level": 1})  # runs once
    evaluation = lower["eval_step"]()
    train, init = train.result(), init.result()
    memory = memory_by_kind(state, train)

    def compile_later(compile):
        """compile, which runs once: in the background, but on a CPU at its first call, as the first
        steps would run at half their speed beside it.
        """
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        return cache(compile) if on_cpu else pool.submit(compile).result

    def compile_evaluation():
        compiled = evaluation.compile()
        total = held_bytes((state, batch)) + added_bytes(compiled)
        check_fits(memory | {"total": total}, mesh, "evaluation")
        return compiled

    compiled_eval = compile_later(compile_evaluation)
    compiled_digest = compile_later(lambda: lower["digest"]().compile())
    return {"state": state, "train_step": train, "init": init, "from_params": from_params,
            "eval_step": lambda params, batch: compiled_eval()(params, batch),
            "digest": lambda state: compiled_digest()(state),
            "compile_eval": compiled_eval, "compile_digest": compiled_digest,
            "memory": memory, "metrics": update.out_info[1]}


def evaluate(eval_step, params, batches, stopped=lambda: False):
    """{name: (sum, count)} in float64 over all batches; None when stopped() came true on the way.
    """
    results = []
    for batch in batches:
        if stopped():
            return None
        results.append(eval_step(params, batch))
        jax.block_until_ready(results[-2:-1])  # the one before, while the device works on this
    results = jax.tree.map(np.float64, jax.device_get(results))
    return jax.tree.map(lambda *values: sum(values), *results) if results else {}


def _muon(cfg):
    """Muon at Adam's size, so that they share a rate; rows, then columns are made of one size.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; size, Liu et al. 2025,
    arXiv:2502.16982, equation 4; rows and columns, Zhang et al. 2026, arXiv:2602.21545.
    """
    def rms(x, axis):
        return jnp.sqrt(jnp.mean(x**2, axis, keepdims=True) + 1e-12)

    def balanced(u, _):
        rows = u / rms(u, -1)
        return 0.2 * max(u.shape[-2:]) ** 0.5 * rms(u, (-2, -1)) * rows / rms(rows, -2)

    dims = partial(jax.tree.map, lambda _: optax.contrib.MuonDimensionNumbers(-2, -1))
    momentum = optax.contrib.scale_by_muon(
        beta=cfg.b1, mu_dtype=cfg.moment_dtype, weight_dimension_numbers=dims)
    return optax.chain(momentum, optax.stateless_with_tree_map(balanced))


FP16_SCALE, FP16_PATIENCE = 2.0**15, 2000  # first loss scale; finite updates before it doubles


def _next_scale(scale, finite):
    """Dynamic loss scale: halved on overflow, doubled after FP16_PATIENCE finite updates in a row.
    """
    good = jnp.where(finite, scale["good"] + 1, 0)
    grown = jnp.where(good == FP16_PATIENCE, scale["value"] * 2, scale["value"])
    value = jnp.where(finite, grown, jnp.maximum(scale["value"] / 2, 2.0**-14))
    return {"value": value, "good": jnp.where(good == FP16_PATIENCE, 0, good)}


def _histogram(x, grad):
    """{"counts": 64 bins from "min" to "max", "mean", "std"} of a parameter, and "grad_norm"."""
    x = x.astype(jnp.float32)
    low, high = x.min(), x.max()
    share = (x - low) / jnp.maximum(high - low, 1e-30)
    bins = jnp.minimum((64 * share).astype(jnp.int32), 63)
    counts = jax.lax.map(lambda i: (bins == i).sum(dtype=jnp.float32), jnp.arange(64))
    return {"counts": counts, "min": low, "max": high, "mean": x.mean(), "std": x.std(),
            "grad_norm": optax.tree.norm(grad)}


def _weight_stats(step, params, grads, cfg):
    """{name: _histogram} of the parameters in cfg.watch, at steps that are logged; zeros, which
    cost nothing, at all others.
    """
    def stats():
        return {name: _histogram(params[name], grads.get(name, jnp.zeros(())))
                for name in cfg.watch}

    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(stats))
    return jax.lax.cond(step % cfg.log_every == 0, stats, lambda: nothing)


def _from_host(f, on_device):
    """f(state, ...), which copies moments that are in host memory between steps to the device."""
    def with_opt_on_device(state, *args):
        return f(state | {"opt": jax.device_put(state["opt"], on_device)}, *args)
    return update_wrapper(with_opt_on_device, f)


# ---- processes

def init_distributed(coordinator, n_processes, process_id):
    """Connect to the other processes of a run. Call it before anything touches a device.

    coordinator: host:port of process 0. With "auto", JAX takes all three values from Slurm, Open
    MPI or Kubernetes.
    """
    print(f"meeting the other processes ({coordinator}) ...", file=sys.stderr, flush=True)
    if coordinator == "auto":
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(coordinator, n_processes, process_id)


HEARTBEAT_BYTES = 4096  # size of a heartbeat file
HEARTBEAT_TIMEOUT_S = 30  # seconds without a heartbeat after which a process counts as dead


def start_heartbeat(folder, token, timeout_s, on_death):
    """Start heartbeats between the processes of a run; return beat(**changes).

    beat notes what this process is "doing" and at which "step". It also notes "fault", why this
    process ends, or that it is "done". A thread writes these notes to the folder every second and
    reads those of the other processes. It ends this process with exit code 1 once another process
    has ended or is silent, or once no process has called beat for timeout_s seconds.

    folder: shared by all processes. A process that cannot write to it is not watched; JAX ends a
    run some 100 s after such a process died. token: a text that all processes of this run share
    and no other run has. timeout_s: 0 for no heartbeats. on_death(text): called with the reason
    before this process ends.
    """
    def no_beat(**changes):
        pass

    if jax.process_count() == 1 or not timeout_s:
        return no_beat
    folder = Path(folder)
    rank = jax.process_index()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY)
    except OSError:  # only process 0 needs the folder
        return no_beat
    name = f"process {rank} (pid {os.getpid()} on {socket.gethostname()})"
    # "n" counts the calls of beat, "told" the writes: each write differs from the one before.
    own = {"name": name, "start": token, "n": 0, "told": 0}
    peers = {}  # {rank: {"sign": newest heartbeat, "heard_at", "moved_at": as in peer_fault}}

    def tell():
        own["told"] += 1
        sign = json.dumps(own).encode()[:HEARTBEAT_BYTES].ljust(HEARTBEAT_BYTES)
        with contextlib.suppress(OSError):
            os.pwrite(file, sign, 0)  # in place, as that needs no space on a full disk

    def beat(**changes):
        own.update({"n": own["n"] + 1} | changes)
        if "fault" in changes or "done" in changes:
            tell()

    def hear(peer_rank, now):
        sign = json.loads((folder / str(peer_rank)).read_text())
        if sign["start"] != token:  # a file of an earlier run
            return
        old = peers.get(peer_rank, {"sign": {}, "moved_at": 0})
        if sign == old["sign"]:
            return
        moved = sign["n"] != old["sign"].get("n")
        peers[peer_rank] = {"sign": sign, "heard_at": now,
                            "moved_at": now if moved else old["moved_at"]}

    def watch():
        while "fault" not in own and "done" not in own:
            tell()
            now = time.monotonic()
            for peer_rank in range(jax.process_count()):
                with contextlib.suppress(OSError, ValueError):  # no file yet, or half written
                    hear(peer_rank, now)
            silent_s = min(own.get("silent_s", HEARTBEAT_TIMEOUT_S), timeout_s)
            reason = dead_peer_reason(peers.values(), now, timeout_s, silent_s)
            if reason:
                beat(fault=reason)
                print(f"{name} ends: {reason}", file=sys.stderr, flush=True)
                on_death(reason)
                if rank == 0:  # JAX ends the others with process 0: let them see why
                    time.sleep(3)
                os._exit(1)
            time.sleep(min(1, silent_s / 3))

    threading.Thread(target=watch, daemon=True).start()
    return beat


def dead_peer_reason(peers, now, timeout_s, silent_s):
    """Why a run must end: the process at fault and what is wrong with it; or None.

    peers: for each process {"sign": its newest heartbeat, "heard_at": when that came, "moved_at":
    when the process last called beat}.
    """
    for peer in peers:
        sign = peer["sign"]
        if "fault" in sign:
            return f"{sign['name']} has ended: {sign['fault']}"
        silence_s = now - peer["heard_at"]
        if silence_s > silent_s and "done" not in sign:
            return (f"{sign['name']} has given no sign of life for {silence_s:.0f} s: it is "
                    "dead, stopped or cut off")
    # Before its first call of beat, a process may still compile.
    stuck = [peer["sign"] for peer in peers
             if peer["sign"]["n"] and now - peer["moved_at"] > timeout_s]
    if stuck and len(stuck) == len(peers):
        last = min(stuck, key=lambda sign: sign["n"])
        return (f"no process has done anything for {timeout_s:g} s; the furthest behind is "
                f"{last['name']}, after {last.get('doing')} at step {last.get('step')}")
    return None


# ---- profiler

def profiler(first, last, folder, log=print):
    """observe(event, row), which traces updates first to last into the folder: time as an XPlane
    (`jax.profiler.ProfileData`, Perfetto, XProf), memory as pprof; memory once more on a failure.

    first: counted from 1; 0 for no trace.
    """
    traced = 0  # the newest update in the trace that runs

    def observe(event, row):
        nonlocal traced
        if not first:
            return
        # Start as the first update is dispatched.
        if event == "dispatch" and first <= row["step"] <= last:
            if not traced:
                jax.profiler.start_trace(folder)
            traced = row["step"]
        # Stop once the last update is done, or the run.
        is_done = event in ("stop", "error") or (event == "step" and row["step"] >= last)
        if traced and is_done:
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(folder / f"memory_{traced}.prof")
            log(f"traced updates {first} to {traced} into {folder}")
            traced = 0
        if event == "error":
            folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.save_device_memory_profile(folder / "memory_at_failure.prof")

    return observe


# ---- utilization

def utilization(flops, recomputed, units_per_s, n_devices, peak_tflops):
    """{"model_tflops_per_device", "mfu", "hardware_tflops_per_device", "hfu"} of a run.

    flops: of the model for one unit (a token, an example). recomputed: those that remat computes
    again; only the hardware figures count them. peak_tflops: of one device, or None when it is not
    known. mfu and hfu are fractions of this peak, or None.
    """
    scale = units_per_s / n_devices / 1e12
    model_tflops = flops * scale
    hardware_tflops = (flops + recomputed) * scale
    mfu, hfu = None, None
    if peak_tflops:
        mfu = model_tflops / peak_tflops
        hfu = hardware_tflops / peak_tflops
    return {"model_tflops_per_device": model_tflops, "mfu": mfu,
            "hardware_tflops_per_device": hardware_tflops, "hfu": hfu}


# ---- compilation cache

def enable_compilation_cache(folder):
    """Have JAX keep compiled programs in this folder; "" for none. Raises OSError when the folder
    cannot be made.
    """
    if folder:
        folder = os.path.abspath(os.path.expanduser(folder))
        os.makedirs(folder, exist_ok=True)
    compilation_cache.reset_cache()  # JAX otherwise stays with a process's first folder
    jax.config.update("jax_compilation_cache_dir", folder or None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


# ---- digest of the state

def digest_sums(state):
    """{"params": {name: sums}, "opt": {name: sums}}, where sums are two uint32 of an array: sums
    over its elements of a hash of an element's bits and its position.

    Integer sums do not depend on their order, so neither the mesh nor the device changes them. The
    hash of a position is one-to-one in the bits, so that a change of a single element changes both
    sums; several changes cancel with probability 2^-64.
    """
    def mixed(x):  # the finalizer of MurmurHash3
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    def sums(x):
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            x = jnp.stack([x.real, x.imag], axis=-1)
        if x.dtype.name.startswith(("int2", "int4", "uint2", "uint4", "float4")):
            x = x.astype(jnp.float32)  # which is exact; a byte cannot be made of them
        n_bits = min(8 * x.dtype.itemsize, 32)
        if x.dtype != bool:  # 64 bits become two of 32, along a new last dim
            x = jax.lax.bitcast_convert_type(x, f"uint{n_bits}")
        bits = x.astype(jnp.uint32)
        index = jnp.zeros(bits.shape, jnp.uint32)
        for dim, size in enumerate(bits.shape):
            index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(
                jnp.uint32, bits.shape, dim)
        hashes = [mixed(bits + mixed(index ^ jnp.uint32(seed)))
                  for seed in (0x5BD1E995, 0x9E3779B9)]
        return jnp.stack([hashed.sum(dtype=jnp.uint32) for hashed in hashes])

    named = {}
    for part in ("params", "opt"):
        leaves, _ = jax.tree_util.tree_flatten_with_path(state[part])
        named[part] = {jax.tree_util.keystr(path, simple=True, separator="/"): sums(x)
                       for path, x in leaves}
    return named


def digest(sums):
    """{"params", "opt"}: 16 hexadecimal digits of what digest_sums returns. Two states with equal
    names, shapes, dtypes and bits have equal digests; others almost never.
    """
    digests = {}
    for part, named in jax.device_get(sums).items():
        text = hashlib.blake2b(digest_size=8)
        for name in sorted(named):
            text.update(f"{name} {named[name].tolist()}\n".encode())
        digests[part] = text.hexdigest()
    return digests


# Names in metrics and in rows of metrics.jsonl that are not the loss's to give.
RESERVED_METRICS = {"step", "event", "lr", "grad_norm", "skipped", "finite", "loss_scale", "watch",
            "counts"}


def check_shapes(table, mesh):
    """Faults, in words, of parameters whose dims the mesh cannot split evenly."""
    faults = []
    for name, row in table.items():
        for n, axes in zip(row["shape"], row["spec"], strict=False):
            ways = prod(mesh.shape[a] for a in jax.tree.leaves(axes))
            if n % ways:
                faults.append(
                    f"{name} {row['shape']}: dim {n} cannot be split over {axes}={ways}; "
                    f"nearest: {n // ways * ways or ways} or {-(-n // ways) * ways}")
    return faults


# Of one device: dense bfloat16 TFLOP/s, GiB of memory for a program. Source: the makers' data
# sheets; memory of TPUs, XLA.
PEAKS = {"NVIDIA A100": (312, 80), "NVIDIA H100": (989, 80), "NVIDIA H200": (989, 141),
         "NVIDIA B200": (2250, 178), "TPU v4": (275, 30.75), "TPU v5 lite": (197, 15.75),
         "TPU v5": (459, 95), "TPU v6": (918, 31.25)}


def peaks(kind):
    """The row of PEAKS of a device of this kind, or Nones."""
    return next((row for name, row in PEAKS.items() if kind.startswith(name)), (None, None))


def memory_by_kind(state, compiled):
    """Bytes per device of a compiled train_step, by kind; "total" is what must fit in the device's
    memory. state: shapes with shardings.
    """
    def size(tree, on_host):
        return sum(_shard_bytes(x) for x in jax.tree.leaves(tree)
                   if (x.sharding.memory_kind == "pinned_host") == on_host)

    stats = compiled.memory_analysis()
    kinds = {"parameters": size(state["params"], False), "moments": size(state["opt"], False),
             "moments in host memory": size(state["opt"], True),
             "temporaries": stats.temp_size_in_bytes,
             "temporaries in host memory": stats.host_temp_size_in_bytes}
    total = (stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes
             - stats.alias_size_in_bytes)
    return {kind: n for kind, n in kinds.items() if n} | {"total": total}


def held_bytes(tree):
    """Bytes on each device of arrays given as shapes with shardings. A CPU's host memory is its
    device's.
    """
    def is_held(sharding):
        platform = next(iter(sharding.device_set)).platform
        return sharding.memory_kind != "pinned_host" or platform == "cpu"

    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if is_held(x.sharding))


def _shard_bytes(x):
    return prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def added_bytes(compiled):
    """Bytes per device that a compiled program takes beside its arguments, while it runs."""
    stats = compiled.memory_analysis()
    return stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes


def memory_limit(mesh):
    """Bytes that a program can have on each device, of a CPU's memory a share; None when unknown.
    """
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(jax.local_devices())
    with contextlib.suppress(jax.errors.JaxRuntimeError, AttributeError, TypeError, KeyError):
        return device.memory_stats()["bytes_limit"]
    gib = peaks(device.device_kind)[1]
    return gib and int(gib * 2**30)


def check_fits(kinds, mesh, what="an update"):
    """Raise MemoryError when `what` needs more memory than a device has: what it needs, and what
    to change when nothing but more devices can help. kinds: of memory_by_kind.
    """
    if (limit := memory_limit(mesh)) and kinds["total"] > limit:
        needs, has = kinds["total"] / 2**30, limit / 2**30
        words = [f"{what} needs {needs:,.4g} GiB on each device, which has {has:,.4g} GiB"]
        state_bytes = kinds["parameters"] + kinds.get("moments", 0)
        if kinds["parameters"] > limit:
            words.append("more devices along fsdp or tp: parameters alone take "
                         f"{kinds['parameters'] / 2**30:,.4g} GiB")
        elif state_bytes > limit:
            words.append("more devices along fsdp or tp, or --offload_optimizer: parameters and "
                         f"moments alone take {state_bytes / 2**30:,.4g} GiB")
        raise MemoryError(*words)


# ---- memory

# How check_fits names a program.
PROGRAM_NAMES = {"update": "an update", "export": "an export"}

MORE_DEVICES = "more devices along tp or sp"

# A flag is worth its time when it lowers the excess over the limit by more than one percent.
WORTH_IT = 0.99
# Sizes of a batch that are tried before the search gives up.
N_TRIALS = 3


def count_memory(state, programs, batch, added=None, options=None):
    """Compile programs, and count the bytes that a device holds while each of them runs.

    state, batch: shapes with shardings. programs: {program: lowered}. "update" and "evaluation" are
    programs of lower_steps, all others are the task's. Without "update" nothing is trained, so a
    device holds only the parameters of the state. added: {program: bytes} that the task's programs
    take beside the state, if they were counted before. options: of the compiler.

    Returns {"peaks": {program: bytes}, "memory": memory_by_kind of the update or, without one, the
    parameters and the total, "added": {program: bytes} of the task's programs, "programs":
    {program: compiled}, "compiled": the update, if there is one}.
    """
    with ThreadPoolExecutor() as pool:  # XLA compiles without Python's lock
        futures = {name: pool.submit(each.compile, options) for name, each in programs.items()}
    compiled = {name: future.result() for name, future in futures.items()}

    # What the task's programs take beside the state.
    if added is None:
        added = {}
        for name in compiled:
            if name not in ("update", "evaluation"):
                added[name] = added_bytes(compiled[name])

    # The peak of each program: the arrays that are held, and what the program adds to them.
    training = "update" in compiled
    held = state if training else state["params"]
    peaks = {}
    if training:
        memory = memory_by_kind(state, compiled["update"])
        peaks["update"] = memory["total"]
    if "evaluation" in compiled:
        peaks["evaluation"] = held_bytes((held, batch)) + added_bytes(compiled["evaluation"])
    for name, n_bytes in added.items():
        peaks[name] = held_bytes(held) + n_bytes
    if not training:
        memory = {"parameters": held_bytes(held), "total": max(peaks.values(), default=0)}

    cost = {"peaks": peaks, "memory": memory, "added": added, "programs": compiled}
    if training:
        cost["compiled"] = compiled["update"]
    return cost


def count_or_none(count):
    """Return count(), or None when a program in it cannot be compiled."""
    with contextlib.suppress(ValueError, MemoryError, jax.errors.JaxRuntimeError):
        return count()


def quick_options(device):
    """Options of the compiler for a program that is counted but never runs."""
    return {"xla_backend_optimization_level": 0} if device.platform == "cpu" else None


def check_peaks(cost, mesh):
    """Raise MemoryError when the largest program of count_memory does not fit."""
    peaks = cost["peaks"]
    if peaks:
        name = max(peaks, key=peaks.get)
        kinds = cost["memory"] | {"total": peaks[name]}
        check_fits(kinds, mesh, PROGRAM_NAMES.get(name, name))


@contextlib.contextmanager
def explain_oom(suggest):
    """Turn an error for lack of memory, from a compilation or a run, into a ValueError that says
    what to change. suggest: a function without arguments that returns this advice. It is called
    only when the error brings no advice of its own.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as e:
        if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        # The arguments of check_fits: the reason and, in some cases, the advice.
        reason, advice = "", ""
        if e.args:
            reason = str(e.args[0]).partition("\n")[0]
        if len(e.args) > 1:
            advice = str(e.args[1])
        if not advice:
            advice = suggest()
        raise ValueError(f"does not fit: {reason}; to change: {advice}") from None


def memory_flags(cfg, mesh, savers):
    """Flags not set yet that lower the memory of an update. savers: those of the model."""
    rows = prod(mesh.shape[a] for a in ("dp", "fsdp", "ep"))
    more = cfg.batch_size // rows % (2 * cfg.grad_accum_steps) == 0
    micro = [f"--grad_accum_steps {2 * cfg.grad_accum_steps}"] if more else []
    host = [] if cfg.offload_optimizer else ["--offload_optimizer"]
    return [*micro, *savers, *host]


def suggest_memory_flags(cfg, mesh, flags, peaks, count):
    """Suggest how to make a run fit: flags that are enough together, or a smaller batch.

    The search starts with microbatches of one row, which save the most memory. It adds the other
    flags in their order, and keeps those that help, until the run fits. If the run fits, the search
    looks for the largest microbatch that is enough. If no flags are enough, it looks for the
    largest batch with which they are.

    flags: "--field value", the cheapest in time first. peaks: {program: bytes} of the run as it is,
    or {} when it cannot be compiled. count(changes): the same with {field: value} changed; it is
    called about a dozen times.
    """
    limit = _limit_to_reach(memory_limit(mesh), peaks)

    # Rows on a device: those of the batch, and those of a microbatch.
    rows = cfg.batch_size // prod(mesh.shape[a] for a in ("dp", "fsdp", "ep"))
    micro_rows = rows // cfg.grad_accum_steps

    # Combine flags until the run fits.
    flags = [flag for flag in flags if "--grad_accum_steps" not in flag]
    if micro_rows > 1:
        flags = [f"--grad_accum_steps {rows}", *flags]
    changes, changed_peaks = _combine(flags, cfg, peaks, count, limit)
    if _excess(changed_peaks, limit):
        return _smaller_batch(cfg, rows, changes, changed_peaks, count, limit)
    if "grad_accum_steps" not in changes:
        return _as_flags(changes, changed_peaks)

    # Perhaps the other flags are enough without more microbatches.
    others = {name: value for name, value in changes.items() if name != "grad_accum_steps"}
    unsplit_peaks = count(others) if others else peaks
    if not _excess(unsplit_peaks, limit):
        return _as_flags(others, unsplit_peaks)

    # Find the largest microbatch, since fewer microbatches take less time.
    by_micro_rows = {}
    for n in range(1, micro_rows):
        if rows % n == 0:
            by_micro_rows[n] = changes | {"grad_accum_steps": rows // n}
    fits, too_large = (1, changed_peaks), (micro_rows, unsplit_peaks)
    n, found_peaks = _largest_fitting(by_micro_rows, fits, too_large, count, limit)
    words = _as_flags(by_micro_rows[n], found_peaks)
    if others:
        return words

    # Where microbatches alone are enough, a smaller batch without them may be wanted instead. With
    # n rows in a microbatch it takes what the batch takes with n rows in each of its microbatches.
    by_batch_rows = {}
    for n in range(1, micro_rows):
        by_batch_rows[n] = {"batch_size": n * (cfg.batch_size // micro_rows)}
    n, found_peaks = _largest_fitting(by_batch_rows, fits, too_large, count, limit)
    if n == 1:
        return words
    return f"{words}, or {_as_flags(by_batch_rows[n], found_peaks)}"


def _limit_to_reach(limit, peaks):
    """Bytes to stay below. A run that ran out of memory although it seemed to fit, or on a device
    of unknown memory, has to save a tenth.
    """
    peak = _largest(peaks)
    if not limit:
        limit = inf
    return limit if peak > limit else 0.9 * peak


def _combine(flags, cfg, peaks, count, limit):
    """Add up flags until the run fits: ({field: value} of those that help, peaks with them)."""
    changes = {}
    for flag in flags:
        with_flag = changes | _as_changes(flag, cfg)
        new_peaks = count(with_flag)
        helps = _excess(new_peaks, limit) < WORTH_IT * _excess(peaks, limit)
        # A run that cannot be compiled yet may need this flag and another one.
        if helps or not (new_peaks or peaks):
            changes, peaks = with_flag, new_peaks
        if not _excess(peaks, limit):
            break
    return changes, peaks


def _smaller_batch(cfg, rows, changes, peaks, count, limit):
    """Advice for a run that no flags make fit at its batch size: how much is missing, and the
    largest batch size that fits. changes, peaks: the flags, and the bytes with them. rows: of the
    batch, on a device.
    """
    words = "no flag is enough"
    if changes:
        missing = (_largest(peaks) - limit) / 2**30
        words = f"{_as_flags(changes, peaks)} is {missing:,.4g} GiB too much"

    # A batch of n rows on each device, each row a microbatch.
    by_rows = {}
    for n in range(1, rows):
        smaller = {"batch_size": n * (cfg.batch_size // rows), "grad_accum_steps": n}
        by_rows[n] = changes | smaller
    one_row_peaks = count(by_rows[1]) if rows > 1 else {}
    if _excess(one_row_peaks, limit):
        return f"{words}, and no batch size is small enough: {MORE_DEVICES}"
    n, found_peaks = _largest_fitting(by_rows, (1, one_row_peaks), (rows, peaks), count, limit)
    return f"{words}; with a smaller batch it fits: {_as_flags(by_rows[n], found_peaks)}"


def _largest_fitting(changes, fits, too_large, count, limit):
    """Find the largest size with which a run fits: (size, peaks).

    The bytes of a program are taken to lie on a straight line between a size that fits and one that
    is too large. The largest size below the crossing of line and limit is counted. If it does not
    fit, the next line ends there. After N_TRIALS lines the answer is the size known to fit.

    changes: {size: {field: value}} of the sizes to choose from. fits, too_large: (size, peaks).
    """
    for _ in range(N_TRIALS):
        bound = _size_at(limit, fits, too_large)
        sizes = [n for n in changes if fits[0] < n < too_large[0] and n <= bound]
        if not sizes:
            break
        size = max(sizes)
        peaks = count(changes[size])
        if not _excess(peaks, limit):
            return size, peaks
        too_large = size, peaks
    return fits


def _size_at(limit, fits, too_large):
    """The size at which the first program reaches the limit, on a straight line between two sizes;
    half of the size that is too large, if that cannot be compiled.
    """
    low, low_peaks = fits
    high, high_peaks = too_large
    bound = high if high_peaks else high / 2
    for name, n_bytes in high_peaks.items():
        if n_bytes > limit:
            growth = n_bytes - low_peaks[name]
            bound = min(bound, low + (limit - low_peaks[name]) * (high - low) / growth)
    return bound


def _largest(peaks):
    return max(peaks.values(), default=inf)


def _excess(peaks, limit):
    """Bytes above the limit, of all programs; infinite when they cannot be compiled."""
    if not peaks:
        return inf
    return sum(max(n_bytes - limit, 0) for n_bytes in peaks.values())


def _as_changes(flag, cfg):
    """{field: value} of "--field value", or of "--field" alone, which is True."""
    name, _, value = flag.removeprefix("--").partition(" ")
    return {name: type(getattr(cfg, name))(value) if value else True}


def _as_flags(changes, peaks):
    """The flags of {field: value}, and how much memory is needed with them."""
    flags = " ".join(f"--{name}" if value is True else f"--{name} {value}"
                     for name, value in changes.items())
    return f"{flags} ({_largest(peaks) / 2**30:,.4g} GiB)"


# ---- devices

def platform(device):
    """What dtype and attention are chosen by: "cuda" for an NVIDIA GPU of compute capability 8.0 or
    later, "old cuda" for an earlier one, which has no bfloat16; JAX's name for all others.
    """
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or not capability.replace(".", "").isdigit():
        return device.platform
    return "cuda" if float(capability) >= 8 else "old cuda"


def compiler_options(cfg, device):
    """Options of XLA for every program that runs on this kind of device.

    CPU: each matrix product is a fusion of its own. XLA's default fuses a product with the
    reduction that follows it, and some of these fusions return wrong numbers (jax 0.10 to 0.12):
    a batched product with a broadcast operand, then a sum. tests/test_step.py has the known forms.

    NVIDIA GPU with cfg.deterministic: no sums by atomics, whose order changes from run to run, as
    in the gradients of the embedding, of experts and of cuDNN's attention.
    """
    if device.platform == "cpu":
        return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
    if cfg.deterministic and platform(device).endswith("cuda"):
        return {"xla_gpu_exclude_nondeterministic_ops": True}
    return {}


def describe_machine(device):
    """{"cpu", "threads", "driver", "nccl"}. With the versions and the mesh these decide how a
    program rounds. cpu: model, family and stepping. threads: number that this process may use.
    driver, nccl: versions, or None without an NVIDIA GPU.
    """
    cpu, driver, nccl = os.uname().machine, None, None
    info = Path("/proc/cpuinfo")
    if info.exists():
        rows = [line.partition(":") for line in info.read_text().split("\n\n")[0].splitlines()]
        fields = {name.strip(): value.strip() for name, _, value in rows}
        wanted = ("model name", "cpu family", "model", "stepping")
        cpu = ", ".join(f"{name} {fields[name]}" for name in wanted if name in fields) or cpu
    # Linux has affinity, a Mac has not.
    affinity = getattr(os, "sched_getaffinity", None)
    threads = len(affinity(0)) if affinity else os.cpu_count()
    if platform(device).endswith("cuda"):
        driver_file = Path("/proc/driver/nvidia/version")
        if driver_file.exists():
            driver = driver_file.read_text().splitlines()[0]
        for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                nccl = importlib.metadata.version(package)
    return {"cpu": cpu, "threads": threads, "driver": driver, "nccl": nccl}


def choose_dtype(dtype, platform):
    """dtype, with "auto" resolved to the fastest that the platform computes in: on a CPU "mixed" if
    it has AMX, or AVX512_BF16 and is AMD's: Intel's multiplies float32 twice as fast as that.
    """
    words = Path("/proc/cpuinfo")
    has = {*words.read_text().split()} if words.exists() else set()
    mixed = "amx_bf16" in has or {"AuthenticAMD", "avx512_bf16"} <= has
    fastest = {"cpu": "mixed" if mixed else "float32", "old cuda": "float16"}
    return fastest.get(platform, "bfloat16") if dtype == "auto" else dtype
