"""Eviction for each head of keys by itself (Attendre footnote 2)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra pretrained")

import trime
from tests.helpers.pretrained import decoder_answerer, save_model
from trime.common.pretrained import load_pretrained
from trime.kv.answering import greedy
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.eviction.base import EvictionPolicy
from trime.kv.eviction.initial import BelowMean
from trime.kv.eviction.score_transform import Raw
from trime.kv.layer_memory import LayerMemory
from trime.kv.reader import Hidden, LongReader
from trime.kv.rope import RopeDecoder

LENGTH, SIZE, CHUNK = 37, 11, 5


def lra_sum() -> EvictionPolicy:
    """Return a policy whose choice depends on attention."""
    return trime.LRASum(BelowMean(0.0), Raw())


@pytest.mark.parametrize("form", ["Llama", "Qwen2", "GPTNeoX"])
@pytest.mark.parametrize(("size", "policy"), [(LENGTH + 8, lra_sum()), (SIZE, trime.FIFO())])
def test_heads_that_keep_the_same_answer_as_together(form: str, size: int, policy: EvictionPolicy, tmp_path: Path) -> None:
    """A memory that holds everything, and a policy that does not see attention; entries are those of every head."""
    folder = save_model(form, tmp_path, **({} if form == "GPTNeoX" else {"num_attention_heads": 4}))  # two share a head of keys
    prompts = [torch.randint(3, 20, (length,)).tolist() for length in (LENGTH, LENGTH - 9)]
    answerers = [decoder_answerer(folder, policy, size, CHUNK, per_head=per_head) for per_head in (True, False)]
    apart, together = (answerer.read(prompts) for answerer in answerers)
    written = torch.tensor([[4, 5, 6], [7, 8, 9]])
    for count in range(3):
        ours, others = (session.next_logits(written[:, :count]) for session in (apart, together))
        torch.testing.assert_close(ours, others, atol=1e-5, rtol=1e-5)
    heads = apart.reader.cache.memories[0].heads
    for ours, others in zip(apart.kept, together.kept, strict=True):
        assert ours.shape == (2, heads * others.shape[1])
        of_heads = ours.unflatten(1, (heads, -1)).sort(-1).values
        assert torch.equal(of_heads, others[:, None].sort(-1).values.expand_as(of_heads))


@torch.no_grad()
def test_each_head_keeps_what_it_would_alone(tmp_path: Path) -> None:
    """The first layer's heads, each read by itself with the queries that share it."""
    family = RopeDecoder(load_pretrained(str(save_model("Llama", tmp_path, num_attention_heads=4))), "none")
    memory = Attendre(BoundedMemory(SIZE, lra_sum()), 0, None, True)
    tokens, position = torch.randint(3, 20, (2, LENGTH)), torch.arange(LENGTH).expand(2, -1)
    reader = LongReader(family, [memory] * len(family.layers), CHUNK, per_head=True)
    for _ in reader.feed(tokens, position):
        pass
    query, key, value = family.layers[0].project(family.embed(tokens))
    shared = query.shape[2] // key.shape[2]
    kept = reader.cache.kept()[0].unflatten(1, (key.shape[2], -1))
    differs = False
    for head in range(key.shape[2]):
        rows = slice(head, head + 1), slice(head * shared, (head + 1) * shared)
        alone = LayerMemory(memory, CHUNK, family.score)
        for start in range(0, LENGTH, CHUNK):
            part = slice(start, start + CHUNK)
            alone.step((query[:, part, rows[1]], key[:, part, rows[0]], value[:, part, rows[0]]), position[:, part])
        expected = alone.positions()
        assert torch.equal(kept[:, head].sort(1).values, expected.sort(1).values)
        differs |= not torch.equal(expected.sort(1).values, kept[:, 0].sort(1).values)
    assert differs


def test_texts_answer_alone_as_in_a_batch_and_waiting_queries_are_read(tmp_path: Path) -> None:
    """Also when questions fork what was read, and at the end of drained input."""
    folder = save_model("Llama", tmp_path, num_attention_heads=4)
    texts = [torch.randint(3, 20, (length,)).tolist() for length in (LENGTH, LENGTH - 7)]
    reading = decoder_answerer(folder, lra_sum(), SIZE, CHUNK, per_head=True).start(texts)
    answers = greedy(reading.ask([[5, 6], [7], [8, 9, 4]], [0, 1, 0]), -1, 4)
    for number, (text, question) in enumerate([(0, [5, 6]), (1, [7]), (0, [8, 9, 4])]):
        alone = decoder_answerer(folder, lra_sum(), SIZE, CHUNK, per_head=True).start([texts[text]])
        assert greedy(alone.ask([question]), -1, 4)[0] == answers[number]
    family = RopeDecoder(load_pretrained(str(folder)), "none")
    memory = Attendre(BoundedMemory(SIZE, trime.FIFO()), 3, None, True)
    tokens, position = torch.tensor([texts[0]]), torch.arange(LENGTH)[None]
    outputs = []
    for per_head in (True, False):
        reader = LongReader(family, [memory] * len(family.layers), CHUNK, per_head=per_head)
        parts: list[Hidden] = [*reader.feed(tokens, position), *reader.end("drain")]
        x, place = torch.cat([part.x for part in parts], 1), torch.cat([part.position for part in parts], 1)
        outputs.append(x[place >= 0])
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
