# SPDX-License-Identifier: Apache-2.0
"""Batches as a function of the step.

Owns token files and documents, tokenizers, preparation, packing, the order of training, and
placement on devices. Refuses files that are malformed or hold ids beyond the vocabulary. Invariant:
`batch_at(source, step, ...)` depends on its arguments alone; there is no iterator state. A source
is what `make_source` makes of shards; a shard is a dict: "name", "tokens" (1-D integers, left on
disk), and of text "documents", "masked", "counts" (see `tokenize_files`).
"""
import contextlib
import fcntl
import glob
import gzip
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import resource
import shutil
import threading
import time
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import chain, islice, repeat
from math import ceil, exp, inf, isqrt, lcm, log
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

IGNORE = -100  # label ignored by the loss


# ---- the shuffle

def hash64(x, key):
    """Hash uint64 to uint64. Source: the finalizer of splitmix64, Steele et al. 2014."""
    x = (x ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index, n, seed):
    """Map `index` (array in [0, n)) by the permutation of [0, n) that `seed` names, in O(1) memory.

    A Feistel network over the smallest near-square grid of at least n cells; what lands beyond n
    goes through again (cycle walking), which keeps it a permutation.
    """
    rows = np.uint64(isqrt(int(n) - 1) + 1)
    columns = np.uint64(-(-int(n) // int(rows)))
    seeds = np.uint64(zlib.crc32(str(seed).encode())) << np.uint64(20)
    keys = hash64(np.arange(1, 7, dtype=np.uint64), seeds)

    def network(x):
        row, column = x // columns, x % columns
        for even, odd in zip(keys[::2], keys[1::2]):
            row = (row + hash64(column, even) % rows) % rows
            column = (column + hash64(row, odd) % columns) % columns
        return row * columns + column

    out = network(np.asarray(index, np.uint64))
    while (outside := out >= n).any():
        out[outside] = network(out[outside])
    return out.astype(np.int64)


def examples_at(step, batch_size, n, seed=0, rows=None):
    """Choose the examples (int64 in [0, n)) in `rows` (default: all) of training batch `step`.

    Each of the n examples comes once an epoch, in another order each epoch; the last batch of an
    epoch is filled from the next.
    """
    return _shuffled(_places(step, batch_size, rows), n, seed)


def _places(step, batch_size, rows):
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    return step * batch_size + rows.astype(np.int64)


# ---- batches

SEQ_FORMAT = {"seq_len": 1, "vocab_size": 0, "packing": "stream", "document_mask": False,
        "truncation": "keep_start", "padding_side": "right"}


def make_source(shards, form=()):
    """Cut shards into sequences: {"shards", "form", "n": sequences, "ends": their running count by
    shard, "lengths": tokens of each shard}.

    form: of FORM, as the fields of these names in config.py; vocab_size 0: do not check ids. With
    fill "stream" sequences are windows of seq_len tokens, and every token but a shard's first is a
    label in exactly one: the last window of a shard overlaps the one before, with those labels
    ignored. With any other, a sequence is what `pack` puts into it.
    """
    form = SEQ_FORMAT | dict(form)
    T, lengths = form["seq_len"], np.array([len(shard["tokens"]) for shard in shards])
    if form["packing"] == "stream":
        counts = np.where(lengths > T, -(-(lengths - 1) // T), 0)
    else:
        shards = [shard if "rows" in shard else _fill_rows(shard, form) for shard in shards]
        counts = [len(shard["rows"][0]) - 1 for shard in shards]
    return {"shards": shards, "form": form, "n": int(sum(counts)), "ends": np.cumsum(counts),
            "lengths": lengths}


def batch_at(source, step, batch_size, seed=0, rows=None):
    """Build `rows` (default: all) of training batch `step`: int32 "tokens" and "labels"
    [rows, seq_len]; where documents are kept apart also "segments" (0: padding) and "positions".

    Raises: ValueError for an id that is not below vocab_size, and for a file that changed.
    """
    places = _places(step, batch_size, rows)
    if "parts" in source:
        return _mixed(source, places, seed)
    return _sequences(source, _shuffled(places, source["n"], seed))


def _sequences(source, examples):
    ends, whole = source["ends"], source["form"]["packing"] != "stream"
    shard_of = np.searchsorted(ends, examples, side="right")
    within = examples - np.where(shard_of, ends[shard_of - 1], 0)
    for i in shard_of[:2]:  # not of every row: it takes as long as to copy one
        _check_unchanged(source["shards"][i])
    return (_whole_documents if whole else _windows)(source, shard_of.tolist(), within)


def _windows(source, shard_of, within):
    """Windows of seq_len tokens; a shard's last is moved back to fit."""
    form, T = source["form"], source["form"]["seq_len"]
    shards = [source["shards"][i] for i in shard_of]
    starts = np.minimum(within * T, source["lengths"][shard_of] - 1 - T)
    windows = np.empty((len(shards), T + 1), np.int64)
    for row, shard, start in zip(windows, shards, starts.tolist()):
        row[:] = shard["tokens"][start : start + T + 1]
    check_ids(windows, form["vocab_size"], shards)
    tokens, labels = (x.astype(np.int32) for x in (windows[:, :-1], windows[:, 1:]))
    for row in np.flatnonzero(within * T - starts):  # the window before has these
        labels[row, : within[row] * T - starts[row]] = IGNORE
    for row, shard, start in zip(labels, shards, starts.tolist()):
        if "masked" in shard:
            row[shard["masked"][start + 1 : start + T + 1] == 1] = IGNORE
    batch = {"tokens": tokens, "labels": labels}
    return batch | (_segments(batch, shards, starts.tolist()) if form["document_mask"] else {})


# ---- to the devices

def local_rows(sharding, shape):
    """Find which rows (axis 0) of an array of `shape` this process's devices hold, sorted."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(shape[0])[i[0]] for i in indices]))


def to_device(batch, shardings, rows, batch_size):
    """Make global arrays [batch_size, ...] of any rank from the local rows that `batch` holds.

    shardings: {name: sharding}. rows: what local_rows gives for them, a row of `batch` each.
    """
    def place(x, sharding):
        def part(index):  # a device's rows are consecutive, so they are in `rows` too
            first, last, _ = index[0].indices(batch_size)
            return x[(slice(*np.searchsorted(rows, (first, last))), *index[1:])]

        return jax.make_array_from_callback((batch_size, *x.shape[1:]), sharding, part)

    return {name: place(x, shardings[name]) for name, x in batch.items()}


# ---- optional

def prefetch(make, start, stop, depth=2, stopped=lambda: False, busy=lambda: None,
             on_missing=lambda i: None):
    """Yield (make(i), seconds waited for it) for i in [start, stop). A thread makes `depth` items
    ahead.

    make(i) returns None while its data is missing, and is then called again. on_missing(i) is
    called once when the consumer has to wait for such an item. The iterator ends early when
    stopped() is true during a wait. busy() returns when the consumer has no other work left; the
    wait is counted from then.
    """
    pool = ThreadPoolExecutor(1, "data")
    closed = threading.Event()
    missing = set()

    def make_when_there(i):
        item = make(i)
        while item is None and not closed.wait(0.2):
            missing.add(i)
            item = make(i)
        return item

    ahead = deque()
    try:
        for i in range(start, min(start + depth, stop)):
            ahead.append(pool.submit(make_when_there, i))
        for i in range(start, stop):
            item = ahead.popleft()
            if not item.done():
                busy()
            began = time.perf_counter()
            is_reported = False
            while not wait([item], timeout=0.1).done:
                if stopped():
                    return
                if i in missing and not is_reported:
                    on_missing(i)
                    is_reported = True
            waited_s = time.perf_counter() - began
            if i + depth < stop:
                ahead.append(pool.submit(make_when_there, i + depth))
            yield item.result(), waited_s
    finally:
        closed.set()
        pool.shutdown(cancel_futures=True)


def open_text(parts, cfg):
    """{"train", "val"}: None where nothing is held out or the part is not asked for, else {"n":
    sequences, "batch": (index, rows) -> batch, "fingerprint", "bytes_per_token", "summary": text}.
    The "val" of a mixture has "parts", {name: one like it}; "train" in windows has more, see
    in_windows. cfg: any object with the fields under "data" in config.py, and batch_size seq_len
    vocab_size seed cache_dir out_dir.
    """
    tokenizer = make_tokenizer(cfg.tokenizer)
    form = {name: getattr(cfg, name) for name in SEQ_FORMAT}
    form["vocab_size"] = form["vocab_size"] or tokenizer["vocab_size"]
    homes = [os.path.expanduser(home) for home in (cfg.cache_dir, cfg.out_dir) if home]
    folders = [cfg.token_cache] if cfg.token_cache else [os.path.join(h, "data") for h in homes]
    for folder in folders:
        with contextlib.suppress(OSError):  # a cache that cannot be written: keep_programs says so
            os.makedirs(folder, exist_ok=True)
            break

    def opened(*patterns, may_be_empty=False):
        return open_source(
            patterns, tokenizer, form, cfg.data_dtype, folder, cfg.eod_id, may_be_empty)

    def part(source, at):
        return {
            "n": source["n"], "fingerprint": fingerprint(source), "summary": describe(source),
            "batch": lambda index, rows: at(source, index, cfg.batch_size, rows=rows),
            "bytes_per_token": bytes_per_token(source, tokenizer)}

    mixed = dict(each.rsplit("=", 1) for each in cfg.mix)
    parts_of_mix = {f"mix {name}": [name] for name in mixed}
    check_disjoint(parts_of_mix | {"data": cfg.data, "val_data": cfg.val_data})
    val = part(opened(*cfg.val_data), eval_batch_at) if cfg.val_data else None
    if "train" not in parts and (val or cfg.order == "windows"):
        return {"train": None, "val": val}
    if cfg.order == "windows":
        source_of = cache(partial(opened, may_be_empty=True))
        return {"val": val, "train": in_windows(
            cfg, lambda name: source_of(name)["n"],
            lambda name, examples: _sequences(source_of(name), examples))}
    sources = {name: opened(name) for name in mixed} or {"": opened(*cfg.data)}
    if cfg.val_frac and not val:
        pairs = {name: split(source, cfg.val_frac) for name, source in sources.items()}
        sources = {name: train for name, (train, _) in pairs.items()}
        vals = {name: part(held_out, eval_batch_at) for name, (_, held_out) in pairs.items()}
        val = vals.get("") or {"parts": vals, "summary": "; ".join(
            f"{name}: {each['summary']}" for name, each in vals.items())}
    train = mix([*sources.values()], [*mixed.values()])
    return {"train": part(train, partial(batch_at, seed=cfg.seed)), "val": val}


def check_disjoint(groups):
    """Raise ValueError for a file that is in two of {name: patterns}."""
    files = {name: {*map(os.path.realpath, expand(patterns, lenient=True))}
             for name, patterns in groups.items()}
    for path in sorted(set().union(*files.values())):
        if len(names := [name for name in files if path in files[name]]) > 1:
            raise ValueError(f"{path}: is in both {' and '.join(names)}; take it out of one")


BLOCK = 4096  # places of an epoch that are permuted in one call and cached


@lru_cache(maxsize=256)
def _permuted_block(block, n, seed):
    return permute(np.arange(block * BLOCK, min((block + 1) * BLOCK, n)), n, seed)


def _shuffled(places, n, seed):
    """The examples (int64 in [0, n)) at these places of shuffled epochs laid end to end; n may be
    an array, of one for each place. By cached blocks: to permute each batch is slower.
    """
    epochs, within = np.divmod(places, n)
    blocks, within = np.divmod(within, BLOCK)
    each = zip(blocks.tolist(), within.tolist(), epochs.tolist(),
               n.tolist() if np.ndim(n) else repeat(n))
    return np.array([_permuted_block(block, size, (seed, epoch))[place]
                     for block, place, epoch, size in each], np.int64)


def eval_examples_at(index, batch_size, n, rows=None):
    """Choose the examples in `rows` of evaluation batch `index`, and the mask of those that count.

    Each of the n examples counts once, in one fixed order that is shuffled so that the first few
    batches are a fair sample. Past the last, examples repeat with a mask of False.
    """
    places = _places(index, batch_size, rows)
    examples = [_permuted_block(place // BLOCK, n, "held out")[place % BLOCK]
                for place in (places % n).tolist()]
    return np.array(examples, np.int64), places < n


def eval_batch_at(source, index, batch_size, rows=None):
    """Build evaluation batch `index` as batch_at does: each sequence once, in a fixed order, then
    rows whose labels are all ignored.
    """
    examples, valid = eval_examples_at(index, batch_size, source["n"], rows)
    batch = _sequences(source, examples)
    batch["labels"][~valid] = IGNORE
    return batch


def mix(sources, weights):
    """A source whose sequences come from several in proportion to these weights (texts or numbers),
    each in epochs of its own: after any number of sequences the counts are within 1 of exact, so
    exact in every batch that can be divided so.

    Raises ValueError for weights that are not above 0 or repeat after more than 10,000 sequences.
    """
    if len(sources) == 1:
        return sources[0]
    weights = [Fraction(w) for w in weights]
    shares = [w / (sum(weights) or 1) for w in weights]
    cycle = lcm(*(share.denominator for share in shares))
    if min(weights) <= 0 or cycle > 10**4:
        raise ValueError(f"mix {' '.join(map(str, map(float, weights)))}: weights must be above 0 "
                         "and repeat within 10,000 sequences; round them, as in 0.7 and 0.3")
    counts, part_of, ranks = [0] * len(shares), [], []
    for place in range(cycle):  # of the sources not ahead of their share, the next to fall behind
        due = [(ceil((n + 1) / share), i) for i, (n, share) in enumerate(zip(counts, shares))
               if n <= share * place]
        part_of.append(min(due)[1])
        ranks.append(counts[part_of[-1]])
        counts[part_of[-1]] += 1
    n = max(ceil(each["n"] / share) for each, share in zip(sources, shares))
    sizes = np.array([each["n"] for each in sources])
    joined = make_source([shard for each in sources for shard in each["shards"]],
                         sources[0]["form"])
    return joined | {"parts": sources, "part_of": np.array(part_of), "rank": np.array(ranks),
                     "counts": np.array(counts), "n": n, "sizes": sizes,
                     "firsts": sizes.cumsum() - sizes}


def _mixed(source, places, seed):
    cycles, within = np.divmod(places, len(source["part_of"]))
    part_of = source["part_of"][within]
    places = cycles * source["counts"][part_of] + source["rank"][within]
    examples = _shuffled(places, source["sizes"][part_of], seed)
    return _sequences(source, source["firsts"][part_of] + examples)


def in_windows(cfg, size_of, read):
    """Training data in windows: one file of cfg.data after the other, each shuffled inside, in
    order of the numbers and letters in their names. Files without an example are skipped; those
    that appear later are found when the last window ends.

    size_of(name): how many examples are in a file. read(name, examples): a batch of these. Process
    0 writes each window to out_dir/windows.jsonl before it is used; there the others, and the run
    when it resumes, find it. Beside the keys of every source: "windows": step -> those begun before
    it; "n_finished": step -> number of windows used up; "next_window": step at which a window ends
    -> name of the next file, None when it is not there yet, "" when it was read before (or no
    window ends there); "restore": takes those of a checkpoint.
    """
    log, order, waits = Path(cfg.out_dir) / "windows.jsonl", [], {}
    B, lock, window_of = cfg.batch_size, threading.Lock(), cache(partial(_window, size_of))

    def ends(): return np.cumsum([0, *(window["n"] for window in order)])

    def restore(windows):  # and those that a killed run had begun since
        begun = _read_lines(log)
        order[:] = begun if windows and begun[: len(windows)] == windows else windows
        if not jax.process_index():
            _write_lines(log, order)

    def reaches(place):
        with lock:  # training asks in a thread of its own
            if ends()[-1] <= place and (begun := _read_lines(log)):
                order[:] = begun
            while ends()[-1] <= place and (window := _next_window(cfg, order, window_of, waits)):
                order.append(window)
                _write_lines(log, order)
            return ends()[-1] > place

    def n_finished(step):
        return int(np.searchsorted(ends()[1:], step * B, side="right"))

    def next_window(step):
        if n_finished(step) == n_finished(step - 1):
            return ""
        if not reaches(step * B):
            return None
        *seen, name = [window["name"] for window in order[: n_finished(step) + 1]]
        return "" if name in seen else name

    def batch(step, rows):
        if not reaches(step * B + B - 1):
            return None
        places = _places(step, B, rows)
        at = np.searchsorted(ends()[1:], places, side="right")  # the window of each place
        windows = {i: order[i] for i in np.unique(at).tolist()}
        for window in windows.values():
            _check_window(window, window_of(window["name"]))
        sizes = np.array([window["n"] for window in order])[at]
        # Each window is an epoch of its own: its number names the permutation.
        examples = _shuffled(places + at * sizes - ends()[at], sizes, cfg.seed)
        drawn = [read(window["name"], examples[at == i]) for i, window in windows.items()]
        return {key: np.concatenate([part[key] for part in drawn]) for key in drawn[0]}

    first = list(islice(_unseen(cfg, window_of, 0), cfg.windows_per_epoch or None))
    if not first:
        raise ValueError(f"data {' '.join(cfg.data) or '(none)'}: no file here has an example")
    about = f"{len(first)} windows, from {first[0]['name']} to {first[-1]['name']}"
    return {"n": sum(each["n"] for each in first) * cfg.window_repeats, "batch": batch,
            "fingerprint": "windows", "summary": about, "restore": restore,
            "n_finished": n_finished, "next_window": next_window,
            "windows": lambda step: order[: n_finished(step) + 1]}


def _read_lines(path):
    return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []


def _write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.with_suffix(".tmp").replace(path)


def _window(size_of, name):
    """What is written down of a file."""
    if not (n := int(size_of(name))):
        tqdm.write(f"{name}: has no example; left out")
    return {"name": name, "n": n, "bytes": _content(Path(name))}


def _check_window(window, now):
    if any(window.get(what, x) != x for what, x in now.items()):
        raise ValueError(f"{window['name']}: had {window['n']} examples when the run first read "
                         "it, and now has others; bring it back")


def _unseen(cfg, window_of, epoch, seen=()):
    """Yield the windows of files not in `seen`; a file is opened when its turn comes."""
    names = {*map(str, expand(cfg.data, lenient=True))} - {*seen}
    for name in sorted(names, key=lambda name: [
            int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", name)]):
        if os.path.getsize(name) and (window := window_of(name))["n"]:
            yield {"epoch": epoch} | window


def _next_window(cfg, order, window_of, waits):
    """The window after those of `order`: the same again, the next unseen one, or, once none came
    for wait_s or the epoch has its windows, the first of the next epoch. None: wait; only process 0
    chooses. waits: {number of windows: when there was first none after them}.
    """
    if jax.process_index():
        return None
    epoch = order[-1]["epoch"] if order else 0
    seen = [each["name"] for each in order if each["epoch"] == epoch]
    if seen and seen.count(seen[-1]) < cfg.window_repeats:
        return order[-1]
    if len({*seen}) < (cfg.windows_per_epoch or inf):
        if window := next(_unseen(cfg, window_of, epoch, seen), None):
            return window
        if len(order) not in waits and cfg.wait_s:
            tqdm.write(f"no window after {seen[-1]} yet: waiting for {cfg.wait_s:g} s")
        now = time.monotonic()
        if now - waits.setdefault(len(order), now) < cfg.wait_s:
            return None
    return next(_unseen(cfg, window_of, epoch + 1), None)


# Whole documents in rows.

def pack(lengths, room, one_each=False):
    """Put items of these lengths (0: nowhere) into rows of `room`: (bounds, items), row i having
    items[bounds[i]:bounds[i + 1]]. Best fit: longest first, each into the fullest row with room.
    """
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    if one_each:
        return np.arange(len(order) + 1), np.sort(order)
    row_of, n_rows, free, left = [], 0, [[] for _ in range(room + 1)], 0  # left: bit r, rows with r
    for size in lengths[order].tolist():
        fits = left >> size
        if fits:
            r = size + (fits & -fits).bit_length() - 1
            row = free[r].pop()
            left ^= (not free[r]) << r
        else:
            r, row, n_rows = room, n_rows, n_rows + 1
        free[r - size].append(row)
        left |= 1 << (r - size)
        row_of.append(row)
    items = order[np.lexsort((order, row_of))]
    return np.append(0, np.cumsum(np.bincount(row_of, minlength=n_rows))), items


def _fill_rows(shard, form):
    """The shard with "rows", (bounds, spans): row i has spans[bounds[i]:bounds[i + 1]], of each
    document the first token that is kept and the one after the last.
    """
    if "documents" not in shard:
        raise ValueError(f"{shard['name']}: packing {form['packing']} needs documents, and a token "
                         "has none; use text or .jsonl")
    (starts, stops), T = shard["documents"].T, form["seq_len"]
    long = stops - starts > T + 1
    if form["truncation"] == "error" and long.any():
        i = int(np.argmax(long))
        raise ValueError(f"{shard['name']}: document {i + 1} has {stops[i] - starts[i]} tokens, "
                         f"more than seq_len + 1 = {T + 1}; choose another --truncation or "
                         "--seq_len")
    if form["truncation"] == "keep_end":
        starts = np.maximum(starts, stops - T - 1)
    else:
        stops = np.where(long, starts + (0 if form["truncation"] == "drop" else T + 1), stops)
    lengths = np.maximum(stops - starts - 1, 0)
    if "masked" in shard and len(lengths):  # what has no label goes nowhere
        borders = np.stack([starts + 1, stops], axis=1).ravel()
        masked = np.append(shard["masked"], np.uint8(0))  # a border may be at the end
        lengths *= np.add.reduceat(masked, borders, dtype=np.int64)[::2] < lengths
    bounds, items = pack(lengths, T, form["packing"] == "none")
    return shard | {"rows": (bounds, np.stack([starts, stops], axis=1)[items])}


def _whole_documents(source, shard_of, within):
    T, padding_side = source["form"]["seq_len"], source["form"]["padding_side"]
    batch = {name: np.zeros((len(within), T), np.int32)
             for name in ("tokens", "labels", "segments", "positions")}
    batch["labels"][:] = IGNORE
    for row, (i, at) in enumerate(zip(shard_of, within.tolist())):
        shard, (bounds, spans) = source["shards"][i], source["shards"][i]["rows"]
        spans = spans[bounds[at] : bounds[at + 1]]
        place = T - int((np.diff(spans) - 1).sum()) if padding_side == "left" else 0
        for number, (a, b) in enumerate(spans.tolist(), 1):
            here, tokens = slice(place, place + b - a - 1), shard["tokens"][a:b].astype(np.int32)
            masked = shard["masked"][a + 1 : b] if "masked" in shard else 0
            batch["tokens"][row, here] = tokens[:-1]
            batch["labels"][row, here] = np.where(masked, IGNORE, tokens[1:])
            batch["segments"][row, here] = number
            batch["positions"][row, here] = np.arange(b - a - 1)
            place += b - a - 1
    check_ids(np.maximum(batch["tokens"], batch["labels"]), source["form"]["vocab_size"],
              [source["shards"][i] for i in shard_of])
    return batch


def _segments(batch, shards, starts):
    """"segments" and "positions" of windows, whose documents begin where _begins says."""
    tokens, labels = batch.values()
    begins = np.stack([_begins(*each) for each in zip(shards, starts, tokens, labels)])
    places = np.arange(tokens.shape[1], dtype=np.int32)[None]
    first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return {"segments": 1 + begins.cumsum(axis=1, dtype=np.int32), "positions": places - first}


def _begins(shard, start, tokens, labels):
    """Where documents begin in a window of a shard; a label across a border is ignored."""
    if "documents" not in shard:
        return tokens == shard["end"]
    begins, documents = np.zeros(len(tokens) + 1, bool), shard["documents"]
    window = shard["at"] + start + np.array([0, len(begins)])
    first, last = np.searchsorted(documents[:, 0], window)
    starts, stops = documents[max(first - 1, 0) : last].T - window[0]  # also of the one before
    begins[starts[starts >= 0]] = True
    borders = starts[1:][stops[:-1] <= starts[1:]]
    labels[borders[borders > 0] - 1] = IGNORE
    return begins[:-1]


# Files.

TOKEN_FILES = (".bin", ".npy")
N_SCANNED = 2**22  # tokens of a source whose ids are checked before training; the rest per batch


def open_source(patterns, tokenizer, form=(), dtype="uint16", folder=".prepared", end=-1,
                may_be_empty=False):
    """Open token files and documents given as files, globs and folders of Hugging Face datasets; by
    default Python's standard library.

    Each token file (.bin, .npy) is a shard; all documents are one shard, prepared in `folder`. end:
    the id that begins a document in token files, for packed rows; -1: unknown.
    Raises: ValueError naming the file that is missing, malformed, too short for a sequence with a
    label (unless may_be_empty), or has an id that is not below vocab_size.
    """
    form, paths = SEQ_FORMAT | dict(form), expand(patterns) if patterns else _standard_library()
    with contextlib.suppress(ValueError, OSError):  # each mapped file keeps a descriptor
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, min(most, 2**16)), most))
    binary = [p for p in paths if p.suffix in TOKEN_FILES]
    texts = [p for p in paths if p.suffix not in TOKEN_FILES]
    if binary and form["document_mask"] and not 0 <= end < (form["vocab_size"] or end + 1):
        raise ValueError(f"{binary[0]}: packed rows need the id that begins a document in token "
                         f"files, and {end} is none; set --eod_id (50256 in GPT-2's)")
    # Plain arrays of the mapped files: slicing a memmap takes longer than copying a row.
    shards = [{"name": str(p), "tokens": np.asarray(_tokens_in(p, dtype)), "at": 0, "end": end,
               "path": p, "size": p.stat().st_size} for p in binary]
    shards += [tokenize_files(texts, tokenizer, folder)] if texts else []
    source = make_source(shards, form)
    for shard, n in zip(source["shards"], np.diff(source["ends"], prepend=0)):
        tokens, T = shard["tokens"], form["seq_len"]
        if not n and not may_be_empty:
            raise ValueError(f"{shard['name']}: has {len(tokens)} tokens, and no sequence of {T} "
                             "with a label; use more data, another --seq_len or --truncation")
        if np.iinfo(tokens.dtype).max >= form["vocab_size"]:
            check_ids(tokens[None, : N_SCANNED // len(shards)], form["vocab_size"], [shard])
    return source


def tokenize_files(paths, tokenizer, folder):
    """The shard of the documents in these files, tokenized into `folder` unless it has them: one
    folder for the content of the files and the tokenizer. Of several processes one does the work,
    the others wait.

    "documents", int64 [n, 2]: first token of each and the one after its last; "masked", uint8: 1
    for tokens that are no labels; "counts" of what was read and left out.
    """
    name = str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    # Another text of what reads files makes other tokens of them.
    code = [zlib.crc32(inspect.getsource(f).encode()) for f in (
        rows_in, _arrow_rows, _pieces, _texts, _chat, _encoded, _write_prepared)]
    files = [p for path in paths for p in (path, *sorted(path.glob("*"))) if p.is_file()]
    # Beyond its first MiB a file is told by when it was last changed.
    content = [[p.suffixes[-2:], *_content(p), p.stat().st_size > 2**20 and p.stat().st_mtime_ns]
               for p in files]
    key = json.dumps([*code, tokenizer["key"], *content]).encode()
    final = Path(folder, hashlib.sha256(key).hexdigest()[:20])
    partial, about = final.with_suffix(".partial"), dict(name=name, at=0, path=final / "tokens")
    if there := _prepared(final, tokenizer):  # perhaps where nothing can be written
        return there | about
    with as_value_error(f"{name}: cannot be prepared in {folder}; make room there, or choose "
               "another folder with --token_cache", OSError):
        final.parent.mkdir(parents=True, exist_ok=True)
        with open(final.with_suffix(".lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # no locks here: at worst the work is done twice
                partial = final.with_suffix(f".{time.time_ns()}")
            if not _prepared(final, tokenizer):
                for leftover in (final, partial):
                    shutil.rmtree(leftover, ignore_errors=True)
                try:
                    partial.mkdir()
                    _write_prepared(paths, tokenizer, partial)
                    if not _prepared(final, tokenizer):
                        partial.rename(final)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    return _prepared(final, tokenizer) | about


def _content(path):
    """What tells the content of a file from another's: size, checksum of its first MiB; of a folder
    by datasets those of its state.json.
    """
    path = path / "state.json" if path.is_dir() else path
    with open(path, "rb") as file:
        return [path.stat().st_size, zlib.crc32(file.read(2**20))]


def _prepared(folder, tokenizer):
    """The arrays of prepared data, and of its shard "counts" and "size"; None when it is not there,
    or not whole.
    """
    kinds = {"tokens": tokenizer["dtype"], "documents": (np.int64, 2), "masked": np.uint8}
    with contextlib.suppress(OSError, ValueError, KeyError):
        index = json.loads((folder / "index.json").read_text())
        arrays = {name: np.asarray(np.memmap(folder / name, kinds[name], "r"))
                  for name in index["sizes"]}
        if all(arrays[name].nbytes == n for name, n in index["sizes"].items()):
            return arrays | {"counts": index["counts"], "size": arrays["tokens"].nbytes}


def _write_prepared(paths, tokenizer, folder):
    """Lay documents end to end: text between end ids that neighbours share, or, if the tokenizer
    has a begin id, between its own two; chats as their template writes them.
    """
    begin, end, dtype = tokenizer["bos"], tokenizer["eos"], tokenizer["dtype"]
    shared, first, after_chat, n_empty = begin is None, True, False, 0
    with (open(folder / "tokens", "wb") as tokens, open(folder / "masked", "wb") as masks,
          open(folder / "documents", "wb") as documents):
        def n():
            return tokens.tell() // dtype.itemsize

        def put(ids, masked):
            if np.any(masked):
                masks.seek(n())  # what is skipped reads as zeros
                masks.write(np.full(len(ids), masked, np.uint8))
            tokens.write(np.asarray(ids, dtype))

        for ids, masked, is_chat, last in _encoded(paths, tokenizer):
            if first and last and not len(ids):
                n_empty += 1
                continue
            if first:
                put([end] if shared else [] if is_chat else [begin], after_chat)
                documents.write(np.int64(n() - (not is_chat)))
            put(ids, masked)
            if last:
                documents.write(np.int64(n() + (not is_chat)))
                put([] if shared or is_chat else [end], 0)
                after_chat = is_chat
            first = last
        put([end] if shared else [], after_chat)
        masks.truncate(n() if masks.tell() else 0)
        n_documents = documents.tell() // 16
        if not n_documents:  # one of no tokens, which is in no row
            put([end], 0)
            documents.write(np.int64((0, 0)))
    sizes = {p.name: p.stat().st_size for p in folder.iterdir() if p.stat().st_size}
    for name in sizes:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    counts = {"documents": n_documents, "empty documents left out": n_empty}
    counts = {what: n for what, n in counts.items() if n}
    (folder / "index.json").write_text(json.dumps({"counts": counts, "sizes": sizes}))


def _encoded(paths, tokenizer):
    """Yield (ids, mask or 0, is_chat, last) of the documents, long texts in pieces of which one is
    the last; a tokenizer's library uses all cores for a batch.
    """
    total = sum(p.stat().st_size for path in paths for p in (path, *path.glob("*")))
    rows = (row for path in paths for row in rows_in(path, tokenizer["piece"]))
    with tqdm(total=total, unit="B", unit_scale=True, desc="preparing", delay=1, disable=None,
              leave=False) as bar:
        while batch := list(islice(rows, 512)):
            texts = [_texts(row, where) for where, row, _ in batch]
            encoded = iter(tokenizer["encode_batch"]([*chain(*texts)]))
            bar.update(sum(map(len, chain(*texts))))
            for (where, row, last), of_row in zip(batch, texts):
                ids = [next(encoded) for _ in of_row]
                if not ids:
                    yield *_chat(row, tokenizer, where), True, last
                else:
                    masked = np.repeat([1, 0], [*map(len, ids)]) if len(ids) == 2 else 0
                    yield np.concatenate(ids), masked, False, last


def _chat(row, tokenizer, where):
    """(ids, mask) of a conversation in the tokenizer's template. Labels are each of the
    assistant's turns and the id that ends it: what the template adds to its rendering of the
    messages before.
    """
    messages, library = row["messages"], tokenizer["chat"] and tokenizer["chat"]()
    if not getattr(library, "chat_template", None):
        raise ValueError(f"{where}: messages need a chat template; set --tokenizer to a folder "
                         "that transformers saved with one")

    def render(n, prompt=False):
        # A template raises what it likes.
        with as_value_error(f"{where}: the chat template refuses it", Exception):
            return library.apply_chat_template(messages[:n], tools=row.get("tools"), tokenize=False,
                                               add_generation_prompt=prompt)

    text = render(len(messages))
    out = library(text, add_special_tokens=False, return_offsets_mapping=True)
    starts, ends = np.array(out["offset_mapping"]).T
    masked = np.ones(len(starts), np.uint8)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, turn = render(i, prompt=True), render(i + 1).rstrip()
            if not text.startswith(turn):  # eos may stand after the last turn alone
                last = library(turn, add_special_tokens=False)["input_ids"][-1:]
                mark = library.decode(last)
                turn = turn.removesuffix(library.eos_token or "").rstrip()
            if not text.startswith(turn):  # it leaves out the thinking of earlier turns
                turn = "".join(text[len(before):].partition(mark)[:2])
                turn = before + turn if turn.endswith(mark) else None
            if turn is None or not text.startswith(before):
                raise ValueError(f"{where}: message {i + 1}: the chat template writes it, or the "
                                 "messages before, in another way when others follow; use another "
                                 "template")
            masked[(ends > len(before)) & (starts < len(turn))] = 0  # a token may span the border
    return np.array(out["input_ids"]), masked


def _texts(row, where):
    """The texts of a row of a file: one, or prompt and completion; none of a chat."""
    row = row if isinstance(row, dict) else {}
    for names in (["text"], ["prompt", "completion"]):
        if all(isinstance(row.get(name), str) for name in names):
            texts = [row[name] for name in names]
            whole = "".join(texts)
            if "\0" in whole or (not whole.isascii() and re.search("[\ud800-\udfff]", whole)):
                raise ValueError(f"{where}: has a zero byte or a lone surrogate, which no text has")
            return texts
    fields = ", ".join(f"{name} ({type(x).__name__})" for name, x in row.items())
    if not isinstance(row.get("messages"), list):
        raise ValueError(f"{where}: not an object with a string 'text', strings 'prompt' and "
                         f"'completion', or a list 'messages'; it has {fields or 'no fields'}")
    roles = ["system", "developer", "user"]
    for i, message in enumerate(row["messages"], 1):
        if not isinstance(message, dict) or message.get("role") not in roles:
            raise ValueError(f"{where}: message {i} must have a role of {', '.join(roles)}: "
                             f"{str(message)[:80]}")
        roles = ["system", "developer", "user", "assistant", "tool"]
    return []


def rows_in(path, size):
    """Yield (where, row, last) of the rows of a file or folder: of .jsonl and .json one a line, of
    .json also those of one array; of a text pieces of `size` characters.
    """
    kind, where = path.name.lower().removesuffix(".gz").removesuffix(".zst"), str(path)
    if path.is_dir() or kind.endswith(".parquet"):
        for number, row in enumerate(_arrow_rows(path), 1):
            yield f"{path} row {number}", row, True
        return
    if path.suffix == ".zst":  # unlike zstandard's, this reader minds a file that is cut off
        file = require("pyarrow", path).input_stream(where, compression="zstd")
    else:
        file = (gzip.open if path.suffix == ".gz" else open)(path, "rb")
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n") as file:
        try:
            if not kind.endswith((".json", ".jsonl")):
                yield from ((where, {"text": text}, last) for text, last in _pieces(file, size))
                return
            for number, line in enumerate(file, 1):
                where = f"{path} line {number}"
                if kind.endswith(".json") and line.lstrip()[:1] == "[":  # an array, to the end
                    for i, row in enumerate(json.loads(line + file.read()), 1):
                        yield f"{path} row {i}", row, True
                elif line.strip():
                    yield where, json.loads(line), True
        except UnicodeDecodeError as e:
            there = e.object[max(0, e.start - 20) : e.end]
            raise ValueError(f"{path}: not UTF-8 at {there!r}; data is text, .json(l) (or .gz, "
                             ".zst), .bin, .npy, .parquet, or by datasets.save_to_disk") from None
        except (ValueError, RecursionError, OSError, EOFError, zlib.error) as e:
            raise ValueError(f"{where}: damaged, or not JSON: {e}") from None


# Where text is cut, the last of its lines or words: tokenizers split there anyway.
BORDERS = [re.compile(r"(?s).*" + border) for border in (
    r"\S\n(?=[^\W_])", r"[^\W_](?=\s)")]  # before a letter or digit; after one


def _pieces(file, size):
    """Yield (text, whether it is the last) in pieces of some `size` characters (-1: whole)."""
    text = file.read(size)
    while more := file.read(size):
        new = max(0, len(text) - 2)
        text += more
        if cut := next(filter(None, (border.match(text, new) for border in BORDERS)), None):
            yield text[: cut.end()], False
            text = text[cut.end() :]
    yield text, True


def _arrow_rows(path):
    """Yield the rows of a .parquet file, or of a folder by datasets.save_to_disk, as dicts."""
    parquet, ipc = require("pyarrow.parquet", path), require("pyarrow.ipc", path)
    faults = OSError, KeyError, ValueError  # ArrowInvalid is a ValueError
    with as_value_error(f"{path}: not a .parquet file or a folder of datasets", *faults):
        if path.is_file():
            batches = parquet.ParquetFile(path).iter_batches()
        else:
            state = json.loads((path / "state.json").read_text())
            batches = (batch for part in state["_data_files"]
                       for batch in ipc.open_stream(str(path / part["filename"])))
        for batch in batches:
            yield from batch.to_pylist()


def require(module, what):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(f"{what}: needs `pip install {module.partition('.')[0]}`") from None


@contextlib.contextmanager
def as_value_error(what, *kinds):
    """Raise exceptions of these kinds as a ValueError that says `what`, then what they say."""
    try:
        yield
    except kinds as e:
        raise ValueError(f"{what}: {e}") from None


def _check_unchanged(shard):
    """Raise ValueError when a file has another size: reading beyond its end ends the process."""
    with as_value_error(f"{shard['name']}: was taken away while a run reads it", OSError):
        size = os.stat(shard["path"]).st_size if "path" in shard else None
    if "path" in shard and size != shard["size"]:
        raise ValueError(f"{shard['path']}: had {shard['size']} bytes when it was opened and has "
                         f"{size} now; data must not change while a run reads it")


def split(source, held_out):
    """Split into (train, held-out) sources: the last fraction `held_out` of all tokens is held out,
    of whole documents where rows are made of these. A shard is never cut into a part shorter than
    seq_len + 1.

    Raises: ValueError when one side would have no sequence.
    """
    form, sides = source["form"], ([], [])
    cut, seq_len = round(sum(source["lengths"].tolist()) * (1 - held_out)), form["seq_len"]
    for shard in source["shards"]:
        n = len(shard["tokens"])
        at, cut = min(max(cut, 0), n), cut - n
        if form["packing"] == "stream":
            cut_names = "tokens", "masked"
            at = 0 if at <= seq_len else n if n - at <= seq_len else at
        else:
            cut_names, starts = ("documents",), shard["documents"][:, 0]
            at = len(starts) if at == n else min(np.searchsorted(starts, at), len(starts) - 1)
        for side, here in zip(sides, (slice(0, at), slice(at, None))):
            part = {name: x[here] if name in cut_names else x for name, x in shard.items()
                    if name != "rows"}
            if form["packing"] == "stream":
                part["at"] += here.start
            side += [part] if len(part[cut_names[0]]) else []
    sources = [make_source(side, form) for side in sides]
    for what, side in zip(("training", "held-out"), sources):
        if not side["n"]:
            raise ValueError(f"val_frac {held_out}: leaves no {what} sequence of {seq_len + 1} "
                             "tokens; give --val_data, more data or a shorter --seq_len")
    return tuple(sources)


def bytes_per_token(source, tokenizer):
    """Bytes of text per token of a source that is all text, counted in the first MiB of tokens of
    each shard; None for others.
    """
    n_bytes = n_tokens = 0
    for shard in source["shards"]:
        if "documents" not in shard or "masked" in shard:
            return None
        first = shard["documents"][0, 0] if "rows" in shard else 0
        ids = shard["tokens"][first : first + 2**20]
        marks = np.isin(ids, [tokenizer[x] for x in ("bos", "eos") if tokenizer[x] is not None])
        n_bytes += tokenizer["n_bytes"](ids[~marks]) + int(marks.sum())  # an end counts as one
        n_tokens += len(ids)
    return n_bytes / n_tokens


def describe(source):
    """What was read, and what of it was left out, in words."""
    if "parts" in source:
        return "; ".join(f"{n / source['counts'].sum():.3g} of {each['shards'][0]['name']}: "
                         f"{describe(each)}" for n, each in zip(source["counts"], source["parts"]))
    form, shards = source["form"], source["shards"]
    if form["packing"] == "stream":
        return ", ".join([
            f"{source['lengths'].sum():,} tokens, {source['n']:,} sequences",
            *(f"{n:,} {what}" for shard in shards if not shard["at"]
              for what, n in shard.get("counts", {}).items())])
    n_tokens = np.concatenate([np.diff(shard["documents"]) for shard in shards])
    used = sum((np.diff(shard["rows"][1]) - 1).sum() for shard in shards)
    n_used = sum(len(shard["rows"][1]) for shard in shards)
    return (f"{n_used:,} of {len(n_tokens):,} documents in {source['n']:,} sequences, "
            f"{(n_tokens - 1 > form['seq_len']).sum():,} longer (--truncation "
             f"{form['truncation']}), "
            f"{used:,} of {(n_tokens - 1).sum():,} tokens, "
            f"{1 - used / (source['n'] * form['seq_len']):.1%} padding")


def fingerprint(source):
    """Describe the data in a line that differs when it does: token counts and a checksum of the
    first and last 2^20 tokens of each shard, less of each where there are many.
    """
    shards, crc = source["shards"], 0
    n = max(2**20 // len(shards), 2**10)
    for x in (shard[name] for shard in shards for name in ("tokens", "masked") if name in shard):
        crc = zlib.crc32(np.ascontiguousarray(x[:n]), crc)
        crc = zlib.crc32(np.ascontiguousarray(x[-n:]), crc)
    return f"{source['lengths'].sum()} tokens in {len(shards)} shards, crc32 {crc:08x}"


def text_metrics(means, source):
    """Perplexity per token, and bits per byte where the source is text."""
    loss, bytes_per_token = float(means["loss"]), source.get("bytes_per_token")
    bits = {"bits_per_byte": loss / log(2) / bytes_per_token} if bytes_per_token else {}
    return {"ppl": exp(min(loss, 700))} | bits


def _standard_library():
    """List Python's own sources without their tests: real text on any machine that runs this."""
    root, paths = Path(os.__file__).parent, []
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skip  # os.walk then does not enter them
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths, key=lambda p: p.relative_to(root).as_posix())


def expand(patterns, lenient=False, field="data"):
    """List the files that match, sorted within each pattern. Raises: ValueError if none does,
    unless lenient. field: the name of the flag, for that error.
    """
    paths = []
    for pattern in map(str, patterns):
        names = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        found = [name for name in sorted(names)  # one that exists may have brackets
                 if os.path.isfile(name) or os.path.isfile(os.path.join(name, "state.json"))]
        if not lenient and not found:
            raise ValueError(f"{field} {pattern!r}: no such file, and no file matches it as a "
                             "glob; name the files of a folder as in 'folder/*.txt'")
        paths += map(Path, found)
    return [*{os.path.realpath(path): path for path in paths}.values()]


# {(magic, version): token dtype} of the header (256 int32) of llm.c's token files.
LLMC_HEADERS = {(20240520, 1): np.dtype("uint16"), (20240801, 7): np.dtype("uint32")}


def _tokens_in(path, dtype):
    """Map the tokens of a .npy or .bin file; dtype is that of a .bin file without a header."""
    if path.suffix == ".npy":
        with as_value_error(f"{path}: not a .npy file", ValueError, EOFError, OSError):
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{path}: has {tokens.ndim} dims of {tokens.dtype}, not 1 of integers")
        return tokens
    size, dtype, head = path.stat().st_size, np.dtype(dtype), np.fromfile(path, np.int32, 256)
    if len(head) == 256 and head[0] and not head[3:].any():  # 253 zeros: a header
        kind, count = tuple(head[:2].tolist()), int(head[2])
        if kind not in LLMC_HEADERS:
            raise ValueError(f"{path}: header (magic, version) is {kind}; known: {[*LLMC_HEADERS]}")
        dtype = LLMC_HEADERS[kind]
        if size != 1024 + count * dtype.itemsize:
            raise ValueError(f"{path}: header says {count} tokens of {dtype}, which is "
                             f"{1024 + count * dtype.itemsize} bytes; the file has {size}")
        return np.memmap(path, dtype, "r", 1024, (count,))
    if size % dtype.itemsize or not size:
        raise ValueError(f"{path}: {size} bytes is no whole number of {dtype}; set --data_dtype"
                         if size else f"{path}: is empty; leave it out")
    tokens = np.memmap(path, dtype, "r")
    if size >= 64 and dtype == np.uint16 and not tokens[1:2**16:2].any() and tokens[:2**16:2].any():
        raise ValueError(f"{path}: every second uint16 is 0; set --data_dtype uint32")
    return tokens


def check_ids(rows, vocab_size, shards):
    """Raise ValueError for an id of a shard's row that is not in [0, vocab_size); 0: any may be."""
    if vocab_size and rows.size and (rows.min() < 0 or rows.max() >= vocab_size):
        bad = (rows < 0) | (rows >= vocab_size)
        i = int(np.argmax(bad.any(axis=1)))
        raise ValueError(
            f"{shards[i]['name']}: token id {rows[i][bad[i]][0]} is not in [0, {vocab_size}); set "
            "--vocab_size, or use the tokenizer that wrote the file")


# Tokenizers.

TOKENIZER_FILES = ("*token*.json", "*token*.model", "vocab.*", "merges.txt", "chat_template*",
                   "generation_config.json")


def make_tokenizer(name):
    """Make {"encode": str -> 1-D array, "encode_batch": the same of a list, "decode": ids -> str,
    "n_bytes": ids -> bytes of text, "vocab_size", "dtype", "bos", "eos": ids around a document
    (bos None: an eos also stands before it), "stops": ids that end a sample, "chat": None or a
    function that loads transformers' tokenizer, "piece": characters of the pieces in which a text
    is encoded (-1: whole), "key": what tells it from others}.

    name: "bytes", a tokenizer.json, a folder that transformers saved, or tiktoken:ENCODING.
    """
    own = {"bos": None, "eos": 0, "chat": None, "key": name, "piece": 2**14}
    if name == "bytes":
        own |= {"vocab_size": 256, "decode": _decode_bytes, "n_bytes": len, "piece": 2**18,
                "encode_batch": lambda texts: [np.frombuffer(text.encode(), np.uint8)
                                               for text in texts]}
    else:
        own |= (_tiktoken if name.startswith("tiktoken:") else _library_tokenizer)(name)
    dtype = np.min_scalar_type(own["vocab_size"] - 1)
    def encode_batch(texts): return [np.asarray(ids, dtype) for ids in own["encode_batch"](texts)]
    def encode(text): return encode_batch([text])[0]
    def decode(ids): return own["decode"](np.asarray(ids).tolist())
    probe = "One two 3\n", "four five.\n", "Six  seven,\n", "eight", " nine"
    same = np.array_equal(encode("".join(probe)), np.concatenate(encode_batch(probe)))
    return {"n_bytes": lambda ids: len(decode(ids).encode()), "stops": {own["eos"]}, **own,
            "dtype": dtype, "piece": own["piece"] if same else -1, "encode": encode,
            "encode_batch": encode_batch, "decode": decode}


def copy_tokenizer(name, folder):
    """Copy the files of a Hugging Face tokenizer into a folder; return False for another tokenizer.

    name: of `make_tokenizer`.
    """
    path = Path(name)
    files = set()
    for pattern in TOKENIZER_FILES:
        files.update(path.glob(pattern))
    for file in files:
        shutil.copy(file, folder)
    if path.is_file():
        shutil.copy(path, Path(folder, "tokenizer.json"))
    return path.exists()


def _decode_bytes(ids):
    pieces = [bytes([i]) if i < 256 else b"<%d>" % i for i in ids]
    return b"".join(pieces).decode(errors="replace")


def _tiktoken(name):
    library = require("tiktoken", f"tokenizer {name!r}")
    # No such name, or its files are not to be had.
    with as_value_error(f"tokenizer {name!r}", Exception):
        tok = library.get_encoding(name.partition(":")[2])
    return {"encode_batch": tok.encode_ordinary_batch, "decode": tok.decode,
            "vocab_size": tok.n_vocab, "eos": tok.eot_token}


def _library_tokenizer(name):
    """Those of Hugging Face: tokenizers, and for chats transformers."""
    path = Path(name, "tokenizer.json") if os.path.isdir(name) else Path(name)
    if not path.is_file():
        raise ValueError(f"tokenizer {name!r}: neither 'bytes', a tokenizer.json file, a folder "
                         "with one, nor tiktoken:NAME")
    library, settings = require("tokenizers", f"tokenizer {name!r}"), {}
    # The library raises what it likes.
    with as_value_error(f"tokenizer {name!r}: cannot be read", Exception):
        tok = library.Tokenizer.from_file(str(path))
        if os.path.isdir(name) and (file := path.with_name("tokenizer_config.json")).exists():
            settings = dict(json.loads(file.read_bytes()))
    tok.no_truncation()  # a tokenizer.json keeps both as they were last used
    tok.no_padding()
    files = sorted({p for pattern in TOKENIZER_FILES for p in Path(name).glob(pattern)}) or [path]

    @cache
    def chat():
        library = require("transformers", f"tokenizer {name!r}: a chat")
        with as_value_error(f"tokenizer {name!r}: cannot be read", Exception):
            return library.AutoTokenizer.from_pretrained(
                name, local_files_only=True, trust_remote_code=False)

    eos = settings.get("eos_token")
    eos = eos["content"] if isinstance(eos, dict) else eos  # in a chat, the end of a turn
    names = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", *([eos] if eos else []))
    ends = [i for i in map(tok.token_to_id, names) if i is not None]
    if not ends:
        raise ValueError(f"tokenizer {name!r}: has no end-of-document token of {', '.join(names)}")
    end = ends[0]
    framed = [i for i in tok.encode("").ids if i != end]  # what it puts before a text by itself
    return {"encode_batch": lambda texts: [each.ids for each in tok.encode_batch_fast(
                texts, add_special_tokens=False)],
            "decode": partial(tok.decode, skip_special_tokens=False),
            "vocab_size": max(tok.get_vocab().values()) + 1,  # there may be gaps
            "bos": framed[0] if framed else None, "eos": end,
            "stops": {end, tok.token_to_id(eos) if eos else end},
            "chat": chat if len(files) > 1 else None,
            "key": [zlib.crc32(file.read_bytes()) for file in files]}
