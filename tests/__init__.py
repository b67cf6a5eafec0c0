"""Laws, contracts, golden numbers, experiments, errors, README commands."""

from tests import typechecker

__all__ = ["typechecker"]
