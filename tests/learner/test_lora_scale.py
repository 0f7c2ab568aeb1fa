"""Test the scale of a LoRA adapter: 32 / rank at every rank, as on Tinker. A saved adapter keeps
the scale that it was trained with.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import gather_targets, random_datums
from safetensors.torch import load_file

from rl import AdamParams, ServiceClient
from rl.models import load_model
from rl.types import ModelInput, SamplingParams

BASE, STEP = "tiny:addition", AdamParams(5e-3)


@pytest.fixture
def service(tmp_path):
    with ServiceClient(output_dir=tmp_path / "out", seed=3) as service:
        yield service


def train(client, steps=2, seed=0):
    """Train, and return the logprobs of a few datums after each step."""
    seen, data = [], random_datums(4, seed=seed)
    for _ in range(steps):
        client.forward_backward(data, "ppo").result()
        client.optim_step(STEP).result()
        output = client.forward(data, "ppo").result()
        seen.append(np.concatenate([row["logprobs"].array for row in output.loss_fn_outputs]))
    return np.concatenate(seen)


def logprobs_by_hand(folder, scale):
    """Compute the logprobs of `random_datums` in float64: every matrix of the base plus scale B A
    of the adapter saved in `folder`.
    """
    twin = load_model(BASE).model.double()
    saved = load_file(Path(folder) / "adapter_model.safetensors")
    # The head is tied, and the adapter applies to the head only.
    twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.detach().clone())
    rows = []
    with torch.no_grad():
        for name, module in twin.named_modules():
            if (a := saved.get(f"base_model.model.{name}.lora_A.weight")) is not None:
                module.weight += (
                    scale * saved[f"base_model.model.{name}.lora_B.weight"].double() @ a.double()
                )
        for datum in random_datums(4):
            logits = twin(input_ids=torch.tensor([datum.model_input.to_ints()])).logits[0]
            rows.append(gather_targets(logits.log_softmax(-1), datum).numpy())
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("rank", "options", "alpha"),
    [
        (4, {}, 32),
        (64, {}, 32),
        (4, {"alpha": None}, 4),
        (4, {"alpha": 8}, 8),
        (4, {"alpha": 2}, 2),
    ],
)
def test_an_adapter_is_scaled_by_alpha_over_its_rank_and_alpha_is_32(rank, options, alpha, service):
    """Alpha is 32 by default, as in scripts of Tinker's, and None makes it the rank."""
    client = service.create_lora_training_client(BASE, rank, 5, **options)
    after = train(client, steps=1)
    folder = client.save_weights_for_sampler("end").result().path
    assert json.loads((Path(folder) / "adapter_config.json").read_text())["lora_alpha"] == alpha
    np.testing.assert_allclose(after, logprobs_by_hand(folder, alpha / rank), atol=2e-5)
    # The step is large enough to distinguish the scales.
    assert not np.allclose(after, logprobs_by_hand(folder, 2 * alpha / rank), atol=1e-4)


def first_step(service, rank, **alpha):
    """Return the norm of the change of the model's matrices in the first step of Adam, which moves
    every entry of B by the learning rate.
    """
    client = service.create_lora_training_client(BASE, rank, 5, **alpha)
    train(client, steps=1)
    folder = Path(
        client.save_weights_for_sampler(f"r{rank}{''.join(map(str, alpha.values()))}").result().path
    )
    saved = load_file(folder / "adapter_model.safetensors")
    scale = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"] / rank
    moved = [
        scale * saved[name.replace("lora_A", "lora_B")] @ saved[name]
        for name in saved
        if "lora_A" in name
    ]
    return float(torch.cat([delta.reshape(-1) for delta in moved]).norm())


def test_the_first_step_is_that_of_alpha_32_whatever_the_rank(service):
    for rank in (8, 64):
        by_default = first_step(service, rank)
        assert by_default == first_step(service, rank, alpha=32)
        assert by_default == pytest.approx(
            32 / rank * first_step(service, rank, alpha=rank), rel=0.01
        )


def saved_before(service, rank=4):
    """Return the folder of a checkpoint that states no alpha, as saved when alpha was the rank by
    default, and the client that it was saved from.
    """
    client = service.create_lora_training_client(BASE, rank, 5, alpha=None)
    train(client, steps=1)
    folder = client.save_state("before").result().path
    assert json.loads((Path(folder) / "state.json").read_text())["spec"]["lora"]["alpha"] is None
    return folder, client


def sample_sequences(client):
    sampler = client.save_weights_and_get_sampling_client()
    sequences = (
        sampler.sample(ModelInput.from_ints([1, 2, 3]), 3, SamplingParams(6, seed=1))
        .result()
        .sequences
    )
    return [(sequence.tokens, sequence.logprobs) for sequence in sequences]


def test_a_checkpoint_that_states_no_alpha_goes_on_at_the_scale_it_was_trained_with(service):
    folder, client = saved_before(service)
    again = service.create_training_client_from_state_with_optimizer(folder)
    assert sample_sequences(again) == sample_sequences(client)
    assert np.array_equal(train(again, seed=1), train(client, seed=1))


@pytest.mark.parametrize("had_sampled", [False, True])
def test_loading_a_checkpoint_of_another_alpha_takes_its_scale_over(service, had_sampled):
    """After `load_state` into a client with today's default, the function, the sampler and further
    steps are those of the checkpoint.
    """
    folder, client = saved_before(service)
    other = service.create_lora_training_client(BASE, 4, 9)
    train(other, steps=1)
    older = other.save_weights_and_get_sampling_client() if had_sampled else None
    prompt = ModelInput.from_ints([1, 2, 3, 4])
    before = older.compute_logprobs(prompt).result() if older else None
    other.load_state_with_optimizer(folder).result()
    assert sample_sequences(other) == sample_sequences(client)
    # It keeps the weights and the scale from its creation.
    assert older is None or older.compute_logprobs(prompt).result() == before
    assert np.array_equal(train(other, seed=1), train(client, seed=1))
    assert sample_sequences(other) == sample_sequences(client)
    saved = Path(other.save_weights_for_sampler("loaded").result().path)
    assert json.loads((saved / "adapter_config.json").read_text())["lora_alpha"] == 4
    of_path = service.create_sampling_client(model_path=str(saved))
    assert (
        of_path.compute_logprobs(prompt).result()
        == client.save_weights_and_get_sampling_client().compute_logprobs(prompt).result()
    )
