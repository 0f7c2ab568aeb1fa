"""The end of a rank that has served: its script's own errands are run, and the process goes without
taking the interpreter apart.

torch's threads of process groups are there to the last (DDP keeps a group's). One that asks for the
interpreter while this goes is unwound by it, which C++ answers with "terminate called without an
active exception" and an abort: in one launch of some hundred a failure after all work was done.
"""

from __future__ import annotations

import atexit
import os
import sys


def leave_at_exit() -> None:
    """Once the script has ended, and what others want done at exit is done, this process ends at
    once, unless in an error of its own.
    """
    atexit.register(_leave)


def _leave() -> None:
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    if getattr(sys, "last_value", None) is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
