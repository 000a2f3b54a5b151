"""Weights on disk and in memory: safetensors with MXFP4 experts, or random ones of the same shapes.

Names follow the modules of :class:`Target` and :class:`DFlashModel`. An expert matrix ``X`` is stored as ``X.blocks``
(uint8, two E2M1 codes a byte) and ``X.scales`` (uint8, E8M0), the gpt-oss checkpoint layout; all else is bfloat16.
"""

import json
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from workbench.decode.dflash import DFlashModel
from workbench.decode.experts import Experts
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.mxfp4 import MxFp4, ScaleRounding, dequantize, quantize
from workbench.decode.spec import ModelSpec
from workbench.errors import InputError


def shipped_folder() -> Path:
    """Return the folder of the trained nano model that ships with the workbench."""
    return Path(str(resources.files("workbench") / "scenarios" / "nano"))


def pack(module: nn.Module, rounding: ScaleRounding) -> dict[str, Tensor]:
    """Return ``module``'s tensors as stored: experts in MXFP4, all else in bfloat16."""
    experts = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        if isinstance(child, Experts)
        for name in ("gate_up", "down")
    }
    packed: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        if name in experts:
            value = quantize(tensor.float().cpu(), rounding)
            packed[f"{name}.blocks"], packed[f"{name}.scales"] = value.blocks, value.scales
        else:
            packed[name] = tensor.to("cpu", torch.bfloat16).contiguous()
    return packed


def save(path: Path, tensors: dict[str, Tensor], **metadata: object) -> None:
    """Write a safetensors file with ``metadata`` as JSON strings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {key: json.dumps(value) for key, value in metadata.items()})


def read(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file and expand its MXFP4 pairs to float32."""
    try:
        with safe_open(path, framework="pt") as file:
            raw = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        raise InputError(f"{path}: weights not found", hint="use model.weights = 'random', or train them") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error})") from None
    tensors: dict[str, Tensor] = {}
    for name, tensor in raw.items():
        stem, _, part = name.rpartition(".")
        if part not in ("blocks", "scales"):
            tensors[name] = tensor
        elif f"{stem}.blocks" not in raw or f"{stem}.scales" not in raw:
            raise InputError(f"{path}: {name}: blocks and scales come in pairs, the other one is missing")
        elif part == "blocks":
            try:
                tensors[stem] = dequantize(MxFp4(tensor, raw[f"{stem}.scales"]))
            except InputError as error:
                raise InputError(f"{path}: {stem}: {error.message}") from None
    return tensors


def _fill(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:  # one line that names the module, then one a mistake
        reason = (str(error).splitlines() * 2)[1].strip()
        raise InputError(f"{path}: weights do not fit the model: {reason[:300]}") from None


def load_target(spec: ModelSpec, folder: Path, *, device: torch.device, dtype: torch.dtype) -> tuple[Target, MtpHead]:
    """Load ``folder``/target.safetensors: the target and its MTP head, experts expanded to ``dtype`` at load."""
    path = folder / "target.safetensors"
    tensors = read(path)
    target, mtp = Target(spec), MtpHead(spec)
    _fill(target, {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}, path)
    _fill(mtp, {name[4:]: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}, path)
    return target.to(device, dtype).eval(), mtp.to(device, dtype).eval()


def load_dflash(spec: ModelSpec, folder: Path, *, device: torch.device, dtype: torch.dtype) -> DFlashModel:
    """Load ``folder``/dflash.safetensors."""
    path = folder / "dflash.safetensors"
    drafter = DFlashModel(spec)
    _fill(drafter, read(path), path)
    return drafter.to(device, dtype).eval()


@torch.no_grad()
def random_target(spec: ModelSpec, *, seed: int, device: torch.device, dtype: torch.dtype) -> Target:
    """Return a target with normal weights of standard deviation 1/sqrt(fan-in): activations stay of order one."""
    with torch.device("meta"):
        target = Target(spec)
    target = target.to(dtype).to_empty(device=device).eval()
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in target.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        else:
            parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
    return target
