# SPDX-License-Identifier: Apache-2.0
"""Write days of clicks with a known ground truth, for clicks.py.

python tests/recipes/make_clicks.py FOLDER [DAYS] [ROWS]

The logit of a click is a sum of effects of the user, the item, the category and the items clicked
before, drawn once from normal distributions, and of dense numbers. Ids follow Zipf's law. Besides
the arrays that clicks.py reads, a file holds "truth" [n], these logits: no model ranks better.
"""
import os
import sys
from pathlib import Path

import numpy as np

SIZES = {"user": 1000, "item": 2000, "category": 50}
EFFECT = {"user": 0.8, "item": 0.8, "category": 0.4, "history": 0.4}  # standard deviations
ZIPF, BIAS, DENSE = 1.0, -1.5, (0.5, -0.3, 0.2, 0.0)


def make_day(path, n, seed):
    """Write one day of n rows. The file appears by one rename."""
    # Effects and ids are the same on all days.
    fixed = np.random.default_rng(0)
    effect = {name: fixed.normal(0, EFFECT[name], SIZES.get(name, SIZES["item"]))
              for name in EFFECT}
    ids = {name: fixed.integers(2**64, size=m, dtype=np.uint64) for name, m in SIZES.items()}

    random = np.random.default_rng([1, seed])

    def draw(name, shape):
        weights = (1 + np.arange(SIZES[name])) ** -ZIPF
        return random.choice(SIZES[name], shape, p=weights / weights.sum())

    drawn = {name: draw(name, n) for name in SIZES}
    history = draw("item", (n, 4))
    n_history = random.integers(0, 5, n)
    is_used = np.arange(4) < n_history[:, None]
    history_effect = (effect["history"][history] * is_used).sum(axis=1)
    dense = random.normal(size=(n, len(DENSE))).astype(np.float32)

    truth = BIAS + dense @ DENSE + history_effect + sum(
        effect[name][drawn[name]] for name in SIZES)
    day = {name: ids[name][drawn[name]] for name in SIZES}
    day["label"] = random.random(n) < 1 / (1 + np.exp(-truth))
    day["truth"] = truth
    day["dense"] = dense
    day["history"] = ids["item"][history]
    day["history_n"] = n_history
    with open(f"{path}.tmp", "wb") as file:
        np.savez(file, **day)
    os.replace(f"{path}.tmp", path)


def main(folder, days=4, rows=100_000):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for day in range(int(days)):
        make_day(Path(folder, f"day{day:03}.npz"), int(rows), day)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__ or "usage: make_clicks.py FOLDER [DAYS] [ROWS]")  # -OO removes __doc__
    main(*sys.argv[1:])
