# SPDX-License-Identifier: Apache-2.0
"""train.py on a Ray cluster, one process per worker. If one dies, all resume from the last save.

pip install ray && python tests/recipes/on_ray.py --n_workers 1:2

With MIN:MAX workers, the run continues with fewer where a host is lost and none comes in its place.
The hosts share a file system. Relative paths are relative to the caller's folder. train.py can
resume such a run, and this recipe can resume a run of train.py.
"""
import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # isort: skip  before JAX, whose memory it sets up
import jax

from train import config


@dataclass(frozen=True, kw_only=True)
class RayConfig(config.Config):
    n_workers: str = "2"  # processes of the run, spread over the hosts; or MIN:MAX of them
    wait_s: config.NonNegFloat = 60.0  # wait so long for room for MAX workers, then take fewer
    n_cpus: config.PosInt = 1  # CPUs per worker
    n_gpus: config.NonNegInt = 0  # GPUs per worker
    resources: str = "{}"  # other resources per worker, as '{"TPU": 4}' for a host with 4 TPUs
    max_restarts: config.NonNegInt = 3  # restarts from the last checkpoint after a worker died
    # address of a cluster as host:port, or auto; empty: start a cluster on this machine
    ray_address: str = ""
    out_dir: str = "out/ray"  # folder of this run


def connect(address, n_cpus):
    """Connect to a cluster, or start one on this machine. Returns the module ray.

    Workers get the caller's search path for modules and its flags for JAX.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."
    try:
        import ray
    except ImportError:
        config.raise_if_errors(["is not installed: pip install 'ray[tune]'"], "ray")
    env = {k: v for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_", "NCCL_"))}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    options = dict(runtime_env={"env_vars": env}, ignore_reinit_error=True, log_to_driver=False,
                   logging_level="ERROR")
    if address:
        ray.init(address, **options)
    else:
        ray.init("local", num_cpus=n_cpus, include_dashboard=False, **options)
    return ray


# ---- in the workers

def work(cfg, i, n, coordinator, folder, queue):
    """Train as process i of n. Rows and messages for the caller go through `queue`."""
    def forward(event, row):
        if event in ("start", "log", "eval"):
            queue.put((event, row))

    # Ignore SIGINT, except while train.main catches it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cfg = replace(cfg, coordinator=coordinator, n_processes=n, process_id=i)
    hooks = []
    stdout = sys.stdout
    if i == 0:
        hooks = [forward]
        stdout = SimpleNamespace(write=lambda text: queue.put(("text", text)), flush=lambda: None,
                                 isatty=lambda: False)
    try:
        os.chdir(folder)
        with contextlib.redirect_stdout(stdout):
            summary = train.main(cfg, hooks)  # for another task, a third argument
        if i == 0:
            for name in ("state", "mesh"):  # these stay in this process
                summary.pop(name, None)
            queue.put(("summary", summary))
        jax.distributed.shutdown()  # waits for the other processes
    except Exception as e:
        if isinstance(e, ValueError) and train.is_user_error(e):
            queue.put(("error", str(e)))
        else:
            # If another worker's death is the cause, this process is ended meanwhile.
            time.sleep(5)
            queue.put(("text", traceback.format_exc()))
        os._exit(1)  # any other exit would wait for the other processes


# ---- in the caller

def run(cfg, on_row=lambda event, row: None):
    """Train on the cluster: (summary of process 0, number of restarts).

    on_row(event, row) gets the "log" and "eval" rows during the run. Raises ValueError for an error
    of the user, and SystemExit for a death after cfg.max_restarts restarts.
    """
    if (cfg.coordinator, cfg.n_processes, cfg.process_id) != ("", 1, 0):
        config.raise_if_errors(["coordinator, n_processes, process_id: this recipe sets them"])
    values = {x.name: getattr(cfg, x.name) for x in fields(config.Config)}
    values["explicit"] = tuple(name for name in cfg.explicit if name in values)
    plain = config.Config(**values)
    ray = connect(cfg.ray_address, worker_counts(cfg)[0] * cfg.n_cpus)
    restarts = 0
    progress = SimpleNamespace(in_loop=True, signal=None, requests=set())
    with train.catch_signals(progress):
        while True:
            received = attempt(ray, cfg, plain, on_row, progress)
            if "error" in received:
                where, _, error = received["error"].partition(": ")
                config.raise_if_errors([error], where)
            if "summary" in received:
                return received["summary"], restarts
            death = received["death"]
            if progress.signal or restarts == cfg.max_restarts:
                sys.exit(f"error: {death}, after {restarts} of {cfg.max_restarts} restarts")
            if "start" in received:  # `resume` concerned the run before this one
                plain = replace(plain, resume="auto")
            restarts += 1
            print(f"{death}: restart {restarts} of {cfg.max_restarts}, from the last save",
                  flush=True)


def worker_counts(cfg):
    """The numbers of workers that a run may have, the largest first. With MIN:MAX, those that
    divide batch_size: it stays the same.
    """
    low, _, high = cfg.n_workers.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 0 < int(low) <= int(high or low)):
        config.raise_if_errors([config.field_error(cfg, "n_workers", "must be N, or MIN:MAX")])
    if not high:
        return [int(low)]
    counts = [n for n in range(int(high), int(low) - 1, -1) if cfg.batch_size % n == 0]
    if not counts:
        config.raise_if_errors([config.field_error(
            cfg, "n_workers", f"has no number that divides batch_size {cfg.batch_size}")])
    return counts


def other_resources(cfg):
    """{name: amount} of cfg.resources."""
    try:
        found = json.loads(cfg.resources)
        if all(type(x) in (int, float) and x > 0 for x in found.values()):
            return found
    except (ValueError, AttributeError):
        pass
    config.raise_if_errors([config.field_error(
        cfg, "resources", """must be JSON of amounts above 0, as '{"TPU": 4}'""")])


def place_workers(ray, cfg):
    """Reserve room for as many workers as the cluster has within cfg.wait_s: (number, group)."""
    counts = worker_counts(cfg)
    room = {"CPU": cfg.n_cpus, "GPU": cfg.n_gpus} | other_resources(cfg)
    for n in counts:
        group = ray.util.placement_group([room] * n, "SPREAD")
        wait_s = 5
        if n == counts[0] and len(counts) > 1:
            wait_s = cfg.wait_s
        if group.wait(wait_s):
            break
        if n != counts[-1]:
            ray.util.remove_placement_group(group)
            print(f"no room for {n} workers: trying fewer", flush=True)
    else:
        print(f"waiting until the cluster has room for {n} workers", flush=True)
    return n, group


def attempt(ray, cfg, plain, on_row, progress):
    """Run all workers until they end or one dies.

    Returns {kind: value} with the last value of each kind that the workers sent: "start", "log",
    "eval", "text", and "summary" or "error", or else "death" as a text.
    """
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # The queue runs beside the head of the cluster.
    queue = Queue(actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}})
    n, group = place_workers(ray, cfg)
    places = [PlacementGroupSchedulingStrategy(group, i) for i in range(n)]
    once = ray.remote(max_calls=1, max_retries=0)

    # A free port on the host of worker 0.
    def free_address():
        port = socket.create_server(("", 0)).getsockname()[1]
        return f"{ray.util.get_node_ip_address()}:{port}"

    find_address = once(free_address).options(num_cpus=0, scheduling_strategy=places[0])
    address = find_address.remote()
    workers = []
    for i in range(n):
        worker = once(work).options(
            num_cpus=cfg.n_cpus, num_gpus=cfg.n_gpus, resources=other_resources(cfg),
            scheduling_strategy=places[i])
        workers.append(worker.remote(plain, i, n, address, os.getcwd(), queue))

    received = {}
    running = workers
    is_cancelled = False
    try:
        while running and not received.keys() & {"error", "death"}:
            done, running = ray.wait(running, timeout=0.2)
            try:
                ray.get(done)
            except ray.exceptions.RayError:
                received["death"] = f"worker {workers.index(done[0])} died"
            for kind, value in queue.get_nowait_batch(queue.qsize()):
                received[kind] = value
                if kind == "text":
                    print(value, end="", flush=True)
                if kind in ("log", "eval"):
                    on_row(kind, value)
            if progress.signal and "start" in received and not is_cancelled:
                # As Ctrl-C would. Process 0 stops the others with it.
                ray.cancel(workers[0], force=False)
                is_cancelled = True
        return received
    finally:
        for worker in workers:
            ray.cancel(worker, force=True)
        ray.wait(workers, num_returns=n, timeout=60)
        ray.util.remove_placement_group(group)
        queue.shutdown(force=True)


def main(cfg, hooks, task):
    summary, _ = run(cfg)
    return summary


if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], kind=RayConfig, main=main))
