# SPDX-License-Identifier: Apache-2.0
"""Compare runs: a table, and a picture of their curves. Also while they train.

    python tests/compare.py out/*
    python tests/compare.py out/* --by 'val_acc>' --csv runs.csv --png curves.png

Reads only config.json, metrics.jsonl and the lock of each folder, and needs no JAX. The table has
the fields in which the configs differ, and the best run first.
"""
import argparse
import csv
import dataclasses
import fcntl
import glob
import importlib.util
import json
import math
import os
import re
import shutil
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config

MEAN_ROWS = 10  # newest log rows over which a training metric is averaged
# Fields that say nothing about a result: those of one launch, and names of folders. The table has a
# column for the steps.
HIDDEN_FIELDS = {*config.LAUNCH_FIELDS, "out_dir", "ckpt_dir", "export", "cache_dir", "token_cache",
                 "steps"}
# Events to read from metrics.jsonl, with the types of the fields that each row of them has.
EVENTS = {
    "start": {"step": int, "unit": str, "config": dict},
    "log": {"step": int},
    "eval": {"step": int},
    "end": {"step": int, "exit_code": int, "reason": str},
    "error": {"error": str},
}


def main(argv):
    """Compare the runs that a command line names. Return the exit code: 2 for invalid input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", help="folders of runs, or globs such as 'out/*'")
    parser.add_argument("--by", default="val_loss",
                        help="metric to sort by, as val_loss, 'val_acc>' (the highest first) or "
                             "'loss<' (the lowest first); default: val_loss")
    parser.add_argument("--csv", default="", help="file for the table, with nothing cut")
    parser.add_argument("--png", help="file for the picture; '' for none; default: compare.png")
    args = parser.parse_args(argv)
    try:
        compare(args.folders, args.by, args.csv, args.png)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def compare(folders, by="val_loss", csv_path="", png_path=None):
    """Print a table of the runs, and write a picture and a CSV file. Return the rows of the table,
    the best run first.

    by: metric to sort by, with a sign > or < that says which end is better. png_path: "" for no
    picture; None for compare.png if matplotlib is installed.
    """
    by, sign = parse_by(by)
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if png_path and not can_draw:
        raise ValueError("--png: matplotlib is not installed: pip install matplotlib")

    # Read and summarize the runs, and sort them.
    runs = read_runs(folders)
    check_metric(by, runs)
    train_name = training_metric(by, runs)
    for run in runs:
        run["summary"] = summarize(run, by, sign, train_name)
    runs.sort(key=lambda run: sort_key(run["summary"], sign))
    names = differing_fields(runs)

    # Write the files first: whoever reads the table may close it early.
    if csv_path:
        write_csv(csv_path, runs, names, by)
    if png_path != "" and can_draw:
        draw(png_path or "compare.png", runs, by, sign, train_name)

    # Print the table, and what it cannot show.
    width = shutil.get_terminal_size((10_000, 24)).columns  # without a terminal nothing is cut
    order = "highest" if sign == ">" else "lowest"
    print(f"by {by}, the {order} first; training {train_name}: mean over the last {MEAN_ROWS} log "
          "rows, by labels")
    for line in format_table(table_columns(runs, names, by), width):
        print(line)
    for run in runs:
        if run["summary"]["reason"]:
            print(f"{run['name']}: {run['summary']['reason']}")
    if png_path != "" and can_draw:
        print(f"curves: {png_path or 'compare.png'}")
    elif png_path != "":
        print("no curves are drawn: matplotlib is not installed: pip install matplotlib")
    return [run["summary"] | {"run": run["path"]} for run in runs]


def parse_by(text):
    """(name, sign) of a metric to sort by. sign: > where more is better, < where less is."""
    found = re.fullmatch(r"([^<>]+)([<>]?)", text)
    if not found:
        raise ValueError(f"--by {text!r}: must be the name of a metric, as val_loss, 'val_acc>' or "
                         "'val_loss<'")
    name, sign = found.groups()
    if not sign:
        sign = config.better_sign(name) or "<"
    return name, sign


# ---- reading runs

def read_runs(folders):
    """All runs in these folders: [{"path", "name" (to show), "config", "rows"}].

    Other folders are skipped, with a note. Raises ValueError when none is a run.
    """
    runs = []
    skipped = []
    seen = set()
    for path in expand(folders):
        real_path = os.path.realpath(path)
        if real_path in seen:
            continue
        seen.add(real_path)
        run = read_run(path)
        if run:
            runs.append(run)
        else:
            skipped.append(path)

    if skipped:
        print(f"skipped, not a run: {listed(skipped, 5)}", file=sys.stderr)
    if not runs:
        raise ValueError(f"no run in {' '.join(folders)}: name folders with a config.json and a "
                         "metrics.jsonl, as out/*")

    # Without the folders that all have in common.
    common = os.path.commonpath([os.path.dirname(os.path.abspath(run["path"])) for run in runs])
    for run in runs:
        run["name"] = os.path.relpath(run["path"], common)
    return runs


def expand(folders):
    """The paths, with globs expanded that a shell has left as they are."""
    paths = []
    for text in folders:
        text = text.rstrip("/") or "/"
        if os.path.exists(text):
            paths.append(text)
        else:
            paths += sorted(glob.glob(text)) or [text]
    return paths


def read_run(path):
    """The run in a folder, or None if it holds none."""
    if not Path(path, "metrics.jsonl").is_file():
        return None
    rows = read_rows(Path(path, "metrics.jsonl"))
    starts = [row for row in rows if row["event"] == "start"]
    if starts:
        fields = starts[-1]["config"]
    else:  # it has just begun
        fields = read_config(Path(path, "config.json"))
    if not fields:
        return None
    # A field that an older config lacks has its default.
    defaults = json.loads(config.to_json(config.Config()))
    return {"path": path, "config": without_derived(defaults | fields), "rows": rows}


def read_rows(path):
    """The rows of metrics.jsonl that matter here, without a torn line. A run may be writing it.

    A row without the fields that a run writes was added by hand, and is skipped.
    """
    rows = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and has_required_fields(row):
                rows.append(with_metrics_alone(row))
    return rows


def has_required_fields(row):
    """Whether a row is one of EVENTS and has its fields, each of its type."""
    if row.get("event") not in (*EVENTS,):
        return False
    times = row.get("time_s", {})
    if not isinstance(times, dict) or not all(map(is_number, times.values())):
        return False
    return all(isinstance(row.get(name), kind) for name, kind in EVENTS[row["event"]].items())


def with_metrics_alone(row):
    """A row with numbers or null for all but its required fields and "time_s": without histograms,
    which are large. A number that is not finite is null, as in the rows that a run writes.
    """
    result = {}
    for name, value in row.items():
        if name in ("event", "time_s", *EVENTS[row["event"]]):
            result[name] = value
        elif value is None or is_number(value):
            is_finite = value is not None and math.isfinite(value)
            result[name] = value if is_finite else None
    return result


def read_config(path):
    """The fields in a config.json; {} without a readable one."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def without_derived(fields):
    """The fields of a run, with 0 for sizes that follow from others: two runs that differ only in
    d_model then differ only in that.
    """
    known = {field.name for field in dataclasses.fields(config.Config)}
    values = {name: value for name, value in fields.items() if name in known}
    result = dict(fields)
    for name in ("n_kv_heads", "head_dim", "d_ff"):
        try:
            derived = config.derive_text(config.Config(**values | {name: 0}))
        except (TypeError, ZeroDivisionError):  # fields of another version
            continue
        if getattr(derived, name) == fields.get(name):
            result[name] = 0
    return result


def check_metric(by, runs):
    """Raise ValueError if evaluations were logged, and no row of any run has this metric."""
    names = set()
    for run in runs:
        for row in run["rows"]:
            if row["event"] in ("log", "eval"):
                names.update(name for name, x in row.items() if is_number(x))
    has_evaluation = any(name.startswith("val_") for name in names)
    if by not in names and (has_evaluation or not by.startswith("val_")) and names:
        raise ValueError(f"--by {by}: no run has logged this metric; there are "
                         f"{', '.join(sorted(names))}")


def training_metric(by, runs):
    """The metric of training beside the metric `by` of evaluations: loss, if it has none."""
    name = by.removeprefix("val_")
    for run in runs:
        if any(name in row for row in run["rows"] if row["event"] == "log"):
            return name
    return "loss"


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


# ---- what a run has reached

def summarize(run, by, sign, train_name):
    """What the table shows of a run: a dict with None for what is not known yet."""
    rows = run["rows"]
    start = {}
    logs = []
    points = []  # rows with the metric
    wall_s = None
    for row in rows:
        if row["event"] == "start":
            start = row
        if row["event"] == "log":
            logs.append(row)
        if row["event"] in ("log", "eval") and by in row:
            points.append(row)
        if "time_s" in row:
            wall_s = sum(row["time_s"].values())

    # The best value and the last one. A metric that is not finite is null.
    best, last = {}, {}
    finite = [row for row in points if row[by] is not None]
    if finite:
        choose = max if sign == ">" else min
        best = choose(finite, key=lambda row: row[by])
    if points:
        last = points[-1] | {by: nan_if_null(points[-1][by])}

    # At the best step, the same metric of each validation set.
    named = {}
    for name, value in best.items():
        if name.startswith(f"{by}/"):
            named[name] = nan_if_null(value)

    unit = start.get("unit", "")
    state, reason = state_of(run)
    return {
        "run": run["path"],
        "step": max((row["step"] for row in rows if "step" in row), default=0),
        "steps": run["config"]["steps"],
        "best": best.get(by),
        "best_step": best.get("step"),
        "last": last.get(by),
        "last_step": last.get("step"),
        "named": named,
        "train": training_mean(logs, train_name),
        "unit": unit,
        "units_per_s": median_speed(rows, unit),
        "wall_s": wall_s,
        "n_params": start.get("n_params"),
        "state": state,
        "reason": reason,
    }


def nan_if_null(x):
    return math.nan if x is None else x


def training_mean(logs, name):
    """The mean of a metric over the last MEAN_ROWS log rows, by labels; None without a label."""
    total = 0.0
    n_labels = 0.0
    for row in [row for row in logs if name in row][-MEAN_ROWS:]:
        weight = row.get("n_labels", 1)
        if weight:
            value = nan_if_null(row[name])
            total += weight * value
            n_labels += weight
    if not n_labels:
        return None
    return total / n_labels


def median_speed(rows, unit):
    """The median of the speeds in the log rows of the newest launch that has any."""
    launches = [[]]
    for row in rows:
        if row["event"] == "start":
            launches.append([])
        if row["event"] == "log" and row.get(f"{unit}s_per_s"):
            launches[-1].append(row[f"{unit}s_per_s"])
    speeds = [launch for launch in launches if launch]
    if not speeds:
        return None
    return statistics.median(speeds[-1])


def state_of(run):
    """(state, reason) of a run, as far as its folder shows it. reason: why it is not a good end,
    or "".
    """
    last = run["rows"][-1] if run["rows"] else {"event": ""}
    if last["event"] == "error":
        return "crashed", last["error"].partition("\n")[0]
    if last["event"] == "end":
        if last["exit_code"]:
            return "failed", last["reason"]
        if last["step"] < run["config"]["steps"]:
            return "stopped", ""
        return "finished", ""

    # Without an end, a run is being written, or was killed.
    locked = is_locked(run["path"])
    if locked:
        return "running", ""
    if locked is None:
        return "unknown", "its log has no end, and whether a process writes to it is not known"
    return "killed", "its log has no end, and no process on this machine holds its lock"


def is_locked(path):
    """Whether a process holds the lock of a run's folder; None if that cannot be known.

    The test takes the lock for an instant, since /proc/locks lacks the locks of other containers. A
    killed run that resumes in that instant would be refused; state_of tests no other run.
    """
    try:
        with open(Path(path, ".lock"), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return None
    return False


def sort_key(summary, sign):
    """Order by the best value. Runs without one come last."""
    best = summary["best"]
    if best is None:
        return True, 0.0
    return False, -best if sign == ">" else best


# ---- fields of the configs

def differing_fields(runs):
    """Names of the fields in which the configs differ: first those that define a run, then those
    that may change when it resumes.
    """
    names = []
    for run in runs:
        names += [name for name in run["config"] if name not in names]
    differing = []
    for name in names:
        values = {json.dumps(run["config"].get(name)) for run in runs}
        if len(values) > 1 and name not in HIDDEN_FIELDS:
            differing.append(name)
    return sorted(differing, key=lambda name: name in config.RESUMABLE_FIELDS)


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


# ---- the table

def table_columns(runs, names, by):
    """The columns of the table, in their order: [{"title", "cells", "rank", "is_text",
    "can_be_cut"}]. When there is no room, those of the highest ranks are dropped.
    """
    summaries = [run["summary"] for run in runs]
    columns = []

    def add(title, rank, cells, is_text=False, can_be_cut=False):
        columns.append({"title": title, "rank": rank, "cells": cells, "is_text": is_text,
                        "can_be_cut": can_be_cut})

    add("run", 0, [run["name"] for run in runs], is_text=True, can_be_cut=True)
    for name in names:
        values = [run["config"].get(name) for run in runs]
        cells = [format_field(name, value) for value in values]
        is_text = any(isinstance(value, str | list) for value in values)
        add(name, rank_of_field(name, names, runs), cells, is_text, can_be_cut=True)
    add("step", 1, [format_progress(each) for each in summaries])
    add("best", 0, format_points(summaries, "best"))
    add("last", 6, format_points(summaries, "last"))
    for name in named_metrics(summaries):
        cells = [format_metric(each["named"].get(name)) for each in summaries]
        add(name, 10, cells, can_be_cut=True)
    add("training", 4, [format_metric(each["train"]) for each in summaries])
    units = sorted({each["unit"] for each in summaries if each["unit"]})
    if len(units) == 1:
        add(f"{units[0]}s/s", 5, [format_speed(each, "") for each in summaries])
    else:
        add("speed", 5, [format_speed(each, f" {each['unit']}s/s") for each in summaries])
    add("time", 7, [format_seconds(each["wall_s"]) for each in summaries])
    add("params", 8, [format_count(each["n_params"]) for each in summaries])
    add("state", 1, [each["state"] for each in summaries], is_text=True)
    return columns


def rank_of_field(name, names, runs):
    """2 for the two fields with the most different values, 3 for the others, 9 for those that do
    not define a run.
    """
    def n_values(each):
        return len({json.dumps(run["config"].get(each)) for run in runs})

    if name in config.RESUMABLE_FIELDS:
        return 9
    defining = [each for each in names if each not in config.RESUMABLE_FIELDS]
    most_varied = sorted(defining, key=n_values, reverse=True)[:2]
    return 2 if name in most_varied else 3


def named_metrics(summaries):
    """Names of the metrics of single validation sets, in the order of their appearance."""
    names = []
    for each in summaries:
        names += [name for name in each["named"] if name not in names]
    return names


def format_progress(summary):
    """The step, and the number of steps if it is not reached."""
    if summary["step"] == summary["steps"]:
        return str(summary["step"])
    return f"{summary['step']}/{summary['steps']}"


def format_points(summaries, name):
    """Texts such as "1.3186 @600" of the metric `name` and its step, aligned."""
    width = max(len(str(each[f"{name}_step"])) for each in summaries)
    texts = []
    for each in summaries:
        text = format_metric(each[name])
        if text:
            text += f" @{each[f'{name}_step']:<{width}}"
        texts.append(text)
    return texts


def format_metric(x):
    if x is None:
        return ""
    if math.isnan(x) or 0.001 <= abs(x) < 10_000 or x == 0:
        return f"{x:.4f}"
    return f"{x:.3g}"


def format_speed(summary, unit):
    if summary["units_per_s"] is None:
        return ""
    return f"{summary['units_per_s']:,.0f}{unit}"


def format_seconds(seconds):
    """A duration as 81s, 12m30s, 3h05m or 2d07h."""
    if seconds is None:
        return ""
    seconds = round(seconds)
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02}h"


def format_count(n):
    """A number of parameters as 9.6K, 0.84M or 8.03B."""
    if n is None:
        return ""
    if n < 1e5:
        return f"{n / 1e3:.1f}K"
    if n < 1e9:
        return f"{n / 1e6:.2f}M"
    return f"{n / 1e9:.2f}B"


# Most characters of the name of a run, and of the name or value of a field: the first pair with
# which the most columns fit into the width applies.
CUTS = ((60, 40), (40, 20), (28, 14), (20, 10))


def format_table(columns, width):
    """The lines of the table. Columns for which there is no room are named below it."""
    kept = []
    for name_width, cell_width in CUTS:
        cut = [cut_column(column, name_width, cell_width) for column in columns]
        fitting = columns_that_fit(cut, width)
        if len(fitting) > len(kept):
            kept = fitting

    lines = []
    for texts in zip(*(align(column) for column in kept), strict=True):
        lines.append("  ".join(texts).rstrip())
    shown = {column["title"] for column in kept}
    dropped = [column["title"] for column in columns if column["title"] not in shown]
    if dropped:
        lines.append(f"no room for {listed(dropped, 8)}: widen the terminal, or use --csv FILE")
    return lines


def listed(names, n_most):
    """The names as a text, at most n_most of them."""
    if len(names) <= n_most:
        return ", ".join(names)
    return f"{', '.join(names[:n_most])} and {len(names) - n_most} more"


def cut_column(column, name_width, cell_width):
    """The column with "texts", its title and cells, cut to a length, and their "width"."""
    texts = [column["title"], *column["cells"]]
    if column["can_be_cut"]:
        limit = name_width if column["title"] == "run" else cell_width
        texts = [shorten(text, limit) for text in texts]
    return column | {"texts": texts, "width": max(map(len, texts))}


def columns_that_fit(columns, width):
    """The columns that fit beside each other, in their order. The lowest ranks come first."""
    used = -2  # no space before the first column
    kept = []
    for column in sorted(columns, key=lambda column: column["rank"]):
        if not kept or used + 2 + column["width"] <= width:
            kept.append(column)
            used += 2 + column["width"]
    return [column for column in columns if column in kept]


def align(column):
    """The texts of a column, all of its width: texts at the left, numbers at the right."""
    if column["is_text"]:
        return [text.ljust(column["width"]) for text in column["texts"]]
    return [text.rjust(column["width"]) for text in column["texts"]]


def shorten(text, width):
    """The text, or its beginning and its end."""
    if len(text) <= width:
        return text
    n_end = (width - 2) // 2
    return text[:width - 2 - n_end] + ".." + text[len(text) - n_end:]


def write_csv(path, runs, names, by):
    """Write one row per run: the columns of the table, uncut, and all that differs."""
    named = named_metrics([run["summary"] for run in runs])
    titles = ["run", *names, "step", "steps", f"best {by}", "best step", f"last {by}", "last step",
              *named, "training", "unit", "units/s", "wall_s", "n_params", "state", "reason"]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(titles)
        for run in runs:
            summary = run["summary"]
            row = [run["path"]]
            row += [plain(run["config"].get(name)) for name in names]
            row += [summary[key] for key in ("step", "steps", "best", "best_step", "last",
                                             "last_step")]
            row += [summary["named"].get(name) for name in named]
            row += [summary[key] for key in ("train", "unit", "units_per_s", "wall_s", "n_params",
                                             "state", "reason")]
            writer.writerow(row)


def plain(value):
    """A value for one cell: a list as its items in a text."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value


# ---- the picture

N_COLOURED = 12  # runs with a colour and a line in the legend: the best ones; the others are grey
SMOOTH_FRAC = 0.04  # a training curve shows means over this fraction of its log rows on each side
EARLY_FRAC = 0.2  # first fraction of a run's points, which may lie outside the picture


def draw(path, runs, by, sign, train_name):
    """Draw training and validation curves over steps, over tokens and over wall time. Return the
    figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    for run in runs:
        run["curves"] = [curve(run, "log", train_name), curve(run, "eval", by)]
    low, high = y_range(runs, sign)
    longest_s = max((run["summary"]["wall_s"] or 0 for run in runs), default=0)
    time_unit, seconds_per_unit = time_axis(longest_s)
    units = sorted({run["summary"]["unit"] for run in runs if run["summary"]["unit"]})

    n_named = min(len(runs), N_COLOURED)
    n_legend_rows = -(-(n_named + 1) // 3)
    figure = Figure(figsize=(15, 5 + 0.25 * n_legend_rows), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    axes_of = {"steps": panels[0], "units": panels[1], "seconds": panels[2]}
    # The best run is drawn last, above the others.
    for index, run in reversed(list(enumerate(runs))):
        colour = colour_of(index)
        training, validation = run["curves"]
        for key, axes in axes_of.items():
            scale = seconds_per_unit if key == "seconds" else 1
            x = [value / scale for value in training[key]]
            style = "-" if len(x) > 1 else "."  # a line of one point would not be seen
            axes.plot(x, training["smoothed"], style, color=colour, linewidth=0.8, alpha=0.6)
            x = [value / scale for value in validation[key]]
            axes.plot(x, validation["values"], "o-", color=colour, linewidth=1.6, markersize=4,
                      markevery=max(1, len(x) // 25))

    # Axes.
    panels[0].set_xlabel("steps")
    panels[1].set_xlabel(" or ".join(f"{unit}s" for unit in units))
    panels[2].set_xlabel(f"wall time of all launches ({time_unit})")
    panels[0].set_ylabel(f"{by} and training {train_name}")
    for axes in panels[:2]:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
        if low < high:
            axes.set_ylim(low, high)

    # The legend, below the panels.
    handles = []
    for index, run in enumerate(runs[:n_named]):
        handles.append(Line2D([], [], color=colour_of(index), marker="o", markersize=4,
                              label=legend_text(run, low, high)))
    if len(runs) > n_named:
        handles.append(Line2D([], [], color=colour_of(n_named), marker="o", markersize=4,
                              label=f"{len(runs) - n_named} more"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(f"{by} (markers) and training {train_name} (thin, smoothed)", fontsize=11)
    figure.savefig(path, dpi=100)
    return figure


def colour_of(index):
    """The colour of the run at this position: of N_COLOURED that differ, then grey."""
    colours = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown",
               "tab:pink", "tab:olive", "tab:cyan", "black", "gold", "navy")
    if index < N_COLOURED:
        return colours[index]
    return "lightgrey"


def legend_text(run, low, high):
    """Name, best value and state of a run, and whether all of it lies outside the picture."""
    summary = run["summary"]
    text = shorten(run["name"], 40)
    if summary["best"] is not None:
        text += f"  {format_metric(summary['best'])}"
    if summary["state"] != "finished":
        text += f"  {summary['state']}"
    values = finite_values(run["curves"][0]["smoothed"]) + finite_values(run["curves"][1]["values"])
    if not values:
        text += ", no values"
    elif not any(low <= value <= high for value in values):
        text += ", outside"
    return text


def curve(run, event, name):
    """The points of a metric: {"steps", "units", "seconds", "values", "smoothed"}, lists of one
    length. A value that is not finite is NaN, and so are units and seconds that are not known.
    """
    rows = [row for row in run["rows"] if row["event"] == event and name in row]
    steps = [row["step"] for row in rows]
    values = [nan_if_null(row[name]) for row in rows]
    unit = run["summary"]["unit"]
    # {step: value}, in the order of the steps. The first row of a step has its time. A later one,
    # at the end or after a restart, has also that of a save or a compilation.
    known_units = {}
    known_seconds = {}
    for row in run["rows"]:
        if row["event"] == "start":
            n_units = row.get(f"{row['unit']}s_per_step", math.nan)
            known_units.setdefault(row["step"], row["step"] * n_units)
        if f"{unit}s" in row:
            known_units.setdefault(row["step"], row[f"{unit}s"])
        if "time_s" in row:
            known_seconds.setdefault(row["step"], sum(row["time_s"].values()))
    return {
        "steps": steps,
        "units": interpolate(steps, known_units),
        "seconds": interpolate(steps, known_seconds),
        "values": values,
        "smoothed": smooth(values),
    }


def interpolate(steps, known):
    """The values at these steps. known: {step: value}. Beyond its last step they are NaN."""
    import numpy as np
    if not known:
        return [math.nan for _ in steps]
    return np.interp(steps, list(known), list(known.values()), right=math.nan).tolist()


def smooth(values):
    """Means over neighbours on both sides. Near the start, where a loss falls steeply, equally many
    on both sides. NaN stays NaN, and does not count for its neighbours.
    """
    import numpy as np
    x = np.array(values, float)
    n = len(x)
    positions = np.arange(n)
    total = np.zeros(n)
    count = np.zeros(n)
    n_neighbours = int(SMOOTH_FRAC * n)
    for offset in range(-n_neighbours, n_neighbours + 1):
        inside = positions[(positions >= abs(offset)) & (positions + offset < n)]
        neighbours = x[inside + offset]
        is_finite = np.isfinite(neighbours)
        total[inside] += np.where(is_finite, neighbours, 0)
        count[inside] += is_finite
    means = total / np.maximum(count, 1)
    return np.where(np.isfinite(x), means, np.nan).tolist()


def finite_values(values):
    return [value for value in values if math.isfinite(value)]


def y_range(runs, sign):
    """(low, high) of the picture: from the best point of any run to the worst one after the first
    EARLY_FRAC of a run. Curves that are far worse than most, as after they diverged, do not count.
    """
    direction = -1 if sign == ">" else 1  # compare as if less were better
    best = []
    worst = []
    for run in runs:
        training, validation = run["curves"]
        for values in (training["smoothed"], validation["values"]):
            finite = [direction * value for value in finite_values(values)]
            late = finite[math.ceil(EARLY_FRAC * len(finite)):]
            if late:
                best.append(min(finite))
                worst.append(max(late))
    if not best:
        return 0.0, 0.0
    top = min(best)
    usual = statistics.median_low(worst)
    bottom = max(value for value in worst if value <= top + 3 * (usual - top))
    margin = 0.05 * (bottom - top)
    limits = sorted((direction * (top - margin), direction * (bottom + margin)))
    return limits[0], limits[1]


def time_axis(longest_s):
    """(unit, seconds in it) in which to draw durations."""
    if longest_s < 300:
        return "s", 1
    if longest_s < 3 * 3600:
        return "minutes", 60
    return "hours", 3600


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
