"""The recipes of docs/extend: written into a copy of the project as they are printed, run, and really used."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.conftest import NO_PICTURES, ROOT

PAGES = {  # each recipe by its title
    recipe.partition("\n")[0]: recipe
    for page in (ROOT / "docs" / "extend").glob("*.md")
    for recipe in re.split(r"^## ", page.read_text(), flags=re.M)[1:]
}
RUNNER = """
import json, sys
from trime.lab import command_line

for title, command in json.loads(sys.argv[1]):
    sys.argv = command
    if command_line.main():
        sys.exit(f"{title}: {command} failed")
"""  # one process starts only once


def files_of(text: str) -> dict[str, str]:
    """Return the content of each file that a text shows, by its path."""
    return dict(re.findall(r"`([\w/.]+)`:\n\n```(?:python|yaml)\n(.*?)```", text, re.S))


def commands_of(text: str) -> list[list[str]]:
    """Return the arguments of each command line of a text that starts cli.py."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S)).replace("\\\n", " ")
    return [shlex.split(line, comments=True)[1:] for line in blocks.splitlines() if line.startswith("python cli.py")]


EXAMPLES = [title for title, text in PAGES.items() if commands_of(text)]


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project with the files of every example, and a folder of poems."""
    folder = tmp_path_factory.mktemp("contributing")
    for name in ("cli.py", "conf", "trime"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for name, content in files_of("\n".join(PAGES.values())).items():
        assert not (folder / name).exists(), f"{name} of a recipe exists already"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "poems").mkdir()
    for number in range(8):
        (folder / "poems" / f"{number}.txt").write_text("a rose is a rose\nis a rose and so on\n\n" * 60)
    return folder


@pytest.mark.slow
def test_examples_are_used(project: Path, tmp_path: Path) -> None:
    """Each command ends in results that show the example."""
    commands = [
        (title, [*words, f"paths.outputs={tmp_path / str(number)}", *NO_PICTURES])
        for number, title in enumerate(EXAMPLES)
        for words in commands_of(PAGES[title])
    ]
    command, environment = [sys.executable, "-c", RUNNER, json.dumps(commands)], os.environ | {"PYTHONPATH": str(project)}
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    for number, title in enumerate(EXAMPLES):
        assert CHECKS[title](tmp_path / str(number)), f"{title}: its results do not show it"


def results_of(outputs: Path) -> dict[str, Any]:
    """Return results.json of the only run below a folder."""
    (file,) = outputs.glob("runs/*/*/results.json")
    return json.loads(file.read_text())


def settings_of(outputs: Path) -> Any:
    """Return config.yaml of the only run below a folder."""
    (file,) = outputs.glob("runs/*/*/config.yaml")
    return OmegaConf.load(file)


def rows_of(outputs: Path) -> list[str]:
    """Return the names of the rows of the only run's table."""
    return [row["memories"] for row in results_of(outputs)["metrics"]["test"]]


def shows_index(outputs: Path) -> bool:
    """Return True if the datastore was searched by the example's index, and its recall measured."""
    datastore = results_of(outputs)["datastore"]
    return datastore["index"].endswith(".RandomProjection") and 0 < datastore["recall"] < 1


def shows_stage(outputs: Path) -> bool:
    """Return True if the stage made its artefact, of the two poems that are held out for test."""
    (file,) = outputs.glob("artefacts/lengths-*/lengths.json")
    lengths = json.loads(file.read_text())
    return len(lengths) == 2 and min(lengths) > 100


def shows_table(outputs: Path) -> bool:
    """Return True if the three experiments stand in one table, beside the published results."""
    (file,) = outputs.glob("reports/reach-*/table.csv")
    table = file.read_text()
    words = ("somebody 2031*, dev", "somebody 2031*, test", "vanilla", "trime,", "trime_nearby", "20.50,21.50", ",18.50")
    return all(word in table for word in words)


def shows_figure(outputs: Path) -> bool:
    """Return True if the figure was drawn for each run and for their comparison, on the page too."""
    figures = [*outputs.glob("runs/*/*/speed.png"), *outputs.glob("reports/latest/speed.png")]
    pages = [*outputs.glob("runs/*/*/page.html"), *outputs.glob("reports/latest/page.html")]
    return len(figures) == len(pages) == 3 and all("tokens per second at test" in page.read_text() for page in pages)


# By the title of an example: whether the outputs of its commands show it.
CHECKS: dict[str, Callable[[Path], bool]] = {
    "A dataset": lambda outputs: results_of(outputs)["dataset"]["name"] == "poems",
    "A tokenizer": lambda outputs: "bits_per_character" in results_of(outputs)["metrics"]["test"][-1],
    "A batching policy": lambda outputs: settings_of(outputs).batching._target_.endswith(".ByLength"),
    "A memory in training": lambda outputs: settings_of(outputs).memory.visibility._target_.endswith(".Nearby"),
    "A memory at test": lambda outputs: any("unigrams" in row for row in rows_of(outputs)),
    "A second datastore": lambda outputs: {*results_of(outputs)["datastores"]} == {"external", "poems"},
    "An eviction policy": lambda outputs: results_of(outputs)["metrics"]["test"][-1]["eviction"] == "lottery",
    "A mixture": lambda outputs: rows_of(outputs)[-1] == "constant: vocabulary, local, long",
    "A backbone": lambda outputs: settings_of(outputs).model.backbone._target_.endswith(".GRU"),
    "An index": shows_index,
    "A stage": shows_stage,
    "An experiment": lambda outputs: results_of(outputs)["name"] == "trime_nearby",
    "A table of rows": shows_table,
    "A figure of the report": shows_figure,
}


def test_every_example_has_a_check() -> None:
    assert {*CHECKS} == {*EXAMPLES}
