"""The folder of the configuration's files, in a checkout or in the installed package."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parent
IS_CHECKOUT = (CHECKOUT / "conf" / "config.yaml").is_file()
CONF = (CHECKOUT if IS_CHECKOUT else PACKAGE) / "conf"  # the wheel holds it within the package
PROGRAM = ["python", "cli.py"] if IS_CHECKOUT else ["trime"]  # the first words of a command line
