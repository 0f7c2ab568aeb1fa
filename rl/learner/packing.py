"""Cut datums into micro-batches by a token budget and lay a micro-batch out as tensors.

Three layouts of the same micro-batch give the same logprobs and gradients on the models that
support them (see rl.learner.layout_probe):

  "padded"  [rows, longest], right-padded. Causal attention never looks right, so no mask is needed,
            and padding is not read: the head runs on real tokens only. Best if attention costs
            rows x longest^2.
  "packed"  [1, T], concatenated sequences with positions that restart at 0. Best if attention
            takes cu_seqlens.
  "shared"  [rows, longest]. A row is a prompt, then every answer to it; each answer sees the prompt
            and itself. A group's prompt is computed once instead of once per answer. Attention gets
            an explicit mask, so it costs (prompt + all answers)^2. Best if prompts are long
            compared with answers, or everything is short. With rl.learner.varlen_attention there is
            no mask, and all rows lie one after another in a single row without padding.

From small to large: datum, unit (datums with one prompt: a row), block (the units of a group of
datums, such as a pair), chunk (the blocks of a micro-batch). A micro-batch that needs two forwards
has two sub-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.distributed import collectives
from rl.learner.context_parallel import SequenceShard, make_shard, pad_columns
from rl.learner.varlen_attention import SequenceBounds, lay_out_row
from rl.models import make_attention_mask
from rl.types import Datum, PlacedImage

Datums = Sequence[Datum] | Mapping[int, Datum]  # of a batch, or of some of its indices
# Sequences of a row gather the keys of their prompt (rl.learner.varlen_attention). A key takes 1/20
# to 1/35 of the memory of a position in models of 0.5 to 8 billion parameters.
KEYS_PER_POSITION = 4
LAYOUTS = ("padded", "packed", "shared")  # and "auto": see choose_layout
# Returns the tokens that may have a gradient, bool [T], from the fields of a batch, [T] or [T, K];
# None if the fields do not tell (LossSpec.find_gradient_tokens).
TokenSelector = Callable[[Mapping[str, np.ndarray]], np.ndarray | None]


@dataclass(slots=True)
class PackedBatch:
    """Hold a micro-batch.

    `input_ids` and `position_ids` have the model's input shape; all other fields are flat over real
    tokens.

    segments        int32 [rows, longest] if a row is not plainly causal, else None: 0 for a shared
                    prompt, k for the k-th answer to it, -1 for padding
    token_index     int64 [T] position of each datum's token in input_ids.flatten() (several
                    tokens may share a position); None: in order
    cu_seqlens      int64 [D + 1]
    inputs          the datums' fields, [T] (or [T, K])
    datum_index     the position of each datum in the caller's list
    lengths         the tokens of each datum, in host memory
    scale           1.0, or 0.0 for a batch that only keeps a rank in step with the others
    temperature     the temperature at which all of its datums are scored
    experts         int64 [positions of input_ids, B * K] recorded experts, -1 without a record
                    (see rl.layers.router_replay); or None
    images          of each row (padded only): its placed images and its length; None if no datum
                    has images
    sub_batches     the batches, a forward each, of a batch with rows that cannot share a forward;
                    else empty
    sub_batch_order int64 [T] position of each token of this batch in the concatenated tokens of
                    `sub_batches`; None without them
    shard           this rank's columns, with context parallelism; else None
    bounds          the sequences of a row that attention separates by their lengths; else None
    sequences       int64 [1, T] the sequence of each position, if the row is concatenated sequences
                    that neither `bounds` nor a shard separates; else None
    gradient_tokens int64 [N] the tokens that may have a gradient, ascending, of this rank's tokens
                    if the batch is shared; None: unknown
    """

    input_ids: Tensor
    position_ids: Tensor | None
    segments: Tensor | None
    token_index: Tensor | None
    cu_seqlens: Tensor
    inputs: dict[str, Tensor]
    datum_index: list[int]
    lengths: list[int]
    scale: float = 1.0
    temperature: float = 1.0
    experts: Tensor | None = None
    images: list[tuple[tuple[PlacedImage, ...], int]] | None = None
    sub_batches: Sequence[PackedBatch] = ()
    sub_batch_order: Tensor | None = None
    shard: SequenceShard | None = None
    bounds: SequenceBounds | None = None
    sequences: Tensor | None = None
    gradient_tokens: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Return the number of real tokens."""
        return sum(self.lengths)

    @property
    def attention_mask(self) -> Tensor | None:
        """Return bool [rows, 1, longest, longest], True where a position may attend: an answer sees
        its shared prompt and itself. None if every row is plainly causal.

        It is built on the device: a host would need longer for it than a GPU for the forward.
        """
        if self.segments is None:
            return None
        query, key = self.segments[:, :, None], self.segments[:, None, :]
        sees = query == key
        sees |= (key == 0) & (query > 0)
        return sees.tril_()[:, None]

    def make_model_inputs(self, model: Any) -> dict[str, Tensor]:
        """Return the inputs of a forward of `model`, without images: this rank's columns, if the
        batch is shared.
        """
        source = self if self.shard is None else self.shard
        inputs = {"input_ids": source.input_ids}
        if source.position_ids is not None:
            inputs["position_ids"] = source.position_ids
        attends = self.attention_mask  # built at each access
        if attends is not None:
            inputs["attention_mask"] = make_attention_mask(model, attends)
        return inputs


def make_units(
    datums: Sequence[Datum], layout: str, token_budget: int, *, varlen: bool = False
) -> list[list[int]]:
    """Return the units that must stay together.

    A unit is neighboring datums with the same prompt if the layout shares it, else a single datum.
    A unit ends before it would exceed the budget of a micro-batch; its prompt is computed again for
    the next unit.
    """
    if layout != "shared":
        return [[i] for i in range(len(datums))]
    result: list[list[int]] = []
    last: bytes | None = None
    for i, datum in enumerate(datums):
        prompt = datum.model_input.token_array()[: prompt_length(datum)].tobytes()
        if prompt == last and unit_cost(datums, [*result[-1], i], varlen=varlen) <= token_budget:
            result[-1].append(i)
        else:
            result.append([i])
        last = prompt
    return result


def make_blocks(
    datums: Sequence[Datum], layout: str, token_budget: int, group: int = 1, *, varlen: bool = False
) -> list[list[list[int]]]:
    """Return the units in blocks, each of which stays in the same micro-batch on the same rank.

    A block has `group` consecutive datums (a pair, for example).
    """
    if group == 1:
        return [[unit] for unit in make_units(datums, layout, token_budget, varlen=varlen)]
    result = []
    for first in range(0, len(datums), group):
        group_datums = datums[first : first + group]
        group_units = make_units(group_datums, layout, token_budget, varlen=varlen)
        result.append([[first + i for i in unit] for unit in group_units])
    return result


def block_shape(
    datums: Sequence[Datum], block: Sequence[Sequence[int]], layout: str, *, varlen: bool = False
) -> tuple[int, int]:
    """Return the (rows, longest row) that a block takes; a single row if packed, or `varlen`."""
    costs = [unit_cost(datums, unit, varlen=varlen) for unit in block]
    return (1, sum(costs)) if layout == "packed" or varlen else (len(costs), max(costs))


def choose_layout(datums: Sequence[Datum], token_budget: int, hidden_size: int) -> str:
    """Return "padded" or "shared", whichever needs less arithmetic.

    A token's linear layers take about 24 D^2 operations a layer (D: hidden size). Its attention
    over L positions takes 2 L D if it is causal without a mask and 4 L D with a mask. So a row of L
    tokens costs L (1 + L / 12 D), or L (1 + L / 6 D) shared.
    """
    lengths = [datum.model_input.length for datum in datums]
    together = make_units(datums, "shared", token_budget)
    rows = [unit_cost(datums, unit) for unit in together]
    padded = sum(n * (1 + n / (12 * hidden_size)) for n in lengths)
    shared = sum(n * (1 + n / (6 * hidden_size)) for n in rows)
    return "shared" if shared < 0.9 * padded else "padded"


def prompt_length(datum: Datum) -> int:
    """Return the number of input tokens before the first sampled token.

    That many positions are the same for all answers to a prompt.
    """
    inputs = datum.loss_fn_inputs
    for name in ("mask", "weights", "advantages"):
        if name in inputs:
            active = np.flatnonzero(inputs[name].array.reshape(len(inputs[name]), -1).any(1))
            return int(active[0]) + 1 if len(active) else len(inputs[name])
    return datum.model_input.length


def unit_cost(datums: Datums, unit: Sequence[int], *, varlen: bool = False) -> int:
    """Return the positions that a unit takes: its prompt once, and the rest of each datum.

    `varlen`: the keys of all its sequences count too, KEYS_PER_POSITION of them as a position.
    """
    shared = prompt_length(datums[unit[0]]) if len(unit) > 1 else 0
    tokens = sum(datums[i].model_input.length for i in unit)
    positions = tokens - shared * (len(unit) - 1)
    return max(positions, -(-(tokens + shared) // KEYS_PER_POSITION)) if varlen else positions


def plan_micro_batches(
    shapes: Sequence[tuple[int, int]], token_budget: int, layout: str
) -> list[list[int]]:
    """Return the blocks of each micro-batch as lists of indices, at most `token_budget` positions
    each. `shapes`: (rows, longest row) of each block.

    The cost is the layout's size: rows x longest if rows are padded, the sum of lengths if packed.
    A block above the budget gets a separate micro-batch, since it must be trained on too.
    Order is longest first, so that neighbors have similar lengths and the largest micro-batch,
    which determines peak memory, comes first. The result depends only on the arguments. Raises
    ValueError for a budget below 1.
    """
    if token_budget < 1:
        raise ValueError(
            f"the token budget of a micro-batch must be at least 1, got {token_budget}"
        )
    rows, lengths = [shape[0] for shape in shapes], [shape[1] for shape in shapes]
    order = sorted(range(len(shapes)), key=lambda i: (-lengths[i], i))
    if layout == "packed":
        return _first_fit(order, lengths, token_budget)
    batches: list[list[int]] = []
    num_rows = 0
    for i in order:
        num_rows += rows[i]
        if batches and num_rows * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(i)
        else:
            batches.append([i])
            num_rows = rows[i]
    return batches


def _first_fit(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Put each unit into the first micro-batch with enough remaining budget."""
    batches: list[list[int]] = []
    capacities: list[int] = []
    for i in order:
        for b, remaining in enumerate(capacities):
            if lengths[i] <= remaining:
                batches[b].append(i)
                capacities[b] -= lengths[i]
                break
        else:
            batches.append([i])
            capacities.append(token_budget - lengths[i])
    return batches


def collate(
    datums: Datums,
    chunk: Sequence[Sequence[int]],
    layout: str,
    device: torch.device | str = "cpu",
    group: collectives.RankGroup | None = None,
    *,
    varlen: bool = False,
    select_tokens: TokenSelector | None = None,
) -> PackedBatch:
    """Lay the units of `chunk` (lists of indices into `datums`) out as a micro-batch on `device`.
    `group`: ranks that share it by its positions. `varlen`: layouts other than padded have a single
    row and no mask (rl.learner.varlen_attention). `select_tokens`: finds the `gradient_tokens`.

    All datums of a chunk have the same fields. Raises ValueError for an unknown layout, and for
    images in a layout other than padded.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: expected {', '.join(LAYOUTS)}")
    indices = [i for unit in chunk for i in unit]
    selected = [datums[i] for i in indices]
    tokens = [datum.model_input.token_array() for datum in selected]
    images = _collect_images(selected, layout)
    lengths = [len(token_ids) for token_ids in tokens]
    row = None
    if varlen and layout != "padded":
        row = lay_out_row(list(_split_units(tokens, chunk, datums)))
        arrays: _Layout = row.input_ids, row.position_ids, None, row.token_index
    else:
        lay_out = {"packed": _packed, "padded": _padded, "shared": _shared}[layout]
        arrays = lay_out(tokens, chunk, datums)
    input_ids, position_ids, segments, token_index = arrays
    fields = _concatenate_fields(selected)
    local_tokens = None

    def put(array: np.ndarray | None) -> Any:
        return None if array is None else copy_to_device(array, device)

    shard = None
    if group is not None:
        arrays = _pad_for_ranks((input_ids, position_ids, segments, token_index), group.size)
        input_ids, position_ids, segments, token_index = arrays
        packed = lengths if layout == "packed" and row is None else None
        shard, local_tokens = make_shard(input_ids, position_ids, token_index, packed, group, put)
    searches = layout == "packed" and row is None and group is None
    return PackedBatch(
        put(input_ids),
        put(position_ids),
        put(segments),
        put(token_index),
        put(np.cumsum([0, *lengths])),
        {name: put(array) for name, array in fields.items()},
        indices,
        lengths,
        experts=put(_lay_out_experts(selected, input_ids.size, token_index)),
        images=images,
        shard=shard,
        bounds=None if row is None else row.make_bounds(put, input_ids.size - row.input_ids.size),
        sequences=put(_number_sequences(lengths)) if searches else None,
        gradient_tokens=put(_find_gradient_tokens(fields, select_tokens, local_tokens)),
    )


def _collect_images(
    datums: Sequence[Datum], layout: str
) -> list[tuple[tuple[PlacedImage, ...], int]] | None:
    """Return the placed images and the length of each datum; None if no datum has images. Raises
    ValueError for images in a layout other than padded.
    """
    images = [
        (datum.model_input.images_with_positions(), datum.model_input.length) for datum in datums
    ]
    if not any(placed for placed, _ in images):
        return None
    if layout != "padded":
        raise ValueError(f"sequences with images need the layout padded, got {layout}")
    return images


def _concatenate_fields(datums: Sequence[Datum]) -> dict[str, np.ndarray]:
    """Return the fields of the datums, [T] or [T, K] each."""
    return {
        name: np.concatenate([datum.loss_fn_inputs[name].array for datum in datums])
        for name in datums[0].loss_fn_inputs
    }


def _find_gradient_tokens(
    fields: Mapping[str, np.ndarray],
    select_tokens: TokenSelector | None,
    local_tokens: np.ndarray | None,
) -> np.ndarray | None:
    """Return the tokens that may have a gradient, int64 [N], of the tokens `local_tokens` (None:
    all); None if unknown.
    """
    active = None if select_tokens is None else select_tokens(fields)
    if active is None:
        return None
    return np.flatnonzero(active if local_tokens is None else active[local_tokens])


def _number_sequences(lengths: Sequence[int]) -> np.ndarray | None:
    """Return the index of each position's sequence in a row, [1, T]; None for one sequence."""
    return None if len(lengths) == 1 else np.repeat(np.arange(len(lengths)), lengths)[None]


def _split_units(
    tokens: Sequence[np.ndarray], chunk: Sequence[Sequence[int]], datums: Datums
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield each unit as (tokens of its shared prompt, its sequences)."""
    sequences = iter(tokens)
    for unit in chunk:
        prompt = prompt_length(datums[unit[0]]) if len(unit) > 1 else 0
        yield prompt, [next(sequences) for _ in unit]


def copy_to_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """Return `array` as a tensor on `device`. A copy to a GPU does not wait for the GPU's work."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


_Layout = tuple[np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray | None]


def count_expert_columns(datums: Sequence[Datum]) -> int | None:
    """Return the number of recorded experts of a token; None if a datum has no record, or if the
    records differ in it.
    """
    columns = {None if datum.experts is None else datum.experts.shape[1] for datum in datums}
    return columns.pop() if len(columns) == 1 else None


def _lay_out_experts(
    datums: Sequence[Datum], positions: int, token_index: np.ndarray | None
) -> np.ndarray | None:
    """Return the recorded experts of each of `positions` positions; None without a record."""
    columns = count_expert_columns(datums)
    if columns is None:
        return None
    experts = np.full((positions, columns), -1, np.int64)
    recorded = np.concatenate([datum.experts for datum in datums if datum.experts is not None])
    experts[np.arange(len(recorded)) if token_index is None else token_index] = recorded
    return experts


def _pad_for_ranks(layout: _Layout, size: int) -> tuple[np.ndarray, Any, Any, np.ndarray]:
    """Return a layout with columns added so that `size` divides their number; its index of tokens
    is never None.
    """
    input_ids, position_ids, segments, token_index = layout
    width = input_ids.shape[1]
    if token_index is None:
        token_index = np.arange(input_ids.size)
    return (
        padded := pad_columns(input_ids, size, 0),
        None if position_ids is None else pad_columns(position_ids, size, 0),
        None if segments is None else pad_columns(segments, size, -1),
        token_index // width * padded.shape[1] + token_index % width,
    )


def _packed(
    tokens: Sequence[np.ndarray], chunk: Sequence[Sequence[int]], datums: Datums
) -> _Layout:
    """Return the packed layout: ids [1, T] and positions [1, T]."""
    positions = np.concatenate([np.arange(len(t)) for t in tokens])
    return np.concatenate(tokens)[None], positions[None], None, None


def _padded(
    tokens: Sequence[np.ndarray], chunk: Sequence[Sequence[int]], datums: Datums
) -> _Layout:
    """Return the padded layout: ids [rows, longest] and the index of real tokens."""
    lengths = np.asarray([len(t) for t in tokens])
    present = np.arange(lengths.max())[None] < lengths[:, None]
    input_ids = np.zeros(present.shape, dtype=np.int64)
    input_ids[present] = np.concatenate(tokens)
    return input_ids, None, None, (None if present.all() else np.flatnonzero(present))


def _shared(
    tokens: Sequence[np.ndarray], chunk: Sequence[Sequence[int]], datums: Datums
) -> _Layout:
    """Return the shared layout: a row is the prompt (segment 0), then answer k (segment k).

    Padding has segment -1.
    """
    longest = max(unit_cost(datums, unit) for unit in chunk)
    input_ids = np.zeros((len(chunk), longest), dtype=np.int64)
    position_ids = np.zeros_like(input_ids)
    segments = np.full((len(chunk), longest), -1, dtype=np.int32)
    token_index = []
    for row, (prompt, sequences) in enumerate(_split_units(tokens, chunk, datums)):
        at = row * longest  # offset of the row in the flattened arrays
        ids, positions, segment = input_ids[row], position_ids[row], segments[row]
        end = prompt
        for k, sequence in enumerate(sequences, start=1):
            if k == 1:
                ids[:prompt], positions[:prompt], segment[:prompt] = (
                    sequence[:prompt],
                    np.arange(prompt),
                    0,
                )
            start, end = end, end + len(sequence) - prompt
            ids[start:end], positions[start:end], segment[start:end] = (
                sequence[prompt:],
                np.arange(prompt, len(sequence)),
                k,
            )
            token_index += [np.arange(at, at + prompt), np.arange(at + start, at + end)]
    return input_ids, position_ids, segments, np.concatenate(token_index)
