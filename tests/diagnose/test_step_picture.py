"""The picture of one step, from the recording of an H200."""

import pytest

from workbench.commands.demo import recorded_folder
from workbench.diagnose.facts import Facts
from workbench.diagnose.step_picture import step_pictures
from workbench.trace.bundle import Bundle


@pytest.mark.parametrize(
    ("variant", "remark"),
    [
        ("graph", "not known: no binary of this step's kernels was read"),
        ("splitk", "no kernel known to spill; 8 of 16 were not read"),
        ("persistent", "no kernel known to spill; 6 of 7 were not read"),
    ],
)
def test_no_spill_is_claimed_of_kernels_that_were_not_read(variant: str, remark: str) -> None:
    with Bundle.open(recorded_folder() / "gpt-oss-20b-h200") as bundle:
        picture = step_pictures(Facts(bundle, variant))[0]
        assert {row.key: row.remark for row in picture.rows}["spills"] == remark
