"""The entry of cli.py and of the command ``trime``: help at once, without Hydra; memories of texts; all else by Hydra."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from trime.errors import UserError, install_command


def main() -> int:
    """Run the command; return the exit status, 1 if it failed. Without words it prints the help."""
    words = sys.argv[1:]
    if words[:1] == ["memory"]:  # by name, for that room imports from others above this one
        return int(import_module("trime.text_memory.command").main(words[1:]))
    if find_spec("hydra") is None:
        memory = "a memory of texts works without it (trime memory --help)"
        print(f"error: the lab needs more packages: {install_command('lab')}; {memory}", file=sys.stderr)
        return 1
    if words and not {"--help", "-h"} & {*words}:
        from trime.lab import command_line

        return command_line.main()
    from trime.config.help import help_text

    topics = [word for word in words if not word.startswith("-")]
    try:
        print(help_text(topics[0] if topics else None), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as of `--help | head`
        pass
    return 0
