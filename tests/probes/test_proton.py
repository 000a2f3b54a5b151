import pytest

from workbench.probes import proton
from workbench.probes.proton import proton_missing


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PROTON_DISABLE", raising=False)


def absent(_: str) -> str:
    raise proton.PackageNotFoundError


def test_the_triton_that_is_tested_with_has_it() -> None:
    pytest.importorskip("triton.profiler")
    assert proton_missing() is None


def test_why_it_cannot_be_used_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proton, "version", lambda _: "3.9.0")
    monkeypatch.setattr(proton, "find_spec", lambda _: None)
    reasons = [proton_missing()]
    monkeypatch.setattr(proton, "version", lambda _: "3.1.0")
    reasons.append(proton_missing())
    monkeypatch.setattr(proton, "version", absent)
    reasons.append(proton_missing())
    monkeypatch.setenv("TRITON_PROTON_DISABLE", "1")
    reasons.append(proton_missing())
    told = [one.why for one in reasons if one]
    assert [any(word in why for why in told) for word in ("without Proton", "3.1.0", "not installed", "DISABLE")] == (
        [True] * 4
    )
    assert all(one and one.fix and "stamps" in one.fallback for one in reasons)
