# SPDX-License-Identifier: Apache-2.0
"""Compare this project with other libraries, in speed and memory.

The rows are steps, launches, checkpoints, safetensors, data loaders, tokens, chats and clicks.

    python tests/bench.py [--only WORD ...] [--runs 5]

Each contestant runs in a separate process. In each round every contestant is measured once, while
the others wait. The table shows medians over the rounds, and the median of the rounds' ratios.
tests/requirements-bench.txt lists the other libraries; a library that is not installed is named and
skipped.
"""
import argparse
import contextlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# Functions import what they measure: a process that measures a peer must not import train.py, which
# configures malloc.
PACKAGES = ("jax", "torch", "orbax-checkpoint", "grain")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/recipes")]

SHAPES = {
    "char": dict(n_layers=6, d_model=384, n_heads=6, d_ff=1024, seq_len=256, batch_size=12,
                 vocab_size=65),
    "30M": dict(n_layers=6, d_model=384, n_heads=6, d_ff=1024, seq_len=512, batch_size=4,
                vocab_size=50304),
    "124M": dict(n_layers=12, d_model=768, n_heads=12, d_ff=2048, seq_len=1024, batch_size=1,
                 vocab_size=50304),
}
SIZES = ("n_layers", "d_model", "n_heads", "vocab_size", "seq_len", "batch_size")


def rates(step, tokens):
    """Yield, again and again, the median tokens per second of at least two steps and one second.

    step() returns when its step is done.
    """
    step(), step()
    while True:
        times = []
        while len(times) < 2 or sum(times) < 1:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        yield tokens / statistics.median(times)


def cached(name, make):
    """A file or folder that make(path) writes, for all processes and later runs."""
    path = Path(tempfile.gettempdir()) / f"sixfile_bench_{name}"
    if not path.exists():
        make(path)
    return path


def results_of(name, *args):
    """Yield the results of a function of this file, run in another process, which waits between
    results. When it ends, start a new process. RuntimeError if it fails.
    """
    command = [sys.executable, __file__, "--one", name, *args]
    while True:
        with (tempfile.TemporaryFile("w+") as errors,
              subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=errors, text=True, cwd=ROOT) as run):
            for line in run.stdout:
                yield json.loads(line)
                with contextlib.suppress(BrokenPipeError):  # it was killed
                    os.write(run.stdin.fileno(), b"\n")
            if run.wait():
                errors.seek(0)
                lines = errors.read().strip().splitlines() or ["failed"]
                raise RuntimeError(f"{name}: {lines[-1]}")


def serve(name, args):
    """Print each result of the function as a line of JSON; after each, wait for a line of stdin."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    result = globals()[name](*args)
    for value in result if isinstance(result, Iterator) else [result]:
        print(json.dumps(value), file=results, flush=True)
        if not sys.stdin.readline():
            return


# ---- a training step

def our_run(dtype, shape):
    """train.setup_run of a shape on one device; bfloat16 is "mixed" on a CPU, as in autocast."""
    import train  # isort: skip  import before JAX has threads
    import jax
    device = jax.devices()[0]
    if dtype == "bfloat16" and device.platform == "cpu":
        dtype = "mixed"
    cfg = train.config.Config(**SHAPES[shape], optimizer="adamw", dtype=dtype, out_dir="", fsdp=1,
                              sample_tokens=0, val_frac=0.0)
    return train.setup_run(cfg, devices=[device])


def step_ours(dtype, shape):
    run = our_run(dtype, shape)
    cfg = run.cfg
    rows = np.random.default_rng(0).integers(
        0, cfg.vocab_size, (cfg.batch_size, cfg.seq_len + 1)).astype(np.int32)
    return our_rates(run, [{"tokens": rows[:, :-1], "labels": rows[:, 1:]}], rows[:, 1:].size)


def our_rates(run, batches, tokens):
    """`rates` of the compiled step of a run, on batches one after the other."""
    import jax

    import train
    programs = train.steplib.compile_steps(train.steplib.lower_steps(*train.step_args(run)))
    state = programs["init"](jax.random.key(0))
    shardings = {name: x.sharding for name, x in run.batch.items()}
    batches = itertools.cycle(batches)

    def update():
        nonlocal state
        batch = jax.device_put(next(batches), shardings)
        state, metrics = programs["train_step"](state, batch, np.float32(0.01))
        jax.block_until_ready(metrics)

    return rates(update, tokens)


def torch_train_step(sizes, dtype, compiled):
    """(step(), tokens per step) of a PyTorch GPT with nanoGPT's choices; sizes: keys SIZES."""
    import torch
    import torch.nn.functional as F
    L, D, N, V, T, B = (sizes[k] for k in SIZES)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    def make(*shape, std=0.02):
        return (std * torch.randn(*shape, device=device)).requires_grad_()

    def ones():
        return torch.ones(D, device=device, requires_grad=True)

    embed, positions, last = make(V, D), make(T, D), ones()
    small = 0.02 / math.sqrt(2 * L)
    layers = [dict(n1=ones(), qkv=make(3 * D, D), o=make(D, D, std=small),
                   n2=ones(), up=make(4 * D, D), down=make(D, 4 * D, std=small)) for _ in range(L)]
    params = [embed, positions, last, *(p for w in layers for p in w.values())]
    groups = [{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), fused=device == "cuda")

    def loss_fn(tokens, labels):
        x = F.embedding(tokens, embed) + positions
        for w in layers:
            heads = F.linear(F.layer_norm(x, (D,), w["n1"]), w["qkv"]).split(D, dim=2)
            q, k, v = (h.view(B, T, N, D // N).transpose(1, 2) for h in heads)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(a.transpose(1, 2).reshape(B, T, D), w["o"])
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (D,), w["n2"]), w["up"])), w["down"])
        logits = F.linear(F.layer_norm(x, (D,), last), embed)
        return F.cross_entropy(logits.view(-1, V).float(), labels.reshape(-1))

    if compiled:
        loss_fn = torch.compile(loss_fn)
    rows = torch.randint(0, V, (B, T + 1), device=device)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def update():
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = loss_fn(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return update, B * T


def step_torch(dtype, shape, compiled=""):
    return rates(*torch_train_step(SHAPES[shape], dtype, bool(compiled)))


# ---- launch: from the command to the end of the first step

def seconds_until(words, *command):
    began = time.perf_counter()
    run = subprocess.Popen([sys.executable, *map(str, command)], stdin=subprocess.DEVNULL,
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        for line in run.stdout:
            if words in line:
                return time.perf_counter() - began
    finally:
        run.kill()
        run.wait()
    raise RuntimeError(f"{command} ended before it printed {words!r}")


def start_ours(programs):
    """programs: "cold", all are compiled, or "warm", they are read from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        def start(cache_dir):
            sizes = [w for name in ("n_layers", "d_model", "n_heads", "d_ff", "seq_len",
                                    "batch_size") for w in (f"--{name}", SHAPES["char"][name])]
            return seconds_until(
                "step      1", ROOT / "train.py", "--out_dir", f"{folder}/out", "--log_every", 1,
                "--cache_dir", cache_dir, "--optimizer", "adamw", "--resume", "overwrite", *sizes)

        return start(cached("cache", start) if programs == "warm" else f"{folder}/cache")


def start_torch(compiled=""):
    return seconds_until("first step", __file__, "--one", "first_torch", compiled)


def first_torch(compiled):
    torch_train_step(SHAPES["char"], "float32", bool(compiled))[0]()
    return "first step"


# ---- checkpoints: a state of 124M parameters and two moments

def state_like():
    """Return {name: shape and dtype} of 124M parameters and two moments, on one device."""
    import train  # noqa: F401  isort: skip  configures malloc as in every run
    import jax
    shapes = [(50304, 768), (12, 2048, 768)]
    shapes += [(12, 768, n) for n in (768, 768, 768, 768, 2048, 2048)]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {f"{kind}/{i}": jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)
            for kind in ("params", "mu", "nu") for i, shape in enumerate(shapes)}


def calls_of(peer, folder):
    """(save, which returns once training may continue; wait for the disk; restore) of a peer."""
    if peer == "orbax":
        import orbax.checkpoint as ocp
        checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        path = Path(folder) / "1"
        return (lambda state: checkpointer.save(path, args=ocp.args.StandardSave(state)),
                lambda _: checkpointer.wait_until_finished(),
                lambda like: checkpointer.restore(path, args=ocp.args.StandardRestore(like)))
    import ckpt
    return (lambda state: ckpt.save(folder, 1, state), ckpt.wait,
            lambda like: ckpt.restore(folder, 1, like))


def save_times(peer, folder):
    """Return the seconds that a save blocks and takes."""
    import jax
    rng = np.random.default_rng(0)
    state = {name: jax.device_put(rng.random(x.shape, np.float32), x.sharding)
             for name, x in state_like().items()}
    save, wait, _ = calls_of(peer, folder)
    began = time.perf_counter()
    pending = save(state)
    blocked_s = time.perf_counter() - began
    wait(pending)
    return {"blocked s": blocked_s, "committed s": time.perf_counter() - began}


def ckpt_times(peer):
    """Return `save_times` of another process, and the seconds of a restore into new memory."""
    import jax
    (ROOT / "out").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "out") as folder:  # on the project's disk
        saved = next(results_of("save_times", peer, folder))
        like = state_like()
        _, _, restore = calls_of(peer, folder)
        began = time.perf_counter()
        jax.block_until_ready(restore(like))
        return saved | {"restored s": time.perf_counter() - began}


# ---- safetensors: 1.2 GB in Llama's shapes, in the page cache

LLAMA_TENSORS = {"wq": (2048, 2048), "wk": (512, 2048), "wv": (512, 2048), "wo": (2048, 2048),
                 "w_gate": (5632, 2048), "w_up": (5632, 2048), "w_down": (2048, 5632)}


def make_tensors(folder):
    """Write a float32 file with five layers of LLAMA_TENSORS and an embedding."""
    import ckpt
    folder, rng = Path(folder), np.random.default_rng(0)
    folder.mkdir()
    shapes = {f"{i}.{name}": shape for i in range(5) for name, shape in LLAMA_TENSORS.items()}
    shapes["embed"] = (32000, 2048)
    tensors = ((name, rng.random(shape, np.float32)) for name, shape in shapes.items())
    ckpt.write_safetensors(folder / "model.safetensors", shapes, "float32", tensors)


def tensors_rate(read):
    """Return the GB per second of read(folder); another process writes the files."""
    folder = cached("tensors", lambda path: next(results_of("make_tensors", str(path))))
    n_bytes = sum(len(path.read_bytes()) for path in folder.glob("*.safetensors"))
    began = time.perf_counter()
    arrays = read(folder)
    assert arrays
    return n_bytes / (time.perf_counter() - began) / 1e9


def tensors_ours():
    """Read into stacked and transposed arrays on the device."""
    import jax
    import jax.numpy as jnp

    import ckpt
    sharding = jnp.zeros(()).sharding
    wanted = {name: ({(i,): f"{i}.{name}" for i in range(5)}, True) for name in LLAMA_TENSORS}
    like = {name: jax.ShapeDtypeStruct((5, n_in, n_out), jnp.float32, sharding=sharding)
            for name, (n_out, n_in) in LLAMA_TENSORS.items()}
    wanted["embed"] = {(): "embed"}, False
    like["embed"] = jax.ShapeDtypeStruct((32000, 2048), jnp.float32, sharding=sharding)
    return tensors_rate(lambda folder: jax.block_until_ready(
        ckpt.read_tensors(ckpt.open_tensors(folder), wanted, like)))


def tensors_load_file():
    """Read into NumPy arrays without a change."""
    from safetensors.numpy import load_file
    return tensors_rate(lambda folder: [load_file(p) for p in folder.glob("*.safetensors")])


# ---- loaders: batches of 12 x 1024 from 100M uint16 tokens on disk

def token_file():
    return cached("tokens.bin", lambda path: np.random.default_rng(0).integers(
        0, 50304, 10**8, dtype=np.uint16).tofile(path))


def loader_rate(batch):
    """Return the million tokens per second of batch(i), measured for four seconds."""
    batch(0)
    n, began = 0, time.perf_counter()
    while time.perf_counter() - began < 4:
        n += 1
        batch(n)
    return n * 12 * 1024 / (time.perf_counter() - began) / 1e6


def loader_ours():
    import data
    source = data.open_dataset([token_file()], data.make_tokenizer("bytes"), {"seq_len": 1024})
    return loader_rate(lambda i: data.batch_at(source, i, 12))


def loader_nanogpt():
    """Load as nanoGPT does: torch.randint, a stack of slices, int64."""
    import torch

    def batch(_):
        tokens = np.memmap(token_file(), np.uint16, "r")
        starts = torch.randint(len(tokens) - 1024, (12,))
        return [torch.stack([torch.from_numpy(tokens[i + shift : i + shift + 1024].astype(np.int64))
                             for i in starts]) for shift in (0, 1)]

    return loader_rate(batch)


def loader_grain():
    import grain.python as grain
    tokens = np.memmap(token_file(), np.uint16, "r")
    windows = grain.MapDataset.range((len(tokens) - 1) // 1024).shuffle(seed=0)
    rows = windows.map(lambda i: tokens[i * 1024 : i * 1024 + 1025].astype(np.int32))
    batches = rows.repeat().batch(12)
    return loader_rate(lambda i: batches[i])


# ---- text to tokens: 100 MB of Python's standard library

def text_file():
    def make(path):
        import data
        text = b"".join(p.read_bytes() for p in data._standard_library())
        path.write_bytes(text * (10**8 // len(text)))

    return cached("text.txt", make)


def bpe_file():
    """Return the file of a BPE tokenizer with 8,192 tokens, trained on the first 10 MB of text."""
    def make(path):
        from tokenizers import ByteLevelBPETokenizer
        tok = ByteLevelBPETokenizer()
        tok.train_from_iterator([text_file().read_text()[: 10**7]], 8192,
                                special_tokens=["<|endoftext|>"])
        tok.save(str(path))

    return str(cached("bpe.json", make))


def prepare_ours(tokenizer):
    """Return the MB of text per second, from text files to token files."""
    import data
    tok = data.make_tokenizer(bpe_file() if tokenizer == "bpe" else tokenizer)
    path = text_file()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        data.tokenize_files([path], tok, folder)
        return path.stat().st_size / (time.perf_counter() - began) / 1e6


def prepare_library():
    """Only call tokenizers' encode_batch on documents of 4,000 characters in memory."""
    from tokenizers import Tokenizer
    tok, text = Tokenizer.from_file(bpe_file()), text_file().read_text()
    texts = [text[i : i + 4000] for i in range(0, len(text), 4000)]
    began = time.perf_counter()
    for i in range(0, len(texts), 1024):
        tok.encode_batch(texts[i : i + 1024], add_special_tokens=False)
    return len(text) / (time.perf_counter() - began) / 1e6


# ---- chats to tokens and labels

MARKS = "{% generation %}", "{% endgeneration %}"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def chats_folder(template):
    """A folder with a tokenizer and 1,500 chats; template: "marked" or "unmarked" answers."""
    def make(folder):
        from tokenizers import Tokenizer
        folder.mkdir()
        tok = Tokenizer.from_file(bpe_file())
        tok.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tok.save(str(folder / "tokenizer.json"))
        text = CHAT_TEMPLATE
        for mark in MARKS:
            text = text if template == "marked" else text.replace(mark, "")
        settings = {"eos_token": "<|endoftext|>", "chat_template": text}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        words = text_file().read_text()[: 10**7].split()
        lines = []
        for i in range(1500):
            messages = []
            for at in range(750 * i, 750 * (i + 1), 250):
                question, answer = words[at : at + 50], words[at + 50 : at + 250]
                messages.append({"role": "user", "content": " ".join(question)})
                messages.append({"role": "assistant", "content": " ".join(answer)})
            lines.append(json.dumps({"messages": messages}) + "\n")
        (folder / "chats.jsonl").write_text("".join(lines))

    return cached(f"chats_{template}", make)


def chats_ours():
    """Return the chats per second, from a file of chats to a token file with labels."""
    folder = chats_folder("unmarked")
    import data
    tok = data.make_tokenizer(str(folder))
    tok["chat"]()
    with tempfile.TemporaryDirectory() as other:
        began = time.perf_counter()
        data.tokenize_files([folder / "chats.jsonl"], tok, Path(other, "cache"))
        return 1500 / (time.perf_counter() - began)


def chats_transformers():
    """The same by transformers' apply_chat_template, one chat after the other, in memory."""
    import transformers
    folder = chats_folder("marked")
    tok = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    began = time.perf_counter()
    for line in (folder / "chats.jsonl").open():
        tok.apply_chat_template(json.loads(line)["messages"], return_dict=True,
                                return_assistant_tokens_mask=True)
    return 1500 / (time.perf_counter() - began)


# ---- a click model whose steps change few rows

def click_config(rows=10**6, **changes):
    import clicks
    tables = "user=100000", f"item={rows}", "category=1000", f"history={rows}:4"
    return clicks.ClicksConfig(tables=tables, dtype="float32", **changes)


def click_batches(cfg, n=20):
    """Return batches with ids by Zipf's law; 20% of the examples are clicked."""
    import clicks
    import data
    random, batches = np.random.default_rng(0), []
    for _ in range(n):
        batch = {"label": random.random(cfg.batch_size) < 0.2,
                 "dense": random.normal(size=(cfg.batch_size, cfg.n_dense))}
        for name, (rows, values) in clicks.sizes(cfg).items():
            ids = random.zipf(1.2, (cfg.batch_size, values)).astype(np.uint64)
            batch[name] = data.hash64(ids, np.uint64(0)) % np.uint64(rows)
        batch["group"] = np.zeros((cfg.batch_size, 2))
        batches.append({name: batch[name].astype(dtype)
                        for name, (_, dtype, _) in clicks.batch_shapes(cfg).items()})
    return batches


def clicks_ours(rows=10**6):
    import clicks
    import train
    cfg = click_config(int(rows))
    run = train.setup_run(cfg, clicks.TASK, hooks=[clicks.sparse_rows])
    return our_rates(run, click_batches(cfg), cfg.batch_size)


def torch_clicks(cfg, params):
    """Return a function batch -> loss that trains the same model from the same parameters."""
    import torch

    import clicks
    tables = {}
    for name in clicks.sizes(cfg):
        rows = np.concatenate([params[f"rows.{name}"], np.zeros((1, cfg.dim), np.float32)])
        tables[name] = torch.nn.EmbeddingBag.from_pretrained(
            torch.from_numpy(rows), freeze=False, mode="sum", sparse=True, padding_idx=-1)
    tower = {name: torch.tensor(x, requires_grad=True)
             for name, x in params.items() if name.startswith("tower")}
    betas = dict(betas=(cfg.b1, cfg.b2), eps=cfg.eps, lr=cfg.lr)
    optimizers = [torch.optim.SparseAdam([t.weight for t in tables.values()], **betas),
                  torch.optim.Adam(tower.values(), **betas)]

    def update(batch):
        features = [torch.from_numpy(batch["dense"])]
        features += [tables[name](torch.from_numpy(batch[name])) for name in tables]
        hidden = torch.relu(torch.cat(features, 1) @ tower["tower.w1"] + tower["tower.b1"])
        logit = sum(x[:, 0] for x in features[1:]) + hidden @ tower["tower.w2"]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logit, torch.from_numpy(batch["label"]).float())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return float(loss.detach())

    return update


def clicks_torch(rows=10**6):
    import clicks
    cfg = click_config(int(rows))
    random = np.random.default_rng(0)
    params = {name: random.normal(0, 0.01, row["shape"]).astype(np.float32)
              for name, row in clicks.table(cfg).items()}
    update, batches = torch_clicks(cfg, params), itertools.cycle(click_batches(cfg))
    return rates(lambda: update(next(batches)), cfg.batch_size)


# ---- the table

# Other libraries have no "mixed" and compute in float32 there.
STEPS = {}
for shape, dtype in itertools.product(SHAPES, ("float32", "bfloat16", "mixed")):
    peer = f"{dtype.replace('mixed', 'float32')} {shape}"
    STEPS[f"step {dtype} {shape}"] = ("tokens/s", True, {
        "ours": f"step_ours {dtype} {shape}", "torch": f"step_torch {peer}",
        "torch.compile": f"step_torch {peer} compiled"})
ROWS = STEPS | {  # name: (unit, whether more is better, {contestant: function and arguments})
    "start cold": ("s", False, {"ours": "start_ours cold", "torch": "start_torch",
                                "torch.compile": "start_torch compiled"}),
    "start warm": ("s", False, {"ours": "start_ours warm", "torch": "start_torch"}),
    "ckpt": ("", False, {"ours": "ckpt_times ours", "orbax": "ckpt_times orbax"}),
    "safetensors": ("GB/s", True, {"ours": "tensors_ours", "load_file": "tensors_load_file"}),
    "loader": ("Mtokens/s", True, {"ours": "loader_ours", "nanoGPT": "loader_nanogpt",
                                   "grain": "loader_grain"}),
    "prepare bytes": ("MB/s", True, {"ours": "prepare_ours bytes"}),
    "prepare BPE": ("MB/s", True, {"ours": "prepare_ours bpe", "library": "prepare_library"}),
    "chats": ("chats/s", True, {"ours": "chats_ours", "transformers": "chats_transformers"}),
    "clicks": ("examples/s", True, {"ours": "clicks_ours", "torch": "clicks_torch"}),
}


def compare(name, runs):
    """Print the medians of a row, and the medians of the rounds' ratios."""
    unit, more, contestants = ROWS[name]
    values = {who: {} for who in contestants}
    results = {who: results_of(*call.split()) for who, call in contestants.items()}
    order = list(contestants)
    for _ in range(runs):
        for who in list(order):
            try:
                value = next(results[who])
            except RuntimeError as e:
                print(f"  {e}", file=sys.stderr)
                order.remove(who)
                continue
            parts = value if isinstance(value, dict) else {"": value}
            for part, x in parts.items():
                values[who].setdefault(part, []).append(x)
        order.reverse()  # so that nobody always runs after the same other one
    for part, ours in values["ours"].items():
        words = [f"ours {statistics.median(ours):,.4g} {unit}"]
        for who, parts in values.items():
            if who != "ours" and part in parts:
                ratio = statistics.median(
                    a / b if more else b / a for a, b in zip(ours, parts[part]))
                words.append(f"{who} {statistics.median(parts[part]):,.4g} (ours {ratio:.2f}x)")
        print(f"{name} {part}".strip() + ": " + ", ".join(words), flush=True)


def hardware():
    """Return one line with processor, cores and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    name = names[0] if names else platform.processor()
    return f"{name}, {os.cpu_count()} cores; {', '.join(versions)}"


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""],
                        help="run the rows whose name contains one of these words")
    parser.add_argument("--runs", type=int, default=5, help="number of rounds")
    parser.add_argument("--one", nargs="+",
                        help="serve a function of this file in this process: name, arguments")
    args = parser.parse_args()
    if args.one:
        name, *rest = args.one
        return serve(name, rest)
    print(hardware())
    for name in ROWS:
        if any(word in name for word in args.only):
            compare(name, args.runs)


if __name__ == "__main__":
    main()
