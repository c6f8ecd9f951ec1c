# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning from rewards that a function computes, as in GRPO.

    python tests/recipes/rl.py --init_from FOLDER --data prompts.jsonl --reward my_reward.py:score

A row has "prompt", or "messages" for the tokenizer's chat template; score(prompt, answer, row)
returns a number. Each step draws group_size answers to each of its prompts from the parameters that
are trained. The baseline of an answer is the mean reward of the others to its prompt (Kool et al.
2019; Ahmadian et al. 2024, arXiv:2402.14740, section 3.2). Without flags a model learns to add, by
--config tests/recipes/sums.json.
"""
import dataclasses
import math
import sys
import zlib
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # dpo.py stands there

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import dpo
from train import ckpt, config, data, model, steplib


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlConfig(config.Config):
    # functions score(prompt, answer, row) that return a number, as my_reward.py:score; several are
    # added up; empty: the example, sums
    reward: tuple[str, ...] = ()
    group_size: config.PosInt = 8  # answers to each prompt of a step, at least 2
    answer_tokens: config.PosInt = 256  # tokens of an answer, at most; a prompt has the rest
    kl: config.NonNegFloat = 0.0  # weight of the divergence from the initial parameters
    inner_steps: config.PosInt = 1  # steps on each batch of answers
    clip: config.PosFraction = 0.2  # bound of changes of a token's probability, with inner_steps
    batch_size: config.PosInt = 64  # answers per step, over all devices
    seq_len: config.PosInt = 512  # tokens of a prompt and its answer
    optimizer: str = "adamw"  # adamw, adafactor, lion, muon, rmsprop, sgd
    lr: config.LearningRate = 1e-5  # peak learning rate; 1e-6 for billions of parameters
    temperature: config.NonNegFloat = 0.0  # of printed samples; answers to train on have 1


# ---- the example: sums

# In a random order: the last ones are validation data. Their sizes are in sums.json.
SUMS = [{"prompt": f"{i // 10}+{i % 10}="} for i in data.permute(range(100), 100, "sums").tolist()]


def score_sum(prompt, answer, row):
    """The fraction of the right answer, with its end, that `answer` begins with."""
    a, b = prompt.rstrip("=").split("+")
    right = str(int(a) + int(b))
    n_right = max(n for n in range(len(right) + 1) if answer[:n] == right[:n])
    return (n_right + (answer == right)) / (len(right) + 1)


# ---- the config and the rewards

def errors_of(sizes, cfg):
    errors = list(config.text_errors(sizes, cfg))
    for name in dpo.UNUSED:
        if getattr(cfg, name) != getattr(config.Config, name):
            errors.append(f"{name}: has no effect on answers")
    if cfg.mode == "train" and (cfg.group_size < 2 or cfg.batch_size % cfg.group_size):
        errors.append(f"group_size {cfg.group_size}: must be at least 2, and divide batch_size "
                      f"{cfg.batch_size}")
    if cfg.answer_tokens > cfg.seq_len:
        errors.append(f"answer_tokens {cfg.answer_tokens}: must be at most seq_len {cfg.seq_len}")
    if (cfg.data or cfg.val_data or cfg.prompts) and not cfg.reward:
        errors.append("reward: is missing; name a function, as my_reward.py:score")
    if len(set(reward_names(cfg))) < len(cfg.reward):
        errors.append(f"reward {' '.join(cfg.reward)}: two functions have one name; rename one")
    return errors


def reward_names(cfg):
    return [text.rpartition(":")[2] for text in cfg.reward]


def load_rewards(cfg):
    return train.load_functions("reward", cfg.reward) or [score_sum]


def score(functions, pairs):
    """The rewards [answers, functions] of pairs (prompt, answer), which process 0 computes."""
    def compute():
        rewards = []
        for prompt, answer in pairs:
            for function in functions:
                value = function(prompt["text"], answer, dict(prompt["row"]))
                number = train.numbers({"": value}).get("", math.nan)
                if not abs(number) <= float(np.finfo(np.float32).max):
                    config.raise_if_errors(
                        [f"is {value!r} for the prompt {prompt['text']!r:.80} and the answer "
                         f"{answer!r:.80}; must be a finite number"], f"reward {function.__name__}")
                rewards.append(number)
        return rewards

    return np.float32(ckpt.broadcast_from_main(compute)).reshape(-1, len(functions))


# ---- the prompts

def read_prompts(patterns, cfg):
    """The prompts in files, without a reward those of the example: [{"text", "ids", "stops" (ids
    that end an answer), "row"}]. Prompts that leave no room for an answer are skipped.
    """
    tokenizer = data.make_cfg_tokenizer(cfg)
    n_max = cfg.seq_len + 1 - cfg.answer_tokens  # the last token of an answer is only a label
    found = [] if cfg.reward else [(row["prompt"], row) for row in SUMS]
    for path in data.expand(patterns):
        found += data.read_prompts(path, tokenizer, cfg.columns)
    prompts = []
    for text, row in found:
        ids = data.prompt_ids(text, tokenizer)
        data.check_ids(np.array([ids]), cfg.vocab_size, [{"name": f"prompt {text!r:.60}"}])
        if len(ids) <= n_max:
            stops = data.stops_after(ids, tokenizer)
            prompts.append({"text": text, "ids": ids, "stops": stops, "row": row})
    n_skipped = len(found) - len(prompts)
    if n_skipped:
        train.print0(f"{n_skipped:,} of {len(found):,} prompts are skipped, longer than the "
                     f"{n_max} tokens that --seq_len and --answer_tokens leave")
    return prompts


def open_prompts(run, parts, cfg):
    """Sources of batches without answers, which `on_event` adds. Puts all prompts and the rewards
    into run.
    """
    val_sets = data.named_sets(cfg.val_data)
    data.check_disjoint({"data": {"": cfg.data}, "val_data": val_sets})
    run.update(prompts=[], rewards=load_rewards(cfg))
    sets = {}
    for name, patterns in val_sets.items():
        sets[name] = read_prompts(patterns, cfg)
    prompts = []
    if "train" in parts or not sets:
        prompts = read_prompts(cfg.data, cfg)
    if not sets:
        n_train = int(len(prompts) * (1 - cfg.val_frac))
        sets[""] = prompts[n_train:]
        prompts = prompts[:n_train]
    if "train" in parts and not prompts:
        config.raise_if_errors([f"data {' '.join(cfg.data)!r}: no prompt to train on"])
    train_data = make_source(run, prompts, "train", cfg) if prompts else None
    val = {name: make_source(run, some, "val", cfg) for name, some in sets.items() if some}
    return {"train": train_data, "val": val}


def make_source(run, prompts, part, cfg):
    """A source of these prompts, which are appended to run["prompts"]. Each prompt of a training
    batch comes group_size times; validation has each once.
    """
    first = len(run["prompts"])
    n = len(prompts)
    run["prompts"] += prompts
    n_answers = n * cfg.group_size * cfg.inner_steps if part == "train" else n  # of an epoch
    checksum = zlib.crc32(repr([(prompt["ids"], prompt["row"]) for prompt in prompts]).encode())

    def ask(examples):
        batch = {name: np.zeros((len(examples), *shape[1:]), dtype)
                 for name, (shape, dtype, _) in batch_shapes(cfg).items()}
        return batch | {"example": np.int32(examples)}

    def train_batch(step, rows):
        group = step // cfg.inner_steps
        asked = data.examples_at(group, cfg.batch_size // cfg.group_size, n, cfg.seed)
        return ask(first + asked.repeat(cfg.group_size)[rows])

    def val_batch(index, rows, batch_size):
        examples, valid = data.eval_examples_at(index, batch_size, n, rows)
        return ask(np.where(valid, first + examples, -1))

    return {
        "n": n_answers,
        "batch": train_batch if part == "train" else val_batch,
        "fingerprint": f"{checksum:08x} of prompts",
        "summary": f"{n:,} prompts",
        "samples": prompts[:4],
    }


def batch_shapes(cfg):
    B, T = cfg.batch_size, cfg.seq_len
    split = P(model.BATCH_AXES, "sp")
    per_row = ((B,), np.float32, P(model.BATCH_AXES))
    shapes = {
        "tokens": ((B, T), np.int32, split),
        "labels": ((B, T), np.int32, split),
        # Index in run["prompts"]; -1 for a row that fills up the last batch of an evaluation
        "example": ((B,), np.int32, P(model.BATCH_AXES)),
        "rewards": ((B, len(cfg.reward) or 1), np.float32, P(model.BATCH_AXES)),
        "advantage": per_row,
        "is_cut": per_row,
    }
    # The log-probabilities of the labels under the initial parameters, and under those that drew
    # the answers.
    if cfg.kl:
        shapes["reference"] = ((B, T), np.float32, split)
    if cfg.inner_steps > 1:
        shapes["old"] = ((B, T), np.float32, split)
    return shapes


# ---- the answers

def on_event(run, event, value):
    """The hook. It gives each batch answers from the newest parameters: a function of the state and
    the seed, so that a run resumes bit-identically. Checkpoints have the arrays in run["kept"].
    """
    if event in ("load", "state"):
        run["state"] = value  # alive until the next step is dispatched
    if event == "start":
        run.update(cfg=RlConfig(**value["config"]), kept={})
        if run["cfg"].kl:  # copy the initial parameters that are trained
            params = run["state"]["params"]
            names = params.keys() - model.matching("freeze", run["cfg"].freeze, params)
            run["kept"]["reference"] = {name: jnp.copy(params[name]) for name in names}
    if event == "resume":
        run["checkpoint"] = value
        with data.as_value_error("kl: this run began without it; begin another", KeyError):
            restore_kept(run, dict(run["kept"]))
    if event == "before_save":
        return value | {"arrays": value["arrays"] | run["kept"]}
    if event == "val_data":
        return answered(run, value, is_training=False)
    if event == "data":  # inner_steps steps share their answers
        if int(run["state"]["step"]) % run["cfg"].inner_steps == 0:
            run["kept"]["answers"] = answered(run, value, is_training=True)
        elif "answers" not in run["kept"]:
            restore_kept(run, {"answers": value})
        return run["kept"]["answers"]


def restore_kept(run, like):
    """Take the arrays of `like` from the checkpoint into run["kept"]."""
    saved = ckpt.restore(run["checkpoint"]["root"], run["checkpoint"]["step"], {"hooks": like})
    run["kept"] |= saved["hooks"]


def answered(run, batch, is_training):
    """The batch with drawn answers, their labels, rewards and advantages."""
    cfg, params = run["cfg"], run["state"]["params"]
    decode = data.make_cfg_tokenizer(cfg)["decode"]
    B = len(batch["example"])
    examples_B = multihost_utils.process_allgather(batch["example"], tiled=True)
    prompts = [run["prompts"][i] for i in examples_B]
    with jax.set_mesh(batch["tokens"].sharding.mesh):
        ids_BA = draw(run["state"], prompts, cfg, is_training)

    # The labels are an answer and its end.
    tokens_BT = np.zeros((B, cfg.seq_len), np.int32)
    labels_BT = np.full((B, cfg.seq_len), model.IGNORE, np.int32)
    is_cut_B = np.zeros(B, np.float32)
    pairs = []
    for i, (prompt, ids_A) in enumerate(zip(prompts, ids_BA.tolist())):
        answer, end = model.text_before_stop(prompt, ids_A, decode)
        if end is None:
            end = cfg.answer_tokens - 1
            is_cut_B[i] = 1
        n_prompt = len(prompt["ids"])
        ids = [*prompt["ids"], *ids_A[: end + 1]]
        tokens_BT[i, : len(ids) - 1] = ids[:-1]
        if examples_B[i] >= 0:
            labels_BT[i, n_prompt - 1 : len(ids) - 1] = ids[n_prompt:]
            pairs.append((prompt, answer))

    # How much better an answer is than the mean of the others to its prompt.
    rewards_BR = np.zeros((B, len(run["rewards"])), np.float32)
    rewards_BR[examples_B >= 0] = score(run["rewards"], pairs)
    advantage_B = np.zeros(B, np.float32)
    if is_training:
        rewards_QG = rewards_BR.sum(axis=1).reshape(-1, cfg.group_size)
        others_QG = (rewards_QG.sum(axis=1, keepdims=True) - rewards_QG) / (cfg.group_size - 1)
        advantage_B = (rewards_QG - others_QG).ravel()

    whole = {"tokens": tokens_BT, "labels": labels_BT, "rewards": rewards_BR,
             "advantage": advantage_B, "is_cut": is_cut_B}
    shardings = {name: x.sharding for name, x in batch.items()}
    batch = batch | data.to_device(whole, shardings, B)
    if cfg.kl:
        batch["reference"] = log_probs(params | run["kept"]["reference"], batch, cfg)
    if cfg.inner_steps > 1:
        batch["old"] = log_probs(params, batch, cfg)
    return batch


def draw(state, prompts, cfg, is_training):
    """Ids [B, answer_tokens] after the prompts, the same on every process: random ones in training,
    else the likeliest ones.
    """
    B = len(prompts)
    lengths_B = np.int32([len(prompt["ids"]) for prompt in prompts])
    tokens_BP = np.zeros((B, cfg.seq_len + 1 - cfg.answer_tokens), np.int32)
    for tokens_P, prompt in zip(tokens_BP, prompts):
        tokens_P[: len(prompt["ids"])] = prompt["ids"]
    rows = jax.NamedSharding(jax.sharding.get_mesh(), P(model.BATCH_AXES))
    asked = {"tokens": tokens_BP, "lengths": lengths_B}
    asked = data.to_device(asked, dict.fromkeys(asked, rows), B)

    key = jax.random.fold_in(jax.random.key(cfg.seed), state["step"])
    cfg = dataclasses.replace(cfg, temperature=float(is_training), top_k=0, top_p=1.0)
    ids_BA = model.generate(state["params"], asked["tokens"], asked["lengths"], cfg, key,
                            cfg.answer_tokens, steplib.compiler_options(cfg, jax.devices()[0]))
    ids_BA = multihost_utils.process_allgather(ids_BA, tiled=True)
    model.check_tokens(ids_BA)
    return ids_BA


def log_probs(params, batch, cfg):
    """The log-probability [B, T] of each label."""
    labels = batch["labels"]
    compiled = jax.jit(dpo.label_log_probs, static_argnames="cfg", out_shardings=labels.sharding,
                       compiler_options=steplib.compiler_options(cfg, jax.devices()[0]))
    with jax.set_mesh(labels.sharding.mesh):
        return compiled(params, {"tokens": batch["tokens"], "labels": labels}, cfg=cfg)


# ---- the loss

def loss(params, batch, cfg):
    """Sums over answers. "loss" is the negative log-probability of an answer, "kl" the divergence
    per token from the initial parameters, by the estimator k3 of Schulman 2020 (joschu.net,
    "Approximating KL divergence"). The clipped ratios are those of Schulman et al. 2017,
    arXiv:1707.06347, equation 7.
    """
    logp_BT = dpo.label_log_probs(params, batch, cfg)
    mask_BT = batch["labels"] != model.IGNORE
    mask_B = mask_BT.any(axis=1)

    # In the first step on a batch all ratios are 1, and the gradient is that of REINFORCE.
    old_BT = batch.get("old", jax.lax.stop_gradient(logp_BT))
    ratio_BT = jnp.exp(logp_BT - old_BT)
    clipped_BT = jnp.clip(ratio_BT, 1 - cfg.clip, 1 + cfg.clip)
    advantage_B1 = batch["advantage"][:, None]
    gain_BT = jnp.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
    kl_BT = jnp.zeros_like(logp_BT)
    if cfg.kl:
        log_ratio_BT = batch["reference"] - logp_BT
        kl_BT = jnp.exp(log_ratio_BT) - log_ratio_BT - 1
    terms = {
        "objective": (cfg.kl * kl_BT - gain_BT).sum(axis=1, where=mask_BT),
        "loss": -logp_BT.sum(axis=1),
        "reward": batch["rewards"].sum(axis=1),
        "answer_len": mask_BT.sum(axis=1),
        "cut_frac": batch["is_cut"],
    }
    if len(cfg.reward) > 1:
        for name, reward_B in zip(reward_names(cfg), batch["rewards"].T):
            terms[f"reward_{name}"] = reward_B
    sums = {name: jnp.where(mask_B, x_B, 0).sum(dtype=jnp.float32) for name, x_B in terms.items()}
    counts = dict.fromkeys(sums, mask_B.sum(dtype=jnp.float32))
    if cfg.kl:
        sums["kl"] = kl_BT.sum(where=mask_BT)
        counts["kl"] = mask_BT.sum(dtype=jnp.float32)
    return sums, counts


# ---- the task

def sample(run, params, key, source, cfg):
    """Answers to the prompts in cfg.prompts, or to the first few of the data, with their rewards.
    """
    prompts = (source or {}).get("samples")
    if cfg.prompts:  # as in train.py, columns are those of the data
        prompts = read_prompts([cfg.prompts], dataclasses.replace(cfg, columns=()))
    if not prompts:
        config.raise_if_errors(["prompts: is missing; name a file of prompts"])
    decode = data.make_cfg_tokenizer(cfg)["decode"]
    cfg = dataclasses.replace(cfg, sample_tokens=cfg.answer_tokens)
    options = steplib.compiler_options(cfg, jax.devices()[0])
    samples = model.sample_text(params, prompts, cfg, key, decode, options)
    pairs = [(prompts[i // cfg.n_samples], x["text"]) for i, x in enumerate(samples)]
    if "rewards" not in run:  # mode sample opens no data
        run["rewards"] = load_rewards(cfg)
    for x, reward in zip(samples, score(run["rewards"], pairs).sum(axis=1).tolist()):
        x["reward"] = reward
    return samples


def make_task():
    """(task, hook) of a run, which share a dict: prompts, rewards and the newest state."""
    run = {}
    task = train.TEXT | {
        "loss": loss,
        "batch": batch_shapes,
        "open": partial(open_prompts, run),
        "validate": errors_of,
        "unit": "answer",
        "units_per_step": lambda cfg: cfg.batch_size,
        "flops": None,
        "metrics": lambda means, source: {},
        "sample": partial(sample, run),
    }
    return task, partial(on_event, run)


if __name__ == "__main__":
    task, hook = make_task()
    argv = sys.argv[1:] or ["--config", str(Path(__file__).parent / "sums.json")]
    sys.exit(train.cli(argv, hooks=[hook], task=task, kind=RlConfig))
