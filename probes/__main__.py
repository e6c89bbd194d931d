"""``python -m probes NAME < context.json``: run one probe by itself."""

import os
import sys

from probes.protocol import RESULT_VARIABLE, main

status = main(sys.argv[1:])
if RESULT_VARIABLE in os.environ:
    # The answer is on disk; interpreter shutdown with half-loaded GPU libraries is where such processes hang or crash.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
sys.exit(status)
