# SPDX-License-Identifier: Apache-2.0
"""Training on rows that never end: an iterator of Python, or lines of JSON from standard input.

zcat rows-*.jsonl.gz | python tests/recipes/endless.py --steps 1000

    rows = datasets.load_dataset("allenai/c4", "en", split="train", streaming=True)
    endless.main(endless.EndlessConfig(steps=1000), rows)

Rows are dicts, as of `data=` of train.main, and are read once, rows_at_once at a time. These are
tokenized and packed as a file of them would be, and their sequences shuffled. A checkpoint has the
number of rows that came before those of its step; a run that resumes skips as many. It then has the
batches of a run that was not killed if the iterator gives the same rows again: the first rows are
compared. Each of several processes gets an iterator of the same rows.
"""
import json
import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import numpy as np

from train import config, data


@dataclass(frozen=True, kw_only=True)
class EndlessConfig(config.Config):
    rows_at_once: config.PosInt = 1000  # rows that are tokenized and shuffled together
    val_frac: config.FractionBelow1 = 0.0  # must be 0: --val_data names validation data


def main(cfg, rows, hooks=(), task=train.TEXT):
    """train.main on these rows, an iterable. cfg: an EndlessConfig."""
    stream = {
        "rows": iter(rows),
        "n_read": 0,  # rows
        # Where each group of rows begins that was read, and the next one: the rows before it, and
        # the sequences ("draws", as in data.draws_at)
        "starts": [{"rows": 0, "draws": 0}],
        "groups": [],  # those in use: {"first": its first draw, "dataset", "folder"}
        # From open_rows: the tokenizer, and where this process keeps the rows in use
        "tokenizer": None,
        "folder": None,
    }

    def keep_position(event, value):
        if event == "before_save":
            draw = value["step"] * cfg.batch_size
            position = [start for start in stream["starts"] if start["draws"] <= draw][-1]
            return value | {"hooks": value["hooks"] | {"endless": position}}
        if event == "resume":
            position = value["hooks"].get("endless")
            if position and position["rows"]:  # not in the first group, which is read already
                stream["starts"] = [position]
        if event == "end" and stream["folder"]:
            shutil.rmtree(stream["folder"])

    task = task | {"open": partial(open_rows, stream)}
    return train.main(cfg, (*hooks, keep_position), task)


def open_rows(stream, parts, cfg):
    """Open the rows of a stream as training data, and --val_data."""
    wrong = [name for name in ("data", "val_frac", "epochs", "overfit_batch") if getattr(cfg, name)]
    config.raise_if_errors([f"{name}: must not be set with endless rows" for name in wrong])
    sources = {"train": None, "val": {}}
    if cfg.val_data:
        sources = data.open_text(("val",), cfg)
    if "train" in parts:
        stream["tokenizer"] = data.make_cfg_tokenizer(cfg)
        stream["folder"] = Path(cfg.out_dir, "stream", str(jax.process_index()))
        shutil.rmtree(stream["folder"], ignore_errors=True)  # of a run that was killed
        path, dataset = _read_group(stream, cfg)
        sources["train"] = {
            "n": 2**62,
            "batch": partial(_batch, stream, cfg),
            # The first rows have to be the same in every process, and when the run resumes.
            "fingerprint": Path(path).stem,
            "summary": f"the first {stream['n_read']:,} rows: {data.describe(dataset)}",
        }
    return sources


def _batch(stream, cfg, step, rows):
    """Build these rows of training batch `step`."""
    draws = data.draws_at(step, cfg.batch_size, rows)
    while stream["starts"][-1]["draws"] < (step + 1) * cfg.batch_size:
        _read_group(stream, cfg)
    batches = []
    for group in list(stream["groups"]):
        first, dataset = group["first"], group["dataset"]
        end = first + dataset["n"]
        if end <= step * cfg.batch_size:
            stream["groups"].remove(group)
            shutil.rmtree(group["folder"])
        drawn = draws[(first <= draws) & (draws < end)]
        if len(drawn):
            examples = data.shuffled(drawn - first, dataset["n"], (cfg.seed, first))
            batches.append(data.read_sequences(dataset, examples))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _read_group(stream, cfg):
    """Read and tokenize the next rows: (their file, dataset)."""
    start = stream["starts"][-1]
    n_before = start["rows"]
    for _ in islice(stream["rows"], n_before - stream["n_read"]):
        pass  # a row that was read before the run was killed
    rows = list(islice(stream["rows"], cfg.rows_at_once))
    stream["n_read"] = n_before + len(rows)
    if not rows:
        n_steps = start["draws"] // cfg.batch_size
        error = f"ended after {n_before}, enough for {n_steps} steps; set --steps {n_steps}"
        if not n_before:
            error = "none has come; a run needs all of them, also when it resumes"
        config.raise_if_errors([error], "rows")

    folder = stream["folder"] / str(n_before)
    path = data.write_rows(folder, f"rows-from-{n_before}", rows, cfg.columns)
    open_files = data.file_opener(replace(cfg, token_cache=str(folder)), stream["tokenizer"])
    dataset = open_files([path], may_be_empty=True)
    stream["groups"].append({"first": start["draws"], "dataset": dataset, "folder": folder})
    stream["starts"].append({"rows": stream["n_read"], "draws": start["draws"] + dataset["n"]})
    return path, dataset


def _stdin_rows():
    for number, line in enumerate(sys.stdin, 1):
        with data.as_value_error(f"standard input, line {number}", ValueError):
            row = json.loads(line)
        yield row


if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], kind=EndlessConfig, main=lambda cfg, hooks, task: main(
        cfg, _stdin_rows(), hooks, task)))
