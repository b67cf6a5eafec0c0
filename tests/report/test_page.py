"""The report page: one file, escaped, readable in a real browser, wide and narrow; logging to W&B, sweeps by Optuna."""

from __future__ import annotations

import csv
import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.conftest import ROOT, composed
from tests.helpers.browser import in_a_browser, seen_at
from tests.helpers.runs import SharedRun
from trime.report.page import Page, Section, sample_sections, write_page
from trime.report.passages import Sample
from trime.report.tables import Table, row_name
from trime.stages.samples import passages, samples_of

MEASURE = """
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const page = frame.contentDocument, root = page.documentElement, tokens = [...page.querySelectorAll(".annotated [role]")];
  const open = () => tokens.map((one) => one.getAttribute("aria-pressed") === "true");
  const before = open();
  tokens[0]?.click();
  const shown = page.querySelectorAll("h1, h2, pre, .note, aside, figure svg, .wide");
  const boxes = [...shown].map((one) => one.getBoundingClientRect());
  document.body.textContent = JSON.stringify({
    width: root.clientWidth, content: root.scrollWidth, height: root.scrollHeight, before, after: open(),
    outside: boxes.filter((box) => box.right > root.clientWidth + 1 || box.left < 0).length,
    letters: parseFloat(getComputedStyle(page.body).fontSize),
    empty: boxes.some((box) => box.height === 0),
  });
});
"""


def render(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """Measure the page in a frame of that width, after a click on its first token."""
    frame = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(page.read_text())}"></iframe>'
    room = folder / f"frame{width}.html"
    room.write_text(f"<!doctype html><body>{frame}<script>{MEASURE}</script></body>")
    seen = seen_at(room.as_uri(), folder / "profile")
    return json.loads(html.unescape(re.search(r"<body>(\{.*\})", seen).group(1)))  # type: ignore[union-attr]


def test_a_page_needs_no_other_file(language: SharedRun) -> None:
    text = (language.folder / "page.html").read_text()
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", re.sub(r"<a href[^>]*>", "", text))
    assert "@import" not in text and not re.findall(r"url\((?!#)", text)
    for row in language.results["metrics"]["test"]:
        assert f">{row_name(row['memories'])}<" in text and f">{row['perplexity']:.2f}<" in text
    assert text.count("<svg") > 8 and len(text) < 800_000
    assert "#000000" not in text and "prefers-color-scheme: dark" in text and "currentColor" in text


def test_a_page_links_to_the_files_beside_it(language: SharedRun) -> None:
    links = re.findall(r'<a href="([^"]*)">', (language.folder / "page.html").read_text())
    assert {"results.json", "config.yaml", "table.csv"} <= {*links}
    assert all((language.folder / name).is_file() for name in links)
    lines = [*csv.DictReader((language.folder / "table.csv").open())]
    assert [int(line["tokens"]) for line in lines] == [row["tokens"] for row in language.results["metrics"]["test"]]
    for format in ("png", "svg", "pdf"):
        assert (language.folder / f"picture.{format}").stat().st_size > 1000


def test_samples_are_test_text_with_parts_that_sum_up(language: SharedRun) -> None:
    graph = language.graph
    samples, corpus = samples_of(graph), graph.corpus.corpus()
    assert samples is not None
    (sample,) = samples.summary()
    evaluate = graph.config.evaluate
    before = max(graph.tune.rows()[-1].sizes) + evaluate.block + evaluate.context
    ((document, begin, middle, end),) = passages(corpus.split("test").offsets, 1, 8, before)
    assert sample["document"] == corpus.names("test")[document] and len(sample["tokens"]) == end - middle == 8
    words = [corpus.vocabulary.symbols[token] for token in corpus.split("test").tokens[begin:end]]
    whole = sample["before"] + "".join(token["shown"] for token in sample["tokens"])
    assert whole.replace("↵", "").split() == graph.corpus.dataset.tokenizer.text(words).split()
    for token in sample["tokens"]:
        assert sum(token["parts"].values()) == pytest.approx(token["probability"])
        assert token["parts"].keys() == {"vocabulary", "local", "long", "external", "ngram", "ngram_document"}
        assert sum(entry["share"] for entry in token["entries"]) <= token["probability"] + 1e-9
    assert all(token["shown"].strip() for token in sample["tokens"]), "every token can be chosen"
    assert max(token["parts"]["long"] for token in sample["tokens"]) > 0, "the memories are full"


def test_memorys_share_is_what_the_vocabulary_leaves(language: SharedRun) -> None:
    plain, *rows = language.results["metrics"]["test"]
    assert "memory_share" not in plain
    for row in rows:
        *buckets, average = row["memory_share"]
        assert sum(cell["tokens"] for cell in buckets) == average["tokens"] == row["tokens"]
        assert all(cell["mean"] is None or 0 <= cell["mean"] <= 1 for cell in buckets) and 0 < average["mean"] < 1
    means = [row["memory_share"][-1]["mean"] for row in rows]
    assert means[0] < means[-2], "more memories give more"


def test_passages_are_spread_and_within_documents() -> None:
    offsets = [0, 10, 1000, 1005, 6000]
    found = passages(np.array(offsets), 3, 40, 256)
    assert len(found) == 3
    for document, begin, middle, end in found:
        assert offsets[document] <= begin <= middle < end <= offsets[document + 1]
        assert end - middle == 40 and middle - begin == 256
    assert passages(np.array([0, 7]), 3, 40, 256) == [(0, 0, 0, 7)]


HOSTILE = '<script>document.title="x"</script> & "quoted" \u202e'


def test_text_is_never_markup(tmp_path: Path) -> None:
    entry = {"memory": "local", "share": 0.1, "text": HOSTILE, "place": HOSTILE}
    token = {"text": HOSTILE, "shown": HOSTILE, "probability": 0.5, "parts": {"vocabulary": 0.2, "local": 0.3}}
    sample = {"document": HOSTILE, "row": HOSTILE, "before": HOSTILE, "tokens": [token | {"entries": [entry]}]}
    section = Section(HOSTILE, HOSTILE, [Table([HOSTILE], [[HOSTILE]])], commands=[HOSTILE])
    page = Page(HOSTILE, [HOSTILE], [section, *sample_sections([Sample(**sample)], HOSTILE)])
    text = write_page(page, tmp_path / "page.html").read_text()
    assert text.count("<script>") == 1 and 'document.title="x"' not in text


@in_a_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_it_wide_and_narrow(width: int, language: SharedRun, tmp_path: Path) -> None:
    """Nothing is wider than a phone; only the selected token shows its details."""
    seen = render(language.folder / "page.html", width, tmp_path)
    assert 0 <= width - seen["width"] <= 20, "but for a scroll bar"
    assert seen["content"] <= seen["width"] and seen["outside"] == 0 and seen["letters"] >= 16
    assert not seen["empty"] and sum(seen["before"]) == 1
    assert seen["after"][0] and sum(seen["after"]) == 1


@pytest.mark.slow
def test_a_search_by_optuna_goes_by_dev(session_folder: Path, tmp_path: Path) -> None:
    """No trial is scored on test; the same command proposes the same trials and finds what they made."""
    pytest.importorskip("optuna", reason="pip install -e '.[sweep]'")
    words = ["experiment=trime", "sweep=optuna", "size=tiny", "train.updates=2", "hydra.sweeper.n_trials=2", "logger=none"]
    places = f"paths.data={session_folder}/data", f"paths.outputs={tmp_path}", "report.samples.passages=0"
    line = [sys.executable, "cli.py", "-m", *words, *places]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not [*tmp_path.glob("runs/trime/*/results.json")] and not [*tmp_path.glob("artefacts/evaluate-*")]
    (best,) = (tmp_path / "sweeps").rglob("optimization_results.yaml")
    assert re.search(r"best_value: [\d.]+", best.read_text()) and "schedule.peak" in best.read_text()
    again = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "fit: made" not in again.stdout and again.stdout.count("fit: found") == 2


def test_the_sweep_of_wandb_uses_settings_that_exist() -> None:
    """Its program exists, its metric is logged, and its parameters compose."""
    sweep = yaml.safe_load((ROOT / "examples" / "wandb_sweep.yaml").read_text())
    assert (ROOT / sweep["program"]).is_file() and sweep["metric"]["name"] == "valid/loss"
    values = [f"{name}={own.get('values', [own.get('min')])[0]}" for name, own in sweep["parameters"].items()]
    named = [part for part in sweep["command"] if "=" in part]
    config = composed(*named, *values)
    assert config.name == "trime" and config.logger.offline is False
