# SPDX-License-Identifier: Apache-2.0
"""Check that this machine computes what it should, and measure it.

    python tests/check.py                        everything that fits into --minutes 10
    python tests/check.py --only numbers         one part
    python tests/check.py --only speed/rates     one item

For new hardware, a new driver or a new JAX. Each check prints PASS or FAIL with a figure and its
bound. An item is a process of its own with a time limit, so that a crash or a hang fails that item
alone. The report is DIR/check.md, with a row for tests/RESULTS.md, and DIR/check.json; DIR is
--out_dir. Both are rewritten after each record. The exit code is 0, 1 if a check failed or none was
made, 2 for an invalid flag, or 130 after Ctrl-C.
"""
import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import train  # isort: skip  sets the allocator before JAX starts its threads
import jax
import jax.numpy as jnp
import numpy as np
import optax

from train import steplib

PARTS = {
    "speed": "tokens/s and MFU of named shapes, against the plan",
    "memory": "peak memory of these shapes, against the plan",
    "numbers": "loss, gradients and parameters of a step, against float64 on the CPU",
    "determinism": "thousands of calls of one step, and two processes, bit for bit",
    "resume": "a run that is killed and resumed, bit for bit",
    "mesh": "the losses of one device, on all devices along each axis",
}

# Flags of train.py.
CPU_SHAPES = {
    "character-12x256": dict(n_layers=6, d_model=384, n_heads=6, d_ff=1024, vocab_size=65,
                             seq_len=256, batch_size=12, optimizer="adamw"),
    "default-model": {},
}
SHAPES = {
    "gpt2-124m-60x1024": dict(config="gpt2-124m", batch_size=60, grad_accum_steps=1),
    "1.56b-16x1024-remat-named": dict(
        d_model=1600, n_layers=48, n_heads=25, d_ff=4288, vocab_size=50304, seq_len=1024,
        optimizer="adamw", batch_size=16, remat="named"),
    "llama-8b-8-layers-2x4096": dict(
        config="llama-8b", n_layers=8, batch_size=2, grad_accum_steps=1, seq_len=4096,
        remat="named"),
    "gpt2-124m-preset": dict(config="gpt2-124m"),
    "gpt2-124m-deterministic": dict(
        config="gpt2-124m", batch_size=60, grad_accum_steps=1, deterministic=True),
    "llama-8b-2-layers-1x65536": dict(
        config="llama-8b", n_layers=2, batch_size=1, grad_accum_steps=1, seq_len=65536,
        remat="full", mlp_tiles=8),
    "gpt2-124m-13-layers-60x1024": dict(
        config="gpt2-124m", n_layers=13, batch_size=60, grad_accum_steps=1),
}


# ---- the items

# Expected seconds of each kind of item: on 2 cores of a CPU, and on an accelerator.
EXPECTED_S = {
    "make_references": (30, 30),
    "known_forms": (15, 25),
    "determinism": (40, 50),
    "numbers": (25, 60),
    "numbers_in_tf32": (25, 30),
    "numbers_by_remat": (25, 60),
    "resume": (40, 60),
    "mesh": (40, 60),
    "no_mesh": (1, 1),
    "rates": (15, 20),
    "speed": (40, 75),
}
REFERENCE = "numbers/reference"


def list_items(machine):
    """The items to run on a machine, the most telling first. machine: the figures of `look`.

    An item has "part"; "name"; "call", a function of this file and its arguments; "expected_s";
    "limit_s", the seconds after which it is stopped; "after", the name of the item whose results it
    needs, or ""; and "env", the environment variables to set.
    """
    on_cpu = machine["platform"] == "cpu"
    on_gpu = machine["platform"] in ("cuda", "old cuda")
    items = []

    def add(part, name, function, *args, after="", **env):
        seconds = EXPECTED_S[function][0 if on_cpu else 1]
        items.append({"part": part, "name": f"{part}/{name}", "call": (function, *args),
                      "after": after, "expected_s": seconds, "limit_s": max(120, 4 * seconds),
                      "env": env})

    def add_numbers(function, pairs, suffix=""):
        for dtype, attention in pairs:
            add("numbers", f"{dtype}-{attention}{suffix}", function, dtype, attention,
                after=REFERENCE)

    first_shape, *other_shapes = CPU_SHAPES if on_cpu else SHAPES
    kernels = kernels_of(machine)

    # The default dtype and attention kernel; one step, again and again; one speed.
    add("numbers", "reference", "make_references", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1")
    add("numbers", "known-forms", "known_forms")
    add_numbers("numbers", kernels[:1])
    if on_gpu:
        add("determinism", "deterministic", "determinism", "deterministic")
        add("determinism", "default", "determinism", "default")
    elif on_cpu:
        for n_threads in sorted({1, min(2, machine["threads"]), machine["threads"]}):
            add("determinism", f"threads-{n_threads}", "determinism", f"threads={n_threads}")
    else:
        add("determinism", "step", "determinism", "step")
    add("speed", "rates", "rates")
    add("speed", first_shape, "speed", first_shape)

    # A resumed run, meshes, the other dtypes and kernels, the other shapes.
    add("resume", "killed", "resume")
    if machine["n_devices"] > 1:
        add("mesh", f"{machine['n_devices']}-devices", "mesh")
    elif on_cpu:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
        add("mesh", "4-devices-of-one-cpu", "mesh", XLA_FLAGS=flags)
    else:
        add("mesh", "one-device", "no_mesh")
    add_numbers("numbers", kernels[1:])
    if machine["platform"] == "cuda":
        add("numbers", "float32-xla-tf32", "numbers_in_tf32", "float32", "xla", after=REFERENCE,
            JAX_DEFAULT_MATMUL_PRECISION="default")
    for shape in other_shapes:
        add("speed", shape, "speed", shape)
    add_numbers("numbers_by_remat", kernels, "-remat")
    return items


def kernels_of(machine):
    """The pairs (dtype, attention kernel) that a platform offers, the default first."""
    pairs = {
        "cuda": [("bfloat16", "cudnn"), ("float32", "xla"), ("bfloat16", "xla"),
                 ("float16", "cudnn")],
        "old cuda": [("float16", "xla"), ("float32", "xla")],
        "tpu": [("bfloat16", "pallas"), ("float32", "xla"), ("bfloat16", "xla")],
    }.get(machine["platform"])
    if pairs is None:
        pairs = [("float32", "xla"), ("mixed", "xla"), ("bfloat16", "xla"), ("float16", "xla")]
        pairs.sort(key=lambda pair: pair[0] != machine["default_dtype"])
    return pairs


def choose(items, words):
    """The items of these parts or with these names, and the items that they need.

    Raises ValueError for a word that is neither.
    """
    if not words:
        return items
    chosen = []
    for word in words:
        # The speed of a shape and its peak memory are measured together.
        found = [item for item in items
                 if word in (item["part"], item["name"])
                 or (word == "memory" and item["call"][0] == "speed")]
        if not found:
            names = ", ".join(item["name"] for item in items)
            raise ValueError(f"--only {word}: no such part or item on this machine; the parts are "
                             f"{', '.join(PARTS)}; the items are {names}")
        chosen += found
    needed = [item["after"] for item in chosen]
    return [item for item in items if item in chosen or item["name"] in needed]


# ---- the command

def positive(text):
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0")
    return float(text)


def main():
    """Run the items, print each record, and write the report. Returns the exit code."""
    parts = "\n".join(f"  {part}: {text}" for part, text in PARTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"parts:\n{parts}")
    parser.add_argument("--minutes", type=positive, default=10,
                        help="end after this time: items that do not fit are skipped")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME",
                        help="run these parts or items, and what they need")
    parser.add_argument("--limit", type=positive, metavar="SECONDS",
                        help="time limit of each item, instead of its own and of --minutes")
    parser.add_argument("--out_dir", default="out/check", help="folder of the report")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)  # one item, in this process
    args = parser.parse_args()
    if args.run:
        name, *item_args = args.run
        for each in globals()[name](*item_args):
            print(json.dumps(each), flush=True)
        return 0

    machine = look_at_machine()
    print(describe(machine), flush=True)
    try:
        items = choose(list_items(machine), args.only)
    except ValueError as e:
        parser.error(str(e))

    # Ctrl-C and SIGTERM end the running item and leave a report.
    def stop(number, frame):
        raise SystemExit(128 + number)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    out_dir = Path(args.out_dir).absolute()
    (out_dir / "logs").mkdir(parents=True, exist_ok=True)
    print(f"{len(items)} items, the report grows in {out_dir / 'check.md'}", flush=True)
    with tempfile.TemporaryDirectory(
            dir=out_dir, prefix="scratch-", ignore_cleanup_errors=True) as scratch:
        began = time.monotonic()
        context = {"began": began, "deadline": began + 60 * args.minutes, "limit_s": args.limit,
                   "out_dir": out_dir, "scratch": scratch, "machine": machine, "records": []}
        if args.limit:
            context["deadline"] = math.inf
        try:
            for item in items:
                run_item(item, context)
        finally:
            report = write_report(context)
            print(f"{summary(context['records'])}; report: {report}", flush=True)
    found = {each["status"] for each in context["records"]}
    if not found & {"PASS", "INFO", "FAIL"}:
        print("nothing was checked", flush=True)
        return 1
    return int("FAIL" in found)


def run_item(item, context):
    """Run an item in a process of its own, at most to its limit. Add each record when it is
    printed, and one if the process fails.
    """
    began = time.monotonic()
    left_s = context["deadline"] - began
    unmade = [each["item"] for each in context["records"] if each["status"] in ("FAIL", "SKIP")]
    if item["expected_s"] > left_s:
        reason = f"takes about {item['expected_s']} s, and less time was left"
        return add_record(item, record("SKIP", "all", with_command(reason, item)), context)
    if item["after"] in unmade:
        reason = f"needs {item['after']}, which did not end well"
        return add_record(item, record("SKIP", "all", with_command(reason, item)), context)

    print_line(context, f"      {item['name']} started")
    log = context["out_dir"] / "logs" / f"{item['name'].replace('/', '-')}.log"
    env = os.environ | item["env"]
    env |= {"CHECK_SCRATCH": context["scratch"]}
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, __file__, "--run", *item["call"]], env=env, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)
    limit_s = context["limit_s"] or item["limit_s"]
    timer = threading.Timer(min(limit_s, left_s), kill, [process])
    timer.start()
    n_records = 0
    try:
        for line in process.stdout:
            if line.startswith('{"status": '):  # packages print too
                add_record(item, json.loads(line), context)
                n_records += 1
        code = process.wait()
    finally:
        timer.cancel()
        kill(process)  # also what it has started

    seconds = time.monotonic() - began
    if seconds >= left_s:
        reason = f"not finished in the time that was left; see {log}"
        add_record(item, record("SKIP", "all", with_command(reason, item)), context)
    elif code or not n_records:
        reason = f"stopped after {limit_s:.0f} s"
        if seconds < limit_s:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = f"ended with exit code {code}: {lines[-1][:300] if lines else ''}"
        failure = record("FAIL", "all", with_command(f"{reason}; see {log}", item))
        add_record(item, failure, context)


def kill(process):
    """Kill a process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def with_command(text, item):
    """A text with the command that runs an item alone, with enough time."""
    folder = f"out/check-{item['name'].replace('/', '-')}"
    return (f"{text}; alone: python tests/check.py --only {item['name']} "
            f"--limit {2 * item['limit_s']:.0f} --out_dir {folder}")


# ---- records and the report

def record(status, name, text, **figures):
    """A record. status: PASS, FAIL, INFO for a figure without a bound, or SKIP."""
    return {"status": status, "name": name, "text": text, "figures": figures}


def checked(name, value, bound, text):
    """The record of a check: it passes if value <= bound. NaN fails."""
    status = "PASS" if value <= bound else "FAIL"
    return record(status, name, f"{text} {value:.2g} (at most {bound:g})", value=value, bound=bound)


def together(name, records):
    """Several checks as one record, which passes if all of them do."""
    statuses = {each["status"] for each in records}
    status = "FAIL" if "FAIL" in statuses else "PASS"
    text = ", ".join(each["text"] for each in records)
    return record(status, name, text, checks=records)


def add_record(item, new, context):
    """Print a record, and rewrite the report with it."""
    new = {"part": item["part"], "item": item["name"]} | new
    context["records"].append(new)
    print_line(context, f"{new['status']}  {new['item']}, {new['name']}: {new['text']}")
    write_report(context)


def print_line(context, text):
    """Print a line after the time since the launch."""
    seconds = int(time.monotonic() - context["began"])
    print(f"[{seconds // 60:2d}:{seconds % 60:02d}] {text}", flush=True)


def summary(records):
    """The number of records of each status, as one line."""
    counts = []
    words = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped", "INFO": "measured"}
    for status, word in words.items():
        counts.append(f"{sum(each['status'] == status for each in records)} {word}")
    return ", ".join(counts)


def write_report(context):
    """Write check.json and check.md; return the path of check.md."""
    machine, records, folder = context["machine"], context["records"], context["out_dir"]
    lines = ["# Check", "", f"{describe(machine)}.", ""]
    if machine["flags"]:
        lines += ["Flags: " + ", ".join(f"`{n}={v}`" for n, v in machine["flags"].items()), ""]
    lines += [f"{summary(records)}.", "", "| item | check | result | figures |",
              "| --- | --- | --- | --- |"]
    for each in records:
        text = each["text"].replace("|", "/").replace("\n", " ")
        lines.append(f"| {each['item']} | {each['name']} | {each['status']} | {text} |")

    # What failed, and the speeds, as a row.
    results = [summary(records)]
    failed = {each["item"]: None for each in records if each["status"] == "FAIL"}
    if failed:
        results.append("failed: " + ", ".join(failed))
    for each in records:
        if each["part"] == "speed" and each["status"] == "INFO":
            results.append(f"{each['item'].removeprefix('speed/')}, {each['name']}: {each['text']}")
    lines += ["", "A row for tests/RESULTS.md:", "",
              f"| {describe(machine)}; `tests/check.py`, {time.strftime('%Y-%m-%d')} | "
              f"{'; '.join(results)} |", ""]
    text = json.dumps({"machine": machine, "records": records}, indent=1)
    (folder / "check.json").write_text(text, encoding="utf-8")
    (folder / "check.md").write_text("\n".join(lines), encoding="utf-8")
    return folder / "check.md"


# ---- the machine

def look_at_machine():
    """The figures of `look` in a process of its own, so that this one leaves the devices to the
    items.
    """
    run = subprocess.run([sys.executable, __file__, "--run", "look"], cwd=ROOT, timeout=120,
                         text=True, capture_output=True)
    if run.returncode:
        sys.exit(f"JAX does not start on this machine: {run.stderr.strip()[-1000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])["figures"]


def look():
    """Describe devices, driver, versions and flags."""
    device = jax.devices()[0]
    platform = steplib.platform(device)
    versions = {}
    for package in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "optax",
                    "numpy", "tensorstore", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    flags = {name: value for name, value in os.environ.items()
             if name.startswith(("XLA_", "JAX_", "NCCL_", "LIBTPU_"))}
    figures = steplib.describe_machine(device)
    figures |= {
        "kind": device.device_kind,
        "platform": platform,
        "n_devices": len(jax.devices()),
        "default_dtype": steplib.choose_dtype("auto", platform),
        "python": sys.version.split()[0],
        "versions": versions,
        "flags": flags,
    }
    yield record("INFO", "machine", "", **figures)


def describe(machine):
    """The machine in one line."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    kind = machine["cpu"] if machine["platform"] == "cpu" else machine["kind"]
    line = f"{machine['n_devices']} x {kind}, {machine['threads']} threads"
    if machine["driver"]:
        line += f"; {machine['driver']}"
    return f"{line}; Python {machine['python']}, {versions}"


def cache_dir():
    """A folder for compiled programs that is empty at first: a check compiles all anew."""
    return str(Path(os.environ["CHECK_SCRATCH"], "cache"))


# ---- speed and memory

def rates():
    """Measure a large matrix product and a large copy: what this device reaches at all."""
    on_cpu = jax.devices()[0].platform == "cpu"
    n, dtype, n_bytes = (2048, jnp.float32, 2**28) if on_cpu else (8192, jnp.bfloat16, 2**32)
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (n, n), dtype) for key in keys)
    x = jax.random.normal(keys[0], (n_bytes // 4,), jnp.float32)
    tflops = 2 * n**3 / seconds_of(jax.jit(jnp.matmul), a, b) / 1e12
    gbps = 2 * n_bytes / seconds_of(jax.jit(lambda x: -x), x) / 1e9
    text = f"{n}^3 product in {a.dtype} {tflops:,.4g} TFLOP/s; copy {gbps:,.4g} GB/s"
    yield record("INFO", "rates", text, tflops=tflops, gbps=gbps)


def seconds_of(f, *args, n=10):
    """The median seconds of a call, of 10 calls in a row each."""
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(n):
            result = f(*args)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / n)
    return statistics.median(times)


def setup_of(shape):
    """train.setup_run of a shape on one device, with the config of a command line."""
    flags = dict((SHAPES | CPU_SHAPES)[shape])
    preset = train.config.PRESETS.get(flags.pop("config", None), {})
    cfg = train.config.Config(**(preset | flags), out_dir="", cache_dir=cache_dir(), fsdp=1,
                              sample_tokens=0, val_frac=0.0)
    return train.setup_run(cfg, devices=jax.devices()[:1])


def random_batch(setup):
    """A batch of random tokens: the speed of a dense model does not depend on them."""
    rng = np.random.default_rng(0)
    batch = {}
    for name, x in setup["batch"].items():
        values = rng.integers(0, setup["cfg"].vocab_size, x.shape).astype(x.dtype)
        batch[name] = jax.device_put(values, x.sharding)
    return batch


def speed(shape):
    """Measure the speed and the peak memory of a shape, and compare both with the plan."""
    setup = setup_of(shape)
    cfg, mesh = setup["cfg"], setup["mesh"]
    device = mesh.devices.flat[0]

    # Compile as a run does.
    began = time.perf_counter()
    lowered = steplib.lower_steps(*train.step_args(setup))
    update = lowered["train_step"]().compile()
    init = lowered["init"]().compile()
    compile_s = time.perf_counter() - began
    memory = steplib.memory_by_kind(lowered["state"], update)
    try:
        steplib.check_fits(memory, mesh)
    except MemoryError as e:
        yield record("SKIP", "speed", f"does not fit: {e.args[0]}")
        return

    batch = random_batch(setup)
    state = init(jax.random.key(0))
    lr = steplib.lr_at(0, cfg)

    # Time whole steps, without waiting between them.
    for _ in range(2):
        state, metrics = update(state, batch, lr)
    losses = [float(metrics["loss"])]
    began = time.perf_counter()
    state, metrics = update(state, batch, lr)
    jax.block_until_ready(metrics)
    once_s = time.perf_counter() - began
    n_steps = int(min(max(3 / once_s, 3), 50))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(n_steps):
            state, metrics = update(state, batch, lr)
        losses.append(float(metrics["loss"]))
        times.append((time.perf_counter() - began) / n_steps)
    step_s = statistics.median(times)
    if not math.isfinite(losses[-1]):
        yield record("FAIL", "speed", f"the loss is {losses[-1]}")
        return

    tokens = cfg.batch_size * cfg.seq_len
    flops, _ = setup["task"]["flops"]({}, cfg)
    text = f"{1000 * step_s:,.4g} ms a step, {tokens / step_s:,.0f} tokens/s"
    tflops, _ = steplib.peaks(device.device_kind)
    if tflops:
        text += f", MFU {flops * tokens / step_s / tflops / 1e12:.1%}"
    yield record("INFO", "speed", f"{text} in {cfg.dtype}; compiled in {compile_s:.0f} s",
                 step_s=step_s, times=times, tokens_per_s=tokens / step_s, compile_s=compile_s,
                 memory=memory, planned_gib=memory["total"] / 2**30, losses=losses)
    yield peak_memory(device, memory)
    yield planned(update, mesh, {"model": flops * tokens}, step_s)


def planned(update, mesh, flop, step_s):
    """Compare the time of a step with plan.py's time model of the compiled program."""
    import plan
    kind = mesh.devices.flat[0].device_kind
    cost = plan.traffic(update.as_text(), mesh)
    found = plan.roofline(cost | {"flop": flop}, kind)
    if not found:
        return record("SKIP", "plan", "tests/plan.py has no rates of this device")
    return record("INFO", "plan", f"{1000 * found['step_s']:,.4g} ms a step, MFU "
                  f"{found['mfu']:.1%}; measured {step_s / found['step_s']:.2f} times that",
                  planned_s=found["step_s"])


def peak_memory(device, memory):
    """Compare the peak of the device's memory with what the program was planned to need."""
    gib = memory["total"] / 2**30
    stats = None
    with contextlib.suppress(Exception):  # a CPU has none
        stats = device.memory_stats()
    if not stats:
        text = f"this device does not count its memory, so the planned {gib:.3g} GiB stand alone"
        return record("SKIP", "memory", text) | {"part": "memory"}
    peak_gib = stats["peak_bytes_in_use"] / 2**30
    limit_gib = stats["bytes_limit"] / 2**30
    text = (f"peak {peak_gib:.3g} GiB, planned {gib:.3g} of {limit_gib:.3g} GiB; "
            "relative difference")
    found = checked("memory", abs(peak_gib / gib - 1), 0.1, text)
    found["figures"]["peak_gib"] = peak_gib
    return found | {"part": "memory"}


# ---- numbers

# A small model that takes every path: two microbatches and tiles of the loss; several documents in
# a row; a window over a sequence so long that XLA's attention handles it by blocks. Its heads have
# the width that all kernels support.
SMALL = dict(n_layers=2, d_model=256, n_heads=4, n_kv_heads=2, head_dim=128, d_ff=512,
             vocab_size=512, optimizer="adamw", lr=1e-3, warmup_steps=0.0, schedule="constant",
             steps=100, fsdp=1, sample_tokens=0, val_frac=0.0, out_dir="")
CASES = {
    "plain": dict(batch_size=4, seq_len=256, grad_accum_steps=2, logit_tiles=2),
    "documents": dict(batch_size=4, seq_len=256, document_mask=True),
    "window": dict(batch_size=1, seq_len=1152, sliding_window=300),
}

# Largest relative errors, in the norm, of the models above. On CPUs a gradient is off by up to 2e-5
# in float32, and by up to 2.5e-2 in bfloat16 and "mixed"; with products in TF32 by 1e-3.
GRADIENT_BOUNDS = {
    "float32": 1e-4, "mixed": 5e-2, "bfloat16": 5e-2, "float16": 1e-2, "tf32": 1e-2}
LOSS_BOUNDS = {"float32": 2e-6, "mixed": 1e-3, "bfloat16": 1e-3, "float16": 2e-4, "tf32": 2e-4}
UPDATE_BOUND = 1e-3  # of AdamW's move: the rounding of float32 parameters, which are larger

# The order in which the backward pass computes the gradients. The first wrong one is named.
BACKWARD = ("unembed", "final_norm", "layers.w_down", "layers.w_up", "layers.w_gate",
            "layers.mlp_norm", "layers.wo", "layers.wv", "layers.q_norm", "layers.k_norm",
            "layers.wq", "layers.wk", "layers.attn_norm", "embed")


def small_setup(case, hooks=(), n_devices=1, **changes):
    """train.setup_run of the small model, on the first devices."""
    cfg = train.config.Config(**(SMALL | CASES[case] | changes), cache_dir=cache_dir())
    return train.setup_run(cfg, devices=jax.devices()[:n_devices], hooks=hooks)


def make_batch(sizes):
    """The NumPy arrays of a batch: random tokens, a tenth of the labels ignored.

    sizes: a dict with the fields of a config.
    """
    shape = (sizes["batch_size"], sizes["seq_len"])
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, sizes["vocab_size"], shape).astype(np.int32)
             for name in ("tokens", "labels")}
    batch["labels"][rng.random(shape) < 0.1] = -100
    if sizes.get("document_mask"):
        # Documents of 100 tokens; the last one is shorter.
        index = np.broadcast_to(np.arange(shape[1]), shape)
        batch["segments"] = (index // 100 + 1).astype(np.int32)
        batch["positions"] = (index % 100).astype(np.int32)
    return batch


def put_batch(setup, values):
    """The arrays of a batch on the devices of a run."""
    return {name: jax.device_put(x, setup["batch"][name].sharding) for name, x in values.items()}


def make_references():
    """Compute loss and gradients of each case in float64 on the CPU, by a definition of the model
    that shares no code with model.py, operation by operation.
    """
    assert jax.config.jax_enable_x64 and jax.devices()[0].platform == "cpu"
    for case in CASES:
        setup = small_setup(case, dtype="float32")
        cfg = setup["cfg"]
        batch = make_batch(SMALL | CASES[case])
        params = setup["task"]["init"](jax.random.key(0), cfg)
        # Scales other than 1, so that a forgotten one is noticed.
        rng = np.random.default_rng(1)
        for name, x in params.items():
            if "norm" in name:
                params[name] = x * rng.uniform(0.5, 1.5, x.shape).astype(np.float32)
        wide = {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in params.items()}
        with jax.disable_jit():
            (_, loss), grads = jax.value_and_grad(
                lambda p: define_loss(p, batch, cfg), has_aux=True)(wide)  # noqa: B023
        assert loss.dtype == jnp.float64
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        clip = min(1.0, cfg.clip_norm / norm) if cfg.clip_norm else 1.0
        arrays = {f"params/{name}": np.asarray(x) for name, x in params.items()}
        arrays |= {f"grads/{name}": np.asarray(clip * g) for name, g in grads.items()}
        np.savez(reference_path(case), loss=np.asarray(loss), norm=norm, **arrays)
        yield record("INFO", f"{case} in float64", f"loss {float(loss):.9f}")


def reference_path(case):
    return Path(os.environ["CHECK_SCRATCH"], f"{case}.npz")


def define_loss(params, batch, cfg):
    """(objective, cross-entropy) of a batch by the definition of the model, in the dtype of
    the parameters.
    """
    tokens = batch["tokens"]
    labels = batch["labels"]
    B, T = tokens.shape
    N, K, H = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
    x = params["embed"][tokens]

    # The tables of rotary positions, and which key a query sees.
    index = jnp.arange(T)
    positions = batch.get("positions", jnp.broadcast_to(index, (B, T)))
    frequency = cfg.rope_theta ** (-jnp.arange(0, H, 2, dtype=x.dtype) / H)
    angle = positions[:, :, None, None].astype(x.dtype) * frequency[None, None, None]
    sees = index[:, None] >= index[None, :]
    if cfg.sliding_window:
        sees &= index[:, None] - index[None, :] < cfg.sliding_window
    sees = jnp.broadcast_to(sees, (B, T, T))
    if "segments" in batch:
        sees &= batch["segments"][:, :, None] == batch["segments"][:, None, :]

    def normalize(x, scale):
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps)
        return x * scale.reshape((1,) * (x.ndim - 1) + (-1,))

    def rotate(x):
        first = x[..., :H // 2]
        second = x[..., H // 2:]
        return jnp.concatenate([first * jnp.cos(angle) - second * jnp.sin(angle),
                                second * jnp.cos(angle) + first * jnp.sin(angle)], -1)

    for layer in range(cfg.n_layers):
        w = {name.removeprefix("layers."): value[layer] for name, value in params.items()
             if name.startswith("layers.")}
        y = normalize(x, w["attn_norm"])
        q = (y @ w["wq"]).reshape(B, T, N, H)
        k = (y @ w["wk"]).reshape(B, T, K, H)
        v = (y @ w["wv"]).reshape(B, T, K, H)
        if "q_norm" in w:
            q = normalize(q, w["q_norm"])
            k = normalize(k, w["k_norm"])
        q = rotate(q).reshape(B, T, K, N // K, H)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, rotate(k)) / math.sqrt(H)
        scores = jnp.where(sees[:, None, None], scores, -jnp.inf)
        a = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v)
        x = x + a.reshape(B, T, N * H) @ w["wo"]
        y = normalize(x, w["mlp_norm"])
        gate = y @ w["w_gate"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (y @ w["w_up"])) @ w["w_down"]

    x = normalize(x, params["final_norm"])
    unembed = params["unembed"] if "unembed" in params else params["embed"].T
    logits = x @ unembed
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    has_label = labels >= 0
    true = jnp.take_along_axis(logits, jnp.where(has_label, labels, 0)[..., None], -1)[..., 0]
    nll = jnp.where(has_label, lse - true, 0).sum() / has_label.sum()
    z = jnp.where(has_label, lse**2, 0).sum() / has_label.sum()
    return nll + cfg.z_loss * z, nll


def recording(optimizer):
    """The optimizer with the gradient of the last step in its state."""
    def init(params):
        return {"inner": optimizer.init(params), "grads": jax.tree.map(jnp.zeros_like, params)}

    def update(grads, state, params):
        directions, inner = optimizer.update(grads, state["inner"], params)
        return directions, {"inner": inner, "grads": grads}

    return optax.GradientTransformation(init, update)


def record_gradients(event, value):
    """A hook that keeps the gradient of the last step in the optimizer's state."""
    return recording(value) if event == "optimizer" else None


def small_step(case, dtype, attention, **changes):
    """Take one compiled step; return {"loss", "norm", "lr", "grads", "old", "new", "cfg"}."""
    setup = small_setup(case, (record_gradients,), dtype=dtype, attention=attention, **changes)
    steps = steplib.lower_steps(*train.step_args(setup))
    programs = steplib.compile_steps(steps)
    saved = np.load(reference_path(case))
    old = {}
    params = {}
    for name, x in programs["state"]["params"].items():
        old[name] = saved[f"params/{name}"]
        params[name] = jax.device_put(old[name], x.sharding)
    state = programs["from_params"](jax.random.key(0), params=params)
    batch = put_batch(setup, make_batch(SMALL | CASES[case]))
    state, metrics = programs["train_step"](state, batch, steplib.lr_at(0, setup["cfg"]))
    return {"loss": float(metrics["loss"]), "norm": float(metrics["grad_norm"]),
            "lr": float(metrics["lr"]), "grads": jax.device_get(state["opt"]["grads"]), "old": old,
            "new": jax.device_get(state["params"]), "cfg": setup["cfg"]}


def numbers(dtype, attention):
    """Compare the step of each case with float64."""
    yield from compare_steps(dtype, attention, [(case, {}) for case in CASES])


def numbers_by_remat(dtype, attention):
    """Compare the step under each remat policy with float64."""
    variants = [("plain", {"remat": remat}) for remat in train.model.REMAT if remat != "none"]
    yield from compare_steps(dtype, attention, variants)


def numbers_in_tf32(dtype, attention):
    """Compare a step whose float32 products are in TF32, JAX's default on GPUs, with float64."""
    yield from compare_steps(dtype, attention, [("plain", {})], precision="tf32")


def compare_steps(dtype, attention, variants, precision=None):
    """Yield a record for each (case, changes of the config), compiled side by side."""
    def compare(variant):
        case, changes = variant
        name = " ".join([case, *(f"{k} {v}" for k, v in changes.items())])
        try:
            found = small_step(case, dtype, attention, **changes)
        except Exception as e:  # the other variants are still worth a look
            return record("FAIL", name, f"{type(e).__name__}: {str(e).splitlines()[0][:300]}")
        return against_float64(name, case, found, precision or dtype)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        yield from pool.map(compare, variants)


def against_float64(name, case, found, precision):
    """The record of one step: loss and gradients against the reference, and the moves of the
    parameters against AdamW in float64 from the step's own gradients.
    """
    saved = np.load(reference_path(case))
    loss_error = abs(found["loss"] / float(saved["loss"]) - 1)
    # A factor of all gradients changes only their norm before clipping.
    norm_error = abs(found["norm"] / float(saved["norm"]) - 1)
    errors = {}
    for each, grad in found["grads"].items():
        errors[each] = relative_error(grad, saved[f"grads/{each}"])

    # The first step of AdamW: the gradient divided by its absolute value, and weight decay.
    cfg = found["cfg"]
    moves = {}
    for each, grad in found["grads"].items():
        old = np.float64(found["old"][each])
        wide = np.float64(grad)
        decay = cfg.weight_decay if np.ndim(old) > 1 and "norm" not in each else 0.0
        move = -found["lr"] * (wide / (np.abs(wide) + cfg.eps) + decay * old)
        moves[each] = relative_error(np.float64(found["new"][each]) - old, move)
    return together(name, [
        checked("loss", loss_error, LOSS_BOUNDS[precision], f"loss {found['loss']:.6f}, off by"),
        checked("norm", norm_error, GRADIENT_BOUNDS[precision] / 5, "norm of all gradients by"),
        worst_of("gradients", errors, GRADIENT_BOUNDS[precision]),
        worst_of("moves", moves, UPDATE_BOUND),
    ])


def worst_of(what, errors, bound):
    """The record of the largest of {name: error}; it also names the first wrong one."""
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    found = checked(what, errors[worst], bound, f"{what} by up to")
    found["text"] += f" in {worst}"
    found["figures"]["errors"] = errors
    wrong = [name for name in BACKWARD if name in errors and not errors[name] <= bound]
    if wrong:
        found["text"] += (f", {len(wrong)} of {len(errors)} wrong, the first in the backward pass "
                          f"is {wrong[0]}")
    return found


def relative_error(found, expected):
    """|found - expected| / |expected| in float64, by the 2-norm."""
    if found.dtype.itemsize < 4:  # NumPy does not convert bfloat16 to float64
        found = np.asarray(found, np.float32)
    difference = np.linalg.norm(np.ravel(np.float64(found) - np.float64(expected)))
    return float(difference / max(np.linalg.norm(np.ravel(expected)), 1e-30))


def known_forms():
    """Evaluate expressions that some version of XLA got wrong on some device, against NumPy."""
    device = jax.devices()[0]
    options = steplib.compiler_options(train.config.Config(), device)
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    cube, tall = normal(5, 60, 60), normal(4096, 64)
    wide, long = normal(64, 8192), normal(8192, 64)
    # name: (function, the same in float64, arguments, bound)
    forms = {
        "product with a broadcast number, then a sum": (
            lambda e: jnp.sum((e @ jnp.full_like(e, .5)) * e, -1),
            lambda e: ((e @ np.full_like(e, .5)) * e).sum(-1), (cube,), 1e-5),
        "softmax of products times ones": (
            lambda x: jax.nn.softmax(x @ x.mT) @ jnp.ones_like(x) * x,
            lambda x: softmax(x @ x.swapaxes(-1, -2)) @ np.ones_like(x) * x, (cube,), 1e-4),
        "product, square, sum": (
            lambda x, w: jnp.sum((x @ w) ** 2, -1),
            lambda x, w: ((x @ w) ** 2).sum(-1), (tall, normal(64, 64)), 1e-5),
        "bfloat16 product with a float32 sum over 8,192": (
            lambda a, b: jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16),
                                    preferred_element_type=jnp.float32),
            lambda a, b: round_bfloat16(a) @ round_bfloat16(b), (wide, long), 1e-5),
    }
    for name, (function, expected, args, bound) in forms.items():
        wanted = expected(*(np.float64(x) if x.dtype == np.float32 else x for x in args))
        compiled = jax.jit(function, compiler_options=options)
        with jax.default_matmul_precision("highest"):
            jitted = relative_error(np.asarray(compiled(*args)), wanted)
            eager = relative_error(np.asarray(function(*map(jnp.asarray, args))), wanted)
        checks = [checked("compiled", jitted, bound, "compiled, off by")]
        if device.platform != "cpu":  # on a CPU eager operations have other options
            checks.append(checked("eager", eager, bound, "operation by operation"))
        yield together(name, checks)


def round_bfloat16(x):
    return np.float64(np.asarray(x, np.float32).astype(jnp.bfloat16).astype(np.float32))


# ---- determinism

# On a CPU a step that takes a few milliseconds, and that several threads still share.
FAST = dict(n_layers=1, d_model=128, n_heads=2, n_kv_heads=1, head_dim=64, d_ff=256, vocab_size=256,
            batch_size=4, seq_len=64)
N_CALLS, SECONDS = 5000, 25


def determinism(how):
    """Call one compiled step many times from one state, in two processes; compare the digests.

    how: "default" or "deterministic" for a GPU without or with that flag, "threads=N" for so many
    threads of a CPU, or "step" for other devices.
    """
    # Another process first: only one at a time can use a TPU.
    command = [sys.executable, __file__, "--run", "repeat_step", how, "20"]
    other = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    other_digest = json.loads(other.stdout.strip().splitlines()[-1])["figures"]["digest"]
    (found,) = repeat_step(how, N_CALLS)
    differences = different_tensors(found["figures"]["digest"], other_digest)
    pair = checked(f"two processes, {how}", len(differences), 0, "other digests:")
    if differences:
        pair["text"] += f", the first is that of {differences[0]}"
    for each in (found, pair):
        # Without the flag a GPU may add in another order: that is a fact, not an error.
        if how == "default":
            each["status"] = "INFO"
        yield each


def repeat_step(how, n_calls):
    """Call one compiled step many times from one state, for at most SECONDS; compare the digests.
    """
    option, _, n_threads = how.partition("=")
    if option == "threads" and hasattr(os, "sched_setaffinity"):  # before JAX makes its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(n_threads)])
    changes = {}
    if jax.devices()[0].platform == "cpu":
        changes = FAST
    setup = small_setup("plain", **changes, deterministic=option == "deterministic")
    steps = steplib.lower_steps(*train.step_args(setup))
    programs = steplib.compile_steps(steps)
    batch = put_batch(setup, make_batch(SMALL | CASES["plain"] | changes))
    initial = programs["init"](jax.random.key(0))
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    first, n_different, n_done, wrong = None, 0, 0, ""
    began = time.monotonic()
    while n_done < int(n_calls) and time.monotonic() - began < SECONDS:
        state, _ = programs["train_step"](
            copy(initial), batch, steplib.lr_at(0, setup["cfg"]))
        digest = jax.device_get(programs["digest"](state))
        n_done += 1
        if first is None:
            first = digest
        differences = different_tensors(digest, first)
        if differences:
            n_different += 1
            wrong = wrong or f", the first is that of {differences[0]} in call {n_done}"
    found = checked(f"{n_done} calls of one step, {how}, {setup['cfg'].dtype}", n_different, 0,
                    "other digests:")
    found["text"] += wrong
    found["figures"]["digest"] = jax.tree.map(lambda x: x.tolist(), first)
    yield found


def different_tensors(digest, other):
    """The names of the arrays whose sums differ. digest: of step.digest_sums."""
    return [f"{part} {name}" for part in digest for name in digest[part]
            if list(digest[part][name]) != list(other[part][name])]


# ---- a mesh

def no_mesh():
    yield record("SKIP", "mesh", "one device, so there is nothing to compare")


def mesh():
    """Train three steps on one device and on all of them along each axis; compare the losses."""
    n = len(jax.devices())
    sizes = dict(batch_size=2 * n, seq_len=32 * n, grad_accum_steps=1, n_heads=n, n_kv_heads=n,
                 head_dim=16, dtype="float32", attention="xla")
    dense = three_losses(small_setup("plain", **sizes))
    experts = three_losses(small_setup("plain", **sizes, n_experts=n))
    for axis in steplib.AXES:
        if axis == "ep":
            changes = {"n_experts": n}
            expected = experts
        else:
            changes = {}
            expected = dense
        try:
            # One axis has all devices, also if it is fsdp.
            setup = small_setup("plain", n_devices=n, **sizes | changes | {axis: n})
        except ValueError as e:  # a mesh that this model cannot have
            yield record("SKIP", f"{axis} {n}", str(e).splitlines()[0])
            continue
        found = three_losses(setup)
        error = max(abs(a / b - 1) for a, b in zip(found, expected))
        text = f"losses {', '.join(f'{x:.6f}' for x in found)}: relative difference to one device"
        yield checked(f"{axis} {n}", error, 1e-5, text)


def three_losses(setup):
    """The losses of three steps."""
    steps = steplib.lower_steps(*train.step_args(setup))
    programs = steplib.compile_steps(steps)
    batch = random_batch(setup)
    state = programs["init"](jax.random.key(0))
    losses = []
    for i in range(3):
        lr = steplib.lr_at(i, setup["cfg"])
        state, metrics = programs["train_step"](state, batch, lr)
        losses.append(float(metrics["loss"]))
    return losses


# ---- resume

N_STEPS, SAVE_EVERY = 160, 40


def resume():
    """Kill a run with SIGKILL, resume it, and compare its last checkpoint with that of a run that
    nobody killed.
    """
    folder = Path(os.environ["CHECK_SCRATCH"], "resume")

    def launch(name):
        flags = (f"--steps {N_STEPS} --save_every {SAVE_EVERY} --log_every 1 --eval_every 0 "
                 "--sample_tokens 0 --deterministic --d_model 64 --n_layers 2 --n_heads 4 "
                 "--seq_len 64 --data train.py --val_frac 0")
        command = [sys.executable, "train.py", *flags.split(), "--cache_dir", cache_dir(),
                   "--out_dir", str(folder / name)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, cwd=ROOT)

    def rows_of(name):
        path = folder / name / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    # Kill the first run some steps after a checkpoint that is committed: the row "save" in the log
    # says only that its write has begun.
    killed = launch("killed")
    root = str(folder / "killed" / "ckpt")
    while killed.poll() is None:
        committed = train.ckpt.steps(root)
        if committed and rows_of("killed")[-1]["step"] > committed[0] + 5:
            killed.kill()
            killed.wait()
        time.sleep(0.01)
    if killed.returncode != -signal.SIGKILL:
        yield record("FAIL", "killed and resumed", "the first run ended before it was killed: "
                     f"{(killed.stdout.read().splitlines() or [''])[-1][:300]}")
        return
    killed_at = rows_of("killed")[-1]["step"]

    # One after the other: only one process at a time can use a TPU.
    for name in ("killed", "whole"):
        run = launch(name)
        output, _ = run.communicate()
        if run.returncode:
            last = (output.strip().splitlines() or [""])[-1]
            yield record("FAIL", name, f"exit code {run.returncode}: {last[:300]}")
            return
    found, expected = (train.ckpt.restore(str(folder / name / "ckpt"), N_STEPS)
                       for name in ("killed", "whole"))
    wrong = different_arrays(found, expected)
    result = checked("killed and resumed", len(wrong), 0, f"killed after step {killed_at} of "
                     f"{N_STEPS} and resumed; arrays of the last checkpoint that differ:")
    if wrong:
        result["text"] += f", the first is {wrong[0]}"
    yield result


def different_arrays(found, expected):
    """The names of the arrays of two checkpoints that are not bit-identical."""
    found, _ = train.ckpt.flatten(found)
    expected, _ = train.ckpt.flatten(expected)
    names = sorted(found.keys() | expected.keys())
    return [name for name in names if name not in found or name not in expected
            or found[name].tobytes() != expected[name].tobytes()]


if __name__ == "__main__":
    sys.exit(main())
