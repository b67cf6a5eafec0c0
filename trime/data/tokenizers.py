"""Tokenizers: from lines of bytes to lists of symbols. A tokenizer is one class and one `_target_`."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

EOS = "<eos>"
UNKNOWN = "<unk>"
# Marks that combine with a letter, which \w leaves out: vowel signs, accents of their own; and those that join letters.
MARKS = "".join(chr(code) for code in range(0x300, 0x20000) if unicodedata.category(chr(code)) in ("Mn", "Mc", "Me"))
LETTER = rf"[\w{MARKS}\u200c\u200d]"


@runtime_checkable
class Tokenizer(Protocol):
    """Turns a document into symbols, and symbols back into text; ``characters``: a symbol is a byte or a character."""

    characters: bool

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        """Yield the symbols of a document, in lists of any size."""
        ...

    def text(self, symbols: list[str]) -> str:
        """Return symbols as readable text; white space that tokenization removed is not restored."""
        ...


def metric_of(tokenizer: Tokenizer, characters: bool) -> str:
    """Return the unit of results: perplexity, or bits per character or byte where tokens are ``characters``."""
    if not characters:
        return "perplexity"
    # Other tokenizers of single bytes, as enwik8's, call them characters, as the literature does.
    return "bits/byte" if isinstance(tokenizer, Bytes) else "bits/char"


class Whitespace:
    """Splits at white space and adds ``<eos>`` after every line, as WikiText is tokenized."""

    characters = False
    end = "\n"  # how ``<eos>`` is written in a text

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            words = line.decode("utf-8", "replace").split()
            if EOS in words:  # one that the text spells is text, and becomes three marks and words
                words = [piece for word in words for piece in (("<", "eos", ">") if word == EOS else (word,))]
            yield [*words, EOS]

    def text(self, symbols: list[str]) -> str:
        return "".join(self.end if symbol == EOS else f"{symbol} " for symbol in symbols)


class Words(Whitespace):
    """Splits into words (with inner apostrophes) and single marks; ``<eos>`` where blank lines end a paragraph."""

    end = "\n\n"
    pattern = re.compile(rf"{LETTER}+(?:['’]{LETTER}+)*|[^\w\s]")

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        in_paragraph = False
        for line in lines:
            symbols = self.pattern.findall(line.decode("utf-8", "replace"))
            if symbols:
                yield symbols
            elif in_paragraph:
                yield [EOS]
            in_paragraph = bool(symbols)

    def text(self, symbols: list[str]) -> str:
        return re.sub(r" (?=[.,;:!?)])", "", super().text(symbols))


class PythonSource(Whitespace):
    """Splits into identifiers, words, numbers, operators and marks; ``<eos>`` after every line that is not blank.

    The same rule applies within strings and comments, so that their words are words. Indentation is dropped.
    """

    pattern = re.compile(
        rf"[^\W\d]{LETTER}*"  # identifiers, keywords, words of strings and comments
        r"|\d(?:[\w.]|(?<=[eE])[+-])*"  # numbers
        r"|\*\*=|//=|>>=|<<=|\.\.\.|\*\*|//|>>|<<|<=|>=|==|!=|->|:=|[-+*/%&|^@]="  # operators
        r'|"""|\'\'\''
        r"|[^\w\s]"  # any other mark by itself
    )

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            symbols = self.pattern.findall(line.decode("utf-8", "replace"))
            if symbols:
                yield [*symbols, EOS]


class Bytes:
    """One symbol per byte. ``<eos>`` never occurs in the text; it is only the input before a document's first byte."""

    characters = True

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            yield list(line.decode("latin-1"))

    def text(self, symbols: list[str]) -> str:
        return "".join(s for s in symbols if len(s) == 1).encode("latin-1").decode("utf-8", "replace")


class ByteNumbers:
    """The number of each byte, ``<eos>`` for a newline: enwik8 as tokenized for the published models."""

    characters = True

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            yield [EOS if byte == 10 else str(byte) for byte in line]

    def text(self, symbols: list[str]) -> str:
        return bytes(10 if s == EOS else int(s) for s in symbols if s == EOS or s.isdigit()).decode("utf-8", "replace")
