# SPDX-License-Identifier: Apache-2.0
"""Prove that every test can fail: apply each test's one-line break to a copy of the project and run
that test.

A test's docstring ends with `Break: file.py: old => new`, where `old` stands exactly once in the
file. `python tests/mutate.py [words]` runs those whose name holds one of the words; exit code 1
when a test stays green.
"""
import ast
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def breaks():
    """(test id, file, old, new) of every test, and the ids of those that name none."""
    found, missing = [], []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = f"tests/{path.name}::{node.name}"
                text = " ".join((ast.get_docstring(node) or "").split())
                file, _, change = text.partition("Break: ")[2].partition(": ")
                old, arrow, new = change.partition(" => ")
                (found.append((name, file, old, new)) if arrow else missing.append(name))
    return found, missing


def survives(name, file, old, new):
    """Why the test does not hold the line that it names, or None."""
    source = (ROOT / file).read_text()
    if source.count(old) != 1:
        return f"{old!r} stands {source.count(old)} times in {file}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        left_out = shutil.ignore_patterns(".git", ".venv", "out", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=left_out)
        (copy / file).write_text(source.replace(old, new))
        try:
            run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", name],
                                 cwd=copy, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            return None  # a hang is red too
    return None if run.returncode == 1 else f"exit code {run.returncode}: {run.stdout[-300:]}"


def main():
    found, missing = breaks()
    chosen = [b for b in found if not sys.argv[1:] or any(word in b[0] for word in sys.argv[1:])]
    faults = [f"{name}: names no break" for name in missing]
    for name, *change in chosen:
        fault = survives(name, *change)
        print("GREEN" if fault else "red  ", name, fault or "", flush=True)
        faults += [f"{name}: {fault}"] if fault else []
    print(f"{len(chosen) - len(faults)} of {len(chosen)} breaks turn their test red")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
