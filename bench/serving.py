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
from pathlib import Path

import numpy as np

try:
    import httpx
except ImportError:  # --help needs no package of the server's clients
    httpx = None

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import REPO, RESULTS, make_parser, replace_rows  # noqa: E402

BASE = "tiny:ascii-small"
PROTOBUF = {"content-type": "application/x-protobuf"}


class Server:
    """Run serve.py in a separate process."""

    def __init__(self, folder: Path, base: str = BASE):
        self.base = base
        command = [sys.executable, str(REPO / "serve.py"), "--base-model", base, "--port", "0"]
        command += ["--output-dir", str(folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, **pipes)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split(" at ")[1].strip()
        self.http = httpx.Client(base_url=f"{self.url}/api/v1", timeout=120)

    def post(self, path: str, /, **fields) -> dict:
        return self.http.post(path, json=fields).json()

    def wait(self, request: dict) -> httpx.Response:
        while True:
            answer = self.http.post("/retrieve_future", json={"request_id": request["request_id"]})
            if answer.status_code != 408:
                return answer

    def model(self) -> str:
        session = self.post("create_session", tags=[])["session_id"]
        fields = {"session_id": session, "model_seq_id": 0, "base_model": self.base}
        fields["lora_config"] = {"rank": 4, "seed": 7}
        return self.wait(self.post("create_model", **fields)).json()["model_id"]

    def learn(self, model: str, seq: int, rows: list[list[int]]) -> dict:
        content = body(model, seq, rows)
        return self.http.post("/forward_backward", content=content, headers=PROTOBUF).json()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(120)


def body(model: str, seq: int, rows: list[list[int]]) -> bytes:
    from rl.serve import tinker_pb2

    message = tinker_pb2.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    for row in rows:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(row[:-1], "<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = np.asarray(row[1:], "<i8").tobytes(), tinker_pb2.DTYPE_INT64
        targets.shape.append(len(row) - 1)
    return message.SerializeToString()


def rows_of(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(2, 90, (count, length + 1)).tolist()


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of all the process's threads, by the kernel's clock of 1/100 s."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def made_base(folder: Path) -> str:
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


def load_of_20m(folder: Path, count: int) -> dict[str, str]:
    return load(folder, count, made_base(folder.parent / "base"), turns=3, learns=False)


def load(
    folder: Path, count: int, base: str = BASE, turns: int = 4, learns: bool = True
) -> dict[str, str]:
    """Measure wall-clock seconds, which depend on other load, and CPU seconds, which do not."""
    from rl.client import ServiceClient
    from rl.sampler import SamplingRequest
    from rl.types import Datum, ModelInput, SamplingParams

    tokens, rows = 64, rows_of(16, 256)
    server = Server(folder, base=base)
    model = server.model()
    fields = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    saved = server.wait(server.post("save_weights_for_sampler", **fields))
    session = saved.json()["sampling_session_id"]
    data = [Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in rows]

    async def wave(begin: int) -> tuple[float, float]:
        params = {"max_tokens": tokens, "stop": []}
        async with httpx.AsyncClient(base_url=f"{server.url}/api/v1", timeout=600) as client:
            start, used = time.perf_counter(), cpu_seconds(server.process.pid)

            async def first(i: int) -> None:
                prompt = {"chunks": [{"type": "encoded_text", "tokens": [4, 5 + i]}]}
                fields = {"sampling_session_id": session, "seq_id": begin + i, "prompt": prompt}
                request = {**fields, "sampling_params": params}
                future = (await client.post("/asample", json=request)).json()["request_id"]
                answer = None
                while answer is None or answer.status_code == 408:
                    answer = await client.post("/retrieve_future", json={"request_id": future})
                assert len(answer.json()["sequences"][0]["tokens"]) == tokens

            await asyncio.gather(*(first(i) for i in range(count)))
            return time.perf_counter() - start, cpu_seconds(server.process.pid) - used

    with ServiceClient(output_dir=folder / "here") as service:
        client = service.create_lora_training_client(base, 4, 7)
        reference = client.save_weights_and_get_sampling_client()
        params = SamplingParams(tokens, stop=[])
        present, here, calls, mine = [], [], [], []
        for turn in range(turns):  # run in adjacent pairs; the first pair warms up
            present.append(asyncio.run(wave(turn * count)))
            begin, used = time.perf_counter(), time.process_time()
            options = {"params": params, "seed": turn}
            requests = [
                SamplingRequest(prompt=[4, 5 + i], problem=i, **options) for i in range(count)
            ]
            reference.sample_many(requests).result()
            here.append((time.perf_counter() - begin, time.process_time() - used))
            if not learns:
                continue
            begin = time.perf_counter()
            server.wait(server.learn(model, turn + 2, rows))
            calls.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            client.forward_backward(data, "cross_entropy").result()
            mine.append(time.perf_counter() - begin)
    server.stop()
    wire, process = np.array(present[1:]), np.array(here[1:])  # [turns, (seconds, CPU seconds)]
    share, work = np.median(process / wire, axis=0)
    figures = {
        "wire tokens/s": f"{count * tokens / np.median(wire[:, 0]):.0f}",
        "in-process tokens/s": f"{count * tokens / np.median(process[:, 0]):.0f}",
        "share": f"{share:.2f}",
        "share of CPU": f"{work:.2f}",
        "load of the machine": f"{os.getloadavg()[0]:.1f}",
    }
    if learns:
        more = np.median(np.subtract(calls[1:], mine[1:]))
        figures["call of 4096 tokens, more ms"] = f"{more * 1e3:.1f}"
        figures["in-process ms"] = f"{np.median(mine[1:]) * 1e3:.0f}"
    return figures


def measure_mix(folder: Path, count: int) -> dict[str, str]:
    """Measure the CPU seconds of `count` adapters with 8 samples each.

    The adapters sample in a single batch, and in sequence.
    """
    from rl.client import SampleStream, ServiceClient
    from rl.runtime import WorkerSettings
    from rl.sampler import SamplingRequest
    from rl.types import SamplingParams

    base, results = made_base(folder.parent / "base"), {"mixed": [], "by turns": []}
    with ServiceClient(output_dir=folder, settings=WorkerSettings(share_bases=True)) as service:
        models = [
            service.create_lora_training_client(base, 4 + 4 * (i % 3), i) for i in range(count)
        ]
        clients = [model.save_weights_and_get_sampling_client() for model in models]
        params = SamplingParams(64, stop=[])
        queries = [
            [SamplingRequest(prompt=[4, 5 + j], params=params, seed=i, problem=j) for j in range(8)]
            for i in range(count)
        ]
        for _ in range(3):
            used = time.process_time()
            with SampleStream(clients[0], mixed=True) as stream:
                for client, requests in zip(clients, queries, strict=True):
                    for request in requests:
                        stream.add(request, client)
                while stream.busy:
                    stream.run_steps()
            results["mixed"].append(time.process_time() - used)
            used = time.process_time()
            for client, requests in zip(clients, queries, strict=True):
                client.sample_many(requests).result()
            results["by turns"].append(time.process_time() - used)
    return {
        f"CPU seconds, {name}": f"{np.median(taken[1:]):.2f}" for name, taken in results.items()
    }


def main() -> None:
    cases = {"load": (load, 64), "load-20M": (load_of_20m, 64), "mix": (measure_mix, 8)}
    parser = make_parser(__doc__)
    parser.add_argument("case", choices=cases)
    parser.add_argument("--count", type=int)
    parser.add_argument("--output", type=Path, default=RESULTS / "serving.csv")
    args = parser.parse_args()
    if httpx is None:
        parser.error('httpx is missing: pip install -e ".[dev]"')
    case, count = cases[args.case]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        result = case(Path(folder) / "out", args.count or count)
        took = f"{time.monotonic() - begin:.0f}"
        sizes = {"case": args.case, "count": str(args.count or count), "seconds": took}
        row = {**sizes, "seen": json.dumps(result)}
    print(row)
    replace_rows(args.output, [row], ("case",), lambda row: list(cases).index(row["case"]))


if __name__ == "__main__":
    main()
