"""Report one run from its results: tables, pictures, page, and the model card of its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trime.common.io import write_atomically
from trime.report import tables
from trime.report.answers import answers_table
from trime.report.canvas import save_panels
from trime.report.figures import configured_figures
from trime.report.page import Page, Section, commands_section, picture_sections, write_page
from trime.report.run_result import AnsweringRun, ScoredRun
from trime.report.tables import Table

TOKENS = "tokens.jsonl"  # every scored token of test, if evaluate.per_token asks for it
MODEL_CARD = """\
---
library_name: trime
pipeline_tag: text-generation
tags: [memory-augmented, language-model, trime]
---

# {name}

A language model with memories, made by TRIME Lab {version}{parameters}. Its results are those of the last row below.

{warning}## Results

{facts}. Temperatures, weights and sizes were tuned on dev.

{table}
{note}## Use

```python
import trime

model = trime.load("FOLDER")  # this folder
model.generate("A text begins")
for token in model.score("A text")[0]:
    print(token.text, token.probability, token.parts)  # what comes from the vocabulary and from each memory
```

## How it was made

`{command}`, commit {commit}, {packages}, on {machine}. `results.json` has all of it.
"""
WARNING = """\
> **The memories of this model disclose their text.** {memories} hold{s} text, which whoever has this folder
> can read: publish it only if you may publish that text.

"""


def result_sections(run: ScoredRun, folder: Path, table: Table, verdict: str) -> list[Section]:
    """Write the tables of a run, that of its rows with its notes; return the sections of its rows and its memories."""
    notes = notes_of(run)
    text = "\n".join([tables.markdown(*table), *(f"{note}\n" for note in notes)])
    write_atomically(folder / "table.md", text)
    write_atomically(folder / "table.csv", tables.to_csv(*table))
    note = f"{verdict}\n{tables.common_facts(run)}"
    sections = [Section("Results", note, [tables.without_common(table)], footnotes=notes, emphasise_last=True)]
    further = {"analysis.md": tables.analysis_text(run)} if run.analysis else {}
    if run.subsets:
        title, memories = tables.memories_table(run, run.subsets)
        further = {"memories.md": f"{title}:\n\n{tables.markdown(*memories)}\n{tables.MEMORIES_NOTE}\n"} | further
        sections.append(Section(title, tables.MEMORIES_NOTE, [memories]))
    for name, content in further.items():
        write_atomically(folder / name, content)
    return sections


def notes_of(run: ScoredRun) -> list[str]:
    """Return the notes on a run's text and rows."""
    notes = {
        tables.MIXTURES_NOTE: any("⊕" in row.memories for row in run.metrics["test"]),
        tables.FITTED_NOTE: run.is_fitted,
        tables.EDGE_NOTE: any(row.at_grid_edge for row in run.metrics["valid"]),
    }
    return [*tables.text_notes(run), *(note for note, applies in notes.items() if applies)]


def write_run_page(
    run: ScoredRun, folder: Path, sections: list[Section], figures: Any, further: list[Section]
) -> tuple[dict[str, Path], Path]:
    """Draw the pictures of a run and write its page; return the pictures by name, and the page.

    ``sections`` come before those of the pictures, ``further`` ones after them; ``figures`` are those of ``report.figures``.
    """
    headline, pictures = f"{run.name} on {run.title}, seed {run.seed}", dict[str, Path]()
    for name, figure in configured_figures(figures).items():
        if panels := figure.panels(run, folder / "metrics.csv"):
            pictures[name] = save_panels(panels, folder / f"{name}.png", headline, figure.height(run))
            sections = [*sections, *picture_sections(figure.title, panels, figure.note)]
    facts = [
        tables.text_facts(run),
        f"seed {run.seed}",
        *([f"{run.parameters:,} parameters"] if run.parameters else []),
        *([f"{run.train.updates:,} updates"] if run.train.updates else []),
        *([] if run.is_trained else ["not trained"]),
        f"{run.hardware['gpu'] or run.hardware['cpu']}, {run.hardware['cores']} cores",
        f"commit {(run.commit or 'unknown')[:12]}",
    ]
    files = ["results.json", "config.yaml", "table.csv", "metrics.csv", TOKENS, "log.txt"]
    page = Page(run.name, facts, [*sections, *further, commands_section([run])], files)
    return pictures, write_page(page, folder / "page.html")


def write_answers_page(run: AnsweringRun, folder: Path) -> Path:
    """Write table and page of an answering run; return the page."""
    table = answers_table([run])
    write_atomically(folder / "table.csv", tables.to_csv(*table))
    note = "In brackets Wilson's 95 % intervals over questions. M and N are entries and waiting queries of each layer's memory."
    facts = [f"seed {run.seed}", f"split {''.join(run.metrics)}", f"commit {(run.commit or 'unknown')[:12]}"]
    sections = [Section("Results", note, [table]), commands_section([run])]
    return write_page(Page(run.name, facts, sections, ["results.json", "config.yaml", "table.csv"]), folder / "page.html")


def model_card(run: ScoredRun, disclosed: list[str]) -> str:
    """Return the model card of a run, with a warning that names the memories whose text is exported (``disclosed``)."""
    note, parameters = " ".join(tables.text_notes(run)), f", of {run.parameters:,} parameters" if run.parameters else ""
    return MODEL_CARD.format(
        name=run.name,
        version=run.versions.get("trime", ""),
        parameters=parameters,
        warning=WARNING.format(memories=" and ".join(disclosed), s="s" * (len(disclosed) == 1)) if disclosed else "",
        facts=tables.text_facts(run),
        table=tables.markdown(*tables.run_table(run)),
        note=f"{note}\n\n" if note else "",
        command=run.command or "unknown",
        commit=run.commit or "unknown",
        packages=", ".join(f"{name} {run.versions[name]}" for name in ("python", "torch") if name in run.versions),
        machine=run.hardware["gpu"] or f"{run.hardware['cores']} cores of {run.hardware['cpu']}",
    )
