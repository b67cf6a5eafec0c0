"""EvictingCache in transformers' generate gives what the lab's own reader gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra pretrained")

import trime
from tests.helpers.pretrained import save_model
from trime.errors import UserError
from trime.eviction.base import EvictionPolicy
from trime.eviction.initial import BelowMean, OwnPosition
from trime.eviction.score_transform import Raw, Softmax
from trime.eviction.snapkv import SnapKV
from trime.eviction.tova import TOVA
from trime.memory.bounded import BoundedMemory
from trime.models.attendre import Attendre
from trime.models.pretrained.answering import DecoderAnswerer, ReadingConfig, greedy
from trime.models.pretrained.evicting_cache import EvictingCache
from trime.models.pretrained.loading import load_pretrained
from trime.models.pretrained.reader import LongReader
from trime.models.pretrained.rope import RopeDecoder

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "fifo": trime.FIFO,
    "sink": lambda: trime.Sink(2),
    "lru": lambda: trime.LRU(OwnPosition()),
    "lra_sum": lambda: trime.LRASum(BelowMean(1.0), Raw()),
}
SIZE, CHUNK = 12, 5


@pytest.fixture(scope="module", params=["Llama", "Mistral", "Qwen2", "GPTNeoX"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(request.param, tmp_path_factory.mktemp(request.param))


def memories(model: Any, policy: EvictionPolicy, top_k: int | None) -> list[Attendre]:
    """Return a memory for each layer."""
    windows = RopeDecoder(model, "none").windows
    return [Attendre(BoundedMemory(SIZE, policy), 0, top_k, True, window) for window in windows]


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_generation_is_that_of_the_reader(name: str, top_k: int | None, folder: Path) -> None:
    """Its logits token by token; the cache is written by generate, in a prefill and single steps."""
    model, other = load_pretrained(str(folder)), load_pretrained(str(folder))
    prompt = torch.randint(3, len(model.get_input_embeddings().weight), (1, 40)).tolist()
    reading = ReadingConfig(memories(other, POLICIES[name](), top_k), CHUNK)
    session = DecoderAnswerer(RopeDecoder(other, "none", cached_keys="after_rope"), reading).read(prompt)
    cache = EvictingCache(model, SIZE, POLICIES[name](), top_k, CHUNK)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    output = model.generate(
        torch.tensor(prompt), past_key_values=cache, return_dict_in_generate=True, output_logits=True, **settings
    )
    written = output.sequences[:, 40:]
    for number, logits in enumerate(output.logits):
        torch.testing.assert_close(logits, session.next_logits(written[:, :number]), atol=1e-5, rtol=1e-5)
    assert greedy(DecoderAnswerer(RopeDecoder(other, "none"), reading).read(prompt), -1, 6) == written.tolist()
    assert cache.get_seq_length() == 45 and cache.positions(0).shape == (1, SIZE) and cache.bytes > 0


@pytest.mark.parametrize("policy", [TOVA(Softmax()), SnapKV(Softmax(), window=7), trime.LRASum(BelowMean(1.0), Raw())])
def test_a_text_that_its_question_guides_is_that_of_the_reader(policy: EvictionPolicy, folder: Path) -> None:
    """Which entries a cache keeps before generate goes on with the question, and the logits of what it writes."""
    model, other = load_pretrained(str(folder)), load_pretrained(str(folder))
    prompt = torch.randint(3, 20, (2, 40))
    text, question = prompt.split([34, 6], 1)
    answerer = DecoderAnswerer(
        RopeDecoder(other, "none", cached_keys="after_rope"),
        ReadingConfig(memories(other, policy, None), CHUNK, prefill="guided"),
    )
    reading = answerer.start(text.tolist(), questions=question.tolist())
    cache = EvictingCache(model, SIZE, policy, chunk=CHUNK)
    cache.read(model, text, question)
    for layer, kept in enumerate(reading.reader.kept()):
        assert torch.equal(cache.positions(layer).sort(1).values, kept.sort(1).values)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    output = model.generate(prompt, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **settings)
    session, written = reading.ask(question.tolist()), output.sequences[:, 40:]
    for number, logits in enumerate(output.logits):
        torch.testing.assert_close(logits, session.next_logits(written[:, :number]), atol=1e-5, rtol=1e-5)
    plain = EvictingCache(model, SIZE, policy, chunk=CHUNK)
    plain.read(model, text)
    assert any(not torch.equal(cache.positions(layer), plain.positions(layer)) for layer in range(len(cache.memories)))


@pytest.mark.parametrize("name", POLICIES)
def test_padded_batches_are_those_of_the_reader(name: str, folder: Path) -> None:
    model, other = load_pretrained(str(folder)), load_pretrained(str(folder))
    tokens, mask = torch.randint(3, 20, (3, 30)), torch.ones(3, 30, dtype=torch.long)
    for row, padding in enumerate((0, 4, 13)):
        mask[row, :padding] = 0
    position = (mask.cumsum(1) - 1).masked_fill(mask == 0, -1)
    reader = LongReader(RopeDecoder(other, "none", cached_keys="after_rope"), memories(other, POLICIES[name](), None), CHUNK)
    with torch.no_grad():
        expected = torch.cat([reader.stack.family.logits(hidden.x) for hidden in reader.feed(tokens, position)], 1)
        ids = position.clamp(min=0)
        cache = EvictingCache(model, SIZE, POLICIES[name](), chunk=CHUNK)
        found = model(tokens, attention_mask=mask, position_ids=ids, past_key_values=cache).logits
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-5)


def test_a_memory_that_holds_everything_is_full_attention(folder: Path) -> None:
    model = load_pretrained(str(folder))
    tokens = torch.randint(3, 20, (2, 33))
    with torch.no_grad():
        expected = model(tokens).logits
        cache = EvictingCache(model, 64, trime.LRASum(BelowMean(2.0), Raw()), chunk=7)
        torch.testing.assert_close(model(tokens, past_key_values=cache).logits, expected, atol=1e-5, rtol=1e-5)
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(model(tokens).logits, expected)


def test_beams_take_their_memory_along(folder: Path) -> None:
    """A beam search over a memory that holds everything is that of the model's own cache."""
    model, prompt = load_pretrained(str(folder)), torch.randint(3, 20, (2, 10))
    settings = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(prompt)
    expected = model.generate(prompt, attention_mask=mask, **settings)
    cache = EvictingCache(model, 64, trime.FIFO())
    assert torch.equal(model.generate(prompt, attention_mask=mask, past_key_values=cache, **settings), expected)


def test_mistakes_of_reading_are_told(folder: Path) -> None:
    """Before anything is read."""
    model = load_pretrained(str(folder))
    cache, ids = EvictingCache(model, SIZE, TOVA(Softmax()), chunk=CHUNK), torch.randint(3, 20, (2, 12))
    for text, question in ((ids.float(), ids), (ids[0], ids), (ids[:, :0], ids), (ids, ids[:, :0]), (ids.tolist(), ids)):
        with pytest.raises(UserError, match="numbers of its tokens"):
            cache.read(model, text, question)
    with pytest.raises(UserError, match="1 rows, where the texts have 2"):
        cache.read(model, ids, ids[:1])
    with pytest.raises(UserError, match="score entries by attention"):
        EvictingCache(model, SIZE, trime.FIFO()).read(model, ids, ids)
    assert cache.get_seq_length() == 0
    cache = EvictingCache(model, SIZE, TOVA(Softmax()), chunk=CHUNK)
    cache.read(model, ids, ids[:, :3])
    prompt, settings = torch.cat([ids, ids[:, :3]], 1), {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    with pytest.raises(UserError, match="batch_repeat_interleave"):
        model.generate(prompt, past_key_values=cache, num_beams=2, **settings)
    cache.batch_repeat_interleave(2)
    assert model.generate(prompt, past_key_values=cache, num_beams=2, **settings).shape == (2, 17)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match="does not read with this cache"):
        cache.read(model, ids.repeat_interleave(2, 0))


def test_what_is_not_supported_is_told(folder: Path) -> None:
    model = load_pretrained(str(folder))
    cache = EvictingCache(model, 4, trime.FIFO())
    with pytest.raises(UserError, match="reads with an EvictingCache"):
        model(torch.tensor([[3, 4]]), use_cache=False)
    with pytest.raises(UserError, match="assisted generation"):
        cache.crop(1)
    with pytest.raises(UserError, match="is not supported"):
        EvictingCache(torch.nn.Linear(2, 2), 4, trime.FIFO())
    with pytest.raises(UserError, match="one token at a time"):
        EvictingCache(model, 4, trime.FIFO(), chunk=0)
    cache.reset()
    assert cache.get_seq_length() == 0
