#!/usr/bin/env python3
"""Start a run, or one role of it: `python run.py --help`."""

import sys

from actors.start.run_command import main

if __name__ == "__main__":
    sys.exit(main())
