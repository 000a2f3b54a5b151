"""Each speculation detector on bundles made by rule: what it must find, and where it must keep quiet."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.findings.speculation import DETECTORS
from workbench.trace.bundle import Bundle

MS = 1_000_000
PROMPTS, STEPS = 8, 30
Make = Callable[..., Bundle]


def survive(rng: np.random.Generator, kept: Sequence[float]) -> int:
    """Return how many drafts in a row are accepted when each position keeps its share."""
    for position, share in enumerate(kept):
        if rng.random() >= share:
            return position
    return len(kept)


def variant(
    name: str,
    kept: Sequence[float],
    *,
    step_ms: float = 20.0,
    draft_ms: float = 2.0,
    text: str = "1",
    seed: int = 0,
    batch: int | None = None,
    output: list[int] | None = None,
    accepted: Callable[[int], int] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Rows of one variant that drafts ``len(kept)`` tokens in every step; ``text`` names the outputs."""
    rng = np.random.default_rng(seed)
    steps, sequences = [], []
    for prompt in range(PROMPTS):
        clock = 0
        place = (hash_of(name) + prompt) * 1000
        tokens = 1
        for index in range(STEPS):
            count = survive(rng, kept) if accepted is None else accepted(index)
            tokens += count + 1
            drafted = round(draft_ms * MS) if kept else 0
            steps.append(
                {
                    "variant": name,
                    "sequence_id": place,
                    "index": index,
                    "start_ns": clock,
                    "draft_end_ns": clock + drafted,
                    "forward_end_ns": clock + round(step_ms * MS) - 10,
                    "end_ns": clock + round(step_ms * MS) + int(rng.integers(0, 20_000)),
                    "width": len(kept) + 1,
                    "drafted": len(kept),
                    "accepted": count,
                    "committed": count + 1,
                    "batch": batch,
                }
            )
            clock += 30 * MS
        sequences.append(
            {
                "variant": name,
                "sequence_id": place,
                "prompt_id": f"p{prompt}",
                "new_tokens": tokens,
                "output_sha256": (text * 64)[:63] + str(prompt % 10),
                "output_tokens": None if output is None else (output * tokens)[:tokens],
            }
        )
    return {"steps": steps, "sequences": sequences}


def hash_of(name: str) -> int:
    return sum(ord(letter) * 17**place for place, letter in enumerate(name)) % 1_000_003


def found(make: Make, parts: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any], name: str) -> list[Finding]:
    tables: dict[str, list[dict[str, Any]]] = {"steps": [], "sequences": []}
    for part in parts.values():
        for table, rows in part.items():
            tables.setdefault(table, []).extend(rows)
    return [one for detector in DETECTORS for one in detector(Facts(make(tables, settings), name))]


def drafter(kind: str = "mtp", depth: int = 3, **more: Any) -> dict[str, Any]:
    return {"drafter": {"kind": kind, "depth": depth}, **more}


def ids(findings: list[Finding]) -> list[str]:
    return [finding.id for finding in findings]


GOOD = (0.7, 0.72, 0.7)


def test_a_working_drafter_raises_nothing(make_bundle: Make) -> None:
    assert found(make_bundle, {"v": variant("v", GOOD)}, {"v": drafter()}, "v") == []


def test_nothing_accepted_is_wiring(make_bundle: Make) -> None:
    (finding,) = found(make_bundle, {"v": variant("v", (0.0, 0.5, 0.5))}, {"v": drafter()}, "v")
    assert (finding.id, finding.severity, finding.confidence) == ("acceptance-wiring", "major", "high")
    assert finding.recoverable is not None
    # 1 token a step of 20 ms; with 60 % kept at each position it would be 1 + .6 + .36 + .216.
    assert finding.recoverable.value == pytest.approx(1e3 / 20.01 * 1.176, rel=1e-3)
    assert finding.recoverable.tag == "modelled"
    assert finding.evidence[0].ids


@pytest.mark.parametrize("kind", ["ngram", "simulated", "none"])
def test_a_drafter_without_weights_cannot_be_wired_wrongly(make_bundle: Make, kind: str) -> None:
    assert found(make_bundle, {"v": variant("v", (0.0, 0.0))}, {"v": drafter(kind, 2)}, "v") == []


def test_few_steps_say_nothing(make_bundle: Make) -> None:
    rows = variant("v", (0.0, 0.0))
    rows["steps"] = rows["steps"][:19]
    assert found(make_bundle, {"v": rows}, {"v": drafter()}, "v") == []


@pytest.mark.parametrize(("kept", "position"), [((0.6, 0.0, 0.0), 2), ((0.8, 0.8, 0.01, 0.9), 3)])
def test_good_then_dead_is_the_block(make_bundle: Make, kept: tuple[float, ...], position: int) -> None:
    (finding,) = found(make_bundle, {"v": variant("v", kept)}, {"v": drafter("dflash", len(kept))}, "v")
    assert finding.id == "acceptance-block-mask"
    assert f"position {position} " in finding.sentence


def test_a_slow_decay_is_no_dead_block(make_bundle: Make) -> None:
    assert found(make_bundle, {"v": variant("v", (0.6, 0.45, 0.35, 0.3, 0.25))}, {"v": drafter("mtp", 5)}, "v") == []


def test_full_acceptance_of_a_loop_is_degenerate(make_bundle: Make) -> None:
    rows = variant("v", GOOD, accepted=lambda _: 3, output=[4, 9, 2])
    (finding,) = found(make_bundle, {"v": rows}, {"v": drafter()}, "v")
    assert (finding.id, finding.severity, finding.confidence) == ("acceptance-degenerate", "critical", "high")


def test_full_acceptance_of_real_text_is_no_fault(make_bundle: Make) -> None:
    rows = variant("v", GOOD, accepted=lambda _: 3, output=list(range(500)))
    assert found(make_bundle, {"v": rows}, {"v": drafter()}, "v") == []


def test_full_acceptance_without_the_text_is_a_doubt(make_bundle: Make) -> None:
    (finding,) = found(make_bundle, {"v": variant("v", GOOD, accepted=lambda _: 3)}, {"v": drafter()}, "v")
    assert (finding.id, finding.severity, finding.confidence) == ("acceptance-degenerate", "note", "low")


LOWER = (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("1", {}, "acceptance-wiring"),
        ("2", {}, "acceptance-drift"),
        ("1", {"engine": {"device": "cpu", "rung": "graph"}}, "acceptance-padding"),
        ("2", {"engine": {"device": "cpu", "rung": "graph"}}, "acceptance-drift"),
    ],
)
def test_a_drop_against_a_reference(make_bundle: Make, text: str, settings: dict[str, Any], expected: str) -> None:
    parts = {"ref": variant("ref", GOOD), "v": variant("v", LOWER, text=text)}
    (finding,) = found(make_bundle, parts, {"ref": drafter(), "v": drafter() | settings}, "v")
    assert finding.id == expected
    assert finding.recoverable is not None
    assert finding.recoverable.low is not None
    assert 0 < finding.recoverable.low < finding.recoverable.value
    assert found(make_bundle, parts, {"ref": drafter(), "v": drafter() | settings}, "ref") == []


@pytest.mark.parametrize(
    "settings",
    [drafter(depth=2), drafter("dflash"), drafter(sampling={"method": "sample"}), drafter(prompts={"count": 9})],
)
def test_what_cannot_be_compared_is_not(make_bundle: Make, settings: dict[str, Any]) -> None:
    parts = {"ref": variant("ref", GOOD), "v": variant("v", LOWER)}
    assert found(make_bundle, parts, {"ref": drafter(), "v": settings}, "v") == []


def test_planted_faults_in_the_settings_change_nothing(make_bundle: Make) -> None:
    parts = {"ref": variant("ref", GOOD), "v": variant("v", LOWER)}
    engine = {"device": "cpu", "rung": "eager"}
    with_faults = drafter(engine=engine | {"faults": ["tap-off-by-one"]})
    open_, scrubbed = (
        found(make_bundle, parts, {"ref": drafter(engine=engine), "v": own}, "v")
        for own in (with_faults, drafter(engine=engine))
    )
    assert open_ == scrubbed
    assert ids(open_) == ["acceptance-wiring"]


def test_acceptance_that_falls_with_the_batch_is_padding(make_bundle: Make) -> None:
    alone, together = variant("v", GOOD, batch=1), variant("v", LOWER, batch=8, seed=1)
    for row in together["steps"] + together["sequences"]:
        row["sequence_id"] += 500
    both = {name: alone[name] + together[name] for name in alone}
    (finding,) = found(make_bundle, {"v": both}, {"v": drafter()}, "v")
    assert (finding.id, finding.confidence) == ("acceptance-padding", "high")
    for row in together["steps"]:
        row["batch"] = None
    assert found(make_bundle, {"v": both}, {"v": drafter()}, "v") == []


def test_speculation_that_costs(make_bundle: Make) -> None:
    parts = {"plain": variant("plain", (), step_ms=10.0), "v": variant("v", LOWER, step_ms=30.0)}
    settings = {"plain": {}, "v": drafter()}
    (finding,) = found(make_bundle, parts, settings, "v")
    assert finding.id == "speculation-not-paying"
    assert finding.recoverable is not None
    tokens = np.mean([row["committed"] for row in parts["v"]["steps"]])
    assert finding.recoverable.value == pytest.approx(1e3 / 10.01 - 1e3 * tokens / 30.01, rel=0.01)
    assert found(make_bundle, parts | {"v": variant("v", LOWER, step_ms=12.0)}, settings, "v") == []


DEEP = (0.7, 0.6, 0.5, 0.4, 0.3, 0.3, 0.3, 0.3)


def test_a_draft_too_deep(make_bundle: Make) -> None:
    # 20 ms plain, 5 ms a token: depth 2 gives 2.12 tokens in 30 ms, depth 8 gives 2.5 in 60 ms.
    parts = {
        "plain": variant("plain", (), step_ms=20.0),
        "v": variant("v", DEEP, step_ms=60.0, draft_ms=16.0),
    }
    settings = {"plain": {}, "v": drafter(depth=8)}
    first = found(make_bundle, parts, settings, "v")
    finding = next(one for one in first if one.id == "draft-depth")
    assert "instead of 8" in finding.title
    assert finding.recoverable is not None
    assert finding.recoverable.value > 0.5 * 1e3 * 2.5 / 60
    shallow = {"plain": parts["plain"], "v": variant("v", DEEP[:2], step_ms=30.0, draft_ms=4.0)}
    assert "draft-depth" not in ids(found(make_bundle, shallow, settings | {"v": drafter(depth=2)}, "v"))


def test_a_block_drafter_is_charged_for_its_block_whatever_is_used_of_it(make_bundle: Make) -> None:
    # All of the cost is the block's one pass: using fewer of its tokens saves nothing.
    parts = {
        "plain": variant("plain", (), step_ms=20.0),
        "v": variant("v", DEEP, step_ms=40.0, draft_ms=20.0),
    }
    assert "draft-depth" not in ids(found(make_bundle, parts, {"plain": {}, "v": drafter("dflash", 8)}, "v"))
    assert "draft-depth" in ids(found(make_bundle, parts, {"plain": {}, "v": drafter("mtp", 8)}, "v"))


def test_a_drafter_that_seldom_drafts_has_no_depth_to_choose(make_bundle: Make) -> None:
    rows = variant("v", DEEP, step_ms=60.0)
    for row in rows["steps"][::2]:
        row.update(drafted=0, accepted=0, committed=1, width=1)
    parts = {"plain": variant("plain", (), step_ms=20.0), "v": rows}
    assert "draft-depth" not in ids(found(make_bundle, parts, {"plain": {}, "v": drafter("ngram", 8)}, "v"))


def tensors(name: str, stored: int) -> dict[str, Any]:
    return {"variant": name, "stored_bytes": stored, "resident_bytes": stored, "read_bytes": stored}


@pytest.mark.parametrize(("own_bytes", "expected"), [(600, ["quantisation-costs-acceptance"]), (995, []), (1500, [])])
def test_fewer_bytes_and_fewer_tokens(make_bundle: Make, own_bytes: int, expected: list[str]) -> None:
    parts = {
        "ref": variant("ref", GOOD) | {"tensors": [tensors("ref", 1000)]},
        "v": variant("v", LOWER, text="2", step_ms=18.0) | {"tensors": [tensors("v", own_bytes)]},
    }
    settings = {"ref": drafter(), "v": drafter(precision={"policy": "other"})}
    findings = found(make_bundle, parts, settings, "v")
    assert ids(findings) == expected
    if expected:
        assert findings[0].sentence.startswith("40 % fewer bytes")
        assert "lost" in findings[0].sentence


def by_prompt(rows: dict[str, list[dict[str, Any]]], dead: Callable[[int, int], bool]) -> dict[str, Any]:
    """Let nothing be accepted where ``dead`` (prompt, step) holds; contexts count from 50."""
    prompts = {row["sequence_id"]: number for number, row in enumerate(rows["sequences"])}
    for row in rows["steps"]:
        row["context"] = 50 + 2 * row["index"]
        if dead(prompts[row["sequence_id"]], row["index"]):
            row |= {"accepted": 0, "committed": 1}
    return rows


def test_some_prompts_alone_collapse(make_bundle: Make) -> None:
    rows = by_prompt(variant("v", GOOD), lambda prompt, step: prompt in (2, 5))
    (one,) = found(make_bundle, {"v": rows}, {"v": drafter()}, "v")
    assert one.id == "acceptance-partial"
    assert "On 2 of 8 prompts (p2, p5)" in one.sentence
    assert one.recoverable is not None
    assert found(make_bundle, {"v": by_prompt(variant("v", GOOD), lambda *_: False)}, {"v": drafter()}, "v") == []
    ngram = by_prompt(variant("v", GOOD), lambda prompt, step: prompt in (2, 5))
    assert found(make_bundle, {"v": ngram}, {"v": drafter("ngram")}, "v") == []


def test_long_contexts_alone_collapse(make_bundle: Make) -> None:
    rows = by_prompt(variant("v", GOOD), lambda prompt, step: step > 18)
    (one,) = found(make_bundle, {"v": rows}, {"v": drafter()}, "v")
    assert one.id == "acceptance-partial"
    assert one.sentence.startswith("Beyond ")
    assert 80 <= int(one.sentence.split()[1]) <= 100


def test_a_part_is_told_instead_of_the_whole_against_a_reference(make_bundle: Make) -> None:
    clean = by_prompt(variant("clean", GOOD, seed=1), lambda *_: False)
    own = by_prompt(variant("v", GOOD), lambda prompt, step: prompt in (2, 5) and step % 6 > 0)
    settings = {"v": drafter(), "clean": drafter()}
    (one,) = found(make_bundle, {"clean": clean, "v": own}, settings, "v")
    assert one.id == "acceptance-partial"


def test_a_dead_position_of_a_chain_may_be_a_limit(make_bundle: Make) -> None:
    capped = variant("v", GOOD, accepted=lambda index: min(1, index % 3))
    (one,) = found(make_bundle, {"v": capped}, {"v": drafter()}, "v")
    assert one.id == "acceptance-block-mask"
    assert "or acceptance ends there: not one was kept" in one.sentence
    assert "chain" in one.sentence
    assert "how many positions the verifier scores" in one.remedy
