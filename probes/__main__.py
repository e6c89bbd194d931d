"""``python -m probes NAME < context.json``: run one probe by itself."""

import gc
import os
import sys

from probes.protocol import RESULT_VARIABLE, main

# vLLM imports thousands of modules that stay: looking for garbage among them after every 700 allocations is a tenth of the
# time of a probe, and finds nothing.
gc.set_threshold(10_000, 10, 100)
status = main(sys.argv[1:])
if RESULT_VARIABLE in os.environ:
    # The answer is on disk; interpreter shutdown with half-loaded GPU libraries is where such processes hang or crash.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
sys.exit(status)
