"""`python -m engine COMMAND ...`."""

import sys

from engine.cli import main

sys.exit(main())
