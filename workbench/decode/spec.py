"""One description of a decoder-only model: enough to build it, and enough to count its bytes.

It covers GQA (gpt-oss, Qwen3, MiMo), MLA with or without the DSA indexer (DeepSeek, GLM-5.2), gated delta
layers (Qwen3-Next), mixed full and sliding layers, dense first layers, routed and shared experts.
Field names follow the Hugging Face ``config.json`` terms where one exists.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Mixer = Literal["full", "sliding", "linear"]
Activation = Literal["swiglu", "clamped-swiglu"]
Score = Literal["softmax", "sigmoid"]


class Record(BaseModel):
    """A frozen record that refuses unknown keys, so that a typo in a preset is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class GQA(Record):
    """Grouped-query attention. ``heads * qk_dim`` is the width of the query projection."""

    kind: Literal["gqa"] = "gqa"
    heads: PositiveInt
    kv_heads: PositiveInt
    qk_dim: PositiveInt
    v_dim: PositiveInt
    bias: bool = False
    qk_norm: bool = False
    sinks: bool = Field(default=False, description="one learned logit per head that takes part in the softmax only")
    output_gate: bool = Field(
        default=False, description="the query projection also yields a gate of the output's width"
    )
    rope_dim: PositiveInt | None = Field(
        default=None, description="leading numbers of a head that rotate; default: all"
    )
    rope_theta: PositiveFloat | None = Field(default=None, description="rotary base; default: the model's")
    value_scale: PositiveFloat = Field(default=1.0, description="factor on the values, as MiMo has it")

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.rope_dim is not None and (self.rope_dim > self.qk_dim or self.rope_dim % 2):
            raise ValueError(f"rope_dim={self.rope_dim} must be even and at most qk_dim={self.qk_dim}")
        return self


class Indexer(Record):
    """DeepSeek sparse attention's lightweight indexer; ``layers`` of the model own one, the others share.

    Owners are the ``first`` layers and every ``every``-th after them.
    """

    heads: PositiveInt
    dim: PositiveInt
    top_k: PositiveInt = Field(description="context positions kept per query")
    layers: PositiveInt
    first: int = Field(default=0, ge=0, description="leading layers that own one")
    every: PositiveInt = Field(default=1, description="period of the owners behind them: the last layer of each")

    def owned_by(self, layer: int) -> bool:
        """Whether ``layer``, counted from 0, owns an indexer."""
        return layer < self.first or (layer - self.first) % self.every == self.every - 1


class MLA(Record):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank queries, one shared latent KV."""

    kind: Literal["mla"] = "mla"
    heads: PositiveInt
    q_lora: PositiveInt
    kv_lora: PositiveInt
    nope_dim: PositiveInt
    rope_dim: PositiveInt
    v_dim: PositiveInt
    indexer: Indexer | None = None


class GatedDelta(Record):
    """Linear attention with a gated delta rule (Qwen3-Next): constant-size state instead of a KV cache."""

    kind: Literal["gated_delta"] = "gated_delta"
    k_heads: PositiveInt
    v_heads: PositiveInt
    k_dim: PositiveInt
    v_dim: PositiveInt
    conv: PositiveInt


Attention = Annotated[GQA | MLA | GatedDelta, Field(discriminator="kind")]


class MoE(Record):
    """Routed experts (gate, up and down projection each) and optional always-on shared experts."""

    experts: PositiveInt
    top_k: PositiveInt
    inter: PositiveInt
    shared: int = Field(default=0, ge=0)
    shared_inter: PositiveInt | None = Field(default=None, description="width of one shared expert; default: inter")
    bias: bool = False
    score: Score = Field(
        default="softmax", description="sigmoid: chosen by score plus a correction, one expert group (DeepSeek-V3)"
    )
    factor: PositiveFloat = Field(default=1.0, description="factor on the routed experts' weights")
    activation: Activation = Field(
        default="swiglu", description="clamped-swiglu: gpt-oss's gate * sigmoid(1.702 gate) * (up + 1), clamped at 7"
    )

    @model_validator(mode="after")
    def _top_k(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} exceeds experts={self.experts}")
        return self


class Mtp(Record):
    """Multi-token-prediction modules shipped with the model."""

    modules: PositiveInt
    dense_inter: PositiveInt | None = Field(default=None, description="width of its dense FFN; absent: the model's MoE")


class DFlash(Record):
    """A block-diffusion drafter (arXiv 2602.06036): anchor + masks filled in one pass, target features as K/V."""

    layers: PositiveInt
    block: PositiveInt = Field(description="tokens per block, the anchor included")
    window: PositiveInt
    inter: PositiveInt
    taps: tuple[int, ...] = Field(description="target layers whose outputs are injected, counted from 0")
    heads: PositiveInt | None = Field(default=None, description="default: the target's")
    kv_heads: PositiveInt | None = None
    qk_dim: PositiveInt | None = None


class ModelSpec(Record):
    """Shapes of one model. ``mixers`` names the token mixer of every layer, in order.

    ``attention`` describes the ``full`` layers; ``sliding`` (default: the same) the ``sliding`` ones, which see
    ``window`` positions, the current one included; ``linear`` the linear ones.
    """

    name: str
    hidden: PositiveInt
    vocab: PositiveInt
    mixers: tuple[Mixer, ...]
    attention: Attention
    sliding: GQA | None = None
    linear: GatedDelta | None = None
    window: PositiveInt | None = None
    dense_first: int = Field(default=0, ge=0, description="leading layers with a dense FFN instead of experts")
    dense_inter: PositiveInt | None = None
    moe: MoE | None = None
    tied_head: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    max_positions: PositiveInt = 131072
    mtp: Mtp | None = None
    dflash: DFlash | None = None
    shipped: str = Field(default="bf16", description="name of the precision policy the weights are published in")
    source: str = Field(default="", description="where the shapes come from")

    @property
    def layers(self) -> int:
        """Number of layers of the main stack."""
        return len(self.mixers)

    @property
    def moe_layers(self) -> int:
        """Number of layers with routed experts."""
        return self.layers - self.dense_first if self.moe else 0

    def mixer_spec(self, layer: int) -> GQA | MLA | GatedDelta:
        """Return the token mixer's description for ``layer``, counted from 0."""
        mixer = self.mixers[layer]
        if mixer == "linear":
            assert self.linear is not None  # noqa: S101 - guaranteed by the validator
            return self.linear
        return self.sliding or self.attention if mixer == "sliding" else self.attention

    def rope(self, layer: int) -> tuple[int, float]:
        """Return how many numbers of a head rotate in ``layer``, and the base of the angles; (0, base): none."""
        shape = self.mixer_spec(layer)
        if isinstance(shape, GQA):
            return shape.rope_dim or shape.qk_dim, shape.rope_theta or self.rope_theta
        return (shape.rope_dim if isinstance(shape, MLA) else 0), self.rope_theta

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.mixers:
            raise ValueError("mixers: at least one layer is needed")
        if "sliding" in self.mixers and self.window is None:
            raise ValueError("window: needed because some mixers are 'sliding'")
        if "linear" in self.mixers and self.linear is None:
            raise ValueError("linear: needed because some mixers are 'linear'")
        dense_layers = self.dense_first if self.moe else self.layers
        if dense_layers and self.dense_inter is None:
            raise ValueError("dense_inter: needed for the layers with a dense FFN")
        if self.dense_first > self.layers:
            raise ValueError(f"dense_first={self.dense_first} exceeds the {self.layers} layers")
        if self.dflash and max(self.dflash.taps) >= self.layers:
            raise ValueError(f"dflash.taps: layer {max(self.dflash.taps)} does not exist (layers={self.layers})")
        return self
