"""Traffic of the KV cache and of recurrent state, by kind of mixer.

Reads are what a step must fetch from before it: the positions that its ``width`` tokens see together. The step's own
keys and values are written, and read back while they are hot, so their reads are not counted.
"""

from dataclasses import dataclass

from workbench.decode.byte_rows import ByteRow
from workbench.decode.precision import Policy, TensorClass
from workbench.decode.spec import GQA, MLA, GatedDelta, ModelSpec
from workbench.decode.tensors import Part


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """What a step asks of the caches: ``passes`` forwards of ``width`` tokens over ``batch`` sequences.

    ``context`` is the number of positions each sequence holds before the step.
    """

    part: Part
    tp: int
    width: int
    batch: int
    context: int
    passes: int = 1

    @property
    def queries(self) -> int:
        """Tokens that attend, over all sequences and passes."""
        return self.width * self.batch * self.passes

    @property
    def seen(self) -> float:
        """Positions an average query sees: the context, and of the step's own tokens those up to itself."""
        return self.context + (self.width + 1) / 2


def target_caches(spec: ModelSpec, policy: Policy, load: CacheLoad) -> list[ByteRow]:
    """Return one row for each kind of cache that the main stack keeps."""
    kinds = [(spec.mixer_spec(layer), mixer == "sliding") for layer, mixer in enumerate(spec.mixers)]
    rows: list[ByteRow] = []
    for shape, windowed in dict.fromkeys(kinds):
        layers = kinds.count((shape, windowed))
        rows += mixer_caches(shape, policy, load, layers=layers, window=spec.window if windowed else None)
    return rows


def mixer_caches(
    shape: GQA | MLA | GatedDelta, policy: Policy, load: CacheLoad, *, layers: int, window: int | None
) -> list[ByteRow]:
    """Return the rows of ``layers`` equal mixers; ``window`` limits what grouped-query attention sees."""
    match shape:
        case GQA():
            return [_gqa(shape, policy, load, layers, window)]
        case MLA():
            return _mla(shape, policy, load, layers)
        case GatedDelta():
            return [_gated_delta(shape, policy, load, layers)]


def selected_positions(context: int, top_k: int, width: int) -> float:
    """Return how many cached positions ``width`` queries read when each picks ``top_k`` of ``context``.

    As with experts, picks are taken as independent and uniform, so this is an upper bound: neighbouring tokens agree.
    """
    if context <= top_k:
        return float(context)
    return context * (1 - (1 - top_k / context) ** width)


def _gqa(shape: GQA, policy: Policy, load: CacheLoad, layers: int, window: int | None) -> ByteRow:
    held = load.context if window is None else min(load.context, window - 1)
    seen = load.seen if window is None else min(load.seen, window)
    width = shape.qk_dim + shape.v_dim
    return _row(
        "KV cache, full" if window is None else f"KV cache, window {window}",
        policy,
        load,
        layers=layers,
        parts=min(load.tp, shape.kv_heads),
        elements=shape.kv_heads * width,
        held=held,
        flops=2 * shape.heads * width * seen * load.queries / load.tp,
    )


def _mla(shape: MLA, policy: Policy, load: CacheLoad, layers: int) -> list[ByteRow]:
    indexer = shape.indexer
    seen = load.seen if indexer is None else min(load.seen, indexer.top_k)
    latent = _row(
        "KV cache, latent",
        policy,
        load,
        layers=layers,
        parts=1,
        elements=shape.kv_lora + shape.rope_dim,
        held=load.context,
        read=None if indexer is None else selected_positions(load.context, indexer.top_k, load.width),
        # absorbed form: scores over latent and rope, values over the latent
        flops=2 * shape.heads * (2 * shape.kv_lora + shape.rope_dim) * seen * load.queries / load.tp,
    )
    if indexer is None:
        return [latent]
    keys = _row(
        "KV cache, indexer keys",
        policy,
        load,
        layers=indexer.layers if load.part == "target" else layers,
        parts=1,
        elements=indexer.dim,
        held=load.context,
        flops=2 * indexer.heads * indexer.dim * load.seen * load.queries,
    )
    return [latent, keys]


def _gated_delta(shape: GatedDelta, policy: Policy, load: CacheLoad, layers: int) -> ByteRow:
    keys, values = shape.k_heads * shape.k_dim, shape.v_heads * shape.v_dim
    state = shape.v_heads * shape.k_dim * shape.v_dim
    parts = min(load.tp, shape.k_heads)
    return _row(
        "recurrent state",
        policy,
        load,
        cls=TensorClass.LINEAR_STATE,
        layers=layers,
        parts=parts,
        elements=state + (shape.conv - 1) * (2 * keys + values),
        held=1,
        written=1,
        # decay, read with k, outer-product update, read with q: 7 operations an element and token
        flops=7 * state * load.queries / parts,
    )


def _row(
    name: str,
    policy: Policy,
    load: CacheLoad,
    *,
    layers: int,
    parts: int,
    elements: int,
    held: float,
    flops: float,
    read: float | None = None,
    written: float | None = None,
    cls: TensorClass = TensorClass.KV_CACHE,
) -> ByteRow:
    """Turn positions of one layer and sequence (``read`` defaults to ``held``) into bytes of one rank."""
    stored = policy.of(cls)
    position = layers * load.batch * elements * stored.bits / 8
    return ByteRow(
        name=name,
        cls=cls,
        part=load.part,
        format=stored.name,
        tp=load.tp,
        parts=parts,
        params=0,
        active_params=0,
        stored_bytes=position * held,
        read_bytes=position * load.passes * (held if read is None else read) / parts,
        written_bytes=position * load.passes * (load.width if written is None else written) / parts,
        flops=layers * flops,
    )
