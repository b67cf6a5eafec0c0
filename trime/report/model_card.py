"""The model card of an exported run, from its results alone."""

from __future__ import annotations

from trime.report.run_result import ScoredRun
from trime.report.tables import markdown, run_table, text_facts, text_notes

TEMPLATE = """\
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


def model_card(run: ScoredRun, disclosed: list[str]) -> str:
    """Return the model card of a run, with a warning that names the memories whose text is exported (``disclosed``)."""
    note, parameters = " ".join(text_notes(run)), f", of {run.parameters:,} parameters" if run.parameters else ""
    return TEMPLATE.format(
        name=run.name,
        version=run.versions.get("trime", ""),
        parameters=parameters,
        warning=WARNING.format(memories=" and ".join(disclosed), s="s" * (len(disclosed) == 1)) if disclosed else "",
        facts=text_facts(run),
        table=markdown(*run_table(run)),
        note=f"{note}\n\n" if note else "",
        command=run.command or "unknown",
        commit=run.commit or "unknown",
        packages=", ".join(f"{name} {run.versions[name]}" for name in ("python", "torch") if name in run.versions),
        machine=run.hardware["gpu"] or f"{run.hardware['cores']} cores of {run.hardware['cpu']}",
    )
