"""bAbI's facts scattered over novels' text (after Kuratov et al. 2024): an answer is somewhere in a long context."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import ClassVar

from trime.data.datasets.folder import Folder
from trime.data.questions.babi import Story, cast_of, stories, swapped, task_file
from trime.data.questions.base import Example
from trime.data.questions.scatter import scattered, sentences_in
from trime.data.tokenizers import Whitespace
from trime.types import UserError


class Babilong:
    """Questions of ``tasks``, their facts in order but at random places among ``words`` words of one novel.

    ``babi`` holds qa1_…_train.txt and so on, ``background`` novels as a folder dataset does. bAbI has no valid
    split: it takes the first half of test's stories, test the other half. ``words=0``: the facts alone. ``least``:
    contexts have between so many and ``words`` words. ``swap``: in training, people and answers of a story trade names
    anew each time, for a thousand stories are soon known by heart. ``once``: only questions whose people one fact each
    tells of, so that none asks which of two facts is the later one.
    """

    name = "babilong"
    splits: ClassVar[tuple[str, ...]] = ("train", "valid", "test")

    def __init__(
        self,
        babi: str | None,
        background: str | None,
        tasks: list[int],
        words: int,
        least: int | None = None,
        count: int | None = None,
        seed: int = 0,
        swap: bool = False,
        once: bool = False,
    ):
        for name, place in {"babi": babi, "background": background}.items():
            if place is None or not Path(place).expanduser().is_dir():
                raise UserError(f"questions.{name}={place}: name a folder, of bAbI's files and of novels")
        self.babi, self.tasks, self.words, self.least = Path(str(babi)).expanduser(), tasks, words, least
        self.count, self.seed, self.swap = count, seed, swap
        self.once = once
        if not tasks or words < 0:
            raise UserError(f"questions.tasks={tasks}, questions.words={words}: name tasks of bAbI, and 0 words or more")
        self.background = Folder(background, Whitespace(), "questions.background")

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]:
        """``count`` questions, in an order that the seed decides; each draws its novel and places by its own number."""
        asked = [(task, number, story) for task in self.tasks for number, story in self.stories(task, split)]
        random.Random(f"{self.seed} {draw} {split}").shuffle(asked)
        casts = {task: cast_of([story for own, _, story in asked if own == task]) for task in self.tasks}
        for task, number, story in asked[: self.count]:
            own = random.Random(f"{self.seed} {draw} {split} {task} {number} {self.words}")
            story = swapped(casts[task], story, own) if self.swap and split == "train" else story
            yield Example(f"qa{task}-{number}", story.question, self.context(story, split, own), (story.answer,))

    def stories(self, task: int, split: str) -> list[tuple[int, Story]]:
        """The stories of a split, numbered."""
        told = enumerate(stories(task_file(self.babi, task, "train" if split == "train" else "test")))
        found = [(number, story) for number, story in told if not self.once or told_once(story)]
        half = len(found) // 2
        return {"train": found, "valid": found[:half], "test": found[half:]}[split]

    def context(self, story: Story, split: str, draw: random.Random) -> str:
        """The facts in a passage of one of the split's novels."""
        files = self.background.files(split)
        if not files:
            raise UserError(f"questions.background={self.background.place} holds no text for {split}")
        words = self.words if self.least is None else draw.randint(self.least, self.words)
        return scattered(list(story.facts), sentences_of(draw.choice(files)), words, draw)


def told_once(story: Story) -> bool:
    """Whether whoever the supporting facts begin with begins no other fact."""
    first = [fact.split()[0] for fact in story.facts]
    return all(first.count(first[number]) == 1 for number in story.supporting)


@cache
def sentences_of(path: Path) -> list[str]:
    """The sentences of a text."""
    found = sentences_in(path.read_text(encoding="utf-8", errors="replace"))
    if not found:
        raise UserError(f"{path} holds no sentence")
    return found
