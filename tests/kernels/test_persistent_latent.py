"""The persistent decode step of latent attention: layouts, bytes, plans and refusals everywhere, the reference against
the workbench's own modules, static facts where NVRTC is, numbers on a GPU."""

import dataclasses
from dataclasses import replace

import pytest
import torch

from workbench.decode.bytes import step_bytes
from workbench.decode.cache import KVCache
from workbench.decode.experts import Experts
from workbench.decode.fp8 import Fp8
from workbench.decode.layers import SwiGLU
from workbench.decode.mla import LatentAttention
from workbench.decode.model import Block, Target
from workbench.decode.precision import load_policy
from workbench.decode.presets import load_preset
from workbench.decode.rank import rank_slice
from workbench.decode.rungs.persistent_latent import step_shape
from workbench.decode.spec import MLA, Indexer, ModelSpec, MoE
from workbench.errors import InputError, UnfitError
from workbench.kernels import (
    fp8_tiles,
    latent_reference,
    mxfp4_cuda,
    mxfp4_tiles,
    nvrtc,
    persistent_latent,
    persistent_latent_bench,
    persistent_layout,
)
from workbench.kernels.graph_capture import capturing
from workbench.kernels.latent_reference import LatentModel, make_caches, reference_step, values_of
from workbench.kernels.latent_shape import LatentShape, LatentWeights, check_weights, weight_bytes
from workbench.kernels.persistent_shape import rope_table

GLM, TINY = persistent_latent_bench.GLM, persistent_latent_bench.TINY
THETA = persistent_latent_bench.THETA
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")


@pytest.fixture(scope="module")
def model() -> LatentModel:
    return latent_reference.random_model(TINY, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def weights(model: LatentModel) -> LatentWeights:
    return latent_reference.pack_model(TINY, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 6200}, "hidden"),
        ({"q_lora": 2000}, "q_lora"),
        ({"kv_lora": 256}, "kv_lora"),
        ({"rope": 32}, "rope"),
        ({"nope": 100}, "nope"),
        ({"v_dim": 24}, "v_dim"),
        ({"heads": 3, "v_dim": 16}, r"heads \* v_dim"),
        ({"index_dim": 48}, "index_dim"),
        ({"experts": 260}, "experts"),
        ({"experts": 520}, "experts must be at most 512"),
        ({"top_k": 9}, "top_k"),
        ({"inter": 320}, "inter must be at most 256"),
        ({"shared_inter": 64}, "shared_inter"),
        ({"dense_inter": 100}, "dense_inter"),
        ({"dense_layers": 78}, "dense_layers"),
        ({"vocab": 19361}, "vocab"),
        ({"owners": (3, 1)}, "owners"),
        ({"owners": (0, 78)}, "owners"),
    ],
)
def test_shapes_are_refused_by_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(GLM, **change)  # type: ignore[arg-type]


def test_the_benchmarks_shape_is_the_rank_slice_of_the_preset() -> None:
    spec = rank_slice(load_preset("glm-5.2"), 8)
    assert isinstance(spec.attention, MLA)
    assert spec.attention.indexer is not None
    assert step_shape(spec) == GLM
    assert len(GLM.owners) == spec.attention.indexer.layers


@pytest.mark.parametrize("context", [0, 512])
def test_step_bytes_are_the_byte_models_but_for_what_the_step_keeps_otherwise(context: int) -> None:
    """The absorbed halves stay bf16; norms of the indexer and corrections are fp32; index keys are not read."""
    spec = load_preset("glm-5.2")
    rows = {
        row.name: row.read_bytes
        for row in step_bytes(spec, load_policy("mxfp4-experts-fp8"), tp=8, context=context).rows
    }
    rows["embedding"] = 2 * GLM.hidden  # a rank's own row, not its even share of one
    halves = 2 * GLM.layers * GLM.heads * GLM.kv_lora * (GLM.nope + GLM.v_dim)
    rows["kv_b_proj"] = halves
    rows["KV cache, indexer keys"] = 0
    corrections = 4 * GLM.experts * GLM.moe_layers
    norms = (4 - 2) * 2 * GLM.index_dim * len(GLM.owners)
    assert GLM.step_bytes(context) == round(sum(rows.values())) + corrections + norms


def test_the_packed_layers_are_the_bytes_of_a_step_and_the_repeated_scales(weights: LatentWeights) -> None:
    """FP8 tiles hold 2064 bytes for 2048 values; all else of the packed slice is what ``layer_bytes`` counts."""
    for index, layer in enumerate(weights.layers):
        counted = TINY.layer_bytes(index)
        expert = TINY.top_k / TINY.experts
        assert layer.uk.nbytes == counted["uk"]
        assert layer.uv.nbytes == counted["uv"]
        for name in ("q_b", "out", "feed_up", "feed_down"):
            assert getattr(layer, name).nbytes == pytest.approx(counted[name], rel=0.01)
        if layer.gate_up is not None and layer.down is not None:
            assert layer.gate_up.nbytes * expert == counted["gate_up"]
            assert layer.down.nbytes * expert == counted["down"]
    assert weight_bytes(weights) > sum(layer.a.nbytes for layer in weights.layers)


def test_scratch_is_the_sum_of_its_parts() -> None:
    """Written out for the true shape on 132 CTAs, so that a part that changes is seen."""
    plan = persistent_latent.make_plan(GLM, 132)
    words = 2 * (2048 + 512 + 64 + 128 + 32) + 8 * 64 + 8 * 12 * 512 + 8 * 16 * 768 + 8 * 256 + 6144 + 6144
    words += 256 + 8 * 256 + 8 * 256 + 8 * 1536 + 32 * 128 + 2 * 132
    assert persistent_latent.scratch_words(GLM, plan) == words
    odd = persistent_latent.scratch_parts(replace(GLM, index_heads=20), replace(plan, grid=130))
    assert odd["a_parts"] == 2 * (2048 + 512 + 64 + 128 + 32)
    assert odd["partials"] == 8 * 16 * 768


def test_plans_fit_and_refuse_by_field() -> None:
    for warps in (8, 16):
        plan = persistent_latent.make_plan(GLM, 132, warps=warps)
        assert plan.stages == persistent_latent.MOST_STAGES
        assert persistent_latent.shared_bytes(GLM, plan) <= 227 * 1024
    with pytest.raises(InputError, match="do not fit"):
        persistent_latent.make_plan(GLM, 132, stages=16)
    refused = ({"warps": 12}, {"in_flight": 40}, {"stages": 2}, {"prefetch_bytes": 8}, {"collective_ns": -1})
    refused = (*refused, {"stamps": True, "lanes": True}, {"leave_out": 4})
    for change in refused:
        with pytest.raises(InputError, match=next(iter(change))):
            replace(plan, **change)
    for grid, what in ((3, "heads"), (17, "row tiles of hidden|gate-up tiles")):
        with pytest.raises(InputError, match=what):
            persistent_latent.make_plan(TINY, grid)


def test_weights_are_checked_by_layer_and_name(weights: LatentWeights) -> None:
    device = torch.device("cpu")
    check_weights(TINY, weights, device)
    first, *rest = weights.layers
    for change, message in (
        ({"out": first.out[:1]}, "layer 0: out must be contiguous"),
        ({"index_norm": None}, "layer 0: index_norm must be there"),
        ({"router": weights.layers[-1].router}, "layer 0: router must be None"),
    ):
        broken = replace(weights, layers=(replace(first, **change), *rest))
        with pytest.raises(InputError, match=message):
            check_weights(TINY, broken, device)
    with pytest.raises(InputError, match="layers must be"):
        check_weights(TINY, replace(weights, layers=weights.layers[:1]), device)


def test_buffers_lie_as_the_kernel_takes_them(weights: LatentWeights) -> None:
    plan = persistent_latent.make_plan(TINY, 16, lanes=True)
    device = torch.device("cpu")
    buffers = persistent_latent.make_buffers(TINY, plan, weights, 32, rope_table(32, 64, THETA), device)
    assert buffers.state.data_ptr() == buffers.words.data_ptr() + 4 * 64
    assert buffers.routing.data_ptr() == buffers.words.data_ptr() + 4 * 68
    assert buffers.sync.data_ptr() == buffers.words.data_ptr()
    assert buffers.scratch.unique().tolist() == [3]
    assert tuple(buffers.lanes.shape) == (16, TINY.layers * 7 + 1, 3)
    table = buffers.table
    assert tuple(table.shape) == (TINY.layers, persistent_latent.TABLE_COLUMNS)
    for index, layer in enumerate(weights.layers):
        for column, field in enumerate(dataclasses.fields(layer)):
            tensor = getattr(layer, field.name)
            assert table[index, column] == (0 if tensor is None else tensor.data_ptr())
        assert table[index, 16] == buffers.latents[index].data_ptr()
    assert table[:, 17].tolist() == [buffers.index_keys[0].data_ptr(), 0, buffers.index_keys[1].data_ptr()]
    assert table[:, 18].tolist() == [0, 0, 1]
    assert table[:, 19].tolist() == [0, 0, 1]


def test_forced_tables_are_checked() -> None:
    good = torch.tensor([[[0, 1], [3, 2]]], dtype=torch.int32)
    persistent_latent.check_forced(TINY, good)
    for bad, message in (
        (good.long(), "int32"),
        (good[:, :1], r"\[rows, 2, 2\]"),
        (torch.full_like(good, 8), "0 to 7"),
        (torch.zeros_like(good), "distinct"),
    ):
        with pytest.raises(InputError, match=message):
            persistent_latent.check_forced(TINY, bad)


def test_packing_keeps_every_matrix(model: LatentModel, weights: LatentWeights) -> None:
    """Parts of merged matrices come back in their order; the router stays as it is, no gain folded in."""
    layer, packed = model.layers[0], weights.layers[0]
    tiles = [TINY.q_lora // 16, TINY.latent // 16, TINY.index_dim // 16, TINY.head_rows // 16]
    assert layer.indexer is not None
    for part, merged in zip((layer.q_a, layer.kv_a, layer.indexer.wk), packed.a.split(tiles), strict=False):
        values, scales = fp8_tiles.unpack_fp8(merged)
        assert torch.equal(values.view(torch.uint8), part.values.view(torch.uint8))
        assert torch.equal(scales, part.scales)
    gate, _, up, _ = fp8_tiles.unpack_gate_up(packed.feed_up)
    assert torch.equal(gate.view(torch.uint8), layer.feed_gate.values.view(torch.uint8))
    assert torch.equal(up.view(torch.uint8), layer.feed_up.values.view(torch.uint8))
    assert torch.equal(persistent_layout.unpack_matrix(packed.uv), layer.uv.flatten(0, 1))
    routed = model.layers[-1].routed
    router = weights.layers[-1].router
    assert routed is not None
    assert router is not None
    assert torch.equal(router, routed.router)


def target_of(shape: LatentShape, model: LatentModel) -> Target:
    """``model`` as the workbench's own decoder, float32. Owners must be the first layers and every second behind."""
    first = shape.dense_layers
    indexer = Indexer(
        heads=shape.index_heads, dim=shape.index_dim, top_k=64, layers=len(shape.owners), first=first, every=2
    )
    spec = ModelSpec(
        name="tiny",
        hidden=shape.hidden,
        vocab=shape.vocab,
        mixers=("full",) * shape.layers,
        attention=MLA(
            heads=shape.heads,
            q_lora=shape.q_lora,
            kv_lora=shape.kv_lora,
            nope_dim=shape.nope,
            rope_dim=shape.rope,
            v_dim=shape.v_dim,
            indexer=indexer,
        ),
        dense_first=first,
        dense_inter=shape.dense_inter,
        moe=MoE(
            experts=shape.experts,
            top_k=shape.top_k,
            inter=shape.inter,
            shared=1,
            shared_inter=shape.shared_inter,
            score="sigmoid",
            factor=shape.factor,
        ),
        rope_theta=THETA,
        norm_eps=shape.eps,
        max_positions=64,
    )
    assert tuple(layer for layer in range(shape.layers) if indexer.owned_by(layer)) == shape.owners
    target = Target(spec).float()
    single = torch.float32

    def put(parameter: torch.Tensor | None, value: torch.Tensor) -> None:
        assert parameter is not None
        assert parameter.shape == value.shape
        parameter.copy_(value)

    with torch.no_grad():
        put(target.embed.weight, model.embedding)
        put(target.norm.weight, model.final_norm)
        put(target.head_weight, model.head)
        for block, layer in zip(target.blocks, model.layers, strict=True):
            assert isinstance(block, Block)
            attention, ffn = block.attention, block.ffn
            assert isinstance(attention, LatentAttention)
            put(block.attention_norm.weight, layer.attention_norm)
            put(block.ffn_norm.weight, layer.ffn_norm)
            put(attention.q_a_norm.weight, layer.q_norm)
            put(attention.kv_a_norm.weight, layer.kv_norm)
            put(attention.uk, layer.uk)
            put(attention.uv, layer.uv)
            for linear, matrix in (
                (attention.q_a, layer.q_a),
                (attention.kv_a, layer.kv_a),
                (attention.q_b, layer.q_b),
                (attention.o, layer.out),
            ):
                put(linear.weight, values_of(matrix, single))
            if layer.indexer is not None:
                assert attention.indexer is not None
                put(attention.indexer.wk.weight, values_of(layer.indexer.wk, single))
                put(attention.indexer.wq_b.weight, values_of(layer.indexer.wq_b, single))
                put(attention.indexer.weights.weight, values_of(layer.indexer.weights, single))
                put(attention.indexer.k_norm.weight, layer.indexer.norm[0])
                put(attention.indexer.k_norm.bias, layer.indexer.norm[1])
            if layer.routed is not None:
                assert isinstance(ffn, Experts)
                put(ffn.router.weight, layer.routed.router)
                put(ffn.correction, layer.routed.correction)
                put(ffn.gate_up, mxfp4_cuda.dequantise(layer.routed.gate_up, layer.routed.gate_up_scales))
                put(ffn.down, mxfp4_cuda.dequantise(layer.routed.down, layer.routed.down_scales))
            feed = ffn.shared if isinstance(ffn, Experts) else ffn
            assert isinstance(feed, SwiGLU)
            gate_up = torch.cat((values_of(layer.feed_gate, single), values_of(layer.feed_up, single)))
            put(feed.gate_up.weight, gate_up)
            put(feed.down.weight, values_of(layer.feed_down, single))
    return target


@pytest.mark.parametrize("forced", [False, True])
def test_the_reference_is_the_workbenchs_own_decoder(model: LatentModel, forced: bool) -> None:
    """Five steps, the cache growing and in float32 on both sides: same logits, experts, latents and index keys."""
    target = target_of(TINY, model)
    table = torch.tensor([[[5, 1], [0, 7]], [[2, 3], [6, 4]]], dtype=torch.int32)
    if forced:
        for number, block in enumerate(target.blocks[TINY.dense_layers :]):
            assert isinstance(block, Block)
            assert isinstance(block.ffn, Experts)
            block.ffn.forced = table[:, number]
    cache: KVCache = target.new_cache(8)
    latents, index_keys = make_caches(TINY, 8, dtype=torch.float32)
    rope = rope_table(8, TINY.rope, THETA)
    for position, token in enumerate((7, 200, 3, 3, 91)):
        scores = target.score(torch.tensor([[token]]), cache)
        cache.length += 1
        row = table[position % 2] if forced else None
        result = reference_step(TINY, model, token, position, latents, index_keys, rope, forced=row)
        assert persistent_latent_bench.relative(scores.logits[0, 0], result.logits) < 1e-5
        assert torch.equal(scores.experts[:, 0], result.routing)
        assert (result.margin == float("inf")) is forced
    for layer, slab in enumerate(cache.layers):
        torch.testing.assert_close(slab.keys[0, 0], latents[layer], rtol=1e-4, atol=1e-4)
        if layer in TINY.owners:
            owner = TINY.owners.index(layer)
            torch.testing.assert_close(slab.values[0, 0], index_keys[owner], rtol=1e-4, atol=1e-4)


def test_every_layer_kind_reaches_the_logits(model: LatentModel) -> None:
    """A change in what each layer's FFN, router or attention multiplies with changes the reference's logits."""

    def logits(changed: LatentModel) -> torch.Tensor:
        caches = make_caches(TINY, 4)
        return reference_step(TINY, changed, 5, 0, *caches, rope_table(4, TINY.rope, THETA)).logits

    plain = logits(model)
    for index, layer in enumerate(model.layers):
        for name in ("attention_norm", "kv_norm", "ffn_norm"):
            doubled = replace(layer, **{name: getattr(layer, name) * 1.5})
            layers = (*model.layers[:index], doubled, *model.layers[index + 1 :])
            assert name == "attention_norm" or not torch.equal(logits(replace(model, layers=layers)), plain)


def test_weights_drawn_in_the_kernels_layouts_are_of_order_one() -> None:
    """No NaN code, outputs of order one for inputs of order one, every tensor as the kernel takes it."""
    torch.manual_seed(0)
    drawn = persistent_latent_bench.random_weights(TINY, "cpu")
    check_weights(TINY, drawn, torch.device("cpu"))
    assert persistent_latent_bench.packed_bytes(TINY) == weight_bytes(drawn)
    last = drawn.layers[-1]
    values, scales = fp8_tiles.unpack_fp8(last.out)
    assert not bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any())
    matrix = values_of(Fp8(values, scales), torch.float64)
    assert float((matrix * matrix).sum(dim=1).mean()) == pytest.approx(1.0, rel=0.1)
    assert last.gate_up is not None
    blocks, exponents = mxfp4_tiles.unpack_tiles(last.gate_up, TINY.hidden, order="halves")
    experts = mxfp4_cuda.dequantise(blocks, exponents)
    assert 0.2 < float((experts * experts).sum(dim=-1).mean()) < 5


def test_as_many_layers_are_timed_as_fit() -> None:
    assert persistent_latent_bench.layers_that_fit(130 << 30) == 78
    fewer = persistent_latent_bench.layers_that_fit(40 << 30)
    assert 20 < fewer < 78
    assert persistent_latent_bench.packed_bytes(persistent_latent_bench.first_layers(fewer)) < 32 << 30
    with pytest.raises(UnfitError, match="four layers need"):
        persistent_latent_bench.layers_that_fit(8 << 30)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_engine_says_so(weights: LatentWeights) -> None:
    with pytest.raises(UnfitError, match="needs an NVIDIA GPU"):
        persistent_latent.LatentEngine(TINY, weights, capacity=16, rope=rope_table(16, 64, THETA))


def test_phases_are_summed_up_by_medians() -> None:
    """Two CTAs, one layer after the first: waiting 2 and 4 us, computing 10 and 30 us in every phase."""
    edges = torch.zeros(2, 2 * 8 + 1, 3, dtype=torch.int64)
    for cta, (wait, work) in enumerate(((2000, 10000), (4000, 30000))):
        start = torch.arange(17) * 100000
        edges[cta] = torch.stack((start, start + wait, start + wait + work), dim=-1)
    rows = persistent_latent_bench.phase_table(edges, 2)
    assert [row["phase"] for row in rows] == [*persistent_latent.PHASES, "head"]
    for row in rows:
        assert row["wait"] == pytest.approx(3.0)
        assert row["compute"] == pytest.approx(20.0)
    assert rows[0]["total"] == pytest.approx(100.0)


def test_marks_are_put_on_one_clock_and_counted_from_the_start() -> None:
    """Two CTAs whose clocks run at 1.5 and 2 ticks a ns from other zeros, a timer of 32 ns steps, two layers."""
    names, phases = persistent_latent.MARKS, len(persistent_latent.PHASES)
    wall = names.index("wall")
    after = torch.arange(len(names)) * 100.0  # ns behind the phase's start
    stamps = torch.zeros(2, 2 * phases + 1, len(names), dtype=torch.int64)
    for cta, (rate, zero) in enumerate(((1.5, 70_000), (2.0, 9_000_000))):
        starts = torch.arange(2 * phases + 1) * 3007.0 + 20 * cta
        stamps[cta] = ((starts[:, None] + after) * rate + zero).round().long()
        stamps[cta, :, wall] = 5_000_000 + (starts // 32 * 32).long()
    stamps[..., names.index("stage")] = 0  # never set
    rows = persistent_latent_bench.mark_table(stamps, 2)
    assert [row["phase"] for row in rows] == list(persistent_latent.PHASES)
    for row in rows:
        assert "stage" not in row
        assert row["answered"] == pytest.approx(0.1, abs=2e-3)
        assert row["published"] == pytest.approx(0.7, abs=2e-3)
        assert row["next"] == pytest.approx(3.007, abs=2e-3)
        # the other's words 200 ns into a phase that starts 2307 ns behind the last publication
        assert row["last_published"] == pytest.approx(3.007 - 0.7 + 0.2 - 0.02, abs=0.05)


@needs_nvrtc
@pytest.mark.parametrize(("warps", "registers"), [(16, 96), (8, 168)])
@pytest.mark.parametrize("name", ["glm", "tiny"])
def test_the_step_compiles_within_its_registers_and_shared_memory(name: str, warps: int, registers: int) -> None:
    """All registers that so many warps leave a thread, and a few spilled words; the kernel asserts TAIL_BYTES."""
    shape, grid = (GLM, 132) if name == "glm" else (TINY, 16)
    cubin = persistent_latent.compile_step(shape, persistent_latent.make_plan(shape, grid, warps=warps))
    assert 0 < cubin.registers <= registers
    assert cubin.spill_bytes <= 256


@needs_nvrtc
def test_the_kernel_refuses_less_shared_memory_than_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tail_bytes`` is at most an alignment or two above the compiler's size: so much less does not compile."""
    plan, exact = persistent_latent.make_plan(TINY, 16), persistent_latent.tail_bytes

    def short(*sizes: LatentShape | int) -> int:
        return exact(*sizes) - 128  # type: ignore[arg-type]

    monkeypatch.setattr(persistent_latent, "tail_bytes", short)
    with pytest.raises(InputError, match="too little shared memory"):
        persistent_latent.compile_step(TINY, plan)


CASES = {case.name: case for case in persistent_latent_bench.cases()}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", sorted(CASES))
def test_steps_equal_float64(name: str) -> None:
    """Outputs poisoned before each step, each step twice with the same bits, caches and argmax compared too."""
    row = persistent_latent_bench.check(CASES[name], seed=3)
    assert row["ok"], row


@pytest.fixture(scope="module")
def engine() -> persistent_latent.LatentEngine:
    generator = torch.Generator("cuda").manual_seed(5)
    packed = latent_reference.pack_model(TINY, latent_reference.random_model(TINY, generator))
    plan = replace(persistent_latent.make_plan(TINY, 16), watchdog_ns=20_000_000)
    rope = rope_table(16, TINY.rope, THETA)
    return persistent_latent.LatentEngine(TINY, packed, capacity=16, rope=rope, plan=plan)


def run_three(engine: persistent_latent.LatentEngine) -> list[torch.Tensor]:
    logits = []
    engine.start(9)
    for _ in range(3):
        engine.logits.fill_(float("nan"))
        engine.step()
        engine.check()
        logits.append(engine.logits.clone())
    return logits


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) and bool(torch.isfinite(a).all()) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_a_sequence_repeats_bit_for_bit(engine: persistent_latent.LatentEngine) -> None:
    first = run_three(engine)
    assert same_bits(first, run_three(engine))
    assert engine.state()[1] == 3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("state", "message"), [((9, 16), "beyond the cache"), ((272, 0), "outside the vocabulary")])
def test_a_state_out_of_range_is_flagged_and_left(
    engine: persistent_latent.LatentEngine, state: tuple[int, int], message: str
) -> None:
    first = run_three(engine)
    latents = engine.buffers.latents.clone()
    engine.buffers.state[:2].copy_(torch.tensor(state, dtype=torch.int32))
    engine.step()
    with pytest.raises(UnfitError, match=message):
        engine.check()
    assert torch.equal(engine.buffers.latents, latents)
    assert same_bits(first, run_three(engine))


@pytest.mark.gpu
@needs_gpu
def test_the_watchdog_ends_a_step_whose_partner_is_missing(engine: persistent_latent.LatentEngine) -> None:
    """One CTA fewer than the kernel counts on: the others give up, and a reset engine goes on as before."""
    first = run_three(engine)
    engine.start(9)
    engine.kernel.launch(
        engine.plan.grid - 1,
        engine.plan.threads,
        torch.cuda.current_stream().cuda_stream,
        engine.arguments,
        cooperative=True,
    )
    with pytest.raises(UnfitError, match="timed out"):
        engine.check()
    assert same_bits(first, run_three(engine))


@pytest.mark.gpu
@needs_gpu
def test_a_captured_step_replays(engine: persistent_latent.LatentEngine) -> None:
    first = run_three(engine)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        engine.step()
    engine.start(9)
    replayed = []
    for _ in range(3):
        graph.replay()
        engine.check()
        replayed.append(engine.logits.clone())
    assert same_bits(first, replayed)
