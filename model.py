# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer as pure functions over a flat dict of arrays.

Covers Llama, Mistral, Mixtral, Qwen2 and Qwen3. Owns the parameter table, the forward pass, the
loss and generation; refuses kernels that the device lacks. Invariant: each parameter is declared
once, in `param_table`. `cfg`: any object with the fields under "model" and "numerics" in config.py,
and freeze loss_norm loss_divisor batch_size label_smoothing z_loss router_balance router_z;
`generate` also reads temperature top_k top_p, `batch_shapes` and `choose_attention` document_mask
packing
seq_len, `apply_param_groups` lr_mult decay_mult optimizers.
"""
from fnmatch import fnmatchcase
from functools import partial
from itertools import takewhile
from math import ceil, gcd, lcm, log, prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import multihost_utils
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

BATCH_AXES = ("dp", "fsdp", "ep")  # mesh axes that split the sequences of a batch
WEIGHT_AXES = ("fsdp", "ep", "sp")  # mesh axes that split a weight, gathered where it is used
IGNORE = -100  # label ignored by the loss


def param_table(cfg):
    """Declare every parameter: {name: {"shape", "spec", "init", "trained"}}.

    init is ("normal", std) or ("constant", value); optimizers tell matrices (normal) from scales
    and biases (constant) by it. Arrays under "layers." are stacked over layers: weights are
    [layers, in, out], those of experts [layers, experts, in, out].

    Raises: ValueError for a pattern in freeze or lora_targets without a match.
    """
    L, D, F, V = cfg.n_layers, cfg.d_model, cfg.d_ff, cfg.vocab_size
    N, K, H, E = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim, cfg.n_experts
    ones, zeros, fan_in = ("constant", 1.0), ("constant", 0.0), ("normal", D**-0.5)
    # Smaller where it adds to the residual, whose variance would grow with depth.
    attn_out, mlp_out = (("normal", (2 * L * width) ** -0.5) for width in (N * H, F))
    in_spec, out_spec = P(None, WEIGHT_AXES, "tp"), P(None, "tp", WEIGHT_AXES)
    experts, over_ep, others = ((E,), ("ep",), ("fsdp", "sp")) if E else ((), (), WEIGHT_AXES)
    up_spec, down_spec = P(None, *over_ep, others, "tp"), P(None, *over_ep, "tp", others)
    table = {
        "embed": dict(shape=(V, D), spec=P("tp", WEIGHT_AXES), init=fan_in),
        "layers.attn_norm": dict(shape=(L, D), spec=P(), init=ones),
        "layers.wq": dict(shape=(L, D, N * H), spec=in_spec, init=fan_in),
        "layers.wk": dict(shape=(L, D, K * H), spec=in_spec, init=fan_in),
        "layers.wv": dict(shape=(L, D, K * H), spec=in_spec, init=fan_in),
        "layers.wo": dict(shape=(L, N * H, D), spec=out_spec, init=attn_out),
        "layers.mlp_norm": dict(shape=(L, D), spec=P(), init=ones),
        "layers.w_gate": dict(shape=(L, *experts, D, F), spec=up_spec, init=fan_in),
        "layers.w_up": dict(shape=(L, *experts, D, F), spec=up_spec, init=fan_in),
        "layers.w_down": dict(shape=(L, *experts, F, D), spec=down_spec, init=mlp_out),
        "final_norm": dict(shape=(D,), spec=P(), init=ones),
    }
    if E:
        table["layers.w_router"] = dict(shape=(L, D, E), spec=P(None, WEIGHT_AXES), init=fan_in)
    if cfg.qk_norm:
        table |= {f"layers.{x}_norm": dict(shape=(L, H), spec=P(), init=ones) for x in "qk"}
    if cfg.qkv_bias:
        table |= {f"layers.b{x}": dict(shape=(L, n * H), spec=P(None, "tp"), init=zeros)
                  for x, n in zip("qkv", (N, K, K))}
    if not cfg.tie_embeddings:
        table["unembed"] = dict(shape=(D, V), spec=P(WEIGHT_AXES, "tp"), init=fan_in)
    table |= _lora_rows(table, cfg) if cfg.lora_rank else {}
    frozen = matching("freeze", cfg.freeze, table)
    if len(frozen) == len(table):
        raise ValueError(f"freeze {' '.join(cfg.freeze)}: leaves no parameter to train; freeze "
                         "fewer")
    return {name: row | {"trained": name not in frozen} for name, row in table.items()}


def init(key, cfg, table=None):
    """Draw the parameters of a table (default: param_table(cfg)) in cfg.param_dtype. A parameter's
    values depend on key, its name and its shape alone; with a table, cfg needs no other field.
    """
    params = {}
    for name, row in (param_table(cfg) if table is None else table).items():
        kind, value = row["init"]
        if kind not in ("normal", "constant"):
            raise ValueError(f"{name}: init {kind!r}: must be 'normal' or 'constant'")
        array = jnp.full(row["shape"], value, jnp.float32)
        if kind == "normal":
            name_hash = sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31
            array *= jax.random.normal(jax.random.fold_in(key, name_hash), array.shape, array.dtype)
        params[name] = array.astype(cfg.param_dtype)
    return params


def _linear(x, w, name, cfg):
    """x @ w[name], plus its LoRA update if it has one."""
    y = _matmul(x, w[name], cfg)
    if f"{name}.lora_a" in w:
        thin = _matmul(x, w[f"{name}.lora_a"], cfg)
        y += cfg.lora_alpha / cfg.lora_rank * _matmul(thin, w[f"{name}.lora_b"], cfg)
    return y


def _rms_norm(x, scale, cfg):
    x_f32 = x.astype(jnp.float32)
    x_f32 *= jax.lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + cfg.norm_eps)
    return (x_f32 * jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)


def rope_tables(positions_BT, cfg):
    """cos and signed sin [B, 1, T, 2, H/2] in float32.

    Source: Su et al. 2021, arXiv:2104.09864. rope_factor as in Llama 3.1: wavelengths beyond the
    original length are multiplied by it, those below a quarter are kept, those between
    interpolated.
    """
    freq = cfg.rope_theta ** -(jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim)
    if cfg.rope_factor != 1:
        n_periods = cfg.rope_original_len * freq / (2 * jnp.pi)
        keep = jnp.clip((n_periods - 1) / (4 - 1), 0, 1)
        freq = keep * freq + (1 - keep) * freq / cfg.rope_factor
    angle = positions_BT.astype(jnp.float32)[:, None, :, None] * freq[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)


def _rotate(x, cos, sin):
    """Rotate the two halves of each head of x [B, heads, T, H] (Hugging Face's order) in float32.

    A flip, not a concatenation: XLA vectorizes it.
    """
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return (halves * cos + halves[..., ::-1, :] * sin).reshape(x.shape).astype(x.dtype)


def _masked(scores, query_pos, window, segments):
    """scores [B, K, G, T, S], -inf where a query may not see a key. query_pos [B, T]: the index in
    S of each query; segments: (of queries [B, T], of keys [B, S]) or None.
    """
    distance = query_pos[:, :, None] - jnp.arange(scores.shape[-1])[None, None, :]
    mask = (distance >= 0) & (distance < window)
    if segments is not None:
        mask &= segments[0][:, :, None] == segments[1][:, None, :]
    return jnp.where(mask[:, None, None], scores, -jnp.inf)


def _attend(q_BNTH, k_BKSH, v_BKSH, query_pos_BT, cfg, segments=None):
    """Causal attention within the sliding window. query_pos_BT: the key index of each query;
    segments: (of queries [B, T], of keys [B, S]), equal where a query may see a key.

    Normalizes after the product with v: saves a pass over the scores.
    """
    (B, N, T, H), (_, K, S, _) = q_BNTH.shape, k_BKSH.shape
    q_BKGTH = H**-0.5 * q_BNTH.reshape(B, K, N // K, T, H)
    scores_BKGTS = _batched_matmul(q_BKGTH, k_BKSH.mT, cfg)
    scores_BKGTS = _masked(scores_BKGTS, query_pos_BT, cfg.sliding_window or S, segments)
    top_BKGT1 = jax.lax.stop_gradient(scores_BKGTS.max(axis=-1, keepdims=True))
    e_BKGTS = jnp.exp(scores_BKGTS - top_BKGT1)
    a_BKGTH = _batched_matmul(e_BKGTS.astype(v_BKSH.dtype), v_BKSH, cfg)
    sum_BKGT1 = e_BKGTS.sum(axis=-1, keepdims=True)
    a_BKGTH = checkpoint_name(a_BKGTH, "attention") / checkpoint_name(sum_BKGT1, "attention")
    return a_BKGTH.reshape(q_BNTH.shape).astype(q_BNTH.dtype)


def _mlp(x, w, cfg):
    """SwiGLU of x [..., D]."""
    gate, up = _linear(x, w, "w_gate", cfg), _linear(x, w, "w_up", cfg)
    return _linear(jax.nn.silu(gate) * up, w, "w_down", cfg)


def _block(x_BTD, w, cache, positions_BT, segments_BT, rope, cfg):
    """Apply one layer, whose weights w are named without the prefix: (x_BTD, (cache, router
    statistics)). cache: (k_BKSH, v_BKSH), written at positions_BT, or None.
    """
    x_BTD = checkpoint_name(x_BTD, "block")
    y_BTD = _rms_norm(x_BTD, w["attn_norm"], cfg)
    qkv = [checkpoint_name(_linear(y_BTD, w, f"w{x}", cfg), "qkv") for x in "qkv"]
    if cfg.qkv_bias:
        qkv = [(a + w[f"b{x}"][None, None]).astype(a.dtype) for a, x in zip(qkv, "qkv")]
    q_BTNH, k_BTKH, v_BTKH = (a.reshape(*a.shape[:2], -1, cfg.head_dim) for a in qkv)
    if cfg.qk_norm:
        q_BTNH = _rms_norm(q_BTNH, w["q_norm"], cfg)
        k_BTKH = _rms_norm(k_BTKH, w["k_norm"], cfg)
    q_BNTH, k_BKTH, v_BKTH = _to_head_sharding(q_BTNH, k_BTKH, v_BTKH)
    q_BNTH, k_BKTH = _rotate(q_BNTH, *rope), _rotate(k_BKTH, *rope)
    if cache is None:
        a_BNTH = ATTENTION[cfg.attention](q_BNTH, k_BKTH, v_BKTH, segments_BT, cfg)
    else:
        cache = _write_cache(cache, (k_BKTH, v_BKTH), positions_BT)
        a_BNTH = _attend(q_BNTH, *cache, positions_BT, cfg)
    # Back from head sharding to sequence sharding: over sp the second all-to-all of Ulysses.
    a_BTNH = _shard(_shard(a_BNTH, BATCH_AXES, ("tp", "sp")).swapaxes(1, 2), BATCH_AXES, "sp", "tp")
    # Block exit: forces the all-reduce over tp here; sp splits the sequence again.
    y_BTD = _linear(a_BTNH.reshape(*a_BTNH.shape[:2], -1), w, "wo", cfg)
    x_BTD = _shard(x_BTD + y_BTD, BATCH_AXES, "sp")
    y_BTD = _rms_norm(x_BTD, w["mlp_norm"], cfg)
    mlp = _mlp_in_tiles if cfg.mlp_tiles > 1 and cache is None else _mlp
    y_BTD, router_stats = (_experts(y_BTD, w, segments_BT, cfg, cache is None) if cfg.n_experts else
                           (mlp(y_BTD, w, cfg), {}))
    return _shard(x_BTD + y_BTD, BATCH_AXES, "sp"), (cache, router_stats)


def _hidden_states(params, batch, cfg, cache=None):
    """Everything before the logits: (x_BTD, unembed_DV, cache, router statistics [B, T] as means
    over layers).
    """
    tokens_BT = batch["tokens"]
    positions_BT = batch.get("positions", jax.lax.broadcasted_iota(int, tokens_BT.shape, 1))
    params = {k: v.astype(jnp.float32 if k in F32_PARAMS else _dtype(cfg))
              for k, v in params.items()}
    layers = {k.removeprefix("layers."): v for k, v in params.items() if k.startswith("layers.")}
    rope = rope_tables(positions_BT, cfg)
    # Gather the table's width over fsdp before the look-up: only the sum over tp moves activations.
    # And after the cast: left to itself, XLA gathers float32.
    embed_VD = _shard(_shard(params["embed"], "tp", WEIGHT_AXES), "tp", None)
    x_BTD = _shard(_embed(embed_VD, tokens_BT), BATCH_AXES, "sp")

    def layer(x_BTD, w_and_cache):
        return _block(x_BTD, *w_and_cache, positions_BT, batch.get("segments"), rope, cfg)

    if cfg.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT[cfg.remat])
    # Unrolled, XLA fuses across layers (a third faster on a CPU); scanned, compile time does not
    # grow with depth.
    x_BTD, (cache, router_stats) = jax.lax.scan(
        layer, x_BTD, (layers, cache), unroll=cfg.n_layers <= 12)
    x_BTD = _rms_norm(x_BTD, params["final_norm"], cfg)
    unembed_DV = params["embed"].T if cfg.tie_embeddings else params["unembed"]
    return x_BTD, unembed_DV, cache, {k: x.mean(axis=0) for k, x in router_stats.items()}


def _logits(x_BTD, unembed_DV, cfg):
    # tp splits the vocabulary: no device holds all logits of a token.
    return _shard(_matmul(x_BTD, unembed_DV, cfg, wide=True), BATCH_AXES, "sp", "tp")


def forward(params, batch, cfg, cache=None):
    """Logits [B, T, V] in float32, and the cache with the keys and values of batch written in.

    batch: "tokens" [B, T], and optionally "positions" [B, T] (default: from 0) and "segments"
    [B, T]: a token sees its own segment only. Parameters are cast to cfg.dtype once. Float32
    throughout: norms, rotary positions, softmax, router, logits, loss, and the sums over positions
    that are the gradients of the embedding and of biases.
    """
    x_BTD, unembed_DV, cache, _ = _hidden_states(params, batch, cfg, cache)
    return _logits(x_BTD, unembed_DV, cfg), cache


def loss_fn(params, batch, cfg):
    """({name: sum}, {name: count}) over the labelled positions of batch "tokens", "labels" [B, T].

    "objective" is minimized, divided as cfg.loss_norm says, and other sums may be added to it (a
    term per token belongs in _loss_sums, where its weights apply);
    "loss" is the plain cross-entropy in nats; "z" the squared log-partition; "acc" 1 where the
    label is the likeliest token, 1/n where n tokens tie; with experts "balance", "router_z" and
    "dropped"; where documents are kept apart "padding", 1 for a position without a token, and
    "attended_keys", how many a query sees.

    Source: label smoothing, Szegedy et al. 2015, arXiv:1512.00567, less the entropy of the smoothed
    target, so that the best value is 0; z-loss, Chowdhery et al. 2022, arXiv:2204.02311, section 5.
    """
    x_BTD, unembed_DV, _, router_stats = _hidden_states(params, batch, cfg)
    labels_BT = batch["labels"]
    weights_BT, divisor = _loss_weights(labels_BT, cfg)
    n_tiles = _n_tiles(*x_BTD.shape[:2], cfg)
    inputs = unembed_DV, x_BTD, labels_BT, weights_BT, cfg
    sums = _tiled_sums(*inputs, n_tiles) if n_tiles > 1 else _loss_sums(*inputs)
    if router_stats:
        extra_BT = (cfg.router_balance * router_stats["balance"]
                    + cfg.router_z * router_stats["router_z"])
        sums |= {k: jnp.where(labels_BT != IGNORE, x, 0).sum() for k, x in router_stats.items()}
        sums["objective"] += (weights_BT * extra_BT).sum()
    counts = dict.fromkeys(sums, (labels_BT != IGNORE).sum(dtype=jnp.float32))
    if {"segments", "positions"} <= batch.keys():
        used_BT = batch["segments"] > 0
        keys_BT = jnp.minimum(batch["positions"] + 1, cfg.sliding_window or cfg.seq_len)
        sums |= {"padding": (~used_BT).sum(dtype=jnp.float32),
                 "attended_keys": jnp.where(used_BT, keys_BT, 0).sum(dtype=jnp.float32)}
        counts |= dict.fromkeys(("padding", "attended_keys"), jnp.float32(labels_BT.size))
    return sums, counts | {"objective": divisor}


def _loss_sums(unembed_DV, x_BTD, labels_BT, weights_BT, cfg):
    """The sums of loss_fn but the router's, from all logits at once."""
    mask_BT = labels_BT != IGNORE
    logits_BTV, top_BT, lse_BT, true_BT = _label_logits(
        unembed_DV, x_BTD, jnp.where(mask_BT, labels_BT, 0), cfg)
    V, eps = cfg.vocab_size, cfg.label_smoothing
    n_top_BT = (logits_BTV == top_BT[..., None]).sum(axis=-1)
    nll_BT = lse_BT - true_BT
    z_BT = lse_BT * lse_BT
    objective_BT = nll_BT + cfg.z_loss * z_BT
    if eps:
        others_BT = (logits_BTV.sum(axis=-1) - true_BT) / (V - 1)
        entropy = -(1 - eps) * log(1 - eps) - eps * log(eps / (V - 1))
        objective_BT += eps * (true_BT - others_BT) - entropy
    acc_BT = (true_BT >= top_BT) / n_top_BT
    terms = {"objective": objective_BT * weights_BT, "loss": nll_BT, "z": z_BT, "acc": acc_BT}
    return {k: jnp.where(mask_BT, v, 0).sum(dtype=jnp.float32) for k, v in terms.items()}


def _label_logits(unembed_DV, x_BTD, labels_BT, cfg):
    """All logits, and of each position the highest, their log-sum-exp and the label's."""
    logits_BTV = _logits(x_BTD, unembed_DV, cfg)
    top_BT = jax.lax.stop_gradient(logits_BTV.max(axis=-1))
    lse_BT = top_BT + jnp.log(jnp.exp(logits_BTV - top_BT[..., None]).sum(axis=-1))
    # A masked sum, not a gather: logits stay where they are when tp splits the vocabulary.
    hit_BTV = labels_BT[..., None] == jnp.arange(cfg.vocab_size)[None, None]
    return logits_BTV, top_BT, lse_BT, jnp.where(hit_BTV, logits_BTV, 0).sum(axis=-1)


# ---- optional: sampling, memory, loss weights, sharding, kernels, mixed precision, LoRA, experts


def generate(params, tokens_BT, lengths_B, cfg, key, n_new, compiler_options=None):
    """n_new tokens [B, n_new] after the first lengths_B (at least 1) tokens of each row; the rest
    of a row is ignored.

    One prefill, then one token at a time with a KV cache. cfg (hashable): the model's fields, and
    temperature (0: greedy), top_k (0: all), top_p. compiler_options: options of XLA.
    """
    compiled = _jitted(compiler_options)
    return compiled(params, tokens_BT, lengths_B, cfg=cfg, key=key, n_new=n_new)


def _jitted(compiler_options):
    return jax.jit(_generate, static_argnames=("cfg", "n_new"), compiler_options=compiler_options)


def _generate(params, tokens_BT, lengths_B, cfg, key, n_new):
    B, T = tokens_BT.shape
    K = lcm(cfg.n_kv_heads, _axis_size("tp", "sp"))  # kv heads as _to_head_sharding copies them
    empty = jnp.zeros((cfg.n_layers, B, K, T + n_new, cfg.head_dim), _dtype(cfg))
    x_BTD, unembed_DV, cache, _ = _hidden_states(params, {"tokens": tokens_BT}, cfg, (empty, empty))
    x_B1D = jnp.take_along_axis(x_BTD, lengths_B[:, None, None] - 1, axis=1)
    logits_BV = _logits(x_B1D, unembed_DV, cfg)[:, 0]

    def decode(carry, i):
        logits_BV, cache = carry
        token_B = _sample(logits_BV, jax.random.fold_in(key, i), cfg)
        batch = {"tokens": token_B[:, None], "positions": (lengths_B + i)[:, None]}
        logits_B1V, cache = forward(params, batch, cfg, cache)
        return (logits_B1V[:, 0], cache), token_B

    _, tokens_TB = jax.lax.scan(decode, (logits_BV, cache), jnp.arange(n_new))
    return tokens_TB.T


def sample_text(params, key, cfg, tokenizer, compiler_options=None):
    """cfg.n_samples texts, each cfg.prompt and up to cfg.sample_tokens tokens more, cut at the end
    of a document or of a turn in a chat. tokenizer: {"encode", "decode", "bos", "eos", "stops"}.
    """
    if not cfg.sample_tokens:
        return []
    new = generate(params, *_prompts(cfg, tokenizer), cfg, key, cfg.sample_tokens, compiler_options)
    rows = multihost_utils.process_allgather(new, tiled=True).tolist()
    return [cfg.prompt + tokenizer["decode"]([*takewhile(
        lambda t: t not in tokenizer["stops"], row)]) for row in rows]


def lower_sampling(params, cfg, tokenizer, compiler_options=None):
    """The program that sample_text runs, lowered. params: shapes with shardings."""
    key, (tokens_BT, lengths_B) = jax.eval_shape(jax.random.key, 0), _prompts(cfg, tokenizer)
    return _jitted(compiler_options).lower(
        params, tokens_BT, lengths_B, cfg=cfg, key=key, n_new=cfg.sample_tokens)


def _prompts(cfg, tokenizer):
    """(tokens [n_samples, T], lengths [n_samples]) that samples continue."""
    first = tokenizer["eos"] if tokenizer["bos"] is None else tokenizer["bos"]
    start = [first, *tokenizer["encode"](cfg.prompt)]
    return (np.tile(np.int32(start), (cfg.n_samples, 1)),
            np.full(cfg.n_samples, len(start), np.int32))


def _write_cache(cache, new, positions_BT):
    row, head, _ = jnp.indices(new[0].shape[:3], sparse=True)
    return tuple(old.at[row, head, positions_BT[:, None]].set(x) for old, x in zip(cache, new))


def _sample(logits_BV, key, cfg):
    """Draw one token per row from the top_k and top_p likeliest; temperature 0: the likeliest."""
    if cfg.temperature == 0:
        return logits_BV.argmax(axis=-1)
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1) / cfg.temperature
    before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV), axis=-1) - jax.nn.softmax(sorted_BV)
    V = logits_BV.shape[1]
    keep_BV = (before_BV < cfg.top_p) & (jnp.arange(V)[None] < (cfg.top_k or V))
    rank_B = jax.random.categorical(key, jnp.where(keep_BV, sorted_BV, -jnp.inf))
    return jnp.take_along_axis(order_BV, rank_B[:, None], axis=-1)[:, 0]


def matching(field, patterns, names):
    """The set of names that patterns select. Later patterns win; a leading `!` deselects.

    Raises: ValueError for a pattern without a match.
    """
    chosen = set()
    for pattern in patterns:
        found = {n for n in names if fnmatchcase(n, pattern.removeprefix("!"))}
        if not found:
            raise ValueError(f"{field} {pattern!r}: matches no parameter; there are "
                             + ", ".join(names))
        chosen = chosen - found if pattern.startswith("!") else chosen | found
    return chosen


def apply_param_groups(table, cfg, parse_number):
    """The table, whose rows also have "lr_mult", "decay_mult" and "optimizer" of the parameters
    that the fields lr_mult, decay_mult and optimizers name, as PATTERN=VALUE. Rows that freeze
    names have "trained" False. The last pattern that matches a parameter applies.

    Raises: ValueError for a pattern without a match.
    """
    # (field, key of a row, how to read the value)
    fields = (("lr_mult", "lr_mult", parse_number), ("decay_mult", "decay_mult", parse_number),
              ("optimizers", "optimizer", str))
    for field, key, read in fields:
        for text in getattr(cfg, field):
            pattern, _, value = text.rpartition("=")
            for name in matching(field, (pattern,), table):
                table[name] = table[name] | {key: read(value)}
    for name in matching("freeze", cfg.freeze, table):
        table[name] = table[name] | {"trained": False}
    return table


_policies = jax.checkpoint_policies

REMAT = {
    "none": _policies.everything_saveable,
    "full": _policies.nothing_saveable,
    "dots": _policies.dots_with_no_batch_dims_saveable,
    # cuDNN's output and softmax statistics, which backward needs, have no names.
    "named": _policies.save_from_both_policies(
        _policies.save_only_these_names("qkv", "attention"),
        lambda prim, *_, **__: prim.name == "dot_product_attention_fwd_wrapper"),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["block"],
        offload_src="device", offload_dst="pinned_host")}

# What each policy recomputes in backward: matmuls, fraction of attention (named: XLA's,
# dense).
RECOMPUTED = {"none": ("", 0.0), "full": ("wq wk wv wo w_gate w_up", 1.0), "dots": ("", 1.0),
              "named": ("wo w_gate w_up", 0.5), "offload": ("wq wk wv wo w_gate w_up", 1.0)}


def batch_shapes(cfg):
    """{name: (shape, dtype, partition spec)} of a batch."""
    apart = cfg.document_mask or cfg.packing != "stream"
    names = ("tokens", "labels", *(("segments", "positions") if apart else ()))
    return dict.fromkeys(names, ((cfg.batch_size, cfg.seq_len), jnp.int32, P(BATCH_AXES, "sp")))


def names_to_load(table, saved, cfg):
    """The parameters that a run takes from another, which has `saved` (none: a fresh start).

    Raises ValueError when LoRA would tune a fresh initialization, or lose the other's updates.
    """
    if cfg.lora_rank and not saved:
        raise ValueError(f"lora_rank {cfg.lora_rank}: a fresh initialization has nothing to tune; "
                         "name the --out_dir of a trained run with --init_from")
    if not cfg.lora_rank and any(".lora_" in name for name in saved):
        raise ValueError(f"init_from {' '.join(cfg.init_from)}: has LoRA updates; set its "
                         "--lora_rank")
    return {name for name in table if ".lora_" not in name or name in saved}


def memory_savers(sp, cfg):
    """Flags not set yet that lower activation memory, the cheapest in time first. sp: size of that
    mesh axis.
    """
    n_tiles = gcd(16, cfg.seq_len // sp)
    useful = {f"--mlp_tiles {n_tiles}": cfg.mlp_tiles < n_tiles and not cfg.n_experts,
              "--remat full": cfg.remat == "none", "--remat offload": cfg.remat != "offload"}
    return [flag for flag, helps in useful.items() if helps]


def flops_per_token(cfg, seq_len, keys=None):
    """(FLOPs of training on one token, FLOPs computed twice, formula of the first).

    Counts matmuls forward and backward, attention over `keys`, the mean number that a query sees
    (by default half the sequence, or less under a sliding window), only the experts that a token
    goes to, and no gradient of frozen weights.
    """
    def used(shape):  # of experts, [layers, experts, in, out], those that a token goes to
        return prod(shape) if len(shape) < 4 else prod(shape) * cfg.experts_per_token // shape[1]

    logits = "embed" if cfg.tie_embeddings else "unembed"
    weights = {name.removeprefix("layers."): (used(row["shape"]), row["trained"])
               for name, row in param_table(cfg).items() if name.startswith((logits, "layers.w"))}
    window = min(cfg.sliding_window or seq_len, seq_len)
    keys = window * (1 - window / (2 * seq_len)) if keys is None else keys
    attention = 4 * cfg.n_layers * cfg.n_heads * cfg.head_dim * keys
    names, attention_frac = RECOMPUTED[cfg.remat]
    if cfg.remat == "named" and cfg.attention in ("cudnn", "pallas"):
        # Of the fused kernels only flash has residuals that the policy does not save.
        attention_frac = float(cfg.attention == "pallas" and _needs_flash(cfg, seq_len))
    elif cfg.attention in ("auto", "xla") and seq_len > DENSE_LEN:
        # Backward computes all scores again; of forward remat saves the whole result, or nothing.
        attention_frac = 0.5 + int(attention_frac)
    names = {*names.split(), *(("w_gate", "w_up") if cfg.mlp_tiles > 1 else ())}
    again = 2 * sum(weights[name][0] for name in names) + attention_frac * attention
    matmuls = sum((6 if trained else 4) * n for n, trained in weights.values())
    return matmuls + 3 * attention, again, "6*P_matmul + 12*L*N*H*mean_keys, causal: T/2 keys"


def _loss_weights(labels_BT, cfg):
    """(weights_BT of positions in the objective's sum, divisor of that sum).

    cfg.loss_norm: "tokens" divides by labelled positions, "positions" by all, "sequences" averages
    each sequence over its own tokens first, "constant" divides by cfg.loss_divisor per whole batch.
    """
    weights_BT, (B, T) = (labels_BT != IGNORE).astype(jnp.float32), labels_BT.shape
    if cfg.loss_norm == "sequences":
        n_B1 = weights_BT.sum(axis=1, keepdims=True)
        return weights_BT / jnp.maximum(n_B1, 1), (n_B1 > 0).sum(dtype=jnp.float32)
    # B is a microbatch's, batch_size an update's.
    divisors = {"tokens": weights_BT.sum(), "positions": B * T,
                "constant": cfg.loss_divisor * B / cfg.batch_size}
    return weights_BT, jnp.float32(divisors[cfg.loss_norm])


# Of a device's float32 logits, above which the loss is computed in tiles. On CPUs tiles of twice
# the size are 3 to 5% faster in float32 and up to 9% slower in "mixed".
LOGIT_BYTES = 2**28


def _n_tiles(B, T, cfg):
    """cfg.logit_tiles, or the fewest that keep the logits of a tile under LOGIT_BYTES, or under the
    size of the head's gradient, which each tile reads and writes.
    """
    if cfg.logit_tiles:
        return cfg.logit_tiles
    V, tp = cfg.vocab_size, _axis_size("tp")
    n_bytes = 4 * B * T * V / _axis_size(BATCH_AXES, "tp", "sp")
    tile_bytes = LOGIT_BYTES * (2 if cfg.dtype == "float32" else 1)
    most, per_shard = max(tile_bytes, 4 * V * cfg.d_model / tp), T // _axis_size("sp")
    fitting = (n for n in range(1, per_shard) if per_shard % n == 0 and n_bytes / n <= most)
    return next(fitting, per_shard)


def _tiles(n, *arrays):
    # Position t goes to tile t mod n: each sp shard keeps its positions, nothing moves.
    return [jnp.moveaxis(a.reshape(len(a), -1, n, *a.shape[2:]), 2, 0) for a in arrays]


def _on_each_device(f, in_specs, out_specs, *more_axes):
    """f in a shard_map over the axes of batch, sequence and more_axes. Loops over tiles need it, or
    XLA gathers weights and reduces gradients in every iteration.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return f
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs,
                         axis_names={*BATCH_AXES, "sp", *more_axes}, check_vma=False)


@partial(jax.custom_vjp, nondiff_argnames=("cfg", "n_tiles"))
def _tiled_sums(unembed_DV, x_BTD, labels_BT, weights_BT, cfg, n_tiles):
    """_loss_sums with the logits of one tile at a time.

    The gradient of "objective" is computed in the forward pass, tile by tile: nothing runs twice.
    Only in float16, or if other sums have a gradient too, does backward compute the tiles again.
    Source: Hsu et al. 2024 (Liger), arXiv:2410.10989, section 3.2.
    """
    totals = jax.lax.map(lambda tile: _loss_sums(unembed_DV, *tile, cfg),
                         _tiles(n_tiles, x_BTD, labels_BT, weights_BT))
    return jax.tree.map(lambda s: s.sum(axis=0), totals)


def _tiled_grads(unembed_DV, x_BTD, labels_BT, weights_BT, cotangents, cfg, n_tiles):
    """(sums, gradients of unembed_DV and x_BTD), for the cotangents of some of the sums."""
    def all_tiles(unembed_DV, x_BTD, labels_BT, weights_BT, cotangents):
        def weighted(unembed_DV, *tile):
            sums = _loss_sums(unembed_DV, *tile, cfg)
            return sum(c * sums[name] for name, c in cotangents.items()), sums

        def add_tile(total_DV, tile):
            (d_unembed_DV, dx_BtD), sums = jax.grad(weighted, (0, 1), has_aux=True)(
                unembed_DV, *tile)
            return total_DV + d_unembed_DV.astype(jnp.float32), (dx_BtD, sums)

        tiles = _tiles(n_tiles, x_BTD, labels_BT, weights_BT)
        d_unembed_DV, (dx, sums) = jax.lax.scan(add_tile, jnp.zeros(unembed_DV.shape), tiles)
        # Devices sum it in its dtype, as they do the other gradients.
        totals = jax.tree.map(lambda s: s.sum(axis=0), sums), d_unembed_DV.astype(unembed_DV.dtype)
        return jax.tree.map(lambda s: s[None], totals), jnp.moveaxis(dx, 0, 2).reshape(x_BTD.shape)

    split, stacked = P(BATCH_AXES, "sp"), P((*BATCH_AXES, "sp"))
    totals, dx_BTD = _on_each_device(all_tiles, (P(), split, split, split, P()), (stacked, split))(
        unembed_DV, x_BTD, labels_BT, weights_BT, cotangents)
    # Not jnp.sum, which would send float32.
    sums, d_unembed_DV = jax.tree.map(lambda s: jax.lax.reduce_sum(s, (0,)), totals)
    return sums, (d_unembed_DV, dx_BTD)


def _tiled_fwd(unembed_DV, x_BTD, labels_BT, weights_BT, cfg, n_tiles):
    inputs = [a.value for a in (unembed_DV, x_BTD, labels_BT, weights_BT)]
    sums, grads = _tiled_grads(*inputs, {"objective": 1.0}, cfg, n_tiles)
    return sums, (inputs, grads)


def _tiled_bwd(cfg, n_tiles, saved, cotangents):
    inputs, grads = saved
    cotangents = {k: c for k, c in cotangents.items()
                  if not isinstance(c, jax.custom_derivatives.SymbolicZero)}
    scale = cotangents.get("objective", jnp.float32(0))
    # In float16 a gradient without the loss scale, which is in its cotangent, may overflow.
    if cotangents.keys() - {"objective"} or grads[0].dtype == jnp.float16:
        grads, scale = _tiled_grads(*inputs, cotangents, cfg, n_tiles)[1], jnp.float32(1)
    d_unembed_DV, dx_BTD = grads
    return ((d_unembed_DV * scale).astype(dx_BTD.dtype), dx_BTD * scale.astype(dx_BTD.dtype),
            None, None)


_tiled_sums.defvjp(_tiled_fwd, _tiled_bwd, symbolic_zeros=True)


def label_log_probs(params, batch, cfg):
    """The log-probability [B, T] of each label in float32, 0 where it is ignored: for losses that
    are no sum over tokens. Holds the logits of one tile, which backward computes again.

    Leaves out the losses of a router.
    """
    x_BTD, unembed_DV, _, _ = _hidden_states(params, batch, cfg)
    n_tiles, labels_BT = _n_tiles(*x_BTD.shape[:2], cfg), batch["labels"]

    def all_tiles(unembed_DV, x_BTD, labels_BT):
        def of_tile(tile):
            x_BtD, labels_Bt = tile
            mask_Bt = labels_Bt != IGNORE
            _, _, lse_Bt, true_Bt = _label_logits(
                unembed_DV.astype(x_BTD.dtype), x_BtD, jnp.where(mask_Bt, labels_Bt, 0), cfg)
            return jnp.where(mask_Bt, true_Bt - lse_Bt, 0)

        log_probs = jax.lax.map(jax.checkpoint(of_tile), _tiles(n_tiles, x_BTD, labels_BT))
        return jnp.moveaxis(log_probs, 0, 2).reshape(labels_BT.shape)

    split = P(BATCH_AXES, "sp")
    # Float32, as backward adds up the gradients of the tiles in the dtype of what they share.
    return _on_each_device(all_tiles, (P(), split, split), split)(
        unembed_DV.astype(jnp.float32), x_BTD, labels_BT)


def _mlp_weights(w):
    return {name: x for name, x in w.items() if name.startswith(("w_gate", "w_up", "w_down"))}


def _mlp_in_tiles(x_BTD, w, cfg):
    """_mlp of one tile at a time, recomputed in backward.

    Source: Bekman et al. 2025 (ALST), arXiv:2506.13996, section 3.1.
    """
    def all_tiles(x, w):
        def tile(x):
            return _mlp(x, {name: a.astype(x.dtype) for name, a in w.items()}, cfg)

        y = jax.lax.map(jax.checkpoint(tile), *_tiles(cfg.mlp_tiles, x))
        y = jnp.moveaxis(y, 0, 2).reshape(x.shape)
        return jax.lax.psum(y, "tp") if n_tp > 1 else y

    def over_tp(name):
        axes = param_table(cfg)[f"layers.{name}"]["spec"][1:]
        return P(*(axis if axis == "tp" else None for axis in axes))

    split, n_tp = P(BATCH_AXES, "sp"), _axis_size("tp")
    specs = {name: over_tp(name) for name in _mlp_weights(w)}
    # Float32, as backward adds up the gradients of the tiles and devices in the dtype of w.
    w = {name: _shard(w[name], *spec).astype(jnp.float32) for name, spec in specs.items()}
    return _on_each_device(all_tiles, (split, specs), split, "tp")(x_BTD, w)


def _shard(x, *axes):
    """Constrain each dim of an activation to mesh axes; a dim that they do not divide (a few
    prompts) stays whole. Does nothing without a mesh or inside shard_map.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    divided = (a if n % _axis_size(a) == 0 else None for n, a in zip(x.shape, axes))
    return jax.lax.with_sharding_constraint(x, P(*divided))


def _axis_size(*axes):
    """Devices along these mesh axes (names, tuples of names, None) together; 1 without a mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return prod(shape.get(name, 1) for name in jax.tree.leaves(axes))


def _to_head_sharding(q_BTNH, k_BTKH, v_BTKH):
    """[B, heads, T, H] with the whole sequence and a part of the heads on each device: over sp the
    all-to-all of Ulysses, one for all three; over tp nothing moves.

    kv heads are copied until each device has its own.
    """
    B, T, K, H = k_BTKH.shape
    parts = _axis_size("tp", "sp")
    copies = lcm(K, parts) // K
    k, v = (jnp.repeat(x, copies, axis=2) for x in (k_BTKH, v_BTKH))
    each = [x.reshape(B, T, parts, -1, H) for x in (q_BTNH, k, v)]
    ends = np.cumsum([x.shape[3] for x in each[:2]])
    qkv = _shard(jnp.concatenate(each, axis=3), BATCH_AXES, "sp", "tp")
    qkv = _shard(qkv, BATCH_AXES, None, ("tp", "sp"))
    return [x.reshape(B, T, -1, H).swapaxes(1, 2) for x in jnp.split(qkv, ends, axis=3)]


def _attend_xla(q_BNTH, k_BKTH, v_BKTH, segments_BT, cfg):
    """_attend within a whole sequence; the first half of the queries skips the later keys. A long
    sequence goes block by block.
    """
    B, _, T, _ = q_BNTH.shape
    if T > DENSE_LEN:
        return _attend_in_blocks(q_BNTH, k_BKTH, v_BKTH, segments_BT, cfg)
    query_pos_BT = jnp.broadcast_to(jnp.arange(T), (B, T))

    def attend(queries):
        keys = slice(0, queries.stop)
        segments = None if segments_BT is None else (segments_BT[:, queries], segments_BT[:, keys])
        return _attend(q_BNTH[:, :, queries], k_BKTH[:, :, keys], v_BKTH[:, :, keys],
                       query_pos_BT[:, queries], cfg, segments)

    middle = (T + 1) // 2
    return jnp.concatenate([attend(slice(0, middle)), attend(slice(middle, T))], axis=2)


DENSE_LEN = 1024  # longer, attention goes block by block: faster, in memory linear in T
BLOCK_LEN = 512  # most queries and most keys of a block; on a CPU 256 is as fast


def _attend_in_blocks(q_BNTH, k_BKTH, v_BKTH, segments_BT, cfg):
    """_attend within a whole sequence by _blockwise: in at least 8 parts, so that little more than
    half of all blocks is computed.
    """
    T, H = q_BNTH.shape[2:]
    n = max(8, ceil(T / BLOCK_LEN))
    t = ceil(T / n)

    def parts(x):  # [..., T, H] -> [..., n, t, H]; what is added comes last, so no token sees it
        added = [(0, 0)] * (x.ndim - 2) + [(0, n * t - T), (0, 0)]
        return jnp.pad(x, added, mode="edge").reshape(*x.shape[:-2], n, t, -1)

    def attend(q, k, v, ids):  # of one device
        q_BKGTH = H**-0.5 * q.reshape(*k.shape[:2], -1, T, H)
        ids_Bnt = None if ids is None else parts(ids[..., None])[..., 0]
        operand = jnp.bfloat16 if cfg.dtype == "mixed" else q.dtype
        qkv = (parts(x.astype(operand)) for x in (q_BKGTH, k, v))
        attention = jax.custom_gradient(partial(_blockwise, window=cfg.sliding_window or T))
        a = attention(*qkv, ids_Bnt)
        return a.reshape(*q.shape[:2], n * t, H)[:, :, :T].astype(q_BNTH.dtype)

    return _by_heads(attend)(q_BNTH, k_BKTH, v_BKTH, segments_BT)


def _by_heads(attend):
    """attend(q, k, v, segments) in a shard_map that splits rows and heads over all devices."""
    rows, heads = P(BATCH_AXES), P(BATCH_AXES, ("tp", "sp"))
    return _on_each_device(attend, (heads, heads, heads, rows), heads, "tp")


_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)
_part = partial(jax.lax.dynamic_index_in_dim, axis=-3, keepdims=False)
_put_part = partial(jax.lax.dynamic_update_index_in_dim, axis=-3)


def _over_blocks(add_block, totals, q_BKGntH, k_BKntH, ids_Bnt, window):
    """totals after totals = add_block(totals, i, j, scores_BKGts) for query part i and key part j
    of each block in which a query may see a key. ids: the segments.

    The keys of each i go backwards from the diagonal, where every query sees a key.
    """
    n, t = k_BKntH.shape[2:4]
    i, back = np.indices((n, n))
    j = i - back
    meet = (j >= 0) & ((back - 1) * t + 1 < window)
    if ids_Bnt is not None:
        low_Bn, high_Bn = ids_Bnt.min(axis=2), ids_Bnt.max(axis=2)
        apart = (low_Bn[:, i] > high_Bn[:, j]) | (low_Bn[:, j] > high_Bn[:, i])
        meet = meet & ~apart.all(axis=0)
    blocks = jnp.stack(jnp.nonzero(meet, size=n * (n + 1) // 2))

    def one(block, totals):
        i, back = blocks[:, block]
        j, query_pos_1t = i - back, (back * t + jnp.arange(t))[None]  # counted from the first key
        segments = None if ids_Bnt is None else (ids_Bnt[:, i], ids_Bnt[:, j])
        q_BKGtH, k_BKsH = _part(q_BKGntH, i), _part(k_BKntH, j)
        scores_BKGts = _einsum("BKGtH,BKsH->BKGts", q_BKGtH, k_BKsH)
        return add_block(totals, i, j, _masked(scores_BKGts, query_pos_1t, window, segments))

    return jax.lax.fori_loop(0, meet.sum(), one, totals)


def _blockwise(q_BKGntH, k_BKntH, v_BKntH, ids_Bnt, window):
    """(attention of scaled queries in n parts of t, its gradient). Both hold the scores of one
    block at a time; the gradient computes them again.

    Source: Dao 2023, arXiv:2307.08691, section 3.1.
    """
    def add_forward(totals, i, j, scores_BKGts):
        a_BKGtH, sum_BKGt1, old_top_BKGt1 = (_part(x, i) for x in totals)
        top_BKGt1 = jnp.maximum(old_top_BKGt1, scores_BKGts.max(axis=-1, keepdims=True))
        e_BKGts, scale_BKGt1 = (jnp.exp(x - top_BKGt1) for x in (scores_BKGts, old_top_BKGt1))
        e_v_BKGtH = _einsum("BKGts,BKsH->BKGtH", e_BKGts.astype(v_BKntH.dtype), _part(v_BKntH, j))
        new = (scale_BKGt1 * a_BKGtH + e_v_BKGtH,
               scale_BKGt1 * sum_BKGt1 + e_BKGts.sum(axis=-1, keepdims=True), top_BKGt1)
        return tuple(_put_part(x, y, i) for x, y in zip(totals, new))

    inputs = q_BKGntH, k_BKntH, v_BKntH
    zeros_BKGnt1 = jnp.zeros((*q_BKGntH.shape[:-1], 1))
    totals = jnp.zeros(q_BKGntH.shape), zeros_BKGnt1, zeros_BKGnt1 - jnp.inf
    a_BKGntH, sum_BKGnt1, top_BKGnt1 = _over_blocks(
        add_forward, totals, q_BKGntH, k_BKntH, ids_Bnt, window)
    a_BKGntH = checkpoint_name((a_BKGntH / sum_BKGnt1).astype(q_BKGntH.dtype), "attention")
    lse_BKGnt1 = checkpoint_name(top_BKGnt1 + jnp.log(sum_BKGnt1), "attention")

    def gradient(da_BKGntH):
        delta_BKGnt1 = (da_BKGntH.astype(jnp.float32) * a_BKGntH).sum(axis=-1, keepdims=True)

        def add_backward(totals, i, j, scores_BKGts):
            da_BKGtH = _part(da_BKGntH, i)
            p_BKGts = jnp.exp(scores_BKGts - _part(lse_BKGnt1, i))
            dp_BKGts = _einsum("BKGtH,BKsH->BKGts", da_BKGtH, _part(v_BKntH, j))
            ds_BKGts = (p_BKGts * (dp_BKGts - _part(delta_BKGnt1, i))).astype(q_BKGntH.dtype)
            # dk and dv transposed, or XLA on a CPU would transpose ds and p in every block.
            new = (_einsum("BKGts,BKsH->BKGtH", ds_BKGts, _part(k_BKntH, j)),
                   _einsum("BKGtH,BKGts->BKHs", _part(q_BKGntH, i), ds_BKGts),
                   _einsum("BKGtH,BKGts->BKHs", da_BKGtH, p_BKGts.astype(da_BKGtH.dtype)))
            return tuple(_put_part(x, _part(x, at) + y, at)
                         for x, y, at in zip(totals, new, (i, j, j)))

        zeros_BKnHt = jnp.zeros(k_BKntH.swapaxes(3, 4).shape)
        totals = jnp.zeros(q_BKGntH.shape), zeros_BKnHt, zeros_BKnHt
        dq_BKGntH, *dkv = _over_blocks(add_backward, totals, q_BKGntH, k_BKntH, ids_Bnt, window)
        grads = dq_BKGntH, *(x_BKnHt.swapaxes(3, 4) for x_BKnHt in dkv)
        return *(x.astype(y.dtype) for x, y in zip(grads, inputs)), None

    return a_BKGntH, gradient


MASK_LEN = 8192  # longest sequence for which cuDNN is given a mask [T, T]


def _attend_cudnn(q_BNTH, k_BKTH, v_BKTH, segments_BT, cfg, implementation="cudnn"):
    """_attend within a whole sequence by cuDNN's fused kernel. Segments become a mask [T, T]."""
    mask = None if segments_BT is None else _shard(
        segments_BT[:, None, :, None] == segments_BT[:, None, None, :], BATCH_AXES, *3 * [None])
    return jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (q_BNTH, k_BKTH, v_BKTH)), mask=mask, is_causal=True,
        local_window_size=(cfg.sliding_window - 1, 0) if cfg.sliding_window else None,
        implementation=implementation).swapaxes(1, 2)


SPLASH_LEN = 2**15  # longer, JAX's splash kernel takes minutes to lay out its mask on the host


def _needs_flash(cfg, T):
    return T > SPLASH_LEN and not cfg.sliding_window


def _attend_pallas(q_BNTH, k_BKTH, v_BKTH, segments_BT, cfg):
    """_attend within a whole sequence by JAX's fused kernels for TPUs."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash, splash_attention as splash
    T, window = q_BNTH.shape[2], cfg.sliding_window
    block = max(n for n in (128, 256, 512) if T % n == 0)

    def attend(q, k, v, segments):  # of one device
        ids = None if segments is None else splash.SegmentIds(segments, segments)
        if _needs_flash(cfg, T):
            k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
            sizes = flash.BlockSizes(*3 * [block], 1, *7 * [block])  # 1: sequences at a time
            return checkpoint_name(flash.flash_attention(
                q, k, v, segment_ids=ids, causal=True, block_sizes=sizes), "attention")
        mask = splash.LocalMask((T, T), (window - 1, 0), 0) if window else splash.CausalMask((T, T))
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * q.shape[1]), head_shards=1, q_seq_shards=1,
            block_sizes=splash.BlockSizes(*8 * [block]),
            residual_checkpoint_name="attention")
        return jax.vmap(kernel)(q, k, v, ids)

    q_scaled_BNTH = cfg.head_dim**-0.5 * q_BNTH
    return _by_heads(attend)(q_scaled_BNTH, k_BKTH, v_BKTH, segments_BT).astype(q_BNTH.dtype)


ATTENTION = {"auto": _attend_xla, "xla": _attend_xla, "cudnn": _attend_cudnn,
             "pallas": _attend_pallas}


KERNEL_NEEDS = {
    "cudnn": "an NVIDIA GPU of compute capability 8.0 or later, dtype bfloat16 or float16, "
             "head_dim a multiple of 8 up to 128, and rows of one document or seq_len up to "
             f"{MASK_LEN}",
    "pallas": "a TPU, and head_dim and seq_len multiples of 128"}


def choose_attention(cfg, platform):
    """cfg.attention, with "auto" resolved to the fastest that works. platform: "cuda" for an NVIDIA
    GPU of compute capability 8.0 or later, "tpu", or another.

    Raises: ValueError when the kernel that cfg.attention names cannot be used.
    """
    H, T, whole_rows = cfg.head_dim, cfg.seq_len, cfg.packing == "stream" and not cfg.document_mask
    works = {"cudnn": (platform == "cuda" and "16" in cfg.dtype and H % 8 == 0 and H <= 128
                       and (whole_rows or T <= MASK_LEN)),
             "pallas": platform == "tpu" and H % 128 == 0 and T % 128 == 0, "xla": True}
    if cfg.attention == "auto":
        return next(kernel for kernel in works if works[kernel])
    if not works[cfg.attention]:
        raise ValueError(f"attention {cfg.attention}: needs {KERNEL_NEEDS[cfg.attention]}; "
                         "choose xla or auto")
    return cfg.attention


def _dtype(cfg):
    """dtype of weights and activations; "mixed" narrows only the operands of matmuls."""
    return "float32" if cfg.dtype == "mixed" else cfg.dtype


def _matmul(x, w, cfg, wide=False):
    """x [..., D] @ w [D, F] as one product of two matrices, in x's dtype, or in float32 if wide.

    XLA on a CPU takes five times as long for the weight gradient of the same product in three dims.
    Over sp x keeps its dims: flattening a split sequence would gather it.
    """
    mixed = cfg.dtype == "mixed"
    y = x.reshape(-1, x.shape[-1]) if mixed or _axis_size("sp") == 1 else x
    y = _matmul_mixed(y, w) if mixed else _matmul_f32(y, w) if wide else jnp.dot(y, w)
    return y.reshape(*x.shape[:-1], w.shape[-1])


@jax.custom_gradient
def _matmul_f32(x, w):
    """x @ w in float32, whatever their dtype. The gradient's products take dy rounded to that
    dtype: else a GPU would multiply in float32.
    """
    def gradient(dy):
        return jax.vjp(jnp.dot, x, w)[1](dy.astype(x.dtype))

    return jnp.dot(x, w, preferred_element_type=jnp.float32), gradient


def _batched_matmul(x, w, cfg):
    """x [B, K, G, M, D] @ w [B, K, D, F] in float32, one product for each of B and K."""
    if cfg.dtype != "mixed":
        return _einsum("BKGMD,BKDF->BKGMF", x, w)
    y = _matmul_mixed(x.reshape(*w.shape[:2], -1, x.shape[-1]), w)
    return y.reshape(x.shape[:-1] + w.shape[-1:])


@jax.custom_gradient
def _matmul_mixed(x, w):
    """float32 [..., M, D] @ [..., D, F] and its gradient, from operands rounded to bfloat16 and
    accumulated in float32.

    For CPUs that multiply bfloat16 (AMX, AMD's AVX512_BF16), which are fast only if the sum runs
    over the last dim of the left operand in memory.

    Error: 2**-9 of each operand.
    """
    dot = partial(jnp.matmul, preferred_element_type=jnp.float32)
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)

    def transposed(a):  # forces XLA to write it: fused into a product, it is slow or has no kernel
        return with_layout_constraint(a.mT, Layout(tuple(range(a.ndim))))

    def gradient(dy):
        dy = dy.astype(jnp.bfloat16)
        # The smaller of x and dy is transposed; without the barrier XLA undoes that, and has no
        # kernel.
        dw = jax.lax.optimization_barrier(
            dot(transposed(x), dy) if x.size <= dy.size else dot(transposed(dy), x))
        return dot(dy, transposed(w)), dw if x.size <= dy.size else dw.mT

    return dot(x, w), gradient


# In float32 whatever the dtypes: the router, and biases, whose gradient sums over all positions.
F32_PARAMS = "layers.w_router", "layers.bq", "layers.bk", "layers.bv"


@jax.custom_gradient
def _embed(embed_VD, tokens_BT):
    """embed_VD[tokens_BT], with a gradient added up in float32: in bfloat16 a sum of ones stays at
    256.
    """
    def of_device(tokens, dx):
        zeros_VD = jnp.zeros(embed_VD.shape, jnp.float32)
        return zeros_VD.at[tokens].add(dx.astype(jnp.float32)).astype(embed_VD.dtype)[None]

    def gradient(dx_BTD):
        split, parts = P(BATCH_AXES, "sp"), (_axis_size(BATCH_AXES), _axis_size("sp"))
        if dx_BTD.dtype == jnp.float32 or any(n % m for n, m in zip(tokens_BT.shape, parts)):
            return of_device(tokens_BT, dx_BTD)[0], None
        # Each device rounds its own sum before they add them: they send no float32.
        sums = _on_each_device(of_device, (split, split), P((*BATCH_AXES, "sp")))(tokens_BT, dx_BTD)
        return jax.lax.reduce_sum(sums, (0,)), None

    return embed_VD[tokens_BT], gradient


def _lora_rows(table, cfg):
    """Table rows of the two LoRA factors of each target; their product starts at zero.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """
    rows, r = {}, cfg.lora_rank
    weights = [n for n in table if n.startswith("layers.w") and n != "layers.w_router"]
    for name in sorted(matching("lora_targets", cfg.lora_targets, weights)):
        *stack, n_in, n_out = table[name]["shape"]
        *over, in_axes, out_axes = table[name]["spec"]
        a = dict(shape=(*stack, n_in, r), spec=P(*over, in_axes, None), init=("normal", n_in**-0.5))
        b = dict(shape=(*stack, r, n_out), spec=P(*over, None, out_axes), init=("normal", 0.0))
        rows |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
    return rows


def _route(y_BTD, router_DE, segments_BT, cfg, drop):
    """Choose the experts of each token: (weights [B, T, k] of its choices, 0 where dropped; slots
    [B, parts, T/parts * k] of its choices among those of all experts; tokens [B, parts, E C] in
    those slots; statistics [B, T]). In float32.

    If drop, an expert's capacity is cfg.capacity_factor (0: unlimited) times an even share of one
    sequence's tokens; the earliest tokens are kept, so that none depends on a later one. Over sp
    capacity is counted within each part of the sequence, to move no tokens between parts: the size
    of sp changes which choices are dropped, unless capacity_factor is 0. Padding, of segment 0,
    chooses none.

    Statistics: "balance", 1 where a sequence's tokens spread evenly, E where one expert gets all;
    "router_z", the squared log-partition; "dropped", the fraction of choices over capacity.
    Source: Fedus et al. 2021, arXiv:2101.03961, section 2.2; router_z, Zoph et al. 2022,
    arXiv:2202.08906, equation 5.
    """
    B, T, _ = y_BTD.shape
    E, k, parts = cfg.n_experts, cfg.experts_per_token, gcd(T, _axis_size("sp"))
    t = T // parts
    C = min(ceil(t * k / E * cfg.capacity_factor), t) if drop and cfg.capacity_factor else t
    logits_BTE = jnp.dot(y_BTD.astype(jnp.float32), router_DE, precision="highest")
    p_BTE = jax.nn.softmax(logits_BTE)
    weights, chosen = jax.lax.top_k(p_BTE, k)
    used_BT1 = jnp.ones((B, T, 1), bool) if segments_BT is None else segments_BT[..., None] > 0
    hits_BTE = used_BT1 * (chosen[..., None] == jnp.arange(E)[None, None, None]).sum(axis=2)
    ahead_BTE = jnp.cumsum(hits_BTE.reshape(B, parts, t, E), axis=2).reshape(B, T, E) - hits_BTE
    rank = jnp.take_along_axis(ahead_BTE, chosen, axis=2)
    kept = used_BT1 & (rank < C)
    # A dropped choice goes to a slot after the last, which no expert reads.
    slots = jnp.where(kept, chosen * C + rank, E * C).reshape(B, parts, t * k)
    row, part, choice = jnp.indices(slots.shape, sparse=True)
    tokens = jnp.zeros((B, parts, E * C + 1), jnp.int32)
    tokens = tokens.at[row, part, slots].set(choice // k)[..., :-1]
    share_BE, p_BE = (x.sum(axis=1) / jnp.maximum(used_BT1.sum(axis=1), 1)
                      for x in (hits_BTE, used_BT1 * p_BTE))
    balance_B1 = E * (share_BE / k * p_BE).sum(axis=-1, keepdims=True)
    stats = {"balance": jnp.broadcast_to(balance_B1, (B, T)),
             "router_z": jax.nn.logsumexp(logits_BTE, axis=-1) ** 2,
             "dropped": 1 - kept.mean(axis=-1)}
    return jnp.where(kept, weights / weights.sum(axis=-1, keepdims=True), 0), slots, tokens, stats


def _experts(y_BTD, w, segments_BT, cfg, drop):
    """The weighted sum of each token's experts, and the statistics of _route. drop: whether choices
    over capacity are dropped, which generation does not.
    """
    B, T, D = y_BTD.shape
    weights, slots, tokens, stats = _route(y_BTD, w["w_router"], segments_BT, cfg, drop)
    x = jnp.take_along_axis(y_BTD.reshape(B, slots.shape[1], -1, D), tokens[..., None], axis=2)
    # Over ep an all-to-all: from all experts of some rows to some experts of all rows; and back.
    by_row, by_expert = (BATCH_AXES, "sp"), (BATCH_AXES[:2], "sp", "ep")
    x_BPECD = x.reshape(*slots.shape[:2], cfg.n_experts, -1, D)
    x_BPECD = _shard(_shard(x_BPECD, *by_row), *by_expert)
    h_BPECD = jax.vmap(partial(_mlp, cfg=cfg), (2, 0), 2)(x_BPECD, _mlp_weights(w))
    h_BPECD = _shard(_shard(h_BPECD, *by_expert), *by_row)
    slots = jnp.minimum(slots, tokens.shape[2] - 1)
    out = jnp.take_along_axis(h_BPECD.reshape(*x.shape), slots[..., None], axis=2)
    weights = weights[..., None].astype(y_BTD.dtype)
    return (out.reshape(B, T, -1, D) * weights).sum(axis=2), stats


# Hugging Face's names of our parameters, {} the layer and the expert. Theirs are one tensor a
# layer, linear weights [out, in]; heads are rotated in the same order as here.
_HF_LAYER = "model.layers.{}."
HF_NAMES = {
    "embed": "model.embed_tokens.weight", "unembed": "lm_head.weight",
    "final_norm": "model.norm.weight", "layers.attn_norm": _HF_LAYER + "input_layernorm.weight",
    "layers.mlp_norm": _HF_LAYER + "post_attention_layernorm.weight",
    **{f"layers.w{x}": f"{_HF_LAYER}self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"layers.b{x}": f"{_HF_LAYER}self_attn.{x}_proj.bias" for x in "qkv"},
    **{f"layers.{x}_norm": f"{_HF_LAYER}self_attn.{x}_norm.weight" for x in "qk"},
    **{f"layers.w_{x}": f"{_HF_LAYER}mlp.{x}_proj.weight" for x in ("gate", "up", "down")}}
HF_EXPERT_NAMES = {
    family: {"layers.w_router": f"{_HF_LAYER}{block}.gate.weight", **{
        f"layers.w_{x}": f"{_HF_LAYER}{block}.experts.{{}}.{theirs}.weight"
        for x, theirs in zip(("gate", "up", "down"), experts.split())}}
    for family, block, experts in (("mixtral", "block_sparse_moe", "w1 w3 w2"),
                                   ("qwen3_moe", "mlp", "gate_proj up_proj down_proj"))}
# Tensors of their files that a model can do without: buffers, and a copy of tied embeddings.
HF_UNUSED = ("*.rotary_emb.inv_freq", "lm_head.weight")

# Names in config.json of our fields: of all models, and by model_type of those with experts.
HF_FIELDS = dict(
    d_model="hidden_size", n_layers="num_hidden_layers", n_heads="num_attention_heads",
    n_kv_heads="num_key_value_heads", head_dim="head_dim", d_ff="intermediate_size",
    vocab_size="vocab_size", rope_theta="rope_theta", norm_eps="rms_norm_eps",
    tie_embeddings="tie_word_embeddings", sliding_window="sliding_window")
_EXPERTS_PER_TOKEN = dict(experts_per_token="num_experts_per_tok")
HF_EXPERT_FIELDS = {
    "mixtral": dict(_EXPERTS_PER_TOKEN, n_experts="num_local_experts"),
    "qwen3_moe": dict(_EXPERTS_PER_TOKEN, n_experts="num_experts", d_ff="moe_intermediate_size")}

# (experts, qk_norm, qkv_bias) by model_type.
HF_FAMILIES = {
    "llama": (False, False, False), "mistral": (False, False, False),
    "qwen2": (False, False, True), "qwen3": (False, True, False),
    "mixtral": (True, False, False), "qwen3_moe": (True, True, False)}

# Values in config.json or its rope_parameters that can be expressed; null always can.
HF_LEGAL = dict(
    hidden_act=("silu", "swish"), attention_bias=(False,), mlp_bias=(False,),
    rope_type=("default", "llama3"), low_freq_factor=(1,), high_freq_factor=(4,),
    partial_rotary_factor=(1,), full_attention=(), sliding_attention=(),  # other rope for some
    norm_topk_prob=(True,), decoder_sparse_step=(1,), mlp_only_layers=([],), quantization_config=())


def hf_fields(hf):
    """The fields of Config that describe a model, from its config.json as a dict, in the form of
    transformers 4 or 5.

    Raises: ValueError that lists what this model cannot express, and what is missing.
    """
    family = hf.get("model_type")
    if family not in HF_FAMILIES:
        raise ValueError(f"config.json: model_type {family!r}: must be {', '.join(HF_FAMILIES)} "
                         "(GPT-2 cannot be: its positions are learnt, and here they are rotary)")
    experts, qk_norm, qkv_bias = HF_FAMILIES[family]
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    silent = dict(  # what transformers takes for entries that some files leave out
        tie_word_embeddings=False, head_dim=128 if family == "qwen3" else None,
        norm_topk_prob=family != "qwen3_moe", num_experts=hf.get("num_local_experts"))
    if family == "llama":
        silent |= dict(rope_theta=1e4, num_key_value_heads=None, sliding_window=None)
    hf = silent | hf | dict(rope_type=rope.get("type", "default")) | rope
    if family == "qwen2":  # has its biases whatever config.json says
        hf["attention_bias"] = False
    names = HF_FIELDS | HF_EXPERT_FIELDS.get(family, {})
    faults = [f"{name} {hf[name]!r}: must be {' or '.join(map(repr, legal)) or 'null'}"
              for name, legal in HF_LEGAL.items() if hf.get(name) not in (None, *legal)]
    needed = [*names.values(), *["factor"] * (hf["rope_type"] == "llama3")]
    faults += [f"{name}: is missing" for name in needed if name not in hf]
    if faults:
        raise ValueError("\n  ".join(["config.json: this model cannot express", *faults]))
    fields = {name: hf[theirs] for name, theirs in names.items()} | dict(
        qk_norm=qk_norm, qkv_bias=qkv_bias, sliding_window=_hf_window(hf),
        rope_theta=float(hf["rope_theta"]), rope_factor=1.0)
    fields["n_kv_heads"] = fields["n_kv_heads"] or fields["n_heads"]
    fields["head_dim"] = fields["head_dim"] or fields["d_model"] // fields["n_heads"]
    if hf["rope_type"] == "llama3" and hf["factor"] != 1:
        fields |= dict(rope_factor=float(hf["factor"]), rope_original_len=hf.get(
            "original_max_position_embeddings", hf.get("max_position_embeddings")))
    return fields | (dict(capacity_factor=0.0) if experts else dict(n_experts=0))


def _hf_window(hf):
    """The sliding window of all layers; 0: none. Raises ValueError where they differ."""
    family, n_layers = hf["model_type"], hf["num_hidden_layers"]
    used = family != "llama" and hf.get("use_sliding_window", not family.startswith("qwen"))
    window = (used and hf["sliding_window"]) or 0
    by_layer = family in ("qwen2", "qwen3")  # the others ignore layer_types: it must say the same
    n_full = hf.get("max_window_layers", 28) if by_layer else 0
    types = hf.get("layer_types") or [
        "full_attention" if i < n_full else "sliding_attention" for i in range(n_layers)]
    n_sliding = types.count("sliding_attention")
    if window and n_sliding not in ({0, n_layers} if by_layer else {n_layers}):
        raise ValueError(f"config.json: sliding_window {window}: must be that of all layers, or of "
                         "none; see layer_types and max_window_layers")
    return window if n_sliding else 0


def _hf_family(cfg):
    """The model_type whose forward pass is that of cfg."""
    form = bool(cfg.n_experts), cfg.qk_norm, cfg.qkv_bias
    families = [name for name, theirs in HF_FAMILIES.items() if theirs == form]
    if not families:
        raise ValueError("qkv_bias True: no model of Hugging Face's has it with qk_norm or experts")
    # Llama comes before Mistral: it has no window, and needs heads that divide d_model.
    return families[-1 if cfg.sliding_window or cfg.d_model % cfg.n_heads else 0]


def hf_config(cfg):
    """The config.json of cfg, derived, as a dict that transformers 4.56 and 5 read; ids of special
    tokens are none. A family ignores the entries of others.

    Raises: ValueError when no family of theirs has this combination of fields.
    """
    family, window = _hf_family(cfg), cfg.sliding_window
    names = HF_FIELDS | HF_EXPERT_FIELDS.get(family, {})
    hf = {theirs: getattr(cfg, name) for name, theirs in names.items()} | dict(
        architectures=[f"{family.title().replace('_', '')}ForCausalLM"], model_type=family,
        hidden_act="silu", norm_topk_prob=True, sliding_window=window or None,
        use_sliding_window=bool(window), max_window_layers=0 if window else cfg.n_layers,
        max_position_embeddings=cfg.seq_len, rope_scaling=None, bos_token_id=None,
        eos_token_id=None, pad_token_id=None)
    if cfg.rope_factor != 1:
        scaled = int(cfg.rope_original_len * cfg.rope_factor)
        hf |= dict(max_position_embeddings=max(cfg.seq_len, scaled), rope_scaling=dict(
            rope_type="llama3", factor=cfg.rope_factor, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=cfg.rope_original_len))
    return hf


def hf_pieces(cfg, adapter=False):
    """{our name: ({index: Hugging Face's name}, transposed)}: array[index], transposed or not, is
    the tensor of that name. adapter: only the LoRA factors, by PEFT's names; else all but them.
    """
    names, pieces = HF_NAMES | HF_EXPERT_NAMES.get(_hf_family(cfg), {}), {}
    for name, row in param_table(cfg).items():
        base, _, factor = name.partition(".lora_")
        if base not in names:
            raise ValueError(f"{base}: Hugging Face's format has no place for this parameter")
        theirs, n_stacked = names[base], names[base].count("{}")
        if factor:
            theirs = "base_model.model." + theirs.replace("weight", f"lora_{factor.upper()}.weight")
        if bool(factor) == adapter:
            pieces[name] = ({index: theirs.format(*index)
                             for index in np.ndindex(*row["shape"][:n_stacked])},
                            len(row["shape"]) - n_stacked == 2 and name != "embed")
    return pieces


def merge_lora(params, cfg):
    """params without LoRA factors, each update added to its weight in float32."""
    merged = {name: x for name, x in params.items() if ".lora_" not in name}
    for name in merged:
        if f"{name}.lora_a" in params:
            w, a, b = (params[name + end].astype(jnp.float32) for end in ("", ".lora_a", ".lora_b"))
            update = cfg.lora_alpha / cfg.lora_rank * jnp.matmul(a, b, precision="highest")
            merged[name] = (w + update).astype(params[name].dtype)
    return merged


def peft_config(cfg, base=None):
    """The adapter_config.json of cfg's LoRA factors as a dict. base: name or folder of the model
    that they tune.

    Raises: ValueError when more than the factors is trained, or when experts are among the targets:
    PEFT tunes modules, and transformers 5 keeps all experts of a layer in one parameter.
    """
    table = param_table(cfg)
    targets = [n.removesuffix(".lora_a") for n in table if n.endswith(".lora_a")]
    lost = [n for n, row in table.items() if row["trained"] and ".lora_" not in n]
    lost += [n for n in targets if cfg.n_experts and n.startswith("layers.w_")]
    if lost:
        raise ValueError(f"export_lora apart: {', '.join(lost)} would be lost, as PEFT keeps LoRA "
                         "factors alone, and none of experts; export the merged weights")
    return dict(peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base,
                r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, lora_dropout=0.0, bias="none",
                target_modules=sorted({HF_NAMES[n].split(".")[-2] for n in targets}))
