"""A pretrained model as the language model of an experiment: its fingerprint, its memories, and its vocabulary for all text."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.common.components import build
from trime.data.corpus import VocabularySource, content_hash
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.kv.answering import Answerer, DecoderAnswerer, EncoderDecoderAnswerer, ReadingConfig
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.recall.store import Recall
from trime.kv.rope import RopeDecoder, per_layer
from trime.kv.t5 import T5Encoder
from trime.models.pretrained.tokenizer import PieceTokenizer
from trime.training.hardware import Hardware

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json")  # they decide how text is tokenized


def is_pretrained(config: DictConfig) -> bool:
    """Return whether the experiment uses a pretrained model (model=pretrained)."""
    return "name" in config.model


@cache
def model_fingerprint(name: str) -> str:
    """Return the hashes of a model's weights, configuration, tokenizer and template of chats; its name if it is no folder."""
    return folder_hash(name, "*.safetensors", "config.json", "chat_template*", *TOKENIZER_FILES)


def folder_hash(name: str, *patterns: str) -> str:
    """Return the hashes of the files in a folder that match; the name itself if there are none."""
    files = [file for pattern in patterns for file in sorted(Path(name).expanduser().glob(pattern))]
    return " ".join(map(content_hash, files)) or name


def build_answerer(settings: dict[str, Any], eviction: dict[str, Any], model: Any, hardware: Hardware) -> Answerer:
    """Wrap a loaded model so that it reads long prompts with the memories of ``settings`` (conf/model), then answers."""
    model.to(hardware.device)
    if model.config.is_encoder_decoder:
        if settings["prefill"] != "chunked":
            raise UserError(f"model.prefill={settings['prefill']} is for decoders: set chunked for an encoder-decoder")
        if settings["per_head"] or settings["recall"]:
            raise UserError(
                f"model.per_head={settings['per_head']}, model.recall={settings['recall']}: both are for decoders, since heads "
                "of an encoder-decoder share the bias of their positions; set false and 0"
            )
        encoder = T5Encoder(model)
        return EncoderDecoderAnswerer(encoder, reading_config(settings, eviction, encoder), settings["outputs"])
    decoder = RopeDecoder(model, settings["position"], settings["factor"], settings["cached_keys"])
    return DecoderAnswerer(decoder, reading_config(settings, eviction, decoder))


def reading_config(settings: dict[str, Any], eviction: dict[str, Any], family: Any) -> ReadingConfig:
    """Return the reading of long prompts: an Attendre memory for each layer (sizes may differ) and the chunk length."""
    count = len(family.layers)
    sizes, query_sizes, top_k = (per_layer(settings[name], count, name) for name in ("memory_size", "query_size", "top_k"))
    if any(query_size is not None and query_size >= size for size, query_size in zip(sizes, query_sizes, strict=True)):
        log.warning(f"query_size={settings['query_size']} is not below memory_size: queries attend to later keys only")
    causal = family.causal if settings["causal"] is None else settings["causal"]
    memories = [
        Attendre(
            BoundedMemory(size, build(eviction)),
            query_size if query_size is not None else 0 if causal else size // 2,
            k,
            causal,
            window,
            settings["search"],
        )
        for size, query_size, k, window in zip(sizes, query_sizes, top_k, family.windows, strict=True)
    ]
    recall = Recall(settings["recall"]) if settings["recall"] else None
    return ReadingConfig(memories, settings["chunk"], settings["end"], settings["prefill"], settings["per_head"], recall)


def vocabulary_source(config: DictConfig) -> VocabularySource:
    """Return the vocabulary of the model's tokenizer, in which all text is read; UserError if no model is named."""
    if config.model.name is None:
        raise UserError("model=pretrained as a language model needs the name of a model: add model.name=DIR_OR_NAME")
    pieces = PieceTokenizer(config.model.name)
    vocabulary = Vocabulary(pieces.symbols, [0] * len(pieces.symbols), pieces.start, pieces.unknown)
    name = f"{vocabulary.fingerprint} {folder_hash(config.model.name, *TOKENIZER_FILES)} special=text"  # see encode_text
    return VocabularySource(name, lambda: vocabulary, pieces)
