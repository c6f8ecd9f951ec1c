# SPDX-License-Identifier: Apache-2.0
"""Every field of the config has an effect.

FIELDS holds for each field a change of its value, a function that observes the effect, and the
observations before and after the change.
"""
import contextlib
import dataclasses
import faulthandler
import json
import multiprocessing
import os
import re
import socket
import types
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from jax.sharding import PartitionSpec as P

import ckpt
import config
import data
import model
import step
import train

# Paths are relative to the fixture `folder`.
TINY = dict(
    data=("a.txt",), out_dir="first", cache_dir="programs", steps=4, batch_size=8, seq_len=16,
    d_model=16, n_layers=1, n_heads=2, dtype="float32", optimizer="adamw", schedule="constant",
    warmup_steps=0.0)
# Rows with this base share two runs, one with the base and one with all their changes, and observe
# the files of these runs.
RUN = dict(
    data=("numbers.txt",), log_every=1, eval_every=2, eval_batches=2, save_every=2, sample_every=0,
    sample_tokens=0, temperature=0.0)
FINISHED = RUN | dict(mode="train")  # the first of the two runs, launched again
LINES = dict(data=("lines.jsonl",), val_frac=0.0)
WHOLE = LINES | dict(packing="none")
PLAIN = dict(optimizer="sgd", lr=0.5, b1=0.0, weight_decay=0.0, clip_norm=0.0)
LINEAR = PLAIN | dict(schedule="linear")
RMS = dict(optimizer="rmsprop", lr=0.5, b2=0.75, weight_decay=0.0, clip_norm=0.0)
EXPERTS = dict(n_experts=4)
LORA = dict(lora_rank=2)
JOINED = dict(coordinator="localhost")  # at a free port
DP = EXPERTS | dict(dp=-1, fsdp=1)
ON_DP = [(1, 16), (1, 4, 16, 64), (1, 4, 2, 64)]  # batch, weight and moment of each of 8 devices


GPU = types.SimpleNamespace(platform="gpu", compute_capability="9.0")


def row(change, observe, before, after, base=()):
    """observe(cfg) is `before` with TINY and base, and `after` with the change as well."""
    return dict(change=change, observe=observe, before=before, after=after, base=dict(base))


# ---- what is compiled

@cache
def lowered(cfg, program):
    parts = train.step_args(train.setup_run(cfg))
    return step.lower_steps(*parts)[program]().as_text()


def states(cfg, devices=None):
    """Shapes, dtypes and shardings of the state."""
    return step.lower_steps(*train.step_args(train.setup_run(cfg, devices=devices)))["state"]


def loss_has(text):
    """Whether the lowered loss has this in its text."""
    return lambda cfg: text in lowered(cfg, "eval_step")


def constant(x):
    return loss_has(f"dense<{x:e}>" if isinstance(x, float) else f"dense<{x}> : tensor<i32>")


def count(text, program):
    return lambda cfg: lowered(cfg, program).count(text)


def n_arguments(cfg):
    """Number of arrays that the loss reads."""
    signature = lowered(cfg, "eval_step").partition("@main(")[2].partition("->")[0]
    return signature.count("%arg")


def shape(name):
    return lambda cfg: train.setup_run(cfg)["table"].get(name, {"shape": None})["shape"]


def lora_weights(cfg):
    return [n.removesuffix(".lora_a") for n in train.setup_run(cfg)["table"] if ".lora_a" in n]


def moments(cfg):
    return states(cfg)["opt"][0].mu


def batch_shape(cfg):
    return train.setup_run(cfg)["batch"]["tokens"].shape


def shard_shapes(cfg):
    """Shapes on one device of a batch, of an expert weight, and of that weight's moment."""
    state = states(cfg, jax.devices())
    arrays = [train.setup_run(cfg, devices=jax.devices())["batch"]["tokens"],
              state["params"]["layers.w_gate"],
              state["opt"][0].mu["layers.w_gate"]]
    return [x.sharding.shard_shape(x.shape) for x in arrays]


# ---- the effect of a step on one weight of 1 whose gradient is 2

def slope(params, batch, cfg):
    total, n = params["w"][0] * batch["x"].sum(), jnp.float32(batch["x"].size)
    return {"objective": total, "loss": total}, {"objective": n, "loss": n}


def open_slope(names, cfg):
    part = {"n": 64, "batch": lambda index, rows: {"x": np.full(len(rows), 2, np.float32)},
            "fingerprint": "twos"}
    return {"train": part, "val": {}}


SLOPE = {
    "table": lambda cfg: {"w": dict(shape=(1,), spec=P(), init=("normal", 1.0))},
    "init": lambda key, cfg: {"w": jnp.ones(1)},
    "loss": slope,
    "batch": lambda cfg: {"x": ((cfg.batch_size,), jnp.float32, P(("dp", "fsdp", "ep")))},
    "open": open_slope,
}


@cache
def four_steps(cfg):
    """(changes of the weight, metrics) of four steps."""
    run = train.setup_run(cfg, SLOPE, jax.devices()[:1])
    programs = step.compile_steps(step.lower_steps(*train.step_args(run)))
    state = programs["init"](jax.random.key(0))
    weights = [1.0]
    all_metrics = []
    batch_at = train.make_batch_at(run, open_slope(cfg, ())["train"])
    for i in range(4):
        state, metrics = programs["train_step"](state, batch_at(i), step.lr_at(i, run["cfg"]))
        weights.append(float(state["params"]["w"][0]))
        all_metrics.append(jax.device_get(metrics))
    return np.diff(weights).round(6).tolist(), all_metrics


def first_moves(cfg):
    return four_steps(cfg)[0][:2]


def lrs(cfg):
    return [round(float(m["lr"]), 6) for m in four_steps(cfg)[1]]


def watched(cfg):
    return sorted(four_steps(cfg)[1][0].get("watch", {}))


def splits_rows(cfg):
    """Whether a step processes its 16 rows in two microbatches."""
    run = train.setup_run(cfg, SLOPE)
    text = step.lower_steps(*train.step_args(run))["train_step"]().as_text()
    return "tensor<2x8xf32>" in text and "stablehlo.while" in text


def reason_with_nan(cfg):
    return train.main(cfg, task=SLOPE, params={"w": jnp.full(1, jnp.nan)})["reason"][:9]


# ---- data and sampling

def sequences(cfg):
    """Numbers of training and validation sequences."""
    cfg = train.setup_run(cfg)["cfg"]
    opened = data.open_text(("train", "val"), cfg)
    return [source["n"] for source in (opened["train"], *opened["val"].values())]


def eos_id(cfg):
    return data.make_tokenizer(cfg.tokenizer, cfg.eos_token)["eos"]


def letters(split):
    def observe(cfg):
        opened = data.open_text(("train", "val"), train.setup_run(cfg)["cfg"])
        source = opened["val"][""] if split == "val" else opened["train"]
        tokens = source["batch"](0, np.arange(4))["tokens"]
        return sorted(map(chr, np.unique(tokens)))
    return observe


def first_batch(cfg):
    return data.open_text(("train", "val"), cfg)["train"]["batch"](0, np.arange(cfg.batch_size))


def outcome_of_opening(cfg):
    try:
        first_batch(cfg)
    except ValueError as e:
        return re.search("need the id|has 22 tokens", str(e))[0]
    return ""


def n_segments(cfg):
    """Largest number of documents in a row of the first batch; 0 without a document mask."""
    return outcome_of_opening(cfg) or int(first_batch(cfg).get("segments", np.zeros(1)).max())


def padded_sides(cfg):
    segments = first_batch(cfg)["segments"]
    return [bool((segments[:, edge] == 0).any()) for edge in (0, -1)]


def batch_names(cfg):
    batch = data.open_text(("train", "val"), cfg)["train"]["batch"](0, np.arange(4))
    assert batch.keys() == train.setup_run(cfg)["batch"].keys()
    return sorted(batch)


def randomness(cfg):
    """The keys of the initialization and of a sample, and the first tokens of the first batch."""
    run = train.setup_run(cfg)
    start = train.choose_start(run, None, None, None, {})
    programs = {"init": jax.random.key_data, "state": {"params": {}}}
    _, key = train.load_start(run, start, programs, None, None)
    first = data.open_text(("train", "val"), cfg)["train"]["batch"](0, np.arange(8))["tokens"][:, 0]

    def preview(params, key, source, cfg):
        return [{"prompt": "", "text": str(jax.random.key_data(key).tolist())}]

    task = {"sample": preview}
    samples = train.sample_texts({"cfg": cfg, "mesh": run["mesh"], "task": task}, None, 3, None)
    return [key.tolist(), json.loads(samples["texts"][0]), first.tolist()]


def prompt_texts(cfg):
    tokenizer = data.make_tokenizer(cfg.tokenizer)
    return [prompt["text"][:9] for prompt in data.sample_prompts(cfg, tokenizer)]


def sampled_into(cfg):
    """The names of the files that mode sample writes."""
    before = {*Path().iterdir()}
    train.main(cfg)
    return [path.name for path in {*Path().iterdir()} - before]


def drawn(cfg):
    """The tokens in 256 samples from probabilities of 50, 30, 15 and 5 %."""
    logits_BV = jnp.tile(jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]])), (256, 1))
    return np.unique(model._sample(logits_BV, jax.random.key(0), cfg)).tolist()


# ---- errors, and the files of a run

def rejected(words):
    """Whether the config is rejected with these words."""
    def observe(cfg):
        try:
            train.setup_run(cfg, devices=jax.devices())
        except ValueError as e:
            return words in str(e)
        return False
    return observe


def outcome(words=""):
    """The reason for which main() ends, or these words if its error has them."""
    def observe(cfg):
        try:
            return train.main(cfg)["reason"]
        except ValueError as e:
            if words in str(e):
                return words
            return str(e)
    return observe


def logged(event, key="step"):
    return lambda cfg: [r[key] for r in ckpt.read_log(cfg.out_dir) if r["event"] == event]


def last(event, key):
    return lambda cfg: logged(event, key)(cfg)[-1]


def checkpoints(cfg):
    return ckpt.steps(ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir))


def saves(kind):
    return lambda cfg: [r["step"] for r in ckpt.read_log(cfg.out_dir)
                        if r["event"] == "save" and r["kind"] == kind]


def saved_embed(cfg):
    root = ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir)
    return "params/embed" in ckpt.newest_meta(root)[1]["arrays"]


def exported_dtype(cfg):
    if not cfg.export:
        return ""
    path = Path(cfg.export, "model.safetensors")
    with safetensors.safe_open(path, framework="np") as file:
        return file.get_slice("model.norm.weight").get_dtype()


def n_batches(cfg):
    """Number of different batches that the run trained on."""
    batches = json.loads(Path(cfg.out_dir, "batches.json").read_text())
    return len({str(batch) for batch in batches})


def traces(cfg):
    return len(list(Path(cfg.out_dir).rglob("*.xplane.pb")))


def marked(cfg):
    return any("mark" in r for r in ckpt.read_log(cfg.out_dir))


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train"])


def _process(cfg, path):
    with contextlib.suppress(ValueError):  # no checkpoint to evaluate
        train.main(cfg)
    joined = jax.distributed.is_initialized()
    how = "joined" if joined else "alone"
    path.write_text(f"{how}, {jax.process_index()} of {jax.process_count()}")
    if joined:  # waits for the other process: a multiprocessing child runs no atexit functions
        jax.distributed.shutdown()


@cache
def outcomes(cfg):
    """The result of `_process` in each of cfg.n_processes real processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    cfg = dataclasses.replace(cfg, coordinator=cfg.coordinator and address, mode="eval",
                              out_dir="absent", cache_dir="")
    paths = [Path(f"process_{i}").absolute() for i in range(cfg.n_processes)]
    processes = [FORKS.Process(target=_process, daemon=True, args=(
        dataclasses.replace(cfg, process_id=i), path)) for i, path in enumerate(paths)]
    for path, process in zip(paths, processes):
        path.unlink(missing_ok=True)
        process.start()
    for process in processes:
        process.join(120)
    return [path.read_text() for path in paths]


def joined_as(cfg):
    return outcomes(dataclasses.replace(cfg, process_id=0))[cfg.process_id]


def watchdog_limit(cfg):
    """The seconds after which a stuck process of several ends."""
    with pytest.MonkeyPatch.context() as patch:
        limits = []
        patch.setattr(jax, "process_count", lambda: 2)
        patch.setattr(faulthandler, "dump_traceback_later", lambda limit, **how: limits.append(
            limit))
        train.restart_watchdog(cfg)
    return limits[0]


FIELDS = {
    "mode": row(dict(mode="eval"), outcome(), "already finished", "eval", FINISHED),
    "config": row(dict(config="gpt2-124m"), lambda cfg: config.parse(
        [f"--config={cfg.config}"]).n_layers, 4, 12),
    "out_dir": row(dict(out_dir="second"), lambda cfg: config.load(
        f"{cfg.out_dir}/config.json").out_dir, "first", "second", RUN),
    "seed": row(dict(seed=7), randomness,
                [[0, 0], [2467461003, 3840466878], [112, 128, 144, 0, 16, 32, 96, 176]],
                [[0, 7], [276534068, 1641862660], [64, 112, 160, 144, 32, 96, 176, 16]],
                dict(data=("count.npy",), val_frac=0.0)),
    "resume": row(dict(resume="never"), outcome("resume never: first holds a run at step 4"),
                  "already finished", "resume never: first holds a run at step 4", FINISHED),
    "explicit": row(dict(explicit=("norm_eps",)),
                    rejected("norm_eps 1e-06: is 1e-05 in that folder"), False, True,
                    dict(init_from=("hf",))),
    "allow_change": row(dict(allow_change=("b1",)), outcome("b1 was 0.9, is 0.5"),
                        "b1 was 0.9, is 0.5", "already finished", FINISHED | dict(b1=0.5)),
    "ckpt_dir": row(dict(ckpt_dir="elsewhere"), lambda cfg: Path(cfg.out_dir, "ckpt").exists(),
                    True, False, RUN),
    "init_from": row(dict(init_from=("first dynamic=yes",)),
                     lambda cfg: last("start", "origin")(cfg)[:13],
                     "a fresh initi", "first at step", RUN),
    "branch_from": row(dict(branch_from="first@9"), outcome("branch_from was '', is 'first@9'"),
                       "already finished", "branch_from was '', is 'first@9'", FINISHED),
    "checkpoint": row(dict(checkpoint="2"), lambda cfg: train.main(cfg)["step"], 4, 2,
                      RUN | dict(mode="eval", out_dir="first")),
    "export": row(dict(export="exported"), lambda cfg: Path("exported/config.json").exists()
                  and bool(cfg.export), False, True, RUN),
    "export_dtype": row(dict(export_dtype="bfloat16"), exported_dtype, "", "BF16", RUN),
    "hooks": row(dict(hooks=("marks.py:mark",)), marked, False, True, RUN),
    "cache_dir": row(dict(cache_dir="other"), lambda cfg: any(
        Path(cfg.cache_dir).glob("jit_train_step*")) and cfg.cache_dir, "programs", "other", RUN),

    "data": row(dict(data=("b.txt",)), letters("train"), ["a"], ["b"]),
    "val_data": row(dict(val_data=("b.txt",)), letters("val"), ["a"], ["b"]),
    "val_frac": row(dict(val_frac=0.5), sequences, [113, 13], [63, 63]),
    "data_dtype": row(dict(data_dtype="uint32"), sequences, [63], [32],
                      dict(data=("ids.bin",), val_frac=0.0, vocab_size=2**18)),
    "eod_id": row(dict(eod_id=3), n_segments, "need the id", 5, dict(
        data=("ids.bin",), document_mask=True, val_frac=0.0)),
    "token_cache": row(dict(token_cache="tokens_here"), lambda cfg: bool(
        data.open_text(("train", "val"), cfg)) and [
        str(p.parent.parent) for p in Path().glob("tokens_here/*/tokens")], [], ["tokens_here"]),
    "packing": row(dict(packing="none"), n_segments, 0, 1, LINES),
    "truncation": row(dict(truncation="error"), outcome_of_opening, "", "has 22 tokens", WHOLE),
    "padding_side": row(dict(padding_side="left"), padded_sides, [False, True], [True, False],
                        WHOLE),
    "columns": row(dict(columns=("text=note",)), letters("train"), ["\0", "s"], ["\0", "n"],
                   dict(data=("notes.jsonl",), val_frac=0.0)),
    "eos_token": row(dict(eos_token="a"), eos_id, 0, 1, dict(tokenizer="words.json")),
    "tokenizer": row(dict(tokenizer="words.json"), shape("embed"), (256, 16), (2, 16)),
    "document_mask": row(dict(document_mask=True), batch_names, ["labels", "tokens"],
                  ["labels", "positions", "segments", "tokens"]),
    "overfit_batch": row(dict(overfit_batch=True), n_batches, 4, 1, RUN),

    "steps": row(dict(steps=8), lrs, [0.5, 0.375, 0.25, 0.125], [0.5, 0.4375, 0.375, 0.3125],
                 LINEAR),
    "epochs": row(dict(epochs=0.75, steps=config.Config.steps), last("end", "step"), 4, 8, RUN),
    "stop": row(dict(stop=("+1",)), lambda cfg: train.main(cfg)["step"], 3, 1,
                RUN | dict(out_dir="stopped", resume="overwrite", steps=3)),
    "batch_size": row(dict(batch_size=16), batch_shape, (8, 16), (16, 16)),
    "grad_accum_steps": row(dict(grad_accum_steps=2), splits_rows, False, True,
                            dict(batch_size=16)),
    "seq_len": row(dict(seq_len=24), batch_shape, (8, 16), (8, 24)),

    "d_model": row(dict(d_model=32), shape("embed"), (256, 16), (256, 32)),
    "n_layers": row(dict(n_layers=2), shape("layers.wq"), (1, 16, 16), (2, 16, 16)),
    "n_heads": row(dict(n_heads=4), shape("layers.wq"), (1, 16, 16), (1, 16, 32),
                   dict(head_dim=8)),
    "n_kv_heads": row(dict(n_kv_heads=1), shape("layers.wk"), (1, 16, 16), (1, 16, 8)),
    "head_dim": row(dict(head_dim=4), shape("layers.wq"), (1, 16, 16), (1, 16, 8)),
    "d_ff": row(dict(d_ff=24), shape("layers.w_up"), (1, 16, 64), (1, 16, 24)),
    "vocab_size": row(dict(vocab_size=300), shape("embed"), (256, 16), (300, 16)),
    "rope_theta": row(dict(rope_theta=777.0), constant(777.0), False, True),
    "rope_factor": row(dict(rope_factor=6.5), constant(6.5), False, True),
    "rope_original_len": row(dict(rope_original_len=50), constant(50.0), False, True,
                             dict(rope_factor=6.5)),
    "norm_eps": row(dict(norm_eps=0.375), constant(0.375), False, True),
    "qk_norm": row(dict(qk_norm=False), count("stablehlo.rsqrt", "eval_step"), 5, 3),
    "qkv_bias": row(dict(qkv_bias=True), n_arguments, 15, 18),
    "tie_embeddings": row(dict(tie_embeddings=False), n_arguments, 15, 16),
    "sliding_window": row(dict(sliding_window=5), constant(5), False, True),
    "n_experts": row(EXPERTS, shape("layers.w_up"), (1, 16, 64), (1, 4, 16, 64)),
    "experts_per_token": row(dict(experts_per_token=3), loss_has("k = 3)"), False, True, EXPERTS),
    # 4 experts of 16 slots each, and of 4.
    "capacity_factor": row(dict(capacity_factor=0.5), loss_has("tensor<8x1x4x4x16xf32>"), False,
                           True, EXPERTS),
    "lora_rank": row(LORA, shape("layers.wq.lora_a"), None, (1, 16, 2)),
    "lora_alpha": row(dict(lora_alpha=7.0), constant(3.5), False, True, LORA),
    "lora_targets": row(dict(lora_targets=("layers.w[qv]",)), lora_weights, [
        f"layers.w{x}" for x in ("_down", "_gate", "_up", "k", "o", "q", "v")],
        ["layers.wq", "layers.wv"], LORA),
    "dropout": row(dict(dropout=0.5), lambda cfg: "threefry" in lowered(cfg, "train_step"),
                   False, True),
    "width_mult": row(dict(width_mult=2.0), shape("layers.wq"), (1, 16, 16), (1, 32, 32)),

    "dtype": row(dict(dtype="bfloat16"), loss_has("xbf16>"), False, True),
    "param_dtype": row(dict(param_dtype="bfloat16"), lambda cfg: str(
        states(cfg)["params"]["embed"].dtype), "float32", "bfloat16"),
    "attention": row(dict(attention="pallas"), rejected("attention pallas: cannot run on"), False,
                     True),
    "remat": row(dict(remat="full"), count("stablehlo.dot_general", "train_step"), 36, 36 + 6 + 4),
    "deterministic": row(dict(deterministic=True), lambda cfg: len(step.compiler_options(
        cfg, GPU)), 0, 1),
    "logit_tiles": row(dict(logit_tiles=4), loss_has("x4x256xf32>"), False, True),
    "mlp_tiles": row(dict(mlp_tiles=4), loss_has("x4x64xf32>"), False, True),

    "optimizer": row(dict(optimizer="lion"), first_moves, [-1, -1], [-0.5, -0.5], PLAIN),
    "lr": row(dict(lr=0.25), first_moves, [-1, -1], [-0.5, -0.5], PLAIN),
    "schedule": row(dict(schedule="linear"), lrs, [0.5] * 4, [0.5, 0.375, 0.25, 0.125], PLAIN),
    "warmup_steps": row(dict(warmup_steps=2.0), lrs, [0.5] * 4, [0.25, 0.5, 0.5, 0.5], PLAIN),
    "min_lr_frac": row(dict(min_lr_frac=0.5), lrs, [0.5, 0.375, 0.25, 0.125],
                       [0.5, 0.4375, 0.375, 0.3125], LINEAR),
    "decay_frac": row(dict(decay_frac=1.0), lrs, [0.5, 0.5, 0.5, 0.25],
                      [0.5, 0.375, 0.25, 0.125], PLAIN | dict(schedule="wsd", decay_frac=0.5)),
    "poly_power": row(dict(poly_power=1.0), lrs, [0.5, 0.28125, 0.125, 0.03125],
                      [0.5, 0.375, 0.25, 0.125], PLAIN | dict(schedule="polynomial")),
    "weight_decay": row(dict(weight_decay=0.25), first_moves, [-1, -1], [-1.125, -0.984375], PLAIN),
    "b1": row(dict(b1=0.5), first_moves, [-1, -1], [-1, -1.5], PLAIN),
    "b2": row(dict(b2=0.9375), lambda cfg: first_moves(cfg)[:1], [-1], [-2], RMS),
    "eps": row(dict(eps=3.0), lambda cfg: first_moves(cfg)[:1], [-1], [-0.25], RMS),
    "moment_dtype": row(dict(moment_dtype="bfloat16"), lambda cfg: str(
        moments(cfg)["embed"].dtype), "float32", "bfloat16"),
    "offload_optimizer": row(dict(offload_optimizer=True), lambda cfg: moments(
        cfg)["embed"].sharding.memory_kind, "device", "pinned_host"),
    "freeze": row(dict(freeze=("*", "!final_norm")), lambda cfg: len(moments(cfg)), 13, 1),
    "lr_mult": row(dict(lr_mult=("w=0.5",)), first_moves, [-1, -1], [-0.5, -0.5], PLAIN),
    "decay_mult": row(dict(decay_mult=("*=0",)), first_moves, [-1.125, -0.984375], [-1, -1],
                      PLAIN | dict(weight_decay=0.25)),
    "optimizers": row(dict(optimizers=("w=lion",)), first_moves, [-1, -1], [-0.5, -0.5], PLAIN),
    "clip_norm": row(dict(clip_norm=1.0), first_moves, [-1, -1], [-0.5, -0.5], PLAIN),
    "label_smoothing": row(dict(label_smoothing=0.375), constant(0.375), False, True),
    "z_loss": row(dict(z_loss=0.375), constant(0.375), False, True),
    "router_balance": row(dict(router_balance=0.375), constant(0.375), False, True, EXPERTS),
    "router_z": row(dict(router_z=0.375), constant(0.375), False, True, EXPERTS),
    "loss_norm": row(dict(loss_norm="positions"), constant(128.0), False, True),
    "loss_divisor": row(dict(loss_divisor=77.0), constant(77.0), False, True,
                        dict(loss_norm="constant", loss_divisor=3.0)),
    "on_nonfinite": row(dict(on_nonfinite="skip"), reason_with_nan, "a loss or", "all 4 ste",
               dict(out_dir="not_finite", resume="overwrite")),

    "dp": row(dict(dp=2), shard_shapes, [(1, 16), (1, 4, 2, 64), (1, 4, 2, 64)],
              [(1, 16), (1, 4, 4, 64), (1, 4, 2, 64)], EXPERTS),
    "fsdp": row(dict(fsdp=2), shard_shapes, ON_DP, [(1, 16), (1, 4, 8, 64), (1, 4, 2, 64)], DP),
    "ep": row(dict(ep=2), shard_shapes, ON_DP, [(1, 16), (1, 2, 16, 64), (1, 2, 4, 64)], DP),
    "tp": row(dict(tp=2), shard_shapes, ON_DP, [(2, 16), (1, 4, 16, 32), (1, 4, 4, 32)], DP),
    "sp": row(dict(sp=2), shard_shapes, ON_DP, [(2, 8), (1, 4, 8, 64), (1, 4, 2, 64)], DP),
    "slices": row(dict(slices=3), rejected("fsdp 8: must be a multiple of slices"), False, True),
    "coordinator": row(JOINED, joined_as, "alone, 0 of 1", "joined, 0 of 1"),
    "n_processes": row(dict(n_processes=2), joined_as, "joined, 0 of 1", "joined, 0 of 2", JOINED),
    "process_id": row(dict(process_id=1), joined_as, "joined, 0 of 2", "joined, 1 of 2",
                      JOINED | dict(n_processes=2)),

    "peer_timeout_s": row(dict(peer_timeout_s=50.0), watchdog_limit, 1800.0, 50.0),
    "track": row(dict(track=("tensorboard",)), lambda cfg: [
        path.name for path in Path(cfg.out_dir).glob("tensor*")], [], ["tensorboard"], RUN),
    "log_every": row(dict(log_every=3), logged("log"), [1, 2, 3, 4], [3, 6], RUN),
    "eval_every": row(dict(eval_every=5), logged("eval"), [2, 4], [5, 8], RUN),
    "eval_batches": row(dict(eval_batches=1), last("eval", "val_n_labels"), 148, 128, RUN),
    "eval_batch_size": row(dict(eval_batch_size=24), loss_has("tensor<24x16xi32>"), False, True),
    "save_every": row(dict(save_every=3), saves("save"), [2, 4], [3, 6, 8], RUN),
    "save_end": row(dict(save_end=False), lambda cfg: train.is_due_at_end(cfg, "save"),
                    True, False),
    "keep_best": row(dict(keep_best="val_loss"),
                     lambda cfg: len(ckpt.steps(ckpt.roots(
                         ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir))["best"])), 0, 1, RUN),
    "max_to_keep": row(dict(max_to_keep=1), checkpoints, [2, 4], [6, 8], RUN),
    "keep_period": row(dict(keep_period=6), checkpoints, [2, 4], [6, 8], RUN),
    "save_exclude": row(dict(save_exclude=("embed",)), saved_embed, True, False, RUN),
    "weights_every": row(dict(weights_every=4), saves("weights"), [], [4, 8], RUN),
    "export_every": row(dict(export_every=5), logged("export"), [], [5, 8], RUN),
    "reload_every": row(dict(reload_every=3), logged("reload"), [], [3, 6], RUN),
    "sample_every": row(dict(sample_every=3), logged("sample"), [], [3, 6, 8], RUN),
    "watch": row(dict(watch=("w",)), watched, [], ["w"], dict(log_every=1)),
    "profile": row(dict(profile="2:3"), traces, 0, 1, RUN),
    "log_all_processes": row(
        dict(log_all_processes=True),
        rejected("log_all_processes True: has no effect with coordinator ''"), False, True),

    "prompt": row(dict(prompt="beer"), lambda cfg: {
        text[:4] for texts in logged("sample", "texts")(cfg) for text in texts},
        set(), {"beer"}, RUN),
    "chat": row(dict(chat="a"), prompt_texts, [""], ["<q>a<a>"], dict(tokenizer="chatty")),
    "prompts": row(dict(prompts="lines.txt"), prompt_texts, [""], ["one", "two"]),
    "samples_file": row(dict(samples_file="samples.jsonl"), sampled_into, [], ["samples.jsonl"],
                        RUN | dict(mode="sample")),
    "n_samples": row(dict(n_samples=2), lambda cfg: list(map(len, logged("sample", "texts")(cfg))),
                     [], [2, 2, 2], RUN),
    "sample_tokens": row(dict(sample_tokens=3), lambda cfg: [
        len(texts[0]) - len(cfg.prompt) for texts in logged("sample", "texts")(cfg)],
        [], [3, 3, 3], RUN),
    "temperature": row(dict(temperature=0.0), drawn, [0, 1, 2, 3], [0], dict(temperature=1.0)),
    "top_k": row(dict(top_k=3), drawn, [0, 1, 2, 3], [0, 1, 2], dict(temperature=1.0)),
    "top_p": row(dict(top_p=0.6), drawn, [0, 1, 2, 3], [0, 1], dict(temperature=1.0)),
}


def configs(field):
    """The configs before and after the change."""
    base = FIELDS[field]["base"]
    change = dict(FIELDS[field]["change"])
    if base == RUN:
        for r in FIELDS.values():
            if r["base"] == RUN:
                change.update(r["change"])
    return [config.Config(**TINY | base), config.Config(**TINY | base | change)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Work in a folder with the files that FIELDS names."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("fields"))
    for letter in "ab":
        Path(f"{letter}.txt").write_text(2000 * letter)
    Path("numbers.txt").write_text(" ".join(map(str, range(400))))
    np.array([3, 1, 1, 1] * 250, np.uint16).tofile("ids.bin")
    texts = ["a long text of words", *["short"] * 10]
    Path("lines.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    Path("notes.jsonl").write_text('{"text": "sssss", "note": "nnnnn"}\n' * 99)
    np.save("count.npy", np.arange(193, dtype=np.uint8))
    Path("words.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "model": {
            "type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "</s>"}}))
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "vocab_size": 256, "rms_norm_eps": 1e-5}))
    Path("chatty").mkdir()
    Path("chatty/tokenizer.json").write_text(Path("words.json").read_text())
    Path("chatty/tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for m in messages %}<q>{{ m.content }}<a>{% endfor %}"}))
    Path("lines.txt").write_text("one\n\ntwo\n")
    Path("marks.py").write_text("def mark(event, row):\n"
                                "    return row | {'mark': 1} if event == 'log' else None\n")
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def runs(folder):
    """Do the two runs of the rows whose base is RUN."""
    for cfg in configs("out_dir"):
        batches = []

        def keep_batch(event, batch, batches=batches):
            if event == "data":
                batches.append(np.asarray(batch["tokens"]).tolist())

        train.main(cfg, hooks=[keep_batch])
        Path(cfg.out_dir, "batches.json").write_text(json.dumps(batches))


@pytest.mark.house
def test_every_field_has_a_row():
    """A field without a row is found.

    Break: config.py: norm_eps: PosFloat = 1e-6 => new: int = 0; norm_eps: PosFloat = 1e-6
    """
    fields = {field.name for field in dataclasses.fields(config.Config)}
    assert FIELDS.keys() == fields, (
        f"edit FIELDS in tests/test_fields.py: add {sorted(fields - FIELDS.keys())}, remove "
        f"{sorted(FIELDS.keys() - fields)}")


@pytest.mark.parametrize("field", [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "mode")) for name in FIELDS])
def test_each_field_has_its_effect(field, folder, request):
    """A changed value shows in the program, the step, the data, the mesh, a run or an error.

    Break: step.py: optax.scale_by_rms(cfg.b2, cfg.eps, => optax.scale_by_rms(cfg.b2, 1e-8,
    """
    r = FIELDS[field]
    assert field in r["change"] and r["before"] != r["after"]
    if r["base"].items() >= RUN.items():
        request.getfixturevalue("runs")
    old, new = configs(field)
    assert r["observe"](old) == r["before"]
    assert r["observe"](new) == r["after"]
