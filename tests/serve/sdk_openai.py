"""Run OpenAI's SDK against the endpoint at an address. Started with the Python of
WHETSTONE_TEST_SDK.
"""

import asyncio
import json
import sys

import openai

url, model = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
ASK = [{"role": "user", "content": "Hello?"}]
IDS = {"return_token_ids": True}
seen: dict = {}

whole = client.chat.completions.create(
    model=model, messages=ASK, max_tokens=6, seed=4, n=2, logprobs=True, extra_body=IDS
)
seen["whole"] = [
    [choice.message.content, choice.token_ids, [item.logprob for item in choice.logprobs.content]]
    for choice in whole.choices
]
seen["usage"] = whole.usage.total_tokens

parts: dict[int, str] = {}
options = {"include_usage": True}
for chunk in client.chat.completions.create(
    model=model, messages=ASK, max_tokens=6, seed=4, n=2, stream=True, stream_options=options
):
    for choice in chunk.choices:
        parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
    seen["stream_usage"] = chunk.usage.total_tokens if chunk.usage else None
seen["stream"] = [parts[i] for i in sorted(parts)]
seen["stream_final"] = None
with client.chat.completions.stream(model=model, messages=ASK, max_tokens=6, seed=4) as stream:
    for _ in stream:
        pass
    # (for a cut answer, the final completion raises)
    seen["stream_final"] = stream.current_completion_snapshot.choices[0].message.content

done = client.completions.create(
    model=model, prompt=[[5, 6, 7]], max_tokens=0, echo=True, logprobs=1
)
seen["scored"] = done.choices[0].logprobs.token_logprobs
seen["models"] = [item.id for item in client.models.list()]

for name, wish in {"refused": {"frequency_penalty": 3.0}, "unknown": {"model": "gpt-9"}}.items():
    try:
        client.chat.completions.create(**{"model": model, "messages": ASK, "max_tokens": 2, **wish})
    except openai.APIStatusError as error:
        seen[name] = [type(error).__name__, error.param, error.status_code]


async def request_concurrently() -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/session/wave/v1", api_key="none") as many:
        asks = [
            many.chat.completions.create(model=model, messages=ASK, max_tokens=3) for _ in range(16)
        ]
        return [item.choices[0].message.content for item in await asyncio.gather(*asks)]


seen["wave"] = len(asyncio.run(request_concurrently()))

tools = [
    {"type": "function",
     "function": {"name": "add", "description": "Adds.",
                  "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
if len(sys.argv) > 3:  # a second endpoint with a model that calls a tool
    called = openai.OpenAI(base_url=f"{sys.argv[3]}/session/tools/v1", api_key="none")
    first = called.chat.completions.create(model="scripted", messages=ASK, tools=tools)
    (call,) = first.choices[0].message.tool_calls
    messages = [
        *ASK,
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    second = called.chat.completions.create(model="scripted", messages=messages, tools=tools)
    calls: dict[str, str] = {"name": "", "arguments": ""}
    for chunk in called.chat.completions.create(
        model="scripted", messages=ASK, tools=tools, stream=True
    ):
        for delta in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            calls["name"] += delta.function.name or ""
            calls["arguments"] += delta.function.arguments or ""
    seen["tools"] = [
        call.function.name, call.function.arguments, second.choices[0].message.content, calls,
    ]  # fmt: skip

try:
    from openenv.core.harness.capture.validate import check_turn, check_upstream_response
    from openenv.core.harness.capture.validate_llm import validate_llm
except ImportError as error:
    seen["openenv"] = f"not importable: {error}"
else:
    import urllib.request

    def post(path: str, body: dict) -> dict:
        request = urllib.request.Request(
            url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        return json.load(urllib.request.urlopen(request, timeout=60))

    reply = post("/v1/chat/completions",
                 {"model": model, "messages": ASK, "max_tokens": 8, "logprobs": True,
                  "return_token_ids": True})  # fmt: skip
    choice = reply["choices"][0]
    drawn = [item["logprob"] for item in choice["logprobs"]["content"]]
    turn = check_turn(
        reply["prompt_token_ids"], choice["token_ids"], drawn, finish_reason=choice["finish_reason"]
    )
    ids = post(
        "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "logprobs": 1}},
    )
    reference = ids["choices"][0]
    spelt = [item["token"] for item in reference["logprobs"]["content"]]
    second = check_turn(
        ids["prompt_token_ids"],
        reference["token_ids"],
        [item["logprob"] for item in reference["logprobs"]["content"]],
    )
    report = validate_llm(url, model)
    seen["openenv"] = {
        "response": [str(item) for item in check_upstream_response(reply).findings],
        "turns": [str(item) for item in (*turn.fatal, *second.fatal)],
        "spelt": spelt == [f"token_id:{token}" for token in reference["token_ids"]],
        "level": report.capture_level, "trainable": report.trainable, "fixes": report.param_fixes,
        "mode": report.logprobs_mode, "tools": report.tool_support,
    }  # fmt: skip
print(json.dumps(seen))
