"""The GPU that the CUDA kernels are built for."""

import torch

from workbench.errors import UnfitError


def require_hopper(what: str, device: torch.device | str) -> tuple[torch.device, int]:
    """The device with its index, and its multiprocessors. Raises UnfitError, which names ``what``, where it is no sm_90
    GPU."""
    if not torch.cuda.is_available():
        raise UnfitError(f"{what} needs an NVIDIA GPU", hint="none is visible to torch")
    chosen = torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else torch.device(device)
    properties = torch.cuda.get_device_properties(chosen)
    if (properties.major, properties.minor) != (9, 0):
        raise UnfitError(f"{what} is built for sm_90a, not sm_{properties.major}{properties.minor}")
    return chosen, properties.multi_processor_count
