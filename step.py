# SPDX-License-Identifier: Apache-2.0
"""The compiled training step, and the mesh for which it is compiled.

Owns gradients, accumulation, clipping, optimizers, schedules, shardings and the programs made of
them. Knows no model: loss_fn, init_fn and the parameter table {name: {"shape", "spec", "init",
"trained"}} are arguments. `cfg`: a Config, or any object with the fields that are read here.
Invariant: one call of `train_step` is one step; rate and data depend only on the step.
"""
import contextlib
import dataclasses
import hashlib
import inspect
import os
import re
import resource
import socket
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, update_wrapper
from math import cos, inf, pi, prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax._src import distributed
from jax.experimental import mesh_utils
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

# ---- the training step

def train_step(state, batch, lr, cfg, loss_fn, optimizer, table, loss_scale=1.0):
    """Take one step with the learning rate lr (see lr_at): (state, metrics).

    Metrics are float32: "sums", {name: (sum, count)} of the loss; "lr"; "grad_norm" before
    clipping; "finite"; "skipped", the number of steps so far that were not finite; and "watch", the
    result of weight_stats.

    A loss or gradient that is not finite leaves parameters and moments as they were. The step still
    counts, since its batch is spent. loss_scale: of fp16_train_step.
    """
    old_params = _trained(state["params"], table)
    old_opt = state["opt"]

    # Random keys of the rows, for a loss that takes them.
    options = {}
    if takes(loss_fn, "train_keys"):
        options["train_keys"] = make_train_keys(state["step"], batch, cfg.seed)

    # Sum the loss and its gradient over the microbatches.
    with jax.named_scope("gradients"):
        sums, counts, grads = _sum_gradients(
            state["params"], batch, options, cfg, loss_fn, loss_scale, table)

    # The gradient of the mean objective: divide once, after all microbatches.
    n = counts["objective"]
    divisor = jnp.where(n == 0, 1, n)
    grads = jax.tree.map(lambda g: g / (loss_scale * divisor), grads)
    grad_norm = optax.tree.norm(grads)
    metrics = {"sums": _pairs(sums, counts), "lr": lr, "grad_norm": grad_norm}

    # Optional: weight statistics of --watch: the weights of step k, the gradient of batch k.
    if cfg.watch and cfg.log_every:
        metrics["watch"] = weight_stats(state["step"] + 1, state["params"], grads, cfg)

    # Clip the gradient to a global norm.
    if cfg.clip_norm:
        with jax.named_scope("clip"):
            clip = jnp.minimum(1.0, cfg.clip_norm / (grad_norm + 1e-30))
            grads = jax.tree.map(lambda g: g * clip, grads)

    # Subtract lr times the optimizer's direction. The move is computed in float32.
    with jax.named_scope("optimizer"):
        directions, new_opt = optimizer.update(grads, old_opt, _f32(old_params))
        new_params = jax.tree.map(
            lambda p, direction: p.astype(jnp.float32) - lr * direction, old_params, directions)
        # Optional: parameters in bfloat16.
        if any(p.dtype == jnp.bfloat16 for p in old_params.values()):
            new_params = round_stochastically(new_params, state["step"], cfg.seed)

    # Keep the old parameters and moments if the loss or the gradient is not finite.
    finite = jnp.isfinite(sums["objective"]) & jnp.isfinite(grad_norm)
    new_if_finite = partial(jnp.where, finite)
    new_params = jax.tree.map(new_if_finite, new_params, old_params)
    new_opt = jax.tree.map(new_if_finite, new_opt, old_opt)
    n_skipped = state["skipped"] + jnp.where(finite, 0, 1)

    # fp16_train_step adds "scale".
    new_state = {"step": state["step"] + 1, "params": state["params"] | new_params,
                 "opt": new_opt, "skipped": n_skipped}
    metrics |= {"finite": finite, "skipped": n_skipped}
    return new_state, jax.tree.map(jnp.float32, metrics)


# ---- gradients

def _sum_gradients(params, batch, options, cfg, loss_fn, loss_scale, table):
    """The loss's sums and counts, and the gradient of its summed objective times loss_scale.

    The gradient is float32 and has the trained parameters only. options: further arguments of the
    loss, with an entry for each row.
    """
    def microbatch_grads(microbatch):
        examples, example_options = microbatch

        def objective(trained):
            sums, counts = loss_fn(params | trained, examples, cfg, **example_options)
            return sums["objective"] * loss_scale, (sums, counts)

        grad_fn = jax.value_and_grad(objective, has_aux=True)
        (_, (sums, counts)), grads = grad_fn(_trained(params, table))
        return (sums, counts, _f32(_shard_like_moments(grads, table))), None

    total, _ = _sum_over_microbatches(microbatch_grads, (batch, options), cfg.grad_accum_steps)
    return total


def _sum_over_microbatches(f, batch, A):
    """f of A microbatches of a batch, one after the other: (sums, values of the rows).

    f(microbatch): (a tree to add up, a tree of arrays with an entry for each row, or None).
    """
    if A == 1:
        return f(batch)

    def split(x):
        # Row b goes to microbatch b mod A: no row leaves its device, since each device has
        # consecutive rows, and so a part of every microbatch.
        return jnp.moveaxis(x.reshape(-1, A, *x.shape[1:]), 1, 0)

    def add(total, microbatch):
        sums, values = f(microbatch)
        return jax.tree.map(jnp.add, total, sums), values

    microbatches = jax.tree.map(split, batch)
    shapes, _ = jax.eval_shape(f, jax.tree.map(lambda x: x[0], microbatches))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    total, values = jax.lax.scan(add, zeros, microbatches)
    # Values get the order of the batch again.
    return total, jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), values)


# ---- learning rate

def lr_at(step, cfg):
    """The learning rate of the step from `step` to `step + 1`, on the host: it rises linearly to
    its peak, then follows cfg.schedule.
    """
    peak = DEFAULT_LR[cfg.optimizer] if cfg.lr == -1 else cfg.lr
    n_warmup = warmup_steps(cfg)
    if step < n_warmup:
        return peak * (step + 1) / n_warmup
    n_after_warmup = step - n_warmup
    progress = min(n_after_warmup / max(cfg.steps - n_warmup, 1), 1)
    # A schedule goes from 1 to 0, which means from the peak to min_lr_frac of the peak.
    decay = SCHEDULES[cfg.schedule](cfg, progress, n_after_warmup)
    return peak * (cfg.min_lr_frac + (1 - cfg.min_lr_frac) * decay)


# ---- the optimizer

def make_optimizer(cfg, table):
    """Make the optax optimizer of the trained parameters.

    Its update is a direction: train_step subtracts lr times it. A row of the table may have an
    "optimizer", an "lr_mult" and a "decay_mult". Biases and gains have no decay by default.
    """
    kinds, decays, rates = {}, {}, {}
    for name, row in _trained(table, table).items():
        chosen = row.get("optimizer", cfg.optimizer)
        is_matrix = row["init"][0] == "normal"
        decays[name] = cfg.weight_decay * row.get("decay_mult", float(is_matrix))
        rates[name] = row.get("lr_mult", 1.0)
        if cfg.lr == -1:  # each optimizer has its own default rate
            rates[name] *= DEFAULT_LR[chosen] / DEFAULT_LR[cfg.optimizer]

        # Muon is for stacks of matrices, one per layer; AdamW, with Muon's rate, for the rest.
        is_stack = is_matrix and len(row["shape"]) > 2
        kinds[name] = "adamw" if chosen == "muon" and not is_stack else chosen

    def decay_and_scale(directions, params):
        updates = {}
        for name, direction in directions.items():
            if decays[name]:
                direction = direction + decays[name] * params[name]
            updates[name] = rates[name] * direction
        return updates

    # One optax optimizer for each kind in use.
    optimizers = {kind: OPTIMIZERS[kind](cfg) for kind in sorted(set(kinds.values()))}
    # Optional: Adafactor treats each matrix or vector of a stack separately.
    if "adafactor" in optimizers:
        optimizers["adafactor"] = _unstacked(optimizers["adafactor"], table)
    if len(optimizers) == 1:
        (optimizer,) = optimizers.values()
    else:
        optimizer = optax.partition(optimizers, kinds)
    return optax.chain(optimizer, optax.stateless(decay_and_scale))


# ---- evaluation

def eval_step(params, batch, cfg, loss_fn):
    """{name: (sum, count)} of one batch, with microbatches as in train_step. If the loss also
    returns a dict of values per example: (the pairs, that dict).
    """
    def microbatch_sums(microbatch):
        sums, counts, *examples = loss_fn(params, microbatch, cfg)
        return (sums, counts), examples

    (sums, counts), examples = _sum_over_microbatches(microbatch_sums, batch, cfg.grad_accum_steps)
    pairs = _pairs(sums, counts)
    return (pairs, *examples) if examples else pairs


# ---- mesh

# As in config.AXES; repeated, so that this file works alone.
AXES = ("dp", "fsdp", "ep", "tp", "sp")
BATCH_AXES = AXES[:3]  # split the examples of a batch


def make_mesh(cfg, devices=None):
    """Make a mesh of all devices over AXES. One size in cfg may be -1.

    cfg.slices is the number of groups of devices with a slow network between them, which split dp,
    or fsdp where dp is 1. Raises ValueError when a TPU has another number of slices.
    """
    if devices is None:
        devices = jax.devices()
    devices = np.array(devices)

    # A size of -1 takes the devices that the other axes leave.
    sizes = {axis: getattr(cfg, axis) for axis in AXES}
    n_taken = prod(n for n in sizes.values() if n != -1)
    for axis, n in sizes.items():
        if n == -1:
            sizes[axis] = len(devices) // n_taken

    # The devices as an array with a dim for each axis.
    grid = _device_grid(devices, sizes, cfg)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


# ---- state and shardings

def init_state(key, cfg, init_fn, optimizer, table, params=None):
    """The initial state {"step", "params", "opt", "skipped"}; with float16 also "scale".

    Only trained parameters have moments. params: values that replace those of init_fn.
    """
    values = init_fn(key, cfg) | (params or {})
    for name, x in values.items():
        assert x.shape == (*table[name]["shape"],), f"init: {name} is {x.shape}, unlike its row"
    zero = jnp.zeros((), jnp.int32)
    opt = optimizer.init(_f32(_trained(values, table)))
    state = {"step": zero, "params": values, "opt": opt, "skipped": zero}
    # Optional: loss scaling for float16.
    if cfg.dtype == "float16":
        state["scale"] = init_loss_scale()
    return state


def state_shardings(state, table, mesh, moment_memory=None):
    """The shardings of a state.

    A parameter has its spec. All else with the name and the shape of a parameter, such as its
    moments, is also split over dp, see moment_specs; moments lie in moment_memory (default: the
    device's memory). What is left is replicated.
    """
    specs = moment_specs(table, mesh)

    def leaf_sharding(path, x):
        # The parameter's name is in the path of the leaf; a count of steps has none.
        entry, *keys = [getattr(part, "key", None) for part in path]
        name = next((key for key in keys if key in table), None)
        if name is None or x.shape != state["params"][name].shape:
            return NamedSharding(mesh, P())
        if entry == "params":
            return NamedSharding(mesh, table[name]["spec"])
        memory = moment_memory if entry == "opt" else None
        return NamedSharding(mesh, specs[name], memory_kind=memory)

    return jax.tree_util.tree_map_with_path(leaf_sharding, state)


# ---- compilation

def lower_steps(cfg, mesh, table, loss_fn, init_fn, batch, override=lambda name, value: value,
                evaluation=None):
    """Prepare the programs of a run over a mesh, from shapes: no array is allocated.

    batch: {name: ShapeDtypeStruct with a sharding}. override(name, value) is called with the
    "loss_fn", the "optimizer" (optax) and the "train_step", a function (state, batch, lr) ->
    (state, metrics), and returns the value to use. evaluation: {"cfg", "batch"} of eval_step, by
    default those of train_step.

    Returns a dict: "state", shapes with shardings; "lower_train_step" and "lower_eval_step", which
    trace and lower a program when they are called; the jitted "init", (key, params=) -> state, and
    "digest", state -> digest_sums; "batch", "eval_batch" and "mesh".
    """
    evaluation = evaluation or {"cfg": cfg, "batch": batch}

    # Bind all arguments that are not arrays.
    loss_fn = override("loss_fn", loss_fn)
    optimizer = override("optimizer", make_optimizer(cfg, table))
    step_fn = fp16_train_step if cfg.dtype == "float16" else train_step
    step_fn = override("train_step", partial(
        step_fn, cfg=cfg, loss_fn=loss_fn, optimizer=optimizer, table=table))
    eval_fn = partial(eval_step, cfg=evaluation["cfg"], loss_fn=loss_fn)
    init = partial(init_state, cfg=cfg, init_fn=init_fn, optimizer=optimizer, table=table)
    digest_fn = digest_sums

    # The state: shapes, and where each device keeps its part of them.
    shapes = jax.eval_shape(lambda: init(jax.random.key(0)))
    shardings = state_shardings(shapes, table, mesh)
    # Optional: moments in host memory are copied to the device for each program that reads them.
    if cfg.offload_optimizer:
        step_fn = opt_from_host(step_fn, shardings["opt"])
        digest_fn = opt_from_host(digest_fn, shardings["opt"])
        shardings = state_shardings(shapes, table, mesh, "pinned_host")
    state = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings)
    replicated = NamedSharding(mesh, P())
    lr = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)

    # A step writes the new state into the memory of the old one, which it is given.
    jit = partial(jax.jit, compiler_options=compiler_options(cfg, mesh.devices.flat[0]))
    jitted_step = jit(step_fn, donate_argnums=0, out_shardings=(shardings, replicated))
    jitted_eval = jit(eval_fn, out_shardings=replicated)

    def lower(jitted, *args):
        with jax.set_mesh(mesh):
            return jitted.lower(*args)

    return {
        "state": state,
        "lower_train_step": partial(lower, jitted_step, state, batch, lr),
        "lower_eval_step": partial(lower, jitted_eval, state["params"], evaluation["batch"]),
        "init": jit(init, donate_argnames="params", out_shardings=shardings),
        "digest": jit(digest_fn, out_shardings=replicated),
        "batch": batch,
        "eval_batch": evaluation["batch"],
        "mesh": mesh,
    }


# ---- supporting
#
# Most runs use these, but a first reading can skip them. In this order: schedules, optimizers,
# parts of the state, parts of a step, shapes and slices, evaluation of several batches, programs of
# a run, devices, memory, digest of the state, peak figures of devices, description of the machine.


# ---- schedules

def warmup_steps(cfg):
    """The number of warm-up steps. A field below 1 is a fraction of cfg.steps."""
    if cfg.warmup_steps < 1:
        return round(cfg.warmup_steps * cfg.steps)
    return round(cfg.warmup_steps)


# Each schedule returns a number from 1 to 0, which lr_at maps to peak ... min_lr_frac x peak.
# progress goes from 0 at the end of warm-up to 1 at the last step, n counts the steps since the end
# of warm-up.

def _warmup_stable_decay(cfg, progress, n):
    n_rest = max(cfg.steps - warmup_steps(cfg), 1)
    n_decay = min(cfg.decay_frac * cfg.steps, n_rest)
    return min((1 - progress) * n_rest / n_decay, 1)


SCHEDULES = {
    "constant": lambda cfg, progress, n: 1.0,
    "linear": lambda cfg, progress, n: 1 - progress,
    "cosine": lambda cfg, progress, n: 0.5 * (1 + cos(pi * progress)),
    "polynomial": lambda cfg, progress, n: (1 - progress) ** cfg.poly_power,
    "inverse_sqrt": lambda cfg, progress, n: (1 + n / max(warmup_steps(cfg), 1)) ** -0.5,
    "wsd": _warmup_stable_decay,
}


# ---- optimizers

# Each optimizer turns a gradient into a direction; train_step subtracts lr times it. Weight decay
# is applied to all of them alike, by make_optimizer.

def _unstacked(optimizer, table):
    """An optax optimizer that treats each matrix (init "normal") or vector of a stack as a separate
    parameter: layers and experts share neither factors nor norms.
    """
    def over_stack(f, path, shape):
        n_dims = 2 if table[path[-1].key]["init"][0] == "normal" else 1
        for _ in shape[n_dims:]:
            f = jax.vmap(f)
        return f

    def init(params):
        def init_one(path, p):
            return over_stack(optimizer.init, path, p.shape)(p)

        return jax.tree_util.tree_map_with_path(init_one, params)

    def update(grads, state, params):
        def update_one(path, g, one_state, p):
            return over_stack(optimizer.update, path, g.shape)(g, one_state, p)

        results = jax.tree_util.tree_map_with_path(update_one, grads, state, params)
        directions = jax.tree.map(lambda _, result: result[0], grads, results)
        new_state = jax.tree.map(lambda _, result: result[1], grads, results)
        return directions, new_state

    return optax.GradientTransformation(init, update)


def _muon(cfg):
    """Muon at the size of Adam's direction, so that both can share a learning rate.

    Nesterov momentum, orthogonalized; then rows, then columns, are normalized to equal RMS.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; size, Liu et al. 2025,
    arXiv:2502.16982, equation 4; rows and columns, Zhang et al. 2026, arXiv:2602.21545.
    """
    dtype = jnp.bfloat16 if cfg.dtype in ("bfloat16", "mixed") else jnp.float32
    return optax.chain(
        optax.trace(cfg.b1, nesterov=True, accumulator_dtype=cfg.moment_dtype),
        optax.stateless_with_tree_map(lambda u, _: _orthogonalize(u, dtype)),
        optax.stateless_with_tree_map(_balance_rows_and_columns))


def _orthogonalize(u, dtype):
    """U V^T of each matrix U S V^T in the last two dims of u, with singular values near 1.

    Five Newton-Schulz iterations with Jordan's coefficients bring singular values above a hundredth
    of the Frobenius norm to between 0.7 and 1.2. dtype: of the operands of the products.
    """
    # An einsum, since XLA on a CPU multiplies x @ x.mT in float32.
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    is_tall = u.shape[-2] > u.shape[-1]
    x = u.mT if is_tall else u
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    identity = jnp.broadcast_to(jnp.eye(x.shape[-2]), (*x.shape[:-1], x.shape[-2]))
    for _ in range(5):
        x = x.astype(dtype)
        gram = product("...ik,...jk->...ij", x, x)
        narrow_gram = gram.astype(dtype)
        square = product("...ik,...kj->...ij", narrow_gram, narrow_gram)
        # With the identity in the polynomial, x is read by products alone. On a CPU this takes two
        # thirds of the time of optax's form, which adds a x + (b gram + c gram^2) x.
        polynomial = 3.4445 * identity - 4.7750 * gram + 2.0315 * square
        x = product("...ik,...kj->...ij", polynomial.astype(dtype), x)
    # Without the barrier XLA on a CPU writes the last product transposed, and has no kernel.
    return jax.lax.optimization_barrier(x).mT if is_tall else x


def _balance_rows_and_columns(u, _):
    def rms(x, axis):
        return jnp.sqrt(jnp.mean(x**2, axis, keepdims=True) + 1e-12)

    size = 0.2 * max(u.shape[-2:]) ** 0.5 * rms(u, (-2, -1))
    rows = u / rms(u, -1)
    return size * rows / rms(rows, -2)


OPTIMIZERS = {
    "adamw": lambda cfg: optax.scale_by_adam(
        cfg.b1, cfg.b2, cfg.eps, mu_dtype=cfg.moment_dtype),
    # Without a first moment.
    "adafactor": lambda cfg: optax.chain(
        optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
    "lion": lambda cfg: optax.scale_by_lion(cfg.b1, cfg.b2, mu_dtype=cfg.moment_dtype),
    "muon": _muon,
    "rmsprop": lambda cfg: optax.scale_by_rms(cfg.b2, cfg.eps, eps_in_sqrt=False),
    "sgd": lambda cfg: optax.trace(cfg.b1, accumulator_dtype=cfg.moment_dtype),
}

# The peak learning rate of each optimizer where cfg.lr is -1. Muon's rate also applies to the AdamW
# that updates the other parameters.
DEFAULT_LR = {
    "adamw": 2e-3,
    "adafactor": 3e-3,
    "lion": 5e-4,
    "muon": 1e-2,
    "rmsprop": 2e-3,
    "sgd": 0.1,
}


# ---- parts of the state

def _trained(params, table):
    """The entries of a dict by parameter, also of the table itself, that are trained."""
    return {name: x for name, x in params.items() if table[name].get("trained", True)}


def _f32(tree):
    return optax.tree.cast(tree, jnp.float32)


def replicate(x, mesh):
    """A number as a float32 array on all devices of a mesh, including those of other hosts."""
    return jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda _: np.float32(x))


def moment_specs(table, mesh):
    """{name: spec} of moments and gradients.

    The spec is the parameter's, but dims that are split over fsdp are also split over dp where
    divisible. So dp is ZeRO-2, and fsdp is ZeRO-3.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
    """
    def with_dp(n, axes):
        names = (*jax.tree.leaves(axes), "dp")
        if "fsdp" in names and n % prod(mesh.shape[axis] for axis in names) == 0:
            return names
        return axes

    specs = {}
    for name, row in table.items():
        dims = zip(row["shape"], row["spec"], strict=False)  # a spec may be shorter than a shape
        specs[name] = P(*[with_dp(n, axes) for n, axes in dims])
    return specs


def _shard_like_moments(grads, table):
    """Split each gradient as its moments: a reduce-scatter, each device sums only its part."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return grads
    return jax.lax.with_sharding_constraint(grads, moment_specs(_trained(table, table), mesh))


# ---- parts of a step

# Names of other values in the rows of metrics.jsonl.
ROW_NAMES = {"event", "step", "lr", "grad_norm", "finite", "skipped", "n_labels", "loss_scale",
             "watch"}


def _pairs(sums, counts):
    """{name: (sum, count)}. Raises ValueError when a sum has the name of another value in a row."""
    reserved = sorted(ROW_NAMES & sums.keys())
    if reserved:
        raise ValueError(f"loss: sums named {reserved}: these names are reserved; rename them")
    return {name: (sums[name], counts[name]) for name in sums}


def means(pairs):
    """{name: mean} of {name: (sum, count)} on the host, and "n_labels", the count of the loss. A
    sum with count 0 is kept as it is; but if there was no label at all, a scalar becomes NaN.
    """
    if not pairs:
        return {}
    _, n_labels = pairs.get("loss", pairs.get("objective"))  # a custom loss may lack "loss"
    found = {"n_labels": float(n_labels)}
    for name, (total, count) in pairs.items():
        if count:
            found[name] = total / count
        else:
            found[name] = total if n_labels or np.ndim(total) else np.nan
    return found


def takes(loss_fn, argument):
    """Whether a loss has this argument.

    One with train_keys is called as loss_fn(params, batch, cfg, train_keys=keys) in training, with
    the result of make_train_keys, and without it in evaluation.
    """
    return argument in inspect.signature(loss_fn).parameters


def make_train_keys(step, batch, seed):
    """A random key for each row of a batch [B], a function of (seed, step, row)."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    n_rows = jax.tree.leaves(batch)[0].shape[0]
    return jax.vmap(partial(jax.random.fold_in, step_key))(jnp.arange(n_rows))


def is_log_point(step, cfg):
    """Whether the means of this step are logged. A run of fewer steps than log_every logs its last.
    """
    return bool(cfg.log_every) and step % min(cfg.log_every, cfg.steps) == 0


# ---- shapes and slices

def check_shapes(table, mesh):
    """Errors, as texts, for parameters with a dim that the mesh cannot split evenly."""
    errors = []
    for name, row in table.items():
        # A spec may be shorter than a shape: the other dims are not split.
        for n, axes in zip(row["shape"], row["spec"], strict=False):
            n_parts = prod(mesh.shape[axis] for axis in jax.tree.leaves(axes))
            if n % n_parts:
                errors.append(f"{name} {row['shape']}: dim {n} must be a multiple of the size of "
                              f"{axes} = {n_parts}")
    return errors


def _device_grid(devices, sizes, cfg):
    """Arrange devices, from cfg.slices slices, into an array of these sizes of the mesh axes."""
    slices = [getattr(device, "slice_index", None) or 0 for device in devices]  # of TPUs
    n_found = len(set(slices))
    if devices[0].platform == "tpu" and cfg.slices != n_found:
        raise ValueError(f"slices {cfg.slices}: the devices have {n_found}; set it to {n_found}")

    # The grid of each slice, then one slice after the other along the axis that they split.
    axis = "fsdp" if sizes["dp"] == 1 else "dp"
    sizes_within = sizes | {axis: sizes[axis] // cfg.slices}
    by_slice = devices[np.argsort(slices, kind="stable")]
    grids = []
    for group in np.split(by_slice, cfg.slices):
        # Not jax.make_mesh: it refuses an axis of 8 on a slice whose every side is 16 long.
        grids.append(mesh_utils.create_device_mesh(
            list(sizes_within.values()), list(group), allow_split_physical_axes=True))
    return np.concatenate(grids, axis=AXES.index(axis))


# ---- evaluation of several batches

def evaluate(eval_fn, params, batches, stopped=lambda: False):
    """{name: (sum, count)} in float64 over all batches, or None once stopped() is true.

    eval_fn(params, batch): the compiled eval_step.
    """
    results = []
    for batch in batches:
        if stopped():
            return None
        results.append(eval_fn(params, batch))
        # Wait for the batch before, while the device works on this one.
        if len(results) > 1:
            jax.block_until_ready(results[-2])
    if not results:
        return {}
    results = jax.tree.map(np.float64, jax.device_get(results))
    return jax.tree.map(lambda *values: sum(values), *results)


# ---- programs of a run

def compile_steps(steps, is_fresh=False):
    """Compile the programs of lower_steps, its result, before any array is allocated. is_fresh:
    whether init(key, params={}) is called next. Raises MemoryError for a program that does not fit.

    Returns a dict: "state", "init", "digest" and all else of lower_steps;
    "train_step": (state, batch, lr) -> (state, metrics), which donates its state;
    "eval_step": (params, batch) -> {name: (sum, count)};
    "compile_eval": compiles eval_step if necessary, and waits for it;
    "memory": program_memory of train_step.
    """
    # XLA releases the GIL: compile init beside train_step. JAX keeps the program for init's call.
    lowered_step = steps["lower_train_step"]()
    future = ThreadPoolExecutor().submit(lowered_step.compile)
    if is_fresh:
        steps["init"].lower(jax.random.key(0), params={}).compile()
    compiled_step = future.result()
    memory = program_memory(compiled_step, steps["state"], steps["batch"])
    check_fits(memory, {"a step": memory["total"]}, steps["mesh"])

    # Compile eval_step when it is first needed: in the background it would slow down the first
    # steps on a CPU.
    @cache
    def compile_eval():
        compiled = steps["lower_eval_step"]().compile()
        peak = program_memory(compiled, steps["state"], steps["eval_batch"])["total"]
        check_fits(memory, {"evaluation": peak}, steps["mesh"])
        return compiled

    return steps | {
        "train_step": compiled_step,
        "eval_step": lambda params, batch: compile_eval()(params, batch),
        "compile_eval": compile_eval,
        "memory": memory,
    }


# ---- devices

def platform(device):
    """The kind of a device, by which dtype and attention are chosen.

    The result is "cuda" for an NVIDIA GPU of compute capability 8.0 or later, "old cuda" for an
    earlier one, which has no bfloat16, and JAX's name for all others.
    """
    capability = str(getattr(device, "compute_capability", ""))
    is_number = capability.replace(".", "").isdigit()  # AMD's are names
    if device.platform != "gpu" or not is_number:
        return device.platform
    return "cuda" if float(capability) >= 8 else "old cuda"


def choose_dtype(dtype, platform_name):
    """dtype, with "auto" resolved to the fastest one on this platform (see `platform`).

    On a CPU the result is "mixed" if the CPU has AMX, or is AMD's with AVX512_BF16. Intel's CPUs
    with AVX512_BF16 alone multiply float32 twice as fast as bfloat16.
    """
    if dtype != "auto":
        return dtype
    if platform_name == "old cuda":
        return "float16"
    if platform_name != "cpu":
        return "bfloat16"
    words = set(_cpuinfo().split())
    if "amx_bf16" in words or {"AuthenticAMD", "avx512_bf16"} <= words:
        return "mixed"
    return "float32"


def configure_compiler(platform_name, n_devices, dtype):
    """Set the options of JAX that depend on the platform. A precision that the user chose stays."""
    if platform_name.endswith("cuda") and n_devices > 1:
        # XLA may then run the collectives of a layer beside the computation of its neighbours.
        jax.config.update("jax_optimization_level", "O1")
    has_precision = jax.config.jax_default_matmul_precision is not None
    if platform_name != "cpu" and dtype == "float32" and not has_precision:
        # JAX's default rounds operands: to 10 bits on NVIDIA's GPUs (TF32), to bfloat16 on TPUs.
        jax.config.update("jax_default_matmul_precision", "highest")


def _cpuinfo():
    path = Path("/proc/cpuinfo")
    if not path.exists():  # not Linux
        return ""
    return path.read_text(encoding="utf-8")


# Whether the user has chosen LLVM's level of optimization for all programs.
XLA_FLAGS_NAME_LEVEL = "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", "")


def compiler_options(cfg, device):
    """XLA options for every program that runs on this kind of device.

    CPU: each matrix product is a separate fusion. XLA's default fuses a product with the reduction
    that follows it, and some of these fusions return wrong numbers (jax 0.10 to 0.12): a batched
    product with a broadcast operand, then a sum. tests/test_step.py has the known cases. In float32
    on Intel's CPUs YNNPACK is off: Eigen was faster on the one Xeon that was measured (LOG.md).
    LLVM's first level of optimization, unless XLA_FLAGS names one: programs compile in 0.85 of the
    time and run as fast as with the third level, since the products are library calls.

    NVIDIA GPU with cfg.deterministic: no sums by atomics, whose order changes from run to run, as
    in the gradients of the embedding and of experts.
    """
    if device.platform == "cpu":
        ynn_fusions = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
        if cfg.dtype == "float32" and "GenuineIntel" in _cpuinfo():
            ynn_fusions = ""
        options = {"xla_cpu_experimental_ynn_fusion_type": ynn_fusions}
        if not XLA_FLAGS_NAME_LEVEL:
            options["xla_backend_optimization_level"] = 1
        return options
    if cfg.deterministic and platform(device).endswith("cuda"):
        return {"xla_gpu_exclude_nondeterministic_ops": True}
    return {}


# ---- memory

def program_memory(compiled, held, batch):
    """{kind: bytes per device} while a compiled program runs; "total" must fit in the memory of a
    device. held: the state, or a dict of the parts that the device holds; held and batch are shapes
    with shardings.
    """
    stats = compiled.memory_analysis()
    temporaries = stats.temp_size_in_bytes
    added = temporaries + stats.output_size_in_bytes - stats.alias_size_in_bytes
    moments = held.get("opt", ())
    memory = {
        "parameters": array_bytes(held["params"]),
        "moments": array_bytes(moments),
        "moments in host memory": array_bytes(moments, on_host=True),
        "temporaries": temporaries,
        "temporaries in host memory": stats.host_temp_size_in_bytes,
        "total": array_bytes((held, batch)) + added,
    }
    return {kind: n_bytes for kind, n_bytes in memory.items() if n_bytes}


def array_bytes(tree, on_host=False):
    """The bytes of the arrays in each device's memory, or in the host's. tree: shapes with
    shardings.
    """
    n_bytes = 0
    for x in jax.tree.leaves(tree):
        if on_host == (x.sharding.memory_kind == "pinned_host"):
            n_bytes += prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return n_bytes


def memory_limit(mesh):
    """The bytes available to a program on each device, or None when unknown.

    Devices of a CPU divide its memory equally, or what a container may use of it.
    """
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return _host_memory() // len(jax.local_devices())
    with contextlib.suppress(jax.errors.JaxRuntimeError, AttributeError, TypeError, KeyError):
        return device.memory_stats()["bytes_limit"]
    _, gib = peaks(device.device_kind)
    if gib is None:
        return None
    return int(gib * 2**30)


def _host_memory():
    """The bytes that this process may use: those of the machine, or a lower limit of a control
    group that contains the process, or of ulimit -v.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])
    groups = Path("/proc/self/cgroup")  # lines such as 0::/user.slice/job
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.exists() else []
    for group in {line.split(":", 2)[2] for line in lines}:
        for root, name in CGROUP_FILES.items():
            folder = Path(root + group)
            for file in (above / name for above in (folder, *folder.parents)):
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    limits.append(int(file.read_text(encoding="utf-8")))
    return min(limit for limit in limits if limit >= 0)  # -1: no limit of ulimit


# {folder of control groups: name of the file with the limit of memory}, of versions 2 and 1.
CGROUP_FILES = {"/sys/fs/cgroup": "memory.max", "/sys/fs/cgroup/memory": "memory.limit_in_bytes"}


def check_fits(memory, peaks, mesh):
    """Raise MemoryError when a program needs more memory than a device has. memory: a result of
    program_memory. peaks: {program: bytes}.
    """
    limit = memory_limit(mesh)
    for program, n_bytes in peaks.items():
        if limit and n_bytes > limit:
            raise MemoryError(
                f"{program} needs {_gib(n_bytes)} GiB on each device, which has {_gib(limit)} GiB; "
                f"parameters take {_gib(memory['parameters'])} GiB and moments "
                f"{_gib(memory.get('moments', 0))} GiB of it")


def _gib(n_bytes):
    return f"{n_bytes / 2**30:,.4g}"


@contextlib.contextmanager
def explain_oom(suggest):
    """Turn an out-of-memory error of a compilation or a run into a ValueError with the advice of
    suggest().
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as e:
        if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        reason = str(e).partition("\n")[0]
        raise ValueError(f"does not fit: {reason}; to change: {suggest()}") from None


# ---- digest of the state

def digest_sums(state):
    """{key of the state: {name of a leaf: sums}}, the input of digest.

    The sums of an array are two uint32. Each adds up a hash of the bits and the position of every
    element. Integer sums do not depend on their order, so neither the mesh nor the device changes
    them. The hash of a position is one-to-one in the bits: a change of a single element changes
    both sums. Several changes cancel with probability 2^-64.
    """
    named = {}
    for part, tree in state.items():
        named[part] = {}
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            named[part][name] = _hash_sums(x)
    return named


def _hash_sums(x):
    """The two sums of an array, see digest_sums."""
    bits = x
    if x.dtype != bool:
        n_bits = min(8 * x.dtype.itemsize, 32)
        bits = jax.lax.bitcast_convert_type(x, f"uint{n_bits}")  # 64 bits become a new last dim
    bits = jnp.atleast_1d(bits.astype(jnp.uint32))
    index = jnp.zeros(bits.shape, jnp.uint32)
    for dim, size in enumerate(bits.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    sums = []
    for seed in (0x5BD1E995, 0x9E3779B9):
        hashes = _mix(bits + _mix(index ^ jnp.uint32(seed)))
        sums.append(hashes.sum(-1, dtype=jnp.uint32))
    # Rows first: on a CPU, one sum over all dims takes XLA 1.7 times as long.
    row_sums = jnp.stack(sums)
    return row_sums.sum(range(1, row_sums.ndim), dtype=jnp.uint32)


def _mix(x):
    """Mix the bits of each uint32: the finalizer of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def digest(sums):
    """{key of the state: 16 hexadecimal digits} from the result of digest_sums.

    Two states with equal names, shapes, dtypes and bits have equal digests; others almost never.
    """
    digests = {}
    for part, named in jax.device_get(sums).items():
        text = hashlib.blake2b(digest_size=8)
        for name in sorted(named):
            text.update(f"{name} {named[name].tolist()}\n".encode())
        digests[part] = text.hexdigest()
    return digests


# ---- peak figures of devices

# {device_kind: (dense bfloat16 TFLOP/s, GiB of memory for a program)} of one device, by the exact
# name that JAX gives: a laptop's chip, a MIG slice or another variant is another device. Tesla T4
# and V100 have no bfloat16: the figure is that of float16. GeForce: of sums in float32.
# Sources: NVIDIA's data sheets, half of the figures "with sparsity", and its GA102, Ada and
# Blackwell RTX white papers; Google Cloud's pages of TPUs (JAX sees a TPU7x chip as two devices).
# Memory of GPUs: 0.92 of the total, the share that train.py gives to JAX; of TPUs, XLA.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": (312, 36.3),
    "NVIDIA A100-SXM4-80GB": (312, 72.7),
    "NVIDIA A100-PCIE-40GB": (312, 36.3),
    "NVIDIA A100 80GB PCIe": (312, 72.7),
    "NVIDIA H100 80GB HBM3": (989, 72.7),
    "NVIDIA H100 PCIe": (756, 72.7),
    "NVIDIA H100 NVL": (835, 86.1),
    "NVIDIA H200": (989, 128.3),
    "NVIDIA H200 NVL": (835, 128.3),
    "NVIDIA H20": (148, 87.9),
    "NVIDIA GH200 480GB": (989, 87.9),
    "NVIDIA B200": (2250, 163.8),
    "NVIDIA GB200": (2500, 170),
    "NVIDIA B300 SXM6 AC": (2250, 247),
    "NVIDIA GB300": (2500, 247),
    "NVIDIA L4": (121, 20.7),
    "NVIDIA L40S": (362, 41.4),
    "NVIDIA A10G": (70, 20.7),
    "NVIDIA RTX A6000": (154.8, 44.1),
    "NVIDIA GeForce RTX 3090": (71, 22.1),
    "NVIDIA GeForce RTX 4080": (97.5, 14.7),
    "NVIDIA GeForce RTX 4090": (165.2, 22.1),
    "NVIDIA GeForce RTX 5090": (209.5, 29.3),
    "Tesla T4": (65, 13.8),
    "Tesla V100-SXM2-16GB": (125, 14.5),
    "Tesla V100-SXM2-32GB": (125, 29.2),
    "Tesla V100-PCIE-16GB": (112, 14.5),
    "Tesla V100-PCIE-32GB": (112, 29.2),
    "TPU v4": (275, 30.75),
    "TPU v5 lite": (197, 15.75),
    "TPU v5e": (197, 15.75),
    "TPU v5": (459, 95),
    "TPU v5p": (459, 95),
    "TPU v6 lite": (918, 31.25),
    "TPU v6e": (918, 31.25),
    "TPU7x": (1153, 94.75),
}


def peaks(kind):
    """The row of PEAKS of a device of this kind, or (None, None)."""
    return PEAKS.get(kind, (None, None))


# ---- description of the machine

def describe_machine(device):
    """{"cpu", "threads", "driver"}, which with the versions and the mesh decide how a program
    rounds.

    cpu: its model. threads: the number that this process may use. driver: of an NVIDIA GPU, or
    None.
    """
    driver = None
    driver_file = Path("/proc/driver/nvidia/version")
    if platform(device).endswith("cuda") and driver_file.exists():
        driver = driver_file.read_text(encoding="utf-8").splitlines()[0]
    models = re.findall("model name.*: (.*)", _cpuinfo())
    cpu = models[0] if models else os.uname().machine
    return {"cpu": cpu, "threads": _count_threads(), "driver": driver}


def _count_threads():
    if hasattr(os, "sched_getaffinity"):  # missing on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


# ---- optional
#
# The sections, in this order: parameters in bfloat16, loss scaling for float16, optimizer in host
# memory, weight statistics, memory estimates, time estimates, memory advice, processes, profiler,
# compilation cache, this file alone.


# ---- parameters in bfloat16

def round_stochastically(params, step, seed):
    """Round float32 parameters {name: array} to bfloat16, up or down at random, so that the
    expected value is exact. Rounding to the nearest number would drop each move below 0.2%.

    The random bits are a function of (seed, step, name). Source: Gupta et al. 2015,
    arXiv:1502.02551, section 3.
    """
    key = jax.random.fold_in(jax.random.key(seed), step)
    rounded = {}
    for name, x in params.items():
        # A bfloat16 is the first half of a float32. A random second half carries into it.
        name_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        noise = jax.random.bits(name_key, x.shape, jnp.uint16)
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
        first_half = (bits >> 16).astype(jnp.uint16)
        rounded[name] = jax.lax.bitcast_convert_type(first_half, jnp.bfloat16)
    return rounded


# ---- loss scaling for float16

FP16_SCALE = 2.0**15  # the first loss scale
FP16_MAX_SCALE = 2.0**24  # a scale without a limit becomes infinite
FP16_PATIENCE = 2000  # finite steps in a row before the scale doubles


def init_loss_scale():
    """state["scale"] of a new run: the loss scale, and the finite steps since it changed."""
    return {"value": jnp.float32(FP16_SCALE), "good": jnp.zeros((), jnp.int32)}


def fp16_train_step(state, batch, lr, cfg, loss_fn, optimizer, table):
    """Take one step in float16: train_step with a dynamic loss scale, the metric "loss_scale".

    A loss or gradient that is not finite counts as an overflow, which halves the scale. The metric
    "finite" is 0 only when the scale is below 1 already.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
    """
    scale = state["scale"]["value"]
    # The objective is a sum over the batch. Divided by its size, the scaled sum stays in float16.
    batch_size = max((x.size for x in jax.tree.leaves(batch)), default=1)
    loss_scale = scale / batch_size
    new_state, metrics = train_step(
        state, batch, lr, cfg, loss_fn, optimizer, table, loss_scale)

    finite = metrics["finite"] == 1
    new_state["scale"] = _next_scale(state["scale"], finite)
    metrics["loss_scale"] = scale
    metrics["finite"] = jnp.float32(finite | (scale >= 1))
    return new_state, metrics


def _next_scale(scale, finite):
    """Halve the loss scale on overflow; double it after FP16_PATIENCE finite steps in a row."""
    good = jnp.where(finite, scale["good"] + 1, 0)
    is_due = good == FP16_PATIENCE
    grown = jnp.where(is_due, jnp.minimum(scale["value"] * 2, FP16_MAX_SCALE), scale["value"])
    halved = jnp.maximum(scale["value"] / 2, 2.0**-14)  # float16's smallest normal number
    return {"value": jnp.where(finite, grown, halved), "good": jnp.where(is_due, 0, good)}


# ---- optimizer in host memory

def opt_from_host(f, on_device):
    """A function f(state, ...) that first copies the moments from host memory to the device.

    on_device: shardings of state["opt"] on the device.
    """
    def with_opt_on_device(state, *args):
        opt = jax.device_put(state["opt"], on_device)
        return f(state | {"opt": opt}, *args)

    # The program keeps the name of its function, also where f is a partial.
    return update_wrapper(with_opt_on_device, getattr(f, "func", f))


# ---- weight statistics

N_BINS = 64


def weight_stats(step, params, grads, cfg):
    """{name: result of _histogram} of the parameters in cfg.watch, at logged steps.

    At all other steps the result is zeros, which cost nothing.
    """
    def stats():
        no_gradient = jnp.zeros(())
        return {name: _histogram(params[name], grads.get(name, no_gradient)) for name in cfg.watch}

    def zeros():
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(stats))

    return jax.lax.cond(is_log_point(step, cfg), stats, zeros)


def _histogram(x, grad):
    """{"counts": of N_BINS bins from "min" to "max", "mean", "std", "grad_norm"}."""
    x = x.astype(jnp.float32)
    low = x.min()
    high = x.max()
    fraction = (x - low) / jnp.maximum(high - low, 1e-30)
    bins = jnp.minimum((N_BINS * fraction).astype(jnp.int32), N_BINS - 1)

    def count(i):
        return (bins == i).sum(dtype=jnp.float32)

    counts = jax.lax.map(count, jnp.arange(N_BINS))
    return {"counts": counts, "min": low, "max": high, "mean": x.mean(), "std": x.std(),
            "grad_norm": optax.tree.norm(grad)}


# ---- memory estimates

def count_memory(steps, is_training, with_evaluation):
    """Compile the programs of lower_steps that a run needs, and count what a device holds while
    each of them runs. Without training it holds only the parameters of the state.

    Returns {"programs": {"a step", "evaluation": compiled}, "peaks": {program: bytes}, "memory":
    program_memory of the step or, without one, the parameters}.
    """
    held = steps["state"] if is_training else {"params": steps["state"]["params"]}
    memory = {"parameters": array_bytes(held["params"])}
    programs, peaks = {}, {}
    if is_training:
        programs["a step"] = steps["lower_train_step"]().compile()
        memory = program_memory(programs["a step"], held, steps["batch"])
        peaks["a step"] = memory["total"]
    if with_evaluation:
        programs["evaluation"] = steps["lower_eval_step"]().compile()
        eval_memory = program_memory(programs["evaluation"], held, steps["eval_batch"])
        peaks["evaluation"] = eval_memory["total"]
    return {"programs": programs, "peaks": peaks, "memory": memory}


# ---- time estimates

# Fraction of the peak FLOP/s that large matmuls reach, by the beginning of the device's kind. On
# CPUs, of the rate that product_rate measures.
MATMUL_FRAC = {"NVIDIA": 0.62, "Tesla": 0.62, "TPU v6": 0.74, "TPU": 0.9, "cpu": 0.55}


def step_seconds(flop, mesh, cfg):
    """Seconds of a step of `flop` FLOPs per device, as if it had only matmuls; None if the rate of
    the device is not known.
    """
    kind = mesh.devices.flat[0].device_kind
    rate = None
    if kind == "cpu":
        rate = product_rate(cfg) / len(jax.local_devices())  # they share the cores
    elif cfg.dtype != "float32" and peaks(kind)[0]:  # the peaks are those of bfloat16
        rate = peaks(kind)[0] * 1e12
    return rate and flop / (matmul_frac(kind) * rate)


def matmul_frac(kind):
    """The row of MATMUL_FRAC of a device of this kind."""
    return next((frac for name, frac in MATMUL_FRAC.items() if kind.startswith(name)), 1.0)


def product_rate(cfg):
    """FLOP/s of this machine in a product of the size of the model's MLP: the best in 0.3 s."""
    dtype = jnp.bfloat16 if cfg.dtype in ("mixed", "bfloat16") else jnp.float32
    n_rows = min(2048, cfg.batch_size * cfg.seq_len // cfg.grad_accum_steps)
    width = cfg.d_ff or 4 * cfg.d_model  # 0 if the task has no MLP
    left = jnp.ones((n_rows, cfg.d_model), dtype)
    right = jnp.ones((cfg.d_model, width), dtype)
    product = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
    product(left, right).block_until_ready()
    seconds = []
    end = time.perf_counter() + 0.3
    while not seconds or time.perf_counter() < end:
        start = time.perf_counter()
        product(left, right).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * n_rows * cfg.d_model * width / min(seconds)


# ---- memory advice

def memory_flags(cfg, mesh, savers):
    """Flags, not set yet, that lower the memory of a step, the cheapest in time first.

    A flag is {field: value}. savers: the flags of the model.
    """
    flags = []
    rows = cfg.batch_size // prod(mesh.shape[axis] for axis in BATCH_AXES)
    n = 2 * cfg.grad_accum_steps
    while rows % n == 0:
        flags.append({"grad_accum_steps": n})
        n *= 2
    flags.extend(savers)
    if not cfg.offload_optimizer:
        flags.append({"offload_optimizer": True})
    return flags


def suggest_flags(flags, count, limit):
    """({field: value} of the flags that make a run fit, their bytes by count). If none do, all that
    help.

    Flags are added in order until the run fits; a flag that saves less than one percent is skipped.
    count(changes): the bytes of the largest program with {field: value} changed; infinite when it
    cannot be compiled. limit: the bytes of a device, or None when unknown.
    """
    changes = {}
    peak = count(changes)
    if limit is None or peak <= limit:
        limit = 0.9 * peak  # the estimate fits, the run did not
    for flag in flags:
        new_peak = count(changes | flag)
        if peak == inf or new_peak < 0.99 * peak:
            changes = changes | flag
            peak = new_peak
        if peak <= limit:
            break
    return changes, peak


def as_advice(changes, peak, limit):
    """The result of suggest_flags as a text."""
    if changes and (limit is None or peak <= limit):
        return f"{as_flags(changes)} ({_gib(peak)} GiB)"
    return ("a smaller --batch_size, or more devices along fsdp, tp or sp "
            f"({_gib(peak)} GiB with {as_flags(changes) or 'no flag'})")


def as_flags(changes):
    """{field: value} written as command-line flags."""
    words = []
    for name, value in changes.items():
        words.append(f"--{name}" if value is True else f"--{name} {value}")
    return " ".join(words)


# ---- processes

HEARTBEAT_TIMEOUT_S = 30  # seconds of silence after which JAX ends the other processes
REMIND_S = 30  # seconds between messages of a process that waits for the others


def init_distributed(coordinator, n_processes, process_id):
    """Connect to the other processes of a run. Call it before anything touches a device.

    coordinator: host:port of process 0. With "auto", JAX takes all three values from Slurm, Open
    MPI, Kubernetes or Cloud TPU. JAX ends a process that is not connected after 300 s with exit
    code 134, and all processes HEARTBEAT_TIMEOUT_S after one has died.

    Raises ValueError when the port of process 0 cannot be used.
    """
    name = f"process {process_id} of {n_processes}"
    launch = f"--coordinator {coordinator}"
    addresses = (coordinator, n_processes, process_id)
    if coordinator == "auto":
        name = "a process"
        addresses = ()
    else:
        launch += f" --n_processes {n_processes} --process_id I, I from 0 to {n_processes - 1}"
        if process_id == 0:
            _check_port(int(coordinator.rpartition(":")[2]))

    # Print until all are connected.
    is_connected = threading.Event()

    def remind():
        text = "connecting to the others"
        while True:
            print(f"{name} on {socket.gethostname()}: {text}; launch each of them exactly once: "
                  f"{launch}. JAX ends this one after 300 s", file=sys.stderr, flush=True)
            if is_connected.wait(REMIND_S):
                return
            text = "still waiting for the others"

    threading.Thread(target=remind, daemon=True).start()
    try:
        jax.distributed.initialize(*addresses, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S)
    finally:
        is_connected.set()


def _check_port(port):
    """Raise ValueError when a port of this machine cannot be used: JAX's server would crash."""
    try:
        socket.create_server(("", port)).close()
    except OSError as e:
        raise ValueError(f"coordinator: port {port} of this machine: {e.strerror}; choose another "
                         "port") from None


def silent_processes():
    """The indices of the processes that have died or are stuck after an error of a collective: each
    of the others meets the error too, calls this, and so signs within 2 s. Only process 0 waits for
    the signs; on the others, which JAX aborts when process 0 is dead, the result is None.
    """
    client = distributed.global_state.client
    here = f"here/{jax.process_index()}"
    if jax.process_index():
        threading.Thread(target=client.key_value_set, args=(here, ""), daemon=True).start()
        return None
    client.key_value_set(here, "")
    time.sleep(2)
    found = {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get("here/")}
    return sorted({*range(jax.process_count())} - found)


# ---- profiler

def profiler(first, last, folder, log=print):
    """A hook observe(event, row) that traces the steps `first` to `last` into the folder.

    The trace has time as an XPlane (`jax.profiler.ProfileData`, Perfetto, XProf) and memory as
    pprof. After an error the hook writes memory_at_failure.prof: always if a trace is requested,
    otherwise only for lack of memory. first: counted from 1; 0 for no trace.
    """
    traced = []  # the steps in the trace that runs

    def observe(event, row):
        if event == "start" and 0 < last <= row["step"]:
            log(f"nothing is traced: steps {first} to {last} are already done")
        # Start as the first step is dispatched.
        if event == "dispatch" and first <= row["step"] <= last:
            if not traced:
                jax.profiler.start_trace(folder)
            traced.append(row["step"])
        # Stop once the last step is done, or the run.
        is_done = event in ("stop", "error") or (event == "step" and row["step"] >= last)
        if traced and is_done:
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(folder / f"memory_{traced[-1]}.prof")
            log(f"traced steps {traced[0]} to {traced[-1]} into {folder}")
            traced.clear()
        if event == "error" and (first or "RESOURCE_EXHAUSTED" in row["error"]):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "memory_at_failure.prof"
            jax.profiler.save_device_memory_profile(path)
            log(f"the arrays on the device at the failure, for pprof: {path}")

    return observe


# ---- compilation cache

def enable_compilation_cache(folder):
    """Have JAX keep compiled programs below this folder; "" for none. JAX makes the folder, and
    warns when it cannot.
    """
    compilation_cache.reset_cache()  # JAX otherwise stays with a process's first folder
    # XLA divides the loops of a program among the threads of the process that compiles it. JAX's
    # key lacks their number: a program compiled for one thread was a fifth slower on two.
    programs = f"{os.path.expanduser(folder)}/threads{_count_threads()}" if folder else None
    jax.config.update("jax_compilation_cache_dir", programs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


# ---- this file alone

def make_cfg(**fields):
    """A frozen dataclass of these fields, for a program without config.py."""
    return dataclasses.make_dataclass("Cfg", fields, frozen=True)(**fields)
