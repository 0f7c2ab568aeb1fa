"""Test the common signatures of reward functions, and the checks of a reward before sampling
starts.
"""

import json
import textwrap

import pytest

from rl.algorithms import METHODS
from rl.config import RunSettings, read_run
from rl.envs import ProblemGroupBuilder
from rl.errors import UserError
from rl.reporting import AlarmMonitor
from rl.rewards import CONVERSATION, RewardResult, Scorer, resolve_reward
from rl.trainer.reward_probe import check_reward
from rl.trainer.stage_data import prepare_stage
from rl.types import ModelInput, Problem

FILE = """
    import asyncio
    import a_neighbour

    def by_list(completions, answer, **kwargs):
        assert isinstance(answer, list) and len(answer) == len(completions)
        return [a_neighbour.same(c, a) for c, a in zip(completions, answer)]

    def count(prompts, completions):
        return [float(len(completions))] * len(completions)

    def chats(completions, prompts, **kwargs):
        return [float(c[0]["content"] == p[-1]["content"]) for c, p in zip(completions, prompts)]

    def needs_gold(completions, gold):
        return [0.0] * len(completions)

    def wrong_count(completions, **kwargs):
        return [1.0]

    def picky(completions, **kwargs):
        return [1.0 / int(c) for c in completions]

    async def waits_in_lists(completions, **kwargs):
        await asyncio.sleep(0.01)
        return [1.0 for _ in completions]

    def scaled(completions, scale=1.0, **kwargs):
        return [scale for _ in completions]

    def sometimes(prompt, response, meta):
        return None if response == "x" else 2.0

    def breaks(prompt, response, meta):
        return meta["colour"]

    from rl.rewards import register_reward

    @register_reward("whole", episode=True)
    def whole(episode, meta):
        (turn,) = episode.turns
        assert episode.messages[-1]["content"] == turn.response and turn.tokens > 0
        return float(turn.response == str(meta["answer"]))

    @register_reward("whole_and_broken", episode=True)
    def whole_and_broken(episode, meta):
        return episode.colour

    def nan(prompt, response, meta):
        return float("nan")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("styles")
    (folder / "mine.py").write_text(textwrap.dedent(FILE))
    (folder / "a_neighbour.py").write_text(
        "def same(c, a):\n    return float(c.strip() == str(a))\n"
    )
    return str(folder / "mine.py")


def rewards_of(results) -> list:
    """Return the reward of each result, or the class of its error."""
    return [getattr(result, "reward", type(result).__name__) for result in results]


def test_functions_of_lists_get_columns_and_settings_and_batches(file):
    reward = resolve_reward(f"{file}:by_list")
    assert reward.batched and reward.columns == ("answer",)
    assert reward("p", "4", {"answer": 4}) == 1.0
    assert reward("p", "5", {"answer": "4", "other": 1}) == 0.0
    items = [("p", str(i), {"answer": 2}) for i in range(4)]
    assert rewards_of([*reward.iter_results(items)]) == [0.0, 0.0, 1.0, 0.0]
    count = resolve_reward(f"{file}:count")
    assert rewards_of([*count.iter_results(items)]) == [4.0] * 4, "one call"
    assert resolve_reward(f"{file}:scaled", scale=3.0)("", "", {}) == 3.0
    assert resolve_reward(f"{file}:scaled", scale=3.0)("", "", {"scale": 7}) == 3.0
    assert resolve_reward(f"{file}:scaled")("", "", {}) == 1.0
    assert resolve_reward(f"{file}:waits_in_lists")("", "", {}) == 1.0
    with pytest.raises(KeyError, match="takes the column 'answer', but the row has 'b'"):
        reward("p", "4", {"b": 1})
    wrong = [*resolve_reward(f"{file}:wrong_count").iter_results(items[:2])]
    assert rewards_of(wrong) == [1.0, 1.0], "asked again one by one"
    two = resolve_reward(lambda completions, **kwargs: [1.0] * 2)
    failed, *scored = [*two.iter_results(items[:3])]  # split into halves of 1 and 2 items
    assert "returned 2 rewards for 1 answers" in str(failed) and rewards_of(scored) == [1.0, 1.0]
    picky = resolve_reward(f"{file}:picky")
    results = [*picky.iter_results([("", text, {}) for text in ("2", "zero", "4")])]
    assert rewards_of(results) == [0.5, "ValueError", 0.25], "one bad item costs itself alone"


@pytest.mark.parametrize(("function", "says"), [
    (lambda prompt, response: 1.0,
     r"takes \(prompt, response\).*\(prompt, response, meta\), or in TRL's form"),
    (lambda completions, trainer_state: 1.0, "requires trainer_state"),
    (lambda a, b, c, d: 1.0, "needs the setting 'd'"),
])  # fmt: skip
def test_a_signature_that_cannot_be_called_is_found_when_it_is_named(function, says):
    with pytest.raises(UserError, match=says):
        resolve_reward(function)


def test_conversations_reach_functions_of_lists_as_messages(file):
    class Renderer:
        def build_generation_prompt(self, messages):
            return ModelInput.from_ints([0])

        def get_stop_sequences(self):
            return []

    with Scorer(f"{file}:chats", workers=1) as scorer:
        request = ({"role": "user", "content": "hi"},)
        chat, text = (
            ProblemGroupBuilder(Problem(request, {"a": 1}, chat=chat), 1, Renderer(), scorer)
            for chat in (True, False)
        )
        assert chat.scored.meta == {"a": 1, CONVERSATION: list(request)}
        assert text.scored.meta == {"a": 1}
        (score,) = scorer.score_many([("hi", "hi", chat.scored.meta)])
        assert score.reward == 1.0


def test_none_is_left_out_of_a_sum_and_the_failing_part_is_named(file):
    def sum_of(*parts):
        return resolve_reward("composite", weights=dict.fromkeys(parts, 1.0))

    both = resolve_reward("composite", weights={f"{file}:sometimes": 0.5, "exact_match": 1.0})
    parts = {"exact_match": 1.0, "correct": 1.0}
    assert both.evaluate("", "y", {"answer": "y"}) == RewardResult(2.0, {"sometimes": 2.0, **parts})
    assert both.evaluate("", "x", {"answer": "x"}) == RewardResult(1.0, parts)
    with pytest.raises(TypeError, match="NoneType.*--rewards adds up several"):
        resolve_reward(f"{file}:sometimes")("", "x", {})
    listed = sum_of(f"{file}:by_list", f"{file}:sometimes")
    assert listed.batched and listed.columns == ("answer",)
    items = [("", "2", {"answer": 2}), ("", "x", {"answer": 2})]
    assert rewards_of([*listed.iter_results(items)]) == [3.0, 0.0]
    with Scorer(sum_of("exact_match", f"{file}:breaks"), workers=1) as scorer:
        (score,) = scorer.score_many([("", "a", {"answer": "a"})])
    assert "failed in its part" in score.error
    assert "mine.py:breaks', which raised KeyError: 'colour'" in score.error
    assert "mine.py:" in score.error.rpartition("(at ")[2], "and where"
    with pytest.raises(Exception, match="in its part .*mine.py:nan', which returned nan"):
        sum_of("exact_match", f"{file}:nan")("", "a", {"answer": "a"})
    with pytest.raises(Exception, match="all of its parts: each returned None"):
        sum_of(f"{file}:sometimes")("", "x", {})


ROWS = [
    Problem(({"role": "user", "content": f"{i}+1="},), {"answer": str(i + 1)}, tag="sums", index=i)
    for i in range(6)
]


def check_spec(spec, rows=ROWS):
    with Scorer(spec, workers=1) as scorer:
        return check_reward(scorer, rows)


def test_a_reward_is_tried_on_rows_with_their_own_answers(file, monkeypatch):
    # a thread starts faster than the process in which a reward of a file runs
    monkeypatch.setattr("rl.rewards.reward_scorer._select_place", lambda reward: "thread")
    for reward in ("exact_match", f"{file}:by_list", f"{file}:whole"):
        assert check_spec(reward) == []
    bare = [Problem(({"role": "user", "content": "a"},), {}, tag="bare")]
    tried = "(?s)tried on the reference answers of 6 rows of sums.*"
    for reward, rows, says in (
        (f"{file}:needs_gold", ROWS, "takes the column 'gold', and the rows of sums have 'answer'"),
        (f"{file}:breaks", ROWS, f"{tried}KeyError: 'colour'.*; meta has answer$"),
        (f"{file}:whole_and_broken", ROWS, f"{tried}AttributeError"),
        ("exact_match", bare, "no expected answer"),
    ):
        with pytest.raises(UserError, match=says):
            check_spec(reward, rows)
    (text,) = check_spec(f"{file}:picky", bare)  # a reward may refuse an empty answer
    assert "ValueError" in text and "left out of training" in text
    wrong = [Problem(row.messages, row.meta, response="the sum is 7", tag="sums") for row in ROWS]
    (text,) = check_spec("exact_match", wrong)
    assert "calls the data's reference answers wrong, all of 6 rows tried" in text
    assert "the sum is 7" in text


def test_a_broken_reward_is_said_before_a_model_is_looked_for(tmp_path, file):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(20))
    )
    words = ["grpo", "--dataset", str(path), "--reward", f"{file}:breaks"]
    words += ["--base-model", "./no/such"]
    run = read_run(words, METHODS, path, RunSettings)
    with pytest.raises(UserError, match="KeyError: 'colour'"):
        prepare_stage(run.stages[0])


def test_many_failures_are_an_alarm():
    def row(failed):
        return {"reward/failed": failed, "env/all/total_episodes": 90.0}

    alarms = AlarmMonitor()
    rows = [row(failed) for failed in (0, 9, 9, 15, 0, 0, 0)]
    assert [alarms(each)[0]["alarm/rewards_failing"] for each in rows] == [0, 0, 0, 1, 0, 0, 0]
    alarms = AlarmMonitor()
    (output,) = [text for _ in range(4) for text in alarms(row(30))[1]]
    assert output.startswith("25% of the samples of 3 batches could not be scored")
    assert "reward_timeout" in output
