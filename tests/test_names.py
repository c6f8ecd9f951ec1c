# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that a machine can check: files, banners, jumps, words, shape suffixes, lint.
"""
import ast
import io
import re
import subprocess
import sys
import tokenize

import jax
import jax.numpy as jnp
import pytest

import config
import model
import mutate
from conftest import ROOT

pytestmark = pytest.mark.house  # a fork may leave out all of these

T, N_NEW = 11, 13
SIZES = {"B": 5, "D": 29, "F": 19, "N": 6, "K": 3, "G": 2, "H": 10, "V": 23, "L": 7, "1": 1,
         "E": 31, "P": 1, "n": 8, "t": 2, "s": 2}


def locals_that_lie(call, lengths):
    """Wrong names, and all names seen, of model.py while `call` runs.

    lengths: the pairs that (T, S) may be.
    """
    wrong, seen = set(), set()

    def at_return(frame, event, _):
        if event != "return" or frame.f_code.co_filename != model.__file__:
            return
        for name, value in frame.f_locals.items():
            suffix = re.search(r"_([BTSDFNKHVLEAGPC1nts]+)$", name)
            if suffix and hasattr(value, "shape"):
                seen.add(name)
                legal = [tuple((SIZES | {"T": t, "S": s, "C": t}).get(c) for c in suffix[1])
                         for t, s in lengths]
                if value.shape not in legal:
                    wrong.add(f"{frame.f_code.co_name}: {name} has shape {value.shape}, "
                              f"not {legal}")

    sys.setprofile(at_return)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(wrong), seen


def test_suffixes_are_shapes(monkeypatch):
    """Each suffixed local of loss_fn and generate has the dims of its letters.

    T is the prompt's length, half of it in attention, 1 when decoding, or the new tokens; S is T,
    the first half, or the length of the cache; C, the capacity of an expert, is all T. By blocks
    attention has n parts of t queries and s keys.
    Break: model.py: q_BKGTH = H**-0.5 * q_BNTH.reshape(B, K, N // K, T, H) =>
    q_BKGTH = H**-0.5 * q_BNTH.reshape(B, N // K, K, T, H).swapaxes(1, 1)
    """
    cfg = config.derive_text(config.Config(
        d_model=SIZES["D"], n_heads=SIZES["N"], n_kv_heads=SIZES["K"], head_dim=SIZES["H"],
        d_ff=SIZES["F"], n_layers=SIZES["L"], vocab_size=SIZES["V"], qkv_bias=True,
        n_experts=SIZES["E"], capacity_factor=0.0, label_smoothing=0.1, rope_factor=2.0,
        dtype="float32"))
    key, ids = jax.random.key(0), jax.ShapeDtypeStruct((SIZES["B"], T), jnp.int32)
    lengths = jax.ShapeDtypeStruct((SIZES["B"],), jnp.int32)
    params = jax.eval_shape(lambda k: model.init(k, cfg), key)
    def loss(p, x):
        return model.loss_fn(p, {"tokens": x, "labels": x}, cfg)
    # Unjitted: a trace in the cache of jit would run no Python.
    def generate(p, x, n, k):
        return model._generate(p, x, n, cfg, k, N_NEW)
    wrong, seen = locals_that_lie(lambda: jax.eval_shape(loss, params, ids),
                                    [(T, T), (6, 6), (5, T)])
    more_wrong, more_seen = locals_that_lie(
        lambda: jax.eval_shape(generate, params, ids, lengths, key),
        [(t, T + N_NEW) for t in (T, 1, N_NEW)])
    monkeypatch.setattr(model, "DENSE_LEN", 0)
    packed = jax.jit(jax.grad(lambda p, x: model.loss_fn(
        p, {"tokens": x, "labels": x, "segments": x}, cfg)[0]["objective"]))
    in_blocks, names = locals_that_lie(lambda: jax.eval_shape(packed, params, ids), [(T, T)])
    assert not wrong + more_wrong + in_blocks, (
        "rename these, or add the letters of new dims to SIZES in tests/test_names.py:\n"
        + "\n".join(wrong + more_wrong + in_blocks))
    assert len(seen | more_seen) >= 20, sorted(seen | more_seen)
    assert {"ds_BKGts", "scale_BKGt1", "high_Bn", "ids_Bnt"} <= names, sorted(names)


def test_every_break_is_a_line_of_the_code():
    """Each stands exactly once in its file, so that tests/mutate.py can apply it.

    Break: train.py: wait_until_idle=lambda: => wait_until_idle = lambda:
    """
    named, missing = mutate.named_breaks()
    wrong = [f"{test}: {old!r} stands {count} times in {file}" for test, file, old, _ in named
             if (count := (ROOT / file).read_text().count(old)) != 1]
    assert not wrong + missing, (
        "edit the line `Break: FILE: OLD => NEW` in the docstring of these tests, so that OLD is "
        "part of one line of FILE:\n" + "\n".join(wrong + missing))


FILES = ("config.py", "model.py", "step.py", "data.py", "ckpt.py", "train.py")

def rooms_of(file):
    """[(first line, banner)] of a file: its spine, "", and the rooms below `# ---- optional`."""
    lines = (ROOT / file).read_text().splitlines()
    start = lines.index("# ---- optional")
    rooms = [(1, "")]
    for i, line in enumerate(lines[start:], start + 1):
        if line.startswith("# ---- "):
            rooms.append((i, line.removeprefix("# ---- ")))
    return rooms


def room_at(rooms, line):
    return [banner for first, banner in rooms if first <= line][-1]


def definitions(tree):
    """{name: line} of the functions, classes and constants of a module."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.lineno
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = node.lineno
    return found


def test_each_file_has_a_spine_and_rooms_with_banners():
    """One line `# ---- supporting`, later one `# ---- optional`, below which all is in a room.

    Break: ckpt.py: # ---- verify => # verify
    """
    others = {path.name for path in ROOT.glob("*.py")} ^ {*FILES}
    assert not others, f"{others}: add new files to FILES in tests/test_names.py"
    wrong = []
    for file in FILES:
        source = (ROOT / file).read_text()
        for layer in ("supporting", "optional"):
            assert source.count(f"\n# ---- {layer}\n") == 1, (file, layer)
        assert source.index("\n# ---- supporting\n") < source.index("\n# ---- optional\n"), file
        banners = [banner for _, banner in rooms_of(file)]
        assert len({*banners}) == len(banners), f"{file}: two rooms have one banner"
        for name, line in definitions(ast.parse(source)).items():
            if room_at(rooms_of(file), line) == "optional":
                wrong.append(f"{file}:{line}: {name} stands in no room")
    assert not wrong, "move these below the banner of a room:\n" + "\n".join(wrong)


def opens_without_encoding(path):
    """Lines of a file that open another file as text and do not name its encoding."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name, call = ast.unparse(node.func), ast.unparse(node)
            opens = name == "open" or name.endswith(
                (".fdopen", "TextIOWrapper", ".read_text", ".write_text"))
            is_binary = re.search(r"'[rwax]b\+?'", call)
            if opens and not is_binary and "encoding=" not in call:
                found.append(f"{path.name}:{node.lineno}: {call}")
    return found


def test_text_files_are_utf_8_in_every_locale():
    """Each file that is opened as text names its encoding.

    Break: ckpt.py: partial_path.write_text(text, encoding="utf-8") => partial_path.write_text(text)
    """
    paths = [*ROOT.glob("*.py"), *ROOT.glob("tests/recipes/*.py"), ROOT / "tests/plan.py",
             ROOT / "tests/compare.py", ROOT / "tests/check.py"]
    assert len(paths) > 15
    wrong = [line for path in paths for line in opens_without_encoding(path)]
    assert not wrong, 'add encoding="utf-8":\n' + "\n".join(wrong)


def test_one_class_and_star_imports():
    """Config is the only class of the six files, and only train.py imports one of the others.

    Break: data.py: import zlib => import zlib, config
    """
    modules = {file.removesuffix(".py") for file in FILES}
    for file in FILES:
        tree = ast.parse((ROOT / file).read_text())
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        assert classes == (["Config"] if file == "config.py" else []), f"{file} has {classes}"
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
        allowed = modules - {"train"} if file == "train.py" else set()
        assert imported & modules == allowed, f"{file} imports {imported & modules}"


# Words of a dialect that this project once had, and the plain word for each.
WORDS = {
    "told": "logged, printed", "at hand": "available", "passed over": "skipped",
    "passing over": "skipping", "under way": "pending", "goes on": "continues",
    "go on": "continue", "went on": "continued", "wish": "stop request",
    "wishes": "stop requests", "undid": "redone", "aloud": "with a warning",
    "theirs": "the name of the other", "mine": "local", "held-out": "validation",
    "fault": "error", "faults": "errors", "left out": "excluded, skipped",
    "leaves out": "skips", "to the bit": "bit-identical", "sign of life": "heartbeat",
    "turn by turn": "interleaved", "for ever": "permanently", "damaged": "corrupted",
    "there is none": "what is missing", "afresh": "again",
}


def prose(path):
    """(line, text) of the comments and strings of a Python file, or of all of another file."""
    text = path.read_text()
    if path.suffix != ".py":
        return list(enumerate(text.splitlines(), 1))
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            found += enumerate(token.string.splitlines(), token.start[0])
    return found


def test_no_word_of_the_dialect():
    """Comments, docstrings, messages and documents use the words of the field.

    Break: step.py: # ---- digest of the state => # ---- digest of the state, told
    """
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    paths = [*ROOT.glob("*.py"), *ROOT.glob("*.md"), *(ROOT / "tests").rglob("*.py"),
             *(ROOT / "tests").glob("*.md")]
    wrong = []
    for path in paths:
        if path.name == "test_names.py":  # it has the list
            continue
        for line, text in prose(path):
            for match in pattern.finditer(text):
                plain = WORDS[match[0].lower()]
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}; say {plain}")
    assert not wrong, "write another word, or edit WORDS here:\n" + "\n".join(wrong)


def test_ruff():
    """Ruff finds nothing in the project under the rules of .ruff.toml.

    Break: data.py: import zlib => import string, zlib
    """
    run = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format",
                          "concise", str(ROOT)], capture_output=True, text=True)
    assert run.returncode == 0, (
        "run `python -m ruff check --fix`, or edit .ruff.toml:\n" + run.stdout + run.stderr)
