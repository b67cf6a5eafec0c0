"""TriviaQA, unfiltered: questions with all Wikipedia passages and search results found for them (Joshi et al. 2017).

From the hub, or from the files of the official distribution: ``unfiltered-web-dev.json`` and ``evidence/``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trime.data.questions.base import Example
from trime.types import UserError

SPLITS = {"train": "train", "valid": "dev", "test": "test"}


class TriviaQA:
    """``count`` questions of a split, chosen by ``seed``. ``path``: the official folder; null: the hub (extra ``hub``)."""

    name = "triviaqa"

    def __init__(self, path: str | None = None, count: int | None = 1000, seed: int = 0):
        self.path, self.count, self.seed = Path(path).expanduser() if path else None, count, seed

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]:
        rows = self.local(self.path, split) if self.path else self.hub(split)
        order = list(range(len(rows)))
        random.Random(self.seed + draw).shuffle(order)
        for number in order[: self.count]:
            yield self.official(rows[number]) if self.path else from_hub(rows[number])

    def local(self, path: Path, split: str) -> list[dict[str, Any]]:
        file = path / "triviaqa-unfiltered" / f"unfiltered-web-{SPLITS[split]}.json"
        file = file if file.is_file() else path / file.name
        try:
            return json.loads(file.read_text(encoding="utf-8"))["Data"]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"questions.path={path} holds no whole {file.name} ({error}): unpack TriviaQA's files there"
            ) from None

    def official(self, row: dict[str, Any]) -> Example:
        """A question with the texts of its evidence files."""
        assert self.path is not None
        places = [("wikipedia", page) for page in row.get("EntityPages", [])] + [
            ("web", page) for page in row.get("SearchResults", [])
        ]
        texts = []
        for kind, page in places:
            file = self.path / "evidence" / kind / page.get("Filename", "")
            if file.is_file():
                texts.append(file.read_text(encoding="utf-8", errors="replace"))
        answer = row["Answer"]
        answers = (answer.get("Value", ""), *answer.get("Aliases", []), *answer.get("NormalizedAliases", []))
        return Example(row["QuestionId"], row["Question"], "\n\n".join(texts), tuple(filter(None, answers)))

    def hub(self, split: str) -> Any:
        try:
            from datasets import load_dataset
        except ImportError:
            raise UserError(
                "questions=triviaqa without questions.path wants the package datasets: pip install datasets"
            ) from None
        try:
            return load_dataset("mandarjoshi/trivia_qa", "unfiltered", split={"valid": "validation"}.get(split, split))
        except Exception as error:  # the hub's errors have many kinds
            raise UserError(f"TriviaQA could not be fetched ({str(error).splitlines()[0]}): set questions.path=DIR") from None


def from_hub(row: dict[str, Any]) -> Example:
    """A question of the hub's form."""
    texts = [*row["entity_pages"]["wiki_context"], *row["search_results"]["search_context"]]
    answer = row["answer"]
    answers = (answer["value"], *answer["aliases"], *answer["normalized_aliases"])
    return Example(row["question_id"], row["question"], "\n\n".join(texts), tuple(filter(None, answers)))
