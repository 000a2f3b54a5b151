"""Metrics of a server, over HTTP from a stand-in."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from workbench.engines.metrics import check_url, parse_metrics, read_metrics, server_info, start_profile
from workbench.errors import InputError, UnfitError

SGLANG = """\
# HELP sglang:generation_tokens_total Generated tokens.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 1200.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 1.0
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m"} 3.5
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{model_name="m"} 725.0
# TYPE sglang:cuda_graph_passes_total counter
sglang:cuda_graph_passes_total{mode="decode_cuda_graph"} 300.0
sglang:cuda_graph_passes_total{mode="decode_none"} 3.0
sglang:cuda_graph_passes_total{mode="prefill_none"} 9.0
"""
VLLM = """\
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 50.0
vllm:generation_tokens_total{engine="1",model_name="m"} 50.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 40.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 60.0
"""


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
    """A server whose answers are a dict of path to (status, text), and what was posted to it."""
    answers: dict[str, Any] = {}
    posted: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers.get(self.path, (404, "no"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", answers, posted
        http.shutdown()


def test_sglang_and_vllm_are_read_under_one_set_of_names() -> None:
    found = parse_metrics(SGLANG, 7, "x")
    assert (found.at_ns, found.engine, found.tokens, found.accept_length) == (7, "sglang", 1200.0, 3.5)
    assert (found.graph_passes, found.eager_passes, found.verifies) == (300.0, 3.0, None)
    found = parse_metrics(VLLM, 7, "x")
    assert (found.engine, found.tokens, found.verifies, found.accepted) == ("vllm", 100.0, 40.0, 60.0)


def test_what_cannot_be_read_is_said_in_one_line(server: tuple[str, dict[str, Any], list[Any]]) -> None:
    url, answers, _ = server
    with pytest.raises(UnfitError, match=r"/metrics: answers 404 .*--enable-metrics"):
        read_metrics(url)
    answers["/metrics"] = 200, "<html>hello</html>"
    with pytest.raises(UnfitError, match=r"not Prometheus text|no metric of SGLang or vLLM"):
        read_metrics(url)
    answers["/metrics"] = 200, "# TYPE other gauge\nother 1\n"
    with pytest.raises(UnfitError, match="no metric of SGLang or vLLM"):
        read_metrics(url)
    with pytest.raises(UnfitError, match="cannot be reached"):
        read_metrics("http://127.0.0.1:9")
    for wrong in ("127.0.0.1:30000", "file:///etc/passwd", "http://"):
        with pytest.raises(InputError, match="no http address"):
            check_url(wrong)


def test_server_info_has_two_names_and_may_be_absent(server: tuple[str, dict[str, Any], list[Any]]) -> None:
    url, answers, posted = server
    assert server_info(url) == {}
    answers["/get_server_info"] = 200, '{"version": "0.5.17"}'
    assert server_info(url) == {"version": "0.5.17"}
    answers["/server_info"] = 200, "[]"
    assert server_info(url) == {"version": "0.5.17"}
    start_profile(url, "/tmp/x", 16)  # noqa: S108 - only sent
    assert posted[0][0] == "/start_profile"
    assert posted[0][1] | {"output_dir": ""} == {
        "output_dir": "",
        "num_steps": 16,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": False,
    }
