"""What is printed at the end: five columns that fit, the best first, and a verdict that says how sure it is."""

from __future__ import annotations

import logging
import re

import pytest

from tests.helpers.results import grouped, made, scored
from trime.lab.sweep import show_news_alone
from trime.report.comparison import compare_table
from trime.report.run_result import ScoredRun
from trime.report.tables import Table, memories_of, row_name, run_table
from trime.report.terminal import WIDTH, best_verdict, ending, fit_columns, run_lines, run_verdict, runs_lines, runs_verdict

LOSSES = [3.0 + 0.01 * number for number in range(12)]


def shifted(name: str, by: float, seed: int = 0) -> dict[str, object]:
    return made(name, seed, [loss + by for loss in LOSSES])


def with_rows(*shifts: float) -> ScoredRun:
    """Return a run whose rows differ by shifts of every document's loss, the first without memories."""
    parts = [shifted("m", shift) for shift in shifts]
    names = ["vocabulary", *(f"vocabulary + {number}" for number in range(1, len(shifts)))]
    own = [part["metrics"]["test"][-1] | {"memories": name} for part, name in zip(parts, names, strict=True)]  # type: ignore[index]
    return scored(parts[0] | {"metrics": {"valid": own, "test": own}})


def test_long_cells_wrap_and_nothing_is_cut_off() -> None:
    label = "trime model.backbone.layers=[" + ",".join(map(str, range(60))) + "]"
    text = fit_columns(
        Table(["run", "test", "hidden", "vs"], [[label, "1.00", "x", "-0.5 [-0.6, -0.4]"]]), ["run", "test", "vs"]
    )
    assert max(map(len, text.splitlines())) <= WIDTH and "hidden" not in text and "-0.5 [-0.6, -0.4]" in text
    assert label.replace(" ", "") in "".join(line.split("  ")[0].strip() for line in text.splitlines()[2:]).replace(" ", "")


def test_the_best_row_comes_first_and_the_verdict_is_on_the_last() -> None:
    run = with_rows(0.0, -0.2, -0.1)
    lines = run_lines(run, run_table(run)).splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["1 (Eq. 6)", "2 (Eq. 6)", "no memory"]
    verdict = run_verdict(run)
    assert f"test perplexity {run.row.value:.2f}, -" in verdict and verdict.endswith("against the model without memories.")
    trained = scored(run.to_json() | {"trained_with_memory": True})
    assert "no memory, 95 %" not in " ".join(run_table(trained).header) and "vanilla" in run_verdict(trained), "no baseline"


def test_a_verdict_says_how_sure_it_is() -> None:
    sure = best_verdict(grouped([shifted("a", 0.0), shifted("b", -0.1), shifted("c", 0.3)]))
    assert ", b has the best test perplexity" in sure and "against a" in sure
    noise = made("d", 0, [loss + (0.3 if number % 2 else -0.31) for number, loss in enumerate(LOSSES)])
    assert "no difference from a is shown" in best_verdict(grouped([shifted("a", 0.0), noise]))
    few = best_verdict(grouped([made("a", 0, [3.0, 3.1]), made("b", 0, [2.9, 3.0])]))
    assert "2 parts are too few for a verdict" in few
    (alone,) = grouped([shifted("a", 0.0)])
    assert best_verdict([alone]).endswith(f"test perplexity {alone.mean('test'):.2f}.")


def test_a_comparison_has_at_most_five_columns() -> None:
    groups = grouped([shifted(name, by, seed) for name, by in (("vanilla", 0.1), ("trime", 0.0)) for seed in (0, 1)])
    text = runs_lines(compare_table(groups, "vanilla", {"paper": {"trime": [1.0]}}), "perplexity", "vanilla")
    header, _, best, worst = text.splitlines()
    assert "paper" not in text and header.split("  ")[0] == "run" and best.startswith("trime") and worst.startswith("vanilla")
    notes = ["A note of some length: " + "explained " * 20, "Another note with words and words. " * 20, "c", "d", "e"]
    printed = ending("A verdict. " * 20, text, notes, "page: p")
    assert max(map(len, printed.splitlines())) <= WIDTH and printed.endswith("page: p")
    assert printed.strip().startswith("A verdict.") and "\nA note of some length.\n" in printed
    assert "\nc\n2 more notes on the page.\n" in printed and "\nd" not in printed


def with_memories(name: str, by: float, memories: str, trained: bool) -> dict[str, object]:
    """Return a run whose only row has some memories."""
    run = shifted(name, by)
    rows = {split: [row | {"memories": memories} for row in run["metrics"][split]] for split in ("valid", "test")}  # type: ignore[index]
    return run | {"metrics": rows, "trained_with_memory": trained}


def test_the_first_line_says_whether_a_memory_helps() -> None:
    """The plain model, the same memories at test, and training for them, each beside the one before it."""
    plain = with_memories("vanilla", 0.0, "vocabulary", False)
    knn, same = (with_memories(*words, False) for words in (("knn_lm", -0.9, ALONE), ("knn_lm_cache", -0.2, FITTED)))
    trained, worse = (with_memories(*words, True) for words in (("trime_ext", -0.5, JOINED), ("trime", -0.1, JOINED)))
    first, second = runs_verdict(grouped([knn, trained, plain, worse, same])).splitlines()
    values = [f"{run['metrics']['test'][-1]['perplexity']:.2f}" for run in (plain, same, trained)]  # type: ignore[index]
    assert re.sub(r" \([^)]*\)", "", first) == "plain {} · with memories at test {} · trained for them {}".format(*values)
    assert first.count("[") == 1 and "vanilla; knn_lm_cache; trime_ext" in second, "knn_lm has other memories"
    assert "· trained for memory " in runs_verdict(grouped([plain, trained, knn])), "nothing has the same memories at test"
    useless = with_memories("knn_lm_cache", 0.0, FITTED, False)
    assert runs_verdict(grouped([plain, useless, trained])).count("no difference shown") == 1
    assert "with memories at test" in runs_verdict(grouped([plain, knn])) and "knn_lm" in runs_verdict(grouped([plain, knn]))
    assert "has the best" in runs_verdict(grouped([knn, trained])), "without a plain model, the best run beside the next"


ALONE, JOINED, FITTED = "vocabulary ⊕ (external)", "vocabulary + local + external", "adaptive: vocabulary, local, external"


@pytest.mark.parametrize(
    ("label", "name", "memories"),
    [
        ("vocabulary", "no memory", ""),
        ("vocabulary + local + long", "local + long (Eq. 6)", "local long"),
        ("vocabulary + local + external ⊕ (local + external)", "local + external ⊕ all (Eq. 9)", "local external"),
        ("vocabulary + local + external ⊕ (external)", "local + external ⊕ external (Eq. 9, released)", "local external"),
        ("vocabulary + local ⊕ (external)", "local ⊕ external", "local external"),
        ("vocabulary ⊕ (local + long) ⊕ (external)", "⊕ (local + long) ⊕ external", "local long external"),
        (FITTED, "adaptive: local, external", "local external"),
    ],
)
def test_a_row_is_named_by_its_memories_and_its_equation(label: str, name: str, memories: str) -> None:
    assert row_name(label) == name and memories_of(label) == {*memories.split()}


def test_a_sweep_shows_each_warning_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    log, shown = logging.getLogger("trime"), set[str]()
    for _ in range(2):  # Hydra makes the handlers anew for each run
        monkeypatch.setattr(log, "handlers", [logging.StreamHandler()])
        show_news_alone(shown)
        log.warning("few documents")
        log.info("made something")
    assert capsys.readouterr().err == "few documents\n"
