"""Train the target with its MTP head: next-token loss, MXFP4 simulated in the experts, balance loss on the router."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.decode.experts import Experts
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.train.loop import Batches, Budget, Trainer, progress_bar

MTP_UNROLL = 3
"""How often the MTP head is applied to its own output in training, so that iterating it at decode time works."""
MTP_WEIGHT = 0.5
BALANCE_WEIGHT = 0.01


class TargetWithMtp(nn.Module):
    """Target and MTP head as one module to train and checkpoint."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.mtp = MtpHead(target.spec)

    def losses(self, tokens: Tensor, *, unroll: int = MTP_UNROLL) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return the next-token loss (nats), one loss per MTP depth, and the balance loss for ``tokens`` [B, S]."""
        target = self.target
        hidden, _, balance = target(tokens)
        main = cross_entropy(target.logits(hidden[:, :-1]), tokens[:, 1:])
        state, depths = hidden[:, :-1], []
        for depth in range(1, unroll + 1):
            state = state[:, : tokens.shape[1] - depth - 1]
            token = target.embed(tokens[:, depth:-1])
            state = self.mtp(state, token, target.rope[:, : state.shape[1]])
            depths.append(cross_entropy(target.logits(state), tokens[:, depth + 1 :]))
        return main, depths, balance


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of ``logits`` [..., vocab] for ``targets`` [...]."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def set_quantization(target: Target, on: bool) -> None:
    """Switch the simulated MXFP4 of every expert layer."""
    for module in target.modules():
        if isinstance(module, Experts):
            module.quantize_forward = on


def initialize(module: nn.Module) -> None:
    """Small normal embeddings; attention and FFN outputs start at zero, so every layer starts as the identity."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding):
            nn.init.normal_(child.weight, std=0.02)
        elif isinstance(child, nn.Linear):
            nn.init.zeros_(child.weight) if name.endswith((".o", ".down")) else nn.init.normal_(
                child.weight, std=child.in_features**-0.5 * 0.7
            )
        elif isinstance(child, Experts):
            nn.init.zeros_(child.down)


def train_target(
    model: TargetWithMtp,
    data: Path,
    folder: Path,
    *,
    steps: int,
    minutes: float,
    batch: int,
    length: int,
    rate: float,
    seed: int,
) -> None:
    """Train until the budget is used; checkpoints and the loss log go to ``folder``."""
    device = model.target.device
    train = Batches(data / "train.npy", length, batch, device, seed)
    held_out = Batches(data / "held_out.npy", length, 32, device, 1)
    check = [next(held_out) for _ in range(4)]
    set_quantization(model.target, True)

    def compute(tokens: Tensor) -> tuple[Tensor, ...]:
        # The cast weights must be made anew inside a captured step, hence no autocast cache.
        with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
            main, depths, balance = model.losses(tokens)
        loss = main + MTP_WEIGHT * torch.stack(depths).mean() + BALANCE_WEIGHT * balance
        return loss, main, torch.stack(depths), balance

    trainer = Trainer(model, compute, rate=rate, budget=Budget(steps, minutes), folder=folder, name="target")
    trainer.resume()
    with progress_bar(["loss", "held_out"]) as bar:
        task = bar.add_task("target", total=steps, completed=trainer.step, loss="-", held_out="-")
        while (used := trainer.budget.progress(trainer.step)) < 1:
            train.generator.manual_seed(seed + trainer.step)
            _, main, depths, balance = trainer.update(next(train))
            if trainer.step % 100 == 0 or trainer.budget.progress(trainer.step) >= 1:
                validation = evaluate(model, check)
                trainer.log(train=main.item(), mtp=depths.tolist(), balance=balance.item(), progress=used, **validation)
                bar.update(task, loss=f"{main.item():.3f}", held_out=f"{validation['held_out']:.3f}")
            if trainer.step % 1000 == 0:
                trainer.save()
            bar.update(task, completed=trainer.step)
    trainer.save()


@torch.no_grad()
def evaluate(model: TargetWithMtp, batches: list[Tensor]) -> dict[str, object]:
    """Return mean held-out losses in nats per token: the next token, and each MTP depth."""
    totals: list[Tensor] = []
    with torch.autocast(model.target.device.type, dtype=torch.bfloat16):
        for tokens in batches:
            main, depths, _ = model.losses(tokens)
            totals.append(torch.stack([main, *depths]).float())
    mean = torch.stack(totals).mean(0).tolist()
    return {"held_out": mean[0], "held_out_mtp": mean[1:]}
