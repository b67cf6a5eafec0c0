"""Facts scattered over a long text, one of which answers a question: bAbI's stories in novels, and built-in ones."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, NamedTuple

from trime.common.io import hash_of_files
from trime.common.urls import local_copy
from trime.data.datasets.base import lines_of
from trime.data.datasets.folder import Folder
from trime.data.questions.base import Example
from trime.data.tokenizers import Whitespace
from trime.errors import UserError

END = re.compile(r"(?<=[.!?])[\"'”’]*\s+")  # of a sentence
PEOPLE = ("Ada", "Boris", "Chloe", "Dinah", "Emil", "Farah")
ROOMS = ("attic", "cellar", "library", "studio", "stable", "workshop")
MOVES = ("walked to", "ran to", "went back to", "hurried to")
TALES = {"train": 1000, "valid": 200, "test": 200}


class Story(NamedTuple):
    """The facts before a question, its answer, and which facts support it."""

    facts: tuple[str, ...]
    question: str
    answer: str
    supporting: tuple[int, ...]


class Cast(NamedTuple):
    """The names in a task's stories that can be exchanged without making a story false."""

    people: list[str]  # the words that facts begin with
    answers: list[str]  # empty where some answer is not a word of the facts: yes and no, numbers, lists


class Babilong:
    """Questions of ``tasks``, their facts in order but at random places among ``words`` words of one novel.

    After Kuratov et al. 2024. ``babi`` is a folder with qa1_…_train.txt and so on, ``background`` one of novels, in the form
    of a folder dataset. bAbI has no valid split: valid is the first half of its test stories, test the other half.
    ``words=0``: the facts alone. ``min_words``: the fewest words of a context (None: exactly ``words``). ``swap``: in training,
    the names of people and answers are permuted anew each time, since a thousand stories are soon memorized. ``once``: only
    questions whose supporting facts are about people that no other fact mentions, so that none asks which of two facts is
    the later one.
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
        self.count, self.seed, self.swap, self.once = count, seed, swap, once
        if not tasks or words < 0:
            raise UserError(f"questions.tasks={tasks}, questions.words={words}: name tasks of bAbI, and 0 words or more")

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]:
        """Yield ``count`` questions in an order given by the seed; UserError where there is no novel for the split."""
        questions = [(task, number, story) for task in self.tasks for number, story in self.stories(task, split)]
        random.Random(f"{self.seed} {draw} {split}").shuffle(questions)
        casts = {task: cast_of([story for other, _, story in questions if other == task]) for task in self.tasks}
        for task, number, story in questions[: self.count]:
            # A state for each question: it keeps its novel and places whatever other questions are asked.
            rng = random.Random(f"{self.seed} {draw} {split} {task} {number} {self.words}")
            if self.swap and split == "train":
                story = swap_names(casts[task], story, rng)
            sentences = sentences_of_novel(self.background, split, rng)
            context = scatter_facts(list(story.facts), sentences, draw_words(self.words, self.min_words, rng), rng)
            yield Example(f"qa{task}-{number}", story.question, context, (story.answer,))

    def fingerprint(self, split: str) -> str:
        tasks = [(str(task), self.task_file(task, split)) for task in self.tasks]
        return f"{hash_of_files(tasks)} {self.background.fingerprint()}"

    def task_file(self, task: int, split: str) -> Path:
        """Return the file that holds the stories of a split; UserError where there is not exactly one."""
        pattern = f"qa{task}_*_{'train' if split == 'train' else 'test'}.txt"
        files = sorted(self.babi.glob(pattern))
        if len(files) != 1:
            raise UserError(f"{self.babi} holds no single {pattern}: set questions.babi to a folder of bAbI's tasks")
        return files[0]

    def stories(self, task: int, split: str) -> list[tuple[int, Story]]:
        chosen = []
        for number, story in enumerate(stories(self.task_file(task, split))):
            people = [fact.split()[0] for fact in story.facts]
            if not self.once or all(people.count(people[fact]) == 1 for fact in story.supporting):
                chosen.append((number, story))
        # bAbI has no valid split: it is the first half of its test stories.
        half = len(chosen) // 2
        return {"train": chosen, "valid": chosen[:half], "test": chosen[half:]}[split]


class Rooms:
    """Who is where, within the text of Python's help, in the form of bAbI's first task; built in, without a download.

    ``count`` stories of 2 to 8 moves; contexts of ``min_words`` to ``words`` words (None: exactly ``words``).
    """

    name = "rooms"
    splits: ClassVar[tuple[str, ...]] = tuple(TALES)

    def __init__(self, words: int, min_words: int | None = None, count: int | None = None, seed: int = 0):
        if words < 0:
            raise UserError(f"questions.words={words}: a context has 0 words or more")
        self.words, self.min_words, self.count, self.seed = words, min_words, count, seed

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]:
        """Yield the stories of a split, which occur in another split only by chance."""
        for number in range(self.count or TALES[split]):
            rng = random.Random(f"{self.seed} {draw} {split} {number}")
            moves = [(rng.choice(PEOPLE), rng.choice(ROOMS)) for _ in range(rng.randint(2, 8))]
            person = rng.choice(moves)[0]
            room = dict(moves)[person]
            facts = [f"{mover} {rng.choice(MOVES)} the {place}." for mover, place in moves]
            words = draw_words(self.words, self.min_words, rng)
            yield Example(f"{split}-{number}", f"Where is {person}?", scatter_facts(facts, prose(), words, rng), (room,))

    def fingerprint(self, split: str) -> str:
        return ""


def stories(path: Path) -> Iterator[Story]:
    """Yield every question of a bAbI file with the facts before it; UserError where a line has no number.

    Lines are numbered facts, with questions among them that name their supporting facts; number 1 begins a new story.
    """
    facts: dict[int, str] = {}
    for line in map(bytes.decode, lines_of(path)):
        number, _, content = line.strip().partition(" ")
        if not number.isdigit():
            raise UserError(f"{path} is not a bAbI file: its lines begin with a number, not like {line[:40]!r}")
        # Facts are numbered within a story, and a question names by number those that support it.
        facts = {} if number == "1" else facts
        question, *rest = (column.strip() for column in content.split("\t"))
        if not rest:
            facts[int(number)] = question
            continue
        order = {fact: index for index, fact in enumerate(facts)}
        supporting = tuple(order[int(fact)] for fact in " ".join(rest[1:]).split())
        yield Story(tuple(facts.values()), question, rest[0], supporting)


def cast_of(stories: list[Story]) -> Cast:
    """Return the exchangeable names in the stories of a task."""
    people = {fact.split()[0] for story in stories for fact in story.facts} - {"The"}
    words = {word for story in stories for fact in story.facts for word in re.findall(r"\w+", fact)}
    answers = {story.answer for story in stories}
    return Cast(sorted(people), sorted(answers - people) if answers <= words else [])


def swap_names(cast: Cast, story: Story, rng: random.Random) -> Story:
    """Return the story with the names of people, and those of answers, randomly permuted: new, but as true as before."""
    names = {old: new for group in cast for old, new in zip(group, rng.sample(group, len(group)), strict=True)}

    def rename(text: str) -> str:
        return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)

    facts = tuple(map(rename, story.facts))
    return Story(facts, rename(story.question), rename(story.answer), story.supporting)


def draw_words(words: int, min_words: int | None, rng: random.Random) -> int:
    """Return the length of a context: drawn from ``min_words`` to ``words`` words, or exactly ``words``."""
    return words if min_words is None else rng.randint(min_words, words)


def scatter_facts(facts: list[str], sentences: list[str], words: int, rng: random.Random) -> str:
    """Return a text of at most ``words`` words with all facts in it; it is longer only where the facts alone are."""
    remaining = words - sum(len(fact.split()) for fact in facts)
    background = random_passage(sentences, remaining, rng) if remaining > 0 else []
    places = sorted(rng.randint(0, len(background)) for _ in facts)
    return " ".join(insert_facts(facts, places, background))


def place_facts(facts: list[str], depths: list[float], background: list[str]) -> tuple[str, list[float]]:
    """Return a text with each fact before the sentence nearest to its depth, in words from 0 to 1, and their depths there."""
    begins = [0, *accumulate(len(sentence.split()) for sentence in background)]
    places = [min(range(len(begins)), key=lambda number: abs(begins[number] - depth * begins[-1])) for depth in depths]
    return " ".join(insert_facts(facts, places, background)), [begins[place] / max(begins[-1], 1) for place in places]


def insert_facts(facts: list[str], places: list[int], sentences: list[str]) -> Iterator[str]:
    """Yield sentences with each fact before the sentence of its place."""
    for number in range(len(sentences) + 1):
        yield from (fact for fact, place in zip(facts, places, strict=True) if place == number)
        yield from sentences[number : number + 1]


def random_passage(sentences: list[str], words: int, rng: random.Random) -> list[str]:
    """Return consecutive sentences of at most ``words`` words from a random start, continuing from the text's beginning."""
    start, passage, remaining = rng.randrange(len(sentences)), [], words
    for number in range(len(sentences)):
        sentence = sentences[(start + number) % len(sentences)]
        remaining -= len(sentence.split())
        if remaining < 0:
            break
        passage.append(sentence)
    return passage


def open_background(folder: str | None) -> Folder:
    if folder is None or not local_copy(folder).is_dir():
        raise UserError(f"questions.background={folder}: name a folder of novels or other text")
    return Folder(folder, Whitespace(), "questions.background")


def sentences_of_novel(background: Folder, split: str, rng: random.Random) -> list[str]:
    """Return the sentences of one of a split's files; UserError where there is no file, or no sentence in it."""
    files = background.files(split)
    if not files:
        raise UserError(f"questions.background={background.location} holds no text for {split}")
    return sentences_of(rng.choice(files))


@cache
def sentences_of(path: Path) -> list[str]:
    """Return the sentences of a text file; UserError where there are none."""
    sentences = split_sentences(b"".join(lines_of(path)).decode("utf-8", "replace"))
    if not sentences:
        raise UserError(f"{path} holds no sentence: remove it or put text into it")
    return sentences


@cache
def prose() -> list[str]:
    from pydoc_data.topics import topics

    return split_sentences("\n".join(topics[name] for name in sorted(topics)))


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, with single spaces."""
    return [" ".join(sentence.split()) for sentence in END.split(text) if sentence.strip()]
