# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is saved comes back to the bit on any mesh, or not at all."""
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ckpt


def tree_on(shape, spec=P("a", "b"), n=8):
    """A tree of several dtypes, its matrices split over a mesh of `shape`."""
    mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2,
                         devices=jax.devices()[:n])
    rng = np.random.default_rng(0)
    put = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))
    return {"params": {"w": put(rng.normal(size=(8, 16)).astype(np.float32), spec),
                       "half": put(jnp.asarray(rng.normal(size=(16, 4)), jnp.bfloat16), spec),
                       "zeros": put(np.zeros((4, 8), np.float32), spec)},
            "step": put(np.int32(7), P())}


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def equal(a, b):
    return all(x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y))
               for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("shape, n", [((4, 2), 8), ((2, 2), 4), ((1, 1), 1)])
def test_a_tree_comes_back_to_the_bit_on_any_mesh(tmp_path, shape, n):
    """Saved from 8 devices, restored onto 8, 4 and 1, also without a sharding as NumPy.

    Break: ckpt.py: return jax.device_put(x, x.sharding, may_alias=False) => return 0 * x
    """
    tree = tree_on((2, 4))
    ckpt.wait(ckpt.save(tmp_path, 7, tree, {"note": "hello"}))
    target = tree_on(shape, n=n)
    back = ckpt.restore(tmp_path, 7, like(target))
    assert equal(back, tree)
    assert all(x.sharding == y.sharding
               for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(target)))
    on_no_mesh = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)
    assert equal(ckpt.restore(tmp_path, 7, on_no_mesh), tree)
    assert ckpt.read_meta(tmp_path, 7)["note"] == "hello"


def test_a_folder_may_be_named_by_the_way_to_it(tmp_path, monkeypatch):
    """A relative path, and one that goes up and down again.

    Break: ckpt.py: str((folder / name).resolve()) => str(folder / name)
    """
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for root in ("run", "../run", tmp_path / "here" / ".." / "other"):
        ckpt.wait(ckpt.save(root, 1, {"w": np.ones(3)}))
        assert equal(ckpt.restore(root, 1, {"w": np.zeros(3)}), {"w": np.ones(3)})


def test_restore_gives_the_wanted_dtype(tmp_path):
    """float32 on disk, bfloat16 wanted: the nearest bfloat16.

    Break: ckpt.py: np.asarray(read.result(), like.dtype) => np.asarray(read.result())
    """
    w = np.linspace(0, 1, 7, dtype=np.float32)
    ckpt.wait(ckpt.save(tmp_path, 1, {"w": w}))
    back = ckpt.restore(tmp_path, 1, {"w": jax.ShapeDtypeStruct(w.shape, jnp.bfloat16)})["w"]
    assert back.dtype == jnp.bfloat16 and np.array_equal(back, w.astype(jnp.bfloat16))


def test_each_part_of_an_array_is_written_once(tmp_path):
    """An array split two ways and replicated four ways is two writes of half each.

    Break: ckpt.py: for s in x.addressable_shards if s.replica_id == 0] =>
    for s in x.addressable_shards]
    """
    x = tree_on((2, 4), P("a"))["params"]["w"]
    parts = ckpt._shards(x)
    assert [part.shape for _, part in parts] == [(4, 16)] * 2


def test_no_flipped_bit_gives_a_wrong_number(tmp_path):
    """Each of 3000 random bits, over all files: restoring is an error, or right where the bit does
    not matter.

    Break: ckpt.py: {"name": "crc32c"}], => *()],
    """
    tree = {"a": np.arange(6.0).reshape(2, 3),
            "b": {"c": np.ones(5, np.int32), "zero": np.zeros(4, np.float32)}}
    ckpt.wait(ckpt.save(tmp_path, 3, tree, {"config": {"lr": 1}}))
    meta = ckpt.read_meta(tmp_path, 3)
    files = [p for p in sorted(tmp_path.rglob("*")) if p.is_file()]
    rng, caught = np.random.default_rng(0), 0
    for path in files:
        whole = path.read_bytes()
        n_bits = len(whole) * 8
        for bit in rng.choice(n_bits, min(n_bits, 3000 // len(files)), replace=False):
            bad = bytearray(whole)
            bad[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bad)
            try:
                assert equal(ckpt.restore(tmp_path, 3, tree), tree), (path, bit)
                assert ckpt.read_meta(tmp_path, 3) == meta, (path, bit)
            except ValueError as e:
                caught += 1
                assert str(tmp_path) in str(e)
        path.write_bytes(whole)
    assert caught > 1000


@pytest.mark.parametrize("harm", ["truncate", "delete"])
def test_a_truncated_or_missing_file_is_an_error_that_names_it(tmp_path, harm):
    """For every file of a checkpoint.

    Break: ckpt.py: "fill_missing_data_reads": False => "fill_missing_data_reads": True
    """
    tree = {"a": np.arange(6.0), "zero": np.zeros(4, np.float32)}
    paths = {"a/zarr.json": "array a ", "a/c/0": "array a ", "zero/zarr.json": "array zero ",
             "zero/c/0": "array zero ", "meta.json": "meta.json"}
    for step, (path, words) in enumerate(paths.items()):
        ckpt.wait(ckpt.save(tmp_path, step, tree))
        victim = tmp_path / f"{step:09d}" / path
        victim.unlink() if harm == "delete" else victim.write_bytes(victim.read_bytes()[:-3])
        with pytest.raises(ValueError, match=words):
            ckpt.restore(tmp_path, step, tree)


def test_a_checkpoint_exists_only_with_its_meta_json(tmp_path):
    """Folders without one, or not yet renamed, are no checkpoints; clean removes the latter.

    Break: ckpt.py: and (p / "meta.json").exists()) => )
    """
    ckpt.wait(ckpt.save(tmp_path, 5, {"a": np.ones(3)}))
    (tmp_path / "000000009").mkdir()
    for name in ("000000008.partial", "000000007.deleted12"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_text("{}")
    assert ckpt.steps(tmp_path) == [5] and ckpt.latest(tmp_path) == 5
    assert ckpt.latest(tmp_path / "none") is None
    ckpt.clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000005", "000000009"]


def test_prune_keeps_the_newest_by_looking_at_the_disk(tmp_path):
    """keep=2 of 5; keep=0 keeps all.

    Break: ckpt.py: steps(root)[:-keep] => steps(root)[keep:]
    """
    for step in (1, 2, 3, 4):
        ckpt.wait(ckpt.save(tmp_path, step, {"a": np.ones(3)}))
    assert ckpt.steps(tmp_path) == [1, 2, 3, 4]
    ckpt.wait(ckpt.save(tmp_path, 5, {"a": np.ones(3)}, keep=2))
    assert ckpt.steps(tmp_path) == [4, 5] and len(list(tmp_path.iterdir())) == 2


def test_a_host_array_may_be_overwritten_once_save_returned(tmp_path):
    """Checkpoints hold what was there then; saving a step again replaces it.

    Break: ckpt.py: return [((), np.array(x))] => return [((), np.asarray(x))]
    """
    for value in (1.0, 3.0):
        host = np.full(2**22, value, np.float32)
        future = ckpt.save(tmp_path, 1, {"host": host})
        host[:] = 2.0
        ckpt.wait(future)
        back = ckpt.restore(tmp_path, 1, {"host": host})["host"]
        assert back.min() == back.max() == value


def test_a_device_array_may_be_donated_once_save_returned(tmp_path):
    """And what took its place is not what is saved.

    Break: ckpt.py: return jax.device_put(x, x.sharding, may_alias=False) => return x
    """
    on_device = jax.block_until_ready(jnp.ones(2**22))
    place = on_device.unsafe_buffer_pointer()
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0).lower(on_device).compile()
    future = ckpt.save(tmp_path, 1, {"device": on_device})
    assert add_one(on_device).unsafe_buffer_pointer() == place  # its memory was taken at once
    ckpt.wait(future)
    back = ckpt.restore(tmp_path, 1, {"device": np.zeros(2**22, np.float32)})["device"]
    assert back.min() == back.max() == 1


def test_a_failed_write_is_raised_by_wait_and_leaves_no_checkpoint(tmp_path):
    """Here a file stands where the folder must go.

    Break: ckpt.py: return future.result() if future is not None else None => return None
    """
    (tmp_path / "000000004.partial").write_text("in the way")
    future = ckpt.save(tmp_path, 4, {"a": np.ones(3)})
    with pytest.raises(ValueError, match="000000004 could not be written.*partial"):
        ckpt.wait(future)
    assert ckpt.steps(tmp_path) == []


def test_missing_arrays_and_other_shapes_are_listed(tmp_path):
    """All of them at once, by name.

    Break: ckpt.py: raise KeyError(f"checkpoint {folder} has no {', '.join(missing)}") =>
    wanted = {}
    """
    ckpt.wait(ckpt.save(tmp_path, 1, {"a": np.ones(3), "b": np.ones((2, 2))}))
    with pytest.raises(KeyError, match="has no x, y/z"):
        ckpt.restore(tmp_path, 1, {"a": np.ones(3), "x": np.ones(3), "y": {"z": np.ones(1)}})
    with pytest.raises(TypeError, match=r"a is \(3,\) there, \(4,\) here; "
                                        r"b is \(2, 2\) there, \(4,\) here"):
        ckpt.restore(tmp_path, 1, {"a": np.ones(4), "b": np.ones(4)})


def test_large_arrays_are_cut_into_chunks(tmp_path):
    """A chunk is at most CHUNK_BYTES and the cut is even; the values come back.

    Break: ckpt.py: chunk[longest] //= 2 => break
    """
    assert ckpt._chunk_shape((4096, 8192), (4096, 8192), 4) == [2048, 2048]
    assert ckpt._chunk_shape((), (), 4) == []
    assert ckpt._chunk_shape((7, 10**8), (7, 10**8), 4)[0] == 7
    x = np.arange(2**23, dtype=np.float32)
    ckpt.wait(ckpt.save(tmp_path, 1, {"x": x}))
    assert len(list((tmp_path / "000000001/x/c").iterdir())) == 2
    assert equal(ckpt.restore(tmp_path, 1, {"x": x}), {"x": x})


def test_two_names_that_are_one_are_refused(tmp_path):
    """A key with a slash can name the same array as a tree of keys.

    Break: ckpt.py: if names.count(name) > 1 => if names.count(name) > 2
    """
    with pytest.raises(ValueError, match="two arrays of the tree have one name, a/b"):
        ckpt.save(tmp_path, 1, {"a/b": np.ones(2), "a": {"b": np.zeros(2)}})


def test_numbers_are_saved_as_arrays(tmp_path):
    """Python's numbers in a tree, and in `like`.

    Break: ckpt.py: x if hasattr(x, "dtype") else np.asarray(x) for => x for
    """
    ckpt.wait(ckpt.save(tmp_path, 1, {"a": 1.5, "b": 7}))
    back = ckpt.restore(tmp_path, 1, {"a": 0.0, "b": 0})
    assert (back["a"], back["b"]) == (1.5, 7)


def test_a_log_goes_back_to_a_step(tmp_path):
    """Lines of later steps, of the end, torn lines and lines that are no event are cut.

    Break: ckpt.py: kept += [row] if row["step"] <= step => kept += [row] if row["step"] >= 0
    """
    path = tmp_path / "log.jsonl"
    write, done = ckpt.open_log(path, 0)
    for step in (1, 2, 3):
        write("train", {"step": step, "loss": 1 / 3})
    write("eval", {"step": 2})
    write("end", {"step": 2})
    with open(path, "a") as f:
        f.write('[1]\n7\n{"event": "train"}\n{"event": "tra')
    assert done == set()
    _, done = ckpt.open_log(path, 2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"event": "train", "step": 1, "loss": 1 / 3},
                    {"event": "train", "step": 2, "loss": 1 / 3}, {"event": "eval", "step": 2}]
    assert done == {"train", "eval"}
