"""Notes on a prepared text that a user should read: how it differs from the published one, and signs that it was misread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trime.data.datasets import Dataset

FEW_DOCUMENTS = 10  # number of documents below which a bootstrap draws parts of documents
MANY_UNKNOWN = 0.02  # share of unknown tokens above which results are much too good
MAX_UNKNOWN = 0.3  # share of unknown tokens above which a split was probably tokenised wrongly
MAX_UNSPACED = 0.1  # share of bytes in scripts without spaces above which words are no measure of a text
COPIED = 0.5  # share of a document that is also in another text, above which it counts as a near copy
PHRASE = "自然语言处理很有意思"  # a sentence without spaces, to see whether a tokenizer takes it for one word
MISREAD = {  # by the name of its count: what is wrong with lines, and how to mend it
    "unreadable": "are not UTF-8, undecodable bytes became U+FFFD: "
    "iconv -f latin1 -t utf-8 converts files, with the name of their encoding in place of latin1",
    "binary": "hold NUL bytes, as binary files do and UTF-16 without a byte order mark: "
    "leave such files out, or convert them (iconv -f utf-16le -t utf-8)",
}


def notes_on(dataset: Dataset, statistics: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the notes on a prepared text with these statistics of its splits."""
    yield from dataset.notes()
    for name, count in dataset.published.items():
        if name in statistics and statistics[name]["tokens"] != count:
            found = statistics[name]["tokens"]
            yield f"{name}: {found:,} tokens where {count:,} are published: {dataset.count_difference_reason}"
    for name, split in statistics.items():
        if split["unknown"] > MAX_UNKNOWN * split["tokens"]:
            share = 100 * split["unknown"] / split["tokens"]
            yield f"{name}: {share:.0f} % of the tokens are unknown: check that the tokenizer is that of the vocabulary's text"
        for kind, problem in MISREAD.items():
            if misread := split.get(kind):
                lines = f"{sum(misread.values()):,} lines of {len(misread):,} documents"
                yield f"{name}: {lines} (for instance {next(iter(misread))}) {problem}"
    documents = {name: split["documents"] for name, split in statistics.items() if name != "train"}
    if dataset.own and min(documents.values(), default=FEW_DOCUMENTS) < FEW_DOCUMENTS:
        few = ", ".join(f"{name} has {count} document{'s' * (count > 1)}" for name, count in documents.items())
        yield (
            f"{few}: below {FEW_DOCUMENTS}, intervals are over parts of documents and do not say how results vary "
            f"between documents: {dataset.more_documents}"
        )
    yield from unsuitable_words(dataset, statistics)


def unsuitable_words(dataset: Dataset, statistics: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield notes where byte pairs or bytes would suit a text better than words do."""
    shares = {name: split["unknown"] / split["tokens"] for name, split in statistics.items()}
    # A published text comes with its vocabulary, and with as many unknown tokens.
    if not dataset.published and max(shares.values(), default=0) > MANY_UNKNOWN:
        unknown = ", ".join(f"{100 * share:.1f} % of {name}" for name, share in shares.items())
        yield (
            f"{unknown} are <unk>, which is easy to predict, so that perplexity and bits per byte are too low: "
            "dataset=folder (byte pairs) or folder_bytes has none, vocabulary.min_count=1 or a larger "
            "vocabulary.max_size has fewer"
        )
    splits = statistics.values()
    share = sum(split.get("unspaced", 0) for split in splits) / sum(split["bytes"] for split in splits)
    if share > MAX_UNSPACED and any(PHRASE in symbols for symbols in dataset.tokenizer.tokens([PHRASE.encode()])):
        yield (
            f"{100 * share:.0f} % of the text is in a script without spaces between words (Chinese, Japanese, Thai …), so that "
            "whole phrases are taken for words: dataset=folder (byte pairs) or folder_bytes suits it"
        )
