from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.ingest.bundle import ingest_kineto
from workbench.trace.bundle import Bundle

TRACE = Path(__file__).parents[1] / "data" / "sglang0517_qwen3_4layers_dflash_h200.json.gz"


@pytest.fixture(scope="session")
def trace_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """A real trace as a bundle: SGLang with DFlash on an H200."""
    with Bundle.open(ingest_kineto(TRACE, tmp_path_factory.mktemp("trace") / "bundle").path) as bundle:
        yield bundle
