from pathlib import Path

import pytest

from workbench.gate.locate import Location, locate


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "kernels" / "cuda").mkdir(parents=True)
    (tmp_path / "kernels" / "norm.py").write_text("import triton\n\n@triton.jit\ndef norm_kernel(x):\n    pass\n")
    (tmp_path / "kernels" / "cuda" / "gemm.cu").write_text(
        'extern "C" __global__ void\n__launch_bounds__(128)\ngemm(float* x) { other(x); }\n'
    )
    return tmp_path


def test_a_kernel_is_found_where_it_is_defined(tree: Path) -> None:
    assert locate("norm_kernel", tree) == Location("kernels/norm.py", 4)
    assert locate("gemm", tree) == Location("kernels/cuda/gemm.cu", 3)


@pytest.mark.parametrize("name", ["norm", "other", "aten::mm", "", "x)|(.*", "no_such"])
def test_no_guess_is_made(tree: Path, name: str) -> None:
    assert locate(name, tree) is None


def test_two_definitions_would_be_a_guess(tree: Path) -> None:
    (tree / "kernels" / "again.py").write_text("def norm_kernel(): ...\n")
    assert locate("norm_kernel", tree) is None
    assert locate("norm_kernel", None) is None
