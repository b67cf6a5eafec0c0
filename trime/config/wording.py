"""How messages and --help name values and types."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from trime.config.fields import Rule

TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}


def written(value: Any) -> str:
    """Return a value as the command line has it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"[{','.join(map(written, value))}]" if isinstance(value, list) else str(value)


# Settings with the names that other programs give them, and what the built-in text lacks.
NAMES_ELSEWHERE = {
    "schedule.peak": "lr learning_rate max_lr base_lr peak_lr",
    "schedule.floor": "min_lr end_lr",
    "schedule.warmup": "warmup warmup_steps warmup_updates num_warmup_steps",
    "batching.size": "batch_size batch bs train_batch_size per_device_train_batch_size",
    "train.updates": "epochs epoch max_epochs num_epochs num_train_epochs steps max_steps num_steps train_steps iterations "
    "iters max_iters updates max_update max_updates",
    "train.accumulate": "gradient_accumulation_steps grad_accum accumulate_grad_batches update_freq",
    "train.clip_norm": "clip grad_clip max_grad_norm clip_grad_norm gradient_clip_val",
    "train.checkpoint_every": "save_steps save_every save_interval checkpoint_interval",
    "train.validate_every": "eval_steps eval_every eval_interval val_check_interval",
    "train.log_every": "logging_steps log_interval",
    "segments.length": "seq_len seq_length seqlen sequence_length max_seq_len max_length block_size tokens_per_sample",
    "evaluate.context": "context_length context_size context_len context_window n_ctx",
    "evaluate.block": "stride window window_size",
    "evaluate.tokens": "max_tokens eval_tokens max_eval_tokens",
    "index.k": "k top_k topk neighbors num_neighbors n_neighbors",
    "tune.temperature": "temperature temp tau",
    "tune.interpolation_temperature": "knn_temp knn_temperature",
    "tune.interpolation_share": "lambda lmbda lam",
    "tune.memory_size": "memory_size mem_size memory_length mem_len cache_size",
    "datastore.tokens": "datastore_size dstore_size store_size",
    "trainer.accelerator": "device cuda use_cuda accelerator cpu gpu",
    "trainer.devices": "gpus devices num_gpus n_gpu ngpus world_size nproc_per_node",
    "trainer.num_nodes": "nodes num_nodes nnodes",
    "trainer.precision": "precision fp16 bf16 amp mixed_precision",
    "model.width": "hidden_size width d_model n_embd embed_dim dim hidden_dim",
    "model.backbone.layers": "layers num_layers n_layers n_layer num_hidden_layers",
    "model.backbone.heads": "heads num_heads n_heads n_head num_attention_heads",
    "model.backbone.inner": "ffn_dim inner intermediate_size d_ff",
    "model.backbone.dropout": "dropout dropout_rate hidden_dropout",
    "optimizer.weight_decay": "weight_decay wd",
    "vocabulary.max_size": "vocab_size vocabulary_size max_vocab",
    "paths.outputs": "output_dir out_dir outdir outputs save_dir",
    "paths.data": "cache_dir data_root",
    "dataset=folder dataset.path": "dataset.path data_dir data_path train_file corpus",
    "model=pretrained model.name": "model.name model_name model_name_or_path pretrained_model",
    "seed": "random_seed manual_seed seeds",
    "threads": "num_threads num_workers workers cores",
    "name": "run_name experiment_name",
    "checkpoint": "resume resume_from resume_from_checkpoint ckpt ckpt_path",
    "optimizer": "optim",
    "schedule": "scheduler lr_scheduler lr_schedule",
    "eviction": "policy eviction_policy",
    "logger": "wandb use_wandb report_to",
}
SETTING_OF = {name: setting for setting, names in NAMES_ELSEWHERE.items() for name in names.split()}


def no_setting(key: str, known: Iterable[str]) -> str:
    """Return what to say of a setting that there is not, with the one that is meant.

    That is a similar one of the same section, or the one that has this name in other programs, or a similar one elsewhere.
    """
    section, _, name = key.lower().replace("-", "_").rpartition(".")
    near = [each for each in difflib.get_close_matches(key, known, 5, cutoff=0.8) if "." in each or not section]
    beside = [each for each in near if section and each.rpartition(".")[0] == section]
    whole, named = ([SETTING_OF[each]] if each in SETTING_OF else [] for each in (f"{section}.{name}", name))
    found = [*whole, *beside, *named, *near]
    return f"there is no setting {key}" + (f": is it {found[0]}?" if found else "")


def no_choice(group: str, name: str, choices: list[str]) -> str:
    """Return what to say of a choice that a group does not have: the nearest that it has, or all of them."""
    near = [] if name in choices else difflib.get_close_matches(name, choices, 1, cutoff=0.75)  # it may be another group's
    return f"{group}={name}: is it {near[0]}?" if near else f"{group}={name}: choose from {', '.join(choices)}"


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def wanted(kind: Any, rule: Rule | None = None) -> str:
    """Return what a value of a type, with its rule, must be, to follow "must be"."""
    if rule and (rule.switch or rule.choices or rule.bounded) and get_origin(kind) is not list:
        return rule.text
    if is_dataclass(kind):
        return f"a section: set what stands in it, as {fields(kind)[0].name}"
    return " or ".join(map(name_of_type, alternatives(kind)))


def name_of_type(kind: Any) -> str:
    """Return what one type is called."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        return ", ".join(map(str, get_args(kind)))
    if origin is list and get_args(kind):
        return f"a list, as [A,B], each {TYPES.get(get_args(kind)[0], 'an entry')}"
    return "a list" if origin in (list, tuple) else TYPES.get(kind, "a section")
