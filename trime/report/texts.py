"""The text that a run was evaluated on: which one, how it was tokenised, and how much of it was scored."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

Run = dict[str, Any]
FEW_TOKENS = 10_000  # scored tokens below which a reader is referred to the intervals
FEWEST = 10  # units (documents, parts or sentences, of each seed) below which an interval means too little for a verdict
FEW_DOCUMENTS = (
    "Test has few documents, so that intervals are over parts of them: they do not say how results vary between documents."
)
MANY_UNKNOWN = 0.02  # share of unknown tokens above which perplexity and bits per byte are much too low
UNKNOWN_NOTE = (
    "{:.1f} % of test is <unk>, which is easy to predict: perplexity and bits per byte are lower than those of a model that "
    "reads every word, such as one of byte pairs (dataset=folder_pieces)."
)


class EvaluatedText(NamedTuple):
    """What runs must share to be compared; ``tokens_hash`` is that of test's token ids, which differ between tokenisations.

    Runs of earlier versions have no ``tokens_hash`` and no ``sample``.
    """

    name: str
    fingerprint: str
    vocabulary: int | None
    tokens_hash: str | None
    sample: str | None
    scored: int

    @property
    def title(self) -> str:
        """Return what tells it from other texts, as in ``novels (3fa2c1, 32,000 symbols, starts)``."""
        symbols = f"{self.vocabulary:,} symbols" if self.vocabulary else None
        return f"{self.name} ({', '.join(filter(None, [self.fingerprint[:6], symbols, self.sample]))})"


def evaluated_text(run: Run) -> EvaluatedText:
    """Return the text that a run was evaluated on."""
    dataset = evaluated_dataset(run)
    return EvaluatedText(
        dataset["name"],
        dataset["fingerprint"],
        dataset.get("vocabulary"),
        dataset.get("test_hash"),
        run.get("sample"),
        run["metrics"]["test"][-1]["tokens"],
    )


def evaluated_dataset(run: Run) -> dict[str, Any]:
    """Return the description of the evaluated text in a run's results."""
    dataset: dict[str, Any] = run["evaluation_dataset"] if "evaluation_dataset" in run else run["dataset"]
    return dataset


def other_texts(run: Run) -> dict[str, tuple[str, str]]:
    """Return name and fingerprint of the text that a model learned from, if another one is scored, and of a datastore's.

    Runs of earlier versions have no fingerprint of a datastore's text.
    """
    found = {}
    if "evaluation_dataset" in run:
        found["trained on"] = run["dataset"]["name"], run["dataset"]["fingerprint"]
    if "dataset" in (store := run.get("datastore") or {}):
        found["datastore of"] = store["dataset"], store.get("text", "")
    return found


def text_facts(run: Run) -> str:
    """Return a line on the evaluated text: what it is, scored tokens of test, share of ``<unk>``, path."""
    dataset, text = evaluated_dataset(run), evaluated_text(run)
    of_split = dataset.get("tokens", {}).get("test")
    unknown = dataset.get("unknown", {}).get("test")
    facts = [
        f"{text.scored:,} tokens" + (f" of {of_split:,}" if of_split and of_split != text.scored else "") + " of test scored",
        *([f"{100 * unknown:.1f} % <unk>"] if unknown is not None else []),
        *([f"in {dataset['path']}"] if dataset.get("path") else []),
    ]
    return f"{text.title}: {', '.join(facts)}"


def group_by_text(runs: list[Run]) -> dict[EvaluatedText, list[Run]]:
    """Group runs by the text that they were evaluated on, in the order of the texts' names."""
    texts: dict[EvaluatedText, list[Run]] = {}
    for run in runs:
        texts.setdefault(evaluated_text(run), []).append(run)
    return {text: texts[text] for text in sorted(texts, key=lambda text: tuple(map(str, text)))}


def is_smoke_test(run: Run) -> bool:
    """Return True if a result says only that the code ran: of few tokens, in too few units for an interval."""
    return evaluated_text(run).scored < FEW_TOKENS and len(run["metrics"]["test"][-1]["documents"]) < FEWEST


def is_trained(run: Run) -> bool:
    """Return False if a run read a model as it is; runs of earlier versions, which lack the number of updates, trained."""
    return run.get("train", {}).get("updates") != 0


def text_notes(run: Run) -> list[str]:
    """Return warnings about the evaluated text: few tokens, few documents, many unknown tokens, duplicates."""
    text, row = evaluated_text(run), run["metrics"]["test"][-1]
    unknown = evaluated_dataset(run).get("unknown", {}).get("test") or 0.0
    rows = [row for of_split in run["metrics"].values() for row in of_split]
    broken = dict.fromkeys(row["memories"] for row in rows if math.isnan(row["loss"]))
    warnings = {
        f"These are {text.scored:,} tokens: a smoke test, not a result.": is_smoke_test(run),
        f"These are only {text.scored:,} tokens: judge results by their intervals, which are wide.": text.scored < FEW_TOKENS
        and not is_smoke_test(run),
        f"Results of {', '.join(broken)} are not finite (NaN): nothing can be compared with them.": bool(broken),
        FEW_DOCUMENTS: str(row.get("bootstrap_unit", "")).startswith("parts"),
        UNKNOWN_NOTE.format(100 * unknown): unknown > MANY_UNKNOWN,
    }
    return [*(note for note, applies in warnings.items() if applies), *run.get("duplicates", [])]
