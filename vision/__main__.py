"""`python -m vision`, and the console scripts `vision` and `lightning`."""

from __future__ import annotations

import sys

from vision.cli import main

if __name__ == "__main__":
    sys.exit(main())
