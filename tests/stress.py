# SPDX-License-Identifier: Apache-2.0
"""Kill processes that save, replace, prune and restore, and corrupt files; count what comes back.

    python tests/stress.py [--kills 500] [--damage 1000] [--run_kills 0] [--seed 0]

A saved tree follows from its number n, so a mixture or a wrong number shows. The exit code is 1
after one, or when less came back than must. This process imports JAX and forks, but never starts
it, so a fork is safe and quick. --run_kills kills training runs of two processes, which must end
bit-identical to an undisturbed run.
"""
import argparse
import json
import os
import random
import shutil
import signal
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
    """Return packed arrays, a 0-d one, an empty one and two of four files of two chunks."""
    big = n + np.arange(2**16, dtype=np.float32).reshape(8, 2**13)
    return {"a": np.full(100, n, np.float32), "b": {"step": np.int32(n), "none": np.zeros((0, 2))},
            "big": big, "moment": -big}


def value_of(tree):
    """Return the n of a tree of tree_of, or None when it is a mixture."""
    n = int(tree["b"]["step"])
    is_equal = jax.tree.map(np.array_equal, tree, tree_of(n))
    return n if all(jax.tree.leaves(is_equal)) else None


# ---- kills

def fork(call, *args):
    """Run call(*args, out) in a new process; return (its id, the other end of out)."""
    end, out = os.pipe()
    if pid := os.fork():
        os.close(out)
        return pid, open(end)
    try:
        os.close(end)
        call(*args, out)
    except Exception as e:
        os.write(out, json.dumps(f"{call.__name__}: {e}").encode())
    os._exit(0)


def lines_of(pid, end):
    """Wait until a process has ended; return the lines that it wrote and nobody has read."""
    os.waitpid(pid, 0)
    with end:
        return [json.loads(line) for line in end]


def save_forever(root, n, out):
    """Save every step twice and restore each; write the number of each."""
    ckpt.delete_leftovers(root)
    while True:
        os.write(out, f"{n}\n".encode())
        n += 1
        ckpt.wait(ckpt.save(root, n // 2, tree_of(n), max_to_keep=2))
        ckpt.restore_newest(root, tree_of(n))


def inspect(root, out):
    """Write the value of the newest checkpoint, and leftovers that no file names."""
    value = value_of(ckpt.restore_newest(root, tree_of(0))[1])
    ckpt.delete_leftovers(root)
    named = {f"{step:09d}/{name}" for step in ckpt.steps(root) for name in (
        "meta.json", ckpt.read_meta(root, step)["folder"])}
    found = {str(p.relative_to(root)) for p in Path(root).glob("*/*")}
    empty = {p.name for p in Path(root).iterdir() if not any(p.iterdir())}
    os.write(out, json.dumps([value, sorted(found - named | empty)]).encode())


def kill(root, n, rng):
    """Kill a run that saves n + 1, n + 2, ... at a random moment: (what came back, value)."""
    pid, end = fork(save_forever, root, n)
    begun = [int(end.readline())]
    time.sleep(rng.uniform(0, 0.3))
    os.kill(pid, signal.SIGKILL)
    begun += lines_of(pid, end)
    ((value, left),) = lines_of(*fork(inspect, root))
    words = {max(begun): "the last that was done", max(begun) + 1: "the one being written"}
    found = words.get(value, f"WRONG: {value}, {begun}")
    if left:
        found = f"WRONG: left are {left}"
    return found, value


def count_kills(n_kills, seed, root):
    rng, counts, n = random.Random(seed), Counter(), 0
    lines_of(*fork(lambda out: ckpt.wait(ckpt.save(root, 0, tree_of(0)))))
    for _ in range(n_kills):
        words, n = kill(root, int(n), rng)
        counts[f"killed: {words}"] += 1
    return counts


# ---- corruption

def swap(root, file, rng):
    """Exchange a file with another one of its save, if one is as large."""
    path = root / file
    size = path.stat().st_size
    others = [other for other in sorted(root.joinpath(*file.parts[:2]).rglob("*"))
              if other.is_file() and other != path and other.stat().st_size == size]
    if others:
        other = rng.choice(others)
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)


def replace(root, file, source_root, rng):
    """Put the file of another step, or of the same step in another root, in the place of a file."""
    step, *rest = file.parts
    other = source_root / step
    if source_root == root:
        other = root / rng.choice([name for name in os.listdir(root) if name != step])
    if rest[0].startswith("save-"):
        other = next(path for path in other.iterdir() if path.is_dir())
        rest = rest[1:]
    source = other.joinpath(*rest)
    if source.exists():
        shutil.copy(source, root / file)


def corrupt(path, kind, rng):
    content = bytearray(path.read_bytes())
    if kind == "bit flipped":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    if kind == "truncated":
        content = content[: rng.randrange(len(content))]
    path.write_bytes(content)
    if kind == "deleted":
        path.unlink()


def count_corruptions(n_corruptions, seed, root):
    """Corrupt one file at a time of three checkpoints."""
    rng, counts = random.Random(seed), Counter()
    intact, foreign, path = Path(root, "intact"), Path(root, "foreign"), Path(root, "corrupted")
    for n in (1, 2, 3):
        ckpt.wait(ckpt.save(intact, n, tree_of(n)))
        ckpt.wait(ckpt.save(foreign, n, tree_of(n + 100)))
    files = sorted(p.relative_to(intact) for p in intact.rglob("*") if p.is_file())
    for i in range(n_corruptions):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(intact, path)
        file = files[i % len(files)]
        kind = rng.choice(["bit flipped", "truncated", "deleted", "swapped", "of another step",
                           "of another run"])
        step = int(file.parts[0])
        if kind == "swapped":
            swap(path, file, rng)
        elif kind.startswith("of another"):
            replace(path, file, foreign if kind == "of another run" else path, rng)
        else:
            corrupt(path / file, kind, rng)
        try:
            value = value_of(ckpt.restore(path, step, tree_of(0)))
            words = "harmless" if value == step else f"WRONG: {value} at {step}"
        except ValueError as e:
            words = "an error" if str(path) in str(e) else f"WRONG: no name in {e}"
        errors = ckpt.verify(path, log=lambda _: None)
        if bool(errors) != (words == "an error") and step in ckpt.steps(path):
            words = f"WRONG: {words}, and verify returns {errors}"
        newest = value_of(ckpt.restore_newest(path, tree_of(0), log=lambda _: None)[1])
        if newest != (2 if step == 3 and words == "an error" else 3):
            words = f"WRONG: {newest} came back as the newest"
        counts[f"{'a chunk' if 'c' in file.parts else file.name} {kind}: {words}"] += 1
    return counts


# ---- kills of runs

END_S = 60  # for a process to end once the other is dead
CONNECTING_S = 20  # how long it is watched where they may not be connected yet


def make_run(root, name, steps=400):
    """A config of a run of two processes that saves every few steps."""
    text = Path(root, "text.txt")
    text.write_text("".join(f"{i} bottles of beer on the wall. " for i in range(400)))
    return config.Config(
        data=(str(text),), out_dir=f"{root}/{name}", cache_dir=f"{root}/cache", steps=steps,
        batch_size=8, seq_len=16, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, warmup_steps=2.0,
        dp=1, fsdp=2, eval_batches=1, log_every=5, eval_every=50, save_every=7, max_to_keep=2,
        sample_tokens=0, peer_timeout_s=10.0)


def wait_for(ready, runs):
    """Wait until ready(), or until a process of the run has ended."""
    deadline = time.monotonic() + 120
    while not ready() and all(run.is_alive() for run, _ in runs):
        time.sleep(0.0005)
        if time.monotonic() > deadline:
            raise TimeoutError([log.read_text() for _, log in runs])


def kill_run(start, cfg, rng):
    """Kill one or both processes of a run, at most a second after a save or while they start."""
    root = f"{cfg.out_dir}/ckpt"
    saved = ckpt.latest(root)
    runs = start(cfg)
    moment, most_s = rng.choices([("starting", 5), ("training", 1)], [1, 9])[0]
    if moment == "training":
        wait_for(lambda: ckpt.latest(root) != saved, runs)
    end = time.monotonic() + rng.uniform(0, most_s)
    wait_for(lambda: time.monotonic() > end, runs)
    is_right = all(run.is_alive() for run, _ in runs)
    killed = rng.choice([[0], [1], [0, 1]])
    for i in killed:
        runs[i][0].kill()
    words = f"killed, {moment}, process {' and '.join(map(str, killed))}"
    for i, (run, _) in enumerate(runs):
        run.join(CONNECTING_S if moment == "starting" else END_S)
        if i not in killed:
            words += f": process {i} ended with exit code {run.exitcode}"
            is_right &= run.exitcode in (1, -6) or moment == "starting"
            run.kill()
    printed = [log.read_text() for _, log in runs]
    if "done: all" in printed[0] or "is finished" in printed[0]:
        return None
    return words if is_right else f"WRONG: {words}: {printed}"


def count_run_kills(n_kills, seed, root):
    """Start one run after another, and kill each until it reaches its end."""
    import conftest  # noqa: F401 fake devices, before JAX starts
    import test_train as tests
    rng, counts, n_killed = random.Random(seed), Counter(), 0
    steps = min(400, 30 * n_kills)
    straight = make_run(root, "straight", steps)
    codes = [tests.ended(*run, 600)[0] for run in tests.two(straight)]
    if codes != [0, 0]:
        raise RuntimeError(f"the undisturbed run ended with {codes}")
    while n_killed < n_kills:
        cfg = make_run(root, f"killed{n_killed}", steps)
        has_ended = False
        while n_killed < n_kills and not has_ended:
            words = kill_run(tests.two, cfg, rng)
            has_ended = words is None
            if words:
                n_killed += 1
                counts[words] += 1
                print(f"{n_killed:6} step {ckpt.latest(f'{cfg.out_dir}/ckpt')} {words}", flush=True)
        if not has_ended:
            codes = [tests.ended(*run, 600)[0] for run in tests.two(cfg)]
            counts[f"WRONG: the last start ended with {codes}"] += codes != [0, 0]
        counts["runs that ended"] += 1
        equal = (tests.losses(cfg.out_dir) == tests.losses(straight.out_dir)
                 and tests.same(tests.arrays(cfg.out_dir), tests.arrays(straight.out_dir)))
        errors = ckpt.verify(f"{cfg.out_dir}/ckpt", log=lambda _: None)
        counts[f"WRONG: {cfg.out_dir} is not equal"] += not equal
        counts[f"WRONG: {errors}"] += bool(errors)
    return +counts


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for flag, default in (("--kills", 500), ("--damage", 1000), ("--run_kills", 0), ("--seed", 0)):
        parser.add_argument(flag, type=int, default=default)
    args = parser.parse_args()
    ckpt.SMALL_BYTES, ckpt.FILE_BYTES, ckpt.CHUNK_BYTES = 2**10, 2**16, 2**15
    with tempfile.TemporaryDirectory() as root:
        counts = count_kills(args.kills, args.seed, f"{root}/kills")
        counts += count_corruptions(args.damage, args.seed, root)
        if args.run_kills:  # last, as nothing may fork once this process read a checkpoint
            counts += count_run_kills(args.run_kills, args.seed, root)
    for words, n in sorted(counts.items()):
        print(f"{n:6} {words}")
    return int(any("WRONG" in words for words in counts))


if __name__ == "__main__":
    sys.exit(main())
