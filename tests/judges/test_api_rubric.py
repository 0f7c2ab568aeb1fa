"""Test a rubric judge behind an OpenAI-compatible API."""

import json
import math

import pytest
from api_stub import api_server
from test_reward_model import group
from whole_runs import train

from rl.config import LearnedRewardSettings
from rl.errors import UserError
from rl.judges import APIRubricJudge, OpenAIClient, Rubric, openai_client

POLITE_RIGHT = (("Is the answer polite?", 1.0), ("Is it right?", 3.0))


def first_token(*tokens):
    """Return a reply with these (token, probability) pairs for the first token."""
    top = [{"token": token, "logprob": math.log(p)} for token, p in tokens]
    return 200, {"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}


def make_reply(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(openai_client, "_RETRY_SECONDS", (0.0,) * 6)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def question_of(body):
    return body["messages"][0]["content"].split("[Question]\n")[1]


def test_yes_and_no_are_read_from_the_first_token():
    def reply(body, headers):
        if "polite" in question_of(body):
            return first_token(("Yes", 0.3), (" yes", 0.15), ("no", 0.05), ("Well", 0.5))
        return first_token(("No", 0.6), ("I", 0.3))

    with api_server(reply) as (address, bodies):
        judge = APIRubricJudge(OpenAIClient(address), Rubric.from_weights(POLITE_RIGHT), seed=3)
        ((first, second),) = judge.scores([group("aaa", "aaa")])
    assert first == second and first.reward == pytest.approx((1 * 0.45 / 0.5 + 3 * 0) / 4)
    assert first.metrics == {
        "rubric/is_the_answer_polite": pytest.approx(0.9),
        "rubric/is_it_right": 0.0,
    }
    # equal answers are judged once
    assert len(bodies) == 2 and len({body["seed"] for body in bodies}) == 2
    for body in bodies:
        assert body["model"] == "judge" and body["max_tokens"] == 1
        assert body["logprobs"] is True and body["top_logprobs"] == 20


def test_scores_are_read_from_the_text():
    with api_server(lambda body, _: make_reply("Fine. Score: 4")) as (address, bodies):
        rubric = Rubric.from_weights(POLITE_RIGHT[:1], "score", scale=5.0, max_tokens=9)
        ((score,),) = APIRubricJudge(OpenAIClient(address), rubric).scores([group("a")])
    assert score.reward == pytest.approx(0.8) and bodies[0]["max_tokens"] == 9
    assert bodies[0]["temperature"] == 1.0


@pytest.mark.parametrize(("answer", "reason"), [
    ((400, {"error": "too long"}), "HTTP 400"),
    ((200, {}), "the reply has no choices"),
    ((200, {"choices": [{"message": {"content": "yes"}}]}), "no top_logprobs"),
    (first_token(("<think>", 0.9)), "neither yes nor no"),
])  # fmt: skip
def test_an_answer_without_a_reading_has_no_reward(answer, reason):
    def reply(body, headers):
        bad = "[Answer]\nbad" in body["messages"][0]["content"]
        return answer if bad else first_token(("yes", 0.5), ("no", 0.5))

    with api_server(reply) as (address, _):
        judge = APIRubricJudge(OpenAIClient(address), Rubric.from_weights(POLITE_RIGHT))
        ((good, bad),) = judge.scores([group("good", "bad")])
    assert good.reward == pytest.approx(0.5)
    assert bad.reward is None and reason in bad.error and "is_it_right" in bad.error


class TruncatedReply(dict):
    """A reply that ends before its declared length."""


@pytest.mark.parametrize("failure", [(429, {}), (500, {}), (503, {}), (502, TruncatedReply())])
def test_a_failure_that_passes_is_tried_again(failure):
    remaining = [6]

    def reply(body, headers):
        remaining[0] -= 1
        return failure if remaining[0] >= 0 else first_token(("yes", 1.0))

    with api_server(reply, cut_off=TruncatedReply) as (address, bodies):
        rubric = Rubric.from_weights(POLITE_RIGHT[:1])
        ((score,),) = APIRubricJudge(OpenAIClient(address), rubric).scores([group("a")])
    assert score.reward == 1.0 and len(bodies) == 7


@pytest.mark.parametrize(("reply", "remedy"), [
    ((401, {}), "HTTP 401.*Set OPENAI_API_KEY"),
    ((400, {"error": "context"}), "HTTP 400.*context.*Correct what the server names"),
    ((200, {"choices": [None]}), "the reply has no choices"),
])  # fmt: skip
def test_an_error_that_stays_is_not_tried_again_and_has_its_remedy(reply, remedy):
    with api_server(lambda *_: reply) as (address, bodies):
        judge = APIRubricJudge(OpenAIClient(address), Rubric.from_weights(POLITE_RIGHT[:1]))
        with pytest.raises(UserError, match=remedy):
            judge.scores([group("a")])
    assert len(bodies) == 1


def test_no_more_is_sent_to_a_server_that_answered_none_of_64():
    with api_server(lambda *_: (400, {})) as (address, bodies):
        client = OpenAIClient(address)
        with pytest.raises(UserError, match="none of 500 requests"):
            client.complete_many([[{"role": "user", "content": "?"}]] * 500, range(500))
    assert 64 <= len(bodies) < 200


def test_a_server_that_answers_nothing_ends_the_run():
    with api_server(lambda *_: (503, {"error": "loading"})) as (address, bodies):
        judge = APIRubricJudge(OpenAIClient(address), Rubric.from_weights(POLITE_RIGHT[:1]))
        with pytest.raises(UserError, match=r"none of 2 requests: HTTP 503.*--resume"):
            judge.scores([group("a", "b")])
    assert len(bodies) == 14
    with pytest.raises(UserError, match="lists no models.*refused"):
        judge.api_client.model = ""
        judge.probe()


def test_the_key_is_sent_and_a_model_is_chosen(monkeypatch):
    keys = []

    def reply(body, headers):
        keys.append(headers["Authorization"])
        return first_token(("yes", 1.0))

    with api_server(reply, models=("a", "b")) as (address, bodies):
        rubric = Rubric.from_weights(POLITE_RIGHT)
        with pytest.raises(UserError, match=r"has 2 models.*/v1#a \(it has a, b\)"):
            APIRubricJudge(OpenAIClient(address), rubric).probe()
        APIRubricJudge(OpenAIClient(address + "/v1/#b"), rubric).probe()
        monkeypatch.setenv("OPENAI_API_KEY", "secret\r\n")  # sent without the line end
        APIRubricJudge(OpenAIClient(address + "#b"), rubric).probe()
        for key in ("secret\u200b", "secret\nsecret"):
            monkeypatch.setenv("OPENAI_API_KEY", key)
            with pytest.raises(UserError, match="holds characters that no key has"):
                APIRubricJudge(OpenAIClient(address + "#b"), rubric).probe()
    assert [body["model"] for body in bodies] == ["b", "b"] and keys == [None, "Bearer secret"]


def test_a_redirect_is_not_followed_with_the_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    calls = []
    rubric = Rubric.from_weights(POLITE_RIGHT[:1])
    with api_server(lambda *_: calls.append(1) or first_token(("yes", 1.0))) as (other, bodies):
        for status in (301, 302, 303, 307, 308):
            reply = status, {}, {"Location": f"{other}/v1/chat/completions"}
            with api_server(lambda *_, r=reply: r) as (address, _):
                judge = APIRubricJudge(OpenAIClient(f"{address}#judge"), rubric)
                with pytest.raises(UserError, match=f"HTTP {status}: a redirect to {other}"):
                    judge.probe()
    assert not bodies and not calls


@pytest.mark.parametrize("reading", ["yes_no", "score"])
def test_a_server_that_takes_only_max_completion_tokens_gets_it(reading):
    """OpenAI's newer models refuse max_tokens."""
    error = {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}

    def reply(body, headers):
        if "max_tokens" in body:
            return 400, {"error": error}
        reply = make_reply("Score: 10") if reading == "score" else first_token(("yes", 1.0))
        return reply if body["max_completion_tokens"] == (9 if reading == "score" else 1) else None

    rubric = Rubric.from_weights(POLITE_RIGHT[:1], reading, max_tokens=9)
    with api_server(reply) as (address, bodies):
        judge = APIRubricJudge(OpenAIClient(address), rubric)
        judge.probe()
        assert len(bodies) == 2
        ((score,),) = judge.scores([group("a")])
    assert score.reward == 1.0 and len(bodies) == 3


def test_addresses_are_for_rubrics_alone():
    address = "http://localhost:8000/v1"
    rubric = (("Is it right?", 1.0),)
    assert LearnedRewardSettings(rubric_model=address, rubric=rubric).loaded_model_names == []
    for settings in (
        {"rubric_model": address, "rubric": rubric, "rubric_renderer": "plain"},
        {"reward_model": address},
        {"comparison_model": address},
        {"reward_models": ((address, 1.0),)},
    ):
        with pytest.raises(ValueError, match="localhost:8000"):
            LearnedRewardSettings(**settings)


SHORT = (
    "grpo --steps 2 --batch-size 2 --group-size 2 --eval-every 0 --max-tokens 4 --rubric Long? 1"
)


def test_a_server_that_cannot_judge_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("rl.trainer.stage_models.make_policy", load)
    with api_server(lambda *_: make_reply("yes")) as (address, bodies):
        with pytest.raises(UserError, match="grpo, before any training: .*cannot be read as yes"):
            train(f"{SHORT} --rubric-model {address}", tmp_path)
        assert len(bodies) == 1
    with pytest.raises(UserError, match="lists no models.*refused"):
        train(f"{SHORT} --rubric-model {address}", tmp_path)


def test_a_run_learns_what_the_server_says(tmp_path):
    """In two steps of GRPO, the rewards of the rollouts are the server's scores."""

    def reply(body, headers):
        answer = body["messages"][0]["content"].split("[Answer]\n")[1].split("\n")[0]
        share = (len(answer) + 1) / 10
        return first_token(("yes", share), ("no", 1 - share))

    with api_server(reply) as (address, bodies):
        rows = train(f"{SHORT} --rollouts-every 1 --rubric-model {address}", tmp_path)
    answers = [
        json.loads(line)
        for path in sorted((tmp_path / "rollouts").glob("step_*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(answers) == 8
    for answer in answers:
        share = (len(answer["response"].strip()) + 1) / 10
        assert answer["reward"] == pytest.approx(share)
    assert [row["reward/total"] for row in rows if "progress/batch" in row] == pytest.approx(
        [sum(answer["reward"] for answer in answers[i : i + 4]) / 4 for i in (0, 4)]
    )
