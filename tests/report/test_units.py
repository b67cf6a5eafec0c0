"""Units of results: what a metric is per, and what an interval is over."""

from __future__ import annotations

from tests.helpers.results import made
from trime.metrics import bits
from trime.report.comparison_table import compare_table
from trime.report.groups import Group
from trime.report.tables import metric_name, metric_value
from trime.report.text_comparison import units_of
from trime.run.collect import with_bits


def test_a_byte_is_no_character() -> None:
    """Rows say what their tokens are; those of earlier versions say so by their keys."""
    row = {"loss": 2.0, "perplexity": 7.39}
    for metric, value in (("perplexity", 7.39), ("bits/char", bits(2.0)), ("bits/byte", bits(2.0))):
        measured = with_bits(row, metric, 1.0)
        assert (metric_name(measured), metric_value(measured)) == (metric, value)
        assert measured["bits_per_byte"] == bits(2.0) and ("bits_per_character" in measured) is (metric == "bits/char")
    run = made("vanilla", 0, [2.0] * 12)
    run["metrics"]["test"] = [with_bits(run["metrics"]["test"][0], "bits/byte", 1.0)]
    header, lines = compare_table([Group([run])], "vanilla", {})
    assert header.count("test bits/byte") == 1 and lines[0][header.index("test bits/byte")] == f"{bits(2.0):.3f}"


def test_an_interval_over_parts_says_of_how_many_documents() -> None:
    run = made("vanilla", 0, [2.0] * 12)
    assert units_of(Group([run])) == "12 documents"
    run["metrics"]["test"][-1]["bootstrap_unit"] = "parts of 1,024 tokens"
    assert units_of(Group([run])) == "12 parts of 1,024 tokens"  # by an earlier version
    for count, words in ((1, "1 document"), (3, "3 documents")):
        assert units_of(Group([run | {"scored": {"test": {"documents": count}}}])) == f"12 parts of 1,024 tokens of {words}"
