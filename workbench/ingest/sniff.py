"""Which tool wrote a file, from its bytes: names and endings are not looked at."""

import re
from pathlib import Path
from typing import Literal

from workbench.errors import InputError
from workbench.ingest.bounded import BLOCK_BYTES, Limits, read_blocks
from workbench.ingest.losses import Losses

Format = Literal[
    "kineto", "nsys", "ncu-report", "ncu-csv", "proton-tree", "proton-trace", "proton-lanes", "sglang-log", "vllm-log",
    "aiperf", "sglang-benchmark",
]  # fmt: skip

READS: dict[Format, str] = {
    "kineto": "a trace of torch.profiler (.json, .json.gz)",
    "nsys": "an export of Nsight Systems (sqlite)",
    "ncu-report": "a report of Nsight Compute (.ncu-rep)",
    "ncu-csv": "Nsight Compute's CSV (ncu --csv --page raw)",
    "proton-tree": "a profile of Proton (hatchet JSON)",
    "proton-trace": "a trace of Proton (chrome_trace)",
    "proton-lanes": "a trace of Proton's instrumentation, spans inside kernels (chrome_trace)",
    "sglang-log": "a log of SGLang",
    "vllm-log": "a log of vLLM",
    "aiperf": "a summary of AIPerf (JSON)",
    "sglang-benchmark": "results of sglang.benchmark (JSON, JSONL)",
}

LOG_BYTES = 64 << 20
"""How far into a text the first line of an engine's log is looked for: loading weights says a lot."""

SQLITE = b"SQLite format 3\x00"
NCU_REPORT = b"NVR\x00"
_BENCHMARK = re.compile(
    rb'"(?:output_throughput|overall_throughput|median_decode_throughput|median_decode_latency|last_gen_throughput|'
    rb'accept_length|acc_length|mean_tpot_ms)"\s*:'
)
_AIPERF = re.compile(rb'"(?:aiperf_version|benchmark_id|input_config)"\s*:')
_METRIC = re.compile(rb'"unit"\s*:\s*"[^"]{0,40}"\s*,\s*"avg"\s*:')
_PROTON_TREE = re.compile(rb'"frame"\s*:\s*\{')
_PROTON_LANES = re.compile(rb'"pid"\s*:\s*"[^"]{1,4096} Core\d+ CTA\d+"')
_PROTON_TRACE = re.compile(rb'"call_stack"\s*:\s*\[')
_KINETO = re.compile(rb'"(?:schemaVersion|deviceProperties|baseTimeNanoseconds|trace_id|distributedInfo)"\s*:')
_SGLANG_LOG = re.compile(rb"Decode batch[.,]?(?: \[\d+\])?[.,]? #running-req:")
_VLLM_LOG = re.compile(rb"SpecDecoding metrics:|Avg generation throughput:")
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\{|\[\s*(?:[{\]]|$))")
"""An object, or an array of objects: a line of a log may begin with a bracket too."""

_NCU_CSV = re.compile(rb'(?m)^"ID","Process ID","Process Name"')


def sniff(path: Path, limits: Limits = Limits()) -> Format:  # noqa: B008
    """Return what wrote ``path``. Raises InputError, one line, where it is nothing that can be read."""
    head = _head(path)
    if head.startswith(SQLITE):
        return "nsys"
    if head.startswith(NCU_REPORT):
        return "ncu-report"
    blocks = read_blocks(path, Losses("sniff"), limits)
    text = next(blocks, b"")
    if _JSON.match(text):
        return _json(text)
    if _NCU_CSV.search(text):
        return "ncu-csv"
    seen = len(text)
    while text:
        if _SGLANG_LOG.search(text):
            return "sglang-log"
        if _VLLM_LOG.search(text):
            return "vllm-log"
        if seen > LOG_BYTES or b"\x00" in text:
            break
        more = next(blocks, b"")
        seen += len(more)
        text = text[-400:] + more if more else b""  # a line may lie across two blocks
    what = "nor of Nsight, Proton, AIPerf or sglang.benchmark, nor a log of SGLang or vLLM"
    raise InputError(f"{path}: not a torch.profiler trace (no traceEvents in it), {what}", hint=_fix(path))


def _head(path: Path) -> bytes:
    try:
        if not path.is_file():
            reason = "is a folder" if path.is_dir() else "no such file"
            raise InputError(f"{path}: {reason}", hint="name a trace, a log or a benchmark's results")
        with path.open("rb") as file:
            return file.read(16)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", hint="check the file") from None


def _json(text: bytes) -> Format:
    """Tell JSON formats apart by members in their first block. What is not known is read as a torch.profiler trace,
    whose reader copes with damage and says what is wrong."""
    if b'"traceEvents"' in text:
        if _PROTON_LANES.search(text) and not _KINETO.search(text):
            return "proton-lanes"
        return "proton-trace" if _PROTON_TRACE.search(text) and not _KINETO.search(text) else "kineto"
    if _PROTON_TREE.search(text[:4096]) and b'"metrics"' in text[:4096]:
        return "proton-tree"
    if len(text) < BLOCK_BYTES or not _KINETO.search(text):
        # An array of events without the members around it is a trace too: "ph" gives it away.
        if _AIPERF.search(text) and _METRIC.search(text):
            return "aiperf"
        if _BENCHMARK.search(text) and b'"ph"' not in text:
            return "sglang-benchmark"
        if len(_METRIC.findall(text)) >= 3:
            return "aiperf"
    return "kineto"


def _fix(path: Path) -> str:
    """Return what to do, for files whose ending names a tool that has an export."""
    endings = {
        ".nsys-rep": "nsys export --type sqlite FILE writes what can be read",
        ".qdrep": "nsys export --type sqlite FILE writes what can be read",
        ".ncu-rep": "it is damaged: a report begins with NVR",
        ".pftrace": "save the trace as Chrome JSON",
    }
    return endings.get(path.suffix, "profile again, or check which file it is")
