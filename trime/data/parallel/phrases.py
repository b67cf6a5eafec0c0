"""The built-in parallel text: sentences of a small German grammar with English translations. No download."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from trime.data.parallel.folder import Pair, Parallel

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


class Phrases(Parallel):
    """``count`` training pairs, a tenth as many in each other split; adverbs of time follow the verb, in English the object."""

    name, location, languages = "phrases", "trime/data/parallel/phrases.py", ("de", "en")

    def __init__(self, count: int = 4000, seed: int = 0):
        self.count, self.seed = count, seed

    def files(self, split: str) -> list[Path]:
        """Return this module's file."""
        return [Path(__file__)]

    def pairs(self, split: str) -> Iterator[Pair]:
        """Yield the pairs of a split, each split with its own random state."""
        rng = random.Random(f"{self.seed} {split}")
        for _ in range(self.count if split == "train" else max(1, self.count // 10)):
            (german, english), (german_object, english_object) = phrase(rng, SUBJECT), phrase(rng, OBJECT)
            (verb, english_verb), (adverb, english_adverb) = rng.choice([*VERBS.items()]), rng.choice([*TIMES.items()])
            translation = f"{english} {english_verb} {english_object} {english_adverb}."
            yield Pair(f"{german} {verb} {adverb} {german_object}.", translation[0].upper() + translation[1:])


def phrase(rng: random.Random, forms: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Return a random noun with an article and an adjective, in German and in English."""
    noun, (gender, english) = rng.choice([*NOUNS.items()])
    (word, meaning), definite = rng.choice([*WORDS.items()]), rng.random() < 0.5
    article = "the" if definite else "an" if meaning[0] in "aeiou" else "a"
    german = forms[gender][0 if definite else 1].format(word)
    return f"{german} {noun}", f"{article} {meaning} {english}"
