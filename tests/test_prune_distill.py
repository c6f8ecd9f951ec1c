# SPDX-License-Identifier: Apache-2.0
"""The recipes for pruning and distillation, against NumPy, and killed and resumed."""
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ckpt
import config
import distill
import model
import prune
import step as steplib
import train
from test_recipes import assert_same_arrays, copy_at, copy_of
from test_train import arrays as saved_arrays

SHARDED = dict(dp=1, fsdp=2, tp=2, dtype="float32")


def pruned_by_numpy(new, old, step, sparsity, first, last, every):
    """The parameters after the step old => new is pruned, by sorting each matrix."""
    new = np.where((old == 0) & (step > first + 1), 0, new)
    if not first < step <= last or ((step - first) % every and step != last):
        return new
    target = sparsity - sparsity * (1 - (step - first) / (last - first)) ** 3
    for matrix in new.reshape(-1, *new.shape[-2:]):
        smallest = np.argsort(np.abs(matrix), axis=None, kind="stable")
        matrix.flat[smallest[: round(target * matrix.size)]] = 0
    return new


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pruning_is_that_of_numpy(dtype):
    """After each of 12 steps over 8 devices the smallest weights are zero, and stay zero.

    Break: tests/recipes/prune.py: jnp.where(was_pruned, 0, new["params"][name]) =>
    new["params"][name]
    """
    numbers = dict(sparsity=0.75, first=2, last=9, every=3)
    mesh = steplib.make_mesh(config.Config(fsdp=4, tp=2))
    shardings = {"a": NamedSharding(mesh, P(None, "fsdp", "tp")),
                 "b": NamedSharding(mesh, P("tp", "fsdp")), "c": NamedSharding(mesh, P())}
    shapes = {"a": (2, 24, 40), "b": (40, 16), "c": (8, 8)}
    rng = np.random.default_rng(0)

    def draw():
        return {name: jax.device_put(jnp.asarray(rng.standard_normal(shape), dtype),
                                     shardings[name]) for name, shape in shapes.items()}

    def update(state, batch, lr):
        return {"step": state["step"] + 1, "params": batch}, {"loss": 0.0}

    step = jax.jit(prune.prune_to(**numbers, patterns=("a", "b"))("train_step", update))
    state = {"step": jnp.int32(0), "params": draw()}
    for i in range(1, 13):
        old, batch = state["params"], draw()
        state, metrics = step(state, batch, 0.1)
        found = state["params"]
        for name in "ab":
            expected = pruned_by_numpy(*(np.array(x[name], np.float32) for x in (batch, old)), i,
                                       **numbers)
            np.testing.assert_array_equal(np.array(found[name], np.float32), expected)
        np.testing.assert_array_equal(found["c"], batch["c"])
        zeros = [(np.array(found[name], np.float32) == 0).mean() for name in "ab"]
        np.testing.assert_allclose(metrics["sparsity"], np.average(zeros, weights=[3, 1]), 1e-6)
    assert zeros == [0.75, 0.75] and found["a"].sharding == shardings["a"]
    assert step._cache_size() <= 2  # the first state is sharded differently


@pytest.mark.slow
def test_a_pruned_run_resumes_bit_exactly(tiny):
    """As it was between two prunings; zeros stay, and log rows have the sparsity.

    Break: tests/recipes/prune.py: (state["step"] > first) => (state["step"] % 4 != 0)
    """
    straight = tiny(steps=12, save_every=3, **SHARDED)
    states = []

    def keep(event, state):
        if event == "state":
            states.append({name: np.array(x) == 0 for name, x in state["params"].items()
                           if name.startswith("layers.w")})

    hook = prune.prune_to(0.75, first=2, last=9, every=2)
    summary = train.main(straight, [hook, keep, copy_at(7, straight)])
    resumed = train.main(copy_of(straight), [hook])
    assert resumed["val_loss"] == summary["val_loss"]
    assert_same_arrays(straight, copy_of(straight))
    for old, new in itertools.pairwise(states):
        assert all(new[name][old[name]].all() for name in new)
    assert len(states) == 12 and len(states[0]) == 7
    assert not any(x.any() for x in states[1].values())
    out_dir = copy_of(straight).out_dir
    saved = saved_arrays(out_dir)
    assert {(saved[f"params/{name}"] == 0).mean() for name in states[0]} == {0.75}
    rows = [row["sparsity"] for row in ckpt.read_log(out_dir) if row["event"] == "log"]
    assert rows[:2] == [0, 0] and rows[-4:] == [0.75] * 4 and sorted(rows) == rows


@pytest.mark.parametrize("changes, words", [
    (dict(sparsity=1.0), "0 <= sparsity < 1"), (dict(last=2), "first < last"),
    (dict(every=0), "every > 0"), (dict(patterns=("layer.*",)), "prune 'layer.*': matches no")])
def test_illegal_arguments_of_prune_to_are_rejected(tiny, changes, words):
    """Break: tests/recipes/prune.py: if not (0 <= sparsity < 1 and => if not ("""
    with pytest.raises(ValueError, match=words.replace("*", r"\*")):
        train.main(tiny(), [prune.prune_to(**dict(sparsity=0.5, first=2, last=9) | changes)])


def test_distillation_is_that_of_numpy():
    """Sums and the gradient (1-a)(q1 - y) + a T (qT - pT) equal NumPy's in float64.

    Break: tests/recipes/distill.py: weight * temperature**2 * kl_BT => weight * temperature * kl_BT
    """
    a, t, (B, T, V) = 0.7, 3.0, (2, 5, 7)
    cfg = distill.DistillConfig(distill_weight=a, distill_temperature=t, vocab_size=V)
    rng = np.random.default_rng(0)
    student_BTV, teacher_BTV = (np.float32(3 * rng.standard_normal((B, T, V))) for _ in range(2))
    labels_BT = rng.integers(0, V, (B, T)).astype(np.int32)
    labels_BT[1, 2:] = model.IGNORE
    labels_BT[0, 0] = student_BTV[0, 0].argmax()

    def softmax(x):
        e = np.exp(np.float64(x))
        return e / e.sum(axis=-1, keepdims=True)

    q1_BTV = softmax(student_BTV)
    qt_BTV, pt_BTV = softmax(student_BTV / t), softmax(teacher_BTV / t)
    hit_BTV = labels_BT[..., None] == np.arange(V)
    mask_BT = labels_BT >= 0
    nll = -np.log(q1_BTV[hit_BTV]).sum()
    kl = (pt_BTV * np.log(pt_BTV / qt_BTV))[mask_BT].sum()
    expected = {"objective": (1 - a) * nll + a * t * t * kl, "loss": nll, "kl": kl,
                "acc": (student_BTV.argmax(-1) == labels_BT).sum()}
    sums, counts = distill.losses(student_BTV, teacher_BTV, labels_BT, cfg)
    assert expected.keys() == sums.keys() == counts.keys() and set(counts.values()) == {7.0}
    for name in expected:
        np.testing.assert_allclose(sums[name], expected[name], rtol=2e-6)
    grad_BTV = jax.grad(lambda x: distill.losses(x, teacher_BTV, labels_BT, cfg)[0]["objective"])(
        student_BTV)
    expected_BTV = (1 - a) * (q1_BTV - hit_BTV) + a * t * (qt_BTV - pt_BTV)
    np.testing.assert_allclose(grad_BTV, expected_BTV * mask_BT[..., None], atol=2e-6)


def student(tiny_cfg, **changes):
    """The DistillConfig of a smaller model on the same text as the run of tiny_cfg."""
    cfg = {x.name: getattr(tiny_cfg, x.name) for x in dataclasses.fields(config.Config)}
    return distill.DistillConfig(**cfg | dict(
        teacher=tiny_cfg.out_dir, out_dir=tiny_cfg.out_dir + "_student", d_model=16,
        n_heads=2) | changes)


@pytest.mark.slow
def test_a_student_resumes_bit_exactly_and_its_teacher_does_not_change(tiny):
    """The teacher is sharded, untrained and not saved, and the KL is NumPy's.

    Break: tests/recipes/distill.py: "init": ("constant", 0.0), "trained": False =>
    "init": ("constant", 0.0), "trained": True
    """
    of_teacher = tiny(steps=2, eval_batches=1, **SHARDED)
    train.main(of_teacher)
    saved = saved_arrays(of_teacher.out_dir)
    cfg, first = student(of_teacher, steps=8, save_every=3, distill_temperature=3.0), {}

    def keep(event, value):
        if event in ("load", "data") and event not in first:
            first[event] = jax.tree.map(np.array, value["params"] if event == "load" else value)

    summary = train.main(cfg, [keep, copy_at(4, cfg)], distill.TASK)
    params, moments = summary["state"]["params"], ckpt.flatten(summary["state"]["opt"])[0]
    theirs = {name.removeprefix("teacher."): x for name, x in params.items() if "teacher." in name}
    assert {f"params/{name}" for name in theirs} == {n for n in saved if n.startswith("params/")}
    assert all(np.array_equal(x, saved[f"params/{name}"]) for name, x in theirs.items())
    assert theirs["layers.wq"].addressable_shards[0].data.shape == (1, 16, 16)
    arrays = ckpt.read_meta(f"{cfg.out_dir}/ckpt", 8)["arrays"]
    assert not [name for name in (*moments, *arrays) if "teacher" in name] and moments

    assert train.main(copy_of(cfg), (), distill.TASK)["val_kl"] == summary["val_kl"] > 0
    assert_same_arrays(cfg, copy_of(cfg))

    forward = jax.jit(model.forward, static_argnums=2)
    logits = [np.float64(forward(params, first["data"], config.derive_text(
        dataclasses.replace(shape, vocab_size=256)))) / 3
        for shape, params in ((of_teacher, theirs), (cfg, first["load"]))]
    p_BTV, q_BTV = (x - np.log(np.exp(x).sum(axis=-1, keepdims=True)) for x in logits)
    row = next(row for row in ckpt.read_log(cfg.out_dir) if row["event"] == "log")
    kl = (np.exp(p_BTV) * (p_BTV - q_BTV)).sum(axis=-1).mean()
    np.testing.assert_allclose(row["kl"], kl, rtol=1e-5)

    # A forward pass of the teacher has a third of the FLOPs of its training.
    flops = [model.flops_per_token(config.derive_text(dataclasses.replace(
        shape, vocab_size=256, freeze=())), cfg.seq_len)[0] for shape in (of_teacher, cfg)]
    start = next(row for row in ckpt.read_log(cfg.out_dir) if row["event"] == "start")
    assert start["flops_per_token"] == pytest.approx(flops[0] / 3 + flops[1])


@pytest.mark.slow
def test_an_unsuitable_teacher_is_rejected(tiny, tmp_path):
    """It is missing, incomplete or of another vocabulary; and losses that distillation lacks.

    Break: tests/recipes/distill.py: for name in ("tokenizer", "vocab_size") => for name in ()
    """
    of_teacher = tiny(steps=1, save_every=0, eval_every=0)
    train.main(of_teacher)
    saved = saved_arrays(of_teacher.out_dir)
    meta = {name: x for name, x in ckpt.read_meta(f"{of_teacher.out_dir}/ckpt", 1).items()
            if name not in ("step", "folder", "arrays")}
    for lost in ("final_norm", "embed"):  # as in a run with --save_exclude
        params = {name.removeprefix("params/"): x for name, x in saved.items()
                  if name.startswith("params/") and name != f"params/{lost}"}
        ckpt.wait(ckpt.save(tmp_path / f"no_{lost}/ckpt", 1, {"params": params}, meta))
    fine = student(of_teacher)
    for changes, words in (
            (dict(teacher=str(tmp_path / "none")), "none/ckpt holds no checkpoint; name the --out"),
            (dict(vocab_size=300), "vocab_size is 256, but 300 in the student"),
            (dict(teacher=str(tmp_path / "no_final_norm")), "its checkpoint has no final_norm"),
            (dict(teacher=str(tmp_path / "no_embed")), "is not a language model: it has no embed"),
            (dict(z_loss=0.1), "z_loss 0.1: is not distilled; leave it at 0.0"),
            (dict(distill_weight=1.5), r"distill_weight 1.5: must be in \[0, 1\]")):
        with pytest.raises(ValueError, match=words):
            train.main(dataclasses.replace(fine, **changes), task=distill.TASK)
    prepared = train.setup_run(fine, distill.TASK).cfg
    assert train.setup_run(prepared, distill.TASK).cfg == prepared
    other = prepared.teacher_shape.replace('"tokenizer": "bytes"', '"tokenizer": "other.json"')
    with pytest.raises(ValueError, match="tokenizer is 'other.json', but 'bytes' in the"):
        distill.resolve("cpu", dataclasses.replace(prepared, teacher_shape=other))
