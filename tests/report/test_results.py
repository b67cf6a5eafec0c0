"""Results say whether they are as they were written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trime.errors import UserError
from trime.report.results import CHECKSUM, read_run, write_results

RESULTS = {"name": "trime", "seed": 3, "metrics": {"test": [{"loss": 1.1, "documents": [[2.5, 3]], "k": None}]}, "by": {8: 0.1}}


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Whatever their layout; also after they were read and written again, and without a checksum, as older versions wrote."""
    file = tmp_path / "results.json"
    write_results(file, RESULTS)
    read = read_run(file)
    assert read == json.loads(json.dumps(RESULTS)) and CHECKSUM in json.loads(file.read_text())
    file.write_text(json.dumps(json.loads(file.read_text())))
    assert read_run(file) == read
    write_results(file, read)
    assert read_run(file) == read
    file.write_text(json.dumps(RESULTS))
    assert read_run(file) == read


CHANGES = [("1.1", "1.2"), ("2.5", "2.6"), ("trime", "knn"), ('"seed": 3', '"seed": 4'), ("null", "7")]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_changed_results_are_refused(old: str, new: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    write_results(file, RESULTS)
    changed = file.read_text().replace(old, new, 1)
    assert changed != file.read_text()
    file.write_text(changed)
    with pytest.raises(UserError, match="was changed after it was written"):
        read_run(file)
