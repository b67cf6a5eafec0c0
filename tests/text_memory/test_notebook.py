"""The notebook for someone with a decoder runs as it is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT


def test_the_notebook_for_a_decoder_runs(
    model: Any, tokenizer: Any, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells one after the other, with a tiny model and its texts in place of those that the first cell names."""
    notebook = json.loads((ROOT / "examples" / "your_decoder.ipynb").read_text())
    first, *cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    places = {"MODEL": str(tmp_path / "model"), "MEMORY": str(tmp_path / "memory")}
    places |= {"TEXTS": [str(texts / "stored")], "HELD_OUT": [str(texts / "held_out")]}  # type: ignore[dict-item]
    for name, value in places.items():
        first, changed = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value!r}", first)
        assert changed == 1
    namespace: dict[str, Any] = {}
    for cell in (first, *cells):
        exec(cell, namespace)
    out = capsys.readouterr().out
    assert "--- with memory" in out and " p = " in out and "times; then follow" in out
    assert (tmp_path / "memory.html").is_file()
