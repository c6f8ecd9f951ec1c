# SPDX-License-Identifier: Apache-2.0
"""Tests of Hugging Face weights, read and written: comparisons with transformers."""
import copy
import dataclasses
import io
import json
import re
import shutil
import struct
from functools import partial
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import adapter
import ckpt
import config
import data
import model
import step
import train
from test_data import chat_folder, make_bpe
from test_real_data import make_metaspace, save_folder

SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=24, vocab_size=40, max_position_embeddings=64, rms_norm_eps=1e-3,
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=8)
ROPE = dict(rope_type="default", rope_theta=100.0)
LLAMA3 = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=16)
QWEN_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
                norm_topk_prob=True)
# Prefix of the config class in transformers, its values, and a mesh (dp, fsdp, ep, tp, sp).
MODELS = {
    "llama": ("Llama", {}, (1, 2, 1, 2, 2)),
    "llama scaled": ("Llama", dict(tie_word_embeddings=True, head_dim=8, rope_parameters=LLAMA3),
                     (2, 4, 1, 1, 1)),
    "mistral window": ("Mistral", dict(sliding_window=5, head_dim=8), (1, 1, 1, 2, 1)),
    "qwen2 window": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=0,
                                   rope_parameters=dict(rope_type="default", rope_theta=50.0)),
                     None),
    "qwen3": ("Qwen3", dict(head_dim=8), (1, 2, 1, 4, 1)),
    "phi3": ("Phi3", dict(sliding_window=5), (1, 2, 1, 2, 1)),
    "olmo2": ("Olmo2", {}, (1, 2, 1, 2, 2)),
    "linear": ("Qwen3", dict(head_dim=8, rope_parameters=ROPE | dict(rope_type="linear",
                                                                     factor=4.0)), None),
    "yarn": ("Qwen2", dict(rope_parameters=YARN), None),
    "yarn with its own factor": ("Mistral", dict(
        head_dim=12, sliding_window=None,
        rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.5)), None),
    "qwen2 mixed": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, num_hidden_layers=3,
                                  max_window_layers=1), None),
    "ministral3 by default": ("Ministral3", dict(head_dim=8, rope_parameters=None), None),
    "ministral mixed": ("Ministral", dict(
        sliding_window=5, num_hidden_layers=3, head_dim=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"]), None),
    "ministral3": ("Ministral3", dict(head_dim=8, sliding_window=None, rope_parameters=YARN | dict(
        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5)), (1, 2, 1, 2, 2)),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=5, no_rope_layer_interval=2,
                                rope_parameters=ROPE), (1, 2, 1, 2, 2)),
    "olmo3": ("Olmo3", dict(num_hidden_layers=5, sliding_window=5, rope_parameters=dict(
        full_attention=YARN, sliding_attention=ROPE)), (2, 2, 1, 1, 2)),
    "gemma2": ("Gemma2", dict(num_hidden_layers=3, sliding_window=5, head_dim=8,
                              query_pre_attn_scalar=10, attn_logit_softcapping=2.0,
                              final_logit_softcapping=3.0), (1, 2, 1, 2, 2)),
    "gemma3": ("Gemma3Text", dict(
        num_hidden_layers=7, sliding_window=5, head_dim=8, query_pre_attn_scalar=10,
        rope_parameters=dict(full_attention=ROPE | dict(rope_type="linear", factor=8.0),
                             sliding_attention=ROPE | dict(rope_theta=20.0))), (2, 2, 1, 2, 1)),
    "seed_oss": ("SeedOss", dict(head_dim=8), None),
    "seed_oss without biases": ("SeedOss", dict(head_dim=4, attention_bias=False), None),
    "iquestcoder": ("IQuestCoder", dict(head_dim=None), None),
    "internlm3": ("InternLM3", dict(head_dim=None), None),
    "granite": ("Granite", dict(embedding_multiplier=3.0, logits_scaling=1.5,
                                residual_multiplier=0.7, attention_multiplier=0.3,
                                tie_word_embeddings=True), (1, 2, 1, 2, 1)),
    "granite untied": ("Granite", dict(embedding_multiplier=3.0, logits_scaling=1.5), None),
    "ernie4_5": ("Ernie4_5", dict(head_dim=8, rope_parameters=ROPE), (1, 2, 1, 2, 1)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, head_dim=6), (1, 1, 4, 2, 1)),
    "qwen3_moe": ("Qwen3Moe", QWEN_MOE | dict(head_dim=8), (2, 2, 2, 1, 1)),
}
# {model: what its export is}, where that is another family.
EXPORTED_AS = {"phi3": "Mistral", "yarn with its own factor": "Llama", "seed_oss": "Qwen2",
               **dict.fromkeys(("seed_oss without biases", "iquestcoder", "internlm3", "granite",
                                "granite untied", "ernie4_5"), "Llama")}
QUICK = ("llama scaled", "phi3", "qwen3_moe", "gemma3", "smollm3")
TOKENS = np.random.default_rng(5).integers(0, 40, (4, 24)).astype(np.int32)


def torch_and_transformers():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.set_num_threads(1)
    return torch, transformers


def make_hf_model(name, folder, **how):
    """Save a model of transformers with random parameters, scales about 1, to folder; return it."""
    torch, transformers = torch_and_transformers()
    kind, changes, _ = MODELS[name]
    hf_model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, f"{kind}Config")(**SIZES | changes))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, x in hf_model.named_parameters():
            x.normal_(0, 0.3, generator=rng)
            x.add_(float(x.ndim == 1 and "norm" in key))
    hf_model.eval().save_pretrained(folder, **how)
    return hf_model


def hf_logits(hf_model):
    torch, _ = torch_and_transformers()
    with torch.no_grad():
        return hf_model(torch.from_numpy(TOKENS).long()).logits.numpy()


def read_config(folder, **changes):
    fields = model.hf_fields(json.loads((folder / "config.json").read_text()))
    cfg = config.Config(**fields | dict(seq_len=64, dtype="float32", attention="xla") | changes)
    config.validate(cfg, None, {}, config.text_errors)
    return config.derive_text(cfg)


def make_mesh(shape):
    sizes = dict(zip(("dp", "fsdp", "ep", "tp", "sp"), shape or (1, 1, 1, 1, 1)))
    return step.make_mesh(config.Config(**sizes), jax.devices()[: np.prod(shape or 1)])


def like_of(cfg, mesh, dtype="float32"):
    return {name: jax.ShapeDtypeStruct(row["shape"], dtype,
                                       sharding=jax.sharding.NamedSharding(mesh, row["spec"]))
            for name, row in model.param_table(cfg).items()}


def read_params(folder, cfg, mesh, dtype="float32"):
    return train.open_hf(str(folder), cfg)["read"](like_of(cfg, mesh, dtype))


def jax_logits(params, cfg, mesh):
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(lambda p: model.forward(p, {"tokens": TOKENS}, cfg))(params))


def write(path, params, pieces, dtype="float32"):
    shapes = ckpt.tensor_shapes(pieces, params)
    ckpt.write_safetensors(path, shapes, dtype, ckpt.each_tensor(params, pieces, dtype))


def read_files(folder):
    from safetensors.numpy import load_file
    return {k: x for path in folder.glob("*.safetensors") for k, x in load_file(path).items()}


def draw(cfg, seed=0):
    """Return random parameters; norms and biases differ from their initial 1 and 0."""
    params = jax.jit(lambda key: model.init(key, cfg))(jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return {k: np.asarray(x) + rng.normal(0, 0.2, x.shape).astype(np.float32)
            for k, x in params.items()}


def assert_close(actual, expected):
    assert actual.std() > 0.1
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max(),
        err_msg="transformers computes other logits: edit _block or _mlp in model.py, or leave out "
                "tests/test_hf.py, since a changed model has no class there")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in MODELS])
def test_a_hugging_face_model_has_the_same_logits_and_tokens(name, tmp_path):
    """Logits, greedy tokens and written tensors are those of transformers; Phi-3 becomes Mistral.

    Break: model.py: block_sparse_moe.experts.{}.w1.weight => block_sparse_moe.experts.{}.w2.weight
    """
    torch, transformers = torch_and_transformers()
    hf_model, mesh = make_hf_model(name, tmp_path / "hf"), make_mesh(MODELS[name][2])
    cfg = read_config(tmp_path / "hf", temperature=0.0)
    params = read_params(tmp_path / "hf", cfg, mesh)
    for key, x in params.items():
        assert x.sharding.is_equivalent_to(like_of(cfg, mesh)[key].sharding, x.ndim)
    logits = jax_logits(params, cfg, mesh)
    assert_close(logits, hf_logits(hf_model))
    if name in QUICK:
        with jax.set_mesh(mesh):
            tokens = model.generate(
                params, TOKENS, np.full(4, 24, np.int32), cfg, jax.random.key(0), 8)
        new = hf_model.generate(torch.from_numpy(TOKENS).long(), max_new_tokens=8, do_sample=False,
                                attention_mask=torch.ones(TOKENS.shape, dtype=torch.int64))
        assert (np.asarray(tokens) == new[:, 24:].numpy()).all()

    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_text(json.dumps(model.hf_config(cfg)))
    write(exported / "model.safetensors", model.to_hf(params, cfg), model.hf_pieces(cfg))
    kind = type(hf_model)
    if name in EXPORTED_AS:
        kind = getattr(transformers, f"{EXPORTED_AS[name]}ForCausalLM")
    elif "gemma" not in name:  # whose gains are 1 + w, and queries have a factor
        old, new = read_files(tmp_path / "hf"), read_files(exported)
        assert old.keys() == new.keys()
        assert all(old[k].dtype == new[k].dtype and (old[k] == new[k]).all() for k in old)
    assert read_config(exported, temperature=0.0) == cfg
    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True, dtype="float32")
    assert not any(info[key] for key in info), info
    assert type(back) is kind
    assert_close(logits, hf_logits(back.eval()))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_fused_experts_are_read(name, tmp_path):
    """One tensor for all experts of a layer gives the parameters of one for each expert.

    Break: model.py: x[index][start:end] => x[(0,) * len(index)][start:end]
    """
    make_hf_model(name, tmp_path / "plain")
    make_hf_model(name, tmp_path / "fused", save_original_format=False)
    mesh = make_mesh(MODELS[name][2])
    assert any("gate_up_proj" in key for key in read_files(tmp_path / "fused"))
    cfg = read_config(tmp_path / "plain")
    plain = read_params(tmp_path / "plain", cfg, mesh)
    fused = read_params(tmp_path / "fused", cfg, mesh)
    assert all((plain[key] == fused[key]).all() for key in plain)
    tensors = ckpt.open_tensors(tmp_path / "fused")
    name = next(name for name in tensors if name.endswith("gate_up_proj"))
    tensors[name] = np.concatenate([tensors[name]] * 2, axis=1)
    n_rows = tensors[name].shape[1]
    with pytest.raises(ValueError, match=f"{name} has {n_rows} rows; must be {n_rows // 2}"):
        model.split_fused(tensors, cfg)


@pytest.mark.parametrize("name, words", [
    ("mixtral", r"block_sparse_moe.*|experts.*"), ("qwen3_moe", r"mlp\.(gate|experts)")])
def test_experts_under_a_dense_family_are_refused(name, words, tmp_path):
    """Tensors of experts, fused or not, are no tensors of a dense model.

    Break: model.py: if name in table and len(table[name]["shape"]) == x.ndim + 1] =>
    if name in table]
    """
    make_hf_model(name, tmp_path / "hf", save_original_format=False)
    config_json = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config_json | {"model_type": "llama"}))
    with pytest.raises(ValueError, match=rf"model.layers.\*.*({words}).* is not a tensor of this"):
        read_params(tmp_path / "hf", read_config(tmp_path / "hf"), make_mesh(None))


def test_weights_of_a_base_model_are_read(tmp_path):
    """Names without "model.", as embedding models have them, are those of the same model.

    Break: train.py: tensors = {name if name == head else f"model.{name}": x => _ = {name: x
    """
    hf_model = make_hf_model("llama scaled", tmp_path / "whole")
    hf_model.model.save_pretrained(tmp_path / "base")
    assert "norm.weight" in read_files(tmp_path / "base")
    cfg = read_config(tmp_path / "whole")
    like = like_of(cfg, make_mesh(None), "float32")
    whole, base = (train.open_hf(str(tmp_path / name), cfg)["read"](like)
                   for name in ("whole", "base"))
    assert all((whole[name] == base[name]).all() for name in whole)


# ---- config.json

HUB = {  # config.json files written by transformers 4, and the fields that they give
    "Llama-3.1-8B": (dict(
        model_type="llama", attention_bias=False, hidden_act="silu", hidden_size=4096,
        intermediate_size=14336, max_position_embeddings=131072, mlp_bias=False,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, pretraining_tp=1,
        rms_norm_eps=1e-05, rope_theta=500000.0, tie_word_embeddings=False, vocab_size=128256,
        rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_type="llama3",
                          original_max_position_embeddings=8192)),
        dict(rope_factor=8.0, rope_original_len=8192, head_dim=128, n_kv_heads=8, norm_eps=1e-5,
             rope_theta=5e5, qk_norm=False, tie_embeddings=False)),
    "llama-7b": (dict(
        model_type="llama", hidden_act="silu", hidden_size=4096, intermediate_size=11008,
        num_attention_heads=32, num_hidden_layers=32, rms_norm_eps=1e-06, vocab_size=32000),
        dict(n_kv_heads=32, head_dim=128, rope_theta=1e4, rope_factor=1.0, sliding_window=0)),
    "Seed-OSS-36B, the keys that have no default": (dict(
        model_type="seed_oss", hidden_size=5120, intermediate_size=27648, num_attention_heads=80,
        num_hidden_layers=64, vocab_size=155136),
        dict(n_kv_heads=8, head_dim=128, qkv_bias=True, tie_embeddings=False)),
    "Qwen3-30B-A3B": (dict(
        model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1, head_dim=128,
        hidden_act="silu", hidden_size=2048, intermediate_size=6144, max_window_layers=48,
        mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32,
        num_experts=128, num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4,
        rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000.0, sliding_window=None,
        tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936),
        dict(n_experts=128, experts_per_token=8, d_ff=768, qk_norm=True, head_dim=128)),
    "Olmo-3-7B": (dict(
        model_type="olmo3", attention_bias=False, hidden_act="silu", hidden_size=4096,
        intermediate_size=11008, layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        max_position_embeddings=65536, num_attention_heads=32, num_hidden_layers=32,
        num_key_value_heads=32, rms_norm_eps=1e-06, rope_theta=500000, sliding_window=4096,
        tie_word_embeddings=False, vocab_size=100278, rope_scaling=dict(
            attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=8.0,
            original_max_position_embeddings=8192, rope_type="yarn")),
        dict(layer_types=("sliding", "sliding", "sliding", "full"), rope_local_theta=5e5,
             rope_scaling="yarn", rope_original_len=8192, post_norm=True, qk_norm=True)),
    "SmolLM3-3B": (dict(
        model_type="smollm3", attention_bias=False, hidden_act="silu", hidden_size=2048,
        intermediate_size=11008, layer_types=["full_attention"] * 36, max_window_layers=28,
        mlp_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
        num_attention_heads=16, num_hidden_layers=36, num_key_value_heads=4, pretraining_tp=2,
        rms_norm_eps=1e-06, rope_scaling=None, rope_theta=5000000.0, sliding_window=None,
        use_sliding_window=False, vocab_size=128256),
        dict(layer_types=("full", "full", "full", "full_nope"), tie_embeddings=True)),
    "gemma-2-2b": (dict(
        model_type="gemma2", attention_bias=False, attn_logit_softcapping=50.0,
        cache_implementation="hybrid", final_logit_softcapping=30.0, head_dim=256,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", hidden_size=2304,
        intermediate_size=9216, num_attention_heads=8, num_hidden_layers=26,
        num_key_value_heads=4, query_pre_attn_scalar=256, rms_norm_eps=1e-06, rope_theta=10000.0,
        sliding_window=4096, vocab_size=256000),
        dict(layer_types=("sliding", "full"), attn_softcap=50.0, logit_softcap=30.0,
             sandwich_norm=True, geglu=True, scale_embed=True, tie_embeddings=True)),
    "gemma-3-4b-it": (dict(
        model_type="gemma3", eos_token_id=[1, 106], mm_tokens_per_image=256,
        vision_config=dict(model_type="siglip_vision_model"), text_config=dict(
            model_type="gemma3_text", hidden_size=2560, intermediate_size=10240,
            num_hidden_layers=34, rope_scaling=dict(factor=8.0, rope_type="linear"),
            sliding_window=1024)),
        dict(n_heads=8, n_kv_heads=4, head_dim=256, vocab_size=262208, rope_theta=1e6,
             rope_local_theta=1e4, rope_scaling="linear", sliding_window=1024,
             layer_types=("sliding",) * 5 + ("full",), qk_norm=True)),
}


@pytest.mark.parametrize("name", HUB)
def test_config_json_of_hub_models(name):
    """Missing keys get the defaults of transformers; written again, the fields are the same.

    Break: model.py: float(hf["rope_theta"]) => 1e4
    """
    hf, fields = HUB[name]
    got = model.hf_fields(hf)
    assert got | fields == got
    assert got["rope_theta"] == (fields | hf).get("rope_theta", 1e4)
    cfg = config.Config(**got, seq_len=64)
    config.validate(cfg, None, {}, config.text_errors)
    written = json.loads(json.dumps(model.hf_config(cfg)))
    assert model.hf_fields(written) == got
    is_long = got["rope_factor"] == 8 and got.get("rope_scaling") != "linear"
    assert written["max_position_embeddings"] == (2**16 if is_long else 64)


REFUSED = {
    "gpt2": (dict(model_type="gpt2"), ["model_type 'gpt2': must be llama, mistral"]),
    "gpt-oss": (dict(model_type="gpt_oss"), [
        "model_type 'gpt_oss': has attention sinks, which this model lacks; must be llama"]),
    "all at once": (
        dict(hidden_act="gelu", partial_rotary_factor=0.5, mlp_bias=True, attention_bias=True,
             rope_scaling=dict(type="dynamic", factor=4.0), quantization_config=dict(bits=4)),
        ["hidden_act 'gelu': must be one of ['silu', 'swish', None]", "rope_type 'dynamic'",
         "partial_rotary_factor 0.5", "quantization_config", "mlp_bias True",
         "attention_bias True"]),
    "scaled queries": (dict(rope_scaling=YARN | dict(llama_4_scaling_beta=0.1)),
                       ["llama_4_scaling_beta 0.1"]),
    "yarn with other bounds": (dict(rope_scaling=YARN | dict(beta_fast=64, truncate=False)),
                               ["beta_fast 64", "truncate False"]),
    "llama3 with other bounds": (dict(rope_scaling=LLAMA3 | dict(high_freq_factor=8.0)),
                               ["high_freq_factor 8.0"]),
    "layer types": (
        dict(model_type="qwen3", use_sliding_window=True, sliding_window=8,
             layer_types=["full_attention", "chunked_attention"]),
        ["layer_types ['full_attention', 'chunked_attention']: must be full_attention or "
         "sliding_attention for each of 2 layers"]),
    "layer types of other layers": (
        dict(model_type="gemma2", layer_types=["full_attention"]), ["for each of 2 layers"]),
    "rotation of other layers": (
        dict(model_type="smollm3", no_rope_layers=[1]), ["no_rope_layers [1]: must have 2"]),
    "a window that is off": (
        dict(model_type="smollm3", use_sliding_window=False, sliding_window=5),
        ["sliding_window 5: must be one of [None]"]),
    "yarn without a factor": (dict(rope_scaling=YARN | dict(factor=None)), ["factor: is missing"]),
    "yarn that scales nothing": (dict(rope_scaling=YARN | dict(factor=1.0)),
                                 ["factor 1.0: must be above 1 under yarn"]),
    "weights of a text part in 8 bits": (
        dict(quantization_config=dict(bits=8), text_config=SIZES | dict(model_type="llama")),
        ["quantization_config"]),
    "scaled layers with a window": (
        dict(model_type="olmo3", sliding_window=8, rope_parameters=dict(
            full_attention=YARN, sliding_attention=dict(type="linear", factor=4.0))),
        ["rope_parameters of sliding_attention"]),
    "biases of experts": (dict(model_type="seed_oss", mlp_bias=True), ["mlp_bias True"]),
    "experts": (dict(model_type="qwen3_moe", num_experts=4, moe_intermediate_size=8),
                ["norm_topk_prob False"]),
    "missing": (dict(model_type="mixtral", rope_scaling={"rope_type": "llama3"}),
                ["factor: is missing", "original_max_position_embeddings: is missing"]),
    "attends in both directions": (dict(is_causal=False), ["is_causal False"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_config_json_is_refused(name):
    """One error lists every value that changes the forward pass and that no field can express.

    Break: model.py: if value is not None and legal is not None and value not in legal: => if False:
    """
    changes, words = REFUSED[name]
    with pytest.raises(ValueError) as error:
        model.hf_fields(dict(model_type="llama", num_experts_per_tok=2, rope_theta=1e4)
                        | SIZES | changes)
    assert all(word in str(error.value) for word in words), error.value


def test_sliding_windows_are_read():
    """A window is 0 if no layer uses it: if use_sliding_window is off, and in families without one.
    The kinds of the layers are the shortest period; none where all layers are alike.

    Break: model.py: n_full = hf.get("max_window_layers", 28) if => n_full = 0 if
    """
    hf = SIZES | dict(model_type="qwen2", use_sliding_window=True, sliding_window=8, rope_theta=1e4)
    for changes, window in ((dict(max_window_layers=0), 8), (dict(use_sliding_window=False), 0),
                            (dict(layer_types=["sliding_attention"] * 2), 8),
                            (dict(layer_types=["full_attention"] * 2), 0),
                            (dict(max_window_layers=2), 0), (dict(max_window_layers=28), 0),
                            (dict(model_type="olmo2"), 0), (dict(model_type="mistral"), 8),
                            (dict(model_type="mistral", use_sliding_window=False), 8),
                            (dict(model_type="phi3", layer_types=["full_attention"] * 2), 8)):
        fields = model.hf_fields(hf | changes)
        assert (fields["sliding_window"], fields["layer_types"]) == (window, ())
    for changes, kinds in (
            (dict(max_window_layers=1), "full sliding"),
            (dict(model_type="mistral", max_window_layers=0,
                  layer_types=["full_attention", "sliding_attention"]), "full sliding"),
            (dict(model_type="olmo3"), "sliding sliding sliding full"),
            (dict(model_type="gemma2"), "sliding full"),
            (dict(model_type="gemma3_text"), "sliding sliding sliding sliding sliding full"),
            (dict(model_type="gemma3_text", sliding_window_pattern=2), "sliding full"),
            (dict(model_type="smollm3", use_sliding_window=False, sliding_window=None),
             "full full full full_nope"),
            (dict(model_type="smollm3", use_sliding_window=False, sliding_window=None,
                  no_rope_layers=[0] * 12), "full_nope")):
        n_layers = 2 if "max_window_layers" in changes else 12
        fields = model.hf_fields(hf | dict(num_hidden_layers=n_layers) | changes)
        assert " ".join(fields["layer_types"]) == kinds


@pytest.mark.parametrize("change, words", [
    (dict(post_norm=True, attn_softcap=9.0), "attn_softcap with post_norm with qk_norm"),
    (dict(layer_types=("sliding_nope",), sliding_window=8, qk_norm=False), "nope with sliding"),
    (dict(post_norm=True, sliding_window=8, rope_factor=2.0), "set rope_local_theta"),
])
def test_no_family_has_this(change, words):
    """An export that transformers would compute differently is refused.

    Break: model.py: if form == its_form and used <= options] => if form == its_form]
    """
    with pytest.raises(ValueError, match=words):
        model.hf_config(config.derive_text(config.Config(**change)))


def test_the_text_part_of_a_model_of_text_and_vision(tmp_path, capsys):
    """Its config and weights are taken from the parts for text, by the names of transformers 5 and
    of 4, and a line says so.

    Break: model.py: | hf["text_config"] => | {}
    """
    torch, transformers = torch_and_transformers()
    changes = MODELS["gemma3"][1]
    vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                  image_size=28, patch_size=14)
    whole = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
        text_config=SIZES | changes, vision_config=vision, mm_tokens_per_image=4)).eval()
    with torch.no_grad():
        for x in whole.parameters():
            x.normal_(0, 0.3)
    whole.save_pretrained(tmp_path / "5")
    shutil.copytree(tmp_path / "5", tmp_path / "4")
    (tmp_path / "4/model.safetensors").unlink()
    old_names = {re.sub(r"^model\.language_model\.", "language_model.model.", name): x
                 for name, x in read_files(tmp_path / "5").items()}
    stored(tmp_path / "old", {"model.safetensors": old_names})
    shutil.copy(tmp_path / "old/model.safetensors", tmp_path / "4")
    for folder in ("5", "4"):
        cfg = train.config_from_hf(config.Config(
            init_from=(str(tmp_path / folder),), seq_len=64, dtype="float32", attention="xla",
            tokenizer="bytes"))
        assert "gemma3 has more than text: its text part is taken" in capsys.readouterr().out
        cfg = config.derive_text(cfg)
        params = read_params(tmp_path / folder, cfg, make_mesh(None))
        assert_close(jax_logits(params, cfg, make_mesh(None)), hf_logits(whole))


@pytest.mark.parametrize("family", model.HF_FAMILIES)
def test_entries_that_a_config_json_lacks(family):
    """They have the defaults of transformers.

    Break: model.py: "mistral": {"num_key_value_heads": 8, "sliding_window": 4096}, =>
    "mistral": {},
    """
    _, transformers = torch_and_transformers()
    hf = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=32, intermediate_size=24,
              vocab_size=40)
    if family.startswith("qwen"):
        hf |= dict(use_sliding_window=True, max_window_layers=0)
    if family == "qwen3_moe":
        hf["norm_topk_prob"] = True
    whole = transformers.AutoConfig.for_model(family, **hf).to_dict()
    fields = model.hf_fields(whole)
    assert model.hf_fields({"model_type": family} | hf) == fields
    assert fields["n_kv_heads"] == whole["num_key_value_heads"]
    for name in whole:  # and each alone
        if name not in hf and name not in ("model_type", "rope_parameters"):
            rest = {other: x for other, x in whole.items() if other != name}
            assert model.hf_fields(rest) == fields, name


# ---- safetensors

def stored(folder, files):
    """Write {file: {tensor: array}} to a folder with the library safetensors."""
    from safetensors.numpy import save_file
    folder.mkdir()
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    return folder


def stack(dtype=np.float32):
    """({tensor: array}, pieces, like) of a matrix, and of 2 x 3 that are stacked and transposed."""
    rng = np.random.default_rng(0)
    tensors = {f"{i}.{e}.w": rng.normal(size=(5, 7)).astype(dtype)
               for i in range(2) for e in range(3)} | {"e": rng.normal(size=(11, 4)).astype(dtype)}
    pieces = {"w": ({(i, e): f"{i}.{e}.w" for i in range(2) for e in range(3)}, True),
              "e": ({(): "e"}, False)}
    like = {"w": jax.ShapeDtypeStruct((2, 3, 7, 5), np.float32),
            "e": jax.ShapeDtypeStruct((11, 4), np.float32)}
    return tensors, pieces, like


def two_files(tensors):
    names = sorted(tensors)
    return {f"model-0000{i + 1}-of-00002.safetensors": {n: tensors[n] for n in part}
            for i, part in enumerate((names[:4], names[4:]))}


def stacked(tensors):
    """The matrices of `stack` as the array that they become."""
    rows = [[tensors[f"{i}.{e}.w"].T for e in range(3)] for i in range(2)]
    return np.stack(rows).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_become_stacked_arrays(dtype, tmp_path):
    """Without a sharding they are NumPy arrays of the requested dtype, from one file or several.

    Break: ckpt.py: target = block[position].T if => target = block[0, 0].T if
    """
    tensors, pieces, like = stack(dtype)
    for files in ({"model.safetensors": tensors}, two_files(tensors)):
        folder = stored(tmp_path / str(len(files)), files)
        got = ckpt.read_tensors(ckpt.open_tensors(folder), pieces, like)
        assert got["w"].dtype == got["e"].dtype == np.float32
        assert (got["w"] == stacked(tensors)).all()
        assert (got["e"] == tensors["e"].astype(np.float32)).all()


@pytest.mark.parametrize("strip_bytes", [1, 60, 2**22])
@pytest.mark.parametrize("spec, sizes", [
    ((None, None, "a", "b"), (1, 5)), (("a", None, None, "b"), (2, 2)),
    ((None, "b", None, None), (2, 3))])
def test_shards_hold_the_right_slices(spec, sizes, strip_bytes, tmp_path, monkeypatch):
    """With any sharding and any size of the strips; the array can be donated.

    Break: ckpt.py: source[start:start + n_rows])) => source[:n_rows]))
    """
    monkeypatch.setattr(ckpt, "STRIP_BYTES", strip_bytes)
    tensors, pieces, _ = stack(ml_dtypes.bfloat16)
    tensors = {k: np.ascontiguousarray(np.tile(x, (2, 1))) for k, x in tensors.items()}
    mesh = jax.make_mesh(sizes, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2,
                         devices=jax.devices()[: sizes[0] * sizes[1]])
    sharding = jax.sharding.NamedSharding(mesh, jax.P(*spec))
    replicated = jax.sharding.NamedSharding(mesh, jax.P())
    like = {"w": jax.ShapeDtypeStruct((2, 3, 7, 10), np.float32, sharding=sharding),
            "e": jax.ShapeDtypeStruct((22, 4), np.float32, sharding=replicated)}
    folder = stored(tmp_path / "hf", {"model.safetensors": tensors})
    got = ckpt.read_tensors(ckpt.open_tensors(folder), pieces, like)
    assert got["w"].sharding.is_equivalent_to(sharding, 4)
    assert (np.asarray(got["w"]) == stacked(tensors)).all()
    assert (np.asarray(got["e"]) == tensors["e"].astype(np.float32)).all()
    [(name, narrow)] = ckpt.each_tensor({"e": got["e"]}, pieces, "bfloat16")
    assert name == "e" and narrow.dtype == "bfloat16" and (narrow == tensors["e"]).all()
    doubled = jax.jit(lambda x: 2 * x, donate_argnums=0)(got["w"])
    assert (np.asarray(doubled) == 2 * stacked(tensors)).all()


def test_all_errors_of_tensors_are_listed(tmp_path):
    """Missing and unknown tensors and other shapes; those that match `unused` are permitted.

    Break: ckpt.py: errors.append(f"{name} is missing") => pass
    """
    tensors, pieces, like = stack()
    del tensors["0.1.w"], tensors["1.2.w"]
    tensors |= {"1.1.w": np.zeros((7, 5), np.float32), "x.inv_freq": np.zeros(3, np.float32),
                "x.3.strange": np.zeros(3, np.float32), "x.4.strange": np.zeros(3, np.float32)}
    folder = stored(tmp_path / "hf", {"model.safetensors": tensors})
    with pytest.raises(ValueError) as error:
        ckpt.read_tensors(ckpt.open_tensors(folder), pieces, like, (".inv_freq",))
    assert str(error.value).split("\n  ")[1:] == [
        "0.*.w is missing", "1.*.w is (7, 5) in the checkpoint, (5, 7) in this model",
        "1.*.w is missing", "x.*.strange is not a tensor of this model"]


BAD_FILES = {
    "truncated": lambda x: x[:-8],
    "empty": lambda x: b"",
    "header of 2**62 bytes": lambda x: struct.pack("<Q", 2**62) + x[8:],
    "invalid JSON": lambda x: x[:8] + b"x" * 30 + x[38:],
    "offsets": lambda x: x.replace(b'"data_offsets":[0', b'"data_offsets":[4'),
    "a list": lambda x: struct.pack("<Q", 2) + b"[]" + x,
    "no offsets": lambda x: x.replace(b'"data_offsets"', b'"data_offset_"'),
    "a type": lambda x: x.replace(b'"dtype":"F32"', b'"dtype":"I64"'),
}


def test_invalid_safetensors_files_are_named(tmp_path):
    """Truncated, with an invalid header, or with a tensor that another file has; none is named too.

    Break: ckpt.py: with _explain(f"{path}: cannot be read as safetensors", KeyError, TypeError, =>
    with _explain("", KeyError, TypeError,
    """
    folder = stored(tmp_path / "hf", two_files(stack()[0]))
    first, second = sorted(folder.glob("*.safetensors"))
    content = second.read_bytes()
    for change in BAD_FILES.values():
        second.write_bytes(change(bytearray(content)))
        with pytest.raises(ValueError, match=f"{second.name}: cannot be read as safetensors: "):
            ckpt.open_tensors(folder)
    second.write_bytes(content)
    shutil.copy(first, folder / "model-00001-of-00003.safetensors")
    with pytest.raises(ValueError, match="00001-of-00003.safetensors: .* another file .* 0.0.w"):
        ckpt.open_tensors(folder)
    with pytest.raises(ValueError, match="no model.safetensors; convert its .bin file"):
        ckpt.open_tensors(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_written_file_is_read_by_the_library(dtype, tmp_path):
    """Names, values, dtype, alignment, and the metadata that transformers needs.

    Break: ckpt.py: header = {"__metadata__": {"format": "pt"}} => header = {}
    """
    from safetensors import safe_open
    tensors, pieces, _ = stack()
    params = {"w": stacked(tensors), "e": tensors["e"].T.copy().T}
    write(tmp_path / "model.safetensors", params, pieces, dtype)
    found = read_files(tmp_path)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert found[name].dtype == dtype and (found[name] == x.astype(dtype)).all()
    assert safe_open(tmp_path / "model.safetensors", "np").metadata() == {"format": "pt"}
    header = (tmp_path / "model.safetensors").read_bytes()[:8]
    assert int.from_bytes(header, "little") % 8 == 0


def test_values_beyond_float16_are_refused_by_name(tmp_path):
    """The error names the tensor and leaves the previous export; the largest value is written.

    Break: ckpt.py: if dtype == "float16" and np.isinf(x).any(): => if False:
    """
    folder, run = tmp_path / "hf", {"out_dir": "run"}

    def export(value):
        arrays = {"w": np.array([[1, value]], np.float32)}
        pieces = {"w": ({(0,): "a.weight"}, False)}
        ckpt.write_export(folder, run, arrays, pieces, "float16", lambda folder: None)

    export(65504)
    for value in (65520, -1e5, np.inf):
        with pytest.raises(ValueError, match="export .*hf: .*a.weight has values beyond 65504"):
            export(value)
    assert read_files(folder)["a.weight"].tolist() == [1, 65504]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# ---- through train.py

def run_config(tiny, tmp_path, **changes):
    """Return a config with token ids below 40; the source of the weights sets the model."""
    np.save(tmp_path / "ids.npy", TOKENS.ravel().repeat(9).astype(np.uint16))
    default = config.Config()
    fields = {name: getattr(default, name) for name in ("d_model", "n_layers", "n_heads",
                                                         "n_kv_heads")}
    return tiny(**dict(data=(str(tmp_path / "ids.npy"),), steps=3, eval_every=0, fsdp=-1, dp=1,
                       dtype="float32", lr=0.01) | fields | changes)


@pytest.mark.slow
def test_a_run_tunes_and_exports_a_hugging_face_model(tiny, tmp_path, capsys):
    """--init_from sets fields and parameters; transformers loads both exports and the tokenizer.

    Break: train.py: cfg = dataclasses.replace(cfg, **fields) => pass
    """
    torch, transformers = torch_and_transformers()
    make_hf_model("qwen3", tmp_path / "hf")
    save_folder(tmp_path / "hf", model_max_length=77)
    began = []
    cfg = run_config(tiny, tmp_path, init_from=(str(tmp_path / "hf"),), export_every=2,
                     export=str(tmp_path / "exported"), tokenizer=str(tmp_path / "hf"),
                     sample_tokens=0, vocab_size=40)
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "model": {
            "type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "</s>"}}))
    summary = train.main(cfg, hooks=[lambda event, value: began.append(jax.device_get(
        value["params"])) if event == "load" else None])
    assert "exported to" in capsys.readouterr().out
    plain = read_config(tmp_path / "hf")
    first = read_params(tmp_path / "hf", plain, make_mesh(None))
    assert all((began[0][name] == first[name]).all() for name in first)
    params = jax.device_get(summary["state"]["params"])
    assert not (params["embed"] == first["embed"]).all()
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert_close(jax_logits(params, plain, make_mesh(None)), hf_logits(back))
    assert back.config.max_position_embeddings == SIZES["max_position_embeddings"]
    settings = json.loads((tmp_path / "exported/tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 77
    half = dataclasses.replace(cfg, mode="export", export_dtype="bfloat16")
    assert train.main(half)["exit_code"] == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    assert back.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"hf: exists, and no export of this run wrote it"):
        train.main(dataclasses.replace(half, export=str(tmp_path / "hf")))
    (tmp_path / "exported/sixfile.json").write_text('{"out_dir": "another"}')
    with pytest.raises(ValueError, match=r"exported: exists, and no export of this run wrote it"):
        train.main(half)
    with pytest.raises(ValueError, match=r"export .*: could not be written: "):
        train.main(dataclasses.replace(half, export=str(tmp_path / "ids.npy/within")))


@pytest.fixture
def llama_folder(tmp_path):
    """A folder with a config.json of Llama, and without its weights."""
    (tmp_path / "hf").mkdir()
    hf = SIZES | dict(model_type="llama", rms_norm_eps=1e-5)
    (tmp_path / "hf/config.json").write_text(json.dumps(hf))
    return tmp_path / "hf"


def test_a_run_uses_the_tokenizer_of_init_from(tiny, tmp_path, llama_folder):
    """A folder with a tokenizer.json sets --tokenizer unless this flag is given.

    Break: train.py: has_tokenizer = Path(data.hub_path(path), "tokenizer.json").is_file() =>
    has_tokenizer = False
    """
    def chosen(**changes):
        cfg = run_config(tiny, tmp_path, init_from=(str(llama_folder),), **changes)
        return train.setup_run(cfg).cfg.tokenizer

    assert chosen() == "bytes"
    (llama_folder / "tokenizer.json").write_text("{}")
    assert chosen() == str(llama_folder)
    assert chosen(tokenizer="another") == "another"


@pytest.mark.parametrize("family", model.HF_FAMILIES)
def test_an_export_encodes_as_the_run_did(family, tmp_path):
    """transformers gives the ids of the run for the tokenizer of an export, of each model_type. For
    the byte tokenizer an export has none. Where transformers cannot, the export is refused.

    Break: data.py: settings["tokenizer_class"] = "PreTrainedTokenizerFast" => pass
    """
    _, transformers = torch_and_transformers()
    text = "Numbers 1222, low  lowest\n\tlow\u00e9 and 2024"
    for make, tokenizer_class in ((make_bpe, "GPT2Tokenizer"), (make_bpe, "Qwen2Tokenizer"),
                                  (make_bpe, ""), (make_metaspace, "LlamaTokenizer"),
                                  (make_metaspace, "of code")):
        folder = tmp_path / f"{make.__name__} {tokenizer_class}"
        settings = {"tokenizer_class": tokenizer_class}
        if tokenizer_class == "of code":
            settings["auto_map"] = {"AutoTokenizer": ["a.A", None]}
        save_folder(folder, None, make(), **settings)
        name = str(folder if tokenizer_class else folder / "tokenizer.json")
        export = Path(f"{folder} export")
        export.mkdir()
        (export / "config.json").write_text(json.dumps({"model_type": family}))
        if family == "qwen2" and tokenizer_class != "Qwen2Tokenizer":
            with pytest.raises(ValueError, match="reads it as Qwen2Tokenizer beside this config"):
                data.copy_tokenizer(name, export)
            continue
        data.copy_tokenizer(name, export)
        loaded = transformers.AutoTokenizer.from_pretrained(export)
        tokenizer = data.make_tokenizer(name)
        assert loaded.encode(text, add_special_tokens=False) == tokenizer["encode"](text).tolist()
        assert sorted(path.name for path in export.iterdir()) == [
            "config.json", "tokenizer.json", "tokenizer_config.json"]
    data.copy_tokenizer("bytes", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_lora_is_exported_merged(tiny, tmp_path):
    """Merged weights have the logits of the model with LoRA in transformers.

    Break: model.py: merged[name] = w + product =>
    merged[name] = (w + product).astype(params[name].dtype)
    """
    _, transformers = torch_and_transformers()
    cfg = tiny(lora_rank=2, lora_alpha=3.0, dtype="float32", qk_norm=False,
               export=str(tmp_path / "merged"))
    cfg = train.setup_run(cfg).cfg
    params = draw(cfg)
    train.export_hf(params, cfg)
    cfg = dataclasses.replace(cfg, seq_len=64)
    logits = jax_logits(params, cfg, make_mesh(None))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(logits, hf_logits(merged))
    base = {name: x * (not name.endswith(".lora_b")) for name, x in params.items()}
    assert np.abs(jax_logits(base, cfg, make_mesh(None)) - logits).max() > 0.01
    # Weights in bfloat16 would round away what LoRA adds.
    half = {name: x.astype(ml_dtypes.bfloat16) for name, x in params.items()}
    w, a, b = (np.float64(half[f"layers.wq{end}"]) for end in ("", ".lora_a", ".lora_b"))
    np.testing.assert_allclose(model.merge_lora(half, cfg)["layers.wq"], w + 1.5 * a @ b, rtol=1e-5)


def import_peft():
    torch_and_transformers()
    return pytest.importorskip("peft", reason="PEFT is not installed")


def read_adapted(cfg, folder):
    """The logits of the base with the adapter in a folder, read as a run does, and the config."""
    sources = (f"{folder}/hf", f"{folder}/adapter")
    cfg = dataclasses.replace(
        cfg, mode="eval", seq_len=24, init_from=sources, out_dir=f"{folder}/read")
    run, _, params = train.load_run(cfg)
    return jax_logits(jax.device_get(params), run.cfg, make_mesh(None)), run.cfg


def assert_logits_of(tuned, logits):
    """The logits are those of PEFT, with products in float64. The adapter has an effect."""
    exact = tuned  # float32 errs by up to 1e-5 itself, but experts have no product in float64
    if not hasattr(tuned.config, "num_local_experts"):
        exact = copy.deepcopy(tuned).double()
    expected = hf_logits(exact)
    with exact.disable_adapter():
        without = hf_logits(exact)
    largest = np.abs(expected).max()
    assert np.abs(logits - expected).max() <= 1e-5 * largest < np.abs(logits - without).max() / 1e4


@pytest.mark.parametrize("name", ["llama scaled", "qwen2 window", "qwen3"])
def test_an_exported_adapter_has_the_same_logits_in_peft(name, tiny, tmp_path):
    """PEFT loads it onto the base of the run. A run that reads both has the same parameters.

    Break: tests/recipes/adapter.py: "lora_alpha": cfg.lora_alpha, => "lora_alpha": 16.0,
    """
    peft = import_peft()
    base = make_hf_model(name, tmp_path / "hf")
    cfg = run_config(tiny, tmp_path, init_from=(str(tmp_path / "hf"),), lora_rank=4, lora_alpha=8.0,
                     lora_targets=("layers.w[qo]", "*_*"), export=str(tmp_path / "adapter"))
    resolved = train.setup_run(cfg, adapter.TASK).cfg
    params = draw(resolved)
    adapter.export_adapter(params, resolved)
    logits, found = read_adapted(run_config(tiny, tmp_path), tmp_path)
    assert (found.lora_rank, found.lora_alpha) == (4, 8.0)
    assert found.lora_targets == tuple(f"layers.w{x}" for x in ("q", "o", "_gate", "_up", "_down"))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert_logits_of(loaded, logits)


ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(base, folder, **settings):
    """Save an adapter made by PEFT, with random factors; return the model that has it."""
    peft = import_peft()
    torch, _ = torch_and_transformers()
    defaults = dict(r=4, lora_alpha=8, target_modules=ALL_MODULES, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(base, peft.LoraConfig(**defaults | settings))
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, x in tuned.named_parameters():
            if "lora_" in key:
                x.normal_(0, 0.3, generator=rng)
    tuned.eval().save_pretrained(folder)
    return tuned


@pytest.mark.parametrize("name, settings", [
    ("llama", dict()),
    ("qwen3", dict(use_rslora=True, lora_dropout=0.1, init_lora_weights="gaussian")),
    ("qwen2 window", dict(target_modules=r".*\.(k_proj|down_proj)", r=3, lora_alpha=5)),
    ("mixtral", dict(target_modules=["q_proj", "o_proj"], exclude_modules=r".*o_proj"))])
def test_an_adapter_of_peft_has_the_same_logits(name, settings, tiny, tmp_path):
    """A run that begins with it has the logits of PEFT, and the rank, scale and targets.

    Break: model.py: alpha *= rank**0.5 => pass
    """
    tuned = make_adapter(make_hf_model(name, tmp_path / "hf"), tmp_path / "adapter", **settings)
    shutil.copy(tmp_path / "hf/config.json", tmp_path / "adapter")  # as some trainers do
    cfg = run_config(tiny, tmp_path)
    logits, _ = read_adapted(cfg, tmp_path)
    assert_logits_of(tuned, logits)


@pytest.mark.parametrize("settings, words", [
    (dict(rank_pattern={"q_proj": 2}), "rank_pattern {'q_proj': 2}: must be one of [None"),
    (dict(alpha_pattern={"q_proj": 2}), "alpha_pattern {"),
    (dict(use_dora=True), "use_dora True: "),
    (dict(bias="lora_only"), "bias 'lora_only': "),
    (dict(lora_bias=True), "lora_bias True: "),
    (dict(modules_to_save=["lm_head"]), "modules_to_save ['lm_head']: "),
    (dict(layers_to_transform=[0]), "layers_to_transform [0]: "),
    (dict(trainable_token_indices=[1]), "trainable_token_indices [1]: "),
    (dict(init_lora_weights="pissa"), "init_lora_weights 'pissa': must be one of [True, False"),
    (dict(target_modules=["q_proj", "lm_head"]),
     "base_model.model.lm_head.lora_A.weight is not a tensor of this model"),
    ("granite", "its base are changed when they are read; merge the adapter by PEFT's merge_and")])
def test_an_adapter_that_a_run_cannot_express_is_refused(settings, words, tiny, tmp_path):
    """By the name of the setting, of the tensor, or of the base.

    Break: model.py: if name not in PEFT_SETTINGS and value not in legal: => if False:
    """
    base, settings = ("qwen3", settings) if settings != "granite" else (settings, {})
    make_adapter(make_hf_model(base, tmp_path / "hf"), tmp_path / "adapter", **settings)
    with pytest.raises(ValueError, match=re.escape(words)):
        read_adapted(run_config(tiny, tmp_path), tmp_path)


def test_an_adapter_has_one_base_that_it_fits(tiny, tmp_path, llama_folder):
    """A second adapter is refused, and a run that began with weights that are changed when read.

    Break: train.py: return all(source_fits_adapters(text) for text in saved.get( =>
    return all(True for text in saved.get(
    """
    make_adapter(make_hf_model("qwen3", tmp_path / "hf"), tmp_path / "adapter")
    shutil.copytree(tmp_path / "adapter", tmp_path / "second")
    cfg = read_config(tmp_path / "hf", lora_rank=4)
    sources = [str(tmp_path / name) for name in ("hf", "adapter", "second")]
    with pytest.raises(ValueError, match="there is another adapter; merge one of them by PEFT's"):
        train.open_adapter(sources[1], dataclasses.replace(cfg, init_from=tuple(sources)))
    hf = json.loads((llama_folder / "config.json").read_text())
    (llama_folder / "config.json").write_text(json.dumps(hf | {"model_type": "granite"}))
    (tmp_path / "run").mkdir()
    began = config.to_json(dataclasses.replace(cfg, init_from=(str(llama_folder),)))
    (tmp_path / "run/config.json").write_text(began)
    sources = (str(tmp_path / "run"), str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match="the weights of its base are changed"):
        train.open_adapter(sources[1], dataclasses.replace(cfg, init_from=sources))


@pytest.mark.slow
def test_a_run_continues_an_adapter(tiny, tmp_path):
    """It trains the factors alone and resumes bit-identically. An export merges an adapter as PEFT
    does. Flags that contradict it are refused, and so is an adapter without its base.

    Break: train.py: return {"names": dict.fromkeys(pieces), "read": partial( =>
    return {"names": {}, "read": partial(
    """
    tuned = make_adapter(make_hf_model("qwen3", tmp_path / "hf"), tmp_path / "adapter")
    make = partial(run_config, tiny, tmp_path,
                   init_from=(str(tmp_path / "hf"), str(tmp_path / "adapter")), fsdp=1)
    began = []
    summary = train.main(make(), hooks=[lambda event, value: began.append(
        jax.device_get(value["params"])) if event == "load" else None])
    params = jax.device_get(summary["state"]["params"])
    moved = {name for name in params if (params[name] != began[0][name]).any()}
    assert moved == {name for name in params if ".lora_" in name} and len(moved) == 14

    half = make(steps=2, out_dir=str(tmp_path / "half"))
    train.main(half)
    resumed = train.main(config.parse(["--out_dir", half.out_dir, "--steps", "3"]))
    assert all((resumed["state"]["params"][name] == x).all() for name, x in params.items())

    # A mode reads it too, without a run.
    merged = make(mode="export", export=str(tmp_path / "merged"), out_dir=str(tmp_path / "none"))
    assert train.main(merged)["exit_code"] == 0
    expected = tuned.merge_and_unload().state_dict()
    for name, x in read_files(tmp_path / "merged").items():
        np.testing.assert_allclose(x, expected[name].numpy(), atol=1e-6)

    for flags, words in (
            (dict(lora_rank=8), "lora_rank 8: is 4 in that folder; leave it out"),
            (dict(lora_alpha=4.0), "lora_alpha 4.0: is 8.0 in that folder"),
            (dict(init_from=(str(tmp_path / "adapter"),)), "no source has embed, final_norm")):
        with pytest.raises(ValueError, match=words):
            train.main(make(out_dir=str(tmp_path / "none"), **flags))


def test_runs_that_an_adapter_cannot_express_are_refused(tiny, tmp_path, llama_folder):
    """Before training: without LoRA, with other trained parameters, experts, and a base whose
    weights are not this model's.

    Break: tests/recipes/adapter.py: others = sorted(table.keys() - frozen - factors) => others = []
    """
    def refused(words, **changes):
        cfg = tiny(export=str(tmp_path / "adapter"), **changes)
        with pytest.raises(ValueError, match=words):
            train.setup_run(cfg, adapter.TASK)

    refused("lora_rank 0: the run has no LoRA factors; export the merged weights by")
    refused("the run trains embed, final_norm too;", lora_rank=2, freeze=("!embed", "!final_norm"))
    refused("PEFT has no adapter of experts, as in layers.w_down.lora_a, layers.w_down.lora_b, ",
            lora_rank=2, n_experts=4)
    hf = json.loads((llama_folder / "config.json").read_text())
    (llama_folder / "config.json").write_text(json.dumps(hf | {"model_type": "granite"}))
    shape = {name: getattr(config.Config, name) for name in ("d_model", "n_layers", "n_heads",
                                                             "n_kv_heads")}
    refused("its weights are changed or split when they are read", lora_rank=2,
            init_from=(str(llama_folder),), **shape)


@pytest.mark.slow
@pytest.mark.parametrize("family, kinds", [
    (family, kinds) for family, found in model.HF_PROBES.items() for kinds in found])
def test_the_numbers_of_probes_are_those_of_transformers(family, kinds, tmp_path):
    """To five digits, and the forward pass gives them, for every form that can be exported.

    Break: model.py: "sliding": 7.68416 => "sliding": 7.67416
    """
    torch, transformers = torch_and_transformers()
    form = {name: name in model.HF_FAMILIES[family][0] for name in model.HF_FORM}
    form |= {"n_experts": 8 * form["n_experts"], "sliding_window": 99 * ("sliding" in kinds)}
    if kinds not in ("full", "sliding"):
        form["layer_types"] = tuple(kinds.split())
    if family == "ministral3":
        form["rope_query_beta"] = 7.0
    if family in ("olmo3", "gemma3_text") and "sliding" in kinds:
        form["rope_local_theta"] = 7.0
    if family == "mistral":  # without a window it has heads that do not divide the width
        form |= {"d_model": 18, "n_heads": 4, "head_dim": 8}
    cfg = config.derive_text(config.Config(**form, vocab_size=300))
    number = 0.0
    # In float32, "sliding" of olmo3 and qwen3 differs from CPU to CPU in the fourth digit.
    dtype = torch.float32 if cfg.n_experts else torch.float64  # experts have no product in float64
    for tiny, params, tokens in model.probe_models(cfg):
        write(tmp_path / "model.safetensors", model.to_hf(params, tiny), model.hf_pieces(tiny))
        settings = model.hf_config(tiny) | {"model_type": family, "architectures": None}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        hf_model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=dtype, attn_implementation="eager")
        with torch.no_grad():
            logits = hf_model(torch.tensor(np.array(tokens))).logits.numpy()
        number += np.vdot(logits, np.cos(np.arange(logits.size)))
    assert model._hf_family(cfg) == hf_model.config.model_type == family
    assert model.HF_PROBES[family][kinds] == pytest.approx(number, rel=5e-5), (
        f"edit HF_PROBES in model.py: transformers gives {number:.6g} for {family}")
    if kinds == [*model.HF_PROBES[family]][-1]:  # one of each family, since it takes most time
        model.check_hf_forward(cfg)


@pytest.mark.parametrize("name, change, words", [
    ("forward", lambda forward: lambda *args, **more: 50 * jax.numpy.tanh(
        forward(*args, **more) / 50), "not that of qwen3 in transformers: tiny models give"),
    ("_mlp", lambda mlp: lambda *args, **more: 0.9 * mlp(*args, **more), "not that of qwen3"),
    ("param_table", lambda table: lambda cfg: table(cfg) | {"layers.new": table(cfg)["layers.wo"]},
     "parameter layers.new: has no name in HF_NAMES"),
])
def test_an_export_of_a_changed_model_is_refused(name, change, words, tiny, tmp_path, monkeypatch):
    """Before training: capped logits, another MLP, a new parameter.

    Break: train.py: model.check_hf_forward(cfg) => pass
    """
    monkeypatch.setattr(model, name, change(getattr(model, name)))
    with pytest.raises(ValueError, match=words):
        train.main(tiny(export=str(tmp_path / "hf")))
    assert not (tmp_path / "hf").exists()


def test_generation_stops_at_the_end_of_an_answer(tmp_path):
    """The ids that end a text are those of config, tokenizer and chat template, each once.

    Break: train.py: stops |= data.turn_ends(tokenizer) => pass
    """
    library = chat_folder(tmp_path / "chats")
    path = tmp_path / "chats/generation_config.json"
    path.write_text('{"temperature": 0.6, "eos_token_id": 3}')
    library.eos_token = "<|endoftext|>"  # the end of a document is not that of an answer
    library.save_pretrained(tmp_path / "chats")
    tokenizer = data.make_tokenizer(str(tmp_path / "chats"))
    train.write_generation_config(path, tokenizer)
    ends = [3, *library.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])]
    assert json.loads(path.read_text()) == {"temperature": 0.6, "eos_token_id": sorted(ends)}


@pytest.mark.slow
def test_a_run_loads_some_weights_of_a_hugging_face_model(tiny, tmp_path):
    """All parameters but one come from the folder; the excluded one is initialized.

    Break: ckpt.py: for names, _ in pieces.values(): => for names in (shapes,):
    """
    torch_and_transformers()
    make_hf_model("qwen3", tmp_path / "hf")
    cfg = run_config(tiny, tmp_path, steps=1,
                     init_from=(f"{tmp_path / 'hf'} exclude=layers.wq strict=no",))
    began = []
    train.main(cfg, hooks=[lambda event, value: began.append(jax.device_get(value["params"]))
                           if event == "load" else None])
    first = read_params(tmp_path / "hf", read_config(tmp_path / "hf"), make_mesh(None))
    assert [name for name in first if (began[0][name] != first[name]).any()] == ["layers.wq"]


def test_fields_that_contradict_the_hugging_face_config_are_refused(tiny, tmp_path, llama_folder):
    """Other values than in config.json, an unsupported model_type, and a model of no family.

    Break: train.py: if is_set[name] and getattr(cfg, name) != value] => if False]
    """
    source = str(llama_folder)
    cfg = run_config(tiny, tmp_path, init_from=(source,), n_layers=4, norm_eps=1e-4)
    words = r"n_layers 4: is 2 in that folder(.|\n)*norm_eps 0.0001: is 1e-05"
    with pytest.raises(ValueError, match=words):
        train.main(cfg)
    # A flag counts where it has the default of Config, too.
    cfg = config.parse(["--init_from", source, "--d_model", "128", "--qk_norm"])
    with pytest.raises(ValueError, match=r"qk_norm True: is False in(.|\n)*d_model 128: is \d+ in"):
        train.config_from_hf(cfg)
    for wrong in ({"model_type": ["llama"]}, {"model_type": "llama", "rope_scaling": "linear"}):
        (llama_folder / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=f"init_from {re.escape(source)}: config.json: "):
            train.main(cfg)
    (llama_folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="model_type .gpt2.: must be llama"):
        train.main(cfg)
    with pytest.raises(ValueError, match="no model of Hugging Face has qk_norm with qkv_bias"):
        train.main(tiny(qkv_bias=True, export=str(tmp_path / "out2")))


def tied_folder(folder, change=lambda x: x):
    """Save a small tied model and a changed copy of its embedding as lm_head; return its config."""
    cfg = config.derive_text(config.Config(
        d_model=16, n_layers=1, n_heads=2, d_ff=24, vocab_size=40, tie_embeddings=True))
    params, pieces = draw(cfg), model.hf_pieces(cfg)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.hf_config(cfg)))
    write(folder / "model-1.safetensors", params, pieces)
    copy = change(params["embed"].copy())
    pieces = {"embed": ({(): "lm_head.weight"}, False)}
    write(folder / "model-2.safetensors", {"embed": copy}, pieces)
    return cfg


def read_source(folder, cfg, *names):
    """Read parameters as --init_from does."""
    shapes = like_of(cfg, make_mesh(None))
    return train.open_hf(str(folder), cfg)["read"]({name: shapes[name] for name in names})


def test_an_lm_head_that_differs_from_tied_embeddings_is_refused(tmp_path):
    """It differs in a value or in its shape. An equal copy, none, and one that is untied are fine.

    Break: train.py: if copy is not None and not np.array_equal( =>
    if copy is not None and np.array_equal(
    """
    def change_value(x):
        x[-1, 3] = 8
        return x

    changes = {tmp_path / "value": change_value, tmp_path / "rows": lambda x: x[:-1]}
    for folder, change in changes.items():
        cfg = tied_folder(folder, change)
        with pytest.raises(ValueError, match="but lm_head.weight differs from model.embed_tokens"):
            read_source(folder, cfg, "embed", "final_norm")
    folder = tmp_path / "hf"
    cfg = tied_folder(folder)
    embed = read_files(folder)["model.embed_tokens.weight"]
    assert (np.asarray(read_source(folder, cfg, "embed")["embed"]) == embed).all()
    untied = dataclasses.replace(cfg, tie_embeddings=False)
    assert set(read_source(folder, untied, "embed", "unembed")) == {"embed", "unembed"}
    (folder / "model-2.safetensors").unlink()
    assert (np.asarray(read_source(folder, cfg, "embed")["embed"]) == embed).all()


def test_a_file_in_init_from_is_refused(tiny, tmp_path):
    """--init_from with a weight file, also where it is not read.

    Break: ckpt.py: with _explain(f"{path}: cannot be read"): => with contextlib.suppress(OSError):
    """
    path = f"{tmp_path}/model.safetensors"
    write(path, {"w": np.ones(3)}, {"w": ({(): "w"}, False)})
    with pytest.raises(ValueError, match=f"{path}/config.json: cannot be read: .*Not a directory"):
        train.main(tiny(mode="data", init_from=(f"{path} load=embed",)))


# ---- weights without a run

@pytest.mark.slow
def test_hugging_face_weights_are_evaluated_sampled_and_talked_to(
        tmp_path, cache_dir, monkeypatch, capsys):
    """The loss is PyTorch's; --chat and chat.py print the answer that transformers generates.

    Break: train.py: needed_for = "" if cfg.init_from else f"mode {cfg.mode}" =>
    needed_for = f"mode {cfg.mode}"
    """
    torch, _ = torch_and_transformers()
    import chat
    folder = tmp_path / "hf"
    tokenizer = chat_folder(folder)
    monkeypatch.setitem(SIZES, "vocab_size", len(tokenizer))
    hf_model = make_hf_model("qwen3", folder)
    (tmp_path / "val.txt").write_text("low lower lowest " * 40)
    cfg = config.Config(
        init_from=(str(folder),), out_dir=str(tmp_path / "none"), cache_dir=cache_dir,
        val_data=(str(tmp_path / "val.txt"),), seq_len=16, batch_size=8, eval_batches=0,
        dtype="float32", sample_tokens=12, temperature=0.0, seed=1)

    summary = train.main(dataclasses.replace(cfg, mode="eval"))
    resolved = train.setup_run(cfg).cfg
    val_data = data.open_text(("val",), resolved)["val"][""]
    losses = []
    for i in range(-(-val_data["n"] // 8)):
        batch = val_data["batch"](i, np.arange(8))
        with torch.no_grad():
            logits = hf_model(torch.from_numpy(batch["tokens"]).long()).logits
        labels = torch.from_numpy(batch["labels"]).long()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        losses += loss[labels.flatten() != -100].tolist()
    assert summary["val_n_labels"] == len(losses) > 100
    assert summary["val_loss"] == pytest.approx(np.mean(losses), rel=1e-5)

    question = [{"role": "user", "content": "low?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    new = hf_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12,
                            do_sample=False)[0, ids.shape[1]:].tolist()
    assert len({*new}) > 3 and tokenizer.eos_token_id not in new
    answer = tokenizer.decode(new)
    sampled = train.main(dataclasses.replace(cfg, mode="sample", chat="low?"))
    # A sample does not end within a character.
    assert sampled["texts"] == [prompt + answer.removesuffix("\ufffd")]

    monkeypatch.setattr("sys.stdin", io.StringIO("low?\n"))
    capsys.readouterr()
    assert chat.chat(dataclasses.replace(cfg, mode="sample"))["exit_code"] == 0
    shown = capsys.readouterr().out
    assert f"> {train.printable(answer)} ... (cut after --sample_tokens 12)\n> " in shown
    assert not (tmp_path / "none").exists()
