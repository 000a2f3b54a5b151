"""What both trainings share: a progress-driven schedule, checkpoints that resume, a log that becomes the model card."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from workbench.decode.train.muon import Muon, split_parameters
from workbench.errors import InputError
from workbench.kernels.graph_capture import capturing

Compute = Callable[..., tuple[Tensor, ...]]


@dataclass(slots=True)
class Budget:
    """Training stops at ``steps``, or earlier to finish within ``minutes``; the schedule follows whichever is ahead."""

    steps: int
    minutes: float = float("inf")
    started: float = field(default_factory=time.monotonic)

    def progress(self, step: int) -> float:
        """Return the share of the budget that is used, 0 to 1."""
        return min(1.0, max(step / self.steps, (time.monotonic() - self.started) / 60 / self.minutes))


def learning_rate(progress: float, step: int, warmup: int = 50) -> float:
    """Return the factor on the peak rate: linear warm-up, flat, then linear decay to 0 over the last 60 %."""
    return min(1.0, (step + 1) / warmup, max(0.0, (1 - progress) / 0.6))


class Batches:
    """Random crops of a token stream, as int64 [batch, length] on ``device``. Seed ``generator`` anew to resume."""

    def __init__(self, path: Path, length: int, batch: int, device: torch.device, seed: int) -> None:
        self.tokens = torch.from_numpy(np.load(path).astype(np.int32)).to(device)
        if len(self.tokens) < length:
            raise InputError(f"{path}: {len(self.tokens)} tokens are fewer than one crop of {length}; lower --length")
        self.length, self.batch = length, batch
        self.generator = torch.Generator(device="cpu").manual_seed(seed)

    def __next__(self) -> Tensor:
        starts = torch.randint(len(self.tokens) - self.length + 1, (self.batch,), generator=self.generator)
        index = starts.to(self.tokens.device)[:, None] + torch.arange(self.length, device=self.tokens.device)
        return self.tokens[index].long()

    def __iter__(self) -> Iterator[Tensor]:
        return self


class Trainer:
    """Optimisers, schedule and checkpoint of one module, and its training step.

    ``compute`` maps a batch of tensors to (loss, metric, …). On CUDA the whole step (forward, backward, clipping and
    both optimisers) is captured once as a graph and replayed: nano's step is thousands of small kernels, and launching
    them one by one would leave the GPU mostly idle.
    """

    def __init__(
        self, module: nn.Module, compute: Compute, *, rate: float, budget: Budget, folder: Path, name: str
    ) -> None:
        matrices, rest = split_parameters(module.named_parameters())
        device = matrices[0].device
        self.lr = torch.zeros((), device=device)
        capturable = device.type == "cuda"
        self.optimizers: list[Optimizer] = [
            Muon(matrices, lr=self.lr),
            AdamW(rest, lr=self.lr, betas=(0.9, 0.95), capturable=capturable),
        ]
        self.module, self.compute, self.rate, self.budget = module, compute, rate, budget
        self.checkpoint = folder / f"{name}.checkpoint.safetensors"
        self.log_path = folder / f"{name}.log.jsonl"
        self.step = 0
        self.step_count_here = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Load the checkpoint if there is one; return whether there was. Log rows behind it are dropped."""
        if not self.checkpoint.exists():
            self.log_path.unlink(missing_ok=True)
            return False
        try:
            with safe_open(self.checkpoint, framework="pt") as file:
                self.step = int(file.metadata()["step"])
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.module.load_state_dict(_below("module.", tensors))
        except (RuntimeError, SafetensorError) as error:
            reason = (str(error).splitlines() * 2)[1].strip()
            raise InputError(f"{self.checkpoint}: does not fit ({reason[:300]}); delete it to start anew") from None
        for number, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in _below(f"optimizer{number}.", tensors).items():
                parameter, key = name.split(".")
                state.setdefault(int(parameter), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
            for group in optimizer.param_groups:
                group["lr"] = self.lr
        if self.log_path.exists():
            lines = self.log_path.read_text().splitlines(keepends=True)
            self.log_path.write_text("".join(line for line in lines if json.loads(line)["step"] <= self.step))
        return True

    def save(self) -> None:
        """Write the checkpoint beside the old one, then replace it."""
        tensors = {f"module.{name}": tensor for name, tensor in self.module.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer{number}.{parameter}.{key}": tensor for key, tensor in state.items()}
        partial = self.checkpoint.with_suffix(".partial")
        save_file(tensors, partial, {"step": str(self.step)})
        partial.replace(self.checkpoint)

    def update(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Train on one batch and return what ``compute`` returned; the tensors are overwritten by the next call."""
        self.lr.fill_(self.rate * learning_rate(self.budget.progress(self.step), self.step))
        if self.graph is None and batch[0].is_cuda and self.step_count_here >= 3:
            self._capture(batch)
        if self.graph is None:
            self.outputs = self._update(batch)
        else:
            for static, fresh in zip(self.inputs, batch, strict=True):
                static.copy_(fresh)
            self.graph.replay()
        self.step += 1
        self.step_count_here += 1
        return self.outputs

    def _update(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        outputs = self.compute(*batch)
        outputs[0].backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return tuple(output.detach() for output in outputs)

    def _capture(self, batch: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(tensor.clone() for tensor in batch)
        self.graph = torch.cuda.CUDAGraph()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with capturing(self.graph):
            self.outputs = self._update(self.inputs)

    def log(self, **row: Any) -> None:
        """Append one row of the loss curve."""
        with self.log_path.open("a") as file:
            file.write(json.dumps({"step": self.step, **row}) + "\n")


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def progress_bar(columns: Sequence[str]) -> Progress:
    """Return a progress bar on standard error with one text column per field named in ``columns``."""
    fields = [TextColumn(f"{name} {{task.fields[{name}]}}") for name in columns]
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *fields,
        TimeRemainingColumn(),
        console=console,
    )
