"""One tensor-parallel rank's slice of a model, as a model of its own: what one GPU of ``tp`` holds and computes.

Splits follow workbench/decode/tensors.py (SGLang 0.5): heads, experts' widths, vocabulary are divided; low-rank
projections, the indexer, routers and norms stay whole. A slice's outputs are partial sums; on one GPU nothing adds
them up, and a stand-in of stated length takes the place of the exchange (``[engine] collective_us``). Tokens are those
of the slice's share of the vocabulary.
"""

from workbench.decode.spec import GQA, MLA, GatedDelta, ModelSpec
from workbench.errors import InputError


def rank_slice(spec: ModelSpec, tp: int) -> ModelSpec:
    """Return what one of ``tp`` equal ranks runs of ``spec``, without the drafters; ``spec`` itself where tp is 1.

    Its byte model at tp 1 equals the whole model's at ``tp`` (tests/decode/test_rank.py). A model with a DSA indexer
    is cut to as many positions as the indexer selects, because the selection itself is not run.
    Raises InputError, naming the field, where a size does not divide.
    """
    if tp == 1:
        return spec
    if spec.linear is not None:
        raise InputError(f"{spec.name}: linear: a rank slice of gated delta layers is not built", hint="use tp = 1")
    changes: dict[str, object] = {"name": f"{spec.name} tp{tp}", "mtp": None, "dflash": None}
    changes["vocab"] = _part(spec, "vocab", spec.vocab, tp)
    if spec.dense_inter is not None:
        changes["dense_inter"] = _part(spec, "dense_inter", spec.dense_inter, tp)
    if spec.moe is not None:
        inter = {"inter": _part(spec, "moe.inter", spec.moe.inter, tp)}
        if spec.moe.shared_inter is not None:
            inter["shared_inter"] = _part(spec, "moe.shared_inter", spec.moe.shared_inter, tp)
        changes["moe"] = spec.moe.model_copy(update=inter)
    changes["attention"] = _attention(spec, "attention", spec.attention, tp)
    if spec.sliding is not None:
        changes["sliding"] = _attention(spec, "sliding", spec.sliding, tp)
    if isinstance(spec.attention, MLA) and spec.attention.indexer is not None:
        changes["max_positions"] = min(spec.max_positions, spec.attention.indexer.top_k)
    return spec.model_copy(update=changes)


def first_layers(spec: ModelSpec, count: int) -> ModelSpec:
    """Return the first ``count`` layers of ``spec``, without the drafters. Raises InputError where it has fewer."""
    if not 0 < count <= spec.layers:
        raise InputError(f"layers: {count} is not 1 to {spec.layers}, what {spec.name} has")
    changes: dict[str, object] = {"mixers": spec.mixers[:count], "mtp": None, "dflash": None}
    changes["dense_first"] = min(spec.dense_first, count)
    if isinstance(spec.attention, MLA) and spec.attention.indexer is not None:
        indexer = spec.attention.indexer
        owners = sum(indexer.owned_by(layer) for layer in range(count))
        owned = indexer.model_copy(update={"layers": owners}) if owners else None
        changes["attention"] = spec.attention.model_copy(update={"indexer": owned})
    return spec.model_copy(update=changes)


def _attention(spec: ModelSpec, field: str, shape: GQA | MLA | GatedDelta, tp: int) -> GQA | MLA:
    if isinstance(shape, GatedDelta):
        raise InputError(f"{spec.name}: {field}: a rank slice of gated delta layers is not built", hint="use tp = 1")
    heads = _part(spec, f"{field}.heads", shape.heads, tp)
    if isinstance(shape, MLA):
        return shape.model_copy(update={"heads": heads})
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise InputError(f"{spec.name}: tp={tp} neither divides nor is a multiple of {field}.kv_heads={shape.kv_heads}")
    if shape.bias:
        raise InputError(f"{spec.name}: {field}.bias: a rank slice of biased projections is not built", hint="tp = 1")
    return shape.model_copy(update={"heads": heads, "kv_heads": max(1, shape.kv_heads // tp)})


def _part(spec: ModelSpec, field: str, size: int, tp: int) -> int:
    if size % tp:
        raise InputError(f"{spec.name}: tp={tp} does not divide {field}={size}")
    return size // tp
