import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import ExitCode, InputError
from workbench.scenario import json_schema, load_scenario, parse_scenario, scenario_names

ROOT = Path(__file__).parents[1]


def parse(text: str) -> object:
    return parse_scenario(text, source="s.toml", folder=Path())


def complaint(text: str) -> str:
    with pytest.raises(InputError) as caught:
        parse(text)
    assert caught.value.exit_code is ExitCode.USAGE
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("s.toml: ")
    return line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name="a"\n[drafter]\ndepth="3"', ["drafter.depth", "integer", "'3'", "quotes"]),
        ('name="a"\n[drafter]\ndpeth=3', ["drafter.dpeth", "unknown key", "did you mean 'depth'"]),
        ('name="a"\n[drafters]\nkind="mtp"', ["drafters", "unknown key", "did you mean 'drafter'"]),
        ('name="a"\n[drafter]\ndepth=-1', ["drafter.depth", "at least 1", "-1"]),
        ('name="a"\n[drafter]\ndepth=65', ["drafter.depth", "at most 64", "65"]),
        ('name="a"\n[[matrix]]\nname="b"\n[[matrix]]\nname="c"\ndrafter={depth=0}', ["matrix[1].drafter.depth"]),
        ('name="a"\n[[matrix]]\nname="b"\ndrafter={dpth=2}', ["matrix[0].drafter.dpth", "did you mean 'depth'"]),
        ('name="a"\n[[matrix]]\nname="b"\n[[matrix]]\nname="b"', ["matrix[1].name", "'b'", "taken"]),
        ('name="a"\n[[matrix]]\nsummary="b"', ["matrix[0]", "name", "missing"]),
        ('name="a"\n[engine]\nrung="egaer"', ["engine.rung", "persistent", "did you mean 'eager'"]),
        ('name="a"\nengine=3', ["engine", "must be a table", "3"]),
        ('name="a"\nmatrix=3', ["matrix", "must be a list"]),
        ('name="a"\nsummary=3', ["summary", "a string", "in quotes"]),
        ("summary='x'", ["name", "missing"]),
        ('name="a b"', ["name", "letters"]),
        ('name="a"\n"x\\ny"=1', ["unknown key"]),
        ('name="a"\n[sampling]\ntemperature=nan', ["sampling.temperature", "finite"]),
        ('name="a"\n[sampling]\ntemperature=0', ["sampling.temperature", "greater than 0"]),
        ('name="a"\n[sampling]\ntop_p=1.5', ["sampling.top_p", "at most 1"]),
        ('name="a"\n[instruments]\nhost="yes"', ["instruments.host", "true or false"]),
        ('name="a"\n[measure]\nrepetitions=1.5', ["measure.repetitions", "integer"]),
        ('name="a"\n[drafter]\nkind="simulated"', ["variant 'a'", "drafter.accept_length", "needed"]),
        ('name="a"\n[drafter]\nkind="simulated"\ndepth=2\naccept_length=3.5', ["accept_length", "exceeds"]),
        ('name="a"\n[model]\npreset="nano"\nshape="x.toml"', ["model.preset", "model.shape", "one of them"]),
        ('name="a"\nsummary="b"\nx=', ["line 3", "not TOML"]),
        ('name="a"\nname="b"\n', ["line 2", "not TOML"]),
        ('name="a"\n[engine]\nrung=1\ndevice=2', ["engine.rung", "1 more"]),
    ],
)
def test_a_mistake_is_one_line_with_field_and_fix(text: str, words: list[str]) -> None:
    line = complaint(text)
    for word in words:
        assert word in line


def test_sections_are_merged_key_by_key() -> None:
    scenario = parse_scenario(
        """
        name = "ladder"
        [drafter]
        kind = "mtp"
        depth = 3
        [sampling]
        seed = 7
        [[matrix]]
        name = "deep"
        drafter = { depth = 5 }
        [[matrix]]
        name = "plain"
        drafter.kind = "none"
        sampling = { method = "sample", temperature = 1 }
        """,
        source="s.toml",
        folder=Path(),
    )
    deep, plain = scenario.variants()
    assert (deep.name, deep.drafter.kind, deep.drafter.depth, deep.drafter.width) == ("deep", "mtp", 5, 6)
    assert (plain.drafter.kind, plain.drafter.width) == ("none", 1)
    assert (plain.sampling.method, plain.sampling.temperature, plain.sampling.seed) == ("sample", 1.0, 7)
    assert deep.sampling.method == "greedy"
    assert deep.model.preset == "nano"


def test_without_a_matrix_there_is_one_variant() -> None:
    (variant,) = parse_scenario('name = "solo"', source="s.toml", folder=Path()).variants()
    assert variant.name == "solo"
    assert variant.settings()["measure"]["repetitions"] == 1


def test_a_variant_may_replace_the_preset_by_a_shape() -> None:
    text = 'name="a"\n[model]\npreset="glm-5.2"\n[[matrix]]\nname="own"\nmodel={shape="x.toml"}'
    (variant,) = parse_scenario(text, source="s.toml", folder=Path("here")).variants()
    assert variant.model.preset is None
    assert variant.shape_path == Path("here/x.toml")


def test_overrides_change_the_sections() -> None:
    text = 'name="a"\n[measure]\nrepetitions=5'
    scenario = parse_scenario(text, source="s", folder=Path(), overrides=["measure.repetitions=2"])
    assert scenario.variants()[0].measure.repetitions == 2
    with pytest.raises(InputError, match=r"measure\.repetitions"):
        parse_scenario(text, source="s", folder=Path(), overrides=["measure.repetitions='2'"])
    with pytest.raises(InputError, match="override 'oops'"):
        parse_scenario(text, source="s", folder=Path(), overrides=["oops"])


def test_the_hash_is_of_the_meaning() -> None:
    plain = parse_scenario('name="a"', source="s", folder=Path("x"))
    spelled = parse_scenario('name="a" # same\n[drafter]\nkind="none"', source="t", folder=Path("y"))
    other = parse_scenario('name="a"\n[drafter]\nkind="mtp"', source="s", folder=Path("x"))
    assert plain.sha256 == spelled.sha256 != other.sha256
    assert json.loads(json.dumps(plain.to_json())) == plain.to_json()


def test_files_are_looked_up_beside_the_scenario(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name="a"\n[prompts]\nfile="p.jsonl"\n[precision]\npolicy="mxfp4-expert"')
    with pytest.raises(InputError, match=r"variant 'a': precision\.policy: .* did you mean 'mxfp4-experts'"):
        load_scenario(path)
    path.write_text('name="a"\n[prompts]\nfile="p.jsonl"\n[model]\npreset="glm5.2"')
    with pytest.raises(InputError, match=r"variant 'a': model\.preset: there is no 'glm5\.2'; did you mean 'glm-5\.2'"):
        load_scenario(path)
    path.write_text('name="a"\n[prompts]\nfile="p.jsonl"\n[model]\nshape="m.toml"')
    with pytest.raises(InputError, match=r"model\.shape: no file .*m\.toml"):
        load_scenario(path)
    path.write_text('name="a"\n[prompts]\nfile="nothing"')
    with pytest.raises(InputError, match=r"prompts\.file: no built-in prompts 'nothing'"):
        load_scenario(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe")
    huge = tmp_path / "h.toml"
    huge.write_text("#" * (1 << 20) + "##")
    for name in (str(binary), str(huge), str(tmp_path / "none.toml"), f"{tmp_path}/", "nul\0.toml", "quickstrat"):
        with pytest.raises(InputError) as caught:
            load_scenario(name)
        assert "\n" not in str(caught.value)
    assert "did you mean 'quickstart'" in str(caught.value)


def test_every_builtin_scenario_loads_with_the_files_it_names() -> None:
    assert "quickstart" in scenario_names()
    for name in scenario_names():
        scenario = load_scenario(name)
        assert scenario.name == name
        assert all(variant.prompts_path.is_file() for variant in scenario.variants())


def test_quickstart_compares_plain_mtp_and_dflash() -> None:
    variants = load_scenario("quickstart").variants()
    assert [(v.name, v.drafter.kind, v.drafter.width) for v in variants] == [
        ("plain", "none", 1),
        ("mtp", "mtp", 4),
        ("dflash", "dflash", 8),
    ]
    assert {(v.prompts.file, v.prompts.count, v.prompts.new_tokens) for v in variants} == {("held_out", 8, 96)}


def test_the_schema_for_editors_is_in_sync() -> None:
    kept = json.loads((ROOT / "docs/reference/scenario.schema.json").read_text())
    assert kept == json_schema(), "run: python -m workbench.scenario > docs/reference/scenario.schema.json"


@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.booleans()), min_size=1))
def test_unknown_keys_never_pass_and_never_break_the_line(keys: dict[str, object]) -> None:
    known = set(json_schema()["properties"])
    document = "\n".join(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in keys.items() if key not in known)
    if not document:
        return
    try:
        tomllib.loads(document)
    except tomllib.TOMLDecodeError:
        return
    with pytest.raises(InputError) as caught:
        parse('name = "a"\n' + document)
    assert len(str(caught.value).splitlines()) == 1
