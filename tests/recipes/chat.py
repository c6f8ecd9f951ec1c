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
import jax.numpy as jnp
import numpy as np

from train import ckpt, config, data, model, steplib

HELP = "/reset: a new conversation; /quit or Ctrl-D: end; Ctrl-C: stop an answer"


def chat(cfg, hooks=(), task=train.TEXT):
    """Load a model and talk until the input ends; the summary."""
    if not cfg.sample_tokens:
        config.raise_if_errors(["sample_tokens 0: an answer needs at least 1"])
    run, step, params = train.load_run(cfg, task, hooks)
    cfg = run.cfg
    speaker = {
        "params": params,
        "cfg": cfg,
        "tokenizer": data.make_cfg_tokenizer(cfg),
        "options": steplib.compiler_options(cfg, jax.devices()[0]),
        "session": {},  # the cache of stream
    }
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  keys to edit a line
    with jax.set_mesh(run.mesh):
        converse(speaker)
    return {"step": step, "reason": "chat", "exit_code": 0}


def converse(speaker):
    """Read lines, and print an answer to each."""
    tokenizer, cfg = speaker["tokenizer"], speaker["cfg"]
    has_template = bool(tokenizer["chat"]())
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
                text = data.chat_prompt(messages, None, tokenizer)
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
    tokens = stream(speaker["params"], ids, cfg, key, cfg.sample_tokens, speaker["session"],
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


def stream(params, tokens, cfg, key, n_new, session=None, compiler_options=None):
    """Yield the n_new ids that `generate` draws after the ids `tokens` (at least 1), one by one.

    session: a dict that keeps the KV cache between calls, {} at first. Ids that continue those of
    the previous call, as in a conversation, are then computed from there on. Prompts and caches are
    padded to powers of two, so that a few programs serve all lengths.
    """
    if session is None:
        session = {}
    prefill = jax.jit(prefill_rest, static_argnames=("cfg", "n_cached"),
                      compiler_options=compiler_options)
    decode = jax.jit(model.decode, static_argnames="cfg", donate_argnames="cache",
                     compiler_options=compiler_options)

    # Compute the tokens that are not in the cache. The last one always: it gives the logits.
    n_known = 0
    n_cached = power_of_two(len(tokens) + n_new)
    cache = session.get("cache")
    if cache:
        n_known = n_equal(session["tokens"], tokens[:-1])
        n_cached = max(n_cached, cache["k"].shape[3])
    rest = tokens[n_known:]
    padding = [0] * (power_of_two(len(rest)) - len(rest))
    rest_1T = np.int32([[*rest, *padding]])
    logits_1V, cache = prefill(params, rest_1T, np.int32([len(rest)]), np.int32(n_known), cache,
                               cfg=cfg, n_cached=n_cached)
    session.update(tokens=list(tokens), cache=cache)

    lengths_1 = np.int32([len(tokens)])
    for i in range(n_new):
        cache = session.pop("cache")  # `decode` overwrites it, and may be interrupted
        token_1, logits_1V, cache = decode(
            params, logits_1V, cache, lengths_1, np.int32(i), cfg=cfg, key=key)
        token = int(token_1[0])
        model.check_tokens(token)
        session["tokens"].append(token)
        session["cache"] = cache
        yield token


def prefill_rest(params, rest_1T, lengths_1, n_known, cache, cfg, n_cached):
    """model.prefill of the tokens after the n_known in the cache (None: an empty one), which grows
    to n_cached positions. Padding writes beyond the tokens: later tokens overwrite it.
    """
    if cache is None:
        cache = model.empty_cache(1, n_cached, 0, cfg)
    n_more = n_cached - cache["k"].shape[3]
    growth = ((0, 0), (0, 0), (0, 0), (0, n_more), (0, 0))
    cache = {name: jnp.pad(x_LBKSH, growth) for name, x_LBKSH in cache.items()}
    positions_1T = n_known + jax.lax.broadcasted_iota(int, rest_1T.shape, 1)
    batch = {"tokens": rest_1T, "positions": positions_1T}
    return model.prefill(params, batch, lengths_1, cache, cfg)


def n_equal(first, second):
    """How many items two lists have in common at their beginning."""
    n = 0
    for a, b in zip(first, second):
        if a != b:
            break
        n += 1
    return n


def power_of_two(n):
    """The smallest power of two, at least 16, that is not below n."""
    return max(16, 1 << (n - 1).bit_length())


def max_trained_len(cfg):
    """The number of tokens of the longest text that the model was trained on."""
    for text in cfg.init_from:
        hf = train.read_hf_config(ckpt.parse_source(text)["path"])
        if "max_position_embeddings" in hf:
            return hf["max_position_embeddings"]
    return cfg.seq_len


if __name__ == "__main__":
    sys.exit(train.cli(["--mode", "sample", *sys.argv[1:]], main=chat))
