"""The embedded parallel text: sentences of a small German grammar and what they are in English. No download."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trime.data.parallel.base import Pair

NOUNS = {
    "Mann": ("m", "man"),
    "Hund": ("m", "dog"),
    "Lehrer": ("m", "teacher"),
    "Garten": ("m", "garden"),
    "Frau": ("f", "woman"),
    "Katze": ("f", "cat"),
    "Küche": ("f", "kitchen"),
    "Straße": ("f", "street"),
    "Kind": ("n", "child"),
    "Pferd": ("n", "horse"),
    "Haus": ("n", "house"),
    "Buch": ("n", "book"),
}
VERBS = {"sieht": "sees", "sucht": "seeks", "malt": "paints", "kauft": "buys", "findet": "finds", "liebt": "loves"}
WORDS = {"alt": "old", "klein": "small", "rot": "red", "müd": "tired", "schön": "beautiful", "neu": "new"}
SUBJECT = {"m": ("Der {}e", "Ein {}er"), "f": ("Die {}e", "Eine {}e"), "n": ("Das {}e", "Ein {}es")}
OBJECT = {"m": ("den {}en", "einen {}en"), "f": ("die {}e", "eine {}e"), "n": ("das {}e", "ein {}es")}
TIMES = {"heute": "today", "oft": "often", "morgen": "tomorrow", "immer": "always"}


class Phrase(NamedTuple):
    """A noun with its article and adjective, in both languages."""

    german: str
    english: str


class Phrases:
    """``count`` training pairs, a tenth as many in each other split; times stand after the verb, in English at the end."""

    name, languages, cut, detokenize = "phrases", ("de", "en"), False, False
    place = "trime/data/parallel/phrases.py"

    def __init__(self, count: int = 4000, seed: int = 0):
        self.count, self.seed = count, seed

    def files(self, split: str) -> list[Path]:
        """This one."""
        return [Path(__file__)]

    def notes(self) -> list[str]:
        """Nothing."""
        return []

    def pairs(self, split: str) -> Iterator[Pair]:
        """Each split is drawn on its own."""
        draw = random.Random(f"{self.seed} {split}")
        for _ in range(self.count if split == "train" else max(1, self.count // 10)):
            subject, other = self.phrase(draw, SUBJECT), self.phrase(draw, OBJECT)
            (verb, does), (when, time) = draw.choice([*VERBS.items()]), draw.choice([*TIMES.items()])
            english = f"{subject.english} {does} {other.english} {time}."
            yield Pair(f"{subject.german} {verb} {when} {other.german}.", english[0].upper() + english[1:])

    @staticmethod
    def phrase(draw: random.Random, forms: dict[str, tuple[str, str]]) -> Phrase:
        """One of the nouns, with an article and an adjective."""
        noun, (gender, english) = draw.choice([*NOUNS.items()])
        (word, meaning), known = draw.choice([*WORDS.items()]), draw.random() < 0.5
        article = "the" if known else "an" if meaning[0] in "aeiou" else "a"
        german = forms[gender][0 if known else 1].format(word)
        return Phrase(f"{german} {noun}", f"{article} {meaning} {english}")
