"""The two times no version of a kernel can beat: its bytes over the bandwidth, its instructions over the issue rate."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Floor:
    """What one launch cannot avoid (modelled).

    ``bytes_read`` and ``bytes_written``: each input read once, each output written once, in device memory.
    ``lane_instructions``: instructions per lane summed over lanes, counted on the best inner loop known for
    the method in use (decode, convert, multiply, accumulate); addressing and reduction are left out.
    """

    bytes_read: int
    bytes_written: int
    lane_instructions: int

    @property
    def bytes_moved(self) -> int:
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written

    def memory_us(self, bandwidth: float) -> float:
        """Return the memory time in µs at ``bandwidth`` bytes per second."""
        return self.bytes_moved / bandwidth * 1e6

    def issue_us(self, sms: int, clock_hz: float) -> float:
        """Return the issue time in µs: each SM issues four warp instructions, 128 lanes, a cycle."""
        return self.lane_instructions / (128.0 * sms * clock_hz) * 1e6
