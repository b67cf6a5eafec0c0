"""Machines that trained together make parts together: each once, and those of a lost machine again by the first."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trime.engines.base import Job, MakePart
from trime.engines.local import Local
from trime.engines.machines import Announced, Machines, assist
from trime.errors import UserError
from trime.pipeline.processes import free_port

PARTS = [*range(3, 40)]


def job_in(folder: Path, name: str = "x") -> Job:
    def unused(job: Job) -> MakePart:
        raise AssertionError("each machine has opened the job")

    return Job(unused, "", "encode", name, folder)


def writes(folder: Path, by: str, seconds: float = 0.02) -> MakePart:
    """Return what writes into a part's file which machine has made it."""

    def make(number: int, advance: Callable[[int], object]) -> None:
        time.sleep(seconds)
        with (folder / str(number)).open("a") as file:
            file.write(by)
        advance(number)

    return make


@pytest.fixture()
def stores(monkeypatch: pytest.MonkeyPatch) -> tuple[TCPStore, TCPStore]:
    """Return the first machine's store and the second's."""
    monkeypatch.setenv("NODE_RANK", "1")
    port = free_port()
    first, second = (TCPStore("127.0.0.1", port, None, held, timedelta(seconds=60), False) for held in (True, False))
    return first, second


def test_parts_are_made_once_by_either_machine(stores: tuple[TCPStore, TCPStore], tmp_path: Path) -> None:
    """In several jobs; the work of both is told, and the second machine ends with the run."""
    made: list[int] = []
    opened: list[str] = []

    def open_job(stage: str, name: str) -> tuple[Job, MakePart]:
        opened.append(f"{stage} {name}")
        return job_in(tmp_path / name, name), writes(tmp_path / name, "second")

    helper = threading.Thread(target=lambda: made.append(assist(stores[1], open_job, Local())))
    helper.start()
    machines, amounts = Machines(stores[0], Local()), []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        machines.run(job_in(tmp_path / name, name), writes(tmp_path / name, "first"), PARTS, amounts.append)
    machines.finish()
    helper.join(60)
    assert not helper.is_alive() and opened == ["encode x", "encode y"]
    makers = [(tmp_path / name / str(number)).read_text() for name in ("x", "y") for number in PARTS]
    assert {"first", "second"} <= {*makers} <= {"first", "second", "firstsecond", "secondfirst"}
    assert makers.count("first") > 10 and made[0] >= makers.count("second") > 10
    assert 2 * sum(PARTS) <= sum(amounts) <= 2 * sum(PARTS) + 2 * max(PARTS), "at most the last part of each is made twice"


def test_what_a_lost_machine_has_taken_is_made_by_the_first(stores: tuple[TCPStore, TCPStore], tmp_path: Path) -> None:
    taken: list[int] = []

    def take_and_die() -> None:
        while not (announced := Announced.read(stores[1], 0)):
            pass
        taken.extend(announced.take(stores[1], 3))

    helper = threading.Thread(target=take_and_die)
    helper.start()
    Machines(stores[0], Local()).run(job_in(tmp_path), writes(tmp_path, "first"), PARTS, lambda amount: None)
    helper.join(60)
    assert len(taken) == 3 and all((tmp_path / str(number)).read_text() == "first" for number in PARTS)


def test_what_fails_on_another_machine_is_told_by_the_first(
    stores: tuple[TCPStore, TCPStore], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def mistake(number: int, advance: object) -> None:
        raise UserError("a mistake")

    def fails_to_open(stage: str, name: str) -> tuple[Job, MakePart]:
        raise UserError("this machine understands the settings differently")

    first = Machines(stores[0], Local())
    with pytest.raises(UserError, match="a mistake"):
        first.run(job_in(tmp_path), mistake, PARTS, print)
    assert stores[1].check(["over 0"])
    stores[0].set("job 1", json.dumps(["encode", "x", PARTS]))
    stores[0].set("job 2", "null")
    with caplog.at_level("INFO", "trime"):
        assert assist(stores[1], fails_to_open, Local()) == 0
    assert "left to the first machine (this machine understands" in caplog.text
    del first
    stores[0].set("job 3", "null")
    assert assist(stores[1], fails_to_open, Local()) == 0


def test_a_first_machine_that_is_gone_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    port = free_port()
    first = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), False)
    second = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), False)
    del first
    assert assist(second, lambda stage, name: pytest.fail("there is no job"), Local()) == 0
