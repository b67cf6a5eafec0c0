"""Tables, units and pictures of results: what a reader sees beside the numbers."""

from __future__ import annotations

import csv
import io
import math

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.helpers.results import answered, group_of, made
from trime.common.metrics import ResourceUsage, Usage, bits, processor_ms
from trime.report.answers import answers_panels
from trime.report.canvas import memory_colours
from trime.report.comparison import compare_table
from trime.report.page import sample_sections
from trime.report.passages import Entry, Sample, SampledToken
from trime.report.run_result import AnsweringRun, ScoredText
from trime.report.tables import markdown, to_csv
from trime.stages.report import with_bits


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
    ends = [(line["vs vanilla, low"], line["vs vanilla, high"]) for line in read]
    assert ends == [("-5.25", "-2.69"), ("-0.10", "+1.00"), ("", "")]
    assert [float(line["tok/s"]) for line in read] == [12345, 987, 1234.5]
    assert [(line["7M*, dev"], line["7M*, test"]) for line in read] == [("17.10", "15.51"), ("", "16.25"), ("18.00", "19.00")]
    assert [line["search"] for line in read] == [line[4] for line in lines]


def test_processor_time_is_known_if_every_part_noted_it() -> None:
    usage = Usage()
    usage.add(ResourceUsage().note() | {"processor_seconds": 0.25})
    usage.add({"seconds": 1.0, "processor_seconds": 0.5, "peak_memory_mb": 1.0})
    assert processor_ms(usage.processor_seconds, 1000) == {"processor_ms_per_token": 0.75}
    usage.add({"seconds": 1.0, "peak_memory_mb": 1.0})  # of an earlier version
    assert processor_ms(usage.processor_seconds, 1000) == {}


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


def test_lines_join_runs_that_evict_and_what_keeps_everything_is_a_level() -> None:
    policies = ["fifo", "h2o", "key_norm", "lfa c=0", "lfu", "lra_last", "lra_max", "lra_sum", "lru", "sink", "snapkv", "tova"]
    runs = [answered(policy, size, 0.4) for policy in policies for size in (128, 512)]
    (panel,) = answers_panels([AnsweringRun(**run) for run in (*runs, answered("fifo", 1024, 0.92))])
    axis = Figure().subplots()
    panel(axis)
    lines = [container.lines[0] for container in axis.containers]
    assert len(lines) == len(policies) and len({to_hex(line.get_color()) for line in lines}) == len(policies)
    assert len({line.get_marker() for line in lines}) > 8 and all(max(line.get_xdata()) < 700 for line in lines)
    (level,) = [line for line in axis.lines if line.get_linestyle() == "--"]
    assert level.get_ydata()[0] == 92
    assert all(container.has_yerr for container in axis.containers)
    low, high = (end for _, end in axis.containers[0].lines[2][0].get_segments()[0])
    assert 27 < low < 28 and 53 < high < 54, "Wilson's interval of 20 of 50"
    assert all(len(line) <= 55 for line in axis.get_title().split("\n"))


def test_the_colour_the_part_and_the_entry_are_of_one_memory() -> None:
    """A memory whose mass is spread over many neighbours is the largest, though another's single entry is larger."""
    shares, parts = {"local": 0.02, "external": 0.0003}, {"vocabulary": 0.01, "local": 0.02, "external": 0.08}
    entries = [Entry(memory=name, share=share, text="what stood before", place="a.txt") for name, share in shares.items()]
    spread = SampledToken(text="word", shown="word", probability=0.11, parts=parts, entries=entries)
    spread = spread.model_copy(update={"agreeing": {"external": (612, 1024)}})
    sample = Sample(document="a", row="r", before="", tokens=[spread])
    (section,) = sample_sections([sample], "Test text")
    (content,) = section.passages[0]["tokens"]
    assert content.colour == memory_colours([*parts])["external"] and content.sources[0].memory == "external"
    shown = [("vocabulary", "0.0100", ""), ("local", "0.0200", ""), ("external", "0.0800", "612 of 1,024 agree")]
    assert content.parts == shown and content.opened


def test_a_bar_in_a_name_parts_no_cells() -> None:
    assert markdown(["row", "value"], [["a|b", "1"]]).splitlines()[-1] == r"| a\|b |     1 |"
