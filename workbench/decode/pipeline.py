"""From a variant to something that decodes: shape, weights, drafter and engine, built once."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from workbench.decode.dflash import DFlashModel
from workbench.decode.drafters.dflash import DFlashDrafter
from workbench.decode.drafters.mtp import MtpDrafter
from workbench.decode.drafters.ngram import NGramDrafter
from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Drafter
from workbench.decode.drafters.simulated import SimulatedAcceptance, SimulatedDrafter
from workbench.decode.drafters.static_dflash import DFlashForm, PlainDFlash, StaticDFlashDrafter
from workbench.decode.drafters.static_mtp import MtpForm, PlainMtp, StaticMtpDrafter
from workbench.decode.engine import Engine, SamplingRule
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.precision import Policy, load_policy
from workbench.decode.prompts import read_prompts
from workbench.decode.rungs.build import build_rung, drafter_target
from workbench.decode.rungs.faulty import OffsetDrafter, PausingEngine, cap_acceptance
from workbench.decode.rungs.fit import (
    base_format,
    check_variants,
    load_shape,
    resolve_device,
    variant_spec,
)
from workbench.decode.rungs.grouping import ExpertForm
from workbench.decode.rungs.plan import PLANS, plan_of, stays_packed
from workbench.decode.rungs.store import Held, WeightStore
from workbench.decode.spec import ModelSpec
from workbench.decode.weights import load_dflash, shipped_folder
from workbench.errors import InputError
from workbench.scenario import Variant

if TYPE_CHECKING:
    from workbench.engines.sglang_engine import SglangEngine


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """One prompt as tokens."""

    id: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A variant, ready to run.

    ``dtype``: what the engine computes in. ``stored`` and ``held``: in which formats the weights are published, and in
    which this rung keeps and reads them. ``spec`` is what runs, the slice of one of ``tp`` ranks of ``whole``.
    """

    variant: Variant
    spec: ModelSpec
    whole: ModelSpec
    tp: int
    device: torch.device
    dtype: torch.dtype
    stored: Policy
    held: Policy
    engine: "Engine | SglangEngine"
    prompts: list[TokenPrompt]
    experts: ExpertForm | None = None

    def close(self) -> None:
        """End what the engine keeps running."""
        if not isinstance(self.engine, Engine):
            self.engine.close()


def build_pipeline(variant: Variant, store: WeightStore | None = None) -> Pipeline:
    """Build the model, the drafter and the engine that ``variant`` describes.

    ``store`` keeps weights for the variants that follow; who passes one has checked all variants before the first was
    built (``check_variants``). Raises UnfitError where the machine cannot run it and InputError where the combination
    makes no sense.
    """
    if store is None:
        check_variants([variant])
        store = WeightStore()
    where = f"variant {variant.name!r}"
    device = resolve_device(variant.engine.device, where)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec = variant_spec(variant)
    plan = plan_of(variant.engine.rung, spec)
    stored = load_policy(variant.precision.policy, shipped=spec.shipped)
    prompts = _prompts(variant, spec)
    if variant.engine.kind == "sglang":
        from workbench.engines.sglang_engine import SglangEngine

        whole, tp = load_shape(variant), variant.model.tp
        served = SglangEngine(variant, spec)
        return Pipeline(variant, spec, whole, tp, device, dtype, stored, stored, served, prompts)
    longest = max(len(prompt.tokens) for prompt in prompts)
    # A draft may reach past the last token that is asked for.
    capacity = longest + variant.prompts.new_tokens + variant.drafter.width
    weights = store.get(variant, spec, device, dtype, packed=stays_packed(variant))
    drafter = _drafter(variant, weights, capacity, where)
    simulated = variant.drafter.kind == "simulated"
    trained = variant.model.weights == "trained"
    acceptance = _acceptance(variant) if simulated else None
    rung = build_rung(variant, weights, capacity, acceptance)
    make = PausingEngine if "pause-between-steps" in variant.engine.faults else Engine
    if "vocabulary-offset" in variant.engine.faults:
        drafter = OffsetDrafter(drafter, spec.vocab)
    engine = make(
        rung.forward,
        drafter,
        SamplingRule(
            temperature=_temperature(variant),
            top_p=variant.sampling.top_p,
            seed=variant.sampling.seed,
        ),
        end_token=0 if trained and not simulated else None,
        acceptance=acceptance,
        verify=rung.verify,
        ahead=rung.ahead,
    )
    if "accept-cap" in variant.engine.faults:
        engine.judge = cap_acceptance(engine.judge)
    held = plan.held(stored, base_format(device), packed=stays_packed(variant))
    whole, tp = load_shape(variant), variant.model.tp
    return Pipeline(variant, spec, whole, tp, device, dtype, stored, held, engine, prompts, rung.experts)


def _drafter(variant: Variant, weights: Held, capacity: int, where: str) -> Drafter:
    settings, mtp = variant.drafter, weights.mtp
    target: Target = drafter_target(variant, weights.target)
    plan = PLANS[variant.engine.rung]
    match settings.kind:
        case "none":
            return NoDrafter()
        case "ngram":
            return NGramDrafter(settings.depth, settings.order)
        case "simulated":
            return SimulatedDrafter(settings.depth, target.spec.vocab, seed=variant.sampling.seed)
        case "mtp":
            if mtp is None:
                raise InputError(f"{where}: drafter.kind: 'mtp' needs trained weights", hint="use kind = 'simulated'")
            if not (plan.graph or plan.persistent):
                return MtpDrafter(target, mtp, depth=settings.depth, capacity=capacity)
            return _static_mtp(variant, target, mtp, capacity)
        case "dflash":
            if variant.model.weights != "trained":
                raise InputError(
                    f"{where}: drafter.kind: 'dflash' needs trained weights", hint="use kind = 'simulated'"
                )
            model = load_dflash(target.spec, shipped_folder(), device=target.device, dtype=target.dtype)
            stuck = "block-positions" in variant.engine.faults
            if not (plan.graph or plan.persistent):
                return DFlashDrafter(target, model, depth=settings.depth, stuck_positions=stuck)
            return _static_dflash(variant, target, model, stuck)


def _static_mtp(variant: Variant, target: Target, head: MtpHead, capacity: int) -> StaticMtpDrafter:
    """Return the drafter for a target that is captured: in plain launches it would take longer than what it saves."""
    depth, capture = variant.drafter.depth, target.device.type == "cuda"
    form: MtpForm
    if PLANS[variant.engine.rung].kernels:
        from workbench.decode.rungs.fused_drafters import FusedMtp, drafter_cut  # needs triton

        form = FusedMtp(target, head, capacity + depth, drafter_cut(target.device))
    else:
        form = PlainMtp(target, head, capacity + depth)
    return StaticMtpDrafter(target, form, depth=depth, temperature=_temperature(variant), capture=capture)


def _static_dflash(variant: Variant, target: Target, model: DFlashModel, stuck: bool) -> StaticDFlashDrafter:
    """As :func:`_static_mtp`."""
    depth, capture = variant.drafter.depth, target.device.type == "cuda"
    form: DFlashForm
    if PLANS[variant.engine.rung].kernels:
        from workbench.decode.rungs.fused_drafters import FusedDFlash, drafter_cut  # needs triton

        form = FusedDFlash(target, model, drafter_cut(target.device), stuck_positions=stuck)
    else:
        form = PlainDFlash(target, model, stuck_positions=stuck)
    return StaticDFlashDrafter(target, model, form, depth=depth, temperature=_temperature(variant), capture=capture)


def _temperature(variant: Variant) -> float:
    """Return the temperature that tokens are drawn at; 0 is greedy."""
    return variant.sampling.temperature if variant.sampling.method == "sample" else 0.0


def _acceptance(variant: Variant) -> SimulatedAcceptance:
    settings = variant.drafter
    assert settings.accept_length is not None  # noqa: S101 - guaranteed by the scenario's validator
    return SimulatedAcceptance(settings.accept_length, settings.depth, settings.pattern, seed=variant.sampling.seed)


def _prompts(variant: Variant, spec: ModelSpec) -> list[TokenPrompt]:
    room = spec.max_positions - variant.prompts.new_tokens - variant.drafter.width
    limit = min(variant.prompts.max_prompt_tokens, room)
    if limit < 1:
        raise InputError(
            f"variant {variant.name!r}: prompts.new_tokens: {variant.prompts.new_tokens} leave no room for a prompt "
            f"in {spec.name}'s {spec.max_positions} positions"
        )
    rows = read_prompts(variant.prompts_path, variant.prompts.count)
    if variant.model.weights == "trained":
        tokenizer = load_tokenizer(shipped_folder())
        return [TokenPrompt(row.id, tokenizer.encode(row.text).ids[-limit:]) for row in rows]
    # Random weights read random tokens: the text's only use is its length, one token for every three bytes.
    stream = random.Random(variant.model.seed)  # noqa: S311 - not for security
    return [
        TokenPrompt(row.id, [stream.randrange(spec.vocab) for _ in range(min(limit, max(1, len(row.text) // 3)))])
        for row in rows
    ]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load ``folder``/tokenizer.json. Raises InputError where it is missing or damaged."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{path}: no tokenizer here")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise InputError(f"{path}: not a readable tokenizer ({error})") from None
