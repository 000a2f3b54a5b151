"""The program that serves SGLang over HTTP: run by the engine's own interpreter, it imports nothing of the workbench.

It reads one line of JSON, keyword arguments of SGLang's ``ServerArgs``, and serves until it is killed. The command line
of ``sglang.launch_server`` would take the same, but spells some of them differently from version to version.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Serve."""
    settings = json.loads(sys.stdin.readline())
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    launch_server(ServerArgs(**settings))


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # nothing beside this file may shadow the engine's
    main()
