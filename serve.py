"""Serve models: `python serve.py --base-model Qwen/Qwen3-0.6B --port 8000 --output-dir
runs/served`, or under `accelerate launch`.

The `tinker` SDK trains and samples against it (TINKER_BASE_URL=http://localhost:8000, and any key
that begins with tml-), and whatever speaks to an OpenAI-style endpoint samples from it
(OPENAI_BASE_URL=http://localhost:8000/v1). docs/serving.md tells more.
"""

import argparse
import importlib.util
import sys

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--base-model", action="append", required=True, metavar="NAME[=WHERE[,TOKENIZER]]",
                    help="a hub name, folder or tiny:<preset>; =WHERE: served under another name; may be repeated")  # fmt: skip
parser.add_argument(
    "--output-dir",
    help="where everything is written that clients save (default: runs/served-<time>)",
)
parser.add_argument(
    "--host", default="127.0.0.1", help="another one than loopback takes keys (default 127.0.0.1)"
)
parser.add_argument(
    "--port", type=int, default=8000, help="0 takes any that is free, and says which (default 8000)"
)
parser.add_argument(
    "--keys-file",
    help="a key a line; each is a tenant of its own (also WHETSTONE_SERVE_KEYS, comma-separated)",
)
parser.add_argument("--tls-cert", help="a certificate file, to serve over https")
parser.add_argument("--tls-key", help="its key file")
parser.add_argument(
    "--seed",
    type=int,
    default=0,
    help="of samples that are drawn without a seed of their own (default 0)",
)
parser.add_argument(
    "--resume",
    action="store_true",
    help="go on with what is in --output-dir: sessions, models, paths",
)
parser.add_argument(
    "--durable",
    action="store_true",
    help="write each model after every update, so that even SIGKILL loses none",
)
parser.add_argument("--sampler-tp", type=int, default=1, metavar="K",
                    help="under accelerate launch: so many processes of a machine hold the weights together (default 1)")  # fmt: skip
parser.add_argument(
    "--renderer", help="how chat is turned into tokens (default: the model's own chat template)"
)
parser.add_argument("--stop-grace", type=float, default=60.0, metavar="SECONDS",
                    help="from SIGTERM to exit: running work gets a third, then models are written (default 60)")  # fmt: skip
limits = parser.add_argument_group(
    "limits", "with several tenants, each may hold at most half of what the others leave free"
)
limits.add_argument("--body-bytes", type=int, help="of one request (default 256 MiB)")
limits.add_argument(
    "--header-seconds", type=float, help="for a request's line and headers to come (default 20)"
)
limits.add_argument(
    "--body-seconds",
    type=float,
    help="for its body to come, and 1 more for every 64 KiB (default 60)",
)
limits.add_argument(
    "--held-bytes",
    type=int,
    help="of requests that wait and of answers that are kept (default 1 GiB)",
)
limits.add_argument("--open-requests", type=int, help="answered at once (default 2048)")
limits.add_argument("--queued", type=int, help="requests that wait (default 4096)")
limits.add_argument("--tokens", type=int, help="of one request (default 4000000)")
limits.add_argument("--sessions", type=int, help="alive at once (default 256)")
limits.add_argument(
    "--models", type=int, help="training clients, in memory or written out (default 64)"
)
limits.add_argument(
    "--models-in-memory",
    type=int,
    help="the least recently used is written out and read back (default 8)",
)
limits.add_argument(
    "--samplers",
    type=int,
    help="sampling sessions; then the tenant with the most loses its oldest (default 4096)",
)
limits.add_argument(
    "--samplers-in-memory", type=int, help="sampling sessions whose weights are held (default 64)"
)
limits.add_argument(
    "--session-seconds",
    type=float,
    help="without a heartbeat until a session's memory is given back (default 900)",
)

if __name__ == "__main__":
    args = parser.parse_args()
    from rl.quick import quick

    quick()
    from rl.run import guarded

    def serve() -> None:
        from rl.errors import UserError

        lacking = [
            name
            for name in ("starlette", "uvicorn", "google")
            if importlib.util.find_spec(name) is None
        ]
        if lacking:
            raise UserError(
                f"serving needs packages that are not here ({', '.join(lacking)}): pip install -r requirements-serve.txt"
            )
        from rl.serve import main

        main(args)

    sys.exit(guarded(serve, see="python serve.py --help", outcome="nothing is served"))
