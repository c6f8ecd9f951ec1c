# SPDX-License-Identifier: Apache-2.0
"""compare.py on real runs of train.py, and on logs that a run writes rarely."""
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy
from matplotlib.colors import to_rgb

import ckpt
import compare
import config
import train
from conftest import ROOT

# ---- real runs

def test_runs_that_train_stop_resume_and_fail(tiny, tmp_path, capsys):
    """The table has the state, steps, losses and times of real runs, while they run and afterwards.

    Break: tests/compare.py: fcntl.LOCK_SH | fcntl.LOCK_NB => fcntl.LOCK_UN
    """
    first = tiny(out_dir=str(tmp_path / "seed=0"))
    crashed = tiny(out_dir=str(tmp_path / "bad"), seed=2)
    during = []

    def compare_now(event, row):
        if event == "eval":
            during.extend(compare.compare([first.out_dir], png_path=""))

    def fail(event, row):
        if event == "log" and row["step"] == 2:
            raise RuntimeError("no luck\nat all")

    # The first run stops, resumes and finishes. It is compared at each evaluation.
    stopped = train.main(dataclasses.replace(first, stop=("5",)), hooks=[compare_now])
    after_stop, = compare.compare([first.out_dir], png_path="")
    assert (after_stop["state"], after_stop["step"], after_stop["steps"]) == ("stopped", 5, 8)
    end = train.main(first, hooks=[compare_now])
    assert [(run["state"], run["best_step"], run["steps"]) for run in during] == [
        ("running", None, 8), ("running", 4, 8)]
    with pytest.raises(RuntimeError):
        train.main(crashed, hooks=[fail])

    # The run with an evaluation comes first.
    capsys.readouterr()
    run, bad = compare.compare([str(tmp_path / "*")], png_path="")
    assert (run["run"], run["state"], run["step"], run["last_step"]) == (
        first.out_dir, "finished", 8, 8)
    assert run["last"] == end["val_loss"] and run["best"] == end["best_val_loss"]
    assert run["wall_s"] == sum(end["time_s"].values())
    assert run["wall_s"] > stopped["wall_s"] + end["wall_s"] - 1
    assert run["n_params"] == sum(x.size for x in end["state"]["params"].values())
    assert (bad["state"], bad["reason"]) == ("crashed", "RuntimeError: no luck")

    # What is printed: the seed is the only field that differs.
    printed, notes = capsys.readouterr()
    lines = printed.splitlines()
    assert lines[1].split()[:3] == ["run", "seed", "step"]
    assert lines[2].split()[0] == "seed=0" and lines[-1] == "bad: RuntimeError: no luck"
    assert "skipped, not a run" in notes and "text.txt" in notes  # beside the runs


# ---- logs made by hand

START = {"event": "start", "step": 0, "unit": "token", "tokens_per_step": 128, "n_params": 1000,
         "time_s": {"compile": 2.0, "step": 0.0}}
END = {"event": "end", "exit_code": 0, "reason": "", "time_s": {"compile": 2.0, "step": 9.0}}


def write_run(folder, rows, **fields):
    """Write the folder of a run with these rows after its start, and return its path."""
    folder.mkdir(parents=True)
    cfg = config.Config(**fields)
    (folder / "config.json").write_text(config.to_json(cfg))
    rows = [START | {"config": dataclasses.asdict(cfg)}, *rows]
    (folder / "metrics.jsonl").write_text("".join(ckpt.json_line(row) + "\n" for row in rows))
    return str(folder)


def log_row(step, loss, n_labels=10.0, speed=100.0):
    return {"event": "log", "step": step, "loss": loss, "n_labels": n_labels,
            "tokens": 128 * step, "tokens_per_s": speed,
            "time_s": {"compile": 2.0, "step": step / 10}}


def eval_row(step, loss, **more):
    return {"event": "eval", "step": step, "val_loss": loss, "val_acc": 1 / (1 + loss), **more}


def rows_falling_to(end, n=40, **more):
    """Log and eval rows of a loss that falls steeply from 9 at first, to `end`."""
    rows = []
    for step in range(1, n + 1):
        loss = end + 8 * math.exp(-step) + 0.2 * (1 - step / n)
        rows += [log_row(step, loss - 0.1), eval_row(step, loss, **more)]
    return [*rows, END | {"step": n}]


@pytest.mark.parametrize("rows, state, reason", [
    ([END | {"step": 3}], "finished", ""),
    ([{"event": "save", "step": 3}], "finished", ""),  # killed after its last save
    ([END | {"step": 2}], "stopped", ""),
    ([END | {"step": 3, "exit_code": 1, "reason": "not finite"}], "failed", "not finite"),
    ([{"event": "error", "error": "KeyError: 'a'\nin b"}], "crashed", "KeyError: 'a'"),
    ([], "killed", "no process on this machine holds its lock"),
])
def test_states(tmp_path, rows, state, reason):
    """A run whose log has no end is not called running, unless a process holds its lock.

    Break: tests/compare.py: last["step"] < steps => last["step"] < 2
    """
    rows = [log_row(1, 3.0), log_row(2, 2.0), *rows]
    run, = compare.compare([write_run(tmp_path / "a", rows, steps=3)], png_path="")
    assert run["state"] == state
    assert run["reason"].endswith(reason) and bool(run["reason"]) == bool(reason)


def test_losses_and_rows_that_do_not_count(tmp_path, capsys):
    """Losses on other validation data or not finite, rows of a person, half a line.

    Break: tests/compare.py: row.get("validation") != start.get("validation") => False
    """
    launch = START | {"step": 1, "config": dataclasses.asdict(config.Config())}
    rows = [eval_row(1, 1.0), launch | {"validation": {"": ["other", 4]}}, eval_row(2, 3.0)]
    run, = compare.compare([write_run(tmp_path / "a", rows)], png_path="")
    assert (run["best"], run["best_step"]) == (3.0, 2)
    nan = float("nan")
    good = write_run(tmp_path / "good", [eval_row(1, nan), eval_row(2, 3.0), eval_row(3, 2.0),
                                         log_row(4, nan), eval_row(4, nan)])
    bad = write_run(tmp_path / "bad", [log_row(1, nan), eval_row(1, nan)])
    new = write_run(tmp_path / "new", [])
    with open(Path(good, "metrics.jsonl"), "a") as file:
        for line in ('{"event": "eval", "step": 5, "val_loss": NaN, "val_acc": -Infinity}',
                     '{"event": "eval", "val_loss": 0.5}', '{"event": "start", "step": 0}',
                     '{"event": "note", "text": "another rate"}', '{"event": "end"}', "7"):
            file.write(line + "\n")
        file.write(json.dumps(eval_row(6, 1.0))[:-3])
    first, *others = compare.compare([bad, new, good], png_path="")
    assert (first["run"], first["best"], first["best_step"]) == (good, 2.0, 3)
    assert math.isnan(first["last"]) and first["last_step"] == 5 and math.isnan(first["train"])
    assert [(run["run"], run["best"]) for run in others] == [(bad, None), (new, None)]
    assert others[1]["last"] is None and others[1]["train"] is None
    assert "2.0000 @3" in capsys.readouterr().out


# Lines that a person, or another tool or version, wrote into a log, and that cannot be used.
CONFIG = dataclasses.asdict(config.Config())
UNUSABLE = [json.dumps(row) for row in (
    # Fields that are missing.
    {"event": "log", "loss": 0.1}, {"event": "start", "step": 0}, {"event": "end"},
    {"event": "error"}, {"step": 41, "loss": 0.1}, {},
    # Steps.
    {"event": "log", "step": "41", "loss": 0.1}, {"event": "log", "step": -1, "loss": 0.1},
    {"event": "log", "step": True, "loss": 0.1}, {"event": "log", "step": 41.5, "loss": 0.1},
    {"event": "log", "step": 10**400, "loss": 0.1}, {"event": "save", "step": None},
    {"event": "error", "error": "by hand", "step": "41"},
    # Metrics.
    {"event": "eval", "step": 41, "val_loss": "0.1"}, {"event": "log", "step": 41, "loss": {}},
    {"event": "eval", "step": 41, "val_loss": True}, {"event": "eval", "step": 41, "val_loss": []},
    {"event": "eval", "step": 41, "val_loss": 0.1, "val_loss/code": "0.1"},
    {"event": "log", "step": 41, "loss": 0.1, "n_labels": "10"},
    {"event": "log", "step": 41, "loss": 0.1, "tokens_per_s": "fast"},
    # Times.
    {"event": "log", "step": 41, "loss": 0.1, "time_s": None},
    {"event": "log", "step": 41, "loss": 0.1, "time_s": 9.0},
    {"event": "log", "step": 41, "loss": 0.1, "time_s": {"step": "9"}},
    # Launches and ends.
    START | {"config": None}, START | {"config": {}}, START | {"config": CONFIG | {"steps": "9"}},
    START | {"config": CONFIG, "unit": 1}, START | {"config": CONFIG, "n_params": None},
    START | {"config": CONFIG, "tokens_per_step": "128"},
    END | {"step": 40, "exit_code": "0"}, END | {"step": 40, "exit_code": 1, "reason": None},
    {"event": "error", "error": None},
    # No objects, and events that are not texts.
    7, None, [], "text", {"event": ["log"], "step": 41})]
UNUSABLE += ['{"event": "log", "step"', '{"step": ' + "9" * 5000 + "}", "[" * 100_000, "\0" * 99]
# Lines that are normal: rows of hooks, metrics that are not finite, a row in UTF-8, an empty line.
NORMAL = ['{"event": "note", "step": "x"}', '{"event": "log", "step": 1, "note": "text", "z": []}',
          '{"event": "log", "step": 1, "loss": null, "n_labels": 0, "tokens_per_s": null}',
          '{"event": "log", "step": 1, "loss": -1e999, "n_labels": -3, "time_s": {"eval": null}}',
          '{"event": "log", "step": 1, "loss": null, "n_labels": null, "val_loss/a": null}',
          '{"event": "eval", "step": 1, "val_loss": -Infinity}',
          '{"event": "eval", "step": 1, "val_loss": -1' + "0" * 400 + "}",
          '{"event": "eval", "step": 1, "val_loss": 9.0, "note": "a\u2028b"}', " "]


def test_rows_of_other_types_are_skipped_and_counted(tmp_path, capsys):
    """A log with rows that cannot be used is compared without them, and their number is printed.

    Break: tests/compare.py: check_types(row, EVENTS[row["event"]]) => pass
    """
    def compared(name, lines, end="\n"):
        path = Path(write_run(tmp_path / name, rows_falling_to(2.0)))
        with open(path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write("\n".join(["", *lines]) + end)
        run, = compare.compare([str(path)], png_path="")
        shown = {key: x for key, x in run.items()
                 if key not in ("run", "name", "rows", "config", "members")}
        return shown, capsys.readouterr().err.replace(str(tmp_path), "")

    good, printed = compared("good", [])
    assert not printed and good["best"] == 2.0 and good["wall_s"] == 11.0
    for i, line in enumerate(UNUSABLE):
        message = f"/{i}/metrics.jsonl: skipped rows that cannot be used: 1\n"
        assert compared(f"{i}", [line]) == (good, message), line[:99]
    _, printed = compared("all", UNUSABLE)
    assert printed.endswith(f" used: {len(UNUSABLE)}\n")
    assert compared("being written", ['{"event": "eval", "step": 4'], end="") == (good, "")
    run, printed = compared("normal", NORMAL)
    assert not printed and run["step"] == 40 and run["best"] == 2.0 and run["last"] == 9.0
    assert math.isfinite(run["train"]) and run["units_per_s"] == 100.0

    # The metrics that are read depend on the one to sort by.
    log = tmp_path / "log"
    log.write_text("".join(f'{{"event": "log", "step": 1, "{name}": "x"}}\n'
                           for name in ("val_acc", "acc", "loss", "val_loss", "ppl")))
    assert len(compare.read_rows(log, "val_acc")) == 2

    # All of them in one picture, and a log without times, from an editor that writes a mark first.
    line = json.dumps(eval_row(1, 2.5))
    Path(tmp_path, "good/metrics.jsonl").write_text(line + "\n", encoding="utf-8-sig")
    both = compare.read_runs([str(tmp_path / "good"), str(tmp_path / "normal")])
    figure = drawn(both, tmp_path / "x.png")
    assert [len(line.get_xdata()) for line in figure.axes[1].lines] == [0, 1, 43, 43]

    # A config.json of another kind is not that of a run.
    for fields in (None, 7, ["steps"], "text", {"steps": "9"}, {"steps": None}, {"steps": -1}):
        Path(tmp_path, "good/config.json").write_text(json.dumps(fields))
        assert compare.main([str(tmp_path / "good"), "--png", ""]) == 2, fields
        assert "skipped, not a run: " in capsys.readouterr().err
    Path(tmp_path, "good/config.json").write_text('{"lr": [], "seed": null, "data": {"a": 1}}')
    assert compare.main([str(tmp_path / "good"), str(tmp_path / "normal"), "--png", ""]) == 0


def test_the_training_loss_is_a_mean_by_labels(tmp_path):
    """The mean over the last ten log rows weighs each by its labels; the speed is their median.

    Break: tests/compare.py: statistics.fmean(values, weights) => statistics.fmean(values)
    """
    rng = np.random.default_rng(0)
    losses, speeds = rng.normal(2, 1, 30), rng.normal(100, 9, 30)
    n_labels = rng.integers(1, 100, 30)
    logs = [log_row(i, *values) for i, values in enumerate(zip(losses, n_labels, speeds))]
    logs[-3] |= {"loss": None, "n_labels": 0.0, "tokens_per_s": None}
    run, = compare.compare([write_run(tmp_path / "a", logs)], png_path="")
    expected = np.average(np.delete(losses[-10:], -3), weights=np.delete(n_labels[-10:], -3))
    assert run["train"] == pytest.approx(expected, rel=1e-12)
    assert run["units_per_s"] == pytest.approx(np.median(np.delete(speeds[-10:], -3)))


def test_only_fields_that_differ(tmp_path):
    """Fields that differ have a column, also where an old config lacks them.

    Break: tests/compare.py: HIDDEN_FIELDS = {*config.LAUNCH_FIELDS, => HIDDEN_FIELDS = {
    """
    base = write_run(tmp_path / "base", [], out_dir="a", lr=1e-3)
    wide = write_run(tmp_path / "more/wide", [], out_dir="b", lr=1e-3, d_model=256, resume="never",
                     ckpt_dir="c", log_every=5, steps=9)
    runs = compare.read_runs([base, wide])
    assert [run["name"] for run in runs] == ["base", "more/wide"]
    assert compare.differing_fields(runs) == ["d_model", "log_every"]

    # A config of another task, and one from before z_loss existed.
    fields = json.loads(Path(base, "config.json").read_text())
    del fields["z_loss"]
    Path(wide, "config.json").write_text(json.dumps(fields | {"d_hidden": 7}))
    runs = compare.read_runs([base, wide])
    assert compare.differing_fields(runs) == ["d_hidden"]
    assert compare.format_field("d_hidden", runs[0]["config"].get("d_hidden")) == ""
    assert compare.format_field("lr", 3e-4) == "0.0003"


def test_the_table_fits_the_terminal(tmp_path, monkeypatch, capsys):
    """Five runs with long names fit into 120 and 60 columns; columns without room are named.

    Break: tests/compare.py: for column in kept) - 2 > width => for column in kept) > 2 * width
    """
    for i in range(5):
        write_run(tmp_path / f"data=some_long_name_of_a_file,lr={i},width={'9' * 30}{i}",
                  rows_falling_to(1 + i / 10, **{"val_loss/code": 1.0, "val_loss/prose": 2.0}),
                  lr=1e-3 * (i + 1), seed=i, data=(f"/data/{'long' * 20}/{i % 4}.txt",), steps=1000,
                  n_layers=i % 2 + 1, sample_every=i, schedule="cosine" if i else "constant")
    for width, titles in ((120, "run seed lr step best training state"),
                          (60, "run step best state")):
        monkeypatch.setenv("COLUMNS", str(width))
        compare.compare([str(tmp_path / "*")], png_path="")
        *table, last = capsys.readouterr().out.splitlines()[1:]
        assert len(table) == 6 and max(map(len, table)) <= width and "no room for" in last
        assert set(titles.split()) <= set(table[0].split())
        state, best_end = table[0].index("state"), table[0].index("best") + len("best")
        for i, line in enumerate(table[1:]):
            assert line.startswith("data=") and line[state:] == "stopped"
            assert line[:best_end].endswith(f" {1 + i / 10:.4f} @40")
    monkeypatch.delenv("COLUMNS")
    compare.compare([str(tmp_path / "*")], png_path="")
    assert "  val_loss/code  val_loss/prose  " in capsys.readouterr().out  # not a terminal


def test_sort_by_another_metric(tmp_path, capsys):
    """--by sorts by any metric; a bad --by and no run are errors with exit code 2.

    Break: tests/compare.py: direction = -1 if sign == ">" else 1 => direction = 1
    """
    low = write_run(tmp_path / "low", rows_falling_to(1.0))
    high = write_run(tmp_path / "high", rows_falling_to(2.0))
    for by, order in (("val_loss", [low, high]), ("val_loss>", [high, low]),
                      ("val_acc", [low, high]), ("val_acc<", [high, low]), ("loss", [low, high])):
        runs = compare.compare([high, low], by, png_path="")
        assert [run["run"] for run in runs] == order, by
    assert runs[0]["best"] == pytest.approx(0.9)
    for argv, message in (([low, "--by", "val_los"], "no run has logged this metric; there are"),
                          ([low, "--by", ">"], "must be the name of a metric"),
                          ([str(tmp_path)], "name folders with a config.json")):
        assert compare.main(argv) == 2
        assert message in capsys.readouterr().err
    assert compare.main([low, low, "--png", ""]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3  # the run once


# ---- seeds

def write_seeds(tmp_path):
    """Two rates of four seeds: the losses [rates, seeds, steps] at steps 10, 20, 30, and paths."""
    noise = 0.01 * np.random.default_rng(0).normal(size=(2, 4, 3))
    losses = np.array([3.0, 2.0, 1.5]) + noise
    losses[1] -= 0.1
    paths = [write_run(tmp_path / f"lr={lr},seed={seed}", [
        row for k, loss in enumerate(losses[i, seed])
        for row in (log_row(10 * k + 10, loss), eval_row(10 * k + 10, loss))]
        + [END | {"step": 30}], lr=lr, seed=seed, steps=30)
        for i, lr in enumerate((0.01, 0.02)) for seed in range(4)]
    return losses, paths


def test_runs_of_several_seeds_are_one_row(tmp_path, capsys):
    """Means with their standard errors, paired differences and how much earlier a value is reached
    are those of NumPy and SciPy. A copy of a run is no other seed.

    Break: tests/compare.py: errors = values.std(0, ddof=1) => errors = values.std(0)
    """
    losses, paths = write_seeds(tmp_path)
    rows = compare.compare(paths, png_path=str(tmp_path / "x.png"), below=1.41)
    printed = capsys.readouterr().out
    last = losses[::-1, :, -1]  # the higher rate is better
    means, errors = last.mean(1), scipy.stats.sem(last, axis=1)
    assert [row["config"]["lr"] for row in rows] == [0.02, 0.01]
    assert [row["config"]["seed"] for row in rows] == [[0, 1, 2, 3]] * 2
    np.testing.assert_allclose([row["best"] for row in rows], means, rtol=1e-12)
    np.testing.assert_allclose([row["error"] for row in rows], errors, rtol=1e-12)
    assert f"{means[1]:.4f} ±{errors[1]:.4f} @30" in printed and "lr=0.01 x4" in printed
    pairs = last[1] - last[0]
    assert f"{pairs.mean():+.4f} ±{scipy.stats.sem(pairs):.4f}" in printed
    assert "not decided" not in printed and rows[0]["difference"] == ""
    margin = 2 * (1.41 - means[0])
    assert (f"{means[0]:.4f} below 1.41? by margin x sqrt(4): {'yes' if margin >= 0.004 else 'no'} "
            f"({margin:.4f}, needs 0.004); by two standard errors: ") in printed
    assert "by two standard errors: no" in printed

    # Compared with the worse one, the better one reaches its last value between steps 20 and 30.
    better, worse = compare.compare(paths, png_path="", against=paths[2])
    curve = losses[1].mean(0)
    step = float(np.interp(-means[1], -curve, [10, 20, 30]))
    assert better["fewer_steps"] == pytest.approx(30 / step)
    assert better["less_time"] == pytest.approx((2 + 30 / 10) / (2 + step / 10))
    assert worse["difference"] == "" and worse["fewer_steps"] is None
    assert better["difference"].startswith(f"{-pairs.mean():+.4f}")

    # One seed decides nothing, and neither do two that differ by less than twice their error.
    one = compare.compare([*paths[:4], paths[5]], png_path="")[0]
    assert one["difference"] == "" and one["name"] == "lr=0.02,seed=1"
    *_, row = compare.compare([*paths[:4], paths[5]], png_path="", against=paths[0])
    assert row["difference"] == ""
    first = compare.compare([*paths[:4], paths[5]], png_path="", against=paths[0])[0]
    assert first["difference"] == f"{losses[1, 1, 2] - losses[0, 1, 2]:+.4f}, one seed: not decided"
    assert compare.main([*paths, "--against", paths[0] + "x", "--png", ""]) == 2
    assert "nearest: " in capsys.readouterr().err

    # A copy.
    shutil.copytree(paths[4], tmp_path / "copy")
    rows = compare.compare([*paths[4:], str(tmp_path / "copy")], png_path="")
    assert sorted(row["name"] for row in rows) == ["copy", "lr=0.02 x4"]


@pytest.mark.parametrize("pairs, text", [
    ([0.1, 0.32], "+0.2100 ±0.1100, not decided"), ([0.1, 0.2, 0.3], "+0.2000 ±0.0577"),
    ([-0.1], "-0.1000, one seed: not decided"), ([], "no seed in common")])
def test_a_difference_below_twice_its_error_is_not_decided(pairs, text):
    """Pairs of one seed decide only if their mean is above twice its standard error.

    Break: tests/compare.py: abs(mean) > 2 * error => abs(mean) > error
    """
    def row(values, first_seed=0):
        return {"best": 0.0, "best_step": 5, "members": [
            {"config": {"seed": first_seed + i}, "points": {5: x}} for i, x in enumerate(values)]}

    reference = row([0.0] * len(pairs)) if pairs else row([0.0], first_seed=9)
    assert compare.difference(row(pairs or [1.0]), reference) == text


def test_runs_with_the_same_states_are_named(tmp_path, capsys):
    """Runs whose last saves have the same digests are named, and all can be seen in the picture.

    Break: tests/compare.py: [saves[-1]["step"], saves[-1]["digest"]] => [len(found)]
    """
    save = {"event": "save", "step": 3, "digest": {"opt": "a1", "params": "b2"}}
    rows = [*rows_falling_to(1.0, n=3)[:-1], save, END | {"step": 3}]
    launch = START | {"step": 2, "config": dataclasses.asdict(config.Config(steps=3))}
    write_run(tmp_path / "straight", rows, steps=3)
    write_run(tmp_path / "killed", [*rows[:4], launch, *rows[4:]], steps=3)
    write_run(tmp_path / "other", [*rows[:-2], save | {"digest": {"opt": "a1", "params": "b3"}}],
              steps=3)
    runs = compare.compare([str(tmp_path / "*")], png_path=str(tmp_path / "x.png"))
    assert "bit-identical at step 3: killed, straight\n" in capsys.readouterr().out
    assert [run["name"] for run in runs if run.get("is_copy")] == ["straight"]
    assert [compare.restarts(run) for run in sorted(runs, key=lambda run: run["name"])] == [
        [2], [], []]


# ---- the picture

def drawn(runs, path):
    """The figure of these runs, the best one first."""
    for run in runs:
        run |= compare.summarize(run, "val_loss", "<", "loss")
    runs.sort(key=lambda run: run["best"])
    return compare.draw(path, runs, "val_loss", 1, "loss")


def test_curves_are_those_of_the_logs(tmp_path):
    """The picture has each evaluation over steps, over tokens where batch sizes differ, and over
    time; its range shows the ends.

    Break: tests/compare.py: if value <= top + 3 * (usual - top)) => if value < 1e9)
    """
    paths = [write_run(tmp_path / f"{i}", rows_falling_to(1 + i / 10)) for i in range(3)]
    paths.append(write_run(tmp_path / "diverged", rows_falling_to(1e6)))
    assert len(drawn(compare.read_runs(paths), tmp_path / "same.png").axes) == 2
    log = tmp_path / "diverged/metrics.jsonl"
    log.write_text(log.read_text().replace('"tokens_per_step": 128', '"tokens_per_step": 64'))
    figure = drawn(compare.read_runs(paths), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    steps = np.arange(1, 41)
    losses = 1 + 8 * np.exp(-steps) + 0.2 * (1 - steps / 40)
    seconds = 2 + steps / 10
    for axes, x in zip(figure.axes, (steps, 128 * steps, seconds), strict=True):
        assert len(axes.lines) == 8
        training, validation = axes.lines[-2:]  # the best run is above the others
        np.testing.assert_allclose(validation.get_xdata(), x, rtol=1e-12)
        np.testing.assert_allclose(validation.get_ydata(), losses, rtol=1e-12)
        np.testing.assert_allclose(training.get_xdata(), x, rtol=1e-12)
        low, high = axes.get_ylim()
        assert 0.8 < low < losses.min() - 0.1 and losses[8] + 0.2 < high < 2
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == [" 0  1.0000  stopped", " 1  1.1000  stopped", " 2  1.2000  stopped",
                     " diverged  1e+06  stopped"]
    rising = {"curves": [{"values": np.linspace(0, 0.9, 40)}]}
    assert compare.y_range([rising], -1) == pytest.approx([-0.045, 0.945])


# Names of folders, each with its form in the table and the legend.
NAMES = {"$x$": "$x$", "lr=$\\frac$": "lr=$\\frac$", "_a_{b}^%s": "_a_{b}^%s", "__": "__",
         "a\nb\t": "a\\nb\\t", "\x1b[31m": "\\x1b[31m", "bad\udcff": "bad\\udcff", "é": "é",
         "lr=[1,2]": "lr=[1,2]", "n" * 200: "n" * 19 + ".." + "n" * 19}


def test_names_are_no_formulas_and_break_no_line(tmp_path, capsys, monkeypatch):
    """Names of runs, metrics, units and fields are drawn as they are, with escapes for newlines.

    Break: tests/compare.py: text.set_parse_math(False) => pass
    """
    monkeypatch.setenv("COLUMNS", "10000")
    by = "_$\\frac$"
    paths = []
    for i, name in enumerate(NAMES):
        rows = [{"event": "eval", "step": 1, by: i / 10, f"{by}/\n$": 1.0}, log_row(2, 1.0),
                {"event": "end", "step": 2, "exit_code": 1, "reason": "a\nb"}]
        paths.append(write_run(tmp_path / name, rows, seed=i, data=("$\n",) * i))
        text = Path(paths[-1], "metrics.jsonl").read_text()
        Path(paths[-1], "metrics.jsonl").write_text(text.replace("token", "_$\\\\frac"))
    write_run(tmp_path / "lr=1", rows)  # the pattern lr=[1,2] matches it
    runs = compare.compare(paths, by, str(tmp_path / "x.png"))
    lines = capsys.readouterr().out.splitlines()
    table = [line.split()[0] for line in lines if "  failed" in line]
    assert [name[:19] for name in table] == [name[:19] for name in NAMES.values()]
    assert len(lines) == 3 + 2 * len(NAMES)  # a row and a reason for each
    figure = compare.draw(tmp_path / "x.png", runs, by, 1, "loss")
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == [f" {name}  {i / 10:.4f}  failed" for i, name in enumerate(NAMES.values())]


def test_without_docstrings_and_in_ascii(tmp_path):
    """`python -OO`, which removes docstrings, and a terminal without a letter of a name.

    Break: tests/compare.py: (__doc__ or "").partition => __doc__.partition
    """
    run = write_run(tmp_path / "é", rows_falling_to(1.0))
    done = subprocess.run(
        [sys.executable, "-OO", compare.__file__, run, "--png", str(tmp_path / "x.png")],
        capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and b"\n\\xe9 " in done.stdout, done.stderr
    for path in (*ROOT.glob("*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("tests/recipes/*.py")):
        if path.name != "test_compare.py":
            assert "__doc__." not in path.read_text(), f"{path}: it is None under -OO"


def test_many_runs_have_a_short_legend(tmp_path):
    """Of thirty runs the best ten have a colour each; the others are grey and share a line.

    Break: tests/compare.py: elif i == N_COLOURED: => elif i >= N_COLOURED:
    """
    for i in range(30):
        write_run(tmp_path / f"run{i}", rows_falling_to(1 + i / 100, n=3), steps=3)
    figure = drawn(compare.read_runs([str(tmp_path / "*")]), tmp_path / "x.png")
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [text.split()[0] for text in texts[:10]] == [f"run{i}" for i in range(10)]
    assert texts[10:] == ["20 more"]
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert len(set(colours)) == 11 and colours.count("lightgrey") == 40


def test_smoothing_agrees_with_a_loop():
    """A smoothed curve is the mean over 4% of the points on each side, without NaN.

    Break: tests/compare.py: np.where(is_finite, values, 0), window => values, window
    """
    values = np.random.default_rng(0).normal(size=100)
    values[50] = math.nan
    expected = [math.nan if i == 50 else np.nanmean(values[max(0, i - 4):i + 5])
                for i in range(100)]
    np.testing.assert_allclose(compare.smooth(values), expected, rtol=1e-12)
    assert compare.smooth(np.array([])).tolist() == []
    assert compare.smooth(np.array([2.0])).tolist() == [2.0]


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    """Without matplotlib the table is printed; a picture that was asked for is an error.

    Break: tests/compare.py: if png_path and not can_draw: => if png_path == 0:
    """
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "a", rows_falling_to(1.0))
    assert compare.main([run]) == 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert compare.main([run, "--png", "a.png"]) == 2
    printed, error = capsys.readouterr()
    assert "--png: matplotlib is not installed" in error and not printed
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_branch_begins_at_its_parent(tmp_path):
    """The curve of a branch begins at its parent's, in a lighter shade of the same colour. A mean
    over seeds has a band.

    Break: tests/compare.py: run["branch_step"] = int(step) => run["branch_step"] = 0 * int(step)
    """
    parent = write_run(tmp_path / "parent", rows_falling_to(1.0, n=20), steps=20)
    rows = [row for row in rows_falling_to(0.9, n=20) if row["step"] > 10]
    write_run(tmp_path / "branch", rows, steps=20, branch_from=f"{parent}@10")
    figure = drawn(compare.read_runs([str(tmp_path / "*")]), tmp_path / "x.png")
    joints = [line.get_xydata().tolist() for line in figure.axes[0].lines
              if line.get_marker() == "D"]
    loss = 1 + 8 * math.exp(-10) + 0.1
    assert joints == [[[10, pytest.approx(loss - 0.1, abs=1e-3)]], [[10, pytest.approx(loss)]]]
    colours = {line.get_label().split()[0]: line.get_color() for line in figure.axes[0].lines
               if not line.get_label().startswith("_")}
    lighter = np.array(colours["branch"]) - to_rgb(colours["parent"])
    assert colours["parent"] == "C1" and lighter.min() >= 0 and lighter.max() > 0.1
    losses, paths = write_seeds(tmp_path / "seeds")
    rows = compare.compare(paths, png_path=str(tmp_path / "y.png"))
    band = compare.mean_curve(rows[0], "eval", "val_loss")["errors"]
    np.testing.assert_allclose(band, scipy.stats.sem(losses[1], axis=0), rtol=1e-12)
