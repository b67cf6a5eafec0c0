"""Text, datastores and bundles by URL (s3://, gs://, https://, file://): copied to this machine, and read from there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from trime.common.io import lock_of, locked, partial_of
from trime.errors import UserError, install_command

COPIES = "TRIME_CACHE"  # the variable that names the folder of the copies
CHANGED = ("LastModified", "mtime", "updated", "ETag", "created")  # how protocols name when a file changed


def is_url(path: str | Path) -> bool:
    """Return True for a URL, False for a path."""
    return re.match(r"[A-Za-z][\w+.-]+://", str(path)) is not None


def local_copy(path: str | Path) -> Path:
    """Return a path as it is, or the path of a copy of the file or folder at a URL; UserError if it cannot be read.

    The copy is in ``TRIME_CACHE`` (~/.cache/trime), and is made again when names, sizes or dates at the URL have changed. Every
    protocol of fsspec works; it finds its credentials and options in variables and files of its own.
    """
    return fetch(str(path)) if is_url(path) else Path(path).expanduser()


@cache
def fetch(url: str) -> Path:
    """Copy a URL, whole or not at all, unless this version of it is here; return the copy."""
    from fsspec.core import url_to_fs

    try:
        system, root = url_to_fs(url)
        there = system.find(root, detail=True)
    except Exception as error:  # every protocol has errors of its own
        raise unreadable(url, error) from error
    if not there:
        raise UserError(f"{url} does not exist, or holds no files")
    version: dict[str, Any] = {
        name: [entry.get("size"), *(str(entry.get(key)) for key in CHANGED)] for name, entry in there.items()
    }
    digest = hashlib.sha256(json.dumps([url, version], sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(os.environ.get(COPIES) or "~/.cache/trime").expanduser() / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock_of(folder), f"copying {url}"):
        if not folder.is_dir():
            partial = partial_of(folder)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                system.get(root, str(partial / Path(root).name), recursive=True)
            except Exception as error:
                raise unreadable(url, error) from error
            partial.replace(folder)
    return folder / Path(root).name


def unreadable(url: str, error: Exception) -> UserError:
    """Return the message for a user whose URL cannot be read."""
    message = " ".join(str(error).split())[:300] or type(error).__name__
    hint = ""
    if isinstance(error, ImportError) and url.startswith("s3"):
        hint = f": {install_command('s3')}"
    elif "credentials" in message:
        hint = ": set the credentials of the storage, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return UserError(f"{url} cannot be read ({message}){hint}")
