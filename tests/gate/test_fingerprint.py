from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import InputError
from workbench.gate.fingerprint import (
    Facts,
    class_id,
    differences,
    facts,
    machine_class,
    machine_of,
    one_sided,
    require_same,
    settings_of,
)
from workbench.trace.bundle import Bundle
from workbench.trace.manifest import Manifest

MakeCode = Callable[..., Any]
MakeLaunch = Callable[..., Path]


def _facts(path: Path) -> Facts:
    with Bundle.open(path) as bundle:
        return facts(bundle, "mtp", bundle.manifest.variants[0].settings)


def test_two_launches_of_the_same_code_agree(code: MakeCode, launch: MakeLaunch) -> None:
    base, head = _facts(launch(code(), name="a")), _facts(launch(code(forward=2.0), name="b"))
    assert differences(base, head) == ()
    assert one_sided(base, head) == ()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"environment": {"packages": {"torch": "2.12.0"}}}, "machine.packages.torch"),
        ({"environment": {"python": "CPython 3.13"}}, "machine.python"),
        ({"settings": {"sampling": {"method": "sample"}}}, "settings.sampling.method"),
        ({"device": "cuda"}, "machine.device"),
    ],
)
def test_another_machine_or_setting_is_a_difference(
    code: MakeCode, launch: MakeLaunch, changes: dict[str, Any], name: str
) -> None:
    found = differences(_facts(launch(code(), name="a")), _facts(launch(code(**changes), name="b")))
    assert [difference.name for difference in found] == [name]


def test_other_prompts_are_a_difference(launch: MakeLaunch, tmp_path: Path) -> None:
    base = dict(_facts(launch(name="a")))
    assert base["prompts"].startswith("1 prompts, sha256 ")
    assert [found.name for found in differences(base, base | {"prompts": "2 prompts"})] == ["prompts"]


def test_a_setting_only_one_version_knows_is_told_but_no_difference() -> None:
    base, head = {"settings.a": 1}, {"settings.a": 1, "settings.b": []}
    assert differences(base, head) == ()
    assert one_sided(base, head) == ("only head has settings.b = []",)
    assert one_sided(head, base) == ("only base has settings.b = []",)


def test_the_refusal_is_one_line_with_the_differences() -> None:
    found = differences(
        {f"settings.s{index}": 1 for index in range(9)}, {f"settings.s{index}": 2 for index in range(9)}
    )
    with pytest.raises(InputError) as caught:
        require_same(found, "a and b")
    assert "a and b: not comparable: settings.s0: 1 → 2; " in str(caught.value)
    assert "and 3 more; record both alike, or --allow-different" in str(caught.value)
    require_same((), "a and b")


def test_what_tells_two_machines_of_a_kind_apart_is_left_out() -> None:
    gpu = {"name": "H200", "uuid": "GPU-1", "driver": "575", "memory_bytes": 1}
    one = Manifest(device={"name": "cuda"}, environment={"gpus": [gpu], "memory_bytes": 128 << 30, "gpu_note": ""})
    other = Manifest(
        device={"name": "cuda"}, environment={"gpus": [gpu | {"uuid": "GPU-2"}], "memory_bytes": (128 << 30) + 4096}
    )
    assert machine_class(one) == machine_class(other)
    assert machine_class(one)["gpu.name"] == "H200"
    newer = Manifest(device={"name": "cuda"}, environment={"gpus": [gpu | {"driver": "580"}]})
    assert machine_class(newer)["gpu.driver"] != machine_class(one)["gpu.driver"]
    assert "gpu.name" not in machine_class(Manifest(device={"name": "cpu"}, environment={"gpus": [gpu]}))


def test_ids_depend_on_their_part_of_the_facts_alone() -> None:
    found = {"machine.device": "cpu", "settings.a": 1, "prompts": "x"}
    assert settings_of(found) == {"settings.a": 1, "prompts": "x"}
    assert machine_of(found) == {"machine.device": "cpu"}
    assert class_id(settings_of(found)) == class_id(settings_of(found | {"machine.device": "cuda"}))
    assert class_id(machine_of(found)) != class_id(machine_of(found | {"machine.device": "cuda"}))
