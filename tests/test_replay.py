# SPDX-License-Identifier: Apache-2.0
"""replay.py: which rows a step learned from, where they come from, and what they cost."""
import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import ckpt
import model
import replay
import train

WORDS = "the quick brown fox jumps over the lazy dog and runs away from it again\n"


def write_texts(folder):
    """Two files of plain text, and one that is none."""
    folder.mkdir()
    (folder / "a.txt").write_text(WORDS * 60)
    (folder / "b.txt").write_text((WORDS * 60).upper())
    noise = np.random.default_rng(0).integers(33, 126, 300, dtype=np.uint8)
    (folder / "odd.txt").write_bytes(noise.tobytes())
    return tuple(str(folder / f"{name}.txt") for name in ("a", "b", "odd"))


def test_an_odd_document_comes_first(tiny, tmp_path, capsys):
    """The row of a planted odd document is named first. Its loss and gradient are those of optax at
    the parameters of the step before, and a changed digest in the log is named.

    Break: tests/replay.py: int(value["step"]) == step - 1: => int(value["step"]) == step:
    """
    cfg = tiny(data=write_texts(tmp_path / "texts"), val_frac=0.0, steps=60, save_every=20,
               max_to_keep=9, lr=0.01, dtype="float32", out_dir=str(tmp_path / "run"))
    train.main(cfg)
    odd = replay.find(cfg.out_dir, Path(cfg.data[2]).read_text()[40:44])
    step = next(step for step, *_ in odd if step > 41)
    found = replay.replay(cfg.out_dir, step, around=1)
    assert found[0]["origin"] == [f"{cfg.data[2]}, document 0"]
    assert found[0]["loss"] > 1.2 * found[1]["loss"]

    # Against the log.
    rows = ckpt.read_log(cfg.out_dir)
    logged = {row["step"]: row["loss"] for row in rows if row["event"] == "log"}
    n_labels = np.array([row["n_labels"] for row in found])
    losses = np.array([row["loss"] for row in found])
    assert sum(row["loss_frac"] for row in found) == pytest.approx(1)
    assert losses @ n_labels / n_labels.sum() == pytest.approx(logged[step], rel=1e-5)
    printed = capsys.readouterr().out
    assert f"step {step:6}  loss {logged[step]:.4f}  <- this step" in printed
    assert f"step {step - 1:6}  loss {logged[step - 1]:.4f}\n" in printed

    # Against optax.
    setup, source, _ = replay.open_run(cfg.out_dir, train.TEXT, type(cfg), (40, step))
    params, *_ = replay.train_to(setup, rows, step, 40, step, train.TEXT)
    batch = source["batch"](step - 1, np.arange(cfg.batch_size))

    def loss_of(params, row):
        x_1TD, unembed_DV, _ = model.hidden_states(
            params, {"tokens": batch["tokens"][row : row + 1]}, setup.cfg)
        return optax.softmax_cross_entropy_with_integer_labels(
            x_1TD @ unembed_DV, batch["labels"][row : row + 1]).sum() / n_labels.sum()

    for row in found[:2]:
        grads = jax.grad(loss_of)(params, row["row"])
        assert row["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)

    # On the way from step 20 to 42 lie 22 losses and a save. One of them is changed in the log.
    *_, differences, n_compared = replay.train_to(setup, rows, 41, 20, 42, train.TEXT)
    assert not differences and n_compared == 23
    rows = [row | {"digest": {}} if row["event"] == "save" else row for row in rows]
    *_, differences, _ = replay.train_to(setup, rows, 41, 20, 42, train.TEXT)
    assert len(differences) == 1 and differences[0].startswith("the digest of step 40 was {}, is {")


def write_rows(folder):
    texts = [f"document {i} of the rows: {WORDS[i:]}" for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "more.txt").write_text(WORDS * 30)
    (np.arange(2000, dtype=np.uint16) % 200).tofile(folder / "ids.bin")
    return texts


@pytest.mark.parametrize("fields", [
    {}, {"packing": "best_fit"}, {"packing": "none", "seq_len": 120},
    {"data": ("rows.jsonl=0.5", "more.txt=0.5")}, {"data": ("ids.bin", "rows.jsonl")}],
    ids=["stream", "packed", "one_each", "mixture", "token_file"])
def test_rows_come_from_the_named_documents(tiny, tmp_path, monkeypatch, fields):
    """The text of each row stands in the document, or at the offset, that it is said to be from.

    Break: data.py: n_documents += is_last => n_documents += 1 - is_last
    """
    monkeypatch.chdir(tmp_path)
    texts = write_rows(tmp_path)
    cfg = tiny(**{"data": ("more.txt", "rows.jsonl"), "val_frac": 0.1, "seq_len": 64} | fields)
    setup = train.setup_run(cfg)
    cfg = setup.cfg
    source = train.open_data(setup.task, cfg, {"train"})["train"]
    named = set()
    for index in range(6):
        batch = source["batch"](index, np.arange(cfg.batch_size))
        spans = replay.sequences_of(source["dataset"], index, cfg)
        for row, of_row in enumerate(spans):
            ids = np.append(batch["tokens"][row], batch["labels"][row, -1])
            if len(of_row) == 1:
                shard, start, stop = of_row[0]
                assert ids[:9].tolist() == shard["tokens"][start:stop][:9].tolist()
            for span in of_row:
                where = replay.origin(*span)
                named.add(where.split(",")[0])
                if where.startswith("rows.jsonl") and ";" not in where:
                    number = int(where.removeprefix("rows.jsonl, document "))
                    shard, start, stop = span
                    text = bytes(x for x in shard["tokens"][start:stop].tolist() if x).decode()
                    assert text.strip("\0") in texts[number]
    assert named >= {entry.partition("=")[0] for entry in cfg.data}


def test_a_text_is_found_where_a_search_finds_it(tiny, tmp_path, capsys):
    """--find prints exactly the steps and rows whose tokens have the text, within --steps.

    Break: tests/replay.py: in range(first, last + 1): => in range(first, cfg.steps):
    """
    cfg = tiny(data=write_texts(tmp_path / "texts"), val_frac=0.0, steps=12,
               token_cache=str(tmp_path / "tokens"))  # its own, since it is edited below
    train.main(cfg)
    setup = train.setup_run(cfg)
    source = train.open_data(setup.task, setup.cfg, {"train"})["train"]
    expected = []
    for index in range(2, 9):
        batch = source["batch"](index, np.arange(8))
        for row, (tokens, labels) in enumerate(zip(batch["tokens"], batch["labels"], strict=True)):
            if b"FOX" in bytes([*tokens.tolist(), labels[-1]]):
                expected.append((index + 1, row))
    assert replay.main([cfg.out_dir, "--find", "FOX", "--steps", "3:9"]) == 0
    printed = capsys.readouterr().out
    assert "rows of steps 3 to 9 have 'FOX'" in printed and "older version" not in printed

    # As a version wrote the token cache that did not know the files.
    for shard in source["dataset"]["shards"]:
        index = shard["path"].with_name("index.json")
        fields = json.loads(index.read_text())
        del fields["sizes"]["sources"]
        index.write_text(json.dumps(fields))
    assert replay.main([cfg.out_dir, "--find", "FOX", "--steps", "3:3"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("is of an older version; delete it") == 1 and " of all" in printed
    found = [(step, row) for step, row, _ in replay.find(cfg.out_dir, "FOX", "3:9")]
    assert found == expected != []


def test_errors_of_replay(tiny, tmp_path, capsys):
    """Missing steps and folders, wrong flags, two configs and changed data have an error.

    Break: tests/replay.py: if step > n_steps: => if step > 10**9:
    """
    cfg = tiny(steps=2)
    train.main(cfg)
    for argv, message in (
            ([cfg.out_dir, "--step", "3"], "--step 3: the run has 2 steps"),
            ([cfg.out_dir, "--step", "0"], "--step 0: must be 1 or more"),
            ([cfg.out_dir], "give either --step or --find"),
            ([cfg.out_dir, "--find", "x", "--steps", "a"], "--steps 'a': must be as 100:200"),
            ([cfg.out_dir, "--step", "1", "--around", "-1"], "--around -1: must be 0 or more"),
            ([cfg.out_dir, "--find", ""], "must have a character"),
            ([cfg.out_dir, "--find", "x", "--steps", "3:2"], "--steps 3:2: has no step of the run"),
            ([str(tmp_path / "none"), "--step", "1"], "config.json")):
        assert replay.main(argv) == 2
        assert message in capsys.readouterr().err

    # A run that trained on with another rate, and data that has changed since.
    train.main(dataclasses.replace(cfg, steps=4, lr=1e-3, allow_change=("lr",), max_to_keep=1))
    assert replay.main([cfg.out_dir, "--step", "3"]) == 2
    assert ("steps 1 to 3 cannot be trained again with one config: the run was resumed at step 2 "
            "with another lr, steps; choose a step of one launch") in capsys.readouterr().err
    Path(cfg.data[0]).write_text("another text " * 999)
    assert replay.main([cfg.out_dir, "--step", "4"]) == 2
    assert "data: the files have changed since step 4" in capsys.readouterr().err
