# SPDX-License-Identifier: Apache-2.0
"""Optional features are rooms: each can be deleted, with the few lines that use it, and the rest
trains as before.
"""
import ast
import json
import subprocess
import sys

import pytest

import test_names
from conftest import ROOT

pytestmark = pytest.mark.house  # a fork may leave out all of these

MOST_LINES = 10  # lines outside its rooms that a deletion may change
# The default job, cut short: four steps of a small model of two layers.
JOB = ("--steps 4 --n_layers 2 --d_model 64 --n_heads 4 --seq_len 64 --batch_size 8 --eval_every 2 "
       "--eval_batches 1 --save_every 2 --log_every 1 --sample_tokens 0")

# Banners of the rooms of each feature, in any of the six files.
FEATURES = [
    "trackers", "plot", "profiler", "hooks from files", "dynamic sources of parameters",
    "best checkpoint", "branches of a run", "validation data that comes later", "LoRA", "experts",
    "loss in tiles", "MLP in tiles", "rotary scaling", "dropout", "label smoothing",
    "rematerialization", "attention by cuDNN, attention by Pallas", "attention by blocks",
    "document mask", "loss scaling for float16", "optimizer in host memory", "weight statistics",
    "evaluation batches of another size", "mixtures", "examples", "values per example",
    "names on the Hub", "data in buckets", "locks of buckets", "logs of all processes",
    "parameters in bfloat16", "layers that differ"]

# {feature: [(file, text, what stands there instead)]}, where a statement that uses a room does more
# than that. All others become `pass`.
EDITS = {
    "trackers": [
        ("train.py", '        "track": TRACKERS,\n', ""),
        ("train.py", "[*OBSERVERS, *(TRACKERS[name] for name in cfg.track)]", "OBSERVERS"),
    ],
    "plot": [("train.py", "console, plot)", "console)")],
    "profiler": [
        ("train.py", "(jsonl, trace_profile, console", "(jsonl, console"),
        ("train.py", "[trace_profile, log_of_process]", "[log_of_process]"),
    ],
    "logs of all processes": [
        ("train.py", "makers = [trace_profile, log_of_process] if cfg.log_all_processes else []",
         "makers = []"),
    ],
    "validation data that comes later": [
        ("train.py", "= val_data_at(run, step, progress)", '= run["val_data"]'),
    ],
    "LoRA": [
        ("train.py", '    "init_names": model.names_to_load,\n',
         '    "init_names": lambda table, saved, cfg: set(table),\n'),
        ("train.py", "model.merge_lora(params, cfg)", "params"),
        ("train.py", "fields, _ = read_adapter(path)", "fields = {}"),
        ("train.py", "open_adapter(path, cfg) or open_hf(path, cfg)", "open_hf(path, cfg)"),
    ],
    "loss scaling for float16": [
        ("step.py", 'fp16_train_step if cfg.dtype == "float16" else train_step', "train_step"),
    ],
    "evaluation batches of another size": [
        ("train.py", 'config.evaluation_config(setup["cfg"])', 'setup["cfg"]'),
    ],
    "examples": [
        ("data.py", '        "preview": lambda: show_examples(dataset, tokenizer),  '
         "# optional: examples\n", ""),
    ],
    "values per example": [
        ("data.py", '        "examples": partial(examples_in, dataset),  '
         "# optional: values per example\n", ""),
        ("model.py", 'return (sums, counts, {"nats": nats_BT}) if examples else (sums, counts)',
         "return sums, counts"),
    ],
    "names on the Hub": [
        ("train.py", 'Path(data.hub_path(path), "tokenizer.json")', 'Path(path, "tokenizer.json")'),
        ("train.py", 'Path(data.hub_path(path), "config.json")', 'Path(path, "config.json")'),
        ("train.py", "data.hub_path(path, weights=True)", "path"),
        ("train.py", "folder = data.hub_path(path)", "folder = path"),
    ],
    "locks of buckets": [
        ("ckpt.py", "locks.enter_context(lock_bucket(root, out_dir))", "int"),
    ],
}


def used_names(node):
    """The names in a piece of code, as "mix" and "data.mix"."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            found.add(f"{each.value.id}.{each.attr}")
    return found


def without_rooms(file, banners):
    """(the text of a file without these rooms, the names that they define)."""
    text = (ROOT / file).read_text()
    rooms = test_names.rooms_of(file)
    kept = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if line.startswith("if __name__"):
            banners = []
        if test_names.room_at(rooms, number) not in banners:
            kept.append(line)
    names = test_names.definitions(ast.parse(text)).keys()
    text = "".join(kept)
    return text, names - test_names.definitions(ast.parse(text)).keys()


def without_uses(text, names):
    """(the text with `pass` for each statement that uses one of the names, the number of lines)."""
    lines = text.splitlines(keepends=True)
    n_lines = 0
    for node in ast.walk(ast.parse(text)):
        is_simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
        if is_simple and names & used_names(node):
            first, last = node.lineno - 1, node.end_lineno - 1
            lines[first] = " " * node.col_offset + "pass\n"
            lines[first + 1:last + 1] = [""] * (last - first)
            n_lines += last - first + 1
    return "".join(lines), n_lines


def delete(features, folder):
    """Write the project without these features; return how many other lines changed."""
    texts, removed = {}, {}
    banners = {banner for feature in features for banner in feature.split(", ")}
    there = {banner for file in test_names.FILES for _, banner in test_names.rooms_of(file)}
    assert banners <= there, f"edit FEATURES: no section {banners - there}"
    for file in test_names.FILES:
        texts[file], removed[file] = without_rooms(file, banners)
    n_lines = 0
    for feature in features:
        for file, old, new in EDITS.get(feature, ()):
            assert (ROOT / file).read_text().count(old) == 1, (
                f"edit EDITS in tests/test_rooms.py: {file} must have this once: {old}")
            texts[file] = texts[file].replace(old, new)
            n_lines += old.count("\n") + 1
    for file, text in texts.items():
        names = set(removed[file])
        if file == "train.py":
            for other, others in removed.items():
                module = other.removesuffix(".py").replace("step", "steplib")
                names |= {f"{module}.{name}" for name in others}
        text, n_changed = without_uses(text, names)
        n_lines += n_changed
        (folder / file).write_text(text)
    return n_lines


def losses(folder, out_dir, cache_dir):
    """Run the job with the files of a folder; the losses and digests of all its rows."""
    command = [sys.executable, "train.py", *JOB.split(), "--out_dir", out_dir, "--cache_dir",
               cache_dir]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    kept = ("event", "step", "loss", "grad_norm", "val_loss", "digest")
    return [{name: row[name] for name in kept if name in row} for row in rows]


@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_room_no_name_is_undefined(feature, tmp_path):
    """A few lines outside the rooms of a feature change, and then nothing uses them.

    Break: train.py: for name in cfg.track)] => for name in [*cfg.track])]
    """
    n_lines = delete([feature], tmp_path)
    lint = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--no-cache",
         str(tmp_path)], capture_output=True, text=True)
    assert n_lines <= MOST_LINES and lint.returncode == 0, (
        f"{n_lines} lines change; edit EDITS in tests/test_rooms.py, or move what uses {feature!r} "
        f"into its room:\n{lint.stdout}")


@pytest.mark.slow
def test_the_default_job_trains_without_rooms(tmp_path, cache_dir):
    """Without all of these features, losses and digests are bit-identical.

    Break: train.py: OBSERVERS = (jsonl, trace_profile, console, => OBSERVERS = (jsonl,
    """
    found = []
    for name, features in (("all", []), ("none", [*FEATURES])):
        folder = tmp_path / name
        folder.mkdir()
        delete(features, folder)
        found.append(losses(folder, folder / "out", cache_dir))
    assert found[0] == found[1]
