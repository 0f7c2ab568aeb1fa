"""Where the episodes of an environment run: in threads of this process, or each in a process of its
own.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

from rl.environments.process import Root
from rl.environments.registry import EnvironmentSpec, environment_from_values
from rl.errors import UserError
from rl.plain import says

ISOLATIONS = ("auto", "thread", "process")  # see with_isolation


def resolve_environment(
    spec: str | type | EnvironmentSpec, *, environment_isolation: str = "auto", **settings: Any
) -> EnvironmentSpec:
    """Return the environment that `spec` names, with its settings; values are taken as they are.

    spec                   a registered name, "module:Class", "path/to/file.py:Class", or a class
    environment_isolation  where its episodes run, as `train.py --environment-isolation`: see
    `with_isolation` Raises UserError for a name that is not there, and for a setting that it does
    not take, with the nearest that it does.
    """
    resolved = environment_from_values(spec, settings)
    if isinstance(spec, EnvironmentSpec) and environment_isolation == "auto":
        return resolved  # it was resolved before, and its isolation with it
    return with_isolation(replace(resolved, root=None), environment_isolation)


def with_isolation(spec: EnvironmentSpec, how: str) -> EnvironmentSpec:
    """Return the environment with its episodes where `how` says (one of ISOLATIONS).

    process  each in a process of its own: what dies or hangs there costs that episode, and no
    module's state outlives one thread   in threads of this process
    auto     process for an environment that is named by its module or file, thread for built-in
    ones and classes of the script
    """
    if how not in ISOLATIONS:
        raise UserError(f"environment_isolation is one of {', '.join(ISOLATIONS)}; got {how!r}")
    by_place = (
        ":" in spec.name and spec.address is not None and not spec.address.startswith("__main__:")
    )
    return isolated(spec) if how == "process" or (how == "auto" and by_place) else spec


def isolated(spec: EnvironmentSpec) -> EnvironmentSpec:
    """Return a copy of the spec that runs each episode in its own process.

    Raises UserError if the class or a setting cannot be sent there.
    """
    if spec.address is None:
        raise UserError(
            f"the environment {spec.name} is a class of this script, which no other process can import: name it by its file"
        )
    for name, value in spec.settings.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # boundary: any object's own pickling
            raise UserError(
                f"the environment {spec.name}: its setting {name!r} cannot be sent to another process, where its episodes run "
                f"({says(error, 200)}). Give a value that can be pickled, or environment_isolation='thread'"
            ) from error
    return replace(spec, root=Root(spec))
