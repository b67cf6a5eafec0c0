"""Texts that a memory is measured on: files that it does not hold, or stored documents that are hidden while they are read."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from trime.data.datasets.files import Text
from trime.data.notes import COPIED
from trime.data.texts import path_list, read_texts
from trime.errors import UserError
from trime.text_memory.decoder import Decoder
from trime.text_memory.experts import TEXT_ORDERS, Experts, Hidden
from trime.text_memory.store import TextStore
from trime.text_memory.worth import Scored
from trime.token_memory.test.ngrams import SuffixArray

log = logging.getLogger(__name__)

SAMPLED, SLICE = 12_288, 4096  # stored tokens that are read, and of a document at most
FEW = 8  # documents, of which slices are hidden in place of all of one


class HeldOut(NamedTuple):
    """A text, with the experts that see all of the memory but this text."""

    name: str
    content: str
    tokens: np.ndarray
    experts: Experts


def from_files(
    paths: str | Path | Iterable[str | Path], field: str, store: TextStore, decoder: Decoder, experts: Experts
) -> list[HeldOut]:
    """Return the texts of files that are not in the memory, and name those that are; UserError where none is left."""
    stored, paths = {*store.documents().values()}, path_list(paths)
    texts = [*read_texts(paths, field)]
    if not texts:
        raise UserError(f"there is no text in {', '.join(map(str, paths))}: name files or folders that hold some")
    new = [text for text in texts if checksum_of_text(text) not in stored]
    if len(new) < len(texts):
        log.warning("left out: %d of %d texts, which are in the memory", len(texts) - len(new), len(texts))
    distinct = [*{checksum_of_text(text): text for text in reversed(new)}.values()][::-1]
    if len(distinct) < len(new):  # twice the same text is no more evidence
        log.warning("left out: %d of %d texts, which are copies of others", len(new) - len(distinct), len(new))
    encoded = [HeldOut(text.name, text.content, decoder.encode(text.content), experts) for text in distinct]
    if not (encoded := [text for text in encoded if len(text.tokens) > 1]):
        raise UserError("there is no text to score: name files that are not in the memory")
    return encoded


def from_stored(decoder: Decoder, experts: Experts, seed: int) -> list[HeldOut]:
    """Return up to 4,096 tokens of some of the stored documents, each with experts from which that document is hidden.

    Where there are few documents, several slices of one are read, and that slice is hidden: a book is known by its chapters.
    """
    documents = [
        (number, int(first), int(last))
        for number, segment in enumerate(experts.segments)
        for first, last in pairwise(segment.offsets)
    ]
    slices = [(*document, begin) for document in documents for begin in range(document[1], document[2] - 1, SLICE)]
    slices = [slices[index] for index in np.random.default_rng(seed).permutation(len(slices))]
    if len(documents) < FEW:
        slices = [(number, begin, min(begin + SLICE, last), begin) for number, _, last, begin in slices]
    texts, count = list[HeldOut](), 0
    for number, first, last, begin in {each[:2]: each for each in slices}.values():
        if count >= SAMPLED:
            break
        segment, end = experts.segments[number], min(begin + SLICE, last)
        array = SuffixArray.build(segment.tokens(first, last), decoder.vocabulary, np.array([0, last - first]))
        hiding = Experts(experts.segments, experts.memories, Hidden(number, (first, last), array))
        content = segment.tokens(begin, end).astype(np.int64)
        start = [] if begin in segment.offsets else decoder.start  # as before any text of this model
        written = decoder.text_of(content if len(start) else content[len(decoder.start) :])
        texts.append(HeldOut(segment.source(begin).name, written, np.array([*start, *content]), hiding))
        count += len(content)
    return texts


def near_copies(texts: list[HeldOut], scored: list[Scored]) -> list[str]:
    """Return the names of texts of which most is in the memory word for word."""
    longest = len(TEXT_ORDERS)  # the last expert of the first memory, after the model
    shares = [float(each.masses.target[:, longest].isfinite().float().mean()) for each in scored]
    return [text.name for text, share in zip(texts, shares, strict=True) if share > COPIED]


def predicted_bytes(text: HeldOut, decoder: Decoder) -> int:
    """Return the bytes of a text that its tokens predict: without the first one, where nothing comes before it."""
    first, content = "" if decoder.start else decoder.text_of(text.tokens[:1]), text.content
    # Some tokenizers begin each text with a space; a part of a character counts as all of it.
    first = first if content.startswith(first) else first.lstrip(" ")
    return len(content.encode()) - len((first if content.startswith(first) else content[:1]).encode())


def checksum_of_text(text: Text) -> str:
    return xxhash.xxh3_64_hexdigest(text.content.encode())
