"""Units of results: what a metric is per, and what an interval is over."""

from __future__ import annotations

import math

import pytest

from tests.helpers.results import group_of, made
from trime.common.metrics import bits
from trime.report.comparison import compare_table, units_of
from trime.report.run_result import ScoredText
from trime.stages.collect import with_bits


def test_a_byte_is_no_character() -> None:
    """Rows say what their tokens are; those of earlier versions say so by their keys."""
    run, text = made("vanilla", 0, [2.0] * 12), ScoredText(tokens=5, bytes=5, documents=1)
    row = run["metrics"]["test"][0]
    for metric, value in (("perplexity", math.exp(2)), ("bits/char", bits(2.0)), ("bits/byte", bits(2.0))):
        measured = with_bits(row, metric, text)
        assert measured.metric_name == metric and measured.value == pytest.approx(value)
        assert measured.bits_per_byte == bits(2.0) and (measured.bits_per_character is not None) is (metric == "bits/char")
    run["metrics"]["test"] = [with_bits(row, "bits/byte", text).to_json()]
    header, lines = compare_table([group_of([run])], "vanilla", {})
    assert header.count("test bits/byte") == 1 and lines[0][header.index("test bits/byte")] == f"{bits(2.0):.3f}"


def test_an_interval_over_parts_says_of_how_many_documents() -> None:
    run = made("vanilla", 0, [2.0] * 12)
    assert units_of(group_of([run])) == "12 documents"
    run["metrics"]["test"][-1]["bootstrap_unit"] = "parts of 1,024 tokens"
    assert units_of(group_of([run])) == "12 parts of 1,024 tokens"  # by an earlier version
    for count, words in ((1, "1 document"), (3, "3 documents")):
        of_documents = {"scored": {"test": {"tokens": 9, "bytes": 9, "documents": count}}}
        assert units_of(group_of([run | of_documents])) == f"12 parts of 1,024 tokens of {words}"
