"""Run a chat in a terminal: read messages and commands, and show the answers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from rl.chat.answer_display import ColumnDisplay, LineDisplay, make_display
from rl.chat.chat_session import ChatSession, ChatTurn
from rl.jsonl import format_json_line
from rl.renderers import PlainRenderer
from rl.sanitize import sanitize_message

_PROMPT = "> "


class ChatConsole:
    """Send each line of the user to all sessions, or run it as a command.

    Lines come from the terminal, with line editing and recall, or from a pipe. Ctrl-C stops the
    answer; Ctrl-D and /exit end the chat.
    """

    def __init__(self, sessions: Sequence[ChatSession], console: Console):
        self.sessions, self.console = sessions, console
        self._omitted = [0] * len(sessions)  # turns that the last prompt of a session omits
        # command: (method, its argument, description)
        self._commands: dict[str, tuple[Callable[[str], None], str, str]] = {
            "/reset": (self._reset, "", "begin a new conversation"),
            "/system": (self._set_system, "TEXT", "set the system prompt; without TEXT: none"),
            "/undo": (self._undo, "", "take back the last message and its answers"),
            "/retry": (self._retry, "", "sample new answers to the last message"),
            "/temperature": (self._set_temperature, "NUMBER", "0 is greedy"),
            "/max-tokens": (self._set_max_tokens, "NUMBER", "maximum tokens of an answer"),
            "/save": (self._save, "FILE", "append the conversation to a .jsonl file, as a row"),
            "/help": (self._help, "", "list the commands"),
            "/exit": (self._help, "", "end the chat, like Ctrl-D"),
        }

    def run(self) -> None:
        """Read lines until the input ends."""
        self._say("/help lists the commands; /exit or Ctrl-D ends the chat")
        for session in self.sessions:
            if isinstance(session.renderer, PlainRenderer):
                self._say(
                    f"{session.name} reads plain text without roles: a message continues the text "
                    "before it. If the model was trained on single prompts, /reset before each one"
                )
        for line in self._read_lines():
            command, _, argument = line.strip().partition(" ")
            if command == "/exit":
                return
            try:
                if command in self._commands:
                    self._commands[command][0](argument.strip())
                elif command.startswith("/") and not command.startswith("//"):
                    self._warn(f"unknown command {command}: /help lists them; // begins a message")
                else:
                    text = line.replace("//", "/", 1) if command.startswith("//") else line
                    last_turn = self._find_last_turn()
                    self._send(text, 1 if last_turn is None else last_turn.message_id + 1)
            except ValueError as error:  # of what was typed: the chat goes on
                self._warn(str(error))

    def _read_lines(self) -> Iterator[str]:
        """Iterate over non-empty lines of standard input."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with contextlib.suppress(ImportError):  # gives input() line editing and recall
                import readline  # noqa: F401
        while True:
            try:
                line = input(_PROMPT if is_terminal else "")
            except EOFError:
                if is_terminal:
                    self.console.print()
                return
            except KeyboardInterrupt:
                self._say("\n/exit or Ctrl-D ends the chat")
                continue
            if not line.strip():
                continue
            if not is_terminal:
                self.console.print(Text(f"{_PROMPT}{sanitize_message(line)}", style="bold cyan"))
            yield line

    # ------------------------------------------------------------------------------------- messages

    def _send(self, text: str, message_id: int) -> None:
        """Send a message to all sessions, or to none if any of them cannot take it."""
        with _catch_interrupt() as interrupted:
            turns: list[ChatTurn] = []
            try:
                for session in self.sessions:
                    turns.append(session.start_turn(text, message_id))
            except ValueError:
                for session, turn in zip(self.sessions, turns, strict=False):
                    session.drop_turn(turn)
                raise
            self._report_omitted(turns)
            self._show_answers(turns, interrupted)

    def _show_answers(self, turns: Sequence[ChatTurn], interrupted: threading.Event) -> None:
        """Sample and show the answers until all have ended or `interrupted` is set."""
        display = make_display(self.console, [session.name for session in self.sessions])
        # columns grow together, lines one after the other
        all_indices = list(range(len(turns)))
        rounds = [all_indices] if isinstance(display, ColumnDisplay) else [[i] for i in all_indices]
        try:
            for indices in rounds:
                while indices:
                    indices = [
                        i for i in indices if self._advance(i, turns[i], display, interrupted)
                    ]
        finally:
            display.close()

    def _advance(
        self,
        index: int,
        turn: ChatTurn,
        display: LineDisplay | ColumnDisplay,
        interrupted: threading.Event,
    ) -> bool:
        """Sample and show more of an answer. Return whether it goes on."""
        session = self.sessions[index]
        try:
            if interrupted.is_set():
                session.stop_turn(turn)
            else:
                session.advance(turn)
        except ValueError as error:  # such as logits that are not finite: other answers go on
            display.fail(index, str(error))
            return False
        display.show(index, turn)
        return turn.answer is None

    def _report_omitted(self, turns: Sequence[ChatTurn]) -> None:
        """Report how many of the oldest turns a prompt omits, when the number has grown."""
        for i, (session, turn) in enumerate(zip(self.sessions, turns, strict=True)):
            before, self._omitted[i] = self._omitted[i], turn.first_turn
            if turn.first_turn > before:
                num_earlier = sum(t.message_id < turn.message_id for t in session.turns)
                self._say(
                    f"the context of {session.name} ({session.client.info['max_context']} tokens) "
                    f"is full: its oldest messages are omitted ({turn.first_turn} of "
                    f"{num_earlier}); /reset begins a new conversation"
                )

    # ------------------------------------------------------------------------------------- commands

    def _reset(self, argument: str) -> None:
        for session in self.sessions:
            session.reset()
        self._omitted = [0] * len(self.sessions)
        self._say("a new conversation")

    def _set_system(self, argument: str) -> None:
        for session in self.sessions:
            session.template = replace(session.template, system=argument or None)
        self._say("the system prompt is set" if argument else "there is no system prompt")

    def _undo(self, argument: str) -> None:
        """Remove the last message of all sessions that have it."""
        last_turn = self._find_last_turn()
        if last_turn is None:
            raise ValueError("there is no message to take back")
        for session in self.sessions:
            session.undo(last_turn.message_id)
        self._say("the last message and its answers are taken back")

    def _retry(self, argument: str) -> None:
        """Send the last message again. Its turn stays in a session until there is a new answer."""
        last_turn = self._find_last_turn()
        if last_turn is None:
            raise ValueError("there is no message to answer again")
        self._send(last_turn.text, last_turn.message_id)

    def _find_last_turn(self) -> ChatTurn | None:
        """Return the turn of the newest message in any session; None without messages."""
        last_turns = [turn for session in self.sessions for turn in session.turns[-1:]]
        return max(last_turns, key=lambda turn: turn.message_id, default=None)

    def _set_temperature(self, argument: str) -> None:
        temperature = _parse_number(float, "/temperature", argument, "0.7")
        for session in self.sessions:
            session.params = replace(session.params, temperature=temperature)
        self._say(f"temperature {temperature:g}")

    def _set_max_tokens(self, argument: str) -> None:
        max_tokens = _parse_number(int, "/max-tokens", argument, "256")
        if max_tokens < 1:
            raise ValueError(f"/max-tokens is at least 1, got {max_tokens}")
        for session in self.sessions:
            session.params = replace(session.params, max_tokens=max_tokens)
        self._say(f"at most {max_tokens} tokens")

    def _save(self, argument: str) -> None:
        if not argument:
            raise ValueError("/save needs a file: /save chat.jsonl")
        rows = [session.to_row() for session in self.sessions if session.turns]
        if not rows:
            raise ValueError("there is no message to save")
        try:
            with open(os.path.expanduser(argument), "a", encoding="utf-8") as file:
                file.writelines(map(format_json_line, rows))
        except OSError as error:
            raise ValueError(
                f"{argument} cannot be written ({error.strerror}): choose another file"
            ) from error
        self._say(f"{len(rows)} row{'s' * (len(rows) > 1)} added to {argument}")

    def _help(self, argument: str) -> None:
        width = max(len(f"{name} {value}") for name, (_, value, _) in self._commands.items())
        for name, (_, value, description) in self._commands.items():
            self._say(f"{f'{name} {value}':{width}}  {description}")
        self._say("Ctrl-C stops an answer; // begins a message that starts with /")

    def _say(self, text: str) -> None:
        self.console.print(Text(text, style="dim"))

    def _warn(self, text: str) -> None:
        self.console.print(Text(sanitize_message(text), style="red"))


def _parse_number(kind: Callable[[str], Any], command: str, argument: str, example: str) -> Any:
    """Return the number of a command. Raises ValueError with an example for anything else."""
    try:
        return kind(argument)
    except ValueError:
        raise ValueError(
            f"{command} needs a number, got {argument!r}: {command} {example}"
        ) from None


@contextlib.contextmanager
def _catch_interrupt() -> Iterator[threading.Event]:
    """Let Ctrl-C set an event instead of raising KeyboardInterrupt."""
    interrupted = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
