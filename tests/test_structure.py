"""Imports point one way, heavy or optional packages stand only where they belong, links lead somewhere."""

from __future__ import annotations

import ast
import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np

from tests.conftest import ROOT

# What each room may import beside itself and what stands in it; the longest name that fits a module decides.
BELOW = {
    "errors": "",
    "common": "errors",
    "config": "errors common",
    "report": "errors common",
    "data": "errors common",
    "data.datasets": "errors common data.segments data.tokenizers",
    "data.questions": "errors common data.datasets data.tokenizers",
    "layers": "errors common",
    "kv": "errors common layers",
    "token_memory": "errors common kv",
    "token_memory.train": "errors common token_memory.similarity",
    "token_memory.search": "errors common token_memory.similarity token_memory.train.objective.blockwise_cpu",
    "models": "errors common kv layers token_memory",
    "scoring": "errors common data token_memory",
    "scoring.mixtures": "errors common",
    "training": "errors common kv layers models scoring token_memory",
    "decoding": "errors common data kv layers models scoring token_memory training",
    "serving": "errors common report",
    "text_memory": "errors common data kv models report scoring serving token_memory",
    "lab": "errors common config report token_memory.search training",
    "stages": "errors common config data decoding kv lab layers models report scoring serving token_memory training",
    "translation": "errors common config data decoding lab layers models report scoring stages token_memory training",
    "bundle": "errors common config data decoding serving stages text_memory",
    "harness": "errors common bundle kv models text_memory",
}
FLOORS = 11  # from errors up to harness, which reads bundles
ONLY_IN = {
    "faiss": {
        "trime/token_memory/search/faiss_index.py",
        "trime/token_memory/search/ivf.py",
        "trime/models/backbones/kv_memory.py",
        "trime/text_memory/index.py",
    },
    "ray": {"trime/token_memory/search/ray_cluster.py"},
    "rank_bm25": {"trime/data/neighbours.py"},
    "bm25s": set(),
    "snowballstemmer": {"trime/data/neighbours.py"},
    "pydivsufsort": {"trime/token_memory/test/ngrams.py"},
    "peft": {"trime/models/pretrained/language.py"},
    "wandb": {"trime/lab/tracking.py"},  # inside a function: only runs that log to W&B import it
    "transformers": {
        f"trime/{name}.py"
        for name in ("common/pretrained", "kv/evicting_cache", "models/pretrained/small", "models/pretrained/tokenizer")
    },
}
VECTORS = ROOT / "tests" / "golden" / "vectors"


def imports(path: Path) -> set[str]:
    """Every module a file imports, whole names."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def room_of(module: str) -> str:
    """Return the innermost room of BELOW that a module below ``trime`` stands in."""
    parts = module.split(".")[1:]
    return next(name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in BELOW)


def modules() -> dict[str, Path]:
    """Return every module of the package but its root."""
    files = [path for path in (ROOT / "trime").rglob("*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}


def test_imports_point_one_way() -> None:
    """From each room to those it stands on; heavy or optional packages have one place each."""
    assert len(modules()) > 150
    for module, path in modules().items():
        room = room_of(module)
        for name in imports(path):
            if name.startswith("trime."):
                allowed = [f"trime.{below}" for below in (room, *BELOW[room].split())]
                assert any(f"{name}.".startswith(f"{place}.") for place in allowed), f"{path} imports {name}"
            places = ONLY_IN.get(name.split(".")[0], {str(path.relative_to(ROOT))})
            assert str(path.relative_to(ROOT)) in places, f"{path} imports {name}"


def test_rooms_stand_on_few_floors() -> None:
    """A room is above every room that it imports: the longest way down has few steps."""
    below: dict[str, set[str]] = {}
    for name, others in BELOW.items():
        room = name.split(".")[0]
        below.setdefault(room, set()).update({other.split(".")[0] for other in others.split()} - {room})
    floor: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():
        floor[room] = 1 + max((floor[other] for other in below[room]), default=0)
    assert max(floor.values()) <= FLOORS


def test_no_modules_import_each_other() -> None:
    """Not even over others, functions' own imports counted."""
    known = modules()
    graph = {module: {name for name in imported_modules(path) if name in known} for module, path in known.items()}
    assert sum(map(len, graph.values())) > 500
    assert len([*TopologicalSorter(graph).static_order()]) == len(known)


def imported_modules(path: Path) -> set[str]:
    """Return the modules of the package a file imports, by ``from package import module`` too."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return imports(path) | {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


def test_no_pickle_is_read() -> None:
    """Nothing is unpickled but Lightning's own checkpoints and released ones, by torch with weights_only."""
    for path in (ROOT / "trime").rglob("*.py"):
        text, released = path.read_text(), path.name == "fairseq.py"
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
    more = (
        ROOT / "benchmarks" / "results" / "README.md",
        VECTORS / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *(ROOT / "docs").glob("[ef]*/*.md"),
    )
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


def test_every_target_of_make_has_a_rule() -> None:
    """A name in .PHONY without one does nothing, and says that nothing is to be done."""
    text = (ROOT / "Makefile").read_text()
    (names,) = re.findall(r"^\.PHONY: (.*)$", text, re.M)
    assert {*names.split()} == {*re.findall(r"^([a-z0-9-]+):[^=\n]*##", text, re.M)}


def pins() -> list[str]:
    return [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]


def test_contributing_shows_the_packages_and_modules_that_exist() -> None:
    """The tree of its architecture has every package; paths that it and the recipes name exist, but for the recipes' own."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree, parents, shown = text.split("```\ntrime/\n")[1].split("```")[0], [""], set()
    for indent, name in re.findall(r"^( +)(\w+)/ ", tree, re.M):
        parents[len(indent) // 2 :] = [name]
        shown.add("/".join(parents[1:]))
    packages = {path.parent.relative_to(ROOT / "trime").as_posix() for path in (ROOT / "trime").rglob("__init__.py")}
    assert shown == packages - {"."}
    text += "".join(page.read_text() for page in (ROOT / "docs" / "extend").glob("*.md"))
    named = {*re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`(?!:\n)", text)}
    missing = [
        path for path in named if not any((place / path).exists() for place in (ROOT, ROOT / "trime")) and "NAME" not in path
    ]
    assert len(named) > 20 and not missing


def test_tests_lie_where_the_package_has_what_they_test() -> None:
    """A folder of tests has the name of a package; what tests of several rooms share stands in helpers."""
    own = {"golden", "helpers", "benchmarks"}
    folders = {file.parent.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")}
    places = [folder for folder in folders if folder.parts and folder.parts[0] not in own]
    assert places and all((ROOT / "trime" / folder / "__init__.py").is_file() for folder in places)
    assert not [
        file for file in (ROOT / "tests").glob("*.py") if not file.stem.startswith(("test_", "conftest", "typechecker", "__"))
    ]
