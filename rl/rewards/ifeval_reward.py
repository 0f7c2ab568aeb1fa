"""Define the reward `ifeval`: whether an answer follows the instructions of its prompt."""

from __future__ import annotations

from rl.errors import UserError
from rl.rewards.instruction_checks import bind_instructions, follow_instructions
from rl.rewards.reward_calls import Meta, RewardResult
from rl.rewards.reward_registry import register_reward

_METRICS = ("correct", "loose", "instructions", "instructions_strict", "instructions_loose")


@register_reward("ifeval", reports=_METRICS)
def ifeval(prompt: str, response: str, meta: Meta = None) -> RewardResult:
    """Return 1 if the response follows all instructions of meta["instruction_id_list"], whose
    parameters are meta["kwargs"], else 0 (Zhou et al. 2023, arXiv 2311.07911).

    Metrics: `correct` (strict) and `loose`: all instructions are followed. `instructions`,
    `instructions_strict`, `instructions_loose`: how many there are, and are followed.
    """
    row = meta or {}
    try:
        instructions = bind_instructions(row.get("instruction_id_list"), row.get("kwargs"))
    except ValueError as error:
        raise UserError(f"the problem has no valid instructions: {error}") from error
    strict = follow_instructions(instructions, response)
    loose = follow_instructions(instructions, response, loose=True)
    values = (all(strict), all(loose), len(instructions), sum(strict), sum(loose))
    return RewardResult(float(all(strict)), dict(zip(_METRICS, map(float, values), strict=True)))
