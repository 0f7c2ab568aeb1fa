"""What was sampled, as one standalone page: the answers of a group side by side, tokens coloured. No script, no assets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

# Upper ends of the probability bands of a token, and their colours from surprising to expected.
_BANDS = ((0.01, "#f4978e"), (0.05, "#f8b79b"), (0.2, "#fbd3a8"), (0.5, "#fdebc3"), (0.8, "#fbf6e4"), (math.inf, "transparent"))
_RAISED, _LOWERED = "#bfe3c0", "#f3c1bd"

_STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 0; color: #1f2430; background: #f6f5f1; }
header { padding: 18px 28px 12px; background: #fff; border-bottom: 1px solid #dedbd2; }
h1 { font-size: 19px; margin: 0 0 4px; } .sub { color: #6a6f7a; margin: 0 0 10px; }
label { margin-right: 14px; } .key i { font-style: normal; padding: 0 6px; border-radius: 3px; margin-right: 4px; }
main { padding: 8px 28px 40px; }
section { background: #fff; border: 1px solid #dedbd2; border-radius: 8px; margin: 14px 0; padding: 12px 16px; }
h2 { font-size: 13px; color: #6a6f7a; font-weight: 600; margin: 0 0 6px; }
pre { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.prompt { background: #f1efe8; border-radius: 6px; padding: 8px 10px; margin-bottom: 10px; max-height: 260px; overflow: auto; }
.group { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 10px; }
article { border: 1px solid #e4e1d8; border-left: 4px solid #c9c5ba; border-radius: 6px; padding: 8px 10px; min-width: 0; }
article.up { border-left-color: #4f9d53; } article.down { border-left-color: #c4554d; }
article p { margin: 0 0 6px; font-size: 12px; color: #6a6f7a; } article b { color: #1f2430; font-size: 13px; }
article .error { color: #b3261e; } .ob { color: #9a9da5; }
body > input { position: absolute; opacity: 0; } label { cursor: pointer; border-bottom: 2px solid transparent; }
.cut { color: #8a6d1d; font-weight: 600; }
"""


def _style() -> str:
    rules = [_STYLE]
    for band, (_, colour) in enumerate(_BANDS):
        rules.append(f"#by-logprob:checked ~ main .p{band}, .key .p{band} {{ background: {colour}; }}")
    for name, colour in (("up", _RAISED), ("down", _LOWERED)):
        rules.append(f"#by-advantage:checked ~ main .a{name}, .key .a{name} {{ background: {colour}; }}")
    rules.append("#by-advantage:not(:checked) ~ header .key.adv, #by-logprob:not(:checked) ~ header .key.lp { display: none; }")
    rules.append("#by-logprob:checked ~ header [for=by-logprob], #by-advantage:checked ~ header [for=by-advantage]"
                 " { font-weight: 600; border-color: #1f2430; }")  # fmt: skip
    return "\n".join(rules)


def _number(value: Any, digits: int = 3) -> str:
    return "n/a" if value is None else f"{float(value):.{digits}g}"


def _sign(advantage: float | None) -> str:
    return "" if not advantage else "up" if advantage > 0 else "down"


def _tokens(row: Mapping[str, Any]) -> str:
    """The response token by token, each with its probability band and the sign of its advantage; plain text without tokens."""
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
        band = next(i for i, (upper, _) in enumerate(_BANDS) if probability < upper)
        kinds = f"p{band} a{_sign(advantage)}" if _sign(advantage) else f"p{band}"
        hover = f"logprob {float(logprob):.3f}, p {probability:.3f}"
        spans.append(f'<span class="{kinds}" title="{hover}">{escape(str(piece))}</span>')
    return "".join(spans)


def _answer(row: Mapping[str, Any]) -> str:
    stop = str(row.get("stop_reason", ""))
    shown_stop = f'<span class="cut">{escape(stop)}</span>' if stop == "length" else escape(stop)
    facts = [f"<b>reward {_number(row.get('reward'))}</b>", f"advantage {_number(row.get('advantage'))}"]
    facts += [shown_stop] if stop else []
    facts += [f"{len(row['tokens'])} tokens"] if row.get("tokens") else []
    facts += [f"{escape(str(name))} {_number(value)}" for name, value in (row.get("metrics") or {}).items()]
    error = f'<p class="error">{escape(str(row["error"]))}</p>' if row.get("error") else ""
    return (f'<article class="{_sign(row.get("advantage"))}"><p>{" &middot; ".join(facts)}</p>{error}'
            f"<pre>{_tokens(row)}</pre></article>")  # fmt: skip


def _group(rows: Sequence[Mapping[str, Any]]) -> str:
    first = rows[0]
    rewards = [float(row["reward"]) for row in rows if row.get("reward") is not None]
    mean = f", mean reward {_number(sum(rewards) / len(rewards))}" if rewards else ""
    title = f"{first.get('tag', 'problem')} {first.get('problem', '')}".strip()
    expected = f", expected answer {first['answer']}" if first.get("answer") is not None else ""
    answers = "\n".join(_answer(row) for row in rows)
    prompt = f'<pre class="prompt">{escape(str(first.get("prompt", "")))}</pre>'
    return f'<section><h2>{escape(title + mean + expected)}</h2>{prompt}<div class="group">\n{answers}\n</div></section>'


def _identity(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row.get(key, "")) for key in ("group", "tag", "problem", "prompt"))


def page(rows: Sequence[Mapping[str, Any]], *, title: str, step: int, max_tokens: int = 20_000) -> str:
    """The page of one iteration. Neighbouring rows with the same `group`, `tag`, `problem` and `prompt` are one group.

    A row: `prompt`, `response`, `reward`, and, where known, `advantage` (one number) or `advantages` (one a token),
    `stop_reason`, `tokens` (the response in decoded pieces), `logprobs` (one a token; None for a token the model did not
    write, which is greyed), `group`, `tag`, `problem`, `answer`, `metrics`, `error`.
    Groups are shown from the first on until `max_tokens` are; the page says how many were left out.
    """
    groups = [list(rows_of_one) for _, rows_of_one in groupby(rows, key=_identity)]
    shown: list[str] = []
    spent = 0
    for group in groups:
        size = sum(len(row.get("tokens") or str(row.get("response", "")).split()) for row in group)
        if shown and spent + size > max_tokens:
            break
        shown.append(_group(group))
        spent += size
    rewards = [float(row["reward"]) for row in rows if row.get("reward") is not None]
    summary = f"{len(groups)} problems, {len(rows)} answers"
    summary += f", mean reward {_number(sum(rewards) / len(rewards))}" if rewards else ""
    if len(shown) < len(groups):
        summary += f"; the first {len(shown)} problems are shown, all are in step_{step:06d}.jsonl"
    bounds = ["p < 0.01", "0.05", "0.2", "0.5", "0.8", "1"]
    bands = "".join(f'<i class="p{i}">{escape(bound)}</i>' for i, bound in enumerate(bounds))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{_style()}</style></head><body>
<input type="radio" name="by" id="by-logprob" checked><input type="radio" name="by" id="by-advantage">
<header><h1>{escape(title)}</h1><p class="sub">{escape(summary)}</p>
<label for="by-logprob">colour by probability</label><label for="by-advantage">colour by advantage</label>
<span class="key lp">{bands}</span><span class="key adv"><i class="aup">raised</i><i class="adown">lowered</i></span></header>
<main>
{chr(10).join(shown)}
</main></body></html>
"""
