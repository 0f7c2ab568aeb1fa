"""Sample with vLLM servers: requests, weight transfers, and checks of what the servers return."""

from rl.vllm.sample_reply import VllmServerError
from rl.vllm.server_pool import ServerPool
from rl.vllm.started_server import (
    ServerLaunch,
    StartedServer,
    enables_adapters,
    enables_sleep,
    find_command,
    find_free_port,
)
from rl.vllm.transfer_validation import AdapterCheck
from rl.vllm.vllm_decoder import VllmDecoder
from rl.vllm.vllm_engine import VllmEngine, score_on_servers
from rl.vllm.vllm_server import SUPPORTED_VERSIONS, VllmServer

__all__ = [
    "SUPPORTED_VERSIONS",
    "AdapterCheck",
    "ServerLaunch",
    "ServerPool",
    "StartedServer",
    "VllmDecoder",
    "VllmEngine",
    "VllmServer",
    "VllmServerError",
    "enables_adapters",
    "enables_sleep",
    "find_command",
    "find_free_port",
    "score_on_servers",
]
