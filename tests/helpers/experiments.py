"""The names of experiments."""

from __future__ import annotations

from tests.conftest import ROOT

EVERY = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


TRANSLATE = ("mt_vanilla", "knn_mt", "trime_mt")
