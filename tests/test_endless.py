# SPDX-License-Identifier: Apache-2.0
"""Training on rows that never end."""
import dataclasses
import io
import itertools
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import ckpt
import endless
import train
from test_recipes import assert_same_arrays, kill_at, killed_and_resumed
from test_train import rows


def numbered_rows(seed=0):
    """Rows of different lengths, without end."""
    for i in itertools.count():
        yield {"text": f"{seed} row {i} " + "of the text " * (i % 5), "unused": i}


def train_endless(cfg, kill_step=0):
    return endless.main(cfg, numbered_rows(), [kill_at(kill_step)])


@pytest.fixture
def make(tiny):
    """make(**fields) is a config for rows without end, 10 at once, about 2 batches."""
    def make(**fields):
        cfg = dataclasses.asdict(tiny(data=(), val_frac=0.0, val_data=tiny().data, save_every=1))
        return endless.EndlessConfig(**cfg | {"rows_at_once": 10} | fields)

    return make


@pytest.mark.slow
def test_a_run_on_endless_rows_resumes_bit_exactly(make):
    """A killed run ends as one that was not; other rows are refused.

    Break: tests/recipes/endless.py: n_before - stream["n_read"]) => 0)
    """
    cfg = make(steps=12)
    train_endless(cfg)
    killed = dataclasses.replace(cfg, out_dir=cfg.out_dir + "_killed")
    killed_and_resumed(killed, 8, train_endless)
    assert_same_arrays(cfg, killed)
    for event in ("log", "eval"):
        found = [[(row["step"], row.get("loss"), row.get("val_loss"))
                  for row in rows(run.out_dir, event)] for run in (cfg, killed)]
        assert found[0] == found[1] and found[0]
    position = ckpt.newest_meta(Path(cfg.out_dir) / "ckpt")["hooks"]["endless"]
    assert position["rows"] % 10 == 0 < position["draws"] <= 12 * cfg.batch_size
    assert not any(Path(cfg.out_dir, "stream").iterdir())
    with pytest.raises(ValueError, match="data was 'rows-from-0-"):
        endless.main(dataclasses.replace(cfg, steps=14), numbered_rows(seed=1))


def test_each_token_is_a_label_once(make, monkeypatch):
    """Rows are shuffled ten at once, the same in each process, and deleted after use.

    Break: tests/recipes/endless.py: shuffled(drawn - first, => shuffled(0 * drawn,
    """
    opened = []
    monkeypatch.setattr(train, "main", lambda cfg, hooks, task: opened.append(
        task["open"](("train",), cfg)["train"]["batch"]))
    given = list(itertools.islice(numbered_rows(), 40))
    cfg = make()
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        endless.main(cfg, given)
    whole, part = opened
    found = b""
    with pytest.raises(ValueError, match="^rows: ended after 40, enough for"):
        for step in itertools.count():
            labels = whole(step, np.arange(8))["labels"]
            np.testing.assert_array_equal(part(step, np.arange(5, 8))["labels"], labels[5:])
            found += bytes(labels[labels >= 0].astype(np.uint8))
            assert len([*Path(cfg.out_dir, "stream/0").iterdir()]) <= 3
    for i in (0, 10, 20):
        text = "".join(row["text"] + "\0" for row in given[i : i + 10]).encode()
        assert sorted(found[: len(text)]) == sorted(text)
        found = found[len(text) :]


def test_rows_from_standard_input(make, monkeypatch):
    """Each line is a row in JSON; fields that need data of a known size are refused.

    Break: tests/recipes/endless.py: enumerate(sys.stdin, 1) => enumerate(sys.stdin)
    """
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"text": "a"}\nb\n'))
    found = endless._stdin_rows()
    assert next(found) == {"text": "a"}
    with pytest.raises(ValueError, match="^standard input, line 2: Expecting value"):
        next(found)
    with pytest.raises(ValueError, match="epochs: must not be set with endless rows"):
        endless.open_rows({}, ("train",), make(epochs=1.0))
