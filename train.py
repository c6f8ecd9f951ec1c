# SPDX-License-Identifier: Apache-2.0
"""Wiring, and one loop that reads aloud: save, evaluate, sample, stop?, get a batch, dispatch the
step, read the metrics of the one before.

The only file that imports the others. What is trained is an argument, `task`; `TEXT` is the one for
language models. Invariant: every stop but a crash saves and says why.
"""
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"Sixfile needs Python 3.11 or later, as JAX does; this is {sys.version.split()[0]}")

import contextlib
import ctypes
import dataclasses
import dis
import errno
import fcntl
import importlib.metadata
import importlib.util
import json
import math
import os
import queue
import resource
import runpy
import shutil
import signal
import socket
import textwrap
import threading
import time
import traceback
from collections import deque
from functools import partial
from pathlib import Path

# Before JAX starts its threads: have glibc keep all freed memory. On a CPU, new pages at each step
# took from a third to two thirds of its time.
with contextlib.suppress(OSError, AttributeError):  # another C library
    # M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h
    for option, value in ((-4, 0), (-1, -1), (-2, 2**28)):
        ctypes.CDLL(None).mallopt(option, value)

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache
from tqdm import tqdm

import ckpt
import config
import data
import model
import step as steplib

ALL_DONE = "all {} steps are done"  # the reason of a stop after which nothing is left to do

# ---- what is trained

def resolve_text(cfg, platform):
    """cfg with vocabulary, sizes and attention kernel worked out."""
    vocab_size = cfg.vocab_size or data.make_tokenizer(cfg.tokenizer)["vocab_size"]
    cfg = config.derive_text(dataclasses.replace(cfg, vocab_size=vocab_size))
    return dataclasses.replace(cfg, attention=model.choose_attention(cfg, platform))


TEXT = {
    "table": model.param_table,  # cfg -> {name: {"shape", "spec", "init", "trained"}}
    "loss": model.loss_fn,  # (params, batch, cfg) -> ({name: sum}, {name: count}): "objective" ...
    "batch": model.batch_shapes,  # cfg -> {name: (shape, dtype, partition spec)} of a batch
    # (cfg, parts) -> {"train": source, "val": source or None}; a source is {"n": examples, "batch":
    # (step, rows) -> {name: array of these rows of the batch}, or None to be asked again later,
    # "fingerprint": text that must not change when a run resumes}; also, if it has them, "about":
    # words for the screen, and what data.open_text and data.in_windows say of mixtures and windows.
    # A "val" may have "at" instead of a batch: step -> source, None to be asked again later
    "open": data.open_text,
    # From here on a task may leave out what it has not.
    "init": model.init,  # (key, cfg) -> {name: array}; default: as "init" in the table says
    "resolve": resolve_text,  # (cfg, platform) -> cfg with nothing left to work out
    "faults": config.text_faults,  # (cfg, {axis: size}) -> why it cannot run, in words
    "unit": ("token", lambda cfg: cfg.batch_size * cfg.seq_len),  # of rates; how many an update
    # (cfg, means of a batch or {}) -> (FLOPs per unit, those computed twice, formula)
    "flops": lambda cfg, means: model.flops_per_token(cfg, cfg.seq_len, means.get("keys")),
    "metrics": data.text_metrics,  # ({name: mean}, source) -> more, in training and evaluation
    # (params, cfg, key) -> texts to print
    "preview": lambda params, cfg, key: model.sample_text(
        params, cfg, key, data.make_tokenizer(cfg.tokenizer)),
    "init_names": model.names_to_load,  # (cfg, table, {name} saved) -> {name} that init_from gives
    "savers": model.memory_savers,  # (cfg, sp) -> flags that would save memory
    "about": lambda cfg: f"attention {cfg.attention}",  # cfg -> words for the screen
    # Weights in another format: cfg with what those in init_from say of the model; {"names": {name:
    # shape or None}, "read": {name: like} -> {name: array}}, or None when path has none; writing
    # cfg.export, or with params None only looking for faults.
    "adopt": lambda cfg: adopt_hf(cfg),
    "weights": lambda path, cfg: open_hf(path, cfg),
    "export": lambda cfg, params: export_hf(cfg, params),
}


def prepare(cfg, task=TEXT, devices=None):
    """{"cfg" (worked out), "task", "mesh", "table", "batch" (shapes with shardings), "beat" (of
    watch_peers), "at_once" (whether a step is done when it returns)} on these devices (default: all
    at hand). start_run adds "hooks", "train" and "val" (sources), "periods", "stops", "sources" (of
    parameters), "left_out", "programs", "first_step", "wishes" (to stop), "meta" (what a checkpoint
    says of the run), "emit".

    Raises ValueError for every fault that can be seen without data and without compiling.
    """
    config.raise_all(config.key_faults(
        "task", task, TASK_RULES, TEXT.keys() - {"init"} - TASK_DEFAULTS.keys()))
    task = TASK_DEFAULTS | {"init": lambda key, c: model.init(key, c, task["table"](c))} | task
    devices = devices or jax.devices()
    keep_programs(cfg)
    cfg = task["adopt"](cfg)
    config.validate(cfg, len(devices), {
        "optimizer": steplib.OPTIMIZERS, "optimizers": steplib.OPTIMIZERS,
        "schedule": steplib.SCHEDULES, "track": TRACKERS}, task["faults"])
    platform = steplib.platform(devices[0])
    if platform.endswith("cuda") and len(devices) > 1:
        # Collectives of a layer run beside the layers before and after it.
        jax.config.update("jax_optimization_level", "O1")
    cfg = dataclasses.replace(cfg, dtype=steplib.choose_dtype(cfg.dtype, platform))
    cfg = task["resolve"](cfg, platform)
    config.raise_all([
        f"track {name!r}: is not installed: pip install {name}" for name in cfg.track
        if TRACKERS[name] in (wandb, tensorboard) and not importlib.util.find_spec(name)])
    table, mesh = grouped(task["table"](cfg), cfg), steplib.make_mesh(cfg, devices)
    config.raise_all(table_faults(table, task["batch"](cfg)), "task")
    cfg = dataclasses.replace(cfg, watch=tuple(sorted(model.matching("watch", cfg.watch, table))))
    config.raise_all(steplib.check_shapes(table, mesh), "mesh and model do not fit")
    if cfg.export:
        task["export"](cfg, None)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))
             for name, (shape, dtype, spec) in task["batch"](cfg).items()}
    return {"cfg": cfg, "task": task, "mesh": mesh, "table": table, "batch": batch,
            "beat": lambda **changes: None, "at_once": platform == "cpu" and mesh.size == 1}


# ---- a run

def main(cfg, hooks=(), task=TEXT, state=None, params=None):
    """Do what cfg.mode says; a summary dict with at least "step", "reason" and "exit_code", after
    training also "state", "mesh" and "checkpoint" (path of the newest).

    hooks: functions hook(event, value); what one returns, unless None, replaces the value. See
    README.md for events. task: what to train, as TEXT. state, params: start from these rather than
    from disk.
    """
    began = time.perf_counter()
    join_processes(cfg)  # JAX then catches SIGTERM itself, so this is before catch_signals
    hooks = (*hooks, *load_hooks(cfg.hooks))
    if cfg.mode != "train":
        return {"plan": plan, "data": prepare_data}.get(cfg.mode, run_saved)(cfg, task, hooks)
    with catch_signals() as (signals, in_loop):
        run = prepare(cfg, task)
        with lock_folders(run["cfg"]):
            observers = make_observers(run["cfg"]) if is_main() else []
            run["beat"] = watch_peers(run["cfg"], partial(end_at_once, observers))
            try:
                started = start_run(run, hooks, observers, state, params, began)
                if not started:
                    step, _ = newest_meta(ckpt_root(run["cfg"]))
                    return {"step": step, "exit_code": 0, "reason": "finished before"}
                in_loop.set()
                with explain_memory(run):
                    return train(*started, signals)
            except BaseException as e:
                end_observed(run, observers, e)
                raise
            finally:
                run["beat"](done=True)


def start_run(run, hooks, observers, state, params, began):
    """Data, compilation, first state, log: (run with all that is fixed while it lasts, state,
    {event: (step, second)} of what was done at its step, clock), or None when nothing is left.
    """
    cfg, task = run["cfg"], run["task"]
    opened = open_data(task, cfg, ("train", "val"))
    # A folder that grows may have had fewer files when another process listed it.
    opened["train"]["n"] = ckpt.from_main(lambda: int(opened["train"]["n"]))
    if cfg.epochs:
        steps = cfg.epochs * opened["train"]["n"] / cfg.batch_size
        # In windows the last few examples wait for the next file.
        steps = math.floor(steps) if "windows" in opened["train"] else math.ceil(steps)
        cfg = dataclasses.replace(cfg, steps=max(1, steps))
    periods = {event: config.periods(getattr(cfg, f"{event}_every")) for event in config.EVENTS}
    run = run | {"cfg": cfg, "hooks": hooks, "periods": periods, "sources": [],
                 "stops": config.stops(cfg),
                 "left_out": model.matching("leave_out", cfg.leave_out, run["table"]), **opened}
    saved, meta = find_start(cfg, given=state is not None or params is not None)
    if "resume" in run["train"]:
        run["train"]["resume"](meta.get("data", {}).get("windows", []))
    if not opened["val"] and (lost := [n for n, *_ in run["stops"] if n.startswith("val_")]):
        raise ValueError(f"stop {lost[0]}: there is no held-out data; set --val_data or --val_frac")
    origin, first_state = choose_start(run, state, params, meta)
    if meta and is_finished(cfg, saved):
        return None
    say(headline(run))
    tell_data(opened, say)
    tell_lost(run)
    say(f"compiling the update for {cfg.steps} steps ...")
    clock = start_clock(began)
    spend(clock, "start")
    with explain_memory(run):
        programs = steplib.compile_steps(*program_parts(run))
        steplib.check_fits(programs["memory"], run["mesh"])
    compile_s = spend(clock, "compile")
    state = call(hooks, "load", first_state(programs))
    step = int(state["step"])
    begin_out_dir(cfg)
    rows = ckpt.from_main(lambda: [[row["step"], row["event"], row.get("time_s")]
                                   for row in read_log(cfg.out_dir)])
    go_on_counting(clock, rows, step)
    last = {event: (step, 0.0) for row_step, event, _ in rows if row_step == step}
    run |= {"programs": programs, "first_step": step, "wishes": []}
    run |= {"meta": describe(run, meta), "emit": make_emit(run, observers, clock)}
    run["emit"]("start", {"step": step, "origin": origin, "compile_s": compile_s,
                          "time_s": {what: clock[what] for what in SPENT}} | run["meta"])
    return run, state, last | ({"save": (step, 0.0)} if meta else {}), clock


def train(run, state, last, clock, signals):
    """The loop, to cfg.steps or until why_stop says so; the summary.

    last: {event: (step, second)} of what happened at the first step already. signals: names of
    those caught.
    """
    cfg, emit, programs = run["cfg"], run["emit"], run["programs"]
    step, latest, previous, saving = run["first_step"], {}, None, {}
    asked = {"step": None, "second": 0.0, "signal": None, "file": False, "wishes": []}

    def halted(): return why_stop_waiting(run, step, asked, latest, signals, clock)
    batches = data.prefetch(make_batch_at(run, run["train"]), step, cfg.steps, stopped=halted)
    while True:
        if (due := due_events(run, step, last, asked["second"])) or run["at_once"]:
            latest, previous = latest | report(run, previous, clock), None
        for event in [event for event in ("epoch", "window") if event in due]:
            emit(event, {"step": step, event: int(progress(run)[event](step))})
        if "reload" in due:  # before the save, which would undo it in a resumed run
            state = reload(run, state, step)
        for kind in [kind for kind in ("save", "weights") if kind in due]:  # before all else
            saving = save_state(run, state, step, saving, kind, temporary=due[kind] == "second")
        if "eval" in due and run["val"] and not interrupted(signals):
            val = held_out_at(run, step, clock, halted)
            row = val and evaluate(run, val, programs["eval_step"], state["params"], signals)
            latest |= newest(run, "eval", emit("eval", {"step": step} | row)) if row else {}
        if "sample" in due and run["task"]["preview"] and not interrupted(signals):
            preview(run, state["params"], step)
        if "export" in due and not interrupted(signals):
            latest |= export(run, state["params"], step)
        last |= dict.fromkeys(due, (step, asked["second"]))
        asked = ask(run, step, asked, signals, clock)
        if stop := why_stop(run, step, asked, latest):
            break
        batch, waited_s = next_batch(run, batches, state, step, saving)
        if batch is None:  # none yet, or a reason to stop came while there was none
            continue
        batch = call(run["hooks"], "data", batch)
        emit("dispatch", {"step": step + 1})
        with jax.transfer_guard("disallow"):  # a hidden copy would stall the step
            state, metrics = programs["train_step"](state, batch)
        step += 1
        state = call(run["hooks"], "state", state)
        latest |= report(run, previous, clock)  # of the step before, while this one runs
        previous = step, metrics, waited_s
        end_saves(run, saving, [kind for kind, (_, future) in saving.items() if future.done()])
    latest |= report(run, previous, clock)
    batches.close()
    if last.get("save", (None, 0))[0] != step:
        saving = save_state(run, state, step, saving)
    stop = why_stop(run, step, asked, latest) or stop  # the last metrics may say worse
    return end_run(run, state, step, stop, saving, latest, clock)


def why_stop(run, step, asked, latest):
    """The one answer to whether to stop before the next batch: (reason in words, exit code), or
    None to go on. asked: of `ask`. latest: {metric: newest value}.
    """
    cfg = run["cfg"]
    if not latest.get("finite", True) and cfg.nan == "stop":
        return f"a loss or gradient is not finite near step {step}; the last good state is saved", 1
    if asked["signal"]:
        return asked["signal"], 0
    values = latest | {"step": step, "updates": step - run["first_step"],
                       "second": asked["second"], "file": asked["file"]}
    for name, test, bound, reason, exit_code in run["stops"]:
        if name in values and test(values[name], bound):
            return reason.format(values[name], bound), exit_code
    if asked["wishes"]:
        return asked["wishes"][0]
    if step >= cfg.steps:
        return ALL_DONE.format(cfg.steps), 0
    return None


def why_stop_waiting(run, step, asked, latest, signals, clock):
    """why_stop while there is no data; several processes, which cannot agree then, go on waiting.
    """
    run["beat"](doing="waiting for data", step=step)
    return jax.process_count() == 1 and why_stop(
        run, step, ask(run, None, asked, signals, clock), latest)


def report(run, previous, clock):
    """Wait for the metrics of the step before and emit "step", at a log point also "log". Returns
    {metric: value} for why_stop and the summary.
    """
    if previous is None:
        return {}
    (step, metrics, waited_s), cfg, emit = previous, run["cfg"], run["emit"]
    watched = metrics.pop("watch", {})  # stays on the device until it is logged
    finite = bool(metrics.pop("finite"))
    logged = not finite or (cfg.log_every and step % cfg.log_every == 0)
    means = jax.device_get(metrics) if logged or run["hooks"] else {}  # takes up to a millisecond
    clock["data"] += waited_s
    clock["step"] -= waited_s
    row = emit("step", {"step": step} | scalars(means))
    latest = {} if finite else {"finite": False}
    if not finite and cfg.nan == "raise":
        raise FloatingPointError(f"step {step}: the loss or a gradient is not finite: {row}")
    if logged:
        row = row | scalars(run["task"]["metrics"](means, run["train"]))
        of_this_process = rates(run, step, clock, row)
        if watched:
            row["watch"] = jax.tree.map(np.ndarray.tolist, jax.device_get(watched))
        row = emit("log", row | of_this_process)
        latest |= newest(run, "log", {k: x for k, x in row.items() if k not in of_this_process})
    return latest


def save_state(run, state, step, saving, kind="save", temporary=False):
    """Start a checkpoint once the one before of its kind ("save", or "weights" for parameters
    alone) is committed; saving with it. saving: {kind: (step, Future)}. meta.json says where the
    run stands in its data, and under what config.
    """
    cfg, train, began = run["cfg"], run["train"], time.perf_counter()
    end_saves(run, saving, [kind])
    waited_s = time.perf_counter() - began
    epoch, sequence = divmod(step * cfg.batch_size, train["n"])
    place = {"fingerprint": train["fingerprint"], "epoch": epoch, "sequence": sequence}
    if "windows" in train:
        place["windows"] = train["windows"](step)
    root, keep = ckpt_root(cfg), (cfg.keep, cfg.keep_every)
    if kind == "weights":
        root, keep, state = ckpt.below(root, kind), (0, 0), {"params": state["params"]}
    tree = {name: x for name, x in ckpt.flatten(state)[0].items()
            if name.split("/")[-1] not in run["left_out"]}
    began = time.perf_counter()
    future = ckpt.save(root, step, tree, run["meta"] | {"data": place}, *keep, temporary, say)
    run["emit"]("save", {"step": step, "kind": kind, "waited_s": waited_s,
                         "blocked_s": time.perf_counter() - began})
    return saving | {kind: (step, future)}


# ---- optional

# A single CPU runs a step in this thread: of others, glibc would return large blocks after each, or
# have those that compile wait for each other in one arena.
jax.config.update("jax_cpu_enable_async_dispatch", False)

TASK_DEFAULTS = {
    "resolve": lambda cfg, platform: cfg, "faults": lambda cfg, sizes: [],
    "unit": ("example", lambda cfg: cfg.batch_size), "flops": None,
    "metrics": lambda means, source: {}, "preview": None,
    "init_names": lambda cfg, table, saved: set(table), "savers": lambda cfg, sp: [],
    "about": lambda cfg: "", "adopt": lambda cfg: cfg, "weights": lambda path, cfg: None,
    "export": lambda cfg, params: config.raise_all([f"export {cfg.export!r}: this task has none"])}


def is_number(x):
    return isinstance(x, int | float | np.number) and not isinstance(x, bool)


ANY = (lambda x: True, "")
TASK_RULES = dict.fromkeys(TEXT, ANY) | {"unit": (
    lambda x: isinstance(x, tuple) and len(x) == 2 and callable(x[1]), "(name, cfg -> how many)")}
ROW_RULES = {  # of a table, and in part of a batch
    "shape": (lambda x: isinstance(x, tuple | list) and all(
        isinstance(n, int | np.integer) and n > 0 for n in x), "a tuple of whole numbers above 0"),
    "spec": (lambda x: isinstance(x, jax.P) and {*jax.tree.leaves(tuple(x))} <= {*steplib.AXES},
             f"a PartitionSpec of {', '.join(steplib.AXES)}"),
    "init": (lambda x: isinstance(x, tuple) and len(x) == 2 and is_number(x[1]),
             "('normal', std) or ('constant', value)"),
    "trained": (lambda x: isinstance(x, bool), "True or False"),
    "ids": (lambda x: isinstance(x, tuple), "a tuple of names of arrays of the batch"),
    **dict.fromkeys(("lr_mult", "decay_mult"), (lambda x: is_number(x) and x >= 0, "0 or above")),
    "optimizer": (lambda x: x in steplib.OPTIMIZERS, f"of {', '.join(steplib.OPTIMIZERS)}")}
SOURCE_RULES = {"n": (lambda n: is_number(n) and n >= 1, "how many examples, at least 1"),
                "batch": (callable, "a function"),
                "fingerprint": (lambda x: isinstance(x, str), "text")}


def open_data(task, cfg, parts):
    """What task["open"] gives, checked: {"train", "val"}: a source or None."""
    opened, found = task["open"](cfg, parts), {"train": None, "val": None}
    config.raise_all(config.key_faults("open", opened, dict.fromkeys(found, ANY)), "task")
    found |= opened
    whole = not {"at", "parts"} & {*(found["val"] or ())}
    required = {"train": SOURCE_RULES, "val": ("n", "batch") if whole else ()}
    config.raise_all([fault for part in parts if part == "train" or found[part] for fault in
                      config.key_faults(f"open: {part}", found[part], SOURCE_RULES, required[part],
                                        others=True)], "task")
    return found


def grouped(table, cfg):
    """The table, with what lr_mult, decay_mult, optimizers and freeze say of some of its rows; of
    several that match a parameter the last holds.
    """
    for field, key, convert in (("lr_mult", "lr_mult", config.number), (
            "decay_mult", "decay_mult", config.number), ("optimizers", "optimizer", str)):
        for pattern, _, value in (text.rpartition("=") for text in getattr(cfg, field)):
            for name in model.matching(field, (pattern,), table):
                table[name] = table[name] | {key: convert(value)}
    for name in model.matching("freeze", cfg.freeze, table):
        table[name] = table[name] | {"trained": False}
    return table


def table_faults(table, batch):
    """Faults, in words, of what a task's "table" and "batch" give."""
    faults = [fault for name, row in table.items() for fault in (
        config.key_faults(f"table: {name}", row, ROW_RULES, ("shape", "spec", "init")) or [
            len(row["spec"]) > len(row["shape"])
            and f"table: {name}: spec {row['spec']}: is longer than shape {row['shape']}",
            {*row.get("ids", ())} - {*batch} and f"table: {name}: ids {row['ids']}: must be names "
            f"of arrays of the batch, as in ({next(iter(batch))!r},)"])]
    if not any(isinstance(row, dict) and row.get("trained", True) for row in table.values()):
        faults.append("table: no parameter is trained")
    return faults + [fault for name, entry in batch.items() for fault in config.key_faults(
        f"batch: {name}", dict(zip(("shape", "dtype", "spec"), entry, strict=False)),
        ROW_RULES | {"dtype": ANY}, ("shape", "dtype", "spec"))]


def program_parts(run):
    """The arguments of lower_steps and compile_steps."""
    task, replaced = run["task"], partial(call, run.get("hooks", ()))
    return (*map(run.get, ("cfg", "mesh", "table")), task["loss"], task["init"], run["batch"],
            replaced)


def due_events(run, step, last, second):
    """{event: why} of what is due at this step and was not done at it: "step", "epoch", "window",
    "second" or, after the last update, "end". last: {event: (step, second) of the last time}.
    """
    cfg, done, due = run["cfg"], progress(run), {}
    optional = {"weights", "reload", "epoch", "window", *([] if cfg.export else ["export"])}
    always = {"epoch": {"epoch": 1}, "window": {"window": 1}}
    for event, periods in (run["periods"] | always).items():
        last_step, last_second = last.get(event, (0, 0.0))
        if step == last_step:
            continue
        if event == "eval":  # of windows there is one after each
            periods = {"window": 1} | periods
        for unit, n in periods.items():
            if due.get(event, "second") == "second" and (  # a save by time is temporary
                    second - last_second >= n if unit == "second" else
                    done[unit](step) // n > done[unit](step - 1) // n):
                due[event] = unit
        if step >= cfg.steps and (event not in optional or (event == "weights" and periods)):
            due[event] = "end"
    return due


def progress(run):
    """{unit of a period: function of the step, how many of it are done}."""
    cfg, train = run["cfg"], run["train"]
    return {"step": lambda step: step, "window": train.get("finished", lambda step: 0),
            # 1e-9, since 1.2 // 0.4 is 2 in floating point
            "epoch": lambda step: step * cfg.batch_size / train["n"] + 1e-9}


def held_out_at(run, step, clock, halted):
    """The held-out source at `step`; one that is not there yet is waited for: None once halted(),
    or when training is over.
    """
    val, told = run["val"], False
    if "at" not in val:
        return val
    while (source := val["at"](step)) is None and step < run["cfg"].steps and not halted():
        if not told:
            told = bool(run["emit"]("out_of_data", {"step": step}))
        time.sleep(0.2)
    spend(clock, "data")
    return source


def evaluate(run, val, eval_step, params, signals=()):
    """{"val_*"}: the mean over the held-out source `val` of each sum that the loss gives and the
    task's own metrics; of a mixture also the loss of each source; {} when interrupted.
    """
    cfg, began = run["cfg"], time.perf_counter()
    parts, sums, row = val.get("parts", {"": val}), {}, {}
    for name, part in parts.items():
        n = -(-part["n"] // cfg.batch_size)
        batches = data.prefetch(make_batch_at(run, part), 0, min(cfg.eval_batches or n, n))
        beating = ((batch, run["beat"](doing="eval"))[0] for batch, _ in batches)
        totals = steplib.evaluate(eval_step, params, beating, partial(interrupted, signals))
        if totals is None:
            return {}
        sums = jax.tree.map(np.add, sums, totals) if sums else totals
        if name:
            total, count = totals["loss"]
            row[f"val_loss/{name}"] = float(total / count)
    means = {name: total / np.where(count, count, 1) for name, (total, count) in sums.items()}
    found = scalars(means | run["task"]["metrics"](means, val))
    found["n_labels"] = int(sums.get("loss", sums["objective"])[1])
    row |= {f"val_{name}": value for name, value in found.items()}
    return row | {"eval_s": time.perf_counter() - began}


def make_batch_at(run, source):
    """index -> batch of global arrays, of which each process builds its own rows. Raises ValueError
    for one that is not as the task's "batch" says, or has ids beyond a table.
    """
    pinned = run["cfg"].overfit_batch and source is run["train"]
    shardings = {name: x.sharding for name, x in run["batch"].items()}
    first = next(iter(run["batch"].values()))
    rows = data.local_rows(first.sharding, first.shape)
    wanted = {name: ((len(rows), *x.shape[1:]), x.dtype) for name, x in run["batch"].items()}
    sizes = {name: row["shape"][0] for row in run["table"].values() for name in row.get("ids", ())}

    def batch_at(index):
        if (batch := source["batch"](0 if pinned else index, rows)) is None:
            return None
        there = {name: (np.shape(x), np.asarray(x).dtype) for name, x in dict(batch).items()}
        config.raise_all([f"{name} is {there.get(name, 'missing')}, must be "
                          f"{wanted.get(name, 'left out')}" for name in wanted.keys() | there.keys()
                          if there.get(name) != wanted.get(name)], f"batch {index}")
        config.raise_all([f"{name} is {x.min()} to {x.max()}: must be from 0 to {n - 1}, or {n} "
                          "for padding" for name, n in sizes.items() for x in (batch[name],)
                          if x.min() < 0 or x.max() > n], f"batch {index}")
        return data.to_device(batch, shardings, rows, run["cfg"].batch_size)

    return batch_at


def tell_data(sources, tell):
    for part, source in sources.items():
        if source and "about" in source:
            tell(f"{part} data: {source['about']}")


def tell_lost(run):
    if lost := [name for name in sorted(run["left_out"]) if run["table"][name].get("trained", 1)]:
        say(f"leave_out: {', '.join(lost)} will be trained, not saved: lost when the run stops")


def sample_texts(run, params, step):
    key = jax.random.fold_in(jax.random.key(run["cfg"].seed), step)
    with jax.set_mesh(run["mesh"]):
        return run["task"]["preview"](params, run["cfg"], key)


def end_saves(run, saving, kinds=("weights", "save")):
    """Wait for the saves of these kinds that are under way; the fault in words of the last that
    failed, which the run survives, or None.
    """
    fault = None
    for kind in kinds:
        step, future = saving.pop(kind, (None, None))
        try:
            ckpt.wait(future)
        except ValueError as e:
            fault = str(e)
            run["emit"]("fault", {"step": step, "fault": fault})
    return fault


def make_emit(run, observers, clock):
    """emit(event, row): the row as hooks make it, for which observers and other processes are told,
    its wish to stop noted, and the time since the last event booked.
    """
    def emit(event, row):
        run["beat"](doing=event, step=row["step"])
        row = call(run["hooks"], event, row)
        run["wishes"].extend([(str(row["stop"]), 0)] if row.get("stop") else [])
        call(observers, event, row)
        spend(clock, event)
        return row

    return emit


# What wall time is spent on: the event at whose end it is counted, else "other". data: waiting for
# it; lost: updates and all else that a kill undid.
SPENT = ("start", "compile", "step", "data", "save", "eval", "other", "lost")


def start_clock(began):
    """Running sums of seconds of wall time by SPENT, and "at", when the last was added."""
    return dict.fromkeys(SPENT, 0.0) | {"from": began, "at": began, "logged": (0, 0.0, 0.0)}


def spend(clock, event):
    """Add the seconds since the last call to what they were spent on; return them."""
    if event in ("dispatch", "epoch", "window"):
        return 0.0
    now = time.perf_counter()
    spent_s, clock["at"] = now - clock["at"], now
    clock[event if event in SPENT else "other"] += spent_s
    return spent_s


def go_on_counting(clock, rows, step):
    """Add what the starts before this one spent. rows: [step, event, "time_s"] of metrics.jsonl."""
    times = [(row_step, time_s) for row_step, _, time_s in rows if time_s]
    kept = next((time_s for row_step, time_s in reversed(times) if row_step <= step), {})
    for what, spent_s in kept.items():
        clock[what] += spent_s
    clock["lost"] += sum(times[-1][1].values()) - sum(kept.values()) if times else 0
    clock["logged"] = step, clock["step"], clock["data"]


def newest(run, event, row):
    """The numbers of a row. Asks for an end when cfg.stop has a metric that is not among them."""
    numbers = {name: x for name, x in row.items() if isinstance(x, (int, float))}
    for name, *_ in run["stops"]:
        if (name not in numbers and name not in config.STOPS
                and name.startswith("val_") == (event == "eval")):
            run["wishes"].append((f"--stop {' '.join(run['cfg'].stop)}: there is no metric {name} "
                                  f"({config.nearest(name, sorted(numbers))})", 2))
    return numbers | ({"val_step": row["step"]} if event == "eval" else {})


def next_batch(run, batches, state, step, saving):
    """(batch, seconds waited); no batch when there is none yet, or a reason to stop came. When the
    data has a fault the state is saved before it is raised; of several processes only this one may
    have met it, and the others would not join in the save.
    """
    try:
        batch, waited_s = next(batches, (None, None))
        if batch is None and waited_s is not None:
            run["emit"]("out_of_data", {"step": step})
        return batch, waited_s
    except (ValueError, OSError):
        if jax.process_count() == 1:
            end_saves(run, save_state(run, state, step, saving))
        raise


def preview(run, params, step):
    """Print what the task's preview makes. What goes wrong in it is told, and training goes on."""
    try:
        row = {"texts": sample_texts(run, params, step)}
    except Exception as e:  # a preview is never worth a run
        row = {"texts": [], "fault": f"no sample: {type(e).__name__}: {e}"}
    if any(row.values()):
        run["emit"]("sample", {"step": step} | row)


def export(run, params, step):
    """Export the parameters. What goes wrong with the disk is told, and training goes on:
    {"export_fault": words, empty where nothing did}.
    """
    began, fault = time.perf_counter(), ""
    try:
        run["task"]["export"](run["cfg"], params)
        run["emit"]("export", {"step": step, "export_s": time.perf_counter() - began})
    except ValueError as e:
        fault = str(e)
        run["emit"]("fault", {"step": step, "fault": fault})
    return {"export_fault": fault}


def end_run(run, state, step, stop, saving, latest, clock):
    """Emit "stop" and "end", which has the newest metrics; the summary. stop: of why_stop."""
    lost, not_exported = end_saves(run, saving), latest.pop("export_fault", "")
    fault = "; ".join(filter(None, (lost, not_exported)))
    reason, exit_code = (f"{stop[0]}; {fault}", 1) if fault else stop
    why = {"step": step, "reason": reason}
    run["emit"]("stop", why)
    if is_main():
        Path(run["cfg"].out_dir, "stop").unlink(missing_ok=True)
    rest = {"exit_code": exit_code, "wall_s": clock["at"] - clock["from"],
            "time_s": {what: clock[what] for what in SPENT}}
    kept = {k: v for k, v in latest.items() if k not in ("finite", "eval_s")}
    if kept.get("val_step") == step:
        del kept["val_step"]
    saved = None if lost else ckpt.below(ckpt_root(run["cfg"]), f"{step:09d}")
    return run["emit"]("end", kept | why | rest | {"checkpoint": saved}) | {
        "state": state, "mesh": run["mesh"]}


def call(hooks, event, value):
    """Give `value` to every hook(event, value); what one returns, unless None, replaces it."""
    for hook in hooks:
        try:
            new = hook(event, value)
            keys = new.keys() if isinstance(new, dict) else ()
            if new is not None and isinstance(value, dict) and (lost := {*value} - {*keys}):
                raise TypeError(f"what it returns has no {', '.join(sorted(lost))}; return None, "
                                "or all of the value: value | {...}")
        except Exception as e:
            e.add_note(f"in the hook {getattr(hook, '__qualname__', hook)}, at the event {event}")
            raise
        value = value if new is None else new
    return value


def scalars(means):
    return {name: float(x) for name, x in means.items() if np.ndim(x) == 0}


def say(*words):
    """Print on process 0, above the progress bar if there is one."""
    if is_main():
        tqdm.write(" ".join(map(str, words)), file=sys.stdout)
        sys.stdout.flush()


def is_main():
    return jax.process_index() == 0


# Observers: functions of (event, row), made from cfg for process 0; none can change the run.

def jsonl(cfg):
    """Write every event but "step" and "dispatch" to metrics.jsonl, a JSON object a line, with all
    digits. A resumed run cuts the lines of steps that a crash undid.
    """
    path, file = Path(cfg.out_dir) / "metrics.jsonl", None

    def observe(event, row):
        nonlocal file
        if event == "start":
            kept = [old for old in read_log(path.parent)
                    if old["step"] <= row["step"] and old["event"] not in ("stop", "end")]
            path.with_suffix(".tmp").write_text("".join(json.dumps(old) + "\n" for old in kept))
            path.with_suffix(".tmp").replace(path)
            file = open(path, "a", buffering=1)  # noqa: SIM115 as long as the run
        if file and event not in ("step", "dispatch"):
            try:
                file.write(json.dumps({"event": event} | row, default=plain) + "\n")
            except OSError as e:  # what was not written is kept, and written with the next row
                say(f"{path}: {e}; make room: rows are kept until then")

    return observe


def plain(x):
    """What JSON can say of an array or a number of NumPy or JAX."""
    return np.asarray(x).tolist()


def read_log(out_dir):
    """The rows of metrics.jsonl, less a torn line."""
    path, rows = Path(out_dir) / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if "step" in row]  # "error" has none


# How the screen shows a value, where a row has it.
WORDS = {"step": "step {:>6}", "loss": "loss {:.4f}", "lr": "lr {:.2e}", "fault": "{}",
         "val_loss": "held-out loss {:.4f}", "val_acc": "accuracy {:.3f}",
         "val_bits_per_byte": "{:.3f} bits/byte", "val_step": "of step {}"}
QUIET = "val_loss val_objective val_ppl val_z val_n_labels".split()  # those not shown


def in_words(row, names, between="  "):
    return between.join(WORDS.get(name, name.removeprefix("val_") + " {:.4g}").format(row[name])
                        for name in names.split() if name in row)


def screen(cfg):
    """A progress bar; where there is no terminal, plain lines."""
    bar, unit = tqdm(disable=True), ""

    def observe(event, row):
        nonlocal bar, unit
        if event == "start":
            show_start(row)
            unit = row["unit"]
            bar = tqdm(total=cfg.steps, initial=row["step"], disable=not sys.stderr.isatty(),
                       bar_format="{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}")
        elif event == "step":
            bar.update()
        elif event == "log":
            rate = f"{row[unit + 's_per_s']:,.0f} {unit}s/s"
            bar.set_postfix_str(f"{in_words(row, 'loss')}  {rate}", refresh=False)
            if bar.disable:
                wait_ms = 1000 * row["data_wait_s"]
                say(f"{in_words(row, 'step loss lr')}  {rate}  data wait {wait_ms:.1f} ms")
        elif event == "eval":
            own = [x for x in row if x.startswith("val_") and x not in QUIET and "/" not in x]
            say(in_words(row, " ".join(["step", "val_loss", *own])))
            for source in (name for name in row if name.startswith("val_loss/")):
                say(f"{'':11}  held-out loss {row[source]:.4f} of {source[9:]}")
        elif event == "sample":
            show_texts(row["texts"])
        elif event == "reload":
            say(f"{in_words(row, 'step')}  loaded again: {', '.join(row['names'])}")
        elif event == "out_of_data":
            say(f"{in_words(row, 'step')}  waiting for data")
        elif event == "export":
            say(f"{in_words(row, 'step')}  exported to {cfg.export}")
        if "fault" in row:
            say(in_words(row, "step fault"))
        if event in ("end", "error"):
            bar.close()
        if event == "end":
            show_end(cfg, row)

    return observe


def show_start(row):
    device, total = jax.devices()[0], row["memory_bytes_per_device"]["total"] / 2**20
    known = device.platform == "cpu" or steplib.peaks(device.device_kind)[0]
    if "flops_formula" in row and not known:
        say(f"no peak rate is known for {row['devices']}: metrics have TFLOP/s, and no MFU")
    say(f"compiled in {row['compile_s']:.1f} s, {total:,.0f} MiB a device; from "
        f"{row['origin']}, at step {row['step']}")


def show_end(cfg, row):
    show_time(row["time_s"])
    say(", ".join(filter(None, (
        f"step {row['step']}", in_words(row, "val_loss val_bits_per_byte val_step", ", "),
        "loss" in row and f"training {in_words(row, 'loss')}"))))
    saved = f", saved in {ckpt_root(cfg)}" if row["checkpoint"] else ""
    done = row["reason"] == ALL_DONE.format(row["step"])
    say(f"{'done' if done else 'stopped'}: {row['reason']}; {row['wall_s']:.0f} s{saved}")
    if not row["exit_code"] and not done:
        flag = "" if cfg.resume in ("auto", "must") else " with --resume auto"
        limit = ", as far as --stop allows" if cfg.stop else ""
        say(f"the same command{flag} goes on from here{limit}")


def show_time(time_s):
    """Print the shares of wall time of all starts."""
    total = sum(time_s.values())
    say("".join(f"{what:>8}" for what in time_s) + "  all starts")
    say("".join(f"{spent_s / total:8.1%}" for spent_s in time_s.values()) + f"  {total:,.0f} s")


def show_texts(texts):
    for text in texts:
        say(f"{' sample '.center(24, '-')}\n{text}")
    if texts:
        say("-" * 24)


def tracing(cfg):
    """Trace updates first:last of cfg.profile into out_dir/profile: time as an XPlane
    (`jax.profiler.ProfileData`, Perfetto, XProf), memory as pprof; memory once more on a failure.
    """
    (first, last), folder = config.profile_span(cfg), Path(cfg.out_dir) / "profile"
    traced = 0  # the newest update in the trace that runs

    def observe(event, row):
        nonlocal traced
        if event == "dispatch" and first <= row["step"] <= last:
            if not traced:
                jax.profiler.start_trace(folder)
            traced = row["step"]
        if traced and (event in ("stop", "error") or (event == "step" and row["step"] >= last)):
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(folder / f"memory_{traced}.prof")
            say(f"traced updates {first} to {traced} into {folder}")
            traced = 0
        if event == "error":
            folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.save_device_memory_profile(folder / "memory_at_failure.prof")

    return observe if first else lambda event, row: None


def plot(cfg):
    """Draw plot.png when a run ends and matplotlib is installed: training and held-out loss,
    learning rate, gradient norm and throughput over steps.
    """
    def observe(event, row):
        rows = read_log(cfg.out_dir) if event == "end" else []
        rates = {name for row in rows for name in row if name.endswith("s_per_s")}
        if not rates or not importlib.util.find_spec("matplotlib"):
            return
        from matplotlib.figure import Figure
        panels = {"loss (nats)": {"loss": "training", "val_loss": "held-out"},
                  "learning rate": {"lr": ""}, "gradient norm": {"grad_norm": ""},
                  f"{min(rates).removesuffix('_per_s')} a second": {min(rates): ""}}
        figure = Figure(figsize=(10, 6), layout="constrained")
        for axes, (title, lines) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
            for name, label in lines.items():
                points = [(row["step"], row[name]) for row in rows if name in row
                          and row["event"] == ("eval" if label == "held-out" else "log")]
                steps, values = zip(*points, strict=True) if points else ((), ())
                axes.plot(steps, values, "o-" if label == "held-out" else "-", label=label,
                          linewidth=1.2, markersize=4)
            axes.set_title(title, loc="left", fontsize=10)
            axes.grid(alpha=0.3)
        figure.axes[0].legend()
        figure.supxlabel("step (optimizer updates)", fontsize=10)
        figure.suptitle(str(cfg.out_dir))
        figure.savefig(Path(cfg.out_dir) / "plot.png", dpi=100)

    return observe


def wandb(cfg):
    """Send metrics to Weights & Biases, under the run's own id, so that a resumed run goes on
    there; offline where WANDB_MODE says so.
    """
    import wandb
    run = None

    def observe(event, row):
        nonlocal run
        if event == "start":
            run = wandb.init(id=row["run_id"], resume="allow", dir=cfg.out_dir,
                             config=row["config"], name=Path(cfg.out_dir).name,
                             settings={"console": "off"})
            run.define_metric("*", step_metric="step")
        elif run and event in ("log", "eval", "end"):
            run.log({name: x for name, x in row.items() if isinstance(x, (int, float))})
        if run and event in ("end", "error"):
            run.finish(row.get("exit_code", 1))

    return observe


def tensorboard(cfg):
    """Write event files for TensorBoard into out_dir/tensorboard."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    writer = EventFileWriter(str(Path(cfg.out_dir) / "tensorboard"))

    def observe(event, row):
        now, step = time.time(), row.get("step", 0)
        if event == "start":  # TensorBoard forgets what was written of later steps
            log = SessionLog(status=SessionLog.START)
            writer.add_event(Event(session_log=log, wall_time=now, step=step + 1))
        elif event in ("log", "eval", "end"):
            values = [Summary.Value(tag=name, simple_value=x) for name, x in row.items()
                      if isinstance(x, (int, float)) and name != "step"]
            writer.add_event(Event(summary=Summary(value=values), wall_time=now, step=step))
        if event in ("end", "error"):
            writer.close()

    return observe


OBSERVERS = (jsonl, tracing, screen)
TRACKERS = {"wandb": wandb, "tensorboard": tensorboard}  # of --track
TRACKER_S, QUEUE_ROWS = 60, 10_000  # how long the end of a run waits for one; rows not yet taken


def make_observers(cfg):
    trackers = {"plot": plot} | {name: TRACKERS[name] for name in cfg.track}
    return [*(make(cfg) for make in OBSERVERS),
            *(in_thread(name, make, cfg) for name, make in trackers.items())]


def in_thread(name, make, cfg):
    """The observer make(cfg), in a thread of its own, so that the run neither waits for it nor ends
    with it: one that raises is told and dropped, one that hangs is left behind at the end.
    """
    rows = queue.Queue(QUEUE_ROWS)

    def work():
        try:
            observe, event = make(cfg), None
            while event not in ("end", "error"):
                event, row = rows.get()
                observe(event, row)
        except Exception as e:
            say(f"{name}: {type(e).__name__}: {e}; it is dropped, and the run goes on")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def observe(event, row):
        if event in ("step", "dispatch") or not thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            rows.put_nowait((event, row))
        if event in ("end", "error"):
            thread.join(TRACKER_S)
            if thread.is_alive():
                say(f"{name}: not done after {TRACKER_S} s; its last rows may be lost")

    return observe


# What a run reports of itself.

def headline(run):
    """What would run, and on what."""
    cfg, mesh, task, (unit, size) = run["cfg"], run["mesh"], run["task"], run["task"]["unit"]
    sizes = [(math.prod(row["shape"]), row.get("trained", True)) for row in run["table"].values()]
    n_params, n_trained = sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)
    trained = f" ({n_trained / 1e6:,.2f}M trained)" if n_trained < n_params else ""
    axes = " ".join(f"{a}={n}" for a, n in mesh.shape.items())
    about = [cfg.dtype, task["about"](cfg), f"{size(cfg):,} {unit}s an update"]
    return (f"{n_params / 1e6:,.2f}M parameters{trained} on {mesh.size} x "
            f"{mesh.devices.flat[0].device_kind}, mesh {axes}\n" + ", ".join(filter(None, about)))


def describe(run, meta):
    """What runs, and on what, for the start event and every checkpoint. meta: of the checkpoint it
    goes on from, or {}.
    """
    cfg, (unit, size) = run["cfg"], run["task"]["unit"]
    versions = {name: importlib.metadata.version(name)
                for name in "jax jaxlib numpy optax tensorstore".split()}
    row = {"devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
           "processes": jax.process_count(), "dtype": cfg.dtype, "attention": cfg.attention,
           "n_params": sum(math.prod(row["shape"]) for row in run["table"].values()),
           "unit": unit, f"{unit}s_per_step": size(cfg),
           "memory_bytes_per_device": run["programs"]["memory"],
           "config": dataclasses.asdict(cfg), "mesh": dict(run["mesh"].shape),
           "sources": run["sources"] or meta.get("sources", []),
           "run_id": meta.get("run_id", os.urandom(4).hex()),
           "versions": {"python": sys.version.split()[0]} | versions}
    if run["task"]["flops"]:
        flops, _, formula = run["task"]["flops"](cfg, {})
        row |= {f"flops_per_{unit}": flops, "flops_formula": formula}
    return row


def rates(run, step, clock, means):
    """What a log row says of progress, speed and memory: unit and formula stand beside each. None
    where the device's peak rate is not known.
    """
    cfg, (unit, size) = run["cfg"], run["task"]["unit"]
    now = step, clock["step"], clock["data"]
    n, step_s, data_s = (new - old for new, old in zip(now, clock["logged"], strict=True))
    clock["logged"] = now
    per_s = n * size(cfg) / (step_s + data_s)
    memory = jax.local_devices()[0].memory_stats()  # None on a CPU: then what the process held
    row = {
        f"{unit}s": step * size(cfg),  # in all updates so far
        f"{unit}s_per_s": per_s,  # of the updates since the last row: size of a batch / step_s
        "epoch": step * cfg.batch_size / run["train"]["n"],  # examples seen / examples there are
        "step_s": (step_s + data_s) / n,  # wall time of an update, with its wait for data
        "data_wait_s": data_s / n,  # seconds in which the device had no batch
        "goodput": clock["step"] / sum(clock[what] for what in SPENT),  # of wall time, all starts
        "time_s": {what: clock[what] for what in SPENT},  # seconds, all starts
        "memory_peak_bytes": memory["peak_bytes_in_use"] if memory else
        1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if run["task"]["flops"]:
        flops, recomputed, _ = run["task"]["flops"](cfg, means)  # of one unit
        peak = steplib.peaks(jax.devices()[0].device_kind)[0]  # TFLOP/s of a device
        scale = per_s / jax.device_count() / 1e12
        row |= {"model_tflops_per_device": flops * scale,
                "hardware_tflops_per_device": (flops + recomputed) * scale,  # with remat's
                "mfu": peak and flops * scale / peak,  # model FLOP/s / peak
                "hfu": peak and (flops + recomputed) * scale / peak}
    return row


# Before the first step.

def load_hooks(texts):
    """The functions of texts "file.py:function"; a file runs once, and may import what lies beside
    it.
    """
    found, hooks = {}, []
    for text in texts:
        path, _, name = text.rpartition(":")
        if not Path(path).is_file():
            raise ValueError(f"hooks {text!r}: must be file.py:function, and there is no file "
                             f"{path!r}")
        if path not in found:
            sys.path.append(os.path.dirname(os.path.abspath(path)))
            found[path] = runpy.run_path(path)
        hooks.append(found[path].get(name))
        if not callable(hooks[-1]):
            raise ValueError(f"hooks {text!r}: {path} has no function {name}")
    return hooks


def keep_programs(cfg):
    """Have JAX keep compiled programs in cfg.cache_dir. A default folder that cannot be written is
    a notice.
    """
    folder = cfg.cache_dir and os.path.abspath(os.path.expanduser(cfg.cache_dir))
    try:
        folder and os.makedirs(folder, exist_ok=True)
    except OSError as e:
        fault = f"cache_dir {cfg.cache_dir!r}: cannot be written: {e.strerror}"
        if cfg.cache_dir != config.Config.cache_dir:
            raise ValueError(f"{fault}; choose another, or '' for none") from None
        say(f"{fault}; compiled programs are not kept between runs")
        folder = ""
    compilation_cache.reset_cache()  # JAX otherwise stays with a process's first folder
    jax.config.update("jax_compilation_cache_dir", folder or None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def lock_folders(cfg):
    """Make out_dir, and ckpt_dir on this machine, fit to write to; what to hold open so that no
    other run writes to them.
    """
    if not is_main():
        return contextlib.nullcontext()
    paths = (("out_dir", cfg.out_dir), ("ckpt_dir", ckpt_root(cfg)))
    folders = {os.path.realpath(path): f"{name} {path!r}" for name, path in paths
               if "://" not in path}
    with contextlib.ExitStack() as locks:
        for folder, where in folders.items():
            try:
                os.makedirs(folder, exist_ok=True)
                lock = open(os.path.join(folder, ".lock"), "w")  # noqa: SIM115 closed by the caller
                locks.enter_context(lock)
                # The system releases it when the process ends, however that is.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{where}: another run is writing to it; choose another") from None
            except OSError as e:
                if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise ValueError(f"{where}: cannot be written: {e.strerror}; choose another"
                                     ) from None
                say(f"{where}: its file system has no locks ({e.strerror}); no other run may "
                    "write to it")
        for root in (ckpt_root(cfg), ckpt.below(ckpt_root(cfg), "weights")):
            ckpt.clean(root, say)
        return locks.pop_all()


def ckpt_root(cfg):
    return cfg.ckpt_dir or ckpt.below(cfg.out_dir, "ckpt")


def root_of(out_dir):
    """Where the run that left its config.json in out_dir keeps its checkpoints."""
    path, elsewhere = Path(out_dir, "config.json"), ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        elsewhere = json.loads(path.read_bytes()).get("ckpt_dir", "")
    return elsewhere or ckpt.below(out_dir, "ckpt")


def newest_meta(root, needed_for=""):
    """(step, meta) of the newest checkpoint of a root; (None, {}) for none, which is a ValueError
    when one is needed.
    """
    saved, meta = ckpt.newest_meta(root)
    if needed_for and not meta:
        raise ValueError(f"{needed_for}: {root} holds no checkpoint; is it of a run's --out_dir?")
    if meta and not {"config", "data"} <= meta.keys():
        raise ValueError(f"{root} holds checkpoints that no run of this kind wrote; name another")
    return saved, meta


def find_start(cfg, given=False):
    """(step, meta) of the checkpoint in out_dir that the run goes on from; (None, {}) for none.
    given: whether there is a state or parameters to start from.

    Raises ValueError when cfg.resume says that there must be one, or there must not be.
    """
    if cfg.resume == "overwrite":
        return None, {}
    before = ckpt.from_main(lambda: root_of(cfg.out_dir))
    same = {os.path.realpath(ckpt.below(root, "")) for root in (before, ckpt_root(cfg))}
    if len(same) > 1 and newest_meta(before)[1]:
        raise ValueError(f"out_dir {cfg.out_dir!r}: the checkpoints of its run are in {before}; "
                         "set --ckpt_dir to that, or choose another --out_dir")
    saved, meta = newest_meta(ckpt_root(cfg), "resume must" if cfg.resume == "must" else "")
    if meta and (given or cfg.resume == "never"):
        also = ", and a state or parameters to start from were given" if given else ""
        raise ValueError(f"resume {cfg.resume}: {cfg.out_dir} holds a run at step {saved}{also}; "
                         "choose another --out_dir, or delete it with --resume overwrite")
    return saved, meta


def choose_start(run, state, params, meta):
    """(origin in words, programs -> first state): given state, given parameters, own checkpoint of
    `meta`, init_from, fresh; the first that there is. What an own checkpoint left out is as the
    run's first start had it.

    Raises ValueError when a checkpoint is of another config, other data or another model.
    """
    cfg, key = run["cfg"], jax.random.key(run["cfg"].seed)
    if state is not None:
        return "the given state", lambda programs: jax.device_put(
            state, jax.tree.map(lambda x: x.sharding, programs["state"]))
    if params is not None:
        return "the given parameters", lambda programs: programs["from_params"](key, params={
            name: jax.device_put(x.astype(like.dtype), like.sharding, may_alias=False)
            for name, x in params.items() for like in (programs["state"]["params"][name],)})
    left_out = set()
    if meta:
        then, now = meta["data"]["fingerprint"], run["train"]["fingerprint"]
        config.check_resumable(meta["config"], cfg, meta.get("mesh", {}), dict(run["mesh"].shape))
        if then != now and "data" not in cfg.allow_change:
            raise ValueError(f"the data changed since {cfg.out_dir} was saved: {then} then, {now} "
                             "now; bring it back, or go on with --allow_change data")
        left_out = model.matching("leave_out", meta["config"].get("leave_out", ()), run["table"])
    sources = open_sources(run) if left_out or not meta else []
    chosen = choose_parameters(run, sources, left_out) if left_out or not meta else {}

    def first(programs):
        if not chosen:
            return programs["init"](key)
        like = programs["state"]["params"]
        return programs["from_params"](key, params=load_parameters(sources, chosen, like))

    run["sources"] = [source.get("about", source["path"]) for source in sources]
    if left_out and meta.get("sources") != run["sources"] and "init_from" not in cfg.allow_change:
        raise ValueError(f"init_from changed since {cfg.out_dir} was saved without "
                         f"{', '.join(sorted(left_out))}: {meta.get('sources')} then, "
                         f"{run['sources']} now (on purpose: --allow_change init_from)")
    paths = ", ".join(source["path"] for source in sources)
    origin = f"the parameters of {paths}" if chosen else "a fresh initialization"
    if not meta:
        return origin, first
    also = f", and {len(left_out)} parameters that it left out from {origin}" if left_out else ""
    return "its own checkpoint" + also, lambda programs: load_state(
        cfg, programs["state"], left_out, first(programs) if left_out else None)


def load_saved(run, like, meta):
    """(step, parameters) of the newest sound checkpoint of the run, with what it left out from
    where the run began. like: {name: shape with sharding}.
    """
    left_out = model.matching("leave_out", meta["config"].get("leave_out", ()), run["table"])
    sources = open_sources(run) if left_out else []
    chosen = choose_parameters(run, sources, left_out) if left_out else {}
    loaded = load_parameters(sources, chosen, like)
    if lost := sorted(left_out - loaded.keys()):
        raise ValueError(f"leave_out: {', '.join(lost)} is in no checkpoint and in no source of "
                         "init_from")
    wanted = {"params": {name: x for name, x in like.items() if name not in left_out}}
    root, config_file = ckpt_root(run["cfg"]), f"{run['cfg'].out_dir}/config.json"
    step, saved = load_checkpoint(root, wanted, config_file)
    return step, {name: (loaded | saved["params"])[name] for name in like}


def load_state(cfg, like, left_out, first):
    """The state of the newest sound checkpoint, with what it left out from the state `first`."""
    wanted, treedef = ckpt.flatten(like)
    saved = {name: x for name, x in wanted.items() if name.split("/")[-1] not in left_out}
    _, loaded = load_checkpoint(ckpt_root(cfg), saved, f"{cfg.out_dir}/config.json", True)
    loaded = ckpt.flatten(first)[0] | loaded
    return jax.tree.unflatten(treedef, [loaded[name] for name in wanted])


def open_sources(run):
    """The sources of cfg.init_from with "names", what there is, and "read", {name there: like} ->
    {name there: array}.

    Raises ValueError when one holds no parameters, or its model is another one.
    """
    cfg, task = run["cfg"], run["task"]
    sources = [ckpt.parse_source(text) for text in cfg.init_from]
    for i, source in enumerate(sources):
        if weights := task["weights"](source["path"], cfg):
            sources[i] |= weights
            continue
        if "://" not in source["path"] and not Path(source["path"]).is_dir():
            raise ValueError(f"init_from {source['path']}: no such folder; nothing is downloaded")
        root = ckpt.from_main(partial(root_of, source["path"]))
        step, meta = ckpt.newest_meta(root)
        if not meta:
            of_run, root = root, source["path"]
            step, meta = ckpt.newest_meta(root)
        if not meta:
            raise ValueError(f"init_from {source['path']}: holds no checkpoint and no weights, nor "
                             f"does {of_run}; must be a run's --out_dir, a folder of checkpoints "
                             "or one of Hugging Face's")
        names = {name.removeprefix("params/"): layout["shape"]
                 for name, layout in meta["arrays"].items() if name.startswith("params/")}
        then = meta.get("config", {})
        faults = [f"{name} is {then[name]!r} there, {getattr(cfg, name)!r} here (on purpose: "
                  f"--allow_change {name})" for name in config.FORWARD
                  if source["strict"] and name not in cfg.allow_change
                  and then.get(name, getattr(cfg, name)) != getattr(cfg, name)]
        sources[i] |= {"names": names, "read": partial(read_parameters, root), "faults": faults,
                       "about": f"{source['path']} at step {step} of run {meta.get('run_id')}"}
    return sources


def read_parameters(root, like):
    """The parameters `like` of the newest sound checkpoint of root."""
    wanted = {f"params/{name}": x for name, x in like.items()}
    loaded = load_checkpoint(root, wanted, "its own config.json")[1]
    return {name: loaded[f"params/{name}"] for name in like}


def choose_parameters(run, sources, left_out=()):
    """What ckpt.choose says of these sources; printed as a table, on a resume only of what the
    checkpoint left out. Raises ValueError for parameters of this model that no source has, though
    no pattern left them out.
    """
    cfg, table = run["cfg"], run["table"]
    told = [name for name in table if name in left_out or not left_out]
    there = {name for source in sources for name in source["names"]}
    expected = run["task"]["init_names"](cfg, table, there)
    chosen = ckpt.choose(sources, {name: row["shape"] for name, row in table.items()})
    whole = any(source["strict"] and source["load"] == ["*"] and not source["exclude"]
                for source in sources)
    config.raise_all([f"{name} is not there" for name in table
                      if whole and name in expected and name not in chosen],
                     f"init_from {', '.join(cfg.init_from)}")
    for i, source in enumerate((*sources, {"path": "a fresh initialization"}) if sources else ()):
        names = [name for name in told if chosen.get(name, (len(sources),))[0] == i]
        if names:
            count = "all" if len(names) == len(table) else f"{len(names)} of"
            which = f": {', '.join(names)}" if len(names) < len(table) else ""
            say(textwrap.fill(f"{count} {len(table)} parameters from {source['path']}{which}", 100,
                              subsequent_indent="    ", break_on_hyphens=False))
    return chosen


def load_parameters(sources, chosen, like):
    """{name: array} of what was chosen. like: {name: shape with sharding}."""
    loaded = {}
    for i, source in enumerate(sources):
        names = {there: name for name, (at, there) in chosen.items() if at == i}
        if names:
            arrays = source["read"]({there: like[name] for there, name in names.items()})
            loaded |= {name: arrays[there] for there, name in names.items()}
    return loaded


# Weights in Hugging Face's format.

def read_json(path):
    """The object in a JSON file, or {} where there is no such file. Raises ValueError."""
    try:
        found = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ValueError(f"{path}: cannot be read: {e}") from None
    return found if isinstance(found, dict) else {}


def hf_config(path):
    """The config.json of a folder of Hugging Face weights, or {}."""
    found = {} if "://" in path else read_json(Path(path, "config.json"))
    return found if "model_type" in found else {}


def adopt_hf(cfg):
    """cfg with the shape of the model and the tokenizer that a Hugging Face folder in init_from
    has. Raises ValueError for fields that were set to something else.
    """
    for path in (ckpt.parse_source(text)["path"] for text in cfg.init_from):
        if hf := hf_config(path):
            fields = model.hf_fields(hf)
            config.raise_all([config.fault(cfg, name, f"is {value!r} there; leave it out")
                              for name, value in fields.items()
                              if getattr(cfg, name) not in (value, getattr(type(cfg)(), name))],
                             f"init_from {path}")
            if cfg.tokenizer == "bytes" and Path(path, "tokenizer.json").is_file():
                fields["tokenizer"] = path
            cfg = dataclasses.replace(cfg, **fields)
    return cfg


def open_hf(path, cfg):
    """{"names", "read"} of a folder of Hugging Face weights, or None."""
    if not hf_config(path):
        return None
    pieces = model.hf_pieces(cfg)

    def read(like):
        others = [tensor for name in pieces.keys() - like for tensor in pieces[name][0].values()]
        return ckpt.read_safetensors(path, {name: pieces[name] for name in like}, like,
                                     (*model.HF_UNUSED, *others))

    return {"names": dict.fromkeys(pieces), "read": read}


KEPT = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")  # of init_from


def export_hf(cfg, params):
    """Write cfg.export as transformers, or PEFT for LoRA apart, loads it; what an export wrote
    there before is replaced. params: None to look for faults alone.

    Raises ValueError when no family of theirs is of this form, or the folder is not an export's.
    """
    apart = bool(cfg.lora_rank) and cfg.export_lora == "apart"
    out, partial_out = Path(cfg.export), Path(f"{cfg.export}.partial")
    mine = {"out_dir": os.path.abspath(cfg.out_dir)}
    taken = out.is_file() or (out.is_dir() and any(out.iterdir()))
    if taken and mine != read_json(out / "sixfile.json"):
        raise ValueError(f"export {cfg.export}: exists, and no export of this run wrote it; choose "
                         "another")
    paths = [ckpt.parse_source(text)["path"] for text in cfg.init_from]
    base = next((path for path in paths if hf_config(path)), None)
    about = model.peft_config(cfg, base) if apart else model.hf_config(cfg)
    ckpt.import_safetensors()
    pieces = model.hf_pieces(cfg, apart)
    if params is None:
        return
    if not apart:
        params, tokenizer = model.merge_lora(params, cfg), data.make_tokenizer(cfg.tokenizer)
        theirs = hf_config(base) if base else {}
        about |= {"torch_dtype": cfg.export_dtype, "bos_token_id": tokenizer["begin"],
                  "eos_token_id": tokenizer["end"]}
        about |= {name: theirs[name] for name in KEPT if name in theirs}
    texts = {"adapter_config.json" if apart else "config.json": about, "sixfile.json": mine}
    tensors = ckpt.each_tensor(params, pieces, cfg.export_dtype)
    try:  # every process takes all tensors, whatever the disk of process 0 does
        if is_main():
            shutil.rmtree(partial_out, ignore_errors=True)
            partial_out.mkdir(parents=True)
        ckpt.write_safetensors(partial_out, tensors, "adapter_model" if apart else "model")
        fault = ""
    except OSError as e:
        fault = str(e)
        deque(tensors, maxlen=0)
    ckpt.from_main(lambda: complete_export(cfg, partial_out, texts, fault))


def complete_export(cfg, folder, texts, fault):
    """Write the JSON files of an export, copy the tokenizer's, and give it its name."""
    tokenizer = Path(cfg.tokenizer)
    try:
        if fault:
            raise OSError(fault)
        for name, text in texts.items():
            (folder / name).write_text(json.dumps(text, indent=1))
        for file in {file for name in data.TOKENIZER_FILES for file in tokenizer.glob(name)}:
            shutil.copy(file, folder)
        if tokenizer.is_file():
            shutil.copy(tokenizer, folder / "tokenizer.json")
        shutil.rmtree(cfg.export, ignore_errors=True)
        os.rename(folder, cfg.export)
    except OSError as e:
        shutil.rmtree(folder, ignore_errors=True)
        raise ValueError(f"export {cfg.export}: could not be written: {e}") from None
    if not tokenizer.exists():
        say(f"export {cfg.export}: has no tokenizer, as {cfg.tokenizer} is none of Hugging Face's")


def reload(run, state, step):
    """state with the newest parameters of the dynamic sources; step and moments stay. A source that
    cannot be read is told, and training goes on.
    """
    try:
        sources = open_sources(run)
        chosen = ckpt.choose(sources, {name: row["shape"] for name, row in run["table"].items()})
        dynamic = {name: row for name, row in chosen.items() if sources[row[0]]["dynamic"]}
        params = load_parameters(sources, dynamic, run["programs"]["state"]["params"])
    except ValueError as e:
        run["emit"]("fault", {"step": step, "fault": str(e)})
        return state
    run["emit"]("reload", {"step": step, "names": sorted(params)})
    return state | {"params": state["params"] | params}


def load_checkpoint(root, like, config_file, set_aside=False):
    """(step, tree) of the newest sound checkpoint of root."""
    try:
        return ckpt.restore_newest(root, like, say, set_aside)
    except (KeyError, TypeError) as e:
        raise ValueError(f"{e.args[0]}: start from --config {config_file}") from None


def begin_out_dir(cfg):
    """Delete the run to overwrite, now that nothing else can go wrong; write config.json."""
    if not is_main():
        return
    out = Path(cfg.out_dir)
    if cfg.resume == "overwrite":
        for root in (ckpt_root(cfg), ckpt.below(ckpt_root(cfg), "weights")):
            ckpt.delete_all(root, say)
        for name in ("metrics.jsonl", "plot.png", "windows.jsonl"):
            (out / name).unlink(missing_ok=True)
    (out / "config.tmp").write_text(config.to_json(config.repeatable(cfg)))
    (out / "config.tmp").replace(out / "config.json")


def is_finished(cfg, step):
    """Whether nothing is left to do at `step`, and if so, say how to go further: it is past
    cfg.steps, or reached it and logged its end.
    """
    last = ckpt.from_main(lambda: (read_log(cfg.out_dir) or [{"event": ""}])[-1])
    ended = last["event"] == "end" and last["reason"] == ALL_DONE.format(step)
    if step < cfg.steps or (step == cfg.steps and not ended):
        return False
    further = f"--epochs {2 * cfg.epochs:g}" if cfg.epochs else f"--steps {2 * step}"
    past = f"past --steps {cfg.steps}" if step > cfg.steps else "the last"
    say(f"{cfg.out_dir} is finished, at step {step}, {past}. To go further: {further}. To start "
        "afresh: --resume overwrite, or another --out_dir."
        + (" To export it: --mode export." if cfg.export else ""))
    return True


def prepare_data(cfg, task, hooks=()):
    """Tokenize what is not and say what there is, touching no device; the summary."""
    cfg = (TASK_DEFAULTS | task)["adopt"](cfg)
    config.validate(cfg, None)
    tell_data(open_data(task, cfg, ("train", "val")), print)
    return {"step": 0, "reason": "data", "exit_code": 0}


# Would it fit?

def plan(cfg, task=TEXT, hooks=()):
    """Print what an update would take, allocating nothing; the summary."""
    run = prepare(cfg, task) | {"hooks": hooks}
    cost = estimate(run, measure=True)
    show_estimate(run, cost)
    return {"step": 0, "reason": "plan", "exit_code": int(not cost["fits"])} | cost


def estimate(run, measure=False):
    """{"flop": {of what: per device and update}, "fits"} of an update, and {"memory": bytes per
    device by kind, "compiled", "compile_s"}, or "fault" in words. measure: as in explain_memory.
    """
    cfg, mesh, cost = run["cfg"], run["mesh"], {"flop": {}, "memory": {}}
    if run["task"]["flops"]:
        flops, recomputed, formula = run["task"]["flops"](cfg, {})
        n = run["task"]["unit"][1](cfg) / mesh.size
        cost["flop"] = {f"the model's: {formula}": flops * n, "recomputed by remat": recomputed * n}
    state, lowered, _ = steplib.lower_steps(*program_parts(run))
    began = time.perf_counter()
    try:
        with explain_memory(run, measure):
            cost["compiled"] = lowered["train_step"]().compile()
            cost["compile_s"] = time.perf_counter() - began
            cost["memory"] = steplib.memory_by_kind(state, cost["compiled"])
            steplib.check_fits(cost["memory"], mesh)
    except ValueError as e:
        cost["fault"] = str(e)
    return cost | {"fits": "fault" not in cost}


def show_estimate(run, cost):
    say(headline(run) + "; for each device:")
    for what, amount in cost["flop"].items():
        say(f"  {amount / 1e12:10,.4g} TFLOP  {what}")
    for kind, n_bytes in cost["memory"].items():
        say(f"  {n_bytes / 2**30:10,.4g} GiB  {kind}")
    limit = steplib.memory_limit(run["mesh"])
    say(cost.get("fault") or f"compiled in {cost['compile_s']:.0f} s; "
        + (f"fits in {limit / 2**30:,.4g} GiB" if limit else "this device's memory is not known"))


@contextlib.contextmanager
def explain_memory(run, measure=True):
    """Turn an error of memory, when compiling or running, into a ValueError that says what to
    change. measure: also say what an update would need then, least first.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as e:
        if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        fault, remedy = (*map(str, e.args), "")[:2]
        raise ValueError(f"does not fit: {fault.splitlines()[0]}; to change: "
                         f"{remedy or savings(run, measure)}") from None


def savings(run, measure):
    """Flags that would lower the memory of an update."""
    cfg, mesh, needs = run["cfg"], run["mesh"], {}
    flags = steplib.memory_flags(cfg, mesh, run["task"]["savers"](cfg, mesh.shape["sp"]))
    if measure:
        say("out of memory: compiling what would need less ...")
    for flag in ("", *flags) if measure else ():
        changed = dataclasses.replace(cfg, epochs=0.0)  # steps is worked out
        if flag:
            name, value = flag.removeprefix("--").split()
            changed = dataclasses.replace(changed, **{name: type(getattr(cfg, name))(value)})
        with contextlib.suppress(ValueError, MemoryError, jax.errors.JaxRuntimeError):
            state, lowered, _ = steplib.lower_steps(*program_parts(
                prepare(changed, run["task"], mesh.devices.flatten().tolist())))
            compiled = lowered["train_step"]().compile()
            needs[flag] = steplib.memory_by_kind(state, compiled)["total"] / 2**30
    words = [f"{flag} ({needs[flag]:,.4g} GiB)" for flag in sorted(needs, key=needs.get)
             if needs[flag] < 0.99 * needs.get("", math.inf)]
    return ", ".join([*(words or flags), "more devices along tp or sp"])


# Without a loop: evaluate or sample what was saved.

def run_saved(cfg, task, hooks):
    """Evaluate, sample or export the newest checkpoint of cfg.out_dir, as cfg.mode says; the
    summary. Of hooks, those that replace the loss have an effect.
    """
    meta = newest_meta(ckpt_root(cfg), needed_for=f"mode {cfg.mode}")[1]
    run = prepare(cfg, task) | {"hooks": hooks}
    cfg, task = run["cfg"], run["task"]
    if cfg.mode == "sample" and not task["preview"]:
        raise ValueError("mode sample: this task has no preview")
    if cfg.mode == "eval":
        run |= open_data(task, cfg, ("val",))
        if not run["val"]:
            raise ValueError(f"mode eval: val_frac {cfg.val_frac} leaves nothing; set --val_data")
    like, lowered, _ = steplib.lower_steps(*program_parts(run))
    step, params = load_saved(run, like["params"], meta)
    summary = {"step": step, "reason": cfg.mode, "exit_code": 0}
    if cfg.mode == "eval":
        summary |= evaluate(run, run["val"], lowered["eval_step"]().compile(), params)
        say(json.dumps(summary))
    elif cfg.mode == "export":
        task["export"](cfg, params)
        say(f"exported step {step} to {cfg.export}")
    else:
        summary["texts"] = sample_texts(run, params, 0)
        show_texts(summary["texts"])
    return summary


# Signals.

@contextlib.contextmanager
def catch_signals(numbers=(signal.SIGINT, signal.SIGTERM)):
    """A list that gets the name of the first such signal, and an Event to set once there is
    something to save: before, the signal raises KeyboardInterrupt. A second ends the process.

    A thread reads them, since Python runs no handler while the main thread is inside a compilation.
    Before the loop it also ends the process when the main thread, busy outside Python, has not
    left after 3 s. Two within a second count as one: `timeout` sends two.
    """
    caught, in_loop, left = [], threading.Event(), threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield caught, in_loop
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch():
        noted = 0.0
        while number := os.read(reader, 1):
            if number[0] not in numbers:
                continue
            name, now = signal.Signals(number[0]).name, time.monotonic()
            if caught and now - noted > 1:
                os.write(2, f"\n{name} again: ending at once\n".encode())
                os._exit(128 + number[0])
            if caught:
                continue
            noted = now
            caught.append(name)
            if in_loop.is_set():
                os.write(2, f"\n{name}: finishing the step and saving; again to end at once\n"
                         .encode())
            elif not left.wait(3) and not in_loop.is_set():
                os.write(2, f"\n{name}: ended; nothing was changed\n".encode())
                os._exit(0)
        os.close(reader)

    def handle(number, frame):
        if not in_loop.is_set():
            raise KeyboardInterrupt(signal.Signals(number).name)

    with contextlib.ExitStack() as undo:
        undo.callback(left.set)
        undo.callback(os.close, writer)
        undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
        for number in numbers:
            undo.callback(signal.signal, number, signal.signal(number, handle))
        threading.Thread(target=watch, daemon=True).start()
        yield caught, in_loop


def interrupted(signals):
    """Whether to save and leave out what else is due. Several processes must first agree on it."""
    return jax.process_count() == 1 and bool(signals)


def ask(run, step, asked, signals, clock):
    """What asks for a stop from outside: {"signal": name or None, "file": whether out_dir/stop is
    there, "second": since the start, "wishes": of hooks}, and the step. Several processes ask each
    other, at multiples of log_every; between, it is as before.
    """
    several = jax.process_count() > 1
    if several and (step % (run["cfg"].log_every or 10) or step == asked["step"]):
        return asked
    number = signal.Signals[signals[0]].value if signals else 0
    file = os.path.exists(f"{run['cfg'].out_dir}/stop")
    wishes = run["wishes"]
    found = time.perf_counter() - clock["from"], file, number, len(wishes)
    if several:
        found = multihost_utils.process_allgather(np.float32(found)).max(axis=0).tolist()
        also = wishes or [("a hook of another process asked for it", 0)]
        wishes = also if found[3] else []
    second, file, number, _ = found
    return {"step": step, "second": second, "file": bool(file), "wishes": wishes,
            "signal": signal.Signals(int(number)).name if number else None}


# Other processes.

def join_processes(cfg):
    """Meet the other processes, before anything touches a device. Raises ValueError in all of them
    when one has another config than process 0.
    """
    if not cfg.coordinator:
        return
    config.validate(cfg, None)
    if cfg.coordinator == "auto":
        jax.distributed.initialize()
    else:
        print(f"process {cfg.process_id} meets the others of {cfg.n_processes} at "
              f"{cfg.coordinator} ...", file=sys.stderr, flush=True)
        jax.distributed.initialize(cfg.coordinator, cfg.n_processes, cfg.process_id)
    alike = dataclasses.replace(cfg, process_id=0, coordinator="", cache_dir="", prepared="")
    mine = json.loads(config.to_json(alike))
    others = ckpt.from_main(lambda: mine)
    faults = [f"{name} is {mine[name]!r} in process {jax.process_index()}, {others[name]!r} in 0"
              for name in mine if mine[name] != others[name]]
    if multihost_utils.process_allgather(np.array(bool(faults))).any():
        config.raise_all(faults or ["another process was given other flags than process 0"])


def end_observed(run, observers, error):
    """Tell observers and the other processes of an exception that ends the run."""
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
    if jax.process_count() > 1 and of_jax:
        run["beat"](silent_s=3.0)  # that may be of a process that died: the thread gets time to see
        time.sleep(8)
    words = f"{type(error).__name__}: {error}"
    call(observers, "error", {"error": words})
    run["beat"](fault=words.splitlines()[0][:500])


def end_at_once(observers, words):
    print(f"process {jax.process_index()} ends: {words}", file=sys.stderr, flush=True)
    call(observers, "error", {"error": words})
    time.sleep(3 if is_main() else 0)  # JAX ends the others with it: first let them see why
    os._exit(1)


SIGN_BYTES, SILENT_S = 4096, 30  # of a sign of life; how long a process may go without giving one


def watch_peers(cfg, end):
    """beat(**changes), which tells the other processes what this one is "doing" and at which
    "step"; also "fault", why it ends, or that it is "done". A thread shows that in out_dir/.alive
    every second, looks at the others, and calls end(words) once one has ended, is silent, or none
    gets any further.

    A process that does not share out_dir is not watched; JAX ends a run some 100 s after one died.
    """
    if jax.process_count() == 1 or not cfg.peer_timeout_s:
        return lambda **changes: None
    start, folder = ckpt.from_main(lambda: os.urandom(4).hex()), Path(cfg.out_dir, ".alive")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / str(jax.process_index()), os.O_CREAT | os.O_WRONLY)
    except OSError:  # only process 0 needs it
        return lambda **changes: None
    mine = {"start": start, "host": socket.gethostname(), "pid": os.getpid(), "n": 0, "beats": 0}
    signs = {}  # {rank: (sign, when it was heard of, when it got further)}

    def beat(**changes):
        mine.update({"n": mine["n"] + 1} | changes)
        if {"fault", "done"} & changes.keys():
            show()

    def show():
        mine["beats"] += 1
        with contextlib.suppress(OSError):  # in place, as that needs no space on a full disk
            os.pwrite(file, json.dumps(mine).encode()[:SIGN_BYTES].ljust(SIGN_BYTES), 0)

    def watch():
        while not {"fault", "done"} & mine.keys():
            show()
            for rank in range(jax.process_count()):
                with contextlib.suppress(OSError, ValueError):  # not there yet, or half written
                    new, now = json.loads((folder / str(rank)).read_text()), time.monotonic()
                    old, _, moved = signs.get(rank, ({}, 0, 0))
                    if new["start"] == start and new != old:
                        signs[rank] = new, now, moved if new["n"] == old.get("n") else now
            silent_s = min(mine.get("silent_s", SILENT_S), cfg.peer_timeout_s)
            if words := peer_fault(signs, time.monotonic(), cfg.peer_timeout_s, silent_s):
                mine["fault"] = words
                show()
                end(words)
            time.sleep(min(1, silent_s / 3))

    threading.Thread(target=watch, daemon=True).start()
    return beat


def peer_fault(signs, now, timeout_s, silent_s):
    """Why to end a run, which process is at fault and how, or None. signs: {rank: (sign of life,
    when it was heard of, when it last did something)}.
    """
    def who(rank):
        return f"process {rank} (pid {signs[rank][0]['pid']} on {signs[rank][0]['host']})"

    for rank, (sign, heard, _) in signs.items():
        if "fault" in sign:
            return f"{who(rank)} has ended: {sign['fault']}"
        if now - heard > silent_s and "done" not in sign:
            return (f"{who(rank)} has given no sign of life for {now - heard:.0f} s: it is dead, "
                    "stopped or cut off")
    if signs and all(sign["n"] and now - moved > timeout_s for sign, _, moved in signs.values()):
        last = min(signs, key=lambda rank: signs[rank][0]["n"])
        sign = signs[last][0]
        return (f"no process has done anything for {timeout_s:g} s; the furthest behind is "
                f"{who(last)}, after {sign.get('doing')} at step {sign.get('step')}")
    return None


# The command line.

def cli(argv, hooks=(), task=TEXT, kind=config.Config, main=main):
    """Run a command line; the exit code. A ValueError that the six files raise, and a file that may
    not be read, are the user's fault and told in a sentence; other exceptions keep their traceback.
    """
    try:
        return main(config.parse(argv, kind), hooks, task)["exit_code"]
    except Exception as e:
        ours = isinstance(e, PermissionError) or (isinstance(e, ValueError) and raised_by_us(e))
        if not ours and not jax.distributed.is_initialized():
            raise
        print(f"error: {e}" if ours else traceback.format_exc(), file=sys.stderr, flush=True)
        if jax.distributed.is_initialized():  # its shutdown would wait for the others
            time.sleep(2)  # they end when process 0 does: first let them see why
            os._exit(2 if ours else 1)
        return 2
    except KeyboardInterrupt as e:  # before the first step, or in a mode that trains nothing
        print(f"{str(e) or 'SIGINT'}: ended; nothing was changed", file=sys.stderr, flush=True)
        os._exit(0 if e.args else 128 + signal.SIGINT)  # not waiting for a compilation to end


def raised_by_us(error):
    """Whether a `raise` statement of the six files raised it, and not, say, `k, v = f()`."""
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals.get("__name__")
    return (module in (__name__, *"config model step data ckpt".split())
            and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS")


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
