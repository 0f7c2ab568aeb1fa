"""An episode on the page of rollouts: tokens coloured, turns, calls of tools folded, seats side by
side.
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
_LONG = 600  # characters of what others wrote from which it is folded
_CUT = ("length", "error", "interrupted")  # stop reasons with which an answer did not end by itself

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
    return "n/a" if value is None else f"{float(value):.{digits}g}"


def sign(advantage: float | None) -> str:
    return "" if not advantage else "up" if advantage > 0 else "down"


def tokens(row: Mapping[str, Any]) -> str:
    """A response token by token, each with its probability band and the sign of its advantage;
    plain text without tokens.

    Tokens without a logprob were not written by the model, and are grey.
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
    return [
        f"{escape(str(name))} {number(value)}"
        for name, value in (metrics or {}).items()
        if isinstance(value, int | float)
    ]


def message(said: Mapping[str, Any]) -> str:
    """What somebody else wrote: grey, with its role; folded where it is long, is a system message,
    or a tool's answer.
    """
    role, text = str(said.get("role", "")), _text(said)
    name = f" {said['name']}" if said.get("name") else ""
    if role in ("system", "developer", "tool") or len(text) > _LONG:
        return folded(f"{role}{name}: {_beginning(text)}", text)
    return f'<div class="said"><i>{escape(role + name)}</i><pre>{escape(text)}</pre></div>'


def folded(summary: str, text: str, kind: str = "") -> str:
    return f'<details class="{kind}"><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>'


def call(made: Mapping[str, Any]) -> str:
    """A call of a tool and what came of it, folded."""
    arguments = made.get("arguments")
    shown = (
        ", ".join(f"{k}={_json(v)}" for k, v in arguments.items())
        if isinstance(arguments, Mapping)
        else _json(arguments)
    )
    failed = made.get("error")
    came = f"error: {failed}" if failed is not None else str(made.get("answer", ""))
    took = f" ({number(made['seconds'], 2)} s)" if made.get("seconds") is not None else ""
    title = f"{made.get('name') or 'a call that cannot be read'}({_beginning(shown, 80)}) → {_beginning(came, 60)}{took}"
    return folded(title, f"{shown}\n\n{came}", "failed" if failed is not None else "call")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _text(said: Mapping[str, Any]) -> str:
    content = said.get("content")
    if isinstance(content, list):
        content = "".join(
            str(part.get("text", "")) for part in content if isinstance(part, Mapping)
        )
    text = "" if content is None else str(content)
    calls = said.get("tool_calls")
    return text + (f"\n{_json(calls)}" if calls else "")


def _beginning(text: str, most: int = 80) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An episode's turns, each with the `messages` that were said before it.

    Of rows that list one entry for each message ("sampled": False for what others said), and of
    those that have turns already.
    """
    found: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    for one in row.get("turns") or ():
        if not isinstance(one, Mapping):
            continue
        if "text" in one and not one.get("sampled") and not one.get("tokens"):
            said.append({**one, "content": one["text"]})
            continue
        found.append(
            {
                "response": one.get("text", ""),
                **one,
                "messages": [*said, *(one.get("messages") or ())],
            }
        )
        said = []
    if found and (found[-1].get("metrics") or {}).get("truncated") == 1:
        found[-1]["truncated"] = True
    return found


def stop_of(row: Mapping[str, Any]) -> str:
    """Why an episode ended, in a word: of the row, of its last turn, or "truncated" where a limit
    ended it.
    """
    turns = turns_of(row)
    stop = row.get("stop_reason") or (turns[-1].get("stop_reason") if turns else "") or ""
    limited = row.get("truncated") or (turns and turns[-1].get("truncated"))
    return "truncated" if limited and stop not in _CUT else str(stop)


def turn(given: Mapping[str, Any], row: Mapping[str, Any], index: int, place: str = "") -> str:
    """One turn: what was said before it, what was sampled, the calls in it, and what it earned."""
    said = [one for one in given.get("messages") or () if isinstance(one, Mapping)]
    before = "".join(message(one) for one in said)
    other = given.get("sampled") is False  # another seat, not the policy's: it is grey
    written = {"advantage": row.get("advantage"), **given, **({"logprobs": None} if other else {})}
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
    calls = "".join(call(one) for one in given.get("tool_calls") or () if isinstance(one, Mapping))
    logs = given.get("logs")
    extra = (
        folded("logs", json.dumps(logs, ensure_ascii=False, indent=1, default=str)) if logs else ""
    )
    mine = f"<pre>{tokens(written)}</pre>" if given.get("tokens") or given.get("response") else ""
    mine = f'<div class="said">{mine}</div>' if other and mine else mine
    return f'<div class="turn"{place}>{before}{mine}{calls}<p>{" &middot; ".join(facts)}</p>{extra}</div>'


def turns(row: Mapping[str, Any], given: Sequence[Mapping[str, Any]], shared: int) -> str:
    """The turns of an episode, one below the other; where several seats acted, each in a column of
    its own.

    `shared`: how many of the first turn's messages stand above the group already.
    """
    found = [_without(one, shared) if i == 0 else one for i, one in enumerate(given)]
    found = [_untold(one, found[i - 1]) if i else one for i, one in enumerate(found)]
    seats = sorted({int(one.get("seat") or 0) for one in found})
    if len(seats) < 2:
        return "".join(turn(one, row, i) for i, one in enumerate(found))
    names = row.get("seats") or {}
    heads = "".join(f"<h3>{escape(_seat_name(names, seat))}</h3>" for seat in seats)
    cells = []
    for i, one in enumerate(found):
        place = (
            f' style="grid-column:{seats.index(int(one.get("seat") or 0)) + 1};grid-row:{i + 2}"'
        )
        cells.append(turn(one, row, i, place))
    columns = f"repeat({len(seats)}, minmax(0, 1fr))"
    return (
        f'<div class="seats" style="grid-template-columns:{columns}">{heads}{"".join(cells)}</div>'
    )


def _seat_name(names: Any, seat: int) -> str:
    if isinstance(names, Sequence) and not isinstance(names, str) and seat < len(names):
        return f"seat {seat}: {names[seat] or 'the policy'}"
    return f"seat {seat}"


def _without(one: Mapping[str, Any], shared: int) -> Mapping[str, Any]:
    return {**one, "messages": list(one.get("messages") or [])[shared:]} if shared else one


def _untold(one: Mapping[str, Any], before: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the answers of tools that stand with the calls of the turn before."""
    if not before.get("tool_calls"):
        return one
    told = [
        said
        for said in one.get("messages") or ()
        if not (isinstance(said, Mapping) and said.get("role") == "tool")
    ]
    return {**one, "messages": told}
