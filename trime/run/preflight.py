"""Checks of a configuration before anything is built: a user's mistake costs seconds, not a training."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from trime.config.check import check_settings
from trime.config.schema import STAGES
from trime.errors import UserError, install_command
from trime.evaluation.fitted_mixture_spec import FittedMixtureSpec
from trime.evaluation.mixture_spec import MixtureSpec
from trime.io import plain
from trime.models.network import build_network
from trime.pipeline.model_io import CARRIED, model_of, set_evaluation_memory, window_sizes
from trime.pipeline.pretrained import is_pretrained
from trime.pipeline.processes import node_rank
from trime.pipeline.rows import NOT_FITTED, memories_of, rows_of
from trime.pipeline.training import added_callbacks
from trime.report.report_runs import NAME, check_report
from trime.stages.datastore import check_index_factory
from trime.stages.mixture import given_mixture
from trime.urls import is_url

SYMBOLS = 2**16  # of a vocabulary, to try a model


def check(config: DictConfig) -> None:
    """Raise UserError at the first setting that cannot work."""
    if config.task == "translation" and not config.model.head._target_.endswith(".Softmax"):  # others refer to what it lacks
        raise UserError("translation has one softmax over all pieces: leave head=adaptive out")
    check_settings(plain(config))
    for name, place in config.paths.items():
        if is_url(place):
            raise UserError(f"paths.{name}={place}: name a folder of this machine, or of a disk that it has mounted")
    check_formats(config)
    pretrained = is_pretrained(config)
    reads = {"train_small", "answer"} & {*config.stages}
    if reads and not pretrained:
        raise UserError(f"stage {min(reads)} needs a model that answers questions: choose experiment=attendre_train_small")
    if not config.train.updates and not pretrained:
        raise UserError("train.updates=0: a model of this suite is trained; only model=pretrained can be taken as it is")
    check_mixture(config)
    node_rank(config)
    added_callbacks(config)
    trains = {"fit", "train_small"} & {*config.stages}
    if trains and config.trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(f"trainer.accelerator={config.trainer.accelerator}: this machine has no CUDA device; set auto or cpu")
    if config.dictionary and not config.checkpoint:
        raise UserError("dictionary= belongs to a released checkpoint: name it, checkpoint=FILE")
    for policy in (config.eviction, config.train.eviction):
        instantiated(policy)
    check_memories(config)
    if config.task == "translation":
        check_translation(config)
    if pretrained:
        check_pretrained(config)
        return
    if not config.checkpoint:
        check_model(config)


def check_formats(config: DictConfig) -> None:
    """Raise UserError at a bad name, an address without a port, and settings of reports or translations that would fail."""
    if not NAME.fullmatch(config.name):
        raise UserError(f"name={config.name}: it must be a name, not a path")
    check_report(config)
    for key in ("index.address", "engine.address"):
        address = OmegaConf.select(config, key)
        if address not in (None, "auto") and ":" not in str(address):
            raise UserError(f"{key}={address}: it must be null, auto or HOST:PORT")
    max_length = list(config.translation.max_length)
    if len(max_length) != 2 or sum(max_length) <= 0:
        raise UserError(f"translation.max_length={max_length}: it must be two numbers a and b: n pieces become at most a n + b")


def check_memories(config: DictConfig) -> None:
    """Raise UserError if a memory in training, or of a row at test, cannot be built."""
    if config.index.device == "cuda" and config.index.engine == "local" and not torch.cuda.is_available():
        raise UserError("index.device=cuda: this machine has no CUDA device; set index.device=cpu")
    for setting, asked in (("index.engine", config.index.engine == "ray"), ("engine", "address" in config.engine)):
        if asked and not find_spec("ray"):
            raise UserError(f"{setting}=ray needs Ray: {install_command('cluster')}, or {setting}=local")
    if config.index.replicas > 1 and config.index.engine != "ray":
        raise UserError(f"index.replicas={config.index.replicas} are workers of Ray: set index.engine=ray, or index.replicas=1")
    if config.index.engine == "ray" and not config.engine._target_.endswith(".Local"):
        raise UserError("each worker of engine= would start those of index.engine=ray: choose one of them")
    check_index_factory(config)
    check_sizes(config)
    if config.memory.get("_target_"):
        instantiated(config.memory)
    previous = config.memory.get("stale") and "Previous" in (OmegaConf.select(config, "memory.visibility._target_") or "")
    if previous and "streams" not in config.batching["_target_"]:
        raise UserError("memory=previous needs rows that continue from batch to batch: set batching=streams")
    pieces = config.task == "translation" or is_pretrained(config)
    if pieces and OmegaConf.select(config, "neighbours.analyzer") == "english":
        raise UserError("neighbours.analyzer=english reads words, and tokens here are pieces of words: set raw")
    rows = [row for row in rows_of(config) if isinstance(row, MixtureSpec)]
    check_similarity(config)
    check_fitted(config)
    joined = [names for row in rows for names in (("vocabulary", *row.joint), *(part.memories for part in row.interpolations))]
    mixed = any("external" in names and len(names) > 1 for names in joined)
    if mixed and config.task == "language_model" and config.index.metric != config.similarity:
        raise UserError(
            f"index.metric={config.index.metric}: the external memory is joined with what similarity={config.similarity} "
            "measures: set similarity alone, or rows that interpolate"
        )


def check_sizes(config: DictConfig) -> None:
    """Raise UserError if a memory is so small that its policy has no choice."""
    test = [plain(config.tune.memory_size)] if "long" in memories_of(config) else []
    sizes = {"eviction": [plain(config.model.get("memory_size")), *test], "train.eviction": [config.train.memory_size]}
    for key, given in sizes.items():
        policy = OmegaConf.select(config, key)
        for size in {size for part in given for size in as_list(part) if size and policy}:
            instantiated(policy).check_size(size)


def check_mixture(config: DictConfig) -> None:
    """Raise UserError if the settings of a mixture cannot work, before rows are made from them."""
    if config.mixture.kind in NOT_FITTED:
        return
    model = plain(config.mixture.model)
    if not isinstance(model, dict) or "_target_" not in model:
        raise UserError(f"mixture.model={model}: mixture.kind={config.mixture.kind} needs a model, as in conf/mixture")
    instantiated(config.mixture.model)


def check_fitted(config: DictConfig) -> None:
    """Raise UserError if the memories of an experiment cannot be mixed as asked."""
    fitted = [row for row in rows_of(config) if isinstance(row, FittedMixtureSpec)]
    if not fitted:
        return
    given_mixture(config)
    model = config.mixture.model
    if config.task == "translation" and (model.get("history") or model.get("online")):
        raise UserError("translations of a beam have no history: set mixture.model.history=[] and mixture.model.online=false")
    if "ngram_document" in fitted[0].memories and config.compatibility.sorted_windows:
        raise UserError("memory ngram_document reads a text in its order: set compatibility=none, or leave it out")
    if model.get("history") and config.compatibility.sorted_windows:
        raise UserError("mixture.model.history knows a text in its order: set compatibility=none, or mixture.model.history=[]")


def check_similarity(config: DictConfig) -> None:
    """Raise UserError if a gate cannot be learned, or if training and test would compare contexts by different metrics."""
    learned = config.memory.get("_target_") and not is_pretrained(config)
    if config.model.get("gate") and not learned and not config.checkpoint:
        raise UserError(
            "model.gate=true is learned with a memory in training, and not by pretrained models: choose memory=local"
        )
    asked = "index.metric" if config.task == "translation" else "similarity"
    at_test = OmegaConf.select(config, asked)
    metric = config.memory.get("metric", at_test)
    if metric != at_test:
        raise UserError(f"memory.metric={metric} in training and {at_test} at test: set {asked} alone")


def check_translation(config: DictConfig) -> None:
    """Raise UserError if a translation experiment cannot work."""
    stages = set(config.stages) - set(STAGES)
    if stages:
        raise UserError(f"stage {min(stages)} is not for translation: leave it out of stages")
    if (
        not config.model.backbone._target_.startswith("trime.models.backbones.encoder_decoder")
        or "tokens" not in config.batching
    ):
        raise UserError("translation needs model=translation and batching=budget or budget_bm25: leave others out")
    if config.vocabulary.max_size is None and not config.dataset.get("cut"):
        raise UserError("vocabulary.max_size=null: the number of byte pairs to learn is needed: set vocabulary.max_size=10000")
    analysed = config.evaluate.analysis or config.evaluate.per_token
    if config.evaluate.get("dataset") or config.datastore.get("dataset") or analysed:
        names = "evaluate.dataset, datastore.dataset, evaluate.analysis, evaluate.per_token"
        raise UserError(f"translation has no {names}: leave them out")
    memories = [row.memories for row in rows_of(config)]
    first = sum(not own for own in memories)  # rows without memory
    if set().union(*memories) - {"external"} or any(memories[:first]) or not first:
        raise UserError("evaluate.rows: of a translation the first row has no memory, and later ones the external memory alone")


def check_pretrained(config: DictConfig) -> None:
    """Raise UserError if a pretrained model cannot read text with these settings."""
    answers = bool({"train_small", "answer"} & set(config.stages))
    sizes = plain(config.model.memory_size)
    if answers and sizes == 0:
        raise UserError("model.memory_size=0: reading long contexts needs entries, at least 1")
    if any(0 < least < config.model.chunk for least in as_list(sizes)):
        raise UserError(
            f"model.memory_size={sizes} is less than model.chunk={config.model.chunk}, which it must hold: lower that"
        )
    if isinstance(sizes, list) and 0 in sizes:
        raise UserError(f"model.memory_size={sizes}: every layer needs entries, or none does (model.memory_size=0)")
    if answers:
        check_questions(config)
        if config.model.prefill != "chunked" and config.model.name is None and config.small.model.kind != "decoder":
            raise UserError(f"model.prefill={config.model.prefill} is for decoders: leave it out")
        if config.model.prefill == "guided":
            check_guided(config)
    elif sizes and longest_context(config) and {"encode", "evaluate"} & set(config.stages):
        raise UserError(f"model.memory_size={sizes}: {CARRIED}")
    if not config.model.backbone._target_.startswith("trime.models.pretrained"):
        raise UserError("model=pretrained has layers of its own: leave backbone= and head= out")
    lora = plain(config.model.lora)
    if lora is not None and not (isinstance(lora, dict) and {"rank", "alpha"} <= lora.keys() <= {"rank", "alpha", "dropout"}):
        raise UserError(f"model.lora={lora}: it must be null, or as in 'model.lora={{rank: 8, alpha: 16, dropout: 0.0}}'")
    if config.small.spread and config.small.model.kind != "decoder":
        raise UserError("small.spread=true is for small.model.kind=decoder: a T5 does not distinguish distances beyond 128")


def as_list(value: Any) -> list[Any]:
    """Return the values of a setting that takes one, or a list of them."""
    return value if isinstance(value, list) else [value]


def longest_context(config: DictConfig) -> int:
    """Return the largest number of context tokens of a window, in evaluated text or in that of a datastore."""
    return max(window_sizes(config)[1], window_sizes(config, for_datastore=True)[1])


def check_questions(config: DictConfig) -> None:
    """Raise UserError if there are no such questions, or if the split to be answered has no reference answers."""
    questions, split = instantiated(config.questions), config.answering.split
    if "answer" in config.stages and split not in questions.splits:
        raise UserError(
            f"answering.split={split}: the {split} questions of questions={questions.name} have no answers: "
            f"set answering.split={questions.splits[-1]}"
        )


def check_guided(config: DictConfig) -> None:
    """Raise UserError if questions cannot decide what is kept of their texts (model.prefill=guided) with these settings."""
    if config.answering.order == "first":
        raise UserError("model.prefill=guided needs the question after the text: set answering.order=last or both")
    if any(as_list(plain(config.model.query_size))):
        raise UserError("model.prefill=guided is for queries that attend at once: set model.query_size=0")
    if config.model.causal is False:
        raise UserError("model.prefill=guided is for causal decoders: leave model.causal out")
    sizes = plain(config.model.memory_size)
    if config.model.chunk >= min(as_list(sizes)):
        raise UserError(
            f"model.prefill=guided: model.chunk={config.model.chunk} leaves no room for earlier text in a memory of {sizes}: "
            "lower model.chunk"
        )
    if not instantiated(config.eviction).can_be_guided:
        name = config.eviction._target_.split(".")[-2]
        raise UserError(
            f"model.prefill=guided needs a policy that scores entries by attention, whenever it was paid: eviction={name} "
            f"{'forgets, set eviction.gamma=0' if config.eviction.get('gamma') else 'does not, set eviction=snapkv or tova'}"
        )


def instantiated(part: DictConfig) -> Any:
    """Return the object that a part of the configuration describes; UserError if it cannot be built."""
    try:
        return instantiate(part, _convert_="all")
    except InstantiationException as error:
        raise UserError(str(error.__cause__ or error).splitlines()[0]) from error


def check_model(config: DictConfig) -> None:
    """Raise UserError if the model cannot be built, with the memory inside it that evaluation uses."""
    if config.compatibility.padding is not None and config.task == "language_model" and not config.vocabulary.fairseq:
        raise UserError(
            f"compatibility.padding={config.compatibility.padding} (compatibility=published) is <unk> in our vocabularies: "
            "add vocabulary.fairseq=true"
        )
    model = model_of(config)
    if "memory_size" in config.model:
        if longest_context(config):
            raise UserError(CARRIED)
        set_evaluation_memory(model, config)
    try:
        with torch.device("meta"):
            build_network(OmegaConf.create(model), SYMBOLS)
    except (RuntimeError, ZeroDivisionError, IndexError) as error:  # what PyTorch says of sizes below 1
        said = " ".join(str(error).split())
        raise UserError(f"the model cannot be built ({said}): see model.* and model.backbone.*") from error
