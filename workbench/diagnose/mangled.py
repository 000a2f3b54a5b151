"""The outer name of a mangled C++ symbol: profilers leave names mangled that are too long for their demangler.

A reader of nested names and their first template argument only, after the Itanium C++ ABI, section 5.1
(itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling). ``S_`` is the first name of the symbol; other substitutions are
left out, so a namespace in the middle of a name may be missing.
"""

import re

_SOURCE = re.compile(r"\d+")
_SUBSTITUTION = re.compile(r"S[0-9A-Z]*_")
_SHORTHAND = {"St": "std", "Sa": "std::allocator", "Ss": "std::string"}


def outer_name(symbol: str) -> str:
    """Return ``name<first<second<…`` for a mangled ``symbol``, as far as each template's first argument is a class;
    ``symbol`` itself where it is not mangled, or in a form that is not read."""
    if not symbol.startswith("_Z"):
        return symbol
    names: list[str] = []
    first: str | None = None
    rest = symbol[2:]
    while True:
        parts, rest = _nested(rest, first)
        if not parts:
            break
        first = first or parts[0]
        names.append("::".join(parts))
        if not rest.startswith("I"):
            break
        rest = rest[1:]
    return "<".join(names) if names else symbol


def _nested(text: str, first: str | None) -> tuple[list[str], str]:
    """Return the parts of the name that ``text`` begins with, and what follows; no parts where it begins with none."""
    nested = text.startswith("N")
    text = text[1:] if nested else text
    parts: list[str] = []
    while text:
        if length := _SOURCE.match(text):
            begin, end = length.end(), length.end() + int(length[0])
            if end > len(text):
                break
            part = text[begin:end]
            if not part.startswith("_GLOBAL__N"):
                parts.append(part)
            text = text[end:]
        elif substitution := _SUBSTITUTION.match(text):
            if substitution[0] == "S_" and first:
                parts.append(first)
            text = text[substitution.end() :]
        elif text[:2] in _SHORTHAND:
            parts.append(_SHORTHAND[text[:2]])
            text = text[2:]
        else:
            break
        if not nested and parts:
            break
    return parts, text
