"""Which GPU is meant, by UUID: CUDA, NVML and CUPTI number them differently, and CUDA_VISIBLE_DEVICES renames them."""

from workbench.errors import UnfitError


def cuda_uuid(device: int) -> str:
    """Return the UUID, as NVML writes it, of CUDA device ``device`` of this process.

    Raises UnfitError where torch sees no such device.
    """
    import torch

    if not 0 <= device < torch.cuda.device_count():
        raise UnfitError(f"torch sees no CUDA device {device}", hint="see workbench doctor")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
