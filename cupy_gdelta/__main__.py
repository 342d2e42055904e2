"""``python -m cupy_gdelta`` is the command ``cupy-gdelta``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
