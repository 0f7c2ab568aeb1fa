"""Logprobs of tokens that were given, not drawn: of a request's prompt, and of whole sequences
(`compute_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl.sampler.decoder import Decoder, check_length
from rl.types import PlacedImage


class PromptReader:
    """Takes the logits of a prompt's positions in slices, in order, and keeps the logprob of each
    next token.

    `logprobs[0]` is None: nothing precedes the first token. `topk`: at each position the k
    likeliest (token, logprob), best first; entry 0 is None too. `targets` [positions, K]: tokens
    whose logprob is kept in the place of the next one, in `target_logprobs` (float32, the same
    shape; 0 where the token is -1).
    """

    def __init__(
        self,
        prompt: Sequence[int],
        temperature: float = 1.0,
        topk: int = 0,
        targets: np.ndarray | None = None,
    ):
        if not temperature > 0:
            raise ValueError(
                f"logprobs of given tokens need a temperature above 0, got {temperature}; 1 is untempered"
            )
        self.prompt = prompt
        self.temperature = temperature
        self.topk = topk
        self.logprobs: list[float | None] = [None]
        self.topk_logprobs: list[list[tuple[int, float]] | None] = [None]
        self.targets = targets
        self.target_logprobs = None if targets is None else np.zeros(targets.shape, np.float32)

    def read(self, first_position: int, logits_TV: Tensor) -> None:
        """Logits of positions first_position, first_position + 1, ...; the prompt's last one
        predicts none of it.
        """
        count = min(len(logits_TV), len(self.prompt) - 1 - first_position)
        if count <= 0:
            return
        following = torch.tensor(
            self.prompt[first_position + 1 : first_position + 1 + count], device=logits_TV.device
        )
        scaled_TV = logits_TV[:count].float() / self.temperature
        # log_softmax on a CPU loses up to 4e-4 over 150,000 tokens in float32; this does not.
        logprobs_TV = scaled_TV - scaled_TV.logsumexp(-1, keepdim=True)
        self.logprobs.extend(logprobs_TV.gather(1, following[:, None]).squeeze(1).tolist())
        if self.targets is not None and self.target_logprobs is not None:
            wanted = self.targets[first_position : first_position + count]
            tokens_TK = torch.from_numpy(wanted.clip(min=0)).to(logprobs_TV.device)
            found = logprobs_TV[: len(wanted)].gather(1, tokens_TK).cpu().numpy()
            self.target_logprobs[first_position : first_position + count] = np.where(
                wanted < 0, 0.0, found
            )
        if self.topk > 0:
            values, tokens = logprobs_TV.topk(min(self.topk, logprobs_TV.shape[-1]), dim=-1)
            pairs = zip(tokens.tolist(), values.tolist(), strict=True)
            self.topk_logprobs.extend(list(zip(ids, lps, strict=True)) for ids, lps in pairs)


def score(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    temperature: float = 1.0,
    images: Sequence[Sequence[PlacedImage]] = (),
) -> list[list[float | None]]:
    """The logprob of every token of each sequence given those before it, entry 0 None; under
    softmax(logits / temperature).
    """
    readers = [PromptReader([int(token) for token in prompt], temperature) for prompt in prompts]
    for prompt, placed in zip(prompts, images, strict=True) if any(images) else ():
        decoder.check_images(prompt, placed)
    for prompt in prompts:
        if not len(prompt):
            raise ValueError("an empty sequence has no logprobs; leave it out")
        if decoder.max_positions is not None and len(prompt) > decoder.max_positions:
            raise ValueError(
                f"a sequence of {len(prompt)} tokens exceeds the context of {decoder.max_positions}: shorten it"
            )
        check_length(decoder, len(prompt) - 1, len(prompt) - 1)
    with torch.inference_mode():
        # The last token predicts nothing and is not fed: so a learner reads the sequence, whose
        # frequencies may hang on its length.
        seen = {"images": images} if any(images) else {}
        decoder.read_prompts(
            [reader.prompt[:-1] or reader.prompt for reader in readers],
            [reader.read for reader in readers],
            **seen,
        )
    return [reader.logprobs for reader in readers]
