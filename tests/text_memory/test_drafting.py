"""Drafts: the text is the same as without them, in fewer calls of the model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.decoders import FAMILIES, PROMPT, Streamer, model_of, take_weights
from trime.common.pretrained import empty_cache, takes_back
from trime.errors import UserError
from trime.text_memory.drafting import Drafting, say_without
from trime.text_memory.drafts import EXPECTED, NEAR, Continuation, Drafted, Pace
from trime.text_memory.experts import Neighbours
from trime.text_memory.memory import TextMemory

WINDOWED = [("Mistral", {"sliding_window": 8}), ("Gemma3Text", {"sliding_window": 8}), ("Gemma2", {"sliding_window": 8})]


def written(model: Any, prompt: torch.Tensor, **settings: Any) -> list[int]:
    torch.manual_seed(0)
    settings = {"do_sample": False, "max_new_tokens": 40, **settings}
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    return output[0, prompt.shape[1] :].tolist()


def prompt_of(memory: TextMemory) -> torch.Tensor:
    return torch.from_numpy(memory.decoder.encode(PROMPT))[None]


@pytest.mark.parametrize("kind, settings", [*((kind, {}) for kind in FAMILIES), *WINDOWED])
def test_every_family_writes_the_same(
    kind: str, settings: dict[str, Any], fitted: TextMemory, tokenizer: Any, texts: Path, tmp_path: Path
) -> None:
    """Windows of a few tokens included, whose caches forget what a draft may need again."""
    model = model_of(kind, len(tokenizer), **settings)
    memory = TextMemory(model, tokenizer, tmp_path / "memory", window=100, overlap=28)
    memory.add(texts / "stored" / "0.py")
    take_weights(memory, fitted)
    prompt, drafting = prompt_of(memory), memory.drafting()
    expected = written(model, prompt, logits_processor=[memory.processor()])
    assert written(model, prompt, custom_generate=drafting) == expected
    assert drafting.calls < len(expected) or not takes_back(empty_cache(model))  # windows under transformers 4
    assert written(model, prompt, custom_generate=memory.drafting(mix=False)) == written(model, prompt)


SAMPLED = [{"temperature": 0.8}, {"top_p": 0.7}, {"top_k": 5}, {"temperature": 1.5, "repetition_penalty": 1.2}]


@pytest.mark.parametrize("settings", SAMPLED)
def test_sampled_text_is_the_same_for_each_seed(settings: dict[str, Any], fitted: TextMemory, model: Any) -> None:
    """Each place draws once from the whole distribution, as without drafts: any laxer rule would draw another text."""
    prompt, calls = prompt_of(fitted), 0
    for seed in range(8):
        texts = []
        for drafting in (None, fitted.drafting()):
            torch.manual_seed(seed)
            given = {"custom_generate": drafting} if drafting else {"logits_processor": [fitted.processor()]}
            output = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=True, max_new_tokens=24, **settings, **given
            )
            texts.append(output.tolist())
        assert texts[0] == texts[1]
        assert drafting is not None
        calls += drafting.tokens - drafting.calls
    assert calls > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"stop_strings": ["return"]},
        {"no_repeat_ngram_size": 3},
        {"min_new_tokens": 9, "eos_token_id": [200, 201]},
        {"bad_words_ids": [[150]], "do_sample": True},
        {"do_sample": True, "top_k": 3},
    ],
)
def test_generate_drafts_by_itself(settings: dict[str, Any], fitted: TextMemory) -> None:
    """Healed words, stops, excluded tokens and streams are those of a text without drafts."""
    results = []
    for given in ({"custom_generate": None}, {}):
        torch.manual_seed(1)
        streamer = Streamer()
        results.append(
            (fitted.generate(PROMPT, 30, streamer=streamer, **settings, **given), streamer.tokens, streamer.is_ended)
        )
    assert results[0] == results[1]


def test_an_attached_memory_drafts(fitted: TextMemory, model: Any) -> None:
    """The model's own generate writes what it does with the processor, in fewer calls, and streams it."""
    prompt, streamer, calls = prompt_of(fitted), Streamer(), list[int]()
    expected = written(model, prompt, logits_processor=[fitted.processor()])
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    with fitted.attach(model):
        assert written(model, prompt, streamer=streamer) == expected == streamer.tokens[prompt.shape[1] :]
        hook.remove()
        assert 0 < len(calls) < len(expected)
        stopped = written(model, prompt, stop_strings=["return"], tokenizer=fitted.decoder.tokenizer)
        assert stopped == expected[: len(stopped)] and "return" in fitted.decoder.text_of(stopped)
        for settings in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 2}, {"penalty_alpha": 0.6, "top_k": 4}):
            with pytest.raises(UserError, match=r"drafts by itself|not by contrastive"):
                written(model, prompt, **settings)


def test_an_expected_text_is_a_draft(fitted: TextMemory, model: Any) -> None:
    """What a call expects is written in the fewest calls, with places where it is wrong."""
    prompt = prompt_of(fitted)
    text = written(model, prompt)
    wrong = [*text[:10], 7, *text[11:20], *text[22:]]  # one token is another, two are missing
    without = fitted.drafting(mix=False)
    assert written(model, prompt, custom_generate=without) == text
    drafting = fitted.drafting(mix=False, expect="x")
    drafting.drafts.expected = np.array(wrong)
    drafting.drafts.pace = Pace()
    assert written(model, prompt, custom_generate=drafting) == text
    assert drafting.calls < 0.6 * without.calls


def test_what_cannot_be_drafted_goes_on_without(fitted: TextMemory, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Several rows, beams, results with scores and other caches: the text is the same, and the log says why, once."""
    from transformers import StaticCache

    import trime

    say_without.cache_clear()  # another test may have been told already
    prompt = prompt_of(fitted).repeat(2, 1)
    cases: list[tuple[int, dict[str, Any]]] = [(2, {}), (1, {"num_beams": 2}), (1, {"use_cache": False})]
    for rows, settings in cases:
        both = []
        for given in ({"logits_processor": [fitted.processor()]}, {"custom_generate": fitted.drafting()}):
            rows_of = prompt[:rows]
            given |= {"attention_mask": torch.ones_like(rows_of), "max_new_tokens": 8, "do_sample": False}
            both.append(model.generate(rows_of, **given, **settings).tolist())
        assert both[0] == both[1]
    caches: list[Any] = [StaticCache(config=model.config, max_cache_len=64)]
    with suppress(UserError):  # transformers 4
        caches.append(trime.EvictingCache(model, 64, trime.Sink(2)))
    settings = {"custom_generate": fitted.drafting(), "max_new_tokens": 8}
    texts = [written(model, prompt[:1], past_key_values=cache, **settings) for cache in caches]
    assert texts[0] == written(model, prompt[:1], logits_processor=[fitted.processor()], max_new_tokens=8)
    said = [record.message for record in caplog.records if "without drafts" in record.message]
    assert len(said) == len({*said}) == 3 + len(caches)
    with pytest.raises(UserError, match="leave out prompt_lookup_num_tokens"):
        written(model, prompt[:1], custom_generate=fitted.drafting(), prompt_lookup_num_tokens=2)


def test_a_cache_goes_on(fitted: TextMemory, model: Any) -> None:
    """A cache that a call leaves behind holds all but the last token, as that of a call without drafts."""
    from transformers import DynamicCache

    prompt, kept = prompt_of(fitted), DynamicCache(config=model.config)
    text = written(model, prompt, custom_generate=fitted.drafting(), past_key_values=kept, max_new_tokens=16)
    assert kept.get_seq_length() == prompt.shape[1] + 15
    longer = torch.cat([prompt, torch.tensor([text])], 1)
    more = written(model, longer, custom_generate=fitted.drafting(), past_key_values=kept, max_new_tokens=16)
    assert text + more == written(model, prompt, logits_processor=[fitted.processor()], max_new_tokens=32)


def test_drafts_that_fail_become_rare() -> None:
    """Tokens of a share of 0.9 that are always wrong are soon not drafted any more, and tried again after a while."""
    pace, tries = Pace(), []
    for _ in range(4000):
        chance = pace.chance(EXPECTED, 4, 0.9)
        is_worth = 1 + chance > pace.cost(1)
        tries.append(is_worth)
        pace.came_true([Drafted(0, EXPECTED, 4, 0.9, chance)] if is_worth else [], [False])
        pace.took(int(is_worth), 1.05 if is_worth else 1.0)
    assert sum(tries[:200]) < 100
    assert 0 < sum(tries[1000:]) < 0.15 * 3000


def test_a_longer_draft_must_pay(fitted: TextMemory) -> None:
    """Where a call costs as much as calls for each of its tokens, nothing is drafted; where they cost nothing, much is."""
    tokens = fitted.decoder.encode(PROMPT)
    lengths = []
    for a_token in (1.0, 0.0):
        drafts = Drafting(fitted.decoder, fitted.drafting().drafts, None).drafts
        drafts.pace = Pace()
        for drafted in 3 * (0, 1, 2, 4, 8, 16, 32):
            drafts.pace.took(drafted, 1 + a_token * drafted)
        lengths.append(len(drafts.after(tokens, 32)))
    assert lengths[0] == 0 < lengths[1]


def test_neighbours_are_followed_within_their_documents(fitted: TextMemory) -> None:
    """Those that had the token go on with what they are followed by, and none goes on behind its document."""
    experts = fitted.processor().experts
    (segment,) = experts.segments
    end = int(segment.offsets[1]) - 1  # the last token of the first document
    places = torch.tensor([[10, 30, end, 11]])
    token = torch.from_numpy(segment.token(places[0].numpy()))[None].long()
    first = int(token[0, 0])
    token[0, 1:3] = first
    token[0, 3] = first + 1
    found = Neighbours(torch.tensor([[0.5, 0.5, 0.5, 0.5]]), token, torch.zeros_like(places), places)
    near = Continuation.of([segment], found, first)
    assert near.place.tolist() == [10, 30, end] and near.weight.sum() == pytest.approx(0.75)
    following = segment.token(np.array([11, 31])).tolist()
    assert near.tokens.tolist() == [*following, -1]
    ((best, source, context, share),) = near.best(1)
    assert best in following and source == NEAR and context == 1 and share == pytest.approx(0.25 * following.count(best))
    assert near.after(following[0]).place.tolist() == [11, *([31] if following[1] == following[0] else [])]
    assert near.after(-5).best(2) == []
