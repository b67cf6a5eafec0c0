"""The script that chose the vectors of this repository gives them again: from themselves, and from the set they are of."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.golden.compact import compact
from tests.golden.published import COMPACT, FOLDER


def holds_these_vectors(folder: Path) -> bool:
    """Whether a set is one that ours was chosen from, and not another of the same form."""
    if not (folder / "trime/losses/index.json").is_file():
        return False
    ours, theirs = (json.loads((root / "trime/losses/index.json").read_text()) for root in (COMPACT, folder))
    return ours.items() <= theirs.items()


@pytest.mark.parametrize("folder", [folder for folder in dict.fromkeys([COMPACT, FOLDER]) if holds_these_vectors(folder)])
def test_the_script_gives_the_vectors_again(folder: Path, tmp_path: Path) -> None:
    compact(folder, tmp_path)
    made, kept = (sorted(path.relative_to(root) for path in root.rglob("*.*")) for root in (tmp_path, COMPACT))
    assert made == [path for path in kept if path.name != "README.md"]
    for path in made:
        if path.suffix == ".npz":
            assert_same_arrays(tmp_path / path, COMPACT / path)
        else:
            assert (tmp_path / path).read_bytes() == (COMPACT / path).read_bytes(), path


def assert_same_arrays(one: Path, other: Path) -> None:
    """Compare what is stored, not how it was compressed."""
    with np.load(one) as made, np.load(other) as kept:
        assert made.files == kept.files, one
        for name in kept.files:
            assert made[name].dtype == kept[name].dtype, (one, name)
            np.testing.assert_array_equal(made[name], kept[name])


@pytest.mark.parametrize("path", sorted(COMPACT.rglob("*.npz")), ids=lambda path: path.stem)
def test_no_file_tells_when_it_was_written(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        assert {entry.date_time for entry in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
