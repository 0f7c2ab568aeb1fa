"""A conservative Q-function over tokens, of the same form as rl.losses: the policy's logits are Q, a value head is V.

Softmax leaves a constant open at each state; the value head V gives it, so that at temperature tau
    Q(s, a) = V(s) + tau log pi(a | s),   logsumexp_a(Q(s, a) / tau) = V(s) / tau.
The policy is then softmax(Q / tau) by construction: what is sampled at temperature 1 is the Q-function's own policy.
A token's state is all tokens before it, so the next state is known: Q has the target  Q^ = r + gamma V^(s'), and r + 0 at the
answer's last token, with V^ the value before the batch's update (the target network of the papers, renewed each batch).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl.loss_terms import actions, where


def ilql(
    logp_T: Tensor, entropy_T: Tensor, inputs: Mapping[str, Tensor], cu_seqlens: Tensor, config: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum over actions of (Q^ - V^ - tau lp)^2 / 2 + cql_coef (tau logsumexp(Q / tau) - Q(a)) + value_coef |kappa - 1(u < 0)| u^2.

    Fields: `advantages` = Q^ - V^(s) and `returns` = Q^, both fixed; u = Q^ - V(s), V attached. The three terms are
    - the TD error of Q, written with V^ on both sides, so that it moves the logits and the last term alone moves V;
    - the conservative term of CQL (Kumar et al., arXiv 2006.04779, equation 4), which with this Q is -tau lp: cross-entropy
      on the actions of the data, as implicit language Q-learning has it (ILQL, Snell et al., arXiv 2206.11871, section 4.2);
    - expectile regression of V towards the best of the data's actions (ILQL, the same section; IQL, arXiv 2110.06169,
      equation 5): kappa 0.5 is the value of the behaviour policy, nearer to 1 that of its best actions.
    ILQL's own form has two Q heads beside the language model, and reweighs the model's probabilities by exp(beta (Q - V)) as
    it samples; here the weights are changed and nothing is added to sampling.
    `tau`: in units of reward (default 0.1). `cql_coef` 0.1, `value_coef` 1, `expectile` kappa 0.8.
    """
    active_T = actions(inputs)
    lp_T, values_T = where(active_T, logp_T), where(active_T, inputs["values"])
    advantages_T, returns_T = where(active_T, inputs["advantages"]), where(active_T, inputs["returns"])
    tau, kappa = config.get("tau", 0.1), config.get("expectile", 0.8)
    td = 0.5 * (advantages_T - tau * lp_T).square().sum()
    conservative = -tau * lp_T.sum()
    gap_T = returns_T - values_T
    value = ((gap_T < 0).to(gap_T.dtype) - kappa).abs() * gap_T.square()
    total = td + config.get("cql_coef", 0.1) * conservative + config.get("value_coef", 1.0) * value.sum()
    metrics = {
        "td_loss:sum": td.detach(),
        "cql:sum": conservative.detach(),
        "value_loss:sum": value.detach().sum(),
        "active_tokens:sum": active_T.sum(),
    }
    return total, metrics
