"""Execute a parsed run and return an exit code; user errors print a box instead of a traceback."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection
from typing import NoReturn

from rl.algorithms import METHODS
from rl.config import RunConfig, flatten_settings, format_as_flags

TRACEBACK_VARIABLE = "WHETSTONE_TRACEBACK"
RANK_LOST_EXIT_CODE = 1


def main(run: RunConfig) -> int:
    """Plan or execute a run and return its exit code.

    0: done. 1: another process was lost. 2: a user error. 75: stopped and saved, run again with
    --resume. 130: interrupted by Ctrl-C.
    """

    outcome = ["nothing was started"]

    def work() -> None:
        if run.options.plan:
            from rl.trainer.memory_report import report_memory

            report_memory(run)
            return
        from rl.trainer.execute import execute

        execute(run, lambda: outcome.append("the run stopped"))

    # Without a recipe, settings were typed as flags, so messages name them as flags.
    sections = (
        [run.options, *(stage.settings for stage in run.stages)] if run.recipe is None else []
    )
    flags = {name for table in sections for name in flatten_settings(table)} - METHODS.keys()
    return run_guarded(work, see="python train.py --help", outcome=lambda: outcome[-1], flags=flags)


def run_guarded(
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
    _silence_libraries()
    from rl.config import format_help
    from rl.distributed import INTERRUPTED, RunStopped, end_with_launcher
    from rl.errors import RankLost, UserError

    end_with_launcher()

    def fail(problem: str, *, see: str, code: int = 2) -> NoReturn:
        head = outcome if isinstance(outcome, str) else outcome()
        format_help.exit_with_problems(
            [format_as_flags(problem, flags)], see=see, outcome=head, code=code
        )

    try:
        work()
    except RunStopped as stopped:
        return stopped.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except RankLost as lost:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        hint = (
            f"--resume continues from the newest checkpoint; {TRACEBACK_VARIABLE}=1 "
            "shows the traceback"
        )
        fail(str(lost), see=hint, code=RANK_LOST_EXIT_CODE)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or os.environ.get(TRACEBACK_VARIABLE):
            raise
        fail(
            f"the disk is full: {error}",
            see="free some space, then --resume continues from the newest checkpoint",
        )
    except ValueError as error:
        # A ValueError of this project names the wrong input. Errors of a library may not, so the
        # hint is the traceback.
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        hint = (
            see
            if isinstance(error, UserError)
            else f"{TRACEBACK_VARIABLE}=1 shows where this was raised"
        )
        fail(str(error), see=hint)
    return 0


def _silence_libraries() -> None:
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
