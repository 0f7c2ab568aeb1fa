"""What the real SDK does against a server, as JSON."""

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


def texts(count, seed):
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
    loss = sum((one**2).sum() for one in logprobs)
    return loss, {"squares": float(loss)}


def outputs(result):
    return {
        "metrics": result.metrics,
        "logprobs": [one["logprobs"].tolist() for one in result.loss_fn_outputs],
    }


def sampled(client, prompt, count, seed):
    found = client.sample(
        types.ModelInput.from_ints(prompt), count, types.SamplingParams(max_tokens=6, seed=seed)
    ).result()
    return [[one.tokens, one.logprobs] for one in found.sequences]


async def wave(client):
    params = types.SamplingParams(max_tokens=4, seed=5)
    found = await asyncio.gather(
        *(client.sample(types.ModelInput.from_ints([4, 5 + i]), 1, params) for i in range(8))
    )
    return [one.sequences[0].tokens for one in found]


def steps(service):
    found = {}
    clients = [
        service.create_lora_training_client(BASE, rank=rank, seed=7).result() for rank in (4, 6)
    ]
    found["info"] = [client.get_info().lora_rank for client in clients]
    for step in range(2):
        for i, client in enumerate(clients):
            learnt = client.forward_backward(texts(5, step), "cross_entropy")
            stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
            found[f"learnt {step} {i}"], found[f"stepped {step} {i}"] = (
                outputs(learnt.result()),
                stepped.result().metrics,
            )
    client = clients[0]
    found["custom"] = client.forward_backward_custom(texts(3, 9), squared).result().metrics
    found["custom stepped"] = (
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics
    )
    state, sampler = (
        client.save_state("state").result().path,
        client.save_weights_and_get_sampling_client().result(),
    )
    found["sampled"], found["wave"] = (
        sampled(sampler, [5, 9, 30], 3, 11),
        asyncio.run(wave(sampler)),
    )
    found["scored"] = sampler.compute_logprobs(types.ModelInput.from_ints([5, 9, 30, 31])).result()
    weights = client.save_weights_for_sampler("weights").result().path
    found["sampled from a path"] = sampled(
        service.create_sampling_client(model_path=weights).result(), [5, 9, 30], 3, 11
    )
    again = service.create_training_client_from_state_with_optimizer(state).result()
    for name, one in (("went on", client), ("resumed", again)):
        learnt, stepped = (
            one.forward_backward(texts(4, 3), "cross_entropy"),
            one.optim_step(types.AdamParams(learning_rate=1e-2)),
        )
        found[name] = [outputs(learnt.result()), stepped.result().metrics]
    found["tokens"] = client.get_tokenizer().encode("hello")
    return found, client, sampler, state


def refusals(service, client, sampler):
    """The kind of error and what it says."""
    found = {}
    wrong = types.Datum(
        model_input=types.ModelInput.from_ints([4, 5]), loss_fn_inputs={"target_tokens": [5, 500]}
    )
    params = types.SamplingParams(max_tokens=2)
    asked = {
        "datum": lambda: client.forward_backward([wrong], "cross_entropy").result(),
        "after it": lambda: client.optim_step(types.AdamParams()).result(),
        "loss": lambda: client.forward(texts(2, 0), "stable_reinforce").result(),
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
    for name, ask in asked.items():
        begin = time.monotonic()
        try:
            found[name] = ["nothing", str(ask())[:80]]
        except Exception as error:
            found[name] = [
                type(error).__name__,
                str(error),
                str(getattr(error, "category", "")),
                round(time.monotonic() - begin, 1),
            ]
    found["goes on"] = outputs(client.forward(texts(2, 0), "cross_entropy").result())["metrics"]
    return found


def main():
    schema = descriptor_pb2.FileDescriptorProto()
    tinker_public_pb2.DESCRIPTOR.CopyToProto(schema)
    service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-a-key-of-a-test")
    found, client, sampler, state = steps(service)
    found["refused"] = refusals(service, client, sampler)
    rest = tinker.RestClient(base_url=sys.argv[1], api_key="tml-a-key-of-a-test")
    found["models"] = [
        one.model_name for one in rest.get_server_capabilities().result().supported_models
    ]
    found["checkpoints"] = [
        one.tinker_path for one in rest.list_checkpoints(client.model_id).result().checkpoints
    ]
    rest.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
    found["expires"] = (
        rest.list_checkpoints(client.model_id).result().checkpoints[0].expires_at is not None
    )
    rest.delete_checkpoint_from_tinker_path(state).result()
    found["left"] = [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints]
    found["run"] = rest.get_training_run(client.model_id).result().base_model
    found["schema"] = schema.SerializeToString().hex()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
