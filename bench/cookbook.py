"""Run tinker-cookbook's recipes against serve.py: unmodified files of the package, with other
settings and local data.

    python bench/cookbook.py --python /path/to/env-with-tinker-cookbook/bin/python --data DATA

The script makes a working folder in which names of the hub are folders: tokenizers, data sets and a
tiny model that answers \\boxed{1} to \\boxed{4}. It starts a server of that model and runs each
recipe for a few steps. A row of bench/results/cookbook.csv has the outcome, the seconds, and the
last values in metrics.jsonl. The script downloads nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import DATA, REPO, RESULTS, make_parser, replace_rows  # noqa: E402

STUDENT, TEACHER = "Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507"
# The last name answers in twenty questions, regardless of the settings.
NAMES = (STUDENT, TEACHER, "Qwen/Qwen3.5-9B")
# Settings that several recipes share, then the recipes: name | module | settings. A line that is
# indented continues the one before.
SHARED = """
TRAIN = model_name=$STUDENT lora_rank=8 max_steps=2 behavior_if_log_dir_exists=delete
MATH = $TRAIN group_size=4 groups_per_batch=4 max_tokens=8 loss_fn=importance_sampling
LOOP = model_name=$STUDENT batch_size=4 group_size=4 max_steps=2 max_tokens=16
CHAT = $TRAIN dataset=no_robots batch_size=8 max_length=256
DISTILL = $TRAIN group_size=2 max_tokens=16
GAME = model_name=$STUDENT renderer_name=qwen3_disable_thinking max_steps=1 eval_every=0
    max_tokens=8 behavior_if_log_dir_exists=delete
"""
TABLE = """
rl_loop | rl_loop | $LOOP loss_fn=importance_sampling save_every=1
rl_loop cispo | rl_loop | $LOOP loss_fn=cispo
rl_loop gspo | rl_loop | $LOOP loss_fn=gspo
rl_loop stable_reinforce | rl_loop | $LOOP
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
chat_sl | chat_sl.train | $CHAT eval_every=1 save_every=1
chat_sl rolling | chat_sl.train | $CHAT rolling_save_every=1
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
guess number | multiplayer_rl.guess_number.train | $GAME batch_size=2 group_size=2
twenty questions | multiplayer_rl.twenty_questions.train | $GAME batch_size=2 group_size=2
text arena | multiplayer_rl.text_arena.train | $GAME batch_size=4 num_train_datapoints=8
    num_test_datapoints=2
rubric | rubric.train | $TRAIN renderer_name=qwen3_disable_thinking grader_llm_name=$TEACHER
    train_group_size=2 grader_renderer_name=qwen3_instruct groups_per_batch=2 max_tokens=8
    loss_fn=importance_sampling train_jsonl_path=rubric.jsonl test_jsonl_path=rubric.jsonl
sdft | sdft.train | $TRAIN dataset=sciknoweval groups_per_batch=2 max_tokens=16
    max_context_length=1024 topk=5 eval_every=0
prompt distillation | prompt_distillation.train | $TRAIN file_path=conversations.jsonl
    batch_size=4 max_length=256 renderer_name=qwen3
"""
METRICS = (
    "env/all/reward/total test/env/all/reward/total reward/total env/all/correct "
    "optim/kl_sample_train_v1 kl_pre_post grad_norm train_mean_nll test/nll dpo_loss accuracy "
    "teacher_kl kl_policy_base train/loss train/accuracy"
).split()


def read_recipes() -> dict[str, tuple[str, list[str]]]:
    """Return (module, settings) of each recipe by name."""
    values = {"STUDENT": STUDENT, "TEACHER": TEACHER}
    for line in SHARED.replace("\n    ", " ").strip().splitlines():
        name, _, words = line.partition(" = ")
        values[name] = Template(words).substitute(values)
    rows = (line.split(" | ") for line in TABLE.replace("\n    ", " ").strip().splitlines())
    return {
        name: (f"tinker_cookbook.recipes.{module}", Template(words).substitute(values).split())
        for name, module, words in rows
    }


RECIPES = read_recipes()

# ------------------------------------------------------------------------------- models and data

WORDS = 2000  # size of the vocabulary: Qwen3's bytes and first merges
ANSWERS = ("1", "2", "3", "4")
CERTAIN = 13.0  # logit of the scripted next tokens; all other logits are 0


def write_tokenizer(folder: Path, whole: Path) -> None:
    """Write Qwen3's tokenizer with only its first words, followed by its special tokens."""
    folder.mkdir(parents=True)
    vocab = json.loads((whole / "vocab.json").read_text())
    vocab = {token: i for token, i in vocab.items() if i < WORDS}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    merges = (whole / "merges.txt").read_text().splitlines()[: WORDS - 256 + 1]
    (folder / "merges.txt").write_text("\n".join(filter(None, merges)) + "\n")
    config = json.loads((whole / "tokenizer_config.json").read_text())
    special = {int(i): item for i, item in config["added_tokens_decoder"].items()}
    down = min(special) - WORDS
    config["added_tokens_decoder"] = {str(i - down): item for i, item in special.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder: Path, tokenizer: Path) -> None:
    """Write a tiny model that answers any prompt with \\boxed{1} to \\boxed{4}, and sometimes with
    another text, so that rewards differ within a group. Its layers add nothing: the next token
    depends only on the last token, until an adapter learns more.
    """
    import torch

    from rl.models import load_model

    loaded = load_model("tiny:chat", tokenizer=str(tokenizer), seed=1)
    model, words = loaded.model, loaded.tokenizer
    begin, (close,), (end,) = (
        words.encode(text, add_special_tokens=False) for text in ("\\boxed{", "}", "<|im_end|>")
    )
    digits = [words.encode(text, add_special_tokens=False)[0] for text in ANSWERS]
    # After any of the first tokens (None: any other token) comes any of the second.
    steps: list[tuple[list[int] | None, list[int]]] = [(None, begin[:1])]
    steps += [([a], [b]) for a, b in zip(begin, begin[1:], strict=False)]
    steps += [(begin[-1:], digits), (digits, [close]), ([close], [end])]
    with torch.no_grad():
        embed = model.get_input_embeddings().weight
        head = torch.zeros_like(embed)
        model.config.tie_word_embeddings, model.config.max_position_embeddings = False, 8192
        model.get_output_embeddings().weight = torch.nn.Parameter(head)
        width = embed.shape[1]
        embed.zero_()
        embed[:, 0] = 1.0
        for i, (before, after) in enumerate(steps):
            if before is not None:
                embed[before] = torch.eye(width)[i]
            head[after, i] = CERTAIN / width**0.5
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_world(work: Path, data: Path) -> None:
    """Write the model, tokenizers and data sets under the names that recipes request.
    datasets.load_dataset first looks for a folder of the name, whose README.md lists the files.
    """
    write_tokenizer(work / "tokenizer", data / "tokenizers" / "qwen3")
    write_model(work / "model", work / "tokenizer")
    for name in NAMES:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).symlink_to(work / "tokenizer")
    lines = (data / "gsm8k" / "train.jsonl").read_text().splitlines()
    gsm8k = [row for row in map(json.loads, lines) if row["answer"].split("#### ")[-1] in ANSWERS]
    gsm8k.sort(key=lambda row: len(row["question"]))
    lines = (data / "math" / "MATH_train.jsonl").read_text().splitlines()[:64]
    math = [row for row in map(json.loads, lines) if len(row["problem"]) < 300]
    sums = [(f"What is {a} + {b}?", str(a + b)) for a in range(12) for b in range(12)]
    chats, talks, pairs, science = [], [], [], []
    for question, answer in sums:
        turns = {"user": question, "assistant": answer}
        chats.append({"messages": [{"role": r, "content": text} for r, text in turns.items()]})
        turns = {"human": question, "gpt": answer}
        talks.append({"conversations": [{"from": r, "value": text} for r, text in turns.items()]})
        start = f"\n\nHuman: {question}\n\nAssistant: "
        pairs.append({"chosen": start + answer, "rejected": f"{start}I do not know."})
        item = {"domain": "Chemistry", "question": question, "answerKey": "A", "answer": "A"}
        item |= {"type": "mcq-4-choices", "choices": {"text": ["1", "2"], "label": ["A", "B"]}}
        item |= {"details": {"level": "L3", "task": "t", "subtask": "t", "source": "t"}}
        science.append({**item, "prompt": {"default": "Answer."}})
    problems = [
        {"question": row["problem"], "final_answer": row.get("answer", "0")} for row in math
    ]
    sets: dict[str, tuple[str, dict[str, list[dict[str, Any]]]]] = {
        "openai/gsm8k": ("main", {"train": gsm8k[:12], "test": gsm8k[12:20]}),
        "HuggingFaceH4/no_robots": ("default", {"train": chats, "test": chats[:16]}),
        "allenai/tulu-3-sft-mixture": ("default", {"train": chats * 10}),
        "zwhe99/DeepMath-103K": ("default", {"train": problems}),
        "open-thoughts/OpenThoughts3-1.2M": ("default", {"train": talks}),
        "Anthropic/hh-rlhf": ("default", {"train": pairs * 10, "test": pairs[:16]}),
        "hicai-zju/SciKnowEval": ("default", {"test": science}),
    }
    for name, (config, splits) in sets.items():
        files = ""
        for split, rows in splits.items():
            write_rows(work / name / f"{split}.jsonl", rows)
            files += f"  - split: {split}\n    path: {split}.jsonl\n"
        card = (
            f"---\nconfigs:\n- config_name: {config}\n  default: true\n  data_files:\n{files}---\n"
        )
        (work / name / "README.md").write_text(card)
    rubric = {"rubric_str": "Is it polite?", "extraction_regex": r"\\boxed\{(.*)\}"}
    rubric |= {"grader_output_format_instruction": r"\boxed{1}"}
    talk = [{"role": "user", "content": "Say hello"}]
    write_rows(work / "rubric.jsonl", [{"convo": talk, "rubric_items": [rubric]}] * 8)
    write_rows(work / "conversations.jsonl", chats)


# ------------------------------------------------------------------------------------------- runs


@contextmanager
def serve_models(work: Path):
    """Run serve.py with the model under all names; yield its address."""
    command = [sys.executable, str(REPO / "serve.py"), "--port", "0", "--output-dir", "served"]
    for name in NAMES:
        command += ["--base-model", f"{name}={work / 'model'},{(work / name).resolve()}"]
    with (work / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("serving")), "")
        if not line:
            raise SystemExit(f"the server ended: {(work / 'server.log').read_text()}")
        yield line.split(" at ")[1].strip()
    finally:
        process.terminate()
        process.wait(60)


def run_recipe(name: str, python: str, url: str, work: Path, seconds: float) -> dict[str, str]:
    """Return the row of a recipe. A resumed recipe shares the folder of the original run."""
    module, settings = RECIPES[name]
    folder = name.removesuffix(", resumed").replace(" ", "-").replace(",", "")
    logs = work / "logs" / ("rlhf-bench" if "rlhf" in name else folder)
    if "rlhf" not in name:  # it derives its folder from short_name
        settings = [*settings, f"log_path={logs}"]
    env = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local-key-of-a-bench"}
    env |= {"TINKER_TELEMETRY": "0", "TINKER_COOKBOOK_RUNS_DIR": str(work / "logs")}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf"), "HOME": str(work)}
    env |= {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    command = [python, "-m", module, *settings]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=work, env={**os.environ, **env}, text=True, start_new_session=True, **options
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        outcome = "stopped" if process.returncode else "ran"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        outcome = "out of time"
    took = time.monotonic() - begin
    files = sorted(logs.rglob("metrics.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    last = {key: value for row in rows for key, value in row.items()}
    figures = "; ".join(f"{key} {last[key]:.4g}" for key in METRICS if key in last)
    lines = [line.strip() for line in output.splitlines() if line.strip()] or [""]
    why = "" if outcome == "ran" else lines[-1].replace(f"{work}/", "")[:240]
    print(f"{name}: {outcome} in {took:.0f} s, {len(rows)} rows. {figures} {why}", flush=True)
    row = {"recipe": name, "module": module, "outcome": outcome, "seconds": f"{took:.0f}"}
    return {**row, "rows": str(len(rows)), "seen": figures, "why": why}


def main() -> None:
    parser = make_parser(__doc__, output=RESULTS / "cookbook.csv")
    needs = "of an environment with tinker 0.38.0 and tinker-cookbook 0.6.1"
    parser.add_argument("--python", required=True, help=needs)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seconds", type=float, default=120.0, help="that one recipe may take")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        write_world(work, args.data.resolve())
        with serve_models(work) as url:
            for name in args.only:
                row = run_recipe(name, args.python, url, work, args.seconds)
                order = lambda row: list(RECIPES).index(row["recipe"])  # noqa: E731
                replace_rows(args.output, [row], ("recipe",), order)


if __name__ == "__main__":
    main()
