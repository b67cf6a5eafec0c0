"""The graph of each kind of task."""

from __future__ import annotations

from omegaconf import DictConfig

from trime.stages.graph import Graph
from trime.stages.translation.graph import TranslationGraph

GRAPHS: dict[str, type[Graph]] = {"language_model": Graph, "translation": TranslationGraph}


def build_graph(config: DictConfig) -> Graph:
    """Return the graph of an experiment by its task."""
    return GRAPHS[config.task](config)
