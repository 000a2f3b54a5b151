"""What a running server says of itself over HTTP: its Prometheus counters, and SGLang's ``/server_info``.

Names differ from engine to engine and from version to version; ``Snapshot`` holds what was found under one set of
names, and None where an engine does not export it.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from workbench.errors import InputError, UnfitError

TIMEOUT_S = 5.0
MAX_BYTES = 16 << 20

_TOKENS = ("sglang:generation_tokens", "vllm:generation_tokens")
_RUNNING = ("sglang:num_running_reqs", "vllm:num_requests_running")
_PASSES = "sglang:cuda_graph_passes"
_VERIFIES = ("sglang:spec_verify_calls", "vllm:spec_decode_num_drafts")
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_ACCEPT_LENGTH = "sglang:spec_accept_length"
_THROUGHPUT = "sglang:gen_throughput"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One reading of ``/metrics`` at ``at_ns`` (``time.perf_counter_ns``). Counters are since the server's start.

    ``tokens``: generated tokens. ``running``: requests being decoded. ``graph_passes``, ``eager_passes``: decode
    forwards with and without a CUDA graph. ``verifies``: verify forwards of speculation. ``accepted``: accepted draft
    tokens. ``accept_length`` and ``throughput`` (tok/s) are the engine's own averages over a window of its choice.
    """

    at_ns: int
    engine: str
    tokens: float | None = None
    running: float | None = None
    graph_passes: float | None = None
    eager_passes: float | None = None
    verifies: float | None = None
    accepted: float | None = None
    accept_length: float | None = None
    throughput: float | None = None


def check_url(url: str) -> str:
    """Return ``url`` without its trailing slash. Raises InputError where it is no plain http(s) address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"--url {url!r}: no http address", hint="write it like http://127.0.0.1:30000")
    return url.rstrip("/")


def read_metrics(url: str) -> Snapshot:
    """Read ``url``/metrics. Raises UnfitError where there is nothing to read or no engine is known in it."""
    before = time.perf_counter_ns()
    text = _get(f"{url}/metrics", "start the server with --enable-metrics (SGLang); vLLM has them on")
    at_ns = (before + time.perf_counter_ns()) // 2
    return parse_metrics(text, at_ns, f"{url}/metrics")


def parse_metrics(text: str, at_ns: int, source: str) -> Snapshot:
    """Return what the Prometheus exposition ``text`` says. Raises UnfitError where it is none or of no known engine."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                samples.setdefault(name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise UnfitError(f"{source}: not Prometheus text ({str(error)[:120]})") from None
    engines = [engine for engine in ("sglang", "vllm") if any(name.startswith(f"{engine}:") for name in samples)]
    if not engines:
        raise UnfitError(
            f"{source}: no metric of SGLang or vLLM among {len(samples)}", hint="is this the engine's port?"
        )

    def total(names: Iterable[str], mode: str = "") -> float | None:
        found = [
            value
            for name in names
            for labels, value in samples.get(name, ())
            if not mode or labels.get("mode", "").startswith(mode)
        ]
        return sum(found) if found else None

    return Snapshot(
        at_ns=at_ns,
        engine=engines[0],
        tokens=total(_TOKENS),
        running=total(_RUNNING),
        graph_passes=total([_PASSES], "decode_cuda_graph"),
        eager_passes=total([_PASSES], "decode_none"),
        verifies=total(_VERIFIES),
        accepted=total([_ACCEPTED]),
        accept_length=total([_ACCEPT_LENGTH]),
        throughput=total([_THROUGHPUT]),
    )


def server_info(url: str) -> dict[str, Any]:
    """Return SGLang's ``/server_info`` (``/get_server_info`` before 0.5.20), or {} where the server has none."""
    for path in ("server_info", "get_server_info"):
        try:
            found = json.loads(_get(f"{url}/{path}", ""))
        except (UnfitError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def start_profile(url: str, folder: str, steps: int) -> None:
    """Ask SGLang to profile its next ``steps`` forwards into ``folder`` on its machine, stacks and shapes off."""
    body = {
        "output_dir": folder,
        "num_steps": steps,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": False,
    }
    _post(f"{url}/start_profile", body)


def _get(url: str, hint: str) -> str:
    return _fetch(urllib.request.Request(url), hint)  # noqa: S310 - http only, by check_url


def _post(url: str, body: dict[str, Any]) -> str:
    data = json.dumps(body).encode()
    return _fetch(urllib.request.Request(url, data, {"Content-Type": "application/json"}), "")  # noqa: S310


def _fetch(request: urllib.request.Request, hint: str) -> str:
    # A proxy has no business between a profiler and a server on the same machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            raw = response.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise UnfitError(f"{request.full_url}: answers {error.code} {error.reason}", hint=hint) from None
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise UnfitError(f"{request.full_url}: cannot be reached ({reason})", hint="is the server running?") from None
    if len(raw) > MAX_BYTES:
        raise UnfitError(f"{request.full_url}: answers with more than {MAX_BYTES >> 20} MiB")
    return str(raw.decode(errors="replace"))
