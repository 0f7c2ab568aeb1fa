"""Test the offload of activations: the inputs of checkpointed layers are in host memory between
forward and backward, and nothing else changes.
"""

import copy

import numpy as np
import pytest
import torch
from test_architectures import make_datums, make_learner, model_of, run_learner

from rl.config import ModelSettings
from rl.learner import activation_memory, offload_layer_inputs
from rl.memory_plan import ComputeConfig, MicroBatch, ModelSkeleton

NAMES = ("gpt2", "llama", "qwen2", "mixtral", "gemma2", "bloom", "falcon_h1", "opt")


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_same_bits(name, monkeypatch):
    """Each layer makes a copy of [rows, positions, hidden] per micro-batch, which is restored
    once.
    """
    copies = []

    class CountedCopy(activation_memory.HostCopy):
        def __init__(self, tensor, stream):
            super().__init__(tensor, stream)
            self.shape, self.restored = tensor.shape, 0
            copies.append(self)

        def restore(self):
            self.restored += 1
            return super().restore()

    monkeypatch.setattr(activation_memory, "HostCopy", CountedCopy)
    model, data = model_of(name), make_datums()
    plain = make_learner(copy.deepcopy(model), gradient_checkpointing=True)
    offloading = make_learner(model, gradient_checkpointing=True, offload_activations=True)
    copies.clear()  # the probe's copies
    expected, got = run_learner(plain, data), run_learner(offloading, data)
    np.testing.assert_array_equal(got, expected)
    for key, parameter in plain.trainable.items():
        assert torch.equal(offloading.trainable[key].grad, parameter.grad), key
    config = model.config
    inputs = [
        item for item in copies if item.shape[-1] == config.hidden_size and len(item.shape) == 3
    ]
    assert len(inputs) == config.num_hidden_layers * offloading.num_micro_batches
    assert all(item.restored == 1 for item in inputs)
    count = len(copies)
    run_learner(plain, data)
    assert len(copies) == count, "a learner that offloads nothing makes no copies"


def test_the_plan_counts_them_in_host_memory(tmp_path):
    """Computed by hand: all inputs leave the device, except that of the layer in its backward."""
    layers = 6
    # Imported here: it needs tyro, which a machine that runs the test marked gpu may lack.
    from test_memory_plan import MODEL, folder_of

    skeleton = ModelSkeleton(
        folder_of({**MODEL, "num_hidden_layers": layers}, tmp_path), None, None
    )
    batch = MicroBatch(32, 64, 2048)
    kept, offloaded = (
        skeleton.measure_micro_batch(batch, ComputeConfig(checkpointing=True, offloads=on))
        for on in (False, True)
    )
    size = 2048 * MODEL["hidden_size"] * 4
    saved = kept.total - offloaded.total
    assert (layers - 2) * size <= saved <= layers * size


def test_it_needs_gradient_checkpointing():
    with pytest.raises(ValueError, match="set gradient_checkpointing too"):
        ModelSettings(offload_activations=True)


@pytest.mark.gpu
def test_memory_of_a_gpu_falls_by_the_inputs():
    """A forward holds less memory, and the gradients are the same."""
    torch.manual_seed(0)
    model = model_of("llama", "sdpa").cuda()
    ids = torch.randint(3, 40, (64, 128), device="cuda")
    model.model(input_ids=ids, use_cache=False)  # cuBLAS allocates its workspace, which it keeps
    gradients, held_bytes = [], []
    for offloads in (False, True):
        trained = copy.deepcopy(model)
        trained.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        trained.train()
        if offloads:
            offload_layer_inputs(trained)
        before = torch.cuda.memory_allocated()
        hidden = trained.model(input_ids=ids, use_cache=False).last_hidden_state
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # frees memory held for finished copies
        held_bytes.append(torch.cuda.memory_allocated() - before)
        hidden.square().sum().backward()
        gradients.append({name: p.grad for name, p in trained.named_parameters()})
        del trained, hidden
    for name, gradient in gradients[0].items():
        if gradient is not None:
            torch.testing.assert_close(gradients[1][name], gradient)
    inputs = model.config.num_hidden_layers * ids.numel() * model.config.hidden_size * 4
    assert held_bytes[0] - held_bytes[1] >= 0.5 * inputs
