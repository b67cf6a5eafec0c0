"""How models are found on the Hugging Face hub: without code of theirs, and without waiting where there is no network."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ADDRESS = "https://huggingface.co"
SECONDS = 3.0  # after which the hub counts as out of reach
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def hub_arguments(name: str) -> dict[str, Any]:
    """Return the arguments with which a model's files are looked up, in a folder or on the hub.

    Code that comes with a model is never run. Where the hub cannot be reached, only files that were downloaded before are
    looked up, which takes no time; the library itself would try again for a minute.
    """
    return {"trust_remote_code": False, "local_files_only": not Path(name).expanduser().is_dir() and not hub_is_reachable()}


@cache
def hub_is_reachable() -> bool:
    """Return whether the hub, or the mirror of HF_ENDPOINT, accepts connections; behind a proxy it is taken to do so."""
    if any(os.environ.get(name) for name in PROXIES):
        return True
    address = urlsplit(os.environ.get("HF_ENDPOINT") or ADDRESS)
    try:
        with socket.create_connection((address.hostname, address.port or (80 if address.scheme == "http" else 443)), SECONDS):
            return True
    except OSError:
        return False
