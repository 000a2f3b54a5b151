"""What stands between the network and the dashboard: a WSGI layer that every request passes, files included.

A server on the loopback address is still reached by any web page that makes its own name resolve to 127.0.0.1 (DNS
rebinding), so the Host header must be one that was allowed. Requests that could change something must come from the
dashboard's own pages. Where a token is set, nothing is answered without it.
"""

import hashlib
import hmac
from collections.abc import Callable, Collection, Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
COOKIE = "workbench_token"
MAX_BODY = 8 << 20
SAFE_METHODS = ("GET", "HEAD")

StartResponse = Callable[..., Any]
Environ = dict[str, Any]
Wsgi = Callable[[Environ, StartResponse], Iterable[bytes]]
Headers = list[tuple[str, str]]


class Guard:
    """Wraps ``application``. ``hosts``: names allowed in the Host header, without a port. ``policy``: the CSP."""

    def __init__(self, application: Wsgi, *, hosts: Collection[str], policy: str, token: str = "") -> None:
        self._application = application
        self._hosts = frozenset(host.lower() for host in hosts)
        self._cookie = hashlib.sha256(token.encode()).hexdigest() if token else ""
        self._token = token
        self._headers: Headers = [
            ("Content-Security-Policy", policy),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Permissions-Policy", "camera=(), geolocation=(), microphone=()"),
        ]

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request, or let the application answer it."""
        if _host_name(environ.get("HTTP_HOST", "")) not in self._hosts:
            return self._refuse(start_response, "421 Misdirected Request", "this host name is not served here")
        if self._cookie:
            if (given := dict(parse_qsl(environ.get("QUERY_STRING", ""))).get("token")) is not None:
                return self._admit(environ, start_response, given)
            if not hmac.compare_digest(_cookie(environ), self._cookie):
                hint = "open the address with ?token=… that the server printed"
                return self._refuse(start_response, "401 Unauthorized", hint)
        if environ["REQUEST_METHOD"] not in SAFE_METHODS and (refusal := _foreign(environ)):
            return self._refuse(start_response, "403 Forbidden", refusal)

        def start(status: str, headers: Headers, *rest: Any) -> Any:
            ours = {name.lower() for name, _ in self._headers}
            kept = [(name, value) for name, value in headers if name.lower() not in ours]
            return start_response(status, [*kept, *self._headers], *rest)

        return self._application(environ, start)

    def _admit(self, environ: Environ, start_response: StartResponse, given: str) -> Iterable[bytes]:
        """Turn the right token into a cookie and take it out of the address, where it would be seen and kept."""
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return self._refuse(start_response, "401 Unauthorized", "this token is not the server's")
        query = urlencode([pair for pair in parse_qsl(environ["QUERY_STRING"]) if pair[0] != "token"])
        # Two slashes at the start would be another host.
        path = "/" + quote(environ.get("PATH_INFO", "/").lstrip("/\\"))
        headers = [
            ("Location", f"{path}?{query}" if query else path),
            ("Set-Cookie", f"{COOKIE}={self._cookie}; HttpOnly; SameSite=Lax; Path=/"),
            ("Cache-Control", "no-store"),
            ("Content-Length", "0"),
        ]
        start_response("303 See Other", headers + self._headers)
        return [b""]

    def _refuse(self, start_response: StartResponse, status: str, why: str) -> Iterable[bytes]:
        body = f"{status}: {why}\n".encode()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
        start_response(status, headers + self._headers)
        return [body]


def policy(script_hashes: Iterable[str]) -> str:
    """Return the content security policy: nothing but this server, scripts in the page by hash only.

    Styles may stand in the page: plotly.js and the grid add style elements as they draw.
    """
    scripts = " ".join(["'self'", *script_hashes])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "font-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _host_name(host: str) -> str:
    """Return the name in a Host header, in lower case and without its port."""
    name = host.strip().lower()
    return name[: name.find("]") + 1] if name.startswith("[") else name.partition(":")[0]


def _cookie(environ: Environ) -> str:
    try:
        found = SimpleCookie(environ.get("HTTP_COOKIE", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found and found.value.isascii() else ""


def _foreign(environ: Environ) -> str:
    """Say why a request that may change something is refused; empty where it comes from a page of this server."""
    if environ.get("HTTP_SEC_FETCH_SITE", "same-origin") not in ("same-origin", "none"):
        return "a page of another site sent this"
    origin = environ.get("HTTP_ORIGIN")
    if origin is not None and urlsplit(origin).netloc.lower() != environ.get("HTTP_HOST", "").lower():
        return "a page of another origin sent this"
    if environ["REQUEST_METHOD"] != "POST" or not environ.get("CONTENT_TYPE", "").startswith("application/json"):
        return "only POST with JSON is taken"
    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return "the length is no number"
    return "" if 0 <= length <= MAX_BODY else f"more than {MAX_BODY >> 20} MiB"
