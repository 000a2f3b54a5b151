"""Train the DFlash drafter by self-distillation: random anchors in the target's own text, whole blocks at once."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.decode.dflash import DFlashModel
from workbench.decode.model import Target
from workbench.decode.train.loop import Budget, Trainer, progress_bar
from workbench.errors import InputError

DECAY = 4.0
"""Position i of a block weighs exp(-(i - 1) / DECAY): a late position counts only if all before it were right."""

LEAST_CONTEXT = 8
"""Positions before the first anchor."""


def block_mask(anchors: Tensor, context: int, window: int, block: int) -> Tensor:
    """Return what blocks may see, boolean [B, 1, 1, A * block, context + A * block].

    ``anchors`` [B, A] are positions. A block sees the target features of the ``window`` positions before its anchor
    and all of itself, and nothing of any other block.
    """
    count = anchors.shape[1]
    position = torch.arange(context, device=anchors.device)
    before = (position < anchors[..., None]) & (position >= anchors[..., None] - window)
    own = torch.eye(count, dtype=torch.bool, device=anchors.device)
    own = own.repeat_interleave(block, 0).repeat_interleave(block, 1)
    rows = before.repeat_interleave(block, dim=1)
    return torch.cat((rows, own.expand(len(anchors), -1, -1)), dim=-1)[:, None, None]


def drafter_loss(
    drafter: DFlashModel, target: Target, tokens: Tensor, anchors: Tensor, hidden: Tensor, taps: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss and the share of drafted tokens that equal the target's argmax, by position [block - 1].

    ``tokens`` [B, S]; ``anchors`` [B, A]; ``hidden`` and ``taps`` are the frozen target's over ``tokens``. Loss: half
    cross-entropy on the text, half on the target's distribution, decayed by position.
    """
    block, device = drafter.shape.block, tokens.device
    context = drafter.context(taps, target.rope[:, : tokens.shape[1]])
    positions = (anchors[..., None] + torch.arange(block, device=device)).flatten(1)
    allowed = block_mask(anchors, tokens.shape[1], drafter.shape.window, block)
    states = drafter.fill(target.embed(tokens.gather(1, anchors)), target.rope[:, positions], context, allowed)
    logits = F.linear(states, target.head_weight).float()
    place = (anchors[..., None] + torch.arange(1, block, device=device)).flatten(1)
    text = tokens.gather(1, place)
    with torch.no_grad():
        before = hidden.gather(1, (place - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
        teacher = target.logits(before)
    flat = logits.flatten(1, 2)
    hard = F.cross_entropy(flat.transpose(1, 2), text, reduction="none")
    soft = -(teacher.softmax(-1) * flat.log_softmax(-1)).sum(-1)
    weight = torch.exp(-torch.arange(block - 1, device=device) / DECAY)
    loss = ((0.5 * hard + 0.5 * soft).view(*anchors.shape, block - 1) * weight).sum() / (weight.sum() * anchors.numel())
    agree = (flat.argmax(-1) == teacher.argmax(-1)).float().view(-1, block - 1).mean(0)
    return loss, agree


def train_drafter(
    drafter: DFlashModel,
    target: Target,
    text: Path,
    folder: Path,
    *,
    steps: int,
    minutes: float,
    batch: int,
    anchors: int,
    rate: float,
    seed: int,
) -> None:
    """Train on generated ``text`` until the budget is used; the target stays frozen."""
    device = target.device
    rows = torch.from_numpy(np.load(text).astype(np.int32)).to(device)
    length, block = rows.shape[1], drafter.shape.block
    if length <= LEAST_CONTEXT + block:
        raise InputError(f"{text}: rows of {length} tokens are too short for a block of {block}; raise --length")
    target.requires_grad_(False)

    def compute(tokens: Tensor, anchors: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
            with torch.no_grad():
                hidden, taps, _ = target(tokens)
            return drafter_loss(drafter, target, tokens, anchors, hidden, taps)

    trainer = Trainer(drafter, compute, rate=rate, budget=Budget(steps, minutes), folder=folder, name="dflash")
    trainer.resume()
    generator = torch.Generator(device="cpu")
    with progress_bar(["loss", "agree"]) as bar:
        task = bar.add_task("dflash", total=steps, completed=trainer.step, loss="-", agree="-")
        while (used := trainer.budget.progress(trainer.step)) < 1:
            generator.manual_seed(seed + trainer.step)
            tokens = rows[torch.randint(len(rows), (batch,), generator=generator).to(device)].long()
            chosen = torch.randint(LEAST_CONTEXT, length - block, (batch, anchors), generator=generator).to(device)
            loss, agree = trainer.update(tokens, chosen)
            if trainer.step % 100 == 0 or trainer.budget.progress(trainer.step) >= 1:
                trainer.log(train=loss.item(), agree=agree.tolist(), progress=used)
                bar.update(task, loss=f"{loss.item():.3f}", agree=f"{agree[0].item():.2f}")
            if trainer.step % 1000 == 0:
                trainer.save()
            bar.update(task, completed=trainer.step)
    trainer.save()
