"""Atomic file writes, locks that say who holds them, readable JSON with checksums, and settings as plain Python containers."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from filelock import FileLock, Timeout

from trime.errors import UserError

if TYPE_CHECKING:  # torch takes seconds to import, and the command line answers without it
    from trime.common.types import Tensor

log = logging.getLogger(__name__)

PAGE, PAGES = 2**16, 2**8  # bytes that are read together, and how often, for the checksum of a large file
PARTIAL = ".partial"  # ends the name of a file or folder that is being written, or whose writing was interrupted


def plain(config: Any) -> Any:
    """Return a resolved configuration as dicts and lists; any other value is returned unchanged."""
    omegaconf = sys.modules.get("omegaconf")  # not imported here: without it there is no configuration
    if omegaconf is None or not omegaconf.OmegaConf.is_config(config):
        return config
    return omegaconf.OmegaConf.to_container(config, resolve=True)


def to_json(content: Any, place: str | Path, indent: int | None = 1, ensure_ascii: bool = True) -> str:
    """Return content as JSON for the file ``place``; UserError where a number is not finite, which JSON cannot say."""
    try:
        return json.dumps(content, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:
        for key, value in numbers_in(content):
            if not math.isfinite(value):
                raise UserError(f"{place}: {key} is {value}, which is no result: see the values it is computed from") from None
        raise


def numbers_in(content: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the floating-point numbers of nested dictionaries and lists, each with its place, such as rows.0.loss."""
    if isinstance(content, float):
        yield key, content
    elif isinstance(content, Mapping | list | tuple):
        for name, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            yield from numbers_in(value, f"{key}.{name}" if key else str(name))


def write_json(path: Path, content: Any, indent: int | None = 1, ensure_ascii: bool = True) -> None:
    """Write a JSON file whole or not at all; UserError where a number is not finite."""
    write_atomically(path, to_json(content, path, indent, ensure_ascii))


def compact_json(content: Any, place: str | Path) -> str:
    """Return indented JSON with every list of numbers on one line; UserError where a number is not finite."""
    text = to_json(content, place, ensure_ascii=False)  # strings have escaped line breaks: only the layout has real ones
    return re.sub(r"\[\n\s+([-+.\deE,\s]+?)\n\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)


def checksum_of(content: Any) -> str:
    """Return the XXH3 checksum of content as it is read back from JSON, whatever the layout of the file."""
    read_back = json.loads(json.dumps(content))
    return xxhash.xxh3_128(json.dumps(read_back, sort_keys=True).encode()).hexdigest()


def checksum_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the XXH3 checksum of contiguous tensors, their names and types."""
    import torch

    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        tensor = tensors[name].cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checksum_of_file(file: Path) -> str:
    """Return the XXH3 checksum of a file's size and content; of a large one, of pages at even distances."""
    size, digest = file.stat().st_size, xxhash.xxh3_64()
    digest.update(str(size).encode())
    with open(file, "rb") as content:
        for start in range(0, size, max(PAGE, size // PAGES)):
            content.seek(start)
            digest.update(content.read(PAGE))
    return digest.hexdigest()


def hash_of_files(files: Iterable[tuple[str, Path]]) -> str:
    """Return a hash of files, given with their names: of names, sizes and contents."""
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(os.fsencode(f"{name}/{path.name}/{path.stat().st_size}\0"))
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def check_room(folder: Path, needed: float, what: str, remedy: str = "set paths.outputs") -> None:
    """Raise UserError if the disk of ``folder`` has fewer free bytes than ``what`` needs; the message ends with ``remedy``."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        left = f"{folder.parent} has {free / 2**20:,.0f} MiB left"
        raise UserError(f"{left}, but {what} need up to {needed / 2**20:,.0f} MiB: free space, or {remedy}")


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def megabytes(size: int) -> str:
    """Return a number of bytes in megabytes."""
    return f"{size / 1e6:,.1f}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, which replaces it at the end of the block, or is removed if the block fails.

    The name is unique, so that processes that write the same file do not disturb one another: the last one stays.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{PARTIAL}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:  # the user knows the file, not its temporary name
        if error.filename in (None, partial, str(partial)):
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def remove_half_written(folder: Path, files: str = "**/*") -> None:
    """Remove those of some ``files`` of a folder whose writing was interrupted; another machine may just have finished one."""
    for file in folder.glob(f"{files}{PARTIAL}"):
        file.unlink(missing_ok=True)


def write_atomically(path: Path, content: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(content, encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any] | None = None) -> None:
    """Write tensors as safetensors, whole or not at all; the same tensors and note always give the same bytes.

    ``note`` becomes a single entry of the file's metadata, because safetensors writes several in random order.
    ``read_tensors`` compares the checksum in it.
    """
    from safetensors.torch import save_file

    content = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        note = note and {**note, "checksum": checksum_of_tensors(content)}
        save_file(content, partial, {"note": json.dumps(note, sort_keys=True)} if note else None)
        partial.chmod(mode)  # safetensors leaves files that only their owner can read


def read_tensors(path: Path, mend: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file and its note; UserError where it is damaged, which says how to ``mend`` that."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as content:
            note = json.loads((content.metadata() or {}).get("note", "{}"))
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (not a dict)
        if note.pop("checksum", None) != checksum_of_tensors(tensors):
            raise ValueError("its checksum differs")
        return tensors, note
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is missing or damaged ({error}): {mend}") from None


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an array as .npy, whole or not at all."""
    with replacing(path) as partial, partial.open("wb") as file:
        np.save(file, array)


def new_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """Return a new .npy file of zeros as an array that is written through memory; OSError where the disk has no room for it."""
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    with path.open("r+b") as file:
        allocate(file.fileno(), path.stat().st_size)
    return array


def allocate(file: int, size: int) -> None:
    """Give an open file its blocks: a full disk raises OSError here, and not by a signal when they are written."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(file, 0, size)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, if it exists, whole or not at all."""
    if source.is_file():
        with replacing(target) as partial:
            shutil.copyfile(source, partial)


def read_json_lines(file: Path) -> list[Any]:
    """Return the content of each line of a file; a line ends at a newline and nowhere else."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]


def partial_of(path: Path) -> Path:
    """Return the path at which a file or folder is written before it gets its name."""
    return path.with_name(path.name + PARTIAL)


def lock_of(folder: Path) -> Path:
    """Return the lock file that a process holds while it writes a folder."""
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def locked(file: Path, purpose: str) -> Iterator[None]:
    """Hold a lock file during a block. While another process holds it, wait, after logging which process that is.

    ``purpose`` says in the message what it does, as "building outputs/…".
    """
    owner = file.with_name(f"{file.name}.owner")
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info(f"waiting for {describe_owner(owner)}, which is {purpose}")
        lock.acquire()
    try:
        content = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%H:%M"), "command": sys.argv}
        write_atomically(owner, json.dumps(content))
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def is_locked(file: Path) -> bool:
    """Return True if a process holds a lock file, as ``locked`` does; False if there is no such file."""
    if not file.exists():
        return False
    try:
        with FileLock(file, timeout=0):
            return False
    except Timeout:
        return True


def describe_owner(owner: Path) -> str:
    """Return the process that holds a lock, for a message."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(owner.read_text(encoding="utf-8"))
        command = " ".join(map(str, content["command"]))[:200]
        return f"process {content['process']} on {content['host']} (since {content['since']}: {command})"
    return "another process"
