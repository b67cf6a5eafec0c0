"""PyramidKV (Cai et al. 2024): lower layers keep more entries than higher ones."""

from __future__ import annotations

from trime.common.checks import check_number
from trime.errors import UserError


def pyramid(size: float, layers: int, beta: float = 20.0, longest: int | None = None) -> list[int]:
    """Return the sizes of layers, ``size`` on average, which fall evenly from the first to the last.

    The last has ``size / beta``, and the first so much more than ``size``. ``longest``: no layer needs more, as for a text of
    that length; the last ones have more then. UserError unless there are layers, ``beta`` is at least 1, and each layer has an
    entry.
    """
    check_number("size", size, above=0)
    check_number("layers", layers, at_least=1, whole=True)
    check_number("beta", beta, at_least=1)
    if layers == 1 or (longest is not None and longest <= size):
        return [round(size if longest is None else min(size, longest))] * layers
    least = size / beta
    most = 2 * size - least
    if longest is not None and most >= longest:
        most = longest
        least = 2 * size - most
    step = (most - least) / (layers - 1)
    sizes = [round(most - layer * step) for layer in range(layers)]
    if min(sizes) < 1:
        raise UserError(f"a pyramid of {size} entries with beta={beta} leaves a layer without any: lower beta")
    return sizes
