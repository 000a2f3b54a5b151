"""The persistent rung where a drafter widens the step: one launch scores 2 to 8 tokens
(workbench/kernels/persistent_wide.py).

The launch is a :class:`~workbench.decode.rungs.static.Step` without layers of its own, so that graphs, padding, prompts
and the decision on the device are those of every other rung. Hidden states and taps leave the launch in bfloat16:
every drafter can read them.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.decode.model import Scores, Target
from workbench.decode.rungs.decided import DecidedScores
from workbench.decode.rungs.packed import PackedExperts
from workbench.decode.rungs.persistent import step_shape, step_weights
from workbench.decode.rungs.static import StaticForward, StepInputs
from workbench.decode.spec import ModelSpec
from workbench.errors import InputError
from workbench.kernels.persistent_shape import rope_table
from workbench.kernels.persistent_wide import (
    MAX_TOKENS,
    PHASES,
    WideEngine,
    WidePlan,
    compile_wide,
    make_wide_plan,
    new_state,
)
from workbench.kernels.step_engine import FLAGS_AT, refuse

CARD_SMS = 132
"""Multiprocessors of an H100 or H200: what a variant is checked for before there is a card to ask."""


def check_width(spec: ModelSpec, width: int) -> None:
    """Raise InputError where no launch takes ``width`` tokens of ``spec``; nothing is compiled."""
    if width > MAX_TOKENS:
        raise InputError(
            f"drafter.depth: rung 'persistent' scores up to {MAX_TOKENS} tokens a step, not {width}",
            hint=f"use a depth that leads to {MAX_TOKENS} or fewer",
        )
    if width > 1:
        make_wide_plan(step_shape(spec), width, CARD_SMS)


@dataclass(frozen=True, slots=True)
class WideState:
    """A step under way: the engine that runs it and what it reads."""

    engine: WideEngine
    inputs: StepInputs


class WideStep:
    """``target`` as one launch a step, at any of ``widths``; one set of weights and caches for all of them."""

    layers = 0

    def __init__(
        self,
        target: Target,
        packed: Sequence[PackedExperts],
        capacity: int,
        widths: Sequence[int],
        *,
        decide: bool = True,
    ) -> None:
        """``capacity``: positions, those that padding touches included. ``decide``: verify greedily behind the launch,
        by the tokens it chose.

        Raises InputError for a model or a width that the kernel does not take, UnfitError without a GPU of compute
        capability 9, without NVRTC, or where memory does not suffice. Compiles before it packs the weights.
        """
        spec, device = target.spec, target.device
        self._shape, self._capacity, self._device = step_shape(spec), capacity, device
        check_width(spec, max(widths))
        grid = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CARD_SMS
        plans = {width: make_wide_plan(self._shape, width, grid) for width in sorted(set(widths))}
        self._compile(plans)
        self._rope = rope_table(capacity, self._shape.head_dim, spec.rope_theta, device)
        self._weights = step_weights(target, packed, self._shape)
        self._dtype, self._decide, self._taps = target.dtype, decide, tuple(target.taps)
        self._take(plans)

    def _compile(self, plans: Mapping[int, WidePlan]) -> None:
        for plan in dict.fromkeys(plans.values()):
            compile_wide(self._shape, plan)

    def _take(self, plans: Mapping[int, WidePlan]) -> None:
        """Run by ``plans``, over a cache of its own."""
        self._shared = new_state(self._shape, self._capacity, self._rope, self._device)
        self._engines = {
            width: WideEngine(self._shape, self._weights, self._shared, plan, self._taps)
            for width, plan in plans.items()
        }
        for width, engine in self._engines.items():
            engine.buffers.state[0] = width
        self._flags = torch.zeros(1, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._seen = self._flags.numpy()

    def laned(self) -> "WideStep":
        """Return a step over the same weights whose kernels stamp their phases, with a cache of its own.

        Raises UnfitError where its buffers do not fit.
        """
        other = copy(self)
        plans = {width: replace(engine.plan, lanes=True) for width, engine in self._engines.items()}
        other._compile(plans)
        other._take(plans)
        return other

    @property
    def engines(self) -> dict[int, WideEngine]:
        """The kernel and its buffers, by width."""
        return self._engines

    def begin(self, inputs: StepInputs) -> WideState:
        """Hand the tokens and their position to the kernel."""
        width = len(inputs.tokens)
        engine = self._engines[width]
        state = engine.buffers.state
        torch.sub(inputs.kv_len, width, out=state[1:2])
        state[2 : 2 + width].copy_(inputs.tokens)
        return WideState(engine, inputs)

    def layer(self, index: int, state: WideState) -> None:
        """There is none to run: the launch takes all of them."""
        raise InputError(f"persistent: layer {index} does not run by itself; a step is one launch")

    def end(self, state: WideState) -> Scores:
        """Launch, and return what it leaves."""
        engine, width = state.engine, len(state.inputs.tokens)
        engine.step()
        buffers = engine.buffers
        self._flags.copy_(buffers.sync[FLAGS_AT : FLAGS_AT + 1], non_blocking=True)
        scores = Scores(
            logits=buffers.logits[None, :width],
            hidden=buffers.hidden[None, :width].to(self._dtype),
            taps=buffers.tapped[None, :width].to(self._dtype),
            experts=buffers.routing[:, :width],
        )
        return self._decided(scores, state) if self._decide else scores

    def _decided(self, scores: Scores, state: WideState) -> DecidedScores:
        """Verify the step's own drafts in one launch, by the tokens the step chose."""
        from workbench.kernels.chain_verify import decide_greedy  # needs triton, which checking a variant does not

        buffers, inputs, width = state.engine.buffers, state.inputs, len(state.inputs.tokens)
        words = buffers.words if width == state.engine.plan.tokens else None
        if words is None:  # the kernel is wider: what lies in one piece is of its width
            outcome = torch.empty(3 * width, dtype=torch.int32, device=self._device)
            outcome[width + 1 : 2 * width + 1].copy_(buffers.best[:width])
        else:
            outcome = words[: 3 * width]
        decide_greedy(inputs.tokens, outcome, inputs.lengths, keep=inputs.keep)
        return DecidedScores(scores.logits, scores.hidden, scores.taps, scores.experts, outcome, words)

    def check(self) -> None:
        """Raise UnfitError where a step that the host has waited for went wrong."""
        refuse(int(self._seen[0]))

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """The kernel's slabs."""
        return list(zip(self._shared.keys, self._shared.values, strict=True))


class WideForward(StaticForward[WideState]):
    """The wide launch as a forward; a step that went wrong is refused where it is read or before the next one."""

    phases = PHASES

    def __init__(
        self,
        step: WideStep,
        *,
        device: torch.device,
        capacity: int,
        widths: Sequence[int],
        capture: bool,
        ahead: bool = False,
    ) -> None:
        super().__init__(
            step, device=device, capacity=capacity, widths=widths, capture=capture, decide=False, ahead=ahead
        )
        self.step = step

    def check(self) -> None:
        """Raise UnfitError where a step that the host has waited for went wrong."""
        self.step.check()

    @property
    def engine(self) -> WideEngine:
        """The kernel of the widest step, and its buffers."""
        return self.step.engines[self._widths[-1]]

    def laned(self) -> "WideForward":
        """Return a forward over the same weights whose kernel stamps its phases, with a cache of its own.

        Raises UnfitError where its buffers do not fit.
        """
        return WideForward(
            self.step.laned(),
            device=self.device,
            capacity=self._capacity,
            widths=self._widths,
            capture=self.device.type == "cuda",
        )

    def prefill(self, tokens: Tensor) -> Scores:
        """Run the prompt in pieces of the widest step, and wait for them."""
        scores = super().prefill(tokens)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.check()
        return scores

    def score(self, tokens: Tensor) -> Scores:
        """Run one verify forward."""
        self.check()
        return super().score(tokens)


def wide_forward(
    target: Target,
    packed: Sequence[PackedExperts],
    capacity: int,
    width: int,
    *,
    decide: bool = True,
    ahead: bool = False,
) -> WideForward:
    """Return the forward of steps of up to ``width`` tokens, captured as a graph on a GPU; errors are WideStep's."""
    widths = [width]
    step = WideStep(target, packed, capacity + StaticForward.slack(widths), widths, decide=decide)
    device = target.device
    return WideForward(
        step, device=device, capacity=capacity, widths=widths, capture=device.type == "cuda", ahead=ahead
    )
