"""A small decoder, a memory of it, and its endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.decoders import fitted, model, texts, tokenizer  # noqa: F401  fixtures
from tests.helpers.endpoint import serving
from trime.text_memory.memory import TextMemory
from trime.text_memory.served import ServedMemory


@pytest.fixture
def served(fitted: TextMemory) -> ServedMemory:  # noqa: F811
    return ServedMemory(fitted)


@pytest.fixture
def address(served: ServedMemory) -> Iterator[str]:
    """The address of a server of it."""
    with serving(served) as address:
        yield address
