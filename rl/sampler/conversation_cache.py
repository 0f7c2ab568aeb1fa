"""Cache conversations between their turns, so that earlier tokens are not prefilled again."""

from __future__ import annotations

import numpy as np
import torch

from rl.sampler.decode_state import DecodeState, compact_slots
from rl.sampler.running_rows import RunningRows
from rl.sampler.sampling_requests import CachedPrompt, EngineCounters, SequenceGroup


class ConversationCache:
    """Cache the conversations of an engine; a base class of `Engine`.

    Cached conversations are stored among the engine's prompts. They are evicted if a waiting
    request does not fit otherwise.
    """

    kv_cache_tokens: int
    counters: EngineCounters
    _state: DecodeState
    _prompts: list[CachedPrompt]
    _rows: RunningRows

    @torch.inference_mode()
    def evict_conversation(self, conversation: str) -> None:
        """Evict a conversation that has no further turn."""
        self._evict_conversations(conversation)

    def _evict_conversations(self, name: str | None = None) -> bool:
        """Evict the conversation of that name, or all. Returns whether the cache held any."""
        dropped = [
            p.conversation is not None and name in (None, p.conversation) for p in self._prompts
        ]
        if any(dropped):
            source = compact_slots(~np.array(dropped, np.bool_))
            self._prompts = [self._prompts[slot] for slot in source]
            self._state.retain(np.arange(len(self._rows)), source)
        return any(dropped)

    def _find_cached_slot(self, group: SequenceGroup) -> int | None:
        """Return the slot that holds the cached prefix of a group's conversation.

        Returns None if the conversation is not in the cache, or if its tokens differ from the
        prompt.
        """
        name = group.request.conversation
        if name is None or group.request.scores_prompt:
            return None
        for slot, prompt in enumerate(self._prompts):
            # Also compare the key: another request admitted now may have extended the conversation.
            same = (prompt.conversation, prompt.adapter_id, prompt.key) == (
                name,
                group.request.adapter_id,
                ("of", name),
            )
            if same and prompt.tokens == group.key[0][: len(prompt.tokens)] != group.key[0]:
                return slot
        return None

    def _extend_conversations(self, groups: list[tuple[SequenceGroup, int]]) -> None:
        """Prefill the new tokens of these conversations after their cached tokens."""
        if not groups:
            return
        suffixes = [group.key[0][len(self._prompts[slot].tokens) :] for group, slot in groups]
        for (group, slot), suffix, logits_V in zip(
            groups,
            suffixes,
            self._state.extend_prompts([slot for _, slot in groups], suffixes),
            strict=True,
        ):
            self.counters.kept_tokens += len(self._prompts[slot].tokens)
            self.counters.prefill_tokens += len(suffix)
            self._prompts[slot] = CachedPrompt(group.key, logits_V, None, group.request.adapter_id)
        self.counters.prefill_prompts += len(groups)

    def _cache_conversation(self, row: int, group: SequenceGroup, tokens: list[int]) -> None:
        """Cache the tokens of a finished row for the next turn of its conversation, if they fit."""
        name, state = group.request.conversation, self._state
        if name is None or not state.supports_extend or group.request.num_samples > 1:
            return
        if self._prompts[int(state.prompt_of_row[row])].key[0] == "of other weights":
            return  # the weights changed during sampling: the cached keys are of the old weights
        length = len(group.key[0]) + int(state.response_lengths[row])
        longest = max(int(state.prompt_lengths.max(initial=0)), length)
        needed = (
            len(self._prompts) + 1,
            longest,
            len(self._rows),
            int(self._rows["max_tokens"].max(initial=1)) - 1,
        )
        if state.cost(*needed) > self.kv_cache_tokens:
            return
        self._evict_conversations(name)  # evict the earlier turn
        state.reserve(*needed)
        state.cache_row(row)
        cached_tokens = (
            *group.key[0],
            *tokens[group.num_resumed : group.num_resumed + int(state.response_lengths[row])],
        )
        self._prompts.append(
            CachedPrompt(
                ("of", name), torch.empty(0), None, group.request.adapter_id, name, cached_tokens
            )
        )
