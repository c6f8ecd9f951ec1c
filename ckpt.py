# SPDX-License-Identifier: Apache-2.0
"""Any pytree of arrays to TensorStore and back, and a log that goes back with it.

Owns the layout root/000000100/{arrays, meta.json}, committing, pruning and integrity. Refuses to
return a number that was not saved: every chunk and meta.json carry a checksum, a missing chunk is
an error. Invariant: a checkpoint exists if and only if its meta.json does; that is written last, in
a folder renamed last.
"""
import contextlib
import json
import os
import re
import shutil
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils

CHUNK_BYTES = 2**24  # largest chunk: many at once keep all cores and the disk busy
PEER_TIMEOUT_S = 600  # how long process 0 waits for the others' shards


def _folder(root, step):
    return Path(root) / f"{step:09d}"


def _flatten(tree):
    """({name: array}, treedef); a name is the path of keys, joined by '/'."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two arrays of the tree have one name, {', '.join(twice)}: rename a key")
    arrays = [x if hasattr(x, "dtype") else np.asarray(x) for _, x in leaves]
    return dict(zip(names, arrays)), treedef


def _short(fault):
    """TensorStore's message less the spec and source places that it ends with."""
    return re.split(r"\s*\[(?:tensorstore_spec|source locations)", str(fault))[0]


def _chunk_shape(shape, shard_shape, itemsize):
    """A shard's shape, its longest dims halved until a chunk is at most CHUNK_BYTES."""
    chunk = list(shard_shape)
    while np.prod(chunk, dtype=np.int64) * itemsize > CHUNK_BYTES:
        even = [i for i, n in enumerate(chunk) if n % 2 == 0]
        if not even:
            break
        longest = max(even, key=lambda i: chunk[i])
        chunk[longest] //= 2
    return [max(n, 1) for n in chunk]


def _spec(folder, name, shape=None, dtype=None, chunk=None):
    path = str((folder / name).resolve())  # TensorStore takes no ".."
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path},
            "fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}
    if shape is not None:
        spec["metadata"] = {
            "shape": list(shape), "data_type": str(np.dtype(dtype)),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}},
                       {"name": "crc32c"}],
        }
    return spec


def _shards(x):
    """(index, copy) of what this process writes of x: each part of the array once, by one process.
    """
    if not isinstance(x, jax.Array):
        return [((), np.array(x))] if jax.process_index() == 0 else []
    return [(s.index, _detached(s.data)) for s in x.addressable_shards if s.replica_id == 0]


def _detached(x):
    """A copy of a one-device array that its donation to a later program does not touch."""
    if x.device.platform == "cpu":  # where a host array would be a view; made in the background
        return jax.device_put(x, x.sharding, may_alias=False)
    return np.asarray(x)


def save(root, step, tree, meta=(), keep=0):
    """Write `tree` as checkpoint `step`, replacing one of the same number; a Future of its path.

    Returns when the arrays may be overwritten or donated. A thread writes them, then meta.json,
    renames, and deletes all but the `keep` newest checkpoints (0: none). The Future raises what
    went wrong; see `wait`. Processes must share the folder; each writes its own shards and process
    0 commits.
    """
    arrays, _ = _flatten(tree)
    for x in arrays.values():
        if isinstance(x, jax.Array):
            x.copy_to_host_async()
    described, parts = {}, {}
    for name, x in arrays.items():
        shard = x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape
        chunk = _chunk_shape(x.shape, shard, x.dtype.itemsize)
        described[name] = {"shape": list(x.shape), "dtype": str(x.dtype), "chunk": chunk}
        parts[name] = _shards(x)
    pool = ThreadPoolExecutor(1, "ckpt")
    future = pool.submit(_commit, Path(root), step, described, parts, dict(meta), keep)
    pool.shutdown(wait=False)
    return future


def _commit(root, step, described, parts, meta, keep):
    try:
        return _write(root, step, described, parts, meta, keep)
    except (ValueError, OSError) as e:  # TensorStore's are ValueErrors
        raise ValueError(f"checkpoint {_folder(root, step)} could not be written, those before it "
                         f"are whole: {_short(e)}") from e


def _write(root, step, described, parts, meta, keep):
    final, partial = _folder(root, step), _folder(root, step).with_suffix(".partial")
    rank, peers = jax.process_index(), jax.process_count()
    partial.mkdir(parents=True, exist_ok=True)
    opened = {name: ts.open(_spec(partial, name, **d), create=True, open=True)
              for name, d in described.items() if parts[name]}
    writes = [opened[name].result()[index].write(np.asarray(x))
              for name, shards in parts.items() for index, x in shards]
    for write in writes:
        write.result()
    if rank:
        _write_text(partial / f"peer_{rank}", "")
        return final
    deadline = time.monotonic() + PEER_TIMEOUT_S
    while missing := [r for r in range(1, peers) if not (partial / f"peer_{r}").exists()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"checkpoint {final}: processes {missing} have not written theirs "
                               f"in {PEER_TIMEOUT_S} s")
        time.sleep(0.05)
    for r in range(1, peers):
        (partial / f"peer_{r}").unlink()
    body = json.dumps({"step": step, "arrays": described} | meta, sort_keys=True)
    stored = {"crc32": zlib.crc32(body.encode()), "body": json.loads(body)}
    _write_text(partial / "meta.json", json.dumps(stored, indent=1))
    _remove(final)
    os.rename(partial, final)
    _sync_folder(root)
    prune(root, keep)
    return final


def _write_text(path, text):
    with open(path, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    _sync_folder(path.parent)


def _sync_folder(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _remove(folder):
    """Delete a checkpoint. Renamed first, so that half of one is never taken for a whole."""
    if folder.exists():
        doomed = folder.with_suffix(f".deleted{os.getpid()}")
        os.rename(folder, doomed)
        shutil.rmtree(doomed)


def wait(future):
    """Block until a save is committed and raise what went wrong with it. None is no save."""
    return future.result() if future is not None else None


def steps(root):
    """Steps of the complete checkpoints in root, ascending."""
    root = Path(root)
    found = root.iterdir() if root.is_dir() else ()
    return sorted(int(p.name) for p in found
                  if re.fullmatch(r"\d{9,}", p.name) and (p / "meta.json").exists())


def latest(root):
    """The newest complete checkpoint's step, or None."""
    return max(steps(root), default=None)


def prune(root, keep):
    """Delete all but the `keep` newest complete checkpoints; 0 keeps all."""
    for step in steps(root)[:-keep] if keep else []:
        _remove(_folder(root, step))


def clean(root):
    """Delete what unfinished saves and deletions left. Only while no save is under way."""
    for path in Path(root).glob("*"):
        if re.fullmatch(r"\d{9,}\.(partial|deleted\d*)", path.name):
            shutil.rmtree(path)


def read_meta(root, step):
    """What `save` was given as meta, with "step" and "arrays". Raises ValueError when it is missing
    or damaged.
    """
    path = _folder(root, step) / "meta.json"
    try:
        stored = json.loads(path.read_bytes())
        body = stored["body"]
        crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
        intact = crc32 == stored["crc32"] and body["step"] == step
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: cannot be read: {e}") from None
    if not intact:
        raise ValueError(f"{path}: damaged: its checksum does not match")
    return body


def newest_meta(root):
    """(step, meta) of the newest checkpoint whose meta.json is sound, or (None, {}) when there is
    no checkpoint.

    Raises ValueError when there are checkpoints and no meta.json can be read.
    """
    for step in reversed(steps(root)):
        try:
            return step, read_meta(root, step)
        except ValueError as e:
            fault = e
    if steps(root):
        raise ValueError(f"{root}: no checkpoint there can be read; of the oldest: {fault}")
    return None, {}


def restore_newest(root, like, tell=print, set_aside=False):
    """(step, tree as `restore`) of the newest checkpoint that is sound on all processes. Newer ones
    are told of and, with set_aside, renamed once an older one has been read.

    Raises ValueError when there is none, KeyError and TypeError as `restore`.
    """
    damaged = []
    for step in reversed(steps(root)):
        tree, fault = None, ""
        try:
            tree = restore(root, step, like)
        except ValueError as e:
            fault = str(e)
        if jax.process_count() > 1 and multihost_utils.process_allgather(bool(fault)).any():
            fault = fault or f"another process could not read checkpoint {step}"
        if not fault:
            if set_aside and jax.process_index() == 0:
                for folder in damaged:
                    folder.rename(folder.with_suffix(".damaged"))
            return step, tree
        tell(f"passing over a damaged checkpoint: {fault}")
        damaged.append(_folder(root, step))
    raise ValueError(f"{root}: {'no checkpoint there can be read' if damaged else 'holds none'}")


def restore(root, step, like):
    """The saved tree in the shapes, dtypes and shardings of `like` (arrays or ShapeDtypeStructs;
    NumPy without one).

    Every process reads what its devices hold. Raises KeyError or TypeError, listing every array
    that is not in the checkpoint or has another shape there, and ValueError that names the array
    whose data is damaged or missing.
    """
    folder, stored = _folder(root, step), read_meta(root, step)["arrays"]
    wanted, treedef = _flatten(like)
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise KeyError(f"checkpoint {folder} has no {', '.join(missing)}")
    other = [f"{name} is {tuple(stored[name]['shape'])} there, {tuple(x.shape)} here"
             for name, x in wanted.items() if tuple(stored[name]["shape"]) != tuple(x.shape)]
    if other:
        raise TypeError(f"checkpoint {folder} has other shapes: {'; '.join(other)}")
    opened = {name: ts.open(_spec(folder, name), open=True, read=True) for name in wanted}
    reads = {}
    for name, x in wanted.items():
        try:
            array = opened[name].result()
            found = {"shape": list(array.shape), "dtype": str(array.dtype.numpy_dtype)}
            if found != {k: stored[name][k] for k in found}:
                raise ValueError(f"zarr.json says {found}, meta.json {stored[name]}")
            reads[name] = {str(i): array[i].read() for i in _indices(x)}
        except ValueError as e:
            raise ValueError(f"checkpoint {folder}: array {name} is damaged: {_short(e)}") from None
    leaves = [_assemble(folder, name, x, reads[name]) for name, x in wanted.items()]
    return jax.tree.unflatten(treedef, leaves)


def _indices(x):
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return [(...,)]
    return sharding.addressable_devices_indices_map(tuple(x.shape)).values()


def _assemble(folder, name, like, reads):
    try:
        parts = {index: np.asarray(read.result(), like.dtype) for index, read in reads.items()}
    except ValueError as e:
        raise ValueError(f"checkpoint {folder}: array {name} is damaged: {_short(e)}") from None
    sharding = getattr(like, "sharding", None)
    if sharding is None:
        return parts[str((...,))]
    return jax.make_array_from_callback(
        tuple(like.shape), sharding, lambda index: parts[str(index)])


# ---- a log

def open_log(path, step, once=("stop", "end")):
    """(write(event, row) -> row, events already written at `step`) of a file of JSON objects, one a
    line, with keys "event" and "step"; floats keep all their digits.

    Lines of steps after `step`, which a crash undid, a torn line and the events `once`, of which
    only a last one holds, are cut. Only process 0 writes.
    """
    path, kept = Path(path), []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            kept += [row] if row["step"] <= step and row["event"] not in once else []
    done = {row["event"] for row in kept if row["step"] == step}
    if jax.process_index():
        return (lambda event, row: row), done
    _write_text(path.with_suffix(".tmp"), "".join(json.dumps(row) + "\n" for row in kept))
    path.with_suffix(".tmp").replace(path)
    file = open(path, "a", buffering=1)

    def write(event, row):
        file.write(json.dumps({"event": event} | row) + "\n")
        return row

    return write, done
