"""A decoder's own code in transformers reads what layers read that are split at their attention for waiting queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra decoder")

import trime
from tests.helpers.pretrained import save_model
from trime.common.pretrained import load_pretrained
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.reader import LongReader
from trime.kv.rope import RopeDecoder

YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}}


def outcome(reader: LongReader, tokens: torch.Tensor, position: torch.Tensor) -> dict[str, Any]:
    """Read in chunks, then token by token for some rows; return outputs, what is kept and what the last tokens attended to."""
    first = [hidden.x for hidden in reader.feed(tokens[:, :-4], position[:, :-4])]
    forked = reader.fork([1, 0, 1])
    more, places = (x[[1, 0, 1]].split([1, 1, 1, 1], 1) for x in (tokens[:, -4:], position[:, -4:]))
    rest = [hidden.x for one, at in zip(more, places, strict=True) for hidden in forked.feed(one, at)]
    return {
        "outputs": torch.cat(first, 1)[position[:, :-4] >= 0],
        "generated": torch.cat(rest, 1),
        "kept": [positions.sort(1).values for positions in forked.cache.kept()],
        "shares": [trace.share.sum(1) for trace in forked.cache.traces()],
        "best": [trace.top(3) for trace in forked.cache.traces()],
    }


@pytest.mark.parametrize(
    ("form", "sizes", "position", "cached_keys", "more"),
    [
        ("Llama", {"max_position_embeddings": 16}, "lm_infinite", "before_rope", {}),
        ("Llama", {"max_position_embeddings": 16}, "lm_infinite", "after_rope", {"per_head": True}),
        ("Mistral", {"sliding_window": 7}, "yarn", "before_rope", {}),
        ("Qwen2", {}, "ntk", "before_rope", {"top_k": 4}),
        ("GPTNeoX", {}, "interpolation", "after_rope", {"top_k": 3, "search": "buckets"}),
        ("Llama", YARN, "none", "before_rope", {}),
    ],
)
def test_split_layers_read_what_the_model_reads(
    form: str,
    sizes: dict[str, Any],
    position: str,
    cached_keys: str,
    more: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With padding, in memories that evict by attention, beyond the positions of pretraining."""
    factor, per_head = 1.0 if position in ("none", "lm_infinite") else 4.0, more.pop("per_head", False)
    model = load_pretrained(str(save_model(form, tmp_path, **sizes)))
    tokens, places = torch.randint(3, 20, (2, 44)), torch.arange(44).expand(2, -1).clone()
    places[1, 26:40], places[1, 40:] = -1, torch.arange(26, 30)  # a shorter text is padded before what both go on with
    results = []
    for splits in (False, True):
        monkeypatch.setattr(LongReader, "must_split", lambda *_, splits=splits: splits)
        family = RopeDecoder(model, position, factor, cached_keys)
        policy = trime.LRASum(trime.BelowMean(1.0), trime.Raw())
        memories = [Attendre(BoundedMemory(12, policy), causal=True, window=window, **more) for window in family.windows]
        reader = LongReader(family, memories, 5, record_attention=True, per_head=per_head)
        assert (reader.decoder is None) == splits
        results.append(outcome(reader, tokens, places))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0]["shares"], [torch.ones(3)] * 2, atol=1e-5, rtol=1e-5)
