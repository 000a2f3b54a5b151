"""CUDA C++ at run time: compile with NVRTC, keep the cubin, load it through the driver, launch.

Only the two shared libraries are needed (``libnvrtc`` comes with torch's CUDA wheels, ``libcuda`` with the driver);
no toolkit, no headers and no further wheel. Compiling needs no GPU. The driver calls work in torch's own (primary)
context.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import InputError, UnfitError

SOURCES = Path(__file__).parent / "cuda"
Macro = int | float | str
Argument = ctypes.c_void_p | ctypes.c_int | ctypes.c_uint | ctypes.c_ulonglong | ctypes.c_float


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one kernel and what the assembler said of it.

    ``registers`` per thread; ``spill_bytes`` are the stores to local memory of one thread; ``stack_bytes`` its frame;
    ``smem_bytes`` static shared memory. All are static facts, read without a GPU.
    """

    kernel: str
    image: bytes
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    log: str


def _open(names: Sequence[str], folders: Sequence[Path], what: str, hint: str) -> ctypes.CDLL:
    candidates = [*(str(folder / name) for folder in folders for name in names if (folder / name).exists()), *names]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise UnfitError(f"{what} not found (tried {', '.join(names)})", hint=hint)


@functools.cache
def nvrtc_library() -> ctypes.CDLL:
    """The NVRTC library: on the loader's path, or inside the ``nvidia`` wheels that torch installs."""
    names = ["libnvrtc.so.13", "libnvrtc.so.12"]
    folders = [Path("/usr/local/cuda/lib64")]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders += [Path(root) / "cu13" / "lib", Path(root) / "cuda_nvrtc" / "lib"]
    for builtins in (path for folder in folders for path in sorted(folder.glob("libnvrtc-builtins.so.*"))):
        # NVRTC opens its builtins by bare name, which a loader finds in a wheel only if they are loaded already.
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(builtins))
    return _open(names, folders, "NVRTC", "install torch with CUDA or nvidia-cuda-nvrtc")


def available() -> bool:
    """Whether kernels can be compiled here."""
    try:
        nvrtc_library()
    except UnfitError:
        return False
    return True


@functools.cache
def driver_library() -> ctypes.CDLL:
    """The CUDA driver."""
    return _open(["libcuda.so.1"], [], "CUDA driver", "a machine with an NVIDIA GPU and its driver is needed")


def cache_folder() -> Path:
    """Where cubins are kept: ``WORKBENCH_CACHE``, else the user's cache folder."""
    root = os.environ.get("WORKBENCH_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "decode-workbench" / "cubin"


def _macro(value: Macro) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(value)


def _headers() -> list[Path]:
    return sorted(SOURCES.glob("*.cuh"))


def _version(lib: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check_nvrtc(lib, lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "")
    return major.value, minor.value


def _check_nvrtc(lib: ctypes.CDLL, code: int, log: str) -> None:
    if code == 0:
        return
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    text = (lib.nvrtcGetErrorString(code) or b"unknown").decode()
    first_error = next((line for line in log.splitlines() if "error" in line), log.strip()[:200])
    raise InputError(f"NVRTC: {text}: {first_error}")


def _parse_log(log: str) -> tuple[int, int, int, int]:
    def find(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match.group(1)) if match else 0

    return (
        find(r"Used (\d+) registers"),
        find(r"(\d+) bytes spill stores"),
        find(r"(\d+) bytes stack frame"),
        find(r"(\d+) bytes smem"),
    )


def _compile(source: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    lib = nvrtc_library()
    headers = _headers()
    texts = (ctypes.c_char_p * len(headers))(*(path.read_bytes() for path in headers))
    names = (ctypes.c_char_p * len(headers))(*(path.name.encode() for path in headers))
    program = ctypes.c_void_p()
    created = lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names)
    _check_nvrtc(lib, created, "")
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = lib.nvrtcCompileProgram(program, len(options), flags)
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        lib.nvrtcGetProgramLog(program, buffer)
        log = buffer.value.decode(errors="replace")
        _check_nvrtc(lib, code, log)
        _check_nvrtc(lib, lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), log)
        image = ctypes.create_string_buffer(size.value)
        _check_nvrtc(lib, lib.nvrtcGetCUBIN(program, image), log)
        return image.raw, log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _digest(parts: Sequence[str]) -> str:
    key = hashlib.sha256()
    for part in parts:
        key.update(struct.pack("<q", len(part)))
        key.update(part.encode())
    return key.hexdigest()[:32]


def _read(path: Path) -> tuple[bytes, str] | None:
    image, log = path.with_name(f"{path.name}.cubin"), path.with_name(f"{path.name}.log")
    return (image.read_bytes(), log.read_text()) if image.exists() and log.exists() else None


def _write(path: Path, image: bytes, log: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, data in (("log", log.encode()), ("cubin", image)):
        partial = path.with_name(f"{path.name}.{suffix}.{os.getpid()}.{threading.get_ident()}")
        partial.write_bytes(data)
        partial.replace(path.with_name(f"{path.name}.{suffix}"))


def compile_kernel(
    file: str, kernel: str, macros: Mapping[str, Macro], *, arch: str = "sm_90a", options: Sequence[str] = ()
) -> Cubin:
    """Compile ``kernels/cuda/<file>`` for ``arch`` with ``macros`` defined; the cubin is kept by a hash of all that
    went in.

    ``WORKBENCH_CUBINS`` names a folder of cubins built elsewhere from the same sources and macros (``export``): what
    is found there needs no NVRTC.

    Raises InputError with the compiler's first error line, UnfitError where NVRTC is missing.
    """
    source = (SOURCES / file).read_text()
    flags = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v", "-default-device", *options]
    flags += [f"-D{name}={_macro(value)}" for name, value in sorted(macros.items())]
    name = f"{Path(file).stem}-{_digest([source, *(path.read_text() for path in _headers()), repr(flags)])}"
    ready = os.environ.get("WORKBENCH_CUBINS")
    found = _read(Path(ready) / name) if ready else None
    if found is None:
        path = cache_folder() / f"{name}-{'.'.join(map(str, _version(nvrtc_library())))}"
        found = _read(path)
        if found is None:
            found = _compile(source, file, flags)
            _write(path, *found)
    image, log = found
    registers, spill, stack, smem = _parse_log(log)
    return Cubin(kernel, image, arch, registers, spill, stack, smem, log)


def export(folder: Path) -> int:
    """Copy every cubin of the cache to ``folder`` under the names that ``WORKBENCH_CUBINS`` looks for; return how
    many."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f"-{'.'.join(map(str, _version(nvrtc_library())))}"
    count = 0
    for path in sorted(cache_folder().glob(f"*{suffix}.*")):
        (folder / path.name.replace(f"{suffix}.", ".")).write_bytes(path.read_bytes())
        count += path.suffix == ".cubin"
    return count


class _Dim(ctypes.Structure):
    _fields_ = [
        ("gx", ctypes.c_uint),
        ("gy", ctypes.c_uint),
        ("gz", ctypes.c_uint),
        ("bx", ctypes.c_uint),
        ("by", ctypes.c_uint),
        ("bz", ctypes.c_uint),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("num_attrs", ctypes.c_uint),
    ]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, 4 bytes of padding, and a 64-byte union whose first int is all that is set here."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60)]


_COOPERATIVE = 2
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED = 8
_NUM_REGS = 4
_LOCAL_BYTES = 3


def _check(code: int, what: str) -> None:
    if code == 0:
        return
    lib = driver_library()
    text = ctypes.c_char_p()
    lib.cuGetErrorString(code, ctypes.byref(text))
    raise UnfitError(f"CUDA driver: {what}: {(text.value or b'unknown').decode()} ({code})")


class Kernel:
    """One loaded kernel. Loading needs a current CUDA context (torch has one after its first CUDA call)."""

    def __init__(self, cubin: Cubin, *, smem_bytes: int = 0) -> None:
        lib = driver_library()
        self.cubin = cubin
        self.smem_bytes = smem_bytes
        module = ctypes.c_void_p()
        _check(lib.cuModuleLoadData(ctypes.byref(module), cubin.image), f"load {cubin.kernel}")
        self._module = module
        self._function = ctypes.c_void_p()
        _check(
            lib.cuModuleGetFunction(ctypes.byref(self._function), module, cubin.kernel.encode()), f"find {cubin.kernel}"
        )
        if smem_bytes:
            code = lib.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, smem_bytes)
            _check(code, f"{cubin.kernel}: {smem_bytes} bytes of shared memory")

    def attribute(self, which: int) -> int:
        """One CUfunction_attribute."""
        value = ctypes.c_int()
        _check(driver_library().cuFuncGetAttribute(ctypes.byref(value), which, self._function), "query")
        return value.value

    @property
    def registers(self) -> int:
        """Registers a thread, as the driver sees the loaded code."""
        return self.attribute(_NUM_REGS)

    @property
    def local_bytes(self) -> int:
        """Local memory a thread (stack and spills), as the driver sees the loaded code."""
        return self.attribute(_LOCAL_BYTES)

    def ctas_per_sm(self, threads: int) -> int:
        """How many CTAs of this kernel fit one multiprocessor at once."""
        value = ctypes.c_int()
        code = driver_library().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(value), self._function, threads, ctypes.c_size_t(self.smem_bytes)
        )
        _check(code, "occupancy")
        return value.value

    def launch(
        self,
        grid: int,
        threads: int,
        stream: int,
        args: Sequence[Argument],
        *,
        overlap: bool = False,
        cooperative: bool = False,
    ) -> None:
        """Enqueue on ``stream`` (a CUstream as an int; graph capture works).

        ``overlap``: programmatic dependent launch, so that this kernel's prologue runs under its predecessor's tail
        (the kernel must wait itself). ``cooperative``: the driver refuses a grid that cannot be co-resident.
        """
        attributes = (_Attribute * 2)()
        count = 0
        for wanted, number in ((overlap, _PROGRAMMATIC_STREAM_SERIALIZATION), (cooperative, _COOPERATIVE)):
            if wanted:
                attributes[count].id, attributes[count].value = number, 1
                count += 1
        config = _Dim(
            grid, 1, 1, threads, 1, 1, self.smem_bytes, stream, ctypes.cast(attributes, ctypes.c_void_p).value, count
        )
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        code = driver_library().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        _check(code, f"launch {self.cubin.kernel} ({grid} CTAs x {threads} threads)")
