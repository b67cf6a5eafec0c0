"""import: converts a released fairseq checkpoint and its dictionary into a model of this package."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trime.common.identity import Free
from trime.common.io import write_json
from trime.common.urls import local_copy
from trime.data.corpus import content_hash
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.lab.artefact import Artefact, Lab
from trime.lab.stage import Stage
from trime.layers.embeddings import AdaptiveInput, PlainInput
from trime.models.fairseq import FairseqCheckpoint, network_from_checkpoint, read_checkpoint
from trime.models.network import Network, save_network
from trime.stages.model_io import write_description

log = logging.getLogger(__name__)

# Arguments of the checkpoint that are copied to imported.json.
RECORDED_ARGUMENTS = ("arch", "task", "criterion", "tokens_per_sample", "max_tokens", "seed")


@dataclass(frozen=True, eq=False, repr=False)
class Import(Artefact):
    """An imported model: ``model.safetensors``, ``model.json``, ``vocabulary.json``, and its origin in ``imported.json``."""

    kind, format = "import", 2

    checkpoint: Free[str]  # identity() has the hash of its content, and of the dictionaries'
    dictionary: Free[Any]  # its file
    lab: Free[Lab]

    @property
    def file(self) -> Path:
        """The checkpoint; UserError if it does not exist."""
        file = local_copy(self.checkpoint)
        if not file.is_file():
            raise UserError(f"checkpoint={file} does not exist: name a fit-… or import-… folder, or a released checkpoint")
        return file

    @cached_property
    def content(self) -> str:
        """The hash of the checkpoint, computed once."""
        return content_hash(self.file)

    def build(self, folder: Path) -> None:
        released = read_checkpoint(self.file)
        network = self.convert(folder, released)
        arguments = {name: released.args.get(name) for name in RECORDED_ARGUMENTS}
        history = {name: value for name, value in released.history.items() if value is not None}
        content = {"file": self.file.name, "content": self.content, "parameters": network.parameter_count}
        content |= arguments | history
        write_json(folder / "imported.json", content)
        log.info(
            f"import: {content['arch']}, {network.parameter_count:,} parameters; evaluate it with checkpoint={self.folder}"
        )

    @property
    def dictionary_file(self) -> Path:
        """The checkpoint's dictionary; UserError if none is named."""
        if not isinstance(self.dictionary, str):
            raise UserError(f"checkpoint={self.file} is a file: name its fairseq dictionary too, dictionary=dict.txt")
        return local_copy(self.dictionary)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the dictionary, in which all text is read."""
        return Vocabulary.from_dictionary(self.dictionary_file)

    def identity(self) -> Any:
        return {"checkpoint": self.content, "vocabulary": self.vocabulary.fingerprint}

    def convert(self, folder: Path, released: FairseqCheckpoint) -> Network:
        """Write weights, vocabulary and description; return the network."""
        network, description = network_from_checkpoint(released)
        check_size(self.dictionary_file, self.vocabulary, network.backbone.embedding)
        save_network(network, folder / "model.safetensors")
        self.vocabulary.save(folder / "vocabulary.json")
        write_description(folder, description, self.vocabulary)
        return network


def check_size(dictionary: Path, vocabulary: Vocabulary, table: PlainInput | AdaptiveInput) -> None:
    """Raise UserError if a dictionary and the checkpoint's embedding table differ in size."""
    if table.vocabulary != len(vocabulary):
        raise UserError(
            f"{dictionary} has {len(vocabulary):,} symbols with the four special ones, but the checkpoint has "
            f"{table.vocabulary:,}: name the dict.txt that belongs to it"
        )


IMPORT = Stage("import", lambda graph: [graph.model if graph.config.checkpoint and graph.model.stage == "import" else None])
