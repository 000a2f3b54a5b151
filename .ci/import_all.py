"""Import every module of the installed wheel; the links of the source tree must have become real subpackages.

``core``: the wheel without extras. A module may then fail for the lack of an extra's package, but only of one that its
part of the tree is allowed to need (``MAY_NEED``), and it is named. ``all``: every module must import.
"""

import importlib
import sys
from collections import defaultdict
from importlib.metadata import files

SUBPACKAGES = (
    *("commands", "comparison", "decode", "diagnose", "engines", "faults", "gate", "ingest", "lint", "run", "runs"),
    *("timeline", "trace"),
    *("dashboards", "kernels", "probes", "reports", "scenarios"),
)
EXTRAS = {
    **dict.fromkeys(("torch", "safetensors", "tokenizers"), "decode"),
    **dict.fromkeys(("triton", "pynvml"), "gpu"),
    **dict.fromkeys(("dash", "dash_ag_grid", "pandas", "waitress"), "dash"),
}
"""Which extra brings a package."""

DECODE = ("torch", "safetensors", "tokenizers")
MAY_NEED = {
    "workbench.dashboards.": ("dash", "dash_ag_grid", "pandas", "waitress"),
    "workbench.decode.": (*DECODE, "triton"),
    "workbench.engines.busy": DECODE,
    "workbench.engines.sglang_engine": DECODE,
    "workbench.kernels.": ("torch", "triton"),
    "workbench.lint.warm": ("triton",),
    "workbench.probes.marker_kernels": ("triton",),
    "workbench.run.": DECODE,
    "workbench.runner": DECODE,
}
"""Packages of extras that a module needs at import, by the start of its name. Everything else imports without them."""


def main(extent: str) -> None:
    """Import all modules; exit with the reasons where one fails that must not, or a subpackage is missing."""
    paths = [str(path) for path in files("decode-workbench") or []]
    missing = [name for name in SUBPACKAGES if not any(path.startswith(f"workbench/{name}/") for path in paths)]
    if missing:
        sys.exit(f"the wheel lacks {', '.join(missing)}: was it built from a checkout without symbolic links?")
    names = sorted(path[:-3].replace("/", ".").removesuffix(".__init__") for path in paths if path.endswith(".py"))
    names = [name for name in names if not name.endswith("__main__")]
    skipped: dict[str, list[str]] = defaultdict(list)
    failed: list[str] = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            allowed = next((needed for start, needed in MAY_NEED.items() if name.startswith(start)), ())
            if extent == "core" and isinstance(error, ModuleNotFoundError) and package in allowed:
                skipped[package].append(name)
            else:
                failed.append(f"{name}: {error}")
    for package, modules in sorted(skipped.items()):
        print(f"skipped, {package} is not installed (extra {EXTRAS[package]}): {', '.join(modules)}")
    if failed:
        sys.exit("\n".join(["these must import:", *failed]))
    loaded = sorted(set(EXTRAS) & set(sys.modules)) if extent == "core" else []
    if loaded:
        sys.exit(f"installed without extras, the wheel brought {', '.join(loaded)}")
    count = sum(map(len, skipped.values()))
    print(f"{len(names) - count} of {len(names)} modules import ({extent})")


if __name__ == "__main__":
    main(sys.argv[1])
