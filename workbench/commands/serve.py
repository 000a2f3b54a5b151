"""``workbench serve``: the dashboard over a folder of runs."""

import ipaddress
import logging
import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.errors import InputError, UnfitError
from workbench.terminal import note, print_line

if TYPE_CHECKING:
    from workbench.dashboards.guard import Guard

NEEDS = ("dash", "dash_ag_grid", "waitress")
THREADS = 6


def serve(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="Folder of bundles, or one bundle.")] = Path("runs"),
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; any but the loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port; 0: any free one.")] = 8050,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TEXT",
            envvar="WORKBENCH_TOKEN",
            help="Token to ask for. Default: none on the loopback, a random one elsewhere.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Name under which a browser may ask for it, beside ADDRESS; repeatable.",
        ),
    ] = None,
    allow_run: Annotated[
        bool, typer.Option("--allow-run", help="Let the page start shipped scenarios on this machine.")
    ] = False,
) -> None:
    """Serve the dashboard over a folder of bundles until interrupted.

    Read only unless --allow-run, on the loopback unless --host; nothing is fetched from anywhere else.
    """
    if lacking := [name for name in NEEDS if find_spec(name) is None]:
        raise UnfitError(f"serving needs {', '.join(lacking)}", hint="pip install 'decode-workbench[dash]'")
    own_token = token_for(host, token)
    from waitress import create_server

    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # a page's burst of requests is no news
    try:
        server = create_server(
            application(runs, host, own_token, allow_host or [], allow_run=allow_run),
            host=host,
            port=port,
            threads=THREADS,
            ident=None,
            max_request_body_size=8 << 20,
        )
    except OSError as error:
        raise InputError(
            f"{host}:{port}: cannot listen there ({error.strerror})", hint="choose another --port or --host"
        ) from None
    shown = f"[{host}]" if ":" in host else host
    print_line(f"http://{shown}:{server.effective_port}/{f'?token={own_token}' if own_token else ''}")
    note("stop with Ctrl-C")
    try:
        server.run()
    finally:
        server.close()


def token_for(host: str, token: str | None) -> str:
    """Return the token to ask for; empty: none. Raises InputError for one that is too short to keep anybody out."""
    if token is not None and len(token) < 16:
        raise InputError("--token: shorter than 16 characters", hint="leave it out and a random one is printed")
    return token or ("" if is_loopback(host) else secrets.token_urlsafe(24))


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine and nothing else."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def application(runs: Path, host: str, token: str, hosts: list[str], *, allow_run: bool) -> "Guard":
    """Return the WSGI application. Raises InputError where ``runs`` is no folder."""
    from workbench.dashboards.app import create_app, guarded
    from workbench.dashboards.context import Context
    from workbench.dashboards.start import Starter
    from workbench.runs.catalogue import Catalogue

    context = Context(Catalogue(runs), Starter(runs) if allow_run else None)
    allowed = {f"[{host}]" if ":" in host else host, *hosts}
    return guarded(create_app(context), token=token, hosts=allowed)
