# SPDX-License-Identifier: Apache-2.0
"""check.py: its schedule, its report, its end by a signal, and errors that it has to find.

Errors are planted in a copy of the project, in which check.py then runs.
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

import check
import model
from conftest import ROOT

MACHINE = {
    "cpu": "a CPU", "kind": "a GPU", "platform": "cpu", "n_devices": 1, "threads": 2,
    "default_dtype": "mixed", "driver": None, "python": "3.11", "versions": {"jax": "0.10.2"},
    "flags": {}}


# ---- the items

@pytest.mark.parametrize("platform, n_devices", [
    ("cpu", 1), ("cuda", 1), ("old cuda", 2), ("tpu", 4), ("METAL", 1)])
def test_items_of_a_machine_can_run(platform, n_devices):
    """On each platform an item calls a function of check.py, needs an item that stands before it,
    and takes an attention kernel that the platform allows for every case.

    Break: tests/check.py: head_dim=128, d_ff=512, => head_dim=64, d_ff=512,
    """
    machine = MACHINE | {"platform": platform, "n_devices": n_devices}
    items = check.list_items(machine)
    names = [item["name"] for item in items]
    assert len(names) == len({*names}) > 10
    for i, item in enumerate(items):
        function, *args = item["call"]
        assert callable(getattr(check, function))
        assert item["part"] in check.PARTS and item["name"].startswith(item["part"] + "/")
        assert item["after"] in ("", *names[:i])
        if function in ("numbers", "numbers_by_remat"):
            dtype, attention = args
            for case in check.CASES.values():
                fields = dict(packing="stream", document_mask=False, deterministic=False)
                fields |= check.SMALL | case | {"dtype": dtype, "attention": attention}
                cfg = types.SimpleNamespace(**fields)
                assert model.choose_attention(cfg, platform) == attention


def test_chosen_items_come_with_what_they_need():
    """--only takes parts and items. The references that numbers need run too, and --only memory
    runs the shapes.

    Break: tests/check.py: or item["name"] in needed] => or item["name"] in []]
    """
    items = check.list_items(MACHINE)

    def names(*words):
        return [item["name"] for item in check.choose(items, words)]

    assert names("numbers/mixed-xla") == ["numbers/reference", "numbers/mixed-xla"]
    assert names("memory") == ["speed/character-12x256", "speed/default-model"]
    assert names("resume", "mesh") == ["resume/killed", "mesh/4-devices-of-one-cpu"]
    assert len(names()) == len(items)


def test_an_unknown_part_is_an_error(monkeypatch, capsys):
    """--only with a name that is neither a part nor an item, or no time, ends with exit code 2.

    Break: tests/check.py: parser.error(str(e)) => items = []
    """
    monkeypatch.setattr(check, "look_at_machine", lambda: MACHINE)
    for flags, words in ((["--only", "nothing"], "--only nothing: no such part or item"),
                         (["--limit", "0"], "argument --limit: 0: must be more than 0")):
        monkeypatch.setattr(sys, "argv", ["check.py", *flags])
        with pytest.raises(SystemExit) as end:
            check.main()
        assert end.value.code == 2 and words in capsys.readouterr().err


# ---- records and the report

def test_the_first_wrong_gradient_is_named():
    """A check of several arrays fails by the largest error, also if it is NaN, and names the first
    wrong array in the order of the backward pass.

    Break: tests/check.py: status = "PASS" if value <= bound => status = "FAIL" if value > bound
    """
    errors = {"embed": 0.3, "layers.wq": float("nan"), "layers.wo": 0.2, "final_norm": 1e-9}
    found = check.worst_of("gradients", errors, 1e-4)
    assert found["status"] == "FAIL"
    assert "in layers.wq, 3 of 4 wrong, the first in the backward pass is layers.wo" in (
        found["text"])
    assert check.worst_of("gradients", {"embed": 1e-5}, 1e-4)["status"] == "PASS"


def test_a_factor_of_all_gradients_is_found(tmp_path, monkeypatch):
    """Gradients that were all 3% too large before they were clipped to one norm fail by that norm;
    a wrong move of a parameter fails too.

    Break: tests/check.py: GRADIENT_BOUNDS[precision] / 5, => GRADIENT_BOUNDS[precision],
    """
    monkeypatch.setenv("CHECK_SCRATCH", str(tmp_path))
    w, g = np.ones((2, 2), np.float32), np.full((2, 2), 0.25, np.float32)
    np.savez(check.reference_path("plain"), loss=2.0, norm=8.0, **{"grads/embed": g})
    cfg = types.SimpleNamespace(weight_decay=0.1, eps=1e-8)
    found = {"loss": 2.0, "norm": 8.0, "lr": 0.01, "grads": {"embed": g}, "old": {"embed": w},
             "new": {"embed": w - np.float32(0.011)}, "cfg": cfg}

    def status(**changes):
        return check.against_float64("plain", "plain", found | changes, "mixed")["status"]

    assert status() == "PASS"
    assert status(norm=1.03 * 8) == "FAIL"
    assert status(new={"embed": w - np.float32(0.01)}) == "FAIL"


def test_the_report_has_each_record_and_a_row_of_results(tmp_path):
    """check.md has the machine, its flags, each record, and a row with what failed and the speeds.

    Break: tests/check.py: if each["part"] == "speed" and each["status"] == "INFO": => if False:
    """
    context = {"out_dir": tmp_path, "records": [], "began": 0.0,
               "machine": MACHINE | {"flags": {"XLA_FLAGS": "--some_flag"}}}
    shape = {"part": "speed", "name": "speed/gpt2"}
    for each in (check.record("INFO", "speed", "120 ms", step_s=0.12),
                 check.checked("memory", 0.5, 0.1, "peak 30 GiB") | {"part": "memory"}):
        check.add_record(shape, each, context)
    text = (tmp_path / "check.md").read_text()
    assert "1 x a CPU, 2 threads; Python 3.11, jax 0.10.2." in text
    assert "`XLA_FLAGS=--some_flag`" in text
    assert "| speed/gpt2 | memory | FAIL | peak 30 GiB 0.5 (at most 0.1) |" in text
    row = text.splitlines()[-1]
    assert "0 passed, 1 failed, 0 skipped, 1 measured; failed: speed/gpt2; gpt2, speed: 120" in row
    records = json.loads((tmp_path / "check.json").read_text())["records"]
    assert [each["name"] for each in records] == ["speed", "memory"]


# ---- the command

def copy_project(folder, *edits):
    """Copy the six files and check.py, with each (file, old, new) replaced. Returns the folder."""
    (folder / "tests").mkdir(parents=True)
    for path in (*ROOT.glob("*.py"), ROOT / "tests/check.py"):
        shutil.copy(path, folder / path.relative_to(ROOT))
    for file, old, new in edits:
        text = (folder / file).read_text()
        assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
        (folder / file).write_text(text.replace(old, new))
    return folder


def environment(folder):
    """Variables of a process: this machine's devices, and caches in a folder."""
    flags = re.sub(r"--xla_force_host\S+", "", os.environ["XLA_FLAGS"])
    return dict(os.environ, XLA_FLAGS=flags, HOME=str(folder / "home"))


def start_check(folder, *args):
    return subprocess.Popen([sys.executable, "tests/check.py", *args], cwd=folder, text=True,
                            env=environment(folder), stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)


def run_check(folder, *args):
    """(exit code, output, records) of check.py in a folder."""
    process = start_check(folder, *args)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output, records_of(folder)


def records_of(folder):
    path = folder / "out/check/check.json"
    return json.loads(path.read_text())["records"] if path.exists() else []


# JAX is not asked for the machine, which saves a process.
KNOWN_MACHINE = ("tests/check.py", "machine = look_at_machine()", f"machine = {MACHINE!r}")


def plant_item(body):
    """Edits by which the item numbers/known-forms runs these lines."""
    lines = "".join(f"    {line}\n" for line in body)
    return KNOWN_MACHINE, (
        "tests/check.py", "def known_forms():\n", f"def known_forms():\n{lines}def unused():\n")


KNOWN_FORMS = "numbers/known-forms"
FIRST_RECORD = "yield record('PASS', 'first', 'good')"


def test_a_part_runs_on_this_machine(tmp_path):
    """A check that passes: exit code 0, the machine, a record for each check, and the report.

    Break: tests/check.py: (tall, normal(64, 64)), 1e-5), => (tall, normal(64, 64)), 1e-20),
    """
    folder = copy_project(tmp_path / "copy")
    code, output, records = run_check(folder, "--only", KNOWN_FORMS)
    assert code == 0, output
    assert {each["status"] for each in records} == {"PASS"} and len(records) == 4
    assert output.splitlines()[0].startswith("1 x ")
    assert "4 passed, 0 failed, 0 skipped, 0 measured; report: " in output.splitlines()[-1]
    assert "A row for tests/RESULTS.md:" in (folder / "out/check/check.md").read_text()
    assert not list(folder.glob("out/check/scratch-*"))


@pytest.mark.parametrize("line, args, text", [
    ("os.kill(os.getpid(), signal.SIGKILL)", (), "ended with exit code -9"),
    ("raise ArithmeticError('no luck')", (), "ended with exit code 1: ArithmeticError: no luck"),
    ("time.sleep(600)", ("--limit", "5"), "stopped after 5 s"),
])
def test_an_item_that_fails_keeps_its_records(line, args, text, tmp_path):
    """An item that is killed, raises or does not end is one FAIL, with the command that runs it
    alone. What it had found before is kept. An item that ends without a record has failed too.

    Break: tests/check.py: elif code or not n_records: => elif code:
    """
    folder = copy_project(tmp_path / "copy", *plant_item([FIRST_RECORD, line]), (
        "tests/check.py", "def rates():\n", "def rates():\n    yield from ()\ndef no_rates():\n"))
    code, output, records = run_check(folder, "--only", KNOWN_FORMS, "speed/rates", *args)
    assert code == 1, output
    rows = [(each["item"], each["status"], each["name"]) for each in records]
    assert rows == [(KNOWN_FORMS, "PASS", "first"), (KNOWN_FORMS, "FAIL", "all"),
                    ("speed/rates", "FAIL", "all")]
    assert records[1]["text"].startswith(text)
    assert f"python tests/check.py --only {KNOWN_FORMS} --limit 240" in records[1]["text"]
    assert records[2]["text"].startswith("ended with exit code 0: ;")


def test_items_that_were_cut_off_are_skipped(tmp_path):
    """An item that is not finished when the minutes are over is a SKIP, not a FAIL, and so is one
    that needs its results; both have a reason. As nothing was checked, the exit code is 1.

    Break: tests/check.py: if each["status"] in ("FAIL", "SKIP")] => if each["status"] == "FAIL"]
    """
    folder = copy_project(
        tmp_path / "copy", *plant_item(["yield"]),
        ("tests/check.py", "def make_references():\n",
         "def make_references():\n    time.sleep(600)\n    yield\ndef unused():\n"),
        ("tests/check.py", '"make_references": (30, 30)', '"make_references": (0, 0)'),
        ("tests/check.py", '"numbers": (25, 60)', '"numbers": (-9, -9)'))
    code, output, records = run_check(
        folder, "--only", "numbers/mixed-xla", "resume", "--minutes", "0.03")
    assert code == 1 and "nothing was checked" in output, output
    found = {each["item"]: each for each in records}
    assert {each["status"] for each in records} == {"SKIP"} and len(records) == 3
    assert "less time was left; alone: python" in found["resume/killed"]["text"]
    assert "not finished in the time that was left" in found["numbers/reference"]["text"]
    assert "needs numbers/reference" in found["numbers/mixed-xla"]["text"]


@pytest.mark.parametrize("number, expected", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_items_and_leaves_a_report(number, expected, tmp_path):
    """Ctrl-C and SIGTERM end the item, with the processes that it started, and the report has the
    records up to then.

    Break: tests/check.py: start_new_session=True) => start_new_session=False)
    """
    pids = tmp_path / "pids"
    folder = copy_project(tmp_path / "copy", *plant_item([
        FIRST_RECORD, "other = subprocess.Popen(['sleep', '600'])",
        f"Path({str(pids)!r}).write_text(f'{{os.getpid()}} {{other.pid}}')", "time.sleep(600)"]))
    process = start_check(folder, "--only", KNOWN_FORMS)
    wait_until(lambda: pids.exists() and " " in pids.read_text() and records_of(folder))
    started = pids.read_text().split()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == expected, output
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

@pytest.mark.slow
def test_a_wrong_gradient_is_found(tmp_path):
    """Products whose gradient of the left operand is 1.2 times too large: numbers fail, and name
    the norm before the head, whose gradient is the first wrong one in the backward pass.

    Break: tests/check.py: "float32": 1e-4, "mixed": 5e-2, => "float32": 1e-4, "mixed": 5e2,
    """
    folder = copy_project(
        tmp_path / "copy", KNOWN_MACHINE,
        ("model.py", "dx = dot(dy, transposed(w))", "dx = 1.2 * dot(dy, transposed(w))"),
        ("tests/check.py", "for case in CASES:\n", 'for case in ["plain"]:\n'),
        ("tests/check.py", "[(case, {}) for case in CASES])", '[("plain", {})])'))
    code, output, records = run_check(folder, "--only", "numbers/mixed-xla")
    assert code == 1, output
    (plain,) = [each for each in records if each["name"] == "plain"
                and each["item"] == "numbers/mixed-xla"]
    assert plain["status"] == "FAIL"
    assert "the first in the backward pass is final_norm" in plain["text"], plain["text"]


@pytest.mark.slow
def test_steps_that_differ_are_found(tmp_path):
    """A learning rate with a random factor: calls of one step differ, two processes differ, and the
    first wrong array is named.

    Break: tests/check.py: n_different += 1 => n_different += 0
    """
    noise = ("jax.pure_callback(lambda: np.float32(1 + int.from_bytes(os.urandom(2), 'little')), "
             "jax.ShapeDtypeStruct((), jnp.float32))")
    folder = copy_project(
        tmp_path / "copy", KNOWN_MACHINE,
        ("step.py", "    old_opt = state[\"opt\"]\n",
         f"    old_opt = state[\"opt\"]\n    lr *= {noise}\n"),
        ("tests/check.py", "N_CALLS, SECONDS = 5000, 25", "N_CALLS, SECONDS = 20, 25"))
    code, output, records = run_check(folder, "--only", "determinism/threads-1")
    assert code == 1, output
    calls, processes = records
    assert calls["status"] == processes["status"] == "FAIL"
    assert "other digests: 19 (at most 0), the first is that of params embed in call 2" in (
        calls["text"])
    assert "the first is that of params embed" in processes["text"]


@pytest.mark.slow
def test_a_resume_that_loses_its_position_is_found(tmp_path):
    """A resumed run that begins with the first batch again: the part resume fails and names an
    array.

    Break: tests/check.py: != expected[name].tobytes()] => != found[name].tobytes()]
    """
    folder = copy_project(
        tmp_path / "copy", KNOWN_MACHINE,
        ("train.py", "pinned=cfg.overfit_batch), first_step, cfg.steps,",
         "pinned=cfg.overfit_batch), 0, cfg.steps,"),
        ("tests/check.py", "N_STEPS, SAVE_EVERY = 160, 40", "N_STEPS, SAVE_EVERY = 80, 10"))
    code, output, records = run_check(folder, "--only", "resume")
    assert code == 1, output
    (found,) = records
    assert "arrays of the last checkpoint that differ: " in found["text"]
    assert "the first is opt/" in found["text"]
