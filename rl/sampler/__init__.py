"""Generate in process: an engine with continuous batching over a decoder with a KV cache.

decoder = make_decoder(model)
engine = Engine(decoder, eos_token_ids=(2,), kv_cache_tokens=100_000, max_rows=512)
params = SamplingParams(max_tokens=64)
engine.add(Request(prompt=[1, 5, 7], num_samples=8, params=params, seed=0, problem=3))
responses = engine.run()
"""

from rl.sampler.attention import without_cudnn
from rl.sampler.cache_paged import PAGE
from rl.sampler.choice import make_engine
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_fast import check_supported, held_whole
from rl.sampler.engine import Engine
from rl.sampler.engine_paged import PagedEngine
from rl.sampler.engine_stepped import SteppedEngine
from rl.sampler.kept import Kept
from rl.sampler.lengths import length_switch
from rl.sampler.make import make_base, make_decoder
from rl.sampler.mixed import MixedDecoder, MixedEngine
from rl.sampler.pages import pages_at_most, pool_size
from rl.sampler.precision import frozen_matrices, lower_frozen_
from rl.sampler.prompt_logprobs import score
from rl.sampler.requests import Request
from rl.sampler.routed import RoutedEngine, note_experts
from rl.sampler.split import check_counts
from rl.sampler.weights import Unsupported

__all__ = [
    "Decoder",
    "Engine",
    "Kept",
    "MixedDecoder",
    "MixedEngine",
    "PAGE",
    "PagedEngine",
    "Request",
    "RoutedEngine",
    "SteppedEngine",
    "Unsupported",
    "check_counts",
    "check_supported",
    "frozen_matrices",
    "held_whole",
    "length_switch",
    "lower_frozen_",
    "make_base",
    "make_decoder",
    "make_engine",
    "note_experts",
    "pages_at_most",
    "pool_size",
    "score",
    "without_cudnn",
]
