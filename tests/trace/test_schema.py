from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.trace.schema import PHASES, TABLES, arrow_schema, markdown, table

ROOT = Path(__file__).parents[2]


def test_the_reference_page_is_in_sync() -> None:
    kept = (ROOT / "docs/reference/tables.md").read_text()
    assert kept == markdown(), "run: python -m workbench.trace.schema > docs/reference/tables.md"


def test_times_are_integers_of_nanoseconds() -> None:
    for entry in TABLES.values():
        for column in entry.columns:
            assert column.name.endswith("_ns") == (column.unit == "ns"), (entry.name, column.name)
            if column.unit == "ns":
                assert column.type == "int64"


def test_names_are_unique_and_every_column_has_a_meaning() -> None:
    for entry in TABLES.values():
        names = [column.name for column in entry.columns]
        assert len(set(names)) == len(names)
        assert all(column.meaning for column in entry.columns)
        assert set(entry.key + entry.order) <= set(names)


def test_the_arrow_schema_carries_units_and_nullability() -> None:
    schema = arrow_schema("steps")
    assert str(schema.field("start_ns").type) == "int64"
    assert schema.field("start_ns").metadata[b"unit"] == b"ns"
    assert not schema.field("start_ns").nullable
    assert schema.field("experts").nullable
    assert table("host").column("phase").choices == PHASES


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(InputError, match="did you mean 'kernels'"):
        table("kernel")
    with pytest.raises(InputError, match="did you mean 'committed'"):
        table("steps").column("commited")
