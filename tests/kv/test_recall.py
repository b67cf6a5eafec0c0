"""Recall: what an EvictingCache has evicted comes back to the queries that attend to it, and a text is read once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra decoder")

import trime
from tests.conftest import ROOT
from tests.helpers.decoders import add_contrast, model_of, save_decoder, text_of
from trime.errors import UserError
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.evicting_cache import FILE, EvictingCache
from trime.kv.filling import DotProducts
from trime.kv.reader import LongReader
from trime.kv.recall.base import BlockKey, Gaussian, Quest
from trime.kv.recall.store import CANDIDATES, REGION, SEARCHED, EntryStore, Recall, RecallQuery
from trime.kv.rope import RopeDecoder

LENGTH = 60
KEYS = [Gaussian(), Quest()]
SETTINGS = {"Gemma2": {"attn_logit_softcapping": 2.0}, "Mistral": {"sliding_window": 30}}


def model_with_contrast(kind: str) -> Any:
    """Return a model whose attention is far from uniform."""
    model = model_of(kind, 50, **SETTINGS.get(kind, {}))
    model.set_attn_implementation("eager")
    return add_contrast(model)


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_with_contrast("Llama")


def read(model: Any, cache: EvictingCache, tokens: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Return the logits of a text that is read as a prompt, token by token, and as another prompt."""
    pieces = tokens.split([33, 1, 1, 1, tokens.shape[1] - 36], 1)
    return torch.cat([model(piece, past_key_values=cache, **settings).logits for piece in pieces], 1)


@pytest.mark.parametrize("policy", [trime.FIFO(), trime.TOVA(), trime.H2O(), trime.LRU(), trime.Sink(2)])
@pytest.mark.parametrize("key", KEYS, ids=lambda key: type(key).__name__)
@torch.no_grad()
def test_all_of_it_is_full_attention(key: BlockKey, policy: Any, llama: Any, tmp_path: Path) -> None:
    """Whatever is evicted, and wherever it is stored; and some of it is closer to full attention than none."""
    tokens = torch.randint(3, 50, (2, LENGTH))
    expected = llama(tokens).logits
    distance = {}
    for entries, folder in ((LENGTH, tmp_path), (12, None), (0, None)):
        recall = Recall(entries, block=4, key=key, folder=folder) if entries else None
        cache = EvictingCache(llama, 12, policy, chunk=5, recall=recall)
        distance[entries] = float((read(llama, cache, tokens) - expected).abs().mean())
    assert distance[LENGTH] < 1e-5 < distance[12] < distance[0]


@pytest.mark.parametrize("settings", [{"per_head": True}, {"position": "none"}, {"per_head": True, "position": "lm_infinite"}])
@torch.no_grad()
def test_heads_recall_for_themselves_and_memories_may_rotate_keys(settings: dict[str, Any], llama: Any) -> None:
    tokens, recall = torch.randint(3, 50, (2, LENGTH)), Recall(LENGTH, block=4)
    cache = EvictingCache(llama, 12, trime.TOVA(), chunk=5, recall=recall, **settings)
    torch.testing.assert_close(read(llama, cache, tokens), llama(tokens).logits, rtol=1e-4, atol=1e-5)
    prompt = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 4, "do_sample": False}
    cache = EvictingCache(llama, 12, trime.TOVA(), chunk=5, recall=recall, **settings)
    assert torch.equal(llama.generate(tokens, past_key_values=cache, **prompt), llama.generate(tokens, **prompt))


@pytest.mark.parametrize("kind", ["Gemma2", "Mistral", "GPT2", "Qwen3", "StableLm"])
@torch.no_grad()
def test_layers_keep_what_is_their_own(kind: str) -> None:
    model, tokens = model_with_contrast(kind), torch.randint(3, 50, (2, LENGTH))
    cache = EvictingCache(model, 12, trime.TOVA(), chunk=5, recall=Recall(LENGTH, block=4))
    torch.testing.assert_close(read(model, cache, tokens), model(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [False, True])
@torch.no_grad()
def test_the_lab_reads_with_it(splits: bool, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's own code, or layer by layer: with all recalled, as with a memory that holds everything."""
    monkeypatch.setattr(LongReader, "must_split", lambda *_: splits)
    family, tokens = RopeDecoder(llama), torch.randint(3, 50, (2, LENGTH))
    outputs = []
    for size, recall in ((LENGTH, None), (12, Recall(LENGTH, block=4)), (12, None)):
        memories = [Attendre(BoundedMemory(size, trime.LRASum()), causal=True) for _ in family.layers]
        reader = LongReader(family, memories, chunk=5, recall=recall)
        read = reader.feed(tokens, torch.arange(LENGTH).expand(2, -1))
        outputs.append(torch.cat([hidden.x for hidden in read], 1))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs[2], outputs[0], atol=1e-2)


@torch.no_grad()
def test_rows_recall_what_each_would_alone(llama: Any) -> None:
    """Whatever padding the others have; beams and copies take what is stored along."""
    tokens, mask = torch.randint(3, 50, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :7] = 0
    cache, alone = (EvictingCache(llama, 12, trime.TOVA(), chunk=5, recall=Recall(8, block=4)) for _ in range(2))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = llama(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(together[0, 7:], llama(tokens[:1, 7:], past_key_values=alone).logits[0])
    other, more = copy.deepcopy(alone), torch.randint(3, 50, (2, 9))
    other.batch_repeat_interleave(2)
    both = llama(more, past_key_values=other).logits
    unread = EvictingCache(llama, 12, trime.TOVA(), chunk=5, recall=Recall(8, block=4))
    first, second = copy.deepcopy(unread), copy.deepcopy(unread)
    llama(tokens[:1], past_key_values=first)
    described = first.memories[0].store.described[4].clone()  # type: ignore[union-attr]
    llama(tokens[1:], past_key_values=second)
    assert torch.equal(first.memories[0].store.described[4], described)  # type: ignore[union-attr]
    torch.testing.assert_close(both[0], llama(more[:1], past_key_values=alone).logits[0])
    assert alone.stored_bytes * 2 == other.stored_bytes > 0


@torch.no_grad()
def test_a_text_is_read_once_and_asked_in_another_process(llama: Any, tmp_path: Path) -> None:
    tokens, more = torch.randint(3, 50, (2, LENGTH)), torch.randint(3, 50, (2, 9))
    for recall in (Recall(8, block=4, key=Quest()), None):
        cache, again = (EvictingCache(llama, 12, trime.H2O(), chunk=5, recall=recall) for _ in range(2))
        llama(tokens, past_key_values=cache)
        cache.save(tmp_path)
        again.load(tmp_path)
        torch.testing.assert_close(llama(more, past_key_values=again).logits, llama(more, past_key_values=cache).logits)
    filling = EvictingCache(llama, 100, trime.H2O(), chunk=5)
    llama(tokens, past_key_values=filling)
    filling.save(tmp_path / "filling")
    expected = llama(more, past_key_values=filling).logits
    loaded = EvictingCache(llama, 100, trime.H2O(), chunk=5).load(tmp_path / "filling")
    torch.testing.assert_close(llama(more, past_key_values=loaded).logits, expected)
    assert loaded.get_seq_length() == LENGTH + 9


@torch.no_grad()
def test_a_cache_knows_what_it_has_read(llama: Any, tmp_path: Path) -> None:
    """Saved, of beams, and with padding: ``inputs`` puts what follows behind it, and generate goes on from there."""
    tokens, more = torch.randint(3, 50, (2, LENGTH)), torch.randint(3, 50, (2, 9))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    whole = EvictingCache(llama, 12, trime.Sink(4), chunk=4, recall=Recall(8, block=4))
    llama(tokens, attention_mask=mask, past_key_values=whole)
    whole.save(tmp_path)
    again = EvictingCache(llama, 12, trime.Sink(4), chunk=4, recall=Recall(8, block=4)).load(tmp_path)
    inputs = again.inputs(more)
    assert torch.equal(inputs["input_ids"], torch.cat([tokens, more], 1))
    assert torch.equal(inputs["attention_mask"], torch.cat([mask, torch.ones_like(more)], 1))
    expected = llama.generate(**whole.inputs(more), past_key_values=whole, **settings)
    assert torch.equal(llama.generate(**inputs, past_key_values=again, **settings), expected)
    with pytest.raises(UserError, match="last token that generate wrote was not read"):
        again.inputs(more)
    with pytest.raises(UserError, match="not what was written with this cache"):
        again.inputs(more, expected + 1)
    assert torch.equal(again.inputs(more, expected)["input_ids"], torch.cat([expected, more], 1))
    again.take_rows(torch.tensor([1]))
    assert torch.equal(again.inputs(more[:1], expected[1:])["input_ids"][:, :LENGTH], tokens[1:])
    with pytest.raises(UserError, match=r"nothing follows.*cache\.inputs"):
        llama.generate(more[:1], past_key_values=again, **settings)
    with pytest.raises(UserError, match="has 2 rows"):
        again.inputs(more)
    embedded = EvictingCache(llama, 12, trime.Sink(4), chunk=4)
    for cache in (embedded, EvictingCache(llama, 12, trime.Sink(4), chunk=4)):
        with pytest.raises(UserError, match="does not know which tokens"):
            cache.inputs(more)
        llama(inputs_embeds=torch.randn(2, 5, llama.config.hidden_size), past_key_values=embedded)


@torch.no_grad()
def test_what_is_saved_knows_what_it_was_made_with(llama: Any, tmp_path: Path) -> None:
    tokens = torch.randint(3, 50, (1, LENGTH))
    cache = EvictingCache(llama, 12, trime.TOVA(), chunk=5, recall=Recall(8, block=4))
    with pytest.raises(UserError, match="read nothing yet"):
        cache.save(tmp_path)
    llama(tokens, past_key_values=cache)
    cache.save(tmp_path)
    changed = model_with_contrast("Llama")
    changed.model.layers[0].mlp.up_proj.weight.data += 1
    settings = {"model": llama, "size": 12, "policy": trime.TOVA(), "recall": Recall(8, block=4)}
    for name, other in {"model": changed, "size": 13, "policy": trime.TOVA(recent=2), "recall": None}.items():
        with pytest.raises(UserError, match=f"another {name}"):
            EvictingCache(**settings | {name: other}, chunk=5).load(tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        cache.load(tmp_path)
    with pytest.raises(UserError, match="missing"):
        cache.load(tmp_path / "nowhere")


def test_what_a_killed_save_left_is_removed_by_the_next(llama: Any, tmp_path: Path) -> None:
    for name in (f"{FILE}.0123456789ab.partial", "download.partial"):
        (tmp_path / name).touch()
    cache = EvictingCache(llama, 12, trime.FIFO())
    llama(torch.randint(3, 50, (1, LENGTH)), past_key_values=cache)
    cache.save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} - {".lock"} == {FILE, "download.partial"}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: type(key).__name__)
def test_a_store_returns_what_queries_attend_to(key: BlockKey) -> None:
    """The best block for some query, without what the memory holds; entries of other rows and padding play no part."""
    places = torch.arange(60).expand(2, -1)
    keys = 0.1 * torch.randn(2, 60, 1, 4)
    keys[0, 5], keys[1, 39] = torch.tensor([9.0, 0, 0, 0]), torch.tensor([9.0, 0, 0, 0])
    store = EntryStore(Recall(3, block=3, key=key))
    store.write(keys, keys + 1, places)
    query = torch.zeros(2, 5, 2, 4)
    query[:, 3, 1, 0] = 1.0
    at = torch.tensor([[59] * 5, [-1] * 3 + [59] * 2])
    held, nothing = torch.tensor([[3, 59, -1], [59, 0, -1]]), torch.full((2, 2, 5), -torch.inf)
    found = store.best(RecallQuery(query, at, nothing), held, DotProducts(1.0), 1.0)
    assert found is not None
    assert found[2].tolist() == [[-1, 4, 5], [39, 40, 41]]
    assert torch.equal(found[0][0, 2], keys[0, 5]) and torch.equal(found[1][1, 0], keys[1, 39] + 1)
    assert store.best(RecallQuery(query, at, nothing), places, DotProducts(1.0), 1.0) is None
    at[1, 3] = -1
    (_, _, of) = store.best(RecallQuery(query, at, nothing), held, DotProducts(1.0), 1.0) or (None, None, held)
    assert of[0].tolist() == [-1, 4, 5] and of[1].tolist() != [39, 40, 41]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: type(key).__name__)
def test_a_long_text_is_searched_by_its_regions(key: BlockKey) -> None:
    """Written in pieces of any length: the best blocks are found, in old regions and in the one that has not ended."""
    length = 3 * SEARCHED + 7
    keys = 0.1 * torch.randn(2, length, 1, 4)
    for row, place in ((0, 21), (1, length - 2)):
        keys[row, place, 0, 0] = 20.0
    store, places = EntryStore(Recall(1, block=1, key=key)), torch.arange(length).expand(2, -1)
    for piece in (slice(0, 13), slice(13, 14), slice(14, 77), slice(77, length)):
        store.write(keys[:, piece], keys[:, piece] + 1, places[:, piece])
    query = torch.tensor([1.0, 0, 0, 0]).expand(2, 1, 2, 4)
    asked = RecallQuery(query, torch.full((2, 1), length), torch.zeros(2, 2, 1))
    missing = torch.ones(2, length, dtype=torch.bool)
    few = store.candidates(asked, missing, 1.0)
    assert few.shape == (2, CANDIDATES) and 21 in few[0] and length - 2 in few[1]
    found = store.best(asked, torch.tensor([[0], [0]]), DotProducts(1.0), 1.0)
    assert found is not None and found[2].tolist() == [[21], [length - 2]]
    assert set(store.described) == {1, REGION}
    missing[0, 16:32] = False
    assert 21 not in store.candidates(asked, missing, 1.0)[0]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python of docs/small-memory.md as it is printed, block after block."""
    names = {"DECODER": save_decoder(tmp_path), "TEXT": text_of(0), "QUESTION": "    def lock", "FURTHER_QUESTION": " queue"}
    monkeypatch.chdir(tmp_path)
    for block in (ROOT / "docs" / "small-memory.md").read_text().split("```python\n")[1:]:
        exec(block.split("```")[0], names)
    device, stored = map(int, capsys.readouterr().out.split()[-2:])
    assert 0 < device < stored and (tmp_path / "read-once" / FILE).is_file()


def test_a_folder_is_made_and_one_that_cannot_be_is_told(tmp_path: Path) -> None:
    store = EntryStore(Recall(4, folder=tmp_path / "new"))
    store.write(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), torch.tensor([[0, 1]]))
    assert store.bytes > 0 and (tmp_path / "new").is_dir()
    (tmp_path / "file").write_text("")
    store = EntryStore(Recall(4, folder=tmp_path / "file"))
    with pytest.raises(UserError, match="name another folder"):
        store.write(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), torch.tensor([[0, 1]]))
    for wrong in ({"entries": 0}, {"entries": 4, "block": 0}):
        with pytest.raises(UserError, match="at least 1"):
            Recall(**wrong)
