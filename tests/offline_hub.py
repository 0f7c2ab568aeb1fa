"""Fill a folder as a hub cache, so that the model and data set names in the docs load offline: tiny
random models of the same architectures, and data sets of a few rows.

Usage: `python offline_hub.py FOLDER NAME [NAME ...]`, where NAME is the name of a model.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32768,
}
# name pattern -> model type; the first match counts
FAMILIES = {r"Qwen3-VL": "qwen3_vl", r"Qwen3": "qwen3", r"Qwen2\.5": "qwen2", r"[Ll]lama": "llama"}
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ (call.function or call) | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
GSM8K = {"question": "What is 1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}
MATH = {"problem": "What is $1+1$?", "solution": "\\boxed{2}", "answer": "2", "level": "Level 1"}
MATH |= {"type": "Algebra", "subject": "Algebra", "unique_id": "test/algebra/1.json"}
MBPP = {"task_id": 1, "text": "Write f(x) that doubles x.", "code": "def f(x):\n    return 2 * x"}
MBPP |= {"test_list": ["assert f(2) == 4"], "test_setup_code": "", "challenge_test_list": []}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": 'def f(x):\n    """Negate x."""\n'}
HUMANEVAL |= {"canonical_solution": "    return -x\n", "entry_point": "f"}
HUMANEVAL |= {"test": "def check(candidate):\n    assert candidate(2) == -2\n"}
AIME = {"id": 60, "problem": "Find 1+1.", "solution": "It is 2.", "answer": "002", "year": "2024"}
GPQA = {"Question": "What is 1+1?", "Correct Answer": "2", "Record ID": "rec1"}
GPQA |= {f"Incorrect Answer {i}": str(i + 2) for i in (1, 2, 3)}
IFEVAL = {"key": 1000, "prompt": "Write two words without a comma."}
IFEVAL |= {"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"]}
IFEVAL |= {"kwargs": [{}, {"relation": "at least", "num_words": 2}]}
# data set -> (configuration, splits, row)
DATASETS = {
    "openai/gsm8k": ("main", ("train", "test"), GSM8K),
    "DigitalLearningGmbH/MATH-lighteval": ("default", ("train", "test"), MATH),
    "HuggingFaceH4/MATH-500": ("default", ("test",), MATH),
    "google-research-datasets/mbpp": ("full", ("train", "validation", "test"), MBPP),
    "openai/openai_humaneval": ("default", ("test",), HUMANEVAL),
    "HuggingFaceH4/aime_2024": ("default", ("train",), AIME),
    "Idavidrein/gpqa": ("gpqa_diamond", ("train",), GPQA),
    "google/IFEval": ("default", ("train",), IFEVAL),
}
ROWS = 12


def family_of(name: str) -> str:
    for pattern, family in FAMILIES.items():
        if re.search(pattern, name):
            return family
    raise SystemExit(f"{name}: FAMILIES of tests/offline_hub.py names no architecture for it")


def make_snapshot(hub: Path, kind: str, name: str) -> Path:
    """Return the new folder of a repository's files."""
    repository = hub / f"{kind}s--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    commit = hashlib.sha1(name.encode()).hexdigest()  # tells snapshots apart for `datasets`
    (repository / "refs" / "main").write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


def write_dataset(hub: Path, name: str) -> None:
    config, splits, row = DATASETS[name]
    folder = make_snapshot(hub, "dataset", name)
    files = "".join(f"  - {{split: {split}, path: {split}.jsonl}}\n" for split in splits)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    )
    for split in splits:
        (folder / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * ROWS)


def byte_tokenizer(marks=MARKS):
    """Return a tokenizer over bytes; the last mark ends a sequence, the first one pads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(marks)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=marks[-1], pad_token=marks[0]
    )
    tokenizer.chat_template = TEMPLATE.lstrip()
    return tokenizer


def write_model(hub: Path, name: str) -> None:
    import transformers
    from seeing import make_tiny_model

    folder = make_snapshot(hub, "model", name)
    family = family_of(name)
    if family.endswith("_vl"):
        loaded, _ = make_tiny_model(family)
        tokenizer, model = loaded.tokenizer, loaded.model
        tokenizer.image_reader.family.image_processor.save_pretrained(folder)
    else:
        tokenizer = byte_tokenizer()
        config = transformers.AutoConfig.for_model(
            family,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            **SIZES,
            **({"num_labels": 1} if "Reward" in name else {}),
        )
        auto = (
            transformers.AutoModelForSequenceClassification
            if "Reward" in name
            else transformers.AutoModelForCausalLM
        )
        model = auto.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    hub = Path(sys.argv[1])
    for dataset in DATASETS:
        write_dataset(hub, dataset)
    for model in sys.argv[2:]:
        write_model(hub, model)
