"""import for translation: converts a fairseq encoder-decoder and the dictionaries of both languages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from trime.common.urls import local_copy
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.models.fairseq import FairseqCheckpoint, translation_network_from_checkpoint
from trime.models.network import Network, save_network
from trime.stages.import_checkpoint import ImportedModel, check_size
from trime.stages.model_io import write_description

SOURCE, TARGET = "source.vocabulary.json", "vocabulary.json"


class Dictionaries(NamedTuple):
    """The vocabularies of both languages."""

    source: Vocabulary
    target: Vocabulary

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprints of both vocabularies."""
        return [self.source.fingerprint, self.target.fingerprint]


@dataclass(frozen=True, eq=False, repr=False)
class ImportTranslation(ImportedModel):
    """Import with two dictionaries, the source language's first; it adds ``source.vocabulary.json``."""

    @cached_property
    def files(self) -> list[Path]:
        """The dictionary files of source and target; UserError if there are not two."""
        names = self.dictionary
        if not isinstance(names, list) or len(names) != 2:
            raise UserError(
                f"checkpoint={self.file} is a file: name its fairseq dictionaries too, 'dictionary=[dict.de.txt,dict.en.txt]', "
                "the source language's first"
            )
        return [local_copy(file) for file in names]

    @cached_property
    def dictionaries(self) -> Dictionaries:
        """The dictionaries in which text is read."""
        return Dictionaries(*map(Vocabulary.from_dictionary, self.files))

    def identity(self) -> Any:
        return {"checkpoint": self.content, "vocabulary": self.dictionaries.fingerprints}

    def convert(self, folder: Path, released: FairseqCheckpoint) -> Network:
        network, description = translation_network_from_checkpoint(released)
        tables = network.backbone.source_embedding, network.backbone.embedding
        for file, vocabulary, table in zip(self.files, self.dictionaries, tables, strict=True):
            check_size(file, vocabulary, table)
        save_network(network, folder / "model.safetensors")
        self.dictionaries.source.save(folder / SOURCE)
        self.dictionaries.target.save(folder / TARGET)
        write_description(folder, description, self.dictionaries.target, source=self.dictionaries.source)
        return network
