"""The arguments a kernel is compiled for: ``kernel:*fp32,*fp32,i32:16,BLOCK=128;num_warps=4``.

Before the colon the kernel; then its arguments in order, or by name; after the semicolon launch options. An argument
is a type (``*bf16`` a pointer, ``i32`` a number, ``i32:16`` a number known to be a multiple of 16) or a constant
(``128``, ``True``, ``None``, ``"text"``, ``tl.float16``). Pointers are taken as 16-byte aligned, as those of torch's
allocator are.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import InputError

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
EXAMPLE = "'kernel:*fp32,*fp32,i32,BLOCK=128;num_warps=4'"
TYPES = "*fp32, *bf16, *fp16, *fp8e4nv, *i32, i32, i64, fp32 …"

_SCALAR = r"(?:i1|i8|i16|i32|i64|u1|u8|u16|u32|u64|fp16|bf16|fp32|f32|fp64|fp8e4nv|fp8e4b8|fp8e4b15|fp8e5|fp8e5b16)"
_TYPE = re.compile(rf"(?:\*k?)*{_SCALAR}|nvTmaDesc|tensordesc<{_SCALAR}\[[0-9, ]+\]>")
_NAME = re.compile(r"[A-Za-z_]\w*")
_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Typed:
    """An argument known by its type. ``divisible``: a number that is a multiple of 16."""

    type: str
    divisible: bool = False

    def text(self) -> str:
        """Return it as in a signature."""
        return f"{self.type}:16" if self.divisible else self.type


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument known by its value, compiled in."""

    value: Any

    def text(self) -> str:
        """Return it as in a signature."""
        if isinstance(self.value, bool | int | float | str | None):
            return repr(self.value)
        return str(getattr(self.value, "__name__", self.value))  # a function, or a type of Triton's language


@dataclass(frozen=True, slots=True)
class Dtype:
    """A constant that is a type of Triton's language, such as ``tl.float16``."""

    name: str

    def __str__(self) -> str:
        return f"tl.{self.name}"


Argument = Typed | Constant


@dataclass(frozen=True, slots=True)
class Signature:
    """What one kernel is compiled for. Arguments not given here are inferred where they can be.

    ``label``: a few words to show instead of the text. ``spills``: why this kernel may spill; empty: it must not.
    ``where``: the option or file it came from, for errors.
    """

    kernel: str
    positional: tuple[Argument, ...] = ()
    named: Mapping[str, Argument] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)
    label: str = ""
    spills: str = ""
    where: str = "--signature"

    def text(self) -> str:
        """Return it so that ``parse_signature`` reads the same again; label and reason are not in it."""
        arguments = [one.text() for one in self.positional]
        arguments += [f"{name}={one.text()}" for name, one in self.named.items()]
        options = [f"{name}={value}" for name, value in self.options.items()]
        return f"{self.kernel}:{','.join(arguments)}" + (f";{','.join(options)}" if options else "")


def parse_signature(text: str, where: str = "--signature") -> Signature:
    """Read ``text``. Raises InputError that names the part that is wrong."""
    kernel, colon, rest = text.partition(":")
    kernel = kernel.strip()
    if not colon or not _NAME.fullmatch(kernel):
        raise InputError(f"{where} {text!r}: begins with no kernel and colon", hint=f"such as {EXAMPLE}")
    arguments, *options = _split(rest, ";")
    positional: list[Argument] = []
    named: dict[str, Argument] = {}
    for part in filter(None, (part.strip() for part in _split(arguments, ","))):
        name, *values = _split(part, "=")  # a sign within quotes is the string's own
        value = "=".join(values)
        if not values:
            if named:
                raise InputError(f"{where} {kernel}: {part} has no name but follows one that has", hint="name it too")
            positional.append(parse_argument(part, f"{where} {kernel}"))
        elif not _NAME.fullmatch(name.strip()):
            raise InputError(f"{where} {kernel}: {name.strip()!r} is no name of an argument")
        elif name.strip() in named:
            raise InputError(f"{where} {kernel}: {name.strip()} is given twice", hint="give it once")
        else:
            named[name.strip()] = parse_argument(value.strip(), f"{where} {kernel}")
    return Signature(kernel, tuple(positional), named, _options(",".join(options), f"{where} {kernel}"), where=where)


def parse_argument(text: str, where: str) -> Argument:
    """Return the type or constant that ``text`` says. Raises InputError."""
    kind, colon, multiple = text.partition(":")
    if _TYPE.fullmatch(kind):
        if colon and (multiple != str(_MULTIPLE) or not is_number(kind)):
            raise InputError(f"{where}: {text!r} says more than a type", hint=f"only a number takes :{_MULTIPLE}")
        return Typed(kind, bool(colon))
    if text.startswith("tl.") and _NAME.fullmatch(text[3:]):
        return Constant(Dtype(text[3:]))
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise InputError(f"{where}: {text[:60]!r} is neither a type nor a constant", hint=f"types: {TYPES}") from None
    if not isinstance(value, bool | int | float | str | None):
        raise InputError(f"{where}: {text[:60]!r} is no constant", hint="a number, True, None, a text or tl.float16")
    return Constant(value)


def is_number(kind: str) -> bool:
    """Return whether a type is that of an integer passed by value."""
    return kind[0] in "iu"


def _options(text: str, where: str) -> dict[str, int]:
    options: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in OPTIONS:
            raise InputError(f"{where}: {name!r} is no option", hint=f"one of {', '.join(OPTIONS)}")
        options[name] = _count(name, value, where)
    return options


def _count(name: str, value: str, where: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", value, re.ASCII):
        raise InputError(f"{where}: {name}={value} is no count")
    return checked_option(name, int(value), where)


def checked_option(name: str, count: int, where: str) -> int:
    """Return ``count``; raises InputError where it cannot be what ``name`` means."""
    if name in ("num_warps", "num_ctas") and (count & (count - 1) or count > 64):
        raise InputError(f"{where}: {name}={count} must be a power of two, 64 at most")
    if name == "maxnreg" and not 16 <= count <= 255:
        raise InputError(f"{where}: {name}={count} must be 16 to 255")
    return count


def _split(text: str, separator: str) -> list[str]:
    """Split at ``separator`` outside quotes and brackets."""
    parts, depth, quote, escaped = [""], 0, "", False
    for char in text:
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
        elif char in "\"'":
            quote = char
        elif char in "<[(":
            depth += 1
        elif char in ">])":
            depth -= 1
        elif char == separator and depth <= 0:
            parts.append("")
            continue
        parts[-1] += char
    return parts
