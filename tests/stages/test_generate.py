"""Generation: probabilities equal those of evaluation and split into parts that sum to them; sampling obeys its settings."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import Tiny
from tests.helpers.runs import SharedRun
from trime.decoding.attribution import Entries, grid_attribution
from trime.decoding.explanation import extend_shown
from trime.decoding.generation import TokenSampler
from trime.lab.runner import run
from trime.scoring.mixture_spec import Interpolation, MixtureSpec
from trime.stages.graph import Graph
from trime.stages.samples import Writer

SHORT = ["tune.interpolation_share=[0.3]", "tune.temperature=[1.5]", "tune.interpolation_temperature=[1.0]"]
SHORT += ["evaluate.tokens=120", "evaluate.sample=starts"]  # a writer reads a text from its start
KINDS = [
    "trime_ext tune.memory_size=[24]",
    "trime_long tune.memory_size=[24]",
    "trime mixture=joint evaluate.memories=[local,ngram]",  # counts have no temperature, in any row
    "cache mixture=calibrated evaluate.memories=[local,ngram_document]",
    "knn_lm_cache mixture.kind=none similarity=l2",
    "memorizing mixture.kind=none",
]
MORE = [
    "trime_long tune.memory_size=[24] eviction=lra_sum",
    "trime_xl evaluate.memories=[local,ngram,ngram_document]",
    "knn_lm mixture.model.history=[] evaluate.memories=[external,ngram_document]",
    "cache mixture=interpolated evaluate.memories=[local,ngram_document]",
    "trime_long tune.memory_size=[24] model.gate=true mixture.kind=none",
    "trime_ext similarity=cosine mixture.kind=none",
    "trime_ext long.across_documents=true evaluate.scaled_interpolation=false mixture.kind=none",
    "trime_ext mixture.kind=none",
    "vanilla mixture.kind=none",
]


@pytest.mark.parametrize("options", [*KINDS, *(pytest.param(options, marks=pytest.mark.slow) for options in MORE)])
def test_probabilities_are_those_of_evaluation(options: str, tiny: Tiny) -> None:
    """Token by token, each document of the test split is scored as a text of its own."""
    config = tiny(*f"experiment={options}".split(), *SHORT)
    if config.long.across_documents:
        config.evaluate.tokens = 100
    run(config)
    graph = Graph(config)
    scored = graph.evaluate.rows()[-1]["documents"]
    text = graph.corpus.corpus().split("test")
    for number, (loss, count) in enumerate(scored[: 1 if config.long.across_documents else 2]):
        writer, total = Writer(graph), 0.0
        for token in text.tokens[text.offsets[number] :][:count].tolist():
            parts, _ = writer.continuation.next()
            assert parts.probability.sum() == pytest.approx(1, abs=1e-5) and bool((parts.probability >= 0).all())
            total -= math.log(float(parts.probability[token]))
            writer.continuation.read([token])
        assert total == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("memories", ["local,long", pytest.param("local,ngram_document", marks=pytest.mark.slow)])
def test_a_text_read_at_once_is_read_as_token_by_token(memories: str, tiny: Tiny) -> None:
    """A history that decays ignores windows that are long past."""
    config = tiny("experiment=trime_long", *SHORT, "mixture.model.history=[0.0]", f"evaluate.memories=[{memories}]")
    config.tune.memory_size = [24]
    run(config)
    graph = Graph(config)
    tokens = graph.corpus.corpus().split("test").tokens[: 5 * config.evaluate.block + 3].tolist()
    whole, single = Writer(graph).continuation, Writer(graph).continuation
    assert whole.history_decays
    whole.read(tokens)
    for token in tokens:
        single.next()
        single.read([token])
    torch.testing.assert_close(whole.next()[0].probability, single.next()[0].probability, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "experiment, overrides",
    [
        ("memorizing", ["model.backbone.memory.per_head=true", "eviction=lra_sum"]),
        pytest.param("trime_xl", [], marks=pytest.mark.slow),
    ],
)
def test_attention_of_layers_is_explained(experiment: str, overrides: list[str], tiny: Tiny) -> None:
    """Memorizing: the shares of all entries sum to the gate's mean. Transformer-XL without a query: every place the same."""
    config = tiny(f"experiment={experiment}", *SHORT, "mixture=none", "explain=true", *overrides)
    run(config)
    writer = Writer(Graph(config))
    attentions, words = writer.continuation.network.backbone.attentions, "import os\nos.path.join(name)\n" * 40
    if experiment == "trime_xl":
        for attention in attentions:
            for part in (*attention.q_proj.parameters(), attention.content_bias, attention.position_bias):
                torch.nn.init.zeros_(part)
    read = len(writer.read(words))
    writer.continuation.next()
    attention_trace = writer.continuation.network.attention_trace()
    assert attention_trace is not None
    if experiment == "memorizing":
        gates = [attention.memory.bias.sigmoid().mean() for attention in attentions if attention.memory]
        torch.testing.assert_close(attention_trace.share.sum(), torch.stack(gates).mean(), rtol=1e-5, atol=0)
    else:
        inside, cached = 1 + read - writer.continuation.first, int((attention_trace.position[0] >= 0).sum()) // len(attentions)
        each = attention_trace.share[attention_trace.position >= 0]
        torch.testing.assert_close(each, torch.full_like(each, 1 / (inside + cached) / len(attentions)), rtol=1e-5, atol=0)
    token = next(writer.write())
    shown = [entry for entry in token.entries if entry["memory"] == "attention"]
    assert len(shown) == config.generate.entries and all(0 < entry["share"] <= 1 and entry["text"] for entry in shown)
    places = [int(entry["place"].split()[1].replace(",", "")) for entry in shown]
    assert all(place < writer.continuation.first for place in places) and len(set(places)) == len(places)


def test_parts_follow_the_equations() -> None:
    """Eq. 6 with τ, then Eq. 9 with τ' and λ, from the text; an empty memory changes nothing."""
    torch.manual_seed(0)
    vocabulary = torch.randn(5).double()
    entries = {
        "local": Entries(torch.randn(4), torch.tensor([1, 1, 3, 0]), torch.arange(4)),
        "external": Entries(torch.randn(3), torch.tensor([2, 1, 1]), torch.arange(3)),
        "long": Entries(torch.zeros(0), torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)),
    }
    grid = {"temperature": 0.7, "interpolation_temperature": 0.3, "lambda": 0.25}
    layer = {name: Interpolation((name,), (1.0,), (0.5,)) for name in ("external", "long")}
    specification = MixtureSpec(("local", "long"), (layer["external"],)).with_settings(grid | {"memory_size": 4})
    result = grid_attribution(specification, vocabulary, entries, 16, True)
    divisors = {"local": 4 * 0.7, "external": 4 * 0.3}
    inside = [(entries[name].similarity / divisor).double().exp() for name, divisor in divisors.items()]
    total = vocabulary.exp().sum() + inside[0].sum()
    for token in range(5):
        local = inside[0][entries["local"].token == token].sum() / total
        external = inside[1][entries["external"].token == token].sum() / inside[1].sum()
        expected = {"vocabulary": 0.75 * vocabulary[token].exp() / total, "local": 0.75 * local, "external": 0.25 * external}
        for name, share in expected.items():
            torch.testing.assert_close(result.parts[name][token], share, rtol=1e-6, atol=1e-9)
    assert result.probability.sum() == pytest.approx(1) and not result.parts["long"].any()
    empty = MixtureSpec((), (layer["long"],)).with_settings(grid | {"memory_size": 4})
    alone = grid_attribution(empty, vocabulary, entries, 16, True)
    torch.testing.assert_close(alone.probability, vocabulary.softmax(0))


def test_choices() -> None:
    probability, generator = torch.tensor([0.1, 0.5, 0.25, 0.15]).double(), torch.Generator().manual_seed(0)
    assert TokenSampler(0)(probability, generator) == 1
    drawn = torch.tensor([TokenSampler(1.0, 0.7)(probability, generator) for _ in range(4000)])
    assert set(drawn.tolist()) == {1, 2} and (drawn == 1).double().mean() == pytest.approx(2 / 3, abs=0.03)
    sharp = torch.tensor([TokenSampler(0.5)(probability, generator) for _ in range(4000)])
    assert (sharp == 1).double().mean() == pytest.approx(0.25 / 0.345, abs=0.03)
    assert {TokenSampler(1.0, 1e-9)(probability, generator) for _ in range(50)} == {1}
    assert TokenSampler(0, 1.0, (1,))(probability, generator) == 2
    assert {TokenSampler(1.0, 1.0, (1, 2))(probability, generator) for _ in range(200)} == {0, 3}


def test_a_prompt_is_continued_and_explained(
    language: SharedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied, prompt = language.copy(tmp_path / "outputs"), tmp_path / "prompt.txt"
    prompt.write_text("import os\ndef close(self):\n    if self.closed:\n        return")
    config = copied.config
    config.stages, config.prompt_file, config.explain, config.generate.max_new_tokens = ["generate"], str(prompt), True, 6
    run(config)
    (first,) = copied.folder.glob("generated-*.json")
    found = json.loads(first.read_text())
    assert len(found["tokens"]) == 6 and found["prompt"] == prompt.read_text()
    assert "prompt of 17 tokens" in capsys.readouterr().out
    for token in found["tokens"]:
        assert sum(token["parts"].values()) == pytest.approx(token["probability"], abs=1e-6)
        largest = max({*token["parts"]} - {"vocabulary"}, key=token["parts"].__getitem__)
        order = [(entry["memory"] != largest, -entry["share"]) for entry in token["entries"]]
        assert order == sorted(order) and sum(entry["share"] for entry in token["entries"]) <= token["probability"] + 1e-6
        for entry in token["entries"]:
            assert entry["text"].endswith(token["text"].strip()) and entry["share"] <= token["parts"][entry["memory"]] + 1e-6
    sources = [entry for token in found["tokens"] for entry in token["entries"] if ".py, line" in entry["place"]]
    assert sources
    for entry in sources:
        file, line = re.fullmatch(r"(.*), line ([\d,]+)", entry["place"]).groups()  # type: ignore[union-attr]
        lines = Path(copied.graph.corpus.dataset.location, file).read_text().splitlines()
        assert entry["text"].split()[-1] in lines[int(line.replace(",", "")) - 1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.read_bytes())))
    config.prompt_file, config.explain = None, False
    run(config)
    (second,) = set(copied.folder.glob("generated-*.json")) - {first}
    assert json.loads(second.read_text())["text"] == found["text"], "the same seed draws the same"


def test_what_is_shown_grows_into_the_text() -> None:
    """White space and half a character wait; where a mark moves close to its word, nothing is shown twice."""
    shown, printed = "", ""
    for text in ("the ", "the dog ", "the dog. ", "the dog. caf\N{REPLACEMENT CHARACTER}", "the dog. café"):
        fresh, shown = extend_shown(shown, text)
        printed += fresh
    assert printed == "the dog. café"
