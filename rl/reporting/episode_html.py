"""Prepare episodes for pages: coloured tokens, turns, folded tool calls, seats side by side.

The template templates/episode.html renders what `StoredEpisode.describe` and `describe_message` return.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from rl.jsonl import Row

# Upper ends of the bands by which the pages colour tokens (templates/tokens.css), the last band has
# none: a token's probability, its entropy in nats, and the ratio of its probabilities at the update
# and at sampling.
TOKEN_BANDS = {
    "p": (0.01, 0.05, 0.2, 0.5, 0.8),
    "e": (0.1, 0.3, 0.7, 1.2, 2.0),
    "r": (0.5, 0.8, 0.95, 1.05, 1.25, 2.0),
}
_FOLD_LENGTH = 600  # characters of a message above which it is folded
_INCOMPLETE = ("length", "error", "interrupted")  # stop reasons of incomplete answers


def format_number(value: Any, digits: int = 3) -> str:
    """Format a value with `digits` significant digits; n/a if None."""
    return "n/a" if value is None else f"{float(value):.{digits}g}"


def advantage_class(advantage: float | None) -> str:
    """Return "up" for a positive advantage, "down" for a negative advantage, otherwise ""."""
    return "" if not advantage else "up" if advantage > 0 else "down"


def _name_band(kind: str, value: float) -> str:
    """Return the class of the band that a value is in, such as p0."""
    return f"{kind}{bisect_right(TOKEN_BANDS[kind], value)}"


def list_tokens(row: Row) -> list[tuple[str, str, str]]:
    """Return (classes, hover text, text) of each token of a response: the probability band and the
    sign of the advantage, and the bands of its entropy and ratio if the row has `entropies` and
    `ratios`.

    Tokens without a logprob were not sampled by the model, and are grey.
    """
    pieces = row.get("tokens") or []
    columns = [
        row.get(name) or [row.get("advantage") if name == "advantages" else None] * len(pieces)
        for name in ("logprobs", "advantages", "entropies", "ratios")
    ]
    tokens = []
    for piece, logprob, advantage, entropy, ratio in zip(pieces, *columns, strict=True):
        if logprob is None:
            tokens.append(("ob", "", str(piece)))
            continue
        probability = math.exp(min(float(logprob), 0.0))
        kinds = _name_band("p", probability)
        kinds += f" a{advantage_class(advantage)}" if advantage else ""
        hover = f"logprob {float(logprob):.3f}, p {probability:.3f}"
        if entropy is not None:
            kinds += " " + _name_band("e", entropy)
            hover += f", entropy {float(entropy):.3f}"
        if ratio is not None:
            kinds += " " + _name_band("r", ratio)
            hover += f", ratio {float(ratio):.4g}"
        tokens.append((kinds, hover, str(piece)))
    return tokens


def format_metrics(metrics: Any) -> list[str]:
    """Format the numeric metrics; none of them if `metrics` is no mapping."""
    items = metrics.items() if isinstance(metrics, Mapping) else ()
    return [
        f"{name} {format_number(value)}" for name, value in items if isinstance(value, int | float)
    ]


def list_mappings(items: Any) -> list[Row]:
    """Return the items of a list that are mappings, which messages and calls must be."""
    return [item for item in items or () if isinstance(item, Mapping)]


def describe_message(entry: Row) -> dict[str, Any]:
    """Return a message that the model did not sample: its role, its text, and `summary` if it is
    folded. Long messages, system messages and tool results are folded.
    """
    role, content = str(entry.get("role", "")), entry.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in list_mappings(content))
    text = "" if content is None else str(content)
    if calls := entry.get("tool_calls"):
        text += f"\n{_format_json(calls)}"
    is_folded = role in ("system", "developer", "tool") or len(text) > _FOLD_LENGTH
    role += f" {entry['name']}" if entry.get("name") else ""
    summary = f"{role}: {_truncate(text)}" if is_folded else ""
    return {"role": role, "text": text, "summary": summary}


def _describe_call(tool_call: Mapping[str, Any]) -> dict[str, str]:
    """Return a tool call and its result as a folded text."""
    arguments, error = tool_call.get("arguments"), tool_call.get("error")
    if isinstance(arguments, Mapping):
        argument_text = ", ".join(f"{k}={_format_json(v)}" for k, v in arguments.items())
    else:
        argument_text = _format_json(arguments)
    result = str(tool_call.get("answer", "")) if error is None else f"error: {error}"
    name = tool_call.get("name") or "a call that cannot be read"
    summary = f"{name}({_truncate(argument_text)}) → {_truncate(result, 60)}"
    if tool_call.get("seconds") is not None:
        summary += f" ({format_number(tool_call['seconds'], 2)} s)"
    kind = "call" if error is None else "failed"
    return {"summary": summary, "text": f"{argument_text}\n\n{result}", "kind": kind}


def _format_json(value: Any, indent: int | None = None) -> str:
    """Return the value as JSON text."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)


def _truncate(text: str, max_length: int = 80) -> str:
    """Return the start of the text on a single line, at most `max_length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


class StoredEpisode:
    """Hold a row of rollouts and its `turns`, each with the `messages` that precede it; no turns
    for a single answer to a prompt.
    """

    def __init__(self, row: Row):
        self.row, self.turns = row, _collect_turns(row)

    @property
    def stop_reason(self) -> str:
        """Return the reason why the episode ended: the stop reason of the row or of its last turn,
        or "truncated" if a limit ended it.
        """
        last = self.turns[-1] if self.turns else {}
        stop = self.row.get("stop_reason") or last.get("stop_reason") or ""
        is_limited = self.row.get("truncated") or last.get("truncated")
        return "truncated" if is_limited and stop not in _INCOMPLETE else str(stop)

    @property
    def has_several_turns(self) -> bool:
        """Return whether it is shown turn by turn: it has several turns, or calls a tool."""
        return len(self.turns) > 1 or bool(self.turns and self.turns[0].get("tool_calls"))

    @property
    def answers(self) -> list[Row]:
        """Return what has the sampled tokens: the turns if there are several, else the row."""
        return [*self.turns] if len(self.turns) > 1 else [self.row]

    def describe(self, num_shared: int = 0) -> dict[str, Any]:
        """Return the `turns` in a single column; if several seats acted, in a column for each seat,
        whose headers are `heads`. A single answer has no turns to show.

        `num_shared`: number of the first turn's messages that the group's header already shows.
        """
        turns = self.turns if self.has_several_turns else []
        seats = sorted({int(turn.get("seat") or 0) for turn in turns})
        described = []
        for i, turn in enumerate(turns):
            messages = list_mappings(turn.get("messages"))
            if i == 0:
                messages = messages[num_shared:]
            elif turns[i - 1].get("tool_calls"):  # the results are shown with these calls
                messages = [item for item in messages if item.get("role") != "tool"]
            column = seats.index(int(turn.get("seat") or 0)) + 1
            described.append({**self._describe_turn(turn, messages), "column": column})
        names = self.row.get("seats")
        names = names if isinstance(names, list) else []
        heads = [
            f"seat {seat}" + (f": {names[seat] or 'the policy'}" if seat < len(names) else "")
            for seat in seats
        ]
        return {"turns": described, "heads": heads if len(seats) > 1 else []}

    def _describe_turn(self, turn: Row, messages: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a turn with the preceding messages, its tokens and its tool calls to show."""
        from_other_seat = turn.get("sampled") is False  # shown in grey
        written = {"advantage": self.row.get("advantage"), **turn}
        stop = "truncated" if turn.get("truncated") else str(turn.get("stop_reason") or "")
        return {
            "messages": [describe_message(item) for item in messages],
            "from_other_seat": from_other_seat,
            "tokens": list_tokens(written | {"logprobs": None} if from_other_seat else written),
            "text": str(turn.get("response", "")),
            "reward": float(turn.get("reward") or 0),
            "stop": stop,
            "is_cut": stop in (*_INCOMPLETE, "truncated"),
            "metrics": format_metrics(turn.get("metrics")),
            "calls": [_describe_call(item) for item in list_mappings(turn.get("tool_calls"))],
            "logs": _format_json(turn["logs"], indent=1) if turn.get("logs") else "",
        }


def _collect_turns(row: Row) -> list[dict[str, Any]]:
    """Return an episode's turns, each with the `messages` that precede it.

    Accepts rows with an entry for each message ("sampled": False for messages that the model did
    not sample), and rows that already have turns.
    """
    turns: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    entries = row.get("turns")
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, Mapping):
            continue
        if "text" in entry and not entry.get("sampled") and not entry.get("tokens"):
            messages.append({**entry, "content": entry["text"]})
            continue
        earlier = entry.get("messages")
        messages += earlier if isinstance(earlier, list) else ()
        turns.append({"response": entry.get("text", ""), **entry, "messages": messages})
        messages = []
    metrics = turns[-1].get("metrics") if turns else None
    if isinstance(metrics, Mapping) and metrics.get("truncated") == 1:
        turns[-1]["truncated"] = True
    return turns
