# SPDX-License-Identifier: Apache-2.0
"""Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290) of a run's weights.

python tests/recipes/dpo.py --data pairs.jsonl --init_from out/default --beta 0.1

A row {"prompt", "chosen", "rejected"} has texts or messages, each pair in one of the forms that
train.py reads as a prompt and its completion, with "system" and "tools". "prompt" may be missing
beside messages: then it is what both conversations begin with. The labels are the answer and its
end. A pair that exceeds seq_len loses the beginning of its prompt, then the end of an answer.
"""
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from train import ckpt, config, data, model, steplib


@dataclass(frozen=True, kw_only=True)
class DpoConfig(config.Config):
    beta: config.PosFloat = 0.1  # weight of log-ratios; higher stays closer to the reference
    batch_size: config.PosInt = 16  # pairs per step, over all devices
    optimizer: str = "adamw"  # adamw, adafactor, lion, muon, rmsprop, sgd
    lr: config.LearningRate = 1e-4  # peak learning rate; 1e-6 for billions of parameters


# Fields of the text task that have no effect on pairs.
UNUSED = ("packing", "document_mask", "label_smoothing", "z_loss", "loss_norm",
          "router_balance", "router_z")


def errors_of(sizes, cfg):
    errors = list(config.text_errors(sizes, cfg))
    for name in UNUSED:
        if getattr(cfg, name) != getattr(config.Config, name):
            errors.append(f"{name}: has no effect on pairs")
    if not cfg.init_from:
        errors.append("init_from: is missing; name the --out_dir of a trained run")
    return errors


# ---- the loss

def label_log_probs(params, batch, cfg):
    """The log-probability [B, T] of each label in float32, 0 where it is ignored.

    For losses that are not a sum over tokens. Holds the logits of one tile at a time; backward
    computes them again. Excludes the losses of a router.
    """
    x_BTD, unembed_DV, _ = model.hidden_states(params, batch, cfg)
    labels_BT = batch["labels"]
    n_tiles = model.count_tiles(*labels_BT.shape, cfg)

    def device_log_probs(unembed_DV, x_BTD, labels_BT):
        def tile_log_probs(tile):
            x_BtD, labels_Bt = tile
            mask_Bt = labels_Bt != model.IGNORE
            cast_DV = unembed_DV.astype(x_BTD.dtype)
            logits_BtV = model.to_logits(x_BtD, cast_DV, cfg, for_loss=True)
            lse_Bt = jax.nn.logsumexp(logits_BtV, axis=-1)
            true_Bt = model.label_logits(logits_BtV, jnp.where(mask_Bt, labels_Bt, 0))
            return jnp.where(mask_Bt, true_Bt - lse_Bt, 0)

        tiles = (model.split_tiles(x_BTD, n_tiles), model.split_tiles(labels_BT, n_tiles))
        return model.join_tiles(jax.lax.map(jax.checkpoint(tile_log_probs), tiles))

    split = P(model.BATCH_AXES, "sp")
    # Float32, as backward adds up the gradients of the tiles in the dtype of the shared matrix.
    return model.on_each_device(device_log_probs, (P(), split, split), split)(
        unembed_DV.astype(jnp.float32), x_BTD, labels_BT)


def log_probs(params, batch, cfg):
    """The log-probabilities [B, 2] of both answers, given their prompt."""
    rows = {name: batch[name].reshape(-1, cfg.seq_len) for name in ("tokens", "labels")}
    return label_log_probs(params, rows, cfg).sum(axis=1).reshape(-1, 2)


def loss(params, batch, cfg):
    """Sums over pairs. "acc": 1 where the chosen answer has the higher reward, 1/2 in a tie."""
    reward_B2 = cfg.beta * (log_probs(params, batch, cfg) - batch["reference"])
    chosen_B, rejected_B = reward_B2.T
    margin_B = chosen_B - rejected_B
    nll_B = -jax.nn.log_sigmoid(margin_B)
    terms = {
        "objective": nll_B,
        "loss": nll_B,
        "acc": (1 + jnp.sign(margin_B)) / 2,
        "margin": margin_B,
        "chosen_reward": chosen_B,
        "rejected_reward": rejected_B,
    }
    # Evaluation pads its last batch with pairs without labels.
    mask_B = (batch["labels"] != model.IGNORE).any(axis=(1, 2))
    sums = {name: jnp.where(mask_B, x, 0).sum() for name, x in terms.items()}
    return sums, dict.fromkeys(sums, mask_B.sum(dtype=jnp.float32))


def batch_shapes(cfg):
    B = cfg.batch_size
    ids = ((B, 2, cfg.seq_len), np.int32, P(model.BATCH_AXES, None, "sp"))
    return {"tokens": ids, "labels": ids, "reference": ((B, 2), np.float32, P(model.BATCH_AXES))}


# ---- the pairs

def read_pairs(patterns, cfg):
    """[pair], each [(ids, which of them are labels) of the chosen answer, and of the rejected one].
    """
    tokenizer = data.make_cfg_tokenizer(cfg)
    pairs = []
    n_cut = 0
    for path in data.expand(patterns):
        for where, row, _ in data.rows_in(path, -1, cfg.columns):
            answers = []
            for name, answer_row in rows_of_pair(row, where).items():
                answers.append(encode_answer(answer_row, tokenizer, f"{where}: {name}"))
            pair = cut_pair(answers, cfg.seq_len)
            ids = np.concatenate([ids for ids, _ in pair])
            data.check_ids(ids[None], cfg.vocab_size, [{"name": where}])
            for whole, is_label in answers:
                n_answer = len(whole) - int(np.argmax(is_label))
                n_cut += int(n_answer > cfg.seq_len)
            pairs.append(pair)
    if n_cut:
        train.print0(f"{' '.join(patterns)}: {n_cut:,} answers are cut, longer than --seq_len "
                     f"{cfg.seq_len}")
    return pairs


def rows_of_pair(row, where):
    """{"chosen": row, "rejected": row}, each with a prompt and a completion for data.read_record.
    """
    values = {}
    errors = []
    for name in ("prompt", "chosen", "rejected"):
        value = row.get(name) if isinstance(row, dict) else None
        values[name] = data.messages_in(value)
        # Conversations may have the prompt within.
        if name == "prompt" and value in (None, "", []) and isinstance(row, dict):
            continue
        if not isinstance(value, str | list) or not value:
            errors.append(f"{name} is {value!r:.60}; must be a text or a list of messages")
    prompt, chosen, rejected = values.values()
    if not errors and isinstance(chosen, list) and isinstance(rejected, list):
        prompt, chosen, rejected = split_conversations(prompt, chosen, rejected)
    elif prompt is None:
        errors.append("prompt is missing beside answers of text")
    config.raise_if_errors(errors, where)
    others = {name: row[name] for name in row if name in data.UNREAD_COLUMNS}
    return {"chosen": others | {"prompt": prompt, "completion": chosen},
            "rejected": others | {"prompt": prompt, "completion": rejected}}


def split_conversations(prompt, chosen, rejected):
    """The messages before both answers, and those of each. The conversations may repeat the prompt.
    """
    n_common = 0
    while n_common < min(len(chosen), len(rejected)) and chosen[n_common] == rejected[n_common]:
        n_common += 1
    common = chosen[:n_common]
    if isinstance(prompt, str) and prompt:
        prompt = [{"role": "user", "content": prompt}]
    prompt = prompt or []
    if prompt not in (common[: len(prompt)], common[len(common) - len(prompt) :]):
        common = prompt + common
    return common, chosen[n_common:], rejected[n_common:]


def encode_answer(row, tokenizer, where):
    """(ids, which of them are labels) of a row with a prompt and its completion."""
    record, = data.encode_records([data.read_record(row, where, tokenizer)], tokenizer)
    ids, ignored = record["ids"], record["ignored"]
    if record["kind"] == "pair" or not record["has_end"]:
        data.check_has_end(tokenizer, where)
        ids, ignored = np.append(ids, tokenizer["eos"]), np.append(ignored, 0)
    if record["kind"] == "pair":
        begin = tokenizer["eos"] if tokenizer["bos"] is None else tokenizer["bos"]
        ids, ignored = np.append(begin, ids), np.append(1, ignored)
    is_label = np.asarray(ignored) == 0
    if not is_label.any():
        raise ValueError(f"{where} has no label: it needs a message of the assistant of its own "
                         "whose weight is not 0")
    return np.int32(ids), is_label


def cut_pair(answers, T):
    """Both answers of a pair with at most T + 1 ids: the last id is only a label."""
    parts = []
    for ids, is_label in answers:
        n_prompt = int(np.argmax(is_label))
        answer = slice(n_prompt, n_prompt + T)
        parts.append((ids[:n_prompt], ids[answer], is_label[answer]))
    longest = max(len(answer) for _, answer, _ in parts)
    pair = []
    for prompt, answer, is_label in parts:
        prompt = prompt[longest - T - 1:]
        ids = np.append(prompt, answer)
        pair.append((ids, np.append(np.zeros(len(prompt), bool), is_label)))
    return pair


def build_batch(pairs, reference, T, examples, valid=True):
    """The batch with these examples. Those that are not valid have no labels."""
    tokens = np.zeros((len(examples), 2, T), np.int32)
    labels = np.full_like(tokens, model.IGNORE)
    for row, side in np.ndindex(len(examples), 2):
        ids, is_label = pairs[examples[row]][side]
        end = len(ids) - 1
        tokens[row, side, :end] = ids[:-1]
        labels[row, side, :end] = np.where(is_label[1:], ids[1:], model.IGNORE)
    labels[~np.broadcast_to(valid, len(examples))] = model.IGNORE
    return {"tokens": tokens, "labels": labels, "reference": reference[examples]}


# ---- the reference

def score(cfg, pairs, saved_sources):
    """The log-probabilities [pairs, 2] under init_from.

    saved_sources: texts of the sources at the first launch, or None. Raises ValueError when
    init_from has changed since.
    """
    # One microbatch: sums over several would add up different pairs.
    cfg = replace(cfg, grad_accum_steps=1)

    def all_log_probs(params, batch, cfg):
        return {"all": log_probs(params, batch, cfg)}, {"all": 1.0}

    # eval_step gets the batches of training.
    cfg = replace(cfg, eval_batch_size=0, examples_file="")
    run = train.setup_run(cfg, TASK | {"loss": all_log_probs})
    sources = train.open_sources(run)
    texts = [source.get("summary", source["path"]) for source in sources]
    if saved_sources and saved_sources != texts:
        raise ValueError(f"config: init_from was {saved_sources}, is {texts}: restore it")
    steps = steplib.lower_steps(*train.step_args(run))
    params = ckpt.load_parameters(sources, steps["state"]["params"])
    params = steps["init"](jax.random.key(cfg.seed), params=params)["params"]
    program = steps["lower_eval_step"]().compile()

    n = len(pairs)
    B = cfg.batch_size
    no_reference = np.zeros((n, 2), np.float32)

    def batch(index, rows):
        examples = (index * B + rows) % n
        return build_batch(pairs, no_reference, cfg.seq_len, examples)

    batch_at = train.make_batch_at(run, {"batch": batch})
    found = [np.asarray(program(params, batch_at(i))["all"][0]) for i in range(-(-n // B))]
    return np.concatenate(found)[:n]


def load_or_score(cfg, pairs):
    """(reference [pairs, 2], fingerprint of pairs and reference).

    The reference of the first launch is saved beside the checkpoints, for all later launches.
    """
    checksum = 0
    for pair in pairs:
        for ids, is_label in pair:
            checksum = zlib.crc32(np.append(ids, is_label).tobytes(), checksum)
    run_root = ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir)
    meta = ckpt.find_start(cfg.out_dir, run_root, cfg.resume)
    root = ckpt.join_path(run_root, "reference")
    saved = ckpt.newest_meta(root).get("about", "")

    reference = np.zeros((len(pairs), 2), np.float32)
    is_known = meta and saved == meta["data"]["fingerprint"]
    if is_known and saved.startswith(f"{checksum:08x}"):
        reference = ckpt.restore(root, 0, {"log_probs": reference})["log_probs"]
    elif cfg.mode != "data":
        reference = score(cfg, pairs, meta.get("sources"))

    fingerprint = (f"{checksum:08x} of pairs, {zlib.crc32(reference.tobytes()):08x} of their "
                   "reference")
    if cfg.mode == "train" and saved != fingerprint:
        ckpt.wait(ckpt.save(root, 0, {"log_probs": reference}, {"about": fingerprint}))
    return reference, fingerprint


# ---- the data

def open_pairs(parts, cfg):
    """Sources of pairs for training and validation."""
    data.check_disjoint({"data": {"": cfg.data}, "val_data": {"": cfg.val_data}})
    train_pairs = read_pairs(cfg.data, cfg)
    val_pairs = read_pairs(cfg.val_data, cfg)
    if not val_pairs:
        n_train = int(len(train_pairs) * (1 - cfg.val_frac))
        val_pairs = train_pairs[n_train:]
        train_pairs = train_pairs[:n_train]
    if not train_pairs:
        config.raise_if_errors([f"data {' '.join(cfg.data)!r}: no pair to train on; name a .jsonl"])
    pairs = val_pairs + train_pairs
    n_val = len(val_pairs)
    n_train = len(train_pairs)
    reference, fingerprint = load_or_score(cfg, pairs)

    def train_batch(step, rows):
        examples = data.examples_at(step, cfg.batch_size, n_train, cfg.seed, rows)
        return build_batch(pairs, reference, cfg.seq_len, n_val + examples)

    def val_batch(index, rows, batch_size):
        examples, valid = data.eval_examples_at(index, batch_size, n_val, rows)
        return build_batch(pairs, reference, cfg.seq_len, examples, valid)

    sources = {
        "train": {"n": n_train, "batch": train_batch, "fingerprint": fingerprint,
                  "summary": f"{n_train:,} pairs"},
        "val": {},
    }
    if n_val:
        sources["val"][""] = {"n": n_val, "batch": val_batch, "fingerprint": fingerprint,
                              "summary": f"{n_val:,} pairs"}
    return sources


TASK = train.TEXT | {
    "loss": loss,
    "batch": batch_shapes,
    "open": open_pairs,
    "validate": errors_of,
    "units_per_step": lambda cfg: 2 * cfg.batch_size * cfg.seq_len,
    "metrics": lambda means, source: {},
    "sample": None,
}

if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], task=TASK, kind=DpoConfig))
