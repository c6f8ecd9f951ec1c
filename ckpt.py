# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints of any pytree of arrays, written in the background by TensorStore.

Commit: (1) each process writes its shards to root/000000100/<id>/ and syncs them; (2) process 0
waits for all; (3) it writes root/000000100/meta.json, which names <id>: one atomic write, also in
an object store. Without meta.json there is no checkpoint. Process 0 chooses the one to restore.

    ckpt.wait(ckpt.save("runs", 7, tree)); tree = ckpt.restore("runs", 7, like=tree)
"""
import contextlib
import fcntl
import itertools
import json
import mmap
import os
import re
import shutil
import socket
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from math import prod
from pathlib import Path

# Seconds until a bucket's server that does not answer is an error.
os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", "20")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "20")

import jax
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils

FORMAT = 3  # raised where an older checkpoint cannot be read any more
IN_FLIGHT = max(8, 2 * os.cpu_count())  # files written, or arrays read, at a time


# ---- save

def flatten(tree):
    """({path of keys, joined by "/": array}, treedef). Raises ValueError for other leaves."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    arrays = {}
    for path, x in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in arrays:
            raise ValueError(f"{name!r}: two arrays have this name; rename a key")
        if {".", ".."} & {*name.split("/")}:
            raise ValueError(f"{name!r}: . and .. cannot be keys; rename them")
        if not hasattr(x, "dtype"):
            x = np.asarray(x)
        if not (jax.numpy.issubdtype(x.dtype, np.number) or x.dtype == bool):
            raise ValueError(f"{name!r}: arrays of {x.dtype} cannot be saved, only of numbers; of "
                             "a random key save jax.random.key_data")
        arrays[name] = x
    return arrays, treedef


def save(root, step, tree, meta=None, max_to_keep=0, keep_period=0, log=print, passing=False):
    """Start to write `tree` as checkpoint `step`; return a Future of its path, see `wait`.

    Returns when the arrays may be overwritten or donated; a thread does the rest. Every process
    must call it, on a shared root. A checkpoint of the same step is replaced; then older ones are
    deleted, see `delete_old`.

    root: a folder, gs://bucket/path or s3://bucket/path, perhaps with ?endpoint=http://host:port.
    meta: further entries of meta.json. log: gets a message for each file that cannot be deleted.
    passing: whether it is deleted as soon as there is a newer one.

    Raises TypeError for an entry that is reserved or not of JSON, ValueError for a tree or step
    that cannot be saved. The Future raises all other errors.
    """
    path = step_path(root, step)
    arrays, _ = flatten(tree)
    layouts, shards = _copy_shards(arrays)

    # A random folder for the arrays: a checkpoint of the same step stays intact until the commit.
    save_id = broadcast_from_main(lambda: f"save-{os.urandom(4).hex()}")
    meta = dict(step=int(step), folder=save_id, arrays=layouts, **(meta or {}))
    # As a reader will get it: JSON has text keys and no NumPy numbers.
    meta = json.loads(json.dumps(meta, default=_as_json))

    thread = ThreadPoolExecutor(1, "ckpt")
    retention = (max_to_keep, keep_period)
    return thread.submit(_write, root, meta, shards, path, retention, log, passing)


def _write(root, meta, shards, path, retention, log, passing):
    """Write the shards of this process and commit; return `path`."""
    is_main = jax.process_index() == 0
    try:
        store = _begin_save(root, meta, shards)  # of files in the checkpoint's folder
        # (1) Write the shards of this process.
        sums = _write_shards(root, meta, shards)
        shards.clear()  # free the copies: another save may begin when this Future is resolved
        # (2) Process 0 waits until all have written. (3) It commits. The others wait for that.
        _gather_sums(store, meta, sums)
        if is_main:
            _commit(root, store, meta, passing)
    except (ValueError, OSError) as e:  # TensorStore raises ValueErrors
        error = _abort(root, meta, e, log)
        raise ValueError(
            f"{path} could not be written, older checkpoints are intact: {error}") from e

    # The checkpoint exists: a failure from here on is logged.
    if is_main:
        _delete_replaced(root, meta, retention, log)
    return path


def _commit(root, store, meta, passing):
    """Make the written arrays a checkpoint, by one atomic write of meta.json."""
    if passing:
        store.write(meta["folder"] + PASSING, b"").result()
    _sync_folders(root, meta)
    content = {"format": FORMAT, "crc32": _checksum(meta), "body": meta}
    store.write("meta.json", json.dumps(content, indent=1).encode()).result()


def wait(future):
    """Block until a save is committed; return its path. None: return None at once."""
    return future and future.result()


# ---- restore

def read_meta(root, step):
    """The meta given to `save`, with "step", "folder" and "arrays". Raises ValueError for a file
    that is missing, corrupted, or of another version.
    """
    path = join_path(step_path(root, step), "meta.json")
    with _explain(f"{path}: missing or corrupted", KeyError, TypeError, RecursionError):
        text = _read(_open(root, _step_name(step)), "meta.json")
        if not text:
            raise ValueError("no such file; a run has its checkpoints in OUT_DIR/ckpt")
        content = json.loads(text)
        meta = content["body"]
        if _checksum(meta) != content["crc32"]:
            raise ValueError("its checksum does not match")
        if meta["step"] != step:
            raise ValueError(f"it is of step {meta['step']}")
        if content.get("format") != FORMAT or not re.fullmatch("save-[0-9a-f]{8}", meta["folder"]):
            raise ValueError("another version of Sixfile wrote it")
    return meta


def restore_newest(root, like, log=print):
    """(step, tree) of the newest checkpoint that every process can read; see `restore`. A run
    resumes with this. `log` gets a message for each corrupted checkpoint.

    Process 0 lists the checkpoints. Raises ValueError when no checkpoint can be read, KeyError and
    TypeError as `restore` does.
    """
    saved_steps = broadcast_from_main(lambda: steps(root))
    for step in reversed(saved_steps):
        error = ""
        try:
            meta = broadcast_from_main(partial(read_meta, root, step))
            tree = restore(root, step, like, meta)
        except ValueError as e:
            error = str(e)
        if jax.process_count() > 1:
            any_error = multihost_utils.process_allgather(bool(error)).any()
            if any_error and not error:
                error = f"another process could not read checkpoint {step}"
        if not error:
            return step, tree
        log(f"skipping a corrupted checkpoint: {error}")
    raise ValueError(f"{root}: no checkpoint can be read")


def restore(root, step, like=None, meta=None):
    """The saved tree in the shapes, dtypes and shardings of `like`.

    like: a tree of arrays or ShapeDtypeStructs; those without a sharding become NumPy arrays. None:
    all as NumPy arrays in nested dicts; a list has keys "0", "1", .... meta: of `read_meta`. Each
    process reads only what its devices hold.

    Raises KeyError or TypeError for arrays that the checkpoint lacks or has in another shape,
    ValueError for an array that is corrupted or missing.
    """
    meta = meta or read_meta(root, step)
    if like is None:
        like = saved_shapes(meta)
    wanted, treedef = flatten(like)
    _check_fit(wanted, meta["arrays"], step_path(root, step))
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        leaves = pool.map(partial(_load, root, meta), wanted, wanted.values())
        return jax.tree.unflatten(treedef, leaves)


# ---- supporting
# Sections: layout of arrays, copies of arrays, parts of a save, parts of a restore, values from
# process 0, errors, paths, list of checkpoints, TensorStore, buckets, several processes, retention
# and clean-up, run folder, parameters of a run, files.

# ---- layout of arrays

FILE_BYTES = 2**24  # largest file of an array; many in flight keep all cores and the disk busy
CHUNK_BYTES = 2**20  # largest part of a file that has its own checksum and can be read alone
SMALL_BYTES = 2**14  # largest array that is stored in meta.json; a file for each costs time


def _plan_layout(x):
    """How an array is stored, equal on every process: a small one with its "data" in meta.json, a
    larger one in files of shape "file", which consist of chunks of shape "chunk".
    """
    layout = {"shape": list(x.shape), "dtype": str(x.dtype)}
    is_split = isinstance(x, jax.Array) and not x.is_fully_replicated
    if x.nbytes <= SMALL_BYTES and not is_split:
        return layout | {"data": np.asarray(x).tobytes().hex()}
    # A file lies within one shard, so that one process writes it.
    shard_shape = x.shape
    if isinstance(x, jax.Array):
        shard_shape = x.sharding.shard_shape(x.shape)
    file = _chunk_shape(shard_shape, FILE_BYTES // x.dtype.itemsize)
    chunk = _chunk_shape(file, CHUNK_BYTES // x.dtype.itemsize)
    return layout | {"file": file, "chunk": chunk}


def _chunk_shape(shape, n_elements):
    """Halve the longest even dim until at most n_elements are left; a dim of 0 becomes 1."""
    part = [max(size, 1) for size in shape]
    while prod(part) > n_elements:
        even_dims = [dim for dim, size in enumerate(part) if size % 2 == 0]
        if not even_dims:
            break
        longest = max(even_dims, key=lambda dim: part[dim])
        part[longest] //= 2
    return part


def _file_slices(shape, file):
    """The part of an array in each of its files: tuples of slices."""
    slices = []
    for size, n in zip(shape, file):
        slices.append([slice(start, min(start + n, size)) for start in range(0, size, n)])
    return itertools.product(*slices)


# ---- copies of arrays

def _copy_shards(arrays):
    """({name: layout}, copies of the data that this process writes: dicts of "name", "index" and
    "data").
    """
    # Start all copies to the host, then collect them. Arrays in host memory are copied later:
    # copy_to_host_async would keep a reference to them, which prevents their donation.
    for x in arrays.values():
        if isinstance(x, jax.Array) and not _in_host_memory(x):
            x.copy_to_host_async()
    layouts = {name: _plan_layout(x) for name, x in arrays.items()}
    shards = []
    for name, x in arrays.items():
        if "data" in layouts[name]:
            continue
        if isinstance(x, jax.Array):
            # Several devices may have copies of a shard: the first one is written.
            for shard in x.addressable_shards:
                if shard.replica_id == 0:
                    data = _snapshot(shard.data)
                    shards.append({"name": name, "index": shard.index, "data": data})
        elif jax.process_index() == 0:
            shards.append({"name": name, "index": (), "data": _snapshot(x)})
    return layouts, shards


def _snapshot(x):
    """Copy an array; x may then be overwritten or donated."""
    if not isinstance(x, jax.Array):
        return np.array(x)
    if _in_host_memory(x):
        # NumPy would return a view. JAX copies, in the background.
        return jax.device_put(x, x.sharding, may_alias=False)
    return np.asarray(x)


def _in_host_memory(x):
    platform = next(iter(x.devices())).platform
    return platform == "cpu" or x.sharding.memory_kind != "device"


# ---- parts of a save

def _as_json(x):
    if hasattr(x, "tolist"):  # NumPy, JAX
        return x.tolist()
    raise TypeError(f"meta: {x!r:.60} is of type {type(x).__name__}, which JSON lacks; use "
                    "numbers, texts, lists and dicts")


def _begin_save(root, meta, shards):
    """TensorStore's key-value store of the checkpoint's folder: keys are file names. Raises OSError
    when the disk has no space for the shards.
    """
    if _is_local(root):
        Path(root).mkdir(parents=True, exist_ok=True)
        n_bytes = sum(shard["data"].nbytes for shard in shards)
        free = shutil.disk_usage(root).free
        if free < n_bytes:
            raise OSError(f"No space left: {n_bytes / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB "
                          "are free: delete something, or keep fewer checkpoints")
    store = _open(root, _step_name(meta["step"]))
    # Fails for a bucket that does not exist, where TensorStore would try forever.
    store.write(_rank_file(meta), BEGUN).result()
    return store


def _write_shards(root, meta, shards):
    """Create the arrays of shards in the format zarr 3, and write these, IN_FLIGHT files at a time.
    Return [name, cell, sum] of each chunk. No write continues after the return or an error.
    """
    arrays = {}
    sums = []
    pending = []  # Futures of all writes
    try:
        for shard in shards:
            name = shard["name"]
            if name not in arrays:
                arrays[name] = ts.open(_zarr_spec(root, meta, name), create=True, open=True)
                pending.append(arrays[name])
        for shard in shards:
            name = shard["name"]
            data = np.asarray(shard["data"])
            target = arrays[name].result()[shard["index"]]
            chunk = meta["arrays"][name]["chunk"]
            for part in _file_slices(data.shape, chunk):
                cell = [(first + x.start) // n for first, x, n in zip(target.origin, part, chunk)]
                sums.append([name, cell, _sum_of_bits(data[part])])
            target = target.translate_to[0]  # index from 0 again, as in data
            # One write per file: a single write of several files returns at its first error while
            # the others continue.
            for part in _file_slices(data.shape, meta["arrays"][name]["file"]):
                # Each pending write holds its file in memory: all at once take more (LOG.md).
                if len(pending) > IN_FLIGHT:
                    pending[-IN_FLIGHT].result()
                pending.append(
                    target[part].write(data[part], can_reference_source_data_indefinitely=True))
        for write in pending:
            write.result()
    finally:
        # A file that is written after its folder was deleted would stay forever.
        for write in pending:
            write.exception()
    return sums


def _sum_of_bits(x):
    """The sum of the 32-bit numbers in a chunk, modulo a prime, so that constants differ.

    The crc32c in a file detects changed bytes. This sum, in meta.json, detects an intact chunk of
    another array, place or step.
    """
    content = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    n = len(content) // 4 * 4
    total = content[:n].view(np.uint32).sum(dtype=np.uint64)
    return (int(total) + int.from_bytes(content[n:].tobytes(), "little")) % (2**32 - 5)


def _add_sums(meta, sums):
    """Add the sums of all chunks to meta, for each array as hexadecimal digits."""
    grids = {}
    for name, cell, chunk_sum in sums:
        layout = meta["arrays"][name]
        if name not in grids:
            grids[name] = np.zeros(_grid(layout), np.uint32)
        grids[name][tuple(cell)] = chunk_sum
    for name, grid in grids.items():
        meta["arrays"][name]["sums"] = grid.tobytes().hex()


def _grid(layout):
    """The number of chunks along each dim of an array."""
    return [-(-size // n) for size, n in zip(layout["shape"], layout["chunk"])]


def _checksum(meta):
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _sync_folders(root, meta):
    """Sync the folders of the arrays, the root and its two parents, in case the run created them.
    TensorStore has synced each file and its folder.
    """
    if _is_local(root):
        path = Path(root, _step_name(meta["step"])).resolve()
        folders = [folder for folder, _, _ in os.walk(path)]
        for folder in [*folders, *path.parents[:3]]:
            _sync(folder)


def _sync(path):
    with contextlib.suppress(PermissionError):  # a folder above may belong to another user
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _abort(root, meta, error, log):
    """Delete what a failed save has written, and end the wait of the other processes. Return the
    text of the error.
    """
    save_id = meta["folder"]
    step_name = _step_name(meta["step"])
    with contextlib.suppress(ValueError, OSError):
        store = _open(root, step_name, max_retries=0)  # its server may be gone
        if jax.process_index() == 0 and not _is_committed(store, save_id):
            _delete(root, log, f"{step_name}/{save_id}", f"{step_name}/{save_id}.0")
        if jax.process_count() > 1:
            text = f"process {jax.process_index()}: {_message(error)}"
            store.write(f"{save_id}.failed", text.encode()).result()
    return _message(error)


def _is_committed(store, save_id):
    return save_id.encode() in _read(store, "meta.json")


# ---- parts of a restore

def saved_shapes(meta):
    """The tree of a checkpoint as nested dicts of ShapeDtypeStructs, from its meta."""
    tree = {}
    for name, layout in meta["arrays"].items():
        *folders, last = name.split("/")
        node = tree
        for key in folders:
            node = node.setdefault(key, {})
        node[last] = jax.ShapeDtypeStruct(layout["shape"], np.dtype(layout["dtype"]))
    return tree.get("", tree)  # the tree itself may be one array, without a name


def _load(root, meta, name, like):
    """Read the parts of an array that this process needs."""
    layout = meta["arrays"][name]
    path = step_path(root, meta["step"])
    with _explain(f"checkpoint {path}: array {name} is corrupted"):
        if "data" in layout:
            data = bytearray.fromhex(layout["data"])
            stored = np.ndarray(layout["shape"], layout["dtype"], data)
        else:
            stored = ts.open(_zarr_spec(root, meta, name), open=True, read=True).result()
        # Read each part that the sharding gives to this process, once, and put the parts together.
        read = partial(_read_part, stored, layout, like.dtype)
        return _assemble(layout["shape"], getattr(like, "sharding", None), read)


def _check_fit(wanted, layouts, path):
    """Raise KeyError or TypeError when a checkpoint lacks wanted arrays or has other shapes."""
    missing = [name for name in wanted if name not in layouts]
    if missing:
        raise KeyError(f"checkpoint {path} has no {', '.join(missing)}")
    errors = []
    for name, x in wanted.items():
        shape, dtype = layouts[name]["shape"], layouts[name]["dtype"]
        was_float = jax.numpy.issubdtype(dtype, np.inexact)
        is_float = jax.numpy.issubdtype(x.dtype, np.inexact)
        # An integer may become a float. A float would lose its fraction.
        if shape != list(x.shape) or (was_float and not is_float):
            errors.append(f"{name} is {dtype}{shape} in the checkpoint, {x.dtype}{list(x.shape)} "
                          "in this model")
    if errors:
        raise TypeError(f"checkpoint {path} has other shapes or dtypes, in {len(errors)} arrays: "
                        f"{'; '.join(errors[:3])}")


def _read_part(stored, layout, dtype, *ranges):
    """Read a range of each dim of a TensorStore or NumPy array, and convert it to dtype."""
    if not isinstance(stored, ts.TensorStore):
        return np.asarray(stored[tuple(slice(r.start, r.stop) for r in ranges)], dtype)
    # Read whole chunks, as TensorStore does anyway, for their sums.
    chunk = layout["chunk"]
    firsts = [r.start // n * n for r, n in zip(ranges, chunk)]
    lasts = [min(-(-r.stop // n) * n, size) for r, n, size in zip(ranges, chunk, stored.shape)]
    part = stored[tuple(map(slice, firsts, lasts))]
    memory = _new_array(part.shape, part.dtype.numpy_dtype)
    ts.array(memory).write(part).result()
    if "sums" in layout:  # earlier versions wrote none
        sums = np.frombuffer(bytes.fromhex(layout["sums"]), np.uint32).reshape(_grid(layout))
        for slices in _file_slices(memory.shape, chunk):
            cell = tuple((first + x.start) // n for first, x, n in zip(firsts, slices, chunk))
            if _sum_of_bits(memory[slices]) != sums[cell]:
                raise ValueError(f"chunk {cell} is of another array, place or step; copy the whole "
                                 "folder of the checkpoint again, if it is a copy")
    inner = tuple(slice(r.start - first, r.stop - first) for r, first in zip(ranges, firsts))
    return np.asarray(memory[inner], dtype)


def _assemble(shape, sharding, read):
    """Build an array from its parts: read(range of each dim, ...) is called once for each part that
    this process needs. Without a sharding it is a NumPy array.
    """
    if sharding is None:
        return read(*map(range, shape))
    read_once = cache(read)  # several devices may hold the same part

    def read_shard(index):
        ranges = [range(n)[part] for n, part in zip(shape, index)]  # unlike slices, hashable
        return read_once(*ranges)

    return jax.make_array_from_callback(tuple(shape), sharding, read_shard)


def _new_array(shape, dtype):
    """A NumPy array in memory that begins at a page, which JAX uses without a copy on a CPU.

    Not np.empty, which asks the system for huge pages: where memory is fragmented, making room for
    them doubled the time of a restore. Nor a bytearray, which one thread sets to zeros.
    """
    n_bytes = max(prod(shape) * np.dtype(dtype).itemsize, 1)  # no mapping is empty
    try:
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:  # restore would call the file corrupted
        raise MemoryError(f"no memory for an array of {n_bytes:,} bytes: {e.strerror}; free some, "
                          "or raise ulimit -v") from None
    return np.ndarray(shape, dtype, memory)


# ---- values from process 0

def gather(value):
    """The list of `value` of all processes, process 0 first. JSON must be able to keep it."""
    text = json.dumps(value).encode()
    size = multihost_utils.process_allgather(np.array(len(text))).max()
    texts = multihost_utils.process_allgather(np.frombuffer(text.ljust(size), np.uint8))
    return [json.loads(bytes(x)) for x in texts.reshape(-1, size)]


def broadcast_from_main(decide):
    """The result of decide() on process 0, passed as JSON to every process. A ValueError of
    decide() is raised in every process.
    """
    if jax.process_count() == 1:
        return decide()
    value = error = None
    if jax.process_index() == 0:
        try:
            value = decide()
        except ValueError as e:
            error = str(e)
    value, error = gather([value, error])[0]
    if error is not None:
        raise ValueError(error)
    return value


# ---- errors

@contextlib.contextmanager
def _explain(text, *more_kinds):
    """Raise errors of files and of TensorStore as ValueErrors that begin with a text."""
    try:
        yield
    except (OSError, ValueError, *more_kinds) as e:
        raise ValueError(f"{text}: {_message(e)}") from None


def _message(error):
    """TensorStore's error message without the spec and source locations at its end."""
    return re.split(r"\s*\[(?:tensorstore_spec|source locations|http_)", str(error))[0]


# ---- paths

def join_path(root, *names):
    """The path of a folder or file in a root. The endpoint of a bucket's server stays last."""
    path, mark, endpoint = str(root).partition("?endpoint=")
    return "/".join([path.rstrip("/"), *names]) + mark + endpoint


def step_path(root, step):
    """The path of a checkpoint."""
    return join_path(root, _step_name(step))


def _is_local(root):
    return "://" not in str(root)


def _step_name(step):
    """The name of a step's folder."""
    if not isinstance(step, (int, np.integer)) or step < 0:
        raise ValueError(f"step {step!r}: must be a whole number, at least 0")
    return f"{step:09d}"


# ---- list of checkpoints

def steps(root):
    """The steps of the complete checkpoints, ascending."""
    return sorted(step for step, names in _step_folders(root).items() if "meta.json" in names)


def latest(root):
    """The step of the newest complete checkpoint, or None."""
    return max(steps(root), default=None)


def newest_meta(root, needed_for=""):
    """The meta of the newest checkpoint whose meta.json is intact; {} without a checkpoint. Process
    0 reads it for all. The arrays are not read: if they are corrupted, `restore_newest` later
    returns an older checkpoint.

    needed_for: the purpose that needs a checkpoint; "" if the run can do without. Raises ValueError
    when a needed checkpoint is missing, or when no meta.json can be read.
    """
    def find():
        error = None
        for step in reversed(steps(root)):  # of the complete checkpoints, ascending
            try:
                return read_meta(root, step)
            except ValueError as e:
                error = e
        if error:
            raise ValueError(f"{root}: no checkpoint can be read: {error}")
        return {}

    meta = broadcast_from_main(find)
    if needed_for and not meta:
        raise ValueError(f"{needed_for}: {root} holds no checkpoint; name the --out_dir of a run "
                         "that has saved one")
    return meta


# Names that a save writes in a step's folder, perhaps with the end of a lock of TensorStore.
KNOWN_NAMES = re.compile(r"(save-[0-9a-f]{8}(\.(\d+|failed|passing))?|meta\.json)(\.__lock)?")
PASSING = ".passing"  # end of the name of a file that marks a passing checkpoint, see `save`


def _step_folders(root):
    """{step: names in its folder}, without folders of other programs."""
    with _explain(f"{root} cannot be listed"):
        folders = _list_folders(root) if _is_local(root) else _list_bucket(root)
    found = {}
    for folder, names in folders.items():
        # Without meta.json: an unfinished save or deletion, if a save writes all these names.
        is_of_save = "meta.json" in names or all(map(KNOWN_NAMES.fullmatch, names))
        if re.fullmatch("[0-9]{9}|[1-9][0-9]{9,}", folder) and is_of_save:
            found[int(folder)] = names
    return found


def _list_folders(root):
    """{folder: names in it} of a local root."""
    folders = {}
    if os.path.lexists(root):
        for entry in os.scandir(root):
            if entry.is_symlink() and entry.name.isdecimal():
                os.stat(entry.path)  # OSError for a link to a checkpoint that is gone
            if entry.is_dir():
                with contextlib.suppress(FileNotFoundError):  # another process deleted it
                    folders[entry.name] = set(os.listdir(entry.path))
    return folders


# ---- TensorStore

def _open(root, *names, max_retries=4):
    """Open a folder of a root as a TensorStore key-value store."""
    return ts.KvStore.open(_kvstore(root, *names, max_retries=max_retries)).result()


def _read(store, key):
    """The bytes of a key; b"" for a missing key."""
    return store.read(key).result().value


def _kvstore(root, *names, max_retries=4):
    """TensorStore's spec of a folder. max_retries: of a request to a bucket: 15 s in all for 4."""
    if not _is_local(root):
        return _bucket_kvstore(root, *names, max_retries=max_retries)
    path = Path(root, *names).resolve()  # TensorStore refuses ".."
    if "\\" in str(path):  # a file would be written elsewhere
        raise ValueError(f"{path}: TensorStore reads a \\ as a /; choose a path without it")
    return {"driver": "file", "path": f"{path}/", "file_io_sync": True}


def _zarr_spec(root, meta, name):
    """TensorStore's spec of an array. Opening fails if zarr.json differs from this spec."""
    layout = meta["arrays"][name]
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {"chunk_shape": layout["chunk"], "codecs": codecs, "index_codecs": codecs}
    grid = {"name": "regular", "configuration": {"chunk_shape": layout["file"]}}
    return {
        "driver": "zarr3",
        "metadata": {
            "shape": layout["shape"], "data_type": layout["dtype"], "chunk_grid": grid,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}]},
        "kvstore": _kvstore(root, _step_name(meta["step"]), meta["folder"], *name.split("/")),
        # Write chunks of zeros too: a chunk that is missing is an error.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }


# ---- buckets

def _bucket_kvstore(root, *names, max_retries):
    """TensorStore's spec of a folder in a bucket. Raises ValueError for an unknown kind."""
    url, _, endpoint = str(root).partition("?endpoint=")
    kind, _, rest = url.partition("://")
    bucket, *folders = rest.rstrip("/").split("/")
    path = "/".join([*folders, *names, ""])
    if kind not in ("gs", "s3"):
        raise ValueError(f"{root}: must be a folder, gs://bucket/path or s3://bucket/path")
    driver = "gcs" if kind == "gs" else "s3"
    retries = {"max_retries": max_retries, "initial_delay": "1s"}
    spec = {"driver": driver, "bucket": bucket, "path": path, f"{driver}_request_retries": retries}
    if endpoint:
        spec["endpoint"] = endpoint
    return spec


def _list_bucket(root):
    """{folder: names in it} of a root in a bucket."""
    folders = {}
    for key in _open(root).list().result():
        folder, *rest = key.decode(errors="replace").split("/")
        names = folders.setdefault(folder, set())
        if rest and rest[0]:
            names.add(rest[0])
    return folders


def _delete_keys(root, name):
    """Delete a key of a bucket and all keys below it."""
    store = _open(root)
    keys_below = ts.KvStore.KeyRange(f"{name}/", f"{name}0")  # "0" comes after "/"
    store.delete_range(keys_below).result()
    store.write(name, None).result()


# ---- several processes

PEER_TIMEOUT_S = 600  # how long a process that is done writing waits for the others


def check_shared(root):
    """Raise ValueError in every process unless all of them read in a root what process 0 writes."""
    if jax.process_count() == 1:
        return

    def write_mark():
        mark = os.urandom(8).hex()
        _open(root).write(".shared", mark.encode()).result()
        return mark

    mark = broadcast_from_main(write_mark)
    is_read = gather(_read(_open(root), ".shared") == mark.encode())
    if jax.process_index() == 0:
        _delete(root, print, ".shared")
    if not all(is_read):
        raise ValueError(f"process {is_read.index(False)} does not find in {root} what process 0 "
                         "writes there: choose an --out_dir or a --ckpt_dir on a disk or in a "
                         "bucket that all processes share")


BEGUN = b"begun"  # content of the file of a process that has not written its shards


def _rank_file(meta):
    """The name of this process's file in the checkpoint's folder: BEGUN, then its sums."""
    return f"{meta['folder']}.{jax.process_index()}"


def _gather_sums(store, meta, sums):
    """Process 0 waits until all others have written their shards, and adds the sums of all to meta.
    The others wait until it has committed. Raises OSError when a process has failed or takes too
    long.
    """
    if jax.process_count() == 1:
        _add_sums(meta, sums)
        return
    save_id = meta["folder"]
    store.write(_rank_file(meta), json.dumps(sums).encode()).result()
    is_main = jax.process_index() == 0
    # Process 0 is the first to give up, since its error names the process that is unfinished.
    timeout_s = PEER_TIMEOUT_S if is_main else 2 * PEER_TIMEOUT_S
    deadline = time.monotonic() + timeout_s
    unfinished = [*range(1, jax.process_count())] if is_main else [0]
    while True:
        if is_main:
            for rank in [*unfinished]:
                content = _read(store, f"{save_id}.{rank}")
                if content not in (b"", BEGUN):
                    sums += json.loads(content)
                    unfinished.remove(rank)
            if not unfinished:
                _add_sums(meta, sums)
                return
        elif _is_committed(store, save_id):
            return
        error = _read(store, f"{save_id}.failed")
        if error:
            raise OSError(error.decode())
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {unfinished} are not done after {timeout_s} s: have "
                               "they exited, or do they not share this folder?")
        time.sleep(0.05)


# ---- retention and clean-up

def _delete_replaced(root, meta, retention, log):
    """Delete an earlier checkpoint of the step of `meta`, and old ones by `delete_old`."""
    try:
        delete_leftovers(root, log, only=meta["step"])
        delete_old(root, *retention, log, up_to=meta["step"])
    except (ValueError, OSError) as e:
        log(f"{step_path(root, meta['step'])} is written; deleting what it replaces failed: "
            f"{_message(e)}")


def delete_old(root, max_to_keep, keep_period=0, log=print, up_to=float("inf")):
    """Delete old checkpoints up to a step: the passing ones, see `save`, and of the others all but
    the `max_to_keep` newest (0: keep all). The newest checkpoint and those whose step keep_period
    divides stay. `log` gets a message for each that cannot be deleted.
    """
    folders = _step_folders(root)
    saved = [step for step in sorted(folders) if "meta.json" in folders[step] and step <= up_to]
    passing = [step for step in saved[:-1] if any(name.endswith(PASSING) for name in folders[step])]
    lasting = [step for step in saved if step not in passing]
    for step in passing + lasting[:-max_to_keep]:  # [:-0] is empty
        if not keep_period or step % keep_period:
            _delete_step(root, step, folders[step], log)


def delete_after(root, step, log=print):
    """Delete the checkpoints of later steps than `step`."""
    for later, names in _step_folders(root).items():
        if later > step:
            _delete_step(root, later, names, log)


def _delete_step(root, step, names, log):
    """Delete a checkpoint whose folder has these names: the files of a save, and the folder if it
    is then empty. Of a link only the link is deleted.
    """
    folder = _step_name(step)
    if Path(root, folder).is_symlink():
        _delete(root, log, folder)
        return
    # Sorted, meta.json is the first: without it the rest is no checkpoint.
    written = [f"{folder}/{name}" for name in sorted(names) if KNOWN_NAMES.fullmatch(name)]
    _delete(root, log, *written)
    if _is_local(root):
        with contextlib.suppress(OSError):  # it contains files of the user
            os.rmdir(Path(root, folder))


def delete_leftovers(root, log=print, only=None):
    """Delete what interrupted saves and deletions left, in the folders of all steps or of one. Call
    it only while none of these steps is being saved.
    """
    for step, names in _step_folders(root).items():
        if only not in (None, step):
            continue
        if "meta.json" not in names:
            _delete_step(root, step, names, log)
            continue
        with contextlib.suppress(ValueError):  # a corrupted meta.json does not name its folder
            save_id = read_meta(root, step)["folder"]
            for name in names - {"meta.json", save_id, f"{save_id}{PASSING}"}:
                if KNOWN_NAMES.fullmatch(name):
                    _delete(root, log, f"{_step_name(step)}/{name}")


def _delete(root, log, *names):
    """Delete files and folders of root, in this order, until one cannot be deleted. That is logged,
    since it must not end a run.
    """
    for name in names:
        path = Path(root, name)
        try:
            if not _is_local(root):
                _delete_keys(root, name)
            elif path.is_dir() and not path.is_symlink():  # TensorStore would leave empty folders
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except (ValueError, OSError) as e:
            log(f"{join_path(root, name)} could not be deleted: {_message(e)}")
            return


# ---- run folder

# Files that resume="overwrite" deletes, beside the checkpoints.
RUN_FILES = ("metrics.jsonl", "plot.png", "windows.jsonl")


def ckpt_root(out_dir, ckpt_dir):
    """The folder or bucket with the checkpoints of a run."""
    return ckpt_dir or join_path(out_dir, "ckpt")


def root_of(out_dir):
    """The root of the checkpoints of the run whose config.json is in out_dir."""
    return ckpt_root(out_dir, read_json(Path(out_dir, "config.json")).get("ckpt_dir"))


def roots(root):
    """{kind: root} of the checkpoints of a run: "save" of the whole state, "weights" and "best" of
    the parameters alone.
    """
    return {"save": root, "weights": join_path(root, "weights"), "best": join_path(root, "best")}


def check_is_of_run(root, meta, entries=("config", "data", "hooks", "progress")):
    """Raise ValueError when the meta of a checkpoint lacks entries that a run saves."""
    missing = [name for name in entries if name not in meta]
    if meta and missing:
        raise ValueError(f"{root}: checkpoint {meta['step']} was not saved by a run: its meta.json "
                         f"has no {', '.join(missing)}; to start from its parameters, use "
                         "--init_from")


def find_start(out_dir, root, resume, given=False):
    """The meta of the checkpoint from which a run resumes; {} for none.

    resume: "overwrite", "must", "never" or another text. given: whether the caller has a state or
    parameters. Raises ValueError when a required checkpoint is missing, or when a checkpoint must
    not exist.
    """
    # A folder outside out_dir may have the checkpoints of another run. A run resumes although its
    # out_dir has moved, or differs from launch to launch: then the old out_dir has no run.
    if root != ckpt_root(out_dir, ""):
        owner = newest_meta(root).get("config", {}).get("out_dir", out_dir)
        is_own = os.path.realpath(owner) == os.path.realpath(out_dir)
        recorded_root = broadcast_from_main(lambda: root_of(owner))
        is_in_use = os.path.realpath(recorded_root) == os.path.realpath(root)
        if not is_own and (is_in_use or resume == "overwrite"):
            raise ValueError(f"ckpt_dir {root}: has the checkpoints of the run {owner}, not of "
                             f"{out_dir}; choose another --ckpt_dir")
    if resume == "overwrite":
        return {}

    # The run in out_dir may have its checkpoints in another folder.
    recorded_root = broadcast_from_main(lambda: root_of(out_dir))
    is_elsewhere = os.path.realpath(recorded_root) != os.path.realpath(root)
    if is_elsewhere and newest_meta(recorded_root):
        raise ValueError(f"out_dir {out_dir!r}: the checkpoints of its run are in {recorded_root}; "
                         "set --ckpt_dir to that, or choose another --out_dir")

    needed_for = "resume must" if resume == "must" else ""
    meta = newest_meta(root, needed_for)
    check_is_of_run(root, meta)
    if meta and (given or resume == "never"):
        raise ValueError(f"resume {resume}: {out_dir} holds a run at step {meta['step']}, which "
                         "this launch would not resume; choose another --out_dir, or delete the "
                         "run with --resume overwrite")
    return meta


def steps_by_kind(root):
    """{kind: steps} of the complete checkpoints of a run, by the kinds of `roots`."""
    return {kind: steps(kind_root) for kind, kind_root in roots(root).items()}


def find_checkpoint(root, which, field="checkpoint"):
    """(root, meta) of one checkpoint of a run: "best" or a step, as text. Checkpoints of the
    parameters alone count too.

    field: the field that names it, for the error. Raises ValueError when it is missing, and lists
    the steps that exist.
    """
    saved = broadcast_from_main(partial(steps_by_kind, root))
    for kind, found_root in roots(root).items():
        for step in saved[kind]:
            if which == str(step) or which == kind == "best":
                return found_root, broadcast_from_main(partial(read_meta, found_root, step))
    found = [f"{kind} {', '.join(map(str, steps))}" for kind, steps in saved.items() if steps]
    raise ValueError(f"{field} {which}: {root} has no such checkpoint; it has: "
                     f"{'; '.join(found) or 'none'}")


@contextlib.contextmanager
def lock_folders(out_dir, root, log=print):
    """Make out_dir and a local root; lock them and a bucket against other runs. Process 0 does it
    for all processes. Delete the remains of interrupted saves.

    Yield check(), which raises ValueError once a newer process of this run has the bucket, or its
    lock is gone.
    """
    if jax.process_index():
        yield lambda: None
        return
    # One lock if both are the same folder.
    folders = {os.path.realpath(path) for path in (out_dir, root) if _is_local(path)}
    with contextlib.ExitStack() as locks:
        for folder in sorted(folders):
            with _explain(f"{folder}: cannot be written; choose another"):
                _kvstore(folder)  # ValueError for a path that TensorStore cannot use
                is_new = not os.path.exists(folder)
                os.makedirs(folder, exist_ok=True)
                lock_file = locks.enter_context(open(f"{folder}/.lock", "a", encoding="utf-8"))
            try:
                # The system unlocks it when the process ends for any reason.
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{folder}: another run is writing to it; choose another") from None
            except OSError as e:
                log(f"{folder}: its file system has no locks ({e.strerror}); make sure that no "
                    "other run writes to it")
            if is_new:
                locks.callback(_delete_unused, folder)
        check = locks.enter_context(lock_bucket(root, out_dir))
        for kind_root in roots(root).values():
            delete_leftovers(kind_root, log)
        yield check


def _delete_unused(folder):
    """Delete a folder with nothing but its lock: that of a launch that was refused."""
    with contextlib.suppress(OSError):  # deleted already
        if os.listdir(folder) == [".lock"]:
            os.unlink(f"{folder}/.lock")
            os.rmdir(folder)


def begin_out_dir(out_dir, root, config_text, overwrite=False, log=print):
    """Write config.json. overwrite: first delete the previous run. Process 0 does it for all."""
    if jax.process_index():
        return
    if overwrite:
        for each in roots(root).values():
            delete_after(each, -1, log)
        for name in RUN_FILES:
            Path(out_dir, name).unlink(missing_ok=True)
    replace_file(Path(out_dir, "config.json"), config_text)


def open_log(out_dir, step):
    """Open metrics.jsonl for the rows of a run that starts at `step`. Rows of later steps, and
    "stop" and "end" rows, are deleted first.
    """
    lines = []
    for row in read_log(out_dir):
        if row["step"] <= step and row["event"] not in ("stop", "end"):
            lines.append(json_line(row) + "\n")
    path = Path(out_dir, "metrics.jsonl")
    replace_file(path, "".join(lines))
    return open(path, "a", encoding="utf-8", buffering=1)


def read_log(out_dir):
    """The rows of metrics.jsonl that have a step and an event. Incomplete lines, and rows added by
    hand without these, are skipped.
    """
    path = Path(out_dir, "metrics.jsonl")
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            if row["step"] >= 0 and row["event"]:
                rows.append(row)
    return rows


def json_line(row):
    """A row as JSON on one line. Numbers and arrays of NumPy become numbers and lists. Numbers that
    are not finite become null, since JSON has no such numbers. Other values become text.
    """
    text = json.dumps(row, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    return json.dumps(json.loads(text, parse_constant=lambda _: None))


# ---- parameters of a run

def load_parameters(sources, like):
    """{name: array} of the parameters that `open_sources` chose. like: {name: shape with sharding}.
    """
    loaded = {}
    for source in sources:
        saved_like = {saved_name: like[name] for saved_name, name in source["take"].items()}
        with _explain(f"init_from {source['path']}"):
            found = source["read"](saved_like)
        for saved_name, name in source["take"].items():
            loaded[name] = found[saved_name]
    return loaded


def paths_of(names, arrays):
    """The paths in a flat state of these parameters and of their moments."""
    paths = set()
    for path in arrays:
        kind, *keys = path.split("/")
        if kind in ("params", "opt") and keys[-1] in names:
            paths.add(path)
    return paths


def restore_run(root, meta, like, initial, missing, step=None, drops_unknown=False, log=print):
    """(step, tree) of a checkpoint of a run, in the shapes and shardings of `like`, the state or
    its parameters: that of `step`, or the newest intact one.

    meta: of the checkpoint. initial: a state with the arrays that the checkpoint lacks. missing:
    names of the parameters that it lacks. Raises ValueError when it lacks others, or has arrays in
    other shapes, or arrays that `like` lacks, which only drops_unknown permits.
    """
    wanted, treedef = flatten(like)
    initial, _ = flatten(initial)
    # A scale of float16 is left over, or begins, where the dtype was changed. Hooks read their own.
    others = {x for x in [*wanted, *meta["arrays"]] if x.startswith(("scale/", "hooks/"))}
    absent = paths_of(missing, wanted) | (others - meta["arrays"].keys())
    saved = {path: x for path, x in wanted.items() if path not in absent}

    unknown = meta["arrays"].keys() - wanted.keys() - others
    if "opt" not in like:  # a mode that reads the parameters ignores the rest
        unknown = {path for path in unknown if path.startswith("params/")}
    if unknown and not drops_unknown:
        raise ValueError(f"checkpoint {step_path(root, meta['step'])} has arrays that "
                         f"this run lacks: {', '.join(sorted(unknown))}; to drop them on purpose: "
                         "--allow_change state")
    try:
        if step is None:
            step, restored = restore_newest(root, saved, log)
        else:
            restored = restore(root, step, saved)
    except (KeyError, TypeError) as e:
        raise ValueError(f"{e.args[0]}; to start from the parameters that fit: another --out_dir "
                         "and --init_from 'DIR strict=no', DIR being this run") from None
    arrays = initial | restored
    return step, jax.tree.unflatten(treedef, [arrays[path] for path in wanted])


# ---- files

def read_json(path):
    """The object in a JSON file, or {} for a file that is missing or empty. Raises ValueError for a
    file that cannot be read.
    """
    with _explain(f"{path}: cannot be read"):
        try:
            return json.loads(Path(path).read_bytes() or "{}")
        except FileNotFoundError:
            return {}


def replace_file(path, text):
    """Write a file so that a crash or a power cut leaves the old text or the new one. A link and
    the permissions stay.
    """
    path = path.resolve()
    partial_path = path.with_suffix(".tmp")
    partial_path.write_text(text, encoding="utf-8")
    with contextlib.suppress(FileNotFoundError):
        shutil.copymode(path, partial_path)
    _sync(partial_path)
    partial_path.replace(path)
    _sync(path.parent)


# ---- optional
# Sections: locks of buckets, sources of weights, verify, safetensors, exports.

# ---- locks of buckets

LOCK = ".lock"  # an object beside the checkpoints


@contextlib.contextmanager
def lock_bucket(root, out_dir):
    """Lock a bucket against other runs: an object in it names the run, by its out_dir, and the
    newest process of that run. Yield check(), which raises ValueError in an older process.

    Raises ValueError when another run has locked the bucket.
    """
    if _is_local(root):
        yield lambda: None
        return
    store = _open(root)
    path = join_path(root, LOCK)
    this = {"out_dir": os.path.realpath(out_dir),
            "process": f"{os.getpid()} on {socket.gethostname()}, {os.urandom(4).hex()}"}

    def read(store):
        with _explain(path):
            return json.loads(_read(store, LOCK) or "{}")

    def check():
        holder = this
        with contextlib.suppress(ValueError):  # without a server the save itself will fail
            holder = read(_open(root, max_retries=0))
        if holder != this:  # a newer process, or its run has ended
            raise ValueError(f"{path} names another process, {holder}: this one saves no more")

    holder = read(store)
    if holder and holder["out_dir"] != this["out_dir"]:
        raise ValueError(f"ckpt_dir {str(root)!r}: another run is writing to it, {holder}; choose "
                         f"another, or delete {path} if that run has ended")
    with _explain(path):
        store.write(LOCK, json.dumps(this).encode()).result()
    try:
        yield check
    finally:
        with contextlib.suppress(ValueError):
            if read(_open(root, max_retries=0)) == this:
                store.write(LOCK, None).result()


# ---- sources of weights

def open_sources(texts, shapes, open_weights, expected_names, find_mismatches, select, wanted=None):
    """The source of each text (see `parse_source`), with "take": {saved name: name} of the
    parameters to load from it. The last of several sources with a parameter wins.

    shapes: {name: shape} of the model's parameters. open_weights: path -> {"names", "read"} of
    weights in another format, or None when the path has no such weights. find_mismatches: meta of a
    checkpoint -> errors, one for each difference from the model. expected_names: {saved name} ->
    {name} of the parameters that these sources should give. select: (patterns, names) -> the names
    that match, see `choose_names`. wanted: names to load; None: all.

    Raises ValueError that lists all that does not fit, and for an expected parameter that no source
    has, though one of them should be loaded completely.
    """
    sources = []
    errors = []
    saved_names = set()  # in all sources
    chosen = set()  # parameters that a source gives
    is_complete = False  # patterns may exclude parameters, or no source is strict
    for text in reversed(texts):  # the last source with a parameter gives it
        source = parse_source(text)
        source |= open_weights(source["path"]) or _open_checkpoint(source, find_mismatches)
        names, wrong = choose_names(source, shapes, select)
        errors += [f"{source['path']}: {error}" for error in wrong]
        take = {saved_name: name for name, saved_name in names.items()
                if name not in chosen and (wanted is None or name in wanted)}
        sources.insert(0, source | {"take": take, "text": text})
        saved_names.update(source["names"])
        chosen.update(names)
        if source["strict"] and source["load"] == ["*"] and not source["exclude"]:
            is_complete = True
    if errors:
        raise ValueError("init_from does not fit this model (to use a run's shape: --config "
                         "DIR/config.json; to load only what fits: strict=no)\n  "
                         + "\n  ".join(errors))
    missing = expected_names(saved_names) - chosen
    if missing and is_complete:
        raise ValueError(f"init_from {', '.join(texts)}: no source has "
                         f"{', '.join(sorted(missing))}; of a run saved with --save_exclude, as "
                         "LoRA factors, name the weights it began with first")
    return sources


def _open_checkpoint(source, find_mismatches):
    """"names": {saved name: shape}, "read": {saved name: like} -> {saved name: array}, "summary"
    and "mismatches" of a source of `parse_source` that is a run's out_dir or a folder of
    checkpoints.
    """
    path, which = source["path"], source["checkpoint"]
    # Checkpoints of a run, or those in the folder itself.
    root = broadcast_from_main(lambda: root_of(path))
    if not any(broadcast_from_main(partial(steps_by_kind, root)).values()):
        root = path
    if which:
        root, meta = find_checkpoint(root, which, f"init_from {path}, checkpoint")
    else:
        meta = newest_meta(root)
    if not meta:
        raise ValueError(f"init_from {path}: holds no checkpoint and no weights; must be a run's "
                         "--out_dir, a folder of checkpoints, one of Hugging Face weights, or "
                         f"hf://{path}. A run resumes by its --out_dir, without --init_from")
    names = {name.removeprefix("params/"): layout["shape"]
             for name, layout in meta["arrays"].items() if name.startswith("params/")}

    def read(like):
        return restore(root, meta["step"], {"params": like}, meta)["params"]

    return {"names": names, "read": read,
            "summary": f"{path} at step {meta['step']} of run {meta.get('run_id')}",
            "mismatches": find_mismatches(meta)}


SOURCE_OPTIONS = {"load": "*", "exclude": "", "rename": "", "strict": "yes", "dynamic": "no"}


def parse_source(text):
    """The parts of a text such as 'DIR@best load=embed,layers.* exclude=*norm rename=old.:new.
    strict=no dynamic=yes', by the names "path", "checkpoint", "load", "exclude", "rename", "strict"
    and "dynamic".

    checkpoint: "best" or a step, as text; "" for DIR. load and exclude: patterns of the model's
    names. rename: prefixes, saved:local. dynamic: loaded again during the run.

    Raises ValueError for a malformed text or an unknown option.
    """
    path, *options = re.split(r"\s+(?=\w+=)", os.path.expanduser(text.strip()))
    values = SOURCE_OPTIONS | dict(option.split("=", 1) for option in options)
    lists = {}
    for name in ("load", "exclude", "rename"):
        lists[name] = [item for item in values[name].split(",") if item]
    # There is a path. Options are known, and have a value of their form.
    is_known = values.keys() == SOURCE_OPTIONS.keys()
    has_answers = {values["strict"], values["dynamic"]} <= {"yes", "no"}
    has_names = lists["load"] and all(":" in rename for rename in lists["rename"])
    if not (path and is_known and has_answers and has_names):
        raise ValueError(f"init_from {text!r}: must be DIR, DIR@best or DIR@STEP, or within one "
                         "pair of quotes 'DIR load=PATTERNS exclude=PATTERNS rename=SAVED:LOCAL "
                         "strict=yes|no dynamic=yes|no', each option only if needed")
    checkpoint = ""
    at_checkpoint = re.fullmatch("(.+)@(best|[0-9]+)", path)
    if at_checkpoint and "://" not in path and not os.path.exists(path):
        path, checkpoint = at_checkpoint.groups()
    return lists | {
        "path": path,
        "checkpoint": checkpoint,
        "rename": dict(rename.split(":", 1) for rename in lists["rename"]),
        "strict": values["strict"] == "yes",
        "dynamic": values["dynamic"] == "yes",
    }


def choose_names(source, shapes, select):
    """({name: saved name} of the parameters that a source gives, errors). Errors of a strict source
    are unknown names, other shapes and its "mismatches"; another source skips these.

    source: of `parse_source`, with "names": {saved name: shape}, where the shape None fits any.
    shapes: {name: shape} of the model's parameters. select: function of patterns and names; a
    leading ! deselects. It raises ValueError for a pattern without a match.
    """
    # Patterns select among the names as this model has them.
    names = {}
    for saved_name in source["names"]:
        name = saved_name
        for saved_prefix, local_prefix in source["rename"].items():
            if saved_name.startswith(saved_prefix):
                name = local_prefix + saved_name.removeprefix(saved_prefix)
                break
        names[name] = saved_name
    excluded = [f"!{pattern}" for pattern in source["exclude"]]
    selected = select(source["load"] + excluded, names)

    # Take what fits.
    chosen = {}
    errors = [*source.get("mismatches", ())]
    for name in sorted(selected):
        saved_shape = source["names"][names[name]]
        if name not in shapes:
            errors.append(f"{name} is not a parameter of this model")
        elif saved_shape is not None and tuple(saved_shape) != tuple(shapes[name]):
            errors.append(f"{name} is {tuple(saved_shape)} in the checkpoint, "
                          f"{tuple(shapes[name])} in this model")
        else:
            chosen[name] = names[name]
    return chosen, errors if source["strict"] else []


def log_sources(sources, missing, names, log=print):
    """Log how many of the missing parameters each source gives, and how many are initialized.

    names: all parameters. sources: the result of `open_sources`.
    """
    origins = {source["text"]: source["take"].values() for source in sources}
    initialized = missing.difference(*origins.values())
    origins["a fresh initialization"] = [name for name in names if name in initialized]
    for origin, taken in origins.items():
        which = f": {', '.join(taken)}" if len(taken) < len(names) else ""
        if taken:
            log(f"{len(taken)} of {len(names)} parameters from {origin}{which}")


# ---- verify

def verify(root, log=print):
    """Read every array of every checkpoint in root, and in the folders of `roots` with checkpoints
    of parameters alone; return the first error of each. `log` gets a line for each intact one.
    """
    if not any(steps_by_kind(root).values()):
        return [f"{root} holds no checkpoint; name a folder such as out/default/ckpt"]
    errors = []
    for folder in roots(root).values():
        for step in steps(folder):
            try:
                meta = read_meta(folder, step)
                for name, layout in meta["arrays"].items():
                    _load(folder, meta, name, np.empty(0, layout["dtype"]))
                log(f"{step_path(folder, step)}: intact")
            except ValueError as e:
                errors.append(str(e))
    return errors


# ---- safetensors
# A file is the number of bytes of its header, the header as JSON, and the tensors.

STRIP_BYTES = 2**22  # part of a tensor that a thread copies at a time: fits the CPU's cache
TENSOR_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_tensors(tensors, pieces, like, unused=()):
    """{name: array} in the shapes, dtypes and shardings of `like`, as in `restore`, read from the
    tensors of `open_tensors`.

    pieces: {name: ({index: tensor's name}, transposed)}: array[index], transposed or not, is that
    tensor. unused: ends of the names of tensors that need not be in pieces. Each process reads only
    what its devices hold. On devices with their own memory the host needs memory for one array.

    Raises ValueError that lists all tensors that are missing, unknown or of another shape.
    """
    shapes = tensor_shapes(pieces, like)
    errors = []
    for name, shape in shapes.items():
        if name not in tensors:
            errors.append(f"{name} is missing")
        elif tensors[name].shape != shape:
            errors.append(f"{name} is {tensors[name].shape} in the checkpoint, {shape} in this "
                          "model")
    unknown = {name for name in tensors if not name.endswith(unused)}
    for names, _ in pieces.values():
        unknown.difference_update(names.values())
    errors += [f"{name} is not a tensor of this model" for name in sorted(unknown)]
    if errors:
        # One line for all layers and experts.
        patterns = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", error) for error in errors)
        raise ValueError("the weights do not fit this model\n  " + "\n  ".join(patterns))
    arrays = {}
    for name, x in like.items():
        read = partial(_read_block, tensors, *pieces[name], x.dtype)
        arrays[name] = _assemble(x.shape, getattr(x, "sharding", None), read)
    return arrays


def open_tensors(folder, file_name="model"):
    """{tensor's name: array, mapped from its file} of all files of a folder."""
    paths = [Path(folder, f"{file_name}.safetensors")]
    if not paths[0].exists():
        paths = sorted(Path(folder).glob(f"{file_name}*.safetensors"))
    if not paths:
        raise ValueError(f"{folder}: holds no {file_name}.safetensors; convert its .bin file")
    tensors = {}
    for path in paths:
        with _explain(f"{path}: cannot be read as safetensors", KeyError, TypeError,
                      AttributeError):
            file = np.memmap(path, np.uint8, "r")
            start = 8 + int.from_bytes(file[:8], "little")
            header = json.loads(file[8:start].tobytes())
            header.pop("__metadata__", None)
            for name, entry in header.items():
                if name in tensors:
                    raise ValueError(f"another file of the folder holds {name} too")
                if entry["dtype"] not in TENSOR_DTYPES:
                    raise ValueError(f"{name} is of type {entry['dtype']}; must be "
                                     f"{', '.join(TENSOR_DTYPES)}")
                first, end = entry["data_offsets"]
                x = file[start + first:start + end].view(TENSOR_DTYPES[entry["dtype"]])
                tensors[name] = x.reshape(entry["shape"])
    return tensors


def tensor_shapes(pieces, arrays):
    """{tensor's name: its shape} of the tensors into which read_tensors divides arrays."""
    shapes = {}
    for name, x in arrays.items():
        tensors, transposed = pieces[name]
        for index, tensor in tensors.items():
            shape = tuple(x.shape[len(index):])
            shapes[tensor] = shape[::-1] if transposed else shape
    return shapes


def _read_block(tensors, names, transposed, dtype, *ranges):
    """Read a range of each dim of an array: strip by strip, by several threads. names, transposed:
    of `pieces` of read_tensors.
    """
    # The leading dims select tensors, the others are those of a tensor: in its file transposed.
    n_stacked = len(next(iter(names)))
    block = _new_array([len(r) for r in ranges], dtype)
    slices = [slice(r.start, r.stop) for r in ranges[n_stacked:]]
    if transposed:
        slices = slices[::-1]
    strips = []  # (target, source)
    for position in np.ndindex(block.shape[:n_stacked]):
        index = tuple(r[i] for r, i in zip(ranges, position))
        source = tensors[names[index]][tuple(slices)]
        target = block[position].T if transposed else block[position]
        n_rows = max(STRIP_BYTES * len(source) // max(source.nbytes, 1), 1)
        for start in range(0, len(source), n_rows):
            strips.append((target[start:start + n_rows], source[start:start + n_rows]))
    with ThreadPoolExecutor(min(os.cpu_count(), 8)) as pool:
        list(pool.map(lambda strip: np.copyto(*strip, casting="unsafe"), strips))
    return block


def each_tensor(arrays, pieces, dtype):
    """Yield (tensor's name, NumPy array in dtype), one at a time, in the order of `tensor_shapes`.
    Every process must take all of them. Raises ValueError for a value that float16 cannot hold.
    """
    def take(x, index, transposed):
        for i in index:
            x = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
        return (x.T if transposed else x).astype(dtype)

    for name, stacked in arrays.items():
        tensors, transposed = pieces[name]
        # Gather each tensor on every device.
        mesh = getattr(getattr(stacked, "sharding", None), "mesh", None)
        replicated = mesh and jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        take_replicated = jax.jit(take, static_argnums=2, out_shardings=replicated)
        for index, tensor in tensors.items():
            x = np.asarray(take_replicated(stacked, index, transposed))
            if dtype == "float16" and np.isinf(x).any():
                raise ValueError(f"{tensor} has values beyond 65504, the largest of float16: use "
                                 "--export_dtype bfloat16 or float32")
            yield tensor, x


def write_safetensors(path, shapes, dtype, tensors):
    """Write a file of safetensors. One tensor at a time is in memory. Every process must call it;
    process 0 writes.

    shapes: {name: shape}. tensors: an iterator of (name, array in dtype) in the same order.
    """
    tags = {dtype: tag for tag, dtype in TENSOR_DTYPES.items()}
    header = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    n_bytes = 0
    for name, shape in shapes.items():
        end = n_bytes + prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": tags[dtype], "shape": shape, "data_offsets": [n_bytes, end]}
        n_bytes = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with open(os.devnull if jax.process_index() else path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, x in tensors:
            file.write(x.tobytes())


# ---- exports

EXPORT_MARK = "sixfile.json"  # file in an export that names the run that wrote it


def check_export(folder, run):
    """Raise ValueError when a folder has files that no export of this run wrote.

    run: a dict that distinguishes the run from others.
    """
    out = Path(folder)
    is_used = out.is_file() or any(out.glob("*"))
    if is_used and run != read_json(out / EXPORT_MARK):
        raise ValueError(f"export {folder}: exists, and no export of this run wrote it; choose "
                         "another")


def write_export(folder, run, arrays, pieces, dtype, add_files, file_name="model"):
    """Write a folder with FILE_NAME.safetensors under another name, then rename it; an existing
    folder is replaced. Every process must call it.

    run: as in `check_export`. arrays, pieces, dtype: as in `each_tensor`. add_files: function of
    the new folder that writes the other files; process 0 calls it. Raises ValueError in every
    process when the disk or the computation of a tensor fails.
    """
    is_main = jax.process_index() == 0
    out = Path(folder)
    new = Path(f"{out}.partial")
    tensors = each_tensor(arrays, pieces, dtype)
    error = None
    try:
        if is_main:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            (new / EXPORT_MARK).write_text(json.dumps(run), encoding="utf-8")
            add_files(new)
        shapes = tensor_shapes(pieces, arrays)
        write_safetensors(new / f"{file_name}.safetensors", shapes, dtype, tensors)
        if is_main:
            for path in (*new.iterdir(), new):
                _sync(path)
            shutil.rmtree(out, ignore_errors=True)
            new.rename(out)
    except (OSError, ValueError) as e:
        error = str(e)
        for _ in tensors:  # the other processes wait for this one at each tensor
            pass

    def report():
        if error is not None:
            shutil.rmtree(new, ignore_errors=True)
            raise ValueError(f"export {folder}: could not be written: {error}")

    broadcast_from_main(report)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "verify":
        sys.exit("usage: python ckpt.py verify DIR, as in out/default/ckpt")
    sys.exit("\n".join(verify(sys.argv[2])) or None)
