"""Scripts for the card, run as `python -m bench.NAME`, and what they share."""

import signal
import sys

# Under -m, while NAME is still to be imported, and torch with it: Ctrl-C ends that without a traceback.
# `engine.console.run` takes it over when NAME runs.
if sys.argv[0] == "-m":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
