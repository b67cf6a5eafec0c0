"""bAbI's facts scattered over novels' text (after Kuratov et al. 2024): an answer is somewhere in a long context."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from trime.data.datasets.folder import Folder
from trime.data.questions.babi import Story, stories, task_file
from trime.data.questions.base import Example
from trime.data.tokenizers import Whitespace
from trime.types import UserError

END = re.compile(r"(?<=[.!?])[\"'”’]*\s+")


class Babilong:
    """Questions of ``tasks``, their facts in order but at random places among ``words`` words of one novel.

    ``babi`` holds qa1_…_train.txt and so on, ``background`` novels as a folder dataset does. bAbI has no valid
    split: it takes the first half of test's stories, test the other half. ``words=0``: the facts alone.
    """

    name = "babilong"

    def __init__(self, babi: str, background: str, tasks: list[int], words: int, count: int | None = None, seed: int = 0):
        self.babi, self.tasks, self.words, self.count, self.seed = Path(babi).expanduser(), tasks, words, count, seed
        if not tasks or words < 0:
            raise UserError(f"questions.tasks={tasks}, questions.words={words}: name tasks of bAbI, and 0 words or more")
        self.background = Folder(background, Whitespace(), "questions.background")

    def examples(self, split: str) -> Iterator[Example]:
        """``count`` questions, in an order that the seed decides; each draws its novel and places by its own number."""
        asked = [(task, number, story) for task in self.tasks for number, story in self.stories(task, split)]
        random.Random(f"{self.seed} {split}").shuffle(asked)
        for task, number, story in asked[: self.count]:
            draw = random.Random(f"{self.seed} {split} {task} {number} {self.words}")
            yield Example(f"qa{task}-{number}", story.question, self.scattered(story, split, draw), (story.answer,))

    def stories(self, task: int, split: str) -> list[tuple[int, Story]]:
        """The stories of a split, numbered."""
        found = list(enumerate(stories(task_file(self.babi, task, "train" if split == "train" else "test"))))
        half = len(found) // 2
        return {"train": found, "valid": found[:half], "test": found[half:]}[split]

    def scattered(self, story: Story, split: str, draw: random.Random) -> str:
        """The facts among consecutive sentences of a novel."""
        left = self.words - sum(len(fact.split()) for fact in story.facts)
        around = self.passage(split, left, draw) if left > 0 else []
        places = sorted(draw.randint(0, len(around)) for _ in story.facts)
        parts: list[str] = []
        for start, end, fact in zip([0, *places], [*places, len(around)], [*story.facts, None], strict=True):
            parts += [*around[start:end], *([fact] if fact is not None else [])]
        return " ".join(parts)

    def passage(self, split: str, words: int, draw: random.Random) -> list[str]:
        """Sentences of at most ``words`` words from a random place of a novel of that split, around its end."""
        files = self.background.files(split)
        if not files:
            raise UserError(f"questions.background={self.background.place} holds no text for {split}")
        sentences = sentences_of(draw.choice(files))
        start, found, left = draw.randrange(len(sentences)), [], words
        for number in range(len(sentences)):
            sentence = sentences[(start + number) % len(sentences)]
            left -= len(sentence.split())
            if left < 0:
                break
            found.append(sentence)
        return found


@cache
def sentences_of(path: Path) -> list[str]:
    """The sentences of a text, their spaces single."""
    found = [" ".join(sentence.split()) for sentence in END.split(path.read_text(encoding="utf-8", errors="replace"))]
    found = [sentence for sentence in found if sentence]
    if not found:
        raise UserError(f"{path} holds no sentence")
    return found
