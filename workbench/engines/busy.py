"""Keep the engine of a scenario's variant decoding, and attach to it meanwhile: ``python -m workbench.engines.busy``.

    python -m workbench.engines.busy versus-sglang-gpt-oss-20b sglang --attach runs/attached --requests 6

Decodes requests back to back: some alone, some while ``attach`` watches the GPU from outside, some alone again,
and says what watching cost. One JSON line a request, the summary last. With ``--server`` the engine stands behind HTTP,
and ``attach`` is given its address: the engine's own counters then say how many tokens and forwards there were.
"""

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from workbench.attach import Options, attach
from workbench.decode.pipeline import build_pipeline
from workbench.decode.rungs.fit import load_shape
from workbench.engines.sglang_engine import SglangEngine
from workbench.engines.sglang_server import SglangServer
from workbench.engines.sglang_session import SglangSession
from workbench.errors import InputError, WorkbenchError
from workbench.ingest.byte_model import Model
from workbench.scenario import load_scenario


def request(client: SglangSession | SglangServer, prompt: list[int], count: int) -> dict[str, float]:
    """Decode one request; return tok/s and tokens a step, the first token left out of both."""
    stream = client.generate(prompt, count)
    seconds = (stream.times_ns[-1] - stream.times_ns[0]) / 1e9
    tokens = stream.counts[-1] - stream.counts[0]
    verifies = stream.meta.get("spec_verify_ct")
    accept = tokens / verifies if isinstance(verifies, int) and verifies else 1.0
    return {"tok_s": tokens / seconds, "accept_length": accept, "chunks": len(stream.counts) - 1}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engines.busy", description=__doc__)
    parser.add_argument("scenario")
    parser.add_argument("variant")
    parser.add_argument("--requests", type=int, default=6, help="requests before attaching, and as many after")
    parser.add_argument("--tokens", type=int, default=256, help="tokens a request")
    parser.add_argument("--attach", type=Path, metavar="DIR", help="attach meanwhile, and write its bundle there")
    parser.add_argument("--server", action="store_true", help="serve over HTTP, and attach by address")
    parser.add_argument("--profile-steps", type=int, default=0, metavar="N", help="with --server: trace N steps too")
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="the GPU it runs on, by nvidia-smi's number")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long to watch")
    options = parser.parse_args(arguments)
    try:
        variants = {one.name: one for one in load_scenario(options.scenario).variants()}
        if options.variant not in variants:
            raise InputError(f"no variant {options.variant!r} in {options.scenario}", hint=", ".join(variants))
        return _run(variants[options.variant], options)
    except WorkbenchError as error:
        print(f"busy: {error}", file=sys.stderr)
        return int(error.exit_code)


def _run(variant: Any, options: argparse.Namespace) -> int:
    pipeline = build_pipeline(variant)
    engine = pipeline.engine
    if not isinstance(engine, SglangEngine):
        raise InputError(f"variant {variant.name!r}: engine.kind is not 'sglang'")
    running = SglangServer(engine.session) if options.server else engine
    with closing(pipeline), running:
        prompt = pipeline.prompts[0].tokens
        client = running if isinstance(running, SglangServer) else engine.session
        address = running.url if isinstance(running, SglangServer) else None
        say({"event": "ready", "url": address, **engine.session.versions})

        def some(when: str, count: int) -> list[dict[str, float]]:
            found = []
            for _ in range(count):
                found.append(request(client, prompt, options.tokens))
                say({"event": "request", "when": when, **found[-1]})
            return found

        some("warm-up", 2)
        before = some("before", options.requests)
        during: list[dict[str, float]] = []
        if options.attach:
            known = median(one["tok_s"] for one in before), median(one["accept_length"] for one in before)
            watcher = threading.Thread(target=_watch, args=(variant, len(prompt), known, address, options), daemon=True)
            watcher.start()
            while watcher.is_alive():
                during += some("attached", 1)
            watcher.join()
        after = some("after", options.requests)
        alone, watched = (
            median(one["tok_s"] for one in part) if part else None for part in (before + after, during[1:-1] or during)
        )
        say(
            {
                "event": "summary",
                "tok_s": alone,
                "tok_s_attached": watched,
                "cost_percent": None if watched is None or alone is None else 100 * (1 - watched / alone),
                "accept_length": median(one["accept_length"] for one in before + after),
            }
        )
    return 0


def _watch(
    variant: Any, prompt: int, known: tuple[float, float], address: str | None, options: argparse.Namespace
) -> None:
    spec = load_shape(variant)
    tok_s, accept_length = (None, None) if address else known
    try:
        attach(
            options.attach,
            gpu=options.gpu,
            url=address,
            options=Options(
                seconds=options.seconds,
                model=Model(spec.name, 1, variant.precision.policy),
                width=variant.drafter.width,
                context=prompt + options.tokens // 2,
                tok_s=tok_s,
                accept_length=accept_length,
                profile_steps=options.profile_steps if address else 0,
                profile_folder=str(options.attach.resolve().with_name(f"{options.attach.name}-profile")),
            ),
        )
        say({"event": "attached", "bundle": str(options.attach)})
    except (WorkbenchError, OSError) as error:
        say({"event": "attach failed", "why": str(error)})


def say(line: dict[str, Any]) -> None:
    """Print one line of JSON."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
