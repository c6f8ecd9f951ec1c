# SPDX-License-Identifier: Apache-2.0
"""Training data in windows: one file after the other, from a folder that may grow.

python tests/recipes/windows.py --data 'days/*.txt' --wait_s 60

Each file is a window, shuffled inside. After each window the run evaluates. `in_windows` serves
other tasks, too: clicks.py reads its days by it.
"""
import contextlib
import json
import os
import re
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import numpy as np
from tqdm import tqdm

from train import config, data


@dataclass(frozen=True, kw_only=True)
class WindowsConfig(config.Config):
    windows_per_epoch: config.NonNegInt = 0  # files per epoch; 0: all
    window_repeats: config.PosInt = 1  # passes over each file before the next one
    # seconds to wait for a new file before the files are read again
    wait_s: config.NonNegFloat = 0.0
    val_frac: config.FractionBelow1 = 0.0  # must be 0: --val_data names validation data


def open_text(parts, cfg):
    """Open the files of a config as training data in windows, and its validation data."""
    if cfg.val_frac:
        raise ValueError(f"val_frac {cfg.val_frac}: must be 0 with windows; set --val_data")
    sources = {"train": None, "val": {}}
    if cfg.val_data:
        sources = data.open_text(("val",), cfg)
    if "train" in parts:
        sources["train"] = open_train_files(cfg)
    return sources


def open_train_files(cfg):
    """Open the training files of a config in windows."""
    tokenizer = data.make_cfg_tokenizer(cfg)
    open_files = data.file_opener(cfg, tokenizer)

    @cache
    def open_file(name):
        dataset = open_files([name], may_be_empty=True)
        if dataset["n"] and not any(map(data.has_label, dataset["shards"])):
            tqdm.write(f"{name}: no token is a label")
            dataset["n"] = 0
        return dataset

    def size_of(name):
        return open_file(name)["n"]

    def read(name, examples):
        return data.read_sequences(open_file(name), examples)

    source = in_windows(cfg, size_of, read)
    first_name = next(filter(size_of, _unseen_files(cfg, ())))
    first = open_file(first_name)
    source["summary"] += f"\n{first_name}: {data.describe(first)}"
    source["preview"] = lambda: data.show_examples(first, tokenizer)
    return source


def in_windows(cfg, size_of, read):
    """Read training data in windows: one file of cfg.data after the other, each shuffled inside.

    Files are in order of the numbers and letters in their names. Files without an example are
    skipped. Files that appear later are found when the last window ends.
    size_of(name): the number of examples in a file. read(name, examples): a batch of these.
    Process 0 writes each window to out_dir/windows.jsonl before it is used. There the other
    processes, and the run when it resumes, find it.

    Returns a source, see `data.open_text`, with these keys more:
        "windows": step -> records of the windows begun until then,
        "n_finished": step -> number of windows finished,
        "next_window": step at which a window ends -> name of the next file; None if it is missing
            yet, "" if it was read before or no window ends at this step,
        "restore": continue after these windows, those of a checkpoint.
    """
    windows = {
        "order": [],  # records of the windows begun so far, as in windows.jsonl
        "path": Path(cfg.out_dir) / "windows.jsonl",
        "lock": threading.Lock(),  # the loop and the thread that makes batches extend the order
        "record_of": cache(partial(_window_record, size_of)),
        "read": read,
        "wait_began": {},  # {number of windows begun: time at which none was found after them}
    }
    n_first = cfg.windows_per_epoch or None  # None: all
    # Wait for those who write the files, but not forever.
    deadline = time.monotonic() + 2 * REST_S
    while any(map(_is_new, _unseen_files(cfg, ()))) and time.monotonic() < deadline:
        time.sleep(0.1)
    first = list(islice(_unseen_windows(cfg, windows, epoch=0, seen=()), n_first))
    if not first:
        raise ValueError(f"data {' '.join(cfg.data) or '(none)'}: no file has an example")
    return {
        "n": sum(window["n"] for window in first) * cfg.window_repeats,
        "batch": partial(_window_batch, cfg, windows),
        "fingerprint": "windows",
        "summary": f"{len(first)} windows, from {first[0]['name']} to {first[-1]['name']}",
        "restore": partial(_restore_windows, windows),
        "n_finished": partial(_n_finished, cfg, windows),
        "next_window": partial(_next_file, cfg, windows),
        "windows": lambda step: windows["order"][: _n_finished(cfg, windows, step) + 1],
    }


def _window_batch(cfg, windows, step, rows):
    """Build these rows of training batch `step`; None while a window is missing."""
    last_draw = step * cfg.batch_size + cfg.batch_size - 1
    if not _extend_windows(cfg, windows, last_draw):
        return None
    order = windows["order"]
    draws = data.draws_at(step, cfg.batch_size, rows)
    bounds = _window_bounds(order)
    window_of = np.searchsorted(bounds[1:], draws, side="right")
    indices = np.unique(window_of).tolist()
    for i in indices:
        _check_window(order[i], windows["record_of"](order[i]["name"]))

    # Each window is an epoch of its own: its index in the order names the permutation.
    sizes = np.array([window["n"] for window in order])[window_of]
    offsets = draws - bounds[window_of]
    examples = data.shuffled(window_of * sizes + offsets, sizes, cfg.seed)
    batches = []
    for i in indices:
        batches.append(windows["read"](order[i]["name"], examples[window_of == i]))
    joined = {}
    for name in batches[0]:
        joined[name] = np.concatenate([batch[name] for batch in batches])
    return joined


def _window_bounds(order):
    """Return [windows + 1]: the first draw of each window, and the one after the last window."""
    sizes = [window["n"] for window in order]
    return np.cumsum([0, *sizes])


def _extend_windows(cfg, windows, draw):
    """Begin windows until one has this draw; return whether one has."""
    with windows["lock"]:
        if _window_bounds(windows["order"])[-1] <= draw:
            begun = _read_jsonl(windows["path"])  # by another process, or before a resumption
            if begun:
                windows["order"] = begun
        while _window_bounds(windows["order"])[-1] <= draw:
            window = _next_window(cfg, windows)
            if window is None:
                return False
            windows["order"].append(window)
            _write_jsonl(windows["path"], windows["order"])
        return True


def _next_window(cfg, windows):
    """Choose the window after those begun; None: wait. Only process 0 chooses."""
    if jax.process_index():
        return None
    # The same file again.
    order = windows["order"]
    epoch = order[-1]["epoch"] if order else 0
    seen = [window["name"] for window in order if window["epoch"] == epoch]
    if seen and seen.count(seen[-1]) < cfg.window_repeats:
        return order[-1]

    # The next unseen file, unless the epoch has all its windows.
    epoch_is_full = cfg.windows_per_epoch and len(set(seen)) >= cfg.windows_per_epoch
    if not epoch_is_full:
        unseen = _unseen_files(cfg, seen)
        if unseen and _is_new(unseen[0]):
            return None
        window = next(_unseen_windows(cfg, windows, epoch, seen), None)
        if window is not None:
            return window
        if _must_wait(cfg, windows):
            return None
    # The first file of the next epoch.
    return next(_unseen_windows(cfg, windows, epoch + 1, seen=()), None)


def _must_wait(cfg, windows):
    """Return whether to wait for a new file: for wait_s after none was found."""
    now = time.monotonic()
    order = windows["order"]
    wait_began = windows["wait_began"]
    if len(order) not in wait_began:
        wait_began[len(order)] = now
        if cfg.wait_s:
            tqdm.write(f"no window after {order[-1]['name']} yet: waiting for {cfg.wait_s:g} s")
    return now - wait_began[len(order)] < cfg.wait_s


def _unseen_windows(cfg, windows, epoch, seen):
    """Yield the windows of files not in `seen`; a file is opened when it is asked for."""
    for name in _unseen_files(cfg, seen):
        record = windows["record_of"](name)
        if record["n"]:
            yield {"epoch": epoch} | record


def _unseen_files(cfg, seen):
    """Return the names of the files that are not in `seen` and not empty, in order."""
    names = {str(path) for path in data.expand(cfg.data, lenient=True)} - set(seen)
    return [name for name in sorted(names, key=_natural_order) if _size(name)]


def _size(name):
    """Return the size of a file; 0 if it has just been deleted."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.getsize(name)
    return 0


REST_S = 2.0  # how old the last change of a file must be before it is read


def _is_new(name):
    """Return whether a file has just been changed, so that somebody may still write it. A time in
    the future is that of a disk with another clock.
    """
    with contextlib.suppress(FileNotFoundError):
        return 0 <= time.time() - os.path.getmtime(name) < REST_S
    return True


def _natural_order(name):
    """Sort by the numbers in a name, not by their digits: day2 before day10."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", name)]


def _window_record(size_of, name):
    """Make the record of a file in windows.jsonl, without its epoch."""
    n = int(size_of(name))
    if not n:
        tqdm.write(f"{name}: has no example; skipped")
    return {"name": name, "n": n, "bytes": data.content_id(Path(name))}


def _check_window(window, record):
    """Raise ValueError if the file of a window differs from its record in windows.jsonl."""
    for key, value in record.items():
        if window.get(key, value) != value:
            raise ValueError(f"{window['name']}: had {window['n']} examples when the run first "
                             "read it, and its content has changed; restore the file")


def _restore_windows(windows, saved):
    """Continue after the windows of a checkpoint, and in those that a killed run had begun."""
    begun = _read_jsonl(windows["path"])
    if saved and begun[: len(saved)] == saved:
        windows["order"] = begun
    else:
        windows["order"] = list(saved)
    if not jax.process_index():
        _write_jsonl(windows["path"], windows["order"])


def _n_finished(cfg, windows, step):
    """Count the windows of which all examples were used before `step`."""
    ends = _window_bounds(windows["order"])[1:]
    return int(np.searchsorted(ends, step * cfg.batch_size, side="right"))


def _next_file(cfg, windows, step):
    """Name the file of the window that begins at `step`, as "next_window" of in_windows."""
    if _n_finished(cfg, windows, step) == _n_finished(cfg, windows, step - 1):
        return ""
    if not _extend_windows(cfg, windows, step * cfg.batch_size):
        return None
    n_begun = _n_finished(cfg, windows, step) + 1
    names = [window["name"] for window in windows["order"][:n_begun]]
    name = names.pop()
    return "" if name in names else name


def _read_jsonl(path):
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write_jsonl(path, rows):
    """Replace a file in one step, so that no process reads a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_suffix(".tmp")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    partial_path.write_text(text, encoding="utf-8")
    partial_path.replace(path)


TASK = train.TEXT | {"open": open_text}

if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], task=TASK, kind=WindowsConfig))
