import torch

from workbench.decode.drafters.none import NoDrafter


def test_proposes_nothing_on_the_model_s_device() -> None:
    drafter = NoDrafter()
    drafter.reset()
    drafter.observe(torch.ones(3, dtype=torch.int64, device="meta"), None)
    proposal = drafter.propose(0.0, None)
    assert proposal.tokens.shape == (0,)
    assert proposal.tokens.device.type == "meta"
    assert proposal.probs is None
    assert drafter.max_draft == 0
