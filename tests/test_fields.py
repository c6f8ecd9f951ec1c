# SPDX-License-Identifier: Apache-2.0
"""Every field of the config has an effect: in the compiled programs, the data, samples, the files
of a run, or in an error.
"""
import dataclasses
import faulthandler
import json
import os
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
# The first of two runs; the second has the changes of RUNS as well.
RUN = TINY | dict(
    data=("numbers.txt",), log_every=1, eval_every=2, eval_batches=2, save_every=2, sample_every=0,
    sample_tokens=0, temperature=0.0)


def or_error(observe):
    """What a config does, or the error that it ends in."""
    def observe_or_catch(cfg):
        try:
            return observe(cfg)
        except ValueError as e:
            return f"error: {e}"
    return observe_or_catch


# ---- what is compiled

@cache
def lowered(cfg, program, task="TEXT"):
    """The text of a program, in which weights have shapes, dtypes, shardings and memory kinds."""
    tasks = {"TEXT": train.TEXT, "SLOPE": SLOPE}
    run = train.setup_run(cfg, tasks[task])
    return step.lower_steps(*train.step_args(run))[f"lower_{program}"]().as_text()


@or_error
def loss(cfg):
    return lowered(cfg, "eval_step")


@or_error
def update(cfg):
    return lowered(cfg, "train_step")


@or_error
def optimizer(cfg):
    """The update of one weight."""
    return lowered(cfg, "train_step", "SLOPE")


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


def lrs(cfg):
    return [step.lr_at(i, cfg) for i in range(4)]


def compiler_options(cfg):
    return step.compiler_options(
        cfg, types.SimpleNamespace(platform="gpu", compute_capability="9.0"))


# ---- data, samples

@or_error
def opened(cfg):
    """The first batch of the training data and of the validation data, and their lengths."""
    found = data.open_text(("train", "val"), train.setup_run(cfg).cfg)
    sources = [found["train"], *found["val"].values()]
    return [[source["n"], {name: x.tolist() for name, x in source["batch"](
        0, np.arange(cfg.batch_size)).items()}] for source in sources]


def token_folders(cfg):
    opened(cfg)
    return [str(path) for path in Path().glob("tokens_here/*/tokens")]


def eos_id(cfg):
    return data.make_tokenizer(cfg.tokenizer, cfg.eos_token)["eos"]


def randomness(cfg):
    """The keys of the initialization and of a sample, and the first batch."""
    run = train.setup_run(cfg)
    start = train.find_state(run, is_training=True)
    programs = {"init": lambda key, params: jax.random.key_data(key), "state": {"params": {}}}
    _, key = train.load_state(run, start, programs)

    def preview(params, key, source, cfg):
        return [{"prompt": "", "text": str(jax.random.key_data(key).tolist())}]

    run.task = {"sample": preview}
    samples = train.sample_texts(run, None, 3, None)
    return [key.tolist(), samples["texts"], opened(cfg)]


def prompts(cfg):
    return data.sample_prompts(cfg, data.make_tokenizer(cfg.tokenizer))


def written_rows(cfg):
    """The files after mode sample or eval."""
    train.main(cfg)
    return {*Path().glob("*.jsonl")}


def cost_of_a_run(cfg):
    return train.time_of_run(train.setup_run(cfg), 3600.0)


def drawn(cfg):
    """The tokens in 256 samples from probabilities of 50, 30, 15 and 5 %."""
    logits_BV = jnp.tile(jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]])), (256, 1))
    return np.unique(model._sample(logits_BV, jax.random.key(0), cfg)).tolist()


# ---- launches

@or_error
def outcome(cfg):
    return train.main(cfg)["reason"]


def reason_with_nan(cfg):
    return train.main(cfg, task=SLOPE, params={"w": jnp.full(1, jnp.nan)})["reason"]


def joined_as(cfg):
    """The arguments with which a process connects to the others."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.distributed, "initialize", lambda *args, **how: found.append(args))
        train.connect_processes(cfg)
    return found


def watchdog_limit(cfg):
    """The seconds after which a stuck process of several ends."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        patch.setattr(faulthandler, "dump_traceback_later", lambda limit, **_: found.append(limit))
        run = types.SimpleNamespace(cfg=cfg, hooks=(), progress=train.init_progress(0.0))
        train.emit(run, "log", {})
    return found


def observers_of_process_1(cfg):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: 1)
        return len(train.make_observers(cfg))


@or_error
def setup(cfg):
    return train.setup_run(cfg).cfg.norm_eps


EXPERTS = TINY | dict(n_experts=4)
LORA = TINY | dict(lora_rank=2)
LINEAR = TINY | dict(schedule="linear")
LINES = TINY | dict(data=("lines.jsonl",), val_frac=0.0)
WHOLE = LINES | dict(packing="none")
IDS = TINY | dict(data=("ids.bin",), val_frac=0.0)
JOINED = TINY | dict(coordinator="localhost:1")
DRAWN = TINY | dict(temperature=1.0)
FINISHED = RUN  # launched again

# Fields that change the program of an evaluation, with another value of each.
LOSS = dict(
    tokenizer="words.json", batch_size=16, seq_len=24, d_model=32, n_layers=2, n_heads=4,
    n_kv_heads=1, head_dim=4, d_ff=24, vocab_size=300, rope_theta=777.0, rope_factor=6.5,
    norm_eps=0.375, qk_norm=False, qkv_bias=True, post_norm=True, sandwich_norm=True, geglu=True,
    scale_embed=True, attn_softcap=3.0, logit_softcap=3.0, layer_types=("full_nope",),
    tie_embeddings=False, sliding_window=5, n_experts=4, lora_rank=2, width_mult=2.0,
    dtype="bfloat16", param_dtype="bfloat16", attention="pallas", logit_tiles=4, mlp_tiles=4,
    label_smoothing=0.375, z_loss=0.375, loss_norm="positions", slices=3, eval_batch_size=24)

# Fields that change the update of one weight, with another value of each.
OPTIMIZER = dict(
    grad_accum_steps=2, optimizer="lion", weight_decay=0.25, b1=0.5, b2=0.5,
    moment_dtype="bfloat16", lr_mult=("w=0.5",), decay_mult=("*=0.5",), optimizers=("w=lion",),
    clip_norm=0.5)

# {field: (value, observe, base)}: observe differs between the base and the base with this value.
FIELDS = {
    "mode": ("eval", outcome, FINISHED),
    "config": ("gpt2-124m", lambda cfg: config.parse([f"--config={cfg.config}"]).n_layers, dict(
        config="debug")),
    "seed": (7, randomness, TINY | dict(
        data=("count.npy",), val_frac=0.0, out_dir="unused")),
    "resume": ("never", outcome, FINISHED),
    "explicit": (("norm_eps",), setup, TINY | dict(init_from=("hf",))),
    "allow_change": (("b1",), outcome, FINISHED | dict(b1=0.5)),
    "branch_from": ("first@9", outcome, FINISHED),
    "checkpoint": ("2", lambda cfg: train.main(cfg)["step"], RUN | dict(mode="eval")),

    "data": (("b.txt",), opened, TINY),
    "val_data": (("b.txt",), opened, TINY),
    "val_frac": (0.5, opened, TINY),
    "data_dtype": ("uint32", opened, IDS | dict(vocab_size=2**18)),
    "eod_id": (3, opened, IDS | dict(document_mask=True)),
    "token_cache": ("tokens_here", token_folders, TINY),
    "packing": ("none", opened, LINES),
    "truncation": ("keep_end", opened, WHOLE),
    "padding_side": ("left", opened, WHOLE),
    "columns": (("text=note",), opened, TINY | dict(data=("notes.jsonl",), val_frac=0.0)),
    "eos_token": ("a", eos_id, TINY | dict(tokenizer="words.json")),
    "document_mask": (True, opened, TINY),

    "steps": (8, lrs, LINEAR),
    "stop": (("+1",), lambda cfg: train.main(cfg)["step"],
             RUN | dict(out_dir="stopped", resume="overwrite", steps=3)),

    "rope_scaling": ("linear", loss, TINY | dict(rope_factor=6.5)),
    "rope_original_len": (50, loss, TINY | dict(rope_factor=6.5)),
    "rope_attn_factor": (1.5, loss, TINY | dict(rope_factor=6.5, rope_scaling="yarn")),
    "rope_query_beta": (0.5, loss, TINY | dict(rope_factor=6.5, rope_original_len=4)),
    "rope_local_theta": (77.0, loss, TINY | dict(sliding_window=5)),
    "experts_per_token": (3, loss, EXPERTS),
    "capacity_factor": (0.5, loss, EXPERTS),
    "lora_alpha": (7.0, loss, LORA),
    "lora_targets": (("layers.w[qv]",), loss, LORA),
    "dropout": (0.5, update, TINY),

    "remat": ("full", update, TINY),
    "deterministic": (True, compiler_options, TINY),

    "lr": (0.25, lrs, TINY),
    "schedule": ("linear", lrs, TINY),
    "warmup_steps": (2.0, lrs, TINY),
    "min_lr_frac": (0.5, lrs, LINEAR),
    "decay_frac": (1.0, lrs, TINY | dict(schedule="wsd")),
    "poly_power": (1.0, lrs, TINY | dict(schedule="polynomial")),
    "eps": (0.5, optimizer, TINY | dict(optimizer="rmsprop")),
    "offload_optimizer": (True, update, TINY),
    "freeze": (("*", "!final_norm"), update, TINY),
    "router_balance": (0.375, loss, EXPERTS),
    "router_z": (0.375, loss, EXPERTS),
    "loss_divisor": (77.0, loss, TINY | dict(loss_norm="constant", loss_divisor=3.0)),
    "on_nonfinite": ("skip", reason_with_nan, TINY | dict(out_dir="nan", resume="overwrite")),

    "dp": (2, loss, EXPERTS),
    "fsdp": (2, loss, EXPERTS | dict(dp=-1, fsdp=1)),
    "ep": (2, loss, EXPERTS),
    "tp": (2, loss, EXPERTS),
    "sp": (2, loss, EXPERTS),
    "coordinator": ("localhost:1", joined_as, TINY),
    "n_processes": (2, joined_as, JOINED),
    "process_id": (1, joined_as, JOINED | dict(n_processes=2)),
    "peer_timeout_s": (50.0, watchdog_limit, TINY),
    "log_all_processes": (True, observers_of_process_1, TINY | dict(coordinator="localhost:1")),

    "examples_file": ("examples.jsonl", written_rows, RUN | dict(mode="eval")),
    "price": (3.0, cost_of_a_run, TINY | dict(mode="plan")),
    "save_end": (False, train.event_intervals, TINY),
    "watch": (("w",), optimizer, TINY | dict(log_every=1)),

    "chat": ("a", prompts, TINY | dict(tokenizer="chatty")),
    "prompts": ("lines.txt", prompts, TINY),
    "samples_file": ("samples.jsonl", written_rows, RUN | dict(mode="sample", sample_tokens=1)),
    "temperature": (0.0, drawn, DRAWN),
    "top_k": (3, drawn, DRAWN),
    "top_p": (0.6, drawn, DRAWN),
    **{field: (value, loss, TINY) for field, value in LOSS.items()},
    **{field: (value, optimizer, TINY) for field, value in OPTIMIZER.items()},
}


# ---- two runs

def logged(event, key="step"):
    return lambda cfg: [r[key] for r in ckpt.read_log(cfg.out_dir) if r["event"] == event]


def last(event, key):
    return lambda cfg: logged(event, key)(cfg)[-1]


def checkpoints(kind=None):
    def observe(cfg):
        root = ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir)
        return ckpt.steps(ckpt.roots(root)[kind] if kind else root)
    return observe


def saves(kind):
    return lambda cfg: [r["step"] for r in ckpt.read_log(cfg.out_dir)
                        if r["event"] == "save" and r["kind"] == kind]


def saved_embed(cfg):
    root = ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir)
    return "params/embed" in ckpt.newest_meta(root)["arrays"]


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


def files(pattern):
    return lambda cfg: len([*Path(cfg.out_dir).rglob(pattern)])


def of_samples(measure):
    return lambda cfg: [measure(texts, cfg) for texts in logged("sample", "texts")(cfg)]


# {field: (value, observe, observation of the first run, of the second run)}
RUNS = {
    "out_dir": ("second", lambda cfg: config.load(f"{cfg.out_dir}/config.json").out_dir,
                "first", "second"),
    "ckpt_dir": ("elsewhere", lambda cfg: Path(cfg.out_dir, "ckpt").exists(), True, False),
    "init_from": (("first dynamic=yes",), lambda cfg: last("start", "origin")(cfg)[:13],
                  "a fresh initi", "first at step"),
    "export": ("exported", lambda cfg: Path("exported/config.json").exists() and bool(cfg.export),
               False, True),
    "export_dtype": ("bfloat16", exported_dtype, "", "BF16"),
    "hooks": (("marks.py:mark",), lambda cfg: "mark" in str(ckpt.read_log(cfg.out_dir)[2:]),
              False, True),
    "cache_dir": ("other", lambda cfg: any(Path(cfg.cache_dir).glob("threads*/jit_train_step*"))
                  and cfg.cache_dir, "programs", "other"),
    "overfit_batch": (True, n_batches, 4, 1),
    "epochs": (0.75, last("end", "step"), 4, 8),
    "track": (("tensorboard",), files("tensorboard"), 0, 1),
    "log_every": (3, logged("log"), [1, 2, 3, 4], [3, 6]),
    "eval_every": (5, logged("eval"), [2, 4], [5, 8]),
    "eval_batches": (1, last("eval", "val_n_labels"), 148, 128),
    "save_every": (3, saves("save"), [2, 4], [3, 6, 8]),
    "keep_best": ("val_loss", lambda cfg: len(checkpoints("best")(cfg)), 0, 1),
    "max_to_keep": (1, checkpoints(), [2, 4], [6, 8]),
    "keep_period": (6, checkpoints(), [2, 4], [6, 8]),
    "save_exclude": (("embed",), saved_embed, True, False),
    "weights_every": (4, saves("weights"), [], [4, 8]),
    "export_every": (5, logged("export"), [], [5, 8]),
    "reload_every": (3, logged("reload"), [], [3, 6]),
    "sample_every": (3, logged("sample"), [], [3, 6, 8]),
    "profile": ("2:3", files("*.xplane.pb"), 0, 1),
    "prompt": ("beer", of_samples(lambda texts, cfg: texts[0][:4]), [], ["beer"] * 3),
    "n_samples": (2, of_samples(lambda texts, cfg: len(texts)), [], [2, 2, 2]),
    "sample_tokens": (3, of_samples(lambda texts, cfg: len(texts[0]) - len(cfg.prompt)),
                      [], [3, 3, 3]),
}

# Fields whose change is an error, and those that their base needs.
REFUSED = {"resume", "explicit", "branch_from", "attention", "slices"}
NEEDED = {"allow_change", "eod_id"}


def run_config(with_changes):
    changes = {field: value for field, (value, *_) in RUNS.items()}
    changes["steps"] = config.Config.steps  # epochs determine them
    return config.Config(**RUN | (changes if with_changes else {}))


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
    """Do the two runs."""
    for with_changes in (False, True):
        batches = []

        def keep_batch(event, batch, batches=batches):
            if event == "data":
                batches.append(np.asarray(batch["tokens"]).tolist())

        cfg = run_config(with_changes)
        train.main(cfg, hooks=[keep_batch])
        Path(cfg.out_dir, "batches.json").write_text(json.dumps(batches))


@pytest.mark.house
def test_every_field_has_a_row():
    """A field without a row is found.

    Break: config.py: norm_eps: PosFloat = 1e-6 => new: int = 0; norm_eps: PosFloat = 1e-6
    """
    fields = {field.name for field in dataclasses.fields(config.Config)}
    rows = FIELDS.keys() | RUNS.keys()
    assert rows == fields, (
        f"edit FIELDS in tests/test_fields.py: add {sorted(fields - rows)}, remove "
        f"{sorted(rows - fields)}")


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_has_its_effect(field, folder, request):
    """A changed value shows in a program, the data, samples, a launch or an error.

    Break: step.py: optax.scale_by_rms(cfg.b2, cfg.eps, => optax.scale_by_rms(cfg.b2, 1e-8,
    """
    value, observe, base = FIELDS[field]
    if base.get("out_dir") == RUN["out_dir"]:
        request.getfixturevalue("runs")
    before = observe(config.Config(**base))
    after = observe(config.Config(**base | {field: value}))
    assert before != after
    if field == "seed":
        assert all(old != new for old, new in zip(before, after, strict=True))
    assert str(before).startswith("error: ") == (field in NEEDED)
    assert str(after).startswith("error: ") == (field in REFUSED), after


@pytest.mark.parametrize("field", RUNS)
def test_each_field_of_a_run_has_its_effect(field, runs):
    """A changed value shows in the files of a run.

    Break: train.py: "weights": intervals["weights"], => "weights": True,
    """
    _, observe, before, after = RUNS[field]
    assert observe(run_config(False)) == before
    assert observe(run_config(True)) == after


def test_programs_differ_only_where_a_field_has_an_effect():
    """Two configs that differ in fields of sampling have one program.

    Break: model.py: cfg.z_loss * z_BT => cfg.temperature * z_BT
    """
    cfg = config.Config(**TINY)
    other = dataclasses.replace(cfg, temperature=0.5, out_dir="other", seed=3)
    for observe in (loss, update, optimizer, compiler_options):
        assert observe(cfg) == observe(other)
