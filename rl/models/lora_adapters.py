"""Add a LoRA adapter to a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rl.errors import UserError, warn_on_rank_zero
from rl.models.lora_targets import (
    find_expert_targets,
    find_lora_targets,
    find_unadaptable,
    iter_stacked_experts,
)
from rl.models.model_loading import LoadedModel, ignore_tied_head_warnings, seeded_torch
from rl.types import LoraConfig


def compute_unadapted_share(model: Any, lora: LoraConfig) -> float:
    """Return the fraction of a model's parameters that `lora` selects but that cannot get an
    adapter.
    """
    return sum(find_unadaptable(model, lora).values()) / sum(p.numel() for p in model.parameters())


def add_lora(
    loaded: LoadedModel, lora: LoraConfig, *, unadapted: float | None = None
) -> LoadedModel:
    """Add fresh LoRA adapters (PEFT) to a model: A random from lora.seed, B zero, the base frozen.

    `unadapted`: the fraction in the whole model, if some of its layers have been removed since.
    Raises UserError for a rank below 1, an alpha that is not positive, or a model that PEFT cannot
    adapt.
    """
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    if lora.rank < 1:
        raise UserError(
            f"the LoRA rank must be at least 1, got {lora.rank} (full weights: "
            "create_full_training_client)"
        )
    if lora.alpha is not None and not lora.alpha > 0:
        raise UserError(
            "LoRA's alpha must be positive (the adapter is scaled by alpha / rank), got "
            f"{lora.alpha}"
        )
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.effective_alpha,  # type: ignore[arg-type]  # a float works
        target_modules=find_lora_targets(loaded.model, lora),
        target_parameters=find_expert_targets(loaded.model, lora) or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    unadapted = compute_unadapted_share(loaded.model, lora) if unadapted is None else unadapted
    if unadapted >= 0.01:
        remedy = (
            ""
            if lora.train_experts or not any(iter_stacked_experts(loaded.model))
            else "; --train-experts adds adapters to them"
        )
        warn_on_rank_zero(
            f"LoRA: {unadapted:.0%} of the weights of {loaded.name} (experts) get no adapter "
            f"and stay as they are{remedy}"
        )
    loaded.model.name_or_path = loaded.name  # PEFT writes it into adapter_config.json
    with seeded_torch(lora.seed if lora.seed is not None else 0), ignore_tied_head_warnings():
        try:
            model = get_peft_model(loaded.model, config)
        except (
            ValueError
        ) as error:  # for architectures that PEFT does not adapt, such as state-space models
            raise UserError(
                f"{loaded.name} cannot have a LoRA adapter: {error} Train all weights (lora_rank 0)"
            ) from error
    return replace(loaded, model=model, unadapted_share=unadapted)


def set_lora_alpha(model: Any, lora: LoraConfig) -> None:
    """Scale the adapters of `model` by the alpha of `lora`, as if they had been created with it."""
    from peft.tuners.lora.layer import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for name in layer.scaling:
                layer.lora_alpha[name] = lora.effective_alpha
                layer.scaling[name] = lora.effective_alpha / lora.rank
    for config in model.peft_config.values():
        config.lora_alpha = lora.effective_alpha
