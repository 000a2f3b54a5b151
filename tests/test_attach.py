"""A server watched from outside: stand-ins for NVML, the sampler and the server's metrics."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from workbench import attach as attach_module
from workbench.attach import Options, attach
from workbench.cli import app
from workbench.diagnose.attached import Attached, attached
from workbench.engines.gpus import Gpu, choose
from workbench.engines.metrics import Snapshot
from workbench.errors import InputError, UnfitError
from workbench.ingest.byte_model import Model
from workbench.probes.protocol import Capture, Missing
from workbench.trace.bundle import Bundle

H200 = Gpu(0, "GPU-1", "NVIDIA H200", 100 << 30, (41, 42))
STEP_NS = 3_400_000


class Sampler:
    """A sampler that saw ``busy`` of each step at 1.6 TB/s, and nothing in the rest."""

    name = "pm_sampler"
    busy = 0.66
    missing: Missing | None = None
    instances: list["Sampler"] = []  # noqa: RUF012

    def __init__(self, uuid: str = "", **settings: Any) -> None:
        self.settings = {"uuid": uuid, **settings}
        self.instances.append(self)

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def available(self) -> Missing | None:
        return self.missing

    def start(self) -> None:
        self.begin = time.perf_counter_ns()

    def annotate(self, _: str) -> Any:
        return nullcontext()

    def stop(self) -> Capture:
        start = self.begin + np.arange(20_000, dtype=np.int64) * 10_000
        random = np.random.default_rng(1)
        moving = (start - self.begin) % STEP_NS < self.busy * STEP_NS
        value = np.where(moving, 16e6 * (1 + 0.2 * random.standard_normal(20_000)), 0.0)

        def rows(name: str, unit: str, values: Any) -> dict[str, Any]:
            return {"name": [name] * 20_000, "unit": [unit] * 20_000, "value": values}

        both = [rows("dram_read_bytes", "B", value), rows("sm_active", "share", np.where(moving, 0.5, 0.0))]
        table = pa.table(
            {
                "source": ["pm_sampler"] * 40_000,
                "device": pa.array([0] * 40_000, pa.int32()),
                "start_ns": np.tile(start, 2),
                "end_ns": np.tile(start + 10_000, 2),
                **{key: np.concatenate([np.asarray(one[key]) for one in both]) for key in ("name", "unit", "value")},
            }
        )
        return Capture({}, offset_ns=5, residual_ns=300, columns={"counters": table})


class Nvml(Sampler):
    """NVML that cannot be read."""

    name = "nvml"
    missing = Missing("nvml", "clocks", "no permission", fix="ask")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the instruments; ``metrics`` is called for each reading."""

    def install(metrics: Callable[[], Snapshot] | None = None) -> None:
        import workbench.probes.nvml
        import workbench.probes.pm_sampler

        monkeypatch.setattr(workbench.probes.pm_sampler, "PmSampler", Sampler)
        monkeypatch.setattr(workbench.probes.nvml, "NvmlProbe", Nvml)
        monkeypatch.setattr(attach_module, "gpus", lambda: (H200,))
        monkeypatch.setattr(attach_module, "POLL_S", 0.05)
        monkeypatch.setattr(attach_module, "server_info", lambda _: {"version": "0.5.17", "api_key": "secret"})
        if metrics:
            monkeypatch.setattr(attach_module, "read_metrics", lambda _: metrics())

    return install


def seen(folder: Path) -> Attached:
    with Bundle.open(folder) as bundle:
        return attached(bundle)


def sglang(per_step: float = 1.0, eager: float = 0.0) -> Callable[[], Snapshot]:
    """Metrics of an engine whose steps take STEP_NS and commit ``per_step`` tokens."""

    def read() -> Snapshot:
        now = time.perf_counter_ns()
        steps = now / STEP_NS
        return Snapshot(
            now, "sglang", steps * per_step, 1.0, steps * (1 - eager), steps * eager, accept_length=per_step
        )

    return read


def test_share_of_the_roof_bytes_a_step_and_idle_time(stand_ins: Callable[..., None], tmp_path: Path) -> None:
    stand_ins(sglang())
    options = Options(seconds=0.3, model=Model("gpt-oss-20b"), context=500)
    found = seen(attach(tmp_path / "b", gpu=0, url="http://127.0.0.1:1/", options=options))
    assert found.traffic is not None
    assert found.traffic.value == pytest.approx(1600 * 0.66, rel=0.02)
    assert found.idle is not None
    assert found.idle.value == pytest.approx(0.34, abs=0.01)
    assert found.step is not None
    assert (found.step.value, found.step.tag) == (pytest.approx(3.4, rel=0.01), "measured")
    assert found.tok_s is not None
    assert found.tok_s.value == pytest.approx(1e9 / STEP_NS, rel=0.01)
    assert found.bytes_per_step is not None
    assert found.bytes_per_step.value == pytest.approx(1600 * 0.66 * 3.4e6, rel=0.03)
    assert found.roof_share is not None
    assert found.roof_share.value == pytest.approx(1056 / 4800, rel=0.02)
    assert found.model_bytes is not None
    assert found.model_bytes.value == pytest.approx(3.73e9, rel=0.01)
    assert [finding.id for finding in found.findings] == ["device-idle", "slow-kernels"] or [
        finding.id for finding in found.findings
    ] == ["slow-kernels", "device-idle"]
    assert "of the roof (datasheet)" in found.headline()
    assert "nothing moves" in found.headline()
    with Bundle.open(tmp_path / "b") as bundle:
        env = {row["key"]: row["value"] for row in bundle.table("env").to_pylist()}
        assert env == {"server.version": "0.5.17"}  # and no key
        limits = {row["instrument"]: row["why"] for row in bundle.table("limits").to_pylist()}
        assert limits["nvml"] == "no permission"
        assert bundle.manifest.source == "attach"
        assert len(bundle.manifest.variants[0].settings["attach"]["bursts"]) == 1
        assert bundle.manifest.variants[0].settings["model"]["experts"] == 32
        assert {source.name for source in bundle.manifest.clock.sources} == {"pm_sampler"}  # one a burst
    assert Sampler.instances[-2].settings["uuid"] == "GPU-1"


def test_without_a_server_the_step_is_estimated_from_the_traffic(
    stand_ins: Callable[..., None], tmp_path: Path
) -> None:
    stand_ins()
    found = seen(attach(tmp_path / "b", pid=None, gpu=0, options=Options(seconds=0.2)))
    assert found.tok_s is None
    assert found.step is not None
    assert (found.step.value, found.step.tag) == (pytest.approx(3.4, rel=0.01), "estimated")
    assert found.bytes_per_step is not None
    assert found.bytes_per_step.tag == "estimated"
    assert any("--url" in row["fix"] for row in found.limits)


def test_expanded_weights_and_eager_forwards_are_found(stand_ins: Callable[..., None], tmp_path: Path) -> None:
    stand_ins(sglang(eager=0.5))
    options = Options(seconds=0.3, model=Model("qwen3-30b-a3b", 1, "mxfp4-experts"))
    found = seen(attach(tmp_path / "b", gpu=0, url="http://127.0.0.1:1", options=options))
    ids = {finding.id for finding in found.findings}
    assert "graph-off" in ids
    # 3.59 GB read, 3.4 GB modelled: within the margin
    assert "over-fetch" not in ids
    assert found.eager_share is not None
    assert found.eager_share.value == pytest.approx(0.5, abs=0.01)


def test_metrics_that_vanish_cost_the_rest_of_them_only(stand_ins: Callable[..., None], tmp_path: Path) -> None:
    left = [3]
    good = sglang()

    def read() -> Snapshot:
        left[0] -= 1
        if left[0] < 0:
            raise UnfitError("http://x/metrics: cannot be reached", hint="is the server running?")
        return good()

    stand_ins(read)
    found = seen(attach(tmp_path / "b", gpu=0, url="http://127.0.0.1:1", options=Options(seconds=1.0)))
    assert found.tok_s is not None
    assert any(row["what"] == "metrics of part of the window" for row in found.limits)


def test_the_gpu_is_chosen_by_number_process_or_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    other = Gpu(1, "GPU-2", "NVIDIA H200", 1 << 30, (os.getpid(),))
    assert choose((H200, other), index=1, pid=None) is other
    assert choose((H200, other), index=None, pid=os.getpid()) is other
    assert choose((H200, other), index=None, pid=None) is H200
    with pytest.raises(InputError, match="there are 2 GPUs"):
        choose((H200, other), index=2, pid=None)
    with pytest.raises(InputError, match="holds no memory on any GPU"):
        choose((H200,), index=None, pid=os.getpid())
    with pytest.raises(UnfitError, match="no NVIDIA GPU"):
        choose((), index=None, pid=None)


def test_the_verb(stand_ins: Callable[..., None], tmp_path: Path) -> None:
    stand_ins(sglang())
    run = CliRunner().invoke(
        app, ["attach", "--gpu", "0", "--url", "http://127.0.0.1:1", "--seconds", "0.3", "-o", str(tmp_path / "b")]
    )
    assert run.exit_code == 0, run.output
    assert "of the roof (datasheet)" in run.output
    assert "not measured:" in run.output
    assert CliRunner().invoke(app, ["attach"]).exit_code == 2
    assert CliRunner().invoke(app, ["attach", "--gpu", "0", "--seconds", "0"]).exit_code == 2
    again = CliRunner().invoke(app, ["attach", "--gpu", "0", "-o", str(tmp_path / "b")])
    assert again.exit_code == 2
