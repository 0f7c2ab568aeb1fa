"""Test rollout pages: turns, folded calls, seats, filters, links, hostile texts, and rows without
turns.
"""

import json
import re

import pytest
from test_logbook import PageParser

from rl.data.rollout_file import _find_rollout_files as stored_files
from rl.reporting import Logbook, rollout_html

EVIL = "</pre></details><script>alert('x')</script>\"'&amp;<img src=x onerror=y>"


def turn(text, **more):
    pieces = list(text)
    return {
        "role": "assistant", "text": text, "sampled": True, "tokens": pieces,
        "logprobs": [-0.001] * len(pieces), "reward": 0.0, "stop_reason": "stop", "metrics": {},
        "seat": 0, **more,
    }  # fmt: skip


def make_message(role, text, **more):
    return {"role": role, "text": text, "sampled": False, **more}


def row(turns, **more):
    last = turns[-1]
    kept = {key: last[key] for key in ("stop_reason", "tokens", "logprobs")}
    return {
        "group": 0, "index": 0, "tag": "calculator", "problem": 7, "prompt": "", "reward": 1.0,
        "response": last["text"], "advantage": 0.5, "metrics": {}, **kept, "turns": turns, **more,
    }  # fmt: skip


def render(*rows, title="", step=1) -> str:
    return rollout_html.render_page(list(rows), title=title, step=step)


def render_article(*turns) -> str:
    """Return the text of an episode on its page."""
    (text,) = PageParser(render(row([*turns]))).articles
    return text


CALL = {"name": "calculator", "arguments": {"expression": "2*3"}, "seconds": 0.25, "answer": "6"}


def make_episode(first="call", **more):
    messages = [make_message("system", "Be careful."), make_message("user", "What is 2*3?")]
    call, answer = turn(first, tool_calls=[CALL]), make_message("tool", "6", name="calculator")
    return row([*messages, call, answer, turn("It is 6", reward=1.5, logs={"x": 1})], **more)


def test_an_episode_is_shown_turn_by_turn():
    text = render(make_episode(), make_episode(index=1, reward=0.0, advantage=-0.5), step=3)
    page = PageParser(text)
    assert page.tags.count("article") == 2 and page.tags.count("section") == 1
    (first, _) = page.articles
    parts = ("turn 1", "turn 2", "+1.5", "2 turns", "11 tokens", "reward 1")
    assert [part for part in parts if part not in first] == []
    assert 'calculator(expression="2*3") → 6 (0.25 s)' in first and first.count("calculator(") == 1
    # the question is shown once, above the group
    assert "What is 2*3?" not in first and text.count("What is 2*3?") == 1
    assert text.index("system: Be careful.") < text.index("What is 2*3?") < text.index("<article")
    # only sampled tokens are coloured
    coloured = "".join(piece for kind, piece in page.spans if kind.startswith("p5"))
    assert coloured.count("It is 6") == 2
    assert "Be careful." not in "".join(piece for _, piece in page.spans)


def test_what_the_model_reads_at_a_turn_stands_before_it_and_a_tools_answer_with_its_call():
    one, two = make_message("user", "one?"), make_message("user", "two?")
    text = render_article(one, turn("first"), two, turn("second"))
    assert text.index("first") < text.index("two?") < text.index("second")
    answer = make_message("tool", "from a tool", name="clock")
    assert "tool clock: from a tool" in render_article(one, turn("first"), answer, turn("second"))


def test_failed_and_malformed_calls_say_so():
    calls = [
        {**CALL, "error": "division by zero"},
        {"name": "", "arguments": {}, "error": "is no call", "malformed": True},
    ]
    text = render(row([make_message("user", "?"), turn("x", tool_calls=calls)]))
    assert 'class="failed"' in text and "error: division by zero" in text
    assert "a call that cannot be read() → error: is no call" in text


def test_seats_stand_side_by_side_and_others_are_grey():
    turns = [turn("mine"), turn("theirs", seat=1, sampled=False), turn("again", reward=-1.0)]
    boards = [make_message("user", f"board {i}") for i in (1, 2, 3)]
    messages = [message for pair in zip(boards, turns, strict=True) for message in pair]
    text = render(row(messages, seats=[None, "random"]))
    page = PageParser(text)
    assert "grid-template-columns:repeat(2, minmax(0, 1fr))" in text
    assert "seat 0: the policy" in page.articles[0] and "seat 1: random" in page.articles[0]
    assert [int(n) for n in re.findall(r"grid-column:(\d)", text)] == [1, 2, 1]
    kinds = {piece: kind for kind, piece in page.spans if piece in "mt"}
    assert kinds["m"].startswith("p5")
    assert "".join(piece for kind, piece in page.spans if kind == "ob") == "theirs"


PLACES = (
    "text", "tokens", "new_messages", "name", "call", "answer", "logs", "metrics", "tag", "stop",
    "expected", "seat",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_hostile_texts_are_text_wherever_they_stand(place):
    call, first, more, messages = dict(CALL), turn("x"), {}, make_message("user", "?")
    if place in ("text", "tokens"):
        first = turn(EVIL) if place == "text" else turn("x", tokens=[EVIL], logprobs=[-1.0])
    elif place in ("new_messages", "name"):
        messages = make_message(EVIL, "?", name=EVIL)
        if place == "new_messages":
            messages = make_message("user", EVIL)
    elif place in ("call", "answer"):
        evil = {"name": EVIL, "arguments": {EVIL: EVIL}} if place == "call" else {"answer": EVIL}
        call = {**call, **evil}
    elif place in ("logs", "metrics"):
        first = turn("x", **{place: {EVIL: EVIL if place == "logs" else 1.0}})
    else:
        more = {{"stop": "stop_reason", "expected": "answer"}.get(place, place): EVIL}
    called = {**first, "tool_calls": [call]}
    episode = row([messages, called, make_message("user", "more"), turn("y")], **more)
    # PageParser checks that every tag is closed in the right place
    page = PageParser(render(episode, make_episode(group=1), title=EVIL))
    assert not {"script", "img"} & set(page.tags) and page.loads == []


def test_filters_hide_by_tag_reward_and_stop_reason_without_a_script():
    rows = [
        make_episode(tag="a"),
        make_episode(tag="b", group=1, reward=-1.0),
        make_episode(tag="b", group=2, reward=0.0),
    ]
    rows[2]["turns"][-1]["metrics"] = {"truncated": 1.0}
    text = render(*rows)
    labels = dict(re.findall(r'<label for="(f\d+)">([^<]+)</label>', text))
    assert list(labels.values()) == ["a", "b", "0", "above 0", "below 0", "stop", "truncated"]
    articles = re.findall(r'<article class="([^"]*)"', text)
    shown = [{labels[kind] for kind in kinds.split() if kind in labels} for kinds in articles]
    assert shown == [{"a", "above 0", "stop"}, {"b", "below 0", "stop"}, {"b", "0", "truncated"}]
    for kind in labels:
        assert f'<input type="checkbox" id="{kind}" checked>' in text
        assert f"#{kind}:not(:checked) ~ main .{kind} {{ display: none; }}" in text
    assert "checkbox" not in render(rows[0])  # nothing to choose from


def test_pages_of_a_run_link_to_each_other(tmp_path):
    with Logbook(tmp_path / "run") as logbook:
        for step in (1, 6, 11):
            logbook.write_rollouts(step, [make_episode()])
    with Logbook(tmp_path / "long") as logbook:  # as text, 1000000 precedes 999999
        for step in (100_000, 999_999, 1_000_000):
            logbook.write_rollouts(step, [make_episode()])
    text = (tmp_path / "long" / "rollouts" / "step_1000000.html").read_text()
    assert 'href="step_999999.html">&larr; step 999999' in text
    folder = tmp_path / "run" / "rollouts"
    names = first, six, eleven = [f"step_{step:06d}.html" for step in (1, 6, 11)]
    pages = zip((1, 6, 11), [(folder / name).read_text() for name in names], strict=True)
    links = {step: re.findall(r'<a href="([^"]+)">(.*?)</a>', text) for step, text in pages}
    assert links[1] == [(six, "step 6 &rarr;")] and links[11] == [(six, "&larr; step 6")]
    assert links[6] == [(first, "&larr; step 1"), (eleven, "step 11 &rarr;")]
    with Logbook(tmp_path / "run", resume_step=6) as logbook:
        logbook.write_rollouts(8, [make_episode()])
    text = (folder / six).read_text()
    assert 'href="step_000008.html">step 8' in text and "step_000011" not in text


def test_the_files_of_a_later_stage_say_its_name(tmp_path):
    folder = tmp_path / "run" / "rollouts"
    with Logbook(tmp_path / "run") as logbook:
        for step, stage in ((3, ""), (4, "grpo"), (5, "grpo")):
            logbook.write_rollouts(step, [make_episode()], stage)
    assert sorted(path.stem for path in folder.glob("*.jsonl")) == [
        "step_000003", "step_000004_grpo", "step_000005_grpo",
    ]  # fmt: skip
    assert 'href="step_000005_grpo.html">step 5' in (folder / "step_000004_grpo.html").read_text()
    assert 'href="step_000003.html">&larr; step 3' in (folder / "step_000004_grpo.html").read_text()
    assert [path.name for path in stored_files(folder, range(4, 6))] == [
        "step_000004_grpo.jsonl",
        "step_000005_grpo.jsonl",
    ]
    with Logbook(tmp_path / "run", resume_step=4):
        pass
    assert {path.stem for path in folder.iterdir()} == {"step_000003", "step_000004_grpo"}


def test_rows_without_turns_and_of_real_runs_are_shown_as_before(shared_data):
    files = sorted(shared_data.glob("rollouts/**/*.jsonl"))
    rows = [json.loads(line) for path in files[:2] for line in path.read_text().splitlines()[:20]]
    page = PageParser(render(*rows))
    assert len(page.articles) > 0 and "script" not in page.tags
