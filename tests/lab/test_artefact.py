"""Artefacts are complete or absent: a build that is killed at any point is finished by the next."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from trime.common.io import checksum_of, locked
from trime.errors import UserError
from trime.lab import artefact
from trime.lab.artefact import Artefact, Free, Lab
from trime.lab.manifest import MANIFEST, check_manifest, write_manifest


@dataclass(frozen=True, eq=False)
class Number(Artefact):
    kind, stage = "number", "count"
    built = 0

    value: int
    lab: Free[Lab]

    def build(self, folder: Path) -> None:
        Number.built += 1
        (folder / "value.txt").write_text(str(self.value))


def number(folder: Path | str, value: int) -> Number:
    return Number(value, Lab(Path(folder), Path(folder), True, lambda *_: None))


@dataclass(frozen=True, eq=False)
class Sum(Artefact):
    kind = "sum"

    numbers: list[Number]
    scale: dict[str, float]
    device: Free[str]
    lab: Free[Lab]

    def build(self, folder: Path) -> None:
        raise AssertionError


def test_a_hash_is_that_of_inputs_and_settings_but_not_of_free_fields(tmp_path: Path) -> None:
    def total(*values: int, scale: float = 1.0, device: str = "cpu", folder: str = "a") -> Sum:
        numbers = [number(tmp_path / folder, value) for value in values]
        return Sum(numbers, {"by": scale}, device, numbers[0].lab)

    first = total(1, 2)
    assert first.needs() == first.numbers and first.fingerprint == total(1, 2, device="cuda", folder="b").fingerprint
    assert len({one.fingerprint for one in (first, total(1, 3), total(2, 1), total(1, 2, scale=2.0))}) == 4
    with pytest.raises(TypeError, match="cannot contain object"):
        _ = Sum([], {"by": object()}, "cpu", first.lab).fingerprint  # type: ignore[dict-item]


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


def test_what_another_process_made_meanwhile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waited for the lock did not make it."""
    made = Number.built

    @contextmanager
    def waiting(file: Path, purpose: str) -> Iterator[None]:
        monkeypatch.setattr(artefact, "locked", locked)
        assert number(tmp_path, 8).make()
        yield

    monkeypatch.setattr(artefact, "locked", waiting)
    assert not number(tmp_path, 8).make() and Number.built == made + 1


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-1],
    "longer": lambda content: content + b"x",
    "a flipped bit": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "another digit": lambda content: content.replace(b"1", b"2"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["a.bin", "inner/b.json"])
def test_damage_is_noticed_and_the_file_named(name: str, damage: str, tmp_path: Path) -> None:
    """Also in a process that verified the folder before."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.bin").write_bytes(b"1" * 100)
    (tmp_path / "inner" / "b.json").write_text('{"b": 1}')
    write_manifest(tmp_path, "number-1")
    check_manifest(tmp_path, "number-1", "make it anew")
    file = tmp_path / name
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with pytest.raises(UserError, match=f"{re.escape(str(file))} .*: make it anew"):
        check_manifest(tmp_path, "number-1", "make it anew")
    if damage not in ("truncated", "longer"):  # the size is compared in any case
        check_manifest(tmp_path, "number-1", "make it anew", verify=False)


UNREADABLE = ["", "{}", "[]", "[[1]]", "null", '{"a": 1}', '{"artefact": "number-1", "files": {"a": [1, "x"]}}', "\xff"]
SIGNED: list[dict[str, object]] = [  # their own checksum is right
    {"artefact": "number-1"},
    {"artefact": "number-1", "files": {}},
    {"artefact": "number-1", "files": {"../a": [1, "x"]}},
    {"artefact": "number-1", "files": {"a": 1}},
    {"artefact": "number-2", "files": {"a": [1, "x"]}},
]


@pytest.mark.parametrize(
    "content", [*UNREADABLE, *(json.dumps(content | {"checksum": checksum_of(content)}) for content in SIGNED)]
)
def test_a_manifest_that_says_nothing_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / MANIFEST).write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="make it anew"):
        check_manifest(tmp_path, "number-1", "make it anew")


def test_an_artefact_in_another_one_s_place_is_refused(tmp_path: Path) -> None:
    for value in (1, 2):
        number(tmp_path, value).make()
    first, second = number(tmp_path, 1), number(tmp_path, 2)
    shutil.rmtree(first.folder)
    second.folder.rename(first.folder)
    with pytest.raises(UserError, match=f"{second.name}, not of {first.name}.*stage count"):
        first.path()


def test_a_lock_says_who_holds_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = "import sys, time; from pathlib import Path; from trime.common.io import locked\n"
    code += "with locked(Path(sys.argv[1]), 'counting'): print('held', flush=True); time.sleep(1)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with caplog.at_level("INFO", "trime"), locked(tmp_path / "lock", "counting"):
            assert other.wait() == 0
        assert re.search(rf"waiting for process {other.pid} on .*, which is counting", caplog.text)
