"""An ncu without a GPU: takes the options it is called with, writes the CSV of 2025.3.1 to its log, or fails as told.

FAKE_NCU=MODE fake_ncu.py --log-file FILE … --metrics … [--kernel-name regex:…] CHILD QUESTION. Of the child it reads
the question and writes the answer; ``child-fails``: the child's answer is an error, ``runs-child``: it really runs.
"""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

SWITCHES = {"--csv"}
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>(int, float *)"
KERNELS = [
    (
        "expert_pass",
        "(132, 1, 1)",
        "(384, 1, 1)",
        {"dram__bytes_read.sum": 70_250_000, "gpu__time_duration.sum": 21_500},
    ),
    (ELEMENTWISE, "(9, 1, 1)", "(128, 1, 1)", {"dram__bytes_read.sum": 1024, "gpu__time_duration.sum": 1800}),
    (
        "expert_pass",
        "(132, 1, 1)",
        "(384, 1, 1)",
        {"dram__bytes_read.sum": 70_750_000, "gpu__time_duration.sum": 22_500},
    ),
    ("rms_norm", "(1, 1, 1)", "(256, 1, 1)", {"dram__bytes_read.sum": 5_760, "gpu__time_duration.sum": 2_000}),
]
VALUES = {
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", 18.5),
    "sm__maximum_warps_per_active_cycle_pct": ("%", 37.5),
    "dram__bytes_read.sum": ("byte", 0),
    "dram__bytes_write.sum": ("byte", 4096),
    "gpu__time_duration.sum": ("ns", 0),
    "launch__registers_per_thread": ("register/thread", 168),
    "launch__occupancy_limit_registers": ("block", 1),
    "launch__occupancy_limit_warps": ("block", 5),
}
FIXED = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size",
         "Device", "CC"]  # fmt: skip

ERRORS = {
    "no-permission": "ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters "
    "on the target device 0. For instructions on enabling permissions see the documentation",
    "busy": "Profiling failed because a driver resource was unavailable. Ensure that no other tool (like DCGM) is "
    "concurrently collecting profiling data.",
    "strange": "The sky is falling (42)",
}


def main() -> int:
    if sys.argv[1:] == ["--version"]:
        print(f"NVIDIA (R) Nsight Compute Command Line Profiler\nVersion {os.environ['FAKE_NCU_VERSION']} (build 3639)")
        return 0
    mode, options, place = os.environ["FAKE_NCU"], {}, 1
    while sys.argv[place].startswith("--"):
        name = sys.argv[place]
        place += 1
        if name not in SWITCHES:
            options[name] = sys.argv[place]
            place += 1
    question = json.loads(Path(sys.argv[-1]).read_text())
    log, answer = Path(options["--log-file"]), Path(question["answer"])
    with Path(os.environ["FAKE_NCU_CALLS"]).open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    with log.open("w") as sink:
        sink.write("==PROF== Connected to process 77 (python3.12)\n")
        metrics = options["--metrics"].split(",")
        if mode in ERRORS:
            sink.write(f"==ERROR== {ERRORS[mode]}\n==WARNING== No kernels were profiled.\n")
            return 1
        if mode == "no-metric" and (refused := [name for name in metrics if "stalled_membar" in name]):
            sink.write(f"==ERROR== Failed to find metric {refused[0]}\n")
            return 1
        if mode == "slow":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            Path(os.environ["FAKE_NCU_CALLS"]).write_text(str(child.pid))
            time.sleep(60)
        if mode == "runs-child":
            code = subprocess.run(sys.argv[place:], check=False).returncode
            sink.write(
                f"==WARNING== No kernels were profiled.\n==ERROR== The application returned an error code ({code}).\n"
            )
            return code
        if mode == "child-fails":
            answer.write_text(json.dumps({"error": "variant 'a': not enough device memory"}))
            sink.write("==WARNING== No kernels were profiled.\n==ERROR== The application returned an error code (1).\n")
            return 1
        if mode == "nothing":
            answer.write_text(json.dumps({"steps": 1, "device": "NVIDIA Abacus"}))
            sink.write("==WARNING== No kernels were profiled.\n")
            return 0
        _write(sink, metrics, options.get("--kernel-name", "regex:."), int(options["--launch-count"]))
        answer.write_text(json.dumps({"steps": question["steps"], "device": "NVIDIA Abacus"}))
        sink.write("==PROF== Disconnected from process 77\n")
    return 0


def _write(sink: object, metrics: list[str], wanted: str, most: int) -> None:
    pattern = re.compile(wanted.removeprefix("regex:"))
    writer = csv.writer(sink, quoting=csv.QUOTE_ALL, lineterminator="\n")  # type: ignore[arg-type]
    names = sorted(metrics)
    writer.writerow([*FIXED, *names])
    writer.writerow([*[""] * len(FIXED), *(VALUES.get(name, ("inst", 0))[0] for name in names)])
    launched = [one for one in KERNELS if pattern.search(_function(one[0]))][:most]
    for number, (name, grid, block, own) in enumerate(launched):
        fixed = [number, 77, "python3.12", "127.0.0.1", name, 1, 7, block, grid, 0, "9.0"]
        writer.writerow([*fixed, *(f"{own.get(each, VALUES.get(each, ('inst', 0.25))[1]):,}" for each in names)])


def _function(name: str) -> str:
    return re.sub(r"<.*", "", name).rsplit("::", 1)[-1].split(" ")[-1]


if __name__ == "__main__":
    sys.exit(main())
