# SPDX-License-Identifier: Apache-2.0
"""The recipe chat.py, driven through a real terminal."""
import dataclasses
import json
import os
import re
import select
import subprocess
import sys
import time

import pytest

import data
import train
from conftest import ROOT
from test_data import chat_folder

# A pseudo-terminal around a command: keys come from stdin, the screen goes to stdout.
TERMINAL = ("import os, pty, sys; "
            "sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))")
PROMPT = "\n> "


def start(folder, *flags):
    """Start chat.py in a terminal."""
    env = dict(os.environ, TERM="dumb")
    env["XLA_FLAGS"] = re.sub(r"--xla_force_host\S+", "", env["XLA_FLAGS"])
    command = [sys.executable, str(ROOT / "tests/recipes/chat.py"), *flags]
    return subprocess.Popen([sys.executable, "-c", TERMINAL, *command], cwd=folder, env=env,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def type_in(process, keys):
    process.stdin.write(keys.encode())
    process.stdin.flush()


def read_until(process, end, timeout_s=200):
    """The text that appears up to and with `end`."""
    shown = b""
    until = time.monotonic() + timeout_s
    while not shown.replace(b"\r", b"").endswith(end.encode()):
        ready, _, _ = select.select([process.stdout], [], [], max(0, until - time.monotonic()))
        piece = os.read(process.stdout.fileno(), 1) if ready else b""
        assert piece, f"no {end!r} on the screen: {shown.decode()}"
        shown += piece
    return shown.decode().replace("\r", "")


@pytest.mark.slow
def test_a_conversation_in_the_terminal(tiny, tmp_path):
    """Answers are those of mode sample; Ctrl-C stops one, /reset forgets, Ctrl-D ends.

    Break: tests/recipes/chat.py: "content": answer}) => "content": ""})
    """
    chat_folder(tmp_path / "tok")
    answers = {"sky": "the sky is blue", "low": "lower", "sing": "la " * 99}
    chats = [{"messages": [{"role": "user", "content": question},
                           {"role": "assistant", "content": answer}]}
             for question, answer in answers.items()]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats * 30))
    cfg = tiny(data=(str(tmp_path / "chats.jsonl"),), tokenizer=str(tmp_path / "tok"), steps=40,
               packing="best_fit", seq_len=64, d_model=64, lr=6e-3, eval_every=0,
               save_every=0, log_every=20, sample_tokens=4000, temperature=0.0, sample_every=0)
    train.main(cfg, task=train.TEXT | {"sample": None})

    process = start(tmp_path, "--out_dir", cfg.out_dir)
    opening = read_until(process, PROMPT)
    assert "/reset: a new conversation; /quit or Ctrl-D: end; Ctrl-C: stop" in opening
    shown = []
    for question in ("sky", "low"):
        type_in(process, f"{question}\n")
        echo, _, answer = read_until(process, PROMPT).removesuffix(PROMPT).partition("\n")
        assert echo == question
        shown.append(answer)
    type_in(process, "sing\n")
    warning = re.match(r"sing\n\(the conversation has (\d+) tokens; the model was trained on texts "
                       r"of up to 64\)\n", read_until(process, "la la"))
    type_in(process, "\x03")
    assert read_until(process, PROMPT).endswith(f" ... (stopped){PROMPT}")
    type_in(process, "/reset\n")
    assert read_until(process, PROMPT) == f"/reset\na new conversation{PROMPT}"
    type_in(process, "sky\n")
    assert read_until(process, PROMPT) == f"sky\n{shown[0]}{PROMPT}"
    time.sleep(0.5)  # readline sees a signal only once it waits for a key
    type_in(process, "\x03")
    assert "Ctrl-C: stop an answer" in read_until(process, PROMPT)
    type_in(process, "\x04")
    assert process.wait(60) == 0
    process.stdout.close()
    process.stdin.close()

    assert shown[0] == "the sky is blue"
    turns = [{"role": "user", "content": "sky"}, {"role": "assistant", "content": shown[0]},
             {"role": "user", "content": "low"}]
    last = {"role": "assistant", "content": shown[1]}, {"role": "user", "content": "sing"}
    tokenizer = data.make_cfg_tokenizer(cfg)
    conversation = data.chat_prompt([*turns, *last], None, tokenizer)
    assert int(warning[1]) == len(data.prompt_ids(conversation, tokenizer))
    (tmp_path / "turns.jsonl").write_text(json.dumps({"messages": turns}))
    summary = train.main(dataclasses.replace(
        cfg, mode="sample", prompts=str(tmp_path / "turns.jsonl"), sample_tokens=30))
    assert summary["texts"] == [summary["prompts"][0] + shown[1]]
