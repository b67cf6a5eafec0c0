"""Small models are trained, then answer over longer contexts; killed runs resume; mistakes are reported before a run."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.conftest import EVERY, Tiny
from trime.common.choices import ORDERS
from trime.common.io import plain, read_json_lines
from trime.common.metrics import share_interval
from trime.data.questions.base import Example, prompt
from trime.errors import UserError
from trime.kv.answering import greedy
from trime.lab.manifest import MANIFEST
from trime.lab.runner import run
from trime.models.pretrained.tokenizer import train_word_level
from trime.report.answers import cells_of, depth_panels, keys_of, label_runs
from trime.report.canvas import canvas
from trime.report.results import find_runs
from trime.report.run_result import AnsweringRun
from trime.stages.answer import PromptMaker, solved_examples
from trime.stages.graph import Graph
from trime.stages.train_small import spread_positions
from trime.training.answering import extend_positions

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """Settings that take seconds."""
    reading = ["model.memory_size=24", "model.chunk=16", "model.top_k=8"]
    questions = ["questions=rooms", "questions.count=12", "questions.words=100"]
    answers = ["answering.batch_size=3", "answering.max_new_tokens=3"]
    return [*questions, *reading, *answers, f"paths.outputs={tmp_path}/outputs", "train.updates=4"]


def reading_of(settings: list[str]) -> list[str]:
    """Return the settings that say nothing of questions."""
    return [word for word in settings if not word.startswith("questions")]


def test_a_small_model_is_trained_and_answers(tiny: Tiny, settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    experiment = "attendre_encdec"
    config = tiny(f"experiment={experiment}", *settings)
    run(config)
    graph = Graph(config)
    lines = [json.loads(line) for line in (graph.answer.path() / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 12 and all(line["tokens"] > 60 for line in lines), min(line["tokens"] for line in lines)
    assert len({line["name"] for line in lines}) == 12 and "exact match" in capsys.readouterr().out
    (results,) = Path(config.paths.outputs).glob(f"runs/{experiment}/*/results.json")
    assert json.loads(results.read_text())["metrics"]["test"][0]["questions"] == 12
    by_name = tiny(f"experiment={experiment}", *settings, f"model.name={graph.small_model.path()}", "eviction=fifo")  # type: ignore[union-attr]
    run(by_name)
    assert (Graph(by_name).answer.path() / "answers.jsonl").is_file() and Graph(by_name).small_model is None
    run(tiny("stages=[report]", f"report.runs={config.paths.outputs}/runs/**", f"paths.outputs={config.paths.outputs}"))
    table = (Path(config.paths.outputs) / "reports" / "latest" / "answers.md").read_text()
    assert table.count(experiment) == 2 and "fifo" in table


@pytest.mark.slow
def test_policies_are_compared_over_sizes_and_seeds_are_averaged(tiny: Tiny, settings: list[str], tmp_path: Path) -> None:
    for overrides in itertools.product(("model.memory_size=8", "model.memory_size=16"), ("eviction=fifo", "eviction=lra_sum")):
        run(tiny("experiment=attendre_encdec", *settings, "model.chunk=8", *overrides))
    run(tiny("experiment=attendre_encdec", *settings, "model.chunk=8", "model.memory_size=8", "eviction=fifo", "seed=1"))
    outputs = f"{tmp_path}/outputs"
    run(tiny("stages=[report]", f"report.runs={outputs}/runs/**", f"paths.outputs={outputs}"))
    folder = Path(outputs) / "reports" / "latest"
    header, _, *lines = (folder / "policies.md").read_text().partition("\n\n")[0].splitlines()
    assert [cell.strip() for cell in header.split("|")[1:-1]] == ["eviction", "M 8", "M 16"]
    assert {line.split("|")[1].strip() for line in lines} == {"fifo", "lra_sum c=0"}
    assert all(line.count("[") == 2 for line in lines), "each cell has an interval"
    cells = cells_of(label_runs([one for one in find_runs([str(tmp_path / "outputs")]) if isinstance(one, AnsweringRun)]))
    assert [cells["fifo"][key].questions for key in keys_of(cells)] == [12, 12], "both seeds were asked the same"


@pytest.mark.slow
def test_results_are_told_apart_by_depth(tiny: Tiny, settings: list[str], tmp_path: Path) -> None:
    """Questions of all fifths together are all questions; answers count as ``answering.counts`` says."""
    for words in (60, 90):
        passkey = ["questions=passkey", f"questions.words={words}", "answering.counts=contained"]
        run(tiny("experiment=attendre_decoder", *reading_of(settings), *passkey, "questions.count=12"))
    outputs = tmp_path / "outputs"
    runs = [run for run in find_runs([str(outputs)]) if isinstance(run, AnsweringRun)]
    for results in runs:
        row = results.row
        shares = [cell.contained * cell.questions for cell in row.by_depth]
        assert sum(cell.questions for cell in row.by_depth) == 12 and sum(shares) == pytest.approx(12 * row.contained)
        assert 0 < len(shares) <= 5 and all(0 < cell.depth < 1 for cell in row.by_depth)
    (panel,) = depth_panels(runs)
    _, (axis,) = canvas(4, 3, 1)
    panel(axis)
    lengths = [label.get_text() for label in axis.get_xticklabels()]
    assert len(lengths) == 2 and len(axis.texts) == sum(len(results.row.by_depth) for results in runs)
    run(tiny("stages=[report]", f"report.runs={outputs}/runs/**", f"paths.outputs={outputs}", pictures=True))
    report = outputs / "reports" / "latest"
    assert (report / "depth.png").is_file() and "By depth and length" in (report / "answers.html").read_text()


def test_positions_of_short_texts_are_spread() -> None:
    """Gaps stand behind sentences alone, and reach from none to all the room; answers follow their prompts."""
    draw, tokens = random.Random(0), [5, 5, 9, 5, 5, 5, 9, 5, 9]
    positions_drawn = [spread_positions(tokens, {9}, 1000, draw) for _ in range(400)]
    steps = torch.tensor(positions_drawn).diff(dim=1)
    assert bool((steps >= 1).all()) and bool((steps[:, [0, 1, 3, 4, 5, 7]] == 1).all())
    last = torch.tensor(positions_drawn)[:, -1]
    assert 8 <= int(last.min()) < 10 and 900 < int(last.max()) < 1000 and 20 < int(last.median()) < 60
    assert spread_positions([5, 5], {9}, 1000, draw) == [0, 1]
    positions = extend_positions(torch.tensor([[0, 1, 9, 10], [0, 5, 0, 0]]), torch.tensor([4, 2]), 6)
    assert positions.tolist() == [[0, 1, 9, 10, 11, 12], [0, 5, 6, 7, 8, 9]]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [name for name in EVERY if name.startswith("attendre")])
def test_experiments_run_on_the_built_in_questions(experiment: str, tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(f"experiment={experiment}", "train.updates=2", f"paths.outputs={tmp_path}")
    run(config)
    assert Graph(config).answer.summary()["questions"] == config.questions.count


def test_a_killed_run_goes_on_with_the_next_questions(tiny: Tiny, settings: list[str]) -> None:
    config = tiny("experiment=attendre_decoder", *settings, "answering.batch_size=2")
    run(config)
    answer = Graph(config).answer
    lines = read_json_lines(answer.path() / "answers.jsonl")
    partial = answer.folder.with_name(answer.folder.name + ".partial")
    shutil.rmtree(answer.folder)
    partial.mkdir()
    work = answer.work(partial)
    for number in (0, 2):
        work.make(number, lambda amount: None)
    content = json.loads(work.files[2].read_text())
    first = content["answers"][0] | {"answer": "kept", "seconds": 50.0}
    work.files[2].write_text(json.dumps(content | {"answers": [first, *content["answers"][1:]]}))
    run(config)
    again = read_json_lines(answer.path() / "answers.jsonl")
    expected = [*lines[:4], first, *lines[5:]]
    assert [line | {"seconds": 0} for line in again] == [line | {"seconds": 0} for line in expected]
    speed = sum(line["read"] for line in again) / sum(line["seconds"] for line in again)
    assert answer.summary()["tokens_per_second"] == pytest.approx(speed, abs=0.1), "the time before the kill counts"
    assert {file.name for file in answer.path().iterdir()} == {"answers.jsonl", "answer.json", MANIFEST}


def test_answers_to_other_texts_are_made_anew(tiny: Tiny, settings: list[str], text_folder: Path) -> None:
    """What a path holds decides, not where it lies: both for the answers and for a small model that learned from it."""
    config = ["experiment=attendre_train_small", *reading_of(settings), "questions=passkey", "questions.words=40"]

    def artefacts(folder: Path) -> tuple[str, ...]:
        graph = Graph(tiny(*config, f"questions.background={folder}"))
        return (graph.small_model.fingerprint if graph.small_model else "", graph.answer.fingerprint)

    before, moved = artefacts(text_folder), text_folder.rename(text_folder.with_name("moved"))
    assert artefacts(moved) == before
    for file in moved.rglob("*.txt"):
        file.write_text("Other words. " * 100)
    assert all(one != other for one, other in zip(artefacts(moved), before, strict=True))


def test_a_text_with_several_questions_is_read_once(tiny: Tiny, settings: list[str]) -> None:
    """Each question is answered as if it were the only one."""
    keys = ["questions=passkey", "questions.keys=3", "questions.words=60", "questions.count=7", "+small.questions.ask=one"]
    one_reading = [*reading_of(settings), "questions.ask=all", "answering.order=last"]
    together = tiny("experiment=attendre_decoder", *keys, *one_reading)
    run(together)
    graph = Graph(together)
    lines = read_json_lines(graph.answer.path() / "answers.jsonl")
    assert [line["read"] == line["tokens"] for line in lines] == [True, False, False, True, False, False, True]
    assert all(line["read"] < 40 < line["tokens"] for line in lines[1:3])
    assert graph.answer.summary()["tokens"] == sum(line["read"] for line in lines)
    examples = graph.answer.examples()
    tokenizer, answerer = graph.answer.model()
    made = graph.answer.prompts(tokenizer)
    for example, line in zip(examples, lines, strict=True):
        session = answerer.start([made(example).shared]).ask([made(example).rest])
        (tokens,) = greedy(session, tokenizer.eos_token_id, together.answering.max_new_tokens)
        assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == line["answer"]


TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>model:"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_prompts_of_every_order(order: str, template: str | None, tmp_path: Path) -> None:
    """Within the chat template, after solved questions, and with the end of the text alone where there is a limit."""
    from transformers import PreTrainedTokenizerFast

    example, solved = Example("q", "Who is it?", "One two. It is Ann.", ("Ann",)), Example("p", "Why?", "So.", ("So",))
    texts = ["<s> </s> user model xyzzy", prompt(example, "both"), prompt(solved, "both")]
    tokenizer: PreTrainedTokenizerFast = train_word_level(texts, 100, tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>"]})
    tokenizer.chat_template = template
    settings = OmegaConf.create({"order": order, "chat_template": None, "max_prompt_tokens": None})
    made = PromptMaker(tokenizer, settings, [solved])(example)
    text = f"{prompt(solved, order)} So\n\n {prompt(example, order)}"
    whole = f"<s>user: {text}</s><s>model:" if template else text
    assert made.tokens == tokenizer(whole, add_special_tokens=False).input_ids
    assert bool(made.shared) == (order == "last")
    assert "It is Ann ." in tokenizer.decode(made.shared or made.rest)
    settings.max_prompt_tokens = len(made.tokens) - 2
    shorter = PromptMaker(tokenizer, settings, [solved])(example)
    start = next(place for place, pair in enumerate(zip(made.tokens, shorter.tokens, strict=False)) if pair[0] != pair[1])
    assert made.tokens[:start] + made.tokens[start + 2 :] == shorter.tokens
    assert tokenizer.decode(made.tokens[start : start + 2]) == ("Context :" if order == "last" else "Question :")
    settings.max_prompt_tokens = 5
    with pytest.raises(UserError, match="max_prompt_tokens=5"):
        PromptMaker(tokenizer, settings, [solved])(example)
    settings.chat_template = True
    if template is None:
        with pytest.raises(UserError, match="chat_template=true"):
            PromptMaker(tokenizer, settings, [])


@pytest.mark.parametrize("questions", ["rooms", "passkey"])
def test_solved_questions_are_facts_alone_of_train(questions: str, tiny: Tiny) -> None:
    config = tiny("experiment=attendre_decoder", f"questions={questions}", "questions.words=100")
    solved = solved_examples(plain(config.questions), 2)
    assert len(solved) == 2 and all(len(example.context.split()) < 60 and example.answers for example in solved)
    asked = {example.name for example in instantiate(config.questions, _convert_="all").examples("test")}
    assert not asked & {example.name for example in solved}


def test_a_guided_text_is_read_for_each_of_its_questions(tiny: Tiny, settings: list[str]) -> None:
    """The answers are those to each question alone, whichever is asked of the same text in the same batch."""
    passkey = "questions=passkey", "questions.words=60", "questions.keys=2", "questions.ask=all", "questions.count=6"
    reading = "model.prefill=guided", "model.query_size=0", "answering.order=last", "eviction=tova"
    config = tiny("experiment=attendre_decoder", *passkey, *reading, *reading_of(settings))
    run(config)
    answer = Graph(config).answer
    lines, (tokenizer, answerer) = read_json_lines(answer.path() / "answers.jsonl"), answer.model()
    make_prompt, examples = answer.prompts(tokenizer), answer.examples()
    assert len({example.context for example in examples}) == len(examples) / 2
    for example, line in zip(examples, lines, strict=True):
        made = make_prompt(example)
        session = answerer.start([made.shared], questions=[made.rest]).ask([made.rest])
        (alone,) = greedy(session, tokenizer.eos_token_id, config.answering.max_new_tokens)
        assert line["answer"] == tokenizer.decode(alone, skip_special_tokens=True).strip()
        assert line["read"] == line["tokens"] == len(made.tokens)


def test_the_interval_of_a_share_is_wilsons() -> None:
    """As Wilson (1927): the two shares whose distance to the measured one is 1.96 of their own standard errors."""
    for share, count in ((0.0, 10), (0.3, 10), (0.5, 200), (1.0, 7)):
        for end in share_interval(share, count):
            assert abs(end - share) == pytest.approx(1.96 * (end * (1 - end) / count) ** 0.5, abs=1e-9)
