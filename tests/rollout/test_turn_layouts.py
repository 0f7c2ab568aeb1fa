"""Test many-turn episodes: a datum, packed, padded or with shared prompts, has the gradient of each
turn computed alone in float64.
"""

import numpy as np
import pytest
import torch
from conversations import PARAMS, Writer, groups, load
from games import MadeUp, play, tokenizer
from helpers import GRADIENT_BOUND, call, compute_relative_difference, gradient, make_worker
from test_games import draw_any_reply

from rl.models import load_model
from rl.rollout import rollout, trajectory_to_datums

TOKENIZER = tokenizer()
GAMES = [
    ("guess_number", "plain", {"high": 16}),
    # two seats with separate observations
    ("tic_tac_toe", "plain", {"opponent": "policy"}),
    # prompts that do not always extend the previous answer, which gives several datums
    ("talk", "role_colon, characters", {}),
]


def make_episodes(name: str, renderer: str, settings: dict) -> list:
    if name == "talk":
        made = load(renderer, None)
        writer = Writer(made, 0, ascii_only=True)
        result = rollout(groups(made, renderer, 6), writer, PARAMS, seed=0)
    else:
        policy = MadeUp(TOKENIZER, draw_any_reply, logprob=-3.0)
        result = play(name, policy, groups=4, members=2, renderer=renderer, **settings)
    assert not result.errors
    played = [episode for group in result.groups for episode in group.trajectories_G]
    numbers = np.random.default_rng(3)
    for episode in played:
        episode.advantage = float(numbers.standard_normal())
    return played


def compute_turn_gradient(learner, played: list) -> tuple[torch.Tensor, dict]:
    """Return the gradient of -sum exp(logp - logprob when sampled) advantage, each turn as a
    separate sequence, and logp by (episode, turn).
    """
    weights, twin = learner.model.state_dict(), load_model("tiny:ascii", seed=1).model.double()
    twin.load_state_dict({name: value.double() for name, value in weights.items()})
    results, total = {}, torch.zeros((), dtype=torch.float64)
    for i, episode in enumerate(played):
        for j, turn in enumerate(episode.transitions):
            read, text = turn.ob.to_ints(), turn.ac.tokens
            logits = twin(input_ids=torch.tensor([[*read, *text]])).logits[0, len(read) - 1 : -1]
            logp = torch.log_softmax(logits, -1).gather(-1, torch.tensor(text)[:, None])[:, 0]
            gap = logp - torch.tensor(turn.ac.logprobs).double()
            total = total - (gap.exp() * episode.advantage).sum()
            results[i, j] = logp.detach().numpy()
    total.backward()
    named = dict(twin.named_parameters())
    return torch.cat([named[name].grad.reshape(-1) for name in learner.trainable]), results


@pytest.mark.parametrize(("name", "renderer", "settings"), GAMES)
def test_turns_together_have_the_gradient_of_each_alone(name, renderer, settings):
    played = make_episodes(name, renderer, settings)
    turns = [len(episode.transitions) for episode in played]
    assert max(turns) >= 2 and sum(turns) >= 10
    datums = [trajectory_to_datums(episode) for episode in played]
    assert any(len(made) > 1 for made in datums) == (name == "talk")
    flat = [datum for made in datums for datum in made]
    truth = None
    for layout, budget in [("packed", 150), ("padded", 4096), ("shared", 4096)]:
        worker = make_worker("tiny:ascii", layout=layout, token_budget=budget)
        if truth is None:
            truth, logps = compute_turn_gradient(worker.learners[0], played)
        outputs, _ = call(worker, "forward_backward", 0, flat, "importance_sampling", {}, 1.0, True)
        assert compute_relative_difference(gradient(worker), truth) < GRADIENT_BOUND, layout
        at = iter(outputs)
        for i, made in enumerate(datums):
            read = [next(at)["logprobs"][datum.loss_fn_inputs["mask"].array > 0] for datum in made]
            single = [logps[i, j] for j in range(turns[i])]
            np.testing.assert_allclose(np.concatenate(read), np.concatenate(single), atol=1e-5)


def test_a_wrong_turn_would_be_seen():
    """Masking a single token of a correct batch exceeds the bound."""
    played = make_episodes(*GAMES[0])
    worker = make_worker("tiny:ascii", layout="packed", token_budget=4096)
    truth, _ = compute_turn_gradient(worker.learners[0], played)
    flat = [datum for episode in played for datum in trajectory_to_datums(episode)]
    mask = flat[0].loss_fn_inputs["mask"].array
    mask[mask.nonzero()[0][-1]] = 0.0
    call(worker, "forward_backward", 0, flat, "importance_sampling", {}, 1.0, True)
    assert compute_relative_difference(gradient(worker), truth) > 10 * GRADIENT_BOUND
