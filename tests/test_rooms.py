# SPDX-License-Identifier: Apache-2.0
"""Optional features are rooms: each can be deleted, with the few lines that call it, and the rest
trains as before.
"""
import json
import subprocess
import sys

import pytest

import test_names
from conftest import ROOT

pytestmark = pytest.mark.house  # a fork may leave out all of these

MOST_LINES = 10  # lines outside its rooms that a deletion may change
# The default job, cut short: four steps of two layers.
JOB = ("--steps 4 --n_layers 2 --eval_every 2 --eval_batches 1 --save_every 2 --log_every 1 "
       "--sample_tokens 0")

# {feature: {"rooms": {file: [banners]}, "edits": [(file, text, what stands there instead)]}}
FEATURES = {
    "trackers": {
        "rooms": {"train.py": ["trackers"]},
        "edits": [
            ("train.py", '        "track": TRACKERS,\n', ""),
            ("train.py", "[*OBSERVERS, *(TRACKERS[name] for name in cfg.track)]", "OBSERVERS"),
        ],
    },
    "plot": {
        "rooms": {"train.py": ["plot"]},
        "edits": [
            ("train.py", "console, plot)", "console)"),
        ],
    },
    "profiler": {
        "rooms": {"train.py": ["profiler"], "step.py": ["profiler"]},
        "edits": [
            ("train.py", "(jsonl, trace_profile, console", "(jsonl, console"),
            ("train.py", "[trace_profile, log_of_process]", "[log_of_process]"),
        ],
    },
    "hooks from files": {
        "rooms": {"train.py": ["hooks from files"]},
        "edits": [("train.py", "    hooks = (*hooks, *load_hooks(cfg.hooks))\n", "")],
    },
    "dynamic sources": {
        "rooms": {"train.py": ["dynamic sources of parameters"]},
        "edits": [
            ("train.py", '            if "reload" in due:\n'
             '                mark_done(progress, "reload", step)\n'
             "                state = reload_params(run, state, step, timers)\n", ""),
        ],
    },
    "best checkpoint": {
        "rooms": {"train.py": ["best checkpoint"]},
        "edits": [
            ("train.py", '    progress["kept_best"] = best_so_far(cfg, first_step, validation)\n',
             ""),
            ("train.py", '    if run["cfg"].keep_best:\n'
             "        keep_if_best(run, state, step, progress, values)\n", ""),
            ("train.py", '        if kind == "best":\n'
             '            meta["best"] = describe_best(run, progress)\n', ""),
            ("train.py", '    if kind == "best" and kind in progress["save_errors"]:\n'
             '        progress["kept_best"] = best_so_far(run["cfg"], save["step"], '
             'run["validation"])\n', ""),
        ],
    },
    "branches of a run": {
        "rooms": {"train.py": ["branches of a run"], "config.py": ["branches of a run"]},
        "edits": [
            ("config.py", "    if cfg.branch_from:\n        branch = _branch_values(cfg)\n", ""),
            ("train.py", "    elif cfg.branch_from:\n"
             "        start |= find_branch(cfg)\n", ""),
        ],
    },
    "steps that are not finite": {
        "rooms": {"train.py": ["steps that are not finite"]},
        "edits": [
            ("train.py", '        if progress["is_finite"]:  # the first one\n'
             "            log_nonfinite(run, step, row[\"objective\"], "
             'metrics.get("finite_grads"))\n', ""),
        ],
    },
    "validation data that comes later": {
        "rooms": {"train.py": ["validation data that comes later"]},
        "edits": [
            ("train.py", "val_data_at(run, step, progress)", 'run["val_data"]'),
        ],
    },
    "LoRA": {
        "rooms": {"model.py": ["LoRA"]},
        "edits": [
            ("model.py", "    if cfg.lora_rank:\n        table |= _lora_rows(table, cfg)\n", ""),
            ("model.py", '    if f"{name}.lora_a" in w:\n'
             "        y += _lora_product(x, w, name, cfg)\n", ""),
            ("train.py", '    "init_names": model.names_to_load,\n',
             '    "init_names": lambda table, saved, cfg: set(table),\n'),
            ("train.py", "model.merge_lora(params, cfg)", "params"),
        ],
    },
    "experts": {
        "rooms": {"model.py": ["experts"]},
        "edits": [
            ("model.py", "    if cfg.n_experts:\n        table |= _expert_rows(table, cfg)\n", ""),
            ("model.py", "        if cfg.n_experts:\n"
             '            y_BTD, router_stats = _experts(y_BTD, w, attn_inputs["segments"], cfg, '
             "decoding)\n        elif cfg.mlp_tiles", "        if cfg.mlp_tiles"),
            ("model.py", "    if cfg.n_experts:\n        sums = _add_router_sums(sums, "
             "router_stats, labels_BT, weights_BT, cfg)\n", ""),
        ],
    },
    "loss in tiles": {
        "rooms": {"model.py": ["loss in tiles"]},
        "edits": [
            ("model.py", "    n_tiles = count_tiles(*labels_BT.shape, cfg)\n    if n_tiles > 1:\n"
             "        sums = _tiled_sums(unembed_DV, x_BTD, labels_BT, weights_BT, cfg, n_tiles)\n"
             "    else:\n"
             "        sums = _loss_sums(unembed_DV, x_BTD, labels_BT, weights_BT, cfg)\n",
             "    sums = _loss_sums(unembed_DV, x_BTD, labels_BT, weights_BT, cfg)\n"),
        ],
    },
    "MLP in tiles": {
        "rooms": {"model.py": ["MLP in tiles"]},
        "edits": [
            ("model.py", "        elif cfg.mlp_tiles > 1 and not decoding:\n"
             "            y_BTD = _mlp_in_tiles(y_BTD, w, cfg)\n", ""),
        ],
    },
    "rotary scaling": {
        "rooms": {"model.py": ["rotary scaling"]},
        "edits": [
            ("model.py", "    if cfg.rope_factor != 1:\n"
             "        freq = _stretch_rope(freq, cfg)\n", ""),
        ],
    },
    "dropout": {
        "rooms": {"model.py": ["dropout"]},
        "edits": [
            ("model.py", "    if train_keys is not None and cfg.dropout:\n"
             '        embedding_keys, weights["dropout_keys"] = _dropout_keys(train_keys, cfg)\n'
             "        x_BTD = _dropout(x_BTD, embedding_keys, cfg)\n", ""),
            ("model.py", '        if "dropout_keys" in w:  # dropout, in training\n'
             '            y_BTD = _dropout(y_BTD, w["dropout_keys"][0], cfg)\n', ""),
            ("model.py", '        if "dropout_keys" in w:  # dropout, in training\n'
             '            y_BTD = _dropout(y_BTD, w["dropout_keys"][1], cfg)\n', ""),
        ],
    },
    "label smoothing": {
        "rooms": {"model.py": ["label smoothing"]},
        "edits": [
            ("model.py", "        if cfg.label_smoothing:\n"
             "            objective_BT += _label_smoothing(logits_BTV, true_BT, cfg)\n", ""),
        ],
    },
    "rematerialization": {
        "rooms": {"model.py": ["rematerialization"]},
        "edits": [
            ("model.py", '    if cfg.remat != "none":\n'
             "        layer = jax.checkpoint(layer, policy=REMAT[cfg.remat])\n", ""),
        ],
    },
    "fused attention": {
        "rooms": {"model.py": ["attention by cuDNN", "attention by Pallas"]},
        "edits": [
            ("model.py", '    if cfg.attention == "cudnn":\n'
             "        return _attend_cudnn(q_BNTH, k_BKTH, v_BKTH, attn_inputs, cfg)\n"
             '    if cfg.attention == "pallas":\n'
             "        return _attend_pallas(q_BNTH, k_BKTH, v_BKTH, attn_inputs, cfg)\n", ""),
        ],
    },
    "attention by blocks": {
        "rooms": {"model.py": ["attention by blocks"]},
        "edits": [
            ("model.py", "    if T > DENSE_LEN:\n"
             "        return _attend_in_blocks(q_BNTH, k_BKTH, v_BKTH, attn_inputs, cfg)\n", ""),
        ],
    },
    "document mask": {
        "rooms": {"model.py": ["document mask"], "data.py": ["document mask"]},
        "edits": [
            ("model.py", '    if "segments" in batch and "positions" in batch:\n'
             "        document_sums = _document_sums(batch, cfg)\n"
             "        n_positions = jnp.float32(labels_BT.size)\n"
             "        sums |= document_sums\n"
             "        counts |= dict.fromkeys(document_sums, n_positions)\n", ""),
            ("data.py", '    if seq_format["document_mask"]:\n'
             "        _add_document_mask(batch, shards, starts.tolist())\n", ""),
        ],
    },
    "loss scaling for float16": {
        "rooms": {"step.py": ["loss scaling for float16"]},
        "edits": [
            ("step.py", '    if cfg.dtype == "float16":\n'
             '        state["scale"] = init_loss_scale()\n', ""),
            ("step.py", '    step_fn = fp16_train_step if cfg.dtype == "float16" else train_step\n'
             '    step_fn = override("train_step", partial(\n        step_fn,',
             '    step_fn = override("train_step", partial(\n        train_step,'),
        ],
    },
    "optimizer in host memory": {
        "rooms": {"step.py": ["optimizer in host memory"]},
        "edits": [
            ("step.py", "    if cfg.offload_optimizer:\n"
             '        step_fn = opt_from_host(step_fn, shardings["opt"])\n'
             '        digest_fn = opt_from_host(digest_fn, shardings["opt"])\n'
             '        shardings = state_shardings(shapes, table, mesh, "pinned_host")\n', ""),
        ],
    },
    "weight statistics": {
        "rooms": {"step.py": ["weight statistics"]},
        "edits": [
            ("step.py", "    if cfg.watch and cfg.log_every:\n"
             '        metrics["watch"] = weight_stats(state["step"] + 1, state["params"], grads, '
             "cfg)\n", ""),
        ],
    },
    "evaluation batches of another size": {
        "rooms": {"config.py": ["evaluation batches of another size"],
                  "data.py": ["evaluation batches of another size"]},
        "edits": [
            ("train.py", 'config.evaluation_config(setup["cfg"])', 'setup["cfg"]'),
            ("train.py", 'data.regroup(source, setup["cfg"].batch_size, cfg.batch_size)', "source"),
        ],
    },
    "mixtures": {
        "rooms": {"data.py": ["mixtures"]},
        "edits": [
            ("data.py", '    if "mixture" in dataset:\n'
             '        examples = _mixture_examples(dataset["mixture"], draws, seed)\n'
             '    else:\n        examples = shuffled(draws, dataset["n"], seed)\n',
             '    examples = shuffled(draws, dataset["n"], seed)\n'),
            ("data.py", '    if "mixture" in dataset:\n'
             '        return _describe_mixture(dataset["mixture"])\n', ""),
            ("data.py", "    if weights:\n"
             "        dataset = mix([*datasets.values()], [*weights.values()])\n", ""),
        ],
    },
    "examples": {
        "rooms": {"data.py": ["examples"]},
        "edits": [
            ("data.py", '        "preview": lambda: show_examples(dataset, tokenizer),  '
             "# optional: examples\n", ""),
        ],
    },
    "names on the Hub": {
        "rooms": {"data.py": ["names on the Hub"], "train.py": ["names on the Hub"]},
        "edits": [
            ("data.py", "map(hub_path, map(str, patterns)):  # optional: names on the Hub",
             "map(str, patterns):"),
            ("data.py", "    name = hub_path(name)  # optional: tokenizers on the Hub\n", ""),
            ("data.py", "    name = hub_path(name)  # optional: names on the Hub\n", ""),
            ("train.py", "    cfg = resolve_hub_names(cfg)\n", ""),
            ("train.py", 'Path(data.hub_path(path), "tokenizer.json")',
             'Path(path, "tokenizer.json")'),
            ("train.py", 'Path(data.hub_path(path), "config.json")', 'Path(path, "config.json")'),
            ("train.py", "data.hub_path(path, weights=True)", "path"),
        ],
    },
    "locks of buckets": {
        "rooms": {"ckpt.py": ["locks of buckets"]},
        "edits": [
            ("ckpt.py", "        check = locks.enter_context(lock_bucket(root, out_dir))\n",
             "        check = int\n"),
        ],
    },
}


def without_rooms(text, banners):
    """The text of a file without the rooms of these banners."""
    kept, inside, found = [], False, set()
    for line in text.splitlines(keepends=True):
        banner = line.removeprefix("# ---- ").rstrip("\n")
        if line.startswith("# ---- "):
            inside = banner in banners
            found |= {banner} & {*banners}
        if line.startswith("if __name__"):
            inside = False
        if not inside:
            kept.append(line)
    assert found == {*banners}, f"no room {sorted({*banners} - found)}"
    return "".join(kept)


def delete(feature, folder):
    """Write the project without a feature into a folder."""
    for file in test_names.FILES:
        whole = (ROOT / file).read_text()
        text = without_rooms(whole, feature["rooms"].get(file, []))
        for edited, old, new in feature["edits"]:
            was_in_a_room = whole.count(old) == 1 and old not in text
            if edited == file and not was_in_a_room:
                assert text.count(old) == 1, (
                    f"edit FEATURES in tests/test_rooms.py: {file} has this text {text.count(old)} "
                    f"times: {old}")
                text = text.replace(old, new)
        (folder / file).write_text(text)


def losses(folder, out_dir, cache_dir):
    """Run the job with the files of a folder; the losses and digests of all its rows."""
    command = [sys.executable, "train.py", *JOB.split(), "--out_dir", out_dir, "--cache_dir",
               cache_dir]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    kept = ("event", "step", "loss", "grad_norm", "val_loss", "digest")
    return [{name: row[name] for name in kept if name in row} for row in rows]


def without(names):
    """The edits and rooms of several features as one."""
    joined = {"rooms": {}, "edits": []}
    for name in names:
        joined["edits"] += FEATURES[name]["edits"]
        for file, banners in FEATURES[name]["rooms"].items():
            joined["rooms"][file] = joined["rooms"].get(file, []) + banners
    return joined


@pytest.mark.parametrize("name", FEATURES)
def test_without_a_room_no_name_is_undefined(name, tmp_path):
    """At most ten lines outside the rooms of a feature change, and then nothing calls them.

    Break: train.py: for name in cfg.track)] => for name in [*cfg.track])]
    """
    feature = FEATURES[name]
    n_lines = sum(max(old.count("\n"), 1) for _, old, _ in feature["edits"])
    assert n_lines <= MOST_LINES
    delete(feature, tmp_path)
    lint = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--no-cache",
         str(tmp_path)], capture_output=True, text=True)
    assert lint.returncode == 0, (
        f"add the lines that use this to the edits of {name!r} in FEATURES in tests/test_rooms.py, "
        f"or move them into its room:\n{lint.stdout}")


@pytest.mark.slow
def test_the_default_job_trains_without_rooms(tmp_path, cache_dir):
    """Without all of these features, losses and digests are bit-identical.

    Break: train.py: (jsonl, trace_profile, console, => (jsonl, trace_profile,
    """
    found = []
    for name, features in (("all", []), ("none", [*FEATURES])):
        folder = tmp_path / name
        folder.mkdir()
        delete(without(features), folder)
        found.append(losses(folder, folder / "out", cache_dir))
    assert found[0] == found[1]


def test_most_rooms_are_in_the_table():
    """At least ten features are listed, and the rooms that they name exist.

    Break: step.py: # ---- weight statistics => # ---- rows
    """
    assert len(FEATURES) >= 10
    for feature in FEATURES.values():
        for file, banners in feature["rooms"].items():
            present = {banner for _, banner in test_names.rooms_of(file)}
            assert {*banners} <= present, (file, banners)
