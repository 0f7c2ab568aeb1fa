"""Test the public names of Tinker's client that scripts use."""

import asyncio
import concurrent.futures
import copy
import importlib
import inspect
import pickle

import numpy as np
import pytest
import torch
from helpers import random_datums

import rl
from rl import ServiceClient, types
from rl.distributed.checkpoint_folder import read_verified_state

TOP = """ServiceClient TrainingClient SamplingClient RestClient APIFuture BackcompatTrainingClientFuture BackcompatSamplingClientFuture
LossHandle PerDatumLossFn AdamOptimizerConfig AdamParams OptimParams Checkpoint CheckpointType Datum EncodedTextChunk
ForwardBackwardOutput SampledProvenanceSpan PromptProvenanceSpan LoraConfig ModelID ModelInput ModelInputChunk OptimStepResponse
SampledSequence SampleResponse SamplingParams StopReason TensorData TensorDtype TrainingRun TinkerError APIError APIStatusError
APITimeoutError APIConnectionError APIResponseValidationError RequestFailedError BadRequestError AuthenticationError BillingError
PermissionDeniedError NotFoundError ConflictError UnprocessableEntityError RateLimitError InternalServerError types""".split()
# These names only concern requests to a remote service, which do not exist here. Accessing them
# raises an error with the reason.
NOT_HERE = """AdminClient auth DimuonOptimizerConfig DimuonParams DmelChunk OptimStepRequest ParsedCheckpointTinkerPath RequestOptions
SampleRequest Timeout""".split()
VERBS = {
    "ServiceClient": {
        "__init__": "user_metadata project_id display_name base_url api_key default_headers_overrides",
        "create_lora_training_client": "base_model rank seed train_mlp train_attn train_unembed user_metadata optimizer",
        "create_training_client_from_state": "path base_model user_metadata weights_access_token optimizer",
        "create_training_client_from_state_with_optimizer": "path base_model user_metadata weights_access_token",
        "create_sampling_client": "model_path base_model retry_config record_stability_info",
        "create_custom_loss": "fn input_ranks",
        "create_rest_client": "",
        "copy_weights": "path",
        "get_server_capabilities": "",
        "get_console_url": "",
        "get_telemetry": "",
        "close": "status detail",
    },
    "TrainingClient": {
        "forward": "data loss_fn loss_fn_config",
        "forward_backward": "data loss_fn loss_fn_config",
        "forward_backward_custom": "data loss_fn loss_type_input",
        "optim_step": "optim_params adam_params",
        "save_state": "name ttl_seconds overwrite user_metadata",
        "load_state": "path weights_access_token",
        "load_state_with_optimizer": "path weights_access_token",
        "save_weights_for_sampler": "name ttl_seconds user_metadata",
        "save_weights_external": "",
        "save_weights_and_get_sampling_client": "name retry_config record_stability_info kind",
        "create_sampling_client": "model_path retry_config record_stability_info",
        "get_info": "",
        "get_tokenizer": "",
        "get_console_url": "",
        "get_telemetry": "",
    },
    "SamplingClient": {
        "sample": "prompt num_samples sampling_params include_prompt_logprobs topk_prompt_logprobs topk_sample_logprobs "
        "target_prompt_logprobs prompt_alt_tokens_k prompt_logprobs_last_n",
        "compute_logprobs": "prompt prompt_logprobs_last_n",
        "get_tokenizer": "",
        "get_base_model": "",
        "get_telemetry": "",
    },
    "APIFuture": {"result": "timeout", "result_async": "timeout", "future": "", "coroutine": ""},
}
ASYNC = {
    "ServiceClient": "get_server_capabilities create_lora_training_client create_training_client_from_state "
    "create_training_client_from_state_with_optimizer create_sampling_client",
    "TrainingClient": "forward forward_backward forward_backward_custom optim_step save_state load_state load_state_with_optimizer "
    "save_weights_for_sampler save_weights_external get_info create_sampling_client save_weights_and_get_sampling_client",
    "SamplingClient": "sample compute_logprobs get_base_model",
}
SUBMODULES = """types.tensor_data types.datum types.model_input types.encoded_text_chunk types.loss_fn_type types.sampled_sequence
types.sampling_params types.provenance_spans types.optimizer lib.public_interfaces lib.public_interfaces.rest_client
lib.public_interfaces.sampling_client lib.public_interfaces.training_client lib.public_interfaces.service_client
lib.public_interfaces.api_future""".split()
PROMPT = types.ModelInput.from_ints([3, 4, 12, 5, 6, 13])
ADAM = types.AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceClient(
        {"who": "me"}, output_dir=tmp_path_factory.mktemp("out"), seed=3, display_name="a test"
    ) as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    return service.create_full_training_client("tiny:addition", seed=2)


def test_every_name_is_there_or_says_why_not():
    for name in TOP:
        assert getattr(rl, name) is not None and name in rl.__all__, name
    for name in NOT_HERE:
        with pytest.raises(AttributeError, match=f"rl has no {name}: .*docs/tinker.md"):
            getattr(rl, name)


@pytest.mark.parametrize("which", VERBS)
def test_every_verb_takes_what_tinkers_takes_in_its_order(which):
    cls = getattr(rl, which)
    for verb, names in VERBS[which].items():
        parameters = list(inspect.signature(getattr(cls, verb)).parameters.values())
        assert set(names.split()) <= {p.name for p in parameters}, (which, verb)
        by_place = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        expected = [name for name in names.split() if name in by_place]
        assert [name for name in by_place if name in names.split()] == expected, (which, verb)
    for verb in ASYNC.get(which, "").split():
        assert inspect.iscoroutinefunction(getattr(cls, f"{verb}_async")), (which, verb)


def test_submodules_hold_the_same_classes():
    for name in SUBMODULES:
        importlib.import_module(f"rl.{name}")
    tensor_data = importlib.import_module("rl.types").TensorData
    rest_client = importlib.import_module("rl.lib.public_interfaces.rest_client").RestClient
    assert tensor_data is types.TensorData and rest_client is rl.RestClient


def test_errors_go_by_tinkers_names_and_stay_value_errors(client):
    assert issubclass(rl.UserError, rl.BadRequestError)
    assert issubclass(rl.BadRequestError, rl.APIStatusError)
    assert issubclass(rl.BadRequestError, ValueError)
    for name in ("RateLimitError", "APITimeoutError", "NotFoundError"):
        assert issubclass(getattr(rl, name), rl.TinkerError)
    sampler, params = client.save_weights_and_get_sampling_client(), types.SamplingParams(1)
    with pytest.raises(rl.TinkerError, match="the prompt holds the id 99") as caught:
        sampler.sample(types.ModelInput.from_ints([99]), 1, params)
    assert isinstance(caught.value, ValueError) and caught.value.status_code == 400
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value) and str(again) == str(caught.value)
    message = r"base_url='http://localhost:1' names a server.*accelerate launch"
    with pytest.raises(rl.UserError, match=message):
        ServiceClient(base_url="http://localhost:1")


def test_futures_are_coroutines_and_futures_of_the_standard_library(service, client):
    future = client.forward(random_datums(2), "ppo")
    plain = future.future()
    done, _ = concurrent.futures.wait([plain], 60)
    assert plain in done and plain.result().metrics == future.result().metrics
    assert client.future().result(60) is client

    async def script():
        task = asyncio.create_task(client.forward(random_datums(2), "ppo").coroutine())
        return (await task).metrics, await service.create_lora_training_client("tiny:addition", 2)

    metrics, made = asyncio.run(script())
    assert metrics == future.result().metrics and made.get_info().lora_rank == 2


def test_a_sampling_client_is_itself_after_a_pickle_and_says_where_it_lives(client):
    sampler = client.save_weights_and_get_sampling_client()
    assert pickle.loads(pickle.dumps(sampler)) is sampler
    assert copy.deepcopy({"policy": sampler})["policy"] is sampler
    function, (process, number) = sampler.__reduce__()
    with pytest.raises(rl.UserError, match="live in the process that made it"):
        function(process + 1, number)


def test_samples_have_ids_and_datums_say_where_they_come_from(client):
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True)
    params = types.SamplingParams(max_tokens=4, stop=[])
    options = {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    futures = [sampler.sample(PROMPT, 2, params, **options) for _ in range(2)]
    responses = [future.result() for future in futures]
    sequences = [s for response in responses for s in response.sequences]
    assert len({s.sequence_id for s in sequences}) == 4 and all(s.sequence_id for s in sequences)
    # the second request reuses the first one's prompt
    assert [r.prompt_cache_hit_tokens for r in responses] == [0, PROMPT.length]
    first = sequences[0]
    assert first.tokens_np.tolist() == first.tokens and first.logprobs_np.dtype == np.float32
    scored = sampler.compute_logprobs(PROMPT).result()
    assert responses[0].prompt_logprobs[:4] == [None] * 4
    assert responses[0].prompt_logprobs[4:] == pytest.approx(scored[4:])
    assert sampler.compute_logprobs(PROMPT, 1).result() == [*[None] * 5, scored[5]]

    fields = {"target_tokens": [0] * 5 + first.tokens, "logprobs": [0.0] * 5 + first.logprobs}
    datum = types.Datum(PROMPT.append(types.EncodedTextChunk(first.tokens[:-1])), fields)
    prompt_span, sampled_span = types.PromptProvenanceSpan, types.SampledProvenanceSpan
    name = {"sequence_id": first.sequence_id}
    spans = [prompt_span(**name, length=6), sampled_span(**name, length=3)]
    targets = [prompt_span(**name, offset=1, length=5), sampled_span(**name, length=4)]
    named = datum.with_provenance(model_input=spans, loss_fn_inputs=targets)
    assert named.model_input_spans == spans
    assert named.loss_fn_input_spans == targets
    assert datum.model_input_spans is None
    message = "the spans of loss_fn_inputs cover 10 positions, it has 9"
    with pytest.raises(ValueError, match=message):
        datum.with_provenance(spans, [*targets, prompt_span(sequence_id="x", length=1)])
    with pytest.raises(ValueError, match="length of at least 0"):
        sampled_span(sequence_id="x", length=-1)


def test_words_saved_with_a_checkpoint_are_read_again_and_it_can_be_written_over(service):
    words = {"what": "a test"}
    client = service.create_lora_training_client("tiny:addition", 2, user_metadata=words)
    path = client.save_state("worded", user_metadata={"when": "now"}).result().path
    expected = {"who": "me", "what": "a test", "when": "now"}
    assert read_verified_state(path)["user_metadata"] == expected
    rest = service.create_rest_client()
    run = rest.get_training_run_by_tinker_path(path).result()
    assert (run.user_metadata, run.is_lora, run.lora_rank) == (expected, True, 2)
    assert run.last_checkpoint.checkpoint_type == "training"
    assert rest.get_weights_info_by_tinker_path(path).result().base_model == "tiny:addition"
    client.forward_backward(random_datums(2), "ppo")
    client.optim_step(optim_params=ADAM)
    with pytest.raises(rl.UserError, match="exists already"):
        client.save_state("worded").result()
    assert client.save_state("worded", overwrite=True).result().path == path
    state = read_verified_state(path)
    assert state["version"] == 1 and "when" not in state["user_metadata"]
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(rl.UserError, match="not a checkpoint"):
        rest.delete_checkpoint_from_tinker_path(path)


def test_two_models_may_save_under_one_name(service):
    models = [service.create_full_training_client("tiny:addition", seed=seed) for seed in (1, 2)]
    saved = [
        (model, model.save_state(name).result().path)
        for name in ("step-1", "step-2")
        for model in models
    ]
    for model in models[::-1]:
        saved.append((model, model.save_weights_for_sampler("step-1").result().path))
    assert len({path for _, path in saved}) == 6
    for model, path in saved:
        mine = model.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result()
        loaded = service.create_sampling_client(path).compute_logprobs(PROMPT).result()
        assert loaded[1:] == pytest.approx(mine[1:], abs=1e-6)


def test_a_loss_made_beforehand_is_the_sum_over_datums(service, client):
    def loss(logprobs, advantages):
        count = torch.tensor(float(len(logprobs)))
        metrics = {"custom/tokens:sum": count, "custom/two:mean": torch.tensor(2.0)}
        return -(logprobs * advantages).sum(), metrics

    handle = service.create_custom_loss(loss, {"advantages": 1}).result()
    data = random_datums(3, seed=5)
    made = client.forward_backward_custom(data, handle, loss_type_input="logprobs").result()
    rows = client.forward(data, "importance_sampling").result().loss_fn_outputs
    expected = 0.0
    for row, datum in zip(rows, data, strict=True):
        expected -= (row["logprobs"].array * datum.loss_fn_inputs["advantages"].array).sum()
    assert made.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-5)
    assert made.metrics["custom/tokens:sum"] == sum(d.model_input.length for d in data)
    assert made.metrics["custom/two:mean"] == 2.0
    client.optim_step(adam_params=types.AdamParams(learning_rate=0.0)).result()


def test_what_is_not_done_here_says_so(service, client):
    sampler, params = client.save_weights_and_get_sampling_client(), types.SamplingParams(1)
    for call, message in (
        (lambda: sampler.sample(PROMPT, 1, params, topk_sample_logprobs=2),
         "topk_sample_logprobs is not supported here"),
        (lambda: sampler.sample(PROMPT, 1, params, prompt_alt_tokens_k=1),
         "prompt_alt_tokens_k is not supported here"),
        (lambda: client.save_weights_and_get_sampling_client(kind="inflight"),
         "kind is 'snapshot'"),
        (lambda: client.save_weights_external("x"),
         "save_weights_for_sampler, which writes a folder"),
        (lambda: service.copy_weights("x"), "the tools of your file system"),
        (client.optim_step, "single types.AdamParams .*got nothing"),
    ):  # fmt: skip
        with pytest.raises(rl.BadRequestError, match=message):
            call()
