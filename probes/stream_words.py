"""Words that a CUDA stream writes itself, between two of its operations and without a kernel.

``cuStreamWriteValue64`` (CUDA driver API, stream memory operations) is carried out by the front end of the device, in
stream order: what polls the word learns that everything before the write is done about a microsecond sooner than a
kernel launched behind it would.
"""

import ctypes
from typing import Any

LIBRARY = "libcuda.so.1"


class StreamWord:
    """One int64 word of device memory. ``write`` returns False where the driver takes no such operation."""

    def __init__(self, address: int) -> None:
        self._address = address
        try:
            self._call: Any = ctypes.CDLL(LIBRARY).cuStreamWriteValue64_v2
        except (OSError, AttributeError):  # no driver, or one before CUDA 11.7
            self._call = None
            return
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
        self._call.restype = ctypes.c_int

    def write(self, stream: int, value: int) -> bool:
        """Enqueue a write of ``value`` on ``stream`` (its handle), fenced behind all that the stream did before."""
        if self._call is None or self._call(stream, self._address, value, 0) != 0:
            self._call = None
            return False
        return True
