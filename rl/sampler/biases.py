"""Logits as requests want them before anything is drawn: a bias for some tokens, and no stop ids
before `min_tokens`.

Shapes: N rows, V vocabulary, M rows of one request.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rl.sampler.jobs import Job
from rl.sampler.rows import Rows
from rl.sampler.token_sampling import RowSettings, draw


def biased_rows(rows: Rows) -> np.ndarray:
    """Return whether each row's next token is drawn from other logits than the model's, [N] bool."""
    return rows["biased"] | (rows["drawn"] < rows["min_tokens"])


def draw_biased(
    logits_NV: Tensor, uniform_N: Tensor, settings: RowSettings, rows: Rows, jobs: Mapping[int, Job]
) -> tuple[Tensor, Tensor]:
    """`draw`, after the biases of the rows that have any. Their logprobs are of what was drawn
    from, or with `untruncated_logprobs` of the model's own distribution at the temperature.
    """
    changed_N = biased_rows(rows)
    if not changed_N.any():
        return draw(logits_NV, uniform_N, settings)
    tokens_N, logprobs_N = draw(apply_biases(logits_NV, rows, jobs, changed_N), uniform_N, settings)
    if (whole_N := changed_N & rows["untruncated_logprobs"]).any():
        index_M, whole_M = whole_logprobs(logits_NV, tokens_N, rows, whole_N)
        logprobs_N[index_M] = whole_M
    return tokens_N, logprobs_N


def apply_biases(
    logits_NV: Tensor, rows: Rows, jobs: Mapping[int, Job], changed_N: np.ndarray
) -> Tensor:
    """Return float32 logits with the biases added, and -inf in place of the stop ids of rows that
    may not stop yet.
    """
    adjusted_NV = logits_NV.float().clone()
    owners, early = rows["job"], rows["drawn"] < rows["min_tokens"]
    for job_id in np.unique(owners[changed_N]).tolist():
        job, mine = jobs[job_id], owners == job_id
        if job.request.params.logit_bias:
            index_M = _index(mine, adjusted_NV)
            tokens = torch.tensor(list(job.request.params.logit_bias), device=adjusted_NV.device)
            bias = torch.tensor(
                list(job.request.params.logit_bias.values()),
                dtype=torch.float32,
                device=adjusted_NV.device,
            )
            adjusted_NV[index_M[:, None], tokens] += bias
        if job.stop_ids and (mine & early).any():
            stops = torch.tensor(list(job.stop_ids), device=adjusted_NV.device)
            adjusted_NV[_index(mine & early, adjusted_NV)[:, None], stops] = -torch.inf
    return adjusted_NV


def whole_logprobs(
    logits_NV: Tensor, tokens_N: Tensor, rows: Rows, chosen_N: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return the indices of the chosen rows, and the logprobs of their tokens in the model's own
    distribution at the temperature.

    A greedy row's is that at temperature 1.
    """
    index_M = _index(chosen_N, logits_NV)
    temperature = np.where(rows["temperature"] == 0, 1.0, rows["temperature"])[chosen_N]
    scaled_MV = (
        logits_NV[index_M].float()
        / torch.tensor(temperature, dtype=torch.float32, device=logits_NV.device)[:, None]
    )
    return index_M, scaled_MV.log_softmax(-1).gather(1, tokens_N[index_M, None]).squeeze(1)


def _index(rows_N: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(rows_N)).to(like.device)
