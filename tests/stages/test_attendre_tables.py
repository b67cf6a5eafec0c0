"""Attendre's tables of conf/rows/attendre.yaml, on files of TriviaQA's form and small untrained models."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from tests.conftest import Tiny, composed
from tests.data.questions.test_questions import write_triviaqa
from trime.config.rows import all_rows
from trime.errors import UserError
from trime.kv.answering import AnswerSession, greedy
from trime.lab.runner import run
from trime.models.pretrained.tokenizer import encode_prompt, load_tokenizer
from trime.stages import answer
from trime.stages.graph import Graph

pytest.importorskip("transformers", reason="transformers is not installed")
TABLES = sorted(row.name for row in all_rows() if row.group == "attendre")
ENCODES = ("table4", "table5", "table5_waiting", "outputs")
SENTENCE = "Nobody knows who built the tower of {0}, but the {1} of {0} says it was {1} himself. "


def text(number: int, kind: str) -> str:
    return SENTENCE.format(number, kind) * 4


@pytest.fixture(scope="session")
def triviaqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_triviaqa(tmp_path_factory.mktemp("triviaqa"), 3, text)


@pytest.fixture(scope="session")
def model(tiny: Tiny) -> Callable[[str], Path]:
    """The folder of a small untrained model: decoder or encdec."""

    @cache
    def initialized(kind: str) -> Path:
        config = tiny("stages=[init_small]", f"small.model.kind={kind}", "small.vocabulary=400")
        run(config)
        return Graph(config).artefacts_of("init_small")[0].path()

    return initialized


@pytest.fixture
def table(session_folder: Path, triviaqa: Path, model: Callable[[str], Path], tmp_path: Path) -> Tiny:
    """Compose an experiment with only the paths of text, model and results changed."""

    def make(name: str, *overrides: str) -> DictConfig:
        kind = "encdec" if name in ENCODES else "decoder"
        places = [f"paths.outputs={tmp_path}", f"questions.path={triviaqa}", f"model.name={model(kind)}"]
        return composed(f"experiment=attendre/{name}", *places, *overrides)

    return make


def last_job(name: str) -> list[str]:
    """Return the last job of an experiment's sweep."""
    params = composed(f"experiment=attendre/{name}", return_hydra=True).hydra.sweeper.params
    parser = OverridesParser.create()
    asked = {key: parser.parse_override(f"{key}={value}") for key, value in params.items()}
    return [
        f"{key}={[*override.sweep_string_iterator()][-1] if override.is_sweep_override() else params[key]}"
        for key, override in asked.items()
    ]


TEMPLATE = "Question: Who is {0}?\n\n Context: {1}\n\n{2}\n\n Answer:"  # Attendre section 4


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_table_runs_from_the_official_files(name: str, table: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last job, end to end: validation questions, the paper's template, and answers."""
    longest: list[int] = []

    def record_length(steps: AnswerSession, stop: int, limit: int) -> list[list[int]]:
        longest.append(limit)
        return greedy(steps, stop, 2)  # an untrained model would not stop before 32

    monkeypatch.setattr(answer, "greedy", record_length)
    config = table(name, *last_job(name))
    run(config)
    graph = Graph(config)
    (results,) = Path(config.paths.outputs).glob(f"runs/attendre_{name}/*/results.json")
    content = json.loads(results.read_text())
    row = content["metrics"]["valid"][0]
    assert row["questions"] == 3 and row["chunk"] == 128 and config.questions.count == 1000 and set(longest) == {32}
    assert row["top_k"] == (None if name in ("table2", "table4") else 128)
    lines = [json.loads(line) for line in (graph.answer.path() / "answers.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(config.model.name)
    for line in lines:
        tower = line["name"].removeprefix("q")
        prompt = TEMPLATE.format(tower, text(int(tower), "wikipedia"), text(int(tower), "web"))
        tokens = len(encode_prompt(tokenizer, prompt))
        assert tokens > 256 and line["tokens"] == min(tokens, config.answering.max_prompt_tokens or tokens)
    assert {line["name"] for line in lines} == {"q0", "q1", "q2"}


def test_the_test_questions_are_refused_before_anything_is_read(table: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"answering\.split=test.*have no answers: set answering\.split=valid"):
        run(table("table3", "answering.split=test"))
    assert not (tmp_path / "artefacts").exists()
