# SPDX-License-Identifier: Apache-2.0
"""Check that the tests can fail, by breaking copies of the project.

`python tests/mutate.py [words] [--jobs 2]` applies the break that each test names. Each docstring
ends with `Break: file.py: old => new`, and `old` occurs exactly once in the file. The break must
turn the test red. words: only tests whose names have one of them.
`python tests/mutate.py --random N --seed S [--file data]` applies N breaks drawn from the syntax
trees of the six files, each against the quick tests of its file, then against all tests.
Breaks that stay green are listed as GREEN.
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
TIMEOUT_S = 1800  # a hang counts as red
# Operators, as written and as broken.
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


# ---- breaks that tests name

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


def run_named(words, n_jobs):
    """Apply the breaks of all tests whose names have one of the words. Returns an exit code."""
    found, missing = named_breaks()
    chosen = [each for each in found if not words or any(word in each[0] for word in words)]

    def is_red(named_break):
        reason = why_green(*named_break)
        print("GREEN" if reason else "red  ", named_break[0], reason, flush=True)
        return not reason

    with ThreadPoolExecutor(n_jobs) as pool:
        n_red = sum(pool.map(is_red, chosen))
    for name in missing:
        print(f"{name}: names no break")
    print(f"{n_red} of {len(chosen)} breaks turn their test red")
    return int(n_red < len(chosen) or bool(missing))


# ---- random breaks

def nodes(tree):
    """Yield all nodes except those within annotations, f-strings and raised errors."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (ast.JoinedStr, ast.Raise)):
            annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
            stack += [n for n in ast.iter_child_nodes(node) if n not in annotations]


def breaks_of(source):
    """Yield each way to break `source`: (start, end, replacement), in bytes."""
    line_starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]

    def begin(node):
        return line_starts[node.lineno - 1] + node.col_offset

    def end(node):
        return line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(node):
        return source[begin(node):end(node)]

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
        match node:  # statements that can be removed without a NameError
            case (ast.AugAssign() | ast.Raise() | ast.Break() | ast.Continue()
                  | ast.Expr(ast.Call() | ast.Yield())
                  | ast.Assign([ast.Subscript() | ast.Attribute()])):
                yield begin(node), end(node), b"pass" + b"\n" * text(node).count(b"\n")


def try_break(file, start, end, replacement):
    """Print whether a break turns the quick tests of its file red or, if they stay green, any test,
    and return it.
    """
    source = (ROOT / file).read_bytes()
    broken = source[:start] + replacement + source[end:]
    text = broken.decode()
    code, _ = run_broken(file, text, "-m", "not slow", f"tests/test_{file}")
    if code == 0:
        code, _ = run_broken(file, text, "tests")
    first = source[:start].count(b"\n")
    last = source[:end].count(b"\n")
    old = joined_lines(source, first, last)
    new = joined_lines(broken, first, last)
    print("GREEN" if code == 0 else "red  ", f"{file}:{first + 1}: {old} => {new}", flush=True)
    return code != 0


def joined_lines(source, first, last):
    lines = source.decode().splitlines()[first : last + 1]
    return " ".join(" ".join(lines).split())


def run_random(n, seed, names, n_jobs):
    found = []
    for name in names:
        for change in breaks_of((ROOT / f"{name}.py").read_bytes()):
            found.append((f"{name}.py", *change))
    found.sort()
    chosen = random.Random(seed).sample(found, min(n, len(found)))
    # Without a break the tests must be green.
    unbroken = (ROOT / "train.py").read_text()
    code, output = run_broken("train.py", unbroken, "-m", "not slow", "tests")
    if code != 0:
        sys.exit(output)
    with ThreadPoolExecutor(n_jobs) as pool:
        red = list(pool.map(lambda chosen_break: try_break(*chosen_break), chosen))
    print(f"{sum(red)} of {len(red)} random breaks ({sum(red) / len(red):.0%}) turn the tests red; "
          f"{len(found)} are possible")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--file", choices=FILES)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    if not args.random:
        return run_named(args.words, args.jobs)
    names = [args.file] if args.file else FILES
    return run_random(args.random, args.seed, names, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
