# SPDX-License-Identifier: Apache-2.0
"""Changes of README's table "How to change it", made on copies of the project."""
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

# {change: ([(file, text, the text with the change)], tests that turn red)}
FORKS = {
    "an optimizer": ([
        ("step.py", '    "rmsprop": lambda cfg',
         '    "nadam": lambda cfg: optax.scale_by_adam(cfg.b1, nesterov=True),\n'
         '    "rmsprop": lambda cfg'),
        ("step.py", '    "rmsprop": 2e-3', '    "nadam": 2e-3,\n    "rmsprop": 2e-3')],
        "test_step.py -k first_moments_alone"),
    "the architecture": ([
        ("model.py", "else jax.nn.silu", "else jax.nn.relu")],
        "test_model.py -k forward_equals_numpy"),
    "a term of the loss": ([
        ("model.py", '"z": z_BT', '"z": z_BT, "doubled": 2 * z_BT')],
        "test_model.py -k loss_sums_equal_numpy"),
    "an option": ([
        ("config.py", "    label_smoothing: Fr", "    noise: float = 0.0  # noise\n"
         "    label_smoothing: Fr")],
        "test_fields.py -k every_field_has_a_row"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", FORKS)
def test_a_test_that_a_fork_turns_red_says_what_to_edit(change, tmp_path):
    """Each failure names what to edit beside the change.

    Break: tests/test_model.py: edit np_logits, np_sums or np_counts in => these differ in
    """
    edits, tests = FORKS[change]
    shutil.copytree(ROOT, tmp_path / "fork", ignore=shutil.ignore_patterns(".*", "out", "*.png"))
    for file, old, new in edits:
        path = tmp_path / "fork" / file
        text = path.read_text()
        assert text.count(old) == 1, f"edit FORKS: {file} must have this once: {old}"
        path.write_text(text.replace(old, new))
    file, *words = tests.split()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short",
                           "-p", "no:cacheprovider", f"tests/{file}", *words],
                          cwd=tmp_path / "fork", capture_output=True, text=True)
    _, *failures = re.split(r"\n_{5,} .* _{5,}\n", done.stdout)
    assert done.returncode == 1 and failures, done.stdout + done.stderr
    for failure in failures:
        assert re.search(r"^E .*\b(edit|add)\b", failure, re.M), failure
