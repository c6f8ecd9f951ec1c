# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer as pure functions over a flat dict of arrays.

Covers the families of HF_FAMILIES, such as Llama, Qwen3 and Gemma 3. Owns the parameter table, the
forward pass, the loss, generation and Hugging Face's names. Rejects attention kernels that the
device lacks.
Invariant: each parameter is declared once, in `param_table`.
"""
import dataclasses
import zlib
from collections import Counter
from fnmatch import fnmatchcase
from functools import partial
from math import ceil, floor, gcd, lcm, log, pi, prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import multihost_utils
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

# cfg: a Config whose sizes and dtype are resolved; only logit_tiles may be 0 still.
#
# A name ends with the dims of its array: B sequences, T query positions, S key positions, D model
# width, F MLP width, N query heads, K kv heads (in attention with their copies, see
# _to_head_sharding), G query heads of a kv head, H head width, V vocabulary, L layers, E experts,
# C expert capacity, P parts of a sequence, 1 a dim of size 1; a lower-case letter is a tile of that
# dim.

BATCH_AXES = ("dp", "fsdp", "ep")  # mesh axes that split the sequences of a batch
WEIGHT_AXES = ("fsdp", "ep", "sp")  # those that split a dense weight, gathered where it is used
IGNORE = -100  # label ignored by the loss


# ---- parameters

def param_table(cfg):
    """Declare every parameter: {name: {"shape", "spec", "init"}}.

    Weights under "layers." are stacked: [layers, in, out], those of experts [layers, experts, in,
    out]. spec has the mesh axes that split each dim. init is ("normal", std) for matrices or
    ("constant", value) for gains and biases; optimizers distinguish the two by it.
    """
    L, D, F, V = cfg.n_layers, cfg.d_model, cfg.d_ff, cfg.vocab_size
    N, K, H = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim

    ones = ("constant", 1.0)
    normal = ("normal", D**-0.5)  # the embedding too
    # Weights that add to the residual start smaller, or its variance would grow with depth.
    attn_out = ("normal", (2 * L * N * H) ** -0.5)
    mlp_out = ("normal", (2 * L * F) ** -0.5)

    # tp splits heads, the MLP's width and the vocabulary.
    in_spec = P(None, WEIGHT_AXES, "tp")  # column-parallel: an all-reduce over tp in backward
    out_spec = P(None, "tp", WEIGHT_AXES)  # row-parallel: one in forward

    table = {
        "embed": _row((V, D), P("tp", WEIGHT_AXES), normal),
        "layers.attn_norm": _row((L, D), P(), ones),
        "layers.wq": _row((L, D, N * H), in_spec, normal),
        "layers.wk": _row((L, D, K * H), in_spec, normal),
        "layers.wv": _row((L, D, K * H), in_spec, normal),
        "layers.wo": _row((L, N * H, D), out_spec, attn_out),
        "layers.mlp_norm": _row((L, D), P(), ones),
        "layers.w_gate": _row((L, D, F), in_spec, normal),
        "layers.w_up": _row((L, D, F), in_spec, normal),
        "layers.w_down": _row((L, F, D), out_spec, mlp_out),
        "final_norm": _row((D,), P(), ones),
    }
    if cfg.qk_norm:
        table["layers.q_norm"] = _row((L, H), P(), ones)
        table["layers.k_norm"] = _row((L, H), P(), ones)
    if not cfg.tie_embeddings:
        table["unembed"] = _row((D, V), P(WEIGHT_AXES, "tp"), normal)
    # Optional: biases, norms of outputs or over all heads together, experts, LoRA.
    return _with_optional_rows(table, cfg)


def _row(shape, spec, init):
    return {"shape": shape, "spec": spec, "init": init}


def init(key, cfg, table=None):
    """Draw the parameters of a table (default: param_table(cfg)) in cfg.param_dtype.

    A parameter's values depend on its row, its name and the key alone.
    """
    if table is None:
        table = param_table(cfg)
    params = {}
    for name, row in table.items():
        form, value = row["init"]
        if form == "constant":
            array = jnp.full(row["shape"], value, jnp.float32)
        elif form == "normal":
            # Not Python's hash, which differs between processes.
            name_hash = sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31
            name_key = jax.random.fold_in(key, name_hash)
            array = value * jax.random.normal(name_key, row["shape"], jnp.float32)
        else:
            raise ValueError(f"{name}: init {form!r}: must be 'normal' or 'constant'")
        params[name] = array.astype(cfg.param_dtype)
    return params


# ---- layers

# Sharding: parameters come in split by param_table. _shard(x, *mesh axes of each dim) splits the
# activations. XLA inserts the collectives: it gathers each weight over WEIGHT_AXES before its
# product, and sums over tp after it.

def hidden_states(params, batch, cfg, train_keys=None, cache=None):
    """Everything before the logits: (x_BTD, unembed_DV, other results of the layers).

    batch: "tokens" [B, T], and optionally "positions" [B, T] (default: from 0) and "segments"
    [B, T]: a token sees its own segment only. train_keys: in training, random keys [B] for dropout.
    cache: in generation, earlier keys and values. Other results: {"router": statistics [L, B, T]},
    {"cache": the new one}, or {}.

    Float32 whatever cfg.dtype: norms, rotary positions, softmax, router, loss.
    """
    params, weights = _cast_params(params, cfg)  # weights: those of layers, without the prefix
    with jax.named_scope("embedding"):
        # Split as it is stored, then over tp alone: the gather moves the cast matrix.
        embed_VD = _shard(_shard(params["embed"], "tp", WEIGHT_AXES), "tp")
        x_BTD = _look_up(embed_VD, batch["tokens"])  # embed_VD[tokens], with a float32 gradient
        if cfg.scale_embed:
            x_BTD *= cfg.d_model**0.5
        x_BTD = _shard(x_BTD, BATCH_AXES, "sp")
    # Optional: dropout, in training; generation.
    if train_keys is not None and cfg.dropout:
        x_BTD, weights = _with_dropout(x_BTD, weights, train_keys, cfg)
    if cache is not None:
        weights["cache"] = cache

    # One scan over all layers: their weights have the same shapes. Windows and positions may
    # differ: each kind in cfg.layer_types has a function.
    layers = {}
    for kind, attn_inputs in _attention_inputs(batch, cfg).items():
        layers[kind] = partial(_block, attn_inputs=attn_inputs, cfg=cfg)
    x_BTD, results = _scan_layers(layers, x_BTD, weights, cfg)

    with jax.named_scope("head"):
        x_BTD = _norm(x_BTD, params, "final_norm", cfg)
        unembed_DV = params["embed"].T if cfg.tie_embeddings else params["unembed"]
    return x_BTD, unembed_DV, results


def _block(x_BTD, w, attn_inputs, cfg):
    """Apply one layer with the weights w: (x_BTD, other results: see hidden_states)."""
    x_BTD = checkpoint_name(x_BTD, "block")  # a name for remat offload
    with jax.named_scope("attention"):
        y_BTD = _norm(x_BTD, w, "attn_norm", cfg)
        y_BTD, results = _self_attention(y_BTD, w, attn_inputs, cfg)
        x_BTD = _add_to_residual(x_BTD, y_BTD, "attn", w, cfg)
    with jax.named_scope("mlp"):
        y_BTD = _norm(x_BTD, w, "mlp_norm", cfg)
        # Optional: experts, or a long sequence in tiles.
        if cfg.n_experts:
            y_BTD, results["router"] = _experts(y_BTD, w, attn_inputs["segments"], cfg)
        elif cfg.mlp_tiles > 1 and "cache" not in w:
            y_BTD = _mlp_in_tiles(y_BTD, w, cfg)
        else:
            y_BTD = _mlp(y_BTD, w, cfg)
        x_BTD = _add_to_residual(x_BTD, y_BTD, "mlp", w, cfg)
    return x_BTD, results


def _mlp(x, w, cfg):
    """SwiGLU of x, or GeGLU."""
    gate = _linear(x, w, "w_gate", cfg)
    up = _linear(x, w, "w_up", cfg)
    activation = jax.nn.gelu if cfg.geglu else jax.nn.silu
    return _linear(activation(gate) * up, w, "w_down", cfg)


def _linear(x, w, name, cfg):
    """x @ w[name], such as "wq", plus the bias "bq" if there is one."""
    y = _matmul(x, w[name], cfg)
    if f"{name}.lora_a" in w:  # optional: LoRA
        y += _lora_product(x, w, name, cfg)
    bias = "b" + name.removeprefix("w")
    if bias in w:  # in float32: the sum is rounded once
        y = (y + jnp.broadcast_to(w[bias], y.shape)).astype(y.dtype)
    return y


def _norm(x, w, name, cfg):
    """RMSNorm of x with the gain w[name]; x itself if the layer has no such norm."""
    if name not in w:
        return x
    gain = w[name].astype(jnp.float32)
    x_f32 = x.astype(jnp.float32)
    if gain.size > x.shape[-1]:  # of all heads together
        x_f32 = x_f32.reshape(*x.shape[:-2], -1)
    mean_square = _reduce_rows(jnp.sum, x_f32 * x_f32, cfg) / x_f32.shape[-1]
    x_f32 *= jax.lax.rsqrt(mean_square + cfg.norm_eps)
    return (x_f32 * _broadcast(gain, x_f32.shape)).reshape(x.shape).astype(x.dtype)


# ---- attention

def _self_attention(x_BTD, w, attn_inputs, cfg):
    """Attention of normalized x_BTD: (y_BTD, other results: see hidden_states)."""
    B, T, _ = x_BTD.shape
    q = _linear(x_BTD, w, "wq", cfg)
    k = _linear(x_BTD, w, "wk", cfg)
    v = _linear(x_BTD, w, "wv", cfg)
    q, k, v = checkpoint_name((q, k, v), "qkv")
    q_BTNH = _norm(q.reshape(B, T, -1, cfg.head_dim), w, "q_norm", cfg)
    k_BTKH = _norm(k.reshape(B, T, -1, cfg.head_dim), w, "k_norm", cfg)
    v_BTKH = v.reshape(B, T, -1, cfg.head_dim)
    # From a part of the sequence on each sp shard to some heads of all of it: the all-to-all of
    # Ulysses. Over tp nothing moves.
    q_BNTH, k_BKTH, v_BKTH = _to_head_sharding(q_BTNH, k_BTKH, v_BTKH, cfg)
    q_BNTH = _rotate(q_BNTH, attn_inputs)
    k_BKTH = _rotate(k_BKTH, attn_inputs)
    # On a CPU _attend_dense, for each half of the queries. Optional: fused kernels, blocks of a
    # long sequence, generation.
    a_BNTH, results = _attend(q_BNTH, k_BKTH, v_BKTH, w, attn_inputs, cfg)
    # Back, by a second all-to-all over sp.
    a_BNTH = _shard(a_BNTH, BATCH_AXES, ("tp", "sp"))
    a_BTNH = _shard(a_BNTH.swapaxes(1, 2), BATCH_AXES, "sp", "tp")
    return _linear(a_BTNH.reshape(B, T, -1), w, "wo", cfg), results


def _attend_dense(q_BNTH, k_BKSH, v_BKSH, mask_BTS, cfg):
    """softmax(q k^T / sqrt(H)) v; mask_BTS: whether a query sees a key, as it does its own."""
    B, N, T, H = q_BNTH.shape
    K = k_BKSH.shape[1]
    q_BKGTH = H**-0.5 * q_BNTH.reshape(B, K, N // K, T, H)  # G query heads share a kv head
    scores_BKGTS = _soft_cap(_batched_matmul(q_BKGTH, k_BKSH.mT, cfg), cfg.attn_softcap)
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    # Softmax, which divides after the product with v.
    max_BKGT1 = jax.lax.stop_gradient(_reduce_rows(jnp.max, scores_BKGTS, cfg))
    e_BKGTS = jnp.exp(scores_BKGTS - max_BKGT1)
    a_BKGTH = _batched_matmul(e_BKGTS.astype(v_BKSH.dtype), v_BKSH, cfg)
    sum_BKGT1 = _reduce_rows(jnp.sum, e_BKGTS, cfg)
    a_BKGTH, sum_BKGT1 = checkpoint_name((a_BKGTH, sum_BKGT1), "attention")
    return (a_BKGTH / sum_BKGT1).reshape(q_BNTH.shape).astype(q_BNTH.dtype)


def _soft_cap(x, cap):
    """x bounded by cap, smoothly; 0: x itself."""
    if not cap:
        return x
    return cap * jnp.tanh(x / cap)


# ---- loss

def loss_fn(params, batch, cfg, train_keys=None, examples=False):
    """Sums and counts over the positions with a label: ({name: sum}, {name: count}).

    batch: as in hidden_states, and "labels" [B, T], where IGNORE does not count. "objective" is
    minimized, divided as cfg.loss_norm says; "loss" is in nats; "z" the squared log-partition;
    "acc" 1 where the label is the likeliest token, 1/n in a tie of n.

    To change the loss, add a term per token in _loss_sums, or a whole sum to sums["objective"].

    examples: return a third dict, {"nats": the loss of each position [B, T]}; has no gradient.
    """
    x_BTD, unembed_DV, results = hidden_states(params, batch, cfg, train_keys)
    labels_BT = batch["labels"]
    weights_BT = (labels_BT != IGNORE).astype(jnp.float32)
    n_labels = weights_BT.sum()
    divisor = n_labels
    if cfg.loss_norm != "tokens":  # optional
        weights_BT, divisor = _other_loss_norm(weights_BT, cfg)

    # _loss_sums, tile by tile where all logits would be large.
    sums, nats_BT = _sums_in_tiles(unembed_DV, x_BTD, labels_BT, weights_BT, cfg)
    counts = dict.fromkeys(sums, n_labels) | {"objective": divisor}
    # Optional: experts, document mask.
    sums, counts = _with_optional_sums(sums, counts, results, weights_BT, batch, cfg)
    return (sums, counts, {"nats": nats_BT}) if examples else (sums, counts)


def _loss_sums(unembed_DV, x_BTD, labels_BT, weights_BT, cfg):
    """(sums of loss_fn, the loss of each position [B, T]).

    Source: z-loss, Chowdhery et al. 2022, arXiv:2204.02311, section 5.
    """
    logits_BTV = to_logits(x_BTD, unembed_DV, cfg, for_loss=True)
    with jax.named_scope("loss"):
        mask_BT = labels_BT != IGNORE
        max_BT = jax.lax.stop_gradient(logits_BTV.max(axis=-1))
        lse_BT = max_BT + jnp.log(jnp.exp(logits_BTV - max_BT[..., None]).sum(axis=-1))
        true_BT = label_logits(logits_BTV, jnp.where(mask_BT, labels_BT, 0))
        nll_BT = lse_BT - true_BT
        z_BT = lse_BT * lse_BT
        objective_BT = nll_BT + cfg.z_loss * z_BT
        if cfg.label_smoothing:  # optional
            objective_BT += _label_smoothing(logits_BTV, true_BT, cfg)
        # A tie of n tokens counts 1/n.
        n_max_BT = (logits_BTV == max_BT[..., None]).sum(axis=-1)
        acc_BT = (true_BT >= max_BT) / n_max_BT

        terms = {"objective": objective_BT * weights_BT, "loss": nll_BT, "z": z_BT, "acc": acc_BT}
        terms = {name: jnp.where(mask_BT, term_BT, 0) for name, term_BT in terms.items()}
        sums = {name: term_BT.sum(dtype=jnp.float32) for name, term_BT in terms.items()}
        return sums, terms["loss"]


def label_logits(logits_BTV, labels_BT):
    """The logit of each label, by a masked sum: a gather would move logits that tp splits."""
    V = logits_BTV.shape[-1]
    hit_BTV = labels_BT[..., None] == jnp.arange(V)[None, None]
    return jnp.where(hit_BTV, logits_BTV, 0).sum(axis=-1)


# ---- supporting
#
# Most runs use these, but a first reading can skip them. In this order: patterns of names, parts
# of a layer, inputs of the layers, choice of the attention kernel, sharding, matrix products,
# matrix products on CPUs, parts of the loss, FLOPs.


# ---- patterns of names

def matching(field, patterns, names):
    """The set of names that patterns select. Later patterns win; a leading `!` deselects.

    Raises ValueError for a pattern without a match.
    """
    chosen = set()
    for pattern in patterns:
        glob = pattern.removeprefix("!")
        found = {name for name in names if fnmatchcase(name, glob)}
        if not found:
            raise ValueError(f"{field} {pattern!r}: matches no parameter; there are "
                             + ", ".join(names))
        if pattern.startswith("!"):
            chosen -= found
        else:
            chosen |= found
    return chosen


# {field of cfg: its key in a row of the table}
GROUP_KEYS = {"lr_mult": "lr_mult", "decay_mult": "decay_mult", "optimizers": "optimizer"}


def apply_param_groups(table, cfg, parse_number):
    """Put into the rows of table the values that the fields lr_mult, decay_mult and optimizers give
    as PATTERN=VALUE: the keys of GROUP_KEYS. The last pattern that matches a parameter applies.
    Rows that cfg.freeze selects get "trained" False.

    Raises ValueError for a pattern without a match.
    """
    for field, key in GROUP_KEYS.items():
        for text in getattr(cfg, field):
            pattern, _, value = text.rpartition("=")
            if field != "optimizers":
                value = parse_number(value)
                if not (value >= 0 and np.isfinite(value)):
                    raise ValueError(f"{field} {text!r}: must be at least 0, and finite")
            for name in matching(field, (pattern,), table):
                table[name] = table[name] | {key: value}
    for name in matching("freeze", cfg.freeze, table):
        table[name] = table[name] | {"trained": False}
    return table


# ---- parts of a layer

def _add_to_residual(x_BTD, y_BTD, sublayer, w, cfg):
    """x_BTD + y_BTD, the output of attention or MLP (sublayer: "attn" or "mlp")."""
    # Optional: a norm of the output; dropout, in training.
    y_BTD = _norm(y_BTD, w, f"{sublayer}_out_norm", cfg)
    if "dropout_keys" in w:
        y_BTD = _dropout(y_BTD, w["dropout_keys"][sublayer], cfg)
    # This constraint forces the all-reduce over tp here; over sp the sequence stays split.
    return _shard(x_BTD + y_BTD, BATCH_AXES, "sp")


def _reduce_rows(reduce, x, cfg):
    """Reduce the last dim of x to size 1; reduce: jnp.sum or jnp.max.

    On a CPU in two steps: XLA uses vector instructions only over a dim that is not the last.
    """
    lanes = 16
    if x.shape[-1] % lanes == 0 and _is_one_cpu(cfg):
        x = reduce(x.reshape(*x.shape[:-1], -1, lanes), axis=-2)
        x = jax.lax.optimization_barrier(x)  # otherwise XLA makes one step of both
    return reduce(x, axis=-1, keepdims=True)


def _broadcast(gain, shape):
    """gain [D] broadcast to shape [..., D].

    On a CPU, as an array, not as the entry of the stack of all layers: then unrolled layers share
    the kernels of their norms. Its gradient is a product with ones, faster than XLA's sum over rows
    (LOG.md).
    """
    if not _by_platform({"cpu": True, "other": False}):
        return jnp.broadcast_to(gain, shape)

    @jax.custom_gradient
    def on_cpu(gain):
        rows = jnp.broadcast_to(with_layout_constraint(gain, Layout((0,))), shape)
        return rows, lambda dy: jnp.tensordot(jnp.ones(shape[:-1]), dy, len(shape) - 1)

    return on_cpu(gain)


# ---- inputs of the layers

def batch_shapes(cfg):
    """{name: (shape, dtype, partition spec)} of a batch."""
    names = ["tokens", "labels"]
    # A token that must not see other documents of its row: which document it is in, and where.
    if cfg.document_mask or cfg.packing != "stream":
        names += ["segments", "positions"]
    shape = (cfg.batch_size, cfg.seq_len)
    return dict.fromkeys(names, (shape, jnp.int32, P(BATCH_AXES, "sp")))


# Float32 whatever the dtype: the router, and biases, whose gradient sums over all positions.
F32_PARAMS = ("layers.w_router", "layers.bq", "layers.bk", "layers.bv")


def _cast_params(params, cfg):
    """(params, those of layers alone without the prefix): those of F32_PARAMS in float32, others in
    the dtype of activations.
    """
    cast = {name: x.astype(jnp.float32 if name in F32_PARAMS else _dtype(cfg))
            for name, x in params.items()}
    weights = {name.removeprefix("layers."): x
               for name, x in cast.items() if name.startswith("layers.")}
    # Optional: norms of the outputs of attention and MLP in place of those of their inputs.
    if cfg.post_norm:
        for sublayer in ("attn", "mlp"):
            weights[f"{sublayer}_out_norm"] = weights.pop(f"{sublayer}_norm")
    return cast, weights


def layer_kinds(cfg):
    """The kind of each layer, one of config.LAYER_TYPES: "full", or "sliding" with a window; with
    the ending "_nope" without rotary positions.
    """
    period = cfg.layer_types
    if not period:
        period = ("sliding",) if cfg.sliding_window else ("full",)
    return [period[i % len(period)] for i in range(cfg.n_layers)]


def _layer_window(kind, cfg):
    """The window of a layer of this kind; 0: none."""
    return cfg.sliding_window if kind.startswith("sliding") else 0


def _attention_inputs(batch, cfg):
    """{kind of layer: the inputs of attention beside q, k and v}: positions [B, T], segments [B, T]
    or None, window (0: none), and the rotary tables cos and sin, or None.

    A batch without positions has the same ones in each row; then the tables have one row.
    """
    B, T = batch["tokens"].shape
    positions = batch["positions"] if "positions" in batch else jnp.arange(T)[None]
    positions_BT = jnp.broadcast_to(positions, (B, T))
    inputs = {}
    for kind in dict.fromkeys(layer_kinds(cfg)):
        window = _layer_window(kind, cfg)
        cos, sin = None, None
        if not kind.endswith("_nope"):
            cos, sin = rope_tables(positions, cfg, is_local=window > 0)
        inputs[kind] = {"positions": positions_BT, "segments": batch.get("segments"),
                        "window": window, "cos": cos, "sin": sin}
    return inputs


def rope_tables(positions, cfg, is_local=False):
    """cos and signed sin [B, 1, T, 2, H/2] in float32 of positions [B, T], where B may be 1.
    is_local: of a layer with a window, which may have a base of its own.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    has_own_base = is_local and cfg.rope_local_theta > 0
    theta = cfg.rope_local_theta if has_own_base else cfg.rope_theta
    even_dims = jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32)
    freq = theta ** -(even_dims / cfg.head_dim)
    attn_factor = 1.0
    # Optional: rotary scaling, for sequences longer than those of pretraining.
    if cfg.rope_factor != 1 and not has_own_base:
        freq, attn_factor = _stretch_rope(freq, cfg)
    angle = positions.astype(jnp.float32)[:, None, :, None] * freq[None, None, None, :]
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    if attn_factor != 1:
        cos *= attn_factor
        sin *= attn_factor
    return jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)


def _rotate(x, attn_inputs):
    """Rotate the two halves of each head of x [B, heads, T, H] (Hugging Face's order) in float32.

    The flip of the halves and the signed sin make the 2x2 rotation. A layer without positions (cos
    is None) keeps x.
    """
    if attn_inputs["cos"] is None:
        return x
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    rotated = halves * attn_inputs["cos"] + halves[..., ::-1, :] * attn_inputs["sin"]
    return rotated.reshape(x.shape).astype(x.dtype)


# Most layers that are unrolled, by JAX's name of the platform. Unrolled, XLA fuses across layers,
# and needs no stacks for backward (LOG.md). Scanned, compile time is that of one layer.
UNROLLED_LAYERS = {"gpu": 64, "other": 12}


def _scan_layers(layers, x_BTD, inputs, cfg):
    """Run x_BTD, result = layers[kind](x_BTD, input) over inputs stacked by layer: (x_BTD, results
    stacked by layer).
    """
    # Optional: rematerialization, where backward computes again what the policy does not save.
    if cfg.remat != "none":
        layers = {kind: jax.checkpoint(layer, policy=REMAT[cfg.remat])
                  for kind, layer in layers.items()}
    unroll = cfg.n_layers <= _by_platform(UNROLLED_LAYERS)
    kinds = layer_kinds(cfg)
    if len(set(kinds)) == 1:
        return jax.lax.scan(layers[kinds[0]], x_BTD, inputs, unroll=unroll)
    # Optional: layers that differ.
    period = len(kinds) if unroll else len(cfg.layer_types)
    return _scan_periods(layers, x_BTD, inputs, kinds, period)


@jax.custom_gradient
def _look_up(embed_VD, tokens_BT):
    """embed_VD[tokens_BT], with a gradient added up in float32.

    In bfloat16, adding ones stops at 256.
    """
    def add_rows(tokens, dx):
        """The gradient as [1, V, D]: a leading dim, one entry per device."""
        zeros_VD = jnp.zeros(embed_VD.shape, jnp.float32)
        sums_VD = zeros_VD.at[tokens].add(dx.astype(jnp.float32))
        return sums_VD.astype(embed_VD.dtype)[None]

    def gradient(dx_BTD):
        B, T = tokens_BT.shape
        divisible = B % _axis_size(BATCH_AXES) == 0 and T % _axis_size("sp") == 0
        if dx_BTD.dtype == jnp.float32 or not divisible:
            return add_rows(tokens_BT, dx_BTD)[0], None
        # Each device rounds its sum before the devices add them: no float32 is sent.
        split = P(BATCH_AXES, "sp")
        stacked = P((*BATCH_AXES, "sp"))  # sums [devices, V, D]
        sums = on_each_device(add_rows, (split, split), stacked)(tokens_BT, dx_BTD)
        return jax.lax.reduce_sum(sums, (0,)), None

    return embed_VD[tokens_BT], gradient


def _same_segment(query_segments, key_segments):
    """Whether a query [B, T] and a key [B, S] are of one document, [B, T, S]."""
    return query_segments[:, :, None] == key_segments[:, None, :]


# ---- choice of the attention kernel

# Longest sequence with dense attention. Beyond it attention by blocks is faster, and its memory is
# linear in T.
DENSE_LEN = 1024


def _attend(q_BNTH, k_BKTH, v_BKTH, w, attn_inputs, cfg):
    """Attention within a sequence: (a_BNTH, {} or, in generation, {"cache": the new one}).

    By a fused kernel on GPUs or TPUs, for a long sequence one block of scores at a time, or else
    all at once.
    """
    # Optional: rotary scaling, queries that grow with their position.
    if cfg.rope_query_beta:
        q_BNTH = _scale_by_position(q_BNTH, attn_inputs["positions"], cfg)
    if "cache" in w:
        a_BNTH, cache = _attend_to_cache(q_BNTH, k_BKTH, v_BKTH, w["cache"], attn_inputs, cfg)
        return a_BNTH, {"cache": cache}
    kernel = _attend_in_halves
    if q_BNTH.shape[2] > DENSE_LEN:
        kernel = _attend_in_blocks
    if cfg.attention == "cudnn":
        kernel = _attend_cudnn
    if cfg.attention == "pallas":
        kernel = _attend_pallas
    return kernel(_for_cpu(q_BNTH, cfg), _for_cpu(k_BKTH, cfg), v_BKTH, attn_inputs, cfg), {}


def _attention_mask(query_pos, n_keys, window):
    """Whether a query sees a key, [B, T, S]: the key is not later, and within the window (0: none).

    query_pos [B, T]: the index of each query among the keys.
    """
    distance = query_pos[:, :, None] - jnp.arange(n_keys)[None, None, :]
    mask = distance >= 0
    if window:
        mask &= distance < window
    return mask


def _attend_in_halves(q_BNTH, k_BKTH, v_BKTH, attn_inputs, cfg):
    """Attention within a sequence, where `_attend` has no better kernel, as on CPUs: a_BNTH.

    The queries are in two halves: the first skips the later keys, and with them a quarter of all
    scores.
    """
    B, _, T, _ = q_BNTH.shape
    segments = attn_inputs["segments"]
    middle = (T + 1) // 2
    halves = []
    for start, stop in ((0, middle), (middle, T)):
        n_keys = stop  # no query sees a later key
        query_pos_BT = jnp.broadcast_to(jnp.arange(start, stop), (B, stop - start))
        mask_BTS = _attention_mask(query_pos_BT, n_keys, attn_inputs["window"])
        # Optional: document mask, where a query sees keys of its own document only.
        if segments is not None:
            mask_BTS &= _same_segment(segments[:, start:stop], segments[:, :n_keys])
        halves.append(_attend_dense(q_BNTH[:, :, start:stop], k_BKTH[:, :, :n_keys],
                                    v_BKTH[:, :, :n_keys], mask_BTS, cfg))
    return jnp.concatenate(halves, axis=2)


MASK_LEN = 8192  # longest sequence for which cuDNN is given a mask [T, T]
SPLASH_LEN = 2**15  # longer, JAX's splash kernel takes minutes to lay out its mask on the host


def choose_attention(cfg, platform):
    """cfg.attention, with "auto" resolved to the fastest that works. platform: "cuda" for an NVIDIA
    GPU of compute capability 8.0 or later, "tpu", or another.

    Raises ValueError when the kernel that cfg.attention names cannot be used.
    """
    H, T = cfg.head_dim, cfg.seq_len
    one_document = cfg.packing == "stream" and not cfg.document_mask
    all_slide = all(_layer_window(kind, cfg) for kind in layer_kinds(cfg))
    works = {
        # cuDNN's deterministic gradient raises an IndexError in XLA (jax 0.11.2, H100 and H200).
        "cudnn": (platform == "cuda" and cfg.dtype in ("bfloat16", "float16")
                  and not cfg.deterministic and H % 8 == 0 and H <= 128 and not cfg.attn_softcap
                  and (one_document or T <= MASK_LEN)),
        "pallas": (platform == "tpu" and H % 128 == 0 and T % 128 == 0 and not cfg.attn_softcap
                   and (T <= SPLASH_LEN or all_slide)),
        "xla": True,
    }
    if cfg.attention == "auto":
        usable = [kernel for kernel in works if works[kernel]]
        return usable[0]
    if not works[cfg.attention]:
        raise ValueError(f"attention {cfg.attention}: cannot run on this device ({platform}), or "
                         f"not with dtype {cfg.dtype}, head_dim {H}, seq_len {T}, packed rows, "
                         "attn_softcap or deterministic as they are; choose xla or auto")
    return cfg.attention


# ---- sharding

def _axis_size(*axes):
    """Devices along these mesh axes (names, tuples of names, None) together; 1 without a mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return prod(shape.get(name, 1) for name in jax.tree.leaves(axes))


def _by_platform(values):
    """The value for the platform of the mesh, whose devices this machine may lack; without a mesh,
    and for other platforms, that of "other". values: {JAX's name of a platform: value}.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return values.get(getattr(device, "platform", "other"), values["other"])


def _shard(x, *axes):
    """Split each dim of an activation over mesh axes.

    Missing axes mean unsplit. A dim whose size its axes do not divide is not split either, for
    example the batch of a few prompts. Does nothing without a mesh or inside shard_map.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    spec = []
    for size, axis in zip(x.shape, axes):
        if size % _axis_size(axis) != 0:
            axis = None
        spec.append(axis)
    return jax.lax.with_sharding_constraint(x, P(*spec))


def _to_head_sharding(q_BTNH, k_BTKH, v_BTKH, cfg):
    """Give each device complete sequences of some heads: q, k and v as [B, heads, T, H].

    Over sp this is the all-to-all of Ulysses; over tp nothing moves.
    """
    B, T, K, H = k_BTKH.shape
    n_parts = _axis_size("tp", "sp")
    # Copy kv heads until each device has its own: K = 2 and tp x sp = 8 make 4 copies of each.
    n_copies = lcm(K, n_parts) // K
    # Group the heads by device and join q, k and v, so that one all-to-all moves all three.
    parts = []  # [B, T, n_parts, heads of a part, H]
    for x, n in ((q_BTNH, 1), (k_BTKH, n_copies), (v_BTKH, n_copies)):
        x = _for_cpu(x, cfg)
        parts.append(jnp.repeat(x, n, axis=2).reshape(B, T, n_parts, -1, H))
    qkv = jnp.concatenate(parts, axis=3)
    # From parts of the sequence to parts of the heads.
    qkv = _shard(qkv, BATCH_AXES, "sp", "tp")  # T over sp, n_parts over tp
    qkv = _shard(qkv, BATCH_AXES, None, ("tp", "sp"))  # n_parts over both
    ends = np.cumsum([x.shape[3] for x in parts])
    split = jnp.split(qkv, ends[:-1], axis=3)
    # From [B, T, n_parts, heads, H] to [B, all heads, T, H].
    return [_for_cpu(x.reshape(B, T, -1, H).swapaxes(1, 2), cfg) for x in split]


def on_each_device(f, in_specs, out_specs, *more_axes):
    """Wrap f in a shard_map over the axes of batch and sequence and over more_axes.

    Loops over tiles need it, or XLA gathers weights and reduces gradients in every iteration.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return f
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs,
                         axis_names={*BATCH_AXES, "sp", *more_axes}, check_vma=False)


# ---- matrix products

def _dtype(cfg):
    """dtype of weights and activations; "mixed" narrows only the operands of matmuls.

    cfg.dtype is resolved, never "auto".
    """
    if cfg.dtype == "mixed":
        return "float32"
    return cfg.dtype


def _matmul(x, w, cfg, f32_out=False):
    """Multiply x [..., D] by w [D, F], in x's dtype, or with a float32 result if f32_out."""
    # One product of two matrices, whose weight gradient is faster on CPUs (LOG.md). Over sp x keeps
    # its dims, since flattening a split sequence would gather it; "mixed" flattens over sp too.
    rows = x
    if cfg.dtype == "mixed" or _axis_size("sp") == 1:
        rows = x.reshape(-1, x.shape[-1])
    if cfg.dtype == "mixed" or _is_one_cpu(cfg):
        y = _matmul_for_cpu(rows, w, cfg)
    elif f32_out:
        y = _matmul_f32(rows, w)
    else:
        y = jnp.dot(rows, w)
    return y.reshape(*x.shape[:-1], w.shape[-1])


@jax.custom_gradient
def _matmul_f32(x, w):
    """Multiply x by w into float32, whatever their dtype.

    In backward, dy is rounded to x's dtype; otherwise a GPU would multiply in float32.
    """
    def gradient(dy):
        return jax.vjp(jnp.dot, x, w)[1](dy.astype(x.dtype))

    return jnp.dot(x, w, preferred_element_type=jnp.float32), gradient


def _batched_matmul(x, w, cfg):
    """Multiply x [B, K, G, M, D] by w [B, K, D, F] into float32, one product for each B and K.

    Here M, D and F are the rows, the summed dim and the columns of any product, not widths.
    """
    if cfg.dtype != "mixed" and not _is_one_cpu(cfg):
        return _einsum("BKGMD,BKDF->BKGMF", x, w)
    B, K, D, F = w.shape
    y = _matmul_for_cpu(x.reshape(B, K, -1, D), _for_cpu(w, cfg), cfg)
    return y.reshape(*x.shape[:-1], F)


_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)


# ---- matrix products on CPUs

def _is_one_cpu(cfg):
    """Whether this is a program for a single CPU device, in float32 or "mixed"."""
    is_cpu = _by_platform({"cpu": True, "other": False})
    return (is_cpu and jax.sharding.get_abstract_mesh().size == 1
            and cfg.dtype in ("float32", "mixed"))


def _for_cpu(x, cfg):
    """x itself, a hint for the speed of a CPU: XLA writes x and its gradient to memory, and does
    not compute them again in each kernel that reads them.
    """
    if not _is_one_cpu(cfg):
        return x
    return _written(x)


def _written(x):
    """x, which XLA writes to memory with its dims in this order."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _matmul_for_cpu(x, w, cfg):
    """float32 [..., M, D] @ [..., D, F] and its gradient, accumulated in float32; "mixed" rounds
    the operands to bfloat16.

    CPUs that multiply bfloat16 (AMX, AMD's AVX512_BF16) are fast only if the sum runs over the last
    dim of the left operand in memory. float32 is faster that way in a weight's gradient.

    Error: 2**-9 of each operand in bfloat16.
    """
    dtype = jnp.bfloat16 if cfg.dtype == "mixed" else jnp.float32
    dot = partial(jnp.matmul, preferred_element_type=jnp.float32)

    @jax.custom_gradient
    def multiply(x, w):
        x = x.astype(dtype)
        w = w.astype(dtype)

        def gradient(dy):
            dy = dy.astype(dtype)
            # A transpose is written: fused into a product, it is slow or has no kernel.
            dx = dot(dy, w.mT if dtype == jnp.float32 else _written(w.mT))
            # The smaller of x and dy is transposed; without the barrier XLA transposes the other
            # one, and has no kernel.
            if x.size <= dy.size:
                dw = jax.lax.optimization_barrier(dot(_written(x.mT), dy))
            else:
                dw = jax.lax.optimization_barrier(dot(_written(dy.mT), x)).mT
            return dx, dw

        return dot(x, w), gradient

    return multiply(x, w)


# ---- parts of the loss

def _other_loss_norm(weights_BT, cfg):
    """(weights_BT of positions in the objective's sum, divisor of that sum).

    cfg.loss_norm: "positions" divides by all positions, "sequences" averages each sequence over its
    own labels first, "constant" divides a batch by cfg.loss_divisor.
    """
    B, T = weights_BT.shape
    if cfg.loss_norm == "positions":
        divisor = B * T
    elif cfg.loss_norm == "sequences":
        n_labels_B1 = weights_BT.sum(axis=1, keepdims=True)
        weights_BT /= jnp.maximum(n_labels_B1, 1)
        divisor = (n_labels_B1 > 0).sum()
    else:  # "constant"
        # B is the size of a microbatch, batch_size that of the batch of a step.
        divisor = cfg.loss_divisor * B / cfg.batch_size
    return weights_BT, jnp.float32(divisor)


# Whether logits of the loss are rounded to bfloat16, where that is the dtype, by JAX's name of the
# platform. It halves the bytes that the loss moves. Softmax and sums are float32 in any case.
NARROW_LOGITS = {"gpu": True, "other": False}


def to_logits(x_BTD, unembed_DV, cfg, for_loss=False):
    """Logits [B, T, V] in float32; those for a loss are rounded before where NARROW_LOGITS says."""
    is_narrow = for_loss and cfg.dtype == "bfloat16" and _by_platform(NARROW_LOGITS)
    unembed_DV = _for_cpu(unembed_DV, cfg)  # of tied embeddings it is a transpose
    with jax.named_scope("head"):
        logits_BTV = _matmul(x_BTD, unembed_DV, cfg, f32_out=not is_narrow)
        # tp splits the vocabulary: no device holds all logits of a token.
        logits_BTV = _shard(logits_BTV, BATCH_AXES, "sp", "tp").astype(jnp.float32)
        return _soft_cap(logits_BTV, cfg.logit_softcap)


def _sums_in_tiles(unembed_DV, x_BTD, labels_BT, weights_BT, cfg):
    """_loss_sums, in tiles of positions if there are many logits."""
    n_tiles = count_tiles(*labels_BT.shape, cfg)
    # Optional: loss in tiles.
    if n_tiles > 1:
        return _tiled_sums(unembed_DV, x_BTD, labels_BT, weights_BT, cfg, n_tiles)
    return _loss_sums(unembed_DV, x_BTD, labels_BT, weights_BT, cfg)


def _with_optional_sums(sums, counts, layer_results, weights_BT, batch, cfg):
    """(sums, counts) with those of experts and of a document mask."""
    if cfg.n_experts:
        sums, counts = _add_router_sums(
            sums, counts, layer_results["router"], weights_BT, batch["labels"], cfg)
    # Batches of documents have both.
    if "segments" in batch and "positions" in batch:
        sums, counts = _add_document_sums(sums, counts, batch, cfg)
    return sums, counts


# Size of a device's float32 logits above which the loss is computed in tiles, by JAX's name of the
# platform (LOG.md). On a GPU each tile adds kernels, and reads and writes the head's gradient.
LOGIT_BYTES = {"gpu": 2**31, "other": 2**28}


def count_tiles(B, T, cfg):
    """cfg.logit_tiles, or the fewest that keep the logits of a tile under LOGIT_BYTES, or under the
    size of the head's gradient, which each tile reads and writes.
    """
    if cfg.logit_tiles:
        return cfg.logit_tiles
    V, D = cfg.vocab_size, cfg.d_model
    max_bytes = _by_platform(LOGIT_BYTES)
    if cfg.dtype == "float32":
        max_bytes *= 2
    max_bytes = max(max_bytes, 4 * V * D / _axis_size("tp"))
    logit_bytes = 4 * B * T * V / _axis_size(BATCH_AXES, "tp", "sp")
    # Tiles divide the part of a sequence that a device has.
    n_positions = T // _axis_size("sp")
    for n in range(1, n_positions):
        if n_positions % n == 0 and logit_bytes / n <= max_bytes:
            return n
    return n_positions


# ---- FLOPs

def flops_per_token(cfg, seq_len, keys=None):
    """(FLOPs of training on one token, their formula).

    Counts matmuls forward and backward, attention over `keys`, the mean number that a query sees
    (by default half the sequence, or less under a sliding window), only the experts that a token
    goes to, and no gradient of frozen weights.
    """
    # Matmuls: 2 FLOPs per weight forward, 2 for the input's gradient, 2 for the weight's.
    head = "embed" if cfg.tie_embeddings else "unembed"
    table = param_table(cfg)
    frozen = matching("freeze", cfg.freeze, table)
    matmuls = 0
    for name, row in table.items():
        if name != head and not name.startswith("layers.w"):
            continue
        n = prod(row["shape"])
        # Experts [layers, experts, in, out]: those that a token goes to.
        if len(row["shape"]) == 4:
            n = n * cfg.experts_per_token // row["shape"][1]
        flops_per_weight = 4 if name in frozen else 6
        matmuls += flops_per_weight * n

    # Attention: scores and values, multiply and add; backward is twice forward.
    if keys is None:
        windows = [min(_layer_window(kind, cfg) or seq_len, seq_len) for kind in layer_kinds(cfg)]
        keys = np.mean([window * (1 - window / (2 * seq_len)) for window in windows])
    attention = 4 * cfg.n_layers * cfg.n_heads * cfg.head_dim * keys
    return matmuls + 3 * attention, "6*P_matmul + 12*L*N*H*mean_keys, causal: T/2 keys"


# ---- optional
#
# One section for each optional feature: helpers of several sections, generation, layers that
# differ, rotary scaling, dropout, label smoothing, document mask, rematerialization, memory flags,
# loss in tiles, MLP in tiles, attention by blocks, attention by cuDNN, attention by Pallas, LoRA,
# experts, Hugging Face.


# ---- helpers of several sections

# Llama 3.1's bounds on the periods of a rotary frequency within the original length: a frequency
# with fewer than the low bound is stretched, one with more than the high bound is kept.
ROPE_LOW_FREQ_FACTOR = 1
ROPE_HIGH_FREQ_FACTOR = 4
# The same bounds in YaRN: a frequency beyond the first is kept, one below the second is stretched.
YARN_BETA_FAST = 32
YARN_BETA_SLOW = 1


def _with_optional_rows(table, cfg):
    """The table with rows of biases, of norms of outputs or over all heads together, of experts and
    of LoRA.
    """
    table = dict(table)
    if cfg.sandwich_norm:
        for sublayer in ("attn", "mlp"):
            table[f"layers.{sublayer}_out_norm"] = table[f"layers.{sublayer}_norm"]
    for letter, n_heads in (("q", cfg.n_heads), ("k", cfg.n_kv_heads), ("v", cfg.n_kv_heads)):
        shape = (cfg.n_layers, n_heads * cfg.head_dim)
        if cfg.qkv_bias:
            table[f"layers.b{letter}"] = _row(shape, P(None, "tp"), ("constant", 0.0))
        if cfg.qk_norm and cfg.post_norm and letter != "v":
            table[f"layers.{letter}_norm"] = _row(shape, P(None, "tp"), ("constant", 1.0))
    # Experts: a router, and rows of the MLP with one more dim.
    if cfg.n_experts:
        table |= _expert_rows(table, cfg)
    # LoRA: two factors for each target.
    if cfg.lora_rank:
        table |= _lora_rows(table, cfg)
    return table


def split_tiles(x, n):
    """Split the positions of x [B, T, ...] into n tiles: [n, B, T/n, ...].

    Position t goes to tile t mod n: each sp shard keeps its positions, and nothing moves.
    """
    B, T, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, T // n, n, *rest), 2, 0)


def join_tiles(tiles):
    """The inverse of split_tiles."""
    n, B, t, *rest = tiles.shape
    return jnp.moveaxis(tiles, 0, 2).reshape(B, n * t, *rest)


def _mlp_weights(w):
    """The weights of a layer that _mlp reads, with their LoRA factors."""
    prefixes = ("w_gate", "w_up", "w_down")
    return {name: x for name, x in w.items() if name.startswith(prefixes)}


def _by_heads(attend):
    """Wrap attend(q, k, v, segments) in a shard_map that splits rows and heads over all devices."""
    rows = P(BATCH_AXES)
    heads = P(BATCH_AXES, ("tp", "sp"))
    return on_each_device(attend, (heads, heads, heads, rows), heads, "tp")


# ---- generation

def forward(params, batch, cfg):
    """Logits [B, T, V] in float32. batch: as in hidden_states."""
    x_BTD, unembed_DV, _ = hidden_states(params, batch, cfg)
    return to_logits(x_BTD, unembed_DV, cfg)


def generate(params, tokens_BT, lengths_B, cfg, key, n_new, compiler_options=None):
    """Draw n_new tokens [B, n_new] after the first lengths_B (at least 1) tokens of each row; the
    rest of a row is ignored.

    One prefill, then one token at a time with a KV cache. cfg: the model's fields, and temperature
    (0: greedy), top_k (0: all), top_p; hashable. compiler_options: options of XLA.
    """
    compiled = jax.jit(_generate, static_argnames=("cfg", "n_new"),
                       compiler_options=compiler_options)
    return compiled(params, tokens_BT, lengths_B, cfg=cfg, key=key, n_new=n_new)


def _generate(params, tokens_BT, lengths_B, cfg, key, n_new):
    # Fill an empty cache with the prompts.
    cache = empty_cache(*tokens_BT.shape, n_new, cfg)
    logits_BV, cache = prefill(params, {"tokens": tokens_BT}, lengths_B, cache, cfg)

    def add_token(carry, i):
        logits_BV, cache = carry
        token_B, logits_BV, cache = decode(params, logits_BV, cache, lengths_B, i, cfg, key)
        return (logits_BV, cache), token_B

    _, tokens_TB = jax.lax.scan(add_token, (logits_BV, cache), jnp.arange(n_new))
    return tokens_TB.T


def prefill(params, batch, lengths_B, cache, cfg):
    """Write the keys and values of a batch into the cache at its positions: (logits [B, V] after
    the first lengths_B tokens of each row, cache). Each token also sees the tokens in the cache.
    """
    x_BTD, unembed_DV, results = hidden_states(params, batch, cfg, cache=cache)
    x_B1D = jnp.take_along_axis(x_BTD, lengths_B[:, None, None] - 1, axis=1)
    return to_logits(x_B1D, unembed_DV, cfg)[:, 0], results["cache"]


def _attend_to_cache(q_BNTH, k_BKTH, v_BKTH, cache, attn_inputs, cfg):
    """Write k and v into the cache of a layer, and attend to all of it: (a_BNTH, cache)."""
    positions_BT = attn_inputs["positions"]
    row, head, _ = jnp.indices(k_BKTH.shape[:3], sparse=True)
    index = row, head, positions_BT[:, None]
    k_BKSH = cache["k"].at[index].set(k_BKTH)
    v_BKSH = cache["v"].at[index].set(v_BKTH)
    mask_BTS = _attention_mask(positions_BT, k_BKSH.shape[2], attn_inputs["window"])
    a_BNTH = _attend_dense(q_BNTH, k_BKSH, v_BKSH, mask_BTS, cfg)
    return a_BNTH, {"k": k_BKSH, "v": v_BKSH}


def decode(params, logits_BV, cache, lengths_B, i, cfg, key):
    """Draw token i after the first lengths_B of each row: (token_B, logits of the next one, cache).
    """
    token_B = _sample(logits_BV, jax.random.fold_in(key, i), cfg)
    batch = {"tokens": token_B[:, None], "positions": (lengths_B + i)[:, None]}
    logits_BV, cache = prefill(params, batch, jnp.ones_like(lengths_B), cache, cfg)
    return token_B, logits_BV, cache


def empty_cache(B, T, n_new, cfg):
    """The keys "k" and values "v" [L, B, K, S, H] of all layers, before the first token."""
    K = lcm(cfg.n_kv_heads, _axis_size("tp", "sp"))  # kv heads as _to_head_sharding copies them
    empty_LBKSH = jnp.zeros((cfg.n_layers, B, K, T + n_new, cfg.head_dim), _dtype(cfg))
    return {"k": empty_LBKSH, "v": empty_LBKSH}


def _sample(logits_BV, key, cfg):
    """Draw one token per row: of the top_k most likely tokens (0: all) the most likely ones whose
    probabilities sum to top_p. Temperature 0: the most likely token. A row with a logit that is not
    finite gives -1.
    """
    is_finite_B = jnp.isfinite(logits_BV).all(axis=-1)
    if cfg.temperature == 0:
        return jnp.where(is_finite_B, logits_BV.argmax(axis=-1), -1)
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1) / cfg.temperature
    if cfg.top_k:
        rank_1V = jnp.arange(logits_BV.shape[1])[None]
        sorted_BV = jnp.where(rank_1V < cfg.top_k, sorted_BV, -jnp.inf)
    if cfg.top_p < 1:
        p_BV = jax.nn.softmax(sorted_BV)
        before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
        sorted_BV = jnp.where(before_BV < cfg.top_p, sorted_BV, -jnp.inf)
    rank_B = jax.random.categorical(key, sorted_BV)
    token_B = jnp.take_along_axis(order_BV, rank_B[:, None], axis=-1)[:, 0]
    return jnp.where(is_finite_B, token_B, -1)


# Rows of a batch of samples, at most, unless n_samples is more.
SAMPLE_ROWS = 32


def sample_text(params, prompts, cfg, key, decode, compiler_options=None):
    """Continue each prompt cfg.n_samples times by up to cfg.sample_tokens tokens, cut before the
    first of its stops: [{"prompt": its text, "text": what follows}].

    prompts: [{"text", "ids", "stops"}]. decode: ids -> text.
    """
    if not cfg.sample_tokens:
        return []
    # Batches of B rows. The last row is repeated, so that all batches have one shape.
    rows = [prompt for prompt in prompts for _ in range(cfg.n_samples)]
    B = min(len(rows), max(cfg.n_samples, SAMPLE_ROWS))
    padded = rows + rows[-1:] * (-len(rows) % B)
    lengths = np.array([len(row["ids"]) for row in padded], np.int32)
    tokens = np.zeros((len(padded), lengths.max()), np.int32)
    for row_tokens, row in zip(tokens, padded):
        row_tokens[: len(row["ids"])] = row["ids"]

    samples = []
    for i, first in enumerate(range(0, len(rows), B)):
        batch = slice(first, first + B)
        new = generate(params, tokens[batch], lengths[batch], cfg, jax.random.fold_in(key, i),
                       cfg.sample_tokens, compiler_options)
        new = multihost_utils.process_allgather(new, tiled=True)
        check_tokens(new)
        for prompt, ids in zip(rows[batch], new.tolist()):
            text, _ = text_before_stop(prompt, ids, decode)
            samples.append({"prompt": prompt["text"], "text": text})
    return samples


def text_before_stop(prompt, ids, decode):
    """(the text of the ids after a prompt, up to the first of its stops; the index of that stop, or
    None). prompt, decode: as in sample_text.
    """
    end = next((i for i, token in enumerate(ids) if token in prompt["stops"]), None)
    # Decode the prompt too: some tokenizers drop the space at the start of a text.
    # At the end, ids of only a part of a character are decoded to U+FFFD.
    n_before = len(decode(prompt["ids"]))
    text = decode([*prompt["ids"], *ids[:end]])[n_before:].rstrip("\ufffd")
    return text, end


def check_tokens(tokens):
    """Raise ValueError when generated tokens have a -1, the mark of logits that are not finite."""
    if np.any(np.asarray(tokens) < 0):
        raise ValueError("sample: the logits are not finite: the weights are, or overflow in this "
                         "dtype; take another checkpoint, or --dtype float32")


# ---- layers that differ

def _scan_periods(layers, x_BTD, inputs, kinds, period):
    """_scan_layers of layers whose kinds repeat after `period` layers: a scan over periods, then
    the layers of the last, incomplete one.
    """
    def run(x_BTD, inputs, kinds):
        # By split, whose gradient is one concatenation; that of an index is a sum over layers.
        leaves, tree = jax.tree.flatten(inputs)
        parts = [[x.squeeze(0) for x in jnp.split(leaf, len(kinds))] for leaf in leaves]
        results = []
        for kind, *layer_leaves in zip(kinds, *parts):
            x_BTD, result = layers[kind](x_BTD, tree.unflatten(layer_leaves))
            results.append(result)
        return x_BTD, jax.tree.map(lambda *parts: jnp.stack(parts), *results)

    n_periods, n_rest = divmod(len(kinds), period)
    n = n_periods * period
    whole = jax.tree.map(lambda x: x[:n].reshape(n_periods, period, *x.shape[1:]), inputs)
    x_BTD, results = jax.lax.scan(
        lambda x_BTD, group: run(x_BTD, group, kinds[:period]), x_BTD, whole, unroll=n_periods == 1)
    results = jax.tree.map(lambda x: x.reshape(n, *x.shape[2:]), results)
    if n_rest:
        rest = jax.tree.map(lambda x: x[n:], inputs)
        x_BTD, rest_results = run(x_BTD, rest, kinds[n:])
        results = jax.tree.map(lambda *parts: jnp.concatenate(parts), results, rest_results)
    return x_BTD, results


# ---- rotary scaling

def _stretch_rope(freq, cfg):
    """(frequencies, of which all or some are divided by rope_factor; factor of cos and sin).

    Source of "yarn": Peng et al. 2023, arXiv:2309.00071, section 3.
    """
    attn_factor = 1.0
    if cfg.rope_scaling == "linear":
        keep = 0.0  # fraction of each frequency that is not divided
    elif cfg.rope_scaling == "llama3":
        # Wavelengths longer than the original length are stretched. Wavelengths shorter than a
        # quarter of it are kept. Others are interpolated.
        n_periods = cfg.rope_original_len * freq / (2 * jnp.pi)
        low, high = ROPE_LOW_FREQ_FACTOR, ROPE_HIGH_FREQ_FACTOR
        keep = jnp.clip((n_periods - low) / (high - low), 0, 1)
    else:
        # Dims before `first` are kept. Dims after `last` are stretched. Others are interpolated.
        def dim_with(n_periods):
            """The dim that turns n_periods times within the original length, as a fraction."""
            wavelength = cfg.rope_original_len / n_periods
            return cfg.head_dim / 2 * log(wavelength / (2 * pi)) / log(cfg.rope_theta)

        first = max(floor(dim_with(YARN_BETA_FAST)), 0)
        last = min(ceil(dim_with(YARN_BETA_SLOW)), cfg.head_dim - 1)
        stretch = (jnp.arange(cfg.head_dim // 2) - first) / max(last - first, 0.001)
        keep = 1 - jnp.clip(stretch, 0, 1)
        attn_factor = cfg.rope_attn_factor or 0.1 * log(cfg.rope_factor) + 1
    return keep * freq + (1 - keep) * freq / cfg.rope_factor, attn_factor


def _scale_by_position(q_BNTH, positions_BT, cfg):
    """Multiply each query by 1 + rope_query_beta * ln(1 + position // rope_original_len)."""
    n_lengths_BT = positions_BT // cfg.rope_original_len
    scale_BT = 1 + cfg.rope_query_beta * jnp.log(1 + n_lengths_BT.astype(jnp.float32))
    return (q_BNTH * scale_BT[:, None, :, None]).astype(q_BNTH.dtype)


# ---- dropout

def _with_dropout(x_BTD, weights, train_keys, cfg):
    """(x_BTD with dropout, weights of layers with random keys: {"attn", "mlp": [L, B]})."""
    def keys_at(index):
        return jax.vmap(lambda key: jax.random.fold_in(key, index))(train_keys)

    keys = jax.vmap(keys_at)(jnp.arange(1 + 2 * cfg.n_layers))
    layer_keys = {"attn": keys[1::2], "mlp": keys[2::2]}
    return _dropout(x_BTD, keys[0], cfg), weights | {"dropout_keys": layer_keys}


def _dropout(x_BTD, keys_B, cfg):
    """Set the fraction cfg.dropout of the elements to zero, and divide the rest by 1 - dropout.

    The mask of a row depends on its key alone: the mesh and the microbatches do not change it.

    Source: Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a.
    """
    def keep_row(key):
        return jax.random.bernoulli(key, 1 - cfg.dropout, x_BTD.shape[1:])

    with jax.named_scope("dropout"):
        # Each device draws its part of the mask.
        keep_BTD = _shard(jax.vmap(keep_row)(keys_B), BATCH_AXES, "sp")
        scaled_BTD = x_BTD.astype(jnp.float32) / (1 - cfg.dropout)
        return jnp.where(keep_BTD, scaled_BTD, 0).astype(x_BTD.dtype)


# ---- label smoothing

def _label_smoothing(logits_BTV, true_BT, cfg):
    """The term [B, T] that moves a fraction eps of the target from the label to the other tokens.

    Minus the entropy of the smoothed target, so that a perfect model scores 0. true_BT: logits of
    the labels.

    Source: Szegedy et al. 2015, arXiv:1512.00567.
    """
    eps = cfg.label_smoothing
    n_others = cfg.vocab_size - 1
    others_BT = (logits_BTV.sum(axis=-1) - true_BT) / n_others
    entropy = -(1 - eps) * log(1 - eps) - eps * log(eps / n_others)
    return eps * (true_BT - others_BT) - entropy


# ---- document mask

def _add_document_sums(sums, counts, batch, cfg):
    """(sums, counts) with those over all positions: "padding", 1 for a position without a token,
    and "attended_keys", how many keys a query sees.
    """
    used_BT = batch["segments"] > 0
    n_keys_BT = jnp.zeros(used_BT.shape)
    for kind, n_layers in Counter(layer_kinds(cfg)).items():
        window = _layer_window(kind, cfg) or cfg.seq_len
        n_keys_BT += n_layers * jnp.minimum(batch["positions"] + 1, window)
    n_keys_BT /= cfg.n_layers
    document_sums = {"padding": (~used_BT).sum(dtype=jnp.float32),
                     "attended_keys": jnp.where(used_BT, n_keys_BT, 0).sum(dtype=jnp.float32)}
    n_positions = jnp.float32(used_BT.size)
    return sums | document_sums, counts | dict.fromkeys(document_sums, n_positions)


# ---- rematerialization

_policies = jax.checkpoint_policies


def _is_cudnn_attention(primitive, *_, **__):
    return primitive.name == "dot_product_attention_fwd_wrapper"


# {cfg.remat: the policy that decides which results of a layer backward finds in memory}. The names
# are those of checkpoint_name.
REMAT = {
    "none": _policies.everything_saveable,
    "full": _policies.nothing_saveable,
    "dots": _policies.dots_with_no_batch_dims_saveable,
    # cuDNN's output and softmax statistics, which backward needs, have no names.
    "named": _policies.save_from_both_policies(
        _policies.save_only_these_names("qkv", "attention"), _is_cudnn_attention),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["block"],
        offload_src="device", offload_dst="pinned_host"),
}


# ---- memory flags

def memory_savers(sp, cfg):
    """Flags not set yet that lower activation memory, the cheapest in time first. sp: size of that
    mesh axis.
    """
    flags = []
    n_tiles = gcd(16, cfg.seq_len // sp)
    if cfg.mlp_tiles < n_tiles and not cfg.n_experts:
        flags.append({"mlp_tiles": n_tiles})
    if cfg.remat == "none":
        flags.append({"remat": "full"})
    if cfg.remat != "offload":
        flags.append({"remat": "offload"})
    return flags


def activation_bytes(cfg, n, is_gpu):
    """Estimate from shapes of the bytes on a device during a microbatch: what remat keeps, all of
    one layer, and logits. n: {mesh axis: size}.
    """
    tokens = cfg.batch_size * cfg.seq_len / (n["dp"] * n["fsdp"] * n["ep"] * n["sp"])
    tokens /= cfg.grad_accum_steps
    heads = 2 * (cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim / n["tp"]  # q, k, v, output
    hidden = 3 * cfg.d_ff / n["tp"] / max(cfg.mlp_tiles, 1)  # gate, up, product
    if cfg.n_experts:
        hidden *= cfg.experts_per_token * (cfg.capacity_factor or 1)
    layer = 4 * cfg.d_model + heads + hidden  # inputs of two blocks, before and after their norms
    kept = {"none": layer, "dots": 2 * cfg.d_model + heads + hidden, "full": cfg.d_model,
            "named": cfg.d_model + heads, "offload": 0}[cfg.remat]
    logits = 4 * tokens * cfg.vocab_size / n["tp"]
    head = 4 * cfg.vocab_size * cfg.d_model / n["tp"]
    most = max(LOGIT_BYTES["gpu" if is_gpu else "other"], head)  # as count_tiles chooses them
    logits = logits / cfg.logit_tiles if cfg.logit_tiles else min(logits, most)
    itemsize = 2 if "16" in cfg.dtype else 4
    return tokens * itemsize * (cfg.n_layers * kept + layer) + logits


# ---- loss in tiles

# By hand: jax.checkpoint would compute each tile's logits twice, a third slower (LOG.md).

@partial(jax.custom_vjp, nondiff_argnames=("cfg", "n_tiles"))
def _tiled_sums(unembed_DV, x_BTD, labels_BT, weights_BT, cfg, n_tiles):
    """_loss_sums with the logits of one tile at a time.

    The gradient of "objective" is computed in the forward pass, tile by tile. Only if other sums
    have a gradient too does backward compute the tiles again.
    Source: Hsu et al. 2024 (Liger), arXiv:2410.10989, section 3.2.
    """
    tiles = jax.tree.map(lambda x: split_tiles(x, n_tiles), (x_BTD, labels_BT, weights_BT))
    sums, nats = jax.lax.map(lambda tile: _loss_sums(unembed_DV, *tile, cfg), tiles)
    return jax.tree.map(lambda x: x.sum(axis=0), sums), join_tiles(nats)


def _tiled_grads(unembed_DV, x_BTD, labels_BT, weights_BT, cotangents, cfg, n_tiles):
    """(_tiled_sums, gradients of unembed_DV, as float32 [devices, D, V], and of x_BTD), for the
    cotangents of some of the sums.
    """
    def weighted_sum(unembed_DV, x_BtD, labels_Bt, weights_Bt, cotangents):
        sums, nats_Bt = _loss_sums(unembed_DV, x_BtD, labels_Bt, weights_Bt, cfg)
        return sum(c * sums[name] for name, c in cotangents.items()), (sums, nats_Bt)

    tile_grads = jax.grad(weighted_sum, (0, 1), has_aux=True)

    def device_grads(unembed_DV, x_BTD, labels_BT, weights_BT, cotangents):
        def add_tile(total_DV, tile):
            (d_unembed_DV, dx_BtD), found = tile_grads(unembed_DV, *tile, cotangents)
            return total_DV + d_unembed_DV.astype(jnp.float32), (dx_BtD, found)

        tiles = jax.tree.map(lambda x: split_tiles(x, n_tiles), (x_BTD, labels_BT, weights_BT))
        d_unembed_DV, (dx, (sums, nats)) = jax.lax.scan(
            add_tile, jnp.zeros(unembed_DV.shape), tiles)
        sums = {name: x.sum(axis=0)[None] for name, x in sums.items()}
        return sums, join_tiles(nats), d_unembed_DV[None], join_tiles(dx)

    split = P(BATCH_AXES, "sp")
    stacked = P((*BATCH_AXES, "sp"))  # a first dim of 1 for each device
    sums, nats_BT, d_unembed, dx_BTD = on_each_device(
        device_grads, (P(), split, split, split, P()), (stacked, split, stacked, split))(
        unembed_DV, x_BTD, labels_BT, weights_BT, cotangents)
    sums = {name: jax.lax.reduce_sum(x, (0,)) for name, x in sums.items()}
    return (sums, nats_BT), (d_unembed, dx_BTD)


def _tiled_fwd(unembed_DV, x_BTD, labels_BT, weights_BT, cfg, n_tiles):
    inputs = [a.value for a in (unembed_DV, x_BTD, labels_BT, weights_BT)]
    # As if the largest weight were 1: float16 then holds the gradients of logits.
    unit = jnp.maximum(inputs[3].max(), 2.0**-24)
    found, grads = _tiled_grads(*inputs, {"objective": 1 / unit}, cfg, n_tiles)
    return found, (inputs, grads, unit)


def _tiled_bwd(cfg, n_tiles, saved, cotangents):
    inputs, grads, unit = saved
    zero = jax.custom_derivatives.SymbolicZero
    used = {name: c for name, c in cotangents[0].items() if not isinstance(c, zero)}
    scale = unit * used.get("objective", 0)
    if used.keys() - {"objective"}:
        _, grads = _tiled_grads(*inputs, used, cfg, n_tiles)
        scale = jnp.float32(1)
    d_unembed, dx_BTD = grads
    # Devices sum it in its dtype, as they do the other gradients: scaled before, as float16 needs.
    # Not by jnp.sum, which would send float32.
    d_unembed_DV = jax.lax.reduce_sum((d_unembed * scale).astype(dx_BTD.dtype), (0,))
    return d_unembed_DV, dx_BTD * scale.astype(dx_BTD.dtype), None, None


_tiled_sums.defvjp(_tiled_fwd, _tiled_bwd, symbolic_zeros=True)


# ---- MLP in tiles

def _mlp_in_tiles(x_BTD, w, cfg):
    """_mlp of one tile at a time, recomputed in backward.

    Source: Bekman et al. 2025 (ALST), arXiv:2506.13996, section 3.1.
    """
    n_tp = _axis_size("tp")

    def device_mlp(x_BTD, w):
        def tile_mlp(x_BtD):
            cast = {name: a.astype(x_BtD.dtype) for name, a in w.items()}
            return _mlp(x_BtD, cast, cfg)

        tiles = split_tiles(x_BTD, cfg.mlp_tiles)
        y_BTD = join_tiles(jax.lax.map(jax.checkpoint(tile_mlp), tiles))
        # tp splits the MLP's width: each device has a part of the sum over it.
        if n_tp > 1:
            y_BTD = jax.lax.psum(y_BTD, "tp")
        return y_BTD

    # Gather the weights over all axes but tp, as float32: backward adds up the gradients of the
    # tiles and devices in the dtype of w.
    table = param_table(cfg)
    specs = {}
    gathered = {}
    for name, x in _mlp_weights(w).items():
        axes = [axis if axis == "tp" else None for axis in table[f"layers.{name}"]["spec"][1:]]
        specs[name] = P(*axes)
        gathered[name] = _shard(x, *axes).astype(jnp.float32)
    split = P(BATCH_AXES, "sp")
    return on_each_device(device_mlp, (split, specs), split, "tp")(x_BTD, gathered)


# ---- attention by blocks

BLOCK_LEN = 512  # most queries and most keys of a block


def _attend_in_blocks(q_BNTH, k_BKTH, v_BKTH, attn_inputs, cfg):
    """Attention within a sequence by _blockwise: in at least 8 parts, so that little more than
    half of all blocks is computed.
    """
    T, H = q_BNTH.shape[2:]
    n = max(8, ceil(T / BLOCK_LEN))
    t = ceil(T / n)
    window = attn_inputs["window"] or T

    def split(x):
        """[..., T, H] as [..., n, t, H]. Padding comes last, so that no token sees it."""
        padding = [(0, 0)] * (x.ndim - 2) + [(0, n * t - T), (0, 0)]
        return jnp.pad(x, padding, mode="edge").reshape(*x.shape[:-2], n, t, -1)

    def device_attention(q, k, v, segments):
        B, K = k.shape[:2]
        operand = jnp.bfloat16 if cfg.dtype == "mixed" else q.dtype
        q_BKGTH = H**-0.5 * q.reshape(B, K, -1, T, H)
        q_BKGntH = split(q_BKGTH.astype(operand))
        k_BKntH = split(k.astype(operand))
        v_BKntH = split(v.astype(operand))
        ids_Bnt = None
        if segments is not None:
            ids_Bnt = split(segments[..., None])[..., 0]
        attention = jax.custom_gradient(partial(_blockwise, window=window, cap=cfg.attn_softcap))
        a_BKGntH = attention(q_BKGntH, k_BKntH, v_BKntH, ids_Bnt)
        return a_BKGntH.reshape(*q.shape[:2], n * t, H)[:, :, :T].astype(q_BNTH.dtype)

    return _by_heads(device_attention)(q_BNTH, k_BKTH, v_BKTH, attn_inputs["segments"])


_part = partial(jax.lax.dynamic_index_in_dim, axis=-3, keepdims=False)
_put_part = partial(jax.lax.dynamic_update_index_in_dim, axis=-3)


def _over_blocks(add_block, totals, q_BKGntH, k_BKntH, ids_Bnt, window, cap):
    """Run totals = add_block(totals, i, j, scores_BKGts) for query part i and key part j of each
    block in which a query may see a key. ids: the segments.

    For each i the key parts run backwards from the diagonal, where every query sees a key.
    """
    n, t = k_BKntH.shape[2:4]
    # Blocks [n, n], by query part i and distance back to the key part j, in which a query and a key
    # can meet.
    i, back = np.indices((n, n))
    j = i - back
    meet = (j >= 0) & ((back - 1) * t + 1 < window)
    if ids_Bnt is not None:
        low_Bn = ids_Bnt.min(axis=2)
        high_Bn = ids_Bnt.max(axis=2)
        disjoint = (low_Bn[:, i] > high_Bn[:, j]) | (low_Bn[:, j] > high_Bn[:, i])
        meet = meet & ~disjoint.all(axis=0)
    blocks = jnp.stack(jnp.nonzero(meet, size=n * (n + 1) // 2))

    def visit(block, totals):
        i, back = blocks[:, block]
        j = i - back
        query_pos_1t = (back * t + jnp.arange(t))[None]  # counted from the block's first key
        mask = _attention_mask(query_pos_1t, t, window)
        if ids_Bnt is not None:
            mask = mask & _same_segment(ids_Bnt[:, i], ids_Bnt[:, j])
        scores_BKGts = _einsum("BKGtH,BKsH->BKGts", _part(q_BKGntH, i), _part(k_BKntH, j))
        scores_BKGts = _soft_cap(scores_BKGts, cap)
        scores_BKGts = jnp.where(mask[:, None, None], scores_BKGts, -jnp.inf)
        return add_block(totals, i, j, scores_BKGts)

    return jax.lax.fori_loop(0, meet.sum(), visit, totals)


def _blockwise(q_BKGntH, k_BKntH, v_BKntH, ids_Bnt, window, cap):
    """Attention of scaled queries in n parts of t, and its gradient function.

    Both hold the scores of one block at a time; the gradient computes them again.

    Source: Dao 2023, arXiv:2307.08691, section 3.1.
    """
    def add_forward(totals, i, j, scores_BKGts):
        """Rescale the sums so far to the new maximum, and add those of this block."""
        old_max_BKGt1 = _part(totals["max"], i)
        max_BKGt1 = jnp.maximum(old_max_BKGt1, scores_BKGts.max(axis=-1, keepdims=True))
        e_BKGts = jnp.exp(scores_BKGts - max_BKGt1)
        scale_BKGt1 = jnp.exp(old_max_BKGt1 - max_BKGt1)
        e_v_BKGtH = _einsum("BKGts,BKsH->BKGtH", e_BKGts.astype(v_BKntH.dtype), _part(v_BKntH, j))
        a_BKGtH = scale_BKGt1 * _part(totals["a"], i) + e_v_BKGtH
        sum_BKGt1 = scale_BKGt1 * _part(totals["sum"], i) + e_BKGts.sum(axis=-1, keepdims=True)
        return {"a": _put_part(totals["a"], a_BKGtH, i),
                "sum": _put_part(totals["sum"], sum_BKGt1, i),
                "max": _put_part(totals["max"], max_BKGt1, i)}

    zeros_BKGnt1 = jnp.zeros((*q_BKGntH.shape[:-1], 1))
    totals = {"a": jnp.zeros(q_BKGntH.shape), "sum": zeros_BKGnt1, "max": zeros_BKGnt1 - jnp.inf}
    totals = _over_blocks(add_forward, totals, q_BKGntH, k_BKntH, ids_Bnt, window, cap)
    a_BKGntH = (totals["a"] / totals["sum"]).astype(q_BKGntH.dtype)
    a_BKGntH = checkpoint_name(a_BKGntH, "attention")
    lse_BKGnt1 = checkpoint_name(totals["max"] + jnp.log(totals["sum"]), "attention")

    def gradient(da_BKGntH):
        delta_BKGnt1 = (da_BKGntH.astype(jnp.float32) * a_BKGntH).sum(axis=-1, keepdims=True)

        def add_backward(totals, i, j, scores_BKGts):
            q_BKGtH = _part(q_BKGntH, i)
            da_BKGtH = _part(da_BKGntH, i)
            p_BKGts = jnp.exp(scores_BKGts - _part(lse_BKGnt1, i))
            dp_BKGts = _einsum("BKGtH,BKsH->BKGts", da_BKGtH, _part(v_BKntH, j))
            ds_BKGts = p_BKGts * (dp_BKGts - _part(delta_BKGnt1, i))
            if cap:  # the derivative of tanh, from its value; masked scores are -inf
                ds_BKGts *= 1 - jnp.square(jnp.maximum(scores_BKGts / cap, -1))
            ds_BKGts = ds_BKGts.astype(q_BKGntH.dtype)
            dq_BKGtH = _einsum("BKGts,BKsH->BKGtH", ds_BKGts, _part(k_BKntH, j))
            # dk and dv transposed, or XLA on a CPU would transpose ds and p in every block.
            dk_BKHs = _einsum("BKGtH,BKGts->BKHs", q_BKGtH, ds_BKGts)
            dv_BKHs = _einsum("BKGtH,BKGts->BKHs", da_BKGtH, p_BKGts.astype(da_BKGtH.dtype))
            return {"dq": _add_part(totals["dq"], dq_BKGtH, i),
                    "dk": _add_part(totals["dk"], dk_BKHs, j),
                    "dv": _add_part(totals["dv"], dv_BKHs, j)}

        zeros_BKnHt = jnp.zeros(k_BKntH.swapaxes(3, 4).shape)
        totals = {"dq": jnp.zeros(q_BKGntH.shape), "dk": zeros_BKnHt, "dv": zeros_BKnHt}
        totals = _over_blocks(add_backward, totals, q_BKGntH, k_BKntH, ids_Bnt, window, cap)
        dq_BKGntH = totals["dq"].astype(q_BKGntH.dtype)
        dk_BKntH = totals["dk"].swapaxes(3, 4).astype(k_BKntH.dtype)
        dv_BKntH = totals["dv"].swapaxes(3, 4).astype(v_BKntH.dtype)
        return dq_BKGntH, dk_BKntH, dv_BKntH, None

    return a_BKGntH, gradient


def _add_part(total, x, i):
    return _put_part(total, _part(total, i) + x, i)


# ---- attention by cuDNN

def _attend_cudnn(q_BNTH, k_BKTH, v_BKTH, attn_inputs, cfg, implementation="cudnn"):
    """Attention within a sequence by cuDNN's fused kernel. Segments become a mask [T, T]."""
    mask = None
    segments = attn_inputs["segments"]
    if segments is not None:
        mask = _shard(_same_segment(segments, segments)[:, None], BATCH_AXES, None, None, None)
    window = None
    if attn_inputs["window"]:
        window = (attn_inputs["window"] - 1, 0)
    a_BTNH = jax.nn.dot_product_attention(
        q_BNTH.swapaxes(1, 2), k_BKTH.swapaxes(1, 2), v_BKTH.swapaxes(1, 2), mask=mask,
        is_causal=True, local_window_size=window, implementation=implementation)
    return a_BTNH.swapaxes(1, 2)


# ---- attention by Pallas

def _attend_pallas(q_BNTH, k_BKTH, v_BKTH, attn_inputs, cfg):
    """Attention within a sequence by JAX's splash kernel for TPUs."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
    T, H = q_BNTH.shape[2:]
    window = attn_inputs["window"]
    block = max(n for n in (128, 256, 512) if T % n == 0)

    def attend(q, k, v, segments):
        mask = splash.CausalMask((T, T))
        if window:
            mask = splash.LocalMask((T, T), (window - 1, 0), 0)
        sizes = splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block,
            block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
            block_q_dq=block, block_kv_dq=block)
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * q.shape[1]), head_shards=1, q_seq_shards=1,
            block_sizes=sizes, residual_checkpoint_name="attention")
        segment_ids = None
        if segments is not None:
            segment_ids = splash.SegmentIds(segments, segments)
        return jax.vmap(kernel)(q, k, v, segment_ids)

    q_scaled_BNTH = H**-0.5 * q_BNTH
    a_BNTH = _by_heads(attend)(q_scaled_BNTH, k_BKTH, v_BKTH, attn_inputs["segments"])
    return a_BNTH.astype(q_BNTH.dtype)


# ---- LoRA

def _lora_rows(table, cfg):
    """Table rows of the two LoRA factors of each target; their product starts at zero.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """
    r = cfg.lora_rank
    weights = [name for name in table
               if name.startswith("layers.w") and name != "layers.w_router"]
    rows = {}
    for name in sorted(matching("lora_targets", cfg.lora_targets, weights)):
        *stack, n_in, n_out = table[name]["shape"]
        *stack_axes, in_axes, out_axes = table[name]["spec"]
        rows[f"{name}.lora_a"] = _row(
            (*stack, n_in, r), P(*stack_axes, in_axes, None), ("normal", n_in**-0.5))
        rows[f"{name}.lora_b"] = _row(
            (*stack, r, n_out), P(*stack_axes, None, out_axes), ("normal", 0.0))
    return rows


def _lora_product(x, w, name, cfg):
    """The product of x and the scaled LoRA factors of w[name]."""
    x_r = _matmul(x, w[f"{name}.lora_a"], cfg)
    return cfg.lora_alpha / cfg.lora_rank * _matmul(x_r, w[f"{name}.lora_b"], cfg)


def merge_lora(params, cfg):
    """params without LoRA factors: their scaled product is added to each weight, in float32."""
    merged = {name: x for name, x in params.items() if ".lora_" not in name}
    for name in merged:
        if f"{name}.lora_a" in params:
            w = params[name].astype(jnp.float32)
            a = params[f"{name}.lora_a"].astype(jnp.float32)
            b = params[f"{name}.lora_b"].astype(jnp.float32)
            product = cfg.lora_alpha / cfg.lora_rank * jnp.matmul(a, b, precision="highest")
            merged[name] = w + product
    return merged


def names_to_load(table, saved, cfg):
    """The parameters that a run takes from another run, which saved those in `saved` (none: a fresh
    initialization).

    Raises ValueError when LoRA would tune a fresh initialization.
    """
    if cfg.lora_rank and not saved:
        raise ValueError(f"lora_rank {cfg.lora_rank}: a fresh initialization has nothing to tune; "
                         "name the --out_dir of a trained run with --init_from")
    return {name for name in table if ".lora_" not in name or name in saved}


# Settings in the adapter_config.json of PEFT that are read, or that no logits depend on.
PEFT_SETTINGS = {
    "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "lora_dropout",
    "task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping",
    "peft_version", "megatron_core", "qalora_group_size"}
# Legal values of others. Some ways to initialize change the weights of the base.
PEFT_LEGAL = {"peft_type": ("LORA",), "init_lora_weights": (True, False, "gaussian", "orthogonal")}
PEFT_OFF = (None, False, "none", [], {})  # legal values of all others


def adapter_fields(settings, tensors):
    """The fields of Config that describe an adapter of PEFT, from its adapter_config.json and the
    names of its tensors.

    Raises ValueError that lists the settings that this model cannot express.
    """
    errors = []
    for name, value in settings.items():
        legal = PEFT_LEGAL.get(name, PEFT_OFF)
        if name not in PEFT_SETTINGS and value not in legal:
            errors.append(f"{name} {value!r}: must be one of {[*legal]}")
    if errors:
        raise ValueError("\n  ".join(["this model cannot express", *errors]))
    rank, alpha = settings["r"], settings["lora_alpha"]
    if settings.get("use_rslora"):  # scaled by alpha / rank**0.5
        alpha *= rank**0.5
    modules = {tensor.split(".")[-3] for tensor in tensors}  # such as q_proj
    targets = [name for name, hf_name in HF_NAMES.items()
               if name.startswith("layers.w") and hf_name.split(".")[-2] in modules]
    return {"lora_rank": rank, "lora_alpha": float(alpha), "lora_targets": tuple(targets)}


# ---- experts

def _expert_rows(table, cfg):
    """Table rows of the router and of the experts' weights, which replace those of the MLP."""
    L, D, F, E = cfg.n_layers, cfg.d_model, cfg.d_ff, cfg.n_experts
    up, down = table["layers.w_up"], table["layers.w_down"]
    # ep splits the experts; the other axes split each weight as in an MLP.
    up_spec = P(None, "ep", ("fsdp", "sp"), "tp")
    down_spec = P(None, "ep", "tp", ("fsdp", "sp"))
    return {
        "layers.w_gate": _row((L, E, D, F), up_spec, up["init"]),
        "layers.w_up": _row((L, E, D, F), up_spec, up["init"]),
        "layers.w_down": _row((L, E, F, D), down_spec, down["init"]),
        "layers.w_router": _row((L, D, E), P(None, WEIGHT_AXES), up["init"]),
    }


def _experts(y_BTD, w, segments_BT, cfg):
    """The weighted sum of each token's experts, and the statistics of _route."""
    B, T, D = y_BTD.shape
    routing = _route(y_BTD, w["w_router"], segments_BT, cfg, decoding="cache" in w)
    n_parts, n_slots = routing["tokens"].shape[1:]

    # Copy each token to the slots of its experts.
    tokens = routing["tokens"][..., None]
    x = jnp.take_along_axis(y_BTD.reshape(B, n_parts, -1, D), tokens, axis=2)
    x_BPECD = x.reshape(B, n_parts, cfg.n_experts, -1, D)

    # Over ep an all-to-all: from all experts of some rows to some experts of all rows; and back.
    by_row = (BATCH_AXES, "sp")
    by_expert = (("dp", "fsdp"), "sp", "ep")
    x_BPECD = _shard(_shard(x_BPECD, *by_row), *by_expert)
    mlp_of_experts = jax.vmap(partial(_mlp, cfg=cfg), (2, 0), 2)
    h_BPECD = mlp_of_experts(x_BPECD, _mlp_weights(w))
    h_BPECD = _shard(_shard(h_BPECD, *by_expert), *by_row)

    # Add up the experts of each token, each times its weight.
    slots = jnp.minimum(routing["slots"], n_slots - 1)
    h = h_BPECD.reshape(B, n_parts, n_slots, D)
    h = jnp.take_along_axis(h, slots[..., None], axis=2)
    weights = routing["weights"][..., None].astype(y_BTD.dtype)
    y_BTD = (h.reshape(B, T, -1, D) * weights).sum(axis=2)
    return y_BTD, routing["stats"]


def _route(y_BTD, router_DE, segments_BT, cfg, decoding):
    """Choose the experts of each token, in float32.

    Returns {"weights": [B, T, k], of each choice, 0 where it is dropped; "slots": [B, parts,
    T/parts * k], the slot of each choice among those of all experts; "tokens": [B, parts, E C],
    the token in each slot; "stats": {name: [B, T]}}.

    An expert's capacity C is cfg.capacity_factor times an even part of one sequence's tokens; it is
    unlimited with capacity_factor 0 and in decoding. The earliest tokens are kept, so that no token
    depends on a later one. Over sp capacity is counted within each part of the sequence, to move no
    tokens between parts: the size of sp changes which choices are dropped, unless capacity_factor
    is 0. Padding (segment 0) chooses no expert.

    Statistics: "balance", 1 where a sequence's tokens spread evenly, E where one expert gets all;
    "router_z", the squared log-partition; "dropped", the fraction of choices over capacity.
    Source: Fedus et al. 2021, arXiv:2101.03961, section 2.2; router_z, Zoph et al. 2022,
    arXiv:2202.08906, equation 5.
    """
    B, T, _ = y_BTD.shape
    E, k = cfg.n_experts, cfg.experts_per_token
    n_parts = gcd(T, _axis_size("sp"))
    t = T // n_parts
    C = t
    if cfg.capacity_factor and not decoding:
        C = min(ceil(t * k / E * cfg.capacity_factor), t)
    used_BT1 = jnp.ones((B, T, 1), bool)
    if segments_BT is not None:
        used_BT1 = segments_BT[..., None] > 0

    # Each token chooses its k likeliest experts.
    logits_BTE = jnp.dot(y_BTD.astype(jnp.float32), router_DE, precision="highest")
    p_BTE = jax.nn.softmax(logits_BTE)
    weights, chosen = jax.lax.top_k(p_BTE, k)

    # A choice is kept if fewer than C earlier tokens of its part chose the same expert.
    hits_BTE = (chosen[..., None] == jnp.arange(E)[None, None, None]).sum(axis=2)
    hits_BTE = used_BT1 * hits_BTE
    ahead_BTE = jnp.cumsum(hits_BTE.reshape(B, n_parts, t, E), axis=2).reshape(B, T, E) - hits_BTE
    rank = jnp.take_along_axis(ahead_BTE, chosen, axis=2)
    kept = used_BT1 & (rank < C)
    weights = jnp.where(kept, weights / weights.sum(axis=-1, keepdims=True), 0)

    # The slot of each kept choice. A dropped choice goes to a slot after the last, which no expert
    # reads.
    slots = jnp.where(kept, chosen * C + rank, E * C).reshape(B, n_parts, t * k)
    # And the token in each slot.
    row, part, choice = jnp.indices(slots.shape, sparse=True)
    tokens = jnp.zeros((B, n_parts, E * C + 1), jnp.int32)
    tokens = tokens.at[row, part, slots].set(choice // k)[..., :-1]

    n_used_B1 = jnp.maximum(used_BT1.sum(axis=1), 1)
    hits_BE = hits_BTE.sum(axis=1) / n_used_B1
    p_BE = (used_BT1 * p_BTE).sum(axis=1) / n_used_B1
    balance_B1 = E * (hits_BE / k * p_BE).sum(axis=-1, keepdims=True)
    stats = {"balance": jnp.broadcast_to(balance_B1, (B, T)),
             "router_z": jax.nn.logsumexp(logits_BTE, axis=-1) ** 2,
             "dropped": 1 - kept.mean(axis=-1)}
    return {"weights": weights, "slots": slots, "tokens": tokens, "stats": stats}


def _add_router_sums(sums, counts, router_stats, weights_BT, labels_BT, cfg):
    """(sums, counts) with the router_stats [L, B, T], averaged over layers, and with the router's
    losses in "objective".
    """
    router_stats = {name: x.mean(axis=0) for name, x in router_stats.items()}
    router_sums = {name: jnp.where(labels_BT != IGNORE, x_BT, 0).sum()
                   for name, x_BT in router_stats.items()}
    losses_BT = (cfg.router_balance * router_stats["balance"]
                 + cfg.router_z * router_stats["router_z"])
    router_sums["objective"] = sums["objective"] + (weights_BT * losses_BT).sum()
    return sums | router_sums, dict.fromkeys(router_sums, counts["loss"]) | counts


# ---- Hugging Face

# Hugging Face's names of the parameters, {} for the layer and the expert. Its files have one tensor
# for each layer and expert, and linear weights [out, in]. Heads are rotated in the same order.
HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "unembed": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "layers.attn_norm": "model.layers.{}.input_layernorm.weight",
    "layers.mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "layers.wq": "model.layers.{}.self_attn.q_proj.weight",
    "layers.wk": "model.layers.{}.self_attn.k_proj.weight",
    "layers.wv": "model.layers.{}.self_attn.v_proj.weight",
    "layers.wo": "model.layers.{}.self_attn.o_proj.weight",
    "layers.bq": "model.layers.{}.self_attn.q_proj.bias",
    "layers.bk": "model.layers.{}.self_attn.k_proj.bias",
    "layers.bv": "model.layers.{}.self_attn.v_proj.bias",
    "layers.q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "layers.k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "layers.w_gate": "model.layers.{}.mlp.gate_proj.weight",
    "layers.w_up": "model.layers.{}.mlp.up_proj.weight",
    "layers.w_down": "model.layers.{}.mlp.down_proj.weight",
}

# Other names, by model_type.
OLMO_NAMES = {
    "layers.attn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "layers.mlp_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}
GEMMA_NAMES = {
    "layers.attn_out_norm": "model.layers.{}.post_attention_layernorm.weight",
    "layers.mlp_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
    "layers.mlp_out_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}
HF_FAMILY_NAMES = {
    "olmo2": OLMO_NAMES,
    "olmo3": OLMO_NAMES,
    "gemma2": GEMMA_NAMES,
    "gemma3_text": GEMMA_NAMES,
    "mixtral": {
        "layers.w_router": "model.layers.{}.block_sparse_moe.gate.weight",
        "layers.w_gate": "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
        "layers.w_up": "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
        "layers.w_down": "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
    },
    "qwen3_moe": {
        "layers.w_router": "model.layers.{}.mlp.gate.weight",
        "layers.w_gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
        "layers.w_up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
        "layers.w_down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    },
}

# Tensors of other forms, after "model.layers.{}.", and the parameters that they hold one after the
# other: those of Phi 3, and those of all experts together as transformers 5 may write them.
HF_FUSED = {
    "self_attn.qkv_proj.weight": ("layers.wq", "layers.wk", "layers.wv"),
    "mlp.gate_up_proj.weight": ("layers.w_gate", "layers.w_up"),
    "mlp.gate.weight": ("layers.w_router",),
    "mlp.experts.gate_up_proj": ("layers.w_gate", "layers.w_up"),
    "mlp.experts.down_proj": ("layers.w_down",),
}

# Tensors of a file that a model does not need: buffers, and a copy of tied embeddings.
HF_UNUSED = (".rotary_emb.inv_freq", "lm_head.weight")

# Names of the fields in config.json.
HF_FIELDS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "sliding_window": "sliding_window",
}

# Names of fields that only some families have: see the options in HF_FAMILIES.
HF_OPTION_FIELDS = {
    "attn_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
    "rope_query_beta": "llama_4_scaling_beta",
}

# More of them in models with experts. Mixtral calls the first num_local_experts.
HF_EXPERT_FIELDS = {"n_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}

# Which fields of the form each model_type has, and what else it may have: "mixed" layers of several
# kinds, layers without positions ("nope"), or a field. Of several that fit, an export is of the
# first.
HF_FORM = ("qkv_bias", "qk_norm", "post_norm", "sandwich_norm", "geglu", "scale_embed", "n_experts")
GEMMA_FORM = {"sandwich_norm", "geglu", "scale_embed"}
HF_FAMILIES = {
    "llama": (set(), set()),
    "mistral": (set(), {"sliding_window"}),
    "ministral": (set(), {"sliding_window", "mixed"}),
    "ministral3": (set(), {"sliding_window", "rope_query_beta"}),
    "smollm3": (set(), {"mixed", "nope"}),
    "phi3": (set(), {"sliding_window"}),
    "qwen2": ({"qkv_bias"}, {"sliding_window", "mixed"}),
    "qwen3": ({"qk_norm"}, {"sliding_window", "mixed"}),
    "olmo2": ({"qk_norm", "post_norm"}, set()),
    "olmo3": ({"qk_norm", "post_norm"}, {"sliding_window", "mixed", "rope_local_theta"}),
    "gemma2": (GEMMA_FORM, {"sliding_window", "mixed", "attn_softcap", "logit_softcap"}),
    "gemma3_text": (GEMMA_FORM | {"qk_norm"},
                    {"sliding_window", "mixed", "rope_local_theta", "logit_softcap"}),
    "mixtral": ({"n_experts"}, {"sliding_window"}),
    "qwen3_moe": ({"n_experts", "qk_norm"}, {"sliding_window"}),
}
GEMMAS = ("gemma2", "gemma3_text")
HF_CLASSES = {"smollm3": "SmolLM3", "gemma3_text": "Gemma3"}  # where not the model_type in capitals

# model_types whose forward pass is that of another one, perhaps with other weights: see from_hf.
HF_SAME = {"seed_oss": "qwen2", "iquestcoder": "llama", "internlm3": "llama", "granite": "llama",
           "ernie4_5": "llama"}

# What other model_types have that this model lacks.
HF_LACKING = {
    "gpt_oss": "attention sinks",
    "deepseek_v3": "latent attention (MLA)",
    "kimi_k25": "latent attention (MLA)",
    "llama4": "attention in chunks",
    "qwen3_next": "linear attention (Gated DeltaNet)",
    "qwen3_5": "linear attention (Gated DeltaNet)",
    "gemma4": "layers that share keys and values",
    "glm4_moe": "experts that all tokens share",
}

# Values that transformers takes for entries that a config.json lacks, and others of a model_type.
HF_DEFAULTS = {"tie_word_embeddings": False, "head_dim": None, "num_key_value_heads": None,
               "rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": None}
GEMMA_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                  "sliding_window": 4096,
                  "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
HF_FAMILY_DEFAULTS = {
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    "gemma2": GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                                "vocab_size": 256000},
    "gemma3_text": GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4,
                                     "vocab_size": 262208},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128},
    "iquestcoder": {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    "internlm3": {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
                 "rope_theta": 5e5, "tie_word_embeddings": True},
    "phi3": {"rms_norm_eps": 1e-5},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "olmo2": {"rms_norm_eps": 1e-5},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096, "num_experts": 128,
                  "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
}

# Values in config.json or its rope_parameters that can be expressed; null always can.
HF_LEGAL = {
    "is_causal": (True,),
    "hidden_act": ("silu", "swish"),
    "use_bidirectional_attention": (False,),
    "attention_bias": (False,),
    "attention_out_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "clip_qkv": (),
    "rope_type": ("default", "llama3", "yarn", "linear"),
    "low_freq_factor": (ROPE_LOW_FREQ_FACTOR,),
    "high_freq_factor": (ROPE_HIGH_FREQ_FACTOR,),
    "beta_fast": (YARN_BETA_FAST,),
    "beta_slow": (YARN_BETA_SLOW,),
    "truncate": (True,),
    "partial_rotary_factor": (1,),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "quantization_config": (),
}
GEMMA_LEGAL = {"hidden_act": None, "hidden_activation": ("gelu_pytorch_tanh",)}  # None: any
HF_FAMILY_LEGAL = {
    "gemma2": GEMMA_LEGAL,
    "gemma3_text": GEMMA_LEGAL,
    "smollm3": {"use_sliding_window": (False,), "sliding_window": ()},
    "seed_oss": {"attention_bias": (True, False)},  # of queries, keys and values
}


def hf_fields(hf):
    """The fields of Config that describe a model, from its config.json as a dict, in the form of
    transformers 4 or 5. A model of text and vision gives the fields of its text part.

    Raises ValueError that lists what this model cannot express, and what is missing.
    """
    hf = hf_text_part(hf)
    model_type = hf.get("model_type")
    family = HF_SAME.get(model_type, model_type)
    if family not in HF_FAMILIES:
        lacking = HF_LACKING.get(model_type)
        why = f"has {lacking}, which this model lacks; " if lacking else ""
        raise ValueError(f"config.json: model_type {model_type!r}: {why}must be "
                         + ", ".join([*HF_FAMILIES, *HF_SAME]))
    if model_type == "seed_oss" and not hf.get("attention_bias", True):
        family = "llama"
    if model_type == "mistral" and hf.get("layer_types"):
        family = "ministral"
    form, options = HF_FAMILIES[family]
    names = HF_FIELDS
    if "n_experts" in form:
        names = names | HF_EXPERT_FIELDS
    if "num_local_experts" in hf:
        hf = {"num_experts": hf["num_local_experts"]} | hf
    given = {name: x for name, x in hf.items() if x or name != "rope_parameters"}
    hf = HF_DEFAULTS | HF_FAMILY_DEFAULTS.get(model_type, {}) | given
    # rope_scaling (transformers 4) or rope_parameters (5), perhaps one for each kind of layer: its
    # entries count as entries of hf.
    rope = hf.get("rope_parameters") or {}
    local_rope = rope.get("sliding_attention") or {}
    rope = hf.get("rope_scaling") or rope.get("full_attention") or rope
    hf |= {"rope_type": rope.get("type", "default")} | rope

    errors = []
    for name, legal in (HF_LEGAL | HF_FAMILY_LEGAL.get(model_type, {})).items():
        value = hf.get(name)
        if value is not None and legal is not None and value not in legal:
            errors.append(f"{name} {value!r}: must be one of {[*legal, None]}")
    errors += [f"{hf_name} {hf[hf_name]!r}: must be null" for name, hf_name
               in HF_OPTION_FIELDS.items() if hf.get(hf_name) and name not in options]
    if local_rope.get("rope_type", local_rope.get("type", "default")) != "default":
        errors.append(f"rope_parameters of sliding_attention {local_rope!r}: must have the "
                      "rope_type 'default'")
    errors += [f"{name}: is missing" for name in names.values() if name not in hf]
    of_rope = []  # entries that the rope_type needs
    if hf["rope_type"] != "default":
        of_rope.append("factor")
    if hf["rope_type"] in ("llama3", "yarn"):
        of_rope.append("original_max_position_embeddings")
    errors += [f"{name}: is missing" for name in of_rope if not hf.get(name)]
    if hf["rope_type"] == "yarn" and (hf.get("factor") or 2) <= 1:
        errors.append(f"factor {hf['factor']!r}: must be above 1 under yarn")
    if errors:
        raise ValueError("\n  ".join(["config.json: this model cannot express", *errors]))

    fields = {name: name in form for name in HF_FORM} | {"n_experts": 0, "rope_factor": 1.0}
    fields |= {name: hf[hf_name] for name, hf_name in names.items()}
    fields |= _hf_layers(hf, family)
    fields["rope_theta"] = float(hf["rope_theta"])
    for name, hf_name in HF_OPTION_FIELDS.items():
        if name in options:
            fields[name] = float(hf.get(hf_name) or 0)
    if "rope_local_theta" in options and fields["sliding_window"]:
        theta = hf.get("rope_local_base_freq", hf["rope_theta"])
        fields["rope_local_theta"] = float(local_rope.get("rope_theta", theta))
    fields["n_kv_heads"] = fields["n_kv_heads"] or fields["n_heads"]
    fields["head_dim"] = fields["head_dim"] or fields["d_model"] // fields["n_heads"]
    if hf["rope_type"] != "default" and hf["factor"] != 1:
        fields["rope_factor"] = float(hf["factor"])
        fields["rope_scaling"] = hf["rope_type"]
        if hf["rope_type"] == "yarn":
            fields["rope_attn_factor"] = _hf_attn_factor(hf)
    needs_len = fields["rope_factor"] != 1 and hf["rope_type"] != "linear"
    if needs_len or fields.get("rope_query_beta"):
        fields["rope_original_len"] = hf["original_max_position_embeddings"]
    if "n_experts" in form:
        fields["capacity_factor"] = 0.0
        fields["d_ff"] = hf.get("moe_intermediate_size") or fields["d_ff"]
    return fields


def hf_text_part(hf):
    """The config.json of the text part of a model of text and vision, or hf itself."""
    if "text_config" not in hf:
        return hf
    of_all = ("tie_word_embeddings", "quantization_config")
    return {name: hf[name] for name in of_all if name in hf} | hf["text_config"]


def _hf_layers(hf, family):
    """The fields sliding_window and layer_types."""
    _, options = HF_FAMILIES[family]
    n_layers = hf["num_hidden_layers"]
    window = hf["sliding_window"] or 0
    # Qwen has a window only if use_sliding_window says so.
    is_off = family.startswith("qwen") and not hf.get("use_sliding_window")
    if is_off or "sliding_window" not in options:
        window = 0
    # Which layers slide, by a list of all layers, or by the family's rule.
    n_full = hf.get("max_window_layers", 28) if family in ("qwen2", "qwen3") else 0
    full_every = {"gemma2": 2, "olmo3": 4, "gemma3_text": hf.get("sliding_window_pattern", 6)}
    named = hf.get("layer_types") if "mixed" in options else None
    if named and (len(named) != n_layers or set(named) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"config.json: layer_types {named}: must be full_attention or "
                         f"sliding_attention for each of {n_layers} layers")
    kinds = []
    for i in range(n_layers):
        is_full = i < n_full or (family in full_every and (i + 1) % full_every[family] == 0)
        if named:
            is_full = named[i] == "full_attention"
        kinds.append("full" if is_full or not window else "sliding")
    if "nope" in options:
        interval = hf.get("no_rope_layer_interval", 4)
        rotates = hf.get("no_rope_layers") or [(i + 1) % interval for i in range(n_layers)]
        if len(rotates) != n_layers:
            raise ValueError(f"config.json: no_rope_layers {rotates}: must have {n_layers} entries")
        kinds = [kind if on else f"{kind}_nope" for kind, on in zip(kinds, rotates)]
    # The shortest period; none where all layers are alike.
    n = next(n for n in range(1, n_layers + 1) if kinds == (kinds[:n] * n_layers)[:n_layers])
    period = () if kinds[:n] in (["full"], ["sliding"]) else tuple(kinds[:n])
    return {"sliding_window": window if "sliding" in kinds else 0, "layer_types": period}


def _hf_attn_factor(hf):
    """The factor of cos and sin under yarn; 0 for the usual one."""
    given = hf.get("attention_factor")
    if given is None and hf.get("mscale") and hf.get("mscale_all_dim"):
        slope = 0.1 * log(hf["factor"])
        given = (slope * hf["mscale"] + 1) / (slope * hf["mscale_all_dim"] + 1)
    return float(given or 0)


def _hf_family(cfg):
    """The model_type whose forward pass is that of cfg."""
    form = {name for name in HF_FORM if getattr(cfg, name)}
    used = {name for name in (*HF_OPTION_FIELDS, "sliding_window", "rope_local_theta")
            if getattr(cfg, name)}
    kinds = set(layer_kinds(cfg))
    if len(kinds) > 1:
        used.add("mixed")
    if any(kind.endswith("_nope") for kind in kinds):
        used.add("nope")
    families = [family for family, (its_form, options) in HF_FAMILIES.items()
                if form == its_form and used <= options]
    # Llama comes before Mistral, and needs heads that divide d_model.
    if families[:1] == ["llama"] and cfg.d_model % cfg.n_heads:
        families = families[1:]
    if not families:
        raise ValueError("no model of Hugging Face has "
                         f"{' with '.join(sorted(form | used))}: change one of them")
    return families[0]


def hf_config(cfg):
    """The config.json of cfg (with derived fields) as a dict that transformers 4.56 and 5 read.

    The ids of special tokens are null. A family ignores the entries of other families.

    Raises ValueError when no model of Hugging Face has this combination of fields.
    """
    family = _hf_family(cfg)
    _, options = HF_FAMILIES[family]
    window = cfg.sliding_window or None
    kinds = layer_kinds(cfg)
    hf = {hf_name: getattr(cfg, name) for name, hf_name in HF_FIELDS.items()}
    if cfg.n_experts:
        hf |= {hf_name: getattr(cfg, name) for name, hf_name in HF_EXPERT_FIELDS.items()}
        hf |= {"num_local_experts": cfg.n_experts, "moe_intermediate_size": cfg.d_ff}
    hf |= {
        "architectures": [HF_CLASSES.get(family, family.title().replace("_", "")) + "ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "sliding_window": window,
        "use_sliding_window": bool(window),
        "max_window_layers": 0 if window else cfg.n_layers,
        "max_position_embeddings": cfg.seq_len,
        "rope_scaling": _hf_rope_scaling(cfg),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if cfg.rope_factor != 1 and cfg.rope_scaling != "linear":
        stretched_len = int(cfg.rope_original_len * cfg.rope_factor)
        hf["max_position_embeddings"] = max(cfg.seq_len, stretched_len)
    if "mixed" in options:
        hf["layer_types"] = [kind.replace("_nope", "") + "_attention" for kind in kinds]
    if "nope" in options:
        hf["no_rope_layers"] = [int(not kind.endswith("_nope")) for kind in kinds]
    if family in GEMMAS:
        del hf["hidden_act"]
        hf |= {
            "sliding_window": window or 4096,  # needed even if layer_types has none that slides
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": cfg.head_dim,
            "attn_logit_softcapping": cfg.attn_softcap or None,
            "final_logit_softcapping": cfg.logit_softcap or None,
        }
    if "rope_local_theta" in options:
        if window and cfg.rope_factor != 1 and not cfg.rope_local_theta:
            raise ValueError(f"{family} of Hugging Face scales no layer with a window: set "
                             "rope_local_theta")
        local_theta = cfg.rope_local_theta or cfg.rope_theta
        full_rope = hf["rope_scaling"] or {"rope_type": "default"}
        hf["rope_local_base_freq"] = local_theta
        hf["rope_parameters"] = {
            "full_attention": full_rope | {"rope_theta": cfg.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        }
    return hf


def _hf_rope_scaling(cfg):
    """The entry rope_scaling of a config.json, or None."""
    if cfg.rope_factor == 1 and not cfg.rope_query_beta:
        return None
    rope = {"rope_type": cfg.rope_scaling, "factor": cfg.rope_factor}
    if cfg.rope_scaling != "linear":
        rope["original_max_position_embeddings"] = cfg.rope_original_len
    if cfg.rope_scaling == "llama3":
        rope["low_freq_factor"] = float(ROPE_LOW_FREQ_FACTOR)
        rope["high_freq_factor"] = float(ROPE_HIGH_FREQ_FACTOR)
    if cfg.rope_scaling == "yarn" and cfg.rope_attn_factor:
        rope["attention_factor"] = cfg.rope_attn_factor
    if cfg.rope_query_beta:
        rope["llama_4_scaling_beta"] = cfg.rope_query_beta
    return rope


def from_hf(params, hf, cfg):
    """params as they stand in the files of a model with this config.json, in the form of this
    model: factors of Granite and Gemma are folded into weights.
    """
    hf = hf_text_part(hf)
    model_type = hf["model_type"]
    factors = {}
    if model_type in GEMMAS:
        params = shift_gains(params, 1)
        scale = hf.get("query_pre_attn_scalar", 256)  # in this model it is head_dim
        factors["layers.q_norm" if cfg.qk_norm else "layers.wq"] = (cfg.head_dim / scale) ** 0.5
    if model_type == "granite":
        of_embed = hf.get("embedding_multiplier", 1)
        of_residual = hf.get("residual_multiplier", 1)
        of_logits = hf.get("logits_scaling", 1)
        factors = {
            "embed": of_embed,
            "layers.wq": hf.get("attention_multiplier", 1) * cfg.head_dim**0.5,
            "layers.wo": of_residual,
            "layers.w_down": of_residual,
            "final_norm": 1 / (of_logits * of_embed if cfg.tie_embeddings else of_logits),
        }
    changed = {name: (factor * params[name].astype(np.float32)).astype(params[name].dtype)
               for name, factor in factors.items() if factor != 1}
    if model_type == "ernie4_5":
        # It rotates pairs of neighbours, this model the halves of a head.
        for name in ("layers.wq", "layers.wk"):
            pairs = params[name].reshape(*params[name].shape[:-1], -1, cfg.head_dim // 2, 2)
            changed[name] = pairs.swapaxes(-1, -2).reshape(params[name].shape)
    return params | changed


def fits_adapters(hf):
    """Whether a matrix of a model with this config.json is one of this model, so that an adapter of
    PEFT fits both: it is neither fused nor changed by from_hf.
    """
    has_factor = hf.get("query_pre_attn_scalar", 256) != hf.get("head_dim", 256)
    return not (hf.get("model_type") in ("phi3", "granite", "ernie4_5") or "text_config" in hf
                or (hf.get("model_type") == "gemma2" and has_factor))


def to_hf(params, cfg):
    """The reverse of from_hf, for the family that an export of cfg has."""
    return shift_gains(params, -1) if _hf_family(cfg) in GEMMAS else params


def shift_gains(params, shift):
    """params with shift added to the gains of all norms: Gemma multiplies by 1 + w."""
    return params | {name: (x.astype(np.float32) + shift).astype(x.dtype)
                     for name, x in params.items() if name.endswith("_norm")}


def hf_pieces(cfg, adapter=False):
    """{name: ({index: Hugging Face's name}, transposed)}: array[index], transposed or not, is the
    tensor of that name. LoRA factors, which an export merges, have none.

    adapter: only the LoRA factors, by their names in PEFT.
    """
    hf_names = HF_NAMES | HF_FAMILY_NAMES.get(_hf_family(cfg), {})
    pieces = {}
    for name, row in param_table(cfg).items():
        weight, _, factor = name.partition(".lora_")
        if bool(factor) != adapter:
            continue
        if weight not in hf_names:
            raise ValueError(f"parameter {name}: has no name in HF_NAMES in model.py; add it "
                             "there, and to hf_config what transformers needs to compute with it")
        hf_name = hf_names[weight]
        n_stacked = hf_name.count("{}")
        if factor:
            module = hf_name.removesuffix(".weight")
            hf_name = f"base_model.model.{module}.lora_{factor.upper()}.weight"
        stack = np.ndindex(*row["shape"][:n_stacked])
        tensors = {index: hf_name.format(*index) for index in stack}
        is_linear = len(row["shape"]) - n_stacked == 2 and name != "embed"
        pieces[name] = (tensors, is_linear)
    return pieces


# The numbers of hf_probe, {model_type: {its kinds of layers: number}}, computed by transformers.
HF_PROBES = {
    "llama": {"full": 272.286},
    "mistral": {"full": 272.286, "sliding": 222.085},
    "ministral": {"full sliding": 335.558},
    "ministral3": {"full": 272.286, "sliding": 222.085},
    "smollm3": {"full_nope": 274.759, "full full_nope": 267.923},
    "qwen2": {"full": 120.216, "sliding": 104.265, "full sliding": 116.957},
    "qwen3": {"full": 75.0455, "sliding": 7.68416, "full sliding": 114.967},
    "olmo2": {"full": -13.7322},
    "olmo3": {"sliding": 3.07014, "full sliding": 33.3481},
    "gemma2": {"full": 180.171, "sliding": 160.469, "full sliding": 168.608},
    "gemma3_text": {"full": 158.774, "sliding": 183.845, "full sliding": 165.608},
    "mixtral": {"full": 334.614, "sliding": 359.191},
    "qwen3_moe": {"full": 185.101, "sliding": 180.176},
}


def hf_probe(cfg):
    """A weighted sum of the logits of probe_models, which differs between forward passes."""
    total = 0.0
    for tiny, params, tokens_1T in probe_models(cfg):
        with jax.default_matmul_precision("highest"):
            logits_1TV = jax.jit(partial(forward, cfg=tiny))(params, {"tokens": tokens_1T})
        total += float(np.vdot(logits_1TV, np.cos(np.arange(logits_1TV.size))))
    return total


def probe_models(cfg):
    """(config, parameters, tokens) of two tiny models with the form of cfg, and with its fields
    that a fork has added. The first has tied embeddings, the second stretched rotary wavelengths.
    """
    models = []
    kinds = sorted(set(layer_kinds(cfg)))
    _, options = HF_FAMILIES[_hf_family(cfg)]
    has_local_rope = "rope_local_theta" in options and cfg.sliding_window
    for is_second in (False, True):
        tiny = dataclasses.replace(
            cfg, **HF_TINY, n_experts=4 * bool(cfg.n_experts), tie_embeddings=not is_second,
            sliding_window=3 * bool(cfg.sliding_window), rope_factor=8.0 if is_second else 1.0,
            layer_types=tuple(kinds), rope_local_theta=50.0 if has_local_rope else 0.0,
            **{name: size * (name in options) for name, size in HF_TINY_OPTIONS.items()})
        params = {}
        for name, row in param_table(tiny).items():
            angles = np.arange(prod(row["shape"])) + zlib.crc32(name.encode()) % 1000
            scale = 10 if name == "final_norm" else 1  # large logits, which a cap would change
            params[name] = jnp.array(scale * np.sin(angles), jnp.float32).reshape(row["shape"])
        models.append((tiny, params, jnp.arange(9)[None]))
    return models


# Fields of the tiny models: all that their numbers depend on, but for the form.
HF_TINY = {"d_model": 16, "n_layers": 4, "d_ff": 24, "vocab_size": 32, "n_heads": 4,
           "n_kv_heads": 2, "head_dim": 8, "rope_theta": 100.0, "rope_original_len": 16,
           "rope_scaling": "llama3",
           "norm_eps": 0.1, "experts_per_token": 2, "capacity_factor": 0.0, "lora_rank": 0,
           "dtype": "float32", "param_dtype": "float32", "attention": "xla", "remat": "none",
           "mlp_tiles": 1}


HF_TINY_OPTIONS = {"attn_softcap": 3.0, "logit_softcap": 20.0, "rope_query_beta": 0.5}


def check_hf_forward(cfg):
    """Raise ValueError if transformers would compute something else with an export, because the
    forward pass was changed.
    """
    family = _hf_family(cfg)
    kinds = " ".join(sorted(set(layer_kinds(cfg))))
    found, expected = hf_probe(cfg), HF_PROBES[family][kinds]
    if abs(found - expected) > 3e-4 * abs(expected):
        raise ValueError(f"export: the forward pass is not that of {family} in transformers: tiny "
                         f"models give {found:.6g} in place of {expected:.6g}. For a changed model "
                         "edit hf_config, HF_LEGAL and HF_PROBES in model.py; tests/test_hf.py "
                         "computes HF_PROBES by transformers")


def split_fused(tensors, cfg):
    """The tensors of a file, {name: array}, with those of HF_FUSED split into one for each
    parameter of a layer and expert.
    """
    hf_names = HF_NAMES | HF_FAMILY_NAMES.get(_hf_family(cfg), {})
    table = param_table(cfg)
    found = {}
    for tensor, x in tensors.items():
        layer, _, kind = tensor.removeprefix("model.layers.").partition(".")
        # Experts have one dim more than a dense layer.
        names = [name for name in HF_FUSED.get(kind, ())
                 if name in table and len(table[name]["shape"]) == x.ndim + 1]
        if not names:
            found[tensor] = x
            continue
        end = 0
        for name in names:
            start = end
            end += table[name]["shape"][-1]
            for index in np.ndindex(*x.shape[:-2]):  # of an expert; () without experts
                found[hf_names[name].format(layer, *index)] = x[index][start:end]
        if end != x.shape[-2]:
            raise ValueError(f"{tensor} has {x.shape[-2]} rows; must be {end}")
    return found
