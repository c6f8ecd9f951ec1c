# SPDX-License-Identifier: Apache-2.0
"""data.py: every token is a label once an epoch, a batch depends on its number alone, and malformed
files are refused.
"""
import dataclasses
import gzip
import io
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import zlib
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import tiktoken
import tokenizers
import tqdm
import transformers
import zstandard

import config
import data
from conftest import ROOT

BYTES = data.make_tokenizer("bytes")
LENGTHS = (23, 9, 41, 17, 10)  # of shards; with sequences of 8 most end in a window that overlaps
# All tokens of these shards but the first of each, which follows nothing.
LABELS = sorted({*range(sum(LENGTHS))} - {*np.cumsum((0, *LENGTHS[:-1])).tolist()})


def shard(tokens, name="up", **more):
    return {"name": name, "tokens": tokens, "token_offset": 0} | more


def count_up(lengths=LENGTHS, **seq_format):
    """Make a dataset in which every token is its own position: labels show where they are from."""
    ends = np.cumsum(lengths)
    shards = [shard(np.arange(end - n, end, dtype=np.uint16), f"shard {i}")
              for i, (n, end) in enumerate(zip(lengths, ends))]
    return data.make_dataset(shards, seq_format)


def counted_labels(batch):
    """Return the labels that are not ignored, after a check that each follows its token."""
    on = batch["labels"] != data.IGNORE
    np.testing.assert_array_equal(batch["labels"][on], batch["tokens"][on] + 1)
    return batch["labels"][on]


def write(path, *arrays):
    path.write_bytes(b"".join(a if isinstance(a, bytes) else np.asarray(a).tobytes()
                              for a in arrays))
    return path


def header(count, magic=20240520, version=1):
    return np.array([magic, version, count] + [0] * 253, np.int32)


# ---- order

def shuffle_statistics(order, epoch_after, lags):
    """Figures of one order in which a poor shuffle differs from a random one: close neighbours,
    the largest serial correlation, distinct steps, ascents, and chi-squares over 8 x 8 cells of
    (position, value), (value, next value) and (value, value an epoch later).
    """
    n, steps = len(order), np.diff(order)
    pairs = (np.arange(n), order), (order[:-1], order[1:]), (order, epoch_after)
    cells = [np.histogram2d(*pair, bins=8, range=[[0, n]] * 2)[0] for pair in pairs]
    return [(abs(steps) <= n // 50).mean(), (steps > 0).mean(), len(np.unique(steps)),
            max(abs(np.corrcoef(order[k:], order[:-k])[0, 1]) for k in lags),
            *(((c - c.mean()) ** 2).sum() / c.mean() for c in cells)]


def test_orders_are_pinned():
    """Orders and fingerprints are these numbers, so that a later version resumes in the same order.

    Break: data.py: np.uint64(0xBF58476D1CE4E5B9) => np.uint64(0xBF58476D1CE4E5BB)
    """
    first = np.arange(4)
    assert data.permute(first, 1000, "(0, 0)").tolist() == [272, 61, 132, 417]
    assert data.permute(first, 10**12, "held out").tolist() == [
        484567096321, 782545040190, 182312056006, 877692830912]
    n = 10**6
    assert data.examples_at(0, 4, n).tolist() == [77952, 808311, 160936, 587360]
    assert data.examples_at(300_000, 4, n, seed=3).tolist() == [40816, 797734, 988420, 555836]
    assert data.eval_examples_at(2, 4, n)[0].tolist() == [564938, 723192, 45015, 119072]
    dataset = data.make_dataset([shard(np.arange(n + 1, dtype=np.uint32))])
    assert data.batch_at(dataset, 0, 4)["tokens"].tolist() == [[77952], [808311], [160936],
                                                              [587360]]
    long = np.arange(2**21 + 99, dtype=np.uint32)
    dataset = data.make_dataset([shard(long)])
    assert data.fingerprint(dataset) == "2097251 tokens in 1 shards, crc32 82a3beb6"
    assert data.IGNORE == -100  # as in Hugging Face's and PyTorch's losses


@pytest.mark.parametrize("n", [97, 1000])
def test_permute_is_as_random_as_numpy(n):
    """Over 200 seeds, statistics of orders have the mean and spread of NumPy's permutations.

    Error: with three rounds at most 2.6 standard errors and 14% of the spread; with two rounds 6.8
    and 53%, with one 430 and sevenfold.
    Break: data.py: zip(keys[::2], keys[1::2]) => zip(keys[:2:2], keys[1:2:2])
    """
    lags, n_seeds = (1, 2, 3, int(n**0.5), int(n**0.5) + 1), 200
    ours, numpys = [], []
    for seed in range(n_seeds):
        one, two = (data.permute(np.arange(n), n, f"({seed}, {epoch})") for epoch in (0, 1))
        ours.append(shuffle_statistics(one, two, lags))
        rng = np.random.default_rng(seed)
        numpys.append(shuffle_statistics(rng.permutation(n), rng.permutation(n), lags))
    ours, numpys = np.array(ours), np.array(numpys)
    standard_errors = np.std(numpys, axis=0) * (2 / n_seeds) ** 0.5
    off = (np.mean(ours, axis=0) - np.mean(numpys, axis=0)) / standard_errors
    spread = np.std(ours, axis=0) / np.std(numpys, axis=0)
    assert (abs(off) < 4).all(), off
    assert ((spread > 0.75) & (spread < 1.33)).all(), spread


@pytest.mark.parametrize("seq_len", [1, 3, 8])
def test_every_label_once_an_epoch(seq_len):
    """In an epoch every token that follows one in its shard is a label once, by another count.

    Break: data.py: labels[row, : n_repeated[row]] = IGNORE => pass
    """
    dataset, seen = count_up(seq_len=seq_len), np.zeros(sum(LENGTHS), int)
    for step in range(n := dataset["n"]):
        batch = data.batch_at(dataset, step, 1, seed=3)
        assert batch["tokens"].shape == (1, seq_len)
        assert batch["tokens"].dtype == batch["labels"].dtype == np.int32
        np.add.at(seen, counted_labels(batch), 1)
    np.testing.assert_array_equal(np.flatnonzero(seen == 1), LABELS)
    assert seen.sum() == len(LABELS)
    assert n == sum(-(-(length - 1) // seq_len) for length in LENGTHS)


@pytest.mark.parametrize("n, batch_size", [(10, 4), (7, 7), (5, 12), (257, 64), (9000, 64)])
def test_examples_come_once_an_epoch(n, batch_size):
    """Laid end to end, the rows of batches are epochs of every example once, in new orders.

    Break: data.py: epochs, ranks = np.divmod(draws, n) =>
    epochs, ranks = draws // n, 0 * draws
    """
    n_steps = -(-4 * n // batch_size)
    batches = [data.examples_at(step, batch_size, n, seed=3) for step in range(n_steps)]
    epochs = np.concatenate(batches)[: 4 * n].reshape(4, n)
    assert batches[0].dtype == np.int64
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(n), (4, 1)))
    assert len(np.unique(epochs, axis=0)) == 4
    rows = np.arange(batch_size)[::-2]
    for step in range(min(n_steps, 9)):
        some = data.examples_at(step, batch_size, n, seed=3, rows=rows)
        np.testing.assert_array_equal(some, batches[step][rows])


# ---- evaluation

def test_eval_covers_each_token_once():
    """Evaluation has every label once, in a shuffled order that no batch size changes.

    Break: data.py: batch["labels"][~valid] = IGNORE => pass
    """
    dataset = count_up(seq_len=8)
    orders = []
    for batch_size in (1, 4, 7, 100):
        n_batches = -(-dataset["n"] // batch_size)
        batches = [data.eval_batch_at(dataset, i, batch_size) for i in range(n_batches + 1)]
        assert all(batch["labels"].shape == (batch_size, 8) for batch in batches)
        assert (batches[-1]["labels"] == data.IGNORE).all()
        orders.append(np.concatenate([counted_labels(batch) for batch in batches]))
        rows = np.arange(batch_size)[::-2]
        some = data.eval_batch_at(dataset, 0, batch_size, rows=rows)
        assert all((some[name] == batches[0][name][rows]).all() for name in some)
    assert all((order == orders[0]).all() for order in orders)
    assert sorted(orders[0]) == LABELS != orders[0].tolist()


@pytest.mark.parametrize("n_val, train, val", [
    (8, (100, 200), None), (9, (100, 191), (9,)), (208, (100,), (200,)), (209, (91,), (9, 200)),
    (292, None, (100, 200))])
def test_split(n_val, train, val):
    """The last tokens are validation data; a cut that would leave no sequence of a shard moves to
    its end, and an empty side is an error.

    Break: data.py: if len(shard["tokens"]) - cut <= seq_len: =>
    if len(shard["tokens"]) - cut < seq_len:
    """
    dataset = count_up((100, 200), seq_len=8)
    if train is None or val is None:
        side = "validation" if val is None else "training"
        with pytest.raises(ValueError, match=f"leaves too little {side} data; give --val_data"):
            data.split(dataset, n_val / 300)
        return
    sides = data.split(dataset, n_val / 300)
    assert [tuple(side["lengths"].tolist()) for side in sides] == [train, val]
    tokens = [shard["tokens"] for side in sides for shard in side["shards"]]
    np.testing.assert_array_equal(np.concatenate(tokens), np.arange(300))
    assert dataset["lengths"].tolist() == [100, 200]  # as it was


# ---- readers

TOKENS = np.random.default_rng(0).integers(1, 60000, 3000)


@pytest.mark.parametrize("kind", ["uint16", "uint32", "llm.c", "llm.c 32", "npy", "npy int64"])
def test_token_files(kind, tmp_path):
    """Token files of nanoGPT, llm.c and NumPy are read as written, without a copy in memory.

    Break: data.py: tokens = np.memmap(path, dtype, "r", offset) =>
    tokens = np.memmap(path, dtype, "r", offset and 1022)
    """
    path, dtype = tmp_path / "a.bin", "uint16"
    if kind.startswith("npy"):
        np.save(path := tmp_path / "a.npy", TOKENS.astype("int64" if "int64" in kind else "uint16"))
    elif kind == "llm.c":
        write(path, header(3000), TOKENS.astype("uint16"))
    elif kind == "llm.c 32":
        write(path, header(3000, 20240801, 7), TOKENS.astype("uint32"))
    else:
        write(path, TOKENS.astype(dtype := kind))
    dataset = data.open_dataset([str(path)], BYTES, {"seq_len": 8, "vocab_size": 60000},
                               dtype=dtype)
    opened = dataset["shards"][0]
    np.testing.assert_array_equal(opened["tokens"], TOKENS)
    assert isinstance(opened["tokens"].base, np.memmap)
    assert opened["name"] == str(path) and data.bytes_per_token(dataset) is None


def test_text_and_globs(tmp_path):
    """Text files and .jsonl lines become one shard of documents between eos ids; globs are sorted.

    Break: data.py: and not len(record["ids"]): => and len(record["ids"]) > 4:
    """
    for name, text in (("b.txt", "zwei"), ("a.txt", "één"), ("deep/c.txt", "three")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "d.jsonl").write_text('{"text": "vier\\n"}\n\n{"id": 7, "text": "fünf"}\n')
    patterns = [tmp_path / name for name in ("*.txt", "**/c.txt", "d.jsonl")]
    dataset = data.open_dataset(patterns, BYTES, folder=tmp_path / "p")
    text = "\0één\0zwei\0three\0vier\n\0fünf\0".encode()
    assert [bytes(s["tokens"]) for s in dataset["shards"]] == [text]
    assert data.bytes_per_token(dataset) == 1
    assert [s["name"] for s in dataset["shards"]] == [f"{tmp_path}/a.txt and 3 more"]


def test_shortest_files(tmp_path):
    """A shard of seq_len + 1 tokens is long enough, and token files and text make one dataset.

    Break: data.py: np.where(lengths > T, => np.where(lengths > T + 1,
    """
    for n, sizes in ((2, {}), (9, {"seq_len": 8})):
        path = write(tmp_path / "a.bin", np.arange(n, dtype=np.uint16))
        assert data.open_dataset([path], BYTES, sizes)["lengths"] == [n]
    assert [part["lengths"].tolist() for part in data.split(count_up((4,)), 0.5)] == [[2], [2]]
    ints = header(50)
    ints[255] = 1  # then it is no header
    path = write(tmp_path / "b.bin", ints)
    text = write(tmp_path / "a.txt", b"text")
    dataset = data.open_dataset([text, path], BYTES, folder=tmp_path)
    assert [s["name"] for s in dataset["shards"]] == [str(path), str(text)]
    assert dataset["lengths"].tolist() == [512, 6] and data.bytes_per_token(dataset) is None


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("name, content, words", [
    ("short-empty.txt", b"", "has 1 tokens, and no sequence of 8"),
    ("short.bin", bytes(range(16)), "has 8 tokens, and no sequence of 8 with a label"),
    ("odd.bin", b"a" * 2001, "2001 bytes cannot be uint16; set --data_dtype"),
    ("wide.bin", np.arange(1, 99, dtype=np.uint32).tobytes(), "set --data_dtype to uint32"),
    ("version.bin", header(50, version=2).tobytes() + b"ab" * 50,
     "are not those of its header: magic 20240520, version 2, 50 tokens; known"),
    ("fewer.bin", header(49).tobytes() + b"ab" * 50, "magic 20240520, version 1, 49 tokens"),
    ("float.npy", npy(np.ones(99)), "has 1 dims of float64, not 1 of integers"),
    ("torn.npy", b"\x93NUMPY\x01\x00torn", "not a .npy file"),
    ("type.jsonl", b'\n{"text": ["a"]}\n', "line 2: must have one of"),
    ("", None, "name its files, as in 'FOLDER/*.txt'"),
    ("absent*.txt", None, "no such file, and no file matches it as a glob"),
    ("x.txt", b"fine\n" * 5000 + b"\xff\xfe", "cannot be read (not UTF-8, cut off, or zstd"),
    ("x.txt", b"a\0b", "has a zero byte"),
    ("x.txt.gz", gzip.compress(b"text " * 999, mtime=0)[:-20], "x.txt.gz: cannot be read"),
    ("x.parquet", b"PAR1....", "not a .parquet or .arrow file"),
    ("x.json", b'[{"text": "a"},\n {"id": 5}]', "row 2: must have one of text; prompt, completion"),
    ("x.jsonl", b'{"text": ' + b"[" * 10**5, "corrupted, or not JSON"),
])
def test_errors_name_the_file(name, content, words, tmp_path):
    """A missing, short, truncated or other file is an error with its name, line and reason.

    Break: data.py: or size != offset + n * dtype.itemsize: => :
    """
    good = write(tmp_path / "good.txt", b"a text that is long enough")
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    paths = [str(path)] if "short" in name else [str(good), str(path)]
    with pytest.raises(ValueError) as e:
        data.open_dataset(paths, BYTES, {"seq_len": 8, "vocab_size": 2**16}, folder=tmp_path / "x")
    assert str(path) in str(e.value) and words in str(e.value), str(e.value)


def test_ids_beyond_the_vocabulary(tmp_path):
    """A batch with an id outside the vocabulary is refused with the file of its row.

    Break: data.py: T + 1), np.int64) => T + 1), np.int32)
    """
    seq_format = dict(seq_len=8, vocab_size=270)
    for bad, dtype in ((270, np.uint16), (-1, np.int64), (2**32 + 5, np.int64)):
        for number in range(3):
            shards = [shard(np.full(90, 269, dtype), f"shard {i}") for i in range(3)]
            data.batch_at(data.make_dataset(shards, seq_format), 0, 36)  # the largest legal id
            shards[number]["tokens"][40] = bad
            words = rf"shard {number}: token id {bad} is not in \[0, 270\), the vocabulary of"
            with pytest.raises(ValueError, match=words):
                data.batch_at(data.make_dataset(shards, seq_format), 0, 36)
    path = write(tmp_path / "a.txt", "all is well, but é".encode())
    packed = tokenized(path, folder=tmp_path, packing="best_fit", seq_len=99, vocab_size=128)
    with pytest.raises(ValueError, match="a.txt: token id 195 is not"):
        data.batch_at(packed, 0, 1)


def test_standard_library(tmp_path):
    """The default data is Python's standard library without its tests, in a fixed order.

    Break: data.py: "site-packages", "dist-packages", "test", => "site-packages", "dist-packages",
    """
    shard, = data.open_dataset((), BYTES, {"seq_len": 1024}, folder=tmp_path)["shards"]
    paths = data._standard_library()
    assert paths == sorted(set(paths))
    texts = [text for p in paths if (text := p.read_bytes())]
    assert bytes(shard["tokens"]) == b"\0" + b"".join(t + b"\0" for t in texts)
    counts = {"documents": len(texts), "empty skipped": len(paths) - len(texts)}
    assert shard["counts"] == counts
    parts = {part for p in paths for part in p.parts}
    assert {"site-packages", "test", "tests", "idle_test"}.isdisjoint(parts)
    assert {"dataclasses.py", "decoder.py"} <= parts


# ---- tokenizers

# Of the families in test_real_data.py.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<|User|>", "<|Assistant|>", "<|tool|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "[INST]", "[/INST]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>", "[gMASK]", "<|user|>", "<|assistant|>",
    "<|system|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


def make_bpe(special_tokens=SPECIAL_TOKENS):
    """Train a byte-level tokenizer with the real library on one line."""
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    tok.train_from_iterator(["low lower lowest"] * 9, tokenizers.trainers.BpeTrainer(
        vocab_size=340, special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return tok


def small_bpe(path, *special):
    """Write a tokenizer.json that adds special ids by default, as many published ones do."""
    tok = make_bpe(special)
    tok.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{special[-1]} $A", special_tokens=[(special[-1], len(special) - 1)])
    tok.save(str(path))
    return tok


def test_tokenizer_json(tmp_path):
    """A tokenizer.json encodes as Hugging Face's library does, without truncation, padding and
    dropout; its vocabulary may have gaps, and other files of its folder do not change its key.

    Break: data.py: tok.no_truncation() => pass
    """
    file = tmp_path / "t/tokenizer.json"
    file.parent.mkdir()
    tok = small_bpe(file, "<pad>", "<|endoftext|>")
    def read(): return data.make_tokenizer(str(tmp_path / "t"))
    before, texts = read(), ["lower, één 三\n" * 9, "a"]
    assert (before["eos"], before["vocab_size"]) == (1, tok.get_vocab_size())
    assert before["decode"]([*before["encode"](texts[0]), 1]) == texts[0] + "<|endoftext|>"
    wanted = [tok.encode(text, add_special_tokens=False).ids for text in texts]
    tok.enable_truncation(4)
    tok.enable_padding(pad_id=0, pad_token="<pad>", length=8)
    tok.model.dropout = 0.9
    table = json.loads(tok.to_str())
    table["model"]["vocab"]["not merged"] = 999
    file.write_text(json.dumps(table))
    ours = read()
    assert ours["bos"] == before["bos"] and ours["vocab_size"] == 1000
    for tokenizer in (before, ours):
        assert [ids.tolist() for ids in tokenizer["encode_batch"](texts)] == wanted
    (tmp_path / "t/model.safetensors").write_bytes(b"weights")
    assert read()["key"] == ours["key"] != before["key"]


def test_tokenizer_errors(tmp_path):
    """A file that is no tokenizer, and text without a token to end it, are refused by name.

    Break: data.py: check_has_end(tokenizer, paths[0]) => pass
    """
    small_bpe(tmp_path / "endless.json", "<pad>")
    write(tmp_path / "other.json", b'{"a": 1}')
    for name, words in (("absent.json", "absent.json': no such file or folder"),
                        ("other.json", "cannot be read: expected")):
        with pytest.raises(ValueError, match=words) as e:
            data.make_tokenizer(str(tmp_path / name))
        assert name in str(e.value)
    endless = data.make_tokenizer(str(tmp_path / "endless.json"))
    (tmp_path / "a.txt").write_text("low")
    with pytest.raises(ValueError, match="endless.json': has no end-of-document token"):
        data.open_dataset([tmp_path / "a.txt"], endless, folder=tmp_path / "cache")


@pytest.mark.parametrize("at", [data.batch_at, data.eval_batch_at])
def test_segments(at):
    """With document_mask, rows have the documents and positions that a plain loop counts.

    Break: data.py: np.where(begins, columns, 0) => np.where(begins, columns, 1)
    """
    tokens = np.random.default_rng(0).integers(0, 4, 500).astype(np.uint8)
    dataset = data.make_dataset([shard(tokens, eod_id=2)], {"seq_len": 20})
    assert at(dataset, 0, 8).keys() == {"tokens", "labels"}
    dataset = data.make_dataset([shard(tokens, eod_id=2)], {"seq_len": 20, "document_mask": True})
    batch = at(dataset, 0, 8)
    for row, segments, positions in zip(batch["tokens"], batch["segments"], batch["positions"]):
        segment, position = 1, -1  # 0 is padding
        for i, token in enumerate(row):
            begins = token == 2
            segment, position = segment + begins, 0 if begins else position + 1
            assert (segments[i], positions[i]) == (segment, position)
    assert {x.dtype for x in batch.values()} == {np.dtype(np.int32)}


def test_fingerprint():
    """The fingerprint changes with each token, label, length, order and shard.

    Break: data.py: crc = zlib.crc32(shard[name][-n:].tobytes(), crc) => pass
    """
    long = np.zeros(2**20 + 99, np.uint8)
    last = long.copy()
    last[-1] = 1
    a, b = np.arange(50, dtype=np.uint16), np.arange(50, dtype=np.uint16)[::-1]
    sources = [[long], [last], [long[1:]], [a], [b], [a, b], [b, a], [a[:-1]], [a[:20], a[20:]]]
    def printed(arrays): return data.fingerprint(data.make_dataset([*map(shard, arrays)]))
    prints = [printed(s) for s in sources]
    assert len(set(prints)) == len(prints)
    assert prints == [printed([x.copy() for x in s]) for s in sources]
    masks = [{}, {"ignored": np.zeros(50, np.uint8)}, {"ignored": np.ones(50, np.uint8)}]
    assert len({data.fingerprint(data.make_dataset([shard(a) | mask])) for mask in masks}) == 3


# ---- tokenized text

def tokenized(path, *more, tokenizer=BYTES, folder, **seq_format):
    seq_format = {"seq_len": 8} | seq_format
    return data.open_dataset([str(path), *more], tokenizer, seq_format, folder=folder)


def no_encoding(texts):
    raise AssertionError("tokenized again")


@pytest.mark.parametrize("val_frac", [0.1, 0.0])
def test_val_data_is_all_validation_data(val_frac, tmp_path):
    """With val_data no training data is taken for validation; without either it is empty.

    Break: data.py: if cfg.val_frac and not val_sets: => if cfg.val_frac or not val_sets:
    """
    path, val = write(tmp_path / "a.txt", b"a" * 799), write(tmp_path / "b.txt", b"b" * 79)
    cfg = config.Config(data=(str(path),), val_data=(str(val),), val_frac=val_frac, seq_len=8,
                        batch_size=10, token_cache=str(tmp_path / "p"))
    opened = data.open_text(("train", "val"), cfg)
    assert (opened["train"]["n"], opened["val"][""]["n"]) == (100, 10)
    assert ord("a") not in opened["val"][""]["batch"](0, np.arange(10))["tokens"]
    if not val_frac:
        without = dataclasses.replace(cfg, val_data=())
        assert data.open_text(("train", "val"), without)["val"] == {}


def test_tokenizing_shows_a_bar_on_a_terminal(tmp_path, monkeypatch):
    """A terminal shows a bar from the second second on; a file or a pipe shows nothing.

    Break: data.py: bar.update(len(record["text"])) => pass
    """
    now = count()
    monkeypatch.setattr(tqdm.std, "time", lambda: float(next(now)))  # each look takes a second
    path = write(tmp_path / "a.txt", b"x" * 2**20)
    for is_terminal in (True, False):
        stream = io.StringIO()
        stream.isatty = partial(bool, is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        tokenized(path, folder=tmp_path / str(is_terminal))
        shown = stream.getvalue()
        assert ("tokenizing: 100%|" in shown and "1.05M/1.05M" in shown) == is_terminal
        assert bool(shown) == is_terminal


def test_text_is_tokenized_again_by_another_reader(tmp_path, monkeypatch):
    """Each kind of row has its tokens and labels of this READER_VERSION; another version makes them
    again.

    Break: data.py: content = [READER_VERSION] => content = []
    """
    chat_folder(tmp_path / "t")
    tokenizer = data.make_tokenizer(str(tmp_path / "t"), "<|endoftext|>")
    rows = [{"text": "low lowest"}, {"prompt": "low", "completion": "er"}, {"input_ids": [5, 6]},
            {"messages": CHAT}, {"instruction": "low", "output": "lower"}, {"text": "low"}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    shard = tokenized(path, tokenizer=tokenizer, folder=tmp_path / "p")["shards"][0]
    names = ("tokens", "ignored", "documents", "bytes_at")
    crc = zlib.crc32(b"".join(np.asarray(shard[name], np.int64).tobytes() for name in names))
    assert (data.READER_VERSION, crc) == (1, 728203582), (
        "rows give other tokens than before: raise READER_VERSION in data.py, so that tokenized "
        "data is made again, and write the new pair here")
    (folder,) = (tmp_path / "p").glob("*/")
    monkeypatch.setattr(data, "READER_VERSION", 0)
    tokenized(path, tokenizer=tokenizer, folder=tmp_path / "p")
    assert len([*(tmp_path / "p").glob("*/")]) == 2 and folder.exists()


def test_text_is_tokenized_once(tmp_path):
    """Moved files are not tokenized again; changed files and incomplete shards are.

    Break: data.py: identity.append(file.stat().st_ctime_ns) => pass
    """
    path, folder = write(tmp_path / "a.txt", b"the first text"), tmp_path / "p"
    first = bytes(tokenized(path, folder=folder)["shards"][0]["tokens"])
    asleep = BYTES | {"encode_batch": no_encoding}
    path = path.rename(tmp_path / "b.txt")
    again = tokenized(path, tokenizer=asleep, folder=folder)["shards"][0]["tokens"]
    assert bytes(again) == first == b"\0the first text\0" and isinstance(again.base, np.memmap)
    lock, = folder.glob("*.lock")
    lock.unlink()
    lock.mkdir()  # opening it to write is an error, as on a file system that is read-only
    tokenized(path, tokenizer=asleep, folder=folder)
    lock.rmdir()
    torn = next(folder.glob("*/tokens"))
    os.truncate(torn, 5)
    (torn.parent.with_suffix(".partial")).mkdir()
    with pytest.raises(AssertionError, match="tokenized again"):
        tokenized(path, tokenizer=asleep, folder=folder)
    assert [p.suffix for p in folder.iterdir()] == [".lock"]  # nothing half-made stays
    assert bytes(tokenized(path, folder=folder)["shards"][0]["tokens"]) == first
    for end in (b"y", b"z"):  # beyond the first MiB
        write(path, b"x" * 2**21, end)
        os.utime(path, (10**9, 10**9))
        shard = tokenized(path, folder=folder)["shards"][0]
        assert bytes(shard["tokens"][-2:]) == end + b"\0"


def test_the_folder_of_tokens(tmp_path, monkeypatch):
    """It is token_cache, or data in cache_dir, or data in out_dir if cache_dir is none or cannot be
    written.

    Break: data.py: home = cfg.out_dir => pass
    """
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    cases = (("t", "c", "t"), ("", "c", "c/data"), ("", "", "o/data"), ("", "file/c", "o/data"))
    for token_cache, cache_dir, wanted in cases:
        cfg = config.Config(token_cache=token_cache, cache_dir=cache_dir, out_dir="o")
        assert data._token_cache_folder(cfg) == wanted


def test_a_file_in_both(tmp_path):
    """A file in two sets of data is refused, by whatever path it is named.

    Break: data.py: field_of[path] = field => pass
    """
    path = write(tmp_path / "a.txt", b"a text that is long enough")
    cfg = config.Config(data=(str(path),), val_data=(str(tmp_path / "x" / ".." / "*.txt"),),
                        seq_len=4, out_dir=str(tmp_path), token_cache=str(tmp_path / "p"))
    (tmp_path / "x").mkdir()
    twice = {"val_data": (), "data": (f"{path}=1", f"{tmp_path}/*.txt=2")}
    for change, words in (({}, "data and val_data"), (twice, "data and data")):
        with pytest.raises(ValueError, match=f"a.txt: is in two sets, of {words}; take it out"):
            data.open_text(("train", "val"), dataclasses.replace(cfg, **change))


def test_two_processes_tokenize_the_same_text(tmp_path):
    """Of two processes that open the same text at once one tokenizes it, and both read the result.

    Break: data.py: fcntl.flock(lock, fcntl.LOCK_EX) => pass
    """
    path, folder = write(tmp_path / "a.txt", b"some words in a line\n" * 300_000), tmp_path / "p"
    code = f"""
import pathlib, sys, zlib, data
print(flush=True)
sys.stdin.readline()
folder = pathlib.Path({str(folder)!r})
dataset = data.open_dataset([{str(path)!r}], data.make_tokenizer("bytes"), folder=folder)
print(next(folder.glob("*/tokens")).stat().st_ino, zlib.crc32(dataset["shards"][0]["tokens"]))
"""
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE, text=True)
    run.stdout.readline()  # it is there
    run.stdin.write("\n")
    run.stdin.flush()
    tokens = tokenized(path, folder=folder)["shards"][0]["tokens"]
    found = f"{next(folder.glob('*/tokens')).stat().st_ino} {zlib.crc32(tokens)}\n"
    assert run.communicate(timeout=60)[0] == found and not run.returncode


def test_a_disk_that_fills(tmp_path):
    """Without room for tokenized text the error names the flag, and no partial folder stays.

    Break: data.py: into --token_cache {folder}", OSError): =>
    into --token_cache {folder}", ZeroDivisionError):
    """
    path = write(tmp_path / "a.txt", b"some words in a line\n" * 3000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ValueError, match="a.txt: cannot be tokenized into --token_cache"):
            tokenized(path, folder=tmp_path / "p")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.suffix for p in (tmp_path / "p").iterdir()] == [".lock"]


def write_rows(path, rows):
    """Write rows (dicts) as a .jsonl or .parquet file; its path."""
    if path.suffix == ".parquet":
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("split", ["ByteLevel", "cl100k", "o200k", "Metaspace"])
def test_a_long_text_is_encoded_in_pieces(split, tmp_path):
    """The ids of a long text do not depend on where it is cut into pieces.

    Break: data.py: \\S\\n(?=[^\\W_])| => \\S\\n(?=.)|
    """
    tok = small_bpe(tmp_path / "t.json", "<|endoftext|>")
    if split in ("cl100k", "o200k"):
        ends = "[\r\n]*" if split == "cl100k" else "[\r\n/]*"
        pattern = (r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+" + ends +
                   r"|\s*[\r\n]+|\s+(?!\S)|\s+")
        tok.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    elif split == "Metaspace":
        tok.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    lines = ["lower low", "  indented", "", "\n", "end. ", "ein 三。", "\t", "x = 1;",
             "lowest!\r", "// low"]
    text = "\n".join(np.random.default_rng(0).choice(lines, 400))
    merges = [text[i : i + 9] for i in range(0, 2000, 5)]  # so that ends of lines are merged too
    tok.train_from_iterator(merges, tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    tok.save(str(tmp_path / "t.json"))
    ours = data.make_tokenizer(str(tmp_path / "t.json"))
    assert (ours["piece"] == -1) == (split == "Metaspace")
    file = io.StringIO(text, newline="\n")
    pieces = [piece for piece, _ in data._text_pieces(file, min(ours["piece"], 60))]
    assert "".join(pieces) == text and (len(pieces) > 20) == (ours["piece"] > 0)
    whole = tok.encode(text, add_special_tokens=False).ids
    assert np.concatenate(ours["encode_batch"](pieces)).tolist() == whole


def test_a_long_text_has_short_pieces():
    """Windows lines, indented lines, one line and text without blanks are cut into short pieces.

    Break: data.py: |[^\\W_](?=\\s)) => )
    """
    for line in ("one line;\r\n", "\t<row id='1'/>\n", "one line ", "한국어.\n"):
        file = io.StringIO(line * 999, newline="\n")
        pieces = [piece for piece, _ in data._text_pieces(file, 100)]
        assert "".join(pieces) == line * 999 and max(map(len, pieces)) < 200


def test_a_truncated_or_corrupted_zst(tmp_path):
    """Text in one frame or two is read; truncated or corrupted, it is an error.

    Break: data.py: = require("pyarrow", path).input_stream(str(path), compression="zstd") =>
    = require("zstandard", path).open(path, "rb")
    """
    frames = zstandard.compress(b"one two\n" * 999) + zstandard.compress(b"three\n")
    path = write(tmp_path / "x.txt.zst", frames)
    whole, = tokenized(path, folder=tmp_path / "p")["shards"]
    assert bytes(whole["tokens"]) == b"\0" + b"one two\n" * 999 + b"three\n\0"
    options = zstandard.ZstdCompressionParameters(window_log=28)
    stream = zstandard.ZstdCompressor(compression_params=options).compressobj()
    long = stream.compress(b"one two\n" * 9) + stream.flush()  # as of zstd --long=28
    for bad in (long, frames[:-3], frames[:20] + b"xx" + frames[22:]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="x.txt.zst: cannot be read"):
            tokenized(path, folder=tmp_path / "p")


def test_token_files_that_cannot_be_used(tmp_path):
    """Token files are refused with document_mask without an eod_id, and with packing.

    Break: data.py: if seq_format["document_mask"] and not 0 <= eod_id =>
    if seq_format["document_mask"] and not -1 <= eod_id
    """
    np.save(tmp_path / "a.npy", np.arange(50, dtype=np.uint16))
    mask = {"document_mask": True, "vocab_size": 100}
    for eod_id in (-1, 100):
        with pytest.raises(ValueError, match=r"a.npy: with document_mask.* set --eod_id"):
            data.open_dataset([tmp_path / "a.npy"], BYTES, mask, eod_id=eod_id)
    data.open_dataset([tmp_path / "a.npy"], BYTES, mask, eod_id=0)
    with pytest.raises(ValueError, match=r"a.npy: packing best_fit needs documents"):
        data.open_dataset([tmp_path / "a.npy"], BYTES, {"packing": "best_fit"})


def test_bytes_per_token(tmp_path):
    """Bytes per token count the text itself, also where ids are not decoded to it, and in a part of
    a split those of the part.

    Break: data.py: len(text.encode()) => len(text)
    """
    tok = small_bpe(tmp_path / "t.json", "<|endoftext|>")
    tok.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFD(), tokenizers.normalizers.StripAccents()])
    tok.save(str(tmp_path / "t.json"))
    ours = data.make_tokenizer(str(tmp_path / "t.json"))
    path = tmp_path / "a.txt"
    path.write_text("l\u00f6w l\u00f6wer l\u00f6west " * 9000 + "q w e r t z u i " * 9000)
    parts = data.split(tokenized(path, tokenizer=ours, folder=tmp_path / "p"), 0.4)
    for part in parts:
        ids = part["shards"][0]["tokens"]
        text = ours["decode"](ids).replace("<|endoftext|>", "0")
        n_bytes = len(text.replace("low", "l\u00f6w").encode())
        assert np.isclose(data.bytes_per_token(part), n_bytes / len(ids), rtol=1e-3)
    assert data.bytes_per_token(parts[0]) > 1.5 * data.bytes_per_token(parts[1])


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_examples_of_a_part(packing, tmp_path):
    """In the second part of a split, ids are those of the part, and bytes those of its text.

    Break: data.py: starts = ids * T + shard["token_offset"] => starts = ids * T
    """
    make_bpe().save(str(tmp_path / "t.json"))
    ours = data.make_tokenizer(str(tmp_path / "t.json"))
    texts = ["lower low lowest " * 9] * 20 + ["q w e r t z u " * 9] * 20
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    dataset = tokenized(path, tokenizer=ours, folder=tmp_path / "p", packing=packing, seq_len=150)
    for part in data.split(dataset, 0.4):
        n = part["n"]
        found = data.examples_in(part, 0, {"nats": np.full((n + 3, 150), 0.5)})
        n_examples = n if packing == "stream" else len(part["shards"][0]["documents"])
        assert sorted(found["id"]) == [*range(n_examples)]
        assert (found["nats"] == found["n_labels"] / 2).all()
        n_bytes = found["n_labels"].sum() * data.bytes_per_token(part)
        assert found["bytes"].sum() == pytest.approx(n_bytes, rel=0.02)


def test_examples_of_token_files_and_prompts(tmp_path):
    """Sequences are numbered over all files; documents without a label have no values.

    Break: data.py: if "documents" in shard and "ignored" not in shard: => if "documents" in shard:
    """
    paths = [tmp_path / f"{name}.npy" for name in "ab"]
    for path in paths:
        np.save(path, np.arange(50, dtype=np.uint16))
    prompts = [{"prompt": "p" * n, "completion": "c" * 5} for n in (3, 40, 2)]
    path = write_rows(tmp_path / "p.jsonl", prompts)
    for dataset, ids, n_labels in (
            (data.open_dataset(paths, BYTES, {"seq_len": 20}), [*range(6)], [20, 20, 9] * 2),
            (tokenized(path, folder=tmp_path / "p", packing="none", seq_len=30), [0, 2], [6, 6])):
        T = dataset["seq_format"]["seq_len"]
        found = data.examples_in(dataset, 0, {"nats": np.ones((8, T))})
        assert found.keys() == {"id", "n_labels", "nats"}
        assert found["id"].tolist() == ids and found["n_labels"].tolist() == n_labels


@pytest.mark.parametrize("bos", [None, "<s>"])
def test_a_text_that_brings_its_ends(bos, tmp_path):
    """A begin or end token in a text, pair or row of ids is the one that the document has anyway,
    and counts as one byte. One within a text stays.

    Break: data.py: _cut_ends(record, eos if bos is None else bos, eos, is_first, tokenizer) => pass
    """
    tok = make_bpe()
    if bos:
        tok.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tok.token_to_id(bos))])
    tok.save(str(tmp_path / "tok.json"))
    tokenizer = data.make_tokenizer(str(tmp_path / "tok.json"))
    end = "<|endoftext|>"
    begin = bos or end
    assert (tokenizer["bos"], tokenizer["eos"]) == (bos and tok.token_to_id(bos), 0)

    def read(name, rows):
        dataset = tokenized(write_rows(tmp_path / name, rows), tokenizer=tokenizer, seq_len=4,
                            folder=tmp_path / "p")
        shard, = dataset["shards"]
        ignored = shard.get("ignored", np.zeros(len(shard["tokens"])))
        return shard["tokens"].tolist(), ignored.tolist(), data.bytes_per_token(dataset)

    texts = [f"low {i} of <think> lower" for i in range(9)]
    plain = read("plain.jsonl", [{"text": text} for text in texts])
    for form in (begin + "{}" + end, begin + "{}", "{}" + end):
        brought = read("brought.jsonl", [{"text": form.format(text)} for text in texts])
        assert brought[:2] == plain[:2] and np.isclose(brought[2], plain[2], rtol=1e-3), form
    pairs = [read("pair.jsonl", 3 * [{"prompt": first + "low", "completion": " lower" + last}])
             for first, last in (("", ""), (begin, end))]
    assert pairs[0][:2] == pairs[1][:2]
    # Rows of ids have as many bytes as the texts of these ids.
    frame = [tokenizer["bos"]] * bool(bos)
    ids = read("ids.jsonl", [{"input_ids": [*frame, *tok.encode(
        text, add_special_tokens=False).ids, 0]} for text in texts])
    assert np.isclose(ids[2], plain[2], rtol=1e-2)


# ---- packing

@pytest.fixture
def documents(tmp_path):
    """documents(**seq_format): 60 texts of 0 to 40 letters as a dataset; and the texts."""
    rng = np.random.default_rng(5)
    texts = ["".join(rng.choice([*"abcdefg"], n)) for n in rng.integers(0, 40, 60)]
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])

    def make(**seq_format):
        seq_format = dict(seq_len=30, packing="best_fit") | seq_format
        return tokenized(path, folder=tmp_path / "p", **seq_format)

    return make, [text for text in texts if text]


def documents_in(batch):
    """The documents of a batch, as the bytes of their tokens and labels. Each must have positions
    from 0, and lie in one piece.
    """
    found = []
    for tokens, labels, segments, positions in zip(*(
            batch[name] for name in ("tokens", "labels", "segments", "positions"))):
        assert (labels[segments == 0] == data.IGNORE).all()
        for number in range(1, segments.max() + 1):
            (at,) = np.nonzero(segments == number)
            assert positions[at].tolist() == list(range(len(at)))
            assert at.tolist() == list(range(at[0], at[0] + len(at)))
            found.append((bytes(tokens[at].tolist()), bytes(labels[at].tolist())))
    return found


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_each_document_once(packing, padding_side, truncation, documents):
    """Packed rows have each document once, with positions from 0 and padding on the set side.

    Break: data.py: column += n => column += n + 1
    """
    make, texts = documents
    dataset = make(packing=packing, padding_side=padding_side, truncation=truncation)
    batch = data.eval_batch_at(dataset, 0, dataset["n"])
    wanted = [f"\0{text}\0".encode() for text in texts]
    wanted = [text[-31:] if truncation == "keep_end" else text[:31] for text in wanted]
    pairs = sorted((text[:-1], text[1:]) for text in wanted)
    assert sorted(documents_in(batch)) == pairs
    n_used = sum(len(tokens) for tokens, _ in pairs)
    empty = batch["segments"] == 0
    assert empty.sum() == empty.size - n_used
    edge = empty[:, 0] if padding_side == "left" else empty[:, -1]
    assert (edge == (empty.sum(axis=1) > 0)).all()
    if packing == "none":
        assert dataset["n"] == len(wanted)
    else:
        assert dataset["n"] * 30 < 1.1 * n_used
    n_all = sum(len(text) + 1 for text in texts)
    cut = f" (--truncation {truncation})" if n_used < n_all else ""
    wanted = f"{n_used:,} of {n_all:,} tokens{cut}, {empty.mean():.1%} padd"
    assert wanted in data.describe(dataset)


def test_a_document_without_a_label_is_in_no_row(tmp_path):
    """A prompt so long that truncation leaves no label takes no row.

    Break: data.py: np.where(n_ignored < lengths, => np.where(n_ignored <= lengths,
    """
    rows = [{"prompt": "p" * n, "completion": "c" * 5} for n in (40, 29, 3, 30)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    for packing, n in (("none", 2), ("best_fit", 2)):
        dataset = tokenized(path, folder=tmp_path / "p", packing=packing, seq_len=30)
        batch = data.eval_batch_at(dataset, 0, dataset["n"])
        labels = batch["labels"]
        assert dataset["n"] == n and sorted((labels != data.IGNORE).sum(axis=1)) == [1, 6]
        assert data.describe(dataset).startswith("2 of 4 documents in 2 sequences")


def test_best_fit():
    """Packing puts each item into the fullest row that has room, as a plain search does.

    Break: data.py: i = bisect_left(rooms, length) => i = len(rooms) - 1
    """
    rng = np.random.default_rng(0)
    for room in (7, 64, 200):
        for n in (1, 5, 300):
            lengths = rng.integers(0, room + 1, n) if n > 1 else np.ones(room + 1, int)
            bounds, items = data.pack(lengths, room)
            assert sorted(items.tolist()) == np.flatnonzero(lengths).tolist()
            sums = np.add.reduceat(np.append(lengths[items], 0), bounds[:-1])[: len(bounds) - 1]
            rooms = []
            for length in sorted(lengths[lengths > 0].tolist(), reverse=True):
                fitting = [left for left in rooms if left >= length]
                if fitting:
                    rooms.remove(min(fitting))
                rooms.append((min(fitting) if fitting else room) - length)
            assert sorted(room - sums) == sorted(rooms)


def test_split_of_whole_documents(documents):
    """With packing, validation data is complete documents, and training has none of them.

    Break: data.py: (slice(n), slice(n, None))] => (slice(n), slice(n + 1, None))]
    """
    make, texts = documents
    parts = [data.eval_batch_at(part, 0, part["n"]) for part in data.split(make(seq_len=50), 0.3)]
    train, val = ([tokens[1:].decode() for tokens, _ in documents_in(part)] for part in parts)
    assert sorted(train + val) == sorted(texts)
    assert abs(sum(map(len, val)) / sum(map(len, texts)) - 0.3) < 0.05


def test_begin_and_end_ids(tmp_path):
    """Each document stands between its bos and eos; no label crosses to the next document.

    Break: data.py: labels[borders[borders > 0] - 1] = IGNORE => pass
    """
    tok = small_bpe(tmp_path / "t.json", "<|endoftext|>", "<s>")
    ours = data.make_tokenizer(str(tmp_path / "t.json"))
    assert (ours["bos"], ours["eos"]) == (1, 0)
    texts = ["lowest", "low low", "lower"]
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    dataset = tokenized(path, tokenizer=ours, folder=tmp_path / "p", document_mask=True, seq_len=5)
    framed = [[1, *tok.encode(text, add_special_tokens=False).ids, 0] for text in texts]
    assert dataset["shards"][0]["tokens"].tolist() == [id for ids in framed for id in ids]
    counted = []
    for i in range(dataset["n"]):
        batch = {name: x[0].tolist() for name, x in data.eval_batch_at(dataset, i, 1).items()}
        for token, label, position in zip(batch["tokens"], batch["labels"], batch["positions"]):
            counted += [label] * (label != data.IGNORE)
            assert token != 0 or label == data.IGNORE
            assert token != 1 or position == 0
    assert sorted(counted) == sorted(id for ids in framed for id in ids[1:])


# ---- chats; test_real_data.py has families of templates

CHATML = """{% for m in messages %}\
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CHAT = [{"role": "user", "content": "low"}, {"role": "assistant", "content": "lower"}]


def chat_folder(path):
    """Save a tokenizer with a chat template as transformers does; the tokenizer."""
    file = path.with_suffix(".json")
    small_bpe(file, "<|im_end|>", "<|im_start|>", "<|endoftext|>")
    library = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), eos_token="<|im_end|>", chat_template=CHATML)
    library.save_pretrained(path)
    return library


def test_documents_of_several_kinds(tmp_path):
    """Between a chat and a text is an eos that is not a label; between ids and a text, the end or
    the beginning of the text.

    Break: data.py: n = append([eos], not has_eos) => n = append([eos], False)
    """
    library = chat_folder(tmp_path / "t")
    ours = data.make_tokenizer(str(tmp_path / "t"), "<|endoftext|>")
    end = ours["eos"]
    path = write_rows(tmp_path / "a.jsonl", 2 * [{"text": "low"}, {"messages": CHAT}])
    shard, = tokenized(path, tokenizer=ours, folder=tmp_path / "p")["shards"]
    ids = library.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    text = [end, *ours["encode"]("low").tolist(), end]
    assert shard["tokens"].tolist() == [*text, *ids, *text, *ids, end]
    found = [shard["tokens"][a:b].tolist() for a, b in shard["documents"]]
    assert found == [text, ids, text, ids]
    ends = np.flatnonzero(shard["tokens"] == end)
    assert shard["ignored"][ends].tolist() == [0, 0, 1, 0, 1]

    rows = [{"text": "a", "input_ids": None}, {"input_ids": [5, 6]}, {"input_ids": [7]},
            {"text": "b"}]
    path = write_rows(tmp_path / "a.parquet", rows)
    shard, = tokenized(path, folder=tmp_path / "p", seq_len=1)["shards"]
    assert bytes(shard["tokens"]) == b"\0a\0\5\6\7\0b\0"
    found = [bytes(shard["tokens"][a:b]) for a, b in shard["documents"]]
    assert found == [b"\0a\0", b"\5\6", b"\7", b"\0b\0"]


def test_tiktoken(tmp_path, monkeypatch):
    """An encoding of tiktoken is used by its name, here one of a plugin.

    Break: data.py: "eos": special_tokens.get(eos_token or "<|endoftext|>"), => "eos": 0,
    """
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "ours.py").write_text(
        "ranks = {bytes([i]): i for i in range(256)} | {b'lo': 256, b'low': 257}\n"
        "def small():\n"
        "    return dict(name='small', pat_str=r'\\S+|\\s+', mergeable_ranks=ranks,\n"
        "                special_tokens={'<|endoftext|>': 258})\n"
        "ENCODING_CONSTRUCTORS = {'small': small}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", None)
    ours = data.make_tokenizer("tiktoken:small")
    assert ours["encode"]("low 三").tolist() == [257, 32, *"三".encode()]
    assert (ours["vocab_size"], ours["eos"], ours["decode"]([257, 258])) == (
        259, 258, "low<|endoftext|>")
    assert ours["encode"]("low<|endoftext|>low").tolist() == [257, 258, 257]
    with pytest.raises(ValueError, match="tokenizer 'tiktoken:absent': "):
        data.make_tokenizer("tiktoken:absent")


# ---- mixtures

@pytest.mark.parametrize("weights, size", [
    (("0.7", "0.3"), 10), (("0.5", "0.25", "0.25"), 4), (("1", "2", "3", "0.5"), 13)])
def test_a_mixture_is_exact(weights, size):
    """Every batch has the exact number of sequences of each dataset, each in its own epochs.

    Break: data.py: due.append((ceil((n + 1) / fraction), i)) => due.append((i, i))
    """
    shares = np.array([float(w) for w in weights]) / sum(map(float, weights))
    parts = [count_up((9 * (i + 2) + 1,), seq_len=1) for i in range(len(weights))]
    for i, part in enumerate(parts):
        part["shards"][0]["tokens"] += 1000 * i
    dataset = data.mix(parts, weights)
    n_steps = 150
    batches = [data.batch_at(dataset, step, size, seed=1)["tokens"][:, 0]
               for step in range(n_steps)]
    laid = np.concatenate(batches)
    for i, part in enumerate(parts):
        of_part = laid // 1000 == i
        assert all(abs((batch // 1000 == i).sum() - shares[i] * size) < 1e-9 for batch in batches)
        assert np.abs(np.cumsum(of_part) - shares[i] * np.arange(1, len(laid) + 1)).max() < 1
        n = part["n"]
        epochs = (laid[of_part] - 1000 * i)[: of_part.sum() // n * n].reshape(-1, n)
        assert len(epochs) > 1 and (np.sort(epochs) == np.arange(n)).all()
        assert (epochs[0] != epochs[1]).any()
    rows = np.arange(size)[::-2]
    some = data.batch_at(dataset, 7, size, seed=1, rows=rows)["tokens"][:, 0]
    np.testing.assert_array_equal(some, batches[7][rows])


def test_weights_of_a_mixture():
    """Weights that are not above 0, or that never repeat, are refused.

    Break: data.py: if min(fractions) <= 0 or n_cycle > 10**4: => if n_cycle > 10**4:
    """
    parts = [count_up(seq_len=8)] * 2
    for weights in (("0", "1"), ("0", "0"), ("0.123456789", "0.5"), ("0",)):
        with pytest.raises(ValueError, match="must be above 0 and repeat within 10,000"):
            data.mix(parts[:len(weights)], weights)


# ---- waiting

def test_prefetch_waits(monkeypatch):
    """An item that is None is made again, until it is there or the wait is stopped, and reported
    once; while the device is busy for 100 s, no wait for data counts.

    Break: data.py: while item is None and not closed.wait(0.1): => while False:
    """
    answers = {0: iter([None] * 6 + ["a"]), 1: iter(["b"])}
    reported = []
    items = data.prefetch(lambda i: next(answers[i]), 0, 2, on_late=reported.append)
    assert [item for item, _ in items] == ["a", "b"]
    assert reported == [0]
    stop = threading.Event()
    items = data.prefetch(lambda i: None, 0, 2, stopped=stop.is_set)
    threading.Timer(0.3, stop.set).start()
    assert list(items) == []

    now, gate = [0.0], threading.Event()

    def wait_until_idle():
        now[0] += 100
        gate.set()

    monkeypatch.setattr(data.time, "perf_counter", lambda: now[0])
    batches = data.prefetch(lambda i: gate.wait(60), 0, 1, wait_until_idle=wait_until_idle)
    assert [*batches] == [(True, 0.0)]
    assert now == [100]


# ---- scale

def test_maps_of_token_files(tmp_path):
    """A sparse file of 100 GB opens at once; a truncated or deleted one is an error, not a crash.

    Break: data.py: .st_size != shard["file_size"]: => .st_size < 0:
    """
    path = tmp_path / "huge.bin"
    with open(path, "wb") as file:
        file.truncate(100 * 10**9)
    code = f"""
import os, resource, data
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seq_format = {{"seq_len": 1024, "vocab_size": 50000}}
dataset = data.open_dataset([{str(path)!r}], data.make_tokenizer("bytes"), seq_format)
data.fingerprint(dataset)
for step in (0, 10**9):
    data.batch_at(dataset, step, 12)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
os.truncate({str(path)!r}, 4096)
for _ in range(2):
    try:
        [data.batch_at(dataset, i, 2) for i in range(50)]
    except (ValueError, FileNotFoundError) as e:
        print(e)
    os.path.exists({str(path)!r}) and os.remove({str(path)!r})
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                         timeout=60)
    assert run.returncode == 0, run.stderr
    grown_kib, truncated, deleted = run.stdout.splitlines()
    assert int(grown_kib) < 50 * 1024
    assert "huge.bin: its size is not 100000000000 any more" in truncated
    assert "[Errno 2] No such file" in deleted


# ---- to the devices

def test_prefetch():
    """Items come in order with the seconds waited, `depth` of them made ahead by one thread.

    Break: data.py: min(start + depth, stop) => min(start + 1, stop)
    """
    made, threads = [], set()

    def make(i):
        made.append(i)
        threads.add(threading.current_thread())
        return i * i

    items = data.prefetch(make, 3, 9)  # by default two ahead
    assert made == []
    for i in range(3, 9):
        began = time.perf_counter()
        item, waited_s = next(items)
        assert item == i * i and 0 <= waited_s <= time.perf_counter() - began
        wanted = list(range(3, min(i + 3, 9)))
        deadline = time.monotonic() + 10
        while made != wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)  # time for one more, were it asked for
        assert made == wanted
    assert list(items) == [] and made == list(range(3, 9))  # nothing beyond the end
    assert len(threads) == 1 and threading.current_thread() not in threads
    assert list(data.prefetch(make, 4, 4)) == []


def test_prefetch_closes():
    """Closing early ends the thread; an exception is raised where its item is consumed.

    Break: data.py: pool.shutdown(cancel_futures=True) => pool.shutdown(wait=False)
    """
    made, before = [], {*threading.enumerate()}

    def make(i):
        time.sleep(0.2 if i else 0)
        made.append(i)
        return i

    items = data.prefetch(make, 0, 99, depth=5)
    next(items)
    items.close()
    assert len(made) <= 2
    assert not any(t.name.startswith("data") for t in {*threading.enumerate()} - before)

    items = data.prefetch(lambda i: 12 // (3 - i), 0, 9)
    assert [next(items)[0] for _ in range(3)] == [4, 6, 12]
    with pytest.raises(ZeroDivisionError):
        next(items)


TWO_PROCESSES = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
sys.path.insert(0, sys.argv[1])
import data
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
me = jax.process_index()
devices = sorted(jax.devices(), key=lambda d: (-d.process_index, d.id))
mesh = jax.sharding.Mesh(np.reshape(devices, (4, 2)), ("rows", "seq"))
whole = {"label": np.arange(8, dtype=np.int32),
         "tokens": np.arange(64, dtype=np.int32).reshape(8, 8),
         "image": np.arange(8 * 4 * 6, dtype=np.float32).reshape(8, 4, 6)}
half, interleaved = np.arange(4, 8) - 4 * me, np.array([2, 3, 6, 7]) - 2 * me
for axes, wanted in ((("rows",), half), (("rows", "seq"), half), ((None, "seq"), np.arange(8)),
                     ((("seq", "rows"),), interleaved), ((), np.arange(8))):
    shardings = {name: NamedSharding(mesh, P(*axes[: x.ndim])) for name, x in whole.items()}
    rows = data.local_rows(shardings["tokens"], (8, 8))
    np.testing.assert_array_equal(rows, wanted)
    local = {name: x[rows] for name, x in whole.items()}
    for name, array in data.to_device(local, shardings, 8).items():
        assert array.shape == whole[name].shape and array.sharding == shardings[name]
        assert array.dtype == whole[name].dtype and len(array.addressable_shards) == 4
        for shard in array.addressable_shards:
            assert shard.data.shape == array.sharding.shard_shape(array.shape)
            np.testing.assert_array_equal(np.asarray(shard.data), whole[name][shard.index])
"""


@pytest.mark.slow
def test_to_device():
    """Each of two processes builds its part of the arrays from the rows that its devices hold, with
    rank 1 to 3 and any sharding, also if the second process holds the first rows.

    Break: data.py: for index in indices]) =>
    for index in indices][:1])
    """
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    runs = [subprocess.Popen([sys.executable, "-c", TWO_PROCESSES, str(ROOT), address, str(i)],
                             env=env, stderr=subprocess.PIPE, text=True) for i in range(2)]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
