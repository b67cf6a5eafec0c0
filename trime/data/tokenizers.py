"""Tokenizers: lines of bytes in, lists of symbols out. A tokenizer is one class and one `_target_`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

EOS = "<eos>"
UNKNOWN = "<unk>"


@runtime_checkable
class Tokenizer(Protocol):
    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        """The symbols of a document, in pieces of any size."""
        ...

    def text(self, symbols: list[str]) -> str:
        """Symbols as a reader would want them; white space that was lost is not known."""
        ...


def spaced(symbols: list[str], end: str) -> str:
    """Symbols between spaces, ``end`` for every ``<eos>``."""
    return "".join(end if symbol == EOS else f"{symbol} " for symbol in symbols)


class Whitespace:
    """Symbols between white space, ``<eos>`` after every line: the way of WikiText."""

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            yield [*line.decode("utf-8", "replace").split(), EOS]

    def text(self, symbols: list[str]) -> str:
        return spaced(symbols, "\n")


class Words:
    """Words (with inner apostrophes) and single marks; ``<eos>`` where one or more blank lines end a paragraph."""

    pattern = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        inside = False
        for line in lines:
            found = self.pattern.findall(line.decode("utf-8", "replace"))
            if found:
                yield found
            elif inside:
                yield [EOS]
            inside = bool(found)

    def text(self, symbols: list[str]) -> str:
        return re.sub(r" (?=[.,;:!?)])", "", spaced(symbols, "\n\n"))


class PythonSource:
    """Identifiers and words, numbers, operators, single marks; ``<eos>`` after every line that is not blank.

    Strings and comments are cut by the same rule, so that their words are words. Indentation is dropped.
    """

    pattern = re.compile(
        r"[^\W\d]\w*"  # identifiers, keywords, words of strings and comments
        r"|\d(?:[\w.]|(?<=[eE])[+-])*"  # numbers
        r"|\*\*=|//=|>>=|<<=|\.\.\.|\*\*|//|>>|<<|<=|>=|==|!=|->|:=|[-+*/%&|^@]="  # operators
        r'|"""|\'\'\''
        r"|[^\w\s]"  # any other mark by itself
    )

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            found = self.pattern.findall(line.decode("utf-8", "replace"))
            if found:
                yield [*found, EOS]

    def text(self, symbols: list[str]) -> str:
        return spaced(symbols, "\n")


class Bytes:
    """One symbol a byte. ``<eos>`` never occurs in the text; it is only the input before a first byte."""

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            yield list(line.decode("latin-1"))

    def text(self, symbols: list[str]) -> str:
        return "".join(s for s in symbols if len(s) == 1).encode("latin-1").decode("utf-8", "replace")


class ByteNumbers:
    """The number of each byte, ``<eos>`` for a newline: enwik8 as the published models read it."""

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            yield [EOS if byte == 10 else str(byte) for byte in line]

    def text(self, symbols: list[str]) -> str:
        return bytes(10 if s == EOS else int(s) for s in symbols if s == EOS or s.isdigit()).decode("utf-8", "replace")
