"""The kernels of a Python file or module: imported as Python does, in the process that compiles them."""

import ast
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.errors import InputError


@dataclass(frozen=True, slots=True)
class Config:
    """One configuration of ``@triton.autotune``: constants it sets, and launch options."""

    constants: Mapping[str, Any]
    options: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel found. ``function`` is Triton's JIT function inside its decorators.

    ``heuristics``: argument names that ``@triton.heuristics`` computes. ``helper``: why this looks like a function
    that kernels call, not a kernel; empty for a kernel.
    """

    name: str
    function: Any
    file: str
    line: int
    configs: tuple[Config, ...] = ()
    heuristics: Mapping[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    helper: str = ""


def load(subject: str) -> tuple[Kernel, ...]:
    """Return the kernels of ``subject``, a path that ends in .py or a module's name. Raises InputError."""
    module = _import(subject)
    found = tuple(_kernels(module))
    if not found:
        raise InputError(f"{subject}: holds no Triton kernel", hint="kernels are module-level @triton.jit functions")
    return found


def _import(subject: str) -> ModuleType:
    try:
        if not subject.endswith(".py"):
            sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(subject)
        path = Path(subject).resolve()
        sys.path.insert(0, str(path.parent))
        # Not under its own name: a file called random.py must not replace the standard library's.
        spec = importlib.util.spec_from_file_location(f"linted_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise InputError(f"{subject}: cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        spec.loader.exec_module(module)
    except InputError:
        raise
    except BaseException as error:  # the user's code may raise anything, SystemExit too; it becomes one line
        hint = ""
        if isinstance(error, ImportError) and "relative import" in str(error):
            hint = "name the module instead of the file, from its project's folder"
        elif isinstance(error, ModuleNotFoundError):
            hint = "install it, or run from the project's folder"
        raise InputError(
            f"{subject}: cannot be imported: {one_line(error)}{_line_in(error, subject)}", hint=hint
        ) from error
    return module


def one_line(error: BaseException) -> str:
    """Return type and message of ``error`` on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _line_in(error: BaseException, subject: str) -> str:
    """Return " (line 3)" for the last line of the user's file that the traceback passes."""
    if isinstance(error, SyntaxError):
        return ""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == Path(subject).name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""


def _kernels(module: ModuleType) -> list[Kernel]:
    found: dict[str, Kernel] = {}
    for value in list(vars(module).values()):
        kernel = _unwrapped(value)
        if kernel is not None and kernel.function.__module__ == module.__name__:
            found.setdefault(kernel.name, kernel)
    called = {name for kernel in found.values() for name in _called(kernel.function)}
    return [_judged(kernel, called) for kernel in found.values()]


def _unwrapped(value: Any) -> Kernel | None:
    """Return the kernel inside the decorators ``autotune`` and ``heuristics``; None for anything else."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    configs: tuple[Config, ...] = ()
    heuristics: dict[str, Callable[[dict[str, Any]], Any]] = {}
    while isinstance(value, Autotuner | Heuristics):
        if isinstance(value, Autotuner):
            configs = tuple(_config(one) for one in value.configs)
        else:
            heuristics |= value.values
        value = value.fn
    if not isinstance(value, JITFunction):
        return None
    code = value.fn.__code__
    file = inspect.getsourcefile(value.fn) or code.co_filename
    return Kernel(value.__name__, value, file, _line(value), configs, heuristics)


def _line(function: Any) -> int:
    """Return the line of ``def``; the code begins at the first decorator."""
    lines, first = inspect.getsourcelines(function.fn)
    return first + next((index for index, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)


def _config(config: Any) -> Config:
    given = {name: getattr(config, name, None) for name in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
    options = {name: int(value) for name, value in given.items() if value is not None}
    return Config(dict(config.kwargs), options)


def _called(function: Any) -> set[str]:
    """Return names of JIT functions that ``function`` calls."""
    from triton.runtime.jit import JITFunction

    names = set()
    for node in ast.walk(_tree(function)):
        if isinstance(node, ast.Name) and isinstance(function.fn.__globals__.get(node.id), JITFunction):
            names.add(function.fn.__globals__[node.id].__name__)
    return names - {function.__name__}


def _judged(kernel: Kernel, called: set[str]) -> Kernel:
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(_tree(kernel.function)))
    why = "returns a value" if returns else "is called by another" if kernel.name in called else ""
    return Kernel(kernel.name, kernel.function, kernel.file, kernel.line, kernel.configs, kernel.heuristics, why)


def _tree(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function.fn)))


def names(kernels: Sequence[Kernel]) -> str:
    """Return the names of ``kernels`` for a message."""
    return ", ".join(kernel.name for kernel in kernels)
