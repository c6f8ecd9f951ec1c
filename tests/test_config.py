# SPDX-License-Identifier: Apache-2.0
"""config.py: the text forms of a config, its validation, presets and differences."""
import contextlib
import dataclasses
import json
import re
import shlex
import typing
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import pytest

import config
import model
import step
from config import Config

ROOT = Path(__file__).resolve().parent.parent
CHOICES = {"optimizer": step.OPTIMIZERS, "schedule": step.SCHEDULES}
validate = partial(config.validate, choices=CHOICES, task_errors=config.text_errors)


@dataclass(frozen=True, kw_only=True)
class Fork(Config):
    teacher: str = ""  # a folder


@pytest.fixture(autouse=True)
def folder_without_runs(tmp_path, monkeypatch):
    """A command line takes its defaults from a run in out."""
    monkeypatch.chdir(tmp_path)


def other(value, kind):
    """A value of the same type that differs from the default and is awkward to write as text."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[-1]
    if kind == int | str:
        return '1epoch,2h30m, 7'
    if kind is bool:
        return not value
    if kind is int:
        return value + 7
    if kind is float:
        return value / 3 + 1e-17
    if kind is str:
        return value + ' "é\n'
    return ("a b", "*.bin")


def error_of(cfg, n_devices=8):
    """The message with which `validate` rejects the config."""
    with pytest.raises(ValueError) as e:
        validate(cfg, n_devices)
    return str(e.value)


def test_json_round_trip():
    """A config in which no field has its default survives to_json and from_json: equal, with the
    same types and the same text.

    Break: config.py: values[name] = tuple(value) => values[name] = value
    """
    kinds = typing.get_type_hints(Config)
    cfg = Config(**{f.name: other(f.default, kinds[f.name]) for f in dataclasses.fields(Config)})
    for each in (cfg, Config()):
        back = config.from_json(config.to_json(each))
        assert back == each and hash(back) == hash(each)
        assert config.to_json(back) == config.to_json(each)
        assert [type(v) for v in vars(back).values()] == [type(v) for v in vars(each).values()]


def test_json_int_for_a_float():
    """An integer in a float field becomes a float, so that 1 and 1.0 give the same text later.

    Break: config.py: values[name] = float(value) => values[name] = value
    """
    assert type(config.from_json('{"lr": 1}').lr) is float


@pytest.mark.parametrize("text, words", [
    ('{"stepz": 3}', ["stepz", "nearest: --steps"]),
    ('{"lr": 1, "steps": 2, "lr": 3}', ["comes twice: 'lr'"]),
    ('{"data": [{"a": 1, "a": 2}]}', ["comes twice: 'a'"]),
    ('{"n_embd": 3, "min_lr": 0.1}', ["'n_embd' (use --d_model)", "'min_lr' (use --min_lr_frac"]),
    ('{"dtype": "bf16"}', ["dtype 'bf16': must be one of", "nearest: bfloat16"]),
    ('{"stepz": 3, "batchsize": 4, "lr": "fast"}',
     ["nearest: --steps", "nearest: --batch_size", "lr 'fast': must be a finite float"]),
    ('{"mode": "trian"}', ["mode 'trian'", "must be one of train, eval, sample, plan"]),
    ('{"on_nonfinite": []}', ["on_nonfinite (): must be one of skip, stop, raise"]),
    ('{"steps": "many"}', ["steps 'many': must be of type int"]),
    ('{"steps": 1.5}', ["steps 1.5: must be of type int"]),
    ('{"steps": true}', ["steps True: must be of type int"]),
    ('{"lr": null}', ["lr None: must be a finite float"]),
    ('{"qk_norm": 1}', ["qk_norm 1: must be of type bool"]),
    ('{"data": "a.txt"}', ["data 'a.txt': must be a list, in Python a tuple, of str"]),
    ('{"data": [1]}', ["data (1,): must be a list, in Python a tuple, of str"]),
    ('{"prompt": ["a"]}', ["prompt ('a',): must be of type str"]),
    ("[1]", ["not a JSON object of fields: list"]),
    ("{", ["not a JSON object of fields: Expecting"]),
])
def test_json_errors(text, words):
    """Malformed JSON, unknown keys and wrong types raise one ValueError that names them all, with
    the nearest legal name.

    Break: config.py: if isinstance(value, bool) != (hint is bool): => if False:
    """
    with pytest.raises(ValueError) as e:
        config.from_json(text, "my_run.json")
    assert all(word in str(e.value) for word in ["my_run.json", *words]), str(e.value)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_from_an_editor_on_windows(encoding, tmp_path):
    """A file in UTF-8 with a byte order mark or in UTF-16 is read. A file that is not Unicode is
    rejected, and so is a file that names another file or preset.

    Break: config.py: _json_values(Path(name).read_bytes(), => _json_values(Path(name).read_text(),
    """
    (tmp_path / "c.json").write_text('{"prompt": "é"}', encoding)
    assert config.load(str(tmp_path / "c.json")).prompt == "é"
    for text, words in (('{"prompt": "é"}', "c.json: not a JSON object of fields: 'utf-8' codec"),
                        ('{"config": "debug"}', "c.json: config 'debug': a config file cannot")):
        (tmp_path / "c.json").write_text(text, "latin-1")
        with pytest.raises(ValueError, match=words):
            config.load(str(tmp_path / "c.json"))


def test_load_unknown_preset():
    """A name that is neither a file nor a preset is rejected with the nearest preset.

    Break: config.py: hint = did_you_mean(name, PRESETS) => hint = "sorry"
    """
    with pytest.raises(ValueError, match="'gpt2-124'.*nearest: gpt2-124m"):
        config.load("gpt2-124")
    with pytest.raises(ValueError, match=f"legal: {', '.join(config.PRESETS)}"):
        config.load("zzzzzz")
    with pytest.raises(ValueError, match="config 'a=b'"):
        config.parse(["--config=a=b"])


@pytest.mark.parametrize("argv, message", [
    ("--stepz 3", "unknown flag: --stepz (nearest: --steps)"),
    ("--learning_rate 1e-3 --block-size=128 --lr 5 --max_iters 100",
     "unknown flags: --learning_rate (use --lr), --block-size=128 (use --seq_len), --max_iters "
     "(use --steps)"),
    ("--zzzz --min_lr=1e-5 --no-compile",
     "unknown flags: --zzzz (see --help all), --min_lr=1e-5 (use --min_lr_frac, a fraction of lr, "
     "as 0.1), --no-compile (not needed: steps are always compiled)"),
    ("lr=3 -steps 4 --LR 5", "unknown flags: lr=3 (write --lr 3), -steps (write --steps), --LR "
     "(write --lr)"),
    ("--qk_norm False", "False: is neither a flag nor the value of one. Write a flag as --"),
    ("config/train.py --lr -5", "config/train.py: is neither a flag nor the value of one."),
])
def test_unknown_flags(argv, message):
    """One sentence names all unknown flags, each with the flag that may be meant: also by its name
    in nanoGPT or Hugging Face, without dashes, in capitals, or with hyphens.

    Break: config.py: return f"use {text}" if => return "" if
    """
    with pytest.raises(ValueError) as e:
        config.parse(argv.split())
    assert str(e.value).startswith(message), str(e.value)


def test_a_fork_may_have_a_field_of_another_name():
    """A field of a fork named as in nanoGPT, or with a name that begins with no_, is a flag.

    Break: config.py: flags=re.DOTALL).replace("-", "_") => flags=re.DOTALL)
    """
    @dataclass(frozen=True, kw_only=True)
    class Named(Config):
        bias: bool = False  # biases of all matrices
        no_decay: config.PosInt = 1  # rows without decay

    flags = ["--bias", "--no-decay", "3", "--out_dir", "x"]
    cfg = config.parse(flags, Named)
    assert cfg == Named(bias=True, no_decay=3, out_dir="x")
    assert cfg.explicit == ("bias", "no_decay", "out_dir")
    assert config.from_json('{"bias": true}', kind=Named) == Named(bias=True)
    with pytest.raises(ValueError, match="-bias .write --bias"):
        config.parse(["-bias"], Named)


@pytest.mark.parametrize("argv", [["--steps", "2h30"], ["--sizes", "3", "2h30"], ["--lr=2h30"]])
def test_malformed_value(argv):
    """A malformed number is an error that names the flag and shows legal ones.

    Break: config.py: raise ValueError(f"--{name}: {e}") from None => return value
    """
    @dataclass(frozen=True, kw_only=True)
    class Sized(Config):
        sizes: tuple[int, ...] = (1, 2)

    with pytest.raises(ValueError, match="--[a-z]+: '2h30' is not a number; write 300"):
        config.parse(argv, Sized)


@pytest.mark.parametrize("text, value", [
    ("2^20", 2**20), ("1.25M", 1_250_000), ("1Ki", 1024), ("3B", 3 * 10**9), ("0.5Ki", 512),
    ("1_000", 1000), ("3e4", 30000), ("-3", -3),
    ("+3", 3), (" 7 ", 7), ("2.0", 2), ("400%", 4), ("9007199254740993", 2**53 + 1),
])
def test_whole_numbers(text, value):
    """Numbers as people write them are exact as integers and equal as floats.

    Break: config.py: "Ki": 2**10 => "Ki": 10**3
    """
    got = config.parse_number(text, int)
    assert got == value and type(got) is int
    assert config.parse_number(text) == float(value)


@pytest.mark.parametrize("text, value", [
    ("50%", 0.5), ("3e-4", 3e-4), (".5", 0.5), ("-1.5", -1.5), ("1.5h", 5400.0), ("0.1", 0.1),
    ("2h30m", 9000.0), ("1d", 86400.0), ("1m30s", 90.0),
])
def test_fractions(text, value):
    """A fraction is exactly the float that Python reads. As an integer, fractions and times are
    rejected.

    Break: config.py: Decimal(number) * UNITS[unit] =>
    Decimal(number) * UNITS[unit] * Decimal("1.0000001")
    """
    assert config.parse_number(text) == value
    with pytest.raises(ValueError, match="must be a whole number"):
        config.parse_number(text, int)


@pytest.mark.parametrize("text", [
    "2h30", "2x", "", "-", "2^9999999", "1e9999999", "h", "1M2K", "1h2M", "2^", "2^-1", "1 2",
    "1,000", "nan", "inf", "+-3", "--3",
])
def test_no_number(text):
    """A text that is not a number is rejected with examples of numbers.

    Break: config.py: legal_units = TIME_UNITS => pass
    """
    with pytest.raises(ValueError, match="is not a number; write 300"):
        config.parse_number(text)


def test_flags():
    """Flags take numbers as people write them, switches and lists.

    Break: config.py: return parse_number(value, hint) => return hint(value)
    """
    argv = ("--steps 2Ki --warmup_steps=50% --seed 2^5 --no-qk_norm --data a b "
            "--on_nonfinite skip --fsdp -1")
    assert config.parse(argv.split()) == Config(
        steps=2048, warmup_steps=0.5, seed=32, qk_norm=False, data=("a", "b"), on_nonfinite="skip",
        out_dir="out/data=a+b,no_qk_norm,warmup_steps=0.5,on_nonfinite=skip,seed=32")
    assert config.parse([]) == Config(out_dir="out/default")


@pytest.mark.house
def test_help(capsys):
    """Without a word --help lists the common flags and those of a fork on one screen, with `all`
    every field with its text and its default, under the groups of Config. A field names its group.

    Break: config.py: fields.setdefault(name, {"group": group}) => fields[name] = {"group": group}
    """
    @dataclass(frozen=True, kw_only=True)
    class Fork(Config):
        steps: config.PosInt = 7  # number of steps
        d_hidden: config.PosInt = 3  # width of the hidden layer

    def help_of(words):
        with pytest.raises(SystemExit) as e:
            config.parse(words.split(), Fork)
        assert not e.value.code
        return capsys.readouterr().out

    short, full = help_of("--help"), help_of("--help all")
    names = [field.name for field in dataclasses.fields(Fork)]
    assert re.findall(r"^  --(\w+)", full, re.MULTILINE) == names
    assert len(short.splitlines()) < 65 and "--d_hidden          width of the hidden" in short
    assert {*re.findall(r"^  --(\w+)", short, re.MULTILINE)} == {
        *config.SHORT_HELP.split(), "d_hidden"}
    groups = ["run", "data", "length and batch", "model", "numerics", "optimizer", "mesh",
              "intervals", "sampling", "Fork"]
    assert re.findall(r"^(\w[\w ]*)$", full, re.MULTILINE) == groups
    for flag in re.split(r"^  (?=--)", full, flags=re.MULTILINE)[1:]:
        assert len(flag.partition("(default:")[0].split()) >= 3, flag
    assert "  --steps\n        number of steps (default: 7)\n" in help_of("--help length and batch")
    assert help_of("-h lr") == help_of("--help optimizer")
    with pytest.raises(ValueError, match="--help lrs: unknown group; the groups are run, data, l"):
        config.parse(["--help", "lrs"])


@pytest.mark.house
def test_names_elsewhere():
    """What is written for a name of another trainer begins with a field or is a sentence.

    Break: config.py: --d_model <- n_embd => --d_modell <- n_embd
    """
    fields = {field.name for field in dataclasses.fields(Config)}
    missing = {*re.findall(r"^--(\w+)", config.OTHER_TRAINERS, re.MULTILINE)} - fields
    assert not missing, f"edit OTHER_TRAINERS in config.py: no field {missing}"


@pytest.mark.parametrize("argv", [
    "--config gpt2-124m --steps 7", "--config=gpt2-124m --steps=7", "--steps 7 --config gpt2-124m",
    "--config debug --config gpt2-124m --steps 7",
])
def test_config_flag_preset(argv):
    """--config sets the defaults of all flags, wherever it stands. The other flags override them.

    Break: config.py: named = _load_values(_expand_home(typed["config"]), kind) =>
    named = _load_values(argv[1], kind)
    """
    wanted = config.PRESETS["gpt2-124m"] | dict(
        steps=7, config="gpt2-124m", out_dir="out/gpt2-124m")
    assert config.parse(argv.split()) == Config(**wanted)


def test_config_flag_file(tmp_path):
    """--config reads a file that to_json wrote, and a file with a few keys. Flags override both.

    Break: config.py: return values | {"config": name} => return {"config": name}
    """
    path = tmp_path / "run.json"
    for cfg in (Config(lr=0.25, steps=9, data=("x",)), Config(steps=9)):
        path.write_text(config.to_json(cfg))
        wanted = dataclasses.replace(cfg, lr=0.5, config=str(path), out_dir="out/run,lr=0.5")
        assert config.parse(["--config", str(path), "--lr", "0.5"]) == wanted
    path.write_text('{"steps": 9}')
    wanted = Config(steps=9, config=str(path), out_dir="out/run")
    assert config.parse([f"--config={path}"]) == wanted


def test_a_home_in_every_path(tmp_path, monkeypatch):
    """`~` is expanded in each field with paths, from a flag or a file. The default of cache_dir
    stays, so that config.json is the same for all users.

    Break: config.py: resolved[name] = tuple(map(_expand_home, value)) => resolved[name] = value
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.json").write_text('{"out_dir": "~/out", "val_data": ["~/a.bin", "b~.bin"]}')
    cfg = config.parse(["--config", "~/c.json", "--data", "~/*.txt", "./~b", "--token_cache", "~",
                        "--init_from", "~/base load=w*", "--hooks", "~/h.py:f",
                        "--ckpt-dir=~/ckpt", "--prompt=~a"])
    assert (cfg.ckpt_dir, cfg.prompt) == (f"{tmp_path}/ckpt", "~a")
    assert (cfg.out_dir, cfg.token_cache) == (f"{tmp_path}/out", str(tmp_path))
    assert cfg.val_data == (f"{tmp_path}/a.bin", "b~.bin")
    assert cfg.data == (f"{tmp_path}/*.txt", "./~b")
    assert cfg.init_from == (f"{tmp_path}/base load=w*",) and cfg.hooks == (f"{tmp_path}/h.py:f",)
    assert cfg.cache_dir == Config().cache_dir


def test_all_errors_at_once():
    """One message lists every error, of single fields and between fields, with the legal values.

    Break: config.py: if cfg.n_kv_heads: => if False:
    """
    bad = dict(d_model=100, n_heads=8, n_kv_heads=3, optimizer="adamv", allow_change=("stepz",))
    both = ["d_model 100: must be a multiple of", "96 or 112",
            "n_heads 8: must be a multiple of n_kv_heads = 3; nearest: 6 or 9",
            "optimizer 'adamv': unknown (nearest: adamw)",
            "allow_change 'stepz': unknown (nearest: steps)"]
    mesh = ["mesh dp=3 fsdp=-1", "must multiply to 8 devices; one may be -1"]
    batch = ["batch_size 10: must be a multiple of grad_accum_steps x dp x fsdp x ep = 16; "
             "nearest: 16"]
    for change, words in ((dict(dp=3), mesh), (dict(batch_size=10, grad_accum_steps=2), batch)):
        error = error_of(Config(**bad | change))
        assert [w for w in both + words if w not in error] == [], error


# (change of the defaults, part of the error), for 8 devices
REJECTED = [
    (dict(dp=3, fsdp=1), "mesh dp=3 fsdp=1 ep=1 tp=1 sp=1: must multiply to 8 devices"),
    (dict(dp=-1, fsdp=-1), "one may be -1"),
    (dict(columns=("body=text",)),
     "columns ('body=text',): must be NAME=COLUMN, as in text=content"),
    (dict(chat="a", prompt="b"), "prompt 'b': only one of prompt, chat and prompts may be set"),
    (dict(prompts="a.txt", chat="b"), "prompt '': only one of prompt, chat and prompts may be"),
    (dict(samples_file="a"), "samples_file 'a': needs mode sample; the samples of a run are in its "
     "metrics.jsonl"),
    (dict(tp=0), "tp 0: must be at least 1, or -1"),
    (dict(tp=8), "n_heads 4: must be a multiple of tp x sp = 8; nearest: 8"),
    (dict(sp=2, seq_len=127),
     "seq_len 127: must be a multiple of sp = 2; nearest: 126 or 128"),
    (dict(ep=2), "ep 2: must divide n_experts = 1; nearest: 1"),
    (dict(ep=4, n_experts=6), "ep 4: must divide n_experts = 6; nearest: 3"),
    (dict(n_experts=2, experts_per_token=1), "experts_per_token 1: must be at least 2"),
    (dict(n_experts=2, experts_per_token=3), "experts_per_token 3: must be at most n_experts"),
    (dict(n_experts=2, mlp_tiles=2), "mlp_tiles 2: must be 1 with n_experts"),
    (dict(mlp_tiles=3), "mlp_tiles 3: must divide seq_len / sp = 128; nearest: 2"),
    (dict(slices=3), "slices 3: must divide fsdp = 8; nearest: 2"),
    (dict(slices=4, dp=2), "slices 4: must divide dp = 2; nearest: 2"),
    (dict(loss_norm="token"), "loss_norm 'token': must be one of tokens, positions"),
    (dict(loss_norm="constant"), "loss_divisor 0.0: must be above 0 with loss_norm constant"),
    (dict(remat="ful"), "remat 'ful': must be one of none, full"),
    (dict(steps=0), "steps 0: must be at least 1"),
    (dict(steps=2**31), "steps 2147483648: must be at least 1, and below 2^31"),
    (dict(checkpoint="newest"), "checkpoint 'newest': must be latest, best, or a step, as in 400"),
    (dict(warmup_steps=1.0), "warmup_steps 1.0: must be below 1, a fraction of"),
    (dict(warmup_steps=2.5), "warmup_steps 2.5: must be below 1, a fraction of"),
    (dict(checkpoint="best"), "checkpoint 'best': has an effect only in modes eval, sample and "),
    (dict(keep_best="loss"), "keep_best 'loss': must be a metric of evaluations, as val_loss"),
    (dict(keep_best="val_margin"), "keep_best 'val_margin': must be a metric of evaluations"),
    (dict(branch_from="out/default"), "branch_from 'out/default': must be DIR@STEP, as in out/de"),
    (dict(branch_from="a@best"), "as those of DIR@best, use --init_from"),
    (dict(profile="22:20"), "profile '22:20': must be first:last"),
    (dict(lr=-2.0), "lr -2.0: must be at least 0, or -1 for the default"),
    (dict(b1=1.0), "b1 1.0: must be in [0, 1)"),
    (dict(top_p=1.5), "top_p 1.5: must be in (0, 1]"),
    (dict(width_mult=0.0), "width_mult 0.0: must be above 0"),
    (dict(seed=2**63), "seed 9223372036854775808: must be below 2^63"),
    (dict(head_dim=31), "head_dim 31: must be even"),
    (dict(stop=("9", "loss<3"), log_every=0), "a metric of training needs log_every above 0"),
    (dict(lr_mult=("embed=fast",)), "lr_mult ('embed=fast',): must be NAME=NUMBER"),
    (dict(n_processes=2), "n_processes 2: has no effect with coordinator ''"),
    (dict(coordinator="a:1", n_processes=2, process_id=2),
     "process_id 2: must be below n_processes"),
    (dict(schedule="cosin"), "schedule 'cosin': unknown (nearest: cosine)"),
    (dict(steps=1.5), "steps 1.5: must be of type int"),
    (dict(out_dir="s3://bucket/run"), "out_dir 's3://bucket/run': must be a folder on this mac"),
    (dict(profile="1"), "profile '1': must be first:last, counted from 1, as in 20:22"),
    (dict(stop=("soon",)), "stop ('soon',): must be 500 (steps in all), +100 (more steps)"),
    (dict(decay_mult=("embed=-1",)), "decay_mult ('embed=-1',): must be NAME=NUMBER"),
    (dict(mode="export"), "export '': must name a folder in mode export"),
]


@pytest.mark.parametrize("change, words", REJECTED)
def test_each_error(change, words):
    """A value out of bounds is rejected by name, with its rule. The default config is legal on 8
    devices.

    Break: config.py: b1: FractionBelow1 = 0.9 => b1: float = 0.9
    """
    validate(Config(), 8)
    assert words in error_of(Config(**change))


@pytest.mark.parametrize("change", [
    dict(lr=0.0), dict(lr=-1.0), dict(b1=0.0), dict(top_p=1.0), dict(val_frac=0.0), dict(fsdp=-1),
    dict(warmup_steps=0.0), dict(min_lr_frac=0.0), dict(max_to_keep=1), dict(seed=0),
    dict(eod_id=-1),
    dict(save_every="0"), dict(batch_size=8), dict(log_every=0), dict(data=("a.txt=1", "b=.5")),
    dict(lr_mult=("embed=0", "a=b=2")), dict(decay_mult=("layers.w*=1.5e-3",))])
def test_edges_are_legal(change):
    """The value at a closed bound is legal.

    Break: config.py: lambda x: x >= 0 or x == -1, => lambda x: x > 0 or x == -1,
    """
    validate(Config(**change), 8)


@pytest.mark.parametrize("text, wanted", [
    ("250", {"step": 250}), ("1Ki", {"step": 1024}), ("epoch", {"epoch": 1}),
    ("2windows", {"window": 2}), ("0.5epochs", {"epoch": 0.5}), ("250, 1h", {"step": 250,
                                                                             "second": 3600}),
    ("0", {}), ("0,1window", {"window": 1}), ("90s", {"second": 90}), ("", None), ("1,2", None),
    ("-5", None), ("0.5window", None), ("2weeks", None), ("1epochss", None)])
def test_intervals(text, wanted):
    """An interval holds counts and times, each unit once.

    Break: config.py: count = "1" => count = "2"
    """
    if wanted is None:
        with pytest.raises(ValueError):
            config.parse_intervals(text)
    else:
        assert config.parse_intervals(text) == wanted


def test_a_field_without_an_effect_is_rejected():
    """Each is named, with the field that makes it unused. A value that comes from a preset or a
    config file is accepted.

    Break: config.py: return _merge(vars(kind()), branch, named) => return vars(kind())
    """
    for change, words in (
            (dict(router_z=0.1, lora_alpha=8.0),
             ("router_z 0.1: has no effect with n_experts 0",
              "lora_alpha 8.0: has no effect with lora_rank 0")),
            (dict(epochs=2.0, steps=50), ("steps 50: has no effect with epochs",)),
            (dict(log_every=0, watch=("*",)), ("watch ('*',): has no effect with log_every 0",)),
            (dict(temperature=0.0, top_k=3, top_p=0.5),
             ("top_k 3: has no effect with temperature 0", "top_p 0.5: has no effect")),
            (dict(schedule="linear", decay_frac=0.5, poly_power=3.0),
             ("decay_frac 0.5: has no effect with schedule 'linear'",
              "poly_power 3.0: has no effect")),
            (dict(schedule="constant", min_lr_frac=0.1), ("min_lr_frac 0.1: has no effect",)),
            (dict(optimizer="sgd", eps=1e-6), ("eps 1e-06: has no effect",)),
            (dict(reload_every=5), ("reload_every 5: has no effect with init_from ()",)),
            (dict(eod_id=7), ("eod_id 7: has no effect with document_mask False",)),
            (dict(loss_divisor=3.0), ("loss_divisor 3.0: has no effect",))):
        error = error_of(Config(**change))
        assert all(w in error for w in words), error
    validate(Config(router_z=0.1, n_experts=4, lora_alpha=8.0, lora_rank=2), 8)
    validate(config.parse("--config gpt2-124m --epochs 2 --schedule constant".split()), 1)


# (field, a value of it, other fields that are unused with that value, a value that uses them)
UNUSED = [
    ("n_experts", 0, dict(experts_per_token=1, capacity_factor=1.0, router_balance=0.1,
                          router_z=0.1), 4),
    ("coordinator", "", dict(n_processes=2, process_id=1), "host:1"),
    ("coordinator", "auto", dict(n_processes=2, process_id=1), "host:1"),
    ("coordinator", "", dict(log_all_processes=True), "auto"),
    ("lora_rank", 0, dict(lora_alpha=8.0, lora_targets=("layers.wq",)), 2),
    ("epochs", 2.0, dict(steps=50), 0.0),
    ("export", "", dict(export_every=5, export_dtype="bfloat16"), "hf"),
    ("init_from", ("a",), dict(reload_every=5), ("a", "b dynamic=yes")),
    ("packing", "stream", dict(truncation="drop", padding_side="left"), "best_fit"),
    ("packing", "none", dict(document_mask=True), "stream"),
    ("packing", "best_fit", dict(document_mask=True), "stream"),
    ("document_mask", False, dict(eod_id=7), True),
    ("log_every", 0, dict(watch=("*",)), 1),
    ("temperature", 0.0, dict(top_k=3, top_p=0.5), 0.1),
    ("rope_factor", 1.0, dict(rope_original_len=50), 2.0),
    ("loss_norm", "tokens", dict(loss_divisor=3.0), "constant"),
    ("schedule", "constant", dict(min_lr_frac=0.1), "linear"),
    ("schedule", "linear", dict(decay_frac=0.5), "wsd"),
    ("schedule", "cosine", dict(poly_power=3.0), "polynomial"),
    ("optimizer", "adafactor", dict(b1=0.5, moment_dtype="bfloat16"), "adamw"),
    ("optimizer", "rmsprop", dict(b1=0.5, moment_dtype="bfloat16"), "lion"),
    ("optimizer", "adafactor", dict(b2=0.5, eps=1e-6), "muon"),
    ("optimizer", "sgd", dict(b2=0.5, eps=1e-6), "rmsprop"),
    ("optimizer", "lion", dict(eps=1e-6), "adamw"),
]


@pytest.mark.parametrize("field, value, others, other_value", UNUSED)
def test_each_unused_field(field, value, others, other_value):
    """The other fields are rejected by name with one value of the field, and accepted with another.

    Break: config.py: unused("log_every", not cfg.log_every, => unused("log_every", False,
    """
    def rejected(value):
        words = f"has no effect with {field} {value!r}; leave it at "
        errors = config._unused_errors(Config(**{field: value} | others), CHOICES)
        return [error.split()[0] for error in errors if words in error]

    assert rejected(value) == list(others)
    assert rejected(other_value) == []
    name = list(others)[-1]
    error = error_of(Config(**{field: value} | others))
    assert f"{name} {others[name]!r}: has no effect with {field} {value!r}" in error


def test_a_new_optimizer_or_schedule_refuses_what_it_does_not_read():
    """Which fields an optimizer or a schedule of a fork uses follows from its function. With
    `optimizers` set, another optimizer may use the field; Muon leaves some parameters to AdamW.

    Break: config.py: unused("optimizer", name not in used, name) => pass
    """
    choices = {"optimizer": step.OPTIMIZERS | {"belief": lambda cfg: (cfg.b1, cfg.eps)},
               "schedule": {"root": lambda cfg, *_: cfg.poly_power}}
    cfg = Config(optimizer="belief", b1=0.5, b2=0.5, eps=1e-6, moment_dtype="bfloat16",
                 schedule="root", poly_power=0.5, decay_frac=0.5)
    found = config._unused_errors(cfg, choices)
    assert [error.split()[0] for error in found] == ["decay_frac", "b2", "moment_dtype"]
    cfg = dataclasses.replace(cfg, optimizers=("embed=muon",), decay_frac=Config.decay_frac)
    assert config._unused_errors(cfg, choices) == []


def test_another_architecture():
    """Fields that shapes do not show make another model; widths, which they show, are not listed.

    Break: config.py: saved, {name: current[name] for name in names}, => saved, current,
    """
    saved, current = vars(Config(d_ff=32, vocab_size=7, rope_theta=5.0)), vars(Config())
    assert config.architecture_mismatch(saved, current) == [
        "rope_theta was 5.0, is 10000.0 (on purpose: --allow_change rope_theta)"]
    allowed = vars(Config(allow_change=("rope_theta",)))
    assert config.architecture_mismatch(saved, allowed) == []


@pytest.mark.parametrize("change", [
    dict(d_model=100, n_heads=8), dict(d_model=100, n_heads=6),
    dict(n_heads=6, n_kv_heads=4, head_dim=8), dict(n_heads=6, head_dim=8, tp=4),
    dict(batch_size=10), dict(batch_size=30, grad_accum_steps=2), dict(seq_len=127, sp=2),
    dict(width_mult=0.3), dict(width_mult=0.6, d_model=96, n_heads=6, n_kv_heads=2),
])
def test_nearest_is_legal(change):
    """Each value that an error names as nearest is legal.

    Break: config.py: above = -(-value // divisor) * divisor => above = value + 1
    """
    error = error_of(Config(**change))
    name, kind = error.removeprefix("config: ").split()[0], typing.get_type_hints(Config)
    for value in re.search(r"nearest: ([\d.]+)(?: or ([\d.]+))?", error).groups():
        if value is not None:
            validate(Config(**change | {name: kind[name](value)}), 8)


def test_width_mult():
    """width_mult multiplies widths and head counts; head width, depth and vocabulary stay. Derived
    again, a config does not change.

    Break: config.py: n_kv_heads=round(n_kv_heads * cfg.width_mult)) =>
    n_kv_heads=round(cfg.n_kv_heads * cfg.width_mult))
    """
    cfg = Config(d_model=256, d_ff=512, n_heads=8, n_kv_heads=4, n_layers=3, vocab_size=100,
                 width_mult=2.5)
    validate(cfg, 8)
    got = config.derive_text(cfg)
    assert (got.d_model, got.d_ff, got.n_heads, got.n_kv_heads) == (640, 1280, 20, 10)
    assert (got.head_dim, got.n_layers, got.vocab_size, got.width_mult) == (32, 3, 100, 1.0)
    assert config.derive_text(got) == got
    experts = config.derive_text(dataclasses.replace(cfg, n_experts=4, experts_per_token=2))
    assert (experts.d_ff, experts.n_experts, experts.experts_per_token) == (1280, 4, 2)
    tuned = config.derive_text(Config(lora_rank=2, freeze=("!embed",)))
    assert tuned.freeze == ("*", "!*.lora_?", "!embed")
    assert config.derive_text(tuned) == tuned
    assert config.derive_text(Config(d_model=256, n_heads=8, width_mult=0.5)).n_kv_heads == 4
    for d_model in range(64, 4097, 64):  # the default of d_ff: 8/3 d_model, rounded up to 32
        d_ff = config.derive_text(Config(d_model=d_model)).d_ff
        assert d_ff % 32 == 0 and 0 <= d_ff - 8 * d_model / 3 < 32


@pytest.mark.parametrize("width_mult", [0.3, 1.125, 0.25, 1e-12])
def test_width_mult_that_splits_a_head(width_mult):
    """A multiplier that would leave a fraction of a head, or no head, is an error.

    Break: config.py: > 1e-9 => > 1e9
    """
    cfg = Config(d_model=256, n_heads=4, n_kv_heads=2, width_mult=width_mult)
    assert f"width_mult {width_mult}: " in error_of(cfg, 1)


@pytest.mark.parametrize("name", config.PRESETS)
def test_presets(name):
    """Every preset is legal on one device and has the number of parameters that its name promises.

    Break: config.py: 28672 => 28000
    """
    cfg = dataclasses.replace(config.load(name), width_mult=1.0)
    validate(cfg, 1)
    cfg = config.derive_text(dataclasses.replace(cfg, vocab_size=cfg.vocab_size or 256))
    n = sum(prod(row["shape"]) for row in model.param_table(cfg).values())
    promised = {"gpt2-124m": (124e6, 0.02), "llama-8b": (8.03e9, 0.01),
                "llama-70b": (70.55e9, 0.01), "llama-405b": (405.85e9, 0.01),
                "qwen3-0.6b": (0.596e9, 0.01), "qwen3-8b": (8.19e9, 0.01),
                "qwen3-30b-a3b": (30.53e9, 0.01), "mixtral-8x7b": (46.7e9, 0.01)}
    wanted, within = promised.get(name, (n, 0))
    assert abs(n - wanted) <= within * wanted


@pytest.mark.house
@pytest.mark.parametrize("name, theta, eps, vocab, tied, qk_norm, length", [
    ("llama-8b", 5e5, 1e-5, 128256, False, False, 8192),
    ("llama-405b", 5e5, 1e-5, 128256, False, False, 8192),
    ("mixtral-8x7b", 1e6, 1e-5, 32000, False, False, 4096),
    ("qwen3-0.6b", 1e6, 1e-6, 151936, True, True, 4096),
    ("qwen3-30b-a3b", 1e6, 1e-6, 151936, False, True, 4096),
    ("gpt2-124m", 1e4, 1e-6, 50304, True, True, 1024),
])
def test_presets_are_as_published(name, theta, eps, vocab, tied, qk_norm, length):
    """Rotary base, norm epsilon, vocabulary, tied embeddings, head norms and sequence length. Those
    of Llama, Mixtral and Qwen3 equal their published config.json; those of gpt2-124m are choices.

    Break: config.py: "rope_theta": 500000.0 => "rope_theta": 10000.0
    """
    cfg = config.load(name)
    assert (cfg.rope_theta, cfg.norm_eps, cfg.vocab_size) == (theta, eps, vocab)
    assert (cfg.tie_embeddings, cfg.qk_norm, cfg.seq_len) == (tied, qk_norm, length)


@pytest.mark.parametrize("power, letter", [*enumerate("KMGT", 1)])
def test_units(power, letter):
    """Powers of 1000 and 1024, B for a billion, and a day in hours, minutes and seconds.

    Break: config.py: "Gi": 2**30 => "Gi": 2**31
    """
    assert config.parse_number(f"1{letter}") == 1000**power
    assert config.parse_number(f"1{letter}i") == 1024**power
    assert config.parse_number("1B") == 1e9 and config.parse_number("1k") == 1000
    for text in ("1d", "24h", "1440m"):
        assert config.parse_number(text) == 86400


def test_resuming_under_another_config():
    """Each difference that matters is listed with both values, unless allow_change has it. A field
    that the old config lacks had its default.

    Break: config.py: {*RESUMABLE_FIELDS, *new.allow_change} => {*RESUMABLE_FIELDS}
    """
    old = json.loads(config.to_json(Config(data=("a",))))
    new = Config(data=("b",), d_model=256, lr=0.5)
    with pytest.raises(ValueError) as e:
        config.check_resumable(old, new)
    for words in ("data was ['a'], is ['b']", "d_model was 128, is 256", "lr was -1.0, is 0.5",
                  "--allow_change lr"):
        assert words in str(e.value)
    assert "seed" not in str(e.value)
    config.check_resumable(old, Config(data=("b",), lr=0.5, allow_change=("data", "lr")))
    with pytest.raises(ValueError, match="lr was -1.0, is 0.5"):
        config.check_resumable(old, Config(data=("b",), lr=0.5, allow_change=("data",)))
    del old["z_loss"]
    config.check_resumable(old, Config(data=("a",)))
    with pytest.raises(ValueError, match="z_loss was 0.0, is 0.5"):
        config.check_resumable(old, Config(data=("a",), z_loss=0.5))


def test_resuming_over_another_sp_changes_what_experts_drop():
    """Expert capacity is counted over each device's part of a sequence. So a resume with another sp
    is rejected if tokens can be dropped, and only then.

    Break: config.py: may_change.remove("sp") => pass
    """
    experts = Config(n_experts=4)
    old = dataclasses.asdict(experts) | {"lora_targets": ["layers.w*"]}
    old = json.loads(json.dumps(old))
    with pytest.raises(ValueError, match="sp was 1, is 2 .on purpose: --allow_change sp"):
        config.check_resumable(old, experts, {"sp": 1}, {"sp": 2})
    config.check_resumable(old, experts, {"sp": 2}, {"sp": 2})
    config.check_resumable(
        old, dataclasses.replace(experts, allow_change=("sp",)), {"sp": 1}, {"sp": 2})
    unlimited = dataclasses.replace(experts, capacity_factor=0.0)
    config.check_resumable(old | {"capacity_factor": 0.0}, unlimited, {"sp": 1}, {"sp": 2})


@pytest.mark.house
def test_a_resume_may_change_the_resumable_fields_and_no_others():
    """A new field of a fork, which is in no list, may not change.

    Break: config.py: [0] not in may_change] => [0] in Config.__annotations__]
    """
    @dataclass(frozen=True, kw_only=True)
    class Fork(Config):
        d_hidden: config.PosInt = 3

    kinds = typing.get_type_hints(Fork)
    old = json.loads(config.to_json(Fork()))
    resumable = set()
    for field in dataclasses.fields(Fork):
        new = Fork(**{field.name: other(field.default, kinds[field.name])})
        with contextlib.suppress(ValueError):
            config.check_resumable(old, new)
            resumable.add(field.name)
    assert resumable == set(config.RESUMABLE_FIELDS)


def test_launch_fields_are_not_saved():
    """A config file repeats the run, not its launch: a file never overwrites, resumes or plans. If
    epochs determined the steps, the file has epochs and not the steps.

    Break: config.py: LAUNCH_FIELDS = ("mode", "config", "resume", =>
    LAUNCH_FIELDS = ("mode", "config",
    """
    cfg = Config(mode="plan", resume="overwrite", allow_change=("lr",), lr=0.5, steps=77,
                 coordinator="a:1", n_processes=2, process_id=1, log_all_processes=True, epochs=2.0,
                 init_from="a")
    assert config.without_launch_fields(cfg) == Config(lr=0.5, epochs=2.0, init_from="a")
    assert config.without_launch_fields(Config(steps=77)) == Config(steps=77)


def test_changed_flags_repeat_what_was_typed():
    """The printed flags, typed again, give the same config; a preset is named, not spelled out. A
    long list is cut.

    Break: config.py: default = _default_values(cfg) | => default = vars(type(cfg)()) |
    """
    typed = ["--config debug", "--data 'a b.txt' '*.py'", "--val_frac 0.25", "--steps 300",
             "--no_qk_norm", "--lora_targets", "--lr 1e-05", "--warmup_steps 20",
             "--offload_optimizer", "--eval_every 1epoch", "--prompt 'it'\"'\"'s'"]
    argv = [*shlex.split(" ".join(typed)), "--out_dir", "elsewhere"]
    assert config.changed_flags(config.parse(argv)) == typed
    assert config.changed_flags(Config()) == []
    assert config.changed_flags(Config(data=tuple("abcdef"))) == ["--data a b c d ... (2 more)"]


def test_a_fork_extends_config():
    """New fields of a fork are flags, are saved as JSON, and are checked against their bounds.

    Break: config.py: return kind(**_json_values(text, where, kind)) =>
    return kind(**_json_values(text, where, Config))
    """
    @dataclass(frozen=True, kw_only=True)
    class Fork(Config):
        d_hidden: config.PosInt = 3  # width of the hidden layer
        steps: config.PosInt = 7  # another default
        sizes: tuple[int, ...] = (1, 2)

    cfg = config.parse(["--d_hidden", "1Ki", "--lr", "1", "--sizes", "3", "4"], Fork)
    name = "out/fork,lr=1,d_hidden=1024,sizes=3+4"
    assert cfg == Fork(d_hidden=1024, lr=1.0, sizes=(3, 4), out_dir=name) and cfg.steps == 7
    assert config.from_json(config.to_json(cfg), kind=Fork) == cfg
    assert config.load("debug", Fork).d_hidden == 3
    with pytest.raises(ValueError, match="d_hidden 0: must be at least 1"):
        config.validate(Fork(d_hidden=0), 1)
    config.validate(cfg, 1, CHOICES)
    with pytest.raises(ValueError, match=r"sizes \(1.5,\): must be a list, in Python a tuple, "):
        config.validate(Fork(sizes=(1.5,)), 1)


def test_flags_that_are_not_typed_come_from_the_run_in_out_dir(tmp_path):
    """In all modes that have a run. A flag overrides it, also if its value is the default of
    Config. A run that is deleted first has the defaults of Config.

    Break: config.py: uses_run = cfg.mode in ("train", *READ_MODES) => uses_run = cfg.mode in ()
    """
    (tmp_path / "config.json").write_text(config.to_json(Config(temperature=0.3, n_layers=2)))
    flags = ["--mode", "sample", "--out_dir", str(tmp_path)]
    cfg = config.parse(flags)
    assert (cfg.mode, cfg.temperature, cfg.n_layers) == ("sample", 0.3, 2)
    assert config.parse(["--mode", "sample", f"--out-dir={tmp_path}"]) == cfg
    assert config.parse([*flags, "--temperature", "0.8"]).temperature == 0.8
    train = ["--out_dir", str(tmp_path)]
    assert config.parse([*train, "--steps", "9"]).n_layers == 2
    assert config.parse([*train, "--resume", "overwrite"]).n_layers == Config.n_layers
    assert config.parse([*train, "--mode", "plan"]).n_layers == Config.n_layers


def test_a_task_without_heads_has_no_rules_of_heads():
    """The rules of the transformer belong to its task. Without them any width and head count is
    legal.

    Break: config.py: errors += task_errors(sizes, cfg) => errors += text_errors(sizes, cfg)
    """
    odd = Config(d_model=7, n_heads=3, head_dim=5)
    assert "head_dim 5: must be even" in error_of(odd)
    config.validate(odd, 8, CHOICES)
