# SPDX-License-Identifier: Apache-2.0
"""Many runs: their names, which flags a resumed run has, any checkpoint and the best one, branches,
saves on request.
"""
import dataclasses
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import ckpt
import config
import train
from config import Config
from test_train import arrays, counting, losses, rows, same


def named(flags, kind=Config):
    """The folder that a command line without --out_dir gives a run."""
    return config.parse(flags.split(), kind).out_dir


# ---- names of runs

@pytest.mark.parametrize("flags, name", [
    ("", "default"),
    ("--steps 9 --dp 2 --eval_every 5 --log_every 1 --seed 0", "default"),
    ("--lr 3e-4", "lr=0.0003"),
    ("--config gpt2-124m --seed 1 --lr 3e-4", "gpt2-124m,lr=0.0003,seed=1"),
    ("--data /a/web.bin=0.7 b/code.bin=0.3 --no_qk_norm",
     "data=web.bin=0.7+code.bin=0.3,no_qk_norm"),
    ("--init_from hf://Qwen/Qwen3-0.6B --hooks a/my_hooks.py:in_bits --document_mask --eod_id 5",
     "init_from=Qwen3-0.6B,hooks=in_bits,eod_id=5,document_mask"),
    ("--branch_from out/wsd/@400 --init_from out/a/@best", "wsd@400,init_from=a@best"),
])
def test_a_run_is_named_after_the_fields_that_define_it(flags, name, tmp_path, monkeypatch):
    """Not those that may change on a resume. Paths enter by their last name.

    Break: config.py: if _defines_run(name) and name => if name
    """
    monkeypatch.chdir(tmp_path)
    assert named(flags) == f"out/{name}"
    cfg = config.parse(flags.split())
    assert config.derive_out_dir(dataclasses.replace(cfg, out_dir="")) == f"out/{name}"


def test_a_derived_name_is_a_legal_folder_name():
    """Other characters are replaced, a long name is cut; a checksum keeps runs apart.

    Break: config.py: if name != whole: => if False:
    """
    long = run_names(data=tuple(f"file_{i}.txt" for i in range(50)))
    longer = run_names(data=tuple(f"file_{i}.txt" for i in range(51)))
    odd, other = run_names(data=("a b\0?.txt",)), run_names(data=("a b\n*.txt",))
    assert len({long, longer, odd, other}) == 4
    assert long.startswith("data=file_0.txt+file_1.txt") and len(long) == config.NAME_BYTES
    for name in (long, longer, odd, other):
        assert re.fullmatch(r"[\w.,=+@%-]+-[0-9a-f]{8}", name, re.ASCII), name


def run_names(**changes):
    return config.derive_out_dir(Config(**changes)).removeprefix("out/")


def save_config(out_dir, written_at=0, **fields):
    """Write the config.json of a run, and an empty log of this time."""
    folder = Path(out_dir)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json(Config(out_dir=out_dir, **fields)))
    (folder / "metrics.jsonl").write_text("")
    os.utime(folder / "metrics.jsonl", (written_at, written_at))


def test_which_run_a_command_line_names(tmp_path, monkeypatch, capsys):
    """Another defining field is another run. Modes that read a run take the newest one; a missing
    run is an error.

    Break: config.py: if cfg.mode in READ_MODES and not defining and logs: => if False:
    """
    monkeypatch.chdir(tmp_path)
    assert named("--mode sample") == "out/default"
    save_config("out/lr=0.1", 20, lr=0.1)
    save_config("out/default", 10)
    run = "--config out/lr=0.1/config.json"
    assert named(f"{run} --steps 7") == "out/lr=0.1"
    assert named(f"{run} --seed 2") == "out/lr=0.1,seed=2"
    assert named("--mode sample --prompt x") == named("--mode eval") == "out/lr=0.1"
    assert named("--mode eval --val_data x.txt") == "out/lr=0.1"
    save_config("out/val_data=x.txt", 5)
    assert named("--mode eval --val_data x.txt") == "out/val_data=x.txt"
    assert train.cli(["--mode", "eval", "--lr", "0.2"]) == 2
    errors = capsys.readouterr().err
    assert "mode eval: out/lr=0.2/ckpt holds no checkpoint; name the --out_dir" in errors
    Path("out/export").mkdir()
    Path("out/export/config.json").write_text("{}")
    assert named("--mode sample --seed 0") == named("") == "out/default"
    Path("own.json").write_text('{"lr": 0.5}')
    Path("fixed.json").write_text('{"lr": 0.5, "out_dir": "here"}')
    assert named("--config own.json --seed 2") == "out/own,seed=2"
    assert named("--config fixed.json --seed 2") == "here"


def test_a_run_keeps_the_folders_of_its_config_to_itself(tmp_path, monkeypatch):
    """Another run does not inherit --ckpt_dir and --export; a typed preset replaces values.

    Break: config.py: from_file.update(ckpt_dir="", export="") => pass
    """
    monkeypatch.chdir(tmp_path)
    save_config("out/a", ckpt_dir="far", export="hf", lr=0.5)
    same_run = config.parse("--out_dir out/a".split())
    assert (same_run.ckpt_dir, same_run.export, same_run.lr) == ("far", "hf", 0.5)
    Path("b.json").write_text('{"seed": 1}')
    Path("c.json").write_text('{"seed": 1, "branch_from": "out/a@4"}')
    for flags in ("--config out/a/config.json --seed 1", "--branch_from out/a@4 --seed 1",
                  "--branch_from out/a@4 --config b.json", "--config c.json"):
        other = config.parse([*flags.split(), "--export", "own"])
        assert (other.ckpt_dir, other.export, other.lr) == ("", "own", 0.5)
        assert other.out_dir != "out/a"
    os.rename("out/a", "moved")
    moved = config.parse("--config moved/config.json --steps 7".split())
    assert (moved.out_dir, moved.ckpt_dir) == ("moved", "far")
    assert named("--branch_from moved@4 --seed 1") == "out/moved@4,seed=1"
    save_config("out/debug", **config.PRESETS["debug"] | {"steps": 5, "eval_every": 7})
    cfg = config.parse("--config debug --out_dir out/debug".split())
    assert (cfg.steps, cfg.eval_every) == (100, 7)


# ---- a run that continues

def test_the_same_command_resumes_its_run(tiny, capsys, monkeypatch, tmp_path):
    """Also with --width_mult, and with --stop, which is of one launch; a longer run says so.

    Break: train.py: config.to_json(config.without_launch_fields(typed)) => config.to_json(typed)
    """
    monkeypatch.chdir(tmp_path)
    base = dataclasses.asdict(tiny(schedule="linear", eval_every=0, steps=6)) | {"out_dir": ""}
    Path("tiny.json").write_text(config.to_json(Config(**base)))
    command = ["--config", "tiny.json", "--width_mult", "2", "--stop", "3"]
    for _ in range(2):
        assert train.cli(command) == 0
    assert capsys.readouterr().out.startswith("run out/tiny,width_mult=2\n")
    folder = "out/tiny,width_mult=2"
    assert config.load(f"{folder}/config.json").stop == ()
    assert train.cli(["--out_dir", folder]) == 0
    assert rows(folder, "end")[-1]["step"] == 6
    assert train.cli(["--out_dir", folder, "--steps", "12"]) == 0


# ---- any checkpoint, and the best one

def made_up(values):
    """A hook that gives the evaluations of steps 1, 2, ... these values of val_acc."""
    def hook(event, row):
        if event == "eval":
            return row | {"val_acc": values[row["step"] - 1]}

    return hook


def test_the_best_checkpoint(tiny, capsys):
    """At each record the parameters are kept, one checkpoint at a time; a resumed run knows the
    record while its checkpoint is there, and evaluations and later runs read it. An equal value is
    no record, nor is one that is not finite.

    Break: train.py: if best is not None and not metric["is_better"](value, best): => if False:
    """
    kept = dict(keep_best="val_acc", eval_every=1, save_every=0, max_to_keep=0)
    root = Path(tiny().out_dir, "ckpt")
    train.main(tiny(**kept, steps=3), hooks=[made_up([0.1, 0.3, 0.2])])
    assert (ckpt.steps(root / "best"), ckpt.steps(root)) == ([2], [3])
    train.main(tiny(**kept, steps=5), hooks=[made_up([0.1, 0.3, 0.2, math.nan, 0.3])])
    assert ckpt.steps(root / "best") == [2]
    train.main(tiny(**kept, steps=6), hooks=[made_up([0, 0, 0, 0, 0.3, 0.4])])
    assert ckpt.steps(root / "best") == [6]
    logged = {row["step"]: row["val_loss"] for row in rows(tiny().out_dir, "eval")}
    for name, step in (("best", 6), ("3", 3), ("latest", 6)):
        summary = train.main(tiny(mode="eval", checkpoint=name))
        assert (summary["step"], summary["val_loss"]) == (step, logged[step])
    assert ckpt.verify(root, log=lambda _: None) == []
    with pytest.raises(ValueError, match="checkpoint 4: .* it has: save 3, 5, 6; best 6"):
        train.main(tiny(mode="eval", checkpoint="4"))
    best = ckpt.restore(root / "best", 6, {"params": {"embed": np.zeros((256, 32), np.float32)}})
    other = tiny(steps=1, lr=0.0, weight_decay=0.0, out_dir=tiny().out_dir + "2",
                 init_from=(f"{tiny().out_dir}@best",))
    train.main(other)
    np.testing.assert_array_equal(arrays(other.out_dir)["params/embed"], best["params"]["embed"])
    found = re.search(r"(\d+) of \1 parameters from (.*)", capsys.readouterr().out)
    assert found[2] == f"{tiny().out_dir}@best"
    ckpt.delete_after(str(root), 3)
    train.main(tiny(**kept, steps=6), hooks=[made_up([0, 0, 0, 0.25, 0.1, 0.2])])
    assert ckpt.steps(root / "best") == [4]
    summary = train.main(tiny(**kept | {"keep_best": "val_loss"}, steps=7))
    assert (summary["best_val_step"], "best_val_acc" in summary) == (7, False)
    assert "best by val_loss: its best value begins again" in capsys.readouterr().out


# ---- branches

def test_a_branch_continues_the_run_that_it_leaves(tiny):
    """With an equal config it is bit-identical, in a folder of its own, and resumes though the
    other run is gone.

    Break: train.py: "root": root, "step": step, "meta": meta, "is_branch": True, =>
    "root": root, "step": None, "meta": meta, "is_branch": True,
    """
    run = tiny(max_to_keep=0, log_every=3, steps=9, dp=2)
    counts, counts_of_branch = {}, {}
    train.main(run, hooks=[counting(counts)])
    branch = dataclasses.replace(
        run, out_dir=run.out_dir + "_branch", branch_from=f"{run.out_dir}@4")
    train.main(branch, hooks=[stop_by_hook(6), counting({})])
    assert ckpt.steps(Path(branch.out_dir, "ckpt")) == [4, 7]
    assert rows(branch.out_dir, "start")[0]["origin"] == f"the checkpoint {run.out_dir}@4"
    shutil.rmtree(f"{run.out_dir}/ckpt/000000004")
    train.main(branch, hooks=[counting(counts_of_branch)])
    for event in ("before_epoch", "data", "state", "step", "log", "before_eval", "eval"):
        assert counts[event] == counts_of_branch[event], event
    whole, part = losses(run.out_dir), losses(branch.out_dir)
    assert part[0] == [row for row in whole[0] if row[0] > 4] and len(part[0]) == 2
    assert part[1] == [row for row in whole[1] if row[0] > 4] and part[2] == whole[2]
    assert same(arrays(branch.out_dir), arrays(run.out_dir))
    ids = [rows(cfg.out_dir, "start")[0]["run_id"] for cfg in (run, branch)]
    assert ids[0] != ids[1]

    other = dataclasses.replace(run, out_dir=run.out_dir + "_other", lr=1e-3, batch_size=16,
                                branch_from=f"{run.out_dir}@8")
    train.main(other)


def stop_by_hook(step, at="log"):
    def hook(event, row):
        if event == at and row["step"] == step:
            return row | {"stop": "for the test"}
    return hook


def test_a_branch_that_cannot_be(tiny):
    """A run that does not exist, before its flags are missed; a step that is gone, only
    parameters, a step that is not before the last one. None leaves a folder.

    Break: train.py: if cfg.branch_from and not os.path.exists(f"{cfg.out_dir}/config.json"): =>
    if False:
    """
    run = tiny(steps=4, weights_every=3, eval_every=0)
    train.main(run)
    out = run.out_dir
    for change, words in (
            (dict(branch_from=f"{out}_no@2", decay_frac=0.5), "^branch_from .*_no, step 2: .*none"),
            (dict(branch_from=f"{out}@2"), "step 2: .*: save 4; weights 3, 4"),
            (dict(branch_from=f"{out}@3"), "has no .*opt/.*; to start from the parameters"),
            (dict(branch_from=f"{out}@4", steps=4), "must be before the last step, 4; set more")):
        with pytest.raises(ValueError, match=words):
            train.main(tiny(**dict(steps=8, out_dir=f"{out}_new") | change))
        assert not Path(f"{out}_new").exists()


# ---- saves on request

def test_saves_on_request_and_none_at_the_end(tiny, capsys):
    """The file out_dir/save and SIGUSR1 each save once; with --no_save_end only a requested stop
    saves. Step 0 is not saved.

    Break: train.py: if number == signal.SIGUSR1: => if False:
    """
    cfg = tiny(save_every=0, eval_every=0, save_end=False, max_to_keep=0, dp=2)
    root = Path(cfg.out_dir, "ckpt")

    def request(event, value):
        if event == "dispatch" and value["step"] == 2:
            Path(cfg.out_dir, "save").touch()
        if event == "dispatch" and value["step"] == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.2)  # another thread reads the signal

    assert train.main(cfg, [stop_by_hook(0, "start")])["step"] == 0 and not ckpt.steps(root)
    summary = train.main(cfg, hooks=[request])
    assert summary["step"] == 8 and summary["checkpoint"] is None
    saved = ckpt.steps(root)
    assert len(saved) == 2 and 2 <= saved[0] <= 3 and 4 <= saved[1] <= 5
    assert not Path(cfg.out_dir, "save").exists()
    assert re.search(r"done: all 8 steps are done; \d+ s, not saved\n", capsys.readouterr().out)
    stopped = train.main(cfg, hooks=[stop_by_hook(6)])
    assert stopped["step"] == 7 and ckpt.steps(root)[-1] == 7
