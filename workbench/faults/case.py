"""The cases of the suite: one planted fault each, read from scenarios/faults/*.toml."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from workbench.errors import InputError
from workbench.field_errors import suggestion
from workbench.scenario import PlantedFault, Scenario, load_scenario


@dataclass(frozen=True, slots=True)
class Case:
    """One planted fault and the scenario that holds it.

    ``needs_gpu``: its variants ask for CUDA, so it is scored from a recorded bundle. ``trace``: the trace that a data
    fault is planted in; None for faults of a run.
    """

    fault: PlantedFault
    scenario: Scenario
    path: Path

    @property
    def name(self) -> str:
        """The fault's name, unique in the suite."""
        return self.fault.name

    @property
    def variant(self) -> str:
        """The variant that has the fault."""
        return self.fault.variant or self.fault.name

    @property
    def trace(self) -> Path | None:
        """Where the trace of a data fault lies; it need not exist outside a checkout."""
        return (self.path.parent / self.fault.trace).resolve() if self.fault.trace else None

    @property
    def needs_gpu(self) -> bool:
        """Whether only a machine with an NVIDIA GPU can run it."""
        return self.trace is None and any(one.engine.device == "cuda" for one in self.scenario.variants())


def suite_folder() -> Path:
    """Return the folder of the shipped suite."""
    return Path(str(files("workbench.scenarios") / "faults")).resolve()


def recorded_folder() -> Path | None:
    """Return the checkout's folder of recorded bundles; None in an installation, or where none was recorded."""
    folder = suite_folder().parents[1] / "tests" / "data" / "faults"
    return folder if folder.is_dir() else None


def load_cases(only: Iterable[str] = (), folder: Path | None = None) -> tuple[Case, ...]:
    """Return the cases of the suite by family and name; ``only``: names or families to keep.

    Raises InputError where a file is wrong, two faults share a name, a variant does not exist, or ``only`` names
    nothing.
    """
    cases: list[Case] = []
    for path in sorted((folder or suite_folder()).glob("*.toml")):
        scenario = load_scenario(str(path))
        variants = {variant.name for variant in scenario.variants()}
        for fault in scenario.faults:
            case = Case(fault, scenario, path)
            if case.trace is None:
                for name in (case.variant, fault.clean):
                    if name and name not in variants:
                        hint = suggestion(name, sorted(variants))
                        raise InputError(f"{path}: fault {fault.name!r}: no variant {name!r}", hint=hint)
            cases.append(case)
    names = [case.name for case in cases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"{twice[0]}: two faults of the suite have this name")
    wanted = set(only)
    known = set(names) | {case.fault.family for case in cases}
    if unknown := sorted(wanted - known):
        raise InputError(f"no fault or family {unknown[0]!r}", hint=suggestion(unknown[0], sorted(known)))
    kept = [case for case in cases if not wanted or case.name in wanted or case.fault.family in wanted]
    return tuple(sorted(kept, key=lambda case: (case.fault.family, case.name)))
