"""Test responses in protobuf and in JSON, as selected by `accept`."""

import numpy as np
import pytest
from serving import BASE, PROTOBUF, assert_same_rows, unpack_sequences
from test_serve import make_text_datums

from rl.client import ServiceClient
from rl.losses import LOSSES
from rl.serve import tinker_pb2
from rl.types import AdamParams, Datum, ModelInput, TensorData


@pytest.fixture(scope="module")
def local_service(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("here")) as service:
        yield service


def get_both_forms(wires, request):
    """Return the protobuf response and the JSON result of a request."""
    plain, body = wires.wait(request), {"request_id": request["request_id"]}
    raw = wires.http.post("/api/v1/retrieve_future", json=body, headers={"accept": PROTOBUF})
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


def check_rows(raw, plain):
    """Check a protobuf response against the JSON result; return its rows of logprobs."""
    assert raw.headers["content-type"].startswith(PROTOBUF), raw.text
    message = tinker_pb2.ForwardBackwardOutput.FromString(raw.content)
    rows = fields_of(message)
    assert len(rows) == len(plain["loss_fn_outputs"]) > 0
    assert message.loss_fn_output_type == plain["loss_fn_output_type"]
    for row, other in zip(rows, plain["loss_fn_outputs"], strict=True):
        assert row.keys() == other.keys() and row
        for name, (dtype, shape, array) in row.items():
            assert (dtype, shape) == (other[name]["dtype"], other[name]["shape"])
            values = np.asarray(other[name]["data"], array.dtype).reshape(array.shape)
            np.testing.assert_array_equal(values, array)
    assert dict(message.metrics) == plain["metrics"]
    assert all(name.count(":") == 1 for name in plain["metrics"]), plain["metrics"]
    return [row["logprobs"][2] for row in rows]


def make_datums_for(loss):
    rng, data = np.random.default_rng(3), []
    for i in range(4):
        n = 6
        fields = {"target_tokens": rng.integers(2, 90, n)}
        for field in LOSSES[loss].required[1:]:
            fixed = {"labels": np.full(n, float(2 * (i % 2) - 1)), "mask": np.ones(n)}
            fields[field] = fixed[field] if field in fixed else -4.0 + rng.standard_normal(n)
        if loss != "cross_entropy":
            fields.setdefault("mask", np.ones(n))  # some losses take their actions from it
        data.append(Datum(ModelInput.from_ints(rng.integers(2, 90, n).tolist()), fields))
    return data


def test_every_loss_gives_in_both_forms_what_it_gives_here(wires, local_service):
    model, client = wires.model(), local_service.create_lora_training_client(BASE, 4, 7)
    configs = {
        "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
        "dro": {"beta": 0.1},
        "dpo": {"beta": 0.2},
    }
    without_values = [name for name, spec in LOSSES.items() if not spec.values]
    for seq, name in enumerate(without_values, start=1):
        data, config = make_datums_for(name), configs.get(name, {})
        rows = check_rows(*get_both_forms(wires, wires.ask(model, seq, data, name, config)))
        _, metrics = wires.output({"request_id": f"{model}:{seq}"})
        mine = client.forward_backward(data, name, config).result()
        expected = {key if ":" in key else f"{key}:mean": v for key, v in mine.metrics.items()}
        assert metrics == expected, name
        assert_same_rows(rows, [item["logprobs"].array for item in mine.loss_fn_outputs])
    last = len(without_values)
    stepped = wires.wait(wires.step(model, last + 1))
    assert stepped["metrics"] == client.optim_step(AdamParams(1e-2)).result().metrics
    check_rows(*get_both_forms(wires, wires.ask(model, last + 2, data, name, forward_only=True)))
    with_values = [name for name in LOSSES if name not in without_values]
    for seq, name in enumerate((*with_values, "stable_reinforce"), start=last + 3):
        refused = wires.wait(wires.ask(model, seq, make_datums_for("cross_entropy"), name))
        assert refused["category"] == "user" and name in refused["error"]


def test_logprobs_of_several_targets_a_position_are_the_same_in_both_forms(wires, local_service):
    data = []
    for n in (3, 5):
        targets = TensorData(np.arange(2 * n).reshape(n, 2) + 3)
        fields = {"target_tokens": targets, "weights": np.ones((n, 2), "<f4")}
        data.append(Datum(ModelInput.from_ints(list(range(5, 5 + n))), fields))
    rows = check_rows(*get_both_forms(wires, wires.ask(wires.model(), 1, data)))
    assert [row.shape for row in rows] == [(3, 2), (5, 2)]
    client = local_service.create_lora_training_client(BASE, 4, 7)
    here = client.forward_backward(data, "cross_entropy").result().loss_fn_outputs
    assert_same_rows(rows, [item["logprobs"].array.reshape(-1, 2) for item in here])


def test_a_sample_is_the_same_in_both_forms(wires):
    sampler = wires.sampler(wires.model(), 1)
    targets = {"data": [9, -1, 3, 90], "dtype": "int64", "shape": [2, 2]}
    asks = [
        {}, {"prompt_logprobs": True}, {"topk_prompt_logprobs": 3, "prompt_logprobs": True},
        {"target_prompt_logprobs": targets},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 1},
    ]  # fmt: skip
    reasons = {tinker_pb2.STOP_REASON_STOP: "stop", tinker_pb2.STOP_REASON_LENGTH: "length"}
    seen = []
    for seq, request in enumerate(asks):
        options = {"seed": 4, "max_tokens": 3 + seq, **request}
        raw, plain = get_both_forms(wires, wires.ask_sample(sampler, seq, [5, 6, 7], 2, **options))
        message = tinker_pb2.SampleResponse.FromString(raw.content)
        sequences = unpack_sequences(message)
        assert len(sequences) == 2 and plain["type"] == "sample"
        for (tokens, logprobs, reason), other in zip(sequences, plain["sequences"], strict=True):
            assert tokens == other["tokens"] != []
            np.testing.assert_array_equal(logprobs, np.float32(other["logprobs"]))
            assert reasons[reason] == other["stop_reason"]
        assert message.prompt_cache_hit_tokens == plain["prompt_cache_hit_tokens"]
        for name in ("prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs"):
            assert message.HasField(name) == (plain.get(name) is not None) == (name in request)
        if "prompt_logprobs" in request:
            actual, values = np.frombuffer(message.prompt_logprobs, "<f4"), plain["prompt_logprobs"]
            assert values[0] is None
            others = np.float32([np.nan if value is None else value for value in values])
            np.testing.assert_array_equal(actual, others)
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


def test_what_has_no_protobuf_is_json_in_both_and_so_is_every_refusal(wires):
    model = wires.model()
    saved = wires.save(model, 1, "saved")
    wires.output(wires.ask(model, 2, make_text_datums()))
    asks = [
        ("optim_step", {"adam_params": {"learning_rate": 1e-2}}),
        ("save_weights", {"path": "a"}),
        ("save_weights_for_sampler", {"path": "b"}),
        ("save_weights_for_sampler", {"sampling_session_seq_id": 3}),
        ("save_weights_external", {"path": "c"}),
        ("load_weights", {"path": saved, "optimizer": True}),
        ("unload_model", None),
    ]
    for seq, (verb, fields) in enumerate(asks, start=3):
        number = {} if fields is None else {"seq_id": seq, **fields}
        raw, plain = get_both_forms(wires, wires.post(verb, model_id=model, **number))
        assert raw.headers["content-type"] == "application/json", verb
        assert raw.json() == plain and "error" not in plain, verb
        assert plain["type"] == verb
    wrong = Datum(ModelInput.from_ints([4]), {"target_tokens": [999]})
    raw, plain = get_both_forms(wires, wires.ask(model, 9, [wrong]))
    assert raw.json() == plain and plain["category"] == "user"


def test_numbers_that_are_none_travel_in_both_forms(wires):
    model, data = wires.model(), make_text_datums()
    wires.train(model, 1, data, learning_rate=1e30)
    for seq in (3, 4):
        ask = wires.ask(model, seq, data, forward_only=seq == 3)
        raw, plain = get_both_forms(wires, ask)
        if "error" in plain:
            assert raw.json() == plain and plain["category"] == "user"
        else:
            check_rows(raw, plain)
    raw, plain = get_both_forms(wires, wires.step(model, 5))
    assert raw.json() == plain and ("error" in plain or "metrics" in plain)
