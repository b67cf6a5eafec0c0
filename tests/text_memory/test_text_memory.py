"""A memory of one's own texts: in ``generate`` it gives the distribution that is evaluated, and it says where it is from."""

from __future__ import annotations

import copy
import errno
import gc
import html
import json
import math
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Barrier
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import trime
from tests.conftest import ROOT
from tests.helpers.decoders import FAMILIES, model_of, sentencepiece_of, take_weights, text_of, tokenizer_of, write_texts
from tests.helpers.endpoint import serving
from trime.common.io import checksum_of, write_json
from trime.common.pretrained import identity_of_model
from trime.errors import UserError
from trime.text_memory import index
from trime.text_memory.memory import TextMemory
from trime.text_memory.segment import DESCRIPTION, TEXTS
from trime.text_memory.served import ServedMemory


def step(memory: TextMemory, model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return the log-probabilities of the token after rows of tokens, as a step of ``generate`` computes them."""
    with torch.no_grad():
        scores = model(input_ids=ids, **inputs).logits[:, -1]
        return memory.processor()(ids, scores).log_softmax(-1)


@pytest.mark.parametrize("kind, tied", [*((kind, False) for kind in FAMILIES), ("Llama", True), ("Gemma2", True)])
def test_generate_has_the_evaluated_distribution(
    kind: str, tied: bool, fitted: TextMemory, texts: Path, tmp_path: Path
) -> None:
    """For every family of decoders, with the output layer its own or the embedding's; it is a distribution."""
    tokenizer = tokenizer_of(tmp_path, begins=kind in ("Llama", "Gemma2", "Gemma3Text"))
    model = model_of(kind, len(tokenizer), **({"tie_word_embeddings": True} if tied else {}))
    memory = TextMemory(model, tokenizer, tmp_path / "memory", window=400, overlap=100)
    memory.add([texts / "stored"])
    take_weights(memory, fitted)
    worth = memory.evaluate([texts / "test"])
    assert worth.perplexity["all"] < worth.perplexity["model"] / 4
    text = (texts / "test" / "20.py").read_text()[:200]
    scored, ids = memory.score(text), torch.from_numpy(memory.decoder.encode(text))
    for number in (1, 7, 40):
        row = step(memory, model, ids[None, :number])
        assert row.exp().sum() == pytest.approx(1, abs=1e-4)
        assert float(row[0, ids[number]]) == pytest.approx(float(scored[number - 1]), abs=1e-4)


@pytest.mark.parametrize("kind", ["peft", "bfloat16", "float16"])
def test_adapted_and_half_precision_models(kind: str, fitted: TextMemory, tokenizer: Any, texts: Path, tmp_path: Path) -> None:
    """They generate the evaluated distribution too, up to the rounding of their contexts."""
    model = model_of("Llama", len(tokenizer))
    if kind == "peft":
        peft = pytest.importorskip("peft", reason="the extra lora")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    else:
        model = model.to(getattr(torch, kind))
    memory = TextMemory(model, tokenizer, tmp_path / "memory", window=400, overlap=100)
    memory.add(texts / "stored")
    take_weights(memory, fitted)
    text = (texts / "test" / "20.py").read_text()[:200]
    scored, ids = memory.score(text).exp(), torch.from_numpy(memory.decoder.encode(text))
    for number in (7, 40):
        probability = float(step(memory, model, ids[None, :number])[0, ids[number]].exp())
        assert probability == pytest.approx(float(scored[number - 1]), abs=1e-4 if kind == "peft" else 0.02)
    inputs = {"input_ids": ids[None, :20], "attention_mask": torch.ones(1, 20, dtype=torch.long)}
    output = model.generate(**inputs, logits_processor=[memory.processor()], max_new_tokens=4, do_sample=False)
    assert output.shape[1] > 20


def test_rows_of_a_batch_do_not_depend_on_each_other(fitted: TextMemory, model: Any) -> None:
    """Rows of different length, padded on the left, are what each is by itself."""
    rows = [torch.from_numpy(fitted.decoder.encode(text_of(20)))[:length] for length in (9, 30, 21)]
    ids, mask = torch.zeros(2, 3, 30, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, 30 - len(row) :], mask[number, 30 - len(row) :] = row, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = step(fitted, model, ids, attention_mask=mask, position_ids=positions)
    for number, row in enumerate(rows):
        torch.testing.assert_close(together[number].exp(), step(fitted, model, row[None])[0].exp(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_generate_takes_the_processor(settings: dict[str, Any], fitted: TextMemory, model: Any, tokenizer: Any) -> None:
    """Greedily, with beams and by sampling; what is written is what the memory holds, for the model is random."""
    inputs = tokenizer(["    def lock_queue(self, ", "    def"], return_tensors="pt", padding=True, padding_side="left")
    inputs.pop("token_type_ids", None)
    output = model.generate(**inputs, logits_processor=[fitted.processor()], max_new_tokens=12, **settings)
    with fitted.attach(model):
        attached = model.generate(**inputs, max_new_tokens=12, **settings)
    assert "generate" not in vars(model)
    if "do_sample" not in settings:
        assert torch.equal(output, attached)
        assert "self" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]) + tokenizer.decode(output[1])


def test_excluded_tokens_stay_excluded(fitted: TextMemory, model: Any) -> None:
    ids = torch.from_numpy(fitted.decoder.encode("    def"))[None]
    best = int(step(fitted, model, ids).argmax())
    with torch.no_grad():
        scores = model(ids).logits[:, -1]
    scores[0, best] = -math.inf
    assert fitted.processor()(ids, scores)[0, best] == -math.inf


def test_explanations_add_up_and_name_places(fitted: TextMemory, texts: Path) -> None:
    """Parts sum to the scored probability; a source is a line of a stored file, on which the token follows."""
    text = (texts / "test" / "20.py").read_text()[:300]
    ids = fitted.decoder.encode(text)
    (row,) = fitted.explain(torch.from_numpy(ids))
    scored = fitted.score(text).exp()
    assert [token.token for token in row] == ids[1:].tolist()
    for token, probability in zip(row, scored.tolist(), strict=True):
        assert sum(token.parts.values()) == pytest.approx(token.probability) == pytest.approx(probability, rel=1e-3, abs=1e-6)
    sources = [(token, source) for token in row for source in token.sources]
    assert len({memory for _, (memory, _, _) in sources}) == 2
    for token, (_, place, around) in sources:
        assert token.text.strip() in Path(place.name).read_text().split("\n")[place.line - 1] and token.text in around


def test_a_page_shows_every_token_with_its_sources(fitted: TextMemory, texts: Path, tmp_path: Path) -> None:
    """Text that looks like HTML is text."""
    ids = fitted.decoder.encode("    def <b>lock</b>_queue(self, lock):\n        return self.")
    page = fitted.explain_page(tmp_path / "page.html", torch.from_numpy(ids), first=4, title="A & B").read_text()
    shown = re.search(r"<pre>(.*?)</pre>", page, re.S)
    assert shown and html.unescape(re.sub(r"<[^>]*>", "", shown[1])) == fitted.decoder.tokenizer.decode(ids)
    assert page.count('role="button"') == page.count("<template") == len(ids) - 4
    assert "<title>A &amp; B</title>" in page and "<b>lock" not in page and str(texts / "stored") in page


def test_a_removed_document_leaves_no_trace(
    fitted: TextMemory, model: Any, tokenizer: Any, texts: Path, tmp_path: Path
) -> None:
    """A memory to which a text was added and from which it was removed answers as one that never had it."""
    secret = tmp_path / "secret.py"
    secret.write_text(text_of(99).replace("return", "xylophone"))
    memories = []
    for name in ("with", "without"):
        memory = TextMemory(model, tokenizer, tmp_path / name, window=100, overlap=0)
        memory.add(texts / "stored")
        if name == "with":
            memory.add(secret)
            assert memory.count("xylophone") == 60
            assert memory.remove(str(secret)) == 1
        take_weights(memory, fitted)
        memories.append(memory)
    text = text_of(99).replace("return", "xylophone")
    assert torch.equal(memories[0].score(text), memories[1].score(text))
    assert memories[0].count("xylophone") == 0 and memories[0].names == memories[1].names
    files = [file for file in (tmp_path / "with").rglob("*") if file.is_file()]
    assert not any(b"secret.py" in file.read_bytes() for file in files)
    with pytest.raises(UserError, match="holds no document"):
        memories[0].remove(str(secret))


def test_a_memory_that_was_deleted_is_told(model: Any, tokenizer: Any, texts: Path, tmp_path: Path) -> None:
    memory = TextMemory(model, tokenizer, tmp_path / "memory", knn=False)
    memory.add(texts / "stored")
    shutil.rmtree(tmp_path / "memory")
    with pytest.raises(UserError, match="no text memory any more"):
        memory.count("    def")


def test_readers_see_what_took_the_place_of_another(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """A segment's name is never given again; other folders in the memory's are left alone."""
    writer, reader = (TextMemory(model, tokenizer, tmp_path / "memory", knn=False) for _ in range(2))
    (tmp_path / "memory" / "mine").mkdir()
    for word in ("lock", "queue", "timer"):
        (tmp_path / f"{word}.txt").write_text(f"    def {word}(self)")
        writer.add(tmp_path / f"{word}.txt")
        assert reader.next("    def") == {f" {word}": 1}
        writer.remove(tmp_path / f"{word}.txt")
    assert (tmp_path / "memory" / "mine").is_dir()


def test_documents_one_at_a_time_are_those_at_once(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Forty documents leave few segments, and the same answers; unchanged ones are not read again."""
    for seed in range(40):
        (tmp_path / f"{seed}.py").write_text(text_of(seed, lines=3))
    memories = [TextMemory(model, tokenizer, tmp_path / f"memory{n}", knn=False) for n in range(2)]
    for seed in range(40):
        assert memories[0].add(tmp_path / f"{seed}.py") == 1
    assert memories[1].add([tmp_path / f"{seed}.py" for seed in range(40)]) == 40
    assert memories[0].add([tmp_path / f"{seed}.py" for seed in range(40)]) == 0
    assert len(memories[0].store.segments()) < 12
    for text in ("    def", " return", " return self", "(self,"):
        assert memories[0].count(text) == memories[1].count(text) > 0
        assert memories[0].next(text) == memories[1].next(text)
    (tmp_path / "7.py").write_text("changed")
    assert memories[0].add(tmp_path / "7.py") == 1
    assert memories[0].count("changed") == 1 and len(memories[0].names) == 40


def test_counts_are_those_of_the_text(fitted: TextMemory, texts: Path) -> None:
    """``count`` as ``str.count``, wherever the tokenizer cuts; ``next`` and ``find`` say what follows and where it stands."""
    stored = [file.read_text() for file in sorted((texts / "stored").iterdir())]
    for text in ("    def", " return self", "(self,", "elf", "\n    def lo", "):\n        return", "k_", "nowhere"):
        expected = sum(each.count(text) for each in stored)
        followed = sum(len(rest) > 0 for each in stored for rest in each.split(text)[1:])
        assert fitted.count(text) == expected and sum(fitted.next(text).values()) == followed
        assert all(f"{text}{begins}" in "".join(stored) for begins in fitted.next(text))
        found = fitted.find(text, 3)
        assert len(found) == min(3, expected)
        for source, around in found:
            lines = Path(source.name).read_text().split("\n")
            assert text in around and text.strip().split("\n")[0] in lines[source.line - 1]
    assert len(fitted.find("self", 1000)) == fitted.count("self") > 1000 // 4


def test_a_prompt_may_end_within_a_token(fitted: TextMemory) -> None:
    """The continuation is that of a prompt which ends at a border, for what the memory holds at either."""
    whole = fitted.generate("    def lock_lock(self, lock):\n        return", max_new_tokens=6)
    within = fitted.generate("    def lock_lock(self, lock):\n        retu", max_new_tokens=7)
    assert within.startswith("rn") and within[2:6] == whole[:4]
    indented = fitted.generate("    def lock_lock(self, lock):\n        ", max_new_tokens=4)
    assert not indented[0].isspace(), "an indentation is no part of a deeper one"
    several = fitted.generate(["    de", "    def lock_lock(self, lock):\n        retu"], max_new_tokens=7)
    assert several[0].startswith("f ") and several[1] == within


def test_a_tokenizer_that_puts_a_space_before_texts(fitted: TextMemory, texts: Path, tmp_path: Path) -> None:
    """Prompts are continued, texts found within lines, and tokens shown with the space that they begin with."""
    tokenizer = sentencepiece_of()
    memory = TextMemory(model_of("Llama", len(tokenizer)), tokenizer, tmp_path / "memory", window=400, overlap=100)
    memory.add(texts / "stored")
    take_weights(memory, fitted)
    for end in ("    def", "    de", "    def lock_lock(self, lock):\n        retu"):
        written = end + memory.generate(end, max_new_tokens=8)
        assert re.search(r"    def \w+_\w+\(self|        return self\.", written), written
    assert memory.generate("é 価", max_new_tokens=2) is not None
    assert memory.count("        return") == memory.count("return") == 240
    assert all(" self." in text for text in memory.next("        return"))
    ids = memory.decoder.encode("    def lock_queue(self, lock):\n        return")
    shown = "".join(token.text for token in memory.explain(ids)[0])
    assert shown == "    def lock_queue(self, lock):\n        return"[len(memory.decoder.text_of(ids[:1].tolist())) - 1 :]


def test_the_page_runs_as_printed(
    model: Any, tokenizer: Any, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python of docs/decoder-memory.md, block after block."""
    model.save_pretrained(tmp_path / "decoder")
    chatting = copy.deepcopy(tokenizer)
    chatting.chat_template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    chatting.save_pretrained(tmp_path / "decoder")
    names = {"DECODER": tmp_path / "decoder", "STORED": texts / "stored", "HELD_OUT": texts / "held_out"}
    page = (ROOT / "docs" / "decoder-memory.md").read_text()
    monkeypatch.chdir(tmp_path)
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    for block in blocks:
        if "OpenAI" not in block:
            exec(block, names)
    shown = capsys.readouterr().out
    assert "model alone" in shown and "0.py" in shown and " self" in shown
    assert len(names["memory"].names) == 3  # type: ignore[attr-defined]
    with serving(ServedMemory(names["memory"])) as address:  # what is asked of the endpoint
        (asked,) = [block for block in blocks if "OpenAI" in block]
        exec(asked.replace("http://127.0.0.1:8000", address), names)
    assert "def " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["queries", "keys"])
def test_contexts_that_overflow_are_told(kind: str, fitted: TextMemory, tokenizer: Any, texts: Path, tmp_path: Path) -> None:
    model = model_of("Llama", len(tokenizer))
    memory = TextMemory(model, tokenizer, tmp_path / "memory")
    if kind == "queries":
        memory.add(texts / "stored")
        take_weights(memory, fitted)
    model.model.norm.weight.data.fill_(math.inf)
    with pytest.raises(UserError, match="NaN or infinity"):
        if kind == "queries":
            step(memory, model, torch.tensor([[5, 6]]))
        else:
            memory.add(texts / "stored")


def test_names_are_places(model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file has one name whatever it is called by; an emptied one is gone; the memory's own folder is no text."""
    for project in ("one", "two"):
        (tmp_path / project).mkdir()
        (tmp_path / project / "read.me").write_text(f"    def {project}(self)")
    memory = TextMemory(model, tokenizer, tmp_path / "one" / "memory", knn=False)
    monkeypatch.chdir(tmp_path / "one")
    assert [memory.add(path) for path in (".", "read.me", [Path("../one/read.me").absolute().resolve()] * 2)] == [1, 0, 0]
    monkeypatch.chdir(tmp_path / "two")
    assert memory.add(["read.me", "read.me"]) == 1
    assert memory.names == [str(tmp_path / project / "read.me") for project in ("one", "two")] and memory.count("    def") == 2
    (tmp_path / "two" / "read.me").write_text("")
    assert memory.add("read.me") == 1 and memory.count("    def") == 1
    for wrong in ("", "nothing", "read"):
        with pytest.raises(UserError, match="holds no document"):
            memory.remove(wrong)
    assert memory.remove(Path("../one/read.me").resolve()) == 1 and memory.names == []


def test_a_token_long_text_scales_nothing(fitted: TextMemory, model: Any, tokenizer: Any, texts: Path, tmp_path: Path) -> None:
    """The scale of contexts does not depend on what is added first, so that the order of adding changes nothing."""
    (tmp_path / "tiny.txt").write_text("ab")
    scores = []
    for name, order in (("one", ["tiny", "stored"]), ("two", ["stored", "tiny"])):
        memory = TextMemory(model, tokenizer, tmp_path / name, window=100, overlap=28)
        for part in order:
            memory.add(tmp_path / "tiny.txt" if part == "tiny" else texts / "stored")
        take_weights(memory, fitted)
        scores.append(memory.score(text_of(20)))
    torch.testing.assert_close(*scores, atol=1e-3, rtol=1e-3)


def test_a_step_of_another_model_is_refused(fitted: TextMemory, model: Any, tokenizer: Any) -> None:
    """Even after the memory's own model has read something: each context serves one step."""
    other, ids = model_of("Llama", len(tokenizer)), torch.from_numpy(fitted.decoder.encode("    def"))[None]
    with torch.no_grad():
        model(ids)
    with pytest.raises(UserError, match="own model must generate"):
        other.generate(ids, logits_processor=[fitted.processor()], max_new_tokens=3, pad_token_id=0)
    with fitted.attach(model), fitted.attach(model):
        pass
    assert "generate" not in vars(model)


def test_prompts_of_any_end(fitted: TextMemory) -> None:
    """A character of several tokens at the end is not begun again; with few tokens nothing half is written."""
    for prompt in ("    def naïve", "    価格は", "x 🎉", "    def "):
        assert isinstance(fitted.generate(prompt, max_new_tokens=4), str)
    assert "    def lock_queue(self" + fitted.generate("    def lock_queue(self", max_new_tokens=2) in (
        "    def lock_queue(self, lock", "    def lock_queue(self,", "    def lock_queue(self, "
    ) or fitted.generate("    def lock_queue(self", max_new_tokens=2).startswith(",")  # fmt: skip


def test_rows_are_explained_from_what_was_written(fitted: TextMemory, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Of rows padded on either side, each token that was written and no padding."""
    inputs = tokenizer(["    def lock_queue(self, ", "    def"], return_tensors="pt", padding=True, padding_side="left")
    inputs.pop("token_type_ids", None)
    with fitted.attach(model):
        output = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert [len(row) for row in fitted.explain(output, first=inputs["input_ids"].shape[1])] == [5, 5]
    page = fitted.explain_page(tmp_path / "page.html", output.flip(0), first=inputs["input_ids"].shape[1]).read_text()
    assert page.count('role="button"') == 5  # of the shorter row
    padded = torch.cat([output, torch.zeros(2, 3, dtype=torch.long)], 1)
    assert [len(row) for row in fitted.explain(padded, first=inputs["input_ids"].shape[1])] == [5, 5]


def test_long_texts_fit_into_few_positions(tokenizer: Any, texts: Path, tmp_path: Path) -> None:
    model = model_of("GPT2", len(tokenizer))
    memory = TextMemory(model, tokenizer, tmp_path / "memory")  # windows of 768 after 256 where it has 512 positions
    memory.add(texts / "stored")
    model.train()
    with pytest.raises(UserError, match="training mode"):
        memory.fit(texts / "held_out")


def test_a_memory_leaves_the_model_as_it_was(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Its hook is gone with it."""
    hooks = model.get_output_embeddings()._forward_pre_hooks
    gc.collect()
    before = len(hooks)
    memory = TextMemory(model, tokenizer, tmp_path / "memory")
    assert len(hooks) == before + 1
    del memory
    gc.collect()
    assert len(hooks) == before


def test_misuse_is_one_line(fitted: TextMemory, model: Any, tokenizer: Any, texts: Path, tmp_path: Path) -> None:
    other = model_of("Llama", len(tokenizer))
    other.model.embed_tokens.weight.data += 0.1
    empty = TextMemory(model, tokenizer, tmp_path / "empty")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("text")
    cases: list[tuple[str, Any]] = [
        ("another model", lambda: TextMemory(other, tokenizer, fitted.folder, window=100, overlap=28)),
        ("open it with trime.TextMemory", lambda: trime.load(fitted.folder)),
        ("another knn", lambda: TextMemory(model, tokenizer, fitted.folder, knn=False)),
        ("is empty", lambda: empty.fit(texts / "held_out")),
        ("not in the memory", lambda: fitted.fit(texts / "stored")),
        ("no text memory", lambda: TextMemory(model, tokenizer, tmp_path / "taken")),
        ("no text in .*nothing", lambda: fitted.fit([tmp_path / "nothing"])),
        (
            "the model's own",
            lambda: TextMemory(model_of("Llama", 9), tokenizer, tmp_path / "9", knn=False).add(texts / "stored"),
        ),
        ("no file or folder", lambda: fitted.add(tmp_path / "nowhere")),
        ("at least two", lambda: fitted.score("")),
        ("at least one", lambda: fitted.count("")),
        ("limit=-1", lambda: fitted.find("def", -1)),
        ("pass token numbers", lambda: fitted.explain("some text")),
        ("first=-3", lambda: fitted.explain([[5, 6]], -3)),
        (r"shape \[\]: pass token numbers", lambda: fitted.explain(torch.tensor(5))),
        ("has token 99999", lambda: fitted.explain([[5, 99999]])),
        ("max_new_tokens=-1", lambda: fitted.generate("def", max_new_tokens=-1)),
        ("takes no return_dict_in_generate", lambda: fitted.generate("def", return_dict_in_generate=True)),
        ("cannot make", lambda: TextMemory(model, tokenizer, tmp_path / "taken" / "file" / "memory")),
        ("training mode", lambda: TextMemory(model_of("Llama", len(tokenizer)).train(), tokenizer, tmp_path / "new")),
        ("own model", lambda: fitted.processor()(torch.tensor([[5]] * 7), torch.zeros(7, len(tokenizer)))),
    ]
    for message, call in cases:
        with pytest.raises(UserError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "file",
    [
        "memory.json",
        "text.npy",
        "suffixes.npy",
        "key.npy",
        "line.npy",
        "scale.safetensors",
        "documents.json",
        "weights.safetensors",
    ],
)
@pytest.mark.parametrize("same_size", [False, True])
def test_a_damaged_memory_is_told(
    file: str, same_size: bool, fitted: TextMemory, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    shutil.copytree(fitted.folder, tmp_path / "memory")
    path, *_ = sorted((tmp_path / "memory").rglob(file))
    half = path.stat().st_size // 2
    path.write_bytes(path.read_bytes()[:half] + bytes(path.stat().st_size - half if same_size else 0))
    with pytest.raises(UserError, match=r"damaged|missing|does not describe"):
        TextMemory(model, tokenizer, tmp_path / "memory", window=100, overlap=28).score("some text")


def test_threads_do_not_see_each_others_contexts(fitted: TextMemory, model: Any) -> None:
    """Texts of equal length, of which each is read before the contexts of the other are used."""
    parts = [fitted.decoder.text_of(fitted.decoder.encode(text_of(seed))[:90].tolist()) for seed in (20, 21)]
    expected = [fitted.score(part) for part in parts]
    both = Barrier(2, timeout=15)

    def wait(*_: Any) -> None:
        both.wait()

    hook = model.register_forward_hook(wait)
    try:
        with ThreadPoolExecutor(2) as pool:
            for scored, own in zip(pool.map(fitted.score, parts), expected, strict=True):
                torch.testing.assert_close(scored, own)
    finally:
        hook.remove()


def test_a_model_called_twice_for_a_token_is_refused(fitted: TextMemory, model: Any, tokenizer: Any) -> None:
    ids = torch.from_numpy(fitted.decoder.encode("    def lock_queue"))[None]
    settings = {"logits_processor": [fitted.processor()], "max_new_tokens": 4, "pad_token_id": 0}
    with pytest.raises(UserError, match="guidance_scale"):
        model.generate(ids, guidance_scale=1.5, **settings)
    assert model.generate(ids, **settings).shape[1] == ids.shape[1] + 4
    with fitted.attach(model), pytest.raises(UserError, match="guidance_scale"):
        model.generate(ids, guidance_scale=1.5, max_new_tokens=1, pad_token_id=0)
    with fitted.attach(model):
        for _ in range(2):
            longer = model.generate(ids, max_new_tokens=1, pad_token_id=0)
            model(longer)
    # Calls from before do not count, whatever the length of the prompt.
    model(ids), model(ids)
    settings["logits_processor"] = [fitted.processor()]
    assert model.generate(ids[:, :1], **settings).shape[1] == 5


def test_rotations_and_adapters_make_another_model(tokenizer: Any) -> None:
    """As their weights alone do not tell."""
    peft = pytest.importorskip("peft", reason="the extra lora")

    def model_with(theta: float) -> Any:
        return model_of("Llama", len(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": theta})

    assert (
        identity_of_model(model_with(1e4))
        == identity_of_model(model_with(1e4).bfloat16())
        != identity_of_model(model_with(5e5))
    )
    adapted = peft.get_peft_model(model_with(1e4), peft.LoraConfig(target_modules=["q_proj"]))
    adapted.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"]))
    one = identity_of_model(adapted)
    with adapted.disable_adapter():
        assert identity_of_model(adapted) != one
    adapted.set_adapter("other")
    assert identity_of_model(adapted) != one


def test_bits_are_of_bytes_that_are_predicted(fitted: TextMemory, tmp_path: Path) -> None:
    """No token predicts the first one of a text that none begins."""
    nats, size = 0.0, 0
    for number, word in enumerate(("zbuffer lock", "z lock queue", "über zz", "価格", " def lock_queue(z")):
        (tmp_path / f"{number}.txt").write_text(word)
        ids = fitted.decoder.encode(word)
        nats -= float(fitted.score(word).double().sum())
        first = word[:1] if word[:1] in "ü価" else fitted.decoder.text_of(ids[:1].tolist())  # these are of several tokens
        size += len(word.encode()) - len(first.encode())
    assert fitted.decoder.start == [] and fitted.evaluate(tmp_path).bits_per_byte["all"] == pytest.approx(
        nats / math.log(2) / size
    )


def test_a_file_has_one_name(model: Any, tokenizer: Any, texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By whatever way it is named; and what a memory holds is no text."""
    memory = TextMemory(model, tokenizer, tmp_path / "project" / "memory", knn=False)
    shutil.copytree(texts / "stored", tmp_path / "project" / "source")
    (tmp_path / "link").symlink_to(tmp_path / "project")
    TextMemory(model, tokenizer, tmp_path / "project" / "other", knn=False).add(texts / "test")
    count = memory.add(tmp_path / "project" / "source")
    for place in ("link", "project", "project/source/../source", "link/source"):
        assert memory.add(tmp_path / place) == 0
    assert len(memory.names) == count == memory.remove(tmp_path / "link" / "source")
    memory.add(tmp_path / "link")
    next((tmp_path / "project" / "source").iterdir()).unlink()
    memory.add(tmp_path / "project")
    assert len(memory.names) == count and "1 documents stay, whose files are gone" in caplog.text


def test_line_ends_are_read_alike(fitted: TextMemory, texts: Path) -> None:
    text = next((texts / "stored").iterdir()).read_text()
    torch.testing.assert_close(fitted.score("\ufeff" + text.replace("\n", "\r\n")), fitted.score(text))
    assert fitted.count(text.replace("\n", "\r\n")) == fitted.count(text) > 0


def test_what_stops_is_new_text(fitted: TextMemory) -> None:
    """A stop string at the end of the prompt is not written again."""
    tokenizer = fitted.decoder.tokenizer
    assert fitted.generate("    def lock_queue(self", max_new_tokens=6, stop_strings=["self"], tokenizer=tokenizer).strip()


def test_padding_may_be_of_any_number(fitted: TextMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that the model does not embed."""
    ids = fitted.decoder.encode("    def lock_queue(self)").tolist()
    (expected,) = fitted.explain([ids])
    monkeypatch.setattr(fitted.decoder, "without_padding", lambda row: row[1:])
    (padded,) = fitted.explain([[99999, *ids]])
    assert [token.text for token in padded] == [token.text for token in expected]


def test_a_full_disk_keeps_what_was_added(
    model: Any, tokenizer: Any, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told before a file is written through memory, where a full disk would end the process."""
    memory = TextMemory(model, tokenizer, tmp_path / "memory")
    first, second, *_ = sorted((texts / "stored").iterdir())
    memory.add(first)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UserError, match=r"No space left on device.*what was added stays"):
            memory.add(second)
    assert memory.names == [str(first)] and not [*memory.folder.glob("*.partial")]
    assert memory.add(second) == 1 and len(memory.names) == 2


def test_a_memory_of_an_earlier_version_is_searched_too(fitted: TextMemory, texts: Path, tmp_path: Path) -> None:
    """It has not kept its texts, but their tokens."""
    shutil.copytree(fitted.folder, tmp_path / "old")
    for folder in (tmp_path / "old").glob("0*"):
        content = json.loads((folder / DESCRIPTION).read_text())
        content.pop("checksum")
        del content["files"][TEXTS]
        (folder / TEXTS).unlink()
        write_json(folder / DESCRIPTION, content | {"checksum": checksum_of(content)})
    old = TextMemory(fitted.decoder.model, fitted.decoder.tokenizer, tmp_path / "old", window=100, overlap=28)
    assert old.count("elf.") == fitted.count("elf.") > 0 and old.find("elf.", 5) == fitted.find("elf.", 5)
    assert old.add(texts / "test") == 2 and old.count("elf.") > fitted.count("elf.")


def test_a_text_counts_once(fitted: TextMemory, texts: Path, tmp_path: Path) -> None:
    """A copy of a held-out text under another name is no more evidence."""
    shutil.copytree(texts / "test", tmp_path / "twice")
    shutil.copy(tmp_path / "twice" / "20.py", tmp_path / "twice" / "copy.py")
    assert str(fitted.evaluate(tmp_path / "twice")) == str(fitted.evaluate(texts / "test"))


def test_rows_that_left_their_file_leave_the_memory(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    memory, file = TextMemory(model, tokenizer, tmp_path / "memory", knn=False), tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": f"    def {word}(self)"}) for word in ("lock", "queue", "timer")]
    file.write_text("\n".join(rows))
    (tmp_path / "plain.txt").write_text("    def lock(self)")
    assert memory.add([file, tmp_path / "plain.txt"]) == 4
    file.write_text("\n".join(rows[1:]))
    assert memory.add(file) == 3  # two rows have another content, one is gone
    assert memory.next("    def") == {" queue": 1, " timer": 1, " lock": 1}
    file.write_text("")
    assert memory.add(file) == 2 and memory.next("    def") == {" lock": 1}


def test_parts_of_characters_are_counted_together(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    memory = TextMemory(model, tokenizer, tmp_path / "memory", knn=False)
    (tmp_path / "text.txt").write_text("価格 価値 価格 価額 " * 3)
    memory.add(tmp_path / "text.txt")
    assert sum(memory.next("価").values()) == memory.count("価") == 12


def test_a_prompt_of_a_batch_is_continued_as_alone(fitted: TextMemory) -> None:
    """Though the end of another is written again in more tokens."""
    prompts = ["    def lock_queue(self, ", "    def naive_unknownwordhere"]
    assert fitted.generate(prompts, max_new_tokens=5) == [fitted.generate(prompt, max_new_tokens=5) for prompt in prompts]


def test_a_tokenizer_that_cuts_text_otherwise_is_refused(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Whatever its vocabulary; and so is a model of another window."""
    TextMemory(model, tokenizer, tmp_path, knn=False)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    other = copy.deepcopy(tokenizer)
    state["model"]["merges"] = state["model"]["merges"][:9]
    other._tokenizer = Tokenizer.from_str(json.dumps(state))
    assert other.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(UserError, match="another tokenizer"):
        TextMemory(model, other, tmp_path, knn=False)
    small, large = (model_of("Mistral", len(tokenizer), sliding_window=window) for window in (8, 400))
    assert identity_of_model(small) != identity_of_model(large)


def test_a_link_beside_its_file_is_not_another_document(
    model: Any, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory, texts = TextMemory(model, tokenizer, tmp_path / "memory", knn=False), tmp_path / "texts"
    (file,) = write_texts(texts, range(1, 2)).iterdir()
    (texts / "a_link.py").symlink_to(file)
    assert memory.add(texts) == 1 and memory.names == [str(file)] and "1 links to files" in caplog.text
    for name in (b"M\xfcller.txt", b"M\xf6ller.txt"):
        Path(os.fsdecode(os.fsencode(texts) + b"/" + name)).write_text("text")
    with pytest.raises(UserError, match="is the name of two files"):
        memory.add(texts)


def test_files_are_stored_as_they_are_saved(model: Any, tokenizer: Any, texts: Path, tmp_path: Path) -> None:
    """Within two seconds; deleted ones go, and the memory's own folder and hidden files stay out."""
    pytest.importorskip("watchfiles")
    folder = tmp_path / "watched"
    shutil.copytree(texts / "stored", folder)
    memory, until, seen = TextMemory(model, tokenizer, folder / "memory", knn=False), threading.Event(), Queue[int]()

    def follow() -> None:
        for count in memory.watch(folder, until=until):
            seen.put(count)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    assert seen.get(timeout=60) == len(memory.names)
    before = {*memory.names}
    for change, expected in [
        (lambda: (folder / "new.py").write_text(text_of(41, 9)), before | {str(folder / "new.py")}),
        (lambda: (folder / "new.py").rename(folder / "moved.py"), before | {str(folder / "moved.py")}),
        (lambda: (folder / ".hidden.py").write_text("hidden " * 9) and (folder / "moved.py").unlink(), before),
    ]:
        began = time.monotonic()
        change()
        while {*TextMemory(model, tokenizer, folder / "memory", knn=False).names} != expected:
            assert time.monotonic() - began < 20
            time.sleep(0.05)
    until.set()
    thread.join(20)
    assert not thread.is_alive()


def test_without_faiss_all_keys_are_compared(
    model: Any, tokenizer: Any, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an index that was made with it too; where they are too many, what to install is said."""
    monkeypatch.setattr(index, "EXACT", 64)
    monkeypatch.setattr(index, "PER_CELL", 32)
    with_faiss = TextMemory(model, tokenizer, tmp_path / "with")
    with_faiss.add(texts / "stored")
    assert [*with_faiss.folder.rglob(index.INDEX)]
    monkeypatch.setattr(index, "find_spec", lambda name: None)
    without = TextMemory(model, tokenizer, tmp_path / "without")
    without.add(texts / "stored")
    assert not [*without.folder.rglob(index.INDEX)]
    again = TextMemory(model, tokenizer, tmp_path / "with")
    text = text_of(71, 8)
    torch.testing.assert_close(again.score(text), without.score(text), rtol=0, atol=0)
    monkeypatch.setattr(index, "MOST", 100)
    with pytest.raises(UserError, match="too many to compare all of them: pip install"):
        TextMemory(model, tokenizer, tmp_path / "other").add(texts / "stored")
