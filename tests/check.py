# SPDX-License-Identifier: Apache-2.0
"""Check that this machine computes what it should, and measure it.

    python tests/check.py                        everything that fits into --minutes 10
    python tests/check.py --only numbers         one part
    python tests/check.py --only resume/killed   one item

For new hardware, a new driver or a new JAX. Each check prints PASS or FAIL with a figure and its
bound. An item is a process of its own with a time limit, so that a crash or a hang fails that item
alone. The report is DIR/check.md and DIR/check.json; DIR is --out_dir. Both are rewritten after
each record. The exit code is 0, 1 if a check failed or none was made, 2 for an invalid flag, or 130
after Ctrl-C.
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
from functools import partial
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
    "gpt2-124m-deterministic": dict(
        config="gpt2-124m", batch_size=60, grad_accum_steps=1, deterministic=True),
    "llama-8b-2-layers-1x65536": dict(
        config="llama-8b", n_layers=2, batch_size=1, grad_accum_steps=1, seq_len=65536,
        remat="full", mlp_tiles=8),
}
LIMIT_S = 300  # after which an item is stopped
REFERENCE = "numbers/reference"  # the other items of numbers need its results


# ---- the items

def list_items(machine):
    """Items {"name": PART/..., "call": (function, arguments ...), "env"}, the decisive first."""
    on_cpu = machine["platform"] == "cpu"
    n_devices = machine["n_devices"]
    items = []

    def add(name, function, *args, **env):
        items.append({"name": name, "call": (function, *args), "env": env})

    def add_numbers(pairs, suffix, variants):
        for dtype, attention in pairs:
            add(f"numbers/{dtype}-{attention}{suffix}", "numbers", dtype, attention, variants)

    repeated = ["step"]
    if on_cpu:
        n_threads = {1, min(2, machine["threads"]), machine["threads"]}
        repeated = [f"threads-{n}" for n in sorted(n_threads)]
    elif machine["platform"] in ("cuda", "old cuda"):
        repeated = ["deterministic", "default"]
    first_shape, *other_shapes = CPU_SHAPES if on_cpu else SHAPES
    first_kernel, *other_kernels = kernels_of(machine)

    # The default dtype and attention kernel; one step, again and again; one speed.
    add(REFERENCE, "make_references", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1")
    add("numbers/known-forms", "known_forms")
    add_numbers([first_kernel], "", "cases")
    for how in repeated:
        add(f"determinism/{how}", "determinism", how)
    add(f"speed/{first_shape}", "speed", first_shape)

    # A resumed run, meshes, the other dtypes and kernels, the other shapes.
    add("resume/killed", "resume")
    if n_devices > 1:
        add(f"mesh/{n_devices}-devices", "mesh")
    elif on_cpu:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
        add("mesh/4-devices-of-one-cpu", "mesh", XLA_FLAGS=flags)
    add_numbers(other_kernels, "", "cases")
    if machine["platform"] == "cuda":
        add("numbers/float32-xla-tf32", "numbers", "float32", "xla", "tf32",
            JAX_DEFAULT_MATMUL_PRECISION="default")
    for shape in other_shapes:
        add(f"speed/{shape}", "speed", shape)
    add_numbers([first_kernel, *other_kernels], "-remat", "remat")
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
    """The items of these parts or with these names, and the references if they need them."""
    chosen = []
    for word in words:
        # The speed of a shape and its peak memory are measured together.
        found = [item for item in items if word in (item["name"], part_of(item))
                 or (word == "memory" and item["call"][0] == "speed")]
        if not found:
            names = ", ".join(item["name"] for item in items)
            raise ValueError(f"--only {word}: no such part or item on this machine; the parts are "
                             f"{', '.join(PARTS)}; the items are {names}")
        chosen += [item["name"] for item in found]
        if found[-1]["call"][0] == "numbers":
            chosen.append(REFERENCE)
    return [item for item in items if item["name"] in chosen or not words]


def part_of(item):
    return item["name"].partition("/")[0]


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
    began = time.monotonic()
    deadline = math.inf if args.limit else began + 60 * args.minutes
    context = {"began": began, "deadline": deadline, "limit_s": args.limit or LIMIT_S,
               "out_dir": out_dir, "machine": machine, "records": []}
    with tempfile.TemporaryDirectory(
            dir=out_dir, prefix="scratch-", ignore_cleanup_errors=True) as scratch:
        os.environ["CHECK_SCRATCH"] = scratch  # for the processes of the items
        try:
            for item in items:
                run_item(item, context)
        finally:
            report = write_report(context)
            print(f"{summary(context['records'])}; report: {report}", flush=True)
    found = {each["status"] for each in context["records"]}
    if found <= {"SKIP"}:
        print("nothing was checked", flush=True)
        return 1
    return int("FAIL" in found)


def run_item(item, context):
    """Run an item in a process with a limit; add each record, and one if it does not end well."""
    began = time.monotonic()
    left_s = context["deadline"] - began
    unmade = [each["item"] for each in context["records"] if each["status"] in ("FAIL", "SKIP")]
    if item["call"][0] == "numbers" and REFERENCE in unmade:
        return add_end(item, "SKIP", f"needs {REFERENCE}, which did not end well", context)
    if left_s <= 0:
        return add_end(item, "SKIP", "no time was left", context)

    print_line(context, f"      {item['name']} started")
    log = context["out_dir"] / "logs" / f"{item['name'].replace('/', '-')}.log"
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, __file__, "--run", *item["call"]], env=os.environ | item["env"],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)
    limit_s = min(context["limit_s"], left_s)
    timer = threading.Timer(limit_s, kill, [process])
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
        add_end(item, "SKIP", f"not finished in the time that was left; see {log}", context)
    elif seconds >= limit_s:
        add_end(item, "FAIL", f"stopped after {limit_s:.0f} s; see {log}", context)
    elif code or not n_records:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
        reason = f"ended with exit code {code}: {lines[-1][:300]}; see {log}"
        add_end(item, "FAIL", reason, context)


def kill(process):
    """Kill a process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


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
    status = "FAIL" if any(each["status"] == "FAIL" for each in records) else "PASS"
    text = ", ".join(each["text"] for each in records)
    return record(status, name, text, checks=records)


def add_record(item, new, context):
    """Print a record, and rewrite the report with it."""
    new = {"part": part_of(item), "item": item["name"]} | new
    context["records"].append(new)
    print_line(context, f"{new['status']}  {new['item']}, {new['name']}: {new['text']}")
    write_report(context)


def add_end(item, status, reason, context):
    """Add the record of an item that did not end well, with the command that runs it alone."""
    name = item["name"]
    text = (f"{reason}; alone: python tests/check.py --only {name} --limit {2 * LIMIT_S} "
            f"--out_dir out/check-{name.replace('/', '-')}")
    add_record(item, record(status, "all", text), context)


def print_line(context, text):
    """Print a line after the time since the launch."""
    minutes, seconds = divmod(int(time.monotonic() - context["began"]), 60)
    print(f"[{minutes:2d}:{seconds:02d}] {text}", flush=True)


def summary(records):
    """The number of records of each status, as one line."""
    statuses = [each["status"] for each in records]
    words = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped", "INFO": "measured"}
    return ", ".join(f"{statuses.count(status)} {word}" for status, word in words.items())


def write_report(context):
    """Write check.json and check.md; return the path of check.md."""
    machine, records, folder = context["machine"], context["records"], context["out_dir"]
    rows = []
    for each in records:
        text = each["text"].replace("|", "/").replace("\n", " ")
        rows.append(f"| {each['item']} | {each['name']} | {each['status']} | {text} |")
    lines = [
        "# Check", "", f"{describe(machine)}; {time.strftime('%Y-%m-%d')}.", "",
        "Flags: " + ", ".join(f"`{name}={x}`" for name, x in machine["flags"].items()), "",
        f"{summary(records)}.", "",
        "| item | check | result | figures |", "| --- | --- | --- | --- |", *rows, ""]
    text = json.dumps({"machine": machine, "records": records}, indent=1)
    (folder / "check.json").write_text(text, encoding="utf-8")
    (folder / "check.md").write_text("\n".join(lines), encoding="utf-8")
    return folder / "check.md"


# ---- the machine

def look_at_machine():
    """The figures of `look`, from a process that leaves the devices to the items."""
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
    yield record("INFO", "machine", "", **steplib.describe_machine(device), kind=device.device_kind,
                 platform=platform, n_devices=len(jax.devices()),
                 default_dtype=steplib.choose_dtype("auto", platform),
                 python=sys.version.split()[0], versions=versions, flags=flags)


def describe(machine):
    """The machine in one line."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    kind = machine["cpu"] if machine["platform"] == "cpu" else machine["kind"]
    line = f"{machine['n_devices']} x {kind}, {machine['threads']} threads"
    if machine["driver"]:
        line += f"; {machine['driver']}"
    return f"{line}; Python {machine['python']}, {versions}"


def run_of(flags, n_devices=1, hooks=()):
    """train.setup_run with these fields, on the first devices."""
    flags = {"fsdp": 1, "sample_tokens": 0, "val_frac": 0.0, "out_dir": "",
             "cache_dir": cache_dir()} | flags
    preset = train.config.PRESETS.get(flags.pop("config", None), {})
    cfg = train.config.Config(**preset | flags)
    return train.setup_run(cfg, devices=jax.devices()[:n_devices], hooks=hooks)


def cache_dir():
    """A folder for compiled programs that is empty at first: a check compiles all anew."""
    return os.environ["CHECK_SCRATCH"] + "/cache"


def make_batch(run):
    """A batch on the devices: random tokens, 1 in 10 labels ignored, documents of 100 tokens."""
    cfg = run.cfg
    shape = (cfg.batch_size, cfg.seq_len)
    rng = np.random.default_rng(0)
    index = np.broadcast_to(np.arange(cfg.seq_len), shape)
    labels = rng.integers(0, cfg.vocab_size, shape)
    arrays = {"tokens": rng.integers(0, cfg.vocab_size, shape),
              "labels": np.where(rng.random(shape) < 0.1, -100, labels),
              "segments": index // 100 + 1, "positions": index % 100}
    return {name: jax.device_put(arrays[name].astype(x.dtype), x.sharding)
            for name, x in run.batch.items()}


def programs_of(run):
    return steplib.compile_steps(steplib.lower_steps(*train.step_args(run)))


# ---- speed and memory

def speed(shape):
    """Measure the speed and the peak memory of a shape, and compare both with the plan."""
    run = run_of((SHAPES | CPU_SHAPES)[shape])
    cfg, mesh = run.cfg, run.mesh
    kind = mesh.devices.flat[0].device_kind

    # Compile as a run does.
    began = time.perf_counter()
    lowered = steplib.lower_steps(*train.step_args(run))
    update = lowered["lower_train_step"]().compile()
    init = lowered["init"]
    compile_s = time.perf_counter() - began
    memory = steplib.program_memory(update, lowered["state"], lowered["batch"])
    try:
        steplib.check_fits(memory, {"a step": memory["total"]}, mesh)
    except MemoryError as e:
        yield record("SKIP", "speed", f"does not fit: {e.args[0]}")
        return

    batch = make_batch(run)
    state = init(jax.random.key(0))
    lr = steplib.lr_at(0, cfg)

    def step_seconds(n):
        """Seconds of a step, of n without waiting between them."""
        nonlocal state
        began = time.perf_counter()
        for _ in range(n):
            state, metrics = update(state, batch, lr)
        losses.append(float(steplib.means(metrics["sums"])["loss"]))
        return (time.perf_counter() - began) / n

    losses = []
    step_seconds(2)
    n_steps = int(min(max(3 / step_seconds(1), 3), 50))
    times = [step_seconds(n_steps) for _ in range(3)]
    step_s = statistics.median(times)
    if not math.isfinite(losses[-1]):
        yield record("FAIL", "speed", f"the loss is {losses[-1]}")
        return

    tokens = cfg.batch_size * cfg.seq_len
    flops, _ = run.task["flops"]({}, cfg)
    text = f"{1000 * step_s:,.4g} ms a step, {tokens / step_s:,.0f} tokens/s"
    tflops, _ = steplib.peaks(kind)
    if tflops:
        text += f", MFU {flops * tokens / step_s / tflops / 1e12:.1%}"
    yield record("INFO", "speed", f"{text} in {cfg.dtype}; compiled in {compile_s:.0f} s",
                 step_s=step_s, times=times, tokens_per_s=tokens / step_s, compile_s=compile_s,
                 memory=memory, planned_gib=memory["total"] / 2**30, losses=losses)
    yield peak_memory(mesh.devices.flat[0], memory) | {"part": "memory"}

    import plan
    cost = plan.traffic(update.as_text(), mesh) | {"flop": {"model": flops * tokens}}
    planned = plan.roofline(cost, kind)
    if not planned:
        yield record("SKIP", "plan", "tests/plan.py has no rates of this device")
        return
    yield record("INFO", "plan", f"{1000 * planned['step_s']:,.4g} ms a step, MFU "
                 f"{planned['mfu']:.1%}; measured {step_s / planned['step_s']:.2f} times that",
                 planned_s=planned["step_s"])


def peak_memory(device, memory):
    """Compare the peak of the device's memory with what the program was planned to need."""
    gib = memory["total"] / 2**30
    stats = None
    with contextlib.suppress(Exception):  # a CPU has none
        stats = device.memory_stats()
    if not stats:
        text = f"this device does not count its memory, so the planned {gib:.3g} GiB stand alone"
        return record("SKIP", "memory", text)
    peak_gib = stats["peak_bytes_in_use"] / 2**30
    text = (f"peak {peak_gib:.3g} GiB, planned {gib:.3g} of {stats['bytes_limit'] / 2**30:.3g} GiB;"
            " relative difference")
    return checked("memory", abs(peak_gib / gib - 1), 0.1, text)


# ---- numbers

# A small model that takes every path: two microbatches and tiles of the loss; several documents in
# a row; a window over a sequence so long that XLA's attention handles it by blocks. Its heads have
# the width that all kernels support.
SMALL = dict(n_layers=2, d_model=256, n_heads=4, n_kv_heads=2, head_dim=128, d_ff=512,
             vocab_size=512, optimizer="adamw", lr=1e-3, warmup_steps=0.0, schedule="constant",
             steps=100)
CASES = {
    "plain": dict(batch_size=4, seq_len=256, grad_accum_steps=2, logit_tiles=2),
    "documents": dict(batch_size=4, seq_len=256, document_mask=True),
    "window": dict(batch_size=1, seq_len=1152, sliding_window=300),
}
# {name: pairs (case, changes of the config)} to compare with float64. tf32: JAX's default on GPUs.
VARIANTS = {
    "cases": [(case, {}) for case in CASES],
    "remat": [("plain", {"remat": remat}) for remat in train.model.REMAT if remat != "none"],
    "tf32": [("plain", {})],
}

# Largest relative errors, in the norm, of the models above. On CPUs a gradient is off by up to 2e-5
# in float32, and by up to 2.5e-2 in bfloat16 and "mixed"; with products in TF32 by 1e-3.
GRADIENT_BOUNDS = {
    "float32": 1e-4, "mixed": 5e-2, "bfloat16": 5e-2, "float16": 1e-2, "tf32": 1e-2}
LOSS_BOUNDS = {"float32": 2e-6, "mixed": 1e-3, "bfloat16": 1e-3, "float16": 2e-4, "tf32": 2e-4}
UPDATE_BOUND = 1e-3  # of AdamW's move: the rounding of float32 parameters, which are larger

def make_references():
    """Compute loss and gradients of each case in float64 on the CPU, operation by operation."""
    assert jax.config.jax_enable_x64 and jax.devices()[0].platform == "cpu"
    for case in CASES:
        run = run_of(SMALL | CASES[case] | {"dtype": "float32"})
        cfg = run.cfg
        batch = make_batch(run)
        params = run.task["init"](jax.random.key(0), cfg)
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
    """(objective, cross-entropy) by the definition of the model, without code of model.py."""
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


def record_gradients(event, optimizer):
    """A hook that keeps the gradient of the last step in the optimizer's state."""
    if event != "optimizer":
        return None

    def init(params):
        return {"inner": optimizer.init(params), "grads": jax.tree.map(jnp.zeros_like, params)}

    def update(grads, state, params):
        directions, inner = optimizer.update(grads, state["inner"], params)
        return directions, {"inner": inner, "grads": grads}

    return optax.GradientTransformation(init, update)


def numbers(dtype, attention, variants):
    """Compare a step of the small model in each of VARIANTS with float64, compiled side by side."""
    def compare(variant):
        case, changes = variant
        name = " ".join([case, *(f"{k} {v}" for k, v in changes.items())])
        try:
            found = small_step(case, {"dtype": dtype, "attention": attention} | changes)
        except Exception as e:  # the other variants are still worth a look
            return record("FAIL", name, f"{type(e).__name__}: {str(e).splitlines()[0][:300]}")
        return against_float64(name, case, found, "tf32" if variants == "tf32" else dtype)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        yield from pool.map(compare, VARIANTS[variants])


def small_step(case, changes):
    """Take one compiled step; return {"loss", "norm", "lr", "grads", "old", "new", "cfg"}."""
    run = run_of(SMALL | CASES[case] | changes, hooks=(record_gradients,))
    programs = programs_of(run)
    saved = np.load(reference_path(case))
    old = {}
    params = {}
    for name, x in programs["state"]["params"].items():
        old[name] = saved[f"params/{name}"]
        params[name] = jax.device_put(old[name], x.sharding)
    state = programs["init"](jax.random.key(0), params=params)
    state, metrics = programs["train_step"](
        state, make_batch(run), steplib.lr_at(0, run.cfg))
    return {"loss": float(steplib.means(metrics["sums"])["loss"]),
            "norm": float(metrics["grad_norm"]), "lr": float(metrics["lr"]),
            "grads": jax.device_get(state["opt"]["grads"]), "old": old,
            "new": jax.device_get(state["params"]), "cfg": run.cfg}


def against_float64(name, case, found, precision):
    """Compare loss and gradients with the reference, and moves with AdamW in float64."""
    saved = np.load(reference_path(case))
    cfg = found["cfg"]
    loss_error = abs(found["loss"] / float(saved["loss"]) - 1)
    # A factor of all gradients changes only their norm before clipping.
    norm_error = abs(found["norm"] / float(saved["norm"]) - 1)
    errors = {}
    moves = {}
    for each, grad in found["grads"].items():
        errors[each] = relative_error(grad, saved[f"grads/{each}"])
        # The first step of AdamW: the gradient divided by its absolute value, and weight decay.
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
    """The record of the largest of {name: error}, with its name."""
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    found = checked(what, errors[worst], bound, f"{what} by up to")
    found["text"] += f" in {worst}"
    found["figures"]["errors"] = errors
    return found


def relative_error(found, expected):
    """|found - expected| / |expected| in float64, by the 2-norm."""
    if found.dtype.itemsize < 4:  # NumPy does not convert bfloat16 to float64
        found = np.asarray(found, np.float32)
    difference = np.linalg.norm(np.ravel(np.float64(found) - np.float64(expected)))
    return float(difference / max(np.linalg.norm(np.ravel(expected)), 1e-30))


# Expressions that some version of XLA got wrong on some device, of xp, jax.numpy or numpy, and x.

def product_with_a_number(xp, x):
    return ((x @ xp.full_like(x, 0.5)) * x).sum(-1)


def softmax_of_products_times_ones(xp, x):
    scores = x @ xp.swapaxes(x, -1, -2)
    weights = xp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return ((weights @ xp.ones_like(x)) * x).sum(-1)


def squares_of_many_rows(xp, x):
    return ((x @ xp.eye(x.shape[-1], dtype=x.dtype)) ** 2).sum(-1)


def squares_of_many_rows_by_vmap(xp, x):
    """The same by vmap, which gives another program; NumPy has no vmap."""
    if xp is np:
        return squares_of_many_rows(np, x)
    return jax.vmap(lambda row: ((jnp.eye(row.shape[0]) @ row) ** 2).sum())(x)


def bfloat16_product_with_a_float32_sum(xp, x):
    x = x.astype(jnp.bfloat16)
    if xp is np:
        return x.astype(np.float64) @ x.T.astype(np.float64)
    return jnp.matmul(x, x.T, preferred_element_type=jnp.float32)


FORMS = (
    (product_with_a_number, (5, 60, 60)),
    (softmax_of_products_times_ones, (5, 60, 60)),
    (squares_of_many_rows, (32_769, 3)),  # jax issue 39103
    (squares_of_many_rows_by_vmap, (32_769, 3)),
    (bfloat16_product_with_a_float32_sum, (64, 8192)),
)
FORM_BOUND = 1e-5  # of the relative error, by the norm


def known_forms():
    """Compare each of FORMS with NumPy in float64."""
    device = jax.devices()[0]
    dtype = steplib.choose_dtype("auto", steplib.platform(device))
    options = steplib.compiler_options(train.config.Config(dtype=dtype), device)
    for form, shape in FORMS:
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        expected = form(np, np.float64(x))
        of_jax = partial(form, jnp)
        with jax.default_matmul_precision("highest"):
            jitted = np.asarray(jax.jit(of_jax, compiler_options=options)(x))
            eager = np.asarray(of_jax(jnp.asarray(x)))
        checks = [checked("compiled", relative_error(jitted, expected), FORM_BOUND,
                          "compiled, off by")]
        if device.platform != "cpu":  # on a CPU eager operations have other options
            checks.append(checked("eager", relative_error(eager, expected), FORM_BOUND,
                                  "operation by operation"))
        yield together(form.__name__.replace("_", " "), checks)


# ---- determinism

# On a CPU a step that takes a few milliseconds, and that several threads still share.
FAST = dict(n_layers=1, d_model=128, n_heads=2, n_kv_heads=1, head_dim=64, d_ff=256, vocab_size=256,
            batch_size=4, seq_len=64)
N_CALLS, SECONDS = 5000, 25


def determinism(how):
    """Compare digests of one step in two processes; how: "default" or "deterministic" for a GPU,
    "threads-N" for so many threads of a CPU, or "step".
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
    """Call one compiled step many times, for at most SECONDS; compare the digests."""
    option, _, n_threads = how.partition("-")
    if option == "threads" and hasattr(os, "sched_setaffinity"):  # before JAX makes its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(n_threads)])
    fields = SMALL | CASES["plain"] | {"deterministic": option == "deterministic"}
    if jax.devices()[0].platform == "cpu":
        fields |= FAST
    run = run_of(fields)
    programs = programs_of(run)
    batch = make_batch(run)
    initial = programs["init"](jax.random.key(0))
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    first, n_different, n_done, wrong = None, 0, 0, ""
    began = time.monotonic()
    while n_done < int(n_calls) and time.monotonic() - began < SECONDS:
        state, _ = programs["train_step"](
            copy(initial), batch, steplib.lr_at(0, run.cfg))
        digest = jax.device_get(programs["digest"](state))
        n_done += 1
        first = first or digest
        differences = different_tensors(digest, first)
        if differences:
            n_different += 1
            wrong = wrong or f", the first is that of {differences[0]} in call {n_done}"
    found = checked(f"{n_done} calls of one step, {how}, {run.cfg.dtype}", n_different, 0,
                    "other digests:")
    found["text"] += wrong
    found["figures"]["digest"] = jax.tree.map(lambda x: x.tolist(), first)
    yield found


def different_tensors(digest, other):
    """The names of the arrays whose sums differ. digest: of step.digest_sums."""
    return [f"{part} {name}" for part in digest for name in digest[part]
            if list(digest[part][name]) != list(other[part][name])]


# ---- a mesh

def mesh():
    """Train three steps on one device and on all of them along each axis; compare the losses."""
    n = len(jax.devices())
    dense = SMALL | CASES["plain"] | dict(
        batch_size=2 * n, seq_len=32 * n, grad_accum_steps=1, n_heads=n, n_kv_heads=n, head_dim=16,
        dtype="float32", attention="xla")
    experts = dense | {"n_experts": n}
    expected = {"dense": three_losses(run_of(dense)), "experts": three_losses(run_of(experts))}
    for axis in steplib.AXES:
        kind, sizes = ("experts", experts) if axis == "ep" else ("dense", dense)
        try:
            # One axis has all devices, also if it is fsdp.
            found = three_losses(run_of(sizes | {axis: n}, n))
        except ValueError as e:  # a mesh that this model cannot have
            yield record("SKIP", f"{axis} {n}", str(e).splitlines()[0])
            continue
        error = max(abs(a / b - 1) for a, b in zip(found, expected[kind]))
        text = f"losses {', '.join(f'{x:.6f}' for x in found)}: relative difference to one device"
        yield checked(f"{axis} {n}", error, 1e-5, text)


def three_losses(run):
    """The losses of three steps."""
    programs = programs_of(run)
    batch = make_batch(run)
    state = programs["init"](jax.random.key(0))
    losses = []
    for i in range(3):
        lr = steplib.lr_at(i, run.cfg)
        state, metrics = programs["train_step"](state, batch, lr)
        losses.append(float(steplib.means(metrics["sums"])["loss"]))
    return losses


# ---- resume

N_STEPS, SAVE_EVERY, KILL_STEP = 160, 40, 100
KILL = """
import os, signal
def kill(event, row):
    if event == "step" and row["step"] == int(os.environ["KILL_STEP"]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def resume():
    """Kill a run, resume it, and compare its last checkpoint with that of an undisturbed run."""
    folder = Path(os.environ["CHECK_SCRATCH"], "resume")
    folder.mkdir()
    hooks = folder / "hooks.py"
    hooks.write_text(KILL, encoding="utf-8")

    def launch(name, kill_step):
        """(exit code, last line) of a run."""
        flags = (f"--steps {N_STEPS} --save_every {SAVE_EVERY} --log_every 1 --eval_every 0 "
                 "--sample_tokens 0 --deterministic --d_model 64 --n_layers 2 --n_heads 4 "
                 "--seq_len 64 --data train.py --val_frac 0")
        command = [sys.executable, "train.py", *flags.split(), "--cache_dir", cache_dir(),
                   "--out_dir", str(folder / name), "--hooks", f"{hooks}:kill"]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             cwd=ROOT, env=os.environ | {"KILL_STEP": str(kill_step)})
        return run.returncode, (run.stdout.strip().splitlines() or [""])[-1][:300]

    # One after the other: only one process at a time can use a TPU.
    for name, kill_step in (("killed", KILL_STEP), ("killed", 0), ("whole", 0)):
        code, line = launch(name, kill_step)
        if code != (-signal.SIGKILL if kill_step else 0):
            yield record("FAIL", name, f"exit code {code}: {line}")
            return
    found = {}
    for name in ("killed", "whole"):
        tree = train.ckpt.restore(str(folder / name / "ckpt"), N_STEPS)
        found[name], _ = train.ckpt.flatten(tree)
    killed, whole = found["killed"], found["whole"]
    wrong = [name for name in sorted(killed.keys() | whole.keys())
             if name not in killed or name not in whole
             or killed[name].tobytes() != whole[name].tobytes()]
    result = checked("killed and resumed", len(wrong), 0, f"killed after step {KILL_STEP} of "
                     f"{N_STEPS} and resumed; arrays of the last checkpoint that differ:")
    if wrong:
        result["text"] += f", the first is {wrong[0]}"
    yield result


if __name__ == "__main__":
    sys.exit(main())
