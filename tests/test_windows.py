# SPDX-License-Identifier: Apache-2.0
"""Training data in windows: files of a growing folder, one after the other."""
import dataclasses
import gzip
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import ckpt
import train
import windows
from test_real_data import SIMPLE_TEMPLATE, USER, few_answers, save_folder, write_rows
from test_recipes import assert_same_arrays, kill_at, killed_and_resumed
from test_train import losses, rows


@pytest.fixture
def folder(tmp_path):
    """(function that opens the windows of a folder of texts, function that adds a file to it)."""
    (tmp_path / "days").mkdir()

    def add(name, letter, n):
        path = tmp_path / "days" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(letter * n)

    def make(**fields):
        fields = dict(batch_size=4, seq_len=5, rest_s=0.0,
                      data=(str(tmp_path / "days" / "*.txt"),)) | fields
        cfg = windows.WindowsConfig(
            out_dir=str(tmp_path / "out"), token_cache=str(tmp_path / "p"), **fields)
        return windows.open_text(("train", "val"), cfg)["train"]

    return make, add


def letters(train, steps):
    """The first letter of each row of these batches, a text for each batch."""
    batches = [train["batch"](step, np.arange(4))["tokens"] for step in steps]
    return ["".join(chr(max(row)) for row in batch) for batch in batches]


def test_windows_come_one_after_the_other(folder, tmp_path, capsys):
    """In order of the numbers in their names, each to its end; empty ones are skipped.

    Break: tests/recipes/windows.py: int(word) if word.isdecimal() else word => word
    """
    make, add = folder
    for name, letter, n in (("day10.txt", "c", 29), ("day2.txt", "b", 39), ("day1.txt", "a", 19),
                            ("day3.txt", "x", 0), ("day4²3.txt", "x", 3)):
        add(name, letter, n)
    (tmp_path / "days" / "day5.txt.gz").write_bytes(gzip.compress(b""))
    train = make(data=(str(tmp_path / "days" / "*.txt*"),))
    out = capsys.readouterr().out
    assert out.count("day4²3.txt: has no example; skipped") == 1
    assert out.count("day5.txt.gz: has no example; skipped") == 1
    assert "".join(letters(train, range(9))) == 2 * (4 * "a" + 8 * "b" + 6 * "c")
    days = tmp_path / "days"
    about = f"3 windows, from {days / 'day1.txt'} to {days / 'day10.txt'}"
    first = "in the first: 21 tokens, 4 sequences, 1 documents"
    assert (train["n"], train["summary"].splitlines()) == (18, [about, first])
    assert [train["n_finished"](step) for step in range(6)] == [0, 1, 1, 2, 2, 3]
    (tmp_path / "out/windows.jsonl").unlink()
    fresh = make()  # asks for the next file just where the first ends
    assert letters(fresh, [0]) == ["aaaa"]
    assert fresh["next_files"](1) == (str(days / "day2.txt"),) and fresh["next_files"](2) == ()
    assert [w["name"][-8:] for w in train["windows"](3)] == ["day1.txt", "day2.txt", "ay10.txt"]
    with pytest.raises(ValueError, match="val_frac 0.1: must be 0 with windows; set --val_data"):
        make(val_frac=0.1)


@pytest.mark.parametrize("fields, wanted", [
    (dict(windows_per_epoch=2), "aaaa bbbb aaaa bbbb aaaa"),
    (dict(window_repeats=2), "aaaa aaaa bbbb bbbb cccc cccc aaaa"),
])
def test_caps_and_repeats(fields, wanted, folder):
    """An epoch reads windows_per_epoch windows, each window_repeats times.

    Break: tests/recipes/windows.py: if seen and seen.count(seen[-1]) < cfg.window_repeats: =>
    if False:
    """
    make, add = folder
    for i, letter in enumerate("abc"):
        add(f"{i}.txt", letter, 19)
    train = make(**fields)
    assert " ".join(letters(train, range(len(wanted.split())))) == wanted
    epochs = [window["epoch"] for window in train["windows"](len(wanted.split()) - 1)]
    assert [*dict.fromkeys(epochs)] == list(range(epochs[-1] + 1))


def test_a_day_is_all_files_with_its_text(folder, tmp_path):
    """window_steps caps each pass. Files without a day, or that join a window late, are refused.

    Break: tests/recipes/windows.py: (*found.get(name, ()), path) => (path,)
    """
    make, add = folder
    for name, letter in (("day10/x.txt", "c"), ("day2/x.txt", "a"), ("day2/y.txt", "b")):
        add(name, letter, 19)
    train = make(data=(str(tmp_path / "days/{day}/*.txt"),))
    found = letters(train, range(3))
    assert {*found[0], *found[1]} == {"a", "b"} and found[2] == "cccc"
    assert [window["name"] for window in train["windows"](2)] == ["day2", "day10"]
    (tmp_path / "out/windows.jsonl").unlink()
    add("3/3-x.txt", "d", 39)
    add("3/4-x.txt", "e", 39)
    globs = [str(tmp_path / "days" / name) for name in ("d{day}/?.txt", "{day}/{day}-*.txt")]
    with pytest.raises(ValueError, match="4-x.txt: has no day; each of --data needs {day}"):
        make(data=globs)
    (tmp_path / "days/3/4-x.txt").unlink()
    train = make(data=globs, window_steps=1)
    found = letters(train, range(4))
    assert found[0] == "dddd" and {*found[1], *found[3]} <= {"a", "b", "d"}
    assert train["n"] == 12 and [window["name"] for window in train["windows"](3)] == [
        "3", "ay2", "ay10", "3"]
    add("day2/z.txt", "d", 19)
    with pytest.raises(ValueError, match="ay2: had 2 files when it began, and has more"):
        letters(train, [4])


def test_a_growing_folder(folder, tmp_path):
    """New files come next; opened again, a run has the same batches. Changed files are refused.

    Break: tests/recipes/windows.py: _read_jsonl(windows["path"]) or windows["order"] =>
    windows["order"]
    """
    make, add = folder
    add("1.txt", "a", 39)
    add("3.txt", "c", 19)
    train = make()
    assert letters(train, [0, 1]) == ["aaaa", "aaaa"]
    add("4.txt", "d", 19)
    assert letters(train, [2, 3]) == ["cccc", "dddd"]
    whole = [train["batch"](step, np.arange(4)) for step in range(5)]
    seen = train["windows"](4)
    add("2.txt", "b", 19)  # between those that were read
    for forget in (False, True):
        again = make()
        if forget:
            (tmp_path / "out" / "windows.jsonl").unlink()
            again["restore"](seen)
        for step in (4, 0, 3, 1, 2):
            batch = again["batch"](step, np.arange(4))
            assert all((batch[k] == whole[step][k]).all() for k in batch)
    assert letters(again, [4, 5, 6])[1:] == ["aaaa", "bbbb"]
    for letter, n in (("c", 50), ("x", 19)):
        add("3.txt", letter, n)
        with pytest.raises(ValueError, match="3.txt: had 4 examples when the run first read it, "):
            letters(make(), [2])


def test_a_killed_run_continues_in_the_windows_that_it_had_begun(folder, tmp_path, monkeypatch):
    """An earlier file has appeared since; another run's list is ignored; process 0 writes it.

    Break: tests/recipes/windows.py: if saved and begun[: len(saved)] == saved: => if False:
    """
    make, add = folder
    add("1.txt", "a", 19)
    add("3.txt", "c", 19)
    train = make()
    assert letters(train, [0, 1]) == ["aaaa", "cccc"]
    saved, seen = train["windows"](0), train["windows"](1)
    assert len(saved) == 1
    add("2.txt", "b", 19)
    log = tmp_path / "out/windows.jsonl"
    inode = log.stat().st_ino
    for process in (1, 0):
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_index", lambda process=process: process)
            again = make()
            again["restore"](saved)
            assert letters(again, [0, 1]) == ["aaaa", "cccc"]
            if process:
                again["restore"](seen[::-1])
                assert letters(again, [0, 1]) == ["cccc", "aaaa"]
                assert log.stat().st_ino == inode
    again = make()
    again["restore"]([saved[0] | {"epoch": 1}])
    assert letters(again, [1]) != ["cccc"]


def test_waiting_for_a_window(folder, tmp_path, capsys):
    """With wait_s there is no batch until a file appears, or until wait_s are over.

    Break: tests/recipes/windows.py: if _must_wait(cfg, windows): => if False:
    """
    make, add = folder
    add("1.txt", "a", 19)
    train = make(wait_s=1e6)
    assert letters(train, [0]) == ["aaaa"]
    assert [train["batch"](1, np.arange(4)) for _ in range(3)] == [None] * 3
    assert capsys.readouterr().out.count("1.txt yet: waiting for 1e+06 s") == 1
    add("2.txt", "b", 19)
    assert letters(train, [1]) == ["bbbb"]
    (tmp_path / "out" / "windows.jsonl").unlink()
    train = make(wait_s=0.05)
    letters(train, [0, 1])
    assert train["batch"](2, np.arange(4)) is None
    time.sleep(0.1)
    assert letters(train, [2]) == ["aaaa"]


def test_a_file_that_is_still_copied(tmp_path):
    """It is read rest_s after its last change, although a copy has an old time of modification.

    Break: tests/recipes/windows.py: os.stat(path).st_ctime => os.stat(path).st_mtime
    """
    folder = tmp_path / "days"
    folder.mkdir()
    (folder / "1.txt").write_text("a" * 41)
    cfg = windows.WindowsConfig(
        data=(str(folder / "*.txt"),), seq_len=8, batch_size=5,
        wait_s=60.0, out_dir=str(tmp_path / "out"), token_cache=str(tmp_path / "cache"))
    source = windows.open_text(("train", "val"), cfg)["train"]
    rows = np.arange(5)
    assert (source["batch"](0, rows)["tokens"] == ord("a")).any()
    with open(folder / "2.txt", "w") as file:
        for _ in range(4):
            file.write("b" * 10)
            file.flush()
            os.utime(file.name, (0, 0))
            assert source["batch"](1, rows) is None
            time.sleep(0.3)
    deadline = time.monotonic() + 30
    while source["batch"](1, rows) is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert source["windows"](2)[1]["n"] == 6  # of all 42 tokens


def test_windows_without_a_label(tmp_path, capsys):
    """They are skipped and named; summary and examples are those of the first other file.

    Break: tests/recipes/windows.py: dataset["n"] = 0 => pass
    """
    pytest.importorskip("transformers")
    none = write_rows(tmp_path / "a1.jsonl", [{"messages": [USER, USER]}] * 9)
    few_answers(tmp_path / "a2.jsonl")
    cfg = windows.WindowsConfig(data=(str(tmp_path / "a*"),), seq_len=16,
                                tokenizer=save_folder(tmp_path / "t", SIMPLE_TEMPLATE),
                                batch_size=1,
                                token_cache=str(tmp_path / "cache"), out_dir=str(tmp_path / "out"))
    source = windows.open_text(("train",), cfg)["train"]
    wanted = f"{none}: no token is a label\n{none}: has no example; skipped\n"
    assert capsys.readouterr().out == wanted
    assert source["summary"].startswith("1 windows, from ")
    assert "% of the tokens are labels" in source["summary"]
    shown_example, = (train.mark_labels(example) for example in source["preview"]())
    assert "{+yes<|im_end|>+}\n" in shown_example


# ---- runs

@pytest.fixture
def days(tiny, tmp_path):
    """days(**fields) is a config with windows of 3, 2 and 2 batches, and validation data."""
    (tmp_path / "days").mkdir()
    for day, letter, n in ((1, "a", 24), (2, "b", 16), (9, "c", 16)):
        (tmp_path / "days" / f"day{day}.txt").write_text(letter * (16 * n - 1))
    (tmp_path / "next.txt").write_text("abc " * 99)

    def make(**fields):
        cfg = tiny(data=(str(tmp_path / "days" / "*.txt"),), val_frac=0.0, eval_every=0,
                   val_data=(str(tmp_path / "next.txt"),), save_every=0, dtype="float32")
        return windows.WindowsConfig(**dataclasses.asdict(cfg) | fields)

    return make


@pytest.mark.slow
def test_a_run_in_windows_resumes_after_the_folder_has_grown(days, tmp_path):
    """It first reads the windows it had begun, then the new files, and evaluates after each.

    Break: train.py: intervals["eval"] = {"window": 1} | intervals["eval"] => pass
    """
    cfg = days(steps=9, schedule="cosine")
    train.main(cfg, task=windows.TASK, hooks=[lambda event, row: row | {"stop": "enough"}
                           if event == "step" and row["step"] == 5 else None])
    meta = ckpt.newest_meta(Path(cfg.out_dir) / "ckpt")
    saved, begun = ([Path(window["name"]).name for window in windows] for windows in (
        meta["data"]["windows"],
        map(json.loads, Path(cfg.out_dir, "windows.jsonl").read_text().splitlines())))
    assert meta["step"] == 5 and begun[:2] == ["day1.txt", "day2.txt"]
    assert begun[: len(saved)] == saved
    assert begun[2:] in ([], ["day9.txt"])  # batches are prepared some steps ahead
    for day in ("day0.txt", "day3.txt"):
        (tmp_path / "days" / day).write_text("d" * (16 * 16 - 1))
    letters, files = [], []

    def watch(event, value):
        if event == "data":
            letters.append(chr(int(value["tokens"].max())))
        if event == "before_window":
            files.append((value["step"], value["window"], Path(value["file"]).name))

    train.main(cfg, task=windows.TASK, hooks=[watch])
    assert letters == (["c", "c", "d", "d"] if begun[2:] else ["d", "d", "d", "d"])
    names = ["day9.txt", "day0.txt"] if begun[2:] else ["day0.txt", "day3.txt"]
    assert files == [(5, 3, names[0]), (7, 4, names[1])]
    assert [r["step"] for r in rows(cfg.out_dir, "eval")] == [3, 5, 7, 9]
    (tmp_path / "in_order").mkdir()
    for i, line in enumerate(Path(cfg.out_dir, "windows.jsonl").read_text().splitlines()):
        shutil.copy(json.loads(line)["name"], tmp_path / f"in_order/{i}.txt")
    straight = days(steps=9, schedule="cosine", out_dir=str(tmp_path / "straight"),
                    data=(str(tmp_path / "in_order/*.txt"),))
    train.main(straight, task=windows.TASK)
    assert losses(straight.out_dir) == losses(cfg.out_dir)


@pytest.mark.parametrize("step, found", [(4, {"": "day"}), (9, {})])
def test_no_window_is_awaited_after_the_last_step(step, found, days):
    """Data that is late is evaluated once it has come; after the steps that epochs mean, none is.

    Break: train.py: is_over = i >= run.cfg.steps => is_over = False
    """
    late = iter([None, "day"])
    run = SimpleNamespace(
        cfg=days(steps=9), val_data={"": {"source_at": lambda step: next(late)}}, hooks=(),
        progress=train.init_progress(0.0), first_step=0, stop_conditions=[])
    assert train.val_data_at(run, step) == found


def train_days(cfg, kill_step=0):
    seen = []

    def watch(event, value):
        if event == "val_data":
            seen.append(chr(int(value["tokens"].max())))

    return train.main(cfg, [kill_at(kill_step), watch], task=windows.TASK) | {"seen": seen}


@pytest.mark.slow
def test_capped_days_are_evaluated_on_the_next_one_and_resume_bit_exactly(days, tmp_path):
    """A pass takes two steps of a day; after a kill within a day all ends the same.

    Break: tests/recipes/windows.py: min(window["n"], most or window["n"]) => window["n"]
    """
    for day, letter in ((1, "a"), (2, "b"), (9, "c")):
        (tmp_path / f"folders/day={day}").mkdir(parents=True)
        for part in "xy":
            path = tmp_path / f"folders/day={day}/{part}.txt"
            path.write_text((letter + part.upper()) * 200)
    cfg = days(steps=7, save_every=1, window_steps=2, val_data=(), eval_batches=1,
               data=(str(tmp_path / "folders/day={day}/*.txt"),))
    summary = train_days(cfg)
    assert summary["seen"] == ["b", "c"]
    killed = dataclasses.replace(cfg, out_dir=cfg.out_dir + "_killed")
    killed_and_resumed(killed, 4, train_days)
    assert_same_arrays(cfg, killed)
    found = [[(row["step"], row["val_loss"]) for row in rows(run.out_dir, "eval")]
             for run in (cfg, killed)]
    assert found[0] == found[1] and [step for step, _ in found[0]] == [2, 4]


def test_a_new_run_ignores_the_windows_of_an_earlier_run(days):
    """A run that was killed before its first save has left a list of windows.

    Break: train.py: (meta.get("data", {}).get("windows", [])) =>
    (meta["data"]["windows"]) if meta else None
    """
    cfg = days(steps=2)
    before = Path(cfg.out_dir, "windows.jsonl")
    before.parent.mkdir()
    before.write_text(json.dumps({"epoch": 0, "name": "other.txt", "n": 99}) + "\n")
    train.main(cfg, task=windows.TASK)
    names = [json.loads(line)["name"] for line in before.read_text().splitlines()]
    assert names and all("/days/" in name for name in names), names


@pytest.mark.slow
def test_the_stop_file_ends_the_wait_for_data(days, capsys):
    """The run logs and prints once that it waits for data; a stop file ends it a second later.

    Break: train.py: if several and is_waiting: => if is_waiting:
    """
    cfg, seen = days(wait_s=15.0, windows_per_epoch=0, steps=10**6), []

    def kill(event, value):
        seen.append(event)
        if event == "out_of_data":
            threading.Timer(1, Path(cfg.out_dir, "stop").touch).start()

    summary = train.main(cfg, [kill], task=windows.TASK)
    assert summary["reason"] == f"{cfg.out_dir}/stop exists" and seen.count("out_of_data") == 1
    assert [row["step"] for row in rows(cfg.out_dir, "out_of_data")] == [summary["step"]]
    assert seen.count("window") == len(rows(cfg.out_dir, "window")) > 0
    assert capsys.readouterr().out.count(f"step {summary['step']:>6}  waiting for data\n") == 1
