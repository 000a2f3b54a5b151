"""Bytes saved against accept length lost: what a lower precision is worth in tok/s once acceptance is counted.

Public cases: activation quantisation took GLM-5.2's accept length from 7.13 to 4.47 (Sionic); an NVFP4 target took
another's from 5.37 to 5.19 and still won, 305 to 350 tok/s (vllm#41745).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Side:
    """One precision: accept length (bonus included), step time in ms, and bytes read a step where they are known."""

    accept_length: float
    step_ms: float
    bytes_per_step: float | None = None

    @property
    def tok_s(self) -> float:
        """Tokens per second."""
        return 1e3 * self.accept_length / self.step_ms


@dataclass(frozen=True, slots=True)
class Trade:
    """``quantised`` against ``reference``. Ratios are quantised over reference."""

    reference: Side
    quantised: Side

    @property
    def accept_ratio(self) -> float:
        """What acceptance alone does to tok/s."""
        return self.quantised.accept_length / self.reference.accept_length

    @property
    def speed_ratio(self) -> float:
        """What the step time alone does to tok/s."""
        return self.reference.step_ms / self.quantised.step_ms

    @property
    def net_ratio(self) -> float:
        """Tok/s over the reference's."""
        return self.accept_ratio * self.speed_ratio

    @property
    def break_even(self) -> float:
        """The accept length at which the quantised step gives the reference's tok/s."""
        return self.reference.accept_length / self.speed_ratio

    @property
    def bytes_saved(self) -> float | None:
        """Share of the bytes a step no longer reads; None where either side's are not known."""
        if not self.reference.bytes_per_step or self.quantised.bytes_per_step is None:
            return None
        return 1 - self.quantised.bytes_per_step / self.reference.bytes_per_step

    @property
    def lost_tok_s(self) -> float:
        """Tok/s that the quantised variant would have on top, had it kept the reference's acceptance."""
        return self.quantised.tok_s * (1 / self.accept_ratio - 1)


def trade_of_bytes(reference: Side, accept_length: float, bytes_per_step: float) -> Trade:
    """Return the trade of a precision not yet run: its step time goes with its bytes. At best: a step has other parts.

    Raises ValueError where the reference's bytes are not known.
    """
    if not reference.bytes_per_step:
        raise ValueError("the reference's bytes per step are needed")
    step_ms = reference.step_ms * bytes_per_step / reference.bytes_per_step
    return Trade(reference, Side(accept_length, step_ms, bytes_per_step))
