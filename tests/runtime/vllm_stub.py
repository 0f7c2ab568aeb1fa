"""A stub server with the part of vLLM's API that rl.vllm calls. It runs a tiny model and can
simulate faults.
"""

import base64
import copy
import hashlib
import io
import json
import math
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import numpy as np
import torch
from nccl_workers import TRANSFER_PATHS
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rl.layers import describe_layers, record_experts

LOADING = threading.Lock()  # transformers loads one model at a time
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def compute_digest(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


class StubServer:
    """Holds the model and the fault of the server.

    `fault`: a name of FAULTS in test_vllm.py, or None. `max_faults`: number of samples with the
    fault. `token_seconds`: seconds per token. `lora_rank`: largest rank of adapters, 0 without
    --enable-lora; `adapters`: by name, the folder and the model with the adapter.
    """

    def __init__(self):
        self.model, self.version, self.fault, self.max_faults = None, "default", None, math.inf
        self.release, self.logprobs_mode, self.quantization = "0.32.1", "processed_logprobs", None
        self.token_seconds, self.scale_out = 0.0, True
        self.chunked_prefill, self.max_num_seqs = False, 256
        self.logprob_error = 0.0  # of each sampled token
        self.lora_rank, self.adapters, self.loads_at_run_time = 0, {}, True
        self.unloaded = []  # names of adapters
        self.sleep_level = 0  # 0: awake
        self.returns_experts = False
        self.checksum_reply = None  # a reply that differs from vLLM's
        self.failing_path = None  # of a call that is executed, then answered with an error
        self.workers = None  # of --weight-transfer-config (NcclWorkers)
        self.bodies, self.folders, self.calls = [], [], []
        self.running, self.lock = threading.Event(), threading.RLock()
        self.running.set()

    def get(self, path):
        if path == "/version":
            return {"version": self.release}
        if path == "/health":
            return {}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/v1/models":
            adapters = [{"id": name, "root": folder} for name, (folder, _) in self.adapters.items()]
            return {"data": [{"id": "base", "root": "base"}, *adapters]}
        if path == "/get_world_size":
            return {"world_size": self.workers.count}
        assert path == "/server_info"
        model = {
            "max_model_len": 256,
            "dtype": "torch.float32",
            "logprobs_mode": self.logprobs_mode,
            "quantization": self.quantization,
            "hf_overrides": {},
        }
        parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        scheduler = {"runner_type": "generate", "enable_chunked_prefill": self.chunked_prefill}
        scheduler["max_num_seqs"] = self.max_num_seqs
        lora = {"max_lora_rank": self.lora_rank, "target_modules": None} if self.lora_rank else None
        parts = {
            "parallel_config": parallel,
            "scheduler_config": scheduler,
            "lora_config": lora,
            "device_config": {"device": "cpu"},
            "weight_transfer_config": self.workers and {"backend": "nccl"},
            "aux_output_config": {"enable_return_routed_experts": self.returns_experts},
        }
        return {"vllm_config": {"model_config": model, **parts}}

    def post(self, path, body, query=""):
        self.calls.append(path)
        assert not self.sleep_level or path in ("/wake_up", "/start")
        if path == "/pause":
            self.running.clear()
            with self.lock:  # wait for the current token
                pass
        elif path == "/resume":
            self.running.set()
        elif path == "/start":  # called by vllm_stub_program.py
            self.load(body["model"])
            self.sleep_level = 0
            self.version, self.adapters = "default", {}
            self.running.set()
        elif path == "/collective_rpc":
            assert body["method"] == "reload_weights" and not self.running.is_set()
            self.folders.append(body["kwargs"]["weights_path"])
            if self.fault != "old weights":
                self.load(self.folders[-1])
        elif path in TRANSFER_PATHS:
            assert not self.running.is_set()
            succeeded, tensors = self.workers.post(path, body)
            if not succeeded:
                return None
            if tensors is not None:
                result = self.model.load_state_dict(tensors, strict=False)
                assert not result.unexpected_keys and result.missing_keys in (
                    [],
                    ["lm_head.weight"],
                )
        elif path == "/sleep":
            self.sleep_level = int(query.removeprefix("level="))
            assert self.sleep_level == (1 if self.lora_rank else 2)
            if self.sleep_level == 2:  # vLLM discards the weights
                for parameter in self.model.parameters():
                    parameter.detach().fill_(float("nan"))
        elif path == "/wake_up":
            self.sleep_level = 0
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
            return self.generate(body["token_ids"], body["sampling_params"], body.get("model"))
        elif path == "/v1/load_lora_adapter":
            self.load_adapter(body["lora_name"], body["lora_path"])
        elif path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            self.unloaded.append(body["lora_name"])
        else:
            raise AssertionError(path)
        return {}

    def load(self, folder):
        with LOADING:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def load_adapter(self, name, folder):
        """Hold an adapter; with the fault "old adapter", the weights of the adapter before under
        the new name.
        """
        assert name not in self.adapters
        with LOADING:
            model = PeftModel.from_pretrained(copy.deepcopy(self.model), folder).eval()
        assert all(c.r <= self.lora_rank for c in model.peft_config.values())
        if self.fault == "old adapter":
            model = list(self.adapters.values())[-1][1]
        self.adapters[name] = (folder, model)

    def checksums(self):
        """Return checksums in vLLM's form: fused matrices, and a vocabulary padded to a multiple of
        64. With --enable-lora, adapted layers hold theirs in `base_layer`.
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
            if self.lora_rank and ("_proj." in name or "embed" in name):
                name = name.replace(".weight", ".base_layer.weight")
            held[f"dp0:pp0:pcp0:tp0:{name}"] = compute_digest(tensor)
        return held

    def logits(self, tokens, adapter=None):
        model = self.model if adapter is None else adapter
        with self.lock, torch.no_grad():  # `record_experts` sees the forwards of all threads
            return model(torch.tensor([tokens])).logits[0].float()

    def encode_experts(self, tokens):
        """Return the experts of tokens in vLLM's form: base64 of .npy, [tokens, all layers, K]."""
        layout = describe_layers(self.model).experts
        with self.lock, torch.no_grad(), record_experts(self.model, layout) as chosen:
            self.model(torch.tensor([tokens]), use_cache=False)
        experts = np.zeros((len(tokens), self.model.config.num_hidden_layers, 2), np.uint8)
        experts[:, [int(block.split(".")[2]) for block in layout.blocks]] = chosen().numpy()
        file = io.BytesIO()
        np.save(file, experts)
        return base64.b64encode(file.getvalue()).decode()

    def generate(self, prompt, params, name=None):
        """Return the reply to a request of `n` samples, the last first. A sample of an adapter
        keeps it.
        """
        adapter = None if name is None else self.adapters[name][1]
        if self.model is None:  # the check at the start
            time.sleep(self.token_seconds)
            entry = {"token_id": 0, "logprob": 0.0}
            span = {"version": self.version, "start": 0, "end": 1}
            choice = {"index": 0, "finish_reason": "length", "token_ids": [0]}
            choice |= {"weight_versions": [span], "logprobs": {"content": [entry]}}
            return {"choices": [choice], "prompt_logprobs": None}
        numbers = range(params.get("n", 1))
        assert len(numbers) <= self.max_num_seqs  # vLLM refuses the request
        choices = [self.sample(prompt, params, adapter, number) for number in numbers[::-1]]
        reply = {"choices": choices, "prompt_logprobs": None, "model": name or "base"}
        if "prompt_logprobs" in params:
            assert not self.lora_rank  # vLLM fails
            assert len(numbers) == 1  # it would score the prompt for each sample
            whole = torch.log_softmax(self.logits(prompt, adapter), -1)
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

    def sample(self, prompt, params, adapter, number):
        """Sample token by token, with a seed that grows with the sample's number; each token is
        labelled with the version of its time.
        """
        generator = torch.Generator().manual_seed((params.get("seed", 0) + number) % 2**31)
        tokens, entries, spans, reason = [], [], [], "length"
        temperature = params.get("temperature", 1.0)
        while len(tokens) < params["max_tokens"] and reason == "length":
            time.sleep(self.token_seconds)
            self.running.wait()
            with self.lock:
                logits, version = self.logits([*prompt, *tokens], adapter)[-1], self.version
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
            # vLLM shows the sampled token and the first of those requested
            others = params.get("logprob_token_ids", [])
            shown = list(dict.fromkeys([token, *others]))[: max(params["logprobs"], 1)]
            assert params["logprobs"] == len(others)
            top = [{"token_id": other, "logprob": float(logprobs[other])} for other in shown]
            entries.append(
                {
                    "token_id": token,
                    "logprob": float(logprobs[token]) - self.logprob_error,
                    "top_logprobs": top,
                }
            )
            if token in params.get("stop_token_ids", ()):
                reason = "stop"
        choice = {"index": number, "finish_reason": reason, "token_ids": tokens}
        choice |= {"weight_versions": spans, "logprobs": {"content": entries}}
        if self.returns_experts:
            choice["routed_experts"] = self.encode_experts([*prompt, *tokens][:-1])
        return choice


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
            path, query = urlsplit(self.path).path, urlsplit(self.path).query
            samples = path == "/inference/v1/generate"
            if samples and not stub.scale_out:
                return self.send(403, {"error": {"message": "Scale-out endpoints are disabled"}})
            if path.endswith("lora_adapter"):
                if not (stub.lora_rank and stub.loads_at_run_time):
                    return self.send(404, {"detail": "Not Found"})
                if not body["lora_name"]:
                    return self.send(400, {"error": {"message": "must be provided"}})
            if samples and body.get("model", "base") not in ("base", *stub.adapters):
                return self.send(404, {"error": {"message": "The model does not exist"}})
            reply = (200, stub.post(path, body, query))
            if reply[1] is None:
                reply = (500, {"error": f"{path} failed"})
            if (
                samples
                and stub.fault not in (None, "old weights", "old adapter")
                and stub.max_faults > 0
            ):
                stub.max_faults -= 1
                reply = spoil(stub.fault, reply[1])
            if path == stub.failing_path:
                reply = (500, {"error": "failed"})
            if reply is not None:
                self.send(*reply)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket.listen(128)
    poll_seconds = 0.01  # how long `shutdown` waits
    thread = threading.Thread(target=server.serve_forever, args=(poll_seconds,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
