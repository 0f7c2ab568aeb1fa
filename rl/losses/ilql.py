"""Define a conservative Q-function over tokens, of the same form as rl.losses: the policy's logits
are Q, a value head is V.

With the behavior policy pi_b, which sampled the data, and a temperature tau in units of reward:
    Q(s, a) = V(s) + tau (log pi(a | s) - log pi_b(a | s)),
    so   tau log sum_a pi_b(a | s) exp(Q(s, a) / tau) = V(s)
and pi = pi_b exp((Q - V) / tau). The language model is therefore also the Q-function, and its
policy is sampling at temperature 1; V gives the constant that softmax leaves undetermined.

The state of a token is all tokens before it, so the next state is known. The target of Q is  Q^ = r
+ gamma V^(s'), and r + 0 at the answer's last token, with V^ the value before the batch's update
(the target network of the papers, renewed in each batch).
"""

from __future__ import annotations

from torch import Tensor

from rl.losses.loss_terms import Config, Inputs, Metrics, get_action_mask, select_masked


def ilql(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute sum over actions of [(Q^ - Q)^2 / 2 + cql_coef (logsumexp Q - Q(a))] / tau +
    value_coef |kappa - 1(u < 0)| u^2.

    Fields: `logprobs` q of the behavior policy, `advantages` = Q^ - V^(s) and `returns` = Q^, both
    fixed. The three terms are:
    - the TD error of Q, (Q^ - V^) - tau (lp - q), with V^ on both sides, so that it trains the
      logits, and only the last term trains V;
    - the conservative term of CQL (Kumar et al., arXiv 2006.04779, section 3.2, with the prior
      pi_b), which implicit language Q-learning also has (ILQL, Snell et al., arXiv 2206.11871,
      section 4.2). In this form logsumexp Q is V, and the term is -tau (lp - q);
    - expectile regression of V towards the best of the data's actions, u = Q^ - V(s) (ILQL; IQL,
      arXiv 2110.06169, equation 5): kappa 0.5 gives the value of the behavior policy, a kappa
      nearer to 1 that of its best actions.
    The sum is divided by tau: the gradient of a logprob at pi = pi_b is then -(advantage +
    cql_coef), of the same size as in other losses.

    If V lies above the mean return of the data's actions, advantages are negative on average and
    push probability onto actions without data: cql_coef must outweigh that (0 with expectile 0.8
    loses the data's answers completely).

    The original ILQL has Q heads next to an unchanged language model, and reweights its
    probabilities by exp(beta (Q - V)) at sampling. In this form they are the probabilities of the
    weights, with beta = 1 / tau, and sampling needs no addition. Defaults: `tau` 0.1, `cql_coef`
    0.3, `value_coef` 1, `expectile` kappa 0.7.
    """
    active_T = get_action_mask(inputs)
    gap_T = select_masked(active_T, logp_T) - select_masked(active_T, inputs["logprobs"])
    advantages_T, returns_T = (
        select_masked(active_T, inputs["advantages"]),
        select_masked(active_T, inputs["returns"]),
    )
    tau, kappa = config.get("tau", 0.1), config.get("expectile", 0.7)
    td = 0.5 * (advantages_T - tau * gap_T).square().sum()
    conservative = -tau * gap_T.sum()
    u_T = returns_T - select_masked(active_T, inputs["values"])
    value = (((u_T < 0).to(u_T.dtype) - kappa).abs() * u_T.square()).sum()
    total = (td + config.get("cql_coef", 0.3) * conservative) / tau + config.get(
        "value_coef", 1.0
    ) * value
    metrics = {
        "td_loss:sum": td.detach(),
        "cql:sum": conservative.detach(),
        "value_loss:sum": value.detach(),
        "active_tokens:sum": active_T.sum(),
    }
    return total, metrics
