"""Checks of a configuration before anything is built: a user's mistake costs seconds, not a training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from trime.data.segments import count_of
from trime.memory.similarity import METRICS
from trime.models.network import build_network
from trime.models.pretrained.rope import POSITIONS, STORED
from trime.stages.artefact import plain
from trime.stages.model_folder import model_of, remember
from trime.stages.pretrained import is_pretrained
from trime.stages.processes import node
from trime.tasks.rows import rows_of
from trime.types import UserError

POSITIVE = (
    "segments.length",
    "train.accumulate",
    "train.checkpoint_every",
    "train.validate_every",
    "train.log_every",
    "evaluate.block",
    "evaluate.batch_tokens",
    "index.k",
    "index.probe",
    "index.parts",
    "trainer.num_nodes",
    "index.cores",
)
NATURAL = ("seed", "train.plain_share", "train.clip_norm", "evaluate.context", "vocabulary.minimum")
PRECISIONS = ("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true")
TRANSLATES = ("prepare", "pack", "fit", "encode", "datastore", "tune", "evaluate", "report")
DTYPES = ("float16", "bfloat16", "float32")


def check(config: DictConfig) -> None:
    """Raises UserError at the first setting that cannot work."""
    demand(config, ("task",), ("language_model", "translation").__contains__, "language_model or translation")
    demand(
        config,
        ("batching.tokens" if "tokens" in config.batching else "batching.size", *POSITIVE),
        lambda value: is_whole(value) and value > 0,
        "a whole number above 0",
    )
    demand(config, NATURAL, lambda value: is_number(value) and value >= 0, "a number, at least 0")
    demand(config, ("evaluate.dtype",), DTYPES.__contains__, f"one of {', '.join(DTYPES)}")
    demand(config, ("datastore.dtype",), (*DTYPES, "int8").__contains__, f"one of {', '.join(DTYPES)}, int8")
    demand(config, ("similarity", "index.metric"), METRICS.__contains__, "ip (inner product), l2 (squared distance) or cosine")
    demand(config, ("index.recall",), lambda value: is_number(value) and 0 < value <= 1, "a share above 0, at most 1")
    demand(config, ("index.device",), ("cpu", "cuda").__contains__, "cpu or cuda")
    demand(config, ("index.engine",), ("local", "ray").__contains__, "local or ray")
    demand(config, ("index.address",), lambda value: value in (None, "auto") or ":" in str(value), "null, auto or HOST:PORT")
    if config.index.engine == "ray" and not find_spec("ray"):
        raise UserError("index.engine=ray needs Ray: pip install 'trime[cluster]', or index.engine=local")
    node(config)
    demand(config, ("vocabulary.limit",), lambda value: value is None or (is_whole(value) and value > 2), "a number or null")
    demand(config, ("trainer.devices",), lambda value: value == "auto" or (is_whole(value) and value > 0), "a number or auto")
    demand(config, ("trainer.strategy",), ("ddp", "fsdp").__contains__, "ddp or fsdp")
    demand(config, ("trainer.accelerator",), ("auto", "cpu", "gpu", "cuda").__contains__, "auto, cpu or gpu")
    demand(config, ("trainer.precision",), PRECISIONS.__contains__, f"one of {', '.join(PRECISIONS)}")
    wanted = "a list of whole numbers above 0"
    demand(config, ("replay.sizes",), lambda value: is_grid(value) and all(is_whole(v) and v > 0 for v in value), wanted)
    demand(config, ("replay.c",), lambda value: value is None or is_grid(value), "null or a list of numbers")
    demand(config, ("train.memory_size",), lambda value: is_whole(value) and value > 0, "a whole number above 0")
    demand(config, ("generate.tokens",), lambda value: is_whole(value) and value > 0, "a whole number above 0")
    demand(config, ("generate.entries",), lambda value: is_whole(value) and value >= 0, "a whole number, at least 0")
    demand(config, ("generate.temperature",), lambda value: is_number(value) and value >= 0, "a number, at least 0")
    demand(config, ("generate.top_p",), lambda value: is_number(value) and 0 < value <= 1, "a number above 0, at most 1")
    samples = ("passages", "tokens", "entries", "before")
    for name, least in zip(samples, (0, 1, 0, 0), strict=True):
        allowed = f"a whole number, at least {least}" + (", or null" if name == "before" else "")
        demand(config, (f"report.samples.{name}",), partial(is_at_least, least, name == "before"), allowed)
    if (
        config.memory.get("stale")
        and "Previous" in config.memory.visibility["_target_"]
        and "streams" not in config.batching["_target_"]
    ):
        raise UserError("memory=previous wants rows that read on: set batching=streams")
    check_similarity(config)
    if config.task == "translation":
        check_translation(config)
    for policy in (config.eviction, config.train.eviction):
        instantiated(policy)
    least = 0 if is_pretrained(config) else 1  # a pretrained model may be taken as it is
    demand(config, ("train.updates",), lambda value: is_whole(value) and value >= least, f"a whole number, at least {least}")
    if is_pretrained(config):
        check_reading(config)
    elif "memory_size" in config.model:
        demand(config, ("model.memory_size",), lambda value: is_whole(value) and value >= 0, "a whole number, at least 0")
        check_memory(config)
    for key in ("evaluate.tokens", "datastore.tokens", "train.validate_tokens"):
        count_of(OmegaConf.select(config, key))
    demand(config, tuple(f"tune.{name}" for name in config.tune), is_grid, "a list of numbers, as in [0.5,1.0]")
    rows_of(plain(config.evaluate.rows), config.tune)


def check_similarity(config: DictConfig) -> None:
    """UserError where a gate could not be learned, or training and test would not mean the same by similar."""
    demand(config, ("model.gate",), lambda value: value is None or isinstance(value, bool), "true or false")
    learned = config.memory.get("_target_") and not is_pretrained(config)
    if config.model.get("gate") and not learned and not config.checkpoint:
        raise UserError("model.gate=true is learned with a memory in training, not in a pretrained model: choose memory=local")
    metric = config.memory.get("metric", config.similarity)
    if metric not in METRICS:
        raise UserError(f"memory.metric={metric}: choose one of {', '.join(METRICS)}")
    if metric != config.similarity and config.task != "translation":
        raise UserError(f"memory.metric={metric} in training and {config.similarity} at test: set similarity alone")


def check_translation(config: DictConfig) -> None:
    """UserError where sentences could not be translated as asked."""
    stages = set(config.stages) - set(TRANSLATES)
    if stages:
        raise UserError(f"stage {min(stages)} is not for translation: leave it out of stages")
    if not config.model.backbone._target_.startswith("trime.models.translation") or "tokens" not in config.batching:
        raise UserError("translation wants model=translation and batching=budget or budget_bm25: leave others out")
    if config.evaluate.get("dataset") or config.datastore.get("dataset") or config.checkpoint or config.evaluate.analysis:
        raise UserError("translation has no evaluate.dataset, datastore.dataset, checkpoint, evaluate.analysis: leave them out")
    memories = [row.memories for row in rows_of(plain(config.evaluate.rows), config.tune)]
    if set().union(*memories) - {"external"} or any(memories) != bool(memories[-1]) or sum(map(bool, memories)) > 1:
        raise UserError("evaluate.rows: a translation's last row may have the external memory, others none")
    keys = [f"translation.{name}" for name in ("beam", "sentences_at_once", "batch_tokens")]
    demand(config, (*keys,), lambda value: is_whole(value) and value > 0, "a whole number above 0")
    demand(
        config,
        ("translation.k",),
        lambda value: is_grid(value) and all(is_whole(v) and v > 0 for v in value),
        "a list as [2,4]",
    )
    demand(config, ("translation.penalty",), is_number, "a number")
    demand(config, ("translation.smoothing",), lambda value: is_number(value) and 0 <= value < 1, "a number in 0..1, below 1")
    pair = "two numbers a and b: a translation of n pieces has at most a n + b"
    demand(config, ("translation.longest",), lambda value: is_grid(value) and len(value) == 2 and min(value) >= 0, pair)
    demand(
        config, ("translation.sentences",), lambda value: value is None or (is_whole(value) and value > 0), "null or a number"
    )


def check_reading(config: DictConfig) -> None:
    """UserError where a pretrained model could not be read as asked."""
    keys = ("model.chunk", "model.outputs", "taught.batch", "answering.batch", "answering.longest")
    demand(config, keys, lambda value: is_whole(value) and value > 0, "a whole number above 0")
    answers = bool({"teach", "answer"} & set(config.stages))
    for name, least, optional in (("memory_size", int(answers), False), ("query_size", 0, True), ("top_k", 1, True)):
        wanted = f"a whole number, at least {least}, or a list of them{', or null' * optional}"
        demand(config, (f"model.{name}",), partial(are_sizes, least=least, optional=optional), wanted)
    sizes = plain(config.model.memory_size)
    if any(0 < least < config.model.chunk for least in (sizes if isinstance(sizes, list) else [sizes])):
        raise UserError(
            f"model.memory_size={sizes} is less than model.chunk={config.model.chunk}, which it must hold: lower that"
        )
    if isinstance(sizes, list) and 0 in sizes:
        raise UserError(f"model.memory_size={sizes}: every layer wants entries, or none does (model.memory_size=0)")
    if answers:
        instantiated(config.questions)
    elif sizes and config.evaluate.context and {"encode", "evaluate"} & set(config.stages):
        raise UserError("with model.memory_size the model reads on from window to window: set evaluate.context=0")
    if not config.model.backbone._target_.startswith("trime.models.pretrained"):
        raise UserError("model=pretrained has layers of its own: leave backbone= and head= out")
    lora = plain(config.model.lora)
    if lora is not None and not (isinstance(lora, dict) and {"rank", "alpha"} <= lora.keys() <= {"rank", "alpha", "dropout"}):
        raise UserError(f"model.lora={lora}: it must be null, or as in 'model.lora={{rank: 8, alpha: 16, dropout: 0.0}}'")
    for name, value in (lora or {}).items():
        if not is_number(value) or value < 0 or (name != "dropout" and not (is_whole(value) and value > 0)):
            raise UserError(f"model.lora.{name}={value}: rank and alpha are whole numbers above 0, dropout at least 0")
    demand(config, ("model.dtype",), DTYPES.__contains__, f"one of {', '.join(DTYPES)}")
    demand(config, ("model.position",), POSITIONS.__contains__, f"one of {', '.join(POSITIONS)}")
    demand(config, ("model.stored",), STORED.__contains__, f"one of {', '.join(STORED)}")
    demand(config, ("model.search",), ("exact", "buckets").__contains__, "exact or buckets")
    demand(config, ("model.factor",), lambda value: is_number(value) and value >= 1, "a number, at least 1")
    demand(config, ("model.end",), ("flush", "drain").__contains__, "flush or drain")
    demand(config, ("taught.alone_share",), lambda value: is_number(value) and 0 <= value <= 1, "a number in 0..1")
    if config.taught.spread and config.taught.model.kind != "decoder":
        raise UserError("taught.spread=true is for taught.model.kind=decoder: a T5 tells no distances beyond 128 apart")
    demand(config, ("answering.split",), ("train", "valid", "test").__contains__, "train, valid or test")
    wanted = "null or a whole number above 0"
    demand(config, ("answering.last",), lambda value: value is None or (is_whole(value) and value > 0), wanted)


def are_sizes(value: Any, least: int, optional: bool) -> bool:
    """A size for all layers, or one for each."""
    each = value if isinstance(value, list) else [value]
    return bool(each) and all((optional and one is None) or (is_whole(one) and one >= least) for one in each)


def instantiated(part: DictConfig) -> Any:
    """What a part of the configuration describes; UserError where it cannot be."""
    try:
        return instantiate(part, _convert_="all")
    except InstantiationException as error:
        raise UserError(str(error.__cause__ or error).splitlines()[0]) from error


def check_memory(config: DictConfig) -> None:
    """UserError where evaluation's memory inside the model could not be built: after training it would be late."""
    if config.evaluate.context:
        raise UserError("this model reads on from window to window: set evaluate.context=0")
    model = model_of(config)
    remember(model, config)
    with torch.device("meta"):
        build_network(OmegaConf.create(model), 100)


def demand(config: DictConfig, keys: tuple[str, ...], right: Callable[[Any], bool], wanted: str) -> None:
    """Every key's value is right, or an error that says what is wanted."""
    for key in keys:
        value = plain(OmegaConf.select(config, key))
        if not right(value):
            raise UserError(f"{key}={value}: it must be {wanted}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_at_least(least: int, none: bool, value: Any) -> bool:
    """A whole number, or null where that is allowed."""
    return (none and value is None) or (is_whole(value) and value >= least)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_grid(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, value))
