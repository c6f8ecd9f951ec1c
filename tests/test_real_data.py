# SPDX-License-Identifier: Apache-2.0
"""Data, chats and tokenizers as people have them: each case makes its input, and expects tokens,
labels or a sentence.
"""
import dataclasses
import gzip
import json
import re

import numpy as np
import pytest

import config
import data
import model
import train

# ---- chat templates

# In the form of ten families, with their marks of roles, ends and thoughts. {% generation %} marks
# the answers for transformers; our own labels are found in the same template without these marks.
CHATML_HEAD = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"""
CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
THINK_PROMPT = (
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}")
CALLS = """{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) \
+ '</tool_call>' }}{% endfor %}"""
# Thoughts are kept only after the last question of the user.
LAST_QUESTION = """{% set ns = namespace(last=-1) %}{% for m in messages %}\
{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"""
# The thought of a message: its reasoning_content, or what its content has before </think>.
SPLIT_THOUGHT = """{% set text = m.content or '' %}{% set thought = m.reasoning_content or '' %}\
{% if '</think>' in text %}\
{% set thought = text.split('</think>')[0].split('<think>')[-1] | trim %}\
{% set text = text.split('</think>')[-1] | trim %}{% endif %}"""

FAMILIES = {
    # Qwen 2.5: a system message of its own, tool calls after the content.
    "chatml": "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML_HEAD
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}" + CALLS
    + "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}" + CHATML_PROMPT,
    # Qwen 3: an empty thought in the last answer without one, earlier thoughts are dropped.
    "qwen3": LAST_QUESTION + CHATML_HEAD + "{% if m.role == 'assistant' %}" + SPLIT_THOUGHT
    + "{% generation %}{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ text }}" + CALLS
    + "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}" + CHATML_PROMPT,
    # QwQ, Qwen3-Thinking-2507: the prompt for an answer opens its thought.
    "thinking": LAST_QUESTION + CHATML_HEAD + "{% if m.role == 'assistant' %}" + SPLIT_THOUGHT
    + "{% if loop.index0 > ns.last %}{{ '<think>\n' }}{% generation %}"
    "{{ thought + '\n</think>\n\n' + text }}" + CALLS + "{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{% generation %}{{ text }}" + CALLS + "{{ '<|im_end|>' }}{% endgeneration %}"
    "{% endif %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    + THINK_PROMPT,
    # Nemotron 3: as before, but an answer without a thought closes it at once.
    "closed thought": CHATML_HEAD + "{% if m.role == 'assistant' %}" + SPLIT_THOUGHT
    + "{{ '<think>' }}{% if thought %}{{ '\n' }}{% generation %}{{ thought + '\n</think>' + text }}"
    + CALLS + "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{% generation %}"
    "{{ '</think>' + text }}" + CALLS + "{{ '<|im_end|>' }}{% endgeneration %}{% endif %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + THINK_PROMPT,
    # DeepSeek-R1: no header before a question, all thoughts are dropped, the prompt opens one.
    "deepseek": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}{% elif m.role == 'tool' %}"
    "{{ '<|tool|>' + m.content }}{% else %}{{ '<|Assistant|>' }}{% generation %}"
    "{{ (m.content or '').split('</think>')[-1] }}" + CALLS
    + "{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}",
    # Llama 3: trimmed content, tool calls end in another mark.
    "llama": "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ (m.content or '') | trim }}" + CALLS
    + "{{ '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}{% endgeneration %}{% else %}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    # Mistral: no prompt for an answer; the system message joins the first question.
    "mistral": "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% elif m.role == 'user' %}"
    "{{ '[INST]' + ns.system + m.content + '[/INST]' }}{% set ns.system = '' %}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% else %}"
    "{% generation %}{{ m.content or '' }}" + CALLS
    + "{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
    # Gemma: another name of the role, strict order, the system message joins the first question.
    "gemma": "{{ bos_token }}{% set ns = namespace(system='', n=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% else %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% if m.role == 'user' %}"
    "{{ '<start_of_turn>user\n' + ns.system + m.content | trim + '<end_of_turn>\n' }}"
    "{% set ns.system = '' %}{% else %}{{ '<start_of_turn>model\n' }}{% generation %}"
    "{{ m.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    # GLM-4.5: a message has no end of its own, earlier thoughts are empty.
    "glm": LAST_QUESTION + "{{ '[gMASK]' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' }}"
    "{% if m.role == 'assistant' %}" + SPLIT_THOUGHT + "{% generation %}"
    "{{ '<think>' + (thought if loop.index0 > ns.last else '') + '</think>\n' + text }}" + CALLS
    + "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    # gpt-oss: the last answer ends in another token; thoughts are messages, earlier ones dropped.
    "gpt-oss": LAST_QUESTION + "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|start|>assistant' }}{% generation %}{% if m.reasoning_content and "
    "loop.index0 > ns.last and (m.tool_calls or loop.last) %}"
    "{{ '<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|><|start|>assistant' }}"
    "{% endif %}{% if m.tool_calls %}{{ '<|channel|>commentary<|message|>' }}" + CALLS
    + "{{ '<|call|>' }}{% else %}{{ '<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endgeneration %}{% else %}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
    # Phi-4: a token for each role; another one ends the whole text.
    "phi": "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content or '' }}" + CALLS + "{{ '<|end|>' }}{% if loop.last %}"
    "{{ eos_token }}{% endif %}{% endgeneration %}{% else %}{{ m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
}
SPECIAL_TOKENS = (
    "<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<|User|>", "<|Assistant|>", "<|tool|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "[INST]", "[/INST]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>", "[gMASK]", "<|user|>", "<|assistant|>",
    "<|system|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


def said(role, content, **more):
    return {"role": role, "content": content} | more


CALL = [{"type": "function", "function": {"name": "scale", "arguments": {"of": "low"}}}]
CONVERSATIONS = {
    "one question": [said("user", "low?"), said("assistant", "lower <b>or</b> lowest.")],
    "system and questions": [
        said("system", "be low"), said("user", "low"), said("assistant", "<low"),
        said("user", "low"), said("assistant", "low "), said("user", "lowest")],
    "thoughts": [
        said("user", "low?"), said("assistant", "lower", reasoning_content="so low"),
        said("user", "more?"), said("assistant", "<lowest>", reasoning_content="lower still")],
    "thoughts in the content": [
        said("user", "low?"), said("assistant", "<think>\nso low\n</think>\n\nlower"),
        said("user", "more?"), said("assistant", "<think>\nstill\n</think>\n\nlowest")],
    "tools": [
        said("user", "low?"),
        said("assistant", "", reasoning_content="weigh it", tool_calls=CALL),
        said("tool", "3"), said("assistant", "It is 3.", reasoning_content="3 then"),
        said("user", "lower?"),
        said("assistant", "", reasoning_content="again", tool_calls=CALL),
        said("tool", "2"), said("assistant", "It is 2.", reasoning_content="2 then")],
}


def make_bpe(special_tokens=SPECIAL_TOKENS):
    """Train a byte-level tokenizer with the real library on one line."""
    tokenizers = pytest.importorskip("tokenizers")
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    tok.train_from_iterator(["low lower lowest"] * 9, tokenizers.trainers.BpeTrainer(
        vocab_size=340, special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return tok


def save_folder(path, template=None, tok=None, **settings):
    """Write a tokenizer's folder by hand; the path as text."""
    path.mkdir(parents=True, exist_ok=True)
    (tok or make_bpe()).save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>"} | settings
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return str(path)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokenized(path, tokenizer, tmp_path, columns=(), **seq_format):
    """The shard of a file, and its documents as [(ids, is label)]."""
    shard = data.tokenize_files([path], tokenizer, tmp_path / "cache", columns)
    documents = []
    for first, last in shard["documents"].tolist():
        ids = shard["tokens"][first:last]
        ignored = np.zeros(len(ids), np.uint8)
        if "ignored" in shard:
            ignored = shard["ignored"][first:last]
        documents.append((ids.tolist(), (ignored == 0).tolist()))
    return shard, documents


def shown(ids, is_label, tokenizer):
    """The text of a document, labels in brackets: for messages."""
    return data._show_labels(np.array(ids), 1 - np.array(is_label, np.uint8), tokenizer)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_those_of_transformers(family, name, tmp_path):
    """Without marks in the template the labels are those that transformers takes from its marks.

    Break: data.py: n = len(other_mark) => n = 0
    """
    transformers = pytest.importorskip("transformers")
    messages = CONVERSATIONS[name]
    if family == "gemma" and name == "tools":
        messages = CONVERSATIONS["thoughts"][:3]  # its template refuses tools
    template = FAMILIES[family]
    tok = make_bpe()
    folder = save_folder(tmp_path / "t", re.sub("{% (end)?generation %}", "", template), tok,
                         bos_token="<s>")
    library = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token="<|endoftext|>", bos_token="<s>", chat_template=template)
    wanted = library.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True)

    tokenizer = data.make_tokenizer(folder)
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages}])
    _, ((ids, is_label),) = tokenized(path, tokenizer, tmp_path)
    assert ids == wanted["input_ids"]
    mask = [bool(x) for x in wanted["assistant_masks"]]
    assert is_label == mask, (shown(ids, is_label, tokenizer), shown(ids, mask, tokenizer))
