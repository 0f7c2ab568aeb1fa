"""Fuzz every route with well-formed bodies that hold wild values."""

import base64
import copy
import json
import logging
import re
from collections import Counter

import numpy as np
import pytest
from seeing import chunk as picture
from serving import BASE, PROTOBUF, Wire, server
from test_serve import KEYS, make_rewarded_datums, make_text_datums

from rl.losses import LOSSES
from rl.serve import tinker_pb2

pytestmark = pytest.mark.slow
COUNT = 1200
SERVER_PATHS = ("/healthz", "/api/v1/healthz", "/metrics", "/openapi.json", "/docs")
TRACES = re.compile(r'Traceback|\.py\b|File "|0x[0-9a-f]{6}')
EXTREME = [0, -1, 1, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63) - 1, 10**400]
STRANGE = [
    "", " ", "\0", "\ud800", "é" * 300, "../../etc", "tinker://../../etc", "/etc/passwd",
    "a" * 5000, "{}", "null", "image", "1e999",
]  # fmt: skip
WILD = [
    *EXTREME, *STRANGE, None, True, False, 1e308, -1e308, 1e-320, float("nan"), float("inf"), 0.5,
    [], {}, [[]], [None], {"": None}, [1e308], [2**63], [-1], ["\ud800"], {"type": "image"},
    {"tokens": [5]}, [[5, 6]] * 3, {"chunks": []}, [4, 5] * 500,
]  # fmt: skip


def list_places(tree, at=()):
    """Return the paths of all values in a JSON tree."""
    result, pairs = [at] if at else [], ()
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        result += list_places(value, (*at, key))
    return result


def mutate_tree(rng, tree, foreign):
    """Return a copy with one to three values removed, doubled or replaced."""
    tree, strange = json.loads(json.dumps(tree)), [*WILD, *foreign]
    for _ in range(int(rng.integers(1, 4))):
        at = list_places(tree)
        if not at:
            break
        *before, last = at[int(rng.integers(len(at)))]
        inner = tree
        for key in before:
            inner = inner[key]
        kind, value = rng.random(), copy.deepcopy(strange[int(rng.integers(len(strange)))])
        if kind < 0.1:
            del inner[last]
        elif kind < 0.15 and isinstance(inner[last], list):
            inner[last] = inner[last] * 2
        elif kind < 0.2 and isinstance(inner, dict):
            inner["unknown"] = value
        else:
            inner[last] = value
    return tree


def wild_tensor(rng, tensor):
    dtype = rng.choice([tinker_pb2.DTYPE_FLOAT32, tinker_pb2.DTYPE_INT64, tinker_pb2.DTYPE_INT32,
                        tinker_pb2.DTYPE_BFLOAT16, 0, 77])  # fmt: skip
    values = rng.choice([0, -1, 3, 89, 90, 2**31, 2**62, -(2**63)], int(rng.integers(0, 6)))
    floats = rng.choice([0, 1, -1, np.nan, np.inf, -np.inf, 1e38, 1e-45], len(values)).astype("<f4")
    tensor.dtype = int(dtype)
    raw = values.astype("<i8").tobytes() if rng.random() < 0.5 else floats.tobytes()
    shapes = (
        [], [len(values)], [-1], [0], [2**62, 2**62], [-(2**63)], [2, 3], [1] * 40, [2**63 - 1],
        [len(values), 1], [2**16, 2**13],
    )  # fmt: skip
    tensor.shape.extend(shapes[int(rng.integers(len(shapes)))])
    if rng.random() < 0.3:
        tensor.sparse_csr.values = raw
        for name in ("crow_indices", "col_indices"):
            indices = rng.choice([0, 1, 2, -1, 2**62, -(2**63)], int(rng.integers(0, 5)))
            setattr(tensor.sparse_csr, name, indices.astype("<i8").tobytes())
    else:
        tensor.dense = raw[: len(raw) - int(rng.integers(0, 2))]


def wild_chunk(rng, chunk):
    kind = rng.integers(5)
    if kind == 0:
        return  # an input with no kind
    if kind == 1:
        chunk.image.data = rng.bytes(20)
        chunk.image.format = str(rng.choice(["png", "jpeg", "gif", ""]))
        chunk.image.expected_tokens = int(rng.choice([-1, 0, 1, 2**31 - 1]))
    elif kind == 2:
        chunk.dmel.dmel = rng.bytes(8)
    else:
        ids = rng.choice([3, 4, 89, 95, 96, 2**31 - 1, -1, -(2**31)], int(rng.integers(0, 7)))
        raw = ids.astype("<i4").tobytes()
        chunk.encoded_text.tokens = raw if rng.random() < 0.9 else raw + b"x"


def wild_training(rng, model, seq):
    """Return a ForwardBackwardRequest that parses, with some wild values."""
    losses = [*LOSSES, "stable_reinforce", "", "../x"]
    head = {"model_id": model, "seq_id": seq, "loss_fn": str(rng.choice(losses))}
    message = tinker_pb2.ForwardBackwardRequest(**head, forward_only=bool(rng.random() < 0.4))
    for _ in range(int(rng.integers(0, 4))):
        datum = message.data.add()
        if rng.random() < 0.5:
            datum.model_input.add().encoded_text.tokens = np.asarray([5, 6, 7], "<i4").tobytes()
        for _ in range(int(rng.integers(0, 3))):
            wild_chunk(rng, datum.model_input.add())
        for name in ("target_tokens", "weights", "logprobs", "advantages", "mask", "labels",
                     "ref_logprobs", "\0x"):  # fmt: skip
            if rng.random() < 0.5:
                wild_tensor(rng, datum.loss_fn_inputs[name])
            elif rng.random() < 0.8:
                tensor = datum.loss_fn_inputs[name]
                if name == "target_tokens":
                    tensor.dense, tensor.dtype = (
                        np.asarray([6, 7, 8], "<i8").tobytes(), tinker_pb2.DTYPE_INT64)  # fmt: skip
                else:
                    tensor.dense, tensor.dtype = (
                        np.asarray([-1, 1, 1], "<f4").tobytes(), tinker_pb2.DTYPE_FLOAT32)  # fmt: skip
        for spans in (datum.model_input_spans, datum.loss_fn_input_spans):
            if rng.random() < 0.1:
                span = spans.add()
                if rng.random() < 0.7:
                    first = span.prompt_tokens if rng.random() < 0.5 else span.sampled_tokens
                    first.sequence_id, first.offset = "x", int(rng.choice([0, -1, 2**62]))
                    first.length = int(rng.choice([3, -1, 2**62]))
    for name in ("beta", "clip_low_threshold", "temperature", "kl", "unknown", ""):
        if rng.random() < 0.15:
            message.loss_fn_config[name] = float(rng.choice([0, -1, np.nan, np.inf, 1e308]))
        if rng.random() < 0.15:
            value = message.loss_fn_config_v2[name]
            if rng.random() < 0.7:
                value.number = float(rng.choice([0, -1, np.nan, -np.inf, 1e308]))
            elif rng.random() < 0.7:
                value.text = str(rng.choice(["", "x", "nan"]))
    if rng.random() < 0.15:
        names = ["", "x", model + "1", "../../etc", f"{'0' * 32}:train:0"]
        message.model_id = str(rng.choice(names))
    if rng.random() < 0.1:
        message.seq_id = int(rng.choice([0, -1, -(2**31)]))
    return message.SerializeToString()


class FuzzClient:
    """A client with a key, which sends malformed requests."""

    def __init__(self, served, foreign):
        self.rng, self.foreign = np.random.default_rng(0), foreign
        self.wire = Wire(served, KEYS[0])
        self.seen, self.failed, self.wrong, self.sent, self.seq = Counter(), Counter(), [], set(), 0
        self.renew()

    def renew(self):
        """Open a session with a model and a saved checkpoint."""
        if self.seq:
            self.wire.post(f"sessions/{self.wire.session}/finish", 204, reason={"type": "success"})
        self.wire.open()
        self.model = self.wire.model()
        self.path = self.wire.save(self.model, 1, "kept")
        self.sampler = self.wire.sampler(self.model, 2)
        self.drawn, self.number, self.seq = 0, 10, 3

    def good(self):
        """Return a valid body for each JSON route, by method and path."""
        session = {"session_id": self.wire.session}
        model = {"model_id": self.model, "seq_id": self.seq}
        self.drawn, self.number = self.drawn + 1, self.number + 1
        number = {"sampling_session_seq_id": self.number}
        image = {
            "type": "image", "data": base64.b64encode(picture(1).data).decode(), "format": "png",
        }  # fmt: skip
        chunks = [{"type": "encoded_text", "tokens": [5, 6, 7]}]
        chunks += [image] if self.rng.random() < 0.1 else []
        params = {
            "max_tokens": 3, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0,
            "stop": ["x"],
        }  # fmt: skip
        sample = {
            "sampling_session_id": self.sampler, "seq_id": self.drawn, "num_samples": 1,
            "prompt": {"chunks": chunks}, "sampling_params": params, "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
        }  # fmt: skip
        if self.rng.random() < 0.3:
            targets = {"data": [5, 6], "dtype": "int64", "shape": [2, 1]}
            sample |= {"target_prompt_logprobs": targets, "prompt_logprobs_last_n": 1}
        drawing = {
            "max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 5, "seed": 3, "stop": ["y"],
            "n": 1, "min_p": 0.1, "min_tokens": 0, "ignore_eos": False, "logit_bias": {"5": 1},
        }  # fmt: skip
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "so"}]},
        ]
        chat = {
            "model": BASE, "messages": messages, "logprobs": True, "top_logprobs": 1,
            "return_token_ids": True, "tools": [], "tool_choice": "none", "stop_token_ids": [4],
            "stream": False, "chat_template_kwargs": {}, **drawing,
        }  # fmt: skip
        text = {"model": BASE, "prompt": [[5, 6], [7, 8]], "echo": True, "logprobs": 1, **drawing}
        ids = {
            "model": BASE, "token_ids": [5, 6],
            "sampling_params": {**drawing, "logprobs": 1, "stop_token_ids": [4]},
        }  # fmt: skip
        words = {"user_metadata": {"a": "b"}}
        adam = {
            "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
            "grad_clip_norm": 1.0,
        }  # fmt: skip
        made = {
            **session, "base_model": BASE, "lora_config": {"rank": 2, "seed": 1, "train_mlp": True},
            "model_seq_id": self.number, "optimizer_config": {"type": "adamw"}, **words,
        }  # fmt: skip
        request = {"request_id": f"{self.model}:1"}
        posts = {
            "client/config": {"sdk_version": "0.38.0"},
            "client/dynamic_config": {},
            "telemetry": {"events": [{"a": 1}]},
            "create_session": {"tags": ["a"], "display_name": "x", **words},
            "session_heartbeat": session,
            "sessions/{session_id}/finish": {"reason": {"type": "success"}},
            "create_model": made,
            "unload_model": {"model_id": self.model},
            "get_info": {"model_id": self.model},
            "optim_step": {**model, "adam_params": adam},
            "save_weights": {**model, "path": f"a{self.seq}", "ttl_seconds": 3600, **words},
            "save_weights_for_sampler": {
                **model, **number, "path": f"b{self.seq}", "kind": "snapshot"},
            "save_weights_external": {
                **model, "path": f"c{self.seq}", "age_encryption_recipients": []},
            "load_weights": {**model, "path": self.path, "optimizer": True},
            "retrieve_future": request,
            "cancel_future": request,
            "create_custom_loss": {"a": 1},
            "copy_weights": {"path": self.path},
            "retrieve_futures": {"request_ids": [f"{self.model}:1"]},
            "auth/token": {"a": 1},
            "create_sampling_session": {**session, **number, "model_path": self.path},
            "join_sampling_session": {"sampling_session_id": self.sampler},
            "asample": sample,
            "weights_info": {"tinker_path": self.path},
        }  # fmt: skip
        run = f"training_runs/{self.model}"
        first = f"{run}/checkpoints/weights/kept"
        gets = (
            "get_server_capabilities", "training_runs", run, f"{run}/checkpoints", "checkpoints",
            f"{first}/archive", f"{first}/external_weights_urls", "files/1/x/y/weights/z/w",
            f"samplers/{self.sampler}", "sessions", f"sessions/{self.wire.session}",
        )  # fmt: skip
        results = {("POST", f"/api/v1/{name}"): body for name, body in posts.items()}
        results |= {("GET", f"/api/v1/{name}"): {} for name in gets}
        results |= {
            ("PUT", f"/api/v1/{first}/ttl"): {"ttl_seconds": 3600},
            ("DELETE", f"/api/v1/{first}x"): {},
            ("POST", f"/api/v1/{first}/publish"): {},
            ("DELETE", f"/api/v1/{first}/publish"): {},
        }
        for prefix in ("", "/session/a"):
            results |= {
                ("POST", f"{prefix}/v1/chat/completions"): chat,
                ("POST", f"{prefix}/v1/completions"): text,
                ("POST", f"{prefix}/inference/v1/generate"): ids,
                ("GET", f"{prefix}/v1/models"): {},
                ("GET", f"{prefix}/v1/models/{BASE}"): {},
            }
        reward = {"reward": 1.0, "metrics": {"a": 1}}
        results |= {("POST", f"/session/a{at}/reward"): reward for at in ("", "/v1")}
        results |= {("GET", "/sessions"): {}, ("GET", "/session/a"): {}}
        results |= {("DELETE", "/session/b"): {}}
        return results | {("GET", path): {} for path in SERVER_PATHS}

    def ask(self, method, path, body):
        """Send a JSON request; sometimes its path is mutated as well."""
        self.sent.add((method, path))
        url = path.replace("{session_id}", "0" * 32 if self.rng.random() < 0.9 else "%00")
        if self.rng.random() < 0.1:
            parts = url.split("/")
            place = int(self.rng.integers(1, len(parts)))
            odd = ["%00", "%ff", "..", "%2e%2e", "-1", "x" * 3000, "9" * 400, "%2Fetc", "é"]
            parts[place] = odd[int(self.rng.integers(9))]
            url = "/".join(parts)
        if method == "GET" and self.rng.random() < 0.5:
            limit = self.rng.choice(["-1", "1e3", "9" * 30, "%00", "²"])
            url += f"?limit={limit}&offset={self.rng.choice(['0', '-1', 'x'])}"
        headers = {"content-type": "application/json"}
        if self.rng.random() < 0.2:
            headers["x-session-id"] = str(self.rng.choice(["a", "", " ", "x" * 300, "a/b"]))
        content = json.dumps(body).encode()
        self.check(path, self.wire.http.request(method, url, content=content, headers=headers))

    def train(self):
        model = self.foreign[0] if self.rng.random() < 0.05 else self.model
        path, headers = "/api/v1/forward_backward", {"content-type": PROTOBUF}
        self.sent.add(("POST", path))
        raw = wild_training(self.rng, model, self.seq)
        self.check("forward_backward", self.wire.http.post(path, content=raw, headers=headers))

    def check(self, route, answer):
        """Check that the response is a result or an error in the protocol's format."""
        text = answer.text if "json" in answer.headers.get("content-type", "") else ""
        status = answer.status_code
        is_openai = route.startswith(("/v1", "/inference", "/session"))
        self.seen[route, status] += 1
        try:
            results = json.loads(text) if text else {}
            if status >= 400 and status != 408:
                error = results["error"]
                assert status < 500 and error["message"], "no refusal"
                assert error["type"].endswith("_error"), "no refusal"
                is_of_form = {"param", "code"} <= error.keys() if is_openai else "detail" in results
                assert is_of_form, "the other form"
            assert not TRACES.search(text), "a trace"
        except (AssertionError, ValueError, KeyError) as error:
            self.wrong.append((route, status, text[:300], repr(error)[:80]))
            return
        if is_openai or "future" in route or status != 200 or not isinstance(results, dict):
            return
        request_id = results.get("request_id")
        if not isinstance(request_id, str):
            return
        if request_id == f"{self.model}:{self.seq}":
            self.seq += 1
        elif request_id.startswith(self.model + ":") and "unload" not in request_id:
            return  # its sequence number is not due yet
        body, headers = {"request_id": request_id}, {"accept": PROTOBUF}
        later = self.wire.http.post("/api/v1/retrieve_future", json=body, headers=headers)
        failed = "json" in later.headers["content-type"] and "error" in later.json()
        is_own = failed and later.json().get("category") != "user" or TRACES.search(later.text)
        if later.status_code != 200 or is_own:
            self.wrong.append((route, later.status_code, later.text[:300], "what came of it"))
        self.failed[route] += failed


class BackgroundClient:
    """A client with another key, which trains and samples during the fuzzing."""

    def __init__(self, served):
        self.wire, self.saw = Wire(served, KEYS[1]), []
        self.wire.open()
        self.model = self.wire.model(seed=3)
        path, sampler = self.wire.save(self.model, 1, "mine"), self.wire.sampler(self.model, 2)
        self.reference = [self.model, self.wire.session, path, sampler, f"{self.model}:1"]
        self.seq = 3

    def live(self):
        data = [make_text_datums(3, self.seq), make_rewarded_datums(3, self.seq)]
        for loss, rows in zip(("cross_entropy", "importance_sampling"), data, strict=True):
            logprobs, metrics = self.wire.output(self.wire.ask(self.model, self.seq, rows, loss))
            self.saw.append(([row.tobytes() for row in logprobs], metrics))
            self.seq += 1
        self.saw.append(self.wire.wait(self.wire.step(self.model, self.seq, learning_rate=0.05)))
        sampler = self.wire.sampler(self.model, self.seq + 1, self.seq)
        drawn = self.wire.sample(sampler, 0, [5, 6, 7], 2, seed=self.seq, prompt_logprobs=True)
        self.saw += [(item.tokens, item.logprobs) for item in drawn.sequences]
        self.saw.append(drawn.prompt_logprobs)
        self.seq += 2


def test_wild_values_are_refused_and_nobody_else_notices(tmp_path, caplog):
    limits = {"tokens": 20_000, "sessions": 10**6, "models": 10**6}
    caplog.set_level(logging.ERROR, "whetstone.serve")
    with server(tmp_path / "wild", keys=KEYS, **limits) as first:
        neighbor = BackgroundClient(first)
        fuzzer = FuzzClient(first, neighbor.reference)
        for i in range(COUNT):
            if i % 300 == 0:
                neighbor.live()
            if i % 60 == 59:
                fuzzer.renew()
            if fuzzer.rng.random() < 0.25:
                fuzzer.train()
                continue
            table = fuzzer.good()
            ends = ("asample", "completions", "generate", "optim_step")
            heavy = [key for key in table if key[1].endswith(ends)]
            keys = heavy if fuzzer.rng.random() < 0.45 else sorted(table)
            key = keys[int(fuzzer.rng.integers(len(keys)))]
            fuzzer.ask(*key, mutate_tree(fuzzer.rng, table[key], fuzzer.foreign))
        kinds = {(route, status, output): text for route, status, text, output in fuzzer.wrong}
        answers = "\n".join(map(str, kinds.items()))
        assert not kinds, f"{len(fuzzer.wrong)} answers that should not be: {answers}"
        assert first.engine._thread.is_alive()
        assert fuzzer.wire.http.get("/healthz").json() == {"status": "ok"}
        assert {path for path in tmp_path.iterdir()} == {tmp_path / "wild"}
        errors = [item.getMessage() for item in caplog.records if item.name == "whetstone.serve"]
        assert not errors, "a fault of the server's own"
        known = [
            (method, route)
            for route in first.app.app.routes
            for method in (route.methods or set()) - {"HEAD"}  # the chat page has no methods
        ]
    with server(tmp_path / "calm", keys=KEYS, **limits) as first:
        single = BackgroundClient(first)
        for _ in range(0, COUNT, 300):
            single.live()
    assert single.saw == neighbor.saw
    refused = sum(count for (_, status), count in fuzzer.seen.items() if status >= 400)
    assert refused > COUNT / 3
    assert sum(fuzzer.failed.values()) > COUNT / 10, fuzzer.failed
    calm = [
        (method, route.path)
        for method, route in known
        if not any(method == first and route.path_regex.match(path) for first, path in fuzzer.sent)
    ]
    assert not calm, f"routes that nothing wild was sent to: {calm}"
