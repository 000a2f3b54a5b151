"""What a kernel is for, told by its name: libraries and engines name their kernels after what they do."""

import re
from typing import Literal

from workbench.diagnose.busy import COLLECTIVE

Kind = Literal["collective", "device-copy", "host-copy", "fill", "quantise", "product", "sampling", "other"]
"""product: multiplies by weights or reads the cache, so it is what streams a step's bytes. quantise: converts
activations ahead of a product. device-copy: moves bytes from device memory to device memory. other: norms, rotary
embedding, routing, reductions, element by element."""

PRODUCT = re.compile(
    r"gemm|gemv|skinny|nvjet|matmul|cutlass|cublas(?!Lt::splitKreduce)|wgmma|xmma|moe|expert|gate_up|down_kernel|"
    r"attention|flash|fmha|mla_|_mla|gqa|decode|fused_kernel|lm_head|splitk|linear|Cijk_|_fwd_kernel|persistent|latent_step|mmha",
    re.IGNORECASE,
)
_NOT_PRODUCT = re.compile(
    r"splitKreduce|_metadata|align_block|topk|sort|prepare_varlen|router|_combine|combine_kernel|act_and_mul|merge",
    re.IGNORECASE,
)
QUANTISE = re.compile(r"quant(?!ile)|per_token_group|to_fp8|cast_.*fp8|mxfp8|act_quant|e4m3_cast", re.IGNORECASE)
_FUSED = re.compile(r"norm|silu|gelu|act_and_mul|rope", re.IGNORECASE)
"""What a kernel that also quantises does first: the conversion is fused, and costs no launch of its own."""

SAMPLING = re.compile(
    r"argmax|argmin|multinomial|radix_?sort|RadixSort|bitonic|sort_?pairs|top_?p|top_?k_?(renorm|mask)|sampl|softmax_?warp|"
    r"cunn_SoftMax|gumbel|nucleus|greedy_kernel|rejection_kernel|DeviceScan|tensor_kernel_scan",
    re.IGNORECASE,
)
DEVICE_COPY = re.compile(
    r"direct_copy|copy_kernel|^memcpy\d+_|memcpy.*(DtoD|Device -> Device)|CatArray|clone|gather_kernel|index_?select",
    re.IGNORECASE,
)
PURPOSE = {"_reduce": "triton_kernels' sum of the experts' partial results"}
"""What kernels do whose names do not say it."""

EXPERTS = re.compile(r"gate_up|down_kernel|expert|moe|matmul_ogs", re.IGNORECASE)
FOUR_BIT = re.compile(r"mxfp4|nvfp4|fp4|e2m1|w4a|int4|awq|gptq|marlin|mxf4", re.IGNORECASE)


def kind_of(name: str, activity: str = "kernel") -> Kind:
    """Return what kernel ``name`` is for; ``activity`` as in table kernels."""
    if activity == "memset":
        return "fill"
    if activity == "memcpy":
        return "device-copy" if re.search(r"DtoD|Device -> Device|PtoP|D2D", name) else "host-copy"
    if COLLECTIVE.search(name):
        return "collective"
    if PRODUCT.search(name) and not _NOT_PRODUCT.search(name):
        return "product"
    if QUANTISE.search(name) and not _FUSED.search(name):
        return "quantise"
    if SAMPLING.search(name):
        return "sampling"
    if DEVICE_COPY.search(name):
        return "device-copy"
    return "other"
