"""Print the pages of `train.py --help` and `train.py METHOD --help`, and the box of problems."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rl.config.fields import flatten_settings, format_value, get_fields
from rl.config.recipe import read_recipe_summary
from rl.sanitize import sanitize_message

if TYPE_CHECKING:
    from rl.config.run_config import MethodEntry, Methods

_MAX_PROBLEMS = 40  # problems in one box


def exit_with_problems(
    problems: Sequence[str],
    *,
    see: str | None = None,
    outcome: str = "nothing was started",
    code: int = 2,
) -> NoReturn:
    """Print a box with all `problems` to stderr and exit with `code`. Only rank 0 prints.

    `see`: the command that shows more information. Problems may contain foreign text (of a file or
    a library), so they are printed without control sequences and with bounded length.
    """
    if os.environ.get("RANK", "0") == "0":
        from rich.console import Console, Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        encoding = sys.stderr.encoding or "utf-8"
        table = Table.grid(padding=(0, 1, 0, 0))
        for problem in problems[:_MAX_PROBLEMS]:
            table.add_row("-", Text(sanitize_message(problem, encoding=encoding)))
        if len(problems) > _MAX_PROBLEMS:
            table.add_row("", Text(f"and {len(problems) - _MAX_PROBLEMS} more"))
        body = (
            Group(table, Text(f"\nMore: {sanitize_message(see, encoding=encoding)}"))
            if see
            else table
        )
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        box = Panel(body, title=f"{count}: {outcome}", title_align="left", border_style="red")
        Console(file=sys.stderr, highlight=False).print(box)
    raise SystemExit(code)


@contextmanager
def ignore_closed_stdout() -> Iterator[None]:
    """Return a context in which stdout may be closed early by its reader (`| head`); the remaining
    output is dropped without an error.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit:  # rich exits this way
        pass


def print_method_help(
    name: str, spec: MethodEntry, options: type, settings: Any = None, options_value: Any = None
) -> None:
    """Print tyro's help page of a method, with the run-level settings as an additional section.

    `settings` and `options_value` (of a recipe) are shown as the defaults if they are given.
    """
    import tyro

    run_field = ("run", options, dataclasses.field(default_factory=options))
    page = dataclasses.make_dataclass(
        spec.Settings.__name__, [run_field], bases=(spec.Settings,), frozen=True, kw_only=True
    )
    default = {}
    if settings is not None:
        default["default"] = page(**vars(settings), run=options_value)
    config = (tyro.conf.OmitArgPrefixes,)
    try:
        tyro.cli(
            page,
            prog=f"train.py {name}",
            description=spec.summary,
            args=["--help"],
            config=config,
            **default,
        )
    except SystemExit:
        return  # tyro exits after its page; a recipe of several stages prints several pages


_MOST_USED = 12  # settings on the short page of a method
# Settings for the short page, the most used first. A page takes those that its method has.
_USED_SETTINGS = (
    "base_model",
    "dataset",
    "teacher",
    "chosen_column",
    "rejected_column",
    "steps",
    "batch_size",
    "group_size",
    "learning_rate",
    "lora_rank",
    "output_dir",
    "reward",
    "max_tokens",
    "environment",
    "kl_coef",
    "temperature",
    "eval_limit",
    "eval_every",
    "seed",
)


def print_used_settings(
    name: str, spec: MethodEntry, options: type, settings: Any = None, options_value: Any = None
) -> None:
    """Print the short help page of a method: its most used settings, each with its default and the
    first sentence of its help.

    `settings` and `options_value` (of a recipe) are shown as the defaults if they are given.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    sources = ((spec.Settings, settings), (options, options_value))
    available = [key for key in _USED_SETTINGS if any(key in get_fields(cls) for cls, _ in sources)]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for key in available[:_MOST_USED]:
        cls, value = next(source for source in sources if key in get_fields(source[0]))
        field = get_fields(cls)[key]
        default = field.default if value is None else flatten_settings(value)[key]
        owner = cls if field.section is None else typing.get_type_hints(cls)[field.section]
        text = (read_field_help(owner, key) or "").split(". ")[0].rstrip(".")
        shown = f" (default: {format_value(default)})"
        if field.required and value is None:
            shown = " (required)"
        elif default is None and "default:" in text:
            shown = ""
        table.add_row(
            Text(f"--{key.replace('_', '-')}", style="cyan"),
            Text.assemble(f"{text}.", (shown, "dim")),
        )
    console = Console(highlight=False)
    total = sum(len(get_fields(cls)) for cls, _ in sources)
    command = f"train.py {name}"
    console.print(Text(f"{command}: {spec.summary}\n", style="bold"))
    console.print(table)
    console.print(
        Text(f"\n{len(table.rows)} of {total} settings. All of them: python {command} --help all")
    )


@functools.cache
def _parse_class(cls: type) -> list[ast.stmt]:
    """Return the statements of a class; [] if its source is not available."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, SyntaxError, TypeError):
        return []
    return body.body if isinstance(body, ast.ClassDef) else []


def read_field_help(cls: type, name: str) -> str | None:
    """Return the string below a setting's field in the source of the class or of one that it
    inherits from; None if there is none.
    """
    for owner in cls.__mro__:
        for statements in itertools.pairwise(_parse_class(owner)):
            match statements:
                case (
                    ast.AnnAssign(target=ast.Name(id=field)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ) if field == name:
                    return text
    return None


def print_index(methods: Methods, default_recipe: Path, recipes: Sequence[Path]) -> None:
    """Print the page of `train.py --help`: the methods, the recipes and the next commands."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)

    def section(title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print a titled table of two columns."""
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, text in rows:
            table.add_row(Text(name, style="cyan"), Text(text))
        console.print(Text(f"\n{title}", style="bold"))
        console.print(Padding(table, (0, 0, 0, 2)))

    console.print(Text("Train a language model by reinforcement learning."))
    console.print(
        Text(
            "\naccelerate launch train.py [METHOD] [RECIPE.yaml] [--setting value ...]",
            style="bold",
        )
    )
    section("Methods", [(name, spec.summary) for name, spec in methods.items()])
    rows = [
        (
            path.name if path.is_absolute() else str(path),
            read_recipe_summary(path) + (" (the default)" if path == default_recipe else ""),
        )
        for path in recipes
    ]
    section(f"Recipes in {default_recipe.parent}/", rows or [("none", "")])
    first = next(iter(methods))
    section(
        "Next",
        [
            ("python train.py", f"run the default recipe, {default_recipe}"),
            (f"python train.py {first} --help", "the most used settings of a method"),
            (f"python train.py {first} --help all", "every setting of a method, with its default"),
            ("python train.py RECIPE.yaml --help", "the same, with the recipe's values"),
            (
                "python train.py RECIPE.yaml --seed 1",
                "a recipe with a changed setting; the last value wins",
            ),
        ],
    )
