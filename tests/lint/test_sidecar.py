from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.lint.sidecar import read_sidecar
from workbench.lint.signature import Constant, Dtype, Typed

HEAD = '[[kernel]]\nname = "add"\n'


def test_kernels_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        HEAD
        + 'types = {x = "*fp32", n = "i32:16"}\nconstants = {B = 128, E = true, T = "tl.float16", N = "relu"}\n'
        + 'num_warps = 8\nlabel = "T=1"\nspills = "it is short"\n'
        + HEAD
    )
    first, second = read_sidecar(path)
    assert first.named == {
        "x": Typed("*fp32"),
        "n": Typed("i32", True),
        "B": Constant(128),
        "E": Constant(True),
        "T": Constant(Dtype("float16")),
        "N": Constant("relu"),
    }
    assert (first.options, first.label, first.spills) == ({"num_warps": 8}, "T=1", "it is short")
    assert second.where.endswith("s.toml: kernel[1]")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "kernel: is missing"),
        ("kernel = []", "kernel:"),
        ("a = [", "is no TOML"),
        ("\xff", "is no TOML"),
        (HEAD + 'type = {x = "i32"}', "kernel[0].type: unknown key; did you mean 'types'?"),
        (HEAD + "types = {x = 3}", "kernel[0].types.x: must be a string"),
        (HEAD + 'types = {x = "128"}', "kernel[0].types.x: '128' is a value; move it to constants"),
        (HEAD + 'types = {x = "*f3"}', "kernel[0].types.x: '*f3' is neither a type nor a constant"),
        (HEAD + 'types = {x = "i32"}\nconstants = {x = 1}', "x is in types and in constants"),
        (HEAD + "constants = {x = [1]}", "kernel[0].constants.x"),
        (HEAD + "num_warps = 3", "num_warps=3 must be a power of two"),
        (HEAD + "num_warps = -4", "kernel[0].num_warps: must be at least 1"),
        ('[[kernel]]\nname = "a b"', "kernel[0].name"),
    ],
)
def test_file_and_field_are_named(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError) as caught:
        read_sidecar(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_sidecar(tmp_path / "none.toml")
