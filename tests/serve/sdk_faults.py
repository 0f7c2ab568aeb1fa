"""Run the real SDK against a server with intermittent faults, and against a server that trains
another model at the same time. Prints the results as JSON (see sdk_client.py).
"""

import asyncio
import json
import sys
import threading

import tinker
from sdk_client import BASE, make_text_datums, outputs, sampled
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-2)


def describe_refusal(ask):
    """Return the kind of error, its message, and its category (user or server)."""
    try:
        return ["nothing", str(ask())[:80], ""]
    except Exception as error:
        return [
            type(error).__name__,
            str(error),
            str(getattr(error, "category", "")).rsplit(".")[-1].lower(),
        ]


def train_through_faults(service):
    """Train and sample while the server injects faults at every step."""
    results = {}
    client = service.create_lora_training_client(BASE, rank=4, seed=7).result()
    for step in range(2):
        learnt, stepped = (
            client.forward_backward(make_text_datums(5, step), "cross_entropy"),
            client.optim_step(ADAM),
        )
        results[f"learnt {step}"], results[f"stepped {step}"] = (
            outputs(learnt.result()),
            stepped.result().metrics,
        )
    sampler = client.save_weights_and_get_sampling_client().result()
    results["sampled"] = [sampled(sampler, [5, 9, 30 + i], 2, 11 + i) for i in range(2)]
    wrong = types.Datum(
        model_input=types.ModelInput.from_ints([4, 5]), loss_fn_inputs={"target_tokens": [5, 500]}
    )
    # the first call fails in the server
    results["server's"] = describe_refusal(
        lambda: client.forward(make_text_datums(2, 0), "cross_entropy").result()
    )
    results["goes on"] = outputs(client.forward(make_text_datums(2, 0), "cross_entropy").result())
    results["user's"] = describe_refusal(
        lambda: client.forward(([wrong]), "cross_entropy").result()
    )
    return results


def train_two_clients(training, sampling):
    client = training.create_lora_training_client(BASE, rank=6, seed=3).result()
    other = sampling.create_lora_training_client(BASE, rank=4, seed=9).result()
    learnt, stepped = (
        other.forward_backward(make_text_datums(6, 5), "cross_entropy"),
        other.optim_step(ADAM),
    )
    learnt.result(), stepped.result()
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

    async def wave():
        params = types.SamplingParams(max_tokens=6, seed=5)
        request = (
            sampler.sample(types.ModelInput.from_ints([4, 5 + i]), 1, params) for i in range(8)
        )
        return [item.sequences[0].tokens for item in await asyncio.gather(*request)]

    results["wave"] = asyncio.run(wave())
    results["before"] += not ended.is_set()
    waiting.join()
    results["stepped"] = client.optim_step(ADAM).result().metrics
    return results


def main():
    url, *keys = sys.argv[1:]
    first, other = (tinker.ServiceClient(base_url=url, api_key=key) for key in keys)
    print(
        json.dumps(
            {"faults": train_through_faults(first), "beside": train_two_clients(first, other)}
        )
    )


if __name__ == "__main__":
    main()
