# SPDX-License-Identifier: Apache-2.0
"""Print losses and digests of short runs at full precision, to compare two versions of the code.

    python tests/golden.py > before.txt
    python tests/golden.py > after.txt
    diff before.txt after.txt

A refactoring changes no line. The numbers depend on the machine and on the version of JAX, so the
project has no file of them.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--d_model 64 --n_layers 2 --n_heads 4 --n_kv_heads 2 --head_dim 16 --d_ff 96 "
         "--vocab_size 256 --seq_len 64 --batch_size 8 --grad_accum_steps 1 --fsdp -1 --steps 6 "
         "--warmup_steps 2")
# {name: (flags, number of fake devices)}
RUNS = {
    "default": ("--steps 60", 1),
    "debug": ("--config debug --steps 20", 1),
    "gpt2": (f"--config gpt2-124m {SMALL}", 1),
    "llama": (f"--config llama-8b {SMALL}", 1),
    "qwen": (f"--config qwen3-0.6b {SMALL}", 1),
    "qwen-moe": (f"--config qwen3-30b-a3b {SMALL} --n_experts 4 --experts_per_token 2", 1),
    "mixtral": (f"--config mixtral-8x7b {SMALL} --n_experts 4", 1),
    "float16": (f"{SMALL} --dtype float16 --optimizer muon", 1),
    "mesh": (f"{SMALL} --dp 2 --fsdp 2 --tp 2", 8),
    "packed": (f"{SMALL} --packing best_fit --grad_accum_steps 2 --dtype bfloat16", 1),
}
KEPT = ("loss", "objective", "grad_norm", "lr", "acc", "val_loss", "val_acc", "digest", "texts")


def run(name):
    """Run train.py; return a line for each log row, evaluation, save and sample."""
    flags, n_devices = RUNS[name]
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={n_devices}"}
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(ROOT / "train.py"), *flags.split(), "--out_dir", out,
                   "--log_every", "2", "--eval_batches", "2", "--sample_tokens", "8"]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            return [f"{name}: exit code {done.returncode}: {done.stderr[-2000:]}"]
        rows = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    lines = []
    for row in rows:
        kept = {key: row[key] for key in KEPT if key in row}
        if "digest" in kept:
            kept["digest"] = {part: kept["digest"][part] for part in ("params", "opt")}
        if row["event"] in ("log", "eval", "save", "sample"):
            lines.append(f"{name} {row['event']} {row['step']} {json.dumps(kept)}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"runs among {', '.join(RUNS)}; default: all")
    for name in parser.parse_args().names or RUNS:
        print("\n".join(run(name)), flush=True)


if __name__ == "__main__":
    main()
