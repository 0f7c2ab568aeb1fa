"""From a parsed run to an exit code: errors a user can set right are one box, not a traceback."""

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
    """0: done. 1: another process was lost. 2: something to set right. 75: stopped and saved, run
    again with --resume. 130: by Ctrl-C.

    `beside`: connections to processes that help to plan (rl.quick.beside).
    """

    outcome = ["nothing was started"]

    def work() -> None:
        if run.options.plan:
            from rl.run.plan import show

            show(run, beside)
            return
        from rl.run.execute import execute

        execute(run, lambda: outcome.append("the run stopped"))

    # Where no recipe was named, settings were typed as flags, and are called so.
    tables = [run.options, *(stage.settings for stage in run.stages)] if run.recipe is None else []
    flags = {name for table in tables for name in flatten(table)} - METHODS.keys()
    return guarded(work, see="python train.py --help", outcome=lambda: outcome[-1], flags=flags)


def guarded(
    work: Callable[[], None],
    *,
    see: str,
    outcome: str | Callable[[], str],
    flags: Collection[str] = (),
) -> int:
    """Does `work` and turns how it ended into an exit code, as in `main`.

    For the box of an error: `see` tells more, `outcome` heads it (asked for after the error),
    settings in `flags` are named as flags.
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
        more = f"--resume goes on from the newest checkpoint; {TRACEBACK}=1 shows where this was raised"
        fail(str(lost), see=more, code=LOST)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or os.environ.get(TRACEBACK):
            raise
        fail(
            f"the disk is full: {error}",
            see="make room, then --resume goes on from the newest checkpoint",
        )
    except ValueError as error:
        # Every ValueError of ours says what is wrong with which input; a library's may not, hence
        # the way to its traceback.
        if os.environ.get(TRACEBACK):
            raise
        more = see if isinstance(error, UserError) else f"{TRACEBACK}=1 shows where this was raised"
        fail(str(error), see=more)
    return 0


def _quieten() -> None:
    """Libraries' chatter about themselves, which tells the user nothing to act on."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        # bars are for people; a log file fills with their redraws
        transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
