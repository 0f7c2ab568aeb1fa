"""Train a language model: `accelerate launch train.py [METHOD] [RECIPE.yaml] [--flags]`, or plain
`python train.py`.

Without arguments it runs the default recipe, recipes/sorting.yaml. `--help` lists methods and
recipes, `METHOD --help` the most used settings, `METHOD --help all` all.
"""

import sys
from pathlib import Path

from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.envs import show_help
from rl.startup import reduce_gc, use_expandable_segments

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "sorting.yaml"

if __name__ == "__main__":
    run = parse_run(
        sys.argv[1:], METHODS, DEFAULT_RECIPE, options=RunSettings, environments=show_help
    )
    reduce_gc()
    use_expandable_segments()

    from rl.trainer import main  # imports torch, once the arguments are known to be right

    sys.exit(main(run))
