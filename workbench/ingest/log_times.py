"""The moments that log lines state, as ns; lines of one log that jump back over midnight or New Year go on."""

import re
from datetime import UTC, datetime

_FULL = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_MONTH = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_CLOCK = re.compile(r"\[(\d\d):(\d\d):(\d\d)\b")

NO_YEAR = 2000
"""Year of logs that state none: a leap year, so that every date exists."""

SECOND = 1_000_000_000


class LogClock:
    """Reads the time of line after line. ``dated``: whether lines state the year, so that times are on a calendar."""

    def __init__(self) -> None:
        self.dated = True
        self._last = -(1 << 62)
        self._shift = 0

    def read(self, line: str) -> int | None:
        """Return ns since 1970 of a clock whose offset from UTC the line does not state; None without a time."""
        found = self._parse(line[:200])
        if found is None:
            return None
        moment, wraps = found
        if wraps and moment + self._shift < self._last - wraps // 2:
            self._shift += wraps
        self._last = moment + self._shift
        return self._last

    def _parse(self, line: str) -> tuple[int, int] | None:
        """Return the moment, and after how long such times begin again; 0 for never."""
        try:
            if found := _FULL.search(line):
                year, month, day, hour, minute, second = (int(text) for text in found.groups()[:6])
                fraction = int((found[7] or "").ljust(9, "0"))
                return _ns(year, month, day, hour, minute, second) + fraction, 0
            if found := _MONTH.search(line):
                self.dated = False
                month, day, hour, minute, second = (int(text) for text in found.groups())
                return _ns(NO_YEAR, month, day, hour, minute, second), 366 * 86_400 * SECOND
            if found := _CLOCK.search(line):
                self.dated = False
                hour, minute, second = (int(text) for text in found.groups())
                return _ns(NO_YEAR, 1, 1, hour, minute, second), 86_400 * SECOND
        except ValueError:  # no such date
            return None
        return None


def _ns(year: int, month: int, day: int, hour: int, minute: int, second: int) -> int:
    moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    return int(moment.timestamp()) * SECOND
