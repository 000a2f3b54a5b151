"""Collectives of a rank slice on one GPU: a stand-in of stated length behind attention and behind the FFN.

Real ranks exchange partial sums there, twice a layer. One GPU has nobody to exchange with, so the stream waits instead
(workbench/kernels/collective.py); what it waits is modelled, and the kernel's name says so in every trace.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.decode.model import Block, Target
from workbench.decode.rungs.twin import twin

KERNEL = "collective_standin_kernel"
"""Name of the stand-in in a trace."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """Waits ``nanoseconds`` on the device, in stream order."""

    nanoseconds: int
    waited: Tensor

    def __call__(self) -> None:
        """Launch the wait."""
        from workbench.kernels.collective import collective_standin  # needs triton

        collective_standin(self.waited, self.nanoseconds)


def with_collectives(target: Target, microseconds: float) -> Target:
    """Return a twin of ``target`` that waits ``microseconds`` behind attention and behind the FFN of every layer."""
    other = twin(target)
    standin = StandIn(round(microseconds * 1000), torch.zeros(1, dtype=torch.int64, device=target.device))
    for block in other.blocks:
        if isinstance(block, Block):
            block.collective = standin
    return other


def collective_ns(target: Target) -> int:
    """Return how long ``target`` waits behind attention and behind the FFN of every layer, ns; 0: it does not.

    For a step that runs no blocks and waits inside its own kernel.
    """
    waits = {block.collective.nanoseconds for block in target.blocks if isinstance(block.collective, StandIn)}
    return max(waits, default=0)
