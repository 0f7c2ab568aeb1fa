"""Execute a parsed run and return an exit code; user errors print a box instead of a traceback."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from rl.methods import METHODS
from rl.settings import Run, as_flags, flatten

TRACEBACK = "WHETSTONE_TRACEBACK"
LOST = 1


def main(run: Run, beside: Sequence[Any] = ()) -> int:
    """Plan or execute a run and return its exit code.

    0: done. 1: another process was lost. 2: a user error. 75: stopped and saved, run again with
    --resume. 130: interrupted by Ctrl-C. The connections in `beside` lead to processes that help to
    plan (rl.quick.beside).
    """

    outcome = ["nothing was started"]

    def work() -> None:
        if run.options.plan:
            from rl.run.plan import show

            show(run, beside)
            return
        from rl.run.execute import execute

        execute(run, lambda: outcome.append("the run stopped"))

    # Without a recipe, settings were typed as flags, so messages name them as flags.
    sections = (
        [run.options, *(stage.settings for stage in run.stages)] if run.recipe is None else []
    )
    flags = {name for table in sections for name in flatten(table)} - METHODS.keys()
    return guarded(work, see="python train.py --help", outcome=lambda: outcome[-1], flags=flags)


def guarded(
    work: Callable[[], None],
    *,
    see: str,
    outcome: str | Callable[[], str],
    flags: Collection[str] = (),
) -> int:
    """Call `work` and return its exit code, as in `main`.

    An error is printed in a box: `outcome` is its heading (a callable is evaluated after the
    error), `see` is a hint below it, and settings in `flags` are named as flags.
    """
    _quieten()
    from rl.errors import RankLost, UserError
    from rl.ranks import INTERRUPTED, Stopped, end_with_the_launcher
    from rl.settings import help_pages

    end_with_the_launcher()

    def fail(problem: str, *, see: str, code: int = 2) -> NoReturn:
        head = outcome if isinstance(outcome, str) else outcome()
        help_pages.fail([as_flags(problem, flags)], see=see, outcome=head, code=code)

    try:
        work()
    except Stopped as stopped:
        return stopped.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except RankLost as lost:
        if os.environ.get(TRACEBACK):
            raise
        hint = f"--resume continues from the newest checkpoint; {TRACEBACK}=1 shows the traceback"
        fail(str(lost), see=hint, code=LOST)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or os.environ.get(TRACEBACK):
            raise
        fail(
            f"the disk is full: {error}",
            see="free some space, then --resume continues from the newest checkpoint",
        )
    except ValueError as error:
        # A ValueError of this project names the wrong input. Errors of a library may not, so the
        # hint is the traceback.
        if os.environ.get(TRACEBACK):
            raise
        hint = see if isinstance(error, UserError) else f"{TRACEBACK}=1 shows where this was raised"
        fail(str(error), see=hint)
    return 0


def _quieten() -> None:
    """Silence progress bars and warnings of libraries that require no action from the user."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        # in a log file, each redraw of a progress bar would be a line
        transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
