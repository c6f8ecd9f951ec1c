# SPDX-License-Identifier: Apache-2.0
"""The click model, against PyTorch's sparse updates and scikit-learn's AUC, and resumed."""
import dataclasses
import itertools
import json
import re
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sklearn.metrics import roc_auc_score

import bench
import clicks
import data
import make_clicks
import model
import step
import train
from test_recipes import assert_same_arrays, copy_at, copy_of
from test_step import BASE, batch_structs, compiled, host, place
from test_train import rows as log_rows

SMALL = "user=2^12", "item=2^12", "category=2^8", "history=2^12:4"


@pytest.fixture
def planted(tmp_path, cache_dir):
    """planted(days, rows, **fields): a config for that many days, in tmp_path/days."""
    def make(n_days=3, rows=3000, **fields):
        make_clicks.main(tmp_path / "days", n_days, rows)
        defaults = dict(
            data=(str(tmp_path / "days/*.npz"),), out_dir=str(tmp_path / "out"), tables=SMALL,
            cache_dir=cache_dir, dtype="float32", batch_size=256, save_every=0, eval_every=0,
            eval_batches=0)
        return clicks.ClicksConfig(**defaults | fields)
    return make


@pytest.mark.slow
def test_the_first_losses_are_those_of_torchs_sparse_adam():
    """50 losses are within 1e-4 of those of PyTorch's EmbeddingBag with SparseAdam, in float32.

    Break: tests/recipes/clicks.py: .set(new, mode="drop") => .add(new, mode="drop")
    """
    pytest.importorskip("torch", reason="PyTorch is not installed")
    cfg = bench.click_config(10**4, batch_size=128, lr=0.01, weight_decay=0.0, clip_norm=0.0,
                             schedule="constant", warmup_steps=0.0)
    run = train.setup_run(cfg, clicks.TASK, jax.devices()[:1], [clicks.sparse_rows])
    steps = train.steplib.lower_steps(*train.step_args(run))
    programs = train.steplib.compile_steps(steps)
    state = programs["init"](jax.random.key(0))
    update = bench.torch_clicks(cfg, {name: np.array(x) for name, x in state["params"].items()})
    losses, torch_losses = [], []
    for batch in itertools.islice(itertools.cycle(bench.click_batches(cfg)), 50):
        torch_losses.append(update(batch))
        shardings = {name: x.sharding for name, x in run.batch.items()}
        state, metrics = programs["train_step"](
            state, jax.device_put(batch, shardings), cfg.lr)
        losses.append(float(train.steplib.means(metrics["sums"])["loss"]))
    np.testing.assert_allclose(losses, torch_losses, rtol=1e-4)
    assert losses[-1] < 0.8 * losses[0]


def test_auc_and_grouped_auc_are_scikit_learns():
    """Over two batches, one of them padded; with one label neither exists.

    Break: tests/recipes/clicks.py: (most + least) / 2 => most
    """
    random = np.random.default_rng(0)
    label = random.integers(0, 2, 160)
    group = random.integers(0, 40, 160)
    # With ties. In the middle of a bin: 8 and 10 hundredths are not exact in float32.
    logit = (np.round(label + random.normal(size=160), 1) - 9.995).astype(np.float32)
    valid = np.arange(160) < 150
    cfg = clicks.ClicksConfig(tables=("user=64", "score=160"), n_dense=1, dim=1)
    params = {"rows.user": np.zeros((64, 1)), "rows.score": logit[:, None],
              "tower.w1": np.zeros((3, 64)), "tower.b1": np.zeros(64), "tower.w2": np.zeros(64)}
    parts = []
    for rows in (np.arange(80), np.arange(80, 160)):  # no group in both
        group[rows] = group[rows] % 20 + 20 * (rows[0] > 0)
        halves = np.stack([group[rows] % 7, group[rows] // 7], 1)
        batch = {"user": group[rows, None] % 64, "score": rows[:, None], "group": halves,
                 "dense": np.zeros((80, 1)), "label": np.where(valid, label, -1)[rows]}
        parts.append(clicks.loss(jax.tree.map(jnp.float32, params), batch, cfg)[0])
    found = clicks.metrics({name: np.float64(parts[0][name] + parts[1][name])
                            for name in ("by_score", "by_group")}, None)
    label, group, logit = label[valid], group[valid], logit[valid]
    assert found["auc"] == pytest.approx(roc_auc_score(label, logit), abs=1e-6)
    groups = [group == g for g in np.unique(group)]
    both = [rows for rows in groups if len({*label[rows]}) == 2]
    expected = np.average([roc_auc_score(label[rows], logit[rows]) for rows in both],
                          weights=[rows.sum() for rows in both])
    assert found["group_auc"] == pytest.approx(expected, abs=1e-6)
    assert (found["groups"], found["groups_left_out"]) == pytest.approx(
        (len(groups), len(groups) - len(both)))
    assert len(both) < len(groups)
    alone = {"by_score": np.eye(2)[:, :1] * np.ones(9), "by_group": np.float64([0, 0, 7, 7])}
    assert clicks.metrics(alone, None) == {"groups": 7, "groups_left_out": 7}


@pytest.mark.slow
def test_it_ranks_nearly_as_well_as_the_truth(planted, monkeypatch):
    """The AUC of the third day, before training on it, is within 0.01 of that of the true logits.

    Break: tests/recipes/clicks.py: row_ids[parameter] = first_ids =>
    row_ids[parameter] = sorted_ids * 0
    """
    monkeypatch.setattr(make_clicks, "SIZES", {"user": 100, "item": 100, "category": 10})
    cfg = planted(3, 30_000, lr=1e-2, batch_size=256)
    summary = train.main(cfg, [clicks.sparse_rows], clicks.TASK)
    evaluations = log_rows(cfg.out_dir, "eval")
    assert [row["step"] for row in evaluations] == [118, 235]  # 117.2 and 234.4 batches
    assert all(row["val_n_labels"] == 30_000 for row in evaluations)
    day = np.load(cfg.data[0].replace("*", "day002"))
    best = roc_auc_score(day["label"], day["truth"])
    dense = roc_auc_score(day["label"], day["dense"] @ np.array(make_clicks.DENSE))
    assert best - 0.01 < evaluations[-1]["val_auc"] < best
    assert evaluations[-1]["val_auc"] > dense + 0.1
    assert 0.5 < evaluations[-1]["val_group_auc"] < best
    assert {"auc", "group_auc", "groups_left_out"} <= log_rows(cfg.out_dir, "log")[-1].keys()
    assert summary["step"] == 351


@pytest.mark.slow
def test_in_a_window_it_resumes_bit_exactly_over_4_devices(planted):
    """With tables split by rows, a run as it was within a day resumes bit-exactly.

    Break: tests/recipes/windows.py: data.shuffled(window_of * =>
    data.shuffled(time.time_ns() + window_of *
    """
    cfg = planted(rows=1500, save_every=5, dp=1, fsdp=4, log_every=5)
    summary = train.main(cfg, [clicks.sparse_rows, copy_at(9, cfg)], clicks.TASK)
    again = train.main(copy_of(cfg), [clicks.sparse_rows], clicks.TASK)
    assert_same_arrays(cfg, copy_of(cfg))
    assert again["val_auc"] == summary["val_auc"]
    item = summary["state"]["params"]["rows.item"]
    assert item.addressable_shards[0].data.shape == (2**10, 8)


@pytest.mark.slow
def test_a_day_that_appears_during_the_run_is_evaluated_and_then_trained_on(planted, tmp_path):
    """The run waits with one event; the next day is evaluated, and then trained on.

    Break: tests/recipes/windows.py: return () if name in names else => return
    """
    cfg = planted(1, 1024, wait_s=60.0, steps=10, epochs=0.0)
    events = []

    def note(event, row):
        events.append(event)
        if event == "out_of_data":
            threading.Timer(0.5, make_clicks.make_day, (
                tmp_path / "days/day001.npz", 1024, 1)).start()

    train.main(dataclasses.replace(cfg, steps=8), [note, clicks.sparse_rows], clicks.TASK)
    assert events.count("out_of_data") == 1 and events.count("dispatch") == 8
    waited, evaluated = events.index("out_of_data"), events.index("eval")
    assert events[:waited].count("dispatch") == 4 == events[:evaluated].count("dispatch")
    assert waited < evaluated
    events.clear()
    cfg = dataclasses.replace(cfg, out_dir=str(tmp_path / "twice"), wait_s=0.0, steps=12)
    train.main(cfg, [note, clicks.sparse_rows], clicks.TASK)
    assert events.count("eval") == 1 and events.count("window") == 3


def test_validation_data_are_all_files_of_all_globs(planted, tmp_path):
    """Each example of all globs once, day by day, each day sorted by user; files in both are named.

    Break: tests/recipes/clicks.py: [(str(file),) for file in val_files] => [(str(val_files[0]),)]
    """
    cfg = planted(4, 300, data=(str(tmp_path / "days/day003.npz"),), dtype="float32", val_data=(
        str(tmp_path / "days/day00[12].npz"), str(tmp_path / "days/*0.npz")))
    val = clicks.open_days(("val",), cfg)["val"][""]
    batches = [val["batch"](i, np.arange(256)) for i in range(4)]
    found = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    valid = np.arange(4 * 256) < 900
    assert val["n"] == 900 and (found["label"][~valid] == -1).all()
    days = [clicks.read_day(tmp_path / f"days/day00{day}.npz", cfg) for day in (1, 2, 0)]
    for name, x in found.items():
        expected = [day[name][np.lexsort((np.arange(300), *day["group"].T))] for day in days]
        np.testing.assert_array_equal(x[valid], np.concatenate(expected))
    named = dataclasses.replace(cfg, val_data=(f"a={cfg.val_data[0]}", f"b={cfg.val_data[1]}"))
    parts = clicks.open_days(("val",), named)["val"]
    assert {name: part["n"] for name, part in parts.items()} == {"a": 600, "b": 300}
    by_day = dataclasses.replace(cfg, data=(str(tmp_path / "days/day0{day}?.npz"),), rest_s=0.0)
    with pytest.raises(ValueError, match="npz: is in two sets, of data and val_data"):
        train.main(by_day, [clicks.sparse_rows], clicks.TASK)
    assert not (tmp_path / "out/metrics.jsonl").exists()
    source = clicks.open_days(("train",), dataclasses.replace(by_day, val_data=()))["train"]
    assert source["n"] == 1200 == source["batch"](0, np.arange(256))["label"].size + 944
    with pytest.raises(ValueError, match=r"none\*.npz': no such file, and no file matches it"):
        clicks.open_days(("val",), dataclasses.replace(cfg, val_data=("none*.npz",)))
    empty = tmp_path / "empty.npz"
    np.savez(empty, **{name: x[:0] for name, x in np.load(tmp_path / "days/day000.npz").items()})
    with pytest.raises(ValueError, match=r"empty.npz: no file here has an example"):
        clicks.open_days(("val",), dataclasses.replace(cfg, val_data=(str(empty),)))


@pytest.mark.parametrize("change, words", [
    (dict(label=np.int64([0, 1, 2, 0])), "label 2 of example 2: must be 0 or 1"),
    (dict(label=np.int64([[0], [1], [1], [0]])), r"label \(4, 1\): must be \[n\]"),
    (dict(user=None), "has no 'user'"),
    (dict(user=np.float64([1, 2, np.nan, 4])), "user has dtype float64: must be integers"),
    (dict(user=np.array([1, None, 2, 3])), "user cannot be read; .*as an array of numbers: Object"),
    (dict(user=np.arange(3)), r"user \(3,\): must be \(4, 1\)"),
    (dict(item=np.int64([1, 2, 3, 99])), "item 99 of example 3: .*below 64,.*--no_hash_ids"),
    (dict(dense=np.full((4, 4), 1e99)), "dense 1e.99 of example 0, column 0: must be finite"),
    (dict(history_n=np.int64([0, 1, 2, 3])), "history_n 3 of example 3: must be from 0 to 2"),
    (lambda content: content[: len(content) // 2], "cannot be read; write it again with np.savez"),
])
def test_a_malformed_day_is_rejected(tmp_path, change, words):
    """The error names file, array, value and rule; ids beyond NAME_n may have any value.

    Break: tests/recipes/clicks.py: config.raise_if_errors(errors, path) => pass
    """
    cfg = clicks.ClicksConfig(tables=("user=64", "item=64", "history=64:2"), hash_ids=False)
    day = dict(label=np.int64([0, 1, 1, 0]), dense=np.zeros((4, 4)), user=np.arange(4),
               item=np.arange(4), history=np.array([[1, 99]] * 4), history_n=np.ones(4, int))
    path = tmp_path / "day.npz"
    np.savez(path, **day, truth=np.array([None] * 4))  # an array that nothing reads
    assert clicks.read_day(path, cfg)["history"].tolist() == [[1, 64]] * 4
    np.savez(tmp_path / "none.npz", **{name: x[:0] for name, x in day.items()})
    assert clicks.read_day(tmp_path / "none.npz", cfg)["history"].shape == (0, 2)
    if callable(change):
        path.write_bytes(change(path.read_bytes()))
    else:
        np.savez(path, **{name: x for name, x in (day | change).items() if x is not None})
    with pytest.raises(ValueError, match=f"(?s)day.npz: .*{words}"):
        clicks.read_day(str(path), cfg)


def test_clicks_at_the_command_line(tmp_path, cache_dir, capsys):
    """A run prints the metrics of its evaluations; a bad day or value is an error of one sentence.

    Break: train.py: metric not in ("step", "val_loss")) => metric != "val_loss")[:2]
    """
    days = str(tmp_path / "days/*.npz")
    make_clicks.main(tmp_path / "days", 2, 5000)
    bad = str(tmp_path / "gap.npz")
    day = dict(np.load(tmp_path / "days/day000.npz"))
    np.savez(bad, **day | {"user": np.where(np.arange(5000) == 7, np.nan, day["user"])})

    def call(*flags):
        flags = ["--out_dir", str(tmp_path / "out"), "--cache_dir", cache_dir, "--tables", *SMALL,
                 *flags]
        code = train.cli(flags, [clicks.sparse_rows], clicks.TASK, clicks.ClicksConfig)
        return code, capsys.readouterr()

    code, printed = call("--data", days)
    assert code == 0 and "done: all 9 steps are done" in printed.out
    assert re.search(r"step      9  .*validation loss \d\.\d{4}  of step 5", printed.out)
    assert re.search(r"validation loss \d\.\d{4}  .*auc 0\.\d+  group_auc 0\.\d+", printed.out)
    for flags, words in (
            (["--data", bad], "gap.npz: user has dtype float64: must be"),
            (["--data", days, "--val_data", bad], "gap.npz: user has dtype float64: must be"),
            (["--data", days, "--group", "usr"], "each once, with group 'usr' among them")):
        code, printed = call(*flags, "--resume", "overwrite")
        assert code == 2 and words in printed.err and "Traceback" not in printed.err


def test_an_evaluation_in_microbatches_splits_few_groups(planted, tmp_path):
    """Four microbatches of sorted examples divide at most three groups.

    Break: tests/recipes/clicks.py: (rows % A) * (batch_size // A) + rows // A => rows
    """
    day = str(tmp_path / "days/day000.npz")
    cfg = planted(1, 300, data=(), val_data=(day,), batch_size=64)
    users = {}
    for A in (1, 4):
        source = clicks.open_days(("val",), dataclasses.replace(cfg, grad_accum_steps=A))["val"][""]
        batch_users = source["batch"](0, np.arange(64))["user"][:, 0]
        users[A] = [batch_users[part::A].tolist() for part in range(A)]
    assert [user for part in users[4] for user in part] == users[1][0]
    assert sum(len(set(part)) for part in users[4]) <= len(set(users[1][0])) + 3
    cfg = dataclasses.replace(cfg, grad_accum_steps=4, eval_batch_size=32)
    whole = clicks.open_days(("val",), cfg)["val"][""]["batch"](0, np.arange(64))
    assert whole["user"][:, 0].tolist() == users[1][0]


@pytest.mark.parametrize("changes", [
    dict(batch_size=768), dict(batch_size=256, grad_accum_steps=4, dp=4, fsdp=2)], ids=str)
def test_the_examples_of_an_evaluation_are_those_of_the_days(changes, planted, tmp_path):
    """Each has its label, probability and group. Their AUC, and in one batch their grouped AUC, are
    those of the evaluation.

    Break: tests/recipes/clicks.py: end - len(order) + order for => order for
    """
    files = [tmp_path / f"days/day{i:03}.npz" for i in range(2)]
    cfg = planted(2, 350, mode="eval", data=(), val_data=tuple(map(str, files)), **changes,
                  examples_file=str(tmp_path / "examples.jsonl"))
    days = [np.load(file) for file in files]
    label, user, item = (np.concatenate([day[name] for day in days])
                         for name in ("label", "user", "item"))
    # The logit is in the middle of a bin, and depends on the item.
    table = clicks.table(cfg)
    params = {name: np.zeros(row["shape"], np.float32) for name, row in table.items()}
    random = np.random.default_rng(0)
    params["rows.item"][:, 0] = random.normal(size=2**12).round(1) + 0.005
    row_of_item = data.hash64(item, np.uint64(1)) % np.uint64(2**12)
    logit = params["rows.item"][row_of_item, 0].astype(np.float64)

    summary = train.main(cfg, (), clicks.TASK, params=params)
    lines = (tmp_path / "examples.jsonl").read_text().splitlines()
    found = {name: [json.loads(line)[name] for line in lines]
             for name in ("set", "id", "label", "score", "group")}
    assert found["set"] == [""] * 700 and found["id"] == [*range(700)]
    assert found["label"] == label.tolist() and found["group"] == user.tolist()
    np.testing.assert_allclose(found["score"], 1 / (1 + np.exp(-logit)), rtol=1e-6)
    label, score = np.array(found["label"]), np.array(found["score"])
    assert summary["val_auc"] == pytest.approx(roc_auc_score(label, score), abs=1e-6)
    if cfg.batch_size > 700:
        groups = [user == u for u in np.unique(user)]
        groups = [rows for rows in groups if len({*label[rows]}) == 2]
        grouped = np.average([roc_auc_score(label[rows], score[rows]) for rows in groups],
                             weights=[rows.sum() for rows in groups])
        assert summary["val_group_auc"] == pytest.approx(grouped, abs=1e-6)


@pytest.mark.parametrize("tables", [
    ("user",), ("user=abc",), ("user=0",), ("user=2^40",), ("user=9", "user=8"), ("item=9",),
    ("user=9:0",), ("user=9", "label=9")])
def test_malformed_tables_are_rejected(tables):
    """The error names the value.

    Break: tests/recipes/clicks.py: config.parse_number(rows, int) =>
    config.parse_number(rows or "1", int)
    """
    with pytest.raises(ValueError, match="tables: .*must be NAME=ROWS|is not a number"):
        clicks.sizes(clicks.ClicksConfig(tables=tables))


def test_parquet_gives_the_arrays_of_npz(planted, tmp_path):
    """Lists of ids may be shorter than their table is wide; nulls are refused.

    Break: tests/recipes/clicks.py: arrays[f"{name}_n"] = counts => pass
    """
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    cfg = planted(1, 200)
    day = dict(np.load(cfg.data[0].replace("*", "day000")))
    counts = day.pop("history_n")
    columns = {name: x.tolist() for name, x in day.items()}
    columns["history"] = [ids[:n] for ids, n in zip(columns["history"], counts)]
    ids = pa.uint64()
    types = {"user": ids, "item": ids, "category": ids, "history": pa.list_(ids),
             "dense": pa.list_(pa.float32(), 4)}
    columns = {name: pa.array(x, types.get(name)) for name, x in columns.items()}
    path = tmp_path / "day.parquet"
    parquet.write_table(pa.table(columns), path, row_group_size=64)
    wanted = clicks.read_day(cfg.data[0].replace("*", "day000"), cfg)
    found = clicks.read_day(path, cfg)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name].dtype == x.dtype and np.array_equal(found[name], x), name
    columns["user"] = pa.array([None] * 200, pa.uint64())
    parquet.write_table(pa.table(columns), path)
    with pytest.raises(ValueError, match="day.parquet: user has nulls; replace them"):
        clicks.read_day(path, cfg)


# ---- sparse rows

# Two tables of 8 rows. Two arrays of the batch have ids of "near", one has ids of "far".

TWO_TABLES = {"near": dict(shape=(8, 4), spec=P("fsdp"), init=("normal", 0.5)),
          "far": dict(shape=(8, 4), spec=P("fsdp"), init=("normal", 0.5)),
          "w": dict(shape=(4,), spec=P(), init=("normal", 0.5))}
IDS = {"a": np.int32([1, 1, 6, 1, 1, 6, 1, 1]), "c": np.int32([7, 0, 0, 7, 0, 0, 7, 7]),
       "bag": np.int32([[1, 8], [2, 2], [8, 8], [6, 1], [8, 8], [8, 1], [2, 6], [1, 8]])}  # 8: none


def only_rows(**ids):
    """An override that makes a step train only the rows of these parameters that a batch names."""
    def override(name, value):
        return partial(clicks.sparse_step, value, ids) if name == "train_step" else value
    return override


NAMED = only_rows(near=("a", "bag"), far=("c",))


def init_sparse(key, cfg):
    return model.init(key, cfg, TWO_TABLES)


def sparse_loss(params, batch, cfg):
    def row(name, ids):
        return params[name].at[ids].get(mode="fill", fill_value=0)

    x = row("near", batch["a"]) + row("near", batch["bag"]).sum(axis=1) + row("far", batch["c"])
    y = jnp.tanh(x) @ params["w"]
    return {"objective": (y**2).sum()}, {"objective": jnp.float32(len(y))}


def parts_of(state, name):
    """A table and its two moments."""
    adam = state["opt"][0]
    return [np.asarray(x[name]) for x in (state["params"], adam.mu, adam.nu)]


@pytest.mark.slow
def test_sparse_rows_equal_a_dense_step_in_the_rows_of_the_batch():
    """Over 1, 2 and 8 devices and in microbatches; other rows are bit-identical.

    Break: tests/recipes/clicks.py: jnp.diff(sorted_ids, prepend=-1) != 0 =>
    jnp.diff(sorted_ids, prepend=-1) > 1
    """
    cfg = dataclasses.replace(BASE, clip_norm=0.0, weight_decay=0.3, eps=1e-6)
    model_of = TWO_TABLES, sparse_loss, init_sparse
    dense, first, _ = compiled(cfg, IDS, *model_of, jax.devices()[:1])
    on_one = jax.tree.map(lambda x: x.sharding, first)
    one = step.make_mesh(cfg, jax.devices()[:1])
    for n, micro in ((1, 1), (2, 1), (8, 1), (2, 4)):
        each = dataclasses.replace(cfg, grad_accum_steps=micro)
        mesh = step.make_mesh(each, jax.devices()[:n])
        steps, state, _ = compiled(each, IDS, *model_of, jax.devices()[:n], NAMED)
        for batch in (IDS, IDS | {"a": np.int32([2, 3, 2, 3, 2, 2, 2, 2])}):
            before = host(state)
            expected, _ = dense["train_step"](jax.device_put(before, on_one), place(batch, one))
            state, metrics = steps["train_step"](state, place(batch, mesh))
            assert float(metrics["finite"])
            named = {"near": np.union1d(batch["a"], batch["bag"]), "far": batch["c"], "w": range(4)}
            for name, rows in named.items():
                rows = np.setdiff1d(rows, [8])
                for old, want, new in zip(*(parts_of(x, name) for x in (before, expected, state))):
                    np.testing.assert_allclose(new[rows], want[rows], rtol=2e-5, atol=1e-6)
                    assert np.array_equal(np.delete(new, rows, 0), np.delete(old, rows, 0))


@pytest.mark.parametrize("n", [1, 8])
def test_no_part_of_a_step_is_as_large_as_a_sparse_table(n):
    """In the compiled program only reads and writes of rows in place have a table's shape.

    Break: tests/recipes/clicks.py: tree_map_with_path(scatter, state, new_rows) =>
    tree_map_with_path(scatter, jax.tree.map(lambda x: x + jnp.ones((), x.dtype), state), new_rows)
    """
    def temporaries(rows):
        table = {"t": dict(shape=(rows, 4), spec=P("fsdp"), init=("normal", 0.5))}
        cfg = dataclasses.replace(BASE, weight_decay=0.1)
        mesh = step.make_mesh(cfg, jax.devices()[:n])
        steps = step.lower_steps(
            cfg, mesh, table, lambda params, batch, cfg: (
                {"objective": (params["t"][batch["a"]] ** 2).sum()}, {"objective": jnp.float32(8)}),
            lambda key, cfg: model.init(key, cfg, table), batch_structs({"a": IDS["a"]}, mesh),
            only_rows(t=("a",)))
        program = steps["lower_train_step"]().compile()
        shapes = f"f32[{rows},4]", f"f32[{rows // n},4]"
        made = [line.split(" = ")[1] for line in program.as_text().splitlines() if " = " in line]
        made = {line.split("(")[0].split()[-1] for line in made if line.startswith(shapes)}
        assert made == {"parameter", "scatter", "fusion"}  # a fusion of these: others would show
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(2**20) == temporaries(2**14) < 2**16


def test_shared_ids_and_optimizers_that_mix_rows_are_refused():
    """The error names the array, or the parameter and the optimizers to take instead.

    Break: tests/recipes/clicks.py: assert not {*names} & {*indices}, => assert True,
    """
    with pytest.raises(AssertionError, match="ids .'a',.: other ids share one"):
        compiled(BASE, IDS, TWO_TABLES, sparse_loss, init_sparse, jax.devices()[:1],
                 only_rows(near=("a", "bag"), far=("a",)))
    cfg = dataclasses.replace(BASE, optimizer="adafactor")
    with pytest.raises(ValueError, match="far: has moments of another shape"):
        compiled(cfg, IDS, TWO_TABLES, sparse_loss, init_sparse, jax.devices()[:1], NAMED)
