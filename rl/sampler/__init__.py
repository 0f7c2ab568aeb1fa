"""Generate in process: an engine with continuous batching over a decoder with a KV cache.

decoder = make_decoder(model)
engine = Engine(decoder, eos_token_ids=(2,), kv_cache_tokens=100_000, max_rows=512)
params = SamplingParams(max_tokens=64)
engine.add(SamplingRequest(prompt=[1, 5, 7], num_samples=8, params=params, seed=0, problem=3))
responses = engine.run()
"""

from rl.sampler.block_manager import choose_pool_size, max_blocks
from rl.sampler.cuda_graphs import count_processing_bytes, free_tp_graphs
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_factory import (
    check_has_experts,
    enable_expert_recording,
    has_experts,
    make_base_decoder,
    make_decoder,
)
from rl.sampler.decoder_fast import (
    MultiAdapterDecoder,
    count_unsharded_parameters,
    is_supported,
)
from rl.sampler.engine_selection import make_engine
from rl.sampler.kv_cache_pool import IdleKVCachePool
from rl.sampler.paged_state import BLOCK_SIZE
from rl.sampler.precision import cast_frozen_, iter_frozen_matrices
from rl.sampler.prefix_attention import disable_cudnn_attention
from rl.sampler.prompt_logprobs import score_sequences
from rl.sampler.rope_switch import find_rope_switch
from rl.sampler.sampling_engine import DEFAULT_CACHE_TOKENS, Engine
from rl.sampler.sampling_requests import (
    EngineCounters,
    FinishedRequest,
    SamplingRequest,
    check_params,
)
from rl.sampler.stop_conditions import StopStringMatcher, build_stop_condition
from rl.sampler.tensor_parallel import check_shard_counts, find_mlp_divisor

__all__ = [
    "DEFAULT_CACHE_TOKENS",
    "Decoder",
    "Engine",
    "IdleKVCachePool",
    "MultiAdapterDecoder",
    "BLOCK_SIZE",
    "EngineCounters",
    "FinishedRequest",
    "SamplingRequest",
    "StopStringMatcher",
    "build_stop_condition",
    "check_params",
    "check_shard_counts",
    "is_supported",
    "iter_frozen_matrices",
    "count_processing_bytes",
    "count_unsharded_parameters",
    "find_rope_switch",
    "free_tp_graphs",
    "cast_frozen_",
    "make_base_decoder",
    "make_decoder",
    "make_engine",
    "enable_expert_recording",
    "find_mlp_divisor",
    "check_has_experts",
    "has_experts",
    "max_blocks",
    "choose_pool_size",
    "score_sequences",
    "disable_cudnn_attention",
]
