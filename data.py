# SPDX-License-Identifier: Apache-2.0
"""Batches as a function of the step.

Owns token files and text, tokenizers, the shuffle, and placement on devices. Refuses files that are
malformed or hold ids beyond the vocabulary. Invariant: `batch_at(source, step, ...)` depends on its
arguments alone; there is no iterator state. A source is a dict: "shards" (1-D integer arrays, left
on disk where possible), "names", "bytes_per_token".
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
from math import exp, isqrt, log
from pathlib import Path

import jax
import numpy as np

IGNORE = -100  # label ignored by the loss
BLOCK = 4096  # places of an epoch that are permuted in one call and cached


# ---- the shuffle

def _hash64(x, key):
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
    keys = _hash64(np.arange(1, 7, dtype=np.uint64), seeds)

    def network(x):
        row, column = x // columns, x % columns
        for even, odd in zip(keys[::2], keys[1::2]):
            row = (row + _hash64(column, even) % rows) % rows
            column = (column + _hash64(row, odd) % columns) % columns
        return row * columns + column

    out = network(np.asarray(index, np.uint64))
    while (outside := out >= n).any():
        out[outside] = network(out[outside])
    return out.astype(np.int64)


@lru_cache(maxsize=4)
def _permuted_block(block, n, seed):
    return permute(np.arange(block * BLOCK, min((block + 1) * BLOCK, n)), n, seed)


def _permuted(places, n, seed):
    """permute(places, n, seed), by cached blocks: a call of permute for each batch is slower."""
    blocks, within = np.divmod(places, BLOCK)
    if (blocks == blocks[0]).all():
        return _permuted_block(int(blocks[0]), n, seed)[within]
    return np.array([_permuted_block(int(b), n, seed)[w] for b, w in zip(blocks, within)])


def examples_at(step, batch_size, n, seed=0, rows=None):
    """Choose the examples (int64 in [0, n)) in `rows` (default: all) of training batch `step`.

    Each of the n examples comes once an epoch, in another order each epoch; the last batch of an
    epoch is filled from the next.
    """
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    epochs, places = np.divmod(step * batch_size + rows.astype(np.int64), n)
    examples = np.empty(len(rows), np.int64)
    for epoch in range(epochs.min(), epochs.max() + 1):
        here = epochs == epoch
        examples[here] = _permuted(places[here], n, (seed, epoch))
    return examples


# ---- batches

def n_sequences(source, seq_len):
    """Count windows of seq_len tokens. Every token but a shard's first is a label in exactly one:
    the last window of a shard overlaps the one before, with those labels ignored.
    """
    return sum(_n_windows(shard, seq_len) for shard in source["shards"])


def _n_windows(shard, seq_len):
    return -(-(len(shard) - 1) // seq_len)


def batch_at(source, step, batch_size, seq_len, seed=0, rows=None, vocab_size=None, end=None):
    """Build `rows` (default: all) of training batch `step`: int32 "tokens" and "labels"
    [rows, seq_len]; given the `end` id that starts a document, also "segments" and "positions".

    Raises: ValueError for an id that is not below vocab_size.
    """
    examples = examples_at(step, batch_size, n_sequences(source, seq_len), seed, rows)
    return _windows_at(source, examples, seq_len, vocab_size, end)


def _windows_at(source, examples, seq_len, vocab_size, end):
    lengths, n_windows = np.array([(len(s), _n_windows(s, seq_len)) for s in source["shards"]]).T
    shard_of = np.searchsorted(np.cumsum(n_windows), examples, side="right")
    wanted = (examples - (np.cumsum(n_windows) - n_windows)[shard_of]) * seq_len
    starts = np.minimum(wanted, lengths[shard_of] - 1 - seq_len)
    windows = np.empty((len(examples), seq_len + 1), np.int32)
    for row, i, start in zip(windows, shard_of.tolist(), starts.tolist()):
        row[:] = source["shards"][i][start : start + seq_len + 1]
    for i in np.unique(shard_of) if vocab_size else ():
        _check_ids(windows[shard_of == i], vocab_size, source["names"][i])
    labels = windows[:, 1:].copy()
    for row in np.flatnonzero(wanted - starts):  # moved back to fit: the window before has these
        labels[row, : wanted[row] - starts[row]] = IGNORE
    batch = {"tokens": windows[:, :-1], "labels": labels}
    return batch if end is None else batch | _segments(batch["tokens"], end)


# ---- to the devices

def local_rows(sharding, shape):
    """Find which rows (axis 0) of an array of `shape` this process's devices hold, sorted."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(shape[0])[i[0]] for i in indices]))


def to_device(batch, shardings, batch_size):
    """Make global arrays [batch_size, ...] of any rank from the local rows that `batch` holds.

    shardings: {name: sharding}; local_rows tells which rows each name needs, in order.
    """
    every_row = np.arange(batch_size)

    def place(x, sharding):
        shape = (batch_size, *x.shape[1:])
        rows = local_rows(sharding, shape)
        return jax.make_array_from_callback(shape, sharding, lambda index: x[
            np.searchsorted(rows, every_row[index[0]])][:, *index[1:]])

    return {name: place(x, shardings[name]) for name, x in batch.items()}


def prefetch(make, start, stop, depth=2):
    """Yield (make(i), seconds waited for it) for i in [start, stop), with `depth` of them made
    ahead by a thread.
    """
    pool = ThreadPoolExecutor(1, "data")
    try:
        ahead = deque(pool.submit(make, i) for i in range(start, min(start + depth, stop)))
        for i in range(start, stop):
            began = time.perf_counter()
            item = ahead.popleft().result()
            if i + depth < stop:
                ahead.append(pool.submit(make, i + depth))
            yield item, time.perf_counter() - began
    finally:
        pool.shutdown(cancel_futures=True)


# ---- optional

def open_text(cfg, parts=("train", "val")):
    """{"train", "val"}: {"n": sequences, "batch": (index, rows) -> batch, "fingerprint",
    "bytes_per_token"}; None where nothing is held out or the part is not asked for. cfg: any
    object with the fields under "data" in config.py, and batch_size seq_len vocab_size seed.
    """
    tokenizer = make_tokenizer(cfg.tokenizer)
    sizes = dict(batch_size=cfg.batch_size, seq_len=cfg.seq_len, vocab_size=cfg.vocab_size,
                 end=tokenizer["end"] if cfg.packed else None)

    def open_files(patterns):
        return open_source(patterns, tokenizer, cfg.data_dtype, cfg.seq_len, cfg.vocab_size)

    def part(source, batch):
        return source and {"n": n_sequences(source, cfg.seq_len), "batch": batch,
                           "fingerprint": fingerprint(source),
                           "bytes_per_token": source["bytes_per_token"]}

    train = open_files(cfg.data) if "train" in parts or not cfg.val_data else None
    val = open_files(cfg.val_data) if cfg.val_data else None
    if cfg.val_frac and not cfg.val_data:
        train, val = split(train, cfg.val_frac, cfg.seq_len)
    return {"train": part(train, lambda step, rows: batch_at(
                train, step, seed=cfg.seed, rows=rows, **sizes)),
            "val": part(val, lambda index, rows: eval_batch_at(val, index, rows=rows, **sizes))}


def eval_examples_at(index, batch_size, n, rows=None):
    """Choose the examples in `rows` of evaluation batch `index`, and the mask of those that count.

    Each of the n examples counts once, in one fixed order that is shuffled so that the first few
    batches are a fair sample. Past the last, examples repeat with a mask of False.
    """
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    places = index * batch_size + rows.astype(np.int64)
    return _permuted(places % n, n, "held out"), places < n


def eval_batch_at(source, index, batch_size, seq_len, rows=None, vocab_size=None, end=None):
    """Build evaluation batch `index` as batch_at does: each sequence once, in a fixed order, then
    rows whose labels are all ignored.
    """
    examples, valid = eval_examples_at(index, batch_size, n_sequences(source, seq_len), rows)
    batch = _windows_at(source, examples, seq_len, vocab_size, end)
    batch["labels"][~valid] = IGNORE
    return batch


N_SCANNED = 2**28  # tokens per shard whose ids are checked before training; the rest per batch


def open_source(patterns, tokenizer, dtype="uint16", seq_len=1, vocab_size=None):
    """Open token files and text files given as globs; by default Python's standard library.

    Each token file (.bin, .npy) is a shard. All text becomes one shard, with the tokenizer's end id
    before, between and after documents.
    Raises: ValueError naming the file that is missing, empty, malformed, shorter than seq_len + 1
    tokens, or has an id that is not below vocab_size.
    """
    paths = _expand(patterns) if patterns else _standard_library()
    binary = [p for p in paths if p.suffix in (".bin", ".npy")]
    texts = [p for p in paths if p.suffix not in (".bin", ".npy")]
    # Plain arrays of the mapped files: slicing a memmap takes longer than copying a row.
    shards, names = [np.asarray(_tokens_in(p, dtype)) for p in binary], [str(p) for p in binary]
    if texts:
        documents = [d for p in texts for d in _documents(p)]
        encode = tokenizer["encode"]
        end = np.full(1, tokenizer["end"], encode(b"").dtype)
        pieces = [piece for d in documents for piece in (end, encode(d))]
        shards.append(np.concatenate([*pieces, end]))
        names.append(str(texts[0]) + (f" and {len(texts) - 1} more" if len(texts) > 1 else ""))
    for name, shard in zip(names, shards):
        if len(shard) < seq_len + 1:
            raise ValueError(f"{name}: has {len(shard)} tokens, fewer than seq_len + 1 = "
                             f"{seq_len + 1}; use longer files or a smaller --seq_len")
        if vocab_size and np.iinfo(shard.dtype).max >= vocab_size:
            _check_ids(shard[:N_SCANNED], vocab_size, name)
    return {"shards": shards, "names": names, "bytes_per_token": None if binary else
            sum(len(d) + 1 for d in documents) / (len(shards[0]) - 1)}  # + 1: the end


def split(source, held_out, seq_len=1):
    """Split into (train, held-out) sources: the last fraction `held_out` of all tokens is held out.

    A shard is never cut into a part shorter than seq_len + 1.
    Raises: ValueError when one side would have no sequence.
    """
    cut = round(sum(map(len, source["shards"])) * (1 - held_out))
    sides = [], []
    for name, shard in zip(source["names"], source["shards"]):
        n_train = min(max(cut, 0), len(shard))
        if n_train <= seq_len:
            n_train = 0
        elif len(shard) - n_train <= seq_len:
            n_train = len(shard)
        cut -= len(shard)
        for side, part in zip(sides, (shard[:n_train], shard[n_train:])):
            side += [(name, part)] if len(part) else []
    for what, side in zip(("training", "held-out"), sides):
        if not side:
            raise ValueError(f"val_frac {held_out}: leaves no {what} sequence of {seq_len + 1} "
                             "tokens; give --val_data, more data or a shorter --seq_len")
    return tuple(source | {"names": [n for n, _ in side], "shards": [s for _, s in side]}
                 for side in sides)


def make_tokenizer(name):
    """Make {"encode": str or bytes -> 1-D array, "decode": ids -> str, "vocab_size", "end": the id
    between documents} of "bytes", or of a tokenizer.json file.
    """
    if name != "bytes":
        return _library_tokenizer(name)

    def encode(text):
        return np.frombuffer(text if isinstance(text, bytes) else text.encode(), np.uint8)

    def decode(ids):
        pieces = [bytes([i]) if i < 256 else b"<%d>" % i for i in np.asarray(ids).tolist()]
        return b"".join(pieces).decode(errors="replace")

    return {"encode": encode, "decode": decode, "vocab_size": 256, "end": 0}


def _library_tokenizer(name):
    if not Path(name).is_file():
        raise ValueError(f"tokenizer {name!r}: neither 'bytes' nor a tokenizer.json file")
    try:
        import tokenizers
        tok = tokenizers.Tokenizer.from_file(name)
    except ImportError:
        raise ValueError(f"tokenizer {name!r}: needs `pip install tokenizers`") from None
    except Exception as e:  # the library raises Exception itself
        raise ValueError(f"tokenizer {name!r}: not a tokenizer.json: {e}") from None
    names = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
    end = next((i for i in map(tok.token_to_id, names) if i is not None), None)
    if end is None:
        raise ValueError(f"tokenizer {name!r}: has no end-of-document token of {', '.join(names)}")

    def encode(text):
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return np.asarray(tok.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(ids):
        return tok.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    return {"encode": encode, "decode": decode, "vocab_size": tok.get_vocab_size(), "end": end}


def _standard_library():
    """List Python's own sources without their tests: real text on any machine that runs this."""
    root, paths = Path(sysconfig.get_path("stdlib")), []
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skip  # os.walk then does not enter them
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths, key=lambda p: p.relative_to(root).as_posix())


def _expand(patterns):
    """List the files that match, sorted within each pattern. Raises: ValueError if none does."""
    paths = []
    for pattern in map(str, patterns):
        found = sorted(p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p))
        if os.path.isdir(pattern):
            raise ValueError(f"data {pattern!r}: is a folder; name its files, as in 'folder/*.txt'")
        if not found:
            raise ValueError(f"data {pattern!r}: no such file, and no file matches it as a glob")
        if empty := [p for p in found if not os.path.getsize(p)]:
            raise ValueError(f"{empty[0]}: the file is empty")
        paths += map(Path, found)
    return paths


# {(magic, version): token dtype} of the header (256 int32) of llm.c's token files.
LLMC_HEADERS = {(20240520, 1): np.dtype("uint16"), (20240801, 7): np.dtype("uint32")}


def _tokens_in(path, dtype):
    """Map the tokens of a .npy or .bin file; dtype is that of a .bin file without a header."""
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as e:
            raise ValueError(f"{path}: not a .npy file: {e}") from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{path}: has {tokens.ndim} dims of {tokens.dtype}, not 1 of integers")
        return tokens
    size, dtype, head = path.stat().st_size, np.dtype(dtype), np.fromfile(path, np.int32, 256)
    if len(head) == 256 and not head[3:].any():  # 253 zeros: a header, not tokens
        kind, count = tuple(head[:2].tolist()), int(head[2])
        if kind not in LLMC_HEADERS:
            raise ValueError(f"{path}: header (magic, version) is {kind}; known: {[*LLMC_HEADERS]}")
        dtype = LLMC_HEADERS[kind]
        if size != 1024 + count * dtype.itemsize:
            raise ValueError(f"{path}: header says {count} tokens of {dtype}, which is "
                             f"{1024 + count * dtype.itemsize} bytes; the file has {size}")
        return np.memmap(path, dtype, "r", 1024, (count,))
    if size % dtype.itemsize:
        raise ValueError(f"{path}: {size} bytes is not a whole number of {dtype}; set --data_dtype")
    return np.memmap(path, dtype, "r")


def _documents(path):
    """Read the documents, as bytes, of a text file (one) or a .jsonl file ("text" of each line)."""
    if path.suffix != ".jsonl":
        return [path.read_bytes()]
    documents = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            documents += [json.loads(line)["text"].encode()] if line.strip() else []
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} line {number}: not an object with a string 'text'") from None
    return documents


def _check_ids(tokens, vocab_size, name):
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name}: token id {low if low < 0 else high} is not in [0, {vocab_size});"
                         " set --vocab_size, or use the tokenizer that wrote the file")


def _segments(tokens, end):
    """Number the documents in each row, and the positions within each document."""
    starts, places = tokens == end, np.arange(tokens.shape[1], dtype=np.int32)[None]
    first = np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    return {"segments": starts.cumsum(axis=1, dtype=np.int32), "positions": places - first}


def text_metrics(means, source):
    """Perplexity per token, and bits per byte where the source is text."""
    loss, bytes_per_token = float(means["loss"]), source["bytes_per_token"]
    bits = {"bits_per_byte": loss / log(2) / bytes_per_token} if bytes_per_token else {}
    return {"ppl": exp(min(loss, 700))} | bits


def fingerprint(source):
    """Describe the data in a line that differs when it does: token counts and a checksum of the
    first and last 2^20 tokens of each shard.
    """
    shards, crc = source["shards"], 0
    for shard in shards:
        crc = zlib.crc32(np.ascontiguousarray(shard[:2**20]), crc)
        crc = zlib.crc32(np.ascontiguousarray(shard[-2**20:]), crc)
    return f"{sum(map(len, shards))} tokens in {len(shards)} shards, crc32 {crc:08x}"
