"""Triton's Proton, which takes stamps inside Triton kernels: whether it can be used here.

The project's kernels carry no scopes of Proton: a scope is code in the kernel's source, and the compiler may move it.
So no pass of a run uses it. What it writes for a kernel with scopes, the user's own or a copy of one of these, is read
by ``workbench ingest`` into tables ``kernels`` and ``lanes``.
Source: triton-lang/triton, third_party/proton, 3.6 to 3.9.
"""

import os
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from workbench.probes.protocol import Missing

NAME = "proton"
OLDEST = (3, 5)
"""The first Triton whose Proton has the instrumentation backend with scopes in Triton's own language."""


def proton_missing() -> Missing | None:
    """Return why kernels cannot be traced from inside here; None where they can."""
    if os.environ.get("TRITON_PROTON_DISABLE") == "1":
        return _missing("TRITON_PROTON_DISABLE=1 turns all of its calls off", "unset TRITON_PROTON_DISABLE")
    try:
        text = version("triton")
    except PackageNotFoundError:
        return _missing("triton is not installed", "pip install 'decode-workbench[gpu]'")
    if tuple(int(part) for part in re.findall(r"\d+", text)[:2]) < OLDEST:
        return _missing(f"triton {text} cannot trace inside kernels", "update triton, with the torch that goes with it")
    if find_spec("triton.profiler") is None or find_spec("triton.profiler.language") is None:
        return _missing(f"this build of triton {text} is without Proton", "install the triton that torch asks for")
    return None


def _missing(why: str, fix: str) -> Missing:
    fallback = "the persistent rung's own stamps; elsewhere the kernel as a whole"
    return Missing(NAME, "spans inside Triton kernels", why, fallback, fix)
