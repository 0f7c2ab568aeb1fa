"""A program that asks a model for a password and sends it back until the rules are met.

The program knows nothing of training. It speaks OpenAI's API, here with Python's standard library;
`openai.OpenAI()` works unchanged, because OPENAI_BASE_URL and OPENAI_API_KEY are set.
"""

import json
import os
import urllib.request

RULES = {
    "a digit": lambda text: any(character.isdigit() for character in text),
    "a capital": lambda text: any(character.isupper() for character in text),
    "a small letter": lambda text: any(character.islower() for character in text),
    "no sign": lambda text: text.isalnum(),
}
ROUNDS = 2


def post(url: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer any"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.loads(reply.read())


def chat(messages: list[dict]) -> dict:
    body = {"model": "policy", "messages": messages}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, body)["choices"][0]["message"]


messages = [{"role": "user", "content": "a password:"}]
for _ in range(ROUNDS):
    answer = chat(messages)
    broken = [name for name, holds in RULES.items() if not holds(answer["content"] or "")]
    if not broken:
        break
    messages += [answer, {"role": "user", "content": "it needs " + ", ".join(broken) + ":"}]

score = {"reward": 1 - len(broken) / len(RULES), "metrics": {"correct": float(not broken)}}
post(os.environ["WHETSTONE_REWARD_URL"], score)
