"""Run tinker-cookbook's recipes against serve.py: unmodified files of the package, with other
settings and local data.

    python bench/cookbook.py --python /path/to/env-with-tinker-cookbook/bin/python
        [--only "rl_loop;sl_loop"] [--data DATA]

The script makes a working folder in which names of the hub are folders (tokenizers, data sets of
DATA). It starts a server of tiny models under the names that recipes know and runs each recipe for
a few steps. It adds a row per recipe to bench/results/cookbook.csv: the outcome, the seconds, and
the last values in metrics.jsonl. The script downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from string import Template

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.cookbook_services import FakeServiceServer, start_chroma  # noqa: E402
from bench.cookbook_world import CODER, NAMES, SEARCHER, STUDENT, TEACHER, lay_out  # noqa: E402
from bench.harness import REPO, RESULTS, replace_rows  # noqa: E402

PACKAGE = "tinker_cookbook.recipes"

# Settings that several recipes share, then the recipes: name | module | settings. A line that is
# indented continues the one before.
SHARED = """
TRAIN = model_name=$STUDENT lora_rank=8 max_steps=2 behavior_if_log_dir_exists=delete
MATH = $TRAIN group_size=4 groups_per_batch=4 max_tokens=8 loss_fn=importance_sampling
DISTILL = $TRAIN group_size=2 max_tokens=16
SMALL_RL = batch_size=4 group_size=4 max_steps=2
TOOLS = renderer_name=qwen3_disable_thinking lora_rank=8 group_size=4 max_steps=2
    behavior_if_log_dir_exists=delete
GAME = model_name=$STUDENT renderer_name=qwen3_disable_thinking max_steps=1 eval_every=0
    behavior_if_log_dir_exists=delete
"""
TABLE = """
rl_loop | rl_loop | model_name=$STUDENT $SMALL_RL max_tokens=16 loss_fn=importance_sampling
    save_every=1
rl_loop cispo | rl_loop | model_name=$STUDENT $SMALL_RL max_tokens=16 loss_fn=cispo
rl_loop gspo | rl_loop | model_name=$STUDENT $SMALL_RL max_tokens=16 loss_fn=gspo
rl_loop stable_reinforce | rl_loop | model_name=$STUDENT $SMALL_RL max_tokens=16
sl_loop | sl_loop | model_name=$STUDENT batch_size=8 max_length=256 max_steps=3 save_every=2
rl_basic | rl_basic | model_name=$STUDENT max_tokens=16 max_steps=2 loss_fn=importance_sampling
sl_basic | sl_basic | model_name=$STUDENT max_steps=1
math_rl arithmetic | math_rl.train | $MATH env=arithmetic
math_rl gsm8k | math_rl.train | $MATH env=gsm8k
math_rl ppo, substeps | math_rl.train | $TRAIN group_size=4 groups_per_batch=4 max_tokens=8
    env=gsm8k loss_fn=ppo num_substeps=2
math_rl asynchronous | math_rl.train | $MATH env=gsm8k max_steps_off_policy=1 max_steps=3
math_rl streaming | math_rl.train | $MATH env=gsm8k
    stream_minibatch_config=tinker_cookbook.rl.train:StreamMinibatchConfig
    stream_minibatch_config.groups_per_batch=4 stream_minibatch_config.num_minibatches=2
math_rl arithmetic, resumed | math_rl.train | $MATH env=arithmetic
    behavior_if_log_dir_exists=resume max_steps=4
math_rl temperature 0.7, evaluated | math_rl.train | $MATH env=gsm8k temperature=0.7 eval_every=1
rl_basic KL reference | rl_basic | model_name=$STUDENT max_tokens=16 max_steps=1
    loss_fn=importance_sampling kl_penalty_coef=0.05
    kl_reference_config=tinker_cookbook.rl.train:KLReferenceConfig
    kl_reference_config.base_model=$STUDENT compute_post_kl=True
chat_sl | chat_sl.train | $TRAIN dataset=no_robots batch_size=8 max_length=256 eval_every=1
    save_every=1
chat_sl rolling | chat_sl.train | $TRAIN dataset=no_robots batch_size=8 max_length=256
    rolling_save_every=1
preference dpo | preference.dpo.train | model_name=$STUDENT dataset=hhh batch_size=4
    max_length=256 max_steps=2 behavior_if_log_dir_exists=delete
preference rlhf | preference.rlhf.rlhf_pipeline | base_model=$STUDENT short_name=bench
    batch_size=4 lora_rank=8 max_length=256 rl_max_tokens=8 rl_group_size=2 eval_every=0
    max_steps=1
preference shorter | preference.shorter.train | model_name=$STUDENT
    renderer_name=qwen3_disable_thinking batch_size=2 group_size=4 max_tokens=8 max_steps=2
    behavior_if_log_dir_exists=delete
distillation on-policy | distillation.on_policy_distillation | $DISTILL teacher_model=$TEACHER
    groups_per_batch=4
distillation several teachers | distillation.on_policy_multi_teacher | $DISTILL
    deepmath_teacher_model=$TEACHER tulu3_teacher_model=$STUDENT deepmath_groups_per_batch=2
    tulu3_groups_per_batch=2
distillation off-policy | distillation.off_policy_reasoning | $TRAIN renderer_name=qwen3
    batch_size=8 max_length=256 buffer_size=16 max_prompts=32
guess number | multiplayer_rl.guess_number.train | $GAME batch_size=2 group_size=2 max_tokens=8
twenty questions | multiplayer_rl.twenty_questions.train | $GAME batch_size=2 group_size=2
    max_tokens=8
text arena | multiplayer_rl.text_arena.train | $GAME batch_size=4 max_tokens=8
    num_train_datapoints=8 num_test_datapoints=2
rubric | rubric.train | $TRAIN renderer_name=qwen3_disable_thinking grader_llm_name=$TEACHER
    train_group_size=2 grader_renderer_name=qwen3_instruct groups_per_batch=2 max_tokens=8
    loss_fn=importance_sampling train_jsonl_path=rubric.jsonl test_jsonl_path=rubric.jsonl
sdft | sdft.train | $TRAIN dataset=sciknoweval groups_per_batch=2 max_tokens=16
    max_context_length=1024 topk=5 eval_every=0
prompt distillation | prompt_distillation.train | $TRAIN file_path=conversations.jsonl
    batch_size=4 max_length=256 renderer_name=qwen3
code_rl | code_rl.train | model_name=$CODER $TOOLS groups_per_batch=4 max_tokens=8 eval_every=1
search_tool | search_tool.train | model_name=$SEARCHER $TOOLS batch_size=4 max_tokens=8
    max_turns=3 chroma_host=127.0.0.1 chroma_port=CHROMA
decisions demo | decisions.demo | model_name=$STUDENT
decisions forecasting | decisions.forecasting | $TRAIN renderer_name=qwen3_disable_thinking
    data_path=markets.csv batch_size=4 eval_every=1
evaluators | tinker_cookbook.eval.custom_evaluators
evaluators inspect | tinker_cookbook.eval.run_inspect_evals | model_name=$STUDENT
    renderer_name=qwen3_disable_thinking
    tasks=tinker_cookbook.eval.custom_inspect_task:example_lm_as_judge max_tokens=16
rollouts in a pool of processes | cookbook_pool | model_name=$STUDENT max_tokens=16 max_steps=1
    loss_fn=importance_sampling
"""
MODELS = {"STUDENT": STUDENT, "TEACHER": TEACHER, "CODER": CODER, "SEARCHER": SEARCHER}


def read_recipes() -> dict[str, tuple[str, list[str]]]:
    """Return (module, settings) of each recipe by name."""
    values = dict(MODELS)
    for line in SHARED.replace("\n    ", " ").strip().splitlines():
        name, _, words = line.partition(" = ")
        values[name] = Template(words).substitute(values)
    rows = (line.split(" | ") for line in TABLE.replace("\n    ", " ").strip().splitlines())
    return {
        name: (module.strip(), Template(settings[0] if settings else "").substitute(values).split())
        for name, module, *settings in rows
    }


RECIPES = read_recipes()
TYPED = {"decisions demo": "How do I install the package?\n"}  # stdin, as a user types it


def start_server(work: Path, log: Path) -> tuple[subprocess.Popen, str]:
    stands_on = {name: "model" for name in NAMES} | {CODER: "coder", SEARCHER: "searcher"}
    bases = [
        word
        for name, model in stands_on.items()
        for word in ("--base-model", f"{name}={work / model},{(work / name).resolve()}")
    ]
    command = [
        sys.executable,
        str(REPO / "serve.py"),
        *bases,
        "--port",
        "0",
        "--output-dir",
        tempfile.mkdtemp(prefix="served-", dir=work),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, cwd=work
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("serving"):
            return process, line.split(" at ")[1].strip()
    raise SystemExit(f"the server ended: {log.read_text()}")


class Client:
    """Run recipes in the environment that has tinker-cookbook, through a process
    (bench/cookbook_client.py) that forks for each recipe.
    """

    def __init__(self, python: str, url: str, work: Path, services: dict[str, str]):
        environment = {
            **os.environ,
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": "tml-local-key-of-a-bench",
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "TINKER_TELEMETRY": "0",
            "HF_HOME": str(work / "hf"),
            "TINKER_COOKBOOK_RUNS_DIR": str(work / "logs"),
            "HOME": str(work),
            **services,
        }
        command = [python, str(REPO / "bench" / "cookbook_client.py")]
        self.process = subprocess.Popen(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, **request: object) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())["code"]


METRICS = (
    "env/all/reward/total",
    "test/env/all/reward/total",
    "reward/total",
    "env/all/correct",
    "optim/kl_sample_train_v1",
    "kl_pre_post",
    "grad_norm",
    "train_mean_nll",
    "test/nll",
    "dpo_loss",
    "accuracy",
    "teacher_kl",
    "kl_policy_base",
    "train/loss",
    "train/accuracy",
    "test/brier_reward",
)


def folder_of(name: str, work: Path) -> Path:
    """Return the folder into which a recipe writes; a resumed recipe shares the folder of the
    original run.
    """
    return (
        work
        / "logs"
        / (
            "rlhf-bench"
            if "rlhf" in name
            else name.removesuffix(", resumed").replace(" ", "-").replace(",", "")
        )
    )


def seen_of(name: str, work: Path) -> tuple[int, str]:
    """Return the number of metrics rows that a recipe wrote, and the last values of METRICS."""
    files = sorted(folder_of(name, work).rglob("metrics.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    last = {
        key: value for row in rows for key, value in row.items() if isinstance(value, (int, float))
    }
    return len(rows), "; ".join(f"{key} {last[key]:.4g}" for key in METRICS if key in last)


def extract_results(text: list[str]) -> str:
    """Return the results that a recipe without metrics printed."""
    result = re.findall(
        r"\w*'?(?:accuracy|billing|sdk|console|cookbook)[\"']?: (?:nan|[\d.]+)", " ".join(text)
    )
    return "; ".join(dict.fromkeys(word.replace('"', "").replace("'", "") for word in result))


def run(name: str, client: Client, work: Path, seconds: float, chroma: int) -> dict[str, str]:
    module, settings = RECIPES[name]
    module = (
        module if module.startswith(("tinker_cookbook.", "cookbook_")) else f"{PACKAGE}.{module}"
    )
    logs = folder_of(name, work)
    logged = "rlhf" not in name and name != "decisions demo" and ".eval." not in module
    arguments = [word.replace("CHROMA", str(chroma)) for word in settings] + [
        f"log_path={logs}"
    ] * logged
    begin, out = time.monotonic(), work / f"{logs.name}.out"
    code = client.run(
        module=module, arguments=arguments, out=str(out), seconds=seconds, typed=TYPED.get(name, "")
    )
    took = time.monotonic() - begin
    text = [line.strip() for line in out.read_text().splitlines() if line.strip()]
    rows, seen = seen_of(name, work) if logged or "rlhf" in name else (0, extract_results(text))
    outcome = "ran" if code == 0 else "out of time" if code == 124 else "stopped"
    why = "" if code == 0 else (text[-1] if text else "").replace(f"{work}/", "")[:240]
    print(f"{name}: {outcome} in {took:.0f} s, {rows} rows of metrics. {seen} {why}", flush=True)
    return {
        "recipe": name,
        "module": module,
        "outcome": outcome,
        "seconds": f"{took:.0f}",
        "rows": str(rows),
        "seen": seen,
        "why": why,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python",
        required=True,
        help="of an environment with tinker 0.38.0 and tinker-cookbook 0.6.1",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("WHETSTONE_DATA", REPO.parent / "shared" / "data")),
    )
    parser.add_argument(
        "--only", help="some of them, separated by ;: by default all", default=";".join(RECIPES)
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="that one recipe may take")
    parser.add_argument("--work", type=Path, help="keep the working folder here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if not (work / "openai").exists():
            lay_out(work, args.data.resolve(), problems=12)
        server, url = start_server(work, work / "server.log")
        stand = FakeServiceServer()
        chroma, port = (
            start_chroma(args.python, work) if "search_tool" in args.only.split(";") else (None, 0)
        )
        client = Client(args.python, url, work, stand.environment(work))
        try:
            for name in args.only.split(";"):
                row = run(name, client, work, args.seconds, port)
                replace_rows(
                    RESULTS / "cookbook.csv",
                    [row],
                    ("recipe",),
                    lambda row: list(RECIPES).index(row["recipe"]),
                )
            print(f"asked of the stand-ins: {stand.counts}")
        finally:
            for process in (client.process, server, *([chroma] if chroma else [])):
                process.terminate()
                process.wait(60)
            stand.close()


if __name__ == "__main__":
    main()
