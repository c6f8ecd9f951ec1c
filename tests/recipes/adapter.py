# SPDX-License-Identifier: Apache-2.0
"""Export the LoRA factors of a run as an adapter of PEFT, which peft, transformers and vLLM load.

    python tests/recipes/adapter.py --out_dir out/lora --export out/adapter
    vllm serve BASE --enable-lora --lora-modules tuned=out/adapter

The flags are those of train.py. With --mode train it trains, and exports where train.py would. The
factors have the dtype of --export_dtype. A run reads an adapter without this file, by
--init_from BASE ADAPTER.
"""
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train
from train import ckpt, config, model

MERGE = "export the merged weights by `python train.py --mode export`"


def export_adapter(params, cfg):
    """Write cfg.export as an adapter, instead of the merged weights of train.export_hf. params:
    None to look for errors only.
    """
    written_by = {"out_dir": os.path.abspath(cfg.out_dir)}
    ckpt.check_export(cfg.export, written_by)
    base = find_base(cfg)
    config.raise_if_errors(errors_of(cfg, base), "export of an adapter")
    pieces = model.hf_pieces(cfg, adapter=True)
    if params is None:
        model.check_hf_forward(cfg)
        return

    def add_files(folder):
        text = json.dumps(adapter_config(cfg, pieces, base), indent=1)
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")

    factors = {name: params[name] for name in pieces}
    ckpt.write_export(cfg.export, written_by, factors, pieces, cfg.export_dtype, add_files,
                      "adapter_model")


def find_base(cfg):
    """The source in init_from that the adapter belongs to, a folder of Hugging Face weights or a
    name on the Hub; "" where another run gives weights.
    """
    paths = [ckpt.parse_source(text)["path"] for text in cfg.init_from]
    bases = [path for path in paths if not train.read_adapter(path)[0]]
    if len(bases) == 1 and train.read_hf_config(bases[0]):
        return bases[0]
    return ""


def errors_of(cfg, base):
    """Errors of a run that an adapter of PEFT cannot express."""
    table = model.param_table(cfg)
    factors = {name for name in table if ".lora_" in name}
    errors = []
    if not factors:
        errors.append(f"lora_rank {cfg.lora_rank}: the run has no LoRA factors; {MERGE}")
    frozen = model.matching("freeze", cfg.freeze, table)
    others = sorted(table.keys() - frozen - factors)
    if factors and others:
        errors.append(f"freeze {cfg.freeze}: the run trains {', '.join(others)} too; {MERGE}")
    experts = sorted(name for name in factors if len(table[name]["shape"]) == 4)
    if experts:
        errors.append(f"lora_targets {cfg.lora_targets}: PEFT has no adapter of experts, as in "
                      f"{', '.join(experts)}; {MERGE}")
    if base and not model.fits_adapters(train.read_hf_config(base)):
        errors.append(f"init_from {base}: its weights are changed or split when they are read, so "
                      f"that an adapter does not fit it; {MERGE}")
    return errors


def adapter_config(cfg, pieces, base):
    """The adapter_config.json of PEFT. pieces: of model.hf_pieces."""
    tensors = [tensor for names, _ in pieces.values() for tensor in names.values()]
    revision = ""
    if base.startswith("hf://"):
        base, _, revision = base.removeprefix("hf://").partition("@")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "revision": revision or None,
        "r": cfg.lora_rank,
        "lora_alpha": cfg.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({tensor.split(".")[-3] for tensor in tensors}),
        "inference_mode": True,
    }


TASK = train.TEXT | {"export": export_adapter}

if __name__ == "__main__":
    sys.exit(train.cli(["--mode", "export", *sys.argv[1:]], task=TASK))
