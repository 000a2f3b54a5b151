"""What the decode loop is asked for and what it says of its steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from workbench.decode.host_use import HostUse

Annotate = Callable[[str], AbstractContextManager[object]]
"""Opens a named span for an instrument; the default opens nothing."""


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """How tokens are chosen: ``temperature`` 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decode step. Times are monotonic nanoseconds; counts are tokens.

    Drafting is [start, draft_end), the verify forward [draft_end, forward_end), acceptance and commit
    [forward_end, end). In a loop that runs ahead (ahead.py) a step starts where the one before it ended, drafting
    includes the device's wait for the host, and the forward includes acceptance. ``context``: cached tokens before the
    step. ``width``: tokens scored. ``experts``: distinct routed experts per MoE layer. ``host``: what the decoding
    thread used, read just before and just after the step; running ahead: from report to report.
    """

    start_ns: int
    draft_end_ns: int
    forward_end_ns: int
    end_ns: int
    context: int
    width: int
    drafted: int
    accepted: int
    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    host: HostUse | None = None


@dataclass(slots=True)
class SequenceRecord:
    """One generated sequence: prefill times, new tokens, why it ended."""

    prompt_tokens: int
    prefill_start_ns: int = 0
    prefill_end_ns: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: str = "aborted"
