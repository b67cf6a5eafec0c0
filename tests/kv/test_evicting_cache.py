"""EvictingCache in transformers' generate gives what a reader gives that runs the layers itself."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.18", reason="attention is replaced from there on")

import peft
import transformers

import trime
from tests.helpers.decoders import FAMILIES, add_contrast, model_of
from tests.helpers.pretrained import save_model
from trime import H2O, TOVA, BelowMean, EvictingCache, KeyNorm, OwnPosition, Raw, SnapKV, Softmax
from trime.common.pretrained import load_pretrained
from trime.errors import UserError
from trime.kv.answering import DecoderAnswerer, ReadingConfig, greedy
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.evicting_cache import check_call, check_settings
from trime.kv.eviction.base import EvictionPolicy
from trime.kv.reader import LongReader
from trime.kv.rope import RopeDecoder

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "fifo": trime.FIFO,
    "sink": lambda: trime.Sink(2),
    "lru": lambda: trime.LRU(OwnPosition()),
    "lra_sum": lambda: trime.LRASum(BelowMean(1.0), Raw()),
}
SIZE, CHUNK = 12, 5
LOGITS = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}  # of generate


@pytest.fixture(
    scope="module", params=["Llama", "GPTNeoX", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Mistral", "Qwen2"))]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the lab's reader run the layers itself, split at their attention, as it does where queries wait."""
    monkeypatch.setattr(LongReader, "must_split", lambda *_: True)


def memories(model: Any, policy: EvictionPolicy, top_k: int | None) -> list[Attendre]:
    """Return a memory for each layer."""
    windows = RopeDecoder(model, "none").windows
    return [Attendre(BoundedMemory(SIZE, policy), 0, top_k, True, window) for window in windows]


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_generation_is_that_of_the_reader(name: str, top_k: int | None, folder: Path, split: None) -> None:
    """Its logits token by token; the cache is written by generate, in a prefill and single steps."""
    model, other = load_pretrained(str(folder)), load_pretrained(str(folder))
    prompt = torch.randint(3, len(model.get_input_embeddings().weight), (1, 40)).tolist()
    reading = ReadingConfig(memories(other, POLICIES[name](), top_k), CHUNK)
    session = DecoderAnswerer(RopeDecoder(other, "none", cached_keys="after_rope"), reading).read(prompt)
    cache = EvictingCache(model, SIZE, POLICIES[name](), top_k, CHUNK)
    output = model.generate(torch.tensor(prompt), past_key_values=cache, max_new_tokens=6, **LOGITS)
    written = output.sequences[:, 40:]
    for number, logits in enumerate(output.logits):
        torch.testing.assert_close(logits, session.next_logits(written[:, :number]), atol=1e-5, rtol=1e-5)
    assert greedy(DecoderAnswerer(RopeDecoder(other, "none"), reading).read(prompt), -1, 6) == written.tolist()
    assert cache.get_seq_length() == 45 and cache.positions(0).shape == (1, SIZE) and cache.bytes > 0


@pytest.mark.parametrize("policy", [TOVA(Softmax()), SnapKV(Softmax(), window=7), trime.LRASum(BelowMean(1.0), Raw())])
def test_a_text_that_its_question_guides_is_that_of_the_reader(policy: EvictionPolicy, folder: Path, split: None) -> None:
    """Which entries a cache keeps before generate goes on with the question, and the logits of what it writes."""
    model, other = load_pretrained(str(folder)), load_pretrained(str(folder))
    prompt = torch.randint(3, 20, (2, 40))
    text, question = prompt.split([34, 6], 1)
    settings = ReadingConfig(memories(other, policy, None), CHUNK, prefill="guided")
    answerer = DecoderAnswerer(RopeDecoder(other, "none", cached_keys="after_rope"), settings)
    reading = answerer.start(text.tolist(), questions=question.tolist())
    cache = EvictingCache(model, SIZE, policy, chunk=CHUNK)
    cache.read(model, text, question)
    for layer, kept in enumerate(reading.reader.cache.kept()):
        assert torch.equal(cache.positions(layer).sort(1).values, kept.sort(1).values)
    output = model.generate(prompt, past_key_values=cache, max_new_tokens=4, **LOGITS)
    session, written = reading.ask(question.tolist()), output.sequences[:, 40:]
    for number, logits in enumerate(output.logits):
        torch.testing.assert_close(logits, session.next_logits(written[:, :number]), atol=1e-5, rtol=1e-5)
    plain = EvictingCache(model, SIZE, policy, chunk=CHUNK)
    plain.read(model, text)
    assert any(not torch.equal(cache.positions(layer), plain.positions(layer)) for layer in range(len(cache.memories)))


BATCHED: dict[str, Callable[[], EvictionPolicy]] = POLICIES | {
    "tova": lambda: TOVA(Softmax()),
    "h2o": lambda: H2O(Softmax()),
    "snapkv": lambda: SnapKV(Softmax(), window=3),
}


@torch.no_grad()
@pytest.mark.parametrize("name", BATCHED)
def test_a_row_of_a_batch_is_the_row_alone(name: str, folder: Path) -> None:
    """Padded on the left by any number of tokens, in a prompt that is evicted from, a short one, and single steps after it."""
    model, padding = load_pretrained(str(folder)), (0, 4, 13)
    for length in (30, 11):
        tokens, mask = torch.randint(3, 20, (3, length + 4)), torch.ones(3, length + 4, dtype=torch.long)
        for row, count in enumerate(padding):
            mask[row, : min(count, length - 1)] = 0
        place = (mask.cumsum(1) - 1).clamp(min=0)
        steps = [slice(0, length), *(slice(at, at + 1) for at in range(length, length + 4))]
        cache = EvictingCache(model, SIZE, BATCHED[name](), chunk=CHUNK)
        given = [{"attention_mask": mask[:, : part.stop], "position_ids": place[:, part]} for part in steps]
        found = [model(tokens[:, part], past_key_values=cache, **own).logits for part, own in zip(steps, given, strict=True)]
        for row in range(3):
            first, cache = int(mask[row].argmax()), EvictingCache(model, SIZE, BATCHED[name](), chunk=CHUNK)
            own = [tokens[row : row + 1, max(first, part.start) : part.stop] for part in steps]
            alone = [model(part, past_key_values=cache).logits for part in own]
            together = torch.cat(found, 1)[row : row + 1, first:]
            torch.testing.assert_close(together, torch.cat(alone, 1), atol=1e-5, rtol=1e-5)


class Apart(EvictingCache):
    """A cache whose layers rank their entries each for itself."""

    are_alike = False  # type: ignore[assignment]


@torch.no_grad()
@pytest.mark.parametrize(("top_k", "padded"), [(None, False), (4, True)])
@pytest.mark.parametrize("name", BATCHED)
def test_layers_decode_together_as_each_for_itself(name: str, top_k: int | None, padded: bool, folder: Path) -> None:
    """Whatever comes between tokens: padding, a question that looks back, rows that change places, a look at what is kept."""
    model = load_pretrained(str(folder))
    tokens, mask = torch.randint(3, 20, (3, 60)), torch.ones(3, 60, dtype=torch.long)
    if padded:
        mask[1, :9], mask[:2, 44:46] = 0, torch.tensor([[0], [1]])
    caches = [kind(model, SIZE, BATCHED[name](), top_k, CHUNK) for kind in (EvictingCache, Apart)]
    borders = [0, *range(40, 51), *range(53, 61)]
    for part in map(slice, borders, borders[1:]):
        texts = [model(tokens[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache).logits for cache in caches]
        torch.testing.assert_close(*texts, atol=1e-5, rtol=1e-5)
        if part.start % 5 == 0:
            assert all(torch.equal(*(cache.positions(layer) for cache in caches)) for layer in range(len(caches[0].memories)))
        if part.start == 48:
            mask = mask[[2, 0, 1]]
            for cache in caches:
                cache.reorder_cache(torch.tensor([2, 0, 1]))
        if part.start == 47 and not padded and caches[0].memories[0].memory.keys.policy.can_be_guided:
            for cache in caches:
                cache.rescore_with_question(1, lambda other: model(tokens[:, :1], past_key_values=other))
    assert caches[0].decoding is not None and caches[1].decoding is None


@torch.no_grad()
@pytest.mark.parametrize("name", ["h2o", "snapkv", "tova", "lra_sum"])
def test_a_memory_that_fills_up_step_by_step_is_that_of_the_reader(name: str, folder: Path, split: None) -> None:
    """Scores that are computed when the first entry has to go are those of every step."""
    model, other = load_pretrained(str(folder)), load_pretrained(str(folder))
    tokens = torch.randint(3, 20, (2, 30))
    reader = LongReader(RopeDecoder(other, "none", cached_keys="after_rope"), memories(other, BATCHED[name](), None), CHUNK)
    cache, place = EvictingCache(model, SIZE, BATCHED[name](), chunk=CHUNK), torch.arange(30).expand(2, -1)
    for part in (slice(0, 7), *(slice(at, at + 1) for at in range(7, 30))):
        for hidden in reader.feed(tokens[:, part], place[:, part]):
            expected = reader.family.logits(hidden.x[:, -1:])
        found = model(tokens[:, part], past_key_values=cache, logits_to_keep=1).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for layer, kept in enumerate(reader.cache.kept()):
        assert torch.equal(cache.positions(layer).sort(1).values, kept.sort(1).values)


@torch.no_grad()
@pytest.mark.parametrize("size", [64, 20])
def test_padding_of_rows_that_ended_is_forgotten_in_the_next_turn(size: int, folder: Path) -> None:
    """As transformers' own cache has it, whose mask hides it; 20 entries are full before the second turn."""
    model, tokens = load_pretrained(str(folder)), torch.randint(3, 20, (2, 21))
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, 12:16] = 0  # row 0 ended, and read padding until row 1 had ended
    place = (mask.cumsum(1) - 1).clamp(min=0)
    cache = EvictingCache(model, size, trime.FIFO(), chunk=4)
    model(tokens[:, :16], attention_mask=torch.ones(2, 16, dtype=torch.long), past_key_values=cache)
    rest = {"attention_mask": mask, "position_ids": place[:, 16:], "past_key_values": cache}
    found = model(tokens[:, 16:], **rest).logits
    alone = EvictingCache(model, size, trime.FIFO(), chunk=4)
    row = torch.cat([tokens[:1, :12], tokens[:1, 16:]], 1)
    for part in row.split([12, 5], 1):
        expected = model(part, past_key_values=alone).logits
    torch.testing.assert_close(found[:1], expected, atol=1e-5, rtol=1e-5)
    assert cache.positions(0)[0].max() == 16
    mask[1, 3] = 0
    with pytest.raises(UserError, match="only a row's newest"):
        model(tokens[:, :1], attention_mask=torch.cat([mask, mask[:, :1]], 1), past_key_values=cache)


def test_a_cache_is_copied_with_gradients_on(folder: Path) -> None:
    model, tokens = load_pretrained(str(folder)), torch.randint(3, 20, (1, 40))
    for length in (8, 40):  # before and after the memory is full
        cache = EvictingCache(model, SIZE, TOVA(Softmax()), chunk=CHUNK)
        model(tokens[:, :length], past_key_values=cache).logits.sum().backward()
        other = copy.deepcopy(cache)
        kept = other.positions(0).clone()
        model(tokens[:, :3], past_key_values=cache)
        assert torch.equal(other.positions(0), kept) and other.get_seq_length() == length
        assert all(not column.requires_grad for layer in other.memories for column in layer.columns)


OWN = {  # what layers of a family have of their own
    "Gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "sliding_window": 12},
    "Gemma3Text": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "Mistral": {"sliding_window": 12},
    "Granite": {"attention_multiplier": 0.1},
}


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "Falcon"])
@torch.no_grad()
def test_any_decoder_reads_with_it(kind: str) -> None:
    """With room for everything attention is the model's own, with its scale, cap and windows; of the newest alone it slides."""
    model, tokens = model_of(kind, 50, **OWN.get(kind, {})), torch.randint(3, 50, (2, 30))
    add_contrast(model).set_attn_implementation("eager")  # no other has a cap
    expected = model(tokens).logits
    for policy in (trime.FIFO(), TOVA(Softmax()), H2O(Softmax())):
        cache = EvictingCache(model, 40, policy, chunk=7)
        read = [model(piece, past_key_values=cache).logits for piece in tokens.split([13, 1, 1, 15], 1)]
        torch.testing.assert_close(torch.cat(read, 1), expected, rtol=1e-4, atol=1e-5)
    place = torch.arange(30)
    hidden = (place[:, None] < place) | (place[:, None] - place >= 6)
    mask = torch.zeros(30, 30).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None].expand(2, -1, -1, -1)
    sliding = model(tokens, attention_mask=mask).logits
    read_by_one = model(tokens, past_key_values=EvictingCache(model, 6, trime.FIFO(), chunk=1)).logits
    torch.testing.assert_close(read_by_one, sliding, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(sliding, expected, atol=1e-2)


def test_what_it_cannot_read_with_is_told() -> None:
    """By name: another attention, layers that keep no entries, logits that a layer adds to, and a window of its own."""
    with pytest.raises(UserError, match="FalconForCausalLM is not supported: its attention"):
        EvictingCache(model_of("Falcon", 50), 40, trime.FIFO())
    hybrid = model_of("Qwen3", 50)
    hybrid.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UserError, match="layers of linear_attention"):
        EvictingCache(hybrid, 40, trime.FIFO())
    model, tokens = model_of("Mistral", 50, sliding_window=12), torch.randint(3, 50, (1, 9))
    cache = EvictingCache(model, 40, trime.FIFO())
    model.config.sliding_window = None
    with pytest.raises(UserError, match="configuration says 12"):
        model(tokens, past_key_values=cache)
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UserError, match="depends on s_aux"):
        check_call(model.model.layers[0].self_attn, cache.memories[0], {"s_aux": x})


SMALL_DECODER = {"vocab_size": 60, "d_model": 32, "decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": 4}
BERT = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT = BERT | {"ffn_dim": 48, "word_embed_proj_dim": 32}


@torch.no_grad()
@pytest.mark.parametrize("kind, sizes", [("OPT", OPT), ("Bart", SMALL_DECODER), ("Blenderbot", SMALL_DECODER)])
def test_a_decoder_within_another_module_reads(kind: str, sizes: dict[str, int]) -> None:
    """Also where the encoder that it was trained with has another number of layers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, max_position_embeddings=64)
    model, tokens = getattr(transformers, f"{kind}ForCausalLM")(config).eval(), torch.randint(3, 60, (1, 30))
    cache = EvictingCache(model, 40, trime.FIFO())
    read = torch.cat([model(part, past_key_values=cache).logits for part in tokens.split(20, 1)], 1)
    torch.testing.assert_close(read, model(tokens, use_cache=False).logits)


@torch.no_grad()
def test_attention_that_a_memory_would_change_is_refused() -> None:
    """Masks that layers make, attention to what follows, and prompts that were learned."""
    sizes = BERT | {"num_key_value_heads": 2, "keep_window_size": 16}
    doge = transformers.DogeForCausalLM(transformers.DogeConfig(**sizes)).eval()
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**BERT)).eval()
    for model, message in ((doge, "depends on attention_mask"), (bert, "is_decoder=True")):
        with pytest.raises(UserError, match=message):
            model(torch.randint(3, 60, (1, 30)), past_key_values=EvictingCache(model, 40, trime.FIFO()))
    tuned = peft.get_peft_model(model_of("Llama", 50), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UserError, match="use LoRA"):
        EvictingCache(tuned, 40, trime.FIFO())
    with pytest.raises(UserError, match="leave it out"):
        EvictingCache(model_of("Llama", 50), 40, trime.FIFO(), recall=0)


@torch.no_grad()
def test_heads_that_evict_for_themselves_are_as_exact_in_half_precision() -> None:
    """Also where keys have a large bias, as in the first layers of Qwen2.5: by the distance to float32."""
    model, tokens = model_of("Qwen2", 50), torch.randint(3, 50, (1, 60))
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data += 150 * torch.randn_like(layer.self_attn.k_proj.bias)
    model.to(torch.bfloat16)
    exact_too = copy.deepcopy(model).float()(tokens).logits  # of the rounded weights
    own = (model(tokens).logits.float() - exact_too).square().mean()
    cache = EvictingCache(model, 64, trime.TOVA(), per_head=True)
    read = (model(tokens, past_key_values=cache).logits.float() - exact_too).square().mean()
    assert read < 1.2 * own


@torch.no_grad()
def test_a_second_turn_follows_all_that_was_written() -> None:
    """The last token of an answer, which the cache has not read; and not the padding of rows that ended before others."""
    model, tokens, more = model_of("Llama", 50), torch.randint(3, 50, (2, 20)), torch.randint(3, 50, (2, 5))
    written = model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None)
    end = int(written[0, 22])  # row 0 ends there
    settings = {"do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    model.generation_config.update(eos_token_id=end, pad_token_id=0)
    cache = EvictingCache(model, 64, trime.FIFO())
    output = model.generate(tokens, max_new_tokens=6, past_key_values=cache, **settings)
    inputs = cache.inputs(more, output)
    assert torch.equal(inputs["input_ids"], torch.cat([output, more], 1))
    ends = [int((row[20:] == end).nonzero()[0]) + 21 if (row[20:] == end).any() else len(row) for row in output]
    assert ends[0] < output.shape[1] and [int(row.sum()) - 5 for row in inputs["attention_mask"]] == ends
    position = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = model(**inputs, position_ids=position).logits[:, -1].argmax(1)
    answer = model.generate(**inputs, max_new_tokens=1, past_key_values=cache, **settings)
    assert torch.equal(answer[:, -1], expected)


def test_beams_take_their_memory_along(folder: Path) -> None:
    """A beam search over a memory that holds everything is that of the model's own cache."""
    model, prompt = load_pretrained(str(folder)), torch.randint(3, 20, (2, 10))
    settings = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(prompt)
    expected = model.generate(prompt, attention_mask=mask, **settings)
    cache = EvictingCache(model, 64, trime.FIFO())
    assert torch.equal(model.generate(prompt, attention_mask=mask, past_key_values=cache, **settings), expected)


@torch.no_grad()
def test_a_cache_lives_no_longer_than_its_owner_wants(folder: Path) -> None:
    model = load_pretrained(str(folder))
    cache = EvictingCache(model, SIZE, trime.FIFO())
    model(torch.randint(3, 20, (1, 9)), past_key_values=cache)
    left = weakref.ref(cache)
    del cache
    gc.collect()
    assert left() is None


@pytest.mark.parametrize(
    "size, policy",
    [
        (64, SnapKV(Softmax())),
        (65, SnapKV(Softmax())),
        (67, SnapKV(Softmax(), sinks=2)),
        (8, TOVA(Softmax(), recent=8)),
        (8, KeyNorm(recent=8)),
        (8, H2O(Softmax(), recent=1.0)),
        (4, trime.Sink(4)),
    ],
)
def test_a_policy_without_a_choice_is_refused(size: int, policy: EvictionPolicy) -> None:
    with pytest.raises(UserError, match=f"memory_size={size}.*raise"):
        BoundedMemory(size, policy)


def test_threads_take_turns(folder: Path) -> None:
    """Two caches of one model, and the model without any, each in a thread of its own: results are those of one thread."""
    model, texts = load_pretrained(str(folder)), torch.randint(3, 20, (3, 1, 90))

    def read(number: int) -> torch.Tensor:
        cache = EvictingCache(model, SIZE, SnapKV(window=2), chunk=4) if number else None
        with torch.no_grad():
            return torch.cat([model(part, past_key_values=cache).logits for part in texts[number].split(3, 1)], 1)

    expected = [read(number) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for number, logits in enumerate(pool.map(read, [0, 1, 2] * 4)):
            torch.testing.assert_close(logits, expected[number % 3])


def test_an_interrupted_call_leaves_the_model_as_it_was(folder: Path) -> None:
    """After an error or Ctrl-C within a layer the model works; a cache that had read nothing reads, one in part says so."""
    model, tokens = load_pretrained(str(folder)), torch.randint(3, 20, (1, 9))
    expected, cache = model(tokens).logits, EvictingCache(model, SIZE, trime.FIFO())
    with pytest.raises(IndexError):
        model(tokens + 1000, past_key_values=cache)
    torch.testing.assert_close(model(tokens).logits, expected)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.base_model.layers[-1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens, past_key_values=cache)
    hook.remove()
    with ThreadPoolExecutor(1) as pool:  # which would wait for ever for a call that nothing ends
        torch.testing.assert_close(pool.submit(model, tokens).result(60).logits, expected)
    torch.testing.assert_close(model(tokens).logits, expected)
    with pytest.raises(UserError, match=r"cache.reset\(\)"):
        model(tokens, past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(model(tokens, past_key_values=cache).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_call_within_a_call(folder: Path) -> None:
    """Is answered as ever where neither has a cache, and refused within one that has."""
    model, tokens = load_pretrained(str(folder)), torch.randint(3, 20, (1, 9))
    expected, within = model(tokens).logits, list[torch.Tensor]()
    cache = EvictingCache(model, SIZE, trime.FIFO())

    def ask(*_: Any) -> None:
        if not within:
            within.append(torch.zeros(0))
            within.append(model(tokens).logits)

    model.base_model.layers[0].register_forward_hook(ask)
    torch.testing.assert_close(model(tokens).logits, expected)
    torch.testing.assert_close(within[1], expected)
    within.clear()
    with pytest.raises(UserError, match="within a call"):
        model(tokens, past_key_values=cache)
    torch.testing.assert_close(model(tokens).logits, expected)


def test_a_whole_graph_is_compiled(folder: Path) -> None:
    model, tokens = load_pretrained(str(folder)), torch.randint(3, 20, (1, 9))
    expected = model(tokens).logits
    EvictingCache(model, SIZE, trime.FIFO())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens, use_cache=False).logits, expected)


def test_a_mask_may_go_further_than_what_was_read(folder: Path) -> None:
    model, tokens = load_pretrained(str(folder)), torch.randint(3, 20, (2, 9))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    expected = model(tokens).logits
    cache = EvictingCache(model, SIZE, trime.FIFO())
    torch.testing.assert_close(model(tokens, attention_mask=mask, past_key_values=cache).logits, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="8 columns"):
        model(tokens, attention_mask=mask[:, :8], past_key_values=EvictingCache(model, SIZE, trime.FIFO()))


@pytest.mark.parametrize(
    "settings", [{"size": -3}, {"size": 2.5}, {"size": "8"}, {"chunk": 2.5}, {"top_k": 0}, {"recall": 2.5}, {"per_head": "yes"}]
)
def test_impossible_settings_are_one_line(settings: dict[str, Any]) -> None:
    fine = {"size": SIZE, "top_k": None, "chunk": None, "recall": None, "per_head": False}
    check_settings(**fine)
    with pytest.raises(UserError, match=next(iter(settings))):
        check_settings(**(fine | settings))


def test_what_is_no_decoder_of_text_is_refused() -> None:
    with pytest.raises(UserError, match="AutoModelForCausalLM"):
        EvictingCache("gpt2", SIZE, trime.FIFO())
    with pytest.raises(UserError, match="language model"):
        EvictingCache(torch.nn.Linear(2, 2), SIZE, trime.FIFO())


@pytest.mark.parametrize("size", [SIZE, 64])
def test_what_inference_mode_read_goes_on(size: int, folder: Path) -> None:
    """In generate, which is no inference mode; as transformers' own cache does."""
    model, tokens = load_pretrained(str(folder)), torch.randint(3, 20, (1, 30))
    one, other = (EvictingCache(model, size, TOVA(Softmax()), chunk=CHUNK) for _ in range(2))
    with torch.inference_mode():
        model(tokens, past_key_values=one)
    with torch.no_grad():
        model(tokens, past_key_values=other)
        read, expected = (model(tokens[:, :5], past_key_values=each).logits for each in (one, other))
    assert torch.equal(read, expected)
