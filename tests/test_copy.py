# SPDX-License-Identifier: Apache-2.0
"""Each file but train.py works when it is copied alone into an empty folder."""
import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT
from test_docs import python_files


@pytest.mark.house
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "model"))
    for name in ("config", "data", "model", "step", "ckpt")])
def test_copied_alone(name, tmp_path):
    """In an empty folder the guide's program of a file runs, with config.py for model.py and
    step.py, whose fields they read.

    Break: data.py: import zlib => import zlib, config
    """
    program = python_files("tests/GUIDE.md")[f"{name}_alone.py"]
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    shutil.copy(ROOT / "README.md", tmp_path)  # the text of data_alone.py
    if "import config" in program:
        shutil.copy(ROOT / "config.py", tmp_path)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env["XLA_FLAGS"] = re.sub(r"--xla_force_host\S+", "", env["XLA_FLAGS"])
    alone = f"import sys; assert {str(ROOT)!r} not in sys.path\n"
    run = subprocess.run([sys.executable, "-c", alone + program],
                         cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout, run.stderr[-2000:]


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
