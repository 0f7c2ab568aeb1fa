"""Load published reward models: sequence classifiers with one output
(`...ForSequenceClassification`), with their tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl.errors import UserError, check_hub_access
from rl.layers import find_max_context
from rl.models.check_weights import check_tensor_names, convert_read_errors, hide_progress_bars
from rl.models.model_loading import convert_config_errors
from rl.models.tokenizer_loading import load_tokenizer

ARCHITECTURE_SUFFIX = "ForSequenceClassification"


@dataclass(frozen=True)
class LoadedClassifier:
    """Hold a classifier with one output, its tokenizer and its name.

    `max_context`: the most tokens it reads; None: no limit is known.
    """

    model: Any
    tokenizer: Any
    name: str
    max_context: int | None


def load_classifier_config(name: str) -> Any | None:
    """Return the config of a sequence classifier (a folder or a hub name); None if `name` is a
    model of another kind.

    Raises UserError if the config cannot be read, or if the classifier has more than one output.
    """
    from transformers import AutoConfig

    if name.startswith("tiny:"):
        return None
    source = _resolve_source(name)
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        return None
    check_hub_access(source, "model")
    try:
        with convert_config_errors(name):
            config = AutoConfig.from_pretrained(source)
            architectures = list(map(str, config.architectures or ()))
    except OSError as error:
        raise UserError(f"cannot read the config of the reward model {name!r}: {error}") from error
    if not any(architecture.endswith(ARCHITECTURE_SUFFIX) for architecture in architectures):
        return None
    if config.num_labels != 1:
        raise UserError(
            f"{name} is a classifier with {config.num_labels} outputs "
            f"({', '.join(map(str, config.id2label.values()))[:80]}); a reward "
            "model has one output: use a model with num_labels 1"
        )
    return config


def load_classifier_tokenizer(name: str) -> Any:
    """Return the classifier's tokenizer.

    Raises UserError if the tokenizer is missing or has no chat template.
    """
    tokenizer = load_tokenizer(_resolve_source(name))
    if tokenizer is None or tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer of the reward model {name} has no chat template, so the format of its "
            "conversations is unknown: save the template that it was trained with as "
            "chat_template.jinja next to its tokenizer, and pass that folder"
        )
    return tokenizer


def load_classifier(name: str, dtype: torch.dtype) -> LoadedClassifier:
    """Load a classifier with one output (a folder or a hub name), ready to score.

    Raises UserError if it is not such a classifier, if weights are missing, or if it has no
    tokenizer with a chat template.
    """
    from transformers import AutoModelForSequenceClassification

    config = load_classifier_config(name)
    if config is None:
        raise UserError(
            f"{name} is not a reward model: its config names no class ...{ARCHITECTURE_SUFFIX}"
        )
    tokenizer = load_classifier_tokenizer(name)
    try:
        with convert_read_errors(name), hide_progress_bars():
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                _resolve_source(name), config=config, output_loading_info=True, dtype=dtype
            )
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the reward model {name!r}: {error}") from error
    check_tensor_names(name, loading["missing_keys"], ())
    model.config.use_cache = False
    limit = find_max_context(model)
    return LoadedClassifier(model.eval().requires_grad_(False), tokenizer, name, limit)


def count_classifier_parameters(name: str) -> int | None:
    """Return the number of parameters of a published reward model; None if `name` is not a reward
    model.

    No weights are read.
    """
    from transformers import AutoModelForSequenceClassification

    config = load_classifier_config(name)
    if config is None:
        return None
    with convert_config_errors(name), torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def score_inputs(
    classifier: LoadedClassifier, inputs: Sequence[Sequence[int]], token_budget: int
) -> list[float]:
    """Return the score (the only logit) of each input, equal to transformers' forward of that input
    without others.

    Inputs of equal length share a forward of at most `token_budget` positions, so that nothing is
    padded: padding shifts the position that some classes read, and changes the attention of others.
    A model without a padding token reads a single input at a time, as transformers requires.
    """
    model = classifier.model
    pads = getattr(model.config.get_text_config(), "pad_token_id", None) is not None
    by_length: dict[int, list[int]] = {}
    for number, tokens in enumerate(inputs):
        by_length.setdefault(len(tokens), []).append(number)
    scores = [0.0] * len(inputs)
    for length, members in sorted(by_length.items()):
        rows = max(1, token_budget // max(length, 1)) if pads else 1
        for start in range(0, len(members), rows):
            part = members[start : start + rows]
            tokens_BT = torch.tensor([list(inputs[i]) for i in part], device=model.device)
            logits_B1 = model(input_ids=tokens_BT, attention_mask=torch.ones_like(tokens_BT)).logits
            for i, score in zip(part, logits_B1[:, 0].float().tolist(), strict=True):
                scores[i] = score
    return scores


def _resolve_source(name: str) -> str:
    """Return the expanded path if `name` is a folder, else `name`."""
    folder = Path(name).expanduser()
    return str(folder) if folder.is_dir() else name
