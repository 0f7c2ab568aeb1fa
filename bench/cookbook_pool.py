"""tinker-cookbook's rl_basic with its rollouts in a pool of processes, which no flag of it asks
for: `rollout_executor` is an argument.

Run in the clients' environment by bench/cookbook_client.py, with rl_basic's own words.
"""

import asyncio
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

from tinker_cookbook import cli_utils
from tinker_cookbook.recipes import rl_basic
from tinker_cookbook.rl import train


def main() -> None:
    blueprint = rl_basic.build_config_blueprint(
        cli_utils.model_name_from_argv(sys.argv[1:], default=rl_basic.DEFAULT_MODEL_NAME)
    )
    blueprint.make_from_argv(sys.argv[1:])
    pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
    asyncio.run(train.main(blueprint.make(), rollout_executor=pool))


if __name__ == "__main__":
    main()
