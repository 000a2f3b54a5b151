from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from workbench.decode.dflash import DFlashModel
from workbench.decode.model import Target
from workbench.decode.train.drafter import DECAY, block_mask, drafter_loss, train_drafter
from workbench.errors import InputError


@given(
    anchors=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    window=st.integers(1, 12),
    block=st.integers(1, 4),
)
def test_a_block_sees_the_window_before_its_anchor_and_itself(anchors: list[int], window: int, block: int) -> None:
    context = 12
    mask = block_mask(torch.tensor([anchors, anchors[::-1]]), context, window, block)
    assert mask.shape == (2, 1, 1, len(anchors) * block, context + len(anchors) * block)
    for entry, order in enumerate((anchors, anchors[::-1])):
        for row, seen in enumerate(mask[entry, 0, 0]):
            own = row // block
            visible = set(range(max(0, order[own] - window), order[own]))
            visible |= {context + own * block + place for place in range(block)}
            assert set(seen.nonzero().flatten().tolist()) == visible


def test_the_loss_is_half_text_half_target_decayed_by_position(
    tiny_target: Callable[..., Target], tiny_dflash: Callable[..., DFlashModel]
) -> None:
    target = tiny_target(0)
    model = tiny_dflash(target)
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[8, 12, 15], [9, 9, 16]])
    with torch.no_grad():
        hidden, taps, _ = target(tokens)
        loss, agree = drafter_loss(model, target, tokens, anchors, hidden, taps)
        total = weights = 0.0
        hits = torch.zeros(3)
        for b, a in ((b, a) for b in range(2) for a in range(3)):
            at = int(anchors[b, a])
            context = model.context(taps[b : b + 1, max(0, at - 6) : at], target.rope[:, max(0, at - 6) : at])
            allowed = torch.ones(1, 1, 1, 4, context[0][0].shape[2] + 4, dtype=torch.bool)
            anchor = target.embed(tokens[b : b + 1, at : at + 1])
            states = model.fill(anchor, target.rope[:, at : at + 4], context, allowed)[0, 0]
            for place in range(3):
                log_q = F.log_softmax(states[place] @ target.head_weight.T, -1)
                p = target.logits(hidden[b, at + place]).softmax(-1)
                weight = float(torch.exp(torch.tensor(-place / DECAY)))
                nats = 0.5 * -log_q[tokens[b, at + 1 + place]] + 0.5 * -(p * log_q).sum()
                total += weight * float(nats)
                weights += weight
                hits[place] += log_q.argmax() == p.argmax()
    assert float(loss) == pytest.approx(total / weights, rel=1e-4)
    assert agree.tolist() == pytest.approx((hits / 6).tolist())


def test_agreement_with_a_text_that_repeats_rises(
    tiny_target: Callable[..., Target], tiny_dflash: Callable[..., DFlashModel], tmp_path: Path
) -> None:
    target = tiny_target(0)
    model = tiny_dflash(target)
    before = [parameter.clone() for parameter in target.parameters()]
    rows = np.array([np.arange(start, start + 24) % 8 for start in range(8)], dtype=np.uint16)
    np.save(tmp_path / "text.npy", rows)
    tokens = torch.from_numpy(rows.astype(np.int64))
    anchors = torch.full((8, 1), 12)

    def text_loss() -> float:
        with torch.no_grad():
            hidden, taps, _ = target(tokens)
            return float(drafter_loss(model, target, tokens, anchors, hidden, taps)[0])

    start = text_loss()
    train_drafter(
        model,
        target,
        tmp_path / "text.npy",
        tmp_path,
        steps=40,
        minutes=float("inf"),
        batch=4,
        anchors=4,
        rate=1e-2,
        seed=0,
    )
    assert text_loss() < start - 0.5
    assert all(parameter.equal(old) for parameter, old in zip(target.parameters(), before, strict=True))


def test_text_too_short_for_a_block_is_refused(
    tiny_target: Callable[..., Target], tiny_dflash: Callable[..., DFlashModel], tmp_path: Path
) -> None:
    target = tiny_target(0)
    np.save(tmp_path / "text.npy", np.zeros((4, 12), dtype=np.uint16))
    with pytest.raises(InputError, match=r"text\.npy: rows of 12 tokens are too short for a block of 4"):
        train_drafter(
            tiny_dflash(target),
            target,
            tmp_path / "text.npy",
            tmp_path,
            steps=1,
            minutes=1,
            batch=1,
            anchors=1,
            rate=1e-3,
            seed=0,
        )
