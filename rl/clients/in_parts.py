"""A forward_backward a micro-batch at a time."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from rl.clients.call_checks import check_call
from rl.clients.training import TrainingClient
from rl.types import Datum, ForwardBackwardOutput, TensorData


def in_parts(
    client: TrainingClient,
    data: Sequence[Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, Any] | None = None,
    *,
    backward: bool = True,
) -> Generator[None, None, ForwardBackwardOutput]:
    """`client.forward_backward` (or `forward`), the same to the bit, giving way between
    micro-batches.

    What is submitted between two of them (a slice of samples, say) runs there: it waits for one and
    not for the call. Raises what the call raises; an update after a part that failed is refused, as
    after a whole one.
    """
    config = dict(loss_fn_config or {})
    loss, data = check_call(data, loss_fn, config, client.info, client._context)
    drawn_at = client._drawn_at(data) if loss.as_sampled and "temperature" not in config else None
    outputs: dict[int, dict[str, Any]] = {}
    metrics, temperature, part, parts = {"loss:sum": 0.0}, 1.0, 0, 1
    while part < parts:
        call = (list(data), loss, config, 1.0, backward, False, True, drawn_at)
        future = client._driver.submit("forward_backward_part", client.model_id, part, *call)
        if backward:
            client._backwards.append(future)
        found, sums, temperature, parts = future.result()
        outputs |= found
        metrics |= {name: metrics.get(name, 0.0) + value for name, value in sums.items()}
        part += 1
        if part < parts:
            yield
    rows = [
        {name: TensorData(array, "float32") for name, array in outputs[i].items()}
        for i in range(len(data))
    ]
    return ForwardBackwardOutput(rows, {**metrics, "temperature:mean": temperature})


def drop_gradients(client: TrainingClient) -> None:
    """What was accumulated since the last update counts for nothing: nobody will ask for that
    update any more.
    """
    client._backwards.clear()
    client._driver.submit("drop_gradients", client.model_id).result()
