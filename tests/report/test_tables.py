"""Tables as CSV hold plain numbers."""

from __future__ import annotations

import csv
import io

from tests.helpers.results import made
from trime.metrics import bits
from trime.report.comparison_table import compare_table
from trime.report.groups import Group
from trime.report.tables import metric_name, metric_value, to_csv
from trime.report.text_comparison import units_of
from trime.run.collect import with_bits


def test_csv_holds_plain_numbers() -> None:
    """No separators of thousands; an interval, and dev and test results, in columns of their own; text as it is."""
    header = ["run", "vs vanilla", "tok/s", "7M*", "search"]
    lines = [
        ["trime, K = 1,024", "-4.01 [-5.25, -2.69]", "12,345", "17.10 / 15.51", "approximate, recall 0.97"],
        ["cache", "+0.50 [-0.10, +1.00] no difference shown", "987", "16.25", ""],
        ["one part", "+0.25 one part, one seed: no interval", "1,234.5", "18.00 / 19.00", ""],
    ]
    read = [*csv.DictReader(io.StringIO(to_csv(header, lines)))]
    assert [line["run"] for line in read] == [line[0] for line in lines]
    assert [line["vs vanilla"] for line in read] == ["-4.01", "+0.50", "+0.25"]
    assert [(line["vs vanilla, low"], line["vs vanilla, high"]) for line in read] == [
        ("-5.25", "-2.69"),
        ("-0.10", "+1.00"),
        ("", ""),
    ]
    assert [float(line["tok/s"]) for line in read] == [12345, 987, 1234.5]
    assert [(line["7M*, dev"], line["7M*, test"]) for line in read] == [("17.10", "15.51"), ("", "16.25"), ("18.00", "19.00")]
    assert [line["search"] for line in read] == [line[4] for line in lines]


def test_a_table_without_lines_has_its_header() -> None:
    assert to_csv(["run", "test"], []) == "run,test\r\n"


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
