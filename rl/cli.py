"""The command line: `train.py [METHOD] [RECIPE.yaml] [--flags]` to a `Run`.

Later words win: a setting's default, a recipe's top level, a recipe's stage, the flags on the line. A top-level setting and
a flag reach every stage that has it, but for those in which it has no effect (an error where that is all of them). Every mistake
found is shown in one box (exit code 2). Nothing heavy is imported here: help must come at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rl import help_pages
from rl.fields import Given, SettingsError, as_flags, build, fields_of, nearest, without_unused, words_of
from rl.recipe import Recipe, RecipeStage, read_recipe
from rl.run_plan import MethodSpec, Run, StagePlan

HELP_WORDS = ("-h", "--help")


# ------------------------------------------------------------------------------------------------------ reading the line


@dataclass(frozen=True)
class _Flag:
    key: str
    given: Given


@dataclass(frozen=True)
class _Plan:
    """What the words ask for, before any setting is looked at."""

    stages: tuple[RecipeStage, ...]
    shared: Mapping[str, Given]
    recipe: Path | None


def _split(argv: Sequence[str], problems: list[str]) -> tuple[list[str], list[_Flag]]:
    """The leading words, and the flags with the words that follow each. "-3" is a value, "-x" is a mistake."""
    words: list[str] = []
    flags: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token.partition("=")
            flags.append((name, [value] if equals else []))
        elif token.startswith("-") and token[1:2].isalpha() and token.lower() not in ("-inf", "-nan"):
            problems.append(f"{token}: flags begin with two dashes, like --{token.lstrip('-')}")
            flags.append((token, []))  # takes the values that follow it
        elif flags:
            flags[-1][1].append(token)
        else:
            words.append(token)
    good = [(name, values) for name, values in flags if name.startswith("--")]
    return words, [_Flag(name[2:].replace("-", "_"), Given(tuple(values), name)) for name, values in good]


def _from_here(path: Path) -> Path:
    """As a person would type it: relative where it lies below the working folder."""
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path


def _recipes(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])


def _unknown_word(word: str, methods: Collection[str], folder: Path) -> str:
    recipes = {str(path): path for path in _recipes(folder)}
    by_stem = {path.stem: name for name, path in recipes.items()}
    if word.endswith((".yaml", ".yml")):
        near = by_stem.get(nearest(Path(word).stem, by_stem) or "") or nearest(word, recipes)
        what, known = f"no recipe file {word!r}", f"recipes: {', '.join(recipes) or f'none in {folder}'}"
    else:
        near = nearest(word, methods)
        near = near or by_stem.get(nearest(word, by_stem) or "")
        what, known = f"unknown method {word!r}", f"methods: {', '.join(methods)}; a recipe's name ends in .yaml"
    return what + (f"; did you mean {near}?" if near else f" ({known})")


def _read_words(words: Sequence[str], methods: Mapping[str, MethodSpec], default_recipe: Path, problems: list[str]) -> _Plan:
    """Method and recipe from the leading words."""
    left = list(words)
    method = left.pop(0) if left and left[0] in methods else None
    is_file = bool(left) and left[0].endswith((".yaml", ".yml")) and Path(left[0]).is_file()
    path = Path(left.pop(0)) if is_file else default_recipe if not words else None
    for word in left:
        if word in methods or (word.endswith((".yaml", ".yml")) and Path(word).is_file()):
            problems.append(f"{word!r} is one word too many: at most one method, then at most one recipe, then --flags")
        else:
            problems.append(_unknown_word(word, list(methods), default_recipe.parent))
    if path is None:
        return _Plan((RecipeStage(method, None, 0),) if method else (), {}, None)
    if not path.is_file():
        problems.append(f"no method given, and the default recipe {path} does not exist; name a method: {', '.join(methods)}")
        return _Plan((), {}, None)
    before = len(problems)
    recipe = read_recipe(path, problems)
    # An unreadable file has no stages; to complain of that as well would mislead.
    stages = _stages_of(recipe, method, problems) if recipe.stages or len(problems) == before else []
    return _Plan(tuple(stages), recipe.shared, path)


def _stages_of(recipe: Recipe, method: str | None, problems: list[str]) -> list[RecipeStage]:
    """The recipe's stages, checked against a method on the line."""
    if not recipe.stages:
        if method is None:
            problems.append(f"{recipe.path}: no `method:` and no `stages:`; add one, or put the method before the recipe")
            return []
        return [RecipeStage(method, None, 0)]
    if method is not None and len(recipe.stages) > 1:
        names = ", ".join(str(stage.method) for stage in recipe.stages)
        problems.append(f"{recipe.path} runs {len(recipe.stages)} stages ({names}); leave out {method!r} before it")
    elif method is not None and recipe.stages[0].method != method:
        theirs = recipe.stages[0].method
        problems.append(f"{recipe.path} is a recipe for {theirs}, not {method}; leave out {method!r} before it")
    return recipe.stages


# ---------------------------------------------------------------------------------------- settings to stages and options


def _resolve_flags(
    flags: Sequence[_Flag], known: Collection[str], elsewhere: Mapping[str, str], problems: list[str]
) -> dict[str, Given]:
    """Flags by setting; `--no-x` turns x off; the last of equal flags wins. `elsewhere`: setting to the methods having it."""
    found: dict[str, Given] = {}
    for flag in flags:
        key, given = flag.key, flag.given
        if key not in known and key.startswith("no_") and key[3:] in known:
            if given.words:
                problems.append(f"{given.place}: takes no value, got {given.shown}")
            key, given = key[3:], Given(("False",), given.place)
        if key in known:
            found[key] = given
            continue
        near = nearest(key, known)
        if key in elsewhere:
            hint = f" of this run (it is one of {elsewhere[key]})"
        else:
            hint = f"; did you mean --{near.replace('_', '-')}?" if near else ""
        problems.append(f"{given.place}: no such setting{hint}")
    return found


def _check_keys(keys: Mapping[str, Given], known: Collection[str], whose: str, problems: list[str]) -> None:
    for key, given in keys.items():
        if key not in known:
            near = nearest(key, known)
            problems.append(f"{given.place}: no setting of {whose}" + (f"; did you mean {near}?" if near else ""))


def _elsewhere(methods: Mapping[str, MethodSpec]) -> dict[str, str]:
    owners: dict[str, list[str]] = {}
    for name, method in methods.items():
        for key in fields_of(method.settings):
            owners.setdefault(key, []).append(name)
    return {key: ", ".join(names) for key, names in owners.items()}


def _variant(method: MethodSpec, given: Given | None) -> dict[str, Given]:
    """The settings that a named variant stands for, as if they were written where it is. An unknown name is found later."""
    if given is None or len(given.words) != 1:
        return {}
    return {key: Given(words_of(value), given.place) for key, value in method.variants.get(given.words[0], {}).items()}


def _stage_names(stages: Sequence[RecipeStage]) -> list[str]:
    """The given names, or the methods'; numbered where they would repeat."""
    wanted = [stage.name or str(stage.method) for stage in stages]
    return [f"{name}-{wanted[:i].count(name) + 1}" if wanted.count(name) > 1 else name for i, name in enumerate(wanted)]


def _names_one_of(given: Given | None, names: Sequence[str]) -> bool:
    """Whether a stage asks by name to begin from an earlier one: a model on the line is the one that the first begins from."""
    return given is not None and len(given.words) == 1 and given.words[0] in names


def _known_stages(plan: _Plan, methods: Mapping[str, MethodSpec], problems: list[str]) -> list[RecipeStage]:
    known = []
    for stage in plan.stages:
        if stage.method in methods:
            known.append(stage)
        elif stage.method is not None:
            near = nearest(stage.method, methods)
            hint = f"; did you mean {near}?" if near else f" (methods: {', '.join(methods)})"
            problems.append(f"{plan.recipe} line {stage.line}: unknown method {stage.method!r}{hint}")
    return known


def read(argv: Sequence[str], methods: Mapping[str, MethodSpec], default_recipe: Path, options: type) -> Run:
    """As `parse`, but raises SettingsError (with every problem found) and takes no help words."""
    problems: list[str] = []
    words, flags = _split(argv, problems)
    plan = _read_words(words, methods, default_recipe, problems)
    stages = _known_stages(plan, methods, problems)
    tables = {str(s.method): fields_of(methods[str(s.method)].settings) for s in stages}
    option_table = fields_of(options)
    for method, table in tables.items():
        if both := set(table) & set(option_table):
            raise TypeError(f"settings of {method} and of the run share the names {sorted(both)}; flat names are unique")
    known = {*option_table, *(key for table in tables.values() for key in table)}
    everything = _elsewhere(methods)
    whole = len(stages) == len(plan.stages) > 0
    # Where a method is unknown, its settings are too: then only what no method has is called a mistake.
    found = _resolve_flags(flags, known if whole else {*known, *everything}, everything, problems)
    named = " or ".join(tables) or "any method"
    _check_keys(plan.shared, known if whole else {*known, *everything}, named, problems)

    typed = (found if plan.recipe else known) - methods.keys()  # what may stand in a recipe is called by its name there
    options_value = _build(options, {k: v for k, v in {**plan.shared, **found}.items() if k in option_table}, problems, plan, typed)
    built: list[StagePlan] = []
    used: set[str] = set()
    unused: dict[str, str] = {}  # what is given for all stages is for those in which it has an effect, if there is one
    names = _stage_names(stages)
    for stage, name in zip(stages, names, strict=True):
        method = str(stage.method)
        for key in [key for key in stage.given if key in option_table]:
            problems.append(f"{stage.given[key].place}: holds for the whole run; move it to the recipe's top level")
        own = {key: value for key, value in stage.given.items() if key not in option_table}
        _check_keys(own, tables[method], method, problems)
        line = {key: value for key, value in found.items() if key != "base_model" or not _names_one_of(own.get(key), names[: len(built)])}
        merged = {k: v for k, v in {**plan.shared, **own, **line}.items() if k in tables[method]}
        implied = {k: v for k, v in _variant(methods[method], merged.get("variant")).items() if k not in merged}
        prefix = f"stage {name}: " if len(stages) > 1 else ""
        # What a variant stands for gives way without a word to what was asked for.
        spare = {*implied, *(({*plan.shared, *line} - (own.keys() - line.keys())) if len(stages) > 1 else ())}
        merged, left_out = without_unused(methods[method].settings, {**implied, **merged}, spare)
        unused |= {key: f"{prefix}{text}" for key, text in left_out.items() if key not in implied}
        used |= merged.keys()
        built.append(StagePlan(method, name, _build(methods[method].settings, merged, problems, plan, typed, prefix)))
    problems += [as_flags(text, typed) for key, text in unused.items() if key not in used]
    if problems:
        raise SettingsError(problems)
    run_name = options_value.name or (plan.recipe.stem if plan.recipe else built[0].method)
    return Run(run_name, tuple(built), options_value, str(plan.recipe) if plan.recipe else None)


def _build(cls: type, given: Mapping[str, Given], problems: list[str], plan: _Plan, typed: Collection[str], prefix: str = "") -> Any:
    """`build`; settings in `typed` are called by their flags in what their checks say."""
    found: list[str] = []
    built = build(cls, given, found, prefix)
    problems += [p if plan.recipe is not None and p.startswith(f"{plan.recipe} line") else as_flags(p, typed) for p in found]
    return built


def parse(argv: Sequence[str], methods: Mapping[str, MethodSpec], default_recipe: Path, *, options: type) -> Run:
    """The run that the words of a command line ask for.

    `methods`: by name. `default_recipe`: run where no word is given; its folder is the one whose recipes help lists.
    `options`: the run-level settings class (a `RunOptions`). Help is printed with exit code 0, mistakes in a box on stderr
    with exit code 2. Of several processes (RANK is set), only rank 0 prints.
    """
    default_recipe = _from_here(default_recipe)
    try:
        if any(token in HELP_WORDS for token in argv):
            _help([token for token in argv if token not in HELP_WORDS], methods, default_recipe, options)
        return read(argv, methods, default_recipe, options)
    except SettingsError as error:
        named = [word for word in _split(argv, [])[0] if word in methods]
        help_pages.fail(error.problems, see=" ".join(["python train.py", *named[:1], "--help"]))


# ------------------------------------------------------------------------------------------------------------------ help


def _help(argv: Sequence[str], methods: Mapping[str, MethodSpec], default_recipe: Path, options: type) -> NoReturn:
    """Print the index, or every setting of the method or recipe that is named; then exit."""
    words, _ = _split(argv, [])
    pages: list[tuple[str, Any, Any]] = []
    if len(words) == 1 and words[0] in methods:
        pages = [(words[0], None, None)]
    elif words:
        run = read(words, methods, default_recipe, options)
        pages = [(stage.method, stage.settings, run.options) for stage in run.stages]
    if os.environ.get("RANK", "0") == "0":
        with help_pages.reader_may_leave():
            for method, settings, options_value in pages:
                help_pages.method(method, methods[method], options, settings, options_value)
            if not pages:
                help_pages.index(methods, default_recipe, _recipes(default_recipe.parent))
    raise SystemExit(0)
