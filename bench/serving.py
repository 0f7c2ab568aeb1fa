"""Measure a server over loopback against calls in this process.

    python bench/serving.py load|load-20M|mix [--count N]

Rows go to bench/results/serving.csv.

load         measures tokens/s of N concurrent samples over the wire against an in-process
             `sample_many`, and the cost of a forward_backward call against an in-process call
load-20M     like load, for a model of 20M weights (load's has 0.1M)
mix          samples from N adapters on a base of 20M weights: in a single batch, and in sequence
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent.parent)
sys.path.append(f"{sys.path[0]}/tests/serve")
from bench.harness import REPO, RESULTS, make_parser, replace_rows, show  # noqa: E402

BASE, TOKENS = "tiny:ascii-small", 64


@contextmanager
def start_server(folder: Path, base: str) -> Iterator[tuple[str, int]]:
    """Run serve.py in a separate process; yield its address and its process id."""
    command = [sys.executable, str(REPO / "serve.py"), "--base-model", base, "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "--output-dir", str(folder)], text=True, **pipes)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split(" at ")[1].strip(), process.pid
    finally:
        process.terminate()
        process.wait(120)


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of all the process's threads, by the kernel's clock of 1/100 s."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_base(folder: Path) -> str:
    """Write a random Llama of 20M weights over characters to a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rl.models import load_tokenizer

    tokenizer = load_tokenizer(BASE)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=448, intermediate_size=1216, num_hidden_layers=8,
        num_attention_heads=7, num_key_value_heads=7, max_position_embeddings=1024,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


async def sample_over_the_wire(url: str, session: str, begin: int, count: int) -> None:
    import httpx

    # verify: loading certificates, which http needs none of, would be timed
    async with httpx.AsyncClient(base_url=f"{url}/api/v1", timeout=600, verify=False) as client:

        async def sample(i: int) -> None:
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [4, 5 + i]}]}
            params = {"max_tokens": TOKENS, "stop": []}
            fields = {"sampling_session_id": session, "seq_id": begin + i, "prompt": prompt}
            answer = await client.post("/asample", json={**fields, "sampling_params": params})
            future, answer = answer.json()["request_id"], None
            while answer is None or answer.status_code == 408:
                answer = await client.post("/retrieve_future", json={"request_id": future})
            assert len(answer.json()["sequences"][0]["tokens"]) == TOKENS

        await asyncio.gather(*(sample(i) for i in range(count)))


def timed(run: Callable[[], object], clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of `run`; `clock` reads the CPU seconds."""
    begin, used = time.perf_counter(), clock()
    run()
    return time.perf_counter() - begin, clock() - used


def measure_load(
    folder: Path, count: int, base: str = BASE, turns: int = 4, learns: bool = True
) -> dict[str, str]:
    """Measure wall-clock seconds, which depend on other load, and CPU seconds, which do not."""
    import httpx
    from serving import Wire  # of tests/serve

    from rl.client import ServiceClient
    from rl.sampler import SamplingRequest
    from rl.types import Datum, ModelInput, SamplingParams

    ids = np.random.default_rng(0).integers(2, 90, (16, 257)).tolist()
    data = [Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in ids]
    params, taken = SamplingParams(TOKENS, stop=[]), []
    with (
        start_server(folder, base) as (url, process),
        httpx.Client(base_url=url, timeout=120) as http,
        ServiceClient(output_dir=folder / "here") as service,
    ):
        server, client = Wire.over(http), service.create_lora_training_client(base, 4, 7)
        server.open()
        model = server.model(base=base)
        session, reference = server.sampler(model, 1), client.save_weights_and_get_sampling_client()
        for turn in range(turns):  # in adjacent pairs; the first turn warms up
            samples = sample_over_the_wire(url, session, turn * count, count)
            requests = [
                SamplingRequest(prompt=[4, 5 + i], problem=i, params=params, seed=turn)
                for i in range(count)
            ]

            def learn_on_server(number: int = turn + 2) -> None:
                server.wait(server.ask(model, number, data))

            def learn_here() -> None:
                client.forward_backward(data, "cross_entropy").result()

            def sample_here(requests: Any = requests) -> None:
                reference.sample_many(requests).result()

            wire = timed(lambda s=samples: asyncio.run(s), lambda: cpu_seconds(process))
            here = timed(sample_here, time.process_time)
            calls = [
                timed(learn, time.process_time)[0] if learns else 0.0
                for learn in (learn_on_server, learn_here)
            ]
            taken.append([*wire, *here, *calls])
    wire_s, wire_cpu, here_s, here_cpu, call, local = np.array(taken[1:]).T
    figures = {
        "wire tokens/s": f"{count * TOKENS / np.median(wire_s):.0f}",
        "in-process tokens/s": f"{count * TOKENS / np.median(here_s):.0f}",
        "share": f"{np.median(here_s / wire_s):.2f}",
        "share of CPU": f"{np.median(here_cpu / wire_cpu):.2f}",
        "load of the machine": f"{os.getloadavg()[0]:.1f}",
    }
    if learns:
        figures["call of 4096 tokens, more ms"] = f"{np.median(call - local) * 1e3:.1f}"
        figures["in-process ms"] = f"{np.median(local) * 1e3:.0f}"
    return figures


def measure_load_of_20m(folder: Path, count: int) -> dict[str, str]:
    return measure_load(folder, count, write_base(folder.parent / "base"), turns=3, learns=False)


def measure_mix(folder: Path, count: int) -> dict[str, str]:
    """Measure the CPU seconds of `count` adapters with 8 samples each, in a single batch and in
    sequence.
    """
    from rl.client import SampleStream, ServiceClient
    from rl.runtime import WorkerSettings
    from rl.sampler import SamplingRequest
    from rl.types import SamplingParams

    base, params = write_base(folder.parent / "base"), SamplingParams(TOKENS, stop=[])
    with ServiceClient(output_dir=folder, settings=WorkerSettings(share_bases=True)) as service:
        work = []
        for i in range(count):
            model = service.create_lora_training_client(base, 4 + 4 * (i % 3), i)
            requests = [
                SamplingRequest(prompt=[4, 5 + j], params=params, seed=i, problem=j)
                for j in range(8)
            ]
            work.append((model.save_weights_and_get_sampling_client(), requests))

        def mixed() -> None:
            with SampleStream(work[0][0], mixed=True) as stream:
                for client, requests in work:
                    for request in requests:
                        stream.add(request, client)
                while stream.busy:
                    stream.run_steps()

        def by_turns() -> None:
            for client, requests in work:
                client.sample_many(requests).result()

        taken = [[timed(run, time.process_time)[1] for run in (mixed, by_turns)] for _ in range(3)]
    names, medians = ("mixed", "by turns"), np.median(taken[1:], axis=0)
    return {f"CPU seconds, {n}": f"{x:.2f}" for n, x in zip(names, medians, strict=True)}


def main() -> None:
    cases = {"load": (measure_load, 64), "load-20M": (measure_load_of_20m, 64)}
    cases |= {"mix": (measure_mix, 8)}
    parser = make_parser(__doc__, output=RESULTS / "serving.csv")
    parser.add_argument("case", choices=cases)
    parser.add_argument("--count", type=int)
    args = parser.parse_args()
    case, count = cases[args.case]
    count = args.count or count
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        figures = json.dumps(case(Path(folder) / "out", count))
    seconds = f"{time.monotonic() - begin:.0f}"
    row = {"case": args.case, "count": str(count), "seconds": seconds, "seen": figures}
    show(row)
    replace_rows(args.output, [row], ("case",), lambda row: list(cases).index(row["case"]))


if __name__ == "__main__":
    main()
