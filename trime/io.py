"""Files that are written whole or not at all, JSON for readers, and configurations as plain data."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def plain(config: Any) -> Any:
    """A configuration as dicts and lists, resolved."""
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def compact_json(content: Any) -> str:
    """JSON of which every list of numbers is one line."""
    text = json.dumps(content, indent=1, ensure_ascii=False)  # strings hold no line breaks: these are the layout's
    return re.sub(r"\[\n\s+([-+.\deE,\s]+?)\n\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)


def write_atomically(path: Path, content: str) -> None:
    """Writes a text file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)


def complete_lines(file: Path) -> list[str]:
    """The lines that a killed run has written; one that it left unfinished is dropped from the file."""
    if not file.exists():
        return []
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        file.write_bytes(content[:end])
    return content[:end].decode("utf-8").split("\n")[:-1]


def copy_file(source: Path, target: Path) -> None:
    """Copies a file whole or not at all, where there is one."""
    if source.is_file():
        partial = target.with_name(target.name + ".partial")
        shutil.copyfile(source, partial)
        partial.replace(target)
