from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from workbench.lint.build import Built
from workbench.lint.result import Row

MakeRow = Callable[..., Row]


@pytest.fixture
def make_row() -> MakeRow:
    """``make_row(kernel="add", registers=40)``: a row within all bounds, with what is named changed."""
    built = Built("", 4, 32, 0, 0, 0, 1024, 16, 1.0, "warps")
    row = Row("add", "*fp32", "*fp32", "given", "", "sm_90", "/src/add.py", 7, built)

    def make(**changes: Any) -> Row:
        of_row = {key: value for key, value in changes.items() if key in Row.__dataclass_fields__}
        of_built = {key: value for key, value in changes.items() if key not in of_row}
        return replace(row, **of_row, built=replace(built, **of_built))

    return make
