"""Train a language model: `accelerate launch train.py [METHOD] [RECIPE.yaml] [--flags]`, or plain
`python train.py`.

Without arguments it runs the default recipe, recipes/sorting.yaml. `--help` lists methods and
recipes, `METHOD --help` all settings.
"""

import sys
from pathlib import Path

from rl.startup import fork_helper, reduce_gc


def run_plan_helper(*ends):
    """Run the slow preparations of a memory plan (rl.memory_plan) in a helper process."""
    from rl.memory_plan import serve_traces

    serve_traces(*ends)


if __name__ == "__main__":
    helpers = fork_helper(run_plan_helper) if "--plan" in sys.argv else ()

    from rl.algorithms import METHODS
    from rl.config import RunSettings, parse_run
    from rl.envs import show_help

    run = parse_run(
        sys.argv[1:],
        METHODS,
        Path(__file__).parent / "recipes" / "sorting.yaml",
        options=RunSettings,
        environments=show_help,
    )
    reduce_gc()

    from rl.trainer import (
        main,
    )  # torch and all large modules, imported only after the arguments are parsed

    sys.exit(main(run, helpers))
