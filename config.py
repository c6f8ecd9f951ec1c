# SPDX-License-Identifier: Apache-2.0
"""All settings of a run: one dataclass, its command line, and the rules between its fields.

Owns `Config`, the one class of the project, its text forms (command line, JSON, named presets) and
its validation. Rejects a config that cannot run, with all errors in one message.
Invariant: a `Config` is hashable, so that it can be a static argument of jax.jit.
"""
import contextlib
import dataclasses
import inspect
import json
import operator
import os
import re
import shlex
import sys
import textwrap
import zlib
from decimal import Decimal
from fnmatch import fnmatchcase
from math import inf, prod
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

# Types of numbers. Each carries its bound: (test, rule as text).
PosInt = Annotated[int, (lambda x: 1 <= x < 2**31, "at least 1, and below 2^31")]
NonNegInt = Annotated[int, (lambda x: x >= 0, "at least 0")]
NonNegFloat = Annotated[float, (lambda x: 0 <= x < inf, "at least 0, and finite")]
PosFloat = Annotated[float, (lambda x: 0 < x < inf, "above 0, and finite")]
FractionBelow1 = Annotated[float, (lambda x: 0 <= x < 1, "in [0, 1)")]
Fraction = Annotated[float, (lambda x: 0 <= x <= 1, "in [0, 1]")]
PosFraction = Annotated[float, (lambda x: 0 < x <= 1, "in (0, 1]")]
LearningRate = Annotated[float, (
    lambda x: 0 <= x < inf or x == -1, "at least 0 and finite, or -1 for the default")]
WarmUp = Annotated[float, (
    lambda x: 0 <= x < 1 or (x >= 2 and x % 1 == 0), "below 1, or a whole number from 2")]
TokenId = Annotated[int, (lambda x: x >= -1, "at least 0, or -1 for unknown")]
Interval = int | str  # see parse_intervals
Seed = Annotated[int, (lambda x: 0 <= x < 2**32, "in [0, 2^32)")]
Axis = Annotated[int, (lambda x: x >= 1 or x == -1, "at least 1, or -1 for all remaining devices")]


# The comment beside or above a field is its text in --help; `# ---- name` begins a group there.
# A size of 0 is filled in by derive_text, vocab_size by the tokenizer, "auto" by train.setup_run.
# On a first reading: the groups data, length, model and optimizer.
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    # ---- run

    # train: train, or resume a run; eval: evaluate the newest checkpoint; sample: print samples
    # from it; plan: print memory and FLOPs without allocating; data: tokenize the data;
    # export: write the newest checkpoint as Hugging Face weights
    mode: Literal["train", "eval", "sample", "plan", "data", "export"] = "train"
    config: str = ""  # JSON file or preset name, with values for the flags that are not typed
    # folder of this run: config, metrics, checkpoints, plot. empty: named after the fields that
    # define the run and differ from their defaults, as out/default or out/lr=0.0003,seed=1; modes
    # eval, sample and export take the newest run in out when no such field is set
    out_dir: str = ""
    # folder of checkpoints, also s3://bucket/path or gs://bucket/path; empty: out_dir/ckpt
    ckpt_dir: str = ""
    # auto: resume if out_dir has a run, whose config.json then gives the flags that are not typed;
    # must: fail if it has none; never: fail if it has one; overwrite: delete that run first
    resume: Literal["auto", "must", "never", "overwrite"] = "auto"
    allow_change: tuple[str, ...] = ()  # fields that may differ from the checkpoint's config
    # fields that --init_from may not replace even where they have their defaults; fields that a
    # flag, --config or a resumed run sets are among them
    explicit: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    # where initial parameters come from; the last one wins. DIR, DIR@best, DIR@400: a run, or this
    # checkpoint of it; a folder of Hugging Face weights; hf://ORG/NAME or hf://ORG/NAME@REVISION;
    # an adapter of PEFT, after its base. Options follow within the same quotes, as in 'DIR load=w*
    # strict=no'. load=: patterns of parameters to take; exclude=: patterns of parameters to skip;
    # rename=SAVED:LOCAL: prefix to replace; strict=no: skip names that do not fit; dynamic=yes:
    # load again every reload_every
    init_from: tuple[str, ...] = ()
    # DIR@STEP: begin with the full state that the run in DIR had at this step, in a folder of its
    # own; the config.json in DIR gives the flags that are not typed
    branch_from: str = ""
    # checkpoint that modes eval, sample and export read: latest, best (see keep_best), or a step
    checkpoint: str = "latest"
    export: str = ""  # folder for the newest parameters as Hugging Face weights; empty: no export
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of exported weights
    hooks: tuple[str, ...] = ()  # functions to call on events of the run, as my_hooks.py:in_bits
    # folder of compiled programs and tokenized data; empty: keep no compiled programs
    cache_dir: str = "~/.cache/sixfile"

    # ---- data

    # training files: paths, globs, folders of Hugging Face datasets, objects in buckets, as in
    # 's3://bucket/web/*.parquet' or 'gs://...', or data on the Hub, as in hf://datasets/ORG/NAME or
    # 'hf://datasets/ORG/NAME/*.parquet'; empty: the source files of Python's standard library. With
    # weights they are mixed in these proportions, as web.bin=0.7 code.bin=0.3
    data: tuple[str, ...] = ()
    # validation files or globs; empty: the last val_frac of data. Sets with names, as in
    # code='tests/*.py' prose=a.txt prose=b.txt, are evaluated one by one, and then either all
    # entries have a name or none; an existing path that contains = is a path
    val_data: tuple[str, ...] = ()
    val_frac: FractionBelow1 = 0.1  # fraction of data for validation, when val_data is empty
    # columns of the data by other names than text, prompt and completion, or messages and tools:
    # as text=content
    columns: tuple[str, ...] = ()
    # dtype of .bin token files without a header: uint16, uint32, int32, int64
    data_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    # id of the token between documents in token files, which document_mask needs; -1: unknown
    eod_id: TokenId = -1
    # bytes, a tokenizer.json or its folder, hf://ORG/NAME on the Hub, or tiktoken:NAME
    tokenizer: str = "bytes"
    eos_token: str = ""  # token of the tokenizer that ends a document; empty: its eos_token
    token_cache: str = ""  # folder of tokenized data; empty: the folder data in cache_dir
    # stream: join all documents and cut every seq_len tokens; best_fit: pack documents into
    # sequences without splitting them; none: one document per sequence, padded
    packing: Literal["stream", "best_fit", "none"] = "stream"
    # attend only within the token's own document, with positions from its start; best_fit and none
    # always do
    document_mask: bool = False
    # which part to keep of a document that is longer than a sequence, unless packing is stream
    truncation: Literal["keep_start", "keep_end"] = "keep_start"
    # side on which sequences are padded, unless packing is stream
    padding_side: Literal["right", "left"] = "right"
    overfit_batch: bool = False  # train on batch 0 alone, to check that the model can learn it

    # ---- length and batch

    steps: PosInt = 1000  # optimizer steps in total, and the horizon of the schedule
    epochs: NonNegFloat = 0.0  # passes over the training data; above 0 it determines steps
    # conditions that end the run early: 500 (steps in all), +100 (steps of this launch), 2h30m
    # (since this launch began), val_loss<3 or loss>9 (a loss above its bound exits with code 1)
    stop: tuple[str, ...] = ()
    batch_size: PosInt = 16  # sequences per step, over all devices
    grad_accum_steps: PosInt = 1  # microbatches per step, for gradient accumulation
    seq_len: PosInt = 128  # tokens per sequence

    # ---- model

    d_model: PosInt = 128  # width of the residual stream
    n_layers: PosInt = 3  # layers, each of attention and MLP
    d_ff: NonNegInt = 0  # width of the MLP; 0: 8/3 d_model, rounded up to a multiple of 32
    vocab_size: NonNegInt = 0  # number of token ids; 0: the tokenizer's

    # A change of the fields from here to experts_per_token may leave all shapes equal, but makes
    # another model: see architecture_mismatch.

    n_heads: PosInt = 2  # query heads
    n_kv_heads: NonNegInt = 0  # key and value heads; 0: as many as query heads
    head_dim: NonNegInt = 0  # width of a head; 0: d_model / n_heads
    rope_theta: PosFloat = 10000.0  # base of the rotary frequencies
    rope_factor: PosFloat = 1.0  # scaling of rotary wavelengths, for longer sequences; 1: none
    # which wavelengths rope_factor scales: long ones, by the rule of Llama 3.1 or of YaRN, or all
    rope_scaling: Literal["llama3", "yarn", "linear"] = "llama3"
    rope_original_len: PosInt = 8192  # tokens per sequence before rope_factor
    # factor of rotated queries and keys under yarn; 0: 0.1 ln(rope_factor) + 1
    rope_attn_factor: NonNegFloat = 0.0
    # growth of queries with the position: 1 + beta ln(1 + floor(position / rope_original_len))
    rope_query_beta: NonNegFloat = 0.0
    # rope_theta of layers with a window, whose wavelengths are then not scaled; 0: as all layers
    rope_local_theta: NonNegFloat = 0.0
    norm_eps: PosFloat = 1e-6  # constant added to the mean square in RMSNorm
    qk_norm: bool = True  # RMSNorm on each query and key head
    qkv_bias: bool = False  # biases of the query, key and value projections
    # RMSNorm of what attention and MLP return in place of what they get; qk_norm is then over all
    # heads together, as in OLMo 2
    post_norm: bool = False
    sandwich_norm: bool = False  # RMSNorm of what attention and MLP get and of what they return
    geglu: bool = False  # GELU in place of SiLU in the MLP
    tie_embeddings: bool = True  # one matrix for embedding and logits
    scale_embed: bool = False  # multiply the embedding of a token by sqrt(d_model)
    attn_softcap: NonNegFloat = 0.0  # bound of attention scores: cap * tanh(x / cap); 0: none
    logit_softcap: NonNegFloat = 0.0  # bound of logits, likewise
    # how many tokens a query attends to, itself included; 0: all before it
    sliding_window: NonNegInt = 0
    # kinds of the layers, repeated over the depth, as in `sliding sliding full`: sliding has the
    # sliding_window, full has none; full_nope and sliding_nope have no rotary positions. Default:
    # all layers alike
    layer_types: tuple[str, ...] = ()
    n_experts: NonNegInt = 0  # experts per layer; 0: a dense MLP
    experts_per_token: PosInt = 2  # experts that the router selects for each token (top-k)
    # expert capacity as a multiple of an even split of the tokens, beyond which tokens are dropped;
    # 0: unlimited
    capacity_factor: NonNegFloat = 2.0
    lora_rank: NonNegInt = 0  # rank of the LoRA factors; 0: no LoRA
    lora_alpha: PosFloat = 16.0  # LoRA factors are scaled by lora_alpha / lora_rank
    lora_targets: tuple[str, ...] = ("layers.w*",)  # glob patterns of weights with LoRA factors
    # probability of dropping an element of the embedding and of the output of each attention and
    # MLP, in training; attention weights are never dropped
    dropout: FractionBelow1 = 0.0
    # scaling of the width, to compare sizes of one model: multiplies d_model, d_ff, n_heads and
    # n_kv_heads; head width, layers, vocabulary and lr are unchanged
    width_mult: PosFloat = 1.0

    # ---- numerics

    # compute dtype. auto: the fastest that the device supports; mixed: float32, with bfloat16
    # operands of matmuls; float16: with loss scaling
    dtype: Literal["auto", "float32", "mixed", "bfloat16", "float16"] = "auto"
    # dtype of the stored parameters; to bfloat16 they are rounded stochastically
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # attention kernel. auto: the fastest available; xla: any device; cudnn: NVIDIA GPUs;
    # pallas: TPUs
    attention: Literal["auto", "xla", "cudnn", "pallas"] = "auto"
    # activations to recompute in the backward pass. none: none; full: all within a layer; dots: all
    # but the matmuls with weights; named: all but queries, keys, values and attention output;
    # offload: as full, with the inputs of layers in host memory
    remat: Literal["none", "full", "dots", "named", "offload"] = "none"
    # sequence tiles in which logits and loss are computed, to save memory; 0: the fewest that keep
    # the logits of a tile small, about 256 MiB per device, or 2 GiB on GPUs
    logit_tiles: NonNegInt = 0
    mlp_tiles: PosInt = 1  # sequence tiles in which the MLP is computed, to save memory
    # bit-reproducible on NVIDIA GPUs too, where it rules out cudnn attention and may be slower
    deterministic: bool = False

    # ---- optimizer

    # adamw, adafactor, lion, muon (for the matrices of layers; adamw for the rest), rmsprop, sgd
    optimizer: str = "muon"
    lr: LearningRate = -1.0  # peak learning rate; -1: the default of the optimizer
    # learning rate after warm-up: constant, linear, cosine, polynomial, inverse_sqrt, or wsd, which
    # is constant and then decays linearly
    schedule: str = "linear"
    warmup_steps: WarmUp = 0.05  # steps of linear warm-up; below 1: a fraction of steps
    min_lr_frac: Fraction = 0.0  # fraction of lr that the schedule decays to
    decay_frac: PosFraction = 0.2  # fraction of steps in which the wsd schedule decays
    poly_power: NonNegFloat = 2.0  # exponent of the polynomial schedule
    weight_decay: NonNegFloat = 0.1  # decoupled weight decay, times lr at each step; matrices only
    b1: FractionBelow1 = 0.9  # decay of the first moment; momentum of Lion, Muon and SGD
    b2: FractionBelow1 = 0.98  # decay of the second moment (Adam, RMSprop) or the momentum (Lion)
    eps: PosFloat = 1e-8  # constant added to the denominator of Adam and RMSprop
    # dtype of first moments; second moments are float32
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    offload_optimizer: bool = False  # keep the moments in host memory between steps
    # glob patterns of parameters that are not trained; a later !pattern trains its matches again
    freeze: tuple[str, ...] = ()
    # multipliers of lr by parameter, as 'embed=0.3' 'layers.w*=2'; the last match wins
    lr_mult: tuple[str, ...] = ()
    # multipliers of weight_decay by parameter, as 'embed=0'; the last match wins
    decay_mult: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()  # optimizers by parameter, as 'embed=sgd'; the last match wins
    clip_norm: NonNegFloat = 1.0  # maximum global norm of the gradients; 0: no clipping
    label_smoothing: FractionBelow1 = 0.0  # probability moved from the label to all other tokens
    z_loss: NonNegFloat = 0.0  # weight of the z-loss, the squared log-partition of the logits
    router_balance: NonNegFloat = 0.01  # weight of the router's load-balancing loss
    router_z: NonNegFloat = 0.001  # weight of the router's z-loss
    # denominator of the summed loss. tokens: labels; positions: all positions, padding included;
    # sequences: mean over sequences of their means; constant: loss_divisor
    loss_norm: Literal["tokens", "positions", "sequences", "constant"] = "tokens"
    loss_divisor: NonNegFloat = 0.0  # denominator for a batch, with loss_norm constant
    # what to do after a loss or gradient that is not finite; parameters are unchanged in any case.
    # skip: take the next batch; stop: save the last good state and exit with code 1; raise: end
    # with a traceback
    on_nonfinite: Literal["skip", "stop", "raise"] = "stop"

    # ---- random numbers

    seed: Seed = 0  # for initialization, data order and sampling

    # ---- mesh

    # A run may resume with another value of the fields from here on: see RESUMABLE_FIELDS.

    # devices along dp, which splits batch, gradients and moments (ZeRO-2); -1: all remaining
    dp: Axis = 1
    # devices along fsdp, which splits the batch, the moments and the parameters (ZeRO-3); -1: all
    # remaining devices
    fsdp: Axis = -1
    ep: Axis = 1  # devices along ep, which splits experts, the batch and other weights
    tp: Axis = 1  # devices along tp, which splits heads, MLP width and vocabulary
    sp: Axis = 1  # devices along sp, which splits the sequence (Ulysses) and weights
    # TPU slices or groups of hosts joined by a slow network; they split dp, or fsdp where dp is 1.
    slices: PosInt = 1
    # address of process 0 as host:port; auto: found by Slurm, Open MPI or Kubernetes; empty: the
    # run has one process
    coordinator: str = ""
    n_processes: PosInt = 1  # number of processes of the run, with coordinator host:port
    process_id: NonNegInt = 0  # index of this process, with coordinator host:port
    # seconds without progress in any process after which all of them exit; 0: never
    peer_timeout_s: NonNegFloat = 1800.0
    log_all_processes: bool = False  # print log rows, and trace profiles, in every process

    # ---- intervals

    track: tuple[str, ...] = ()  # metric trackers besides metrics.jsonl: wandb, tensorboard
    # steps between rows of metrics.jsonl; a run of fewer steps has a row at its end; 0: no rows
    log_every: NonNegInt = 10
    # interval between evaluations: 250 (steps), 1epoch, 10m (of all launches together), 1window (of
    # data that comes later), or several as 250,1h; 0: only at the end
    eval_every: Interval = 250
    # batches, of eval_batch_size, that an evaluation takes of each validation set; 0: all of it
    eval_batches: NonNegInt = 40
    # sequences per batch of an evaluation, without microbatches; 0: batches as in training
    eval_batch_size: NonNegInt = 0
    # file to write the values per example of mode eval to, as .jsonl; empty: none
    examples_file: str = ""
    price: NonNegFloat = 0.0  # price of one device for an hour; mode plan prints the cost of a run
    # interval between checkpoints, as 250, 1epoch or 250,10m; 0: only at the end. A checkpoint that
    # a time like 10m made is deleted when the next one exists, unless keep_period keeps it
    save_every: Interval = 250
    save_end: bool = True  # save after the last step, and when a condition of stop ends the run
    # metric of evaluations, as val_loss or val_acc, whose best parameters are kept in ckpt/best.
    # val_loss<: less is better; val_acc>: more is. empty: none
    keep_best: str = ""
    max_to_keep: NonNegInt = 2  # newest checkpoints to keep; 0: all
    keep_period: NonNegInt = 0  # checkpoints at multiples of this step are never deleted; 0: none
    save_exclude: tuple[str, ...] = ()  # glob patterns of parameters that checkpoints exclude
    # interval between checkpoints of the parameters alone, in ckpt/weights, as 250 or 1epoch; 0:
    # never
    weights_every: Interval = 0
    export_every: Interval = 0  # interval between exports, as 250 or 1epoch; 0: only at the end
    # interval between reloads of init_from sources with dynamic=yes, as 250 or 10m; 0: never
    reload_every: Interval = 0
    # interval between printed samples, as 500 or 1epoch; 0: only at the end
    sample_every: Interval = 500
    # glob patterns of parameters whose histograms and gradient norms are logged
    watch: tuple[str, ...] = ()
    profile: str = ""  # steps first:last to trace into out_dir/profile, as 20:22; empty: none

    # ---- sampling

    # text that a sample continues; empty: none, or in training the beginning of a validation row
    prompt: str = ""
    chat: str = ""  # question that a sample answers, in the tokenizer's chat template
    # file of prompts, one a line; or .jsonl with prompt (a text) or messages (a chat) in each row
    prompts: str = ""
    samples_file: str = ""  # file to write the samples of mode sample to, as .jsonl; empty: none
    n_samples: PosInt = 1  # number of samples of each prompt
    sample_tokens: NonNegInt = 200  # new tokens per sample; 0: no samples
    temperature: NonNegFloat = 0.8  # sampling temperature; 0: greedy
    top_k: NonNegInt = 0  # sample among the k most likely tokens; 0: all
    # sample among the most likely tokens whose probabilities sum to this (nucleus sampling)
    top_p: PosFraction = 1.0


# ---- command line

def parse(argv, kind=Config):
    """The config of a command line. Each field has the value of the first of these sources that
    sets it: a flag, the file or preset --config, the run in out_dir, the run that --branch_from
    leaves, the defaults of `kind`.

    kind: a dataclass that extends Config; its fields become flags too. Raises ValueError for
    unknown flags and malformed numbers. `--help` prints and exits.
    """
    if "--help" in argv or "-h" in argv:
        _print_help(argv, kind)
    # Each source is a dict {field: value}, which may be empty.
    typed = _expand_home(_typed_values(argv, kind))
    from_branch = _branch_values(kind(**typed))
    from_file = _load_values(typed.get("config", ""), kind)
    # Which folder? A first config answers that. The folder may hold a run with a config of its own.
    first = kind(**_merge(from_branch, from_file, typed))
    out_dir = _choose_out_dir(first, typed)
    from_run = {}
    if first.mode in ("train", *READ_MODES) and first.resume in ("auto", "must"):
        from_run = _run_config(out_dir, kind)
    # The file is the config of another run: its folders are not those of this one.
    if not _is_same_path(from_file.get("out_dir", out_dir), out_dir):
        from_file.update(ckpt_dir="", export="")

    values = _merge(from_run or from_branch, from_file, typed)
    values["explicit"] = tuple(sorted(values))
    values["out_dir"] = out_dir
    if from_run:  # other values than those in its config.json, whose path this is, are changes
        values["config"] = from_run["config"]
    return kind(**values)


def _merge(*sources):
    """One dict of all sources; the last source that has a key gives its value."""
    merged = {}
    for source in sources:
        merged |= source
    return merged


# ---- supporting
# Sections: flags, help, names of runs, paths, config files, numbers, intervals, fields with a
# syntax of their own, validation, types and bounds, mesh sizes, rules between fields, errors, the
# transformer, differences between configs.

# ---- flags

def _typed_values(argv, kind):
    """{field: value} of the flags on a command line, also of those that give a default."""
    import tyro

    # tyro finds the texts of each flag. Choices stay texts: validate names the nearest one.
    types = get_type_hints(kind)
    fields = []
    for name, hint in types.items():
        if get_origin(hint) is tuple:
            hint = tuple[str, ...]
        elif hint is not bool:
            hint = str
        fields.append((name, hint, hint()))
    flags, unknown = tyro.cli(
        dataclasses.make_dataclass("Flags", fields), args=argv, use_underscores=True,
        add_help=False, return_unknown_args=True)
    _check_unknown(unknown, kind)

    typed = {}
    for arg in argv:
        name = re.sub("^--|=.*", "", arg, flags=re.DOTALL).replace("-", "_")
        if name not in types:
            name = name.removeprefix("no_")  # a switch
        if arg.startswith("--") and name in types:
            if name in typed and get_origin(types[name]) is tuple:
                raise ValueError(f"--{name}: stands twice; write all its values after one")
            typed[name] = _read_flag(name, getattr(flags, name), types[name])
    return typed


def _read_flag(name, value, hint):
    """The value of a flag, in which numbers may be written as 1Ki, 50% or 2h30m."""
    if isinstance(value, tuple):
        return tuple(_read_flag(name, item, get_args(hint)[0]) for item in value)
    if hint == Interval and value.isdecimal():
        return int(value)
    if hint not in (int, float):
        return value
    try:
        return parse_number(value, hint)
    except ValueError as e:
        raise ValueError(f"--{name}: {e}") from None


def _check_unknown(words, kind):
    """Raise a ValueError that names all unknown flags, each with the flag that may be meant.

    words: those of the command line that tyro cannot place: unknown flags, and values without one.
    """
    flags = [word for word in words if re.match(r"--?[A-Za-z]|\w+=", word)]  # also lr=3, without --
    raise_if_errors([f"{word} ({_suggest_flag(word, kind)})" for word in flags], "unknown flag")
    if words:
        raise ValueError(f"{' '.join(words)}: is neither a flag nor the value of one; write a "
                         "switch as --no_qk_norm, a config file as --config FILE")


def _suggest_flag(word, kind):
    """How to write a flag that is unknown as `word`, or where to look for it."""
    known = get_type_hints(kind)
    flag, _, value = word.lstrip("-").partition("=")
    name = flag.replace("-", "_").lower()
    if name in known:  # with one dash or none, or in capitals
        return f"write --{name} {value}".rstrip()
    name = name.removeprefix("no_")
    # Optional: names in other trainers.
    hint = _hint_for_name(name, known)
    if hint:
        return hint
    close = nearest(name, known)
    return f"nearest: --{close}" if close else "see --help all"


# ---- help

SHORT_HELP = """The flags that people type most. --help all: all flags, with defaults

run       --mode MODE           train, eval, sample, export, data, plan
          --config NAME         preset, as gpt2-124m, or JSON file with flags
          --out_dir DIR         folder of the run; empty: named after the flags
          --seed N              initialization, order of the data, sampling
          --resume HOW          auto, must, never, overwrite
          --init_from DIR       begin with these weights; or hf://ORG/NAME
          --branch_from DIR@N   begin with all of another run, as of its step N
          --export DIR          write Hugging Face weights there
data      --data FILE ...       text, jsonl, parquet, token files; FILE=WEIGHT
          --val_data FILE ...   validation files; empty: the end of data
          --tokenizer NAME      bytes, FILE, hf://ORG/NAME, tiktoken:NAME
          --packing HOW         stream, best_fit, none
length    --steps N             optimizer steps
          --epochs X            passes over the data, in place of steps
          --stop WHEN ...       500, +100, 2h30m, val_loss<3
          --batch_size N        sequences a step, on all devices together
          --grad_accum_steps N  microbatches a step
          --seq_len N           tokens a sequence
model     --d_model N           width
          --n_layers N          layers
          --n_heads N           query heads
          --n_experts N         experts a layer; 0: none
          --lora_rank N         train LoRA factors alone; 0: all parameters
          --dtype NAME          float32, mixed, bfloat16, float16
          --remat NAME          saves memory: none, full, dots, named, offload
optimizer --optimizer NAME      muon, adamw, lion, adafactor, rmsprop, sgd
          --lr X                peak learning rate
          --schedule NAME       linear, cosine, wsd, constant, ...
          --warmup_steps X      steps, or below 1 a fraction of all
          --weight_decay X      of the matrices
mesh      --fsdp N              devices that split parameters and batch
          --tp N                devices that split heads and MLP
intervals --eval_every N        steps, or 1epoch, or 10m; so for the next two
          --save_every N        checkpoints
          --sample_every N      printed samples
          --keep_best METRIC    keep the best checkpoint, by val_loss
          --track NAME ...      wandb, tensorboard
sampling  --prompt TEXT         text to continue
          --sample_tokens N     length of a sample

Numbers may be written as 1Ki, 2^20, 1.5M, 50% or 2h30m.
"""


def _print_help(argv, kind):
    """Print the flags that people type most and the names of those of a fork, then exit. With
    `--help all`: all flags with the comments of their fields, by tyro.
    """
    import tyro

    if "all" in argv:
        tyro.cli(kind, args=["--help"], use_underscores=True)  # exits
    print(SHORT_HELP)
    own = [f"--{name}" for name in get_type_hints(kind) if name not in get_type_hints(Config)]
    if own:
        print(f"of {kind.__name__}: {' '.join(own)}")
    sys.exit()


# ---- names of runs

RUNS_DIR = "out"  # folder of the runs that are named after their fields
NAME_BYTES = 100  # longest derived name

READ_MODES = ("eval", "sample", "export")  # modes that read a run
# Fields that define a run when it trains. Modes that read a run may have others, such as the files
# of an evaluation, so they do not say which run is meant.
EVALUATION_FIELDS = ("val_data", "val_frac", "columns", "data_dtype", "eod_id", "packing",
                     "document_mask", "truncation", "padding_side", "dtype", "hooks")


def _choose_out_dir(cfg, typed):
    """The folder of a run on a command line: cfg.out_dir, or derive_out_dir(cfg).

    typed: {field: value} of the flags. Modes that read a run take the newest one in RUNS_DIR when
    no flag defines a run.
    """
    if typed.get("out_dir"):
        return cfg.out_dir
    # A file of --config or a recipe may set the folder. A variant of a run gets one of its own.
    is_variant = _has_config_of_run(cfg) and _defining_changes(cfg)
    if cfg.out_dir and "branch_from" not in typed and not is_variant:
        return cfg.out_dir
    derived = derive_out_dir(cfg)
    defining = {name for name in typed if _defines_run(name) or name == "config"}
    if not Path(derived, "metrics.jsonl").exists():
        defining -= {*EVALUATION_FIELDS}  # else a run was trained with the flags of an evaluation
    logs = list(Path(RUNS_DIR).glob("*/metrics.jsonl"))
    if cfg.mode in READ_MODES and not defining and logs:
        newest = max(logs, key=lambda log: log.stat().st_mtime)
        return str(newest.parent)
    return derived


def derive_out_dir(cfg):
    """The folder of a run, named after the fields that define it and differ from their defaults.

    A name that is cut, or has lost characters that do not suit a folder, ends in a checksum.
    """
    recipe = type(cfg).__name__.removesuffix("Config").lower()
    source = cfg.config.removesuffix(".json")
    if os.path.basename(cfg.config) == "config.json":  # of a run
        source = os.path.dirname(os.path.realpath(cfg.config))
        if cfg.branch_from or os.path.basename(source) == "default":
            source = ""
    words = [recipe, cfg.branch_from, source]  # source: the preset, file or run of cfg.config
    # lr=0.0003, no_qk_norm, data=a.txt+b.txt
    for name, value in _defining_changes(cfg).items():
        flag = _as_flag(name, value).removeprefix("--")
        words.append(flag.replace(" ", "=", 1).replace(" ", "+"))
    # Of each path its last name. DIR/@400 is DIR@400.
    words = [re.sub(r"/+(?=[@+']|$)", "", word) for word in words if word]
    words = [re.sub(r"[^=+'/:]*[/:]", "", word) for word in words]
    whole = ",".join(words) or "default"
    name = re.sub(r"[^A-Za-z0-9_.,=+@%-]", "_", whole.replace("'", ""))[:NAME_BYTES]
    if name != whole:
        name = f"{name[: NAME_BYTES - 9]}-{zlib.crc32(whole.encode(errors='replace')):08x}"
    return f"{RUNS_DIR}/{name}"


def _has_config_of_run(cfg):
    """Whether cfg.config is the config.json of the run in cfg.out_dir."""
    return bool(cfg.config) and _is_same_path(cfg.config, Path(cfg.out_dir, "config.json"))


def _defining_changes(cfg):
    """{field: value} of the fields that define a run and differ from _default_values, but for
    branch_from, with which a name begins.
    """
    default = _default_values(cfg)
    return {name: value for name, value in vars(cfg).items()
            if _defines_run(name) and name != "branch_from" and value != default[name]}


def _defines_run(name):
    """Whether a field is part of the name of a run. width_mult is resumable since its effect is in
    the fields that it multiplies.
    """
    return name not in RESUMABLE_FIELDS or name == "width_mult"


def _default_values(cfg):
    """{field: value} without flags: the defaults, and what cfg.config and the run that a branch
    leaves have instead.
    """
    default = vars(type(cfg)())
    if not cfg.config:  # a config from Python
        return default
    return _merge(default, _branch_values(cfg), _load_values(cfg.config, type(cfg)))


def _as_flag(name, value):
    """A field as people type it: --lr 0.0003, --no_qk_norm, --data a.txt 'b c.txt'."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name} {_as_typed(value)}".rstrip()


def _as_typed(value):
    """A value as people type it: 3 for 3.0, and all digits of a number where they matter."""
    if isinstance(value, tuple):
        return " ".join(map(_as_typed, value))
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return shlex.quote(str(value))


# ---- paths

def resolve_paths(cfg):
    """cfg with ~ expanded in its paths."""
    return dataclasses.replace(cfg, **_expand_home(vars(cfg)))


def _expand_home(values):
    """{field: value} in which ~ at the beginning of a path, or of the path in NAME=PATH, is
    expanded. The default of cache_dir stays, so that config.json is the same for all users.
    """
    home = os.path.expanduser("~")

    def expand(text):
        if isinstance(text, str):  # validate reports wrong types
            text = re.sub(r"^([\w.-]+=|)~(?=/|$)", rf"\1{home}", text)
        return text

    expanded = dict(values)
    for name, value in values.items():
        if isinstance(value, tuple):
            expanded[name] = tuple(map(expand, value))
        elif name not in ("prompt", "chat") and value != Config.cache_dir:
            expanded[name] = expand(value)
    return expanded


def _is_same_path(one, other):
    """Whether two paths lead to the same file."""
    return os.path.realpath(one) == os.path.realpath(other)


# ---- config files

# Fields of one launch, not of the run; config.json stores their defaults.
LAUNCH_FIELDS = ("mode", "config", "resume", "allow_change", "explicit", "checkpoint", "stop",
                 "coordinator", "n_processes", "process_id", "log_all_processes")


def without_launch_fields(cfg):
    """The config as config.json stores it: without what belongs to one launch of the run.

    Resets LAUNCH_FIELDS to their defaults, and steps if they were derived from epochs.
    """
    default = type(cfg)()
    reset = {name: getattr(default, name) for name in LAUNCH_FIELDS}
    if cfg.epochs:
        reset["steps"] = default.steps
    return dataclasses.replace(cfg, **reset)


HIDDEN_FLAGS = ("mode", "config", "out_dir", "explicit")  # changed_flags omits them


def changed_flags(cfg):
    """The fields that differ from their defaults, or from those that cfg.config names, as texts
    "--name value". The config.json of the run itself, or of the run that a branch leaves, is not
    shown.
    """
    default = _default_values(cfg)
    flags = []
    if _has_config_of_run(cfg):
        default = vars(type(cfg)())
    elif cfg.config and not cfg.branch_from:
        flags = [f"--config {cfg.config}"]
    for name, value in vars(cfg).items():
        if name not in HIDDEN_FLAGS and value != default[name]:
            flags.append(textwrap.shorten(_as_flag(name, value), 300, placeholder=" ..."))
    return flags


def to_json(cfg):
    """The text of config.json. `from_json(to_json(cfg)) == cfg`."""
    return json.dumps(dataclasses.asdict(cfg), indent=1) + "\n"


def from_json(text, where="JSON", kind=Config):
    """The config of a JSON object."""
    return kind(**_json_values(text, where, kind))


def load(name, kind=Config):
    """The config of a preset or a JSON file."""
    return kind(**_load_values(name, kind))


def _json_values(text, where, kind):
    """{field: value} of a JSON object. Raises ValueError with all unknown keys and wrong types."""
    try:
        values = {**json.loads(text, object_pairs_hook=_unique_keys)}
    except (ValueError, TypeError) as e:
        raise ValueError(f"{where}: not a JSON object of fields: {e}") from None
    types = get_type_hints(kind)
    errors = []
    for name, value in values.items():
        if name not in types:
            errors.append(f"unknown key, or of a recipe: {name!r} ({_suggest_flag(name, kind)})")
        if isinstance(value, list):
            values[name] = tuple(value)
        elif type(value) is int and types.get(name) is float:
            values[name] = float(value)
    raise_if_errors(errors + _field_errors(values, kind), where)
    return values


def _unique_keys(pairs):
    """The dict of (key, value) pairs. Raises ValueError when a key comes twice."""
    keys = [key for key, _ in pairs]
    raise_if_errors([f"comes twice: {key!r}" for key in set(keys) if keys.count(key) > 1], "key")
    return dict(pairs)


def _load_values(name, kind=Config):
    """{field: value} that a preset or a JSON file sets, with its name as "config"; {} for no name.
    Raises ValueError when the name is neither.
    """
    if not name:
        return {}
    if name in PRESETS:
        return PRESETS[name] | {"config": name}
    text = _config_text(name)
    if text is None:
        raise ValueError(f"config {name!r}: no file or preset ({did_you_mean(name, PRESETS)})")
    values = _expand_home(_json_values(text, name, kind))
    if values.get("config"):
        raise ValueError(f"{name}: config {values['config']!r}: must be empty in a config file")
    # The run whose config.json this is may have been moved, or started from another folder.
    path = Path(name)
    if path.name == "config.json" and path.with_name("metrics.jsonl").exists():
        values["out_dir"] = str(path.parent)
    return values | {"config": name}


def _config_text(name):
    """The text of a config file, None without the file. A config.json that is missing or empty, as
    after a power cut, is replaced by its copy in the newest intact checkpoint beside it.
    """
    path = Path(name)
    if path.is_file() and path.stat().st_size:
        return path.read_bytes()
    metas = path.parent.glob("ckpt/[0-9]*/meta.json") if path.name == "config.json" else ()
    for meta in sorted(metas, reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # corrupted
            content = json.loads(meta.read_bytes())
            body = json.dumps(content["body"], sort_keys=True)
            if zlib.crc32(body.encode()) == content["crc32"]:  # as in ckpt.py
                return json.dumps(content["body"]["config_file"])
    return None


def _branch_values(cfg):
    """{field: value} of the run that cfg.branch_from leaves, but for its folders; {} for none."""
    if not cfg.branch_from:
        return {}
    folder, _ = parse_branch(os.path.expanduser(cfg.branch_from))
    return _run_config(folder, type(cfg)) | {"ckpt_dir": "", "export": ""}


def _run_config(folder, kind):
    """{field: value} of the config.json in a folder; {} without the file."""
    path = str(Path(folder, "config.json"))
    if _config_text(path) is None:
        return {}
    return _load_values(path, kind)


# ---- numbers

UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12,
         "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "%": Decimal("0.01"),
         "s": 1, "m": 60, "h": 3600, "d": 86400}
TIME_UNITS = {"s", "m", "h", "d"}


def parse_number(text, kind=float):
    """A number as people write it: 2^20, 1.25M, 1Ki, 50%, 2h30m, 1d. Durations are in seconds.

    Raises ValueError when the text is not a number, or has a fraction where `kind` is int.
    """
    text = text.strip()
    power = re.fullmatch(r"(\d+)\^(\d{1,3})", text)
    if power:
        return kind(int(power[1]) ** int(power[2]))
    digits = re.sub("^[+-]", "", text)
    # Each part is a number, which may have an exponent, and a unit, which may be empty.
    parts = re.findall(r"((?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)([A-Za-z%]*)", digits)
    units = {unit for _, unit in parts}
    legal_units = TIME_UNITS if len(parts) > 1 else UNITS.keys()
    is_complete = "".join(number + unit for number, unit in parts) == digits
    if not parts or not is_complete or not units <= legal_units:
        raise ValueError(f"{text!r} is not a number; write 300, 2^20, 1.25M, 1Ki, 50% or 2h30m")
    value = sum(Decimal(number) * UNITS[unit] for number, unit in parts)
    if text.startswith("-"):
        value = -value
    if kind is int and (value != int(value) or units & TIME_UNITS):
        raise ValueError(f"{text!r} is {value}, but must be a whole number")
    return kind(value)


# ---- intervals

EVENTS = ("save", "weights", "export", "eval", "sample", "reload")  # events with a field NAME_every


def _parse_interval(text):
    """(unit, amount) of 250, 10m, 2epochs or window. unit: step, second, epoch or window."""
    named = re.fullmatch("(.*?)(epoch|window)s?", text)
    if named:
        count, unit = named[1] or "1", named[2]
    else:
        count, unit = text, "second" if text[-1:] in TIME_UNITS else "step"
    kind = int if unit in ("step", "window") else float
    return unit, parse_number(count, kind)


def parse_intervals(value):
    """{unit: amount} of an Interval, without amounts of 0. Raises ValueError when malformed."""
    intervals = {}
    for part in str(value).replace(" ", "").split(","):
        unit, amount = _parse_interval(part)
        if unit in intervals or amount < 0:
            raise ValueError(f"{value!r} has a unit twice, or a negative amount")
        intervals[unit] = amount
    return {unit: amount for unit, amount in intervals.items() if amount}


# ---- fields with a syntax of their own

# How a value is compared with a bound, and the words for it.
COMPARE = {"<": operator.lt, ">": operator.gt, ">=": operator.ge}
STOP_WORDS = {"<": "is below", ">": "is above", ">=": "has reached"}


def _parse_stop(text):
    """A condition of cfg.stop, {"name", "sign", "bound"}: it holds when the value of this name
    compares so with the bound. Raises ValueError when the text is malformed.
    """
    metric = re.fullmatch("([^<>]+)([<>])(.+)", text)
    if metric:
        name, sign, bound = metric[1], metric[2], parse_number(metric[3])
    else:
        name, bound = _parse_interval(text)
        sign = ">="
    if name == "step" and text.startswith("+"):
        name = "new_steps"
    is_count = name in ("step", "new_steps", "second")
    if is_count != (sign == ">=") or (is_count and bound <= 0):
        raise ValueError(f"{text!r} is no condition")
    return {"name": name, "sign": sign, "bound": bound}


def parse_stops(cfg):
    """All conditions of cfg.stop."""
    return [_parse_stop(text) for text in cfg.stop]


def better_sign(name):
    """The sign by which values of a metric are better: "<", ">", or "" if its name does not say."""
    metric = name.partition("/")[0]  # without the name of a validation set
    if re.search("loss|ppl|bits|error|nll", metric):
        return "<"
    return ">" if re.search("acc|auc|reward|f1", metric) else ""


def parse_best(text):
    """The metric that cfg.keep_best names: {"name", "is_better": (new, old) -> bool}.

    Raises ValueError when it is no metric of evaluations, or neither the text nor the name says
    whether less or more is better.
    """
    name = text.rstrip("<>")
    sign = text[len(name):] or better_sign(name)
    if not name.startswith("val_") or sign not in ("<", ">"):
        raise ValueError(f"{text!r} must begin with val_, and end in < or > unless its name says "
                         "which is better, as in val_loss")
    return {"name": name, "is_better": COMPARE[sign]}


def parse_branch(text):
    """(folder of a run, step) of DIR@STEP. Raises ValueError when the text is malformed."""
    folder, _, step = text.rpartition("@")
    if not folder or not step.isdecimal():
        raise ValueError(f"{text!r} must be DIR@STEP; for DIR@best use --init_from")
    return folder, int(step)


def profile_span(cfg):
    """(first, last) step of cfg.profile, counted from 1; (0, 0) when it is empty.

    Raises ValueError when it is malformed, or begins after the last step.
    """
    if not cfg.profile:
        return 0, 0
    span = re.fullmatch(r"(\d+):(\d+)", cfg.profile)
    first, last = map(int, span.groups()) if span else (0, 0)
    begins_in_run = first <= cfg.steps or cfg.epochs > 0  # epochs may mean more steps
    if not 0 < first <= last or not begins_in_run:
        raise ValueError(f"{cfg.profile!r} must be as 20:22, and begin within steps")
    return first, last


# ---- validation

def validate(cfg, n_devices, choices=(), task_errors=lambda sizes, cfg: []):
    """Raise one ValueError with all errors: name, value, rule, nearest legal value.

    n_devices: None skips the mesh. choices: {field: its legal values}, such as the optimizers of
    step.py; for a PATTERN=VALUE field, the legal VALUEs. task_errors({axis: size} or None, cfg):
    errors that only the task can find, e.g. text_errors.
    """
    # Each field alone: its type and its bound. The rules would fail on wrong types.
    raise_if_errors(_field_errors(vars(cfg), type(cfg)))

    # Field names are the legal values of allow_change, and "state", for arrays of the state.
    choices = {"allow_change": [*vars(cfg), "state"]} | dict(choices)
    errors = _choice_errors(cfg, choices)
    # Fields together, then with the mesh, then with the task.
    errors += _rule_errors(cfg) + _unused_errors(cfg)
    sizes = None
    if n_devices:
        sizes, mesh_errors = mesh_sizes(cfg, n_devices)
        errors += mesh_errors
    errors += task_errors(sizes, cfg)
    raise_if_errors(errors)


# ---- types and bounds

def _field_errors(values, kind):
    """Errors of values that are not of the type of their field, or outside the bound that the type
    carries.
    """
    errors = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in values:
            continue
        bound = None
        if get_origin(hint) is Annotated:
            hint, bound = get_args(hint)
        if not _is_of_type(values[name], hint):
            rule = f"of type {inspect.formatannotation(hint)}"
            if get_origin(hint) is Literal:
                rule = f"one of {', '.join(get_args(hint))}"
        elif bound and not bound[0](values[name]):
            rule = bound[1]
        else:
            continue
        errors.append(f"{name} {values[name]!r:.80}: must be {rule}")
    return errors


def _is_of_type(value, hint):
    """Whether a value is of the type of its field."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        item_type = get_args(hint)[0]
        return isinstance(value, tuple) and all(isinstance(item, item_type) for item in value)
    if isinstance(value, bool) != (hint is bool):  # in Python a bool is an int
        return False
    return isinstance(value, int | float if hint is float else hint)


def _choice_errors(cfg, choices):
    """Errors of names that are not among the legal values of a field."""
    errors = []
    for name, known in choices.items():
        given = getattr(cfg, name)
        if not isinstance(given, tuple):
            given = (given,)
        for text in given:
            chosen = str(text).rpartition("=")[2]
            if chosen not in known:
                errors.append(f"{name} {text!r}: unknown ({did_you_mean(chosen, known)})")
    return errors


# ---- mesh sizes

# Axes of the mesh, outermost first; repeated in step.py, so that each file works alone.
AXES = ("dp", "fsdp", "ep", "tp", "sp")


def mesh_sizes(cfg, n_devices):
    """({axis: size} with -1 resolved, or None; errors of the mesh and of what it splits)."""
    sizes = {axis: getattr(cfg, axis) for axis in AXES}
    known = prod(n for n in sizes.values() if n > 0)
    inferred = [axis for axis, n in sizes.items() if n == -1]
    if inferred:
        sizes[inferred[0]] = n_devices // known
    if prod(sizes.values()) != n_devices:
        mesh = " ".join(f"{axis}={getattr(cfg, axis)}" for axis in AXES)
        return None, [f"mesh {mesh}: must multiply to {n_devices} devices; one may be -1"]
    row_parts = sizes["dp"] * sizes["fsdp"] * sizes["ep"]
    sliced = "fsdp" if sizes["dp"] == 1 else "dp"
    errors = _multiple_errors(sliced, sizes[sliced], "slices", cfg.slices)
    errors += _multiple_errors("batch_size", cfg.batch_size, "grad_accum_steps x dp x fsdp x ep",
                               cfg.grad_accum_steps * row_parts)
    errors += _multiple_errors("eval_batch_size", cfg.eval_batch_size, "dp x fsdp x ep", row_parts)
    return sizes, errors


def _multiple_errors(name, value, rule, divisor):
    """An error if value is not a multiple of the divisor, with the nearest values that are."""
    if value % divisor == 0:
        return []
    below = value // divisor * divisor
    examples = f"{below} or {below + divisor}" if below else divisor
    return [f"{name} {value}: must be a multiple of {rule} = {divisor}, as {examples}"]


# ---- rules between fields

# Names that the formats of data.py know.
COLUMNS = ("text", "prompt", "completion", "messages", "conversations", "instruction", "input",
           "output", "system", "tools", "chosen", "rejected", "input_ids", "labels",
           "attention_mask")


def _rule_errors(cfg):
    """Errors of fields whose values are malformed, or do not go together."""
    errors = []

    def rule(field, holds, text):
        if not holds:
            errors.append(field_error(cfg, field, text))

    def check(field, parse, *args):
        try:
            parse(*args)
        except ValueError as e:
            errors.append(f"{field}: {e}")

    # Fields with a syntax of their own.
    for event in EVENTS:
        check(f"{event}_every", parse_intervals, getattr(cfg, f"{event}_every"))
    check("stop, as 500, +100, 2h30m or val_loss<3", parse_stops, cfg)
    check("profile", profile_span, cfg)
    check("keep_best", parse_best, cfg.keep_best or "val_loss")
    if cfg.branch_from:
        check("branch_from", parse_branch, cfg.branch_from)
    columns = dict(text.partition("=")[::2] for text in cfg.columns)
    rule("columns", all(columns.values()) and len({*columns} & {*COLUMNS}) == len(cfg.columns),
         f"must be NAME=COLUMN, as in text=content, with a NAME of {', '.join(COLUMNS)}")

    # Values that do not go together.
    rule("coordinator", re.fullmatch(r"(auto|.+:\d{1,5})?", cfg.coordinator),
         "must be host:port, or auto")
    rule("process_id", cfg.process_id < cfg.n_processes, "must be below n_processes")
    metrics = [text for text in cfg.stop if re.search("[<>]", text)]
    rule("stop", cfg.log_every or all(text.startswith("val_") for text in metrics),
         "a metric of training needs log_every above 0")
    rule("loss_divisor", cfg.loss_norm != "constant" or cfg.loss_divisor, "must be above 0")
    rule("out_dir", "://" not in cfg.out_dir, "must be on this machine; set --ckpt_dir to a URL")
    rule("export", cfg.mode != "export" or cfg.export, "must name a folder in mode export")
    rule("prompt", bool(cfg.prompt) + bool(cfg.chat) + bool(cfg.prompts) <= 1,
         "only one of prompt, chat and prompts may be set; clear the others, as in --chat ''")
    if cfg.n_experts:
        # Expert capacity is counted over all tokens of a sequence.
        rule("mlp_tiles", cfg.mlp_tiles == 1, "must be 1 with n_experts")
        # The weights of a token's experts are divided by their sum, as in Mixtral and Qwen3, so a
        # single expert would always have weight 1.
        rule("experts_per_token", 2 <= cfg.experts_per_token <= cfg.n_experts,
             "must be at least 2, and at most n_experts")
    return errors


def _unused_errors(cfg):
    """Errors of fields that are set, by a flag rather than by cfg.config, and have no effect."""
    default = _default_values(cfg)
    errors = []

    def unused(field, when, *names):
        for name in names:
            if when and getattr(cfg, name) != default[name]:
                text = f"has no effect with {field} {getattr(cfg, field)!r}"
                errors.append(field_error(cfg, name, text))

    unused("mode", cfg.mode not in READ_MODES, "checkpoint")
    unused("mode", cfg.mode != "sample", "samples_file")
    unused("mode", cfg.mode != "eval", "examples_file")
    unused("mode", cfg.mode != "plan", "price")
    unused("n_experts", not cfg.n_experts,
           "experts_per_token", "capacity_factor", "router_balance", "router_z")
    unused("coordinator", cfg.coordinator in ("", "auto"), "n_processes", "process_id")
    unused("coordinator", not cfg.coordinator, "log_all_processes")
    unused("lora_rank", not cfg.lora_rank, "lora_alpha", "lora_targets")
    unused("epochs", cfg.epochs, "steps")
    unused("export", not cfg.export, "export_every", "export_dtype")
    unused("init_from", "dynamic=yes" not in str(cfg.init_from), "reload_every")
    unused("packing", cfg.packing == "stream", "truncation", "padding_side")
    unused("packing", cfg.packing != "stream", "document_mask")
    unused("document_mask", not cfg.document_mask, "eod_id")
    unused("log_every", not cfg.log_every, "watch")
    unused("temperature", not cfg.temperature, "top_k", "top_p")
    unused("rope_factor", cfg.rope_factor == 1, "rope_scaling")
    unused("rope_factor", cfg.rope_factor == 1 and not cfg.rope_query_beta, "rope_original_len")
    unused("rope_scaling", cfg.rope_scaling == "linear" and not cfg.rope_query_beta,
           "rope_original_len")
    unused("rope_scaling", cfg.rope_scaling != "yarn", "rope_attn_factor")
    unused("loss_norm", cfg.loss_norm != "constant", "loss_divisor")
    unused("schedule", cfg.schedule == "constant", "min_lr_frac")
    unused("schedule", cfg.schedule != "wsd", "decay_frac")
    unused("schedule", cfg.schedule != "polynomial", "poly_power")
    # Muon leaves some parameters to AdamW, which reads all of these.
    optimizers = {cfg.optimizer, *(text.rpartition("=")[2] for text in cfg.optimizers)}
    unused("optimizer", optimizers <= {"adafactor", "rmsprop"}, "b1", "moment_dtype")
    unused("optimizer", optimizers <= {"adafactor", "sgd"}, "b2")
    unused("optimizer", optimizers <= {"adafactor", "sgd", "lion"}, "eps")
    return errors


# ---- errors

def raise_if_errors(errors, where="config"):
    """Raise one ValueError with all errors that are not empty, if there are any."""
    errors = [error for error in errors if error]
    if errors:
        raise ValueError(f"{where}: " + "\n  ".join(errors))


def field_error(cfg, name, rule):
    """An error on the value of a field."""
    return f"{name} {getattr(cfg, name)!r}: {rule}"


def key_errors(where, given, known, required=()):
    """Errors of the keys of a dict: unknown keys, and required ones that are missing."""
    errors = [f"{where}unknown key {key!r} ({did_you_mean(key, known)})"
              for key in given if key not in known]
    errors += [f"{where}no {key!r}" for key in required if key not in given]
    return errors


def did_you_mean(name, known):
    """'nearest: x', the known name that `name` misspells, or else all known names."""
    close = nearest(str(name), known)
    return f"nearest: {close}" if close else f"legal: {', '.join(known)}"


def nearest(name, known):
    """The known name that `name` misspells, or "". The two may differ in case, by one edit if one
    of them has at least 4 letters, and by two edits if one has at least 12.
    """
    for n_edits, n_letters in ((0, 1), (1, 4), (2, 12)):
        for word in known:
            is_long = max(len(name), len(word)) >= n_letters
            if is_long and _within_edits(name.lower(), word.lower(), n_edits):
                return word
    return ""


def _within_edits(one, other, n_edits):
    """Whether at most n_edits edits turn one text into the other. An edit inserts, deletes or
    replaces a letter, or swaps two neighbours.
    """
    if one == other or not n_edits:
        return one == other
    if one[:1] == other[:1]:
        return _within_edits(one[1:], other[1:], n_edits)
    rests = [(one[1:], other), (one, other[1:]), (one[1:], other[1:])]
    if one[:2] == other[:2][::-1]:
        rests.append((one[2:], other[2:]))
    return any(_within_edits(*rest, n_edits - 1) for rest in rests)


# ---- the transformer

LAYER_TYPES = ("full", "sliding", "full_nope", "sliding_nope")


def text_errors(sizes, cfg):
    """Errors between the fields that shape the transformer.

    sizes: {axis: size} of the mesh, or None to skip it.
    """
    errors = []
    if not cfg.head_dim:
        errors += _multiple_errors("d_model", cfg.d_model, "2 x n_heads", 2 * cfg.n_heads)
    if cfg.n_kv_heads:
        errors += _multiple_errors("n_heads", cfg.n_heads, "n_kv_heads", cfg.n_kv_heads)
    if cfg.head_dim % 2:
        errors.append(field_error(cfg, "head_dim", "must be even, for rotary positions"))
    unknown = sorted(set(cfg.layer_types) - set(LAYER_TYPES))
    for kind in unknown:
        errors.append(f"layer_types {kind!r}: must be one of {', '.join(LAYER_TYPES)}")
    if len(cfg.layer_types) > cfg.n_layers:
        errors.append(field_error(cfg, "layer_types", f"must be at most n_layers {cfg.n_layers}"))
    has_window = any(kind.startswith("sliding") for kind in cfg.layer_types)
    if cfg.layer_types and not unknown and has_window != (cfg.sliding_window > 0):
        rule = "must be above 0 if" if has_window else "must be 0 unless"
        errors.append(field_error(cfg, "sliding_window", f"{rule} layer_types has a sliding one"))
    if cfg.rope_local_theta and not cfg.sliding_window:
        errors.append(field_error(cfg, "rope_local_theta", "must be 0 without a sliding_window"))
    if cfg.post_norm and cfg.sandwich_norm:
        errors.append(field_error(cfg, "sandwich_norm", "must be off with post_norm"))
    for name in ("d_model", "d_ff", "n_heads", "n_kv_heads"):
        size = getattr(cfg, name) * cfg.width_mult
        if abs(size - round(size)) > 1e-9 * size:
            errors.append(field_error(cfg, "width_mult", f"{name} would be {size:g}"))
    if not sizes:
        return errors
    tp, sp = sizes["tp"], sizes["sp"]
    len_per_device = max(cfg.seq_len // sp, 1)
    n_logit_tiles = max(cfg.logit_tiles, 1)
    errors += _multiple_errors("n_experts", max(cfg.n_experts, 1), "ep", sizes["ep"])
    errors += _multiple_errors("seq_len / sp", len_per_device, "logit_tiles", n_logit_tiles)
    errors += _multiple_errors("seq_len / sp", len_per_device, "mlp_tiles", cfg.mlp_tiles)
    errors += _multiple_errors("seq_len", cfg.seq_len, "sp", sp)
    errors += _multiple_errors("n_heads", round(cfg.n_heads * cfg.width_mult), "tp x sp", tp * sp)
    return errors


def derive_text(cfg):
    """The config with each size that is 0 for its default, and width_mult, resolved.

    Call it after `validate`. Derived again, a config does not change.
    """
    d_model = round(cfg.d_model * cfg.width_mult)
    d_ff = round(cfg.d_ff * cfg.width_mult)
    if d_ff == 0:
        d_ff = -(-8 * d_model // 3 // 32) * 32  # rounded up
    freeze = cfg.freeze
    all_but_lora = ("*", "!*.lora_?")
    if cfg.lora_rank and freeze[:2] != all_but_lora:
        freeze = all_but_lora + freeze
    return dataclasses.replace(
        cfg, d_model=d_model, d_ff=d_ff, freeze=freeze, width_mult=1.0,
        head_dim=cfg.head_dim or cfg.d_model // cfg.n_heads,
        n_heads=round(cfg.n_heads * cfg.width_mult),
        n_kv_heads=round((cfg.n_kv_heads or cfg.n_heads) * cfg.width_mult))


# ---- differences between configs

# A run may resume with any of these changed: some fields, and the groups mesh, intervals and
# sampling of Config but for reload_every, which changes the parameters. Every other field must be
# named in allow_change.
FIELDS = tuple(field.name for field in dataclasses.fields(Config))
RESUMABLE_FIELDS = {
    *LAUNCH_FIELDS, "out_dir", "ckpt_dir", "export", "export_dtype", "cache_dir", "token_cache",
    "steps", "epochs", "grad_accum_steps", "width_mult", "attention", "remat", "logit_tiles",
    "mlp_tiles", "deterministic", "offload_optimizer",
    *FIELDS[FIELDS.index("dp"):],
} - {"reload_every"}

# Another value gives parameters of other shapes.
SHAPE_FIELDS = ("d_model", "n_layers", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "n_experts")


def differences(old, new):
    """Texts "NAME was X, is Y" of the values of two dicts that differ. A name that is missing in
    `old` is skipped. A list, as JSON has it, equals a tuple.
    """
    def plain(value):
        return list(value) if isinstance(value, tuple) else value

    return [f"{name} was {old[name]!r}, is {value!r}" for name, value in new.items()
            if name in old and plain(old[name]) != plain(value)]


def refused_changes(old, new, may_change):
    """Errors: the differences of two dicts in values that may not change."""
    errors = []
    for text in differences(old, new):
        name = text.split()[0]
        if name in SHAPE_FIELDS:  # not even on purpose
            errors.append(text)
        elif name not in may_change:
            errors.append(f"{text} (on purpose: --allow_change {name})")
    return errors


def check_resumable(old, new, old_mesh=(), mesh=()):
    """Raise ValueError with each difference that keeps a run from resuming.

    old: the run's config as a dict; a field that it lacks had its default. new: a config.
    old_mesh, mesh: {axis: size} of the run and of this process.
    """
    before = _merge(json.loads(to_json(type(new)())), old, dict(mesh), dict(old_mesh))
    after = json.loads(to_json(new)) | dict(mesh)
    may_change = {*RESUMABLE_FIELDS, *new.allow_change}
    if new.n_experts and new.capacity_factor and "sp" not in new.allow_change:
        # Expert capacity is counted over each sp device's part of a sequence, so sp changes which
        # tokens are dropped.
        may_change.remove("sp")
    raise_if_errors(refused_changes(before, after, may_change),
                    f"{new.ckpt_dir or new.out_dir} holds a run with another config (resume it by "
                    "--out_dir alone, or choose another --out_dir with --init_from "
                    f"'{new.out_dir} strict=no')")


def architecture_mismatch(saved, current):
    """Errors: the fields in which a saved config describes another model, even where the parameters
    have equal shapes. Those are the fields from n_heads to experts_per_token.

    saved, current: dicts of fields. Fields in allow_change may differ.
    """
    fields = list(current)
    names = fields[fields.index("n_heads"):fields.index("experts_per_token") + 1]
    if saved.get("lora_rank"):
        names.append("lora_alpha")
    return refused_changes(
        saved, {name: current[name] for name in names}, current["allow_change"])


# ---- optional
# Rooms: names in other trainers, evaluation batches of another size, presets.

# ---- names in other trainers

# What to write here <- its names in nanoGPT, Hugging Face and others. A name may be a glob pattern.
# A row ends at | or at the end of its line; an indented line continues it.
OTHER_TRAINERS = """
--out_dir <- run_name output_dir save_directory default_root_dir base_output_directory
--ckpt_dir, also s3:// or gs:// <- bucket_path ckpt_path save_dir checkpoint_dir load_directory save
  load
--resume auto, must or overwrite <- resume_* auto_resume* overwrite_output_dir
--seed <- data_seed seed_everything
--mode eval; a run that trains has --eval_every <- eval_only do_eval do_train
--config, a preset or a JSON file <- arguments args config_file config_path config_variables
  config_kwargs path
--init_from for weights, --config for sizes <- model *model_name* name_or_path base_model
  model_bank model_type model.name flavor
no flag: train.main in Python takes it <- state model_state model_parameters
no flag: a task defines it, see tests/GUIDE.md <- name type model_class model_task model_factory
  data_factory state_class trainer_module data_collator train_step_fn eval_step_fn
--hooks, see tests/GUIDE.md <- callbacks training_hooks metric_calculator compute_metrics
--hooks tests/recipes/prune.py:prune <- pruning_module
--hooks tests/recipes/hooks.py:early_stopping <- early_stopping*
--data FILE, 'hf://datasets/ORG/NAME/*.parquet', or rows for train.main <- data_dir data_path
  train_file dataset dataset_name dataset_path datasets *train_data* dataset_train dataloader_train
--val_data, or rows for train.main <- validation_file *eval_data* dataset_eval dataloader_eval
--val_frac <- val_set_size val_split | --columns text=NAME <- dataset_text_field | --prompt <- start
--tokenizer <- tokenizer_* processor processing_class | --overfit_batch <- overfit_*batch*
--packing best_fit <- sample_packing packed_sample_seqlens | --truncation <- truncation_mode
no flag: a batch is a function of the step <- use_grain dataset_type
no flag: padding needs no token <- pad_token* padding
no flag: all sequences have --seq_len tokens <- seq_length_is_variable group_by_length
no flag: answers are the labels <- assistant_only_loss train_on_inputs
--steps, in all, and the horizon of the schedule <- max_steps train_steps max_training_steps
  num_train_steps max_train_steps max_iters train_iters lr_decay_iters
--epochs <- num_train_epochs num_epochs max_epochs train_epoch
--stop, as 500, +100 (of this launch) or 2h30m <- exit_* max_time training_time_limit
--eval_batch_size, of all devices together <- *eval*_batch_size
--batch_size, of all devices and microbatches together <- *_batch_size* batch
--grad_accum_steps, parts of one batch: --batch_size counts all <- gradient_accumulation*
  accumulate_grad_batches
--seq_len <- block_size max_length model_max_length max_seq* seq_length sequence_len* context_length
  max_target_length *max_position_embeddings
--d_model <- n_embd hidden_size hidden_dim dim | --n_layers <- num_layers num_hidden_layers
--n_heads <- num_heads num_attention_heads | --n_kv_heads <- num_k*_heads num_query_groups
--d_ff, of each expert too <- ffn_dim intermediate_size moe_intermediate_size ffn_hidden_size
--n_experts <- num_experts num_local_experts | --qkv_bias, the only biases <- bias attention_bias
--lora_rank N <- use_peft lora_r r adapter | no flag: weights are not quantized <- load_in_*
--lora_targets, as layers.wq <- target_modules lora_target_*
no flag: LoRA has no dropout <- lora_dropout
--dropout, not of attention weights <- attention_dropout hidden_dropout
--width_mult; widths and heads scale together <- scaling_index config_scaling_variables
--dtype bfloat16 or float16 <- bf16 fp16 mixed_precision* torch_dtype
--dtype; for products of float32 JAX_DEFAULT_MATMUL_PRECISION <- precision
no flag: attention has --dtype, its softmax float32 <- attn_dtype attn_softmax_dtype
--attention <- *attn_implementation attn_mechanism *flash_att*
--remat full <- gradient_checkpointing* activation_checkpoint.mode recompute_* remat_policy
--remat offload <- activation_checkpoint_cpu_offload
--offload_optimizer or --remat offload <- offload_backend optimizer_cpu_offload enable_cpu_offload
--mlp_tiles N, without experts <- tiled_mlp_compute
--optimizer <- optim optimizer_* optimizer.name optimizer.type dense_optimizer* | --eps <- adam_eps*
--optimizers PATTERN=NAME; tests/recipes/clicks.py has sparse updates <- sparse_optimizer
--schedule, of all parameters <- decay_lr lr_schedule *lr_scheduler* scheduler* lr_decay_style
--warmup_steps, below 1 a fraction of all steps <- *warmup* | --lr <- learning_rate peak_lr max_lr
--min_lr_frac, a fraction of lr, as 0.1 <- min_lr min_lr_* | --b1 <- adam_beta1 beta1 momentum
--clip_norm <- grad_clip clip_grad max_grad_norm max_norm gradient_clip* | --b2 <- adam_beta2 beta2
--label_smoothing, --z_loss and --loss_norm <- loss_config
--label_smoothing <- label_smoothing_factor | --token_cache <- dataset_prepared_path
--save_every, as 0.25epoch <- saves_per_epoch | --eval_every, as 0.25epoch <- evals_per_epoch
--eos_token <- special_tokens | --temperature <- temp | --weight_decay <- wd | --n_experts <- moe
--experts_per_token <- num_experts_per_tok | --norm_eps <- rms_norm_eps layer_norm_eps
--tie_embeddings <- tie_word_embeddings | --vocab_size <- vocab | --b1 and --b2 <- betas
--hooks tests/recipes/hooks.py:ema <- ema
--n_processes <- nnodes | no flag: nothing is uploaded <- push_to_hub hub_*
no flag: it is that of --tokenizer <- chat_template
no flag: batches are prefetched <- *num_workers
--dp, --fsdp, --ep, --tp and --sp <- sharding_axis_* strategy
--slices N, along --dp or --fsdp <- sharding_dcn_axis_dims dcn_* | --ep <- *expert*_parallel*
--fsdp for ZeRO-3, --dp for ZeRO-2 <- deepspeed *data_parallel* | --tp <- *tensor*_parallel*
--sp <- *sequence_parallel* *context_parallel* | no flag: no pipeline parallelism <- pipeline_*
no flag: see param_table in model.py <- partition_axis step_partition_spec initializer_range
no flag: all visible devices are used <- devices gpus num_gpus backend
the variable JAX_PLATFORMS <- device accelerator | --peer_timeout_s <- *timeout*
--coordinator, --n_processes and --process_id <- world_size global_rank local_rank num_nodes
--track wandb or tensorboard <- tensorboard report_to wandb_log wandb use_wandb wandb.enable logger
the variables WANDB_PROJECT, WANDB_NAME and so on <- wandb_* wandb.name project entity
--log_every <- logging_steps log_steps log_interval log_freq log_every_n_* train_log_iter_interval
--log_all_processes <- log_all_workers | no flag: logs have no levels <- log_level
no flag: it is in --out_dir <- train_log_metrics_path logging_dir mem_profiler_dir
no flag: the file stop in --out_dir ends a run <- kill_switch_path
no flag: every evaluation is logged <- eval_log_iter_interval | --watch <- weight_distribution_*
--eval_every, as 250 or 1epoch; --eval_batches for the length <- eval_steps
--eval_every, as 250 or 1epoch <- eval*_strategy eval_interval evaluation_steps validation.freq
  val_check_interval check_val_every_n_epoch
--eval_batches <- eval_iters max_evaluation_steps limit_val_batches validation.steps
--save_every, as 250, 1epoch, 1window or 10m <- save_steps save_strategy save_interval save_epochs
  save_every_n_* always_save_checkpoint checkpoint.interval
--save_every, --max_to_keep and --save_exclude <- saver saver_option ckpt_save_arg
--save_every, --weights_every and --export_every <- checkpoint_engine*
--max_to_keep <- save_total_limit keep_latest_k | --save_exclude <- params_not_save save_filter_fn
--keep_best <- load_best_model_at_end metric_for_best_model save_top_k
no flag: TensorStore writes in parallel <- save_concurrency_per_rank
--reload_every, with dynamic=yes in --init_from <- load_update_* ckpt_load_arg
tests/recipes/windows.py --windows_per_epoch <- window_iter | --sample_tokens <- max_new_tokens
tests/recipes/rl.py --reward <- reward_funcs | tests/recipes/rl.py --inner_steps <- num_iterations
tests/recipes/rl.py --group_size <- num_generations num_return_sequences
tests/recipes/rl.py --answer_tokens <- max_completion_length
--profile FIRST:LAST <- mem_profiler* profiler* *profiling | --n_samples <- num_samples
no flag: it is always on <- compile compile.enable torch_compile shuffle lazy data_to_cuda
  auto_shard_model find_unused_parameters
"""


def _hint_for_name(name, known):
    """How to write a name of another trainer, or a known one with dots as in training.steps; "" for
    other names.
    """
    hints = {}
    for row in re.split(r" \| |\n(?! )", OTHER_TRAINERS.strip()):
        text, _, names = row.partition(" <- ")
        hint = text if text.startswith("no flag") else f"use {text}"
        hints |= dict.fromkeys(names.split(), hint)
    last = name.rpartition(".")[2]
    patterns = [pattern for pattern in hints if fnmatchcase(last, pattern)]
    for each in (name, last, *patterns):
        if each in hints:
            return hints[each]
        if each in known:
            return f"use --{each}"
    return hints.get(nearest(last, [*known, *hints]), "")


# ---- evaluation batches of another size

def evaluation_config(cfg):
    """The config of an evaluation: with the batch size of cfg.eval_batch_size, if it is set."""
    size = cfg.eval_batch_size
    if not size:
        return cfg
    return dataclasses.replace(
        cfg, batch_size=size, grad_accum_steps=1,
        loss_divisor=cfg.loss_divisor * size / cfg.batch_size)  # that of a sequence is unchanged


# ---- presets

# A long run, and the models of which others are variants.
_LONG_RUN = {
    "optimizer": "adamw", "b2": 0.95,
    "schedule": "cosine", "warmup_steps": 2000.0, "min_lr_frac": 0.1,
    "remat": "full", "steps": 100000,
}
_LLAMA_8B = _LONG_RUN | {
    "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14336,
    "vocab_size": 128256, "seq_len": 8192, "batch_size": 512, "lr": 3e-4,
    "rope_theta": 500000.0, "norm_eps": 1e-5, "qk_norm": False, "tie_embeddings": False,
}
_QWEN3_600M = _LONG_RUN | {
    "d_model": 1024, "n_layers": 28, "n_heads": 16, "n_kv_heads": 8, "d_ff": 3072,
    "vocab_size": 151936, "seq_len": 4096, "batch_size": 256, "lr": 6e-4,
    "head_dim": 128, "rope_theta": 1000000.0,
}
PRESETS = {
    "debug": {"d_ff": 512, "batch_size": 8, "steps": 100},
    "gpt2-124m": _LONG_RUN | {
        "d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 2048,
        "vocab_size": 50304, "seq_len": 1024,
        "batch_size": 512, "grad_accum_steps": 8, "lr": 6e-4,
        "remat": "none", "steps": 10000, "warmup_steps": 500.0,
    },
    "llama-8b": _LLAMA_8B,
    "llama-70b": _LLAMA_8B | {
        "d_model": 8192, "n_layers": 80, "n_heads": 64, "d_ff": 28672,
        "batch_size": 1024, "lr": 1.5e-4,
    },
    "llama-405b": _LLAMA_8B | {
        "d_model": 16384, "n_layers": 126, "n_heads": 128, "d_ff": 53248,
        "batch_size": 2048, "lr": 8e-5, "warmup_steps": 8000.0, "min_lr_frac": 0.01,
    },
    "mixtral-8x7b": _LLAMA_8B | {
        "n_experts": 8, "experts_per_token": 2, "batch_size": 1024,
        "vocab_size": 32000, "seq_len": 4096, "rope_theta": 1000000.0,
    },
    "qwen3-0.6b": _QWEN3_600M,
    "qwen3-30b-a3b": _QWEN3_600M | {
        "d_model": 2048, "n_layers": 48, "n_heads": 32, "n_kv_heads": 4, "d_ff": 768,
        "n_experts": 128, "experts_per_token": 8,
        "tie_embeddings": False, "batch_size": 1024, "lr": 3e-4,
    },
}
