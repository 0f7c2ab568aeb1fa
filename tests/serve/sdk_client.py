"""Run the real SDK against a server with two keys, and print the results as JSON."""

import asyncio
import json
import os
import sys
import threading
import time

import tinker
import torch
from google.protobuf import descriptor_pb2
from tinker import types
from tinker.proto import tinker_public_pb2

BASE = "tiny:ascii-small"


def make_text_datums(count, seed):
    generator, data = torch.Generator().manual_seed(seed), []
    for i in range(count):
        row = torch.randint(2, 90, (5 + i,), generator=generator).tolist()
        fields = {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)}
        read = types.ModelInput.from_ints(row[:-1])
        data.append(types.Datum(model_input=read, loss_fn_inputs=fields))
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
    params = types.SamplingParams(max_tokens=6, seed=seed)
    actual = client.sample(types.ModelInput.from_ints(prompt), count, params).result()
    return [[item.tokens, item.logprobs] for item in actual.sequences]


def train(client, data):
    """Send a forward-backward and a step without waiting between them; return both results."""
    learnt = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
    return [outputs(learnt.result()), stepped.result().metrics]


async def sample_concurrently(client, max_tokens=4):
    params = types.SamplingParams(max_tokens=max_tokens, seed=5)
    prompts = [types.ModelInput.from_ints([4, 5 + i]) for i in range(8)]
    result = await asyncio.gather(*(client.sample(prompt, 1, params) for prompt in prompts))
    return [item.sequences[0].tokens for item in result]


def steps(service):
    results = {}
    clients = [
        service.create_lora_training_client(BASE, rank=rank, seed=7).result() for rank in (4, 6)
    ]
    results["info"] = [client.get_info().lora_rank for client in clients]
    results["trained"] = [
        [train(client, make_text_datums(5, step)) for client in clients] for step in range(2)
    ]
    client, adam = clients[0], types.AdamParams(learning_rate=1e-2)
    data = make_text_datums(2, 0)
    # the first forward fails in the server
    results["server's"] = describe_refusal(lambda: client.forward(data, "cross_entropy").result())
    results["goes on"] = outputs(client.forward(data, "cross_entropy").result())
    custom = client.forward_backward_custom(make_text_datums(3, 9), squared)
    results["custom"] = custom.result().metrics
    results["custom stepped"] = client.optim_step(adam).result().metrics
    state = client.save_state("state").result().path
    sampler = client.save_weights_and_get_sampling_client().result()
    results["sampled"] = sampled(sampler, [5, 9, 30], 3, 11)
    results["wave"] = asyncio.run(sample_concurrently(sampler))
    prompt = types.ModelInput.from_ints([5, 9, 30, 31])
    results["scored"] = sampler.compute_logprobs(prompt).result()
    weights = client.save_weights_for_sampler("weights").result().path
    saved = service.create_sampling_client(model_path=weights).result()
    results["sampled from a path"] = sampled(saved, [5, 9, 30], 3, 11)
    again = service.create_training_client_from_state_with_optimizer(state).result()
    for name, first in (("went on", client), ("resumed", again)):
        results[name] = train(first, make_text_datums(4, 3))
    results["tokens"] = client.get_tokenizer().encode("hello")
    return results, client, sampler, state


def train_two_clients(training, sampling):
    """Sample with one key while another trains."""
    client = training.create_lora_training_client(BASE, rank=6, seed=3).result()
    other = sampling.create_lora_training_client(BASE, rank=4, seed=9).result()
    train(other, make_text_datums(6, 5))
    sampler = other.save_weights_and_get_sampling_client().result()
    ended, results = threading.Event(), {"alone": [], "before": 0}
    data = [item for i in range(80) for item in make_text_datums(12, i)]
    long = client.forward_backward(data, "cross_entropy")

    def wait():
        results["learnt"] = outputs(long.result())
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    for i in range(6):
        results["alone"].append(sampled(sampler, [5, 9, 4 + i], 1, i))
        results["before"] += not ended.is_set()
    results["wave"] = asyncio.run(sample_concurrently(sampler, 6))
    results["before"] += not ended.is_set()
    waiting.join()
    step = client.optim_step(types.AdamParams(learning_rate=1e-2))
    results["stepped"] = step.result().metrics
    return results


def describe_refusal(ask):
    """Return the kind of error, its message, and its category (user or server)."""
    try:
        return ["nothing", str(ask())[:80], ""]
    except Exception as error:
        category = str(getattr(error, "category", "")).rsplit(".")[-1].lower()
        return [type(error).__name__, str(error), category]


def collect_refusals(service, client, sampler):
    """Return the kind and message of each error."""
    results, params = {}, types.SamplingParams(max_tokens=2)
    prompt = types.ModelInput.from_ints([4, 5])
    wrong = types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [5, 500]})
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
    unknown = types.ModelInput.from_ints([4, 999])
    requests = {
        "datum": lambda: client.forward_backward([wrong], "cross_entropy"),
        "after it": lambda: client.optim_step(types.AdamParams()),
        "loss": lambda: client.forward(make_text_datums(2, 0), "stable_reinforce"),
        "base": lambda: service.create_lora_training_client("no/such-model", rank=4),
        "path": lambda: service.create_sampling_client(model_path="tinker://../../etc"),
        "image": lambda: sampler.sample(image, 1, params),
        "draws": lambda: sampler.sample(prompt, 1, params, prompt_alt_tokens_k=2),
        "prompt": lambda: sampler.sample(unknown, 1, params),
    }
    for name, ask in requests.items():
        begin = time.monotonic()
        kind, message, category = describe_refusal(lambda ask=ask: ask().result())
        results[name] = [kind, message, category, round(time.monotonic() - begin, 1)]
    after = client.forward(make_text_datums(2, 0), "cross_entropy").result()
    results["goes on"] = outputs(after)["metrics"]
    return results


def main():
    schema = descriptor_pb2.FileDescriptorProto()
    tinker_public_pb2.DESCRIPTOR.CopyToProto(schema)
    url, *keys = sys.argv[1:]
    services = [tinker.ServiceClient(base_url=url, api_key=key) for key in keys]
    rest = tinker.RestClient(base_url=url, api_key=keys[0])
    actual, client, sampler, state = steps(services[0])
    actual["refused"] = collect_refusals(services[0], client, sampler)
    models = rest.get_server_capabilities().result().supported_models
    actual["models"] = [item.model_name for item in models]
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    actual["checkpoints"] = [item.tinker_path for item in listed]
    rest.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    actual["expires"] = listed[0].expires_at is not None
    rest.delete_checkpoint_from_tinker_path(state).result()
    listed = rest.list_user_checkpoints().result().checkpoints
    actual["left"] = [item.tinker_path for item in listed]
    actual["run"] = rest.get_training_run(client.model_id).result().base_model
    actual["schema"] = schema.SerializeToString().hex()
    actual["beside"] = train_two_clients(*services)
    print(json.dumps(actual), flush=True)
    os._exit(0)  # the SDK's daemon thread can abort a process that finalizes


if __name__ == "__main__":
    main()
