"""Texts of ``python cli.py --help`` and ``--help GROUP``, from the schema and from the files of conf/."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

from trime.config.reproduce import PREFIX, PublishedRow, read_table, tables
from trime.config.table_source import GROUP
from trime.config.walk import Entry, schema_entries
from trime.config.wording import written
from trime.errors import UserError

Choices = dict[str, Path | PublishedRow]  # of a group, by name
HEADER = """\
TRIME Lab: train, compare and use language models with local, long-term and external memory.

python cli.py experiment=NAME [size=tiny|small|paper] [GROUP=CHOICE] [KEY=VALUE] ...
python cli.py -m experiment=vanilla,trime seed=0,1,2            every combination
python cli.py --help evaluate                                   the settings of a section, or the choices of a group
"""
FOOTER = """\
Stages, in order (stages=[fit,encode] runs some of them; what exists is not made again):
  prepare    text to memory-mapped tokens       datastore  the index of the external memory
  pack       BM25 neighbours of segments        tune       temperatures, shares, sizes on valid
  fit        trains the model, resumes          evaluate   test, once, with what tune chose
  encode     g and masses of valid and store    report     results.json, table, picture
And by name: import (a released checkpoint), audit (does anything leak?), ledger (published results beside ours),
plan (time and disk that a larger datastore will take, on more machines), list (the finished runs), disk (what takes how
much space), prune (what no run needs; storage.delete=true deletes it),
export (export.path=DIR: model, memories and mixture in one folder, for trime.load),
generate (continues prompt_file=FILE or standard input; explain=true tells where each token came from),
init_small (a small untrained model in the transformers format, for model=pretrained),
train_small and answer (a pretrained model reads long contexts: experiment=attendre_decoder), record and replay (every
eviction policy and size over one text, of a memory inside a model or of the long one)

Often changed:
  dataset=folder dataset.path=DIR   one's own .txt files     train.updates=N        length of training
  evaluate.tokens=N                 score less text          datastore.tokens=N     a smaller store
  index=exact                       no approximation         logger=wandb|csv|none  logger.offline=false
  stages=[report] report.runs='outputs/runs/**'              one table of several runs
  checkpoint=FILE dictionary=dict.txt                        a released fairseq checkpoint instead of training
  evaluate.analysis=true            frequency, retrieval     trainer.devices=N      processes that train together
  experiment=reproduce/table2/trime                          a row of the paper's tables, at its scale
  --cfg job                         print the whole configuration
"""


def help_text(conf: Path, topic: str | None = None) -> str:
    """Return the whole help, or that of one section, setting or group; UserError if there is none."""
    named = groups(conf)
    known = {entry.key: entry for entry in schema_entries()}
    if topic is None:
        choices = [f"  {name}: {', '.join(each)}" for name, each in named.items()]
        settings = [f"  {name:<14} {entry.help}" for name, entry in known.items() if "." not in name]
        return "\n".join([HEADER, "Settings:", *settings, "", "Groups and their choices:", *choices, "", FOOTER])
    lines = [*lines_of_setting(topic, known), *lines_of_group(topic, named.get(topic, {}))]
    return "\n".join(lines or lines_of_part(topic, known, named))


def lines_of_part(topic: str, known: Mapping[str, Entry], named: Mapping[str, Choices]) -> Iterator[str]:
    """Yield the choices of a part that a group chooses; UserError with the nearest topics if there is no such group."""
    group = topic.rpartition(".")[2]
    if group not in named:
        near = difflib.get_close_matches(topic, [*known, *named], 3)
        advice = f"is it {' or '.join(near)}?" if near else "python cli.py --help lists them"
        raise UserError(f"there is no section, setting or group {topic}: {advice}")
    yield f"{topic}: its settings are those of the choice"
    yield from lines_of_group(group, named[group])


def lines_of_setting(topic: str, known: Mapping[str, Entry]) -> Iterator[str]:
    """Yield a setting, or a section's settings, one a line: key, default, help, bounds."""
    if topic in known and known[topic].is_section:
        yield f"{topic}: {known[topic].help}"
    below = (entry for key, entry in known.items() if f"{key}.".startswith(f"{topic}."))
    yield from (f"  {described(entry)}" for entry in below if not entry.is_section)


def described(entry: Entry) -> str:
    """Return a setting's line."""
    rule = entry.rule
    bounds = f" ({rule.text})" if rule and (rule.choices or rule.bounded) else ""
    return f"{entry.key}={written(entry.default)}  {entry.help}{bounds}"


def groups(conf: Path) -> dict[str, Choices]:
    """Return the choices of each group by their names: files, or rows of a published table."""
    folders = [
        folder for folder in conf.rglob("*") if folder.is_dir() and folder.parts[len(conf.parts)] not in (PREFIX, "hydra")
    ]
    found: dict[str, Choices] = {
        folder.relative_to(conf).as_posix(): {file.stem: file for file in sorted(folder.glob("*.yaml"))} for folder in folders
    }
    for table, path in tables(conf / PREFIX).items():
        found[f"{GROUP}/{table}"] = dict(read_table(path))
    return {name: choices for name, choices in sorted(found.items()) if choices}


def lines_of_group(topic: str, choices: Choices) -> Iterator[str]:
    """Yield a group's choices, each with its help."""
    if choices:
        yield f"{topic}=NAME, one of:"
    for name, choice in choices.items():
        yield f"  {name:<18} {choice.help_text() if isinstance(choice, PublishedRow) else first_comment(choice)}"


def first_comment(file: Path) -> str:
    """Return the first comment of a file that is not for Hydra."""
    comments = [line.lstrip("# ") for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    return next((line for line in comments if not line.startswith("@")), "")
