# SPDX-License-Identifier: Apache-2.0
"""Train a part of a run again from one of its checkpoints, and compare digests and losses.

python tests/recipes/audit.py out/default --first 750 --last 1000

The first step must have a checkpoint (`ls out/default/ckpt`), and the last one must be the step of
a later save. Exit codes: 0 if both are identical; 1 if they differ, with the first step that does;
2 if the steps cannot be compared. The audit trains in a temporary folder and does not change the
run. On another machine, mesh or version of JAX, numbers are rounded differently, and the audit
finds that. For a run of another task call audit(out_dir, first, last, task, config class).
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # isort: skip  before JAX, whose memory it sets up
from train import ckpt, config, model

LOGGED = ("loss", "objective", "grad_norm", "lr")
# Fields that change neither the numbers of the training nor the steps of its log rows.
WITHOUT_EFFECT = {
    *config.LAUNCH_FIELDS,
    "out_dir", "ckpt_dir", "cache_dir", "token_cache", "wait_s", "epochs", "stop",
    "export", "export_dtype", "peer_timeout_s",
    "track", "eval_every", "eval_batches", "save_every", "max_to_keep", "keep_period",
    "weights_every", "export_every", "sample_every", "watch", "profile",
    "prompt", "n_samples", "sample_tokens", "temperature", "top_k", "top_p",
}


def config_of(rows, first, last, kind):
    """The config with which the run trained the steps from `first` to `last`.

    Raises ValueError when it was resumed in between with a config that trains differently.
    """
    launches = [row for row in rows if row["event"] == "start" and row["step"] < last]
    before = [row for row in launches if row["step"] <= first]
    if not before:
        raise ValueError(f"--first {first}: the log has no launch at or before that step")
    launch = before[-1]
    fields = launch["config"] | launch["mesh"]
    compared = sorted(fields.keys() - WITHOUT_EFFECT)
    for row in launches:
        if row["step"] <= first:
            continue
        resumed = row["config"] | row["mesh"]
        changed = [name for name in compared if resumed[name] != fields[name]]
        if changed:
            raise ValueError(f"--last {last}: the run was resumed at step {row['step']} with "
                             f"another {', '.join(changed)}; audit up to that step")
    saved = launch["config"]
    unknown = sorted(saved.keys() - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise ValueError(f"the run has fields that {kind.__name__} lacks: {', '.join(unknown)}. "
                         "Call audit.audit from Python with the task and the config class of its "
                         "recipe")
    return config.from_json(json.dumps(saved), "metrics.jsonl", kind)


def copy_checkpoint(root, step, scratch):
    """Copy the checkpoint of a step. Raises ValueError when it is missing."""
    if "://" in root:
        raise ValueError(f"{root}: is a bucket; copy its folder {step:09d} to this machine first")
    steps = ckpt.steps(root)
    if step not in steps:
        raise ValueError(f"--first {step}: {root} has the checkpoints of steps {steps}; choose one "
                         "of these, or keep more with --max_to_keep or --keep_period")
    shutil.copytree(Path(root, f"{step:09d}"), Path(scratch, "ckpt", f"{step:09d}"))


def audit(out_dir, first, last, task=train.TEXT, kind=config.Config):
    """Train steps first + 1 to last of the run in out_dir again.

    Returns {"differences": texts for the first step with any, "n_log_rows", "n_digests": numbers of
    compared rows and digests}. Raises ValueError when the steps cannot be trained again, or the
    audit ended before the last one.
    """
    # The rows to compare with.
    rows = ckpt.read_log(out_dir)
    logged = {}
    digests = {}
    for row in rows:
        if not first < row["step"] <= last:
            continue
        if row["event"] == "log":
            logged[row["step"]] = row
        if row["event"] == "save" and row["kind"] == "save":
            digests[row["step"]] = row["digest"]
    if last not in digests:
        raise ValueError(f"--last {last}: must be the step of a save of {out_dir} after {first}: "
                         f"{sorted(digests)}")
    cfg = dataclasses.replace(config_of(rows, first, last, kind), out_dir=str(out_dir))
    table = train.setup_run(cfg, task).table
    excluded = sorted(model.matching("save_exclude", cfg.save_exclude, table))
    missing = [name for name in excluded if table[name].get("trained", True)]
    if missing:
        raise ValueError(f"save_exclude: {', '.join(missing)} are trained and in no checkpoint, so "
                         "steps cannot be trained again")

    differences = []  # (step, text)
    n_compared = {"log": 0, "save": 0}

    def compare(step, name, saved, value):
        # metrics.jsonl has null for what is not finite.
        equal = saved == value or (saved is None and not math.isfinite(value))
        if not equal:
            differences.append((step, f"step {step}: {name} was {saved}, is {value}"))

    def compare_row(event, row):
        """A hook that compares a row with the row of the run at that step."""
        if event == "log" and row["step"] in logged:
            n_compared["log"] += 1
            for name in LOGGED:
                if name in row:
                    compare(row["step"], name, logged[row["step"]].get(name), row[name])
        if event == "save" and row["step"] in digests:
            n_compared["save"] += 1
            for part, text in row["digest"].items():
                compare(row["step"], f"the digest of {part}", digests[row["step"]][part], text)

    # Train again, in a temporary folder.
    with tempfile.TemporaryDirectory(prefix="audit") as scratch:
        copy_checkpoint(ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir), first, scratch)
        windows = Path(out_dir, "windows.jsonl")
        if windows.exists():
            shutil.copy(windows, scratch)
        cfg = dataclasses.replace(
            config.without_launch_fields(cfg), out_dir=scratch, ckpt_dir="", resume="must",
            stop=(str(last),), weights_every=0, eval_every=0, sample_every=0, sample_tokens=0,
            export="", export_every=0, track=(), profile="")
        # Print nothing: the messages would name a folder that is deleted afterwards.
        with (open(os.devnull, "w", encoding="utf-8") as nowhere,
              contextlib.redirect_stdout(nowhere)):
            summary = train.main(cfg, hooks=[compare_row], task=task)

    # Without a difference, all rows must have been compared.
    is_complete = n_compared["log"] == len(logged) and n_compared["save"] > 0
    if not differences and (summary["step"] != last or not is_complete):
        raise ValueError(f"the audit ended at step {summary['step']} ({summary['reason']}), after "
                         f"{n_compared['log']} of {len(logged)} log rows: nothing is proved")
    first_step = min((step for step, _ in differences), default=None)
    return {"differences": [text for step, text in differences if step == first_step],
            "n_log_rows": n_compared["log"], "n_digests": n_compared["save"]}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out_dir", help="folder of the run")
    parser.add_argument("--first", type=int, required=True, help="step of a checkpoint")
    parser.add_argument("--last", type=int, required=True, help="step of a later save")
    args = parser.parse_args()
    try:
        result = audit(args.out_dir, args.first, args.last)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if result["differences"]:
        print("different")
        for text in result["differences"]:
            print(text)
        return 1
    print(f"identical: steps {args.first + 1} to {args.last} (log rows: {result['n_log_rows']}, "
          f"digests of the state: {result['n_digests']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
