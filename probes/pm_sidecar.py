"""The counter sampler's own process: it reads a GPU's counters over time while other processes use that GPU.

    PYTHON -P pm_sidecar.py --device GPU-… --spool FOLDER [--interval-ns 10000] [--buffer-bytes N]

A program by itself: it imports the standard library, numpy and cupti-python 13.4, nothing of the project, because torch
ships another libcupti and the two cannot share a process. It launches no kernel. The first line on stdin is the plan
(see ``counter_sets.plan``), then ``start``, ``stop`` and ``quit``, one a line. Each answer is one line of JSON on
stdout with an ``event``: ready, empty (the set was accepted but counts nothing), started, stopped, failed (``why``,
``fix``). After ``failed`` or ``empty`` the process ends: CUPTI set up twice in one process can crash.

Samples go to FOLDER as they are decoded: ``times.i64`` (rows of start, end) and ``values.f64`` (rows of the readings'
raw values), little-endian, CUPTI's nanoseconds. The last line of ``stopped`` says how many are valid.
"""

import argparse
import ctypes
import json
import os
import select
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

CHUNK_SAMPLES = 2048
"""Samples per decoded image; CUPTI needs about 18 KiB for each."""

DRAIN_SECONDS = 0.005
SELF_TEST_SECONDS = 0.03
EVALUATORS = 4
ANCHOR_TRIES = 9
ANCHOR_SECONDS = 0.25
OVERFLOWS = 3
"""Decodes in a row that report a full buffer before sampling is given up."""

OUT_OF_MEMORY = 8  # CUPTI_ERROR_OUT_OF_MEMORY: from decode it means the hardware buffer is full
COUNTER_DATA_FULL = 1
MAX_THREADS_PER_SM = 39  # CUdevice_attribute
SM_COUNT = 16

_WRONG_CUPTI = "workbench doctor --install-sampler"


class Refusal(Exception):  # noqa: N818 - an answer, not a fault of this program
    """Something that cannot be done here: why, and what would help."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix


class Unfit(Refusal):
    """Counters that cannot be taken together, though each can be: fewer of them may do."""


class _Params(ctypes.Structure):
    """CUPTI's parameter blocks begin alike, and their size is counted to the end of the last member, unpadded."""

    def __init__(self, **members: Any) -> None:
        super().__init__(**members)
        last = type(self)._fields_[-1][0]
        member = getattr(type(self), last)
        self.struct_size = member.offset + member.size


def _params(name: str, *members: tuple[str, Any]) -> type[_Params]:
    return type(name, (_Params,), {"_fields_": [("struct_size", ctypes.c_size_t), ("priv", ctypes.c_void_p), *members]})


_SAMPLING = ("sampling", ctypes.c_void_p)
_IMAGE = (("image", ctypes.c_void_p), ("image_size", ctypes.c_size_t))

_DataSize = _params(
    "_DataSize",
    _SAMPLING,
    ("names", ctypes.c_void_p),
    ("count", ctypes.c_size_t),
    ("max_samples", ctypes.c_uint32),
    ("data_size", ctypes.c_size_t),
)
_Initialize = _params("_Initialize", _SAMPLING, ("data_size", ctypes.c_size_t), ("image", ctypes.c_void_p))
_Decode = _params("_Decode", _SAMPLING, *_IMAGE, ("stop_reason", ctypes.c_int), ("overflow", ctypes.c_uint8))
_Info = _params(
    "_Info",
    *_IMAGE,
    ("total", ctypes.c_size_t),
    ("populated", ctypes.c_size_t),
    ("completed", ctypes.c_size_t),
)
_SampleInfo = _params(
    "_SampleInfo",
    _SAMPLING,
    *_IMAGE,
    ("index", ctypes.c_size_t),
    ("start", ctypes.c_uint64),
    ("end", ctypes.c_uint64),
)
_Evaluate = _params(
    "_Evaluate",
    ("host", ctypes.c_void_p),
    *_IMAGE,
    ("index", ctypes.c_size_t),
    ("names", ctypes.c_void_p),
    ("count", ctypes.c_size_t),
    ("values", ctypes.c_void_p),
)


class Gpu:
    """A device found by UUID, with a primary context held for as long as this process lives.

    Without a current context, CUPTI's first profiler call ends in a segmentation fault.
    """

    def __init__(self, uuid: str) -> None:
        self._cuda = _library("libcuda.so.1", "no NVIDIA driver here: libcuda.so.1", "run where the driver is")
        self.cupti = _library("libcupti.so.13", "CUPTI 13 is not there: libcupti.so.13", _WRONG_CUPTI)
        self._call("cuInit", 0)
        self.uuid = uuid
        self.index, self._device = self._find(uuid)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._cuda, name)(*arguments):
            raise Refusal(f"{name} failed with CUDA error {status}", "look at nvidia-smi: the driver is not usable")

    def _find(self, uuid: str) -> tuple[int, ctypes.c_int]:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        found = []
        for index in range(count.value):
            device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            self._call("cuDeviceGet", ctypes.byref(device), index)
            self._call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
            found.append(format_uuid(bytes(raw)))
            if found[-1] == uuid:
                return index, device
        raise Refusal(f"no GPU {uuid} here: CUDA lists {', '.join(found) or 'none'}", "name one of those")

    def attribute(self, which: int) -> int:
        """Return a CUdevice_attribute."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value

    def name(self) -> str:
        """Return the device's name."""
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode()


def _library(name: str, why: str, fix: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise Refusal(f"{why} ({error})", fix) from None


def format_uuid(raw: bytes) -> str:
    """Return a device UUID of 16 bytes as NVML writes it."""
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class Plan:
    """Which metric to take for each reading, so that all fit one pass on this chip."""

    def __init__(self, wanted: dict[str, Any], chip: str) -> None:
        from cupti import profiler_host

        self._host = profiler_host
        self._chip = chip
        self.vendor_set = self._vendor_set(wanted["vendor_set"])
        self.metrics: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        readings = wanted["readings"]
        first = [reading["metrics"][0] for reading in readings]
        if not self._problem(first):
            self.metrics = {reading["name"]: metric for reading, metric in zip(readings, first, strict=True)}
            return
        for reading in readings:
            problems = []
            for metric in reading["metrics"]:
                problem = self._problem([*self.metrics.values(), metric])
                if not problem:
                    self.metrics[reading["name"]] = metric
                    break
                problems.append(f"{metric}: {problem}")
            else:
                self.refused[reading["name"]] = "; ".join(problems)

    def _vendor_set(self, part: str) -> str | None:
        if not part:
            return None
        sets = self._host.get_single_pass_sets(self._chip)
        found = [name for name in sets if part.lower() in name.lower()]
        if not found:
            raise Refusal(f"{self._chip} has no single-pass set like {part}: {', '.join(sets) or 'none at all'}")
        return str(found[0])

    def _problem(self, metrics: list[str]) -> str:
        """Return why ``metrics`` cannot be sampled together; empty where they can."""
        from cupti.cupti import cuptiError

        host = self._host.ProfilerHost(
            self._chip, self._host.ProfilerType.PM_SAMPLING, single_pass_metric_set_name=self.vendor_set
        )
        host.initialize()
        try:
            passes = self._host.get_num_of_passes(host.create_config_image(metrics=metrics))
        except ValueError:
            return f"not a metric of {self._chip}"
        except cuptiError as error:
            return f"CUPTI refuses: {error}"
        finally:
            host.deinitialize()
        return "" if passes == 1 else f"needs {passes} passes beside the others"


class Decoder:
    """Turns hardware records into rows, fast enough to keep up: the binding's own loop builds objects for each sample.

    Evaluation is shared among threads, each with a host object of its own; the calls release Python's lock.
    """

    def __init__(
        self, cupti: ctypes.CDLL, sampling: int, chip: str, metrics: list[str], workers: int, interval_ns: int
    ) -> None:
        from cupti import profiler_host

        self._cupti = cupti
        self._sampling = sampling
        self._names = (ctypes.c_char_p * len(metrics))(*[metric.encode() for metric in metrics])
        self._count = len(metrics)
        size = _DataSize(
            sampling=sampling, names=ctypes.addressof(self._names), count=self._count, max_samples=CHUNK_SAMPLES
        )
        self._check("cuptiPmSamplingGetCounterDataSize", size)
        self._image: npt.NDArray[np.uint8] = np.zeros(size.data_size, np.uint8)
        self._hosts = []
        for _ in range(workers):
            host = profiler_host.ProfilerHost(chip, profiler_host.ProfilerType.PM_SAMPLING)
            host.initialize()
            self._hosts.append(host)
        self._pool = ThreadPoolExecutor(workers)
        self._interval_ns = interval_ns
        self.restart()

    def restart(self) -> None:
        """A capture begins: nothing of an earlier one says when its samples were."""
        self._seen = 0
        self._last_end = 0
        self.counted = 0

    def _check(self, name: str, block: Any) -> None:
        if status := getattr(self._cupti, name)(ctypes.byref(block)):
            raise Refusal(f"{name} failed with CUPTI error {status}")

    def decode(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], bool, bool]:
        """Return (times, values, more, overflow): shapes (n, 2) and (n, readings); more: records are still waiting."""
        image = {"image": self._image.ctypes.data, "image_size": len(self._image)}
        fresh = _Initialize(sampling=self._sampling, data_size=len(self._image), image=self._image.ctypes.data)
        self._check("cuptiPmSamplingCounterDataImageInitialize", fresh)
        block = _Decode(sampling=self._sampling, **image)
        status = self._cupti.cuptiPmSamplingDecodeData(ctypes.byref(block))
        if status and status != OUT_OF_MEMORY:
            raise Refusal(f"cuptiPmSamplingDecodeData failed with CUPTI error {status}")
        info = _Info(**image)
        self._check("cuptiPmSamplingGetCounterDataInfo", info)
        count = int(info.completed)
        values = np.empty((count, self._count), np.float64)
        shares = np.linspace(0, count, len(self._hosts) + 1).astype(int).tolist()
        parts = zip(self._hosts, shares, shares[1:], strict=False)
        done = [self._pool.submit(self._evaluate, host, image, values, *part) for host, *part in parts]
        times = self._times(image, count)
        for part in done:
            part.result()
        overflow = bool(status == OUT_OF_MEMORY or block.overflow)
        return times, values, block.stop_reason == COUNTER_DATA_FULL and count > 0, overflow

    def _times(self, image: dict[str, int], count: int) -> npt.NDArray[np.int64]:
        times = np.empty((count, 2), np.int64)
        block = _SampleInfo(sampling=self._sampling, **image)
        pointer, call = ctypes.byref(block), self._cupti.cuptiPmSamplingCounterDataGetSampleInfo
        for index in range(count):
            block.index = index
            if status := call(pointer):
                raise Refusal(f"cuptiPmSamplingCounterDataGetSampleInfo failed with CUPTI error {status}")
            times[index] = min(block.start, 1 << 62), min(block.end, 1 << 62)
        self._count_on(times)
        self._seen += count
        return times

    def _count_on(self, times: npt.NDArray[np.int64]) -> None:
        """Give times to samples that come without: CUPTI 13.4 knows those of a capture's first image alone.

        The samples themselves are complete and in order, and the GPU's timer spaces them by the interval exactly (seen:
        9,983 and 10,017 ns by turns for 10,000), so each begins where the one before ended. Lost records would shift
        what follows; a full buffer is reported for that.
        """
        bare = np.flatnonzero(times[:, 1] == 0)
        if not len(bare) or not self._seen:
            self._last_end = int(times[-1, 1]) if len(times) else self._last_end
            return
        steps = np.arange(1, len(bare) + 1, dtype=np.int64) * self._interval_ns
        before = int(times[bare[0] - 1, 1]) if bare[0] else self._last_end
        times[bare, 0] = before + steps - self._interval_ns
        times[bare, 1] = before + steps
        self.counted += len(bare)
        self._last_end = int(times[-1, 1])

    def _evaluate(self, host: Any, image: dict[str, int], values: npt.NDArray[Any], first: int, last: int) -> None:
        names = ctypes.addressof(self._names)
        block = _Evaluate(host=host._p_host_object, names=names, count=self._count, **image)
        pointer, call = ctypes.byref(block), self._cupti.cuptiProfilerHostEvaluateToGpuValues
        start, stride = values.ctypes.data, values.strides[0]
        for index in range(first, last):
            block.index, block.values = index, start + index * stride
            if status := call(pointer):
                raise Refusal(f"cuptiProfilerHostEvaluateToGpuValues failed with CUPTI error {status}")


class Sampler:
    """One configured counter set on one GPU."""

    def __init__(self, gpu: Gpu, wanted: dict[str, Any], interval_ns: int, buffer_bytes: int) -> None:
        try:
            from cupti import pm_sampling
            from cupti.cupti import cuptiError
        except ImportError as error:
            raise Refusal(f"cupti-python cannot be imported: {error}", _WRONG_CUPTI) from None
        self._failed = cuptiError
        self.collector = pm_sampling.Collector(gpu.index)
        try:
            self.collector.enable()
        except PermissionError:
            raise Refusal(
                "counters are for administrators only here (ERR_NVGPUCTRPERM)",
                "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or run with CAP_SYS_ADMIN",
            ) from None
        except RuntimeError as error:
            raise Refusal(str(error), "end the other profiler that samples this GPU (ncu, nsys, DCGM)") from None
        except cuptiError as error:
            raise Refusal(f"CUPTI cannot sample this GPU: {error}", "a MIG slice or a vGPU cannot be sampled") from None
        self.chip = str(getattr(self.collector, "_chip_name", ""))
        sampling = getattr(self.collector, "_pm_sampling_object", None)
        if not self.chip or not isinstance(sampling, int):
            raise Refusal("this cupti-python is laid out otherwise than 13.4.0", _WRONG_CUPTI)
        self.plan = Plan(wanted, self.chip)
        if not self.plan.metrics:
            raise Refusal(f"no metric of the set fits one pass on {self.chip}: {self.plan.refused}")
        metrics = list(self.plan.metrics.values())
        try:
            self.collector.configure(
                metrics=metrics,
                hardware_buffer_size=buffer_bytes,
                sampling_interval=interval_ns,
                single_pass_metric_set_name=self.plan.vendor_set,
            )
        except (ValueError, cuptiError) as error:
            raise Unfit(f"CUPTI refuses the set: {error}", "a longer interval or a smaller set") from None
        workers = max(1, min(EVALUATORS, (os.cpu_count() or 1) - 1))
        self.decoder = Decoder(gpu.cupti, sampling, self.chip, metrics, workers, interval_ns)

    def self_test(self) -> tuple[int, float]:
        """Return the samples of a short capture and the seconds it took to decode them."""
        self.decoder.restart()
        self.collector.start()
        time.sleep(SELF_TEST_SECONDS)
        self.collector.stop()
        before, count, more = time.perf_counter(), 0, True
        while more:
            times, _, more, _ = self.decoder.decode()
            count += len(times)
        return count, time.perf_counter() - before

    def stop(self) -> None:
        """Stop sampling. A full buffer may have stopped it already, which is then reported with the samples."""
        with suppress(RuntimeError, self._failed):
            self.collector.stop()

    def anchors(self) -> dict[str, list[list[int]]]:
        """Return, per clock that samples may be on, rows of [its reading, our clock before, our clock after]."""
        from cupti import cupti

        found = {"unix": _brackets(time.time_ns)}
        with suppress(self._failed):  # the Unix clock is left; the parent checks that samples fall inside the capture
            found["cupti"] = _brackets(cupti.get_timestamp)
        return found


def _brackets(read: Any) -> list[list[int]]:
    brackets = []
    for _ in range(ANCHOR_TRIES):
        before = time.perf_counter_ns()
        value = int(read())
        brackets.append([value, before, time.perf_counter_ns()])
    return brackets


class Capture:
    """Samples between ``start`` and ``stop``, written as they come."""

    def __init__(self, sampler: Sampler, folder: Path) -> None:
        self._sampler = sampler
        self._files: list[BinaryIO] = [(folder / name).open("wb") for name in ("times.i64", "values.f64")]
        self.anchors = [sampler.anchors()]
        self._anchored = time.monotonic()
        self.samples = 0
        self.overflows: list[dict[str, int]] = []
        self._in_a_row = 0
        self.failure = ""
        self.decode_s = 0.0
        sampler.decoder.restart()
        sampler.collector.start()

    def drain(self) -> bool:
        """Decode what waits, one image at most; tell whether there is more. What was decoded outlives a failure."""
        if self.failure:
            return False
        before = time.perf_counter()
        try:
            times, values, more, overflow = self._sampler.decoder.decode()
        except Refusal as refusal:
            self.failure = refusal.why
            return False
        self.decode_s += time.perf_counter() - before
        self._files[0].write(times.astype("<i8", copy=False).tobytes())
        self._files[1].write(values.astype("<f8", copy=False).tobytes())
        self.samples += len(times)
        self._in_a_row = self._in_a_row + 1 if overflow else 0
        if overflow:
            self.overflows.append({"seen_ns": time.perf_counter_ns(), "after_samples": self.samples})
            if self._in_a_row >= OVERFLOWS:
                self.failure = "the hardware buffer stayed full"
        if time.monotonic() - self._anchored > ANCHOR_SECONDS:
            self._anchored = time.monotonic()
            self.anchors.append(self._sampler.anchors())
        return more

    def stop(self) -> dict[str, Any]:
        """Stop sampling, decode the rest and say what there is."""
        self._sampler.stop()
        self.anchors.append(self._sampler.anchors())
        while self.drain():
            pass
        for file in self._files:
            file.close()
        return {
            "samples": self.samples,
            "anchors": self.anchors,
            "overflows": self.overflows,
            "failure": self.failure,
            "decode_s": round(self.decode_s, 6),
            "counted": self._sampler.decoder.counted,
        }


def say(event: str, **fields: Any) -> None:
    """Answer with one line."""
    print(json.dumps({"event": event, **fields}), flush=True)


class Lines:
    """Lines of stdin, with a time limit for waiting: the descriptor itself is read, since a buffer would hide lines."""

    def __init__(self) -> None:
        self._kept = b""
        self._ended = False

    def next(self, timeout: float | None) -> str | None:
        """Return the next line, None where none came in ``timeout`` seconds, ``quit`` at the end."""
        while b"\n" not in self._kept:
            if self._ended:
                return "quit"
            if not select.select([0], [], [], timeout)[0]:
                return None
            read = os.read(0, 65536)
            self._ended = not read
            self._kept += read
        line, _, self._kept = self._kept.partition(b"\n")
        return line.decode().strip()


def serve(options: argparse.Namespace) -> None:
    """Set up and obey."""
    lines = Lines()
    wanted = json.loads(lines.next(None) or "{}")
    if "readings" not in wanted:
        return
    gpu = Gpu(options.device)
    try:
        sampler = Sampler(gpu, wanted, options.interval_ns, options.buffer_bytes)
    except Unfit as unfit:
        say("empty", set=wanted["set"], why=unfit.why)
        return
    tested, decode_s = sampler.self_test()
    facts = {
        "set": wanted["set"],
        "vendor_set": sampler.plan.vendor_set or "",
        "metrics": sampler.plan.metrics,
        "refused": sampler.plan.refused,
        "interval_ns": options.interval_ns,
        "self_test_samples": tested,
        "self_test_decode_s": round(decode_s, 6),
        "device": {
            "uuid": gpu.uuid,
            "index": gpu.index,
            "name": gpu.name(),
            "chip": sampler.chip,
            "sms": gpu.attribute(SM_COUNT),
            "warps_per_sm": gpu.attribute(MAX_THREADS_PER_SM) // 32,
        },
    }
    if tested < 2:
        say("empty", **facts)
        return
    say("ready", **facts)
    capture: Capture | None = None
    more = False
    while True:
        line = lines.next(None if capture is None else 0 if more else DRAIN_SECONDS)
        if line == "quit":
            break
        if line == "start" and capture is None:
            capture = Capture(sampler, options.spool)
            say("started")
        elif line == "stop" and capture is not None:
            say("stopped", **capture.stop())
            capture, more = None, False
        elif line is not None:
            raise Refusal(f"command {line!r} makes no sense here", "start, then stop, then quit")
        elif capture is not None:
            more = capture.drain()
    sampler.collector.disable()


def main(arguments: list[str] | None = None) -> int:
    """Run the program; 0, or 3 after ``failed``."""
    parser = argparse.ArgumentParser(description="Sample one GPU's counters for another process.")
    parser.add_argument("--device", required=True, metavar="UUID", help="GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx")
    parser.add_argument("--spool", required=True, type=Path, help="folder for samples")
    parser.add_argument("--interval-ns", type=int, default=10_000)
    parser.add_argument("--buffer-bytes", type=int, default=512 << 20)
    options = parser.parse_args(arguments)
    try:
        serve(options)
    except Refusal as refusal:
        say("failed", why=refusal.why, fix=refusal.fix)
        return 3
    except Exception as error:  # the parent gets every failure as a line, whatever CUPTI raises
        say("failed", why=f"{type(error).__name__}: {error}", fix="")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
