from collections.abc import Callable

import pytest
import torch

from workbench.decode.dflash import DFlashModel
from workbench.decode.model import Target
from workbench.decode.presets import load_preset
from workbench.decode.spec import ModelSpec
from workbench.errors import InputError

MakeSpec = Callable[..., ModelSpec]


def test_context_has_every_layer_s_keys_and_values(
    tiny_target: Callable[..., Target], tiny_dflash: Callable[..., DFlashModel]
) -> None:
    target = tiny_target(0)
    model = tiny_dflash(target)
    context = model.context(torch.randn(3, 7, 2, 32), target.rope[:, :7])
    assert [(tuple(keys.shape), tuple(values.shape)) for keys, values in context] == [((3, 2, 7, 8), (3, 2, 7, 8))] * 2
    assert not torch.allclose(context[0][0], context[1][0])


def test_masks_are_told_apart_by_position_only(
    tiny_target: Callable[..., Target], tiny_dflash: Callable[..., DFlashModel]
) -> None:
    target = tiny_target(0)
    model = tiny_dflash(target)
    context = model.context(torch.randn(1, 4, 2, 32), target.rope[:, :4])
    anchors = target.embed(torch.tensor([[9]]))
    allowed = torch.ones(1, 1, 1, 4, 8, dtype=torch.bool)
    states = model.fill(anchors, target.rope[:, 4:8], context, allowed)
    assert states.shape == (1, 1, 3, 32)
    assert not torch.allclose(states[0, 0, 0], states[0, 0, 1], atol=1e-4)
    same = target.rope[:, 4:5].expand(-1, 4, -1)
    states = model.fill(anchors, same, context, allowed)
    torch.testing.assert_close(states[0, 0, 0], states[0, 0, 2])


def test_heads_may_differ_from_the_target_s(tiny_spec: MakeSpec, tiny_target: Callable[..., Target]) -> None:
    dflash = {"layers": 1, "block": 3, "window": 4, "inter": 16, "taps": (1,), "heads": 6, "kv_heads": 3}
    target = tiny_target(0, dflash=dflash)
    model = DFlashModel(target.spec)
    keys, _ = model.context(torch.randn(1, 5, 1, 32), target.rope[:, :5])[0]
    assert keys.shape == (1, 3, 5, 8)


def test_a_shape_that_cannot_be_built_is_refused(tiny_spec: MakeSpec) -> None:
    dflash = {"layers": 1, "block": 3, "window": 4, "inter": 16, "taps": (1,)}
    for spec, message in (
        (tiny_spec(dflash=None), "tiny: a dflash section"),
        (load_preset("deepseek-v3"), "deepseek-v3: a dflash section"),
        (tiny_spec(dflash=dflash | {"qk_dim": 16}), "tiny: dflash.qk_dim=16 differs from the target's 8"),
    ):
        with pytest.raises(InputError, match=message):
            DFlashModel(spec)
