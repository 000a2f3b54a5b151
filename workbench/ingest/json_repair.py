"""Damaged JSON made readable where its meaning is plain: what profilers have written wrongly at one time or another.

Seen in traces of torch.profiler: control characters and quotes that were not escaped in names (pytorch#130622,
kineto#1459), NaN and Infinity, bytes that are not UTF-8.
"""

import re
from collections.abc import Callable

# A string, closed or not; runs on past escaped quotes. Possessive, so that no input makes it slow.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
TOKENS = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)
"""Strings and brackets: all that is needed to find where a JSON value ends."""

# A string that ends only at a quote followed by what may follow a string. Never closed, it takes all that is left:
# were that no match, the next quote would be tried, and so on.
_LENIENT = re.compile(rb'"((?:[^"\\]++|\\.|"(?!\s*+(?:[,:}\]]|\Z)))*+)("?)', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")
# A backslash that begins no escape; the first group skips those that do.
_BAD_ESCAPE = re.compile(rb'(?<!\\)((?:\\\\)*+)\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BARE_QUOTE = re.compile(rb'(?<!\\)((?:\\\\)*+)"')
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_NOT_A_NUMBER = re.compile(rb"(?<![\w.])[+-]?(?:nan|inf(?:inity)?)(?:\(\w*\))?(?![\w.])", re.IGNORECASE)


def repair(text: bytes) -> tuple[bytes, dict[str, int]]:
    """Return ``text`` with what can be repaired repaired, and how many repairs of each kind; not always valid JSON.

    Kinds: ``control-characters``, ``quotes``, ``escapes`` (in strings), ``not-a-number`` (becomes null), ``utf-8``.
    """
    kinds: dict[str, int] = {}
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        readable = text.decode("utf-8", "surrogateescape")
        readable, kinds["utf-8"] = _NOT_UTF8.subn(lambda match: rf"\\x{ord(match[0]) - 0xDC00:02x}", readable)
        text = readable.encode()
    parts: list[bytes] = []
    end = 0
    for match in _LENIENT.finditer(text):
        parts.append(_outside(text[end : match.start()], kinds))
        parts.append(b'"' + _inside(match[1], kinds) + match[2])
        end = match.end()
    parts.append(_outside(text[end:], kinds))
    return b"".join(parts), kinds


def _outside(text: bytes, kinds: dict[str, int]) -> bytes:
    return _substitute(_NOT_A_NUMBER, b"null", text, "not-a-number", kinds)


def _inside(text: bytes, kinds: dict[str, int]) -> bytes:
    if b"\\" in text:
        text = _substitute(_BAD_ESCAPE, rb"\1\\\\", text, "escapes", kinds)
    if b'"' in text:
        text = _substitute(_BARE_QUOTE, rb'\1\\"', text, "quotes", kinds)
    return _substitute(_CONTROL, lambda match: b"\\u%04x" % match[0][0], text, "control-characters", kinds)


def _substitute(
    pattern: re.Pattern[bytes],
    by: bytes | Callable[[re.Match[bytes]], bytes],
    text: bytes,
    kind: str,
    kinds: dict[str, int],
) -> bytes:
    text, count = pattern.subn(by, text)
    if count:
        kinds[kind] = kinds.get(kind, 0) + count
    return text
