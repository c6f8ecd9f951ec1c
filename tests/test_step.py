# SPDX-License-Identifier: Apache-2.0
"""step.py against NumPy's AdamW, optax's schedules, and itself over every mesh of eight devices."""
import dataclasses
import re
import resource
import socket
import subprocess
import sys
import threading
import types
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import check
import config
import model
import step
from conftest import ROOT

BASE = config.Config(warmup_steps=0.0, steps=20, dtype="float32", lr=0.1, optimizer="adamw",
                     schedule="cosine")
TABLE = {"w": dict(shape=(8, 4), spec=P("fsdp", "tp"), init=("normal", 0.5)),
         "b": dict(shape=(4,), spec=P(), init=("constant", 0.5))}
BATCH_AXES = (("dp", "fsdp", "ep"), "sp")
SMALL = config.derive_text(config.Config(
    optimizer="adamw", d_model=16, n_layers=1, n_heads=8, head_dim=2, d_ff=16, vocab_size=32,
    seq_len=8, batch_size=16, dtype="float32", warmup_steps=0.0, steps=20, lr=0.01))


def init_linear(key, cfg):
    return {"w": 0.5 * jax.random.normal(key, (8, 4)).astype(cfg.param_dtype),
            "b": jnp.full(4, 0.5, cfg.param_dtype)}


def linear_loss(params, batch, cfg):
    x, w, b = (a.astype(cfg.dtype) for a in (batch["x"], params["w"], params["b"]))
    error = x @ w + b[None] - batch["y"]
    total = (error.astype(jnp.float32) ** 2).sum()
    return {"objective": total}, {"objective": jnp.float32(error.size)}


def linear_batch(seed=0, rows=16):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(rows, n)).astype(np.float32) for k, n in (("x", 8), ("y", 4))}


def given_gradient(params, batch, cfg):
    """A loss whose gradient is the batch."""
    total = sum((params[k] * batch[k]).sum() for k in batch)
    return {"objective": total}, {"objective": jnp.float32(1)}


def rates(steps, cfg):
    return np.array([step.lr_at(int(at), cfg) for at in steps])


def with_rate(train_step, cfg):
    """train_step with the learning rate of the state's step."""
    return lambda state, batch: train_step(state, batch, step.lr_at(int(state["step"]), cfg))


def linear_run(cfg, loss_fn=linear_loss):
    """(state, jitted training step) of the linear model on one device."""
    optimizer = step.make_optimizer(cfg, TABLE)
    init = jax.jit(lambda key: step.init_state(key, cfg, init_linear, optimizer, TABLE))
    state = init(jax.random.key(0))
    step_fn = step.fp16_train_step if cfg.dtype == "float16" else step.train_step
    update = jax.jit(lambda s, b, lr: step_fn(s, b, lr, cfg, loss_fn, optimizer, TABLE))
    return state, with_rate(update, cfg)


def host(tree):
    return jax.tree.map(np.array, tree)


def batch_structs(batch, mesh):
    """{name: ShapeDtypeStruct} of a batch whose rows, and positions if any, the mesh splits."""
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(
        mesh, P(*BATCH_AXES[:x.ndim]))) for name, x in batch.items()}


def place(batch, mesh):
    shardings = {name: x.sharding for name, x in batch_structs(batch, mesh).items()}
    return jax.device_put(batch, shardings)


def lowered(cfg, batch=None, table=TABLE, loss_fn=linear_loss, init_fn=init_linear, devices=None,
            override=lambda name, value: value):
    """lower_steps over the mesh of cfg, by default of the linear model."""
    mesh = step.make_mesh(cfg, devices)
    batch = batch_structs(linear_batch() if batch is None else batch, mesh)
    return step.lower_steps(cfg, mesh, table, loss_fn, init_fn, batch, override)


def compiled(cfg, batch, *how, **named):
    """(compile_steps over the mesh of cfg, its initial state, the batch placed)."""
    traced = lowered(cfg, batch, *how, **named)
    steps = step.compile_steps(traced)
    steps["train_step"] = with_rate(steps["train_step"], cfg)
    return steps, steps["init"](jax.random.key(0)), place(batch, traced["mesh"])


def lm_batch(rows=16, T=8, vocab=32, ragged=True):
    """Tokens and labels. ragged: row r has at most r labels, so that parts have unequal counts."""
    rng = np.random.default_rng(7)
    tokens, labels = rng.integers(0, vocab, (2, rows, T)).astype(np.int32)
    if ragged:
        labels = np.where(np.arange(T) < np.arange(rows)[:, None], labels, -100)
    return {"tokens": tokens, "labels": labels}


def language_model(cfg):
    """The table, the loss and the initial values of the small transformer."""
    return model.apply_param_groups(model.param_table(cfg), cfg, float), model.loss_fn, model.init


def lm_run(cfg, devices=None, n_steps=2):
    """compile_steps of the small transformer, state after n_steps steps, metrics of each, batch."""
    steps, state, batch = compiled(cfg, lm_batch(), *language_model(cfg), devices)
    metrics = []
    for _ in range(n_steps):
        state, m = steps["train_step"](state, batch)
        means = step.means(jax.device_get(m["sums"]))
        metrics.append(means | {k: float(v) for k, v in m.items() if k not in ("watch", "sums")})
    return steps, state, metrics, batch


@pytest.fixture(scope="module")
def two_by_two():
    """One step over dp=2, fsdp=2, tp=2: programs, state, batch, and the sharding before."""
    steps, before, _, batch = lm_run(dataclasses.replace(SMALL, dp=2, fsdp=2, tp=2), n_steps=0)
    placed = jax.tree.map(lambda x: x.sharding, before)
    held = {k: x.addressable_shards[0].data.shape for k, x in before["params"].items()}
    after, _ = steps["train_step"](before, batch)
    deleted = [x.is_deleted() for x in jax.tree.leaves(before)]
    return dict(steps=steps, placed=placed, held=held, after=after, deleted=deleted, batch=batch)


def np_adamw(m, v, g, t, cfg):
    """Loshchilov & Hutter 2019, algorithm 2, without the decay."""
    m, v = cfg.b1 * m + (1 - cfg.b1) * g, cfg.b2 * v + (1 - cfg.b2) * g**2
    return m / (1 - cfg.b1**t) / (np.sqrt(v / (1 - cfg.b2**t)) + cfg.eps), m, v


def np_lion(m, v, g, t, cfg):
    """Chen et al. 2023, arXiv:2302.06675, algorithm 2."""
    return np.sign(cfg.b1 * m + (1 - cfg.b1) * g), cfg.b2 * m + (1 - cfg.b2) * g, v


def np_sgd(m, v, g, t, cfg):
    return cfg.b1 * m + g, cfg.b1 * m + g, v


def np_rmsprop(m, v, g, t, cfg):
    v = cfg.b2 * v + (1 - cfg.b2) * g**2
    return g / (np.sqrt(v) + cfg.eps), m, v


def np_adafactor(m, v, g, t, cfg):
    """Shazeer & Stern 2018, arXiv:1804.04235, algorithm 4, unfactored, decay 1 - t^-0.8."""
    decay = 1 - t**-0.8
    v = decay * v + (1 - decay) * (g**2 + 1e-30)
    u = g / np.sqrt(v)
    return u / max(1, np.sqrt((u**2).mean())), m, v


@pytest.mark.parametrize("name, rule", [
    ("adamw", np_adamw), ("lion", np_lion), ("sgd", np_sgd), ("rmsprop", np_rmsprop),
    ("adafactor", np_adafactor)])
def test_optimizers_equal_numpy(name, rule):
    """Six clipped steps equal the rule in float64 NumPy, which decays matrices only, to 1e-5.

    Break: step.py: row.get("decay_mult", float(is_matrix)) => 1
    """
    cfg = dataclasses.replace(BASE, optimizer=name, weight_decay=0.3, clip_norm=1.0, eps=0.01)
    rng, (state, update) = np.random.default_rng(1), linear_run(cfg, given_gradient)
    params = {k: np.float64(x) for k, x in host(state["params"]).items()}
    m, v = ({k: np.zeros_like(p) for k, p in params.items()} for _ in range(2))
    for t, size in enumerate((0.01, 1, 0.02, 3, 0.01, 1), 1):
        grads = {k: np.float32(size * rng.normal(size=p.shape)) for k, p in params.items()}
        state, metrics = update(state, grads)
        cut = min(1, 1 / np.sqrt(sum((np.float64(g) ** 2).sum() for g in grads.values())))
        for k, p in params.items():
            direction, m[k], v[k] = rule(m[k], v[k], cut * np.float64(grads[k]), t, cfg)
            p -= float(metrics["lr"]) * (direction + cfg.weight_decay * (k == "w") * p)
    for k, p in params.items():
        np.testing.assert_allclose(state["params"][k], p, rtol=0, atol=1e-5, err_msg=k)


STACK = {"layers": dict(shape=(3, 6, 4), spec=P(), init=("normal", 1.0)),
         "embed": dict(shape=(6, 4), spec=P(), init=("normal", 1.0)),
         "bias": dict(shape=(3, 4), spec=P(), init=("constant", 0.0))}


def np_muon(momentum):
    """Five Newton-Schulz iterations, at 0.2 sqrt(larger dim), with equal rows and columns."""
    x = momentum / np.linalg.norm(momentum)
    for _ in range(5):
        gram = x.T @ x
        x = 3.4445 * x + x @ (-4.775 * gram + 2.0315 * gram @ gram)
    size = 0.2 * max(x.shape) ** 0.5 * np.sqrt((x**2).mean())
    x /= np.sqrt((x**2).mean(1, keepdims=True))
    return size * x / np.sqrt((x**2).mean(0))


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("mixed", 0.03)])
def test_muon_equals_numpy(dtype, error):
    """Two steps of each layer are NumPy's; other parameters start as with Adam.

    Break: step.py: square = product("...ik,...kj->...ij" => square = product("...ij,...ij->...ij"
    """
    cfg = dataclasses.replace(BASE, optimizer="muon", weight_decay=0.0, clip_norm=0.0, b1=0.6,
                              dtype=dtype)
    rng, b = np.random.default_rng(2), cfg.b1
    grads = [{k: np.float32(rng.normal(size=row["shape"])) for k, row in STACK.items()}
             for _ in range(2)]
    zeros = jax.tree.map(jnp.zeros_like, grads[0])
    optimizer = step.make_optimizer(cfg, STACK)
    update, momentum, state = jax.jit(optimizer.update), 0, optimizer.init(zeros)
    for x in jax.tree.leaves(update(zeros, state, zeros)[0]):
        np.testing.assert_array_equal(x, 0)
    for t, gradient in enumerate(grads, 1):
        updates, state = update(gradient, state, zeros)
        if t == 1:
            for name in ("embed", "bias"):
                np.testing.assert_allclose(updates[name], np.sign(gradient[name]), atol=1e-5)
        momentum = b * momentum + np.float64(gradient["layers"])
        ahead = b * momentum + gradient["layers"]
        for layer, of_layer in zip(updates["layers"], ahead, strict=True):
            exact = np_muon(of_layer)
            np.testing.assert_allclose(layer, exact, atol=error)
            # The dtype reaches the products.
            assert (np.abs(layer - exact).max() > 1e-3) == (dtype == "mixed")


def test_adafactor_takes_each_matrix_and_vector_of_a_stack_alone():
    """Each has optax's values, though gradients of the others have another size (1e-5).

    Break: step.py: n_dims = 2 if table => n_dims = 3 if table
    """
    cfg = dataclasses.replace(BASE, optimizer="adafactor", weight_decay=0.0)
    rows = {"w": ((2, 130, 140), 2, "normal"), "experts": ((2, 3, 129, 128), 2, "normal"),
            "gain": ((3, 128), 1, "constant"), "embed": ((130, 140), 2, "normal")}
    table = {k: dict(shape=shape, spec=P(), init=(kind, 1.0))
             for k, (shape, _, kind) in rows.items()}
    rng = np.random.default_rng(0)
    optimizer = step.make_optimizer(cfg, table)
    alone = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    update, update_alone = jax.jit(optimizer.update), jax.jit(alone.update)
    zeros = {k: np.zeros(shape, np.float32) for k, (shape, _, _) in rows.items()}
    state, alone_states = optimizer.init(zeros), {}
    for _ in range(3):
        grads = {k: np.float32(rng.normal(size=x.shape)) for k, x in zeros.items()}
        for k in ("w", "experts", "gain"):
            grads[k][1] *= 1000
        found, state = update(grads, state, zeros)
        for k, (shape, n_dims, _) in rows.items():
            for i in np.ndindex(*shape[:-n_dims]):
                before = alone_states.get((k, i), alone.init(zeros[k][i]))
                want, alone_states[k, i] = update_alone(grads[k][i], before, zeros[k][i])
                np.testing.assert_allclose(found[k][i], want, rtol=1e-5, err_msg=k)


def test_groups_of_parameters_have_their_own_rate_decay_and_optimizer():
    """Three steps of AdamW for two parameters and Lion for a third equal float64 NumPy.

    Break: step.py: updates[name] = rates[name] * direction => updates[name] = direction
    """
    cfg = dataclasses.replace(BASE, weight_decay=0.25, clip_norm=0.0, b1=0.5, b2=0.75, eps=1e-8)
    changes = {"embed": {"lr_mult": 0.5, "decay_mult": 2.0}, "layers": {"optimizer": "lion"},
               "bias": {"decay_mult": 1.0}}
    decays = {"embed": 0.5, "layers": 0.25, "bias": 0.25}
    rng = np.random.default_rng(3)
    params = {k: rng.normal(size=row["shape"]) for k, row in STACK.items()}
    optimizer = step.make_optimizer(cfg, {k: row | changes[k] for k, row in STACK.items()})
    ours = jax.tree.map(jnp.float32, params)
    state = optimizer.init(ours)
    m, v = dict.fromkeys(params, 0.0), dict.fromkeys(params, 0.0)
    for t in range(1, 4):
        grads = {k: rng.normal(size=x.shape) for k, x in params.items()}
        updates, state = optimizer.update(jax.tree.map(jnp.float32, grads), state, ours)
        for k, g in grads.items():
            rule = np_lion if k == "layers" else np_adamw
            direction, m[k], v[k] = rule(m[k], v[k], g, t, cfg)
            want = (0.5 if k == "embed" else 1) * (direction + decays[k] * params[k])
            np.testing.assert_allclose(updates[k], want, rtol=2e-5, atol=1e-6)


# {optimizer: the fields of its state that are first moments}
FIRST_MOMENTS = {"adamw": {"mu"}, "adafactor": set(), "lion": {"mu"}, "muon": {"mu", "trace"},
                 "rmsprop": set(), "sgd": {"trace"}}


@pytest.mark.parametrize("name", sorted(step.OPTIMIZERS))
def test_first_moments_alone_have_moment_dtype(name):
    """All else in an optimizer's state, but for counts, is float32. An update keeps the dtypes.

    Break: step.py: optax.trace(cfg.b1, accumulator_dtype=cfg.moment_dtype) => optax.trace(cfg.b1)
    """
    cfg = dataclasses.replace(BASE, optimizer=name, moment_dtype="bfloat16")
    shapes = {k: jax.ShapeDtypeStruct(row["shape"], jnp.float32) for k, row in STACK.items()}
    optimizer = step.make_optimizer(cfg, STACK)
    state = jax.eval_shape(optimizer.init, shapes)
    found = {}  # {field: dtypes}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.ndim and x.dtype != jnp.int32:
            names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
            field = [each for each in names if each and each not in STACK][-1]
            found.setdefault(field, set()).add(x.dtype.name)
    first = FIRST_MOMENTS.get(name, set())
    wanted = {field: {"bfloat16" if field in first else "float32"} for field in first | {*found}}
    assert name in FIRST_MOMENTS and found == wanted, (
        f"edit FIRST_MOMENTS in tests/test_step.py: {name!r}: the fields of its state that should "
        f"have moment_dtype, here bfloat16; all others are float32. They have {found}")
    assert jax.eval_shape(optimizer.update, shapes, state, shapes)[1] == state, (
        f"edit OPTIMIZERS in step.py: {name!r}: an update changes the dtypes of the state, so that "
        "a second step cannot run")


OF_OPTAX = {
    "constant": optax.constant_schedule(0.3),
    "linear": optax.linear_schedule(0.3, 0.03, 90),
    "cosine": optax.cosine_decay_schedule(0.3, 90, 0.1),
    "polynomial": optax.polynomial_schedule(0.3, 0.03, 1.5, 90)}


@pytest.mark.parametrize("name, warm", [
    *((name, 10) for name in OF_OPTAX), ("wsd", 0), ("wsd", 20), ("wsd", 90), ("inverse_sqrt", 20)])
def test_schedules_equal_optax_and_formulas(name, warm):
    """To 1e-7 after warm-up and after the end. inverse_sqrt: Vaswani et al. 2017, section 5.3.

    Break: step.py: n_decay = min(cfg.decay_frac * cfg.steps, n_rest) =>
    n_decay = min(cfg.decay_frac * cfg.steps, cfg.steps)
    """
    cfg = dataclasses.replace(
        BASE, schedule=name, lr=0.3, warmup_steps=float(warm), steps=100, decay_frac=0.2,
        poly_power=1.5, min_lr_frac=0.0 if name == "inverse_sqrt" else 0.1)
    at = np.arange(warm, 120)
    if name == "wsd":
        want = 0.3 * (0.1 + 0.9 * np.clip((100 - at) / min(20, 100 - warm), 0, 1))
    elif name == "inverse_sqrt":
        want = 0.3 * np.sqrt(warm / at)
    else:
        want = [float(OF_OPTAX[name](k - warm)) for k in at]
    np.testing.assert_allclose(rates(at, cfg), want, rtol=0, atol=1e-7)


@pytest.mark.parametrize("warmup, steps, n", [(10.0, 100, 10), (0.1, 100, 10), (0.33, 10, 3)])
def test_warm_up_is_linear_in_steps_or_a_fraction(warmup, steps, n):
    """Step k of n in the warm-up has lr (k + 1) / n, and the last one the peak.

    Break: step.py: return round(cfg.warmup_steps * cfg.steps) => return 1
    """
    cfg = dataclasses.replace(BASE, schedule="constant", lr=0.3, warmup_steps=warmup, steps=steps)
    want = 0.3 * np.minimum(np.arange(1, 13) / n, 1)
    np.testing.assert_allclose(rates(np.arange(12), cfg), want, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
def test_each_optimizer_has_its_default_rate(name):
    """With lr -1 a move is the default rate of the parameter's optimizer times the move with lr 1.

    Break: step.py: if cfg.lr == -1: => if cfg.lr == 0:
    """
    assert step.DEFAULT_LR.keys() == step.OPTIMIZERS.keys()
    g = {"w": jnp.array([[0.5, -0.25]]), "x": jnp.array([[0.5, -0.25]])}
    row = {"shape": (1, 2), "spec": P(), "init": ("normal", 1.0)}
    moves = {}
    for lr in (-1.0, 1.0, 0.0):
        cfg = config.Config(optimizer=name, schedule="constant", warmup_steps=0.0, lr=lr)
        optimizer = step.make_optimizer(cfg, {"w": row, "x": row | {"optimizer": "rmsprop"}})
        moved, _ = optimizer.update(g, optimizer.init(g), g)
        moves[lr] = {k: step.lr_at(0, cfg) * moved[k] for k in g}
    for k, rate in (("w", step.DEFAULT_LR[name]), ("x", step.DEFAULT_LR["rmsprop"])):
        np.testing.assert_allclose(moves[-1.0][k], rate * moves[1.0][k], rtol=1e-5)


def test_runs_with_another_schedule_share_a_program():
    """Also with another peak, horizon and warm-up, so that a sweep compiles once.

    Break: step.py: "lr": lr, => "lr": lr * (1 + cfg.steps),
    """
    texts = set()
    for change in (dict(lr=-1.0), dict(lr=0.3, schedule="wsd", steps=77, warmup_steps=3.0)):
        steps = lowered(dataclasses.replace(BASE, **change))
        texts.add(steps["lower_train_step"]().as_text())
    assert len(texts) == 1


def mask_loss(params, batch, cfg, train_keys=None):
    """A loss with the sum "mask": the dropout mask of layer 0's MLP of each row, or ones."""
    ones_BTD = jnp.ones((len(batch["row"]), 8, 16))
    if train_keys is not None:
        _, weights = model._with_dropout(ones_BTD, {}, train_keys, cfg)
        ones_BTD = model._dropout(ones_BTD, weights["dropout_keys"]["mlp"][0], cfg)
    sums = {"objective": params["b"].sum(),
            "mask": jnp.zeros((16, 8, 16)).at[batch["row"]].set(ones_BTD)}
    return sums, {"objective": jnp.float32(1), "mask": jnp.float32(1 / cfg.grad_accum_steps)}


def test_dropout_masks_depend_on_seed_step_and_row_alone():
    """Over a mesh, in microbatches, they are those that one device draws. Evaluations drop nothing.

    Break: step.py: step_key = jax.random.fold_in(jax.random.key(seed), step) =>
    step_key = jax.random.key(seed)
    """
    cfg = dataclasses.replace(SMALL, dropout=0.25, seed=5, dp=2, fsdp=1, sp=4, grad_accum_steps=4)
    batch = {"row": np.arange(16, dtype=np.int32)}
    steps, state, placed = compiled(cfg, batch, loss_fn=mask_loss)
    ones = jax.tree.map(np.asarray, steps["eval_step"](state["params"], placed)["mask"])
    np.testing.assert_array_equal(ones[0] / ones[1], 1)
    for at in range(2):
        state, metrics = steps["train_step"](state, placed)
        mask = np.divide(*metrics["sums"]["mask"])
        assert 0.22 < np.mean(mask == 0) < 0.28
        for row in (0, 5, 15):
            key = jax.random.key(5)
            for number in (at, row, 2):
                key = jax.random.fold_in(key, number)
            kept = jax.random.bernoulli(key, 0.75, (8, 16))
            np.testing.assert_array_equal(
                mask[row], np.where(kept, np.float32(1 / 0.75), 0))


@pytest.mark.slow
def test_an_evaluation_takes_microbatches():
    """Sums and counts are those of the batch to 1e-6, in less than half of its memory.

    Break: step.py: (microbatch_sums, batch, cfg.grad_accum_steps) => (microbatch_sums, batch, 1)
    """
    found, memory = [], []
    for n in (1, 4):
        cfg = dataclasses.replace(SMALL, fsdp=1, grad_accum_steps=n)
        steps = lowered(cfg, lm_batch(), *language_model(cfg), jax.devices()[:1])
        program = steps["lower_eval_step"]().compile()
        found.append(program(model.init(jax.random.key(0), cfg), lm_batch()))
        memory.append(program.memory_analysis().temp_size_in_bytes)
    assert found[0].keys() == found[1].keys()
    for name, pair in found[0].items():
        np.testing.assert_allclose(found[1][name], pair, rtol=1e-6, err_msg=name)
    assert memory[1] < memory[0] / 2


SPARSE = dataclasses.replace(SMALL, n_experts=8, capacity_factor=0.0)
# Eight devices along each axis, and two along three, so that each pair of axes occurs.
MESHES = [(8, 1, 1, 1, 1), (1, 8, 1, 1, 1), (1, 1, 8, 1, 1), (1, 1, 1, 8, 1), (1, 1, 1, 1, 8),
          (2, 2, 2, 1, 1), (2, 1, 1, 2, 2), (1, 2, 1, 2, 2), (1, 1, 2, 2, 2)]


def loss_and_grads(cfg, devices=None):
    """Gradients and sums of the loss on the mesh of cfg."""
    mesh, table = step.make_mesh(cfg, devices), model.param_table(cfg)
    shardings = {name: NamedSharding(mesh, row["spec"]) for name, row in table.items()}
    rng = np.random.default_rng(0)
    params = {name: np.float32(rng.normal(0, 0.3, row["shape"])) for name, row in table.items()}

    def objective(params, batch):
        sums, _ = model.loss_fn(params, batch, cfg)
        return sums["objective"], sums

    params, batch = jax.device_put(params, shardings), place(lm_batch(), mesh)
    with jax.set_mesh(mesh):
        grads, sums = jax.jit(
            jax.grad(objective, has_aux=True), out_shardings=(shardings, None))(params, batch)
    return host(grads), {name: float(x) for name, x in sums.items()}


@cache
def grads_of_one_device(cfg):
    return loss_and_grads(dataclasses.replace(cfg, fsdp=1), jax.devices()[:1])


@pytest.mark.parametrize("sizes", [
    pytest.param(sizes, marks=[pytest.mark.slow] * (8 not in sizes)) for sizes in MESHES])
def test_every_mesh_gives_the_same_gradients(sizes):
    """Loss sums to 1e-5 relative, gradients to 1e-5 of the largest entry (order of float32 sums).

    Break: model.py: .reshape(B, T, n_parts, -1, H)) =>
    .reshape(B, T, -1, n_parts, H).swapaxes(2, 3))
    """
    cfg = SPARSE if sizes[2] > 1 else SMALL
    grads, sums = loss_and_grads(dataclasses.replace(cfg, **dict(zip(step.AXES, sizes))))
    wanted, wanted_sums = grads_of_one_device(cfg)
    assert sums == pytest.approx(wanted_sums, rel=1e-5)
    for name in wanted:
        np.testing.assert_allclose(grads[name], wanted[name], rtol=0,
                                   atol=1e-5 * np.abs(wanted[name]).max(), err_msg=name)


def test_a_mesh_gives_the_same_steps():
    """In tiles and 4 ragged microbatches: the metrics of one device in one batch, to 1e-5.

    Break: step.py: (sums[name], counts[name]) for name in sums} =>
    (sums[name] / jax.sharding.get_abstract_mesh().size, counts[name]) for name in sums}
    """
    wanted = lm_run(dataclasses.replace(SMALL, fsdp=1), jax.devices()[:1])[2]
    cfg = dataclasses.replace(SMALL, fsdp=2, tp=2, sp=2, mlp_tiles=2, logit_tiles=4,
                              grad_accum_steps=4)
    for want, got in zip(wanted, lm_run(cfg)[2]):
        assert got == pytest.approx(want, rel=1e-5)


def test_arrays_that_a_fork_adds_to_the_state_are_sharded_like_the_parameters():
    """An average of the weights as moments are, a count not at all.

    Break: step.py: if name is None or x.shape != state["params"][name].shape: => if entry != "opt":
    """
    mesh = step.make_mesh(dataclasses.replace(BASE, dp=2, fsdp=2, tp=2))
    table = model.param_table(SMALL)
    shapes = {name: jax.ShapeDtypeStruct(row["shape"], jnp.float32) for name, row in table.items()}
    count = jax.ShapeDtypeStruct((), jnp.int32)
    state = {"params": shapes, "opt": {"mu": shapes}, "ema": {"average": shapes, "n": count}}
    shardings = step.state_shardings(state, table, mesh, "pinned_host")
    for name, row in table.items():
        assert shardings["params"][name].spec == row["spec"]
        assert shardings["ema"]["average"][name].spec == shardings["opt"]["mu"][name].spec
        assert shardings["ema"]["average"][name].memory_kind != "pinned_host"
    assert "dp" in str(shardings["ema"]["average"]["layers.wq"].spec)
    assert shardings["ema"]["n"].is_fully_replicated


def test_a_state_is_born_sharded_and_stays_so(two_by_two):
    """fsdp and tp leave a quarter of each matrix on a device, dp half of its moments (ZeRO-2).

    Break: step.py: names = (*jax.tree.leaves(axes), "dp") => names = (*jax.tree.leaves(axes),)
    """
    before, after = two_by_two["placed"], two_by_two["after"]
    announced = two_by_two["steps"]["state"]
    for was, now, plan in zip(*map(jax.tree.leaves, (before, after, announced)), strict=True):
        assert was.is_equivalent_to(now.sharding, now.ndim)
        assert plan.sharding.is_equivalent_to(now.sharding, now.ndim)
    for name, row in model.param_table(SMALL).items():
        n, part = np.prod(row["shape"]), np.prod(two_by_two["held"][name])
        is_split = model.WEIGHT_AXES in row["spec"]
        assert part * 4 == n or not is_split, name
        for moments in (announced["opt"][0].mu, announced["opt"][0].nu):
            held = np.prod(moments[name].sharding.shard_shape(row["shape"]))
            assert held * (1 + is_split) == part, name
    assert all(two_by_two["deleted"])


def test_gradients_are_sharded_like_their_moments():
    """Each gradient is constrained to the sharding of its moments, so that XLA may reduce-scatter.

    Break: step.py: if mesh.empty: => if True:
    """
    cfg = dataclasses.replace(BASE, dp=2, fsdp=2, tp=2)
    mesh, optimizer = step.make_mesh(cfg), step.make_optimizer(cfg, TABLE)
    with jax.set_mesh(mesh):
        state, _ = linear_run(cfg)
        jaxpr = jax.make_jaxpr(lambda s, b: step.train_step(
            s, b, 0.1, cfg, linear_loss, optimizer, TABLE))(state, linear_batch())
    specs = [e.params["sharding"].spec for e in jaxpr.eqns
             if e.primitive.name == "sharding_constraint"]
    assert sorted(map(str, specs)) == sorted(map(str, step.moment_specs(TABLE, mesh).values()))
    assert P(("fsdp", "dp"), "tp") in specs
    table = {n: dict(shape=(n, 4), spec=P(("fsdp", "ep"), "tp")) for n in (6, 8)}
    assert step.moment_specs(table, mesh) == {  # dp cannot split 6 as well
        6: P(("fsdp", "ep"), "tp"), 8: P(("fsdp", "ep", "dp"), "tp")}


@pytest.mark.slow
def test_moments_on_the_host_change_nothing():
    """They stay there, sharded as on devices; steps and digests are bit-identical.

    Break: step.py: state_shardings(shapes, table, mesh, "pinned_host") =>
    state_shardings(shapes, table, mesh)
    """
    cfg = dataclasses.replace(SMALL, dp=2, fsdp=4)
    steps, got, seen_on_host, _ = lm_run(dataclasses.replace(cfg, offload_optimizer=True))
    unoffloaded, want, seen, _ = lm_run(cfg)
    assert seen == seen_on_host
    for programs, state in ((steps, got), (unoffloaded, want)):
        sums = step.digest_sums(jax.tree.map(jnp.asarray, host(state)))
        assert step.digest(sums) == step.digest(programs["digest"](state))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got)):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for tree in (steps["state"], got):
        moments = tree["opt"][0].mu["layers.wq"]
        assert moments.sharding.memory_kind == "pinned_host"
        assert moments.sharding.spec == want["opt"][0].mu["layers.wq"].sharding.spec
        assert tree["params"]["layers.wq"].sharding.memory_kind == "device"


def np_digest_sums(x):
    """digest_sums of one array with Python's integers."""
    def mixed(h):
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        return h ^ (h >> 16)

    n_bytes = min(x.dtype.itemsize, 4)
    raw = np.ascontiguousarray(x).tobytes()
    words = [int.from_bytes(raw[i:i + n_bytes], "little") for i in range(0, len(raw), n_bytes)]
    return [sum(mixed((word + mixed(i ^ seed)) % 2**32) for i, word in enumerate(words)) % 2**32
            for seed in (0x5BD1E995, 0x9E3779B9)]


def test_a_digest_is_of_all_bits_and_their_positions():
    """The sums are those of Python's integers for each dtype and leaf, and one bit counts.

    Break: step.py: _mix(bits + _mix(index ^ jnp.uint32(seed))) =>
    bits * (_mix(index ^ jnp.uint32(seed)) | 1)
    """
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    arrays = {"f32": x, "bf16": jnp.bfloat16(x), "i32": np.int32(1000 * x), "bool": x > 0,
              "scalar": np.int32(-7), "empty": np.zeros((0, 2), np.float32), "u8": np.uint8(x)}
    state = {"params": arrays, "opt": (), "step": np.int32(3), "fork": {"ema": [x]}}
    sums = jax.device_get(jax.jit(step.digest_sums)(state))
    assert sums["step"][""].tolist() == np_digest_sums(np.asarray(state["step"]))
    assert sums["fork"]["ema/0"].tolist() == sums["params"]["f32"].tolist()
    for name, array in arrays.items():
        assert sums["params"][name].tolist() == np_digest_sums(np.asarray(array)), name

    def digest(x):
        return step.digest(step.digest_sums({"params": {"w": x}, "opt": ()}))["params"]

    flipped, swapped = x.copy(), x.copy()
    flipped.view(np.uint32)[2, 3, 4] ^= 1 << 31
    swapped[0, 0, 0], swapped[2, 3, 4] = x[2, 3, 4], x[0, 0, 0]
    signs = x * np.where(np.arange(x.size).reshape(x.shape) < 2, -1, 1).astype(np.float32)
    digests = {digest(a) for a in (x, flipped, swapped, x.reshape(4, 3, 5) * 2, -x, signs)}
    assert len(digests) == 6 and all(len(text) == 16 for text in digests)
    assert digest(x) == digest(x.copy())


def test_a_step_that_is_not_finite_leaves_the_model_as_it_was():
    """A NaN, or a finite loss whose gradient is not (the square root at 0), is only counted.

    Break: step.py: jnp.isfinite(sums["objective"]) & jnp.isfinite(grad_norm) =>
    jnp.isfinite(sums["objective"])
    """
    def root(params, batch, cfg):
        return {"objective": jnp.sqrt(params["b"] - batch).sum()}, {"objective": jnp.float32(1)}

    state, update = linear_run(BASE, root)
    before = host(state)
    for batch, loss in ((np.float32(0.5), 0), (np.float32(np.nan), np.nan)):
        after, metrics = update(state, batch)
        assert metrics["finite"] == 0
        np.testing.assert_equal(float(np.divide(*metrics["sums"]["objective"])), loss)
        assert (int(after["step"]), int(after["skipped"]), metrics["skipped"]) == (1, 1, 1)
        for part in ("params", "opt"):
            jax.tree.map(np.testing.assert_array_equal, before[part], host(after[part]))
    after, metrics = update(after, np.float32(0.25))
    assert (int(after["step"]), int(after["skipped"]), metrics["finite"]) == (2, 1, 1)
    assert not np.array_equal(before["params"]["b"], after["params"]["b"])


def test_parameters_and_moments_have_their_dtypes():
    """param_dtype bfloat16 rounds once, after a move in float32, to one of the two neighbours;
    moments are float32.

    Break: step.py: old_opt, _f32(old_params)) => old_opt, old_params)
    """
    def third(params, batch, cfg):
        return given_gradient(params, batch, cfg)[0], {"objective": jnp.float32(3)}

    wide, update = linear_run(dataclasses.replace(BASE, lr=1e-4, dtype="bfloat16"))
    moved = np.abs(np.asarray(update(wide, linear_batch())[0]["params"]["b"]) - 0.5)
    assert (moved > 5e-5).all() and (moved < 2e-4).all()
    cfg = dataclasses.replace(BASE, param_dtype="bfloat16", lr=1.0, weight_decay=0.3,
                              schedule="constant")
    narrow, update = linear_run(cfg, third)
    w = np.float32(narrow["params"]["w"])
    after, _ = update(narrow, {"w": jnp.zeros((8, 4), jnp.bfloat16)})
    want = w - np.float32(0.3) * w
    got = np.float32(after["params"]["w"])
    assert (np.abs(got - want) < 2.0**-7 * np.abs(want)).all() and (got != want).any()
    ones = {"w": jnp.ones((8, 4), jnp.bfloat16)}
    assert update(narrow, ones)[1]["grad_norm"] == pytest.approx(32**0.5 / 3, rel=1e-6)
    for state, dtype in ((wide, "float32"), (narrow, "bfloat16"), (after, "bfloat16")):
        assert {x.dtype.name for x in state["params"].values()} == {dtype}
        moments = jax.tree.leaves((state["opt"][0].mu, state["opt"][0].nu))
        assert {x.dtype.name for x in moments} == {"float32"}


def test_bfloat16_parameters_are_rounded_with_the_exact_mean():
    """Up or down to the nearest two numbers, by a random key of (seed, step, name), on any mesh. So
    moves below half a unit count.

    Break: step.py: bitcast_convert_type(x, jnp.uint32) + noise =>
    bitcast_convert_type(x, jnp.uint32) + 0 * noise
    """
    values = np.float32([1, 1 + 2**-9, 1 + 3 * 2**-9, -1 - 2**-9, -0.2, 3e38, 0, 1e-40, -np.inf])
    x = {"w": jnp.tile(values, (20_000, 1)), "v": jnp.tile(values, (20_000, 1))}
    rounded = jax.jit(step.round_stochastically)
    got = np.float32(rounded(x, 3, 7)["w"])
    below = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    above = ((values.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    assert ((got == values) | ((got == below) | (got == above)) & (below != values)).all()
    down, up = np.float64(below[:7]), np.float64(above[:7])
    np.testing.assert_allclose(
        np.mean(got[:, :7] == up, 0), (values[:7] - down) / (up - down), atol=0.015)
    mesh = step.make_mesh(dataclasses.replace(BASE, dp=8))
    split = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp")))
    np.testing.assert_array_equal(np.float32(rounded(split, 3, 7)["w"]), got)
    for other in (rounded(x, 3, 7)["v"], rounded(x, 4, 7)["w"], rounded(x, 3, 8)["w"]):
        assert not np.array_equal(np.float32(other), got)
    cfg = dataclasses.replace(BASE, param_dtype="bfloat16", lr=1e-3, schedule="constant")
    state, update = linear_run(cfg, given_gradient)
    before = np.float32(state["params"]["w"])
    for _ in range(20):
        state, _ = update(state, {"w": jnp.ones((8, 4), jnp.bfloat16)})
    moved = np.float32(state["params"]["w"]) - before  # by Adam: 1e-3 a step
    assert -0.022 < moved.mean() < -0.018


def test_fp16_overflow_halves_the_scale_and_skips():
    """finite stays 1; below scale 1 it is 0.

    Break: step.py: finite | (scale >= 1) => finite | (scale >= 0)
    """
    state, update = linear_run(dataclasses.replace(BASE, dtype="float16"))
    bad = linear_batch()
    bad["x"][0] = 1e6  # beyond float16's largest number, 65504
    assert state["scale"]["value"] == 2.0**15  # half of float16's largest power of two
    for scale, finite in ((2.0**15, 1), (1.0, 1), (0.5, 0)):
        state["scale"]["value"] = jnp.float32(scale)
        after, metrics = update(state, bad)
        assert after["scale"]["value"] == scale / 2 and after["scale"]["good"] == 0
        assert (float(metrics["finite"]), float(metrics["loss_scale"])) == (finite, scale)
        assert int(after["skipped"]) == int(state["skipped"]) + 1
        np.testing.assert_array_equal(after["params"]["w"], state["params"]["w"])


def test_the_loss_scale_follows_overflows(monkeypatch):
    """As in arXiv:1710.03740 and PyTorch, but at most 2^24 and at least float16's smallest number.

    Break: step.py: jnp.minimum(scale["value"] * 2, FP16_MAX_SCALE) => scale["value"] * 2
    """
    def next_scales(value, good, finite):
        scale, seen = {"value": jnp.float32(value), "good": jnp.int32(good)}, []
        for is_finite in finite:
            scale = step._next_scale(scale, jnp.bool_(is_finite))
            seen.append((float(scale["value"]), int(scale["good"])))
        return seen

    assert next_scales(8, 1998, (1, 1)) == [(8, 1999), (16, 0)]
    assert next_scales(2.0**-13, 5, (0, 0)) == [(2.0**-14, 0), (2.0**-14, 0)]
    monkeypatch.setattr(step, "FP16_PATIENCE", 3)
    assert next_scales(8, 0, (1, 1, 0, 1, 1)) == [(8, 1), (8, 2), (4, 0), (4, 1), (4, 2)]
    assert next_scales(2.0**24, 2, (1,)) == [(2.0**24, 0)]


@pytest.mark.parametrize("size", [1, 1e-8])
def test_fp16_gradient_is_unscaled(size):
    """grad_norm is float32's within 2%, though gradients may be below 6e-8, float16's smallest.

    Break: step.py: loss_scale = scale / batch_size => loss_scale = 1.0
    """
    def small_loss(params, batch, cfg):
        sums, counts = linear_loss(params, batch, cfg)
        return {"objective": size * sums["objective"]}, counts

    norms, batch = {}, linear_batch()
    batch["labels"] = batch["y"]  # their number keeps the scaled cotangents in range
    for dtype in ("float32", "float16"):
        state, update = linear_run(dataclasses.replace(BASE, dtype=dtype), small_loss)
        norms[dtype] = float(update(state, batch)[1]["grad_norm"])
    assert norms["float16"] == pytest.approx(norms["float32"], rel=0.02)


def test_frozen_parameters_are_bit_identical_and_have_no_moments():
    """LoRA freezes all but its factors, --freeze more; all others move and have moments.

    Break: config.py: freeze = all_but_lora + freeze => freeze = freeze
    """
    cfg = config.derive_text(dataclasses.replace(
        SMALL, fsdp=4, tp=2, grad_accum_steps=2, lora_rank=2, lora_targets=("*w_up",),
        freeze=("*.lora_a",)))
    steps, state, _, batch = lm_run(cfg, n_steps=0)
    first = host(state["params"])
    for _ in range(2):
        state, _ = steps["train_step"](state, batch)
    still = {n for n, x in state["params"].items() if np.array_equal(x, first[n])}
    assert still == {n for n in state["params"] if ".lora_b" not in n}
    moments = {key.key for path, _ in jax.tree_util.tree_leaves_with_path(state["opt"])
               for key in path if getattr(key, "key", None) in state["params"]}
    assert moments == set(state["params"]) - still


@pytest.mark.slow
def test_weight_statistics_equal_numpy():
    """The gradient norms make up the global norm. All are zero at steps that are not logged.

    Break: step.py: jnp.minimum((N_BINS * fraction) => jnp.minimum(((N_BINS - 1) * fraction)
    """
    cfg = dataclasses.replace(SMALL, watch=tuple(model.param_table(SMALL)), log_every=2, fsdp=4,
                              tp=2, freeze=("final_norm",))
    steps, state, _, batch = lm_run(cfg, n_steps=0)
    state, nothing = steps["train_step"](state, batch)
    params = host(state["params"])
    state, metrics = steps["train_step"](state, batch)
    assert not any(np.any(x) for x in jax.tree.leaves(nothing["watch"]))
    norms = [float(x["grad_norm"]) for x in metrics["watch"].values()]
    assert metrics["watch"]["final_norm"]["grad_norm"] == 0
    assert np.sqrt(np.sum(np.square(norms))) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    for name, x in params.items():
        seen, x = host(metrics["watch"][name]), x.astype(np.float64)
        assert (seen["min"], seen["max"]) == (x.min(), x.max())
        assert seen["mean"] == pytest.approx(x.mean(), abs=1e-6)
        assert seen["std"] == pytest.approx(x.std(), rel=1e-4, abs=1e-6)
        assert seen["counts"].sum() == x.size
        if x.std() > 1e-3:  # a value within a rounding of an edge may fall on its other side
            edges = np.cumsum(np.histogram(x, 64)[0])
            assert np.abs(np.cumsum(seen["counts"]) - edges).max() <= 2 + x.size // 1000
            assert seen["counts"][-1] >= 1  # the largest itself


def fake_device(platform, i, slice_index):
    made = types.ModuleType(f"device {i}")  # a module, since a mesh needs what can be hashed
    vars(made).update(id=i, platform=platform, device_kind="", process_index=0,
                      slice_index=slice_index)
    return made


def test_slices_split_the_axis_that_crosses_the_slow_network():
    """Groups split dp, or fsdp where dp is 1; their number is that of the devices' slices.

    Break: step.py: axis = "fsdp" if sizes["dp"] == 1 else "dp" => axis = "fsdp"
    """
    for sizes in (dict(dp=4, fsdp=2), dict(dp=1, fsdp=4, tp=2)):
        mesh = step.make_mesh(dataclasses.replace(BASE, slices=2, **sizes))
        assert {a: mesh.shape[a] for a in sizes} == sizes
        ids = np.vectorize(lambda d: d.id)(mesh.devices)
        halves = np.split(ids, 2, axis=0 if sizes["dp"] > 1 else 1)
        assert [sorted(half.ravel().tolist()) for half in halves] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    cfg = dataclasses.replace(BASE, dp=2, fsdp=-1)
    with pytest.raises(ValueError, match="slices 1: the devices have 2; set it to 2"):
        step.make_mesh(cfg, [fake_device("tpu", i, i % 2) for i in range(8)])
    mesh = step.make_mesh(
        dataclasses.replace(cfg, slices=2), [fake_device("cpu", i, i % 2) for i in range(8)])
    assert [{d.slice_index for d in row.flat} for row in mesh.devices] == [{0}, {1}]


def test_check_shapes_names_the_parameter():
    """A dim that the mesh cannot split is reported with name, size and parts; others are not.

    Break: step.py: if n % n_parts: => if n % n_parts and n > n_parts:
    """
    mesh = step.make_mesh(dataclasses.replace(BASE, dp=1, fsdp=2, tp=4))
    table = {"good": dict(shape=(4, 8), spec=P("fsdp", "tp")),
             "odd": dict(shape=(4, 6), spec=P("fsdp", "tp")), "low": dict(shape=(3,), spec=P("tp")),
             "whole": dict(shape=(5, 7), spec=P())}
    assert step.check_shapes(table, mesh) == [
        "odd (4, 6): dim 6 must be a multiple of the size of tp = 4",
        "low (3,): dim 3 must be a multiple of the size of tp = 4"]


def test_the_parts_of_a_step_are_named_in_a_profile():
    """The model's scopes are forward and backward.

    Break: model.py: with jax.named_scope("mlp"): => with jax.named_scope("attention"):
    """
    cfg = dataclasses.replace(SMALL, fsdp=1)
    steps = lowered(cfg, lm_batch(), *language_model(cfg), jax.devices()[:1])
    names = re.findall(r'op_name="([^"]*)"', steps["lower_train_step"]().compile().as_text())
    words = [re.split("[/()]", name) for name in names]
    parts = ("embedding", "attention", "mlp", "head", "loss")
    for scope in ("gradients", "clip", "optimizer", *parts):
        assert any(scope in path for path in words), scope
    for scope in parts:
        assert any(scope in path and "transpose" in path for path in words), scope


def vector_loss(params, batch, cfg):
    """linear_loss, and vectors of sums: a histogram, sums by column, and squares split by row."""
    sums, counts = linear_loss(params, batch, cfg)
    bins = jnp.clip((50 * (batch["x"] + 2)).astype(jnp.int32), 0, 199)
    above = batch["y"] > 1
    squares = (batch["x"] ** 2).sum(axis=1)
    sums |= {"histogram": jnp.zeros(200).at[bins].add(1.0),
             "y": jnp.where(above, batch["y"], 0).sum(axis=0),
             "by_row": jax.lax.with_sharding_constraint(squares, P("fsdp"))}
    counts |= {"histogram": len(bins), "y": above.sum(axis=0), "by_row": 1 / cfg.grad_accum_steps}
    return sums, counts


def vector_sums(batch):
    """The vectors of vector_loss in 4 microbatches, each of every fourth row, by NumPy."""
    bins = np.clip((50 * (batch["x"] + np.float32(2))).astype(int), 0, 199)
    above = batch["y"] > 1
    return {"histogram": (np.bincount(bins.ravel(), minlength=200), len(bins)),
            "y": (np.where(above, batch["y"], 0).sum(axis=0, dtype=float), above.sum(axis=0)),
            "by_row": ((batch["x"] ** 2).sum(axis=1).reshape(4, 4).sum(axis=1), 1)}


def test_sums_may_be_vectors():
    """Sums of an accumulated step and of an evaluation, to 1e-6.

    Break: step.py: jit(eval_fn, out_shardings=replicated) => jit(eval_fn)
    """
    cfg = dataclasses.replace(BASE, grad_accum_steps=4, fsdp=4)
    batches = [linear_batch(seed) for seed in range(3)]
    batches[0]["y"][:, 2] = 0  # never above 1
    steps, state, batch = compiled(
        cfg, batches[0], loss_fn=vector_loss, devices=jax.devices()[:4])
    placed = [batch, *(jax.device_put(b, jax.tree.map(lambda x: x.sharding, batch))
                       for b in batches[1:])]
    first = steps["eval_step"](state["params"], batch)
    totals = step.evaluate(steps["eval_step"], state["params"], placed)
    metrics = steps["train_step"](state, batch)[1]
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves((first, metrics)))
    want = [vector_sums(b) for b in batches]
    for name, (total, count) in want[0].items():
        for got, want_one in zip(metrics["sums"][name], (total, count)):
            np.testing.assert_allclose(got, want_one, rtol=1e-6)
        for got, parts in zip(totals[name], zip(*(w[name] for w in want)), strict=True):
            np.testing.assert_allclose(got, np.sum(parts, axis=0), rtol=1e-6)
    assert np.divide(*metrics["sums"]["histogram"]).sum() == 8


def test_evaluation_adds_up_in_float64_and_can_be_stopped():
    """Sums that float32 would round add up exactly. Once stopped() is true no batch is taken.

    Break: step.py: jax.tree.map(np.float64, => jax.tree.map(np.float32,
    """
    def sums(params, batch):
        return {"loss": (jnp.float32(batch), jnp.int32(params))}

    for batches in ([2**24], [2**24, 1], [2**24, 1, 1]):
        assert step.evaluate(sums, 3, batches) == {"loss": (sum(batches), 3 * len(batches))}
    assert step.evaluate(sums, 3, []) == {}
    taken, stops = iter(range(9)), iter([False, False, True])
    assert step.evaluate(sums, 3, taken, lambda: next(stops)) is None
    assert next(taken) == 3


def test_loss_optimizer_and_step_can_be_replaced():
    """override is called with loss_fn, optimizer and train_step by name, and its results run.

    Break: step.py: override("optimizer", make_optimizer(cfg, table)) => make_optimizer(cfg, table)
    """
    cfg, given = dataclasses.replace(BASE, weight_decay=0.0, schedule="constant"), []

    def double(params, batch, cfg):
        sums, counts = linear_loss(params, batch, cfg)
        return {k: 2 * x for k, x in sums.items()}, counts

    def override(name, value):
        given.append(name)
        if name == "train_step":
            def pinned(state, batch, lr):
                new, metrics = value(state, batch, lr)
                return new | {"skipped": new["skipped"] + 7}, metrics
            return pinned
        return {"loss_fn": double, "optimizer": optax.sgd(-1.0)}[name]  # optax's sign is ours less

    batch = linear_batch()
    steps = lowered(cfg, batch, override=override)
    assert given == ["loss_fn", "optimizer", "train_step"]
    old = steps["init"](jax.random.key(0))
    params = host(old["params"])
    new, metrics = steps["lower_train_step"]().compile()(
        old, place(batch, step.make_mesh(cfg)), np.float32(0.1))
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    mean = np.divide(*metrics["sums"]["objective"])
    assert mean == pytest.approx(2 * (error**2).mean(), rel=1e-5)
    assert int(new["skipped"]) == 7
    grad = 4 * error.sum(axis=0) / error.size
    clip = min(1, 1 / float(metrics["grad_norm"]))
    np.testing.assert_allclose(new["params"]["b"], params["b"] - 0.1 * clip * grad, atol=1e-5)


def test_init_takes_given_parameters():
    """Bit for bit, sharded and in the same memory, with step 0 and moments of 0.

    Break: step.py: init_fn(key, cfg) | (params or {}) => init_fn(key, cfg)
    """
    cfg = dataclasses.replace(BASE, dp=2, fsdp=2, tp=2)
    steps, *_ = compiled(cfg, linear_batch())
    given = {"w": np.arange(32, dtype=np.float32).reshape(8, 4),
             "b": np.arange(4, dtype=np.float32)}
    state = steps["init"](jax.random.key(0), params={
        name: jax.device_put(x, steps["state"]["params"][name].sharding)
        for name, x in given.items()})
    for name in given:
        np.testing.assert_array_equal(state["params"][name], given[name])
        assert state["params"][name].sharding == steps["state"]["params"][name].sharding
    assert int(state["step"]) == 0 and not any(np.any(x) for x in jax.tree.leaves(state["opt"]))
    program = steps["init"].lower(jax.random.key(0), params=state["params"]).compile()
    assert program.memory_analysis().alias_size_in_bytes == 4 * (8 // 2 * 4 // 2 + 4)


@pytest.mark.parametrize("change, kinds", [
    ({}, {"parameters": 48, "moments": 64 + 4}),
    (dict(offload_optimizer=True), {"parameters": 48, "moments": 4, "moments in host memory": 64})])
def test_program_memory_equals_a_hand_count(change, kinds):
    """The total has also batch, step, skipped, metrics, rate, temporaries and XLA's pointers.

    Break: step.py: array_bytes((held, batch)) + added => added
    """
    cfg = dataclasses.replace(BASE, dp=2, fsdp=2, tp=2, **change)
    memory = compiled(cfg, linear_batch())[0]["memory"]
    assert {k: memory[k] for k in memory if "mp" not in k and k != "total"} == kinds
    if "offload_optimizer" not in change:  # a CPU's XLA counts the host's memory as the device's
        held = sum(kinds.values()) + 2 * 4 + 4 * (8 + 4) * 4 + 6 * 4 + 6 * 4
        assert 0 <= memory["total"] - memory["temporaries"] - held <= 8 * 20, (
            "if you added to the state, edit `held` in this test", memory)


def test_memory_of_a_device():
    """A CPU's devices divide what the kernel reports; without a device it is the table's, or None.

    Break: step.py: kind.startswith(name) => name.startswith(kind)
    """
    mem_total = Path("/proc/meminfo").read_text().split()[1]  # of its first line, in KiB
    limit = step.memory_limit(step.make_mesh(BASE))
    assert limit <= int(mem_total) * 1024 / 8 * 1.01

    def limit_of(kind, memory_stats=lambda: None):
        device = types.SimpleNamespace(
            platform="tpu", device_kind=kind, memory_stats=memory_stats)
        return step.memory_limit(types.SimpleNamespace(devices=np.array([device])))

    assert limit_of("TPU v5 lite") == 15.75 * 2**30 and limit_of("TPU v5") == 95 * 2**30
    assert limit_of("TPU v5", lambda: {"bytes_limit": 7}) == 7
    assert limit_of("TPU v1") is None


@pytest.mark.parametrize("kind, tflops", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835),
    ("NVIDIA H200", 989), ("NVIDIA H20", 148), ("NVIDIA A100-SXM4-40GB", 312),
    ("NVIDIA GeForce RTX 3090", 71), ("Tesla T4", 65), ("TPU v5 lite", 197), ("TPU7x", 1153),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA GeForce RTX 4080 SUPER", None), ("NVIDIA GeForce RTX 3090 Ti", None), ("cpu", None)])
def test_peaks_are_those_of_the_card(kind, tflops):
    """Cards whose names begin alike have peaks of their own; those of an unknown one are not known.

    Break: step.py: "NVIDIA H100 PCIe": (756, 72.7), => "NVIDIA H100 PCIe": (989, 72.7),
    """
    assert step.peaks(kind)[0] == tflops
    if tflops:  # a program has less than the card
        assert step.peaks(kind)[1] > 10


def test_a_container_and_ulimit_bound_the_memory(tmp_path, monkeypatch):
    """The least limit of the groups that contain this process, in the files of both versions; "max"
    and a missing file are none.

    Break: step.py: for root, name in CGROUP_FILES.items(): => for root, name in ():
    """
    mesh = step.make_mesh(BASE)
    group = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)[2]
    folders = {"memory.max": tmp_path / "new", "memory.limit_in_bytes": tmp_path / "old"}
    monkeypatch.setattr(step, "CGROUP_FILES", {str(path): name for name, path in folders.items()})
    for name, folder in folders.items():
        limits = {folder: 2**30, folder / group.strip("/") / ".": 2**31}
        for path, limit in limits.items():
            path.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(f"{limit}\n")
            assert step.memory_limit(mesh) == limit // 8
            (path / name).write_text("max\n")
        (folder / name).write_text(f"{2**40}\n")
    assert step.memory_limit(mesh) < 2**40 // 8
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (2**33, limits[1]))
        assert step.memory_limit(mesh) <= 2**33 // 8
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_port_in_use_is_an_error():
    """JAX's coordinator would crash.

    Break: step.py: if process_id == 0: => if False:
    """
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"coordinator: port {port} of .*Address already in"):
            step.init_distributed(f"localhost:{port}", 1, 0)


def test_a_process_that_waits_says_how_to_launch_the_others():
    """Again and again, until they have come.

    Break: step.py: text = "still waiting for the others" => return
    """
    with socket.create_server(("", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"
    code = f"import step; step.REMIND_S = 0.2; step.init_distributed({address!r}, 3, 0)"
    waiting = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE,
                               text=True)
    timer = threading.Timer(30, waiting.kill)
    timer.start()
    lines = [waiting.stderr.readline() for _ in range(3)]
    waiting.kill()
    timer.cancel()
    waiting.communicate()
    launch = f"--coordinator {address} --n_processes 3 --process_id I, I from 0 to 2"
    assert all(launch in line for line in lines), lines
    assert ["still waiting for the others" in line for line in lines] == [False, True, True]


@pytest.mark.parametrize("flags, listed", [
    ("", "--grad_accum_steps 2, --grad_accum_steps 4, --mlp_tiles 16, --remat full, "
         "--remat offload, --offload_optimizer"),
    ("--remat offload --grad_accum_steps 4 --mlp_tiles 16 --offload_optimizer", ""),
    ("--remat full --grad_accum_steps 2 --n_experts 2 --ep 2 --fsdp 2",
     "--grad_accum_steps 4, --remat offload, --offload_optimizer")])
def test_flags_that_save_memory_are_legal(flags, listed):
    """Flags that are not set yet are listed, and each of them is legal.

    Break: step.py: while rows % n == 0: => while cfg.batch_size % n == 0:
    """
    argv = "--fsdp 4 --tp 2 --batch_size 16 --n_heads 4".split() + flags.split()
    cfg = config.derive_text(config.parse(argv))
    found = step.memory_flags(cfg, step.make_mesh(cfg), model.memory_savers(1, cfg))
    assert ", ".join(map(step.as_flags, found)) == listed
    for flag in found:
        changed = config.parse([*argv, *step.as_flags(flag).split()])
        config.validate(changed, 8, task_errors=config.text_errors)
        assert changed != config.parse(argv)


SAVERS = [{"grad_accum_steps": 2}, {"grad_accum_steps": 4}, {"remat": "full"}, {"mlp_tiles": 8},
          {"offload_optimizer": True}]


def made_up_peak(changes):
    """Bytes of a step: for the state, and for each row; --remat does nothing."""
    state = 500 if "offload_optimizer" in changes else 1000
    row = 40 if "mlp_tiles" in changes else 100
    return (state + row * 4 / changes.get("grad_accum_steps", 1)) * 2**30


@pytest.mark.parametrize("limit, words", [
    (1399, "--grad_accum_steps 2 (1,200 GiB)"), (1199, "--grad_accum_steps 4 (1,100 GiB)"),
    (1099, "--grad_accum_steps 4 --mlp_tiles 8 (1,040 GiB)"),
    (1039, "--grad_accum_steps 4 --mlp_tiles 8 --offload_optimizer (540 GiB)"),
    (1400, "--grad_accum_steps 2 (1,200 GiB)"),  # it seemed to fit: a tenth less
    (None, "--grad_accum_steps 2 (1,200 GiB)"),
    (530, "a smaller --batch_size, or more devices along fsdp, tp or sp (540 GiB with "
          "--grad_accum_steps 4 --mlp_tiles 8 --offload_optimizer)")])
def test_flags_are_added_until_a_run_fits(limit, words):
    """In their order, without those that have no effect alone or together.

    Break: step.py: new_peak < 0.99 * peak => new_peak <= peak
    """
    n_bytes = limit and limit * 2**30
    assert step.as_advice(*step.suggest_flags(SAVERS, made_up_peak, n_bytes), n_bytes) == words

    def only_together(changes):
        compiles = "mlp_tiles" in changes and changes.get("grad_accum_steps") == 4
        return made_up_peak(changes) if compiles else np.inf

    found = step.suggest_flags(SAVERS[1:2] + SAVERS[3:], only_together, 1400 * 2**30)
    assert found == ({"grad_accum_steps": 4, "mlp_tiles": 8}, 1040 * 2**30)


def test_lack_of_memory_is_explained(monkeypatch):
    """The error has reason and advice; a program that needs more than the limit is an error in GiB.

    Break: step.py: n_bytes > limit: => n_bytes > 2 * limit:
    """
    def explained(error, suggest):
        with step.explain_oom(suggest):
            raise error

    with pytest.raises(ValueError, match="^does not fit: too large; to change: less$"):
        explained(MemoryError("too large"), lambda: "less")
    out_of_memory = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes\nand a long report")
    with pytest.raises(ValueError, match="^does not fit: RESOURCE_EXHAUSTED: 9 bytes; .*: less$"):
        explained(out_of_memory, lambda: "less")
    for other in (jax.errors.JaxRuntimeError("INTERNAL: broken"), KeyError("name")):
        with pytest.raises(type(other), match=r"broken|name"):
            explained(other, lambda: pytest.fail("not needed"))
    memory = {"parameters": 2**28, "moments": 2**29}

    def check(**peaks):
        step.check_fits(memory, peaks, None)

    monkeypatch.setattr(step, "memory_limit", lambda mesh: 2**30)
    check(step=2**30, evaluation=2**29)
    with pytest.raises(MemoryError, match="^evaluation needs 1.25 GiB on each device, which has 1 "
                                          "GiB; parameters take 0.25 GiB and moments 0.5 GiB of"):
        check(step=2**29, evaluation=2**30 + 2**28)
    monkeypatch.setattr(step, "memory_limit", lambda mesh: None)
    check(step=2**60)


@pytest.mark.parametrize("vendor, flags, on_cpu", [
    ("AuthenticAMD", "avx2 avx512f", "float32"), ("AuthenticAMD", "avx512f avx512_bf16", "mixed"),
    ("GenuineIntel", "avx512f avx512_bf16", "float32"), ("GenuineIntel", "amx_bf16 avx2", "mixed")])
def test_dtype_auto_is_the_fastest_of_the_device(monkeypatch, tmp_path, vendor, flags, on_cpu):
    """mixed on a CPU that multiplies bfloat16 faster than float32. Any other dtype is kept.

    Break: step.py: {"AuthenticAMD", "avx512_bf16"} <= words: => "avx512_bf16" in words:
    """
    assert Path("/proc/cpuinfo").is_file()
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor: 0\nvendor_id\t: {vendor}\nflags\t: fpu {flags} sse\n")
    monkeypatch.setattr(step, "Path", lambda path: cpuinfo)
    assert step.choose_dtype("auto", "cpu") == on_cpu
    assert step.choose_dtype("auto", "tpu") == step.choose_dtype("auto", "cuda") == "bfloat16"
    assert step.choose_dtype("float16", "cpu") == step.choose_dtype("float16", "tpu") == "float16"
    assert step.choose_dtype("auto", "old cuda") == "float16"


@pytest.mark.parametrize("platform, capability, known", [
    ("gpu", "8.0", "cuda"), ("gpu", "12.1", "cuda"), ("gpu", "7.5", "old cuda"),
    ("gpu", "gfx942", "gpu"), ("gpu", None, "gpu"), ("tpu", None, "tpu"), ("cpu", None, "cpu")])
def test_a_gpu_is_known_by_its_compute_capability(platform, capability, known, monkeypatch):
    """NVIDIA's is a number, AMD's a name. Only NVIDIA's get the option for deterministic sums.

    Break: step.py: return "cuda" if float(capability) >= 8 => return "cuda" if capability >= "8"
    """
    more = {"compute_capability": capability} if capability else {}
    device = types.SimpleNamespace(platform=platform, **more)
    assert step.platform(device) == known
    free, exact = (step.compiler_options(config.Config(deterministic=deterministic), device)
                   for deterministic in (False, True))
    option = {"xla_gpu_exclude_nondeterministic_ops": True}
    assert exact == (option if known.endswith("cuda") else free)
    assert bool(free) == (platform == "cpu")
    assert jax.jit(lambda x: x + 1, compiler_options=exact)(1) == 2
    if known == "cpu":  # XLA_FLAGS of these tests name a level; without, it is 1
        assert "xla_backend_optimization_level" not in free
        monkeypatch.setattr(step, "XLA_FLAGS_NAME_LEVEL", False)
        free = step.compiler_options(config.Config(), device)
        assert free["xla_backend_optimization_level"] == 1


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel"])
def test_forms_that_xla_miscompiles_are_right_with_our_options(vendor, monkeypatch):
    """They equal float64 NumPy, by YNNPACK and, for an Intel CPU, without it. Skipped with a notice
    once all are right without the options too.

    Break: step.py: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT" => "LIBRARY_FUSION_TYPE_DOT"
    """
    monkeypatch.setattr(step, "_cpuinfo", lambda: f"vendor_id\t: {vendor}\n")
    cfg = config.Config(dtype="float32")
    options = step.compiler_options(cfg, jax.devices()[0])
    has_ynnpack = options["xla_cpu_experimental_ynn_fusion_type"] != ""
    assert has_ynnpack == (vendor == "AuthenticAMD")
    cfg = config.Config(dtype="mixed")
    assert step.compiler_options(cfg, jax.devices()[0])["xla_cpu_experimental_ynn_fusion_type"]
    wrong_by_default = {}
    for form, shape in check.FORMS:
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        exact = form(np, x.astype(np.float64))
        tolerance = 1e-4 * np.abs(exact).max()
        default = jax.jit(partial(form, jnp))(x)
        ours = jax.jit(partial(form, jnp), compiler_options=options)(x)
        np.testing.assert_allclose(ours, exact, rtol=0, atol=tolerance, err_msg=form.__name__)
        wrong_by_default[form.__name__] = int((np.abs(default - exact) > tolerance).sum())
    print(wrong_by_default)
    if not any(wrong_by_default.values()):
        pytest.skip(f"jaxlib {jaxlib.__version__} is right without the option too: it can go")
