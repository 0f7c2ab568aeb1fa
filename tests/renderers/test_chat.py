"""Test conversations in a terminal: prompts, greedy samples and output."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import sample
from rl import ServiceClient
from rl.chat import ChatConsole, ChatSession
from rl.chat.answer_display import make_display
from rl.chat.chat_session import ChatTurn
from rl.config import DataSettings
from rl.data import PromptTemplate
from rl.renderers import get_renderer
from rl.trainer import open_weights
from rl.types import ModelInput, SampledSequence, SamplingParams

REPO = Path(__file__).resolve().parents[2]
NOTE = "  [mean logprob "
ROLES = ("user", "assistant")


@pytest.fixture(scope="module")
def client():
    with ServiceClient(seed=3) as service:
        yield service.create_sampling_client(base_model="tiny:addition")


def make_session(client, max_tokens=6, name="tiny", **template) -> ChatSession:
    renderer = get_renderer("plain", client.get_tokenizer())
    params = SamplingParams(max_tokens, None, renderer.get_stop_sequences(), 0.0)
    return ChatSession(name, client, renderer, params, PromptTemplate(**template))


def make_turn() -> ChatTurn:
    return ChatTurn(1, "x", {"role": "user", "content": "x"}, None, 0, [1], False, 0)


def chat(monkeypatch, sessions, lines, **console) -> str:
    """Return the output while `lines` are read from a pipe."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    ChatConsole(sessions, Console(file=out, width=200, **console)).run()
    return out.getvalue()


def greedy(client, prompt: list[int], max_tokens=6) -> list[int]:
    stop = [client.get_tokenizer().eos_token_id]
    params = SamplingParams(max_tokens=max_tokens, stop=stop, temperature=0.0)
    return client.sample(ModelInput.from_ints(prompt), 1, params).result().sequences[0].tokens


def text_of(client, tokens: list[int]) -> str:
    return client.get_tokenizer().decode(tokens, skip_special_tokens=True)


def answers_in(written: str) -> list[str]:
    return [line.partition(NOTE)[0] for line in written.splitlines() if NOTE in line]


def test_a_model_without_roles_gets_a_hint_at_the_start(client, monkeypatch):
    session = make_session(client)
    assert "tiny reads plain text without roles" in chat(monkeypatch, [session], [])
    with_roles = make_session(client)
    with_roles.renderer = get_renderer("role_colon", client.get_tokenizer())
    assert "without roles" not in chat(monkeypatch, [with_roles], [])


def test_each_turn_continues_the_tokens_of_the_turns_before(client, monkeypatch):
    """Build the expected prompts by hand: plain text has no roles, and an unfinished answer gets an
    EOS.
    """
    tokenizer = client.get_tokenizer()
    eos, expected, prompt = tokenizer.eos_token_id, [], []
    for text in ("1+2=", "7+", "30="):
        prompt += tokenizer.encode(text, add_special_tokens=False)
        tokens = greedy(client, prompt)
        expected.append(text_of(client, tokens))
        prompt += tokens if tokens[-1] == eos else [*tokens, eos]
    session = make_session(client)
    written = chat(monkeypatch, [session], ["1+2=", "", "7+", "30="])
    assert answers_in(written) == expected
    shown = [line for line in written.splitlines() if line[:2] == "> "]
    assert shown == ["> 1+2=", "> 7+", "> 30="]
    assert [message["role"] for message in session.get_messages()] == [*ROLES] * 3


def test_settings_of_the_prompt_are_those_of_the_run(client, monkeypatch):
    tokenizer = client.get_tokenizer()
    session = make_session(client, system="9+", suffix="=")
    written = chat(monkeypatch, [session], ["1+2", "/system 8", "/reset", "1+2"])
    expected = [
        text_of(client, greedy(client, tokenizer.encode(text, add_special_tokens=False)))
        for text in ("9+1+2=", "81+2=")
    ]
    assert answers_in(written) == expected


def test_commands_change_the_conversation(client, monkeypatch, tmp_path):
    session = make_session(client)
    file = tmp_path / "chat.jsonl"
    lines = ["1+2=", "3+4=", "/undo", f"/save {file}", "5+6=", "/temperature 1.5", "/max-tokens 3"]
    lines += ["/retry", f"/save {file}", "/reset", f"/save {file}", "/save", "/undo", "/retry"]
    lines += ["/temperature warm", "/temperature -1", "/max-tokens 0", "/nonsense", "//1", "hello"]
    written = chat(monkeypatch, [session], [*lines, "/help", "/exit", "1+1="])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    users = [[m["content"] for m in row["messages"] if m["role"] == "user"] for row in rows]
    assert users == [["1+2="], ["1+2=", "5+6="]]
    assert rows[0]["model"] == "tiny"
    assert rows[0]["messages"][0] == {"role": "user", "content": "1+2="}
    assert session.params.temperature == 1.5 and session.params.max_tokens == 3
    for problem in ["there is no message to save", "/save needs a file", "no message to take back",
                    "no message to answer again", "/temperature needs a number, got 'warm'", "-1",
                    "/max-tokens is at least 1, got 0", "unknown command /nonsense",
                    "no tokens for some of the text '/1'", "no tokens for some of the text 'hello'"]:  # fmt: skip
        assert problem in written
    assert not session.turns, "the line after /exit is not read"


def test_a_refused_message_is_no_turn_and_retry_repeats_the_one_before(client, monkeypatch):
    session = make_session(client)
    written = chat(monkeypatch, [session], ["1+2=", "hello", "/retry"])
    first, again = answers_in(written)
    assert first == again and len(session.turns) == 1


def test_a_file_that_cannot_be_written_is_reported(client, monkeypatch, tmp_path):
    lines = ["1+2=", f"/save {tmp_path}/none/chat.jsonl", "1="]
    written = chat(monkeypatch, [make_session(client)], lines)
    assert "cannot be written (No such file or directory)" in written
    assert len(answers_in(written)) == 2


def test_the_oldest_turns_are_omitted_when_the_context_is_full(client, monkeypatch):
    limit = client.info["max_context"]
    tokenizer = client.get_tokenizer()
    session = make_session(client, max_tokens=limit // 4)
    eos = tokenizer.eos_token_id
    message = "1+" * (limit // 8)
    written = chat(monkeypatch, [session], [*[message] * 3, "1" * (limit + 1), message])
    assert f"the context of tiny ({limit} tokens) is full" in written
    assert f"a prompt of {limit + 1} tokens" in written and "send a shorter message" in written
    assert len(session.turns) == 4
    for turn in session.turns:
        assert len(turn.prompt) + limit // 4 <= limit + 1
    # the prompt of the last turn, rebuilt from the turns that it includes
    last = session.turns[-1]
    assert 0 < last.first_turn < 3
    expected = []
    for turn in session.turns[last.first_turn : -1]:
        expected += tokenizer.encode(message, add_special_tokens=False)
        answer = turn.sequence.tokens
        expected += answer if answer[-1] == eos else [*answer, eos]
    assert last.prompt == expected + tokenizer.encode(message, add_special_tokens=False)


def test_a_message_that_leaves_little_room_gets_a_short_answer(client, monkeypatch):
    limit = client.info["max_context"]
    session = make_session(client, max_tokens=limit)
    chat(monkeypatch, [session], ["1" * (limit - 2)])
    assert len(session.turns[0].sequence.tokens) <= 3


class InterruptingFile(io.StringIO):
    """Send Ctrl-C to the process once it writes the start of the answer."""

    def __init__(self, begun: str):
        super().__init__()
        self.begun, self.interrupts = begun, 0

    def write(self, text):
        if text.startswith(self.begun) and not self.interrupts:
            self.interrupts += 1
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_escape_sequences_of_a_model_do_not_reach_the_terminal_of_sample():
    sequence = SampledSequence([1], [0.0])
    sampler = SimpleNamespace(
        sample=lambda *_: SimpleNamespace(result=lambda: SimpleNamespace(sequences=[sequence]))
    )
    renderer = SimpleNamespace(
        build_generation_prompt=lambda messages: messages,
        parse_response=lambda _: ({"content": "a\x1b]0;title\x07b\x1b[2J\nc \u2713"}, True),
    )
    data = DataSettings()
    model = SimpleNamespace(data=data, renderer=renderer, sampler=sampler, params=None)
    args = SimpleNamespace(prompt=["p\x1b[1m?"], dataset=None, limit=1, image=[], n=1)
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    sample.sample_prompts(model, args, Console(file=file, width=200))
    file.flush()
    assert raw.getvalue().decode().split("  [")[0] == "\np?\nab\nc \\u2713"


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(client, monkeypatch):
    tokenizer = client.get_tokenizer()
    eos = tokenizer.eos_token_id
    prompt = tokenizer.encode("1+2=", add_special_tokens=False)
    whole = greedy(client, prompt, 200)
    assert len(whole) > 50, "the model of this seed writes on"
    out = InterruptingFile(text_of(client, whole[:2]))
    session = make_session(client, max_tokens=200)
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+2=\n/max-tokens 6\n3=\n"))
    ChatConsole([session], Console(file=out, width=5000)).run()
    assert out.interrupts == 1 and ", stopped]" in out.getvalue()
    stopped, last = session.turns
    assert stopped.sequence.tokens == whole[: len(stopped.sequence.tokens)]
    assert 0 < len(stopped.sequence.tokens) < 50
    # the next turn continues the partial answer
    continued = [*prompt, *stopped.sequence.tokens, eos]
    assert last.prompt == [*continued, *tokenizer.encode("3=", add_special_tokens=False)]
    assert last.sequence.tokens == greedy(client, last.prompt)


def test_a_file_of_an_unknown_user_does_not_end_the_chat(client, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    session = make_session(client)
    out = chat(monkeypatch, [session], ["1+2=", "/save ~nobody-here/chat.jsonl", "3="])
    assert "~nobody-here/chat.jsonl cannot be written" in out and len(session.turns) == 2


class InterruptedSession(ChatSession):
    """Send Ctrl-C to the process before the first token, if `interrupts` is set."""

    interrupts = False

    def start_turn(self, text, message_id):
        turn = super().start_turn(text, message_id)
        if self.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
        return turn


def test_ctrl_c_before_the_first_token_leaves_the_conversation_unchanged(client, monkeypatch):
    plain = make_session(client)
    session = InterruptedSession("A", client, plain.renderer, plain.params, PromptTemplate())
    chat(monkeypatch, [session], ["1+2="])
    before = session.get_messages()
    session.interrupts = True
    for line in ("3=", "/retry"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\n"))
        out = io.StringIO()
        ChatConsole([session], Console(file=out, width=200)).run()
        assert "stopped before the first token: the conversation is unchanged" in out.getvalue()
        assert session.get_messages() == before
    session.interrupts = False
    chat(monkeypatch, [session], ["3="])
    chat(monkeypatch, [plain], ["1+2=", "3="])
    assert session.turns[-1].prompt == plain.turns[-1].prompt


def test_ctrl_c_while_one_of_two_models_answers_gives_the_other_no_turn(client, monkeypatch):
    """Without columns, the second model has not started yet. A retry is its first answer to the
    message.
    """
    prompt = client.get_tokenizer().encode("1+2=", add_special_tokens=False)
    out = InterruptingFile(text_of(client, greedy(client, prompt, 2)))
    sessions = [make_session(client, max_tokens=200, name=name) for name in "AB"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+2=\n"))
    console = ChatConsole(sessions, Console(file=out, width=5000))
    console.run()
    assert out.interrupts == 1 and "B:\nstopped before the first token" in out.getvalue()
    assert [len(session.turns) for session in sessions] == [1, 0]
    monkeypatch.setattr(sys, "stdin", io.StringIO("/max-tokens 6\n/retry\n"))
    console.run()
    answers = [[turn.sequence.tokens for turn in session.turns] for session in sessions]
    assert answers == [[greedy(client, prompt)]] * 2


def test_retry_answers_the_last_message_that_remains(client, monkeypatch):
    session = make_session(client, suffix="=")
    written = chat(monkeypatch, [session], ["1+2", "3+4", "/undo", "/retry"])
    first, _, again = answers_in(written)
    assert first == again and [turn.text for turn in session.turns] == ["1+2"]
    assert session.turns[0].user["content"] == "1+2="


def test_a_refused_retry_keeps_the_answer(client, monkeypatch):
    sessions = [make_session(client, name=name) for name in "AB"]
    console = ChatConsole(sessions, Console(file=io.StringIO(), width=200))
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+2=\n"))
    console.run()
    before = [session.get_messages() for session in sessions]
    sessions[1].template = PromptTemplate(system="?")  # its tokenizer has no such token
    monkeypatch.setattr(sys, "stdin", io.StringIO("/retry\n"))
    console.run()
    assert "no tokens for some of the text" in console.console.file.getvalue()
    sessions[1].template = PromptTemplate()
    assert [session.get_messages() for session in sessions] == before
    assert len(before[0]) == 2


def test_a_saved_conversation_has_the_texts_as_typed_and_its_first_system_prompt(
    client, monkeypatch, tmp_path
):
    session = make_session(client, system="9+", template="0{prompt}", suffix="=")
    file = tmp_path / "chat.jsonl"
    chat(monkeypatch, [session], ["1+2", "/system 8", "3", f"/save {file}"])
    answers = [turn.answer["content"] for turn in session.turns]
    row = json.loads(file.read_text())
    assert [message["role"] for message in row["messages"]] == ["system", *ROLES, *ROLES]
    contents = [message["content"] for message in row["messages"]]
    assert contents == ["9+", "1+2", answers[0], "3", answers[1]]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_failed_answer_keeps_its_part_so_far_on_the_screen(terminal):
    out = io.StringIO()
    console = Console(file=out, width=200, height=20, force_terminal=terminal, color_system=None)
    display = make_display(console, ["A", "B"])
    turn = make_turn()
    turn.visible = {"role": "assistant", "content": "the part so far"}
    display.show(0, turn)
    display.fail(0, "the logits are not finite")
    display.fail(1, "no token at all")
    display.close()
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    # columns are printed again at the end
    last = max(i for i, line in enumerate(lines) if line.startswith("the part so far"))
    assert lines[last + 1].startswith("the logits are not finite")
    assert "no token at all" in (lines[last] if terminal else lines[-1])


@pytest.mark.parametrize("width", [40, 200])
def test_two_models_answer_every_message(client, monkeypatch, width):
    """Each model keeps a separate history. A wide terminal shows columns."""
    single = answers_in(chat(monkeypatch, [make_session(client, system="9+")], ["1+2=", "3="]))
    other = answers_in(chat(monkeypatch, [make_session(client)], ["1+2=", "3="]))
    sessions = [make_session(client, name="A", system="9+"), make_session(client, name="B")]
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+2=\n3=\n"))
    console = Console(file=out, width=width, height=30, force_terminal=True, color_system=None,
                      legacy_windows=False)  # fmt: skip
    ChatConsole(sessions, console).run()
    assert [str(turn.visible["content"]) for turn in sessions[0].turns] == single
    assert [str(turn.visible["content"]) for turn in sessions[1].turns] == other
    lines = [line for line in out.getvalue().splitlines() if NOTE.strip() in line]
    together = [a for a in lines if single[0] in a and other[0] in a.partition("tokens")[2]]
    assert bool(together) == (width == 200)


def test_two_models_take_a_message_or_none_does(client, monkeypatch):
    sessions = [make_session(client, name="A"), make_session(client, name="B", suffix="?")]
    written = chat(monkeypatch, sessions, ["1+2=", "/undo", "/save x"])
    assert "no tokens for some of the text" in written and "no message to take back" in written
    assert not sessions[0].turns and not sessions[1].turns
    sessions[1].template = PromptTemplate()
    chat(monkeypatch, sessions, ["1+2="])
    assert len(sessions[0].turns) == len(sessions[1].turns) == 1


@pytest.mark.parametrize("names", [["A"], ["A", "B"]])
def test_what_a_model_writes_does_not_control_the_terminal(names):
    out = io.StringIO()
    console = Console(file=out, width=200, height=20, force_terminal=True, color_system=None)
    turn = make_turn()
    display = make_display(console, names)
    for i in range(len(names)):
        turn.answer = None
        turn.sequence = SampledSequence([1], [-0.5])
        for content in ("a\x1b", "a\x1b]0;title\x07", "a\x1b]0;title\x07\x1b[2Jb\r[bold]c[/bold]"):
            turn.visible = {"role": "assistant", "content": content, "reasoning_content": "t\x9b1m"}
            display.show(i, turn)
        turn.answer = turn.visible
        display.show(i, turn)
    display.close()
    for harmful in ("\x1b]0", "\x1b[2Jb", "\x9b", "\x07"):
        assert harmful not in out.getvalue()
    assert "[bold]c[/bold]" in out.getvalue()


def test_a_checkpoint_is_chosen_for_runs_alone(monkeypatch):
    """Use fakes: a run named run/a, and a tiny model for all weights."""
    opened = []

    def open_tiny(target, checkpoint, *, trusted):
        opened.append((target, checkpoint))
        return open_weights("tiny:addition")

    def open_all(*words):
        opened.clear()
        args, args.others = sample.parser.parse_known_args([*words, "--checkpoint", "best"])
        with contextlib.ExitStack() as resources:
            assert len(list(sample.open_models(args, resources))) == len(words)
        return opened

    monkeypatch.setattr("rl.reporting.contains_run", lambda folder: folder == Path("run/a"))
    monkeypatch.setattr("rl.trainer.open_weights", open_tiny)
    assert open_all("owner/model", "run/a") == [("owner/model", None), ("run/a", "best")]
    assert open_all("owner/model") == [("owner/model", "best")], "which open_weights refuses"


@pytest.mark.parametrize(("words", "message"), [
    ("a b --prompt 1", "several WEIGHTS need --chat, got a b"),
    ("a --chat --prompt 1", "leave out --prompt"),
    ("a --chat -n 2", "leave out --prompt"),
    ("a --chat --sampler-tp 2", "--chat needs a single process, got --sampler-tp 2"),
])  # fmt: skip
def test_wrong_combinations_of_flags_are_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sample.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPO / "sample.py"), run_name="__main__")
    assert ended.value.code == 2 and message in capsys.readouterr().err
