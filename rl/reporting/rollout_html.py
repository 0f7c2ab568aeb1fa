"""Render rollouts as a single standalone HTML page: the episodes of a group side by side, turn by
turn, with colored tokens. The page has no script and no assets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from rl.jsonl import Row
from rl.reporting.episode_html import (
    StoredEpisode,
    advantage_class,
    describe_message,
    format_metrics,
    format_number,
    list_mappings,
    list_tokens,
)
from rl.reporting.html_report import render_template

_MOST_VALUES = 12  # maximum number of values of a filter; a filter with more values is omitted
# The filters that hide episodes: name, and the value of an episode.
_FILTERS: dict[str, Callable[[StoredEpisode], str]] = {
    "tag": lambda episode: str(episode.row.get("tag", "")),
    "reward": lambda episode: _describe_sign(episode.row.get("reward")),
    "stop": lambda episode: episode.stop_reason or "none",
}
# position of the link to a later step
_NEXT = re.compile(r"<!--next-->.*?</nav>")


def _describe_sign(reward: Any) -> str:
    """Return the filter value of a reward."""
    if reward is None:
        return "none"
    return "above 0" if reward > 0 else "0" if reward == 0 else "below 0"


def _number_filters(episodes: Sequence[StoredEpisode]) -> dict[str, dict[str, int]]:
    """Return the values of each filter, each with its number on the page."""
    numbers, filters = itertools.count(), {}
    for name, value_of in _FILTERS.items():
        values = sorted({value_of(episode) for episode in episodes})
        if 1 < len(values) <= _MOST_VALUES:
            filters[name] = {value: next(numbers) for value in values}
    return filters


def _describe_mean(episodes: Sequence[StoredEpisode]) -> str:
    """Return ", mean reward 0.5" over the scored episodes; "" if there are none."""
    values = (episode.row.get("reward") for episode in episodes)
    rewards = [float(value) for value in values if value is not None]
    return f", mean reward {format_number(sum(rewards) / len(rewards))}" if rewards else ""


def _describe_answer(
    episode: StoredEpisode, filters: Mapping[str, Mapping[str, int]], num_shared: int
) -> dict[str, Any]:
    """Return an episode: its reward and stop reason, then its answer or its turns."""
    row, stop = episode.row, episode.stop_reason
    classes = [f"f{numbers[_FILTERS[name](episode)]}" for name, numbers in filters.items()]
    return {
        "classes": " ".join(filter(None, [advantage_class(row.get("advantage")), *classes])),
        "reward": format_number(row.get("reward")),
        "advantage": format_number(row.get("advantage")),
        "seat": row.get("seat"),
        "stop": stop,
        "is_cut": stop in ("length", "truncated"),
        "num_turns": len(episode.turns),
        "num_tokens": sum(len(answer.get("tokens") or ()) for answer in episode.answers),
        "metrics": format_metrics(row.get("metrics")),
        "error": str(row.get("error") or ""),
        "tokens": [] if episode.has_several_turns else list_tokens(row),
        "text": str(row.get("response", "")),
        **episode.describe(num_shared),
    }


def _describe_group(
    episodes: Sequence[StoredEpisode], filters: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Return the episodes of a problem with what stands above them: its title and its prompt, or
    the messages that all episodes begin with.

    Only images that are embedded in the row are shown: the page fetches nothing.
    """
    first = episodes[0].row
    beginnings = [_list_first_messages(episode) for episode in episodes]
    shared = beginnings[0] if all(item == beginnings[0] for item in beginnings) else []
    answers = map(_find_expected_answer, episodes)
    images = [item for item in first.get("images") or () if isinstance(item, str)]
    has_prompt = first.get("prompt") or not beginnings[0]
    system = first.get("system")
    title = f"{first.get('tag', 'problem')} {first.get('problem', '')}".strip()
    described = [_describe_answer(episode, filters, len(shared)) for episode in episodes]
    return {
        "title": title + _describe_mean(episodes),
        "expected": next((answer for answer in answers if answer is not None), None),
        # Markup, because the page bounds the length of every other text.
        "images": [Markup(escape(item)) for item in images if item.startswith("data:image/")],
        "shared_messages": [describe_message(item) for item in shared],
        "system": describe_message({"role": "system", "content": system}) if system else None,
        "prompt": str(first.get("prompt", "")) if has_prompt else None,
        "episodes": described,
        "has_seats": any(item["heads"] for item in described),
        "has_turns": any(item["num_turns"] > 1 for item in described),
    }


def _list_first_messages(episode: StoredEpisode) -> list[Row]:
    """Return the messages before the first answer; empty if the row has none."""
    first = episode.turns[0] if episode.turns else {}
    return list_mappings(first.get("messages") or episode.row.get("messages"))


def _find_expected_answer(episode: StoredEpisode) -> Any:
    """Return the expected answer of the row or of its environment's logs; None if neither has
    it.
    """
    logs = episode.turns[-1].get("logs") if episode.turns else None
    logged = logs.get("answer") if isinstance(logs, Mapping) else None
    return logged if episode.row.get("answer") is None else episode.row["answer"]


def _make_group_key(episode: StoredEpisode) -> tuple[str, ...]:
    """Return the key of the episode's group."""
    row = episode.row
    # the prompt of a multi-turn row is the prompt of its last turn, which differs between episodes
    last = () if row.get("turns") else ("prompt",)
    return tuple(str(row.get(key, "")) for key in ("group", "tag", "problem", *last))


def _count_tokens(episode: StoredEpisode) -> int:
    """Return the number of tokens of an episode; words if it has no tokens."""
    return sum(
        len(answer.get("tokens") or str(answer.get("response", "")).split())
        for answer in episode.answers
    )


def add_next_link(html: str, name: str, step: int) -> str:
    """Return the page with a link to the page of a later step, replacing an earlier such link. A
    text that is not such a page is returned unchanged.
    """
    return _NEXT.sub(
        lambda _: f'<!--next--><a href="{escape(name)}">step {step} &rarr;</a></nav>', html, count=1
    )


def render_page(
    rows: Sequence[Row],
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
    episodes = [StoredEpisode(row) for row in rows]
    groups = [list(members) for _, members in itertools.groupby(episodes, key=_make_group_key)]
    sizes = itertools.accumulate(sum(map(_count_tokens, group)) for group in groups)
    num_shown = sum(i == 0 or size <= max_tokens for i, size in enumerate(sizes))
    summary = f"{len(groups)} problems, {len(rows)} answers{_describe_mean(episodes)}"
    if num_shown < len(groups):
        summary += f"; the first {num_shown} problems are shown, all are in "
        summary += file or f"step_{step:06d}.jsonl"
    filters = _number_filters(episodes)
    return render_template(
        "rollouts.html",
        title=title,
        summary=summary,
        previous=previous,
        filters=filters,
        numbers=[number for values in filters.values() for number in values.values()],
        groups=[_describe_group(group, filters) for group in groups[:num_shown]],
    )
