"""Write docs/reference/ from the code: `python tools/reference_pages.py`.

Each page lists what a registry of `rl` holds. tests/project/test_reference_pages.py compares the committed
pages with the text that this script makes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import rl  # noqa: E402
from rl.algorithms import ADVANTAGES, METHODS, AdvantageEstimator  # noqa: E402
from rl.config import RunSettings  # noqa: E402
from rl.config.fields import SettingField, format_value, get_fields  # noqa: E402
from rl.envs.environment_registry import BUILT_IN  # noqa: E402
from rl.losses import LOSSES  # noqa: E402
from rl.rewards import registered_rewards  # noqa: E402
from rl.rewards.reward_registry import _REGISTRY  # noqa: E402
from tools.metric_names import METRICS, SECTIONS  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
COMMAND = "python tools/reference_pages.py"
NOTE = f"<!-- Written by `{COMMAND}`. Change the code, not this page. -->"
# Titles of the settings sections, by the name of their class.
TITLES = {
    "RunSettings": "Run",
    "ModelSettings": "Model",
    "DataSettings": "Data",
    "AnswerDataSettings": "Data: worked answers",
    "PreferenceDataSettings": "Data: preference pairs",
    "LabelledDataSettings": "Data: labelled answers",
    "RolloutDataSettings": "Data: stored answers",
    "EnvironmentSettings": "Environment and rewards",
    "SamplingSettings": "Sampling",
    "ShapingSettings": "Reward shaping",
    "LearnedRewardSettings": "Models as judges",
    "PolicyGradientSettings": "Policy gradient",
    "PpoOptions": "PPO",
    "KlSettings": "KL to a reference",
    "CorrectionSettings": "Importance correction",
    "OptimSettings": "Optimizer",
    "LoopSettings": "Steps, evaluation, checkpoints",
    "RowLoopSettings": "Steps, evaluation, checkpoints of methods that read rows",
    "RolloutSettings": "Rollouts",
    "AsyncRolloutSettings": "Rollouts, also asynchronous",
    "OnlinePreferenceSettings": "Online DPO",
    "SelectionSettings": "Best of n",
    "SftOptions": "Fine-tuning",
    "PreferenceSettings": "DPO",
    "OrpoOptions": "ORPO",
    "SimpoOptions": "SimPO",
    "KtoOptions": "KTO",
    "RewardModelOptions": "Reward model",
    "OfflineOptions": "Offline",
    "DistillationSettings": "Distillation",
}
# Modules whose public names the page on Python lists after those of `rl`.
MODULES = {
    "rl.envs": "what an environment of your own uses",
    "rl.rewards": "rewards, and the processes that run them",
    "rl.renderers": "messages to tokens and back",
    "rl.rlvr": "verifiable rewards in a script ([rlvr.md](../rlvr.md))",
    "rl.rollout": "rollouts and their datums, for a method of your own",
    "rl.algorithms": "method classes and their parts ([methods.md](../methods.md))",
}


def clean(text: str) -> str:
    """Return text that Markdown shows as written: tags such as <think> become code."""
    text = " ".join(text.split())
    return re.sub(r"(?<!`)([^\s`(,]*<[\w/|. -]+>[^\s`,;.)]*)(?!`)", r"`\1`", text)


def cell(text: str) -> str:
    """Return text for a table cell."""
    return clean(text).replace("|", "\\|")


def code(text: str) -> str:
    """Return text as code for a table cell; empty text stays empty."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; its cells are Markdown already."""
    lines = [" | ".join(header), "|".join(["---"] * len(header)), *map(" | ".join, rows)]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)


def page(title: str, intro: str, *parts: str) -> str:
    """Return a page with its parts separated by empty lines."""
    wrapped = textwrap.fill(" ".join(intro.split()), 100, break_long_words=False)
    wrapped = wrapped if intro else ""
    return "\n\n".join([f"# {title}", NOTE, wrapped, *parts]) + "\n"


def first_paragraph(thing: Any) -> str:
    """Return the first paragraph of a docstring; empty if the object has none of its own."""
    doc = inspect.getdoc(thing) or ""
    if isinstance(thing, type) and doc.startswith(f"{thing.__name__}("):  # made by dataclasses
        return ""
    return cell(doc.split("\n\n")[0])


# ------------------------------------------------------------------------------ settings, methods


def read_help(node: ast.ClassDef) -> dict[str, str]:
    """Return the string below each field of a class."""
    pairs = itertools.pairwise(node.body)
    return {
        field.target.id: below.value.value
        for field, below in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def find_help(cls: type) -> dict[str, str]:
    """Return the help of each setting of a class, including inherited settings."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(node, ast.ClassDef)
            texts |= read_help(node)
    return texts


def section_classes(settings: type) -> dict[str, type]:
    """Return the sections of a settings class by their field name."""
    hints = typing.get_type_hints(settings)
    return {item.name: hints[item.name] for item in dataclasses.fields(settings)}


def format_type(annotation: Any) -> str:
    """Return the type of a setting in words."""
    words = {str: "text", int: "integer", float: "number", bool: "switch", Path: "path"}
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in words:
        return words[annotation]
    if origin is typing.Annotated:
        return format_type(arguments[0])
    if origin is typing.Literal:
        return ", ".join(map(str, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {format_type(arguments[0])}"
    if origin is tuple:
        return f"({', '.join(map(format_type, arguments))})"
    if arguments:  # a union
        return " or ".join(
            "none" if item is type(None) else format_type(item) for item in arguments
        )
    return str(annotation)


def format_default(field: SettingField) -> str:
    """Return the default of a setting as code."""
    return "required" if field.required else code(format_value(field.default))


def list_sections() -> dict[type, list[str]]:
    """Return the methods that have each section, in the order of TITLES.

    Raises ValueError for a section without a title.
    """
    users: dict[type, list[str]] = {RunSettings: list(METHODS)}
    for name, method in METHODS.items():
        for section in section_classes(method.Settings).values():
            users.setdefault(section, []).append(name)
    return dict(sorted(users.items(), key=lambda item: list(TITLES).index(item[0].__name__)))


def find_listed_base(section: type) -> type | None:
    """Return the class with a section of its own from which a section inherits, or None."""
    bases = [base for base in section.__mro__[1:] if base.__name__ in TITLES]
    return bases[0] if bases else None


def section_rows(section: type, users: Sequence[str]) -> Iterable[list[str]]:
    """Return a row for each setting of a section: name, type, default, help.

    The default is that of most methods; methods with another default follow. Settings of a base
    that has its own section are left out, unless their default differs.
    """
    texts, fields = find_help(section), get_fields(section)
    hints = typing.get_type_hints(section, include_extras=True)
    base = find_listed_base(section)
    inherited = {} if base is None else get_fields(base)
    for name, field in fields.items():
        defaults: dict[str, list[str]] = {}
        for method in users if section is not RunSettings else ():
            text = format_default(get_fields(METHODS[method].Settings)[name])
            defaults.setdefault(text, []).append(method)
        common = max(defaults, key=lambda text: len(defaults[text]), default=format_default(field))
        others = "".join(
            f"; {', '.join(methods)}: {text}"
            for text, methods in defaults.items()
            if text != common
        )
        default = common + others
        if name in inherited and default == format_default(inherited[name]):
            continue
        yield [code(name), format_type(hints[name]), default, cell(texts.get(name, ""))]


def anchor(title: str) -> str:
    """Return the address of a heading within its page."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def settings_page() -> str:
    """Return the page of settings, by section."""
    parts = []
    for section, users in list_sections().items():
        methods = "every method" if len(users) == len(METHODS) else ", ".join(users)
        base = find_listed_base(section)
        title = "" if base is None else TITLES[base.__name__]
        also = f" Also every setting of [{title}](#{anchor(title)}) that this table omits."
        parts += [
            f"## {TITLES[section.__name__]}",
            textwrap.fill(f"Of {methods}.{also if base else ''}", 100),
            table(("setting", "type", "default", "meaning"), section_rows(section, users)),
        ]
    return page(
        "Settings",
        "A setting is a flag of `train.py` (`--learning-rate 1e-5`), a line of a recipe "
        "(`learning_rate: 1e-5`) and an argument of `rl.train(learning_rate=1e-5)`. A switch is "
        "turned on by `--name` and off by `--no-name`. [methods.md](methods.md) lists the sections "
        "of each method.",
        *parts,
    )


def describe_learning_rate(settings: Any) -> str:
    """Return the default learning rates of a method."""
    adapter, whole = (
        f"{rate:.0e}".replace("e-0", "e-") for rate in settings.default_learning_rates
    )
    return adapter if adapter == whole else f"{adapter} with LoRA, {whole} without"


def methods_page() -> str:
    """Return the page of methods: sections, models and variants of each."""
    parts = []
    for name, method in METHODS.items():
        links = [
            f"[{TITLES[section.__name__]}](settings.md#{anchor(TITLES[section.__name__])})"
            for section in section_classes(method.Settings).values()
        ]
        online = "samples answers" if method.online else "reads rows"
        parts += [
            f"## {name}",
            f"{clean(method.summary)[:1].upper()}{clean(method.summary)[1:]}.",
            table(
                ("property", "value"),
                [
                    ["class", f"`rl.algorithms.{method.__name__}`"],
                    [
                        "learns from",
                        f"{online}; {'a reward is required' if method.needs_reward and online == 'samples answers' else 'no reward is required'}",
                    ],
                    ["learning rate", describe_learning_rate(method.Settings)],
                    ["settings", ", ".join(links)],
                    *(
                        [
                            [
                                "variants",
                                "; ".join(
                                    f"`{key}`: "
                                    + ", ".join(f"{k} {format_value(v)}" for k, v in value.items())
                                    for key, value in method.variants.items()
                                ),
                            ]
                        ]
                        if method.variants
                        else []
                    ),
                ],
            ),
        ]
    return page(
        "Methods",
        "`train.py METHOD` and `rl.train(METHOD)` take these names. [../methods.md](../methods.md) "
        "says which method fits which data, and how to write your own.",
        *parts,
    )


# ------------------------------------------------------------------ rewards, losses, advantages


def describe_reward(name: str) -> list[str]:
    """Return the row of a registered reward: name, settings, docstring."""
    target = _REGISTRY[name].target
    doc = first_paragraph(target)
    settings = ""
    if isinstance(target, type):
        settings = ", ".join(
            format_parameter(p) for p in inspect.signature(target).parameters.values()
        )
    return [f"`{name}`", code(settings), doc]


def rewards_page() -> str:
    """Return the page of registered rewards."""
    built_in = [
        name for name in registered_rewards() if _REGISTRY[name].target.__module__.startswith("rl.")
    ]
    rows = [describe_reward(name) for name in built_in]
    return page(
        "Rewards",
        "Names for `--reward` and `--rewards`. A setting without a default has to be set where the "
        'reward is created: `rl.resolve_reward("keyword_contains", keywords=["therefore"])`. '
        "[../rewards.md](../rewards.md) explains rewards and how to write one.",
        table(("name", "settings", "value"), rows),
    )


def losses_page() -> str:
    """Return the page of losses with the entry of each in the registry."""
    parts = []
    for name, spec in LOSSES.items():
        yes_no = {
            "sum over": {"token": "tokens", "group": "answers or pairs"}.get(spec.unit, spec.unit),
            "required fields of a datum": ", ".join(f"`{f}`" for f in spec.required),
            "optional fields": ", ".join(f"`{f}`" for f in spec.optional),
            "keys of `loss_fn_config`": ", ".join(f"`{k}`" for k in spec.config),
            "terms that may be added": "entropy, KL, value" if spec.terms else "",
            "needs": ", ".join(
                text
                for needed, text in (
                    (spec.needs_mask, "the mask of actions"),
                    (spec.values, "a value head"),
                    (spec.group == 2, "pairs of datums, the better first"),
                )
                if needed
            ),
            "fused kernel on a GPU": "yes" if spec.fused_kind else "no",
        }
        parts += [
            f"## {name}",
            clean(inspect.getdoc(spec.fn) or ""),
            table(("property", "value"), [[key, text] for key, text in yes_no.items() if text]),
        ]
    return page(
        "Losses",
        "Names for `forward_backward(data, NAME, loss_fn_config)`. Every loss is a sum; `divisor=` "
        "makes it a mean. In the formulas lp is the learner's logprob, q the sampler's logprob, "
        "r = exp(lp - q), A the advantage, w the weight, sg a value without gradient. "
        "[../methods.md](../methods.md) has a loss of your own.",
        *parts,
    )


def advantages_page() -> str:
    """Return the page of advantage estimators."""

    def row(name: str, estimator: AdvantageEstimator) -> list[str]:
        used = [
            m
            for m, method in METHODS.items()
            if "advantage" in get_fields(method.Settings)
            and get_fields(method.Settings)["advantage"].default == name
        ]
        return [
            f"`{name}`" + (f" (default of {', '.join(used)})" if used else ""),
            "answers of its group" if estimator.scope == "group" else "answers of the batch",
            "yes" if estimator.state_key else "no",
            first_paragraph(estimator.fn),
        ]

    return page(
        "Advantage estimators",
        "Values of `--advantage` (grpo, reinforce). An advantage depends on the answers of the "
        "second column. An estimator with memory is saved in checkpoints. ppo and rlhf use "
        "generalized advantage estimation instead (`rl.algorithms.compute_gae`).",
        table(
            ("name", "depends on", "memory", "advantage"),
            [row(name, estimator) for name, estimator in ADVANTAGES.items()],
        ),
    )


# ------------------------------------------------------------------------------------ environments


def find_classes() -> dict[str, ast.ClassDef]:
    """Return the classes of environments by name, from their source: some import packages that
    are not installed everywhere.
    """
    folders = (ROOT / "rl" / "envs", ROOT / "rl" / "integrations")
    files = [file for folder in folders for file in folder.rglob("*.py")]
    files.append(ROOT / "rl" / "programs" / "program_env.py")
    return {
        node.name: node
        for file in sorted(files)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    }


def environment_rows(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[list[str]]:
    """Return a row for each setting of an environment; settings of its bases come first."""
    rows: dict[str, list[str]] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            rows |= {row[0]: row for row in environment_rows(classes[base.id], classes)}
    texts = read_help(node)
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            arguments, defaults = method.args.args[1:], method.args.defaults
            values = [None] * (len(arguments) - len(defaults)) + [*defaults]
            for argument, value in zip(arguments, values, strict=True):
                default = "required" if value is None else code(ast.unparse(value))
                kind = "" if argument.annotation is None else ast.unparse(argument.annotation)
                rows[f"`{argument.arg}`"] = [code(argument.arg), code(kind), default, ""]
    decorated = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    for field in node.body if decorated else ():
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        kind, name = ast.unparse(field.annotation), field.target.id
        if kind.startswith("ClassVar"):
            continue
        default = "required" if field.value is None else code(ast.unparse(field.value))
        rows[f"`{name}`"] = [f"`{name}`", code(kind), default, cell(texts.get(name, ""))]
    return list(rows.values())


def environments_page() -> str:
    """Return the page of built-in environments."""
    classes, parts = find_classes(), []
    for name, address in sorted(BUILT_IN.items()):
        node = classes[address.rpartition(":")[2]]
        rows = environment_rows(node, classes)
        paragraphs = (ast.get_docstring(node) or "").split("\n\n")
        parts += [f"## {name}", *(textwrap.fill(clean(text), 100) for text in paragraphs)]
        header = ("setting", "type", "default", "meaning")
        columns = 4 if any(row[3] for row in rows) else 3  # without help: the text above
        parts += [table(header[:columns], [row[:columns] for row in rows])] if rows else []
    return page(
        "Environments",
        "Names for `--environment`; a setting is `--environment.SETTING VALUE`. "
        "[../environments.md](../environments.md) explains environments and how to write one, "
        "[../wrappers.md](../wrappers.md) lists the packages that some of them need.",
        *parts,
    )


# ----------------------------------------------------------------------------------------- metrics


def find_section(name: str) -> str:
    """Return the section of a metric: that of its prefix."""
    prefix = name.partition("/")[0] + "/"
    names = {"step/": "step", "stage/": "step", "progress/": "step", "logps/": "rewards/"}
    return names.get(prefix, prefix)


def metrics_page() -> str:
    """Return the page of metrics, from the table in tools/metric_names.py."""
    parts = []
    for prefix, intro in SECTIONS.items():
        rows = [
            [code(name), cell(text)]
            for name, text in METRICS.items()
            if find_section(name) == prefix
        ]
        parts += [
            f"## {intro[0]}",
            *([intro[1]] if intro[1] else []),
            table(("metric", "meaning"), rows),
        ]
    return page(
        "Metrics",
        "Columns of a run's `metrics.jsonl`. A row holds the metrics that its method and its "
        "settings produce. Words in capital letters stand for a name. "
        "[../report.md](../report.md) says which to watch.",
        *parts,
    )


# ------------------------------------------------------------------------------------------ Python


def format_annotation(annotation: Any) -> str:
    """Return a type annotation as it is written in the source."""
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__name__", None) or str(annotation)


def format_parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter with its type and default."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {format_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        value = parameter.default
        shown = repr(value) if isinstance(value, (str, int, float, tuple, type(None))) else "..."
        text += f" = {shown}"
    return text


def format_signature(name: str, function: Callable[..., Any], bound: bool = False) -> str:
    """Return a call of a function or class with its parameters and its result.

    `bound` leaves out the first parameter, the object of a method.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in bases and enumerations have none
        return name
    parts, keyword_only = [], False
    for parameter in list(signature.parameters.values())[int(bound) :]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            keyword_only = True
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts, keyword_only = [*parts, "*"], True
        parts.append(format_parameter(parameter))
    result = signature.return_annotation
    arrow = (
        ""
        if result is signature.empty or isinstance(function, type)
        else (f" -> {format_annotation(result)}")
    )
    return f"{name}({', '.join(parts)}){arrow}"


def public_methods(cls: type) -> Iterable[list[str]]:
    """Return a row for each public method and property that a class of `rl` defines."""
    if issubclass(cls, BaseException):
        return
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("rl."):
            members |= vars(base)
    for name, member in members.items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if name.startswith("_") or not first_paragraph(function):
            continue
        if isinstance(function, property):
            yield [code(name), first_paragraph(function)]
        elif isinstance(function, types.FunctionType) and not name.endswith("_async"):
            bound = not isinstance(member, staticmethod)
            yield [code(format_signature(name, function, bound)), first_paragraph(function)]


def describe_name(name: str, thing: Any) -> list[str]:
    """Return the row of a public name: its signature and its docstring."""
    if isinstance(thing, type) and issubclass(thing, BaseException):
        return [code(name), first_paragraph(thing)]
    if isinstance(thing, type) or isinstance(thing, types.FunctionType):
        return [code(format_signature(name, thing)), first_paragraph(thing)]
    if isinstance(thing, types.ModuleType):
        return [code(name), f"Module `{thing.__name__}`. {first_paragraph(thing)}"]
    return [code(name), f"`{type(thing).__name__}`" if not callable(thing) else "Type."]


def python_page() -> str:
    """Return the page of public names of `rl` and of the modules for scripts."""
    names = {name: getattr(rl, name) for name in rl.__all__}
    header = ("name", "meaning")
    parts = ["## rl", table(header, [describe_name(*item) for item in names.items()])]
    for name in ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "APIFuture"):
        methods = list(public_methods(names[name]))
        parts += [f"### Methods of {name}", table(("method", "meaning"), methods)]
    for module_name, meaning in MODULES.items():
        module = importlib.import_module(module_name)
        rows = [describe_name(name, getattr(module, name)) for name in sorted(module.__all__)]
        parts += [f"## {module_name}", f"{meaning[:1].upper()}{meaning[1:]}.", table(header, rows)]
    return page(
        "Python API",
        "The public names of `rl` and of the modules that scripts use. Most client methods also "
        "exist as `NAME_async` for `await`. [../own_loop.md](../own_loop.md) shows them in use.",
        *parts,
    )


PAGES: dict[str, Callable[[], str]] = {
    "advantages": advantages_page,
    "environments": environments_page,
    "losses": losses_page,
    "methods": methods_page,
    "metrics": metrics_page,
    "python": python_page,
    "rewards": rewards_page,
    "settings": settings_page,
}


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / f"{name}.md").write_text(make())


if __name__ == "__main__":
    main()
