import sys
import threading

import pytest

from workbench.commands.progress import shown_progress


def test_away_from_a_terminal_a_phase_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress() as progress:
        for done in range(3):
            progress("plain: clean", done, 2)
        progress("plain: traced", 0, 1)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "workbench: plain: clean\nworkbench: plain: traced\n")


def test_in_a_terminal_bars_are_drawn_by_no_thread(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    before = threading.active_count()
    with shown_progress() as progress:
        progress("[red]plain\x1b]0;x", 1, 4)
        assert threading.active_count() == before
        progress("[red]plain\x1b]0;x", 4, 4)
    out, err = capsys.readouterr()
    assert out == ""
    assert "4/4" in err
    assert "[red]plain\\x1b]0;x" in err
