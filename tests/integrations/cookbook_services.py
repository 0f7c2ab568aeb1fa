"""Provide local services for tinker-cookbook's recipes, because external services are unreachable
from this machine. Each service answers the same requests as the real service.

The services are SandboxFusion (`POST /run_code`) over the project's sandbox; Gemini's embeddings on
Vertex, with the token that its client requests first; and Chroma, the package's real server, filled
with FACTS.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

FACTS = [
    "The capital of France is Paris.",
    "The capital of Italy is Rome.",
    "Water boils at 100 degrees.",
    "A week has 7 days.",
    "A spider has 8 legs.",
    "A cat has 4 legs.",
]
COLLECTION, WIDTH = "wiki_embeddings", 768  # the recipe's defaults


def embedding(text: str, width: int) -> list[float]:
    """Return a bag-of-words embedding. Each word has a position, so texts that share words are
    close to each other.
    """
    result = [0.0] * width
    for word in text.lower().replace("?", " ").replace(".", " ").split():
        result[int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % width] += 1.0
    size = sum(x * x for x in result) ** 0.5 or 1.0
    return [x / size for x in result]


class FakeServiceServer:
    """Serve HTTP requests for SandboxFusion and for Vertex; `counts`: requests by kind."""

    def __init__(self) -> None:
        from rl.sandbox import Sandbox, SandboxLimits

        self.sandbox, self.counts = (
            Sandbox(workers=1),
            {"run_code": 0, "token": 0, "embedContent": 0},
        )
        stand, limits = self, SandboxLimits(wall_s=20.0)

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                kind = self.path.rsplit("/", 1)[-1].rpartition(":")[2]
                stand.counts[kind] += 1
                if kind == "token":
                    output: dict = {
                        "access_token": "of-this-machine",
                        "expires_in": 3600,
                        "token_type": "Bearer",
                    }
                elif kind == "embedContent":
                    text = " ".join(part["text"] for part in json.loads(raw)["content"]["parts"])
                    output = {"embedding": {"values": embedding(text, WIDTH)}}
                else:
                    output = stand.run(json.loads(raw), limits)
                body = json.dumps(output).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def run(self, request: dict, limits: object) -> dict:
        files = {name: base64.b64decode(text).decode() for name, text in request["files"].items()}
        # recipes expect numpy in the sandbox
        program = 'import sys\nsys.path.append("/inside/packages")\n' + request["code"]
        ran = self.sandbox.run(program, files=files, limits=limits)  # type: ignore[arg-type]
        result = {
            "status": "TimeLimitExceeded" if ran.timed_out else "Finished",
            "return_code": ran.returncode,
            "stdout": ran.stdout,
            "stderr": ran.stderr,
            "execution_time": ran.wall_s,
        }
        return {
            "status": "Success" if ran.returncode == 0 else "Failed",
            "message": "",
            "run_result": result,
        }

    def environment(self, work: Path) -> dict[str, str]:
        """Return the environment variables that point clients to this server. Writes the key of a
        fictitious account.
        """
        made = subprocess.run(
            ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"],
            capture_output=True,
            text=True,
            check=True,
        )
        account = {
            "type": "service_account",
            "project_id": "bench",
            "private_key": made.stdout,
            "private_key_id": "1",
            "client_email": "nobody@localhost",
            "client_id": "1",
            "token_uri": f"{self.url}/token",
        }
        (work / "account.json").write_text(json.dumps(account))
        return {
            "SANDBOX_URL": f"{self.url}/run_code",
            "GOOGLE_VERTEX_BASE_URL": self.url,
            "GCP_VERTEXAI_PROJECT_NUMBER": "bench",
            "GCP_VERTEXAI_REGION": "nowhere",
            "GOOGLE_APPLICATION_CREDENTIALS": str(work / "account.json"),
        }

    def close(self) -> None:
        self.server.shutdown()
        self.sandbox.close()


def start_chroma(python: str, work: Path) -> tuple[subprocess.Popen, int]:
    """Start Chroma's server from the clients' environment, fill it with FACTS, and return the
    process and its port.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(python).parent / "chroma"),
        "run",
        "--path",
        str(work / "chroma"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with (work / "chroma.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=work)
    for _ in range(120):
        time.sleep(0.5)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
    subprocess.run([python, __file__, str(port)], check=True)
    return process, port


def fill(port: int) -> None:
    """Fill Chroma with FACTS. Runs with the clients' python, which has chromadb."""
    import chromadb

    result = chromadb.HttpClient(host="127.0.0.1", port=port).create_collection(COLLECTION)
    result.add(
        ids=[str(i) for i in range(len(FACTS))],
        documents=FACTS,
        embeddings=[embedding(fact, WIDTH) for fact in FACTS],
    )


if __name__ == "__main__":
    fill(int(sys.argv[1]))
