"""Test the parts of several ranks that a single process can check: what is summed, scaled and
averaged, and which generator is restored.

Other ranks are replaced by the contents of their messages. The slow tests of real processes
(test_distributed.py) show that the parts work together under every launch.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import compute_relative_difference, make_worker, random_datums
from safetensors.torch import load_file

from rl.distributed import collectives
from rl.errors import OtherRankFailed
from rl.learner import learner_checkpoint
from rl.learner.adamw import (
    get_adam_state,
    load_adam_state,
    make_adamw,
    set_adam_params,
    step_if_finite,
)
from rl.learner.backend import ReplicatedBackend
from rl.learner.backend_deepspeed import DeepSpeedBackend
from rl.losses import get_loss
from rl.runtime.verb_table import assign_indices
from rl.types import AdamParams

PARAMS = AdamParams(
    learning_rate=0.01, beta1=0.5, beta2=0.6, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5
)


def adamw(weight, gradients, params=PARAMS):
    """Compute AdamW with clipping, written out (Loshchilov and Hutter, arXiv 1711.05101, algorithm
    2), in float64.
    """
    w = weight.double()
    m = v = torch.zeros_like(w)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        if params.grad_clip_norm > 0:
            g = g * min(1.0, params.grad_clip_norm / float(g.norm()))
        m = params.beta1 * m + (1 - params.beta1) * g
        v = params.beta2 * v + (1 - params.beta2) * g * g
        update = (m / (1 - params.beta1**t)) / ((v / (1 - params.beta2**t)).sqrt() + params.eps)
        w = w * (1 - params.learning_rate * params.weight_decay) - params.learning_rate * update
    return w


def linear(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(5, 3, bias=False)
    return model, dict(model.named_parameters())


def test_three_updates_are_adamws_with_the_betas_asked_for():
    """Three updates are compared, because the betas cancel in the first."""
    model, trainable = linear()
    backend = ReplicatedBackend(model, trainable, SimpleNamespace())
    start, gradients = model.weight.detach().clone(), [torch.randn(3, 5) for _ in range(3)]
    for gradient in gradients:
        model.weight.grad = gradient.clone()
        norm, applied = backend.step(PARAMS)
        assert applied and norm == pytest.approx(float(gradient.norm()), rel=1e-6)
    assert compute_relative_difference(model.weight.detach(), adamw(start, gradients)) < 1e-5
    # Each of these parameters affects the result.
    for other in ({"beta1": 0.9}, {"beta2": 0.95}, {"weight_decay": 0.0}, {"grad_clip_norm": 0.0}):
        moved = adamw(start, gradients, replace(PARAMS, **other))
        assert compute_relative_difference(model.weight.detach(), moved) > 1e-4


def copy_state(optimizer):
    """Return the optimizer's state by its key, as copies."""
    (state,) = optimizer.state.values()
    return {key: value.clone() for key, value in state.items()}


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e9])
def test_updates_are_to_the_bit_those_of_an_optimizer_that_skips_nothing(limit):
    """The reference is torch's clipping and AdamW, without a gradient that is not finite."""
    params = replace(PARAMS, grad_clip_norm=limit)
    (model, trainable), (reference, parameters) = linear(), linear()
    backend, adam = ReplicatedBackend(model, trainable, SimpleNamespace()), make_adamw(parameters)
    for step in range(6):
        gradient = torch.randn(3, 5)
        model.weight.grad = gradient.clone()
        if step % 3 == 1:
            model.weight.grad[1, 2] = float("nan") if step == 1 else float("inf")
            before = model.weight.detach().clone(), copy_state(backend.adam)
            norm, applied = backend.step(params)
            after = model.weight.detach().clone(), copy_state(backend.adam)
            assert not applied and not math.isfinite(norm) and model.weight.grad is None
            torch.testing.assert_close(after, before, rtol=0, atol=0)
            continue
        norm, applied = backend.step(params)
        assert applied and norm == float(gradient.norm())
        reference.weight.grad = gradient
        if limit:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
        set_adam_params(adam, params)
        adam.step()
    assert torch.equal(model.weight, reference.weight)
    torch.testing.assert_close(copy_state(backend.adam), copy_state(adam), rtol=0, atol=0)


def test_a_first_step_that_is_skipped_leaves_a_fresh_optimizer():
    model, trainable = linear()
    backend = ReplicatedBackend(model, trainable, SimpleNamespace())
    start = model.weight.detach().clone()
    model.weight.grad = torch.full((3, 5), float("inf"))
    assert backend.step(PARAMS) == (float("inf"), False)
    assert torch.equal(model.weight, start) and backend.optimizer_tensors() == {}


def test_a_first_step_without_memory_leaves_a_fresh_optimizer(monkeypatch):
    """torch makes a parameter's state once: a part of it would fail every later step."""
    model, trainable = linear()
    backend, gradient = ReplicatedBackend(model, trainable, SimpleNamespace()), torch.ones(3, 5)
    model.weight.grad = gradient.clone()
    with monkeypatch.context() as patch:
        make_zeros, shapes = torch.zeros_like, []

        def make_first(tensor, **options):
            shapes.append(tensor.shape)
            if len(shapes) == 2:  # exp_avg_sq
                raise torch.OutOfMemoryError
            return make_zeros(tensor, **options)

        patch.setattr(torch, "zeros_like", make_first)
        with pytest.raises(torch.OutOfMemoryError):
            backend.step(PARAMS)
    assert shapes == [(3, 5)] * 2 and backend.optimizer_tensors() == {}
    model.weight.grad = gradient.clone()
    assert backend.step(PARAMS) == (float(gradient.norm()), True)


def test_an_optimizer_without_torchs_kernel_steps_only_on_a_finite_gradient():
    steps = []
    optimizer = SimpleNamespace(step=lambda: steps.append(1))
    assert step_if_finite(optimizer, torch.tensor(2.0)) == (2.0, True) and steps == [1]
    assert step_if_finite(optimizer, torch.tensor(float("inf"))) == (float("inf"), False)
    assert step_if_finite(optimizer, torch.tensor(2.0), torch.tensor(False)) == (2.0, False)
    assert steps == [1]
    assert step_if_finite(optimizer, torch.tensor(2.0), torch.tensor(True)) == (2.0, True)
    assert steps == [1, 1]


# ------------------------------------------------------------------------------------ several ranks


@pytest.fixture
def two_ranks(monkeypatch):
    """Set the world size to 2. The other rank's part of each all-reduced message is taken from
    `others`, in turn.
    """
    others: list[torch.Tensor] = []

    def all_reduce(flat):
        flat.add_(others.pop(0).to(flat.dtype).reshape(flat.shape))

    monkeypatch.setattr(collectives, "world", lambda: 2)
    monkeypatch.setattr(collectives.dist, "all_reduce", all_reduce)
    return others


def test_a_message_is_the_sum_of_the_ranks_in_each_dtype(two_ranks):
    tensors = [
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([3], dtype=torch.int64),
        torch.tensor([4.0]),
    ]
    # Messages are by dtype: float32, then int64.
    two_ranks += [torch.tensor([10.0, 20.0, 40.0]), torch.tensor([30])]
    collectives.all_sum_(tensors)
    assert [t.tolist() for t in tensors] == [[[11.0, 22.0]], [33], [44.0]] and not two_ranks


def test_ddp_steps_on_the_sum_of_the_ranks_gradients(monkeypatch, two_ranks):
    """The step uses neither the mean nor the local gradient. A parameter without a local gradient
    uses that of the other rank.
    """
    model, trainable = linear()
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, source: None)
    backend = ReplicatedBackend(model, trainable, SimpleNamespace(device=torch.device("cpu")))
    start, mine, other = model.weight.detach().clone(), torch.randn(3, 5), torch.randn(3, 5)
    for reference in (mine, None):
        with torch.no_grad():
            model.weight.copy_(start)
        backend.adam.state.clear()
        model.weight.grad = None if reference is None else reference.clone()
        two_ranks.append(other.flatten())
        norm, applied = backend.step(PARAMS)
        total = other if reference is None else reference + other
        assert applied and norm == pytest.approx(float(total.norm()), rel=1e-6)
        assert compute_relative_difference(model.weight.detach(), adamw(start, [total])) < 1e-5


def test_ddp_reduces_nothing_while_micro_batches_run(monkeypatch, two_ranks):
    """A sum per backward would send each gradient once per micro-batch, so gradients stay local
    until the step.
    """
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, source: None)
    model, trainable = linear()
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), autocast=lambda: torch.autocast("cpu", enabled=False)
    )
    backend = ReplicatedBackend(model, trainable, accelerator)
    x = torch.randn(2, 5)
    for _ in range(2):
        with backend.micro_batch():
            backend.backward(
                backend.wrapped(x).sum()
            )  # a sum over ranks would fail: none is queued
    assert torch.allclose(model.weight.grad, 2 * x.sum(0).expand(3, 5))


def test_every_rank_begins_with_the_weights_of_rank_0(monkeypatch, two_ranks):
    """This includes a weight that is not contiguous, and a buffer."""
    model, trainable = linear()
    model.weight.data = torch.zeros(5, 3).t()
    model.register_buffer("scale", torch.zeros(2))
    sent = {(3, 5): torch.arange(15.0).reshape(3, 5), (2,): torch.tensor([1.0, 2.0])}

    def broadcast(tensor, source):
        assert source == 0 and tensor.is_contiguous()
        tensor.copy_(sent[tuple(tensor.shape)])

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    ReplicatedBackend(model, trainable, SimpleNamespace(device=torch.device("cpu")))
    assert torch.equal(model.weight, sent[3, 5]) and torch.equal(model.scale, sent[2,])


def test_messages_have_a_bounded_size(monkeypatch, two_ranks):
    """Buckets hold at most the bound; a larger tensor is sent where it is, in several messages, and
    one that is not contiguous as a copy. The sums equal those of a single message.
    """
    assert collectives.SUM_BUCKET_BYTES == 256 * 2**20  # as accelerate_configs/ddp.yaml says
    monkeypatch.setattr(collectives, "SUM_BUCKET_BYTES", 16)
    sizes = []
    reduce = torch.distributed.all_reduce

    def record(flat):
        sizes.append(flat.numel())
        reduce(flat)

    monkeypatch.setattr(torch.distributed, "all_reduce", record)
    tensors = [torch.ones(2), torch.ones(2), torch.ones(1), torch.ones(3, 3), torch.ones(3)]
    strided = torch.ones(2, 3).t()
    counts = [4, 1, 4, 4, 1, 3, 4, 2]
    two_ranks += [torch.arange(1.0, n + 1) for n in counts]
    collectives.all_sum_([*tensors, strided])
    assert sizes == counts and not two_ranks
    flat = [t.flatten().tolist() for t in tensors]
    assert flat == [[2, 3], [4, 5], [2], [2, 3, 4, 5, 2, 3, 4, 5, 2], [2, 3, 4]]
    assert strided.tolist() == [[2, 3], [4, 5], [2, 3]]


def test_deepspeed_stage_0_sums_the_gradients_once(monkeypatch, two_ranks):
    """The engine's step, which would reduce again, is not called; test_scaling_models.py counts the
    messages of real processes.
    """
    model, trainable = linear()
    start = model.weight.detach().clone()
    engine = DeepSpeedBackend.__new__(DeepSpeedBackend)
    losses = []
    engine.stage, engine.bf16_stage1 = 0, True
    engine.trainable, engine.adam = trainable, make_adamw(trainable)
    engine.wrapped = SimpleNamespace(
        backward=lambda value: losses.append(float(value)), zero_grad=lambda: None
    )
    engine.optimizer = SimpleNamespace(zero_grad=lambda: None)
    mine, other = torch.randn(3, 5), torch.randn(3, 5)
    engine.backward(torch.tensor(1.5))
    assert losses == [1.5]
    model.weight.grad = mine.clone()
    two_ranks.append(other.flatten())
    norm, applied = engine.step(PARAMS)
    assert applied and norm == pytest.approx(float((mine + other).norm()), rel=1e-6)
    expected = adamw(start, [mine + other])
    assert compute_relative_difference(model.weight.detach(), expected) < 1e-5 and not two_ranks


@pytest.fixture
def worker():
    """Create a worker before the world size is set to 2."""
    return make_worker()


def test_the_sum_of_the_ranks_decides_whether_a_loss_is_finite(worker, two_ranks, monkeypatch):
    """A rank with a finite loss learns of another rank's NaN: all drop the gradients, so that no
    rank continues and waits.
    """
    learner, settings = worker.learners[0], {"temperature": 1.0, "divisor": 1.0, "backward": True}
    monkeypatch.setattr(learner.backend, "micro_batch", nullcontext)
    # the other rank's loss, and whether it failed
    two_ranks += [torch.tensor([1.0, 0.0]), torch.tensor([float("nan"), 0.0])]
    learner.run(random_datums(3), get_loss("ppo"), {}, **settings)
    assert learner.has_gradient
    with pytest.raises(FloatingPointError):
        learner.run(random_datums(3), get_loss("ppo"), {}, **settings)
    assert not learner.has_gradient and all(p.grad is None for p in learner.trainable.values())


def test_a_rank_learns_of_another_ranks_failure(worker, two_ranks, monkeypatch):
    learner, settings = worker.learners[0], {"temperature": 1.0, "divisor": 1.0, "backward": True}
    monkeypatch.setattr(learner.backend, "micro_batch", nullcontext)
    two_ranks += [torch.tensor([1.0, 1.0])]
    with pytest.raises(OtherRankFailed):
        learner.run(random_datums(3), get_loss("ppo"), {}, **settings)
    two_ranks += [torch.tensor([1.0, 0.0])]
    monkeypatch.setattr(learner, "_forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # after it has told the other rank
        learner.run(random_datums(3), get_loss("ppo"), {}, **settings)
    assert not two_ranks


def test_ranks_deal_micro_batches_out_among_themselves(monkeypatch):
    """Every datum is on exactly one rank, all ranks have the same number of micro-batches, and
    padding micro-batches have weight 0.
    """
    worker, datums = make_worker(token_budget=12), random_datums(9)
    learner = worker.learners[0]
    monkeypatch.setattr(collectives, "world", lambda: 3)
    parts = learner.split_batch(datums)
    shares = [list(learner.planner.make_micro_batches(part)) for part in parts]
    assert len({len(share) for share in shares}) == 1
    real = [batch for share in shares for batch in share if batch.scale]
    assert sorted(i for batch in real for i in batch.datum_index) == list(range(9))
    assert sum(batch.scale for batch in real) >= 3


def test_ranks_deal_samples_out_among_themselves():
    costs = [5, 1, 9, 3, 3, 8, 2]
    taken = assign_indices(costs, 3)
    assert sorted(i for mine in taken for i in mine) == list(range(7))
    loads = [sum(costs[i] for i in mine) for mine in taken]
    assert max(loads) - min(loads) <= 3


# ------------------------------------------------------------------------------------------- resume


def test_each_rank_goes_on_with_its_own_generator(monkeypatch, tmp_path):
    """A checkpoint stores the generators of three ranks. Each rank of a resumed run restores its
    generator; a rank without a saved generator restores none.
    """
    worker, states = make_worker(), []
    for seed in range(3):
        torch.manual_seed(seed)
        states.append(torch.get_rng_state())
    monkeypatch.setattr(worker.objects, "gather", lambda reference: states)
    worker.save_state(0, str(tmp_path / "all"), {}, None)
    saved = load_file(str(tmp_path / "all" / "rng.safetensors"))
    assert sorted(saved) == ["rank0", "rank1", "rank2"]
    assert all(torch.equal(saved[f"rank{r}"], states[r]) for r in range(3))
    for rank in (2, 0, 1):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        torch.manual_seed(99)
        worker.load_state(0, str(tmp_path / "all"), True)
        assert torch.equal(torch.get_rng_state(), states[rank])
    torch.manual_seed(99)
    before = torch.get_rng_state()
    learner_checkpoint.load_learner_state(worker.learners[0], tmp_path / "all", True, 7)
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    worker.load_state(0, str(tmp_path / "all"), False)  # weights only: keeps the generator
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizers_state_goes_on_to_the_bit():
    """Both moments and the step count are restored, in the form that every backend returns."""
    torch.manual_seed(0)
    gradients = [torch.randn(3, 5) for _ in range(4)]

    def step(model, optimizer, gradient):
        model.weight.grad = gradient.clone()
        set_adam_params(optimizer, PARAMS)
        optimizer.step()

    whole, trainable = linear()
    optimizer = make_adamw(trainable)
    for gradient in gradients[:2]:
        step(whole, optimizer, gradient)
    resumed, reference = linear(seed=1)
    resumed.load_state_dict(whole.state_dict())
    other = make_adamw(reference)
    state = get_adam_state(optimizer, trainable)
    assert sorted(state) == "weight/exp_avg weight/exp_avg_sq weight/step".split()
    load_adam_state(other, reference, {name: tensor.clone() for name, tensor in state.items()})
    assert get_adam_state(other, reference).keys() == state.keys()
    for gradient in gradients[2:]:
        step(whole, optimizer, gradient), step(resumed, other, gradient)
    assert torch.equal(whole.weight, resumed.weight)


def test_a_sampler_that_is_in_use_keeps_its_weights():
    """A new snapshot is a copy while the old snapshot is in use. An unused snapshot is
    overwritten.
    """
    worker = make_worker()
    worker.snapshot(0, 1)
    first = worker.versions[1].decoder
    before = {name: tensor.clone() for name, tensor in first.weights.buffers.items()}
    with torch.no_grad():
        next(iter(worker.learners[0].trainable.values())).add_(1.0)
    worker.snapshot(0, 2)
    assert worker.versions[2].decoder is not first
    assert all(torch.equal(tensor, before[name]) for name, tensor in first.weights.buffers.items())
    worker.free_version(1), worker.free_version(2)
    latest = worker.latest_decoders[0]
    worker.snapshot(0, 3)
    assert worker.versions[3].decoder is latest and len(worker.versions) == 1
