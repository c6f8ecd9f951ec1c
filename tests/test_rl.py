# SPDX-License-Identifier: Apache-2.0
"""The recipe for reinforcement learning."""
import dataclasses
import sys

import jax
import numpy as np
import pytest

import ckpt
import config
import data
import model
import train
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests/recipes"))
import rl

SMALL = rl.RlConfig(
    steps=150, batch_size=128, lr=2e-3, eval_every=150, save_every=50, sample_every=0,
    dtype="float32", val_frac=0.0)


def test_advantages_and_objective_are_those_of_reinforce():
    """They equal float64 NumPy's, from rewards and logits up to the line end.

    Break: tests/recipes/rl.py: / (cfg.group_size - 1) => / cfg.group_size
    """
    cfg = config.derive_text(dataclasses.replace(SMALL, batch_size=64, attention="xla"))
    mesh = train.steplib.make_mesh(dataclasses.replace(cfg, dp=1), jax.devices()[:1])
    rows = np.arange(cfg.batch_size)
    asked = rl.open_questions((), cfg)["train"]["batch"](3, rows)
    shardings = {name: jax.NamedSharding(mesh, spec)
                 for name, (_, _, spec) in rl.batch_shapes(cfg).items()}
    batch = data.to_device(asked, shardings, rows, cfg.batch_size)
    params = model.init(jax.random.key(1), cfg)
    state = {"params": params, "step": np.int32(3)}
    answered = rl.answered(batch, state, cfg, temperature=1.0)
    got = jax.tree.map(np.asarray, answered)

    groups = got["reward"].reshape(-1, cfg.group_size)
    for group, advantages in zip(groups, got["advantage"].reshape(groups.shape)):
        for i, advantage in enumerate(advantages):
            np.testing.assert_allclose(
                advantage, group[i] - np.delete(group, i).mean(), atol=1e-6)

    logits_BTV = model.forward(params, answered, cfg)
    logits_BTV = np.float64(logits_BTV)
    logp_BTV = logits_BTV - np.log(np.exp(logits_BTV).sum(axis=-1, keepdims=True))
    expected = 0.0
    for i in range(cfg.batch_size):
        ids = got["tokens"][i, rl.N_QUESTION :].tolist()
        if rl.encode("\n")[0] not in ids:
            ids.append(got["labels"][i, -1])  # the last one is only a label
        text = rl.decode(ids).split("\n")[0] + "\n"
        text = text[: rl.N_ANSWER]
        for at, character in enumerate(text):
            logp = logp_BTV[i, rl.N_QUESTION - 1 + at, rl.encode(character)[0]]
            expected -= got["advantage"][i] * logp
    sums, counts = rl.loss(params, answered, cfg)
    np.testing.assert_allclose(sums["objective"], expected, rtol=1e-4)
    assert counts["objective"] == cfg.batch_size


@pytest.mark.slow
def test_a_model_learns_to_add_and_draws_the_same_answers_from_a_checkpoint_on(tmp_path, cache_dir):
    """The mean reward rises from 0.2 to 0.5; a branch from step 100 has the same bits.

    Break: tests/recipes/rl.py: "objective": -(batch => "objective": (batch
    """
    def train_rl(name, **changes):
        cfg = dataclasses.replace(
            SMALL, cache_dir=cache_dir, out_dir=str(tmp_path / name), **changes)
        summary = train.main(cfg, [rl.make_policy()], rl.TASK)
        rewards = [row["reward"] for row in ckpt.read_log(cfg.out_dir) if row["event"] == "log"]
        return summary, rewards

    straight, rewards = train_rl("straight")
    assert rewards[0] < 0.2 and straight["val_reward"] > 0.5
    branch, rewards_again = train_rl("branch", branch_from=f"{tmp_path}/straight@100")
    assert rewards_again == rewards[-len(rewards_again) :]
    for name, x in straight["state"]["params"].items():
        assert np.array_equal(x, branch["state"]["params"][name]), name
