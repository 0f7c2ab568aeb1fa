"""Show answers in a terminal while they are sampled: one under the other, or side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rl.chat.chat_session import ChatTurn
from rl.sanitize import sanitize_text
from rl.types import SampledSequence

COLUMN_WIDTH = 48  # characters; in a narrower terminal answers are shown one under the other
_NAME, _NOTE, _THOUGHT = "bold magenta", "dim", "dim italic"


def describe_sample(sequence: SampledSequence, outcome: str) -> str:
    """Return the note below a sample. `outcome`: why it is incomplete, or ""."""
    mean = sum(sequence.logprobs or []) / max(1, len(sequence.tokens))
    suffix = f", {outcome}" if outcome else ""
    return f"  [mean logprob {mean:.4f}, {len(sequence.tokens)} tokens{suffix}]"


class LineDisplay:
    """Write each answer as it grows, one under the other. The answers must not be interleaved.

    `names`: of the models, written before their answers; none for a single model.
    """

    def __init__(self, console: Console, names: Sequence[str]):
        self._console, self._names = console, names
        self._begun: set[int] = set()
        self._sent = {"reasoning_content": "", "content": ""}

    def show(self, index: int, turn: ChatTurn) -> None:
        """Write what is new of the answer of model `index`."""
        self._begin(index)
        for name, style in (("reasoning_content", _THOUGHT), ("content", "")):
            text, sent = str(turn.visible.get(name) or ""), self._sent[name]
            if sent.startswith(text):
                continue
            if name == "content" and not sent and self._sent["reasoning_content"]:
                self._write("\n\n", "")
            # a text that differs from its written part, which is rare, is written again in full
            self._write(text.removeprefix(sent) if text.startswith(sent) else f"\n{text}", style)
            self._sent[name] = text
        if turn.answer is not None:
            self._write(describe_sample(turn.sequence, turn.outcome) + "\n", _NOTE)

    def fail(self, index: int, message: str) -> None:
        """Write below the part so far that an answer failed."""
        self._begin(index)
        self._write(f"\n{message}\n" if any(self._sent.values()) else f"{message}\n", "red")

    def close(self) -> None:
        """Do nothing: everything has been written."""

    def _begin(self, index: int) -> None:
        """Write the name of the model before its answer."""
        if index in self._begun:
            return
        self._begun.add(index)
        self._sent = dict.fromkeys(self._sent, "")
        if self._names:
            self._write(f"{self._names[index]}:\n", _NAME)

    def _write(self, text: str, style: str) -> None:
        self._console.print(_make_text(text, style), end="")


class ColumnDisplay:
    """Show the answers in columns while all of them grow.

    Until the end, only the last lines that fit the terminal are shown.
    """

    def __init__(self, console: Console, names: Sequence[str]):
        self._console, self._names = console, names
        self._texts = [Text() for _ in names]
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, index: int, turn: ChatTurn) -> None:
        """Show what is new of the answer of model `index`."""
        text = Text()
        if thoughts := str(turn.visible.get("reasoning_content") or ""):
            text.append_text(_make_text(f"{thoughts}\n\n", _THOUGHT))
        text.append_text(_make_text(str(turn.visible["content"]), ""))
        if turn.answer is not None:
            text.append(describe_sample(turn.sequence, turn.outcome), _NOTE)
        self._texts[index] = text
        self._refresh()

    def fail(self, index: int, message: str) -> None:
        """Show below the part so far that an answer failed."""
        text = self._texts[index]
        text.append_text(_make_text(f"\n{message}" if text else message, "red"))
        self._refresh()

    def close(self) -> None:
        """End the display: print the whole answers."""
        self._live.stop()
        self._console.print(self._make_table(None))

    def _refresh(self) -> None:
        self._live.update(self._make_table(self._console.height - 3), refresh=True)

    def _make_table(self, max_lines: int | None) -> Table:
        """Return a column for each answer. `max_lines`: show only the last lines of each."""
        table = Table.grid(padding=(0, 2), expand=True)
        for _ in self._names:
            table.add_column(ratio=1, overflow="fold")
        table.add_row(*(_make_text(name, _NAME) for name in self._names))
        if max_lines is None:
            table.add_row(*self._texts)
            return table
        width = self._console.width // len(self._names) - 2
        table.add_row(
            *(
                Text("\n").join(text.wrap(self._console, width)[-max(max_lines, 1) :])
                for text in self._texts
            )
        )
        return table


def make_display(console: Console, names: Sequence[str]) -> LineDisplay | ColumnDisplay:
    """Return columns for several models if the terminal is wide enough, else lines."""
    if len(names) > 1 and console.is_terminal and console.width >= COLUMN_WIDTH * len(names):
        return ColumnDisplay(console, names)
    return LineDisplay(console, names if len(names) > 1 else ())


def _make_text(text: str, style: str) -> Text:
    """Return a styled text without control characters, which a model may have written."""
    return Text(sanitize_text(text, len(text)), style=style)
