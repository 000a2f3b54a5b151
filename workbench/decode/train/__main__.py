"""``python -m workbench.decode.train``: rebuild the nano model, stage by stage or in one go.

corpus → target (with MTP head) → text → drafter → ship. Every stage reads and writes ``--work`` and resumes.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer

from workbench.decode.dflash import DFlashModel
from workbench.decode.model import Target
from workbench.decode.presets import load_preset
from workbench.decode.prompts import read_prompts
from workbench.decode.train.card import measure_acceptance, render_card
from workbench.decode.train.corpus import build, read_documents
from workbench.decode.train.drafter import train_drafter
from workbench.decode.train.generate import generate
from workbench.decode.train.held_out import write_prompts
from workbench.decode.train.target import TargetWithMtp, initialize, train_target
from workbench.decode.train.tokenizer import train_tokenizer
from workbench.decode.weights import load_target, pack, save
from workbench.errors import InputError, WorkbenchError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Work = Annotated[Path, typer.Option(help="folder of the corpus, checkpoints and logs")]
Device = Annotated[str, typer.Option(help="torch device")]
Minutes = Annotated[float, typer.Option(help="stop early so as to finish within this time")]
Seed = Annotated[int, typer.Option(help="random seed")]


@app.command()
def corpus(work: Work, stdlib: Annotated[Path | None, typer.Option(help="default: this interpreter's")] = None) -> None:
    """Tokenise the standard library into WORK/corpus (train.npy, held_out.npy, tokenizer.json)."""
    documents = read_documents(stdlib)
    spec = load_preset("nano")
    tokenizer = train_tokenizer((document.text for document in documents if not document.held_out), spec.vocab)
    facts = build(work / "corpus", tokenizer, documents)
    tokenizer.save(str(work / "corpus" / "tokenizer.json"))
    print(json.dumps(facts, indent=2))


@app.command()
def prompts(
    out: Annotated[Path, typer.Argument(help="JSON Lines file to write")],
    stdlib: Annotated[Path | None, typer.Option(help="default: this interpreter's")] = None,
    count: int = 16,
) -> None:
    """Write prompts from the held-out documents."""
    print(f"{write_prompts(read_documents(stdlib), out, count)} prompts in {out}")


@app.command()
def target(
    work: Work,
    steps: int = 1800,
    minutes: Minutes = float("inf"),
    batch: int = 64,
    length: int = 512,
    rate: float = 3e-3,
    device: Device = "cuda",
    seed: Seed = 0,
) -> None:
    """Train the target and its MTP head; writes WORK/target.safetensors."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    spec = load_preset("nano")
    model = TargetWithMtp(Target(spec))
    initialize(model)
    model.to(device)
    train_target(
        model, _corpus(work), work, steps=steps, minutes=minutes, batch=batch, length=length, rate=rate, seed=seed
    )
    tensors = pack(model.target, "up") | {f"mtp.{name}": tensor for name, tensor in pack(model.mtp, "up").items()}
    save(work / "target.safetensors", tensors, spec=spec.model_dump(mode="json", exclude_none=True), rounding="up")


@app.command()
def text(
    work: Work,
    sequences: int = 49152,
    length: int = 384,
    prompt: int = 48,
    batch: int = 8192,
    device: Device = "cuda",
    seed: Seed = 0,
) -> None:
    """Let the target continue training-set prompts; writes WORK/text.npy for self-distillation."""
    target, _ = load_target(load_preset("nano"), work, device=torch.device(device), dtype=_dtype(device))
    generate(
        target,
        _corpus(work),
        work / "text.npy",
        sequences=sequences,
        length=length,
        prompt=prompt,
        batch=batch,
        seed=seed,
    )


@app.command()
def drafter(
    work: Work,
    steps: int = 5500,
    minutes: Minutes = float("inf"),
    batch: int = 64,
    anchors: int = 48,
    rate: float = 3e-3,
    device: Device = "cuda",
    seed: Seed = 0,
) -> None:
    """Train the DFlash drafter on WORK/text.npy; writes WORK/dflash.safetensors."""
    torch.manual_seed(seed)
    spec = load_preset("nano")
    frozen, _ = load_target(spec, work, device=torch.device(device), dtype=torch.float32)
    model = DFlashModel(spec)
    initialize(model)
    model.to(device)
    train_drafter(
        model,
        frozen,
        work / "text.npy",
        work,
        steps=steps,
        minutes=minutes,
        batch=batch,
        anchors=anchors,
        rate=rate,
        seed=seed,
    )
    save(work / "dflash.safetensors", pack(model, "up"), dflash=spec.dflash.model_dump() if spec.dflash else None)


@app.command()
def ship(work: Work, out: Annotated[Path, typer.Argument(help="folder to write the model to")]) -> None:
    """Copy weights, tokenizer, corpus facts and loss logs to OUT."""
    out.mkdir(parents=True, exist_ok=True)
    for source in (
        work / "target.safetensors",
        work / "dflash.safetensors",
        work / "corpus" / "tokenizer.json",
        work / "corpus" / "corpus.json",
        work / "target.log.jsonl",
        work / "dflash.log.jsonl",
    ):
        if not source.exists():
            raise InputError(f"{source}: missing; run the stage that writes it first")
        shutil.copy(source, out / source.name)
    Tokenizer.from_file(str(out / "tokenizer.json"))


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(help="the shipped model's folder")],
    prompts_file: Annotated[Path, typer.Argument(help="JSON Lines prompts")],
) -> None:
    """Measure accept lengths and write FOLDER/MODEL_CARD.md."""
    rows = list(measure_acceptance(folder, read_prompts(prompts_file, 16), (0.0, 1.0)))
    (folder / "MODEL_CARD.md").write_text(render_card(folder, rows))


def _corpus(work: Path) -> Path:
    folder = work / "corpus"
    if not (folder / "train.npy").exists():
        raise InputError(f"{folder}: no corpus; run 'python -m workbench.decode.train corpus --work {work}' first")
    return folder


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def main() -> None:
    """Run a stage; what the user can mend is one line on standard error."""
    try:
        app()
    except WorkbenchError as error:
        print(f"train: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
