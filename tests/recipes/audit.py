# SPDX-License-Identifier: Apache-2.0
"""Train a stretch of a run again, from a checkpoint that it kept; compare digests and losses.

python tests/recipes/audit.py out --first 500 --last 600

The first step must have a checkpoint that the run kept (`ls out/ckpt`), the last one must be that
of a later save. Prints "identical" and ends with 0, or names the first step that differs and ends
with 1; with 2 when the stretch cannot be compared. The run is not touched: the stretch is trained
in a temporary folder. Another machine, mesh or version of JAX rounds differently, which is then
what the audit finds. For a run of another task: audit(out_dir, first, last, task, config class).
"""
import argparse
import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # isort: skip  before JAX, whose memory it sets up
from train import ckpt, config, model

LOGGED = ("loss", "objective", "grad_norm", "lr")
# Fields that change neither a bit of the training nor the steps of its log.
UNSEEN = {*config.LAUNCH_FIELDS, *"out_dir ckpt_dir cache_dir token_cache wait_s stop track "
          "peer_timeout_s "
          "epochs eval_every eval_batches save_every max_to_keep keep_period weights_every export "
          "export_every export_dtype export_lora sample_every watch profile prompt n_samples "
          "sample_tokens temperature top_k top_p".split()}


def config_of(rows, first, last, kind):
    """The config under which the run trained the steps after `first`, up to `last`. Raises
    ValueError when it was resumed in between under a config that trains differently.
    """
    starts = [row for row in rows if row["event"] == "start" and row["step"] < last]
    before = [row for row in starts if row["step"] <= first]
    if not before:
        raise ValueError(f"--first {first}: the log has no launch at or before that step")
    resumed = [row for row in starts if row["step"] > first]
    begun = before[-1]["config"] | before[-1]["mesh"]
    for row in resumed:
        resumed_as = row["config"] | row["mesh"]
        changed = [name for name in sorted({*begun} - UNSEEN) if resumed_as[name] != begun[name]]
        if changed:
            raise ValueError(f"--last {last}: the run was resumed at step {row['step']} with "
                             f"another {', '.join(changed)}; audit up to that step")
    saved = before[-1]["config"]
    foreign = sorted(saved.keys() - {field.name for field in dataclasses.fields(kind)})
    if foreign:
        raise ValueError(f"the run has fields that {kind.__name__} has not: {', '.join(foreign)}. "
                         "Call audit.audit from Python with the task and the config class of its "
                         "recipe")
    return config.from_json(json.dumps(saved), "metrics.jsonl", kind)


def copy_checkpoint(root, step, scratch):
    """Copy the checkpoint of a step. Raises ValueError when it is not there."""
    if "://" in root:
        raise ValueError(f"{root}: is a bucket; copy its folder {step:09d} to this machine first")
    kept = ckpt.steps(root)
    if step not in kept:
        raise ValueError(f"--first {step}: {root} keeps the checkpoints of steps {kept}; choose "
                         "one of these, or keep more by --max_to_keep or --keep_period")
    shutil.copytree(Path(root, f"{step:09d}"), Path(scratch, "ckpt", f"{step:09d}"))


def audit(out_dir, first, last, task=train.TEXT, kind=config.Config):
    """Train steps first + 1 to last of the run in out_dir again; (differences in words of the first
    step that has any, number of log rows compared, number of digests compared). Raises ValueError
    when the stretch cannot be trained again, or was not trained to its end.
    """
    rows = ckpt.read_log(out_dir)
    within = [row for row in rows if first < row["step"] <= last]
    logged = {row["step"]: row for row in within if row["event"] == "log"}
    digests = {row["step"]: row["digest"] for row in within
               if row["event"] == "save" and row["kind"] == "save"}
    if last not in digests:
        raise ValueError(f"--last {last}: must be the step of a save of {out_dir} after {first}: "
                         f"{sorted(digests)}")
    cfg = dataclasses.replace(config_of(rows, first, last, kind), out_dir=str(out_dir))
    table = train.setup_run(cfg, task)["table"]
    lost = [name for name in sorted(model.matching("save_exclude", cfg.save_exclude, table))
            if table[name].get("trained", True)]
    if lost:
        raise ValueError(f"save_exclude: {', '.join(lost)} are trained and in no checkpoint, so "
                         "that no stretch can be trained again")
    differences, n_compared = [], {"log": 0, "save": 0}

    def compare(step, what, saved, value):
        equal = saved == value or (saved is None and not math.isfinite(value))
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
        # What the run prints would be misleading: its folder is gone afterwards.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            summary = train.main(cfg, hooks=[observe], task=task)
    first_step = min((step for step, _ in differences), default=None)
    complete = n_compared["log"] == len(logged) and n_compared["save"]
    if not differences and (summary["step"] != last or not complete):
        raise ValueError(f"the audit ended at step {summary['step']} ({summary['reason']}), after "
                         f"{n_compared['log']} of {len(logged)} log rows: nothing is proved")
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
        print(f"error: {e}", file=sys.stderr)
        return 2
    if differences:
        print("\n".join(["different", *differences]))
        return 1
    print(f"identical: steps {args.first + 1} to {args.last} (log rows: {n_logged}, digests of the "
          f"state: {n_digests})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
