"""Train a language model: `accelerate launch train.py [METHOD] [RECIPE.yaml] [--flags]`, or plain
`python train.py`.

Without arguments it runs the default recipe, recipes/addition.yaml. `--help` lists methods and
recipes, `METHOD --help` all settings.
"""

import sys
from pathlib import Path

from rl.quick import beside, quick


def follow(*ends):
    """Run the slow preparations of a memory plan (rl.memory) in a helper process."""
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

    from rl.run import (
        main,
    )  # torch and all large modules, imported only after the arguments are parsed

    sys.exit(main(run, helpers))
