"""``trime memory``: each command is a call of ``TextMemory``, with JSON and one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.decoders import model_of, tokenizer_of
from trime.lab.main import main


@pytest.fixture
def run(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command on a memory of a saved model; return its exit status, its output and its errors."""
    tokenizer = tokenizer_of(tmp_path)
    model_of("Llama", len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    def call(*words: str, model: str = str(tmp_path / "model")) -> tuple[int, str, str]:
        options = ["--model", model, "--memory", str(tmp_path / "memory")]
        monkeypatch.setattr("sys.argv", ["trime", "memory", words[0], *options, *words[1:]])
        capsys.readouterr()
        status = main()
        output = capsys.readouterr()
        return status, output.out, output.err

    return call


def test_a_memory_from_the_command_line(run: Callable[..., Any], texts: Path, tmp_path: Path) -> None:
    """From an empty folder to a text and its sources."""
    status, output, _ = run("add", str(texts / "stored"), "--json")
    assert status == 0 and json.loads(output)["documents"] == 4
    names = json.loads(run("list", "--json")[1])
    text = Path(names[0]).read_text()
    assert int(run("count", "return self.")[1]) == sum(Path(name).read_text().count("return self.") for name in names)
    (place,) = json.loads(run("find", text[:60], "--limit", "1", "--json")[1])
    assert place["file"] in names and place["line"] >= 1
    assert "with memory" in run("fit")[1]
    worth = json.loads(run("evaluate", str(texts / "test"), "--json")[1])
    assert worth["perplexity"]["all"] < worth["perplexity"]["model"] and len(worth["less"]["model"]) == 3
    (tmp_path / "expected").write_text("self")
    written = [
        run("generate", "    def lock", "--max-new-tokens", "8", *more)[1]
        for more in ((), ("--expect", str(tmp_path / "expected")))
    ]
    assert written[0] == written[1] and written[0].startswith("    def lock")
    explained = json.loads(run("explain", text[:80], "--page", str(tmp_path / "page.html"), "--json")[1])
    assert any(token["run"] and token["run"]["file"] == names[0] for token in explained) and (tmp_path / "page.html").exists()
    assert text[:80].endswith("".join(token["text"] for token in explained)) and all(token["share"] <= 1 for token in explained)
    assert run("remove", names[0])[1].strip() == "1 removed"


def test_mistakes_are_one_line(run: Callable[..., Any], tmp_path: Path) -> None:
    for words, model, message in [
        (("add", str(tmp_path / "nowhere")), None, "no file or folder"),
        (("fit",), None, "is empty"),
        (("list",), str(tmp_path / "no-model"), "no-model"),
    ]:
        status, output, errors = run(*words, **({"model": model} if model else {}))
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert status == 1 and not output and message in line
    with pytest.raises(SystemExit):
        run("forget")
