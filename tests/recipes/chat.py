# SPDX-License-Identifier: Apache-2.0
"""Talk to a model in the terminal, in the chat template of its tokenizer.

    python tests/recipes/chat.py --out_dir out/chats
    python tests/recipes/chat.py --init_from models/Qwen3-0.6B --temperature 0.6 --top_p 0.95

The flags are those of train.py: --temperature, --top_k, --top_p, and --sample_tokens, the most
tokens of an answer. Without a chat template the model continues each line as it stands.
"""
import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train  # isort: skip  before JAX, whose memory it sets up
import jax

from train import ckpt, config, data, model, steplib

HELP = "/reset: a new conversation; /quit or Ctrl-D: end; Ctrl-C: stop an answer"


def chat(cfg, hooks=(), task=train.TEXT):
    """Load a model and talk until the input ends; the summary."""
    if not cfg.sample_tokens:
        config.raise_if_errors(["sample_tokens 0: an answer needs at least 1"])
    setup, step, params = train.load_run(cfg, task, hooks)
    cfg = setup["cfg"]
    speaker = {
        "params": params,
        "cfg": cfg,
        "tokenizer": data.make_cfg_tokenizer(cfg),
        "options": steplib.compiler_options(cfg, jax.devices()[0]),
        "session": {},  # the cache of model.stream
    }
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  keys to edit a line
    with jax.set_mesh(setup["mesh"]):
        converse(speaker)
    return {"step": step, "reason": "chat", "exit_code": 0}


def converse(speaker):
    """Read lines, and print an answer to each."""
    tokenizer, cfg = speaker["tokenizer"], speaker["cfg"]
    has_template = bool(tokenizer["chat"] and tokenizer["chat"]())
    if not has_template:
        print(f"The tokenizer {cfg.tokenizer} has no chat template: the model continues each line "
              "as it stands, and forgets it.")
    print(HELP)
    max_len = max_trained_len(cfg)
    messages = []
    n_answers = 0
    is_warned = False
    while True:
        # Read a line.
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{HELP}")
            continue
        command = line.strip()
        if command == "/quit":
            return
        elif command == "/reset":
            messages = []
            print("a new conversation")
            continue
        elif command in ("", "/help"):
            print(HELP)
            continue

        # Make the prompt.
        text = line
        if has_template:
            messages.append({"role": "user", "content": line})
            try:
                text = data.chat_prompt(messages, None, tokenizer, "chat")
            except ValueError as e:
                print(e)
                messages.pop()
                continue
        ids = data.prompt_ids(text, tokenizer)
        if len(ids) > max_len and not is_warned:
            print(f"(the conversation has {len(ids)} tokens; the model was trained on texts of up "
                  f"to {max_len})")
            is_warned = True

        # Print the answer.
        key = jax.random.fold_in(jax.random.key(cfg.seed), n_answers)
        answer = print_answer(speaker, ids, key)
        if has_template:
            messages.append({"role": "assistant", "content": answer})
        n_answers += 1


def print_answer(speaker, ids, key):
    """Print what follows the prompt `ids` token by token, to the end of the turn or to Ctrl-C; the
    text.
    """
    cfg, tokenizer = speaker["cfg"], speaker["tokenizer"]
    stops = tokenizer["stops"] | data.turn_ends(tokenizer)
    # Some tokenizers drop the space at the start of a text: decode the last token before it, too.
    before = ids[-1:]
    n_before = len(tokenizer["decode"](before))
    new = []
    text = ""
    n_shown = 0
    end = f" ... (cut after --sample_tokens {cfg.sample_tokens})"
    tokens = model.stream(speaker["params"], ids, cfg, key, cfg.sample_tokens, speaker["session"],
                          speaker["options"])
    try:
        for token in tokens:
            if token in stops:
                end = ""
                break
            new.append(token)
            text = tokenizer["decode"]([*before, *new])[n_before:]
            if not text.endswith("\ufffd"):  # perhaps a part of a character
                print(train.printable(text[n_shown:]), end="", flush=True)
                n_shown = len(text)
    except KeyboardInterrupt:
        end = " ... (stopped)"
    print(train.printable(text[n_shown:]) + end)
    return text


def max_trained_len(cfg):
    """The number of tokens of the longest text that the model was trained on."""
    for text in cfg.init_from:
        hf = train.read_hf_config(ckpt.parse_source(text)["path"])
        if "max_position_embeddings" in hf:
            return hf["max_position_embeddings"]
    return cfg.seq_len


if __name__ == "__main__":
    sys.exit(train.cli(["--mode", "sample", *sys.argv[1:]], main=chat))
