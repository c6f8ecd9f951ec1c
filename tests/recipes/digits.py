# SPDX-License-Identifier: Apache-2.0
"""An image classifier on scikit-learn's digits: another model, loss and data in one file.

python tests/recipes/digits.py --d_hidden 256
"""
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from train import config, data


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(config.Config):
    d_hidden: config.PosInt = 128  # width of the hidden layer
    steps: config.PosInt = 400  # optimizer steps in total
    batch_size: config.PosInt = 64  # images per step
    lr: config.LearningRate = 2e-3  # peak learning rate


def table(cfg):
    F = cfg.d_hidden
    return {
        "w1": dict(shape=(64, F), spec=P("fsdp", "tp"), init=("normal", 64**-0.5)),
        "b1": dict(shape=(F,), spec=P("tp"), init=("constant", 0.0)),
        "w2": dict(shape=(F, 10), spec=P("tp"), init=("normal", F**-0.5)),
        "b2": dict(shape=(10,), spec=P(), init=("constant", 0.0)),
    }


def loss(params, batch, cfg):
    """Cross-entropy and accuracy, as sums and counts over the images that have a label."""
    h_BF = jax.nn.relu(batch["image"] @ params["w1"] + params["b1"][None])
    logits_BV = h_BF @ params["w2"] + params["b2"][None]
    logp_BV = jax.nn.log_softmax(logits_BV)

    # Evaluation pads its last batch with labels of -1.
    mask_B = batch["label"] >= 0
    label_B1 = jnp.abs(batch["label"])[:, None]
    nll_B = -jnp.take_along_axis(logp_BV, label_B1, axis=1)[:, 0]
    hit_B = logp_BV.argmax(axis=1) == batch["label"]

    nll = jnp.where(mask_B, nll_B, 0).sum()
    n = mask_B.sum(dtype=jnp.float32)
    sums = {"objective": nll, "loss": nll, "acc": hit_B.sum(dtype=jnp.float32)}
    return sums, dict.fromkeys(sums, n)


def batch_shapes(cfg):
    rows = P(("dp", "fsdp", "ep"))
    return {"image": ((cfg.batch_size, 64), np.float32, rows),
            "label": ((cfg.batch_size,), np.int32, rows)}


def open_digits(parts, cfg):
    """Sources of training and validation images. Every fifth image is for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("digits.py: needs `pip install scikit-learn`") from None
    images, labels = load_digits(return_X_y=True)
    images = np.float32(images / 16)
    labels = np.int32(labels)
    for_val = np.arange(len(images)) % 5 == 0
    x, y = images[~for_val], labels[~for_val]
    val_x, val_y = images[for_val], labels[for_val]

    def train_batch(step, rows):
        i = data.examples_at(step, cfg.batch_size, len(x), cfg.seed, rows)
        return {"image": x[i], "label": y[i]}

    def val_batch(index, rows, batch_size):
        i, valid = data.eval_examples_at(index, batch_size, len(val_x), rows)
        return {"image": val_x[i], "label": np.where(valid, val_y[i], -1)}

    return {"train": {"n": len(x), "batch": train_batch, "fingerprint": "sklearn digits"},
            "val": {"": {"n": len(val_x), "batch": val_batch, "fingerprint": "sklearn digits"}}}


TASK = {"table": table, "loss": loss, "batch": batch_shapes, "open": open_digits,
        "unit": "image"}

if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], task=TASK, kind=DigitsConfig))
