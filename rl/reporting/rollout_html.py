"""Render rollouts as a single standalone HTML page: the episodes of a group side by side, turn by
turn, with colored tokens. The page has no script and no assets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from rl.reporting.episode_html import (
    advantage_class,
    collect_turns,
    describe_episode,
    describe_message,
    format_metrics,
    format_number,
    get_stop_reason,
    has_several_turns,
    list_tokens,
)
from rl.reporting.html_report import render_template

_MOST_VALUES = 12  # maximum number of values of a filter; a filter with more values is omitted
# The filters that hide episodes: name, and the value of a row.
_FILTERS = {
    "tag": lambda row: str(row.get("tag", "")),
    "reward": lambda row: _describe_sign(row.get("reward")),
    "stop": lambda row: get_stop_reason(row) or "none",
}
# position of the link to a later step
_NEXT = re.compile(r"<!--next-->.*?</nav>")


def _describe_sign(reward: Any) -> str:
    """Return the filter value of a reward."""
    if reward is None:
        return "none"
    return "above 0" if reward > 0 else "0" if reward == 0 else "below 0"


def _number_filters(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the values of each filter, each with its number on the page."""
    numbers, filters = itertools.count(), {}
    for name, value_of in _FILTERS.items():
        values = sorted({value_of(row) for row in rows})
        if 1 < len(values) <= _MOST_VALUES:
            filters[name] = {value: next(numbers) for value in values}
    return filters


def _describe_mean(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return ", mean reward 0.5" over the scored rows; "" if there are none."""
    rewards = [float(row["reward"]) for row in rows if row.get("reward") is not None]
    return f", mean reward {format_number(sum(rewards) / len(rewards))}" if rewards else ""


def _describe_answer(
    row: Mapping[str, Any],
    turns: Sequence[Mapping[str, Any]],
    filters: Mapping[str, Mapping[str, int]],
    num_shared: int,
) -> dict[str, Any]:
    """Return an episode: its reward and stop reason, then its answer or its turns."""
    classes = [f"f{numbers[_FILTERS[name](row)]}" for name, numbers in filters.items()]
    stop = get_stop_reason(row)
    shown = has_several_turns(turns)
    return {
        "classes": " ".join(filter(None, [advantage_class(row.get("advantage")), *classes])),
        "reward": format_number(row.get("reward")),
        "advantage": format_number(row.get("advantage")),
        "seat": row.get("seat"),
        "stop": stop,
        "is_cut": stop in ("length", "truncated"),
        "num_turns": len(turns),
        "num_tokens": sum(
            len(item.get("tokens") or ()) for item in (turns if len(turns) > 1 else [row])
        ),
        "metrics": format_metrics(row.get("metrics")),
        "error": str(row.get("error") or ""),
        "tokens": [] if shown else list_tokens(row),
        "text": str(row.get("response", "")),
        **describe_episode(row, turns if shown else (), num_shared),
    }


def _describe_group(
    rows: Sequence[Mapping[str, Any]], filters: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Return the episodes of a problem with what stands above them: its title and its prompt, or
    the messages that all episodes begin with.

    Only images that are embedded in the row are shown: the page fetches nothing.
    """
    first = rows[0]
    turns = [collect_turns(row) for row in rows]
    beginnings = [_list_first_messages(*pair) for pair in zip(rows, turns, strict=True)]
    shared = beginnings[0] if all(item == beginnings[0] for item in beginnings) else []
    answers = (_find_expected_answer(*pair) for pair in zip(rows, turns, strict=True))
    images = [item for item in first.get("images") or () if isinstance(item, str)]
    has_prompt = first.get("prompt") or not beginnings[0]
    system = first.get("system")
    title = f"{first.get('tag', 'problem')} {first.get('problem', '')}".strip()
    episodes = [
        _describe_answer(row, row_turns, filters, len(shared))
        for row, row_turns in zip(rows, turns, strict=True)
    ]
    return {
        "title": title + _describe_mean(rows),
        "expected": next((answer for answer in answers if answer is not None), None),
        # Markup, because the page bounds the length of every other text.
        "images": [Markup(escape(item)) for item in images if item.startswith("data:image/")],
        "shared_messages": [describe_message(item) for item in shared],
        "system": describe_message({"role": "system", "content": system}) if system else None,
        "prompt": str(first.get("prompt", "")) if has_prompt else None,
        "episodes": episodes,
        "has_seats": any(episode["heads"] for episode in episodes),
        "has_turns": any(episode["num_turns"] > 1 for episode in episodes),
    }


def _list_first_messages(
    row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the messages before the first answer; empty if the row has none."""
    messages = (turns[0].get("messages") if turns else None) or row.get("messages") or ()
    return [item for item in messages if isinstance(item, Mapping)]


def _find_expected_answer(row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> Any:
    """Return the expected answer of the row or of its environment's logs; None if neither has
    it.
    """
    logs = turns[-1].get("logs") if turns else None
    logged = logs.get("answer") if isinstance(logs, Mapping) else None
    return row["answer"] if row.get("answer") is not None else logged


def _make_group_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key of the row's group."""
    # the prompt of a multi-turn row is the prompt of its last turn, which differs between episodes
    last = () if row.get("turns") else ("prompt",)
    return tuple(str(row.get(key, "")) for key in ("group", "tag", "problem", *last))


def _count_tokens(row: Mapping[str, Any]) -> int:
    """Return the number of tokens of an episode; words if it has no tokens."""
    turns = collect_turns(row)
    return sum(
        len(item.get("tokens") or str(item.get("response", "")).split())
        for item in (turns if len(turns) > 1 else [row])
    )


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
    groups = [list(members) for _, members in itertools.groupby(rows, key=_make_group_key)]
    sizes = itertools.accumulate(sum(map(_count_tokens, group)) for group in groups)
    num_shown = sum(i == 0 or size <= max_tokens for i, size in enumerate(sizes))
    summary = f"{len(groups)} problems, {len(rows)} answers{_describe_mean(rows)}"
    if num_shown < len(groups):
        summary += f"; the first {num_shown} problems are shown, all are in "
        summary += file or f"step_{step:06d}.jsonl"
    filters = _number_filters(rows)
    return render_template(
        "rollouts.html",
        title=title,
        summary=summary,
        previous=previous,
        filters=filters,
        numbers=[number for values in filters.values() for number in values.values()],
        groups=[_describe_group(group, filters) for group in groups[:num_shown]],
    )
