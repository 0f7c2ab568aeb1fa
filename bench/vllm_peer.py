"""Run vLLM for bench/sampler.py in a separate environment.

vLLM needs a different torch version, so this script imports nothing from the repository.

    python bench/vllm_peer.py FOLDER

FOLDER is a model's folder. Each JSON line on stdin (a sampling request) gets a JSON line on stdout
(the seconds).
"""

from __future__ import annotations

import json
import os
import sys
import time

# This folder's kernels.py would shadow a package.
del sys.path[0]
# Other output of vLLM is sent to stderr; stdout carries only the answers.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
# Run the engine in the caller's process, with a single compute thread.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def write_answer(**answer: object) -> None:
    ANSWERS.write(json.dumps(answer) + "\n")
    ANSWERS.flush()


def main() -> None:
    import torch
    import vllm

    torch.set_num_threads(1)
    model = vllm.LLM(
        model=sys.argv[1], skip_tokenizer_init=True, dtype=sys.argv[2], max_model_len=1024,
        max_num_seqs=64, max_num_batched_tokens=8192, seed=0,
    )  # fmt: skip
    write_answer(vllm=vllm.__version__, torch=torch.__version__)
    for line in sys.stdin:
        request = json.loads(line)
        # Otherwise vLLM would reuse the cached prompt of the previous repeat.
        model.reset_prefix_cache()
        params = vllm.SamplingParams(
            n=request["samples"], temperature=1.0, max_tokens=request["new_tokens"], ignore_eos=True,
            detokenize=False, logprobs=0 if request["logprobs"] else None,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        start = time.perf_counter()
        outputs = model.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        answers = [item for output in outputs for item in output.outputs]
        tokens = sum(len(item.token_ids) for item in answers)
        logprobs = sum(len(item.logprobs or []) for item in answers)
        write_answer(
            seconds=seconds, tokens=tokens, logprobs=logprobs, threads=torch.get_num_threads()
        )


if __name__ == "__main__":
    main()
