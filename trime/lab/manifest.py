"""The manifest of a finished artefact: name, seconds of its build, size and checksum of each file, and its own checksum.

A file that was truncated, damaged, or exchanged for that of another run is thereby noticed before it is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import xxhash

from trime.common.io import checksum_of, remove_half_written, write_json
from trime.common.progress import Progress
from trime.errors import UserError

MANIFEST = "manifest.json"
BLOCK = 2**22  # bytes that are hashed at once
BAR_BYTES = 2**32  # files that are larger in all have a progress bar while they are verified
THREADS = 8


def write_manifest(folder: Path, artefact: str, seconds: float = 0.0) -> None:
    """Write the manifest of an artefact, after deleting the half-written files of killed builds.

    ``seconds`` is how long its build took in the process that finished it. Files ``part-…`` are not of the artefact.
    """
    remove_half_written(folder)
    apart = {folder / MANIFEST, *part_files(folder)}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path not in apart]
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    states = {name: [size, total] for (name, size), total in zip(sizes.items(), checksums(folder, sizes), strict=True)}
    content = {"artefact": artefact, "seconds": round(seconds, 2), "files": states}
    write_json(folder / MANIFEST, content | {"checksum": checksum_of(content)})


def part_files(folder: Path) -> list[Path]:
    """Return the files ``part-…``, from which an artefact was made; once it has a manifest they are no longer needed."""
    return [file for file in folder.glob("part-*") if file.is_file()]


def build_seconds(folder: Path) -> float:
    """Return the seconds that the build of a finished artefact took; 0 if its manifest does not say."""
    return float(json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("seconds", 0.0))


def check_manifest(folder: Path, artefact: str, remedy: str, verify: bool = True) -> None:
    """Raise UserError unless a folder holds the files of an artefact as they were written.

    ``artefact`` is the name in the manifest, as a regular expression. ``remedy`` ends the message.
    ``verify``: compare checksums, not only sizes. They are computed once per process, as long as the files stay the same.
    """
    files = read_manifest(folder, artefact, remedy)
    states = []
    for name, (size, _) in files.items():
        try:
            found = (folder / name).stat()
        except OSError:
            raise UserError(f"{folder / name} is missing: {remedy}") from None
        if found.st_size != size:
            raise UserError(f"{folder / name} has {found.st_size:,} bytes instead of {size:,}: {remedy}")
        states.append((name, size, found.st_mtime_ns))
    damaged = damaged_file(folder, tuple(states), tuple(total for _, total in files.values())) if verify else None
    if damaged:
        raise UserError(f"{folder / damaged} is damaged (its checksum differs): {remedy}")


def read_manifest(folder: Path, artefact: str, remedy: str) -> dict[str, tuple[int, str]]:
    """Return the size and checksum of each file of an artefact; UserError if the manifest is unreadable or of another one."""
    file = folder / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        written, name, entries = content.pop("checksum"), content["artefact"], content["files"]
        files = {str(name): (int(size), str(total)) for name, (size, total) in entries.items()}
        inside = all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file} is missing, damaged or of an older version: {remedy}") from None
    if written != checksum_of(content):
        raise UserError(f"{file} was changed after it was written: {remedy}")
    if not files or not inside:
        raise UserError(f"{file} lists no files of this folder: {remedy}")
    if not re.fullmatch(artefact, str(name)):
        raise UserError(f"{file} is that of {name}, not of {artefact}: {remedy}")
    return files


@cache
def damaged_file(folder: Path, states: tuple[tuple[str, int, int], ...], sums: tuple[str, ...]) -> str | None:
    """Return the first file whose checksum is not the expected one, else None; ``states``: name, size, time of last change."""
    found = checksums(folder, {name: size for name, size, _ in states})
    return next((name for (name, *_), old, new in zip(states, sums, found, strict=True) if old != new), None)


def checksums(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Return the checksum of each file, computed by several threads."""
    total = sum(sizes.values())
    with (
        ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool,
        Progress(total=total, unit="B", unit_scale=True, desc=f"verify {folder.name}", disable=total < BAR_BYTES) as bar,
    ):
        return [*pool.map(lambda name: file_checksum(folder / name, bar.update), sizes)]


def file_checksum(path: Path, advance: Callable[[int], object]) -> str:
    """Return the XXH3 checksum (128 bits) of a file, in hexadecimal; ``advance(n)`` is called after n bytes."""
    total, buffer = xxhash.xxh3_128(), bytearray(BLOCK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(view):
            total.update(view[:count])
            advance(count)
    return total.hexdigest()
