"""What a storage behind a URL says of its files, and how it is reached: every protocol of fsspec has its own words for both."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trime.errors import UserError, install_command
from trime.io import FileState, replacing

if TYPE_CHECKING:  # imported when there is a URL
    from fsspec import AbstractFileSystem

FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk


class StoredFile(NamedTuple):
    """What a storage says about a file: bytes, and seconds since 1970 of its last change (0 if it does not say)."""

    size: int
    changed: float

    @classmethod
    def of(cls, entry: dict[str, Any]) -> StoredFile:
        """Return what an entry of fsspec says, whose keys depend on the protocol."""
        said = next((entry[key] for key in ("LastModified", "mtime", "updated", "created") if entry.get(key)), 0.0)
        return cls(int(entry.get("size") or 0), float(said.timestamp() if hasattr(said, "timestamp") else said))

    def is_copied(self, path: Path) -> bool:
        """Return whether a file of this machine has its size, and was written after its last change."""
        state = FileState.of(path)
        return state is not None and state.size == self.size and state.modified >= self.changed * 1e9

    def is_older(self, path: Path) -> bool:
        """Return whether a file of this machine has another size, or was written after its last change."""
        state = FileState.of(path)
        return state is not None and (state.size != self.size or state.modified > self.changed * 1e9)


def check_address(address: str) -> None:
    """Raise UserError if an address was meant to be a URL and is none, or does not mean the same on every machine."""
    scheme, slashes, rest = re.match(r"(?:([A-Za-z][\w+.-]+):(/*))?(.*)", address, re.DOTALL).groups()  # type: ignore[union-attr]
    if scheme is None or not slashes:
        return
    if len(slashes) == 1:
        raise UserError(f"{address}: a URL has two slashes: write {scheme}://{'/' * (scheme == 'file')}{rest}")
    if not rest:
        raise UserError(f"{address} names no folder")
    if scheme in ("file", "local") and len(slashes) == 2:
        raise UserError(f"{address} depends on the folder in which a command runs: write {scheme}:/// and the whole path")
    if {".", ".."} & {*rest.split("/")}:
        raise UserError(f"{address}: write the folder without . and ..")


@cache
def opened_system(address: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL and the path in it; UserError if there is none."""
    from fsspec.core import url_to_fs

    check_address(address)
    try:
        system, root = url_to_fs(address, use_listings_cache=False)
    except ImportError as error:
        hint = f" (for s3://: {install_command('s3')})" if address.startswith("s3") else ""
        raise UserError(f"{address}: {said_by(error)}{hint}") from None
    except ValueError as error:
        raise UserError(f"{address}: {error}: use s3://, gs://, file:// or another protocol of fsspec") from None
    except Exception as error:  # every protocol has errors of its own
        raise UserError(f"{address}: {said_by(error)}") from None
    return system, root.rstrip("/")


def said_by(error: Exception) -> str:
    """Return the beginning of what an error says, in a line; its name if it says nothing."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def reaching(address: str) -> Iterator[None]:
    """Raise UserError if the storage does not answer, or refuses; a full disk of this machine is told as such."""
    try:
        yield
    except Exception as error:  # every protocol has errors of its own
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        said = said_by(error)
        if "credentials" in said and address.startswith("s3"):
            said += ": set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write ~/.aws/credentials"
        raise UserError(f"{address}: the storage refused or did not answer ({said}); the same command resumes") from error


def put(system: AbstractFileSystem, source: Path, target: str, address: str) -> None:
    """Copy a file to a storage, where it appears when it is whole."""
    with reaching(address):
        if "file" not in system.protocol:  # object stores show an object when it is complete
            system.put_file(str(source), target)
            return
        system.makedirs(target.rpartition("/")[0], exist_ok=True)
        with replacing(Path(target)) as partial:
            system.put_file(str(source), str(partial))
