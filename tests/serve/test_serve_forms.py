"""Test responses in protobuf and in JSON, as selected by `accept`."""

import numpy as np
import pytest
from serving import BASE, PROTOBUF, Wire, server
from test_serve import WITHOUT_VALUES, _for_loss, make_text_datums

from rl.client import ServiceClient
from rl.serve import tinker_pb2
from rl.types import Datum, ModelInput, SamplingParams, TensorData


@pytest.fixture(scope="module")
def model_server(tmp_path_factory):
    with server(tmp_path_factory.mktemp("served")) as first:
        yield first


@pytest.fixture
def wire_client(model_server):
    first = Wire(model_server)
    first.open()
    return first


def get_both_forms(wire_client, request):
    """Return the protobuf response and the JSON result of a request."""
    plain = wire_client.wait(request)
    raw = wire_client.http.post(
        "/api/v1/retrieve_future",
        json={"request_id": request["request_id"]},
        headers={"accept": PROTOBUF},
    )
    assert raw.status_code == 200
    return raw, plain


def fields_of(message):
    """Return the rows of a protobuf output as {name: (dtype, shape, array)}."""
    rows = []
    for record in message.loss_fn_outputs:
        results = [{} for _ in range(record.num_datums)]
        for name, field in record.fields.items():
            dtype = np.dtype("<f4" if field.dtype == tinker_pb2.DTYPE_FLOAT32 else "<i8")
            offsets = np.frombuffer(field.offsets, "<i8")
            for i, (a, b) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
                array = np.frombuffer(field.data[a:b], dtype).reshape(-1, *field.trailing_shape)
                results[i][name] = (
                    "float32" if dtype.kind == "f" else "int64", list(array.shape), array,
                )  # fmt: skip
        rows += results
    return rows


def check_rows(message, plain):
    rows = fields_of(message)
    assert len(rows) == len(plain["loss_fn_outputs"]) > 0
    assert message.loss_fn_output_type == plain["loss_fn_output_type"]
    for row, other in zip(rows, plain["loss_fn_outputs"], strict=True):
        assert row.keys() == other.keys() and row
        for name, (dtype, shape, array) in row.items():
            assert (dtype, shape) == (other[name]["dtype"], other[name]["shape"])
            assert np.array_equal(
                np.asarray(other[name]["data"], array.dtype).reshape(array.shape),
                array,
                equal_nan=True,
            )
    assert dict(message.metrics) == plain["metrics"] and all(
        ":" in name for name in plain["metrics"]
    )


@pytest.mark.parametrize("forward_only", [False, True])
def test_what_a_loss_gives_is_the_same_in_both_forms(wire_client, forward_only):
    model = wire_client.model()
    for seq, name in enumerate(WITHOUT_VALUES, start=1):
        raw, plain = get_both_forms(
            wire_client,
            wire_client.ask(model, seq, _for_loss(name), name, forward_only=forward_only),
        )
        assert raw.headers["content-type"].startswith(PROTOBUF), (name, raw.text)
        check_rows(tinker_pb2.ForwardBackwardOutput.FromString(raw.content), plain)


def test_logprobs_of_several_targets_a_position_are_the_same_in_both_forms(wire_client, tmp_path):
    data = []
    for n in (3, 5):
        targets = TensorData(np.arange(2 * n).reshape(n, 2) + 3)
        data.append(
            Datum(
                ModelInput.from_ints(list(range(5, 5 + n))),
                {"target_tokens": targets, "weights": np.ones((n, 2), "<f4")},
            )
        )
    raw, plain = get_both_forms(wire_client, wire_client.ask(wire_client.model(), 1, data))
    check_rows(tinker_pb2.ForwardBackwardOutput.FromString(raw.content), plain)
    assert [row["logprobs"]["shape"] for row in plain["loss_fn_outputs"]] == [[3, 2], [5, 2]]
    with ServiceClient(output_dir=tmp_path) as service:
        here = (
            service.create_lora_training_client(BASE, 4, 7)
            .forward_backward(data, "cross_entropy")
            .result()
        )
    for row, mine in zip(plain["loss_fn_outputs"], here.loss_fn_outputs, strict=True):
        assert np.array_equal(
            np.float32(row["logprobs"]["data"]), mine["logprobs"].array.reshape(-1)
        )


def test_a_sample_is_the_same_in_both_forms(wire_client, tmp_path):
    sampler = wire_client.sampler(wire_client.model(), 1)
    targets = {"data": [9, -1, 3, 90], "dtype": "int64", "shape": [2, 2]}
    asks = [
        {}, {"prompt_logprobs": True}, {"topk_prompt_logprobs": 3, "prompt_logprobs": True},
        {"target_prompt_logprobs": targets},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 1},
    ]  # fmt: skip
    reasons = {tinker_pb2.STOP_REASON_STOP: "stop", tinker_pb2.STOP_REASON_LENGTH: "length"}
    seen = []
    for seq, request in enumerate(asks):
        raw, plain = get_both_forms(
            wire_client,
            wire_client.ask_sample(
                sampler, seq, [5, 6, 7], 2, seed=4, max_tokens=3 + seq, **request
            ),
        )
        message = tinker_pb2.SampleResponse.FromString(raw.content)
        assert len(message.sequences) == len(plain["sequences"]) == 2 and plain["type"] == "sample"
        for item, other in zip(message.sequences, plain["sequences"], strict=True):
            assert np.frombuffer(item.tokens, "<i4").tolist() == other["tokens"] != []
            assert np.array_equal(
                np.frombuffer(item.logprobs, "<f4"), np.float32(other["logprobs"])
            )
            assert reasons[item.stop_reason] == other["stop_reason"]
        assert message.prompt_cache_hit_tokens == plain["prompt_cache_hit_tokens"]
        for name in ("prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs"):
            assert message.HasField(name) == (plain.get(name) is not None) == (name in request)
        if "prompt_logprobs" in request:
            actual, values = np.frombuffer(message.prompt_logprobs, "<f4"), plain["prompt_logprobs"]
            assert values[0] is None
            others = np.float32([np.nan if value is None else value for value in values])
            assert np.array_equal(actual, others, equal_nan=True)
            seen.append(values.count(None))
        if "topk_prompt_logprobs" in request:
            top, rows = message.topk_prompt_logprobs, plain["topk_prompt_logprobs"]
            ids = np.frombuffer(top.token_ids, "<i4").reshape(-1, top.k)
            values = np.frombuffer(top.logprobs, "<f4").reshape(-1, top.k)
            assert top.length == len(rows) == 3 and rows[0] is None
            for reference, logprobs, other in zip(ids[1:], values[1:], rows[1:], strict=True):
                pairs = [(int(token), np.float32(value)) for token, value in other]
                assert pairs == list(zip(reference.tolist(), logprobs, strict=True))
        if "target_prompt_logprobs" in request:
            tensor, other = message.target_prompt_logprobs, plain["target_prompt_logprobs"]
            assert list(tensor.shape) == other["shape"] == [2, 2]
            assert np.array_equal(np.frombuffer(tensor.dense, "<f4"), np.float32(other["data"]))
    # positions without a logprob: the first, and two with last_n of 3 tokens
    assert seen == [1, 1, 2]
    with ServiceClient(output_dir=tmp_path) as service:
        model = service.create_lora_training_client(BASE, 4, 7)
        client = model.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=7, seed=4)
        mine = client.sample(ModelInput.from_ints([5, 6, 7]), 2, params).result()
    assert [item["tokens"] for item in plain["sequences"]] == [
        item.tokens for item in mine.sequences
    ]


def test_what_has_no_protobuf_is_json_in_both_and_so_is_every_refusal(wire_client):
    model = wire_client.model()
    wire_client.output(wire_client.ask(model, 1, make_text_datums()))
    requests = [
        wire_client.step(model, 2),
        wire_client.post("save_weights", model_id=model, seq_id=3, path="a"),
        wire_client.post("save_weights_for_sampler", model_id=model, seq_id=4, path="b"),
        wire_client.post(
            "save_weights_for_sampler", model_id=model, seq_id=5, sampling_session_seq_id=3
        ),
        wire_client.post("save_weights_external", model_id=model, seq_id=6, path="c"),
    ]
    path = wire_client.wait(requests[1])["path"]
    requests += [
        wire_client.post("load_weights", model_id=model, seq_id=7, path=path, optimizer=True),
        wire_client.post("unload_model", model_id=model),
    ]
    kinds = []
    for item in requests:
        raw, plain = get_both_forms(wire_client, item)
        assert raw.headers["content-type"] == "application/json"
        assert raw.json() == plain
        assert "error" not in plain
        kinds.append(plain["type"])
    named = [
        "optim_step", "save_weights", *["save_weights_for_sampler"] * 2, "save_weights_external",
        "load_weights", "unload_model",
    ]  # fmt: skip
    assert kinds == named
    raw, plain = get_both_forms(
        wire_client,
        wire_client.ask(model, 8, [Datum(ModelInput.from_ints([4]), {"target_tokens": [999]})]),
    )
    assert raw.json() == plain and plain["category"] == "user"


def test_numbers_that_are_none_travel_in_both_forms(wire_client):
    model = wire_client.model()
    wire_client.output(wire_client.ask(model, 1, make_text_datums()))
    wire_client.wait(wire_client.step(model, 2, learning_rate=1e30))
    for seq in (3, 4):
        raw, plain = get_both_forms(
            wire_client, wire_client.ask(model, seq, make_text_datums(), forward_only=seq == 3)
        )
        if "error" in plain:
            assert raw.json() == plain and plain["category"] == "user"
        else:
            check_rows(tinker_pb2.ForwardBackwardOutput.FromString(raw.content), plain)
    raw, plain = get_both_forms(wire_client, wire_client.step(model, 5))
    assert raw.json() == plain and ("error" in plain or "metrics" in plain)
