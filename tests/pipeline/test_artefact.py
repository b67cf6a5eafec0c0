"""Artefacts are complete or absent: a build that is killed at any point is finished by the next."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trime.pipeline import artefact
from trime.pipeline.artefact import Artefact, check_manifest, write_manifest
from trime.types import UserError


class Number(Artefact):
    kind, stage, depends_on = "number", "count", ("value",)
    built = 0

    def build(self, folder: Path) -> None:
        Number.built += 1
        (folder / "value.txt").write_text(str(self.config.value))


def number(folder: Path, value: int) -> Number:
    return Number(OmegaConf.create({"value": value, "paths": {"outputs": str(folder)}}))


@pytest.mark.parametrize("line", ["write_manifest", "replace"])
def test_a_kill_after_the_build_costs_nothing(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: object) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(artefact, "write_manifest", killed) if line == "write_manifest" else patch.setattr(
            Path, "replace", killed
        )
        with pytest.raises(SystemExit):
            number(tmp_path, 1).make()
    assert number(tmp_path, 1).make() and (number(tmp_path, 1).path() / "value.txt").read_text() == "1"


def test_made_once_and_found_by_what_determines_it(tmp_path: Path) -> None:
    Number.built = 0
    assert [number(tmp_path, 7).make(), number(tmp_path, 7).make(), number(tmp_path, 8).make()] == [True, False, True]
    assert Number.built == 2


def test_a_manifest_written_twice_lists_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    write_manifest(tmp_path)
    write_manifest(tmp_path)
    check_manifest(tmp_path)
    (tmp_path / "a").write_text("xy")
    with pytest.raises(UserError, match="truncated"):
        check_manifest(tmp_path)
