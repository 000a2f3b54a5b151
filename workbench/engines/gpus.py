"""Which GPU a server runs on, by NVML: device handles go by UUID, never by CUDA's ordinal (nsight-python#35)."""

from dataclasses import dataclass

from workbench.errors import InputError, UnfitError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its index in NVML's order, UUID, name, memory in use (B), and the processes that hold memory on it."""

    index: int
    uuid: str
    name: str
    used_bytes: int
    pids: tuple[int, ...]


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine. Raises UnfitError where NVML cannot say."""
    try:
        import pynvml
    except ImportError:
        raise UnfitError("attaching needs NVML", hint="pip install 'decode-workbench[gpu]'") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise UnfitError(f"no NVIDIA driver to ask ({error})", hint="attach on the machine of the server") from None
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            try:
                pids = tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
            except pynvml.NVMLError:
                pids = ()  # hidden from a container
            found.append(
                Gpu(
                    index=index,
                    uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                    name=_text(pynvml.nvmlDeviceGetName(handle)),
                    used_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
                    pids=pids,
                )
            )
        return tuple(found)
    except pynvml.NVMLError as error:
        raise UnfitError(f"NVML: {error}", hint="see workbench doctor") from None
    finally:
        pynvml.nvmlShutdown()


def choose(found: tuple[Gpu, ...], *, index: int | None, pid: int | None) -> Gpu:
    """Return the GPU of ``index``, or of process ``pid`` or one of its children, or else the one with most memory used.

    Raises InputError where there is no such GPU.
    """
    if not found:
        raise UnfitError("no NVIDIA GPU here", hint="attach on the machine of the server")
    if index is not None:
        if not 0 <= index < len(found):
            raise InputError(f"--gpu {index}: there are {len(found)} GPUs, counted from 0")
        return found[index]
    if pid is not None:
        family = _family(pid)
        for gpu in found:
            if family & set(gpu.pids):
                return gpu
        raise InputError(f"--pid {pid}: holds no memory on any GPU that NVML shows", hint="name the GPU: --gpu 0")
    return max(found, key=lambda gpu: gpu.used_bytes)


def _family(pid: int) -> set[int]:
    import psutil

    try:
        process = psutil.Process(pid)
        return {pid, *(child.pid for child in process.children(recursive=True))}
    except psutil.Error:
        raise InputError(f"--pid {pid}: no such process") from None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
