import re
from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.faults.case import load_cases, suite_folder
from workbench.faults.mutations import MUTATIONS
from workbench.faults.score import NONE

ROOT = Path(__file__).parents[2]


def test_the_suite_has_eighteen_kinds_over_all_families() -> None:
    cases = load_cases()
    assert len(cases) >= 18
    assert {case.fault.family for case in cases} == {"kernel", "host", "graph", "bytes", "speculation", "data"}
    assert sum(not case.needs_gpu for case in cases) >= 18
    assert {case.path.parent for case in cases} == {suite_folder()}


def test_every_expected_finding_has_a_page() -> None:
    for case in load_cases():
        for expected in case.fault.expect:
            page = ROOT / "docs" / "findings" / f"{expected.split('@')[0]}.md"
            assert expected == NONE or page.is_file(), f"{case.name}: {page.name} is missing"


def test_every_mutation_is_planted_somewhere() -> None:
    assert {case.fault.mutation for case in load_cases()} - {None} == set(MUTATIONS)


def test_the_page_lists_every_fault() -> None:
    page = (ROOT / "docs" / "reference" / "faults.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE))
    assert {case.name for case in load_cases()} <= listed


def test_only_takes_names_and_families() -> None:
    assert {case.name for case in load_cases(["data"])} == {case.name for case in load_cases() if case.trace}
    assert [case.name for case in load_cases(["too-deep"])] == ["too-deep"]
    with pytest.raises(InputError, match="no fault or family 'too-deeep'; did you mean 'too-deep'"):
        load_cases(["too-deeep"])


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    text = (
        'name = "s"\n[[matrix]]\nname = "clean"\n[[fault]]\nname = "f"\nfamily = "host"\ncause = "c"\nexpect = ["x"]\n'
    )
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(InputError, match="fault 'f': no variant 'f'"):
        load_cases(folder=tmp_path)
    named = text + 'variant = "clean"\n'
    (tmp_path / "a.toml").write_text(named)
    assert [case.variant for case in load_cases(folder=tmp_path)] == ["clean"]
    (tmp_path / "b.toml").write_text(named)
    with pytest.raises(InputError, match="f: two faults of the suite have this name"):
        load_cases(folder=tmp_path)
    (tmp_path / "b.toml").write_text(named.replace('"host"', '"hots"'))
    with pytest.raises(InputError, match="family"):
        load_cases(folder=tmp_path)
