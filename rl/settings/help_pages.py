"""What `train.py --help` and `train.py METHOD --help` print, and the box of mistakes."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rl.plain import printable
from rl.settings.recipe import summary

if TYPE_CHECKING:
    from rl.settings.run_plan import MethodSpec

_SHOWN = 40  # problems in one box


def fail(
    problems: Sequence[str],
    *,
    see: str | None = None,
    outcome: str = "nothing was started",
    code: int = 2,
) -> NoReturn:
    """One box on stderr with all `problems`, then exit code `code`. `see`: the command that tells
    more. Only rank 0 prints.

    What stands in a problem may be others' text (a file's, a library's): it is shown without
    control sequences, and bounded.
    """
    if os.environ.get("RANK", "0") == "0":
        from rich.console import Console, Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        encoding = sys.stderr.encoding or "utf-8"
        table = Table.grid(padding=(0, 1, 0, 0))
        for problem in problems[:_SHOWN]:
            table.add_row("-", Text(printable(problem, encoding=encoding)))
        if len(problems) > _SHOWN:
            table.add_row("", Text(f"and {len(problems) - _SHOWN} more"))
        body = Group(table, Text(f"\nMore: {printable(see, encoding=encoding)}")) if see else table
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        box = Panel(body, title=f"{count}: {outcome}", title_align="left", border_style="red")
        Console(file=sys.stderr, highlight=False).print(box)
    raise SystemExit(code)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """What is printed inside may have a reader that stops reading (`| head`): the rest goes
    nowhere, and that is no error.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # what Python flushes when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit:  # how rich leaves in that case
        pass


def method(
    name: str, spec: MethodSpec, options: type, settings: Any = None, options_value: Any = None
) -> None:
    """tyro's page for one method, with the run-level settings as one more section.

    With `settings` and `options_value` (a recipe's), they are shown as the defaults.
    """
    import tyro

    run_field = ("run", options, dataclasses.field(default_factory=options))
    page = dataclasses.make_dataclass(
        spec.settings.__name__, [run_field], bases=(spec.settings,), frozen=True, kw_only=True
    )
    default = {}
    if settings is not None:
        values = {
            field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)
        }
        default["default"] = page(**values, run=options_value)
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
        return  # tyro leaves after its page; a recipe of several stages has several pages


def index(methods: Mapping[str, MethodSpec], default_recipe: Path, recipes: Sequence[Path]) -> None:
    """The page of `train.py --help`: the methods, the recipes, and how to go on."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)

    def section(title: str, rows: Sequence[tuple[str, str]]) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column()
        for remaining, right in rows:
            table.add_row(Text(remaining, style="cyan"), Text(right))
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
        (str(path), summary(path) + (" (the default)" if path == default_recipe else ""))
        for path in recipes
    ]
    section(f"Recipes in {default_recipe.parent}/", rows or [("none", "")])
    first = next(iter(methods))
    section(
        "Next",
        [
            ("python train.py", f"run the default recipe, {default_recipe}"),
            (f"python train.py {first} --help", "every setting of a method, with its default"),
            ("python train.py RECIPE.yaml --help", "the same, with the recipe's values"),
            (
                "python train.py RECIPE.yaml --seed 1",
                "a recipe with a setting changed; the last word wins",
            ),
        ],
    )
