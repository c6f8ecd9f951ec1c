# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints of any pytree of arrays, written in the background by TensorStore.

Commit: (1) each process writes its shards to root/000000100/<id>/, all files and folders synced;
(2) process 0 waits for all of them, then (3) writes root/000000100/meta.json, which names <id>:
one atomic write, also in an object store. (4) Only process 0 lists and decides what is newest;
(5) readers look at meta.json alone: without it there is no checkpoint.

    ckpt.wait(ckpt.save("runs", 7, tree)); tree = ckpt.restore("runs", 7, like=tree)
"""
import contextlib
import errno
import fcntl
import fnmatch
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import islice, product
from math import isfinite, prod
from pathlib import Path

import jax
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils

FILE_BYTES = 2**24  # largest file of an array; many in flight keep all cores and the disk busy
CHUNK_BYTES = 2**20  # largest part of a file that has a checksum and is read by itself
SMALL_BYTES = 2**16  # arrays up to this size that are not split share one array of bytes
SMALL = ".small"  # its name
READERS = 32  # arrays that are read at a time
RETRIES = {"max_retries": 5, "initial_delay": "1s"}  # of a request to a store: half a minute
META_BYTES = 2**24  # largest meta.json; that of 10,000 arrays has some 2**21


def save(root, step, tree, meta=(), max_to_keep=0, keep_period=0, temporary=False, tell=print):
    """Start to write `tree` as checkpoint `step`, replacing one of that step; return a Future of
    its path. root: a folder, gs://bucket/path, s3://bucket/path or, for another server than
    Amazon's, s3://bucket/path?endpoint=http://host:port.

    Returns when the arrays may be overwritten or donated; a thread does the rest. Every process
    must call it, on a shared root: each writes the shards that it owns, process 0 commits, and all
    Futures resolve after that. Then older ones are deleted: see `prune`. temporary: the next
    checkpoint replaces this one.

    meta: more to write, under other names than "step", "folder" and "arrays". Raises TypeError when
    it has one of these, ValueError for what cannot be saved. Other errors are in the Future: see
    `wait`.
    """
    arrays, _ = flatten(tree)
    for x in arrays.values():
        if isinstance(x, jax.Array) and not _in_host_memory(x):  # there it would prevent donation
            x.copy_to_host_async()
    layouts, shards = _plan_layout(arrays)
    data = broadcast_from_main(lambda: os.urandom(4).hex())
    body = dict(step=int(_name(step)), folder=data, arrays=layouts, **dict(meta))
    body = json.loads(json.dumps(body, default=lambda x: np.asarray(x).tolist()))  # as it is read
    return ThreadPoolExecutor(1, "ckpt").submit(
        _write, root, body, shards, temporary, tell, (max_to_keep, keep_period))


def _write(root, body, shards, temporary, tell, keep):
    """Write the shards of this process; process 0 commits, the others wait until it has."""
    data, rank, peers = body["folder"], jax.process_index(), range(1, jax.process_count())
    path, store, under_way = join_path(root, _name(body["step"])), None, []
    try:
        _check_space(root, sum(x.nbytes for _, _, x in shards))
        store = _open(root, _name(body["step"]))
        # In a bucket that is not there TensorStore would try for ever to create an array.
        store.write(f"{data}.{rank}", b"begun").result()
        arrays = {name: ts.open(_zarr_spec(root, body, name), create=True, open=True)
                  for name, _, _ in shards}
        under_way += arrays.values()
        for name, index, x in shards:
            x, target = np.asarray(x), arrays[name].result()[index].translate_to[0]
            # One write of several files would end at its first error and still write the others.
            under_way += [target[part].write(x[part], can_reference_source_data_indefinitely=True)
                          for part in _file_slices(x.shape, body["arrays"][name]["file"])]
        for each in under_way:
            each.result()
        if rank:
            store.write(f"{data}.{rank}", b"written").result()
            _wait_for_peers(
                store, data, lambda: [] if data.encode() in _read(store, "meta.json") else [0])
        else:
            _wait_for_peers(store, data, lambda: [
                r for r in peers if _read(store, f"{data}.{r}") != b"written"])
            _commit(root, store, body, temporary)
    except (ValueError, OSError) as e:  # TensorStore's are ValueErrors
        fault = _message(e)
        if store:
            _abort(root, store, body, fault, under_way, tell)
        raise ValueError(f"{path} could not be written, older ones are whole: {fault}") from e
    if rank == 0:
        try:
            clean(root, tell, body["step"])
            prune(root, *keep, tell, up_to=body["step"])
        except (ValueError, OSError) as e:
            tell(f"{path} is written; deleting what it replaces failed: {_message(e)}")
    return path


def _commit(root, store, body, temporary):
    """Make what was written the checkpoint, by one atomic write."""
    if _is_local(root):  # TensorStore syncs the folder of a file, not those above it
        path = Path(root, _name(body["step"])).resolve()
        for above in (*[above for above, _, _ in os.walk(path)], *path.parents[:3]):
            _sync(above)  # also those that a run makes
    crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    text = json.dumps({"crc32": crc32, "body": body}, indent=1).encode()
    if len(text) > META_BYTES:
        raise ValueError(f"meta.json is too long, {len(text):,} bytes: use fewer arrays, less meta")
    if not temporary:  # a kill in between leaves a checkpoint too many, none too few
        store.write("temporary", None).result()
    store.write("meta.json", text).result()
    if temporary:
        store.write("temporary", b"yes").result()


def wait(future):
    """Block until a save is committed; raise the ValueError of one that failed. None: no save."""
    return future.result() if future is not None else None


def steps(root):
    """List the steps of the complete checkpoints, ascending."""
    return sorted(step for step, names in _contents(root).items() if "meta.json" in names)


def restore(root, step, like, meta=None):
    """Return the saved tree in the shapes, dtypes and shardings of `like` (arrays or
    ShapeDtypeStructs; NumPy arrays where there is no sharding). meta: of `read_meta`, if at hand.

    Each process reads only what its devices hold. Raises KeyError or TypeError that lists all
    arrays that the checkpoint lacks or has in another shape, ValueError that names the array whose
    data is damaged or missing.
    """
    meta = meta or read_meta(root, step)
    (wanted, treedef), stored = flatten(like), meta["arrays"]
    _check_fit(wanted, stored, join_path(root, _name(step)))
    with ThreadPoolExecutor(READERS) as pool:
        small = pool.submit(_load, root, meta, SMALL, np.empty(0, np.uint8))
        leaves = pool.map(partial(_load, root, meta, small=small), wanted, wanted.values())
        return jax.tree.unflatten(treedef, leaves)


# ---- optional

def latest(root):
    """Return the step of the newest complete checkpoint, or None."""
    return max(steps(root), default=None)


def broadcast_from_main(decide):
    """Return what decide() returns on process 0 (JSON), in every process; its ValueError is raised
    in every process too.
    """
    if jax.process_count() == 1:
        return decide()
    value = fault = None
    if jax.process_index() == 0:
        try:
            value = decide()
        except ValueError as e:
            fault = str(e)
    text = np.frombuffer(json.dumps([value, fault]).encode(), np.uint8)
    n = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    text = multihost_utils.broadcast_one_to_all(np.resize(text, n))
    value, fault = json.loads(np.asarray(text, np.uint8).tobytes())
    if fault is not None:
        raise ValueError(fault)
    return value


# What is where.

def _name(step):
    if not isinstance(step, (int, np.integer)) or step < 0:
        raise ValueError(f"step {step!r}: must be a whole number, at least 0")
    return f"{step:09d}"


def _is_local(root):
    return "://" not in str(root)


def join_path(root, *names):
    """A folder or file within a root, in a store whose endpoint stays last."""
    path, mark, endpoint = str(root).partition("?endpoint=")
    return "/".join([path.rstrip("/"), *names]) + mark + endpoint


def _kvstore(root, *names):
    """TensorStore's spec of a folder. Raises ValueError for an unknown kind, and when a link leads
    somewhere else.
    """
    if _is_local(root):
        path = Path(root).resolve().joinpath(*names)  # TensorStore refuses ".."
        if path.resolve() != path:
            raise ValueError(f"{path} leads to {path.resolve()}: a checkpoint may hold no links")
        return {"driver": "file", "path": f"{path}/", "file_io_sync": True}
    url, _, endpoint = str(root).partition("?endpoint=")
    kind, _, rest = url.partition("://")
    bucket, *folders = rest.rstrip("/").split("/")
    drivers = {"gs": {"driver": "gcs", "gcs_request_retries": RETRIES},
               "s3": {"driver": "s3", "s3_request_retries": RETRIES}
               | ({"endpoint": endpoint} if endpoint else {})}
    if kind not in drivers:
        raise ValueError(f"{root}: must be a folder, gs://bucket/path or s3://bucket/path")
    return drivers[kind] | {"bucket": bucket, "path": "/".join([*folders, *names, ""])}


def _open(root, *names):
    return ts.KvStore.open(_kvstore(root, *names)).result()


def _zarr_spec(root, meta, name):
    """Describe an array; opening one whose zarr.json says something else is an error."""
    layout = meta["arrays"][name]
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    if "chunk" in layout:
        codecs = [{"name": "sharding_indexed", "configuration": {
            "chunk_shape": layout["chunk"], "codecs": codecs, "index_codecs": codecs}}]
    metadata = {
        "shape": layout["shape"], "data_type": layout["dtype"], "codecs": codecs,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": layout["file"]}}}
    return {"driver": "zarr3", "metadata": metadata,
            "kvstore": _kvstore(root, _name(meta["step"]), meta["folder"], *name.split("/")),
            "fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}


def _read(store, key):
    """The bytes of a key; none when there is no such key."""
    return store.read(key).result().value


def _delete(root, tell, *keys):
    """Delete keys of root and what is below them, in this order, until one cannot be deleted: that
    is told, as it must not end a run.
    """
    for key in keys:
        path = Path(root, key)
        try:
            if not _is_local(root):
                store, end = _open(root), f"{key}0"  # "0" comes after "/"
                store.delete_range(ts.KvStore.KeyRange(f"{key}/", end)).result()
                store.write(key, None).result()
            elif path.is_dir() and not path.is_symlink():  # TensorStore would leave empty folders
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except (ValueError, OSError) as e:
            tell(f"{join_path(root, key)} is left over: {_message(e)}")
            return


KNOWN_NAMES = re.compile(r"([0-9a-f]{8}|temporary|meta\.json)(\..*)?")  # in a step's folder


def _contents(root):
    """{step: names directly in its folder}, without folders of another program."""
    found, keys = {}, []
    try:
        if not _is_local(root):
            listed = _open(root).list().result()
            keys = [key.decode(errors="replace").split("/")[:2] for key in listed]
        elif os.path.lexists(root):
            for entry in os.scandir(root):
                if entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # another process deleted it
                        keys += [(entry.name, name) for name in ["", *os.listdir(entry.path)]]
    except (ValueError, OSError) as e:
        raise ValueError(f"{root} cannot be listed: {_message(e)}") from None
    for folder, *names in keys:
        if re.fullmatch("[0-9]{9,}", folder) and folder == _name(int(folder)):
            found.setdefault(int(folder), set()).update(filter(None, names))
    return {step: names for step, names in found.items()
            if "meta.json" in names or all(map(KNOWN_NAMES.fullmatch, names))}


def read_meta(root, step):
    """Return the meta given to `save`, with "step", "folder" and "arrays". Raises ValueError when
    it is missing, damaged, or describes what no save writes.
    """
    try:
        store = _open(root, _name(step))
        if _is_local(root) and Path(store.path, "meta.json").stat().st_size > META_BYTES:
            raise ValueError(f"it is larger than {META_BYTES:,} bytes")
        stored = json.loads(_read(store, "meta.json"))
        body = stored["body"]
        if zlib.crc32(json.dumps(body, sort_keys=True).encode()) != stored["crc32"]:
            raise ValueError("its checksum does not match")
        if body["step"] != step or not re.fullmatch("[0-9a-f]{8}", body["folder"]):
            raise ValueError("it is not that of a save of this step")
        if bad := [name for name, layout in body["arrays"].items() if not _is_ours(name, layout)]:
            raise ValueError(f"no save writes such an entry: {bad[0]!r}: {body['arrays'][bad[0]]}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{join_path(root, _name(step), 'meta.json')}: missing or damaged: "
                         f"{_message(e)}") from None
    return body


def _is_ours(name, layout):
    """Whether `save` writes such an entry of "arrays"; errors are a no, too."""
    shape, offset, dtype = layout["shape"], layout.get("offset", 0), layout["dtype"]
    parts = () if "offset" in layout else (layout["file"], layout.get("chunk", layout["file"]))
    return (_is_path(name) and isinstance(dtype, str) and np.dtype(dtype).itemsize
            and all(type(n) is int and n >= 0 for n in (*shape, offset))
            and all(type(n) is int and 0 < n <= max(most, 1)
                    for whole, part in zip((shape, *parts), parts)
                    for most, n in zip(whole, part, strict=True)))


def _is_path(name):
    """Whether the name of an array stays below its folder."""
    return not {".", ".."} & set(name.split("/"))


def _message(error):
    """Return TensorStore's error message without the spec and source locations at its end."""
    return re.split(r"\s*\[(?:tensorstore_spec|source locations|http_)", str(error))[0]


def _check_space(root, n_bytes):
    """Raise OSError when a local disk has not this much space left."""
    if _is_local(root):
        Path(root).mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        if free < n_bytes:
            raise OSError(errno.ENOSPC, f"{n_bytes / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB "
                          "are free: delete something, or keep fewer checkpoints")


def _sync(path):
    with contextlib.suppress(PermissionError):  # a folder above, that is somebody else's
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


PEER_TIMEOUT_S = 600  # how long a process that is done writing waits for the others


def _abort(root, store, body, fault, under_way, tell):
    """Delete what a failed save has written, and end the wait of the other processes."""
    data, rank = body["folder"], jax.process_index()
    for each in under_way:  # what they write later nobody would delete
        each.exception()
    with contextlib.suppress(ValueError, OSError):
        if rank == 0 and data.encode() not in _read(store, "meta.json"):
            _delete(root, tell, *(f"{_name(body['step'])}/{name}" for name in (data, f"{data}.0")))
        if jax.process_count() > 1:
            store.write(f"{data}.failed", f"process {rank}: {fault}".encode()).result()


def _wait_for_peers(store, data, late):
    """Poll until late() lists no process. Raises OSError when one has failed or takes too long."""
    patience_s = PEER_TIMEOUT_S * (2 if jax.process_index() else 1)  # process 0 knows who is late
    deadline = time.monotonic() + patience_s
    while ranks := late():
        if fault := _read(store, f"{data}.failed"):
            raise OSError(fault.decode())
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {ranks} are not done after {patience_s} s: ended, or "
                               "without this folder?")
        time.sleep(0.05)


# Arrays and their parts.

def flatten(tree):
    """Return ({path of keys joined by "/": array}, treedef)."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    arrays = {}
    for path, x in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in arrays:
            raise ValueError(f"two arrays of the tree have one name, {name}: rename a key")
        x = arrays[name] = x if hasattr(x, "dtype") else np.asarray(x)
        if not _is_path(name) or name == SMALL:
            raise ValueError(f"{name!r}: no array can be saved under that name")
        if not (jax.numpy.issubdtype(x.dtype, np.number) or x.dtype == bool):
            raise ValueError(f"{name!r}: arrays of {x.dtype} cannot be saved, only of numbers; of "
                             "a random key save jax.random.key_data")
    return arrays, treedef


def _in_host_memory(x):
    return x.sharding.memory_kind != "device" or next(iter(x.devices())).platform == "cpu"


def _snapshot(x):
    """A copy of an array, so that x may be overwritten or donated; of a jax.Array in host memory,
    where NumPy's would be a view, one that JAX makes in the background.
    """
    if not isinstance(x, jax.Array):
        return np.array(x)
    return jax.device_put(x, x.sharding, may_alias=False) if _in_host_memory(x) else np.asarray(x)


def _plan_layout(arrays):
    """Return ({name: how it is stored}, [(name, index, copy)] of what this process writes). Small
    arrays are stored from an offset of the array of bytes SMALL, others in files of chunks, each
    part by one process.
    """
    main, layouts, shards, small, end = jax.process_index() == 0, {}, [], [], 0
    for name, x in arrays.items():
        layouts[name] = {"shape": list(x.shape), "dtype": str(x.dtype)}
        whole = not isinstance(x, jax.Array) or x.is_fully_replicated
        if whole and x.nbytes <= SMALL_BYTES:
            layouts[name]["offset"] = end
            end += x.nbytes
            small += [np.asarray(x).tobytes()] if main else []
            continue
        shape, owned = x.shape, [((), x)] if main else []
        if isinstance(x, jax.Array):
            shape = x.sharding.shard_shape(shape)
            owned = [(s.index, s.data) for s in x.addressable_shards if s.replica_id == 0]
        file = _chunk_shape(shape, FILE_BYTES // x.dtype.itemsize)
        chunk = _chunk_shape(file, CHUNK_BYTES // x.dtype.itemsize)
        layouts[name] |= {"file": file, "chunk": chunk}
        shards += [(name, index, _snapshot(part)) for index, part in owned]
    if end:
        layouts[SMALL] = {"shape": [end], "dtype": "uint8", "file": [min(end, FILE_BYTES)]}
        shards += [(SMALL, (), np.frombuffer(b"".join(small), np.uint8))] if main else []
    return layouts, shards


def _chunk_shape(shape, n):
    """Halve the longest even dim until there are at most n elements; no dim is 0."""
    part = [max(size, 1) for size in shape]
    while prod(part) > n and (even := [i for i, size in enumerate(part) if size % 2 == 0]):
        part[max(even, key=lambda i: part[i])] //= 2
    return part


def _file_slices(shape, file):
    """Yield the index of each file's part of an array."""
    if not shape:
        yield ()
        return
    for start in range(0, shape[0], file[0]):
        part = slice(start, min(start + file[0], shape[0]))
        yield from ((part, *others) for others in _file_slices(shape[1:], file[1:]))


def _check_fit(wanted, stored, path):
    """Raise KeyError or TypeError when a checkpoint is not of these names, shapes and kinds."""
    if missing := [name for name in wanted if name not in stored]:
        raise KeyError(f"checkpoint {path} has no {', '.join(missing)}")
    other = []
    for name, x in wanted.items():
        shape, dtype = stored[name]["shape"], stored[name]["dtype"]
        was_float, is_float = (jax.numpy.issubdtype(d, np.inexact) for d in (dtype, x.dtype))
        if shape != list(x.shape) or was_float > is_float:
            other.append(f"{name} is {dtype}{shape} there, {x.dtype}{list(x.shape)} here")
    if other:
        raise TypeError(f"checkpoint {path} has other shapes or kinds: {'; '.join(other)}")


def _load(root, meta, name, like, small=None):
    """Read what this process needs of an array. small: the Future of SMALL."""
    layout = meta["arrays"][name]
    shape, dtype = layout["shape"], np.dtype(layout["dtype"])

    def read(*ranges):
        part = array[tuple(slice(r.start, r.stop) for r in ranges)]
        if isinstance(part, ts.TensorStore):
            memory = _aligned(part.shape, dtype)
            ts.array(memory).write(part).result()
            part = memory
        return np.asarray(part, like.dtype)

    try:
        if "offset" in layout:
            n_bytes = prod(shape) * dtype.itemsize
            packed = small.result()[layout["offset"]:][:n_bytes] if n_bytes else np.zeros(0, "u1")
            array = packed.view(dtype).reshape(shape)
        else:
            array = ts.open(_zarr_spec(root, meta, name), open=True, read=True).result()
        return _assemble(shape, getattr(like, "sharding", None), read)
    except ValueError as e:
        path = join_path(root, _name(meta["step"]))
        raise ValueError(f"checkpoint {path}: array {name} is damaged: {_message(e)}") from None


def _assemble(shape, sharding, read):
    """The array of which read(range of each dim, ...) gives the parts that this process needs, each
    once; a NumPy array where there is no sharding.
    """
    read = cache(read)  # several devices may hold the same part
    if sharding is None:
        return read(*map(range, shape))
    return jax.make_array_from_callback(tuple(shape), sharding, lambda index: read(
        *(range(n)[part] for n, part in zip(shape, index))))


def _aligned(shape, dtype):
    """New memory that JAX takes on a CPU as it is; of any other it makes a copy."""
    n_bytes = prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(n_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start:start + n_bytes].view(dtype).reshape(shape)


# Retention and clean-up.

def prune(root, max_to_keep, keep_period=0, tell=print, up_to=float("inf")):
    """Of the checkpoints up to a step, delete all but the `max_to_keep` newest (0: keep all), those
    of steps that keep_period divides and the newest of all; temporary ones, once there is a newer
    one. `tell` gets a sentence for each that cannot be deleted.
    """
    whole = {step: names for step, names in sorted(_contents(root).items())
             if "meta.json" in names and step <= up_to}
    lasting = [step for step, names in whole.items() if "temporary" not in names]
    for_ever = [step for step in lasting if keep_period and step % keep_period == 0]
    for step in whole.keys() - {*lasting[-max_to_keep:], *for_ever, max(whole, default=None)}:
        _delete_step(root, step, tell)


def delete_all(root, tell=print):
    """Delete every checkpoint of root."""
    for step in _contents(root):
        _delete_step(root, step, tell)


def _delete_step(root, step, tell):
    _delete(root, tell, f"{_name(step)}/meta.json", _name(step))  # half a checkpoint is none


def clean(root, tell=print, only=None):
    """Delete what interrupted saves and deletions left, in the folders of all steps or of one. Call
    it only while no save of these is under way.
    """
    for step, names in _contents(root).items():
        if only not in (None, step):
            continue
        if "meta.json" not in names:
            _delete_step(root, step, tell)
            continue
        with contextlib.suppress(ValueError):  # a damaged meta.json does not say what is garbage
            for name in names - {"meta.json", "temporary", read_meta(root, step)["folder"]}:
                _delete(root, tell, f"{_name(step)}/{name}")


def newest_meta(root):
    """Return (step, meta) of the newest checkpoint whose meta.json is intact; (None, {}) when there
    is no checkpoint. Process 0 looks and tells the others.

    Raises ValueError when there are checkpoints but no meta.json can be read.
    """
    def look():
        for step in (there := steps(root))[::-1]:
            with contextlib.suppress(ValueError):
                return step, read_meta(root, step)
        if there:
            raise ValueError(f"{root}: no checkpoint there can be read; try python ckpt.py verify")
        return None, {}

    return broadcast_from_main(look)


def restore_newest(root, like, tell=print):
    """Return (step, tree) of the newest checkpoint that every process can read; see `restore`.
    Process 0 says which are there. `tell` gets a sentence for each damaged one.

    Raises ValueError when there is none, KeyError and TypeError as `restore` does.
    """
    for step in reversed(broadcast_from_main(lambda: steps(root))):
        try:
            meta = broadcast_from_main(partial(read_meta, root, step))
            tree, fault = restore(root, step, like, meta), ""
        except ValueError as e:
            fault = str(e)
        if jax.process_count() > 1 and multihost_utils.process_allgather(bool(fault)).any():
            fault = fault or f"another process could not read checkpoint {step}"
        if not fault:
            return step, tree
        tell(f"passing over a damaged checkpoint: {fault}")
    raise ValueError(f"{root}: no checkpoint there can be read")


# ---- locks of buckets

LOCK = ".lock"  # the object, beside the checkpoints
HEARTBEAT_S, STALE_S = 10, 60  # between heartbeats; how long without one until a lock may be taken
ANSWER_S = 10  # how long a heartbeat waits for the server


@contextlib.contextmanager
def lock_bucket(root, owner, about, tell=print):
    """Keep other runs from writing to a bucket. The lock is an object in the bucket with an owner
    and a heartbeat. Yield check(), which raises ValueError once another run has taken the lock.

    owner: a text that no other living run has. A lock of the same owner is taken at once, since its
    process must have ended. A lock of another owner is taken once its heartbeat has not changed for
    STALE_S, by the reader's clock; `tell` gets a message before that wait. about: describes the
    holder. A thread renews the lock. A failed heartbeat is logged and tried again.

    Raises ValueError when another run is alive, or the bucket cannot be written to.
    """
    store, ended, lost = _open(root), threading.Event(), []
    beaten = [time.monotonic()]  # when the heartbeat was last written
    try:
        alive = _take_lock(store, root, owner, about, tell)
    except (ValueError, OSError) as e:
        raise ValueError(f"{join_path(root, LOCK)} cannot be written: {_message(e)}") from None
    if alive:
        raise ValueError(f"ckpt_dir {str(root)!r}: another run is writing to it, {alive}; choose "
                         "another")
    thread = threading.Thread(
        target=_renew_lock, args=(store, root, owner, about, tell, ended, lost, beaten),
        daemon=True)
    thread.start()

    def check():
        # A process that was stopped for longer may have lost the lock and not know it yet.
        if not lost and time.monotonic() - beaten[-1] > STALE_S:
            with contextlib.suppress(ValueError, OSError):  # a server that is away: the save fails
                _note_if_lost(_read_lock(store, ANSWER_S)[0], root, owner, tell, lost)
        if lost:
            raise ValueError(lost[0])

    try:
        yield check
    finally:
        ended.set()
        thread.join(3 * ANSWER_S)  # it may wait for a server that is away
        try:
            holder, generation = _read_lock(store, ANSWER_S)
            if owner == holder.get("owner"):
                _write_lock(store, None, generation, ANSWER_S)
        except (ValueError, OSError) as e:
            tell(f"{join_path(root, LOCK)} is left over: {_message(e) or 'no answer'}")


def _take_lock(store, root, owner, about, tell):
    """Write the lock; None, or who holds it when that run is alive, which takes up to STALE_S."""
    seen, since = None, None
    while True:
        holder, generation = _read_lock(store)
        # Written below, or left by a process that has ended.
        if holder.get("owner") == owner:
            return None
        stale = seen == holder and time.monotonic() - since > STALE_S
        if not holder or stale:
            _write_lock(store, {"owner": owner, "about": about, "beat": 0}, generation)
            continue  # to see whether it is there
        if seen is None:
            seen, since = holder, time.monotonic()
            tell(f"{join_path(root, LOCK)} is held by {holder.get('about')}: waiting up to "
                 f"{STALE_S:g} s to see whether it is alive")
        if seen != holder:
            return holder.get("about")
        time.sleep(HEARTBEAT_S / 10)


def _note_if_lost(holder, root, owner, tell, lost):
    """Add a sentence to `lost` when the lock is not this run's: another run has it, or had it and
    deleted it at its end.
    """
    if holder.get("owner") == owner or lost:
        return
    lost.append(f"ckpt_dir {str(root)!r}: another run has taken it over, "
                f"{holder.get('about', 'and ended since')}, as this one gave no heartbeat for "
                f"{STALE_S:g} s: nothing more is saved there")
    tell(lost[0])


def _renew_lock(store, root, owner, about, tell, ended, lost, beaten):
    """Count up the lock's heartbeat, until `ended` is set or the lock is another run's: `lost` then
    gets a sentence. beaten: gets the time of each heartbeat.
    """
    lock, beat, away = join_path(root, LOCK), 0, False
    while not ended.is_set():
        try:
            holder, generation = _read_lock(store, ANSWER_S)
            _note_if_lost(holder, root, owner, tell, lost)
            if lost:
                return
            beat += 1
            new = {"owner": owner, "about": about, "beat": beat}
            _write_lock(store, new, generation, ANSWER_S)
            beaten[:] = [time.monotonic()]
            away = False
        except (ValueError, OSError) as e:
            if not away:  # once, however long it lasts
                tell(f"{lock} cannot be renewed: {_message(e) or 'no answer'}; it is tried again "
                     f"every {HEARTBEAT_S:g} s")
            away = True
        ended.wait(HEARTBEAT_S)


def _read_lock(store, timeout_s=None):
    """({"owner", "about", "beat"}, generation of the object); {} where there is no lock."""
    found = store.read(LOCK).result(timeout=timeout_s)
    if found.state != "value":
        return {}, found.stamp.generation
    try:
        holder = json.loads(found.value)
    except ValueError:
        holder = None
    if not isinstance(holder, dict):  # not written by this program: as if it were of another run
        holder = {"owner": None, "about": repr(found.value[:80])}
    return holder, found.stamp.generation


def _write_lock(store, holder, generation, timeout_s=None):
    """Write the lock, or delete it for None, unless it has changed since it was read; who has it is
    then seen when it is read next. A server that refuses conditions gets a plain write.
    """
    value = None if holder is None else json.dumps(holder).encode()
    try:
        store.write(LOCK, value, if_equal=generation).result(timeout=timeout_s)
    except ValueError:
        store.write(LOCK, value).result(timeout=timeout_s)


# ---- run folder

# Files that resume="overwrite" deletes, beside the checkpoints.
RUN_FILES = ("metrics.jsonl", "plot.png", "windows.jsonl")


def ckpt_root(out_dir, ckpt_dir):
    """Return the folder or bucket with the checkpoints of a run."""
    return ckpt_dir or join_path(out_dir, "ckpt")


def root_of(out_dir):
    """Return the root of the checkpoints of the run whose config.json is in out_dir."""
    return ckpt_root(out_dir, read_json(Path(out_dir, "config.json")).get("ckpt_dir"))


def roots(root):
    """Return the root of a run's checkpoints and the root of its parameters-only checkpoints."""
    return root, join_path(root, "weights")


def newest_run_meta(root, needed_for=""):
    """Return (step, meta) of the newest checkpoint, as `newest_meta` does.

    needed_for: the purpose that needs a checkpoint; "" if the run can do without. Raises ValueError
    when a needed checkpoint is missing, or when the checkpoint is not one of a run.
    """
    saved, meta = newest_meta(root)
    if needed_for and not meta:
        raise ValueError(f"{needed_for}: {root} holds no checkpoint; is it of a run's --out_dir?")
    if meta and "config" not in meta:
        raise ValueError(f"{root}: checkpoint {saved} is not of a run; to start from its "
                         "parameters: --init_from")
    return saved, meta


def find_start(out_dir, root, resume, given=False):
    """Return (step, meta) of the checkpoint from which a run resumes; (None, {}) for none.

    resume: "overwrite", "must", "never" or another text. given: whether the caller has a state or
    parameters. Raises ValueError when a checkpoint is required and missing, or must not exist.
    """
    if resume == "overwrite":
        return None, {}
    # The checkpoints of the run that is in out_dir may be in another folder.
    before = broadcast_from_main(lambda: root_of(out_dir))
    elsewhere = os.path.realpath(join_path(before)) != os.path.realpath(join_path(root))
    if elsewhere and newest_meta(before)[1]:
        raise ValueError(f"out_dir {out_dir!r}: the checkpoints of its run are in {before}; "
                         "set --ckpt_dir to that, or choose another --out_dir")
    saved, meta = newest_run_meta(root, "resume must" if resume == "must" else "")
    if meta and (given or resume == "never"):
        raise ValueError(f"resume {resume}: {out_dir} holds a run at step {saved}, with "
                         "which this start would not go on; choose another --out_dir, or delete "
                         "it with --resume overwrite")
    return saved, meta


@contextlib.contextmanager
def lock_folders(out_dir, root, log=print):
    """Make out_dir, and a root on this machine; keep other runs from writing to them and to a
    bucket. Process 0 does it for all processes. Delete the remains of interrupted saves.

    Yield check(), which raises ValueError once another run has taken over the bucket.
    """
    if jax.process_index():
        yield lambda: None
        return
    # One lock where both are the same folder.
    folders = {}
    for field, path in (("out_dir", out_dir), ("ckpt_dir", root)):
        if _is_local(path):
            folders[os.path.realpath(path)] = f"{field} {path!r}"
    owner = os.urandom(4).hex()

    def check():
        pass

    with contextlib.ExitStack() as locks:
        for folder, where in folders.items():
            try:
                os.makedirs(folder, exist_ok=True)
                lock = locks.enter_context(open(os.path.join(folder, ".lock"), "a+"))
                # The system releases it when the process ends, however that is.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_local(root):
                    owner = owner_of(lock, owner)
            except BlockingIOError:
                raise ValueError(f"{where}: another run is writing to it; choose another") from None
            except OSError as e:
                if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise ValueError(f"{where}: cannot be written: {e.strerror}; choose another"
                                     ) from None
                log(f"{where}: its file system has no locks ({e.strerror}); no other run may "
                    "write to it")
        if not _is_local(root):
            about = (f"process {os.getpid()} on {socket.gethostname()}, out_dir "
                     f"{os.path.realpath(out_dir)}")
            check = locks.enter_context(lock_bucket(root, owner, about, log))
        for each in roots(root):
            clean(each, log)
        yield check


def owner_of(lock, new):
    """Return the text in out_dir/.lock, at first `new`, with the number of the file.

    A copy of the folder has another file number. A process that has locked this file and finds a
    bucket locked under this text knows that the process of that lock has ended.
    """
    lock.seek(0)
    text = lock.read()
    if not text:
        text = new
        lock.write(text)
        lock.flush()
    return f"{text}.{os.fstat(lock.fileno()).st_ino}"


def begin_out_dir(out_dir, root, config_text, overwrite=False, log=print):
    """Write config.json. overwrite: first delete the previous run. Process 0 does it for all."""
    if jax.process_index():
        return
    if overwrite:
        for each in roots(root):
            delete_all(each, log)
        for name in RUN_FILES:
            Path(out_dir, name).unlink(missing_ok=True)
    replace_file(Path(out_dir, "config.json"), config_text)


def replace_file(path, text):
    """Write a file so that a crash leaves the old text or the new one."""
    new = path.with_suffix(".tmp")
    new.write_text(text)
    new.replace(path)


def open_log(out_dir, step):
    """Open metrics.jsonl for rows of a run that starts at `step`: rows of later steps, and "stop"
    and "end" rows, are deleted first.
    """
    path, kept = Path(out_dir, "metrics.jsonl"), []
    for row in read_log(out_dir):
        if row["step"] <= step and row["event"] not in ("stop", "end"):
            kept.append(json_line(row) + "\n")
    replace_file(path, "".join(kept))
    return open(path, "a", buffering=1)


def read_log(out_dir):
    """Return the rows of metrics.jsonl, without a torn line and without rows that have no step."""
    path, rows = Path(out_dir, "metrics.jsonl"), []
    if not path.exists():
        return rows
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and "step" in row:  # "error" has none
                rows.append(row)
    return rows


def json_line(row):
    """Return a row as JSON on one line: NumPy's numbers and arrays as numbers and lists, numbers
    that are not finite as null, since JSON has none, and values that JSON does not know as text.
    """
    def plain(x):
        if hasattr(x, "tolist"):
            x = x.tolist()
        if isinstance(x, float):
            return x if isfinite(x) else None
        if isinstance(x, dict):
            return {str(key): plain(value) for key, value in x.items()}
        if isinstance(x, (list, tuple)):
            return [plain(value) for value in x]
        return x

    return json.dumps(plain(row), default=str)


def read_json(path):
    """Return the object in a JSON file, or {} where there is no such file. Raises ValueError for a
    file that cannot be read.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ValueError(f"{path}: cannot be read: {e}") from None


# ---- sources

def open_sources(texts, shapes, open_weights, expected_names, find_mismatches, wanted=None,
                 log=print):
    """Return the source of each text (see `parse_source`), with "take": {saved name: name} of the
    parameters to load from it. Of several sources that have a parameter the last wins.

    shapes: {name: shape} of the model's parameters. open_weights, find_mismatches: see
    `open_source`. expected_names: {saved name} -> {name} of the parameters that these sources
    should give. wanted: names to load; None: all. Raises ValueError for an expected parameter that
    no source has, though one of them should be loaded completely.
    """
    sources, saved = [], set()
    for text in texts:
        source = open_source(parse_source(text), open_weights, find_mismatches, log)
        sources.append(source)
        saved.update(source["names"])
    expected = expected_names(saved)
    chosen = choose_sources(sources, shapes)
    # Parameters may be missing when patterns exclude some, or when no source is strict.
    complete = any(source["strict"] and source["load"] == ["*"] and not source["exclude"]
                   for source in sources)
    missing = [f"{name} is not there" for name in shapes if name in expected and name not in chosen]
    _raise_if_errors(missing if complete else [], f"init_from {', '.join(texts)}")
    for source in sources:
        source["take"] = {}
    for name in shapes:
        if name in chosen and name in (wanted or shapes):
            index, saved_name = chosen[name]
            sources[index]["take"][saved_name] = name
    return sources


def open_source(source, open_weights, find_mismatches, log=print):
    """Return a source of `parse_source` with "names": {saved name: shape}, and "read": {saved name:
    like} -> {saved name: array}.

    open_weights: path -> these two, of weights in another format, or None where there are none.
    find_mismatches: meta of a checkpoint -> errors, one for each difference to the model; a source
    that is not strict may differ. Raises ValueError when the source holds no parameters.
    """
    path = source["path"]
    weights = open_weights(path)
    if weights:
        return source | weights
    for root in broadcast_from_main(lambda: (root_of(path), path)):
        step, meta = newest_meta(root)
        if meta:
            break
    else:
        raise ValueError(f"init_from {path}: holds no checkpoint and no weights; must be a run's "
                         "--out_dir, a folder of checkpoints or one of Hugging Face's; nothing is "
                         "downloaded")
    names = {}
    for name, layout in meta["arrays"].items():
        if name.startswith("params/"):
            names[name.removeprefix("params/")] = layout["shape"]

    def read(like):
        return restore_newest(root, {"params": like}, log)[1]["params"]

    return source | {"names": names, "read": read,
                     "summary": f"{path} at step {step} of run {meta.get('run_id')}",
                     "faults": find_mismatches(meta) if source["strict"] else []}


def log_sources(sources, missing, names, log=print):
    """Log how many of the missing parameters each source gives, and how many are initialized.

    names: of all parameters. sources: of `open_sources`.
    """
    taken, rest = [], set(missing)
    for source in sources:
        taken.append((source["path"], [*source["take"].values()]))
        rest.difference_update(source["take"].values())
    taken.append(("a fresh initialization", [name for name in names if name in rest]))
    for path, some in taken:
        which = f": {', '.join(some)}" if len(some) < len(names) else ""
        if some:
            log(f"{len(some)} of {len(names)} parameters from {path}{which}")


def load_parameters(sources, like):
    """Return {name: array} of all that is taken from each source. like: {name: shape with
    sharding}.
    """
    loaded = {}
    for source in sources:
        arrays = source["read"]({saved: like[name] for saved, name in source["take"].items()})
        for saved, x in arrays.items():
            loaded[source["take"][saved]] = x
    return loaded


def restore_run(out_dir, root, like, excluded, first, log=print):
    """Return (step, tree) of the newest intact checkpoint of the run in out_dir, in the shapes and
    shardings of `like`. Parameters in `excluded`, and their moments, come from the tree `first`.
    """
    wanted, treedef = flatten(like)
    saved = {path: x for path, x in wanted.items() if path.split("/")[-1] not in excluded}
    try:
        step, own = restore_newest(root, saved, log)
    except (KeyError, TypeError) as e:
        raise ValueError(f"{e.args[0]}: start from --config {out_dir}/config.json") from None
    whole = flatten(first)[0] | own
    return step, jax.tree.unflatten(treedef, [whole[path] for path in wanted])


def load_saved(out_dir, root, meta, sources, texts, like, log=print):
    """Return (step, parameters) of the newest checkpoint of the run in out_dir; those that it
    excludes come from the sources. Without a checkpoint: step 0, and all parameters from the
    sources.

    meta: of that checkpoint, or {}. sources: of `open_sources`, from these texts.
    """
    others = load_parameters(sources, like)
    if meta:
        step, saved = restore_run(
            out_dir, root, {"params": like}, others, {"params": others}, log)
        return step, saved["params"]
    _raise_if_errors([f"{name} is in none of them" for name in like if name not in others],
                     f"init_from {' '.join(texts)}")
    return 0, others


def _raise_if_errors(errors, where):
    """Raise one ValueError of all errors, if there are any."""
    if errors:
        first = "\n  " if len(errors) > 1 else ""
        raise ValueError(f"{where}: {first}" + "\n  ".join(errors))


def parse_source(text):
    """{"path", "load", "exclude", "rename", "strict", "dynamic"} of a text like
    'DIR load=embed,layers.* exclude=*norm rename=old.:new. strict=no dynamic=yes'.

    load and exclude: patterns of names here; rename: beginnings of names, there:here; dynamic:
    loaded again while a run goes on. Raises ValueError for an option that there is not.
    """
    path, *words = re.split(r"\s+(?=\w+=)", os.path.expanduser(text.strip()))
    default = {"load": "*", "exclude": "", "rename": "", "strict": "yes", "dynamic": "no"}
    source = default | dict(word.split("=", 1) for word in words)
    lists = {name: [*filter(None, source[name].split(","))] for name in default}
    answers = {source["strict"], source["dynamic"]}
    if (source.keys() != default.keys() or not answers <= {"yes", "no"} or not lists["load"]
            or re.match(r"\w+=|$", path) or not all(":" in pair for pair in lists["rename"])):
        raise ValueError(f"init_from {text!r}: must be DIR, or within one pair of quotes 'DIR "
                         "load=PATTERNS exclude=PATTERNS rename=THERE:HERE strict=yes|no "
                         "dynamic=yes|no', each of them if wanted")
    return {"path": path, "load": lists["load"], "exclude": lists["exclude"],
            "rename": dict(pair.split(":", 1) for pair in lists["rename"]),
            "strict": source["strict"] == "yes", "dynamic": source["dynamic"] == "yes"}


def _matching(names, patterns):
    return {name for pattern in patterns for name in fnmatch.filter(names, pattern)}


def choose_sources(sources, shapes):
    """{name here: (index of the source, name there)}; of several sources the last wins.

    sources: of parse_source, with "names": {name there: shape}, or shape None where it is as here,
    and perhaps "faults", to be raised with those found here.
    shapes: {name here: shape}. Raises ValueError that lists all faults: a pattern that matches
    nothing; of a strict source also names that are not here, and other shapes. From others those
    are left out.
    """
    def here(name, rename):
        old = next((old for old in rename if name.startswith(old)), "")
        return rename.get(old, "") + name[len(old):]

    chosen, faults = {}, []
    for i, source in enumerate(sources):
        names = {here(there, source["rename"]): there for there in source["names"]}
        taken = _matching(names, source["load"]) - _matching(names, source["exclude"])
        wrong = [*source.get("faults", ())]
        wrong += [f"{pattern!r} matches nothing there" for pattern in
                  source["load"] + source["exclude"] if not _matching(names, [pattern])]
        for name, there in names.items():
            shape, wanted = source["names"][there], shapes.get(name)
            if name not in taken:
                continue
            if wanted is not None and (shape is None or tuple(shape) == tuple(wanted)):
                chosen[name] = i, there
            elif source["strict"]:
                wrong.append(f"{name} there is no parameter of this model" if wanted is None else
                             f"{name} is {tuple(shape)} there, {tuple(wanted)} here")
        faults += [f"{source['path']}: {fault}" for fault in wrong]
    if faults:
        raise ValueError("init_from does not fit (for a run's own shape: --config DIR/config.json; "
                         "to take only what fits: strict=no)\n  " + "\n  ".join(faults))
    return chosen


# ---- verify

VERIFY_BYTES = 2**30  # largest file that verify reads
MOST_FAULTS = 100  # of an array that verify looks for


def verify(root, tell=print):
    """Read every chunk of every checkpoint in root and in root/weights, where a run keeps those of
    its parameters alone; return the faults in words, at most MOST_FAULTS of each array. `tell` gets
    a line for each checkpoint. Memory is bounded, whatever the folder claims.
    """
    there = [(each, step) for each in (root, join_path(root, "weights")) for step in steps(each)]
    faults = []
    for each, step in there:
        found = []
        try:
            meta = read_meta(each, step)
            for name in [name for name, layout in meta["arrays"].items() if "file" in layout]:
                found += islice(_faults_in(each, meta, name), MOST_FAULTS)
        except ValueError as e:
            found.append(str(e))
        tell(f"{join_path(each, _name(step))}: {len(found) or 'no'} faults")
        faults += found
    return faults if there else [f"{root} holds no checkpoint; name their folder, as out/ckpt"]


def _faults_in(root, meta, name):
    """Yield the faults of a stored array, which is read file by file."""
    layout, path = meta["arrays"][name], join_path(root, _name(meta["step"]), name)
    file_bytes = prod(layout["file"]) * np.dtype(layout["dtype"]).itemsize
    try:
        if file_bytes > VERIFY_BYTES:
            raise ValueError(f"not read, its files of {file_bytes:,} bytes are too large")
        array = ts.open(_zarr_spec(root, meta, name), open=True, read=True).result()
    except ValueError as e:
        yield f"{path}: {_message(e)}"
        return
    files = _file_slices(layout["shape"], layout["file"])
    n_at_once = min(16, VERIFY_BYTES // file_bytes)
    while reads := [array[part].read() for part in islice(files, n_at_once)]:
        for read in reads:
            try:
                read.result()
            except ValueError as e:
                yield f"{path}: {_message(e)}"


# ---- safetensors

SLICE_BYTES = 2**22  # of a tensor, read at a time by each thread: stays in the processor's cache
HOST_PLATFORMS = ("cpu",)  # whose devices compute in the host's memory
TENSOR_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def import_safetensors():
    try:
        import safetensors.numpy
    except ImportError:
        raise ValueError("safetensors is not installed: pip install 'safetensors>=0.4.5'") from None
    return safetensors


def read_safetensors(folder, wanted, like, unused=()):
    """Return {name: array} in the shapes, dtypes and shardings of `like`, as `restore` does, read
    from the tensors of a folder in Hugging Face's layout.

    wanted: {name: ({index: tensor's name}, transposed)}: array[index], transposed or not, is that
    tensor. unused: patterns of tensors that need not be wanted. Each process reads only what its
    devices hold; beyond the result it needs memory for some slices of SLICE_BYTES, and on devices
    with memory of their own for the parts of one layer.

    Raises ValueError that lists all tensors that are missing, unknown or of another shape.
    """
    tensors, shapes, faults = _open_tensors(Path(folder)), {}, []
    for name, (pieces, transposed) in wanted.items():
        shape = list(like[name].shape[len(next(iter(pieces))):])
        shapes |= dict.fromkeys(pieces.values(), shape[::-1] if transposed else shape)
    for tensor, shape in shapes.items():
        if tensor not in tensors:
            faults.append(f"{tensor} is missing")
        elif tensors[tensor].get_shape() != shape:
            faults.append(f"{tensor} is {tensors[tensor].get_shape()} there, {shape} here")
        elif (kind := tensors[tensor].get_dtype()) not in TENSOR_DTYPES:
            faults.append(f"{tensor} is of dtype {kind}, not a float of 16 bits or more")
    faults += [f"{tensor} has no place in this model" for tensor in sorted(
        tensors.keys() - shapes - _matching(tensors, unused))]
    if faults:
        raise ValueError("\n  ".join([f"{folder}:", *faults]))
    return {name: _place_tensors(like[name], tensors, *wanted[name]) for name in wanted}


def _open_tensors(folder):
    """{name: slice of safetensors} of all files of a folder, their headers checked."""
    safetensors, tensors, whole = import_safetensors(), {}, folder / "model.safetensors"
    paths = [whole] if whole.exists() else sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise ValueError(f"{folder}: holds no model.safetensors; convert its pytorch_model.bin")
    for path in paths:
        try:
            file = safetensors.safe_open(path, framework="np")
            more = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, safetensors.SafetensorError) as e:
            raise ValueError(f"{path}: cannot be read: {e}") from None
        if twice := sorted(tensors.keys() & more):
            raise ValueError(f"{path}: holds {', '.join(twice)}, which another file there holds")
        tensors |= more
    return tensors


def _place_tensors(like, tensors, pieces, transposed):
    """Return the array that `pieces` of `tensors` make up, placed as `like`."""
    shape, sharding = like.shape, getattr(like, "sharding", None)
    if (sharding is None or () in pieces or sharding.shard_shape(shape)[0] < shape[0]
            or next(iter(sharding.addressable_devices)).platform in HOST_PLATFORMS):
        read = partial(_read_block, {}, like.dtype, tensors, pieces, transposed)
        return _assemble(shape, sharding, read)
    # Layer by layer, in the same host memory, and as stored: the device converts.
    stored = {TENSOR_DTYPES[tensors[tensor].get_dtype()] for tensor in pieces.values()}
    stack, memory = jax.numpy.zeros(shape, like.dtype, device=sharding), {}
    for i in range(shape[0]):
        layer = {(0, *index[1:]): tensor for index, tensor in pieces.items() if index[0] == i}
        read = partial(
            _read_block, memory, jax.numpy.result_type(*stored), tensors, layer, transposed)
        part = _assemble((1, *shape[1:]), sharding, read)
        stack = _put_layer(stack, part, i).block_until_ready()
    return stack


@partial(jax.jit, donate_argnums=0)
def _put_layer(stack, part, layer):
    return jax.lax.dynamic_update_index_in_dim(stack, part.astype(stack.dtype), layer, 0)


def _read_block(memory, dtype, tensors, pieces, transposed, *ranges):
    """Read a part of an array, slice by slice and by several cores. memory: {ranges: array} of
    parts whose memory is to be used again.
    """
    lengths, n_stacked = [len(r) for r in ranges], len(next(iter(pieces)))
    block = memory.setdefault(ranges, _aligned(lengths, dtype))
    rows, *others = ranges[n_stacked:][:: -1 if transposed else 1]
    n_rows = max(SLICE_BYTES // (4 * prod(map(len, others))), 1)

    def read(job):
        at, first = job
        tensor = tensors[pieces[tuple(r[i] for r, i in zip(ranges, at))]]
        target = block[at].T if transposed else block[at]
        target[first : first + n_rows] = tensor[tuple(
            slice(r.start, r.stop) for r in (rows[first : first + n_rows], *others))]

    with ThreadPoolExecutor(min(os.cpu_count(), 8)) as pool:
        list(pool.map(read, product(np.ndindex(*lengths[:n_stacked]),
                                    range(0, len(rows), n_rows))))
    return block


def each_tensor(arrays, pieces, dtype):
    """Yield (tensor's name, NumPy array in dtype), one at a time: `wanted` of read_safetensors the
    other way round. Every process must take all of them.
    """
    take = partial(take_tensor, dtype=dtype)
    for name, (tensors, transposed) in pieces.items():
        mesh = getattr(getattr(arrays[name], "sharding", None), "mesh", None)
        whole = mesh and jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        take_whole = jax.jit(take, static_argnums=2, out_shardings=whole)
        for index, tensor in tensors.items():
            yield tensor, np.asarray(take_whole(arrays[name], index, transposed))


def take_tensor(x, index, transposed, dtype):
    """The tensor of each_tensor that is x[index]."""
    for i in index:
        x = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    return (x.T if transposed else x).astype(dtype)


def write_safetensors(folder, tensors, stem="model", shard_bytes=2**31):
    """Write an iterator of (name, array) into a folder as Hugging Face does: stem.safetensors, or
    several files of at most shard_bytes and an index. One file at a time is in memory. Every
    process must call it, process 0 writes.
    """
    safetensors, folder, sizes = import_safetensors(), Path(folder), []
    for i, shard in enumerate(_shards(tensors, shard_bytes)):
        sizes.append({name: x.nbytes for name, x in shard.items()})
        if jax.process_index() == 0:
            try:
                safetensors.numpy.save_file(shard, folder / f"{stem}.{i}", {"format": "pt"})
            except safetensors.SafetensorError as e:
                raise OSError(str(e)) from None
    if jax.process_index():
        return
    index = {"metadata": {"total_size": sum(sum(x.values()) for x in sizes)}, "weight_map": {}}
    for i, shard in enumerate(sizes):
        name = f"{stem}-{i + 1:05d}-of-{len(sizes):05d}" if len(sizes) > 1 else stem
        os.rename(folder / f"{stem}.{i}", folder / f"{name}.safetensors")
        index["weight_map"] |= dict.fromkeys(shard, f"{name}.safetensors")
    if len(sizes) > 1:
        text = json.dumps(index, indent=1, sort_keys=True)
        (folder / f"{stem}.safetensors.index.json").write_text(text)
    for path in (*folder.glob(f"{stem}*"), folder):
        _sync(path)


def read_hf_config(folder):
    """Return the config.json of a folder of Hugging Face weights, or {}."""
    if not _is_local(folder):
        return {}
    found = read_json(Path(folder, "config.json"))
    return found if "model_type" in found else {}


EXPORT_MARK = "sixfile.json"  # file in an export that says which run wrote it


def check_export(folder, run):
    """Raise ValueError when a folder has files and no export of this run wrote them.

    run: a dict that tells the run from others.
    """
    out = Path(folder)
    is_used = out.is_file() or any(out.glob("*"))
    if is_used and run != read_json(out / EXPORT_MARK):
        raise ValueError(f"export {folder}: exists, and no export of this run wrote it; choose "
                         "another")


def write_export(folder, run, tensors, stem, add_files):
    """Write a folder as `write_safetensors` does, beside its place, then rename it; a folder that
    is there is replaced. Every process must call it.

    run: of `check_export`. tensors: an iterator of (name, array). add_files: function of the new
    folder that writes the other files; process 0 calls it. Raises ValueError in every process when
    the disk refuses.
    """
    is_main, errors = jax.process_index() == 0, []
    out = Path(folder)
    new = Path(f"{out}.partial")
    try:
        if is_main:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            (new / EXPORT_MARK).write_text(json.dumps(run))
            add_files(new)
        write_safetensors(new, tensors, stem)
        if is_main:
            shutil.rmtree(out, ignore_errors=True)
            new.rename(out)
    except OSError as e:
        for _ in tensors:  # the other processes wait for this one at each tensor
            pass
        errors.append(str(e))
        shutil.rmtree(new, ignore_errors=True)
    broadcast_from_main(lambda: _raise_if_errors(errors, f"export {folder}: could not be written"))


def _shards(tensors, shard_bytes):
    """Group (name, array) into dicts of at most shard_bytes, each emptied when the next begins."""
    shard = {}
    for name, x in tensors:
        if shard and sum(y.nbytes for y in shard.values()) + x.nbytes > shard_bytes:
            yield shard
            shard.clear()
        shard[name] = np.ascontiguousarray(x)
    yield shard


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "verify":
        sys.exit("usage: python ckpt.py verify DIR, a folder of checkpoints, as out/ckpt")
    try:
        sys.exit("\n".join(verify(sys.argv[2])) or None)
    except ValueError as e:
        sys.exit(f"error: {e}")
