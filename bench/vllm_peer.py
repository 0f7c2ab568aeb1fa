"""vLLM's side of bench/sampler_vllm.py: runs in an environment of its own (vLLM has a torch of its
own) and imports nothing of here.

    python bench/vllm_peer.py FOLDER      # a model's folder; then a JSON line in (what to sample), a JSON line out (what it took)
"""

from __future__ import annotations

import json
import os
import sys
import time

del sys.path[0]  # this folder, whose kernels.py would be taken for a package of that name
# What vLLM writes of itself goes to stderr; stdout is the answers' alone.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
# No second process between the caller and the engine, and one thread for the work.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def say(**answer: object) -> None:
    ANSWERS.write(json.dumps(answer) + "\n")
    ANSWERS.flush()


def main() -> None:
    import torch
    import vllm

    torch.set_num_threads(1)
    model = vllm.LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        dtype=sys.argv[2],
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        seed=0,
    )
    say(vllm=vllm.__version__, torch=torch.__version__)
    for line in sys.stdin:
        asked = json.loads(line)
        # A prompt read in the repeat before would not be read again.
        model.reset_prefix_cache()
        params = vllm.SamplingParams(
            n=asked["samples"],
            temperature=1.0,
            max_tokens=asked["new_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if asked["logprobs"] else None,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        start = time.perf_counter()
        outputs = model.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        answers = [one for output in outputs for one in output.outputs]
        logprobs = sum(len(one.logprobs or []) for one in answers)
        say(
            seconds=seconds,
            tokens=sum(len(one.token_ids) for one in answers),
            logprobs=logprobs,
            threads=torch.get_num_threads(),
        )


if __name__ == "__main__":
    main()
