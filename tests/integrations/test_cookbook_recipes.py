"""Test that unmodified recipes of tinker-cookbook run against serve.py, with other settings and
local data.

    WHETSTONE_COOKBOOK=/path/to/env/bin/python python -m pytest -m campaign \\
        tests/integrations/test_cookbook_recipes.py

WHETSTONE_COOKBOOK is the Python of an environment with tinker 0.38.0 and tinker-cookbook 0.6.1. A
working folder holds folders under the hub's names (tokenizers, data sets). A server of tiny models
answers under the names that recipes know, and each recipe runs for a few steps. With
WHETSTONE_TABLES, a folder, each recipe replaces its row of cookbook.csv there: the outcome, the
seconds and the last values in metrics.jsonl. Nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest
from cookbook_services import FakeServiceServer, start_chroma
from cookbook_world import CODER, NAMES, SEARCHER, STUDENT, TEACHER, lay_out

from bench.harness import DATA, REPO, JsonProcess, read_jsonl, replace_rows

PYTHON = os.environ.get("WHETSTONE_COOKBOOK", "")
SECONDS = 120.0  # that a recipe may take
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
        name: (module.strip(), Template(" ".join(settings)).substitute(values).split())
        for name, module, *settings in rows
    }


RECIPES = read_recipes()
TYPED = {"decisions demo": "How do I install the package?\n"}  # stdin, as a user types it
REFUSED = {"rl_loop stable_reinforce": "stable_reinforce"}  # recipe -> a word of its last line
METRICS = (
    "env/all/reward/total test/env/all/reward/total reward/total env/all/correct "
    "optim/kl_sample_train_v1 kl_pre_post grad_norm train_mean_nll test/nll dpo_loss accuracy "
    "teacher_kl kl_policy_base train/loss train/accuracy test/brier_reward"
).split()


def start_server(work: Path) -> tuple[subprocess.Popen, str]:
    """Start serve.py with the tiny models under their names; return the process and its address."""
    models = {name: "model" for name in NAMES} | {CODER: "coder", SEARCHER: "searcher"}
    command = [sys.executable, str(REPO / "serve.py"), "--port", "0"]
    command += ["--output-dir", tempfile.mkdtemp(prefix="served-", dir=work)]
    for name, model in models.items():
        command += ["--base-model", f"{name}={work / model},{(work / name).resolve()}"]
    log = work / "server.log"
    pipes = {"stdout": subprocess.PIPE, "stderr": log.open("w")}
    process = subprocess.Popen(command, text=True, cwd=work, **pipes)
    for line in process.stdout:
        if line.startswith("serving"):
            return process, line.split(" at ")[1].strip()
    raise RuntimeError(f"the server ended: {log.read_text()}")


def start_client(url: str, work: Path, services: dict[str, str]) -> JsonProcess:
    """Start the process in the clients' environment that forks for each recipe."""
    env = {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-local-key-of-a-bench",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TINKER_TELEMETRY": "0",
        "HF_HOME": str(work / "hf"),
        "TINKER_COOKBOOK_RUNS_DIR": str(work / "logs"),
        "HOME": str(work),
    }
    command = [PYTHON, str(Path(__file__).with_name("cookbook_client.py"))]
    return JsonProcess(command, {**os.environ, **env, **services}, cwd=work)


def folder_of(name: str, work: Path) -> Path:
    """Return the folder into which a recipe writes; a resumed recipe shares the folder of the
    original run.
    """
    folder = name.removesuffix(", resumed").replace(" ", "-").replace(",", "")
    return work / "logs" / ("rlhf-bench" if "rlhf" in name else folder)


def read_metrics(name: str, work: Path) -> tuple[int, str]:
    """Return the number of metrics rows that a recipe wrote, and the last values of METRICS."""
    files = sorted(folder_of(name, work).rglob("metrics.jsonl"))
    rows = [row for file in files for row in read_jsonl(file)]
    last = {k: v for row in rows for k, v in row.items() if isinstance(v, int | float)}
    return len(rows), "; ".join(f"{key} {last[key]:.4g}" for key in METRICS if key in last)


def extract_results(text: list[str]) -> str:
    """Return the results that a recipe without metrics printed."""
    figure = r"\w*'?(?:accuracy|billing|sdk|console|cookbook)[\"']?: (?:nan|[\d.]+)"
    words = (re.sub("[\"']", "", word) for word in re.findall(figure, " ".join(text)))
    return "; ".join(dict.fromkeys(words))


def run(name: str, client: JsonProcess, work: Path, chroma: int) -> dict[str, str]:
    """Return the row of a recipe."""
    module, settings = RECIPES[name]
    if not module.startswith(("tinker_cookbook.", "cookbook_")):
        module = f"{PACKAGE}.{module}"
    logs = folder_of(name, work)
    logged = "rlhf" not in name and name != "decisions demo" and ".eval." not in module
    arguments = [word.replace("CHROMA", str(chroma)) for word in settings]
    arguments += [f"log_path={logs}"] * logged
    begin, out = time.monotonic(), work / f"{logs.name}.out"
    request = {"module": module, "arguments": arguments, "typed": TYPED.get(name, "")}
    code = client.ask(out=str(out), seconds=SECONDS, **request)["code"]
    took = time.monotonic() - begin
    text = [line.strip() for line in out.read_text().splitlines() if line.strip()]
    has_metrics = logged or "rlhf" in name
    rows, seen = read_metrics(name, work) if has_metrics else (0, extract_results(text))
    return {
        "recipe": name,
        "module": module,
        "outcome": {0: "ran", 124: "out of time"}.get(code, "stopped"),
        "seconds": f"{took:.0f}",
        "rows": str(rows),
        "seen": seen,
        "why": "" if code == 0 else (text or [""])[-1].replace(f"{work}/", "")[:240],
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[JsonProcess, Path, int]]:
    """Yield the clients' process, the working folder and Chroma's port."""
    work = tmp_path_factory.mktemp("cookbook")
    lay_out(work, DATA.resolve(), problems=12)
    server, url = start_server(work)
    services = FakeServiceServer()
    chroma, port = start_chroma(PYTHON, work)
    client = start_client(url, work, services.environment(work))
    yield client, work, port
    for process in (client.process, server, chroma):
        process.terminate()
        process.wait(60)
    services.close()


@pytest.mark.campaign
@pytest.mark.extras
@pytest.mark.skipif(not PYTHON, reason="WHETSTONE_COOKBOOK names no Python with tinker-cookbook")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(name: str, world: tuple[JsonProcess, Path, int]) -> None:
    row = run(name, *world)
    if folder := os.environ.get("WHETSTONE_TABLES"):
        order = list(RECIPES).index
        replace_rows(
            Path(folder) / "cookbook.csv", [row], ("recipe",), lambda r: order(r["recipe"])
        )
    assert row["outcome"] == ("stopped" if name in REFUSED else "ran"), row
    assert REFUSED.get(name, "") in row["why"]
