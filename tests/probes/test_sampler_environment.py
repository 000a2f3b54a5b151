import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import InputError, UnfitError
from workbench.probes import sampler_environment as module
from workbench.probes.sampler_environment import CUPTI_PYTHON, SamplerEnvironment, sampler_environment

TAG = f"{sys.implementation.name}-{sys.version_info.major}{sys.version_info.minor}"


def _fill(environment: SamplerEnvironment, version: str = CUPTI_PYTHON, tag: str = TAG) -> None:
    (environment.folder / f"cupti_python-{version}.dist-info").mkdir(parents=True)
    environment.cupti.parent.mkdir(parents=True)
    environment.cupti.touch()
    (environment.folder / "cupti").mkdir()
    (environment.folder / "cupti" / f"cupti.{tag}-x86_64-linux-gnu.so").touch()


def test_the_folder_is_the_one_named_or_the_users_own() -> None:
    assert sampler_environment({"WORKBENCH_SAMPLER": "/opt/sampler"}).folder == Path("/opt/sampler")
    assert sampler_environment({"XDG_DATA_HOME": "/data"}).folder == Path("/data/decode-workbench/sampler")
    assert sampler_environment({}).folder == Path.home() / ".local/share/decode-workbench/sampler"


def test_a_folder_says_what_it_lacks(tmp_path: Path) -> None:
    environment = SamplerEnvironment(tmp_path / "good")
    assert "not installed" in environment.problem()
    _fill(environment)
    assert environment.problem() == ""
    environment.cupti.unlink()
    assert "libcupti.so.13" in environment.problem()
    old = SamplerEnvironment(tmp_path / "old")
    _fill(old, version="13.3.0")
    assert f"cupti-python 13.3.0, {CUPTI_PYTHON} is needed" in old.problem()
    other = SamplerEnvironment(tmp_path / "other")
    _fill(other, tag="cpython-39")
    assert "another Python" in other.problem()
    (tmp_path / "empty").mkdir()
    assert "no cupti-python" in SamplerEnvironment(tmp_path / "empty").problem()


def test_the_sidecar_sees_its_own_packages_first_all_gpus_and_no_other_profiler(tmp_path: Path) -> None:
    inherited = {
        "PYTHONPATH": "/mine",
        "LD_LIBRARY_PATH": "/torch/lib",
        "CUDA_VISIBLE_DEVICES": "3",
        "CUDA_INJECTION64_PATH": "/nsys.so",
        "HOME": "/home",
    }
    variables = SamplerEnvironment(tmp_path).variables(inherited)
    assert variables == {
        "PYTHONPATH": f"{tmp_path}:/mine",
        "LD_LIBRARY_PATH": f"{tmp_path}/nvidia/cu13/lib:/torch/lib",
        "HOME": "/home",
    }
    assert SamplerEnvironment(tmp_path).variables({})["PYTHONPATH"] == str(tmp_path)


def test_install_asks_pip_for_the_packages_in_a_folder_of_their_own(tmp_path: Path) -> None:
    environment = SamplerEnvironment(tmp_path / "new" / "sampler")
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        commands.append(command)
        _fill(environment)

    asked = environment.install(run=run)
    assert f"cupti-python=={CUPTI_PYTHON}" in asked
    assert commands[0][:4] == [sys.executable, "-m", "pip", "install"]
    assert commands[0][commands[0].index("--target") + 1] == str(environment.folder)
    assert "--no-index" not in commands[0]


def test_install_from_wheels_takes_what_is_there_and_what_can_be_imported_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("cupti_python-13.4.0-cp312", "nvidia_cuda_cupti-13.4.92-py3", "pyelftools-0.33-py3"):
        (wheels / f"{name}-none-any.whl").touch()
    environment = SamplerEnvironment(tmp_path / "sampler")
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        commands.append(command)
        _fill(environment)

    monkeypatch.setattr(module, "_importable", lambda name: name in {"numpy", "cuda.pathfinder"})
    with pytest.raises(InputError, match="no wheel of cuda-bindings;"):
        environment.install(wheels, run=run)
    monkeypatch.setattr(module, "_importable", lambda _: True)
    asked = environment.install(wheels, run=run)
    assert asked == [f"cupti-python=={CUPTI_PYTHON}", "nvidia-cuda-cupti==13.4.*", "pyelftools"]
    assert {"--no-index", "--no-deps", "--find-links"} < set(commands[0])
    with pytest.raises(InputError, match="not a folder"):
        environment.install(tmp_path / "none", run=run)


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("WARNING: slow\nERROR: No matching distribution found for cupti-python==13.4.0\n", "No matching distribution"),
        ("/usr/bin/python3: No module named pip\n", "ensurepip"),
        ("", "could not install"),
    ],
)
def test_a_pip_that_fails_is_one_line_with_a_fix(tmp_path: Path, stderr: str, words: str) -> None:
    def run(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr=stderr)

    with pytest.raises(UnfitError, match=words) as raised:
        SamplerEnvironment(tmp_path).install(run=run)
    assert "\n" not in str(raised.value)


def test_a_pip_that_installs_something_else_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match="yet"):
        SamplerEnvironment(tmp_path / "sampler").install(run=lambda *_, **__: None)


def test_what_cannot_be_found_is_not_importable() -> None:
    assert module._importable("json.decoder")
    assert not module._importable("no_such_package_of_anyone.bindings")
