"""Settings classes seen as one flat table of named fields.

A settings class is a frozen, keyword-only dataclass whose fields are values, or sections that are
such dataclasses again (two levels: `settings.optim.learning_rate`). On the command line, in a
recipe and in config.json a field is known by its last name alone (`learning_rate`), so names are
unique over the sections of a class.

Conversion from text is tyro's (`tyro.constructors`), the same code that `tyro.cli` runs; what is
done here is to convert field by field, so that every mistake is found and reported, not the first
alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from rl.errors import UnusedSetting, UserError
from rl.settings.other_words import current_settings, current_value
from rl.settings.ranges import Range, bare, complaint, numbers_in, range_of

_SHOWN = 200  # characters (or words) of a value that a message repeats
_TRUE_WORDS = {
    "true": "True",
    "yes": "True",
    "on": "True",
    "false": "False",
    "no": "False",
    "off": "False",
}
_FORMS = {"FLOAT": " (a number, like 0.5 or 3e-4)", "INT": " (a whole number, like 8)"}


class SettingsError(UserError):
    """Settings that cannot be used. `problems`: one sentence for each mistake found."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Field:
    """One setting: its flat name, the section that holds it (None: the class itself) and tyro's way
    of reading it.

    `range`: of the numbers that it holds. `whole`: whether these are whole.
    """

    name: str
    section: str | None
    spec: PrimitiveConstructorSpec
    required: bool
    default: Any
    range: Range | None = None
    whole: bool = False

    @property
    def is_switch(self) -> bool:
        return self.spec.metavar == "{True,False}"


@dataclass(frozen=True)
class Given:
    """A value as it was written: its words, and where ("--learning-rate" or "recipes/a.yaml line 4,
    learning_rate").
    """

    words: tuple[str, ...]
    place: str
    is_null: bool = False

    @property
    def shown(self) -> str:
        if self.is_null:
            return "null"
        text = " ".join(
            repr(word) if not word or " " in word else word for word in self.words[:_SHOWN]
        )
        return (
            text
            if len(text) <= _SHOWN and len(self.words) <= _SHOWN
            else f"{text[:_SHOWN]}... ({len(self.words)} words)"
        )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None where nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def as_flags(text: str, names: Iterable[str]) -> str:
    """`text` with each of the settings `names` of two words and more as the flag it is:
    learning_rate as --learning-rate.

    What is part of a path, in quotes, or the name of a method or stage stays as it is.
    """
    known = {name for name in names if "_" in name}
    word = r"(?<![\w'\"/.:-])(?<!train\.py )(?<!stage )[a-z]\w*(?![\w/-]|\.\w)"
    return re.sub(word, lambda m: "--" + m[0].replace("_", "-") if m[0] in known else m[0], text)


# ----------------------------------------------------------------------------------- the flat table


def _spec_of(owner: type, name: str, annotation: Any) -> PrimitiveConstructorSpec:
    annotation = bare(annotation)
    if typing.get_origin(annotation) is dict or annotation is dict:
        # tyro's help turns the entries of a default dict into flags of their own, which would not
        # be true here.
        raise TypeError(
            f"{owner.__name__}.{name}: write a mapping as tuple[tuple[str, float], ...]; recipes may still map it"
        )
    try:
        spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(annotation, set()))
    except UnsupportedTypeAnnotationError as error:
        raise TypeError(
            f"{owner.__name__}.{name}: {annotation!r} cannot be written as a setting"
        ) from error
    if not isinstance(spec, PrimitiveConstructorSpec):
        raise TypeError(f"{owner.__name__}.{name}: {annotation!r} cannot be written as a setting")
    return spec


def _default_of(field: dataclasses.Field) -> tuple[bool, Any]:
    """(whether there is a default, the default)."""
    if field.default_factory is not dataclasses.MISSING:
        return True, field.default_factory()
    return field.default is not dataclasses.MISSING, field.default


@functools.cache
def fields_of(cls: type) -> dict[str, Field]:
    """The settings of `cls` by their flat names, in the order of the source. TypeError where a name
    occurs twice.
    """
    table: dict[str, Field] = {}

    def add(
        owner: type, field: dataclasses.Field, annotation: Any, section: str | None, base: Any
    ) -> None:
        if field.name in table:
            raise TypeError(
                f"{cls.__name__} has two settings named {field.name!r}; flat names are unique over sections"
            )
        has_default, default = (
            (True, getattr(base, field.name)) if base is not None else _default_of(field)
        )
        spec, whole = _spec_of(owner, field.name, annotation), numbers_in(annotation) == {int}
        table[field.name] = Field(
            field.name, section, spec, not has_default, default, range_of(annotation), whole
        )

    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        annotation = hints[field.name]
        if not dataclasses.is_dataclass(annotation):
            add(cls, field, annotation, None, None)
            continue
        # A method may give a section other defaults than the section's own (`optim: Optim =
        # Optim(learning_rate=3e-4)`).
        has_base, base = _default_of(field)
        section_type = typing.cast(type, annotation)
        section_hints = typing.get_type_hints(section_type, include_extras=True)
        for inner in dataclasses.fields(section_type):
            add(
                section_type,
                inner,
                section_hints[inner.name],
                field.name,
                base if has_base else None,
            )
    return table


# ------------------------------------------------------------------------------ from text to values


def convert(field: Field, given: Given) -> Any:
    """The value of `field` as written in `given`. ValueError says what was expected."""
    spec = field.spec
    words = list(given.words)
    wrong = f"{given.place}: {given.shown or 'nothing'} is not {spec.metavar}{_FORMS.get(spec.metavar, '')}"
    if given.is_null and "None" not in spec.metavar:
        raise ValueError(wrong)
    if field.is_switch and not words:
        return True
    if "True" in spec.metavar:
        words = [_TRUE_WORDS.get(word.lower(), word) for word in words]
    allowed = (spec.nargs,) if isinstance(spec.nargs, int) else spec.nargs
    if allowed != "*" and len(words) not in allowed:
        expected = " or ".join(str(count) for count in allowed)
        got = f"{len(words)}: {given.shown}" if words else "none"
        raise ValueError(
            f"{given.place}: takes {expected} value{'s' * (expected != '1')} ({spec.metavar}), got {got}"
        )
    if spec.choices is not None:
        words = [current_value(field.name, word) for word in words]
        for word in words:
            if word not in spec.choices:
                near = nearest(word, spec.choices)
                hint = f"; did you mean {near}?" if near else ""
                raise ValueError(
                    f"{given.place}: {Given((word,), given.place).shown} is not one of {', '.join(spec.choices)}{hint}"
                )
    try:
        value = spec.instance_from_str(words)
    except (ValueError, TypeError, OverflowError) as error:  # what tyro's converters raise
        raise ValueError(wrong) from error
    if (
        field.range is not None
        and (outside := complaint(value, field.range, field.whole)) is not None
    ):
        raise ValueError(f"{given.place} {outside}")
    return value


def show(value: Any) -> str:
    """A value as it would be written on the line."""
    if isinstance(value, (list, tuple)):
        return " ".join(show(item) for item in value) or "(none)"
    return str(value) if str(value) else "''"


def _construct(
    cls: type,
    base: Any,
    values: dict[str, Any],
    prefix: str,
    problems: list[str],
    spare: Collection[str],
) -> Any:
    """`base` with `values` in place of its own, or a new `cls`; a ValueError of its checks becomes
    a problem.
    """
    try:
        return cls(**values) if base is None else dataclasses.replace(base, **values)
    except ValueError as error:
        if isinstance(error, UnusedSetting) and error.name in spare:
            raise
        problems.append(f"{prefix}{error}")
        return None


def without_unused(
    cls: type, given: Mapping[str, Given], spare: Collection[str]
) -> tuple[dict[str, Given], dict[str, str]]:
    """(`given` less those of `spare` that would have no effect in `cls`, what there was to say of
    each of them).
    """
    remaining = dict(given)
    unused: dict[str, str] = {}
    while True:
        try:
            build(cls, remaining, [], spare=spare)
            return remaining, unused
        except UnusedSetting as error:
            unused[error.name] = str(error)
            # so that it ends, whatever a class's defaults are
            spare = [name for name in spare if name != error.name]
            remaining.pop(error.name, None)


def build(
    cls: type,
    given: Mapping[str, Given],
    problems: list[str],
    prefix: str = "",
    spare: Collection[str] = (),
) -> Any:
    """An instance of `cls` with the given settings over its defaults.

    Every mistake is appended to `problems` (with `prefix` where it has no place of its own); then
    the result is None. `given` holds names of `fields_of(cls)` only. Raises UnusedSetting for one
    of `spare` that has no effect.
    """
    before = len(problems)
    values: dict[str | None, dict[str, Any]] = {}
    spoilt: set[str | None] = set()
    for field in fields_of(cls).values():
        if field.name in given:
            try:
                values.setdefault(field.section, {})[field.name] = convert(field, given[field.name])
            except ValueError as error:
                problems.append(str(error))
                spoilt.add(field.section)
        elif field.required:
            # "environment."; any other prefix is a place in a recipe
            section = prefix if prefix.endswith(".") else ""
            flag = f"--{section}{field.name.replace('_', '-')}"
            problems.append(
                f"{prefix}{field.name} is required: give it as {flag} {field.spec.metavar}"
            )
            spoilt.add(field.section)
    top = dict(values.get(None, {}))
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[item.name]) and item.name not in spoilt:
            _, base = _default_of(item)
            base = None if base is dataclasses.MISSING else base
            section_type = typing.cast(type, hints[item.name])
            top[item.name] = _construct(
                section_type, base, values.get(item.name, {}), prefix, problems, spare
            )
    return None if len(problems) > before else _construct(cls, None, top, prefix, problems, spare)


# ----------------------------------------------------------------------------------- values as JSON


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # JSON has no infinity; tyro reads "inf" back
        return value if math.isfinite(value) else str(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    raise TypeError(
        f"a setting of type {type(value).__name__} cannot be written as JSON: {value!r}"
    )


def flatten(settings: Any) -> dict[str, Any]:
    """Flat name to JSON value, of an instance of a settings class."""
    flat = {}
    cls: type = type(settings)
    for name, field in fields_of(cls).items():
        holder = settings if field.section is None else getattr(settings, field.section)
        flat[name] = _plain(getattr(holder, name))
    return flat


def defaults(cls: type, names: Collection[str]) -> dict[str, Any]:
    """Flat name to the default, as JSON, of those of `names` that have one."""
    return {
        name: _plain(field.default)
        for name, field in fields_of(cls).items()
        if name in names and not field.required
    }


def words_of(value: Any) -> tuple[str, ...]:
    """The words by which tyro reads a JSON value back. Floats keep every digit."""
    if isinstance(value, Mapping):
        return tuple(word for key, item in value.items() for word in (str(key), *words_of(item)))
    if isinstance(value, (list, tuple)):
        return tuple(word for item in value for word in words_of(item))
    return (str(value),)


def unflatten(cls: type, flat: Mapping[str, Any], problems: list[str], place: str) -> Any:
    """The inverse of `flatten`; settings that are absent take their defaults, mistakes go to
    `problems`.
    """
    table = fields_of(cls)
    raw_values = {}
    for name, value in current_settings(flat).items():
        if name not in table:
            near = nearest(name, table)
            problems.append(
                f"{place}: unknown setting {name!r}" + (f"; did you mean {near!r}?" if near else "")
            )
        else:
            raw_values[name] = Given(words_of(value), f"{place}, {name}", is_null=value is None)
    # What has no effect was saved before it was an error: it still has none.
    return build(cls, without_unused(cls, raw_values, raw_values.keys())[0], problems, prefix=f"{place}: ")
