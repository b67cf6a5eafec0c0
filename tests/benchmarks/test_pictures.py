"""The pictures of the findings are drawn from the kept results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pictures import FOLDER, PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_and_shown(name: str, tmp_path: Path) -> None:
    PICTURES[name](tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000 and (FOLDER / f"{name}.png").is_file()
    assert any(f"]({name}.png)" in page.read_text() for page in FOLDER.glob("*.md"))
