"""Convert rollouts to rows for reading and for training on them again: a row for each episode, turn
by turn.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from rl.images import content_to_text, to_data_url
from rl.renderers import Renderer
from rl.rollout.rollout_types import RolloutBatch, Trajectory
from rl.types import SampledSequence, experts_as_text


def build_rollout_rows(
    rollouts: RolloutBatch, renderer: Renderer | None, temperature: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each trajectory, with the prompt, the answer, the sampled tokens (at
    `temperature`) and the reward, for reading and for training on it again.

    Without a `renderer`, rows have no tokens and no logprobs: they are small, and for reading only.

    The answer's keys describe the last answer of the episode. A row of a multi-turn environment
    holds the whole episode as `turns`, see `build_turn_entries`.
    """
    for g, group in enumerate(rollouts.groups):
        members = zip(
            group.trajectories_G, group.get_total_rewards(), group.get_final_metrics(), strict=True
        )
        for i, (trajectory, reward, metrics) in enumerate(members):
            turn = trajectory.transitions[-1]
            row = {
                "group": g,
                "index": i,
                "tag": group.tag,
                "problem": group.problem_index,
                "prompt": turn.logs.get("prompt", ""),
                "response": turn.logs.get("response", ""),
                "reward": reward,
                "advantage": trajectory.advantage,
                "stop_reason": turn.ac.stop_reason,
                "version": turn.ac.version,
                **_drop_unknown(versions=turn.ac.versions),
                "temperature": temperature,
                "metrics": metrics,
            }
            if renderer is not None:
                row |= {
                    "prompt_tokens": turn.ob.token_ids(),
                    "response_tokens": turn.ac.tokens,
                    **_describe_tokens(turn.ac, renderer),
                }
            # images are stored in the first row of a group; every row has their number
            if images := [image for _, image in turn.ob.images_with_positions()]:
                row |= {"image_count": len(images)} | (
                    {"images": [to_data_url(image) for image in images]} if i == 0 else {}
                )
            system = next(
                (m["content"] for m in turn.logs.get("messages", ())[:1] if m["role"] == "system"),
                None,
            )
            row |= _drop_unknown(system=system, answer=turn.logs.get("answer"))
            yield (
                {**row, "turns": build_turn_entries(trajectory, renderer)}
                if len(trajectory.transitions) > 1 or "new_messages" in turn.logs
                else row
            )


def _describe_tokens(action: SampledSequence, renderer: Renderer) -> dict[str, Any]:
    """Return the tokens of an answer in decoded pieces, their logprobs, and the experts of prompt
    and answer, if they were recorded.
    """
    pieces = _get_pieces(renderer.tokenizer)
    for token in set(action.tokens) - pieces.keys():
        pieces[token] = renderer.tokenizer.decode([token])
    return {
        "tokens": [pieces[token] for token in action.tokens],
        "logprobs": action.logprobs,
        **({} if action.experts is None else {"experts": experts_as_text(action.experts)}),
    }


@functools.lru_cache(maxsize=2)
def _get_pieces(tokenizer: Any) -> dict[int, str]:
    """Return the table in which the decoded tokens of a tokenizer are kept: a piece takes 10 us."""
    return {}


def _drop_unknown(**entries: Any) -> dict[str, Any]:
    """Return the entries that are not None."""
    return {name: value for name, value in entries.items() if value is not None}


def build_turn_entries(trajectory: Trajectory, renderer: Renderer | None) -> list[dict[str, Any]]:
    """Return an episode from its first message to its last answer, an entry for each message;
    without a `renderer`, its answers have no tokens, logprobs and experts.

    An input message: {"role", "text", "sampled": False}, with "name" of the tool that answered if
    the message has a name. An answer: {"role": "assistant", "text", "sampled": True, "tokens" (in
    decoded pieces), "token_ids", "logprobs", "observation_tokens" (number of new tokens in its
    prompt), "reward", "advantage" (of the turn, if advantages are assigned by turn), "stop_reason",
    "metrics", "seat"}, "tool_calls" if it made any ({"name", "arguments", "seconds", and "answer"
    or "error"}), and "logs", the remaining logs of the environment. "experts": the experts of its
    prompt and of its tokens except the last, if they were recorded (`experts_from_text` decodes
    them). "restarts": True if its prompt does not continue the preceding tokens but is rendered
    again.
    """
    entries: list[dict[str, Any]] = []
    previous_tokens: list[int] = []
    advantages: Sequence[float | None] = trajectory.advantages_N or [trajectory.advantage] * len(
        trajectory.transitions
    )
    for turn, advantage in zip(trajectory.transitions, advantages, strict=True):
        for message in turn.logs.get("new_messages", ()):
            entries.append(
                {
                    "role": message["role"],
                    "text": content_to_text(message.get("content") or ""),
                    "sampled": False,
                    **_drop_unknown(name=message.get("name") or None),
                }
            )
        observation = turn.ob.token_ids()
        continues = observation[: len(previous_tokens)] == previous_tokens
        entry: dict[str, Any] = {
            "role": "assistant",
            "text": turn.logs.get("response", ""),
            "sampled": True,
        }
        if renderer is not None:
            entry |= {
                "token_ids": list(turn.ac.tokens),
                **_describe_tokens(turn.ac, renderer),
            }
        entry |= {
            "observation_tokens": len(observation) - len(previous_tokens)
            if continues
            else len(observation),
            "reward": turn.reward,
            "advantage": advantage,
            "stop_reason": turn.ac.stop_reason,
            **_drop_unknown(version=turn.ac.version, versions=turn.ac.versions),
            "metrics": turn.metrics,
            "seat": turn.seat,
        }
        other = {
            key: value
            for key, value in turn.logs.items()
            if key not in ("prompt", "response", "new_messages", "tool_calls", "messages")
        }
        entries.append(
            entry
            | _drop_unknown(
                restarts=True if previous_tokens and not continues else None,
                tool_calls=turn.logs.get("tool_calls") or None,
                logs=other or None,
            )
        )
        previous_tokens = [*observation, *turn.ac.tokens]
    return entries
