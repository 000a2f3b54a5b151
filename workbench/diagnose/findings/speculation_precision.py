"""Quantisation that costs acceptance: the bytes it saves against the tokens it loses."""

from dataclasses import dataclass

from workbench.diagnose.acceptance import Drafts, length_ratio, load_drafts
from workbench.diagnose.byte_model import byte_classes
from workbench.diagnose.comparable import peers
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.speculation_change import lost
from workbench.diagnose.findings.speculation_shape import own_reading
from workbench.diagnose.findings.speculation_worth import gain, inverse, quantity, severity
from workbench.diagnose.numbers import byte_text, percent, significant
from workbench.diagnose.prompt_jackknife import Interval
from workbench.diagnose.quantisation_trade import Side, Trade
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle

SMALLER = 0.02
"""Share of the stored bytes that a precision must save to count as a lower one."""


@dataclass(frozen=True, slots=True)
class MeasuredTrade:
    """The trade against ``reference``; the ratio of accept lengths with its interval, from ``prompts`` prompts."""

    reference: str
    trade: Trade
    accept_ratio: Interval
    prompts: int


def measured_trade(facts: Facts) -> MeasuredTrade | None:
    """Compare with the most alike variant that differs in precision (and in the engine, which may be tied to it) and
    stores the same model in more bytes; None where there is none or they share no prompt."""
    drafts, reading = own_reading(facts)
    if drafts is None or reading is None or reading.shape != "decay":
        return None
    own = _bytes(facts.bundle, facts.variant)
    for peer in peers(facts.bundle, facts.variant):
        if "precision" not in peer.differs or peer.differs - {"precision", "engine"}:
            continue
        other = _bytes(facts.bundle, peer.name)
        if own is None or other is None or own.stored > (1 - SMALLER) * other.stored:
            continue
        reference = load_drafts(facts.bundle, peer.name, facts.time_pass)
        ratio, prompts = length_ratio(drafts, reference)
        if prompts and reference.depth:
            trade = Trade(_side(reference, other.read), _side(drafts, own.read))
            return MeasuredTrade(peer.name, trade, ratio, prompts)
    return None


def quantisation_costs_acceptance(facts: Facts) -> list[Finding]:
    """Find ``quantisation-costs-acceptance``: fewer bytes a step, and certainly fewer tokens a step."""
    found = measured_trade(facts)
    if found is None or not lost(found.accept_ratio):
        return []
    trade = found.trade
    assert trade.bytes_saved is not None  # noqa: S101 - both sides' bytes are known
    worth = gain(facts, inverse(found.accept_ratio), "estimated", f"at the accept length of {found.reference}")
    net = trade.net_ratio
    verdict = f"net {percent(net - 1, 2)} tok/s" if net >= 1 else f"net {percent(1 - net, 2)} of the tok/s lost"
    return [
        Finding(
            id="quantisation-costs-acceptance",
            severity=severity(facts, worth),
            variant=facts.variant,
            title="quantisation costs acceptance",
            sentence=(
                f"{percent(trade.bytes_saved, 2)} fewer bytes a step than {found.reference}, and "
                f"{significant(trade.quantised.accept_length, 3)} tokens a step instead of "
                f"{significant(trade.reference.accept_length, 3)}: {verdict}."
            ),
            remedy=(
                "Keep the precision of what moves the logits most (activations first, attention output, the layers "
                "the drafter is fed from), or train the drafter on the quantised target."
            ),
            confidence="high",
            evidence=(
                Evidence(
                    "accept length over the reference's",
                    quantity(found.accept_ratio, "times", note=f"paired by {found.prompts} prompts"),
                    "steps",
                ),
                Evidence(
                    "bytes of a step",
                    Quantity(
                        trade.quantised.bytes_per_step or 0.0,
                        "B",
                        "modelled",
                        note=f"{found.reference}: {byte_text(trade.reference.bytes_per_step or 0.0)}",
                    ),
                    "tensors",
                ),
                Evidence(
                    "tok/s over the reference's",
                    Quantity(net, "times", "measured", note="acceptance and step time"),
                    "steps",
                ),
                Evidence(
                    "accept length from which it wins", Quantity(trade.break_even, "tokens/step", "measured"), "steps"
                ),
            ),
            recoverable=worth,
            explains=("acceptance-drift", "speculation-not-paying", "draft-depth"),
        )
    ]


@dataclass(frozen=True, slots=True)
class _Bytes:
    """The target's bytes: as stored, and as an average step of target and drafter reads them."""

    stored: float
    read: float


def _bytes(bundle: Bundle, variant: str) -> _Bytes | None:
    classes = byte_classes(bundle, variant)
    if not classes:
        return None
    stored = sum(entry.stored_bytes for entry in classes if entry.role == "target")
    return _Bytes(float(stored), float(sum(entry.read_bytes for entry in classes)))


def _side(drafts: Drafts, read: float) -> Side:
    return Side(float(drafts.committed.mean()), float(drafts.wall_ns.mean()) / 1e6, read)
