# SPDX-License-Identifier: Apache-2.0
"""The documents cannot rot: each command in them runs, each flag and file that they name exists.

A command runs as it stands, in a shell, in a copy of the project's folder with small files under
the names that the documents use. Flags that make the run small are appended to it.
"""
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest

import clicks
import config
import digits
import distill
import dpo
import endless
import grow
import on_ray
import plan
import rl
import step
import train
import tune
from conftest import CACHE_DIR, ROOT
from test_data import chat_folder

pytestmark = pytest.mark.house  # a fork may leave out all of these

DOCUMENTS = ("README.md", "tests/COMMANDS.md", "tests/GUIDE.md")

# A text in backticks that begins with one of these, after NAME=VALUE words, is a command.
PROGRAMS = ("python", "python3", "pip", "printf", "mkdir", "touch", "grep", "srun", "mpirun",
            "kubectl", ".venv/bin/pip")

SHAPE = "--d_model 32 --n_layers 1 --n_heads 4"
SMALL = f"--steps 3 --batch_size 16 --seq_len 32 --eval_batches 1 --sample_tokens 2 {SHAPE}"
# Flags that are appended to a command, by its last script.
FLAGS = {
    "train.py": SMALL,
    "plan.py": SHAPE,
    "check.py": "--only numbers/known-forms --limit 300",
    "digits.py": "--steps 2 --eval_batches 1",
    "rl.py": f"{SMALL} --answer_tokens 9",
    "dpo.py": SMALL,
    "distill.py": SMALL,
    "windows.py": SMALL,
    "endless.py": SMALL,
    "clicks.py": "--stop 2 --eval_batches 1 --tables user=2^8 item=2^8 category=2^8 history=2^8:4",
    "audit.py": "--first 1 --last 2",
    "replay.py": "--step 2",
    "chat.py": "--sample_tokens 2",
    "grow.py": f"{SMALL} --n_layers 2 --grow_at 1",
}

# Flags of train.py whose values name a mode, files, runs or packages.
NAMING_FLAGS = {
    "--mode data", "--mode eval", "--mode export", "--mode plan", "--mode sample", "--branch_from",
    "--checkpoint", "--chat", "--columns", "--config", "--data", "--examples_file", "--export",
    "--help", "--init_from", "--prompts", "--reload_every", "--samples_file", "--stop",
    "--tokenizer", "--track", "--val_data"}

# The config of each program that reads flags as train.py does.
CONFIGS = {
    "train.py": config.Config, "plan.py": plan.PlanConfig, "clicks.py": clicks.ClicksConfig,
    "windows.py": clicks.windows.WindowsConfig,
    "endless.py": endless.EndlessConfig, "digits.py": digits.DigitsConfig,
    "grow.py": grow.GrowConfig,
    "adapter.py": config.Config,
    "distill.py": distill.DistillConfig, "dpo.py": dpo.DpoConfig, "tune.py": tune.SweepConfig,
    "on_ray.py": on_ray.RayConfig, "rl.py": rl.RlConfig}

# The first reason whose pattern is in a command.
SKIPPED = {
    r"^(srun|mpirun|kubectl) |--coordinator": "needs a cluster",
    r"-m venv|requirements\.txt": "the setup block: .ci/run runs it",
    r"^(\S*/)?pip install (?!.*&&)": "only installs packages",
    r"pytest|mutate\.py": "runs the tests",
    r"bench\.py": "takes minutes",
    r"tiktoken:": "tiktoken downloads its vocabulary",
    r"(s3|gs)://": "needs a bucket",
    r"hf://": "downloads from the Hub",
    r"from transformers": "tests/test_hf.py loads what a run exports",
    r"recipes/(rl|clicks|distill|adapter|dpo|chat)\.py": "the tests of that recipe run it",
    r"out/adapter": "tests/test_hf.py reads and continues adapters",
}
# The package that only the extra of a requirement installs.
EXTRAS = {"jax[tpu]": "libtpu", "jax[cuda12]": "jax-cuda12-plugin", "ray[tune]": "ray",
          "lm_eval[hf]": "lm_eval"}


# ---- reading the documents

def read(document):
    path = ROOT / document
    return path.read_text() if path.exists() else ""


def fences(document):
    """[(info string, text)] of the fenced blocks."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```", read(document), re.M | re.S)


def code_spans(document):
    """The texts in backticks outside fenced blocks, where tables write a bar as \\|."""
    text = re.sub(r"^```.*?^```", "", read(document), flags=re.M | re.S)
    return [span.replace("\\|", "|") for span in re.findall(r"`([^`\n]+)`", text)]


def is_command(text):
    words = re.sub(r"^([A-Z_]+=\S+ )+", "", text).split()
    return len(words) > 1 and words[0] in PROGRAMS


def commands_in(document):
    found = []
    for info, text in fences(document):
        if info.split()[:1] == ["sh"]:
            found += text.splitlines()
    return found + [span for span in code_spans(document) if is_command(span)]


# The commands of all documents, each once.
COMMANDS = list(dict.fromkeys(
    command for document in DOCUMENTS for command in commands_in(document)))


def python_files(document):
    """{name: text} of the fenced blocks of Python that begin with `# name.py`."""
    texts = [text for info, text in fences(document) if info == "python"]
    names = [re.match(r"# (\w+\.py)\n", text) for text in texts]
    return {name[1]: text for name, text in zip(names, texts) if name}


def flags_in(text):
    """The flags of this project's programs in a command or another text in backticks."""
    *before, arguments = re.split(r"python \S+\.py ", text)
    if not before and not text.startswith("--"):
        return []
    return re.findall(r"--(?:no_)?([a-z]\w*)", arguments)


def section(document, heading):
    """The text under a heading, up to the next one."""
    _, _, rest = read(document).partition(f"{heading}\n")
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.M)[0]


# ---- running the commands

def reason_to_skip(command):
    for pattern, reason in SKIPPED.items():
        if re.search(pattern, command):
            return reason
    needed = " ".join(re.findall(r"pip install (.*?) &&", command))
    for package in re.sub(r"'|<\S*", "", needed).split():
        try:
            importlib.metadata.version(EXTRAS.get(package, package))
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed"
    return None


def writers_of(text):
    """The commands of the documents that fill the folders that a command or a program reads."""
    paths = re.findall(r"out/\w[\w-]*", text)
    written = {path: command for command in reversed(COMMANDS) for path in outputs_of(command)}
    return {path: written[path] for path in paths
            if path in written and path not in outputs_of(text)}


def kinds_of(command):
    """The programs of a command, and its NAMING_FLAGS; test_fields.py runs the other flags."""
    found = set()
    for part in re.sub(r"pip install .*? && ", "", command).split(" && "):
        script = (re.findall(r"(\w+\.py)\b", part) or [part.split()[0]])[-1]
        found.add(script + " -c" * (" -c " in part))
        if "python train.py" in part:
            found |= {*re.findall(r"--mode \w+|--\w+", part)} & NAMING_FLAGS
    for writer in writers_of(command).values():
        found |= kinds_of(writer)
    return found


def commands_to_run():
    """A few of the commands, of all kinds."""
    kinds = {command: kinds_of(command) for command in COMMANDS if not reason_to_skip(command)}
    left = set().union(*kinds.values())
    chosen = []
    while left:
        chosen.append(max(kinds, key=lambda command: len(kinds[command] & left)))
        left -= kinds[chosen[-1]]
    return chosen


def make_small(command):
    """The command without its installations, and with flags that make its run small."""
    command = re.sub(r"pip install .*? && ", "", command)
    command = make_config_small(command)
    command = command.replace("@400", "@2").replace("--save_every 100", "--save_every 1")
    command = re.sub(r"XLA_FLAGS=(\S+)", r'XLA_FLAGS="\1 $XLA_FLAGS"', command)
    parts = []
    for part in command.split(" && "):
        scripts = re.findall(r"(\w+\.py) ", part + " ")
        flags = FLAGS.get(scripts[-1], "") if scripts and " -c " not in part else ""
        if "--mode export" in part or "--help" in part or "ckpt.py" in part:
            flags = ""
        if scripts == ["train.py"] and "--out_dir" not in part and "--help" not in part:
            out_dir = config.parse(shlex.split(part.partition("train.py")[2])).out_dir
            flags += f" --out_dir '{out_dir}'"  # the flags that are appended are no name
        parts.append(f"{part} {flags}".strip())
    return " && ".join(parts)


def make_config_small(text):
    return text.replace("Config(steps=20", "Config(steps=2, d_model=32, n_layers=1, eval_batches=1")


def outputs_of(command):
    """The folders in out/ that a command fills."""
    flags = r"--out_dir|--export|make_clicks\.py"
    if re.search(r"--mode (eval|sample|export)|(chat|adapter)\.py", command):
        flags = "--export"  # it reads its out_dir
    return re.findall(rf"(?:{flags}) (out/\w[\w-]*)", command)


def run_documented(folder, command):
    """Run a command, and before it those of the documents that fill the folders that it reads."""
    write_folders(folder, command)
    with contextlib.chdir(folder):  # the name of a run depends on the runs that exist
        small = make_small(command)
    for part in small.split(" && "):
        run_shell(folder, part)


def write_folders(folder, text):
    for path, writer in writers_of(text).items():
        if not (folder / path).exists():
            run_documented(folder, writer)


# A call of one script alone, in which only words in single quotes have characters that a shell
# reads. chat.py reads a terminal.
PLAIN_CALL = re.compile(r"python (train\.py|tests/recipes/(?!chat)\w+\.py)"
                        r"((?: +(?:'[^']*'|[\w./:,=+%@-])+)*)")


def run_shell(folder, command):
    """Run a command as a user's shell does, or a plain call in this process, which is faster."""
    env = {"HOME": str(folder.parent / "home"), "PYTHONDONTWRITEBYTECODE": "1",
           "XLA_FLAGS": re.sub(r"--xla_force_host\S+", "", os.environ["XLA_FLAGS"])}
    call = PLAIN_CALL.fullmatch(command)
    if call and "--help" not in command:
        run_here(folder, env["HOME"], call[1], shlex.split(call[2]))
        return
    env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    run = subprocess.run(["bash", "-c", command], cwd=folder, env=os.environ | env, text=True,
                         timeout=300, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT)
    assert run.returncode == 0, f"{command}\nexit code {run.returncode}\n{run.stdout[-3000:]}"


def run_here(folder, home, script, flags):
    """Run a script in this process. Hooks may add to tables of train.py, which are restored."""
    tables = [(table, dict(table)) for table in (step.SCHEDULES, train.TRACKERS)]
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", home)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "argv", [script, *flags])
        try:
            code = 0
            if script == "train.py":
                code = train.cli(flags)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit as e:
            code = e.code
        finally:
            for table, before in tables:
                table.clear()
                table.update(before)
    assert not code, (script, flags)


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """A copy of the project with small data, a run and a model, shared by all workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "documents"
    with open(shared / "documents.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = shared / "unfinished"
            new.mkdir()
            for path in (*ROOT.glob("*.py"), ROOT / "README.md"):
                shutil.copy(path, new)
            shutil.copytree(ROOT / "tests", new / "tests",
                            ignore=shutil.ignore_patterns("__pycache__", "test_*", "*.png"))
            (shared / "home/.cache").mkdir(parents=True)
            (shared / "home/.cache/sixfile").symlink_to(CACHE_DIR)
            chat_folder(new / "tokenizer")
            chat = {"messages": [{"role": "user", "content": "What is 1 + 2?"},
                                 {"role": "assistant", "content": "3"}]}
            for name in ("chats.jsonl", "val.jsonl"):
                (new / name).write_text(400 * (json.dumps(chat) + "\n"))
            for document in DOCUMENTS:
                for name, text in python_files(document).items():
                    (new / name).write_text(text)
            run_shell(new, f"python train.py {SMALL} --steps 2 --save_every 1 "
                           "--out_dir out/default")
            run_shell(new, f"python train.py {SMALL} --tokenizer tokenizer --data config.py "
                           "--export models/Qwen3-0.6B --out_dir exported")
            shutil.rmtree(new / "exported")
            new.rename(folder)
    return folder


@pytest.fixture
def project(filled):
    """A folder to run one command in. Its neighbour `home` holds the caches of all commands."""
    folder = filled.parent / f"project_{os.getpid()}"
    shutil.copytree(filled, folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_to_run(), ids=lambda command: command[:90])
def test_a_command_runs(command, project):
    """Commands of all kinds in the documents end with exit code 0.

    Break: README.md: --hooks my_hooks.py:in_bits => --hooks my_hooks.py:bits
    """
    run_documented(project, command)


@pytest.mark.slow
def test_the_transcript_of_the_readme(project):
    """Typed with a small model: the killed run resumes, and ends with the digests of the other one.
    A hook lets the first launch wait for its end.

    Break: README.md: --out_dir out/straight > straight.log =>
    --out_dir out/straight --seed 1 > straight.log
    """
    (project / "wait.py").write_text(
        "import pathlib, time\n"
        "def wait(event, row):\n"
        "    mark = pathlib.Path('waited')\n"
        "    if event == 'step' and row['step'] == 50 and not mark.exists():\n"
        "        mark.touch()\n"
        "        time.sleep(60)\n")
    text, = [text for info, text in fences("README.md") if info == "console"]
    small = f"{SMALL} --steps 60 --hooks wait.py:wait".replace("--steps 3 ", "")
    typed = [line.removeprefix("$ ").replace("--steps 60", small)
             for line in text.splitlines() if line.startswith("$ ")]
    run_shell(project, "{\n" + "\n".join(typed) + "\n} > transcript")
    *printed, killed, straight = (project / "transcript").read_text().splitlines()
    assert any("from its own checkpoint, at step" in line for line in printed)
    assert killed == straight and killed.count('": "') == 4


def test_each_command_is_legal(tmp_path, monkeypatch):
    """Flags parse, and are legal on some devices; runs in the guide have the names it prints.

    Break: tests/COMMANDS.md: --packing best_fit --seq_len => --packing best --seq_len
    """
    monkeypatch.chdir(tmp_path)
    n_parsed = 0
    for part in " && ".join(COMMANDS).split(" && "):
        call = re.match(r"(?:[A-Z_]+=\S+ )*python (?:\S*/)?(\w+\.py) (--.*)", part)
        if not call or call[1] not in CONFIGS:
            continue
        if re.search(r"--help|--branch_from|--config \S+json|\$", part):
            continue
        cfg = config.parse(shlex.split(call[2]), CONFIGS[call[1]])
        sizes = [size for size in (getattr(cfg, axis) for axis in config.AXES) if size > 0]
        errors = config.text_errors if call[1] in ("train.py", "plan.py") else lambda *args: []
        config.validate(cfg, math.prod(sizes), (), errors)
        n_parsed += 1
    assert n_parsed > 30
    calls = re.findall(r"^\$ python train\.py (.*)\nrun ([^\n,]*(?:,\w+=[^\n,]*)?)",
                       read("tests/GUIDE.md"), re.M)
    assert len(calls) == 6
    for flags, folder in calls:
        assert config.parse(shlex.split(flags)).out_dir == folder, flags


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    name for name in python_files("tests/GUIDE.md") if not name.endswith("_alone.py")])
def test_python_of_the_guide_runs(name, project, monkeypatch, capsys):
    """Each block of Python in the guide runs as it stands, and prints something or is a hook. Those
    of a file alone run in test_copy.py.

    Break: tests/GUIDE.md: params = train.load_run(saved) => params = train.load_run("out/default")
    """
    text = python_files("tests/GUIDE.md")[name]
    write_folders(project, text)
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(project.parent / "home"))
    monkeypatch.setattr(step, "SCHEDULES", dict(step.SCHEDULES))
    monkeypatch.setattr(train.model, "_attend", train.model._attend)
    exec(compile(make_config_small(text), name, "exec"), {"__name__": "__main__"})
    flags = (f"--hooks {name}:", f"--reward {name}:")
    used_by_a_command = any(flag in command for command in COMMANDS for flag in flags)
    assert used_by_a_command or capsys.readouterr().out


def test_the_hook_of_the_readme():
    """The hook adds the loss in bits to each log row, and stops below 2 bits.

    Break: README.md: if row["bits"] < 2: => if row["bits"] < 1:
    """
    names = {}
    exec(python_files("README.md")["my_hooks.py"], names)
    assert names["in_bits"]("eval", {"loss": 1.0}) is None
    assert names["in_bits"]("log", {"loss": 1.0})["stop"] == "good enough"
    row = names["in_bits"]("log", {"loss": 3.0})
    assert row["bits"] == pytest.approx(3 / math.log(2), rel=1e-3) and "stop" not in row


def test_names_exist():
    """Each flag, each file and heading that is linked, and each name in the README's table exists.

    Break: README.md: (tests/GUIDE.md#hooks) => (tests/GUIDE.md#a-hook)
    """
    flags = {"help"}
    for kind in CONFIGS.values():
        flags.update(field.name for field in dataclasses.fields(kind))
    for tool in (*(ROOT / "tests").glob("[!t]*.py"), ROOT / "tests/recipes/audit.py"):
        flags.update(re.findall(r'"--(\w+)"', tool.read_text()))
    missing = []
    for document in (*DOCUMENTS, "tests/RESULTS.md", "tests/LOG.md"):
        for text in commands_in(document) + code_spans(document):
            missing += [f"{document}: --{flag}" for flag in flags_in(text) if flag not in flags]
        written = python_files(document)
        for span in code_spans(document):
            is_path = re.fullmatch(r"(tests/)?(recipes/)?\w+\.(py|md|txt|yaml)", span)
            places = (ROOT / span, ROOT / "tests" / span, ROOT / "tests/recipes" / span)
            if is_path and span not in written and not any(path.exists() for path in places):
                missing.append(f"{document}: {span}")
        for path, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", read(document)):
            target = (ROOT / document).parent / path if path else ROOT / document
            if not target.exists():
                missing.append(f"{document}: {path}")
            elif heading:
                titles = re.findall(r"^#+ (.*)", target.read_text(), re.M)
                anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
                           for title in titles]
                if heading not in anchors:
                    missing.append(f"{document}: {path}#{heading}")
    for row in section("README.md", "## How to change it").splitlines():
        spans = re.findall(r"`([^`]+)`", row)
        sources = [read(span) for span in spans if span.endswith(".py")]
        for name in spans:
            is_name = re.fullmatch(r"[A-Za-z_]\w*", name)
            if is_name and not any(re.search(rf"\b{name}\b", source) for source in sources):
                missing.append(f"README.md, 'How to change it': edit the rows with {name}")
    assert not missing, "\n".join(missing)


def test_lists_are_those_of_the_code():
    """COMMANDS.md lists each preset, and no two commands share a folder.

    Break: tests/COMMANDS.md: `mixtral-8x7b`, => `mixtral-8x22b`,
    """
    row, = re.findall(r"^\| use a preset: (.*?) \|", read("tests/COMMANDS.md"), re.M)
    presets = [*config.PRESETS]
    assert re.findall(r"`(.*?)`", row) == presets, f"COMMANDS.md, 'use a preset': list {presets}"
    folders = [path for command in COMMANDS for path in outputs_of(command)]
    assert len(folders) > 20
    shared = {path for path in folders if folders.count(path) > 1}
    assert not shared, f"give the commands other --out_dir than {shared}"


def test_events_of_a_run_are_in_the_guide(tiny):
    """The list of events has a line for each event that a hook gets in a short run.

    Break: tests/GUIDE.md: - `dispatch`: => - `before_step`:
    """
    seen = set()
    train.main(tiny(steps=4, sample_every=2, sample_tokens=2),
               hooks=[lambda event, value: seen.add(event)])
    listed = re.findall(r"^- `(\w+)`", section("tests/GUIDE.md", "## Hooks"), re.M)
    assert len(listed) == len({*listed}) and len(seen) >= 14
    missing = sorted(seen - {*listed})
    assert not missing, f"GUIDE.md, 'Hooks': add lines for the events {missing}"
