"""TriviaQA, unfiltered: questions with all Wikipedia pages and search results retrieved for them (Joshi et al. 2017).

From the hub, or from the official files: questions and answers in ``triviaqa-unfiltered/unfiltered-web-dev.json`` and
``unfiltered-web-train.json``, the texts in ``evidence/wikipedia/`` and ``evidence/web/`` of ``triviaqa-rc``. The official
test questions (``unfiltered-web-test-without-answers.json``) have no answers and cannot be used for evaluation.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from trime.common.io import checksum_of, hash_of_files
from trime.common.urls import local_copy
from trime.data.questions.base import Example
from trime.errors import UserError

log = logging.getLogger(__name__)

FILES = {"train": "unfiltered-web-train.json", "valid": "unfiltered-web-dev.json"}
KINDS = {"EntityPages": "wikipedia", "SearchResults": "web"}  # of evidence, with their folders
ALIASES = ("Aliases", "NormalizedAliases", "HumanAnswers")


class TriviaQA:
    """``count`` questions of a split, sampled with ``seed``, from the official folder ``path`` or the hub (extra ``hub``)."""

    name = "triviaqa"
    splits: ClassVar[tuple[str, ...]] = tuple(FILES)

    def __init__(self, path: str | None = None, count: int | None = 1000, seed: int = 0):
        self.path, self.count, self.seed = local_copy(path) if path else None, count, seed
        self.missing_evidence = 0  # number of missing files, of the questions yielded last

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]:
        """Yield the sampled questions; UserError where the split has no answers, or all evidence is missing."""
        if split not in self.splits:
            raise UserError(f"TriviaQA's {split} questions have no answers: set answering.split=valid")
        if not self.path:
            yield from map(from_hub, self.sampled(hub_rows(split), draw))
            return
        rows = self.sampled(official_rows(self.path, split), draw)
        self.check_evidence(rows)
        for row in rows:
            answer = row.get("Answer")
            if not answer:
                where = f"questions.path={self.path}: question {row['QuestionId']}"
                raise UserError(f"{where} has no answer: use the official files")
            texts = [file.read_text("utf-8", "replace") for file in self.evidence_files(row) if file.is_file()]
            aliases = (alias for kind in ALIASES for alias in answer.get(kind) or [])
            answers = (answer.get("Value"), answer.get("NormalizedValue"), *aliases)
            yield Example(row["QuestionId"], row["Question"], "\n\n".join(texts), distinct(answers))

    def sampled(self, rows: Any, draw: int = 0) -> list[dict[str, Any]]:
        """Return ``count`` rows of a split, drawn with ``seed`` and ``draw``; all of them, shuffled, if ``count`` is None."""
        order = list(range(len(rows)))
        random.Random(self.seed + draw).shuffle(order)
        return [rows[number] for number in order[: self.count]]

    def fingerprint(self, split: str) -> str:
        """Return a hash of the questions' file, and of the sampled questions' evidence that exists: names and sizes."""
        if self.path is None or split not in self.splits:
            return ""
        files = [file for row in self.sampled(official_rows(self.path, split)) for file in self.evidence_files(row)]
        evidence = [f"{file.parent.name}/{file.name} {file.stat().st_size}" for file in files if file.is_file()]
        return f"{hash_of_files([(split, official_file(self.path, split))])} {checksum_of(evidence)}"

    def check_evidence(self, rows: list[dict[str, Any]]) -> None:
        """Count and print how many evidence files are missing; UserError where all of them are."""
        files = [self.evidence_files(row) for row in rows]
        exists = [[file.is_file() for file in question] for question in files]
        expected, existing = sum(map(len, files)), sum(map(sum, exists))
        without = sum(not any(question) for question in exists)
        if rows and not existing:
            raise UserError(
                f"questions.path={self.path}: none of the {expected:,} evidence files of {len(rows):,} questions exists: "
                "unpack evidence/wikipedia and evidence/web of triviaqa-rc.tar.gz into it"
            )
        self.missing_evidence = expected - existing
        if self.missing_evidence or without:
            log.warning(
                f"triviaqa: {self.missing_evidence:,} of {expected:,} evidence files are missing; "
                f"{without:,} of {len(rows):,} questions have no file at all and an empty context"
            )

    def evidence_files(self, row: dict[str, Any]) -> list[Path]:
        """Return the files of a question's texts, Wikipedia's first; pages that were not saved have no file name."""
        assert self.path is not None
        folders = (self.path, self.path / "triviaqa-rc")
        root = next((folder for folder in folders if (folder / "evidence").is_dir()), self.path)
        return [
            root / "evidence" / folder / page["Filename"]
            for kind, folder in KINDS.items()
            for page in row.get(kind) or []
            if page.get("Filename")
        ]


def official_file(path: Path, split: str) -> Path:
    """Return the place where the questions of a split lie, or should lie."""
    file = path / "triviaqa-unfiltered" / FILES[split]
    return file if file.is_file() else path / file.name


def official_rows(path: Path, split: str) -> list[dict[str, Any]]:
    """Return the questions of a split; UserError where its file is missing or broken."""
    file = official_file(path, split)
    try:
        return json.loads(file.read_text(encoding="utf-8"))["Data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"questions.path={path} holds no readable {file.name} ({error}): unpack triviaqa-unfiltered.tar.gz there"
        ) from None


def hub_rows(split: str) -> Any:
    """Return the questions of a split from the hub; UserError where they cannot be fetched."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError("questions=triviaqa without questions.path needs the package datasets: pip install datasets") from None
    try:
        return load_dataset("mandarjoshi/trivia_qa", "unfiltered", split={"valid": "validation"}.get(split, split))
    except Exception as error:  # the hub's errors have many kinds
        raise UserError(f"TriviaQA could not be fetched ({str(error).splitlines()[0]}): set questions.path=DIR") from None


def from_hub(row: dict[str, Any]) -> Example:
    """Return a question in the hub's format."""
    texts = [*row["entity_pages"]["wiki_context"], *row["search_results"]["search_context"]]
    answer = row["answer"]
    answers = (answer["value"], answer.get("normalized_value"), *answer["aliases"], *answer["normalized_aliases"])
    return Example(row["question_id"], row["question"], "\n\n".join(texts), distinct(answers))


def distinct(answers: tuple[str | None, ...]) -> tuple[str, ...]:
    """Return the answers that are not empty, each once, in order."""
    return tuple(dict.fromkeys(filter(None, answers)))
