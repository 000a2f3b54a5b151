"""The model card: facts of the corpus, loss curves from the training logs, accept lengths measured here and now."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.decode.drafters.dflash import DFlashDrafter
from workbench.decode.drafters.mtp import MtpDrafter
from workbench.decode.drafters.ngram import NGramDrafter
from workbench.decode.drafters.protocol import Drafter
from workbench.decode.engine import EagerEngine, SamplingRule, SequenceRecord
from workbench.decode.pipeline import load_tokenizer
from workbench.decode.presets import load_preset
from workbench.decode.prompts import Prompt
from workbench.decode.weights import load_dflash, load_target

NEW_TOKENS = 160
CAPACITY = 640


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accept length (bonus included) of one drafter at one temperature, and survival by draft position."""

    drafter: str
    depth: int
    temperature: float
    accept_length: float
    survival: tuple[float, ...]
    steps: int


def measure_acceptance(folder: Path, prompts: Sequence[Prompt], temperatures: Sequence[float]) -> Iterator[Acceptance]:
    """Decode ``prompts`` with every shipped drafter; final steps cut short by the token limit are left out."""
    spec = load_preset("nano")
    device = torch.device("cpu")
    target, head = load_target(spec, folder, device=device, dtype=torch.float32)
    model = load_dflash(spec, folder, device=device, dtype=torch.float32)
    tokenizer = load_tokenizer(folder)
    drafters: list[Drafter] = [
        NGramDrafter(depth=5, order=3),
        *(MtpDrafter(target, head, depth=depth, capacity=CAPACITY) for depth in (1, 2, 3, 5)),
        *(DFlashDrafter(target, model, depth=depth) for depth in (3, 5, 7)),
    ]
    for temperature in temperatures:
        for drafter in drafters:
            engine = EagerEngine(target, drafter, SamplingRule(temperature), capacity=CAPACITY, end_token=0)
            kept: list[int] = []
            for prompt in prompts:
                tokens = tokenizer.encode(prompt.text).ids
                # The last context behind which a full draft and the bonus token were still asked for.
                last = len(tokens) + NEW_TOKENS - drafter.max_draft - 2
                steps = engine.decode(tokens, NEW_TOKENS, SequenceRecord(len(tokens)))
                kept += [len(step.tokens) - 1 for step in steps if step.context <= last]
            survival = tuple(sum(count >= at for count in kept) / len(kept) for at in range(1, drafter.max_draft + 1))
            length = 1 + sum(kept) / len(kept)
            yield Acceptance(drafter.name, drafter.max_draft, temperature, length, survival, len(kept))


def render_card(folder: Path, acceptance: Sequence[Acceptance]) -> str:
    """Return the card as Markdown, from what lies in ``folder`` and the measured ``acceptance``."""
    spec = load_preset("nano")
    corpus = json.loads((folder / "corpus.json").read_text())
    target, drafter = (_log(folder / f"{name}.log.jsonl") for name in ("target", "dflash"))
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
    moe, dflash = spec.moe, spec.dflash
    assert moe is not None and dflash is not None  # noqa: S101, PT018 - nano has both
    full = ", ".join(str(at) for at, mixer in enumerate(spec.mixers) if mixer == "full")
    train, held_out = corpus["train"], corpus["held_out"]
    last = target[-1]
    lines = [
        "# nano: a small model that is real",
        "",
        "Made for the decode workbench, so that acceptance, routing and quantisation are measured and not simulated.",
        "It writes plausible Python and knows nothing; do not use it for anything but exercising a decoder.",
        "",
        f"- **Target**: {spec.layers} layers, hidden {spec.hidden}, {moe.experts} experts top-{moe.top_k} of width",
        f"  {moe.inter}, grouped-query attention, sliding window {spec.window} except in layers {full}, vocabulary",
        f"  {spec.vocab}, tied head.",
        "- **Experts in MXFP4** (scale rounding `up`), simulated in the forward pass during training with a",
        "  straight-through backward; attention with its output projection, norms, embeddings, router and head stay in",
        "  BF16.",
        "- **MTP head**: one layer, trained with the target, iterated for depth.",
        f"- **DFlash drafter**: {dflash.layers} layers, block {dflash.block}, window {dflash.window}, features of",
        f"  target layers {', '.join(map(str, dflash.taps))}; trained with Muon on text the target wrote.",
        f"- **Files**: {', '.join(f'`{name}` {size / 1e6:.2f} MB' for name, size in sizes.items())}.",
        f"- **Corpus**: {corpus['source']}, licence {corpus['licence']} (LICENSE-PSF.txt): {train['tokens']:,}",
        f"  training tokens of {train['documents']} documents; {held_out['documents']} documents",
        f"  ({held_out['tokens']:,} tokens) chosen by a hash of their name are held out.",
        "",
        "## Loss",
        "",
        f"Nats per token over {last['step']} steps of 64 x 512 tokens; final held-out loss {last['held_out']:.2f}, by",
        f"MTP depth {', '.join(f'{loss:.2f}' for loss in last['held_out_mtp'])}.",
        "",
        *_chart("Target: training and held-out loss", target, {"train": "train", "held_out": "held_out"}, "nats"),
        "",
        "Share of drafted tokens that equal the target's argmax, at block positions 1 and 3, over",
        f"{drafter[-1]['step']} steps (on the training text; positions count without regard to the ones before them).",
        "",
        *_chart("DFlash: agreement with the target", drafter, {"agree 1": "agree.0", "agree 3": "agree.2"}, "share"),
        "",
        "## Accept length",
        "",
        f"Committed tokens per step, bonus token included; 16 held-out prompts, {NEW_TOKENS} new tokens each, CPU,",
        "float32, measured by `python -m workbench.decode.train card`.",
        "",
        "| drafter | depth | temperature | accept length | survival by position | steps |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.drafter} | {row.depth} | {row.temperature:g} | {row.accept_length:.2f} | "
            f"{' '.join(f'{share:.2f}' for share in row.survival)} | {row.steps} |"
            for row in acceptance
        ),
        "",
        "## Rebuild",
        "",
        "```",
        "python -m workbench.decode.train corpus  --work W     # CPython 3.11.7 for the same tokens",
        "python -m workbench.decode.train target  --work W     # about 3 minutes on one H200",
        "python -m workbench.decode.train text    --work W",
        "python -m workbench.decode.train drafter --work W",
        "python -m workbench.decode.train ship    --work W scenarios/nano",
        "python -m workbench.decode.train card    scenarios/nano scenarios/prompts/held_out.jsonl",
        "```",
    ]
    return "\n".join(lines) + "\n"


def _log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _chart(title: str, log: list[dict[str, Any]], series: dict[str, str], unit: str) -> list[str]:
    """Return a Mermaid chart (rendered by code hosts, readable as text) of up to 16 points a series."""
    rows = log[:: max(1, len(log) // 16)]

    def value(row: dict[str, Any], key: str) -> float:
        name, _, index = key.partition(".")
        return float(row[name][int(index)] if index else row[name])

    lines = ["```mermaid", "xychart-beta", f'  title "{title} ({" / ".join(series)})"']
    lines.append(f'  x-axis "step" [{", ".join(str(row["step"]) for row in rows)}]')
    lines.append(f'  y-axis "{unit}"')
    lines += [f"  line [{', '.join(f'{value(row, key):.3f}' for row in rows)}]" for key in series.values()]
    return [*lines, "```"]
