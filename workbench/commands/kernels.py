"""``workbench kernels lint``: what Triton kernels take of an SM, without a GPU, as a check for CI."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.commands.options import Json
from workbench.errors import InputError
from workbench.terminal import note, print_json, print_line, print_table

if TYPE_CHECKING:
    from workbench.lint.baseline import Baseline
    from workbench.lint.result import LintResult, Row
    from workbench.lint.signature import Signature

app = typer.Typer(help="Triton kernels as compiled.", no_args_is_help=True, rich_markup_mode=None)

COLUMNS = (
    "kernel", "signature", "target", "warps", "registers", "spill or stack B", "shared B", "programs/SM", "occupancy",
    "limited by", "",
)  # fmt: skip


@app.callback()
def kernels() -> None:
    """Triton kernels as compiled."""


@app.command()
def lint(
    subjects: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE.py|MODULE]...", help="Where the kernels are. Default: the project's own kernels."
        ),
    ] = None,
    target: Annotated[
        str, typer.Option("--target", metavar="SM,...", help="Targets to compile for.")
    ] = "sm_90,sm_100,sm_103",
    signature: Annotated[
        list[str] | None,
        typer.Option(
            "--signature",
            metavar="KERNEL:ARGS",
            help="Arguments, such as 'add:*fp32,*fp32,i32,BLOCK=128;num_warps=4'; repeatable.",
        ),
    ] = None,
    signatures: Annotated[
        Path | None, typer.Option("--signatures", metavar="FILE", help="TOML file of signatures.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="KERNEL", help="Leave out the others; repeatable.")
    ] = None,
    max_registers: Annotated[
        int | None, typer.Option("--max-registers", metavar="N", min=1, help="Most registers a thread.")
    ] = None,
    max_spill_bytes: Annotated[
        int, typer.Option("--max-spill-bytes", metavar="N", min=0, help="Most bytes of spill or stack a thread.")
    ] = 0,
    min_occupancy: Annotated[
        float | None,
        typer.Option("--min-occupancy", metavar="SHARE", min=0, max=1, help="Least share of an SM's warps."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="What it holds fails only where it got worse."),
    ] = None,
    write_baseline: Annotated[
        bool, typer.Option("--write-baseline", help="Write the --baseline file instead of comparing with it.")
    ] = False,
    sarif: Annotated[Path | None, typer.Option("--sarif", metavar="FILE", help="Write what fails as SARIF.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", metavar="N", min=1, help="Builds at once. Default: CPUs.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="For one import, or one kernel to compile.")
    ] = 300,
    as_json: Json = False,
) -> None:
    """Compile Triton kernels for any target, without a GPU, and fail where they take too much.

    Prints registers, spills, shared memory and the occupancy these allow. Exits with 0 where all is within bounds, 1
    where a kernel is not or does not compile.
    """
    from workbench.commands.progress import shown_progress
    from workbench.lint.check import Request
    from workbench.lint.check import lint as check
    from workbench.lint.result import Thresholds
    from workbench.lint.target import parse_targets

    if write_baseline and baseline is None:
        raise InputError("--write-baseline: where to is not said", hint="add --baseline FILE")
    request = Request(
        tuple(subjects or ()),
        parse_targets(target),
        _signatures(signature, signatures),
        tuple(only or ()),
        Thresholds(max_registers, max_spill_bytes, min_occupancy),
        jobs or len(os.sched_getaffinity(0)),
        timeout,
    )
    before = _baseline(baseline, exists_already=not write_baseline)
    with shown_progress() as progress:
        result = check(request, None if write_baseline else before, progress=progress)
    if sarif:
        _write_sarif(result, sarif)
    if as_json:
        print_json(result.to_json())
    else:
        _print(result)
    if write_baseline and baseline:
        _pin(result, baseline, before, partial=bool(only))
        failed = any(row.built.error for row in result.rows)
        raise typer.Exit(result.exit_code if failed else 0)
    raise typer.Exit(result.exit_code)


def _signatures(given: list[str] | None, file: Path | None) -> "tuple[Signature, ...]":
    from workbench.lint.sidecar import read_sidecar
    from workbench.lint.signature import parse_signature

    return (*(read_sidecar(file) if file else ()), *(parse_signature(text) for text in given or ()))


def _baseline(path: Path | None, *, exists_already: bool) -> "Baseline | None":
    from workbench.lint.baseline import read_baseline

    return read_baseline(path) if path and (exists_already or path.exists()) else None


def _pin(result: "LintResult", path: Path, before: "Baseline | None", *, partial: bool) -> None:
    """Write the baseline. What was not linted this time is kept: other targets, with --only other kernels."""
    from workbench.lint.baseline import write_baseline

    targets = {row.target for row in result.rows}
    linted = {row.kernel for row in result.rows}
    kept = [
        pinned
        for pinned in (before.rows.values() if before else ())
        if pinned.target not in targets or (partial and pinned.kernel not in linted)
    ]
    note(f"{path}: {write_baseline(path, result.triton, result.rows, keep=kept)} rows")


def _write_sarif(result: "LintResult", path: Path) -> None:
    from workbench.lint.sarif import render

    try:
        path.write_text(render(result, Path.cwd()), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})", hint="choose another path") from error


def _print(result: "LintResult") -> None:
    from workbench.lint.sarif import relative

    print_table(COLUMNS, [_cells(row, result) for row in result.rows], right=(3, 4, 5, 6, 7, 8))
    print_line()
    print_line(
        f"estimated: read from binaries of Triton {result.triton}; spills are a thread's, shared memory a program's"
    )
    for row in {row.kernel: row for row in result.rows if row.spills}.values():
        print_line(f"{row.kernel} may spill: {row.spills}")
    for name, why in result.skipped.items():
        print_line(f"left out: {name} {why}; --only {name} or a signature lints it")
    for line in result.notes:
        print_line(line)
    for finding in result.findings:
        row = finding.row
        where = f"{relative(row.file, Path.cwd())}:{row.line}"
        print_line(f"{where}: {row.kernel} ({row.label}) on {row.target}: {finding.sentence}")
    compiled = sum(not row.built.error for row in result.rows)
    failed = len({finding.row.key for finding in result.findings})
    print_line(
        f"{compiled} of {len(result.rows)} compiled, {failed} out of bounds" if failed else f"{compiled} compiled"
    )


def _cells(row: "Row", result: "LintResult") -> tuple[str, ...]:
    built = row.built
    if built.error:
        return (row.kernel, row.label, row.target, *[""] * 7, "does not compile")
    spills = str(built.spill_or_stack_bytes)
    if built.spill_or_stack_bytes and built.spill_store_bytes is not None:
        spills += f" ({built.spill_store_bytes} stored, {built.spill_load_bytes} loaded)"
    return (
        row.kernel,
        row.label,
        row.target,
        str(built.num_warps),
        str(built.registers),
        spills,
        str(built.shared_bytes),
        str(built.programs_per_sm),
        f"{built.occupancy_limit or 0:.1%}",
        built.limiter,
        ", ".join(finding.rule for finding in result.failed(row)),
    )
