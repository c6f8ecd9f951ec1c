# SPDX-License-Identifier: Apache-2.0
"""Batches as a function of the step.

Owns reading token files and text, tokenizers, the order of an epoch, and the way to the devices.
Refuses files that are not what they seem. Invariant: `batch_at(source, step, ...)` depends on its
arguments alone; no iterator state exists. A source is a plain dict: "shards" (1-D integer arrays,
possibly on disk), "names", "bytes_per_token".
"""
import glob
import json
import os
import sysconfig
import time
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import isqrt
from pathlib import Path

import jax
import numpy as np

IGNORE = -100  # label of a position that is not learnt
END = b"\0"  # between documents, where the tokenizer is bytes
# {magic: (version, token dtype)} of llm.c's headers of 256 int32.
MAGIC = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
BLOCK = 4096  # places of an epoch whose order is worked out together
SCAN = 2**28  # tokens per shard whose ids are checked before training; the rest batch by batch


# ---- tokenizers

def make_tokenizer(name):
    """{"encode": str or bytes -> 1-D array, "decode": ids -> str, "vocab_size", "end": id between
    documents}.
    """
    if name == "bytes":
        return {
            "encode": lambda text: np.frombuffer(
                text if isinstance(text, bytes) else text.encode(), np.uint8),
            "decode": lambda ids: b"".join(
                bytes([i]) if i < 256 else b"<%d>" % i
                for i in np.asarray(ids).tolist()).decode(errors="replace"),
            "vocab_size": 256, "end": END[0],
        }
    if not Path(name).is_file():
        raise ValueError(f"tokenizer {name!r}: neither 'bytes' nor a tokenizer.json file")
    try:
        import tokenizers
    except ImportError:
        raise ValueError(f"tokenizer {name!r}: needs `pip install tokenizers`") from None
    try:
        tok = tokenizers.Tokenizer.from_file(name)
    except Exception as e:  # the library raises Exception itself
        raise ValueError(f"tokenizer {name!r}: not a tokenizer.json: {e}") from None
    names = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
    ends = [tok.token_to_id(n) for n in names]
    end = next((i for i in ends if i is not None), None)
    if end is None:
        raise ValueError(f"tokenizer {name!r}: has no end-of-document token among "
                         + ", ".join(names))
    text = lambda t: t.decode(errors="replace") if isinstance(t, bytes) else t
    return {
        "encode": lambda t: np.asarray(
            tok.encode(text(t), add_special_tokens=False).ids, np.uint32),
        "decode": lambda ids: tok.decode(np.asarray(ids).tolist(), skip_special_tokens=False),
        "vocab_size": tok.get_vocab_size(), "end": end,
    }


# ---- sources

def _standard_library():
    """Python's own sources, without its tests: real text on every machine that runs this."""
    root, paths = Path(sysconfig.get_path("stdlib")), []
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skip  # what it does not enter takes no time
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths, key=lambda p: p.relative_to(root).as_posix())


def _expand(patterns):
    """Files of the patterns, sorted within each. Raises ValueError for a pattern without a file."""
    paths = []
    for pattern in patterns:
        found = sorted(p for p in glob.glob(str(pattern), recursive=True) if Path(p).is_file())
        if not found:
            raise ValueError(f"data {str(pattern)!r}: " + (
                "is a folder; name its files, as in 'folder/*.txt'" if Path(pattern).is_dir() else
                "no such file, and no file matches it as a glob"))
        paths += map(Path, found)
    return paths


def _tokens_in(path, dtype):
    """The tokens of a .npy or .bin file, left on disk."""
    size = path.stat().st_size
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as e:
            raise ValueError(f"{path}: not a .npy file: {e}") from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{path}: has {tokens.ndim} dims of {tokens.dtype}; "
                             "one dim of integers is wanted")
        return tokens
    head = np.fromfile(path, np.int32, 256)
    if len(head) == 256 and not head[3:].any():  # a token file does not start with 500 zeros
        magic, version, count = head[:3].tolist()
        if magic not in MAGIC or version != MAGIC[magic][0]:
            raise ValueError(f"{path}: header has magic {magic} version {version}; known: "
                             + ", ".join(f"{m} version {v}" for m, (v, _) in MAGIC.items()))
        dtype = np.dtype(MAGIC[magic][1])
        if size != 1024 + count * dtype.itemsize:
            raise ValueError(f"{path}: header says {count} tokens of {dtype}, which is "
                             f"{1024 + count * dtype.itemsize} bytes; the file has {size}")
        return np.memmap(path, dtype, "r", 1024, (count,))
    if size % np.dtype(dtype).itemsize:
        raise ValueError(f"{path}: {size} bytes is no whole number of {np.dtype(dtype)} tokens; "
                         "is --data_dtype right?")
    return np.memmap(path, dtype, "r")


def _documents(path):
    """The documents of a text file (one) or a .jsonl file (the "text" of each line), as bytes."""
    if path.suffix != ".jsonl":
        return [path.read_bytes()]
    documents = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            documents += [json.loads(line)["text"].encode()] if line.strip() else []
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} line {number}: "
                             'an object with a string "text" is wanted') from None
    return documents


def open_source(patterns, tokenizer, dtype="uint16", seq_len=1, vocab_size=None):
    """The source of files or globs; of Python's standard library when there are none.

    All text becomes one shard, documents ended by the tokenizer's end token; each token file is a
    shard. Raises ValueError that names the file which is missing, empty, malformed, shorter than
    seq_len + 1 tokens, or holds an id that is not below vocab_size.
    """
    paths = _expand(patterns) if patterns else _standard_library()
    binary = [p for p in paths if p.suffix in (".bin", ".npy")]
    texts = [p for p in paths if p not in set(binary)]
    for path in binary + (texts if patterns else []):
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: the file is empty")
    # Plain arrays of the mapped files: slicing a memmap takes longer than copying a row.
    shards, names = [np.asarray(_tokens_in(p, dtype)) for p in binary], [str(p) for p in binary]
    n_bytes = 0
    if texts:
        documents = [d for p in texts for d in _documents(p)]
        n_bytes = sum(map(len, documents)) + len(documents)
        if tokenizer["end"] == END[0] and tokenizer["vocab_size"] == 256:
            shards.append(np.frombuffer(END + END.join(documents) + END, np.uint8))
        else:
            ends = np.asarray([tokenizer["end"]], np.uint32)
            pieces = [piece for d in documents for piece in (ends, tokenizer["encode"](d))]
            shards.append(np.concatenate([*pieces, ends]).astype(np.uint32))
        names.append(str(texts[0]) + (f" and {len(texts) - 1} more" if len(texts) > 1 else ""))
    source = {"shards": shards, "names": names,
              "bytes_per_token": None if binary else n_bytes / max(len(shards[0]) - 1, 1)}
    check(source, seq_len, vocab_size)
    return source


def check(source, seq_len, vocab_size=None):
    """Raise ValueError that names the shard with too few tokens, or with an id that is not below
    vocab_size.
    """
    for name, shard in zip(source["names"], source["shards"]):
        if len(shard) < seq_len + 1:
            raise ValueError(f"{name}: has {len(shard)} tokens, "
                             f"fewer than seq_len + 1 = {seq_len + 1}; "
                             "use longer files or a smaller --seq_len")
        if vocab_size and np.iinfo(shard.dtype).max >= vocab_size:
            _check_ids(shard[:SCAN], vocab_size, name)


def _check_ids(tokens, vocab_size, name):
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"{name}: token id {bad} is not in [0, {vocab_size}); "
                         "set --vocab_size, or use the tokenizer that wrote the file")


def split(source, held_out, seq_len=1):
    """(train, held-out) sources: the last share `held_out` of all tokens is held out.

    A piece of a shard shorter than seq_len + 1 stays with the rest of its shard.
    Raises ValueError when a side would have no sequence.
    """
    cut = round(sum(map(len, source["shards"])) * (1 - held_out))
    sides = [], []
    for name, shard in zip(source["names"], source["shards"]):
        here = min(max(cut, 0), len(shard))
        here = 0 if here <= seq_len else len(shard) if len(shard) - here <= seq_len else here
        cut -= len(shard)
        for side, part in zip(sides, (shard[:here], shard[here:])):
            side += [(name, part)] if len(part) else []
    for what, side in zip(("training", "held-out"), sides):
        if not side:
            raise ValueError(f"val_frac {held_out}: leaves no {what} sequence of {seq_len + 1} "
                             "tokens; give --val_data, more data or a shorter --seq_len")
    return tuple(source | {"names": [n for n, _ in side], "shards": [s for _, s in side]}
                 for side in sides)


def fingerprint(source):
    """A short text that differs when the data does: tokens per shard and a checksum of their ends.
    """
    crc = 0
    for shard in source["shards"]:
        crc = zlib.crc32(np.ascontiguousarray(shard[:2**20]), crc)
        crc = zlib.crc32(np.ascontiguousarray(shard[-2**20:]), crc)
    n_tokens = sum(map(len, source["shards"]))
    return f"{n_tokens} tokens in {len(source['shards'])} shards, crc32 {crc:08x}"


# ---- batches

def n_sequences(source, seq_len):
    """Windows of seq_len tokens and their labels: every token of every shard is a label once, the
    last window of a shard overlapping the one before so that none is left over.
    """
    return sum(_windows(shard, seq_len) for shard in source["shards"])


def _windows(shard, seq_len):
    return -(-(len(shard) - 1) // seq_len)


def _mix(x, key):
    """A 64-bit hash. Source: the finaliser of splitmix64, Steele et al. 2014."""
    x = (x ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index, n, seed):
    """Where `index` (array in [0, n)) goes under the permutation of [0, n) that `seed` names, in
    O(1) memory.

    A Feistel network on the nearly square rectangle that holds n; the few places beyond n are sent
    through again.
    """
    rows = np.uint64(isqrt(int(n) - 1) + 1)
    columns = np.uint64(-(-int(n) // int(rows)))
    seeds = np.uint64(zlib.crc32(str(seed).encode())) << np.uint64(20)
    keys = _mix(np.arange(1, 7, dtype=np.uint64), seeds)

    def network(x):
        row, column = x // columns, x % columns
        for even, odd in zip(keys[::2], keys[1::2]):
            row = (row + _mix(column, even) % rows) % rows
            column = (column + _mix(row, odd) % columns) % columns
        return row * columns + column

    out = network(np.asarray(index, np.uint64))
    while (outside := out >= n).any():
        out[outside] = network(out[outside])
    return out.astype(np.int64)


@lru_cache(maxsize=4)
def _order(block, n, seed):
    """The sequences at the places of a block; a batch's share of that work is small."""
    return permute(np.arange(block * BLOCK, min((block + 1) * BLOCK, n)), n, seed)


def _sequences(places, n, seed):
    """permute(places, n, seed), by blocks."""
    blocks, within = np.divmod(places, BLOCK)
    if (blocks == blocks[0]).all():
        return _order(int(blocks[0]), n, seed)[within]
    return np.array([_order(int(b), n, seed)[w] for b, w in zip(blocks, within)])


def batch_at(source, step, batch_size, seq_len, seed=0, rows=None, vocab_size=None, end=None):
    """Batch `step` (from 0): int32 {"tokens", "labels"} [rows, seq_len], and, given the id `end`
    that starts a document, "segments" and "positions", which count documents and restart in each.

    Every sequence comes once an epoch, in an order of its own each epoch; the last batch of an
    epoch is filled from the next. rows: which of the batch_size rows to build; default all. Raises
    ValueError for an id that is not below vocab_size.
    """
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    n = n_sequences(source, seq_len)
    epochs, places = np.divmod(step * batch_size + rows.astype(np.int64), n)
    sequences = np.empty(len(rows), np.int64)
    for epoch in range(epochs.min(), epochs.max() + 1):
        here = epochs == epoch
        sequences[here] = _sequences(places[here], n, (seed, epoch))
    return _read(source, sequences, seq_len, vocab_size, end)


def eval_batch_at(source, index, batch_size, seq_len, rows=None, vocab_size=None, end=None):
    """Evaluation batch `index`: the held-out sequences in one fixed shuffled order, each once. Past
    the last one every label is IGNORE.
    """
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    n = n_sequences(source, seq_len)
    places = index * batch_size + rows.astype(np.int64)
    batch = _read(source, _sequences(places % n, n, "held out"), seq_len, vocab_size, end)
    batch["labels"][places >= n] = IGNORE
    return batch


def _read(source, sequences, seq_len, vocab_size, end):
    shards = source["shards"]
    lengths, windows = np.array([(len(s), _windows(s, seq_len)) for s in shards]).T
    which = np.searchsorted(np.cumsum(windows), sequences, side="right")
    wanted = (sequences - (np.cumsum(windows) - windows)[which]) * seq_len
    starts = np.minimum(wanted, lengths[which] - 1 - seq_len)
    out = np.empty((len(sequences), seq_len + 1), np.int32)
    for row, w, start in zip(out, which.tolist(), starts.tolist()):
        row[:] = shards[w][start : start + seq_len + 1]
    for w in np.unique(which) if vocab_size else ():
        _check_ids(out[which == w], vocab_size, source["names"][w])
    labels = out[:, 1:].copy()
    for row in np.flatnonzero(wanted - starts):  # the window before has had these
        labels[row, : wanted[row] - starts[row]] = IGNORE
    batch = {"tokens": out[:, :-1], "labels": labels}
    if end is not None:
        starts_here, places = batch["tokens"] == end, np.arange(seq_len, dtype=np.int32)[None]
        first = np.maximum.accumulate(np.where(starts_here, places, 0), axis=1)
        batch |= {"segments": starts_here.cumsum(axis=1, dtype=np.int32),
                  "positions": places - first}
    return batch


# ---- to the devices

def local_rows(sharding, shape):
    """Row numbers of a [B, T] array that this process's devices hold."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    slices = {i[0].indices(shape[0]) for i in indices}
    return np.unique(np.concatenate([np.arange(*s) for s in slices]))


def to_device(batch, sharding, batch_size):
    """The global arrays [batch_size, ...] of which `batch` holds this process's rows, in order."""
    def place(x):
        shape = (batch_size, *x.shape[1:])
        rows = local_rows(sharding, shape)

        def part(index):
            wanted = np.arange(*index[0].indices(batch_size))
            return x[np.searchsorted(rows, wanted)][:, *index[1:]]

        return jax.make_array_from_callback(shape, sharding, part)

    return {k: place(v) for k, v in batch.items()}


def prefetch(make, start, stop, depth=2):
    """Yield (make(i), seconds waited for it) for i in [start, stop), with `depth` of them made
    ahead by a thread.
    """
    with ThreadPoolExecutor(1, "data") as pool:
        ahead = deque(pool.submit(make, i) for i in range(start, min(start + depth, stop)))
        try:
            for i in range(start, stop):
                began = time.perf_counter()
                item = ahead.popleft().result()
                if i + depth < stop:
                    ahead.append(pool.submit(make, i + depth))
                yield item, time.perf_counter() - began
        finally:
            pool.shutdown(cancel_futures=True)
