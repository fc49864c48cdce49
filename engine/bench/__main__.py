"""`python -m engine.bench`."""

import sys

from engine.bench import main

sys.exit(main())
