# SPDX-License-Identifier: Apache-2.0
"""Batches as a function of the step.

Owns tokenized text, the order of training, evaluation batches, and placement on devices. Invariant:
`batch_at(dataset, step, ...)` depends on its arguments alone.
"""
import contextlib
import fcntl
import glob
import gzip
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import tempfile
import threading
import time
import zlib
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor, wait
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import chain, count, groupby, islice
from math import ceil, exp, isqrt, lcm, log
from pathlib import Path
from urllib.parse import unquote

import jax
import numpy as np
from tqdm import tqdm

# How the training loop gets a batch:
#
#   source = open_text(("train", "val"), cfg)["train"]
#   def make(step):                                        in a thread, two batches ahead
#       batch = source["batch"](step, rows)                NumPy: the rows of this process
#       return to_device(batch, shardings, batch_size)     global arrays, sharded over the mesh
#   for batch, waited_s in prefetch(make, first_step, cfg.steps):
#
# A shard is an array of tokens on disk, with more about it: see `tokenize_files`.
# A dataset is shards cut into sequences. An example is the index of a sequence in it.
# A draw is a row counted over all batches; the shuffle selects an example for it.

IGNORE = -100  # label ignored by the loss, as in model.py


# ---- batches

# How shards become sequences: fields of config.py.
SEQ_FORMAT = {
    "seq_len": 1,
    "vocab_size": 0,  # 0: ids are not checked
    "packing": "stream",
    "document_mask": False,
    "truncation": "keep_start",
    "padding_side": "right",
}


def batch_at(dataset, step, batch_size, seed=0, rows=None):
    """Build `rows` (default: all) of training batch `step`: {name: int32 [rows, seq_len]}.

    Names: "tokens", "labels"; with document_mask or packing also "segments" (number of the document
    in its row, from 1; 0: padding) and "positions" (in the document).
    """
    return read_sequences(dataset, sequences_at(dataset, step, batch_size, seed, rows))


def sequences_at(dataset, step, batch_size, seed=0, rows=None):
    """The examples in `rows` of training batch `step`."""
    # Optional: datasets mixed by weight.
    if "mixture" in dataset:
        return _mixture_examples(dataset["mixture"], draws_at(step, batch_size, rows), seed)
    return examples_at(step, batch_size, dataset["n"], seed, rows)


def make_dataset(shards, seq_format=SEQ_FORMAT):
    """Cut shards into sequences.

    Returns {"shards", "seq_format",
        "n": number of sequences,
        "cum_counts": [shards], number of sequences up to the end of each shard,
        "lengths": [shards], number of tokens in each}.
    A shard of 10 tokens has three sequences of seq_len 4. They start at 0, 4 and 5: the last one
    begins earlier, to fit, and ignores the labels that it repeats. The labels are tokens 1 to 4, 5
    to 8, and 9. Packed documents stay together: see `pack`.
    """
    seq_format = SEQ_FORMAT | seq_format
    T = seq_format["seq_len"]
    lengths = np.array([len(shard["tokens"]) for shard in shards])
    if seq_format["packing"] == "stream":
        counts = np.where(lengths > T, -(-(lengths - 1) // T), 0)  # rounded up
    else:  # optional: packing
        shards = [_pack_shard(shard, seq_format) for shard in shards]
        counts = [len(shard["row_bounds"]) - 1 for shard in shards]
    return {"shards": shards, "seq_format": seq_format, "n": int(sum(counts)),
            "cum_counts": np.cumsum(counts), "lengths": lengths}


def read_sequences(dataset, examples):
    """Build the batch of these examples."""
    shard_of, offsets = locate(dataset, examples)
    shards = [dataset["shards"][i] for i in shard_of.tolist()]  # one for each row
    for shard in shards[:2]:  # not of all rows: a check costs as much as a row
        _check_unchanged(shard)
    if dataset["seq_format"]["packing"] == "stream":
        # The last sequence begins earlier: at 5, not 8, of 10 tokens.
        T = dataset["seq_format"]["seq_len"]
        starts = np.minimum(offsets * T, dataset["lengths"][shard_of] - 1 - T)
        return _stream_batch(shards, starts, offsets * T - starts, dataset["seq_format"])
    return _packed_batch(shards, offsets, dataset["seq_format"])  # optional: packing


def locate(dataset, examples):
    """(index of the shard of each example, index of its sequence in that shard)."""
    cum_counts = dataset["cum_counts"]
    shard_of = np.searchsorted(cum_counts, examples, side="right")
    return shard_of, examples - np.append(0, cum_counts)[shard_of]


def _stream_batch(shards, starts, n_repeated, seq_format):
    """Build a batch of successive tokens. For each row: its shard, its first token there, and how
    many labels to ignore.
    """
    # T + 1 ids are the tokens and, shifted by one, the labels. A wrong id may not fit into int32.
    T = seq_format["seq_len"]
    ids = np.empty((len(shards), T + 1), np.int64)
    for row, shard, start in zip(ids, shards, starts.tolist()):
        row[:] = shard["tokens"][start : start + T + 1]
    check_ids(ids, seq_format["vocab_size"], shards)
    tokens = ids[:, :-1].astype(np.int32)
    labels = ids[:, 1:].astype(np.int32)
    batch = {"tokens": tokens, "labels": labels}

    for row in np.flatnonzero(n_repeated):
        labels[row, : n_repeated[row]] = IGNORE
    # Optional: prompts are not labels.
    for row, shard, start in zip(labels, shards, starts.tolist()):
        if "ignored" in shard:
            row[shard["ignored"][start + 1 : start + T + 1] == 1] = IGNORE
    # Optional: documents do not attend to each other.
    if seq_format["document_mask"]:
        _add_document_mask(batch, shards, starts.tolist())
    return batch


def eval_batch_at(dataset, index, batch_size, rows=None):
    """Build evaluation batch `index`: each sequence once. After the last one, labels are ignored.
    """
    examples, valid = eval_examples_at(index, batch_size, dataset["n"], rows)
    batch = read_sequences(dataset, examples)
    batch["labels"][~valid] = IGNORE
    return batch


# ---- the shuffle

# Draws 0 to n - 1 are the first epoch of n examples, draws n to 2n - 1 the second. The order of
# each follows from a text of seed and epoch, see `permute`. No list of n examples is stored.


def draws_at(step, batch_size, rows):
    """The draws of `rows` (default: all) of batch `step`."""
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    return step * batch_size + rows.astype(np.int64)


def examples_at(step, batch_size, n, seed=0, rows=None):
    """The examples (int64 in [0, n)) in `rows` of training batch `step`.

    The last batch of an epoch is filled from the next one.
    """
    return shuffled(draws_at(step, batch_size, rows), n, seed)


def shuffled(draws, n, seed):
    """The example of each draw. n: number of examples; in mixtures an array, for each draw."""
    epochs, ranks = np.divmod(draws, n)
    return permuted(ranks, n, [f"({seed}, {epoch})" for epoch in epochs.tolist()])


def eval_examples_at(index, batch_size, n, rows=None):
    """The examples in `rows` of evaluation batch `index`, and the mask of rows that count.

    The order is fixed, and shuffled: the first batches are a fair sample.
    """
    draws = draws_at(index, batch_size, rows)
    return permuted(draws % n, n, ["held out"] * len(draws)), draws < n


# ---- to the devices

def local_rows(sharding, shape):
    """The rows (axis 0) of an array of `shape` on this process's devices, sorted."""
    all_rows = np.arange(shape[0])
    indices = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([all_rows[index[0]] for index in indices]))


def to_device(batch, shardings, batch_size):
    """Make global arrays [batch_size, ...] of a batch, which has the rows of `local_rows`."""
    arrays = {}
    for name, x in batch.items():
        shape = (batch_size, *x.shape[1:])
        arrays[name] = jax.make_array_from_process_local_data(shardings[name], x, shape)
    return arrays


def prefetch(make, start, stop, depth=2, stopped=lambda: False, wait_until_idle=lambda: None,
             on_late=lambda i: None):
    """Yield (make(i), seconds waited) for i in [start, stop). A thread makes `depth` ahead.

    make(i) returns None while its data has not come; the thread asks again. on_late(i) is called
    once if an item is waited for then. stopped() is polled during a wait, and ends the iterator.
    wait_until_idle() blocks until the device is idle: only the wait after that counts.
    """
    closed = threading.Event()
    late = set()

    def make_when_there(i):
        item = make(i)
        if item is None:
            late.add(i)
        while item is None and not closed.wait(0.1):
            item = make(i)
        return item

    pool = ThreadPoolExecutor(1, "data")
    ahead = deque(pool.submit(make_when_there, i) for i in range(start, min(start + depth, stop)))
    try:
        for i in range(start, stop):
            item = ahead.popleft()
            if not item.done():
                wait_until_idle()
            began = time.perf_counter()
            while not wait([item], timeout=0.2).done:  # short, to look for a stop
                if stopped():
                    return
                if i in late:
                    late.remove(i)
                    on_late(i)
            if i + depth < stop:
                ahead.append(pool.submit(make_when_there, i + depth))
            yield item.result(), time.perf_counter() - began
    finally:
        closed.set()
        pool.shutdown(cancel_futures=True)


# ---- the text of a run

def open_text(parts, cfg):
    """Open the text of a config as {"train": source, "val": {name: source}}.

    parts: which of "train" and "val" are needed. A set without a name is named "". A source is {
        "n": number of examples,
        "batch": (step, rows) -> {name: these rows of the batch}; of validation data
            (index, rows, batch_size) -> the same. None while its data has not come: it is called
            again,
        "fingerprint": a text that must not change between a run and its resumption,
        "summary": optional, a text to print,
        "examples": optional, of validation data (index, the dict of the loss) -> {"id" and other
            names: arrays with an entry for each example of the batch that is not padding}}.
    """
    tokenizer = make_cfg_tokenizer(cfg)
    open_files = file_opener(cfg, tokenizer)
    weights, train_sets, val_sets = find_sets(parts, cfg)

    # Validation data from its own files.
    val = {}
    for name, files in val_sets.items():
        val[name] = make_source(open_files(files, field="val_data"), eval_batch_at, cfg, tokenizer)
    if "train" not in parts and val:
        return {"train": None, "val": val}

    # Training data. Without val_data, the last val_frac of each set is for validation.
    datasets = [open_files(files) for files in train_sets.values()]
    if cfg.val_frac and not val_sets:
        splits = [split(dataset, cfg.val_frac) for dataset in datasets]
        datasets = [train_dataset for train_dataset, _ in splits]
        for name, (_, val_dataset) in zip(train_sets, splits):
            val[name] = make_source(val_dataset, eval_batch_at, cfg, tokenizer)
    # Optional: datasets mixed by weight.
    dataset = mix(datasets, weights) if weights else datasets[0]
    train = make_source(dataset, partial(batch_at, seed=cfg.seed), cfg, tokenizer)
    return {"train": train, "val": val}


TOKEN_FILES = (".bin", ".npy")  # suffixes of files of token ids; see rows_in for all others


def open_dataset(patterns, tokenizer, seq_format=SEQ_FORMAT, *, dtype="uint16",
                 folder=".token_cache", eod_id=-1, may_be_empty=False, columns=(), field="data"):
    """Open text documents as one shard, tokenized into `folder` once, and each token file as one.

    patterns, field: see `expand`. dtype: of .bin files. eod_id: the id between their documents; -1:
    unknown. columns: see `rows_in`. may_be_empty: no sequence has to have a label.
    """
    paths = expand(patterns, field=field) if patterns else _standard_library()
    token_files = [path for path in paths if path.suffix.lower() in TOKEN_FILES]
    texts = [path for path in paths if path.suffix.lower() not in TOKEN_FILES]
    shards = []
    # Optional: files of token ids.
    if token_files:
        shards += _map_token_files(token_files, SEQ_FORMAT | seq_format, dtype, eod_id)
    if texts:
        shards.append(tokenize_files(texts, tokenizer, folder, columns))
    dataset = make_dataset(shards, seq_format)
    if not may_be_empty:
        _check_sequences(dataset)
    return dataset


# ---- supporting
# Most runs use these, but the names say enough for a first reading: the permutation, sources, text
# files to tokens, token cache, the tokenizer, metrics of text, validation data from training data,
# sets of files, checks of files and ids, errors.

# ---- the permutation

BLOCK = 4096  # examples that are permuted in one call and cached


def permuted(ranks, n, orders):
    """The example at each rank in an order of n examples. orders: a text for each, which selects
    its order. n: a number, or one for each.
    """
    sizes = np.broadcast_to(n, ranks.shape)
    examples = [_permuted_block(rank // BLOCK, size, order)[rank % BLOCK]
                for rank, size, order in zip(ranks.tolist(), sizes.tolist(), orders)]
    return np.array(examples, np.int64)


@lru_cache(maxsize=256)
def _permuted_block(block, n, order):
    first = block * BLOCK
    return permute(np.arange(first, min(first + BLOCK, n)), n, order)


def permute(index, n, order):
    """`index`, an array in [0, n), mapped by the permutation of [0, n) that the text order selects.

    Takes O(1) memory: a Feistel network over the smallest near-square grid of at least n cells. A
    result beyond n goes through the network again (cycle walking), so the map stays a permutation.
    """
    n_rows = np.uint64(isqrt(int(n) - 1) + 1)
    n_columns = np.uint64(-(-int(n) // int(n_rows)))  # n / n_rows, rounded up
    seed_bits = np.uint64(zlib.crc32(order.encode())) << np.uint64(20)
    keys = hash64(np.arange(1, 7, dtype=np.uint64), seed_bits)

    out = _feistel(np.asarray(index, np.uint64), n_rows, n_columns, keys)
    outside = out >= n
    while outside.any():
        out[outside] = _feistel(out[outside], n_rows, n_columns, keys)
        outside = out >= n
    return out.astype(np.int64)


def _feistel(cells, n_rows, n_columns, keys):
    """The cells of a grid, permuted in three rounds.

    Each round shifts the row by a hash of the column, then the column by a hash of the row.
    """
    row = cells // n_columns
    column = cells % n_columns
    for row_key, column_key in zip(keys[::2], keys[1::2]):
        row = (row + hash64(column, row_key) % n_rows) % n_rows
        column = (column + hash64(row, column_key) % n_columns) % n_columns
    return row * n_columns + column


def hash64(x, key):
    """Hash uint64 to uint64. Source: the finalizer of splitmix64, Steele et al. 2014."""
    x = (x ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# ---- sources

def file_opener(cfg, tokenizer):
    """open_dataset with the arguments that a config gives.

    cfg: as for `open_text`, any object with the fields under "data" in config.py, and batch_size,
    eval_batches, eval_batch_size, seq_len, vocab_size, seed, cache_dir and out_dir.
    """
    seq_format = {name: getattr(cfg, name) for name in SEQ_FORMAT}
    seq_format["vocab_size"] = cfg.vocab_size or tokenizer["vocab_size"]
    return partial(
        open_dataset, tokenizer=tokenizer, seq_format=seq_format, dtype=cfg.data_dtype,
        folder=_token_cache_folder(cfg), eod_id=cfg.eod_id, columns=cfg.columns)


def make_source(dataset, build_batch, cfg, tokenizer):
    """The source of a dataset, see `open_text`. It has these keys more:
        "dataset": the result of make_dataset or mix,
        "summary": a text to print,
        "preview": () -> documents to print, see show_examples,
        "examples": of validation data, the values per example of a batch, see examples_in,
        "bytes_per_token": number, or None when unknown,
        "prompt": () -> ids at the beginning of a sample.

    build_batch: batch_at or eval_batch_at.
    """
    def batch(index, rows, batch_size=cfg.batch_size):
        return build_batch(dataset, index, batch_size, rows=rows)

    batch(0, [0])  # a wrong id is an error before the compilation
    return {
        "n": dataset["n"],
        "dataset": dataset,
        "batch": batch,
        "fingerprint": fingerprint(dataset),
        "summary": describe(dataset),  # optional: summaries
        "preview": lambda: show_examples(dataset, tokenizer),  # optional: examples
        "examples": partial(examples_in, dataset),  # optional: values per example
        "bytes_per_token": bytes_per_token(dataset),
        "prompt": lambda: preview_prompt(dataset),  # optional: prompts of samples
    }


def n_eval_batches(n, batch_size, limit):
    """The number of batches in an evaluation of n examples. limit: 0 for all of them."""
    return min(ceil(n / batch_size), limit or n)


# ---- text files to tokens

def expand(patterns, lenient=False, field="data"):
    """The matching files, sorted within each pattern, each file once.

    patterns: files, globs or dataset folders. field: the name of the flag, for the error and to
    choose a split. Raises ValueError for a pattern without a match, unless lenient.
    """
    paths = {}  # by real path: a link counts as its target
    for pattern in map(str, patterns):
        pattern = hub_path(pattern, field=field)  # optional: names on the Hub
        found = {}
        for name in _matches(pattern):
            # Optional: a folder with splits, written by the datasets library.
            if os.path.isfile(os.path.join(name, "dataset_dict.json")):
                name = _choose_split(name, field)
            # A folder written by the datasets library has a state.json.
            if os.path.isfile(name) or os.path.isfile(os.path.join(name, "state.json")):
                found[os.path.realpath(name)] = Path(name)
        if not found and not lenient:
            reason = "no such file, and no file matches it as a glob"
            if os.path.isdir(pattern):
                reason = "is a folder; name its files, as in 'FOLDER/*.txt'"
            raise ValueError(f"{field} {pattern!r}: {reason}")
        paths |= found
    return list(paths.values())


def _matches(pattern):
    """The names that match a glob. The name of an existing file is no glob, even with brackets."""
    if os.path.lexists(pattern):
        return [pattern]
    return sorted(glob.glob(pattern, recursive=True))


def _standard_library():
    """Python's sources without their tests: real text on any machine."""
    root = Path(os.__file__).parent
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skip  # os.walk then does not enter them
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def tokenize_files(paths, tokenizer, folder, columns=()):
    """Tokenize the documents of these files into one shard, in a subfolder of `folder`. It is named
    after their content, the columns (see `rows_in`) and the tokenizer. An existing one is read.

    Returns {
        "name": for messages,
        "tokens": a mapped file, [tokens],
        "documents": int64 [documents, 2], first token of each and the one after its last,
        "sources": int64 [documents, 2], index of its file in "paths", and its index in that file;
            absent in older folders,
        "bytes_at": int64 [n, 2], number of tokens and of bytes of their text at the start and
            after each piece of text; a bos or eos counts as one byte,
        "ignored": uint8 [tokens], 1 for tokens that are not labels; absent: all are labels,
        "token_offset": number of tokens before tokens[0]; not 0 in the second part of a split,
        "counts": {name: number of documents read, of documents skipped, ...},
        "path", "file_size": of a file that must not change,
        "paths": [files]}.
    A token file has an "eod_id" in place of "documents", "sources", "paths", "ignored" and
    "counts". With packing, make_dataset adds "row_bounds" and "spans", see `_pack_shard`.
    """
    check_has_end(tokenizer, paths[0])
    name = str(paths[0])
    if len(paths) > 1:
        name += f" and {len(paths) - 1} more"
    cached = Path(folder, _cache_key(paths, tokenizer, columns))
    write = partial(_write_shard, paths, tokenizer, columns)
    read = partial(_read_shard, cached, tokenizer["dtype"])
    with as_value_error(f"{name}: cannot be tokenized into --token_cache {folder}", OSError):
        shard = _write_once(cached, write, read)
    return shard | {"name": name, "token_offset": 0, "path": cached / "tokens", "paths": paths}


def _read_shard(folder, dtype):
    """Map the arrays of a tokenized shard; None if they are missing or incomplete."""
    # The pair (np.int64, 2) makes a memmap two-dimensional, [n, 2].
    dtypes = {"tokens": dtype, "ignored": np.uint8}
    shard = {}
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        for name, n_bytes in index["sizes"].items():
            if n_bytes != os.path.getsize(folder / name):
                return None
            if n_bytes:  # an empty file cannot be mapped
                mapped = np.memmap(folder / name, dtypes.get(name, (np.int64, 2)), "r")
                shard[name] = np.asarray(mapped)  # faster to slice than a memmap
    except (OSError, ValueError):
        return None
    return shard | {"counts": index["counts"], "file_size": shard["tokens"].nbytes}


def _write_shard(paths, tokenizer, columns, folder):
    """Tokenize documents into the files of a shard, and write index.json after them."""
    with contextlib.ExitStack() as stack:
        files = {}
        for name in ("tokens", "ignored", "documents", "sources", "bytes_at"):
            files[name] = stack.enter_context(open(folder / name, "wb"))
        records = _records_of_files(paths, tokenizer, columns)
        counts = _write_documents(records, tokenizer, files)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())  # before index.json, so that no crash leaves it alone
    sizes = {name: os.path.getsize(folder / name) for name in files}
    index = {"counts": counts, "sizes": sizes}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_documents(records, tokenizer, files):
    """Write documents end to end into the files of a shard; return counts of documents.

    Two texts A and B become these tokens. "documents" gets [first, last) of each:

        without a bos id                      with a bos id
        0   1 2 3 4   5 6 7                   0   1 2 3 4   5   6 7 8
        eos A A A eos B B eos                 bos A A A eos bos B B eos
        [------A-----)                        [------A-----)
                  [-----B----)                              [-----B----)

    Without a bos id, one eos stands between two texts and is part of both.
    With a bos id, each text has a bos and an eos of its own.
    A chat is written as its template renders it, and ids as they are; an eos around them is not
    part of them, and not a label, unless nothing else ends the last answer of a chat.
    """
    bos = tokenizer["bos"]
    eos = tokenizer["eos"]
    dtype = tokenizer["dtype"]

    def append(ids, is_ignored):
        """Append ids, and for each or for all whether it is no label; return the number so far."""
        n = files["tokens"].tell() // dtype.itemsize
        if np.any(is_ignored):
            files["ignored"].seek(n)  # the bytes in between read as zeros
            files["ignored"].write(np.full(len(ids), is_ignored, np.uint8))
        files["tokens"].write(np.asarray(ids, dtype))
        return n + len(ids)

    counts = Counter({"documents": 0, "empty skipped": 0})
    is_first = True  # the next record begins a document
    last_kind = ""  # of the document before
    n = 0  # tokens so far
    n_more = 0  # bytes of text more than tokens; a bos or eos counts as one byte
    files["bytes_at"].write(np.int64((0, 0)))
    for record in records:
        kind = record["kind"]
        is_text = kind in ("text", "pair")
        if is_text:  # a bos or eos that it brings counts as the one around it
            _cut_ends(record, eos if bos is None else bos, eos, is_first, tokenizer)
        if is_first and record["is_last"] and not len(record["ids"]):
            counts["empty skipped"] += 1
            continue

        if is_first:
            # Without a bos id, the eos of the document before mostly stands here already.
            if bos is None and kind != "ids" and last_kind in ("", "ids"):
                n = append([eos], last_kind == "ids")
            elif bos is not None and is_text:
                n = append([bos], last_kind in ("chat", "ids"))
            first = n - 1 if is_text else n  # the id before a text is part of it

        n = append(record["ids"], record["ignored"])
        n_more += record["n_bytes"] - len(record["ids"])
        files["bytes_at"].write(np.int64((n, n + n_more)))

        is_first = record["is_last"]
        if is_first:
            counts["documents"] += 1
            # The eos after a text, or a chat without an end, is part of it, and a label.
            has_eos = is_text or not record.get("has_end", True)
            files["documents"].write(np.int64((first, n + 1 if has_eos else n)))
            files["sources"].write(np.int64(record["source"]))
            if not is_text and np.all(record["ignored"]):
                counts["documents without a label"] += 1
            if has_eos or (kind == "chat" and bos is None):
                n = append([eos], not has_eos)
            last_kind = kind

    if not counts["documents"]:  # write one without tokens: an empty file cannot be mapped
        n = append([eos], False)
        files["documents"].write(np.int64((0, 0)))
        files["sources"].write(np.int64((0, 0)))
    files["bytes_at"].write(np.int64((n, n + n_more)))
    if files["ignored"].tell():
        # This lengthens the file to one byte a token: the bytes after the last ignored are zeros.
        files["ignored"].truncate(n)
    return counts


def _cut_ends(record, begin, eos, is_first, tokenizer):
    """Take the id `begin` from the beginning of a text, and eos from its end, out of its record."""
    ids = record["ids"]
    first = int(is_first and begin in ids[:1])
    last = len(ids) - int(record["is_last"] and eos in ids[first:][-1:])
    if last - first < len(ids):
        cut = np.concatenate([ids[:first], ids[last:]])
        record["n_bytes"] -= len(tokenizer["decode"](cut).encode())
        record["ids"] = ids[first:last]
        if np.ndim(record["ignored"]):
            record["ignored"] = record["ignored"][first:last]


MOST_ROWS = 512  # records that are encoded together: a tokenizer's library uses all cores
MOST_CHARACTERS = 2**22  # of their texts, about; bounds the memory


def _records_of_files(paths, tokenizer, columns):
    """Yield the encoded records of all rows, see `read_record`. The last piece of a document has
    "is_last".
    """
    total = sum(file.stat().st_size for path in paths for file in _files_of(path))
    group = []
    n_characters = 0
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", delay=1, disable=None,
              leave=False) as bar:
        for file_index, path in enumerate(paths):
            n_documents = 0
            for where, row, is_last in rows_in(path, tokenizer["piece"], columns):
                record = read_record(row, where, tokenizer) | {"is_last": is_last}
                record["source"] = (file_index, n_documents)
                n_documents += is_last
                group.append(record)
                n_characters += len(record["text"])
                bar.update(len(record["text"]))
                if len(group) == MOST_ROWS or n_characters > MOST_CHARACTERS:
                    yield from encode_records(group, tokenizer)
                    group = []
                    n_characters = 0
    yield from encode_records(group, tokenizer)


def _files_of(path):
    """A file, or the files in a folder written by the datasets library."""
    return sorted(filter(Path.is_file, path.glob("*"))) if path.is_dir() else [path]


def read_record(row, where, tokenizer):
    """The record of a row: {
        "kind": "text", "pair", "chat" or "ids",
        "text": a text; of a pair, the prompt; of a chat, what the chat template renders,
        "completion": of a pair,
        "n_bytes": of the text, or of both,
        "spans": of a chat: [first, last) of the characters that are labels,
        "has_end": of a chat: False if no special token ends the answer at its end,
        "ids", "ignored": of token ids, see encode_records}.

    Raises ValueError naming `where` for a row in another form, and for a column that would reach no
    token.
    """
    with as_value_error(where, ValueError, TypeError):
        if not isinstance(row, dict):
            raise ValueError(f"{str(row)[:60]!r} is not an object with fields")
        row = dict(row)  # readers take optional columns out of it
        form = _find_form(row)
        if form == "text":
            record = {"kind": "text", "text": row["text"]}
        elif form == "input_ids":  # optional: token ids
            record = _read_ids(row, tokenizer)
        else:  # optional: prompts and chats
            record = _read_prompt_or_chat(form, row, tokenizer)
        _check_columns(row, form)
        text = record["text"] + record.get("completion", "")
        if "\0" in text:
            raise ValueError("has a zero byte, which no text has")
        n_bytes = len(text.encode())  # refuses half a character
    return {"n_bytes": n_bytes} | record


def _check_columns(row, form):
    """Raise ValueError for a column with a meaning for a model or a trainer that is not used: one
    of UNREAD_COLUMNS, and one that selects or weights the tokens of a row that is not a text.
    """
    names = form.split(", ")
    for name, value in row.items():
        has_meaning = name in UNREAD_COLUMNS
        if form not in ("text", "prompt") and name not in names:
            has_meaning |= "weight" in name or _selects(value, row.get(names[-1]))
            has_meaning |= name == "label" and form != "input_ids"  # false: an answer to avoid
        if has_meaning and not _is_empty(value) and value != 1:
            used = " ".join(f"{column}={column}" for column in names)
            reason = "would reach no token; remove it or such rows"
            if name not in UNREAD_COLUMNS:
                reason = ("selects or weights labels, which is not supported; remove such rows, or "
                          "put what is no label into a prompt")
            raise ValueError(f"the column {name}, {value!r:.40}, {reason}, or name the columns to "
                             f"use: --columns {used}")


def _selects(value, items):
    """Whether a column may mask, weight or divide the token ids or the messages of its row, each
    perhaps written as JSON.
    """
    value, items = _numbers(value), _numbers(items) or items
    if len(value) < 2 or {*value} == {1}:
        return False
    if _numbers(items):  # zeros, as token types, and positions from 0 on say nothing
        return {*value} != {0} and value != [*range(len(items))]
    items = messages_in(items)
    if not isinstance(items, list):
        return False
    answers = [x for x in items if isinstance(x, dict) and x.get("role") == "assistant"]
    return len(value) in (len(items), len(answers)) and (min(value) <= 0 or max(value) <= 1)


def _numbers(value):
    """The list of numbers, or of numbers and nulls, in a column; [] if it holds something else."""
    if isinstance(value, str) and re.fullmatch(r"\[[\s\d.,eE+\-nultrfas]*\]", value.strip()):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = value.tolist()
    is_list = isinstance(value, list) and all(isinstance(x, int | float | None) for x in value)
    return [x or 0 for x in value] if is_list else []


# Forms of a row: the columns that it must have. Lists may also be written as JSON.
FORMS = (
    "text",
    "prompt, completion",
    "messages",
    "conversations",  # ShareGPT
    "instruction, output",  # Alpaca
    "input_ids",
)
# Columns that a row may have beside those of its form.
OPTIONAL_COLUMNS = ("system", "tools", "input", "labels", "attention_mask")
# Columns with a meaning for a model or a trainer: an error in a row that does not use them.
UNREAD_COLUMNS = (
    "system", "tools", "input", "history", "system_prompt", "functions", "function_call",
    "tool_calls", "documents", "reasoning_content", "chat_template", "chat_template_kwargs",
    "weight", "loss_mask", "completion_mask", "assistant_masks", "position_ids", "image", "images",
    "videos", "audio",
)


def _is_empty(value):
    """Whether a row has no value: null, NaN as in tables, or an empty text or list."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    return value is None or value != value or value in ([], {})


def _find_form(row):
    """The one form of `FORMS` that a row has. Raises ValueError for none or several."""
    found = []
    for form in FORMS:
        types = str if form in ("text", "instruction, output") else (str, list)
        if all(isinstance(row.get(name), types) for name in form.split(", ")):
            found.append(form)
    if len(found) != 1:
        fields = ", ".join(f"{name} ({type(x).__name__})" for name, x in row.items())
        raise ValueError(f"must have one of {'; '.join(FORMS)}, and has {fields or 'no fields'}; "
                         "name the columns to use, as in --columns text=content")
    return found[0]


def encode_records(records, tokenizer):
    """Add "ids" and "ignored" to records of read_record, and return them. ignored: 1 for each id
    that is not a label, or one bool for all ids.
    """
    # All texts in one list: a tokenizer's library uses all cores for a list.
    texts = [record for record in records if record["kind"] in ("text", "pair")]
    encoded = tokenizer["encode_batch"]([record["text"] for record in texts])
    for record, ids in zip(texts, encoded):
        record.update(ids=ids, ignored=False)
    _encode_completions_and_chats(records, tokenizer)  # optional: prompts and chats
    return records


def rows_in(path, size, columns=()):
    """Yield (where, row, is_last) for the rows of a file or folder.

    A row is a JSON value, or {"text"} of a text file. A text file is read in pieces of about `size`
    characters (-1: in one); all rows except the earlier pieces have is_last. columns: texts
    NAME=COLUMN; rows of other files then have only the value of COLUMN under NAME.
    """
    # Optional: tables, and JSON.
    rows = _rows_of_format(path, columns)
    if rows:
        for where, row in rows:
            yield where, _named_columns(row, columns, where) if columns else row, True
    else:
        with _open_utf8(path) as file:
            for text, is_last in _text_pieces(file, size):
                yield str(path), {"text": text}, is_last


def _named_columns(row, columns, where):
    """{name: row[column]} for each NAME=COLUMN."""
    pairs = [entry.split("=", 1) for entry in columns]
    with as_value_error(f"{where}: has no column", KeyError, TypeError):
        return {name: row[column] for name, column in pairs}


@contextlib.contextmanager
def _open_utf8(path):
    """Open a text file, decompressed. Errors in reading it are ValueErrors that name it."""
    with as_value_error(f"{path}: cannot be read (not UTF-8, cut off, or zstd --long?)", OSError,
                        EOFError, zlib.error, UnicodeDecodeError):
        if path.suffix.lower() == ".zst":
            # pyarrow's reader detects a truncated file, zstandard's does not.
            content = require("pyarrow", path).input_stream(str(path), compression="zstd")
        else:
            opener = gzip.open if path.suffix.lower() == ".gz" else open
            content = opener(path, "rb")
        with io.TextIOWrapper(content, encoding="utf-8-sig", newline="\n") as file:
            yield file


def _text_pieces(file, size):
    """Yield (text, is_last) in pieces of about `size` characters; -1: in one piece.

    Text is cut where tokenizers split it anyway: after a line that a letter or digit follows, or
    after a word. The cut is the last possible one, so the pattern begins with a greedy `.*`.
    """
    to_cut = re.compile(r"(?s).*(\S\n(?=[^\W_])|[^\W_](?=\s))")
    text = file.read(size)
    more = file.read(size)
    while more:
        # Earlier text was already searched. The last two characters may end a line or a word now.
        n_searched = max(0, len(text) - 2)
        text += more
        cut = to_cut.match(text, n_searched)
        if cut:
            yield text[: cut.end()], False
            text = text[cut.end() :]
        more = file.read(size)
    yield text, True


def content_id(path):
    """Identifier of the content of a file: its size and a checksum of its first MiB.

    A folder written by the datasets library is identified by its state.json.
    """
    if path.is_dir():
        path = path / "state.json"
    with open(path, "rb") as file:
        return [path.stat().st_size, zlib.crc32(file.read(2**20))]


# ---- token cache

def _token_cache_folder(cfg):
    """The folder of tokenized text: token_cache, or the folder data in cache_dir; in out_dir where
    cache_dir is none or cannot be written, as the home of some containers.
    """
    home = os.path.expanduser(cfg.cache_dir)
    try:
        os.makedirs(home, exist_ok=True)
    except OSError:  # also of ""
        home = cfg.out_dir
    return cfg.token_cache or os.path.join(home, "data")


# Part of the names in the token cache. Raise it when the same files give other tokens than before.
READER_VERSION = 1


def _cache_key(paths, tokenizer, columns):
    """Name of the tokens of these files: a hash of their content, the columns and the tokenizer."""
    content = [READER_VERSION]
    for file in chain.from_iterable(map(_files_of, paths)):
        identity = [file.suffixes[-2:], *content_id(file)]
        # The time of the last change stands for the content beyond the first MiB. It is the one
        # that no program can set, since archives and images have fixed times.
        if file.stat().st_size > 2**20:
            identity.append(file.stat().st_ctime_ns)
        content.append(identity)
    key = json.dumps([tokenizer["key"], *columns, *content])
    return hashlib.sha256(key.encode()).hexdigest()[:20]


def _write_once(folder, write, read):
    """Make `folder` by write(temporary folder), unless read() finds it complete; return what read()
    then returns. Of several processes one writes, and the others wait for its lock.
    """
    found = read()  # without a lock: the disk may be read-only
    if found is not None:
        return found
    temporary = folder.with_suffix(".partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if read() is None:
            try:
                shutil.rmtree(folder, ignore_errors=True)  # an incomplete one
                temporary.mkdir(exist_ok=True)
                write(temporary)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return read()


# ---- the tokenizer

def make_tokenizer(name, eos_token=""):
    """Make a tokenizer: "bytes", a tokenizer.json, a folder that transformers saved, or
    tiktoken:ENCODING. eos_token: the token that ends a document; empty: the tokenizer's own.
    Unchanged files are not read again.

    Special tokens that are written out in a text become their ids, in all tokenizers but bytes,
    which has none.
    Returns {
        "encode": text -> 1-D array of ids,
        "encode_batch": the same for a list of texts,
        "encode_continuations": the same for texts that continue another one,
        "encode_with_offsets": list of texts -> [an object with the lists "ids" and "offsets"],
        "decode": ids -> text; ids that the tokenizer lacks are shown as numbers, <300>,
        "vocab_size", "dtype": of the ids,
        "bos", "eos": ids around a document; bos None: an eos stands before it, too; eos None: the
            tokenizer can only be used with token files,
        "stops": ids that end a sample,
        "special_tokens": {text: id},
        "openings": ids that may begin a prompt: those of special_tokens, but not of all that were
            added, such as runs of spaces,
        "chat": a function that loads the chat template, see `_load_chat_template`,
        "piece": characters of the pieces in which a text is encoded; -1: in one,
        "key": a JSON value that identifies the tokenizer,
        "name": for messages}.
    """
    name = hub_path(name)  # optional: tokenizers on the Hub
    files = [Path(name), *_tokenizer_files(name)]
    written_at = tuple(file.stat().st_mtime_ns for file in files if file.exists())
    return dict(_read_tokenizer(name, eos_token, written_at))


TOKENIZER_FILES = ("*token*.json", "*token*.model", "vocab.*", "merges.txt", "chat_template*",
                   "additional_chat_templates/*", "generation_config.json")


def _tokenizer_files(folder):
    return sorted(set(chain.from_iterable(map(Path(folder).glob, TOKENIZER_FILES))))


@lru_cache(maxsize=8)
def _read_tokenizer(name, eos_token, written_at):
    """Make a tokenizer. It is cached, and read again when its files have other times."""
    if name == "bytes":
        library = _bytes_tokenizer(eos_token)
    elif name.startswith("tiktoken:"):
        library = _tiktoken_tokenizer(name, eos_token)
    else:
        library = _hf_tokenizer(name, eos_token)
    n, eos = library["vocab_size"], library["eos"]
    if eos_token and eos is None:
        raise ValueError(f"tokenizer {name!r}: has no token {eos_token!r} to end a document; name "
                         "one that it has with --eos_token")
    dtype = np.min_scalar_type(n - 1)

    def as_arrays(encode, texts):
        return [np.asarray(ids, dtype) for ids in encode(texts)]

    def decode(ids):
        text = ""
        for is_known, group in groupby(np.asarray(ids).tolist(), key=lambda i: i < n):
            decode_some = library["decode"] if is_known else _decode_numbers
            text += decode_some(list(group))
        return text

    encode_batch = partial(as_arrays, library["encode_batch"])
    special_tokens = library.get("special_tokens", {})
    tokenizer = {
        "encode_continuations": library["encode_batch"],
        "encode_with_offsets": lambda texts: [],  # without a chat template there are no chats
        "bos": None, "stops": {eos} - {None}, "special_tokens": special_tokens,
        "openings": {*special_tokens.values()}, "chat": lambda: None, "key": name,
        "piece": 2**14 if _can_cut(encode_batch, special_tokens) else -1,
    } | library
    return tokenizer | {
        "name": name, "key": [tokenizer["key"], eos_token], "dtype": dtype, "decode": decode,
        "encode": lambda text: encode_batch([text])[0], "encode_batch": encode_batch,
        "encode_continuations": partial(as_arrays, tokenizer["encode_continuations"]),
    }


def _can_cut(encode_batch, special_tokens):
    """Whether a text that is encoded in pieces gets the same ids, by a test. See _text_pieces."""
    if any(re.search(r"\S\s", token) for token in special_tokens):
        return False
    pieces = ("One two 3\n", "four five.\n", "Six  seven,\n", "eight", " nine")
    try:
        whole = encode_batch(["".join(pieces)])[0]
        return np.array_equal(whole, np.concatenate(encode_batch(pieces)))
    except ValueError:  # a part of these has no token
        return False


def check_has_end(tokenizer, where):
    """Raise ValueError for a tokenizer that cannot end the documents of a file of text."""
    if tokenizer["eos"] is None:
        raise ValueError(f"tokenizer {tokenizer['name']!r}: has no end-of-document token, which "
                         f"the text in {where} needs; name one of its tokens with --eos_token")


def _bytes_tokenizer(eos_token):
    """Make the default tokenizer, whose ids are the bytes of UTF-8; 0 ends a document."""
    return {
        "encode_batch": lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
        "decode": lambda ids: bytes(ids).decode(errors="replace"),
        "vocab_size": 256,
        "eos": None if eos_token else 0,
    }


def make_cfg_tokenizer(cfg):
    """Make the tokenizer of a config. The ids of token files without one are shown as numbers: as
    bytes, they would look like text.
    """
    tokenizer = make_tokenizer(cfg.tokenizer, cfg.eos_token)
    # Optional: rows of token ids, which may be any of the model's.
    if cfg.vocab_size > tokenizer["vocab_size"]:
        dtype = np.min_scalar_type(cfg.vocab_size - 1)
        tokenizer |= {"vocab_size": cfg.vocab_size, "dtype": dtype,
                      "key": [*tokenizer["key"], str(dtype)]}
    if cfg.tokenizer == "bytes" and has_only_token_files(cfg):
        eos = cfg.eod_id if cfg.eod_id >= 0 else None
        tokenizer |= {"encode": _refuse_text, "decode": _decode_numbers, "eos": eos,
                      "stops": {eos} - {None}}
    return tokenizer


def has_only_token_files(cfg):
    """Whether all data of a config is files of token ids."""
    patterns = [*(mixture_weights(cfg.data) or cfg.data), *cfg.val_data]
    return bool(patterns) and all(name.lower().endswith(TOKEN_FILES) for name in patterns)


def _refuse_text(text):
    raise ValueError(f"tokenizer 'bytes': the ids in the data are not bytes, so that {text[:40]!r} "
                     "has no ids; set --tokenizer to the one that made them")


def _decode_numbers(ids):
    """ids without a text, shown as numbers, as in <15496>."""
    return "".join(f"<{i}>" for i in ids)


# ---- metrics of text

def fingerprint(dataset):
    """A line by which a resume notices other tokens: their number, and a checksum of the first
    and last 2^20 of each shard, fewer of each if there are many shards.
    """
    shards = dataset["shards"]
    n = max(2**20 // len(shards), 2**10)
    crc = 0
    for shard in shards:
        for name in ("tokens", "ignored"):
            if name in shard:
                crc = zlib.crc32(shard[name][:n].tobytes(), crc)
                crc = zlib.crc32(shard[name][-n:].tobytes(), crc)
    return f"{dataset['lengths'].sum()} tokens in {len(shards)} shards, crc32 {crc:08x}"


def bytes_per_token(dataset):
    """Bytes of text per token; bos and eos are one byte each.

    None if a shard is not text, or has tokens that are not labels.
    """
    n_bytes = 0
    n_tokens = 0
    for shard in dataset["shards"]:
        if "documents" not in shard or "ignored" in shard:
            return None
        first = shard["token_offset"]
        last = first + len(shard["tokens"])
        # When packed documents are split, both sides keep all tokens: count those of its documents.
        if "spans" in shard:
            first, last = shard["documents"][0, 0] + 1, shard["documents"][-1, 1]
        before, through = np.interp([first, last], *shard["bytes_at"].T)
        n_bytes += through - before
        n_tokens += last - first
    return n_bytes / n_tokens if n_tokens else None


def text_metrics(means, source):
    """Perplexity per token, and bits per byte if the source is text. source: {} for the means over
    several validation sets.
    """
    loss = float(means["loss"])
    metrics = {"ppl": exp(min(loss, 700))}
    if source.get("bytes_per_token"):
        metrics["bits_per_byte"] = loss / log(2) / source["bytes_per_token"]
    return metrics


# ---- validation data from training data

def split(dataset, val_frac):
    """Split into (train, validation): the last fraction `val_frac` of all tokens is validation.

    No side of a cut shard is shorter than seq_len + 1. With packing, no document is cut.
    Raises ValueError when one side would have no sequence, or no label.
    """
    seq_format = dataset["seq_format"]
    n_train = round(sum(dataset["lengths"].tolist()) * (1 - val_frac))
    sides = []
    for shard in dataset["shards"]:
        # n_train: how many tokens of this shard and those after it are for training; it may be
        # negative.
        if seq_format["packing"] == "stream":
            sides.append(_cut_tokens(shard, n_train, seq_format["seq_len"]))
        else:
            sides.append(_cut_documents(shard, n_train))
        n_train -= len(shard["tokens"])

    train = make_dataset([first for first, _ in sides if first], seq_format)
    val = make_dataset([second for _, second in sides if second], seq_format)
    for name, side in (("training", train), ("validation", val)):
        with as_value_error(f"val_frac {val_frac}: leaves too little {name} data; give --val_data, "
                            "more data or a shorter --seq_len", ValueError):
            _check_sequences(side)
    return train, val


def _cut_tokens(shard, cut, seq_len):
    """Cut a shard before token `cut` into two, of which one may be None."""
    # A side that would be too short for a sequence joins the other side.
    if cut <= seq_len:
        return None, shard
    if len(shard["tokens"]) - cut <= seq_len:
        return shard, None

    first, second = _cut_arrays(shard, ("tokens", "ignored"), cut)
    second["token_offset"] += cut  # "documents" count tokens from the start of the shard
    return first, second


def _cut_documents(shard, cut):
    """Cut a shard between documents, near token `cut`, into two; both sides keep all tokens."""
    documents = shard["documents"]
    n_first = len(documents)
    if cut < len(shard["tokens"]):  # the second side gets a document
        n_first = min(np.searchsorted(documents[:, 0], cut), n_first - 1)
    return _cut_arrays(shard, ("documents", "sources"), n_first)


def _cut_arrays(shard, names, n):
    """Two copies of a shard: with the first n items of these arrays, and with the others."""
    arrays = {name: shard[name] for name in names if name in shard}
    return [shard | {name: x[part] for name, x in arrays.items()}
            for part in (slice(n), slice(n, None))]


# ---- sets of files

def find_sets(parts, cfg):
    """The sets of files that a config names: (weights of the training sets, {name: files} of these,
    {name: files} of validation sets). A set without a name is named "", one without a weight has
    none. parts: see `open_text`.
    """
    weights = mixture_weights(cfg.data)
    train_sets = {name: [name] for name in weights} or {"": cfg.data}
    val_sets = named_sets(cfg.val_data)
    # Optional: data in buckets.
    val_sets = fetch_buckets("val_data", val_sets, cfg)
    if "train" in parts or not val_sets:
        train_sets = fetch_buckets("data", train_sets, cfg)
    check_disjoint({"data": train_sets, "val_data": val_sets})
    return [*weights.values()], train_sets, val_sets


def mixture_weights(entries):
    """{pattern: weight} of entries PATTERN=WEIGHT, as in cfg.data; {} if no entry has a weight.

    Raises ValueError when only some entries have a weight, or two have the same pattern.
    """
    weights = {}
    for text in entries:
        pattern, _, weight = text.rpartition("=")
        if re.fullmatch(r"[\d.]+(e-?\d+)?", weight) and not _matches(text):
            weights[pattern] = weight
    if weights and len(weights) < len(entries):
        raise ValueError(f"data {' '.join(entries)}: each name must have one weight, as in "
                         "web.bin=0.7 code.bin=0.3, or none")
    return weights


def named_sets(entries):
    """{name: patterns} of entries NAME=PATTERN, such as cfg.val_data; the name of entries without
    one is "". Entries with the same name form one set.

    Raises ValueError when only some entries have a name.
    """
    sets = {}
    for text in entries:
        named = re.fullmatch(r"([\w.-]+)=(.+)", text)
        name, pattern = named.groups() if named and not _matches(text) else ("", text)
        sets.setdefault(name, []).append(pattern)
    if "" in sets and len(sets) > 1:
        raise ValueError(f"val_data {sets[''][0]!r}: name each entry, as NAME=PATTERN, or none")
    return sets


# Names of the split for validation; the first name found is used.
VAL_SPLITS = ("validation", "valid", "val", "dev", "eval", "test")


def _choose_split(folder, field):
    """The split of a DatasetDict's folder: for training "train", for val_data another."""
    names = VAL_SPLITS if field == "val_data" else ("train",)
    splits = sorted(path.parent.name for path in Path(folder).glob("*/state.json"))
    for name in names:
        if name in splits:
            return os.path.join(folder, name)
    raise ValueError(f"{field} {folder!r}: has the splits {', '.join(splits)}, none of which is "
                     f"{' or '.join(names)}; name one, as in {folder}/SPLIT")


# ---- checks of files and ids

def check_disjoint(sets):
    """Raise ValueError for a file in two of these sets: {field: {name: patterns}}."""
    field_of = {}
    for field, named in sets.items():
        for patterns in named.values():
            for path in map(os.path.realpath, expand(patterns, lenient=True, field=field)):
                if path in field_of:
                    raise ValueError(f"{path}: is in two sets, of {field_of[path]} and {field}; "
                                     "take it out of one")
                field_of[path] = field


def _check_sequences(dataset):
    """Raise ValueError for a dataset or a shard without a sequence that has a label."""
    seq_len = dataset["seq_format"]["seq_len"]
    advice = "a larger --seq_len, which cuts no label off"
    if dataset["seq_format"]["packing"] == "stream":
        advice = "--packing best_fit, or a smaller --seq_len"
    n_sequences = np.diff(dataset["cum_counts"], prepend=0)
    if not len(n_sequences):
        raise ValueError(f"no sequence of {seq_len + 1} tokens")
    for shard, n in zip(dataset["shards"], n_sequences):
        if not n or not has_label(shard):
            raise ValueError(f"{shard['name']}: has {len(shard['tokens'])} tokens, and no sequence "
                             f"of {seq_len} with a label; use more data, or {advice} (of prompts "
                             "and chats, only completions and answers are labels)")


def has_label(shard):
    """Whether any token of a shard is a label."""
    # The first token of a shard follows no other one, so it is no label.
    return "ignored" not in shard or not np.all(shard["ignored"][1:])


def check_ids(rows, vocab_size, shards):
    """Raise ValueError for an id outside [0, vocab_size), naming the shard of its row.

    vocab_size 0: any id is legal.
    """
    if not vocab_size or not rows.size or (rows.min() >= 0 and rows.max() < vocab_size):
        return
    i, j = np.argwhere((rows < 0) | (rows >= vocab_size))[0]
    raise ValueError(f"{shards[i]['name']}: token id {rows[i, j]} is not in [0, {vocab_size}), the "
                     "vocabulary of the model; see --tokenizer, --vocab_size and --data_dtype")


def _check_unchanged(shard):
    """Raise ValueError if the shard's file has another size now, OSError if it is gone.

    Reading a mapped file beyond its end would kill the process.
    """
    if "path" in shard and os.stat(shard["path"]).st_size != shard["file_size"]:
        raise ValueError(f"{shard['path']}: its size is not {shard['file_size']} any more; data "
                         "must not change while a run reads it")


# ---- errors

@contextlib.contextmanager
def as_value_error(message, *kinds):
    """Raise exceptions of these kinds as ValueErrors: the message, then that of the exception."""
    try:
        yield
    except kinds as e:
        raise ValueError(f"{message}: {e}") from None


def require(module, user):
    """Import a module of an optional package, or raise ValueError naming its user."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise ValueError(f"{user}: needs `pip install {package}` ({e})") from None


# ---- optional
# Mixtures, document mask, packing, token files, rows of token ids, prompts and chats, summaries,
# examples, values per example, prompts of samples, file formats, rows from Python, tokenizers,
# names on the Hub, data in buckets. A section can be deleted together with the few lines that call
# it.

# ---- mixtures

def mix(datasets, weights):
    """Join datasets into one that draws from each in proportion to its weight (text or number).

    Each dataset has separate epochs. After any number of sequences the counts are within 1 of
    exact; they are exact in every batch whose size allows it.
    """
    weights = [Fraction(weight) for weight in weights]
    fractions = [weight / (sum(weights) or 1) for weight in weights]
    n_cycle = lcm(*(fraction.denominator for fraction in fractions))
    if min(fractions) <= 0 or n_cycle > 10**4:
        given = " ".join(str(float(weight)) for weight in weights)
        raise ValueError(f"data {given}: weights must be above 0 and repeat within 10,000 "
                         "sequences; round them, as in 0.7 and 0.3")

    # Lay out a cycle. Each position goes to one of the datasets that are not ahead of their
    # fraction: the one that would fall behind first.
    counts = [0] * len(datasets)  # sequences of each dataset so far
    cycle = []  # for each position the dataset, and how many of its sequences come before
    for position in range(n_cycle):
        due = []
        for i, (n, fraction) in enumerate(zip(counts, fractions)):
            if n <= fraction * position:
                due.append((ceil((n + 1) / fraction), i))  # the deadline of its next sequence
        _, chosen = min(due)
        cycle.append((chosen, counts[chosen]))
        counts[chosen] += 1

    # The joined dataset has the shards of all. Its epoch ends when each has been read once.
    sizes = np.array([dataset["n"] for dataset in datasets])
    shards = [shard for dataset in datasets for shard in dataset["shards"]]
    joined = make_dataset(shards, datasets[0]["seq_format"])
    joined["n"] = max(ceil(n / fraction) for n, fraction in zip(sizes.tolist(), fractions))
    joined["mixture"] = {
        "datasets": datasets,
        "cycle": np.array(cycle),
        "counts": np.array(counts),  # sequences of each dataset in a cycle
        "sizes": sizes,
        "first_examples": sizes.cumsum() - sizes,  # of each dataset, in the joined one
    }
    return joined


def _mixture_examples(mixture, draws, seed):
    """The example of each draw, in [0, sequences of all datasets)."""
    cycles, positions = np.divmod(draws, len(mixture["cycle"]))
    dataset_of, n_before = mixture["cycle"][positions].T
    # Each dataset counts its own draws.
    draws = cycles * mixture["counts"][dataset_of] + n_before
    examples = shuffled(draws, mixture["sizes"][dataset_of], seed)
    return mixture["first_examples"][dataset_of] + examples


def _describe_mixture(mixture):
    summaries = []
    for n, dataset in zip(mixture["counts"], mixture["datasets"]):
        fraction = n / mixture["counts"].sum()
        summaries.append(f"{fraction:.3g} of {dataset['shards'][0]['name']}: {describe(dataset)}")
    return "\n".join(summaries)


# ---- document mask

def _add_document_mask(batch, shards, starts):
    """Add "segments" and "positions" to a batch of the stream, so that documents do not attend to
    each other.

    "segments": 1 + the number of documents begun so far in the row; "positions": in the document.
    A label across the border of two documents is ignored.
    """
    tokens, labels = batch["tokens"], batch["labels"]
    begins = np.zeros(tokens.shape, bool)
    for i, (shard, start) in enumerate(zip(shards, starts)):
        if "documents" in shard:
            begins[i] = _document_starts(shard, start, labels[i])
        else:
            begins[i] = tokens[i] == shard["eod_id"]
    columns = np.arange(tokens.shape[1], dtype=np.int32)[None]
    first = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    batch["segments"] = 1 + begins.cumsum(axis=1, dtype=np.int32)
    batch["positions"] = columns - first


def _document_starts(shard, start, labels):
    """Mark the positions where documents begin in a sequence; ignore its labels across a border."""
    # The documents that begin among the tokens and the last label, and the one before them.
    n = len(labels) + 1
    first_token = shard["token_offset"] + start
    first, last = np.searchsorted(shard["documents"][:, 0], (first_token, first_token + n))
    starts, stops = shard["documents"][max(first - 1, 0) : last].T - first_token
    begins = np.zeros(n, bool)
    begins[starts[starts >= 0]] = True

    # Documents that each have a bos and an eos share no token: no label leads from one to the next.
    is_apart = stops[:-1] <= starts[1:]
    borders = starts[1:][is_apart]
    labels[borders[borders > 0] - 1] = IGNORE
    return begins[:-1]


# ---- packing

def pack(lengths, room, one_each=False):
    """Put items of these lengths into rows of `room`; items of length 0 are skipped.

    Returns (bounds, items): row i has items[bounds[i] : bounds[i + 1]]. Best fit: longest first,
    each into the fullest row that has room for it. one_each: one row per item.
    """
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    if one_each:
        return np.arange(len(order) + 1), np.sort(order)

    rows_with = defaultdict(list)  # {room left: rows}
    rows_with[room] = list(range(len(order)))[::-1]  # enough empty rows
    rooms = [room]  # those with rows, sorted
    row_of = []
    for length in lengths[order].tolist():
        i = bisect_left(rooms, length)
        left = rooms[i] - length
        row_of.append(rows_with[rooms[i]].pop())
        if not rows_with[rooms[i]]:
            del rooms[i]
        if not rows_with[left]:
            insort(rooms, left)
        rows_with[left].append(row_of[-1])
    items = order[np.lexsort((order, row_of))]  # by row, in a row by index
    return np.append(0, np.cumsum(np.bincount(row_of))), items


def _pack_shard(shard, seq_format):
    """Add "row_bounds" and "spans": row i has spans[row_bounds[i] : row_bounds[i + 1]].

    A span is the first token of a document, truncated, and the one after its last.
    """
    packing = seq_format["packing"]
    if "documents" not in shard:
        raise ValueError(f"{shard['name']}: packing {packing} needs documents, and a token file "
                         "has none; use text or .jsonl")

    # Truncate documents longer than a row and its last label.
    T = seq_format["seq_len"]
    starts, stops = shard["documents"].T
    if seq_format["truncation"] == "keep_end":
        starts = np.maximum(starts, stops - T - 1)
    stops = np.minimum(stops, starts + T + 1)

    # The last token is a label only. A document without a label goes into no row.
    lengths = np.maximum(stops - starts - 1, 0)
    if "ignored" in shard:
        # Sums between borders; every second one is over the labels of a document.
        borders = np.stack([starts + 1, stops], axis=1).ravel()
        ignored = np.append(shard["ignored"], np.uint8(0))  # a border may be at the end
        n_ignored = np.add.reduceat(ignored, borders, dtype=np.int64)[::2]
        lengths = np.where(n_ignored < lengths, lengths, 0)
    bounds, items = pack(lengths, T, one_each=packing == "none")
    return shard | {"row_bounds": bounds, "spans": np.stack([starts, stops], axis=1)[items]}


def _packed_batch(shards, offsets, seq_format):
    """Build a batch of packed rows, with "segments" (0: padding) and "positions".

    offsets: index of each row among the rows of its shard.
    """
    T = seq_format["seq_len"]
    names = ("tokens", "labels", "segments", "positions")
    batch = {name: np.zeros((len(offsets), T), np.int32) for name in names}
    batch["labels"][:] = IGNORE
    for row, (shard, offset) in enumerate(zip(shards, offsets.tolist())):
        first, last = shard["row_bounds"][offset : offset + 2]
        spans = shard["spans"][first:last]
        column = 0
        if seq_format["padding_side"] == "left":
            column = T - int((np.diff(spans) - 1).sum())
        for number, (start, stop) in enumerate(spans.tolist(), 1):
            n = stop - start - 1
            place = row, slice(column, column + n)
            tokens = shard["tokens"][start:stop].astype(np.int32)
            batch["tokens"][place] = tokens[:-1]
            batch["labels"][place] = tokens[1:]
            if "ignored" in shard:
                batch["labels"][place][shard["ignored"][start + 1 : stop] == 1] = IGNORE
            batch["segments"][place] = number
            batch["positions"][place] = np.arange(n)
            column += n
    check_ids(np.maximum(batch["tokens"], batch["labels"]), seq_format["vocab_size"], shards)
    return batch


def _describe_packing(dataset):
    """Facts about documents in sequences."""
    def n_tokens(name):
        return np.concatenate([np.diff(shard[name]) for shard in dataset["shards"]]) - 1

    n_given, n_used = n_tokens("documents"), n_tokens("spans")
    T, truncation = dataset["seq_format"]["seq_len"], dataset["seq_format"]["truncation"]
    cut = f" (--truncation {truncation})" if n_used.sum() < n_given.sum() else ""
    return [f"{len(n_used):,} of {len(n_given):,} documents in {dataset['n']:,} sequences",
            f"{n_used.sum():,} of {n_given.sum():,} tokens{cut}, "
            f"{1 - n_used.sum() / (dataset['n'] * T):.1%} padding"]


# ---- token files

# {(magic, version): token dtype} of the header (256 int32) of llm.c's token files.
LLMC_HEADERS = {(20240520, 1): np.dtype("uint16"), (20240801, 7): np.dtype("uint32")}


def _map_token_files(paths, seq_format, dtype, eod_id):
    """Open token files, each as a shard without documents. eod_id: the id between them; dtype: of
    .bin files without a header.
    """
    if seq_format["document_mask"] and not 0 <= eod_id < (seq_format["vocab_size"] or 2**63):
        raise ValueError(f"{paths[0]}: with document_mask, token files need the id between "
                         f"documents; set --eod_id (50256 for GPT-2), which is {eod_id}")
    shards = []
    for path in paths:
        tokens = _map_npy(path) if path.suffix.lower() == ".npy" else _map_bin(path, dtype)
        # A plain array is faster to slice than a memmap.
        shards.append({"name": str(path), "tokens": np.asarray(tokens), "token_offset": 0,
                       "eod_id": eod_id, "path": path, "file_size": path.stat().st_size})
    return shards


def _map_npy(path):
    with as_value_error(f"{path}: not a .npy file", Exception):  # from its header: any exception
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{path}: has {tokens.ndim} dims of {tokens.dtype}, not 1 of integers")
    return tokens


def _map_bin(path, dtype):
    dtype = np.dtype(dtype)
    size = path.stat().st_size
    offset = 0
    header = np.fromfile(path, np.int32, 256)
    # The header begins with a date and ends with 253 zeros.
    if len(header) == 256 and 20_000_000 < header[0] < 21_000_000 and not header[3:].any():
        magic, version, n = header[:3].tolist()
        dtype = LLMC_HEADERS.get((magic, version))
        offset = 1024
        if not dtype or size != offset + n * dtype.itemsize:
            raise ValueError(f"{path}: {size} bytes are not those of its header: magic {magic}, "
                             f"version {version}, {n} tokens; known are {[*LLMC_HEADERS]}")
    with as_value_error(f"{path}: {size} bytes cannot be {dtype}; set --data_dtype", ValueError):
        tokens = np.memmap(path, dtype, "r", offset)
    # Parts of wider integers: every second one is 0, or small where ids are beyond 65,535.
    first, second = tokens[: 2**16 : 2], tokens[1 : 2**16 : 2]
    if len(tokens) > 32 and first.any() and second.max() < (16 if first.max() >= 4096 else 1):
        raise ValueError(f"{path}: seems to have integers of more bytes than data_dtype {dtype}; "
                         "set --data_dtype to uint32 or int64")
    return tokens


# ---- rows of token ids

def _read_ids(row, tokenizer):
    """The record of a row of token ids. Ids whose attention_mask is 0 are padding."""
    ids = _integers(row["input_ids"], "input_ids")
    labels = _integers(row.pop("labels", None), "labels", ids)
    mask = _integers(row.pop("attention_mask", None), "attention_mask", np.ones_like(ids))
    check_ids(ids[None], tokenizer["vocab_size"], [{"name": "input_ids"}])
    if not (ids.shape == labels.shape == mask.shape and np.isin(mask, (0, 1)).all()
            and np.all((labels == ids) | (labels == IGNORE))):
        raise ValueError(f"labels must be input_ids or {IGNORE} at each place, not shifted, and "
                         "attention_mask 0 or 1, as many as input_ids")
    is_used = mask == 1
    is_text = is_used & ~np.isin(ids, [tokenizer["bos"], tokenizer["eos"]])
    n_bytes = len(tokenizer["decode"](ids[is_text]).encode())
    return {"kind": "ids", "text": "", "ids": ids[is_used], "ignored": labels[is_used] == IGNORE,
            "n_bytes": n_bytes + np.count_nonzero(is_used & ~is_text)}  # a bos or eos is one byte


def _integers(value, name, default=None):
    """The value of a column as a 1-D array of integers."""
    if default is not None and _is_empty(value):
        return default
    array = np.asarray(_parsed(value))
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"{name} must be a list of integers: {str(value)[:80]}")
    return array.astype(np.int64)


# ---- prompts and chats

def _read_prompt_or_chat(form, row, tokenizer):
    """The record of a row that is not a plain text; see `read_record`."""
    prompt = []
    if form == "prompt, completion":
        prompt = messages_in(row["prompt"])
        completion = messages_in(row["completion"])
    elif form == "instruction, output":
        prompt = row["instruction"] + "\n\n"
        completion = row["output"]
        more = row.pop("input", "")
        if not _is_empty(more):
            prompt += _content_text(more) + "\n\n"
        # A tokenizer without a chat template gets a prompt and a completion.
        if tokenizer["chat"]():
            prompt = [{"role": "user", "content": prompt.removesuffix("\n\n")}]
            completion = [{"role": "assistant", "content": completion}]
    else:
        completion = messages_in(_parsed(row[form]))
        if not isinstance(completion, list):
            raise ValueError(f"{form} must be a list of messages: {completion!r:.60}")
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"kind": "pair", "text": prompt, "completion": completion}
    # Of a prompt and its completion, only the completion has labels.
    prompt = [*_system_messages(row), *prompt]
    messages = [*prompt, *completion]
    text, spans, has_end = render_chat(messages, row.pop("tools", None), tokenizer, len(prompt))
    return {"kind": "chat", "text": text, "spans": spans, "has_end": has_end}


def _encode_completions_and_chats(records, tokenizer):
    """Add the completions to "ids" and "ignored" of prompts; add both to records of chats."""
    pairs = [record for record in records if record["kind"] == "pair"]
    completions = tokenizer["encode_continuations"]([record["completion"] for record in pairs])
    for record, ids in zip(pairs, completions):
        record["ignored"] = np.repeat([1, 0], [len(record["ids"]), len(ids)])
        record["ids"] = np.concatenate([record["ids"], ids])

    chats = [record for record in records if record["kind"] == "chat"]
    encoded = tokenizer["encode_with_offsets"]([record["text"] for record in chats])
    for record, encoding in zip(chats, encoded):
        record["ids"] = np.array(encoding.ids, np.int64)
        record["ignored"] = _ignore_outside(record, encoding.offsets, tokenizer)


def messages_in(value):
    """The list of messages in a value, or in its JSON text; any other value unchanged."""
    if isinstance(value, list):
        return [_with_role(_parsed(message)) for message in value]
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):  # a text with brackets
            messages = messages_in(json.loads(value))
            if messages and all(isinstance(message, dict) and message.get("role") in ROLES
                                for message in messages):
                return messages
    return value


# Names of roles in ShareGPT's form, {"from", "value"}.
SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool",
    "function_response": "tool",
}


def _with_role(message):
    """A message with "role" and "content" in place of ShareGPT's "from" and "value"."""
    if not isinstance(message, dict) or "from" not in message or "role" in message:
        return message
    names = {"from": "role", "value": "content"}
    message = {names.get(name, name): x for name, x in message.items()}
    return message | {"role": SHAREGPT_ROLES.get(str(message["role"]), message["role"])}


def _system_messages(row):
    """The message in the column system, taken out of a row, in a list; an empty list without one.
    """
    system = row.pop("system", None)
    return [] if _is_empty(system) else [{"role": "system", "content": system}]


ROLES = ("system", "developer", "user", "assistant", "tool")
# Keys of a message that no template has to render.
ROUTINE_KEYS = {"role", "content", "id", "tool_call_id", "timestamp"}


def _clean_message(message, source):
    """A message as a chat template expects it: empty values are dropped, parts of text are joined,
    and JSON in tool calls is parsed. source: of the chat template.

    Raises ValueError for an unknown role, content that is not text, or a key that the template does
    not name.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"must have a role of {', '.join(ROLES)}: {str(message)[:80]}")
    cleaned = {name: x for name, x in message.items() if not _is_empty(x)}
    for name in cleaned.keys() - ROUTINE_KEYS:
        is_routine = name == "name" and message["role"] == "tool"
        if not is_routine and not _names(source, name):
            raise ValueError(f"{name} is not known to the chat template; remove it (to train on "
                             "some answers only, move the messages before them to a column prompt)")
    if "tool_calls" in cleaned:
        cleaned["tool_calls"] = _functions(cleaned["tool_calls"])
    if "tool_calls" not in cleaned or message.get("content") is not None:
        cleaned["content"] = _content_text(message.get("content"))
    return cleaned


def _names(source, name):
    """Whether the source of a template has this name."""
    return bool(re.search(rf"\b{re.escape(name)}\b", source))


def _content_text(content):
    """The content of a message as a text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and part.get("type") == "text"
               and isinstance(part.get("text"), str) for part in parts):
        raise ValueError(f"content is {str(content)[:80]!r} ({type(content).__name__}); must be a "
                         "text or a list of parts of type text")
    return "".join(part["text"] for part in parts)


def _functions(holders):
    """Tools, or calls of tools, with the JSON texts in them parsed."""
    parsed = []
    with as_value_error("tools", ValueError, TypeError, AttributeError):
        for holder in map(_parsed, _parsed(holders)):
            function = holder.get("function", holder)
            for name in ("arguments", "parameters"):
                if isinstance(function.get(name), str):
                    function = function | {name: _parsed(function[name] or "{}")}
            parsed.append(holder | {"function": function} if "function" in holder else function)
    return parsed


def render_chat(messages, tools, tokenizer, n_prompt=0):
    """Render a conversation in the tokenizer's chat template: (text, spans, has_end).

    spans: [first, last) of the characters that are labels: the messages of the assistant after the
    first n_prompt messages, each with the mark that ends it. The template marks them by
    {% generation %}; otherwise `_answer_span` finds each. has_end: False if the text ends with an
    answer and no special token ends it. tools: None, a list, or its JSON.
    """
    messages, render, text = _prepare_chat(messages, tools, tokenizer)
    special = tokenizer["chat"]()["special"]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    spans = render(messages, marked=True)
    if spans is not None and not n_prompt:
        return text, spans, True
    has_end = True
    if spans is None:
        spans = []
        for i in answers:
            with as_value_error(f"message {i + 1}: {UNDECIDED}", ValueError):
                first, last, has_end = _answer_span(render, messages, text, i, special)
            spans.append((first, last))
    # Each answer has a span, after that of the answer before.
    end = 0
    for i, (first, last) in zip(answers, spans):
        is_lost = first >= last and (messages[i].get("content") or "").strip()
        if first < end or is_lost or len(spans) != len(answers):
            raise ValueError(f"message {i + 1}: {UNDECIDED}")
        end = last
    has_end = has_end or end < len(text)
    return text, [span for i, span in zip(answers, spans) if i >= n_prompt], has_end


UNDECIDED = ("cannot determine which characters of the rendered chat it became; use a template "
             "that marks each answer by {% generation %}")


def _prepare_chat(messages, tools, tokenizer, add_generation_prompt=False):
    """The messages as the tokenizer's chat template expects them, a function that renders messages,
    see `_load_chat_template`, and the rendered text.
    """
    template = tokenizer["chat"]()
    if not template:
        raise ValueError("messages need a chat template; set --tokenizer to a folder that "
                         "transformers saved with one")
    tools = None if _is_empty(tools) else _functions(tools)
    source = template["source"](tools)
    if tools and not _names(source, "tools"):
        raise ValueError("tools are not known to the chat template; remove them, or name a "
                         "--tokenizer with tools")
    if not messages:
        raise ValueError("has no messages")
    cleaned = []
    for i, message in enumerate(messages, 1):
        with as_value_error(f"message {i}", ValueError):
            cleaned.append(_clean_message(message, source))
    render = partial(template["render"], tools=tools)
    render_whole = partial(render, add_generation_prompt=add_generation_prompt)
    # Without a text beside calls, templates expect no content, or null, or an empty text.
    bare = []
    for message in cleaned:
        is_bare = "tool_calls" in message and not message.get("content")
        bare.append({name: x for name, x in message.items() if not is_bare or name != "content"})
    candidates = [cleaned]
    for default in ({}, {"content": None}, {"content": ""}):
        candidates.append([default | message for message in bare])
    errors = []
    for filled in candidates:
        try:
            text = render_whole(filled)
            _check_rendered(render_whole, filled, text)
            return filled, render, text
        except ValueError as e:
            errors.append(e)
    raise errors[0]


def _check_rendered(render, messages, text):
    """Raise ValueError for a message whose content or calls have no effect on the rendered text."""
    contents = [(message.get("content") or "").strip() for message in messages]
    for i, (message, content) in enumerate(zip(messages, contents)):
        # If the text has it fewer times than the messages have, some message is not rendered.
        n_given = sum(other.count(content) for other in contents)
        if text.count(content) < n_given:
            longer = message | {"content": f"{content} and more"}
            if render([*messages[:i], longer, *messages[i + 1 :]]) == text:
                raise ValueError(f"message {i + 1}: the chat template does not render its content; "
                                 "remove it")
        for call in message.get("tool_calls", []):
            name = call.get("function", call).get("name")
            if not any(str(x) in text for x in (name, call.get("id")) if x):
                raise ValueError(f"message {i + 1}: the chat template does not render its "
                                 f"tool_calls, such as {name}; remove them")


def _answer_span(render, messages, text, i, special):
    """(first, last, has_end) of the answer messages[i] in `text`, the rendered conversation: its
    characters, from where the prompt for it ends to the mark that ends it, and whether that mark is
    a special token.

    They are found in copies of the conversation in which a number that the text does not have
    stands for a message. Raises ValueError with the reason where they cannot be found.
    """
    mark, history_mark = islice(_numbers_not_in(text), 2)
    history, following = messages[:i], messages[i + 1 :]
    answer = {"role": "assistant", "content": mark}
    around = partial(_around, render, mark)
    _, last_after = around([*history, answer])
    ending = _ending(around, [*history, answer], last_after, special)
    has_end = _special_end(ending, special) > 0
    if "tool_calls" in messages[i]:
        if ending != last_after.rstrip():
            raise ValueError("the template writes a header after the last answer")
        answer = _with_mark(messages[i], mark)
        _, last_after = around([*history, answer])
        ending = last_after.rstrip()

    after = last_after
    if following:
        _, after = around([*history, answer, *following])
    n = _n_common(after, last_after if not has_end else ending)
    is_same = after.startswith(ending)
    if not is_same:  # the last answer ends in another way, as in Phi's templates
        n = _special_end(after[:n], special)
    if not has_end or not n:  # the special token of the message that follows may end it
        stop = _special_token(after[n:].lstrip(), special)
        n = after.index(stop, n) + len(stop)
    if not is_same and (not n or "tool_calls" in messages[i]):
        raise ValueError("the template ends the last answer differently")
    if not text.endswith(after[n:]):
        raise ValueError("its content changes the text after it")
    first = _answer_start(render, messages, text, i, mark, history_mark, ending, special)
    return first, len(text) - len(after[n:]), has_end or bool(following)


def _numbers_not_in(text):
    """Yield numbers that are not in a text. Digits stay as they are in JSON, Python's repr and
    capitals.
    """
    return (mark for mark in map(str, count(271_828_182_845)) if mark not in text)


def _with_mark(message, mark):
    """A copy of a message with a mark as its content, or in the arguments of its last call."""
    if message["role"] != "assistant":
        return message | {"content": mark}
    if "tool_calls" not in message:
        return {"role": "assistant", "content": mark}  # without thoughts
    *calls, call = message["tool_calls"]
    function = call.get("function", call) | {"arguments": {"a": mark}}
    call = call | {"function": function} if "function" in call else function
    return message | {"tool_calls": [*calls, call]}


def _around(render, mark, messages, add_generation_prompt=False):
    """The rendered text before and after a mark in these messages."""
    text = render(messages, add_generation_prompt=add_generation_prompt)
    before, found, after = text.partition(mark)
    if not found:
        raise ValueError("the template does not render another text in its place")
    return before, after


def _ending(around, messages, last_after, special):
    """The text that ends an answer, the last of `messages`, which is a mark. last_after: the text
    after it. around: see `_around`.
    """
    ending = last_after.rstrip()
    prompted = ""
    if ending != _special_token(ending, special):
        _, prompted = around(messages, add_generation_prompt=True)
    if prompted != last_after:
        return ending
    # Some templates always write the header of one more answer.
    question = {"role": "user", "content": "?"}
    _, before_question = around([*messages, question])
    if before_question.startswith(ending):
        return ending
    common = ending[: _n_common(before_question, ending)]
    stop = _special_token(common.lstrip(), special)
    if not stop:
        raise ValueError("the template writes a header after the last answer")
    return common[: common.index(stop) + len(stop)]


def _answer_start(render, messages, text, i, mark, history_mark, ending, special):
    """Where the answer messages[i] begins in `text`: where the prompt for it ends."""
    history = messages[:i]
    around = partial(_around, render, mark)
    prompt = unprompted = None
    with contextlib.suppress(ValueError):  # as of no messages, or of a system message alone
        prompt = render(history, add_generation_prompt=True)
        unprompted = render(history)
    opening = ""
    if prompt:
        n_same = _token_start(prompt, _n_common(prompt, unprompted), special)
        opening = prompt[n_same:].lstrip()
    if opening and (_special_token(opening, special) or opening) in ending:
        raise ValueError("the template writes it in two parts")
    # Most answers. After another answer, a prompt may have no header.
    follows_question = bool(history) and history[-1]["role"] != "assistant"
    if opening and follows_question and text.startswith(prompt):
        return len(prompt)

    answer = [{"role": "assistant", "content": mark}, *messages[i + 1 :]]
    try:
        before, _ = around([*history, *answer])
    except ValueError:  # as for the result of a tool without a call
        answer = answer[:1]
        before, _ = around([*history, *answer])
    # Without a prompt, it begins where the text differs from that before the mark.
    if not opening or not history:
        start = _n_common(text, before)
        if unprompted and history:
            if not text.startswith(unprompted):
                raise ValueError("without it, the messages before it are rendered differently")
            if not before[len(unprompted) :].strip():
                start = len(unprompted)
        return start

    # Otherwise earlier answers lose their thoughts, or the prompt opens one. The header is the text
    # between the message before and the answer. The answer begins after as much of the prompt's
    # opening as the header has.
    copy = [*history[:-1], _with_mark(history[-1], history_mark)]
    before_copy, _ = around([*copy, *answer])
    texts = (before_copy, render(copy), render(copy, add_generation_prompt=True))
    header, unprompted, prompt = (x.rpartition(history_mark)[2] for x in texts)
    opening = prompt[_token_start(prompt, _n_common(prompt, unprompted), special) :].lstrip()
    n = next(n for n in range(len(opening), -1, -1) if opening[:n] in header)
    at = header.rfind(opening[:n]) if n else 0
    start = len(before) - len(header) + at
    if not text.startswith(before[:start]):
        raise ValueError("its content changes the text before it")
    n_found = _n_common(text[start:], opening)
    n = n_found if n_found == len(opening) else min(n, n_found)
    if n < len(opening):  # not within a mark that only begins like one of the prompt
        n = len(opening[: _token_start(opening, n, special)].rstrip("</["))
    if header[at + n :].strip():
        # The common part must tell an answer from a question.
        question = header
        with contextlib.suppress(ValueError):
            question, _ = around([*copy, {"role": "user", "content": mark}])
        if not n or question.rpartition(history_mark)[2].startswith(header[: at + n]):
            raise ValueError("the text before it differs from the prompt for it")
    return start + n


def _n_common(text, other):
    """The number of characters with which both texts begin."""
    return len(os.path.commonprefix([text, other]))  # noqa: RUF071


def _special_token(text, special):
    """The special token with which a text begins, or an empty text. special: their pattern."""
    found = special.match(text)
    return found[0] if found else ""


def _special_end(text, special):
    """The end of the last special token in a text; 0 without one."""
    return max((found.end() for found in special.finditer(text)), default=0)


def _token_start(text, n, special):
    """The start of the special token that text[:n] cuts, or n."""
    cut = (found.start() for found in special.finditer(text) if found.start() < n < found.end())
    return next(cut, n)


def _parsed(value):
    """A value that may be written as JSON text, parsed."""
    return _parse_json(value, repr(value[:60])) if isinstance(value, str) else value


def _ignore_outside(record, offsets, tokenizer):
    """1 for each id of a chat that is not in its spans. offsets: the first character of each id and
    the one after its last.
    """
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    # A token may span the border of an answer. But a special token that takes the space beside it
    # is where its own text is, and it is a label where it ends.
    is_special = np.isin(record["ids"], [*tokenizer["special_tokens"].values()])
    for k in np.flatnonzero(is_special).tolist():
        piece = record["text"][starts[k] : ends[k]]
        starts[k] += len(piece) - len(piece.lstrip())
        ends[k] = starts[k] + len(piece.strip())
    ignored = np.ones(len(starts), np.uint8)
    for first, last in record["spans"]:
        ignored[(ends > first) & (starts < last) & ~(is_special & (ends > last))] = 0
    return ignored


# ---- summaries

def describe(dataset):
    """A summary of a dataset in a few lines: the documents that were read and skipped, and the
    fraction of labels.
    """
    # Optional: datasets mixed by weight.
    if "mixture" in dataset:
        return _describe_mixture(dataset["mixture"])
    if dataset["seq_format"]["packing"] == "stream":
        facts = [f"{dataset['lengths'].sum():,} tokens", f"{dataset['n']:,} sequences"]
    else:
        facts = _describe_packing(dataset)  # optional: packing
    for shard in dataset["shards"]:
        if not shard["token_offset"]:  # the second part of a split has the same counts
            facts += [f"{n:,} {name}" for name, n in shard.get("counts", {}).items() if n]
    text = ", ".join(facts)
    # Optional: tokens that are not labels.
    if any("ignored" in shard for shard in dataset["shards"]):
        batch = _first_sequences(dataset)
        fraction = (batch["labels"] != IGNORE).sum() / np.count_nonzero(batch["segments"])
        text += f"\n{fraction:.1%} of the tokens are labels"
    return text


def _first_sequences(dataset):
    """The batch of the first sequences, about 2^20 tokens, always with "segments"."""
    n = min(dataset["cum_counts"][-1], 1 + 2**20 // dataset["seq_format"]["seq_len"])
    batch = read_sequences(dataset, np.arange(n))
    return {"segments": np.ones_like(batch["tokens"])} | batch


# ---- examples

N_SHOWN = 2  # examples to show
SHOWN_TOKENS = 100  # at most, on each side of the first label


def show_examples(dataset, tokenizer):
    """The first sequences with a label, each as pieces of text: [(text, whether the piece is
    labels)]. Of a sequence with several documents, the first one with a label.
    """
    examples = []
    batch = _first_sequences(dataset)
    is_label = batch["labels"] != IGNORE
    for row in np.flatnonzero(is_label.any(axis=1))[:N_SHOWN]:
        segments = batch["segments"][row]
        shown = segments == segments[np.argmax(is_label[row])]
        # The label after the last token is shown, too.
        ids = np.append(batch["tokens"][row, shown], batch["labels"][row, shown][-1])
        is_shown_label = np.append(False, is_label[row, shown])
        examples.append(_show_labels(ids[ids != IGNORE], is_shown_label[ids != IGNORE], tokenizer))
    return examples


def _show_labels(ids, is_label, tokenizer):
    """Pieces [(text, whether it is labels)] of a document, cut around the first label."""
    first_label = int(np.argmax(is_label))
    start = max(0, first_label - SHOWN_TOKENS)
    stop = min(first_label + SHOWN_TOKENS, len(ids))
    pieces = [("...", False)] if start else []
    shown = ""
    n = start
    for is_labelled, group in groupby(is_label[start:stop].tolist()):
        n += len(list(group))
        # Decode from the beginning: some tokenizers drop the space at the start of a text.
        text = tokenizer["decode"](ids[start:n])
        pieces.append((text[len(shown) :], is_labelled))
        shown = text
    if stop < len(ids):
        pieces.append(("...", False))
    return pieces


# ---- values per example

def examples_in(dataset, index, values):
    """{"id", "n_labels", "nats", "bytes": arrays} of the examples with a label in evaluation batch
    `index`. An example is a document where documents are packed, otherwise a sequence; its id is
    its index in the dataset.

    values: {"nats": the loss of each position [rows, seq_len]}. bytes: of the text of the labels; a
    bos or eos is one byte. Absent where bytes_per_token is None. Interpolated where a piece of text
    is cut, or the tokenizer has a bos.
    """
    batch_size, T = values["nats"].shape
    batch = eval_batch_at(dataset, index, batch_size)
    rows, _ = eval_examples_at(index, batch_size, dataset["n"])
    shard = dataset["shards"][0]  # the only one of a text
    # Add up the labels of each sequence, or of each span.
    is_label = batch["labels"] != IGNORE
    numbers = np.repeat(rows, is_label.sum(axis=1))
    if "spans" in shard:
        numbers = shard["row_bounds"][numbers] + batch["segments"][is_label] - 1
    ids, index_of, n_labels = np.unique(numbers, return_inverse=True, return_counts=True)
    nats = np.bincount(index_of, values["nats"][is_label])

    # The token before the first label of each.
    starts = ids * T + shard["token_offset"]
    if "spans" in shard:
        starts = shard["spans"][ids, 0]
        ids = np.searchsorted(shard["documents"][:, 0], starts, side="right") - 1
    found = {"id": ids, "n_labels": n_labels, "nats": nats}
    if "documents" in shard and "ignored" not in shard:
        # From that token to the one before the last label: around a text, both are one byte. Only
        # the points around them are read: there is one for each document of the data.
        tokens = np.stack([starts, starts + n_labels])
        after = np.searchsorted(shard["bytes_at"][:, 0], tokens, side="right")
        before, through = np.interp(tokens, *shard["bytes_at"][np.union1d(after - 1, after)].T)
        found["bytes"] = np.rint(through - before).astype(int)
    return found


# ---- prompts of samples

PREVIEW_TOKENS = 32  # tokens of the data that a sample without a prompt continues, at most


def sample_prompts(cfg, tokenizer, source=None):
    """The prompts of a config's samples: [{
        "text": its text for display,
        "ids": at least one,
        "stops": ids that end a sample}].

    They are, by the first of these fields that is set, the prompts in the file cfg.prompts, the
    question cfg.chat, or the text cfg.prompt; else the beginning of the data of `source`, if it has
    a "prompt"; else the token that begins a document.
    """
    texts = [cfg.prompt]
    if cfg.prompts:
        texts = [text for text, _ in read_prompts(cfg.prompts, tokenizer)]
    elif cfg.chat:
        with as_value_error(f"chat {cfg.chat!r:.60}", ValueError):
            texts = [chat_prompt([{"role": "user", "content": cfg.chat}], None, tokenizer)]
    prompts = [{"text": text, "ids": prompt_ids(text, tokenizer)} for text in texts]
    if texts == [""] and source and "prompt" in source:
        ids = _whole_characters(source["prompt"]().tolist(), tokenizer["decode"])
        prompts = [{"text": tokenizer["decode"](ids), "ids": ids}]
    for prompt in prompts:
        prompt["stops"] = stops_after(prompt["ids"], tokenizer)
    return prompts


def stops_after(ids, tokenizer):
    """The ids that end what follows a prompt. After a chat, which has special tokens beside those
    around a document, they include the end of a turn.
    """
    special = set(tokenizer["special_tokens"].values()) - {tokenizer["bos"], tokenizer["eos"]}
    ends = turn_ends(tokenizer) if special.intersection(ids) else set()
    return sorted(tokenizer["stops"] | ends)


def _whole_characters(ids, decode):
    """The ids without incomplete characters at both ends, which decode to U+FFFD. A character has
    at most four bytes, and a token at least one.
    """
    for _ in range(3):
        text = decode(ids)
        if len(ids) > 1 and text.endswith("\ufffd"):
            ids = ids[:-1]
        if len(ids) > 1 and text.startswith("\ufffd"):
            ids = ids[1:]
    return ids


def prompt_ids(text, tokenizer):
    """The ids of a prompt, after the token that begins a document."""
    ids = tokenizer["encode"](text).tolist() if text else []
    # A prompt that begins with a special token, as a rendered chat does, needs no other one.
    if not tokenizer["openings"].intersection(ids[:1]):
        ids = [i for i in (tokenizer["bos"], tokenizer["eos"]) if i is not None][:1] + ids
    return ids or [0]


def read_prompts(path, tokenizer, columns=()):
    """Read a file of prompts: [(text, row)]. They are its lines, without empty ones; or the rows of
    a JSON file, each with "prompt", a text, or with "messages" (and "tools"), rendered by the chat
    template up to the next answer. columns: texts NAME=COLUMN; the prompt is then made of these
    columns alone. row: as it is in the file.
    """
    file, = expand([path], field="prompts")
    prompts = []
    for where, row, _ in rows_in(file, -1):
        if where == str(file):  # all of a text file
            lines = [line.rstrip("\r") for line in row["text"].split("\n") if line.strip()]
            prompts += [(line, {"prompt": line}) for line in lines]
            continue
        named = _named_columns(row, columns, where)
        with as_value_error(where, ValueError, TypeError, AttributeError):
            unread = named or dict(row)
            if ("prompt" in unread) == ("messages" in unread):
                raise ValueError(f"must have either prompt or messages: {str(row)[:60]}")
            prompt = messages_in(unread.get("prompt") or unread.get("messages"))
            if not isinstance(prompt, str):
                messages = [*_system_messages(unread), *prompt]
                prompt = chat_prompt(messages, unread.pop("tools", None), tokenizer)
            _check_columns(unread, "prompt")
            prompts.append((prompt, row))
    if not prompts:
        raise ValueError(f"prompts {path!r}: has no prompt")
    return prompts


def chat_prompt(messages, tools, tokenizer):
    """Render a conversation up to the next answer, which a sample continues. tools: as in
    render_chat.
    """
    messages, render, text = _prepare_chat(messages, tools, tokenizer, add_generation_prompt=True)
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's; a sample would follow another")
    # Some templates have no prompt, and write the header of an answer only with the answer.
    mark = next(_numbers_not_in(text))
    if text == render(messages):
        before = render([*messages, {"role": "assistant", "content": mark}]).partition(mark)[0]
        if before.startswith(text) and before[len(text) :].strip():
            text = before
    return text


def turn_ends(tokenizer):
    """The ids that end an answer in the chat template: the special tokens after an answer at the
    end of a conversation and before another question.
    """
    template = tokenizer["chat"]()
    answer = "forty-two"
    turn = [{"role": "user", "content": "A number?"}, {"role": "assistant", "content": answer}]
    ends = []
    if template:
        with contextlib.suppress(ValueError):  # e.g. a template that needs tools
            _, *rests = template["render"](turn * 2, None).split(answer)
            ends = [_special_token(rest.lstrip(), template["special"]) for rest in rests]
    return {tokenizer["special_tokens"][end] for end in ends if end}


def preview_prompt(dataset):
    """The ids at the beginning of a sample that shows what a run has learnt: the beginning of the
    first evaluation row; for prompts and chats up to its first label.
    """
    batch = eval_batch_at(dataset, 0, 1)
    # Of several documents in a row, the first one.
    segments = batch.get("segments", np.ones_like(batch["tokens"]))
    ids, labels = batch["tokens"][segments == 1], batch["labels"][segments == 1]
    n_before = int(np.argmax(labels != IGNORE)) + 1  # ids before the first label
    if n_before == 1:  # text
        n_before = min(PREVIEW_TOKENS, len(ids) // 2)
    return ids[: max(1, n_before)]


# ---- file formats

JSON_FILES = (".json", ".jsonl", ".ndjson")
JSON_OBJECT = re.compile(r'\{\s*".*\}')  # a line with one, or so it seems


def _rows_of_format(path, columns):
    """An iterator over (where, row) of a table or a JSON file; None for a text file. columns: see
    `rows_in`.
    """
    name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    if name.endswith((".csv", ".tsv")):
        raise ValueError(f"{path}: must be .jsonl or .parquet; convert it by "
                         f"pandas.read_csv({str(path)!r}).to_parquet('rows.parquet')")
    if path.is_dir() or name.endswith((".parquet", ".arrow", ".feather")):
        return _table_rows(path, columns)
    # JSON may have any name. If most of its first lines are objects, the others are errors.
    with _open_utf8(path) as file:
        lines = list(islice(filter(None, map(str.strip, file)), 3))
    n_objects = sum(bool(JSON_OBJECT.fullmatch(line.strip("[],"))) for line in lines)
    if name.endswith(JSON_FILES) or n_objects > len(lines) / 2:
        return _json_rows(path, is_lines=not lines or JSON_OBJECT.fullmatch(lines[0]))
    return None


def _json_rows(path, is_lines):
    """Yield the rows of a JSON file: one a line; or the one value in the file, or its items if it
    is an array.
    """
    with _open_utf8(path) as file:
        if is_lines:
            for i, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path} line {i}"
                    yield where, _parse_json(line, where)
        else:
            value = _parse_json(file.read(), path)
            for i, row in enumerate(value if isinstance(value, list) else [value], 1):
                yield f"{path} row {i}", row


def _parse_json(text, where):
    try:  # not as_value_error, which is slower for each line
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where}: corrupted, or not JSON with a row a line or one array: "
                         f"{e}") from None


def _table_rows(path, columns):
    """Yield the rows of a .parquet or .arrow file, or of a folder by datasets.save_to_disk.

    Only columns that a row is read by are loaded: others may be large, or of a type that Python
    lacks.
    """
    types = require("pyarrow.types", path)
    null = require("pyarrow", path).null()
    number = 0
    # ArrowInvalid is a ValueError.
    with as_value_error(f"{path}: not a .parquet or .arrow file or a folder of datasets", OSError,
                        KeyError, ValueError, TypeError, OverflowError, NotImplementedError):
        for batch in _arrow_batches(path):
            kept = []
            for field in batch.schema:
                item = getattr(field.type, "value_type", null)  # of a list
                if is_read(field.name, columns) or (not columns and types.is_primitive(item)):
                    kept.append(field.name)
            # Without a known column, the error names those that the rows have.
            batch = batch.select(kept or batch.schema.names)
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", {
                    field.name: _without_nulls(row[field.name], field.type)
                    for field in batch.schema}


def is_read(name, columns):
    """Whether rows are read by the column `name`, whatever it holds. columns: see `rows_in`."""
    if columns:
        return name in {entry.partition("=")[2] for entry in columns}
    names = {"prompt", "chosen", "rejected", "label", *OPTIONAL_COLUMNS, *UNREAD_COLUMNS}
    return name in names.union(", ".join(FORMS).split(", ")) or "weight" in name


def _arrow_batches(path):
    """Yield the batches of a table."""
    arrow = require("pyarrow", path)
    if path.is_dir():
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        for file in state["_data_files"]:
            yield from _arrow_batches(path / file["filename"])
    elif path.name.lower().endswith(".parquet"):
        # A batch of nested rows may have 2 GiB at most.
        yield from require("pyarrow.parquet", path).ParquetFile(path).iter_batches(MOST_ROWS)
    else:
        file = arrow.memory_map(str(path))
        is_stream = file.read(6) != b"ARROW1"  # as datasets writes; the other form is feather's
        file.seek(0)
        if is_stream:
            batches = arrow.ipc.open_stream(file)
        else:
            reader = arrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            batch.validate(full=True)  # reading a corrupted one could end the process
            yield batch


def _without_nulls(value, kind=None):
    """A value without the fields of objects that are None: Arrow gives all structs of a column the
    same fields, null where a row had none. kind: its Arrow type; texts of the type JSON are parsed.
    """
    if isinstance(value, str) and getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if hasattr(kind, "item_type") and value is not None:  # of a map
        return {name: _without_nulls(x, kind.item_type) for name, x in value}
    if isinstance(value, dict):
        kinds = {field.name: field.type for field in kind or ()}
        return {name: _without_nulls(x, kinds.get(name)) for name, x in value.items()
                if x is not None}
    if isinstance(value, list):
        return [_without_nulls(x, getattr(kind, "value_type", None)) for x in value]
    return value


# ---- rows from Python

def write_rows(folder, name, rows, columns=()):
    """Write the columns of rows that are read as a .jsonl file; return its path.

    rows: dicts in an iterable, or by index. The file is named after its content, so that a resumed
    run finds the same file.
    """
    is_from_arrow = hasattr(rows, "features")  # of Hugging Face: null stands for a missing field
    if not hasattr(rows, "__iter__"):  # as datasets of PyTorch, which may have no IndexError
        rows = map(rows.__getitem__, range(len(rows)))
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        partial_file = Path(temporary, name)
        with open(partial_file, "wb") as file:
            for number, row in enumerate(rows, 1):
                with as_value_error(f"data: {name} row {number}: not a dict that JSON can hold",
                                    AttributeError, TypeError, ValueError):
                    kept = {column: x for column, x in row.items()
                            if is_read(column, columns) or (not columns and _numbers(x))}
                    if is_from_arrow:
                        kept = {column: _without_nulls(x) for column, x in kept.items()}
                    # Without a known column, the reader names those that the row has.
                    line = json.dumps(kept or row, default=_as_json).encode() + b"\n"
                digest.update(line)
                file.write(line)
        path = folder / f"{name}-{digest.hexdigest()[:16]}.jsonl"
        # An unchanged file keeps its time, which is part of its key in the token cache.
        if not path.exists():
            partial_file.replace(path)
    return str(path)


def _as_json(value):
    """The list or number in an array or scalar of Arrow, NumPy or pandas."""
    to_python = value.as_py if hasattr(value, "as_py") else value.tolist
    return _without_nulls(to_python())


# ---- tokenizers

# Names of the token that ends a document, for a tokenizer that declares none: the first known one.
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[SEP]")


def _tiktoken_tokenizer(name, eos_token):
    library = require("tiktoken", f"tokenizer {name!r}")
    # An unknown name, or files that cannot be downloaded.
    with as_value_error(f"tokenizer {name!r}", Exception):
        encoding = library.get_encoding(name.partition(":")[2])
    special_tokens = {text: encoding.encode_single_token(text)
                      for text in sorted(encoding.special_tokens_set)}
    return {
        "encode_batch": partial(encoding.encode_batch, allowed_special="all"),
        "decode": encoding.decode,
        "vocab_size": encoding.n_vocab,
        "eos": special_tokens.get(eos_token or "<|endoftext|>"),
        "special_tokens": special_tokens,
    }


def _hf_tokenizer(name, eos_token):
    """Load a tokenizer.json, or the tokenizer of a folder as transformers loads it."""
    tok, loaded = _load_hf_tokenizer(name)
    content = tok.to_str()
    if hasattr(tok.model, "dropout"):  # BPE dropout would draw at random
        tok.model.dropout = None
    tok.no_truncation()  # a tokenizer.json stores the last truncation and padding
    tok.no_padding()

    # A tokenizer that declares no end has the first known one, or none: then it can only be used
    # with token files. A model tuned on chats may end a text by several ids.
    eos_name = eos_token or (loaded and loaded.eos_token)
    known = [i for i in map(tok.token_to_id, EOS_NAMES) if i is not None][:1]
    eos = tok.token_to_id(eos_name) if eos_name else next(iter(known), None)
    generation = Path(name, "generation_config.json")
    settings = json.loads(generation.read_bytes()) if generation.is_file() else {}
    stops = {eos, *known, *np.ravel(settings.get("eos_token_id", [])).tolist()} - {None}

    # An id that it puts before a text, other than eos, is its bos.
    probe = tok.encode("a" if eos is None else tok.id_to_token(eos))
    has_bos = probe.special_tokens_mask[:1] == [1] and probe.ids[0] != eos
    bos = probe.ids[0] if has_bos else None

    # BPE without an unknown token drops what it lacks. A name that is no token makes it an error.
    if getattr(tok.model, "unk_token", "") is None:
        tok.model.unk_token = "for unknown text"

    def encoded(encode, texts):
        with as_value_error(f"tokenizer {name!r}: has no token for a part of the text", Exception):
            return encode(texts, add_special_tokens=False)

    def ids_of(texts, tokenizer=tok):
        return [encoding.ids for encoding in encoded(tokenizer.encode_batch_fast, texts)]

    @cache  # made when the first completion comes: it takes seconds for a large vocabulary
    def continuing():
        return _without_first_space(tok)

    added_tokens = tok.get_added_tokens_decoder()
    return {
        "encode_batch": ids_of,
        "encode_continuations": lambda texts: ids_of(texts, continuing()) if texts else [],
        "encode_with_offsets": partial(encoded, tok.encode_batch),
        "decode": partial(tok.decode, skip_special_tokens=False),
        "vocab_size": max(tok.get_vocab().values()) + 1,  # ids may have gaps
        "bos": bos,
        "eos": eos,
        "stops": stops,
        "special_tokens": {token.content: i for i, token in added_tokens.items()},
        "openings": {i for i, token in added_tokens.items() if token.special},
        "chat": cache(partial(_load_chat_template, loaded)),
        "key": [zlib.crc32(part) for part in
                (content.encode(), *(file.read_bytes() for file in _tokenizer_files(name)))],
    }


def _load_hf_tokenizer(name):
    """(tokenizer of the library tokenizers, object of transformers that holds it) of a folder. Of a
    tokenizer.json alone the second is None.

    transformers builds some tokenizers by the class that a folder names, and adds the tokens that
    its settings name. Programs that serve an export do the same, so these are the ids to train on.
    """
    path = Path(name, "tokenizer.json") if os.path.isdir(name) else Path(name)
    if not os.path.exists(name):
        raise ValueError(f"tokenizer {name!r}: no such file or folder; write bytes, "
                         f"tiktoken:{name} or hf://{name}")
    if not path.is_file() or path.suffix == ".model":
        raise ValueError(
            f"tokenizer {name!r}: has no tokenizer.json. Of a tokenizer.model or tekken.json make "
            "one: pip install transformers sentencepiece mistral-common; python -c \"from "
            f"transformers import AutoTokenizer as T; T.from_pretrained('{path.parent}')"
            f".save_pretrained('{path.parent}')\"")
    library = require("tokenizers", f"tokenizer {name!r}")
    # The libraries may raise any exception.
    with as_value_error(f"tokenizer {name!r}: cannot be read", Exception):
        if path == Path(name):
            return library.Tokenizer.from_file(name), None
        library = require("transformers", f"tokenizer {name!r}: a folder")
        settings = Path(name, "tokenizer_config.json")
        # Code of a folder is not run: its tokenizer.json is read instead.
        has_code = settings.is_file() and "auto_map" in json.loads(settings.read_bytes())
        reader = library.PreTrainedTokenizerFast if has_code else library.AutoTokenizer
        loaded = reader.from_pretrained(name, local_files_only=True)
        return loaded.backend_tokenizer, loaded


def _without_first_space(tok):
    """A copy of a tokenizer, without the space that it may put before a text (Metaspace).

    Completions are encoded with it, so that they keep only a space of their own.
    """
    changes = {"Prepend": {"prepend": ""}, "Metaspace": {"prepend_scheme": "never"},
               "ByteLevel": {"add_prefix_space": False}}

    def change(part):
        return part | changes.get(part.get("type"), {})

    settings = json.loads(tok.to_str(), object_hook=change)
    return type(tok).from_str(json.dumps(settings))


# Before a template that asks for today's date: the tokens of a run must be the same on each day.
FIXED_DATE = "{% macro strftime_now(form) %}01 Jan 2026{% endmacro %}\n"


def _load_chat_template(loaded):
    """The chat template of a tokenizer of transformers, or None: {
        "render": (messages, tools, add_generation_prompt=False) -> text; with marked=True [first,
            last) of the characters between its marks {% generation %}, None if it has no marks,
        "source": tools -> text of the template, without comments,
        "special": pattern of the tokenizer's special tokens}.
    """
    if not loaded or not loaded.chat_template:
        return None
    longest_first = sorted(loaded.added_tokens_encoder, key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, filter(str.strip, longest_first))) or "(?!)")
    library = require("transformers.utils.chat_template_utils", "a chat")

    def source(tools):
        return re.sub(r"(?s)\{#.*?#\}", "", loaded.get_chat_template(None, tools))

    def render(messages, tools, add_generation_prompt=False, marked=False):
        if marked and not re.search(r"\{%-?\s*generation\s*-?%\}", source(tools)):
            return None
        with as_value_error("the chat template refuses it", Exception):
            texts, spans = library.render_jinja_template(
                [messages], tools, return_assistant_tokens_mask=marked,
                chat_template=FIXED_DATE + loaded.get_chat_template(None, tools),
                add_generation_prompt=add_generation_prompt, **loaded.special_tokens_map)
        return spans[0] if marked else texts[0]

    return {"render": render, "source": source, "special": special}


def copy_tokenizer(name, folder):
    """Copy the files of a Hugging Face tokenizer into an export, so that transformers gives the ids
    that a run with it was trained on. name: as for make_tokenizer.

    Raises ValueError where transformers gives others all the same, if it is installed: for some
    model_types in config.json it builds a class of its own, whatever the folder says.
    """
    name = hub_path(name)  # optional: names on the Hub
    for file in _tokenizer_files(name):
        copied = Path(folder, file.relative_to(name))
        copied.parent.mkdir(exist_ok=True)
        shutil.copy(file, copied)
    if not (name.endswith(".json") or os.path.isdir(name)):
        return
    # Of this class, transformers reads tokenizer.json as it is.
    tok, _ = _load_hf_tokenizer(name)
    tok.save(str(Path(folder, "tokenizer.json")))
    path = Path(folder, "tokenizer_config.json")
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.pop("auto_map", None)  # code
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    with contextlib.suppress(ImportError):
        library = importlib.import_module("transformers")
        loaded = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        text = "Don't read 1234567 of\n\n 'cafe\u0301'  as\tone."
        expected = tok.encode(text, add_special_tokens=False).ids
        if loaded.encode(text, add_special_tokens=False) != expected:
            raise ValueError(f"tokenizer {name!r}: transformers reads it as "
                             f"{type(loaded).__name__} beside this config.json, with other ids; "
                             "use the tokenizer of that family, or another form of the model (of "
                             "qwen2: no --qkv_bias)")


# ---- names on the Hub

# Files of a model on the Hub that are fetched: settings, tokenizer and adapter, and on request
# weights.
HUB_SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "adapter_model.safetensors")
HUB_WEIGHTS = ("model*.safetensors",)
HUB_PARQUET = "refs%2Fconvert%2Fparquet"  # branch with the Hub's own conversion of a data set


@cache
def hub_path(name, weights=False, field="data"):
    """Fetch the files of a name on the Hub into its cache; return their local path. Another name is
    returned unchanged.

    name: hf://ORG/NAME, a model or tokenizer; hf://datasets/ORG/NAME/PATTERN, files of a data set;
    hf://datasets/ORG/NAME, the parquet files of its split for `field`. @REVISION may follow NAME. A
    PATTERN may have * and **. weights: also fetch those of a model.
    """
    if not name.startswith("hf://"):
        return name
    match = re.fullmatch(r"hf://(datasets/)?([\w.-]+/[\w.-]+)(?:@([^@/\s]+))?(?:/(.*))?", name)
    if not match:
        raise ValueError(f"{name}: a name on the Hub must be hf://ORG/NAME, hf://ORG/NAME@REVISION "
                         "or hf://datasets/ORG/NAME@REVISION/PATTERN; write / in a revision as %2F")
    is_dataset, repo, revision, path = match.groups(default="")
    library = require("huggingface_hub", name)
    if is_dataset and not path:
        return hub_path(_hub_split(library, name.rstrip("/"), repo, revision, field))
    patterns = HUB_SETTINGS + HUB_WEIGHTS if weights else HUB_SETTINGS
    if path:  # in these patterns * also matches /; a path may be a folder of datasets
        patterns = (path.replace("**/", "*"), f"{path}/*")
    kind = "dataset" if is_dataset else "model"
    with as_value_error(name, Exception):
        # The library uses its cache where it has the files, or where there is no network.
        folder = library.snapshot_download(repo, repo_type=kind, revision=unquote(revision) or None,
                                           allow_patterns=list(patterns))
    return os.path.join(folder, path)


def _hub_split(library, name, repo, revision, field):
    """The pattern of the parquet files of a split. A data set in another format has them in a
    branch of the Hub. field: chooses the split, see `expand`.
    """
    options = {"repo_type": "dataset", "revision": unquote(revision) or None}
    advice = f"{field} {name}: has no parquet files of the split; name its files, as NAME/*.jsonl"
    with as_value_error(advice, Exception):
        try:
            files = library.list_repo_files(repo, **options)
        except Exception:  # without network: the files in the cache
            folder = Path(library.snapshot_download(repo, allow_patterns=[], **options))
            files = [file.relative_to(folder).as_posix() for file in folder.rglob("*.parquet")]
    for split_name in VAL_SPLITS if field == "val_data" else ("train",):
        # FOLDER/train-00000-of-00002.parquet, FOLDER/train/0.parquet or FOLDER/train.parquet
        regex = re.compile(rf"((?:.*/)?{split_name}[-/.])[^/]*parquet")
        found = sorted({f"{name}/{x[1]}*parquet" for x in map(regex.fullmatch, files) if x})
        if len(found) > 1:
            raise ValueError(f"{field} {name}: has several configurations; name one: {found}")
        if found:
            return found[0]
    if revision:
        raise ValueError(advice)
    return _hub_split(library, f"{name}@{HUB_PARQUET}", repo, HUB_PARQUET, field)


# ---- data in buckets

def fetch_buckets(field, sets, cfg):
    """Sets of files, {name: patterns}, with local paths in place of URLs of buckets."""
    fetched = {}
    for name, patterns in sets.items():
        paths = [_fetch_objects(str(pattern), field, cfg) for pattern in patterns]
        fetched[name] = [*chain.from_iterable(paths)]
    return fetched


def _fetch_objects(url, field, cfg):
    """Fetch the objects that match into the token cache; return their paths. A local path is
    returned unchanged.

    url: gs://BUCKET/PATTERN, s3://BUCKET/PATTERN or s3://BUCKET/PATTERN?endpoint=http://HOST:PORT.
    A PATTERN may have * and **.
    """
    if not re.match("(gs|s3)://", url):
        return [url]
    address, _, endpoint = url.partition("?endpoint=")
    bucket, _, pattern = address[5:].partition("/")
    driver = "gcs" if url.startswith("gs") else "s3"
    retries = {"max_retries": 4, "initial_delay": "1s"}  # 15 s in all, as for checkpoints
    spec = {"driver": driver, "bucket": bucket, f"{driver}_request_retries": retries}
    if endpoint:
        spec["endpoint"] = endpoint
    regex = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*\*", ".*")
    regex = regex.replace(r"\*", "[^/]*")
    ts = require("tensorstore", url)
    try:
        store = ts.KvStore.open(spec).result()
        prefix = pattern.partition("*")[0]
        keys = store.list(ts.KvStore.KeyRange(prefix, f"{prefix}\U0010ffff")).result()
        names = [name for name in sorted(map(bytes.decode, keys)) if re.fullmatch(regex, name)
                 and not name.endswith("/")]  # which consoles make for a folder
        fetch = partial(_fetch_object, store, _token_cache_folder(cfg))
        with ThreadPoolExecutor(4) as pool:  # objects in memory at a time
            paths = [*tqdm(pool.map(fetch, names), url, len(names), leave=False, disable=None)]
    except (OSError, ValueError) as e:
        reason = str(e).partition(" [")[0]  # without TensorStore's spec
        raise ValueError(f"{field} {url}: cannot be fetched; check the bucket's name, and your "
                         f"credentials and right to list and read it: {reason}") from None
    if not paths or pattern.endswith("/"):
        raise ValueError(f"{field} {url}: no object matches it; name files, as in 'FOLDER/*.txt'")
    return paths


def _fetch_object(store, folder, name):
    """Fetch an object into a subfolder of `folder` that is named after its version, unless it is
    there; return its path.
    """
    def write(temporary):
        content = store.read(name).result().value
        if version_now() != version:
            raise ValueError(f"{name} changed while it was read; launch again")
        with open(temporary / path.name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def version_now():
        """The etag or generation, by a read of no bytes."""
        return store.read(name, byte_range=slice(0, 0)).result().stamp.generation

    version = version_now()
    key = json.dumps([store.spec().to_json(), name, version.hex()])
    path = Path(folder, hashlib.sha256(key.encode()).hexdigest()[:20], Path(name).name)
    _write_once(path.parent, write, lambda: path.exists() or None)
    return str(path)
