"""Damaged JSON made readable where its meaning is plain: what profilers have written wrongly at one time or another.

Seen in traces of torch.profiler: control characters and quotes that were not escaped in names (pytorch#130622,
kineto#1459), NaN and Infinity, bytes that are not UTF-8.
"""

import re

# A string, closed or not; runs on past escaped quotes. Possessive, so that no input makes it slow.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
TOKENS = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)
"""Strings and brackets: all that is needed to find where a JSON value ends."""

# A string that ends only at a quote followed by what may follow a string. Never closed, it takes all that is left:
# were that no match, the next quote would be tried, and so on.
_LENIENT = re.compile(rb'"((?:[^"\\]++|\\.|"(?!\s*+(?:[,:}\]]|\Z)))*+)("?)', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_BAD_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(.?))', re.DOTALL)
_NOT_A_NUMBER = re.compile(rb"(?<![\w.])[+-]?(?:nan|inf(?:inity)?)(?:\(\w*\))?(?![\w.])", re.IGNORECASE)


def repair(text: bytes) -> tuple[bytes, list[str]]:
    """Return ``text`` with what can be repaired repaired, and the kinds of repair; not always valid JSON.

    Kinds: ``control-characters``, ``quotes``, ``escapes`` (in strings), ``not-a-number`` (becomes null), ``utf-8``.
    """
    kinds: dict[str, None] = {}
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        # The escapes \xff that this writes are spelt out by the repair of escapes below.
        text = text.decode("utf-8", "backslashreplace").encode()
        kinds["utf-8"] = None
    parts: list[bytes] = []
    end = 0
    for match in _LENIENT.finditer(text):
        parts.append(_outside(text[end : match.start()], kinds))
        parts.append(b'"' + _inside(match[1], kinds) + match[2])
        end = match.end()
    parts.append(_outside(text[end:], kinds))
    return b"".join(parts), list(kinds)


def _outside(text: bytes, kinds: dict[str, None]) -> bytes:
    fixed, count = _NOT_A_NUMBER.subn(b"null", text)
    if count:
        kinds["not-a-number"] = None
    return fixed


def _inside(text: bytes, kinds: dict[str, None]) -> bytes:
    if b"\\" in text:
        fixed = _BAD_ESCAPE.sub(lambda m: m[0] if m[1] is None else b"\\\\" + m[1], text)
        if fixed != text:
            kinds.setdefault("escapes")
            text = fixed
    fixed = re.sub(rb'(?<!\\)((?:\\\\)*)"', rb'\1\\"', text) if b'"' in text.replace(b'\\"', b"") else text
    if fixed != text:
        kinds["quotes"] = None
        text = fixed
    if _CONTROL.search(text):
        kinds["control-characters"] = None
        text = _CONTROL.sub(lambda m: b"\\u%04x" % m[0][0], text)
    return text
