# SPDX-License-Identifier: Apache-2.0
"""Optional features are rooms: each can be deleted, with its fields and the places that name them,
and the rest trains, resumes, evaluates and exports as before.
"""
import ast
import functools
import importlib
import json
import re
import subprocess
import sys
import traceback
from itertools import combinations

import pytest

import test_names
from conftest import ROOT, on_devices_of_the_mesh

pytestmark = pytest.mark.house  # a fork may leave out all of these

MOST_PLACES = 10  # in spines and supporting parts, but for config.py, that name a feature
JOB = ("--n_layers 1 --d_model 16 --n_heads 2 --seq_len 16 --batch_size 2 --eval_every 1 --dtype "
       "float32 --eval_batches 1 --save_every 1 --log_every 1 --sample_tokens 0 --optimizer sgd")
MODES = ("--steps 1", "--steps 2", "--mode eval", "--mode export --export OUT/hf")  # launch, resume

# {banners of the rooms of a feature, in any of the six files: the fields and other names that are
# deleted too}
FEATURES = {
    "LoRA": "lora_rank lora_alpha lora_targets",
    "experts": "n_experts experts_per_token capacity_factor router_balance router_z mixtral-8x7b "
               "qwen3-30b-a3b mixtral qwen3_moe",
    "rotary scaling": "rope_factor rope_scaling rope_original_len rope_attn_factor rope_query_beta "
                      "needs_len stretched_len",
    "branches of a run": "branch_from _branch_values parse_branch",
    "dynamic sources of parameters": "reload_every reload", "profiler": "profile profile_span",
    "trackers": "track", "best checkpoint": "keep_best", "loss in tiles": "logit_tiles",
    "MLP in tiles": "mlp_tiles", "dropout": "dropout", "label smoothing": "label_smoothing",
    "rematerialization": "remat", "optimizer in host memory": "offload_optimizer",
    "weight statistics": "watch", "evaluation batches of another size": "eval_batch_size",
    "values per example": "examples_file", "logs of all processes": "log_all_processes",
} | dict.fromkeys([
    "plot", "hooks from files", "validation data that comes later", "attention by blocks",
    "attention by cuDNN, attention by Pallas", "document mask", "loss scaling for float16",
    "mixtures", "examples", "names on the Hub", "data in buckets", "locks of buckets",
    "parameters in bfloat16", "layers that differ"], "")
# A section: its banner, and all up to the next one.
ROOM = re.compile(r"^# ---- (.*)\n(?s:.*?)(?=^# ---- |^if __name__|\Z)", re.M)
MODULES = {"step.py": "steplib"}  # names in train.py that differ
# Copy k of the project lacks the features that have k here. No two have the same four copies, so
# that of any two features some copy lacks only the first.
COPIES = dict(zip(FEATURES, combinations(range(8), 4)))

# {(feature, file): (text, what stands there instead, ...)}, where deletion is not enough.
EDITS = {
    ("LoRA", "train.py"): (
        "model.names_to_load", "lambda table, saved, cfg: set(table)",
        "model.merge_lora(params, cfg)", "params", "fields, _ = read_adapter(path)", "fields = {}"),
    ("experts", "config.py"): (
        'FIELDS.index("capacity_factor")]', 'FIELDS.index("layer_types") + 1]'),
    ("rotary scaling", "model.py"): ("75.0455", "96.3867"),  # of HF_PROBES
    ("branches of a run", "config.py"): (
        "= _branch_values(kind(**from_file | typed))", "= {}",
        "default | _branch_values(cfg)", "default"),
    ("validation data that comes later", "train.py"): (
        "= val_data_at(run, step)", "= run.val_data"),
    ("MLP in tiles", "model.py"): (" / max(cfg.mlp_tiles, 1)", ""),
    ("rematerialization", "model.py"): ("}[cfg.remat]", '}["none"]'),
    ("evaluation batches of another size", "train.py"): (
        "config.evaluation_config(run.cfg)", "run.cfg"),
    ("values per example", "model.py"): (
        'return (sums, counts, {"nats": nats_BT}) if examples else', "return"),
    ("names on the Hub", "train.py"): (
        'data.hub_path(path), "tokenizer.json"', 'path, "tokenizer.json"',
        'data.hub_path(path), "config.json"', 'path, "config.json"',
        "data.hub_path(path, weights=True)", "path",
        "folder = data.hub_path(path)", "folder = path"),
    ("locks of buckets", "ckpt.py"): ("locks.enter_context(lock_bucket(root, out_dir))", "int"),
}


def names_in(node, parent):
    """The names in one node of a syntax tree: "name", "module.name", ".field" or a quoted text."""
    match node:
        case ast.Name(name):
            return {f".{name}"} if isinstance(parent, ast.AnnAssign) else {name}
        case ast.Attribute(value, name):
            return {f".{name}", f"{getattr(value, 'id', '')}.{name}"}
        case ast.Constant(str(text)):
            return {repr(text)}
        case ast.keyword(str(name)):
            return {f".{name}"}
    return set()


def place_of(node, parent, span):
    """(start, end, what stands there instead), if parent can lack this node, else None."""
    is_test = isinstance(parent, ast.If | ast.While | ast.IfExp) and node is parent.test
    match parent:
        case _ if not hasattr(node, "lineno"):
            return None
        case ast.BoolOp() if not isinstance(node, ast.BoolOp):
            return *span(node), str(isinstance(node, ast.UnaryOp))
        case _ if is_test:
            return *span(node), str(isinstance(node, ast.UnaryOp))
        case ast.IfExp(_, body, other) if node is body:
            return span(body)[0], span(other)[0], ""
        case ast.Set([_]):
            return *span(parent), "set()"
        case ast.Dict(keys, values) if node in values:
            key = keys[values.index(node)]
            return span(key or node)[0] - 2 * (key is None), span(node)[1], ""
        case ast.Dict(keys, values):
            return span(node)[0], span(values[keys.index(node)])[1], ""
        case ast.Set() | ast.Tuple(ctx=ast.Load()) | ast.List(ctx=ast.Load()):
            return *span(node), ""
    if isinstance(node, ast.stmt) and "body" not in node._fields:
        return *span(node), "pass"
    return (*span(node), "") if isinstance(node, ast.keyword) else None


@functools.cache
def places(file):
    """{name: the smallest places of a file that can be deleted with it}."""
    text = (ROOT / file).read_bytes()
    starts = [0, 0]  # of each line, from line 1
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {}

    def span(node):
        return starts[node.lineno] + node.col_offset, starts[node.end_lineno] + node.end_col_offset

    def walk(node, parent, place):
        place = place_of(node, parent, span) or place
        for name in names_in(node, parent):
            found.setdefault(name, []).append(place)
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append((*span(node), "pass"))
            place = None
        for child in ast.iter_child_nodes(node):
            walk(child, node, place)

    walk(ast.parse(text), None, None)
    return found


def delete(features, folder):
    """Write the project without these features; return how many places outside of rooms name them.
    """
    banners = {banner for feature in features for banner in feature.split(", ")}
    words = [word for feature in features for word in FEATURES[feature].split()]
    names = {form for word in words for form in (word, f".{word}", repr(word))}
    found, n_places = set(), 0
    folder.mkdir()
    for file in test_names.FILES:  # train.py is the last
        text = (ROOT / file).read_text()
        optional = text.index("\n# ---- optional\n")
        changes = []  # (start, end, new text)
        defined = set()
        for room in re.finditer(ROOM, text):
            if room[1] in banners and room.start() > optional:
                found.add(room[1])
                changes.append((*room.span(), ""))
                defined |= test_names.definitions(ast.parse(room[0])).keys()
        for feature in features:
            edits = EDITS.get((feature, file), ())
            for old, new in zip(edits[::2], edits[1::2]):
                assert text.count(old) == 1, f"edit EDITS: {file} must have this once: {old}"
                changes.append((text.index(old), text.index(old) + len(old), new))
        named = {place for name in names | defined for place in places(file).get(name, ()) if place}
        changes += [place for place in named if all(
            end <= place[0] or place[1] <= start for start, end, _ in changes)]
        names |= {f"{MODULES.get(file, file[:-3])}.{name}" for name in defined}
        parts, last = [], 0
        for start, end, new in sorted(changes, key=lambda change: (change[0], -change[1])):
            if start >= last:  # else within a larger place
                parts += [text[last:start], new]
                last = end if new else end + len(re.match(r"\s*,|", text[end:])[0])
                n_places += start < optional and file != "config.py"
        (folder / file).write_text("".join([*parts, text[last:]]))
    assert found == banners, f"edit FEATURES: no section {banners - found}"
    return n_places


def use(features, folder, monkeypatch, cache_dir):
    """Run JOB in all MODES in the project without these features: the losses and digests of all
    rows, or the traceback of what failed.
    """
    delete(features, folder)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        for file in test_names.FILES:
            patch.delitem(sys.modules, file[:-3])
        train = importlib.import_module("train")
        train.setup_run = on_devices_of_the_mesh(train.setup_run)
        try:
            for mode in MODES:
                argv = f"{JOB} {mode} --out_dir OUT --cache_dir {cache_dir}"
                train.main(train.config.parse(argv.replace("OUT", f"{folder}/out").split()))
            for preset in train.config.PRESETS:
                train.config.load(preset)
        except Exception:
            return traceback.format_exc()
    rows = [json.loads(line) for line in (folder / "out/metrics.jsonl").open()]
    kept = ("event", "step", "loss", "grad_norm", "val_loss", "digest")
    return [{name: row[name] for name in kept if name in row} for row in rows]


def test_few_places_name_a_feature_and_nothing_needs_it(tmp_path):
    """Without a feature, a few places outside of its rooms are gone, and no name is undefined.

    Break: model.py: y += _lora_product(x, w, name, cfg) =>
    extra = _lora_product(x, w, name, cfg); y += extra
    """
    many = {}
    for i, feature in enumerate(FEATURES):
        n_places = delete([feature], tmp_path / f"{i}-{feature}")
        if n_places > MOST_PLACES:
            many[feature] = n_places
    lint = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--no-cache",
         str(tmp_path)], capture_output=True, text=True)
    assert not many and lint.returncode == 0, (
        f"many places: {many}; edit FEATURES or EDITS in tests/test_rooms.py, or move what uses a "
        f"feature into its room:\n{lint.stdout}")


@pytest.mark.slow
def test_runs_resume_evaluate_and_export_without_features(tmp_path, cache_dir, monkeypatch):
    """In eight copies that each lack half of the features all modes run, presets load, and losses
    and digests are bit-identical.

    Break: config.py: unused("epochs", cfg.epochs, "steps") =>
    unused("epochs", getattr(cfg, f"lora_{'rank'}") * cfg.epochs, "steps")
    """
    expected = use([], tmp_path / "all", monkeypatch, cache_dir)
    failed = {}
    for copy in range(8):
        features = [feature for feature, copies in COPIES.items() if copy in copies]
        found = use(features, tmp_path / f"without-{copy}", monkeypatch, cache_dir)
        if found != expected:
            failed[copy] = found
    suspects = [feature for feature, copies in COPIES.items() if failed.keys() >= {*copies}]
    assert isinstance(expected, list) and not failed, (
        f"suspects: {suspects}\n" + "\n".join(map(str, [expected, *failed.values()])))
