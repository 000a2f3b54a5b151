"""The shipped model and its drafters, on held-out text."""

import torch

from workbench.decode.drafters.dflash import DFlashDrafter
from workbench.decode.drafters.mtp import MtpDrafter
from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Drafter
from workbench.decode.engine import EagerEngine, SamplingRule, SequenceRecord
from workbench.decode.pipeline import load_tokenizer
from workbench.decode.presets import load_preset
from workbench.decode.prompts import read_prompts
from workbench.decode.weights import load_dflash, load_target, shipped_folder
from workbench.scenario import prompts_path

PROMPTS, NEW, CAPACITY = 4, 48, 512


def test_speculation_pays_and_leaves_greedy_output_unchanged() -> None:
    spec, folder, device = load_preset("nano"), shipped_folder(), torch.device("cpu")
    target, head = load_target(spec, folder, device=device, dtype=torch.float32)
    model = load_dflash(spec, folder, device=device, dtype=torch.float32)
    tokenizer = load_tokenizer(folder)
    prompts = read_prompts(prompts_path("held_out", folder), PROMPTS)

    def decode(drafter: Drafter) -> tuple[list[list[int]], float]:
        engine = EagerEngine(target, drafter, SamplingRule(), capacity=CAPACITY, end_token=0)
        outputs, steps = [], 0
        for prompt in prompts:
            record = SequenceRecord(0)
            steps += len(list(engine.decode(tokenizer.encode(prompt.text).ids, NEW, record)))
            outputs.append(record.tokens)
        return outputs, sum(len(output) - 1 for output in outputs) / steps

    plain, one = decode(NoDrafter())
    assert one == 1
    for drafter, least in (
        (MtpDrafter(target, head, depth=3, capacity=CAPACITY), 1.5),
        (DFlashDrafter(target, model), 2.0),
    ):
        outputs, accept_length = decode(drafter)
        assert outputs == plain, drafter.name
        assert accept_length > least, drafter.name
    for prompt in prompts:
        assert tokenizer.decode(tokenizer.encode(prompt.text).ids) == prompt.text
