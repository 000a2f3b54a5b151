import pytest

from workbench.diagnose.kernel_classes import _activity, short_name
from workbench.diagnose.kernel_kinds import kind_of


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void flashinfer::norm::RMSNormKernel<8u, float>(float*)", "flashinfer::norm::RMSNormKernel"),
        ("void (anonymous namespace)::fused_rope_kernel<true>(Params)", "fused_rope_kernel"),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::X<2> > > >(P)",
            "flash::FlashAttnFwdSm90",
        ),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<int> >(P)", "flash::FlashAttnFwdCombine"),
        ("void cutlass::Kernel2<cutlass_80_wmma_s161616gemm>(cutlass_80::Params)", "cutlass_80_wmma_s161616gemm"),
        (  # as Kineto leaves it: too long to be demangled
            "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversalI"
            "NS5_17GroupProblemShapeIN4cute5tupleIJiiiEEEEENS5_10collective13CollectiveMmaI",
            "cutlass::gemm::kernel::GemmUniversal (grouped)",
        ),
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<X> >(P)",
            "cutlass::gemm::kernel::GemmUniversal",
        ),
        ("_ZN2at6native12_GLOBAL__N_16kernelEPf", "at::native::kernel"),
        ("_ZL9my_kernelPf", "_ZL9my_kernelPf"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu", "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu"),
    ],
)
def test_a_name_is_that_of_the_kernel_that_does_the_work(name: str, short: str) -> None:
    assert short_name(name) == short


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy DtoH (Device -> Pinned)", "host-copy"),
        ("Memcpy DtoD (Device -> Device)", "device-copy"),
        ("memcpy32_post", "device-copy"),  # a copy node of a graph: no host waits for it
        ("Memset (Device)", "fill"),
        ("_reduce", "other"),
    ],
)
def test_copies_are_told_by_who_waits_for_them(name: str, kind: str) -> None:
    assert kind_of(name, _activity(name)) == kind
