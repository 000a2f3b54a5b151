"""What the linter found: a row per kernel, signature and target, and what of it fails."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from workbench.errors import ExitCode
from workbench.lint.build import Built

SCHEMA = "workbench.kernels-lint/1"

Rule = Literal["compile", "spill", "registers", "shared", "occupancy"]
RULES: Mapping[Rule, str] = {
    "compile": "A kernel does not compile for a target",
    "spill": "A kernel uses local memory: spilled registers, or stack",
    "registers": "A kernel takes more registers a thread than it may",
    "shared": "A kernel takes more shared memory than its baseline",
    "occupancy": "An SM holds fewer warps of a kernel than it should, or none",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel for one set of arguments on one target. ``file`` and ``line``: where it is defined."""

    kernel: str
    signature: str
    label: str
    origin: str
    spills: str
    target: str
    file: str
    line: int
    built: Built

    @property
    def key(self) -> tuple[str, str, str]:
        """Target, kernel and signature: what identifies a row in a baseline."""
        return self.target, self.kernel, self.signature

    def to_json(self) -> dict[str, Any]:
        """Return it flat."""
        row = asdict(self)
        return {**{key: value for key, value in row.items() if key != "built"}, **row["built"]}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that fails the check: what, of which row, and in numbers."""

    rule: Rule
    row: Row
    sentence: str


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a kernel may take; None: any number. ``min_occupancy`` is a share of an SM's warps."""

    max_registers: int | None = None
    max_spill_bytes: int = 0
    min_occupancy: float | None = None


@dataclass(frozen=True, slots=True)
class LintResult:
    """Everything the outputs show. ``skipped``: functions taken for helpers, with the reason."""

    triton: str
    thresholds: Thresholds
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """Return the code of docs/reference/exit-codes.md."""
        return ExitCode.REGRESSION if self.findings else ExitCode.OK

    def failed(self, row: Row) -> Sequence[Finding]:
        """Return the findings on ``row``."""
        return [finding for finding in self.findings if finding.row.key == row.key]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data. Numbers are facts of the build, so estimates of what a device does."""
        return {
            "schema": SCHEMA,
            "tag": "estimated",
            "triton": self.triton,
            "thresholds": asdict(self.thresholds),
            "rows": [row.to_json() for row in self.rows],
            "findings": [
                {
                    "rule": finding.rule,
                    "kernel": finding.row.kernel,
                    "signature": finding.row.signature,
                    "target": finding.row.target,
                    "sentence": finding.sentence,
                    "file": finding.row.file,
                    "line": finding.row.line,
                }
                for finding in self.findings
            ],
            "notes": list(self.notes),
            "skipped": dict(self.skipped),
        }
