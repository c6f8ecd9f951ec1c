# SPDX-License-Identifier: Apache-2.0
"""Check that the tests can fail, by breaking copies of the project.

`python tests/mutate.py [words] [--jobs 2]` applies the break that each test names. Each docstring
ends with `Break: file.py: old => new`, and `old` occurs exactly once in the file. The break must
turn the test red. words: only tests whose names have one of them.
Breaks that stay green are listed as GREEN.
"""
import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800  # a hang counts as red


def run_broken(file, text, *args):
    """Run pytest on a copy of the project in which `file` has this text.

    Returns (exit code, output), or (None, "") after a timeout.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", "out", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        (copy / file).write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0",
                   f"--basetemp={folder}/tmp", *args]
        with open(f"{folder}/log", "w+") as log:
            run = subprocess.Popen(command, cwd=copy, stdout=log, stderr=log,
                                   start_new_session=True)
            try:
                run.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)  # also ends the processes that the test started
                run.wait()
                return None, ""
            log.seek(0)
            return run.returncode, log.read()


def named_breaks():
    """([(test id, file, old, new)] of named breaks, [test id] of tests without a break)."""
    found = []
    missing = []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            name = f"tests/{path.name}::{node.name}"
            docstring = ast.get_docstring(node) or ""
            _, _, text = " ".join(docstring.split()).partition("Break: ")
            file, _, change = text.partition(": ")
            old, arrow, new = change.partition(" => ")
            if arrow:
                found.append((name, file, old, new))
            else:
                missing.append(name)
    return found, missing


def why_green(name, file, old, new):
    """The reason why the test does not fail when its line is broken; "" if it fails."""
    source = (ROOT / file).read_text()
    if source.count(old) != 1:
        return f"{old!r} occurs {source.count(old)} times in {file}"
    code, output = run_broken(file, source.replace(old, new), name)
    if code in (1, None, -signal.SIGABRT):  # XLA aborts on programs that it cannot compile
        return ""
    return f"exit code {code}: {output[-300:]}"


def main():
    """Apply the breaks of all tests whose names have one of the words. Returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    found, missing = named_breaks()
    chosen = [each for each in found
              if not args.words or any(word in each[0] for word in args.words)]

    def is_red(named_break):
        reason = why_green(*named_break)
        print("GREEN" if reason else "red  ", named_break[0], reason, flush=True)
        return not reason

    with ThreadPoolExecutor(args.jobs) as pool:
        n_red = sum(pool.map(is_red, chosen))
    for name in missing:
        print(f"{name}: names no break")
    print(f"{n_red} of {len(chosen)} breaks turn their test red")
    return int(n_red < len(chosen) or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
