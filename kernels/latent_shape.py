"""What the decode-step kernel of latent attention is told of a rank's slice: its shape, its weights in the kernel's
layouts, the bytes of a step."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from workbench.decode.fp8 import BLOCK
from workbench.errors import InputError
from workbench.kernels import mxfp4_tiles
from workbench.kernels.fp8_tiles import UNIT_BYTES as FP8_UNIT_BYTES

Extents = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LatentShape:
    """One tensor-parallel rank's slice of an MLA mixture-of-experts decoder (DeepSeek-V3, GLM-5.2) as the kernel takes
    it: ``heads``, widths of experts and ``vocab`` are the rank's.

    The first ``dense_layers`` layers have a dense FFN, the others ``experts`` routed ones chosen by sigmoid scores plus
    a correction, times ``factor``, beside one shared expert. ``owners``: the layers, counted from 0 and rising, that
    own a DSA indexer. ``dense_inter``, ``index_dim`` and ``index_heads`` may be 0 where no layer needs them. Raises
    InputError that names the field.
    """

    layers: int
    hidden: int
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    index_dim: int
    index_heads: int
    experts: int
    top_k: int
    inter: int
    shared_inter: int
    dense_layers: int
    dense_inter: int
    vocab: int
    owners: tuple[int, ...]
    eps: float = 1e-5
    factor: float = 2.5

    def __post_init__(self) -> None:
        for name, value, multiple, needed in (
            ("layers", self.layers, 1, True),
            ("hidden", self.hidden, 512, True),
            ("heads", self.heads, 1, True),
            ("q_lora", self.q_lora, 128, True),
            ("nope", self.nope, 16, True),
            ("v_dim", self.v_dim, 16, True),
            ("heads * v_dim", self.heads * self.v_dim, 128, True),
            ("index_dim", self.index_dim, 32, bool(self.owners)),
            ("index_heads", self.index_heads, 1, bool(self.owners)),
            ("experts", self.experts, 8, True),
            ("inter", self.inter, 64, True),
            ("shared_inter", self.shared_inter, 128, True),
            ("dense_inter", self.dense_inter, 128, self.dense_layers > 0),
            ("vocab", self.vocab, 16, True),
        ):
            if value < 0 or value % multiple or (needed and not value):
                raise InputError(f"{name} must be a positive multiple of {multiple}, not {value}")
        if self.kv_lora != 512 or self.rope != 64:
            raise InputError(f"kv_lora and rope must be 512 and 64, not {self.kv_lora} and {self.rope}")
        if 0 < self.index_dim < self.rope:
            raise InputError(f"index_dim must be at least rope ({self.rope}), not {self.index_dim}")
        if self.experts > 512:
            raise InputError(f"experts must be at most 512, not {self.experts}")
        if not 0 < self.top_k <= min(self.experts, 8):
            raise InputError(f"top_k must be 1 to {min(self.experts, 8)}, not {self.top_k}")
        if self.top_k * self.inter > 32 * mxfp4_tiles.UNIT_K:
            raise InputError(f"inter must be at most {2048 // self.top_k} with top_k {self.top_k}, not {self.inter}")
        if not 0 <= self.dense_layers < self.layers:
            raise InputError(f"dense_layers must be 0 to {self.layers - 1}, not {self.dense_layers}")
        if list(self.owners) != sorted({layer for layer in self.owners if 0 <= layer < self.layers}):
            raise InputError(f"owners must be rising layers 0 to {self.layers - 1}, not {list(self.owners)}")

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers

    @property
    def latent(self) -> int:
        """Numbers that a position leaves in the cache of a layer: the latent and the rotated shared key."""
        return self.kv_lora + self.rope

    @property
    def query_rows(self) -> int:
        """Rows of the query up-projection, head-major."""
        return self.heads * (self.nope + self.rope)

    @property
    def head_rows(self) -> int:
        """Rows of the indexer's head weights, padded to whole tiles."""
        return -(-self.index_heads // 16) * 16 if self.index_dim else 0

    def dense(self, layer: int) -> bool:
        """Whether ``layer`` has a dense FFN."""
        return layer < self.dense_layers

    def feed_inter(self, layer: int) -> int:
        """Width of the FFN that always runs: the dense one, or the shared expert."""
        return self.dense_inter if self.dense(layer) else self.shared_inter

    def a_rows(self, layer: int) -> int:
        """Rows of what is multiplied with the layer's input, merged."""
        owned = self.index_dim + self.head_rows if layer in self.owners else 0
        return self.q_lora + self.latent + owned

    def q_b_rows(self, layer: int) -> int:
        """Rows of what is multiplied with the low-rank query, merged."""
        return self.query_rows + (self.index_heads * self.index_dim if layer in self.owners else 0)

    def layer_bytes(self, layer: int) -> dict[str, int]:
        """Weight bytes that ``layer`` cannot avoid at one token, in checkpoint form: FP8 with an fp32 scale a block,
        MXFP4 of the chosen experts, the absorbed halves and the router bf16. (The kernel's FP8 tiles repeat scales:
        2064 bytes for 2048 values.)"""
        h, owner, feed = self.hidden, layer in self.owners, self.feed_inter(layer)
        sizes = {
            "a": _fp8(self.q_lora, h) + _fp8(self.latent, h),
            "q_b": _fp8(self.query_rows, self.q_lora),
            "uk": 2 * self.heads * self.kv_lora * self.nope,
            "uv": 2 * self.heads * self.kv_lora * self.v_dim,
            "out": _fp8(h, self.heads * self.v_dim),
            "norms": 2 * (2 * h + self.q_lora + self.kv_lora),
            "feed_up": 2 * _fp8(feed, h),
            "feed_down": _fp8(h, feed),
        }
        if owner:
            sizes["a"] += _fp8(self.index_dim, h) + _fp8(self.index_heads, h)
            sizes["q_b"] += _fp8(self.index_heads * self.index_dim, self.q_lora)
            sizes["norms"] += 4 * 2 * self.index_dim
        if not self.dense(layer):
            expert = h * self.inter * mxfp4_tiles.UNIT_BYTES // 1024
            sizes |= {
                "router": 2 * self.experts * h + 4 * self.experts,
                "gate_up": 2 * self.top_k * expert,
                "down": self.top_k * expert,
            }
        return sizes

    def head_bytes(self) -> int:
        """Bytes of the output head and its norm (bf16)."""
        return 2 * self.vocab * self.hidden + 2 * self.hidden

    def cache_bytes(self, position: int) -> int:
        """Bytes of cached latents that a step at ``position`` reads (bf16). The indexer's keys are only written: the
        choice among up to as many positions as it keeps is all of them."""
        return self.layers * position * 2 * self.latent

    def step_bytes(self, position: int) -> int:
        """Bytes a step at ``position`` cannot avoid reading."""
        layers = sum(sum(self.layer_bytes(layer).values()) for layer in range(self.layers))
        return layers + self.head_bytes() + self.cache_bytes(position) + 2 * self.hidden


def _fp8(rows: int, columns: int) -> int:
    """Bytes of a block FP8 matrix with its scales."""
    return rows * columns + 4 * -(-rows // BLOCK) * -(-columns // BLOCK)


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """One layer in the kernel's layouts. FP8 by ``fp8_tiles``, bf16 by ``persistent_layout.pack_matrix``, MXFP4 by
    ``mxfp4_tiles.pack_tiles``.

    ``a``: q_a, kv_a, where the layer owns an indexer also its key and its head weights (rows padded to 16); ``q_b``:
    the query up-projection, then the indexer's; ``uk`` of [heads * kv_lora, nope]; ``uv`` of [heads * v_dim, kv_lora].
    ``index_norm`` fp32 weight and bias, None without an indexer; ``router`` bf16 [experts, hidden], ``correction``,
    ``gate_up``, ``down`` None in a dense layer; ``feed_up`` and ``feed_down``: the shared expert or the dense FFN.
    """

    a: torch.Tensor
    q_b: torch.Tensor
    uk: torch.Tensor
    uv: torch.Tensor
    out: torch.Tensor
    attention_norm: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    index_norm: torch.Tensor | None
    ffn_norm: torch.Tensor
    router: torch.Tensor | None
    correction: torch.Tensor | None
    gate_up: torch.Tensor | None
    down: torch.Tensor | None
    feed_up: torch.Tensor
    feed_down: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """A rank's slice in the kernel's layouts; ``embedding`` bf16 [vocab, hidden], ``head`` bf16 tiles."""

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    layers: tuple[LatentLayer, ...]


def expected_layer(shape: LatentShape, layer: int) -> dict[str, Extents | None]:
    """Type and extents of every field of a LatentLayer; None where the layer has none."""
    h, i, e, feed = shape.hidden, shape.inter, shape.experts, shape.feed_inter(layer)
    owner, routed = layer in shape.owners, not shape.dense(layer)
    bf16, fp32, u8 = torch.bfloat16, torch.float32, torch.uint8
    up, down = h // 64 * mxfp4_tiles.UNIT_BYTES, i // 64 * mxfp4_tiles.UNIT_BYTES
    return {
        "a": (u8, (shape.a_rows(layer) // 16, h // 128, FP8_UNIT_BYTES)),
        "q_b": (u8, (shape.q_b_rows(layer) // 16, shape.q_lora // 128, FP8_UNIT_BYTES)),
        "uk": (bf16, (shape.heads * shape.kv_lora // 16, shape.nope // 16, 32, 8)),
        "uv": (bf16, (shape.heads * shape.v_dim // 16, shape.kv_lora // 16, 32, 8)),
        "out": (u8, (h // 16, shape.heads * shape.v_dim // 128, FP8_UNIT_BYTES)),
        "attention_norm": (bf16, (h,)),
        "q_norm": (bf16, (shape.q_lora,)),
        "kv_norm": (bf16, (shape.kv_lora,)),
        "index_norm": (fp32, (2, shape.index_dim)) if owner else None,
        "ffn_norm": (bf16, (h,)),
        "router": (bf16, (e, h)) if routed else None,
        "correction": (fp32, (e,)) if routed else None,
        "gate_up": (u8, (e, i // 8, up)) if routed else None,
        "down": (u8, (e, h // 16, down)) if routed else None,
        "feed_up": (u8, (feed // 8, h // 128, FP8_UNIT_BYTES)),
        "feed_down": (u8, (h // 16, feed // 128, FP8_UNIT_BYTES)),
    }


def expected_model(shape: LatentShape) -> dict[str, Extents]:
    """Type and extents of the fields of LatentWeights that belong to no layer."""
    h = shape.hidden
    return {
        "embedding": (torch.bfloat16, (shape.vocab, h)),
        "head": (torch.bfloat16, (shape.vocab // 16, h // 16, 32, 8)),
        "final_norm": (torch.bfloat16, (h,)),
    }


def check_weights(shape: LatentShape, weights: LatentWeights, device: torch.device) -> None:
    """Raise InputError, naming layer and tensor, unless ``weights`` are what the kernel of ``shape`` reads."""
    for name, wanted in expected_model(shape).items():
        check_tensor(name, getattr(weights, name), wanted, device)
    if len(weights.layers) != shape.layers:
        raise InputError(f"layers must be {shape.layers}, not {len(weights.layers)}")
    for index, layer in enumerate(weights.layers):
        for name, extents in expected_layer(shape, index).items():
            tensor: torch.Tensor | None = getattr(layer, name)
            if (tensor is None) != (extents is None):
                raise InputError(f"layer {index}: {name} must {'be there' if extents else 'be None'}")
            if tensor is not None and extents is not None:
                check_tensor(f"layer {index}: {name}", tensor, extents, device)


def check_tensor(name: str, tensor: torch.Tensor, wanted: Extents, device: torch.device) -> None:
    """Raise InputError, naming the tensor, unless it is contiguous, aligned to 16 bytes and as ``wanted``."""
    dtype, extents = wanted
    if tensor.dtype != dtype or tuple(tensor.shape) != extents or tensor.device != device or not tensor.is_contiguous():
        raise InputError(
            f"{name} must be contiguous {dtype} {list(extents)} on {device}, "
            f"not {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    if tensor.data_ptr() % 16:
        raise InputError(f"{name} must be 16-byte aligned")


def tensors_of(layer: LatentLayer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a layer has, by field."""
    for field in fields(LatentLayer):
        tensor: torch.Tensor | None = getattr(layer, field.name)
        if tensor is not None:
            yield field.name, tensor


def weight_bytes(weights: LatentWeights) -> int:
    """Bytes all weights take in memory."""
    whole = weights.embedding.nbytes + weights.head.nbytes + weights.final_norm.nbytes
    return int(whole + sum(tensor.nbytes for layer in weights.layers for _, tensor in tensors_of(layer)))
