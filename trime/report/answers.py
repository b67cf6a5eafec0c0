"""Question-answering runs: their table, and what memories kept of a context (Attendre Tables 2 to 5)."""

from __future__ import annotations

import textwrap
from statistics import mean
from typing import Any, NamedTuple

from trime.metrics import share_interval
from trime.report.figures.canvas import BLUE, ORANGE, draw_grid
from trime.report.tables import PROCESSOR_KEY, PROCESSOR_TIME, TableRows, processor_text

Runs = list[dict[str, Any]]
MEASURED = ("exact_match", "contained")  # the measures by which an answer may count
BINS = 160  # bars of a picture of what was kept


class Share(NamedTuple):
    """The share of questions that were answered, and how many there were."""

    share: float
    questions: int

    def __str__(self) -> str:
        low, high = (100 * end for end in share_interval(self.share, self.questions))
        return f"{100 * self.share:.2f} [{low:.1f}, {high:.1f}]"


def answers_table(runs: Runs) -> tuple[list[str], TableRows]:
    """Return header and lines of the table of runs, the best first by the measure that counts."""
    header = ["run", "eviction", "M", "prompt tokens", "exact match, % [95 %]", "contained, % [95 %]", "questions"]
    timed = any(map(processor_text, map(result_row, runs)))
    header += ["seed", "N", "truncated to", *[PROCESSOR_TIME] * timed, "peak MB"]
    return header, [answers_line(run, timed) for run in sorted(runs, key=lambda run: -counted(run)[1])]


def answers_line(run: dict[str, Any], timed: bool) -> list[str]:
    """Return a run's line of the table, with its processor time where ``timed``."""
    row = result_row(run)
    return [
        *(run["name"], row["eviction"], str(row["memory_size"])),
        f"{row['prompt_tokens']:,}" if "prompt_tokens" in row else "",
        *(str(Share(row[measure], row["questions"])) if measure in row else "" for measure in MEASURED),
        *(f"{row['questions']:,}", str(run["seed"]), query_size_text(row)),
        f"last {row['max_prompt_tokens']:,}" if row["max_prompt_tokens"] else "",
        *[processor_text(row)] * timed,
        f"{row['peak_memory_mb']:,.0f}",
    ]


def result_row(run: dict[str, Any]) -> dict[str, Any]:
    """Return the only row of an answering run."""
    (row,) = next(iter(run["metrics"].values()))
    return row


def query_size_text(row: dict[str, Any]) -> str:
    """Return N as configured, ``default`` if it was not set."""
    return "default" if row["query_size"] is None else str(row["query_size"])


RESULTS = {
    *("exact_match", "contained", "questions", "tokens", "prompt_tokens", "by_depth"),
    *("tokens_per_second", PROCESSOR_KEY, "peak_memory_mb", "missing_evidence"),
}
OWN_COLUMNS = {"memory_size", "query_size", "eviction", "max_prompt_tokens"}


def label_runs(runs: Runs) -> list[tuple[str, dict[str, Any]]]:
    """Label each run with its name and the settings in which runs of that name differ: only equal runs are averaged."""
    settings = [settings_of(run) for run in runs]
    labels = []
    for run, own_settings in zip(runs, settings, strict=True):
        others = [other for namesake, other in zip(runs, settings, strict=True) if namesake["name"] == run["name"]]
        differing = [key for key, value in own_settings.items() if any(other.get(key) != value for other in others)]
        labels.append(", ".join([run["name"], *(f"{key} {own_settings[key]}" for key in differing)]))
    return list(zip(labels, runs, strict=True))


def settings_of(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run's settings of model, questions and reading, without those that have columns of their own."""
    model = run.get("small_model") or {"model": run["model"]}
    questions = {key: value for key, value in run["questions"].items() if key not in ("seed", "words", "_target_")}
    questions |= {"questions": run["questions"]["_target_"].rpartition(".")[2]} if "_target_" in run["questions"] else {}
    reading = {key: value for key, value in result_row(run).items() if key not in RESULTS | OWN_COLUMNS}
    return model | questions | run.get("answering", {}) | reading


def measure_of(run: dict[str, Any]) -> str:
    """Return by which measure an answer of a run counts: exact_match or contained."""
    return str(run.get("answering", {}).get("counts", "exact_match"))


def counted(run: dict[str, Any]) -> tuple[str, float]:
    """Return the measure by which an answer of a run counts, in words, and the share of questions that were answered by it."""
    return measure_of(run).replace("_", " "), result_row(run)[measure_of(run)]


def measures(runs: Runs) -> str:
    """Return the measures by which answers of several runs count, as in ``exact match or contained``."""
    return " or ".join(sorted({counted(run)[0] for run in runs}, reverse=True))


def kept_panel(axis: Any, sample: dict[str, Any]) -> None:
    """Draw the share of layers whose memory holds each position at the end of a context, and where an answer stands."""
    kept = sample["kept"]
    width = max(1, -(-len(kept) // BINS))
    begins = range(0, len(kept), width)
    shares = [100 * mean(kept[begin : begin + width]) for begin in begins]
    axis.bar([*begins], shares, width=width, align="edge", color=BLUE, label="kept")
    for number, place in enumerate(sample["answer_at"]):
        axis.axvline(place, color=ORANGE, lw=1.2, alpha=0.8, label="an accepted answer" if number == 0 else None)
    axis.set(xlabel="position in the prompt, tokens", ylabel="kept by layers, %", ylim=(0, 105), xlim=(0, len(kept)))
    axis.set_title(f"{textwrap.shorten(sample['question'], 70)}\n{judged(sample)}", fontsize=10)
    draw_grid(axis, "y")
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def judged(sample: dict[str, Any]) -> str:
    """Return whether a question was answered correctly, in words."""
    return f"answered {'correctly' if sample['right'] else 'incorrectly'}"


def sample_note(sample: dict[str, Any]) -> str:
    """Return what a reader has to know of one question: what was asked, accepted and answered, and the text around it."""
    accepted = " or ".join(f"“{answer}”" for answer in sample["answers"][:5])
    held = [sample["kept"][place] for place in sample["answer_at"]]
    count = sum(share > 0 for share in held)
    places = f"{len(held)} place{'s' * (len(held) != 1)}"
    stood = f"An accepted answer stands in {places} of the prompt; at least one layer kept {count} of them."
    return (
        f"{sample['name']}: {sample['question']} Accepted: {accepted}; answered: “{sample['answer']}”. "
        f"{stood if held else 'No accepted answer stands in the prompt.'} Context: {sample['excerpt']}"
    )
