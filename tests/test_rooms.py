# SPDX-License-Identifier: Apache-2.0
"""Optional features are rooms: each can be deleted, with its fields and the few places that name
them, and the rest trains, resumes, evaluates and exports as before.
"""
import ast
import contextlib
import functools
import importlib
import json
import re
import subprocess
import sys
import traceback
from itertools import combinations

import pytest

import config
import test_names
from conftest import ROOT, on_devices_of_the_mesh

pytestmark = pytest.mark.house  # a fork may leave out all of these

MOST_PLACES = 10  # outside of its rooms and of config.py that a deletion may change
# A small model: launched, resumed, evaluated and exported.
JOB = ("--n_layers 1 --d_model 16 --n_heads 2 --seq_len 16 --batch_size 2 --eval_every 1 "
       "--eval_batches 1 --save_every 1 --log_every 1 --sample_tokens 0 --optimizer sgd "
       "--dtype float32")
MODES = ("--steps 1", "--steps 2", "--mode eval", "--mode export --export {out_dir}/hf")

# {banners of the rooms of a feature, in any of the six files: what else goes with it, by name: its
# fields, and rows of tables}
FEATURES = {
    "trackers": "track",
    "plot": "",
    "profiler": "profile profile_span",
    "hooks from files": "",
    "dynamic sources of parameters": "reload_every reload",
    "best checkpoint": "keep_best",
    "branches of a run": "branch_from _branch_values parse_branch",
    "validation data that comes later": "",
    "LoRA": "lora_rank lora_alpha lora_targets",
    "experts": "n_experts experts_per_token capacity_factor router_balance router_z mixtral-8x7b "
               "qwen3-30b-a3b mixtral qwen3_moe",
    "loss in tiles": "logit_tiles",
    "MLP in tiles": "mlp_tiles",
    "rotary scaling": "rope_factor rope_scaling rope_original_len rope_attn_factor rope_query_beta needs_len",
    "dropout": "dropout",
    "label smoothing": "label_smoothing",
    "rematerialization": "remat",
    "attention by cuDNN, attention by Pallas": "",
    "attention by blocks": "",
    "document mask": "",
    "loss scaling for float16": "",
    "optimizer in host memory": "offload_optimizer",
    "weight statistics": "watch",
    "evaluation batches of another size": "eval_batch_size",
    "mixtures": "",
    "examples": "",
    "values per example": "examples_file",
    "names on the Hub": "",
    "data in buckets": "",
    "locks of buckets": "",
    "logs of all processes": "log_all_processes",
    "parameters in bfloat16": "",
    "layers that differ": "",
}
# Copy k of the project lacks the features that have k here. Of two features one is missing in a
# copy that has the other.
COPIES = dict(zip(FEATURES, combinations(range(8), 4)))

# {feature: [(file, text, what stands there instead)]}, where to delete the place is not enough.
EDITS = {
    "branches of a run": [
        ("config.py", "from_branch = _branch_values(kind(**typed))", "from_branch = {}"),
        ("config.py", "default, _branch_values(cfg), ", "default, "),
    ],
    "validation data that comes later": [
        ("train.py", "= val_data_at(run, step, progress)", '= run["val_data"]'),
    ],
    "LoRA": [
        ("train.py", '    "init_names": model.names_to_load,\n',
         '    "init_names": lambda table, saved, cfg: set(table),\n'),
        ("train.py", "model.merge_lora(params, cfg)", "params"),
        ("train.py", "fields, _ = read_adapter(path)", "fields = {}"),
    ],
    "experts": [
        ("config.py", '"experts_per_token") + 1]', '"layer_types") + 1]'),
    ],
    "MLP in tiles": [("model.py", " / max(cfg.mlp_tiles, 1)", "")],
    "rotary scaling": [("model.py", "75.0455", "96.3867")],  # of HF_PROBES
    "rematerialization": [("model.py", '"offload": 0}[cfg.remat]', '"offload": 0}["none"]')],
    "evaluation batches of another size": [
        ("train.py", 'config.evaluation_config(setup["cfg"])', 'setup["cfg"]'),
    ],
    "values per example": [
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


def words_of(node, parent):
    """The names in one node of a syntax tree: a name, "module.name", ".field" or a text."""
    match node:
        case ast.Name(name):
            return {f".{name}"} if isinstance(parent, ast.AnnAssign) else {name}
        case ast.Attribute(ast.Name(module), name):
            return {f"{module}.{name}", f".{name}"}
        case ast.Attribute(_, name):
            return {f".{name}"}
        case ast.Constant(str(text)):
            return {repr(text)}
        case ast.keyword(str(name)):
            return {f".{name}"}
    return set()


def place_of(node, parent, span, text_of):
    """(start, end, new text), if the node can be deleted in its parent, or else None."""
    match parent:
        case _ if not hasattr(node, "lineno"):
            return None
        case ast.BoolOp(ast.Or()):
            return *span(node), "False"
        case ast.Assign(value=ast.BoolOp(ast.And()) as value) if node is value:
            return *span(node), "False"
        case ast.BoolOp(ast.And()) if isinstance(node, ast.UnaryOp):
            return *span(node), "True"
        case ast.If(test, orelse=[]) if node is test and text_of(parent).startswith("if"):
            return *span(parent), "pass"
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if node is test:
            return *span(node), str(isinstance(node, ast.UnaryOp))
        case ast.IfExp(_, body, other) if node is body:
            return *span(parent), text_of(other)
        case ast.Set([_]):
            return *span(parent), "set()"
        case ast.Set() | ast.Tuple(ctx=ast.Load()) | ast.List(ctx=ast.Load()):
            return *span(node), ""
        case ast.Dict(keys, values) if node in values:
            key = keys[values.index(node)]
            return span(key or node)[0] - 2 * (key is None), span(node)[1], ""
        case ast.Dict(keys, values):
            return span(node)[0], span(values[keys.index(node)])[1], ""
    if isinstance(node, ast.keyword):
        return *span(node), ""
    if isinstance(node, ast.stmt) and "body" not in node._fields:
        return *span(node), "pass"
    return None


@functools.cache
def places(file):
    """{word: the smallest places of a file that can be deleted with it}."""
    text = (ROOT / file).read_bytes()
    starts = [0, 0]  # of each line, from line 1
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node):
        return starts[node.lineno] + node.col_offset, starts[node.end_lineno] + node.end_col_offset

    def text_of(node):
        return text[slice(*span(node))].decode()

    found = {}

    def walk(node, parent, place):
        place = place_of(node, parent, span, text_of) or place
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append((*span(node), "pass"))
            place = None
        for word in words_of(node, parent):
            found.setdefault(word, []).append(place)
        for child in ast.iter_child_nodes(node):
            walk(child, node, place)

    walk(ast.parse(text), None, None)
    return found


def room_spans(file, banners):
    """[(start, end, "")] of these rooms of a file, and the names that they define."""
    lines = (ROOT / file).read_bytes().splitlines(keepends=True)
    rooms = test_names.rooms_of(file)
    spans, names = [], set()
    ends = [first for first, _ in rooms[1:]] + [len(lines) + 1]
    for (first, banner), end in zip(rooms, ends):
        if banner in banners:
            text = b"".join(lines[first - 1:end - 1]).partition(b"\nif __name__")[0]
            start = sum(map(len, lines[:first - 1]))
            spans.append((start, start + len(text), ""))
            names |= test_names.definitions(ast.parse(text)).keys()
    return spans, names


def without(features):
    """({file: its text without these features}, the number of places that are deleted outside of
    their rooms and of config.py).
    """
    banners = {banner for feature in features for banner in feature.split(", ")}
    there = {banner for file in test_names.FILES for _, banner in test_names.rooms_of(file)}
    assert banners <= there, f"edit FEATURES: no section {banners - there}"
    rooms, words = {}, {file: set() for file in test_names.FILES}
    for file in test_names.FILES:
        rooms[file], names = room_spans(file, banners)
        module = file.removesuffix(".py").replace("step", "steplib")
        words[file] |= names
        words["train.py"] |= {f"{module}.{name}" for name in names}
    for feature in features:
        for word in FEATURES[feature].split():
            for file in words:
                words[file] |= {f".{word}", repr(word), word}
    texts, n_places = {}, 0
    for file in test_names.FILES:
        text = (ROOT / file).read_bytes()
        fixed = rooms[file]
        for feature in features:
            for edited, old, new in EDITS.get(feature, ()):
                if edited == file:
                    assert text.count(old.encode()) == 1, (
                        f"edit EDITS in tests/test_rooms.py: {file} must have this once: {old}")
                    start = text.index(old.encode())
                    fixed.append((start, start + len(old.encode()), new))
        found = [place for word in words[file] for place in places(file).get(word, ())]
        found = [place for place in found if place]  # another statement with it is deleted?
        found = [(start, end, new) for start, end, new in found
                 if not any(a < end and start < b for a, b, _ in fixed)]
        end_of_last = 0
        parts = []
        for start, end, new in sorted({*fixed, *found}, key=lambda p: (p[0], -p[1])):
            if start < end_of_last:
                continue
            parts += [text[end_of_last:start], new.encode()]
            comma = re.match(rb"\s*,", text[end:]) if new == "" else None
            end_of_last = end + len(comma[0] if comma else b"")
            n_places += file != "config.py" and (start, end, new) not in rooms[file]
        texts[file] = b"".join([*parts, text[end_of_last:]]).decode()
    return texts, n_places


def use(features, folder, monkeypatch, cache_dir):
    """Write the project without these features into a folder, and run JOB in all MODES with it. The
    losses and digests of all its rows, or the traceback of what failed.
    """
    folder.mkdir()
    for file, text in without(features)[0].items():
        (folder / file).write_text(text)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        for file in test_names.FILES:
            patch.delitem(sys.modules, file.removesuffix(".py"))
        try:
            train = importlib.import_module("train")
            train.setup_run = on_devices_of_the_mesh(train.setup_run)
            for mode in MODES:
                argv = f"{JOB} {mode} --out_dir {{out_dir}} --cache_dir {cache_dir}"
                train.main(train.config.parse(argv.format(out_dir=folder / "out").split()))
        except Exception:
            return traceback.format_exc()
    rows = [json.loads(line) for line in (folder / "out/metrics.jsonl").open()]
    kept = ("event", "step", "loss", "grad_norm", "val_loss", "digest")
    return [{name: row[name] for name in kept if name in row} for row in rows]


@pytest.mark.slow
def test_without_features_the_rest_does_what_it_did(tmp_path, cache_dir, monkeypatch):
    """In copies that lack half of the features, in all ways of which two features differ, no name
    is undefined, losses and digests are bit-identical, and all modes run.

    Break: train.py: OBSERVERS = (jsonl, trace_profile, console, => OBSERVERS = (jsonl,
    """
    expected = use([], tmp_path / "all", monkeypatch, cache_dir)
    assert isinstance(expected, list), expected
    failed = {}
    for copy in range(8):
        features = [feature for feature, copies in COPIES.items() if copy in copies]
        found = use(features, tmp_path / f"{copy}", monkeypatch, cache_dir)
        if found != expected:
            failed[copy] = found
    suspects = [feature for feature, copies in COPIES.items() if failed.keys() >= {*copies}]
    assert not failed, f"{failed}\n{suspects}"
