"""``workbench demo``: a bundle recorded on a GPU, and its report, for those who have none at hand."""

import tarfile
from importlib.resources import files
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.commands.options import Json
from workbench.errors import InputError, UnfitError
from workbench.terminal import note, print_json, print_line, printable

if TYPE_CHECKING:
    from workbench.diagnose.summary import Diagnosis
    from workbench.trace.bundle import Bundle

RUNS = Path("runs")
ENDING = ".tar.gz"
MAX_BYTES = 1 << 30
"""Size of a recorded bundle, unpacked, above which it is refused."""
MAX_FILES = 100
DEFAULT = "gpt-oss-20b-h200"
"""The recording that is unpacked where none is named: a run, all six signals of each step."""


def demo(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help=f"Which recording; default: {DEFAULT}.")] = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder to write the bundle to. Default: runs/demo-NAME."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print the names of the recordings.")] = False,
    as_json: Json = False,
) -> None:
    """Unpack a bundle that was recorded on a GPU, and write its report.

    Everything that reads bundles works on it: show, diagnose, whatif, report, compare, serve, export.
    """
    found = recordings(recorded_folder())
    if list_:
        if as_json:
            print_json({"recordings": list(found)})
        else:
            for known in found:
                print_line(known)
        return
    if not found:
        raise UnfitError("no recorded bundle is installed", hint="install the released package, or run a scenario")
    chosen = name or (DEFAULT if DEFAULT in found else next(iter(found)))
    if chosen not in found:
        raise InputError(f"no recording {chosen!r}", hint=f"there are {', '.join(found)}")
    folder = out or RUNS / f"demo-{chosen}"
    if _is_there(folder):
        note(f"{folder}: there already; nothing is unpacked again")
    else:
        unpack(found[chosen], folder)
    _present(folder, open_=open_, as_json=as_json)


def recorded_folder() -> Path:
    """Return the folder of the recordings that the package ships."""
    return Path(str(files("workbench") / "scenarios" / "recorded"))


def recordings(folder: Path) -> dict[str, Path]:
    """Return the recordings in ``folder`` by name, in order: bundles as folders, or packed as ``NAME.tar.gz``."""
    from workbench.trace.manifest import MANIFEST

    if not folder.is_dir():
        return {}
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (path / MANIFEST).is_file():
            found[path.name] = path
        elif path.is_file() and path.name.endswith(ENDING):
            found[path.name.removesuffix(ENDING)] = path
    return found


def unpack(source: Path, folder: Path) -> None:
    """Write the recording ``source`` to ``folder``, which must not exist or be empty.

    Raises InputError where it is not, where it cannot be written, or where the archive holds anything but a bundle's
    files in one folder.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"--out {folder}: exists and is not an empty folder", hint="choose another path")
    made: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: half a bundle would be taken for one the next time.
        made = Path(mkdtemp(prefix=".demo-", dir=folder.parent))
        if source.is_dir():
            for path in sorted(source.iterdir()):
                if path.is_file():
                    (made / path.name).write_bytes(path.read_bytes())
        else:
            _unpack_archive(source, made)
        made.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise InputError(
            f"{folder}: cannot unpack {source.name} ({printable(error)})", hint="choose another"
        ) from error
    finally:
        if made is not None and made.exists():
            rmtree(made)


def _unpack_archive(source: Path, folder: Path) -> None:
    total, seen = 0, set[str]()
    with tarfile.open(source, "r:gz") as archive:
        for member in archive:
            if member.isdir():
                continue
            parts = Path(member.name).parts
            total += member.size
            plain = member.isfile() and 1 <= len(parts) <= 2 and not {"..", "/"} & set(parts)
            if not plain or parts[-1] in seen or len(seen) >= MAX_FILES or total > MAX_BYTES:
                raise InputError(f"{source.name}: {printable(member.name)} is no file of a bundle, or too much")
            seen.add(parts[-1])
            stream = archive.extractfile(member)
            assert stream is not None  # noqa: S101 - a regular file has one
            (folder / parts[-1]).write_bytes(stream.read(MAX_BYTES))


def _is_there(folder: Path) -> bool:
    from workbench.trace.manifest import MANIFEST

    return (folder / MANIFEST).is_file()


def _present(folder: Path, *, open_: bool, as_json: bool) -> None:
    from workbench.reports.html import write_html
    from workbench.trace.bundle import Bundle

    path = folder / "report.html"
    with Bundle.open(folder) as bundle:
        answer, diagnosis = _answer(bundle)
        write_html(bundle, path, diagnosis)
    if as_json:
        print_json({"bundle": str(folder), "report": str(path), "headline": answer})
    else:
        print_line(answer)
        print_line(f"bundle  {folder}")
        print_line(f"report  {path}")
        print_line(f"next    workbench diagnose {folder}")
    if open_:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def _answer(bundle: "Bundle") -> tuple[str, "Diagnosis | None"]:
    """Return the one sentence on the recording, and the diagnosis that it comes from; None where it is another's."""
    if bundle.manifest.source == "attach":
        from workbench.diagnose.attached import attached

        return attached(bundle).headline(), None
    from workbench.diagnose.headline import headline
    from workbench.diagnose.summary import diagnose

    diagnosis = diagnose(bundle)
    return headline(diagnosis), diagnosis
