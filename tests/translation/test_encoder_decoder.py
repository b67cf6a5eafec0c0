"""The encoder-decoder of translation: step by step as at once, whatever is padded or comes later."""

from __future__ import annotations

import pytest
import torch

from trime.errors import UserError
from trime.layers.embeddings import PlainInput
from trime.translation.encoder_decoder import EncoderDecoder


@pytest.fixture
def model() -> EncoderDecoder:
    torch.manual_seed(0)
    return EncoderDecoder(PlainInput(12, 16), layers=2, heads=2, inner=32, positions=20, pad=1).eval()


@torch.no_grad()
def test_step_by_step_is_at_once_and_padding_changes_nothing(model: EncoderDecoder) -> None:
    source, target = torch.randint(4, 12, (3, 7)), torch.randint(4, 12, (3, 6))
    source[1, 4:] = source[2, 2:] = 1
    encoded, source_encoding, cache = model(source, target), model.encode_source(source), None
    for position in range(6):
        encoding, cache = model.step(source_encoding, target[:, position : position + 1], cache)
        assert torch.allclose(encoding.f[:, 0], encoded.f[:, position], atol=1e-6)
        assert torch.allclose(encoding.g[:, 0], encoded.g[:, position], atol=1e-6)
    alone = model(source[1:2, :4], target[1:2])
    assert torch.allclose(alone.f[0], encoded.f[1], atol=1e-6)
    changed = target.clone()
    changed[:, 4:] = 5
    assert torch.allclose(model(source, changed).f[:, :4], encoded.f[:, :4], atol=1e-6), "nothing later moves an earlier one"
    with pytest.raises(UserError, match="positions=20"):
        model(torch.randint(4, 12, (1, 21)), target[:1])
