"""Shrink the runs of documented commands. tests/rank_server.py imports this module before it forks.

A run is parsed as it was typed, then with small sizes. With the variable `ONLY_PARSED` set,
commands are parsed and not run, in train.py and in scripts that use argparse.
"""

import argparse
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from doc_shell import ONLY_PARSED

import rl.config
from rl.algorithms import METHODS
from rl.config import SettingsError
from rl.config.fields import get_fields
from rl.envs import parse_environment
from rl.errors import UserError

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "addition.yaml"
SMALL = {
    "steps": 1, "batch_size": 2, "group_size": 2, "max_tokens": 8, "eval_limit": 2,
    "eval_every": 0, "save_every": 0, "max_turns": 2,
}  # fmt: skip
parse_whole_run = rl.config.parse_run
parse_all_arguments = argparse.ArgumentParser.parse_args
parse_known_arguments = argparse.ArgumentParser.parse_known_args
report_error = argparse.ArgumentParser.error


def parse_small_run(argv, *arguments, **options):
    run = parse_whole_run(argv, *arguments, **options)
    if ONLY_PARSED in os.environ:
        check_environments(run)
        raise SystemExit(0)
    if run.options.plan:
        return run
    names = set().union(*(get_fields(type(stage.settings)) for stage in run.stages))
    small = [
        word
        for name, value in SMALL.items()
        if name in names and (name != "max_turns" or "--environment" in argv)
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return parse_whole_run([*argv, *small, "--no-self-test"], *arguments, **options)


def check_environments(run):
    """Parse the settings of environments; their packages need not be installed."""
    for stage in run.stages:
        env = getattr(stage.settings, "env", None)
        if env is not None and env.environment is not None:
            try:
                parse_environment(env.environment, env.environment_settings)
            except (SettingsError, UserError) as error:
                if "pip install" not in str(error):
                    print(error, file=sys.stderr)
                    raise SystemExit(2) from error


def parse_arguments(parser, *arguments, **options):
    with use_original_parser():
        parsed = parse_all_arguments(parser, *arguments, **options)
    if ONLY_PARSED in os.environ:
        raise SystemExit(0)
    return parsed


def parse_some_arguments(parser, *arguments, **options):
    """Parse with argparse; the remaining words must be settings of a method or an environment."""
    with use_original_parser():
        parsed, rest = parse_known_arguments(parser, *arguments, **options)
    if ONLY_PARSED in os.environ:
        names = set().union(*(get_fields(method.Settings) for method in METHODS.values()))
        flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
        unknown = [
            flag
            for flag in flags
            if flag.removeprefix("--").removeprefix("no-").replace("-", "_") not in names
            and not flag.startswith("--environment.")
        ]
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        raise SystemExit(0)
    return parsed, rest


@contextmanager
def use_original_parser():
    """Restore `parse_known_args`, which argparse calls for parse_args and for each subcommand."""
    argparse.ArgumentParser.parse_known_args = parse_known_arguments
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = parse_some_arguments


def report(parser, message):
    """Report an error, unless a part of a command lacks words that its parser requires."""
    if os.environ.get(ONLY_PARSED) == "part" and re.search("are required|expected", message):
        raise SystemExit(0)
    report_error(parser, message)


parse_whole_run([], METHODS, RECIPE, options=rl.config.RunSettings)  # remembers all settings
rl.config.parse_run = parse_small_run
argparse.ArgumentParser.parse_args = parse_arguments
argparse.ArgumentParser.parse_known_args = parse_some_arguments
argparse.ArgumentParser.error = report
