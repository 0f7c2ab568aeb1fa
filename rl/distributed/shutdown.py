"""End a serving rank without tearing down the interpreter, after its script's exit handlers.

torch's process-group threads live until the end (DDP keeps a group's). A thread that needs the
interpreter during teardown is unwound, and C++ then aborts with "terminate called without an active
exception". A launch in some hundred failed this way after all work was done.
"""

from __future__ import annotations

import atexit
import os
import sys


def end_process_at_exit() -> None:
    """End this process immediately once the script and all exit handlers have run.

    The process exits normally if the script ended with an error.
    """
    atexit.register(_end_process)


def _end_process() -> None:
    """Run the remaining exit handlers, then end the process."""
    atexit.unregister(_end_process)
    atexit._run_exitfuncs()
    if getattr(sys, "last_value", None) is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
