"""The entries that a report lists of a generated token."""

from __future__ import annotations

import torch

from trime.decoding.attribution import Attribution
from trime.decoding.generation import AttributedToken, agreeing_entries, top_entries
from trime.memory.inference.base import Entries


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
