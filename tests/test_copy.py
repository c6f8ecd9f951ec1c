# SPDX-License-Identifier: Apache-2.0
"""Each file but train.py works when it is copied alone into an empty folder."""
import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

USES = {
    "config": """
import config
cfg = config.parse(["--config", "debug", "--steps", "2Ki"])
assert cfg.steps == 2048 and config.from_json(config.to_json(cfg)) == cfg
config.validate(cfg, 1, {}, config.text_errors)
assert config.derive_text(cfg).head_dim == 64
""",
    "data": """
import data, pathlib
pathlib.Path("a.txt").write_text("to be, or not to be " * 9)
dataset = data.open_dataset(["a.txt"], data.make_tokenizer("bytes"), {"seq_len": 8})
train, _ = data.split(dataset, 0.2)
for batch, waited_s in data.prefetch(lambda step: data.batch_at(train, step, 4), 0, 3):
    assert batch["tokens"].shape == batch["labels"].shape == (4, 8)
""",
    "model": """
import config, model, jax, jax.numpy as jnp
cfg = config.derive_text(config.Config(
    d_model=16, n_layers=2, n_kv_heads=2, d_ff=32, vocab_size=11, qkv_bias=True, batch_size=2,
    dtype="float32"))
batch = {"tokens": jnp.arange(10).reshape(2, 5), "labels": jnp.arange(1, 11).reshape(2, 5)}
# Traced only: it takes 10 s to compile.
shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))
new = jax.eval_shape(lambda p: model.generate(
    p, batch["tokens"], jnp.full(2, 5), cfg, jax.random.key(0), 3), shapes)
assert new.shape == (2, 3)
params = {name: jnp.full(x.shape, 0.1) for name, x in shapes.items()}
sums, counts = jax.jit(lambda p, b: model.loss_fn(p, b, cfg))(params, batch)
assert float(counts["loss"]) == 10 and abs(sums["loss"] - 10 * jnp.log(11)) < 1e-3
""",
    "step": """
import config, step, jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
cfg = config.Config(dp=-1, fsdp=1, optimizer="adamw", lr=0.1, dtype="float32", steps=60)
def loss_fn(params, batch, cfg):
    off = batch["x"] * params["w"] - 3 * batch["x"]
    return {"objective": (off * off).sum()}, {"objective": jnp.float32(off.size)}
table = {"w": dict(shape=(1,), spec=P(), init=("normal", 1.0))}
init = lambda key, cfg: {"w": jax.random.normal(key, (1,))}
mesh, x = step.make_mesh(cfg), jnp.linspace(-1, 1, 8)[:, None]
rows = jax.sharding.NamedSharding(mesh, P("dp"))
shape = jax.ShapeDtypeStruct((8, 1), jnp.float32, sharding=rows)
made = step.compile_steps(step.lower_steps(cfg, mesh, table, loss_fn, init, {"x": shape}))
state = made["init"](jax.random.key(0))
for i in range(cfg.steps):
    state, _ = made["train_step"](state, jax.device_put({"x": x}, rows), step.lr_at(i, cfg))
assert int(state["step"]) == cfg.steps and abs(float(state["params"]["w"][0]) - 3) < 0.3
""",
    "ckpt": """
import ckpt, jax.numpy as jnp, numpy as np
tree = {"a": np.arange(6).reshape(2, 3), "b": jnp.ones((3,), jnp.bfloat16) / 3}
ckpt.wait(ckpt.save("here", 5, tree))
back = ckpt.restore("here", ckpt.latest("here"), tree)
assert (back["a"] == tree["a"]).all() and (back["b"] == tree["b"]).all()
""",
}


@pytest.mark.house
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "model")) for name in USES])
def test_copied_alone(name, tmp_path):
    """In an empty folder, model.py and step.py with config.py, whose fields they read.

    Break: data.py: import zlib => import zlib, config
    """
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    if "import config" in USES[name]:
        shutil.copy(ROOT / "config.py", tmp_path)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    alone = f"import sys; assert {str(ROOT)!r} not in sys.path\n"
    run = subprocess.run([sys.executable, "-c", alone + USES[name]],
                         cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


# ---- the project's files, from a folder that has files of their names

@pytest.mark.slow
def test_beside_files_of_our_names(tmp_path):
    """A copied recipe prints its help, and train.py as a module trains with a copied hook.

    Break: train.py: sys.path.insert(0, os.path.dirname( => sys.path.append(os.path.dirname(
    """
    for name in ("config", "model", "step", "ckpt"):
        (tmp_path / f"{name}.py").write_text(f"NAME = {name!r}\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/__init__.py").write_text("NAME = 'data'\n")
    (tmp_path / "a.txt").write_text("to be, or not to be " * 99)
    for recipe in ("dpo", "prune"):
        shutil.copy(ROOT / f"tests/recipes/{recipe}.py", tmp_path)
    flags = re.sub(r"--xla_force_host\S+", "", os.environ["XLA_FLAGS"])
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    for command, words in (
            ("dpo.py --help all", "passes over the training data"),
            ("-m train --steps 1 --d_model 32 --n_layers 1 --n_heads 2 --batch_size 4 --seq_len 16 "
             "--eval_batches 1 --sample_tokens 0 --data a.txt --cache_dir= --hooks prune.py:prune",
             "all 1 steps are done")):
        run = subprocess.run([sys.executable, *command.split()], cwd=tmp_path, env=env,
                             capture_output=True, text=True)
        assert run.returncode == 0 and words in run.stdout, run.stderr[-2000:]


def test_isolated(tmp_path):
    """`python -I -OO train.py` works through a link; a hook that imports train gets this module.

    Break: train.py: os.path.realpath(__file__) => os.path.abspath(__file__)
    """
    (tmp_path / "linked.py").symlink_to(ROOT / "train.py")
    (tmp_path / "my_hooks.py").write_text(
        "import sys, train, config\nprint(train is sys.modules['__main__'], config.__file__)\n"
        "raise ValueError('imported')\n")
    run = subprocess.run([sys.executable, "-I", "-OO", "linked.py", "--hooks", "my_hooks.py:f"],
                         cwd=tmp_path, capture_output=True, text=True)
    assert run.stderr.endswith("ValueError: imported\n"), run.stderr[-2000:]
    assert run.stdout == f"True {ROOT}/config.py\n"
