# SPDX-License-Identifier: Apache-2.0
"""The training loop, and everything that needs two of the other files.

Owns what is trained (`TEXT`), the setup of a run, the loop with its actions, observers, the other
modes and the command line. The only file that imports the others. Refuses a task with unknown keys
and a config that cannot run. Invariant: every exit of the loop except a crash logs its reason and,
after the first step and unless save_end is off, saves.
"""
import contextlib
import ctypes
import dataclasses
import errno
import faulthandler
import functools
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import resource
import runpy
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

# For speed alone, up to the imports (LOG.md): skip it on a first reading.
gc.set_threshold(300_000)  # imports and traces make many objects, few of them in cycles
# Before JAX is imported: have glibc keep freed memory.
M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD = -4, -1, -2  # of malloc.h
with contextlib.suppress(OSError, AttributeError):  # another C library
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    libc.mallopt(M_TOP_PAD, 2**28)

# The share of a GPU's memory that JAX takes, unless the user has set it; its own default is 75%.
if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")

import jax
import numpy as np
from tqdm import tqdm

# The five files beside this one have common names: its folder comes first while they are imported.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import ckpt
import config
import data
import model
import step as steplib

del sys.path[0]

# A hook file that imports `train` gets this module, also when it runs as a script.
sys.modules.setdefault("train", sys.modules[__name__])

# On a single CPU device, run programs in this thread, whose memory glibc keeps (LOG.md).
jax.config.update("jax_cpu_enable_async_dispatch", False)

# ---- what is trained


# What is trained is an argument of `main`: a task, a dict of functions. This is the task of this
# trainer, a language model on text. `TASK_DEFAULTS` says what its optional keys are.
TEXT = {
    # (cfg) -> {name: {"shape", "spec", "init"}}, the parameter table. A row may also have
    # "trained", "lr_mult", "decay_mult" and "optimizer".
    "table": model.param_table,
    # (params, batch, cfg) -> ({name: sum}, {name: count}); the mean of "objective" is minimized.
    # With an argument train_keys=None it gets a random key for each row, in training only. With an
    # argument examples=False, if True, it also returns {name: array with an entry for each row}.
    "loss": model.loss_fn,
    # (cfg) -> {name: (shape, dtype, partition spec)} of a batch
    "batch": model.batch_shapes,
    # (parts, cfg) -> {"train": source, "val": {name: source}}; a source: see data.open_text
    "open": data.open_text,
    # Optional keys. A lambda calls a function that is defined further down.
    "init": model.init,
    "resolve": lambda platform, cfg: resolve_text(platform, cfg),
    "validate": config.text_errors,
    "unit": "token",
    "units_per_step": lambda cfg: cfg.batch_size * cfg.seq_len,
    "flops": lambda means, cfg: model.flops_per_token(
        cfg, cfg.seq_len, means.get("attended_keys")),
    "metrics": data.text_metrics,
    "sample": lambda params, key, source, cfg: sample_from_text(params, key, source, cfg),
    "init_names": model.names_to_load,
    "memory_flags": model.memory_savers,
    "activation_bytes": model.activation_bytes,
    "summary": lambda cfg: f"attention {cfg.attention}",
    "update_config": lambda cfg: config_from_hf(cfg),
    "open_weights": lambda path, cfg: open_adapter(path, cfg) or open_hf(path, cfg),
    "export": lambda params, cfg: export_hf(params, cfg),
}


# ---- a run
#
# A run is a namespace. `setup_run` makes it from config and task. `guard` adds observers,
# `train_run` the data, the compiled programs and all else that the loop reads. `run.progress` is
# what the loop changes.


def main(cfg, hooks=(), task=TEXT, state=None, params=None, data=None):
    """Do what cfg.mode says. Return a summary with at least "step", "reason" and "exit_code"; after
    training also "state", "mesh", "checkpoint", the path of that of the last step, and the newest
    metrics, as "val_loss". A run that is already finished gives its metrics, and no state.

    hooks: see `emit`. task: see `TEXT`. state, params: to begin with; neither is changed. A run
    that has a checkpoint refuses them.
    data: rows that replace files: an iterable or an indexable of dicts, such as a datasets.Dataset;
    or one for each split, {"train", and "validation" or "test"}.
    """
    progress = init_progress(time.perf_counter())
    cfg, hooks = prepare(cfg, hooks, data)
    if cfg.mode != "train":
        return run_mode(cfg, task, hooks, progress, state, params)

    print0(f"run {cfg.out_dir}")
    with catch_signals(progress):
        print_changed_flags(cfg)
        run = setup_run(cfg, task, hooks=hooks, progress=progress)
        with guard(run):
            return train_run(run, state, params)


def setup_run(cfg, task=TEXT, devices=None, hooks=(), progress=None):
    """Resolve and check everything that needs neither data nor a compilation. Return the run.

    devices: default jax.devices(). Raises ValueError with all errors that it finds.
    """
    task = complete_task(task)
    devices = devices or jax.devices()
    platform = steplib.platform(devices[0])
    steplib.enable_compilation_cache(cfg.cache_dir)

    # Two configs: as typed, with the sizes of a Hugging Face model that --init_from names; and
    # resolved, with a value for each default but steps from epochs, which need the data.
    typed = task["update_config"](cfg)
    cfg = resolve(typed, task, platform, len(devices))
    steplib.configure_compiler(platform, len(devices), cfg.dtype)

    # The mesh, and the table of parameters with how the mesh shards each of them.
    mesh = steplib.make_mesh(cfg, devices)
    table = model.apply_param_groups(task["table"](cfg), cfg, config.parse_number)
    check_table(table)
    config.raise_if_errors(steplib.check_shapes(table, mesh), "mesh and model do not fit")
    watched = sorted(model.matching("watch", cfg.watch, table))
    if cfg.export:
        task["export"](None, cfg)  # only looks for errors

    return SimpleNamespace(
        typed=typed,
        cfg=dataclasses.replace(cfg, watch=tuple(watched)),
        task=task,
        hooks=hooks,
        mesh=mesh,
        table=table,
        unsaved=model.matching("save_exclude", cfg.save_exclude, table),  # in no checkpoint
        batch=batch_structs(task, cfg, mesh),  # shapes with shardings
        root=ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir),  # of the checkpoints
        is_synchronous=platform == "cpu" and mesh.size == 1,  # a step is done when its call returns
        progress=progress or init_progress(time.perf_counter()),
    )


def train_run(run, state, params):
    """Open the data, compile, make the initial state, and train, unless the run is already
    finished. Return the summary. state, params: those given by the caller, or None.
    """
    timers = run.progress.timers

    # ---- data. Every process must have the same (a folder that grows may list fewer files in one),
    # and all must share the disk of the checkpoints.
    opened = open_data(run.task, run.cfg, ("train", "val"))
    run.train_data, run.val_data = opened["train"], opened["val"]
    run.validation = describe_validation(run, run.val_data)
    ckpt.check_shared(run.root)
    raise_if_unequal({"data": run.train_data["fingerprint"], "val": run.validation})
    run.train_data["n"] = ckpt.broadcast_from_main(lambda: int(run.train_data["n"]))
    check_data_needs(run)
    run.cfg = cfg = set_steps(run.cfg, run.train_data)

    # ---- where the state comes from
    start = find_state(run, state, params, is_training=True)
    resumes = bool(start.meta) and not start.is_branch
    if resumes and is_finished(run, start.meta):
        return summary_of_finished(run, start.meta)

    # Print what will run, and examples of the user's own files at the first launch.
    print0(run_summary(run))
    print_data_summary(opened, print0, bool(cfg.data) and not resumes)

    # ---- step: compile before any array is allocated
    print0(f"compiling the training step, for {cfg.steps} steps ...")
    with timed(timers, "compile"):
        # is_fresh: load_state will call init, without loaded parameters.
        is_fresh = bool(start.missing) and not start.load_from
        run.programs = steplib.compile_steps(steplib.lower_steps(*step_args(run)), is_fresh)
    compile_s = timers["seconds"]["compile"]

    # ---- state
    meta, state = load_state(run, start, run.programs, state, params)
    # Optional: data that grows.
    if "restore" in run.train_data:
        run.train_data["restore"](meta.get("data", {}).get("windows", []))
    state = emit(run, "load", state)
    run.first_step = int(state["step"])
    run.is_branch = start.is_branch

    # Write config.json. It has the dtype that "auto" means here, so that the run can resume on
    # another kind of CPU. Delete the run to overwrite only now that the new one can start.
    typed = dataclasses.replace(run.typed, dtype=cfg.dtype)
    config_json = config.to_json(config.without_launch_fields(typed))
    if resumes and is_main() and not ckpt.read_json(Path(cfg.out_dir, "config.json")):
        print0(f"{cfg.out_dir}/config.json was missing or empty: it is written again")
    ckpt.begin_out_dir(cfg.out_dir, run.root, config_json,
                       overwrite=cfg.resume == "overwrite", log=print0)

    # Continue the timers, the metrics and the events of earlier launches.
    restore_progress(run, meta)
    # Optional: best checkpoint.
    restore_best(run)

    # Log what runs, and on what, and what has changed since the checkpoint.
    description = describe_run(run, start)
    print_changes(meta, description)
    emit(run, "start", {
        "step": run.first_step, "origin": start.origin, "compile_s": compile_s,
        "validation": run.validation, "time_s": time_by_bucket(timers)} | description)
    # Give hooks the state that they have saved.
    if meta:
        emit(run, "resume", {"step": run.first_step, "hooks": meta["hooks"], "root": start.root})

    # ---- loop
    run.intervals = event_intervals(cfg)
    run.stop_conditions = config.parse_stops(cfg)
    # Part of every checkpoint, with the content of config.json.
    run.description = description | {"config_file": json.loads(config_json)}
    return train(run, state)


# ---- the loop


def train(run, state):
    """Train to cfg.steps, or until stop_reason gives a reason. Return the summary."""
    cfg, programs, progress = run.cfg, run.programs, run.progress
    timers = progress.timers
    progress.in_loop = True
    start_bucket(timers, "step")

    step = run.first_step
    batches = data.prefetch(
        make_batch_at(run, run.train_data, pinned=cfg.overfit_batch), run.first_step, cfg.steps,
        stopped=lambda: poll_requests(run, step, is_waiting=True),
        wait_until_idle=lambda: jax.block_until_ready(progress.pending),
        on_late=lambda i: emit(run, "out_of_data", {"step": i}))

    # "Step k" is the state after k updates. One iteration at step k:
    #   1. wait for step k and log it, if something is due, or on a single CPU device
    #   2. do what is due: reload, evaluate, sample, export, and save last
    #   3. stop, if there is a reason
    #   4. get batch k, and dispatch the update that makes step k + 1 of it
    #   5. else wait for step k and log it now, while the device works on step k + 1
    # The last iteration ends at 3.
    try:
        for step in range(run.first_step, max(run.first_step, cfg.steps) + 1):
            due = due_events(run, step)
            progress.requests -= due.keys()

            # If something is due, log the metrics of this step now, which waits for the device.
            if due or run.is_synchronous:
                log_step(run)

            # Epochs that ended with this step. Optional: windows of data that grows.
            for event in ("epoch", "window"):
                if event in due:
                    mark_done(run, event, step)
                    emit(run, event, {"step": step, event: int(completed(run, event, step))})

            # Optional: reload the parameters of dynamic sources.
            if "reload" in due:
                mark_done(run, "reload", step)
                state = reload_params(run, state, step)

            # Evaluate every eval_every steps, after each window, and at the end.
            if "eval" in due and not signal_received(progress):
                is_complete = run_validation(run, state, step)
                if is_complete:
                    mark_done(run, "eval", step)

            # Print samples, for a person to judge the progress.
            if "sample" in due and not signal_received(progress):
                print_preview(run, state["params"], step)
                mark_done(run, "sample", step)

            # Export the parameters for other programs.
            if "export" in due and not signal_received(progress):
                export(run, state["params"], step)
                mark_done(run, "export", step)

            # Save last, so that the checkpoint has all that happened up to this step, and the mark
            # that this save is done.
            for kind in ("weights", "save"):
                if kind in due:
                    mark_done(run, kind, step)
                    save_state(run, state, step, due[kind], kind)

            # Stop before the next batch is consumed, for a reason of stop_reason.
            stop = poll_requests(run, step)
            if stop:
                break

            # Get the next batch. This waits while a growing folder has no new file.
            batch, waited_s = next(batches, (None, 0.0))
            if batch is None:  # a stop was requested during the wait
                break
            begin_epochs(run, step)
            batch = emit(run, "data", batch)
            lr = steplib.replicate(steplib.lr_at(step, cfg), run.mesh)

            # Dispatch the update. The device works on it while this thread continues.
            emit(run, "dispatch", {"step": step + 1})
            with jax.transfer_guard("disallow"):  # a hidden copy would stall the step
                new_state, metrics = programs["train_step"](state, batch, lr)
            state = emit(run, "state", new_state)

            log_step(run)  # of step k
            progress.pending = {"step": step + 1, "metrics": metrics, "waited_s": waited_s}

            # Report a save that has finished.
            if progress.pending_save and progress.pending_save["future"].done():
                wait_for_save(run)

        # Log the last metrics. They may change the reason and the exit code.
        log_step(run)
    except BaseException:  # also sys.exit in a hook
        save_before_error(run, state)
        raise

    stop = stop_reason(run, step) or stop  # by the last metrics
    batches.close()
    # Save, unless this step has. Without save_end, only by a request to stop or to save.
    polled = progress.polled
    is_wanted = cfg.save_end or polled["stop"] or "save" in polled["events"]
    if step and is_wanted and "save" not in due and progress.saved_step != step:
        mark_done(run, "save", step)
        save_state(run, state, step, "stop")
    return end_run(run, state, step, stop)


def due_events(run, step):
    """{event: why} of the events that are due at this step and were not done at it. why: the unit
    of the interval that passed ("step", "epoch", "window", "second", or "end" after the last step),
    "request", or "branch" for the first state of a branch.
    """
    progress, due = run.progress, {}
    if step == 0:
        return due
    for event, intervals in run.intervals.items():
        if progress.last_done.get(event) == step:  # by the launch before
            continue
        if event in progress.polled["events"]:
            due[event] = "request"
        for unit, n in intervals.items():
            if unit == "end":
                is_due = step >= run.cfg.steps
            elif unit == "second":
                last_s = progress.last_done_s.get(event, 0.0)
                # Only where nothing else makes it due: a checkpoint by time alone does not last.
                is_due = event not in due and seconds_of_run(progress) - last_s >= n
            else:  # this step completes a multiple of n
                is_due = has_passed(run, unit, n, step)
            if is_due:
                due[event] = unit
    # Optional: branches of a run. A branch saves its first state, which the other run may delete.
    if run.is_branch and step == run.first_step:
        due["save"] = "branch"
    return due


def log_step(run):
    """Wait for the pending metrics, and log them: the event "step", at a log point also "log", with
    the means since the last log row.
    """
    progress = run.progress
    pending, progress.pending = progress.pending, None
    if pending is None:
        return
    cfg, timers = run.cfg, progress.timers
    step, metrics = pending["step"], pending["metrics"]

    # Wait for the step. The seconds in which the loop waited for its data are no part of it.
    watch = metrics.pop("watch", {})
    values = jax.tree.map(np.asarray, metrics)
    finite = bool(values.pop("finite"))
    timers["seconds"]["step"] -= pending["waited_s"]
    timers["seconds"]["data"] += pending["waited_s"]

    sums = add_sums(progress.since_log, values.pop("sums", {}))  # a hook's step may give none
    row = emit(run, "step", {"step": step} | numbers(values | steplib.means(sums)))
    is_logged = steplib.is_log_point(step, cfg) or not finite

    # The first step of a launch is slower: no rate of a later row counts it.
    if step == run.first_step + 1 and not is_logged:
        begin_rates(timers, step)

    # A loss or gradient that is not finite.
    if not finite:
        if progress.is_finite:  # the first one
            emit(run, "nonfinite", {"step": step, "loss": row["objective"]})
        progress.is_finite = False
        if cfg.on_nonfinite == "raise":
            raise FloatingPointError(f"step {step}: the loss or a gradient is not finite: {row}")

    if not is_logged:
        return

    # Log the means since the last log row, with speeds.
    with timed(timers, "other"):
        since_log = values | steplib.means(progress.since_log)
        progress.since_log.clear()
        row |= numbers(since_log) | numbers(run.task["metrics"](since_log, run.train_data))
        speeds = throughput(run, step, row)
        taken = sorted(speeds.keys() & row.keys())
        assert not taken, f"metrics {', '.join(taken)}: are names of a log row; rename them"
        if watch:
            row["watch"] = jax.tree.map(np.ndarray.tolist, jax.device_get(watch))
        row = emit(run, "log", row | speeds)
    for name, value in numbers(row).items():
        if name not in speeds:
            progress.last_metrics[name] = value
    progress.last_metrics["loss_step"] = step


def save_state(run, state, step, why, kind="save"):
    """Start to write a checkpoint, once the previous one is committed. why: of due_events, "stop",
    "error", or "best" for an evaluation. kind: "save", or "weights" or "best" for the parameters.
    """
    cfg, progress = run.cfg, run.progress
    root = ckpt.roots(run.root)[kind]
    run.check_lock()  # raises if another process has taken over the bucket

    # Hooks may skip it, and add their own state: values to its meta.json, and arrays.
    planned = {"step": step, "kind": kind, "why": why,
               "path": ckpt.step_path(root, step), "hooks": {}, "arrays": {}}
    planned = emit_before(run, "save", planned)
    if planned["skip"]:
        return

    with timed(progress.timers, "save"):
        # Wait for the previous save: the new meta.json notes that it is done.
        wait_for_save(run)

        # Compute a digest of the state, so that two runs can be compared by a line of text.
        digest = steplib.digest(run.programs["digest"](state))
        if kind != "save":  # the parameters alone
            digest = {"params": digest["params"]}
            state = {"params": state["params"]}

        # The arrays, without the parameters that save_exclude names and their moments.
        arrays, _ = ckpt.flatten(state | {"hooks": planned["arrays"]})
        unsaved = ckpt.paths_of(run.unsaved, arrays)
        tree = {path: x for path, x in arrays.items() if path not in unsaved}

        # Where the run stands.
        meta = run.description | {
            "data": data_position(run, step),
            "digest": digest,
            "hooks": planned["hooks"],
            "progress": describe_progress(run),
        }
        # Kept: of "save" as many as the config says, of "best" the newest, of "weights" all.
        keep = {"save": (cfg.max_to_keep, cfg.keep_period), "best": (1, 0), "weights": (0, 0)}
        max_to_keep, keep_period = keep[kind]
        future = ckpt.save(root, step, tree, meta, max_to_keep, keep_period, print0,
                           passing=why == "second" and kind == "save")
        progress.pending_save = {"kind": kind, "step": step, "future": future}
        if kind == "save":
            progress.saved_step = step
        emit(run, "save", {"step": step, "kind": kind, "why": why, "digest": digest})


def stop_reason(run, step):
    """The one place that decides whether to stop before the next batch: (reason, exit code), or
    None to continue.
    """
    cfg, metrics, polled = run.cfg, run.progress.last_metrics, run.progress.polled

    # A loss or gradient that is not finite.
    if not run.progress.is_finite and cfg.on_nonfinite == "stop":
        return f"a loss or gradient is not finite near step {step}; that update was skipped", 1

    # The conditions of --stop. A loss above its bound is a failure.
    values = metrics | {
        "step": step,
        "new_steps": step - run.first_step,
        "second": polled["elapsed_s"],
    }
    for condition in run.stop_conditions:
        name, sign, bound = condition["name"], condition["sign"], condition["bound"]
        value = values.get(name)
        if value is not None and config.COMPARE[sign](value, bound):
            reason = f"{name} {value:g} {config.STOP_WORDS[sign]} {bound:g}"
            return reason, int(sign == ">" and "loss" in name)
        measured_at = metrics.get("val_step" if name.startswith("val_") else "loss_step", 0)
        if value is None and measured_at > run.first_step:
            return (f"--stop {' '.join(cfg.stop)}: unknown metric {name} "
                    f"({config.did_you_mean(name, sorted(metrics))})"), 2

    # A signal, the file out_dir/stop, or a hook.
    if polled["stop"]:
        return polled["stop"], 0

    # The last step.
    if step >= cfg.steps:
        return f"all {cfg.steps} steps are done", 0
    return None


# ---- hooks and observers


def emit(run, event, value):
    """Call hook(event, value) of every hook. A result that is not None replaces the value. Return
    the value. Console, log and plot are hooks too, see `harmless`.

    The value of "loss_fn", "optimizer" and "train_step" is what will be compiled; of "load" the
    first state (in mode eval its step and parameters), of "state" the state after each update; of
    "data" and "val_data" a batch, of "eval_batch" a dict with its "sums". The value of every other
    event is a row with at least "step". In a row hooks may ask for {"stop": reason} and {"request":
    a list of events}; tests/GUIDE.md has them.
    """
    is_row = event not in VALUE_EVENTS
    if is_row:
        restart_watchdog(run.cfg)
    requested = set()
    for hook in run.hooks:
        value = call_hook(hook, event, value)
        if is_row and value.get("request"):
            requested.update(value["request"])
            value = value | {"request": sorted(requested)}  # those of all hooks
    assert requested <= {*config.EVENTS}, f"hooks request {requested}: events are {config.EVENTS}"

    # The first reason to stop stays; later rows request neither events nor a stop.
    progress = run.progress
    if is_row and not progress.hook_stop:
        progress.requests |= requested
        progress.hook_stop = str(value.get("stop") or "")
    return value


# ---- supporting
#
# Most runs use what follows, but the names say enough at the call for a first reading: the start
# of a run, tasks, data and steps, where a state comes from, progress in checkpoints, evaluation and
# end, events, intervals, actions of the loop, sums of metrics, where the time goes, requests,
# signals, several processes, printing, observers, the console, samples of text, what a run reports,
# command line.


# ---- the start of a run


def prepare(cfg, hooks, rows=None):
    """(cfg with its paths and names, hooks with those of cfg.hooks), once the processes are
    connected. rows: the `data` of main.
    """
    cfg = config.resolve_paths(cfg)
    # Connect to the other processes. JAX then handles SIGTERM; our handler has to come later.
    connect_processes(cfg)
    # Optional: rows from Python. The run is named after their file.
    if rows is not None:
        cfg = write_rows(cfg, rows)
    if not cfg.out_dir:  # from Python: the command line has chosen one
        cfg = dataclasses.replace(cfg, out_dir=config.derive_out_dir(cfg))
    hooks = (*hooks, *load_functions("hooks", cfg.hooks))
    return cfg, hooks


def resolve(cfg, task, platform, n_devices):
    """cfg with a value for each default. Raises ValueError with all its errors."""
    # Optional: branches of a run. Without that run, its flags would be missing too.
    if cfg.branch_from and not os.path.exists(f"{cfg.out_dir}/config.json"):
        find_branch(cfg)
    choices = {
        "optimizer": steplib.OPTIMIZERS,
        "optimizers": steplib.OPTIMIZERS,
        "schedule": steplib.SCHEDULES,
        "track": TRACKERS,
    }
    config.validate(cfg, n_devices, choices, task["validate"])
    cfg = dataclasses.replace(cfg, dtype=steplib.choose_dtype(cfg.dtype, platform))
    return task["resolve"](platform, cfg)


@contextlib.contextmanager
def guard(run):
    """Lock the folders of a run, give it observers, and explain errors of memory and processes."""
    with ckpt.lock_folders(run.cfg.out_dir, run.root, print0) as run.check_lock:
        observers = make_observers(run.cfg)
        run.hooks = (*run.hooks, *observers)
        try:
            with (steplib.explain_oom(partial(memory_advice, run)),
                  explain_dead_process(run.root)):
                yield
        except BaseException as e:
            for observe in observers:
                observe("error", {"error": f"{type(e).__name__}: {e}"})
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
            # The folders stay locked until a pending save is written. With several processes one
            # that has died would never finish it.
            pending = run.progress.pending_save
            if jax.process_count() == 1 and pending:
                pending["future"].exception()


def init_progress(launched):
    """Everything that changes during a run. launched: time.perf_counter() at launch."""
    return SimpleNamespace(
        last_done={},  # {event: step} when each event last happened
        last_done_s={},  # {event: seconds of all launches}
        earlier_s=0.0,  # seconds of earlier launches
        last_metrics={},  # {metric: newest value}; and the best one, "best_val_loss"
        is_finite=True,  # whether all losses and gradients were finite
        pending=None,  # of the newest step: {"step", "metrics", "waited_s"}
        since_log={},  # since the last log row: {name: (sum, count)}
        # Seconds by bucket over all launches, the bucket that is charged, and when it was last
        # charged. begin_rates adds "logged_step" and "logged".
        timers={"launched": launched, "seconds": dict.fromkeys(TIME_BUCKETS, 0.0),
                "bucket": "start", "since": launched},
        in_loop=False,  # whether a signal ends the loop, and raises no KeyboardInterrupt
        signal=None,  # name of the first signal
        hook_stop="",  # the first reason of a hook to stop
        requests=set(),  # events of config.EVENTS that are requested, until they are due
        # Requests of all processes: seconds since the launch, a reason, events for the next step
        polled={"elapsed_s": 0.0, "stop": None, "events": []},
        saved_step=None,  # step of the newest save
        pending_save=None,  # what is being written: {"kind", "step", "future"}
        save_errors={},  # {kind: error} of the newest save or export, if it failed
    )


def changed_run(run, **changes):
    """A copy of a run with other fields."""
    return SimpleNamespace(**vars(run) | changes)


# ---- tasks


def no_export(params, cfg):
    raise ValueError(f"export {cfg.export!r}: this task has no export; leave it out")


REQUIRED_TASK_KEYS = ("table", "loss", "batch", "open")

# What a task does without an optional key of `TEXT`.
TASK_DEFAULTS = {
    # (key, cfg) -> {name: array}, the initial parameters. None: "init" of each row of the table
    "init": None,
    # (platform, cfg) -> cfg with all defaults resolved
    "resolve": lambda platform, cfg: cfg,
    # ({axis: size}, cfg) -> errors in the config, as texts
    "validate": lambda sizes, cfg: [],
    # The unit of speeds, and how many of it a step has: (cfg) -> number
    "unit": "example",
    "units_per_step": lambda cfg: cfg.batch_size,
    # (means of a batch or {}, cfg) -> (FLOPs per unit, their formula)
    "flops": None,
    # ({name: mean}, source) -> {name: value}, more metrics of training and evaluation
    "metrics": lambda means, source: {},
    # (params, key, source, cfg) -> [{"prompt": a text, "text": what the model wrote after it}],
    # each perhaps with "reward", a number. source: the validation data, or None
    "sample": None,
    # (table, saved names, cfg) -> names that a source of init_from has to provide
    "init_names": lambda table, saved, cfg: set(table),
    # (size of the mesh axis sp, cfg) -> flags that would lower the memory of the model
    "memory_flags": lambda sp, cfg: [],
    # (cfg, {mesh axis: size}, whether on GPUs) -> estimated bytes on a device beside the state
    "activation_bytes": None,
    # (cfg) -> a text for the summary of the run
    "summary": lambda cfg: "",
    # Weights in other formats in init_from. (cfg) -> cfg with their shape and tokenizer
    "update_config": lambda cfg: cfg,
    # (path, cfg) -> {"names": {name: shape or None}, "read": {name: like} -> {name: array}} of
    # weights in another format, None where path has none
    "open_weights": lambda path, cfg: None,
    # (params, cfg): write cfg.export; with params None only look for errors
    "export": no_export,
}


def resolve_text(platform, cfg):
    """cfg with the vocabulary size, all other sizes and the attention kernel resolved."""
    vocab_size = cfg.vocab_size or data.make_cfg_tokenizer(cfg)["vocab_size"]
    # Optional: prompts of samples. Find their errors now.
    if cfg.chat or cfg.prompts:
        data.sample_prompts(cfg, data.make_cfg_tokenizer(cfg))
    cfg = config.derive_text(dataclasses.replace(cfg, vocab_size=vocab_size))
    return dataclasses.replace(cfg, attention=model.choose_attention(cfg, platform))


def complete_task(task):
    """The task with its defaults. Raises ValueError for unknown and missing keys."""
    config.raise_if_errors(config.key_errors("", task, TEXT, REQUIRED_TASK_KEYS), "task")
    task = TASK_DEFAULTS | task
    if task["init"] is None:
        task["init"] = lambda key, cfg: model.init(key, cfg, task["table"](cfg))
    return task


def check_table(table):
    """Raise ValueError when a row of the parameter table has unknown or missing keys, or no
    parameter is trained.
    """
    required = ("shape", "spec", "init")
    known = (*required, "trained", "lr_mult", "decay_mult", "optimizer")
    errors = []
    for name, row in table.items():
        errors += config.key_errors(f"table: {name}: ", row, known, required)
    if not errors and not any(row.get("trained", True) for row in table.values()):
        errors.append("table: no parameter is trained; freeze fewer")
    config.raise_if_errors(errors, "task")


# ---- data and steps


def open_data(task, cfg, parts):
    """{"train", "val"}: what the task's "open" returns."""
    opened = task["open"](parts, cfg)
    config.raise_if_errors(config.key_errors("open: ", opened, ("train", "val")), "task")
    return {"train": None, "val": {}} | opened


def check_data_needs(run):
    """Raise ValueError for a field that needs data which the run does not have."""
    cfg, errors = run.cfg, []
    needed = [name for name in (*cfg.stop, cfg.keep_best) if name.startswith("val_")]
    if needed and not run.val_data:
        errors.append(f"stop or keep_best {needed[0]}: the run has no validation data; set "
                      "--val_data or --val_frac")
    # Optional: training data in windows, as of tests/recipes/windows.py.
    for event in config.EVENTS:
        interval = str(getattr(cfg, f"{event}_every"))
        if "window" in interval and "windows" not in run.train_data:
            errors.append(f"{event}_every {interval}: needs data in windows: "
                          "tests/recipes/windows.py")
    config.raise_if_errors(errors)


def set_steps(cfg, train_data):
    """cfg with the number of steps that cfg.epochs means, if it is set."""
    if not cfg.epochs:
        return cfg
    # Rounded, since 1.1 epochs of 100 by 10 are 11 steps, and 11.000000000000002 in floating point.
    steps = round(cfg.epochs * train_data["n"] / cfg.batch_size, 6)
    # With windows, the last few examples wait for the next file.
    steps = math.floor(steps) if "windows" in train_data else math.ceil(steps)
    return dataclasses.replace(cfg, steps=min(max(1, steps), 2**31 - 1))


def batch_structs(task, cfg, mesh):
    """{name: shape with dtype and sharding} of a batch of the task."""
    structs = {}
    for name, (shape, dtype, spec) in task["batch"](cfg).items():
        sharding = jax.NamedSharding(mesh, spec)
        structs[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return structs


def evaluation_of(run):
    """{"cfg", "batch"} of an evaluation: the config, and shapes with shardings."""
    # Optional: evaluation batches of another size.
    cfg = config.evaluation_config(run.cfg)
    return {"cfg": cfg, "batch": batch_structs(run.task, cfg, run.mesh)}


def make_batch_at(run, source, pinned=False):
    """index -> batch of global arrays, of which each process builds its own rows. Raises ValueError
    for a batch unlike the task's "batch", or with ids beyond a table. pinned: always batch 0.
    """
    shardings = {name: x.sharding for name, x in run.batch.items()}
    first = next(iter(run.batch.values()))
    rows = data.local_rows(first.sharding, first.shape)
    expected = {name: ((len(rows), *x.shape[1:]), x.dtype) for name, x in run.batch.items()}

    def batch_at(index):
        batch = source["batch"](0 if pinned else index, rows)
        if batch is None:
            return None
        found = {name: (np.shape(x), np.asarray(x).dtype) for name, x in batch.items()}
        if found != expected:
            raise ValueError(f"batch {index} is {found}, must be {expected}")
        return data.to_device(batch, shardings, run.cfg.batch_size)

    return batch_at


def step_args(run):
    """The arguments of steplib.lower_steps."""
    cfg, task = run.cfg, run.task

    def override(name, value):
        value = emit(run, name, value)
        is_dropped = bool(cfg.dropout) and cfg.mode in ("train", "plan")
        if name == "loss_fn" and is_dropped and not steplib.takes(value, "train_keys"):
            raise ValueError(f"dropout {cfg.dropout}: the loss takes no train_keys, so it would "
                             "drop nothing; set it to 0, or give the loss the argument "
                             "train_keys=None and pass it on")
        return value

    # Optional: values per example.
    loss = partial(task["loss"], examples=True) if cfg.examples_file else task["loss"]
    return (cfg, run.mesh, run.table, loss, task["init"], run.batch, override,
            evaluation_of(run))


def data_position(run, step):
    """Where a run stands in its data, for a checkpoint."""
    train_data = run.train_data
    epoch, sequence = divmod(step * run.cfg.batch_size, train_data["n"])
    position = {"fingerprint": train_data["fingerprint"], "epoch": epoch, "sequence": sequence}
    if "windows" in train_data:
        position["windows"] = train_data["windows"](step)
    return position


# ---- where a state comes from


def find_state(run, state=None, params=None, is_training=False):
    """Decide where the state comes from, for load_state: the first of these that exists. In
    training 1 and 2 are refused where 3 exists.

    1. the state of the caller
    2. the parameters of the caller, with new optimizer moments
    3. the newest checkpoint of this run; without training the one that cfg.checkpoint names
    4. the checkpoint of another run, from --branch_from
    5. parameters from --init_from
    6. random parameters, in training

    Returns a namespace: origin, a text; meta: of the checkpoint, or {}; root, step: of the
    checkpoint, step None for the newest intact one; is_branch: whether it is another run's;
    missing: parameters that it lacks; load_from: sources to load them from; sources: texts that
    name these; run_id: of this run.

    Raises ValueError when a checkpoint does not fit the run, see config.RESUMABLE_FIELDS.
    """
    cfg, is_given = run.cfg, state is not None or params is not None
    start = SimpleNamespace(root=run.root, step=None, meta={}, is_branch=False, missing=set(),
                            load_from=[], sources=[], origin="a fresh initialization")
    if is_training:
        start.meta = ckpt.find_start(cfg.out_dir, run.root, cfg.resume, is_given)
    start.run_id = start.meta.get("run_id") or os.urandom(4).hex()
    if is_given:
        start.origin = "the given " + ("parameters" if state is None else "state")
        return start

    resumes = bool(start.meta)
    if not is_training:
        choose_checkpoint(run, start)
    elif resumes:
        start.origin = "its own checkpoint"
        config.check_resumable(
            start.meta["config"], cfg, start.meta.get("mesh", {}), dict(run.mesh.shape))
    # Optional: branches of a run.
    elif cfg.branch_from:
        vars(start).update(find_branch(cfg))

    # The parameters that the checkpoint lacks: all of them, without one.
    excluded = start.meta["config"].get("save_exclude", ()) if start.meta else ("*",)
    start.missing = model.matching("save_exclude", excluded, run.table)
    if start.missing:
        start.load_from = open_sources(run, start.missing)
        if start.load_from or start.meta:
            ckpt.log_sources(start.load_from, start.missing, run.table, print0)
    start.sources = [source.get("summary", source["path"]) for source in start.load_from]
    if start.sources and not start.meta:
        start.origin = ", ".join(start.sources)
    start.sources = start.sources or start.meta.get("sources", [])

    # A run resumes on the same data, and from the same sources if it needs them.
    if resumes:
        saved = {"data": start.meta["data"]["fingerprint"], "init_from": start.meta.get("sources")}
        current = {"data": run.train_data["fingerprint"], "init_from": start.sources}
        errors = config.refused_changes(saved, current, cfg.allow_change)
        config.raise_if_errors(errors, f"{cfg.out_dir} holds a run from other data or parameters")
    elif not is_training:
        check_checkpoint(run, start)
    return start


def choose_checkpoint(run, start):
    """Put the checkpoint of cfg.out_dir that cfg.checkpoint names into start, see find_state. There
    may be none if cfg.init_from gives the parameters.
    """
    cfg = run.cfg
    if cfg.checkpoint == "latest":
        needed_for = "" if cfg.init_from else f"mode {cfg.mode}"
        start.meta = ckpt.newest_meta(run.root, needed_for)
    else:
        start.root, start.meta = ckpt.find_checkpoint(run.root, cfg.checkpoint)
        start.step = start.meta["step"]
    ckpt.check_is_of_run(start.root, start.meta, ["config"])


def check_checkpoint(run, start):
    """Print the result of choose_checkpoint. Raise ValueError when it and init_from do not give all
    parameters of this model.
    """
    cfg, meta = run.cfg, start.meta
    errors = config.architecture_mismatch(meta.get("config", {}), vars(cfg))
    if meta:
        print0(f"run {cfg.out_dir}, checkpoint {cfg.checkpoint}, of step {meta['step']}")
        if cfg.init_from != tuple(meta["config"].get("init_from", cfg.init_from)):
            errors.append("init_from is not used, as the run has a checkpoint; use another "
                          "--out_dir")
    taken = (source["take"].values() for source in start.load_from)
    for name in sorted(start.missing.difference(*taken)):
        errors.append(f"no source in init_from has {name}")
    config.raise_if_errors(errors, f"mode {cfg.mode}, {start.root}")


def load_state(run, start, programs, state=None, params=None):
    """(meta of its checkpoint or {}, the state) that find_state has found. programs: "state" and
    "init" of lower_steps; where that state has only parameters, so has the result.
    """
    cfg, like, init = run.cfg, programs["state"], programs["init"]
    key = jax.random.key(cfg.seed)
    if state is not None:
        shardings = jax.tree.map(lambda x: x.sharding, like)
        given = {name: state[name] for name in like}
        return {}, jax.device_put(given, shardings, may_alias=False)
    if params is not None:
        return {}, init(key, params=place_params(params, like["params"]))

    # The parameters that no checkpoint of this run has.
    initial = {}
    if start.missing:
        loaded = ckpt.load_parameters(start.load_from, like["params"])
        initial = init(key, params=loaded)
    if not start.meta:
        return {}, initial
    # The checkpoint, with the arrays that it lacks: parameters, and the scale of a new float16.
    if "scale" in like:
        shardings = jax.tree.map(lambda x: x.sharding, like["scale"])
        initial |= {"scale": jax.device_put(steplib.init_loss_scale(), shardings)}
    step, state = ckpt.restore_run(start.root, start.meta, like, initial, start.missing, start.step,
                                   "state" in cfg.allow_change, print0)
    return ckpt.read_meta(start.root, step), state  # an older one, where the newest is corrupted


def open_sources(run, wanted=None):
    """The sources of cfg.init_from for the task; see ckpt.open_sources."""
    cfg, task = run.cfg, run.task
    return ckpt.open_sources(
        cfg.init_from, {name: row["shape"] for name, row in run.table.items()},
        open_weights=lambda path: task["open_weights"](path, cfg),
        expected_names=lambda saved: task["init_names"](run.table, saved, cfg),
        find_mismatches=lambda meta: config.architecture_mismatch(
            meta.get("config", {}), vars(cfg)),
        select=partial(model.matching, "init_from"), wanted=wanted)


def place_params(params, like):
    """Copies of given parameters {name: array}, in the dtypes and shardings of `like`. Raises
    ValueError for names, shapes and dtypes that the model does not have.
    """
    given = {name: x.shape for name, x in params.items()
             if jax.numpy.issubdtype(x.dtype, np.floating)}
    expected = {name: x.shape for name, x in like.items()}
    if given != expected:
        wrong = sorted(given.items() ^ expected.items())
        raise ValueError(f"the given parameters: must be floats with the names and shapes of the "
                         f"model; not so: {wrong}")
    return {name: jax.device_put(params[name].astype(x.dtype), x.sharding, may_alias=False)
            for name, x in like.items()}


# ---- progress in checkpoints


def describe_progress(run):
    """The progress in a checkpoint, for restore_progress."""
    progress = run.progress
    return {
        "last_done": progress.last_done,
        "last_done_s": progress.last_done_s,
        "requests": sorted(progress.requests),
        "last_metrics": progress.last_metrics,
        "since_log": progress.since_log,
        "validation": run.validation,
        "time_s": time_by_bucket(progress.timers),
    }


def restore_progress(run, meta):
    """Continue the progress of earlier launches. meta: of the checkpoint that the run begins with,
    or {}.
    """
    progress = run.progress
    if meta:
        saved = meta["progress"]
        progress.saved_step = run.first_step
        progress.last_done = saved["last_done"]
        progress.last_done_s = saved.get("last_done_s", {})  # earlier versions wrote none
        progress.earlier_s = sum(saved["time_s"].values())
        progress.requests.update(saved["requests"])
        # What was measured on other validation data no longer counts.
        if saved["validation"] == run.validation:
            progress.last_metrics = saved["last_metrics"]
        else:
            print0("the validation data or its size has changed: the best loss begins again")
            progress.last_done.pop("eval", None)
            progress.last_done_s.pop("eval", None)
        for bucket, seconds in saved["time_s"].items():
            progress.timers["seconds"][bucket] += seconds
        for name, (total, count) in saved["since_log"].items():
            progress.since_log[name] = (np.float64(total), count)
    begin_rates(progress.timers, run.first_step)


def mark_done(run, event, step):
    """Note that an event is done at this step. A checkpoint of this step without the note no longer
    counts as saved.
    """
    progress = run.progress
    progress.last_done[event] = step
    progress.last_done_s[event] = seconds_of_run(progress)
    progress.saved_step = None


def seconds_of_run(progress):
    """Seconds of all launches up to the newest poll_requests, equal in all processes."""
    return progress.earlier_s + progress.polled["elapsed_s"]


def is_finished(run, meta):
    """Whether nothing is left to do after the checkpoint with this meta. Other validation data is
    evaluated.
    """
    last_done, n_steps = meta["progress"]["last_done"], run.cfg.steps
    at_end = [event for event, intervals in event_intervals(run.cfg).items() if "end" in intervals]
    is_done = all(last_done.get(event) == n_steps for event in at_end)
    is_evaluated = meta["progress"]["validation"] == run.validation
    return meta["step"] > n_steps or (is_done and is_evaluated)


def summary_of_finished(run, meta):
    """The summary of a run that is already finished: its newest metrics, and its checkpoint."""
    step = meta["step"]
    print0(f"{run.cfg.out_dir} is finished, at step {step}. To train further: more --steps or "
           "--epochs; from an earlier step: --branch_from DIR@STEP. To start again: --resume "
           "overwrite, or another --out_dir. To export it: --mode export --export DIR")
    return meta["progress"]["last_metrics"] | {
        "step": step, "exit_code": 0, "reason": "already finished",
        "checkpoint": ckpt.step_path(run.root, step)}


# ---- evaluation and end


def run_validation(run, state, step):
    """Evaluate the validation data, and log it. Return False if a stop has ended it before that."""
    progress = run.progress
    if not run.val_data:
        return True
    timers, last_metrics = progress.timers, progress.last_metrics
    with timed(timers, "data"):
        val_data = val_data_at(run, step)
    if not val_data:
        return False
    planned = {"step": step, "n_batches": sum(eval_batches(run, val_data).values()),
               "params": state["params"]}
    planned = emit_before(run, "eval", planned)
    if planned["skip"]:
        return True
    with timed(timers, "compile"):
        run.programs["compile_eval"]()

    def stopped():  # called once per batch
        restart_watchdog(run.cfg)
        return signal_received(progress)

    with timed(timers, "eval"):
        metrics = evaluate(run, val_data, run.programs["eval_step"], planned["params"], stopped)
        if not metrics:
            return False
        row = emit(run, "eval", {"step": step} | metrics)
    values = numbers(row)
    for name, value in values.items():
        if name != "step" and not name.startswith("eval_"):
            last_metrics[name] = value
    last_metrics["val_step"] = step
    is_best = note_best(run.cfg, step, last_metrics, values)
    # Optional: best checkpoint.
    if is_best and run.cfg.keep_best:
        save_state(run, state, step, "best", kind="best")
    return True


def note_best(cfg, step, last_metrics, values):
    """Whether an evaluation has the best value so far of the metric cfg.keep_best, by default
    val_loss; note it in last_metrics. values: of the evaluation.
    """
    metric = config.parse_best(cfg.keep_best or "val_loss")
    name = metric["name"]
    # Hooks may add metrics, which may differ between processes.
    value = ckpt.broadcast_from_main(lambda: values.get(name))
    if cfg.keep_best and value is None:
        raise ValueError(f"keep_best {name}: evaluations have no such metric "
                         f"({config.did_you_mean(name, sorted(values))})")
    if value is None or not math.isfinite(value):
        return False
    # The earlier one of equal values is the best.
    best = last_metrics.get(f"best_{name}")
    if best is not None and not metric["is_better"](value, best):
        return False
    last_metrics |= {f"best_{name}": value, "best_val_step": step}
    return True


def eval_batches(run, val_data):
    """{name of a validation set: number of batches} of an evaluation."""
    cfg = evaluation_of(run)["cfg"]
    return {name: data.n_eval_batches(source["n"], cfg.batch_size, cfg.eval_batches)
            for name, source in val_data.items()}


def describe_validation(run, val_data):
    """The data of an evaluation, {name of a set: [fingerprint, number of examples]}; {} for data
    that changes from step to step.
    """
    if "source_at" in val_data.get("", {}):
        return {}
    batch_size = evaluation_of(run)["cfg"].batch_size
    return {name: [val_data[name].get("fingerprint"), min(n * batch_size, val_data[name]["n"])]
            for name, n in eval_batches(run, val_data).items()}


def evaluate(run, val_data, eval_step, params, stopped=lambda: False):
    """{"val_METRIC"}: the means of the loss's sums over all validation sets, and the metrics of the
    task; for sets with names also "val_METRIC/NAME"; with duration and speed. {} once stopped().
    """
    began = time.perf_counter()
    eval_run = changed_run(run, **evaluation_of(run))
    cfg, task = eval_run.cfg, run.task
    n_batches = eval_batches(run, val_data)

    def eval_with_hooks(name, params, batch):
        bar.update()
        row = {"set": name, "params": params, "batch": batch, "sums": eval_step(params, batch)}
        # Optional: values per example.
        if cfg.examples_file:
            row["sums"], row["examples"] = row["sums"]
        return emit(run, "eval_batch", row)["sums"]

    # The sums of each set.
    sums_of = {}
    with eval_bar(sum(n_batches.values())) as bar:
        for name, source in val_data.items():
            sized = source | {"batch": partial(source["batch"], batch_size=cfg.batch_size)}
            prefetched = data.prefetch(make_batch_at(eval_run, sized), 0, n_batches[name])
            batches = (emit(run, "val_data", batch) for batch, _ in prefetched)
            sums_of[name] = steplib.evaluate(
                partial(eval_with_hooks, name), params, batches, stopped)
            if sums_of[name] is None:
                return {}

    # The metrics of each set, and of all sets together under the name "".
    sums_of[""] = jax.tree.map(lambda *values: sum(values), *sums_of.values())
    row = {}
    for name, sums in sums_of.items():
        values = steplib.means(sums)
        values |= task["metrics"](values, val_data.get(name, {}))
        values["n_labels"] = int(values["n_labels"])
        suffix = f"/{name}" if name else ""
        row |= {f"val_{metric}{suffix}": x for metric, x in numbers(values).items()}

    # Duration and speed.
    n_units = sum(n_batches.values()) * task["units_per_step"](cfg)
    row["eval_s"] = time.perf_counter() - began
    units_per_s = n_units / max(row["eval_s"], 1e-9)
    row[f"eval_{task['unit']}s_per_s"] = units_per_s
    if task["flops"]:  # forward is a third of the training of all weights
        means = steplib.means(sums_of[""])
        flops, _ = task["flops"](means, dataclasses.replace(cfg, freeze=()))
        row["eval_tflops_per_device"] = flops / 3 * units_per_s / jax.device_count() / 1e12
    return row


def end_run(run, state, step, stop):
    """Log "stop", and "end" with the newest metrics. Return the summary. stop: of stop_reason."""
    progress = run.progress
    cfg, timers = run.cfg, progress.timers
    with timed(timers, "save"):
        wait_for_save(run)
    start_bucket(timers, "other")

    # The reason, with the errors of the last save and export.
    reason, exit_code = stop
    errors = progress.save_errors
    reason = "; ".join([reason, *errors.values()])
    if cfg.on_nonfinite == "skip" and int(state["skipped"]):
        reason += f"; {int(state['skipped']):,} updates were not finite, and were skipped"
    if errors:
        exit_code = 1
    emit(run, "stop", {"step": step, "reason": reason})
    if is_main() and os.path.isfile(f"{cfg.out_dir}/stop"):
        os.unlink(f"{cfg.out_dir}/stop")

    # The newest metrics, the time and the checkpoint.
    checkpoint = None
    if progress.saved_step == step and "save" not in errors:
        checkpoint = ckpt.step_path(run.root, step)
    row = progress.last_metrics | {
        "step": step,
        "reason": reason,
        "exit_code": exit_code,
        "wall_s": time.perf_counter() - timers["launched"],
        "time_s": time_by_bucket(timers),
        "checkpoint": checkpoint,
    }
    return emit(run, "end", row) | {"state": state, "mesh": run.mesh}


# ---- events


# Events whose value is no row.
VALUE_EVENTS = ("loss_fn", "optimizer", "train_step", "load", "data", "val_data", "eval_batch",
                "state")
# Events for the hooks of the user alone.
HOOK_EVENTS = (*VALUE_EVENTS, "resume", "saved", "before_save", "before_eval", "before_epoch",
               "before_window")


def call_hook(hook, event, value):
    """The value after hook(event, value). An error names the hook and the event."""
    try:
        new = hook(event, value)
        if isinstance(value, dict) and new is not None:
            missing = sorted(value.keys() - {*new})
            assert not missing, f"its result lacks {missing}; return None, or value | {{...}}"
    except Exception as e:
        function = getattr(hook, "func", hook)  # of a partial
        name = getattr(function, "__qualname__", function)
        e.add_note(f"in the hook {name}, at the event {event}")
        raise
    return value if new is None else new


def harmless(observe):
    """An observer as a hook that may fail: it gets a copy of each row, its result is ignored, and
    once it has raised it is not called again.
    """
    has_failed = False

    def hook(event, row):
        nonlocal has_failed
        if has_failed or event in HOOK_EVENTS:
            return
        # Also copies of the dicts within: checkpoints keep the "config" of the start row. A
        # deepcopy would take 20 us more, at each step.
        copied = {key: dict(x) if isinstance(x, dict) else x for key, x in row.items()}
        try:
            observe(event, copied)
        except Exception as error:
            has_failed = True
            name = getattr(observe, "__qualname__", observe)
            print0(f"observer {name}: at the event {event}: {error!r}; it is removed, and the run "
                   "continues")

    return hook


def emit_before(run, event, planned):
    """Emit what is about to happen, a row. Return it with "skip": a reason not to do it, which is
    logged, or None. The hooks of process 0 decide.
    """
    row = emit(run, f"before_{event}", planned)
    # Process 0 may have hooks where others have none, such as one that forwards rows.
    reason = ckpt.broadcast_from_main(lambda: row.get("skip"))
    if reason:
        kind = planned.get("kind", event)
        emit(run, "skip", {"step": row["step"], "skipped": kind, "reason": str(reason)})
    return row | {"skip": reason}


def begin_epochs(run, step):
    """Run the hooks at "before_epoch" and "before_window" if an epoch or a file begins with the
    next batch.
    """
    if step == 0 or has_passed(run, "epoch", 1, step):
        epoch = 1 + int(completed(run, "epoch", step))
        emit(run, "before_epoch", {"step": step, "epoch": epoch})
    # Optional: training data in windows.
    windows_begun = run.train_data.get("windows")
    if windows_begun and (step == 0 or has_passed(run, "window", 1, step)):
        windows = windows_begun(step)
        row = {"step": step, "window": len(windows), "file": windows[-1]["name"]}
        emit(run, "before_window", row)


# ---- intervals


def event_intervals(cfg):
    """{event: {unit: interval}} of all events of the loop. "end": also after the last step."""
    intervals = {event: config.parse_intervals(getattr(cfg, f"{event}_every"))
                 for event in config.EVENTS}
    intervals["epoch"] = {"epoch": 1}
    intervals["window"] = {"window": 1}
    intervals["eval"] = {"window": 1} | intervals["eval"]  # one after each window
    at_end = {"eval": True, "sample": True, "weights": intervals["weights"],
              "export": cfg.export, "save": cfg.save_end}
    for event, is_due in at_end.items():
        if is_due:
            intervals[event]["end"] = 1
    return intervals


def has_passed(run, unit, n, step):
    """Whether a multiple of n steps, epochs or windows was completed by this step."""
    return completed(run, unit, step) // n > completed(run, unit, step - 1) // n


def completed(run, unit, step):
    """How many steps, epochs (a fraction) or windows are completed at this step."""
    if unit == "step":
        return step
    train_data = run.train_data
    if unit == "window":
        return train_data["n_finished"](step) if "n_finished" in train_data else 0
    # 1e-9, since 1.2 // 0.4 is 2 in floating point
    return step * run.cfg.batch_size / train_data["n"] + 1e-9


# ---- actions of the loop


def wait_for_save(run):
    """Wait until the pending save, if any, is committed. An error is logged."""
    progress = run.progress
    save, progress.pending_save = progress.pending_save, None
    if save is None:
        return
    kind = save["kind"]
    with log_errors(run, save["step"], kind):
        ckpt.wait(save["future"])
    if kind not in progress.save_errors:
        emit(run, "saved", {"step": save["step"], "kind": kind})


@contextlib.contextmanager
def log_errors(run, step, kind):
    """Log a ValueError of a save or an export instead of raising it. progress.save_errors keeps
    it until a later attempt of this kind succeeds.
    """
    run.progress.save_errors.pop(kind, None)
    try:
        yield
    except ValueError as e:
        run.progress.save_errors[kind] = str(e)
        emit(run, "nonfatal_error", {"step": step, "error": str(e)})


def save_before_error(run, state):
    """Save the steps that are done, unless they are saved, before an error ends the run. A step
    that has raised may have consumed the state. Of several processes only this one may have met the
    error, and the others would not join in the save.
    """
    if jax.process_count() > 1 or any(x.is_deleted() for x in jax.tree.leaves(state)):
        return
    log_step(run)
    step = int(state["step"])
    if step and run.progress.saved_step != step:
        save_state(run, state, step, "error")
        wait_for_save(run)


def print_preview(run, params, step):
    """Print samples, if the task has some. An error is logged, and training continues."""
    if not run.task["sample"]:
        return
    source = next(iter(run.val_data.values()), run.train_data)
    with timed(run.progress.timers, "other"):
        try:
            samples = sample_texts(run, params, step, source)
        except Exception as e:  # a sample is never worth losing a run
            error = f"no sample: {type(e).__name__}: {e}"
            emit(run, "nonfatal_error", {"step": step, "error": error})
            return
        if samples["texts"]:
            emit(run, "sample", {"step": step} | samples)


def sample_texts(run, params, step, source):
    """What the task samples, with a random key of the seed and the step: {"texts", "prompts": the
    beginning of each text, which the model was given}, and if the samples have them "rewards", with
    their mean in "sample_reward". source: data to begin with, or None.
    """
    key = jax.random.fold_in(jax.random.key(run.cfg.seed), step)
    with jax.set_mesh(run.mesh):
        samples = run.task["sample"](params, key, source, run.cfg)
    row = {"texts": [sample["prompt"] + sample["text"] for sample in samples],
           "prompts": [sample["prompt"] for sample in samples]}
    rewards = [sample["reward"] for sample in samples if "reward" in sample]
    if rewards:
        row |= {"rewards": rewards, "sample_reward": sum(rewards) / len(rewards)}
    return row


# ---- sums of metrics


def add_sums(since_log, sums):
    """{name: (sum, count)} of a step in float64, so that those of a resumed run, which begin with
    the checkpoint's, are bit-identical; added to those since the last log row.
    """
    found = {name: (np.float64(total), float(count)) for name, (total, count) in sums.items()}
    for name, (total, count) in found.items():
        total_before, count_before = since_log.get(name, (0.0, 0.0))
        since_log[name] = total_before + total, count_before + count
    return found


# ---- where the time goes


# Buckets of wall time. data: the device waits for a batch.
TIME_BUCKETS = ("start", "compile", "step", "data", "save", "eval", "other")


def start_bucket(timers, bucket):
    """Charge the seconds since the last charge to the present bucket, then charge to this one."""
    now = time.perf_counter()
    timers["seconds"][timers["bucket"]] += now - timers["since"]
    timers["since"] = now
    timers["bucket"] = bucket


@contextlib.contextmanager
def timed(timers, bucket):
    """Charge the time within to this bucket, and not to the one around it."""
    outer = timers["bucket"]
    start_bucket(timers, bucket)
    try:
        yield
    finally:
        start_bucket(timers, outer)


def time_by_bucket(timers):
    """A copy of {bucket: seconds}, up to now."""
    start_bucket(timers, timers["bucket"])
    return dict(timers["seconds"])


def begin_rates(timers, step):
    """Have the next log row count from this step on."""
    timers["logged_step"] = step
    timers["logged"] = time_by_bucket(timers)


def throughput(run, step, means):
    """Progress, speed and memory for a log row. means: of the row, for the FLOPs."""
    cfg, task, timers = run.cfg, run.task, run.progress.timers
    unit, units_per_step = task["unit"], task["units_per_step"](cfg)

    # Since the last log row.
    last, n_steps = timers["logged"], step - timers["logged_step"]
    begin_rates(timers, step)
    seconds = timers["logged"]
    data_s = seconds["data"] - last["data"]
    all_s = seconds["step"] - last["step"] + data_s
    units_per_s = n_steps * units_per_step / all_s

    memory = jax.local_devices()[0].memory_stats()
    if not memory:  # a CPU: the memory of this process
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory = {"peak_bytes_in_use": 1024 * peak_kib}
    row = {
        f"{unit}s": step * units_per_step,  # in all steps so far
        f"{unit}s_per_s": units_per_s,  # since the last log row: size of a batch / step_s
        "epoch": step * cfg.batch_size / run.train_data["n"],  # examples seen / number of them
        "step_s": all_s / n_steps,  # wall time of a step, with its wait for data
        "data_wait_s": data_s / n_steps,  # seconds in which the device had no batch
        "goodput": seconds["step"] / sum(seconds.values()),  # fraction of the time, all launches
        "time_s": seconds,
        "memory_peak_bytes": memory["peak_bytes_in_use"],
    }
    if task["flops"]:
        flops, _ = task["flops"](means, cfg)  # of one unit
        peak_tflops, _ = steplib.peaks(jax.devices()[0].device_kind)
        tflops = flops * units_per_s / jax.device_count() / 1e12
        row["model_tflops_per_device"] = tflops
        row["mfu"] = tflops / peak_tflops if peak_tflops else None
    return row


# ---- requests


def signal_received(progress):
    """Whether a signal came, after which the loop saves and skips everything else. Several
    processes have to agree on a stop first.
    """
    return jax.process_count() == 1 and bool(progress.signal)


def poll_requests(run, step, is_waiting=False):
    """Poll the requests into progress.polled. Return the reason to stop, as stop_reason does.
    is_waiting: during a wait for data.

    Several processes exchange their requests only at multiples of log_every; in between, the
    previous answer applies. During a wait for data they cannot agree, and continue to wait.
    """
    progress = run.progress
    cfg = run.cfg
    restart_watchdog(cfg)
    several = jax.process_count() > 1
    if several and is_waiting:
        return None
    if several and step % (cfg.log_every or 10):
        progress.polled = progress.polled | {"events": []}
        return stop_reason(run, step)

    # The file out_dir/save. Process 0 deletes it for all.
    save_file = f"{cfg.out_dir}/save"
    if is_main() and os.path.isfile(save_file):
        Path(save_file).unlink(missing_ok=True)
        progress.requests.add("save")
    # A signal, the file out_dir/stop, or a hook, after the events that hooks have requested.
    events = sorted(progress.requests)
    stop = progress.signal
    if not stop and os.path.isfile(f"{cfg.out_dir}/stop"):
        stop = f"{cfg.out_dir}/stop exists"
    if not stop and (is_waiting or not events):
        stop = progress.hook_stop
    elapsed_s = time.perf_counter() - progress.timers["launched"]
    progress.polled = {"elapsed_s": elapsed_s, "stop": stop, "events": events}
    # Optional: several processes.
    if several:
        progress.polled = merge_requests(progress.polled)
    return stop_reason(run, step)


# ---- signals


@contextlib.contextmanager
def catch_signals(progress):
    """Put the name of the first SIGINT, SIGTERM or SIGHUP (unless nohup ignores that) into
    progress.signal. Until progress.in_loop is set, when there is something to save, a signal
    raises KeyboardInterrupt. A second signal ends the process. SIGUSR1 requests a save.
    """
    first_at = 0.0

    def handle(number, frame):
        nonlocal first_at
        name = signal.Signals(number).name
        if number == signal.SIGUSR1:
            progress.requests.add("save")
        elif not progress.in_loop:
            # JAX may lose the exception: then the loop stops.
            progress.signal = name
            raise KeyboardInterrupt(name)
        elif not progress.signal:
            progress.signal, first_at = name, time.monotonic()
            print_stderr(f"{name}: finishing the step and saving; again to end at once")
        elif time.monotonic() - first_at > 1:  # `timeout` sends two at once
            print_stderr(f"{name} again: ending at once")
            os._exit(128 + number)

    caught = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        caught.append(signal.SIGHUP)
    with contextlib.ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():  # only it can catch signals
            for number in caught:
                undo.callback(signal.signal, number, signal.signal(number, handle))
        yield


def print_stderr(text):
    """Print in a signal handler, which may have interrupted a print."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


# ---- several processes


def connect_processes(cfg):
    """Connect to the other processes, before anything touches a device. Raises ValueError in all of
    them when one has another config than process 0.
    """
    if not cfg.coordinator:
        return
    config.validate(cfg, None)
    steplib.init_distributed(cfg.coordinator, cfg.n_processes, cfg.process_id)

    # These fields may differ between processes.
    common = dataclasses.replace(
        cfg, process_id=0, coordinator="", cache_dir="", token_cache="", explicit=())
    raise_if_unequal(json.loads(config.to_json(common)))


def raise_if_unequal(local):
    """Raise ValueError in every process when one has other values than process 0. local: {name:
    value that JSON keeps}.
    """
    main, *others = ckpt.gather(local)
    errors = []
    for i, other in enumerate(others, 1):
        for name, value in main.items():
            if other[name] != value:
                errors.append(f"{name} is {other[name]!r} in process {i}, {value!r} in 0")
    config.raise_if_errors(errors)


@contextlib.contextmanager
def explain_dead_process(root):
    """Turn the error of a collective into a ConnectionError that names the processes that have died
    or are stuck, and the step from which the same command continues.
    """
    try:
        yield
    except (ValueError, jax.errors.JaxRuntimeError) as e:
        if not re.search("Gloo|NCCL", str(e)):
            raise
        silent = steplib.silent_processes()
        if silent == []:  # none has died
            raise
        who = "another process"
        if silent:
            who = f"process {', '.join(map(str, silent))} of {jax.process_count()}"
        raise ConnectionError(f"{who} has died or is stuck ({str(e).splitlines()[0]}). The same "
                              f"command continues from step {ckpt.latest(root) or 0}") from None


def merge_requests(polled):
    """The requests of all processes: the longest time, the first stop, and all events."""
    everywhere = ckpt.gather(polled)
    return {
        "elapsed_s": max(found["elapsed_s"] for found in everywhere),
        "stop": next((found["stop"] for found in everywhere if found["stop"]), None),
        "events": sorted(set().union(*(found["events"] for found in everywhere))),
    }


def restart_watchdog(cfg):
    """Let a process that is stuck end: unless this is called again within cfg.peer_timeout_s, it
    prints the stack of each of its threads and exits with 1. JAX then ends the other processes.
    """
    if jax.process_count() > 1 and cfg.peer_timeout_s:
        faulthandler.dump_traceback_later(cfg.peer_timeout_s, exit=True, file=2)


# ---- printing


def print0(*words):
    """Print on process 0, above the progress bar if there is one."""
    if is_main():
        with ignore_stdout_errors():
            tqdm.write(" ".join(map(str, words)), file=sys.stdout)


@contextlib.contextmanager
def ignore_stdout_errors():
    """Ignore an OSError of what is printed within, and flush: a closed terminal, a broken pipe or a
    full disk ends no run.
    """
    with contextlib.suppress(OSError):
        yield
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as e:
            if e.errno in (errno.EPIPE, errno.EIO):  # redirect it to nowhere, also for the exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_main():
    return jax.process_index() == 0


def numbers(row):
    """The entries of a dict that are numbers, of Python, NumPy or JAX, as Python numbers."""
    found = {}
    for name, x in row.items():
        if hasattr(x, "item") and np.ndim(x) == 0:
            x = x.item()
        if isinstance(x, (int, float)):
            found[name] = x
    return found


# ---- observers


# An observer is a function of (event, row). The function that makes it takes the config. Observers
# cannot change the run. `OBSERVERS` lists those of process 0.
def make_observers(cfg):
    """The observers of this process, as hooks."""
    makers = [*OBSERVERS, *(TRACKERS[name] for name in cfg.track)]
    if not is_main():
        # Optional: logs of all processes.
        makers = [trace_profile, log_of_process] if cfg.log_all_processes else []
    return [harmless(make(cfg)) for make in makers]


def jsonl(cfg):
    """Write every event of a run but "step" and "dispatch" to metrics.jsonl, a JSON object per
    line, with all digits. On resume, rows after the restored step are dropped.
    """
    file = None

    def observe(event, row):
        nonlocal file
        if event == "start":
            file = ckpt.open_log(cfg.out_dir, row["step"])
        if file is None or event in ("step", "dispatch"):
            return
        try:
            file.write(ckpt.json_line({"event": event} | row) + "\n")
        except OSError as e:  # the buffer keeps 8 KiB of text, and writes it with a later row
            print0(f"{file.name}: {e}; make room: only a few rows are kept until then")

    return observe


# ---- the console


# The console's line for an event, with fields of its row.
EVENT_LINES = {
    "out_of_data": "waiting for data",
    "reload": "loaded again: {names}",
    "export": "exported to {folder}",
    "skip": "no {skipped}: {reason}",
    "nonfatal_error": "{error}",
    "nonfinite": "loss {loss:.4g}, or a gradient, is not finite; try a lower --lr, --clip_norm 1, "
                 "a longer --warmup_steps or --dtype float32, with --allow_change and its name",
}


def console(cfg):
    """Print a line for each log row, below them a progress bar on a terminal."""
    bar = tqdm(disable=True)

    @ignore_stdout_errors()
    def observe(event, row):
        nonlocal bar
        if event == "start":
            mib = row["memory_bytes_per_device"]["total"] / 2**20
            print0(f"compiled in {row['compile_s']:.1f} s, {mib:,.0f} MiB per device; from "
                   f"{row['origin']}, at step {row['step']}")
            bar = tqdm(total=cfg.steps, initial=row["step"], disable=None,  # None: by the terminal
                       bar_format="{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}")
        elif event == "step":
            bar.update()
        elif event == "log":
            bar.set_postfix_str(format_metrics(row, ["loss", speed_of(row)]), refresh=False)
            print0(format_log_row(row))
        elif event == "eval":
            print_eval_row(row)
        elif event == "sample":
            print_samples(row)
        elif event == "save" and row["why"] == "request":
            print0(f"{format_metrics(row, ['step'])}  saved, as requested")
        elif event in EVENT_LINES:
            print0(f"{format_metrics(row, ['step'])}  {EVENT_LINES[event].format(**row)}")
        elif event in ("end", "error"):
            bar.close()
        if event == "end":
            print_summary(row)

    return observe


# How the console shows a metric.
METRIC_FORMATS = {
    "step": "step {:>6}",
    "loss": "loss {:.4f}",
    "lr": "lr {:.2e}",
    "data_wait_s": "data wait {:.4f} s",
    "loss_step": "of step {:.0f}",
    "val_loss": "validation loss {:.4f}",
    "val_acc": "accuracy {:.3f}",
    "val_bits_per_byte": "{:.3f} bits/byte",
    "val_step": "of step {}",
    "best_val_loss": "best validation loss {:.4f}",
    "best_val_step": "of step {}",
}


# Metrics of an evaluation that the console does not show.
HIDDEN_METRICS = ("val_objective", "val_ppl", "val_z", "val_n_labels")


def format_metrics(row, names):
    """The metrics of these names that a row has, as text."""
    texts = []
    for name in names:
        if name in row:
            default = name.removeprefix("val_") + " {:.4g}"
            if name.endswith("s_per_s"):
                default = "{:,.0f} " + name.replace("_per_s", "/s")
            texts.append(METRIC_FORMATS.get(name, default).format(row[name]))
    return "  ".join(texts)


def format_log_row(row):
    return format_metrics(row, ["step", "loss", "lr", speed_of(row), "data_wait_s"])


def speed_of(row):
    """The name of the speed in a log row: the last name with that ending."""
    return next(name for name in reversed(row) if name.endswith("s_per_s"))


def print_eval_row(row):
    """Print the metrics of an evaluation, a line for each set with a name."""
    # {name of a set: {metric: value}}; "" is all of them
    sets = {"": {"step": row["step"]}}
    for key, value in numbers(row).items():
        metric, _, name = key.partition("/")
        if metric.startswith("val_") and metric not in HIDDEN_METRICS:
            sets.setdefault(name, {})[metric] = value
    width = max(map(len, sets))
    for name, values in sets.items():
        start = f"{'':13}{name:<{width}}  " if name else ""
        metrics = sorted(values, key=lambda metric: metric not in ("step", "val_loss"))
        print0(start + format_metrics(values, metrics))


LONG_EVAL_S = 2.0  # an evaluation that takes longer gets a progress bar


def eval_bar(n_batches):
    """A progress bar that a terminal shows once an evaluation has taken LONG_EVAL_S."""
    return tqdm(total=n_batches, delay=LONG_EVAL_S, leave=False,
                disable=None if is_main() else True,
                bar_format="evaluating {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}")


def print_samples(row):
    """Print the samples of a row. What follows the prompt is marked as labels are."""
    for i, (text, prompt) in enumerate(zip(row["texts"], row["prompts"], strict=True)):
        shown = mark_labels([(prompt, False), (text[len(prompt):], True)])
        title = f" reward {row['rewards'][i]:.4g} " if "rewards" in row else " sample "
        print0(f"{title.center(24, '-')}\n{shown}\n")
    if "rewards" in row:
        print0(f"mean reward of {len(row['rewards'])} samples: {row['sample_reward']:.4f}")


def printable(text):
    """A text with control characters as escapes: a terminal would obey them."""
    return "".join(c if c.isprintable() or c in "\t\n" else repr(c)[1:-1] for c in text)


def print_summary(row):
    """Print where the time went, the newest metrics, and why the run stopped."""
    seconds = row["time_s"]
    total = sum(seconds.values())
    print0("".join(f"{bucket:>8}" for bucket in seconds) + "  total")
    print0("".join(f"{s / total:8.1%}" for s in seconds.values()) + f"  {total:,.0f} s")
    # Print the step of a loss only if it is an earlier one.
    older = {name: value for name, value in row.items()
             if not name.endswith("_step") or value != row["step"]}
    print0(format_metrics(older, ["step", "loss", "loss_step", "val_loss", "val_bits_per_byte",
                                  "val_step"]))
    best = [name for name in row if name.startswith("best_")]
    if best:
        print0(format_metrics(row, best))

    is_done = row["reason"].endswith("steps are done")  # of stop_reason
    saved = f"saved in {row['checkpoint']}" if row["checkpoint"] else "not saved"
    print0(f"{'done' if is_done else 'stopped'}: {row['reason']}; {row['wall_s']:.0f} s, {saved}")
    if row["checkpoint"] and not row["exit_code"] and not is_done:
        print0("the same command, without --stop and --resume, continues from here")


# ---- samples of text


def sample_from_text(params, key, source, cfg):
    """The samples of `TEXT`: what the model writes after the prompts of cfg, or after the beginning
    of the data of `source`.
    """
    tokenizer = data.make_cfg_tokenizer(cfg)
    # Only process 0 reads the prompts: another one may lack their file.
    prompts = ckpt.broadcast_from_main(lambda: data.sample_prompts(cfg, tokenizer, source))
    options = steplib.compiler_options(cfg, jax.devices()[0])
    return model.sample_text(params, prompts, cfg, key, tokenizer["decode"], options)


# ---- what a run reports


def print_changed_flags(cfg):
    """Print the fields that differ from the defaults, in one line that can be copied."""
    flags = config.changed_flags(cfg) or ["the defaults"]
    print0(f"config: {' '.join(flags)}")


def run_summary(run):
    """What would run, and on what, in two lines."""
    cfg, mesh, task, table = run.cfg, run.mesh, run.task, run.table
    n_params = sum(math.prod(row["shape"]) for row in table.values())
    device_kind = mesh.devices.flat[0].device_kind
    axes = " ".join(f"{axis}={n}" for axis, n in mesh.shape.items())
    units = f"{task['units_per_step'](cfg):,} {task['unit']}s per step"
    stored = "bfloat16 parameters, rounded stochastically" if cfg.param_dtype == "bfloat16" else ""
    parts = filter(None, [cfg.dtype, stored, task["summary"](cfg), units])
    return (f"{n_params / 1e6:,.2f}M parameters on {mesh.size} x {device_kind}, mesh {axes}\n"
            f"{', '.join(parts)}")


def print_data_summary(opened, log, with_examples):
    """Print the summaries of the data, and the first examples to train on. opened: of open_data."""
    sources = {"train data": opened["train"]}
    sources |= {f"val data {name}".strip(): source for name, source in opened["val"].items()}
    for name, source in sources.items():
        if "summary" in source:
            summary = source["summary"].replace("\n", "\n  ")
            log(f"{name}: {summary}")
    source = opened["train"]
    if with_examples and "preview" in source:
        for i, pieces in enumerate(source["preview"](), 1):
            log(f"example {i}, labels within {{+ +}}:\n{mark_labels(pieces)}")


def mark_labels(pieces):
    """The text of an example, with marks around its labels. pieces: [(text, whether it is
    labels)].
    """
    marked = []
    for text, is_label in pieces:
        text = printable(text)
        marked.append("{+" + text + "+}" if is_label else text)
    return "".join(marked)


def print_changes(meta, description):
    """Print in what the machine differs from that of the checkpoint with this meta, or {}."""
    changes = []
    for part in ("versions", "machine", "mesh"):
        changes += config.differences(meta.get(part, {}), description[part])
    if changes:
        print0(f"since the checkpoint: {'; '.join(changes)}. The run continues, but agrees with an "
               "unchanged one only up to rounding")


def describe_run(run, start):
    """What runs, and on what, for the start event and every checkpoint. start: of find_state."""
    cfg, task = run.cfg, run.task
    unit = task["unit"]
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "numpy", "optax", "tensorstore")
    versions = {name: importlib.metadata.version(name) for name in packages}
    row = {
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "processes": jax.process_count(),
        "unit": unit,
        f"{unit}s_per_step": task["units_per_step"](cfg),
        "n_params": sum(math.prod(row["shape"]) for row in run.table.values()),
        "memory_bytes_per_device": run.programs["memory"],
        "config": dataclasses.asdict(cfg),
        "mesh": dict(run.mesh.shape),
        "sources": start.sources,
        "run_id": start.run_id,
        "machine": steplib.describe_machine(device) | {
            "device": device.device_kind, "xla_flags": os.environ.get("XLA_FLAGS", "")},
        "versions": versions | {"python": sys.version.split()[0]},
    }
    if task["flops"]:
        row[f"flops_per_{unit}"], row["flops_formula"] = task["flops"]({}, cfg)
    return row


# ---- command line


def cli(argv, hooks=(), task=TEXT, kind=config.Config, main=main):
    """Run a command line; return the exit code. A user error is printed without a traceback, every
    other exception with it.
    """
    # Print characters that a stream cannot encode as escapes.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # not every replacement of a stream can do it
            stream.reconfigure(errors="backslashreplace")
    try:
        return main(config.parse(argv, kind), hooks, task)["exit_code"]
    except Exception as e:
        is_expected = is_user_error(e)
        several = jax.distributed.is_initialized()
        if not is_expected and not several:
            raise
        is_explained = is_expected or type(e) is ConnectionError  # of explain_dead_process
        message = f"error: {e}" if is_explained else traceback.format_exc()
        print(message, file=sys.stderr, flush=True)
        exit_code = 2 if is_expected else 1
        if several:
            # Exit without JAX's shutdown, which would wait for the other processes. They end when
            # process 0 does: first let them print why.
            time.sleep(2)
            os._exit(exit_code)
        return exit_code
    except KeyboardInterrupt as e:  # before the first step, or in a mode that does not train
        with ignore_stdout_errors():
            print(f"{str(e) or 'SIGINT'}: ended; nothing to save", file=sys.stderr)
        os._exit(0 if e.args else 128 + signal.SIGINT)  # without waiting for a compilation


def is_user_error(error):
    """Whether a file may not be read, a path is too long, or a `raise` statement of the six files
    raised a ValueError (and not, say, `k, v = f()`).
    """
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.ENAMETOOLONG):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = Path(last.filename).resolve().parent == Path(__file__).resolve().parent
    return isinstance(error, ValueError) and is_ours and last.line.startswith("raise")


# ---- optional
#
# The optional sections, in this order: rows from Python, best checkpoint, branches of a run,
# validation data that comes later, exports during a run, dynamic sources of parameters, Hugging
# Face weights, LoRA, modes without a loop, values per example, memory estimates, hooks from files,
# logs of all processes, profiler, plot, trackers. Then the observers that run.


# ---- rows from Python

def write_rows(cfg, given):
    """cfg whose data are the given rows, which process 0 writes to out_dir/rows, or to out/rows, so
    that the command line can resume the run. given: see `main`.
    """
    splits = given if isinstance(given, dict) else {"train": given}
    if "train" not in splits:
        raise ValueError(f"data: has {[*splits]}; must be rows, or a dict of rows by split")
    fields = {"data": "train"}
    val_splits = [name for name in data.VAL_SPLITS if name in splits]
    if val_splits:
        fields["val_data"] = val_splits[0]
    taken = [name for name in fields if getattr(cfg, name)]
    if taken:
        raise ValueError(f"data: rows cannot be used together with {', '.join(taken)} of the "
                         "config; leave that empty")
    folder = Path(cfg.out_dir or config.RUNS_DIR, "rows")
    paths = {}
    for field, name in fields.items():
        # Process 0 writes, and the others wait for the path.
        paths[field] = (ckpt.broadcast_from_main(
            partial(data.write_rows, folder, name, splits[name], cfg.columns)),)
    return dataclasses.replace(cfg, **paths)


# ---- best checkpoint


def restore_best(run):
    """Put the best value and its step into progress.last_metrics: with keep_best those of the best
    checkpoint, if it is of this metric and this validation data. One of a later step, which the run
    will repeat, is deleted.
    """
    cfg, last_metrics = run.cfg, run.progress.last_metrics
    kept = dict(last_metrics)
    if cfg.keep_best:
        root = ckpt.roots(run.root)["best"]
        if is_main():
            ckpt.delete_after(root, run.first_step, print0)
        meta = ckpt.newest_meta(root)
        saved = meta.get("progress", {})
        kept = saved["last_metrics"] if saved.get("validation") == run.validation else {}
    earlier = [name for name in last_metrics if name.startswith("best_")]
    for name in earlier:
        del last_metrics[name]
    metric = config.parse_best(cfg.keep_best or "val_loss")["name"]
    best = f"best_{metric}"
    if best in kept:
        last_metrics |= {best: kept[best], "best_val_step": kept["best_val_step"]}
    elif earlier:
        print0(f"no checkpoint is kept as the best by {metric}: its best value begins again")


# ---- branches of a run


def find_branch(cfg):
    """The checkpoint of another run that cfg.branch_from names, as find_state returns it."""
    folder, step = config.parse_branch(cfg.branch_from)
    root, meta = ckpt.find_checkpoint(
        ckpt.root_of(folder), str(step), f"branch_from {folder}, step")
    ckpt.check_is_of_run(root, meta)
    if step >= cfg.steps:
        raise ValueError(f"branch_from {cfg.branch_from!r}: must be before the last step, "
                         f"{cfg.steps}; set more --steps")
    return {"root": root, "step": step, "meta": meta, "is_branch": True,
            "origin": f"the checkpoint {cfg.branch_from}"}


# ---- validation data that comes later


def val_data_at(run, step):
    """The validation data at `step`; {} without any, or once a stop is requested.

    A set "" whose data comes later has "source_at": step -> source, None while it is late, {} for
    none.
    """
    source_at = run.val_data.get("", {}).get("source_at")
    if not source_at:
        return run.val_data

    def make(i):
        source = source_at(i)
        is_over = i >= run.cfg.steps  # nothing more is waited for
        return {} if source is None and is_over else source

    found = data.prefetch(
        make, step, step + 1,
        stopped=lambda: poll_requests(run, step, is_waiting=True),
        on_late=lambda i: emit(run, "out_of_data", {"step": i}))
    sources = [source for source, _ in found]
    return {"": sources[0]} if any(sources) else {}


# ---- exports during a run


def export(run, params, step):
    """Export the parameters. An error of the disk is logged, and training continues."""
    began = time.perf_counter()
    with timed(run.progress.timers, "other"), log_errors(run, step, "export"):
        run.task["export"](params, run.cfg)
        emit(run, "export", {"step": step, "folder": run.cfg.export,
                                "export_s": time.perf_counter() - began})


# ---- dynamic sources of parameters


def reload_params(run, state, step):
    """state with the newest parameters of the dynamic sources; step and moments stay. A source that
    cannot be read is logged, and training continues.
    """
    with timed(run.progress.timers, "other"):
        try:
            dynamic = [source for source in open_sources(run) if source["dynamic"]]
            params = ckpt.load_parameters(dynamic, run.programs["state"]["params"])
        except ValueError as e:
            emit(run, "nonfatal_error", {"step": step, "error": f"reload: {e}"})
            return state
        emit(run, "reload", {"step": step, "names": sorted(params)})
    return state | {"params": state["params"] | params}


# ---- Hugging Face weights


def config_from_hf(cfg):
    """cfg with the shape of the model and the tokenizer of a Hugging Face folder in init_from.
    Raises ValueError for fields that were set to something else.
    """
    default = type(cfg)()
    is_set = {name: name in cfg.explicit or value != getattr(default, name)
              for name, value in vars(cfg).items()}
    for text in cfg.init_from:
        path = ckpt.parse_source(text)["path"]
        hf = read_hf_config(path)
        # Optional: LoRA. The folder of an adapter may have the config.json of its base.
        fields, _ = read_adapter(path)
        if hf and not fields:
            if "text_config" in hf:
                print0(f"{path}: {hf['model_type']} has more than text: its text part is taken")
            with data.as_value_error(f"init_from {path}: config.json", AttributeError, TypeError):
                fields = model.hf_fields(hf)
        errors = [config.field_error(cfg, name, f"is {value!r} in that folder; leave it out")
                  for name, value in fields.items()
                  if is_set[name] and getattr(cfg, name) != value]
        config.raise_if_errors(errors, f"init_from {path}")
        # A model of 256 ids reads bytes. For another one bytes of text would be wrong: without a
        # tokenizer.json the text is refused when it is opened.
        if "vocab_size" in fields and not is_set["tokenizer"]:
            has_tokenizer = Path(data.hub_path(path), "tokenizer.json").is_file()
            has_text = fields["vocab_size"] != 256 and not data.has_only_token_files(cfg)
            if has_tokenizer or has_text:
                fields["tokenizer"] = path
        cfg = dataclasses.replace(cfg, **fields)
    return cfg


def read_hf_config(path):
    """The config.json of Hugging Face weights in a folder or on the Hub, or {}."""
    found = ckpt.read_json(Path(data.hub_path(path), "config.json"))
    return found if "model_type" in found else {}


def open_hf(path, cfg):
    """{"names", "read"} of a folder of Hugging Face weights, or None for another folder."""
    hf = read_hf_config(path)
    if not hf:
        return None
    pieces = model.hf_pieces(cfg)

    def read(like):
        tensors = ckpt.open_tensors(data.hub_path(path, weights=True))
        if "text_config" in hf:
            tensors = {name.replace("language_model.", ""): x for name, x in tensors.items()
                       if "language_model." in name or name == model.HF_NAMES["unembed"]}
        if not any(name.startswith("model.") for name in tensors):  # as of embedding models
            head = model.HF_NAMES["unembed"]
            tensors = {name if name == head else f"model.{name}": x for name, x in tensors.items()}
        embed, unembed = model.HF_NAMES["embed"], model.HF_NAMES["unembed"]
        copy = tensors.get(unembed) if cfg.tie_embeddings else None
        if copy is not None and not np.array_equal(copy, tensors.get(embed)):
            raise ValueError(f"config.json ties the embeddings, but {unembed} differs from "
                             f"{embed}: set tie_word_embeddings to false in it to use both, or "
                             f"delete {unembed} from the files")
        tensors = model.split_fused(tensors, cfg)
        params = ckpt.read_tensors(tensors, pieces, like, model.HF_UNUSED)
        return model.from_hf(params, hf, cfg)

    return {"names": dict.fromkeys(pieces), "read": read}


# Entries of the config.json in init_from that an export keeps.
HF_PASSTHROUGH = {"max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}


def export_hf(params, cfg):
    """Write cfg.export as transformers loads it, with LoRA merged. A previous export of this run is
    replaced. params: None to look for errors only.

    Raises ValueError when no Hugging Face family has this architecture, or the folder has other
    files.
    """
    written_by = {"out_dir": os.path.abspath(cfg.out_dir)}
    ckpt.check_export(cfg.export, written_by)
    hf_config = model.hf_config(cfg)
    pieces = model.hf_pieces(cfg)
    tokenizer = data.make_cfg_tokenizer(cfg)
    hf_config["torch_dtype"] = cfg.export_dtype
    hf_config["bos_token_id"] = tokenizer["bos"]
    hf_config["eos_token_id"] = tokenizer["eos"]
    # Entries of the folder that the model came from, if it came from one.
    for text in reversed(cfg.init_from):
        saved = read_hf_config(ckpt.parse_source(text)["path"])
        for name in HF_PASSTHROUGH & saved.keys():
            hf_config[name] = saved[name]

    def add_files(folder):
        (folder / "config.json").write_text(json.dumps(hf_config, indent=1), encoding="utf-8")
        data.copy_tokenizer(cfg.tokenizer, folder)
        write_generation_config(folder / "generation_config.json", tokenizer)

    if params is None:
        model.check_hf_forward(cfg)
        with tempfile.TemporaryDirectory() as folder:
            add_files(Path(folder))
        return
    params = model.to_hf(model.merge_lora(params, cfg), cfg)
    ckpt.write_export(cfg.export, written_by, params, pieces, cfg.export_dtype, add_files)


def write_generation_config(path, tokenizer):
    """Have programs that generate stop at the end of a document, and at the end of an answer in the
    tokenizer's chat template.
    """
    stops = set(tokenizer["stops"])
    with contextlib.suppress(ValueError):  # without the package that reads chat templates
        stops |= data.turn_ends(tokenizer)
    if stops:
        settings = ckpt.read_json(path) | {"eos_token_id": sorted(stops)}
        path.write_text(json.dumps(settings, indent=1), encoding="utf-8")


# ---- LoRA


def read_adapter(path):
    """(the fields of Config that describe it, its tensors) of an adapter of PEFT in a folder or on
    the Hub; ({}, {}) for another path.
    """
    folder = data.hub_path(path)
    settings = ckpt.read_json(Path(folder, "adapter_config.json"))
    if not settings:
        return {}, {}
    tensors = ckpt.open_tensors(folder, "adapter_model")
    with data.as_value_error(f"init_from {path}: adapter_config.json", LookupError, TypeError):
        return model.adapter_fields(settings, tensors), tensors


def source_fits_adapters(source):
    """Whether an adapter of PEFT fits the weights of a source in init_from, or of a run that began
    with them.
    """
    path = ckpt.parse_source(source)["path"]
    hf = read_hf_config(path)
    if hf:
        return model.fits_adapters(hf)
    saved = ckpt.read_json(Path(path, "config.json"))
    return all(source_fits_adapters(text) for text in saved.get("init_from", ()))


def open_adapter(path, cfg):
    """{"names", "read"} of an adapter of PEFT, or None for another path."""
    fields, tensors = read_adapter(path)
    if not fields:
        return None
    others = [text for text in cfg.init_from if ckpt.parse_source(text)["path"] != path]
    if any(read_adapter(ckpt.parse_source(text)["path"])[0] for text in others):
        raise ValueError(f"init_from {path}: there is another adapter; merge one of them by PEFT's "
                         "merge_and_unload first")
    if not all(source_fits_adapters(text) for text in others):
        raise ValueError(f"init_from {path}: the weights of its base are changed when they are "
                         "read; merge the adapter by PEFT's merge_and_unload first")
    pieces = model.hf_pieces(cfg, adapter=True)
    return {"names": dict.fromkeys(pieces), "read": partial(ckpt.read_tensors, tensors, pieces)}


# ---- modes without a loop


def run_mode(cfg, task, hooks, progress, state, params):
    """Do what cfg.mode says, unless that is to train. Return the summary."""
    if cfg.mode in ("eval", "sample", "export"):
        return run_saved(setup_run(cfg, task, hooks=hooks, progress=progress), state, params)
    if state is not None or params is not None:
        raise ValueError(f"mode {cfg.mode}: uses no state and no params; leave them out")
    if cfg.mode == "plan":
        return plan(cfg, task, hooks)
    return tokenize_data(cfg, task)


def write_samples(path, samples):
    """Write samples as JSON lines with "prompt", "text", what follows it, and perhaps "reward"."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for i, (text, prompt) in enumerate(zip(samples["texts"], samples["prompts"], strict=True)):
            sample = {"prompt": prompt, "text": text[len(prompt):]}
            if "rewards" in samples:
                sample["reward"] = samples["rewards"][i]
            file.write(ckpt.json_line(sample) + "\n")


def run_saved(run, state=None, params=None):
    """Evaluate, sample or export, as cfg.mode says; the summary. An evaluation emits the events of
    one in a run; in the other modes hooks that replace the loss have an effect.
    """
    # Find the parameters, and check that they fit what is to be done.
    cfg, task = run.cfg, run.task
    start = find_state(run, state, params)
    if cfg.mode == "sample" and not task["sample"]:
        raise ValueError("mode sample: this task has no samples")
    if cfg.mode == "eval":
        val_data = open_data(task, cfg, ("val",))["val"]
        if not val_data:
            raise ValueError(f"mode eval: val_frac {cfg.val_frac} leaves no data; set --val_data")
        # Optional: values per example.
        if cfg.examples_file:
            run.hooks = (*run.hooks, examples_writer(cfg, task["loss"], val_data))

    # Compile, and check that everything fits into memory.
    with steplib.explain_oom(partial(memory_advice, run)):
        counted = count_programs(run)
        steplib.check_fits(counted["memory"], counted["peaks"], run.mesh)

    step, params = load_saved(run, start, state, params)
    summary = {"step": step, "reason": cfg.mode, "exit_code": 0}
    if cfg.mode == "eval":
        params = emit(run, "load", {"step": step, "params": params})["params"]
        emit(run, "start", {"step": step, "config": dataclasses.asdict(cfg),
                            "validation": describe_validation(run, val_data)})
        if start.meta:
            # A checkpoint of a program of its own may lack the state of hooks.
            saved_state = start.meta.get("hooks", {})
            emit(run, "resume", {"step": step, "hooks": saved_state, "root": start.root})
        n_batches = sum(eval_batches(run, val_data).values())
        planned = {"step": step, "n_batches": n_batches, "params": params}
        params = emit(run, "before_eval", planned)["params"]
        summary |= evaluate(run, val_data, counted["programs"]["evaluation"], params)
        summary = emit(run, "end", summary)
        print_eval_row(summary)
        print0(ckpt.json_line(summary))
    elif cfg.mode == "export":
        task["export"](params, cfg)
        print0(f"exported step {step} to {cfg.export}")
    else:
        summary |= sample_texts(run, params, 0, None)
        print_samples(summary)
        if cfg.samples_file and is_main():
            write_samples(cfg.samples_file, summary)
    return summary


def load_run(cfg, task=TEXT, hooks=()):
    """(run, step, params) of the checkpoint of cfg.out_dir that cfg.checkpoint names, or of
    cfg.init_from if out_dir has no run. For programs that use a model, such as
    tests/recipes/chat.py.
    """
    cfg, hooks = prepare(cfg, hooks)
    run = setup_run(cfg, task, hooks=hooks)
    return run, *load_saved(run, find_state(run))


def load_saved(run, start, state=None, params=None):
    """(step, parameters) that find_state has found."""
    like = {"params": steplib.lower_steps(*step_args(run))["state"]["params"]}
    programs = {"state": like, "init": lambda key, params: {"params": params}}
    meta, loaded = load_state(run, start, programs, state, params)
    step = meta.get("step", 0) if state is None else int(state["step"])
    return step, loaded["params"]


def tokenize_data(cfg, task):
    """Tokenize the data that is not in the cache, and print a summary. Needs no accelerator."""
    task = complete_task(task)
    cfg = task["update_config"](cfg)  # as in training
    config.validate(cfg, None)
    print_data_summary(open_data(task, cfg, ("train", "val")), print, with_examples=True)
    return {"step": 0, "reason": "data", "exit_code": 0}


# ---- values per example

def examples_writer(cfg, loss, val_data):
    """A hook that collects the values per example of an evaluation on the host, and at its end
    writes them to cfg.examples_file. loss, val_data: those of the task.
    """
    is_given = [steplib.takes(loss, "examples"), *("examples" in x for x in val_data.values())]
    if not all(is_given):
        raise ValueError("examples_file: this task has no values per example; leave it out")
    found = {name: [] for name in val_data}  # values of each batch
    # A file that cannot be written is an error now, not after the evaluation.
    with data.as_value_error(f"examples_file {cfg.examples_file}: cannot be written", OSError):
        Path(cfg.examples_file).parent.mkdir(parents=True, exist_ok=True)
        open(cfg.examples_file, "a", encoding="utf-8").close()

    def collect(event, row):
        if event == "eval_batch" and is_main():
            batches = found[row["set"]]
            values_of = val_data[row["set"]]["examples"]
            batches.append(values_of(len(batches), jax.device_get(row["examples"])))
        if event == "end" and is_main():
            write_examples(cfg.examples_file, found)

    return collect


def write_examples(path, found):
    """Write examples as JSON lines, those of each set in the order of their ids.

    found: {name of a set: [{name: array} of each batch]}.
    """
    with open(path, "w", encoding="utf-8") as file:
        for name, batches in found.items():
            columns = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
            for i in columns["id"].argsort():
                row = {"set": name} | {key: x[i] for key, x in columns.items()}
                file.write(ckpt.json_line(row) + "\n")


# ---- memory estimates


def plan(cfg, task=TEXT, hooks=()):
    """Print what a run would need, without allocating it; the summary."""
    run = setup_run(cfg, task, hooks=hooks)
    print_outlook(run)
    print0("compiling, to count the memory ...")
    cost = estimate(run)
    print_estimate(run, cost)
    return {"step": 0, "reason": "plan", "exit_code": int(not cost["fits"])} | cost


def print_outlook(run):
    """Print estimates that need no compilation: memory, time and cost, from shapes."""
    print0(run_summary(run))
    memory = memory_from_shapes(run)
    if memory:
        print0(f"about {format_amount(memory['total'] / 2**30)} GiB for each device, from shapes")
    flop = sum(step_flop(run).values())
    step_s = steplib.step_seconds(flop, run.mesh, run.cfg)
    print0(time_of_run(run, step_s))
    if step_s:
        print0("by the matmuls alone: runs took 0.4 to 1.6 times as long (tests/RESULTS.md)")


def time_of_run(run, step_s):
    """The time of all steps, the device hours and their cost, as a text. step_s: seconds of a step;
    None when unknown.
    """
    cfg, n_devices = run.cfg, run.mesh.size
    if not step_s or cfg.epochs:
        error = "no time: the FLOPs of this task, or this device's rate in this dtype, are unknown"
        if step_s:
            error = "no time: epochs are steps only when the data is open; set --steps"
        if cfg.price:
            config.raise_if_errors([config.field_error(cfg, "price", error)])
        return error
    seconds = cfg.steps * step_s
    device_hours = seconds / 3600 * n_devices
    run_time = f"{format_amount(seconds)} s"
    if seconds > 3600:
        run_time = f"{format_amount(seconds / 3600)} hours"
    text = (f"{cfg.steps:,} steps of about {format_amount(step_s)} s: {run_time}, "
            f"{format_amount(device_hours)} device hours")
    if cfg.price:
        text += f", {format_amount(device_hours * cfg.price)} at --price {cfg.price:g}"
    return text


def format_amount(x):
    """A number with three digits, or all digits of a large one."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def step_flop(run):
    """{formula: FLOPs per device and step} of a run; {} for a task without "flops"."""
    cfg, task = run.cfg, run.task
    if not task["flops"]:
        return {}
    flops, formula = task["flops"]({}, cfg)
    found = {f"model: {formula}": flops * task["units_per_step"](cfg) / run.mesh.size}
    if cfg.remat in ("full", "offload"):
        found["recomputed by remat"] = sum(found.values()) / 3
    return found


def memory_from_shapes(run):
    """{kind: estimated bytes on a device}, with "total" (without host memory), of a step; {} for a
    task without "activation_bytes".
    """
    cfg, mesh, task = run.cfg, run.mesh, run.task
    if not task["activation_bytes"]:
        return {}
    # Offloaded moments are laid out as if on the device: JAX knows no host memory of absent ones.
    on_device = dataclasses.replace(cfg, offload_optimizer=False)
    state = steplib.lower_steps(*step_args(changed_run(run, cfg=on_device)))["state"]
    trained = [x for name, x in state["params"].items()
               if run.table[name].get("trained", True)]
    moments = "moments in host memory" if cfg.offload_optimizer else "moments"
    is_gpu = mesh.devices.flat[0].platform not in ("cpu", "tpu")
    memory = {
        "parameters": steplib.array_bytes(state["params"]),
        moments: steplib.array_bytes(state["opt"]),
        "gradients": steplib.array_bytes(trained),
        "activations, roughly": task["activation_bytes"](cfg, mesh.shape, is_gpu),
    }
    total = sum(n for kind, n in memory.items() if "host" not in kind)
    return memory | {"total": total}


def estimate(run):
    """{"flop": {formula: FLOPs per device and step}, "fits"} of a run, and the result of
    count_programs, or "error".
    """
    cost = {"flop": step_flop(run), "memory": {}, "peaks": {}}
    try:
        with steplib.explain_oom(partial(memory_advice, run)):
            cost |= count_programs(run)
            steplib.check_fits(cost["memory"], cost["peaks"], run.mesh)
    except ValueError as e:
        cost["error"] = str(e)
    return cost | {"fits": "error" not in cost}


def count_programs(run):
    """steplib.count_memory of the programs that cfg.mode runs."""
    cfg = run.cfg
    is_training = cfg.mode in ("train", "plan")
    with_evaluation = cfg.mode == "eval" or (is_training and bool(cfg.val_data or cfg.val_frac))
    steps = steplib.lower_steps(*step_args(run))
    return steplib.count_memory(steps, is_training, with_evaluation)


def print_estimate(run, cost):
    """Print an estimate. cost: of `estimate`."""
    print0("for each device:")
    for kind, flop in cost["flop"].items():
        print0(f"  {flop / 1e12:10,.4g} TFLOP  {kind}")
    for kind, n_bytes in cost["memory"].items():
        if kind != "total":
            print0(f"  {n_bytes / 2**30:10,.4g} GiB  {kind}")
    for program, n_bytes in cost["peaks"].items():
        print0(f"  {n_bytes / 2**30:10,.4g} GiB  in all during {program}")
    limit = steplib.memory_limit(run.mesh)
    fits = f"fits in {limit / 2**30:,.4g} GiB" if limit else "the memory limit is not known"
    print0(cost.get("error", fits))


def memory_advice(run):
    """Flags with which a run fits, as a text with the GiB, those that cost the least time first.

    The estimate from shapes chooses them, and the run is compiled with them. If it does not fit,
    the estimate is scaled to what was compiled. Without an estimate, the run is compiled with more
    and more flags.
    """
    cfg, mesh, task = run.cfg, run.mesh, run.task
    limit = steplib.memory_limit(mesh)
    flags = steplib.memory_flags(cfg, mesh, task["memory_flags"](mesh.shape["sp"], cfg))
    if cfg.eval_batch_size:
        flags.insert(0, {"eval_batch_size": 0})

    def peak_with(changes):
        """Bytes of the largest program; infinite when it cannot be compiled."""
        # The number of steps is known: epochs would set it again.
        changed = dataclasses.replace(cfg, **({"epochs": 0.0} | changes))
        try:
            changed_setup = setup_run(changed, task, [*mesh.devices.flat], run.hooks)
            return max(count_programs(changed_setup)["peaks"].values(), default=0)
        except (ValueError, MemoryError, jax.errors.JaxRuntimeError):
            return math.inf

    print0("too little memory: compiling a variant that needs less ...")
    has_estimate = task["activation_bytes"] and cfg.mode in ("train", "plan")
    if not has_estimate or cfg.eval_batch_size or limit is None:
        return steplib.as_advice(*steplib.suggest_flags(flags, peak_with, limit), limit)

    def estimate_with(changes):
        changed = changed_run(run, cfg=dataclasses.replace(cfg, **changes))
        return memory_from_shapes(changed)["total"]

    tried = []
    estimate_limit = limit
    while True:
        changes, estimated = steplib.suggest_flags(flags, estimate_with, estimate_limit)
        peak = peak_with(changes)
        if peak <= limit or changes in tried:
            return steplib.as_advice(changes, peak, limit)
        tried.append(changes)
        estimate_limit = min(limit * estimated / peak, 0.9 * estimated)


# ---- hooks from files


def load_functions(field, texts):
    """The functions that the texts "file.py:function" of a field name. Each file runs once, and may
    import files beside it.
    """
    run_file = functools.cache(runpy.run_path)
    found = []
    for text in texts:
        path, _, name = text.rpartition(":")
        if not Path(path).is_file():
            raise ValueError(f"{field} {text!r}: must be file.py:function; there is no file "
                             f"{path!r}")
        sys.path.append(os.path.dirname(os.path.abspath(path)))
        functions = {key: x for key, x in run_file(path).items() if callable(x)}
        if name not in functions:
            raise ValueError(f"{field} {text!r}: the file has no function {name!r} "
                             f"({config.did_you_mean(name, functions)})")
        found.append(functions[name])
    return found


# ---- logs of all processes


def log_of_process(cfg):
    """Print the log rows of another process than process 0."""
    def observe(event, row):
        if event == "log":
            print(f"process {jax.process_index()}  {format_log_row(row)}", flush=True)

    return observe


# ---- profiler


def trace_profile(cfg):
    """Trace the steps first:last of cfg.profile into out_dir/profile, or on another process than
    process 0 into a folder in it.
    """
    folder = Path(cfg.out_dir, "profile", "" if is_main() else f"process_{jax.process_index()}")
    return steplib.profiler(*config.profile_span(cfg), folder, print0)


# ---- plot


def plot(cfg):
    """Draw plot.png when a run ends and matplotlib is installed: training and validation loss, and
    beside it learning rate, gradient norm and throughput, over steps.
    """
    def observe(event, row):
        if event != "end" or not importlib.util.find_spec("matplotlib"):
            return
        from matplotlib.figure import Figure
        start, *rows = ckpt.read_log(cfg.out_dir)
        rows = [row for row in rows if row["event"] in ("log", "eval")]
        speed = f"{start['unit']}s_per_s"
        labels = {"loss": "loss", "lr": "learning rate", "grad_norm": "gradient norm",
                  speed: f"{start['unit']}s/s"}
        figure = Figure(figsize=(10, 5), layout="constrained")
        panels = figure.subplot_mosaic(
            [["loss", "lr"], ["loss", "grad_norm"], ["loss", speed]], width_ratios=[3, 1])

        for name, axes in panels.items():
            for key in (name, "val_loss") if name == "loss" else (name,):
                points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
                # A line of one point would not be seen.
                style = "o-" if key == "val_loss" or len(points) == 1 else "-"
                if points:
                    axes.plot(*np.transpose(points), style, label=key, markersize=4)
            axes.set_xlabel("step")
            axes.set_ylabel(labels[name])
            axes.grid(alpha=0.3)
            # The first twentieth is cut off at the top, or it would flatten the rest.
            values = [line.get_ydata()[len(line.get_ydata()) // 20:] for line in axes.lines]
            finite = [x for x in np.concatenate([[], *values]) if np.isfinite(x)]
            if name in ("loss", "grad_norm") and finite:
                margin = 0.05 * np.ptp(finite) or 0.05
                axes.set_ylim(min(finite) - margin, max(finite) + margin)
        if panels["loss"].lines:
            panels["loss"].legend()
        panels[speed].set_ylim(bottom=0)

        with_bits = [row for row in rows if row.get("loss") and row.get("bits_per_byte")]
        if with_bits:
            ratio = with_bits[-1]["bits_per_byte"] / with_bits[-1]["loss"]
            right = panels["loss"].secondary_yaxis(
                "right", functions=(lambda loss: loss * ratio, lambda bits: bits / ratio))
            right.set_ylabel("bits/byte of the training text")
            panels["loss"].set_ylabel("loss (nats/token)")
        figure.suptitle(str(cfg.out_dir))
        for text in figure.findobj(lambda artist: hasattr(artist, "set_parse_math")):
            text.set_parse_math(False)  # a $ in a name begins no formula
        figure.savefig(Path(cfg.out_dir) / "plot.png", dpi=100)

    return observe


# ---- trackers


def log_to_wandb(cfg):
    """Send metrics, histograms and samples to Weights & Biases, under the id of the run, so that a
    resumed run continues there. wandb reads its own variables: WANDB_MODE, WANDB_PROJECT and so on.
    """
    wandb = data.require("wandb", "track wandb")
    run = None

    def observe(event, row):
        nonlocal run
        if event == "start":
            name = os.environ.get("WANDB_NAME") or Path(cfg.out_dir).name
            run = wandb.init(id=row["run_id"], resume="allow", dir=cfg.out_dir,
                             config=row["config"], name=name, settings={"console": "off"})
            run.define_metric("*", step_metric="step")
        elif run and event in ("log", "eval", "sample", "end"):
            values = tracked_numbers(row)
            for name, stats in row.get("watch", {}).items():
                histogram = (stats["counts"], histogram_edges(stats))
                values[f"watch/{name}"] = wandb.Histogram(np_histogram=histogram)
            if "texts" in row:
                columns = {"step": [row["step"]] * len(row["texts"]), "text": row["texts"]}
                if "rewards" in row:
                    columns["reward"] = row["rewards"]
                samples = list(zip(*columns.values()))
                values["samples"] = wandb.Table(columns=[*columns], data=samples)
            run.log(values)
        if run and event in ("end", "error"):
            run.finish(row.get("exit_code", 1))

    return observe


def log_to_tensorboard(cfg):
    """Write event files for TensorBoard into out_dir/tensorboard: metrics, histograms, samples."""
    library = data.require("tensorboardX", "track tensorboard")
    writer = None

    def observe(event, row):
        nonlocal writer
        if event == "start":  # has TensorBoard purge later steps
            writer = library.SummaryWriter(
                f"{cfg.out_dir}/tensorboard", purge_step=row["step"] + 1)
        elif writer and event in ("log", "eval", "sample", "end"):
            step = row["step"]
            for name, x in tracked_numbers(row).items():
                writer.add_scalar(name, x, step)
            for name, stats in row.get("watch", {}).items():
                n, mean = sum(stats["counts"]), stats["mean"]
                writer.add_histogram_raw(
                    f"watch/{name}", stats["min"], stats["max"], n, n * mean,
                    n * (stats["std"]**2 + mean**2), histogram_edges(stats)[1:], stats["counts"],
                    step)
            for i, text in enumerate(row.get("texts", ())):
                # As Markdown, in which an indented text is shown as it is.
                writer.add_text(f"sample/{i}", textwrap.indent(text, "    "), step)
        if writer and event in ("end", "error"):
            writer.close()

    return observe


def tracked_numbers(row):
    """The numbers of a row, and "watch/NAME/STATISTIC" of its weight statistics."""
    found = numbers(row)
    for name, stats in row.get("watch", {}).items():
        for statistic, x in numbers(stats).items():
            found[f"watch/{name}/{statistic}"] = x
    return found


def histogram_edges(stats):
    """The bounds of the bins of weight statistics. Trackers need increasing ones, also where all
    weights are equal.
    """
    low = stats["min"]
    width = max(stats["max"] - low, 1e-6 * abs(low), 1e-12)
    return np.linspace(low, low + width, len(stats["counts"]) + 1)


TRACKERS = {"wandb": log_to_wandb, "tensorboard": log_to_tensorboard}  # of --track


# ---- observers that run


OBSERVERS = (jsonl, trace_profile, console, plot)


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
