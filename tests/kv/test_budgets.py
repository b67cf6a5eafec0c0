"""Texts that an EvictingCache reads as a whole and then cuts, the room of heads among them, and policies made for that."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra decoder")

import trime
from tests.helpers.decoders import model_of, text_of, tokenizer_of
from tests.kv.test_recall import model_with_contrast
from trime.errors import UserError
from trime.kv.evicting_cache import EvictingCache

LENGTH, SIZE = 60, 16


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_with_contrast("Llama")


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, 50, (1, LENGTH))


def kept(cache: EvictingCache) -> list[list[int]]:
    return [sorted(position for position in cache.positions(layer)[0].tolist() if position >= 0) for layer in range(len(cache))]


@pytest.mark.parametrize("policy", [trime.TOVA(), trime.KVzip(), trime.KeyNorm()])
@pytest.mark.parametrize("share", [0.2, 1.0])
@torch.no_grad()
def test_heads_share_the_room_of_a_layer(share: float, policy: Any, llama: Any, tokens: torch.Tensor, tmp_path: Path) -> None:
    """All hold as many entries as without; what is written goes on, here, in a copy, and where it was saved."""
    questions = [torch.randint(3, 50, (1, 9))] if isinstance(policy, trime.KVzip) else None
    cache, again = (EvictingCache(llama, SIZE, policy, chunk=4, per_head=trime.AdaKV(share)) for _ in range(2))
    cache.read(llama, tokens, questions, whole=True)
    assert [len(positions) for positions in kept(cache)] == [2 * SIZE] * len(cache)
    if share == 1.0:  # heads that keep all of their room are as they would be without
        alone = EvictingCache(llama, SIZE, policy, chunk=4, per_head=True)
        alone.read(llama, tokens, questions, whole=True)
        assert kept(cache) == kept(alone) and cache.bytes == alone.bytes
    cache.save(tmp_path)
    again.load(tmp_path)
    copied, more = cache.fork(torch.tensor([0])), torch.randint(3, 50, (1, 7))
    expected = llama(more, past_key_values=cache).logits
    for other in (copied, again):
        torch.testing.assert_close(llama(more, past_key_values=other).logits, expected)
    held = sum(column.nbytes for memory in cache.memories for column in memory.columns)
    assert again.bytes == cache.bytes == cache.memories[0].rows * held
    cache.reset()
    cache.read(llama, tokens, questions, whole=True)
    assert [len(positions) for positions in kept(cache)] == [2 * SIZE] * len(cache)


@pytest.mark.parametrize("heads", [False, True, trime.AdaKV()])
@torch.no_grad()
def test_what_is_written_may_have_room_of_its_own(heads: Any, llama: Any, tokens: torch.Tensor) -> None:
    cache = EvictingCache(llama, SIZE, trime.TOVA(), chunk=4, per_head=heads)
    cache.read(llama, tokens, whole=True)
    before = kept(cache)
    cache.extend(7)
    llama(torch.randint(3, 50, (1, 7)), past_key_values=cache)
    new = [*range(LENGTH, LENGTH + 7)] * (1 if heads is False else 2)
    assert kept(cache) == [sorted(layer + new) for layer in before]


@torch.no_grad()
def test_layers_may_share_too(llama: Any, tokens: torch.Tensor) -> None:
    cache = EvictingCache(llama, SIZE, trime.TOVA(), chunk=4, per_head=trime.AdaKV(0.2, across_layers=True))
    cache.read(llama, tokens, whole=True)
    assert sum(map(len, kept(cache))) == 2 * SIZE * len(cache)
    sizes = trime.pyramid(SIZE, 2, beta=4)
    cache = EvictingCache(llama, sizes, trime.TOVA(), chunk=4)
    cache.read(llama, tokens)
    assert list(map(len, kept(cache))) == sizes == [28, 4]


@torch.no_grad()
def test_room_for_everything_is_full_attention(llama: Any, tokens: torch.Tensor) -> None:
    more = torch.randint(3, 50, (1, 9))
    cache = EvictingCache(llama, 80, trime.KVzip(), chunk=4, per_head=trime.AdaKV())
    cache.read(llama, tokens, [more], whole=True)
    expected = llama(torch.cat([tokens, more], 1)).logits[:, LENGTH:]
    torch.testing.assert_close(llama(more, past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_is_read_as_a_whole_is_evicted_at_its_end(llama: Any, tokens: torch.Tensor) -> None:
    """Every query of the text sees all before it, so that entries are those of the whole text; then the best are kept."""
    cache, full = EvictingCache(llama, SIZE, trime.TOVA(), chunk=4), EvictingCache(llama, 80, trime.TOVA(), chunk=4)
    cache.read(llama, tokens, whole=True)
    llama(tokens, past_key_values=full)
    for layer in range(len(cache)):
        places = cache.positions(layer)[0]
        torch.testing.assert_close(cache.memories[layer].columns[0][0], full.memories[layer].columns[0][0, places])
    question = torch.randint(3, 50, (1, 9))
    guided = EvictingCache(llama, SIZE, trime.SnapKV(window=4), chunk=4)
    guided.read(llama, tokens, question, whole=True)
    llama(question, past_key_values=full)
    assert guided.seen == LENGTH and kept(guided) != kept(cache)


@torch.no_grad()
def test_what_it_was_made_with_comes_back(llama: Any, tokens: torch.Tensor, tmp_path: Path) -> None:
    """After room for what is written, after an error, and in a copy; what is saved then can be loaded."""
    cache, again = (EvictingCache(llama, SIZE, trime.KVzip(), chunk=4, per_head=trime.AdaKV()) for _ in range(2))
    cache.read(llama, tokens, whole=True)
    cache.extend(9)
    copied = cache.fork(torch.tensor([0]))
    copied.extend(3)
    cache.save(tmp_path)
    again.load(tmp_path)
    more = torch.randint(3, 50, (1, 12))
    torch.testing.assert_close(*(llama(more[:, :9], past_key_values=each).logits for each in (again, cache)))
    llama(more, past_key_values=copied)
    assert [len(positions) for positions in kept(copied)] == [2 * (SIZE + 12)] * len(cache)
    for each in (cache, again):
        each.reset()
        each.read(llama, tokens, whole=True)
        assert [len(positions) for positions in kept(each)] == [2 * SIZE] * len(cache)
    plain = EvictingCache(llama, SIZE, trime.KVzip(), chunk=4)
    with pytest.raises(IndexError):
        plain.read(llama, tokens, torch.tensor([[999]]), whole=True)
    plain.reset()
    llama(tokens, past_key_values=plain)
    assert [len(positions) for positions in kept(plain)] == [SIZE] * len(plain)


@torch.no_grad()
def test_one_head_of_keys_may_be_saved(tokens: torch.Tensor, tmp_path: Path) -> None:
    model = model_of("Llama", 50, num_key_value_heads=1)
    cache, again = (EvictingCache(model, SIZE, trime.TOVA(), chunk=4, per_head=trime.AdaKV()) for _ in range(2))
    cache.read(model, tokens, whole=True)
    cache.save(tmp_path)
    again.load(tmp_path)
    more = torch.randint(3, 50, (1, 7))
    torch.testing.assert_close(model(more, past_key_values=again).logits, model(more, past_key_values=cache).logits)


def test_a_pyramid_of_one_layer_or_of_a_short_text_is_level() -> None:
    assert trime.pyramid(512, 1) == [512] and trime.pyramid(600, 3, longest=500) == [500] * 3


def test_a_text_is_asked_for_in_parts(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    text = tokenizer(text_of(0), return_tensors="pt")["input_ids"]
    parts = trime.repeats(tokenizer, text, part=100)
    assert sum(part.shape[1] for part in parts) > text.shape[1] and len(parts) == -(-text.shape[1] // 100)
    assert torch.equal(parts[0][:, -100:], text[:, :100]) and torch.equal(parts[1][:, -108:], text[:, 92:200])


def test_impossible_settings_and_texts(llama: Any, tokens: torch.Tensor) -> None:
    with pytest.raises(UserError, match="recall returns as much to each head"):
        EvictingCache(llama, SIZE, trime.KVzip(), recall=8, per_head=trime.AdaKV())
    with pytest.raises(UserError, match=r"memory_size=3 has no room beside eviction\.sinks=4"):
        EvictingCache(llama, 3, trime.KVzip())
    cache = EvictingCache(llama, SIZE, trime.TOVA(), chunk=4, per_head=trime.AdaKV())
    with pytest.raises(UserError, match="make a cache for each text"):
        cache.read(llama, tokens.repeat(2, 1), whole=True)
    cache.read(llama, tokens, whole=True)
    with pytest.raises(UserError, match="make a cache for each text"):
        cache.read(llama, tokens, whole=True)
    with pytest.raises(UserError, match="have shared their room already"):
        cache.resize([1] * len(cache))
    with pytest.raises(UserError, match="leaves a layer without any"):
        trime.pyramid(10, 4, beta=100)
    with pytest.raises(UserError, match="between 0 and 1"):
        trime.AdaKV(2.0)


@torch.no_grad()
def test_copies_read_apart_after_a_reset(llama: Any, tokens: torch.Tensor) -> None:
    cache = EvictingCache(llama, SIZE, trime.TOVA(), chunk=4, per_head=trime.AdaKV())
    cache.read(llama, tokens, whole=True)
    other = copy.deepcopy(cache)
    cache.reset()
    other.reset()
    llama(tokens, past_key_values=cache)
    assert (cache.rows, other.rows) == (len(tokens), 0)
