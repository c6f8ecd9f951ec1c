# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints of any pytree of arrays, written in the background by TensorStore.

Owns the layout root/000000100/{array names, meta.json}, the commit, pruning and integrity. Never
returns a value that was not saved: chunks and meta.json carry checksums, a missing chunk is an
error. Invariant: a checkpoint exists if and only if its meta.json does; arrays are on disk before
meta.json is, and the folder gets its name last.

    ckpt.wait(ckpt.save("runs", 7, tree)); tree = ckpt.restore("runs", 7, like=tree)
"""
import contextlib
import itertools
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

CHUNK_BYTES = 2**24  # largest chunk; many chunks in flight keep all cores and the disk busy


def _folder(root, step):
    return Path(root) / f"{step:09d}"


def _flatten(tree):
    """Return ({path of keys joined by "/": array}, treedef)."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two arrays of the tree have one name, {', '.join(twice)}: rename a key")
    arrays = [x if hasattr(x, "dtype") else np.asarray(x) for _, x in leaves]
    return dict(zip(names, arrays, strict=True)), treedef


def _owned_shards(x):
    """List (index, copy) of the shards that this process writes: over all processes, one replica
    of each.
    """
    if not isinstance(x, jax.Array):
        return [((), np.array(x))] if jax.process_index() == 0 else []
    return [(s.index, _snapshot(s.data)) for s in x.addressable_shards if s.replica_id == 0]


def save(root, step, tree, meta=(), keep=0, tell=print):
    """Start to write `tree` as checkpoint `step`, replacing one of that step; return a Future of
    its path.

    Returns when the arrays may be overwritten or donated; a thread does the rest. Every process
    must call it, on a shared folder: each writes the shards that it owns, process 0 commits, and
    all Futures resolve after that. Then all but the `keep` newest checkpoints are deleted (0: keep
    all); `tell` gets a sentence for each that cannot be deleted.

    Raises ValueError when meta has a key that ckpt.py writes. Other errors are in the Future: see
    `wait`.
    """
    if reserved := sorted({"step", "arrays"} & dict(meta).keys()):
        raise ValueError(f"meta has {', '.join(reserved)}: ckpt.py writes that itself; rename it")
    arrays, _ = _flatten(tree)
    for x in arrays.values():
        if isinstance(x, jax.Array) and not _in_host_memory(x):  # there it would prevent donation
            x.copy_to_host_async()
    layouts = {name: _layout(x) for name, x in arrays.items()}
    parts = {name: _owned_shards(x) for name, x in arrays.items()}
    body = json.dumps({"step": step, "arrays": layouts} | dict(meta), sort_keys=True)
    return ThreadPoolExecutor(1, "ckpt").submit(
        _write, _folder(root, step), layouts, parts, body, keep, tell)


def _write(final, layouts, parts, body, keep, tell):
    """Write the shards of this process; process 0 commits, the others wait until it has."""
    partial, rank = final.with_suffix(".partial"), jax.process_index()
    marks = {peer: partial / f"peer_{peer}" for peer in range(1, jax.process_count())}
    try:
        partial.mkdir(parents=True, exist_ok=True)
        opened = {name: ts.open(_zarr_spec(partial, name, **layouts[name]), create=True, open=True)
                  for name, shards in parts.items() if shards}
        writes = [opened[name].result()[index].write(shard)
                  for name, shards in parts.items() for index, shard in shards]
        for write in writes:
            write.result()
        if rank:
            marks[rank].touch()
            _await(partial, lambda: [0] if marks[rank].exists() else [])  # gone with the rename
        else:
            _await(partial, lambda: [peer for peer, mark in marks.items() if not mark.exists()])
            _commit(partial, final, body, tell)
            prune(final.parent, keep, tell)
        return final
    except (ValueError, OSError) as e:  # TensorStore's are ValueErrors
        fault = _message(e)
        with contextlib.suppress(OSError), open(partial / "peer_failed", "x") as f:
            f.write(f"process {rank}: {fault}")  # ends the wait of the others
        raise ValueError(f"{final} could not be written, older ones are whole: {fault}") from e


def _commit(partial, final, body, tell):
    """Make a written folder the checkpoint `final`. Wherever the machine stops, one whole
    checkpoint of that step stays: the old one, which `clean` may have to rename back, or the new.
    """
    for folder, subfolders, _ in os.walk(partial):
        if subfolders:  # TensorStore syncs the folders of chunks, not what is above them
            _sync(folder)
    stored = {"crc32": zlib.crc32(body.encode()), "body": json.loads(body)}
    (partial / "meta.json").write_text(json.dumps(stored, indent=1))
    _sync(partial / "meta.json")
    _sync(partial)
    replaced = final.with_suffix(".replaced")
    if final.exists():
        _set_aside(replaced, "deleted", tell)  # where a kill came before its deletion
        os.rename(final, replaced)
    os.rename(partial, final)
    _sync(final.parent)
    for mark in final.glob("peer_*"):
        mark.unlink()
    _set_aside(replaced, "deleted", tell)


def wait(future):
    """Block until a save is committed; raise the ValueError of one that failed. None: no save."""
    return future.result() if future is not None else None


def steps(root):
    """List the steps of the complete checkpoints, ascending."""
    return sorted(int(p.name) for p in _named(root, "") if (p / "meta.json").exists())


def restore(root, step, like):
    """Return the saved tree in the shapes, dtypes and shardings of `like` (arrays or
    ShapeDtypeStructs; NumPy arrays where there is no sharding).

    Each process reads only what its devices hold. Raises KeyError or TypeError that lists all
    arrays that the checkpoint lacks or has in another shape, ValueError that names the array whose
    data is damaged or missing.
    """
    folder, stored = _folder(root, step), read_meta(root, step)["arrays"]
    wanted, treedef = _flatten(like)
    if missing := [name for name in wanted if name not in stored]:
        raise KeyError(f"checkpoint {folder} has no {', '.join(missing)}")
    if other := [f"{name} is {tuple(stored[name]['shape'])} there, {tuple(x.shape)} here"
                 for name, x in wanted.items() if tuple(stored[name]["shape"]) != tuple(x.shape)]:
        raise TypeError(f"checkpoint {folder} has other shapes: {'; '.join(other)}")
    opened = {name: ts.open(_zarr_spec(folder, name, **stored[name]), open=True, read=True)
              for name in wanted}
    reads, leaves = {}, []
    try:
        for name, x in wanted.items():  # start all reads before waiting for the first
            reads[name] = _start_reads(opened[name].result(), x)
        for name, x in wanted.items():
            leaves.append(_assemble(x, reads[name]))
    except ValueError as e:
        raise ValueError(f"checkpoint {folder}: array {name} is damaged: {_message(e)}") from None
    return jax.tree.unflatten(treedef, leaves)


# ---- optional

def latest(root):
    """Return the step of the newest complete checkpoint, or None."""
    return max(steps(root), default=None)


def read_meta(root, step):
    """Return the meta given to `save`, with "step" and "arrays". Raises ValueError when it is
    missing or damaged.
    """
    path = _folder(root, step) / "meta.json"
    try:
        stored = json.loads(path.read_bytes())
        body = stored["body"]
        crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
        if crc32 != stored["crc32"] or body["step"] != step:
            raise ValueError("its checksum does not match")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: missing or damaged: {e}") from None
    return body


def _zarr_spec(folder, name, shape, dtype, chunk):
    """Describe an array; opening one whose zarr.json says something else is an error."""
    metadata = {
        "shape": shape, "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]}
    path = str((folder / name).resolve())  # TensorStore refuses ".."
    return {"driver": "zarr3", "metadata": metadata,
            "kvstore": {"driver": "file", "path": path, "file_io_sync": True},
            "fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}


def _message(error):
    """Return TensorStore's error message without the spec and source locations at its end."""
    return re.split(r"\s*\[(?:tensorstore_spec|source locations)", str(error))[0]


def _start_reads(array, like):
    """Start to read what this process needs of `like`: {str(index): TensorStore's future}."""
    whole = getattr(like, "sharding", None) is None
    indices = [()] if whole else like.sharding.addressable_devices_indices_map(like.shape).values()
    return {str(index): array[index].read() for index in indices}


def _assemble(like, reads):
    parts = {index: np.asarray(read.result(), like.dtype) for index, read in reads.items()}
    if getattr(like, "sharding", None) is None:
        return parts["()"]
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: parts[str(index)])


def _snapshot(x):
    """Copy a one-device array to NumPy, so that x may be donated."""
    host = np.asarray(x)  # in host memory a view of x
    return host if host.flags.owndata else host.copy()


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _in_host_memory(x):
    return x.sharding.memory_kind != "device" or next(iter(x.devices())).platform == "cpu"


def _layout(x):
    shard = x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape
    chunk = _chunk_shape(shard, x.dtype.itemsize)
    return {"shape": list(x.shape), "dtype": str(x.dtype), "chunk": chunk}


def _chunk_shape(shard_shape, itemsize):
    """Halve the longest even dim of a shard until a chunk has at most CHUNK_BYTES."""
    chunk = list(shard_shape)
    while (np.prod(chunk, dtype=np.int64) * itemsize > CHUNK_BYTES
           and (even := [i for i, n in enumerate(chunk) if n % 2 == 0])):
        chunk[max(even, key=lambda i: chunk[i])] //= 2
    return [max(n, 1) for n in chunk]


PEER_TIMEOUT_S = 600  # how long a process that is done writing waits for the others


def _await(partial, late):
    """Poll until late() lists no process. Raises OSError when one has failed or takes too long."""
    deadline, failed = time.monotonic() + PEER_TIMEOUT_S, partial / "peer_failed"
    while ranks := late():
        if failed.exists() and (fault := failed.read_text()):
            raise OSError(fault)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {ranks} are not done after {PEER_TIMEOUT_S} s; have "
                               "they ended, or do they not share this folder?")
        time.sleep(0.05)


def _named(root, suffix):
    """List the paths in root named by a step and a suffix that matches the regular expression."""
    return sorted(p for p in Path(root).glob("*") if re.fullmatch(r"\d{9,}" + suffix, p.name))


def prune(root, keep, tell=print):
    """Delete all but the `keep` newest complete checkpoints, and damaged ones older than those; 0
    keeps all. `tell` gets a sentence for each that cannot be deleted.
    """
    kept = steps(root)[-keep:] if keep else []
    for path in _named(root, r"(\.damaged\d*)?") if kept else []:
        if int(path.stem) < kept[0] and (path / "meta.json").exists():
            _set_aside(path, "deleted", tell)


def clean(root, tell=print):
    """Delete what interrupted saves and deletions left, and rename back a checkpoint whose
    replacement did not get its name. Call it only while no save is under way.
    """
    for path in _named(root, r"\.(partial|deleted|replaced)\d*"):
        final = path.with_suffix("")
        if path.suffix == ".replaced" and not (final / "meta.json").exists():
            os.rename(path, final)
        else:
            _set_aside(path, "deleted", tell)


def _set_aside(folder, suffix, tell):
    """Rename a folder, if it exists, to the first free name with that suffix, and delete it when
    that is "deleted": half a checkpoint never passes for a whole one. Errors are told, as they must
    not end a run.
    """
    names = (folder.with_suffix(f".{suffix}{n or ''}") for n in itertools.count())
    try:
        os.rename(folder, aside := next(name for name in names if not name.exists()))
        if suffix == "deleted":
            shutil.rmtree(aside)
    except FileNotFoundError:
        pass
    except OSError as e:
        tell(f"{folder} is left over: {e}")


def newest_meta(root):
    """Return (step, meta) of the newest checkpoint whose meta.json is intact; (None, {}) when there
    is no checkpoint.

    Raises ValueError when there are checkpoints but no meta.json can be read.
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
    """Return (step, tree) of the newest checkpoint that every process can read; see `restore`.

    `tell` gets a sentence for each damaged one. With set_aside these are renamed to .damaged, once
    an older one has been read. Raises ValueError when there is none, KeyError and TypeError as
    `restore` does.
    """
    damaged = []
    for step in reversed(steps(root)):
        try:
            tree, fault = restore(root, step, like), ""
        except ValueError as e:
            fault = str(e)
        if jax.process_count() > 1 and multihost_utils.process_allgather(bool(fault)).any():
            fault = fault or f"another process could not read checkpoint {step}"
        if not fault:
            for folder in damaged if set_aside and jax.process_index() == 0 else ():
                _set_aside(folder, "damaged", tell)
            return step, tree
        tell(f"passing over a damaged checkpoint: {fault}")
        damaged.append(_folder(root, step))
    raise ValueError(f"{root}: {'no checkpoint there can be read' if damaged else 'holds none'}")
