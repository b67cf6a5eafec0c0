"""The command line from a checkout: ``python cli.py experiment=trime_ext``; installed, it is the command ``trime``."""

import sys

from trime.lab.main import main

if __name__ == "__main__":
    sys.exit(main())
