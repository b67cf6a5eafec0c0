"""open: the graph of an exported bundle, whose artefacts are read from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trime.common.io import checksum_of
from trime.config.registry import EVERY_GROUP, registered_targets, unregistered
from trime.data import tokenizers
from trime.errors import UserError
from trime.stages.export import BUNDLE, FORMAT, PRETRAINED, replaced, roles_of
from trime.stages.graph import Graph


def open_bundle(folder: Path, trusted: bool) -> Graph:
    """Return the graph of a bundle; UserError if it is damaged, of another version, or names code that is not the lab's.

    ``trusted``: what it names is imported and called, whatever it is.
    """
    content = read_bundle(folder)
    config, outputs = content["config"], folder / "artefacts"
    if not trusted:
        check_targets(folder / BUNDLE, config)
    config["paths"] = {"outputs": str(folder), "data": str(folder / "data")}
    if config["checkpoint"]:
        config["checkpoint"] = str(outputs / config["checkpoint"])
    config["dataset"]["path"] = str(folder)
    for section in (
        config["datastore"],
        *(node["datastore"] for node in config["test_memories"].values() if "datastore" in node),
    ):
        if section.get("dataset"):
            section["dataset"]["path"] = str(folder)
        if section.get("path"):
            section["path"] = str(outputs / section["path"])
    config["model"] = replaced(config["model"], PRETRAINED, str(folder / PRETRAINED))
    graph = Graph(OmegaConf.create(config))
    graph.run_folder = folder
    for own, artefact in roles_of(graph):
        if name := content["artefacts"].get(own):
            vars(artefact)["fingerprint"] = name.rpartition("-")[2]  # in place of the one that it would compute
    return graph


def read_bundle(folder: Path) -> dict[str, Any]:
    """Return the content of a bundle's description; UserError if it is not as it was written, or of another version."""
    file, remedy = folder / BUNDLE, "export the run again, or copy the folder again"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        checksum = content.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError):
        raise UserError(f"{file} does not describe a bundle: {remedy}") from None
    if checksum != checksum_of(content):
        raise UserError(f"{file} is not as it was written: {remedy}")
    if content["format"] != FORMAT:
        raise UserError(f"{file} is of format {content['format']}, this version reads {FORMAT}: export the run again")
    return content


def check_targets(file: Path, config: Any) -> None:
    """Raise UserError if a configuration names code that no file of conf/ does, or holds references to be resolved."""
    plain_tokenizers = [
        {"_target_": f"{kind.__module__}.{kind.__qualname__}"} for kind in vars(tokenizers).values() if isinstance(kind, type)
    ]
    if unsafe := unregistered(config, plain_tokenizers, registered_targets(EVERY_GROUP)):
        raise UserError(
            f"{file} has {unsafe}, which no file of conf/ names, so that nothing of it was run: if you trust it, call "
            "load(…, trusted=True)"
        )
