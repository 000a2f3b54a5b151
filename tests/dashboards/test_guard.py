from pathlib import Path
from typing import Any

import pytest
from werkzeug.test import Client, TestResponse

from workbench.commands.serve import application
from workbench.dashboards.guard import COOKIE, Guard, policy

TOKEN = "correct-horse-battery"  # noqa: S105 - of a test


@pytest.fixture(scope="module")
def open_client(runs: Path) -> Client:
    return Client(application(runs, "127.0.0.1", "", [], allow_run=False))


@pytest.fixture
def closed_client(runs: Path) -> Client:
    return Client(application(runs, "0.0.0.0", TOKEN, ["box"], allow_run=False))  # noqa: S104 - nothing is bound


def _get(client: Client, path: str = "/", host: str = "127.0.0.1:8050", **headers: str) -> TestResponse:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.get(path, headers={"Host": host, **named})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8050", "localhost:1", "LOCALHOST", "[::1]:8050"])
def test_the_loopbacks_names_are_served(open_client: Client, host: str) -> None:
    assert _get(open_client, host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "evil.example:8050", "", "evil[::1]", "127.0.0.1@evil", "10.0.0.1"],
)
@pytest.mark.parametrize("path", ["/", "/_dash-layout", "/assets/browser.js", "/report.css"])
def test_a_foreign_host_gets_nothing(open_client: Client, host: str, path: str) -> None:
    answer = _get(open_client, path, host)
    assert answer.status_code == 421
    assert len(answer.data) < 200


def test_every_answer_carries_the_headers(open_client: Client) -> None:
    for path in ("/", "/_dash-layout", "/assets/browser.js", "/assets/absent.js", "/report.css"):
        headers = _get(open_client, path).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "http" not in headers["Content-Security-Policy"]
        assert "unsafe-eval" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path", ["/assets/../app.py", "/assets/%2e%2e/app.py", "/assets/..%2f..%2fpyproject.toml", "/assets//etc/passwd"]
)
def test_files_beside_the_assets_are_not_served(open_client: Client, path: str) -> None:
    answer = _get(open_client, path)
    assert b"def " not in answer.data
    assert b"build-backend" not in answer.data
    assert b"root:" not in answer.data


def _post(client: Client, kind: str = "application/json", **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {"Host": "127.0.0.1:8050", "Content-Type": kind, **named}
    return client.post("/_dash-update-component", data=b"{}", headers=sent).status_code


def test_only_the_dashboards_own_pages_may_post(open_client: Client) -> None:
    assert _post(open_client, Origin="http://evil.example") == 403
    assert _post(open_client, Sec_Fetch_Site="cross-site") == 403
    assert _post(open_client, kind="text/plain") == 403
    assert _post(open_client, Origin="http://127.0.0.1:8050", Sec_Fetch_Site="same-origin") != 403
    assert open_client.put("/", headers={"Host": "127.0.0.1"}).status_code == 403


def test_without_the_token_nothing_is_answered(closed_client: Client) -> None:
    for path in ("/", "/assets/browser.js", "/_dash-dependencies", "/report.css"):
        assert _get(closed_client, path, "box").status_code == 401
    assert _get(closed_client, f"/?token={TOKEN}x", "box").status_code == 401
    assert _get(closed_client, "/?token=%C3%A9", "box").status_code == 401
    assert _get(closed_client, "/", "box", Cookie=f"{COOKIE}={TOKEN}").status_code == 401
    assert _get(closed_client, f"/?token={TOKEN}", "evil.example").status_code == 421


def test_the_token_becomes_a_cookie_and_leaves_the_address(closed_client: Client) -> None:
    answer = _get(closed_client, f"/timeline?run=a&token={TOKEN}", "box")
    assert answer.status_code == 303
    assert answer.headers["Location"] == "/timeline?run=a"
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert TOKEN not in cookie
    assert _get(closed_client, "/", "box", Cookie=cookie.split(";")[0]).status_code == 200


def test_the_redirect_stays_here() -> None:
    def application(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b""]

    client = Client(Guard(application, hosts={"box"}, policy=policy(()), token=TOKEN))
    answer = client.get(f"//evil.example/?token={TOKEN}", headers={"Host": "box"})
    assert not answer.headers["Location"].startswith("//")
    assert "://" not in answer.headers["Location"]
