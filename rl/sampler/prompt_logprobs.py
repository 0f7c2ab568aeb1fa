"""Compute the logprobs of existing tokens: of a request's prompt, and of whole sequences
(`compute_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl.sampler.decode_state import Prompt
from rl.sampler.decoder import Decoder
from rl.types import PlacedImage


class PromptLogprobs:
    """Read the logits of a prompt's positions in slices, in order, and keep the logprob of each
    next token.

    `logprobs[0]` is None: nothing precedes the first token. `topk`: at each position the k most
    likely (token, logprob), best first; entry 0 is None too. `targets` [positions, K]: tokens whose
    logprobs at each position, into `target_logprobs` (float32, the same shape; 0 if the token
    is -1).
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
                f"prompt logprobs need a temperature above 0, got {temperature}; 1 is untempered"
            )
        self.prompt = prompt
        self.temperature = temperature
        self.topk = topk
        self.logprobs: list[float | None] = [None]
        self.topk_logprobs: list[list[tuple[int, float]] | None] = [None]
        self.targets = targets
        self.target_logprobs = None if targets is None else np.zeros(targets.shape, np.float32)

    def __call__(self, first_position: int, logits_TV: Tensor) -> None:
        """Process the logits of positions first_position, first_position + 1, ...

        The prompt's last position predicts none of its tokens.
        """
        count = min(len(logits_TV), len(self.prompt) - 1 - first_position)
        if count <= 0:
            return
        following = torch.tensor(
            self.prompt[first_position + 1 : first_position + 1 + count], device=logits_TV.device
        )
        scaled_TV = logits_TV[:count].float() / self.temperature
        # log_softmax on a CPU loses up to 4e-4 over 150,000 tokens in float32; logsumexp does not.
        logprobs_TV = scaled_TV - scaled_TV.logsumexp(-1, keepdim=True)
        self.logprobs.extend(logprobs_TV.gather(1, following[:, None]).squeeze(1).tolist())
        if self.targets is not None and self.target_logprobs is not None:
            target_rows = self.targets[first_position : first_position + count]
            tokens_TK = torch.from_numpy(target_rows.clip(min=0)).to(logprobs_TV.device)
            target_logprobs = logprobs_TV[: len(target_rows)].gather(1, tokens_TK).cpu().numpy()
            self.target_logprobs[first_position : first_position + count] = np.where(
                target_rows < 0, 0.0, target_logprobs
            )
        if self.topk > 0:
            values, tokens = logprobs_TV.topk(min(self.topk, logprobs_TV.shape[-1]), dim=-1)
            pairs = zip(tokens.tolist(), values.tolist(), strict=True)
            self.topk_logprobs.extend(list(zip(ids, lps, strict=True)) for ids, lps in pairs)


def score_sequences(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    temperature: float = 1.0,
    images: Sequence[Sequence[PlacedImage]] = (),
) -> list[list[float | None]]:
    """Return the logprob of each token of each sequence under softmax(logits / temperature).

    Entry 0 is None. Raises ValueError if a sequence is empty or exceeds the model's context.
    """
    readers = [PromptLogprobs([int(token) for token in prompt], temperature) for prompt in prompts]
    placed_images = images if any(images) else [()] * len(prompts)
    for prompt, placed in zip(prompts, placed_images, strict=True):
        decoder.check_images(prompt, placed)
    for prompt in prompts:
        if not len(prompt):
            raise ValueError("an empty sequence has no logprobs: leave it out")
        # the last token is not fed (see below)
        if decoder.max_positions is not None and len(prompt) - 1 > decoder.max_positions:
            raise ValueError(
                f"a sequence of {len(prompt)} tokens exceeds the context of "
                f"{decoder.max_positions}: at most {decoder.max_positions + 1} can be scored"
            )
        if decoder.length_switch is not None:
            decoder.length_switch.check(len(prompt) - 1, len(prompt) - 1)
    with torch.inference_mode():
        # The last token predicts nothing and is not fed, as in a learner's forward: the rotary
        # frequencies may depend on the length.
        decoder.read_prompts(
            [
                Prompt(reader.prompt[:-1] or reader.prompt, reader, placed)
                for reader, placed in zip(readers, placed_images, strict=True)
            ]
        )
    return [reader.logprobs for reader in readers]
