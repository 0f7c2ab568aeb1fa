"""Score countdown answers: an expression that uses each of the numbers at most once and equals the
target.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

from rl.errors import UserError
from rl.rewards.math_reward import extract_marked_answer
from rl.rewards.math_text import evaluate_arithmetic
from rl.rewards.reward_calls import Meta, make_formatted_result
from rl.rewards.reward_registry import RewardResult, register_reward

_TAG = re.compile(r"<answer>([^<]{1,1000})</answer>")


@register_reward("countdown", bounded=True)
def countdown(prompt: str, response: str, meta: Meta = None) -> RewardResult:
    """Return correct + 0.1 (format - 1). Best 1, worst -0.1.

    `format`: an expression of + - * / and brackets is in \\boxed{}, after "####" or in
    <answer></answer>. `correct`: the expression also uses only meta["numbers"], each at most once,
    and equals meta["target"].
    """
    if meta is None or "numbers" not in meta or "target" not in meta:
        raise UserError(
            f"countdown needs meta['numbers'] and meta['target'], it has {sorted(meta or {})}"
        )
    tagged = _TAG.findall(response)
    answer = extract_marked_answer(response) or (tagged[-1] if tagged else None)
    evaluation = None if answer is None else evaluate_arithmetic(answer)
    correct = False
    if evaluation is not None:
        value, used = evaluation
        correct = value == Fraction(meta["target"]) and not Counter(used) - Counter(
            int(number) for number in meta["numbers"]
        )
    return make_formatted_result(float(correct), evaluation is not None)
