"""What the engines of persistent decode steps share: memory that names itself, a kernel whose CTAs are all resident,
launches, and the errors that a step flags."""

import math
from typing import Protocol

import torch

from workbench.errors import InputError, UnfitError
from workbench.kernels import nvrtc

STEP = "the persistent decode step"
FLAGS_AT = 2
"""Which word of the counters holds error flags."""

STATE_WORDS = 4
"""Words from the state to the routing of a step of one token: two or three are used."""

ERRORS = (
    (1, "a grid barrier timed out"),
    (2, "the position is beyond the cache"),
    (4, "the token is outside the vocabulary"),
    (8, "the number of tokens is not one the kernel takes"),
)
"""What the bits of the error flags say; of a step of several tokens, of any of them."""


def allocate(name: str, extents: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros on ``device``. Raises UnfitError that names the tensor and its bytes where memory runs out."""
    try:
        return torch.zeros(extents, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        size = math.prod(extents) * dtype.itemsize
        raise UnfitError(f"{name}: {size} bytes do not fit the memory of {device}") from error


def load_step(cubin: nvrtc.Cubin, grid: int, threads: int, smem_bytes: int, multiprocessors: int) -> nvrtc.Kernel:
    """A step's kernel, ready to launch. Raises UnfitError where its CTAs cannot all be resident."""
    if grid > multiprocessors:
        raise UnfitError(f"{grid} CTAs cannot be co-resident on {multiprocessors} multiprocessors")
    kernel = nvrtc.Kernel(cubin, smem_bytes=smem_bytes)
    if kernel.ctas_per_sm(threads) < 1:
        raise UnfitError(f"one CTA of {threads} threads, {smem_bytes} bytes does not fit a multiprocessor")
    return kernel


def refuse(flags: int) -> None:
    """Raise UnfitError where ``flags``, read from the counters, say that a step went wrong."""
    if flags:
        raise UnfitError(f"decode step: {', '.join(text for bit, text in ERRORS if flags & bit)}")


class Plan(Protocol):
    """How many CTAs of how many threads a step is."""

    @property
    def grid(self) -> int:
        """CTAs."""

    @property
    def threads(self) -> int:
        """Threads a CTA."""


class Shape(Protocol):
    """What an engine asks of a model's shape."""

    @property
    def vocab(self) -> int:
        """Tokens there are."""


class Buffers(Protocol):
    """What is asked of a step's buffers. ``state`` of one token begins with it and its position; ``words``: what the
    host reads after a step, in one piece."""

    logits: torch.Tensor
    routing: torch.Tensor
    state: torch.Tensor
    sync: torch.Tensor
    words: torch.Tensor


class StepEngine:
    """A model on one device whose step is one launch; a subclass sets what is annotated here.

    Steps of one engine are ordered by the stream they are enqueued on; two streams need two engines.
    """

    device: torch.device
    plan: Plan
    buffers: Buffers
    kernel: nvrtc.Kernel
    arguments: list[nvrtc.Argument]

    @property
    def logits(self) -> torch.Tensor:
        """Logits of the last step, fp32 [vocab], or [tokens, vocab]."""
        return self.buffers.logits

    @property
    def routing(self) -> torch.Tensor:
        """Experts of the last step, int32 [layers with experts, top_k], or [layers, tokens, top_k]."""
        return self.buffers.routing

    def step(self) -> None:
        """Enqueue one step on the current stream; the driver refuses a grid that cannot be co-resident."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self.kernel.launch(self.plan.grid, self.plan.threads, stream, self.arguments, cooperative=True)

    def reset(self) -> None:
        """Put what steps hand on back to what a first step finds; token, position and caches stay."""
        self.buffers.sync.zero_()

    def check(self) -> None:
        """Raise UnfitError if a step since the last check flagged an error. Waits for the device."""
        self.refuse(int(self.buffers.sync[FLAGS_AT].item()))

    def refuse(self, flags: int) -> None:
        """Raise UnfitError where ``flags``, read from the counters, say that a step went wrong; the engine is reset."""
        if flags:
            self.reset()
            refuse(flags)


class OneTokenEngine(StepEngine):
    """A step of one token, which leaves the next one and its position where the following step reads them."""

    shape: Shape
    capacity: int

    def start(self, token: int, position: int = 0) -> None:
        """Set the token that the next step reads and the position it stands at."""
        if not 0 <= token < self.shape.vocab:
            raise InputError(f"token must be 0 to {self.shape.vocab - 1}, not {token}")
        if not 0 <= position < self.capacity:
            raise InputError(f"position must be 0 to {self.capacity - 1}, not {position}")
        self.buffers.state[:2].copy_(torch.tensor([token, position], dtype=torch.int32))

    def state(self) -> tuple[int, int]:
        """The next token and its position. Waits for the device."""
        token, position = self.buffers.state[:2].tolist()
        return int(token), int(position)
