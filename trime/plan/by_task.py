"""The way of the data for each kind of task."""

from __future__ import annotations

from omegaconf import DictConfig

from trime.plan.language_model import Plan
from trime.plan.translation import TranslationPlan

PLANS: dict[str, type[Plan]] = {"language_model": Plan, "translation": TranslationPlan}


def plan_of(config: DictConfig) -> Plan:
    """The artefacts of an experiment."""
    return PLANS[config.task](config)
