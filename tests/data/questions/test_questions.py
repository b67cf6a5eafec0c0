"""Questions over contexts: the built-in ones, TriviaQA's files, and exact match."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from trime.data.questions.base import Example, contains_answer, exact_match, normalize
from trime.data.questions.passkey import Passkey
from trime.data.questions.rooms import Rooms
from trime.data.questions.triviaqa import TriviaQA, from_hub
from trime.errors import UserError


def test_a_fingerprint_is_of_the_files_wherever_they_lie(triviaqa: Path, tmp_path: Path) -> None:
    def fingerprints(folder: Path) -> list[str]:
        sets = Passkey(40, background=f"{folder}/novels"), TriviaQA(str(folder))
        return [each.fingerprint("valid") for each in sets]

    here = tmp_path / "here"  # the fixture wrote beside it
    shutil.copytree(triviaqa, here, ignore=shutil.ignore_patterns("here"))
    for split in ("train", "valid", "test"):
        (here / "novels" / split).mkdir(parents=True)
        (here / "novels" / split / "a.txt").write_text(f"The {split} novel. It is short.")
    before = fingerprints(here)
    moved = here.rename(tmp_path / "there")
    assert fingerprints(moved) == before and all(before)
    (moved / "novels" / "valid" / "a.txt").write_text("Another novel.")
    (moved / "evidence" / "wikipedia" / "0.txt").write_text("More evidence.")
    assert all(one != other for one, other in zip(fingerprints(moved), before, strict=True))
    assert Rooms(40).fingerprint("valid") == Passkey(40).fingerprint("valid") == ""


def test_the_built_in_questions_contain_their_answer() -> None:
    for words in (0, 150):
        examples = list(Rooms(words=words, count=40).examples("test"))
        assert examples == list(Rooms(words=words, count=40).examples("test")) and len(examples) == 40
        for example in examples:
            person = example.question.removeprefix("Where is ").removesuffix("?")
            moves = re.findall(rf"{person} (?:walked|ran|went back|hurried) to the (\w+)\.", example.context)
            assert moves[-1] == example.answers[0] and (words or len(example.context.split()) < 60)
    assert {len(e.context.split()) > 200 for e in Rooms(words=300, min_words=0, count=40).examples("train")} == {True, False}
    assert list(Rooms(words=0, count=9).examples("train")) != list(Rooms(words=0, count=9).examples("train", draw=1))


ANSWER = {"Value": "The Beatles", "NormalizedValue": "beatles", "HumanAnswers": ["The Fab Four"]}
ANSWER |= {"Aliases": ["Beatles, The"], "NormalizedAliases": ["beatles"]}


def write_triviaqa(folder: Path, count: int, text: Callable[[int, str], str]) -> Path:
    """Write a folder in the official format: dev questions, each with a page, a search result and an unsaved page; and test."""
    rows = []
    for number in range(count):
        pages = [{"Filename": f"{number}.txt", "Title": f"{number}"}, {"Title": "never saved"}]
        found = {"EntityPages": pages, "SearchResults": [{"Filename": f"3/3_{number}.txt", "Rank": 0}]}
        rows.append({"QuestionId": f"q{number}", "Question": f"Who is {number}?", "Answer": ANSWER} | found)
        for kind, name in (("wikipedia", f"{number}.txt"), ("web", f"3/3_{number}.txt")):
            file = folder / "evidence" / kind / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text(number, kind))
    without = [{key: value for key, value in row.items() if key != "Answer"} for row in rows]
    (folder / "triviaqa-unfiltered").mkdir()
    for split, own in (("dev", rows), ("test-without-answers", without)):
        file = folder / "triviaqa-unfiltered" / f"unfiltered-web-{split}.json"
        file.write_text(json.dumps({"Data": own, "Domain": "unfiltered-web"}))
    return folder


@pytest.fixture
def triviaqa(tmp_path: Path) -> Path:
    return write_triviaqa(tmp_path, 5, lambda _, kind: f"text of {kind}")


@pytest.mark.parametrize("place", [".", "triviaqa-rc"])
def test_triviaqa_from_the_official_files(place: str, triviaqa: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evidence lies beside the questions or in the archive's own folder; pages come first, then search results."""
    (triviaqa / place).mkdir(exist_ok=True)
    (triviaqa / "evidence").rename(triviaqa / place / "evidence")
    examples = list(TriviaQA(str(triviaqa), count=3).examples("valid"))
    assert len(examples) == 3 and examples == list(TriviaQA(str(triviaqa), count=3).examples("valid"))
    assert {example.context for example in examples} == {"text of wikipedia\n\ntext of web"}
    assert all(exact_match(answer, examples[0]) for answer in ("the beatles!", "Beatles, The", "fab four"))
    assert examples[0].answers == ("The Beatles", "beatles", "Beatles, The", "The Fab Four")
    other_seed = TriviaQA(str(triviaqa), 3, 1).examples("valid")
    assert {example.name for example in examples} != {example.name for example in other_seed}
    assert not capsys.readouterr().out, "nothing is missing: a page that was never saved has no file"


def test_missing_evidence_is_counted(triviaqa: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A note is printed where some files are missing, and an error raised where all are."""
    (triviaqa / "evidence" / "web" / "3" / "3_0.txt").unlink()
    for kind, name in (("wikipedia", "1.txt"), ("web", "3/3_1.txt")):
        (triviaqa / "evidence" / kind / name).unlink()
    contexts = {example.name: example.context for example in TriviaQA(str(triviaqa)).examples("valid")}
    assert contexts["q0"] == "text of wikipedia" and contexts["q1"] == "" and contexts["q2"].count("text") == 2
    assert "3 of 10 evidence files are missing; 1 of 5 questions have no file at all" in capsys.readouterr().out
    shutil.rmtree(triviaqa / "evidence")
    with pytest.raises(UserError, match=r"none of the 10 evidence files of 5 questions exists.*triviaqa-rc"):
        next(TriviaQA(str(triviaqa)).examples("valid"))


def test_the_hubs_rows() -> None:
    row = {"question_id": "q", "question": "Who?", "entity_pages": {"wiki_context": ["one"]}}
    row |= {"search_results": {"search_context": ["two"]}}
    row |= {"answer": {"value": "Someone", "aliases": ["Some One"], "normalized_aliases": ["some one"]}}
    example = from_hub(row)
    assert example.context == "one\n\ntwo" and exact_match("some_one", example) and not exact_match("someone else", example)


@pytest.mark.parametrize(
    "answer, expected",
    [("The  Cat's", "cat s"), ("An apple, a day.", "apple day"), ("Sgt_Pepper", "sgt pepper"), ("theatre", "theatre")],
)
def test_normalized(answer: str, expected: str) -> None:
    """Answers are lower-cased and lose marks and articles, as in the official evaluation."""
    assert normalize(answer) == expected


@pytest.fixture()
def novels(tmp_path: Path) -> str:
    """Return a folder with one text of short sentences for test."""
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.txt").write_text("It was the best of times. It was the worst of times. " * 40)
    return str(tmp_path)


FACT = re.compile(r"(?:The|\w+'s) secret number is \d{5}\. Remember it\.")


def fact_of(example: Example) -> str:
    """Return the sentence that holds the answer of a question."""
    asked = example.question.removeprefix("What is ").removesuffix("?").replace("the ", "The ", 1)
    return f"{asked} is {example.answers[0]}. Remember it."


@pytest.mark.parametrize("keys", [1, 3])
@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0, None])
def test_a_pass_key_stands_where_it_is_asked_for(keys: int, depth: float | None, novels: str) -> None:
    """The asked number stands once in a text of the asked length, within a sentence of its depth; the others elsewhere."""
    questions = Passkey(300, depth=depth, keys=keys, background=novels, count=8)
    for number, example in enumerate(questions.examples("test")):
        words = example.context.split()
        assert 290 < len(words) <= 300 and example.name == f"test-{number}"
        assert len(re.findall(r"\d{5}", example.context)) >= keys
        fact = fact_of(example)
        assert example.context.count(fact) == 1
        place = example.context[: example.context.index(fact)].split()
        before, background = (len(FACT.sub("", " ".join(text)).split()) for text in (place, words))
        assert example.depth == pytest.approx(before / background, abs=1e-4)
        assert depth is None or abs(example.depth - depth) < 0.02


def test_every_pass_key_of_a_text_can_be_asked_for(novels: str) -> None:
    """A text is the same for all its questions, whose keys are spread over it; ``count`` counts questions."""
    examples = [*Passkey(400, keys=4, ask="all", background=novels, count=10).examples("test")]
    assert [len([*group]) for _, group in groupby(examples, lambda example: example.context)] == [4, 4, 2]
    assert len({example.name for example in examples}) == 10
    for first in (0, 4):
        depths = sorted(example.depth or 0 for example in examples[first : first + 4])
        assert all(abs(depth - (place + 0.5) / 4) < 0.15 for place, depth in enumerate(depths))
        for example in examples[first : first + 4]:
            assert fact_of(example) in example.context


def test_a_text_holds_the_same_pass_key_at_every_depth(novels: str) -> None:
    """So that cells of a table by depth differ in nothing else; other splits and seeds have others."""
    shallow, deep = ([*Passkey(100, depth=depth, background=novels, count=3).examples("test")] for depth in (0.1, 0.9))
    assert [example.answers for example in shallow] == [example.answers for example in deep]
    assert all(sorted(one.context.split()) == sorted(other.context.split()) for one, other in zip(shallow, deep, strict=True))
    assert all("best of times" in example.context for example in shallow)
    others = [[*Passkey(100, count=3, seed=1).examples("test")], [*Passkey(100, count=3).examples("valid")]]
    assert all(example.answers != one.answers for each in others for example, one in zip(each, shallow, strict=True))


def test_an_answer_may_contain_the_accepted_one() -> None:
    example = Example("q", "What?", "", ("71432", "The Attic"))
    assert all(contains_answer(answer, example) for answer in ("The pass key is 71432.", "attic", "in the attic, I think"))
    assert not any(contains_answer(answer, example) for answer in ("714325", "attics", ""))
