"""Where the files of the configuration are."""

from pathlib import Path

CONF = Path(__file__).resolve().parents[2] / "conf"
