"""Every id that a detector can give has a page, and every page a detector."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = {path.stem for path in (ROOT / "docs/findings").glob("*.md")} - {"README"}
KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def constants(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def sources() -> list[ast.AST]:
    folder = ROOT / "workbench/diagnose"
    files = [*folder.glob("findings/*.py"), *folder.glob("*findings*.py")]
    return [ast.parse(path.read_text()) for path in files]


def stated_ids() -> set[str]:
    """Ids given as a literal to Finding(id=…) or to Rule, or to a variable ``kind`` that becomes one."""
    found = set()
    for tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                given = [keyword.value for keyword in node.keywords if keyword.arg == "id"]
                found |= {value.value for value in given if isinstance(value, ast.Constant)}
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Rule":
                found.add(ast.literal_eval(node.args[1]))
            if isinstance(node, ast.Assign) and "kind" in ast.dump(node.targets[0]):
                found |= {text for text in constants(node.value) if KEBAB.fullmatch(text) and "-" in text}
    return {str(one) for one in found}


def test_every_id_has_a_page() -> None:
    missing = stated_ids() - PAGES
    assert not missing, f"write docs/findings/ for {sorted(missing)}"


def test_every_page_has_a_detector() -> None:
    named = set().union(*(constants(tree) for tree in sources()))
    orphans = PAGES - named
    assert not orphans, f"no detector gives {sorted(orphans)}"


def test_a_page_says_what_it_must() -> None:
    for name in PAGES:
        text = (ROOT / f"docs/findings/{name}.md").read_text()
        assert text.startswith(f"# {name}: "), name
        for heading in ("**Means.**", "**Detected.**", "**Fixed.**", "**Seen in public.**"):
            assert heading in text, (name, heading)
