import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from workbench.diagnose.summary import Diagnosis, diagnose
from workbench.errors import InputError
from workbench.reports.html import render_html, write_html
from workbench.trace.bundle import Bundle
from workbench.trace.manifest import MANIFEST, read_manifest, write_manifest

ROOT = Path(__file__).parents[2]


class Outline(HTMLParser):
    """Collects what a browser would act on: elements, and attributes that load or run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: dict[str, int] = {}
        self.active: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] = self.elements.get(tag, 0) + 1
        for name, value in attrs:
            leaves = name == "href" and not (value or "").startswith("#")
            if leaves or name in ("src", "srcset", "action", "style") or name.startswith("on"):
                self.active.append(f"{tag} {name}={value}")


def without_plotly(text: str) -> str:
    """The page without its one large script."""
    return max(re.split(r"<script>.{1000000,}?</script>", text, flags=re.DOTALL), key=len)


@pytest.fixture(scope="session")
def page(made_bundle: Bundle, made_diagnosis: Diagnosis) -> str:
    return render_html(made_bundle, made_diagnosis)


def test_the_page_answers_in_order(page: str) -> None:
    sections = re.findall(r'<section id="([\w-]+)">', page)
    assert sections == [
        "speed",
        "roofline",
        "causes",
        "timeline",
        "acceptance",
        "comparison",
        "speculation",
        "findings",
        "step-times",
        "bytes",
        "quality",
        "environment",
        "limits",
    ]
    assert re.search(r"<h1><bdi>\w+, the fastest of 3 variants, decodes at", page)
    for figure in ("step-time", "waterfall-0", "survival", "speeds", "accept-lengths", "step-spread"):
        assert f'class="plot" id="{figure}"' in page
        assert f'id="{figure}-data"' in page


def test_every_kind_of_number_is_there_with_its_tag(page: str) -> None:
    for tag in ("measured", "estimated", "modelled"):
        assert f'<span class="tag {tag}">{tag}</span>' in page
    assert "3 of 3" in page
    assert "data_loss" in page
    assert "s3cret" not in page
    assert page.count("withheld") == 2


def test_plotly_is_inlined_once_and_nothing_is_loaded(page: str) -> None:
    assert page.count("* plotly.js v") == 1
    assert len(page) < 8_000_000
    assert Outline(page).active == ["link href=data:,"]


def test_the_policy_lets_only_the_pages_own_code_run(page: str) -> None:
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.replace("&#39;", "'").split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy
    assert "http" not in policy
    for name in ("script-src", "style-src"):
        assert all(re.fullmatch(r"'sha256-[\w+/=]{44}'", source) for source in rules[name].split())
    assert page.index("Content-Security-Policy") < page.index("<style") < page.index("<script")


def test_the_same_bundle_gives_the_same_bytes(page: str, made_bundle: Bundle, tmp_path: Path) -> None:
    """In another process, from another folder, with another order of hashing."""
    copy = shutil.copytree(made_bundle.path, tmp_path / "elsewhere")
    script = (
        "import sys; from workbench.trace.bundle import Bundle; from workbench.reports.html import write_html;"
        "write_html(Bundle.open(sys.argv[1]), sys.argv[2])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT), "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", script, copy, tmp_path / "report.html"], env=environment, check=True)
    again = (tmp_path / "report.html").read_bytes().decode()
    same = next((at for at, (one, other) in enumerate(zip(page, again, strict=False)) if one != other), len(page))
    assert (same, len(again)) == (len(page), len(page)), (page[same - 200 : same + 200], again[same - 20 : same + 200])
    assert str(made_bundle.path) not in page


def test_hostile_text_is_inert(page: str, hostile_bundle: Bundle, hostile_diagnosis: Diagnosis) -> None:
    text = render_html(hostile_bundle, hostile_diagnosis)
    outline, harmless = Outline(text), Outline(page)
    assert outline.active == ["link href=data:,"]
    assert outline.elements == harmless.elements
    shown = without_plotly(text)
    assert "window.owned" in shown
    assert "<script>window" not in shown
    assert "49" not in re.findall(r"evil.{0,20}", shown)[0]
    assert not re.search("[\u202e\u2066\x00\x1b]", shown)
    assert len(text) < len(page) + 500_000


def test_an_unfinished_run_is_named_first(made_bundle: Bundle, tmp_path: Path) -> None:
    import msgspec

    folder = shutil.copytree(made_bundle.path, tmp_path / "failed")
    write_manifest(folder, msgspec.structs.replace(read_manifest(folder), state="failed", failure="disk <full>"))
    assert (folder / MANIFEST).exists()
    bundle = Bundle.open(folder)
    text = render_html(bundle, diagnose(bundle))
    assert text.index("The run failed: disk &lt;full&gt;.") < text.index('<section id="speed">')


def test_slow_steps_get_a_picture_of_when_they_ran(
    make_bundle: Callable[..., Bundle], made_bundle: Bundle, page: str, tmp_path: Path
) -> None:
    import pyarrow as pa

    from workbench.trace.bundle import BundleWriter

    assert 'id="step-order"' not in page
    with BundleWriter.create(tmp_path / "uneven", made_bundle.manifest) as writer:
        for name in ("sequences", "tensors", "roofs", "limits", "host"):
            writer.append_table(name, made_bundle.table(name))
        rows = made_bundle.table("steps").to_pylist()
        rows[5]["end_ns"] += 10**10
        for row in rows[6:]:
            for name in ("start_ns", "draft_end_ns", "forward_end_ns", "end_ns"):
                row[name] += 10**10
        writer.append_table("steps", pa.Table.from_pylist(rows, made_bundle.table("steps").schema))
    bundle = Bundle.open(tmp_path / "uneven")
    assert 'id="step-order"' in render_html(bundle, diagnose(bundle))


def test_written_whole_or_not_at_all(made_bundle: Bundle, page: str, tmp_path: Path) -> None:
    path = write_html(made_bundle, tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == page
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "no" / "report.html", tmp_path / "folder"):
        with pytest.raises(InputError, match="cannot be written"):
            write_html(made_bundle, target)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "report.html"]
