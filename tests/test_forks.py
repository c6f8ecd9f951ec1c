# SPDX-License-Identifier: Apache-2.0
"""Changes of README's table "How to change it", made on a copy of the project."""
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

# {change: ([(file, text, the text with the change)], the test that turns red, as pytest -k has it)}
FORKS = {
    "an optimizer": ([
        ("step.py", '    "rmsprop": lambda cfg',
         '    "nadam": lambda cfg: optax.scale_by_adam(cfg.b1, nesterov=True),\n'
         '    "rmsprop": lambda cfg'),
        ("step.py", '    "rmsprop": 2e-3', '    "nadam": 2e-3,\n    "rmsprop": 2e-3')],
        "first_moments_alone and nadam"),
    "the architecture": ([("model.py", "activation = jax.nn.gelu", "activation = jax.nn.relu")],
                         "forward_equals_numpy and norms"),
    "a term of the loss": ([("model.py", '"z": z_BT', '"z": z_BT, "doubled": 2 * z_BT')],
                           "loss_sums_equal_numpy and change0"),
    "an option": ([
        ("config.py", "    label_smoothing: Fr", "    noise: float = 0.0  # noise\n"
         "    label_smoothing: Fr")],
        "every_field_has_a_row"),
}


@pytest.mark.slow
def test_a_test_that_a_fork_turns_red_says_what_to_edit(tmp_path):
    """Each failure names what to edit beside the change.

    Break: tests/test_model.py: edit np_logits, np_sums or np_counts in => these differ in
    """
    shutil.copytree(ROOT, tmp_path / "fork", ignore=shutil.ignore_patterns(".*", "out", "*.png"))
    for edits, _ in FORKS.values():
        for file, old, new in edits:
            path = tmp_path / "fork" / file
            text = path.read_text()
            assert text.count(old) == 1, f"edit FORKS: {file} must have this once: {old}"
            path.write_text(text.replace(old, new))
    chosen = " or ".join(f"({words})" for _, words in FORKS.values())
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short",
                           "-p", "no:cacheprovider", "tests/test_step.py", "tests/test_model.py",
                           "tests/test_fields.py", "-k", chosen],
                          cwd=tmp_path / "fork", capture_output=True, text=True)
    _, *failures = re.split(r"\n_{5,} .* _{5,}\n", done.stdout)
    assert done.returncode == 1 and len(failures) == len(FORKS), done.stdout + done.stderr
    for failure in failures:
        assert re.search(r"^E .*\b(edit|add)\b", failure, re.M), failure
