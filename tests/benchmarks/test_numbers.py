"""Every number of the pages matches its JSON, and one that does not match, or has no source, is reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.numbers.check import check, check_block, pages
from benchmarks.numbers.expression import NoValueError, evaluate
from benchmarks.numbers.kept import SourceFiles
from benchmarks.numbers.markdown import Block, blocks
from benchmarks.numbers.printed import is_rounded, numbers
from benchmarks.numbers.sources import Sources
from tests.conftest import ROOT

E = 2.718281828459045
PAGE = """# A page

<!-- numbers: main
`make run` took 5 minutes := not measured here: read off a clock
of {} updates and {} pairs := value("vanilla", "train", "updates"), agreement("paper 7M")[0]
-->
`make run` took 5 minutes, a training of 300 updates
and one pairs (Table 2, Eq. 8, 9; `train.updates=300`).

<!-- numbers: main
dev := dev(row)
test := test(row)
over vanilla := difference(row, "vanilla")
paper, 7M := published("paper 7M", row)
-->
| experiment | dev | test | over vanilla | paper, 7M |
|---|---:|---:|---|---:|
| `vanilla` | 20.09 | 54.60 | | 83.66 |
| `cache` | 12.18 | **33.12** | −21.48 [−21.48, −21.48] | 68.08 |
| `same` | 20.09 | 54.60 | 0.00 [0.00, 0.00] no difference shown | |

<!-- numbers:
faster := entry("speed.json", "seconds", "MB", what=row)
the same of {} := claim("speed.json", "the same*")
-->
| | faster |
|---|---|
| ours | 1.3 s, 2,048 MB |
| the same of 10k | |

<!-- not measured here: the sizes of the set-up -->
Two cores and 24 GiB.
"""


def run(name: str, dev: float, test: float) -> dict[str, object]:
    """Return a kept result: ten documents of ten tokens, each with the same loss."""
    rows = [{"memories": "", "loss": loss, "perplexity": E**loss, "tokens": 100} for loss in (dev, test)]
    rows[1] |= {"documents": [[10 * test, 10]] * 10, "memory_size": None, "tuned": {}}
    text = {"name": "text", "fingerprint": "f", "vocabulary": 9}
    settings = {"parameters": 1, "train": {"updates": 300}, "dataset": text, "hardware": {"cpu": "A", "cores": 2}}
    return {"name": name, "seed": 0, "metrics": {"valid": [rows[0]], "test": [rows[1]]}} | settings


@pytest.fixture()
def planted(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that replaces ``old`` by ``new`` in a file of a small repository and returns all faults."""
    results, conf = tmp_path / "benchmarks" / "results", tmp_path / "conf"
    (results / "main").mkdir(parents=True)
    conf.mkdir()
    (conf / "published.yaml").write_text("paper 7M: {vanilla: [82.68, 83.66], cache: [67.45, 68.08]}")
    for name, losses in {"vanilla": (3.0, 4.0), "cache": (2.5, 3.5), "same": (3.0, 4.0)}.items():
        (results / "main" / f"{name}-seed0-ab.json").write_text(json.dumps(run(name, *losses)))
    rows, claims = [{"what": "ours", "seconds": 1.25, "MB": 2048.3}], [{"claim": "the same of more", "value": 9_800}]
    (results / "speed.json").write_text(json.dumps({"rows": rows, "claims": claims}))
    (tmp_path / "README.md").write_text(PAGE)

    def faults(file: str = "README.md", old: str = "", new: str = "") -> list[str]:
        path = tmp_path / file
        assert path.read_text().count(old) == 1 or not old
        path.write_text(path.read_text().replace(old, new) if old else path.read_text())
        return check(tmp_path)

    return faults


def test_numbers_of_the_pages_are_those_of_their_sources() -> None:
    assert check(ROOT) == []


def test_a_page_that_agrees_has_no_faults(planted: Callable[..., list[str]]) -> None:
    assert planted() == []


@pytest.mark.parametrize(
    ("old", "new", "line", "fault"),
    [
        ("| 54.60 | | 83.66", "| 54.61 | | 83.66", 18, "column test: prints 54.61, expected 54.60: test(row)"),
        ("| 54.60 | | 83.66", "| 54.60 | | 83.56", 18, "column paper, 7M: prints 83.56, expected 83.66"),
        ("`cache` | 12.18", "`same` | 12.18", 19, "column dev: prints 12.18, expected 20.09: dev(row)"),
        ("| dev | test |", "| test | dev |", 18, "column test: prints 20.09, expected 54.60: test(row)"),
        ("−21.48 [−21.48,", "+21.48 [−21.48,", 19, "column over vanilla: prints +21.48, expected -21.48"),
        ("] no difference shown", "]", 20, "column over vanilla: does not say no difference shown, expected +0.00"),
        ("of 300 updates", "of 301 updates", 7, "prints 301, expected 300"),
        ("and one pairs", "and two pairs", 7, "prints two, expected 1"),
        ("took 5 minutes, a", "took 6 minutes, a", 7, "contains 0 times what its note quotes: `make run` took 5 minutes"),
        ("(Table 2,", "(3.5 more, Table 2,", 8, "prints 3.5, which the note does not mention"),
        ("1.3 s, 2,048 MB", "1.3 s, 2,049 MB", 28, "column faster: prints 2,049, expected 2,048"),
        ("1.3 s, 2,048 MB", "1.3 s", 28, "column faster: prints 1.3, where the source has 2 numbers"),
        ("of 10k |", "of 11k |", 29, "prints 11k, expected 10k"),
        ("<!-- not measured here: the sizes of the set-up -->\n", "", 31, "prints 24 without a note that names its source"),
        ("paper, 7M := ", "no column := ", 18, "column paper, 7M: prints 83.66, which the note does not mention"),
        ("dev := dev(row)", "dev := dev(row", 18, "column dev: SyntaxError of dev(row"),
        ("dev := dev(row)", 'dev := dev("gone")', 18, 'LookupError of dev("gone"): there is no gone in benchmarks'),
        ("Two cores and 24 GiB.", "", 31, "a note about numbers has no block after it"),
    ],
)
def test_planted_errors_are_reported(planted: Callable[..., list[str]], old: str, new: str, line: int, fault: str) -> None:
    faults = planted("README.md", old, new)
    assert any(message.startswith(f"README.md:{line}: ") and fault in message for message in faults), faults


def test_a_page_that_quotes_twice_what_it_says_once_is_reported(planted: Callable[..., list[str]]) -> None:
    assert "contains 2 times" in planted("README.md", "took 5 minutes, a", "took 5 minutes, `make run` took 5 minutes, a")[0]


def test_a_changed_result_is_reported(planted: Callable[..., list[str]]) -> None:
    faults = planted("benchmarks/results/main/cache-seed0-ab.json", json.dumps(E**3.5), "33.13")
    assert faults == ["README.md:19: column test: prints 33.12, expected 33.13: test(row)"]


def test_a_changed_benchmark_is_reported(planted: Callable[..., list[str]]) -> None:
    faults = planted("benchmarks/results/speed.json", "1.25", "1.36")
    assert len(faults) == 1 and faults[0].startswith("README.md:28: column faster: prints 1.3, expected 1.4")


def test_published_results_are_those_of_the_configuration(planted: Callable[..., list[str]]) -> None:
    assert "prints 68.08, expected 68.09" in planted("conf/published.yaml", "68.08", "68.09")[0]


def test_numbers_of_a_text() -> None:
    text = (
        "A 247M model of Table 7 and Eq. 8, 9 (Lei 2021) on WikiText-103 `x=3`: −1.5 [+2, 1,024], 30k of 1.5M, 3.11.7, T5, 95 %"
    )
    assert [number[0] for number in numbers(text)] == ["−1.5", "+2", "1,024", "30k", "1.5M"]


@pytest.mark.parametrize(
    ("printed", "value", "agrees"),
    [("1.10", 1.095, True), ("1.09", 1.095, True), ("1.10", 1.0949, False), ("30k", 30_400, True), ("2.3M", 2_283_830, True)],
)
def test_printed_numbers_are_rounded_values(printed: str, value: float, agrees: bool) -> None:
    assert is_rounded(printed, value) is agrees


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "test.__self__", "[x for x in (1,)]", "(lambda: 1)()", "1 if 1 else 2"]
)
def test_expressions_know_nothing_else_of_python(expression: str) -> None:
    with pytest.raises(NoValueError):
        evaluate(expression, {"test": max})


def test_kept_results_name_the_code_or_the_commit_that_recorded_them() -> None:
    for path in (ROOT / "benchmarks" / "results").rglob("*.json"):
        kept = json.loads(path.read_text())
        assert kept["commit"] or kept["recorded_in"], path


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_number_of_the_pages_may_change(page: Path) -> None:
    """A change of the last digit of any number is reported."""
    files, changed = SourceFiles(ROOT), 0
    for block in blocks(page.read_text()):
        if block.note and not block.note.excuse:
            names = Sources(files, block.note.base).functions()
            for place, other in mutations(block):
                assert list(check_block(other, names)), f"{page.name}:{block.line_at(place)}: {other.text[place : place + 9]}"
                changed += 1
    assert changed > 300


def mutations(block: Block) -> Iterator[tuple[int, Block]]:
    """Yield the block with another last digit, for each of its numbers."""
    for number in numbers(block.text):
        last = number.start() + max(i for i, digit in enumerate(number[0]) if digit.isdigit())
        other = str((int(block.text[last]) + 2) % 10)
        yield number.start(), block._replace(text=block.text[:last] + other + block.text[last + 1 :])
