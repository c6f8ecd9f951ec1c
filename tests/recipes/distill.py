# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation: a small model learns from the probabilities of a trained one.

python tests/recipes/distill.py --teacher out/default --n_layers 2 --d_model 64

Source: Hinton et al. 2015, arXiv:1503.02531, section 2. The teacher's weights are parameters that
are not trained, loaded at each launch and excluded from checkpoints. The logits of both models are
kept in full, [B, T, V] in float32: use vocabularies of bytes, or microbatches.
"""
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # isort: skip  before JAX, whose memory it sets up
import jax
import jax.numpy as jnp

from train import ckpt, config, model

PREFIX = "teacher."  # of the names of the teacher's parameters
# Fields of the teacher that are read from its checkpoint.
TEACHER_FIELDS = {
    "tokenizer", "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff",
    "rope_theta", "rope_factor", "rope_original_len", "norm_eps", "qk_norm", "qkv_bias",
    "post_norm", "tie_embeddings", "sliding_window", "n_experts", "experts_per_token",
    "capacity_factor", "lora_rank", "lora_alpha", "lora_targets"}
# Fields of the text task that have no effect here.
UNUSED = ("label_smoothing", "z_loss", "loss_norm", "logit_tiles", "n_experts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(config.Config):
    teacher: str = "out/default"  # out_dir of the run to learn from
    distill_weight: config.Fraction = 0.9  # weight of the teacher; the labels have the rest
    distill_temperature: config.PosFloat = 1.0  # temperature of both models' probabilities
    teacher_shape: str = ""  # JSON of the teacher's fields; it is read from its checkpoint


# ---- the config

def update_config(cfg):
    """The config with the teacher's fields, its weights as a source, and these not saved."""
    cfg = train.config_from_hf(cfg)
    where = f"teacher {cfg.teacher}"
    meta = ckpt.newest_meta(ckpt.root_of(cfg.teacher), where)
    if "params/embed" not in meta["arrays"]:
        config.raise_if_errors(["is not a language model: it has no embed"], where)
    shape = {name: meta["config"][name] for name in sorted(TEACHER_FIELDS)}
    cfg = dataclasses.replace(
        cfg, teacher_shape=json.dumps(shape),
        init_from=add_once(cfg.init_from, f"{cfg.teacher} rename=:{PREFIX} strict=no"),
        save_exclude=add_once(cfg.save_exclude, f"{PREFIX}*"))
    missing = [name for name in model.param_table(teacher_config(cfg))
               if f"params/{name}" not in meta["arrays"]]
    config.raise_if_errors([f"its checkpoint has no {name}" for name in missing], where)
    return cfg


def add_once(texts, text):
    """The texts with this one at the end. The config of a resumed run has it already."""
    others = tuple(x for x in texts if x != text)
    return (*others, text)


def teacher_config(cfg):
    fields = json.loads(cfg.teacher_shape)
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)
    return dataclasses.replace(cfg, **fields, attention="xla", width_mult=1.0)


def errors_of(sizes, cfg):
    errors = list(config.text_errors(sizes, cfg))
    for error in config.text_errors(sizes, teacher_config(cfg)):
        errors.append(f"teacher: {error}")
    for name in UNUSED:
        default = getattr(config.Config, name)
        if getattr(cfg, name) != default:
            errors.append(config.field_error(
                cfg, name, f"is not distilled; leave it at {default!r}"))
    return errors


def resolve(platform, cfg):
    cfg = train.resolve_text(platform, cfg)
    teacher = teacher_config(cfg)
    errors = []
    for name in ("tokenizer", "vocab_size"):
        value = getattr(teacher, name)
        if value != getattr(cfg, name):
            errors.append(f"{name} is {value!r}, but {getattr(cfg, name)!r} in the student")
    config.raise_if_errors(errors, f"teacher {cfg.teacher}")
    return cfg


# ---- the model and the loss

def table(cfg):
    """The student's parameters, and the teacher's, which are not trained."""
    rows = model.param_table(cfg)
    for name, row in model.param_table(teacher_config(cfg)).items():
        # The initial values are replaced by those of the checkpoint.
        rows[PREFIX + name] = row | {"init": ("constant", 0.0), "trained": False}
    return rows


def init(key, cfg):
    return model.init(key, cfg, table(cfg))


def init_names(table, saved, cfg):
    """Parameters that init_from has to provide: all but LoRA factors that were not saved."""
    return {name for name in table if ".lora_" not in name or name in saved}


def loss(params, batch, cfg):
    """As model.loss_fn, with the Kullback-Leibler divergence of teacher and student in "kl"."""
    teacher = {}
    for name, x in params.items():
        if name.startswith(PREFIX):
            teacher[name.removeprefix(PREFIX)] = x
    teacher_BTV = model.forward(teacher, batch, teacher_config(cfg))
    student_BTV = model.forward(params, batch, cfg)
    return losses(student_BTV, teacher_BTV, batch["labels"], cfg)


def losses(student_BTV, teacher_BTV, labels_BT, cfg):
    temperature = cfg.distill_temperature
    weight = cfg.distill_weight

    # The loss on the labels.
    mask_BT = labels_BT != model.IGNORE
    hit_BTV = jnp.expand_dims(labels_BT, 2) == jnp.arange(cfg.vocab_size)[None, None]
    nll_BT = -jnp.where(hit_BTV, jax.nn.log_softmax(student_BTV), 0).sum(axis=-1)

    # The divergence from the teacher, p, to the student, q.
    p_BTV = jax.nn.log_softmax(teacher_BTV / temperature)
    q_BTV = jax.nn.log_softmax(student_BTV / temperature)
    kl_BT = (jnp.exp(p_BTV) * (p_BTV - q_BTV)).sum(axis=-1)

    terms = {
        "objective": (1 - weight) * nll_BT + weight * temperature**2 * kl_BT,
        "loss": nll_BT,
        "kl": kl_BT,
        "acc": student_BTV.argmax(axis=-1) == labels_BT,
    }
    sums = {name: jnp.where(mask_BT, x, 0).sum(dtype=jnp.float32) for name, x in terms.items()}
    return sums, dict.fromkeys(sums, mask_BT.sum(dtype=jnp.float32))


def flops(means, cfg):
    """FLOPs of the student, and of the teacher's forward pass, a third of its training."""
    keys = means.get("attended_keys")
    student_flops, formula = model.flops_per_token(cfg, cfg.seq_len, keys)
    teacher = dataclasses.replace(teacher_config(cfg), freeze=())
    teacher_flops, _ = model.flops_per_token(teacher, cfg.seq_len, keys)
    total = student_flops + teacher_flops / 3
    return total, f"{formula}; a third of that for the teacher"


TASK = train.TEXT | {
    "table": table,
    "loss": loss,
    "init": init,
    "resolve": resolve,
    "validate": errors_of,
    "flops": flops,
    "init_names": init_names,
    "update_config": update_config,
}

if __name__ == "__main__":
    sys.exit(train.cli(sys.argv[1:], task=TASK, kind=DistillConfig))
