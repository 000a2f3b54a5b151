"""What the decode-step kernel is told of a model: its shape, its weights in the kernel's layouts, the bytes of a
step."""

from dataclasses import dataclass, fields

import torch

from workbench.errors import InputError
from workbench.kernels import mxfp4_tiles


@dataclass(frozen=True, slots=True)
class StepShape:
    """A GQA mixture-of-experts decoder as the kernel takes it (gpt-oss family).

    ``windows``: for each layer the positions it sees, the current one included; 0 sees all. ``limit`` and ``alpha``
    belong to the clamped activation, which also bounds what passes between gate-up and down to ``limit (limit + 1)``,
    so that fp16 holds it.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    inter: int
    vocab: int
    windows: tuple[int, ...]
    eps: float = 1e-5
    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        for name, value, multiple in (
            ("layers", self.layers, 1),
            ("hidden", self.hidden, 64),
            ("inter", self.inter, 64),
            ("vocab", self.vocab, 16),
            ("kv_heads", self.kv_heads, 1),
            ("experts", self.experts, 4),
        ):
            if value <= 0 or value % multiple:
                raise InputError(f"{name} must be a positive multiple of {multiple}, not {value}")
        if self.heads <= 0 or self.heads % self.kv_heads:
            raise InputError(f"heads must be a positive multiple of kv_heads ({self.kv_heads}), not {self.heads}")
        if self.head_dim not in (64, 128):
            raise InputError(f"head_dim must be 64 or 128, not {self.head_dim}")
        if not 0 < self.top_k <= min(self.experts, 12):
            raise InputError(f"top_k must be 1 to {min(self.experts, 12)}, not {self.top_k}")
        if len(self.windows) != self.layers or any(window < 0 for window in self.windows):
            raise InputError(f"windows must hold {self.layers} numbers of at least 0, not {list(self.windows)}")
        if not 0 < self.limit * (self.limit + 1) < 60000:
            raise InputError(f"limit must be positive and limit * (limit + 1) below 60000 (fp16), not {self.limit}")

    @property
    def query_rows(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def layer_bytes(self) -> dict[str, int]:
        """Weight bytes one layer cannot avoid at one token, by matrix: bf16, chosen experts MXFP4 with scales."""
        expert = self.hidden * self.inter * mxfp4_tiles.UNIT_BYTES // 1024
        return {
            "qkv": 2 * self.qkv_rows * self.hidden,
            "out": 2 * self.query_rows * self.hidden,
            "router": 2 * self.experts * self.hidden,
            "gate_up": 2 * self.top_k * expert,
            "down": self.top_k * expert,
        }

    def head_bytes(self) -> int:
        """Bytes of the output head (bf16)."""
        return 2 * self.vocab * self.hidden

    def cache_bytes(self, position: int) -> int:
        """Bytes of keys and values that a step at ``position`` reads (bf16)."""
        seen = sum(min(position, window - 1) if window else position for window in self.windows)
        return seen * 2 * 2 * self.kv_heads * self.head_dim

    def step_bytes(self, position: int) -> int:
        """Bytes a step at ``position`` cannot avoid reading."""
        return self.layers * sum(self.layer_bytes().values()) + self.head_bytes() + self.cache_bytes(position)


@dataclass(frozen=True, slots=True)
class StepWeights:
    """A model in the kernel's layouts, layers stacked. bf16 matrices by ``persistent_layout.pack_matrix``, MXFP4 by
    ``mxfp4_tiles.pack_tiles``; ``gains``: attention and MLP norm of each layer, then the final norm; ``router``: fp32
    [layers, hidden, experts] with the MLP norm's gain folded in."""

    embedding: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    gains: torch.Tensor
    router: torch.Tensor
    router_bias: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    head: torch.Tensor
    sinks: torch.Tensor


def expected_weights(shape: StepShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and extents of every field of StepWeights."""
    n, h, i, e = shape.layers, shape.hidden, shape.inter, shape.experts
    up, down = h // 64 * mxfp4_tiles.UNIT_BYTES, i // 64 * mxfp4_tiles.UNIT_BYTES
    bf16, fp32, u8 = torch.bfloat16, torch.float32, torch.uint8
    return {
        "embedding": (bf16, (shape.vocab, h)),
        "qkv": (bf16, (n, shape.qkv_rows // 16, h // 16, 32, 8)),
        "qkv_bias": (fp32, (n, shape.qkv_rows)),
        "out": (bf16, (n, h // 16, shape.query_rows // 16, 32, 8)),
        "out_bias": (fp32, (n, h)),
        "gains": (fp32, (2 * n + 1, h)),
        "router": (fp32, (n, h, e)),
        "router_bias": (fp32, (n, e)),
        "gate_up": (u8, (n, e, i // 8, up)),
        "gate_up_bias": (bf16, (n, e, 2 * i)),
        "down": (u8, (n, e, h // 16, down)),
        "down_bias": (bf16, (n, e, h)),
        "head": (bf16, (shape.vocab // 16, h // 16, 32, 8)),
        "sinks": (fp32, (n, shape.heads)),
    }


def check_weights(shape: StepShape, weights: StepWeights, device: torch.device) -> None:
    """Raise InputError, naming the tensor, unless ``weights`` are what the kernel of ``shape`` reads."""
    wanted = expected_weights(shape)
    for field in fields(StepWeights):
        tensor: torch.Tensor = getattr(weights, field.name)
        dtype, extents = wanted[field.name]
        if (
            tensor.dtype != dtype
            or tuple(tensor.shape) != extents
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            raise InputError(
                f"{field.name} must be contiguous {dtype} {list(extents)} on {device}, "
                f"not {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
        if tensor.data_ptr() % 16:
            raise InputError(f"{field.name} must be 16-byte aligned")


def rope_table(capacity: int, head_dim: int, theta: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """(cos, sin) of every position: fp32 [capacity, head_dim/2, 2], no scaling. A scaled RoPE (YaRN) is another table
    of the same form."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(capacity, dtype=torch.float64)[:, None] * inverse
    return torch.stack((angles.cos(), angles.sin()), dim=-1).to(torch.float32).to(device).contiguous()
