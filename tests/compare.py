# SPDX-License-Identifier: Apache-2.0
"""Compare runs: a table, and a picture of their curves. Also while they train.

    python tests/compare.py out/*
    python tests/compare.py out/* --by 'val_acc>' --png curves.png

Reads only config.json, metrics.jsonl and the lock of each folder, and needs no JAX. The table has
the fields in which the configs differ, and the best run first.
"""
import argparse
import fcntl
import glob
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config

MEAN_ROWS = 10  # newest log rows over which a training metric is averaged
# Fields that say nothing about a result: those of one launch, and names of folders. The table has a
# column for the steps.
HIDDEN_FIELDS = {*config.LAUNCH_FIELDS, "out_dir", "ckpt_dir", "export", "cache_dir", "token_cache",
                 "steps"}
# Events to read from metrics.jsonl, with fields that each row of them has, and their types.
EVENTS = {
    "start": {"step": int, "unit": str, "config": dict, "n_params": int},
    "log": {"step": int},
    "eval": {"step": int},
    "save": {"step": int},
    "end": {"step": int, "exit_code": int, "reason": str},
    "error": {"step": int, "error": str},
}


def main(argv):
    """Compare the runs that a command line names. Return the exit code: 2 for invalid input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", help="folders of runs, or globs such as 'out/*'")
    parser.add_argument("--by", default="val_loss",
                        help="metric to sort by, as val_loss, 'val_acc>' (the highest first) or "
                             "'loss<' (the lowest first); default: val_loss")
    parser.add_argument("--png", help="file for the picture; '' for none; default: compare.png")
    args = parser.parse_args(argv)
    try:
        compare(args.folders, args.by, args.png)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def compare(folders, by="val_loss", png_path=None):
    """Print a table of the runs and write a picture. Return the runs, the best one first.

    by: metric to sort by, with a sign > or < that says which end is better. png_path: "" for no
    picture; None for compare.png if matplotlib is installed.
    """
    found = re.fullmatch(r"([^<>]+)([<>]?)", by)
    if not found:
        raise ValueError(f"--by {by!r}: must be the name of a metric, as val_loss, 'val_acc>' or "
                         "'val_loss<'")
    by, sign = found.groups()
    sign = sign or config.better_sign(by) or "<"
    can_draw = importlib.util.find_spec("matplotlib") is not None
    missing = "matplotlib is not installed: pip install matplotlib"
    if png_path and not can_draw:
        raise ValueError(f"--png: {missing}")

    # Read and summarize the runs, and sort them. Those without a value come last.
    runs = read_runs(folders, by)
    train_name = training_metric(by, runs)
    for run in runs:
        run |= summarize(run, by, sign, train_name)
    direction = -1 if sign == ">" else 1
    runs.sort(key=lambda run: math.inf if run["best"] is None else direction * run["best"])
    fields = differing_fields(runs)

    # Draw first: whoever reads the table may close it early.
    curves = "" if png_path == "" else f"no curves are drawn: {missing}"
    if png_path != "" and can_draw:
        draw(png_path or "compare.png", runs, by, direction, train_name)
        curves = f"curves: {png_path or 'compare.png'}"

    width = shutil.get_terminal_size((10_000, 24)).columns  # without a terminal nothing is cut
    order = "highest" if sign == ">" else "lowest"
    reasons = [f"{run['name']}: {printable(run['reason'])}" for run in runs if run["reason"]]
    print(f"by {by}, the {order} first; training {train_name}: mean over the last {MEAN_ROWS} log "
          "rows, by labels")
    print("\n".join([*format_table(table_columns(runs, fields, by), width), *reasons]))
    if curves:
        print(curves)
    return runs


# ---- reading runs

def read_runs(folders, by="val_loss"):
    """[{"run" (its path), "name" (to show), "config", "rows"}] of the folders that are runs."""
    paths = []
    for text in folders:
        # The name of a folder, as lr=[1,2], may also be a pattern that matches others.
        matches = [] if os.path.exists(text) else sorted(glob.glob(text))
        paths += matches or [text]
    runs = []
    skipped = []
    # A field that an older config lacks has its default.
    defaults = json.loads(config.to_json(config.Config()))
    for path in dict.fromkeys(map(os.path.realpath, paths)):
        try:
            fields = defaults | json.loads(Path(path, "config.json").read_bytes())
            check_types(fields, {"steps": int})
            rows = read_rows(Path(path, "metrics.jsonl"), by)
        except (OSError, ValueError, TypeError, RecursionError):
            skipped.append(path)
            continue
        runs.append({"run": path, "config": fields, "rows": rows})
    if skipped:
        print(f"skipped, not a run: {listed(skipped, 5)}", file=sys.stderr)
    if not runs:
        raise ValueError(f"no run in {' '.join(folders)}: name folders with a config.json and a "
                         "metrics.jsonl, as out/*")

    # Without the folders that all have in common.
    common = os.path.commonpath([os.path.dirname(run["run"]) for run in runs])
    for run in runs:
        run["name"] = printable(os.path.relpath(run["run"], common))
    return runs


def read_rows(path, by):
    """The rows of metrics.jsonl of known events. Rows that cannot be used, as they were edited or
    come from another tool, are skipped, and their number is printed.
    """
    rows = []
    n_skipped = 0
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
                if row["event"] in EVENTS:
                    rows.append(checked_row(row, by))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                is_being_written = not line.endswith("\n")
                if not is_being_written and not line.isspace():
                    n_skipped += 1
    if n_skipped:
        print(f"{path}: skipped rows that cannot be used: {n_skipped}", file=sys.stderr)
    return rows


def checked_row(row, by):
    """The row without histograms, and with the sum of time_s. Raises an error if a field that the
    rest reads is missing or has another type.
    """
    if row["event"] == "error":
        row = {"step": 0} | row  # it ends a log, and has no step
    check_types(row, EVENTS[row["event"]])
    if row["event"] == "start":
        check_types(row["config"], {"steps": int})
    row.pop("watch", None)
    metrics = (by, by.removeprefix("val_"), "loss", "n_labels")
    for name, x in row.items():
        if name == "time_s":
            row[name] = sum(map(as_number, x.values()))
        elif name.partition("/")[0] in metrics or name.endswith(("s_per_s", "s_per_step")):
            row[name] = as_number(x)
    return row


def check_types(fields, types):
    """Raise TypeError or KeyError unless the fields have these types. Each integer is a count."""
    for name, kind in types.items():
        x = fields[name]
        if type(x) is not kind or (kind is int and not 0 <= x < 2**53):
            raise TypeError(f"{name} is {x!r}")


def as_number(x):
    """The number; NaN for null, as JSON has no NaN, and for numbers too large for sums."""
    if x is not None and type(x) not in (int, float):
        raise TypeError(f"{x!r} is not a number")
    return x if x is not None and abs(x) < 1e100 else math.nan


def training_metric(by, runs):
    """The metric of training beside `by`: loss, if it has none. ValueError if no run has `by`."""
    logged = {"log": set(), "eval": set()}
    for run in runs:
        for row in run["rows"]:
            if row["event"] in logged:
                logged[row["event"]].update(
                    name for name, x in row.items() if isinstance(x, int | float))
    names = logged["log"] | logged["eval"]
    is_awaited = by.startswith("val_") and not logged["eval"]
    if names and by not in names and not is_awaited:
        raise ValueError(f"--by {by}: no run has logged this metric; there are "
                         f"{', '.join(sorted(names))}")
    name = by.removeprefix("val_")
    return name if name in logged["log"] else "loss"


# ---- what a run has reached

def summarize(run, by, sign, train_name):
    """What the table shows of a run: a dict with None for what is not known yet."""
    rows = run["rows"]
    logs = [row for row in rows if row["event"] == "log"]
    points = []
    start = {"unit": "", "n_params": None, "config": run["config"]}
    for row in rows:
        if row["event"] == "start":
            # What was measured on other validation data does not count.
            if by.startswith("val_") and row.get("validation") != start.get("validation"):
                points = []
            start = row
        elif row["event"] in ("log", "eval") and by in row:
            points.append(row)

    # The best value with its step and that of each validation set, and the last value.
    finite = [row for row in points if math.isfinite(row[by])]
    choose = max if sign == ">" else min
    best = choose(finite, key=lambda row: row[by], default={})
    last = points[-1] if points else {}

    # Means of the newest log rows. One without a label has no loss.
    values, weights = [], []
    for row in logs[-MEAN_ROWS:]:
        if train_name in row and row.get("n_labels", 1) > 0:
            values.append(row[train_name])
            weights.append(row.get("n_labels", 1))
    speed = f"{start['unit']}s_per_s"
    speeds = [row[speed] for row in logs[-MEAN_ROWS:] if math.isfinite(row.get(speed, math.nan))]
    times = [row["time_s"] for row in rows if "time_s" in row]

    state, reason = state_of(run["run"], rows, start["config"]["steps"])
    return {
        "step": max((row["step"] for row in rows), default=0),
        "steps": start["config"]["steps"],
        "best": best.get(by),
        "best_step": best.get("step"),
        "last": last.get(by),
        "last_step": last.get("step"),
        "named": {name: x for name, x in best.items() if name.startswith(f"{by}/")},
        "train": statistics.fmean(values, weights) if values else None,
        "unit": start["unit"],
        "units_per_s": statistics.median(speeds) if speeds else None,
        "wall_s": times[-1] if times else None,
        "n_params": start["n_params"],
        "state": state,
        "reason": reason,
    }


def state_of(path, rows, steps):
    """(state, reason why it is not a good end, or "") of a run, as far as its folder shows it."""
    last = rows[-1] if rows else {"event": ""}
    if last["event"] == "error":
        return "crashed", last["error"].partition("\n")[0]
    if last["event"] == "end" and last["exit_code"]:
        return "failed", last["reason"]
    if last["event"] == "end" and last["step"] < steps:
        return "stopped", ""
    # Without an end, a run is being written, or was killed, perhaps after its last save.
    if last["event"] != "end" and is_locked(path):
        return "running", ""
    if last["event"] == "end" or (last["event"] == "save" and last["step"] == steps):
        return "finished", ""
    return "killed", "its log has no end, and no process on this machine holds its lock"


def is_locked(path):
    """Whether a process on this machine holds the lock of a run's folder.

    The test takes the lock for an instant, since /proc/locks lacks the locks of other containers. A
    killed run that resumes in that instant would be refused; state_of tests no other run.
    """
    try:
        with open(Path(path, ".lock"), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


# ---- the table

def differing_fields(runs):
    """Fields in which the configs differ: first those that define a run, then the others."""
    names = dict.fromkeys(name for run in runs for name in run["config"])
    differing = [name for name in names if name not in HIDDEN_FIELDS and n_values(runs, name) > 1]
    return sorted(differing, key=lambda name: name in config.RESUMABLE_FIELDS)


def n_values(runs, name):
    return len({json.dumps(run["config"].get(name)) for run in runs})


def format_field(name, value):
    """The value of a field as on a command line; "-" if it is empty, "" if a task lacks it."""
    if value is None:
        return ""
    if name == "lr" and value == -1:
        return "default"
    if isinstance(value, list):
        value = " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value) or "-"


def table_columns(runs, fields, by):
    """Columns [{"title", "rank", "cells"}]; without room those of the highest ranks go."""
    columns = []

    def add(title, rank, cells):
        cells = list(map(printable, cells))
        columns.append({"title": printable(title), "rank": rank, "cells": cells})

    add("run", 0, (run["name"] for run in runs))
    for name in fields:
        # A field with many values first. One that may change when a run resumes is the first to go.
        rank = 9 if name in config.RESUMABLE_FIELDS else 3 - n_values(runs, name) / len(runs)
        add(name, rank, (format_field(name, run["config"].get(name)) for run in runs))
    add("step", 1, (str(run["step"]) if run["step"] == run["steps"]
                    else f"{run['step']}/{run['steps']}" for run in runs))
    add("best", 0, format_points(runs, "best"))
    add("last", 6, format_points(runs, "last"))
    for name in dict.fromkeys(name for run in runs for name in run["named"]):
        add(name, 10, (format_metric(run["named"].get(name)) for run in runs))
    add("training", 4, (format_metric(run["train"]) for run in runs))
    units = sorted({f"{run['unit']}s/s" for run in runs if run["unit"]})
    add(" or ".join(units), 5, ("" if run["units_per_s"] is None else f"{run['units_per_s']:,.0f}"
                                for run in runs))
    add("time", 7, (format_seconds(run["wall_s"]) for run in runs))
    add("params", 8, (f"{(run['n_params'] or 0) / 1e6:,.2f}M" for run in runs))
    add("state", 1, (run["state"] for run in runs))
    return columns


def format_points(runs, name):
    """Texts such as "1.3186 @600" of the metric `name` and its step, aligned."""
    width = max(len(str(run[f"{name}_step"])) for run in runs)
    texts = []
    for run in runs:
        text = format_metric(run[name])
        if text:
            text += f" @{run[f'{name}_step']:<{width}}"
        texts.append(text)
    return texts


def format_metric(x):
    if x is None:
        return ""
    if math.isnan(x) or 0.001 <= abs(x) < 10_000 or x == 0:
        return f"{x:.4f}"
    return f"{x:.3g}"


def format_seconds(seconds):
    """A duration as 81s, 12m30s or 3h05m."""
    if seconds is None or math.isnan(seconds):
        return ""
    seconds = round(seconds)
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"


def format_table(columns, width):
    """The lines of the table. Columns for which there is no room are named below it."""
    longest = max(20, width // 6)
    for column in columns:
        column["texts"] = [shorten(text, longest) for text in (column["title"], *column["cells"])]
        column["width"] = max(map(len, column["texts"]))
    kept = list(columns)
    while sum(column["width"] + 2 for column in kept) - 2 > width and len(kept) > 1:
        kept.remove(max(kept, key=lambda column: column["rank"]))

    lines = [""] * len(columns[0]["texts"])
    for column in kept:
        # Texts at the left, numbers at the right.
        has_number = any(cell[:1].isdigit() for cell in column["cells"])
        align = ">" if has_number else "<"
        for i, text in enumerate(column["texts"]):
            lines[i] += f"{text:{align}{column['width']}}  "
    lines = [line.rstrip() for line in lines]
    dropped = [column["title"] for column in columns if column not in kept]
    if dropped:
        lines.append(f"no room for {listed(dropped, 8)}: widen the terminal, or write to a file")
    return lines


def printable(text):
    """The text with escapes for newlines and other characters that would break a line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def listed(names, n_most):
    """The names as a text, at most n_most of them."""
    if len(names) <= n_most:
        return ", ".join(names)
    return f"{', '.join(names[:n_most])} and {len(names) - n_most} more"


def shorten(text, width):
    """The text, or its beginning and its end."""
    if len(text) <= width:
        return text
    n_end = (width - 2) // 2
    return text[:width - 2 - n_end] + ".." + text[len(text) - n_end:]


# ---- the picture

N_COLOURED = 10  # the best runs, with a colour and a line in the legend; the others are grey
SMOOTH_FRAC = 0.04  # a training curve shows means over this fraction of its log rows on each side
EARLY_FRAC = 0.2  # first fraction of a loss's points, which may lie outside the picture


def draw(path, runs, by, direction, train_name):
    """Curves over steps, tokens and time; the figure. direction: 1 if less is better, else -1."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    for run in runs:
        run["curves"] = [curve(run, "log", train_name), curve(run, "eval", by)]
        run["curves"][0]["values"] = smooth(run["curves"][0]["values"])
    figure = Figure(figsize=(15, 6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    # The best run is drawn last, above the others.
    for i, run in reversed(list(enumerate(runs))):
        colour = f"C{i}" if i < N_COLOURED else "lightgrey"
        label = ""
        if i < N_COLOURED:
            # It begins with a space, since matplotlib hides labels that begin with _.
            label = f" {shorten(run['name'], 40)}  {format_metric(run['best'])}  {run['state']}"
        elif i == N_COLOURED:
            label = f"{len(runs) - N_COLOURED} more"
        training, validation = run["curves"]
        for axes, x in zip(panels, ("steps", "units", "minutes"), strict=True):
            style = "-" if len(training[x]) > 1 else "."  # a line of one point would not be seen
            axes.plot(training[x], training["values"], style, color=colour, linewidth=0.8,
                      alpha=0.6)
            axes.plot(validation[x], validation["values"], "o-", color=colour, linewidth=1.6,
                      markersize=4, markevery=max(1, len(validation[x]) // 25), label=label)

    units = sorted({f"{run['unit']}s" for run in runs if run["unit"]})
    labels = ("steps", " or ".join(units), "wall time of all launches (minutes)")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(y_range(runs, direction))
        axes.grid(alpha=0.3)
    panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k, since longer numbers collide
    panels[0].set_ylabel(f"{by} and training {train_name}")
    lines = [line for line in reversed(panels[0].lines) if not line.get_label().startswith("_")]
    figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(f"{by} (markers) and training {train_name} (thin, smoothed)", fontsize=11)
    for text in figure.findobj(lambda artist: hasattr(artist, "set_parse_math")):
        text.set_parse_math(False)  # a $ in a name begins no formula
    figure.savefig(path, dpi=100)
    return figure


def curve(run, event, name):
    """The points of a metric: {"steps", "units", "minutes", "values"}, arrays of one length."""
    rows = [row for row in run["rows"] if row["event"] == event and name in row]
    units_per_step = math.nan
    # {step: wall time}. The first row of a step has its time. A later one, at the end or after a
    # restart, has also that of a save or a compilation.
    seconds = {}
    for row in run["rows"]:
        units_per_step = row.get(f"{run['unit']}s_per_step", units_per_step)
        if "time_s" in row:
            seconds.setdefault(row["step"], row["time_s"])
    steps = np.array([row["step"] for row in rows], float)
    return {
        "steps": steps,
        "units": steps * units_per_step,
        "minutes": (np.interp(steps, list(seconds), list(seconds.values())) / 60 if seconds
                    else steps * math.nan),
        "values": np.array([row[name] for row in rows], float),
    }


def smooth(values):
    """Means over the finite neighbours on both sides. NaN stays NaN."""
    if not len(values):
        return values
    window = np.ones(2 * int(SMOOTH_FRAC * len(values)) + 1)
    is_finite = np.isfinite(values)
    total = np.convolve(np.where(is_finite, values, 0), window)
    count = np.convolve(is_finite, window)
    inside = slice(len(window) // 2, len(window) // 2 + len(values))
    return np.where(is_finite, total[inside] / np.maximum(count[inside], 1), np.nan)


def y_range(runs, direction):
    """(low, high) of the picture, without early losses and curves that diverged."""
    early_frac = EARLY_FRAC if direction == 1 else 0  # what rises is bounded: show all of it
    best, worst = [], []  # as if less were better
    for run in runs:
        for each in run["curves"]:
            values = direction * each["values"][np.isfinite(each["values"])]
            if len(values):
                best.append(values.min())
                worst.append(values[int(early_frac * len(values)):].max())
    if not best:
        return None, None
    top = min(best)
    usual = statistics.median_low(worst)
    bottom = max(value for value in worst if value <= top + 3 * (usual - top))
    margin = 0.05 * (bottom - top) or 0.05
    return sorted((direction * (top - margin), direction * (bottom + margin)))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack characters of a name
    sys.exit(main(sys.argv[1:]))
