"""``TextMemory.generate``: chats, token numbers, settings of transformers' own, and the last word that is written again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.decoders import PROMPT, Streamer, model_of, take_weights, tokenizer_of
from trime.errors import UserError
from trime.text_memory.memory import TextMemory

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chatting(fitted: TextMemory, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> TextMemory:
    """A memory of a model whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = tokenizer_of(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    memory = TextMemory(model_of("Llama", len(tokenizer)), tokenizer, folder / "memory", window=100, overlap=28)
    memory.add(texts / "stored")
    take_weights(memory, fitted)
    return memory


class Counting:
    """A processor of the user's own that excludes nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores


def test_a_chat_is_what_its_template_writes(chatting: TextMemory) -> None:
    """As the model's own generate answers it; a second turn, several chats, an answer that is begun; token numbers alike."""
    tokenizer, model = chatting.decoder.tokenizer, chatting.decoder.model
    chat = [{"role": "user", "content": "    def lock"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    output = model.generate(torch.tensor([ids]), logits_processor=[chatting.processor()], **settings)
    expected = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    answer = chatting.generate(chat, max_new_tokens=8)
    assert answer == expected
    for numbers in (ids, torch.tensor(ids)):
        assert chatting.generate(numbers, max_new_tokens=8) == expected
    assert (
        chatting.generate([ids, ids], max_new_tokens=8) == chatting.generate([chat, chat], max_new_tokens=8) == [expected] * 2
    )
    turns = [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": "        return"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    output = model.generate(torch.tensor([ids]), logits_processor=[chatting.processor()], **settings)
    assert chatting.generate(turns, max_new_tokens=8) == tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    begun = chatting.generate([*chat, {"role": "assistant", "content": answer[:5]}], max_new_tokens=4)
    assert isinstance(begun, str)


def test_a_text_that_spells_a_template_is_told_how_to_pass_it(chatting: TextMemory, fitted: TextMemory) -> None:
    spelt = chatting.decoder.tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    with pytest.raises(UserError, match=r"spells <\|im_start\|>.*pass the messages"):
        chatting.generate(spelt)
    assert isinstance(fitted.generate(spelt, max_new_tokens=2), str), "without a template these are letters"
    with pytest.raises(UserError, match="no chat template"):
        fitted.generate([{"role": "user", "content": "a"}])
    for wrong in ([], {}, None, [[]], [1.5], [{"role": "user"}]):
        with pytest.raises(UserError, match=r"pass messages|pass a text|no chat template"):
            chatting.generate(wrong)
    with pytest.raises(UserError, match="99999"):
        chatting.generate([5, 99999])


@pytest.mark.parametrize(
    "settings",
    [
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": "the last word"},
        {"suppress_tokens": "the last word"},
        {"no_repeat_ngram_size": 2, "do_sample": True},
        {"repetition_penalty": 1e9},
    ],
)
def test_what_is_excluded_is_not_what_was_given(settings: dict[str, Any], fitted: TextMemory) -> None:
    """The last word is written again whatever the settings exclude; what follows obeys them."""
    tokenizer = fitted.decoder.tokenizer
    word = tokenizer("lock_queue", add_special_tokens=False).input_ids + tokenizer(" lock", add_special_tokens=False).input_ids
    values = {"bad_words_ids": [[token] for token in word], "suppress_tokens": word}
    settings = {name: values[name] if value == "the last word" else value for name, value in settings.items()}
    torch.manual_seed(0)
    written = fitted.generate(PROMPT, max_new_tokens=6, **settings)
    assert written
    if "suppress_tokens" in settings:
        assert not {*word} & {*fitted.decoder.inside(written)}


def test_processors_of_ones_own_see_the_prompt_as_given(fitted: TextMemory) -> None:
    counting = Counting()
    assert fitted.generate(PROMPT, max_new_tokens=6, logits_processor=[counting]) == fitted.generate(PROMPT, max_new_tokens=6)
    assert 0 < counting.calls <= 7


def test_streams_and_stops_write_the_same(fitted: TextMemory) -> None:
    """With a streamer, or up to a text that stops; the prompt's own end does not."""
    plain, streamer = fitted.generate(PROMPT, max_new_tokens=12), Streamer()
    assert fitted.generate(PROMPT, max_new_tokens=12, streamer=streamer) == plain
    assert streamer.is_ended and fitted.decoder.text_of(streamer.tokens) == PROMPT + plain
    stop = plain[3:5]
    for given in (stop, [stop, "nothing like it"]):
        stopped = fitted.generate(PROMPT, max_new_tokens=12, stop_strings=given)
        assert plain.startswith(stopped) and stop in stopped and len(stopped) <= plain.index(stop) + 14
    assert fitted.generate(PROMPT, max_new_tokens=12, stop_strings=["lock_queue"]).startswith(plain[:3])
    across = PROMPT[-2:] + plain[:1]  # the end of the prompt, and what follows
    assert len(fitted.generate(PROMPT, max_new_tokens=12, stop_strings=[across])) < len(plain)
    several = fitted.generate([PROMPT, "    def"], max_new_tokens=12, stop_strings=[stop])
    assert several[0].startswith(stopped)


def test_what_it_cannot_return_is_refused(fitted: TextMemory) -> None:
    for name in ("output_scores", "output_logits", "output_hidden_states"):
        with pytest.raises(UserError, match=f"takes no {name}"):
            fitted.generate(PROMPT, **{name: True})


def test_copies_of_the_model_are_other_models(fitted: TextMemory, tokenizer: Any) -> None:
    """They can be copied, pickled and compiled while a memory is open, and do not see it."""
    model = fitted.decoder.model
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    twin = copy.deepcopy(model)
    with pytest.raises(UserError, match="own model must generate"):
        twin.generate(**inputs, logits_processor=[fitted.processor()], max_new_tokens=2)
    expected = fitted.generate(PROMPT, max_new_tokens=4)
    own_scores = fitted.processor()

    def beside(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        twin(input_ids)
        return scores

    settings = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(
        model.generate(**inputs, logits_processor=[beside, own_scores], **settings),
        model.generate(**inputs, logits_processor=[fitted.processor()], **settings),
    )
    assert fitted.generate(PROMPT, max_new_tokens=4) == expected


@pytest.mark.parametrize("kind", ["pickled", "compiled", "compiled in place", "offloaded", "on disk"])
def test_a_memory_knows_its_model_however_it_is_held(kind: str, fitted: TextMemory, tokenizer: Any, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = copy.deepcopy(fitted.decoder.model)
    if kind == "pickled":
        torch.save(fitted.decoder.model, tmp_path / "model.pt")
        model = torch.load(tmp_path / "model.pt", weights_only=False)
    elif kind == "compiled":
        model = torch.compile(model, backend="eager")
    elif kind == "compiled in place":
        model.compile(backend="eager")
    elif kind == "offloaded":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, str(tmp_path / "weights"), execution_device="cpu")
    memory = TextMemory(model, tokenizer, fitted.folder, window=100, overlap=28)
    assert memory.generate(PROMPT, max_new_tokens=4) == fitted.generate(PROMPT, max_new_tokens=4)
    torch.testing.assert_close(memory.score(PROMPT), fitted.score(PROMPT))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_an_int8_model_has_a_memory(model: Any, tokenizer: Any, texts: Path, tmp_path: Path) -> None:
    kinds = {torch.nn.Linear}
    int8 = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), kinds, dtype=torch.qint8)
    memory = TextMemory(int8, tokenizer, tmp_path / "memory", knn=False)
    memory.add(texts / "stored")
    assert memory.count("    def") > 0
    with pytest.raises(UserError, match="another model"):
        TextMemory(model, tokenizer, memory.folder, knn=False)


def test_a_model_that_sees_what_follows_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    """One that fills gaps, and an encoder with a decoder."""
    import transformers

    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, intermediate_size=48)).eval()
    t5 = transformers.T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    for model in (bert, transformers.T5ForConditionalGeneration(t5).eval()):
        with pytest.raises(UserError, match="pass a causal language model"):
            TextMemory(model, tokenizer, tmp_path / "memory")
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_type_changes_nothing(dtype: torch.dtype, fitted: TextMemory, texts: Path, tmp_path: Path) -> None:
    expected = fitted.score(PROMPT), fitted.generate(PROMPT, max_new_tokens=3)
    other = TextMemory(fitted.decoder.model, fitted.decoder.tokenizer, tmp_path / "memory", knn=False)
    torch.set_default_dtype(dtype)
    try:
        torch.testing.assert_close(fitted.score(PROMPT), expected[0])
        assert fitted.generate(PROMPT, max_new_tokens=3) == expected[1]
        other.add(texts / "stored")
        with torch.inference_mode():  # in which notebooks run whole cells
            assert other.fit(texts / "held_out").perplexity["all"] > 1
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_setting_of_the_process_changes(fitted: TextMemory) -> None:
    """Random numbers, threads, types and warnings are the user's."""
    import warnings

    import numpy as np

    def state() -> dict[str, Any]:
        numbers = torch.get_rng_state().tolist(), str(np.random.get_state())  # the type checker draws from ``random``
        kinds = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled()
        return {
            "random": hash(str(numbers)),
            "kinds": kinds,
            "threads": torch.get_num_threads(),
            "warnings": [*warnings.filters],
        }

    before = state()
    fitted.generate(PROMPT, max_new_tokens=3)
    fitted.score(PROMPT)
    fitted.count("def")
    assert state() == before
