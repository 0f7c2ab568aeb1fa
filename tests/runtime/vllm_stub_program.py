"""A stub of `vllm serve` with faults: vllm_stub_program.py STATE FAULT FIRST LAST URL MODEL --port
N

It forwards requests to the stub at URL, so it needs no torch and starts quickly. The fault applies
to starts FIRST to LAST, which the file STATE counts. "ends": it exits before it answers. "silent":
it never answers. "dies", "hangs": it is killed or stopped at its fourth request of samples.
"""

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

OPTIONS = "--enable-lora", "--enable-sleep-mode"
arguments = [word for word in sys.argv[1:] if word not in OPTIONS]
state, fault, first, last, url, model, *options = arguments
count = Path(state)
starts = int(count.read_text()) + 1 if count.is_file() else 1
count.write_text(str(starts))
if not int(first) <= starts <= int(last):
    fault = "none"
if fault == "ends":
    print("Loading the model\nCUDA error: no such device", flush=True)
    sys.exit(3)
if fault == "silent":
    time.sleep(600)
samples = iter(range(1, 10**9))
FATAL = {"dies": signal.SIGKILL, "hangs": signal.SIGSTOP}


def call(path, body):
    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            return 200, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, body):
        if self.path == "/inference/v1/generate" and next(samples) == 4 and fault in FATAL:
            os.kill(os.getpid(), FATAL[fault])
        status, text = call(self.path, body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


ThreadingHTTPServer.request_queue_size = 128
call("/start", json.dumps({"model": model}).encode())
address = "127.0.0.1", int(options[options.index("--port") + 1])
ThreadingHTTPServer(address, Handler).serve_forever()
