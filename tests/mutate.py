# SPDX-License-Identifier: Apache-2.0
"""Prove that the tests can fail, by breaking copies of the project.

`python tests/mutate.py [words] [--jobs 2]`: each test's docstring ends with `Break: file.py: old =>
new`, with `old` exactly once in the file; that break must turn that test red.
`python tests/mutate.py --random N --seed S [--file data]`: N breaks drawn from the syntax trees of
the six files, each against the quick tests of its file; what stays green is listed as GREEN.
"""
import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("config", "model", "step", "data", "ckpt", "train")
TIMEOUT_S = 600  # a hang is red
SWAPS = {
    ast.Add: (b"+", b"-"), ast.Sub: (b"-", b"+"), ast.Mult: (b"*", b"/"), ast.Div: (b"/", b"*"),
    ast.FloorDiv: (b"//", b"*"), ast.Mod: (b"%", b"*"), ast.Pow: (b"**", b"*"),
    ast.MatMult: (b"@", b"*"), ast.LShift: (b"<<", b">>"), ast.RShift: (b">>", b"<<"),
    ast.BitAnd: (b"&", b"|"), ast.BitOr: (b"|", b"&"), ast.BitXor: (b"^", b"|"),
    ast.Lt: (b"<", b"<="), ast.LtE: (b"<=", b"<"), ast.Gt: (b">", b">="), ast.GtE: (b">=", b">"),
    ast.Eq: (b"==", b"!="), ast.NotEq: (b"!=", b"=="), ast.And: (b"and", b"or"),
    ast.Or: (b"or", b"and"), ast.In: (b"in", b"not in"), ast.NotIn: (b"not in", b"in"),
    ast.Is: (b"is", b"is not"), ast.IsNot: (b"is not", b"is"),
}


def run_broken(file, text, *args):
    """Run pytest on a copy of the project whose `file` is `text`: (exit code or None, output)."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        left_out = shutil.ignore_patterns(".git", ".venv", "out", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=left_out)
        (copy / file).write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0",
                   f"--basetemp={folder}/tmp", *args]
        with (open(f"{folder}/log", "w+") as log,
              subprocess.Popen(command, cwd=copy, stdout=log, stderr=log,
                               start_new_session=True) as run):
            try:
                run.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)  # with the processes that the test started
                return None, ""
            log.seek(0)
            return run.returncode, log.read()


# ---- the breaks that the tests name

def named_breaks():
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


def why_green(name, file, old, new):
    """Why the test does not fail when its line is broken, or None."""
    source = (ROOT / file).read_text()
    if source.count(old) != 1:
        return f"{old!r} stands {source.count(old)} times in {file}"
    code, output = run_broken(file, source.replace(old, new), name)
    red = code in (1, None, -signal.SIGABRT)  # XLA aborts on what it cannot compile
    return None if red else f"exit code {code}: {output[-300:]}"


def run_named(words, n_jobs):
    found, missing = named_breaks()
    chosen = [b for b in found if not words or any(word in b[0] for word in words)]
    errors = [f"{name}: names no break" for name in missing]

    def try_named(named):
        fault = why_green(*named)
        print("GREEN" if fault else "red  ", named[0], fault or "", flush=True)
        return fault and f"{named[0]}: {fault}"

    with ThreadPoolExecutor(n_jobs) as pool:
        errors += filter(None, pool.map(try_named, chosen))
    print(f"{len(chosen) - len(errors)} of {len(chosen)} breaks turn their test red")
    return 1 if errors else 0


# ---- random breaks

def nodes(tree):
    """All nodes but those within annotations, f-strings and raised errors."""
    stack = [tree]
    while stack:
        yield (node := stack.pop())
        if not isinstance(node, (ast.JoinedStr, ast.Raise)):
            skipped = [getattr(node, field, None) for field in ("annotation", "returns")]
            stack += [n for n in ast.iter_child_nodes(node) if n not in skipped]


def breaks_of(source):
    """(start, end, new) of each way to break one place of `source`, all of them bytes."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]

    def begin(node): return starts[node.lineno - 1] + node.col_offset
    def end(node): return starts[node.end_lineno - 1] + node.end_col_offset
    def text(node): return source[begin(node):end(node)]

    for node in nodes(ast.parse(source)):
        match node:
            case (ast.BinOp(left, op, right) | ast.AugAssign(left, op, right)
                  | ast.Compare(left, [op], [right]) | ast.BoolOp(op, [left, right, *_])):
                between = source[end(left):begin(right)]
                yield end(left), begin(right), between.replace(*SWAPS[type(op)], 1)
            case ast.UnaryOp(ast.Not(), operand):
                yield begin(node), end(node), b"(" + text(operand) + b")"
            case ast.Constant(bool() as value):
                yield begin(node), end(node), repr(not value).encode()
            case ast.Constant(int() | float() as value):
                yield begin(node), end(node), repr(value + 1).encode()
            case ast.If(test) | ast.While(test) | ast.IfExp(test):
                yield begin(test), end(test), b"not (" + text(test) + b")"
            case ast.Call(f, [one, two, *_]) if (text(f) not in (b"min", b"max")
                                                 and not isinstance(two, ast.Starred)):
                between = source[end(one):begin(two)]
                yield begin(one), end(two), text(two) + between + text(one)
        match node:  # statements that can go without a NameError
            case (ast.AugAssign() | ast.Raise() | ast.Break() | ast.Continue()
                  | ast.Expr(ast.Call() | ast.Yield())
                  | ast.Assign([ast.Subscript() | ast.Attribute()])):
                yield begin(node), end(node), b"pass" + b"\n" * text(node).count(b"\n")


def run_quick(file, text):
    formats = ["tests/test_hf.py"] if file in ("model.py", "ckpt.py", "train.py") else []
    return run_broken(file, text, "-m", "not slow", f"tests/test_{file}", *formats)


def try_break(file, start, end, new):
    """Print whether a break turns the quick tests of its file red; give True if it does."""
    source = (ROOT / file).read_bytes()
    broken = source[:start] + new + source[end:]
    code, _ = run_quick(file, broken.decode())
    line, last = source[:start].count(b"\n"), source[:end].count(b"\n") + 1
    old, new = (" ".join(b" ".join(x.splitlines()[line:last]).decode().split())
                for x in (source, broken))
    print("GREEN" if code == 0 else "red  ", f"{file}:{line + 1}: {old} => {new}", flush=True)
    return code != 0


def run_random(n, seed, names, n_jobs):
    found = sorted((f"{name}.py", *change) for name in names
                   for change in breaks_of((ROOT / f"{name}.py").read_bytes()))
    chosen = random.Random(seed).sample(found, min(n, len(found)))
    for file in sorted({file for file, *_ in chosen}):  # red without a break would prove nothing
        code, output = run_quick(file, (ROOT / file).read_text())
        assert code == 0, output
    with ThreadPoolExecutor(n_jobs) as pool:
        red = list(pool.map(try_break, *zip(*chosen)))
    print(f"{sum(red)} of {len(red)} random breaks ({sum(red) / len(red):.0%}) turn the tests red; "
          f"{len(found)} are possible")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--file", choices=FILES)
    for flag, default in (("--random", 0), ("--seed", 0), ("--jobs", 1)):
        parser.add_argument(flag, type=int, default=default)
    args = parser.parse_args()
    if not args.random:
        return run_named(args.words, args.jobs)
    return run_random(args.random, args.seed, [args.file] if args.file else FILES, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
