# SPDX-License-Identifier: Apache-2.0
"""Compare runs: a table, and a picture of their curves. Also while they train.

    python tests/compare.py out/*
    python tests/compare.py out/* --by 'val_acc>' --png curves.png
    python tests/compare.py out/* --against out/default --below 1.54

Reads only config.json, metrics.jsonl and the lock of each folder, and needs no JAX. The table has
the fields in which the configs differ, and the best run first. Runs that differ in their seed alone
are one row: the mean of their curves, with its standard error.
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
from collections import Counter
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
    parser.add_argument("--against", default="", metavar="RUN",
                        help="run, or one of the seeds of a row, with which the others are "
                             "compared; default: the best row")
    parser.add_argument("--below", type=float, metavar="X",
                        help="print whether the mean of each row is better than this value")
    parser.add_argument("--png", help="file for the picture; '' for none; default: compare.png")
    args = parser.parse_args(argv)
    try:
        if args.below is not None and not math.isfinite(args.below):
            raise ValueError(f"--below {args.below}: must be a finite number")
        compare(args.folders, args.by, args.png, args.against, args.below)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def compare(folders, by="val_loss", png_path=None, against="", below=None):
    """Print a table of the runs and write a picture. Return its rows, the best one first: runs, and
    groups of runs that differ in their seed alone.

    by: metric to sort by, with a sign > or < that says which end is better. png_path: "" for no
    picture; None for compare.png if matplotlib is installed. against: folder of the run to compare
    with. below: a bound for the metric.
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
    runs = join_seeds(runs, direction)
    equal_states = note_equal_states(runs)
    runs.sort(key=lambda run: math.inf if run["best"] is None else direction * run["best"])
    fields = differing_fields(runs)
    if against or any(len(run["members"]) > 1 for run in runs):
        add_differences(runs, reference_of(runs, against), direction)

    # Draw first: whoever reads the table may close it early.
    curves = "" if png_path == "" else f"no curves are drawn: {missing}"
    if png_path != "" and can_draw:
        draw(png_path or "compare.png", runs, by, direction, train_name)
        curves = f"curves: {png_path or 'compare.png'}"

    width = shutil.get_terminal_size((10_000, 24)).columns  # without a terminal nothing is cut
    order = "highest" if sign == ">" else "lowest"
    notes = [f"{run['name']}: {printable(run['reason'])}" for run in runs if run["reason"]]
    notes += equal_states
    if below is not None:
        notes += [compare_with_bound(run, below, direction) for run in runs]
    print(f"by {by}, the {order} first; training {train_name}: mean over the last {MEAN_ROWS} log "
          "rows, by labels")
    print("\n".join([*format_table(table_columns(runs, fields, by), width), *notes]))
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
        "points": {row["step"]: row[by] for row in points},
        "seconds": seconds_at(rows),
        "members": [run],
        "error": None,
        "named": {name: x for name, x in best.items() if name.startswith(f"{by}/")},
        "train": statistics.fmean(values, weights) if values else None,
        "unit": start["unit"],
        "units_per_s": statistics.median(speeds) if speeds else None,
        "wall_s": times[-1] if times else None,
        "n_params": start["n_params"],
        "state": state,
        "reason": reason,
    }


def seconds_at(rows):
    """{step: wall time}. The first row of a step has its time. A later one, at the end or after a
    restart, has also that of a save or a compilation.
    """
    seconds = {}
    for row in rows:
        if "time_s" in row:
            seconds.setdefault(row["step"], row["time_s"])
    return seconds


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


# ---- seeds

def join_seeds(runs, direction):
    """Rows of the table: groups of runs that differ in their seed alone and have come equally far,
    and all other runs. Of runs of one seed, such as copies, a group has the first.
    """
    groups = {}
    for run in runs:
        fields = {name: x for name, x in run["config"].items()
                  if name not in HIDDEN_FIELDS - {"steps"} and name != "seed"}
        is_known = run["best"] is not None
        key = json.dumps([fields, run["last_step"]]) if is_known else run["run"]
        groups.setdefault(key, []).append(run)
    rows = []
    for members in groups.values():
        # The first run of each seed.
        distinct = list({run["config"]["seed"]: run for run in reversed(members)}.values())
        rows.append(distinct[0] if len(distinct) == 1 else group_of(distinct, direction))
        rows += [run for run in members if not any(run is other for other in distinct)]
    return rows


def group_of(members, direction):
    """The row of runs that differ in their seed alone: as a run, with the mean of their curves."""
    members = sorted(members, key=lambda run: run["config"]["seed"])
    first = members[0]
    steps = sorted(set.intersection(*(set(run["points"]) for run in members)))
    values = np.array([[run["points"][step] for step in steps] for run in members], float)
    means = values.mean(0)
    errors = values.std(0, ddof=1) / math.sqrt(len(members))
    finite = np.flatnonzero(np.isfinite(means))
    best = finite[np.argmin(direction * means[finite])] if len(finite) else None
    states = Counter(run["state"] for run in members)

    def mean(name):
        known = [run[name] for run in members if run[name] is not None]
        return statistics.fmean(known) if known else None

    return first | {
        "name": f"{re.sub(',?seed=[0-9]+', '', first['name']) or 'seeds'} x{len(members)}",
        "config": first["config"] | {"seed": [run["config"]["seed"] for run in members]},
        "members": members,
        "is_copy": False,
        "step": min(run["step"] for run in members),
        "best": None if best is None else means[best],
        "best_step": None if best is None else steps[best],
        "error": None if best is None else errors[best],
        "last": means[-1],
        "last_step": steps[-1],
        "points": dict(zip(steps, means, strict=True)),
        "seconds": {step: statistics.fmean(run["seconds"][step] for run in members)
                    for step in set.intersection(*(set(run["seconds"]) for run in members))},
        "named": {},
        "train": mean("train"),
        "units_per_s": mean("units_per_s"),
        "wall_s": mean("wall_s"),
        "state": ", ".join(state if n == len(members) else f"{n} {state}"
                           for state, n in states.items()),
        "reason": "; ".join(f"{run['name']}: {run['reason'] or 'its last value is not finite'}"
                            for run in members
                            if run["reason"] or not math.isfinite(run["last"])),
    }


def reference_of(runs, against):
    """The row with which the others are compared: the one with the run `against`, or the best."""
    if not against:
        return runs[0]
    path = os.path.realpath(against)
    for row in runs:
        if path in [run["run"] for run in row["members"]]:
            return row
    paths = [run["run"] for row in runs for run in row["members"]]
    raise ValueError(f"--against {against!r}: is not one of the runs; name one of them "
                     f"({config.did_you_mean(path, paths)})")


def add_differences(runs, reference, direction):
    """Add to each row its "difference" to the reference, a text, and "fewer_steps" and "less_time",
    by which it reached the last value of the reference, or None.
    """
    for row in runs:
        row["difference"] = "" if row is reference else difference(row, reference)
        row["fewer_steps"], row["less_time"] = None, None
        step = None if row is reference else step_of_value(row, reference, direction)
        if step:
            row["fewer_steps"] = reference["last_step"] / step
            seconds = time_at(row, step)
            if seconds:
                row["less_time"] = time_at(reference, reference["last_step"]) / seconds


def difference(row, reference):
    """The mean difference of the column "best", over pairs of one seed, with its standard error."""
    if row["best"] is None or reference["best"] is None:
        return ""
    of_reference = {run["config"]["seed"]: run["points"][reference["best_step"]]
                    for run in reference["members"]}
    pairs = [run["points"][row["best_step"]] - of_reference[run["config"]["seed"]]
             for run in row["members"] if run["config"]["seed"] in of_reference]
    if not pairs:
        return "no seed in common"
    mean = statistics.fmean(pairs)
    if len(pairs) == 1:
        return f"{mean:+.4f}, one seed: not decided"
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    decided = "" if abs(mean) > 2 * error else ", not decided"
    return f"{mean:+.4f} ±{error:.4f}{decided}"


def step_of_value(row, reference, direction):
    """The first step at which the curve of a row has reached the last value of the reference, on
    straight lines between evaluations; None if it has not.
    """
    if row["best"] is None or reference["best"] is None:
        return None
    bound = reference["last"]
    before = None
    for step, value in sorted(row["points"].items()):
        if direction * (value - bound) <= 0:
            if before is None:
                return step
            frac = (bound - before[1]) / (value - before[1])
            return before[0] + frac * (step - before[0])
        if math.isfinite(value):
            before = step, value
    return None


def time_at(row, step):
    """Wall time in seconds at a step, on straight lines between log rows; 0 when unknown."""
    steps = sorted(row["seconds"])
    if not steps:
        return 0.0
    return float(np.interp(step, steps, [row["seconds"][known] for known in steps]))


def compare_with_bound(row, below, direction):
    """A line that says whether a row is better than a bound, by two rules.

    The first needs no spread: (bound - mean) * sqrt(n) >= 0.004, as in modded-nanogpt. The second
    takes the row's own: two standard errors.
    """
    if row["best"] is None:
        return f"{row['name']}: no value to compare with {below:g}"
    n = len(row["members"])
    margin = direction * (below - row["best"])
    by_rule = "yes" if margin * math.sqrt(n) >= 0.004 else "no"
    own = "unknown, one seed"
    if n > 1:
        own = "yes" if margin > 2 * row["error"] else "no"
    side = "below" if direction == 1 else "above"
    return (f"{row['name']}: {format_metric(row['best'])} {side} {below:g}? by margin x sqrt({n}): "
            f"{by_rule} ({margin * math.sqrt(n):.4f}, needs 0.004); by two standard errors: {own}")


def note_equal_states(rows):
    """Lines that name runs whose last saves have one step and equal digests: bit-identical states.
    Of those that are rows of the table, all but the first get "is_copy".
    """
    found = {}
    for run in (run for row in rows for run in row["members"]):
        saves = [row for row in run["rows"] if row["event"] == "save" and "digest" in row]
        if saves:
            key = json.dumps([saves[-1]["step"], saves[-1]["digest"]], sort_keys=True)
            found.setdefault(key, []).append(run)
    lines = []
    for same in found.values():
        if len(same) > 1:
            step = max(row["step"] for row in same[0]["rows"] if row["event"] == "save")
            names = listed([run["name"] for run in same], 5)
            lines.append(f"bit-identical at step {step}: {names}")
            for run in [run for run in same if any(run is row for row in rows)][1:]:
                run["is_copy"] = True
    return lines


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
    if "difference" in runs[0]:
        add("difference", 2, (run["difference"] for run in runs))
    if any(run.get("fewer_steps") for run in runs):
        add("fewer steps", 5.1, (format_ratio(run["fewer_steps"]) for run in runs))
        add("less time", 5.2, (format_ratio(run["less_time"]) for run in runs))
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
        if text and name == "best" and run["error"] is not None:
            text += f" ±{format_metric(run['error'])}"
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


def format_ratio(x):
    return "" if x is None else f"{x:.2f}x"


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
    """Curves over steps, over tokens if the batch sizes differ, and over time; the figure.
    direction: 1 if less is better, else -1.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    for run in runs:
        run["curves"] = [mean_curve(run, "log", train_name), mean_curve(run, "eval", by)]
        run["curves"][0]["values"] = smooth(run["curves"][0]["values"])
    add_colours(runs)
    units = sorted({f"{run['unit']}s" for run in runs if run["unit"]})
    panels = {"steps": "step", "units": " or ".join(units),
              "seconds": "wall time of all launches, without redone work (s)"}
    sizes = {run["curves"][0]["units_per_step"] for run in runs}
    if len({size for size in sizes if math.isfinite(size)}) < 2:
        del panels["units"]
    if len(runs) == 1:
        panels = {"steps": "step"}
    figure = Figure(figsize=(4.5 + 4 * len(panels), 6), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]

    # The best run is drawn last, above the others; one that repeats another, below and wider.
    for i, run in sorted(enumerate(runs), key=lambda pair: (not is_copy(pair[1]), -pair[0])):
        label = ""
        if i < N_COLOURED:
            # It begins with a space, since matplotlib hides labels that begin with _.
            label = f" {shorten(run['name'], 40)}  {format_metric(run['best'])}  {run['state']}"
        elif i == N_COLOURED:
            label = f"{len(runs) - N_COLOURED} more"
        for axes, x in zip(all_axes, panels, strict=True):
            draw_run(axes, run, x, label)

    whole_runs = [run for run in runs if not run["parent"]]  # a branch begins late, and low
    for axes, (x, label) in zip(all_axes, panels.items(), strict=True):
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(y_range(whole_runs or runs, direction))
        axes.grid(alpha=0.3)
        if x == "units":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k: longer numbers collide
        if x == "seconds" and axes.get_xlim()[1] > 120:
            axes.xaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    all_axes[0].set_ylabel(f"{by} and training {train_name}")
    lines = [line for line in reversed(all_axes[0].lines) if not line.get_label().startswith("_")]
    figure.legend(handles=lines, loc="outside lower center", ncols=min(3, len(panels) + 1),
                  fontsize=9, frameon=False)
    title = f"{by} (markers) and training {train_name} (thin, smoothed)"
    if any(len(run["members"]) > 1 for run in runs):
        title += "; x2 and more: mean over seeds, with its standard error"
    if any(restarts(run) for run in runs):
        title += "; |: killed or stopped, and resumed"
    figure.suptitle(title, fontsize=11)
    for text in figure.findobj(lambda artist: hasattr(artist, "set_parse_math")):
        text.set_parse_math(False)  # a $ in a name begins no formula
    figure.savefig(path, dpi=100)
    return figure


def draw_run(axes, run, x, label):
    """Draw the two curves of a run over x, a key of its curves."""
    training, validation = run["curves"]
    colour = run["colour"]
    width, alpha = (6, 0.3) if is_copy(run) else (0.8, 0.6)
    style = "-" if len(training[x]) > 1 else "."  # a line of one point would not be seen
    axes.plot(training[x], training["values"], style, color=colour, linewidth=width, alpha=alpha)
    if is_copy(run):
        axes.plot(validation[x], validation["values"], "o-", color=colour, linewidth=6,
                  markersize=12, alpha=0.3, label=label)
        return
    axes.plot(validation[x], validation["values"], "o-", color=colour, linewidth=1.6, markersize=4,
              markevery=max(1, len(validation[x]) // 25), label=label)
    low, high = (validation["values"] + sign * validation["errors"] for sign in (-1, 1))
    axes.fill_between(validation[x], low, high, color=colour, alpha=0.25, linewidth=0)
    # Where the run was launched again, and where a branch left its parent.
    steps = restarts(run)
    if steps and len(training["steps"]):
        axes.plot(np.interp(steps, training["steps"], training[x]),
                  np.interp(steps, training["steps"], training["values"]), "|", color=colour,
                  markersize=14, markeredgewidth=1.6)
    parent = run["parent"]
    if parent:
        for own, other in zip(run["curves"], parent["curves"], strict=True):
            if len(own[x]) and len(other[x]) and other["steps"][0] <= run["branch_step"]:
                start = [np.interp(run["branch_step"], other["steps"], other[key])
                         for key in (x, "values")]
                axes.plot(*zip(start, (own[x][0], own["values"][0]), strict=True), "-",
                          color=colour, linewidth=0.8)
                axes.plot(*start, "D", color=colour, markersize=5)


def is_copy(run):
    return run.get("is_copy", False)


def restarts(run):
    """The steps from which a run was resumed."""
    if len(run["members"]) > 1:
        return []
    return [row["step"] for row in run["rows"] if row["event"] == "start"][1:]


def add_colours(runs):
    """Add to each run its "colour", and "parent" and "branch_step" if it is a branch of another
    one, whose colour it then has in a lighter shade.
    """
    from matplotlib.colors import to_rgb
    by_path = {member["run"]: run for run in runs for member in run["members"]}
    for i, run in enumerate(runs):
        run["colour"] = f"C{i}" if i < N_COLOURED else "lightgrey"
        folder, _, step = str(run["config"].get("branch_from", "")).rpartition("@")
        run["parent"] = by_path.get(os.path.realpath(folder)) if folder else None
        run["branch_step"] = int(step) if step.isdigit() else 0
    n_branches = Counter()
    for i, run in enumerate(runs):
        parent = run["parent"]
        if parent and i < N_COLOURED:
            n_branches[parent["name"]] += 1
            strength = 0.75 ** n_branches[parent["name"]]
            run["colour"] = tuple(1 - strength * (1 - part) for part in to_rgb(parent["colour"]))


def mean_curve(row, event, name):
    """As `curve`; for runs of several seeds the means over them, with "errors", their standard
    errors.
    """
    curves = [curve(run, event, name) for run in row["members"]]
    n = len(curves)
    if n == 1:
        return curves[0] | {"errors": np.zeros(len(curves[0]["steps"]))}
    steps = sorted(set.intersection(*(set(each["steps"]) for each in curves)))
    picked = [{key: each[key][np.searchsorted(each["steps"], steps)]
               for key in ("steps", "units", "seconds", "values")} for each in curves]
    mean = {key: np.mean([each[key] for each in picked], axis=0) for key in picked[0]}
    errors = np.std([each["values"] for each in picked], axis=0, ddof=1) / math.sqrt(n)
    return mean | {"errors": errors, "units_per_step": curves[0]["units_per_step"]}


def curve(run, event, name):
    """The points of a metric: {"steps", "units", "seconds", "values"}, arrays of one length, and
    "units_per_step".
    """
    rows = [row for row in run["rows"] if row["event"] == event and name in row]
    units_per_step = math.nan
    for row in run["rows"]:
        units_per_step = row.get(f"{run['unit']}s_per_step", units_per_step)
    seconds = run["seconds"]
    steps = np.array([row["step"] for row in rows], float)
    return {
        "steps": steps,
        "units": steps * units_per_step,
        "seconds": (np.interp(steps, list(seconds), list(seconds.values())) if seconds
                    else steps * math.nan),
        "values": np.array([row[name] for row in rows], float),
        "units_per_step": units_per_step,
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
