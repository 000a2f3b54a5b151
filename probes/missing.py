"""What a run on this kind of device cannot measure, instrument by instrument: shown in every report."""

from workbench.probes.protocol import Missing

_NO_GPU = "the run is on the CPU"


def unmeasured(device: str, *, engine: str) -> list[Missing]:
    """Return the signals that no instrument of this version reads on ``device`` ("cpu" or "cuda") for ``engine``."""
    if device == "cpu":
        return [
            Missing("pm_sampler", "HBM throughput", _NO_GPU, "bytes of the byte model over step time, tagged modelled", "run on an NVIDIA GPU"),
            Missing("pm_sampler", "CTA occupancy", _NO_GPU, "", "run on an NVIDIA GPU"),
            Missing("static", "register spills", "the eager rung on the CPU runs no compiled GPU kernel", "", "run on an NVIDIA GPU"),
            Missing("kernels", "launch gaps", "no kernels are launched; host time between operators stands in", "host time between operators", "run on an NVIDIA GPU"),
            Missing("kernels", "CPU-GPU synchronisation", _NO_GPU, "", "run on an NVIDIA GPU"),
        ]
    return [
        Missing("pm_sampler", "HBM throughput", "this version has no counter sampler", "bytes of the byte model over step time, tagged modelled"),
        Missing("pm_sampler", "CTA occupancy", "this version has no counter sampler"),
        Missing("kernels", "kernel times and launch gaps", "this version records host operators only"),
        Missing("static", "register spills", f"the {engine} rung runs library kernels whose binaries are not inspected"),
    ]
