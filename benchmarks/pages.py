"""Write README.md and the pages of docs/ that report measurements, from docs/templates and the kept results: ``make pages``.

A template is Markdown with jinja expressions for its numbers: after ``{% set main = folder("tables/main") %}``, a folder of
benchmarks/results, ``{{ main("trime").test }}`` is a test perplexity, and ``{{ main("trime") - main("vanilla") }}`` a
difference with its interval. They may call FUNCTIONS and FILTERS.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from omegaconf import OmegaConf

from benchmarks.kept import kept_in
from trime.common.metrics import perplexity
from trime.config.check import format_value
from trime.config.fields import describe_type
from trime.config.help import about, groups, schema_entries
from trime.config.rows import rows_in
from trime.report import bootstrap
from trime.report.bootstrap import Difference
from trime.report.comparison import compare_runs, order_table
from trime.report.groups import Group, group_runs, split_by_mixture
from trime.report.run_result import VOCABULARY, ScoredRun, run_from_json, scored_runs
from trime.report.tables import memory_contribution, row_name
from trime.report.terminal import ending

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES, RESULTS = ROOT / "docs" / "templates", ROOT / "benchmarks" / "results"
NOTICE = "<!-- `make pages` writes this page from docs/templates/{}: edit that one. -->\n\n"


@cache
def read(path: Path) -> Any:
    """Return the content of a JSON or YAML file."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


@cache
def kept_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a campaign by their names."""
    return kept_in(file)


@dataclass(frozen=True)
class Results:
    """One experiment's kept results, for each seed, and the row of their tables that is meant; numbers are means over seeds."""

    kept: tuple[dict[str, Any], ...]
    index: int = -1

    @property
    def cut(self) -> list[dict[str, Any]]:
        """Return the runs with the row as their last one, which is the one that reports compare."""
        stop = self.index + 1 or None
        return [run | {"metrics": {split: rows[:stop] for split, rows in run["metrics"].items()}} for run in self.kept]

    @property
    def group(self) -> Group:
        """Return the runs as one group of a report."""
        return Group(scored_runs(map(run_from_json, self.cut)))

    @property
    def papers(self) -> Results:
        """Return the last row without a fitted mixture."""
        valid = self.kept[0]["metrics"].get("valid", [{}])
        return replace(self, index=len(valid) - 2) if len(valid) > 2 and "fitted" in valid[-1] else self

    @property
    def adaptive(self) -> Results:
        """Return the row of the adaptive mixture; LookupError if there is none."""
        if self.kept[0]["metrics"]["test"][-1]["mixture"] != "adaptive":
            raise LookupError(f"{self.kept[0]['name']} has no adaptive row")
        return replace(self, index=-1)

    def row(self, index: int) -> Results:
        """Return another row: 0 is the vocabulary alone, -1 the last."""
        return replace(self, index=index)

    @property
    def rows(self) -> dict[str, Results]:
        """Return all rows by the names that tables give them."""
        labels = [row_name(row["memories"]) for row in self.kept[0]["metrics"]["test"]]
        return {label: self.row(index) for index, label in enumerate(labels)}

    @property
    def best(self) -> Results:
        """Return the row with memories that is best on dev, among those without a fitted mixture."""
        rows = self.rows.values()
        return min(
            (row for row in rows if row["row.memories"] != VOCABULARY and "fitted" not in row["dev"]), key=lambda row: row.dev
        )

    def seed(self, seed: int) -> Results:
        """Return the results of one seed."""
        return replace(self, kept=tuple(run for run in self.kept if run["seed"] == seed))

    @property
    def dev(self) -> float:
        """Return the perplexity on valid, or bits per character or byte."""
        return self.group.mean("valid")

    @property
    def test(self) -> float:
        """Return the perplexity on test, or bits per character or byte."""
        return self.group.mean("test")

    def __sub__(self, other: Results) -> Difference | None:
        """Return the difference on test with its interval; None, an empty cell, for a row less itself."""
        return None if self == other else bootstrap.difference(self.group, other.group)

    def bleu_over(self, other: Results) -> Difference | None:
        """Return the difference in BLEU with its interval; None for a row less itself."""
        return None if self == other else bootstrap.bleu_difference(self.group, other.group)

    def __getitem__(self, path: str) -> Any:
        """Return what lies under keys, as ``train.updates``: ``row`` is the row on test, ``dev`` that on valid."""
        values = []
        for run in self.cut:
            splits = [run["metrics"].get(split, [None])[-1] for split in ("test", "valid")]
            part: Any = run | {"row": splits[0] or splits[1], "dev": splits[1]}
            for key in path.split("."):
                part = part[int(key) if isinstance(part, list) else key]
            values.append(part)
        return mean(values) if all(isinstance(value, (int, float)) for value in values) else values[0]

    @property
    def search(self) -> str:
        """Return how the row's entries were searched; nothing where none are."""
        kind = self.group.row.search or ""
        return f"{kind}, recall {self['datastore.recall']:.2f}" if kind == "approximate" else kind

    def contribution(self, memory: str) -> tuple[float, Difference]:
        """Return the perplexity on test of a fitted mixture without one of its memories, and the change with it."""
        return memory_contribution(scored_runs(map(run_from_json, self.kept)), memory)


@dataclass(frozen=True)
class Folder:
    """A campaign in benchmarks/results; what is called NAME in it has the name NAME, or NAME-seed* for each seed."""

    name: str

    @property
    def kept(self) -> dict[str, dict[str, Any]]:
        """Return the results of all runs by their names."""
        return kept_results(RESULTS / f"{self.name}.jsonl")

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the results of an experiment; none if it is not there."""
        found = (fnmatch.filter(sorted(self.kept), pattern) for pattern in (name, f"{name}-seed*"))
        return [self.kept[each] for each in next(filter(None, found), [])]

    def __contains__(self, name: str) -> bool:
        return bool(self.named(name))

    def __call__(self, name: str) -> Results:
        """Return an experiment's results, with the papers' row; LookupError if there are none, or two of one seed."""
        kept = self.named(name)
        seeds = Counter(run["seed"] for run in kept)
        if not seeds or max(seeds.values()) > 1:
            raise LookupError(f"{len(kept)} results of {self.name} are named {name}, of {len(seeds)} seeds")
        return Results(tuple(kept)).papers

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Return all results of the campaign."""
        return [*self.kept.values()]

    @property
    def scored(self) -> list[ScoredRun]:
        """Return the results of all runs, as reports read them."""
        return scored_runs(map(run_from_json, self.runs))

    @property
    def printed(self) -> str:
        """Return what a command ends with that makes the runs."""
        settings = OmegaConf.create({"against": "vanilla", "published": {}, "show_published": "never"})
        compared = compare_runs(split_by_mixture(self.scored), settings)
        return ending(compared.verdict, compared.lines, compared.text_notes, "").strip("\n")

    def order(self, title: str) -> str:
        """Return how many pairs of rows have the order of a set of published results, whose title begins with ``title``."""
        sets = {name: rows for name, rows in published_sets().items() if name.startswith(title)}
        verdicts = Counter(line[-1] for line in order_table(group_runs(split_by_mixture(self.scored)), sets)[1])
        agree, none, other = (verdicts[verdict] for verdict in ("agrees", "no difference shown", "disagrees"))
        agreeing = f"{agree} of the paper's {verdicts.total()} pairs have its order"
        return f"{agreeing}, {other} the opposite, and for {none} no difference is shown"


@cache
def published_sets() -> dict[str, dict[str, list[float]]]:
    """Return every set of published results in conf/, by its title: dev and test, or test alone, by the experiment's name."""
    return dict(read(conf("published.yaml")))


def published(title: str, name: str) -> float | None:
    """Return the published test result of a row; None, an empty cell, if the paper has no such row."""
    sets = [rows for whole, rows in published_sets().items() if whole.startswith(title)]
    found = [rows[name][-1] for rows in sets if name in rows]
    if not sets or len(found) > 1:
        raise LookupError(f"{len(sets)} sets of published results begin with {title}, {len(found)} have {name}")
    return found[0] if found else None


def benchmark(name: str) -> Any:
    """Return the JSON of a benchmark: its command, hardware, rows and claims."""
    return read(RESULTS / f"{name}.json")


def entry(name: str, **conditions: Any) -> dict[str, Any]:
    """Return the only row of a benchmark that has some values; texts may have wildcards."""

    found: list[dict[str, Any]] = [
        row
        for row in benchmark(name)["rows"]
        if all(fnmatchcase(str(row.get(key)), str(value)) for key, value in conditions.items())
    ]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of {name} have {conditions}")
    return found[0]


def machine(results: Results | dict[str, Any]) -> str:
    """Return the machine of some results, as ``2 cores of an AMD EPYC``."""
    hardware = results["hardware"]
    cpu = hardware["cpu"].replace("(R)", "").partition(" Processor")[0]
    return f"one {hardware['gpu']}" if hardware["gpu"] else f"{hardware['cores']} cores of an {cpu}"


def setup(results: Results) -> str:
    """Return the budget and the machine of a run in words."""
    of_model = [f"{short(results['parameters'])} parameters"] if results["parameters"] else []
    updates = [f"{results['train.updates']:,} updates"] if results["train"].get("updates") else []
    store = [f"a store of {short(results['datastore.entries'])}"] if results.kept[0].get("datastore") else []
    tokens = f"{short(results['row.tokens'])} tokens of test"
    seeds = "one seed" if len(results.kept) == 1 else f"{len(results.kept)} seeds"
    return ", ".join([*of_model, *updates, tokens, *store, seeds, machine(results)])


def short(value: float) -> str:
    """Return a count in thousands, millions or billions: ``60k``, ``1.5M``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}".removesuffix(".0") + unit
    return f"{value:g}"


def digits(value: Any, decimals: int | None = None) -> str:
    """Return a value with some decimals: None as an empty cell, a difference with its interval."""
    if isinstance(value, Difference):
        ends = [f"{end:+,.{2 if decimals is None else decimals}f}" for end in value[:3]]
        verdict = "" if value.significant else ", no difference shown" if value.has_verdict else ", too few for a verdict"
        return f"{ends[0]} [{ends[1]}, {ends[2]}]".replace("-", "−") + verdict
    if isinstance(value, (int, float)):
        places = decimals if decimals is not None else 2 * isinstance(value, float)
        return f"{value:,.{places}f}".replace("-", "−")
    return "" if value is None else str(value)


def percent(share: float) -> str:
    """Return a share in per cent, without the sign."""
    return f"{100 * share:.0f}"


def settings(section: str = "") -> list[dict[str, str]]:
    """Return the settings of a section, or those outside of any, as the schema has them: key, default, type and help."""
    found = []
    for key, setting in schema_entries().items():
        if not setting.is_section and key.rpartition(".")[0] == section and key not in groups():
            found.append(
                {
                    "key": key,
                    "default": format_value(setting.default),
                    "type": describe_type(setting.kind),
                    "help": setting.help,
                }
            )
    return found


def sections() -> dict[str, str]:
    """Return the sections of settings with what they are about."""
    return {key: setting.help for key, setting in schema_entries().items() if setting.is_section}


def choices() -> dict[str, dict[str, str]]:
    """Return the choices of each group, a folder of conf/, and what each is about."""
    return {group: texts for group, texts in groups().items() if "/" not in group}


def published_rows(table: str) -> list[dict[str, Any]]:
    """Return the rows of a table of conf/rows/reproduce: experiment, published results, and what differs from them."""
    listed, rows = [*rows_in(conf(f"rows/reproduce/{table}.yaml"))], []
    own = "\n".join(row.text for row in listed if not row.name)
    for row in (row for row in listed if row.name):
        shared = [
            conf(f"{name[1:]}.yaml") for name in row.settings["defaults"] if str(name).startswith("/experiment/reproduce/")
        ]
        files = [file.read_text(encoding="utf-8") for file in shared if file.exists() and file.stem != "commands"]
        differs = re.findall(r"^# Deviation:? (.*)$", "\n".join([*files, own, row.text]), re.MULTILINE)
        results = published_results(table, row.name)
        rows.append({"experiment": row.experiment, "results": results, "differs": differs})
    return rows


def about_table(table: str) -> str:
    """Return what a table of conf/rows/reproduce is about."""
    return about(conf(f"rows/reproduce/{table}.yaml").read_text(encoding="utf-8"))


def published_results(table: str, row: str) -> list[str]:
    """Return what conf/published_rows.yaml has for a row, each result with its column: of its table, then of each other."""
    found = []
    for title, content in read(conf("published_rows.yaml")).items():
        is_own = title.replace(" ", "").lower() == table or (table == "released" and title == "Released checkpoints")
        given = published_sets().get(content.get("of", ""), {}).get(row, []) if is_own else []
        columns = ["test"] if len(given) == 1 else ["dev", "test"][: len(given)]
        results = dict(zip(columns, given, strict=True)) | content.get("rows", {}).get(f"reproduce/{table}/{row}", {})
        listed = ", ".join(f"{column} {value:g}" for column, value in results.items())
        found += [listed if is_own else f"{title}: {listed}"] if results else []
    return sorted(found, key=lambda listed: listed.startswith("Table"))


def conf(name: str) -> Path:
    """Return a file or folder of conf/."""
    return ROOT / "conf" / name


FUNCTIONS = (
    *(Folder, published, benchmark, entry, machine, setup, settings, sections, choices),
    *(published_rows, about_table, conf, read),
)
FILTERS = (short, digits, percent, perplexity)


def pages() -> dict[Path, str]:
    """Return every page that has a template, as it should be."""
    jinja = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, finalize=digits)
    jinja.trim_blocks = jinja.lstrip_blocks = jinja.keep_trailing_newline = True
    jinja.globals |= {function.__name__.lower(): function for function in FUNCTIONS}
    jinja.filters |= {function.__name__: function for function in FILTERS}
    return {
        ROOT / ("" if name == "README.md" else "docs") / name: NOTICE.format(name) + jinja.get_template(name).render()
        for name in jinja.list_templates(["md"])
    }


if __name__ == "__main__":
    for path, page in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(page, encoding="utf-8")
