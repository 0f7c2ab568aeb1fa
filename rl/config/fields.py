"""Represent a settings class as a flat table of named fields, and convert text to values.

A settings class is a frozen, keyword-only dataclass. Each field is a value, or a section: another
such dataclass (two levels: `settings.optim.learning_rate`). The command line, recipes and
config.json name a field by its last name only (`learning_rate`), so names are unique over the
sections of a class.

The conversion from text is tyro's (`tyro.constructors`), the same code that `tyro.cli` runs. This
module converts field by field, so that every mistake is reported, not only the first.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import math
import re
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rl.config.aliases import current_settings, current_value, find_alias_hint
from rl.config.number_range import (
    Range,
    find_range_error,
    get_number_types,
    get_range,
    strip_annotation,
)
from rl.errors import UnusedSettingError, UserError

if TYPE_CHECKING:
    from tyro.constructors import PrimitiveConstructorSpec

_MAX_MESSAGE_CHARS = 200  # characters (or words) of a value that a message repeats
_TRUE_WORDS = {
    "true": "True",
    "yes": "True",
    "on": "True",
    "false": "False",
    "no": "False",
    "off": "False",
}
ENVIRONMENT_PREFIX, TEMPLATE_PREFIX = "environment.", "template."
# Settings of pairs, of which `--environment.NAME` and `--template.NAME` set one.
PART_PREFIXES = {ENVIRONMENT_PREFIX: "environment_settings", TEMPLATE_PREFIX: "template"}
_METAVAR_HINTS = {"FLOAT": " (a number, like 0.5 or 3e-4)", "INT": " (a whole number, like 8)"}


class SettingsError(UserError):
    """Report settings that cannot be used. `problems` holds a sentence for each mistake."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class SettingField:
    """Describe a setting: its flat name, the section that holds it (None: the class itself) and
    tyro's converter.

    `range`: the range of its numbers. `whole`: whether they are integers.
    """

    name: str
    section: str | None
    spec: PrimitiveConstructorSpec
    default: Any
    range: Range | None = None
    whole: bool = False

    @property
    def required(self) -> bool:
        """Return whether the field has no default."""
        return self.default is dataclasses.MISSING

    @property
    def is_switch(self) -> bool:
        """Return whether the field is a bool (or None), which a flag sets without a value."""
        return self.spec.metavar in ("{True,False}", "{None,True,False}")


class Source(enum.Enum):
    """Name the source of a setting; `merge_sources` orders them."""

    VARIANT = enum.auto()  # implied by the setting `variant`
    TOP_LEVEL = enum.auto()  # the top level of a recipe, or the options of a saved run
    STAGE = enum.auto()  # a stage of a recipe or of a saved run
    FLAG = enum.auto()  # a flag, --change, or an argument of rl.train
    STAGE_FLAG = enum.auto()  # the same, for a single stage


@dataclass(frozen=True)
class RawValue:
    """Hold a value as written: its words, and its place ("--learning-rate" or "recipes/a.yaml line
    4, learning_rate"). `is_negated`: written as --no-NAME. `sources` is set when the sources are
    merged; only environment_settings and template can have several.
    """

    words: tuple[str, ...]
    place: str
    is_null: bool = False
    is_negated: bool = False
    sources: frozenset[Source] = frozenset()

    @property
    def display_text(self) -> str:
        """Return the words as text for messages, shortened to about 200 characters."""
        if self.is_null and not self.place.startswith("--"):
            return "null"
        text = " ".join(
            repr(word) if not word or " " in word else word
            for word in self.words[:_MAX_MESSAGE_CHARS]
        )
        return (
            text
            if len(text) <= _MAX_MESSAGE_CHARS and len(self.words) <= _MAX_MESSAGE_CHARS
            else f"{text[:_MAX_MESSAGE_CHARS]}... ({len(self.words)} words)"
        )


RawValues = Mapping[str, RawValue]  # by the name of the setting


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is closest to `name`, or None if no name is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def format_as_flags(text: str, names: Iterable[str]) -> str:
    """Return `text` with the settings `names` of several words written as flags: learning_rate as
    --learning-rate.

    Names in paths, in quotes, or after "stage", "train.py" or "--change" stay unchanged.
    """
    known = {name for name in names if "_" in name}
    word = r"(?<![\w'\"/.:-])(?<!train\.py )(?<!stage )(?<!--change )[a-z]\w*(?![\w/-]|\.\w)"
    return re.sub(word, lambda m: "--" + m[0].replace("_", "-") if m[0] in known else m[0], text)


# ----------------------------------------------------------------------------------- the flat table


def _find_converter(owner: type, name: str, annotation: Any) -> PrimitiveConstructorSpec:
    """Return tyro's converter for `annotation`. Raises TypeError for an unsupported type."""
    # Imported here: scripts that construct their settings, like bench/gpu.py, need no tyro.
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
        UnsupportedTypeAnnotationError,
    )

    annotation = strip_annotation(annotation)
    if typing.get_origin(annotation) is dict or annotation is dict:
        # tyro's help shows the entries of a default dict as separate flags, which do not exist
        # here.
        raise TypeError(
            f"{owner.__name__}.{name}: write a mapping as tuple[tuple[str, float], ...]; a recipe "
            "may still use a mapping"
        )
    spec, cause = None, None
    try:
        spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(annotation, set()))
    except UnsupportedTypeAnnotationError as error:
        cause = error
    if not isinstance(spec, PrimitiveConstructorSpec):
        raise TypeError(
            f"{owner.__name__}.{name}: {annotation!r} cannot be written as a setting"
        ) from cause
    return spec


def _get_default(field: dataclasses.Field) -> Any:
    """Return the default of a field; MISSING if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@functools.cache
def get_fields(cls: type) -> dict[str, SettingField]:
    """Return the settings of `cls` by flat name, in source order. Raises TypeError if a name occurs
    twice.
    """
    table: dict[str, SettingField] = {}

    def add_fields(owner: type, section: str | None, base: Any) -> None:
        hints = typing.get_type_hints(owner, include_extras=True)
        for field in dataclasses.fields(owner):
            name, annotation, default = field.name, hints[field.name], _get_default(field)
            if section is None and dataclasses.is_dataclass(annotation):
                # A method may override the defaults of a section (`optim: Optim =
                # Optim(learning_rate=3e-4)`).
                add_fields(typing.cast(type, annotation), name, default)
                continue
            if name in table:
                raise TypeError(
                    f"{cls.__name__} has two settings named {name!r}; flat names are unique over "
                    "sections"
                )
            if base is not dataclasses.MISSING:
                default = getattr(base, name)
            spec, whole = _find_converter(owner, name, annotation), get_number_types(annotation)
            table[name] = SettingField(
                name, section, spec, default, get_range(annotation), whole == {int}
            )

    add_fields(cls, None, dataclasses.MISSING)
    return table


def check_ranges(settings: Any) -> None:
    """Raise ValueError for the first field with a value that is not a number or is outside its
    declared range.
    """
    for field in get_fields(settings.__class__).values():
        if field.section is not None or field.range is None:
            continue
        value = getattr(settings, field.name)
        if value is None:
            continue
        if field.spec.nargs == 1 and not isinstance(value, Real):
            raise ValueError(f"{field.name} is a number, got {value!r:.200}")
        if (wrong := find_range_error(value, field.range, field.whole)) is not None:
            raise ValueError(f"{field.name} {wrong}")


# ------------------------------------------------------------------------------ from text to values


def _describe_form(metavar: str) -> str:
    """Return the form of a value in words: "FLOAT (a number, like 0.5 or 3e-4) or None"."""
    form = metavar.removeprefix("{None}|")
    return form + _METAVAR_HINTS.get(form, "") + (" or None" if form != metavar else "")


def convert_value(field: SettingField, raw: RawValue) -> Any:
    """Return the value of `field` from its raw value. Raises ValueError, with the expected form, if
    the raw value is invalid.
    """
    spec = field.spec
    if raw.is_negated and not field.is_switch:
        flag = raw.place[: -len(field.name) - 3] + raw.place[-len(field.name) :]  # without no-
        remedy = f"; {flag} None unsets it" if "None" in spec.metavar else ""
        raise ValueError(f"{raw.place}: {field.name} is no switch{remedy}")
    words = list(raw.words)
    wrong = f"{raw.place}: {raw.display_text or 'nothing'} is not {_describe_form(spec.metavar)}"
    # An empty path would be the current folder. It usually comes from an unset shell variable.
    if (raw.is_null and "None" not in spec.metavar) or ("" in words and "PATH" in spec.metavar):
        raise ValueError(wrong)
    if field.is_switch and not words:
        return True
    if "True" in spec.metavar:
        words = [_TRUE_WORDS.get(word.lower(), word) for word in words]
    allowed = (spec.nargs,) if isinstance(spec.nargs, int) else spec.nargs
    if allowed != "*" and len(words) not in allowed:
        expected = " or ".join(str(count) for count in allowed)
        got = f"{len(words)}: {raw.display_text}" if words else "none"
        raise ValueError(
            f"{raw.place}: takes {expected} value{'s' * (expected != '1')} ({spec.metavar}), got "
            f"{got}"
        )
    if spec.choices is not None:
        words = [current_value(field.name, word) for word in words]
        for word in words:
            if word not in spec.choices:
                # tyro's choices of an optional setting have no order, its metavar has
                choices = sorted(spec.choices, key=spec.metavar.find)
                near = nearest_name(word, choices)
                hint = f"; did you mean {near}?" if near else ""
                raise ValueError(
                    f"{raw.place}: {RawValue((word,), raw.place).display_text} is not one of "
                    f"{', '.join(choices)}{hint}"
                )
    try:
        value = spec.instance_from_str(words)
    except (ValueError, TypeError, OverflowError) as error:  # what tyro's converters raise
        raise ValueError(wrong) from error
    if (
        field.range is not None
        and (outside := find_range_error(value, field.range, field.whole)) is not None
    ):
        raise ValueError(f"{raw.place} {outside}")
    return value


def format_value(value: Any) -> str:
    """Return a value as it would be written on the command line."""
    if isinstance(value, (list, tuple)):
        return " ".join(format_value(item) for item in value) or "(none)"
    return str(value) if str(value) else "''"


def build_settings(
    cls: type,
    raw_values: RawValues,
    problems: list[str],
    prefix: str = "",
    *,
    droppable: Collection[str] = (),
    unused: dict[str, str] | None = None,
    flags: Collection[str] = (),
) -> Any:
    """Return an instance of `cls` with the raw values over its defaults.

    Every mistake is appended to `problems` (with `prefix` if the message has no place), and the
    result is then None. All names are fields of `cls`.

    `droppable`: settings that are left out if they have no effect; `unused` receives the message of
    each. `flags`: settings that messages name as flags.
    """
    table = get_fields(cls)
    before = len(problems)
    values: dict[str | None, dict[str, Any]] = {}
    invalid_sections: set[str | None] = set()
    for field in table.values():
        if field.name in raw_values:
            raw = raw_values[field.name]
            try:
                values.setdefault(field.section, {})[field.name] = convert_value(field, raw)
            except ValueError as error:
                typed = flags if raw.place.startswith("--") else ()
                problems.append(format_as_flags(str(error), typed))
                invalid_sections.add(field.section)
        elif field.required:
            # A prefix is "environment." or a place in a recipe.
            section = prefix if prefix.endswith(".") else ""
            flag = f"--{section}{field.name.replace('_', '-')}"
            problems.append(
                f"{prefix}{format_as_flags(field.name, flags)} is required: set it with {flag} "
                f"{field.spec.metavar}"
            )
            invalid_sections.add(field.section)
    remaining = set(droppable)
    while True:
        messages: list[str] = []
        try:
            built = _construct(cls, values, invalid_sections, remaining, messages)
            break
        except UnusedSettingError as error:
            remaining.remove(error.name)
            values.get(table[error.name].section, {}).pop(error.name, None)
            if unused is not None:
                unused[error.name] = str(error)
    problems += [prefix + format_as_flags(message, flags) for message in messages]
    return built if len(problems) == before else None


def _construct(
    cls: type,
    values: Mapping[str | None, Mapping[str, Any]],
    invalid_sections: Collection[str | None],
    droppable: Collection[str],
    messages: list[str],
) -> Any:
    """Return `cls` with the values of each section (None: of the class itself) over its defaults.

    The message of a ValueError of a section's checks goes to `messages`, and then, or if a section
    is in `invalid_sections`, the result is None. Raises UnusedSettingError for a droppable setting.
    """

    def create(cls: Any, values: Mapping[str, Any], base: Any = dataclasses.MISSING) -> Any:
        try:
            return (
                cls(**values)
                if base is dataclasses.MISSING
                else dataclasses.replace(base, **values)
            )
        except ValueError as error:
            if isinstance(error, UnusedSettingError) and error.name in droppable:
                raise
            messages.append(str(error))

    hints = typing.get_type_hints(cls)
    sections = {
        item.name: create(hints[item.name], values.get(item.name, {}), _get_default(item))
        for item in dataclasses.fields(cls)
        if dataclasses.is_dataclass(hints[item.name]) and item.name not in invalid_sections
    }
    return (
        None if invalid_sections or messages else create(cls, {**values.get(None, {}), **sections})
    )


# ----------------------------------------------------------------------------------- values as JSON


def _to_json_value(value: Any) -> Any:
    """Convert a setting's value to a JSON value. Raises TypeError for an unsupported type."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # JSON has no infinity; tyro reads "inf"
        return value if math.isfinite(value) else str(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_to_json_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    raise TypeError(
        f"a setting of type {type(value).__name__} cannot be written as JSON: {value!r}"
    )


def flatten_settings(settings: Any) -> dict[str, Any]:
    """Return the settings of an instance as flat name to JSON value."""
    flat = {}
    cls: type = type(settings)
    for name, field in get_fields(cls).items():
        holder = settings if field.section is None else getattr(settings, field.section)
        flat[name] = _to_json_value(getattr(holder, name))
    return flat


def get_defaults(cls: type, names: Collection[str]) -> dict[str, Any]:
    """Return the defaults (as JSON values) of the fields in `names` that have a default, by flat
    name.
    """
    return {
        name: _to_json_value(field.default)
        for name, field in get_fields(cls).items()
        if name in names and not field.required
    }


def to_words(value: Any) -> tuple[str, ...]:
    """Return the words that tyro reads back as this JSON value. Floats keep every digit."""
    if isinstance(value, Mapping):
        return tuple(word for key, item in value.items() for word in (str(key), *to_words(item)))
    if isinstance(value, (list, tuple)):
        return tuple(word for item in value for word in to_words(item))
    return (str(value),)


def to_raw_value(value: Any, place: str) -> RawValue:
    """Return a JSON value or Python value as raw value."""
    return RawValue(to_words(value), place, is_null=value is None)


def get_saved_values(flat: Mapping[str, Any], place: str) -> dict[str, RawValue]:
    """Return saved settings (flat name to JSON value) as raw values."""
    return {name: to_raw_value(value, f"{place}, {name}") for name, value in flat.items()}


def is_setting(name: str, known: Collection[str]) -> bool:
    """Return whether `name` is in `known`, or one of an environment's settings or of a chat
    template's, which these check later.
    """
    return name in known or any(
        name.startswith(prefix) and name != prefix and setting in known
        for prefix, setting in PART_PREFIXES.items()
    )


def suggest_setting(
    name: str, known: Collection[str], owners: Mapping[str, str], *, as_flag: bool = False
) -> str:
    """Return the hint for an unknown setting: its name here, the methods that have it (of `owners`,
    by setting), or the nearest name in `known`, as a flag if requested. "" if there is none.
    """
    near = nearest_name(name, known)
    if near and as_flag:
        near = f"--{near.replace('_', '-')}"
    return find_alias_hint(name, known, owners) or (f"; did you mean {near}?" if near else "")


def check_names(
    raw_values: RawValues,
    known: Collection[str],
    owner: str,
    problems: list[str],
    owners: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Append a problem for each name that is not in `known`, the settings of `owner`.

    `owners`: the methods that have a setting, for the hint.
    """
    for name, raw in raw_values.items():
        if not is_setting(name, known):
            hint = suggest_setting(name, known, owners)
            problems.append(f"{raw.place}: no setting of {owner}{hint}")


def unflatten_settings(cls: type, flat: Mapping[str, Any], problems: list[str], place: str) -> Any:
    """Return an instance of `cls` with the saved settings `flat`, the inverse of
    `flatten_settings`. Absent settings take their defaults; mistakes are appended to `problems`.
    """
    table = get_fields(cls)
    raw_values = get_saved_values(current_settings(flat, table), place)
    check_names(raw_values, table, cls.__name__, problems)
    known = {name: raw for name, raw in raw_values.items() if name in table}
    # Older runs could save settings without effect; ignore such settings.
    return build_settings(cls, known, problems, f"{place}: ", droppable=known)
