"""The interface of a report's figures, which ``report.figures`` lists (conf/figures)."""

from __future__ import annotations

from abc import ABC
from pathlib import Path
from typing import Any

from hydra.utils import instantiate

from trime.report.figures.canvas import PANEL_HEIGHT, Panel, save_panels


def configured_figures(settings: Any) -> dict[str, Figure]:
    """Return the figures of ``report.figures`` by name; null removes one."""
    figures: dict[str, Figure | None] = instantiate(settings, _convert_="all")
    return {name: figure for name, figure in figures.items() if figure is not None}


class Figure(ABC):
    """Panels in a grid: NAME.png, .svg and .pdf of a run or a comparison of runs, and a section ``title`` of its page."""

    title: str
    note = ""  # below the title on a page

    def panels(self, results: dict[str, Any], history: Path) -> list[Panel]:
        """Return the panels of one run, from its results.json and its metrics.csv, which may not exist; none: no figure."""
        return []

    def comparison_panels(self, runs: list[dict[str, Any]]) -> list[Panel]:
        """Return the panels that compare several runs, from the results.json of each; none: no figure."""
        return []

    def height(self, results: dict[str, Any]) -> float:
        """Return the height of a run's figure in inches."""
        return PANEL_HEIGHT

    def save(self, panels: list[Panel], headline: str, path: Path, height: float = PANEL_HEIGHT) -> Path:
        """Draw panels in a grid under a headline, write them as PNG, SVG and PDF, and return the path of the first."""
        return save_panels(panels, path, headline, height)
