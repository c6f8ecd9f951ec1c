# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation: a small model learns from the probabilities of a trained one.

python tests/recipes/distill.py --teacher out --n_layers 2 --d_model 64

Source: Hinton et al. 2015, arXiv:1503.02531, section 2. The teacher's weights are parameters that
are not trained, loaded at each start and in no checkpoint. Logits of both are whole, [B, T, V] in
float32: for vocabularies of bytes, or microbatches.
"""
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import jax.numpy as jnp

import ckpt
import config
import model

PREFIX = "teacher."
SHAPE = {*config.STATE_FIELDS, *config.ARCH_FIELDS, "lora_alpha", "capacity_factor", "tokenizer"}
UNUSED = ("label_smoothing", "z_loss", "loss_norm", "logit_tiles", "n_experts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(config.Config):
    teacher: str = "out"  # --out_dir of the run to learn from
    distill_weight: config.Fraction = 0.9  # weight of the teacher; the labels have the rest
    distill_temperature: config.PosFloat = 1.0  # of both models' probabilities
    teacher_shape: str = ""  # JSON of its model; is read from its checkpoint
    out_dir: str = "out/student"  # folder of this run


def adopt(cfg):
    """cfg with the teacher's shape, its weights as a source, and those not saved."""
    _, meta = ckpt.newest_run_meta(ckpt.root_of(cfg.teacher), f"teacher {cfg.teacher}")
    if "params/embed" not in meta["arrays"]:
        config.raise_if_errors(["is no language model: it has no embed"], f"teacher {cfg.teacher}")
    shape = {name: meta["config"][name] for name in sorted(SHAPE)}
    source, weights = f"{cfg.teacher} rename=:{PREFIX} strict=no", f"{PREFIX}*"
    cfg = dataclasses.replace(
        train.config_from_hf(cfg), teacher_shape=json.dumps(shape),
        init_from=(*(x for x in cfg.init_from if x != source), source),
        save_exclude=(*(x for x in cfg.save_exclude if x != weights), weights))
    config.raise_if_errors([f"its checkpoint has no {name}" for name in model.param_table(
        teacher_config(cfg)) if f"params/{name}" not in meta["arrays"]], f"teacher {cfg.teacher}")
    return cfg


def teacher_config(cfg):
    shape = {k: tuple(v) if isinstance(v, list) else v
             for k, v in json.loads(cfg.teacher_shape).items()}
    return dataclasses.replace(cfg, **shape, attention="xla", width_mult=1.0)


def faults(sizes, cfg):
    of_teacher = config.text_errors(sizes, teacher_config(cfg))
    return [*config.text_errors(sizes, cfg), *(x and f"teacher: {x}" for x in of_teacher), *(
        config.field_error(
            cfg, name, f"is not distilled; leave it at {getattr(config.Config, name)!r}")
        for name in UNUSED if getattr(cfg, name) != getattr(config.Config, name))]


def resolve(platform, cfg):
    cfg = train.resolve_text(platform, cfg)
    teacher = teacher_config(cfg)
    config.raise_if_errors([
        f"{name} is {getattr(teacher, name)!r} there, {getattr(cfg, name)!r} here"
                      for name in ("tokenizer", "vocab_size")
                      if getattr(teacher, name) != getattr(cfg, name)], f"teacher {cfg.teacher}")
    return cfg


def table(cfg):
    rows = model.param_table(teacher_config(cfg)).items()
    frozen = {"init": ("constant", 0.0), "trained": False}  # replaced by what is loaded
    return model.param_table(cfg) | {PREFIX + name: row | frozen for name, row in rows}


def loss(params, batch, cfg):
    """As model.loss_fn, with "kl": of the teacher's and the student's probabilities, in nats."""
    theirs = {name.removeprefix(PREFIX): x for name, x in params.items() if name.startswith(PREFIX)}
    teacher_BTV, _ = model.forward(theirs, batch, teacher_config(cfg))
    student_BTV, _ = model.forward(params, batch, cfg)
    return losses(student_BTV, teacher_BTV, batch["labels"], cfg)


def losses(student_BTV, teacher_BTV, labels_BT, cfg):
    temperature, weight = cfg.distill_temperature, cfg.distill_weight
    mask_BT = labels_BT != model.IGNORE
    hit_BTV = jnp.expand_dims(labels_BT, 2) == jnp.arange(cfg.vocab_size)[None, None]
    nll_BT = -jnp.where(hit_BTV, jax.nn.log_softmax(student_BTV), 0).sum(axis=-1)
    p_BTV, q_BTV = (jax.nn.log_softmax(x / temperature) for x in (teacher_BTV, student_BTV))
    kl_BT = (jnp.exp(p_BTV) * (p_BTV - q_BTV)).sum(axis=-1)
    terms = {"objective": (1 - weight) * nll_BT + weight * temperature**2 * kl_BT,
             "loss": nll_BT, "kl": kl_BT, "acc": student_BTV.argmax(axis=-1) == labels_BT}
    sums = {k: jnp.where(mask_BT, x, 0).sum(dtype=jnp.float32) for k, x in terms.items()}
    return sums, dict.fromkeys(sums, mask_BT.sum(dtype=jnp.float32))


def flops(means, cfg):
    """The student's, and the teacher's forward pass: a third of its training."""
    keys, teacher = means.get("attended_keys"), dataclasses.replace(teacher_config(cfg), freeze=())
    own, again, formula = model.flops_per_token(cfg, cfg.seq_len, keys)
    theirs, _, _ = model.flops_per_token(teacher, cfg.seq_len, keys)
    return own + theirs / 3, again, f"{formula}; a third of that of the teacher"


TASK = train.TEXT | {
    "hf": train.TEXT["hf"] | {"update_config": adopt}, "validate": faults, "resolve": resolve,
    "table": table, "loss": loss,
    "flops": flops, "init": lambda key, cfg: model.init(key, cfg, table(cfg)),
    "init_names": lambda table, saved, cfg: {x for x in table if ".lora_" not in x or x in saved}}

if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], task=TASK, kind=DistillConfig))
