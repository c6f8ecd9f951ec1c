# SPDX-License-Identifier: Apache-2.0
"""Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290) of a run's weights.

python tests/recipes/dpo.py --data pairs.jsonl --init_from out --beta 0.1 --out_dir out/dpo

A row {"prompt", "chosen", "rejected"} is tokenized as prompt and completion are; labels are the
answer and its end. To fit seq_len a pair's prompt is cut on the left, then an answer on the right.
"""
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import ckpt
import config
import data
import model
import step as steplib


@dataclass(frozen=True, kw_only=True)
class DpoConfig(config.Config):
    beta: config.PosFloat = 0.1  # factor on log-ratios to the reference: the higher, the closer
    out_dir: str = "out/dpo"  # folder of this run
    batch_size: config.PosInt = 16  # pairs per update, all devices
    optimizer: str = "adamw"
    lr: config.LearningRate = 1e-4  # peak learning rate; 1e-6 for billions of parameters


def faults(sizes, cfg):
    names = ("mix order packing document_mask label_smoothing z_loss loss_norm router_balance "
             "router_z").split()
    idle = [name for name in names if getattr(cfg, name) != getattr(config.Config, name)]
    return [*config.text_errors(sizes, cfg), *(f"{name}: has no effect on pairs" for name in idle),
            not cfg.init_from and "init_from: is missing; name the --out_dir of a trained run"]


def log_probs(params, batch, cfg):
    """The log-probabilities [B, 2] of both answers, given their prompt."""
    rows = {name: batch[name].reshape(-1, cfg.seq_len) for name in ("tokens", "labels")}
    return model.label_log_probs(params, rows, cfg).sum(axis=1).reshape(-1, 2)


def loss(params, batch, cfg):
    """Sums over pairs. "acc": 1 where the chosen answer has the higher reward, 1/2 in a tie."""
    chosen_B, rejected_B = (cfg.beta * (log_probs(params, batch, cfg) - batch["reference"])).T
    margin_B, mask_B = chosen_B - rejected_B, (batch["labels"] != model.IGNORE).any(axis=(1, 2))
    nll_B = -jax.nn.log_sigmoid(margin_B)
    terms = {"objective": nll_B, "loss": nll_B, "acc": (1 + jnp.sign(margin_B)) / 2,
             "margin": margin_B, "chosen_reward": chosen_B, "rejected_reward": rejected_B}
    sums = {name: jnp.where(mask_B, x, 0).sum() for name, x in terms.items()}
    return sums, dict.fromkeys(sums, mask_B.sum(dtype=jnp.float32))


def batch_shapes(cfg):
    B, rows = cfg.batch_size, model.BATCH_AXES
    ids = (B, 2, cfg.seq_len), np.int32, P(rows, None, "sp")
    return {"tokens": ids, "labels": ids, "reference": ((B, 2), np.float32, P(rows))}


def read_pairs(patterns, cfg):
    """[[(ids, number of labels) of the chosen answer, of the rejected one]]."""
    tokenizer, pairs, T = data.make_tokenizer(cfg.tokenizer), [], cfg.seq_len
    begin = tokenizer["eos"] if tokenizer["bos"] is None else tokenizer["bos"]
    for where, row, _ in (row for path in data.expand(patterns) for row in data.rows_in(path, -1)):
        row = row if isinstance(row, dict) else {}
        texts = {name: row.get(name) for name in ("prompt", "chosen", "rejected")}
        config.raise_if_errors([
            f"{name} is {repr(text)[:60] if name in row else 'missing'}; must be a string, and no "
            "answer empty: mend this line or delete it" for name, text in texts.items()
            if not isinstance(text, str) or not (text or name == "prompt")], where)
        prompt, *answers = map(np.int32, tokenizer["encode_batch"]([*texts.values()]))
        answers = [np.append(answer, np.int32(tokenizer["eos"]))[:T] for answer in answers]
        prompt = np.append(np.int32(begin), prompt)[max(map(len, answers)) - T - 1:]
        data.check_ids(np.concatenate([prompt, *answers])[None], cfg.vocab_size, [{"name": where}])
        pairs.append([(np.append(prompt, answer), len(answer)) for answer in answers])
    if n_cut := sum(ids[-1] != tokenizer["eos"] for pair in pairs for ids, _ in pair):
        train.print0(f"{' '.join(patterns)}: {n_cut:,} answers are cut, longer than --seq_len {T}")
    return pairs


def build_batch(pairs, reference, T, examples, valid=True):
    """Rows of these examples; those that are not valid have no labels."""
    tokens = np.zeros((len(examples), 2, T), np.int32)
    labels = np.full_like(tokens, model.IGNORE)
    for row, side in np.ndindex(len(examples), 2):
        ids, n = pairs[examples[row]][side]
        tokens[row, side, : len(ids) - 1] = ids[:-1]
        labels[row, side, len(ids) - 1 - n : len(ids) - 1] = ids[-n:]
    labels[~np.broadcast_to(valid, len(examples))] = model.IGNORE
    return {"tokens": tokens, "labels": labels, "reference": reference[examples]}


def score(cfg, pairs, then):
    """The log-probabilities [pairs, 2] under init_from; then: what that was in words, if known."""
    # In one microbatch: the sums of several would add up different pairs.
    cfg = replace(cfg, grad_accum_steps=1)
    run = train.setup_run(cfg, TASK | {"loss": lambda *a: ({"all": log_probs(*a)}, {"all": 1.0})})
    sources, n, B = train.open_sources(run), len(pairs), cfg.batch_size
    now = [source.get("summary", source["path"]) for source in sources]
    if then and then != now:
        raise ValueError(f"config: init_from was {then}, is {now}: bring it back")
    steps = steplib.lower_steps(*train.step_args(run))
    params = ckpt.load_parameters(sources, steps["state"]["params"])
    params = steps["from_params"](jax.random.key(cfg.seed), params=params)["params"]
    program, unknown = steps["eval_step"]().compile(), np.zeros((n, 2), np.float32)
    batch_at = train.make_batch_at(run, {"batch": lambda i, rows: build_batch(
        pairs, unknown, cfg.seq_len, (i * B + rows) % n)})
    found = [np.asarray(program(params, batch_at(i))["all"][0]) for i in range(-(-n // B))]
    return np.concatenate(found)[:n]


def open_pairs(parts, cfg):
    """Held-out pairs come first. The reference is kept beside the checkpoints, for all starts."""
    data.check_disjoint({"data": cfg.data, "val_data": cfg.val_data})
    pairs, val = read_pairs(cfg.data, cfg), read_pairs(cfg.val_data, cfg)
    n = int(len(pairs) * (1 - (0 if val else cfg.val_frac)))
    if n < 1:
        config.raise_if_errors([f"data {' '.join(cfg.data)!r}: no pair to train on; name a .jsonl"])
    pairs, n_val, B = val + pairs[n:] + pairs[:n], len(val + pairs) - n, cfg.batch_size
    about = f"{zlib.crc32(b''.join(np.append(*side).tobytes() for p in pairs for side in p)):08x}"
    run_root = ckpt.ckpt_root(cfg.out_dir, cfg.ckpt_dir)
    _, meta = ckpt.find_start(cfg.out_dir, run_root, cfg.resume)
    root = ckpt.join_path(run_root, "reference")
    kept = ckpt.newest_meta(root)[1].get("about", "")
    reference = np.zeros((len(pairs), 2), np.float32)
    if meta and kept == meta["data"]["fingerprint"] and kept.startswith(about):
        reference = ckpt.restore(root, 0, {"log_probs": reference})["log_probs"]
    elif cfg.mode != "data":
        reference = score(cfg, pairs, meta.get("sources"))
    about += f" of pairs, {zlib.crc32(reference.tobytes()):08x} of their reference"
    if cfg.mode == "train" and kept != about:
        ckpt.wait(ckpt.save(root, 0, {"log_probs": reference}, {"about": about}))

    def part(n, examples_at):
        return {"n": n, "fingerprint": about, "summary": f"{n:,} pairs", "batch": lambda i, rows:
                build_batch(pairs, reference, cfg.seq_len, *examples_at(i, rows))}

    return {"val": n_val and part(n_val, lambda i, rows: data.eval_examples_at(i, B, n_val, rows)),
            "train": part(n, lambda i, rows: [n_val + data.examples_at(i, B, n, cfg.seed, rows)])}


TASK = train.TEXT | {"loss": loss, "batch": batch_shapes, "open": open_pairs, "validate": faults,
                     "units_per_step": lambda cfg: 2 * cfg.batch_size * cfg.seq_len,
                     "metrics": lambda means, source: {}, "sample": None}

if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], task=TASK, kind=DpoConfig))
