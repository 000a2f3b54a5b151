"""Sample the target's own text in large batches: what the drafter learns to predict."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workbench.decode.model import Target
from workbench.decode.train.loop import Batches, progress_bar

TEMPERATURES = (0.0, 0.3, 0.6, 1.0)
"""Cycled over the sequences of a batch; 0 is greedy."""


@torch.no_grad()
def continue_batch(target: Target, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Continue ``prompts`` [B, P] to ``length`` tokens; return int64 [B, length]."""
    batch = prompts.shape[0]
    temperature = torch.tensor(TEMPERATURES, device=prompts.device).repeat(batch // len(TEMPERATURES) + 1)[:batch, None]
    cache = target.new_cache(length, batch)
    pieces, last = [prompts], prompts
    for _ in range(length - prompts.shape[1]):
        scores = target.score(last, cache)
        cache.length += last.shape[1]
        logits = scores.logits[:, -1]
        # Gumbel-max: an exponential race samples the softmax; at temperature 0 it degenerates to the argmax.
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        last = (logits + noise * temperature).argmax(dim=-1, keepdim=True)
        pieces.append(last)
    return torch.cat(pieces, dim=1)


def generate(
    target: Target, data: Path, out: Path, *, sequences: int, length: int, prompt: int, batch: int, seed: int
) -> None:
    """Write ``sequences`` continuations of training-set prompts to ``out`` as uint16 [sequences, length]."""
    prompts = Batches(data / "train.npy", prompt, batch, target.device, seed)
    generator = torch.Generator(device=target.device).manual_seed(seed)
    rows: list[np.ndarray] = []
    with progress_bar([]) as bar:
        task = bar.add_task("self-distillation text", total=sequences)
        while sum(map(len, rows)) < sequences:
            text = continue_batch(target, next(prompts), length, generator)
            rows.append(text.cpu().numpy().astype(np.uint16))
            bar.update(task, advance=batch)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.save(out, np.concatenate(rows)[:sequences])
