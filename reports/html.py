"""The HTML report: one file that needs no network, safe to open whatever the bundle holds.

Everything from the bundle passes autoescaping or ``tojson``; a content security policy lets only this page's own
scripts and styles run, by hash, and nothing be fetched. The same bundle and version give the same bytes.
"""

import base64
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from workbench import __version__
from workbench.comparison.compare import RunComparison
from workbench.diagnose.summary import Diagnosis, diagnose
from workbench.errors import InputError
from workbench.reports import attached_page, compare_page, ingested_figures, ingested_page, page, palette, step_figure
from workbench.reports.attached_page import is_attached
from workbench.reports.blocks import Section, figure_blocks
from workbench.reports.finding_blocks import TopFinding
from workbench.reports.ingested_page import is_ingested
from workbench.reports.labels import visible
from workbench.reports.plotly_config import CONFIG, TEMPLATES
from workbench.trace.bundle import Bundle

EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
"""Hash of an empty style element: plotly.js adds one and fills it through the CSSOM, which a policy allows."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a page says, whatever it is about. ``swatches``: names in legends and the cause whose colour they have.

    ``top``: what is in the way, for the first screen.
    """

    title: str
    answer: str
    warnings: tuple[str, ...]
    sections: tuple[Section, ...]
    swatches: Mapping[str, str]
    top: tuple[TopFinding, ...] = ()


def render_html(bundle: Bundle, diagnosis: Diagnosis) -> str:
    """Return the report on ``bundle`` as one HTML document."""
    findings = page.gather(bundle, diagnosis)
    made = page.sections(findings)
    document = Document(
        page.title(diagnosis),
        page.answer(diagnosis),
        page.warnings(findings),
        made,
        step_figure.COLOURS,
        page.top(findings),
    )
    return render(document, bundle.manifest.created)


def render_ingested_html(bundle: Bundle) -> str:
    """Return the report on an ingested trace as one HTML document."""
    trace = ingested_page.gather(bundle)
    made = ingested_page.sections(trace)
    warnings = ingested_page.warnings(trace)
    document = Document(
        ingested_page.title(trace), ingested_page.answer(trace), warnings, made, ingested_figures.COLOURS
    )
    return render(document, bundle.manifest.created)


def render_attached_html(bundle: Bundle) -> str:
    """Return the report on a server that was watched from outside as one HTML document."""
    watched = attached_page.gather(bundle)
    document = Document(
        attached_page.title(watched),
        attached_page.answer(watched),
        attached_page.warnings(watched),
        attached_page.sections(watched),
        step_figure.COLOURS,
        attached_page.top(watched),
    )
    return render(document, bundle.manifest.created)


def render(document: Document, created: str) -> str:
    """Return ``document`` as one HTML page. ``created``: when what it is about was made."""
    from markupsafe import Markup

    environment = _environment()
    style = environment.get_template("style.css.j2").render(causes=palette.CAUSES)
    script = environment.get_template("figures.js.j2").render()
    plotly = _plotly_js()
    classes = {name: f"cause-{index}" for index, name in enumerate(palette.CAUSES)}
    text: str = environment.get_template("report.html.j2").render(
        title=document.title,
        answer=document.answer,
        warnings=document.warnings,
        sections=document.sections,
        top=document.top,
        figures=figure_blocks(document.sections),
        shared={"config": CONFIG, "templates": TEMPLATES},
        policy=_policy([plotly, script], [style]),
        style=Markup(style),  # noqa: S704 - the project's own text, no name of a bundle goes into it
        script=Markup(script),  # noqa: S704 - as above
        style_ids=re.findall(r'getElementById\("([0-9a-f]{64})"\)', plotly),
        plotly=Markup(plotly),  # noqa: S704 - plotly.js as it was installed
        created=visible(created),
        version=__version__,
        swatches=classes | {name: classes[cause] for name, cause in document.swatches.items()},
    )
    return text


def write_html(bundle: Bundle, path: str | Path, diagnosis: Diagnosis | None = None) -> Path:
    """Write the report of ``bundle`` to ``path``, whole or not at all; return the path. ``diagnosis``: of this bundle,
    where it is known already.

    Raises UnfitError where no variant of a run has a measured step, InputError where ``path`` cannot be written.
    """
    if is_attached(bundle):
        text = render_attached_html(bundle)
    elif is_ingested(bundle):
        text = render_ingested_html(bundle)
    else:
        text = render_html(bundle, diagnosis or diagnose(bundle))
    return _write(text, Path(path))


def write_comparison(base: Bundle, head: Bundle, found: RunComparison, path: str | Path) -> Path:
    """Write the page that compares ``head`` with ``base`` to ``path``, whole or not at all; return the path.

    Raises InputError where ``path`` cannot be written.
    """
    compared = compare_page.Compared(base, head, found)
    document = Document(
        compare_page.title(compared),
        compare_page.answer(compared),
        compare_page.warnings(compared),
        compare_page.sections(compared),
        step_figure.COLOURS,
    )
    return _write(render(document, head.manifest.created), Path(path))


def _write(text: str, target: Path) -> Path:
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", newline="\n", dir=target.parent, prefix=f".{target.name[:60]}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise InputError(f"{target}: cannot be written ({error.strerror})", hint="choose another path") from None
    return target


def _umask() -> int:
    """Return the process's file mode mask; it cannot be read without setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _environment() -> Any:
    """Return the Jinja environment: escaping everywhere, an unknown name is an error."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = files("workbench") / "reports" / "templates"
    environment = Environment(
        loader=FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        newline_sequence="\n",
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "allow_nan": False, "separators": (",", ":")}
    return environment


def _plotly_js() -> str:
    """Return plotly.js as a browser sees it inside the page: the hash is taken after line ends are normalised."""
    from plotly.offline import get_plotlyjs

    text = str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")
    if "</script" in text.lower() or "<!--" in text or "\0" in text:
        raise AssertionError("this plotly.js cannot stand inside a script element")
    return text


def _policy(scripts: list[str], styles: list[str]) -> str:
    script_hashes, style_hashes = (" ".join(map(_hash, texts)) for texts in (scripts, styles))
    return (
        f"default-src 'none'; script-src {script_hashes}; style-src {style_hashes} {EMPTY_STYLE}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
