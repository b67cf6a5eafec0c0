"""export: a bundle scores and generates as its run does, elsewhere, and runs no code that it names."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import trime
from tests.conftest import ROOT, Tiny
from tests.helpers.pretrained import save_model
from tests.helpers.runs import SharedRun, without_places
from trime.bundle.loaded_model import LoadedModel
from trime.common.io import checksum_of
from trime.errors import UserError
from trime.lab.runner import run
from trime.stages.export import BUNDLE
from trime.stages.graph import Graph

PROMPT = "import os\n"


@pytest.fixture(scope="module")
def exported(language: SharedRun, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Graph, Path]:
    """Return a run with every memory, and its bundle, which was moved after it was written."""
    folder = tmp_path_factory.mktemp("exported")
    run(tiny(*language.command("stages=[export]", f"export.path={folder}/first")))
    (folder / "first").rename(folder / "bundle")
    return language.graph, folder / "bundle"


def test_a_bundle_is_the_model_of_its_run(exported: tuple[Graph, Path]) -> None:
    graph, folder = exported
    one, other = trime.load(graph.run_folder), trime.load(folder)
    assert one.label == other.label and one.score(PROMPT) == other.score(PROMPT)
    assert one.generate(PROMPT, 6, seed=2) == other.generate(PROMPT, 6, seed=2)
    explained, other_explained = (each.explain(PROMPT, 3, temperature=0) for each in (one, other))
    assert without_places(explained) == without_places(other_explained)


def test_a_bundle_needs_nothing_else(exported: tuple[Graph, Path], tmp_path: Path) -> None:
    """No file of it names a place of this machine, and of the prepared text it holds only what a memory does."""
    graph, folder = exported
    shutil.copytree(folder, tmp_path / "copy")
    places = (str(ROOT), graph.config.paths.outputs, graph.config.paths.data, str(folder.parent))
    for file in (tmp_path / "copy").rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert not any(place.encode() in content for place in places), file
    assert {file.stem for file in folder.rglob("*.bin")} == {"train"}
    assert not [*folder.rglob("expert_masses*")]
    card = (folder / "README.md").read_text()
    assert "external and ngram hold text" in card and "commit" in card and "trime.load" in card
    assert f"{json.loads((folder / 'results.json').read_text())['parameters']:,} parameters" in card


@pytest.mark.slow
def test_a_pretrained_model_goes_along(tiny: Tiny, tmp_path: Path, text_folder: Path) -> None:
    pytest.importorskip("transformers", reason="the extra decoder")
    name = save_model("Llama", tmp_path / "model")
    text = "dataset=folder_words", f"dataset.path={text_folder}"
    settings = ["experiment=cache", "model=pretrained", f"model.name={name}", *text]
    run(tiny(*settings))
    run(tiny(*settings, "stages=[export]", f"export.path={tmp_path}/bundle"))
    with_original = trime.load(tmp_path / "bundle").score("the cat sat")
    shutil.rmtree(name)
    shutil.rmtree(text_folder)
    assert trime.load(tmp_path / "bundle").score("the cat sat") == with_original


def texts_of(graph: Graph) -> dict[str, str]:
    """Return the text of each document of test."""
    return {found.name: b"".join(found.lines).decode() for found in graph.corpus.dataset.documents("test")}


def whole_documents(graph: Graph) -> dict[str, list[dict[str, Any]]]:
    """Return the scored tokens of the documents that evaluation read whole."""
    assert graph.per_token is not None
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in map(json.loads, (graph.per_token.path() / "tokens.jsonl").open()):
        lines.setdefault(line["document"], []).append(line)
    corpus = graph.corpus.corpus()
    lengths = dict(zip(corpus.names("test"), corpus.split("test").lengths.tolist(), strict=True))
    return {name: of_document for name, of_document in lines.items() if len(of_document) == lengths[name]}


def test_texts_score_as_in_evaluation(exported: tuple[Graph, Path]) -> None:
    """Documents that evaluation read whole have the same probability, token by token."""
    graph, folder = exported
    model, texts, documents = trime.load(folder), texts_of(graph), whole_documents(graph)
    assert documents
    for name, lines in documents.items():
        for token, line in zip(model.score(texts[name])[0], lines, strict=True):
            assert math.log(token.probability) == pytest.approx(line["log_probability"], abs=2e-4)
            assert sum(token.parts.values()) == pytest.approx(token.probability, rel=1e-5)


def test_windows_score_as_token_by_token(exported: tuple[Graph, Path]) -> None:
    model = trime.load(exported[1])
    text = min(texts_of(exported[0]).values(), key=len)[:400]
    one, other = model.score(text)[0], model.attribute(text, entries=1)
    assert [token.probability for token in one] == pytest.approx([token.probability for token in other], rel=1e-3)
    total = sum(math.log(token.probability) for token in one)
    assert model.log_likelihood(text) == pytest.approx(total)
    assert model.log_likelihood_after("", text)[0] == pytest.approx(total, rel=1e-4)
    first = model.log_likelihood(text[:200])
    assert model.log_likelihood_after(text[:200], text[200:])[0] == pytest.approx(total - first, rel=1e-2)


def test_the_greedy_continuation_is_known_as_such(exported: tuple[Graph, Path]) -> None:
    model = trime.load(exported[1])
    greedy = model.generate(PROMPT, 4, temperature=0)
    assert model.log_likelihood_after(PROMPT, greedy)[1] and not model.log_likelihood_after(PROMPT, "zip zip zip zip")[1]
    cut = greedy[: len(greedy) // 2]
    assert model.generate(PROMPT, 4, temperature=0, until=[greedy[len(cut) :]]) == cut


CALL = {"_target_": "pathlib.Path.touch", "_args_": [{"_target_": "pathlib.Path", "_args_": ["called"]}]}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("format", 99, "of format 99"),
        ("config.dataset", CALL, "no file of conf/ names"),
        ("config.mixture.model.planted", CALL, "no file of conf/ names"),  # beside the lab's own code
        ("checksum", "0", "not as it was written"),
    ],
)
def test_a_changed_description_is_refused_and_its_code_not_called(
    place: str, value: Any, message: str, exported: tuple[Graph, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the checksum is that of the content."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exported[1], tmp_path / "bundle")
    file = tmp_path / "bundle" / BUNDLE
    content = json.loads(file.read_text())
    *sections, name = place.split(".")
    reduce(getitem, sections, content)[name] = value
    if place != "checksum":
        content["checksum"] = checksum_of({name: part for name, part in content.items() if name != "checksum"})
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        trime.load(tmp_path / "bundle")
    assert not (tmp_path / "called").exists()


@pytest.mark.slow
def test_every_damaged_file_is_told(exported: tuple[Graph, Path], tmp_path: Path) -> None:
    """A changed byte in any file that is read is a UserError that names the file."""
    _, folder = exported
    for number, file in enumerate(sorted(folder.rglob("*"))):
        if not file.is_file() or file.name in ("README.md", "results.json", "metrics.csv"):
            continue
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        damaged = copy / file.relative_to(folder)
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        with pytest.raises(UserError):
            trime.load(copy).score(PROMPT)
        shutil.rmtree(copy)


def test_a_bundle_is_uploaded(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By huggingface_hub, here with a folder in place of the Hub; an error there leaves the folder whole."""
    hub = pytest.importorskip("huggingface_hub", reason="the extra decoder")
    calls: list[tuple[str, Any]] = []

    class Local:
        def create_repo(self, repository: str, private: bool, exist_ok: bool) -> None:
            calls.append((repository, private))
            if repository == "nobody/full":
                raise OSError("no space")

        def upload_folder(self, repo_id: str, folder_path: Path) -> None:
            shutil.copytree(folder_path, tmp_path / "hub" / repo_id)

    monkeypatch.setattr(hub, "HfApi", Local)
    settings = ["experiment=cache", "mixture=none", "dataset.modules=20"]
    run(tiny(*settings))
    run(tiny(*settings, "stages=[export]", f"export.path={tmp_path}/one", "export.hub=somebody/model"))
    assert calls == [("somebody/model", True)]
    assert not [*(tmp_path / "one").rglob("*.bin")], "the text of a model without memories stays at home"
    assert "disclose" not in (tmp_path / "one" / "README.md").read_text()
    assert len(trime.load(tmp_path / "hub" / "somebody" / "model").score(PROMPT)[0]) == 3
    with pytest.raises(UserError, match=r"complete, but not uploaded: no space"):
        run(tiny(*settings, "stages=[export]", f"export.path={tmp_path}/two", "export.hub=nobody/full"))
    assert isinstance(trime.load(tmp_path / "two"), LoadedModel)


def test_a_run_is_found_from_anywhere(text_folder: Path, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the command named its text from where it was started, and its outputs elsewhere."""
    monkeypatch.chdir(text_folder.parent)
    words = ["experiment=cache", "mixture=none", "dataset=folder_words", "dataset.path=text"]
    config = tiny(*words, f"paths.outputs={tmp_path}/o")
    run(config)
    folder = Graph(config).run_folder
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir("/")
    by_link = trime.load(tmp_path / "link").log_likelihood("the cat sat")
    folder.parents[1].rename(tmp_path / "moved")
    folder.parents[1].symlink_to(tmp_path / "moved")
    assert trime.load(folder).log_likelihood("the cat sat") == by_link < 0


def test_the_harness_settings_are_followed_or_refused() -> None:
    """As lm_eval's own models follow them."""
    pytest.importorskip("lm_eval", reason="the extra harness")
    from trime.harness.bundle import TrimeLM, generation_settings

    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        settings = {"max_new_tokens": 3, "until": ["."], "temperature": 0, "top_p": 1, "seed": 0}
        assert generation_settings({name: 3, "until": ["", "."]}) == settings
    sampled = ({"temperature": 0.5}, {"do_sample": True, "temperature": 0.5}, {"do_sample": True}, {"temperature": 1})
    assert [generation_settings(one)["temperature"] for one in sampled] == [0.5, 0.5, 1, 1]
    assert generation_settings({"do_sample": False, "temperature": 0.5})["temperature"] == 0
    assert generation_settings({"until": None, "top_k": 0, "num_beams": 1})["until"] == []
    for wrong in ({"top_k": 5}, {"num_beams": 4}, {"repetition_penalty": 1.2}, {"stop": "a"}, {"min_p": 0.1}):
        with pytest.raises(UserError, match=f"sets {next(iter(wrong))}="):
            generation_settings(wrong)
    assert generation_settings({"until": ("a", "b")})["until"] == ["a", "b"]
    with pytest.raises(UserError, match="not those of a generation"):
        generation_settings({"max_gen_toks": "many"})
    for arguments in ({}, {"pretrained": "gpt2"}):
        with pytest.raises(UserError, match="--model_args"):
            TrimeLM(**arguments)


def test_a_repeated_request_has_other_samples() -> None:
    """Those of a first run again in the next, and from different seeds."""
    pytest.importorskip("lm_eval", reason="the extra harness")
    from lm_eval.api.instance import Instance

    from trime.harness.bundle import TrimeLM

    model = TrimeLM.__new__(TrimeLM)
    model.model = Mock(generate=lambda prompt, seed, **_: f"{prompt}{seed}")
    one, other = (Instance("generate_until", {}, (text, {"do_sample": True, "seed": 5}), 0) for text in "ab")
    for _ in range(2):
        assert model.generate_until([one, one, other, one]) == ["a5", "a6", "b5", "a7"]


TASK = """\
task: trime_documents
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""


@pytest.mark.slow
def test_the_evaluation_harness_has_our_perplexity(exported: tuple[Graph, Path], tmp_path: Path) -> None:
    """lm_eval's perplexity of a byte, over documents that evaluation read whole, is that of evaluation."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("no lm_eval: the extra harness")
    graph, folder = exported
    documents = whole_documents(graph)
    whole = [texts_of(graph)[name] for name in documents]
    (tmp_path / "documents.json").write_text("\n".join(json.dumps({"text": text}) for text in whole))
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "documents.json"))
    arguments = ["--model", "trime", "--model_args", f"bundle={folder}", "--tasks", "trime_documents"]
    arguments += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "results")]
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", "trime.harness", *arguments], check=True, env=environment, cwd=ROOT, timeout=900)
    (file,) = (tmp_path / "results").rglob("results*.json")
    measured = json.loads(file.read_text())["results"]["trime_documents"]["byte_perplexity,none"]
    loss = -sum(line["log_probability"] for document_lines in documents.values() for line in document_lines)
    assert measured == pytest.approx(math.exp(loss / sum(len(text.encode()) for text in whole)), rel=1e-4)
