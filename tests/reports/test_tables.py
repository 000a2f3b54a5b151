from workbench.diagnose.distribution import step_times
from workbench.diagnose.quality import limits
from workbench.diagnose.speculation import break_even
from workbench.diagnose.steps import load_steps
from workbench.diagnose.summary import Diagnosis
from workbench.reports import quality_tables, tables
from workbench.reports.table import Table
from workbench.trace.bundle import Bundle


def column(table: Table, title: str, group: int = 0) -> list[str]:
    index = [entry.title for entry in table.columns].index(title)
    return [row[index].text for row in table.groups[group].rows]


def test_the_headline_table_says_what_the_diagnosis_says(made_bundle: Bundle, made_diagnosis: Diagnosis) -> None:
    against = {variant.name: break_even(made_bundle, variant.name) for variant in made_diagnosis.variants}
    table = tables.headline_table(made_diagnosis, against)
    assert column(table, "Variant") == ["plain", "mtp", "dflash"]
    for text, variant in zip(column(table, "Speed"), made_diagnosis.variants, strict=True):
        assert abs(float(text) / variant.tok_s.value - 1) < 1e-3
    assert column(table, "Greedy output as plain") == ["–", "yes, 3 of 3", "yes, 3 of 3"]
    assert column(table, "Against plain")[0] == "–"
    assert "bonus token included" in table.caption
    tags = {cell.tag for row in table.groups[0].rows for cell in row if cell.text[0].isdigit()}
    assert tags == {"measured", "estimated"}


def test_printed_causes_add_up_to_the_printed_step(made_diagnosis: Diagnosis) -> None:
    for group in tables.cause_table(made_diagnosis).groups:
        assert group.total is not None
        for index in (1, 2):
            digits = [row[index].text.replace(".", "").replace(",", "") for row in group.rows]
            assert sum(map(int, digits)) == int(group.total[index].text.replace(".", "").replace(",", ""))
        assert group.total[2].text == "100.0"


def test_the_largest_reader_comes_first_and_shares_are_of_the_sum(made_bundle: Bundle) -> None:
    from workbench.diagnose.byte_model import byte_classes

    table = tables.byte_table("plain", byte_classes(made_bundle, "plain"))
    assert column(table, "Tensors") == ["qkv", "routed_experts"]
    assert column(table, "Share") == ["79.0 %", "21.0 %"]
    total = table.groups[0].total
    assert total is not None
    assert total[1].text == "2.531 MB"


def test_step_times_and_limits(made_bundle: Bundle) -> None:
    times = {"plain": step_times(load_steps(made_bundle, "plain"))}
    assert column(tables.step_time_table(times), "Steps") == ["69"]
    table = quality_tables.limits_table(limits(made_bundle))
    assert column(table, "Variants") == ["all"]


def test_secrets_are_withheld_and_named() -> None:
    facts = {"HF_TOKEN": "x", "db": {"password": "x", "host": "h"}, "packages": {"tokenizers": "1.0"}, "api-key": "x"}
    shown = {row[0].text: row[1].text for row in quality_tables.facts_table("", facts, {}).groups[0].rows}
    assert shown == {
        "HF_TOKEN": "withheld",
        "api-key": "withheld",
        "db.password": "withheld",
        "db.host": "h",
        "packages.tokenizers": "1.0",
    }
