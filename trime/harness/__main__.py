"""The harness's command line, with the lab's models."""

from __future__ import annotations

import sys

from lm_eval.__main__ import cli_evaluate

from trime.errors import UserError


def main() -> int | str | None:
    """Run the harness's command line; return an error of the user's as one line."""
    try:
        return cli_evaluate()
    except UserError as error:
        return f"error: {error}"


if __name__ == "__main__":
    sys.exit(main())
