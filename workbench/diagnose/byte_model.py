"""The byte model of a variant by tensor class: what an average step reads, and in which format."""

from dataclasses import dataclass

from workbench.quantity import Tag
from workbench.trace.bundle import Bundle


@dataclass(frozen=True, slots=True)
class ByteClass:
    """One tensor class of one role ("target", "draft" or "kv"), one rank's share.

    ``stored_bytes``: in the stored format, scales included. ``resident_bytes``: as this engine holds it, 0 where not
    stated. ``read_bytes``: by one step of ``width`` tokens.
    """

    role: str
    tensor_class: str
    format: str
    parameters: int
    stored_bytes: int
    resident_bytes: int
    read_bytes: int
    width: int
    tag: Tag


_SQL = """
SELECT role, tensor_class, format, sum(parameters)::BIGINT, sum(stored_bytes)::BIGINT, sum(resident_bytes)::BIGINT,
       sum(read_bytes)::BIGINT AS total, max(width),
       CASE WHEN bool_or(tag = 'modelled') THEN 'modelled' WHEN bool_or(tag = 'estimated') THEN 'estimated'
            ELSE 'measured' END
FROM tensors WHERE variant = ? GROUP BY role, tensor_class, format ORDER BY total DESC, role, tensor_class, format
"""


def byte_classes(bundle: Bundle, variant: str) -> tuple[ByteClass, ...]:
    """Return the classes of ``variant``, largest reader first; none where the bundle has no byte model."""
    table = bundle.query(_SQL, [variant])
    return tuple(ByteClass(*row) for row in zip(*(column.to_pylist() for column in table.columns), strict=True))
