# SPDX-License-Identifier: Apache-2.0
"""data.py: every token is a label once an epoch, a batch depends on its number alone, and malformed
files are refused.
"""
import codecs
import dataclasses
import gzip
import importlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path

import jax
import numpy as np
import pytest
import tqdm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import config
import data
from conftest import ROOT

BYTES = data.make_tokenizer("bytes")
LENGTHS = (23, 9, 41, 17, 10)  # of shards; with sequences of 8 most end in a window that overlaps


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

def test_permute_is_a_bijection():
    """A permutation of n numbers has each of them once, for every small n and some large.

    Break: data.py: out[outside] = _feistel(out[outside], n_rows, n_columns, keys) =>
    out[outside] = out[outside] % n
    """
    for n in (*range(1, 70), 255, 256, 257, 1000, 65537):
        np.testing.assert_array_equal(np.sort(data.permute(np.arange(n), n, (0, 3))), np.arange(n))


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
    """Orders are these numbers, so a run resumed with a later version continues in the same order,
    and unchanged data keeps its fingerprint.

    Break: data.py: np.uint64(0xBF58476D1CE4E5B9) => np.uint64(0xBF58476D1CE4E5BB)
    """
    first = np.arange(4)
    assert data.permute(first, 1000, (0, 0)).tolist() == [272, 61, 132, 417]
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
    """Over 200 seeds, statistics of the order have the mean and the spread that they have for
    NumPy's permutations. The lags hold the side of the network's grid, where poor rounds show.

    Error: with three rounds at most 2.6 standard errors and 14% of the spread; with two rounds 6.8
    and 53%, with one 430 and sevenfold.
    Break: data.py: zip(keys[::2], keys[1::2]) => zip(keys[:2:2], keys[1:2:2])
    """
    lags, n_seeds = (1, 2, 3, int(n**0.5), int(n**0.5) + 1), 200
    ours, numpys = [], []
    for seed in range(n_seeds):
        one, two = (data.permute(np.arange(n), n, (seed, epoch)) for epoch in (0, 1))
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
    """Over an epoch every token that has one before it in its shard is a label exactly once, by an
    independent count.

    Break: data.py: labels[row, : n_repeated[row]] = IGNORE => pass
    """
    dataset, seen = count_up(seq_len=seq_len), np.zeros(sum(LENGTHS), int)
    for step in range(n := dataset["n"]):
        batch = data.batch_at(dataset, step, 1, seed=3)
        assert batch["tokens"].shape == (1, seq_len)
        assert batch["tokens"].dtype == batch["labels"].dtype == np.int32
        np.add.at(seen, counted_labels(batch), 1)
    wanted = np.ones(sum(LENGTHS), int)
    wanted[np.cumsum((0, *LENGTHS[:-1]))] = 0  # the first of a shard follows nothing
    np.testing.assert_array_equal(seen, wanted)
    assert n == sum(-(-(length - 1) // seq_len) for length in LENGTHS)


@pytest.mark.parametrize("at", [data.batch_at, data.eval_batch_at])
def test_rows_of_hosts(at):
    """Hosts that each build some of the rows together build the batch that one host builds.

    Break: data.py: return step * batch_size + rows.astype(np.int64) =>
    return step * batch_size + np.arange(len(rows))
    """
    dataset = count_up(seq_len=8)
    for step in (0, 2, 3):
        whole = at(dataset, step, 8)
        for rows in (np.arange(4, 8), np.arange(8)[::-1], np.arange(1, 8, 2)):
            part = at(dataset, step, 8, rows=rows)
            assert all((part[k] == whole[k][rows]).all() for k in whole)


@pytest.mark.parametrize("n, batch_size", [(10, 4), (7, 7), (5, 12), (9000, 64)])
def test_examples_come_once_an_epoch(n, batch_size):
    """Laid end to end, the rows of batches are epochs of every example once, in new orders, also if
    an epoch is smaller than a batch. A selection of rows is the same.

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

def test_evaluation_has_each_example_once():
    """The examples that count are every example once, in a shuffled order that no batch size
    changes. A selection of rows is the same.

    Break: data.py: np.array(examples, np.int64), draws < n =>
    np.array(examples, np.int64), draws <= n
    """
    orders = []
    for batch_size in (1, 7, 50, 64):
        batches = [data.eval_examples_at(i, batch_size, 50) for i in range(50 // batch_size + 1)]
        examples, valid = map(np.concatenate, zip(*batches))
        assert ((examples >= 0) & (examples < 50)).all() and valid.sum() == 50
        orders.append(examples[valid])
        some = data.eval_examples_at(0, batch_size, 50, rows=np.arange(batch_size)[::-2])
        for part, whole in zip(some, batches[0]):
            np.testing.assert_array_equal(part, whole[::-2])
    assert sorted(orders[0]) == list(range(50)) != orders[0].tolist()
    assert all((order == orders[0]).all() for order in orders)


@pytest.mark.parametrize("batch_size", [1, 4, 7, 100])
def test_eval_covers_each_token_once(batch_size):
    """Evaluation counts every validation label once at any batch size, and no label past the end.

    Break: data.py: batch["labels"][~valid] = IGNORE => pass
    """
    dataset = count_up(seq_len=8)
    n_batches = -(-dataset["n"] // batch_size)
    batches = [data.eval_batch_at(dataset, i, batch_size) for i in range(n_batches + 1)]
    assert all(b["labels"].shape == (batch_size, 8) for b in batches)
    assert (batches[-1]["labels"] == data.IGNORE).all()
    labels = np.concatenate([counted_labels(b) for b in batches])
    firsts = np.cumsum((0, *LENGTHS[:-1]))
    np.testing.assert_array_equal(np.sort(labels), np.setdiff1d(np.arange(sum(LENGTHS)), firsts))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_split(share):
    """The last fraction of the tokens is validation data. Both sides laid end to end are the data.

    Break: data.py: second[name] = shard[name][cut:] =>
    second[name] = shard[name][max(cut - 1, 0) :]
    """
    dataset = count_up((400, 90, 300, 210), seq_len=8)
    train, val = data.split(dataset, share)
    both = [s["tokens"] for s in train["shards"] + val["shards"]]
    np.testing.assert_array_equal(np.concatenate(both), np.arange(1000))
    assert abs(sum(val["lengths"]) - 1000 * share) <= 8
    assert dataset["lengths"].tolist() == [400, 90, 300, 210]  # as it was


@pytest.mark.parametrize("n_val, train, val", [
    (8, (100, 200), None), (9, (100, 191), (9,)), (191, (100, 9), (191,)), (192, (100,), (200,)),
    (208, (100,), (200,)), (209, (91,), (9, 200)), (291, (9,), (91, 200)), (292, None, (100, 200)),
])
def test_split_leaves_no_short_part(n_val, train, val):
    """A cut that would leave fewer than seq_len + 1 tokens of a shard moves to the shard's end. A
    side without a sequence is an error that names the flags to change.

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


# ---- readers

TOKENS = np.random.default_rng(0).integers(1, 60000, 3000)


@pytest.mark.parametrize("kind", ["uint16", "uint32", "llm.c", "llm.c 32", "npy", "npy int64"])
def test_token_files(kind, tmp_path):
    """Token files of nanoGPT, llm.c and NumPy are read as they were written, without a copy in
    memory.

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
    """Text files and the texts of .jsonl lines become one shard of documents, each between two eos
    ids. Globs are sorted.

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


def test_an_existing_name_is_not_a_glob_and_counts_once(tmp_path):
    """The name of an existing file with brackets is not a glob. A file that two patterns match is
    read once.

    Break: data.py: paths[os.path.realpath(name)] = => paths[name] =
    """
    for name in ("d1.txt", "d[1].txt"):
        (tmp_path / name).write_text(name)
    assert data.expand([tmp_path / "d[1].txt"]) == [tmp_path / "d[1].txt"]
    every = [tmp_path / "d1.txt", tmp_path / "d[1].txt"]
    (tmp_path / "link.txt").symlink_to("d1.txt")
    assert {*data.expand([tmp_path / "*.txt", *every])} == {*every}


def test_shortest_files(tmp_path):
    """A shard of seq_len + 1 tokens is long enough: by default 2. A file whose start resembles a
    header but for one number is tokens. Token files and text make one dataset: a shard for each
    token file, and one for all text.

    Break: data.py: np.where(lengths > T, => np.where(lengths > T + 1,
    """
    for n, sizes in ((2, {}), (9, {"seq_len": 8})):
        path = write(tmp_path / "a.bin", np.arange(n, dtype=np.uint16))
        assert data.open_dataset([path], BYTES, sizes)["lengths"] == [n]
    assert [part["lengths"].tolist() for part in data.split(count_up((4,)), 0.5)] == [[2], [2]]
    for place, value, dtype, n in ((3, 1, "uint16", 512), (255, 1, "uint16", 512),
                                   (0, 0, "uint32", 256)):
        ints = header(50)
        ints[place] = value
        path = write(tmp_path / "b.bin", ints)
        assert data.open_dataset([path], BYTES, dtype=dtype)["lengths"] == [n]
    text = write(tmp_path / "a.txt", b"text")
    dataset = data.open_dataset([text, path], BYTES, folder=tmp_path, dtype=dtype)
    assert [s["name"] for s in dataset["shards"]] == [str(path), str(text)]
    assert dataset["lengths"].tolist() == [256, 6] and data.bytes_per_token(dataset) is None


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("name, content, words", [
    ("short-empty.txt", b"", "has 1 tokens, and no sequence of 8"),
    ("short.bin", bytes(range(16)), "has 8 tokens, and no sequence of 8 with a label"),
    ("empty.bin", b"", "0 bytes cannot be uint16"),
    ("odd.bin", b"a" * 2001, "2001 bytes cannot be uint16; set --data_dtype"),
    ("wide.bin", np.arange(1, 99, dtype=np.uint32).tobytes(), "set --data_dtype to uint32"),
    ("version.bin", header(50, version=2).tobytes() + b"ab" * 50,
     "are not those of its header: magic 20240520, version 2, 50 tokens; known"),
    ("fewer.bin", header(49).tobytes() + b"ab" * 50, "magic 20240520, version 1, 49 tokens"),
    ("float.npy", npy(np.ones(99)), "has 1 dims of float64, not 1 of integers"),
    ("flat.npy", npy(np.ones((9, 99), int)), "has 2 dims of int64"),
    ("torn.npy", b"\x93NUMPY\x01\x00torn", "not a .npy file"),
    ("line.jsonl", b'{"text": "fine, and long enough"}\n{"text": \n',
     "line 2: corrupted, or not JSON"),
    ("type.jsonl", b'\n{"text": 5}\n', "line 2: must have one of"),
    ("list.jsonl", b'["text"]\n', "row 1: 'text' is not an object"),
    ("", None, "name the files, as in 'FOLDER/*.txt'"),
    ("absent*.txt", None, "no such file, and no file matches it as a glob"),
    ("x.txt", b"fine\n" * 5000 + b"\xff\xfe", r"not UTF-8 at b'fine\nfine\nfine\nfine\n\xff'"),
    ("x.txt", b"a\0b", "has a zero byte"),
    ("x.jsonl", b'{"text": "a"}\n{"text": "cut \\ud83d"}\n',
     "line 2: has a zero byte or a lone surrogate"),
    ("x.txt.gz", gzip.compress(b"text " * 999, mtime=0)[:-20], "x.txt.gz: cannot be read"),
    ("x.parquet", b"PAR1....", "not a .parquet or .arrow file"),
    ("x.jsonl", b'{"text": null, "id": 5}\n', "has text (NoneType), id (int)"),
    ("x.json", b'[{"text": "a"},\n {"id": 5}]', "row 2: must have one of text; prompt, completion"),
    ("x.json", b'{"text":\n "a}', "corrupted, or not JSON"),
    ("x.jsonl", b'{"text": ' + b"[" * 10**5, "corrupted, or not JSON"),
    ("x.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}\n',
     "line 1: messages need a chat template"),
])
def test_errors_name_the_file(name, content, words, tmp_path):
    """A file that is missing, short, truncated or of another kind is a ValueError that names it,
    the line and the reason.

    Break: data.py: or size != offset + n * dtype.itemsize: => :
    """
    if "parquet" in name:
        pytest.importorskip("pyarrow")
    good = write(tmp_path / "good.txt", b"a text that is long enough")
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    paths = [str(path)] if "short" in name else [str(good), str(path)]
    with pytest.raises(ValueError) as e:
        data.open_dataset(paths, BYTES, {"seq_len": 8, "vocab_size": 2**16}, folder=tmp_path / "x")
    assert str(path) in str(e.value) and words in str(e.value), str(e.value)


def test_ids_beyond_the_vocabulary(tmp_path):
    """An id outside the vocabulary is refused with its file. The largest legal id passes.

    Break: data.py: rows.max() < vocab_size): => rows.max() <= vocab_size):
    """
    np.save(tmp_path / "good.npy", np.full(50, 3))
    for ids, size, bad in ((np.full(50, 255, np.uint8), 255, 255), (np.arange(5000), 4999, 4999),
                           (np.arange(-1, 50), 0, -1)):
        np.save(tmp_path / "bad.npy", ids)
        words = rf"bad.npy: token id {bad} is not in \[0, {size or 100}\), the vocabulary of"
        paths = [tmp_path / "*.npy"]
        dataset = data.open_dataset(paths, BYTES, {"vocab_size": size or 100})
        with pytest.raises(ValueError, match=words):
            data.batch_at(dataset, 0, dataset["n"])
        if size:
            dataset = data.open_dataset(paths, BYTES, {"vocab_size": size + 1})
            data.batch_at(dataset, 0, dataset["n"])


def test_ids_beyond_the_vocabulary_in_a_batch(tmp_path):
    """A batch with an id outside the vocabulary is refused with the file of its row, whichever row
    it is, also if the id does not fit into 32 bits, and in packed rows.

    Break: data.py: T + 1), np.int64) => T + 1), np.int32)
    """
    seq_format = dict(seq_len=8, vocab_size=270)
    for number in range(3):
        dataset = count_up((90, 90, 90), **seq_format)
        dataset["shards"][number]["tokens"][40] = 999
        with pytest.raises(ValueError, match=f"shard {number}: token id 999"):
            data.batch_at(dataset, 0, 36)
    wide = data.make_dataset([shard(np.full(90, 2**32 + 5), "wide")], seq_format)
    with pytest.raises(ValueError, match="wide: token id 4294967301"):
        data.batch_at(wide, 0, 36)
    path = write(tmp_path / "a.txt", "all is well, but é".encode())
    packed = tokenized(path, folder=tmp_path, packing="best_fit", seq_len=99, vocab_size=128)
    with pytest.raises(ValueError, match="a.txt: token id 195 is not"):
        data.batch_at(packed, 0, 1)


def test_standard_library(tmp_path):
    """The default data is Python's standard library without its tests: its files, in a fixed order.

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

def test_bytes_tokenizer():
    """Any text is restored from its bytes. Ids above 255, which a larger vocabulary may sample, are
    shown as numbers.

    Break: data.py: text.encode(), np.uint8) => text.encode("utf-16"), np.uint8)
    """
    text = "één 三 \0\n"
    assert BYTES["encode"](text).tolist() == list(text.encode())
    assert BYTES["decode"](BYTES["encode"](text)) == text
    assert BYTES["decode"]([104, 105, 256, 300, 195, 169]) == "hi<256><300>é"
    assert (BYTES["vocab_size"], BYTES["eos"]) == (256, 0)


def small_bpe(path, *special):
    """Train a tokenizer with the real library on one line, and write its tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(["low lower lowest"] * 9, trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    # As many published tokenizers do, this one adds special ids by default.
    tok.post_processor = processors.TemplateProcessing(
        single=f"{special[-1]} $A", special_tokens=[(special[-1], len(special) - 1)])
    tok.save(str(path))
    return tok


def test_tokenizer_json(tmp_path):
    """A tokenizer.json encodes as Hugging Face's library does. Text becomes documents between its
    end-of-document ids.

    Break: data.py: and last_kind in ("", "ids"): => and last_kind == "ids":
    """
    pytest.importorskip("tokenizers")
    tok = small_bpe(tmp_path / "t.json", "<pad>", "<|endoftext|>")
    ours, text = data.make_tokenizer(str(tmp_path / "t.json")), "lower, één 三\n"
    assert ours["decode"](ours["encode"](text)) == text
    assert ours["decode"]([1]) == "<|endoftext|>"
    def encode(text): return tok.encode(text, add_special_tokens=False).ids
    assert ours["encode"](text).tolist() == encode(text)
    assert (ours["eos"], ours["vocab_size"]) == (1, tok.get_vocab_size())
    lines = [json.dumps({"text": t}) + "\n" for t in ("lowest", text)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    seq_format = {"vocab_size": ours["vocab_size"]}
    dataset = data.open_dataset([tmp_path / "a.jsonl"], ours, seq_format, folder=tmp_path)
    wanted = [1, *encode("lowest"), 1, *encode(text), 1]
    assert dataset["shards"][0]["tokens"].tolist() == wanted
    n_bytes = len(("lowest" + text).encode()) + 3  # an end counts as one
    assert data.bytes_per_token(dataset) == n_bytes / len(wanted)


def test_truncation_and_padding_of_a_tokenizer_are_off(tmp_path):
    """Texts are neither truncated nor padded, even if tokenizer.json was saved after a call that
    did both. In its folder only the tokenizer's files decide about its key.

    Break: data.py: tok.no_truncation() => pass
    """
    pytest.importorskip("tokenizers")
    (tmp_path / "t").mkdir()
    tok = small_bpe(tmp_path / "t/tokenizer.json", "<|endoftext|>", "<pad>")
    def read(): return data.make_tokenizer(str(tmp_path / "t"))
    before = read()
    tok.enable_truncation(4)
    tok.enable_padding(pad_id=1, pad_token="<pad>", length=8)
    tok.save(str(tmp_path / "t/tokenizer.json"))
    texts, ours = ["lower lowest low", "a"], read()
    assert ours["bos"] == before["bos"]
    for found, wanted in zip(ours["encode_batch"](texts), before["encode_batch"](texts)):
        assert found.tolist() == wanted.tolist()
    (tmp_path / "t/model.safetensors").write_bytes(b"weights")
    assert read()["key"] == ours["key"] != before["key"]


def test_tokenizer_errors(tmp_path):
    """A tokenizer is refused by name if it is not a file, not a tokenizer.json, or has an invalid
    tokenizer_config.json; one without an end-of-document token is refused for text.

    Break: data.py: check_has_end(tokenizer, texts[0]) => pass
    """
    pytest.importorskip("tokenizers")
    small_bpe(tmp_path / "endless.json", "<pad>")
    write(tmp_path / "other.json", b'{"a": 1}')
    for name, words in (("absent.json", "absent.json': has no tokenizer.json"),
                        ("other.json", "cannot be read: expected")):
        with pytest.raises(ValueError, match=words) as e:
            data.make_tokenizer(str(tmp_path / name))
        assert name in str(e.value)
    endless = data.make_tokenizer(str(tmp_path / "endless.json"))
    (tmp_path / "a.txt").write_text("low")
    with pytest.raises(ValueError, match="endless.json': has no end-of-document token"):
        data.open_dataset([tmp_path / "a.txt"], endless, folder=tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    small_bpe(tmp_path / "folder/tokenizer.json", "</s>")
    write(tmp_path / "folder/tokenizer_config.json", b'{"eos_token": ')
    with pytest.raises(ValueError, match="folder.: cannot be read: Expecting value"):
        data.make_tokenizer(str(tmp_path / "folder"))


def test_a_vocabulary_with_gaps(tmp_path):
    """The vocabulary ends after the highest id, however many tokens it has.

    Break: data.py: max(tok.get_vocab().values()) + 1 => tok.get_vocab_size()
    """
    pytest.importorskip("tokenizers")
    small_bpe(tmp_path / "t.json", "</s>")
    table = json.loads((tmp_path / "t.json").read_text())
    table["model"]["vocab"]["low"] = 999
    (tmp_path / "t.json").write_text(json.dumps(table))
    ours = data.make_tokenizer(str(tmp_path / "t.json"))
    assert ours["encode"]("low").tolist() == [999] and ours["vocab_size"] == 1000


@pytest.mark.parametrize("at", [data.batch_at, data.eval_batch_at])
def test_segments(at):
    """With document_mask, rows have the number of documents begun so far and the positions within
    each, as a plain loop counts them; without it, neither.

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
    """The fingerprint is the same for the same data, and another for another token, label, length,
    order or shard.

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
    """With val_data no training data is taken for validation, whatever val_frac is. With neither
    there is no validation data.

    Break: data.py: if cfg.val_frac and not val: => if cfg.val_frac or not val:
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
    """From the second second on a terminal shows a bar with the fraction that is done. A file or a
    pipe shows nothing.

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
    """After a change of the code that reads a format, its files are tokenized again.

    Break: data.py: json.dumps([*code, => json.dumps([
    """
    path = write(tmp_path / "a.txt", b"a text that is long enough")
    tokenized(path, folder=tmp_path / "p")
    source = Path(data.__file__).read_text(encoding="utf-8")
    line = 'yield str(path), {"text": text}, is_last'
    assert source.count(line) == 1
    edited_line = line.replace("text}", "text.upper()}")
    (tmp_path / "edited.py").write_text(source.replace(line, edited_line))
    monkeypatch.syspath_prepend(tmp_path)
    edited = importlib.import_module("edited")
    shard = edited.open_dataset([path], BYTES, folder=tmp_path / "p")["shards"][0]
    assert bytes(shard["tokens"]) == b"\0A TEXT THAT IS LONG ENOUGH\0"


def test_a_change_beyond_the_first_mebibyte_is_noticed(tmp_path):
    """A file with other content beyond its first MiB is tokenized again, though its size and its
    time of modification are the same.

    Break: data.py: identity.append(file.stat().st_ctime_ns) => pass
    """
    path = write(tmp_path / "a.txt", b"x" * 2**21)
    for end in (b"y", b"z"):
        path.write_bytes(path.read_bytes()[:-1] + end)
        os.utime(path, (10**9, 10**9))
        shard = tokenized(path, folder=tmp_path / "p")["shards"][0]
        assert bytes(shard["tokens"][-2:]) == end + b"\0"


def test_text_is_tokenized_once(tmp_path):
    """The same files are not tokenized again, even if they were moved. Changed files are, and so is
    an incomplete shard. A shard can be read where nothing can be written.

    Break: data.py: if shard is None: => if True:
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
    write(path, b"the other text")
    assert bytes(tokenized(path, folder=folder)["shards"][0]["tokens"]) == b"\0the other text\0"


def test_the_folder_of_tokens():
    """It is token_cache, or data in cache_dir, or data in out_dir if cache_dir is empty.

    Break: data.py: home = os.path.expanduser(cfg.cache_dir) or cfg.out_dir =>
    home = cfg.out_dir
    """
    cases = (("t", "c", "t"), ("", "c", "c/data"), ("", "", "o/data"))
    for token_cache, cache_dir, wanted in cases:
        cfg = config.Config(token_cache=token_cache, cache_dir=cache_dir, out_dir="o")
        assert data._token_cache_folder(cfg) == wanted


def test_a_file_in_both(tmp_path):
    """A file that is both training and validation data, or in two datasets of a mixture, is
    refused, by whatever path it is named.

    Break: data.py: {f"data {name}".strip(): files => {"data": files
    """
    path = write(tmp_path / "a.txt", b"a text that is long enough")
    cfg = config.Config(data=(str(path),), val_data=(str(tmp_path / "x" / ".." / "*.txt"),),
                        seq_len=4, out_dir=str(tmp_path), token_cache=str(tmp_path / "p"))
    (tmp_path / "x").mkdir()
    mixed = {"data": (f"{path}=1",)}
    twice = {"val_data": (), "data": (f"{path}=1", f"{tmp_path}/*.txt=2")}
    for change, words in (({}, "data and val_data"), (mixed, "data .*a.txt and val_data"),
                          (twice, r"data .*a.txt and data .*\*.txt; take it out of one")):
        with pytest.raises(ValueError, match=f"a.txt: is in both {words}"):
            data.open_text(("train", "val"), dataclasses.replace(cfg, **change))


def test_two_processes_tokenize_the_same_text(tmp_path):
    """Of three processes that open the same text at once one tokenizes it, and all read the result.

    Break: data.py: fcntl.flock(lock, fcntl.LOCK_EX) => pass
    """
    path = write(tmp_path / "a.txt", b"some words in a line\n" * 300_000)
    code = f"""
import os, pathlib, sys, time, zlib, data
print(flush=True)
sys.stdin.readline()
folder = pathlib.Path({str(tmp_path / "p")!r})
dataset = data.open_dataset([{str(path)!r}], data.make_tokenizer("bytes"), folder=folder)
tokens = dataset["shards"][0]["tokens"]
print(os.stat(next(folder.glob("*/tokens"))).st_ino, zlib.crc32(tokens))
"""
    runs = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for run in runs:
        run.stdout.readline()  # all are there
    for run in runs:
        run.stdin.write("\n")
        run.stdin.flush()
    one, *others = [run.communicate(timeout=60)[0] for run in runs]
    assert one.split() and others == [one, one] and not any(run.returncode for run in runs)


def test_a_disk_that_fills(tmp_path):
    """If there is no room for tokenized text the error names the folder and the flag, and no
    partial folder stays. The limit is the system's, on the size of files.

    Break: data.py: choose another folder with --token_cache", OSError): =>
    choose another folder with --token_cache", ZeroDivisionError):
    """
    path = write(tmp_path / "a.txt", b"some words in a line\n" * 3000)
    code = f"""
import resource, signal, data
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    data.open_dataset([{str(path)!r}], data.make_tokenizer("bytes"), folder={str(tmp_path / "p")!r})
except ValueError as e:
    print(e)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "a.txt: cannot be tokenized into" in run.stdout, run.stdout + run.stderr
    assert "choose another folder with --token_cache" in run.stdout
    assert [p.suffix for p in (tmp_path / "p").iterdir()] == [".lock"]


def rows_as(kind, path, rows):
    """Write rows (dicts) as a file or folder of this kind; its path."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = path / f"a.{kind}"
    if kind == "jsonl":
        return write(file, lines)
    if kind == "json":
        return write(file, json.dumps(rows, indent=2).encode())
    if kind == "jsonl.gz":
        return write(file, gzip.compress(lines))
    if kind == "jsonl.zst":
        return write(file, pytest.importorskip("zstandard").compress(lines))
    arrow = pytest.importorskip("pyarrow")
    if kind == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), file)
        return file
    (path / "folder").mkdir()  # as datasets.save_to_disk does, in two files
    names = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
    for name, part in zip(names, (rows[:1], rows[1:])):
        table = arrow.Table.from_pylist(part)
        with arrow.ipc.new_stream(path / "folder" / name["filename"], table.schema) as stream:
            stream.write_table(table)
    (path / "folder" / "state.json").write_text(json.dumps({"_data_files": names}))
    return path / "folder"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "json", "parquet", "folder"])
def test_rows_of_every_format(kind, tmp_path):
    """Rows with a text, or with a prompt and a completion, read the same from every format. Labels
    are the completions only.

    Break: data.py: np.repeat([1, 0], => np.repeat([0, 0],
    """
    rows = [{"text": "one text"}, {"text": ""}, {"text": "zwei\nlines"}]
    shard = tokenized(rows_as(kind, tmp_path, rows), folder=tmp_path / "p")["shards"][0]
    assert bytes(shard["tokens"]) == b"\0one text\0zwei\nlines\0"
    assert shard["documents"].tolist() == [[0, 10], [9, 21]]
    assert shard["counts"] == {"documents": 2, "empty skipped": 1}
    (other := tmp_path / "pairs").mkdir()
    pairs = [{"prompt": "2 + 2 = ", "completion": "4"}, {"prompt": "3 + 3 = ", "completion": "6"}]
    path = rows_as(kind, other, pairs)
    dataset = tokenized(path, folder=tmp_path / "p", seq_len=9, packing="none")
    batch = data.eval_batch_at(dataset, 0, 2)
    assert {*map(bytes, batch["tokens"].tolist())} == {b"\x002 + 2 = ", b"\x003 + 3 = "}
    assert (batch["labels"][:, :-1] == data.IGNORE).all()
    assert sorted(batch["labels"][:, -1]) == [*b"46"]
    batch = data.eval_batch_at(tokenized(path, folder=tmp_path / "p", seq_len=20), 0, 1)
    labels = batch["labels"][batch["labels"] != data.IGNORE]
    assert bytes(labels.tolist()) == b"4\x006\0"


@pytest.mark.parametrize("split", ["ByteLevel", "cl100k", "o200k", "Metaspace"])
def test_a_long_text_is_encoded_in_pieces(split, tmp_path):
    """The ids of a long text do not depend on where it is cut into pieces. A tokenizer for which
    they would encodes each text in one piece.

    Break: data.py: \\S\\n(?=[^\\W_])") => \\S\\n(?=.)")
    """
    tokenizers = pytest.importorskip("tokenizers")
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
    """Lines that end as on Windows, indented lines, a single line and one without blanks: each is
    cut into short pieces.

    Break: data.py: or word_end.match(text, n_searched) => or None
    """
    for line in ("one line;\r\n", "\t<row id='1'/>\n", "one line ", "한국어.\n"):
        file = io.StringIO(line * 999, newline="\n")
        pieces = [piece for piece, _ in data._text_pieces(file, 100)]
        assert "".join(pieces) == line * 999 and max(map(len, pieces)) < 200


def test_a_byte_order_mark_is_no_text(tmp_path):
    """A byte order mark, which some editors on Windows write at the start of a file, is skipped.

    Break: data.py: encoding="utf-8-sig" => encoding="utf-8"
    """
    for name, content in (("x.jsonl", b'{"text": "a"}\n'), ("x.txt", b"a")):
        path = write(tmp_path / name, codecs.BOM_UTF8 + content)
        assert [row for _, row, _ in data.rows_in(path, 100)] == [{"text": "a"}]


def test_a_truncated_or_corrupted_zst(tmp_path):
    """Text in one frame or two is read. Truncated or corrupted, it is an error.

    Break: data.py: return require("pyarrow", path).input_stream(str(path), compression="zstd") =>
    return require("zstandard", path).open(path, "rb")
    """
    zstandard = pytest.importorskip("zstandard")
    pytest.importorskip("pyarrow")
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


def test_no_sequence_with_a_label(tmp_path):
    """Data without any sequence that has a label is refused: for training, for validation, in a
    mixture.

    Break: data.py: if not may_be_empty: => if False:
    """
    rows = [{"prompt": "a" * 99, "completion": "b"}]
    long = rows_as("jsonl", tmp_path, rows).rename(tmp_path / "long.jsonl")
    good = rows_as("jsonl", tmp_path, [{"text": "a"}])
    for change in (dict(data=(str(long),)), dict(data=(str(good),), val_data=(str(long),)),
                   dict(data=(f"{good}=0.5", f"{long}=0.5"))):
        cfg = config.Config(seq_len=8, packing="best_fit", val_frac=0.0,
                            token_cache=str(tmp_path / "p"), **change)
        with pytest.raises(ValueError, match="long.jsonl: .* no sequence of 8 with a label"):
            data.open_text(("train", "val"), cfg)


def test_token_files_that_cannot_be_used(tmp_path):
    """Token files are refused with document_mask but without an id as eod_id, and with packing.
    Token files of two dtypes make one dataset.

    Break: data.py: if seq_format["document_mask"] and not 0 <= eod_id =>
    if seq_format["document_mask"] and not -1 <= eod_id
    """
    for name, dtype in (("a", np.uint16), ("b", np.uint32)):
        np.save(tmp_path / f"{name}.npy", np.arange(50, dtype=dtype))
    dataset = data.open_dataset([tmp_path / "*.npy"], BYTES, {"seq_len": 49})
    np.testing.assert_array_equal(data.batch_at(dataset, 0, 2)["labels"], [np.arange(1, 50)] * 2)
    mask = {"document_mask": True, "vocab_size": 100}
    for eod_id in (-1, 100):
        with pytest.raises(ValueError, match=r"a.npy: with document_mask.* set --eod_id"):
            data.open_dataset([tmp_path / "a.npy"], BYTES, mask, eod_id=eod_id)
    data.open_dataset([tmp_path / "a.npy"], BYTES, mask, eod_id=0)
    with pytest.raises(ValueError, match=r"a.npy: packing best_fit needs documents"):
        data.open_dataset([tmp_path / "a.npy"], BYTES, {"packing": "best_fit"})


def test_a_file_that_changes_while_it_is_read(tmp_path):
    """A file that was truncated is a ValueError that names it, where reading its map would kill the
    process. A file that was deleted is an OSError.

    Break: data.py: .st_size != shard["file_size"]: => .st_size < 0:
    """
    path = write(tmp_path / "a.bin", np.arange(9999, dtype=np.uint16))
    code = f"""
import os, data
dataset = data.open_dataset([{str(path)!r}], data.make_tokenizer("bytes"), {{"seq_len": 99}})
data.batch_at(dataset, 0, 2)
os.truncate({str(path)!r}, 4096)
for _ in range(2):
    try:
        [data.batch_at(dataset, i, 2) for i in range(50)]
    except (ValueError, FileNotFoundError) as e:
        print(e)
    os.path.exists({str(path)!r}) and os.remove({str(path)!r})
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "a.bin: its size is not 19998 any more" in run.stdout, run.stderr
    assert "[Errno 2] No such file" in run.stdout


def test_bytes_are_those_of_the_text(tmp_path):
    """Bytes per token count the text itself, also where ids are not decoded to it.

    Break: data.py: len(text.encode()) => len(text)
    """
    tokenizers = pytest.importorskip("tokenizers")
    tok = small_bpe(tmp_path / "t.json", "<|endoftext|>")
    tok.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFD(), tokenizers.normalizers.StripAccents()])
    tok.save(str(tmp_path / "t.json"))
    text = "größer als früher"
    path = write(tmp_path / "a.txt", text.encode())
    dataset = tokenized(path, tokenizer=data.make_tokenizer(str(tmp_path / "t.json")),
                        folder=tmp_path / "p")
    n_tokens = len(dataset["shards"][0]["tokens"])
    assert data.bytes_per_token(dataset) == (len(text.encode()) + 2) / n_tokens


def test_bytes_per_token_of_a_split(tmp_path):
    """Bytes per token are those of the part itself, also if the cut is within a document.

    Break: data.py: first = shard["token_offset"]\n => first = 0\n
    """
    pytest.importorskip("tokenizers")
    small_bpe(tmp_path / "t.json", "<|endoftext|>")
    tok = data.make_tokenizer(str(tmp_path / "t.json"))
    path = tmp_path / "a.txt"
    path.write_text("low lower lowest " * 9000 + "q w e r t z u i " * 9000)
    parts = data.split(tokenized(path, tokenizer=tok, folder=tmp_path / "p"), 0.4)
    for part in parts:
        ids = part["shards"][0]["tokens"]
        n_bytes = len(tok["decode"](ids).replace("<|endoftext|>", "0").encode())
        assert np.isclose(data.bytes_per_token(part), n_bytes / len(ids), rtol=1e-3)
    assert data.bytes_per_token(parts[0]) > 1.5 * data.bytes_per_token(parts[1])


# ---- packing

@pytest.fixture
def documents(tmp_path):
    """documents(**seq_format): 60 texts of 0 to 40 letters as a dataset; and the texts."""
    rng = np.random.default_rng(5)
    texts = ["".join(rng.choice([*"abcdefg"], n)) for n in rng.integers(0, 40, 60)]
    path = rows_as("jsonl", tmp_path, [{"text": text} for text in texts])

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
    """Packed rows have each document once, with its end, truncated as configured, with
    positions from 0 and padding on the configured side.

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
    assert f"{n_used:,} of {n_all:,} tokens, {empty.mean():.1%} padding" in data.describe(dataset)
    n_long = sum(len(text) + 2 > 31 for text in texts)
    assert f"{n_long} longer (--truncation {truncation})" in data.describe(dataset)


def test_a_document_without_a_label_is_in_no_row(tmp_path):
    """A prompt so long that truncation leaves no label takes no row. One label is enough.

    Break: data.py: np.where(n_ignored < lengths, => np.where(n_ignored <= lengths,
    """
    path = rows_as("jsonl", tmp_path, [{"prompt": "p" * n, "completion": "c" * 5}
                                       for n in (40, 29, 3, 30)])
    for packing, n in (("none", 2), ("best_fit", 2)):
        dataset = tokenized(path, folder=tmp_path / "p", packing=packing, seq_len=30)
        batch = data.eval_batch_at(dataset, 0, dataset["n"])
        labels = batch["labels"]
        assert dataset["n"] == n and sorted((labels != data.IGNORE).sum(axis=1)) == [1, 6]
        assert data.describe(dataset).startswith("2 of 4 documents in 2 sequences, 3 longer")


def test_best_fit():
    """Packing puts every item into one row that has room, as a plain search for the fullest such
    row does, in as many rows.

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

    Break: data.py: documents[:n_first]} => documents[: n_first + 1]}
    """
    make, texts = documents
    parts = [data.eval_batch_at(part, 0, part["n"]) for part in data.split(make(seq_len=50), 0.3)]
    train, val = ([tokens[1:].decode() for tokens, _ in documents_in(part)] for part in parts)
    assert sorted(train + val) == sorted(texts)
    assert abs(sum(map(len, val)) / sum(map(len, texts)) - 0.3) < 0.05


def test_begin_and_end_ids(tmp_path):
    """With a tokenizer that has a bos id each document stands between its own bos and eos. With
    document_mask no label crosses from one document to the next.

    Break: data.py: labels[borders[borders > 0] - 1] = IGNORE => pass
    """
    pytest.importorskip("tokenizers")
    tok = small_bpe(tmp_path / "t.json", "<|endoftext|>", "<s>")
    ours = data.make_tokenizer(str(tmp_path / "t.json"))
    assert (ours["bos"], ours["eos"]) == (1, 0)
    texts = ["lowest", "low low", "lower"]
    path = rows_as("jsonl", tmp_path, [{"text": text} for text in texts])
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
    transformers = pytest.importorskip("transformers")
    file = path.with_suffix(".json")
    small_bpe(file, "<|im_end|>", "<|im_start|>", "<|endoftext|>")
    library = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), eos_token="<|im_end|>", chat_template=CHATML)
    library.save_pretrained(path)
    return library


def test_chat_errors(tmp_path):
    """A conversation that the template refuses, or one that it renders differently when more
    messages follow, is an error with its line.

    Break: data.py: if not is_found or not text.endswith(rest): => if not is_found:
    """
    library = chat_folder(tmp_path / "t")
    for template, words in (("{{ raise_exception('no system') }}", "refuses it: no system"),
                            ("{% for m in messages %}{{ m.content }};{% endfor %}"
                             "{{ messages | map(attribute='content') | join | length }}",
                             "message 2: cannot determine which characters")):
        library.chat_template = template
        library.save_pretrained(tmp_path / "t")
        ours = data.make_tokenizer(str(tmp_path / "t"))
        path = rows_as("jsonl", tmp_path, [{"text": "a"}, {"messages": 2 * CHAT}])
        with pytest.raises(ValueError) as e:
            tokenized(path, tokenizer=ours, folder=tmp_path / "p")
        assert f"{path} line 2: " in str(e.value) and words in str(e.value), str(e.value)


def test_texts_beside_chats(tmp_path):
    """Between a chat and a text is an eos that is not a label. Packed, a chat is as its template
    writes it and a text has its eos ids.

    Break: data.py: n = append([eos], True) => n = append([eos], False)
    """
    library = chat_folder(tmp_path / "t")
    ours = data.make_tokenizer(str(tmp_path / "t"), "<|endoftext|>")
    end = ours["eos"]
    path = rows_as("jsonl", tmp_path, [{"text": "low"}, {"messages": CHAT}, {"text": "low"},
                                       {"messages": CHAT}])
    dataset = tokenized(path, tokenizer=ours, folder=tmp_path / "p")
    shard, low = dataset["shards"][0], ours["encode"]("low").tolist()
    ids = library.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    text = [end, *low, end]
    assert shard["tokens"].tolist() == [*text, *ids, *text, *ids, end]
    found = [shard["tokens"][a:b].tolist() for a, b in shard["documents"]]
    assert found == [text, ids, text, ids]
    ends = np.flatnonzero(shard["tokens"] == end)
    assert shard["ignored"][ends].tolist() == [0, 0, 1, 0, 1]


def test_tiktoken(tmp_path, monkeypatch):
    """An encoding of tiktoken is used by its name, here one of a plugin, since the published ones
    need a download.

    Break: data.py: "eos": special_tokens.get(eos_token or "<|endoftext|>"), => "eos": 0,
    """
    tiktoken = pytest.importorskip("tiktoken")
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
    """Every batch has the exact number of sequences of each dataset, and no prefix is more than 1
    off. Each dataset is read in epochs of its own.

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
    """Weights that are not above 0, or that never repeat, are refused, also the weight of a single
    dataset.

    Break: data.py: if min(weights) <= 0 or n_cycle > 10**4: => if n_cycle > 10**4:
    """
    parts = [count_up(seq_len=8)] * 2
    for weights in (("0", "1"), ("0", "0"), ("0.123456789", "0.5"), ("0",)):
        with pytest.raises(ValueError, match="must be above 0 and repeat within 10,000"):
            data.mix(parts[:len(weights)], weights)


# ---- waiting

def test_prefetch_asks_again():
    """An item that is None is made again, until it is there or the wait is stopped. A missing item
    is reported once.

    Break: data.py: while item is None and not closed.wait(0.2): => while False:
    """
    answers = iter([None, None, None, "a", "b"])
    reported = []
    items = data.prefetch(lambda i: next(answers), 0, 2, on_missing=reported.append)
    assert [item for item, _ in items] == ["a", "b"]
    assert reported == [0]
    stop = threading.Event()
    items = data.prefetch(lambda i: None, 0, 2, stopped=stop.is_set)
    threading.Timer(0.3, stop.set).start()
    assert list(items) == []


# ---- scale

def test_a_huge_file_opens_at_once(tmp_path):
    """A file of 100 GB (sparse) opens and gives a batch without being read, and a batch far into
    training is built as the first is.

    Break: data.py: n = max(2**20 // len(shards), 2**10) => n = 2**40
    """
    path = tmp_path / "huge.bin"
    with open(path, "wb") as file:
        file.truncate(100 * 10**9)
    code = f"""
import resource, data
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seq_format = {{"seq_len": 1024, "vocab_size": 50000}}
dataset = data.open_dataset([{str(path)!r}], data.make_tokenizer("bytes"), seq_format)
data.fingerprint(dataset)
for step in (0, 10**9):
    data.batch_at(dataset, step, 12)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                         timeout=60)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 50 * 1024  # KiB


# ---- to the devices

def test_prefetch():
    """Items come in order with the seconds waited, `depth` of them made ahead and no more, all by
    one other thread.

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


def test_a_wait_counts_once_there_is_nothing_else_to_do(monkeypatch):
    """The device is busy for 100 s of a clock that stands still else: no wait for data.

    Break: data.py: if not item.done(): => if False:
    """
    now, gate = [0.0], threading.Event()

    def wait_until_idle():
        now[0] += 100
        gate.set()

    monkeypatch.setattr(data.time, "perf_counter", lambda: now[0])
    batches = data.prefetch(lambda i: gate.wait(60), 0, 1, wait_until_idle=wait_until_idle)
    assert [*batches] == [(True, 0.0)]
    assert now == [100]


def test_prefetch_closes():
    """Closing the iterator early ends the thread, and no further items are made. An exception in
    making an item is raised where that item is consumed, after those before it.

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
    assert made in ([0], [0, 1])
    assert not any(t.name.startswith("data") for t in {*threading.enumerate()} - before)

    items = data.prefetch(lambda i: 12 // (3 - i), 0, 9)
    assert [next(items)[0] for _ in range(3)] == [4, 6, 12]
    with pytest.raises(ZeroDivisionError):
        next(items)


@pytest.mark.parametrize("axes", [
    P("rows"), P("rows", "seq"), P(None, "seq"), P(("seq", "rows")), P(),
])
def test_to_device(axes):
    """The arrays on 8 devices, with rank 1 to 3 and a sharding each, equal the host's batch, and
    each device has its part of it.

    Break: data.py: return x[(slice(start, stop), => return x[::-1][(slice(start, stop),
    """
    mesh = jax.make_mesh((4, 2), ("rows", "seq"), axis_types=(AxisType.Auto,) * 2)
    specs = {"label": P(*axes[:1]), "tokens": axes, "image": P(*axes[:2], None if axes else "seq")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    batch = {"label": np.arange(8, dtype=np.int32),
             "tokens": np.arange(64, dtype=np.int32).reshape(8, 8),
             "image": np.arange(8 * 4 * 6, dtype=np.float32).reshape(8, 4, 6)}
    placed = data.to_device(batch, shardings, np.arange(8), 8)
    assert placed.keys() == batch.keys()
    for name, array in placed.items():
        shape, sharding = batch[name].shape, shardings[name]
        np.testing.assert_array_equal(data.local_rows(sharding, shape), np.arange(8))
        np.testing.assert_array_equal(np.asarray(array), batch[name])
        assert array.dtype == batch[name].dtype
        assert array.sharding == sharding and len(array.addressable_shards) == 8
        for shard in array.addressable_shards:
            assert shard.data.shape == sharding.shard_shape(shape)
            np.testing.assert_array_equal(np.asarray(shard.data), batch[name][shard.index])


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
whole = {"label": np.arange(8), "tokens": np.arange(64).reshape(8, 8)}
for axes in (("rows",), (("seq", "rows"),), ()):
    sharding = NamedSharding(mesh, P(*axes))
    rows = data.local_rows(sharding, (8, 8))
    wanted = {("rows",): np.arange(4, 8) - 4 * me, (): np.arange(8),
              (("seq", "rows"),): np.array([2, 3, 6, 7]) - 2 * me}[axes]
    np.testing.assert_array_equal(rows, wanted)
    local = {name: x[rows] for name, x in whole.items()}
    for name, array in data.to_device(local, dict.fromkeys(whole, sharding), rows, 8).items():
        assert array.shape == whole[name].shape and len(array.addressable_shards) == 4
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[name][shard.index])
"""


@pytest.mark.slow
def test_to_device_from_two_processes():
    """Each of two processes finds the rows that its devices hold, sorted, and from these alone
    builds its part of the arrays, also if the second process holds the first rows.

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
