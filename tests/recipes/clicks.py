# SPDX-License-Identifier: Apache-2.0
"""A click model, day by day, with hashed tables of which a step touches only the rows of its batch.

python tests/recipes/clicks.py --data 'out/days/*.npz'  # make_clicks.py can write such files

A day is an .npz or .parquet file, or several: see windows.py. A file has "label" [n] of 0 and 1,
"dense" [n, n_dense], and for each --tables entry NAME=ROWS:VALUES an array NAME [n, VALUES] of
64-bit ids. NAME_n [n] is optional: the number of ids of each example that count. In a .parquet file
arrays are columns of numbers, or of lists of numbers. A list of ids may be shorter than VALUES: its
length takes the place of NAME_n.
"""
import sys
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # windows.py stands there

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import windows
from train import config, data


@dataclass(frozen=True, kw_only=True)
class ClicksConfig(windows.WindowsConfig):
    # embedding tables as NAME=ROWS or NAME=ROWS:VALUES, with VALUES ids per example
    tables: tuple[str, ...] = ("user=2^17", "item=2^20", "category=2^10", "history=2^20:4")
    hash_ids: bool = True  # hash 64-bit ids to rows of the tables; false: ids are row numbers
    dim: config.PosInt = 8  # width of a table
    d_hidden: config.PosInt = 64  # width of the hidden layer
    n_dense: config.PosInt = 4  # number of dense features
    group: str = "user"  # table by whose ids the grouped AUC groups examples
    val_frac: config.FractionBelow1 = 0.0  # fraction of data for validation; 0: the next day
    eval_every: config.Interval = 0  # interval between evaluations, besides one after each day
    eval_batches: config.NonNegInt = 0  # batches per evaluation; 0: all of the next day
    epochs: config.NonNegFloat = 1.0  # passes over the training data
    batch_size: config.PosInt = 1024  # examples per step
    lr: config.LearningRate = 3e-3  # peak learning rate
    schedule: str = "cosine"  # learning rate after warm-up


# ---- the model

def sizes(cfg):
    """{name: (rows of the table, ids per example)}"""
    found = {}
    is_legal = True
    for entry in cfg.tables:
        name, _, numbers = entry.partition("=")
        rows, colon, values = numbers.partition(":")
        n_rows = config.parse_number(rows, int)
        n_values = 1
        if colon:
            n_values = config.parse_number(values, int)
        is_taken = name in found or name in ("label", "dense", "group")
        if is_taken or not 0 < n_rows < 2**31 or n_values < 1:
            is_legal = False
        found[name] = (n_rows, n_values)
    if not is_legal or cfg.group not in found:
        config.raise_if_errors([
            f"{' '.join(cfg.tables)}: must be NAME=ROWS or NAME=ROWS:VALUES, each once, with group "
            f"{cfg.group!r} among them"], "tables")
    return found


def table(cfg):
    rows = {}
    for name, (n_rows, _) in sizes(cfg).items():
        rows[f"rows.{name}"] = dict(shape=(n_rows, cfg.dim), spec=P("fsdp"), init=("normal", 0.01),
                                    decay_mult=0)
    n_features = len(rows) * cfg.dim + cfg.n_dense
    F = cfg.d_hidden
    rows["tower.w1"] = dict(shape=(n_features, F), spec=P(), init=("normal", n_features**-0.5))
    rows["tower.b1"] = dict(shape=(F,), spec=P(), init=("constant", 0.0))
    rows["tower.w2"] = dict(shape=(F,), spec=P(), init=("normal", F**-0.5))
    return rows


def loss(params, batch, cfg, examples=False):
    """Binary cross-entropy of a wide and deep model (Cheng et al. 2016, arXiv:1606.07792).

    examples: return the logits too.
    """
    features = [batch["dense"]]
    logit_B = 0.0
    for name in sizes(cfg):
        # Padding ids are beyond the table: their embedding is 0.
        embedding = params[f"rows.{name}"].at[batch[name]].get(mode="fill", fill_value=0)
        embedding = embedding.sum(axis=1)
        features.append(embedding)
        logit_B += embedding[:, 0]  # the wide part
    features = jnp.concatenate(features, 1)
    h_BF = jax.nn.relu(features @ params["tower.w1"] + params["tower.b1"][None])
    logit_B += h_BF @ params["tower.w2"]

    # Evaluation pads its last batch with labels of -1.
    label_B = batch["label"]
    valid_B = label_B >= 0
    nll_B = jax.nn.softplus(logit_B) - logit_B * label_B
    nll = jnp.where(valid_B, nll_B, 0).sum()
    n = valid_B.sum(dtype=jnp.float32)

    # Totals for the AUC: a histogram of logits by label, and sums over groups. Bins of the logit,
    # since the probabilities of rare clicks are all close to 0.
    bin_B = ((jnp.clip(logit_B, -20, 20) + 20) * 100).astype(jnp.int32)
    by_score = jnp.zeros((2, 4001)).at[label_B, bin_B].add(valid_B)
    by_group = group_auc(batch["group"], label_B, logit_B)
    sums = {"objective": nll, "loss": nll, "by_score": by_score, "by_group": by_group}
    # A count of 0 makes a sum a total instead of a mean.
    counts = {"objective": n, "loss": n, "by_score": 0.0, "by_group": 0.0}
    if examples:
        return sums, counts, {"logit": logit_B}
    return sums, counts


def batch_shapes(cfg):
    B = cfg.batch_size
    rows = P(("dp", "fsdp", "ep"))
    shapes = {}
    for name, (_, n_values) in sizes(cfg).items():
        shapes[name] = ((B, n_values), np.int32, rows)
    shapes["label"] = ((B,), np.int32, rows)
    shapes["dense"] = ((B, cfg.n_dense), np.float32, rows)
    # The 64-bit id in the array cfg.group, as two halves: low, high.
    shapes["group"] = ((B, 2), np.uint32, rows)
    return shapes


# ---- sparse rows

# A step reads and writes only the rows of the tables, and of their moments, that its batch looks
# up, so its time does not depend on the sizes of the tables. An id that is the table's size or more
# is padding: its row is zeros and is never written.

def sparse_rows(event, value):
    """A hook: train only the rows of the tables "rows.NAME" that the ids in batch[NAME] look up."""
    def step(state, batch, lr):
        names = [name for name in state["params"] if name.startswith("rows.")]
        ids = {name: (name.removeprefix("rows."),) for name in names}
        return sparse_step(value, ids, state, batch, lr)

    if event == "train_step":
        return step


def sparse_step(train_step, ids, state, batch, lr):
    """train_step with only the rows that a batch looks up. ids: {parameter: names of the arrays of
    the batch that hold indices into it}.
    """
    row_ids, batch = find_rows(batch, ids)

    def table_of(path):
        """The table to which a leaf of the state belongs, or None."""
        found = [entry.key for entry in path if getattr(entry, "key", None) in row_ids]
        return found[0] if found else None

    def gather(path, x):
        name = table_of(path)
        if name is None:
            return x
        if x.shape != state["params"][name].shape:
            raise ValueError(f"{name}: has moments of another shape, {x.shape}; take adamw, lion, "
                             "rmsprop or sgd, which keep a row for each")
        return x.at[row_ids[name]].get(mode="fill", fill_value=0)

    def scatter(path, x, new):
        name = table_of(path)
        if name is None:
            return new
        return x.at[row_ids[name]].set(new, mode="drop")

    rows = jax.tree_util.tree_map_with_path(gather, state)
    new_rows, metrics = train_step(rows, batch, lr)
    return jax.tree_util.tree_map_with_path(scatter, state, new_rows), metrics


def find_rows(batch, ids):
    """({parameter: row ids}, batch with indices into these). There are as many row ids as ids in
    the batch. Of equal ids, only the first is kept; the others become padding.

    Asserts that parameters with different ids share no array of the batch.
    """
    padding = jnp.int32(2**31 - 1)
    row_ids, indices = {}, {}
    for names in dict.fromkeys(ids.values()):
        assert not {*names} & {*indices}, f"ids {names}: other ids share one; give these a copy"
        sorted_ids = jnp.sort(jnp.concatenate([batch[name].ravel() for name in names]))
        is_first = jnp.diff(sorted_ids, prepend=-1) != 0
        first_ids = jnp.where(is_first, sorted_ids, padding)
        for parameter in ids:
            if ids[parameter] == names:
                row_ids[parameter] = first_ids
        for name in names:
            indices[name] = jnp.searchsorted(sorted_ids, batch[name])
    return row_ids, batch | indices


# ---- metrics

def group_auc(group_B2, label_B, score_B):
    """[sum over groups of examples x AUC, examples in groups with both labels, groups, groups with
    one label]
    """
    def counts_by_group(tie_order):
        """For each group: clicks, other examples, and pairs in which the click ranks higher.

        tie_order 1 ranks clicks above other examples of the same score, -1 below.
        """
        keys = (group_B2[:, 1], group_B2[:, 0], score_B, tie_order * label_B)
        high, low, _, label = jax.lax.sort(keys, num_keys=4)
        is_click = label == tie_order
        is_other = label == 0
        n_lower = is_click * is_other.cumsum()
        rows = jnp.stack([is_click, is_other, n_lower], 1)
        is_next_group = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        index = jnp.pad(is_next_group, (1, 0)).cumsum()
        return jax.ops.segment_sum(rows, index, len(rows)).T

    clicks, others, most = counts_by_group(1)
    _, _, least = counts_by_group(-1)
    n = clicks + others
    pairs = clicks * others
    # The counts of others run on from group to group: subtract those of earlier groups.
    n_won = (most + least) / 2 - clicks * (others.cumsum() - others)
    auc = n_won / jnp.maximum(pairs, 1)
    return jnp.float32([(n * auc).sum(), (n * (pairs > 0)).sum(), (n > 0).sum(),
                        ((n > 0) & (pairs == 0)).sum()])


def metrics(means, source):
    """"auc", and "group_auc" as a mean over examples. Neither exists with examples of one label."""
    total, n_examples, groups, one_label = means["by_group"].tolist()
    found = {"groups": groups, "groups_left_out": one_label}
    others, clicks = np.float64(means["by_score"])
    pairs = others.sum() * clicks.sum()
    if pairs:
        n_lower = others.cumsum() - others / 2
        found["auc"] = (clicks * n_lower).sum() / pairs
    if n_examples:
        found["group_auc"] = total / n_examples
    return found


# ---- the data

def read_day(path, cfg):
    """{name: array} of all examples of a file, in the dtypes of batch_shapes.

    Raises ValueError with all errors of the file.
    """
    names = ["label", "dense", *sizes(cfg)]
    counts = [f"{name}_n" for name in sizes(cfg)]
    day = read_arrays(path, [*names, *counts], sizes(cfg))
    config.raise_if_errors([f"has no {name!r}" for name in sorted(names) if name not in day], path)
    errors = dtype_and_shape_errors(day, cfg)
    if not errors:
        errors = value_errors(day, cfg)
    config.raise_if_errors(errors, path)

    for i, (name, (n_rows, n_values)) in enumerate(sizes(cfg).items()):
        ids = np.uint64(day[name]).reshape(-1, n_values)  # [n] becomes [n, 1]
        is_used = used_ids(day, name, n_values)
        if name == cfg.group:
            group = np.where(is_used, ids, np.uint64(2**64 - 1))[:, :1]
            day["group"] = np.ascontiguousarray(group, "<u8").view("<u4")
        if cfg.hash_ids:
            ids = data.hash64(ids, np.uint64(i)) % np.uint64(n_rows)
        day[name] = np.where(is_used, ids, n_rows)  # n_rows: padding
    return {name: day[name].astype(dtype) for name, (_, dtype, _) in batch_shapes(cfg).items()}


def read_files(paths, cfg):
    """read_day of several files, joined."""
    parts = [read_day(path, cfg) for path in paths]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def read_arrays(path, names, tables):
    """{name: array} of these names, as far as a file has them. tables: as of `sizes`. Raises
    ValueError for a file or an array that cannot be read.
    """
    if str(path).endswith(".parquet"):
        return read_columns(path, names, tables)
    arrays = {}
    with data.as_value_error(f"{path}: cannot be read; write it again with np.savez", Exception):
        archive = np.load(path)
    with archive:
        for name in names:
            if name in archive.files:
                # An array of Python objects and a corrupted file raise many kinds of exceptions.
                with data.as_value_error(f"{path}: {name} cannot be read; write it again with "
                                         "np.savez, as an array of numbers", Exception):
                    arrays[name] = np.asarray(archive[name])
    return arrays


def read_columns(path, names, tables):
    """read_arrays of a parquet file. Lists of ids are padded, and NAME_n is their lengths."""
    parquet = data.require("pyarrow.parquet", path)
    with data.as_value_error(f"{path}: cannot be read as parquet", Exception):
        present = parquet.read_schema(path).names
        found = parquet.read_table(path, columns=[name for name in names if name in present])
    arrays = {}
    for name in found.column_names:
        column = found[name].combine_chunks()
        counts = None
        if column.type.num_fields:  # a list for each example
            counts = np.asarray(column.value_lengths())
        values = column if counts is None else column.flatten()
        if column.null_count or values.null_count:
            config.raise_if_errors([f"{name} has nulls; replace them, as by an id of their own"],
                                   path)
        values = values.to_numpy(zero_copy_only=False)
        if counts is None:
            arrays[name] = values
            continue
        # Lists become rows of one length. Of other arrays than ids, all lists must have it.
        width = max(counts.max(initial=0), tables.get(name, (0, 0))[1])
        is_used = np.arange(width) < counts[:, None]
        if name not in tables and not is_used.all():
            config.raise_if_errors([f"{name} has lists of different lengths"], path)
        arrays[name] = np.zeros(is_used.shape, values.dtype)
        arrays[name][is_used] = values
        if name in tables:
            arrays[f"{name}_n"] = counts
    return arrays


def dtype_and_shape_errors(day, cfg):
    """Errors of arrays with another dtype or shape than batch_shapes has."""
    label = day["label"]
    if label.ndim != 1:
        return [f"label {label.shape}: must be [n], one label for each example"]
    shapes = {name: (len(label), *shape[1:]) for name, (shape, _, _) in batch_shapes(cfg).items()}
    errors = []
    for name, x in sorted(day.items()):
        is_number = name in ("label", "dense")
        if is_number and x.dtype.kind not in "biuf":
            errors.append(f"{name} has dtype {x.dtype}: must be numbers, as float32")
        elif not is_number and x.dtype.kind not in "iu":
            errors.append(f"{name} has dtype {x.dtype}: must be integers, as int64 or "
                          "uint64. Map other ids to integers, for example by a hash, and a "
                          "missing id to an integer of its own")
        # Counts are [n]; so may be the ids of a table with one id for each example.
        wanted = shapes.get(name, label.shape)
        if x.shape != wanted and ((*x.shape, 1) != wanted or is_number):
            errors.append(f"{name} {x.shape}: must be {wanted}")
    return errors


def value_errors(day, cfg):
    """Errors of labels, dense features, counts and ids. The first wrong value of each is named."""
    errors = []
    is_label = (day["label"] == 0) | (day["label"] == 1)
    for i in np.flatnonzero(~is_label)[:1]:
        errors.append(f"label {day['label'][i]} of example {i}: must be 0 or 1")
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(day["dense"].astype(np.float32))
    for i, j in np.argwhere(~is_finite)[:1]:
        errors.append(f"dense {day['dense'][i, j]} of example {i}, column {j}: must be finite in "
                      "float32; replace it by a number, such as 0")
    for name, (n_rows, n_values) in sizes(cfg).items():
        count = day.get(f"{name}_n", np.zeros(0, int))
        for i in np.flatnonzero((count < 0) | (count > n_values))[:1]:
            errors.append(f"{name}_n {count[i]} of example {i}: must be from 0 to {n_values}, the "
                          f"width of {name}")
        if cfg.hash_ids:
            continue
        ids = day[name].reshape(-1, n_values)
        is_outside = ((ids < 0) | (ids >= n_rows)) & used_ids(day, name, n_values)
        for i, j in np.argwhere(is_outside)[:1]:
            errors.append(f"{name} {ids[i, j]} of example {i}: must be at least 0 and below "
                          f"{n_rows}, a row of its table; remove --no_hash_ids")
    return errors


def used_ids(day, name, n_values):
    """Which ids of a table count: [n, n_values], or [1, n_values] where all examples are alike."""
    n_used = day.get(f"{name}_n", np.full(1, n_values))
    return np.arange(n_values) < n_used[:, None]


def open_days(parts, cfg):
    """Training data day by day. Validation data are --val_data, or else the next day."""
    val_sets = data.named_sets(cfg.val_data)  # the name of one without a name is ""
    data.check_disjoint({"data": {"": windows.globs(cfg)}, "val_data": val_sets})
    day_of = lru_cache(4)(partial(read_files, cfg=cfg))

    def size_of(files):
        return len(day_of(files)["label"])

    def read(files, examples):
        return {key: x[examples] for key, x in day_of(files).items()}

    def open_val_files(patterns):
        val_files = data.expand(patterns, field="val_data")
        source = open_val([(str(file),) for file in val_files], day_of, cfg)
        if not source["n"]:
            config.raise_if_errors(
                ["no file here has an example"], f"val_data {' '.join(patterns)}")
        return source

    val = {name: open_val_files(files) for name, files in val_sets.items()}
    if "train" not in parts:
        return {"train": None, "val": val}
    days = windows.in_windows(cfg, size_of, read)
    next_day = windows.next_of(days, lambda files: open_val([files], day_of, cfg))
    return {"train": days, "val": val or next_day}


def open_val(days, day_of, cfg):
    """A source of these days, one after the other, each sorted by group. days: tuples of files.

    A group that two batches, or two microbatches, divide is ranked in each of them separately.
    """
    orders = [np.lexsort(day_of(files)["group"].T) for files in days]
    ends = np.cumsum([len(order) for order in orders])
    n = int(ends[-1])
    ids = np.concatenate([end - len(order) + order for end, order in zip(ends, orders)])

    def positions_of(index, rows, batch_size):
        # A step puts row b into microbatch b mod A. Give each microbatch neighbours.
        A = 1 if cfg.eval_batch_size else cfg.grad_accum_steps
        return index * batch_size + (rows % A) * (batch_size // A) + rows // A

    def batch(index, rows, batch_size=cfg.batch_size):
        positions = positions_of(index, rows, batch_size)
        # Read day by day, in ascending order of positions. Beyond the end repeat the last example.
        by_position = positions.argsort()
        ascending = np.minimum(positions[by_position], n - 1)
        day_index = np.searchsorted(ends, ascending, side="right")
        pieces = []
        for i in np.unique(day_index):
            offsets = ascending[day_index == i] - ends[i] + len(orders[i])
            examples = orders[i][offsets]
            pieces.append({key: x[examples] for key, x in day_of(days[i]).items()})
        back = by_position.argsort()
        found = {}
        for key in pieces[0]:
            found[key] = np.concatenate([piece[key] for piece in pieces])[back]
        found["label"] = np.where(positions < n, found["label"], -1)
        return found

    def examples(index, values):
        """The values per example of a batch. An id is an index into all files, joined."""
        rows = np.arange(len(values["logit"]))
        positions = positions_of(index, rows, len(rows))
        is_real = positions < n  # not padding
        found = {name: x[is_real] for name, x in batch(index, rows, len(rows)).items()}
        logit = np.float64(values["logit"][is_real])
        return {"id": ids[positions[is_real]], "label": found["label"],
                "score": 1 / (1 + np.exp(-logit)), "group": found["group"].view("<u8")[:, 0]}

    return {"n": n, "batch": batch, "examples": examples}


TASK = {"table": table, "loss": loss, "batch": batch_shapes, "open": open_days, "metrics": metrics}

if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], [sparse_rows], TASK, ClicksConfig))
