"""Let the ranks of several machines score what they sample, where a stage's reward allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl.client import SampleScorerHandle, ServiceClient
from rl.config import DataSettings
from rl.renderers import Renderer
from rl.rewards import get_reward_machines
from rl.rollout import ScorerSettings
from rl.sanitize import describe_error
from rl.trainer.stage_data import PreparedStage, spreads_rewards


def open_sample_scorers(
    service: ServiceClient,
    prepared: PreparedStage,
    renderer: Renderer,
    judge: Any,
    note: Callable[[str], None],
) -> SampleScorerHandle | None:
    """Return the scorers that the ranks open for the samples of a stage; None if rank 0 has them
    scored.

    `judge`: the model that judges the answers, if any. `note` receives what the ranks cannot do: a
    line for the stage, or for each machine.
    """
    data: DataSettings = prepared.plan.settings.data
    scorer = prepared.scorer
    if scorer is None or get_reward_machines().address is None or not spreads_rewards(data):
        return None  # all ranks are on this machine, or its workers alone score
    reason = _find_obstacle(prepared, judge)
    settings = ScorerSettings(
        renderer, scorer.reward, scorer.timeout, scorer.workers, scorer.variables
    )
    if reason is None:
        sampling, machines = service.count_machines()
        if 2 * sampling < machines:  # all machines together score sooner
            reason = f"only {sampling} of the {machines} machines have processes that sample"
    if reason is None:
        try:
            packed = settings.pack()
        except Exception as error:  # boundary: pickling runs code of the renderer and the reward
            reason = f"it cannot be sent to other processes ({describe_error(error)})"
    if reason is not None:
        note(f"reward {scorer.reward.name}: rank 0 reads every answer and has it scored: {reason}")
        return None
    handle = service.open_scorer(packed)
    for machine, refusal in handle.refusals.items():
        note(f"reward {scorer.reward.name}: rank 0 has the answers of {machine} scored: {refusal}")
    return handle


def _find_obstacle(prepared: PreparedStage, judge: Any) -> str | None:
    """Return why a rank cannot score its own samples of a stage; None if it can."""
    scorer = prepared.scorer
    assert scorer is not None
    if prepared.environment is not None:
        return f"the episodes of {prepared.environment.name} are played on rank 0"
    if scorer.reward.batched:
        return "it takes many answers at once"
    if scorer.place == "thread":
        return "it is no function of a file or module that another process can load"
    if judge is not None:
        return "a judge reads the answers as well"
    return None
