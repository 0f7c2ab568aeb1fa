"""Train a two-turn agent, written as a plain program, through the endpoint: `python
bench/endpoint.py`.

The agent (below) asks an untrained tiny model for digits, twice in a conversation, and posts the
share of digits in the answers as its reward. Each seed is a run of `train.py grpo --environment
endpoint`. The table holds held-out and sampled rewards, before and after.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "bench" / "results" / "endpoint_learns.csv"
AGENT = """
import http.client, json, os

host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")


def post(path, body):
    client = http.client.HTTPConnection(host, timeout=600)
    client.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return json.loads(client.getresponse().read())


messages, found = [{"role": "user", "content": "digits:"}], ""
for turn in range(2):
    said = post(f"/{path}/chat/completions", {"model": "policy", "messages": messages})["choices"][0]["message"]
    found += said["content"]
    messages += [said, {"role": "user", "content": "more:"}]
post(f"/{path}/reward", {"reward": sum(c.isdigit() for c in found) / max(1, len(found))})
"""
SETTINGS = (
    "--base-model tiny:ascii-small --batch-size 4 --group-size 6 --max-tokens 6 --learning-rate "
    "3e-3 --eval-limit 16 --environment-rows 64"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent.py"
        agent.write_text(AGENT)
        for seed in range(args.seeds):
            out, begun = Path(folder) / f"run{seed}", time.perf_counter()
            words = [
                sys.executable,
                "train.py",
                "grpo",
                "--environment",
                f"endpoint:{sys.executable} -S {agent}",
                *SETTINGS.split(),
            ]
            words += [
                "--steps",
                str(args.steps),
                "--eval-every",
                str(args.steps),
                "--seed",
                str(seed),
                "--output-dir",
                str(out),
            ]
            subprocess.run(words, cwd=REPO, check=True)
            found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            held_out = [
                row["test/env/all/reward/total"]
                for row in found
                if "test/env/all/reward/total" in row
            ]
            sampled = [row["reward/total"] for row in found if "reward/total" in row]
            rows.append(
                {
                    "seed": seed,
                    "steps": args.steps,
                    "held_out_before": held_out[0],
                    "held_out_after": held_out[-1],
                    "sampled_first": sampled[0],
                    "sampled_last": sampled[-1],
                    "seconds": round(time.perf_counter() - begun, 1),
                    "load": round(os.getloadavg()[0], 1),
                }
            )
            print(rows[-1], flush=True)
            with RESULTS.open("w", newline="") as file:
                file.write(
                    f"# python bench/endpoint.py --seeds {args.seeds} --steps {args.steps}; "
                    f"{SETTINGS}\n"
                )
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
