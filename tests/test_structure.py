"""Imports point one way, heavy or optional packages stand only where they belong, links lead somewhere."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import numpy as np

from tests.conftest import ROOT

BELOW = {
    "types": set(),
    "cpu": {"types"},
    "vectors": {"types"},
    "metrics": set(),
    "job_results": set(),
    "eviction": {"types", "eviction"},
    "memory": {"types", "cpu", "vectors", "eviction", "memory"},
    "data": {"types", "vectors", "data"},
    "models": {"types", "cpu", "vectors", "eviction", "memory", "models"},
    "mixtures": {"types", "mixtures"},
    "optim": {"optim"},
    "tasks": {"types", "data", "memory", "models", "mixtures", "tasks"},
    "stages": {"types", "metrics", "data", "eviction", "memory", "models", "mixtures", "optim", "tasks", "stages"},
    "run": {"types", "cpu", "stages"},
    "follow": {"types", "cpu", "stages"},
}
ONLY_IN = {
    "faiss": {
        "trime/memory/retrieval/faiss_index.py",
        "trime/memory/retrieval/ivf.py",
        "trime/models/backbones/memorizing/key_index.py",
    },
    "ray": {"trime/memory/retrieval/ray_cluster.py"},
    "rank_bm25": {"trime/data/neighbours.py"},
    "bm25s": set(),
    "snowballstemmer": {"trime/data/analyzers.py"},
    "pydivsufsort": {"trime/memory/ngrams.py"},
    "peft": {"trime/models/pretrained/lora.py"},
    "wandb": set(),
    "transformers": {f"trime/models/pretrained/{name}.py" for name in ("gguf", "loading", "small", "tokenizer")},
}
VECTORS = ROOT / "tests" / "golden" / "vectors"


def imports(path: Path) -> set[str]:
    """Every module a file imports, whole names."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_imports_point_one_way() -> None:
    files = [path for path in (ROOT / "trime").rglob("*.py") if path.parent != ROOT / "trime" or path.stem != "__init__"]
    assert len(files) > 40
    for path in files:
        layer = path.relative_to(ROOT / "trime").parts[0].removesuffix(".py")
        for name in imports(path):
            if name.startswith("trime."):
                assert name.split(".")[1] in BELOW[layer], f"{path} imports {name}"
            place = ONLY_IN.get(name.split(".")[0], {str(path.relative_to(ROOT))})
            assert str(path.relative_to(ROOT)) in place, f"{path} imports {name}"


def test_no_pickle_is_read() -> None:
    """Nothing is unpickled but Lightning's own checkpoints and released ones, by torch with weights_only."""
    for path in (ROOT / "trime").rglob("*.py"):
        text, released = path.read_text(), path.name == "released.py"
        assert "allow_pickle" not in text and "weights_only=False" not in text, path
        assert released or ("pickle" not in imports(path) and "torch.load" not in text), path
        assert not released or text.count("torch.load(") == text.count("weights_only=True)") == 1


def test_golden_vectors_are_small_and_hold_numbers_alone() -> None:
    """Below 8 MB, in formats that run nothing: no pickles, and none inside an array."""
    files = [path for path in VECTORS.rglob("*") if path.is_file()]
    assert len(files) > 50 and sum(path.stat().st_size for path in files) < 8_000_000
    assert {path.suffix for path in files} <= {".npz", ".safetensors", ".json", ".txt", ".md"}
    for path in files:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                assert all(file[name].dtype.kind in "biuf" for name in file.files), path
        else:
            assert path.read_bytes()[:2] not in (b"PK", b"\x80\x02", b"\x80\x04"), f"{path} is a zip or a pickle"


def anchors(document: Path) -> set[str]:
    """Of a document's titles, as GitHub makes them."""
    titles = [line.lstrip("#").strip().lower() for line in document.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_links_of_documents_lead_somewhere() -> None:
    links = 0
    more = ROOT / "benchmarks" / "results" / "README.md", VECTORS / "README.md"
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *more):
        for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            file, _, title = link.partition("#")
            if not file.startswith("http"):
                place = (document.parent / file).resolve() if file else document
                assert place.exists() and (not title or title in anchors(place)), f"{document.name}: {link}"
                links += 1
    assert links > 20


def test_every_dependency_is_pinned() -> None:
    """Whatever an extra names, the GPU's included, ``make install`` finds in one version; torch is installed before them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(entry for extra in project["optional-dependencies"].values() for entry in extra)]
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins()}
    missing = {name for entry in named if (name := re.split(r"[<>=;\[ ]", entry)[0].lower()) not in pinned}
    assert missing == {"torch", "triton"}, "torch pins the triton of its CUDA build"
    versions = dict(pin.split("==") for pin in pins())
    assert versions["faiss-gpu"] == versions["faiss-cpu"], "one version of FAISS, wherever it runs"


def pins() -> list[str]:
    return [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
