"""Run tinker-cookbook's rl_basic with its rollouts in a pool of processes. No flag of rl_basic
selects this: `rollout_executor` is an argument.

tests/integrations/cookbook_client.py runs this file in the clients' environment, with the arguments of rl_basic.
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
