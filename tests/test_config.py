# SPDX-License-Identifier: Apache-2.0
"""config.py: what is written comes back, what cannot run is refused in words that help."""
import dataclasses
import json
import re
import typing
from math import prod

import pytest

import config
import model
import step
from config import Config

CHOICES = {"optimizer": step.OPTIMIZERS, "schedule": step.SCHEDULES, "remat": model.REMAT}


def other(value, kind):
    """A value of the same kind that is not the default, and awkward to write down."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[-1]
    return {bool: lambda: not value, int: lambda: value + 7, float: lambda: value / 3 + 1e-17,
            str: lambda: value + ' "é\n'}.get(kind, lambda: ("a b", "*.bin"))()


def fault(cfg, n_devices=8):
    with pytest.raises(ValueError) as e:
        config.validate(cfg, n_devices, CHOICES)
    return str(e.value)


def test_json_round_trip():
    """A config with every field off its default comes back equal, of the same types, and from the
    same text.

    Break: config.py: tuple(v) if isinstance(v, list) else v => v
    """
    kinds = typing.get_type_hints(Config)
    cfg = Config(**{f.name: other(f.default, kinds[f.name]) for f in dataclasses.fields(Config)})
    for each in (cfg, Config()):
        back = config.from_json(config.to_json(each))
        assert back == each and hash(back) == hash(each)
        assert config.to_json(back) == config.to_json(each)
        assert [type(v) for v in vars(back).values()] == [type(v) for v in vars(each).values()]


def test_json_int_for_a_float():
    """Whoever writes 1 for a float gets 1.0, so that the text written next says the same as that
    of 1.0.

    Break: config.py: float(getattr(cfg, k)) => getattr(cfg, k)
    """
    assert type(config.from_json('{"lr": 1}').lr) is float


@pytest.mark.parametrize("text, words", [
    ('{"stepz": 3}', ["stepz", "nearest: steps"]),
    ('{"stepz": 3, "batchsize": 4, "lr": "fast"}',
     ["nearest: steps", "nearest: batch_size", "lr 'fast': finite float"]),
    ('{"mode": "trian"}', ["mode 'trian'", "nearest: train"]),
    ('{"nan": []}', ["nan", "skip, stop, raise"]),
    ('{"steps": "many"}', ["steps 'many': int"]),
    ('{"steps": 1.5}', ["steps 1.5: int"]),
    ('{"steps": true}', ["steps True: int"]),
    ('{"lr": null}', ["lr None: finite float"]),
    ('{"qk_norm": 1}', ["qk_norm 1: bool"]),
    ('{"data": "a.txt"}', ["data 'a.txt': a list of strings"]),
    ('{"data": [1]}', ["data (1,): a list of strings"]),
    ('{"prompt": ["a"]}', ["prompt ('a',): str"]),
    ("[1]", ["an object", "list"]),
    ("{", ["not JSON"]),
])
def test_json_faults(text, words):
    """JSON of unknown keys, wrong types or no sense is one ValueError that names them all, and the
    nearest.

    Break: config.py: isinstance(value, bool) and kind is not bool => False
    """
    with pytest.raises(ValueError) as e:
        config.from_json(text, "mine.json")
    assert all(word in str(e.value) for word in ["mine.json", *words]), str(e.value)


def test_load_unknown_preset():
    """A name that is neither a file nor a preset is refused with the nearest preset.

    Break: config.py: ({nearest(name, PRESETS)}) => (sorry)
    """
    with pytest.raises(ValueError, match="'gpt2-124'.*nearest: gpt2-124m"):
        config.load("gpt2-124")
    with pytest.raises(ValueError, match="legal: debug, gpt2-124m, llama-8b, llama-70b"):
        config.load("zzzzzz")


@pytest.mark.parametrize("argv, words", [
    (["--stepz", "3"], ["--stepz", "--steps"]),
    (["--batchsize", "3"], ["--batchsize", "--batch_size"]),
    (["--steps", "2h30"], ["--steps", "'2h30' is not a number"]),
    (["--mode", "trian"], ["trian", "train"]),
])
def test_unknown_flag(argv, words, capsys):
    """A flag or value that does not exist ends the process with code 2 and shows the nearest that
    does.

    Break: config.py: use_underscores=True => use_underscores=False
    """
    with pytest.raises(SystemExit) as e:
        config.parse(argv)
    said = "".join(capsys.readouterr())
    assert e.value.code == 2 and all(word in said for word in words), said


@pytest.mark.parametrize("text, value", [
    ("2^20", 2**20), ("1.25M", 1_250_000), ("1Ki", 1024), ("3B", 3 * 10**9), ("0.5Ki", 512),
    ("2h30m", 9000), ("1d", 86400), ("1m30s", 90), ("1_000", 1000), ("3e4", 30000), ("-3", -3),
    ("+3", 3), (" 7 ", 7), ("2.0", 2), ("400%", 4), ("9007199254740993", 2**53 + 1),
])
def test_whole_numbers(text, value):
    """Numbers as people write them are exact whole numbers where one is wanted, and the same as
    floats.

    Break: config.py: "Ki": 2**10 => "Ki": 10**3
    """
    got = config.number(text, int)
    assert got == value and type(got) is int
    assert config.number(text) == float(value)


@pytest.mark.parametrize("text, value", [
    ("50%", 0.5), ("3e-4", 3e-4), (".5", 0.5), ("-1.5", -1.5), ("1.5h", 5400.0), ("0.1", 0.1),
])
def test_fractions(text, value):
    """A fraction is exactly the float that Python reads, and is refused where a whole number is
    wanted.

    Break: config.py: Decimal(a) * UNITS[u] =>
    Decimal(float(a)) * UNITS[u] * Decimal("1.0000001")
    """
    assert config.number(text) == value
    if value != int(value):
        with pytest.raises(ValueError, match="a whole number is wanted"):
            config.number(text, int)


@pytest.mark.parametrize("text", [
    "2h30", "2x", "", "-", "2^9999999", "1e9999999", "h", "1M2K", "1h2M", "2^", "2^-1", "1 2",
    "1,000", "nan", "inf", "+-3", "--3",
])
def test_no_number(text):
    """What is no number is refused with examples of what is.

    Break: config.py: set(units) <= set("smhd") => True
    """
    with pytest.raises(ValueError, match="is not a number; write 300"):
        config.number(text)


def test_flags():
    """Flags take human numbers, switches and lists.

    Break: config.py: instance_from_str=lambda args: number(args[0], info.type) =>
    instance_from_str=lambda args: info.type(args[0])
    """
    argv = "--steps 2Ki --warmup_steps=50% --seed 2^5 --no-qk_norm --data a b --nan skip --fsdp -1"
    assert config.parse(argv.split()) == Config(
        steps=2048, warmup_steps=0.5, seed=32, qk_norm=False, data=("a", "b"), nan="skip")
    assert config.parse([]) == Config()


@pytest.mark.parametrize("argv", [
    "--config gpt2-124m --steps 7", "--config=gpt2-124m --steps=7", "--steps 7 --config gpt2-124m",
    "--config debug --config gpt2-124m --steps 7",
])
def test_config_flag_preset(argv):
    """--config sets the defaults of all flags, wherever it stands; a flag beside it has the last
    word.

    Break: config.py: load(chosen[-1]) if => load(chosen[0]) if
    """
    wanted = config.PRESETS["gpt2-124m"] | dict(steps=7, config="gpt2-124m")
    assert config.parse(argv.split()) == Config(**wanted)


def test_config_flag_file(tmp_path):
    """--config reads what to_json wrote, and a file of a few keys; flags override both.

    Break: config.py: return from_json(Path(name).read_text(), name) => return Config()
    """
    path = tmp_path / "run.json"
    for cfg in (Config(lr=0.25, steps=9, data=("x",)), Config(steps=9)):
        path.write_text(config.to_json(cfg))
        wanted = dataclasses.replace(cfg, lr=0.5, config=str(path))
        assert config.parse(["--config", str(path), "--lr", "0.5"]) == wanted
    path.write_text('{"steps": 9}')
    assert config.parse([f"--config={path}"]) == Config(steps=9, config=str(path))


def test_all_faults_at_once():
    """One error lists every fault, of fields by themselves and of fields together, with what is
    legal instead.

    Break: config.py: faults += _multiple("n_heads", cfg.n_heads => _multiple("n_heads", cfg.n_heads
    """
    bad = dict(d_model=100, n_heads=8, n_kv_heads=3, optimizer="adamv", allow_change=("stepz",))
    both = ["d_model 100: must be a multiple of", "96 or 112",
            "n_heads 8: must be a multiple of n_kv_heads = 3; nearest: 6 or 9",
            "optimizer 'adamv': unknown (nearest: adamw)",
            "allow_change 'stepz': no such field (nearest: steps)"]
    mesh = ["mesh dp=3 fsdp=-1", "3 devices do not divide the 8 at hand"]
    batch = ["batch_size 10: must be a multiple of micro_batches x dp x fsdp x ep = 16; "
             "nearest: 16"]
    for change, words in ((dict(dp=3), mesh), (dict(batch_size=10, micro_batches=2), batch)):
        said = fault(Config(**bad | change))
        assert [w for w in both + words if w not in said] == [], said


@pytest.mark.parametrize("change, words", [
    (dict(dp=3, fsdp=1), "make the 8 at hand"),
    (dict(dp=-1, fsdp=-1), "only one mesh axis"),
    (dict(tp=0), "tp 0: must be at least 1, or -1"),
    (dict(tp=8), "n_heads 4: must be a multiple of tp x sp = 8; nearest: 8"),
    (dict(sp=2, seq_len=127),
     "seq_len 127: must be a multiple of sp = 2; nearest: 126 or 128"),
    (dict(ep=2), "ep 2: this model has no experts to spread; set --ep 1, or --n_experts"),
    (dict(ep=4, n_experts=6), "ep 4: must divide n_experts = 6; nearest: 3"),
    (dict(n_experts=2, experts_per_token=3), "experts_per_token 3: must be at most n_experts 2"),
    (dict(n_experts=2, mlp_tiles=2), "mlp_tiles 2: must be 1 with n_experts 2"),
    (dict(mlp_tiles=3), "mlp_tiles 3: must divide seq_len / sp = 128; nearest: 2"),
    (dict(slices=3), "slices 3: must divide fsdp = 8; nearest: 2"),
    (dict(loss_norm="token"), "loss_norm 'token': a number above 0 is wanted, or nearest: tokens"),
    (dict(loss_norm="0.0"), "loss_norm '0.0': a number above 0 is wanted"),
    (dict(steps=0), "steps 0: must be at least 1"),
    (dict(profile="22:20"), "profile '22:20': first:last is wanted"),
    (dict(lr=-1.0), "lr -1.0: must be at least 0"),
    (dict(b1=1.0), "b1 1.0: must be in [0, 1)"),
    (dict(top_p=1.5), "top_p 1.5: must be at most 1"),
    (dict(scale=0.0), "scale 0.0: must be above 0"),
    (dict(head_dim=31), "head_dim 31: must be even"),
    (dict(process_id=1), "need --coordinator"),
    (dict(coordinator="a:1", n_processes=2, process_id=2),
     "process_id 2: must be below n_processes 2"),
    (dict(schedule="cosin"), "schedule 'cosin': unknown (nearest: cosine)"),
    (dict(steps=1.5), "steps 1.5: int is wanted"),
])
def test_each_fault(change, words):
    """A value out of bounds is refused by name, with its rule; the config without it is fine on 8
    devices.

    Break: config.py: for n in "val_frac b1 b2 label_smoothing" =>
    for n in "val_frac b2 label_smoothing"
    """
    config.validate(Config(), 8, CHOICES)
    assert words in fault(Config(**change))


def test_what_would_do_nothing_is_refused():
    """Knobs of experts and of low-rank updates where there are none, each by name; low-rank updates
    of no weight; a plan of an evaluation.

    Break: config.py: if not getattr(cfg, switch) => if getattr(cfg, switch)
    """
    for change, words in (
            (dict(router_z=0.1, lora_alpha=8.0),
             ("router_z 0.1: changes nothing with n_experts 0",
              "lora_alpha 8.0: changes nothing with lora_rank 0")),
            (dict(lora_rank=2, lora_targets=()), ("lora_targets (none): lora_rank 2 needs some",)),
            (dict(mode="eval", plan_sweep=3), ("mode eval: a plan is of training",))):
        said = fault(Config(**change))
        assert all(w in said for w in words), said
    config.validate(Config(router_z=0.1, n_experts=4, lora_alpha=8.0, lora_rank=2), 8, CHOICES)


@pytest.mark.parametrize("change", [
    dict(d_model=100, n_heads=8), dict(d_model=100, n_heads=6),
    dict(n_heads=6, n_kv_heads=4, head_dim=8), dict(n_heads=6, head_dim=8, tp=4),
    dict(batch_size=10), dict(batch_size=30, micro_batches=2), dict(seq_len=127, sp=2),
    dict(scale=0.3), dict(scale=0.6, d_model=96, n_heads=6, n_kv_heads=2),
])
def test_nearest_is_legal(change):
    """Whatever an error calls the nearest legal values, each of them is legal.

    Break: config.py: -(-value // of) * of} => value + 1}
    """
    said = fault(Config(**change))
    name, kind = said.removeprefix("config: ").split()[0], typing.get_type_hints(Config)
    for value in re.search(r"nearest: ([\d.]+)(?: or ([\d.]+))?", said).groups():
        if value is not None:
            config.validate(Config(**change | {name: kind[name](value)}), 8, CHOICES)


def test_scale():
    """scale multiplies widths and head counts; head width, depth and vocabulary stay. Derived
    again, nothing changes.

    Break: config.py: n_kv_heads=cfg.n_kv_heads or cfg.n_heads) => n_kv_heads=0)
    """
    cfg = Config(d_model=256, d_ff=512, n_heads=8, n_kv_heads=4, n_layers=3, vocab_size=100,
                 scale=2.5)
    config.validate(cfg, 8, CHOICES)
    got = config.derive(cfg)
    assert (got.d_model, got.d_ff, got.n_heads, got.n_kv_heads) == (640, 1280, 20, 10)
    assert (got.head_dim, got.n_layers, got.vocab_size, got.scale) == (32, 3, 100, 1.0)
    assert config.derive(got) == got
    tuned = config.derive(Config(lora_rank=2, freeze=("!embed",), loss_norm="1Ki"))
    assert tuned.freeze == ("*", "!*.lora_?", "!embed") and float(tuned.loss_norm) == 1024
    assert config.derive(tuned) == tuned
    assert config.derive(Config(d_model=256, n_heads=8, scale=0.5)).n_kv_heads == 4


@pytest.mark.parametrize("scale", [0.3, 1.125, 0.25, 1e-12])
def test_scale_that_splits_a_head(scale):
    """A scale that would leave a part of a head, or none, is an error.

    Break: config.py: > 1e-9 => > 1e9
    """
    assert f"scale {scale}: " in fault(Config(d_model=256, n_heads=4, n_kv_heads=2, scale=scale), 1)


@pytest.mark.parametrize("name", config.PRESETS)
def test_presets(name):
    """Every preset can run on one device, and has the parameters that its name promises.

    Break: config.py: d_ff=28672 => d_ff=28000
    """
    cfg = dataclasses.replace(config.load(name), scale=1.0)
    config.validate(cfg, 1, CHOICES)
    cfg = config.derive(dataclasses.replace(cfg, vocab_size=cfg.vocab_size or 256))
    n = sum(prod(shape) for shape, *_ in model.param_table(cfg).values())
    promised = {"gpt2-124m": (124e6, 0.02), "llama-8b": (8.03e9, 0.01),
                "llama-70b": (70.55e9, 0.01), "llama-405b": (405.85e9, 0.01),
                "qwen3-0.6b": (0.596e9, 0.01), "qwen3-8b": (8.19e9, 0.01),
                "qwen3-30b-a3b": (30.53e9, 0.01), "mixtral-8x7b": (46.7e9, 0.01)}
    wanted, within = promised.get(name, (n, 0))
    assert abs(n - wanted) <= within * wanted


def test_changes():
    """Each difference that matters is listed with both values; allow_change lets a change of course
    through, never of shape.

    Break: config.py: name not in new.allow_change: => True:
    """
    old = json.loads(config.to_json(Config(data=("a",))))
    new = Config(data=("b",), d_model=256, lr=0.5)
    with pytest.raises(ValueError) as e:
        config.changes(old, new)
    for words in ("data was ['a'], is ['b']", "d_model was 128, is 256", "lr was 0.002, is 0.5",
                  "--allow_change lr"):
        assert words in str(e.value)
    assert "seed" not in str(e.value)
    config.changes(old, Config(data=("b",), lr=0.5, allow_change=("data", "lr")))
    with pytest.raises(ValueError, match="lr was 0.002, is 0.5"):
        config.changes(old, Config(data=("b",), lr=0.5, allow_change=("data",)))
    with pytest.raises(ValueError, match="d_model was 128, is 256"):
        config.changes(old, Config(data=("a",), d_model=256, allow_change=("d_model",)))


def test_changes_that_are_free():
    """More steps, another mesh, other microbatches or a later save are no change of a run.

    Break: config.py: COURSE = ("seed => COURSE = ("steps seed
    """
    old = json.loads(config.to_json(Config()))
    config.changes(old, Config(steps=9, epochs=2.0, dp=2, micro_batches=2, save_every=7,
                               remat="full", mlp_tiles=2, moments_on="host", slices=2,
                               watch=("*",), out_dir="elsewhere"))


def test_every_field_has_a_fate():
    """What names fields in words names real ones, and no field is both of shape and of course.

    Break: config.py: vocab_size qk_norm => vocab_sise qk_norm
    """
    names = [f.name for f in dataclasses.fields(Config)]
    assert set(config.SHAPE + config.COURSE + list(config.MESH)) <= set(names)
    assert len(set(config.SHAPE + config.COURSE)) == len(config.SHAPE + config.COURSE)
