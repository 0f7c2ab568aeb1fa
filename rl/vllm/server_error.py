"""Define the error of a vLLM server."""

from __future__ import annotations


class VllmServerError(Exception):
    """Raised if a server does not answer, or answers with an error or with wrong data.

    `rejected`: the server refuses this request, so that another attempt is useless.
    `has_wrong_weights`: it holds other weights than it was told to load. `timed_out`: it did not
    answer within the time limit.
    """

    def __init__(
        self,
        url: str,
        text: str,
        *,
        rejected: bool = False,
        has_wrong_weights: bool = False,
        timed_out: bool = False,
    ):
        super().__init__(f"the vLLM server {url} {text}")
        self.rejected, self.has_wrong_weights = rejected, has_wrong_weights
        self.timed_out = timed_out
