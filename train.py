"""Train a language model: `accelerate launch train.py [METHOD] [RECIPE.yaml] [--flags]`, or plain
`python train.py`.

No words at all run the default recipe, recipes/addition.yaml. `--help` lists methods and recipes,
`METHOD --help` every setting.
"""

import sys
from pathlib import Path

from rl.quick import beside, quick


def follow(*ends):
    """In a process beside this one: what a plan takes long to know (rl.memory)."""
    from rl.memory import follow

    follow(*ends)


if __name__ == "__main__":
    helpers = beside(follow) if "--plan" in sys.argv else ()

    from rl.environments import show_help
    from rl.methods import METHODS
    from rl.settings import RunSettings, parse

    run = parse(
        sys.argv[1:],
        METHODS,
        Path(__file__).parent / "recipes" / "addition.yaml",
        options=RunSettings,
        environments=show_help,
    )
    quick()

    from rl.run import main  # torch and everything heavy, once there is something to run

    sys.exit(main(run, helpers))
