"""Checks before hours of work are spent: of settings that must fit one another, and of this machine.

Types and bounds of settings are checked by the schema, arguments of components by their constructors, which are called here.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from trime.common.components import build
from trime.common.cpu import multiplies_in_bfloat16, prepare_cpu
from trime.common.io import plain
from trime.config.check import check_components
from trime.errors import UserError, install_command
from trime.models.network import Network, build_network
from trime.report.report_runs import check_report
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.scoring.rows import NOT_FITTED, traits_of
from trime.stages.encode import TextWindows
from trime.stages.graph import Graph
from trime.stages.memories import Memories
from trime.stages.model_io import CARRIED
from trime.stages.pretrained import is_pretrained
from trime.stages.tune import given_mixture
from trime.token_memory.train.visibility import Previous
from trime.training.hardware import Hardware
from trime.training.trainer import TrainerSettings

log = logging.getLogger(__name__)

SYMBOLS = 2**16  # of a vocabulary, to try a model
# Arguments of Lightning's trainer that the lab gives it, and the setting that decides each.
DECIDED_BY = {
    **dict.fromkeys(("max_steps", "max_epochs", "min_epochs", "fast_dev_run"), "train.updates"),
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch"), "train.validate_every"),
    **dict.fromkeys(("accelerator", "devices", "strategy", "num_nodes", "precision", "enable_progress_bar"), "trainer.…"),
    "accumulate_grad_batches": "train.accumulate",
    "gradient_clip_val": "train.clip_norm",
    "log_every_n_steps": "train.log_every",
    "enable_checkpointing": "train.checkpoint_every",
    "callbacks": "callbacks.NAME",
    "logger": "logger.lightning.NAME",
    "default_root_dir": "paths.outputs",
    "plugins": "trainer.strategy",
}


def build_graph(config: DictConfig) -> Graph:
    """Return the graph of an experiment, of the class that ``task`` names."""
    return build(config.task, "task")(config)


def open_graph(config: DictConfig) -> Graph:
    """Return the graph of an experiment whose configuration passes all checks; UserError at the first that fails."""
    check(config)
    hardware = Hardware.of(config.trainer)
    if hardware.device.type == "cpu":
        prepare_cpu()
        if hardware.precision.startswith("bf16") and not multiplies_in_bfloat16():
            log.warning(
                f"trainer.precision={hardware.precision}: this processor has no instructions for bfloat16 and imitates them, "
                "many times slower than float32: set trainer.precision=auto"
            )
    return build_graph(config)


def check(config: DictConfig) -> None:
    """Raise UserError at the first setting that cannot work."""
    check_components(plain(config))
    check_report(config)
    graph = build_graph(config)
    pretrained = is_pretrained(config)
    reads = {"train_small", "answer"} & {*config.stages}
    if reads and not pretrained:
        raise UserError(f"stage {min(reads)} needs a model that answers questions: choose experiment=attendre_train_small")
    if not config.train.updates and not pretrained:
        raise UserError("train.updates=0: a model of this suite is trained; only model=pretrained can be taken as it is")
    check_trainer(config)
    if config.dictionary and not config.checkpoint:
        raise UserError("dictionary= belongs to a released checkpoint: name it, checkpoint=FILE")
    check_rows(graph)
    check_memories(graph)
    graph.check_settings()
    if pretrained:
        check_pretrained(config)
    elif not config.checkpoint:
        check_model(graph)


def check_trainer(config: DictConfig) -> None:
    """Raise UserError if this machine, or Lightning's trainer, cannot do what is asked for."""
    _ = Hardware.of(config.trainer).node_rank  # the environment says which machine this is
    trains = {"fit", "train_small"} & {*config.stages}
    if trains and config.trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(f"trainer.accelerator={config.trainer.accelerator}: this machine has no CUDA device; set auto or cpu")
    extra = plain(config.trainer.extra)
    for name in extra.keys() & DECIDED_BY.keys():
        raise UserError(f"trainer.extra.{name}: this argument is set by {DECIDED_BY[name]}: set that")
    check_components({"trainer.extra": {"_target_": "pytorch_lightning.Trainer"} | extra})
    for key, components in (("callbacks", config.callbacks), ("logger.lightning", config.logger.lightning)):
        for name, component in components.items():
            if component is not None and not (OmegaConf.is_dict(component) and component.get("_target_")):
                raise UserError(f"{key}.{name}={component}: it must name a class, as {{_target_: package.module.CLASS}}")
    TrainerSettings.of(config).added_callbacks()
    try:
        instantiate_setting(config, "optimizer", _partial_=True)([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(f"optimizer: {error}") from error
    instantiate_setting(config, "schedule")


def check_memories(graph: Graph) -> None:
    """Raise UserError if a memory in training, or the search of the external memory, cannot be built."""
    config = graph.config
    if config.index.device == "cuda" and config.index.engine == "local" and not torch.cuda.is_available():
        raise UserError("index.device=cuda: this machine has no CUDA device; set index.device=cpu")
    asked = {"index.engine": config.index.engine == "ray", "engine": "address" in config.engine}
    for key in (key for key, by_ray in asked.items() if by_ray and not find_spec("ray")):
        raise UserError(f"{key}=ray needs Ray: {install_command('cluster')}, or {key}=local")
    if all(asked.values()):
        raise UserError("each worker of engine=ray would start those of index.engine=ray: choose one of them")
    if config.index.replicas > 1 and config.index.engine != "ray":
        raise UserError(f"index.replicas={config.index.replicas} are workers of Ray: set index.engine=ray, or index.replicas=1")
    check_sizes(graph)
    batching = instantiate_setting(config, "batching")
    memory = instantiate_setting(config, "memory") if config.memory.get("_target_") else None
    if isinstance(getattr(memory, "visibility", None), Previous) and config.memory.stale and not batching.contiguous_rows:
        raise UserError("memory=previous needs rows that continue from batch to batch: set batching=streams")
    instantiate_setting(config, "neighbours")
    if graph.reads_pieces and config.neighbours.get("analyzer") == "english":
        raise UserError("neighbours.analyzer=english reads words, and tokens here are pieces of words: set raw")
    if config.model.get("gate") and (memory is None or is_pretrained(config)) and not config.checkpoint:
        raise UserError(
            "model.gate=true is learned with a memory in training, and not by pretrained models: choose memory=local"
        )
    at_test = OmegaConf.select(config, graph.at_test)
    metric = config.memory.get("metric", at_test)
    if metric != at_test:
        raise UserError(f"memory.metric={metric} in training and {at_test} at test: set {graph.at_test} alone")
    for stored in graph.memories.stored.values():
        stored.check_settings()
    for row in (row for row in graph.table if isinstance(row, MixtureSpec)):
        check_metrics(graph.memories, row.joint, at_test)
        for interpolation in row.interpolations:
            check_metrics(graph.memories, interpolation.memories, None)


def check_metrics(memories: Memories, joined: tuple[str, ...], vocabulary: str | None) -> None:
    """Raise UserError if memories of one softmax, in which the vocabulary may be too, compare contexts differently."""
    expected, of = vocabulary, "similarity"
    for name in joined:
        metric = memories.kinds[name].metric
        if metric and expected and metric != expected:
            raise UserError(
                f"memory {name} compares contexts by {metric} (index.metric), and is joined with {of}={expected}: "
                "set similarity alone, or rows that interpolate"
            )
        expected, of = (expected, of) if expected else (metric, f"memory {name}")


def check_sizes(graph: Graph) -> None:
    """Raise UserError if a memory is so small that its policy has no choice."""
    config = graph.config
    sizes = {"eviction": config.model.get("memory_size"), "train.eviction": config.train.memory_size}
    for name, node in graph.memories.nodes.items():
        if "policy" in node and "sizes" in node:
            sizes[f"test_memories.{name}.policy"] = node.sizes
    for key, given in sizes.items():
        policy = instantiate_setting(config, key)
        for size in {size for size in as_list(plain(given)) if size and policy}:
            policy.check_size(size)


def check_rows(graph: Graph) -> None:
    """Raise UserError if the memories of an experiment cannot be mixed as asked."""
    config, model = graph.config, graph.config.mixture.model
    if config.mixture.kind not in NOT_FITTED:
        if model is None or "_target_" not in model:
            raise UserError(f"mixture.model={model}: mixture.kind={config.mixture.kind} needs a model, as in conf/mixture")
        instantiate_setting(config, "mixture.model")
    for row in (row for row in graph.table if isinstance(row, FittedMixtureSpec)):
        given_mixture(config)
        if config.compatibility.sorted_windows:  # windows are then not read in the order of the text
            ordered = [name for name in row.memories if traits_of(config, name).needs_text_order]
            if ordered:
                raise UserError(f"memory {ordered[0]} reads a text in its order: set compatibility=none, or leave it out")
            if model.get("history"):
                raise UserError(
                    "mixture.model.history knows a text in its order: set compatibility=none, or mixture.model.history=[]"
                )


def check_pretrained(config: DictConfig) -> None:
    """Raise UserError if a pretrained model cannot read text with these settings."""
    model, sizes = config.model, plain(config.model.memory_size)
    answers = {"train_small", "answer"} & {*config.stages}
    if answers and sizes == 0:
        raise UserError("model.memory_size=0: reading long contexts needs entries, at least 1")
    if any(0 < least < model.chunk for least in as_list(sizes)):
        raise UserError(f"model.memory_size={sizes} is less than model.chunk={model.chunk}, which it must hold: lower that")
    if isinstance(sizes, list) and 0 in sizes:
        raise UserError(f"model.memory_size={sizes}: every layer needs entries, or none does (model.memory_size=0)")
    if config.small.spread and config.small.model.kind != "decoder":
        raise UserError("small.spread=true is for small.model.kind=decoder: a T5 does not distinguish distances beyond 128")
    if answers:
        questions, split = instantiate_setting(config, "questions"), config.answering.split
        if "answer" in config.stages and split not in questions.splits:
            raise UserError(
                f"answering.split={split}: the {split} questions of questions={questions.name} have no answers: "
                f"set answering.split={questions.splits[-1]}"
            )
        if model.prefill != "chunked" and model.name is None and config.small.model.kind != "decoder":
            raise UserError(f"model.prefill={model.prefill} is for decoders: leave it out")
        if model.prefill == "guided":
            check_guided(config)
    elif sizes and longest_context(config) and {"encode", "evaluate"} & {*config.stages}:
        raise UserError(f"model.memory_size={sizes}: {CARRIED}")


def check_guided(config: DictConfig) -> None:
    """Raise UserError if questions cannot decide what is kept of their texts (model.prefill=guided) with these settings."""
    sizes = plain(config.model.memory_size)
    if config.answering.order == "first":
        raise UserError("model.prefill=guided needs the question after the text: set answering.order=last or both")
    if any(as_list(plain(config.model.query_size))):
        raise UserError("model.prefill=guided is for queries that attend at once: set model.query_size=0")
    if config.model.causal is False:
        raise UserError("model.prefill=guided is for causal decoders: leave model.causal out")
    if config.model.chunk >= min(as_list(sizes)):
        raise UserError(
            f"model.prefill=guided: model.chunk={config.model.chunk} leaves no room for earlier text in a memory of {sizes}: "
            "lower model.chunk"
        )
    if not instantiate_setting(config, "eviction").can_be_guided:
        name = config.eviction._target_.split(".")[-2]
        remedy = "forgets, set eviction.gamma=0" if config.eviction.get("gamma") else "does not, set eviction=snapkv or tova"
        raise UserError(
            f"model.prefill=guided needs a policy that scores entries by attention, whenever it was paid: eviction={name} "
            f"{remedy}"
        )


def check_model(graph: Graph) -> None:
    """Raise UserError if the model cannot be built, with the memory inside it that evaluation uses."""
    config, model = graph.config, graph.model_settings
    if "memory_size" in config.model:
        if isinstance(plain(config.model.memory_size), list):
            raise UserError(
                f"model.memory_size={config.model.memory_size}: a list, one for each layer, is for model=pretrained"
            )
        if longest_context(config):
            raise UserError(CARRIED)
    try:
        with torch.device("meta"):
            network: Network = build_network(model.with_memory(model.components()), SYMBOLS)
    except (RuntimeError, ZeroDivisionError, IndexError) as error:  # of PyTorch, at sizes below 1
        reason = " ".join(str(error).split())
        raise UserError(f"the model cannot be built ({reason}): see model.* and model.backbone.*") from error
    graph.check_network(network)


def longest_context(config: DictConfig) -> int:
    """Return the largest number of context tokens of a window, in evaluated text or in that of a datastore."""
    return max(TextWindows.of(config, for_datastore).context for for_datastore in (False, True))


def as_list(value: Any) -> list[Any]:
    """Return the values of a setting that takes one, or a list of them."""
    return value if isinstance(value, list) else [value]


def instantiate_setting(config: DictConfig, key: str, **options: Any) -> Any:
    """Return the component that a section of the configuration describes; UserError, with its key, if it cannot be built."""
    return build(OmegaConf.select(config, key), key, **options)
