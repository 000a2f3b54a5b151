"""Make the files of tests/data/foreign: what other tools write, in their layouts, with numbers of this project's own.

``python tests/data/make_foreign.py`` writes them anew; a test compares. No tool was run: tables, columns and keys
follow the tools' public documentation, and the numbers are of one decode: 8 steps of 1 ms, from START_UTC on.
"""

import json
import sqlite3
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

FOLDER = Path(__file__).parent / "foreign"
START_UTC = datetime(2026, 9, 1, 10, 0, 0, tzinfo=UTC)
STEPS, STEP_NS = 8, 1_000_000
FIRST_NS = 5_000_000_000
"""When the first step begins, on the clock of Nsight Systems' session, which begins at START_UTC."""

NODES = ("norm", "qkv_gemm", "attention", "moe_gemm", "head_gemm")
PEAK = 4_800_000_000_000
PROCESS = 77 << 24
THREAD = PROCESS | 42


def nsys(path: Path) -> None:
    """An export of Nsight Systems: graph replays traced by node, a synchronisation and a read-back each step."""
    path.unlink(missing_ok=True)
    file = sqlite3.connect(path)
    strings: dict[str, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings) + 1)

    span = "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER, correlationId INTEGER"
    tables = {
        "CUPTI_ACTIVITY_KIND_KERNEL": f"{span}, globalPid INTEGER, demangledName INTEGER, shortName INTEGER, "
        "registersPerThread INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER, "
        "blockZ INTEGER, staticSharedMemory INTEGER, dynamicSharedMemory INTEGER, localMemoryPerThread INTEGER, "
        "graphNodeId INTEGER, graphId INTEGER, clusterX INTEGER, clusterY INTEGER, clusterZ INTEGER",
        "CUPTI_ACTIVITY_KIND_MEMCPY": f"{span}, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, "
        "dstKind INTEGER",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER, returnValue INTEGER",
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{span}, globalPid INTEGER, syncType INTEGER",
        "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER",
        "GPU_METRICS": "timestamp INTEGER, typeId INTEGER, metricId INTEGER, value INTEGER",
        "TARGET_INFO_GPU_METRICS": "typeId INTEGER, metricId INTEGER, metricName TEXT, sourceId INTEGER",
        "TARGET_INFO_GPU": "id INTEGER, name TEXT, smCount INTEGER, memoryBandwidth INTEGER, chipName TEXT",
        "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT",
        "META_DATA_EXPORT": "name TEXT, value TEXT",
        "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    }
    for name, columns in tables.items():
        file.execute(f"CREATE TABLE {name} ({columns})")

    def add(table: str, *values: object) -> None:
        file.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)  # noqa: S608

    # A view and a trigger that would fail if a reader ran anything of the file.
    file.execute("CREATE VIEW NVTX_PUSHPOP AS SELECT load_extension('evil') FROM NVTX_EVENTS")
    correlation = 100

    def call(start: int, end: int, number: int, name: str) -> None:
        add("CUPTI_ACTIVITY_KIND_RUNTIME", start, end, 0, THREAD, number, text(name), 0)

    for step in range(STEPS):
        begin = FIRST_NS + step * STEP_NS
        mark = "step[TARGET_VERIFY bs=1 c_sq=8 c_sk=800]"
        add("NVTX_EVENTS", begin - 150_000, begin + 820_000, 59, mark, None, THREAD)
        launch, moment = begin - 100_000, begin
        call(launch, launch + 60_000, correlation, "cudaGraphLaunch_v10000")
        for node, name in enumerate(NODES):
            add(
                "CUPTI_ACTIVITY_KIND_KERNEL", moment, moment + 120_000, 0, 1, 7, correlation, PROCESS,
                text(f"void {name}<>()"), text(name), 128, 66 + node, 1, 1, 256, 1, 1, 1024, 8192,
                48 if name == "attention" else 0, node + 1, 9,
                2 if name == "moe_gemm" else 0, 1 if name == "moe_gemm" else 0, 1 if name == "moe_gemm" else 0,
            )  # fmt: skip
            moment += 121_000
        call(begin - 30_000, begin - 25_000, correlation + 1, "cudaMemcpyAsync_v3020")
        add("CUPTI_ACTIVITY_KIND_MEMCPY", moment + 1_000, moment + 3_000, 0, 1, 7, correlation + 1, PROCESS, 4, 2, 2, 1)
        call(begin - 20_000, moment + 9_000, correlation + 2, "cudaStreamSynchronize_v3020")
        add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", begin - 19_000, moment + 8_000, 0, 1, 7, correlation + 2, PROCESS, 3)
        correlation += 3
    for tick in range(STEPS * STEP_NS // 20_000):
        moment = FIRST_NS + tick * 20_000
        busy = (tick * 20_000) % STEP_NS < 605_000
        for metric, value in ((1, 60 if busy else 0), (2, 90 if busy else 0)):
            add("GPU_METRICS", moment, 0x1100000000000000, metric, value)
    add("TARGET_INFO_GPU_METRICS", 0x1100000000000000, 1, "DRAM Read Bandwidth [Throughput %]", 1)
    add("TARGET_INFO_GPU_METRICS", 0x1100000000000000, 2, "SMs Active [Throughput %]", 1)
    add("TARGET_INFO_GPU", 0, "NVIDIA H200", 132, PEAK, "GH100")
    add("TARGET_INFO_SESSION_START_TIME", round(START_UTC.timestamp()) * 10**9, START_UTC.isoformat())
    add("META_DATA_EXPORT", "EXPORT_SCHEMA_VERSION", "3.20.2")
    for value, number in strings.items():
        add("StringIds", number, value)
    file.commit()
    file.execute("VACUUM")
    file.close()


def ncu_csv() -> str:
    """``ncu --csv --page raw``: two kernels, one of them twice."""
    names = (
        "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size",
        "Device", "CC", "dram__bytes_read.sum", "gpu__time_duration.sum", "launch__occupancy_limit_registers",
        "launch__occupancy_limit_shared_mem", "launch__registers_per_thread", "launch__waves_per_multiprocessor",
        "sm__maximum_warps_per_active_cycle_pct", "sm__warps_active.avg.pct_of_peak_sustained_active",
        "smsp__sass_inst_executed_op_local_ld.sum",
    )  # fmt: skip
    units = ("",) * 11 + ("Mbyte", "us", "block", "block", "register/thread", "", "%", "%", "inst")
    moe = "moe_gemm(const unsigned char *, float)", "(256, 1, 1)", "(1024, 1, 1)"
    rows = [
        ("0", *moe, "70.25", "21.5", "3", "2", "168", "5.2", "37.5", "33.1", "0"),
        ("1", "attention", "(128, 1, 1)", "(64, 2, 1)", "2.5", "8.25", "2", "9", "255", "0.48", "25", "12.4", "4,096"),
        ("2", *moe, "70.31", "21.7", "3", "2", "168", "5.2", "37.5", "33.0", "0"),
    ]  # fmt: skip
    lines = ["==PROF== Connected to process 77", ",".join(f'"{name}"' for name in names)]
    lines.append(",".join(f'"{unit}"' for unit in units))
    for number, name, block, grid, *values in rows:
        cells = (
            number,
            "77",
            "python",
            "127.0.0.1",
            name,
            "1",
            "7",
            block,
            grid.replace("1,024", "1024"),
            "0",
            "9.0",
            *values,
        )
        lines.append(",".join(f'"{cell}"' for cell in cells))
    return "\n".join(lines) + "\n"


def proton_tree() -> str:
    """Proton's hatchet JSON: a scope with two kernels, one of them under two scopes."""

    def kernel(name: str, count: int, ns: int, **more: float) -> dict[str, object]:
        metrics = {"count": count, "device_id": "0", "device_type": "CUDA", "time (ns)": ns, **more}
        return {"children": [], "frame": {"name": name, "type": "function"}, "metrics": metrics}

    scopes = [
        {"children": [kernel("moe_gemm", 8, 960_000, bytes=5.6e8), kernel("norm", 8, 24_000)],
         "frame": {"name": "layer 0", "type": "function"}, "metrics": {}},
        {"children": [kernel("moe_gemm", 8, 968_000, bytes=5.6e8)],
         "frame": {"name": "layer 1", "type": "function"}, "metrics": {}},
    ]  # fmt: skip
    root = {"children": scopes, "frame": {"name": "ROOT", "type": "function"}, "metrics": {"count": 0, "time (ns)": 0}}
    facts = {"arch": "90", "bus_width": 6144, "clock_rate": 1_980_000, "memory_clock_rate": 3_201_000, "num_sms": 132}
    return json.dumps([root, {"CUDA": {"0": facts}}]) + "\n"


def proton_trace() -> str:
    """Proton's chrome_trace: one document a stream, a line each."""
    lines = []
    for stream in (7, 13):
        events = []
        for step in range(STEPS if stream == 7 else 2):
            for node, name in enumerate(NODES):
                stack = ["ROOT", "decode", name]
                start = step * 1000.0 + node * 121
                events.append({"args": {"call_stack": stack}, "cat": "kernel", "dur": 120.5, "name": name, "ph": "X",
                               "tid": stream, "ts": start})  # fmt: skip
        lines.append(json.dumps({"displayTimeUnit": "us", "traceEvents": events}, separators=(",", ":")))
    return "\n".join(lines) + "\n"


def proton_lanes() -> str:
    """Proton's chrome_trace of spans inside kernels: two launches, two CTAs of two warps, one nanosecond a cycle."""
    events = []
    for launch in range(2):
        for cta in range(2):
            began = 5_000_000 + launch * 1_000_000 + cta * 300
            times = {"Init Time (ns)": began, "Post Final Time (ns)": began + 2_600, "Finalization Time (ns)": 600}
            for warp in range(2):
                for name, start, cycles in (("load", 40, 1_500), ("dot", 1_600, 1_960)):
                    events.append({"args": times | {"call_stack": ["ROOT"]}, "cat": "moe_gemm", "dur": cycles / 1000,
                                   "name": name, "ph": "X", "pid": f"moe_gemm Core{7 * cta} CTA{cta}",
                                   "tid": f"warp {warp} (line 0)", "ts": (began + start + warp) / 1000})  # fmt: skip
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, separators=(",", ":")) + "\n"


def sglang_log() -> str:
    """SGLang with speculation and its own estimates, on a clock two hours ahead of UTC; acceptance falls at the end."""
    lines = ["[2026-09-01 11:59:40 TP0] Load weight begin. avail mem=139.00 GB"]
    for index in range(16):
        moment = START_UTC + timedelta(hours=2, seconds=index - 1)
        length = 3.4 if index < 12 else 1.1
        rate = 1250 * length
        lines.append(
            f"[{moment:%Y-%m-%d %H:%M:%S} TP0] Decode batch, #running-req: 1, #token: {1000 + 40 * index}, "
            f"token usage: 0.01, accept len: {length:.2f}, accept rate: {(length - 1) / 7:.2f}, cuda graph: "
            f"{index != 3}, gen throughput (token/s): {rate:.2f}, #queue-req: 0, est. decode TFLOPS/s (per GPU): 8.10, "
            "est. read BW (GB/s per GPU): 9120.00, est. write BW (GB/s per GPU): 1.20"
        )
    return "\n".join(lines) + "\n"


def vllm_log() -> str:
    """vLLM, which states no year, on UTC."""
    lines = ["(APIServer pid=77) INFO 09-01 09:59:30 [api_server.py:10] starting"]
    for index in range(3):
        moment = START_UTC + timedelta(seconds=10 * index)
        lines.append(
            f"(APIServer pid=77) INFO {moment:%m-%d %H:%M:%S} [loggers.py:127] Engine 000: Avg prompt throughput: 0.0 "
            "tokens/s, Avg generation throughput: 251.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache "
            "usage: 0.4%, Prefix cache hit rate: 0.0%"
        )
        lines.append(
            f"(APIServer pid=77) INFO {moment:%m-%d %H:%M:%S} [metrics.py:96] SpecDecoding metrics: Mean acceptance "
            "length: 2.51, Accepted throughput: 151.00 tokens/s, Drafted throughput: 300.00 tokens/s, Accepted: 1510 "
            "tokens, Drafted: 3000 tokens, Per-position acceptance rate: 0.810, 0.480, 0.220, Avg Draft acceptance "
            "rate: 50.3%"
        )
    return "\n".join(lines) + "\n"


def aiperf() -> str:
    """AIPerf's summary."""
    document = {
        "schema_version": "1.2",
        "aiperf_version": "0.13.0",
        "output_token_throughput": {"unit": "tokens/sec", "avg": 812.5},
        "inter_token_latency": {"unit": "ms", "avg": 1.23, "p50": 1.21, "p99": 1.9, "min": 1.0, "max": 2.4, "std": 0.1},
        "spec_decode_acceptance_length": {"unit": "tokens", "avg": 3.41, "p50": 3.5, "count": 20},
        "was_cancelled": False,
        "input_config": {"endpoint": {"model_names": ["m"]}},
    }
    return json.dumps(document, indent=2) + "\n"


def one_batch_server() -> str:
    """sglang.benchmark.one_batch_server: a line a batch size."""
    lines = [
        {"run_name": "default", "batch_size": batch, "input_len": 16, "output_len": 512, "latency": 0.2, "ttft": 0.01,
         "output_throughput": 2400.0 * batch, "last_gen_throughput": 3400.0 * batch, "acc_length": 3.4}
        for batch in (1, 4)
    ]  # fmt: skip
    return "\n".join(json.dumps(line) for line in lines) + "\n"


TEXTS = {
    "kernels.ncu.csv": ncu_csv,
    "tree.hatchet": proton_tree,
    "kernels.chrome_trace": proton_trace,
    "lanes.chrome_trace": proton_lanes,
    "sglang.log": sglang_log,
    "vllm.log": vllm_log,
    "profile_export_aiperf.json": aiperf,
    "one_batch_server.jsonl": one_batch_server,
}


def make(folder: Path) -> None:
    """Write every file into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in TEXTS.items():
        (folder / name).write_text(content())
    nsys(folder / "decode.sqlite")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
