"""A browser that looks at pages, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium (.ci/run does)")


def seen_at(address: str, profile: Path) -> str:
    """Return the HTML of a page as it is when its scripts have run; ``profile``: a new folder for the browser."""
    options = ["--headless", *QUIET, f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--dump-dom"]
    command = [str(BROWSER), *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
