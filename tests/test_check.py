# SPDX-License-Identifier: Apache-2.0
"""check.py: its schedule, its report, its end by a signal, and errors that it has to find.

Errors are planted in a copy of the project, in which check.py then runs.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types

import numpy as np
import pytest

import check
import config
import model
from conftest import ROOT

MACHINE = {
    "cpu": "a CPU", "kind": "a GPU", "platform": "cpu", "n_devices": 1, "threads": 2,
    "default_dtype": "mixed", "driver": None, "python": "3.11", "versions": {"jax": "0.10.2"},
    "flags": {"XLA_FLAGS": "--some_flag"}}


# ---- the items

@pytest.mark.parametrize("platform, n_devices", [
    ("cpu", 1), ("cuda", 1), ("old cuda", 2), ("tpu", 4), ("METAL", 1)])
def test_items_of_a_machine_can_run(platform, n_devices):
    """On each platform an item calls a function, with a kernel that is legal for every case.

    Break: tests/check.py: head_dim=128, d_ff=512, => head_dim=64, d_ff=512,
    """
    items = check.list_items(MACHINE | {"platform": platform, "n_devices": n_devices})
    names = [item["name"] for item in items]
    assert len(names) == len({*names}) > 10 and names[0] == check.REFERENCE
    for item in items:
        function, *args = item["call"]
        assert callable(getattr(check, function)) and check.part_of(item) in check.PARTS
        if function == "numbers":
            dtype, attention, variants = args
            for case, changes in check.VARIANTS[variants]:
                fields = check.SMALL | check.CASES[case] | changes
                cfg = config.Config(**fields | {"dtype": dtype, "attention": attention})
                assert model.choose_attention(cfg, platform) == attention


def test_chosen_items_come_with_what_they_need(monkeypatch, capsys):
    """--only takes parts and items, with the references that numbers need.

    Break: tests/check.py: chosen.append(REFERENCE) => pass
    """
    items = check.list_items(MACHINE)

    def names(*words):
        return [item["name"] for item in check.choose(items, words)]

    assert names("numbers/mixed-xla") == ["numbers/reference", "numbers/mixed-xla"]
    assert names("memory") == ["speed/character-12x256", "speed/default-model"]
    assert names("resume", "mesh") == ["resume/killed", "mesh/4-devices-of-one-cpu"]
    assert len(names()) == len(items)
    monkeypatch.setattr(check, "look_at_machine", lambda: MACHINE)
    for flags, words in ((["--only", "nothing"], "--only nothing: no such part or item"),
                         (["--limit", "0"], "argument --limit: 0: must be more than 0")):
        monkeypatch.setattr(sys, "argv", ["check.py", *flags])
        with pytest.raises(SystemExit) as end:
            check.main()
        assert end.value.code == 2 and words in capsys.readouterr().err


# ---- records

def test_wrong_steps_are_found(tmp_path, monkeypatch):
    """NaN is the largest error; gradients all 3% too large fail by their norm; so do moves.

    Break: tests/check.py: GRADIENT_BOUNDS[precision] / 5, => GRADIENT_BOUNDS[precision],
    """
    errors = {"embed": 0.3, "layers.wq": float("nan"), "final_norm": 1e-9}
    found = check.worst_of("gradients", errors, 1e-4)
    assert found["status"] == "FAIL" and found["text"].endswith(" in layers.wq")

    monkeypatch.setenv("CHECK_SCRATCH", str(tmp_path))
    w, g = np.ones((2, 2), np.float32), np.full((2, 2), 0.25, np.float32)
    np.savez(check.reference_path("plain"), loss=2.0, norm=8.0, **{"grads/embed": g})
    cfg = types.SimpleNamespace(weight_decay=0.1, eps=1e-8)
    found = {"loss": 2.0, "norm": 8.0, "lr": 0.01, "grads": {"embed": g}, "old": {"embed": w},
             "new": {"embed": w - np.float32(0.011)}, "cfg": cfg}

    def status(**changes):
        return check.against_float64("plain", "plain", found | changes, "mixed")["status"]

    assert status() == "PASS"
    assert status(norm=1.03 * 8) == status(new={"embed": w - np.float32(0.01)}) == "FAIL"


# ---- the command

def copy_project(folder, *edits):
    """Copy the six files and check.py with each (file, old, new) replaced; return the folder."""
    (folder / "tests").mkdir(parents=True)
    for path in (*ROOT.glob("*.py"), ROOT / "tests/check.py"):
        shutil.copy(path, folder / path.relative_to(ROOT))
    # JAX is not asked for the machine, which saves a process.
    known = ("tests/check.py", "machine = look_at_machine()", f"machine = {MACHINE!r}")
    for file, old, new in (known, *edits):
        text = (folder / file).read_text()
        assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
        (folder / file).write_text(text.replace(old, new))
    return folder


def planted(function, *body):
    """An edit by which a function of check.py runs these lines."""
    lines = "".join(f"    {line}\n" for line in body)
    return "tests/check.py", f"def {function}():\n", f"def {function}():\n{lines}def unused():\n"


def start_check(folder, *args):
    flags = re.sub(r"--xla_force_host\S+", "", os.environ["XLA_FLAGS"])
    env = dict(os.environ, XLA_FLAGS=flags, HOME=str(folder / "home"))
    return subprocess.Popen([sys.executable, "tests/check.py", *args], cwd=folder, text=True,
                            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run_check(folder, *args):
    """(exit code, output, records) of check.py in a folder."""
    process = start_check(folder, *args)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output, records_of(folder)


def records_of(folder):
    path = folder / "out/check/check.json"
    return json.loads(path.read_text())["records"] if path.exists() else []


KNOWN_FORMS = "numbers/known-forms"
FIRST_RECORD = "yield record('PASS', 'first', 'good')"


def test_items_that_fail_keep_their_records(tmp_path):
    """Killed, raising, endless and silent items are FAILs with the command that runs each alone.

    Break: tests/check.py: elif code or not n_records: => elif code:
    """
    folder = copy_project(
        tmp_path / "copy",
        planted("known_forms", FIRST_RECORD, "os.kill(os.getpid(), signal.SIGKILL)"),
        planted("make_references", "yield record('INFO', 'first', '120 ms', step_s=0.12)",
                "yield checked('memory', 0.5, 0.1, 'peak 30 GiB')",
                "raise ArithmeticError('no luck')"),
        planted("resume", "yield from ()"),
        planted("mesh", FIRST_RECORD, "time.sleep(600)"))
    code, output, records = run_check(
        folder, "--only", KNOWN_FORMS, check.REFERENCE, "resume", "mesh", "--limit", "15")
    assert code == 1, output
    ends = [each for each in records if each["name"] == "all"]
    kept = [each["status"] for each in records if each["name"] != "all"]
    assert kept == ["INFO", "FAIL", "PASS", "PASS"]
    for each, words in zip(ends, ("ended with exit code 1: ArithmeticError: no luck",
                                  "ended with exit code -9",
                                  "ended with exit code 0: ;", "stopped after 15 s"), strict=True):
        assert each["status"] == "FAIL" and each["text"].startswith(words)
    assert f"python tests/check.py --only {KNOWN_FORMS} --limit 600" in ends[1]["text"]

    assert output.splitlines()[0] == "1 x a CPU, 2 threads; Python 3.11, jax 0.10.2"
    counts = "2 passed, 5 failed, 0 skipped, 1 measured"
    assert f"{counts}; report: " in output.splitlines()[-1]
    text = (folder / "out/check/check.md").read_text()
    for words in ("1 x a CPU, 2 threads; Python 3.11, jax 0.10.2;", "`XLA_FLAGS=--some_flag`",
                  "| numbers/reference | memory | FAIL | peak 30 GiB 0.5 (at most 0.1) |", counts):
        assert words in text
    assert not list(folder.glob("out/check/scratch-*"))


def test_items_that_were_cut_off_are_skipped(tmp_path):
    """An item that is not finished when the minutes are over is a SKIP; so is one that needs it.

    Break: tests/check.py: if each["status"] in ("FAIL", "SKIP")] => if each["status"] == "FAIL"]
    """
    folder = copy_project(
        tmp_path / "copy", planted("make_references", "time.sleep(600)", "yield"))
    code, output, records = run_check(
        folder, "--only", "numbers/mixed-xla", "resume", "--minutes", "0.03")
    assert code == 1 and "nothing was checked" in output, output
    found = {each["item"]: each["text"] for each in records}
    assert {each["status"] for each in records} == {"SKIP"} and len(records) == 3
    assert "no time was left; alone: python" in found["resume/killed"]
    assert "not finished in the time that was left" in found["numbers/reference"]
    assert "needs numbers/reference" in found["numbers/mixed-xla"]


def test_a_signal_ends_the_items_and_leaves_a_report(tmp_path):
    """SIGTERM ends the item, with the processes that it started, and the records are kept.

    Break: tests/check.py: start_new_session=True) => start_new_session=False)
    """
    pids = tmp_path / "pids"
    folder = copy_project(tmp_path / "copy", planted(
        "known_forms", FIRST_RECORD, "other = subprocess.Popen(['sleep', '600'])",
        f"Path({str(pids)!r}).write_text(f'{{os.getpid()}} {{other.pid}}')", "time.sleep(600)"))
    process = start_check(folder, "--only", KNOWN_FORMS)
    wait_until(lambda: pids.exists() and " " in pids.read_text() and records_of(folder))
    started = pids.read_text().split()
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    wait_until(lambda: not any(is_alive(pid) for pid in started))
    assert [each["name"] for each in records_of(folder)] == ["first"]
    assert "| first | PASS | good |" in (folder / "out/check/check.md").read_text()
    assert "report: " in output.splitlines()[-1]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- planted errors

NOISE = ("jax.pure_callback(lambda: np.float32(1 + int.from_bytes(os.urandom(2), 'little')), "
         "jax.ShapeDtypeStruct((), jnp.float32))")


@pytest.mark.slow
def test_planted_errors_are_found(tmp_path):
    """A wrong gradient, a random learning rate, and a resumed run that begins with the first batch.

    Break: tests/check.py: n_different += 1 => n_different += 0
    """
    folder = copy_project(
        tmp_path / "copy",
        ("model.py", "dx = dot(dy, w.mT if", "dx = 1.2 * dot(dy, w.mT if"),
        ("train.py", "pinned=cfg.overfit_batch), run.first_step, cfg.steps,",
         "pinned=cfg.overfit_batch), 0, cfg.steps,"),
        # The other items must not fail by the learning rate.
        ("step.py", "    old_opt = state[\"opt\"]\n",
         "    old_opt = state[\"opt\"]\n    import sys\n"
         f"    lr *= {NOISE} if {{'determinism', 'repeat_step'}} & {{*sys.argv}} else 1\n"),
        ("train.py", "console, plot)", "console)"),
        ("tests/check.py", "    for case in CASES:\n", '    for case in ["plain"]:\n'),
        ("tests/check.py", "[(case, {}) for case in CASES]", '[("plain", {})]'),
        ("tests/check.py", "n_layers=2, d_model=256,", "n_layers=1, d_model=64,"),
        # One compilation instead of one for each operation.
        ("tests/check.py", "with jax.disable_jit():", "with contextlib.nullcontext():"),
        ("tests/check.py", "(_, loss), grads = jax.value_and_grad(",
         "(_, loss), grads = jax.jit(jax.value_and_grad("),
        ("tests/check.py", "has_aux=True)(wide)", "has_aux=True))(wide)"),
        ("tests/check.py", "--d_model 64 --n_layers 2 ", "--d_model 32 --n_layers 1 "),
        ("tests/check.py", "N_CALLS, SECONDS = 5000, 25", "N_CALLS, SECONDS = 5, 25"),
        ("tests/check.py", "KILL_STEP = 160, 40, 100", "KILL_STEP = 8, 2, 5"))
    code, output, records = run_check(
        folder, "--only", "numbers/mixed-xla", "determinism/threads-1", "resume")
    assert code == 1, output
    _, gradient, calls, processes, resumed = records
    assert {each["status"] for each in records[1:]} == {"FAIL"}, output
    assert "norm of all gradients by 0.7" in gradient["text"]
    words = "other digests: 4 (at most 0), the first is that of params embed in call 2"
    assert words in calls["text"] and "the first is that of params embed" in processes["text"]
    assert "checkpoint that differ: " in resumed["text"]
    assert "the first is opt/" in resumed["text"]
