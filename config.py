# SPDX-License-Identifier: Apache-2.0
"""Every knob on one screen, and what derives from it.

Owns the one class of the project, its text forms (command line, JSON, named presets) and the
rules between its fields. Refuses a config that cannot run, naming every fault at once.
Invariant: `from_json(to_json(cfg)) == cfg`, and a `Config` is hashable: a static jit argument.
"""
import dataclasses
import difflib
import json
import re
import typing
from dataclasses import dataclass
from decimal import Decimal
from math import gcd, prod
from pathlib import Path
from typing import Literal

Dtype = Literal["auto", "float32", "mixed", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Config:
    # ---- run
    mode: Literal["train", "eval", "sample", "plan"] = "train"  # eval, sample: newest checkpoint
    plan: str = ""  # TPU slice to plan for, such as v5p:8x8x8; empty: plan for the devices at hand
    plan_sweep: int = 0  # meshes to plan for and compare, the most promising; 0: the one given
    config: str = ""  # JSON file or preset name whose values become the defaults of all other flags
    out_dir: str = "out"  # folder of this run: config, metrics, checkpoints, plot
    seed: int = 0  # of initialisation, data order and sampling
    resume: Literal["auto", "must", "never", "overwrite"] = "auto"  # out_dir's run, or overwrite it
    allow_change: tuple[str, ...] = ()  # fields that may differ from the checkpoint's, on purpose
    init_from: str = ""  # out_dir of another run whose newest parameters to start from
    cache_dir: str = "~/.cache/sixfile"  # of compiled programs, kept between runs; empty: none
    # ---- data
    data: tuple[str, ...] = ()  # text, .jsonl, .bin or .npy files or globs; none: Python's sources
    val_data: tuple[str, ...] = ()  # files or globs held out; none: the last val_frac of data
    val_frac: float = 0.1  # share of data held out, in [0, 1), when val_data is empty
    data_dtype: Literal["uint16", "uint32"] = "uint16"  # of .bin token files that have no header
    tokenizer: str = "bytes"  # bytes, or the path of a Hugging Face tokenizer.json
    packed: bool = False  # attention and positions stay within a document
    overfit_batch: bool = False  # train on batch 0 alone, to see that the model can learn it
    # ---- length and batch
    steps: int = 600  # optimizer updates in all: the horizon of the schedule
    epochs: float = 0.0  # passes over the training data; above 0 it sets steps
    batch_size: int = 16  # sequences per update, all devices
    micro_batches: int = 1  # parts of a batch, one after the other: less memory, same result
    seq_len: int = 128  # tokens per sequence
    # ---- model
    d_model: int = 128  # width of the residual stream
    n_layers: int = 4  # blocks of attention and MLP
    n_heads: int = 4  # query heads
    n_kv_heads: int = 0  # key and value heads; 0: as many as query heads
    head_dim: int = 0  # width of a head; 0: d_model / n_heads
    d_ff: int = 0  # width of the MLP; 0: 8/3 d_model, rounded up to 32
    vocab_size: int = 0  # token ids; 0: as many as the tokenizer has
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_factor: float = 1.0  # Llama-3 stretch of long wavelengths; 1: none
    rope_original_len: int = 8192  # tokens per sequence before the stretch
    norm_eps: float = 1e-6  # added to the mean square in RMSNorm
    qk_norm: bool = True  # RMSNorm on each query and key head
    qkv_bias: bool = False  # bias on queries, keys and values
    tie_embeddings: bool = True  # one matrix for embedding and logits
    sliding_window: int = 0  # tokens that attention looks back, itself included; 0: all
    n_experts: int = 0  # MLPs of a layer, of which a router chooses for each token; 0: no router
    experts_per_token: int = 2  # likeliest experts, whose weighted sum a token gets
    capacity_factor: float = 2.0  # room of an expert, in even shares of the tokens; 0: for all
    lora_rank: int = 0  # of low-rank updates to frozen weights; 0: none
    lora_alpha: float = 16.0  # size of low-rank updates, which are multiplied by alpha / rank
    lora_targets: tuple[str, ...] = ("layers.w*",)  # patterns of weights to give low-rank updates
    scale: float = 1.0  # factor on widths and head counts; head width, depth, vocabulary stay
    # ---- numbers
    dtype: Dtype = "auto"  # mixed: float32, but products of bfloat16; auto: by the device
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters
    attention: Literal["auto", "xla", "cudnn", "pallas"] = "auto"  # auto: a GPU's, TPU's, or XLA
    remat: str = "none"  # what backward recomputes: none, full, dots, named, offload
    logit_tiles: int = 0  # parts of a sequence whose logits exist one at a time; 0: as memory asks
    mlp_tiles: int = 1  # parts of a sequence whose MLP is computed one at a time
    # ---- optimizer
    optimizer: str = "adamw"  # adamw, adafactor, lion, muon, rmsprop, sgd
    lr: float = 2e-3  # peak learning rate
    schedule: str = "cosine"  # constant, linear, cosine, polynomial, inverse_sqrt, wsd
    warmup_steps: float = 100.0  # updates of linear warm-up; below 1, a share of steps
    min_lr_frac: float = 0.0  # share of lr at the horizon
    decay_frac: float = 0.2  # share of steps that the wsd schedule decays in
    poly_power: float = 2.0  # exponent of the polynomial schedule
    weight_decay: float = 0.1  # per update, times lr; matrices only
    b1: float = 0.9  # decay of the first moment: Adam's, Lion's, Muon's and SGD's momentum
    b2: float = 0.98  # decay of the second moment: Adam's, RMSprop's; Lion's slow average
    eps: float = 1e-8  # added to the denominator of Adam and RMSprop
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # of first moments; second: float32
    moments_on: Literal["device", "host"] = "device"  # where moments stay between updates
    freeze: tuple[str, ...] = ()  # patterns of parameters not to train; a later !pattern trains
    clip_norm: float = 1.0  # largest global gradient norm; 0: no clipping
    label_smoothing: float = 0.0  # probability moved from the label to all other tokens
    z_loss: float = 0.0  # weight of the squared log-partition
    router_balance: float = 0.01  # weight of the loss that spreads tokens evenly over experts
    router_z: float = 0.001  # weight of the router's squared log-partition
    loss_norm: str = "tokens"  # loss is averaged over tokens, positions, sequences or a number
    nan: Literal["skip", "stop", "raise"] = "stop"  # on a non-finite loss or gradient; no update
    # ---- mesh
    dp: int = 1  # devices along the data axis, moments sharded; -1: all that are left
    fsdp: int = -1  # devices along the data axis, moments and parameters sharded
    ep: int = 1  # devices along the data axis, experts spread
    tp: int = 1  # devices along heads, MLP width and vocabulary
    sp: int = 1  # devices along the sequence
    slices: int = 1  # groups of devices joined by a slow network, over which dp, or fsdp, is laid
    coordinator: str = ""  # host:port of process 0; auto: Slurm, Open MPI, Kubernetes; empty: none
    n_processes: int = 1  # processes of this run, with coordinator host:port
    process_id: int = 0  # number of this process, with coordinator host:port
    # ---- what to do every so many updates; 0: never
    log_every: int = 10  # updates between lines of metrics.jsonl
    eval_every: int = 250  # updates between evaluations; there is always one at the end
    eval_batches: int = 40  # batches of one evaluation; 0: all held-out data
    save_every: int = 250  # updates between checkpoints; there is always one at the end
    keep: int = 2  # newest checkpoints kept on disk; 0: all
    sample_every: int = 500  # updates between printed samples; there is always one at the end
    watch: tuple[str, ...] = ()  # patterns of parameters to log histograms and gradient norms of
    profile: str = ""  # updates first:last whose time and memory to trace into out_dir/profile
    # ---- sampling
    prompt: str = ""  # text that a sample continues; empty: the start of a document
    n_samples: int = 1  # samples per preview
    sample_tokens: int = 200  # new tokens per sample; 0: no samples
    temperature: float = 0.8  # of sampling; 0: the likeliest token
    top_k: int = 0  # sample among the k likeliest tokens; 0: all
    top_p: float = 1.0  # sample among the likeliest tokens that hold this probability


# What the named shapes below share.
_SCHEDULE = dict(remat="full", steps=100000, warmup_steps=2000.0, b2=0.95, min_lr_frac=0.1)
_LLAMA = dict(n_kv_heads=8, vocab_size=128256, seq_len=8192, rope_theta=500000.0, norm_eps=1e-5,
              qk_norm=False, tie_embeddings=False)
_QWEN = dict(vocab_size=151936, seq_len=4096, head_dim=128, rope_theta=1000000.0)

PRESETS = {
    "debug": dict(
        d_model=128, n_layers=4, n_heads=4, d_ff=512, seq_len=128, batch_size=8, steps=100),
    "gpt2-124m": _SCHEDULE | dict(
        d_model=768, n_layers=12, n_heads=12, d_ff=2048, vocab_size=50304, seq_len=1024,
        batch_size=480, micro_batches=8, remat="none", steps=10000, lr=6e-4, warmup_steps=500.0),
    "llama-8b": _SCHEDULE | _LLAMA | dict(
        d_model=4096, n_layers=32, n_heads=32, d_ff=14336, batch_size=512, lr=3e-4),
    "llama-70b": _SCHEDULE | _LLAMA | dict(
        d_model=8192, n_layers=80, n_heads=64, d_ff=28672, batch_size=1024, lr=1.5e-4),
    "llama-405b": _SCHEDULE | _LLAMA | dict(
        d_model=16384, n_layers=126, n_heads=128, d_ff=53248, batch_size=2048, lr=8e-5,
        warmup_steps=8000.0, min_lr_frac=0.01),
    "qwen3-0.6b": _SCHEDULE | _QWEN | dict(
        d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8, d_ff=3072, batch_size=256, lr=6e-4),
    "qwen3-8b": _SCHEDULE | _QWEN | dict(
        d_model=4096, n_layers=36, n_heads=32, n_kv_heads=8, d_ff=12288, tie_embeddings=False,
        batch_size=512, lr=3e-4),
    "qwen3-30b-a3b": _SCHEDULE | _QWEN | dict(
        d_model=2048, n_layers=48, n_heads=32, n_kv_heads=4, d_ff=768, tie_embeddings=False,
        n_experts=128, experts_per_token=8, batch_size=1024, lr=3e-4),
    "mixtral-8x7b": _SCHEDULE | _LLAMA | dict(
        d_model=4096, n_layers=32, n_heads=32, d_ff=14336, n_experts=8, experts_per_token=2,
        vocab_size=32000, seq_len=4096, rope_theta=1000000.0, batch_size=1024, lr=3e-4),
}

MESH = ("dp", "fsdp", "ep", "tp", "sp")
# A checkpoint fits no config that differs here ...
SHAPE = ("d_model n_layers n_heads n_kv_heads head_dim d_ff vocab_size qk_norm qkv_bias "
         "tie_embeddings n_experts lora_rank lora_targets freeze param_dtype optimizer").split()
# ... and is continued under one that differs here only when allow_change names the field.
COURSE = ("seed data val_data val_frac data_dtype tokenizer packed overfit_batch batch_size "
          "seq_len rope_theta rope_factor rope_original_len norm_eps sliding_window dtype lr "
          "schedule warmup_steps min_lr_frac decay_frac poly_power weight_decay b1 b2 eps "
          "moment_dtype clip_norm label_smoothing z_loss experts_per_token capacity_factor "
          "router_balance router_z lora_alpha loss_norm nan init_from").split()

# What changes nothing while this field is 0.
NEEDS = {"n_experts": "experts_per_token capacity_factor router_balance router_z".split(),
         "lora_rank": "lora_alpha lora_targets".split()}
LOSS_NORMS = ("tokens", "positions", "sequences")
LORA_FREEZE = ("*", "!*.lora_?")  # with low-rank updates, what freeze begins with
UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12,
         "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "%": Decimal("0.01"),
         "s": 1, "m": 60, "h": 3600, "d": 86400}


def nearest(name, known):
    """'nearest: x', the known name most like `name`, or all of them when none is."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.55)
    return f"nearest: {close[0]}" if close else f"legal: {', '.join(known)}"


def number(text, kind=float):
    """A number as people write it: 2^20, 1.25M, 1Ki, 50%, 2h30m, 1d. Durations come out in seconds.

    Raises ValueError when it is none, or has a fraction where `kind` is int.
    """
    text = text.strip()
    digits = text[1:] if text[:1] in ("+", "-") else text
    power = re.fullmatch(r"(\d+)\^(\d{1,3})", text)
    parts = re.findall(
        r"(\d[\d_]*\.?\d*(?:[eE][+-]?\d{1,3})?|\.\d+(?:[eE][+-]?\d{1,3})?)([A-Za-z%]*)", digits)
    units = [unit for _, unit in parts]
    whole = "".join(a + b for a, b in parts) == digits and all(u in UNITS for u in units)
    if power:
        value = Decimal(power[1]) ** int(power[2])
    elif whole and (len(parts) == 1 or (parts and set(units) <= set("smhd"))):
        value = sum(Decimal(a) * UNITS[u] for a, u in parts) * (-1 if text[0] == "-" else 1)
    else:
        raise ValueError(f"{text!r} is not a number; "
                         "write 300, 3e-4, 2^20, 1.25M, 1Ki, 50% or 2h30m")
    if kind is int and value != int(value):
        raise ValueError(f"{text!r} is {value}, but a whole number is wanted")
    return kind(value)


def span(text):
    """(first, last) of "first:last", updates counted from 1; (0, 0) of an empty text.

    Raises ValueError when it is none.
    """
    first, _, last = text.partition(":") if text else ("0", ":", "0")
    if not (first.isdecimal() and last.isdecimal()) or (text and not 1 <= int(first) <= int(last)):
        raise ValueError(f"profile {text!r}: first:last is wanted, two updates from 1, as in 20:22")
    return int(first), int(last)


def _span_faults(cfg):
    try:
        first, _ = span(cfg.profile)
    except ValueError as e:
        return [str(e)]
    if first > cfg.steps and not cfg.epochs:
        return [f"profile {cfg.profile!r}: must begin at or before the last of steps {cfg.steps}"]
    return []


def parse(argv):
    """The Config of a command line. Unknown flags and malformed values end the process with code 2.
    """
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def human_number(info):
        if info.type not in (int, float):
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1, metavar="N" if info.type is int else "X",
            instance_from_str=lambda args: number(args[0], info.type),
            is_instance=lambda x: isinstance(x, (int, info.type)),
            str_from_instance=lambda x: [str(x)])

    chosen = [after for flag, after in zip(argv, argv[1:]) if flag == "--config"]
    chosen += [arg.split("=", 1)[1] for arg in argv if arg.startswith("--config=")]
    default = load(chosen[-1]) if chosen else Config()
    return tyro.cli(Config, args=argv, default=default, registry=registry, use_underscores=True,
                    prog="train.py", description="Train, evaluate or sample a language model.")


def load(name):
    """The Config of a preset name or of a JSON file. Raises ValueError when it is neither."""
    if name in PRESETS:
        return Config(config=name, **PRESETS[name])
    if not Path(name).is_file():
        raise ValueError(f"config {name!r}: neither a file nor a preset ({nearest(name, PRESETS)})")
    return from_json(Path(name).read_text(), name)


def to_json(cfg):
    return json.dumps(dataclasses.asdict(cfg), indent=1) + "\n"


def from_json(text, where="JSON"):
    """Raises ValueError that names every unknown key and every value of a wrong type."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as e:
        raise ValueError(f"{where}: not JSON: {e}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{where}: an object of field names and values is wanted, "
                         f"not {type(given).__name__}")
    names = [f.name for f in dataclasses.fields(Config)]
    faults = [f"unknown key {key!r} ({nearest(key, names)})" for key in given if key not in names]
    cfg = Config(**{k: tuple(v) if isinstance(v, list) else v
                    for k, v in given.items() if k in names})
    _complain(faults + _type_faults(cfg), where)
    floats = {k for k, kind in typing.get_type_hints(Config).items() if kind is float}
    return dataclasses.replace(cfg, **{k: float(getattr(cfg, k)) for k in floats})


def _type_faults(cfg):
    faults = []
    for name, kind in typing.get_type_hints(Config).items():
        value, choices = getattr(cfg, name), typing.get_args(kind)
        if typing.get_origin(kind) is Literal:
            if value not in choices:
                faults.append(f"{name} {value!r}: not one of {', '.join(choices)} "
                              f"({nearest(value, choices)})")
        elif typing.get_origin(kind) is tuple:
            if not (isinstance(value, tuple) and all(isinstance(v, str) for v in value)):
                faults.append(f"{name} {value!r}: a list of strings is wanted")
        else:
            fits = isinstance(value, (int, float) if kind is float else kind)
            bool_for_number = isinstance(value, bool) and kind is not bool
            if not fits or bool_for_number or (kind is float and not -1e308 < value < 1e308):
                wanted = "finite float" if kind is float else kind.__name__
                faults.append(f"{name} {value!r}: {wanted} is wanted")
    return faults


def _complain(faults, where="config"):
    if faults:
        raise ValueError(f"{where}: " + ("\n  " if len(faults) > 1 else "") + "\n  ".join(faults))


def _multiple(name, value, rule, of):
    """The fault that `value` is no multiple of `of`, with the nearest legal values; none when it
    is.
    """
    if value % of == 0:
        return []
    legal = sorted({max(value // of * of, of), -(-value // of) * of})
    return [f"{name} {value}: must be a multiple of {rule} = {of}; "
            f"nearest: {' or '.join(map(str, legal))}"]


def validate(cfg, n_devices, choices=()):
    """Raise one ValueError with every fault: name, value, rule, nearest legal value.

    choices: {field: legal values} of what other files offer.
    """
    _complain(_type_faults(cfg))
    faults = [f"{name} {getattr(cfg, name)!r}: unknown ({nearest(getattr(cfg, name), known)})"
              for name, known in dict(choices).items() if getattr(cfg, name) not in known]
    names = [f.name for f in dataclasses.fields(Config)]
    faults += [f"allow_change {n!r}: no such field ({nearest(n, names)})"
               for n in cfg.allow_change if n not in names]
    faults += _range_faults(cfg) + _span_faults(cfg) + _idle_faults(cfg)
    if cfg.coordinator in ("", "auto") and (cfg.n_processes, cfg.process_id) != (1, 0):
        faults.append(f"n_processes {cfg.n_processes}, process_id {cfg.process_id}: "
                      "need --coordinator host:port")
    if cfg.process_id >= max(cfg.n_processes, 1):
        faults.append(f"process_id {cfg.process_id}: must be below n_processes {cfg.n_processes}")
    smallest = min(cfg.n_heads, cfg.batch_size, cfg.micro_batches, cfg.n_kv_heads + 1, cfg.d_ff + 1,
                   cfg.slices, cfg.mlp_tiles, cfg.n_experts + 1)
    if smallest < 1 or not 0 < cfg.scale < 1e9:
        _complain(faults)  # the rules between fields below divide by these
    _complain(faults + _model_faults(cfg) + _mesh_faults(cfg, n_devices))


def _idle_faults(cfg):
    """Faults of what was asked for and would do nothing."""
    default = Config()
    faults = [f"{n} {getattr(cfg, n)}: changes nothing with {switch} 0; set --{switch}, or leave "
              f"it at {getattr(default, n)}"
              for switch, names in NEEDS.items() if not getattr(cfg, switch)
              for n in names if getattr(cfg, n) != getattr(default, n)]
    if cfg.lora_rank and not cfg.lora_targets:
        faults.append(f"lora_targets (none): lora_rank {cfg.lora_rank} needs some; name patterns, "
                      "as in 'layers.w*'")
    if cfg.mode in ("eval", "sample") and (cfg.plan or cfg.plan_sweep):
        faults.append(f"mode {cfg.mode}: a plan is of training; leave out --mode, or --plan and "
                      "--plan_sweep")
    return faults


def _range_faults(cfg):
    """Faults of each number by itself."""
    faults = []
    least = {1: "steps batch_size micro_batches seq_len d_model n_layers n_heads experts_per_token "
                "rope_original_len mlp_tiles slices n_processes n_samples",
             0: "n_kv_heads head_dim d_ff vocab_size sliding_window epochs lr warmup_steps "
                "weight_decay clip_norm z_loss log_every eval_every eval_batches save_every keep "
                "sample_every sample_tokens logit_tiles temperature top_k process_id poly_power "
                "n_experts capacity_factor lora_rank router_balance router_z plan_sweep"}
    for low, fields in least.items():
        for n in fields.split():
            if getattr(cfg, n) < low:
                faults.append(f"{n} {getattr(cfg, n)}: must be at least {low}")
    for n in "scale rope_theta rope_factor norm_eps eps decay_frac top_p lora_alpha".split():
        if getattr(cfg, n) <= 0:
            faults.append(f"{n} {getattr(cfg, n)}: must be above 0")
    for n in "val_frac b1 b2 label_smoothing".split():
        if not 0 <= getattr(cfg, n) < 1:
            faults.append(f"{n} {getattr(cfg, n)}: must be in [0, 1)")
    for n in "min_lr_frac decay_frac top_p".split():
        if getattr(cfg, n) > 1:
            faults.append(f"{n} {getattr(cfg, n)}: must be at most 1")
    return faults


def _model_faults(cfg):
    """Faults between the fields that shape the model and its loss."""
    faults = []
    if not cfg.head_dim:
        faults += _multiple("d_model", cfg.d_model, "2 x n_heads", 2 * cfg.n_heads)
    elif cfg.head_dim % 2:
        faults.append(f"head_dim {cfg.head_dim}: must be even, for rotary positions")
    if cfg.n_kv_heads:
        faults += _multiple("n_heads", cfg.n_heads, "n_kv_heads", cfg.n_kv_heads)
    whole = gcd(cfg.d_model, cfg.d_ff, cfg.n_heads, cfg.n_kv_heads)
    legal = max(round(whole * cfg.scale), 1) / whole
    if abs(legal - cfg.scale) > 1e-9 * legal:
        faults.append(f"scale {cfg.scale}: d_model, d_ff and head counts would not stay whole; "
                      f"nearest: {legal}")
    if cfg.n_experts and cfg.experts_per_token > cfg.n_experts:
        faults.append(f"experts_per_token {cfg.experts_per_token}: must be at most n_experts "
                      f"{cfg.n_experts}")
    if cfg.n_experts and cfg.mlp_tiles > 1:
        faults.append(f"mlp_tiles {cfg.mlp_tiles}: must be 1 with n_experts {cfg.n_experts}, whose "
                      "room is shared out over a whole sequence")
    try:
        wrong = cfg.loss_norm not in LOSS_NORMS and number(cfg.loss_norm) <= 0
    except ValueError:
        wrong = True
    if wrong:
        faults.append(f"loss_norm {cfg.loss_norm!r}: a number above 0 is wanted, or "
                      f"{nearest(cfg.loss_norm, LOSS_NORMS)}")
    return faults


def _mesh_faults(cfg, n_devices):
    sizes = {a: getattr(cfg, a) for a in MESH}
    open_axes = [a for a, n in sizes.items() if n == -1]
    faults = [f"{a} {n}: must be at least 1, or -1 for all that are left"
              for a, n in sizes.items() if n < 1 and n != -1]
    if faults:
        return faults
    if len(open_axes) > 1:
        return [f"{' and '.join(open_axes)} -1: only one mesh axis can take all devices "
                "that are left"]
    fixed = prod(n for n in sizes.values() if n > 0)
    mesh = " ".join(f"{a}={n}" for a, n in sizes.items())
    if n_devices % fixed or (not open_axes and n_devices != fixed):
        if open_axes:
            return [f"mesh {mesh}: {fixed} devices do not divide the {n_devices} at hand; "
                    f"set sizes beside the -1 whose product divides {n_devices}"]
        return [f"mesh {mesh}: {fixed} devices do not make the {n_devices} at hand; "
                f"set one axis to -1, or sizes whose product is {n_devices}"]
    sizes |= {a: n_devices // fixed for a in open_axes}
    if sizes["ep"] > 1 and not cfg.n_experts:
        faults.append(f"ep {sizes['ep']}: this model has no experts to spread; set --ep 1, or "
                      "--n_experts")
    faults += _divides("ep", sizes["ep"], "n_experts", cfg.n_experts) if cfg.n_experts else []
    outer = "dp" if sizes["dp"] > 1 else "fsdp"
    faults += _divides("slices", cfg.slices, outer, sizes[outer])
    rows = sizes["dp"] * sizes["fsdp"] * sizes["ep"]
    faults += _multiple("batch_size", cfg.batch_size,
                        "micro_batches x dp x fsdp x ep", cfg.micro_batches * rows)
    faults += _multiple("seq_len", cfg.seq_len, "sp", sizes["sp"])
    part = max(cfg.seq_len // sizes["sp"], 1)
    for name in ("logit_tiles", "mlp_tiles"):
        faults += _divides(name, getattr(cfg, name) or 1, "seq_len / sp", part)
    faults += _multiple("n_heads", round(cfg.n_heads * cfg.scale), "tp x sp",
                        sizes["tp"] * sizes["sp"])
    return faults


def _divides(name, value, rule, whole):
    """The fault that `value` does not divide `whole`, with the nearest legal value; none when it
    does.
    """
    if whole % value == 0:
        return []
    legal = min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - value))
    return [f"{name} {value}: must divide {rule} = {whole}; nearest: {legal}"]


def derive(cfg):
    """The same run with every 0-for-default and `scale` worked out. Call after `validate`."""
    head_dim = cfg.head_dim or cfg.d_model // cfg.n_heads
    sizes = dict(d_model=cfg.d_model, d_ff=cfg.d_ff, n_heads=cfg.n_heads,
                 n_kv_heads=cfg.n_kv_heads or cfg.n_heads)
    sizes = {k: round(v * cfg.scale) for k, v in sizes.items()}
    sizes["d_ff"] = sizes["d_ff"] or -(-8 * sizes["d_model"] // 3 // 32) * 32
    freeze, norm = cfg.freeze, cfg.loss_norm
    if cfg.lora_rank and freeze[:2] != LORA_FREEZE:
        freeze = LORA_FREEZE + freeze
    norm = norm if norm in LOSS_NORMS else str(number(norm))
    return dataclasses.replace(
        cfg, **sizes, head_dim=head_dim, freeze=freeze, loss_norm=norm, scale=1.0)


def changes(old, new):
    """Raise ValueError when a run under config dict `old` cannot go on as Config `new`, listing
    each difference.
    """
    faults = []
    for name in SHAPE + COURSE:
        before, now = old.get(name), json.loads(to_json(new))[name]
        if before != now and name not in new.allow_change:
            how = f"on purpose: --allow_change {name}"
            if name in SHAPE:
                how = "another shape: use another --out_dir"
            faults.append(f"{name} was {before!r}, is {now!r} ({how})")
        elif before != now and name in SHAPE:
            faults.append(f"{name} was {before!r}, is {now!r} "
                          "(allow_change cannot help: another shape)")
    _complain(faults, f"{new.out_dir} holds a run of another config (to go on with that one: "
                      f"--config {new.out_dir}/config.json)")
