"""Test a teacher behind an OpenAI-compatible API."""

import threading

import pytest
from api_stub import api_server
from whole_runs import final_weights, train

from rl import ServiceClient
from rl.errors import UserError
from rl.judges import APIScoringClient, OpenAIClient, openai_client
from rl.types import ModelInput

WORDS = (
    "distill --base-model tiny:addition-small --dataset addition --steps 2 --batch-size 4 "
    "--group-size 2 --max-tokens 3 --eval-every 0 --learning-rate 1e-3"
)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(openai_client, "_RETRY_SECONDS", (0.0,) * 6)


def make_echo_reply(tokens, logprobs, texts=None):
    """Return the reply of a server that echoes the prompt and adds a token."""
    texts = [chr(token) for token in tokens] if texts is None else texts
    content = {"tokens": [*texts, "!"], "token_logprobs": [None, *logprobs[1:], -1.0]}
    return 200, {"choices": [{"text": "".join(texts), "logprobs": content}]}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Yield a folder of weights, and a function from tokens to their texts and logprobs under these
    weights.
    """
    folder = tmp_path_factory.mktemp("teacher")
    train(
        "sft --base-model tiny:addition-small --dataset addition --steps 2 --batch-size 8 "
        "--eval-every 0 --learning-rate 1e-2",
        folder,
    )
    lock = threading.Lock()
    with ServiceClient(output_dir=tmp_path_factory.mktemp("service")) as service:
        client = service.create_sampling_client(
            model_path=str(next((folder / "checkpoints").glob("*-final")))
        )
        tokenizer = client.get_tokenizer()

        def score(tokens):
            with lock:
                (logprobs,) = client.compute_logprobs_many([ModelInput.from_ints(tokens)]).result()
            return [tokenizer.decode([token]) for token in tokens], logprobs

        yield folder, score


def test_a_run_with_the_teacher_behind_an_api_is_that_with_its_weights(teacher, tmp_path):
    folder, score = teacher

    def reply(body, headers):
        assert body["echo"] is True and body["max_tokens"] == 1
        texts, logprobs = score(body["prompt"])
        return make_echo_reply(body["prompt"], logprobs, texts)

    here = train(f"{WORDS} --teacher {folder}", tmp_path / "here")
    with api_server(reply, models=("teacher",)) as (address, bodies):
        present = train(f"{WORDS} --teacher {address}", tmp_path / "there")
    assert len(bodies) > 2 * 4 * 2  # the answers, and the sampled tokens
    metric = "teacher/kl_per_token"
    ours, theirs = ([row[metric] for row in rows if metric in row] for rows in (here, present))
    # single sequences instead of a batch: equal up to the rounding of matrix products
    assert len(ours) == 2 and theirs == pytest.approx(ours, rel=1e-4)
    weights, others = final_weights(tmp_path / "here"), final_weights(tmp_path / "there")
    for name, tensor in weights.items():
        assert float((tensor - others[name]).abs().max()) < 1e-5, name


@pytest.mark.parametrize(("answer", "message"), [
    ((400, {"error": "logprobs are off"}), "did not score.*HTTP 400.*logprobs are off"),
    ((503, {}), "did not score.*HTTP 503"),
    ((200, {"choices": [{"text": "x", "logprobs": None}]}), "no logprobs of the prompt"),
    (make_echo_reply([65, 66], [0.0, -1.0]), "has logprobs of 3 tokens"),
    (make_echo_reply([88] * 500, [-1.0] * 500), "another vocabulary.*in the policy's and 'X' in the"),
])  # fmt: skip
def test_a_server_that_cannot_be_a_teacher_is_refused_before_the_run(answer, message, tmp_path):
    with (
        api_server(lambda body, headers: answer) as (address, _),
        pytest.raises(UserError, match=message),
    ):
        train(f"{WORDS} --base-model tiny:ascii-small --teacher {address}", tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_logprobs_are_those_of_temperature_1():
    with api_server(lambda body, _: make_echo_reply(body["prompt"], [0.0, -0.5, -0.25])) as (
        address,
        _,
    ):
        scorer = APIScoringClient(OpenAIClient(address))
        inputs = [ModelInput.from_ints([65, 66, 67])]
        assert scorer.compute_logprobs_many(inputs).result() == [[None, -0.5, -0.25]]
        with pytest.raises(UserError, match="at temperature 1"):
            scorer.compute_logprobs_many(inputs, 0.5)


@pytest.mark.parametrize(("words", "message"), [
    ("--learn-from teacher", "only scores the student"),
    ("--temperature 0.5", "scores at temperature 1"),
])  # fmt: skip
def test_settings_that_a_teacher_behind_an_api_cannot_serve(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(f"{WORDS} --teacher http://localhost:1/v1 {words}", tmp_path)
    assert message in capsys.readouterr().err
