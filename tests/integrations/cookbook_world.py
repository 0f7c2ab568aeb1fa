"""Create the inputs of tinker-cookbook's recipes: a model and a tokenizer small enough for a CPU,
and data under the hub's names.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

STUDENT, TEACHER = "Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507"
# the last name answers in twenty questions, regardless of the settings
NAMES = (STUDENT, TEACHER, "Qwen/Qwen3.5-9B")
# CODER answers with a program, SEARCHER with a call or an answer; their tokenizer has extra words
CODER, SEARCHER = "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B"
PROGRAM, CLOSE, REPLY = "```python\nprint(", ")\n```", "Answer: "
CALL = (
    '<tool_call>\n{"name": "search", "arguments": {"query_list": ["How many legs has a '
    'spider"]}}\n</tool_call>'
)
WORDS = 2000  # size of the vocabulary: Qwen3's bytes and first merges
ANSWERS = ("1", "2", "3", "4")
END = "<|im_end|>"
Encode = Callable[[str], list[int]]
# pairs: after any of the first tokens (None: after any other token) comes any of the second tokens
Steps = list[tuple[list[int] | None, list[int]]]
_CERTAIN = 13.0  # logit of the scripted next tokens; all other logits are 0


def small_tokenizer(folder: Path, whole: Path, more: Sequence[str] = ()) -> None:
    """Write Qwen3's tokenizer with only its first words, followed by its special tokens and by
    further words of any length.
    """
    folder.mkdir(parents=True)
    vocab = {
        token: i for token, i in json.loads((whole / "vocab.json").read_text()).items() if i < WORDS
    }
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    lines = (whole / "merges.txt").read_text().splitlines()
    (folder / "merges.txt").write_text(
        "\n".join([line for line in lines[: WORDS - 256 + 1] if line]) + "\n"
    )
    config = json.loads((whole / "tokenizer_config.json").read_text())
    first = min(map(int, config["added_tokens_decoder"]))
    config["added_tokens_decoder"] = {
        str(int(i) - first + WORDS): item for i, item in config["added_tokens_decoder"].items()
    }
    first = max(map(int, config["added_tokens_decoder"])) + 1
    plain = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": False,
    }
    config["added_tokens_decoder"] |= {
        str(first + i): {"content": word, **plain} for i, word in enumerate(more)
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def boxed(encode: Encode) -> Steps:
    """Return the steps of an answer \\boxed{1} to \\boxed{4}."""
    begin, digits = encode("\\boxed{"), [encode(text)[0] for text in ANSWERS]
    assert len(set(begin)) == len(begin)
    steps: Steps = [
        (None, begin[:1]),
        *(([before], [after]) for before, after in zip(begin, begin[1:], strict=False)),
    ]
    return [*steps, (begin[-1:], digits), (digits, encode("}")), (encode("}"), encode(END))]


def make_program_steps(encode: Encode) -> Steps:
    """Return the steps of a program that prints 1 to 4."""
    digits = [encode(text)[0] for text in ANSWERS]
    return [
        (None, encode(PROGRAM)),
        (encode(PROGRAM), digits),
        (digits, encode(CLOSE)),
        (encode(CLOSE), encode(END)),
    ]


def search(encode: Encode) -> Steps:
    """Return the steps of a call of the search tool, or of an answer, 6 to 9."""
    digits = [encode(text)[0] for text in "6789"]
    return [
        (None, encode(CALL) + encode(REPLY)),
        (encode(CALL), encode(END)),
        (encode(REPLY), digits),
        (digits, encode(END)),
    ]


def answering_model(folder: Path, tokenizer: Path, says: Callable[[Encode], Steps] = boxed) -> None:
    """Write a tiny model that answers any prompt with the text of `says`, and sometimes with
    another text, so that rewards differ within a group.

    Its layers add nothing: the next token depends only on the last token, until an adapter learns
    more. Nothing is trained.
    """
    import torch

    from rl.models import load_model

    loaded = load_model("tiny:chat", tokenizer=str(tokenizer), seed=1)
    model, words = loaded.model, loaded.tokenizer
    steps = says(lambda text: words.encode(text, add_special_tokens=False))
    with torch.no_grad():
        embed = model.get_input_embeddings().weight
        head = torch.zeros_like(embed)
        model.config.tie_word_embeddings, model.config.max_position_embeddings = False, 8192
        model.get_output_embeddings().weight = torch.nn.Parameter(head)
        width = embed.shape[1]
        embed.zero_()
        embed[:, 0] = 1.0
        for i, (seen, output) in enumerate(steps):
            if seen is not None:
                embed[seen] = torch.eye(width)[i]
            head[output, i] = _CERTAIN / width**0.5
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def rows_of(file: Path, limit: int | None = None) -> list[dict]:
    with open(file) as lines:
        return [json.loads(line) for i, line in enumerate(lines) if limit is None or i < limit]


def hub_folder(work: Path, name: str, config: str, splits: dict[str, list[dict]]) -> None:
    """Write a data set to the first place that datasets.load_dataset(name) checks: a folder of that
    name. Each further config of a name adds to the folder.
    """
    folder, card = work / name / config, work / name / "README.md"
    folder.mkdir(parents=True)
    listed = []
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        listed.append(f"  - split: {split}\n    path: {config}/{split}.jsonl")
    before = card.read_text().removesuffix("---\n") if card.is_file() else "---\nconfigs:\n"
    default = "" if card.is_file() else "  default: true\n"
    card.write_text(
        f"{before}- config_name: {config}\n{default}  data_files:\n" + "\n".join(listed) + "\n---\n"
    )


def lay_out(work: Path, data: Path, problems: int) -> None:
    """Write model, tokenizers and data sets under the names that recipes request. `problems`:
    number of GSM8K problems (only those with an answer that the model sometimes gives); a recipe
    with a batch of 128 groups gets no others.
    """
    small_tokenizer(work / "tokenizer", data / "tokenizers" / "qwen3")
    answering_model(work / "model", work / "tokenizer")
    small_tokenizer(work / "tools", data / "tokenizers" / "qwen3", (PROGRAM, CLOSE, REPLY, CALL))
    answering_model(work / "coder", work / "tools", make_program_steps)
    answering_model(work / "searcher", work / "tools", search)
    for name in (*NAMES, CODER, SEARCHER):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).symlink_to(work / ("tokenizer" if name in NAMES else "tools"))
    _tools(work)
    _markets(work / "markets.csv")
    answered = {
        "train": [
            row
            for row in rows_of(data / "gsm8k" / "train.jsonl")
            if row["answer"].split("#### ")[-1] in ANSWERS
        ]
    }
    short = sorted(answered["train"], key=lambda row: len(row["question"]))
    hub_folder(
        work,
        "openai/gsm8k",
        "main",
        {"train": short[:problems], "test": short[problems : problems + 8]},
    )
    math = rows_of(data / "math" / "MATH_train.jsonl", 64)
    sums = [(f"What is {a} + {b}?", str(a + b)) for a in range(12) for b in range(12)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": requests},
                {"role": "assistant", "content": text},
            ]
        }
        for requests, text in sums
    ]
    hub_folder(work, "HuggingFaceH4/no_robots", "default", {"train": chats, "test": chats[:16]})
    hub_folder(work, "allenai/tulu-3-sft-mixture", "default", {"train": chats * 10})
    requests = [
        {"question": row["problem"], "final_answer": row.get("answer", "0")}
        for row in math
        if len(row["problem"]) < 300
    ]
    hub_folder(work, "zwhe99/DeepMath-103K", "default", {"train": requests})
    talk = [
        {"conversations": [{"from": "human", "value": requests}, {"from": "gpt", "value": text}]}
        for requests, text in sums
    ]
    hub_folder(work, "open-thoughts/OpenThoughts3-1.2M", "default", {"train": talk})
    pairs = [
        {
            "chosen": f"\n\nHuman: {requests}\n\nAssistant: {text}",
            "rejected": f"\n\nHuman: {requests}\n\nAssistant: I do not know.",
        }
        for requests, text in sums
    ]
    hub_folder(work, "Anthropic/hh-rlhf", "default", {"train": pairs * 10, "test": pairs[:16]})
    science = [
        {
            "domain": "Chemistry",
            "question": requests,
            "choices": {"text": ["1", "2"], "label": ["A", "B"]},
            "answerKey": "A",
            "answer": "A",
            "type": "mcq-4-choices",
            "details": {"level": "L3", "task": "t", "subtask": "t", "source": "t"},
            "prompt": {"default": "Answer."},
        }
        for requests, _ in sums
    ]
    hub_folder(work, "hicai-zju/SciKnowEval", "default", {"test": science})
    rubric = {
        "rubric_str": "Is it polite?",
        "extraction_regex": r"\\boxed\{(.*)\}",
        "grader_output_format_instruction": r"\boxed{1}",
    }
    convo = [{"role": "user", "content": "Say hello"}]
    (work / "rubric.jsonl").write_text(
        (json.dumps({"convo": convo, "rubric_items": [rubric]}) + "\n") * 8
    )
    (work / "conversations.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def _tools(work: Path) -> None:
    """Write problems for code_rl, with answers that the coder sometimes prints, and questions for
    search_tool, in the file formats of their data sets.
    """
    import pandas

    tests = {
        n: json.dumps([{"input": "", "output": f"{n}\n", "testtype": "stdin_stdout"}])
        for n in ANSWERS
    }
    tasks = [
        {"problem": f"Print {n}.", "tests": tests[n], "metadata": "{}", "starter_code": ""}
        for n in ANSWERS
    ] * 4
    for config, split in (("primeintellect", "train"), ("taco", "train"), ("codeforces", "test")):
        hub_folder(work, "agentica-org/DeepCoder-Preview-Dataset", config, {split: tasks})
    hub_folder(
        work, "agentica-org/DeepCoder-Preview-Dataset", "lcbv5", {"train": tasks, "test": tasks[:4]}
    )
    request = [
        {"question": "How many legs has a spider?", "golden_answers": ["8"], "data_source": "nq"},
        {
            "question": "How many days has a week?",
            "golden_answers": ["7"],
            "data_source": "hotpotqa",
        },
    ] * 8
    for split in ("train", "test"):
        folder = work / ".cache" / "tinker-cookbook" / "PeterJinGo" / "nq_hotpotqa_train" / split
        folder.mkdir(parents=True)
        pandas.DataFrame(request).to_parquet(folder / f"{split}.parquet")


def _markets(path: Path) -> None:
    """Write questions with an outcome, dated before and after the day at which
    decisions.forecasting splits them.
    """
    columns = (
        "submission_id",
        "event_ticker",
        "title",
        "snapshot_time",
        "close_time",
        "market_outcome",
        "category",
        "markets",
        "sources",
    )
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for i in range(24):
            day, odd = ("2025-10-%02d" if i < 16 else "2025-11-%02d") % (1 + i % 16), i % 2
            source = {
                "title": "Parity",
                "summary": f"{i} is {'odd' if odd else 'even'}.",
                "ranking": 1,
            }
            result = (
                str(i),
                f"E{i}",
                f"Will {i} be odd?",
                f"{day}T00:00:00",
                f"{day}T12:00:00",
                json.dumps({"Odd": odd}),
                "Numbers",
                json.dumps(["Odd"]),
                json.dumps([source]),
            )
            writer.writerow(dict(zip(columns, result, strict=True)))
