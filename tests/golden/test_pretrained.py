"""Tiny pretrained models read in chunks with memories, compared with their outputs for the whole input (hf_*.npz).

Their files are in the transformers format and loaded by the code that loads real ones. transformers computes in float32:
hence the tolerance of 5e-5.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.memories import ROOT, tensors
from tests.golden.published import parametrized
from trime.common.pretrained import load_pretrained
from trime.kv.answering import DecoderAnswerer, EncoderDecoderAnswerer, ReadingConfig, greedy
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.eviction.fifo import FIFO
from trime.kv.reader import Hidden, LongReader
from trime.kv.rope import RopeDecoder
from trime.kv.t5 import T5Encoder

pytest.importorskip("transformers", reason="transformers is not installed")
CONFIGS = {
    path.name.removesuffix(".config.json"): json.loads(path.read_text()) for path in sorted(ROOT.glob("hf_*.config.json"))
}
T5 = [name for name, config in CONFIGS.items() if config["model_type"] == "t5"]
ROPE = [name for name in CONFIGS if name not in T5]
ANSWERING = [name for name in CONFIGS if name in ROPE or CONFIGS[name]["is_encoder_decoder"]]
CHUNKS = [1, 13, 32, 1000]
ANSWER = 6  # tokens


def model_of(name: str, folder: Path) -> Any:
    config = dict(CONFIGS[name])
    kinds = {"llama": "LlamaForCausalLM", "gpt_neox": "GPTNeoXForCausalLM"}
    t5 = "T5ForConditionalGeneration" if config["is_encoder_decoder"] else "T5EncoderModel"
    architecture = kinds.get(config["model_type"], t5)
    if config["model_type"] == "t5":
        config["tie_word_embeddings"] = config.get("golden_lm_head_tied_to_shared", True)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    shutil.copy(ROOT / f"{name}.safetensors", folder / "model.safetensors")
    return load_pretrained(str(folder))


def outputs(reader: LongReader, tokens: torch.Tensor, filled: torch.Tensor, end: str) -> torch.Tensor:
    """Return the stack's outputs at every position, NaN where there was padding."""
    position = torch.arange(tokens.shape[1]).expand_as(tokens).masked_fill(~filled, -1)
    parts: list[Hidden] = [*reader.feed(tokens, position), *reader.end(end)]
    result = torch.full((*tokens.shape, parts[0].x.shape[-1]), torch.nan)
    for x, position in parts:
        rows, cells = (position >= 0).nonzero().unbind(1)
        result[rows, position[rows, cells]] = x[rows, cells]
    return result


def reader_of(family: Any, keys: int, waiting: int, chunk: int) -> LongReader:
    memory = Attendre(BoundedMemory(keys, FIFO()), waiting, causal=family.causal)
    return LongReader(family, [memory] * len(family.layers), chunk)


@parametrized("name", ROPE)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("position", ["lm_infinite", "none"])
def test_a_decoder_with_a_large_memory_is_the_full_model(name: str, chunk: int, position: str, tmp_path: Path) -> None:
    """Law: M ≥ length and N = 0 equals the full causal forward, for any chunk."""
    published, model = tensors(name), model_of(name, tmp_path)
    family, tokens, filled = RopeDecoder(model, position), published["input_ids"], published["attention_mask"].bool()
    hidden = outputs(reader_of(family, tokens.shape[1], 0, chunk), tokens, filled, "flush")
    close(family.logits(hidden)[filled], published["logits"][filled])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=5e-5)


@parametrized("name", ROPE)
@pytest.mark.parametrize("keys", ["before_rope", "after_rope"])
@pytest.mark.parametrize("end", ["flush", "drain"])
def test_a_decoder_whose_queries_all_wait_reads_both_ways(name: str, keys: str, end: str, tmp_path: Path) -> None:
    """Law: with attention both ways, N ≥ length equals the full forward under a mask that hides padding alone."""
    published, model = tensors(name), model_of(name, tmp_path)
    family, tokens, filled = RopeDecoder(model, cached_keys=keys), published["input_ids"], published["attention_mask"].bool()
    length = tokens.shape[1]
    memory = Attendre(BoundedMemory(length, FIFO()), length, causal=False)
    hidden = outputs(LongReader(family, [memory] * len(family.layers), 13), tokens, filled, end)
    visible = filled[:, None, None].expand(-1, 1, length, -1)
    with torch.no_grad():
        expected = model(tokens, attention_mask=torch.zeros(visible.shape).masked_fill(~visible, -1e30)).logits
    close(family.logits(hidden)[filled], expected[filled])
    assert (expected[filled] - published["logits"][filled]).abs().max() > 1e-2, "the future matters"


@parametrized("name", T5)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("end", ["flush", "drain"])
def test_an_encoder_whose_queries_all_wait_is_the_full_model(name: str, chunk: int, end: str, tmp_path: Path) -> None:
    """Law: N ≥ length equals the full bidirectional encoder, flushed or drained; padding never enters."""
    published, model = tensors(name), model_of(name, tmp_path)
    family, tokens, filled = T5Encoder(model), published["input_ids"], published["attention_mask"].bool()
    length = tokens.shape[1]
    hidden = outputs(reader_of(family, length, length, chunk), tokens, filled, end)
    expected = published["encoder_last_hidden"]
    assert torch.equal(hidden.isnan().all(-1), ~filled)
    close(hidden[filled], expected[filled])
    if "logits" in published:
        close(family.logits(published["decoder_input_ids"], hidden.nan_to_num(), filled), published["logits"])


def prompts_of(vectors: dict[str, torch.Tensor]) -> list[list[int]]:
    """Return the beginnings of all rows, and of the first once more, of different lengths."""
    rows = [row[filled.bool()].tolist() for row, filled in zip(vectors["input_ids"], vectors["attention_mask"], strict=True)]
    return [row[: max(1, len(row) * 2 // (4 + number))] for number, row in enumerate([*rows, rows[0]])]


@parametrized("name", ANSWERING)
@pytest.mark.parametrize("end", ["flush", "drain"])
@pytest.mark.parametrize("waits", [False, True])
def test_answers_with_a_large_memory_are_the_full_models(name: str, end: str, waits: bool, tmp_path: Path) -> None:
    """Greedy, for prompts of different lengths as a batch, against the model run on the whole text for every token.

    An encoder's queries always wait for all of the text; those of a decoder may, for more than a chunk.
    """
    model, rows = model_of(name, tmp_path), prompts_of(tensors(name))
    family = T5Encoder(model) if name in T5 else RopeDecoder(model)
    longest = max(map(len, rows))
    waiting = longest if name in T5 else longest // 2 if waits else 0
    memory = Attendre(BoundedMemory(longest + ANSWER, FIFO()), waiting, causal=family.causal)
    reading = ReadingConfig([memory] * len(family.layers), max(1, longest // 3), end)
    answerer = EncoderDecoderAnswerer(family, reading, longest) if name in T5 else DecoderAnswerer(family, reading)
    with torch.no_grad():
        expected = [greedy_by_model(model, row, ANSWER) for row in rows]
    assert greedy(answerer.read(rows), -1, ANSWER) == expected
    stop = expected[0][2]
    stopped = [row[: row.index(stop)] if stop in row else row for row in expected]
    assert greedy(answerer.read(rows), stop, ANSWER) == stopped
    assert greedy(answerer.read(rows[1:]), -1, ANSWER) == expected[1:], "a row alone answers as in a batch"


def greedy_by_model(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the model's own greedy continuation."""
    answer: list[int] = []
    for _ in range(count):
        if model.config.is_encoder_decoder:
            decoder = torch.tensor([[model.config.decoder_start_token_id, *answer]])
            logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoder).logits
        else:
            logits = model(torch.tensor([[*prompt, *answer]])).logits
        answer.append(int(logits[0, -1].argmax()))
    return answer


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2"])
def test_a_models_own_sliding_window_is_kept(kind: str) -> None:
    """Random weights; some of Qwen2's layers see everything."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"use_sliding_window": True, "max_window_layers": 1} if kind == "Qwen2" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, num_key_value_heads=2, sliding_window=6, max_position_embeddings=64, **sizes, **more
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    tokens = torch.randint(50, (2, 40))
    family = RopeDecoder(model)
    assert family.windows == ([None, 6, 6] if kind == "Qwen2" else [6, 6, 6])
    memories = [Attendre(BoundedMemory(40, FIFO()), causal=True, window=window) for window in family.windows]
    hidden = outputs(LongReader(family, memories, 7), tokens, torch.ones_like(tokens).bool(), "flush")
    with torch.no_grad():
        torch.testing.assert_close(family.logits(hidden), model(tokens).logits, rtol=0, atol=5e-5)
