"""Render the update of a problem's answers as text for a terminal and as a standalone page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.reporting.html_report import render_template
from rl.sanitize import sanitize_text

_COLUMNS = ("token", "sampled", "update", "ratio", "clip", "advantage", "gradient", "share")
_PAGE_TOKENS = 20_000  # tokens of a page; the rest is left out, and the page says so
_PIECE_LIMIT = 60  # characters of a token in the table

NOTE = (
    "Recorded by the run: the tokens, their logprobs at sampling and at the update, the "
    "advantages and the settings of the loss. Computed from them: ratio, clip, gradient (d loss / "
    "d logprob of the token, of the loss as the update divided it; negative raises the token) and "
    "share (of the absolute gradients of all tokens of the optimizer step)."
)


def format_token_cells(token: Any) -> list[str]:
    """Return the cells of a token's line: text, then the numbers; "-" for what is not known."""

    def format_value(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        sanitize_text(repr(token.text), _PIECE_LIMIT),
        format_value(token.sampled, ".4f"),
        format_value(token.learner, ".4f"),
        format_value(token.ratio, ".4f"),
        token.clip,
        format_value(token.advantage, ".4g"),
        format_value(token.gradient, ".3e"),
        format_value(token.share, ".3%"),
    ]


def _format_table(tokens: Sequence[Any]) -> Iterator[str]:
    rows = [list(_COLUMNS), *map(format_token_cells, tokens)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        first, *rest = row
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([f"    {first:<{widths[0]}}", *cells]).rstrip()


def describe_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return the losses, settings and learning rates of the calls of an update as a sentence."""
    losses = ", ".join(dict.fromkeys(str(call["loss"]) for call in calls))
    settings: dict[str, Any] = {}
    for call in calls:
        settings |= call["config"]
    rates = dict.fromkeys(call["learning_rate"] for call in calls)
    steps = len({call["optimizer_step"] for call in calls})
    listed = ", ".join(f"{name} {value}" for name, value in settings.items())
    text = f"loss {losses} ({listed}), {steps} optimizer step{'s' * (steps > 1)}, learning rate "
    text += ", ".join("not known" if rate is None else f"{rate:.3g}" for rate in rates)
    if 0.0 in rates:
        text += " (0: the batch had no signal, and the weights did not move)"
    return sanitize_text(text, 2000)


def describe_answer(answer: Any, number: int) -> str:
    """Return the heading of an answer in pass `number`."""
    reward = "not scored" if answer.reward is None else f"reward {answer.reward:.4g}"
    heading = f"answer {answer.index}: {reward}"
    if number >= len(answer.passes):
        reason = "not trained on" if not answer.passes else "not trained on in this pass"
        return f"{heading}, {reason}"
    item = answer.passes[number]
    steps = ", ".join(str(step + 1) for step in item.optimizer_steps)
    return f"{heading}, {item.share:.3%} of the gradient of optimizer step {steps}"


def format_explanation(
    explanation: Any, number: int = 0, answers: Sequence[int] | None = None
) -> list[str]:
    """Return the lines of an explanation (rl.trainer.update_report) for a terminal. `number`:
    the pass over the batch, from 0. `answers`: those shown; None: all.
    """
    lines = [f"step {explanation.step}: {describe_calls(explanation.calls)}", NOTE]
    lines += [f"note: {text}" for text in explanation.notes]
    for group in explanation.groups:
        expected = "" if group.expected is None else f", expected {group.expected!r}"
        heading = f"{group.tag} {group.problem}: {group.prompt!r}{expected}"
        lines += ["", sanitize_text(heading, 2000)]
        if group.num_passes > 1:
            lines.append(f"pass {number + 1} of {group.num_passes} over the batch")
        if group.num_passes == 0:
            lines.append("no answer of this group was trained on: such as all rewards are equal")
        for answer in group.answers:
            if answers is None or answer.index in answers:
                lines.append(f"  {describe_answer(answer, number)}")
                known = number < len(answer.passes)
                lines += _format_table(answer.passes[number].tokens if known else answer.tokens)
    return lines


def render_explanation(explanation: Any, title: str) -> str:
    """Return the page of an explanation: all passes, tokens coloured by their gradient. The page
    has no script.
    """
    remaining = _PAGE_TOKENS
    groups = []
    for group in explanation.groups:
        parts = []
        for answer in group.answers:
            for number in range(max(1, len(answer.passes))):
                tokens = answer.passes[number].tokens if answer.passes else answer.tokens
                heading = describe_answer(answer, number)
                parts.append((heading, number + 1, tokens[:remaining], len(tokens)))
                remaining = max(0, remaining - len(tokens))
        shares = (
            token.share or 0.0
            for answer in group.answers
            for item in answer.passes
            for token in item.tokens
        )
        groups.append((group, max(shares, default=0.0), parts))
    return render_template(
        "why.html",
        title=title,
        summary=describe_calls(explanation.calls),
        note=NOTE,
        notes=explanation.notes,
        columns=_COLUMNS,
        groups=groups,
        format_cells=format_token_cells,
    )
