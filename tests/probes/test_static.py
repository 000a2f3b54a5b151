import sys
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from workbench.probes import static
from workbench.probes.static import StaticProbe, nvrtc_rows, triton_rows
from workbench.trace.rows import from_rows

LAUNCHES = {
    "kind": ["kernel", "kernel", "kernel", "memcpy", "kernel"],
    "name": ["nvjet", "nvjet", "decode_step", "Memcpy HtoD", "own_triton"],
    "registers": [168, 168, 128, None, 64],
    "shared_bytes": [200_000, 200_000, 220_000, None, 0],
    "block_x": [384, 384, 512, None, 128],
    "block_y": [1, 1, 1, None, 1],
    "block_z": [1, 1, 1, None, 1],
}


def compiled(name: str = "own_triton", *, registers: int = 64, spills: int = 0) -> Any:
    target = SimpleNamespace(arch=90)
    metadata = SimpleNamespace(name=name, target=target, shared=1024, num_warps=4)
    return SimpleNamespace(metadata=metadata, n_regs=registers, n_spills=spills, n_max_threads=1024)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> StaticProbe:
    pytest.importorskip("triton")
    import triton.runtime.jit  # noqa: F401

    monkeypatch.setattr(static, "_compiled", lambda: [compiled(), compiled()])
    monkeypatch.setattr(static, "nvrtc_rows", lambda capability, shapes: iter(()))
    return StaticProbe(90)


def test_own_kernels_by_their_binaries_and_libraries_by_their_launches(probe: StaticProbe) -> None:
    assert probe.available() is None
    probe.start()
    probe.see(pa.table(LAUNCHES))
    probe.see(pa.table(LAUNCHES))
    capture = probe.stop()
    rows = {row["kernel"]: row for row in capture.tables["static"]}
    assert len(capture.tables["static"]) == len(rows) == 3
    own = rows["own_triton"]
    assert (own["target"], own["registers"], own["spill_store_bytes"], own["spill_load_bytes"]) == ("sm_90a", 64, 0, 0)
    assert (own["occupancy_limit"], own["limiter"]) == (0.5, "registers")
    library = rows["nvjet"]
    assert "spill_store_bytes" not in library
    assert library["limiter"] == "registers and shared memory"  # 12 warps of 168 registers: one CTA by either
    assert library["occupancy_limit"] == 12 / 64
    assert from_rows("static", [{"variant": None, **row} for row in capture.tables["static"]]).num_rows == 3
    assert "spills of library kernels" in {missing.what for missing in capture.missing}


def test_local_memory_without_the_assembler_s_word_is_no_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import triton.runtime.jit  # noqa: F401

    from workbench.lint import spills

    monkeypatch.setattr(static, "_compiled", lambda: [compiled(spills=6)])
    for said, stores, loads in ((None, None, None), ((20, 28), 20, 28)):
        monkeypatch.setattr(spills, "spill_bytes", lambda kernel, registers, stack, said=said: said)
        (row,) = triton_rows(90)
        assert (row["local_bytes"], row["spill_store_bytes"], row["spill_load_bytes"]) == (24, stores, loads)


def test_cubins_of_nvrtc_that_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def __init__(self) -> None:
            self.cubin = SimpleNamespace(
                kernel="decode_step",
                arch="sm_90a",
                registers=128,
                spill_bytes=8,
                stack_bytes=16,
                smem_bytes=1024,
                log="ptxas info: 16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads",
            )
            self.smem_bytes = 200_000

    monkeypatch.setitem(sys.modules, "workbench.kernels.nvrtc", SimpleNamespace(Kernel=Kernel))
    held = Kernel()
    (row,) = nvrtc_rows(90, {})
    assert "limiter" not in row  # the block is not known
    shapes = {launch.name: launch for launch in static.launched(pa.table(LAUNCHES))}
    (row,) = nvrtc_rows(90, shapes)
    assert row["kernel"] == held.cubin.kernel
    assert (row["spill_store_bytes"], row["spill_load_bytes"], row["local_bytes"]) == (8, 12, 16)
    assert (row["occupancy_limit"], row["limiter"]) == (0.25, "registers and shared memory")
    assert row["shared_bytes"] == 201_024


def test_an_unknown_device_is_said() -> None:
    missing = StaticProbe(75).available()
    assert missing is not None
    assert "7.5" in missing.why


def test_kernels_of_this_process_are_found_in_triton_s_own_caches() -> None:
    """The walk over live objects must survive whatever the process holds."""
    pytest.importorskip("triton")
    import triton.runtime.jit  # noqa: F401

    assert [kernel for kernel in static._compiled() if not isinstance(kernel.n_regs, int)] == []
