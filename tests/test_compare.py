# SPDX-License-Identifier: Apache-2.0
"""compare.py on real runs of train.py, and on logs that a run writes rarely."""
import csv
import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt
import compare
import config
import train

# ---- real runs

def test_runs_that_train_stop_resume_and_fail(tiny, tmp_path, capsys):
    """The table of runs of train.py, while they run and afterwards: state, steps, best and last
    loss, and the time of all launches are those of the summary and the log.

    Break: tests/compare.py: fcntl.LOCK_SH | fcntl.LOCK_NB => fcntl.LOCK_UN
    """
    first = tiny(out_dir=str(tmp_path / "seed=0"))
    second = tiny(out_dir=str(tmp_path / "seed=1"), seed=1)
    crashed = tiny(out_dir=str(tmp_path / "bad"), seed=2)
    during = []

    def compare_now(event, row):
        if event == "eval":
            during.append(compare.compare([first.out_dir], png_path=""))

    def fail(event, row):
        if event == "log" and row["step"] == 2:
            raise RuntimeError("no luck\nat all")

    # The first run stops, resumes and finishes. It is compared at each evaluation.
    stopped = train.main(dataclasses.replace(first, stop=("5",)), hooks=[compare_now])
    after_stop, = compare.compare([first.out_dir], png_path="")
    assert (after_stop["state"], after_stop["step"], after_stop["steps"]) == ("stopped", 5, 8)
    finished = train.main(first, hooks=[compare_now])
    assert [row["state"] for row, in during] == ["running"] * 2
    assert [(row["best_step"], row["steps"]) for row, in during] == [(None, 8), (4, 8)]
    other = train.main(second)
    with pytest.raises(RuntimeError):
        train.main(crashed, hooks=[fail])

    # The best run comes first, that without an evaluation last.
    capsys.readouterr()
    rows = compare.compare([str(tmp_path / "*")], png_path="")
    ends = {first.out_dir: finished, second.out_dir: other}
    by_loss = sorted(ends, key=lambda out_dir: ends[out_dir]["val_loss"])
    assert [row["run"] for row in rows] == [*by_loss, crashed.out_dir]
    for row in rows[:2]:
        end = ends[row["run"]]
        assert (row["state"], row["step"], row["last_step"]) == ("finished", 8, 8)
        assert row["last"] == end["val_loss"]
        assert row["wall_s"] == sum(end["time_s"].values())
        assert row["n_params"] == sum(x.size for x in end["state"]["params"].values())
    one = next(row for row in rows if row["run"] == first.out_dir)
    assert one["wall_s"] > stopped["wall_s"] + finished["wall_s"] - 1
    losses = [row["val_loss"] for row in ckpt.read_log(first.out_dir) if row["event"] == "eval"]
    assert one["best"] == min(losses)
    assert (rows[2]["state"], rows[2]["reason"]) == ("crashed", "RuntimeError: no luck")

    # What is printed: the seed is the only field that differs.
    printed, notes = capsys.readouterr()
    lines = printed.splitlines()
    assert lines[1].split()[:3] == ["run", "seed", "step"]
    assert lines[2].split()[0] == Path(by_loss[0]).name
    assert lines[-1] == "bad: RuntimeError: no luck"
    assert "skipped, not a run" in notes and "text.txt" in notes  # beside the runs


# ---- logs made by hand

START = {"event": "start", "step": 0, "unit": "token", "tokens_per_step": 128, "n_params": 1000,
         "time_s": {"compile": 2.0, "step": 0.0}}
END = {"event": "end", "exit_code": 0, "reason": "", "time_s": {"compile": 2.0, "step": 9.0}}


def write_run(folder, rows, locked=True, **fields):
    """Write the folder of a run with these rows after its start, and return its path."""
    folder.mkdir(parents=True)
    cfg = config.Config(**fields)
    (folder / "config.json").write_text(config.to_json(cfg))
    rows = [START | {"config": dataclasses.asdict(cfg)}, *rows]
    lines = [ckpt.json_line(row) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if locked:
        (folder / ".lock").touch()
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


@pytest.mark.parametrize("rows, locked, state, reason", [
    ([END | {"step": 3}], True, "finished", ""),
    ([END | {"step": 2}], True, "stopped", ""),
    ([END | {"step": 3, "exit_code": 1, "reason": "not finite"}], True, "failed", "not finite"),
    ([{"event": "error", "error": "KeyError: 'a'\nin b"}], True, "crashed", "KeyError: 'a'"),
    ([], True, "killed", "no process on this machine holds its lock"),
    ([], False, "unknown", "is not known"),
])
def test_states(tmp_path, rows, locked, state, reason):
    """A run whose log has no end is not called running, unless a process holds its lock.

    Break: tests/compare.py: last["step"] < run["config"]["steps"] => last["step"] < 2
    """
    rows = [log_row(1, 3.0), log_row(2, 2.0), *rows]
    row, = compare.compare([write_run(tmp_path / "a", rows, locked, steps=3)], png_path="")
    assert row["state"] == state
    assert row["reason"].endswith(reason) and bool(row["reason"]) == bool(reason)


def test_losses_that_are_not_finite_and_a_torn_line(tmp_path, capsys):
    """A loss that is null is never the best one, a run without any other comes last, and a line
    that is being written does not count.

    Break: tests/compare.py: if row[by] is not None] => if row["step"] > 0]
    """
    nan = float("nan")
    good = write_run(tmp_path / "good", [eval_row(1, nan), eval_row(2, 3.0), eval_row(3, 2.0),
                                         log_row(4, nan), eval_row(4, nan)])
    bad = write_run(tmp_path / "bad", [log_row(1, nan), eval_row(1, nan)])
    new = write_run(tmp_path / "new", [])
    with open(Path(good, "metrics.jsonl"), "a") as file:
        file.write(json.dumps(eval_row(5, 1.0))[:-3])
    first, *others = compare.compare([bad, new, good], png_path="")
    assert (first["run"], first["best"], first["best_step"]) == (good, 2.0, 3)
    assert math.isnan(first["last"]) and first["last_step"] == 4 and math.isnan(first["train"])
    assert [(row["run"], row["best"]) for row in others] == [(bad, None), (new, None)]
    assert others[1]["last"] is None and others[1]["train"] is None
    assert "2.0000 @3" in capsys.readouterr().out


@pytest.mark.parametrize("line", [
    '{"event": "eval", "step": 1, "val_loss": NaN}',
    '{"event": "eval", "step": 1, "val_loss": -Infinity}',
    '{"event": "eval", "step": 1, "val_loss": -1e999}',
    '{"event": "eval", "step": 1, "val_loss": "0.5"}',
    '{"event": "eval", "step": "1", "val_loss": 0.5}',
    '{"event": "eval", "val_loss": 0.5}',
    '{"event": "log", "step": 1, "loss": 0.5, "time_s": 5}',
    '{"event": "log", "step": 1, "loss": [0.5], "n_labels": "ten", "tokens_per_s": {}}',
    '{"event": "note", "text": "another rate from here"}', '{"event": ["eval"]}',
    '{"step": 1}', "7",
    '{"event": "start", "step": 0}', '{"event": "end"}', '{"event": "error", "error": null}',
])
def test_rows_that_no_run_wrote_change_nothing(tmp_path, line):
    """A row of a person or of another program, or a bare NaN, neither ends the comparison nor
    changes the order of the runs.

    Break: tests/compare.py: value if is_finite else None => value
    """
    good = write_run(tmp_path / "good", rows_falling_to(1.0))
    bad = write_run(tmp_path / "bad", rows_falling_to(2.0))
    path = Path(bad, "metrics.jsonl")
    path.write_text(line + "\n" + path.read_text())
    rows = compare.compare([bad, good], png_path=str(tmp_path / "curves.png"))
    assert [row["run"] for row in rows] == [good, bad]
    assert [row["best"] for row in rows] == pytest.approx([1.0, 2.0], abs=1e-6)


def test_training_mean_is_by_labels():
    """The mean over the last log rows weighs each row by its labels; a row without a label does not
    count, although its loss is null.

    Break: tests/compare.py: total += weight * value => total += value
    """
    rng = np.random.default_rng(0)
    losses = rng.normal(2, 1, 30)
    n_labels = rng.integers(1, 100, 30)
    logs = [log_row(i, *pair) for i, pair in enumerate(zip(losses, n_labels, strict=True))]
    expected = np.average(losses[-10:], weights=n_labels[-10:])
    assert compare.training_mean(logs, "loss") == pytest.approx(expected, rel=1e-12)
    logs[-3] |= {"loss": None, "n_labels": 0.0}
    expected = np.average(np.delete(losses[-10:], -3), weights=np.delete(n_labels[-10:], -3))
    assert compare.training_mean(logs, "loss") == pytest.approx(expected, rel=1e-12)


def test_speed_is_that_of_the_newest_launch():
    """The speed is the median of the newest launch with a log row, not of a run on two machines.

    Break: tests/compare.py: statistics.median(speeds[-1]) => statistics.median(speeds[0])
    """
    rows = [START, log_row(1, 2.0, speed=10.0), START, log_row(2, 2.0, speed=90.0),
            log_row(3, 2.0, speed=500.0), log_row(4, 2.0, speed=100.0), START]
    assert compare.median_speed(rows, "token") == 100.0
    assert compare.median_speed([START], "token") is None


def test_only_fields_that_differ(tmp_path):
    """Fields that differ have a column, also where an old config lacks them; sizes that follow from
    others, folders and fields of one launch have none.

    Break: tests/compare.py: HIDDEN_FIELDS = {*config.LAUNCH_FIELDS, => HIDDEN_FIELDS = {
    """
    base = config.derive_text(config.Config(vocab_size=256, out_dir="a", lr=1e-3))
    wide = config.derive_text(config.Config(vocab_size=256, out_dir="b", lr=1e-3, d_model=256,
                                            resume="never", ckpt_dir="c", log_every=5, steps=9))
    assert (wide.d_ff, wide.head_dim) != (base.d_ff, base.head_dim)
    odd = dataclasses.replace(base, d_ff=64)
    paths = []
    for name, cfg in {"base": base, "wide": wide, "odd": odd}.items():
        paths.append(write_run(tmp_path / name, [], **dataclasses.asdict(cfg)))
    runs = compare.read_runs([*paths, write_run(tmp_path / "more" / "wide", [])])
    assert [run["name"] for run in runs] == ["base", "wide", "odd", "more/wide"]
    assert compare.differing_fields(runs[:2]) == ["d_model", "log_every"]
    assert compare.differing_fields(runs[::2]) == ["d_ff"]

    # A config of another task, and one from before z_loss existed.
    fields = dataclasses.asdict(base)
    del fields["z_loss"]
    old = START | {"config": fields | {"d_hidden": 7}}
    (tmp_path / "odd" / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    runs = compare.read_runs([paths[0], paths[2]])
    assert compare.differing_fields(runs) == ["d_hidden"]
    assert compare.format_field("d_hidden", runs[0]["config"].get("d_hidden")) == ""
    assert compare.format_field("lr", 3e-4) == "0.0003"


def test_the_table_fits_the_terminal(tmp_path, monkeypatch, capsys):
    """Five runs with long names and values fit into 120 columns, aligned. In 60 columns the names
    and the best losses are left, and the columns without room are named.

    Break: tests/compare.py: used + 2 + column["width"] <= width => used + column["width"] <= width
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
        table = capsys.readouterr().out.splitlines()[1:-1]
        assert len(table) == 6 and max(map(len, table)) <= width
        assert set(titles.split()) <= set(table[0].split())
        state, best_end = table[0].index("state"), table[0].index("best") + len("best")
        for i, line in enumerate(table[1:]):
            assert line.startswith("data=") and line[state:] == "stopped"
            assert line[:best_end].endswith(f" {1 + i / 10:.4f} @40")


def test_csv_has_everything_uncut(tmp_path):
    """The CSV file has one row per run, with all fields that differ, and each validation set at the
    best step.

    Break: tests/compare.py: named[name] = nan_if_null(value) => named[name] = 0.0
    """
    long_name = "x" * 200
    write_run(tmp_path / long_name, rows_falling_to(1.5, **{"val_loss/code": 1.25}), seed=1,
              data=("a.txt", "b.txt"), steps=40)
    write_run(tmp_path / "b", rows_falling_to(1.0), steps=40)
    path = tmp_path / "runs.csv"
    rows = compare.compare([str(tmp_path / "*")], csv_path=str(path), png_path="")
    with open(path, newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (Path(first["run"]).name, Path(second["run"]).name) == ("b", long_name)
    assert (second["seed"], second["data"], first["data"]) == ("1", "a.txt b.txt", "")
    assert (second["val_loss/code"], first["val_loss/code"]) == ("1.25", "")
    assert float(second["best val_loss"]) == rows[1]["best"] == pytest.approx(1.5)
    assert (second["best step"], second["state"], second["wall_s"]) == ("40", "finished", "11.0")


def test_sort_by_another_metric(tmp_path, capsys):
    """--by sorts by any metric, from the side that > or < says is better. An unknown metric, a bad
    --by and no run are errors with exit code 2.

    Break: tests/compare.py: return False, -best if sign == ">" else best => return False, best
    """
    low = write_run(tmp_path / "low", rows_falling_to(1.0))
    high = write_run(tmp_path / "high", rows_falling_to(2.0))
    for by, order in (("val_loss", [low, high]), ("val_loss>", [high, low]),
                      ("val_acc", [low, high]), ("val_acc<", [high, low]), ("loss", [low, high])):
        rows = compare.compare([high, low], by, png_path="")
        assert [row["run"] for row in rows] == order, by
    assert rows[0]["best"] == pytest.approx(0.9)
    for argv, message in (([low, "--by", "val_los"], "no run has logged this metric; there are"),
                          ([low, "--by", ">"], "must be the name of a metric"),
                          ([str(tmp_path)], "name folders with a config.json"),
                          ([low, "--png", "", "--csv", str(tmp_path / "no/x.csv")], "no/x.csv")):
        assert compare.main(argv) == 2
        assert message in capsys.readouterr().err
    assert compare.main([low, low, "--png", ""]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3  # the run once


# ---- the picture

def test_curves_are_those_of_the_logs(tmp_path):
    """The picture has each evaluation over steps, tokens and wall time. Its range shows the ends of
    the curves, and neither their first steps nor a run that diverged.

    Break: tests/compare.py: if value <= top + 3 * (usual - top)) => if value < 1e9)
    """
    paths = [write_run(tmp_path / f"{i}", rows_falling_to(1 + i / 10)) for i in range(3)]
    diverged = rows_falling_to(1e6)
    paths.append(write_run(tmp_path / "diverged", diverged))
    runs = compare.read_runs(paths)
    for run in runs:
        run["summary"] = compare.summarize(run, "val_loss", "<", "loss")
    figure = compare.draw(tmp_path / "curves.png", runs, "val_loss", "<", "loss")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    steps = np.arange(1, 41)
    losses = 1 + 8 * np.exp(-steps) + 0.2 * (1 - steps / 40)
    for axes, x in zip(figure.axes, (steps, 128 * steps, 2 + steps / 10), strict=True):
        assert len(axes.lines) == 8
        training, validation = axes.lines[-2:]  # the best run is above the others
        np.testing.assert_allclose(validation.get_xdata(), x, rtol=1e-12)
        np.testing.assert_allclose(validation.get_ydata(), losses, rtol=1e-12)
        np.testing.assert_allclose(training.get_xdata(), x, rtol=1e-12)
        low, high = axes.get_ylim()
        assert 0.8 < low < losses.min() - 0.1 and losses[8] + 0.2 < high < 2
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["0  1.0000  stopped", "1  1.1000  stopped", "2  1.2000  stopped",
                     "diverged  1e+06  stopped, outside"]


def test_many_runs_have_a_short_legend(tmp_path):
    """Of thirty runs the best twelve have a colour each; the others are grey and share one line of
    the legend.

    Break: tests/compare.py: n_named = min(len(runs), N_COLOURED) => n_named = len(runs)
    """
    for i in range(30):
        write_run(tmp_path / f"run{i}", rows_falling_to(1 + i / 100, n=3), steps=3)
    runs = compare.read_runs([str(tmp_path / "*")])
    for run in runs:
        run["summary"] = compare.summarize(run, "val_loss", "<", "loss")
    runs.sort(key=lambda run: run["summary"]["best"])
    figure = compare.draw(tmp_path / "x.png", runs, "val_loss", "<", "loss")
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [text.split()[0] for text in texts[:12]] == [f"run{i}" for i in range(12)]
    assert len(texts) == 13 and texts[12] == "18 more"
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert len(set(colours)) == 13 and colours.count("lightgrey") == 36


def test_smoothing_agrees_with_a_loop():
    """A smoothed curve is the mean over 4% of the points on each side, without NaN, over equally
    many on both sides near the start.

    Break: tests/compare.py: (positions >= abs(offset)) & => (positions >= -offset) &
    """
    values = list(np.random.default_rng(0).normal(size=100))
    values[50] = math.nan
    expected = []
    for i in range(100):
        before = min(4, i)
        near = [x for x in values[i - before:i + before + 1] if not math.isnan(x)]
        expected.append(math.nan if i == 50 else sum(near) / len(near))
    np.testing.assert_allclose(compare.smooth(values), expected, rtol=1e-12)
    assert compare.smooth([]) == [] and compare.smooth([2.0]) == [2.0]


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    """Without matplotlib the table is printed, with a sentence on the curves. A picture that was
    asked for is an error.

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
    shutil.rmtree(run)
    assert compare.main([run]) == 2
