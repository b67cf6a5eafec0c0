"""A small decoder, and a memory of it."""

from tests.helpers.decoders import fitted, model, texts, tokenizer  # noqa: F401  fixtures
