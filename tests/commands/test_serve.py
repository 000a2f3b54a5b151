import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from workbench.commands.serve import is_loopback, token_for
from workbench.errors import InputError


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("box", False)],
)
def test_only_the_loopback_goes_without_a_token(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    token = token_for(host, None)
    assert (token == "") is loopback
    assert token == "" or len(token) >= 32


def test_a_short_token_is_refused() -> None:
    assert token_for("127.0.0.1", "x" * 16) == "x" * 16
    with pytest.raises(InputError, match="shorter than 16"):
        token_for("10.0.0.1", "secret")


@contextmanager
def _served(*arguments: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "workbench", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait()


def test_it_prints_its_address_serves_and_ends_on_interrupt(tmp_path: Path) -> None:
    with _served(str(tmp_path)) as (address, process):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        with urllib.request.urlopen(address) as answer:  # noqa: S310 - this test's own server
            assert b"Decode workbench" in answer.read()
        foreign = urllib.request.Request(address, headers={"Host": "evil.example"})  # noqa: S310
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(foreign)  # noqa: S310
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0  # the way to end a server is no failure


def test_no_folder_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workbench", "serve", str(tmp_path / "absent")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "not a folder" in ended.stderr
