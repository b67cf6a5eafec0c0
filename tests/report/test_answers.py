"""Pictures of answered questions by eviction policy and size."""

from __future__ import annotations

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.helpers.results import answered
from trime.report.answers import answers_panels
from trime.report.canvas import LINE_COLOURS, MARKERS, line_style
from trime.report.run_result import AnsweringRun


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


def test_no_two_lines_share_colour_and_marker() -> None:
    count = len(LINE_COLOURS) * len(MARKERS)
    assert len({tuple(line_style(number).values()) for number in range(count)}) == count
