# SPDX-License-Identifier: Apache-2.0
"""Names on the Hub with the library huggingface_hub: no network, and a cache laid out by hand."""
import dataclasses
import json
import sys

import huggingface_hub
import jax
import numpy as np
import pytest
import tokenizers
from huggingface_hub import constants as hub

import ckpt
import config
import data
import model
import train

COMMIT_1, COMMIT_2 = "1" * 40, "2" * 40
TOKENIZER = json.dumps({
    "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": {
        "type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": 2, "?": 3}, "unk_token": "?"}})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return a new cache of the library, which has no network."""
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    data.hub_path.cache_clear()
    yield tmp_path / "hub"
    data.hub_path.cache_clear()


def put(cache, kind, repo, commit, files, branch="main"):
    """Write {path: content} into a cache as the library does; the branch points at the commit."""
    folder = cache / f"{kind}s--{repo.replace('/', '--')}"
    for path, content in files.items():
        file = folder / "snapshots" / commit / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    ref = folder / "refs" / branch
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)
    return folder / "snapshots" / commit


def model_files(tmp_path, seed=0):
    """{path: content} of a small model with a tokenizer, and its embedding."""
    cfg = config.derive_text(config.Config(
        d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=8))
    params = jax.jit(lambda key: model.init(key, cfg))(jax.random.key(seed))
    path, pieces = tmp_path / f"model-{seed}", model.hf_pieces(cfg)
    ckpt.write_safetensors(path, ckpt.tensor_shapes(pieces, params), "float32",
                           ckpt.each_tensor(params, pieces, "float32"))
    files = {
        ".gitattributes": "",
        "config.json": json.dumps(model.hf_config(cfg)),
        "tokenizer.json": TOKENIZER,
        "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
        "model.safetensors": path.read_bytes(),
    }
    return files, np.asarray(params["embed"])


def text(word, n=400):
    return " ".join([word, "b"] * n)


# ---- names

def test_wrong_names(tiny):
    """A text that begins as a name on the Hub and is none is refused.

    Break: data.py: (?:@([^@/\\s]+))?(?:/(.*))?", name) => (.*)(.*)", name)
    """
    for name in ("hf://", "hf://gpt2", "hf://o/n@", "hf://o/n@a@b", "hf://o/n?x"):
        with pytest.raises(ValueError, match="a name on the Hub must be hf://ORG/NAME, "):
            data.hub_path(name)
    for changes in ({"init_from": ("hf://o",)}, {"tokenizer": "hf://o"}, {"data": ("hf://o",)}):
        with pytest.raises(ValueError, match="^hf://o: a name on the Hub must be"):
            train.main(tiny(**changes))


def test_local_paths_of_names(cache, monkeypatch):
    """A snapshot or a pattern of its files; what is missing or incomplete is an error.

    Break: data.py: return os.path.join(folder, path) => return folder
    """
    files = {"day1/a.txt": "a", "day2/b.txt": "b", "c.txt": "c"}
    folder = str(put(cache, "dataset", "o/n", COMMIT_1, files))
    assert data.hub_path(f"hf://datasets/o/n@{COMMIT_1}/c.txt") == f"{folder}/c.txt"
    put(cache, "dataset", "o/n", COMMIT_2, {"c.txt": "c"}, branch="a/b")
    assert COMMIT_2 in data.hub_path("hf://datasets/o/n@a%2Fb/c.txt")
    assert data.hub_path("hf://datasets/o/n/day1") == f"{folder}/day1"
    assert data.hub_path("hf:/o/n") == "hf:/o/n"
    names = {pattern: [str(path)[len(folder) + 1:]
                       for path in data.expand([f"hf://datasets/o/n/{pattern}"])]
             for pattern in ("*.txt", "*/*.txt", "**/*.txt")}
    assert names == {"*.txt": ["c.txt"], "*/*.txt": ["day1/a.txt", "day2/b.txt"],
                     "**/*.txt": ["c.txt", "day1/a.txt", "day2/b.txt"]}
    for name, words in (("hf://datasets/o/n/*.csv", r"\*.csv': no such file"),
                        ("hf://datasets/o/n/day1", "day1': is a folder; name its files"),
                        ("hf://datasets/o/n", "hf://datasets/o/n@refs.*: has no parquet files of"),
                        ("hf://o/x@v2", "^hf://o/x@v2: .*cache")):
        with pytest.raises(ValueError, match=words):
            data.expand([name])
    data.hub_path.cache_clear()
    for module in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match="^hf://o/n: needs `pip install huggingface_hub` "):
        data.hub_path("hf://o/n")


def test_only_the_needed_files_are_fetched(monkeypatch):
    """Settings, tokenizer, and on request weights; matched files. Each once.

    Break: data.py: patterns = (path.replace("**/", "*"), => patterns = ("*",
    """
    settings = {"config.json", "tokenizer.json", "chat_template.jinja", "merges.txt",
                "adapter_model.safetensors"}
    days = {"x/a.txt", "x/b.txt"}
    saved = {"saved/state.json", "saved/data.arrow"}
    files = {"model": [*settings, "model-1.safetensors", "consolidated.safetensors",
                       "pytorch_model.bin", "README.md"],
             "dataset": [*days, *saved, "README.md", "c.txt"]}
    fetched = []

    def snapshot_download(repo, repo_type, revision, allow_patterns):
        fetched.append({*huggingface_hub.utils.filter_repo_objects(
            files[repo_type], allow_patterns=allow_patterns)})
        return ""

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    wanted = {("hf://o/n", False): settings,
              ("hf://o/n", True): settings | {"model-1.safetensors"},
              ("hf://datasets/o/a@v2/x/*.txt", False): days,
              ("hf://datasets/o/b/**/*.txt", False): days | {"c.txt"},
              ("hf://datasets/o/c/saved", False): saved}
    for call in (*wanted, *wanted):
        data.hub_path(*call)
    assert fetched == [*wanted.values()]


@pytest.mark.parametrize("files, train_files, val_files", [
    ("data/train-0.parquet data/train-1.parquet data/train_sft-0.parquet data/test-0.parquet",
     "data/train-0.parquet data/train-1.parquet", "data/test-0.parquet"),
    ("a/train/0.parquet a/validation/0.parquet a/test/0.parquet", "a/train/0.parquet",
     "a/validation/0.parquet"),
    ("train.parquet test.parquet", "train.parquet", "test.parquet"),
    ("a/train-0.parquet b/train/0.parquet",
     r"^data hf://datasets/o/n.*: has several configurations; name one: .*/a/train-\*parquet.*/b/",
     "^val_data hf://datasets/o/n.*: has no parquet files of the split; name its files, as NAME"),
])
@pytest.mark.parametrize("branch", ["main", "refs/convert/parquet"])
def test_a_data_set_without_a_pattern_has_the_files_of_its_split(
        cache, files, train_files, val_files, branch):
    """In its own branch, or in that of the Hub's conversion; several configurations are an error.

    Break: data.py: {split_name}[-/.])[^/]*parquet => {split_name}).*parquet
    """
    put(cache, "dataset", "o/n", COMMIT_2, {"README.md": "a"})
    folder = str(put(cache, "dataset", "o/n", COMMIT_1, dict.fromkeys(files.split(), ""), branch))
    for field, expected in (("data", train_files), ("val_data", val_files)):
        if expected.startswith("^"):
            with pytest.raises(ValueError, match=expected):
                data.expand(["hf://datasets/o/n"], field=field)
        else:
            found = data.expand(["hf://datasets/o/n"], field=field)
            assert [str(path) for path in found] == [f"{folder}/{x}" for x in expected.split()]


# ---- runs

def test_a_run_with_names(cache, tiny, tmp_path, capsys, monkeypatch):
    """A run has sizes, weights, tokenizer and texts of its names, and keeps to its revision.

    Break: train.py: data.hub_path(path, weights=True) => data.hub_path(path)
    """
    files, embed = model_files(tmp_path)
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | {"pad_token_id": 3})
    put(cache, "model", "o/n", COMMIT_1, files)
    put(cache, "dataset", "o/d", COMMIT_1, {"x/1.txt": text("a"), "x/2.txt": text("a b"),
                                            "val/1.txt": text("?")})
    default = config.Config()  # its shape gives way to that of init_from
    cfg = tiny(init_from=("hf://o/n load=*",), data=("hf://datasets/o/d/x/*.txt",),
               val_data=("set=hf://datasets/o/d/val/*.txt",), steps=4, d_model=default.d_model,
               n_layers=default.n_layers, n_heads=default.n_heads, n_kv_heads=default.n_kv_heads,
               export=str(tmp_path / "exported"))
    began = []
    asked = set()
    download = huggingface_hub.snapshot_download

    def watch(event, value):
        if event == "load":
            began.append(np.asarray(value["params"]["embed"]))

    def snapshot_download(repo, **options):
        asked.update(options["allow_patterns"])
        return download(repo, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    weights_and_texts = {*data.HUB_WEIGHTS, "x/*.txt"}
    train.main(dataclasses.replace(cfg, mode="plan"))
    assert asked and not asked & weights_and_texts
    train.main(cfg, hooks=[watch])
    assert asked >= weights_and_texts
    assert (began[0] == embed).all()
    exported = json.loads((tmp_path / "exported/config.json").read_text())
    assert exported["pad_token_id"] == 3
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "exported/tokenizer.json"))
    assert exported.get_vocab() == json.loads(TOKENIZER)["model"]["vocab"]
    assert "parameters from hf://o/n" in capsys.readouterr().out

    # The branch moves, and a later run is another process.
    put(cache, "dataset", "o/d", COMMIT_2, {"x/1.txt": text("b"), "val/1.txt": text("a")})
    data.hub_path.cache_clear()
    cfg = dataclasses.replace(cfg, steps=6)
    with pytest.raises(ValueError, match="data"):
        train.main(cfg)
    cfg = dataclasses.replace(cfg, data=(f"hf://datasets/o/d@{COMMIT_1}/x/*.txt",),
                              allow_change=("data",))
    assert train.main(cfg)["step"] == 6


def test_an_adapter_and_its_base(cache, tiny, tmp_path):
    """A run takes an adapter of PEFT and its base by their names.

    Break: train.py: folder = data.hub_path(path) => folder = path
    """
    files, _ = model_files(tmp_path)
    put(cache, "model", "o/n", COMMIT_1, files)
    cfg = config.derive_text(config.Config(
        d_model=32, n_layers=1, n_heads=4, lora_rank=2, lora_targets=("layers.wo",)))
    table, pieces = model.param_table(cfg), model.hf_pieces(cfg, adapter=True)
    factors = {name: np.full(table[name]["shape"], 0.5, np.float32) for name in pieces}
    ckpt.write_safetensors(tmp_path / "adapter", ckpt.tensor_shapes(pieces, factors), "float32",
                           ckpt.each_tensor(factors, pieces, "float32"))
    put(cache, "model", "o/a", COMMIT_1, {
        "adapter_config.json": '{"peft_type": "LORA", "r": 2, "lora_alpha": 3}',
        "adapter_model.safetensors": (tmp_path / "adapter").read_bytes()})
    run, _, params = train.load_run(tiny(mode="eval", init_from=("hf://o/n", "hf://o/a")))
    assert run.cfg.lora_alpha == 3 and run.cfg.lora_targets == ("layers.wo",)
    assert (params["layers.wo.lora_b"] == 0.5).all()
