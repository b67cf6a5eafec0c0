"""Hooks of mkdocs: the overview is the README, and links that leave docs/ lead to copies, or become plain text."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
PRINTED = re.compile(r"^```text\n(.*?)^```", re.M | re.S)
WIDEST = 84  # characters of a line that fits at 1280 pixels
PAGES = {"README.md": "index.md"} | {
    name: name
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
}


def on_files(files: Files, config: Any) -> Files:
    """Add the README as the overview, other pages of the repository, examples, and the pictures of results."""
    for name, page in PAGES.items():
        files.append(
            File.generated(
                config,
                page,
                content=(ROOT / name).read_text(encoding="utf-8"),
            )
        )
    for file in sorted(
        [
            *(ROOT / "benchmarks" / "results").rglob("*.png"),
            *(ROOT / "examples").glob("*.*"),
        ]
    ):
        name = file.relative_to(ROOT).as_posix()
        files.append(
            File(
                name, str(ROOT), config.site_dir, config.use_directory_urls
            )
        )
    return files


def on_page_markdown(
    markdown: str, page: Any, files: Files, **_: Any
) -> str:
    """Turn links of the repository into links of the site.

    What a terminal prints may be wider than a page has room for beside its table
    of contents, which is left out then.
    """
    printed = "".join(PRINTED.findall(markdown))
    if any(len(line) > WIDEST for line in printed.splitlines()):
        page.meta["hide"] = ["toc"]
    return LINK.sub(
        lambda link: site_link(link, page.file.src_uri, files), markdown
    )


def site_link(link: re.Match[str], page: str, files: Files) -> str:
    """Return a link as the site has it; what the site lacks is named without a link."""
    mark, text, target = link.groups()
    path, _, anchor = target.partition("#")
    if target.startswith(("http", "#")):
        return link[0]
    here = ROOT if page in PAGES.values() else (ROOT / "docs" / page).parent
    name = (here / path).resolve().relative_to(ROOT).as_posix()
    name = PAGES.get(name, name.removeprefix("docs/"))
    if files.get_file_from_path(name) is None:
        return text
    return f"{mark}[{text}]({os.path.relpath(name, os.path.dirname(page) or '.')}{'#' * bool(anchor)}{anchor})"
