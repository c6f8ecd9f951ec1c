# SPDX-License-Identifier: Apache-2.0
"""Training data in windows, one after the other, from folders that may grow.

python tests/recipes/windows.py --data 'clicks/{day}/*.txt' --wait_s 60

A window is all files in whose paths {day} stands for the same text; without {day} it is one file.
It is shuffled inside. After it the run evaluates: on --val_data, or else on the next window, before
it trains on that. `in_windows` serves other tasks, too: clicks.py reads its days by it.
"""
import contextlib
import fnmatch
import hashlib
import json
import os
import re
import sys
import threading
import time
from dataclasses import dataclass, replace
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
    windows_per_epoch: config.NonNegInt = 0  # windows per epoch; 0: all
    window_repeats: config.PosInt = 1  # passes over each window before the next one
    window_steps: config.NonNegInt = 0  # most steps per pass over a window; 0: all its examples
    # seconds to wait for a new window before the windows are read again
    wait_s: config.NonNegFloat = 0.0
    # a window begins once its files have not changed for this many seconds
    rest_s: config.NonNegFloat = 2.0
    val_frac: config.FractionBelow1 = 0.0  # must be 0: --val_data names validation data


def open_text(parts, cfg):
    """Open the files of a config as training data in windows, and its validation data."""
    if cfg.val_frac:
        raise ValueError(f"val_frac {cfg.val_frac}: must be 0 with windows; set --val_data")
    sources = {"train": None, "val": {}}
    if cfg.val_data:
        sources = data.open_text(("val",), replace(cfg, data=globs(cfg)))
    if "train" in parts:
        sources["train"], next_window = open_train_files(cfg)
        sources["val"] = sources["val"] or next_window
    return sources


def open_train_files(cfg):
    """Open the training files of a config: (source in windows, validation data of `next_of`)."""
    tokenizer = data.make_cfg_tokenizer(cfg)
    open_files = data.file_opener(cfg, tokenizer)

    @cache
    def open_window(files):
        dataset = open_files(files, may_be_empty=True)
        if dataset["n"] and not any(map(data.has_label, dataset["shards"])):
            tqdm.write(f"{dataset['shards'][0]['name']}: no token is a label")
            dataset["n"] = 0
        return dataset

    def size_of(files):
        return open_window(files)["n"]

    def read(files, examples):
        return data.read_sequences(open_window(files), examples)

    def open_val(files):
        dataset = open_window(files)
        return {"n": dataset["n"], "bytes_per_token": data.bytes_per_token(dataset),
                "batch": lambda index, rows, batch_size: data.eval_batch_at(
                    dataset, index, batch_size, rows)}

    source = in_windows(cfg, size_of, read)
    first = open_window(next(filter(size_of, find_windows(cfg).values())))
    source["summary"] += f"\nin the first: {data.describe(first)}"
    source["preview"] = lambda: data.show_examples(first, tokenizer)
    return source, next_of(source, open_val)


def in_windows(cfg, size_of, read):
    """Read the windows of find_windows(cfg) as training data. Those without an example are skipped.
    Those that appear later are found when the last one ends.

    size_of(files): the number of examples in these files, a tuple. read(files, examples): a batch.
    Process 0 writes each window to out_dir/windows.jsonl before it is used. There the other
    processes, and the run when it resumes, find it.

    Returns a source, see `data.open_text`, with these keys more:
        "windows": step -> records of the windows begun until then,
        "n_finished": step -> number of windows finished,
        "next_files": step at which a window ends -> files of the next one; None if it has yet to
            come, () if it was read before, or no window ends at this step, or the run does,
        "restore": continue after these windows, those of a checkpoint.
    """
    windows = {
        "order": [],  # records of the windows begun so far, as in windows.jsonl
        "files": {},  # {name: files} of windows that this process has opened
        "path": Path(cfg.out_dir) / "windows.jsonl",
        "lock": threading.Lock(),  # the loop and the thread that makes batches extend the order
        "record_of": cache(partial(_window_record, size_of)),
        "read": read,
        "wait_began": {},  # {number of windows begun: time at which none was found after them}
    }
    # Wait for those who write the files, but not forever.
    is_new = partial(_is_new, cfg)
    deadline = time.monotonic() + 2 * cfg.rest_s
    while any(map(is_new, find_windows(cfg).values())) and time.monotonic() < deadline:
        time.sleep(0.1)
    unseen = filter(None, _unseen_windows(cfg, windows, epoch=0, seen=()))
    first = list(islice(unseen, cfg.windows_per_epoch or None))  # None: all
    if not first:
        patterns = " ".join(cfg.data) or "(none)"
        config.raise_if_errors([
            f"data {patterns}: no file has an example, or all have changed in the last "
            f"{cfg.rest_s:g} s (--rest_s). A day is written {{day}}"])
    return {
        "n": int(_window_bounds(cfg, first)[-1]) * cfg.window_repeats,
        "batch": partial(_window_batch, cfg, windows),
        "fingerprint": "windows",
        "summary": f"{len(first)} windows, from {first[0]['name']} to {first[-1]['name']}",
        "restore": partial(_restore_windows, windows),
        "n_finished": partial(_n_finished, cfg, windows),
        "next_files": partial(_next_files, cfg, windows),
        "windows": lambda step: windows["order"][: _n_finished(cfg, windows, step) + 1],
    }


def next_of(source, open_val):
    """Validation data: of a source in windows, the window after that which ends at a step.
    open_val: files -> validation source.
    """
    def source_at(step):
        files = source["next_files"](step)
        return open_val(files) if files else files

    return {"": {"source_at": source_at}}


def globs(cfg):
    """The globs that match the files of all windows."""
    return tuple(pattern.replace("{day}", "*") for pattern in cfg.data)


def find_windows(cfg):
    """{name: its files} of all windows, in order of the numbers and letters in their names. A name
    is the text for which {day} stands, or the path of a file. Empty files are skipped.
    """
    regexes = []
    for pattern in cfg.data:
        if "{day}" in pattern:
            # A second {day} stands for the same text as the first.
            regex = fnmatch.translate(str(Path(pattern))).replace(r"\{day\}", "([^/]+)", 1)
            regexes.append(regex.replace(r"\{day\}", r"\1"))
    found = {}
    for path in map(str, data.expand(globs(cfg), lenient=True)):
        matches = [re.match(regex, path) for regex in regexes]
        days = [match[1] for match in matches if match]
        if regexes and not days:
            raise ValueError(f"data {path}: has no day; each of --data needs {{day}}, and no **")
        name = days[0] if days else path
        with contextlib.suppress(FileNotFoundError):  # it has just been deleted
            if os.path.getsize(path):
                found[name] = (*found.get(name, ()), path)
    return {name: found[name] for name in sorted(found, key=_natural_order)}


def _window_batch(cfg, windows, step, rows):
    """Build these rows of training batch `step`; None while a window is missing."""
    last_draw = step * cfg.batch_size + cfg.batch_size - 1
    if not _extend_windows(cfg, windows, last_draw):
        return None
    order = windows["order"]
    draws = data.draws_at(step, cfg.batch_size, rows)
    bounds = _window_bounds(cfg, order)
    window_of = np.searchsorted(bounds[1:], draws, side="right")
    # Each window is an epoch of its own: its index in the order names the permutation.
    sizes = np.array([window["n"] for window in order])[window_of]
    offsets = draws - bounds[window_of]
    examples = data.shuffled(window_of * sizes + offsets, sizes, cfg.seed)
    batches = []
    for i in np.unique(window_of).tolist():
        window = order[i]
        files = _files_of(cfg, windows, window["name"])
        record = windows["record_of"](window["name"], files)
        if window | record != window:
            raise ValueError(f"{window['name']}: had {window['n']} examples when the run first "
                             "read it, and its content has changed; restore its files")
        batches.append(windows["read"](files, examples[window_of == i]))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _window_bounds(cfg, order):
    """Return [windows + 1]: the first draw of each window, and the one after the last window."""
    most = cfg.window_steps * cfg.batch_size
    sizes = [min(window["n"], most or window["n"]) for window in order]
    return np.cumsum([0, *sizes])


def _extend_windows(cfg, windows, draw):
    """Begin windows until one has this draw; return whether one has."""
    with windows["lock"]:
        if _window_bounds(cfg, windows["order"])[-1] <= draw:
            # Those begun by another process, or before a resumption.
            windows["order"] = _read_jsonl(windows["path"]) or windows["order"]
        while _window_bounds(cfg, windows["order"])[-1] <= draw:
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
    # The same window again.
    order = windows["order"]
    epoch = order[-1]["epoch"] if order else 0
    seen = [window["name"] for window in order if window["epoch"] == epoch]
    if seen and seen.count(seen[-1]) < cfg.window_repeats:
        return order[-1]

    # The next unseen window, unless the epoch has all its windows.
    epoch_is_full = cfg.windows_per_epoch and len(set(seen)) >= cfg.windows_per_epoch
    if not epoch_is_full:
        unseen = list(islice(_unseen_windows(cfg, windows, epoch, seen), 1))
        if unseen:
            return unseen[0]
        if _must_wait(cfg, windows):
            return None
    # The first window of the next epoch.
    return next(_unseen_windows(cfg, windows, epoch + 1, seen=()), None)


def _must_wait(cfg, windows):
    """Return whether to wait for a new window: for wait_s after none was found."""
    now = time.monotonic()
    order = windows["order"]
    wait_began = windows["wait_began"]
    if len(order) not in wait_began:
        wait_began[len(order)] = now
        if cfg.wait_s:
            tqdm.write(f"no window after {order[-1]['name']} yet: waiting for {cfg.wait_s:g} s")
    return now - wait_began[len(order)] < cfg.wait_s


def _unseen_windows(cfg, windows, epoch, seen):
    """Yield the windows that are not in `seen`, and last None if the next one is still written. A
    window is opened when it is asked for.
    """
    found = find_windows(cfg)
    for window in windows["order"]:
        if len(found.get(window["name"], ())) > window["n_files"]:
            raise ValueError(f"{window['name']}: had {window['n_files']} files when it began, and "
                             "has more; move the new ones to a later window, and set more --rest_s")
    for name, files in found.items():
        if name in seen:
            continue
        if _is_new(cfg, files):
            yield None
            return
        record = windows["record_of"](name, files)
        if record["n"]:
            windows["files"][name] = files
            yield {"epoch": epoch} | record


def _files_of(cfg, windows, name):
    """The files of a window that was begun, perhaps by another process or before a resumption."""
    if name not in windows["files"]:
        found = find_windows(cfg)
        if name not in found:
            raise ValueError(f"{name}: the run has read this window, and it is gone; restore it")
        windows["files"][name] = found[name]
    return windows["files"][name]


def _is_new(cfg, files):
    """Whether one of these files was changed, or moved here, less than rest_s ago."""
    with contextlib.suppress(FileNotFoundError):
        # A copy may keep its st_mtime. A disk with another clock may have times in the future.
        return any(0 <= time.time() - os.stat(path).st_ctime < cfg.rest_s for path in files)
    return True


def _natural_order(name):
    """Sort by the numbers in a name, not by their digits: day2 before day10."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", name)]


def _window_record(size_of, name, files):
    """Make the record of a window in windows.jsonl, without its epoch."""
    n = int(size_of(files))
    if not n:
        tqdm.write(f"{name}: has no example; skipped")
    content = repr([data.content_id(Path(path)) for path in files])
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return {"name": name, "n": n, "n_files": len(files), "content": digest}


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
    ends = _window_bounds(cfg, windows["order"])[1:]
    return int(np.searchsorted(ends, step * cfg.batch_size, side="right"))


def _next_files(cfg, windows, step):
    """The files of the window that begins at `step`, as "next_files" of in_windows."""
    if _n_finished(cfg, windows, step) == _n_finished(cfg, windows, step - 1):
        return ()
    if not _extend_windows(cfg, windows, step * cfg.batch_size):
        return None
    n_begun = _n_finished(cfg, windows, step) + 1
    names = [window["name"] for window in windows["order"][:n_begun]]
    name = names.pop()
    return () if name in names else _files_of(cfg, windows, name)


def _read_jsonl(path):
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


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
