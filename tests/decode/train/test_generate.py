from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from workbench.decode.model import Target
from workbench.decode.train.generate import TEMPERATURES, continue_batch, generate


def test_every_fourth_sequence_is_greedy_and_the_rest_follow_the_seed(tiny_target: Callable[..., Target]) -> None:
    target = tiny_target(1)
    prompts = torch.randint(64, (1, 5), generator=torch.Generator().manual_seed(0)).expand(9, -1)
    text, same, other = (continue_batch(target, prompts, 16, torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    assert TEMPERATURES[0] == 0
    assert text.shape == (9, 16)
    assert text[:, :5].equal(prompts)
    assert text.equal(same)
    assert not text.equal(other)
    greedy = text[:1]
    with torch.no_grad():
        hidden, _, _ = target(greedy)
        assert target.logits(hidden)[0, 4:-1].argmax(-1).equal(greedy[0, 5:])
    assert text[4].equal(greedy[0])
    assert text[8].equal(greedy[0])


def test_hot_sequences_are_drawn_from_the_target_s_distribution(tiny_target: Callable[..., Target]) -> None:
    target = tiny_target(1, vocab=6)
    prompts = torch.tensor([[1, 2, 3]]).expand(4000, -1)
    last = continue_batch(target, prompts, 4, torch.Generator().manual_seed(0))[3::4, -1]  # temperature 1
    with torch.no_grad():
        expected = target.logits(target(prompts[:1])[0][0, -1]).softmax(-1)
    drawn = last.bincount(minlength=6) / 1000
    assert float((drawn - expected).abs().max()) < 0.06


def test_the_file_holds_the_rows_asked_for(tiny_target: Callable[..., Target], tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.arange(60, dtype=np.uint16))
    out = tmp_path / "made" / "text.npy"
    generate(tiny_target(0), tmp_path, out, sequences=6, length=12, prompt=4, batch=4, seed=0)
    rows = np.load(out)
    assert rows.dtype == np.uint16
    assert rows.shape == (6, 12)
    assert (np.diff(rows[:, :4].astype(int)) == 1).all()
