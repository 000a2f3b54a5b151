"""What ``bench.py`` runs: each kernel at true shapes, with its float64 check and its floor.

Weights and caches come in enough copies that no replay finds them in L2; activations are as hot as in a real step.
"""

from collections.abc import Callable, Iterator

from workbench.kernels import bench_dense, bench_experts, bench_sequence, live_quant
from workbench.kernels.bench_case import Case
from workbench.kernels.bench_experts import GPT_OSS_20B
from workbench.kernels.lm_head import HeadConfig
from workbench.kernels.mxfp4_experts import ExpertConfig

Builder = Callable[[], Case]

#: Few beside the defaults, so that ``--only wide`` stays short.
UP_WIDE = (ExpertConfig(4, 1, 2, 1, 1), ExpertConfig(4, 1, 1, 1, 4))
DOWN_WIDE = (ExpertConfig(8, 1, 2, 1, 1, registers=64), ExpertConfig(8, 1, 1, 1, 2))
HEAD_WIDE = (HeadConfig(792, pick=256), HeadConfig(660, pick=256))


def builders() -> Iterator[tuple[str, Builder]]:
    """Yield ``(name, builder)`` in the order of value; a builder allocates only when called."""
    for tokens in (1, 4, 16):
        yield "mxfp4", lambda tokens=tokens: bench_experts.gate_up_case(bench_experts.GPT_OSS, tokens)  # type: ignore[misc]
        yield "mxfp4", lambda tokens=tokens: bench_experts.down_case(bench_experts.GPT_OSS, tokens)  # type: ignore[misc]
    yield "mxfp4", lambda: bench_experts.expert_pass_case(bench_experts.GPT_OSS, 1)
    for tokens in (1, 6):
        yield "mxfp4", lambda tokens=tokens: bench_experts.gate_up_case(bench_experts.GLM_RANK, tokens)  # type: ignore[misc]
        yield "mxfp4", lambda tokens=tokens: bench_experts.down_case(bench_experts.GLM_RANK, tokens)  # type: ignore[misc]
    for tokens in (8, 16):  # what a step of gpt-oss-20b pays for 16 tokens instead of 8
        yield "wide", lambda tokens=tokens: bench_experts.gate_up_case(GPT_OSS_20B, tokens, UP_WIDE)  # type: ignore[misc]
        yield "wide", lambda tokens=tokens: bench_experts.down_case(GPT_OSS_20B, tokens, DOWN_WIDE)  # type: ignore[misc]
        yield "wide", lambda tokens=tokens: bench_dense.lm_head_case(tokens, False, keep=True, others=HEAD_WIDE)  # type: ignore[misc]
    yield "attention", lambda: bench_sequence.gqa_case("gpt-oss", 1, 64, 8, 64, 64, 8192, None)
    yield "attention", lambda: bench_sequence.gqa_case("gpt-oss", 1, 64, 8, 64, 64, 8192, 128)
    yield "attention", lambda: bench_sequence.gqa_case("Qwen3-30B", 8, 32, 4, 128, 128, 8192, None)
    yield "mla", lambda: bench_sequence.mla_case(1, 8, 8192)
    yield "mla", lambda: bench_sequence.mla_case(6, 8, 8192)
    yield "rms_norm", lambda: bench_sequence.rms_norm_case(1, 6144, False)
    yield "rms_norm", lambda: bench_sequence.rms_norm_case(1, 6144, True)
    yield "rope", lambda: bench_sequence.rope_case(1)
    yield "router", lambda: bench_dense.router_case("gpt-oss-120b", 1, 128, 2880, 4)
    yield "router", lambda: bench_dense.router_case("GLM-5.2", 6, 256, 6144, 8)
    yield "lm_head", lambda: bench_dense.lm_head_case(1, False)
    yield "lm_head", lambda: bench_dense.lm_head_case(8, True)
    yield "nucleus", lambda: bench_sequence.nucleus_case(1)
    yield "skinny", lambda: bench_dense.skinny_bf16_case("gpt-oss qkv", 1, 5120, 2880)
    yield "skinny", lambda: bench_dense.skinny_bf16_case("gpt-oss o_proj", 1, 2880, 4096)
    yield "skinny", lambda: bench_dense.skinny_bf16_case("gpt-oss qkv", 16, 5120, 2880)
    yield "skinny", lambda: bench_dense.skinny_fp8_case("GLM-5.2 q_a+kv_a", 1, 2624, 6144)
    yield "skinny", lambda: bench_dense.skinny_fp8_case("GLM-5.2 o TP8", 8, 6144, 2048)
    for form in live_quant.FORMS:
        yield "live_quant", lambda form=form: bench_dense.live_quant_case(form, "GLM-5.2 q_a+kv_a", 1, 2624, 6144)  # type: ignore[misc]
    yield "verify", lambda: bench_sequence.verify_case(8)
