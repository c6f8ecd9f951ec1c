# SPDX-License-Identifier: Apache-2.0
"""All settings of a run: one dataclass, its text forms (command line, JSON, presets), and the rules
between its fields, whose errors come in one message.

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

Texts = tuple[str, ...]
# Numbers, each with its bound: (test, rule).
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


# The comment beside or above a field is its --help. A size of 0 is filled in by derive_text,
# vocab_size by the tokenizer, "auto" of the dtype and the kernels by train.resolve.
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    # ---- run

    # eval, sample, export: of a checkpoint; plan: print memory and FLOPs; data: only tokenize
    mode: Literal["train", "eval", "sample", "plan", "data", "export"] = "train"
    config: str = ""  # preset, or JSON file with flags; typed flags win
    out_dir: str = ""  # folder of the run; empty: named after its flags, as out/lr=0.0003
    ckpt_dir: str = ""  # folder of checkpoints, also s3://... or gs://...; empty: out_dir/ckpt
    # auto: resume a run in out_dir; must: fail without one; never: fail with one; overwrite:
    # delete it first
    resume: Literal["auto", "must", "never", "overwrite"] = "auto"
    allow_change: Texts = ()  # fields that may differ from the checkpoint's
    # fields that --init_from may not replace: those of flags, of --config and of a run's config
    explicit: Texts = dataclasses.field(default=(), compare=False)
    # initial parameters: runs as DIR, DIR@best or DIR@400, Hugging Face weights, also as
    # hf://ORG/NAME@REVISION, adapters of PEFT; the last with a parameter wins. Options, as in 'DIR
    # load=w*': load, exclude (patterns), rename=SAVED:LOCAL (prefixes), strict=no (only what fits),
    # dynamic=yes (see reload_every)
    init_from: Texts = ()
    branch_from: str = ""  # DIR@STEP: continue from this state of another run
    checkpoint: str = "latest"  # to read: latest, best (see keep_best), or a step
    export: str = ""  # folder for Hugging Face weights; empty: none
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of exported weights
    hooks: Texts = ()  # functions called on events, as my_hooks.py:in_bits
    cache_dir: str = "~/.cache/sixfile"  # of compiled programs and tokens; empty: no programs

    # ---- data

    # files, globs, folders of datasets, s3://..., gs://..., hf://datasets/ORG/NAME; mixtures as
    # FILE=WEIGHT; empty: Python's standard library
    data: Texts = ()
    # likewise; sets as NAME=FILE; empty: the last val_frac of data
    val_data: Texts = ()
    val_frac: FractionBelow1 = 0.1  # of data, without val_data
    columns: Texts = ()  # columns by other names, as text=content
    # of .bin token files without a header
    data_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    eod_id: TokenId = -1  # ends documents in token files; -1: unknown
    # bytes, a tokenizer.json or its folder, hf://ORG/NAME, or tiktoken:NAME
    tokenizer: str = "bytes"
    eos_token: str = ""  # ends a document; empty: the tokenizer's eos_token
    token_cache: str = ""  # folder of tokens; empty: data in cache_dir
    # stream: join documents and cut; best_fit: pack whole documents; none: pad each
    packing: Literal["stream", "best_fit", "none"] = "stream"
    document_mask: bool = False  # attend within documents, as best_fit and none always do
    # of a document longer than a sequence
    truncation: Literal["keep_start", "keep_end"] = "keep_start"
    padding_side: Literal["right", "left"] = "right"  # of sequences
    overfit_batch: bool = False  # train on batch 0 alone

    # ---- length and batch

    steps: PosInt = 1000  # optimizer steps, the schedule's horizon
    epochs: NonNegFloat = 0.0  # passes over the training data; 0: use steps
    # ends the run early: at step 500, after +100 steps or 2h30m of this launch, when val_loss<3;
    # loss>9 exits with code 1
    stop: Texts = ()
    batch_size: PosInt = 16  # sequences per step, over all devices
    grad_accum_steps: PosInt = 1  # microbatches into which a batch is split
    seq_len: PosInt = 128  # tokens per sequence

    # ---- model

    d_model: PosInt = 128  # width of the residual stream
    n_layers: PosInt = 3  # layers, each of attention and MLP
    d_ff: NonNegInt = 0  # width of the MLP; 0: 8/3 d_model, rounded up to 32
    vocab_size: NonNegInt = 0  # token ids; 0: the tokenizer's

    # Another value of a field from here to experts_per_token is another model, even if all shapes
    # stay equal.

    n_heads: PosInt = 2  # query heads
    n_kv_heads: NonNegInt = 0  # key and value heads; 0: n_heads
    head_dim: NonNegInt = 0  # width of a head; 0: d_model / n_heads
    rope_theta: PosFloat = 10000.0  # base of the rotary frequencies
    rope_factor: PosFloat = 1.0  # of rotary wavelengths; 1: none
    # rope_factor scales long wavelengths, by Llama 3.1 or YaRN, or all
    rope_scaling: Literal["llama3", "yarn", "linear"] = "llama3"
    rope_original_len: PosInt = 8192  # sequence length before rope_factor
    rope_attn_factor: NonNegFloat = 0.0  # yarn's, of q and k; 0: 0.1 ln(rope_factor) + 1
    # q grows by 1 + beta ln(1 + floor(position / rope_original_len))
    rope_query_beta: NonNegFloat = 0.0
    # of layers with a window, unscaled; 0: rope_theta
    rope_local_theta: NonNegFloat = 0.0
    norm_eps: PosFloat = 1e-6  # added to the mean square in RMSNorm
    qk_norm: bool = True  # RMSNorm on q and k, by head
    qkv_bias: bool = False  # biases of q, k and v
    post_norm: bool = False  # RMSNorm after attention and MLP, and qk_norm over all heads (OLMo 2)
    sandwich_norm: bool = False  # RMSNorm before and after attention and MLP
    geglu: bool = False  # GELU in the MLP, not SiLU
    tie_embeddings: bool = True  # one matrix for embedding and logits
    scale_embed: bool = False  # multiply embeddings by sqrt(d_model)
    attn_softcap: NonNegFloat = 0.0  # of attention scores: cap * tanh(x / cap); 0: none
    logit_softcap: NonNegFloat = 0.0  # of logits, likewise
    sliding_window: NonNegInt = 0  # tokens that a query sees; 0: all before it
    # pattern over the depth: full, sliding, and without rotary positions full_nope, sliding_nope;
    # empty: all alike
    layer_types: Texts = ()
    n_experts: NonNegInt = 0  # experts per layer; 0: a dense MLP
    experts_per_token: PosInt = 2  # that the router selects (top-k)
    # capacity of an expert, in even shares of tokens; 0: unlimited
    capacity_factor: NonNegFloat = 2.0
    lora_rank: NonNegInt = 0  # rank of the factors; 0: no LoRA
    lora_alpha: PosFloat = 16.0  # factors are scaled by lora_alpha / lora_rank
    lora_targets: Texts = ("layers.w*",)  # patterns of weights
    # probability, for embedding and outputs of attention and MLP
    dropout: FractionBelow1 = 0.0
    width_mult: PosFloat = 1.0  # multiplies d_model, d_ff, n_heads, n_kv_heads

    # ---- numerics

    # auto: the fastest; mixed: float32, matmuls in bfloat16; float16: with loss scaling
    dtype: Literal["auto", "float32", "mixed", "bfloat16", "float16"] = "auto"
    # of stored parameters; bfloat16: rounded stochastically
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # auto: the fastest; xla: any device; cudnn: NVIDIA GPUs; pallas: TPUs
    attention: Literal["auto", "xla", "cudnn", "pallas"] = "auto"
    # activations to recompute. full: all; dots: all but weight matmuls; named: all but q, k, v and
    # attention output; offload: all, with layer inputs in host memory
    remat: Literal["none", "full", "dots", "named", "offload"] = "none"
    logit_tiles: NonNegInt = 0  # sequence tiles of the loss, to save memory; 0: automatic
    mlp_tiles: PosInt = 1  # sequence tiles of the MLP, to save memory
    deterministic: bool = False  # bit-reproducible on GPUs too; may be slower

    # ---- optimizer

    # adamw, adafactor, lion, muon (adamw for all but layer matrices), rmsprop, sgd
    optimizer: str = "muon"
    lr: LearningRate = -1.0  # peak learning rate; -1: the optimizer's default
    # constant, linear, cosine, polynomial, inverse_sqrt, or wsd (constant, then linear)
    schedule: str = "linear"
    warmup_steps: WarmUp = 0.05  # below 1: a fraction of steps
    min_lr_frac: Fraction = 0.0  # fraction of lr to decay to
    decay_frac: PosFraction = 0.2  # fraction of steps, for wsd
    poly_power: NonNegFloat = 2.0  # exponent of the polynomial schedule
    weight_decay: NonNegFloat = 0.1  # decoupled, times lr; matrices only
    b1: FractionBelow1 = 0.9  # decay of the first moment; momentum of Lion, Muon, SGD
    b2: FractionBelow1 = 0.98  # decay of the second moment, or of Lion's momentum
    eps: PosFloat = 1e-8  # in the denominator of Adam and RMSprop
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # of first moments
    offload_optimizer: bool = False  # moments stay in host memory
    freeze: Texts = ()  # patterns of parameters not trained; a later !pattern trains
    lr_mult: Texts = ()  # multipliers, as 'embed=0.3' 'layers.w*=2'; the last match wins
    decay_mult: Texts = ()  # of weight_decay, likewise
    optimizers: Texts = ()  # as 'embed=sgd', likewise
    clip_norm: NonNegFloat = 1.0  # maximum norm of all gradients; 0: none
    label_smoothing: FractionBelow1 = 0.0  # probability moved to all other tokens
    z_loss: NonNegFloat = 0.0  # weight of the squared log-partition
    router_balance: NonNegFloat = 0.01  # weight of load balancing
    router_z: NonNegFloat = 0.001  # weight of its z-loss
    # denominator of the loss. tokens: labels; positions: all; sequences: mean of their means;
    # constant: loss_divisor
    loss_norm: Literal["tokens", "positions", "sequences", "constant"] = "tokens"
    loss_divisor: NonNegFloat = 0.0  # of a batch, with loss_norm constant
    # after a loss or gradient that is not finite, which changes no parameter. skip: continue; stop:
    # end with exit code 1; raise: an error
    on_nonfinite: Literal["skip", "stop", "raise"] = "stop"

    # ---- random numbers

    seed: Seed = 0  # of initialization, data order, sampling

    # ---- mesh

    # A resume may change all from here on but reload_every (RESUMABLE_FIELDS, check_resumable).

    dp: Axis = 1  # devices that split batch, gradients and moments (ZeRO-2); -1: all remaining
    fsdp: Axis = -1  # devices that also split parameters (ZeRO-3)
    ep: Axis = 1  # devices that split experts, batch and weights
    tp: Axis = 1  # devices that split heads, MLP and vocabulary
    sp: Axis = 1  # devices that split sequences (Ulysses) and weights
    slices: PosInt = 1  # groups on a slow network, along dp, or fsdp if dp is 1
    # host:port of process 0; auto: of Slurm, Open MPI, Kubernetes; empty: one process
    coordinator: str = ""
    n_processes: PosInt = 1  # of the run, with coordinator host:port
    process_id: NonNegInt = 0  # of this process, likewise
    peer_timeout_s: NonNegFloat = 1800.0  # seconds without progress until exit; 0: never
    log_all_processes: bool = False  # rows and profiles of every process

    # ---- intervals

    track: Texts = ()  # metric trackers: wandb, tensorboard
    log_every: NonNegInt = 10  # steps between rows of metrics.jsonl; 0: none
    # 250 (steps), 1epoch, 10m, 1window, or several as 250,1h; 0: only at the end
    eval_every: Interval = 250
    eval_batches: NonNegInt = 40  # batches of each validation set; 0: all
    eval_batch_size: NonNegInt = 0  # sequences per evaluation batch; 0: as in training
    examples_file: str = ""  # .jsonl of values per example, in mode eval; empty: none
    price: NonNegFloat = 0.0  # of a device for an hour, in mode plan
    # between checkpoints; one by time, as 10m, is kept until the next
    save_every: Interval = 250
    save_end: bool = True  # save after the last step, and when stop ends the run
    keep_best: str = ""  # by a metric, as val_loss or 'val_acc>', in ckpt/best; empty: none
    max_to_keep: NonNegInt = 2  # newest ones to keep; 0: all
    keep_period: NonNegInt = 0  # keep those at multiples of this step; 0: none
    save_exclude: Texts = ()  # patterns of parameters to exclude
    weights_every: Interval = 0  # between checkpoints of parameters alone; 0: never
    export_every: Interval = 0  # between exports; 0: only at the end
    reload_every: Interval = 0  # between reloads of init_from with dynamic=yes; 0: never
    sample_every: Interval = 500  # between printed samples; 0: only at the end
    watch: Texts = ()  # patterns of parameters with logged histograms
    profile: str = ""  # steps first:last to trace, as 20:22; empty: none

    # ---- sampling

    prompt: str = ""  # text to continue; empty: none, or a beginning in the data
    chat: str = ""  # question in the tokenizer's chat template; empty: none
    prompts: str = ""  # file, one a line, or .jsonl with prompt or messages
    samples_file: str = ""  # .jsonl to write, in mode sample; empty: none
    n_samples: PosInt = 1  # of each prompt
    sample_tokens: NonNegInt = 200  # new tokens per sample; 0: no samples
    temperature: NonNegFloat = 0.8  # 0: greedy
    top_k: NonNegInt = 0  # sample among the k likeliest tokens; 0: all
    top_p: PosFraction = 1.0  # sample among the likeliest tokens of this total probability


# ---- command line

def parse(argv, kind=Config):
    """The config of a command line; `kind` is Config, or a dataclass that extends it by flags.

    A field has the value of the first source that sets it: a flag, the file or preset --config, the
    run in out_dir, the run of --branch_from, the defaults of `kind`. Raises ValueError for unknown
    flags and malformed numbers.
    """
    # Each source is a dict {field: value}, which may be empty. The right one of | wins.
    typed = _typed_values(argv, kind)  # --help exits
    from_file = _load_values(typed.get("config", ""), kind)
    from_branch = _branch_values(kind(**from_file | typed))
    # A first config tells the folder, which may hold a run with a config of its own.
    first = kind(**from_branch | from_file | typed)
    out_dir = _choose_out_dir(first, typed)
    from_run = {}
    if first.mode not in ("plan", "data") and first.resume in ("auto", "must"):
        from_run = _run_config(out_dir, kind)
    # --config may be that of another run: its folders stay its own.
    if not _is_same_path(from_file.get("out_dir", out_dir), out_dir):
        from_file.update(ckpt_dir="", export="")

    values = (from_run or from_branch) | from_file | typed
    values |= {"explicit": tuple(sorted(values)), "out_dir": out_dir}
    if from_run:  # _unused_errors refuses only what this launch adds to it
        values["config"] = from_run["config"]
    return kind(**values)


# ---- supporting
# Sections: flags, help, names of runs, paths, config files, numbers, intervals, fields with a
# syntax of their own, validation, types and bounds, mesh sizes, rules between fields, errors, the
# transformer, differences between configs.

# ---- flags

def _typed_values(argv, kind):
    """{field: value} of the flags on a command line, also of those that give a default. --help
    prints and exits.
    """
    import tyro

    if "--help" in argv or "-h" in argv:
        _print_help(argv, kind)
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
    return _expand_home(typed)


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
EVALUATION_FIELDS = set(
    "val_data val_frac columns data_dtype eod_id packing document_mask truncation padding_side "
    "dtype hooks".split())


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
        defining -= EVALUATION_FIELDS  # else a run was trained with the flags of an evaluation
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
    return default | _branch_values(cfg) | _load_values(cfg.config, type(cfg))


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
    return _run_config(folder, type(cfg)) | {"out_dir": "", "ckpt_dir": "", "export": ""}


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
COLUMNS = (
    "text prompt completion messages conversations instruction input output system tools chosen "
    "rejected input_ids labels attention_mask".split())


def _begin_rules(cfg):
    """(a list, rule(field, holds, text), which appends an error to it unless `holds`)."""
    errors = []

    def rule(field, holds, text):
        if not holds:
            errors.append(field_error(cfg, field, text))

    return errors, rule


def _rule_errors(cfg):
    """Errors of fields whose values are malformed, or do not go together."""
    errors, rule = _begin_rules(cfg)

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
    check("branch_from", parse_branch, cfg.branch_from or "DIR@0")
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
    rule("sample_tokens", cfg.mode != "sample" or cfg.sample_tokens, "must be above 0 to sample")
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


# Fields without effect unless another field is set, or has one of the values after its name.
NEEDS = {
    "checkpoint": ("mode", "eval", "sample", "export"),
    "samples_file": ("mode", "sample"),
    "examples_file": ("mode", "eval"),
    "price": ("mode", "plan"),
    "experts_per_token": ("n_experts",),
    "capacity_factor": ("n_experts",),
    "router_balance": ("n_experts",),
    "router_z": ("n_experts",),
    "log_all_processes": ("coordinator",),
    "lora_alpha": ("lora_rank",),
    "lora_targets": ("lora_rank",),
    "export_every": ("export",),
    "export_dtype": ("export",),
    "truncation": ("packing", "best_fit", "none"),
    "padding_side": ("packing", "best_fit", "none"),
    "document_mask": ("packing", "stream"),
    "eod_id": ("document_mask",),
    "watch": ("log_every",),
    "top_k": ("temperature",),
    "top_p": ("temperature",),
    "rope_attn_factor": ("rope_scaling", "yarn"),
    "loss_divisor": ("loss_norm", "constant"),
    "decay_frac": ("schedule", "wsd"),
    "poly_power": ("schedule", "polynomial"),
}


def _unused_errors(cfg):
    """Errors of fields that are set, by a flag rather than by cfg.config, and have no effect."""
    default = _default_values(cfg)
    errors = []

    def unused(field, when, *names):
        for name in names:
            if when and getattr(cfg, name) != default[name]:
                text = f"has no effect with {field} {getattr(cfg, field)!r}"
                errors.append(field_error(cfg, name, text))

    for name, (field, *values) in NEEDS.items():
        value = getattr(cfg, field)
        unused(field, value not in values if values else not value, name)
    unused("coordinator", cfg.coordinator in ("", "auto"), "n_processes", "process_id")
    unused("epochs", cfg.epochs, "steps")
    unused("init_from", "dynamic=yes" not in str(cfg.init_from), "reload_every")
    unused("rope_factor", cfg.rope_factor == 1, "rope_scaling")
    if not cfg.rope_query_beta:
        unused("rope_factor", cfg.rope_factor == 1, "rope_original_len")
        unused("rope_scaling", cfg.rope_scaling == "linear", "rope_original_len")
    unused("schedule", cfg.schedule == "constant", "min_lr_frac")
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
    errors, rule = _begin_rules(cfg)
    if not cfg.head_dim:
        errors += _multiple_errors("d_model", cfg.d_model, "2 x n_heads", 2 * cfg.n_heads)
    if cfg.n_kv_heads:
        errors += _multiple_errors("n_heads", cfg.n_heads, "n_kv_heads", cfg.n_kv_heads)
    rule("head_dim", cfg.head_dim % 2 == 0, "must be even, for rotary positions")
    unknown = {*cfg.layer_types} - {*LAYER_TYPES}
    rule("layer_types", not unknown, f"each must be one of {', '.join(LAYER_TYPES)}")
    rule("layer_types", len(cfg.layer_types) <= cfg.n_layers,
         f"must be at most n_layers {cfg.n_layers}")
    has_window = "sliding" in str(cfg.layer_types)
    rule("sliding_window",
         unknown or not cfg.layer_types or has_window == (cfg.sliding_window > 0),
         f"must be {'above 0 if' if has_window else '0 unless'} layer_types has a sliding one")
    rule("rope_local_theta", not cfg.rope_local_theta or cfg.sliding_window,
         "must be 0 without a sliding_window")
    rule("sandwich_norm", not (cfg.post_norm and cfg.sandwich_norm), "must be off with post_norm")
    for name in ("d_model", "d_ff", "n_heads", "n_kv_heads"):
        size = getattr(cfg, name) * cfg.width_mult
        rule("width_mult", abs(size - round(size)) <= 1e-9 * size, f"{name} would be {size:g}")
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
    """A valid cfg with sizes of 0 and width_mult resolved, and with LoRA all but its factors in
    `freeze`. Resolved again, a config does not change.
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
    *LAUNCH_FIELDS,
    *"out_dir ckpt_dir export export_dtype cache_dir token_cache steps epochs".split(),
    *"grad_accum_steps width_mult attention remat logit_tiles mlp_tiles deterministic".split(),
    "offload_optimizer",
    *FIELDS[FIELDS.index("dp"):],
} - {"reload_every"}

# Another value gives parameters of other shapes.
SHAPE_FIELDS = ("d_model", "n_layers", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "n_experts")


def differences(old, new):
    """Texts "NAME was X, is Y" of the values of two dicts that differ, where both have them. A
    list, as JSON has it, equals a tuple.
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
    before = json.loads(to_json(type(new)())) | old | dict(mesh) | dict(old_mesh)
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
    names = [*FIELDS[FIELDS.index("n_heads"):FIELDS.index("capacity_factor")]]
    if saved.get("lora_rank"):
        names.append("lora_alpha")
    return refused_changes(
        saved, {name: current[name] for name in names}, current["allow_change"])


# ---- optional
# Sections: names in other trainers, evaluation batches of another size, presets.

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
