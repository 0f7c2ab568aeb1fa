"""Run a forward_backward call a micro-batch at a time."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from rl.client.check_arguments import check_call
from rl.client.training_client import TrainingClient
from rl.types import Datum, ForwardBackwardOutput, TensorData


def forward_backward_microbatches(
    client: TrainingClient,
    data: Sequence[Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, Any] | None = None,
    *,
    backward: bool = True,
) -> Generator[None, None, ForwardBackwardOutput]:
    """Run `client.forward_backward` (or `forward` if `backward` is false), bit-identically, and
    yield between micro-batches.

    A verb submitted between two micro-batches (sampling steps, say) runs between them: it waits for
    a micro-batch instead of the whole call. Raises what the call raises. An update after a failed
    micro-batch is refused, as after a failed call.
    """
    config = dict(loss_fn_config or {})
    loss, data = check_call(data, loss_fn, config, client.info, client._context)
    drawn_at = (
        client._find_temperatures(data)
        if loss.at_sampling_temperature and "temperature" not in config
        else None
    )
    outputs: dict[int, dict[str, Any]] = {}
    metrics, temperature, index, num_microbatches = {"loss:sum": 0.0}, 1.0, 0, 1
    while index < num_microbatches:
        call = (list(data), loss, config, 1.0, backward, False, True, drawn_at)
        future = client._driver.submit("forward_backward_microbatch", client.model_id, index, *call)
        if backward:
            client._pending_backwards.append(future)
        microbatch_outputs, sums, temperature, num_microbatches = future.result()
        outputs |= microbatch_outputs
        metrics |= {name: metrics.get(name, 0.0) + value for name, value in sums.items()}
        index += 1
        if index < num_microbatches:
            yield
    rows = [
        {name: TensorData(array, "float32") for name, array in outputs[i].items()}
        for i in range(len(data))
    ]
    return ForwardBackwardOutput(rows, {**metrics, "temperature:mean": temperature})


def drop_gradients(client: TrainingClient) -> None:
    """Discard the gradients accumulated since the last update, because that update will not be
    requested.
    """
    client._pending_backwards.clear()
    client._driver.submit("drop_gradients", client.model_id).result()
