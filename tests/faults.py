# SPDX-License-Identifier: Apache-2.0
"""Kill processes that save, replace, prune and restore, corrupt files, and count the outcomes.

    python tests/faults.py [--kills 500] [--damage 1000] [--run_kills 0] [--calls 0] [--seed 0]

All numbers of a saved tree equal its n, so wrong and mixed values are found. The exit code is 1 if
there was any, or if a checkpoint was lost. One kill in 25 hits one of four processes. This process
imports JAX without starting it, so forks are safe and fast.
--run_kills: kills of runs of two processes. Each run must end bit-identical to an undisturbed one.
--calls: calls of one compiled step from one state, with 1, 2, 4 and 8 threads. All digests must be
equal. With XLA's default options they are only counted.
"""
import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

import ckpt
import config


def tree_of(n):
    """A small array, a scalar, an empty array, and an array of four files of two chunks."""
    return {
        "a": np.full(100, n, np.float32),
        "b": {"step": np.int32(n), "none": np.zeros((0, 2))},
        "big": np.full((8, 2**13), n, np.float32),
    }


def value_of(tree):
    """The number that fills a tree, or None if it has several."""
    values = set()
    for leaf in jax.tree.leaves(tree):
        values.update(np.unique(np.asarray(leaf)).astype(float).tolist())
    if len(values) != 1:
        return None
    return values.pop()


# ---- kills

def fork(call, *args):
    """Run call(*args, out) in a new process: (its id, the file to read what it writes to out)."""
    end, out = os.pipe()
    pid = os.fork()
    if pid:
        os.close(out)
        return pid, open(end)
    try:
        os.close(end)
        call(*args, out)
    except Exception as e:
        os.write(out, json.dumps(f"{call.__name__}: {e}").encode())
    os._exit(0)


def lines_of(pid, end):
    """Wait for a process to end; the values that it wrote and that are not read yet."""
    os.waitpid(pid, 0)
    with end:
        return [json.loads(line) for line in end]


def save_for_ever(root, n, tree, out):
    """Save every step twice, some as temporary, and restore each. Writes n before each save."""
    ckpt.clean(root)
    while True:
        os.write(out, f"{n}\n".encode())
        n += 1
        ckpt.wait(ckpt.save(root, n // 2, tree(n), max_to_keep=2, temporary=n % 5 == 0))
        ckpt.restore_newest(root, tree(n))


def save_as_one_of_four(root, n, port, rank, out):
    # Silence JAX, which prints much when processes meet and when one dies.
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    jax.distributed.initialize(f"127.0.0.1:{port}", 4, rank)
    rows = jax.sharding.NamedSharding(jax.make_mesh((4,), ("x",)), jax.P("x"))
    ckpt.broadcast_from_main(lambda: None)  # wait until all have started

    def sharded_tree(n):
        tree = tree_of(n)
        big = tree["big"]
        tree["big"] = jax.make_array_from_callback(big.shape, rows, lambda index: big[index])
        return tree

    save_for_ever(root, n, sharded_tree, out)


def look(root, out):
    """Write the value of the newest checkpoint, and the files that `clean` fails to delete."""
    value = value_of(ckpt.restore_newest(root, tree_of(0))[1])
    ckpt.clean(root)
    expected = set()
    for step in ckpt.steps(root):
        for name in ("meta.json", "temporary", ckpt.read_meta(root, step)["folder"]):
            expected.add(f"{step:09d}/{name}")
    found = {str(p.relative_to(root)) for p in Path(root).glob("*/*")}
    empty = {p.name for p in Path(root).iterdir() if not any(p.iterdir())}
    remains = sorted((found - expected) | empty)
    os.write(out, json.dumps([value, remains]).encode())


def kill(root, n, rng, n_processes):
    """Kill processes that save n + 1 and more at a random moment: (outcome, restored value)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    if n_processes == 1:
        runs = [fork(save_for_ever, root, n, tree_of)]
    else:
        runs = [fork(save_as_one_of_four, root, n, port, rank) for rank in range(n_processes)]
    saved = [int(runs[0][1].readline())]
    time.sleep(rng.uniform(0, 0.3))
    os.kill(rng.choice(runs)[0], signal.SIGKILL)
    time.sleep(0.5 * (n_processes - 1))  # let the others notice it
    for pid, _ in runs:
        os.kill(pid, signal.SIGKILL)
    for run in runs:
        # One of several processes may also write an error, when another has died.
        saved += [x for x in lines_of(*run) if n_processes == 1 or type(x) is int]

    ((value, remains),) = lines_of(*fork(look, root))
    last = max(saved)
    if remains:
        return f"WRONG: remains {remains}", value
    if value == last:
        return "the last saved one", value
    if value == last + 1:
        return "the one being written", value
    return f"WRONG: {value}, {saved}", value


def count_kills(n_kills, n_processes, seed, root):
    rng = random.Random(seed)
    counts = Counter()
    n = 0
    lines_of(*fork(lambda out: ckpt.wait(ckpt.save(root, 0, tree_of(0)))))
    for _ in range(n_kills):
        outcome, n = kill(root, int(n), rng, n_processes)
        counts[f"killed, one of {n_processes} processes: {outcome}"] += 1
    return counts


# ---- damage

def damage(path, kind, rng):
    """Flip a bit of a file, truncate it, or delete it."""
    content = bytearray(path.read_bytes())
    if kind == "bit flipped":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif kind == "truncated":
        path.write_bytes(content[: rng.randrange(len(content))])
    else:
        path.unlink()


def count_damages(n_damages, seed, root):
    """Damage one file at a time of three checkpoints, of which the newest is temporary."""
    rng = random.Random(seed)
    counts = Counter()
    intact = Path(root, "intact")
    path = Path(root, "d")
    for n in (1, 2, 3):
        ckpt.wait(ckpt.save(intact, n, tree_of(n), temporary=n == 3))
    files = sorted(p.relative_to(intact) for p in intact.rglob("*") if p.is_file())
    for i in range(n_damages):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(intact, path)
        file = files[i % len(files)]
        kind = rng.choice(["bit flipped", "truncated", "deleted"])
        step = int(file.parts[0])
        damage(path / file, kind, rng)
        try:
            value = value_of(ckpt.restore(path, step, tree_of(0)))
            words = "harmless" if value == step else f"WRONG: {value} at {step}"
        except ValueError as e:
            words = "an error" if str(path) in str(e) else f"WRONG: no name in {e}"
        faults = ckpt.verify(path, tell=lambda _: None)
        if bool(faults) != (words == "an error") and step in ckpt.steps(path):
            words = f"WRONG: {words}, and verify says {faults}"
        newest = value_of(ckpt.restore_newest(path, tree_of(0), tell=lambda _: None)[1])
        if newest != (2 if step == 3 and words == "an error" else 3):
            words = f"WRONG: {newest} came back as the newest"
        counts[f"{'a chunk' if 'c' in file.parts else file.name} {kind}: {words}"] += 1
    return counts


# ---- kills of runs

# Seconds in which a process must end after the other has died: with heartbeats, and before them.
END_S, JAX_END_S = 60, 20


def make_run(root, name, steps=400):
    """The config of a run of two processes that saves every few steps."""
    text = Path(root, "text.txt")
    text.write_text("".join(f"{i} bottles of beer on the wall. " for i in range(400)))
    return config.Config(
        data=(str(text),), out_dir=f"{root}/{name}", cache_dir=f"{root}/cache", steps=steps,
        batch_size=8, seq_len=16, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, warmup_steps=2.0,
        dp=1, fsdp=2, eval_batches=1, log_every=5, eval_every=50, save_every=7, max_to_keep=2,
        sample_tokens=0, peer_timeout_s=4.0)


def phase(out, pids, log_before):
    """The phase of a run according to its files. log_before: inode of its log at the launch."""
    log = out / "metrics.jsonl"
    folders = sorted(out.glob("ckpt/0*"))
    if not log.exists() or log.stat().st_ino == log_before:
        signs = [path.read_text() for path in out.glob(".alive/*")]
        watched = all(any(f"(pid {pid} on" in sign for sign in signs) for pid in pids)
        return "starting" if watched else "starting, not yet watched"
    incomplete = [folder for folder in folders if not (folder / "meta.json").exists()]
    if not incomplete:
        return "stepping"
    if incomplete[-1] == folders[-1]:
        return "saving"
    return "pruning"


def wait_in(ready, runs, timeout_s=120):
    """Wait until ready(), or until a process of the run has ended."""
    deadline = time.monotonic() + timeout_s
    while not ready() and all(run.is_alive() for run, _ in runs):
        time.sleep(0.0005)
        assert time.monotonic() < deadline, [log.read_text() for _, log in runs]


def how_ended(run, log, limit_s):
    """Wait for the surviving process: (exit code and who ended it, as a text, seconds)."""
    began = time.monotonic()
    run.join(limit_s)
    if run.exitcode is None:
        run.kill()
        run.join()
        return f"no exit code, waiting {limit_s} s", limit_s
    by = "watch_peers" if " ends: " in log.read_text() else "JAX"
    return f"exit code {run.exitcode} by {by}", time.monotonic() - began


def kill_run(several, cfg, rng, seconds):
    """Launch a run and kill one or both of its processes at a random moment.

    Returns the outcome as a text, or None if the run had reached its end.
    """
    out = Path(cfg.out_dir)
    log = out / "metrics.jsonl"
    root = f"{cfg.out_dir}/ckpt"
    log_before = log.exists() and log.stat().st_ino
    saved = ckpt.latest(root)
    began = time.monotonic()
    runs = several(2, cfg)
    pids = [run.pid for run, _ in runs]

    # Choose the processes to kill, and wait for the chosen phase.
    killed = rng.choice([[0], [0], [1], [1], [0, 1]])
    wanted = rng.choices(["starting", "stepping", "saving"], [1, 4, 4])[0]
    if wanted == "starting":
        end = began + rng.uniform(0, 5)
        wait_in(lambda: time.monotonic() > end, runs)
    else:
        wait_in(lambda: ckpt.latest(root) != saved, runs)
        seconds["restart"].append(time.monotonic() - began)
        end = time.monotonic() + rng.uniform(0, 1)
        wait_in(lambda: time.monotonic() > end, runs)
        if wanted == "saving":
            wait_in(lambda: phase(out, pids, log_before) == "saving", runs)
            time.sleep(rng.uniform(0, 0.2))
    found = phase(out, pids, log_before)
    all_alive = all(run.is_alive() for run, _ in runs)

    # Kill, and see how the other process ends.
    for i in killed:
        runs[i][0].kill()
    texts = [f"killed, {found}, process {' and '.join(map(str, killed))}"]
    limit_s = END_S
    if "not yet" in found:
        limit_s = JAX_END_S
    ends = []
    for i in {0, 1} - set(killed):
        end, second = how_ended(*runs[i], limit_s)
        ends.append(end)
        texts.append(f"process {i} ended with {end}")
        seconds["end of the other"].append(second)
    for i in killed:
        runs[i][0].join()

    printed = [log.read_text() for _, log in runs]
    if "done: all" in printed[0] or "is finished" in printed[0]:
        return None
    legal_codes = all("code 1 " in end or "code -6 " in end for end in ends)
    if not all_alive or not (legal_codes or limit_s == JAX_END_S):
        return f"WRONG: {texts}: {printed}"
    return ": ".join(texts)


def count_run_kills(n_kills, seed, root):
    """Kill one run after another, each until it reaches its end."""
    import conftest  # noqa: F401 fake devices, before JAX starts
    import test_train as tests
    rng = random.Random(seed)
    counts = Counter()
    killed = 0
    seconds = {"restart": [], "end of the other": []}
    steps = min(400, 30 * n_kills)
    straight = make_run(root, "straight", steps)
    assert [tests.ended(*run, 600)[0] for run in tests.several(2, straight)] == [0, 0]
    for n in range(n_kills):
        cfg = make_run(root, f"killed{n}", steps)
        while killed < n_kills:
            outcome = kill_run(tests.several, cfg, rng, seconds)
            if outcome is None:
                break
            counts[outcome] += 1
            killed += 1
            print(f"{killed:6} step {ckpt.latest(f'{cfg.out_dir}/ckpt')} {outcome}", flush=True)
        if killed == n_kills:
            codes = [tests.ended(*run, 600)[0] for run in tests.several(2, cfg)]
            counts[f"WRONG: the last launch ended with {codes}"] += codes != [0, 0]
        counts["runs that ended"] += 1
        equal = (tests.losses(cfg.out_dir) == tests.losses(straight.out_dir)
                 and tests.same(tests.arrays(cfg.out_dir), tests.arrays(straight.out_dir)))
        damaged = ckpt.verify(f"{cfg.out_dir}/ckpt", tell=lambda _: None)
        counts[f"WRONG: {cfg.out_dir} is not equal"] += not equal
        counts[f"WRONG: {damaged}"] += bool(damaged)
        if killed == n_kills:
            break
    for name, values in seconds.items():
        if values:
            print(f"seconds, {name}: median {statistics.median(values):.1f}, "
                  f"maximum {max(values):.1f}")
    return +counts


# ---- one step, many times

def call_often(n_calls, n_threads, dtype, use_options, out):
    """Call one compiled step n_calls times from one state, with n_threads threads for CPU programs.

    Writes [number of threads that XLA has, {digest: number of calls}]. use_options: whether to
    compile with the project's options.
    """
    os.environ["NPROC"] = str(n_threads)  # XLA reads this before it counts the cores
    import model
    import step as steplib
    if not use_options:
        steplib.compiler_options = lambda cfg, device: {}
    cfg = config.derive_text(config.Config(
        d_model=64, n_layers=1, n_heads=4, vocab_size=128, seq_len=64, batch_size=8, dtype=dtype,
        fsdp=1, attention="xla", optimizer="adamw"))
    mesh = steplib.make_mesh(cfg)
    shape = (cfg.batch_size, cfg.seq_len)
    tokens = np.random.default_rng(0).integers(0, 128, (2, *shape)).astype(np.int32)
    batch = {"tokens": jax.numpy.asarray(tokens[0]), "labels": jax.numpy.asarray(tokens[1])}
    shapes = {name: jax.ShapeDtypeStruct(shape, np.int32, sharding=jax.NamedSharding(mesh, jax.P()))
              for name in batch}
    programs = steplib.compile_steps(
        cfg, mesh, model.param_table(cfg), model.loss_fn, model.init, shapes)
    state = programs["init"](jax.random.key(0))
    counts = Counter()
    for _ in range(n_calls):
        # The step takes the memory of its argument: give it a copy.
        copy = jax.tree.map(lambda x: jax.device_put(x, may_alias=False), state)
        after, metrics = programs["train_step"](copy, batch)
        digest = steplib.digest(programs["digest"](after))
        counts[f"{digest['params']} {digest['opt']} {float(metrics['loss']).hex()}"] += 1
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    n_found = sum(name.startswith("tf_XLAEigen") for name in names)
    os.write(out, json.dumps([n_found, counts]).encode())


def count_calls(n_calls):
    counts = Counter()
    for dtype in ("float32", "mixed"):
        for n_threads in (1, 2, 4, 8):
            for use_options in (True, False):
                found = lines_of(*fork(call_often, n_calls, n_threads, dtype, use_options))
                assert isinstance(found[0], list), found
                n_found, digests = found[0]
                options = "the project's" if use_options else "default"
                text = (f"calls, {dtype}, {n_found} threads, {options} options: each digest "
                        f"{sorted(digests.values(), reverse=True)} times")
                if use_options and len(digests) > 1:
                    text = f"WRONG: {text}"
                print(text, flush=True)
                counts[text] += n_calls
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--damage", type=int, default=1000)
    parser.add_argument("--run_kills", type=int, default=0)
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ckpt.SMALL_BYTES = 2**10
    ckpt.FILE_BYTES = 2**16
    ckpt.CHUNK_BYTES = 2**15
    with tempfile.TemporaryDirectory() as root:
        counts = count_kills(args.kills, 1, args.seed, f"{root}/one")
        counts += count_kills(args.kills // 25, 4, args.seed, f"{root}/four")
        if args.calls:
            counts += count_calls(args.calls)
        counts += count_damages(args.damage, args.seed, root)
        if args.run_kills:  # last: after this process has read a checkpoint, forks are unsafe
            counts += count_run_kills(args.run_kills, args.seed, root)
    for outcome, n in sorted(counts.items()):
        print(f"{n:6} {outcome}")
    return int(any("WRONG" in outcome for outcome in counts))


if __name__ == "__main__":
    sys.exit(main())
