"""What reading a foreign trace lost, repaired or left out: rows of the bundle's ``losses`` table."""

from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["info", "data_loss", "error"]

_RANK: dict[Severity, int] = {"info": 0, "data_loss": 1, "error": 2}


@dataclass(slots=True)
class Loss:
    """One kind of loss. ``detail`` is of the first occurrence."""

    count: int
    severity: Severity
    detail: str
    first_ns: int | None = None
    last_ns: int | None = None


@dataclass(slots=True)
class Losses:
    """Counts by kind. ``probe`` names the reader in the table."""

    probe: str
    kinds: dict[str, Loss] = field(default_factory=dict)

    def add(
        self, kind: str, severity: Severity, detail: str, *, count: int = 1, at_ns: tuple[int, ...] | None = None
    ) -> None:
        """Count ``count`` more of ``kind``. ``at_ns``: times on the trace's clock where they are known."""
        if count <= 0:
            return
        loss = self.kinds.setdefault(kind, Loss(0, severity, detail))
        loss.count += count
        if _RANK[severity] > _RANK[loss.severity]:
            loss.severity = severity
        if at_ns:
            loss.first_ns = min(at_ns) if loss.first_ns is None else min(loss.first_ns, *at_ns)
            loss.last_ns = max(at_ns) if loss.last_ns is None else max(loss.last_ns, *at_ns)

    def count(self, kind: str) -> int:
        """Return how many of ``kind`` were counted."""
        return self.kinds[kind].count if kind in self.kinds else 0

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of table ``losses``, worst first."""
        ordered = sorted(self.kinds.items(), key=lambda item: (-_RANK[item[1].severity], item[0]))
        return [
            {
                "probe": self.probe,
                "kind": kind,
                "count": loss.count,
                "first_ns": loss.first_ns,
                "last_ns": loss.last_ns,
                "severity": loss.severity,
                "detail": loss.detail,
            }
            for kind, loss in ordered
        ]
