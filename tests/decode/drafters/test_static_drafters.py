"""The drafters of fixed shapes draft what those of free shapes draft, captured or not."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.decode.dflash import DFlashModel
from workbench.decode.drafters.dflash import DFlashDrafter
from workbench.decode.drafters.mtp import MtpDrafter
from workbench.decode.drafters.protocol import Drafter, TargetFeatures
from workbench.decode.drafters.static_dflash import PlainDFlash, StaticDFlashDrafter
from workbench.decode.drafters.static_mtp import PlainMtp, StaticMtpDrafter
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.errors import InputError

LENGTH, DEPTH = 30, 3
HAS_GPU = torch.cuda.is_available()
Make = Callable[..., tuple[Drafter, Drafter]]


@dataclass
class Text:
    """A text and the target's features over it."""

    tokens: Tensor
    hidden: Tensor
    taps: Tensor

    def observe(self, drafter: Drafter, start: int, end: int) -> None:
        """Commit tokens ``start`` to ``end``; the first call, from 0, is the prompt with the token after it."""
        rows = slice(max(0, start - 1), end - 1)
        # A step's tokens come as they are on the device, int32; the engine's first ones are int64.
        tokens = self.tokens[start:end] if start == 0 else self.tokens[start:end].int()
        drafter.observe(tokens, TargetFeatures(self.hidden[rows], self.taps[rows]))


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Target]) -> Target:
    return tiny_target(3)


@pytest.fixture(scope="module")
def text(target: Target) -> Text:
    tokens = torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        hidden, taps, _ = target(tokens[None])
    return Text(tokens, hidden[0], taps[0])


@pytest.fixture(scope="module")
def make(target: Target, tiny_mtp: Callable[..., MtpHead], tiny_dflash: Callable[..., DFlashModel]) -> Make:
    """``make(kind, temperature, depth)``: the drafter of free shapes and that of fixed ones."""
    head, model = tiny_mtp(target), tiny_dflash(target)

    def build(kind: str, temperature: float = 0.0, depth: int = DEPTH) -> tuple[Drafter, Drafter]:
        if kind == "mtp":
            return (
                MtpDrafter(target, head, depth=depth, capacity=LENGTH),
                StaticMtpDrafter(
                    target, PlainMtp(target, head, LENGTH + depth), depth=depth, temperature=temperature, capture=False
                ),
            )
        stuck = kind == "dflash-stuck"
        return (
            DFlashDrafter(target, model, depth=depth, stuck_positions=stuck),
            StaticDFlashDrafter(
                target,
                model,
                PlainDFlash(target, model, stuck_positions=stuck),
                depth=depth,
                temperature=temperature,
                capture=False,
            ),
        )

    return build


@pytest.mark.parametrize("kind", ["mtp", "dflash", "dflash-stuck"])
@given(
    prompt=st.integers(1, 12),
    steps=st.lists(st.integers(1, DEPTH + 1), max_size=5),
    temperature=st.sampled_from([0.0, 0.7]),
    depth=st.integers(1, DEPTH),
)
@settings(max_examples=25, deadline=None)
def test_fixed_shapes_draft_the_same(
    make: Make, text: Text, kind: str, prompt: int, steps: list[int], temperature: float, depth: int
) -> None:
    free, fixed = make(kind, temperature, depth)
    for _ in range(2):  # a second sequence finds nothing of the first
        draws = [torch.Generator().manual_seed(7) for _ in range(2)]
        end = prompt + 1
        for drafter in (free, fixed):
            drafter.reset()
            text.observe(drafter, 0, end)
        for count in [*steps, 0]:
            wanted = free.propose(temperature, draws[0])
            got = fixed.propose(temperature, draws[1])
            assert got.tokens.tolist() == wanted.tokens.tolist()
            assert (got.probs is None) == (wanted.probs is None)
            if got.probs is not None:
                torch.testing.assert_close(got.probs, wanted.probs, rtol=1e-3, atol=1e-6)
            count = min(count, depth + 1)
            if count and end + count <= LENGTH:
                for drafter in (free, fixed):
                    text.observe(drafter, end, end + count)
                end += count


def test_a_block_past_the_model_s_positions_is_not_proposed(
    tiny_target: Callable[..., Target], tiny_dflash: Callable[..., DFlashModel]
) -> None:
    target = tiny_target(0, max_positions=12)
    model = tiny_dflash(target)
    drafter = StaticDFlashDrafter(target, model, PlainDFlash(target, model), depth=1, capture=False)
    for length, drafts in ((8, 1), (9, 0)):
        drafter.reset()
        drafter.observe(torch.arange(length + 1), TargetFeatures(torch.zeros(length, 32), torch.zeros(length, 2, 32)))
        assert len(drafter.propose(0.0, None).tokens) == drafts


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_misuse_is_refused(make: Make, text: Text, kind: str) -> None:
    _, drafter = make(kind)
    with pytest.raises(InputError, match=f"{kind}: propose was called before observe"):
        drafter.propose(0.0, None)
    with pytest.raises(InputError, match="must pass target features"):
        drafter.observe(text.tokens[:3], None)
    text.observe(drafter, 0, 5)
    with pytest.raises(InputError, match=r"built to draft at temperature 0\.0, not at 0\.5"):
        drafter.propose(0.5, torch.Generator())
    for depth in (0, 9):
        if kind == "dflash" or depth == 0:
            with pytest.raises(InputError, match=f"{kind}: depth={depth} must be"):
                make(kind, depth=depth)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU to capture graphs, torch.cuda finds none")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_captured_drafter_drafts_the_same(
    tiny_target: Callable[..., Target],
    tiny_mtp: Callable[..., MtpHead],
    tiny_dflash: Callable[..., DFlashModel],
    text: Text,
    kind: str,
    temperature: float,
) -> None:
    cuda = torch.device("cuda")
    target = tiny_target(3).to(cuda)
    there = Text(text.tokens.to(cuda), text.hidden.to(cuda), text.taps.to(cuda))

    def build(capture: bool) -> Drafter:
        if kind == "mtp":
            head = tiny_mtp(target).to(cuda)
            form = PlainMtp(target, head, LENGTH + DEPTH)
            return StaticMtpDrafter(target, form, depth=DEPTH, temperature=temperature, capture=capture)
        model = tiny_dflash(target).to(cuda)
        return StaticDFlashDrafter(target, model, PlainDFlash(target, model), temperature=temperature, capture=capture)

    drafted: list[list[list[int]]] = []
    for capture in (False, True):
        drafter, generator, found, end = build(capture), torch.Generator(cuda).manual_seed(7), [], 9
        there.observe(drafter, 0, end)
        for count in (1, 4, 2, 3, 0):
            found.append(drafter.propose(temperature, generator).tokens.tolist())
            if count:
                there.observe(drafter, end, end + count)
                end += count
        drafted.append(found)
    assert drafted[0] == drafted[1]
