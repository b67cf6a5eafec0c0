"""What decorates a report is drawn after its results, within minutes, and stays when it is interrupted."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trime.stages.samples import OutOfTimeError, draw_all


class Drawn:
    """Samples that take a minute each, on a clock of their own."""

    def __init__(self) -> None:
        self.seconds, self.numbers = 0.0, list[int]()

    def draw(self, number: int) -> dict[str, Any]:
        self.seconds += 60
        self.numbers.append(number)
        return {"number": number}

    def all(self, count: int, folder: Path, minutes: float | None) -> list[dict[str, Any]]:
        return draw_all([partial(self.draw, number) for number in range(count)], folder, minutes, lambda: self.seconds)


def test_as_many_are_drawn_as_fit_and_the_same_command_draws_more(tmp_path: Path) -> None:
    drawn, every = Drawn(), [{"number": number} for number in range(5)]
    with pytest.raises(OutOfTimeError, match=r"2 of 5 .*report\.samples.minutes=null") as stopped:
        drawn.all(5, tmp_path, 2.5)
    assert stopped.value.samples == every[:2] and drawn.seconds == 120
    with pytest.raises(OutOfTimeError):
        drawn.all(5, tmp_path, 0.1)
    assert drawn.numbers == [0, 1, 2], "at least one each time, and none twice"
    assert drawn.all(5, tmp_path, None) == every and drawn.numbers == [0, 1, 2, 3, 4]


def test_what_was_drawn_before_an_interruption_is_not_drawn_again(tmp_path: Path) -> None:
    drawn = Drawn()
    with pytest.raises(KeyboardInterrupt):
        draw_all([partial(drawn.draw, 0), interrupt], tmp_path, 60, lambda: 0.0)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == {"number": 0}
    assert len(drawn.all(2, tmp_path, 60)) == 2 and drawn.numbers == [0, 1]


def interrupt(*_: object) -> Any:
    raise KeyboardInterrupt
