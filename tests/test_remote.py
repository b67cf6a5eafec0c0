"""Addresses of storages, and what these say of their files."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from trime.errors import UserError
from trime.remote import StoredFile, check_address


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3:/bucket/x", "write s3://bucket/x"),
        ("file:/disk/x", "write file:///disk/x"),
        ("file://disk/x", "write file:///"),
        ("file://", "names no folder"),
        ("s3://bucket/a/../x", r"without \. and \.\."),
    ],
)
def test_addresses_that_are_no_urls(address: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_address(address)


def test_paths_are_addresses() -> None:
    for address in ("outputs", "/a/b", "../x", "C:/x", "~/x", "run:2/x", "s3://bucket/x", "file:///disk/x", "memory://x"):
        check_address(address)


def test_a_storage_says_what_it_knows(tmp_path: Path) -> None:
    """Times are seconds or dates, under names that depend on the protocol; what does not say one is older than every copy."""
    file = tmp_path / "file"
    file.write_text("four")
    os.utime(file, (1000, 1000))
    assert StoredFile.of({"name": "x"}) == (0, 0.0)
    for changed in ({"mtime": 1000.0}, {"LastModified": datetime.fromtimestamp(1000, UTC)}, {"created": 999}, {}):
        stored = StoredFile.of({"size": 4} | changed)
        assert stored.is_copied(file) and stored.is_older(file) == (stored.changed < 1000)
    assert not StoredFile.of({"size": 4, "mtime": 1001}).is_copied(file)
    assert not StoredFile.of({"size": 5}).is_copied(file) and StoredFile.of({"size": 5, "mtime": 2000}).is_older(file)
    assert not StoredFile.of({"size": 4}).is_copied(tmp_path / "none")
