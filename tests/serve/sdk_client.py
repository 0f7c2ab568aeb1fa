"""Run the real SDK against a server, and print the results as JSON."""

import asyncio
import json
import sys
import time

import tinker
import torch
from google.protobuf import descriptor_pb2
from tinker import types
from tinker.proto import tinker_public_pb2

BASE = "tiny:ascii-small"


def make_text_datums(count, seed):
    generator = torch.Generator().manual_seed(seed)
    data = []
    for i in range(count):
        row = torch.randint(2, 90, (5 + i,), generator=generator).tolist()
        fields = {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)}
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=fields)
        )
    return data


def squared(data, logprobs):
    loss = sum((item**2).sum() for item in logprobs)
    return loss, {"squares": float(loss)}


def outputs(result):
    return {
        "metrics": result.metrics,
        "logprobs": [item["logprobs"].tolist() for item in result.loss_fn_outputs],
    }


def sampled(client, prompt, count, seed):
    actual = client.sample(
        types.ModelInput.from_ints(prompt), count, types.SamplingParams(max_tokens=6, seed=seed)
    ).result()
    return [[item.tokens, item.logprobs] for item in actual.sequences]


async def sample_concurrently(client):
    params = types.SamplingParams(max_tokens=4, seed=5)
    result = await asyncio.gather(
        *(client.sample(types.ModelInput.from_ints([4, 5 + i]), 1, params) for i in range(8))
    )
    return [item.sequences[0].tokens for item in result]


def steps(service):
    results = {}
    clients = [
        service.create_lora_training_client(BASE, rank=rank, seed=7).result() for rank in (4, 6)
    ]
    results["info"] = [client.get_info().lora_rank for client in clients]
    for step in range(2):
        for i, client in enumerate(clients):
            learnt = client.forward_backward(make_text_datums(5, step), "cross_entropy")
            stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
            results[f"learnt {step} {i}"], results[f"stepped {step} {i}"] = (
                outputs(learnt.result()),
                stepped.result().metrics,
            )
    client = clients[0]
    results["custom"] = (
        client.forward_backward_custom(make_text_datums(3, 9), squared).result().metrics
    )
    results["custom stepped"] = (
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics
    )
    state, sampler = (
        client.save_state("state").result().path,
        client.save_weights_and_get_sampling_client().result(),
    )
    results["sampled"], results["wave"] = (
        sampled(sampler, [5, 9, 30], 3, 11),
        asyncio.run(sample_concurrently(sampler)),
    )
    results["scored"] = sampler.compute_logprobs(
        types.ModelInput.from_ints([5, 9, 30, 31])
    ).result()
    weights = client.save_weights_for_sampler("weights").result().path
    results["sampled from a path"] = sampled(
        service.create_sampling_client(model_path=weights).result(), [5, 9, 30], 3, 11
    )
    again = service.create_training_client_from_state_with_optimizer(state).result()
    for name, first in (("went on", client), ("resumed", again)):
        learnt, stepped = (
            first.forward_backward(make_text_datums(4, 3), "cross_entropy"),
            first.optim_step(types.AdamParams(learning_rate=1e-2)),
        )
        results[name] = [outputs(learnt.result()), stepped.result().metrics]
    results["tokens"] = client.get_tokenizer().encode("hello")
    return results, client, sampler, state


def collect_refusals(service, client, sampler):
    """Return the kind and message of each error."""
    results = {}
    wrong = types.Datum(
        model_input=types.ModelInput.from_ints([4, 5]), loss_fn_inputs={"target_tokens": [5, 500]}
    )
    params = types.SamplingParams(max_tokens=2)
    requests = {
        "datum": lambda: client.forward_backward([wrong], "cross_entropy").result(),
        "after it": lambda: client.optim_step(types.AdamParams()).result(),
        "loss": lambda: client.forward(make_text_datums(2, 0), "stable_reinforce").result(),
        "base": lambda: service.create_lora_training_client("no/such-model", rank=4).result(),
        "path": lambda: service.create_sampling_client(model_path="tinker://../../etc").result(),
        "image": lambda: sampler.sample(
            types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]), 1, params
        ).result(),
        "draws": lambda: sampler.sample(
            types.ModelInput.from_ints([4, 5]), 1, params, prompt_alt_tokens_k=2
        ).result(),
        "prompt": lambda: sampler.sample(types.ModelInput.from_ints([4, 999]), 1, params).result(),
    }
    for name, ask in requests.items():
        begin = time.monotonic()
        try:
            results[name] = ["nothing", str(ask())[:80]]
        except Exception as error:
            results[name] = [
                type(error).__name__,
                str(error),
                str(getattr(error, "category", "")),
                round(time.monotonic() - begin, 1),
            ]
    results["goes on"] = outputs(client.forward(make_text_datums(2, 0), "cross_entropy").result())[
        "metrics"
    ]
    return results


def main():
    schema = descriptor_pb2.FileDescriptorProto()
    tinker_public_pb2.DESCRIPTOR.CopyToProto(schema)
    service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-a-key-of-a-test")
    actual, client, sampler, state = steps(service)
    actual["refused"] = collect_refusals(service, client, sampler)
    rest = tinker.RestClient(base_url=sys.argv[1], api_key="tml-a-key-of-a-test")
    actual["models"] = [
        item.model_name for item in rest.get_server_capabilities().result().supported_models
    ]
    actual["checkpoints"] = [
        item.tinker_path for item in rest.list_checkpoints(client.model_id).result().checkpoints
    ]
    rest.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
    actual["expires"] = (
        rest.list_checkpoints(client.model_id).result().checkpoints[0].expires_at is not None
    )
    rest.delete_checkpoint_from_tinker_path(state).result()
    actual["left"] = [
        item.tinker_path for item in rest.list_user_checkpoints().result().checkpoints
    ]
    actual["run"] = rest.get_training_run(client.model_id).result().base_model
    actual["schema"] = schema.SerializeToString().hex()
    print(json.dumps(actual))


if __name__ == "__main__":
    main()
