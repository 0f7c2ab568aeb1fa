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
# The same of a token's entropy in nats, from certain to undecided, and of the ratio of its
# probabilities at the update and at sampling.
ENTROPY_BANDS = (
    (0.1, "transparent"),
    (0.3, "#e8f1fa"),
    (0.7, "#cfe2f5"),
    (1.2, "#abcdec"),
    (2.0, "#7fb2df"),
    (math.inf, "#5797cf"),
)
RATIO_BANDS = (
    (0.5, "#e58f87"),
    (0.8, "#f3c1bd"),
    (0.95, "#fae3e1"),
    (1.05, "transparent"),
    (1.25, "#e0f0e0"),
    (2.0, "#bfe3c0"),
    (math.inf, "#8fca92"),
)
_FOLD_LENGTH = 600  # characters of a message above which it is folded
_INCOMPLETE = ("length", "error", "interrupted")  # stop reasons of incomplete answers

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


def format_number(value: Any, digits: int = 3) -> str:
    """Format a value with `digits` significant digits; n/a if None."""
    return "n/a" if value is None else f"{float(value):.{digits}g}"


def advantage_class(advantage: float | None) -> str:
    """Return "up" for a positive advantage, "down" for a negative advantage, otherwise ""."""
    return "" if not advantage else "up" if advantage > 0 else "down"


def find_band(value: float, bands: Sequence[tuple[float, str]]) -> int:
    """Return the index of the first band whose upper end is above the value, else the last."""
    return next((i for i, (upper, _) in enumerate(bands) if value < upper), len(bands) - 1)


def render_tokens(row: Mapping[str, Any]) -> str:
    """Render a response token by token, with the probability band and the sign of the advantage of
    each token, and the bands of its entropy and ratio if the row has `entropies` and `ratios`;
    plain text if there are no tokens.

    Tokens without a logprob were not sampled by the model, and are grey.
    """
    pieces = row.get("tokens")
    if not pieces:
        return escape(str(row.get("response", "")))
    logprobs = row.get("logprobs") or [None] * len(pieces)
    advantages = row.get("advantages") or [row.get("advantage")] * len(pieces)
    entropies = row.get("entropies") or [None] * len(pieces)
    ratios = row.get("ratios") or [None] * len(pieces)
    spans = []
    for piece, logprob, advantage, entropy, ratio in zip(
        pieces, logprobs, advantages, entropies, ratios, strict=True
    ):
        if logprob is None:
            spans.append(f'<span class="ob">{escape(str(piece))}</span>')
            continue
        probability = math.exp(min(float(logprob), 0.0))
        kinds = f"p{find_band(probability, BANDS)}"
        kinds += f" a{advantage_class(advantage)}" if advantage_class(advantage) else ""
        hover = f"logprob {float(logprob):.3f}, p {probability:.3f}"
        if entropy is not None:
            kinds += f" e{find_band(entropy, ENTROPY_BANDS)}"
            hover += f", entropy {float(entropy):.3f}"
        if ratio is not None:
            kinds += f" r{find_band(ratio, RATIO_BANDS)}"
            hover += f", ratio {float(ratio):.4g}"
        spans.append(f'<span class="{kinds}" title="{hover}">{escape(str(piece))}</span>')
    return "".join(spans)


def format_metrics(metrics: Any) -> list[str]:
    """Format the numeric metrics; none of them if `metrics` is no mapping."""
    return [
        f"{escape(str(name))} {format_number(value)}"
        for name, value in (metrics.items() if isinstance(metrics, Mapping) else ())
        if isinstance(value, int | float)
    ]


def render_message(entry: Mapping[str, Any]) -> str:
    """Render a message that the model did not sample: grey, with its role. Long messages, system
    messages and tool results are folded.
    """
    role, text = str(entry.get("role", "")), _message_text(entry)
    name = f" {entry['name']}" if entry.get("name") else ""
    if role in ("system", "developer", "tool") or len(text) > _FOLD_LENGTH:
        return render_folded(f"{role}{name}: {_truncate(text)}", text)
    return f'<div class="said"><i>{escape(role + name)}</i><pre>{escape(text)}</pre></div>'


def render_folded(summary: str, text: str, kind: str = "") -> str:
    """Render a text that is hidden until its summary is clicked."""
    return f'<details class="{kind}"><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>'


def render_tool_call(tool_call: Mapping[str, Any]) -> str:
    """Render a tool call and its result, folded."""
    arguments = tool_call.get("arguments")
    argument_text = (
        ", ".join(f"{k}={_json(v)}" for k, v in arguments.items())
        if isinstance(arguments, Mapping)
        else _json(arguments)
    )
    failed = tool_call.get("error")
    result_text = f"error: {failed}" if failed is not None else str(tool_call.get("answer", ""))
    duration_text = (
        f" ({format_number(tool_call['seconds'], 2)} s)"
        if tool_call.get("seconds") is not None
        else ""
    )
    title = (
        f"{tool_call.get('name') or 'a call that cannot be read'}({_truncate(argument_text, 80)}) → "
        f"{_truncate(result_text, 60)}{duration_text}"
    )
    return render_folded(
        title, f"{argument_text}\n\n{result_text}", "failed" if failed is not None else "call"
    )


def _json(value: Any) -> str:
    """Return the value as JSON text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _message_text(entry: Mapping[str, Any]) -> str:
    """Return the text of a message, with its tool calls."""
    content = entry.get("content")
    if isinstance(content, list):
        content = "".join(
            str(part.get("text", "")) for part in content if isinstance(part, Mapping)
        )
    text = "" if content is None else str(content)
    calls = entry.get("tool_calls")
    return text + (f"\n{_json(calls)}" if calls else "")


def _truncate(text: str, max_length: int = 80) -> str:
    """Return the start of the text on a single line, at most `max_length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


def collect_turns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
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
        earlier = entry.get("messages")
        episode_turns.append(
            {
                "response": entry.get("text", ""),
                **entry,
                "messages": [*messages, *(earlier if isinstance(earlier, list) else ())],
            }
        )
        messages = []
    metrics = episode_turns[-1].get("metrics") if episode_turns else None
    if isinstance(metrics, Mapping) and metrics.get("truncated") == 1:
        episode_turns[-1]["truncated"] = True
    return episode_turns


def get_stop_reason(row: Mapping[str, Any]) -> str:
    """Return the reason why an episode ended: the stop reason of the row or of its last turn, or
    "truncated" if a limit ended it.
    """
    episode_turns = collect_turns(row)
    stop = (
        row.get("stop_reason")
        or (episode_turns[-1].get("stop_reason") if episode_turns else "")
        or ""
    )
    limited = row.get("truncated") or (episode_turns and episode_turns[-1].get("truncated"))
    return "truncated" if limited and stop not in _INCOMPLETE else str(stop)


def render_turn(
    entry: Mapping[str, Any], row: Mapping[str, Any], index: int, place: str = ""
) -> str:
    """Render a turn: the preceding messages, the sampled text, its tool calls and its reward."""
    messages = [item for item in entry.get("messages") or () if isinstance(item, Mapping)]
    messages_html = "".join(render_message(item) for item in messages)
    from_other_seat = entry.get("sampled") is False  # shown in grey
    written = {
        "advantage": row.get("advantage"),
        **entry,
        **({"logprobs": None} if from_other_seat else {}),
    }
    facts = [f"turn {index + 1}"]
    reward = entry.get("reward")
    if reward:
        facts.append(f'<b class="{"plus" if reward > 0 else "minus"}">{float(reward):+.3g}</b>')
    stop = "truncated" if entry.get("truncated") else str(entry.get("stop_reason") or "")
    facts += (
        [
            f'<span class="cut">{escape(stop)}</span>'
            if stop in (*_INCOMPLETE, "truncated")
            else escape(stop)
        ]
        if stop
        else []
    )
    facts += [f"{len(entry['tokens'])} tokens"] if entry.get("tokens") else []
    facts += format_metrics(entry.get("metrics"))
    calls = "".join(
        render_tool_call(item)
        for item in entry.get("tool_calls") or ()
        if isinstance(item, Mapping)
    )
    logs = entry.get("logs")
    extra = (
        render_folded("logs", json.dumps(logs, ensure_ascii=False, indent=1, default=str))
        if logs
        else ""
    )
    answer_html = (
        f"<pre>{render_tokens(written)}</pre>"
        if entry.get("tokens") or entry.get("response")
        else ""
    )
    answer_html = (
        f'<div class="said">{answer_html}</div>' if from_other_seat and answer_html else answer_html
    )
    return f'<div class="turn"{place}>{messages_html}{answer_html}{calls}<p>{" &middot; ".join(facts)}</p>{extra}</div>'


def render_turns(
    row: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], num_shared: int
) -> str:
    """Render the turns of an episode in a single column; if several seats acted, in a separate
    column for each seat.

    `num_shared`: number of the first turn's messages that the group's header already shows.
    """
    visible_turns = [
        _drop_shared_messages(item, num_shared) if i == 0 else item
        for i, item in enumerate(entries)
    ]
    visible_turns = [
        _drop_tool_results(item, visible_turns[i - 1]) if i else item
        for i, item in enumerate(visible_turns)
    ]
    seats = sorted({int(item.get("seat") or 0) for item in visible_turns})
    if len(seats) < 2:
        return "".join(render_turn(item, row, i) for i, item in enumerate(visible_turns))
    names = row.get("seats") or {}
    heads = "".join(f"<h3>{escape(_seat_name(names, seat))}</h3>" for seat in seats)
    cells = []
    for i, item in enumerate(visible_turns):
        place = (
            f' style="grid-column:{seats.index(int(item.get("seat") or 0)) + 1};grid-row:{i + 2}"'
        )
        cells.append(render_turn(item, row, i, place))
    columns = f"repeat({len(seats)}, minmax(0, 1fr))"
    return (
        f'<div class="seats" style="grid-template-columns:{columns}">{heads}{"".join(cells)}</div>'
    )


def _seat_name(names: Any, seat: int) -> str:
    """Return the header of a seat's column."""
    if isinstance(names, Sequence) and not isinstance(names, str) and seat < len(names):
        return f"seat {seat}: {names[seat] or 'the policy'}"
    return f"seat {seat}"


def _drop_shared_messages(entry: Mapping[str, Any], num_shared: int) -> Mapping[str, Any]:
    """Return the turn without its first `num_shared` messages."""
    return (
        {**entry, "messages": list(entry.get("messages") or [])[num_shared:]}
        if num_shared
        else entry
    )


def _drop_tool_results(entry: Mapping[str, Any], previous: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the turn without the tool results that are already shown with the tool calls of the
    preceding turn.
    """
    if not previous.get("tool_calls"):
        return entry
    messages = [
        item
        for item in entry.get("messages") or ()
        if not (isinstance(item, Mapping) and item.get("role") == "tool")
    ]
    return {**entry, "messages": messages}
