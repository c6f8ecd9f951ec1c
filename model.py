# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer as pure functions over a flat dict of arrays.

Covers Llama, Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped queries, SwiGLU, and by
option head norms, biases, tied embeddings, a sliding window, experts, low-rank updates. Each
parameter stands once, in `param_table`. `cfg`: any object with the fields that stand under "model"
and "numbers" in config.py, and freeze loss_norm batch_size label_smoothing z_loss router_balance
router_z; generate: temperature top_k top_p.
"""
from fnmatch import fnmatchcase
from functools import partial
from math import ceil, lcm, log, prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

ROWS = ("dp", "fsdp", "ep")  # mesh axes that share out the sequences of a batch
WHOLE = ("fsdp", "ep", "sp")  # mesh axes that share out a weight, and gather it where it is used
SPLIT = (*ROWS, "tp", "sp")  # mesh axes that share out logits
LOGIT_BYTES = 2**28  # of float32 logits on a device, above which the loss is made in tiles
SPLASH_LEN = 2**15  # longer, JAX's splash kernel takes minutes to lay out its mask on the host
IGNORE = -100  # label of a position that is not learnt

_save = jax.checkpoint_policies
REMAT = {
    "none": _save.everything_saveable,
    "full": _save.nothing_saveable,
    "dots": _save.dots_with_no_batch_dims_saveable,
    "named": _save.save_only_these_names("qkv", "attention"),
    "offload": _save.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["block"],
        offload_src="device", offload_dst="pinned_host"),
}

# What backward computes once more: weights whose products, and the share of attention's.
RECOMPUTED = {"none": ("", 0.0), "full": ("wq wk wv wo w_gate w_up", 1.0), "dots": ("", 1.0),
              "named": ("wo w_gate w_up", 0.5), "offload": ("wq wk wv wo w_gate w_up", 1.0)}


def param_table(cfg):
    """{name: (shape, partition spec, init, trained)}; init is ("normal", std) or ("constant",
    value).

    Weights are [layers, in, out], of experts [layers, experts, in, out], names under "layers."
    stacked over layers. What starts random is a matrix, what starts constant a scale or a bias:
    optimizers tell the two apart by it. Raises ValueError for a pattern that matches nothing.
    """
    L, D, F, V = cfg.n_layers, cfg.d_model, cfg.d_ff, cfg.vocab_size
    N, K, H, E = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim, cfg.n_experts
    ones, zeros = ("constant", 1.0), ("constant", 0.0)
    wide = ("normal", D**-0.5)
    # What writes to the residual stream starts smaller, so that its variance does not grow with
    # depth (GPT-2).
    out = lambda width: ("normal", (2 * L * width) ** -0.5)
    mlp, into, back = (((L,), P(None, WHOLE, "tp"), P(None, "tp", WHOLE)) if not E else
                       ((L, E), P(None, "ep", ("fsdp", "sp"), "tp"),
                        P(None, "ep", "tp", ("fsdp", "sp"))))
    table = {
        "embed": ((V, D), P("tp", WHOLE), wide),
        "layers.attn_norm": ((L, D), P(), ones),
        "layers.wq": ((L, D, N * H), P(None, WHOLE, "tp"), wide),
        "layers.wk": ((L, D, K * H), P(None, WHOLE, "tp"), wide),
        "layers.wv": ((L, D, K * H), P(None, WHOLE, "tp"), wide),
        "layers.wo": ((L, N * H, D), P(None, "tp", WHOLE), out(N * H)),
        "layers.mlp_norm": ((L, D), P(), ones),
        "layers.w_gate": ((*mlp, D, F), into, wide),
        "layers.w_up": ((*mlp, D, F), into, wide),
        "layers.w_down": ((*mlp, F, D), back, out(F)),
        "final_norm": ((D,), P(), ones),
    }
    if E:
        table["layers.w_router"] = ((L, D, E), P(None, WHOLE), wide)
    if cfg.qk_norm:
        table |= {f"layers.{x}_norm": ((L, H), P(), ones) for x in "qk"}
    if cfg.qkv_bias:
        heads = {"q": N, "k": K, "v": K}
        table |= {f"layers.b{x}": ((L, n * H), P(None, "tp"), zeros) for x, n in heads.items()}
    if not cfg.tie_embeddings:
        table["unembed"] = ((D, V), P(WHOLE, "tp"), wide)
    if cfg.lora_rank:
        table |= _lora_rows(table, cfg)
    frozen = matching("freeze", cfg.freeze, table)
    if len(frozen) == len(table):
        raise ValueError(f"freeze {' '.join(cfg.freeze)}: leaves no parameter to train")
    return {name: (*row, name not in frozen) for name, row in table.items()}


def _lora_rows(table, cfg):
    """Two thin factors of each target; their product starts at zero.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """
    rows, r = {}, cfg.lora_rank
    weights = {name: row for name, row in table.items()
               if name.startswith("layers.w") and name != "layers.w_router"}
    for name in sorted(matching("lora_targets", cfg.lora_targets, weights)):
        shape, spec, _ = weights[name]
        *stack, n_in, n_out = shape
        *over, split_in, split_out = (*spec, *[None] * (len(shape) - len(spec)))
        rows[f"{name}.lora_a"] = (*stack, n_in, r), P(*over, split_in, None), ("normal", n_in**-0.5)
        rows[f"{name}.lora_b"] = (*stack, r, n_out), P(*over, None, split_out), ("normal", 0.0)
    return rows


def matching(field, patterns, names):
    """The names that the patterns choose: of those that match a name the last decides, and one that
    starts with "!" says no.

    Raises ValueError that names a pattern without a match.
    """
    chosen = set()
    for pattern in patterns:
        found = {n for n in names if fnmatchcase(n, pattern.removeprefix("!"))}
        if not found:
            raise ValueError(f"{field} {pattern!r}: matches no parameter; there are "
                             + ", ".join(names))
        chosen = chosen - found if pattern.startswith("!") else chosen | found
    return chosen


def init(key, cfg):
    """Parameters in cfg.param_dtype; each one's values depend on key, name and shape alone."""
    params = {}
    for name, (shape, _, (kind, value), _) in param_table(cfg).items():
        if kind == "normal":
            name_hash = sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31
            own_key = jax.random.fold_in(key, name_hash)
            array = value * jax.random.normal(own_key, shape, jnp.float32)
        else:
            array = jnp.full(shape, value, jnp.float32)
        params[name] = array.astype(cfg.param_dtype)
    return params


def _shard(x, *axes):
    """Split each dim of an activation over its mesh axes; one that they do not divide, as a few
    prompts, stays whole. Without a mesh, or where shard_map has split it, do nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    ways = [_ways(*((a,) if isinstance(a, str) else a or ())) for a in axes]
    return jax.lax.with_sharding_constraint(
        x, P(*(a if n % w == 0 else None for n, a, w in zip(x.shape, axes, ways))))


def _dtype(cfg):
    """The dtype of weights and activations: float32 too where only products are narrower."""
    return "float32" if cfg.dtype == "mixed" else cfg.dtype


def _ways(*axes):
    """Devices along these mesh axes; 1 without a mesh."""
    return prod(jax.sharding.get_abstract_mesh().shape.get(a, 1) for a in axes)


def _dot(x, w, cfg, dtype=None):
    """x [..., D] @ w [D, F] in dtype (theirs), as one product of two matrices.

    XLA on a CPU takes five times as long for the weight gradient of the same product in three dims.
    Over sp those stay apart, since a split sequence can only be flattened by gathering it.
    """
    flat = _ways("sp") == 1 or cfg.dtype == "mixed"
    y = x.reshape(-1, x.shape[-1]) if flat else x
    y = (_mixed_dot(y, w) if cfg.dtype == "mixed"
         else jnp.dot(y, w, preferred_element_type=dtype))
    return y.reshape(*x.shape[:-1], w.shape[-1])


def _linear(x, w, name, cfg):
    """x @ w[name], plus its low-rank update where there is one."""
    y = _dot(x, w[name], cfg)
    if f"{name}.lora_a" in w:
        thin = _dot(x, w[f"{name}.lora_a"], cfg)
        y += cfg.lora_alpha / cfg.lora_rank * _dot(thin, w[f"{name}.lora_b"], cfg)
    return y


@jax.custom_vjp
def _mixed_dot(x, w):
    """float32 [M, D] @ [D, F], and its gradient, from operands rounded to bfloat16, summed in
    float32.

    Error: 2**-9 of each operand. Made for CPUs whose matrix units (AMX) multiply bfloat16: fast
    only if the sum runs over the last dim of the left operand as it lies in memory.
    """
    return _mixed_fwd(x, w)[0]


def _mixed_fwd(x, w):
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return jnp.dot(x, w, preferred_element_type=jnp.float32), (x, w)


def _mixed_bwd(saved, dy):
    (x, w), dy = saved, dy.astype(jnp.bfloat16)
    dot = partial(jnp.dot, preferred_element_type=jnp.float32)
    # Both say: make the transpose. Folded into the product, before or after it, it is slow, or more
    # than XLA has a kernel for.
    x_t = with_layout_constraint(x.T, Layout((0, 1)))
    return dot(dy, w.T), jax.lax.optimization_barrier(dot(x_t, dy))


_mixed_dot.defvjp(_mixed_fwd, _mixed_bwd)


def _rms_norm(x, scale, eps):
    """In float32 whatever comes in; comes out in x's dtype."""
    x_f32 = x.astype(jnp.float32)
    x_f32 *= jax.lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + eps)
    return (x_f32 * jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)


def rope_tables(positions_BT, cfg):
    """cos and signed sin [B, 1, T, 2, H/2] in float32.

    Source: Su et al. 2021, arXiv:2104.09864; rope_factor as in Llama 3.1: wavelengths beyond the
    original length are stretched by the factor, those under a quarter of it kept, those between
    interpolated.
    """
    freq = cfg.rope_theta ** -(jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim)
    if cfg.rope_factor != 1:
        turns = cfg.rope_original_len * freq / (2 * jnp.pi)
        keep = jnp.clip((turns - 1) / (4 - 1), 0, 1)
        freq = keep * freq + (1 - keep) * freq / cfg.rope_factor
    angle = positions_BT.astype(jnp.float32)[:, None, :, None] * freq[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)


def _rotate(x, cos, sin):
    """Rotate the two halves of each head of x [B, heads, T, H] by their positions, in float32
    (Hugging Face's order).

    A flip, not a concatenation: XLA vectorises it.
    """
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return (halves * cos + halves[..., ::-1, :] * sin).reshape(x.shape).astype(x.dtype)


def _attend(q_BNTH, k_BKSH, v_BKSH, slots_BT, cfg, segments=None):
    """Causal attention within the window, softmax in float32. slots_BT: which key is a query's own;
    segments: those of queries [B, T] and of keys [B, S], which meet where they are equal.

    Divided by its sum after the product with v, so that neither forward nor backward walks the
    scores for it.
    """
    B, N, T, H = q_BNTH.shape
    _, K, S, _ = k_BKSH.shape
    q_BKGTH = H**-0.5 * q_BNTH.reshape(B, K, N // K, T, H)
    scores_BKGTS = jnp.einsum(
        "BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH, preferred_element_type=jnp.float32)
    back_BTS = slots_BT[:, :, None] - jnp.arange(S)[None, None, :]
    seen_BTS = (back_BTS >= 0) & (back_BTS < (cfg.sliding_window or S))
    if segments is not None:
        seen_BTS &= segments[0][:, :, None] == segments[1][:, None, :]
    scores_BKGTS = jnp.where(seen_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    top_BKGT1 = jax.lax.stop_gradient(scores_BKGTS.max(axis=-1, keepdims=True))
    e_BKGTS = jnp.exp(scores_BKGTS - top_BKGT1)
    a_BKGTH = jnp.einsum("BKGTS,BKSH->BKGTH", e_BKGTS.astype(v_BKSH.dtype), v_BKSH,
                         preferred_element_type=jnp.float32)
    sum_BKGT1 = e_BKGTS.sum(axis=-1, keepdims=True)
    a_BKGTH = checkpoint_name(a_BKGTH, "attention") / checkpoint_name(sum_BKGT1, "attention")
    return a_BKGTH.reshape(q_BNTH.shape).astype(q_BNTH.dtype)


def _attend_halves(q_BNTH, k_BKTH, v_BKTH, segments_BT, cfg):
    """_attend on a whole sequence; the first half of its queries never meets the later keys."""
    B, _, T, _ = q_BNTH.shape
    slots_BT = jnp.broadcast_to(jnp.arange(T), (B, T))

    def attend(first, stop):
        queries, keys = slice(first, stop), slice(0, stop)
        segments = segments_BT if segments_BT is None else (
            segments_BT[:, queries], segments_BT[:, keys])
        return _attend(q_BNTH[:, :, queries], k_BKTH[:, :, keys], v_BKTH[:, :, keys],
                       slots_BT[:, queries], cfg, segments)

    middle = (T + 1) // 2
    return jnp.concatenate([attend(0, middle), attend(middle, T)], axis=2)


def _attend_library(q_BNTH, k_BKTH, v_BKTH, segments_BT, cfg, implementation="cudnn"):
    """_attend on a whole sequence by JAX's fused kernel, which never makes all scores."""
    assert segments_BT is None, "cuDNN's kernel has no segments: choose_attention refuses them"
    window = (cfg.sliding_window - 1, 0) if cfg.sliding_window else None
    a_BTNH = jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (q_BNTH, k_BKTH, v_BKTH)), is_causal=True,
        local_window_size=window, implementation=implementation)
    return checkpoint_name(a_BTNH, "attention").swapaxes(1, 2)


def _attend_pallas(q_BNTH, k_BKTH, v_BKTH, segments_BT, cfg):
    """_attend on a whole sequence by JAX's kernels for TPUs, which never make all scores."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash, splash_attention_mask as masks)
    T, window = q_BNTH.shape[2], cfg.sliding_window
    block = max(n for n in (128, 256, 512) if T % n == 0)
    blocks = lambda names: dict.fromkeys((f"block_{name}" for name in names.split()), block)
    seen = masks.LocalMask((T, T), (window - 1, 0), 0) if window else masks.CausalMask((T, T))

    def attend(q, k, v, segments):  # of one device
        if T > SPLASH_LEN and not window:
            k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
            ids = flash.SegmentIds(*segments * 2) if segments else None
            sizes = flash.BlockSizes(block_b=1, **blocks(
                "q k_major k q_major_dkv k_major_dkv k_dkv q_dkv k_major_dq k_dq q_dq"))
            return checkpoint_name(flash.flash_attention(
                q, k, v, segment_ids=ids, causal=True, block_sizes=sizes), "attention")
        sizes = splash.BlockSizes(**blocks("q kv q_dkv kv_dkv q_dq kv_dq"))
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([seen] * q.shape[1]), block_sizes=sizes, head_shards=1,
            q_seq_shards=1, residual_checkpoint_name="attention")
        return jax.vmap(kernel)(q, k, v, splash.SegmentIds(*segments * 2) if segments else None)

    heads = P(ROWS, ("tp", "sp"))
    if not jax.sharding.get_abstract_mesh().empty:
        attend = jax.shard_map(attend, in_specs=(heads, heads, heads, P(ROWS)), out_specs=heads,
                               check_vma=False)
    segments = () if segments_BT is None else (segments_BT,)
    return attend(cfg.head_dim**-0.5 * q_BNTH, k_BKTH, v_BKTH, segments).astype(q_BNTH.dtype)


ATTENTION = {"auto": _attend_halves, "xla": _attend_halves, "cudnn": _attend_library,
             "pallas": _attend_pallas}


def choose_attention(cfg, platform):
    """cfg.attention; of "auto", the fastest there is. platform: "cuda" for an NVIDIA GPU, "tpu", or
    another.

    Raises ValueError when a kernel is asked for by name and cannot be had.
    """
    needs = {
        "cudnn": {"an NVIDIA GPU": platform == "cuda",
                  f"dtype bfloat16 or float16 (it is {cfg.dtype})": "16" in cfg.dtype,
                  f"head_dim a multiple of 8 up to 128 (it is {cfg.head_dim})":
                  cfg.head_dim % 8 == 0 and cfg.head_dim <= 128,
                  "rows that are not packed": not cfg.packed},
        "pallas": {"a TPU": platform == "tpu",
                   f"head_dim a multiple of 128 (it is {cfg.head_dim})": cfg.head_dim % 128 == 0,
                   f"seq_len a multiple of 128 (it is {cfg.seq_len})": cfg.seq_len % 128 == 0}}
    lacks = {kernel: [need for need, met in rules.items() if not met]
             for kernel, rules in needs.items()}
    if lacks.get(cfg.attention):
        raise ValueError(f"attention {cfg.attention}: needs {' and '.join(lacks[cfg.attention])}; "
                         "choose xla or auto")
    if cfg.attention != "auto":
        return cfg.attention
    return next((kernel for kernel, lack in lacks.items() if not lack), "xla")


def _turn(q_BTNH, k_BTKH, v_BTKH):
    """From a part of the sequence with all heads to the whole sequence with a part of the heads,
    [B, heads, T, H]: over sp the all-to-all of Ulysses, one for all three; over tp nothing moves.

    Of kv heads there are as many copies as let every part have its own.
    """
    B, T, K, H = k_BTKH.shape
    parts = _ways("tp", "sp")
    copies = lcm(K, parts) // K
    each = [x.reshape(B, T, parts, -1, H) for x in (
        q_BTNH, *(jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (k_BTKH, v_BTKH)))]
    ends = np.cumsum([x.shape[3] for x in each[:2]])
    qkv = _shard(jnp.concatenate(each, axis=3), ROWS, "sp", "tp")
    qkv = _shard(qkv, ROWS, None, ("tp", "sp"))
    return [x.reshape(B, T, -1, H).swapaxes(1, 2) for x in jnp.split(qkv, ends, axis=3)]


def _mlp(x, w, cfg):
    """SwiGLU of x [..., D]."""
    gate, up = _linear(x, w, "w_gate", cfg), _linear(x, w, "w_up", cfg)
    return _linear(jax.nn.silu(gate) * up, w, "w_down", cfg)


def _mlp_weights(w):
    return {name: x for name, x in w.items() if name.startswith(("w_gate", "w_up", "w_down"))}


def _mlp_in_tiles(x_BTD, w, cfg):
    """_mlp of one tile in cfg.mlp_tiles at a time, in backward computed once more.

    Source: Bekman et al. 2025 (ALST), arXiv:2506.13996, section 3.1.
    """
    def all_tiles(x, w):
        tile = jax.checkpoint(partial(_mlp, cfg=cfg))
        y = jax.lax.map(lambda x: tile(x, w), *_tiles(cfg.mlp_tiles, x))
        return jnp.moveaxis(y, 0, 2).reshape(x.shape)

    return _on_each_device(all_tiles, (P(ROWS, "sp"), P()), P(ROWS, "sp"))(x_BTD, w)


def _on_each_device(f, in_specs, out_specs):
    """f on a device's own rows and part of the sequence, where there is a mesh: left to XLA, a loop
    would gather weights, and sum their gradients over devices, at each turn.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return f
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names={*ROWS, "sp"},
                         check_vma=False)


def _route(y_BTD, router_DE, cfg, factor):
    """Which experts a token goes to: (weights [B, T, k] of its choices, 0 for one without room;
    slots [B, parts, T/parts * k] of its choices among those of all experts; tokens [B, parts, E C]
    that the slots serve; figures [B, T]). In float32.

    An expert has room for `factor` (0: any number) times its even share of a sequence, or of a
    device's part of it; its earliest tokens are served, so that none depends on a later one.
    Figures: "balance", 1 where a sequence's tokens are spread evenly, E where all meet in one;
    "router_z", the squared log-partition; "dropped", the share of choices without room. Source:
    Fedus et al. 2021, arXiv:2101.03961, section 2.2; router_z, Zoph et al. 2022, arXiv:2202.08906,
    equation 5.
    """
    B, T, _ = y_BTD.shape
    E, k, parts = cfg.n_experts, cfg.experts_per_token, _ways("sp")
    parts = parts if T % parts == 0 else 1
    t = T // parts
    C = min(ceil(t * k / E * factor), t) or t
    logits_BTE = jnp.dot(y_BTD.astype(jnp.float32), router_DE.astype(jnp.float32),
                         precision="highest")
    p_BTE = jax.nn.softmax(logits_BTE)
    weights, chosen = jax.lax.top_k(p_BTE, k)
    hits_BTE = (chosen[..., None] == jnp.arange(E)[None, None, None]).sum(axis=2)
    ahead_BTE = (jnp.cumsum(hits_BTE.reshape(B, parts, t, E), axis=2).reshape(B, T, E) - hits_BTE)
    place = jnp.take_along_axis(ahead_BTE, chosen, axis=2)
    room = place < C
    # A choice without room is sent to a slot beyond the last, which is no expert's.
    slots = jnp.where(room, chosen * C + place, E * C).reshape(B, parts, t * k)
    row, part = jnp.arange(B)[:, None, None], jnp.arange(parts)[None, :, None]
    tokens = jnp.zeros((B, parts, E * C + 1), jnp.int32).at[row, part, slots].set(
        jnp.arange(t * k)[None, None] // k)[..., :-1]
    even_B1 = E * (hits_BTE.mean(axis=1) / k * p_BTE.mean(axis=1)).sum(axis=-1, keepdims=True)
    figures = {"balance": jnp.broadcast_to(even_B1, (B, T)),
               "router_z": jax.nn.logsumexp(logits_BTE, axis=-1) ** 2,
               "dropped": 1 - room.mean(axis=-1)}
    weights = jnp.where(room, weights / weights.sum(axis=-1, keepdims=True), 0)
    return weights, slots, tokens, figures


def _experts(y_BTD, w, cfg, factor):
    """Of each token the weighted sum of its likeliest experts' MLPs, and _route's figures."""
    (B, T, D), E = y_BTD.shape, cfg.n_experts
    weights, slots, tokens, figures = _route(y_BTD, w["w_router"], cfg, factor)
    parts, C = slots.shape[1], tokens.shape[2] // E
    x_BPECD = jnp.take_along_axis(
        y_BTD.reshape(B, parts, -1, D), tokens[..., None], axis=2).reshape(B, parts, E, C, D)
    # Over ep an all-to-all: from a part of the rows with all experts to all rows with a part of the
    # experts; and back below.
    split = ROWS[:2], "sp", "ep"
    x_BPECD = _shard(_shard(x_BPECD, ROWS, "sp"), *split)
    h_BPECD = jax.vmap(partial(_mlp, cfg=cfg), (2, 0), 2)(x_BPECD, _mlp_weights(w))
    h_BPECD = _shard(_shard(h_BPECD, *split), ROWS, "sp")
    served = jnp.take_along_axis(h_BPECD.reshape(B, parts, E * C, D),
                                 jnp.minimum(slots, E * C - 1)[..., None], axis=2)
    return (served.reshape(B, T, -1, D) * weights[..., None].astype(y_BTD.dtype)).sum(axis=2), (
        figures)


def _block(x_BTD, w, cache, positions_BT, segments_BT, rope, cfg):
    """One layer. w: its parameters without the prefix; cache: (k_BKSH, v_BKSH), of whose slots
    positions_BT are these tokens', or None. Returns x_BTD, cache, the router's figures.
    """
    x_BTD = checkpoint_name(x_BTD, "block")
    y_BTD = _rms_norm(x_BTD, w["attn_norm"], cfg.norm_eps)
    qkv = [checkpoint_name(_linear(y_BTD, w, f"w{x}", cfg), "qkv") for x in "qkv"]
    if cfg.qkv_bias:
        qkv = [a + jnp.expand_dims(w[f"b{x}"], (0, 1)) for a, x in zip(qkv, "qkv")]
    q_BTNH, k_BTKH, v_BTKH = (a.reshape(*a.shape[:2], -1, cfg.head_dim) for a in qkv)
    if cfg.qk_norm:
        q_BTNH = _rms_norm(q_BTNH, w["q_norm"], cfg.norm_eps)
        k_BTKH = _rms_norm(k_BTKH, w["k_norm"], cfg.norm_eps)
    q_BNTH, k_BKTH, v_BKTH = _turn(q_BTNH, k_BTKH, v_BTKH)
    q_BNTH, k_BKTH = _rotate(q_BNTH, *rope), _rotate(k_BKTH, *rope)
    if cache is not None:
        row_B11 = jnp.arange(len(x_BTD))[:, None, None]
        head_1K1 = jnp.arange(k_BKTH.shape[1])[None, :, None]
        cache = tuple(old.at[row_B11, head_1K1, positions_BT[:, None]].set(new)
                      for old, new in zip(cache, (k_BKTH, v_BKTH)))
        a_BNTH = _attend(q_BNTH, *cache, positions_BT, cfg)
    else:
        a_BNTH = ATTENTION[cfg.attention](q_BNTH, k_BKTH, v_BKTH, segments_BT, cfg)
    # And back.
    a_BTNH = _shard(_shard(a_BNTH, ROWS, ("tp", "sp")).swapaxes(1, 2), ROWS, "sp", "tp")
    # Block exit: the sums over tp become an all-reduce here, and sp splits the sequence again.
    y_BTD = _linear(a_BTNH.reshape(*a_BTNH.shape[:2], -1), w, "wo", cfg)
    x_BTD = _shard(x_BTD + y_BTD, ROWS, "sp")
    y_BTD, figures = _rms_norm(x_BTD, w["mlp_norm"], cfg.norm_eps), {}
    if cfg.n_experts:
        room = cfg.capacity_factor if cache is None else 0  # generation drops nothing
        y_BTD, figures = _experts(y_BTD, w, cfg, room)
    elif cfg.mlp_tiles > 1 and cache is None:
        y_BTD = _mlp_in_tiles(y_BTD, _mlp_weights(w), cfg)
    else:
        y_BTD = _mlp(y_BTD, w, cfg)
    return _shard(x_BTD + y_BTD, ROWS, "sp"), cache, figures


def _trunk(params, batch, cfg, cache=None):
    """(x_BTD after the last norm, unembed_DV, cache, the router's figures [B, T], means over
    layers).
    """
    tokens_BT = batch["tokens"]
    positions_BT = batch.get("positions")
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    params = {k: v if k == "layers.w_router" else v.astype(_dtype(cfg)) for k, v in params.items()}
    layers = {k.removeprefix("layers."): v for k, v in params.items() if k.startswith("layers.")}
    rope = rope_tables(positions_BT, cfg)
    # fsdp gathers the width of the table here, so that the look-up moves no activations; tp sums
    # over its rows.
    x_BTD = _shard(_shard(params["embed"], "tp", None)[tokens_BT], ROWS, "sp")

    def layer(x_BTD, w_and_cache):
        x_BTD, cache, figures = _block(
            x_BTD, *w_and_cache, positions_BT, batch.get("segments"), rope, cfg)
        return x_BTD, (cache, figures)

    if cfg.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT[cfg.remat])
    # Unrolled, XLA fuses across layers (a third faster on a CPU); scanned, compile time does not
    # grow with depth.
    x_BTD, (cache, figures) = jax.lax.scan(
        layer, x_BTD, (layers, cache), unroll=cfg.n_layers <= 12)
    x_BTD = _rms_norm(x_BTD, params["final_norm"], cfg.norm_eps)
    unembed_DV = params["embed"].T if cfg.tie_embeddings else params["unembed"]
    return x_BTD, unembed_DV, cache, {name: f.mean(axis=0) for name, f in figures.items()}


def _logits(x_BTD, unembed_DV, cfg):
    # tp splits the vocabulary, so that no device holds all logits of a token.
    return _shard(_dot(x_BTD, unembed_DV, cfg, jnp.float32), ROWS, "sp", "tp")


def forward(params, batch, cfg, cache=None):
    """Logits [B, T, V] in float32, and the cache with batch's keys and values written in.

    batch: "tokens" [B, T], and optionally "positions" [B, T], which a cache needs, and "segments"
    [B, T]: only tokens of one segment meet. Parameters are cast to cfg.dtype once. In float32 stay:
    norms, rotary positions, softmax, router, logits, loss.
    """
    x_BTD, unembed_DV, cache, _ = _trunk(params, batch, cfg, cache)
    return _logits(x_BTD, unembed_DV, cfg), cache


def loss_fn(params, batch, cfg):
    """({name: sum}, {name: count}) over the labelled positions of batch "tokens", "labels" [B, T].

    "objective" is what training minimises, its count as cfg.loss_norm has it; "loss" the plain
    cross-entropy in nats; "z" the squared log-partition; "acc" the share of positions where the
    label is the likeliest token, and 1/n of one where it is among n such; of experts "balance",
    "router_z" and "dropped". Source: smoothing, Szegedy et al. 2015, arXiv:1512.00567, less the
    entropy of the smoothed target, so that the best possible value is 0; z-loss, Chowdhery et al.
    2022, arXiv:2204.02311, section 5.
    """
    x_BTD, unembed_DV, _, figures = _trunk(params, batch, cfg)
    labels_BT = batch["labels"]
    weights_BT, norm = _loss_weights(labels_BT, cfg)
    n_tiles = _n_tiles(*x_BTD.shape[:2], cfg)
    loss_sums = partial(_tiled_sums, n_tiles=n_tiles) if n_tiles > 1 else _loss_sums
    sums = loss_sums(x_BTD, unembed_DV, labels_BT, weights_BT, cfg=cfg)
    if figures:
        extra_BT = cfg.router_balance * figures["balance"] + cfg.router_z * figures["router_z"]
        sums |= {k: jnp.where(labels_BT != IGNORE, f, 0).sum() for k, f in figures.items()}
        sums["objective"] += (weights_BT * extra_BT).sum()
    n_labels = (labels_BT != IGNORE).sum(dtype=jnp.float32)
    return sums, dict.fromkeys(sums, n_labels) | {"objective": norm}


def _loss_weights(labels_BT, cfg):
    """(weights_BT of positions in the objective's sum, what the sum is divided by) of
    cfg.loss_norm: "tokens" (labelled), "positions" (all), "sequences" (each by its own tokens), or
    a number for a whole batch.
    """
    mask_BT = labels_BT != IGNORE
    weights_BT, (B, T) = mask_BT.astype(jnp.float32), mask_BT.shape
    if cfg.loss_norm == "sequences":
        n_B1 = weights_BT.sum(axis=1, keepdims=True)
        return weights_BT / jnp.maximum(n_B1, 1), (n_B1 > 0).sum(dtype=jnp.float32)
    if cfg.loss_norm == "tokens":
        return weights_BT, weights_BT.sum()
    whole = B * T if cfg.loss_norm == "positions" else float(cfg.loss_norm) * B / cfg.batch_size
    return weights_BT, jnp.float32(whole)


def _loss_sums(x_BTD, unembed_DV, labels_BT, weights_BT, cfg):
    """The sums of loss_fn, from all logits at once."""
    logits_BTV = _logits(x_BTD, unembed_DV, cfg)
    mask_BT = labels_BT != IGNORE
    label_BT = jnp.where(mask_BT, labels_BT, 0)
    V, eps = cfg.vocab_size, cfg.label_smoothing
    top_BT = jax.lax.stop_gradient(logits_BTV.max(axis=-1))
    lse_BT = top_BT + jnp.log(jnp.exp(logits_BTV - top_BT[..., None]).sum(axis=-1))
    # A masked sum, not a gather: it stays where the logits are when tp splits the vocabulary.
    hit_BTV = label_BT[..., None] == jnp.arange(V)[None, None]
    true_BT = jnp.where(hit_BTV, logits_BTV, 0).sum(axis=-1)
    likeliest_BT = (logits_BTV == top_BT[..., None]).sum(axis=-1)
    nll_BT = lse_BT - true_BT
    z_BT = lse_BT * lse_BT
    objective_BT = nll_BT + cfg.z_loss * z_BT
    if eps:
        others_BT = (logits_BTV.sum(axis=-1) - true_BT) / (V - 1)
        entropy = -(1 - eps) * log(1 - eps) - eps * log(eps / (V - 1))
        objective_BT += eps * (true_BT - others_BT) - entropy
    acc_BT = (true_BT >= top_BT) / likeliest_BT
    terms = {"objective": objective_BT * weights_BT, "loss": nll_BT, "z": z_BT, "acc": acc_BT}
    return {k: jnp.where(mask_BT, v, 0).sum(dtype=jnp.float32) for k, v in terms.items()}


def _n_tiles(B, T, cfg):
    """cfg.logit_tiles, or the fewest that keep a device's logits at one time under LOGIT_BYTES."""
    if cfg.logit_tiles:
        return cfg.logit_tiles
    n_bytes = 4 * B * T * cfg.vocab_size / _ways(*SPLIT)
    per_shard = T // _ways("sp")
    return next(n for n in range(1, per_shard + 1)
                if per_shard % n == 0 and (n_bytes / n <= LOGIT_BYTES or n == per_shard))


@partial(jax.custom_vjp, nondiff_argnames=("cfg", "n_tiles"))
def _tiled_sums(x_BTD, unembed_DV, labels_BT, weights_BT, cfg, n_tiles):
    """_loss_sums, but of all logits only one tile in n_tiles exists at a time.

    Its gradient, of "objective" alone, is made tile by tile on the way forward, so that nothing is
    computed twice. Source: Hsu et al. 2024 (Liger), arXiv:2410.10989, section 3.2.
    """
    sums = lambda tile: _loss_sums(tile[0], unembed_DV, *tile[1:], cfg)
    totals = jax.lax.map(sums, _tiles(n_tiles, x_BTD, labels_BT, weights_BT))
    return jax.tree.map(lambda s: s.sum(axis=0), totals)


def _tiles(n, *arrays):
    # Position t goes to tile t mod n: sp keeps its own positions, and nothing moves.
    return [jnp.moveaxis(a.reshape(len(a), -1, n, *a.shape[2:]), 2, 0) for a in arrays]


def _tiled_fwd(x_BTD, unembed_DV, labels_BT, weights_BT, cfg, n_tiles):
    def objective(x_BtD, unembed_DV, labels_Bt, weights_Bt):
        sums = _loss_sums(x_BtD, unembed_DV, labels_Bt, weights_Bt, cfg)
        return sums["objective"], sums

    def tile(total_DV, x_and_labels):
        x_BtD, *others = x_and_labels
        grads, sums = jax.grad(objective, (0, 1), has_aux=True)(x_BtD, unembed_DV, *others)
        return total_DV + grads[1].astype(jnp.float32), (grads[0], sums)

    def all_tiles(x_BTD, unembed_DV, labels_BT, weights_BT):
        zeros_DV = jnp.zeros(unembed_DV.shape, jnp.float32)
        d_unembed_DV, (dx, sums) = jax.lax.scan(
            tile, zeros_DV, _tiles(n_tiles, x_BTD, labels_BT, weights_BT))
        sums = jax.tree.map(lambda s: s.sum(axis=0)[None], sums)
        return sums, jnp.moveaxis(dx, 0, 2).reshape(x_BTD.shape), d_unembed_DV[None]

    own, parts = P(ROWS, "sp"), P((*ROWS, "sp"))
    all_tiles = _on_each_device(all_tiles, (own, P(), own, own), (parts, own, parts))
    sums, dx_BTD, d_unembed = all_tiles(x_BTD, unembed_DV, labels_BT, weights_BT)
    sums, d_unembed_DV = jax.tree.map(lambda s: s.sum(axis=0), (sums, d_unembed))
    return sums, (dx_BTD, d_unembed_DV)


def _tiled_bwd(cfg, n_tiles, grads, cotangents):
    dx_BTD, d_unembed_DV = grads
    factor = cotangents["objective"]
    return (dx_BTD * factor.astype(dx_BTD.dtype), (d_unembed_DV * factor).astype(dx_BTD.dtype),
            None, None)


_tiled_sums.defvjp(_tiled_fwd, _tiled_bwd)


def flops_per_token(cfg, seq_len):
    """(FLOPs of one trained token, those that remat adds, formula of the first): products forward
    and backward, causal attention at half, experts only where the token goes, and no gradient of
    frozen weights.

    The mean number of keys a query sees is half the sequence, or less under a sliding window.
    """
    table = param_table(cfg)
    weights = {name.removeprefix("layers."): [prod(shape), trained]
               for name, (shape, _, _, trained) in table.items()
               if name == "unembed" or name.startswith("layers.w")}
    if cfg.tie_embeddings:
        weights["unembed"] = [cfg.vocab_size * cfg.d_model, table["embed"][3]]
    for name in weights:
        if cfg.n_experts and name.startswith(("w_gate", "w_up", "w_down")):
            weights[name][0] *= cfg.experts_per_token / cfg.n_experts
    window = min(cfg.sliding_window or seq_len, seq_len)
    keys = window * (1 - window / (2 * seq_len))
    attention = 4 * cfg.n_layers * cfg.n_heads * cfg.head_dim * keys
    names, share = RECOMPUTED[cfg.remat]
    names = {*names.split(), *(("w_gate", "w_up") if cfg.mlp_tiles > 1 else ())}
    again = 2 * sum(weights[name][0] for name in names) + share * attention
    products = sum((6 if trained else 4) * n for n, trained in weights.values())
    return (products + 3 * attention, again,
            "6*P_matmul + 12*L*N*H*mean_keys, causal: T/2 keys")


def _pick(logits_BV, key, cfg):
    """A token per row: the likeliest at temperature 0, else sampled among the top_k and top_p
    likeliest.
    """
    if cfg.temperature == 0:
        return logits_BV.argmax(axis=-1)
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1) / cfg.temperature
    before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV), axis=-1) - jax.nn.softmax(sorted_BV)
    V = logits_BV.shape[1]
    keep_BV = (before_BV < cfg.top_p) & (jnp.arange(V)[None] < (cfg.top_k or V))
    rank_B = jax.random.categorical(key, jnp.where(keep_BV, sorted_BV, -jnp.inf))
    return jnp.take_along_axis(order_BV, rank_B[:, None], axis=-1)[:, 0]


@partial(jax.jit, static_argnames=("cfg", "n_new"))
def generate(params, tokens_BT, lengths_B, cfg, key, n_new):
    """n_new tokens [B, n_new] after each row's first lengths_B (at least 1) tokens; what follows
    those is ignored.

    One prefill, then one token a turn against a cache of keys and values. cfg (hashable): the
    model's, and temperature (0: greedy), top_k (0: all), top_p.
    """
    B, T = tokens_BT.shape
    K = lcm(cfg.n_kv_heads, _ways("tp", "sp"))  # with the copies of _turn
    shape = (cfg.n_layers, B, K, T + n_new, cfg.head_dim)
    cache = (jnp.zeros(shape, _dtype(cfg)), jnp.zeros(shape, _dtype(cfg)))
    positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    batch = {"tokens": tokens_BT, "positions": positions_BT}
    logits_BTV, cache = forward(params, batch, cfg, cache)
    logits_BV = jnp.take_along_axis(logits_BTV, lengths_B[:, None, None] - 1, axis=1)[:, 0]

    def turn(carry, i):
        logits_BV, cache = carry
        token_B = _pick(logits_BV, jax.random.fold_in(key, i), cfg)
        batch = {"tokens": token_B[:, None], "positions": (lengths_B + i)[:, None]}
        logits_B1V, cache = forward(params, batch, cfg, cache)
        return (logits_B1V[:, 0], cache), token_B

    _, tokens_TB = jax.lax.scan(turn, (logits_BV, cache), jnp.arange(n_new))
    return tokens_TB.T
