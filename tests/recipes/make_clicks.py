# SPDX-License-Identifier: Apache-2.0
"""Writes days of clicks of which the truth is known, for clicks.py.

python tests/recipes/make_clicks.py FOLDER [DAYS] [ROWS]

The logit of a click is a sum of effects of user, item, category and the items clicked before,
drawn once from normal distributions, and of dense numbers; all ids come by Zipf's law. Beside what
clicks.py reads a file holds "truth" [n], these logits: no model ranks better than they do.
"""
import os
import sys
from pathlib import Path

import numpy as np

SIZES = {"user": 1000, "item": 2000, "category": 50}
EFFECT = {"user": 0.8, "item": 0.8, "category": 0.4, "history": 0.4}  # standard deviations
ZIPF, BIAS, DENSE = 1.0, -1.5, (0.5, -0.3, 0.2, 0.0)


def make_day(path, n, seed):
    """Write one day of n rows; the file appears whole."""
    fixed, random = np.random.default_rng(0), np.random.default_rng([1, seed])
    effect = {name: fixed.normal(0, EFFECT[name], SIZES.get(name, SIZES["item"]))
              for name in EFFECT}
    ids = {name: fixed.integers(2**64, size=m, dtype=np.uint64) for name, m in SIZES.items()}

    def draw(name, n):
        share = (1 + np.arange(SIZES[name])) ** -ZIPF
        return random.choice(SIZES[name], n, p=share / share.sum())

    drawn = {name: draw(name, n) for name in SIZES}
    history, n_history = draw("item", (n, 4)), random.integers(0, 5, n)  # none to four items
    before = effect["history"][history] * (np.arange(4) < n_history[:, None])
    dense = random.normal(size=(n, len(DENSE))).astype(np.float32)
    truth = (BIAS + dense @ DENSE + before.sum(axis=1)
             + sum(effect[name][drawn[name]] for name in SIZES))
    day = {name: ids[name][drawn[name]] for name in SIZES} | {
        "label": random.random(n) < 1 / (1 + np.exp(-truth)), "truth": truth, "dense": dense,
        "history": ids["item"][history], "history_n": n_history}
    with open(f"{path}.tmp", "wb") as file:
        np.savez(file, **day)
    os.replace(f"{path}.tmp", path)


def main(folder, days=4, rows=100_000):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for day in range(int(days)):
        make_day(Path(folder, f"day{day:03}.npz"), int(rows), day)


if __name__ == "__main__":
    main(*sys.argv[1:]) if sys.argv[1:] and sys.argv[1][0] != "-" else sys.exit(__doc__)
