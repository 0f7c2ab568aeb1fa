"""Serve OpenAI's routes with replies that a test chooses."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def api_server(reply, models=("judge",), cut_off=()):
    """Serve `reply(body, headers)`, which returns (status, JSON) or (status, JSON, headers), and
    record the bodies.
    """
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def send(self, status, value, headers=None):
            text = json.dumps(value).encode()
            self.send_response(status)
            for name, content in (headers or {}).items():
                self.send_header(name, content)
            if isinstance(value, cut_off):  # a chunk that ends before its declared length
                self.send_header("Transfer-Encoding", "chunked")
                text = b"ffff\r\n" + text
            else:
                self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self):
            assert self.path == "/v1/models"
            self.send(200, {"data": [{"id": name} for name in models]})

        def do_POST(self):
            assert self.path in ("/v1/chat/completions", "/v1/completions")
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            self.send(*reply(body, self.headers))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    poll_seconds = 0.01  # how long `shutdown` waits
    thread = threading.Thread(target=server.serve_forever, args=(poll_seconds,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
