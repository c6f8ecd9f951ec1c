# SPDX-License-Identifier: Apache-2.0
"""Train a stretch of a run again, from a checkpoint that it kept; compare digests and losses.

python tests/recipes/audit.py out --first 500 --last 600

Prints "identical" and ends with 0, or names the first step that differs and ends with 1. The run is
not touched: the stretch is trained in a temporary folder. Another machine, mesh or version of JAX
rounds differently, which is then what the audit finds.
"""
import argparse
import dataclasses
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # isort: skip  before JAX, whose memory it sets up
from train import ckpt, config

LOGGED = ("loss", "objective", "grad_norm", "lr")


def config_of(rows, first, last, kind):
    """The config under which the run trained the steps after `first`, up to `last`. Raises
    ValueError when it was resumed in between under a config that trains differently.
    """
    starts = [row for row in rows if row["event"] == "start" and row["step"] < last]
    before = [row for row in starts if row["step"] <= first]
    if not before:
        raise ValueError(f"--first {first}: the log has no launch at or before that step")
    resumed = [row for row in starts if row["step"] > first]
    compared = {*before[-1]["config"]} - {*config.FREE} | {"steps"}
    for row in resumed:
        changed = [name for name in sorted(compared)
                   if row["config"][name] != before[-1]["config"][name]]
        if changed:
            raise ValueError(f"--last {last}: the run was resumed at step {row['step']} with "
                             f"another {', '.join(changed)}; audit up to that step")
    return config.from_json(json.dumps(before[-1]["config"]), "metrics.jsonl", kind)


def copy_checkpoint(root, step, scratch):
    """Copy the checkpoint of a step. Raises ValueError when it is not there."""
    if "://" in root:
        raise ValueError(f"{root}: is a bucket; copy its folder {step:09d} to this machine first")
    kept = ckpt.steps(root)
    if step not in kept:
        raise ValueError(f"--first {step}: {root} keeps the checkpoints of steps {kept}; choose "
                         "one of these, or keep more by --keep or --keep_every")
    shutil.copytree(Path(root, f"{step:09d}"), Path(scratch, "ckpt", f"{step:09d}"))


def audit(out_dir, first, last, task=train.TEXT, kind=config.Config):
    """Train steps first + 1 to last of the run in out_dir again; (differences in words of the first
    step that has any, number of log rows compared, number of digests compared).
    """
    rows = ckpt.read_log(out_dir)
    within = [row for row in rows if first < row["step"] <= last]
    logged = {row["step"]: row for row in within if row["event"] == "log"}
    digests = {row["step"]: row["digest"] for row in within
               if row["event"] == "save" and row["kind"] == "save"}
    if not digests or max([*logged, *digests]) < last:
        raise ValueError(f"--last {last}: {out_dir} has nothing of that step to compare; it must "
                         f"be the step of a save: {sorted(digests)}")
    cfg = config_of(rows, first, last, kind)
    differences, n_compared = [], {"log": 0, "save": 0}

    def compare(step, what, saved, value):
        equal = saved == value or (saved is None and math.isnan(value))
        if not equal:
            differences.append((step, f"step {step}: {what} was {saved}, is {value}"))

    def observe(event, row):
        """A hook that compares a row with the run's own of that step."""
        if event == "log" and row["step"] in logged:
            n_compared["log"] += 1
            for name in LOGGED:
                if name in row:
                    compare(row["step"], name, logged[row["step"]].get(name), row[name])
        if event == "save" and row["step"] in digests:
            n_compared["save"] += 1
            for part, text in row["digest"].items():
                compare(row["step"], f"the digest of {part}", digests[row["step"]][part], text)

    with tempfile.TemporaryDirectory(prefix="audit") as scratch:
        copy_checkpoint(ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir), first, scratch)
        windows = Path(out_dir, "windows.jsonl")
        if windows.exists():
            shutil.copy(windows, scratch)
        cfg = dataclasses.replace(
            config.repeatable(cfg), out_dir=scratch, ckpt_dir="", resume="must", stop=(str(last),),
            weights_every=0, eval_every=0, sample_every=0, sample_tokens=0, export="",
            export_every=0, track=(), profile="")
        train.main(cfg, hooks=[observe], task=task)
    first_step = min((step for step, _ in differences), default=None)
    return [text for step, text in differences if step == first_step], *n_compared.values()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", help="folder of the run")
    parser.add_argument("--first", type=int, required=True, help="step of a kept checkpoint")
    parser.add_argument("--last", type=int, required=True, help="step of a later save")
    args = parser.parse_args()
    try:
        differences, n_logged, n_digests = audit(args.out_dir, args.first, args.last)
    except ValueError as e:
        sys.exit(f"error: {e}")
    if differences:
        print("\n".join(["different", *differences]))
        return 1
    print(f"identical: steps {args.first + 1} to {args.last}, {n_logged} log rows and {n_digests} "
          "digests of the state")
    return 0


if __name__ == "__main__":
    sys.exit(main())
