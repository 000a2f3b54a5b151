import pytest
import torch

from workbench.errors import InputError
from workbench.kernels import mxfp4_retile
from workbench.kernels.mxfp4_layout import RowOrder, relayout
from workbench.kernels.mxfp4_retile import retile
from workbench.kernels.mxfp4_tiles import Rows, pack_tiles


def checkpoint(experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 255, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


@pytest.mark.parametrize(
    ("rows", "columns", "order", "tile_order"),
    [(48, 128, "plain", "plain"), (32, 64, "stacked", "halves"), (64, 192, "interleaved", "interleaved")],
)
def test_words_become_the_tiles_that_the_checkpoint_packs_to(
    rows: int, columns: int, order: RowOrder, tile_order: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxfp4_retile, "EXPERTS_AT_ONCE", 2)
    blocks, scales = checkpoint(5, rows, columns)
    assert torch.equal(retile(*relayout(blocks, scales, order)), pack_tiles(blocks, scales, order=tile_order))


def test_scales_that_the_tiles_cannot_hold_are_refused() -> None:
    blocks, scales = checkpoint(2, 32, 64)
    blocks[1, 21, 0] &= 0x88  # zeros of either sign, which any scale goes with
    scales[1, 21, 0] = 0
    words, scale_words = relayout(blocks, scales, "plain")
    assert torch.equal(retile(words, scale_words), pack_tiles(blocks, scales))
    for index in range(32):
        wrong = scale_words.clone()
        wrong.view(torch.uint8).view(2, 2, 32)[0, 1, index] = 0
        with pytest.raises(InputError, match="over a non-zero block"):
            retile(words, wrong)
    blocks[1, 21, 0, 3] = 0x10
    with pytest.raises(InputError, match="over a non-zero block"):
        retile(*relayout(blocks, scales, "plain"))
    scale_words.view(torch.uint8)[0, 0, 0, 5] = 255
    with pytest.raises(InputError, match="255 is NaN"):
        retile(words, scale_words)
