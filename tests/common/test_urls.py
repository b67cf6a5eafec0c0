"""Text, datastores and bundles by URL: read from a whole copy, which is made again when the URL changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from trime.common.urls import COPIES, fetch, local_copy
from trime.errors import UserError


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(COPIES, str(tmp_path / "copies"))
    return tmp_path / "copies"


def test_folders_and_files_are_copied_once_until_they_change(tmp_path: Path, copies: Path) -> None:
    (tmp_path / "text" / "train").mkdir(parents=True)
    (tmp_path / "text" / "train" / "a.txt").write_text("one")
    url = f"file://{tmp_path}/text"
    first = local_copy(url)
    assert first.is_relative_to(copies) and first.name == "text" and (first / "train" / "a.txt").read_text() == "one"
    assert local_copy(f"{url}/train/a.txt").read_text() == "one"
    fetch.cache_clear()  # as another process
    (copies / first.parent.name / "kept").touch()
    assert local_copy(url) == first and (first.parent / "kept").exists()
    fetch.cache_clear()
    (tmp_path / "text" / "train" / "a.txt").write_text("another")
    assert local_copy(url) != first and (local_copy(url) / "train" / "a.txt").read_text() == "another"


def test_a_copy_that_was_interrupted_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one")
    folder = local_copy(f"file://{tmp_path}/text").parent
    fetch.cache_clear()
    folder.rename(folder.with_name(f"{folder.name}.partial"))
    (folder.with_name(f"{folder.name}.partial") / "text" / "a.txt").write_text("on")
    assert (local_copy(f"file://{tmp_path}/text") / "a.txt").read_text() == "one"


def test_paths_stay_as_they_are(tmp_path: Path) -> None:
    assert local_copy(tmp_path) == tmp_path and local_copy("~/x") == Path.home() / "x"


@pytest.mark.parametrize("url", ["file:///no/such/folder", "nosuch://host/text", "http://127.0.0.1:9/a.txt"])
def test_an_unreadable_url_is_an_error_in_one_line(url: str) -> None:
    with pytest.raises(UserError, match=url) as error:
        local_copy(url)
    assert "\n" not in str(error.value)
