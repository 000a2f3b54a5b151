"""What one row of a timeline is: spans, samples of a counter, or what the CTAs of a persistent kernel do."""

from dataclasses import dataclass
from typing import Literal

from workbench.timeline.lanes import Lanes
from workbench.timeline.samples import Samples
from workbench.timeline.spans import Spans

Group = Literal["steps", "host", "waits", "device", "counters"]

Weight = Literal["main", "other", "flag", "errors"]
"""How a counter is shown: drawn, named, drawn where it was ever set, drawn where it ever rose."""


@dataclass(frozen=True, slots=True)
class SpanTrack:
    """Spans of one row of the timeline. ``names`` by code; ``table``: where ``ids`` of the spans point.

    ``gaps``: show the times that no span covers. ``nested``: spans lie within each other, as calls do. ``remark``: said
    beside the label.
    """

    key: str
    label: str
    group: Group
    spans: Spans
    names: tuple[str, ...]
    table: str = ""
    gaps: bool = False
    nested: bool = False
    remark: str = ""


@dataclass(frozen=True, slots=True)
class SampleTrack:
    """Samples of one counter; ``unit`` is that of the values shown."""

    key: str
    label: str
    group: Group
    samples: Samples
    unit: str
    weight: Weight = "main"

    @property
    def quiet(self) -> bool:
        """Whether it is a flag that was never set, or a count of errors that never rose."""
        value = self.samples.value
        if self.weight == "flag":
            return not value.any()
        return self.weight == "errors" and (not len(value) or bool(value.max() == value.min()))


@dataclass(frozen=True, slots=True)
class LaneTrack:
    """What the CTAs of persistent kernels did over time, from the stamps of the laned pass."""

    key: str
    label: str
    group: Group
    lanes: Lanes


Track = SpanTrack | SampleTrack | LaneTrack
