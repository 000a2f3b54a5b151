"""Import every module of the installed wheel; the links of the source tree must have become real subpackages.

``core`` imports what works without torch, ``all`` everything; that needs torch and triton.
"""

import importlib
import sys
from importlib.metadata import files

SUBPACKAGES = (
    *("decode", "trace", "diagnose", "ingest", "gate", "commands", "run", "lint"),
    *("probes", "kernels", "dashboards", "scenarios", "reports"),
)
NEEDS_TORCH = (
    *("workbench.decode.", "workbench.runner", "workbench.run.", "workbench.kernels."),
    *("workbench.probes.marker_kernels", "workbench.lint.warm"),
)


def main(extent: str) -> None:
    """Import all modules of ``extent`` and check that no subpackage is missing from the wheel."""
    paths = [str(path) for path in files("decode-workbench") or []]
    missing = [name for name in SUBPACKAGES if not any(path.startswith(f"workbench/{name}/") for path in paths)]
    if missing:
        sys.exit(f"the wheel lacks {', '.join(missing)}: was it built from a checkout without symbolic links?")
    skip = NEEDS_TORCH if extent == "core" else ()
    modules = sorted(path[:-3].replace("/", ".").removesuffix(".__init__") for path in paths if path.endswith(".py"))
    chosen = [name for name in modules if not name.endswith("__main__") and not name.startswith(skip)]
    for name in chosen:
        importlib.import_module(name)
    if extent == "core" and "torch" in sys.modules:
        sys.exit("the core imported torch")
    print(f"{len(chosen)} of {len(modules)} modules import ({extent})")


if __name__ == "__main__":
    main(sys.argv[1])
