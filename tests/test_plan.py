# SPDX-License-Identifier: Apache-2.0
"""plan.py against HLO text written by hand, programs of eight devices, and TPU slices that are not
here.
"""
import dataclasses
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import config
import model
import plan
import step
import train
from test_step import SMALL, language_model, lm_batch, lowered

needs_cuda = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda12_plugin"),
    reason="the compiler for NVIDIA's GPUs is not installed: pip install 'jax[cuda12]'")


def seen(cfg):
    """plan.traffic's collectives of the small transformer's compiled update."""
    steps = lowered(cfg, lm_batch(), *language_model(cfg))
    text = steps["lower_train_step"]().compile().as_text()
    return plan.traffic(text, steps["mesh"], cfg.slices)["collectives"]


def planned(tiny, plan_for="", **changes):
    """plan.main of a small run's config."""
    return plan.main(plan.PlanConfig(**dataclasses.asdict(tiny(**changes)), plan_for=plan_for))


# ---- text written by hand

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
PAIRS = "channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true"  # neighbours
X, Y, BOTH = "f32[8,6]{1,0}", "bf16[8]{0:T(8,128)(2,1)}", "%x, %y"  # 192 and 16 bytes


def of_text(result, op, operands="%x", rest=PAIRS, more="", slices=1):
    """traffic of a program that is one operation, and its second half where it has two."""
    halves = [f"%start = {result} {op}({operands}), {rest}"]
    if op.endswith("-start"):
        halves.append(f"%done = {X} {op.removesuffix('start')}done(%start)"
                      + rest[rest.find(", calls="):] * ("calls=" in rest))
    body = "\n".join(f"  {half}" for half in halves)
    text = (f"HloModule m, num_partitions=8\n{ADD}{more}\nENTRY %main (x: f32[8,6], y: bf16[8]) -> "
            f"f32[8,6] {{\n  %x = {X} parameter(0)\n  %y = {Y} parameter(1)\n{body}\n}}\n")
    mesh = jax.make_mesh((1, 4, 1, 2, 1), ("dp", "fsdp", "ep", "tp", "sp"),
                         axis_types=(jax.sharding.AxisType.Auto,) * 5)
    return plan.traffic(text, mesh, slices)


@pytest.mark.parametrize("kind, one, both, sent", [
    # Of two devices, each sends: half of what it gets, ...
    ("all-gather", "f32[16,6]{1,0}", "(f32[16,6]{1,0}, bf16[16]{0})", (192, 208)),
    # ... what it does not keep, ...
    ("reduce-scatter", "f32[4,6]{1,0}", "(f32[4,6]{1,0}, bf16[4]{0})", (96, 104)),
    # ... both of these, ...
    ("all-reduce", X, f"({X}, {Y})", (192, 208)),
    # ... half of what it has, ...
    ("all-to-all", X, f"({X}, {Y})", (96, 104)),
    # ... or all of it.
    ("collective-permute", X, f"({X}, /*index=1*/{Y})", (192, 208)),
])
@pytest.mark.parametrize("form", ["now", "start", "wrapped"])
def test_every_operand_of_a_collective_is_counted(kind, one, both, sent, form):
    """Of one and of two operands, finished at once or started and awaited, in both forms of XLA.

    Break: tests/plan.py: result = result[1] => result = jax.tree.leaves(result)[1]
    """
    groups = "source_target_pairs={{0,1},{1,0},{2,3}}" if "permute" in kind else PAIRS
    contexts = ", u32[], u32[]" if "permute" in kind else ""
    for operands, had, result, n_bytes in (("%x", X, one, sent[0]),
                                           (BOTH, f"({X}, {Y})", both, sent[1])):
        if form == "now":
            found = of_text(result, kind, operands, groups)
        elif form == "start":
            alone = kind in ("reduce-scatter", "all-to-all") and operands == "%x"
            pair = f"({f'({had})' if alone else had}, {result}{contexts})"
            found = of_text(result if kind == "all-reduce" else pair, f"{kind}-start", operands,
                            groups)
        else:
            wrapped = (f"%wrapped (p: f32[8,6], q: bf16[8]) -> {result} {{\n"
                       f"  %x = {X} parameter(0)\n  %y = {Y} parameter(1)\n"
                       f"  ROOT %inner = {result} {kind}({operands}), {groups}\n}}\n")
            found = of_text(f"(({had}), {result}, s32[])", "async-start", operands,
                            "async_execution_thread=\"other\", calls=%wrapped", wrapped)
        assert found["collectives"] == {(kind, "tp"): [1, n_bytes]}, (operands, found)


def test_a_send_through_the_host_is_a_collective_between_slices():
    """It has the name of its collective, the axes that cross slices, and the bytes of a ring.

    Break: tests/plan.py: if op == "send" and through_host: => if op == "recv" and through_host:
    """
    how = 'is_host_transfer=true, frontend_attributes={megascale_transfer_type="ALL_REDUCE"}'
    found = of_text(f"({X}, u32[], token[])", "send", "%x, %token", how, slices=2)
    assert found["collectives"] == {("all-reduce", "fsdp" + plan.CROSS_SLICE): [1, 192]}
    found = of_text(f"({X}, u32[], token[])", "send", "%x, %token", how, slices=8)
    assert found["collectives"] == {("all-reduce", "fsdp+tp" + plan.CROSS_SLICE): [1, 336]}


HOST = "f32[8,6]{1,0:S(5)}"  # host memory


@pytest.mark.parametrize("op, result", [
    ("copy-start", f"({HOST}, {X}, u32[]{{:S(2)}})"),
    ("dynamic-slice-start", f"(({HOST.replace('8,', '126,8,')}, s32[], s32[]), {X}, u32[])"),
    ("dynamic-update-slice-start", f"(({HOST.replace('8,', '126,8,')}, {X}, s32[], s32[]), "
                                   f"{HOST.replace('8,', '126,8,')}, u32[])"),
    (None, X),
])
def test_what_goes_to_the_host_is_counted_once(op, result):
    """A copy of an array, and of a layer's part of a stack, as XLA writes them for TPUs.

    Break: tests/plan.py: min((n for n in jax.tree.leaves(result) if n > 8), default=0) =>
    sum(result[1:])
    """
    assert of_text(result, op or "copy-start")["host_bytes"] == (192 if op else 0)


def test_what_an_operation_writes_is_what_it_results_in():
    """Nothing within a fusion counts, nor the second half of a collective, nor parameters.

    Break: tests/plan.py: if not (fused or in_place => if not (in_place
    """
    fused = ("%fused (p: f32[8,6]) -> f32[8,6] {\n"
             f"  %p = {X} parameter(0)\n  ROOT %double = {X} add(%p, %p)\n}}\n")
    for n_bytes, words in ((192, (X, "fusion", "%x", "kind=kLoop, calls=%fused", fused)),
                           (208, (f"({X}, {Y})", "sort", BOTH, "dimensions={0}")),
                           (192, (f"({X}, {X})", "all-gather-start"))):
        assert of_text(*words)["memory_traffic_bytes"] == 2 * n_bytes, words


@pytest.mark.parametrize("text, n_bytes", [
    ("f32[4,6]{1,0:T(8,128)S(1)}", 96), ("s4[10]{0:E(4)}", 5), ("f8e4m3fn[2,3]{1,0}", 6),
    ("bf16[<=8,2]", 32), ("()", ()), ("(f32[2]{0}, token[])", (8, 0)),
    ("((f32[2]{0}), /*index=1*/(c64[2], u32[]), s32[])", ((8,), (16, 4), 4)),
])
def test_bytes_of_results(text, n_bytes):
    """Layouts, comments, tokens, types of half a byte, and tuples in tuples.

    Break: tests/plan.py: sized.replace(")", ",)") => sized
    """
    assert plan._result_bytes(text) == n_bytes


@pytest.mark.parametrize("groups, first", [
    ("replica_groups={}", list(range(8))), ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", [0, 4]),
    ("replica_groups=[2,4]<=[8]", [0, 1, 2, 3]),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", [0, 4]),
    ("source_target_pairs={{3,3},{1,5},{5,1}}", [1, 5]),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [0, 4]),
    ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", [0, 1]),
    ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", [0, 2]),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [0, 2, 4, 6]),
])
def test_groups_in_every_notation(groups, first):
    """The first group of devices, whichever way HLO writes it.

    Break: tests/plan.py: ids.transpose(numbers(order) or range(ids.ndim)) => ids
    """
    assert sorted(plan._first_group(f"x(), channel_id=1, {groups}, to_apply=%add", 8)) == first


# ---- programs compiled for eight devices

def test_traffic_is_what_was_written():
    """Collectives written by hand, one of them, and other writes, in a loop of five turns.

    Break: tests/plan.py: _trip_count(line, bodies) if op == "while" else 1 => 1
    """
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)

    def program(x):  # [4, 6] on each device
        def summed(y, _):
            return jax.lax.psum(y, ("a", "c")) * 0.5, None
        y = jax.lax.scan(summed, x, None, length=5)[0]
        y = jax.lax.all_gather(y, "b", axis=0, tiled=True)
        y = jax.lax.psum_scatter(y, "c", scatter_dimension=0, tiled=True)
        y = jax.lax.all_to_all(y, "a", split_axis=0, concat_axis=1, tiled=True)
        return jax.lax.ppermute(y, "c", [(0, 1), (1, 0)])

    spread = jax.shard_map(program, mesh=mesh, in_specs=P("a"), out_specs=P("a", "b"),
                           check_vma=False)
    x = jax.ShapeDtypeStruct((8, 6), jnp.float32)
    found = plan.traffic(jax.jit(spread).lower(x).compile().as_text(), mesh)
    size = 4 * 4 * 6
    assert found["collectives"] == {("all-reduce", "a+c"): [5, 5 * 2 * size * 3 / 4],
                     ("all-gather", "b"): [1, 2 * size / 2], ("reduce-scatter", "c"): [1, size],
                     ("all-to-all", "a"): [1, size / 2], ("collective-permute", "c"): [1, size]}
    assert 20 * size < found["memory_traffic_bytes"] < 60 * size


def test_ulysses_moves_heads_and_gathers_no_sequence():
    """A step over sp 4 has four all-to-alls a layer; weights, gradients and scalars cross too.

    Break: model.py: if cfg.dtype == "mixed" or _axis_size("sp") == 1: => if True:
    """
    layers = 2
    cfg = dataclasses.replace(SMALL, n_layers=layers, fsdp=2, sp=4, dp=1, n_kv_heads=8)
    found = seen(cfg)
    assert {kind for kind, axes in found if axes == "sp"} <= {"all-to-all", "all-reduce"}, found
    part_bytes = 4 * cfg.batch_size // 2 * cfg.seq_len // 4 * cfg.n_heads * cfg.head_dim
    assert found["all-to-all", "sp"] == [4 * layers, 8 * layers * part_bytes * 3 / 4]
    n_params = sum(np.prod(row["shape"]) for row in model.param_table(cfg).values())
    others = sum(n_bytes for (_, axes), (_, n_bytes) in found.items() if "sp" in axes)
    assert others - found["all-to-all", "sp"][1] < 4 * 4 * n_params + 1000, (
        "if you added arrays to the state, split them in state_shardings in step.py", found)


@pytest.mark.slow
def test_experts_move_by_all_to_all_alone():
    """Over ep a step has two all-to-alls a layer forward and two backward, of its slots.

    Break: model.py: _shard(_shard(x_BPECD, *by_row), *by_expert) =>
    _shard(x_BPECD, *by_expert)
    """
    cfg = dataclasses.replace(
        SMALL, n_experts=8, capacity_factor=1.0, dp=2, fsdp=1, ep=2, sp=2)
    slots = cfg.batch_size * cfg.seq_len * cfg.experts_per_token / 8
    moved = 4 * slots * cfg.d_model * (cfg.ep - 1) / cfg.ep
    assert seen(cfg)["all-to-all", "ep"] == [4 * cfg.n_layers, 4 * cfg.n_layers * moved]


@pytest.mark.slow
def test_tiles_gather_their_weights_once():
    """A step of four tiles sends at most a tenth more than one of two.

    Break: model.py: return jax.shard_map(f, in_specs=in_specs =>
    return f or jax.shard_map(f, in_specs=in_specs
    """
    sent = []
    for n in (2, 4):
        cfg = dataclasses.replace(SMALL, fsdp=4, sp=2, mlp_tiles=n, logit_tiles=n, d_ff=64)
        sent.append(sum(n_bytes for _, n_bytes in seen(cfg).values()))
    assert sent[1] < 1.1 * sent[0], sent


@pytest.mark.slow
def test_what_crosses_slices_is_known():
    """Between two groups of four devices crosses what goes along fsdp, and nothing else.

    Break: tests/plan.py: {int(slice_of.flat[i]) for i in group} => {0 for i in group}
    """
    for _, axes in seen(dataclasses.replace(SMALL, slices=2, dp=1, fsdp=4, tp=2)):
        assert axes.endswith(plan.CROSS_SLICE) == ("fsdp" in axes), axes


# ---- plans

def test_a_plan_says_what_a_step_sends_and_how_long_it_takes(tiny, monkeypatch, capsys):
    """Nothing is made, and where rates are known there is a time, except in float32.

    Break: tests/plan.py: key=lambda row: -row[1][1] => key=lambda row: row[1][1]
    """
    monkeypatch.setitem(step.PEAKS, "cpu", (0.1, 1))
    monkeypatch.setitem(plan.BANDWIDTHS, "cpu", {"memory": 10, "near": 1, "far": 1, "host": 1})
    monkeypatch.setitem(step.MATMUL_FRAC, "cpu", 0.5)
    before = len(jax.live_arrays())
    cost = planned(tiny, dp=1, fsdp=2, tp=2, sp=2, n_kv_heads=4, dtype="float32")
    assert len(jax.live_arrays()) == before and not Path(tiny().out_dir).exists()
    assert cost["exit_code"] == 0 and cost["fits"] and "step_s" not in cost
    n_bytes = [n for _, n in cost["collectives"].values()]
    assert n_bytes == sorted(n_bytes, reverse=True) and sum(n_bytes) == cost["sent_bytes"] > 0
    printed = capsys.readouterr().out
    for words in ("GiB  parameters", "all-to-all over sp", "TFLOP  model: ",
                  "GiB  in all during a step"):
        assert words in printed
    cost = planned(tiny, dp=1, fsdp=8, dtype="bfloat16")
    printed, rate = capsys.readouterr().out, 8 * 16 / cost["step_s"]
    assert "at full rates: compute " in printed
    assert train.time_of_run(train.setup_run(tiny(dp=1, fsdp=8)), cost["step_s"]) in printed
    assert (f"a step: about {cost['step_s']:.4g} s, {rate:,.0f} tokens/s, MFU {cost['mfu']:.1%}"
            in printed)
    with pytest.raises(ValueError, match="mode eval: only training can be planned"):
        planned(tiny, mode="eval", plan_for="v5p:2x2x1")


def test_a_roofline_by_hand():
    """Two slices of v5p: amounts over the rates of the data sheet; MFU without recomputation.

    Break: tests/plan.py: (cost["sent_bytes"] - far) / gbps => cost["sent_bytes"] / gbps
    """
    cost = {"flop": {"the model's": 0.75 * 459e12, "remat's": 0.25 * 459e12},
            "memory_traffic_bytes": 2 * 2765e9, "sent_bytes": 900e9 + 25e9, "host_bytes": 75e9,
            "collectives": {("all-gather", "fsdp"): [1, 900e9],
                            ("all-reduce", "dp" + plan.CROSS_SLICE): [1, 25e9]}}
    got = plan.roofline(cost, "TPU v5")
    assert got["seconds"] == pytest.approx(
        {"compute": 1, "memory": 2, "network": 3, "slow network": 4, "host": 5})
    assert got["step_s"] == pytest.approx(1 / 0.9 + (2 + 3 + 4 + 5) / 2)
    assert got["mfu"] == pytest.approx(0.75 / got["step_s"])
    assert plan.roofline(cost, "cpu") == {}


@pytest.mark.parametrize("plan_for, message", [
    ("v9", "unknown device 'v9' (legal: a100, "), ("H100:8", "(nearest: h100)"),
    ("h100:0x8", "write h100:8 for one host of 8 GPUs"), ("h100:8x8x8", "write h100:8 for one"),
    ("h100:64", "at most 16 GPUs; write h100:4x8"), ("v5p:8x", "sides of a slice, as in v5p:4x4"),
    ("v5p:8", "its compiler is missing: pip install 'jax[tpu]<0.13'")])
def test_the_spelling_of_a_plan_is_checked_first(monkeypatch, capsys, plan_for, message):
    """A wrong name or shape is an error in one sentence, before a compiler is asked for.

    Break: tests/plan.py: ({config.did_you_mean(name, (*GPUS, *TPUS))})" => "
    """
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert train.cli(["--plan_for", plan_for], kind=plan.PlanConfig, main=plan.main) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: config: plan_for '{plan_for}': ") and message in error


ABSENT = dict(plan_for="h100:8", d_model=512, n_layers=2, n_heads=8, n_kv_heads=0, batch_size=16,
              seq_len=1024, vocab_size=32768, dp=1, fsdp=8, optimizer="adamw", remat="named")


def test_without_their_compiler_gpus_are_planned_from_shapes(tiny, monkeypatch, capsys):
    """Parameters, moments, gradients and FLOPs by hand, and flags where it does not fit.

    Break: tests/plan.py: gpus if compiler else absent_gpus => gpus
    """
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cost = planned(tiny, **ABSENT, dtype="auto")
    said = capsys.readouterr().out
    assert "on 8 x NVIDIA H100" in said and "in all during a step\nfits in 72.7 GiB" in said
    assert said.splitlines()[-1] == plan.MISSING_COMPILER and "jax[cuda12]<0.13" in said
    memory = cost["memory"]
    matrices = 32768 * 512 + 2 * (4 * 512**2 + 3 * 512 * 1376)
    assert 1 < memory["parameters"] / (4 * matrices / 8) < 1.01
    assert memory["moments"] == pytest.approx(2 * memory["parameters"], rel=0.01)
    assert memory["gradients"] == memory["parameters"]
    assert memory["total"] == sum(n for kind, n in memory.items() if kind != "total")
    flop = 16 * 1024 * (6 * matrices + 12 * 2 * 512 * 512) / 8
    assert cost["products_s"] == pytest.approx(flop / 989e12)
    assert f"products at the peak rate: {cost['products_s']:.4g} s of a step" in said
    assert cost["exit_code"] == 0
    offloaded = planned(tiny, **ABSENT, dtype="auto", offload_optimizer=True)["memory"]
    assert offloaded["total"] == memory["total"] - memory["moments"]
    assert planned(tiny, **ABSENT | dict(batch_size=2**15), dtype="auto")["exit_code"] == 1
    said = capsys.readouterr().out
    assert re.search(r"does not fit in 72.7 GiB; this may: --grad_accum_steps \d", said), said


@pytest.mark.parametrize("remat, kept", [
    ("none", 8 * 512 + 3 * 1376), ("named", 5 * 512), ("full", 512), ("offload", 0)])
def test_activations_by_hand(tiny, remat, kept):
    """Two layers keep what remat says, a third all, beside logits of 32,768 in float32.

    Break: model.py: (cfg.n_layers * kept + layer) => (cfg.n_layers * layer + layer)
    """
    sizes = {name: value for name, value in ABSENT.items() if name != "plan_for"}
    sizes |= dict(remat=remat, dtype="bfloat16", grad_accum_steps=2)
    cfg = config.derive_text(tiny(**sizes))
    layer = 8 * 512 + 3 * 1376
    n_bytes = model.activation_bytes(cfg, dict(dp=1, fsdp=8, ep=1, tp=1, sp=1), True)
    assert n_bytes == 1024 * (2 * (2 * kept + layer) + 4 * 32768)


def test_hours_and_money_of_a_run(tiny, capsys, monkeypatch):
    """The first lines of a plan need no compilation: memory, hours, device hours and money. The
    rate of a CPU is measured; where none is known, a price is an error.

    Break: train.py: device_hours = seconds / 3600 * n_devices => device_hours = seconds / 3600
    """
    cfg = tiny(mode="plan", price=2.5, steps=10**9, dp=8)
    setup = train.setup_run(cfg)
    assert train.time_of_run(setup, 3.6e-3) == (
        "1,000,000,000 steps of about 0.0036 s: 1,000 hours, 8,000 device hours, 20,000 at "
        "--price 2.5")

    def compiled(setup):
        printed.append(capsys.readouterr().out)
        return cost

    cost, printed = train.estimate(setup), []
    monkeypatch.setattr(train, "estimate", compiled)
    train.main(cfg)
    assert re.search(r"about 0\.00\d+ GiB for each device, from shapes\n"
                     r"1,000,000,000 steps of about \S+ s: ", printed[0])
    sizes = train.memory_from_shapes(setup)
    assert sizes["parameters"] == cost["memory"]["parameters"]
    flop = sum(train.step_flop(setup).values())
    assert flop / step.step_seconds(flop, setup.mesh, setup.cfg) > 1e6  # FLOP/s
    monkeypatch.setattr(step, "step_seconds", lambda *args: None)
    with pytest.raises(ValueError, match="price 2.5: no time: the FLOPs of this task, or this dev"):
        train.main(cfg)
    epochs = train.setup_run(dataclasses.replace(cfg, price=0.0, steps=1000, epochs=2.0))
    assert train.time_of_run(epochs, 1.0).startswith("no time: epochs are steps only when the data")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"),
                    reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
def test_a_plan_for_an_absent_slice(tiny):
    """8 chips of v4 fit a small step and no large one; two slices of v5p send between them.

    Break: tests/plan.py: if kind.startswith(prefix): => if kind == prefix + prefix:
    """
    base = dict(plan_for="v4:2x2x2", fsdp=8, dp=1, d_model=512, n_layers=2, n_heads=4,
                n_kv_heads=0, batch_size=32, seq_len=512, vocab_size=32768, dtype="bfloat16")
    cost = planned(tiny, **base)
    whole = 4 * (32768 * 512 + 2 * (4 * 512**2 + 3 * 512 * 1376))
    assert 1 < cost["memory"]["parameters"] / (whole / 8) < 1.01
    assert cost["fits"] and 0 < cost["mfu"] < 1
    assert max(cost["seconds"].values()) / 2 < cost["step_s"] < 2 * sum(cost["seconds"].values())
    assert {axes for _, axes in cost["collectives"]} == {"fsdp"}
    cost = planned(tiny, **base | dict(batch_size=4096, seq_len=2048))
    assert not cost["fits"] and cost["exit_code"] == 1
    cost = planned(tiny, **base | dict(plan_for="v5p:2x2x1", slices=2, dp=2, fsdp=4))
    assert "dp" + plan.CROSS_SLICE in {axes for _, axes in cost["collectives"]}
    assert cost["seconds"]["slow network"] > 0


# ---- NVIDIA's GPUs that are not here: what a person would see in a profile

GPU = dict(plan_for="h100:1x1", d_model=512, n_layers=2, n_heads=8, n_kv_heads=0, batch_size=8,
           seq_len=1024, vocab_size=32768, dp=1, fsdp=-1, dtype="auto")


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("remat, forward", [("named", 2), ("full", 4)])
def test_a_gpu_multiplies_in_bfloat16_and_attends_by_cudnn(tiny, remat, forward):
    """Once a layer, or twice where it is recomputed; and no array has all logits.

    Break: model.py: y = jnp.dot(rows, w) =>
    y = jnp.dot(rows, w, preferred_element_type=jnp.float32)
    """
    cfg = plan.PlanConfig(**dataclasses.asdict(tiny()) | GPU | {"remat": remat, "logit_tiles": 4})
    cost = train.estimate(train.setup_run(cfg, devices=plan.planned_devices(cfg)))
    text = cost["programs"]["a step"].as_text()
    bodies = re.findall(r"^%?\S+ \([^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    wide = [line for body in bodies if " dot(" in body for line in body.splitlines()
            if re.search(r"f32\[[\d,]+\]\S* (?:parameter|convert)\(", line)]
    assert not wide, wide
    assert text.count('"__cudnn$fmhaSoftmax"') == forward
    assert text.count('"__cudnn$fmhaSoftmaxBackward"') == 2
    assert not re.search(r"\[(?:8,1024|8192),32768\]", text)


@pytest.mark.slow
@needs_cuda
def test_a_plan_for_gpus_that_are_not_here(tiny):
    """Two hosts of four: fsdp crosses hosts and tp does not.

    Break: tests/plan.py: n_slices, _ = hosts_and_gpus(plan_for) => pass
    """
    cost = planned(tiny, **GPU | dict(plan_for="a100:2x4", fsdp=2, tp=4))
    assert cost["fits"] and 0 < cost["mfu"] < 1
    axes = {axes for _, axes in cost["collectives"]}
    assert "tp" in axes and "fsdp" + plan.CROSS_SLICE in axes and "fsdp" not in axes, axes
    assert 0.99 < cost["memory"]["parameters"] / (cost["memory"]["moments"] / 2) < 1.01
