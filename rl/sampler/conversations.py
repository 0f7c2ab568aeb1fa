"""Cache conversations between their turns, so that earlier tokens are not prefilled again."""

from __future__ import annotations

import numpy as np
import torch

from rl.sampler.cache import DecodeState, compaction
from rl.sampler.jobs import Job, Prompt
from rl.sampler.requests import Counters
from rl.sampler.rows import Rows


class Conversations:
    """Cache the conversations of an engine; a base class of `Engine`.

    Cached conversations are stored among the engine's prompts. They are evicted if a waiting
    request does not fit otherwise.
    """

    kv_cache_tokens: int
    counters: Counters
    _state: DecodeState
    _prompts: list[Prompt]
    _rows: Rows

    @torch.inference_mode()
    def forget(self, conversation: str) -> None:
        """Evict a conversation that has no further turn."""
        self._forget_conversations(conversation)

    def _forget_conversations(self, name: str | None = None) -> bool:
        """Evict the conversation of that name, or all. Returns whether the cache held any."""
        dropped = [
            p.conversation is not None and name in (None, p.conversation) for p in self._prompts
        ]
        if any(dropped):
            source = compaction(~np.array(dropped, np.bool_))
            self._prompts = [self._prompts[slot] for slot in source]
            self._state.leave(np.arange(len(self._rows)), source)
        return any(dropped)

    def _kept(self, job: Job) -> int | None:
        """Return the slot that holds the cached prefix of a group's conversation.

        Returns None if the conversation is not in the cache, or if its tokens differ from the
        prompt.
        """
        name = job.request.conversation
        if name is None or job.request.scores_prompt:
            return None
        for slot, prompt in enumerate(self._prompts):
            # Also compare the key: another request admitted now may have extended the conversation.
            same = (prompt.conversation, prompt.weights, prompt.key) == (
                name,
                job.request.weights,
                ("of", name),
            )
            if same and prompt.tokens == job.key[0][: len(prompt.tokens)] != job.key[0]:
                return slot
        return None

    def _extend(self, jobs: list[tuple[Job, int]]) -> None:
        """Prefill the new tokens of these conversations after their cached tokens."""
        if not jobs:
            return
        suffixes = [group.key[0][len(self._prompts[slot].tokens) :] for group, slot in jobs]
        for (group, slot), suffix, logits_V in zip(
            jobs, suffixes, self._state.extend([slot for _, slot in jobs], suffixes), strict=True
        ):
            self.counters.kept_tokens += len(self._prompts[slot].tokens)
            self.counters.prefill_tokens += len(suffix)
            self._prompts[slot] = Prompt(group.key, logits_V, None, group.request.weights)
        self.counters.prefill_prompts += len(jobs)

    def _keep(self, row: int, job: Job, tokens: list[int]) -> None:
        """Cache the tokens of a finished row for the next turn of its conversation, if they fit."""
        name, state = job.request.conversation, self._state
        if name is None or not state.extends or job.request.num_samples > 1:
            return
        if self._prompts[int(state.prompt_of_row[row])].key[0] == "of other weights":
            return  # the weights changed during sampling: the cached keys are of the old weights
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
        self._forget_conversations(name)  # evict the earlier turn
        state.reserve(*needed)
        state.keep_row(row)
        cached_tokens = (
            *job.key[0],
            *tokens[job.begun : job.begun + int(state.response_lengths[row])],
        )
        self._prompts.append(
            Prompt(("of", name), torch.empty(0), None, job.request.weights, name, cached_tokens)
        )
