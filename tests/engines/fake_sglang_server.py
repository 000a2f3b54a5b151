"""A stand-in for SGLang's HTTP server: health, metrics, server_info and streamed generation."""

import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODE = os.environ.get("FAKE_SGLANG", "")
TOKENS = {"total": 0}


class ServerArgs:
    def __init__(self, **settings: Any) -> None:
        if MODE == "start":
            raise ValueError("model_path: no such folder")
        self.settings = settings


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/metrics":
            body = f'sglang:generation_tokens_total{{model_name="x"}} {TOKENS["total"]}\n'
        else:
            body = json.dumps({"version": "0.0.fake"})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        count = asked["sampling_params"]["max_new_tokens"] - (MODE == "short")
        for known in range(1, count + 1):
            TOKENS["total"] += 1
            time.sleep(0.001)
            chunk = {"meta_info": {"completion_tokens": known}}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        pass


def launch_server(args: ServerArgs) -> None:
    assert args.settings["host"] == "127.0.0.1"
    assert args.settings["enable_metrics"] is True
    ThreadingHTTPServer(("127.0.0.1", args.settings["port"]), Handler).serve_forever()
