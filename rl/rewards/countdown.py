"""The reward of countdown: an expression of the given numbers, each at most once, that comes out at
the target.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rl.errors import UserError
from rl.rewards.arithmetic import evaluated
from rl.rewards.maths import marked_answer
from rl.rewards.registry import RewardResult, register_reward

_TAG = re.compile(r"<answer>([^<]{1,1000})</answer>")


@register_reward("countdown", bounded=True)
def countdown(prompt: str, response: str, meta: Mapping[str, Any] | None = None) -> RewardResult:
    """correct + 0.1 (format - 1): `format` where an expression of + - * / and brackets stands in
    \\boxed{}, after "####" or in <answer></answer>, `correct` where it also uses only
    meta["numbers"], each at most once, and equals meta["target"]. Best 1, worst -0.1.
    """
    if meta is None or "numbers" not in meta or "target" not in meta:
        raise UserError(
            f"countdown needs meta['numbers'] and meta['target'], it has {sorted(meta or {})}"
        )
    tagged = _TAG.findall(response)
    marked = marked_answer(response) or (tagged[-1] if tagged else None)
    found = None if marked is None else evaluated(marked)
    correct = False
    if found is not None:
        value, used = found
        correct = value == Fraction(meta["target"]) and not Counter(used) - Counter(
            int(number) for number in meta["numbers"]
        )
    has_format = float(found is not None)
    return RewardResult(
        float(correct) + 0.1 * (has_format - 1.0), {"correct": float(correct), "format": has_format}
    )
