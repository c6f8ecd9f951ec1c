# SPDX-License-Identifier: Apache-2.0
"""config.py: the text forms of a config, its validation, presets and differences."""
import contextlib
import dataclasses
import json
import re
import shlex
import typing
from dataclasses import dataclass
from functools import partial
from math import prod

import pytest

import config
import model
import step
from config import Config
from conftest import ROOT

CHOICES = {"optimizer": step.OPTIMIZERS, "schedule": step.SCHEDULES}
validate = partial(config.validate, choices=CHOICES, task_errors=config.text_errors)


@dataclass(frozen=True, kw_only=True)
class Fork(Config):
    d_hidden: config.PosInt = 3  # width of the hidden layer
    steps: config.PosInt = 7  # another default
    sizes: tuple[int, ...] = (1, 2)
    bias: bool = False  # a name of nanoGPT
    no_decay: config.PosInt = 1  # rows without decay


@pytest.fixture(autouse=True)
def folder_without_runs(tmp_path, monkeypatch):
    """A command line takes its defaults from a run in out."""
    monkeypatch.chdir(tmp_path)


def other(value, kind):
    """A value of the same type that differs from the default and is awkward to write as text."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[-1]
    if kind == int | str:
        return '1epoch,2h30m, 7'
    if kind is bool:
        return not value
    if kind is int:
        return value + 7
    if kind is float:
        return abs(value) / 3 + 1e-17
    if kind is str:
        return value + ' "é\n'
    return (3, 4) if kind == tuple[int, ...] else ("a b", "*.bin")


def error_of(cfg, n_devices=8):
    """The message with which `validate` rejects the config."""
    with pytest.raises(ValueError) as e:
        validate(cfg, n_devices)
    return str(e.value)


def parse(text, kind=Config):
    return config.parse(shlex.split(text), kind)


# ---- JSON and files

def test_json_round_trip():
    """A config in which no field has its default survives to_json and from_json, with its types.

    Break: config.py: values[name] = tuple(value) => values[name] = value
    """
    kinds = typing.get_type_hints(Config)
    changes = {f.name: other(f.default, kinds[f.name]) for f in dataclasses.fields(Config)}
    for each in (Config(**changes), Config()):
        back = config.from_json(config.to_json(each))
        assert back == each and hash(back) == hash(each)
        assert config.to_json(back) == config.to_json(each)
        assert [type(v) for v in vars(back).values()] == [type(v) for v in vars(each).values()]
    assert type(config.from_json('{"lr": 1}').lr) is float


@pytest.mark.parametrize("text, words", [
    ('{"lr": 1, "steps": 2, "lr": 3}', ["comes twice: 'lr'"]),
    ('{"data": [{"a": 1, "a": 2}]}', ["comes twice: 'a'"]),
    ('{"stepz": 3, "n_embd": 4, "lr": "fast"}',
     ["nearest: --steps", "'n_embd' (use --d_model)", "lr 'fast': must be of type float"]),
    ('{"mode": "trian"}', ["mode 'trian': must be one of train, eval, sample, plan"]),
    ('{"steps": 1.5}', ["steps 1.5: must be of type int"]),
    ('{"steps": true}', ["steps True: must be of type int"]),
    ('{"data": "a.txt"}', ["data 'a.txt': must be of type tuple[str, ...]"]),
    ('{"data": [1]}', ["data (1,): must be of type tuple[str, ...]"]),
    ("[1]", ["not a JSON object of fields: 'list'"]),
    ("{", ["not a JSON object of fields: Expecting"]),
])
def test_json_errors(text, words):
    """Malformed JSON, unknown or repeated keys and wrong types are one error that names them all.

    Break: config.py: if isinstance(value, bool) != (hint is bool): => if False:
    """
    with pytest.raises(ValueError) as e:
        config.from_json(text, "my_run.json")
    assert all(word in str(e.value) for word in ["my_run.json", *words]), str(e.value)


def test_config_files(tmp_path):
    """--config reads what to_json wrote, in the encodings of editors; typed flags override it.

    Break: config.py: return path.read_bytes() => return path.read_text()
    """
    path = tmp_path / "run.json"
    cfg = Config(lr=0.25, steps=9, data=("x",))
    path.write_text(config.to_json(cfg))
    wanted = dataclasses.replace(cfg, lr=0.5, config=str(path), out_dir="out/run,lr=0.5")
    assert parse(f"--config {path} --lr 0.5") == wanted
    for encoding in ("utf-8-sig", "utf-16"):
        path.write_text('{"prompt": "é"}', encoding)
        wanted = Config(prompt="é", config=str(path), out_dir="out/run")
        assert parse(f"--config={path}") == wanted
    for text, words in (('{"prompt": "é"}', "run.json: not a JSON object of fields: 'utf-8' codec"),
                        ('{"config": "debug"}', "run.json: config 'debug': must be empty")):
        path.write_text(text, "latin-1")
        with pytest.raises(ValueError, match=words):
            config.load(str(path))
    with pytest.raises(ValueError, match="'gpt2-124'.*nearest: gpt2-124m"):
        config.load("gpt2-124")


# ---- command lines

@pytest.mark.parametrize("argv, message", [
    ("--stepz 3", "unknown flag: --stepz (nearest: --steps)"),
    ("--zzzz --min_lr=1e-5 --no-compile --block-size 4 --n_layer 2",
     "unknown flag: --zzzz (see --help all)\n  --min_lr=1e-5 (use --min_lr_frac, a fraction of lr, "
     "as 0.1)\n  --no-compile (no flag: it is always on)\n  --block-size (use --seq_len)\n"
     "  --n_layer (nearest: --n_layers)"),
    ("lr=3 -steps 4 --LR 5", "unknown flag: lr=3 (write --lr 3)\n  -steps (write --steps)\n"
     "  --LR (write --lr)"),
    ("config/train.py --lr -5", "config/train.py: is neither a flag nor the value of one; write"),
    ("--steps 2h30", "--steps: '2h30' is not a number; write 300"),
    ("--sizes 3 2h30", "--sizes: '2h30' is not a number; write 300"),
    ("-bias", "unknown flag: -bias (write --bias)"),
    ("--freeze embed --lr 1 --freeze layers.w* --lr 2", "--freeze: stands twice; write all its"),
])
def test_flags_that_are_rejected(argv, message):
    """One error names all unknown flags, each with the flag that may be meant.

    Break: config.py: f"nearest: --{close}" if close else => "" if close else
    """
    with pytest.raises(ValueError) as e:
        parse(argv, Fork)
    assert str(e.value).startswith(message), str(e.value)


def test_flags():
    """Flags take numbers as people write them, switches and lists; --config sets the defaults.

    Break: config.py: return parse_number(value, hint) => return hint(value)
    """
    cfg = parse("--steps 2Ki --warmup_steps=50% --seed 2^5 --no-qk_norm --data a b "
                "--on_nonfinite skip --fsdp -1")
    assert cfg == Config(
        steps=2048, warmup_steps=0.5, seed=32, qk_norm=False, data=("a", "b"), on_nonfinite="skip",
        out_dir="out/data=a+b,no_qk_norm,warmup_steps=0.5,on_nonfinite=skip,seed=32")
    assert parse("") == parse("--out_dir ''") == Config(out_dir="out/default")
    wanted = config.PRESETS["gpt2-124m"] | dict(
        steps=7, config="gpt2-124m", out_dir="out/gpt2-124m")
    for text in ("--config=gpt2-124m --steps=7",
                 "--config debug --steps 7 --config gpt2-124m"):
        assert parse(text) == Config(**wanted)


def test_a_fork_extends_config():
    """New fields of a fork are flags, are saved as JSON, and are checked against their bounds.

    Break: config.py: return kind(**_json_values(text, where, kind)) =>
    return kind(**_json_values(text, where, Config))
    """
    cfg = parse("--d_hidden 1Ki --lr 1 --sizes 3 4 --bias --no-decay 3", Fork)
    name = "out/fork,lr=1,d_hidden=1024,sizes=3+4,bias,no_decay=3"
    assert cfg == Fork(d_hidden=1024, lr=1.0, sizes=(3, 4), bias=True, no_decay=3, out_dir=name)
    assert cfg.steps == 7
    assert cfg.explicit == ("bias", "d_hidden", "lr", "no_decay", "sizes")
    assert config.from_json(config.to_json(cfg), kind=Fork) == cfg
    assert config.load("debug", Fork).d_hidden == 3
    config.validate(cfg, 1, CHOICES)
    with pytest.raises(ValueError, match="d_hidden 0: must be at least 1"):
        config.validate(Fork(d_hidden=0), 1)
    with pytest.raises(ValueError, match=r"sizes \(1.5,\): must be of type tuple\[int, ...\]"):
        config.validate(Fork(sizes=(1.5,)), 1)


@pytest.mark.house
def test_help(capsys):
    """--help fits on a screen and names flags that exist, as the names of other trainers do.

    Break: config.py: print(f"of {kind.__name__}: {' '.join(own)}") => pass
    """
    def help_of(text):
        with pytest.raises(SystemExit) as e:
            parse(text, Fork)
        assert not e.value.code
        return capsys.readouterr().out

    lines = help_of("-h").splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 80
    listed = re.findall(r"--(\w+) ", config.SHORT_HELP)
    unknown = {*listed} - {"help", *Config.__annotations__}
    assert len(listed) > 30 and not unknown, f"edit SHORT_HELP in config.py: no flag {unknown}"
    assert lines[-1] == "of Fork: --d_hidden --sizes --bias --no_decay"
    full = help_of("--help all")
    assert "width of the hidden layer (default: 3)" in full
    assert not [name for name in typing.get_type_hints(Fork) if f"--{name}" not in full]
    meant = re.findall(r"--(\w+)", config.OTHER_TRAINERS)
    of_recipes = {"windows_per_epoch", "reward", "group_size", "answer_tokens", "inner_steps"}
    unknown = {*meant} - {*Config.__annotations__} - of_recipes
    assert not unknown, f"edit OTHER_TRAINERS in config.py: no field {unknown}"
    missing = [path for path in re.findall(r"tests/[\w/]+\.\w+", config.OTHER_TRAINERS)
               if not (ROOT / path).exists()]
    assert not missing, f"edit OTHER_TRAINERS in config.py: no file {missing}"


def test_a_home_in_every_path(tmp_path, monkeypatch):
    """`~` is expanded in each field but texts, from a flag or a file; cache_dir keeps its default.

    Break: config.py: expanded[name] = tuple(map(expand, value)) => pass
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.json").write_text('{"out_dir": "~/out", "val_data": ["a=~/a.bin", "b~.bin"]}')
    cfg = parse("--config '~/c.json' --data '~/*.txt' ./~b --token_cache '~' --ckpt-dir='~/ckpt' "
                "--prompt='~/a'")
    assert (cfg.ckpt_dir, cfg.prompt) == (f"{tmp_path}/ckpt", "~/a")
    assert (cfg.out_dir, cfg.token_cache) == (f"{tmp_path}/out", str(tmp_path))
    assert cfg.val_data == (f"a={tmp_path}/a.bin", "b~.bin")
    assert cfg.data == (f"{tmp_path}/*.txt", "./~b")
    assert cfg.cache_dir == Config().cache_dir


def test_flags_that_are_not_typed_come_from_the_run_in_out_dir(tmp_path):
    """Flags that are not typed come from the run in out_dir, unless it is deleted first.

    Break: config.py: if first.mode not in ("plan", "data") => if first.mode in ()
    """
    (tmp_path / "config.json").write_text(config.to_json(Config(temperature=0.3, n_layers=2)))
    sample = f"--mode sample --out_dir {tmp_path}"
    cfg = parse(sample)
    assert (cfg.mode, cfg.temperature, cfg.n_layers) == ("sample", 0.3, 2)
    assert parse(f"{sample} --temperature 0.8").temperature == 0.8
    train = f"--out-dir={tmp_path}"
    assert parse(f"{train} --steps 9").n_layers == 2
    assert parse(f"{train} --resume overwrite").n_layers == Config.n_layers
    assert parse(f"{train} --mode plan").n_layers == Config.n_layers


def test_changed_flags_repeat_what_was_typed():
    """The printed flags, typed again, give the same config; a long list is cut.

    Break: config.py: if name not in HIDDEN_FLAGS and value => if value
    """
    typed = ["--config debug", "--data 'a b.txt' '*.py'", "--val_frac 0.25", "--steps 300",
             "--no_qk_norm", "--lora_targets", "--lr 1e-05", "--warmup_steps 20",
             "--offload_optimizer", "--eval_every 1epoch", "--prompt 'it'\"'\"'s'"]
    assert config.changed_flags(parse(f"{' '.join(typed)} --out_dir elsewhere")) == typed
    assert config.changed_flags(Config()) == []
    flag, = config.changed_flags(Config(data=tuple(f"file_{i}.txt" for i in range(99))))
    assert flag.startswith("--data file_0.txt file_1.txt") and flag.endswith(" ...")


# ---- names in other trainers

# What the message says, or "flag" for a flag of this name, and option names: all of EasyDeL's
# Trainer, BaseTrainerProtocol and RayDistributedTrainer, of RecIS and ArcticTraining; usual ones of
# nanoGPT, Hugging Face, axolotl, torchtitan, MaxText, Levanter, Megatron, Lightning and others.
OTHER_NAMES = """
--attention <= attn_mechanism model.attn_implementation core_attn_implementation flash_attention
--b1 <= beta1 adam_beta1 optimizer.beta1
--b1 and --b2 <= betas
--b2 <= beta2 adam_beta2
--batch_size, of all devices and microbatches <= training_batch_size total_batch_size
    micro_batch_size per_device_train_batch_size training.local_batch_size
    training.global_batch_size per_device_batch_size trainer.train_batch_size micro-batch-size
    global-batch-size batch train_micro_batch_size_per_gpu
--ckpt_dir, also s3:// or gs:// <= ckpt_path bucket_path load_directory save load save_dir
    checkpoint_dir
--clip_norm <= grad_clip max_grad_norm training.max_norm gradient_clipping_threshold clip-grad
    gradient_clip_val
--columns text=NAME <= dataset_text_field
--config, a preset or <= arguments config_kwargs config_variables path args job.config_file
--coordinator, --n_processes and <= world_size global_rank local_rank num_nodes
--d_ff, of each expert too <= intermediate_size moe_intermediate_size ffn-hidden-size ffn_dim
--d_model <= hidden_size n_embd hidden-size
--data FILE, 'hf://datasets/ORG/NAME/*.parquet' <= dataset_train dataloader_train train_dataset
    dataset dataset_name train_file data_dir datasets dataset_path data-path
--dp, --fsdp, --ep, --tp and --sp <= sharding_axis_dims sharding_axis_names strategy
--dtype bfloat16 or float16 <= mixed_precision bf16 fp16 training.mixed_precision_param
--dtype; for products of float32 JAX_DEFAULT_MATMUL_PRECISION <= precision
--eos_token <= special_tokens
--ep <= parallelism.expert_parallel_degree ici_expert_parallelism expert-model-parallel-size
--epochs <= num_train_epochs train_epoch num_epochs max_epochs
--eps <= adam_epsilon
--eval_batch_size, of all devices <= evaluation_batch_size per_device_eval_batch_size
--eval_batches <= max_evaluation_steps eval_iters validation.steps eval-iters limit_val_batches
--eval_every <= evals_per_epoch
--eval_every, as 250 or 1epoch <= evaluation_steps eval_interval eval_strategy
    evaluation_strategy validation.freq eval-interval val_check_interval check_val_every_n_epoch
--eval_every, as 250 or 1epoch; --eval_batches for the length <= eval_steps
--experts_per_token <= num_experts_per_tok
--fsdp for ZeRO-3, --dp for ZeRO-2 <= deepspeed parallelism.data_parallel_shard_degree
    parallelism.data_parallel_replicate_degree
--grad_accum_steps, parts of one batch <= gradient_accumulation_steps accumulate_grad_batches
    gradient_accumulation
--hooks tests/recipes/hooks.py:ema <= ema
--hooks tests/recipes/prune.py:prune <= pruning_module
--hooks, see tests/GUIDE.md <= training_hooks metric_calculator callbacks
--init_from for weights, --config for sizes <= model model_name_or_path model_type
    pretrained_model_name_or_path model_bank model.name_or_path model_name base_model model.name
    model.flavor
--keep_best <= load_best_model_at_end metric_for_best_model save_top_k
--label_smoothing <= label_smoothing_factor
--label_smoothing, --z_loss and <= loss_config
--log_every <= logging_steps log_steps train_log_iter_interval log_interval metrics.log_freq
    log-interval log_every_n_steps
--lora_rank N <= use_peft r lora_r adapter
--lora_targets, as layers.wq <= target_modules lora_target_modules lora_target_linear
--lr <= learning_rate optimizer.lr peak_lr max_lr
--max_to_keep <= save_total_limit checkpoint.keep_latest_k
--min_lr_frac, a fraction of lr, as 0.1 <= min_lr lr_scheduler.min_lr_factor
    optimizer.min_lr_ratio
--mlp_tiles N, without experts <= tiled_mlp_compute
--mode eval <= do_eval eval_only do_train
--n_experts <= num-experts moe
--n_heads <= num_attention_heads num-attention-heads
--n_kv_heads <= num_key_value_heads num-query-groups
--n_layers <= model.num_layers num-layers
--n_processes <= nnodes
--n_samples <= num_samples
--norm_eps <= rms_norm_eps
--offload_optimizer or --remat offload <= offload_backend training.enable_cpu_offload
    optimizer-cpu-offload
--optimizer <= dense_optimizer dense_optimizers optimizer_factory optimizer.type optim
    optimizer.name
--optimizers PATTERN=NAME <= sparse_optimizer
--out_dir <= save_directory output_dir logger.output_dir run_name base_output_directory
    default_root_dir
--overfit_batch <= overfit_first_batch overfit_batches
--packing best_fit <= packed_sample_seqlens sample_packing
--peer_timeout_s <= timeout ddp_timeout comm.init_timeout_seconds
--profile FIRST:LAST <= mem_profiler mem_profiler_max_entries profiling.enable_profiling
    profiler
--prompt <= start
--qkv_bias <= bias
--reload_every, with dynamic=yes <= load_update_steps load_update_windows load_update_epochs
    ckpt_load_arg
--remat full <= gradient_checkpointing activation_checkpoint.mode remat_policy
    model.gradient_checkpointing recompute-granularity
--remat offload <= activation_checkpoint_cpu_offload
--resume auto <= resume_if_possible auto_resume resume_from_checkpoint overwrite_output_dir
--sample_tokens <= max_new_tokens
--save_every <= saves_per_epoch
--save_every, --max_to_keep and <= saver saver_option ckpt_save_arg
--save_every, --weights_every and <= checkpoint_engine checkpoint_engines
--save_every, as 250, 1epoch, 1window <= save_steps save_strategy save_epochs
    save_every_n_windows save_every_n_epochs always_save_checkpoint checkpoint.interval
    save-interval
--save_exclude <= params_not_save save_filter_fn
--schedule, of all parameters <= scheduler dense_lr_scheduler scheduler_factory decay_lr
    lr_scheduler_type lr_scheduler lr-decay-style lr_schedule
--seed <= data_seed seed_everything
--seq_len <= max_sequence_length max_length max_position_embeddings freq_max_position_embeddings
    mask_max_position_embeddings data.max_length seq_length block_size max_seq_length
    model_max_length sequence_len training.seq_len max_target_length model.max_seq_len
    seq-length max-position-embeddings context_length
--slices N, along --dp or <= sharding_dcn_axis_dims dcn_data_parallelism
--sp <= sequence_parallel_size parallelism.context_parallel_degree context-parallel-size
--steps <= training.steps
--steps, in all, and the horizon <= max_training_steps train_steps train_iters max_iters
    lr_decay_iters max_steps trainer.num_train_steps train-iters lr-decay-iters
--stop, as 500, +100 (of this launch) <= training_time_limit exit_iteration
    exit_iteration_this_run exit-interval exit-duration-in-mins max_time
--temperature <= temp
--tie_embeddings <= tie_word_embeddings
--token_cache <= dataset_prepared_path
--tokenizer <= processor tokenizer_factory processing_class tokenizer_name model.tokenizer_path
    tokenizer_path
--tp <= parallelism.tensor_parallel_degree ici_tensor_parallelism tensor-model-parallel-size
--track wandb <= wandb wandb.enable logger wandb_log report_to tensorboard
--truncation <= truncation_mode
--val_data <= dataset_eval dataloader_eval eval_dataset validation_file
--val_frac <= val_set_size val_split
--vocab_size <= vocab
--warmup_steps <= lr_scheduler.warmup_steps
--warmup_steps, below 1 a fraction <= warmup_iters warmup_ratio warmup_steps_fraction
    optimizer.warmup lr-warmup-iters lr-warmup-fraction num_warmup_steps
--weight_decay <= wd
--width_mult; widths and heads scale together <= scaling_index config_scaling_variables
flag <= dtype param_dtype optimizer epochs config seed padding_side hooks max_to_keep save_end
    mode data tokenizer rope_scaling
nearest: --n_heads <= n_head
nearest: --n_layers <= n_layer
no flag: LoRA has no dropout <= lora_dropout
no flag: TensorStore writes in parallel <= save_concurrency_per_rank
no flag: a batch is a function of the step <= use_grain dataset_type
no flag: a task defines it <= data_collator train_step_fn eval_step_fn model_task model_class
    state_class trainer_module name type data_factory model_factory
no flag: all sequences have --seq_len tokens <= seq_length_is_variable group_by_length
no flag: all visible devices are used <= backend devices
no flag: answers are the labels <= assistant_only_loss train_on_inputs
no flag: attention has --dtype <= attn_dtype attn_softmax_dtype
no flag: batches are prefetched <= dataloader_num_workers num_workers
no flag: every evaluation is logged <= eval_log_iter_interval
no flag: it is always on <= lazy auto_shard_model data_to_cuda find_unused_parameters compile
    torch_compile compile.enable
no flag: it is in --out_dir <= train_log_metrics_path mem_profiler_dir logging_dir
no flag: it is that of <= chat_template
no flag: logs have no levels <= log_level
no flag: no pipeline <= parallelism.pipeline_parallel_degree pipeline-model-parallel-size
no flag: nothing is uploaded <= push_to_hub
no flag: padding needs no token <= pad_token pad_token_id padding
no flag: see param_table in model.py <= step_partition_spec partition_axis initializer_range
no flag: the file stop in --out_dir <= kill_switch_path
no flag: train.main in Python takes it <= model_state state model_parameters
no flag: weights are not quantized <= load_in_4bit load_in_8bit
tests/recipes/rl.py --answer_tokens <= max_completion_length
tests/recipes/rl.py --group_size <= num_generations num_return_sequences
tests/recipes/rl.py --inner_steps <= num_iterations
tests/recipes/rl.py --reward <= reward_funcs
tests/recipes/windows.py --windows_per_epoch <= window_iter
the variable JAX_PLATFORMS <= accelerator device
the variables WANDB_PROJECT <= wandb.project wandb.entity wandb.name wandb_project
    wandb_run_name trainer.wandb.project
use --log_all_processes <= log_all_workers
"""


def hints_of(names):
    """{name: the hint} of unknown flags."""
    argv = []
    for name in names:
        argv += [f"--{name}", "1"]
    with pytest.raises(ValueError) as e:
        config.parse(argv)
    lines = str(e.value).removeprefix("unknown flag: ").split("\n  ")
    return dict(re.fullmatch(r"--(\S+) \((.*)\)", line).groups() for line in lines)


def test_names_in_other_trainers():
    """Each option name of another trainer is a flag, or an error with the flag or with a reason.

    Break: config.py: hints |= dict.fromkeys(names.split(), =>
    hints |= dict.fromkeys(names.split()[:1],
    """
    wanted = {}
    for line in re.split(r"\n(?! )", OTHER_NAMES.strip()):
        text, names = line.split(" <= ")
        wanted |= dict.fromkeys(names.split(), text)
    hints = dict.fromkeys(wanted, "flag")
    hints |= hints_of(name for name in wanted if name not in Config.__annotations__)
    wrong = [f"--{name} ({hints[name]}), not {text}" for name, text in wanted.items()
             if not re.match(rf"(use )?{re.escape(text)}(?!\w)", hints[name])]
    assert not wrong, "edit OTHER_TRAINERS in config.py:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name, hint", [
    ("bach_size", "nearest: --batch_size"), ("lr_multi", "nearest: --lr_mult"),
    ("optimiser", "nearest: --optimizer"), ("setps", "nearest: --steps"),
    ("grda_acum_steps", "nearest: --grad_accum_steps"), ("no-qk_nrom", "nearest: --qk_norm"),
    ("lerning_rate", "use --lr"), ("zzzz", "see --help all"), ("min_length", "see --help all"),
    ("sub_steps", "see --help all"), ("lrr", "see --help all"), ("seq_size", "see --help all")])
def test_only_a_likely_misspelling_has_a_nearest_name(name, hint):
    """A letter that is wrong, missing, too much or swapped with the next: one, in long names two.

    Break: config.py: if one[:2] == other[:2][::-1]: => if False:
    """
    assert hints_of([name]) == {name: hint}
    assert config.did_you_mean("AdamW", step.OPTIMIZERS) == "nearest: adamw"
    assert config.did_you_mean("adagrad", ("sgd", "lion")) == "legal: sgd, lion"


# ---- numbers, intervals

@pytest.mark.parametrize("text, value", [
    ("2^20", 2**20), ("1.25M", 1_250_000), ("3Gi", 3 * 2**30), ("2T", 2 * 10**12), ("1B", 10**9),
    ("0.5Ki", 512), ("1_000", 1000), ("3e4", 30000), ("-3", -3), ("+3", 3), (" 7 ", 7), ("2.0", 2),
    ("400%", 4), ("9007199254740993", 2**53 + 1), ("50%", 0.5), ("3e-4", 3e-4), (".5", 0.5),
    ("-1.5", -1.5), ("0.1", 0.1), ("2h30m", 9000.0), ("1d", 86400.0), ("1m30s", 90.0),
    *dict.fromkeys(["2h30", "2x", "", "-", "2^9999999", "1e9999999", "h", "1M2K", "2^-1", "1 2",
                    "1,000", "nan", "inf", "+-3"]).items()])
def test_numbers(text, value):
    """Numbers as people write them are exact; fractions and times are no integers.

    Break: config.py: TIME_UNITS if len(parts) > 1 else UNITS.keys() => UNITS.keys()
    """
    if value is None:
        with pytest.raises(ValueError, match="is not a number; write 300"):
            config.parse_number(text)
        return
    assert config.parse_number(text) == float(value)
    if isinstance(value, int):
        found = config.parse_number(text, int)
        assert found == value and type(found) is int
    else:
        with pytest.raises(ValueError, match="must be a whole number"):
            config.parse_number(text, int)


@pytest.mark.parametrize("text, wanted", [
    ("250", {"step": 250}), ("1Ki", {"step": 1024}), ("epoch", {"epoch": 1}),
    ("2windows", {"window": 2}), ("0.5epochs", {"epoch": 0.5}), ("250, 1h", {"step": 250,
                                                                             "second": 3600}),
    ("0", {}), ("0,1window", {"window": 1}), ("90s", {"second": 90}), ("", None), ("1,2", None),
    ("-5", None), ("0.5window", None), ("2weeks", None), ("1epochss", None)])
def test_intervals(text, wanted):
    """An interval holds counts and times, each unit once.

    Break: config.py: named[1] or "1", named[2] => named[1] or "2", named[2]
    """
    if wanted is not None:
        assert config.parse_intervals(text) == wanted
    else:
        with pytest.raises(ValueError):
            config.parse_intervals(text)
        assert error_of(Config(save_every=text))


# ---- validation

# (change of the defaults, part of the error), for 8 devices
REJECTED = [
    (dict(dp=3, fsdp=1), "mesh dp=3 fsdp=1 ep=1 tp=1 sp=1: must multiply to 8 devices"),
    (dict(columns=("body=text",)), "columns ('body=text',): must be NAME=COLUMN"),
    (dict(chat="a", prompt="b"), "prompt 'b': only one of prompt, chat and prompts may be set"),
    (dict(tp=8), "n_heads 2: must be a multiple of tp x sp = 8"),
    (dict(sp=2, seq_len=127), "seq_len 127: must be a multiple of sp = 2"),
    (dict(batch_size=10, grad_accum_steps=2),
     "batch_size 10: must be a multiple of grad_accum_steps x dp x fsdp x ep = 16"),
    (dict(ep=4, n_experts=6), "n_experts 6: must be a multiple of ep = 4, as 4 or 8"),
    (dict(coordinator="localhost"), "coordinator 'localhost': must be host:port, or auto"),
    (dict(n_experts=2, experts_per_token=1), "experts_per_token 1: must be at least 2"),
    (dict(n_experts=2, experts_per_token=3), "experts_per_token 3: must be at least 2"),
    (dict(n_experts=2, mlp_tiles=2), "mlp_tiles 2: must be 1 with n_experts"),
    (dict(mlp_tiles=3), "seq_len / sp 128: must be a multiple of mlp_tiles = 3"),
    (dict(slices=3), "fsdp 8: must be a multiple of slices = 3"),
    (dict(slices=4, dp=2), "dp 2: must be a multiple of slices = 4"),
    (dict(loss_norm="constant"), "loss_divisor 0.0: must be above 0"),
    (dict(steps=2**31), "steps 2147483648: must be at least 1, and below 2^31"),
    (dict(warmup_steps=1.0), "warmup_steps 1.0: must be below 1, or a"),
    (dict(warmup_steps=2.5), "warmup_steps 2.5: must be below 1, or a"),
    (dict(warmup_steps=float("inf")), "warmup_steps inf: must be below 1, or a"),
    (dict(columns=("text=a", "text=b")), "columns ('text=a', 'text=b'): must be NAME=COLUMN"),
    (dict(keep_best="loss"), "keep_best: 'loss' must begin with val_"),
    (dict(keep_best="val_margin"), "keep_best: 'val_margin' must begin with val_"),
    (dict(branch_from="out/default"), "branch_from: 'out/default' must be DIR@STEP"),
    (dict(mode="sample", sample_tokens=0), "sample_tokens 0: must be above 0 to sample"),
    (dict(profile="22:20"), "profile: '22:20' must be as 20:22"),
    (dict(profile="1"), "profile: '1' must be as 20:22"),
    (dict(save_every="1,2"), "save_every: '1,2' has a unit twice"),
    (dict(lr=-2.0), "lr -2.0: must be at least 0 and finite, or -1 for the default"),
    (dict(weight_decay=float("inf")), "weight_decay inf: must be at least 0, and finite"),
    (dict(b1=float("nan")), "b1 nan: must be in [0, 1)"),
    (dict(width_mult=0.3), "width_mult 0.3: d_model would be 38.4"),
    (dict(width_mult=1e-12), "width_mult 1e-12: d_model would be 1.28e-10"),
    (dict(seed=2**32), "seed 4294967296: must be in [0, 2^32)"),
    (dict(head_dim=31), "head_dim 31: must be even"),
    (dict(stop=("9", "loss<3"), log_every=0), "a metric of training needs log_every above 0"),
    (dict(coordinator="a:1", n_processes=2, process_id=2),
     "process_id 2: must be below n_processes"),
    (dict(schedule="cosin"), "schedule 'cosin': unknown (nearest: cosine)"),
    (dict(out_dir="s3://bucket/run"), "out_dir 's3://bucket/run': must be on this machine"),
    (dict(mode="export"), "export '': must name a folder in mode export"),
    *((dict(stop=("9", text)), "stop, as 500, +100, 2h30m or val_loss<3: ")
      for text in ("loss=3", "loss<", "<3", "-5", "", "5%", "0s", "step<5", "1epoch")),
]


@pytest.mark.parametrize("change, words", REJECTED)
def test_each_error(change, words):
    """A value that cannot be is rejected by name, with its rule.

    Break: config.py: b1: FractionBelow1 = 0.9 => b1: float = 0.9
    """
    assert words in error_of(Config(**change)), "if you changed the rule, edit it in REJECTED"


def test_all_errors_at_once():
    """One message lists every error; the rules of the transformer belong to its task.

    Break: config.py: errors += task_errors(sizes, cfg) => errors += text_errors(sizes, cfg)
    """
    bad = Config(d_model=100, n_heads=8, n_kv_heads=3, optimizer="adamv", allow_change=("stepz",),
                 batch_size=10)
    error = error_of(bad)
    task_errors = ["d_model 100: must be a multiple of 2 x n_heads = 16",
                   "n_heads 8: must be a multiple of n_kv_heads = 3"]
    for words in ("optimizer 'adamv': unknown (nearest: adamw)", *task_errors,
                  "allow_change 'stepz': unknown (nearest: steps)", "batch_size 10: must be a mul"):
        assert words in error, error
    config.validate(Config(d_model=7, n_heads=3, head_dim=5), 8, CHOICES)
    for change in (  # the values at closed bounds are legal
            {}, dict(lr=0.0, b1=0.0, val_frac=0.0, warmup_steps=0.0, min_lr_frac=0.0, seed=0),
            dict(lr=-1.0, top_p=1.0, fsdp=-1, eod_id=-1, max_to_keep=1, batch_size=8),
            dict(save_every="0", log_every=0, stop=("+1", "2h", "val_loss<3"), profile="1:1"),
            dict(lr_mult=("embed=0", "a=b=2"), decay_mult=("layers.w*=1.5e-3",),
                 keep_best="val_x>"),
            dict(optimizer="sgd", b2=0.5, optimizers=("embed=muon",))):  # which uses b2
        validate(Config(**change), 8)
    # A preset may have values that another flag makes unused.
    validate(parse("--config gpt2-124m --epochs 2 --schedule constant"), 1)
    validate(Config(seq_len=63), 1)  # in tiles or not: logit_tiles is automatic


# (field, a value of it, other fields that are unused with that value, a value that uses them)
UNUSED = [
    ("mode", "train", dict(checkpoint="best"), "eval"),
    ("mode", "eval", dict(samples_file="a"), "sample"),
    ("mode", "train", dict(examples_file="a"), "eval"),
    ("mode", "eval", dict(price=3.0), "plan"),
    ("n_experts", 0, dict(experts_per_token=1, capacity_factor=1.0, router_balance=0.1,
                          router_z=0.1), 4),
    ("coordinator", "", dict(n_processes=2, process_id=1), "host:1"),
    ("coordinator", "auto", dict(n_processes=2, process_id=1), "host:1"),
    ("lora_rank", 0, dict(lora_alpha=8.0, lora_targets=("layers.wq",)), 2),
    ("epochs", 2.0, dict(steps=50), 0.0),
    ("export", "", dict(export_every=5, export_dtype="bfloat16"), "hf"),
    ("init_from", ("a",), dict(reload_every=5), ("a", "b dynamic=yes")),
    ("packing", "stream", dict(truncation="keep_end", padding_side="left"), "best_fit"),
    ("packing", "none", dict(document_mask=True), "stream"),
    ("document_mask", False, dict(eod_id=7), True),
    ("log_every", 0, dict(watch=("*",)), 1),
    ("temperature", 0.0, dict(top_k=3, top_p=0.5), 0.1),
    ("rope_factor", 1.0, dict(rope_scaling="yarn", rope_original_len=50), 2.0),
    ("rope_scaling", "llama3", dict(rope_attn_factor=2.0), "yarn"),
    ("rope_scaling", "linear", dict(rope_original_len=50), "llama3"),
    ("loss_norm", "tokens", dict(loss_divisor=3.0), "constant"),
    ("schedule", "constant", dict(min_lr_frac=0.1), "linear"),
    ("schedule", "linear", dict(decay_frac=0.5), "wsd"),
    ("optimizer", "adafactor", dict(b1=0.5, moment_dtype="bfloat16"), "adamw"),
    ("optimizer", "sgd", dict(b2=0.5, eps=1e-6), "rmsprop"),
]


@pytest.mark.parametrize("field, value, others, other_value", UNUSED)
def test_each_unused_field(field, value, others, other_value):
    """The other fields are rejected with one value of the field, and accepted with another.

    Break: config.py: "watch": ("log_every",) => "watch": ("steps",)
    """
    def rejected(value):
        words = f"has no effect with {field} {value!r}"
        errors = config._unused_errors(Config(**{field: value} | others))
        return {error.split()[0] for error in errors if words in error}

    assert rejected(value) == {*others}
    assert rejected(other_value) == set()


# ---- the transformer, presets

def test_derived_sizes():
    """width_mult multiplies widths and head counts; derived again, a config does not change.

    Break: config.py: (cfg.n_kv_heads or cfg.n_heads) * => cfg.n_kv_heads *
    """
    cfg = Config(d_model=256, d_ff=512, n_heads=8, n_kv_heads=4, n_layers=3, vocab_size=100,
                 n_experts=4, width_mult=2.5)
    validate(cfg, 8)
    got = config.derive_text(cfg)
    assert (got.d_model, got.d_ff, got.n_heads, got.n_kv_heads) == (640, 1280, 20, 10)
    assert (got.head_dim, got.n_layers, got.vocab_size, got.width_mult) == (32, 3, 100, 1.0)
    assert (got.n_experts, got.experts_per_token) == (4, 2)
    assert config.derive_text(got) == got
    tuned = config.derive_text(Config(lora_rank=2, freeze=("!embed",)))
    assert tuned.freeze == ("*", "!*.lora_?", "!embed")
    assert config.derive_text(tuned) == tuned
    assert config.derive_text(Config(d_model=256, n_heads=8, width_mult=0.5)).n_kv_heads == 4
    for d_model in range(64, 4097, 64):  # the default of d_ff: 8/3 d_model, rounded up to 32
        d_ff = config.derive_text(Config(d_model=d_model)).d_ff
        assert d_ff % 32 == 0 and 0 <= d_ff - 8 * d_model / 3 < 32


# {preset: (parameters, rope_theta, norm_eps, vocab_size, tie_embeddings, qk_norm, seq_len)}. Those
# of Llama, Mixtral and Qwen3 are published; those of gpt2-124m are choices.
PUBLISHED = {
    "gpt2-124m": (123.6e6, 1e4, 1e-6, 50304, True, True, 1024),
    "llama-8b": (8.03e9, 5e5, 1e-5, 128256, False, False, 8192),
    "llama-70b": (70.55e9, 5e5, 1e-5, 128256, False, False, 8192),
    "llama-405b": (405.85e9, 5e5, 1e-5, 128256, False, False, 8192),
    "qwen3-0.6b": (0.596e9, 1e6, 1e-6, 151936, True, True, 4096),
    "qwen3-30b-a3b": (30.53e9, 1e6, 1e-6, 151936, False, True, 4096),
    "mixtral-8x7b": (46.7e9, 1e6, 1e-5, 32000, False, False, 4096),
}


@pytest.mark.parametrize("name", config.PRESETS)
def test_presets(name):
    """Every preset is legal on one device and on eight, GPT-2 124M on up to 64, and has the
    published fields and parameters.

    Break: config.py: 28672 => 28000
    """
    cfg = config.load(name)
    for n_devices in (1, 8) + (16, 32, 64) * (name == "gpt2-124m"):
        validate(cfg, n_devices)
    if name in PUBLISHED:
        n_params, *fields = PUBLISHED[name]
        n = sum(prod(row["shape"]) for row in model.param_table(config.derive_text(cfg)).values())
        assert abs(n - n_params) <= 0.01 * n_params
        assert fields == [cfg.rope_theta, cfg.norm_eps, cfg.vocab_size, cfg.tie_embeddings,
                          cfg.qk_norm, cfg.seq_len]


# ---- differences

def test_resuming_under_another_config():
    """Each difference that matters is listed with both values, unless allow_change has it; another
    sp matters if experts can drop tokens.

    Break: config.py: {*RESUMABLE_FIELDS, *new.allow_change} => {*RESUMABLE_FIELDS}
    """
    old = json.loads(config.to_json(Config(data=("a",))))
    new = Config(data=("b",), d_model=256, lr=0.5, out_dir="x")
    with pytest.raises(ValueError) as e:
        config.check_resumable(old, new)
    for words in ("data was ['a'], is ['b']", "d_model was 128, is 256", "lr was -1.0, is 0.5",
                  "--allow_change lr", "another --out_dir with --init_from 'x strict=no'"):
        assert words in str(e.value)
    assert "seed" not in str(e.value)
    config.check_resumable(old, Config(data=("b",), lr=0.5, allow_change=("data", "lr")))
    del old["z_loss"]
    config.check_resumable(old, Config(data=("a",)))
    with pytest.raises(ValueError, match="z_loss was 0.0, is 0.5"):
        config.check_resumable(old, Config(data=("a",), z_loss=0.5))

    experts = Config(n_experts=4)
    old = json.loads(config.to_json(experts))
    with pytest.raises(ValueError, match="sp was 1, is 2 .on purpose: --allow_change sp"):
        config.check_resumable(old, experts, {"sp": 1}, {"sp": 2})
    allowed = dataclasses.replace(experts, allow_change=("sp",))
    config.check_resumable(old, allowed, {"sp": 1}, {"sp": 2})
    unlimited = dataclasses.replace(experts, capacity_factor=0.0)
    config.check_resumable(old | {"capacity_factor": 0.0}, unlimited, {"sp": 1}, {"sp": 2})


@pytest.mark.house
def test_a_resume_may_change_the_resumable_fields_and_no_others():
    """A new field of a fork, which is in no list, may not change.

    Break: config.py: elif name not in may_change: => elif False:
    """
    kinds = typing.get_type_hints(Fork)
    old = json.loads(config.to_json(Fork()))
    resumable = set()
    for field in dataclasses.fields(Fork):
        new = Fork(**{field.name: other(field.default, kinds[field.name])})
        with contextlib.suppress(ValueError):
            config.check_resumable(old, new)
            resumable.add(field.name)
    assert resumable == set(config.RESUMABLE_FIELDS)


def test_other_differences():
    """A config file repeats the run, not its launch; fields that shapes do not show make another
    model.

    Break: config.py: LAUNCH_FIELDS = ("mode", "config", "resume", =>
    LAUNCH_FIELDS = ("mode", "config",
    """
    cfg = Config(mode="plan", resume="overwrite", allow_change=("lr",), lr=0.5, steps=77,
                 coordinator="a:1", n_processes=2, process_id=1, epochs=2.0,
                 init_from="a")
    assert config.without_launch_fields(cfg) == Config(lr=0.5, epochs=2.0, init_from="a")
    assert config.without_launch_fields(Config(steps=77)) == Config(steps=77)
    saved, current = vars(Config(d_ff=32, vocab_size=7, rope_theta=5.0)), vars(Config())
    assert config.architecture_mismatch(saved, current) == [
        "rope_theta was 5.0, is 10000.0 (on purpose: --allow_change rope_theta)"]
    allowed = vars(Config(allow_change=("rope_theta",)))
    assert config.architecture_mismatch(saved, allowed) == []
