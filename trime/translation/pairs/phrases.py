"""The built-in parallel text: sentences of a small German grammar with English translations. No download."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trime.translation.pairs.base import Pair

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
    """``count`` training pairs, a tenth as many in each other split; adverbs of time follow the verb, in English the object."""

    name, languages, cut, detokenize, own = "phrases", ("de", "en"), False, False, False
    location = "trime/translation/pairs/phrases.py"

    def __init__(self, count: int = 4000, seed: int = 0):
        self.count, self.seed = count, seed

    def files(self, split: str) -> list[Path]:
        """Return this module's file."""
        return [Path(__file__)]

    def notes(self) -> list[str]:
        """Return no remarks."""
        return []

    def pairs(self, split: str) -> Iterator[Pair]:
        """Yield the pairs of a split, each split with its own random state."""
        rng = random.Random(f"{self.seed} {split}")
        for _ in range(self.count if split == "train" else max(1, self.count // 10)):
            subject, object_ = self.phrase(rng, SUBJECT), self.phrase(rng, OBJECT)
            (verb, english_verb), (adverb, english_adverb) = rng.choice([*VERBS.items()]), rng.choice([*TIMES.items()])
            english = f"{subject.english} {english_verb} {object_.english} {english_adverb}."
            yield Pair(f"{subject.german} {verb} {adverb} {object_.german}.", english[0].upper() + english[1:])

    @staticmethod
    def phrase(rng: random.Random, forms: dict[str, tuple[str, str]]) -> Phrase:
        """Return a random noun phrase with an article and an adjective."""
        noun, (gender, english) = rng.choice([*NOUNS.items()])
        (word, meaning), definite = rng.choice([*WORDS.items()]), rng.random() < 0.5
        article = "the" if definite else "an" if meaning[0] in "aeiou" else "a"
        german = forms[gender][0 if definite else 1].format(word)
        return Phrase(f"{german} {noun}", f"{article} {meaning} {english}")
