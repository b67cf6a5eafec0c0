"""Beam search against every sentence; the entries that a report lists of a generated token; backbones of one's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from trime.common.types import Encoding
from trime.decoding.attribution import Attribution
from trime.decoding.generation import AttributedToken, agreeing_entries, encode, top_entries
from trime.models.network import Network
from trime.token_memory.test.base import Entries
from trime.translation.beam import Beam


def markov(seed: int, words: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Log-probabilities of the next word that the last two words decide; each sentence of its own."""
    table = torch.randn(2, words, words, words, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    held: dict[str, torch.Tensor] = {}

    def step(rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        sentence = held["sentence"][rows] if held else rows // (len(rows) // 2)
        last = held["token"][rows] if held else torch.zeros_like(tokens)
        held.update(sentence=sentence, token=tokens)
        return table[sentence, last, tokens]

    step.table = table  # type: ignore[attr-defined]
    return step


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("shortest", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_best_of_all(penalty: float, shortest: int, seed: int) -> None:
    """Against every sentence of up to 3 words, and at least ``shortest``, that ends with word 0."""
    words, longest = 4, 3
    step = markov(seed, words)
    table = step.table  # type: ignore[attr-defined]
    hypotheses = Beam(64, penalty, shortest).search(step, 0, 0, [longest, longest], torch.device("cpu"))
    for sentence in range(2):
        scores = {}
        for length in range(shortest, longest + 1):
            for tokens in itertools.product(range(1, words), repeat=length):
                history = [0, 0, *tokens, 0]
                total = sum(float(table[sentence, a, b, c]) for a, b, c in zip(history, history[1:], history[2:], strict=False))
                scores[tokens] = total / (length + 1) ** penalty
        best = max(scores, key=scores.__getitem__)
        assert tuple(hypotheses[sentence].tokens) == best
        assert hypotheses[sentence].score == pytest.approx(scores[best], abs=1e-5)


def test_a_beam_of_one_is_greedy_and_ends_in_time() -> None:
    step = markov(9, 6)
    table = step.table  # type: ignore[attr-defined]
    table[:, :, :, 0] -= 50  # it would never end
    hypotheses = Beam(1, 1.0).search(step, 0, 0, [5, 2], torch.device("cpu"))
    for sentence, longest in ((0, 5), (1, 2)):
        tokens = [0, 0]
        for _ in range(longest):
            tokens.append(int(table[sentence, tokens[-2], tokens[-1]].argmax()))
        assert hypotheses[sentence].tokens == tokens[2:]


def entries(tokens: list[int], empty: int = 0) -> Entries:
    """Return entries that hold these tokens, the last of them empty."""
    similarity = torch.zeros(len(tokens))
    similarity[len(tokens) - empty :] = -torch.inf
    return Entries(similarity, torch.tensor(tokens), torch.arange(len(tokens)))


def test_a_memory_whose_mass_is_spread_is_listed_first() -> None:
    """Four neighbours of 0.05 are more than one entry of 0.15, though each of them is less."""
    weights = {"local": torch.tensor([0.15, 0.0]).double(), "external": torch.tensor([0.05] * 4 + [0.1]).double()}
    memories = {"local": entries([7, 7], empty=1), "external": entries([7, 7, 7, 7, 3])}
    parts = {name: torch.zeros(9).scatter_add(0, memories[name].token, weight.float()) for name, weight in weights.items()}
    step = AttributedToken(7, Attribution(parts, weights), memories)
    assert {(name, source) for name, _, source in top_entries(step, 2)} > {("local", 0)}
    assert [name for name, _, _ in top_entries(step, 2)] == ["external", "local"]
    assert [name for name, _, _ in top_entries(step, 1)] == ["external"]
    assert agreeing_entries(step) == {"local": (1, 1), "external": (4, 5)}


class Recurrent(torch.nn.Module):
    """A backbone as CONTRIBUTING.md describes one: it has a state, and no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = torch.nn.Embedding(5, 4), torch.nn.GRU(4, 4, batch_first=True)

    def forward(self, tokens: torch.Tensor, state: torch.Tensor | None, fresh: torch.Tensor) -> tuple[Encoding, torch.Tensor]:
        h, state = self.layer(self.embedding(tokens), state)
        return Encoding(h, h), state


def test_a_backbone_without_a_cache_goes_on_from_its_state() -> None:
    torch.manual_seed(0)
    network = Network(Recurrent(), torch.nn.Linear(4, 5))
    whole, _ = encode(network, [1, 2, 3, 4], 0, None)
    _, state = encode(network, [1, 2], 0, None)
    rest, _ = encode(network, [3, 4], 1, state)
    torch.testing.assert_close(rest.f, whole.f[2:])
