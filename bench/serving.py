"""Measure a server over loopback against calls in this process.

    python bench/serving.py load|load-20M       # into bench/results/serving.csv

load         measures tokens/s of 64 concurrent samples over the wire against an in-process
             `sample_many`, and the cost of a forward_backward call against an in-process call
load-20M     measures the samples alone, for a model of 20M weights (load's has 0.1M)
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
import torch

sys.path[0] = str(Path(__file__).resolve().parent.parent)
sys.path.append(f"{sys.path[0]}/tests/serve")
from bench.harness import REPO, RESULTS, make_model, make_parser, replace_rows, show  # noqa: E402

BASE, TOKENS, COUNT = "tiny:ascii-small", 64, 64


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
    from rl.models import load_tokenizer

    tokenizer = load_tokenizer(BASE)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make_model("20M", dtype=torch.float32, vocab_size=len(tokenizer), **ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


async def sample_over_the_wire(url: str, session: str, begin: int) -> None:
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

        await asyncio.gather(*(sample(i) for i in range(COUNT)))


def timed(run: Callable[[], object], clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of `run`; `clock` reads the CPU seconds."""
    begin, used = time.perf_counter(), clock()
    run()
    return time.perf_counter() - begin, clock() - used


def measure_load(folder: Path, base: str, learns: bool) -> dict[str, str]:
    """Measure wall-clock seconds, which depend on other load, and CPU seconds, which do not."""
    import httpx
    from serving import Wire  # of tests/serve

    from rl.client import ServiceClient
    from rl.sampler import SamplingRequest
    from rl.types import Datum, ModelInput, SamplingParams

    ids = np.random.default_rng(0).integers(2, 90, (16, 257)).tolist()
    data = [Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in ids]
    params, rows = SamplingParams(TOKENS, stop=[]), []
    with (
        start_server(folder, base) as (url, process),
        httpx.Client(base_url=url, timeout=120) as http,
        ServiceClient(output_dir=folder / "here") as service,
    ):
        server, client = Wire.over(http), service.create_lora_training_client(base, 4, 7)
        server.open()
        model = server.model(base=base)
        session, reference = server.sampler(model, 1), client.save_weights_and_get_sampling_client()

        def sample_here(seed: int) -> None:
            requests = [
                SamplingRequest(prompt=[4, 5 + i], problem=i, params=params, seed=seed)
                for i in range(COUNT)
            ]
            reference.sample_many(requests).result()

        for turn in range(4 if learns else 3):  # in adjacent pairs; the first turn warms up
            samples = sample_over_the_wire(url, session, turn * COUNT)
            row = timed(lambda s=samples: asyncio.run(s), lambda: cpu_seconds(process))
            row += timed(lambda n=turn: sample_here(n), time.process_time)
            if learns:
                ask = lambda n=turn: server.wait(server.ask(model, n + 2, data))  # noqa: E731
                row += timed(ask, time.process_time)
                learn = lambda: client.forward_backward(data, "cross_entropy").result()  # noqa: E731
                row += timed(learn, time.process_time)
            rows.append(row)
    wire_s, wire_cpu, here_s, here_cpu, *calls = np.array(rows[1:]).T
    figures = {
        "wire tokens/s": f"{COUNT * TOKENS / np.median(wire_s):.0f}",
        "in-process tokens/s": f"{COUNT * TOKENS / np.median(here_s):.0f}",
        "share": f"{np.median(here_s / wire_s):.2f}",
        "share of CPU": f"{np.median(here_cpu / wire_cpu):.2f}",
        "load of the machine": f"{os.getloadavg()[0]:.1f}",
    }
    if learns:
        call, _, local, _ = calls
        figures["call of 4096 tokens, more ms"] = f"{np.median(call - local) * 1e3:.1f}"
        figures["in-process ms"] = f"{np.median(local) * 1e3:.0f}"
    return figures


def main() -> None:
    parser, cases = make_parser(__doc__, output=RESULTS / "serving.csv"), ["load", "load-20M"]
    parser.add_argument("case", choices=cases)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        begin, folder, learns = time.monotonic(), Path(name), args.case == "load"
        base = BASE if learns else write_base(folder / "base")
        figures = json.dumps(measure_load(folder / "out", base, learns))
    seconds = f"{time.monotonic() - begin:.0f}"
    row = {"case": args.case, "count": str(COUNT), "seconds": seconds, "seen": figures}
    show(row)
    replace_rows(args.output, [row], ("case",), lambda row: cases.index(row["case"]))


if __name__ == "__main__":
    main()
