"""Modify logits before sampling: add token biases, and mask stop ids before `min_tokens`.

Shapes: N rows, V vocabulary, M rows of one request.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rl.sampler.running_rows import RunningRows
from rl.sampler.sequence_groups import SequenceGroup
from rl.sampler.token_sampling import RowSamplingSettings, sample_tokens


def find_biased_rows(rows: RunningRows) -> np.ndarray:
    """Return whether the next token of each row is sampled from modified logits, bool [N]."""
    return rows["biased"] | (rows["drawn"] < rows["min_tokens"])


def sample_with_biases(
    logits_NV: Tensor,
    uniform_N: Tensor,
    settings: RowSamplingSettings,
    rows: RunningRows,
    groups: Mapping[int, SequenceGroup],
) -> tuple[Tensor, Tensor]:
    """Apply the biases of the rows that have biases, then call `sample_tokens`.

    The logprobs of these rows refer to the modified distribution. With `untruncated_logprobs` they
    refer to the distribution of the unmodified logits at the temperature.
    """
    changed_N = find_biased_rows(rows)
    if not changed_N.any():
        return sample_tokens(logits_NV, uniform_N, settings)
    tokens_N, logprobs_N = sample_tokens(
        apply_biases(logits_NV, rows, groups, changed_N), uniform_N, settings
    )
    if (whole_N := changed_N & rows["untruncated_logprobs"]).any():
        index_M, whole_M = compute_untruncated_logprobs(logits_NV, tokens_N, rows, whole_N)
        logprobs_N[index_M] = whole_M
    return tokens_N, logprobs_N


def apply_biases(
    logits_NV: Tensor, rows: RunningRows, groups: Mapping[int, SequenceGroup], changed_N: np.ndarray
) -> Tensor:
    """Return float32 logits with the biases added.

    The logits of stop ids are -inf in rows that may not stop yet.
    """
    adjusted_NV = logits_NV.float().clone()
    owners, early = rows["job"], rows["drawn"] < rows["min_tokens"]
    for request_id in np.unique(owners[changed_N]).tolist():
        group, group_rows_N = groups[request_id], owners == request_id
        if group.request.params.logit_bias:
            index_M = _row_indices(group_rows_N, adjusted_NV)
            tokens = torch.tensor(list(group.request.params.logit_bias), device=adjusted_NV.device)
            bias = torch.tensor(
                list(group.request.params.logit_bias.values()),
                dtype=torch.float32,
                device=adjusted_NV.device,
            )
            adjusted_NV[index_M[:, None], tokens] += bias
        if group.stop_ids and (group_rows_N & early).any():
            stops = torch.tensor(list(group.stop_ids), device=adjusted_NV.device)
            adjusted_NV[
                _row_indices(group_rows_N & early, adjusted_NV)[:, None], stops
            ] = -torch.inf
    return adjusted_NV


def compute_untruncated_logprobs(
    logits_NV: Tensor, tokens_N: Tensor, rows: RunningRows, chosen_N: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return the indices of the chosen rows and the logprobs of their tokens.

    The logprobs refer to the distribution of the unmodified logits at the temperature. The
    temperature of a greedy row is 1.
    """
    index_M = _row_indices(chosen_N, logits_NV)
    temperature = np.where(rows["temperature"] == 0, 1.0, rows["temperature"])[chosen_N]
    scaled_MV = (
        logits_NV[index_M].float()
        / torch.tensor(temperature, dtype=torch.float32, device=logits_NV.device)[:, None]
    )
    return index_M, scaled_MV.log_softmax(-1).gather(1, tokens_N[index_M, None]).squeeze(1)


def _row_indices(rows_N: np.ndarray, like: Tensor) -> Tensor:
    """Return the indices of the selected rows on the device of `like`."""
    return torch.from_numpy(np.flatnonzero(rows_N)).to(like.device)
