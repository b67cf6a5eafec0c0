"""The documents of a text memory on disk, in segments: adding one costs by its own length, and a crash loses none.

Each ``add`` writes a new segment and then the list of segments, whole or not at all. Segments of similar size are merged, so
that there are few of them and each token is written again only a logarithmic number of times.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trime.common.io import checksum_of, locked, partial_of, remove_half_written, write_json
from trime.data.datasets.files import MEMORY
from trime.errors import UserError
from trime.text_memory.segment import Content, Segment, write_segment

MANIFEST, FORMAT = MEMORY, 2
MERGED = 4  # segments of one level that become one of the next
SMALLEST = 2**10  # tokens of a segment of level 0
ATTEMPTS = 5  # to open segments while another process replaces them


class TextStore:
    """The segments of a memory's folder, which is made where there is none.

    ``identity`` says which model, tokenizer and settings its content was made with. Raises UserError where the folder holds
    something else, or was made with others.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], vocabulary: int):
        self.folder, self.identity, self.vocabulary = folder, identity, vocabulary
        self.opened: dict[str, Segment] = {}
        self.last = 0  # number of the newest segment: no other may get its name, by which readers know it
        self.manifest_state: tuple[int, int] | None = None
        if not (folder / MANIFEST).exists():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UserError(f"{folder} is no text memory, and not empty: name another folder")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"cannot make {folder}: {error.strerror}; name another folder") from None
            self.write([])
        for name, value in self.read()["identity"].items():
            if identity[name] != value:
                raise UserError(
                    f"{folder} was made with another {name}, {value} where this is {identity[name]}: "
                    "open it with that, or make a new memory in another folder"
                )

    def read(self) -> dict[str, Any]:
        """Return the content of the manifest; UserError where it is damaged or of another version."""
        file = self.folder / MANIFEST
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            checksum = content.pop("checksum")
        except (OSError, ValueError, KeyError, AttributeError):
            raise UserError(f"{file} does not describe a text memory: copy the folder again, or make a new one") from None
        if checksum != checksum_of(content) or content["format"] != FORMAT:
            raise UserError(f"{file} is damaged or of another version: copy the folder again, or make a new one")
        return content

    def write(self, segments: list[str]) -> None:
        content = {"format": FORMAT, "identity": self.identity, "segments": segments, "last": self.last}
        write_json(self.folder / MANIFEST, content | {"checksum": checksum_of(content)})

    def segments(self) -> list[Segment]:
        """Return the segments as they are now, the oldest first; another process may have added some."""
        for attempt in range(ATTEMPTS):
            try:
                state = (self.folder / MANIFEST).stat()
            except OSError:
                raise UserError(f"{self.folder} holds no text memory any more: open it again to make a new one") from None
            if (state.st_ino, state.st_mtime_ns) != self.manifest_state:
                try:
                    names = self.read()["segments"]
                    self.opened = {
                        name: self.opened.get(name) or Segment(self.folder / name, self.vocabulary) for name in names
                    }
                except UserError:  # a segment may have been merged since the manifest was read
                    if attempt == ATTEMPTS - 1:
                        raise
                    continue
                self.manifest_state = state.st_ino, state.st_mtime_ns
            break
        return [*self.opened.values()]

    def documents(self) -> dict[str, str]:
        """Return the checksum of each document by its name."""
        return {document.name: document.checksum for segment in self.segments() for document in segment.documents}

    def add(self, content: Content) -> None:
        """Add documents, in place of others of the same names; they are on disk when this returns."""
        with locked(self.folder / ".lock", f"writing {self.folder}"):
            segments = self.without({document.name for document in content.documents})
            self.commit([*segments, self.new_segment([content])])
            self.merge()

    def remove(self, names: Collection[str]) -> None:
        """Remove documents; nothing of them remains in the folder."""
        with locked(self.folder / ".lock", f"writing {self.folder}"):
            self.commit(self.without(names))

    def without(self, names: Collection[str]) -> list[str]:
        """Return the segments without some documents: those that hold one are written again."""
        result = []
        for segment in self.segments():
            left = [document.name for document in segment.documents if document.name not in names]
            if len(left) == len(segment.documents):
                result.append(segment.folder.name)
            elif left:
                result.append(self.new_segment([segment.content(left)]))
        return result

    def new_segment(self, contents: list[Content]) -> str:
        """Write a segment and return its name."""
        present = (int(path.name) for path in self.folder.iterdir() if path.name.isdigit())
        self.last = max([self.last, self.read()["last"], *present]) + 1
        folder = self.folder / f"{self.last:08d}"
        try:
            write_segment(folder, contents, self.vocabulary)
        except (OSError, SafetensorError) as error:  # such as a full disk, which gets back what was half written
            shutil.rmtree(partial_of(folder), ignore_errors=True)
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot write {self.folder} ({reason}): free space and add again; what was added stays") from None
        return folder.name

    def commit(self, segments: list[str]) -> None:
        """Make these the segments of the memory, and delete all others."""
        self.last = max(self.last, self.read()["last"])
        self.write(segments)
        self.segments()
        remove_half_written(self.folder)
        for path in self.folder.iterdir():
            if path.is_dir() and path.name.partition(".")[0].isdigit() and path.name not in segments:
                shutil.rmtree(path, ignore_errors=True)

    def merge(self) -> None:
        """Merge the newest segments while there are ``MERGED`` of one size."""
        while len(last := self.segments()[-MERGED:]) == MERGED:
            level = max(len(segment) for segment in last[1:])
            if len(last[0]) > MERGED * max(level, SMALLEST):
                break
            contents = [segment.content([document.name for document in segment.documents]) for segment in last]
            kept = [segment.folder.name for segment in self.segments()[:-MERGED]]
            self.commit([*kept, self.new_segment(contents)])
