"""What published command lines mean here: criteria, learning rates, single options."""

from __future__ import annotations

from collections.abc import Callable

from trime.token_memory.train.visibility import External, Local, Long, Visibility
from trime.training.schedules import Cosine, InverseSquareRoot

CRITERIA: dict[str, Callable[[], Visibility]] = {
    "trime_loss": Local,
    "trime_long_loss": Long,
    "trime_long_loss_same_device": Long,
    "trime_ext_loss": External,
}


def option(words: list[str], name: str, default: str = "0") -> str:
    """Return an option's value."""
    return words[words.index(name) + 1] if name in words else default


def schedule(words: list[str]) -> Callable[[int], float]:
    """Return the learning rate by update; with a cosine --lr is its minimum, --max-lr its peak."""

    def number(name: str, default: float = 0.0) -> float:
        return float(option(words, name, str(default)))

    warmup, low = int(number("--warmup-updates")), number("--lr")
    if "cosine" not in words:
        return InverseSquareRoot(low, warmup, number("--warmup-init-lr"))
    return Cosine(
        number("--max-lr"),
        int(number("--max-update")),
        low,
        warmup,
        number("--warmup-init-lr", low),
        int(number("--lr-period-updates")) or None,
        number("--t-mult", 1),
        number("--lr-shrink", 0.1),
    )
