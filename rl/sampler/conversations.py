"""Conversations that stay in an engine's cache between their turns: what was read and drawn is not
read again.
"""

from __future__ import annotations

import numpy as np
import torch

from rl.sampler.cache import DecodeState, compaction
from rl.sampler.jobs import Job, Prompt
from rl.sampler.requests import Counters
from rl.sampler.rows import Rows


class Conversations:
    """An engine's part that keeps them. They wait among its prompts, and make room where a request
    that waits has none.
    """

    kv_cache_tokens: int
    counters: Counters
    _state: DecodeState
    _prompts: list[Prompt]
    _rows: Rows

    @torch.inference_mode()
    def forget(self, conversation: str) -> None:
        """It has no further turn."""
        self._forget_conversations(conversation)

    def _forget_conversations(self, name: str | None = None) -> bool:
        """Of that name, or all: whether there were any in the cache."""
        gone = [
            p.conversation is not None and name in (None, p.conversation) for p in self._prompts
        ]
        if any(gone):
            source = compaction(~np.array(gone, np.bool_))
            self._prompts = [self._prompts[slot] for slot in source]
            self._state.leave(np.arange(len(self._rows)), source)
        return any(gone)

    def _kept(self, job: Job) -> int | None:
        """The slot that holds a job's conversation so far, where it is in the cache and goes on as
        it was.
        """
        name = job.request.conversation
        if name is None or job.request.scores_prompt:
            return None
        for slot, prompt in enumerate(self._prompts):
            # By its key as well: another request that comes in now may go on with it.
            same = (prompt.conversation, prompt.weights, prompt.key) == (
                name,
                job.request.weights,
                ("of", name),
            )
            if same and prompt.tokens == job.key[0][: len(prompt.tokens)] != job.key[0]:
                return slot
        return None

    def _extend(self, jobs: list[tuple[Job, int]]) -> None:
        """Read what is new of these conversations, at the end of what is there."""
        if not jobs:
            return
        news = [job.key[0][len(self._prompts[slot].tokens) :] for job, slot in jobs]
        for (job, slot), new, logits_V in zip(
            jobs, news, self._state.extend([slot for _, slot in jobs], news), strict=True
        ):
            self.counters.kept_tokens += len(self._prompts[slot].tokens)
            self.counters.prefill_tokens += len(new)
            self._prompts[slot] = Prompt(job.key, logits_V, None, job.request.weights)
        self.counters.prefill_prompts += len(jobs)

    def _keep(self, row: int, job: Job, tokens: list[int]) -> None:
        """What an ended row has read stays for its conversation's next turn, where there is room."""
        name, state = job.request.conversation, self._state
        if name is None or not state.extends or job.request.num_samples > 1:
            return
        if self._prompts[int(state.prompt_of_row[row])].key[0] == "of other weights":
            return  # new weights came while it was drawn: what it read is not theirs
        length = len(job.key[0]) + int(state.response_lengths[row])
        longest = max(int(state.prompt_lengths.max(initial=0)), length)
        needed = (
            len(self._prompts) + 1,
            longest,
            len(self._rows),
            int(self._rows["max_tokens"].max(initial=1)) - 1,
        )
        if state.cost(*needed) > self.kv_cache_tokens:
            return
        self._forget_conversations(name)  # an earlier turn's: a name stands for one
        state.reserve(*needed)
        state.keep_row(row)
        seen = (*job.key[0], *tokens[job.begun : job.begun + int(state.response_lengths[row])])
        self._prompts.append(
            Prompt(("of", name), torch.empty(0), None, job.request.weights, name, seen)
        )
