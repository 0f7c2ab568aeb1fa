"""Sample a token and its logprob: biases, penalties, temperature, truncation, inverse CDF.

All rows are processed at once, on the logits' device. Shapes: N rows, V vocabulary, B blocks of the
vocabulary, M rows of one request. Softmax and logprobs are in float32 whatever the logits' dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl.sampler import cpu_kernels
from rl.sampler.running_rows import RunningRows
from rl.sampler.sampling_requests import SamplingRequest, SequenceGroup
from rl.sampler.token_counts import MAX_COUNT, MAX_COUNTS, PENALTIES
from rl.types import TRUNCATION_DEFAULTS

# vocabularies above this size are searched in two levels: first the block, then the token in it
_BLOCK = 512
# most biased tokens of a request that device steps hold (vLLM's limit of logit_bias)
MAX_BIASES = 1024


@dataclass(frozen=True, slots=True)
class TruncatedRows:
    """Hold the indices of the truncated rows [M], and their limits as `find_limits` returns them,
    without min-p if no row has it.
    """

    rows: Tensor
    limits: Tensor


@dataclass(frozen=True, slots=True)
class RowSamplingSettings:
    """Hold the sampling settings of each row. None means the common case, which then costs nothing.

    `temperature_N` float32, 1 for greedy rows (None: 1 everywhere); `greedy_N` bool (None:
    nowhere); `truncation` of some rows.
    """

    temperature_N: Tensor | None = None
    greedy_N: Tensor | None = None
    truncation: TruncatedRows | None = None


# The sampling parameters of the running rows, an array for each parameter.
RowColumns = RunningRows | Mapping[str, np.ndarray]


def find_truncated_rows(rows: RowColumns, vocab: int) -> np.ndarray:
    """Return whether the distribution of each row is truncated, bool [N].

    Greedy rows keep their token under any truncation, and report the logprob of the whole
    distribution.
    """
    limits_rank = (rows["top_k"] >= 1) & (rows["top_k"] < vocab)
    truncated = limits_rank | (rows["top_p"] < 1) | (rows["min_p"] > 0)
    return truncated & (rows["temperature"] != 0)


def find_limits(rows: RowColumns, index: np.ndarray, vocab: int) -> np.ndarray:
    """Return top-k (the vocabulary size for none), top-p and min-p of the rows `index` [M], float64
    [3, M]. Greedy rows have none (see `find_truncated_rows`).
    """
    greedy = rows["temperature"][index] == 0
    limits = np.array(
        [np.where(greedy, none, rows[name][index]) for name, none in TRUNCATION_DEFAULTS.items()]
    )
    top_k = limits[0]
    top_k[(top_k < 1) | (top_k > vocab)] = vocab
    return limits


def find_adjusted_rows(rows: RowColumns, ahead: int = 0) -> np.ndarray:
    """Return whether the next token of each row is sampled from adjusted logits, bool [N]. `ahead`:
    tokens of each row that will be sampled before it.
    """
    is_early = rows["num_sampled"] + ahead < rows["min_tokens"]
    return rows["penalizes"] | (rows["num_biases"] > 0) | is_early


def find_host_rows(rows: RowColumns, vocab: int) -> np.ndarray:
    """Return which rows the steps of the device cannot sample, bool [N]: rows with more than
    `MAX_BIASES` biases, rows with penalties of more than `MAX_COUNT` tokens, and all rows with
    penalties if there are too many for the table of their tokens (`MAX_COUNTS`).
    """
    penalizes = rows["penalizes"]
    exceeds = (rows["max_tokens"] > MAX_COUNT) | (int(penalizes.sum()) * vocab > MAX_COUNTS)
    return (penalizes & exceeds) | (rows["num_biases"] > MAX_BIASES)


def make_row_settings(rows: RowColumns, *, vocab: int, device: torch.device) -> RowSamplingSettings:
    """Return the settings of the running rows as tensors on the device."""
    temperature = rows["temperature"].astype(np.float32)
    greedy, truncation = temperature == 0, None
    plain_temperature = bool((temperature[~greedy] == 1).all())
    cut_N = find_truncated_rows(rows, vocab)
    if cut_N.any():
        index = np.flatnonzero(cut_N)
        limits = find_limits(rows, index, vocab)
        limits = limits if limits[2].any() else limits[:2]
        truncation = TruncatedRows(
            torch.from_numpy(index).to(device), torch.from_numpy(limits).to(device)
        )
    return RowSamplingSettings(
        None
        if plain_temperature
        else torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(device),
        torch.from_numpy(greedy).to(device) if greedy.any() else None,
        truncation,
    )


def sample_next_tokens(
    logits_NV: Tensor,
    uniform_N: Tensor,
    settings: RowSamplingSettings,
    rows: RunningRows,
    groups: Mapping[int, SequenceGroup],
) -> tuple[Tensor, Tensor]:
    """Return `sample_tokens` of the logits, after adjusting those of the rows that require it.

    The logprobs of these rows refer to the adjusted distribution. With `untruncated_logprobs` the
    logprobs of adjusted and truncated rows refer to the unmodified logits at the temperature.
    """
    changed_N = find_adjusted_rows(rows)
    adjusted_NV = (
        adjust_logits(logits_NV, rows, groups, changed_N) if changed_N.any() else logits_NV
    )
    tokens_N, logprobs_N = sample_tokens(adjusted_NV, uniform_N, settings)
    if (whole_N := rows["untruncated_logprobs"]).any():
        whole_N = whole_N & (changed_N | find_truncated_rows(rows, logits_NV.shape[1]))
        index_M, temperature_M = _row_indices(whole_N, logits_NV), rows["temperature"][whole_N]
        divisor = np.where(temperature_M == 0, 1.0, temperature_M).astype(np.float32)
        scaled_MV = logits_NV[index_M].float()
        scaled_MV = scaled_MV / torch.from_numpy(divisor).to(scaled_MV.device)[:, None]
        logprobs_N[index_M] = compute_untruncated_logprobs(scaled_MV, tokens_N[index_M])
    return tokens_N, logprobs_N


def adjust_logits(
    logits_NV: Tensor, rows: RunningRows, groups: Mapping[int, SequenceGroup], changed_N: np.ndarray
) -> Tensor:
    """Return float32 logits with biases and penalties, and -inf for stop ids in rows that may not
    stop yet.
    """
    adjusted_NV = logits_NV.float().clone()
    owners, early = rows["request_id"], rows["num_sampled"] < rows["min_tokens"]
    device = adjusted_NV.device
    for request_id in np.unique(owners[changed_N]).tolist():
        group, group_rows_N = groups[request_id], owners == request_id
        params, index_M = group.request.params, _row_indices(group_rows_N, adjusted_NV)
        if params.logit_bias:
            tokens = torch.tensor(list(params.logit_bias), device=device)
            bias = torch.tensor(
                list(params.logit_bias.values()), dtype=torch.float32, device=device
            )
            adjusted_NV[index_M[:, None], tokens] += bias
        if params.penalizes:
            adjusted_NV[index_M] = penalize_repeats(
                adjusted_NV[index_M],
                [rows.response(row)[0] for row in np.flatnonzero(group_rows_N).tolist()],
                group.request,
            )
        if group.stop.token_ids and (group_rows_N & early).any():
            ids = [i for i in group.stop.token_ids if i < adjusted_NV.shape[1]]
            stops = torch.tensor(ids, dtype=torch.int64, device=device)
            early_M = _row_indices(group_rows_N & early, adjusted_NV)
            adjusted_NV[early_M[:, None], stops] = -torch.inf
    return adjusted_NV


def penalize_repeats(
    logits_MV: Tensor, responses: Sequence[np.ndarray], request: SamplingRequest
) -> Tensor:
    """Return the logits of a request's rows after its penalties. `responses`: the tokens of each
    row so far.
    """
    params, vocab, device = request.params, logits_MV.shape[1], logits_MV.device
    places = np.concatenate([row * vocab + tokens for row, tokens in enumerate(responses)])
    counts_MV = torch.from_numpy(places).to(device).bincount(minlength=logits_MV.numel())
    counts_MV = counts_MV.view_as(logits_MV)
    repeated_MV = None
    if params.repetition_penalty != 1:
        repeated_MV = counts_MV > 0
        repeated_MV[:, torch.tensor(list(request.prompt), device=device)] = True
    penalties = [getattr(params, name) for name in PENALTIES]
    return penalize_logits(logits_MV, counts_MV, repeated_MV, *penalties)


def penalize_logits(
    logits_MV: Tensor,
    counts_MV: Tensor,
    repeated_MV: Tensor | None,
    repetition: float | Tensor,
    frequency: float | Tensor,
    presence: float | Tensor,
) -> Tensor:
    """Return the logits after penalties (see `SamplingParams`), which are numbers or [M, 1].
    `counts_MV`: how often the response holds each token; `repeated_MV`: whether response or prompt
    hold it (None: `repetition` is 1).
    """
    if repeated_MV is not None:
        scaled_MV = torch.where(logits_MV > 0, logits_MV / repetition, logits_MV * repetition)
        logits_MV = torch.where(repeated_MV, scaled_MV, logits_MV)
    logits_MV = logits_MV - frequency * counts_MV
    return logits_MV - presence * (counts_MV > 0)


def compute_untruncated_logprobs(scaled_MV: Tensor, tokens_M: Tensor) -> Tensor:
    """Return the logprobs of tokens in the softmax of the logits over the temperature, float32."""
    shifted_MV = scaled_MV - scaled_MV.amax(-1, keepdim=True)
    sum_M = shifted_MV.exp().sum(-1, dtype=torch.float64)
    return shifted_MV.gather(1, tokens_M.unsqueeze(1)).squeeze(1) - sum_M.log().float()


def _row_indices(rows_N: np.ndarray, like: Tensor) -> Tensor:
    """Return the indices of the selected rows on the device of `like`."""
    return torch.from_numpy(np.flatnonzero(rows_N)).to(like.device)


def sample_tokens(
    logits_NV: Tensor, uniform_N: Tensor, settings: RowSamplingSettings
) -> tuple[Tensor, Tensor]:
    """Sample a token (int64) and its logprob (float32) for each row; `uniform_N` float64 in [0, 1).

    The logprob is that of the distribution the token was sampled from: softmax(logits / T),
    renormalised over its support if min-p, top-k or top-p truncate it. Greedy rows take the largest
    logit (ties: the lowest id) and report the untempered logprob.

    On a CPU a single call of `CpuKernels` samples the rows without truncation; torch operations
    handle truncated rows and other devices. A row's sample depends only on its own settings, not on
    the other rows of the batch.
    """
    temperature_N, greedy_N = settings.temperature_N, settings.greedy_N
    logits_NV = logits_NV.float()
    kernels = (
        cpu_kernels.load_cpu_kernels()
        if logits_NV.device.type == "cpu" and type(logits_NV) is Tensor
        else None
    )
    cut = settings.truncation  # none of these rows is greedy
    if kernels is None:
        # `unsqueeze`, since indexing queries the device even of fake tensors
        scaled_NV = logits_NV if temperature_N is None else logits_NV / temperature_N.unsqueeze(1)
        if cut is not None:
            cut_RV = truncate_logits(scaled_NV[cut.rows], *cut.limits.unbind(0))
            scaled_NV = scaled_NV.index_copy(0, cut.rows, cut_RV)
        return sample_with_torch(scaled_NV, uniform_N, greedy_N)
    token_N, logprob_N = kernels.sample(
        logits_NV.contiguous(), uniform_N.double().contiguous(), temperature_N, greedy_N
    )
    if cut is not None:
        rows, cut_RV = cut.rows, logits_NV[cut.rows]
        cut_RV = cut_RV if temperature_N is None else cut_RV / temperature_N[rows, None]
        cut_RV = truncate_logits(cut_RV, *cut.limits.unbind(0))
        token_N[rows], logprob_N[rows] = sample_with_torch(cut_RV, uniform_N[rows])
    return token_N, logprob_N


def sample_with_torch(
    scaled_NV: Tensor, uniform_N: Tensor, greedy_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample from the softmax of float32 logits on any device, as `sample_tokens` does."""
    largest_N1 = scaled_NV.amax(-1, keepdim=True)
    token_N, sum_N = sample_inverse_cdf((scaled_NV - largest_N1).exp_(), uniform_N)
    if greedy_N is not None:
        token_N = torch.where(greedy_N, scaled_NV.argmax(-1), token_N)
    shifted_N1 = scaled_NV.gather(1, token_N.unsqueeze(1)) - largest_N1
    return token_N, shifted_N1.squeeze(1) - sum_N.log().float()


def truncate_logits(
    scaled_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor | None = None
) -> Tensor:
    """Set logits to -inf outside min-p, then outside top-k, then outside top-p of the remaining
    tokens.

    Min-p keeps a token with a probability of at least min_p times the largest. Top-k and top-p rank
    tokens by logit, ties by the lower id. Top-p keeps a token while the probability before it is
    below p: the smallest set that reaches p, and always the first token. A p of 1 keeps all, though
    the sum of the rounded probabilities may exceed 1.
    """
    kept_NV, order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
    # `unsqueeze` and `narrow`: see `sample_tokens`
    rank_V = torch.arange(scaled_NV.shape[-1], device=scaled_NV.device)
    if min_p_N is not None:
        # relative to the largest probability
        share_NV = (kept_NV - kept_NV.narrow(1, 0, 1)).double().exp_()
        kept_NV.masked_fill_(share_NV < min_p_N.unsqueeze(1), -torch.inf)
        del share_NV  # as large as two copies of the logits
    kept_NV.masked_fill_(rank_V >= top_k_N.unsqueeze(1), -torch.inf)
    probability_NV = kept_NV.softmax(-1).double()
    before_NV = probability_NV.cumsum(-1).sub_(probability_NV)
    top_p_N = top_p_N.masked_fill(top_p_N >= 1, torch.inf)
    kept_NV.masked_fill_((before_NV >= top_p_N.unsqueeze(1)) & (rank_V > 0), -torch.inf)
    return torch.empty_like(scaled_NV).scatter_(-1, order_NV, kept_NV)


def sample_inverse_cdf(weight_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token at which the cumulative weight passes u times its total, and that total.

    A token of weight zero is never returned. The weights are unnormalised probabilities. Sums are
    in float64; a large vocabulary is searched block by block, so that a cumulative sum over all of
    it is never stored.
    """
    vocab = weight_NV.shape[-1]
    if vocab <= _BLOCK:
        cumulative_NV = weight_NV.cumsum(-1, dtype=torch.float64)
        total_N = cumulative_NV.select(1, -1)
        return _first_above(cumulative_NV, uniform_N * total_N), total_N
    blocks = -(-vocab // _BLOCK)
    weight_NBb = torch.nn.functional.pad(weight_NV, (0, blocks * _BLOCK - vocab)).view(
        -1, blocks, _BLOCK
    )
    cumulative_NB = weight_NBb.sum(-1, dtype=torch.float64).cumsum(-1)
    total_N = cumulative_NB.select(1, -1)
    target_N = uniform_N * total_N
    block_N = _first_above(cumulative_NB, target_N)
    before_N = (
        cumulative_NB.gather(1, (block_N - 1).clamp_min(0).unsqueeze(1))
        .squeeze(1)
        .masked_fill(block_N < 1, 0.0)
    )
    inside_Nb = (
        weight_NBb.gather(1, block_N.view(-1, 1, 1).expand(-1, 1, _BLOCK))
        .squeeze(1)
        .cumsum(-1, dtype=torch.float64)
    )
    token_N = block_N * _BLOCK + _first_above(inside_Nb, target_N - before_N)
    return token_N.clamp_max(vocab - 1), total_N


def _first_above(cumulative_NX: Tensor, target_N: Tensor) -> Tensor:
    """Return the first index with a cumulative sum above the target; its weight is not zero.

    Rounding may raise a target to the total, which no sum exceeds; the target is kept 1 unit below.
    Sums that are NaN give some index within bounds, and their logprob reveals them (see `Engine`).
    """
    total_N = cumulative_NX.select(1, -1)
    below_N = torch.minimum(target_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    index_N = torch.searchsorted(cumulative_NX, below_N.unsqueeze(1), right=True).squeeze(1)
    return index_N.clamp_max(cumulative_NX.shape[-1] - 1)
