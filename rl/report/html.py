"""What was sampled, as one standalone page: the episodes of a group side by side, turn by turn,
tokens coloured. No script, no assets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from rl.report.episode_page import (
    BANDS,
    STYLE,
    figures,
    message,
    number,
    sign,
    stop_of,
    tokens,
    turns,
    turns_of,
)

_RAISED, _LOWERED = "#bfe3c0", "#f3c1bd"
_MOST_VALUES = 12  # of a filter: more tags than that are not offered one by one

_STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 0; color: #1f2430; background: #f6f5f1; }
header { padding: 18px 28px 12px; background: #fff; border-bottom: 1px solid #dedbd2; }
h1 { font-size: 19px; margin: 0 0 4px; } .sub { color: #6a6f7a; margin: 0 0 10px; }
nav { float: right; font-size: 13px; } nav a { color: #3355aa; margin-left: 14px; }
label { margin-right: 14px; } .key i { font-style: normal; padding: 0 6px; border-radius: 3px; margin-right: 4px; white-space: nowrap; }
main { padding: 8px 28px 40px; }
section { background: #fff; border: 1px solid #dedbd2; border-radius: 8px; margin: 14px 0; padding: 12px 16px; }
h2 { font-size: 13px; color: #6a6f7a; font-weight: 600; margin: 0 0 6px; } h2 .expected { color: #2f7d33; }
pre { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.prompt { background: #f1efe8; border-radius: 6px; padding: 8px 10px; margin-bottom: 10px; max-height: 260px; overflow: auto; }
.group { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 10px; align-items: start; }
.group.long { grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); }
.group.wide { grid-template-columns: repeat(auto-fill, minmax(640px, 1fr)); }
article { border: 1px solid #e4e1d8; border-left: 4px solid #c9c5ba; border-radius: 6px; padding: 8px 10px; min-width: 0; }
article.up { border-left-color: #4f9d53; } article.down { border-left-color: #c4554d; }
article p { margin: 0 0 6px; font-size: 12px; color: #6a6f7a; } article b { color: #1f2430; font-size: 13px; }
article .error { color: #b3261e; } .ob { color: #9a9da5; }
body > input { position: absolute; opacity: 0; } label { cursor: pointer; border-bottom: 2px solid transparent; }
.filters { margin: 8px 0 0; font-size: 12px; color: #6a6f7a; }
.filters span { display: inline-block; margin-right: 14px; }
.filters label { border: 1px solid #dedbd2; border-radius: 10px; padding: 0 8px; margin: 0 6px 4px 0; }
.filters label { color: #9a9da5; text-decoration: line-through; }
.cut { color: #8a6d1d; font-weight: 600; }
"""


class _Filters:
    """What an episode can be hidden by: its data set, the sign of its reward, why it stopped. Pure
    style, no script.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.values: dict[str, dict[str, int]] = {}
        number_of = 0
        for what, value_of in self._kinds.items():
            found = sorted({value_of(row) for row in rows})
            if 1 < len(found) <= _MOST_VALUES:
                self.values[what] = {value: number_of + i for i, value in enumerate(found)}
                number_of += len(found)

    _kinds = {  # noqa: RUF012  (never changed)
        "tag": lambda row: str(row.get("tag", "")),
        "reward": lambda row: _reward_kind(row.get("reward")),
        "stop": lambda row: stop_of(row) or "none",
    }

    def of(self, row: Mapping[str, Any]) -> str:
        """The classes of an episode."""
        return " ".join(
            f"f{values[self._kinds[what](row)]}" for what, values in self.values.items()
        )

    @property
    def numbers(self) -> list[int]:
        return [number for values in self.values.values() for number in values.values()]

    def inputs(self) -> str:
        return "".join(f'<input type="checkbox" id="f{number}" checked>' for number in self.numbers)

    def labels(self) -> str:
        lines = []
        for what, values in self.values.items():
            labels = "".join(
                f'<label for="f{i}">{escape(value)}</label>' for value, i in values.items()
            )
            lines.append(f"<span>{what}: {labels}</span>")
        return f'<p class="filters">{" ".join(lines)}</p>' if lines else ""

    def style(self) -> list[str]:
        rules = [f"#f{i}:not(:checked) ~ main .f{i} {{ display: none; }}" for i in self.numbers]
        shown = [f"#f{i}:checked ~ header [for=f{i}]" for i in self.numbers]
        return (
            [
                *rules,
                f"{', '.join(shown)} {{ color: #1f2430; text-decoration: none; border-color: #1f2430; }}",
            ]
            if shown
            else rules
        )


def _reward_kind(reward: Any) -> str:
    return (
        "none" if reward is None else "above 0" if reward > 0 else "0" if reward == 0 else "below 0"
    )


def _style(filters: _Filters) -> str:
    rules = [_STYLE, STYLE]
    for band, (_, colour) in enumerate(BANDS):
        rules.append(
            f"#by-logprob:checked ~ main .p{band}, .key .p{band} {{ background: {colour}; }}"
        )
    for name, colour in (("up", _RAISED), ("down", _LOWERED)):
        rules.append(
            f"#by-advantage:checked ~ main .a{name}, .key .a{name} {{ background: {colour}; }}"
        )
    rules.append(
        "#by-advantage:not(:checked) ~ header .key.adv, #by-logprob:not(:checked) ~ header .key.lp { display: none; }"
    )
    rules.append("#by-logprob:checked ~ header [for=by-logprob], #by-advantage:checked ~ header [for=by-advantage]"
                 " { font-weight: 600; border-color: #1f2430; }")  # fmt: skip
    return "\n".join([*rules, *filters.style()])


def _episode(row: Mapping[str, Any], filters: _Filters, shared: int) -> str:
    """One episode: what it earned and why it ended, then its answer, or its turns."""
    found = turns_of(row)
    stop = stop_of(row)
    shown_stop = (
        f'<span class="cut">{escape(stop)}</span>'
        if stop in ("length", "truncated")
        else escape(stop)
    )
    facts = [
        f"<b>reward {number(row.get('reward'))}</b>",
        f"advantage {number(row.get('advantage'))}",
    ]
    facts += [f"seat {escape(str(row['seat']))}"] if row.get("seat") is not None else []
    facts += [shown_stop] if stop else []
    if len(found) > 1:
        facts += [
            f"{len(found)} turns",
            f"{sum(len(one.get('tokens') or ()) for one in found)} tokens",
        ]
    else:
        facts += [f"{len(row['tokens'])} tokens"] if row.get("tokens") else []
    facts += figures(row.get("metrics"))
    error = f'<p class="error">{escape(str(row["error"]))}</p>' if row.get("error") else ""
    single = len(found) < 2 and not (found and found[0].get("tool_calls"))
    body = f"<pre>{tokens(row)}</pre>" if single else turns(row, found, shared)
    kinds = " ".join(filter(None, (sign(row.get("advantage")), filters.of(row))))
    return f'<article class="{kinds}"><p>{" &middot; ".join(facts)}</p>{error}{body}</article>'


def _first_messages(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the model was asked first, as messages; none where the row does not say."""
    found = turns_of(row)
    said = (found[0].get("messages") if found else None) or row.get("messages") or ()
    return [one for one in said if isinstance(one, Mapping)]


def _group(rows: Sequence[Mapping[str, Any]], filters: _Filters) -> str:
    first = rows[0]
    rewards = [float(row["reward"]) for row in rows if row.get("reward") is not None]
    mean = f", mean reward {number(sum(rewards) / len(rewards))}" if rewards else ""
    title = f"{first.get('tag', 'problem')} {first.get('problem', '')}".strip()
    expected = next((found for row in rows if (found := _expected(row)) is not None), None)
    answer = (
        f'<span class="expected">, expected answer {escape(str(expected))}</span>'
        if expected is not None
        else ""
    )
    asked = _first_messages(first)
    together = bool(asked) and all(_first_messages(row) == asked for row in rows)
    prompt = f'<pre class="prompt">{escape(str(first.get("prompt", "")))}</pre>'
    if first.get("system"):
        prompt = message({"role": "system", "content": first["system"]}) + prompt
    if together:
        prompt = f'<div class="prompt">{"".join(message(one) for one in asked)}</div>'
    episodes = "\n".join(_episode(row, filters, len(asked) if together else 0) for row in rows)
    prompt = prompt if together or first.get("prompt") or not asked else ""
    prompt = _images(first) + prompt
    kind = {1: "", 2: " long", 3: " wide"}[max(_width(row) for row in rows)]
    return f'<section><h2>{escape(title + mean)}{answer}</h2>{prompt}<div class="group{kind}">\n{episodes}\n</div></section>'


def _images(row: Mapping[str, Any]) -> str:
    """What the model saw; pictures that the row itself holds alone, nothing is fetched."""
    found = [
        one
        for one in row.get("images") or ()
        if isinstance(one, str) and one.startswith("data:image/")
    ]
    return "".join(
        f'<img alt="image {i}" src="{escape(one)}">' for i, one in enumerate(found, start=1)
    )


def _expected(row: Mapping[str, Any]) -> Any:
    """The expected answer, where the row or what its environment noted says one."""
    if row.get("answer") is not None:
        return row["answer"]
    found = turns_of(row)
    logs = found[-1].get("logs") if found else None
    return logs.get("answer") if isinstance(logs, Mapping) else None


def _width(row: Mapping[str, Any]) -> int:
    """How much room an episode wants: 3 of several seats, 2 of several turns, 1 of one answer."""
    found = turns_of(row)
    return 3 if len({one.get("seat") or 0 for one in found}) > 1 else 2 if len(found) > 1 else 1


def _identity(row: Mapping[str, Any]) -> tuple[str, ...]:
    # of episodes it is the last turn's, where they differ
    last = () if row.get("turns") else ("prompt",)
    return tuple(str(row.get(key, "")) for key in ("group", "tag", "problem", *last))


def _size(row: Mapping[str, Any]) -> int:
    found = turns_of(row)
    return sum(
        len(one.get("tokens") or str(one.get("response", "")).split())
        for one in (found if len(found) > 1 else [row])
    )


# where the link to a later step goes, once there is one
_NEXT = re.compile(r"<!--next-->.*?</nav>")


def with_next(page: str, name: str, step: int) -> str:
    """A page that links to the one of a later step, in the place of another such link. What is no
    page of these stays as it is.
    """
    return _NEXT.sub(
        lambda _: f'<!--next--><a href="{escape(name)}">step {step} &rarr;</a></nav>', page, count=1
    )


def page(
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    step: int,
    max_tokens: int = 20_000,
    before: tuple[str, int] | None = None,
    file: str | None = None,
) -> str:
    """The page of one iteration. Neighbouring rows with the same `group`, `tag`, `problem` and
    `prompt` are one group.

    A row: `prompt`, `response`, `reward`, and, where known, `advantage` (one number) or
    `advantages` (one a token), `stop_reason`, `tokens` (the response in decoded pieces), `logprobs`
    (one a token; None for a token the model did not write, which is greyed), `group`, `tag`,
    `problem`, `answer` (the expected one), `system`, `metrics`, `error`; of an episode `turns`
    (rl.episodes.rows), or turns with the `messages` said before each. Groups are shown from the
    first on until `max_tokens` are; the page says how many were left out. `file`: where all rows
    are. `before`: (file, step) of an earlier page, which is linked. A later one's link is put in by
    `with_next`.
    """
    filters = _Filters(rows)
    groups = [list(rows_of_one) for _, rows_of_one in groupby(rows, key=_identity)]
    shown: list[str] = []
    spent = 0
    for group in groups:
        size = sum(map(_size, group))
        if shown and spent + size > max_tokens:
            break
        shown.append(_group(group, filters))
        spent += size
    rewards = [float(row["reward"]) for row in rows if row.get("reward") is not None]
    summary = f"{len(groups)} problems, {len(rows)} answers"
    summary += f", mean reward {number(sum(rewards) / len(rewards))}" if rewards else ""
    if len(shown) < len(groups):
        summary += f"; the first {len(shown)} problems are shown, all are in {file or f'step_{step:06d}.jsonl'}"
    bounds = ["p < 0.01", "0.05", "0.2", "0.5", "0.8", "1"]
    bands = "".join(f'<i class="p{i}">{escape(bound)}</i>' for i, bound in enumerate(bounds))
    earlier = (
        f'<a href="{escape(before[0])}">&larr; step {before[1]}</a>' if before is not None else ""
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{_style(filters)}</style></head><body>
<input type="radio" name="by" id="by-logprob" checked><input type="radio" name="by" id="by-advantage">{filters.inputs()}
<header><nav>{earlier}<!--next--></nav><h1>{escape(title)}</h1><p class="sub">{escape(summary)}</p>
<label for="by-logprob">colour by probability</label><label for="by-advantage">colour by advantage</label>
<span class="key lp">{bands}</span><span class="key adv"><i class="aup">raised</i><i class="adown">lowered</i></span>
{filters.labels()}</header>
<main>
{chr(10).join(shown)}
</main></body></html>
"""
