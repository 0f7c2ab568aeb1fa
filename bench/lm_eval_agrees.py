"""Compare the loglikelihoods that lm-evaluation-harness gets from /v1/completions with
`compute_logprobs` in this process.

    python -m venv /tmp/lm_eval && /tmp/lm_eval/bin/pip install "lm_eval[api]"
    python bench/lm_eval_agrees.py --python /tmp/lm_eval/bin/python

The harness is the published package, the task a local file of multiple choice questions, the model
a random model of 0.1M weights. Writes a row to bench/results/lm_eval.csv. The exit code is 1 if a
loglikelihood differs by more than 1e-4 or an answer was wrongly reported as greedy or not greedy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import RESULTS, make_parser, write_table  # noqa: E402
from bench.serving import BASE, start_server  # noqa: E402

TASK = """task: whetstone_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} ="
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def write_task(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(count):
            a, b = map(int, rng.integers(1, 500, 2))
            choices = [str(a + b), str(a + b + 1), f"{a} and {b}", "none of these"]
            row = {"question": f"What is {a} + {b}?  {a}+{b}", "choices": choices, "answer": 0}
            print(json.dumps(row), file=file)
    (folder / "whetstone_sums.yaml").write_text(TASK.format(rows=folder / "rows.jsonl"))


def harness(python: str, folder: Path, base: str, url: str) -> list[dict]:
    """Return the answers that the harness received, a sample for each question."""
    model = f"model={base},base_url={url}/v1/completions,tokenizer={base},tokenizer_backend=huggingface,num_concurrent=4,max_retries=1"
    words = ["--model", "local-completions", "--model_args", model, "--tasks", "whetstone_sums"]
    words += ["--include_path", str(folder), "--log_samples", "--output_path", str(folder / "out")]
    settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": "none"}
    environment = {**os.environ, **settings}
    subprocess.run([python, "-m", "lm_eval", *words], env=environment, cwd=folder, check=True)
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


def expected(client, tokenizer, context: str, continuation: str) -> tuple[float, bool]:
    """Return the continuation's logprob after the context, and whether each of its tokens is the
    likeliest.
    """
    from rl.types import ModelInput, SamplingParams

    before = len(tokenizer.encode(context))
    tokens = ModelInput.from_ints(tokenizer.encode(context + continuation))
    logprobs = client.compute_logprobs(tokens).result()
    response = client.sample(tokens, 1, SamplingParams(1), topk_prompt_logprobs=1).result()
    likeliest = [row[0][0] for row in response.topk_prompt_logprobs[before:]]
    greedy = likeliest == tokens.to_ints()[before:]
    return sum(logprobs[before:]), greedy


def main() -> int:
    parser = make_parser(__doc__, output=RESULTS / "lm_eval.csv")
    parser.add_argument("--python", required=True, help="of an environment that has lm_eval")
    parser.add_argument("--questions", type=int, default=16)
    args = parser.parse_args()
    from rl.client import ServiceClient
    from rl.models import load_model

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        loaded = load_model(BASE)
        base = str(folder / "base")
        loaded.model.save_pretrained(base)
        loaded.tokenizer.save_pretrained(base)
        write_task(folder, args.questions)
        with start_server(folder / "served", base) as (url, _):
            samples = harness(args.python, folder, base, url)
        differences, logprobs, wrong = [], [], 0
        with ServiceClient(output_dir=folder / "here") as service:
            client = service.create_sampling_client(base_model=base)
            for sample in samples:
                for inputs, text in zip(sample["arguments"].values(), sample["resps"], strict=True):
                    texts, result = (inputs["arg_0"], inputs["arg_1"]), text[0]
                    logprob, greedy = expected(client, loaded.tokenizer, *texts)
                    logprobs.append(float(result[0]))
                    differences.append(abs(logprobs[-1] - logprob))
                    wrong += (str(result[1]) == "True") != greedy
    row = {"questions": len(samples), "loglikelihoods": len(logprobs)}
    row |= {"largest difference": f"{max(differences):.2g}", "greedy wrong": wrong}
    row |= {"lowest": f"{min(logprobs):.2f}", "highest": f"{max(logprobs):.2f}"}
    print(row)
    write_table(args.output, [row])
    return int(max(differences) > 1e-4 or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
