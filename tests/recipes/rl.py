# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning with rewards that a function computes: a model learns to add.

python tests/recipes/rl.py

Each step draws group_size answers to each of its questions from the parameters that are trained,
rewards them, and takes a step of REINFORCE. The baseline of an answer is the mean reward of the
others to its question (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740, section 3.2).
To train on other questions, change "the questions" below.
"""
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from train import config, data, model

# ---- the questions

CHARACTERS = "0123456789+=\n"
QUESTIONS = [f"{a}+{b}=" for a in range(10) for b in range(10)]
N_QUESTION = 4  # characters of a question
N_ANSWER = 3  # characters of an answer, at most, with the line end


def reward(question, answer):
    """The fraction of the right answer that `answer` begins with."""
    a, b = question.rstrip("=").split("+")
    right = f"{int(a) + int(b)}\n"
    n_right = 0
    while n_right < len(right) and answer[n_right : n_right + 1] == right[n_right]:
        n_right += 1
    return n_right / len(right)


def encode(text):
    return [CHARACTERS.index(character) for character in text]


def decode(ids):
    return "".join(CHARACTERS[i] for i in ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlConfig(config.Config):
    group_size: config.PosInt = 8  # answers to each question of a step, at least 2
    batch_size: config.PosInt = 256  # answers per step
    seq_len: config.PosInt = N_QUESTION + N_ANSWER - 1  # the last character is only a label
    vocab_size: int = len(CHARACTERS)
    d_model: config.PosInt = 64
    n_layers: config.PosInt = 2
    n_heads: int = 4
    steps: config.PosInt = 1000
    eval_every: config.Interval = 100
    lr: config.LearningRate = 5e-4


def errors_of(sizes, cfg):
    errors = list(config.text_errors(sizes, cfg))
    if cfg.group_size < 2 or cfg.batch_size % cfg.group_size:
        errors.append(f"group_size {cfg.group_size}: must be at least 2, and divide batch_size "
                      f"{cfg.batch_size}")
    return errors


def open_questions(parts, cfg):
    """Batches of questions, which `make_policy` completes. Each question of a training batch comes
    group_size times; validation asks each question once.
    """
    ids = np.int32([encode(question) for question in QUESTIONS])
    n = len(ids)

    def ask(examples, valid):
        tokens_BT = np.zeros((len(examples), cfg.seq_len), np.int32)
        tokens_BT[:, :N_QUESTION] = ids[examples]
        labels_BT = np.where(valid[:, None], tokens_BT, model.IGNORE)
        zeros_B = np.zeros(len(examples), np.float32)
        return {"tokens": tokens_BT, "labels": labels_BT, "reward": zeros_B, "advantage": zeros_B}

    def train_batch(step, rows):
        asked = data.examples_at(step, cfg.batch_size // cfg.group_size, n, cfg.seed)
        examples = asked.repeat(cfg.group_size)[rows]
        return ask(examples, np.ones(len(rows), bool))

    def val_batch(index, rows, batch_size):
        return ask(*data.eval_examples_at(index, batch_size, n, rows))

    return {"train": {"n": n, "batch": train_batch, "fingerprint": "sums of digits"},
            "val": {"": {"n": n, "batch": val_batch, "fingerprint": "sums of digits"}}}


def batch_shapes(cfg):
    ids = ((cfg.batch_size, cfg.seq_len), np.int32, P(model.BATCH_AXES, "sp"))
    per_row = ((cfg.batch_size,), np.float32, P(model.BATCH_AXES))
    return {"tokens": ids, "labels": ids, "reward": per_row, "advantage": per_row}


# ---- the policy

def make_policy():
    """A hook that replaces each batch of questions by one of answers from the newest parameters.
    It keeps no state of its own: a run that resumes draws the same answers.
    """
    newest = {}

    def answer_batch(event, value):
        if event in ("load", "state"):
            newest["state"] = value  # alive until the next step is dispatched
        if event == "start":
            newest["cfg"] = RlConfig(**value["config"])
        if event == "data":
            return answered(value, newest["state"], newest["cfg"], temperature=1.0)
        if event == "val_data":
            return answered(value, newest["state"], newest["cfg"], temperature=0.0)

    return answer_batch


def draw(params, questions_BQ, cfg, key, temperature):
    """Answers [B, N_ANSWER] to the questions, the same on every process."""
    cfg = dataclasses.replace(cfg, temperature=temperature, top_k=0, top_p=1.0)
    lengths_B = jnp.full(len(questions_BQ), N_QUESTION, jnp.int32)
    answers_BA = model.generate(params, questions_BQ, lengths_B, cfg, key, N_ANSWER)
    return multihost_utils.process_allgather(answers_BA, tiled=True)


def answered(batch, state, cfg, temperature):
    """The batch with drawn answers, their labels, rewards and advantages."""
    key = jax.random.fold_in(jax.random.key(cfg.seed), state["step"])
    with jax.set_mesh(batch["tokens"].sharding.mesh):
        questions_BQ = batch["tokens"][:, :N_QUESTION]
        answers_BA = draw(state["params"], questions_BQ, cfg, key, temperature)
    questions_BQ = multihost_utils.process_allgather(questions_BQ, tiled=True)
    labels_BT = np.array(multihost_utils.process_allgather(batch["labels"], tiled=True))
    is_counted_B = labels_BT[:, 0] != model.IGNORE

    # The labels are an answer and its line end.
    labels_BT[:] = model.IGNORE
    rewards_B = np.zeros(len(labels_BT), np.float32)
    for i in np.flatnonzero(is_counted_B):
        answer = decode(answers_BA[i])
        n_answer = answer.find("\n") + 1 or N_ANSWER
        labels_BT[i, N_QUESTION - 1 : N_QUESTION - 1 + n_answer] = answers_BA[i, :n_answer]
        rewards_B[i] = reward(decode(questions_BQ[i]), answer)

    # How much better an answer is than the mean of the others to its question.
    rewards_QG = rewards_B.reshape(-1, cfg.group_size)
    others_QG = (rewards_QG.sum(axis=1, keepdims=True) - rewards_QG) / (cfg.group_size - 1)
    whole = {
        "tokens": np.concatenate([questions_BQ, answers_BA[:, :-1]], axis=1),
        "labels": labels_BT,
        "reward": rewards_B,
        "advantage": (rewards_QG - others_QG).ravel(),
    }
    shardings = {name: x.sharding for name, x in batch.items()}
    return data.to_device(whole, shardings, np.arange(cfg.batch_size), cfg.batch_size)


def loss(params, batch, cfg):
    """Sums over answers. "loss" is the negative log-probability of an answer."""
    logits_BTV = model.forward(params, batch, cfg)
    mask_BT = batch["labels"] != model.IGNORE
    labels_BT1 = jnp.where(mask_BT, batch["labels"], 0)[..., None]
    logp_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), labels_BT1, axis=2)[..., 0]
    logp_B = jnp.where(mask_BT, logp_BT, 0).sum(axis=1)
    sums = {
        "objective": -(batch["advantage"] * logp_B).sum(),
        "loss": -logp_B.sum(),
        "reward": batch["reward"].sum(),
    }
    n_answers = mask_BT.any(axis=1).sum(dtype=jnp.float32)
    return sums, dict.fromkeys(sums, n_answers)


def sample(params, key, source, cfg):
    """The likeliest answers to a few questions."""
    questions = QUESTIONS[7::23]
    questions_BQ = jnp.int32([encode(question) for question in questions])
    answers_BA = draw(params, questions_BQ, cfg, key, temperature=0.0)
    samples = []
    for question, answer in zip(questions, answers_BA):
        samples.append({"prompt": question, "text": decode(answer).split("\n")[0]})
    return samples


TASK = train.TEXT | {
    "loss": loss,
    "batch": batch_shapes,
    "open": open_questions,
    "validate": errors_of,
    "unit": "answer",
    "units_per_step": lambda cfg: cfg.batch_size,
    "flops": None,
    "metrics": lambda means, source: {},
    "sample": sample,
}

if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], hooks=[make_policy()], task=TASK, kind=RlConfig))
