"""Hooks of mkdocs: the overview is the README, and links that leave docs/ lead to copied pictures or become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README as the overview, and the pictures of results."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    for picture in sorted((ROOT / "benchmarks" / "results").rglob("*.png")):
        name = picture.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    here = "" if page.file.src_uri == "index.md" else "docs"
    return LINK.sub(lambda link: site_link(link, here), markdown)


def site_link(link: re.Match[str], here: str) -> str:
    """Return a link as the site has it: to a page or a picture; what the site lacks is named without a link."""
    mark, text, target = link.groups()
    path, _, anchor = target.partition("#")
    if target.startswith(("http", "#")):
        return link[0]
    name = (ROOT / here / path).resolve().relative_to(ROOT).as_posix()
    if name.endswith(".png"):
        return f"{mark}[{text}]({name.removeprefix('docs/')})"
    if name == "README.md":
        return f"[{text}](index.md{'#' * bool(anchor)}{anchor})"
    return f"[{text}]({name.removeprefix('docs/')}{'#' * bool(anchor)}{anchor})" if name.startswith("docs/") else text
