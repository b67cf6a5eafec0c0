"""A memory that is killed while documents are added, one at a time, and read by another process meanwhile."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.helpers.decoders import text_of, write_texts
from trime.text_memory.memory import TextMemory

ADDING = """
import sys
from pathlib import Path
import torch
from tests.helpers.decoders import model_of
from transformers import AutoTokenizer
from trime.text_memory.memory import TextMemory
folder, texts, knn = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "knn"
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
memory = TextMemory(model_of("Llama", len(tokenizer)), tokenizer, folder / "memory", knn=knn)
for file in sorted(texts.iterdir()):
    memory.add(file)
    with open(folder / "added", "a") as log:
        print(file, file=log, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["knn", "ngrams"])
def test_kills_lose_nothing_that_was_added(kind: str, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Whatever ``add`` had returned from is there after each of fifteen kills; at the end all is as if nothing had happened."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for seed in range(80):
        (texts / f"{seed:03d}.py").write_text(text_of(seed, lines=8))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = [sys.executable, "-c", ADDING, str(tmp_path), str(texts), kind]
    reader, chosen, log = None, random.Random(0), tmp_path / "added"
    for _ in range(15):
        before = len(log.read_text().splitlines()) if log.exists() else 0
        with subprocess.Popen(command, cwd=ROOT) as adding:
            while (len(log.read_text().splitlines()) if log.exists() else 0) == before and adding.poll() is None:
                time.sleep(0.02)
            reader = reader or TextMemory(model, tokenizer, tmp_path / "memory", knn=kind == "knn")
            wait = time.time() + chosen.uniform(0, 0.4)
            while time.time() < wait:
                assert reader.count("    def") >= 0  # whatever the other process replaces meanwhile
            adding.kill()
        added = {*log.read_text().splitlines()}
        assert added <= {*TextMemory(model, tokenizer, tmp_path / "memory", knn=kind == "knn").names}
    (texts / "080.py").write_text(text_of(80, lines=8))  # what a kill left half written goes with the next addition
    subprocess.run(command, cwd=ROOT, check=True)
    memory = TextMemory(model, tokenizer, tmp_path / "memory", knn=kind == "knn")
    whole = TextMemory(model, tokenizer, tmp_path / "whole", knn=kind == "knn")
    whole.add(texts)
    held_out = write_texts(tmp_path / "held_out", range(100, 103))
    for each in (memory, whole):
        each.fit(held_out)
    assert memory.names == whole.names == [str(texts / f"{seed:03d}.py") for seed in range(81)]
    assert memory.next(" self") == whole.next(" self") and len(memory) == len(whole)
    assert float(memory.score(text_of(500)).mean()) == pytest.approx(float(whole.score(text_of(500)).mean()), abs=1e-4)
    assert {path.name for path in (tmp_path / "memory").iterdir() if path.is_dir()} == {
        segment.folder.name for segment in memory.store.segments()
    }
