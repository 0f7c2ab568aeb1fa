"""Provide the clients at their addresses in Tinker's client, `lib.public_interfaces`.

Tinker has a module for each client; here all these addresses are this module.
"""

from __future__ import annotations

import sys

from rl.client import (
    APIFuture,
    LossHandle,
    PerDatumLossFn,
    RestClient,
    SamplingClient,
    ServiceClient,
    TrainingClient,
)

__all__ = [
    "APIFuture",
    "LossHandle",
    "PerDatumLossFn",
    "RestClient",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
]

_SUBMODULES = (
    "",
    ".api_future",
    ".custom_loss",
    ".rest_client",
    ".sampling_client",
    ".service_client",
    ".training_client",
)
for _name in _SUBMODULES:
    sys.modules[f"{__name__}.public_interfaces{_name}"] = sys.modules[__name__]
