"""Guess next tokens by prompt lookup, verify them in one forward, and decide when that pays.

The last tokens of a row (an n-gram) are searched in its prompt and response, and the tokens after
the newest match are drafts (Saxena 2023, "Prompt lookup decoding"; vLLM's method "ngram"). The
engine feeds them together with the row's last token. At each position it samples the token that it
would sample without drafts: the random number of a token depends on its position alone. A draft is
accepted if it equals the sampled token. Shapes: N rows, X entries, L positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from rl.sampler.block_manager import BlockManager
from rl.sampler.decode_state import index_in_row
from rl.sampler.fast_state import FastState
from rl.sampler.running_rows import RunningRows
from rl.sampler.sampling_requests import EngineCounters, SequenceGroup

_LARGEST_NGRAM = 3  # tokens that match before a draft, at most
_SMALLEST_NGRAM = 2
# A step of R rows costs about as much as R + 16 rows, since it reads the weights once (CPU, 0.85M
# and 34M parameters: bench/results/speculative_cpu.csv).
_STEP_COST = 16.0
# The search and the checks of a step take the host about as long as a row takes in a model of this
# many parameters; in smaller models about as long as 4 rows.
_SEARCH_PARAMETERS, _MAX_SEARCH_COST = 4e6, 4.0
_WINDOW = 64.0  # cost of drafting after which its gain is checked
# cost of the steps without drafts after a check that failed, per cost of drafting; it doubles with
# each further check that fails, up to the longest
_PAUSE, _LONGEST_PAUSE = 64.0, 512.0


class DraftController:
    """Decide whether to draft, from counts alone, so that a run can be repeated.

    With d drafts in a step of R rows, the step costs d rows more and samples a accepted tokens more
    than R. It pays if (R + a) / (R + cost + d) > R / (R + cost), that is if a > d R / (R + cost).
    When drafting has cost `_WINDOW` without paying, it pauses for 64 times that cost, the next time
    for 128 times, and so on, at most for 512 times. `search_cost`: of each search for drafts, in
    rows.
    """

    def __init__(self, search_cost: float) -> None:
        self._search_cost = search_cost
        self._spent = self._pause = 0.0
        self._gain = 0.0  # accepted tokens above those that pay for the drafts
        self._next_pause = _PAUSE

    def may_draft(self, rows: int) -> bool:
        """Return whether the next step of this number of rows drafts; count it if it does not."""
        if self._pause <= 0:
            return True
        self._pause -= rows + _STEP_COST
        return False

    def record(self, rows: int, drafted: int, accepted: int) -> None:
        """Count a step of `rows` rows in which tokens were drafted."""
        cost = drafted + self._search_cost
        self._spent += cost
        self._gain += accepted - cost * rows / (rows + _STEP_COST)
        if self._spent >= _WINDOW:
            if self._gain > 0:
                self._next_pause = _PAUSE
            else:
                self._pause = self._next_pause * self._spent
                self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
            self._spent = self._gain = 0.0


class SpeculativeDecoder:
    """Guess up to `num_tokens` tokens of each of `rows` from its own prompt and response, feed them
    to `state`, and keep those that the engine samples too. `blocks`: of a paged cache.
    """

    def __init__(
        self,
        num_tokens: int,
        rows: RunningRows,
        state: FastState,
        blocks: BlockManager | None,
        counters: EngineCounters,
    ):
        # of the whole model, so that all ranks of a tensor-parallel group draft in the same steps
        slices = state.decoder.weights.slices.values()
        parameters = sum(piece.full_shape.numel() for piece in slices)
        self.controller = DraftController(min(_SEARCH_PARAMETERS / parameters, _MAX_SEARCH_COST))
        self.num_tokens = num_tokens
        self._rows, self._state, self._blocks, self._counters = rows, state, blocks, counters
        self._request_ids = np.zeros(0, np.int64)  # of the rows of the last search
        self._prompt_of_row = np.zeros(0, np.int64)
        self._prompts = np.zeros((0, _LARGEST_NGRAM), np.int64)  # aligned on the right
        self._counts = np.zeros(0, np.int64)  # drafts of each row in this step

    def draft(self, groups: Mapping[int, SequenceGroup], limit: int) -> RunningRows | None:
        """Guess tokens of the rows, at most `limit` in total, oldest rows first. Return an entry
        for each token to feed (`RunningRows.expand`), or None if no token is drafted in this step.

        A row gets no draft for the last token that it may sample.
        """
        rows = self._rows
        if limit < 1 or not self.controller.may_draft(len(rows)):
            return None
        history, start, period = self._find_matches(groups)
        room = np.minimum(rows["max_tokens"] - rows["num_sampled"] - 1, self.num_tokens)
        counts = np.where(period > 0, room, 0)
        counts = np.minimum(counts, np.maximum(limit - np.cumsum(counts) + counts, 0))
        fits = self._blocks is None or self._blocks.fits(counts + 1)
        if not counts.any() or not fits:
            self.controller.record(len(rows), 0, 0)
            return None
        drafted = np.repeat(np.arange(len(rows)), counts)
        # a match that overlaps the last tokens repeats with this period
        places = start[drafted] + index_in_row(drafted) % period[drafted]
        rows.write_ahead(drafted, history[drafted, places])
        self._counts = counts
        return rows.expand(np.repeat(np.arange(len(rows)), counts + 1))

    def feed(self, entries: RunningRows) -> Tensor:
        """Feed the newest token of each entry; return the logits after it, [X, V]."""
        self._counters.fed_tokens += len(entries)
        rows = np.repeat(np.arange(len(self._rows)), self._counts + 1)
        return self._state.decode(entries.last_tokens(), rows)

    def accept(self, equal: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Count the sampled tokens of each row up to the first that differs from its draft or ends
        the row, and drop what was fed after it. Return the entry of each row's newest token, [N].

        `equal`, `ended` [X]: whether an entry's sampled token is the draft after it, or ends its
        row.
        """
        counts = self._counts
        first = np.cumsum(counts + 1) - counts - 1  # entry of each row's first position
        index = np.arange(len(equal)) - np.repeat(first, counts + 1)
        goes_on = equal & ~ended & (index < np.repeat(counts, counts + 1))
        accepted = np.minimum.reduceat(np.where(goes_on, len(equal), index), first)
        self._rows.advance(accepted + 1)
        self._state.drop_newest(counts - accepted)
        drafted, kept = int(counts.sum()), int(accepted.sum())
        self._counters.drafted_tokens += drafted
        self._counters.accepted_tokens += kept
        self.controller.record(len(counts), drafted, kept)
        return first + accepted

    def _find_matches(
        self, groups: Mapping[int, SequenceGroup]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens of each row [N, L], the index of the first token after the newest match
        of its longest n-gram [N], and the number of tokens from there on [N] (0: no match).
        """
        rows = self._rows
        if not np.array_equal(rows["request_id"], self._request_ids):
            self._request_ids = rows["request_id"]
            unique, self._prompt_of_row = np.unique(self._request_ids, return_inverse=True)
            self._prompts = align_right([groups[i].request.prompt for i in unique.tolist()])
        prompts = self._prompts[self._prompt_of_row]
        history = np.concatenate([prompts, rows.padded_responses()], 1)
        end = self._prompts.shape[1] + rows["num_sampled"]  # tokens of each row, with its padding
        every = np.arange(len(rows))
        row, place = np.nonzero(
            history[:, _LARGEST_NGRAM - 1 :] == history[every, end - 1][:, None]
        )
        place += _LARGEST_NGRAM - 1
        earlier = place < end[row] - 1
        row, place = row[earlier], place[earlier]
        matched = np.ones(len(row), np.int64)
        for back in range(1, _LARGEST_NGRAM):
            same = history[row, place - back] == history[row, end[row] - 1 - back]
            matched += same & (matched == back)
        # the longest n-gram counts first, then the newest
        rank = np.where(matched >= _SMALLEST_NGRAM, matched * history.shape[1] + place, 0)
        best = np.zeros(len(rows), np.int64)
        np.maximum.at(best, row, rank)
        start = np.where(best > 0, best % history.shape[1] + 1, end)
        return history, start, end - start


def align_right(prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return prompts [P, L], with the tokens before an n-gram at their start: -1."""
    width = max(map(len, prompts)) + _LARGEST_NGRAM - 1
    padded = np.full((len(prompts), width), -1, np.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return padded
