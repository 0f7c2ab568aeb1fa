"""Train a two-turn agent, written as a plain program, through the endpoint.

    python bench/endpoint.py

The agent (below) asks an untrained tiny model for digits, twice in a conversation, and posts the
share of digits in the answers as its reward. Each seed is a run of `train.py grpo --environment
endpoint`. The table holds held-out and sampled rewards, before and after.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import RESULTS, command_line, make_parser, show, train, write_table  # noqa: E402

AGENT = """
import http.client, json, os

host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")


def post(path, body):
    client = http.client.HTTPConnection(host, timeout=600)
    client.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return json.loads(client.getresponse().read())


messages, answers = [{"role": "user", "content": "digits:"}], ""
for turn in range(2):
    reply = post(f"/{path}/chat/completions", {"model": "policy", "messages": messages})
    message = reply["choices"][0]["message"]
    answers += message["content"]
    messages += [message, {"role": "user", "content": "more:"}]
post(f"/{path}/reward", {"reward": sum(c.isdigit() for c in answers) / max(1, len(answers))})
"""
SETTINGS = (
    "--base-model tiny:ascii-small --batch-size 4 --group-size 6 --max-tokens 6 --learning-rate "
    "3e-3 --eval-limit 16 --environment-rows 64"
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=RESULTS / "endpoint_learns.csv")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent.py"
        agent.write_text(AGENT)
        for seed in range(args.seeds):
            words = ["grpo", "--environment", f"endpoint:{sys.executable} -S {agent}"]
            words += [*SETTINGS.split(), "--steps", str(args.steps), "--seed", str(seed)]
            run = train([*words, "--eval-every", str(args.steps)], Path(folder) / f"run{seed}")
            held_out = run.values("test/env/all/reward/total")
            sampled = run.values("reward/total")
            rows.append(
                {
                    "seed": seed,
                    "steps": args.steps,
                    "held_out_before": held_out[0],
                    "held_out_after": held_out[-1],
                    "sampled_first": sampled[0],
                    "sampled_last": sampled[-1],
                    "seconds": round(run.seconds, 1),
                    "load": round(os.getloadavg()[0], 1),
                    "command": command_line(),
                }
            )
            show(rows[-1])
            write_table(args.output, rows)


if __name__ == "__main__":
    main()
