"""The weights of a model as groups of equal tensors: class, shapes, and how tensor parallelism places them.

Placement follows SGLang 0.5: low-rank down-projections, the DSA indexer, routers, norms and the joints of the
drafters are held whole by every rank; other matrices are split. Key and value projections split only as far as there
are KV heads, so with more ranks than heads several ranks hold the same head.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from workbench.decode.precision import Policy, TensorClass
from workbench.decode.spec import GQA, MLA, DFlash, GatedDelta, Indexer, ModelSpec
from workbench.errors import InputError

Part = Literal["target", "mtp", "dflash"]
# What SGLang builds as ReplicatedLinear or nn.Linear.
REPLICATED = frozenset(
    {
        TensorClass.QKV_A,
        TensorClass.INDEXER,
        TensorClass.INDEXER_KEY,
        TensorClass.ROUTER,
        TensorClass.NORM,
        TensorClass.MTP_PROJ,
        TensorClass.DFLASH_PROJ,
    }
)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Equal sets of tensors, ``copies`` times (once a layer, or once an expert and layer).

    ``matrices`` are (outputs, inputs) and take the class's format, ``vectors`` is a number of elements in the format
    of ``norm`` (biases). ``heads`` caps how many ranks a split can feed (None: any number). ``active`` of the
    ``copies`` take part in one token.
    """

    name: str
    cls: TensorClass
    copies: int
    matrices: tuple[tuple[int, int], ...] = ()
    vectors: int = 0
    heads: int | None = None
    active: int | None = None
    stored: bool = True

    @property
    def unit_params(self) -> int:
        """Parameters of one copy."""
        return sum(outputs * inputs for outputs, inputs in self.matrices) + self.vectors

    @property
    def active_matrix_params(self) -> int:
        """Matrix elements that one token multiplies with: half its operations."""
        unit = sum(outputs * inputs for outputs, inputs in self.matrices)
        return unit * (self.copies if self.active is None else self.active)

    @property
    def params(self) -> int:
        """Parameters of all copies; 0 for a tensor that another group already stores (a tied head)."""
        return self.unit_params * self.copies if self.stored else 0

    @property
    def active_params(self) -> int:
        """Parameters that one token multiplies with."""
        return self.unit_params * (self.copies if self.active is None else self.active)

    def parts(self, tp: int, replicated: Collection[TensorClass] = REPLICATED) -> int:
        """Return into how many different pieces ``tp`` ranks split one copy; 1 means that each holds it whole."""
        if self.cls in replicated:
            return 1
        return tp if self.heads is None else min(tp, self.heads)

    def unit_bytes(self, policy: Policy) -> int:
        """Return the stored bytes of one copy, scales included."""
        stored, plain = policy.of(self.cls), policy.of(TensorClass.NORM)
        payload = sum(stored.matrix_bytes(outputs, inputs) for outputs, inputs in self.matrices)
        return payload + self.vectors * plain.bits // 8


def target_weights(spec: ModelSpec) -> list[WeightGroup]:
    """Return every weight of the main stack, in the order a token meets them."""
    moe_layers, dense_layers = spec.moe_layers, spec.layers - spec.moe_layers
    groups = [_embedding(spec, stored=True)]
    groups += _attention(spec)
    groups += _experts(spec, moe_layers)
    if dense_layers and spec.dense_inter is not None:
        groups.append(_ffn("dense FFN", TensorClass.DENSE_FFN, dense_layers, spec.hidden, spec.dense_inter))
    groups.append(WeightGroup("layer norms", TensorClass.NORM, spec.layers, vectors=2 * spec.hidden))
    groups.append(WeightGroup("final norm", TensorClass.NORM, 1, vectors=spec.hidden))
    groups.append(_head(spec, stored=not spec.tied_head))
    return groups


def mtp_weights(spec: ModelSpec) -> list[WeightGroup]:
    """Return the weights of all MTP modules, and the target's embedding and head that every pass uses."""
    if spec.mtp is None:
        raise InputError(f"{spec.name}: has no mtp section", hint="choose another drafter")
    count, hidden = spec.mtp.modules, spec.hidden
    groups = [_embedding(spec, stored=False)]
    groups.append(WeightGroup("mtp joint", TensorClass.MTP_PROJ, count, ((hidden, 2 * hidden),)))
    mixer = spec.sliding or spec.attention
    groups += mixer_weights(hidden, mixer, count)
    if isinstance(mixer, MLA) and mixer.indexer is not None:
        groups += _indexer(hidden, mixer, mixer.indexer, count)
    dense = spec.mtp.dense_inter or (spec.dense_inter if spec.moe is None else None)
    if dense is not None:
        groups.append(_ffn("dense FFN", TensorClass.DENSE_FFN, count, hidden, dense))
    else:
        groups += _experts(spec, count)
    # two around the layer, one each for hidden state and embedding, one before the head
    groups.append(WeightGroup("mtp norms", TensorClass.NORM, count, vectors=5 * hidden))
    groups.append(_head(spec, stored=False))
    return groups


def dflash_weights(spec: ModelSpec) -> list[WeightGroup]:
    """Return the weights of the DFlash drafter, and the target's embedding and head that every block uses."""
    shape = draft_attention(spec)
    drafter = _dflash(spec)
    hidden, layers = spec.hidden, drafter.layers
    joint = ((hidden, len(drafter.taps) * hidden),)
    groups = [_embedding(spec, stored=False), WeightGroup("dflash joint", TensorClass.DFLASH_PROJ, 1, joint)]
    groups += [
        replace(group, cls=TensorClass.DFLASH) if group.matrices else group
        for group in mixer_weights(hidden, shape, layers)
    ]
    groups.append(_ffn("draft FFN", TensorClass.DFLASH, layers, hidden, drafter.inter))
    groups.append(WeightGroup("draft norms", TensorClass.NORM, layers, vectors=2 * hidden))
    # joint norm, final norm, mask embedding
    groups.append(WeightGroup("draft vectors", TensorClass.NORM, 1, vectors=3 * hidden))
    groups.append(_head(spec, stored=False))
    return groups


def draft_attention(spec: ModelSpec) -> GQA:
    """Return the attention shape of the DFlash drafter's layers; fields it leaves out are the target's."""
    drafter, base = _dflash(spec), spec.attention
    if not isinstance(base, GQA):
        if drafter.heads is None or drafter.kv_heads is None or drafter.qk_dim is None:
            raise InputError(
                f"{spec.name}: dflash.heads, kv_heads and qk_dim are needed: the target's attention is {base.kind}"
            )
        base = GQA(heads=drafter.heads, kv_heads=drafter.kv_heads, qk_dim=drafter.qk_dim, v_dim=drafter.qk_dim)
    return GQA(
        heads=drafter.heads or base.heads,
        kv_heads=drafter.kv_heads or base.kv_heads,
        qk_dim=drafter.qk_dim or base.qk_dim,
        v_dim=drafter.qk_dim or base.v_dim,
        qk_norm=True,
    )


def mixer_weights(hidden: int, mixer: GQA | MLA | GatedDelta, layers: int) -> list[WeightGroup]:
    """Return the weights of ``layers`` equal token mixers, without an indexer and without the layer norms."""
    match mixer:
        case GQA():
            return list(_gqa(hidden, mixer, layers))
        case MLA():
            return list(_mla(hidden, mixer, layers))
        case GatedDelta():
            return list(_gated_delta(hidden, mixer, layers))


def _dflash(spec: ModelSpec) -> DFlash:
    if spec.dflash is None:
        raise InputError(f"{spec.name}: has no dflash section", hint="choose another drafter")
    return spec.dflash


def _attention(spec: ModelSpec) -> list[WeightGroup]:
    groups: list[WeightGroup] = []
    kinds: list[GQA | MLA | GatedDelta] = [spec.mixer_spec(layer) for layer in range(spec.layers)]
    for mixer in dict.fromkeys(kinds):
        groups += mixer_weights(spec.hidden, mixer, kinds.count(mixer))
    if isinstance(spec.attention, MLA) and spec.attention.indexer is not None:
        groups += _indexer(spec.hidden, spec.attention, spec.attention.indexer, spec.attention.indexer.layers)
    return _merged(groups)


def _indexer(hidden: int, shape: MLA, indexer: Indexer, layers: int) -> Iterator[WeightGroup]:
    keys, weights = (indexer.dim, hidden), (indexer.heads, hidden)
    norm = 2 * indexer.dim  # LayerNorm: weight and bias
    yield WeightGroup("indexer wq_b", TensorClass.INDEXER, layers, ((indexer.heads * indexer.dim, shape.q_lora),))
    yield WeightGroup("indexer wk, weights", TensorClass.INDEXER_KEY, layers, (keys, weights), norm)


def _gqa(hidden: int, shape: GQA, layers: int) -> Iterator[WeightGroup]:
    queries = shape.heads * shape.qk_dim
    outputs = shape.heads * shape.v_dim
    gate = outputs if shape.output_gate else 0
    keys, values = shape.kv_heads * shape.qk_dim, shape.kv_heads * shape.v_dim
    bias = int(shape.bias)
    yield WeightGroup("q_proj", TensorClass.QKV, layers, ((queries + gate, hidden),), bias * (queries + gate))
    yield WeightGroup(
        "k_proj, v_proj",
        TensorClass.QKV,
        layers,
        ((keys, hidden), (values, hidden)),
        bias * (keys + values),
        heads=shape.kv_heads,
    )
    yield WeightGroup("o_proj", TensorClass.O_PROJ, layers, ((hidden, outputs),), bias * hidden)
    extras = (2 * shape.qk_dim if shape.qk_norm else 0) + (shape.heads if shape.sinks else 0)
    if extras:
        yield WeightGroup("q and k norms, sinks", TensorClass.NORM, layers, vectors=extras)


def _mla(hidden: int, shape: MLA, layers: int) -> Iterator[WeightGroup]:
    latent = shape.kv_lora + shape.rope_dim
    up = shape.heads * (shape.nope_dim + shape.v_dim)
    yield WeightGroup("q_a, kv_a", TensorClass.QKV_A, layers, ((shape.q_lora, hidden), (latent, hidden)))
    yield WeightGroup(
        "q_b_proj", TensorClass.Q_B, layers, ((shape.heads * (shape.nope_dim + shape.rope_dim), shape.q_lora),)
    )
    yield WeightGroup("kv_b_proj", TensorClass.KV_B, layers, ((up, shape.kv_lora),))
    yield WeightGroup("o_proj", TensorClass.O_PROJ, layers, ((hidden, shape.heads * shape.v_dim),))
    yield WeightGroup("low-rank norms", TensorClass.NORM, layers, vectors=shape.q_lora + shape.kv_lora)


def _gated_delta(hidden: int, shape: GatedDelta, layers: int) -> Iterator[WeightGroup]:
    keys, values = shape.k_heads * shape.k_dim, shape.v_heads * shape.v_dim
    inputs = ((2 * keys + 2 * values, hidden), (2 * shape.v_heads, hidden), (2 * keys + values, shape.conv))
    # A_log and dt_bias a value head; the gated norm runs over one value head
    yield WeightGroup("linear in", TensorClass.LINEAR_IN, layers, inputs, 2 * shape.v_heads, heads=shape.k_heads)
    yield WeightGroup("linear out", TensorClass.LINEAR_OUT, layers, ((hidden, values),), heads=shape.v_heads)
    yield WeightGroup("linear norms", TensorClass.NORM, layers, vectors=shape.v_dim)


def _experts(spec: ModelSpec, layers: int) -> Iterator[WeightGroup]:
    moe = spec.moe
    if moe is None or layers == 0:
        return
    bias = moe.experts if moe.bias else 0
    yield WeightGroup("router", TensorClass.ROUTER, layers, ((moe.experts, spec.hidden),), bias)
    routed = _ffn("routed experts", TensorClass.ROUTED_EXPERTS, moe.experts * layers, spec.hidden, moe.inter)
    yield replace(routed, vectors=2 * moe.inter + spec.hidden if moe.bias else 0, active=moe.top_k * layers)
    if moe.shared:
        width = moe.shared_inter or moe.inter
        yield _ffn("shared experts", TensorClass.SHARED_EXPERTS, moe.shared * layers, spec.hidden, width)


def _ffn(name: str, cls: TensorClass, copies: int, hidden: int, inter: int) -> WeightGroup:
    return WeightGroup(name, cls, copies, ((inter, hidden), (inter, hidden), (hidden, inter)))


def _embedding(spec: ModelSpec, *, stored: bool) -> WeightGroup:
    return WeightGroup("embedding", TensorClass.EMBEDDING, 1, ((spec.vocab, spec.hidden),), active=0, stored=stored)


def _head(spec: ModelSpec, *, stored: bool) -> WeightGroup:
    return WeightGroup("head", TensorClass.HEAD, 1, ((spec.vocab, spec.hidden),), stored=stored)


def _merged(groups: Iterable[WeightGroup]) -> list[WeightGroup]:
    """Add up groups that differ only in the number of copies (full and sliding layers of one shape)."""
    counts: dict[WeightGroup, int] = {}
    for group in groups:
        key = replace(group, copies=1)
        counts[key] = counts.get(key, 0) + group.copies
    return [replace(group, copies=copies) for group, copies in counts.items()]
