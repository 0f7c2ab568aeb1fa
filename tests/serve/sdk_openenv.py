"""Run the checks of OpenEnv against a server. Started with the Python of WHETSTONE_TEST_SDK."""

import dataclasses
import json
import socket
import sys
import urllib.request

import openai
from openenv.core.harness.capture.contract import to_training_trace, to_turn_records
from openenv.core.harness.capture.export import export_session
from openenv.core.harness.capture.graph import RolloutGraph, TurnNode
from openenv.core.harness.capture.runner import CaptureServer
from openenv.core.harness.capture.validate import (
    check_rollout,
    check_sequence,
    check_turn,
    validate_training_turn,
)
from openenv.core.harness.capture.validate_llm import require_llm, validate_llm

url, key, base, trained, scripted = sys.argv[1:]
seen: dict = {"reports": {}, "refused": {}}


def port() -> int:
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        return first.getsockname()[1]


def dump_result(result) -> dict:
    return {**dataclasses.asdict(result), "rollout_type": result.rollout_type}


def post(path: str, body: dict) -> dict:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    return json.load(
        urllib.request.urlopen(
            urllib.request.Request(url + path, json.dumps(body).encode(), headers), timeout=60
        )
    )


# 1. The kind of endpoint, in each of the ways that the checker supports, on the routes under /v1.
asks: dict[str, tuple[str, str, dict]] = {
    "root": (url, base, {}),
    "v1": (f"{url}/v1", base, {}),
    "header": (url, base, {"auth_header": "x-api-key"}),
    "session": (f"{url}/session/checked/v1", base, {}),
    "vllm": (url, base, {"provider": "vllm"}),
    "trained": (url, trained, {}),
}
for name, (where, model, more) in asks.items():
    seen["reports"][name] = dump_result(validate_llm(where, model, api_key=key, **more))
seen["reports"]["tools"] = dump_result(validate_llm(scripted, "scripted"))
seen["required"] = dump_result(require_llm(url, trained, api_key=key, require_tokens=True))
seen["refused"]["key"] = dump_result(validate_llm(url, base, api_key="tml-none-that-is-known"))
seen["refused"]["model"] = dump_result(validate_llm(url, "gpt-9", api_key=key))

# 2. A rollout of several turns through its capture server, and the data a trainer gets from it.
capture = CaptureServer(llm_url=url, model=trained, port=port(), api_key=key)
capture.start()
session = capture.registry.create(purpose="train", sampling={"temperature": 1.0})
agent = openai.OpenAI(
    base_url=f"http://127.0.0.1:{capture.port}/v1", api_key=session.session_id, max_retries=0
)
messages: list = [{"role": "user", "content": "Hello?"}]
for turn in range(3):
    text = (
        agent.chat.completions.create(model=trained, messages=messages, max_tokens=5)
        .choices[0]
        .message
    )
    messages += [
        {"role": "assistant", "content": text.content or ""},
        {"role": "user", "content": f"And {turn}?"},
    ]
document = export_session(session)
seen["rollout"] = {
    "validation": document["validation"],
    "trainable": document["trainable"],
    "turns": len(document["turns"]),
    "rows": [
        [row["trainable"], row["validation"], row["n_turns"]] for row in document["sequences"]
    ],
    "records": to_turn_records(session.graph, document),
    "trace": type(to_training_trace(session.graph, document)).__name__,
}
capture.stop()

# 3. The same checks for turns by ids (/inference/v1/generate), each continuing the previous turn.
graph, prompt, fatal = RolloutGraph(), [5, 6, 7], []
for turn in range(3):
    requests = {
        "model": trained,
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 4, "logprobs": 1, "temperature": 0.7},
    }
    reply = post("/inference/v1/generate", requests)
    (choice,) = reply["choices"]
    drawn = [first["logprob"] for first in choice["logprobs"]["content"]]
    named = [
        int(first["token"].removeprefix("token_id:")) for first in choice["logprobs"]["content"]
    ]
    fatal += [
        str(first)
        for first in check_turn(
            reply["prompt_token_ids"], choice["token_ids"], drawn, index=turn
        ).fatal
    ]
    fatal += (
        []
        if named == choice["token_ids"] and reply["prompt_token_ids"] == prompt
        else ["ids that differ"]
    )
    validate_training_turn(prompt, choice["token_ids"], drawn, [0] * len(prompt) + [1] * len(drawn))
    graph.add_turn(
        TurnNode(
            f"n{turn}", prompt, choice["token_ids"], drawn, finish_reason=choice["finish_reason"]
        )
    )
    prompt = [*prompt, *choice["token_ids"], 9, 10]
(sequence,) = graph.sequences()
checks = (check_sequence(sequence), check_rollout(graph, expect_single_root=True))
seen["ids"] = {
    "fatal": fatal + [str(first) for check in checks for first in check.fatal],
    "stats": graph.stats(),
    "ids": sequence.input_ids,
    "mask": sequence.loss_mask,
    "logprobs": sequence.logprobs,
}
print(json.dumps(seen))
