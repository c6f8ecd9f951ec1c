# SPDX-License-Identifier: Apache-2.0
"""Wiring, and one for-loop that reads aloud: get a batch, dispatch the step, read the metrics of
the one before, save, evaluate, sample, stop?

The only file that imports the others. Invariant: every stop but a crash saves and says why.
"""
import contextlib
import ctypes
import dataclasses
import fcntl
import importlib.util
import json
import math
import os
import platform
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from functools import partial
from pathlib import Path

# Before JAX starts its threads: have glibc keep all freed memory, in one arena. On a CPU, new pages
# at each step took from a third to two thirds of its time.
M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD = -8, -4, -1, -2  # of malloc.h
with contextlib.suppress(OSError, AttributeError):  # another C library
    for option, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1),
                          (M_TOP_PAD, 2**28)):
        ctypes.CDLL(None).mallopt(option, value)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from tqdm import tqdm

import ckpt
import config
import data
import model
import step as steplib

OWN = "its own checkpoint"  # the origin of a state that goes on
ALL_DONE = "all {} steps are done"  # the reason of a stop after which nothing is left to do


def say(*words):
    """Print on process 0, above the progress bar if there is one."""
    if jax.process_index() == 0:
        tqdm.write(" ".join(map(str, words)), file=sys.stdout)
        sys.stdout.flush()


def call(hooks, event, value):
    """Give `value` to every hook(event, value); what one returns, unless None, replaces it."""
    for hook in hooks:
        new = hook(event, value)
        value = value if new is None else new
    return value


# ---- signals

@contextlib.contextmanager
def listen(names=("SIGINT", "SIGTERM")):
    """A list that gets the name of the first such signal; a second one ends the process at once.

    A thread reads them, since Python runs no handler while the main thread is inside a compilation.
    """
    caught = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def watch():
        while number := ours.recv(1):
            name = signal.Signals(number[0]).name
            if name not in names:
                continue
            if caught:
                os.write(2, f"\n{name} again: ending at once\n".encode())
                os._exit(128 + number[0])
            caught.append(name)
            os.write(2, f"\n{name}: finishing the step and saving; once more ends at once\n"
                     .encode())

    old_fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    old = {n: signal.signal(getattr(signal, n), lambda *_: None) for n in names}
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield caught
    finally:
        signal.set_wakeup_fd(old_fd)
        for n, handler in old.items():
            signal.signal(getattr(signal, n), handler)
        theirs.close()


# ---- before the loop

def setup(cfg, devices=None):
    """What every mode needs, on these devices (default: all at hand): {"cfg" (worked out), "mesh",
    "tokenizer", "train", "val" (sources), "table"}.

    Raises ValueError for every fault that can be seen without compiling.
    """
    devices = devices or jax.devices()
    platform = devices[0].platform
    cache_dir = os.path.expanduser(cfg.cache_dir)
    try:
        cache_dir and os.makedirs(cache_dir, exist_ok=True)
    except OSError as e:
        raise ValueError(f"cache_dir {cfg.cache_dir!r}: cannot be written: {e.strerror}; choose "
                         "another, or '' for none") from None
    jax.config.update("jax_compilation_cache_dir", cache_dir or None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.validate(cfg, len(devices), {
        "optimizer": steplib.OPTIMIZERS, "schedule": steplib.SCHEDULES, "remat": model.REMAT})
    tokenizer = data.make_tokenizer(cfg.tokenizer)
    auto = "bfloat16"
    if platform == "cpu":
        flags = Path("/proc/cpuinfo")
        auto = "mixed" if flags.exists() and "amx_bf16" in flags.read_text() else "float32"
    cfg = config.derive(dataclasses.replace(
        cfg, vocab_size=cfg.vocab_size or tokenizer["vocab_size"],
        dtype=auto if cfg.dtype == "auto" else cfg.dtype))
    cuda = platform == "gpu" and "cuda" in devices[0].client.platform_version
    check_host_memory(cfg, devices)
    table, mesh = model.param_table(cfg), steplib.make_mesh(cfg, devices)
    cfg = dataclasses.replace(
        cfg, attention=model.choose_attention(cfg, "cuda" if cuda else platform),
        watch=tuple(sorted(model.matching("watch", cfg.watch, table))))
    if faults := steplib.check_shapes(table, mesh):
        raise ValueError("mesh and model do not fit: " + "; ".join(faults))
    opened = lambda patterns: data.open_source(
        patterns, tokenizer, cfg.data_dtype, cfg.seq_len, cfg.vocab_size)
    train, val = opened(cfg.data), None
    if cfg.val_data:
        val = opened(cfg.val_data)
    elif cfg.val_frac:
        train, val = data.split(train, cfg.val_frac, cfg.seq_len)
    if cfg.epochs:
        n = data.n_sequences(train, cfg.seq_len)
        cfg = dataclasses.replace(cfg, steps=max(1, math.ceil(cfg.epochs * n / cfg.batch_size)))
    return {"cfg": cfg, "mesh": mesh, "tokenizer": tokenizer, "train": train, "val": val,
            "table": table}


def check_host_memory(cfg, devices):
    """Raise ValueError when host memory is asked for and the devices cannot reach it."""
    kinds = [memory.kind for memory in devices[0].addressable_memories()]
    for name, value, instead in (("remat", "offload", "full"), ("moments_on", "host", "device")):
        if getattr(cfg, name) == value and "pinned_host" not in kinds:
            raise ValueError(f"{name} {value}: {devices[0].device_kind} has no pinned_host memory, "
                             f"only {', '.join(kinds)}; set --{name} {instead}")


def batch_makers(run):
    """(step -> training batch, index -> evaluation batch), as global arrays; each process builds
    its own rows.
    """
    cfg, sharding = run["cfg"], NamedSharding(run["mesh"], steplib.BATCH)
    rows = data.local_rows(sharding, (cfg.batch_size, cfg.seq_len))
    sizes = dict(batch_size=cfg.batch_size, seq_len=cfg.seq_len, rows=rows,
                 vocab_size=cfg.vocab_size, end=run["tokenizer"]["end"] if cfg.packed else None)

    def train(step):
        step = 0 if cfg.overfit_batch else step
        batch = data.batch_at(run["train"], step, seed=cfg.seed, **sizes)
        return data.to_device(batch, dict.fromkeys(batch, sharding), cfg.batch_size)

    def held_out(index):
        batch = data.eval_batch_at(run["val"], index, **sizes)
        return data.to_device(batch, dict.fromkeys(batch, sharding), cfg.batch_size)

    return train, held_out


def program_parts(run):
    """What lower_steps and compile_steps are called with."""
    cfg = run["cfg"]
    tokens = jax.ShapeDtypeStruct((cfg.batch_size, cfg.seq_len), jnp.int32)
    names = ("tokens", "labels", *(("segments", "positions") if cfg.packed else ()))
    return (cfg, run["mesh"], run["table"], model.loss_fn, model.init,
            dict.fromkeys(names, tokens))


def check_same_run(run, meta):
    """Raise ValueError when the checkpoint of `meta` is of another config or other data."""
    cfg, then, now = run["cfg"], meta["data"]["fingerprint"], data.fingerprint(run["train"])
    config.changes(meta["config"], cfg)
    if then != now and "data" not in cfg.allow_change:
        raise ValueError(f"the data changed since {cfg.out_dir} was saved: {then} then, {now} now; "
                         "bring it back, or go on with --allow_change data")


def check_low_rank(cfg):
    """Raise ValueError when a new run would tune low-rank updates of nothing, or lose those of
    cfg.init_from.
    """
    if cfg.lora_rank and not cfg.init_from:
        raise ValueError(f"lora_rank {cfg.lora_rank}: a fresh initialisation has nothing to tune; "
                         "name the --out_dir of a trained run with --init_from")
    _, meta = ckpt.newest_meta(Path(cfg.init_from) / "ckpt") if cfg.init_from else (None, {})
    rank = meta.get("config", {}).get("lora_rank", 0)
    if rank and rank != cfg.lora_rank:
        raise ValueError(f"init_from {cfg.init_from!r}: has low-rank updates, which would be lost; "
                         f"set --lora_rank {rank}")


def load_checkpoint(out_dir, like, set_aside=False):
    """(step, tree) of the newest sound checkpoint of a run."""
    try:
        return ckpt.restore_newest(Path(out_dir) / "ckpt", like, say, set_aside)
    except (KeyError, TypeError) as e:
        raise ValueError(f"{e.args[0]}: start from --config {out_dir}/config.json, or name another "
                         "folder") from None


def first_state(cfg, programs, state, params, resumed):
    """(state, its origin): given state, given params, own checkpoint, init_from, fresh; the first
    that there is.
    """
    like, key = programs["state"], jax.random.key(cfg.seed)
    if state is not None:
        shardings = jax.tree.map(lambda x: x.sharding, like)
        return jax.device_put(state, shardings), "the given state"
    if params is not None:
        return programs["from_params"](key, params), "the given parameters"
    if resumed is not None:
        return load_checkpoint(cfg.out_dir, like, set_aside=True)[1], OWN
    if cfg.init_from:
        # Low-rank updates that it has not are new, on top of what was loaded.
        had = ckpt.newest_meta(Path(cfg.init_from) / "ckpt")[1]["arrays"]
        wanted = {n: x for n, x in like["params"].items()
                  if f"params/{n}" in had or ".lora_" not in n}
        _, loaded = load_checkpoint(cfg.init_from, {"params": wanted})
        return programs["from_params"](key, loaded["params"]), f"the parameters of {cfg.init_from}"
    return programs["init"](key), "a fresh initialisation"


@contextlib.contextmanager
def hold(cfg):
    """out_dir for this run alone, fit to write to. Raises ValueError when it is not, or when
    cfg.resume says that its run must not be touched.
    """
    out, found = Path(cfg.out_dir), ckpt.steps(Path(cfg.out_dir) / "ckpt")
    if cfg.resume == "never" and found:
        raise ValueError(f"resume never: {out} holds a run at step {found[-1]}; choose another "
                         "--out_dir, or delete it with --resume overwrite")
    if cfg.resume == "must" and not found:
        raise ValueError(f"resume must: {out} holds no checkpoint; is --out_dir right?")
    if cfg.init_from and not ckpt.steps(Path(cfg.init_from) / "ckpt"):
        raise ValueError(f"init_from {cfg.init_from!r}: holds no checkpoint; name another run's "
                         "--out_dir")
    if jax.process_index():
        yield
        return
    try:
        (out / "ckpt").mkdir(parents=True, exist_ok=True)
        lock = open(out / ".lock", "w")
    except OSError as e:
        raise ValueError(f"out_dir {cfg.out_dir!r}: cannot be written: {e.strerror}; choose "
                         "another") from None
    with lock:  # the system lets go of it when the process ends, however that is
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"out_dir {cfg.out_dir!r}: another run is writing to it; choose "
                             "another, or end that one") from None
        ckpt.clean(out / "ckpt")
        yield


def is_finished(cfg, step):
    """Whether nothing is left to do for a run at `step`: its last word was that all is done."""
    if (step or 0) != cfg.steps:
        return (step or 0) > cfg.steps
    with contextlib.suppress(OSError, ValueError, IndexError):
        last = json.loads((Path(cfg.out_dir) / "metrics.jsonl").read_text().splitlines()[-1])
        return last["event"] == "end" and last["reason"] == ALL_DONE.format(step)
    return False


# ---- what a run leaves

def plot(out_dir):
    """plot.png of training and held-out loss over steps, when matplotlib is installed and there is
    a line to draw.
    """
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    lines = (Path(out_dir) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for event, key, label, style in (("train", "loss", "training", "-"),
                                     ("eval", "val_loss", "held-out", "o-")):
        points = [(r["step"], r[key]) for r in rows if r["event"] == event]
        if points:
            axes.plot(*zip(*points), style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step (optimizer updates)", ylabel="loss (nats per token)",
             title=str(out_dir))
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
        figure.savefig(Path(out_dir) / "plot.png", dpi=120)
    plt.close(figure)


def flops_report(cfg, tokens_per_s, peak):
    """{"model_tflops_per_device", "mfu", "hfu"}: shares of the peak in [0, 1], None where it is not
    known; hfu counts what remat computes again.
    """
    flops, again, _ = model.flops_per_token(cfg, cfg.seq_len)
    scale = tokens_per_s / jax.device_count() / 1e12
    return {"model_tflops_per_device": flops * scale, "mfu": peak and flops * scale / peak,
            "hfu": peak and (flops + again) * scale / peak}


def memory_peak_bytes():
    """The most that a device of this process held, or on a CPU the process itself."""
    stats = jax.local_devices()[0].memory_stats()
    return (stats["peak_bytes_in_use"] if stats
            else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def evaluate(run, eval_step, params, stopped=lambda: False, metric_fn=None):
    """The means over the held-out set; None when stopped() came true on the way.

    metric_fn({name: [sum, count]}) gives further values to add.
    """
    cfg = run["cfg"]
    n = -(-data.n_sequences(run["val"], cfg.seq_len) // cfg.batch_size)
    batches = data.prefetch(batch_makers(run)[1], 0, min(cfg.eval_batches or n, n))
    totals = steplib.evaluate(eval_step, params, (batch for batch, _ in batches), stopped)
    if totals is None:
        return None
    loss, acc = (float(totals[name][0] / totals[name][1]) for name in ("loss", "acc"))
    row = {"val_loss": loss, "val_ppl": math.exp(min(loss, 700)), "val_acc": acc,
           "val_tokens": int(totals["loss"][1])}
    if run["val"]["bytes_per_token"]:
        row["val_bits_per_byte"] = loss / math.log(2) / run["val"]["bytes_per_token"]
    return row | (metric_fn(totals) if metric_fn else {})


def sample(run, params, step=0):
    """cfg.n_samples texts, each cfg.prompt and up to cfg.sample_tokens tokens more, cut at the end
    of a document.
    """
    cfg, tokenizer = run["cfg"], run["tokenizer"]
    start = np.asarray([tokenizer["end"], *tokenizer["encode"](cfg.prompt)], np.int32)
    tokens = np.tile(start, (cfg.n_samples, 1))
    lengths = np.full(cfg.n_samples, len(start), np.int32)
    key = jax.random.fold_in(jax.random.key(cfg.seed), step)
    with jax.set_mesh(run["mesh"]):
        new = model.generate(params, tokens, lengths, cfg, key, cfg.sample_tokens)
    new = multihost_utils.process_allgather(new, tiled=True)
    ends = [np.append(np.flatnonzero(row == tokenizer["end"]), len(row))[0] for row in new]
    return [cfg.prompt + tokenizer["decode"](row[:n]) for row, n in zip(new, ends)]


@contextlib.contextmanager
def profiling(cfg):
    """Hooks that trace updates first:last of cfg.profile into out_dir/profile: time as an XPlane
    (`jax.profiler.ProfileData`, Perfetto, XProf), memory as pprof; on a failure memory again.
    """
    first, last = config.span(cfg.profile)
    folder, step, tracing = Path(cfg.out_dir) / "profile", 0, False

    def stop():
        nonlocal tracing
        if tracing:
            tracing = False
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(folder / f"memory_{min(step, last)}.prof")
            say(f"traced updates {first} to {min(step, last)} into {folder}")

    def hook(event, value):
        nonlocal step, tracing
        if event == "load":
            step = int(value["step"])
        elif event == "data":
            step += 1
            if first <= step <= last and not tracing:
                tracing = True
                jax.profiler.start_trace(folder)
        elif event == "stop" or event == "step" and value["step"] >= last:
            stop()

    try:
        yield (hook,) if first else ()
    except Exception:
        if first:
            folder.mkdir(exist_ok=True)
            jax.profiler.save_device_memory_profile(folder / "memory_at_failure.prof")
        raise
    finally:
        stop()


# ---- the loop

def agree(cfg, step, caught):
    """The signal that all processes stop for, or None. Several processes ask each other only at log
    points.
    """
    if jax.process_count() == 1:
        return caught[0] if caught else None
    if step % (cfg.log_every or 10):
        return None
    codes = multihost_utils.process_allgather(np.array(signal.Signals[caught[0]] if caught else 0))
    return signal.Signals(int(codes.max())).name if codes.any() else None


def why_stop(cfg, step, signal_name, finite):
    """The one answer to whether to stop before the next batch: (reason in words, exit code), or
    None to go on.
    """
    if not finite and cfg.nan == "stop":
        return (f"a loss or gradient is not finite near step {step}; the last good parameters are "
                "saved"), 1
    if signal_name:
        return signal_name, 0
    if step >= cfg.steps:
        return ALL_DONE.format(cfg.steps), 0
    return None


def versions():
    return {"python": platform.python_version()} | {m.__name__: m.__version__ for m in (jax, np)}


def describe(run, programs, origin, compile_s):
    """The start event, less step and identity: what runs, and on what."""
    cfg = run["cfg"]
    flops, _, formula = model.flops_per_token(cfg, cfg.seq_len)
    return {
        "origin": origin, "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(), "mesh": dict(run["mesh"].shape),
        "dtype": cfg.dtype, "attention": cfg.attention,
        "n_params": sum(math.prod(shape) for shape, *_ in run["table"].values()),
        "tokens_per_step": cfg.batch_size * cfg.seq_len,
        "flops_per_token": flops, "flops_formula": formula,
        "compile_s": compile_s, "memory_bytes_per_device": programs["memory"],
    }


def headline(run):
    """What would run, and on what."""
    cfg, mesh = run["cfg"], run["mesh"]
    n_params, n_trained = (sum(math.prod(shape) for shape, *_, trained in run["table"].values()
                               if trained or not only) for only in (False, True))
    trained = f" ({n_trained / 1e6:,.2f}M trained)" if n_trained < n_params else ""
    return (f"{n_params / 1e6:,.2f}M parameters{trained} on {mesh.size} x "
            f"{mesh.devices.flat[0].device_kind}, mesh "
            + " ".join(f"{a}={n}" for a, n in mesh.shape.items())
            + f"; {cfg.dtype}, attention {cfg.attention}")


def announce(run, row):
    memory = row["memory_bytes_per_device"].get("total", 0) / 2**20
    say(f"{headline(run)}; {memory:.0f} MiB a device")
    if not steplib.peaks(jax.devices()[0].device_kind)[0]:
        say(f"no peak rate is known for {row['devices']}: metrics have TFLOP/s, and no MFU")
    say(f"compiled in {row['compile_s']:.1f} s; step {row['step']} of {row['config']['steps']}, "
        f"from {row['origin']}")


def show(row, bar):
    """One logged step, on the bar; as a plain line where there is no terminal."""
    words = f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  {row['tokens_per_s']:,.0f} tok/s"
    bar.set_postfix_str(words, refresh=False)
    if bar.disable:
        say(f"step {row['step']:>6}  {words}  data wait {1000 * row['data_wait_s']:.1f} ms")


def begin(run, hooks, state, params):
    """Folder, checkpoint, compilation, first state and log: (run with what the loop needs, state).

    The state is None when there is nothing left to do.
    """
    cfg = run["cfg"]
    out, afresh = Path(cfg.out_dir), cfg.resume == "overwrite"
    resumed, meta = (None, {}) if afresh else ckpt.newest_meta(out / "ckpt")
    if meta:
        check_same_run(run, meta)
    if state is None and params is None and is_finished(cfg, resumed):
        say(f"{out} is finished: at step {resumed}, with --steps {cfg.steps}. To go further: "
            f"--steps {2 * resumed}. To start afresh: --resume overwrite, or another --out_dir.")
        return run | {"step": resumed}, None
    if state is params is resumed is None:
        check_low_rank(cfg)
    compiling = time.perf_counter()
    programs = steplib.compile_steps(*program_parts(run), partial(call, hooks))
    compile_s = time.perf_counter() - compiling
    state, origin = first_state(cfg, programs, state, params, resumed)
    state, step = call(hooks, "load", state), int(state["step"])
    if afresh and jax.process_index() == 0:  # only now that nothing else can go wrong
        shutil.rmtree(out / "ckpt")
        for name in ("metrics.jsonl", "plot.png"):
            (out / name).unlink(missing_ok=True)
    meta = {"config": dataclasses.asdict(cfg), "versions": versions(),
            "run_id": meta.get("run_id", uuid.uuid4().hex[:8])}
    write, done = ckpt.open_log(out / "metrics.jsonl", step)
    emit = lambda event, row, hook=None: write(event, call(hooks, hook or event, row))
    if jax.process_index() == 0:
        (out / "config.json").write_text(config.to_json(cfg))
    announce(run, emit("start", {"step": step} | describe(run, programs, origin, compile_s) | meta))
    last = dict.fromkeys(done, step) | ({"save": step} if origin == OWN else {})
    return run | {"programs": programs, "meta": meta, "emit": emit, "step": step, "last": last,
                  "saving": None, "results": {}}, state


def save_state(run, state, step):
    """Start a checkpoint; its Future. meta.json says where the run stands in its data, and under
    what config.
    """
    cfg = run["cfg"]
    epoch, place = divmod(step * cfg.batch_size, data.n_sequences(run["train"], cfg.seq_len))
    meta = run["meta"] | {"data": {"fingerprint": data.fingerprint(run["train"]),
                                   "epoch": epoch, "sequence": place}}
    began = time.perf_counter()
    future = ckpt.save(Path(cfg.out_dir) / "ckpt", step, state, meta, cfg.keep)
    run["emit"]("save", {"step": step, "blocked_s": time.perf_counter() - began})
    return future


def eval_state(run, state, step, stopped):
    """One evaluation, logged and said; its row, or {} when stopped() on the way."""
    began = time.perf_counter()
    row = evaluate(run, run["programs"]["eval_step"], state["params"], stopped)
    if row is None:
        return {}
    row = run["emit"]("eval", {"step": step} | row | {"eval_s": time.perf_counter() - began})
    bits = f"  {row['val_bits_per_byte']:.3f} bits/byte" if "val_bits_per_byte" in row else ""
    say(f"step {step:>6}  held-out loss {row['val_loss']:.4f}  accuracy {row['val_acc']:.3f}{bits}")
    return row


def show_texts(texts):
    for text in texts:
        say("-" * 8, "sample", "-" * 8)
        say(text)
    say("-" * 24)


def preview(run, state, step):
    """Print samples. What goes wrong in one is told, and training goes on."""
    try:
        texts, fault = sample(run, state["params"], step), None
    except Exception as e:  # a preview is never worth a run
        texts, fault = [], f"{type(e).__name__}: {e}"
        say(f"step {step:>6}  no sample: {fault}")
    show_texts(texts)
    run["emit"]("sample", {"step": step, "texts": texts} | ({"fault": fault} if fault else {}))


def main(cfg, hooks=(), state=None, params=None):
    """Do what cfg.mode says; a summary dict with at least "step", "reason" and "exit_code".

    hooks: functions hook(event, value), called with loss_fn, optimizer and train_step before these
    are compiled, and then with load, start, data, step, log, save, eval, sample, stop and end; what
    one returns, unless None, replaces the value. state, params: start from these rather than from
    disk.
    """
    began = time.perf_counter()
    if cfg.coordinator:  # before anything touches a device
        where = cfg.coordinator, cfg.n_processes, cfg.process_id
        jax.distributed.initialize(*() if cfg.coordinator == "auto" else where)
    if cfg.plan or cfg.plan_sweep or cfg.mode == "plan":
        return plan(cfg)
    if cfg.mode != "train":
        return look(cfg)
    with listen() as caught:
        run = setup(cfg)
        with hold(run["cfg"]), profiling(run["cfg"]) as profile_hooks:
            hooks = (*hooks, *profile_hooks)
            run, state = begin(run, hooks, state, params)
            if state is None:
                return {"step": run["step"], "reason": "finished before", "exit_code": 0}
            return loop(run, hooks, state, caught, began)


def make_reporter(run, hooks, began):
    """(report(step, metrics, waited_s) -> whether they are finite, rest(), close()).

    report waits for the metrics and, at a log point, writes them with the rates since the last. A
    step lasts from the end of the one before, or of the last rest(), to its own.
    """
    cfg, n_train = run["cfg"], data.n_sequences(run["train"], run["cfg"].seq_len)
    tokens = cfg.batch_size * cfg.seq_len
    peak = steplib.peaks(jax.devices()[0].device_kind)[0]
    mark, n, step_s, wait_s, all_s = time.perf_counter(), 0, 0.0, 0.0, 0.0
    bar = tqdm(total=cfg.steps, initial=run["step"], unit="step",
               disable=not sys.stderr.isatty() or jax.process_index() > 0)

    def report(step, metrics, waited_s):
        nonlocal mark, n, step_s, wait_s, all_s
        watched = metrics.pop("watch", {})  # stays on the device until it is logged
        row = {"step": step} | {k: float(v) for k, v in jax.device_get(metrics).items()}
        took, mark = time.perf_counter() - mark, time.perf_counter()
        n, step_s, wait_s, all_s = n + 1, step_s + took, wait_s + waited_s, all_s + took
        bar.update()
        finite = bool(row.pop("finite"))
        row = call(hooks, "step", row)
        if not finite and cfg.nan == "raise":
            raise FloatingPointError(f"step {step}: the loss or a gradient is not finite: {row}")
        if not finite or (cfg.log_every and step % cfg.log_every == 0):
            row |= {"tokens": step * tokens, "epoch": step * cfg.batch_size / n_train,
                    "tokens_per_s": n * tokens / step_s, "step_s": step_s / n,
                    "data_wait_s": wait_s / n, "goodput": all_s / (mark - began)}
            row |= flops_report(cfg, row["tokens_per_s"], peak)
            if watched:
                row["watch"] = jax.tree.map(np.ndarray.tolist, jax.device_get(watched))
            row |= {"ppl": math.exp(min(row["loss"], 700)),
                    "memory_peak_bytes": memory_peak_bytes()}
            run["results"]["loss"] = row["loss"]
            show(run["emit"]("train", row, "log"), bar)
            n, step_s, wait_s = 0, 0.0, 0.0
        return finite

    def rest():
        nonlocal mark
        mark = time.perf_counter()

    return report, rest, bar.close


def due(run, step, forced=()):
    """Events due at this step, but those done at it already. Saved first, so that nothing after it
    can lose the state.
    """
    cfg, last = run["cfg"], run["last"]
    every = {"save": cfg.save_every, "eval": cfg.eval_every, "sample": cfg.sample_every}
    return [event for event, n in every.items()
            if (event in forced or n and step % n == 0) and last.get(event) != step]


def milestone(run, state, step, events, stopped):
    """Save, evaluate and sample, as `events` says; no more than save once stopped()."""
    for event in events:
        run["last"][event] = step
        if event == "save":
            ckpt.wait(run["saving"])
            run["saving"] = save_state(run, state, step)
        elif event == "eval" and run["val"] and not stopped():
            run["results"].update(eval_state(run, state, step, stopped))
        elif event == "sample" and run["cfg"].sample_tokens and not stopped():
            preview(run, state, step)


def loop(run, hooks, state, caught, began):
    """Train to cfg.steps or until why_stop says so; the summary."""
    cfg, train_step, step = run["cfg"], run["programs"]["train_step"], run["step"]
    stopped = lambda: jax.process_count() == 1 and bool(caught)
    report, rest, close = make_reporter(run, hooks, began)
    batches = data.prefetch(batch_makers(run)[0], step, cfg.steps)
    pending, finite = None, True
    if step:  # what a kill cut off at the step that this run goes on from
        milestone(run, state, step, due(run, step), stopped)
        rest()
    while not (stop := why_stop(cfg, step, agree(cfg, step, caught), finite)):
        batch, waited_s = next(batches)
        batch = call(hooks, "data", batch)
        with jax.transfer_guard("disallow"):
            state, metrics = train_step(state, batch)
        step += 1
        if pending:  # the step before is read while this one runs
            finite &= report(*pending)
        pending = (step, metrics, waited_s)
        if events := due(run, step):
            finite &= report(*pending)
            pending = None
            milestone(run, state, step, events, stopped)
            rest()
        if run["saving"] and run["saving"].done():
            ckpt.wait(run["saving"])  # raises what went wrong with it
    if pending:
        finite &= report(*pending)
    batches.close()
    forced = ("save", "eval", "sample") if step >= cfg.steps else ("save",)
    milestone(run, state, step, due(run, step, forced), stopped)
    ckpt.wait(run["saving"])
    close()
    return finish(run, step, why_stop(cfg, step, agree(cfg, 0, caught), finite) or stop, began)


def finish(run, step, stop, began):
    """Log, draw and say the end; the summary."""
    (reason, exit_code), cfg, emit, results = stop, run["cfg"], run["emit"], run["results"]
    row = emit("stop", {"step": step, "reason": reason})
    wall_s = time.perf_counter() - began
    summary = emit("end", row | {"exit_code": exit_code, "wall_s": wall_s} | results)
    if jax.process_index() == 0:
        plot(cfg.out_dir)
    words = [f"step {step}"]
    if "val_loss" in results:
        words.append(f"held-out loss {results['val_loss']:.4f} nats/token")
    if "val_bits_per_byte" in results:
        words.append(f"{results['val_bits_per_byte']:.3f} bits/byte")
    if "loss" in results:
        words.append(f"training loss {results['loss']:.4f}")
    say(f"done: {reason}; {', '.join(words)}, {wall_s:.0f} s, saved in {cfg.out_dir}/ckpt")
    if not exit_code and reason != ALL_DONE.format(cfg.steps):
        say("the same command goes on from here")
    return summary


def look(cfg, metric_fn=None):
    """Evaluate or sample the newest checkpoint of cfg.out_dir, as cfg.mode says; the summary.

    What cfg leaves at its default, of model, data and course, is as the checkpoint was trained.
    """
    root = Path(cfg.out_dir) / "ckpt"
    _, meta = ckpt.newest_meta(root)
    if not meta:
        raise ValueError(f"mode {cfg.mode}: {root} holds no checkpoint; train first, or set "
                         "--out_dir")
    saved, default = config.from_json(json.dumps(meta["config"]), str(root)), config.Config()
    names = [n for n in config.SHAPE + config.COURSE if getattr(cfg, n) == getattr(default, n)]
    run = setup(dataclasses.replace(cfg, **{n: getattr(saved, n) for n in names}))
    cfg = run["cfg"]
    with jax.set_mesh(run["mesh"]):
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))
    place = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(run["mesh"], spec))
    params = {name: place(x, run["table"][name][1]) for name, x in shapes.items()}
    step, loaded = load_checkpoint(cfg.out_dir, {"params": params})
    params, summary = loaded["params"], {"step": step, "reason": cfg.mode, "exit_code": 0}
    if cfg.mode == "sample":
        texts = sample(run, params)
        show_texts(texts)
        return summary | {"texts": texts}
    if not run["val"]:
        raise ValueError(f"mode eval: val_frac {cfg.val_frac} holds nothing out; give --val_data")
    summary |= evaluate(
        run, steplib.compile_steps(*program_parts(run))["eval_step"], params, metric_fn=metric_fn)
    say(json.dumps(summary))
    return summary


# ---- before a run: would it fit, and what would it send?

def plan_devices(cfg):
    """The devices of cfg.slices TPU slices cfg.plan, none of which need be here, or else those at
    hand.
    """
    if not cfg.plan:
        return jax.devices()
    if not importlib.util.find_spec("libtpu"):
        raise ValueError(f"plan {cfg.plan!r}: the TPU compiler is missing: pip install 'jax[tpu]'")
    # libtpu, look neither for the machine that you are on, nor for others that plan.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
                      TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_HOSTNAMES="localhost")
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies
    # The two cores of a v4 chip are one device, as they are of a v5p chip unasked.
    cores = {"chip_config_name": "megacore"} if cfg.plan.startswith("v4") else {}
    try:
        return topologies.get_topology_desc(
            cfg.plan, platform="tpu", num_slices=cfg.slices, **cores).devices
    except (RuntimeError, ValueError) as e:
        raise ValueError(f"plan {cfg.plan!r}: no such TPU slice ({str(e).splitlines()[0]}); legal "
                         "are names like v5p:8x8x8, v6e:16x16, v5e:4x4") from None


def first_remedy(cfg, mesh, took, memory_gib):
    """The first thing to change about a step that needs more memory than a device has."""
    rows = math.prod(mesh.shape[a] for a in ("dp", "fsdp", "ep"))
    tiles = math.gcd(16, cfg.seq_len // mesh.shape["sp"])
    if took["bytes"]["parameters"] + took["bytes"]["moments"] > memory_gib * 2**30:
        return "parameters and moments alone are too much: more devices along fsdp or tp"
    if cfg.remat == "none":
        return "--remat full"
    if cfg.batch_size // rows % (2 * cfg.micro_batches) == 0:
        return f"--micro_batches {2 * cfg.micro_batches}"
    if cfg.remat != "offload":
        return "--remat offload"
    if cfg.mlp_tiles < tiles and not cfg.n_experts:
        return f"--mlp_tiles {tiles}"
    if cfg.moments_on == "device":
        return "--moments_on host"
    return "a longer tp or sp, or a shorter seq_len"


def plan(cfg):
    """Compile the very update that would run, allocate nothing, and say what it takes; the summary.
    With cfg.plan_sweep, the same for as many meshes, in one table.
    """
    run = setup(cfg, plan_devices(cfg))
    if cfg.plan_sweep:
        return sweep(run)
    say(headline(run) + "; for each device:")
    took = estimate(run)
    for name, amount in took["flop"].items():
        say(f"  {amount / 1e12:10,.4g} TFLOP  {name}")
    for name, n_bytes in took["bytes"].items():
        say(f"  {n_bytes / 2**30:10,.4g} GiB  {name}")
    for (name, axes), (count, n_bytes) in took["collectives"].items():
        say(f"  {n_bytes / 2**30:10,.4g} GiB  sent by {count} {name} over {axes}")
    if "fault" in took:
        say(took["fault"])
    else:
        say(f"compiled in {took['compile_s']:.0f} s")
    if "seconds" in took:
        (best, best_mfu), (worst, worst_mfu) = zip(took["step_s"], took["mfu"])
        say("  a step: " + ", ".join(f"{k} {v:.4g} s" for k, v in took["seconds"].items())
            + f"; {best:.4g} s (MFU {best_mfu:.1%}) if all overlap, {worst:.4g} s "
            f"(MFU {worst_mfu:.1%}) if none do")
    _, memory_gib, *_ = steplib.peaks(run["mesh"].devices.flat[0].device_kind)
    say("no memory size is known for this device" if not memory_gib
        else f"fits in {memory_gib} GiB" if took["fits"]
        else f"does not fit in {memory_gib} GiB; first to change: "
        + first_remedy(run["cfg"], run["mesh"], took, memory_gib))
    return took | {"step": 0, "reason": "plan", "exit_code": 0 if took["fits"] else 1}


def estimate(run):
    """steplib.requirements of the update of `run`, and what they imply: {"flop" by kind, "seconds"
    by what bounds them, "step_s" and "mfu": (if all overlap, if none do), "fits"}.
    """
    cfg, mesh = run["cfg"], run["mesh"]
    state, lowered, _ = steplib.lower_steps(*program_parts(run))
    took = steplib.requirements(state, lowered["train_step"](), mesh, cfg.slices)
    flops, again, formula = model.flops_per_token(cfg, cfg.seq_len)
    tokens = cfg.batch_size * cfg.seq_len / mesh.size
    took["flop"] = {f"the model's: {formula}": flops * tokens, "remat's": again * tokens}
    return took | steplib.implied(took, mesh.devices.flat[0].device_kind)


def sweep(run):
    """One line for each of the cfg.plan_sweep meshes that promise most, by the time of a step."""
    cfg, devices = run["cfg"], list(run["mesh"].devices.flat)
    candidates = []
    for sizes in steplib.factorisations(len(devices)):
        other = dataclasses.replace(cfg, **dict(zip(steplib.AXES, sizes)))
        with contextlib.suppress(ValueError):  # this mesh and this model do not fit
            config.validate(other, len(devices))
            cost = steplib.theory(other, run["table"], sizes)
            if not steplib.check_shapes(run["table"], cost["mesh"]):
                candidates.append((sum(cost["sent"].values()), cost["state_bytes"], other))
    say(headline(run) + f"; {len(candidates)} meshes are legal")
    _, memory_gib, *_ = steplib.peaks(devices[0].device_kind)
    # What cannot even hold its state comes last, and then what sends most.
    candidates.sort(key=lambda c: (c[1] > (memory_gib or math.inf) * 2**30, *c[:2]))
    rows = []
    for *_, other in candidates[:cfg.plan_sweep]:
        took = estimate(run | {"cfg": other, "mesh": steplib.make_mesh(other, devices)})
        # The time of a step where none overlap; where no rates are known, what is sent.
        rows.append((not took["fits"], took.get("step_s", (took["sent_bytes"],))[-1], other, took))
    rows.sort(key=lambda row: row[:2])
    columns = lambda cfg: "  ".join(f"{getattr(cfg, a) if cfg else a:>4}" for a in steplib.AXES)
    say(columns(None) + "      GiB  sent GiB  step s: if all overlap, if none do")
    for unfit, _, other, took in rows:
        in_all, sent = (n / 2**30 for n in (
            took["bytes"].get("in all", math.nan), took["sent_bytes"]))
        times = "  does not fit" if unfit else "".join(f"  {t:.4g}" for t in took.get("step_s", ()))
        say(f"{columns(other)}  {in_all:7.4g}  {sent:8.4g}{times}")
    return {"step": 0, "reason": "plan", "exit_code": 0, "meshes": rows}


def cli(argv):
    """Run a command line; the exit code. A fault of the user's is told in a sentence, any other is
    raised.
    """
    try:
        return main(config.parse(argv))["exit_code"]
    except ValueError as e:
        frame = e.__traceback__
        while frame.tb_next:
            frame = frame.tb_next
        if Path(frame.tb_frame.f_code.co_filename).parent != Path(__file__).resolve().parent:
            raise
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while evaluating or sampling a finished run
        print("SIGINT: ended; nothing was changed", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
