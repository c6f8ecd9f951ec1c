# SPDX-License-Identifier: Apache-2.0
"""What did step K learn from? Print the rows of a batch, with the files of their documents.

    python tests/replay.py out/default --step 340             # trains again, up to step 340
    python tests/replay.py out/default --step 340 --around 5  # with the losses of steps around it
    python tests/replay.py out/default --find 'some text'     # the steps that learned from a text

Step K is the state after K updates: batch K - 1 made it. A batch is a function of config, data and
step, so nothing of it needs to be logged. The losses of its rows need the parameters of step K - 1:
the tool trains to them from the newest checkpoint before, or from the start, in a temporary folder.
Losses and digests that the log has on the way are compared. For a run of another task call
replay(out_dir, step, task=..., kind=...).
"""
import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/recipes")]

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import numpy as np
import optax

import audit
from train import ckpt, config, data

TEXT_WIDTH = 400  # characters of a row that are shown


def main(argv):
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out_dir", help="folder of the run")
    parser.add_argument("--step", type=int, help="step K, which batch K - 1 made")
    parser.add_argument("--around", type=int, default=0, metavar="N",
                        help="train N steps more, and print the losses of N steps on each side")
    parser.add_argument("--find", metavar="TEXT",
                        help="print the steps with a row that has this text; a text that is cut at "
                             "the end of a row is not found")
    parser.add_argument("--steps", default="", metavar="A:B",
                        help="with --find, only steps A to B; default: the whole run")
    args = parser.parse_args(argv)
    try:
        if (args.step is None) == (args.find is None):
            raise ValueError("give either --step or --find")
        if args.find is None:
            replay(args.out_dir, args.step, args.around)
        else:
            find(args.out_dir, args.find, args.steps)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


# ---- the run and its batches

def open_run(out_dir, task, kind, span=None):
    """(run, source of the training data, log rows).

    span: (first, last) steps that are trained again: the run must have trained them with one
    config. Without it, the config is the newest.
    """
    text = Path(out_dir, "config.json").read_text(encoding="utf-8")
    unknown = json.loads(text).keys() - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"{out_dir}: its config has {', '.join(sorted(unknown))}, so a recipe "
                         "made it; call replay.replay from Python, with its task and config")
    has_log = Path(out_dir, "metrics.jsonl").exists()
    rows = ckpt.read_log(out_dir) if has_log else []
    cfg = config.from_json(text, "config.json", kind)
    if rows and span:
        try:
            cfg = audit.config_of(rows, *span, kind)
        except ValueError as e:
            reason = str(e).partition(": ")[2].partition("; ")[0]  # without the flags of audit.py
            raise ValueError(f"steps {span[0] + 1} to {span[1]} cannot be trained again with one "
                             f"config: {reason}; choose a step of one launch, or keep more "
                             "checkpoints by --max_to_keep") from None
    cfg = dataclasses.replace(config.without_launch_fields(cfg), out_dir=str(out_dir))
    # Another number of devices makes the same batches. Its numbers are rounded differently.
    try:
        run = train.setup_run(cfg, task)
    except ValueError:
        cfg = dataclasses.replace(cfg, dp=-1, fsdp=1, ep=1, tp=1, sp=1, slices=1)
        run = train.setup_run(cfg, task)
    source = train.open_data(run.task, run.cfg, {"train"})["train"]
    meta = ckpt.newest_meta(run.root)
    if meta and meta["data"]["fingerprint"] != source["fingerprint"]:
        raise ValueError(f"data: the files have changed since step {meta['step']}: they are "
                         f"{source['fingerprint']}, and were {meta['data']['fingerprint']}; "
                         "restore them")
    run.cfg = train.set_steps(run.cfg, source)
    return run, source, rows


def batch_index(cfg, step):
    """The batch that made a step."""
    return 0 if cfg.overfit_batch else step - 1


def sequences_of(dataset, index, cfg):
    """[(shard, first token, token after the last)] of each document or stretch in each row of batch
    `index`: a list for each row. Tokens count from the start of the shard's file.
    """
    examples = data.sequences_at(dataset, index, cfg.batch_size, cfg.seed)
    shard_of, offsets = data.locate(dataset, examples)
    T = cfg.seq_len
    rows = []
    for i, offset in zip(shard_of.tolist(), offsets.tolist()):
        shard = dataset["shards"][i]
        if "row_bounds" in shard:
            spans = shard["spans"][slice(*shard["row_bounds"][offset : offset + 2])]
        else:
            start = min(offset * T, len(shard["tokens"]) - 1 - T) + shard["token_offset"]
            spans = [(start, start + T + 1)]
        rows.append([(shard, int(start), int(stop)) for start, stop in spans])
    return rows


def origin(shard, start, stop):
    """Where the tokens from start to stop of a shard come from, as a text."""
    if "documents" not in shard:
        return f"{shard['name']}, tokens {start:,} to {stop - 1:,}"
    firsts = shard["documents"][:, 0]
    first = max(np.searchsorted(firsts, start, side="right") - 1, 0)
    last = max(np.searchsorted(firsts, stop - 1, side="left"), first + 1)
    if "sources" not in shard:
        return f"document {first} of all"
    texts = []
    for file, number in shard["sources"][first:last].tolist():
        texts.append(f"{shard['paths'][file]}, document {number}")
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def print_old_caches(source):
    """Name the folders of the token cache that do not know the files of their documents."""
    shards = source["dataset"]["shards"] if "dataset" in source else []
    for folder in {shard["path"].parent for shard in shards
                   if "documents" in shard and "sources" not in shard}:
        print(f"files are not named: {folder} is of an older version; delete it and run this again")


def show_row(batch, row, tokenizer):
    """The text of a row with marks around its labels, shortened in the middle."""
    labels = batch["labels"][row]
    ids = np.append(batch["tokens"][row], labels[-1])
    is_label = np.append(False, labels != data.IGNORE)
    used = np.append(batch.get("segments", np.ones_like(batch["tokens"]))[row] > 0, True)
    used &= ids != data.IGNORE
    ids, is_label = ids[used], is_label[used]
    pieces, start = [], 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or is_label[stop] != is_label[start]:
            pieces.append((tokenizer["decode"](ids[start:stop]), bool(is_label[start])))
            start = stop
    text = train.mark_labels(pieces).replace("\n", "\\n")
    half = TEXT_WIDTH // 2
    return text if len(text) <= TEXT_WIDTH else f"{text[:half]} ... {text[-half:]}"


# ---- one step

def replay(out_dir, step, around=0, task=train.TEXT, kind=config.Config):
    """Print the rows of the batch that made a step, the largest fraction of the loss first.

    Returns [{"row", "loss_frac" (of the summed loss), "loss" (mean in nats), "grad_norm" (of the
    row's part of the gradient), "n_labels", "origin", "text"}].
    """
    if step < 1:
        raise ValueError(f"--step {step}: must be 1 or more; step 0 is the initial state")
    if around < 0:
        raise ValueError(f"--around {around}: must be 0 or more")
    run, _, _ = open_run(out_dir, task, kind)
    n_steps = run.cfg.steps
    if step > n_steps:
        raise ValueError(f"--step {step}: the run has {n_steps} steps")
    first = max([n for n in ckpt.steps(run.root) if n < step - around], default=0)
    last = min(step + around, n_steps)
    run, source, rows = open_run(out_dir, task, kind, (first, last))
    cfg = run.cfg
    if not train.steplib.takes(run.task["loss"], "examples"):
        raise ValueError("this task has no loss per position; replay shows those of text")

    params, losses, differences, n_compared = train_to(run, rows, step, first, last, task)
    index = batch_index(cfg, step)
    batch = source["batch"](index, np.arange(cfg.batch_size))
    found = measure_rows(params, batch, run)
    tokenizer = data.make_cfg_tokenizer(cfg)
    spans = sequences_of(source["dataset"], index, cfg) if "dataset" in source else []
    for each in found:
        of_row = spans[each["row"]] if spans else []
        each["origin"] = list(dict.fromkeys(origin(*span) for span in of_row))
        each["text"] = show_row(batch, each["row"], tokenizer)

    print(f"step {step} of {out_dir}: batch {index}, {cfg.batch_size} rows of {cfg.seq_len} "
          "tokens")
    if differences:
        print(f"NOT exact: {differences[0]}. Another machine, mesh or version trained the run, or "
              "its files have changed since")
    elif n_compared:
        print(f"trained again exactly: {n_compared} losses and digests of the log agree")
    else:
        print("trained again; the log has no loss and no digest to compare with")
    for near in sorted(losses):
        if abs(near - step) <= around:
            mark = "  <- this step" if near == step else ""
            print(f"step {near:6}  loss {losses[near]:.4f}{mark}")
    print_old_caches(source)
    if cfg.dropout:
        print("the rows below are measured without dropout")
    print("fraction    loss  gradient  row  from")
    for each in found:
        print(f"{each['loss_frac']:8.1%}  {each['loss']:6.4f}  {each['grad_norm']:8.4f}  "
              f"{each['row']:3}  {'; '.join(each['origin'])}\n    {each['text']}")
    return found


def train_to(run, rows, step, first, last, task):
    """Train again from the checkpoint of step `first` (0: from the start) to step `last`.

    Returns (parameters of step - 1, {step: loss}, differences from the log as texts, number of
    losses and digests that were compared).
    """
    cfg = run.cfg
    logged = {}  # {(event, step): the value in the log}
    for row in rows:
        if row["event"] == "log":
            logged["log", row["step"]] = row.get("loss")
        if row["event"] == "save" and row["kind"] == "save":
            logged["save", row["step"]] = row["digest"]
    losses, kept, differences, compared = {}, {}, [], set()

    def observe(event, value):
        # A copy, since the next step reuses the memory of the state.
        if event in ("load", "state") and int(value["step"]) == step - 1:
            kept.update({name: np.array(x) for name, x in value["params"].items()})
        if event == "step":
            losses[value["step"]] = value["loss"]
        if event in ("log", "save") and (event, value["step"]) in logged:
            saved = logged[event, value["step"]]
            found = value["digest"] if event == "save" else value.get("loss")
            compared.add((event, value["step"]))
            # metrics.jsonl has null for what is not finite.
            if found != saved and not (saved is None and not math.isfinite(found)):
                name = "digest" if event == "save" else "loss"
                differences.append(f"the {name} of step {value['step']} was {saved}, is {found}")

    with tempfile.TemporaryDirectory(prefix="replay") as scratch:
        if first:
            audit.copy_checkpoint(run.root, first, scratch)
        again = dataclasses.replace(
            config.without_launch_fields(cfg), out_dir=scratch, ckpt_dir="",
            resume="must" if first else "auto", stop=(str(last),), eval_every=0,
            eval_batches=1, sample_every=0, sample_tokens=0, weights_every=0, export="",
            export_every=0, track=(), profile="")
        # Print nothing: the messages would name a folder that is deleted afterwards.
        with (open(os.devnull, "w", encoding="utf-8") as nowhere,
              contextlib.redirect_stdout(nowhere)):
            train.main(again, [observe], task)
    return kept, losses, differences, len(compared)


def measure_rows(params, batch, run):
    """The fraction of the loss and the norm of the gradient of each row of a batch, the largest
    fraction first.
    """
    cfg = run.cfg
    run.hooks = train.load_functions("hooks", cfg.hooks)
    loss = train.emit(run, "loss_fn", run.task["loss"])

    def divisor_and_nats(params, row):
        _, counts, values = loss(params, row, cfg, examples=True)
        return counts["objective"], values["nats"]

    def gradient_norm(params, row):
        grads = jax.grad(lambda params: loss(params, row, cfg)[0]["objective"])(params)
        return optax.tree.norm(grads)

    divisor_and_nats = jax.jit(divisor_and_nats)
    gradient_norm = jax.jit(gradient_norm)
    found = []
    for i in range(len(batch["labels"])):
        row = {name: x[i : i + 1] for name, x in batch.items()}
        divisor, nats = divisor_and_nats(params, row)
        is_label = row["labels"] != data.IGNORE
        found.append({"row": i, "sum": float(np.sum(nats, where=is_label)),
                      "n_labels": int(is_label.sum()), "divisor": float(divisor),
                      "grad_norm": float(gradient_norm(params, row))})
    total = math.fsum(each["sum"] for each in found)
    divisor = math.fsum(each.pop("divisor") for each in found)
    for each in found:
        each["loss_frac"] = each["sum"] / total
        each["loss"] = each.pop("sum") / max(each["n_labels"], 1)
        each["grad_norm"] /= divisor
    return sorted(found, key=lambda each: -each["loss_frac"])


# ---- a text

def find(out_dir, text, steps=""):
    """Print and return the steps whose batches have a row with a text: [(step, row, origin)]."""
    if not text:
        raise ValueError("--find '': must have a character")
    run, source, _ = open_run(out_dir, train.TEXT, config.Config)
    cfg = run.cfg
    tokenizer = data.make_cfg_tokenizer(cfg)
    first, _, last = steps.partition(":")
    with data.as_value_error(f"--steps {steps!r}: must be as 100:200", ValueError):
        first, last = max(int(first or 1), 1), min(int(last or cfg.steps), cfg.steps)
    if first > last:
        raise ValueError(f"--steps {steps}: has no step of the run, which has {cfg.steps}")
    print_old_caches(source)
    found = []
    for step in range(first, last + 1):
        index = batch_index(cfg, step)
        batch = source["batch"](index, np.arange(cfg.batch_size))
        ids = np.concatenate([batch["tokens"], batch["labels"][:, -1:]], axis=1)
        for row, row_ids in enumerate(ids):
            if text in tokenizer["decode"](row_ids[row_ids != data.IGNORE]):
                spans = sequences_of(source["dataset"], index, cfg)[row]
                where = "; ".join(dict.fromkeys(origin(*span) for span in spans))
                print(f"step {step:6}  row {row:3}  {where}")
                found.append((step, row, where))
    print(f"{len(found)} rows of steps {first} to {last} have {text!r}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
