"""``workbench kernels lint``: what Triton kernels take of an SM, compiled for any NVIDIA target without a GPU."""
