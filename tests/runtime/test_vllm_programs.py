"""Test sample.py and evaluate.py with --sampler vllm, on a stub, against the in-process sampler."""

import json
import subprocess
import sys

import numpy as np
import pytest
from test_started_server import REPO, list_processes, make_command
from test_vllm import check_logprobs, corrupt_reply, make_policy, update
from vllm_stub import StubServer, vllm_server
from whole_runs import train

import evaluate
import sample
from rl import ServiceClient
from rl.errors import UserError
from rl.runtime import SamplerSettings, WorkerSettings
from rl.trainer import open_weights
from rl.types import ModelInput, SamplingParams

WORDS = (
    "sft --base-model tiny:addition-small --dataset addition --response-column answer --reward "
    "exact_match --steps 60 --batch-size 256 --learning-rate 3e-3 --eval-every 0 --save-every 0 "
    "--eval-limit 2 --max-tokens 4"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run that has learned some of the problems."""
    folder = tmp_path_factory.mktemp("taught") / "run"
    train(WORDS, folder)
    return folder


@pytest.fixture
def server():
    stub = StubServer()
    with vllm_server(stub, corrupt_reply) as url:
        yield stub, url


def run_program(module, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
    if module is evaluate:
        module.main(module.read_arguments(), [])
    else:
        args, args.others = module.parser.parse_known_args()
        module.main(args, [])


def evaluate_rows(words, output, monkeypatch):
    run_program(evaluate, [*words, "--output", output], monkeypatch)
    result = json.loads(output.read_text())
    rows = [
        (row["problem"], row["response"], row["reward"], row["tokens"]) for row in result["rows"]
    ]
    return rows, result["mean reward"]


@pytest.mark.parametrize("place", ["elsewhere", "started"])
def test_an_evaluation_is_that_of_the_sampler_in_the_process(
    place, run, server, tmp_path, monkeypatch
):
    """Greedy answers are equal token by token. A single folder with the run's weights is sent."""
    stub, url = server
    words = [run, "--limit", 40, "--temperature", 0]
    expected = evaluate_rows(words, tmp_path / "here.json", monkeypatch)
    assert len({reward for _, _, reward, _ in expected[0]}) > 1
    assert not stub.folders
    servers = ["--sampler-url", url]
    if place == "started":
        servers = ["--sampler-command", make_command(tmp_path / "starts", url)]
    words += ["--sampler", "vllm", *servers]
    assert evaluate_rows(words, tmp_path / "there.json", monkeypatch) == expected
    assert len(stub.folders) == 1 and len(stub.bodies) >= 40
    assert not list_processes(str(tmp_path / "starts"))


def test_samples_are_printed_as_by_the_sampler_in_the_process(run, server, capsys, monkeypatch):
    stub, url = server
    words = [run, "--prompt", "12+34=", "50+31=", "--temperature", 0, "-n", 2, "--max-tokens", 4]
    run_program(sample, words, monkeypatch)
    expected = capsys.readouterr().out
    assert not stub.bodies and "mean logprob" in expected
    run_program(sample, [*words, "--sampler", "vllm", "--sampler-url", url], monkeypatch)
    assert capsys.readouterr().out == expected and len(stub.bodies) >= 4


def test_logprobs_stop_reasons_and_scores_are_those_of_the_weights(run, server):
    stub, url = server
    saved = open_weights(str(run))
    settings = {"sampler": "vllm", "sampler_url": (url,)}
    sampling = saved.prompt_settings[1]
    with (
        saved.create_service(sampling=type(sampling)(temperature=0.7, **settings)) as service,
        saved.create_service() as local,
    ):
        sampler = saved.create_sampler(service, prefers_servers=True)
        here = saved.create_sampler(local, prefers_servers=True)
        assert (sampler.info["sampler"], sampler.version) == ("vllm", here.version)
        params = SamplingParams(max_tokens=4, temperature=0.7)
        prompt = ModelInput.from_ints([3, 4, 5])
        for sequence in sampler.sample(prompt, 6, params).result().sequences:
            text = ModelInput.from_ints([3, 4, 5, *sequence.tokens])
            (scores,) = here.compute_logprobs_many([text], 0.7).result()
            np.testing.assert_allclose(sequence.logprobs, scores[3:], atol=1e-5)
            assert (sequence.stop_reason == "length") == (
                sequence.tokens[-1] not in sampler.info["tokenizer"].all_special_ids
            )
            assert sequence.version == sampler.version
        right = here.compute_logprobs(text).result()
        np.testing.assert_allclose(
            sampler.compute_logprobs(text).result()[1:], right[1:], atol=1e-5
        )
        opponent = saved.create_sampler(service)  # the in-process sampler
        assert opponent.info["sampler"] != "vllm"
        assert opponent.sample(prompt, 1, params).result().sequences
        assert len(stub.folders) == 1


def test_the_servers_of_a_run_are_not_of_its_later_programs(server, tmp_path, monkeypatch):
    """The run's servers may no longer exist; the flags name others."""
    stub, url = server
    words = (
        "grpo --base-model tiny:addition-small --dataset addition --reward exact_match --steps 1 "
        "--batch-size 2 --group-size 2 --max-tokens 4 --eval-limit 2 --sampler vllm "
        f"--sampler-url {url} --sampler-timeout 60 --sampler-folder {tmp_path}"
    )
    train(words, tmp_path / "run")
    num_bodies = len(stub.bodies)
    words = [tmp_path / "run", "--limit", 4, "--temperature", 0]
    expected = evaluate_rows(words, tmp_path / "a.json", monkeypatch)
    assert len(stub.bodies) == num_bodies
    words += ["--sampler", "vllm", "--sampler-url", url]
    assert evaluate_rows(words, tmp_path / "b.json", monkeypatch) == expected


def test_a_server_that_computes_with_other_weights_is_refused(run, server, monkeypatch):
    """For example a tied head on a CPU, which the checksums do not cover."""
    stub, url = server
    load = stub.load

    def load_without_head(folder):
        load(folder)
        stub.model.lm_head.weight = type(stub.model.lm_head.weight)(
            stub.model.lm_head.weight.flip(0).contiguous()
        )

    stub.load = load_without_head
    checksums = stub.checksums
    stub.checksums = lambda: {k: v for k, v in checksums().items() if "norm" in k}
    words = [run, "--prompt", "12+34=", "--sampler", "vllm", "--sampler-url", url]
    with pytest.raises(UserError, match=f"{url} computes other logprobs"):
        run_program(sample, words, monkeypatch)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sampler-tp 2", "start the server with --tensor-parallel-size"),
        ("--sampler-cache paged", "sampler-cache is a setting of the sampler in this"),
        ("tiny:addition --chat", "vLLM servers hold the weights of one model"),
    ],
)
def test_what_does_not_combine_is_refused(words, message, run, monkeypatch):
    words = [run, *words.split(), "--sampler", "vllm", "--sampler-url", "http://127.0.0.1:9"]
    with pytest.raises(UserError, match=message):
        run_program(sample, words, monkeypatch)


def test_a_saved_adapter_is_merged(tmp_path, server):
    stub, url = server
    with ServiceClient(output_dir=tmp_path / "out", settings=WorkerSettings("fp32")) as service:
        policy = make_policy(service, "lora")
        update(policy)
        path = policy.save_weights_for_sampler("adapter").result().path
        sampler = SamplerSettings(kind="vllm", urls=(url,))
        settings = WorkerSettings("fp32", sampler=sampler)
        with ServiceClient(output_dir=tmp_path / "others", settings=settings) as others:
            client = others.create_sampling_client(path, prefers_servers=True)
            prompt = ModelInput.from_ints([3, 4, 5])
            params = SamplingParams(max_tokens=6, temperature=0.7)
            for sequence in client.sample(prompt, 2, params).result().sequences:
                check_logprobs(policy, [([3, 4, 5], sequence)])
    assert len(stub.folders) == 1


@pytest.mark.extras
def test_a_server_of_several_base_models_refuses_vllm(tmp_path):
    pytest.importorskip("fastapi", reason="needs the extra serve")
    words = ["serve.py", "--base-model", "tiny:addition", "--port", "0", "--sampler", "vllm"]
    words += ["--base-model", "tiny:ascii", "--sampler-url", "http://127.0.0.1:9"]
    command = [sys.executable, *words, "--output-dir", tmp_path / "served"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    shown = " ".join(done.stderr.replace("│", "").split())
    assert done.returncode == 2 and "sample from one model at a time" in shown
