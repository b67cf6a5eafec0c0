"""bAbI's facts scattered over the text of novels (after Kuratov et al. 2024): the answer is somewhere in a long context."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from trime.data.questions.babi import Story, cast_of, stories, swap_names, task_file
from trime.data.questions.base import Example
from trime.data.questions.scatter import context_words, open_background, scatter_facts, sentences_of_novel
from trime.errors import UserError
from trime.io import hash_of_files
from trime.urls import local_copy


class Babilong:
    """Questions of ``tasks``, their facts in order but at random places among ``words`` words of one novel.

    ``babi`` is a folder with qa1_…_train.txt and so on, ``background`` one of novels, in the form of a folder dataset.
    bAbI has no valid split: valid is the first half of its test stories, test the other half. ``words=0``: the facts alone.
    ``min_words``: the fewest words of a context (None: exactly ``words``). ``swap``: in training, the names of people and
    answers are permuted anew each time, since a thousand stories are soon memorized. ``once``: only questions whose
    supporting facts are about people that no other fact mentions, so that none asks which of two facts is the later one.
    """

    name = "babilong"
    splits: ClassVar[tuple[str, ...]] = ("train", "valid", "test")

    def __init__(
        self,
        babi: str | None,
        background: str | None,
        tasks: list[int],
        words: int,
        min_words: int | None = None,
        count: int | None = None,
        seed: int = 0,
        swap: bool = False,
        once: bool = False,
    ):
        if babi is None or not local_copy(babi).is_dir():
            raise UserError(f"questions.babi={babi}: name a folder of bAbI's files")
        self.background = open_background(background)
        self.babi, self.tasks, self.words, self.min_words = local_copy(babi), tasks, words, min_words
        self.count, self.seed, self.swap = count, seed, swap
        self.once = once
        if not tasks or words < 0:
            raise UserError(f"questions.tasks={tasks}, questions.words={words}: name tasks of bAbI, and 0 words or more")

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]:
        """Yield ``count`` questions in an order given by the seed; each has its own random state for novel and places."""
        questions = [(task, number, story) for task in self.tasks for number, story in self.stories(task, split)]
        random.Random(f"{self.seed} {draw} {split}").shuffle(questions)
        casts = {task: cast_of([story for other, _, story in questions if other == task]) for task in self.tasks}
        for task, number, story in questions[: self.count]:
            rng = random.Random(f"{self.seed} {draw} {split} {task} {number} {self.words}")
            story = swap_names(casts[task], story, rng) if self.swap and split == "train" else story
            yield Example(f"qa{task}-{number}", story.question, self.context(story, split, rng), (story.answer,))

    def fingerprint(self, split: str) -> str:
        tasks = [(str(task), self.task_file(task, split)) for task in self.tasks]
        return f"{hash_of_files(tasks)} {self.background.fingerprint()}"

    def task_file(self, task: int, split: str) -> Path:
        """Return the file that holds the stories of a split."""
        return task_file(self.babi, task, "train" if split == "train" else "test")

    def stories(self, task: int, split: str) -> list[tuple[int, Story]]:
        """Return the numbered stories of a split."""
        numbered = enumerate(stories(self.task_file(task, split)))
        chosen = [(number, story) for number, story in numbered if not self.once or mentions_people_once(story)]
        half = len(chosen) // 2
        return {"train": chosen, "valid": chosen[:half], "test": chosen[half:]}[split]

    def context(self, story: Story, split: str, rng: random.Random) -> str:
        """Scatter the facts over a passage of one of the split's novels; UserError where there is no novel."""
        sentences = sentences_of_novel(self.background, split, rng)
        words = context_words(self.words, self.min_words, rng)
        return scatter_facts(list(story.facts), sentences, words, rng)


def mentions_people_once(story: Story) -> bool:
    """Return True if each person that a supporting fact begins with begins no other fact."""
    first = [fact.split()[0] for fact in story.facts]
    return all(first.count(first[number]) == 1 for number in story.supporting)
