"""Render an episode on the page of rollouts: colored tokens, turns, folded tool calls, seats side
by side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

# Upper ends of the probability bands of a token, and their colours from surprising to expected.
BANDS = (
    (0.01, "#f4978e"),
    (0.05, "#f8b79b"),
    (0.2, "#fbd3a8"),
    (0.5, "#fdebc3"),
    (0.8, "#fbf6e4"),
    (math.inf, "transparent"),
)
_LONG = 600  # characters of a message above which it is folded
_CUT = ("length", "error", "interrupted")  # stop reasons of incomplete answers

STYLE = """
.turn { border-top: 1px dashed #dedbd2; padding: 6px 0 4px; min-width: 0; } .turn:first-of-type { border-top: 0; }
.turn > p { margin: 4px 0 2px; font-size: 11px; color: #8a8e98; } .turn > p b { font-size: 11px; }
.said { color: #70747e; border-left: 2px solid #dedbd2; padding-left: 8px; margin: 2px 0 4px; }
.said > i { font-style: normal; font-size: 11px; color: #9a9da5; text-transform: lowercase; display: block; }
details { margin: 2px 0 4px; } summary { cursor: pointer; font-size: 12px; color: #4a5568; overflow-wrap: anywhere; }
details > pre { background: #f6f5f1; border-radius: 4px; padding: 4px 8px; color: #555a64; max-height: 320px; overflow: auto; }
details.failed > summary { color: #b3261e; }
.seats { display: grid; gap: 4px 14px; } .seats > .turn, .seats > h3 { min-width: 0; }
.seats h3 { font-size: 12px; margin: 0; color: #4a5568; font-weight: 600; }
.plus { color: #2f7d33; } .minus { color: #b3261e; }
"""


def number(value: Any, digits: int = 3) -> str:
    """Format a value with `digits` significant digits; n/a if None."""
    return "n/a" if value is None else f"{float(value):.{digits}g}"


def sign(advantage: float | None) -> str:
    """Return "up" for a positive advantage, "down" for a negative advantage, otherwise ""."""
    return "" if not advantage else "up" if advantage > 0 else "down"


def tokens(row: Mapping[str, Any]) -> str:
    """Render a response token by token, with the probability band and the sign of the advantage of
    each token; plain text if there are no tokens.

    Tokens without a logprob were not sampled by the model, and are grey.
    """
    pieces = row.get("tokens")
    if not pieces:
        return escape(str(row.get("response", "")))
    logprobs = row.get("logprobs") or [None] * len(pieces)
    advantages = row.get("advantages") or [row.get("advantage")] * len(pieces)
    spans = []
    for piece, logprob, advantage in zip(pieces, logprobs, advantages, strict=True):
        if logprob is None:
            spans.append(f'<span class="ob">{escape(str(piece))}</span>')
            continue
        probability = math.exp(min(float(logprob), 0.0))
        band = next(i for i, (upper, _) in enumerate(BANDS) if probability < upper)
        kinds = f"p{band} a{sign(advantage)}" if sign(advantage) else f"p{band}"
        hover = f"logprob {float(logprob):.3f}, p {probability:.3f}"
        spans.append(f'<span class="{kinds}" title="{hover}">{escape(str(piece))}</span>')
    return "".join(spans)


def figures(metrics: Mapping[str, Any] | None) -> list[str]:
    """Format the numeric metrics."""
    return [
        f"{escape(str(name))} {number(value)}"
        for name, value in (metrics or {}).items()
        if isinstance(value, int | float)
    ]


def message(said: Mapping[str, Any]) -> str:
    """Render a message that the model did not sample: grey, with its role. Long messages, system
    messages and tool results are folded.
    """
    role, text = str(said.get("role", "")), _text(said)
    name = f" {said['name']}" if said.get("name") else ""
    if role in ("system", "developer", "tool") or len(text) > _LONG:
        return folded(f"{role}{name}: {_beginning(text)}", text)
    return f'<div class="said"><i>{escape(role + name)}</i><pre>{escape(text)}</pre></div>'


def folded(summary: str, text: str, kind: str = "") -> str:
    """Render a text that is hidden until its summary is clicked."""
    return f'<details class="{kind}"><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>'


def call(made: Mapping[str, Any]) -> str:
    """Render a tool call and its result, folded."""
    arguments = made.get("arguments")
    argument_text = (
        ", ".join(f"{k}={_json(v)}" for k, v in arguments.items())
        if isinstance(arguments, Mapping)
        else _json(arguments)
    )
    failed = made.get("error")
    result_text = f"error: {failed}" if failed is not None else str(made.get("answer", ""))
    duration_text = f" ({number(made['seconds'], 2)} s)" if made.get("seconds") is not None else ""
    title = (
        f"{made.get('name') or 'a call that cannot be read'}({_beginning(argument_text, 80)}) → "
        f"{_beginning(result_text, 60)}{duration_text}"
    )
    return folded(
        title, f"{argument_text}\n\n{result_text}", "failed" if failed is not None else "call"
    )


def _json(value: Any) -> str:
    """Return the value as JSON text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _text(said: Mapping[str, Any]) -> str:
    """Return the text of a message, with its tool calls."""
    content = said.get("content")
    if isinstance(content, list):
        content = "".join(
            str(part.get("text", "")) for part in content if isinstance(part, Mapping)
        )
    text = "" if content is None else str(content)
    calls = said.get("tool_calls")
    return text + (f"\n{_json(calls)}" if calls else "")


def _beginning(text: str, most: int = 80) -> str:
    """Return the start of the text on a single line, at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an episode's turns, each with the `messages` that precede it.

    Accepts rows with an entry for each message ("sampled": False for messages that the model did
    not sample), and rows that already have turns.
    """
    episode_turns: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for entry in row.get("turns") or ():
        if not isinstance(entry, Mapping):
            continue
        if "text" in entry and not entry.get("sampled") and not entry.get("tokens"):
            messages.append({**entry, "content": entry["text"]})
            continue
        episode_turns.append(
            {
                "response": entry.get("text", ""),
                **entry,
                "messages": [*messages, *(entry.get("messages") or ())],
            }
        )
        messages = []
    if episode_turns and (episode_turns[-1].get("metrics") or {}).get("truncated") == 1:
        episode_turns[-1]["truncated"] = True
    return episode_turns


def stop_of(row: Mapping[str, Any]) -> str:
    """Return the reason why an episode ended: the stop reason of the row or of its last turn, or
    "truncated" if a limit ended it.
    """
    episode_turns = turns_of(row)
    stop = (
        row.get("stop_reason")
        or (episode_turns[-1].get("stop_reason") if episode_turns else "")
        or ""
    )
    limited = row.get("truncated") or (episode_turns and episode_turns[-1].get("truncated"))
    return "truncated" if limited and stop not in _CUT else str(stop)


def turn(given: Mapping[str, Any], row: Mapping[str, Any], index: int, place: str = "") -> str:
    """Render a turn: the preceding messages, the sampled text, its tool calls and its reward."""
    messages = [item for item in given.get("messages") or () if isinstance(item, Mapping)]
    messages_html = "".join(message(item) for item in messages)
    from_other_seat = given.get("sampled") is False  # shown in grey
    written = {
        "advantage": row.get("advantage"),
        **given,
        **({"logprobs": None} if from_other_seat else {}),
    }
    facts = [f"turn {index + 1}"]
    reward = given.get("reward")
    if reward:
        facts.append(f'<b class="{"plus" if reward > 0 else "minus"}">{float(reward):+.3g}</b>')
    stop = "truncated" if given.get("truncated") else str(given.get("stop_reason") or "")
    facts += (
        [
            f'<span class="cut">{escape(stop)}</span>'
            if stop in (*_CUT, "truncated")
            else escape(stop)
        ]
        if stop
        else []
    )
    facts += [f"{len(given['tokens'])} tokens"] if given.get("tokens") else []
    facts += figures(given.get("metrics"))
    calls = "".join(
        call(item) for item in given.get("tool_calls") or () if isinstance(item, Mapping)
    )
    logs = given.get("logs")
    extra = (
        folded("logs", json.dumps(logs, ensure_ascii=False, indent=1, default=str)) if logs else ""
    )
    answer_html = (
        f"<pre>{tokens(written)}</pre>" if given.get("tokens") or given.get("response") else ""
    )
    answer_html = (
        f'<div class="said">{answer_html}</div>' if from_other_seat and answer_html else answer_html
    )
    return f'<div class="turn"{place}>{messages_html}{answer_html}{calls}<p>{" &middot; ".join(facts)}</p>{extra}</div>'


def turns(row: Mapping[str, Any], given: Sequence[Mapping[str, Any]], shared: int) -> str:
    """Render the turns of an episode in a single column; if several seats acted, in a separate
    column for each seat.

    `shared`: number of the first turn's messages that the group's header already shows.
    """
    visible_turns = [_without(item, shared) if i == 0 else item for i, item in enumerate(given)]
    visible_turns = [
        _untold(item, visible_turns[i - 1]) if i else item for i, item in enumerate(visible_turns)
    ]
    seats = sorted({int(item.get("seat") or 0) for item in visible_turns})
    if len(seats) < 2:
        return "".join(turn(item, row, i) for i, item in enumerate(visible_turns))
    names = row.get("seats") or {}
    heads = "".join(f"<h3>{escape(_seat_name(names, seat))}</h3>" for seat in seats)
    cells = []
    for i, item in enumerate(visible_turns):
        place = (
            f' style="grid-column:{seats.index(int(item.get("seat") or 0)) + 1};grid-row:{i + 2}"'
        )
        cells.append(turn(item, row, i, place))
    columns = f"repeat({len(seats)}, minmax(0, 1fr))"
    return (
        f'<div class="seats" style="grid-template-columns:{columns}">{heads}{"".join(cells)}</div>'
    )


def _seat_name(names: Any, seat: int) -> str:
    """Return the header of a seat's column."""
    if isinstance(names, Sequence) and not isinstance(names, str) and seat < len(names):
        return f"seat {seat}: {names[seat] or 'the policy'}"
    return f"seat {seat}"


def _without(one: Mapping[str, Any], shared: int) -> Mapping[str, Any]:
    """Return the turn without its first `shared` messages."""
    return {**one, "messages": list(one.get("messages") or [])[shared:]} if shared else one


def _untold(one: Mapping[str, Any], before: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the turn without the tool results that are already shown with the tool calls of the
    preceding turn.
    """
    if not before.get("tool_calls"):
        return one
    messages = [
        item
        for item in one.get("messages") or ()
        if not (isinstance(item, Mapping) and item.get("role") == "tool")
    ]
    return {**one, "messages": messages}
