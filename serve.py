"""Serve models: `python serve.py --base-model Qwen/Qwen3-0.6B --port 8000 --output-dir
runs/served`, or under `accelerate launch`.

The `tinker` SDK trains and samples with this server (TINKER_BASE_URL=http://localhost:8000, and any
key that begins with tml-). Clients of OpenAI-style endpoints sample from it
(OPENAI_BASE_URL=http://localhost:8000/v1). See docs/serving.md.
"""

import argparse
import importlib.util
import sys

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--base-model",
    action="append",
    required=True,
    metavar="NAME[=WHERE[,TOKENIZER]]",
    help="a hub name, folder or tiny:<preset>; =WHERE: serve it under this name; may be repeated",
)
parser.add_argument(
    "--output-dir",
    help="folder for all data that clients save (default: runs/served-<time>)",
)
parser.add_argument(
    "--host",
    default="127.0.0.1",
    help="address to listen on; other than loopback requires keys (default 127.0.0.1)",
)
parser.add_argument(
    "--port",
    type=int,
    default=8000,
    help="port; 0 selects a free port and prints it (default 8000)",
)
parser.add_argument(
    "--keys-file",
    help="file with a key per line, each a separate tenant (also WHETSTONE_SERVE_KEYS, "
    "comma-separated)",
)
parser.add_argument(
    "--allowed-hosts",
    nargs="+",
    metavar="NAME",
    help="without keys: names besides localhost under which browsers may use the server, such as "
    "that of a proxy",
)
parser.add_argument("--tls-cert", help="certificate file, to serve over https")
parser.add_argument("--tls-key", help="key file of the certificate")
parser.add_argument(
    "--seed",
    type=int,
    default=0,
    help="sampling seed of requests without a seed (default 0)",
)
parser.add_argument(
    "--resume",
    action="store_true",
    help="continue from --output-dir: sessions, models, paths",
)
parser.add_argument(
    "--durable",
    action="store_true",
    help="write each model after every update, so that even SIGKILL loses no update",
)
parser.add_argument(
    "--sampler",
    choices=("auto", "vllm"),
    default="auto",
    help="auto: the sampler in this process. vllm: vLLM servers sample from the LoRA adapters of "
    "all clients (docs/vllm.md)",
)
parser.add_argument(
    "--sampler-url",
    nargs="+",
    metavar="URL",
    help="addresses of the vLLM servers, such as http://localhost:8000",
)
parser.add_argument(
    "--sampler-folder",
    metavar="FOLDER",
    help="folder for adapters that all vLLM servers see under the same path (default: a temporary "
    "folder of this machine)",
)
parser.add_argument(
    "--renderer", help="renderer that converts chats to tokens (default: the model's chat template)"
)
parser.add_argument(
    "--stop-grace",
    type=float,
    default=60.0,
    metavar="SECONDS",
    help="from SIGTERM to exit: running work gets a third, then models are written (default 60)",
)
worker = parser.add_argument_group(
    "model and memory",
    "settings of train.py that apply to all models (docs/reference/settings.md)",
)
# rl.serve.serve_settings.WORKER_FLAGS: rl.config reads the values
for flag, text in {
    "precision": "auto, fp32 or bf16: precision of the arithmetic (default auto: bf16 on a GPU)",
    "base-dtype": "auto, fp32, bf16 or 4bit: of the frozen base under the adapters (default auto: "
    "as the arithmetic; 4bit: the learner's base as NF4, the sampler's copy stays bf16, and each "
    "model has both for itself)",
    "kv-cache-tokens": "size of a device's KV cache, in tokens (default 262144)",
    "max-rows": "maximum number of sequences decoded at once on a device (default 1024)",
    "sampler-cache": "auto, plain or paged: layout of the KV cache (default auto)",
    "sampler-tp": "under accelerate launch: tensor parallel size, the number of processes that "
    "share the sampler's weights (default 1)",
    "num-speculative-tokens": "maximum number of draft tokens of a sequence in a decode step: "
    "speculative decoding (default 0: off)",
    "token-budget": "tokens of a micro-batch of training, which set the activation memory "
    "(default 16384)",
    "layout": "auto, padded, packed or shared: layout of a micro-batch (default auto)",
    "kept-logits-gib": "memory in which the output head may keep logits, in GiB (default: a share "
    "of the free memory)",
    "fused-logprobs": "false: compute logprobs without the fused kernel (default true)",
    "optimizer": "adamw, adamw_8bit or paged_adamw_8bit (default adamw)",
    "context-parallel-size": "under accelerate launch: processes that share a micro-batch of long "
    "sequences (default 1)",
}.items():
    worker.add_argument(f"--{flag}", help=text)
for flag, text in {
    "gradient-checkpointing": "recompute activations in the backward pass: less memory, more time",
    "offload-activations": "keep the inputs of the layers in CPU memory meanwhile",
}.items():
    worker.add_argument(f"--{flag}", nargs="?", const="true", metavar="BOOL", help=text)
limits = parser.add_argument_group(
    "limits",
    "with several tenants, each may hold at most half of the capacity that the others leave free",
)
limits.add_argument("--body-bytes", type=int, help="bytes of a request's body (default 256 MiB)")
limits.add_argument(
    "--header-seconds", type=float, help="time limit of a request's line and headers (default 20)"
)
limits.add_argument(
    "--body-seconds",
    type=float,
    help="time limit of a request's body, plus 1 for every 64 KiB (default 60)",
)
limits.add_argument(
    "--held-bytes",
    type=int,
    help="bytes of waiting requests and kept responses (default 1 GiB)",
)
limits.add_argument(
    "--open-requests", type=int, help="requests processed concurrently (default 2048)"
)
limits.add_argument("--queued", type=int, help="waiting requests (default 4096)")
limits.add_argument("--tokens", type=int, help="tokens of a request (default 4000000)")
limits.add_argument("--sessions", type=int, help="concurrent sessions (default 256)")
limits.add_argument(
    "--models", type=int, help="training clients, in memory or on disk (default 64)"
)
limits.add_argument(
    "--models-in-memory",
    type=int,
    help="models in memory; the least recently used moves to disk until its next use (default 8)",
)
limits.add_argument(
    "--samplers",
    type=int,
    help="sampling sessions; beyond it, the tenant with the most loses its oldest (default 4096)",
)
limits.add_argument(
    "--samplers-in-memory", type=int, help="sampling sessions with weights in memory (default 64)"
)
limits.add_argument(
    "--session-seconds",
    type=float,
    help="time without a heartbeat after which a session's memory is freed (default 900)",
)


def is_installed(module: str) -> bool:
    """Return whether a module can be imported. `google` alone is a folder of several packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


if __name__ == "__main__":
    from rl.config import parse_script

    args = parse_script(parser, "nothing is served")
    from rl.startup import reduce_gc

    reduce_gc()
    from rl.trainer import run_guarded

    def serve() -> None:
        from rl.errors import UserError, install_command

        needed = "fastapi starlette uvicorn google.protobuf prometheus_client zstandard".split()
        lacking = [name for name in needed if not is_installed(name)]
        if lacking:
            raise UserError(
                f"serving needs packages that are not installed ({', '.join(lacking)}): "
                f"{install_command('serve')}"
            )
        from rl.serve import main

        main(args)

    sys.exit(run_guarded(serve, see="python serve.py --help", outcome="nothing is served"))
