from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.lint.signature import Constant, Dtype, Signature, Typed, parse_signature

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
ARGUMENTS = st.one_of(
    st.sampled_from(
        [Typed("*fp32"), Typed("*kbf16"), Typed("i32"), Typed("i64", True), Typed("tensordesc<fp16[128, 64]>")]
    ),
    st.builds(Constant, st.one_of(st.booleans(), st.integers(), st.none(), st.text(max_size=8))),
    st.builds(Constant, st.floats(allow_nan=False, allow_infinity=False)),
    st.just(Constant(Dtype("float16"))),
)
SIGNATURES = st.builds(
    Signature,
    NAMES,
    st.lists(ARGUMENTS, max_size=3).map(tuple),
    st.dictionaries(NAMES, ARGUMENTS, max_size=3),
    st.dictionaries(st.sampled_from(["num_warps", "num_ctas"]), st.sampled_from([1, 2, 4, 8])),
)


def test_the_parts_of_a_signature() -> None:
    read = parse_signature("add: *fp32, i32:16, 128, BLOCK=64, T=tl.float16, D=tensordesc<fp16[8,16]>; num_warps=8")
    assert read.kernel == "add"
    assert read.positional == (Typed("*fp32"), Typed("i32", True), Constant(128))
    assert read.named == {
        "BLOCK": Constant(64),
        "T": Constant(Dtype("float16")),
        "D": Typed("tensordesc<fp16[8,16]>"),
    }
    assert read.options == {"num_warps": 8}


@given(SIGNATURES)
@example(Signature("k", (Constant("="), Constant("a='")), {"B": Constant("x=\"';,")}, {}))
def test_what_is_written_is_read_again(signature: Signature) -> None:
    read = parse_signature(signature.text())
    assert read.text() == signature.text()
    assert (read.positional, read.named, read.options) == (signature.positional, signature.named, signature.options)


@given(st.text(max_size=40))
def test_anything_else_is_an_input_error(text: str) -> None:
    with suppress(InputError):
        parse_signature(f"k:{text}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("*fp32,*fp32", "begins with no kernel and colon; such as 'kernel:*fp32"),
        ("add:*fp33", "--signature add: '*fp33' is neither a type nor a constant; types: *fp32"),
        ("add:*fp32:16", "'*fp32:16' says more than a type; only a number takes :16"),
        ("add:i32:8", "'i32:8' says more than a type"),
        ("add:[1]", "'[1]' is no constant"),
        ("add:A=1,i32", "i32 has no name but follows one that has"),
        ("add:A=1,A=2", "A is given twice"),
        ("add:1=2", "'1' is no name of an argument"),
        ("add:i32;warps=4", "'warps' is no option; one of num_warps"),
        ("add:i32;num_warps=0", "num_warps=0 is no count"),
        ("add:i32;num_warps=3", "num_warps=3 must be a power of two"),
        ("add:i32;maxnreg=300", "maxnreg=300 must be 16 to 255"),
    ],
)
def test_the_wrong_part_is_named(text: str, line: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_signature(text)
    assert line in str(caught.value)
