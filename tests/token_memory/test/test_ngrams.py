"""n-grams: counts equal those of a naive count, whatever the windows; their probabilities sum to one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from trime.common.types import Contexts, LogMass, TokenPosition
from trime.token_memory.test import ngrams
from trime.token_memory.test.base import Window
from trime.token_memory.test.ngrams import DocumentNgrams, Ngrams, SuffixArray, TextNgrams

WORDS, ORDERS = 300, [1, 2, 3, 5, 8]


def text(length: int, seed: int) -> np.ndarray:
    """Return words that repeat one another's sequences."""
    draw = np.random.default_rng(seed)
    phrases = np.random.default_rng(9).integers(0, WORDS, (6, 12))
    parts = [phrases[draw.integers(6)][draw.integers(4) : draw.integers(5, 12)] for _ in range(length // 4)]
    return np.concatenate(parts)[:length].astype(np.uint16)


def windows(documents: list[np.ndarray], block: int, context: int) -> list[Window]:
    """Return the windows of some documents."""
    parts = []
    for number, tokens in enumerate(documents):
        for start in range(0, len(tokens), block):
            begin, end = max(0, start - context), min(start + block, len(tokens))
            place = torch.arange(begin, end)
            positions = TokenPosition(torch.full_like(place, number), torch.zeros_like(place), place)
            contexts = Contexts(torch.zeros(end - begin, 2), torch.as_tensor(tokens[begin:end].astype(np.int64)), positions)
            none = torch.zeros(end - start)
            parts.append(Window(contexts, start - begin, LogMass(none, none)))
    return parts


def read(memory: Ngrams, parts: list[Window]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-masses of all targets, and in all: [e n] each."""
    masses = []
    for window in parts:
        masses.append(memory.experts(window, torch.ones(1)))
        again = memory.experts(window, torch.ones(1))  # a query changes nothing
        assert torch.equal(again.target, masses[-1].target) and torch.equal(again.total, masses[-1].total)
        memory.write(window)
    return torch.cat([mass.target[0] for mass in masses], 1), torch.cat([mass.total[0] for mass in masses], 1)


def occurrences(tokens: np.ndarray, order: int) -> tuple[Counter, Counter]:
    """Return the counts of contexts that a token follows, and of contexts with that token."""
    rows = [tuple(tokens[i : i + order + 1].tolist()) for i in range(len(tokens) - order)]
    return Counter(row[:-1] for row in rows), Counter(rows)


def naive_counts(tokens: np.ndarray, place: int, seen: list[tuple[Counter, Counter]]) -> tuple[list[int], list[int]]:
    """Return the counts of the target and of its context, order by order."""
    rows = [tuple(tokens[place - order : place + 1].tolist()) if order <= place else None for order in ORDERS]
    pairs = zip(rows, seen, strict=True)
    counts = [(both[row], alone[row[:-1]]) if row else (0, 0) for row, (alone, both) in pairs]
    return [target for target, _ in counts], [total for _, total in counts]


@pytest.mark.parametrize("block, context", [(7, 0), (16, 16), (5, 40), (1000, 0)])
def test_counts_of_the_text(block: int, context: int) -> None:
    known, documents = text(3000, 0), [text(90, 1), text(40, 2)]
    target, total = read(TextNgrams(SuffixArray.build(known, WORDS), ORDERS), windows(documents, block, context))
    seen = [occurrences(known, order) for order in ORDERS]
    counts = [naive_counts(tokens, place, seen) for tokens in documents for place in range(len(tokens))]
    for result, expected in ((target, [one for one, _ in counts]), (total, [one for _, one in counts])):
        torch.testing.assert_close(result.exp().T.round().long(), torch.tensor(expected))
    assert total[-1].isfinite().any() and total[-1].isinf().any()


def test_ngrams_of_the_text_end_with_their_document() -> None:
    """Nothing follows the last token of a document, and where an entry comes from is counted without separators."""
    known, offsets = text(3000, 0), np.array([0, 1, 5, 5, 40, 900, 2990, 3000])
    memory = TextNgrams(SuffixArray.build(known, WORDS, offsets), ORDERS)
    (window,) = windows([known[860:940]], 1000, 0)
    target, total = read(memory, [window])
    parts = [[occurrences(known[a:b], order) for order in ORDERS] for a, b in pairwise(offsets)]
    seen = [(sum((part[q][0] for part in parts), Counter()), sum((part[q][1] for part in parts), Counter())) for q in range(5)]
    counts = [naive_counts(known[860:940], place, seen) for place in range(80)]
    for result, expected in ((target, [one for one, _ in counts]), (total, [one for _, one in counts])):
        torch.testing.assert_close(result.exp().T.round().long(), torch.tensor(expected))
    whole = [naive_counts(known[860:940], place, [occurrences(known, order) for order in ORDERS]) for place in range(80)]
    assert whole != counts
    for context in (known[0:1], known[896:900], known[1000:1003]):
        (ending,) = windows([np.append(context, 0).astype(np.uint16)], 100, 0)
        entries = memory.entries(ending)
        assert entries.token.tolist() == known[entries.source.numpy()].tolist()
        assert not {0, 1, 5, 40, 900, 2990} & {*entries.source.tolist()}


@pytest.mark.parametrize("block, context", [(7, 0), (16, 16), (1000, 0)])
def test_counts_of_the_document(block: int, context: int) -> None:
    documents = [text(600, 3), text(80, 4)]
    memory = DocumentNgrams(ORDERS)
    target, total = read(memory, windows(documents, block, context))
    expected = []
    for tokens in documents:
        for place in range(len(tokens)):
            seen = [occurrences(tokens[:place], order) for order in ORDERS]
            expected.append(naive_counts(tokens, place, seen))
    torch.testing.assert_close(target.exp().T.round().long(), torch.tensor([one for one, _ in expected]))
    torch.testing.assert_close(total.exp().T.round().long(), torch.tensor([one for _, one in expected]))
    assert memory.bytes > 0


def test_sampled_occurrences_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context with more occurrences than are read keeps its mass."""
    monkeypatch.setattr(ngrams, "MAX_OCCURRENCES", 8)
    memory = TextNgrams(SuffixArray.build(text(3000, 0), WORDS), [1, 2])
    (window,) = windows([text(12, 5)], 100, 0)
    counts, mass = memory.entries(window).counts, memory.experts(window, torch.ones(1)).total[0, :, -1].double()
    assert counts is not None and mass.exp().min() > 20
    torch.testing.assert_close(counts.logsumexp(1), mass, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["text", "document"])
def test_entries_are_the_counts_of_every_token(kind: str) -> None:
    known, tokens = text(3000, 0), text(60, 5)
    memory: Ngrams = TextNgrams(SuffixArray.build(known, WORDS), ORDERS) if kind == "text" else DocumentNgrams(ORDERS)
    *before, last = windows([tokens], 16, 8)
    for window in before:
        memory.write(window)
    entries = memory.entries(last)
    assert entries.counts is not None and len(entries.token.unique()) == len(entries.token)

    def with_target(token: int) -> Window:
        return last._replace(targets=torch.cat([last.scored.token[:-1], torch.tensor([token])]))

    for token in range(WORDS):
        mass = memory.experts(with_target(token), torch.ones(1))
        column = (entries.token == token).nonzero().squeeze(1)
        shown = entries.counts[:, column[0]] if len(column) else torch.full((len(ORDERS),), -torch.inf)
        torch.testing.assert_close(mass.target[0, :, -1].double(), shown.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entries.counts.logsumexp(1), mass.total[0, :, -1].double(), rtol=1e-6, atol=1e-6)
    longest = memory.mass(with_target(0), torch.ones(3))
    known_orders = int(mass.total[0, :, -1].isfinite().sum())
    torch.testing.assert_close(longest.total[0, :, -1], mass.total[0, known_orders - 1, -1].expand(3))
    where = known if kind == "text" else tokens
    assert torch.as_tensor(where[entries.source.numpy()].astype(np.int64)).tolist() == entries.token.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_the_suffix_array_is_sorted(dtype: type) -> None:
    """Also for a read-only text, such as a memory-mapped one."""
    tokens = (text(2000, 5) % 200).astype(dtype)
    tokens.flags.writeable = False
    array = SuffixArray.build(tokens, WORDS, np.array([0, 700, 2000]))
    stored, order = array.text, array.suffixes
    assert stored.tolist() == [*tokens[:700], WORDS, *tokens[700:], WORDS] and array.ends.tolist() == [700, 2001]
    assert sorted(order.tolist()) == list(range(2002))
    assert all(stored[a:].tolist() < stored[b:].tolist() for a, b in pairwise(order.tolist()))
