from pathlib import Path
from typing import Any

from workbench.diagnose.byte_model import byte_classes
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord


def bundle(path: Path, rows: list[dict[str, Any]]) -> Bundle:
    with BundleWriter.create(path / "bundle", Manifest(variants=[VariantRecord(name="a")])) as writer:
        writer.append("tensors", rows)
    return Bundle.open(path / "bundle")


def tensor(name: str, read: int, tag: str = "estimated", role: str = "target") -> dict[str, Any]:
    return {
        "variant": "a",
        "role": role,
        "tensor_class": name,
        "format": "bf16",
        "parameters": 10,
        "stored_bytes": 20,
        "resident_bytes": 40,
        "read_bytes": read,
        "width": 4,
        "replicated": False,
        "tag": tag,
    }


def test_bytes_are_summed_by_class_and_carry_the_weakest_tag(tmp_path: Path) -> None:
    rows = [tensor("qkv", 5), tensor("qkv", 6, "modelled"), tensor("head", 30), tensor("qkv", 1, role="draft")]
    found = byte_classes(bundle(tmp_path, rows), "a")
    assert [(entry.role, entry.tensor_class, entry.read_bytes, entry.parameters, entry.tag) for entry in found] == [
        ("target", "head", 30, 10, "estimated"),
        ("target", "qkv", 11, 20, "modelled"),
        ("draft", "qkv", 1, 10, "estimated"),
    ]


def test_no_byte_model(tmp_path: Path) -> None:
    assert byte_classes(bundle(tmp_path, []), "a") == ()
