"""Run OpenAI's client and the checks of OpenEnv against a server. Started with the Python of
WHETSTONE_TEST_SDK.
"""

import asyncio
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
    check_upstream_response,
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
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))


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

body = {"model": base, "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 8}
reply = post("/v1/chat/completions", {**body, "logprobs": True, "return_token_ids": True})
seen["response"] = [str(item) for item in check_upstream_response(reply).findings]

# 2. A rollout of several turns through its capture server, and the data a trainer gets from it.
capture = CaptureServer(llm_url=url, model=trained, port=port(), api_key=key)
capture.start()
session = capture.registry.create(purpose="train", sampling={"temperature": 1.0})
agent = openai.OpenAI(
    base_url=f"http://127.0.0.1:{capture.port}/v1", api_key=session.session_id, max_retries=0
)
messages: list = [{"role": "user", "content": "Hello?"}]
for turn in range(3):
    reply = agent.chat.completions.create(model=trained, messages=messages, max_tokens=5)
    answer = reply.choices[0].message.content or ""
    messages += [{"role": "assistant", "content": answer}]
    messages += [{"role": "user", "content": f"And {turn}?"}]
document = export_session(session)
rows = document["sequences"]
to_training_trace(session.graph, document)
seen["rollout"] = {
    "validation": document["validation"],
    "trainable": document["trainable"],
    "turns": len(document["turns"]),
    "rows": [[row["trainable"], row["validation"], row["n_turns"]] for row in rows],
    "records": to_turn_records(session.graph, document),
}
capture.stop()

# 3. The same checks for turns by ids (/inference/v1/generate), each continuing the previous turn.
graph, prompt, fatal = RolloutGraph(), [5, 6, 7], []
params = {"max_tokens": 4, "logprobs": 1, "temperature": 0.7}
for turn in range(3):
    body = {"model": trained, "token_ids": prompt, "sampling_params": params}
    reply = post("/inference/v1/generate", body)
    (choice,) = reply["choices"]
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    drawn = [item["logprob"] for item in content]
    fatal += map(str, check_turn(reply["prompt_token_ids"], ids, drawn, index=turn).fatal)
    if [item["token"] for item in content] != [f"token_id:{token}" for token in ids]:
        fatal.append("ids that differ")
    if reply["prompt_token_ids"] != prompt:
        fatal.append("another prompt")
    validate_training_turn(prompt, ids, drawn, [0] * len(prompt) + [1] * len(drawn))
    node = TurnNode(f"n{turn}", prompt, ids, drawn, finish_reason=choice["finish_reason"])
    graph.add_turn(node)
    prompt = [*prompt, *ids, 9, 10]
(sequence,) = graph.sequences()
checks = (check_sequence(sequence), check_rollout(graph, expect_single_root=True))
seen["ids"] = {
    "fatal": fatal + [str(first) for check in checks for first in check.fatal],
    "stats": graph.stats(),
    "ids": sequence.input_ids,
    "mask": sequence.loss_mask,
    "logprobs": sequence.logprobs,
}

# 4. OpenAI's client: answers, streams, scores, refusals, concurrent requests and tools.
ASK = [{"role": "user", "content": "Hello?"}]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
chat = client.chat.completions
call = {"model": base, "messages": ASK, "max_tokens": 6, "seed": 4}
whole = chat.create(**call, n=2, logprobs=True, extra_body={"return_token_ids": True})
seen["whole"] = [
    [choice.message.content, choice.token_ids, [item.logprob for item in choice.logprobs.content]]
    for choice in whole.choices
]
seen["usage"] = whole.usage.total_tokens

parts: dict[int, str] = {}
for chunk in chat.create(**call, n=2, stream=True, stream_options={"include_usage": True}):
    for choice in chunk.choices:
        parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
    seen["stream_usage"] = chunk.usage.total_tokens if chunk.usage else None
seen["stream"] = [parts[i] for i in sorted(parts)]
with chat.stream(**call) as stream:
    for _ in stream:
        pass
    # (for a cut answer, the final completion raises)
    seen["stream_final"] = stream.current_completion_snapshot.choices[0].message.content

text = client.completions.create(
    model=base, prompt=[[5, 6, 7]], max_tokens=0, echo=True, logprobs=1
)
seen["scored"] = text.choices[0].logprobs.token_logprobs
seen["models"] = [item.id for item in client.models.list()]
for name, wish in {"wish": {"frequency_penalty": 3.0}, "unknown": {"model": "gpt-9"}}.items():
    try:
        chat.create(**{**call, **wish})
    except openai.APIStatusError as error:
        seen[name] = [type(error).__name__, error.param, error.status_code]


async def request_concurrently() -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/session/wave/v1", api_key=key) as many:
        asks = [many.chat.completions.create(**{**call, "max_tokens": 3}) for _ in range(16)]
        return [item.choices[0].message.content for item in await asyncio.gather(*asks)]


seen["wave"] = len(asyncio.run(request_concurrently()))

add = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
tools = {"model": "scripted", "tools": [{"type": "function", "function": add}]}
chat = openai.OpenAI(base_url=f"{scripted}/session/tools/v1", api_key="none").chat.completions
message = chat.create(messages=ASK, **tools).choices[0].message
(call,) = message.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
second = chat.create(messages=[*ASK, message, result], **tools).choices[0].message.content
calls = {"name": "", "arguments": ""}
for chunk in chat.create(messages=ASK, **tools, stream=True):
    for delta in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
        calls["name"] += delta.function.name or ""
        calls["arguments"] += delta.function.arguments or ""
seen["tools"] = [call.function.name, call.function.arguments, second, calls]
print(json.dumps(seen))
