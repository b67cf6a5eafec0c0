"""export: one folder with a run's model, vocabulary, memories and mixture, which ``trime.load`` opens anywhere.

It holds the artefacts that scoring and generation read, under the names that they have in the run. Of the prepared text,
only the split that a memory holds is exported.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trime.common.io import checksum_of, megabytes, partial_of, plain, size_of, write_atomically, write_json
from trime.common.progress import Progress
from trime.errors import UserError, install_command
from trime.lab.artefact import Artefact
from trime.lab.manifest import MANIFEST, write_manifest
from trime.lab.provenance import without
from trime.lab.stage import Stage
from trime.report.report_run import model_card
from trime.report.results import portable, read_run, write_results
from trime.report.run_result import ScoredRun
from trime.stages.graph import Graph
from trime.stages.prepare import LEARNED
from trime.stages.pretrained import is_pretrained
from trime.stages.tune import TuneMixture

log = logging.getLogger(__name__)

BUNDLE, FORMAT = "bundle.json", 3
CORPUS = ("vocabulary.json", "statistics.json", LEARNED)  # files of a text that no memory holds
PRETRAINED = "pretrained-model"  # the folder of a pretrained model
LEFT_OUT = ("expert_masses", "seconds.txt")  # files that only further stages of the run read
OF_THE_RUN = (  # sections of the configuration that say how and where it was trained and reported
    *("memory", "task"),
    *("export", "report", "logger", "callbacks", "storage", "paths", "prompt_file", "stages"),
    *("small", "questions", "answering", "translation"),
)


def export(graph: Graph) -> Path:
    """Write the bundle of a run to ``export.path``, upload it to ``export.hub`` if that is set, and return its folder.

    UserError if the run is not finished, or the folder exists.
    """
    config = graph.config
    if not config.export.path:
        raise UserError("stages=[export] writes a folder: name it, export.path=DIR")
    folder = Path(config.export.path).expanduser()
    if folder.exists():
        raise UserError(f"export.path={folder} exists: delete it, or name another folder")
    results = portable(read_run(graph.run_folder / "results.json"))
    assert isinstance(results, ScoredRun)
    # It gets its name when it is complete, so that no half of a bundle is opened.
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    copy_artefacts(graph, partial)
    named = Path(config.model.name).expanduser() if is_pretrained(config) else None
    pretrained = named if named and named.is_dir() else None  # a repository is not copied: its name opens it anywhere
    # A model of one's own folder comes along whole, with its tokenizer.
    if pretrained:
        shutil.copytree(pretrained, partial / PRETRAINED)
    # An artefact's hash cannot be computed without the places that its settings name: the bundle says it instead.
    content = {
        "format": FORMAT,
        "version": version("trime"),
        "config": portable_config(graph, pretrained is not None),
        "artefacts": {role: artefact.name for role, artefact in roles_of(graph)},
    }
    write_json(partial / BUNDLE, content | {"checksum": checksum_of(content)})
    write_results(partial / "results.json", results)
    write_atomically(partial / "README.md", model_card(results, disclosed_memories(graph)))
    partial.replace(folder)
    log.info(f"export: made {folder}, {megabytes(size_of(folder))} MB: open it by trime.load({str(folder)!r})")
    if config.export.hub:
        upload(folder, config.export.hub, config.export.private)
    return folder


def roles_of(graph: Graph) -> Iterator[tuple[str, Artefact]]:
    """Yield the artefacts that a writer reads, with their role in the graph, as ``model`` or ``external.datastore``.

    The text that the model learned from comes first: the description of others refers to it, so that a bundle must say which
    artefact it is before they are described.
    """
    yield "corpus", graph.corpus
    yield "model", graph.model
    if isinstance(graph.tune, TuneMixture):
        yield "grid", graph.tune.grid
    yield "tune", graph.tune
    for name, memory in graph.memories.stored.items():
        waiting = [memory.text, *memory.needs()]
        while waiting:
            artefact = waiting.pop(0)
            if artefact not in (graph.corpus, graph.model):
                yield f"{name}.{artefact.kind}", artefact
                waiting += artefact.needs()


def disclosed_memories(graph: Graph) -> list[str]:
    """Return the names of the memories whose text is exported: those of the last row that are read from artefacts."""
    memories = graph.tune.rows()[-1].memories
    return [name for name in graph.memories.stored if name in memories]


def copy_artefacts(graph: Graph, target: Path) -> None:
    """Copy the artefacts that a writer reads, with manifests of the copied files; UserError if one is missing."""
    artefacts = {artefact.path(): artefact for _, artefact in roles_of(graph)}  # two roles may have the same content
    stored = [graph.memories.stored[name] for name in disclosed_memories(graph)]
    disclosed = [(memory.text.path(), f"{memory.split}.") for memory in stored]
    copied: dict[Path, list[Path]] = {}
    for source, artefact in artefacts.items():
        files = [file for file in source.rglob("*") if file.is_file()]
        if artefact.kind == "prepare":  # of a text that no memory holds, no more than its vocabulary leaves this machine
            starts = [split for text, split in disclosed if text == source]
            copied[source] = [file for file in files if file.name in CORPUS or file.name.startswith((*starts,))]
        else:
            copied[source] = [file for file in files if file.name != MANIFEST and not file.name.startswith(LEFT_OUT)]
    total = sum(file.stat().st_size for files in copied.values() for file in files)
    with Progress(total=total, unit="B", unit_scale=True, desc="export") as bar:
        for source, files in copied.items():
            is_text = artefacts[source].kind == "prepare"
            folder = target / ("data/prepared" if is_text else "artefacts") / source.name
            for file in files:
                copy = folder / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
                bar.update(copy.stat().st_size)
            if is_text:  # of the text's place on this machine, only its name
                statistics = json.loads((folder / "statistics.json").read_text(encoding="utf-8"))
                write_json(folder / "statistics.json", statistics | {"location": statistics["name"]})
            write_manifest(folder, artefacts[source].name)


def portable_config(graph: Graph, has_pretrained: bool) -> dict[str, Any]:
    """Return the configuration without settings of this machine: places, loggers, devices, the datasets' readers.

    ``has_pretrained``: the bundle has the folder of a pretrained model.
    """
    config, kind = without(plain(graph.config), OF_THE_RUN), type(graph.corpus.dataset.tokenizer)
    config |= {"memory": {}, "callbacks": {}, "logger": {"lightning": {}}}  # of the training, which the graph describes
    # A pretrained model brings its own tokenizer, whichever the dataset's is.
    tokenizer = "trime.data.tokenizers.Words" if is_pretrained(graph.config) else f"{kind.__module__}.{kind.__qualname__}"
    reader = {"_target_": "trime.data.datasets.folder.Folder", "name": "bundle", "tokenizer": {"_target_": tokenizer}}
    config["dataset"], config["evaluate"]["dataset"] = reader, None
    config["checkpoint"] = config["checkpoint"] and graph.model.folder.name
    # Every memory with a datastore has a section that names its text, and so has the configuration as a whole.
    sections = [(graph.config, config["datastore"])]
    for name, node in config["test_memories"].items():
        if memory := graph.memories.stored.get(name):
            sections += [(memory.config, node["datastore"])] if "datastore" in node else []
        else:
            node.pop("datastore", None)
    for number, (of_section, section) in enumerate(sections):
        named = reader | {"name": f"bundle {number}"}  # texts of different memories stay different
        section["dataset"] = named if graph.text_of(of_section) is not graph.corpus else None
        section["path"] = of_section.datastore.path and graph.store_of(of_section).folder.name
    config["mixture"].pop("path", None)
    config["index"]["engine"] = "local"
    if has_pretrained:
        config["model"].pop("folder", None)
        config["model"] = replace_text(config["model"], config["model"]["name"], PRETRAINED)
    return config


def replace_text(content: Any, old: str, new: str) -> Any:
    """Return settings with a text in place of another, wherever it is a value."""
    if isinstance(content, dict):
        return {name: replace_text(value, old, new) for name, value in content.items()}
    if isinstance(content, list):
        return [replace_text(value, old, new) for value in content]
    return new if content == old else content


def upload(folder: Path, repository: str, private: bool) -> None:
    """Upload a bundle to a repository of the Hugging Face Hub, which is made if it does not exist."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    except ImportError:
        raise UserError(f"export.hub needs the package huggingface_hub: {install_command('decoder')}") from None
    try:
        hub = HfApi()
        hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder)
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise UserError(f"export.hub={repository}: the folder {folder} is complete, but not uploaded: {error}") from None
    log.info(f"export: uploaded {folder} to {repository}")


EXPORT = Stage("export", report=export)
