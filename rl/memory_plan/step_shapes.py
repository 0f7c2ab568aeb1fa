"""Compute the shapes of a step's work: the largest micro-batch, and what is sampled at once."""

from __future__ import annotations

from rl.memory_plan.shapes import MicroBatch
from rl.sampler import BLOCK_SIZE, choose_pool_size, max_blocks


def largest_micro_batch(
    *,
    groups: int,
    group: int,
    prompt: int,
    answer: int,
    budget: int,
    layout: str,
    world: int,
    hidden: int,
) -> MicroBatch:
    """Return a rank's largest micro-batch if all prompts and all answers have the same length.

    `groups`: number of groups in an optimizer step. `group`: answers in a group. `prompt`,
    `answer`: lengths in tokens. `budget`: token budget of a micro-batch. `world`: number of ranks.
    `hidden`: hidden size of the model. The rules are those of rl.learner and rl.learner.packing for
    the token budget, a rank's share of the positions, and the layout that "auto" selects.
    """
    length = prompt + answer
    # answers that share a prompt in a row
    together = max(1, min(group, (budget - prompt) // answer))
    row = prompt + together * answer
    rows = groups * -(-group // together)
    if layout == "auto":
        shared = rows * row * (1 + row / (6 * hidden))
        layout = (
            "shared"
            if together > 1
            and shared < 0.9 * groups * group * length * (1 + length / (12 * hidden))
            else "padded"
        )
    if layout == "shared":
        share = min(budget, -(-rows * row // world))
        fit = max(1, min(rows, share // row))
        return MicroBatch(fit, row, fit * together * length, masked=True)
    share = min(budget, -(-groups * group * length // world))
    fit = max(1, min(groups * group, share // length))
    if layout == "packed":
        return MicroBatch(1, fit * length, fit * length, masked=True)
    return MicroBatch(fit, length, fit * length)


def compute_concurrent_rows(
    *,
    groups: int,
    group: int,
    prompt: int,
    answer: int,
    kv_cache_tokens: int,
    max_rows: int,
    world: int,
    paged: bool = False,
) -> tuple[int, int]:
    """Return (prompts, rows) that a rank decodes at once within its budgets.

    `paged`: the most rows that are admitted, which are preempted when pages run out.
    """
    mine = -(-groups // world)
    if paged:
        rows = min(
            count_admitted_rows(
                max(kv_cache_tokens // BLOCK_SIZE, 1), -(-prompt // BLOCK_SIZE), group
            ),
            mine * group,
            max_rows,
        )
        return -(-rows // group), rows
    room = max(1, kv_cache_tokens // max(1, prompt + group * (answer - 1)))
    prompts = min(mine, room, -(-max_rows // group))
    return prompts, min(prompts * group, max_rows)


def count_admitted_rows(pages: int, prompt_pages: int, group: int) -> int:
    """Return the most rows that an engine admits at once to a pool of `pages` pages: a group's
    prompt counts once, and each row needs a page to write to.
    """
    full_groups, remaining = divmod(pages, prompt_pages + group)
    # a single row is known to fit
    return max(full_groups * group + max(remaining - prompt_pages, 0), 1)


def count_pool_pages(
    *,
    groups: int,
    group: int,
    prompt: int,
    answer: int,
    kv_cache_tokens: int,
    max_rows: int,
    world: int,
    streams: bool,
) -> int:
    """Return the pages that a rank's sampler allocates for a call with its share of the groups.
    `streams`: allocate the whole pool, since later requests are unknown.
    """
    requests = [(prompt, group, answer)] * -(-groups // world)
    return choose_pool_size(
        max(kv_cache_tokens // BLOCK_SIZE, 1),
        None if streams else max_blocks(requests, BLOCK_SIZE, max_rows),
    )
