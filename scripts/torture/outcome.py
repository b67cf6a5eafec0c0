"""What became of an attempt: whether the user was told, and how."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from trime.lab.command_line import format_error, message_of

SECONDS = 60  # after which an attempt counts as a hang
GOOD = ("told", "same")


class Case(NamedTuple):
    """An attempt and its outcome.

    ``told``: one line that names what is wrong. ``same``: it ran, with the result it should have. ``wrong``: it ran although it
    must not, or with another result. ``unnamed``: told, but the message does not name the setting or file. ``traceback``,
    ``hang``: as they say.
    """

    what: str
    outcome: str
    message: str = ""


class Hang(BaseException):
    """Raised when an attempt takes too long; no handler of ordinary exceptions catches it."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise Hang in a block that takes longer."""

    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(what: str, action: Callable[[], Any], named: str, expected: Any = None, seconds: int = SECONDS) -> Case:
    """Run an action that should be refused with a message that holds ``named``, or return ``expected``."""
    try:
        with time_limit(seconds):
            result = action()
    except Hang:
        return Case(what, "hang")
    except (HydraException, OmegaConfBaseException) as error:
        return told(what, message_of(error, []), named)
    except Exception as error:
        try:
            return told(what, format_error(error), named)
        except Exception:
            return Case(what, "traceback", f"{type(error).__name__}: {error}"[:300])
    good = expected is not None and result == expected
    return Case(what, "same" if good else "wrong", str(result)[:100])


def told(what: str, message: str, named: str) -> Case:
    """Return the case of a message, which must be one line and hold ``named``."""
    good = named in message and "\n" not in message and "Traceback" not in message
    return Case(what, "told" if good else "unnamed", message[:300])


def summary(cases: list[Case]) -> str:
    """Return the number of cases by outcome."""
    counts = Counter(case.outcome for case in cases)
    return f"{len(cases)} attempts: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
