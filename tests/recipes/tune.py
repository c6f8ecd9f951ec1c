# SPDX-License-Identifier: Apache-2.0
"""A sweep of any fields with Ray Tune, in which ASHA stops trials whose validation loss is behind.

pip install 'ray[tune]' && python tests/recipes/tune.py --sweep lr=1e-4:1e-2 d_model=64,128

Trial i is a run in out_dir/i. The same command once more goes on with each where it stopped.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # isort: skip  before JAX, whose memory it sets up
import on_ray

import ckpt
import config


@dataclass(frozen=True, kw_only=True)
class SweepConfig(config.Config):
    sweep: tuple[str, ...] = ("lr=1e-4:1e-2",)  # LOW:HIGH is log-uniform; d_model=64,128 a choice
    n_trials: config.PosInt = 8  # trials, whose values follow from seed
    grace_steps: config.PosInt = 100  # updates before a trial can be stopped
    reduction: config.PosInt = 3  # one of so many trials goes on at grace_steps x reduction^k
    n_cpus: config.PosInt = 1  # CPUs of a trial
    n_gpus: config.NonNegInt = 0  # GPUs of a trial
    ray_address: str = ""  # host:port of a cluster, or auto; empty: start one on this machine
    out_dir: str = "out/tune"  # folder of the sweep
    eval_every: config.Interval = 50  # between evaluations, at which a trial may be stopped


def draw(text, rng):
    """(field, value) of one text of cfg.sweep. Raises ValueError."""
    name, _, words = text.partition("=")
    kinds, numeric = get_type_hints(config.Config), (int, float)
    kind = kinds.get(name)
    config.raise_if_errors([not kind and f"no such field ({config.did_you_mean(name, kinds)})",
                      not words and "must be FIELD=LOW:HIGH or FIELD=ONE,OTHER"], f"sweep {text!r}")
    if kind in numeric and ":" in words:
        low, high = (config.parse_number(word) for word in words.split(":"))
        config.raise_if_errors([not 0 < low < high and "must be 0 < LOW < HIGH"], f"sweep {text!r}")
        value = math.exp(rng.uniform(math.log(low), math.log(high)))
        return name, round(value) if kind is int else float(f"{value:.3g}")
    word = rng.choice(words.split(","))
    return name, (config.parse_number(word, kind) if kind in numeric else
                  {"True": True, "False": False}.get(word, word) if kind is bool else word)


def trials_of(cfg):
    """[({field: value}, Config)] of all trials. Raises ValueError before any of them starts."""
    config.raise_if_errors([
        cfg.reduction < 2 and config.field_error(cfg, "reduction", "must be at least 2"),
        cfg.grace_steps > cfg.steps and config.field_error(
            cfg, "grace_steps", f"must be at most steps {cfg.steps}"),
        cfg.epochs and config.field_error(cfg, "epochs", "must be 0: rungs count --steps")])
    plain, trials = {x.name: getattr(cfg, x.name) for x in fields(config.Config)}, []
    for i in range(cfg.n_trials):
        values = dict(draw(text, random.Random(f"{cfg.seed} {i} {text}")) for text in cfg.sweep)
        trial = config.Config(**plain | values | {"out_dir": str(Path(cfg.out_dir, str(i)))})
        config.validate(trial, None, {"optimizer": train.steplib.OPTIMIZERS,
                                      "schedule": train.steplib.SCHEDULES}, config.text_errors)
        trials.append((values, trial))
    return trials


def run(cfg):
    """Run the sweep and print it; a row {"trial", "values", "step", "val_loss", "state", ...} of
    each trial, the best first.
    """
    trials, folder = trials_of(cfg), os.getcwd()
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}
    on_ray.connect(cfg.ray_address, max(os.cpu_count(), cfg.n_cpus))
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    logging.getLogger("ray").setLevel(logging.CRITICAL)

    def work(given):
        def report(event, row):
            if event == "eval":
                tune.report({"step": row["step"], "val_loss": row["val_loss"]})

        os.chdir(folder)
        trial = trials[given["trial"]][1]
        for row in ckpt.read_log(trial.out_dir):  # of an earlier sweep
            report(row["event"], row)
        train.main(trial, [report])

    def tell(_, row):
        """Print a row; Tune asks whether to stop the trial."""
        if not row.get("done"):  # which comes twice
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
                                  stop=tell)).fit()
    rows = [outcome(i, *trials[i], result) for i, result in enumerate(results)]
    rows.sort(key=lambda row: row["val_loss"])
    show(rows)
    return rows


def outcome(i, values, trial, result):
    """What became of a trial, from what it reported and its own log."""
    told = {"step": 0, "val_loss": math.inf} | (result.metrics or {})
    row = {"trial": i, "values": values, "out_dir": trial.out_dir, "fault": "",
           "step": told["step"], "val_loss": told["val_loss"]}
    last = (ckpt.read_log(trial.out_dir) or [{"event": ""}])[-1]
    if result.error:
        return row | {"state": "failed", "fault": str(result.error).strip().splitlines()[-1]}
    if last["event"] == "end":
        return row | {"state": "done", "fault": last["exit_code"] and last["reason"]}
    return row | {"state": "stopped" if told.get("done") else "unfinished"}


def show(rows):
    names, best = list(rows[0]["values"]), rows[0]
    table = [["trial", "step", "validation loss", "", *names]] + [
        [str(row["trial"]), str(row["step"]), f"{row['val_loss']:.4f}", row["state"],
         *(str(row["values"][name]) for name in names)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    print()
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths))[:80])
    for row in rows:
        if row["fault"]:
            print(f"trial {row['trial']}: {row['fault']}")
    if best["step"]:
        command = ["python", os.path.relpath(train.__file__), "--config",
                   f"{best['out_dir']}/config.json", "--out_dir", f"{best['out_dir']}-again"]
        print(f"best: trial {best['trial']}; to repeat it: {shlex.join(command)}")


if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], kind=SweepConfig, main=lambda cfg, hooks, task: {
        "exit_code": int(all(row["state"] == "failed" for row in run(cfg)))}))
