"""A scenario: what one run decodes, how, and what it measures. Schema and loader.

A scenario is a TOML file of sections. ``[[matrix]]`` entries are its variants: each has a name and any of the
sections as partial overrides, merged key by key over the file's own. ``python -m workbench.scenario`` prints the
JSON Schema for editors (docs/reference/scenario.schema.json).
"""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Collection, Sequence
from copy import copy, deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from workbench.errors import InputError
from workbench.field_errors import input_error, suggestion

MAX_SCENARIO_BYTES = 1 << 20

Rung = Literal[
    "eager", "graph", "fused", "fp4", "splitk", "livequant-naive", "livequant-fused", "livequant-pq", "persistent"
]
RUNGS: tuple[Rung, ...] = get_args(Rung)
"""Engine configurations from the slowest to the fastest."""

Fault = Literal[
    "item-per-step",
    "pageable-copy",
    "unfused-sampling",
    "small-kernels",
    "low-split",
    "register-cap",
    "kv-over-read",
    "tap-off-by-one",
    "unshared-head",
    "w4a8",
    "w4a4",
    "graph-break",
    "busy-host",
    "sleep-per-step",
    "recompute-prefix",
    "block-positions",
    "wait-per-layer",
    "pause-between-steps",
    "collector-pauses",
    "accept-cap",
    "vocabulary-offset",
]
"""Mistakes that can be planted in an engine (workbench/decode/rungs/faults.py, docs/reference/rungs.md)."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$"


def _plain_name(name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise ValueError(f"must be 1 to 64 letters, digits and . _ + -, is {name[:60]!r}")
    return name


Name = Annotated[str, AfterValidator(_plain_name), WithJsonSchema({"type": "string", "pattern": NAME})]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Part of a scenario: unknown keys are refused, nothing is coerced, nothing changes afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Model(Section):
    """The target model."""

    preset: str | None = Field(
        default=None, description="name of a shipped shape; 'nano' where shape is not given either"
    )
    shape: str | None = Field(default=None, description="TOML file of a shape, relative to the scenario")
    weights: Literal["trained", "random"] = Field(default="trained", description="random: true shapes, no meaning")
    seed: int = Field(default=0, ge=0, description="seed of random weights")
    tp: int = Field(
        default=1, ge=1, le=64, description="random weights: run the slice that one of this many ranks holds"
    )
    routing: Literal["router", "uniform", "skewed", "recorded"] = Field(
        default="router",
        description="random weights: who chooses the experts; uniform and skewed are drawn, recorded comes from a file",
    )
    routing_exponent: float = Field(default=1.0, gt=0, le=8, description="skewed: the n-th expert's weight is n^-this")
    routing_file: str | None = Field(
        default=None, description="recorded: JSON Lines of expert ids, relative to the scenario"
    )


class Precision(Section):
    """The number formats of the weights."""

    policy: str = Field(default="mxfp4-experts", description="named policy: which tensor class is held in which format")
    expand: Literal["load", "step"] = Field(
        default="load",
        description="rungs without packed experts: expand all routed experts at load, or the chosen ones in every step",
    )


class Engine(Section):
    """How a step is executed: by a rung of this project, or by a real engine in a process of its own."""

    kind: Literal["workbench", "sglang"] = Field(
        default="workbench", description="sglang: dummy weights of model.preset, batch 1; needs weights = 'random'"
    )
    python: str = Field(
        default="", description="sglang: interpreter that has it; default: $WORKBENCH_SGLANG_PYTHON, else this one"
    )
    arguments: dict[str, str | int | float | bool | list[int] | list[str]] = Field(
        default={}, description="sglang: keyword arguments of sglang.Engine beside the default ones, or instead of them"
    )
    rung: Rung = "eager"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(default=None, ge=1, le=4096, description="CPU threads; default: what the library picks")
    overlap: bool = Field(
        default=False, description="kernel rungs: launches start under their predecessor's tail (sm_90 and later)"
    )
    run_ahead: bool = Field(
        default=False,
        description="from graph on, greedy, drafter none or simulated: enqueue a step before the last one is read",
    )
    collective_us: float = Field(
        default=0, ge=0, le=1000, description="model.tp > 1: length of what stands in for each all-reduce; modelled"
    )
    faults: list[Fault] = Field(default=[], description="runtime faults planted on purpose, docs/reference/rungs.md")


class Drafter(Section):
    """What proposes tokens for the target to verify."""

    kind: Literal["none", "ngram", "mtp", "dflash", "simulated"] = "none"
    depth: int = Field(
        default=3, ge=1, le=64, description="draft tokens a step; a DFlash block of n tokens has depth n - 1"
    )
    order: int = Field(default=3, ge=1, le=64, description="ngram: longest suffix looked up")
    accept_length: float | None = Field(
        default=None, ge=1, description="simulated: mean tokens committed per step, the bonus token included"
    )
    pattern: Literal["fixed", "multinomial"] = Field(
        default="fixed", description="simulated: spread about accept_length"
    )

    @property
    def width(self) -> int:
        """Verify width T of a full step: the draft and the bonus token's position."""
        return 1 if self.kind == "none" else self.depth + 1


class Sampling(Section):
    """How the target's distribution becomes tokens."""

    method: Literal["greedy", "sample"] = "greedy"
    temperature: float = Field(default=1.0, gt=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)


class Prompts(Section):
    """The text that is continued."""

    file: str = Field(default="held_out", description="JSON Lines file relative to the scenario, or a built-in name")
    count: Count = Field(default=8, description="prompts taken, from the first")
    max_prompt_tokens: Count = Field(default=256, description="a longer prompt keeps its last tokens")
    new_tokens: Count = Field(default=96, description="tokens generated per prompt")


class Measure(Section):
    """How much is run and what counts."""

    repetitions: Count = Field(default=1, description="clean passes over all prompts")
    warmup_steps: int = Field(default=2, ge=0, description="first steps of each sequence left out of the statistics")
    traced_steps: int = Field(default=32, ge=0, description="steps run again with instruments on; 0: none")


class Instruments(Section):
    """What is switched on in the passes after the clean one. On the CPU there is only ``host``."""

    host: bool = Field(default=True, description="operators and annotations by torch.profiler")
    kernels: bool = Field(default=True, description="kernels, launches and waits by torch.profiler (CUDA)")
    pm: bool = Field(default=True, description="HBM bytes, CTAs and warps by the counter sampler, a process of its own")
    nvml: bool = Field(default=True, description="clocks, power and throttle reasons by NVML")
    lanes: bool = Field(default=True, description="spans of each CTA in the persistent rung's kernel")
    static: bool = Field(default=True, description="registers, spills and occupancy limits of compiled kernels")
    pm_interval_us: int = Field(default=10, ge=1, le=1000, description="time between counter samples")
    pm_sets: list[str] = Field(
        default=["traffic"],
        min_length=1,
        description="counter sets, each in steps of its own: traffic, pipes, local, stalls, links, whole",
    )
    sampled_steps: int = Field(
        default=32, ge=0, description="steps run again under each counter set, and with stamps; 0: none"
    )
    fresh_process: bool = Field(
        default=False, description="what each instrument costs is measured in processes that never profiled before"
    )
    fresh_rounds: int = Field(
        default=16, ge=1, le=64, description="passes with and without the counter sampler there, in turn"
    )


class Overrides(Section):
    """One variant: its name, and the settings in which it departs from the file's sections."""

    name: Name
    model: Model | None = None
    precision: Precision | None = None
    engine: Engine | None = None
    drafter: Drafter | None = None
    sampling: Sampling | None = None
    prompts: Prompts | None = None
    measure: Measure | None = None
    instruments: Instruments | None = None


class PlantedFault(Section):
    """One fault of the planted-fault suite: where it is and which finding names it. No run, no detector reads it."""

    name: Name
    family: Literal["kernel", "host", "graph", "bytes", "speculation", "data"]
    cause: str = Field(description="what is wrong, in truth")
    expect: list[str] = Field(
        min_length=1,
        description="findings that name it, as id or id@location, one of which must rank first; none: it is no fault",
    )
    variant: Name | None = Field(default=None, description="the variant it is planted in; default: the fault's name")
    clean: str = Field(default="clean", description="variant that is the same without it; empty: there is none")
    mutation: str | None = Field(default=None, description="data faults: what is done to a bundle's tables")
    trace: str | None = Field(
        default=None, description="data faults: trace or recorded bundle they are planted in, relative to the file"
    )


class ScenarioFile(Section):
    """A scenario of the decode workbench, as written in TOML."""

    name: Name
    summary: str = ""
    model: Model = Model()
    precision: Precision = Precision()
    engine: Engine = Engine()
    drafter: Drafter = Drafter()
    sampling: Sampling = Sampling()
    prompts: Prompts = Prompts()
    measure: Measure = Measure()
    instruments: Instruments = Instruments()
    matrix: list[Overrides] = Field(default=[], description="the variants; none: one variant with the scenario's name")
    fault: list[PlantedFault] = Field(default=[], description="faults planted in the variants, for workbench faults")


class Variant(Section):
    """One variant with every setting resolved. ``folder`` is where its relative paths start."""

    name: Name
    model: Model
    precision: Precision
    engine: Engine
    drafter: Drafter
    sampling: Sampling
    prompts: Prompts
    measure: Measure
    instruments: Instruments
    folder: str = Field(default="", exclude=True)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model.preset and self.model.shape:
            raise ValueError("model.preset and model.shape: give one of them")
        if self.model.weights == "trained" and (self.model.tp > 1 or self.model.routing != "router"):
            raise ValueError("model.tp and model.routing: need weights = 'random'")
        if (self.model.routing == "recorded") != (self.model.routing_file is not None):
            raise ValueError("model.routing_file: goes with routing = 'recorded', and only then")
        if self.engine.collective_us and self.model.tp == 1:
            raise ValueError("engine.collective_us: one rank exchanges nothing; set model.tp")
        if self.drafter.kind == "simulated":
            length = self.drafter.accept_length
            if length is None:
                raise ValueError("drafter.accept_length: needed for kind 'simulated'")
            if length > self.drafter.width:
                raise ValueError(
                    f"drafter.accept_length: {length} exceeds depth + 1 = {self.drafter.width} tokens per step"
                )
        return self

    def settings(self) -> dict[str, Any]:
        """Return every setting as plain data."""
        return self.model_dump(mode="json")

    @property
    def prompts_path(self) -> Path:
        """The prompts file. Raises InputError where it does not exist."""
        return prompts_path(self.prompts.file, Path(self.folder))

    @property
    def shape_path(self) -> Path | None:
        """The shape file, where one is named."""
        return Path(self.folder) / self.model.shape if self.model.shape else None

    @property
    def routing_path(self) -> Path | None:
        """The file of recorded expert choices, where one is named."""
        return Path(self.folder) / self.model.routing_file if self.model.routing_file else None


class Scenario:
    """A validated scenario. ``source`` is the file or built-in name it came from."""

    def __init__(self, document: ScenarioFile, source: str, folder: Path) -> None:
        self.name = document.name
        self.summary = document.summary
        self.source = source
        self.faults = tuple(document.fault)
        self._variants = _resolve(document, source, folder)

    def variants(self) -> list[Variant]:
        """Return the variants in the file's order, fully resolved."""
        return list(self._variants)

    def only(self, names: Collection[str]) -> "Scenario":
        """Return this scenario with the variants of ``names`` alone. Raises InputError for a name it does not have."""
        known = [variant.name for variant in self._variants]
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"{self.source}: no variant {unknown[0]!r}", hint=f"it has {', '.join(known)}")
        other = copy(self)
        other._variants = [variant for variant in self._variants if variant.name in names]
        return other

    def to_json(self) -> dict[str, Any]:
        """Return the resolved scenario as plain data: what a bundle's manifest keeps."""
        return {
            "name": self.name,
            "summary": self.summary,
            "variants": [variant.settings() for variant in self._variants],
        }

    @property
    def sha256(self) -> str:
        """SHA-256 of the resolved scenario: equal for two files that ask for the same."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def load_scenario(name_or_path: str | os.PathLike[str], *, overrides: Sequence[str] = ()) -> Scenario:
    """Load a built-in scenario by name, or a TOML file by path.

    ``overrides`` are TOML assignments to the file's own sections, such as ``measure.repetitions=1``.
    Raises InputError, one line that names file, field and fix.
    """
    source, text, folder = _read(os.fspath(name_or_path))
    scenario = parse_scenario(text, source=source, folder=folder, overrides=overrides)
    for variant in scenario.variants():
        try:
            _look_up(variant)
        except InputError as error:
            raise InputError(f"{source}: variant {variant.name!r}: {error.message}", hint=error.hint) from None
    return scenario


def parse_scenario(text: str, *, source: str, folder: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Parse and validate TOML ``text``; files it names are not looked up. Raises InputError."""
    document = _toml(text, source)
    for override in overrides:
        _merge(document, _toml(override, f"override {override!r}"))
    try:
        return Scenario(ScenarioFile.model_validate(document), source, folder)
    except ValidationError as error:
        raise input_error(error, source, ScenarioFile) from None


def scenario_names() -> list[str]:
    """Return the names of the built-in scenarios, sorted."""
    folder = files("workbench.scenarios") / "builtin"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def prompts_path(file: str, folder: Path) -> Path:
    """Return the prompts file: ``file`` relative to ``folder`` when it ends in .jsonl, else a built-in name.

    Raises InputError where there is no such file.
    """
    if file.endswith(".jsonl") or "/" in file or os.sep in file:
        path = folder / file
        if not path.is_file():
            raise InputError(f"prompts.file: no file {path}", hint="the path is relative to the scenario")
        return path
    builtin = Path(str(files("workbench.scenarios") / "prompts"))
    names = sorted(path.stem for path in builtin.glob("*.jsonl"))
    if file not in names:
        hint = f"built-in: {', '.join(names) or 'none'}; a file of your own ends in .jsonl"
        raise InputError(f"prompts.file: no built-in prompts {file!r}", hint=hint)
    return builtin / f"{file}.jsonl"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a scenario file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **ScenarioFile.model_json_schema()}


def scenario_path(name: str) -> Path:
    """Return the file of a built-in name or a path; the latter need not exist. Raises InputError for a wrong name."""
    if name.endswith(".toml") or "/" in name or os.sep in name:
        return Path(name)
    if name in scenario_names():
        return Path(str(files("workbench.scenarios") / "builtin" / f"{name}.toml"))
    hint = suggestion(name, scenario_names())
    raise InputError(f"no scenario {name!r}", hint=f"{hint}; a file of your own ends in .toml")


def _read(name: str) -> tuple[str, str, Path]:
    """Return source, text and folder of a built-in name or a path."""
    path = scenario_path(name)
    try:
        if path.stat().st_size > MAX_SCENARIO_BYTES:
            raise InputError(f"{name}: larger than {MAX_SCENARIO_BYTES >> 20} MiB", hint="not a scenario")
        return name, path.read_bytes().decode(), path.parent
    except FileNotFoundError:
        raise InputError(f"{name}: no such file", hint=f"built-in: {', '.join(scenario_names())}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"{name!r}: cannot be read ({reason})", hint="a scenario is a UTF-8 TOML file") from None


def _look_up(variant: Variant) -> None:
    """Raise InputError where ``variant`` names a preset, a policy or a file that does not exist."""
    from workbench.decode.precision import policy_names
    from workbench.decode.presets import preset_names

    for field, name, names in (
        ("model.preset", variant.model.preset, preset_names()),
        ("precision.policy", variant.precision.policy, policy_names()),
    ):
        if name is not None and name not in names:
            raise InputError(f"{field}: there is no {name!r}", hint=suggestion(name, names))
    if (shape := variant.shape_path) and not shape.is_file():
        raise InputError(f"model.shape: no file {shape}", hint="the path is relative to the scenario")
    if (recorded := variant.routing_path) and not recorded.is_file():
        raise InputError(f"model.routing_file: no file {recorded}", hint="the path is relative to the scenario")
    _ = variant.prompts_path
    if variant.instruments.pm_sets != ["traffic"]:
        from workbench.probes.counter_sets import SETS

        for name in variant.instruments.pm_sets:
            if name not in SETS:
                raise InputError(f"instruments.pm_sets: there is no {name!r}", hint=suggestion(name, list(SETS)))
    if variant.engine.faults:
        from workbench.decode.rungs.faults import check_faults

        check_faults(variant)


def _toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|(end of document))\)", str(error), re.DOTALL)
        if match is None:
            raise InputError(f"{source}: not TOML: {error}") from None
        reason, line, column, _ = match.groups()
        where = f"line {line}, column {column}" if line else f"line {text.count(chr(10)) + 1} (the end)"
        raise InputError(f"{source}: {where}: not TOML: {reason}", hint='strings need quotes: key = "value"') from None
    except RecursionError:
        raise InputError(f"{source}: not TOML: nested too deeply") from None


def _resolve(document: ScenarioFile, source: str, folder: Path) -> list[Variant]:
    names: set[str] = set()
    variants = []
    for index, entry in enumerate(document.matrix or [Overrides(name=document.name)]):
        if entry.name in names:
            raise InputError(f"{source}: matrix[{index}].name: {entry.name!r} is taken", hint="name it differently")
        names.add(entry.name)
        settings = document.model_dump(exclude={"name", "summary", "matrix", "fault"})
        changes = entry.model_dump(exclude_unset=True)
        if "model" in changes and ("preset" in changes["model"]) != ("shape" in changes["model"]):
            settings["model"] |= {"preset": None, "shape": None}
        _merge(settings, changes)
        if settings["model"]["preset"] is None and settings["model"]["shape"] is None:
            settings["model"]["preset"] = "nano"
        try:
            variants.append(Variant.model_validate({**settings, "folder": str(folder)}))
        except ValidationError as error:
            raise input_error(error, f"{source}: variant {entry.name!r}", Variant) from None
    return variants


def _merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    """Merge ``changes`` into ``into``, table by table; anything that is not a table replaces."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = deepcopy(value)


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
