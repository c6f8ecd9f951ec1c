# SPDX-License-Identifier: Apache-2.0
"""A sweep of any fields with Ray Tune. ASHA stops trials with a high validation loss early.

pip install 'ray[tune]' && python tests/recipes/tune.py --sweep lr=1e-4:1e-2 d_model=64,128

Trial i is a run in out_dir/i. The same command once more resumes each trial where it stopped.
"""
import logging
import math
import os
import random
import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # isort: skip  before JAX, whose memory it sets up
import on_ray
from train import ckpt, config


@dataclass(frozen=True, kw_only=True)
class SweepConfig(config.Config):
    # fields to sweep: lr=LOW:HIGH draws from a log-uniform distribution, d_model=64,128 chooses
    sweep: tuple[str, ...] = ("lr=1e-4:1e-2",)
    n_trials: config.PosInt = 8  # number of trials; their values follow from seed
    grace_steps: config.PosInt = 100  # steps before a trial can be stopped
    # one of so many trials continues at each of the steps grace_steps x reduction^k
    reduction: config.PosInt = 3
    n_cpus: config.PosInt = 1  # CPUs per trial
    n_gpus: config.NonNegInt = 0  # GPUs per trial
    # address of a cluster as host:port, or auto; empty: start a cluster on this machine
    ray_address: str = ""
    out_dir: str = "out/tune"  # folder of the sweep
    # interval between evaluations, at which a trial may be stopped, as 50 or 1epoch
    eval_every: config.Interval = 50


# ---- the values of a trial

def draw(text, rng):
    """Draw (field, value) for one text of cfg.sweep. Raises ValueError if it is malformed."""
    where = f"sweep {text!r}"
    name, _, range_or_choices = text.partition("=")
    types = get_type_hints(config.Config)
    kind = types.get(name)
    if not kind:
        config.raise_if_errors([f"no such field ({config.did_you_mean(name, types)})"], where)
    if not range_or_choices:
        config.raise_if_errors(["must be FIELD=LOW:HIGH or FIELD=ONE,OTHER"], where)
    if kind in (int, float) and ":" in range_or_choices:
        return name, draw_log_uniform(range_or_choices, kind, rng, where)
    choice = rng.choice(range_or_choices.split(","))
    if kind in (int, float):
        return name, config.parse_number(choice, kind)
    if kind is bool and choice in ("True", "False"):
        return name, choice == "True"
    return name, choice


def draw_log_uniform(text, kind, rng, where):
    low, high = (config.parse_number(bound) for bound in text.split(":"))
    if not 0 < low < high:
        config.raise_if_errors(["must be 0 < LOW < HIGH"], where)
    value = math.exp(rng.uniform(math.log(low), math.log(high)))
    if kind is int:
        return round(value)
    return float(f"{value:.3g}")


def make_trials(cfg):
    """All trials: [{"values": {field: value}, "cfg": Config}].

    Raises ValueError before any trial is launched.
    """
    errors = []
    if cfg.reduction < 2:
        errors.append(config.field_error(cfg, "reduction", "must be at least 2"))
    if cfg.grace_steps >= cfg.steps:
        errors.append(config.field_error(
            cfg, "grace_steps", f"must be below steps {cfg.steps}, or no trial could be stopped"))
    if cfg.epochs:
        errors.append(config.field_error(cfg, "epochs", "must be 0: ASHA counts steps"))
    config.raise_if_errors(errors)

    choices = {"optimizer": train.steplib.OPTIMIZERS, "schedule": train.steplib.SCHEDULES}
    shared = {x.name: getattr(cfg, x.name) for x in fields(config.Config)}
    shared["explicit"] = tuple(name for name in cfg.explicit if name in shared)
    trials = []
    for i in range(cfg.n_trials):
        values = dict(draw(text, random.Random(f"{cfg.seed} {i} {text}")) for text in cfg.sweep)
        trial = shared | values
        trial["out_dir"] = str(Path(cfg.out_dir, str(i)))
        trial_cfg = config.Config(**trial)
        config.validate(trial_cfg, None, choices, config.text_errors)
        trials.append({"values": values, "cfg": trial_cfg})
    return trials


# ---- the sweep

def run(cfg):
    """Run the sweep and print its table. Returns the rows of `outcome`, the best trial first."""
    trials = make_trials(cfg)
    folder = os.getcwd()
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    on_ray.connect(cfg.ray_address, max(os.cpu_count(), cfg.n_cpus))
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    logging.getLogger("ray").setLevel(logging.CRITICAL)

    def work(given):
        def send(row):
            tune.report({"step": row["step"], "val_loss": row["val_loss"]})

        def report(event, row):
            if event == "eval" and row["step"] < cfg.steps:
                send(row)

        os.chdir(folder)
        trial_cfg = trials[given["trial"]]["cfg"]
        # The evaluations of an earlier launch of this sweep.
        for row in ckpt.read_log(trial_cfg.out_dir):
            report(row["event"], row)
        summary = train.main(trial_cfg, [report])
        # The last evaluation, only now that the trial has saved: ASHA may stop a trial whenever it
        # gets a loss, also after all steps.
        if summary["step"] == cfg.steps:
            send(summary)

    def print_row(_, row):
        """Print an evaluation. Ray Tune asks this function whether to stop the trial."""
        if not row.get("done"):  # the last row comes twice
            print(f"trial {row['config']['trial']:>3}  step {row['step']:>6}  "
                  f"validation loss {row['val_loss']:.4f}", flush=True)
        return False

    asha = ASHAScheduler("step", max_t=cfg.steps, grace_period=cfg.grace_steps,
                         reduction_factor=cfg.reduction, stop_last_trials=False)
    results = tune.Tuner(
        tune.with_resources(work, {"cpu": cfg.n_cpus, "gpu": cfg.n_gpus}),
        param_space={"trial": tune.grid_search(list(range(cfg.n_trials)))},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", scheduler=asha),
        run_config=tune.RunConfig(storage_path=os.path.abspath(f"{cfg.out_dir}/ray"), verbose=0,
                                  stop=print_row)).fit()
    rows = [outcome(i, trials[i], result) for i, result in enumerate(results)]
    rows.sort(key=lambda row: row["val_loss"])
    print_table(rows)
    return rows


def outcome(i, trial, result):
    """The outcome of a trial, from its reports and its log.

    {"trial", "values", "out_dir", "step", "val_loss", "state", "error"}; state: done, stopped,
    unfinished or failed.
    """
    reported = {"step": 0, "val_loss": math.inf}
    if result.metrics:
        reported = reported | result.metrics
    row = {"trial": i, "values": trial["values"], "out_dir": trial["cfg"].out_dir,
           "step": reported["step"], "val_loss": reported["val_loss"],
           "state": "unfinished", "error": ""}
    log = ckpt.read_log(trial["cfg"].out_dir)
    if result.error:
        row["state"] = "failed"
        row["error"] = str(result.error).strip().splitlines()[-1]
    elif log and log[-1]["event"] == "end":
        row["state"] = "done"
        if log[-1]["exit_code"]:
            row["error"] = log[-1]["reason"]
    elif reported.get("done"):
        row["state"] = "stopped"
    return row


def print_table(rows):
    names = list(rows[0]["values"])
    table = [["trial", "step", "validation loss", "", *names]]
    for row in rows:
        line = [str(row["trial"]), str(row["step"]), f"{row['val_loss']:.4f}", row["state"]]
        line += [str(row["values"][name]) for name in names]
        table.append(line)
    widths = [max(len(cell) for cell in column) for column in zip(*table)]
    print()
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths))[:80])
    for row in rows:
        if row["error"]:
            print(f"trial {row['trial']}: {row['error']}")
    best = rows[0]
    if best["step"]:
        command = ["python", os.path.relpath(train.__file__), "--config",
                   f"{best['out_dir']}/config.json", "--out_dir", f"{best['out_dir']}-again"]
        print(f"best: trial {best['trial']}; to repeat it: {shlex.join(command)}")


def main(cfg, hooks, task):
    rows = run(cfg)
    return {"exit_code": int(all(row["state"] == "failed" for row in rows))}


if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], kind=SweepConfig, main=main))
