"""Sample over a paged cache with steps of the device, from a decoder that all ranks of a launch
hold together, and write the samples of each rank to found.RANK.json.

    tests/tensor_parallel_case.py OUT BACKEND, started on each rank with torch's variables

BACKEND: gloo on CPUs, nccl on a GPU for each rank.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "sampler"))

import torch
import torch.distributed as dist
from sampler_models import (
    add_lora,
    make_request,
    multistep_engine,
    random_prompts,
    run_requests,
    tiny_model,
)
from test_sampler_stepped import LORA, SCENARIOS, make_processing, mix_adapters, play_scenario

from rl.distributed.collectives import RankGroup
from rl.sampler import IdleKVCachePool, free_tp_graphs, make_decoder
from rl.sampler.cuda_graphs import CUDAGraphRunner
from rl.sampler.device_steps import DeviceSteps
from rl.sampler.engine_selection import compare_engines

AHEAD = "launched ahead"  # by `run`, in calls over an idle pool
# positions of a page, prompt lengths, and the limits of "tight pool"; pages on a GPU are those of
# `make_engine`
SIZES = {
    "gloo": (4, (5, 9, 12, 7, 4, 10), {"kv_cache_tokens": 4 * 32, "max_rows": 7}),
    "nccl": (256, (240, 250, 245, 238, 252, 247), {"kv_cache_tokens": 256 * 14, "max_rows": 12}),
}


def make_model(scale=1.0):
    model = tiny_model("qwen3", num_key_value_heads=4, max_position_embeddings=1024)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def make_decoders(scenario, device="cpu", group=None):
    """Return the decoders of two versions of the weights."""
    settings = {"device": device, "tp_group": group}
    if scenario == "adapters of rows":
        return [mix_adapters(make_model, **settings), None]
    models = [make_model(), make_model(1.1)]
    if scenario == "LoRA":
        models[0] = add_lora(models[0], LORA)
    return [make_decoder(model, kind="fast", **settings) for model in models]


def make_requests(scenario, backend):
    return [
        make_request(prompt, 4, max_tokens=30, problem=i, **make_processing(scenario, i))
        for i, prompt in enumerate(random_prompts(SIZES[backend][1]))
    ]


def play(scenario, decoders, make_engine, steps, backend="gloo"):
    """Return tokens, logprobs and versions of the samples of a scenario. `steps`: see
    `play_scenario`.
    """
    page, _, limits = SIZES[backend]
    limits = limits if scenario.endswith("tight pool") else {}
    engine = make_engine(decoders[0], (3,), page=page, **limits)
    engine.expects_lengths = False
    return play_scenario(scenario, engine, make_requests(scenario, backend), decoders[1], steps)


def play_ahead(decoder, make_engine, backend="gloo", forget=False):
    """Return the tokens and logprobs of three calls, with weights loaded in place after the first.
    `forget`: this rank has lost its idle pool before the third.
    """
    results, idle, page = [], IdleKVCachePool(), SIZES[backend][0]
    for call in range(3):
        if call == 1:
            name = "model.layers.1.mlp.down_proj.weight"
            decoder.load_([(name, 1.5 * make_model().get_parameter(name).detach())])
        if call == 2 and forget:
            idle.release()
        engine = make_engine(decoder, (3,), page=page, kv_cache_tokens=page * 128, idle_pool=idle)
        engine.runs_ahead = make_engine is multistep_engine
        responses = run_requests(engine, make_requests(AHEAD, backend))
        results.append([(s.tokens, s.logprobs) for r in responses for s in r.sequences])
        engine.close()
    return results


def main(out: Path, backend: str) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    group, found = RankGroup(rank, size, dist.group.WORLD), {}
    counts = {"captured": 0, "launched ahead": 0}
    capture, launch_next = CUDAGraphRunner._capture, DeviceSteps.launch_next

    def count_captures(*args):
        counts["captured"] += 1
        return capture(*args)

    def count_launches(*args):
        chunk = launch_next(*args)
        counts["launched ahead"] += chunk is not None
        return chunk

    CUDAGraphRunner._capture, DeviceSteps.launch_next = count_captures, count_launches
    for scenario in SCENARIOS:
        decoders = make_decoders(scenario, device, group)
        found[scenario] = play(scenario, decoders, multistep_engine, 3, backend)
    decoders = make_decoders(AHEAD, device, group)
    found["trial"] = compare_engines(decoders[0])
    found[AHEAD] = play_ahead(decoders[0], multistep_engine, backend, forget=rank == 0)
    (out / f"found.{rank}.json").write_text(json.dumps(found | {"counts": counts}))
    free_tp_graphs()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
