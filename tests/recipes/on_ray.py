# SPDX-License-Identifier: Apache-2.0
"""train.py on a Ray cluster, a process per worker; if one dies, all go on from the last checkpoint.

pip install ray && python tests/recipes/on_ray.py --n_workers 2

The hosts share a file system. Relative paths are the caller's. train.py can go on with such a run,
and this with one of train.py's.
"""
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # isort: skip  before JAX, whose memory it sets up
import jax

import config


@dataclass(frozen=True, kw_only=True)
class RayConfig(config.Config):
    n_workers: config.PosInt = 2  # processes of the run, spread over the hosts
    n_cpus: config.PosInt = 1  # CPUs of a worker
    n_gpus: config.NonNegInt = 0  # GPUs of a worker
    max_restarts: config.NonNegInt = 3  # restarts from the last checkpoint after a worker died
    ray_address: str = ""  # host:port of a cluster, or auto; empty: start one on this machine
    out_dir: str = "out/ray"  # folder of this run


def connect(address, n_cpus):
    """Ray, connected to a cluster or to a new one here; modules and JAX's flags are as here."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}  # say nothing
    try:
        import ray
    except ImportError:
        config.raise_if_errors(["is not installed: pip install 'ray[tune]'"], "ray")
    env = {k: v for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_", "NCCL_"))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ray.init(address or "local", runtime_env={"env_vars": env}, ignore_reinit_error=True,
             log_to_driver=False, logging_level="ERROR",
             **{} if address else {"num_cpus": n_cpus, "include_dashboard": False})
    return ray


# ---- in the workers

def work(cfg, i, n, coordinator, folder, queue):
    """Train as process i of n. What the caller is to see goes through `queue`."""
    def forward(event, row):
        if event in ("start", "log", "eval"):
            queue.put((event, row))

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # but while train.main catches it
    cfg = replace(cfg, coordinator=coordinator, n_processes=n, process_id=i)
    screen = SimpleNamespace(write=lambda text: queue.put(("text", text)), flush=lambda: None)
    try:
        os.chdir(folder)
        with contextlib.redirect_stdout(sys.stdout if i else screen):
            summary = train.main(cfg, [] if i else [forward])  # another task: a third argument
        if not i:
            queue.put(("summary", {k: v for k, v in summary.items()
                                   if k not in ("state", "mesh", "compiled")}))
        jax.distributed.shutdown()  # waits for the others
    except Exception as e:
        fault = isinstance(e, ValueError) and train.is_user_error(e)
        time.sleep(0 if fault else 5)  # if the cause is another's death, this one ends untold
        queue.put(("fault", str(e)) if fault else ("text", traceback.format_exc()))
        os._exit(1)  # any other exit would wait for the others


# ---- in the caller

def run(cfg, on_row=lambda event, row: None):
    """(summary of process 0, restarts). on_row(event, row) gets its "log" and "eval" rows as they
    come. Raises ValueError for the user's fault, SystemExit for a death after cfg.max_restarts.
    """
    given = (cfg.coordinator, cfg.n_processes, cfg.process_id) != ("", 1, 0)
    if given:
        config.raise_if_errors(["coordinator, n_processes, process_id: this recipe sets them"])
    plain = config.Config(**{x.name: getattr(cfg, x.name) for x in fields(config.Config)})
    ray, restarts = connect(cfg.ray_address, cfg.n_workers * cfg.n_cpus), 0
    with train.catch_signals() as (signals, in_loop):
        in_loop.set()
        while True:
            seen = attempt(ray, cfg, plain, on_row, signals)
            if "fault" in seen:
                where, _, fault = seen["fault"].partition(": ")
                config.raise_if_errors([fault], where)
            if "summary" in seen:
                return seen["summary"], restarts
            if signals or restarts == cfg.max_restarts:
                sys.exit(f"error: {seen['death']}, after {restarts} of {cfg.max_restarts} restarts")
            if "start" in seen:  # what resume says of an older run is done
                plain = replace(plain, resume="auto")
            restarts += 1
            print(f"{seen['death']}: restart {restarts} of {cfg.max_restarts}, from the last save",
                  flush=True)


def attempt(ray, cfg, plain, on_row, signals):
    """Run all workers to their end or to a death; {kind: the last that they sent of it}, with
    "summary", "fault" or "death" in words.
    """
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup
    n, seen, asked, host = cfg.n_workers, {}, False, ray.util.get_node_ip_address
    queue = Queue(actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}})
    group = ray.util.placement_group(n * [{"CPU": cfg.n_cpus, "GPU": cfg.n_gpus}], "SPREAD")
    once, places = ray.remote(max_calls=1, max_retries=0), [InGroup(group, i) for i in range(n)]
    address = once(lambda: f"{host()}:{socket.create_server(('', 0)).getsockname()[1]}").options(
        num_cpus=0, scheduling_strategy=places[0]).remote()
    waiting = workers = [once(work).options(
        num_cpus=cfg.n_cpus, num_gpus=cfg.n_gpus, scheduling_strategy=place).remote(
        plain, i, n, address, os.getcwd(), queue) for i, place in enumerate(places)]
    try:
        if not group.wait(5):
            print(f"waiting until the cluster has room for {n} workers", flush=True)
        while waiting and not seen.keys() & {"fault", "death"}:
            done, waiting = ray.wait(waiting, timeout=0.2)
            try:
                ray.get(done)
            except ray.exceptions.RayError:
                seen["death"] = f"worker {workers.index(done[0])} died"
            for kind, value in queue.get_nowait_batch(queue.qsize()):
                seen[kind] = value
                if kind == "text":
                    print(value, end="", flush=True)
                if kind in ("log", "eval"):
                    on_row(kind, value)
            if signals and "start" in seen and not asked:
                ray.cancel(workers[0], force=False)  # as Ctrl-C would; process 0 tells the others
                asked = True
        return seen
    finally:
        for ref in workers:
            ray.cancel(ref, force=True)
        ray.wait(workers, num_returns=n, timeout=60)
        ray.util.remove_placement_group(group)
        queue.shutdown(force=True)


if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], kind=RayConfig, main=lambda cfg, hooks, task: run(cfg)[0]))
