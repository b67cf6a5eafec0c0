"""What answerers keep of a prompt: cut when it was read, guided by a question, each head for itself (Attendre footnote 2)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra decoder")

import trime
from tests.helpers.pretrained import SIZES, decoder_answerer, save_model
from trime import H2O, TOVA, SnapKV
from trime.common.pretrained import load_pretrained
from trime.kv.answering import greedy
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.eviction.base import EvictionPolicy
from trime.kv.layer_memory import LayerMemory
from trime.kv.reader import Hidden, LongReader
from trime.kv.rope import RopeDecoder

LENGTH, SIZE, CHUNK = 31, 9, 4


def cut_cache(model: Any, prompt: torch.Tensor, first: int) -> tuple[torch.Tensor, Any]:
    """Return the logits after a prompt, and transformers' cache of it without the entries before ``first``."""
    output = model(prompt, use_cache=True)
    for layer in output.past_key_values.layers:
        layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
    return output.logits[:, -1], output.past_key_values


@pytest.mark.parametrize("form", ["Llama", "GPTNeoX"])
@torch.no_grad()
def test_the_prompt_is_read_whole_and_then_cut(form: str, tmp_path: Path) -> None:
    """The logits after it are those of full attention; the next token sees the newest entries, which know the whole prompt."""
    folder = save_model(form, tmp_path)
    model = load_pretrained(str(folder))
    prompt, token = torch.randint(3, 20, (1, LENGTH)), torch.randint(3, 20, (1, 1))
    session = decoder_answerer(folder, trime.FIFO(), SIZE, CHUNK, prefill="whole").read(prompt.tolist())
    assert all(sorted(position[0].tolist()) == [*range(LENGTH - SIZE, LENGTH)] for position in session.kept)
    logits, cache = cut_cache(model, prompt, LENGTH - SIZE + 1)  # the next token takes the place of one more
    torch.testing.assert_close(session.next_logits(token[:, :0]), logits, atol=1e-5, rtol=1e-5)
    place = torch.tensor([[LENGTH]])
    expected = model(token, past_key_values=cache, position_ids=place).logits[:, -1]
    torch.testing.assert_close(session.next_logits(token), expected, atol=1e-5, rtol=1e-5)
    chunked = decoder_answerer(folder, trime.FIFO(), SIZE, CHUNK, prefill="chunked").read(prompt.tolist())
    assert not torch.allclose(chunked.next_logits(token[:, :0]), logits, atol=1e-5)


@torch.no_grad()
def test_a_text_is_cut_before_its_questions(tmp_path: Path) -> None:
    """Which entries of the text stay does not depend on the question; each question adds its own."""
    folder = save_model("Llama", tmp_path)
    text, questions = torch.randint(3, 20, (LENGTH,)).tolist(), [[5, 6], [7, 8]]
    reading = decoder_answerer(folder, trime.Sink(2), SIZE, CHUNK, prefill="whole").start([text])
    expected = [0, 1, *range(LENGTH - SIZE + 4, LENGTH + 2)]
    for position in reading.ask(questions, [0, 0]).kept:
        assert position.sort(1).values.tolist() == [expected, expected]


@pytest.mark.parametrize("size", [3, 8, 20])
def test_a_memory_of_another_size_has_the_best_entries(size: int) -> None:
    """Also of rows with fewer entries; what stays keeps its columns, and can be written on."""
    torch.manual_seed(0)
    given, policy = torch.randn(2, 8, 5), trime.LRU(trime.OwnPosition())
    position = torch.stack([torch.arange(8), torch.arange(8) - 4]).clamp(min=-1)
    memory, other = BoundedMemory(8, policy), BoundedMemory(size, policy)
    state = memory.update(memory.empty((given[:, :0],)), (given,), position)
    scores = torch.rand(2, 8, dtype=torch.float64).masked_fill(state.ranking.position < 0, -torch.inf)
    state = state._replace(ranking=state.ranking._replace(score=scores))
    result = other.fit(state)
    for row in range(2):
        filled = result.ranking.position[row] >= 0
        best = scores[row].topk(min(size, int((position[row] >= 0).sum()))).indices
        found = sorted(result.ranking.position[row][filled].tolist())
        assert found == sorted(state.ranking.position[row][best].tolist())
        for slot in filled.nonzero().flatten():
            place = (state.ranking.position[row] == result.ranking.position[row, slot]).nonzero().item()
            assert torch.equal(result.columns[0][row, slot], state.columns[0][row, place])
            assert result.ranking.score[row, slot] == scores[row, place]
    assert result.columns[0].shape == (2, size, 5)
    other.update(result, (given[:, :1],), torch.tensor([[8], [8]]))


def attention_of_the_last_token(folder: Path, prompt: list[int]) -> list[torch.Tensor]:
    """Return how much transformers' own last token of a prompt attends to each token, summed over heads, layer by layer."""
    model = load_pretrained(str(folder))
    model.set_attn_implementation("eager")
    attentions = model(torch.tensor([prompt]), output_attentions=True).attentions
    return [layer[0, :, -1].sum(0) for layer in attentions]


@torch.no_grad()
def test_a_question_decides_what_is_evicted_next(tmp_path: Path) -> None:
    """While nothing was evicted, scores are the full model's attention after text and question; the best of them stay."""
    folder = save_model("Llama", tmp_path)
    text, question = torch.randint(3, 20, (3 * CHUNK,)).tolist(), torch.randint(3, 20, (3,)).tolist()
    reading = decoder_answerer(folder, TOVA(trime.Softmax()), SIZE, CHUNK, prefill="guided").start([text], questions=[question])
    asked, staying = attention_of_the_last_token(folder, text[: 2 * CHUNK] + question), SIZE - CHUNK
    for kept, attention in zip(reading.reader.cache.kept(), asked, strict=True):
        best = attention[: 2 * CHUNK].topk(staying).indices.tolist()
        assert sorted(kept[0].tolist()) == sorted([*best, *range(2 * CHUNK, 3 * CHUNK)])
    plain = decoder_answerer(folder, TOVA(trime.Softmax()), SIZE, CHUNK).start([text])
    pairs = zip(plain.reader.cache.kept(), reading.reader.cache.kept(), strict=True)
    assert any(sorted(one[0].tolist()) != sorted(other[0].tolist()) for one, other in pairs)


@pytest.mark.parametrize(
    "policy",
    [TOVA(trime.Softmax()), SnapKV(trime.Softmax(), window=5), H2O(trime.Softmax()), trime.LFA(trime.Constant(), trime.Raw())],
    ids=["tova", "snapkv", "h2o", "lfa"],
)
@pytest.mark.parametrize("per_head", [False, True])
@torch.no_grad()
def test_guided_texts_of_a_batch_are_read_as_if_alone(policy: EvictionPolicy, per_head: bool, tmp_path: Path) -> None:
    """Texts and questions of different lengths; the memory holds no token of a question, and is cut for no question."""
    folder = save_model("Llama", tmp_path)
    texts = [torch.randint(3, 20, (length,)).tolist() for length in (LENGTH, 2 * CHUNK - 1)]
    questions = [torch.randint(3, 20, (length,)).tolist() for length in (7, 3)]
    reading = partial(decoder_answerer, folder, policy, SIZE, CHUNK, prefill="guided", per_head=per_head)
    together, heads = reading().start(texts, questions=questions), SIZES["num_key_value_heads"] if per_head else 1
    for row, (text, question) in enumerate(zip(texts, questions, strict=True)):
        alone = reading().start([text], questions=[question])
        for one, other in zip(together.reader.cache.kept(), alone.reader.cache.kept(), strict=True):
            assert sorted(one[row].tolist()) == sorted(other[0].tolist())
            assert int(other.max()) == len(text) - 1 and int((other >= 0).sum()) == heads * min(SIZE, len(text))
        logits = alone.ask([question]).next_logits(torch.empty(1, 0, dtype=torch.long))
        torch.testing.assert_close(together.ask([question], [row]).next_logits(torch.empty(1, 0, dtype=torch.long)), logits)


@torch.no_grad()
def test_questions_change_nothing_where_all_is_kept(tmp_path: Path) -> None:
    folder = save_model("Llama", tmp_path)
    prompt = torch.randint(3, 20, (LENGTH,)).tolist()
    text, question = prompt[:-3], prompt[-3:]
    guided = decoder_answerer(folder, TOVA(trime.Softmax()), LENGTH, CHUNK, prefill="guided")
    session = guided.start([text], questions=[question]).ask([question])
    expected = load_pretrained(str(folder))(torch.tensor([prompt])).logits[:, -1]
    torch.testing.assert_close(session.next_logits(torch.empty(1, 0, dtype=torch.long)), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="before the texts"):
        guided.start([text])


def lra_sum() -> EvictionPolicy:
    """Return a policy whose choice depends on attention."""
    return trime.LRASum(trime.BelowMean(0.0), trime.Raw())


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
