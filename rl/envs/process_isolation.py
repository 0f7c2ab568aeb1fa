"""Select where the episodes of an environment run: in threads of this process, or each in a
separate process.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

from rl.envs.environment_registry import EnvironmentSpec, resolve_spec
from rl.envs.fork_server import ForkServer
from rl.errors import UserError
from rl.sanitize import describe_error

ISOLATIONS = ("auto", "thread", "process")  # see with_isolation


def resolve_environment(
    spec: str | type | EnvironmentSpec, *, environment_isolation: str = "auto", **settings: Any
) -> EnvironmentSpec:
    """Return the environment that `spec` names, with its settings. Setting values are used as they
    are.

      spec                   a registered name, "module:Class", "path/to/file.py:Class", or a class
      environment_isolation  where its episodes run, as `train.py --environment-isolation`: see
                             `apply_isolation`

    Raises UserError for an unknown name, and for an unknown setting, with the nearest known
    setting.
    """
    resolved = resolve_spec(spec, settings)
    if isinstance(spec, EnvironmentSpec) and environment_isolation == "auto":
        return resolved  # it was already resolved, including its isolation
    return apply_isolation(replace(resolved, root=None), environment_isolation)


def apply_isolation(spec: EnvironmentSpec, isolation: str) -> EnvironmentSpec:
    """Return the environment with its episodes run as `isolation` requires (one of ISOLATIONS).

      process  each episode in a separate process: a crash or hang fails only that episode, and no
               module state outlives an episode
      thread   in threads of this process
      auto     process for an environment that is named by its module or file, thread for built-in
               environments and classes of the script

    Raises UserError for any other value.
    """
    if isolation not in ISOLATIONS:
        raise UserError(
            f"environment_isolation is one of {', '.join(ISOLATIONS)}; got {isolation!r}"
        )
    by_location = (
        ":" in spec.name and spec.address is not None and not spec.address.startswith("__main__:")
    )
    return (
        isolate_environment(spec)
        if isolation == "process" or (isolation == "auto" and by_location)
        else spec
    )


def isolate_environment(spec: EnvironmentSpec) -> EnvironmentSpec:
    """Return a copy of the spec that runs each episode in a separate process.

    Raises UserError if the class or a setting cannot be sent to that process.
    """
    if spec.address is None:
        raise UserError(
            f"the environment {spec.name} is a class of this script, which no other process can"
            " import: name it as 'path/to/file.py:Class'"
        )
    for name, value in spec.settings.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # boundary: pickling of any object
            raise UserError(
                f"the environment {spec.name}: its setting {name!r} cannot be sent to another "
                f"process, where its episodes run ({describe_error(error, 200)}). Give a value "
                "that can be pickled, or environment_isolation='thread'"
            ) from error
    return replace(spec, root=ForkServer(spec))
