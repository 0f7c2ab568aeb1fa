"""A stub server with the part of vLLM's API that rl.vllm calls. It runs a tiny model and can
simulate faults.
"""

import hashlib
import json
import math
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

LOADING = threading.Lock()  # transformers loads one model at a time
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def compute_digest(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


class StubServer:
    """Holds the model and the fault of the server.

    `fault`: a name of FAULTS in test_vllm.py, or None. `max_faults`: number of samples with the
    fault. `token_seconds`: seconds per token.
    """

    def __init__(self):
        self.model, self.version, self.fault, self.max_faults = None, "default", None, math.inf
        self.release, self.logprobs_mode, self.quantization = "0.32.1", "processed_logprobs", None
        self.token_seconds, self.scale_out = 0.0, True
        self.logprob_error = 0.0  # of each sampled token
        self.checksum_reply = None  # a reply that differs from vLLM's
        self.failing_path = None  # of a call that is executed, then answered with an error
        self.bodies, self.folders, self.calls = [], [], []
        self.running, self.lock = threading.Event(), threading.Lock()
        self.running.set()

    def get(self, path):
        if path == "/version":
            return {"version": self.release}
        if path == "/health":
            return {}
        if path == "/weight_info":
            return {"weight_version": self.version}
        assert path == "/server_info"
        model = {
            "max_model_len": 256,
            "dtype": "torch.float32",
            "logprobs_mode": self.logprobs_mode,
            "quantization": self.quantization,
            "hf_overrides": {},
        }
        parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        scheduler = {"runner_type": "generate"}
        parts = {"parallel_config": parallel, "scheduler_config": scheduler}
        return {"vllm_config": {"model_config": model, **parts}}

    def post(self, path, body):
        self.calls.append(path)
        if path == "/pause":
            self.running.clear()
            with self.lock:  # wait for the current token
                pass
        elif path == "/resume":
            self.running.set()
        elif path == "/start":  # called by vllm_stub_program.py
            self.load(body["model"])
            self.version = "default"
            self.running.set()
        elif path == "/collective_rpc":
            assert body["method"] == "reload_weights" and not self.running.is_set()
            self.folders.append(body["kwargs"]["weights_path"])
            if self.fault != "old weights":
                self.load(self.folders[-1])
        elif path == "/reset_prefix_cache":
            return {"success": True}
        elif path == "/weight_checker":
            if self.checksum_reply is not None:
                return self.checksum_reply
            return {"checksums": self.checksums()}
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/inference/v1/generate":
            self.bodies.append(body)
            return self.generate(body["token_ids"], body["sampling_params"])
        else:
            raise AssertionError(path)
        return {}

    def load(self, folder):
        with LOADING:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def checksums(self):
        """Return checksums in vLLM's form: fused matrices, and a vocabulary padded to a multiple of
        64.
        """
        weights = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        held = {}
        for name, tensor in weights.items():
            fused = next((f for f, parts in FUSED.items() if f".{parts[0]}." in name), None)
            if any(f".{part}." in name for parts in FUSED.values() for part in parts[1:]):
                continue
            if fused is not None:
                first = FUSED[fused][0]
                names = [name.replace(first, part) for part in FUSED[fused]]
                name, tensor = name.replace(first, fused), torch.cat([weights[n] for n in names])
            if "embed" in name:
                rows = -len(tensor) % 64
                tensor = torch.cat([tensor, torch.zeros(rows, tensor.shape[1])])
            held[f"dp0:pp0:pcp0:tp0:{name}"] = compute_digest(tensor)
        return held

    def logits(self, tokens):
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].float()

    def generate(self, prompt, params):
        """Sample token by token; each token is labelled with the weights that sampled it."""
        if self.model is None:  # the check at the start
            time.sleep(self.token_seconds)
            entry = {"token_id": 0, "logprob": 0.0}
            span = {"version": self.version, "start": 0, "end": 1}
            choice = {"index": 0, "finish_reason": "length", "token_ids": [0]}
            choice |= {"weight_versions": [span], "logprobs": {"content": [entry]}}
            return {"choices": [choice], "prompt_logprobs": None}
        generator = torch.Generator().manual_seed(params.get("seed", 0) % 2**31)
        tokens, entries, spans, reason = [], [], [], "length"
        temperature = params.get("temperature", 1.0)
        while len(tokens) < params["max_tokens"] and reason == "length":
            time.sleep(self.token_seconds)
            self.running.wait()
            with self.lock:
                logits, version = self.logits([*prompt, *tokens])[-1], self.version
            logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
            token = (
                int(logprobs.argmax())
                if temperature == 0
                else int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            )
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": len(tokens), "end": len(tokens)})
            tokens.append(token)
            spans[-1]["end"] = len(tokens)
            entries.append(
                {"token_id": token, "logprob": float(logprobs[token]) - self.logprob_error}
            )
            if token in params.get("stop_token_ids", ()):
                reason = "stop"
        choice = {"index": 0, "finish_reason": reason, "token_ids": tokens}
        choice |= {"weight_versions": spans, "logprobs": {"content": entries}}
        reply = {"choices": [choice], "prompt_logprobs": None}
        if "prompt_logprobs" in params:
            whole = torch.log_softmax(self.logits(prompt), -1)
            reply["prompt_logprobs"] = [None] + [
                {
                    str(other): {"logprob": float(whole[i, other])}
                    for other in [token, *whole[i].topk(params["prompt_logprobs"]).indices.tolist()]
                }
                for i, token in enumerate(prompt[1:])
            ]
            if self.fault == "no prompt logprobs":
                reply["prompt_logprobs"].pop()
        return reply


@contextmanager
def vllm_server(stub, spoil):
    """Serve a stub and yield its address. `spoil(fault, reply)` applies a fault to a sample and
    returns (status, JSON), or None to close the connection without a reply.
    """

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def send(self, status, value):
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self):
            self.send(200, stub.get(urlsplit(self.path).path))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            path = urlsplit(self.path).path
            samples = path == "/inference/v1/generate"
            if samples and not stub.scale_out:
                return self.send(403, {"error": {"message": "Scale-out endpoints are disabled"}})
            reply = (200, stub.post(path, body))
            if samples and stub.fault not in (None, "old weights") and stub.max_faults > 0:
                stub.max_faults -= 1
                reply = spoil(stub.fault, reply[1])
            if path == stub.failing_path:
                reply = (500, {"error": "failed"})
            if reply is not None:
                self.send(*reply)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket.listen(128)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
