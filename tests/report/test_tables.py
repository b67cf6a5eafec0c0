"""Tables as CSV hold plain numbers."""

from __future__ import annotations

import csv
import io

from tests.helpers.results import grouped, made, scored
from trime.common.metrics import ResourceUsage, Usage, processor_ms
from trime.report.comparison import compare_table
from trime.report.tables import run_table, to_csv


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


def test_speed_is_the_processors_time_or_nothing() -> None:
    """Tokens a second fall when another job runs; results of earlier versions have no other measure."""
    old, new = made("m", 0, [4.0]), made("m", 0, [4.0])
    new["metrics"]["test"] = [new["metrics"]["test"][0] | {"processor_ms_per_token": 0.2836}]
    header, (line,) = run_table(scored(new))
    assert line[header.index("processor ms/token")] == "0.284"
    compared, _ = compare_table(grouped([new]), "a", {})
    assert "processor ms/token" in compared and not [title for title in (*header, *compared) if "/s" in title]
    assert "processor ms/token" not in [*run_table(scored(old))[0], *compare_table(grouped([old]), "a", {})[0]]


def test_processor_time_is_known_if_every_part_noted_it() -> None:
    usage = Usage()
    usage.add(ResourceUsage().note() | {"processor_seconds": 0.25})
    usage.add({"seconds": 1.0, "processor_seconds": 0.5, "peak_memory_mb": 1.0})
    assert processor_ms(usage.processor_seconds, 1000) == {"processor_ms_per_token": 0.75}
    usage.add({"seconds": 1.0, "peak_memory_mb": 1.0})  # of an earlier version
    assert processor_ms(usage.processor_seconds, 1000) == {}
