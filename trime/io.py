"""Atomic file writes, readable JSON, and configurations as plain Python containers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def plain(config: Any) -> Any:
    """Return a resolved configuration as dicts and lists; any other value is returned unchanged."""
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def compact_json(content: Any) -> str:
    """Return indented JSON with every list of numbers on one line."""
    text = json.dumps(content, indent=1, ensure_ascii=False)  # strings have escaped line breaks: only the layout has real ones
    return re.sub(r"\[\n\s+([-+.\deE,\s]+?)\n\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)


def write_atomically(path: Path, content: str) -> None:
    """Write a text file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)


def complete_lines(file: Path) -> list[str]:
    """Return the complete lines of a file; an unfinished last line, left by a killed run, is removed from the file."""
    if not file.exists():
        return []
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        file.write_bytes(content[:end])
    return content[:end].decode("utf-8").split("\n")[:-1]


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, if it exists, whole or not at all."""
    if source.is_file():
        partial = target.with_name(target.name + ".partial")
        shutil.copyfile(source, partial)
        partial.replace(target)
