# SPDX-License-Identifier: Apache-2.0
"""Check that this machine computes what it should, and measure it.

    python tests/check.py                     everything that fits into --minutes 10
    python tests/check.py --only numbers      one part

For new hardware, a new driver or a new JAX. Each check prints PASS or FAIL with a figure and its
bound. Every item runs in a process of its own with a time limit, so that a crash or a hang fails
that item alone. The report is DIR/check.md, with a row for tests/RESULTS.md, and DIR/check.json;
DIR is --out_dir. The exit code is 1 if a check failed.
"""
import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

PARTS = {
    "speed": "tokens/s and MFU of named shapes, against the plan and PyTorch",
    "memory": "peak memory of these shapes, against the plan",
    "numbers": "loss, gradients and parameters of a step, against float64 on the CPU",
    "determinism": "thousands of calls of one step, and two processes, bit for bit",
    "resume": "a run that is killed and resumed, bit for bit",
    "mesh": "the losses of one device, on all devices along each axis",
}


# ---- the items of each part

def list_items(machine):
    """Return the items to run on a machine, the most telling first.

    machine: the result of `look`. An item has "part"; "name"; "call", a function of this file and
    its arguments; "limit_s", the seconds after which it is stopped; "alone", whether nothing else
    may run beside it; "background", whether it starts first and the others do not wait for it; and
    "env", the environment variables to set.
    """
    items = []

    def add(part, name, call, limit_s=240, alone=False, background=False, **env):
        items.append({"part": part, "name": name, "call": call, "limit_s": limit_s,
                      "alone": alone, "background": background, "env": env})

    def add_speed(shape):
        add("speed", shape, ["speed", shape], alone=True)

    def add_compilation(shape):
        add("speed", f"compilation of {shape}", ["speed", shape, "compile"])

    on_gpu = machine["platform"] in ("cuda", "old cuda")
    on_cpu = machine["platform"] == "cpu"
    shapes = [name for name, shape in SHAPES.items() if on_cpu == shape.get("cpu", False)]
    # The references are of the CPU, so that an accelerator need not wait for them.
    add("numbers", "reference", ["make_references"], alone=on_cpu, background=not on_cpu,
        JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1")
    add("speed", "rates", ["rates"], alone=True)
    add_speed(shapes[0])

    # Every dtype and attention kernel of this device; beside them, on the many cores of a machine
    # with an accelerator, the programs of the other shapes are compiled.
    if not on_cpu:
        for shape in shapes[1:]:
            add_compilation(shape)
    add("numbers", "known forms", ["known_forms"])
    for dtype, attention in kernels_of(machine):
        add("numbers", f"{dtype} {attention}", ["numbers", dtype, attention])
    for dtype, attention in kernels_of(machine):
        if dtype != "float16":
            add("numbers", f"{dtype} {attention}, operation by operation",
                ["op_by_op", dtype, attention])

    # One step, again and again.
    if on_gpu:
        add("determinism", "--deterministic", ["determinism", "deterministic"])
        add("determinism", "default", ["determinism", "default"])
    else:
        for n_threads in sorted({1, machine["threads"]}):
            add("determinism", f"{n_threads} threads", ["determinism", f"threads={n_threads}"])
    add("resume", "killed and resumed", ["resume"])
    if machine["n_devices"] > 1:
        add("mesh", f"{machine['n_devices']} devices", ["mesh"])
    elif on_cpu:
        add("mesh", "4 devices of one CPU", ["mesh"],
            XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4")

    # Peers, and the other shapes.
    if machine["torch"]:
        add("speed", f"PyTorch with torch.compile, {shapes[0]}", ["peer", shapes[0], "compiled"],
            alone=True)
    for shape in shapes[1:]:
        add_speed(shape)
    if machine["torch"]:
        add("speed", f"PyTorch, {shapes[0]}", ["peer", shapes[0], "eager"], alone=True)
    return items


def kernels_of(machine):
    """Return the pairs (dtype, attention kernel) that a platform offers, the default first."""
    return {
        "cuda": [("bfloat16", "cudnn"), ("float32", "xla"), ("bfloat16", "xla"),
                 ("float16", "cudnn")],
        "old cuda": [("float16", "xla"), ("float32", "xla")],
        "tpu": [("bfloat16", "pallas"), ("float32", "xla"), ("bfloat16", "xla")],
    }.get(machine["platform"], [("float32", "xla"), ("mixed", "xla"), ("bfloat16", "xla")])


# Flags of train.py. "cpu": a shape for CPUs; "torch": sizes of the PyTorch model beside it.
GPT2_SIZES = dict(n_layers=12, d_model=768, n_heads=12, vocab_size=50304, seq_len=1024)
CHARACTER_SIZES = dict(n_layers=6, d_model=384, n_heads=6, vocab_size=65, seq_len=256)
SHAPES = {
    "gpt2-124m, 60 x 1024": {
        "flags": dict(config="gpt2-124m", batch_size=60, grad_accum_steps=1),
        "torch": GPT2_SIZES | dict(batch_size=60)},
    "1.56B, 16 x 1024, remat named": {
        "flags": dict(d_model=1600, n_layers=48, n_heads=25, d_ff=4288, vocab_size=50304,
                      seq_len=1024, optimizer="adamw", batch_size=16, remat="named")},
    "gpt2-124m preset": {"flags": dict(config="gpt2-124m")},
    "8 layers of llama-8b, 2 x 4096": {
        "flags": dict(config="llama-8b", n_layers=8, batch_size=2, grad_accum_steps=1,
                      seq_len=4096, remat="named")},
    "gpt2-124m of 13 layers, 60 x 1024": {
        "flags": dict(config="gpt2-124m", n_layers=13, batch_size=60, grad_accum_steps=1)},
    "2 layers of llama-8b, 1 x 65536": {
        "flags": dict(config="llama-8b", n_layers=2, batch_size=1, grad_accum_steps=1,
                      seq_len=65536, remat="full", mlp_tiles=8)},
    "character model, 12 x 256": {
        "cpu": True,
        "flags": dict(n_layers=6, d_model=384, n_heads=6, d_ff=1024, vocab_size=65, seq_len=256,
                      batch_size=12, optimizer="adamw"),
        "torch": CHARACTER_SIZES | dict(batch_size=12)},
    "default model": {"cpu": True, "flags": {}},
}


# ---- the command

def main():
    """Run the items, print a line for each check, and write the report. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="start no item after this time")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD",
                        help=f"run the items whose part or name has one of these words; parts: "
                             f"{', '.join(PARTS)}")
    parser.add_argument("--out_dir", default="out/check", help="folder of the report")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)  # one item, in this process
    args = parser.parse_args()
    if args.run:
        name, *rest = args.run
        print(json.dumps(globals()[name](*rest)))
        return 0

    out_dir = Path(args.out_dir).absolute()
    out_dir.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    deadline = began + 60 * args.minutes
    with tempfile.TemporaryDirectory() as scratch:
        context = {"began": began, "deadline": deadline, "out_dir": out_dir, "scratch": scratch,
                   "records": []}
        looked = run_item({"part": "machine", "name": "look", "call": ["look"], "limit_s": 120,
                           "alone": True, "env": {}}, context)
        if "figures" not in looked[0]:
            sys.exit(f"JAX does not start on this machine: {looked[0]['text']}")
        context["machine"] = looked[0]["figures"]
        print(describe(context["machine"]), flush=True)
        if context["machine"]["platform"] != "cpu" and context["machine"]["n_devices"] == 1:
            print("mesh: one device, so there is nothing to compare", flush=True)
        items = list_items(context["machine"])
        run_items(choose(items, args.only), context)
    report = write_report(context)
    failed = [each for each in context["records"] if each["status"] == "FAIL"]
    print(f"{len(failed)} failed of {len(context['records'])}; report: {report}")
    return int(bool(failed))


def choose(items, words):
    """Return the items whose part or name has one of the words, and what these items need."""
    if not words:
        return items
    chosen = []
    for item in items:
        text = f"{item['part']} {item['name']}"
        # Memory is measured with speed; numbers need their references.
        if item["part"] == "speed":
            text += " memory"
        needed = item["name"] == "reference" and any(
            word in f"{other['part']} {other['name']}"
            for word in words for other in items if other["part"] == "numbers")
        if needed or any(word in text for word in words):
            chosen.append(item)
    return chosen


def run_items(items, context):
    """Run items in their order; those beside one another that need not be alone run together."""
    n_jobs = max(1, context["machine"]["threads"] // 2)
    if context["machine"]["platform"] == "cpu":
        n_jobs = 1
    background = [item for item in items if item["background"]]
    items = [item for item in items if not item["background"]]
    pool = ThreadPoolExecutor()
    started = [pool.submit(run_item, item, context) for item in background]
    while items:
        # The items up to the next one that has to be alone.
        together = []
        while items and not items[0]["alone"]:
            together.append(items.pop(0))
        with ThreadPoolExecutor(n_jobs) as pool:
            for item in together:
                pool.submit(run_item, item, context)
        if items:
            run_item(items.pop(0), context)
    for future in started:
        future.result()


def run_item(item, context):
    """Run one item in a process; print its records, add them to the context, and return them."""
    left_s = context["deadline"] - time.monotonic()
    if left_s < 5:
        records = [{"status": "SKIP", "name": item["name"], "text": "no time was left"}]
        return add_records(item, records, context)
    limit_s = min(item["limit_s"], left_s + 5)
    env = dict(os.environ)
    if not item["alone"]:  # several processes share the memory of a GPU
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    env |= item["env"]
    env |= {"CHECK_SCRATCH": context["scratch"], "CHECK_OUT": str(context["out_dir"])}
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, __file__, "--run", *item["call"]], env=env, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=limit_s)
        last_line = (output.strip().splitlines() or [""])[-1]
        records = json.loads(last_line)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        status, text = "FAIL", f"stopped after {limit_s:.0f} s"
        if limit_s < item["limit_s"]:
            status, text = "SKIP", "not finished in the time that was left"
        records = [{"status": status, "name": item["name"], "text": text}]
    except json.JSONDecodeError:
        name = item["part"] + "-" + item["name"]
        path = context["out_dir"] / f"{file_name(name)}.log"
        path.write_text(output + errors)
        last_error = (errors.strip().splitlines() or [""])[-1]
        text = f"ended with {process.returncode}: {last_error[:300]} (see {path})"
        records = [{"status": "FAIL", "name": item["name"], "text": text}]
    for record in records:
        record["seconds"] = time.monotonic() - started
    return add_records(item, records, context)


def add_records(item, records, context):
    for record in records:
        record.setdefault("part", item["part"])
        if record["part"] != "machine":
            context["records"].append(record)
            seconds = int(time.monotonic() - context["began"])
            print(f"[{seconds // 60:2d}:{seconds % 60:02d}] {record['status']:4} "
                  f"{record['part']:11} {record['name']}: {record['text']}", flush=True)
    return records


def file_name(text):
    """Return a text as the name of a file: letters, digits and hyphens."""
    return "-".join("".join(c if c.isalnum() else " " for c in text).split())


def checked(name, value, bound, text="", **more):
    """Return the record of a check: it passes if value <= bound. NaN fails."""
    status = "PASS" if value <= bound else "FAIL"
    figure = f"{value:.2g} (at most {bound:g})"
    return more | {"name": name, "status": status, "value": value, "bound": bound,
                   "text": f"{text} {figure}".strip()}


# ---- the machine and the report

def look():
    """Describe devices, driver, versions and flags; imports JAX."""
    import jax

    import train
    device = jax.devices()[0]
    described = train.steplib.describe_machine(device)
    from importlib.metadata import PackageNotFoundError, version
    versions = {}
    for package in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "optax", "numpy",
                    "tensorstore", "torch", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    flags = {name: value for name, value in os.environ.items()
             if name.startswith(("XLA_", "JAX_", "NCCL_", "LIBTPU_")) and "CHECK" not in name}
    figures = described | {
        "kind": device.device_kind,
        "platform": train.steplib.platform(device),
        "n_devices": len(jax.devices()),
        "python": sys.version.split()[0],
        "versions": versions,
        "flags": flags,
        "torch": "torch" in versions,
    }
    with contextlib.suppress(Exception):  # a CPU has none
        figures["memory_limit"] = device.memory_stats()["bytes_limit"]
    return [{"status": "INFO", "name": "machine", "text": "", "figures": figures}]


def describe(machine):
    """Return the machine in one line."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    kind = machine["kind"] if machine["platform"] != "cpu" else machine["cpu"]
    line = f"{machine['n_devices']} x {kind}, {machine['threads']} threads"
    if machine["driver"]:
        line += f"; {machine['driver']}"
    return f"{line}; Python {machine['python']}, {versions}"


def write_report(context):
    """Write check.json and check.md; return the path of check.md."""
    machine, records = context["machine"], context["records"]
    (context["out_dir"] / "check.json").write_text(
        json.dumps({"machine": machine, "records": records}, indent=1))
    lines = ["# Check", "", describe(machine), ""]
    if machine["flags"]:
        lines += ["Flags: " + ", ".join(f"`{n}={v}`" for n, v in machine["flags"].items()), ""]
    lines += ["| part | check | result | figures |", "| --- | --- | --- | --- |"]
    for each in records:
        text = each["text"].replace("|", "/").replace("\n", " ")
        lines.append(f"| {each['part']} | {each['name']} | {each['status']} | {text} |")
    n_failed = sum(each["status"] == "FAIL" for each in records)
    speeds = [f"{each['name']} {each['text']}" for each in records
              if each["part"] == "speed" and "tokens_per_s" in each.get("figures", {})]
    lines += ["", "A row for tests/RESULTS.md:", "",
              f"| {describe(machine)} | {time.strftime('%Y-%m-%d')}: {n_failed} of {len(records)} "
              f"checks failed | {'; '.join(speeds)} |", ""]
    path = context["out_dir"] / "check.md"
    path.write_text("\n".join(lines))
    return path


# ---- speed and memory

def rates():
    """Measure a large matrix product and a large copy: what this device reaches at all."""
    import jax
    import jax.numpy as jnp
    on_cpu = jax.devices()[0].platform == "cpu"
    n, dtype, n_bytes = (2048, jnp.float32, 2**28) if on_cpu else (8192, jnp.bfloat16, 2**32)
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (n, n), dtype) for key in keys)
    x = jax.random.normal(keys[0], (n_bytes // 4,), jnp.float32)
    product_s = seconds_of(jax.jit(jnp.matmul), a, b)
    copy_s = seconds_of(jax.jit(lambda x: -x), x)
    tflops = 2 * n**3 / product_s / 1e12
    gbps = 2 * n_bytes / copy_s / 1e9
    text = f"{n}^3 product in {a.dtype} {tflops:,.4g} TFLOP/s; copy {gbps:,.4g} GB/s"
    return [{"status": "INFO", "name": "rates", "text": text,
             "figures": {"tflops": tflops, "gbps": gbps}}]


def seconds_of(f, *args, n=10):
    """Return the median seconds of a call, of 10 calls in a row each."""
    import jax
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(n):
            result = f(*args)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / n)
    return statistics.median(times)


def config_of(shape):
    """Return the config of a shape, as the command line would make it."""
    import train
    flags = dict(SHAPES[shape]["flags"])
    preset = train.config.PRESETS.get(flags.pop("config", None), {})
    return train.config.Config(**(preset | flags), out_dir="", fsdp=1, sample_tokens=0,
                               val_frac=0.0)


def speed(shape, until="end"):
    """Measure the speed and the peak memory of a shape, and compare both with the plan.

    until="compile": only compile, so that a later process finds the programs in the cache.
    """
    import jax
    import numpy as np

    import train
    steplib = train.steplib
    setup = train.setup_run(config_of(shape))
    cfg, mesh = setup["cfg"], setup["mesh"]
    device = mesh.devices.flat[0]

    # Compile as a run does, and predict from the compiled program.
    began = time.perf_counter()
    lowered = steplib.lower_steps(*train.step_args(setup))
    update = lowered["train_step"]().compile()
    init = lowered["init"]().compile()
    compile_s = time.perf_counter() - began
    if until == "compile":
        return [{"status": "INFO", "name": f"compilation of {shape}", "text": f"{compile_s:.0f} s"}]
    memory = steplib.memory_by_kind(lowered["state"], update)
    steplib.check_fits(memory, mesh)

    # Random tokens: the speed of a dense model does not depend on them.
    rng = np.random.default_rng(0)
    batch = {}
    for name, x in setup["batch"].items():
        values = rng.integers(0, cfg.vocab_size, x.shape).astype(x.dtype)
        batch[name] = jax.device_put(values, x.sharding)
    state = init(jax.random.key(0))
    scalars = steplib.run_scalars(cfg)

    # Time whole steps, without waiting between them.
    state, metrics = update(state, batch, scalars)
    state, metrics = update(state, batch, scalars)
    losses = [float(metrics["loss"])]
    began = time.perf_counter()
    state, metrics = update(state, batch, scalars)
    jax.block_until_ready(metrics)
    once_s = time.perf_counter() - began
    n_steps = int(min(max(3 / once_s, 3), 50))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(n_steps):
            state, metrics = update(state, batch, scalars)
        losses.append(float(metrics["loss"]))
        times.append((time.perf_counter() - began) / n_steps)
    step_s = statistics.median(times)

    if not math.isfinite(losses[-1]):
        return [{"status": "FAIL", "name": shape, "text": f"the loss is {losses[-1]}"}]

    # The speed, with the plan's time model for this program.
    tokens = cfg.batch_size * cfg.seq_len
    flops, recomputed, _ = setup["task"]["flops"]({}, cfg)
    flop = {"model": flops * tokens / mesh.size, "recomputed": recomputed * tokens / mesh.size}
    text = f"{1000 * step_s:,.4g} ms a step, {tokens / step_s:,.0f} tokens/s"
    figures = {"step_s": step_s, "times": times, "tokens_per_s": tokens / step_s,
               "compile_s": compile_s, "memory": memory, "losses": losses, "n_steps": n_steps}
    tflops, _ = steplib.peaks(device.device_kind)
    if tflops:
        figures["mfu"] = flop["model"] / step_s / tflops / 1e12
        text += f", MFU {figures['mfu']:.1%}"
    records = [{"status": "INFO", "name": shape, "text": f"{text}; compiled in {compile_s:.0f} s",
                "figures": figures}]
    records.append(attempt(f"plan of {shape}", planned, update, mesh, flop))
    records.append(attempt(f"memory of {shape}", peak_memory, shape, device, memory))
    if device.platform != "cpu":
        records.append(
            attempt(f"kernels of {shape}", kernels, shape, update, state, batch, scalars))
    return [record for record in records if record]


def attempt(name, f, *args):
    """Return the record f(*args), or one of its failure: what was measured before is kept."""
    try:
        return f(*args)
    except Exception as e:
        return {"status": "FAIL", "name": name, "text": f"{type(e).__name__}: {e}"[:300]}


def planned(update, mesh, flop):
    """Return the record of plan.py's time model for a compiled program; None without its rates."""
    import plan
    kind = mesh.devices.flat[0].device_kind
    sent, written, hosted = plan.traffic(update.as_text(), mesh)
    cost = {"flop": flop, "collectives": sent, "memory_traffic_bytes": 2 * written,
            "host_bytes": hosted, "sent_bytes": sum(n_bytes for _, n_bytes in sent.values())}
    found = plan.roofline(cost, kind)
    if not found:
        return None
    text = f"{1000 * found['step_s']:,.4g} ms a step, MFU {found['mfu']:.1%}"
    return {"status": "INFO", "name": "planned", "text": text, "figures": found}


def peak_memory(shape, device, memory):
    """Compare the peak of the device's memory with what the program was planned to need."""
    stats = None
    with contextlib.suppress(Exception):
        stats = device.memory_stats()
    if not stats:
        return {"status": "SKIP", "part": "memory", "name": shape,
                "text": "this device does not count its memory; planned "
                        f"{memory['total'] / 2**30:.3g} GiB"}
    peak, limit = stats["peak_bytes_in_use"], stats["bytes_limit"]
    text = (f"peak {peak / 2**30:.3g} GiB, planned {memory['total'] / 2**30:.3g} of "
            f"{limit / 2**30:.3g} GiB; relative difference")
    return checked(shape, abs(peak / memory["total"] - 1), 0.1, text, part="memory",
                   figures={"peak": peak, "planned": memory["total"], "limit": limit})


def kernels(shape, update, state, batch, scalars):
    """Trace two steps, and write the time of each kernel to a file."""
    import jax
    folder = Path(os.environ["CHECK_SCRATCH"], f"trace-{os.getpid()}")
    with jax.profiler.trace(str(folder)):
        for _ in range(2):
            state, metrics = update(state, batch, scalars)
        jax.block_until_ready(metrics)
    (path,) = folder.rglob("*.xplane.pb")
    trace = jax.profiler.ProfileData.from_file(str(path))
    totals = {}
    for plane in trace.planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    row = totals.setdefault(event.name, [0, 0.0])
                    row[0] += 1
                    row[1] += event.duration_ns
    shutil.rmtree(folder)
    busy_ms = sum(ns for _, ns in totals.values()) / 2e6
    n_kernels = sum(count for count, _ in totals.values()) // 2
    lines = [f"{busy_ms:.3f} ms in {n_kernels} kernels a step"]
    for name, (count, ns) in sorted(totals.items(), key=lambda row: -row[1][1]):
        lines.append(f"{ns / 2e6:10.3f} ms {count / 2:8.1f} x  {name[:200]}")
    path = Path(os.environ["CHECK_OUT"], f"kernels-{file_name(shape)}.txt")
    path.write_text("\n".join(lines) + "\n")
    return {"status": "INFO", "name": f"kernels of {shape}", "text": f"{lines[0]}: {path.name}",
            "figures": {"busy_ms": busy_ms, "n_kernels": n_kernels}}


def peer(shape, how):
    """Measure PyTorch's GPT of a shape, in bfloat16 on a GPU and in float32 on a CPU."""
    import torch

    import bench
    sizes = SHAPES[shape]["torch"]
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    began = time.perf_counter()
    update, tokens = bench.torch_train_step(sizes, dtype, compiled=how == "compiled")
    update()
    first_s = time.perf_counter() - began
    per_s = bench.rate(update, tokens)
    text = f"{per_s:,.0f} tokens/s in {dtype}; first step after {first_s:.0f} s"
    return [{"status": "INFO", "name": f"PyTorch, {how}, {shape}", "text": text,
             "figures": {"tokens_per_s": per_s, "first_s": first_s}}]


# ---- numbers

# Small models that take every path: two microbatches and tiles of the loss; several documents in a
# row; a long sequence with a window, which XLA's attention handles by blocks.
SMALL = dict(n_layers=2, d_model=256, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=512,
             vocab_size=512, optimizer="adamw", lr=1e-3, warmup_steps=0.0, schedule="constant",
             steps=100, fsdp=1, sample_tokens=0, val_frac=0.0, out_dir="")
CASES = {
    "plain": dict(batch_size=8, seq_len=256, grad_accum_steps=2, logit_tiles=2),
    "documents": dict(batch_size=4, seq_len=256, document_mask=True),
    "window": dict(batch_size=2, seq_len=2048, sliding_window=300),
}

# Largest relative errors, in the norm, of the models above. On CPUs a gradient is off by up to 2e-5
# in float32, and by up to 2.5e-2 in bfloat16 and "mixed"; with products in TF32 by 1e-3.
GRADIENT_BOUNDS = {"float32": 1e-4, "mixed": 5e-2, "bfloat16": 5e-2, "float16": 1e-2}
LOSS_BOUNDS = {"float32": 2e-6, "mixed": 1e-3, "bfloat16": 1e-3, "float16": 2e-4}
UPDATE_BOUND = 1e-3  # of AdamW's move: the rounding of float32 parameters, which are larger


def small_config(case, **changes):
    import train
    return train.config.Config(**(SMALL | CASES[case] | changes))


def make_batch(case):
    """Return the NumPy arrays of a batch: random tokens, a tenth of the labels ignored."""
    import numpy as np
    sizes = SMALL | CASES[case]
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


def make_references():
    """Compute loss and gradients of each case in float64 on the CPU, by a definition of the model
    that shares no code with model.py, operation by operation.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import train
    assert jax.config.jax_enable_x64 and jax.devices()[0].platform == "cpu"
    largest = 0.0
    for case in CASES:
        setup = train.setup_run(small_config(case, dtype="float32"))
        cfg = setup["cfg"]
        params = setup["task"]["init"](jax.random.key(0), cfg)
        # Scales other than 1, so that a forgotten one is noticed.
        rng = np.random.default_rng(1)
        for name, x in params.items():
            if "norm" in name:
                params[name] = x * rng.uniform(0.5, 1.5, x.shape).astype(np.float32)
        wide = {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in params.items()}
        with jax.disable_jit():
            (_, loss), grads = jax.value_and_grad(
                lambda p: define_loss(p, make_batch(case), cfg), has_aux=True)(wide)  # noqa: B023
        assert loss.dtype == jnp.float64
        largest = max(largest, float(loss))
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        clip = min(1.0, cfg.clip_norm / norm) if cfg.clip_norm else 1.0
        arrays = {f"params/{name}": np.asarray(x) for name, x in params.items()}
        arrays |= {f"grads/{name}": np.asarray(clip * g) for name, g in grads.items()}
        path = Path(os.environ["CHECK_SCRATCH"], f"{case}.npz")
        np.savez(path.with_suffix(".part.npz"), loss=np.asarray(loss), **arrays)
        path.with_suffix(".part.npz").rename(path)
    return [{"status": "INFO", "name": "reference", "text": f"float64 losses up to {largest:.4f}"}]


def define_loss(params, batch, cfg):
    """Return (objective, cross-entropy) of a batch by the definition of the model, in the dtype of
    the parameters.
    """
    import jax
    import jax.numpy as jnp
    tokens, labels = batch["tokens"], batch["labels"]
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
        first, second = x[..., :H // 2], x[..., H // 2:]
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


def load_reference(case):
    """Return the arrays of make_references, once that is done."""
    import numpy as np
    path = Path(os.environ["CHECK_SCRATCH"], f"{case}.npz")
    while not path.exists():
        time.sleep(0.2)
    return np.load(path)


def recording(optimizer):
    """Return the optimizer with the gradient of the last step in its state."""
    import jax
    import jax.numpy as jnp
    import optax

    def init(params):
        return {"inner": optimizer.init(params), "grads": jax.tree.map(jnp.zeros_like, params)}

    def update(grads, state, params):
        directions, inner = optimizer.update(grads, state["inner"], params)
        return directions, {"inner": inner, "grads": grads}

    return optax.GradientTransformation(init, update)


def small_step(case, dtype, attention, **changes):
    """Compile a step; return a function () -> {"loss", "grads", "old", "new"} that runs it."""
    import jax

    import train
    setup = train.setup_run(small_config(case, dtype=dtype, attention=attention, **changes))
    args = list(train.step_args(setup))
    args[6] = lambda name, value: recording(value) if name == "optimizer" else value
    programs = train.steplib.compile_steps(*args)
    saved = load_reference(case)

    def run():
        params = {}
        for name, x in programs["state"]["params"].items():
            params[name] = jax.device_put(saved[f"params/{name}"], x.sharding)
        batch = {name: jax.device_put(values, setup["batch"][name].sharding)
                 for name, values in make_batch(case).items()}
        state = programs["from_params"](jax.random.key(0), params=params)
        state, metrics = programs["train_step"](state, batch)
        return {"loss": float(metrics["loss"]), "lr": float(metrics["lr"]),
                "grads": jax.device_get(state["opt"]["grads"]),
                "new": jax.device_get(state["params"]),
                "old": {name: saved[f"params/{name}"] for name in params}, "cfg": setup["cfg"]}

    return run


def numbers(dtype, attention):
    """Compare compiled steps of one dtype and attention kernel with float64, under each remat."""
    import train
    variants = [("plain", {}), ("documents", {}), ("window", {})]
    for remat in train.model.REMAT:
        if remat != "none" and (dtype, attention) in (("bfloat16", "cudnn"), ("mixed", "xla"),
                                                      ("float32", "xla")):
            variants.append(("plain", {"remat": remat}))

    def compile(variant):
        case, changes = variant
        try:
            return small_step(case, dtype, attention, **changes)
        except Exception as e:
            return e

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        steps = list(pool.map(compile, variants))
    records = []
    for (case, changes), step in zip(variants, steps):
        name = " ".join([dtype, attention, case, *(f"{k} {v}" for k, v in changes.items())])
        if isinstance(step, Exception):
            text = f"{type(step).__name__}: {str(step).splitlines()[0][:200]}"
            records.append({"status": "FAIL", "name": name, "text": text})
            continue
        records.append(against_float64(name, case, dtype, step()))
    return records


def against_float64(name, case, dtype, found):
    """Return the record of one step: loss and gradients against the reference, and the moves of the
    parameters against AdamW in float64 from the step's own gradients.
    """
    import numpy as np
    saved = load_reference(case)
    loss = float(saved["loss"])
    loss_error = abs(found["loss"] / loss - 1)
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
        checked("loss", loss_error, LOSS_BOUNDS[dtype], f"loss {found['loss']:.6f}, off by"),
        worst_of("gradients", errors, GRADIENT_BOUNDS[dtype]),
        worst_of("moves", moves, UPDATE_BOUND),
    ])


def worst_of(what, errors, bound):
    """Return the record of the largest of {name: error}; it also names the first wrong one."""
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    text = f"{what} by up to"
    record = checked(what, errors[worst], bound, text, figures=errors)
    record["text"] += f" in {worst}"
    wrong = [name for name in errors if not errors[name] <= bound]
    if wrong:
        record["text"] += f", {len(wrong)} of {len(errors)} wrong, the first is {wrong[0]}"
    return record


def together(name, records):
    """Return several checks as one record, which passes if all of them do."""
    statuses = {record["status"] for record in records}
    return {"name": name, "status": "FAIL" if "FAIL" in statuses else "PASS",
            "text": ", ".join(record["text"] for record in records), "checks": records}


def relative_error(found, expected):
    """Return |found - expected| / |expected| in float64, by the 2-norm."""
    import numpy as np
    found = np.float64(np.asarray(found, np.float32)) if found.dtype.itemsize < 4 else found
    difference = np.linalg.norm(np.ravel(np.float64(found) - np.float64(expected)))
    return float(difference / max(np.linalg.norm(np.ravel(expected)), 1e-30))


def op_by_op(dtype, attention):
    """Compare the compiled step with the same functions executed operation by operation."""
    import jax
    import numpy as np

    import train
    steplib = train.steplib
    compiled = small_step("plain", dtype, attention, grad_accum_steps=1, logit_tiles=1)()
    cfg = compiled["cfg"]
    table = train.model.param_table(cfg)
    saved = load_reference("plain")
    params = {name: jax.numpy.asarray(saved[f"params/{name}"]) for name in table}
    batch = {name: jax.numpy.asarray(x) for name, x in make_batch("plain").items()}
    optimizer = recording(steplib.make_optimizer(cfg, table))
    state = steplib.init_state(jax.random.key(0), cfg, lambda key, cfg: params, optimizer, table)
    with jax.disable_jit():
        new, metrics = steplib.train_step(
            state, batch, cfg, train.model.loss_fn, optimizer, table)
    errors = {}
    for name, grad in compiled["grads"].items():
        errors[name] = relative_error(grad, np.asarray(new["opt"]["grads"][name]))
    return [together(f"{dtype} {attention}, compiled against operation by operation", [
        checked("loss", abs(compiled["loss"] / float(metrics["loss"]) - 1), LOSS_BOUNDS[dtype],
                "loss differs by"),
        worst_of("gradients", errors, GRADIENT_BOUNDS[dtype]),
    ])]


def known_forms():
    """Evaluate expressions that some version of XLA got wrong on some device, against NumPy."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import train
    device = jax.devices()[0]
    options = train.steplib.compiler_options(train.config.Config(), device)
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def scattered(x, ids, n):
        total = np.zeros((n, x.shape[1]))
        np.add.at(total, ids[ids < n], np.float64(x)[ids < n])
        return total

    cube, tall, square = normal(5, 60, 60), normal(4096, 64), normal(256, 256)
    rows, ids = normal(4096, 32), rng.integers(0, 120, 4096)
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
        "rows added, some out of range": (
            lambda x, i: jnp.zeros((100, 32)).at[i].add(x, mode="drop"),
            lambda x, i: scattered(x, i, 100), (rows, ids), 1e-5),
        "log-sum-exp": (
            lambda x: jax.nn.logsumexp(30 * x, axis=-1),
            lambda x: np.log(np.exp(30 * x - (30 * x).max(-1, keepdims=True)).sum(-1))
            + (30 * x).max(-1), (square,), 1e-6),
        "bfloat16 product with a float32 sum over 8,192": (
            lambda a, b: jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16),
                                    preferred_element_type=jnp.float32),
            lambda a, b: round_bfloat16(a) @ round_bfloat16(b), (wide, long), 1e-5),
    }
    records = []
    for name, (function, expected, args, bound) in forms.items():
        wanted = expected(*(np.float64(x) if x.dtype == np.float32 else x for x in args))
        compiled = jax.jit(function, compiler_options=options)
        with jax.default_matmul_precision("highest"):
            jitted = relative_error(np.asarray(compiled(*args)), wanted)
            eager = relative_error(np.asarray(function(*map(jnp.asarray, args))), wanted)
        checks = [checked("compiled", jitted, bound, "compiled, off by")]
        if device.platform != "cpu":  # on a CPU eager operations have other options
            checks.append(checked("eager", eager, bound, "operation by operation"))
        records.append(together(name, checks))
    return records


def round_bfloat16(x):
    import jax.numpy as jnp
    import numpy as np
    return np.float64(np.asarray(x, np.float32).astype(jnp.bfloat16).astype(np.float32))


# ---- determinism

def determinism(how, n_calls="2000", processes="2"):
    """Call one compiled step many times from one state, in two processes; compare the digests."""
    option, _, n_threads = how.partition("=")
    if option == "threads" and hasattr(os, "sched_setaffinity"):  # before JAX makes its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(n_threads)])
    # A second process, at the same time.
    other = None
    if processes == "2":
        command = [sys.executable, __file__, "--run", "determinism", how, "20", "1"]
        other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    import jax
    import jax.numpy as jnp

    import train
    setup = train.setup_run(small_config("plain", deterministic=option == "deterministic"))
    programs = train.steplib.compile_steps(*train.step_args(setup))
    batch = {name: jax.device_put(values, setup["batch"][name].sharding)
             for name, values in make_batch("plain").items()}
    initial = programs["init"](jax.random.key(0))
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    counts = {}
    began = time.monotonic()
    for _ in range(int(n_calls)):
        state, _ = programs["train_step"](copy(initial), batch)
        digest = "{params} {opt}".format(**train.steplib.digest(programs["digest"](state)))
        counts[digest] = counts.get(digest, 0) + 1
        if time.monotonic() - began > 30:
            break
    most_common = max(counts, key=counts.get)
    n_calls = sum(counts.values())
    n_different = n_calls - counts[most_common]
    name = f"{n_calls} calls of one step, {how}, {setup['cfg'].dtype}"
    record = checked(name, n_different, 0, "other digests:", digest=most_common)
    records = [record]
    if other:
        output, _ = other.communicate(timeout=120)
        theirs = json.loads(output.strip().splitlines()[-1])[0]["digest"]
        records.append(checked(f"two processes, {how}", int(theirs != most_common), 0,
                               "other digests:"))
    # Without the flag a GPU may add in another order: that is a fact, not an error.
    if option == "default":
        for record in records:
            record["status"] = "INFO"
    return records


# ---- a mesh

def mesh():
    """Train three steps on one device and on all of them along each axis; compare the losses."""
    import dataclasses

    import jax

    import train
    steplib = train.steplib
    n = len(jax.devices())
    sizes = dict(batch_size=2 * n, seq_len=32 * n, grad_accum_steps=1, n_heads=n, n_kv_heads=n,
                 head_dim=16, dtype="float32", attention="xla")
    losses = {}
    records = []
    for axis in ("one device", *steplib.AXES):
        n_experts = n if axis == "ep" else 0
        for n_used in ((1, n) if axis == "ep" else (1 if axis == "one device" else n,)):
            cfg = small_config("plain", **sizes, n_experts=n_experts)
            if axis in steplib.AXES:
                cfg = dataclasses.replace(cfg, **{"fsdp": 1, axis: n_used})
            try:
                losses[axis, n_used] = three_losses(cfg, jax.devices()[:n_used])
            except ValueError as e:
                records.append({"status": "SKIP", "name": f"{axis} {n_used}",
                                "text": str(e).splitlines()[0]})
    for (axis, n_used), found in losses.items():
        expected = losses["ep", 1] if axis == "ep" else losses["one device", 1]
        if n_used > 1:
            error = max(abs(a / b - 1) for a, b in zip(found, expected))
            records.append(checked(f"{axis} {n_used}", error, 1e-5,
                                   f"losses {', '.join(f'{x:.6f}' for x in found)}: "
                                   "relative difference to one device"))
    return records


def three_losses(cfg, devices):
    """Return the losses of three steps on these devices."""
    import jax
    import numpy as np

    import train
    setup = train.setup_run(cfg, devices=devices)
    programs = train.steplib.compile_steps(*train.step_args(setup))
    rng = np.random.default_rng(0)
    batch = {}
    for name, x in setup["batch"].items():
        values = rng.integers(0, cfg.vocab_size, x.shape).astype(x.dtype)
        batch[name] = jax.device_put(values, x.sharding)
    state = programs["init"](jax.random.key(0))
    losses = []
    for _ in range(3):
        state, metrics = programs["train_step"](state, batch)
        losses.append(float(metrics["loss"]))
    return losses


# ---- resume

def resume():
    """Kill a run with SIGKILL, resume it, and compare its last checkpoint with that of a run that
    nobody killed.
    """
    folder = Path(os.environ["CHECK_SCRATCH"])
    flags = ("--config debug --steps 60 --save_every 20 --log_every 1 --eval_every 0 "
             "--sample_tokens 0 --deterministic")

    def launch(name):
        command = [sys.executable, str(ROOT / "train.py"), *flags.split(), "--out_dir",
                   str(folder / name)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, cwd=ROOT)

    def rows(name):
        path = folder / name / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    whole, killed = launch("whole"), launch("killed")
    # Kill the second run once its first checkpoint exists and more steps are done.
    while killed.poll() is None:
        saved = [row for row in rows("killed") if row["event"] == "save"]
        if saved and rows("killed")[-1]["step"] >= 30:
            killed.kill()
        time.sleep(0.02)
    killed.communicate()
    was_killed = killed.returncode == -signal.SIGKILL
    resumed = launch("killed")
    output, _ = resumed.communicate()
    whole_output, _ = whole.communicate()
    if resumed.returncode or whole.returncode:
        last = (output if resumed.returncode else whole_output).strip().splitlines()[-1]
        return [{"status": "FAIL", "name": "killed and resumed", "text": last[:300]}]
    digests = [[row["digest"] for row in rows(name) if row["event"] == "save"][-1]
               for name in ("whole", "killed")]
    how = "killed after step 30 and resumed from step 20" if was_killed else "not killed in time"
    record = checked("killed and resumed", int(digests[0] != digests[1]), 0,
                     f"{how}; other digests of step 60:")
    if not was_killed:
        record["status"] = "FAIL"
    return [record]


if __name__ == "__main__":
    sys.exit(main())
