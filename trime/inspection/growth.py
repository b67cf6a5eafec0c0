"""How times and sizes grow with the entries of a datastore, fitted to what small runs took."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

Growth = tuple[Callable[[float], float], ...]
CONSTANT: Growth = (lambda n: 1.0,)
LINEAR: Growth = (*CONSTANT, lambda n: n)
SHARED: Growth = (lambda n: 0.0, lambda n: 1.0)  # what does not grow, but is shared among machines


class Law(NamedTuple):
    """A sum of terms that grow with the number of entries, and of a part that is known."""

    growth: Growth
    factors: list[float]
    known: Callable[[float], float] = lambda n: 0.0

    @classmethod
    def fitted(
        cls, growth: Growth, sizes: list[int], values: list[float], known: Callable[[float], float] = lambda n: 0.0
    ) -> Law:
        """Return the law of the least relative errors at these sizes."""
        pairs = [*zip(sizes, values, strict=True)]
        terms = np.array([[term(n) / value for term in growth] for n, value in pairs])
        rest = np.array([max(0.0, 1 - known(n) / value) for n, value in pairs])
        return cls(growth, least_errors(terms, rest), known)

    def at(self, n: int) -> float:
        """Return the value, in seconds or bytes, for a datastore of n entries."""
        return self.known(n) + sum(factor * term(n) for factor, term in zip(self.factors, self.growth, strict=True))

    def on_machines(self, n: int, machines: int) -> float:
        """Return the value where all but the first, constant term is shared."""
        fixed = self.factors[0] * self.growth[0](n)
        return fixed + (self.at(n) - fixed) / machines


def least_errors(terms: np.ndarray, values: np.ndarray) -> list[float]:
    """Return the factors >= 0 of terms [n t] whose sums are nearest to values [n], by least squares."""
    scale = terms.max(0)
    return (nnls(terms / scale, values)[0] / scale).tolist()
