"""Sample with vLLM servers: requests, weight transfers, and checks of what the servers return."""

from rl.vllm.server_pool import ServerPool
from rl.vllm.vllm_decoder import VllmDecoder
from rl.vllm.vllm_engine import VllmEngine, score_on_servers
from rl.vllm.vllm_server import SUPPORTED_VERSIONS, VllmServer, VllmServerError

__all__ = [
    "SUPPORTED_VERSIONS",
    "ServerPool",
    "VllmDecoder",
    "VllmEngine",
    "VllmServer",
    "VllmServerError",
    "score_on_servers",
]
