"""``workbench whatif``: tok/s if a loss were gone, or acceptance, precision, width, ranks or the device were others."""

from typing import TYPE_CHECKING, Annotated

import typer

from workbench.commands.options import BundlePath, Json
from workbench.errors import InputError
from workbench.terminal import print_json, print_line

if TYPE_CHECKING:
    from workbench.diagnose.facts import Facts
    from workbench.diagnose.whatif import Step
    from workbench.trace.bundle import Bundle

SCHEMA = "workbench.whatif/1"


def whatif(
    bundle: BundlePath,
    variant: Annotated[
        str, typer.Option("--variant", help="Variant to change; default: the only one, or the fastest.", metavar="NAME")
    ] = "",
    remove: Annotated[
        list[str] | None, typer.Option("--remove", help="Cause whose time is gone; can be repeated.", metavar="CAUSE")
    ] = None,
    scale: Annotated[
        list[str] | None,
        typer.Option("--scale", help="Cause and factor on its time; can be repeated.", metavar="CAUSE=FACTOR"),
    ] = None,
    accept_length: Annotated[
        float, typer.Option("--accept-length", help="Tokens a step commits, the bonus token included.", metavar="X")
    ] = 0.0,
    depth: Annotated[int, typer.Option("--depth", help="Draft tokens a step.", metavar="N")] = -1,
    precision: Annotated[
        str, typer.Option("--precision", help="Named policy for the weights' formats.", metavar="POLICY")
    ] = "",
    width: Annotated[int, typer.Option("--width", help="Verify width T, for the bytes of a step.", metavar="T")] = 0,
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks that share the weights.", metavar="N")] = 0,
    hardware: Annotated[str, typer.Option("--hardware", help="Device: h100, h200, b200, b300, …", metavar="NAME")] = "",
    as_json: Json = False,
) -> None:
    """Print tok/s now and with a change, and the arithmetic between them. All of it is modelled.

    Changes apply in the order of the options above; without any, nothing changes.
    """
    from workbench.diagnose import whatif as changes
    from workbench.hardware import load_hardware
    from workbench.trace.bundle import Bundle

    with Bundle.open(bundle) as opened:
        facts = _choose(opened, variant)
        before = step = changes.mean_step(facts)
        for cause in remove or []:
            step = changes.scale(step, cause, 0.0)
        for text in scale or []:
            step = changes.scale(step, *_factor(text))
        if depth >= 0:
            step = changes.depth(step, facts, depth)
        if accept_length:
            step = changes.accept_length(step, accept_length)
        step = _bytes(facts, step, precision=precision, width=width, tp=tp)
        if hardware:
            step = changes.hardware(step, facts.hardware, load_hardware(hardware))
        result = changes.answer(facts, before, step)
        if as_json:
            print_json({"schema": SCHEMA, "bundle": str(opened.path)} | result.to_json())
            return
        from workbench.diagnose.numbers import significant

        then = result.then
        bounds = ""
        if then.low is not None and then.high is not None:
            bounds = f" ({significant(then.low, 3)} to {significant(then.high, 3)})"
        print_line(
            f"{facts.variant}: {significant(result.now.value, 3)} {result.now.unit} now ({result.now.tag}), "
            f"{significant(then.value, 3)}{bounds} then ({then.tag}), {result.ratio - 1:+.1%}"
        )
        for line in result.lines:
            print_line(f"  {line}")


def _choose(bundle: "Bundle", variant: str) -> "Facts":
    from workbench.diagnose.facts import Facts
    from workbench.errors import UnfitError

    names = [variant] if variant else [record.name for record in bundle.manifest.variants]
    found = [facts for facts in (Facts(bundle, name) for name in names) if facts.tok_s is not None]
    if not found and bundle.manifest.source == "attach":
        raise UnfitError(
            f"{bundle.path}: was watched from outside: no step to take a loss out of",
            hint="workbench diagnose says what each finding is worth",
        )
    if not found:
        raise UnfitError(f"{bundle.path}: no step was recorded", hint="run the scenario again, or trace longer")
    return max(found, key=lambda facts: facts.tok_s.value if facts.tok_s else 0.0)


def _factor(text: str) -> tuple[str, float]:
    cause, sign, number = text.partition("=")
    try:
        return cause.strip(), float(number if sign else "")
    except ValueError:
        raise InputError(f"--scale {text}: not CAUSE=FACTOR", hint="such as --scale launch-gap=0.5") from None


def _bytes(facts: "Facts", step: "Step", *, precision: str, width: int, tp: int) -> "Step":
    """Return ``step`` with the floor of another byte model; each change alone, so that each has its line."""
    from workbench.diagnose import whatif as changes
    from workbench.diagnose.modelled_bytes import bytes_of, changed, setup

    if not precision and not width and not tp:
        return step
    now = setup(facts)
    for name, value in (("policy", precision), ("width", width), ("tp", tp)):
        if value:
            then = changed(now, **{name: value})
            what = f"{'precision' if name == 'policy' else name} {getattr(now, name)} becomes {value}"
            step = changes.other_bytes(step, bytes_of(now), bytes_of(then), what)
            now = then
    return step
