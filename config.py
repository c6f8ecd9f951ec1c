# SPDX-License-Identifier: Apache-2.0
"""Every knob on one screen, and what derives from it.

Owns the one class of the project, its text forms (command line, JSON, named presets) and the rules
between its fields. Refuses a config that cannot run, naming every fault at once.
Invariant: `from_json(to_json(cfg)) == cfg`, and a `Config` is hashable: a static jit argument.
"""
import contextlib
import dataclasses
import difflib
import json
import operator
import re
from decimal import Decimal
from functools import partial
from math import gcd, isfinite, prod
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

# A number's type carries its bound: (test, what a value must be, in words).
PosInt = Annotated[int, (lambda x: 1 <= x < 2**31, "at least 1, and below 2^31")]
NonNegInt = Annotated[int, (lambda x: x >= 0, "at least 0")]
NonNegFloat = Annotated[float, (lambda x: x >= 0, "at least 0")]
PosFloat = Annotated[float, (lambda x: x > 0, "above 0")]
FractionBelow1 = Annotated[float, (lambda x: 0 <= x < 1, "in [0, 1)")]
Fraction = Annotated[float, (lambda x: 0 <= x <= 1, "in [0, 1]")]
PosFraction = Annotated[float, (lambda x: 0 < x <= 1, "in (0, 1]")]
LearningRate = Annotated[float, (lambda x: x >= 0 or x == -1, "at least 0, or -1 for the default")]
TokenId = Annotated[int, (lambda x: x >= -1, "at least 0, or -1 for none")]
Interval = Annotated[int | str, (
    lambda x: parses(parse_intervals, x),
    "0, or updates, epochs, windows, a time, as in 250, 1epoch, 1window, 10m, 250,1h")]
Seed = Annotated[int, (lambda x: x < 2**63, "below 2^63")]
Axis = Annotated[int, (lambda x: x >= 1 or x == -1, "at least 1, or -1 for what is left")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    # ---- run
    mode: Literal["train", "eval", "sample", "plan", "data", "export"] = "train"  # data: prepare it
    config: str = ""  # JSON file or preset name whose values become the defaults of all other flags
    out_dir: str = "out"  # folder of this run: config, metrics, checkpoints, plot
    ckpt_dir: str = ""  # checkpoints: a folder, s3://bucket/path or gs://...; empty: in out_dir
    seed: Seed = 0  # random seed of initialization, data order and sampling
    resume: Literal["auto", "must", "never", "overwrite"] = "auto"  # go on in out_dir, or delete it
    allow_change: tuple[str, ...] = ()  # fields that may differ from the checkpoint's
    init_from: tuple[str, ...] = ()  # runs, Hugging Face folders, 'DIR load=w* strict=no', ...
    export: str = ""  # folder to fill with the newest parameters as Hugging Face weights
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of exported weights
    export_lora: Literal["merged", "apart"] = "merged"  # into the weights, or as a PEFT adapter
    hooks: tuple[str, ...] = ()  # functions to call on events, as my_hooks.py:in_bits
    cache_dir: str = "~/.cache/sixfile"  # folder that keeps compiled programs; empty: none
    # ---- data
    data: tuple[str, ...] = ()  # files, globs or folders of datasets; none: Python's sources
    mix: tuple[str, ...] = ()  # instead of data: files=weight, as in web.bin=0.7 code.bin=0.3
    val_data: tuple[str, ...] = ()  # files or globs held out; none: the last val_frac of data
    val_frac: FractionBelow1 = 0.1  # share of data held out when val_data is empty
    data_dtype: Literal["uint16", "uint32"] = "uint16"  # of .bin token files that have no header
    eod_id: TokenId = -1  # token between documents in token files, to pack them; -1: unknown
    tokenizer: str = "bytes"  # bytes, a tokenizer.json or its folder, or tiktoken:NAME
    token_cache: str = ""  # folder of tokenized text; empty: data in cache_dir
    # stream: documents end to end, cut; else whole ones, packed or one a row
    packing: Literal["stream", "best_fit", "none"] = "stream"
    document_mask: bool = False  # attention and positions stay within a document of the stream
    # what to do with a whole document longer than a sequence
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = "keep_start"
    padding_side: Literal["right", "left"] = "right"  # side of the padding of whole documents
    order: Literal["shuffled", "windows"] = "shuffled"  # windows: file after file, also new ones
    windows_per_epoch: NonNegInt = 0  # files per epoch with order windows; 0: all
    window_repeats: PosInt = 1  # times that each file is read before the next, with order windows
    wait_s: NonNegFloat = 0.0  # seconds to wait for a new file after the last, with order windows
    overfit_batch: bool = False  # train on batch 0 alone, to see that the model can learn it
    # ---- length and batch
    steps: PosInt = 600  # optimizer updates in all: the horizon of the schedule
    epochs: NonNegFloat = 0.0  # passes over the training data; above 0 it sets steps
    stop: tuple[str, ...] = ()  # end early: 500 (updates), +100 (of this start), 2h30m, val_loss<3
    batch_size: PosInt = 16  # sequences per update, all devices
    grad_accum_steps: PosInt = 1  # microbatches per update, for gradient accumulation
    seq_len: PosInt = 128  # tokens per sequence
    # ---- model
    d_model: PosInt = 128  # width of the residual stream
    n_layers: PosInt = 4  # blocks of attention and MLP
    n_heads: PosInt = 4  # query heads
    n_kv_heads: NonNegInt = 0  # key and value heads; 0: as many as query heads
    head_dim: NonNegInt = 0  # width of a head; 0: d_model / n_heads
    d_ff: NonNegInt = 0  # width of the MLP; 0: 8/3 d_model, rounded up to a multiple of 32
    vocab_size: NonNegInt = 0  # token ids; 0: as many as the tokenizer has
    rope_theta: PosFloat = 10000.0  # base of the rotary frequencies
    rope_factor: PosFloat = 1.0  # Llama-3 scaling of long wavelengths; 1: none
    rope_original_len: PosInt = 8192  # tokens per sequence before the scaling
    norm_eps: PosFloat = 1e-6  # added to the mean square in RMSNorm
    qk_norm: bool = True  # RMSNorm on each query and key head
    qkv_bias: bool = False  # bias on queries, keys and values
    tie_embeddings: bool = True  # one matrix for embedding and logits
    sliding_window: NonNegInt = 0  # tokens that a query attends to, with its own; 0: all before it
    n_experts: NonNegInt = 0  # experts per layer; 0: a dense MLP
    experts_per_token: PosInt = 2  # top-k of the router
    capacity_factor: NonNegFloat = 2.0  # expert capacity, in even shares; 0: drop nothing
    lora_rank: NonNegInt = 0  # rank of LoRA updates; 0: none
    lora_alpha: PosFloat = 16.0  # LoRA updates are scaled by alpha / rank
    lora_targets: tuple[str, ...] = ("layers.w*",)  # patterns of weights that get LoRA updates
    # factor on widths and head counts; head width, depth and vocabulary stay
    width_mult: PosFloat = 1.0
    # ---- numerics

    # of activations; mixed: float32 with bfloat16 matmul operands
    dtype: Literal["auto", "float32", "mixed", "bfloat16", "float16"] = "auto"
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters
    attention: Literal["auto", "xla", "cudnn", "pallas"] = "auto"  # kernel; auto: the device's own
    # activations to recompute in backward
    remat: Literal["none", "full", "dots", "named", "offload"] = "none"
    logit_tiles: NonNegInt = 0  # sequence tiles for logits and loss; 0: as many as keep them small
    mlp_tiles: PosInt = 1  # sequence tiles for the MLP
    deterministic: bool = False  # bitwise reproducible on NVIDIA GPUs too; may cost some speed
    # ---- optimizer
    optimizer: str = "muon"  # adamw, adafactor, lion, muon, rmsprop, sgd
    lr: LearningRate = -1.0  # peak learning rate; -1: the default of each optimizer
    schedule: str = "linear"  # constant, linear, cosine, polynomial, inverse_sqrt, wsd
    warmup_steps: NonNegFloat = 0.05  # updates of linear warm-up; below 1, a share of steps
    min_lr_frac: Fraction = 0.0  # share of lr that the schedule falls towards
    decay_frac: PosFraction = 0.2  # share of steps in which the wsd schedule decays
    poly_power: NonNegFloat = 2.0  # exponent of the polynomial schedule
    weight_decay: NonNegFloat = 0.1  # per update, times lr; matrices only
    b1: FractionBelow1 = 0.9  # decay of the first moment; momentum of Lion, Muon and SGD
    b2: FractionBelow1 = 0.98  # decay of the second moment of Adam and RMSprop; of Lion's momentum
    eps: PosFloat = 1e-8  # added to the denominator of Adam and RMSprop
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # of first moments; second: float32
    offload_optimizer: bool = False  # moments in the host's memory between updates
    freeze: tuple[str, ...] = ()  # patterns of parameters not to train; a later !pattern trains
    lr_mult: tuple[str, ...] = ()  # factors on lr for some parameters: 'embed=0.3' 'layers.w*=2'
    decay_mult: tuple[str, ...] = ()  # factors on weight_decay for some: 'embed=0'
    optimizers: tuple[str, ...] = ()  # another optimizer for some: 'embed=sgd'
    clip_norm: NonNegFloat = 1.0  # largest global gradient norm; 0: no clipping
    label_smoothing: FractionBelow1 = 0.0  # probability moved from the label to all other tokens
    z_loss: NonNegFloat = 0.0  # weight of the squared log-partition
    router_balance: NonNegFloat = 0.01  # weight of the router's load-balance loss
    router_z: NonNegFloat = 0.001  # weight of the router's z-loss
    # what the loss is averaged over; constant: loss_divisor
    loss_norm: Literal["tokens", "positions", "sequences", "constant"] = "tokens"
    loss_divisor: NonNegFloat = 0.0  # divisor of a batch's summed loss, with loss_norm constant
    # after a non-finite loss or gradient, which makes no update
    on_nonfinite: Literal["skip", "stop", "raise"] = "stop"
    # ---- mesh
    dp: Axis = 1  # devices that split the batch and the moments (ZeRO-2); -1: all that are left
    fsdp: Axis = -1  # devices that split the batch, the moments and the parameters (ZeRO-3)
    ep: Axis = 1  # devices that split the experts; also splits the batch
    tp: Axis = 1  # devices that split heads, MLP width and vocabulary
    sp: Axis = 1  # devices that split the sequence (Ulysses)
    slices: PosInt = 1  # TPU slices or hosts joined by a slow network, which split dp, else fsdp
    coordinator: str = ""  # host:port of process 0; auto: Slurm, Open MPI, Kubernetes; empty: none
    n_processes: PosInt = 1  # processes of this run, with coordinator host:port
    process_id: NonNegInt = 0  # number of this process, with coordinator host:port
    peer_timeout_s: NonNegFloat = 1800.0  # seconds without progress until all end; 0: never
    # ---- what to do how often: every so many updates, epochs, windows or by time; 0: never
    track: tuple[str, ...] = ()  # wandb, tensorboard: trackers of metrics, beside metrics.jsonl
    log_every: NonNegInt = 10  # updates between lines of metrics.jsonl
    eval_every: Interval = 250  # between evaluations; there is always one at the end
    eval_batches: NonNegInt = 40  # batches per evaluation; 0: all held-out data
    save_every: Interval = 250  # between checkpoints; one by time is deleted after the next
    max_to_keep: NonNegInt = 2  # newest checkpoints kept on disk; 0: all
    keep_period: NonNegInt = 0  # checkpoints of steps that this divides are kept for ever; 0: none
    save_exclude: tuple[str, ...] = ()  # patterns of parameters not to save
    weights_every: Interval = 0  # between checkpoints of the parameters alone, in ckpt/weights
    export_every: Interval = 0  # between exports; there is always one at the end
    reload_every: Interval = 0  # between loads of the newest parameters of dynamic sources
    sample_every: Interval = 500  # between printed samples; there is always one at the end
    watch: tuple[str, ...] = ()  # patterns of parameters to log histograms and gradient norms of
    profile: str = ""  # updates first:last whose time and memory to trace into out_dir/profile
    # ---- sampling
    prompt: str = ""  # text that a sample continues; empty: the start of a document
    n_samples: PosInt = 1  # samples per preview
    sample_tokens: NonNegInt = 200  # new tokens per sample; 0: no samples
    temperature: NonNegFloat = 0.8  # of sampling; 0: greedy
    top_k: NonNegInt = 0  # sample among the k likeliest tokens; 0: all
    top_p: PosFraction = 1.0  # sample among the likeliest tokens that hold this probability


MESH = ("dp", "fsdp", "ep", "tp", "sp")

# ---- optional

EVENTS = ("save", "weights", "export", "eval", "sample", "reload")  # what NAME_every is of

# Fields of this process, not of the run: config.json holds their defaults.
LAUNCH_FIELDS = "mode config resume allow_change coordinator n_processes process_id".split()
# A checkpoint fits no config that differs in one of these ...
STATE_FIELDS = ("d_model n_layers n_heads n_kv_heads head_dim d_ff vocab_size qk_norm qkv_bias "
         "tie_embeddings n_experts lora_rank lora_targets freeze param_dtype optimizer "
         "optimizers").split()
# ... a run may resume with any of these changed; any other field must be named in allow_change.
RESUMABLE_FIELDS = (*MESH, *LAUNCH_FIELDS, *"out_dir ckpt_dir cache_dir token_cache wait_s stop "
        "track peer_timeout_s steps epochs grad_accum_steps width_mult attention remat "
        "logit_tiles mlp_tiles deterministic "
        "offload_optimizer slices log_every eval_every eval_batches save_every "
        "max_to_keep keep_period save_exclude "
        "weights_every export export_every export_dtype export_lora sample_every watch "
        "profile prompt n_samples sample_tokens temperature top_k top_p".split())
# With equal shapes, parameters are still of another model when one of these differs.
ARCH_FIELDS = ("n_heads n_kv_heads head_dim rope_theta rope_factor rope_original_len norm_eps "
           "qk_norm qkv_bias tie_embeddings sliding_window n_experts experts_per_token").split()


# Earlier names of fields. They are refused with the present name.
RENAMED = {
    "micro_batches": "grad_accum_steps",
    "fill": "packing",
    "packed": "document_mask",
    "too_long": "truncation",
    "pad": "padding_side",
    "end_id": "eod_id",
    "prepared": "token_cache",
    "keep": "max_to_keep",
    "keep_every": "keep_period",
    "leave_out": "save_exclude",
    "moments_on": "offload_optimizer",
    "nan": "on_nonfinite",
    "scale": "width_mult",
}


def parse(argv, kind=Config):
    """The config of a command line. Unknown flags and malformed values end the process with code 2.

    kind: a dataclass that extends Config; its fields become flags too. Modes eval, sample and
    export take the config.json of out_dir as the defaults of all other flags.
    """
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def human_number(info):
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1, metavar="N" if info.type is int else "X",
            instance_from_str=lambda args: parse_number(args[0], info.type),
            is_instance=lambda x: isinstance(x, (int, info.type)),
            str_from_instance=lambda x: [str(x)]) if info.type in (int, float) else None

    # A shell expands --out_dir ~/run but not --out_dir=~/run, which would make a folder named "~".
    argv = [re.sub(r"^(--[\w-]+=)~(?=/|$)", lambda m: m[1] + str(Path.home()), arg) for arg in argv]
    errors = []
    for arg in argv:
        flag = re.match(r"--(?:no[-_])?([\w-]+)", arg)
        name = flag and flag[1].replace("-", "_")
        if name in RENAMED and name not in get_type_hints(kind):
            errors.append(f"--{name} is now --{RENAMED[name]}")
    raise_if_errors(errors, "command line")
    cli = partial(tyro.cli, kind, args=argv, registry=registry, use_underscores=True,
                  description="Train, evaluate, sample, plan, prepare data or export.")
    asked, _ = cli(default=kind(), add_help=False, return_unknown_args=True)
    chosen = asked.config
    if not chosen and asked.mode in ("eval", "sample", "export"):
        saved = Path(asked.out_dir, "config.json")
        chosen = str(saved) if saved.is_file() else ""
    return cli(default=load(chosen, kind) if chosen else kind())


def load(name, kind=Config):
    """The config of a preset name or of a JSON file. Raises ValueError when it is neither."""
    if name in PRESETS:
        return kind(config=name, **PRESETS[name])
    if not Path(name).is_file():
        raise ValueError(f"config {name!r}: neither a file nor a preset "
                         f"({did_you_mean(name, PRESETS)})")
    cfg = from_json(Path(name).read_bytes(), name, kind)
    if cfg.config:
        raise_if_errors(
            [field_error(cfg, "config", "a file can name no other; leave it out")], name)
    return dataclasses.replace(cfg, config=name)


def to_json(cfg):
    return json.dumps(dataclasses.asdict(cfg), indent=1) + "\n"


def from_json(text, where="JSON", kind=Config):
    """Raises ValueError that names every unknown key and every value of a wrong type."""
    try:
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
    except (ValueError, AttributeError) as e:
        raise ValueError(f"{where}: no JSON object of fields: {e}") from None
    types = get_type_hints(kind)
    rules = {k: _type_rule(t) for k, t in types.items()}
    renamed = [f"{name!r} is now {RENAMED[name]!r}" for name in given
               if name in RENAMED and name not in types]
    known = {name: value for name, value in given.items()
             if name in types or name not in RENAMED}
    raise_if_errors(renamed + key_errors("", known, rules) + value_errors(known, rules), where)
    return kind(**{k: float(v) if types[k] is float else v for k, v in given.items()})


def repeatable(cfg):
    """cfg as config.json keeps it: without START, and without the steps that epochs gave."""
    reset = [*LAUNCH_FIELDS, *(["steps"] if cfg.epochs else [])]
    return dataclasses.replace(cfg, **{name: getattr(type(cfg)(), name) for name in reset})


UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12,
         "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "%": Decimal("0.01"),
         "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_number(text, kind=float):
    """A number as people write it: 2^20, 1.25M, 1Ki, 50%, 2h30m, 1d. Durations come out in seconds.

    Raises ValueError when it is none, or has a fraction where `kind` is int.
    """
    text = text.strip()
    digits = re.sub("^[+-]", "", text)
    parts = re.findall(r"((?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)([A-Za-z%]*)", digits)
    complete = parts and "".join(a + b for a, b in parts) == digits
    units = {unit for _, unit in parts}
    if power := re.fullmatch(r"(\d+)\^(\d{1,3})", text):
        value = Decimal(power[1]) ** int(power[2])
    elif complete and units <= set(UNITS if len(parts) == 1 else "smhd"):
        value = sum(Decimal(a) * UNITS[u] for a, u in parts) * (-1 if text[0] == "-" else 1)
    else:
        raise ValueError(f"{text!r} is not a number; write 300, 2^20, 1.25M, 1Ki, 50% or 2h30m")
    if kind is int and (value != int(value) or units & {*"smhd"}):
        raise ValueError(f"{text!r} is {value}, but must be a whole number and no time")
    return kind(value)


def parse_interval(text):
    """(unit, how many) of 250, 10m, 2epochs, a window: unit is step, second, epoch or window."""
    count = re.sub("(epoch|window)s?$", "", text)
    unit = text[len(count):].rstrip("s") or ("second" if text[-1:] in [*"smhd"] else "step")
    kind = float if unit in ("second", "epoch") else int
    return unit, parse_number(count or (text and "1"), kind)


def parse_intervals(value):
    """{unit: how many} of a Period, without those of 0. Raises ValueError when it is malformed."""
    found = [parse_interval(part) for part in str(value).replace(" ", "").split(",")]
    if len(dict(found)) < len(found) or min(n for _, n in found) < 0:
        raise ValueError(f"period {value!r}: names a unit twice, or is negative")
    return {unit: n for unit, n in found if n}


# What a condition of cfg.stop can count besides a metric, and the reason to log: {0} is the value,
# {1} the bound. Conditions are tested in this order, then those on metrics.
STOP_MESSAGES = {
    "new_steps": "{1:g} steps since the start are done",
    "step": "step {1:g} is reached",
    "file": "{1}/stop exists",
    "second": "the time of {1:g} s is over",
}


def parse_stop(text):
    """A condition of cfg.stop: {"name", "test", "bound", "reason", "exit_code"}.

    It holds when test(value of name, bound). reason is a format of the value and the bound.
    Raises ValueError when the text is malformed.
    """
    metric = re.fullmatch(r"([^<>]+)([<>])(.+)", text)
    if metric:
        name, sign, bound = metric.groups()
        return _metric_condition(name, sign, parse_number(bound))
    unit, bound = parse_interval(text)
    if unit not in STOP_MESSAGES or bound <= 0:
        raise ValueError(f"stop {text!r}: not a number of steps, a time or a bound of a metric")
    name = "new_steps" if unit == "step" and text[0] == "+" else unit
    return {"name": name, "test": operator.ge, "bound": bound,
            "reason": STOP_MESSAGES[name], "exit_code": 0}


def _metric_condition(name, sign, bound):
    if name in STOP_MESSAGES:
        raise ValueError(f"stop {name}{sign}{bound}: {name} is not a metric")
    if sign == "<":
        return {"name": name, "test": operator.lt, "bound": bound,
                "reason": name + " {:.4g} is below {:g}", "exit_code": 0}
    # A loss above its bound is a failure.
    return {"name": name, "test": operator.gt, "bound": bound,
            "reason": name + " {:.4g} is above {:g}", "exit_code": int("loss" in name)}


def parse_stops(cfg):
    """All conditions that end a run, in the order in which they are tested."""
    conditions = [parse_stop(text) for text in cfg.stop]
    conditions.append({"name": "file", "test": lambda exists, folder: exists, "bound": cfg.out_dir,
                       "reason": STOP_MESSAGES["file"], "exit_code": 0})
    return sorted(conditions, key=_stop_order)


def _stop_order(condition):
    names = list(STOP_MESSAGES)
    if condition["name"] in names:
        return names.index(condition["name"]), 0
    return len(names), condition["exit_code"]


def profile_span(cfg):
    """(first, last) update of cfg.profile, counted from 1; (0, 0) when it is empty. Raises
    ValueError when it is malformed, or begins after the last step.
    """
    first, last = map(int, (cfg.profile or "0:0").split(":"))
    if cfg.profile and not 0 < first <= (last if cfg.epochs else min(last, cfg.steps)):
        raise ValueError(f"profile {cfg.profile!r}: traces no update")
    return first, last


def parses(read, *args):
    """Whether read(*args) raises no ValueError."""
    with contextlib.suppress(ValueError):
        read(*args)
        return True
    return False


def raise_if_errors(faults, where="config"):
    """Raise one ValueError of all faults that are not empty, if there are any."""
    if faults := list(filter(None, faults)):
        raise ValueError(f"{where}: " + ("\n  " if len(faults) > 1 else "") + "\n  ".join(faults))


def key_errors(where, given, known, required=()):
    """Faults, in words, of the keys of a dict: one that is not known, a required one missing."""
    return [*(f"{where}unknown key {key!r} ({did_you_mean(key, known)})"
              for key in given if key not in known),
            *(f"{where}no {key!r}" for key in required if key not in given)]


def value_errors(given, rules):
    """Faults, in words, of the values of a dict. rules: {key: (test, what it must be)}."""
    return [f"{key} {given[key]!r:.80}: must be {words}"
            for key, (holds, words) in rules.items() if key in given and not holds(given[key])]


def field_error(cfg, name, words):
    return f"{name} {getattr(cfg, name)!r}: {words}"


def did_you_mean(name, known):
    """'nearest: x', the known name most like `name`, or all of them when none is."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.55)
    return f"nearest: {close[0]}" if close else f"legal: {', '.join(known)}"


def validate(cfg, n_devices, choices=(), task_errors=lambda sizes, cfg: []):
    """Raise one ValueError with every fault: name, value, rule, nearest legal value.

    n_devices: None leaves the mesh aside. choices: {field: legal values} of what other files offer;
    of a field with PATTERN=VALUE, of the values.
    task_errors({axis: size}, cfg): faults of what is trained, empty ones among them: text_faults.
    """
    of_fields, names, faults = _field_errors(cfg), vars(cfg), []
    for name, known in ({"allow_change": names} | dict(choices)).items():
        given = names[name] if isinstance(names[name], tuple) else (names[name],)
        faults += [f"{name} {text!r}: unknown ({did_you_mean(chosen, known)})" for text in given
                   if (chosen := str(text).rpartition("=")[2]) not in known]
    raise_if_errors(of_fields and of_fields + faults)  # the rules below divide by numbers
    faults += _unused_errors(cfg)
    faults += [field_error(cfg, name, words) for name, wrong, words in RULES if wrong(cfg)]
    sizes, mesh_faults = mesh_sizes(cfg, n_devices) if n_devices else (None, [])
    raise_if_errors(faults + mesh_faults + task_errors(sizes, cfg))


def check_resumable(old, new, old_mesh=(), mesh=()):
    """Raise ValueError when a run under config dict `old` cannot go on as config `new`, listing
    each difference. A field that `old` lacks is taken to have had its default.
    """
    before, now = (json.loads(to_json(cfg)) for cfg in (type(new)(), new))
    before |= old | dict(mesh) | dict(old_mesh)
    now |= dict(mesh)
    # Expert capacity is counted over each sp device's part of a sequence: sp changes what is lost.
    bound = {"sp"} if new.n_experts and new.capacity_factor else set()
    faults = []
    for name in now:
        on_purpose = name in new.allow_change and name not in STATE_FIELDS
        allowed = name in {*RESUMABLE_FIELDS} - bound or on_purpose
        if before[name] != now[name] and not allowed:
            how = ("another shape: use another --out_dir" if name in STATE_FIELDS else
                   f"on purpose: --allow_change {name}")
            faults.append(f"{name} was {before[name]!r}, is {now[name]!r} ({how})")
    raise_if_errors(faults, f"{new.out_dir} holds a run of another config (to go on with that one: "
                      f"--config {new.out_dir}/config.json)")


def _type_rule(kind):
    """(test of a value of a field of this type, what it must be, in words)."""
    within = get_args(kind)
    if get_origin(kind) is Literal:
        return lambda x: x in within, f"one of {', '.join(within)}"
    if get_origin(kind) is tuple:
        return (lambda x: isinstance(x, tuple) and all(isinstance(v, within[0]) for v in x),
                f"a list, in Python a tuple, of {within[0].__name__}")
    if kind is float:
        return lambda x: (isinstance(x, int | float) and not isinstance(x, bool)
                          and isfinite(x)), "a finite float"
    return (lambda x: isinstance(x, kind) and isinstance(x, bool) == (kind is bool),
            f"of type {getattr(kind, '__name__', kind)}")


def _field_errors(cfg):
    """Faults of single fields: of a wrong type, or else out of bounds."""
    types = {k: _type_rule(hint) for k, hint in get_type_hints(type(cfg)).items()}
    hints = get_type_hints(type(cfg), include_extras=True)
    bounds = {k: hint.__metadata__[0] for k, hint in hints.items() if get_origin(hint) is Annotated}
    return value_errors(vars(cfg), types) or value_errors(vars(cfg), bounds)


# (field, whether it is wrong, what to say of it)
RULES = (
    ("process_id", lambda c: c.process_id >= c.n_processes, "must be below n_processes"),
    ("profile", lambda c: not parses(profile_span, c),
     "must be first:last, counted from 1, as in 20:22, and begin within steps"),
    ("stop", lambda c: not parses(parse_stops, c) or (not c.log_every and any(
        each["name"] not in STOP_MESSAGES and each["name"][:4] != "val_"
        for each in parse_stops(c))),
     "must be 500 (updates in all), +100 (of this start), 2h30m, val_loss<3 or loss>9, which "
     "needs log_every above 0"),
    *((name, lambda c, name=name: not all(
        re.fullmatch(r".+=(\d*\.)?\d+(e-?\d+)?", each) for each in getattr(c, name)),
       "must be NAME=NUMBER, as in embed=0.3") for name in ("mix", "lr_mult", "decay_mult")),
    ("loss_divisor", lambda c: c.loss_norm == "constant" and not c.loss_divisor,
     "must be above 0 with loss_norm constant"),
    ("data", lambda c: c.mix and c.data, "must be empty with mix, which names its own"),
    ("mix", lambda c: len({each.rpartition("=")[0] for each in c.mix}) < len(c.mix),
     "names the same files twice; add up their weights"),
    ("mix", lambda c: c.mix and c.order == "windows", "has no order windows; set --data instead"),
    ("order", lambda c: c.order == "windows" and c.val_frac and not c.val_data,
     "held-out data must be named: set --val_data, or --val_frac 0 for none"),
    ("order", lambda c: c.order != "windows" and any(
        "window" in str(getattr(c, f"{event}_every")) for event in EVENTS),
     "must be windows for a period in windows, as of save_every or eval_every"),
    ("out_dir", lambda c: not c.out_dir or "://" in c.out_dir,
     "must be a folder on this machine; checkpoints go elsewhere by --ckpt_dir"),
    ("export", lambda c: c.mode == "export" and not c.export, "name a folder to write to"),
    # Expert capacity is counted over a whole sequence.
    ("mlp_tiles", lambda c: c.n_experts and c.mlp_tiles > 1, "must be 1 with n_experts"),
    ("experts_per_token", lambda c: 0 < c.n_experts < c.experts_per_token, "at most n_experts"),
)

# (field, values of it with which others have no effect, those others)
UNUSED_WHEN = (
    ("n_experts", lambda n: n == 0, "experts_per_token capacity_factor router_balance router_z"),
    ("coordinator", lambda x: x in ("", "auto"), "n_processes process_id"),
    ("lora_rank", lambda n: n == 0, "lora_alpha lora_targets export_lora"),
    ("epochs", lambda n: n > 0, "steps"),
    ("export", lambda x: not x, "export_every export_dtype export_lora"),
    ("init_from", lambda x: "dynamic=yes" not in str(x), "reload_every"),
    ("packing", lambda x: x == "stream", "truncation padding_side"),
    ("packing", lambda x: x != "stream", "document_mask"),
    ("document_mask", lambda x: not x, "eod_id"),
    ("order", lambda x: x != "windows", "windows_per_epoch window_repeats wait_s"),
    ("log_every", lambda n: n == 0, "watch"),
    ("temperature", lambda x: x == 0, "top_k top_p"),
    ("rope_factor", lambda x: x == 1, "rope_original_len"),
    ("loss_norm", lambda x: x != "constant", "loss_divisor"),
    ("schedule", lambda x: x == "constant", "min_lr_frac"),
    ("schedule", lambda x: x != "wsd", "decay_frac"),
    ("schedule", lambda x: x != "polynomial", "poly_power"),
    ("optimizer", lambda x: x in ("adafactor", "rmsprop"), "b1 moment_dtype"),
    ("optimizer", lambda x: x in ("adafactor", "sgd"), "b2"),
    ("optimizer", lambda x: x in ("adafactor", "sgd", "lion"), "eps"),
)


def _unused_errors(cfg):
    """Faults of options that are set, by a flag rather than by cfg.config, and have no effect."""
    default = load(cfg.config, type(cfg)) if cfg.config else type(cfg)()
    return [field_error(cfg, name, f"has no effect with {field} {getattr(cfg, field)!r}; leave it "
                                   f"at {getattr(default, name)}, or change {field}")
            for field, idles, names in UNUSED_WHEN if idles(getattr(cfg, field))
            and not (field == "optimizer" and cfg.optimizers)
            for name in names.split() if getattr(cfg, name) != getattr(default, name)]


def mesh_sizes(cfg, n_devices):
    """({axis: size} with -1 worked out, or None; faults of the mesh and of what it splits)."""
    sizes = {a: getattr(cfg, a) for a in MESH}
    left = [a for a, n in sizes.items() if n == -1]
    sizes |= dict.fromkeys(left[:1], n_devices // prod(n for n in sizes.values() if n > 0))
    if prod(sizes.values()) != n_devices:
        mesh = " ".join(f"{a}={getattr(cfg, a)}" for a in MESH)
        return None, [f"mesh {mesh}: must multiply to {n_devices} devices; one may be -1"]
    outer = "dp" if sizes["dp"] > 1 else "fsdp"
    rows = cfg.grad_accum_steps * sizes["dp"] * sizes["fsdp"] * sizes["ep"]
    return sizes, [divisor_error("slices", cfg.slices, outer, sizes[outer]), multiple_error(
        "batch_size", cfg.batch_size, "grad_accum_steps x dp x fsdp x ep", rows)]


def multiple_error(name, value, rule, of):
    """The fault that `value` is no multiple of `of`, with the nearest legal values, or None."""
    if value % of:
        legal = " or ".join(map(str, sorted({max(value // of * of, of), -(-value // of) * of})))
        return f"{name} {value}: must be a multiple of {rule} = {of}; nearest: {legal}"


def divisor_error(name, value, rule, whole):
    """The fault that `value` does not divide `whole`, with the nearest legal value, or None."""
    if whole % value:
        closest = min((n for n in range(1, whole + 1) if whole % n == 0),
                      key=lambda n: abs(n - value))
        return f"{name} {value}: must divide {rule} = {whole}; nearest: {closest}"


def text_errors(sizes, cfg):
    """Faults between the fields that shape the transformer, on a mesh of these sizes or None."""
    unit = gcd(cfg.d_model, cfg.d_ff, cfg.n_heads, cfg.n_kv_heads)
    legal = max(round(unit * cfg.width_mult), 1) / unit
    faults = [
        not cfg.head_dim and multiple_error("d_model", cfg.d_model, "2 x n_heads", 2 * cfg.n_heads),
        cfg.n_kv_heads and multiple_error("n_heads", cfg.n_heads, "n_kv_heads", cfg.n_kv_heads),
        cfg.head_dim % 2 and field_error(cfg, "head_dim", "must be even, for rotary positions"),
        abs(legal - cfg.width_mult) > 1e-9 * legal and field_error(
            cfg, "width_mult",
            f"d_model, d_ff and head counts would not stay whole; nearest: {legal}")]
    if not sizes:
        return faults
    part, n_heads = max(cfg.seq_len // sizes["sp"], 1), round(cfg.n_heads * cfg.width_mult)
    return [
        *faults,
        divisor_error("ep", sizes["ep"], "n_experts", cfg.n_experts or 1),
        divisor_error("logit_tiles", cfg.logit_tiles or 1, "seq_len / sp", part),
        divisor_error("mlp_tiles", cfg.mlp_tiles, "seq_len / sp", part),
        multiple_error("seq_len", cfg.seq_len, "sp", sizes["sp"]),
        multiple_error("n_heads", n_heads, "tp x sp", sizes["tp"] * sizes["sp"])]


def derive_text(cfg):
    """The same run with every 0-for-default and `width_mult` worked out. Call after `validate`."""
    head_dim = cfg.head_dim or cfg.d_model // cfg.n_heads
    sizes = dict(d_model=cfg.d_model, d_ff=cfg.d_ff, n_heads=cfg.n_heads,
                 n_kv_heads=cfg.n_kv_heads or cfg.n_heads)
    sizes = {k: round(v * cfg.width_mult) for k, v in sizes.items()}
    sizes["d_ff"] = sizes["d_ff"] or -(-8 * sizes["d_model"] // 3 // 32) * 32
    freeze, all_but_lora = cfg.freeze, ("*", "!*.lora_?")
    if cfg.lora_rank and freeze[:2] != all_but_lora:
        freeze = all_but_lora + freeze
    return dataclasses.replace(cfg, **sizes, head_dim=head_dim, freeze=freeze, width_mult=1.0)


# What presets share.
_LONG = dict(optimizer="adamw", schedule="cosine", warmup_steps=2000.0, b2=0.95, min_lr_frac=0.1,
             remat="full", steps=100000)
_LLAMA = _LONG | dict(vocab_size=128256, seq_len=8192, rope_theta=500000.0, norm_eps=1e-5,
                      qk_norm=False, tie_embeddings=False)
_QWEN = _LONG | dict(vocab_size=151936, seq_len=4096, head_dim=128, rope_theta=1000000.0)
_SIZES = ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "batch_size", "lr")

PRESETS = {name: shared | dict(zip(_SIZES, sizes)) | own for name, shared, sizes, own in (
    ("debug", {}, (128, 4, 4, 0, 512, 8, -1.0), dict(seq_len=128, steps=100)),
    ("gpt2-124m", _LONG, (768, 12, 12, 0, 2048, 480, 6e-4), dict(vocab_size=50304, seq_len=1024,
        grad_accum_steps=8, remat="none", steps=10000, warmup_steps=500.0)),
    ("llama-8b", _LLAMA, (4096, 32, 32, 8, 14336, 512, 3e-4), {}),
    ("llama-70b", _LLAMA, (8192, 80, 64, 8, 28672, 1024, 1.5e-4), {}),
    ("llama-405b", _LLAMA, (16384, 126, 128, 8, 53248, 2048, 8e-5), dict(
        warmup_steps=8000.0, min_lr_frac=0.01)),
    ("qwen3-0.6b", _QWEN, (1024, 28, 16, 8, 3072, 256, 6e-4), {}),
    ("qwen3-8b", _QWEN, (4096, 36, 32, 8, 12288, 512, 3e-4), dict(tie_embeddings=False)),
    ("qwen3-30b-a3b", _QWEN, (2048, 48, 32, 4, 768, 1024, 3e-4), dict(
        tie_embeddings=False, n_experts=128, experts_per_token=8)),
    ("mixtral-8x7b", _LLAMA, (4096, 32, 32, 8, 14336, 1024, 3e-4), dict(
        n_experts=8, experts_per_token=2, vocab_size=32000, seq_len=4096, rope_theta=1000000.0)),
)}


# ---- differences between configs

def architecture_mismatch(saved, current):
    """Faults, in words: each field in which a saved config describes another model of the same
    parameters than the current one. Both are dicts of fields. Fields in allow_change may differ.
    """
    names = [*ARCH_FIELDS]
    if saved.get("lora_rank"):
        names.append("lora_alpha")
    faults = []
    for name in names:
        was = saved.get(name, current[name])
        if was != current[name] and name not in current["allow_change"]:
            faults.append(f"{name} is {was!r} there, {current[name]!r} here (on purpose: "
                          f"--allow_change {name})")
    return faults


def changes_since(saved, current):
    """Each difference, in words, between the software and machine of a checkpoint and those of this
    process. With any difference, a resumed run need not be bit-identical.

    Both are {"versions": {name: text}, "machine": {name: value}}. A name that was not saved is no
    difference.
    """
    changes = []
    for part in ("versions", "machine"):
        before = saved.get(part, {})
        for name, value in current[part].items():
            if name in before and before[name] != value:
                changes.append(f"{name} was {before[name] or 'empty'}, is {value or 'empty'}")
    return changes
