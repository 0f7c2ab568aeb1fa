"""Read recipes: YAML files of settings, with the line number of each setting for error messages.

Scalars keep the text as written, and the type of the setting interprets it. So `3e-4` is a number
for a numeric setting (YAML 1.1 would make it a string) and `no` is a word for a text setting (YAML
1.1 would make it false).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rl.config.fields import RawValue, nearest_name

# bytes; values; depth (a list of pairs of a stage has depth 5)
_MAX_BYTES, _MAX_NODES, _MAX_DEPTH = 1 << 18, 20_000, 16
_SURROGATE = re.compile("[\ud800-\udfff]")
_TOO_DEEP = (
    f"nested more than {_MAX_DEPTH} deep, or a value that contains itself; a recipe is a mapping "
    "of settings"
)
# Checkpoints are named <name>-000020, so a stage's name must be valid there
# (rl.distributed.checkpoint_folder is not imported here, because it imports torch).
_FILE_NAME = re.compile(r"(?!.*\.partial-)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass
class RecipeStage:
    """Hold a stage as written: `method` (None: missing), `name`, its place for messages, and the
    settings of this stage only.
    """

    method: str | None
    name: str | None = None
    place: str = ""
    raw_values: dict[str, RawValue] = field(default_factory=dict)


@dataclass
class RequestedRun:
    """Hold the stages and the shared settings of a recipe, a saved run or a command line, before
    any setting is checked. `stages` is empty for a recipe without `method:` and `stages:`.

    `recipe`: the file, if it is a recipe. `saved_name`: the name of a saved run. `place`: where
    messages say that the settings are from.
    """

    stages: list[RecipeStage] = field(default_factory=list)
    shared: dict[str, RawValue] = field(default_factory=dict)
    recipe: Path | None = None
    saved_name: str | None = None
    place: str = ""


def _read_pairs(
    node: yaml.MappingNode, path: Path, problems: list[str]
) -> dict[str, tuple[yaml.Node, int]]:
    """Return key (with underscores) to (value, line from 1). A duplicate key is a problem: YAML
    would silently keep the last value.
    """
    pairs: dict[str, tuple[yaml.Node, int]] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(
                f"{path} line {line}: a key is a setting's name, not a list or a mapping"
            )
            continue
        key = key_node.value.replace("-", "_")
        if key in pairs:
            problems.append(
                f"{path} line {line}: {key} occurs twice (first in line {pairs[key][1]}); keep one"
            )
            continue
        pairs[key] = (value_node, line)
    return pairs


def _find_structure_error(root: yaml.Node) -> str | None:
    """Return the reason why a YAML tree cannot be a recipe, or None.

    Rejects unbounded nesting (an alias of a node that contains it), too many nodes (aliases of
    aliases, each counted with all its content), and invalid text. Joins escaped surrogate pairs in
    place.
    """
    waiting, seen = [(root, 0)], 0
    while waiting:
        node, depth = waiting.pop()
        seen += 1
        if depth > _MAX_DEPTH:
            return _TOO_DEEP
        if seen > _MAX_NODES:
            return f"its aliases expand to more than {_MAX_NODES} values, the maximum of a recipe"
        if isinstance(node, yaml.MappingNode):
            waiting += [(part, depth + 1) for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(part, depth + 1) for part in node.value]
        elif _SURROGATE.search(node.value):  # a JSON escape of a character beyond 16 bits
            node.value = node.value.encode("utf-16-le", "surrogatepass").decode(
                "utf-16-le", "replace"
            )
            if "\ufffd" in node.value:
                return (
                    f"line {node.start_mark.line + 1} holds half a character (an unpaired escape "
                    "from \\ud800 to \\udfff)"
                )
    return None


def _node_words(node: yaml.Node) -> tuple[str, ...]:
    """Return the words of a YAML value; mappings and sequences are flattened."""
    if isinstance(node, yaml.ScalarNode):
        return ("None" if _is_null(node) else node.value,)
    if isinstance(node, yaml.MappingNode):
        return tuple(word for pair in node.value for part in pair for word in _node_words(part))
    return tuple(word for item in node.value for word in _node_words(item))


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _raw_value(key: str, node: yaml.Node, line: int, path: Path) -> RawValue:
    """Return a YAML value as `RawValue`."""
    return RawValue(_node_words(node), f"{path} line {line}, {key}", is_null=_is_null(node))


def _raw_values(
    pairs: dict[str, tuple[yaml.Node, int]], path: Path, problems: list[str]
) -> dict[str, RawValue]:
    """Return the settings of a mapping. `environment: {name: ..., key: value}` becomes the name and
    keys of the form environment.key.
    """
    values: dict[str, RawValue] = {}
    for key, (value, line) in pairs.items():
        if key != "environment" or not isinstance(value, yaml.MappingNode):
            values[key] = _raw_value(key, value, line, path)
            continue
        inner_pairs = _read_pairs(value, path, problems)
        if "name" not in inner_pairs:
            problems.append(
                f"{path} line {line}: environment has no `name:`; it is a name, or a mapping of "
                "its name and settings"
            )
        for inner, (node, at) in inner_pairs.items():
            name = key if inner == "name" else f"{key}.{inner}"
            values[name] = _raw_value(name, node, at, path)
    return values


def _read_word(
    key: str, pair: tuple[yaml.Node, int] | None, path: Path, problems: list[str]
) -> str | None:
    """Return the word of `method:` or `name:`, or None if the key is missing."""
    if pair is None:
        return None
    node, line = pair
    if not isinstance(node, yaml.ScalarNode) or _is_null(node) or not node.value:
        problems.append(f"{path} line {line}: {key} takes one word")
        return None
    return node.value


def _read_stage(node: yaml.Node, path: Path, problems: list[str]) -> RecipeStage | None:
    """Return a stage of the recipe, or None if the node is not a mapping."""
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        problems.append(f"{path} line {line}: a stage is a mapping with `method:` and settings")
        return None
    pairs = _read_pairs(node, path, problems)
    if "method" not in pairs:
        near = nearest_name("method", pairs)
        hint = f"; is `{near}:` a misspelled `method:`?" if near else ""
        problems.append(f"{path} line {line}: this stage has no `method:`{hint}")
    method = _read_word("method", pairs.pop("method", None), path, problems)
    name_line = pairs["name"][1] if "name" in pairs else line
    name = _read_word("name", pairs.pop("name", None), path, problems)
    if name is not None and not _FILE_NAME.fullmatch(name):
        shown = name if len(name) <= 110 else f"{name[:100]}..."
        problems.append(
            f"{path} line {name_line}: the stage's name {shown!r} is also the name of its "
            "checkpoint folders: at most 100 letters, digits, "
            "'.', '_' and '-', the first a letter or digit"
        )
    return RecipeStage(method, name, f"{path} line {line}", _raw_values(pairs, path, problems))


def _syntax_problem(path: Path, error: yaml.YAMLError) -> str:
    """Return the message for a YAML syntax error."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{path} line {error.problem_mark.line + 1}: not YAML: {error.problem}"
    return f"{path}: not YAML: {error}"


def read_recipe(path: Path, problems: list[str]) -> RequestedRun:
    """Read the recipe `path`. Mistakes go to `problems`; the readable part is returned."""
    recipe = RequestedRun(recipe=path)
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            problems.append(
                f"{path}: {size} bytes are too large for a recipe (at most {_MAX_BYTES})"
            )
            return recipe
        root = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        problems.append(_syntax_problem(path, error))
        return recipe
    except RecursionError:
        problems.append(f"{path}: {_TOO_DEEP}")
        return recipe
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return recipe
    if not isinstance(root, yaml.MappingNode):
        problems.append(
            f"{path}: a recipe is a mapping of settings, like `learning_rate: 3e-4`; this file is "
            "not"
        )
        return recipe
    if (bad := _find_structure_error(root)) is not None:
        problems.append(f"{path}: {bad}")
        return recipe
    pairs = _read_pairs(root, path, problems)
    if "stages" in pairs and "method" in pairs:
        problems.append(
            f"{path} line {pairs['method'][1]}: `method:` and `stages:` exclude each other"
        )
    method_pair, stages_pair = pairs.pop("method", None), pairs.pop("stages", None)
    if stages_pair is not None:
        node, line = stages_pair
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            problems.append(
                f"{path} line {line}: `stages:` is a list of mappings, each with `method:` and "
                "settings"
            )
        else:
            recipe.stages = [
                stage
                for item in node.value
                if (stage := _read_stage(item, path, problems)) is not None
            ]
    elif method_pair is not None:
        recipe.stages = [
            RecipeStage(
                _read_word("method", method_pair, path, problems),
                place=f"{path} line {method_pair[1]}",
            )
        ]
    recipe.shared = _raw_values(pairs, path, problems)
    return recipe


def read_recipe_summary(path: Path) -> str:
    """Return the text of the first comment line of a recipe, or ""."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("#"):
            text = line.lstrip("# ").strip()
            if text:
                return text
        elif line.strip():
            break
    return ""
