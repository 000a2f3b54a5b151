"""Signatures in a TOML file beside the kernels, so that the kernels' own file needs no word about the linter.

::

    [[kernel]]
    name = "add"
    types = {x_ptr = "*fp32", y_ptr = "*fp32", n = "i32:16"}
    constants = {BLOCK = 1024}
    num_warps = 4
    label = "T=1"
    spills = "why this one may spill"
"""

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workbench.errors import InputError
from workbench.field_errors import input_error
from workbench.lint.signature import (
    EXAMPLE,
    OPTIONS,
    Argument,
    Constant,
    Signature,
    Typed,
    checked_option,
    parse_argument,
)

Value = bool | int | float | str


class SidecarKernel(BaseModel):
    """One kernel for one set of arguments; keys as in the module's example."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$", max_length=200)]
    types: dict[str, str] = {}
    constants: dict[str, Value] = {}
    num_warps: int | None = None
    num_stages: int | None = None
    num_ctas: int | None = None
    maxnreg: int | None = None
    label: Annotated[str, Field(max_length=200)] = ""
    spills: Annotated[str, Field(max_length=1000)] = ""


class Sidecar(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kernel: Annotated[list[SidecarKernel], Field(min_length=1)]


def read_sidecar(path: Path) -> tuple[Signature, ...]:
    """Return the signatures of ``path``. Raises InputError that names file and field."""
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
        sidecar = Sidecar.model_validate(data)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", hint="check --signatures") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is no TOML: {error}", hint=f"or give --signature {EXAMPLE}") from error
    except ValidationError as error:
        raise input_error(error, str(path), Sidecar) from error
    return tuple(_signature(kernel, f"{path}: kernel[{index}]") for index, kernel in enumerate(sidecar.kernel))


def _signature(kernel: SidecarKernel, where: str) -> Signature:
    if both := sorted(kernel.types.keys() & kernel.constants.keys()):
        raise InputError(f"{where}: {both[0]} is in types and in constants", hint="keep one")
    named: dict[str, Argument] = {}
    for name, text in kernel.types.items():
        found = parse_argument(text, f"{where}.types.{name}")
        if not isinstance(found, Typed):
            raise InputError(f"{where}.types.{name}: {text!r} is a value", hint="move it to constants")
        named[name] = found
    for name, value in kernel.constants.items():
        given = isinstance(value, str) and value.startswith("tl.")
        named[name] = parse_argument(str(value), f"{where}.constants.{name}") if given else Constant(value)
    given_options = {name: getattr(kernel, name) for name in OPTIONS}
    options = {name: count for name, count in given_options.items() if count is not None}
    for name, count in options.items():
        if count < 1:
            raise InputError(f"{where}.{name}: must be at least 1, is {count}")
        checked_option(name, count, where)
    return Signature(kernel.name, (), named, options, kernel.label, kernel.spills, where)
