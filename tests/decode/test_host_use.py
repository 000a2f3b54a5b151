"""What the scheduler says of the decoding thread: sleeping, computing and waiting for a CPU are told apart."""

import time
from pathlib import Path

import pytest

from workbench.decode.host_use import SCHEDSTAT, HostMeter, HostUse, Reading


def test_sleeping_takes_no_cpu_and_is_the_threads_own_choice() -> None:
    with HostMeter() as meter:
        before = meter.read()
        time.sleep(0.02)
        used = meter.read().since(before, 20_000_000)
    assert used.cpu_ns < 10_000_000
    assert used.sleeps is None or used.sleeps >= 1


def test_computing_takes_cpu() -> None:
    with HostMeter() as meter:
        before = meter.read()
        end = time.thread_time_ns() + 5_000_000
        while time.thread_time_ns() < end:
            pass
        after = meter.read()
        used = after.since(before, after.at_ns - before.at_ns)
    assert used.cpu_ns >= 5_000_000
    assert used.process_cpu_ns >= used.cpu_ns - 1_000_000


@pytest.mark.skipif(not Path(SCHEDSTAT).exists(), reason="this system does not say how long threads wait for a CPU")
def test_waits_for_a_cpu_are_read_and_the_file_is_closed() -> None:
    meter = HostMeter()
    with meter:
        assert meter.read().use.ready_ns is not None
    assert meter.read().use.ready_ns is None


def test_a_wait_between_the_reading_and_the_mark_is_not_the_steps() -> None:
    before = Reading(0, HostUse(0, 0, 0, 0))
    after = Reading(10_000, HostUse(4_000, 4_000, 6_000, 0))
    assert after.since(before, 10_000).ready_ns == 6_000
    assert after.since(before, 5_000).ready_ns == 1_000
    assert after.since(before, 1_000).ready_ns == 0
    assert Reading(9, HostUse(1, 1, None, None)).since(before, 9) == HostUse(1, 1, None, None)
