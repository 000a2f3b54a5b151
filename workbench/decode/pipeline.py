"""From a variant to something that decodes: shape, weights, drafter and engine, built once."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from workbench.decode.drafters.dflash import DFlashDrafter
from workbench.decode.drafters.mtp import MtpDrafter
from workbench.decode.drafters.ngram import NGramDrafter
from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Drafter
from workbench.decode.drafters.simulated import SimulatedAcceptance, SimulatedDrafter
from workbench.decode.engine import EagerEngine, SamplingRule
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.precision import load_policy
from workbench.decode.presets import load_preset
from workbench.decode.prompts import read_prompts
from workbench.decode.spec import ModelSpec
from workbench.decode.weights import load_dflash, load_target, random_target, shipped_folder
from workbench.errors import InputError, UnfitError
from workbench.scenario import Variant


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """One prompt as tokens."""

    id: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A variant, ready to run. ``dtype``: what the engine holds and computes in, whatever the stored formats."""

    variant: Variant
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    engine: EagerEngine
    prompts: list[TokenPrompt]


def build_pipeline(variant: Variant) -> Pipeline:
    """Build the model, the drafter and the engine that ``variant`` describes.

    Raises UnfitError where the machine cannot run it and InputError where the combination makes no sense.
    """
    where = f"variant {variant.name!r}"
    if variant.engine.rung != "eager":
        raise UnfitError(f"{where}: engine.rung: {variant.engine.rung!r} is not built in this version; use 'eager'")
    device = resolve_device(variant.engine.device, where)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec = load_preset(str(variant.shape_path or variant.model.preset))
    target, mtp = _weights(variant, spec, device, dtype, where)
    prompts = _prompts(variant, spec)
    longest = max(len(prompt.tokens) for prompt in prompts)
    # A draft may reach past the last token that is asked for.
    capacity = longest + variant.prompts.new_tokens + variant.drafter.width
    drafter = _drafter(variant, target, mtp, capacity, where)
    simulated = variant.drafter.kind == "simulated"
    trained = variant.model.weights == "trained"
    engine = EagerEngine(
        target,
        drafter,
        SamplingRule(
            temperature=variant.sampling.temperature if variant.sampling.method == "sample" else 0.0,
            top_p=variant.sampling.top_p,
            seed=variant.sampling.seed,
        ),
        capacity=capacity,
        end_token=0 if trained and not simulated else None,
        acceptance=_acceptance(variant) if simulated else None,
    )
    return Pipeline(variant, spec, device, dtype, engine, prompts)


def resolve_device(name: str, where: str) -> torch.device:
    """Turn ``auto``, ``cpu`` or ``cuda`` into a device that exists."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UnfitError(f"{where}: engine.device: 'cuda' asks for an NVIDIA GPU and torch sees none", hint="use 'cpu'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _weights(
    variant: Variant, spec: ModelSpec, device: torch.device, dtype: torch.dtype, where: str
) -> tuple[Target, MtpHead | None]:
    policy = load_policy(variant.precision.policy, shipped=spec.shipped)
    if variant.model.weights == "random":
        return random_target(spec, seed=variant.model.seed, device=device, dtype=dtype), None
    if spec.name != "nano":
        raise InputError(f"{where}: model.weights: only 'nano' ships trained weights", hint="use weights = 'random'")
    if policy.name != spec.shipped:
        raise InputError(f"{where}: precision.policy: the trained nano is stored as {spec.shipped!r}")
    return load_target(spec, shipped_folder(), device=device, dtype=dtype)


def _drafter(variant: Variant, target: Target, mtp: MtpHead | None, capacity: int, where: str) -> Drafter:
    settings = variant.drafter
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
            return MtpDrafter(target, mtp, depth=settings.depth, capacity=capacity)
        case "dflash":
            if variant.model.weights != "trained":
                raise InputError(
                    f"{where}: drafter.kind: 'dflash' needs trained weights", hint="use kind = 'simulated'"
                )
            model = load_dflash(target.spec, shipped_folder(), device=target.device, dtype=target.dtype)
            return DFlashDrafter(target, model, depth=settings.depth)


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
