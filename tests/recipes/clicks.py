# SPDX-License-Identifier: Apache-2.0
"""A click model, day by day: hashed tables of which an update touches only the rows of its batch.

python tests/recipes/clicks.py --data 'out/days/*.npz'  # which make_clicks.py can write

A day is an .npz file: "label" [n] of 0 and 1, "dense" [n, n_dense], and for each --tables entry
NAME=ROWS:VALUES 64-bit ids NAME [n, VALUES]; if "NAME_n" [n] is there, so many of each are used."""
import sys
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from train import config, data


@dataclass(frozen=True, kw_only=True)
class ClicksConfig(config.Config):
    tables: tuple[str, ...] = ("user=2^17", "item=2^20", "category=2^10", "history=2^20:4")
    hash_ids: bool = True  # rows of tables are hashes of 64-bit ids; false: they are the ids
    dim: config.PosInt = 8  # width of a row
    d_hidden: config.PosInt = 64  # width of the tower
    n_dense: config.PosInt = 4  # width of "dense"
    group: str = "user"  # column of the grouped AUC: each row of its table is a group
    out_dir: str = "out/clicks"  # folder of this run
    order: str = "windows"
    val_frac: config.FractionBelow1 = 0.0
    eval_every: config.Interval = 0  # besides after each day
    eval_batches: config.NonNegInt = 0  # of the next day; 0: all
    epochs: config.NonNegFloat = 1.0
    batch_size: config.PosInt = 1024  # rows of an update
    lr: config.LearningRate = 3e-3
    schedule: str = "cosine"


def sizes(cfg):
    """{name: (rows of the table, values in an example)}"""
    found = {name: tuple(config.parse_number(n, int) for n in f"{text}:1".split(":")[:2])
             for name, _, text in (x.partition("=") for x in cfg.tables)}
    fit = len(found) == len(cfg.tables) and all(0 < n < 2**31 for n, _ in found.values())
    config.raise_if_errors([] if fit and cfg.group in found else [
        f"{' '.join(cfg.tables)}: must be NAME=ROWS or NAME=ROWS:VALUES, each once, with group "
        f"{cfg.group!r} among them"], "tables")
    return found


def table(cfg):
    wide, F = len(sizes(cfg)) * cfg.dim + cfg.n_dense, cfg.d_hidden
    rows = {f"rows.{name}": dict(shape=(n, cfg.dim), spec=P("fsdp"), init=("normal", 0.01),
                                 decay_mult=0, ids=(name,)) for name, (n, _) in sizes(cfg).items()}
    return rows | {"tower.w1": dict(shape=(wide, F), spec=P(), init=("normal", wide**-0.5)),
                   "tower.b1": dict(shape=(F,), spec=P(), init=("constant", 0.0)),
                   "tower.w2": dict(shape=(F,), spec=P(), init=("normal", F**-0.5))}


def loss(params, batch, cfg):
    """Binary cross-entropy; a wide and deep model (Cheng et al. 2016, arXiv:1606.07792)."""
    features, logit_B = [batch["dense"]], 0.0
    for name in sizes(cfg):
        e = params[f"rows.{name}"].at[batch[name]].get(mode="fill", fill_value=0)  # padding: 0
        features.append(e.sum(axis=1))
        logit_B += features[-1][:, 0]  # the wide part
    h_BF = jax.nn.relu(jnp.concatenate(features, 1) @ params["tower.w1"] + params["tower.b1"][None])
    logit_B += h_BF @ params["tower.w2"]
    label_B, valid_B = batch["label"], batch["label"] >= 0  # evaluation pads
    nll = jnp.where(valid_B, jax.nn.softplus(logit_B) - logit_B * label_B, 0).sum()
    n, bin_B = valid_B.sum(dtype=jnp.float32), (jax.nn.sigmoid(logit_B) * 199.99).astype(jnp.int32)
    by_score = jnp.zeros((2, 200)).at[label_B, bin_B].add(valid_B)
    sums = {"objective": nll, "loss": nll, "by_score": by_score,
            "by_group": group_auc(batch[cfg.group][:, 0], label_B, logit_B)}
    return sums, {"objective": n, "loss": n, "by_score": 0.0, "by_group": 0.0}  # 0: a total


def group_auc(group_B, label_B, score_B):
    """[sum over rows of groups' AUC, rows in groups with both labels, groups, those with one]"""
    def by_group(tie):  # per group: clicks, others, and of each click the others ranked below
        group, _, label = jax.lax.sort((group_B, score_B, tie * label_B), num_keys=3)
        rows = jnp.stack([label == tie, label == 0, (label == tie) * (label == 0).cumsum()], 1)
        index = (jnp.diff(group, prepend=-1) != 0).cumsum() - 1
        return jax.ops.segment_sum(rows, index, len(rows)).T
    (clicks, others, most), (_, _, least) = by_group(1), by_group(-1)  # ties count as below, or not
    n, pairs = clicks + others, clicks * others
    auc = ((most + least) / 2 - clicks * (others.cumsum() - others)) / jnp.maximum(pairs, 1)
    return jnp.float32([(n * auc).sum(), (n * (pairs > 0)).sum(), (n > 0).sum(),
                        ((n > 0) & (pairs == 0)).sum()])


def metrics(means, source):
    """"auc"; "group_auc", weighted by rows. Neither where only one label is seen."""
    others, clicks = np.float64(means["by_score"])
    total, rows, groups, left_out = means["by_group"].tolist()
    auc, pairs = clicks * (others.cumsum() - others / 2), others.sum() * clicks.sum()
    return {"groups": groups, "groups_left_out": left_out} | (
        {"auc": auc.sum() / pairs} if pairs else {}) | ({"group_auc": total / rows} if rows else {})


def batch_shapes(cfg):
    B, rows = cfg.batch_size, P(("dp", "fsdp", "ep"))
    ids = {name: ((B, n_values), np.int32, rows) for name, (_, n_values) in sizes(cfg).items()}
    return ids | {"label": ((B,), np.int32, rows), "dense": ((B, cfg.n_dense), np.float32, rows)}


def read_day(path, cfg):
    """{name: array} as batch_shapes says, of all rows of a file."""
    day, shapes = dict(np.load(path)), batch_shapes(cfg)
    missing = sorted({cfg.group, *shapes} - {*day})
    config.raise_if_errors([f"has no {name!r}" for name in missing], path)
    faults = [f"label {x}: must be 0 or 1" for x in set(day["label"].tolist()) - {0, 1}][:1]
    for i, (name, (n, n_values)) in enumerate(sizes(cfg).items()):
        ids = np.atleast_2d(np.uint64(day[name]).T).T  # [n, VALUES], also of [n] and of no row
        ids = data.hash64(ids, np.uint64(i)) % np.uint64(n) if cfg.hash_ids else ids
        there = np.arange(ids.shape[1]) < day.get(f"{name}_n", np.full(1, n_values))[:, None]
        faults += [f"{name} {x}: must be below {n}; leave out --no_hash_ids"
                   for x in ids[(ids >= n) & there][:1]]
        day[name] = np.where(there, ids, n)  # n: padding
    wanted = {name: (*day["label"].shape, *shape[1:]) for name, (shape, *_) in shapes.items()}
    faults += [f"{name} {day[name].shape}: must be {shape}" for name, shape in wanted.items()
               if day[name].shape != shape]
    config.raise_if_errors(faults, path)
    return {name: day[name].astype(dtype) for name, (_, dtype, _) in shapes.items()}


def open_days(parts, cfg):
    day_of = lru_cache(4)(partial(read_day, cfg=cfg))
    def read(name, rows):
        return {key: x[rows] for key, x in day_of(name).items()}
    def held_out(*names):
        """Days one after the other, each sorted by group; one that falls into two batches, or two
        microbatches, is ranked in each by itself.
        """
        orders = [day_of(name)[cfg.group][:, 0].argsort(kind="stable") for name in names]
        ends = np.cumsum([len(order) for order in orders])
        n = int(ends[-1])
        def batch(index, rows):
            # A step takes row b into microbatch b mod A: give each microbatch neighbours.
            A = cfg.grad_accum_steps
            at = index * cfg.batch_size + (rows % A) * (cfg.batch_size // A) + rows // A
            by_place = at.argsort()
            places = np.minimum(at[by_place], n - 1)  # past the end: the last, which counts no more
            day_at = np.searchsorted(ends, places, side="right")
            drawn = []
            for day in np.unique(day_at):  # ascending, as the places are
                within = places[day_at == day] - ends[day] + len(orders[day])
                drawn.append(read(names[day], orders[day][within]))
            back = by_place.argsort()
            whole = {key: np.concatenate([part[key] for part in drawn])[back] for key in drawn[0]}
            return whole | {"label": np.where(at < n, whole["label"], -1)}
        return {"n": n, "batch": batch}
    data.check_disjoint({"data": cfg.data, "val_data": cfg.val_data})
    val_files = data.expand(cfg.val_data, field="val_data")
    val = held_out(*map(str, val_files)) if val_files else None
    if val and not val["n"]:
        config.raise_if_errors(
            ["no file here has an example"], f"val_data {' '.join(cfg.val_data)}")
    days = "train" in parts and data.in_windows(cfg, lambda day: len(day_of(day)["label"]), read)
    return {"train": days, "val": val or (days and {
        "source_at": lambda step: (name := days["next_window"](step)) and held_out(name)})}


TASK = {"table": table, "loss": loss, "batch": batch_shapes, "open": open_days, "metrics": metrics}

if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], task=TASK, kind=ClicksConfig))
