"""Every Triton kernel with a signature at true shapes: what the cross-compile check builds.

Types are Triton's: ``*bf16`` a pointer, ``i32`` a number; arguments named in ``divisible`` are multiples of 16 at
every true shape, as pointers from torch's allocator are. The rest are compile-time constants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.kernels import (
    attention,
    bf16_experts,
    chain_verify,
    collective,
    fp8_experts,
    live_quant,
    lm_head,
    merge,
    mla,
    mla_project,
    mxfp4_experts,
    nucleus,
    pq_gemm,
    rms_norm,
    roof,
    rope,
    router,
    skinny_gemm,
    swiglu,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel as compiled for one representative launch."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    #: Why this kernel may spill registers; empty: it must not.
    spills: str = ""
    shape: str = field(default="", compare=False)
    #: What the launch caps a thread's registers to; 0: nothing.
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Triton's options of the launch."""
        cap = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **cap}


_EXPERT_TYPES = {
    "w_ptr": "*i32",
    "s_ptr": "*i32",
    "x_ptr": "*bf16",
    "h_ptr": "*bf16",
    "ids_ptr": "*i32",
    "weights_ptr": "*fp32",
    "bias_ptr": "*bf16",
    "base_ptr": "*bf16",
    "y_ptr": "*bf16",
    "partial_ptr": "*fp32",
    "counter_ptr": "*i32",
    "tiles": "i32",
    "chunks": "i32",
    "alpha": "fp32",
    "limit": "fp32",
}


def _expert(
    name: str, kernel: Any, tokens: int, top_k: int, experts: int, tiles: int, chunks: int, shape: str, **flags: bool
) -> Entry:
    half: mxfp4_experts.Half = "down" if kernel is mxfp4_experts.down_kernel else "gate_up"
    config = mxfp4_experts.default_config(tiles, chunks, tokens * top_k, half=half)
    cut = mxfp4_experts.cut(config, tokens, top_k, experts, chunks, True)
    warps, stages, cap = cut.pop("num_warps"), cut.pop("num_stages"), cut.pop("maxnreg", 0)
    del cut["launch_pdl"]
    constants = {**flags, **cut}
    types = {arg: _EXPERT_TYPES[arg] for arg in kernel.arg_names if arg not in constants}
    spills = getattr(mxfp4_experts, "SPILLS", "")
    return Entry(name, kernel, types, constants, (), warps, stages, spills, shape, cap)


def _gqa(name: str, shape: str, tokens: int, kv_heads: int, group: int, dk: int, dv: int, windowed: bool) -> Entry:
    rows = max(16, 1 << (tokens * group - 1).bit_length())
    config = attention.default_config(rows, dk, dv)
    return Entry(
        name,
        attention.gqa_kernel,
        {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr", "sink_ptr"), "*bf16"),
            "kv_len_ptr": "*i32",
            "partial_ptr": "*fp32",
            "counter_ptr": "*i32",
            "capacity": "i32",
            "window": "i32",
            "scale_log2": "fp32",
        },
        {
            "T": tokens,
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "DK": dk,
            "DK_A": 128 if dk == 192 else dk,
            "DK_B": 64 if dk == 192 else 0,
            "DV": dv,
            "ROWS": rows,
            "SPLITS": 16,
            "BLOCK": config.block,
            "CAUSAL": True,
            "WINDOWED": windowed,
            "SINKS": windowed,
            "FUSED": True,
            "OVERLAP": True,
        },
        ("capacity",),
        config.num_warps,
        config.num_stages,
        getattr(attention, "SPILLS", ""),
        shape,
    )


def _mla(name: str, tokens: int, heads: int, top_k: int) -> Entry:
    return Entry(
        name,
        mla.mla_kernel,
        {
            **dict.fromkeys(("q_ptr", "cache_ptr", "o_ptr"), "*bf16"),
            **dict.fromkeys(("kv_len_ptr", "indices_ptr", "counter_ptr"), "*i32"),
            "partial_ptr": "*fp32",
            "scale_log2": "fp32",
        },
        {
            "T": tokens,
            "HEADS": heads,
            "RANK": 512,
            "ROPE": 64,
            "ROWS": 16,
            "SPLITS": 64,
            "BLOCK": mla.MlaConfig().block,
            "TOPK": top_k,
            "FUSED": True,
            "OVERLAP": True,
        },
        (),
        4,
        2,
        getattr(mla, "SPILLS", ""),
        f"GLM-5.2 TP8, T={tokens}" + (f", top {top_k}" if top_k else ""),
    )


def _merge(name: str, splits: int) -> Entry:
    return Entry(
        name,
        merge.merge_kernel,
        {"partial_ptr": "*fp32", "sink_ptr": "*bf16", "o_ptr": "*bf16"},
        {
            "T": 1,
            "KV_HEADS": 0,
            "GROUP": 0,
            "HEADS": 8,
            "PER_TOKEN": False,
            "ROWS": 16,
            "SPLITS": splits,
            "S_WIDE": 1 << (splits - 1).bit_length(),
            "D": 512,
            "COLUMNS": merge.COLUMNS,
            "SINKS": False,
            "OVERLAP": True,
        },
        (),
        4,
        1,
        getattr(merge, "SPILLS", ""),
        f"GLM-5.2 TP8, T=1, {splits} parts",
    )


_SKINNY_TYPES = {
    "w_scale_ptr": "*fp32",
    "x_scale_ptr": "*fp32",
    "bias_ptr": "*bf16",
    "residual_ptr": "*bf16",
    "base_ptr": "*bf16",
    "h_ptr": "*bf16",
    "y_ptr": "*bf16",
    "correction_ptr": "*fp32",
    "ids_ptr": "*i32",
    "weights_ptr": "*fp32",
    "logits_ptr": "*fp32",
    "tokens_ptr": "*i32",
    "lse_ptr": "*fp32",
    "rng_ptr": "*i64",
    "partial_ptr": "*fp32",
    "counter_ptr": "*i32",
    "forced_ptr": "*i32",
    "kv_len_ptr": "*i32",
    "rows": "i32",
    "columns": "i32",
    "period": "i32",
    "factor": "fp32",
    "alpha": "fp32",
    "limit": "fp32",
    "inverse_temperature": "fp32",
}


def _skinny(
    name: str, module: Any, kernel: Any, tokens: int, rows: int, columns: int, shape: str, config: Any, **constants: Any
) -> Entry:
    fp8 = kernel is skinny_gemm.skinny_fp8_kernel
    cut = skinny_gemm.cut(config, tokens, columns // (128 if fp8 else 64), True)
    warps, stages = cut.pop("num_warps"), cut.pop("num_stages")
    del cut["launch_pdl"]
    element = "*fp8e4nv" if fp8 else "*bf16"
    types = {**_SKINNY_TYPES, "w_ptr": element, "x_ptr": element}
    constants = {key: value for key, value in {**cut, **constants}.items() if key in kernel.arg_names}
    types = {arg: types[arg] for arg in kernel.arg_names if arg not in constants}
    return Entry(
        name, kernel, types, constants, ("rows", "columns"), warps, stages, getattr(module, "SPILLS", ""), shape
    )


def _dense(name: str, kernel: Any, tokens: int, rows: int, columns: int, shape: str) -> Entry:
    fp8 = kernel is skinny_gemm.skinny_fp8_kernel
    config = skinny_gemm.default_config(rows, columns // (128 if fp8 else 64))
    flags = {"BIAS": True, "RESIDUAL": True, "OUT_BF16": True}
    return _skinny(name, skinny_gemm, kernel, tokens, rows, columns, shape, config, **flags)


def _bf16_expert(name: str, kernel: Any, tokens: int, top_k: int, rows: int, shape: str, **flags: bool) -> Entry:
    columns = {2880: 2880, 768: 2048, 2048: 768}[rows]
    config = bf16_experts.default_config(rows, columns)
    pairs = {"TOPK": top_k, "PAIRS": 1 << (tokens * top_k - 1).bit_length()}
    return _skinny(name, bf16_experts, kernel, tokens, rows, columns, shape, config, **pairs, **flags)


def _router(name: str, tokens: int, experts: int, hidden: int, top_k: int, mode: int, shape: str) -> Entry:
    return _skinny(
        name, router, router.router_kernel, tokens, experts, hidden, shape, router.default_config(hidden // 64),
        TOPK=top_k, K_WIDE=1 << (top_k - 1).bit_length(), T_WIDE=1 << (tokens - 1).bit_length(),
        E_WIDE=1 << (experts - 1).bit_length(), MODE=mode, RENORMALISE=True, BIAS=mode == 1, FORCED=mode == 2,
    )  # fmt: skip


def _head(name: str, tokens: int, sample: bool, logits: bool) -> Entry:
    config = lm_head.default_config(tokens)
    return _skinny(
        name, lm_head, lm_head.lm_head_kernel, tokens, 201088, 2880, f"gpt-oss, T={tokens}",
        skinny_gemm.SkinnyConfig(config.kw, config.rw, config.r, 1, config.unroll),
        SAMPLE=sample, LOGITS=logits, LSE=sample, PROGRAMS=config.programs,
        PICK=min(config.pick, 1 << (config.programs - 1).bit_length()),
    )  # fmt: skip


def _norm(name: str, quantise: bool) -> Entry:
    return Entry(
        name,
        rms_norm.rms_norm_kernel,
        {
            **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr"), "*bf16"),
            "q_ptr": "*fp8e4nv",
            "scale_ptr": "*fp32",
            "hidden": "i32",
            "eps": "fp32",
        },
        {"BLOCK": 8192, "RESIDUAL": True, "WRITE_Y": True, "QUANTISE": quantise, "POWER_OF_2": False, "OVERLAP": True},
        ("hidden",),
        rms_norm.NormConfig().num_warps,
        2,
        getattr(rms_norm, "SPILLS", ""),
        "GLM-5.2, hidden 6144",
    )


def _fused(name: str, split: int) -> Entry:
    config = live_quant.NAIVE
    return Entry(
        name,
        live_quant.fused_kernel,
        {
            "w_ptr": "*fp8e4nv",
            "w_scale_ptr": "*fp32",
            "x_ptr": "*bf16",
            "bias_ptr": "*bf16",
            "residual_ptr": "*bf16",
            "y_ptr": "*bf16",
            "partial_ptr": "*fp32",
            "counter_ptr": "*i32",
            "rows": "i32",
            "columns": "i32",
        },
        {
            "T": 1,
            "TM": 16,
            "BLOCK": config.block,
            "SPLIT": split,
            "POWER_OF_2": False,
            "BIAS": False,
            "RESIDUAL": False,
        },
        ("rows", "columns"),
        config.num_warps,
        config.num_stages,
        getattr(live_quant, "SPILLS", ""),
        "GLM-5.2 q_a + kv_a, T=1",
    )


def _pq(name: str, tokens: int) -> Entry:
    config = pq_gemm.default_config(6144)
    pointers = ("x_ptr", "bias_ptr", "residual_ptr", "y_ptr")
    return Entry(
        name,
        pq_gemm.pq_gemm_kernel,
        {
            "w_ptr": "*fp8e4nv",
            "w_scale_ptr": "*fp32",
            **dict.fromkeys(pointers, "*bf16"),
            "partial_ptr": "*fp32",
            "counter_ptr": "*i32",
            **dict.fromkeys(("rows", "columns", "blocks"), "i32"),
        },
        {
            "T": tokens,
            "TM": 16,
            "BLOCK": config.block,
            "SPLIT": 48 // config.groups,
            "GROUPS": config.groups,
            "POWER_OF_2": False,
            "BIAS": False,
            "RESIDUAL": False,
        },
        ("rows", "columns"),
        config.num_warps,
        config.num_stages,
        getattr(pq_gemm, "SPILLS", ""),
        f"GLM-5.2 q_a + kv_a, T={tokens}",
    )


def _fp8_expert(name: str, kernel: Any, tokens: int, rows: int, columns: int) -> Entry:
    config = fp8_experts.default_config(rows, columns)
    cut = skinny_gemm.cut(config, tokens, columns // 128, True)
    warps, stages = cut.pop("num_warps"), cut.pop("num_stages")
    del cut["launch_pdl"]
    pairs = 8 * tokens
    constants = {**cut, "TOPK": 8, "PAIRS": 1 << (pairs - 1).bit_length(), "BASE": True}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {
        **_SKINNY_TYPES,
        **dict.fromkeys(("w_ptr", "x_ptr", "h_ptr"), "*fp8e4nv"),
        **dict.fromkeys(("x_scale_ptr", "h_scale_ptr"), "*fp32"),
    }
    if kernel is fp8_experts.gate_up_kernel:
        types["h_ptr"] = "*bf16"
    types = {arg: types[arg] for arg in kernel.arg_names if arg not in constants}
    shape = f"GLM-5.2 TP8, T={tokens}"
    return Entry(name, kernel, types, constants, ("rows", "columns"), warps, stages, "", shape)


def _per_head(name: str, rows: int, columns: int, rope: int) -> Entry:
    return Entry(
        name,
        mla_project.mla_absorb_kernel,
        {
            **dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*bf16"),
            "table_ptr": "*fp32",
            "kv_len_ptr": "*i32",
            "x_token": "i32",
            "rows": "i32",
        },
        {
            "T": 1,
            "TM": 16,
            "HEADS": 8,
            "K": columns,
            "BLOCK": mla_project.ROWS,
            "STEP": 64,
            "ROPE": rope,
            "OVERLAP": True,
        },
        ("x_token", "rows"),
        4,
        3,
        shape="GLM-5.2 TP8, T=1",
    )


ENTRIES: tuple[Entry, ...] = (
    Entry(
        "read_roof",
        roof.read_roof_kernel,
        {"buffer_ptr": "*i32", "out_ptr": "*i32", "n": "i64"},
        {"BLOCK": 8192},
        ("n",),
        8,
        spills=roof.SPILLS,
        shape="8 GiB",
    ),
    _expert("gate_up_t1", mxfp4_experts.gate_up_kernel, 1, 4, 32, 360, 45, "gpt-oss, T=1", GPTOSS=True, BIAS=True),
    _expert("gate_up_t16", mxfp4_experts.gate_up_kernel, 16, 4, 32, 360, 45, "gpt-oss, T=16", GPTOSS=True, BIAS=True),
    _expert(
        "gate_up_rank", mxfp4_experts.gate_up_kernel, 1, 8, 256, 32, 96, "GLM-5.2 TP8, T=1", GPTOSS=False, BIAS=False
    ),
    _expert("down_t1", mxfp4_experts.down_kernel, 1, 4, 32, 180, 45, "gpt-oss, T=1", BIAS=True, BASE=True),
    _expert("down_t16", mxfp4_experts.down_kernel, 16, 4, 32, 180, 45, "gpt-oss, T=16", BIAS=True, BASE=True),
    _expert("down_rank", mxfp4_experts.down_kernel, 1, 8, 256, 384, 4, "GLM-5.2 TP8, T=1", BIAS=False, BASE=False),
    _bf16_expert("bf16_gate_up_t1", bf16_experts.gate_up_kernel, 1, 4, 2880, "gpt-oss, T=1", GPTOSS=True, BIAS=True),
    _bf16_expert("bf16_gate_up_t8", bf16_experts.gate_up_kernel, 8, 8, 768, "Qwen3-30B, T=8", GPTOSS=False, BIAS=False),
    _bf16_expert("bf16_down_t1", bf16_experts.down_kernel, 1, 4, 2880, "gpt-oss, T=1", BIAS=True, BASE=True),
    _bf16_expert("bf16_down_t8", bf16_experts.down_kernel, 8, 8, 2048, "Qwen3-30B, T=8", BIAS=False, BASE=True),
    _gqa("gqa_t1", "gpt-oss full, T=1", 1, 8, 8, 64, 64, False),
    _gqa("gqa_window_t1", "gpt-oss sliding, T=1", 1, 8, 8, 64, 64, True),
    _gqa("gqa_t16", "Qwen3-30B, T=16", 16, 4, 8, 128, 128, False),
    _gqa("gqa_mimo_t8", "MiMo TP8 sliding, T=8", 8, 1, 16, 192, 128, True),
    _mla("mla_t1", 1, 8, 0),
    _mla("mla_t6_chosen", 6, 8, 2048),
    _merge("mla_merge", 129),
    _norm("rms_norm", False),
    _norm("rms_norm_quantise", True),
    Entry(
        "rope_write",
        rope.rope_kernel,
        {
            **dict.fromkeys(("qkv_ptr", "q_norm_ptr", "k_norm_ptr", "q_ptr", "k_ptr", "v_ptr"), "*bf16"),
            "table_ptr": "*fp32",
            "kv_len_ptr": "*i32",
            "capacity": "i32",
            "eps": "fp32",
            "v_scale": "fp32",
        },
        {
            "T": 1,
            "HEADS": 32,
            "KV_HEADS": 4,
            "DK": 128,
            "DV": 128,
            "WIDE": 128,
            "ROT": 128,
            "HALF": 64,
            "INTERLEAVED": False,
            "NORM": True,
            "OVERLAP": True,
        },
        ("capacity",),
        1,
        shape="Qwen3-30B, T=1",
    ),
    Entry(
        "rope_write_mla",
        rope.rope_mla_kernel,
        {
            **dict.fromkeys(("kv_ptr", "q_ptr", "norm_ptr", "cache_ptr", "q_out_ptr"), "*bf16"),
            "table_ptr": "*fp32",
            "kv_len_ptr": "*i32",
            "eps": "fp32",
        },
        {"T": 1, "HEADS": 8, "NOPE": 192, "RANK": 512, "ROPE": 64, "INTERLEAVED": True, "OVERLAP": True},
        (),
        1,
        shape="GLM-5.2 TP8, T=1",
    ),
    Entry(
        "mla_prepare",
        mla_project.prepare_kernel,
        {
            **dict.fromkeys(
                ("low_ptr", "q_norm_ptr", "kv_norm_ptr", "key_weight_ptr", "key_bias_ptr", "q_ptr", "cache_ptr"),
                "*bf16",
            ),
            "index_ptr": "*bf16",
            "table_ptr": "*fp32",
            "kv_len_ptr": "*i32",
            "width": "i32",
            "eps": "fp32",
        },
        {"T": 1, "Q": 2048, "Q_WIDE": 2048, "RANK": 512, "ROPE": 64, "DIM": 128, "OVERLAP": True},
        ("width",),
        4,
        shape="GLM-5.2 TP8, T=1",
    ),
    _per_head("mla_absorb_keys", 512, 192, 64),
    _per_head("mla_absorb_values", 256, 512, 0),
    _fp8_expert("fp8_gate_up_t1", fp8_experts.gate_up_kernel, 1, 256, 6144),
    _fp8_expert("fp8_down_t1", fp8_experts.down_kernel, 1, 6144, 256),
    _fp8_expert("fp8_gate_up_t8", fp8_experts.gate_up_kernel, 8, 256, 6144),
    _fp8_expert("fp8_down_t8", fp8_experts.down_kernel, 8, 6144, 256),
    Entry(
        "swiglu",
        swiglu.swiglu_kernel,
        {"gate_up_ptr": "*bf16", "h_ptr": "*bf16", "inter": "i32"},
        {"BLOCK": swiglu.BLOCK, "OVERLAP": True},
        ("inter",),
        4,
        shape="GLM-5.2 TP8 shared expert",
    ),
    Entry(
        "collective_standin",
        collective.collective_standin_kernel,
        {"out_ptr": "*i64", "nanoseconds": "i32"},
        {},
        (),
        1,
        shape="8 µs",
    ),
    _dense("skinny_bf16_t1", skinny_gemm.skinny_bf16_kernel, 1, 5120, 2880, "gpt-oss qkv, T=1"),
    _dense("skinny_bf16_t16", skinny_gemm.skinny_bf16_kernel, 16, 5120, 2880, "gpt-oss qkv, T=16"),
    _dense("skinny_fp8_t1", skinny_gemm.skinny_fp8_kernel, 1, 2624, 6144, "GLM-5.2 q_a + kv_a, T=1"),
    _dense("skinny_fp8_t16", skinny_gemm.skinny_fp8_kernel, 16, 2624, 6144, "GLM-5.2 q_a + kv_a, T=16"),
    _router("router_gptoss", 1, 128, 2880, 4, 1, "gpt-oss-120b, T=1"),
    _router("router_sigmoid_t8", 8, 384, 6144, 8, 2, "MiMo-V2.5-Pro, T=8"),
    _head("lm_head_greedy_t1", 1, False, False),
    _head("lm_head_sample_t8", 8, True, True),
    _head("lm_head_greedy_t16", 16, False, True),
    _head("lm_head_sample_t16", 16, True, True),
    Entry(
        "nucleus",
        nucleus.nucleus_kernel,
        {
            "logits_ptr": "*fp32",
            "lse_ptr": "*fp32",
            "tokens_ptr": "*i32",
            "rng_ptr": "*i64",
            "partial_ptr": "*fp32",
            "counter_ptr": "*i32",
            "rows": "i32",
            "inverse_temperature": "fp32",
            "top_p": "fp32",
        },
        {"PARTS": 16, "BLOCK": 4096},
        ("rows",),
        8,
        shape="gpt-oss vocabulary",
    ),
    Entry(
        "quantise",
        live_quant.quantise_kernel,
        {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "total": "i32"},
        {"GROUPS": 4, "POWER_OF_2": False},
        (),
        4,
        shape="GLM-5.2, hidden 6144",
    ),
    _fused("live_quant_naive", 1),
    _fused("live_quant_fused", 16),
    _pq("live_quant_pq_t1", 1),
    _pq("live_quant_pq_t8", 8),
    Entry(
        "verify_greedy",
        chain_verify.greedy_kernel,
        dict.fromkeys(("chosen_ptr", "drafts_ptr", "committed_ptr", "count_ptr", "kv_len_ptr"), "*i32"),
        {"T": 8, "WIDE": 8, "CUT": True},
        (),
        1,
        shape="T=8",
    ),
    Entry(
        "decide_greedy",
        chain_verify.decide_kernel,
        {"tokens_ptr": "*i64", **dict.fromkeys(("outcome_ptr", "lengths_ptr", "keep_ptr"), "*i32")},
        {"T": 8, "WIDE": 8, "LENGTHS": 8, "KEEP": True},
        (),
        1,
        shape="T=8",
    ),
    Entry(
        "verify_rejection",
        chain_verify.rejection_kernel,
        {
            **dict.fromkeys(("p_ptr", "p_lse_ptr", "q_ptr", "q_lse_ptr", "partial_ptr"), "*fp32"),
            **dict.fromkeys(("drafts_ptr", "committed_ptr", "count_ptr", "kv_len_ptr", "counter_ptr"), "*i32"),
            "rng_ptr": "*i64",
            "vocab": "i32",
            "p_inverse": "fp32",
            "q_inverse": "fp32",
        },
        {"T": 8, "WIDE": 8, "PARTS": 32, "BLOCK": 2048, "DRAFT_LOGITS": True, "CUT": True},
        ("vocab",),
        4,
        shape="gpt-oss vocabulary, T=8",
    ),
)
