"""Render rollouts as a single standalone HTML page: the episodes of a group side by side, turn by
turn, with colored tokens. The page has no script and no assets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from rl.reporting.episode_html import (
    BANDS,
    STYLE,
    advantage_class,
    collect_turns,
    format_metrics,
    format_number,
    get_stop_reason,
    render_message,
    render_tokens,
    render_turns,
)

_RAISED, _LOWERED = "#bfe3c0", "#f3c1bd"
_MOST_VALUES = 12  # maximum number of values of a filter; a filter with more values is omitted

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
    """Render the filters that hide episodes: by data set, sign of the reward, and stop reason. The
    filters use CSS only, no script.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.values: dict[str, dict[str, int]] = {}
        first_number = 0
        for kind, value_of in self._kinds.items():
            values = sorted({value_of(row) for row in rows})
            if 1 < len(values) <= _MOST_VALUES:
                self.values[kind] = {value: first_number + i for i, value in enumerate(values)}
                first_number += len(values)

    _kinds = {  # noqa: RUF012  (never changed)
        "tag": lambda row: str(row.get("tag", "")),
        "reward": lambda row: _reward_filter_value(row.get("reward")),
        "stop": lambda row: get_stop_reason(row) or "none",
    }

    def classes_of(self, row: Mapping[str, Any]) -> str:
        """Return the CSS classes of an episode."""
        return " ".join(
            f"f{values[self._kinds[kind](row)]}" for kind, values in self.values.items()
        )

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of all filter values."""
        return [number for values in self.values.values() for number in values.values()]

    def inputs(self) -> str:
        """Render the checkboxes."""
        return "".join(f'<input type="checkbox" id="f{number}" checked>' for number in self.numbers)

    def labels(self) -> str:
        """Render the labels of the checkboxes."""
        lines = []
        for kind, values in self.values.items():
            labels = "".join(
                f'<label for="f{i}">{escape(value)}</label>' for value, i in values.items()
            )
            lines.append(f"<span>{kind}: {labels}</span>")
        return f'<p class="filters">{" ".join(lines)}</p>' if lines else ""

    def style(self) -> list[str]:
        """Return the CSS rules of the filters."""
        rules = [f"#f{i}:not(:checked) ~ main .f{i} {{ display: none; }}" for i in self.numbers]
        checked_labels = [f"#f{i}:checked ~ header [for=f{i}]" for i in self.numbers]
        return (
            [
                *rules,
                f"{', '.join(checked_labels)} {{ color: #1f2430; text-decoration: none; "
                f"border-color: #1f2430; }}",
            ]
            if checked_labels
            else rules
        )


def _reward_filter_value(reward: Any) -> str:
    """Return the filter value of a reward."""
    return (
        "none" if reward is None else "above 0" if reward > 0 else "0" if reward == 0 else "below 0"
    )


def _build_style(filters: _Filters) -> str:
    """Return the style sheet of the page."""
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
        "#by-advantage:not(:checked) ~ header .key.adv, #by-logprob:not(:checked) ~ header .key.lp "
        "{ display: none; }"
    )
    rules.append("#by-logprob:checked ~ header [for=by-logprob], #by-advantage:checked ~ header [for=by-advantage]"
                 " { font-weight: 600; border-color: #1f2430; }")  # fmt: skip
    return "\n".join([*rules, *filters.style()])


def _render_episode(row: Mapping[str, Any], filters: _Filters, num_shared: int) -> str:
    """Render an episode: its reward and stop reason, then its answer or its turns."""
    episode_turns = collect_turns(row)
    stop = get_stop_reason(row)
    stop_html = (
        f'<span class="cut">{escape(stop)}</span>'
        if stop in ("length", "truncated")
        else escape(stop)
    )
    facts = [
        f"<b>reward {format_number(row.get('reward'))}</b>",
        f"advantage {format_number(row.get('advantage'))}",
    ]
    facts += [f"seat {escape(str(row['seat']))}"] if row.get("seat") is not None else []
    facts += [stop_html] if stop else []
    if len(episode_turns) > 1:
        facts += [
            f"{len(episode_turns)} turns",
            f"{sum(len(item.get('tokens') or ()) for item in episode_turns)} tokens",
        ]
    else:
        facts += [f"{len(row['tokens'])} tokens"] if row.get("tokens") else []
    facts += format_metrics(row.get("metrics"))
    error = f'<p class="error">{escape(str(row["error"]))}</p>' if row.get("error") else ""
    single = len(episode_turns) < 2 and not (episode_turns and episode_turns[0].get("tool_calls"))
    body = (
        f"<pre>{render_tokens(row)}</pre>"
        if single
        else render_turns(row, episode_turns, num_shared)
    )
    kinds = " ".join(filter(None, (advantage_class(row.get("advantage")), filters.classes_of(row))))
    return f'<article class="{kinds}"><p>{" &middot; ".join(facts)}</p>{error}{body}</article>'


def _first_messages(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the messages before the first answer; empty if the row has none."""
    episode_turns = collect_turns(row)
    messages = (
        (episode_turns[0].get("messages") if episode_turns else None) or row.get("messages") or ()
    )
    return [item for item in messages if isinstance(item, Mapping)]


def _render_group(rows: Sequence[Mapping[str, Any]], filters: _Filters) -> str:
    """Render the episodes of a problem, with the shared prompt."""
    first = rows[0]
    rewards = [float(row["reward"]) for row in rows if row.get("reward") is not None]
    mean = f", mean reward {format_number(sum(rewards) / len(rewards))}" if rewards else ""
    title = f"{first.get('tag', 'problem')} {first.get('problem', '')}".strip()
    expected = next(
        (expected_answer for row in rows if (expected_answer := _expected_answer(row)) is not None),
        None,
    )
    answer = (
        f'<span class="expected">, expected answer {escape(str(expected))}</span>'
        if expected is not None
        else ""
    )
    first_messages = _first_messages(first)
    shares_messages = bool(first_messages) and all(
        _first_messages(row) == first_messages for row in rows
    )
    prompt = f'<pre class="prompt">{escape(str(first.get("prompt", "")))}</pre>'
    if first.get("system"):
        prompt = render_message({"role": "system", "content": first["system"]}) + prompt
    if shares_messages:
        prompt = (
            f'<div class="prompt">{"".join(render_message(item) for item in first_messages)}</div>'
        )
    episodes = "\n".join(
        _render_episode(row, filters, len(first_messages) if shares_messages else 0) for row in rows
    )
    prompt = prompt if shares_messages or first.get("prompt") or not first_messages else ""
    prompt = _render_images(first) + prompt
    kind = {1: "", 2: " long", 3: " wide"}[max(_width_class(row) for row in rows)]
    return f'<section><h2>{escape(title + mean)}{answer}</h2>{prompt}<div class="group{kind}">\n{episodes}\n</div></section>'


def _render_images(row: Mapping[str, Any]) -> str:
    """Render the images of the prompt. Only images embedded in the row are shown; the page fetches
    nothing.
    """
    sources = [
        source
        for source in row.get("images") or ()
        if isinstance(source, str) and source.startswith("data:image/")
    ]
    return "".join(
        f'<img alt="image {i}" src="{escape(source)}">' for i, source in enumerate(sources, start=1)
    )


def _expected_answer(row: Mapping[str, Any]) -> Any:
    """Return the expected answer of the row or of its environment's logs; None if neither has
    it.
    """
    if row.get("answer") is not None:
        return row["answer"]
    episode_turns = collect_turns(row)
    logs = episode_turns[-1].get("logs") if episode_turns else None
    return logs.get("answer") if isinstance(logs, Mapping) else None


def _width_class(row: Mapping[str, Any]) -> int:
    """Return the width class of an episode: 3 for several seats, 2 for several turns, 1 for a
    single answer.
    """
    episode_turns = collect_turns(row)
    return (
        3
        if len({item.get("seat") or 0 for item in episode_turns}) > 1
        else 2
        if len(episode_turns) > 1
        else 1
    )


def _group_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key of the row's group."""
    # the prompt of a multi-turn row is the prompt of its last turn, which differs between episodes
    last = () if row.get("turns") else ("prompt",)
    return tuple(str(row.get(key, "")) for key in ("group", "tag", "problem", *last))


def _count_tokens(row: Mapping[str, Any]) -> int:
    """Return the number of tokens of an episode; words if it has no tokens."""
    episode_turns = collect_turns(row)
    return sum(
        len(item.get("tokens") or str(item.get("response", "")).split())
        for item in (episode_turns if len(episode_turns) > 1 else [row])
    )


# position of the link to a later step
_NEXT = re.compile(r"<!--next-->.*?</nav>")


def add_next_link(html: str, name: str, step: int) -> str:
    """Return the page with a link to the page of a later step, replacing an earlier such link. A
    text that is not such a page is returned unchanged.
    """
    return _NEXT.sub(
        lambda _: f'<!--next--><a href="{escape(name)}">step {step} &rarr;</a></nav>', html, count=1
    )


def render_page(
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    step: int,
    max_tokens: int = 20_000,
    previous: tuple[str, int] | None = None,
    file: str | None = None,
) -> str:
    """Render the page of an iteration. Adjacent rows with the same `group`, `tag`, `problem` and
    `prompt` form a group.

    A row has `prompt`, `response`, `reward`, and optionally `advantage` (a number) or `advantages`
    (a number for each token), `stop_reason`, `tokens` (the response in decoded pieces), `logprobs`
    (a number for each token; None for a token that the model did not sample, shown in grey),
    `group`, `tag`, `problem`, `answer` (the expected answer), `system`, `metrics`, `error`; an
    episode also has `turns` (rl.rollout.rollout_rows), or turns with the `messages` before each turn.
    Groups are shown from the first until `max_tokens` tokens are shown; the page reports how many
    problems are omitted. `file`: name of the file with all rows. `previous`: (file, step) of the
    previous page, which the page links to. `add_next_link` adds the link to the next page.
    """
    filters = _Filters(rows)
    groups = [list(group_rows) for _, group_rows in groupby(rows, key=_group_key)]
    sections: list[str] = []
    spent = 0
    for group in groups:
        size = sum(map(_count_tokens, group))
        if sections and spent + size > max_tokens:
            break
        sections.append(_render_group(group, filters))
        spent += size
    rewards = [float(row["reward"]) for row in rows if row.get("reward") is not None]
    summary = f"{len(groups)} problems, {len(rows)} answers"
    summary += f", mean reward {format_number(sum(rewards) / len(rewards))}" if rewards else ""
    if len(sections) < len(groups):
        summary += (
            f"; the first {len(sections)} problems are shown, all are in "
            f"{file or f'step_{step:06d}.jsonl'}"
        )
    bounds = ["p < 0.01", "0.05", "0.2", "0.5", "0.8", "1"]
    bands = "".join(f'<i class="p{i}">{escape(bound)}</i>' for i, bound in enumerate(bounds))
    earlier = (
        f'<a href="{escape(previous[0])}">&larr; step {previous[1]}</a>'
        if previous is not None
        else ""
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{_build_style(filters)}</style></head><body>
<input type="radio" name="by" id="by-logprob" checked><input type="radio" name="by" id="by-advantage">{filters.inputs()}
<header><nav>{earlier}<!--next--></nav><h1>{escape(title)}</h1><p class="sub">{escape(summary)}</p>
<label for="by-logprob">colour by probability</label><label for="by-advantage">colour by advantage</label>
<span class="key lp">{bands}</span><span class="key adv"><i class="aup">raised</i><i class="adown">lowered</i></span>
{filters.labels()}</header>
<main>
{chr(10).join(sections)}
</main></body></html>
"""
