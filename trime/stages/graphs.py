"""The plan of each kind of task."""

from __future__ import annotations

from omegaconf import DictConfig

from trime.stages.graph import Plan
from trime.stages.translation.graph import TranslationPlan

PLANS: dict[str, type[Plan]] = {"language_model": Plan, "translation": TranslationPlan}


def build_plan(config: DictConfig) -> Plan:
    """Return the plan of an experiment by its task."""
    return PLANS[config.task](config)
