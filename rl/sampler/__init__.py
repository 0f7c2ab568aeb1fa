"""In-process generation: an engine with continuous batching over a decoder with a KV cache.

    decoder = make_decoder(model)
    engine = Engine(decoder, eos_token_ids=(2,), kv_cache_tokens=100_000, max_rows=512)
    engine.add(Request(prompt=[1, 5, 7], num_samples=8, params=SamplingParams(max_tokens=64), seed=0, problem=3))
    responses = engine.run()
"""

from rl.sampler.decoder import Decoder
from rl.sampler.engine import Engine
from rl.sampler.make import make_decoder
from rl.sampler.prompt_logprobs import score
from rl.sampler.requests import Counters, Finished, Request

__all__ = ["Counters", "Decoder", "Engine", "Finished", "Request", "make_decoder", "score"]
