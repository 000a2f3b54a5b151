"""What to compile of a kernel: signatures given, completed by its annotations, defaults and autotune configurations.

What cannot be told is never guessed: it is asked for. Order for every argument: the signature given; the configuration
of ``@triton.autotune`` (left out where the signature names one of its constants or options); the type in the
annotation; the default, typed as Triton types a value at launch; ``@triton.heuristics`` on the constants known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import InputError
from workbench.field_errors import suggestion
from workbench.lint.signature import Argument, Constant, Dtype, Signature, Typed
from workbench.lint.subject import Config, Kernel, names

DEFAULTS = {"num_warps": 4, "num_stages": 3}
"""Triton's own, for a kernel without configurations."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One kernel with all its arguments known.

    ``signature`` identifies it among the kernel's, ``label`` is what to show. ``origin``: "given", "inferred", or
    "catalogue" for the project's own. ``spills``: why it may spill.
    """

    kernel: str
    function: Any
    file: str
    line: int
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...]
    options: Mapping[str, int]
    signature: str
    label: str
    origin: str
    spills: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """Plans, and the helpers that were left out with the reason."""

    plans: tuple[Plan, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)


def plan(subject: str, kernels: Sequence[Kernel], signatures: Sequence[Signature], only: Sequence[str]) -> Planned:
    """Return what to compile of the ``kernels`` found in ``subject``.

    A kernel named in a signature is planned for each of its signatures; the others as inferred. ``only``: names of
    kernels to keep, empty for all. Raises InputError in one line that says what to give for what is not known.
    """
    plans: list[Plan] = []
    skipped: dict[str, str] = {}
    open_questions: list[tuple[Kernel, list[str]]] = []
    for kernel in kernels:
        given = [signature for signature in signatures if signature.kernel == kernel.name]
        if only and kernel.name not in only:
            continue
        if kernel.helper and not given and kernel.name not in only:
            skipped[kernel.name] = kernel.helper
            continue
        for signature in given or [Signature(kernel.name, where="")]:
            made, unknown = _plans(kernel, signature)
            plans += made
            if unknown:
                open_questions.append((kernel, unknown))
    if open_questions:
        raise _question(subject, open_questions)
    if not plans and skipped:
        raise InputError(
            f"{subject}: only functions that kernels call: {', '.join(skipped)}", hint="name one with --only"
        )
    if not plans and not only:
        raise InputError(f"{subject}: nothing to compile among {names(kernels)}")
    return Planned(tuple(plans), skipped)


def _plans(kernel: Kernel, signature: Signature) -> tuple[list[Plan], list[str]]:
    given = _named(kernel, signature)
    tuned = {name for config in kernel.configs for name in config.constants}
    pinned = tuned & given.keys() or signature.options.keys() & {"num_warps", "num_stages", "num_ctas", "maxnreg"}
    configs: Sequence[Config] = () if pinned else kernel.configs
    plans = []
    for config in configs or (Config({}, DEFAULTS),):
        arguments, unknown = _arguments(kernel, given, config)
        if unknown:
            return [], unknown
        options = {**config.options, **signature.options}
        plans.append(_made(kernel, signature, arguments, options, tuple(config.constants) if configs else ()))
    return plans, []


def _named(kernel: Kernel, signature: Signature) -> dict[str, Argument]:
    order = list(kernel.function.arg_names)
    where = f"{signature.where}: {kernel.name}"
    if len(signature.positional) > len(order):
        raise InputError(f"{where}: {len(signature.positional)} arguments for {len(order)}: {', '.join(order)}")
    given = dict(zip(order, signature.positional, strict=False))
    for name, argument in signature.named.items():
        if name not in order:
            raise InputError(f"{where}: has no argument {name}", hint=suggestion(name, order))
        if name in given:
            raise InputError(f"{where}: {name} is given by place and by name", hint="give it once")
        given[name] = argument
    for parameter in kernel.function.params:
        if parameter.is_constexpr and isinstance(given.get(parameter.name), Typed):
            raise InputError(f"{where}: {parameter.name} is a constexpr", hint=f"give its value: {parameter.name}=128")
    return given


def _arguments(kernel: Kernel, given: Mapping[str, Argument], config: Config) -> tuple[dict[str, Argument], list[str]]:
    known: dict[str, Argument] = {}
    unknown = []
    for parameter in kernel.function.params:
        name = parameter.name
        found = given.get(name)
        if found is None and name in config.constants:
            found = Constant(config.constants[name])
        if found is None and name not in kernel.heuristics:
            found = _inferred(parameter)
        if found is not None:
            known[name] = found
        elif name not in kernel.heuristics:
            unknown.append(name)
    for name, heuristic in kernel.heuristics.items():
        if name not in known:
            computed = _computed(heuristic, known, config)
            if computed is None:
                unknown.append(name)
            else:
                known[name] = computed
    return {name: known[name] for name in kernel.function.arg_names if name in known}, unknown


def _inferred(parameter: Any) -> Argument | None:
    """Return what annotation or default say of a parameter; None where they say nothing."""
    if parameter.is_constexpr:
        return Constant(parameter.default) if parameter.has_default else None
    if parameter.annotation_type:
        return Typed(parameter.annotation_type)
    if not parameter.has_default:
        return None
    value = parameter.default
    if value is None:
        return Constant(None)
    if isinstance(value, bool):
        return Typed("u1")
    if isinstance(value, float):
        return Typed("fp32")
    if isinstance(value, int):
        kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        return Constant(1) if value == 1 else Typed(kind, value % 16 == 0)
    return None


def _computed(heuristic: Any, known: Mapping[str, Argument], config: Config) -> Constant | None:
    """Return what ``heuristic`` makes of the constants alone; None where it looks at an argument that is none."""
    constants = {name: argument.value for name, argument in known.items() if isinstance(argument, Constant)}
    try:
        return Constant(heuristic({**constants, **config.options}))
    except Exception:  # the user's function may raise anything for an argument it misses; the caller then asks
        return None


def _made(
    kernel: Kernel,
    signature: Signature,
    arguments: Mapping[str, Argument],
    options: dict[str, int],
    tuned: Sequence[str],
) -> Plan:
    full = Signature(kernel.name, (), arguments, {**DEFAULTS, **options}).text().partition(":")[2]
    label = signature.label
    if label and tuned:
        set_by_config = [f"{name}={arguments[name].text()}" for name in tuned]
        label += f" ({','.join(set_by_config)};{full.partition(';')[2]})"
    return Plan(
        kernel.name,
        kernel.function,
        kernel.file,
        kernel.line,
        {name: one.type for name, one in arguments.items() if isinstance(one, Typed)},
        {name: _value(one.value) for name, one in arguments.items() if isinstance(one, Constant)},
        tuple(name for name, one in arguments.items() if isinstance(one, Typed) and one.divisible),
        {**DEFAULTS, **options},
        full,
        label or full,
        "given" if signature.where else "inferred",
        signature.spills,
    )


def _value(value: Any) -> Any:
    if not isinstance(value, Dtype):
        return value
    import triton.language

    found = getattr(triton.language, value.name, None)
    if not isinstance(found, triton.language.dtype):
        raise InputError(f"{value}: is no type of triton.language", hint="such as tl.float16")
    return found


def _question(subject: str, open_questions: Sequence[tuple[Kernel, list[str]]]) -> InputError:
    kernel, unknown = open_questions[0]
    constexprs = {parameter.name for parameter in kernel.function.params if parameter.is_constexpr}
    example = ",".join(f"{name}=128" if name in constexprs else f"{name}=*fp32" for name in unknown)
    more = sorted({other.name for other, _ in open_questions[1:]} - {kernel.name})
    also = f" (the same for {', '.join(more)})" if more else ""
    return InputError(
        f"{subject}:{kernel.line}: {kernel.name}: not known: {', '.join(unknown)}{also}",
        hint=f"give --signature '{kernel.name}:{example}' with the true types and values, or a file with --signatures",
    )
