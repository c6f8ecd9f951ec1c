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
import errno
import importlib.metadata
import importlib.util
import json
import math
import os
import queue
import resource
import runpy
import signal
import threading
import time
import traceback
from functools import partial
from pathlib import Path

# A daemon may start with its standard streams closed. /dev/null takes their descriptors, since a
# file that opens as descriptor 1 or 2 would receive all that is printed.
for stream_name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, stream_name) is None:
        stream = open(os.devnull, mode, errors="backslashreplace")  # noqa: SIM115 is not closed
        os.set_inheritable(stream.fileno(), True)
        setattr(sys, stream_name, stream)

# Before JAX starts its threads: have glibc keep all freed memory. On a CPU, new pages at each step
# took from a third to two thirds of its time.
with contextlib.suppress(OSError, AttributeError):  # another C library
    # M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h
    for option, value in ((-4, 0), (-1, -1), (-2, 2**28)):
        ctypes.CDLL(None).mallopt(option, value)

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

import ckpt
import config
import data
import model
import step as steplib

ALL_DONE = "all {} steps are done"  # the reason of a stop after which nothing is left to do

# ---- what is trained

def resolve_text(platform, cfg):
    """cfg with the vocabulary size, all other sizes and the attention kernel resolved."""
    vocab_size = cfg.vocab_size or data.make_tokenizer(cfg.tokenizer)["vocab_size"]
    cfg = config.derive_text(dataclasses.replace(cfg, vocab_size=vocab_size))
    return dataclasses.replace(cfg, attention=model.choose_attention(cfg, platform))


# What is trained is an argument of `main`: a task, which is a dict. In each of its functions the
# config is the last argument. `TASK_DEFAULTS` says what a task does without an optional key.
REQUIRED_TASK_KEYS = ("table", "loss", "batch", "open")

# The task of this trainer: a language model on text.
TEXT = {
    # ---- required

    # (cfg) -> {name: {"shape", "spec", "init", "trained"}}, the parameter table
    "table": model.param_table,
    # (params, batch, cfg) -> ({name: sum}, {name: count}); the mean of "objective" is minimized
    "loss": model.loss_fn,
    # (cfg) -> {name: (shape, dtype, partition spec)} of a batch
    "batch": model.batch_shapes,
    # (parts, cfg) -> {"train": source, "val": source or None}. A source is {
    #   "n": number of examples,
    #   "batch": (step, rows) -> {name: these rows of the batch}, None while the data is missing,
    #   "fingerprint": a text that must not change between a run and its resumption,
    #   "summary": optional, a text to print}.
    # Sources of data.open_text and data.in_windows have more keys. A "val" whose data comes later
    # has "source_at" instead: step -> source, None while the data is missing.
    "open": data.open_text,

    # ---- optional

    # (key, cfg) -> {name: array}, the initial parameters; default: "init" of each row of the table
    "init": model.init,
    # (platform, cfg) -> cfg with all defaults resolved
    "resolve": resolve_text,
    # ({axis: size}, cfg) -> errors in the config, as texts
    "validate": config.text_errors,
    # What speeds are measured in, and how many of it are in a step: (cfg) -> number
    "unit": "token",
    "units_per_step": lambda cfg: cfg.batch_size * cfg.seq_len,
    # (means of a batch or {}, cfg) -> (FLOPs per unit, those of them that are recomputed, formula)
    "flops": lambda means, cfg: model.flops_per_token(
        cfg, cfg.seq_len, means.get("attended_keys")),
    # ({name: mean}, source) -> {name: value}, more metrics of training and evaluation
    "metrics": data.text_metrics,
    # (params, key, cfg) -> texts to print
    "sample": lambda params, key, cfg: model.sample_text(
        params, key, cfg, data.make_tokenizer(cfg.tokenizer),
        steplib.compiler_options(cfg, jax.devices()[0])),
    # (params as shapes, cfg) -> {"sampling", "export": lowered program}, to estimate their memory
    "programs": lambda params, cfg: text_programs(params, cfg),
    # (table, saved names, cfg) -> names that a source of init_from has to provide
    "init_names": model.names_to_load,
    # (size of the mesh axis sp, cfg) -> flags that would lower the memory of the model
    "memory_flags": model.memory_savers,
    # (cfg) -> a text for the summary of the run
    "summary": lambda cfg: f"attention {cfg.attention}",
    # Weights in the format of Hugging Face
    "hf": {
        # (cfg) -> cfg with the shape of the model in init_from
        "update_config": lambda cfg: config_from_hf(cfg),
        # (path, cfg) -> {"names": {name: shape or None}, "read": {name: like} -> {name: array}},
        # None where path has no such weights
        "open_weights": lambda path, cfg: open_hf(path, cfg),
        # (params, cfg): write cfg.export; with params None only look for errors
        "export": lambda params, cfg: export_hf(params, cfg),
    },
}


def setup_run(cfg, task=TEXT, devices=None):
    """{"cfg" (worked out), "task", "mesh", "table", "batch" (shapes with shardings), "beat" (of
    watch_peers), "check_lock" (of ckpt.lock_folders), "at_once" (whether a step is done when it
    returns)} on these devices (default: all at hand). start_run adds "hooks", "train" and "val"
    (sources), "periods", "stops", "left_out", "programs", "first_step", "wishes" (to stop),
    "faults" (survived ones), "meta" (what a checkpoint says of the run), "emit".

    Raises ValueError for every fault that can be seen without data and without compiling.
    """
    task = complete_task(task)
    devices = devices or jax.devices()
    enable_compilation_cache(cfg)
    cfg = task["hf"]["update_config"](cfg)
    config.validate(cfg, len(devices), {
        "optimizer": steplib.OPTIMIZERS, "optimizers": steplib.OPTIMIZERS,
        "schedule": steplib.SCHEDULES, "track": TRACKERS}, task["validate"])
    platform = steplib.platform(devices[0])
    if platform.endswith("cuda") and len(devices) > 1:
        # Collectives of a layer run beside the layers before and after it.
        jax.config.update("jax_optimization_level", "O1")
    cfg = dataclasses.replace(cfg, dtype=steplib.choose_dtype(cfg.dtype, platform))
    cfg = task["resolve"](platform, cfg)
    config.raise_if_errors([
        f"track {name!r}: is not installed: pip install {name}" for name in cfg.track
        if TRACKERS[name] in (wandb, tensorboard) and not importlib.util.find_spec(name)])
    table = model.apply_param_groups(task["table"](cfg), cfg, config.parse_number)
    mesh = steplib.make_mesh(cfg, devices)
    config.raise_if_errors([fault for name, row in table.items() for fault in config.key_errors(
        f"table: {name}: ", row, ROW_KEYS, ("shape", "spec", "init"))] or [
        not any(row.get("trained", True) for row in table.values())
        and "table: no parameter is trained; freeze fewer"], "task")
    cfg = dataclasses.replace(cfg, watch=tuple(sorted(model.matching("watch", cfg.watch, table))))
    config.raise_if_errors(steplib.check_shapes(table, mesh), "mesh and model do not fit")
    if cfg.export:
        task["hf"]["export"](None, cfg)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))
             for name, (shape, dtype, spec) in task["batch"](cfg).items()}
    return {"cfg": cfg, "task": task, "mesh": mesh, "table": table, "batch": batch,
            "beat": lambda **changes: None, "check_lock": lambda: None,
            "at_once": platform == "cpu" and mesh.size == 1}


# ---- a run

def main(cfg, hooks=(), task=TEXT, state=None, params=None):
    """Do what cfg.mode says; a summary dict with at least "step", "reason" and "exit_code", after
    training also "state", "mesh" and "checkpoint" (path of the newest).

    hooks: functions hook(event, value); what one returns, unless None, replaces the value. See
    README.md for events. task: what to train, as TEXT. state, params: train, evaluate, sample or
    export these rather than those on disk; neither is changed.
    """
    began = time.perf_counter()
    init_distributed(cfg)  # JAX then catches SIGTERM itself, so this is before catch_signals
    hooks = (*hooks, *load_hooks(cfg.hooks))
    if cfg.mode in ("plan", "data"):
        if state is not None or params is not None:
            raise ValueError(f"mode {cfg.mode}: uses no state and no params; leave them out")
        return (plan if cfg.mode == "plan" else tokenize_data)(cfg, task, hooks)
    if cfg.mode != "train":
        return run_saved(cfg, task, hooks, state, params)
    with catch_signals() as (signals, in_loop):
        run = setup_run(cfg, task)
        root = ckpt.ckpt_root(run["cfg"].out_dir, run["cfg"].ckpt_dir)
        with ckpt.lock_folders(run["cfg"].out_dir, root, print0) as run["check_lock"]:
            observers, saving = make_observers(run["cfg"]) if is_main() else [], {}
            run["beat"] = start_heartbeat(run["cfg"], observers)
            try:
                with steplib.explain_oom(partial(suggest_memory_flags, run | {"hooks": hooks})):
                    started = start_run(run, hooks, observers, state, params, began)
                    if not started:
                        step, _ = ckpt.newest_meta(root)
                        return {"step": step, "exit_code": 0, "reason": "finished before"}
                    in_loop.set()
                    return train(*started, signals, saving)
            except BaseException as e:
                report_crash(run, observers, e)
                raise
            finally:
                run["beat"](done=True)
                for _, future in saving.values() if jax.process_count() == 1 else ():
                    future.exception()  # the folders stay locked until it is done


def start_run(run, hooks, observers, state, params, began):
    """Data, compilation, first state, log: (run with all that is fixed while it lasts, state,
    {event: (step, second)} of what was done at its step, window of new_window, clock), or None when
    nothing is left.
    """
    cfg, task = run["cfg"], run["task"]
    opened = open_data(task, cfg, ("train", "val"))
    # A folder that grows may have had fewer files when another process listed it.
    opened["train"]["n"] = ckpt.broadcast_from_main(lambda: int(opened["train"]["n"]))
    if cfg.epochs:
        steps = cfg.epochs * opened["train"]["n"] / cfg.batch_size
        # In windows the last few examples wait for the next file.
        steps = math.floor(steps) if "windows" in opened["train"] else math.ceil(steps)
        cfg = dataclasses.replace(cfg, steps=min(max(1, steps), 2**31 - 1))
    periods = {event: config.parse_intervals(getattr(cfg, f"{event}_every"))
               for event in config.EVENTS}
    run = run | {"cfg": cfg, "hooks": hooks, "periods": periods, "stops": config.parse_stops(cfg),
                 "left_out": model.matching("save_exclude", cfg.save_exclude, run["table"]),
                 **opened}
    root = ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir)
    given = state is not None or params is not None
    saved, meta = ckpt.find_start(cfg.out_dir, root, cfg.resume, given)
    if "resume" in run["train"]:
        run["train"]["restore"](meta.get("data", {}).get("windows", []))
    if not opened["val"] and (lost := [
            each["name"] for each in run["stops"] if each["name"].startswith("val_")]):
        raise ValueError(f"stop {lost[0]}: there is no held-out data; set --val_data or --val_frac")
    origin, sources, first_state = initial_state(run, state, params, meta)
    if meta and is_finished(cfg, saved):
        return None
    print0(run_summary(run))
    print_data_summary(opened, print0)
    warn_unsaved(run)
    print0(f"compiling the update for {cfg.steps} steps ...")
    clock = init_timers(began)
    spend(clock, "start")
    programs = steplib.compile_steps(*step_args(run))
    steplib.check_fits(programs["memory"], run["mesh"])
    compile_s = spend(clock, "compile")
    run["known_metrics"] = set()  # names that rows may have, as far as they are known beforehand
    check_stop_metrics(run, programs["metrics"])
    state = run_hooks(hooks, "load", first_state(programs))
    step = int(state["step"])
    # Delete the run to overwrite only now that nothing else can go wrong.
    ckpt.begin_out_dir(cfg.out_dir, root, config.to_json(config.repeatable(cfg)),
                       overwrite=cfg.resume == "overwrite", log=print0)
    rows = ckpt.broadcast_from_main(lambda: [[row["step"], row["event"], row.get("time_s")]
                                   for row in ckpt.read_log(cfg.out_dir)])
    restore_timers(clock, rows, step)
    last = {event: (step, 0.0) for row_step, event, _ in rows if row_step == step}
    run |= {"programs": programs, "first_step": step, "wishes": [], "faults": {}}
    run |= {"meta": describe_run(run, meta, sources), "emit": make_log_event(run, observers, clock)}
    if changes := config.changes_since(meta, run["meta"]):
        print0(f"since the checkpoint: {'; '.join(changes)}. The run continues, but equal to one "
            "without this change only to rounding")
    run["emit"]("start", {"step": step, "origin": origin, "compile_s": compile_s,
                          "time_s": {what: clock[what] for what in TIME_BUCKETS}} | run["meta"])
    last |= {"save": (step, 0.0)} if meta else {}
    return run, state, last, new_window(meta.get("since_log", {})), clock


def train(run, state, last, window, clock, signals, saving):
    """The loop, to cfg.steps or until why_stop says so; the summary.

    last: {event: (step, second)} of what happened at the first step already. window: metrics since
    the last log row. signals: names of those caught. saving: of save_state.
    """
    cfg, emit, programs = run["cfg"], run["emit"], run["programs"]
    latest, previous = {}, None
    asked = {"step": None, "second": 0.0, "signal": None, "file": False, "wishes": []}
    first_step = run["first_step"]

    def stopped_while_waiting():
        return stop_while_waiting(run, step, asked, latest, signals, clock)

    batches = data.prefetch(
        make_batch_at(run, run["train"]), first_step, cfg.steps,
        stopped=stopped_while_waiting,
        busy=lambda: jax.block_until_ready(previous),
        on_missing=lambda i: emit("out_of_data", {"step": i}))

    # The last round takes no step: its actions are those after the last step.
    for step in range(first_step, max(first_step, cfg.steps) + 1):
        due = due_events(run, step, last, asked["second"])

        # Metrics of the previous step, if something is due: this waits for the device. Otherwise
        # they are read below, while the device works on the next step.
        if due or run["at_once"]:
            latest |= log_step(run, previous, window, clock)
            previous = None

        # Epochs and windows that ended with the previous step.
        for event in ("epoch", "window"):
            if event in due:
                emit(event, {"step": step, event: int(progress(run)[event](step))})

        # Reload the parameters of dynamic sources. Before the save, so that a resumed run has them.
        if "reload" in due:
            state = reload_params(run, state, step)

        # Save before anything that could fail.
        for kind in ("save", "weights"):
            if kind in due:
                save_state(run, state, step, window, saving, kind, due[kind] == "second")

        # Evaluate every eval_every steps, after each window, and at the end.
        if "eval" in due and run["val"] and not save_only(signals):
            unsaved = "save" not in due and last.get("save", (None, 0))[0] != step
            with saved_without_memory(run, state, step, window, saving, unsaved):
                programs["compile_eval"]()
                spend(clock, "compile")
                val = val_data_at(run, step, clock, stopped_while_waiting)
                metrics = {}
                if val:
                    metrics = evaluate(run, val, programs["eval_step"], state["params"], signals)
            if metrics:
                row = emit("eval", {"step": step} | metrics)
                latest |= numbers(row) | {"val_step": step}

        # Print samples, so that a person can see how it goes.
        if "sample" in due and run["task"]["sample"] and not save_only(signals):
            preview(run, state["params"], step)

        # Export the parameters for other programs.
        if "export" in due and not save_only(signals):
            export(run, state["params"], step)

        last |= dict.fromkeys(due, (step, asked["second"]))

        # Stop before the next batch is consumed.
        asked = poll_stop_requests(run, step, asked, signals, clock)
        stop = stop_reason(run, step, asked, latest)
        if stop:
            break

        # Get the next batch. This waits while a growing folder has no new file.
        try:
            batch, waited_s = next(batches, (None, 0.0))
        except (ValueError, OSError):
            # The data has an error: save the steps that are done. Of several processes only this
            # one may have met it, and the others would not join in the save.
            if jax.process_count() == 1:
                log_step(run, previous, window, clock)
                save_state(run, state, step, window, saving)
                wait_for_saves(run, saving)
            raise
        if batch is None:  # a stop was requested during the wait
            asked = poll_stop_requests(run, step, asked, signals, clock)
            stop = stop_reason(run, step, asked, latest)
            break
        batch = run_hooks(run["hooks"], "data", batch)

        # Dispatch the next step. The device works on it while this thread goes on.
        emit("dispatch", {"step": step + 1})
        with jax.transfer_guard("disallow"):  # a hidden copy would stall the step
            state, metrics = programs["train_step"](state, batch)
        window["steps"].append((step + 1, metrics))
        state = run_hooks(run["hooks"], "state", state)

        # Read the metrics of the step before it.
        latest |= log_step(run, previous, window, clock)
        previous = step + 1, metrics, waited_s

        # Finish the saves that are written by now.
        wait_for_saves(run, saving, [kind for kind, (_, future) in saving.items() if future.done()])

    # The last metrics may change the exit code.
    latest |= log_step(run, previous, window, clock)
    batches.close()
    if last.get("save", (None, 0))[0] != step:
        save_state(run, state, step, window, saving)
    stop = stop_reason(run, step, asked, latest) or stop
    return end_run(run, state, step, stop, saving, latest, clock)


def stop_reason(run, step, asked, latest):
    """The one answer to whether to stop before the next batch: (reason in words, exit code), or
    None to go on. asked: of `poll_stop_requests`. latest: {metric: newest value}.
    """
    cfg = run["cfg"]
    if not latest.get("finite", True) and cfg.on_nonfinite == "stop":
        return f"a loss or gradient is not finite near step {step}; the last good state is saved", 1
    if asked["signal"]:
        return asked["signal"], 0
    values = latest | asked | {"step": step, "new_steps": step - run["first_step"]}
    for condition in run["stops"]:
        name, bound = condition["name"], condition["bound"]
        if name in values and condition["test"](values[name], bound):
            return condition["reason"].format(values[name], bound), condition["exit_code"]
        # There is a "val_step" after the first evaluation, an "lr" after the first log point. A
        # known metric may be missing from some rows.
        missing = name not in values and name not in run["known_metrics"]
        if missing and ("val_step" if name.startswith("val_") else "lr") in latest:
            return (f"--stop {' '.join(cfg.stop)}: there is no metric {name} "
                    f"({config.did_you_mean(name, sorted(latest))})"), 2
    if asked["wishes"]:
        return asked["wishes"][0]
    if step >= cfg.steps:
        return ALL_DONE.format(cfg.steps), 0
    return None


def check_stop_metrics(run, shapes):
    """Raise ValueError for a condition of --stop on a metric that no row of this run will have.
    shapes: shapes of train_step's metrics.

    Hooks may add metrics to rows. With hooks, why_stop finds an unknown name at the first row.
    """
    conditions = {each["name"] for each in run["stops"]} - config.STOP_MESSAGES.keys()
    if run["hooks"] or not conditions:
        return
    ones = {name: np.ones(x.shape, np.float32) for name, x in shapes.items()
            if name not in ("counts", "watch", "finite")} | {"n_labels": 1.0}
    means = {name: ones[name] for name in [*shapes["counts"], "n_labels"]}
    known = {*scalars(ones), "val_step", "eval_s", *(f"val_{name}" for name in scalars(means))}
    for prefix, source, given in (("", run["train"], ones), ("val_", run["val"], means)):
        if not source:
            continue
        try:
            known |= {prefix + name for name in run["task"]["metrics"](given, source)}
        except Exception:  # The task's function may refuse made-up numbers: its names are unknown.
            return
        if prefix:
            known |= {f"val_loss/{name}" for name in source.get("parts", ())}
    run["known_metrics"] |= known
    config.raise_if_errors([f"no row of this run has the metric {name!r} "
                      f"({config.did_you_mean(name, sorted(known))})"
                      for name in sorted(conditions - known)],
                     f"stop {' '.join(run['cfg'].stop)}")


def log_step(run, previous, window, clock):
    """Wait for the metrics of the step before and emit "step", at a log point also "log", whose
    means are over all steps since the last log row. Returns {metric: value} for why_stop and the
    summary.
    """
    if previous is None:
        return {}
    (step, metrics, waited_s), cfg, emit = previous, run["cfg"], run["emit"]
    watched = metrics.pop("watch", {})  # stays on the device until it is logged
    finite = bool(metrics.pop("finite"))
    logged = not finite or (cfg.log_every and step % cfg.log_every == 0)
    values = {}
    if logged or run["hooks"]:
        values = jax.device_get(metrics)  # takes up to a millisecond
        values |= metric_means(metric_sums(values))
    clock["data"] += waited_s
    clock["step"] -= waited_s
    row = emit("step", {"step": step} | scalars(values))
    latest = {} if finite else {"finite": False}
    if not finite and cfg.on_nonfinite == "raise":
        raise FloatingPointError(f"step {step}: the loss or a gradient is not finite: {row}")
    if not cfg.log_every:  # then a row is of its step alone
        window["steps"] = [(at, kept) for at, kept in window["steps"] if at >= step]
    elif len(window["steps"]) >= MAX_UNREAD_STEPS:
        add_to_window(window, step)
    if logged:
        add_to_window(window, step)
        values |= metric_means(window["sums"])
        window["sums"] = {}
        row |= scalars(values) | scalars(run["task"]["metrics"](values, run["train"]))
        of_this_process = rates(run, step, clock, row)
        if watched:
            row["watch"] = jax.tree.map(np.ndarray.tolist, jax.device_get(watched))
        row = emit("log", row | of_this_process)
        latest |= numbers({k: x for k, x in row.items() if k not in of_this_process})
    return latest


def save_state(run, state, step, window, saving, kind="save", temporary=False):
    """Start a checkpoint once the one before of its kind ("save", or "weights" for parameters
    alone) is committed. saving: {kind: (step, Future)} of those that are under way. meta.json says
    where the run stands in its data, and under what config.
    """
    cfg, train, began = run["cfg"], run["train"], time.perf_counter()
    run["check_lock"]()  # raises when another run writes there by now
    wait_for_saves(run, saving, [kind])
    waited_s = time.perf_counter() - began
    epoch, sequence = divmod(step * cfg.batch_size, train["n"])
    place = {"fingerprint": train["fingerprint"], "epoch": epoch, "sequence": sequence}
    if "windows" in train:
        place["windows"] = train["windows"](step)
    root, keep = ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir), (cfg.max_to_keep, cfg.keep_period)
    run["programs"]["compile_digest"]()
    began = time.perf_counter()
    digest = steplib.digest(run["programs"]["digest"](state))
    if kind == "weights":
        digest = {"params": digest["params"]}
        root, keep, temporary = ckpt.join_path(root, kind), (0, 0), False
        state = {"params": state["params"]}
    tree = {name: x for name, x in ckpt.flatten(state)[0].items()
            if name.split("/")[-1] not in run["left_out"]}
    if cfg.log_every:
        add_to_window(window, step)
    since_log = sums_to_json(window["sums"])
    meta = run["meta"] | {"data": place, "digest": digest, "since_log": since_log}
    saving[kind] = step, ckpt.save(root, step, tree, meta, *keep, temporary, print0)
    run["emit"]("save", {"step": step, "kind": kind, "digest": digest, "waited_s": waited_s,
                         "blocked_s": time.perf_counter() - began})


# ---- optional

# A single CPU runs a step in this thread: of others, glibc would return large blocks after each, or
# have those that compile wait for each other in one arena.
jax.config.update("jax_cpu_enable_async_dispatch", False)

def no_export(params, cfg):
    raise ValueError(f"export {cfg.export!r}: this task has no export; leave it out")


# What a task does without an optional key of `TEXT`. Its default for "init" is in `setup_run`.
TASK_DEFAULTS = {
    "resolve": lambda platform, cfg: cfg,
    "validate": lambda sizes, cfg: [],
    "unit": "example",
    "units_per_step": lambda cfg: cfg.batch_size,
    "flops": None,
    "metrics": lambda means, source: {},
    "sample": None,
    "programs": lambda params, cfg: {},
    "init_names": lambda table, saved, cfg: set(table),
    "memory_flags": lambda sp, cfg: [],
    "summary": lambda cfg: "",
    "hf": {
        "update_config": lambda cfg: cfg,
        "open_weights": lambda path, cfg: None,
        "export": no_export,
    },
}


def complete_task(task):
    """The task with its defaults. Raises ValueError for unknown and missing keys."""
    errors = config.key_errors("task: ", task, TEXT, REQUIRED_TASK_KEYS)
    errors += config.key_errors("task: hf: ", task.get("hf", {}), TEXT["hf"])
    config.raise_if_errors(errors)

    def init_from_table(key, cfg):
        return model.init(key, cfg, task["table"](cfg))

    complete = TASK_DEFAULTS | {"init": init_from_table} | task
    complete["hf"] = TASK_DEFAULTS["hf"] | complete["hf"]
    return complete


# What a row of a task's table may say of its parameter.
ROW_KEYS = "shape spec init trained ids lr_mult decay_mult optimizer".split()


def open_data(task, cfg, parts):
    """What task["open"] gives: {"train", "val"}: a source or None."""
    opened = task["open"](parts, cfg)
    config.raise_if_errors(config.key_errors("open: ", opened, ("train", "val")), "task")
    return {"train": None, "val": None} | opened


def step_args(run):
    """The arguments of lower_steps and compile_steps."""
    task, replaced = run["task"], partial(run_hooks, run.get("hooks", ()))
    return (*map(run.get, ("cfg", "mesh", "table")), task["loss"], task["init"], run["batch"],
            replaced)


def due_events(run, step, last, second):
    """{event: why} of what is due at this step and was not done at it: "step", "epoch", "window",
    "second" or, after the last update, "end". last: {event: (step, second) of the last time}.
    """
    cfg, done, due, periods = run["cfg"], progress(run), {}, run["periods"]
    periods = periods | {"epoch": {"epoch": 1}, "window": {"window": 1},
                         "eval": {"window": 1} | periods["eval"]}  # one after each window
    at_end = {"save": True, "eval": True, "sample": True, "export": cfg.export,
              "weights": periods["weights"]}
    for event, period in periods.items():
        last_step, last_second = last.get(event, (0, 0.0))
        if step == last_step:
            continue
        passed = [unit for unit, n in period.items()
                  if unit != "second" and done[unit](step) // n > done[unit](step - 1) // n]
        if step >= cfg.steps and at_end.get(event):
            due[event] = "end"
        elif passed:
            due[event] = passed[0]
        elif second - last_second >= period.get("second", math.inf):  # such a save is temporary
            due[event] = "second"
    return due


def progress(run):
    """{unit of a period: function of the step, how many of it are done}."""
    cfg, train = run["cfg"], run["train"]
    return {"step": lambda step: step, "window": train.get("n_finished", lambda step: 0),
            # 1e-9, since 1.2 // 0.4 is 2 in floating point
            "epoch": lambda step: step * cfg.batch_size / train["n"] + 1e-9}


def val_data_at(run, step, clock, halted):
    """The held-out source at `step`; one that is not there yet is waited for: None once halted(),
    or when training is over.
    """
    if "source_at" not in (val := run["val"]):
        return val
    if (source := val["source_at"](step)) is None and step < run["cfg"].steps:
        run["emit"]("out_of_data", {"step": step})
        while source is None and not halted():
            time.sleep(0.2)
            source = val["source_at"](step)
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
        totals = steplib.evaluate(eval_step, params, (batch for batch, _ in batches),
                                  lambda: run["beat"](doing="eval") or save_only(signals))
        if totals is None:
            return {}
        sums = jax.tree.map(np.add, sums, totals) if sums else totals
        if name:
            row[f"val_loss/{name}"] = float(np.divide(*totals["loss"]))
    means = metric_means(sums)
    found = scalars(means | run["task"]["metrics"](means, val))
    found["n_labels"] = int(found["n_labels"])
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
        if there != wanted:
            raise ValueError(f"batch {index} is {there}, must be {wanted}")
        config.raise_if_errors([
            f"{name} is {x.min()} to {x.max()}: must be from 0 to {n - 1}, or {n} "
                          "for padding" for name, n in sizes.items() for x in (batch[name],)
                          if x.min() < 0 or x.max() > n], f"batch {index}")
        return data.to_device(batch, shardings, rows, run["cfg"].batch_size)

    return batch_at


def print_data_summary(sources, tell):
    for part, source in sources.items():
        if source and "summary" in source:
            tell(f"{part} data: {source['summary']}")


def warn_unsaved(run):
    if lost := [name for name in sorted(run["left_out"]) if run["table"][name].get("trained", 1)]:
        print0(f"save_exclude: {', '.join(lost)} will be trained, not saved: lost when the run "
               "stops")


def sample_texts(run, params, step):
    key = jax.random.fold_in(jax.random.key(run["cfg"].seed), step)
    with jax.set_mesh(run["mesh"]):
        return run["task"]["sample"](params, key, run["cfg"])


@contextlib.contextmanager
def log_errors(run, step, kind):
    """Tell of a ValueError in a save or an export, and go on; run["faults"] has the last of each
    kind, unless one since then went well.
    """
    run["faults"].pop(kind, None)
    try:
        yield
    except ValueError as e:
        run["faults"][kind] = str(e)
        run["emit"]("fault", {"step": step, "fault": str(e)})


@contextlib.contextmanager
def saved_without_memory(run, state, step, window, saving, unsaved):
    """Save the state, if it is unsaved, before an error of memory ends the run. Of several
    processes only this one may have met it, and the others would not join in the save.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        if unsaved and jax.process_count() == 1:
            save_state(run, state, step, window, saving)
            wait_for_saves(run, saving)
        raise


def wait_for_saves(run, saving, kinds=("weights", "save")):
    """Wait for the saves of these kinds that are under way."""
    for kind in [kind for kind in kinds if kind in saving]:
        step, future = saving.pop(kind)
        with log_errors(run, step, kind):
            ckpt.wait(future)


def make_log_event(run, observers, clock):
    """emit(event, row): the row as hooks make it, for which observers and other processes are told,
    its wish to stop noted, and the time since the last event booked.
    """
    def emit(event, row):
        run["beat"](doing=event, step=row["step"])
        row = run_hooks(run["hooks"], event, row)
        run["wishes"].extend([(str(row["stop"]), 0)] if row.get("stop") else [])
        notify(observers, event, row)
        if event not in ("dispatch", "epoch", "window", "out_of_data"):
            spend(clock, event)
        return row

    return emit


# What wall time is spent on: the event at whose end it is counted, else "other". data: waiting for
# it; lost: updates and all else that a kill undid.
TIME_BUCKETS = ("start", "compile", "step", "data", "save", "eval", "other", "lost")


def init_timers(began):
    """Running sums of seconds of wall time by SPENT, and "at", when the last was added."""
    return dict.fromkeys(TIME_BUCKETS, 0.0) | {"from": began, "at": began, "logged": (0, 0.0, 0.0)}


def spend(clock, event):
    """Add the seconds since the last call to what they were spent on; return them."""
    now = time.perf_counter()
    spent_s, clock["at"] = now - clock["at"], now
    clock[event if event in TIME_BUCKETS else "other"] += spent_s
    return spent_s


def restore_timers(clock, rows, step):
    """Add what the starts before this one spent. rows: [step, event, "time_s"] of metrics.jsonl."""
    times = [(row_step, time_s) for row_step, _, time_s in rows if time_s]
    kept = next((time_s for row_step, time_s in reversed(times) if row_step <= step), {})
    for what, spent_s in kept.items():
        clock[what] += spent_s
    clock["lost"] += sum(times[-1][1].values()) - sum(kept.values()) if times else 0
    clock["logged"] = step, clock["step"], clock["data"]


def numbers(row):
    return {name: x for name, x in row.items() if isinstance(x, (int, float))}


def preview(run, params, step):
    """Print what the task's preview makes. What goes wrong in it is told, and training goes on."""
    try:
        row = {"texts": sample_texts(run, params, step)}
    except Exception as e:  # a preview is never worth a run
        row = {"texts": [], "fault": f"no sample: {type(e).__name__}: {e}"}
    if any(row.values()):
        run["emit"]("sample", {"step": step} | row)


def export(run, params, step):
    """Export the parameters. What goes wrong with the disk is told, and training goes on."""
    began = time.perf_counter()
    with log_errors(run, step, "export"):
        run["task"]["hf"]["export"](params, run["cfg"])
        run["emit"]("export", {"step": step, "export_s": time.perf_counter() - began})


def end_run(run, state, step, stop, saving, latest, clock):
    """Emit "stop" and "end", which has the newest metrics; the summary. stop: of why_stop."""
    wait_for_saves(run, saving)
    lost, (reason, exit_code) = run["faults"], stop
    why = {"step": step, "reason": "; ".join([reason, *lost.values()])}
    run["emit"]("stop", why)
    if is_main():
        Path(run["cfg"].out_dir, "stop").unlink(missing_ok=True)
    root = ckpt.ckpt_root(run["cfg"].out_dir, run["cfg"].ckpt_dir)
    left_out = ("finite", "eval_s", *["val_step"] * (latest.get("val_step") == step))
    row = {name: x for name, x in latest.items() if name not in left_out} | why | {
        "exit_code": 1 if lost else exit_code, "wall_s": clock["at"] - clock["from"],
        "time_s": {what: clock[what] for what in TIME_BUCKETS},
        "checkpoint": None if "save" in lost else ckpt.join_path(root, f"{step:09d}")}
    return run["emit"]("end", row) | {"state": state, "mesh": run["mesh"]}


def run_hooks(hooks, event, value):
    """Give `value` to every hook(event, value); what one returns, unless None, replaces it."""
    for hook in hooks:
        try:
            new = hook(event, value)
            if new is not None and isinstance(value, dict) and (lost := value.keys() - {*new}):
                raise TypeError(f"what it returns has no {', '.join(sorted(lost))}; return None, "
                                "or all of the value: value | {...}")
        except Exception as e:
            e.add_note(f"in the hook {getattr(hook, '__qualname__', hook)}, at the event {event}")
            raise
        value = value if new is None else new
    return value


def scalars(values):
    return {name: float(x) for name, x in values.items()
            if not isinstance(x, dict) and np.ndim(x) == 0}


# Means over several steps. Sums are in float64, so that those of a resumed run, which begin with
# what its checkpoint has, are bit-identical.

MAX_UNREAD_STEPS = 100  # steps whose metrics stay on the device until they are added up


def new_window(sums):
    """Metrics since the last log row: {"sums": {name: (sum, count)}, "steps": [(step, metrics)]}
    not yet added to them, which stay on the device. sums: as a checkpoint's meta has them.
    """
    sums = {name: (np.asarray(total, np.float64)[()], count)
            for name, (total, count) in sums.items()}
    return {"sums": sums, "steps": []}


def sums_to_json(sums):
    """{name: (sum, count)} for JSON. Each number of a sum is a text with all its digits, since JSON
    has no NaN and no infinity.
    """
    return {name: (np.asarray(total, np.float64).astype(str).tolist(), count)
            for name, (total, count) in sums.items()}


def metric_sums(metrics):
    """{name: (sum, count)} of one step's metrics, which train_step gives as means and counts."""
    counts = metrics.get("counts", {})  # a train_step that a hook replaced may give none
    return {name: (np.float64(metrics[name]) * (count or 1), float(count))
            for name, count in counts.items()}


def add_to_window(window, last_step):
    """Add the metrics of the steps up to last_step to the window's sums."""
    read = jax.device_get([metrics for step, metrics in window["steps"] if step <= last_step])
    window["steps"] = [(step, metrics) for step, metrics in window["steps"] if step > last_step]
    for metrics in read:
        for name, (total, count) in metric_sums(metrics).items():
            total_before, count_before = window["sums"].get(name, (0.0, 0.0))
            window["sums"][name] = total_before + total, count_before + count


def metric_means(sums):
    """{name: mean} of {name: (sum, count)}, and "n_labels", the loss's count. A sum whose count is
    0 is its own value; but without any label, a number that has count 0 has no value: NaN.
    """
    if not sums:
        return {}
    _, n_labels = sums.get("loss", sums.get("objective"))
    means = {"n_labels": float(n_labels)}
    for name, (total, count) in sums.items():
        if count:
            means[name] = total / count
        elif n_labels or np.ndim(total):
            means[name] = total
        else:
            means[name] = np.nan
    return means


@contextlib.contextmanager
def ignore_stdout_errors():
    """Print, and flush. What a terminal that was closed, a broken pipe or a full disk does not take
    ends no run.
    """
    with contextlib.suppress(OSError):
        yield
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as e:
            if e.errno in (errno.EPIPE, errno.EIO):  # it leads nowhere from now on, also at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@ignore_stdout_errors()
def print0(*words):
    """Print on process 0, above the progress bar if there is one."""
    if is_main():
        tqdm.write(" ".join(map(str, words)), file=sys.stdout)


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
            file = ckpt.open_log(cfg.out_dir, row["step"])
        if file and event not in ("step", "dispatch"):
            try:
                file.write(ckpt.json_line({"event": event} | row) + "\n")
            except OSError as e:  # what was not written is kept, and written with the next row
                print0(f"{path}: {e}; make room: rows are kept until then")

    return observe


# How the screen shows a value, where a row has it.
METRIC_FORMATS = {"step": "step {:>6}", "loss": "loss {:.4f}", "lr": "lr {:.2e}", "fault": "{}",
         "val_loss": "held-out loss {:.4f}", "val_acc": "accuracy {:.3f}",
         "val_bits_per_byte": "{:.3f} bits/byte", "val_step": "of step {}"}
HIDDEN_METRICS = "val_loss val_objective val_ppl val_z val_n_labels".split()  # those not shown


def format_metrics(row, names, between="  "):
    texts = []
    for name in names.split():
        if name in row:
            default = name.removeprefix("val_") + " {:.4g}"
            texts.append(METRIC_FORMATS.get(name, default).format(row[name]))
    return between.join(texts)


def console(cfg):
    """A progress bar; where there is no terminal, plain lines."""
    bar, unit = tqdm(disable=True), ""
    others = {"reload": "loaded again: {names}", "out_of_data": "waiting for data",
              "export": "exported to {cfg.export}"}

    @ignore_stdout_errors()
    def observe(event, row):
        nonlocal bar, unit
        if event == "start":
            total, unit = row["memory_bytes_per_device"]["total"] / 2**20, row["unit"]
            print0(f"compiled in {row['compile_s']:.1f} s, {total:,.0f} MiB a device; from "
                f"{row['origin']}, at step {row['step']}")
            bar = tqdm(total=cfg.steps, initial=row["step"], disable=not sys.stderr.isatty(),
                       bar_format="{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}")
        elif event == "step":
            bar.update()
        elif event == "log":
            rate = f"{row[unit + 's_per_s']:,.0f} {unit}s/s"
            bar.set_postfix_str(f"{format_metrics(row, 'loss')}  {rate}", refresh=False)
            if bar.disable:
                loss = "no label" if row.get("n_labels") == 0 else format_metrics(row, "loss")
                print0(f"{format_metrics(row, 'step')}  {loss}  {format_metrics(row, 'lr')}  "
                       f"{rate}  "
                    f"data wait {1000 * row['data_wait_s']:.1f} ms")
        elif event == "eval":
            own = [x for x in numbers(row)
                   if x.startswith("val_") and x not in HIDDEN_METRICS and "/" not in x]
            print0(format_metrics(row, " ".join(["step", "val_loss", *own])))
            for source in (name for name in row if name.startswith("val_loss/")):
                print0(f"{'':11}  held-out loss {row[source]:.4f} of {source[9:]}")
        elif event == "sample":
            print_samples(row["texts"])
        elif event in others:
            names = ", ".join(row.get("names", ()))
            print0(f"{format_metrics(row, 'step')}  {others[event].format(cfg=cfg, names=names)}")
        if "fault" in row:
            print0(format_metrics(row, "step fault"))
        if event in ("end", "error"):
            bar.close()
        if event == "end":
            print_summary(cfg, row)

    return observe


def print_summary(cfg, row):
    total = sum(row["time_s"].values())  # of all starts
    print0("".join(f"{what:>8}" for what in row["time_s"]) + "  all starts")
    print0("".join(f"{s / total:8.1%}" for s in row["time_s"].values()) + f"  {total:,.0f} s")
    print0(", ".join(filter(None, (
        f"step {row['step']}", format_metrics(row, "val_loss val_bits_per_byte val_step", ", "),
        "loss" in row and f"training {format_metrics(row, 'loss')}"))))
    root = ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir)
    saved = f", saved in {root}" if row["checkpoint"] else ""
    done = row["reason"] == ALL_DONE.format(row["step"])
    print0(f"{'done' if done else 'stopped'}: {row['reason']}; {row['wall_s']:.0f} s{saved}")
    if not row["exit_code"] and not done:
        flag = "" if cfg.resume in ("auto", "must") else " with --resume auto"
        limit = ", as far as --stop allows" if cfg.stop else ""
        print0(f"the same command{flag} goes on from here{limit}")


def print_samples(texts):
    for text in texts:  # control characters as escapes: a terminal would obey them
        text = "".join(c if c.isprintable() or c in "\t\n" else repr(c)[1:-1] for c in text)
        print0(f"{' sample '.center(24, '-')}\n{text}")
    if texts:
        print0("-" * 24)


def profiler(cfg):
    """Trace updates first:last of cfg.profile into out_dir/profile."""
    first, last = config.profile_span(cfg)
    return steplib.profiler(first, last, Path(cfg.out_dir) / "profile", print0)


def plot(cfg):
    """Draw plot.png when a run ends and matplotlib is installed: training and held-out loss,
    learning rate, gradient norm and throughput over steps.
    """
    def observe(event, row):
        rows = ckpt.read_log(cfg.out_dir) if event == "end" else []
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
                event, style = ("eval", "o-") if label == "held-out" else ("log", "-")
                points = [(row["step"], row[name]) for row in rows
                          if row["event"] == event and row.get(name) is not None]
                axes.plot(*np.reshape(points, (-1, 2)).T, style, label=label, markersize=4)
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
            run.log(numbers(row))
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
            values = [Summary.Value(tag=name, simple_value=x) for name, x in numbers(row).items()]
            writer.add_event(Event(summary=Summary(value=values), wall_time=now, step=step))
        if event in ("end", "error"):
            writer.close()

    return observe


OBSERVERS = (jsonl, profiler, console)
TRACKERS = {"wandb": wandb, "tensorboard": tensorboard}  # of --track
TRACKER_S, QUEUE_ROWS = 60, 10_000  # how long the end of a run waits for one; rows not yet taken


def make_observers(cfg):
    """[(name, observer)] of this run."""
    trackers = {"plot": plot} | {name: TRACKERS[name] for name in cfg.track}
    return [*((getattr(make, "__name__", str(make)), make(cfg)) for make in OBSERVERS),
            *((name, run_in_thread(name, make, cfg)) for name, make in trackers.items())]


def notify(observers, event, row):
    """Call each observer, a pair of name and function, with the event and a copy of the row. What
    it returns is ignored. An observer that raises is removed from the list.
    """
    for observer in [*observers]:
        name, observe = observer
        # Also copies of the dicts within: checkpoints keep the "config" of the start row.
        own = {key: dict(x) if isinstance(x, dict) else x for key, x in row.items()}
        try:
            observe(event, own)
        except Exception as error:
            observers[:] = [other for other in observers if other is not observer]
            words = f"{type(error).__name__}: {error}".partition("\n")[0]
            lost = "; metrics.jsonl is no longer written" if name == "jsonl" else ""
            print0(f"observer {name}: at the event {event}: {words}; it is removed, and the run "
                f"continues{lost}")


def run_in_thread(name, make, cfg):
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
            print0(f"{name}: {type(e).__name__}: {e}; it is dropped, and the run goes on")

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
                print0(f"{name}: not done after {TRACKER_S} s; its last rows may be lost")

    return observe


# What a run reports of itself.

def run_summary(run):
    """What would run, and on what."""
    cfg, mesh, task = run["cfg"], run["mesh"], run["task"]
    unit, size = task["unit"], task["units_per_step"]
    sizes = [(math.prod(row["shape"]), row.get("trained", True)) for row in run["table"].values()]
    n_params, n_trained = sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)
    trained = f" ({n_trained / 1e6:,.2f}M trained)" if n_trained < n_params else ""
    axes = " ".join(f"{a}={n}" for a, n in mesh.shape.items())
    about = [cfg.dtype, task["summary"](cfg), f"{size(cfg):,} {unit}s an update"]
    return (f"{n_params / 1e6:,.2f}M parameters{trained} on {mesh.size} x "
            f"{mesh.devices.flat[0].device_kind}, mesh {axes}\n" + ", ".join(filter(None, about)))


def describe_run(run, meta, sources):
    """What runs, and on what, for the start event and every checkpoint. meta: of the checkpoint it
    goes on from, or {}. sources: of its parameters.
    """
    cfg, task = run["cfg"], run["task"]
    unit, size = task["unit"], task["units_per_step"]
    versions = {name: importlib.metadata.version(name)
                for name in "jax jaxlib numpy optax tensorstore".split()}
    row = {"devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
           "processes": jax.process_count(), "unit": unit, f"{unit}s_per_step": size(cfg),
           "n_params": sum(math.prod(row["shape"]) for row in run["table"].values()),
           "memory_bytes_per_device": run["programs"]["memory"],
           "config": dataclasses.asdict(cfg), "mesh": dict(run["mesh"].shape), "sources": sources,
           "run_id": meta.get("run_id", os.urandom(4).hex()),
           "machine": steplib.describe_machine(jax.devices()[0]) | {
               "device": jax.devices()[0].device_kind,
               "xla_flags": os.environ.get("XLA_FLAGS", "")},
           "versions": {"python": sys.version.split()[0]} | versions}
    if run["task"]["flops"]:
        flops, _, formula = run["task"]["flops"]({}, cfg)
        row |= {f"flops_per_{unit}": flops, "flops_formula": formula}
    return row


def rates(run, step, clock, means):
    """What a log row says of progress, speed and memory: unit and formula stand beside each. None
    where the device's peak rate is not known.
    """
    cfg, task = run["cfg"], run["task"]
    unit, size = task["unit"], task["units_per_step"]
    old, clock["logged"] = clock["logged"], (step, clock["step"], clock["data"])
    n, step_s, data_s = np.subtract(clock["logged"], old).tolist()
    per_s = n * size(cfg) / (step_s + data_s)
    memory = jax.local_devices()[0].memory_stats()  # None on a CPU: then what the process held
    row = {
        f"{unit}s": step * size(cfg),  # in all updates so far
        f"{unit}s_per_s": per_s,  # of the updates since the last row: size of a batch / step_s
        "epoch": step * cfg.batch_size / run["train"]["n"],  # examples seen / examples there are
        "step_s": (step_s + data_s) / n,  # wall time of an update, with its wait for data
        "data_wait_s": data_s / n,  # seconds in which the device had no batch
        "goodput": clock["step"] / sum(clock[what] for what in TIME_BUCKETS),  # of all starts
        "time_s": {what: clock[what] for what in TIME_BUCKETS},  # seconds, all starts
        "memory_peak_bytes": memory["peak_bytes_in_use"] if memory else
        1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if run["task"]["flops"]:
        flops, recomputed, _ = run["task"]["flops"](means, cfg)  # of one unit
        peak_tflops, _ = steplib.peaks(jax.devices()[0].device_kind)
        row |= steplib.utilization(flops, recomputed, per_s, jax.device_count(), peak_tflops)
    return row


# Before the first step.

def load_hooks(texts):
    """The functions of texts "file.py:function"; a file runs once, and may import what lies beside
    it.
    """
    found, hooks = {}, []
    for text in texts:
        path, _, name = text.rpartition(":")
        if path not in found:
            sys.path.append(os.path.dirname(os.path.abspath(path)))
            found[path] = runpy.run_path(path) if Path(path).is_file() else {}
        functions = [key for key, f in found[path].items() if callable(f) and key[:2] != "__"]
        if name not in functions:
            why = (f"it has no {name!r} ({config.did_you_mean(name, functions)})" if functions else
                   f"{path!r} is no file with functions")
            raise ValueError(f"hooks {text!r}: must be file.py:function; {why}")
        hooks.append(found[path][name])
    return hooks


def enable_compilation_cache(cfg):
    """Have JAX keep compiled programs in cfg.cache_dir. A default folder that cannot be written is
    a notice.
    """
    try:
        steplib.enable_compilation_cache(cfg.cache_dir)
    except OSError as e:
        fault = f"cache_dir {cfg.cache_dir!r}: cannot be written: {e.strerror}"
        if cfg.cache_dir != config.Config.cache_dir:
            raise ValueError(f"{fault}; choose another, or '' for none") from None
        print0(f"{fault}; compiled programs are not kept between runs")
        steplib.enable_compilation_cache("")


def initial_state(run, state, params, meta):
    """(origin in words, sources of parameters in words, programs -> first state): given state,
    given parameters, own checkpoint of `meta`, init_from, fresh; the first that there is. What an
    own checkpoint left out is as the run's first start had it.

    Raises ValueError when a checkpoint is of another config, other data or another model.
    """
    cfg, key = run["cfg"], jax.random.key(run["cfg"].seed)
    if state is not None:
        return "the given state", [], lambda programs: place_state(state, programs["state"])
    if params is not None:
        return "the given parameters", [], lambda programs: programs["from_params"](
            key, params=place_params(params, programs["state"]["params"]))
    if meta:
        config.check_resumable(meta["config"], cfg, meta.get("mesh", {}), dict(run["mesh"].shape))
    missing, sources = find_parameters(run, meta)
    told = [source.get("summary", source["path"]) for source in sources]
    if meta:
        then = {"data": meta["data"]["fingerprint"], "init_from": meta.get("sources")}
        now = {"data": run["train"]["fingerprint"]} | ({"init_from": told} if missing else {})
        config.raise_if_errors([
            f"{name} was {then[name]}, is {now[name]}: bring it back, or go on with "
                          f"--allow_change {name}" for name in now
                          if then[name] != now[name] and name not in cfg.allow_change],
                         f"{cfg.out_dir} holds a run from other data or parameters")

    def first_state(programs):
        first, like = {}, programs["state"]
        if missing:
            loaded = ckpt.load_parameters(sources, like["params"])
            first = programs["from_params"](key, params=loaded) if loaded else programs["init"](key)
        if not meta:
            return first
        root = ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir)
        return ckpt.restore_run(cfg.out_dir, root, like, missing, first, print0)[1]

    origin = "its own checkpoint" if meta else ", ".join(told) or "a fresh initialization"
    return origin, told or meta.get("sources", []), first_state


def place_state(state, like):
    """A copy of a given state, in the shardings of `like`."""
    check_state(state, like)
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, like), may_alias=False)


def check_state(state, keys):
    """Raise ValueError when a given state is no dict with these keys."""
    missing = [key for key in keys if not isinstance(state, dict) or key not in state]
    if missing:
        raise ValueError(f"the given state: has no {', '.join(missing)}; must be a dict as the "
                         "summary of train.main has under 'state'")


def place_params(params, like):
    """Copies of given parameters {name: array}, in the dtypes and shardings of `like`. Raises
    ValueError for names and shapes that are not the model's.
    """
    if not isinstance(params, dict):
        raise ValueError(f"the given parameters: are {type(params).__name__}, must be a dict "
                         "{name: array}")
    params = {name: x if hasattr(x, "dtype") else np.asarray(x) for name, x in params.items()}
    errors = [f"{name}: this model has no such parameter ({config.did_you_mean(name, like)})"
              for name in params if name not in like]
    for name, x in like.items():
        if name not in params:
            errors.append(f"{name}: is missing")
        elif np.shape(params[name]) != x.shape:
            errors.append(f"{name}: has shape {np.shape(params[name])}, must have {x.shape}")
        elif not jax.numpy.issubdtype(params[name].dtype, np.floating):
            errors.append(f"{name}: has dtype {params[name].dtype}, must be a float")
    config.raise_if_errors(errors, "the given parameters")
    return {name: jax.device_put(params[name].astype(x.dtype), x.sharding, may_alias=False)
            for name, x in like.items()}


def find_parameters(run, meta):
    """(names of the parameters that the run's own checkpoint does not have: all, without one; the
    sources of init_from to take them from). Prints what comes from where. meta: of that
    checkpoint, or {}.
    """
    table = run["table"]
    excluded = meta["config"].get("save_exclude", ()) if meta else ("*",)
    missing = model.matching("save_exclude", excluded, table)
    if not missing:
        return missing, []
    sources = open_sources(run, missing)
    if sources or meta:
        ckpt.log_sources(sources, missing, table, print0)
    return missing, sources


def open_sources(run, wanted=None):
    """The sources of cfg.init_from for the run's task; see ckpt.open_sources."""
    cfg, task, table = run["cfg"], run["task"], run["table"]
    return ckpt.open_sources(
        cfg.init_from, {name: row["shape"] for name, row in table.items()},
        open_weights=lambda path: task["hf"]["open_weights"](path, cfg),
        expected_names=lambda saved: task["init_names"](table, saved, cfg),
        find_mismatches=lambda meta: config.architecture_mismatch(
            meta.get("config", {}), vars(cfg)),
        wanted=wanted, log=print0)


# Weights in Hugging Face's format.

def config_from_hf(cfg):
    """cfg with the shape of the model and the tokenizer that a Hugging Face folder in init_from
    has. Raises ValueError for fields that were set to something else.
    """
    for path in (ckpt.parse_source(text)["path"] for text in cfg.init_from):
        if hf := ckpt.read_hf_config(path):
            fields = model.hf_fields(hf)
            config.raise_if_errors([
                config.field_error(cfg, name, f"is {value!r} there; leave it out")
                              for name, value in fields.items()
                              if getattr(cfg, name) not in (value, getattr(type(cfg)(), name))],
                             f"init_from {path}")
            if cfg.tokenizer == "bytes" and Path(path, "tokenizer.json").is_file():
                fields["tokenizer"] = path
            cfg = dataclasses.replace(cfg, **fields)
    return cfg


def open_hf(path, cfg):
    """{"names", "read"} of a folder of Hugging Face weights, or None."""
    if not ckpt.read_hf_config(path):
        return None
    pieces = model.hf_pieces(cfg)

    def read(like):
        others = [tensor for name in pieces.keys() - like for tensor in pieces[name][0].values()]
        return ckpt.read_safetensors(path, {name: pieces[name] for name in like}, like,
                                     (*model.HF_UNUSED, *others))

    return {"names": dict.fromkeys(pieces), "read": read}


HF_PASSTHROUGH = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def export_hf(params, cfg):
    """Write cfg.export as transformers, or PEFT for LoRA apart, loads it; what an export wrote
    there before is replaced. params: None to look for faults alone.

    Raises ValueError when no family of theirs is of this form, or the folder is not an export's.
    """
    apart = bool(cfg.lora_rank) and cfg.export_lora == "apart"
    written_by = {"out_dir": os.path.abspath(cfg.out_dir)}
    ckpt.check_export(cfg.export, written_by)
    paths = [ckpt.parse_source(text)["path"] for text in cfg.init_from]
    base = next(filter(ckpt.read_hf_config, paths), None)
    about = model.peft_config(cfg, base) if apart else model.hf_config(cfg)
    ckpt.import_safetensors()
    pieces = model.hf_pieces(cfg, apart)
    if params is None:
        return
    if not apart:
        params = model.merge_lora(params, cfg)
        tokenizer = data.make_tokenizer(cfg.tokenizer)
        about |= {"torch_dtype": cfg.export_dtype, "bos_token_id": tokenizer["bos"],
                  "eos_token_id": tokenizer["eos"]}
        saved = ckpt.read_hf_config(base) if base else {}
        about |= {name: saved[name] for name in HF_PASSTHROUGH if name in saved}

    def add_files(folder):
        name = "adapter_config.json" if apart else "config.json"
        (folder / name).write_text(json.dumps(about, indent=1))
        has_tokenizer = data.copy_tokenizer(cfg.tokenizer, folder)
        if not has_tokenizer:
            print0(f"export {cfg.export}: has no tokenizer, as {cfg.tokenizer} is none of Hugging "
                "Face's")

    tensors = ckpt.each_tensor(params, pieces, cfg.export_dtype)
    stem = "adapter_model" if apart else "model"
    ckpt.write_export(cfg.export, written_by, tensors, stem, add_files)


def reload_params(run, state, step):
    """state with the newest parameters of the dynamic sources; step and moments stay. A source that
    cannot be read is told, and training goes on.
    """
    try:
        dynamic = [source for source in open_sources(run) if source["dynamic"]]
        params = ckpt.load_parameters(dynamic, run["programs"]["state"]["params"])
    except ValueError as e:
        run["emit"]("fault", {"step": step, "fault": f"reload: {e}"})
        return state
    run["emit"]("reload", {"step": step, "names": sorted(params)})
    return state | {"params": state["params"] | params}


def is_finished(cfg, step):
    """Whether nothing is left to do at `step`, and if so, say how to go further: it is past
    cfg.steps, or reached it and logged its end.
    """
    last = ckpt.broadcast_from_main(lambda: (ckpt.read_log(cfg.out_dir) or [{"event": ""}])[-1])
    ended = last["event"] == "end" and last["reason"] == ALL_DONE.format(step)
    if step < cfg.steps or (step == cfg.steps and not ended):
        return False
    further = f"--epochs {2 * cfg.epochs:g}" if cfg.epochs else f"--steps {2 * step}"
    print0(f"{cfg.out_dir} is finished, at step {step}. To go further: {further}. To start afresh: "
        "--resume overwrite, or another --out_dir. To export it: --mode export.")
    return True


def tokenize_data(cfg, task, hooks=()):
    """Tokenize what is not and say what there is, touching no device; the summary."""
    cfg = complete_task(task)["hf"]["update_config"](cfg)
    config.validate(cfg, None)
    print_data_summary(open_data(task, cfg, ("train", "val")), print)
    return {"step": 0, "reason": "data", "exit_code": 0}


# Would it fit?

def plan(cfg, task=TEXT, hooks=()):
    """Print what a run would take, allocating nothing; the summary."""
    run = setup_run(cfg, task) | {"hooks": hooks}
    cost = estimate(run, measure=True)
    print_estimate(run, cost)
    return {"step": 0, "reason": "plan", "exit_code": int(not cost["fits"])} | cost


def estimate(run, measure=False):
    """{"flop": {of what: per device and update}, "fits"} of a run, and what count_programs gives,
    or "fault" in words. measure: as in suggest.
    """
    cfg, mesh, cost = run["cfg"], run["mesh"], {"flop": {}, "memory": {}, "peaks": {}}
    if run["task"]["flops"]:
        flops, recomputed, formula = run["task"]["flops"]({}, cfg)
        n = run["task"]["units_per_step"](cfg) / mesh.size
        cost["flop"] = {f"the model's: {formula}": flops * n, "recomputed by remat": recomputed * n}
    try:
        with steplib.explain_oom(partial(suggest_memory_flags, run, measure)):
            cost |= count_programs(run)
        with steplib.explain_oom(partial(suggest_memory_flags, run | {"counted": cost}, measure)):
            steplib.check_peaks(cost, mesh)
    except ValueError as e:
        cost["fault"] = str(e)
    return cost | {"fits": "fault" not in cost}


def count_programs(run, added=None, options=None):
    """count_memory of the programs that cfg.mode executes. added, options: as there; when `added`
    is given, the task's own programs are not lowered again.
    """
    cfg = run["cfg"]
    training = cfg.mode in ("train", "plan")
    has_validation = bool(cfg.val_data or cfg.val_frac)
    state, lower, _ = steplib.lower_steps(*step_args(run))
    programs = {}
    if training:
        programs["update"] = lower["train_step"]()
    if cfg.mode == "eval" or (training and has_validation):
        programs["evaluation"] = lower["eval_step"]()
    if added is None:
        programs |= task_programs(run, state["params"])
    return steplib.count_memory(state, programs, run["batch"], added, options)


def task_programs(run, params):
    """{"sampling", "export": lowered program} for the programs that cfg.mode executes. An error is
    printed and does not end the plan, as it would not end a run.
    """
    task, cfg = run["task"], run["cfg"]
    wanted = {"sample": ["sampling"], "export": ["export"], "eval": []}.get(
        cfg.mode, ["sampling", "export"])
    try:
        with jax.set_mesh(run["mesh"]):
            found = task["programs"](params, cfg)
    except Exception as e:  # as in a preview
        print0(f"not counted: {', '.join(wanted)}: {type(e).__name__}: {e}")
        return {}
    return {what: found[what] for what in wanted
            if what in found and (what != "sampling" or task["sample"])}


def text_programs(params, cfg):
    """The programs of sample_text and export_hf, lowered. params: shapes with shardings."""
    device, programs = next(iter(jax.tree.leaves(params)[0].sharding.device_set)), {}
    options = steplib.compiler_options(cfg, device)
    if cfg.sample_tokens:
        programs["sampling"] = model.lower_sampling(
            params, cfg, data.make_tokenizer(cfg.tokenizer), options)
    if cfg.export:
        programs["export"] = jax.jit(partial(largest_tensor, cfg=cfg),
                                     compiler_options=options).lower(params)
    return programs


def largest_tensor(params, cfg):
    """What an export adds on a device at most: the weights with LoRA's updates merged in, and the
    largest tensor to be written, whole.
    """
    apart = bool(cfg.lora_rank) and cfg.export_lora == "apart"
    merged, pieces = params if apart else model.merge_lora(params, cfg), model.hf_pieces(cfg, apart)
    changed = {name: x for name, x in merged.items() if x is not params[name]}
    indices = {name: next(iter(tensors)) for name, (tensors, _) in pieces.items()}
    name = max(indices, key=lambda name: math.prod(params[name].shape[len(indices[name]):]))
    tensor = ckpt.take_tensor(merged[name], indices[name], pieces[name][1], cfg.export_dtype)
    return changed, jax.lax.with_sharding_constraint(tensor, jax.sharding.PartitionSpec())


def print_estimate(run, cost):
    print0(run_summary(run) + "; for each device:")
    for what, amount in cost["flop"].items():
        print0(f"  {amount / 1e12:10,.4g} TFLOP  {what}")
    for kind, n_bytes in cost["memory"].items():
        if kind != "total":
            print0(f"  {n_bytes / 2**30:10,.4g} GiB  {kind}")
    for what, n_bytes in cost["peaks"].items():
        name = steplib.PROGRAM_NAMES.get(what, what)
        print0(f"  {n_bytes / 2**30:10,.4g} GiB  in all during {name}")
    limit = steplib.memory_limit(run["mesh"])
    print0(cost.get("fault") or (f"fits in {limit / 2**30:,.4g} GiB" if limit else
                              "whether it fits is not known, as this device's memory is not"))


def suggest_memory_flags(run, measure=True):
    """Advice on how to make a run fit, the flags that cost the least time first. measure: find out
    which flags are enough, by compiling.
    """
    cfg, mesh = run["cfg"], run["mesh"]
    savers = run["task"]["memory_flags"](mesh.shape["sp"], cfg)
    flags = steplib.memory_flags(cfg, mesh, savers)
    if not measure:
        return ", ".join([*flags, steplib.MORE_DEVICES])
    print0("too little memory: compiling what would need less ...")
    if cfg.mode == "sample":
        return f"fewer --n_samples or --sample_tokens, or {steplib.MORE_DEVICES}"

    # The run as it is. A plan has counted it already.
    counted = run.get("counted") or steplib.count_or_none(partial(count_programs, run))
    if not counted:
        counted = {"peaks": {}, "added": {}}
    if "sampling" in counted["peaks"]:
        flags.append("--sample_tokens 0")
    count = partial(peaks_with, run, counted["added"])
    return steplib.suggest_memory_flags(cfg, mesh, flags, counted["peaks"], count)


def peaks_with(run, added, changes):
    """{program: bytes} of the run with some fields changed; {} when it cannot be compiled. added:
    as in count_memory.
    """
    cfg = dataclasses.replace(run["cfg"], **{"epochs": 0.0} | changes)  # steps is worked out
    added = {what: n for what, n in added.items() if what != "sampling" or cfg.sample_tokens}
    devices = [*run["mesh"].devices.flat]
    try:
        changed = setup_run(cfg, run["task"], devices) | {"hooks": run.get("hooks", ())}
    except ValueError:  # the change is not legal
        return {}
    options = steplib.quick_options(devices[0])
    counted = steplib.count_or_none(partial(count_programs, changed, added, options))
    return counted["peaks"] if counted else {}


# Without a loop: evaluate or sample what was saved.

def run_saved(cfg, task, hooks, state=None, params=None):
    """Evaluate, sample or export, as cfg.mode says; the summary. Parameters are, in this order, of
    the given state, the given ones, those of the newest checkpoint of cfg.out_dir, or those of
    cfg.init_from. Of hooks, those that replace the loss have an effect.
    """
    if state is not None:
        check_state(state, ("step", "params"))
    given, meta = params if state is None else state["params"], {}
    root = ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir)
    if given is None:
        meta = ckpt.newest_run_meta(root, "" if cfg.init_from else f"mode {cfg.mode}")[1]
    run = setup_run(cfg, task) | {"hooks": hooks}
    cfg, task = run["cfg"], run["task"]
    config.raise_if_errors(config.architecture_mismatch(meta.get("config", {}), vars(cfg)), root)
    if meta and cfg.init_from != tuple(meta["config"]["init_from"]):
        raise ValueError(f"init_from {' '.join(cfg.init_from)!r}: {cfg.out_dir} holds a run, whose "
                         f"own checkpoint mode {cfg.mode} would use; choose another --out_dir")
    if cfg.mode == "sample" and not task["sample"]:
        raise ValueError("mode sample: this task has no samples")
    if cfg.mode == "eval":
        run |= open_data(task, cfg, ("val",))
        if not run["val"]:
            raise ValueError(f"mode eval: val_frac {cfg.val_frac} leaves nothing; set --val_data")
    like, *_ = steplib.lower_steps(*step_args(run))
    with steplib.explain_oom(partial(suggest_memory_flags, run)):
        cost = count_programs(run)
        steplib.check_peaks(cost, run["mesh"])
    if given is not None:
        step = 0 if state is None else int(state["step"])
        params = place_params(given, like["params"])
    else:
        _, sources = find_parameters(run, meta)
        step, params = ckpt.load_saved(
            cfg.out_dir, root, meta, sources, cfg.init_from, like["params"], print0)
    summary = {"step": step, "reason": cfg.mode, "exit_code": 0}
    if cfg.mode == "eval":
        summary |= evaluate(run, run["val"], cost["programs"]["evaluation"], params)
        print0(ckpt.json_line(summary))
    elif cfg.mode == "export":
        task["hf"]["export"](params, cfg)
        print0(f"exported step {step} to {cfg.export}")
    else:
        summary["texts"] = sample_texts(run, params, 0)
        print_samples(summary["texts"])
    return summary


# Signals.

@contextlib.contextmanager
def catch_signals():
    """A list that gets the name of the first SIGINT, SIGTERM or SIGHUP (which nohup has ignored),
    and an Event to set once there is something to save: before, the signal raises
    KeyboardInterrupt. A second ends the process.

    A thread reads them, since Python runs no handler while the main thread is inside a step. Two
    within a second count as one: `timeout` sends two.
    """
    caught, in_loop, numbers = [], threading.Event(), {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.add(signal.SIGHUP)

    def watch(reader):
        noted = 0.0
        while number := os.read(reader, 1):
            name = signal.Signals(number[0]).name
            if number[0] in numbers and caught and time.monotonic() - noted > 1:
                with ignore_stdout_errors():
                    os.write(2, f"\n{name} again: ending at once\n".encode())
                os._exit(128 + number[0])
            if number[0] not in numbers or caught:
                continue
            noted = time.monotonic()
            caught.append(name)
            if in_loop.is_set():
                with ignore_stdout_errors():
                    os.write(2, f"\n{name}: finishing the step and saving; again to end at once\n"
                             .encode())
                continue
            time.sleep(0.3)  # Python ignores what is raised in a finalizer or callback: raise again
            if not in_loop.is_set() and signal.getsignal(number[0]) is handle:
                signal.pthread_kill(threading.main_thread().ident, number[0])
        os.close(reader)

    def handle(number, frame):
        if not in_loop.is_set():
            raise KeyboardInterrupt(signal.Signals(number).name)

    with contextlib.ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():  # no other may catch signals
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            undo.callback(os.close, writer)
            threading.Thread(target=watch, args=[reader], daemon=True).start()
            old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            undo.callback(signal.set_wakeup_fd, old)
            for number in numbers:
                undo.callback(signal.signal, number, signal.signal(number, handle))
        yield caught, in_loop


def save_only(signals):
    """Whether to save and leave out what else is due. Several processes must first agree on it."""
    return jax.process_count() == 1 and bool(signals)


def poll_stop_requests(run, step, asked, signals, clock):
    """What asks for a stop from outside: {"signal": name or None, "file": whether out_dir/stop is
    there, "second": since the start, "wishes": of hooks}, and the step. Several processes ask each
    other, at multiples of log_every; between, it is as before.
    """
    several = jax.process_count() > 1
    if several and (step % (run["cfg"].log_every or 10) or step == asked["step"]):
        return asked
    wishes, number = run["wishes"], signal.Signals[signals[0]].value if signals else 0
    file = os.path.exists(f"{run['cfg'].out_dir}/stop")
    found = time.perf_counter() - clock["from"], file, number, len(wishes)
    if several:
        found = multihost_utils.process_allgather(np.float32(found)).max(axis=0).tolist()
        also = wishes or [("a hook of another process asked for it", 0)]
        wishes = also if found[3] else []
    second, file, number, _ = found
    return {"step": step, "second": second, "file": bool(file), "wishes": wishes,
            "signal": signal.Signals(int(number)).name if number else None}


def stop_while_waiting(run, step, asked, latest, signals, clock):
    """why_stop while there is no data; several processes, which cannot agree then, go on waiting.
    """
    run["beat"](doing="waiting for data", step=step)
    return jax.process_count() == 1 and stop_reason(
        run, step, poll_stop_requests(run, None, asked, signals, clock), latest)


# Other processes.

def init_distributed(cfg):
    """Meet the other processes, before anything touches a device. Raises ValueError in all of them
    when one has another config than process 0.
    """
    if not cfg.coordinator:
        return
    config.validate(cfg, None)
    steplib.init_distributed(cfg.coordinator, cfg.n_processes, cfg.process_id)
    alike = dataclasses.replace(cfg, process_id=0, coordinator="", cache_dir="", token_cache="")
    mine = json.loads(config.to_json(alike))
    others = ckpt.broadcast_from_main(lambda: mine)
    faults = [f"{name} is {mine[name]!r} in process {jax.process_index()}, {others[name]!r} in 0"
              for name in mine if mine[name] != others[name]]
    if multihost_utils.process_allgather(np.array(bool(faults))).any():
        config.raise_if_errors(faults or ["another process was given other flags than process 0"])


def report_crash(run, observers, error):
    """Tell observers and the other processes of an exception that ends the run."""
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
    if jax.process_count() > 1 and of_jax:
        run["beat"](silent_s=3.0)  # that may be of a process that died: the thread gets time to see
        time.sleep(8)
    words = f"{type(error).__name__}: {error}"
    notify(observers, "error", {"error": words})
    run["beat"](fault=words.splitlines()[0][:500])


def start_heartbeat(cfg, observers):
    """Start the heartbeats of this run, in out_dir/.alive. Observers get a death as an "error".
    """
    token = ckpt.broadcast_from_main(lambda: os.urandom(4).hex())

    def on_death(text):
        notify(observers, "error", {"error": text})

    return steplib.start_heartbeat(Path(cfg.out_dir, ".alive"), token, cfg.peer_timeout_s, on_death)


# The command line.

def cli(argv, hooks=(), task=TEXT, kind=config.Config, main=main):
    """Run a command line; the exit code. A ValueError that the six files raise, and a file that may
    not be read, are the user's fault and told in a sentence; other exceptions keep their traceback.
    """
    with contextlib.suppress(AttributeError):  # a notebook's cannot do it
        sys.stdout.reconfigure(errors="backslashreplace")  # of what a terminal cannot show
    try:
        return main(config.parse(argv, kind), hooks, task)["exit_code"]
    except Exception as e:
        ours = isinstance(e, PermissionError) or (isinstance(e, ValueError) and is_user_error(e))
        if not ours and not jax.distributed.is_initialized():
            raise
        print(f"error: {e}" if ours else traceback.format_exc(), file=sys.stderr, flush=True)
        if jax.distributed.is_initialized():  # its shutdown would wait for the others
            time.sleep(2)  # they end when process 0 does: first let them see why
            os._exit(2 if ours else 1)
        return 2
    except KeyboardInterrupt as e:  # before the first step, or in a mode that trains nothing
        with ignore_stdout_errors():
            print(f"{str(e) or 'SIGINT'}: ended; nothing to save", file=sys.stderr)
        os._exit(0 if e.args else 128 + signal.SIGINT)  # not waiting for a compilation to end


def is_user_error(error):
    """Whether a `raise` statement of the six files raised it, and not, say, `k, v = f()`."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = (__file__, *(module.__file__ for module in (config, model, steplib, data, ckpt)))
    return last.filename in ours and last.line.startswith("raise")


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
