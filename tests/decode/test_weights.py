from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from workbench.decode.dflash import DFlashModel
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.mxfp4 import MxFp4, dequantize, quantize
from workbench.decode.spec import ModelSpec
from workbench.decode.weights import load_dflash, load_target, pack, random_target, read, save, shipped_folder
from workbench.errors import InputError

CPU = torch.device("cpu")
MAX_SHIPPED_BYTES = 15_000_000


@pytest.fixture
def models(
    tiny_target: Callable[..., Target], tiny_mtp: Callable[..., MtpHead], tiny_dflash: Callable[..., DFlashModel]
) -> tuple[Target, MtpHead, DFlashModel]:
    target = tiny_target(0)
    return target, tiny_mtp(target), tiny_dflash(target)


@pytest.fixture
def folder(tmp_path: Path, models: tuple[Target, MtpHead, DFlashModel]) -> Path:
    target, mtp, dflash = models
    tensors = pack(target, "up") | {f"mtp.{name}": tensor for name, tensor in pack(mtp, "up").items()}
    save(tmp_path / "target.safetensors", tensors, spec=target.spec.model_dump(mode="json"))
    save(tmp_path / "dflash.safetensors", pack(dflash, "up"))
    return tmp_path


def as_stored(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: dequantize(quantize(tensor, "up")) if name.endswith((".gate_up", ".down")) else tensor.bfloat16().float()
        for name, tensor in module.state_dict().items()
    }


def test_what_was_saved_is_loaded_experts_bit_for_bit(
    folder: Path, models: tuple[Target, MtpHead, DFlashModel]
) -> None:
    target, mtp, dflash = models
    loaded, head = load_target(target.spec, folder, device=CPU, dtype=torch.float32)
    drafter = load_dflash(target.spec, folder, device=CPU, dtype=torch.float32)
    for module, original in ((loaded, target), (head, mtp), (drafter, dflash)):
        assert not module.training
        expected = as_stored(original)
        assert module.state_dict().keys() == expected.keys()
        for name, tensor in module.state_dict().items():
            assert tensor.equal(expected[name]), name


def test_experts_are_stored_as_mxfp4_and_all_else_as_bfloat16(folder: Path) -> None:
    stored = load_file(folder / "target.safetensors")
    for name, tensor in stored.items():
        assert tensor.dtype == (torch.uint8 if name.endswith((".blocks", ".scales")) else torch.bfloat16), name
    blocks, scales = stored["blocks.1.ffn.gate_up.blocks"], stored["blocks.1.ffn.gate_up.scales"]
    assert blocks.shape == (4, 64, 16)
    assert scales.shape == (4, 64, 1)
    assert dequantize(MxFp4(blocks, scales)).equal(read(folder / "target.safetensors")["blocks.1.ffn.gate_up"])
    assert "mtp.ffn.down.weight" in stored  # the head's dense FFN is no expert


def test_packing_loaded_weights_changes_nothing(folder: Path, tiny_spec: Callable[..., ModelSpec]) -> None:
    target, _ = load_target(tiny_spec(), folder, device=CPU, dtype=torch.float32)
    stored = load_file(folder / "target.safetensors")
    again = pack(target, "up")
    for name, tensor in again.items():
        if not name.endswith((".blocks", ".scales")):
            assert tensor.equal(stored[name]), name
    for name in again:
        if name.endswith(".blocks"):
            stem = name.removesuffix(".blocks")
            before = dequantize(MxFp4(stored[name], stored[f"{stem}.scales"]))
            assert dequantize(MxFp4(again[name], again[f"{stem}.scales"])).equal(before)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda path: path.unlink(), "weights not found; use model.weights = 'random'"),
        (lambda path: path.write_bytes(b"garbage" * 100), "not a readable safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not a readable safetensors file"),
        (lambda path: (path.unlink(), path.mkdir()), "not a readable safetensors file"),
        (
            lambda path: _change(path, lambda tensors: tensors.pop("norm.weight")),
            'weights do not fit the model: Missing key(s) in state_dict: "norm.weight"',
        ),
        (
            lambda path: _change(path, lambda tensors: tensors.update({"extra": torch.ones(1)})),
            'weights do not fit the model: Unexpected key(s) in state_dict: "extra"',
        ),
        (
            lambda path: _change(path, lambda tensors: tensors.update({"norm.weight": torch.ones(7)})),
            "weights do not fit the model: size mismatch for norm.weight",
        ),
        (
            lambda path: _change(path, lambda tensors: tensors.pop("blocks.0.ffn.down.scales")),
            "blocks.0.ffn.down.blocks: blocks and scales come in pairs",
        ),
        (
            lambda path: _change(path, lambda tensors: tensors.pop("blocks.0.ffn.down.blocks")),
            "blocks.0.ffn.down.scales: blocks and scales come in pairs",
        ),
        (
            lambda path: _change(
                path, lambda tensors: tensors.update({"blocks.0.ffn.down.scales": torch.ones(3, 1, dtype=torch.uint8)})
            ),
            "blocks.0.ffn.down: mxfp4: blocks (4, 32, 16) do not fit scales (3, 1)",
        ),
    ],
    ids=["missing", "garbage", "cut", "folder", "lacks", "extra", "shape", "no-scales", "no-blocks", "unfit-scales"],
)
def test_damage_is_named_in_one_line(
    folder: Path, tiny_spec: Callable[..., ModelSpec], damage: Callable[[Path], object], complaint: str
) -> None:
    path = folder / "target.safetensors"
    damage(path)
    with pytest.raises(InputError) as error:
        load_target(tiny_spec(), folder, device=CPU, dtype=torch.float32)
    assert str(error.value).startswith(f"{path}: {complaint}")
    assert "\n" not in str(error.value)


def _change(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_random_targets_are_reproducible_and_keep_activations_of_order_one(tiny_spec: Callable[..., ModelSpec]) -> None:
    spec = tiny_spec(moe={"experts": 4, "top_k": 2, "inter": 32, "bias": True}, tied_head=False)
    one, same, other = (
        random_target(spec, seed=seed, device=CPU, dtype=torch.float32).state_dict() for seed in (3, 3, 4)
    )
    assert all(tensor.equal(same[name]) for name, tensor in one.items())
    assert not any(tensor.equal(other[name]) for name, tensor in one.items() if not name.endswith("norm.weight"))
    assert all(tensor.isfinite().all() for tensor in one.values())
    target = random_target(spec, seed=3, device=CPU, dtype=torch.bfloat16)
    assert target.dtype == torch.bfloat16
    with torch.no_grad():
        hidden, _, _ = target(torch.arange(32)[None])
        logits = target.logits(hidden)
    assert 0.3 < float(hidden.float().std()) < 3
    assert 0.3 < float(logits.std()) < 3


def test_the_shipped_weights_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in shipped_folder().glob("*.safetensors")}
    assert sizes.keys() == {"target.safetensors", "dflash.safetensors"}
    assert sum(sizes.values()) < MAX_SHIPPED_BYTES
