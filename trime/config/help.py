"""Texts of ``python cli.py --help`` and ``--help TOPIC``, from the schema and from the files of conf/."""

from __future__ import annotations

import difflib
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

from trime.config.check import format_value
from trime.config.fields import describe_type
from trime.config.folder import CONF
from trime.config.rows import all_rows
from trime.config.schema import Settings
from trime.errors import UserError

OVERVIEW = """\
TRIME Lab: train, compare and use language models with local, long-term and external memory.

  python cli.py experiment=NAME [SETTING=VALUE] ...         one run; the same command resumes it
  python cli.py -m experiment=vanilla,trime seed=0,1,2      every combination, and a table of all

Experiments (all of them: --help experiment):
  trime, trime_long, trime_ext                              TRIME with local, long-term and external memory
  trime_all, trime_all_ngram                                every memory at test, and n-grams
  vanilla, cache, cache_long, knn_lm, knn_lm_cache, ngram_lm   baselines
  memorizing, transformer_xl, srupp, trime_xl               memories inside the model
  decoder_memory model.name=DIR dataset.path=DIR            your decoder with memories of your text
  attendre_train_small, attendre_decoder                    evicting memories that answer questions
  mt_vanilla, knn_mt, trime_mt                              translation
  reproduce/table2/trime                                    a row of the paper's tables, at its scale

Settings that people change:
  dataset=folder dataset.path=DIR   your own text files     size=tiny|small|paper    of model, batches and training
  train.updates=N                   length of training      seed=0                   of everything drawn
  evaluate.tokens=N                 score less text         datastore.tokens=N       a smaller store
  index=exact                       no approximation        logger=csv|none          without W&B
  mixture=none                      the papers' rows alone  paths.outputs=DIR        where results go
  stages=[report] report.runs='outputs/runs/**'             one table of finished runs

{topics}
Stages, in order (stages=[fit,encode] runs some): import prepare pack fit encode index tune evaluate report; by name: audit,
export, generate, serve, init_small, train_small, answer; of all runs: list, disk, prune"""


class Entry(NamedTuple):
    """A setting or a section of the schema: its type, default and help."""

    kind: Any
    default: Any
    help: str

    @property
    def is_section(self) -> bool:
        """Whether it holds settings of its own."""
        return is_dataclass(self.kind)


def schema_entries(section: type = Settings, prefix: str = "") -> dict[str, Entry]:
    """Return the settings and sections of a section by their keys, a section before its settings."""
    hints, values, entries = typing.get_type_hints(section, include_extras=True), section(), {}
    for field in fields(section):
        key = f"{prefix}{field.name}"
        entries[key] = Entry(hints[field.name], getattr(values, field.name), field.metadata["help"])
        if entries[key].is_section:
            entries |= schema_entries(hints[field.name], f"{key}.")
    return entries


@cache  # a message or a page asks for them again and again
def groups() -> dict[str, dict[str, str]]:
    """Return the subject of each choice of a group: of the files in a folder of conf/, and of the rows in conf/rows."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(CONF.rglob("*.yaml")):
        group = file.parent.relative_to(CONF).as_posix()
        if group.split("/")[0] not in (".", "hydra", "rows"):
            found.setdefault(group, {})[file.stem] = about(file.read_text(encoding="utf-8"))
    for row in all_rows():
        if row.name:
            found.setdefault(f"experiment/{row.group}", {})[row.name] = about(row.text)
    return dict(sorted(found.items()))


def help_text(topic: str | None = None) -> str:
    """Return the overview, or the help of a section, setting or group; UserError with similar names if there is none."""
    known, chosen = schema_entries(), groups()
    if topic is None:
        top = {name: entry for name, entry in known.items() if "." not in name and name not in chosen}
        names = {
            "Settings": [name for name, entry in top.items() if not entry.is_section],
            "Sections": [name for name, entry in top.items() if entry.is_section],
            "Groups": [name for name in chosen if "/" not in name],
        }
        lines = [textwrap.fill(f"{title}: {', '.join(each)}", 120) for title, each in names.items()]
        topics = ["The rest (--help TOPIC explains one; --cfg job prints all values):", *lines]
        return OVERVIEW.format(topics="\n".join(topics))
    lines = [*lines_of_settings(topic, known), *lines_of_group(topic, chosen)]
    if not lines and (group := topic.rpartition(".")[2]) in chosen:  # as model.backbone
        lines = [f"{topic}: its settings are those of the choice", *lines_of_group(group, chosen)]
    if not lines:
        near = difflib.get_close_matches(topic, [*known, *chosen], 3)
        advice = f"is it {' or '.join(near)}?" if near else "python cli.py --help lists them"
        raise UserError(f"there is no section, setting or group {topic}: {advice}")
    return "\n".join(lines)


def about(content: str) -> str:
    """Return the first sentence of a yaml text's comments, without the line that names its package; empty if there is none."""
    comments = [line for line in content.splitlines() if line.startswith("# ")]
    lines = takewhile(lambda line: not line.startswith("#  "), comments)  # up to a command, which is indented
    text = " ".join(line.lstrip("# ") for line in lines if not line.startswith("# @"))
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


def lines_of_settings(topic: str, known: dict[str, Entry]) -> Iterator[str]:
    """Yield a section and its settings, or one setting, one a line: key, default, help and type."""
    for key, entry in known.items():
        if key == topic and entry.is_section:
            yield f"{key}: {entry.help}"
        elif f"{key}.".startswith(f"{topic}.") and not entry.is_section:
            yield f"  {key}={format_value(entry.default)}  {entry.help} ({describe_type(entry.kind)})"


def lines_of_group(topic: str, chosen: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield the choices of a group, each with the first comment of its file, and the groups inside it."""
    if topic in chosen:
        yield f"{topic}=NAME, one of:"
    for name, text in chosen.get(topic, {}).items():
        yield f"  {name:<18} {text}"
    for name, choices in chosen.items():
        if name.startswith(f"{topic}/"):
            yield f"  {name.removeprefix(f'{topic}/')}/ {', '.join(choices)}"
