"""What the source files may do: only `intercept` changes objects of others, and imports go one way."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "attnctrl").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")])
CHANGES = re.compile(
    r"\bsetattr\(|__setattr__|\.__class__\s*=[^=]|\.processor\s*=[^=]|\.forward\s*=[^=]|scheduler\.\w+\s*=[^=]"
    r"|functional\.\w+\s*=[^=]|__dict__\[|set_attn_processor\(|register_forward_(pre_)?hook\("
)

# module -> the modules of the package it may import, beside those that these import
MAY_IMPORT = {
    "rope": set(),
    "call": {"rope"},
    "tokens": set(),
    "intercept": set(),
    "attend": {"call"},
    "levels": {"call"},
    "sites": {"call"},
    "report": {"call"},
    "families": {"call", "rope"},
    "alignment": {"tokens"},
    "mixing": {"call"},
    "rows": {"call", "families"},
    "prompts": {"families", "tokens"},
    "chain": {"call", "attend", "families", "intercept", "session"},  # session: for its type only
    "session": {"call", "chain", "families", "intercept", "levels", "rows", "run"},  # run: for its type only
    "run": {"call", "chain", "families", "intercept", "report", "session", "sites"},
    "latents": {"call", "alignment", "families", "prompts", "run", "tokens", "mixing", "sites"},
    "sharing": {"call", "attend"},
    "controls": {
        "call",
        "alignment",
        "attend",
        "families",
        "latents",
        "mixing",
        "prompts",
        "sharing",
        "sites",
        "tokens",
    },
    "demo": set(),
    "pipelines": {
        "",
        "alignment",
        "call",
        "controls",
        "demo",
        "latents",
        "mixing",
        "prompts",
        "report",
        "sites",
        "tokens",
    },
    "cli": {"", "pipelines", "demo", "controls", "latents"},
    "": {"call", "run", "sites"},
}
DIFFUSERS = {"intercept", "session", "chain", "run", "families", "rows", "demo", "pipelines", "cli"}  # cli: to quiet it
DIFFUSERS_FILES = {ROOT / "attnctrl" / "latents" / "schedulers.py"}


def unit(file: Path) -> str:
    """The module or folder of the package a file belongs to; "" for the package itself."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    name = parts[0] if parts[0] != "attnctrl" else parts[1]
    return "" if name == "__init__" else name


def imports(file: Path) -> set[str]:
    """Absolute names of the modules a file imports, those inside functions included."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    package = (parts if parts[0] == "attnctrl" else ("attnctrl", *parts))[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            inside = module == "attnctrl"
            names = {f"{module}.{a.name}" if inside and (ROOT / "attnctrl" / a.name).exists() else
                     f"{module}.{a.name}" if inside and (ROOT / "attnctrl" / f"{a.name}.py").exists() else
                     module for a in node.names}  # fmt: skip
            found |= names
    return found


def own(file: Path) -> set[str]:
    """Units of the package a file imports."""
    names = {name for name in imports(file) if name.split(".")[0] == "attnctrl"}
    return {(*name.split("."), "")[1] for name in names} - {unit(file)}


named = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))


@named
def test_only_intercept_changes_objects_of_others(file):
    if unit(file) in ("intercept", "demo"):  # the demo builds and trains models of its own
        return
    lines = [line.strip() for line in file.read_text().splitlines() if CHANGES.search(line.split("#")[0])]
    # a frozen dataclass may set its own fields while it is made
    assert [line for line in lines if not line.startswith("object.__setattr__(self,")] == []


def test_intercept_is_where_the_changes_are():
    assert CHANGES.search((ROOT / "attnctrl" / "intercept.py").read_text())


@named
def test_imports_go_one_way(file):
    assert own(file) <= MAY_IMPORT[unit(file)]


def test_the_engine_imports_sessions_and_runs_backwards_for_their_types_only():
    for name, later in (("chain", "session"), ("session", "run")):
        tree = ast.parse((ROOT / "attnctrl" / f"{name}.py").read_text())
        at_run_time = {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.level}
        assert later not in at_run_time


def test_latents_never_import_controls():
    for file in (ROOT / "attnctrl" / "latents").glob("*.py"):
        assert "controls" not in own(file)


@named
def test_diffusers_is_imported_only_where_models_are_known(file):
    if any(name.split(".")[0] == "diffusers" for name in imports(file)):
        assert unit(file) in DIFFUSERS or file in DIFFUSERS_FILES


@pytest.mark.parametrize("name", ["call", "attend", "sites", "tokens", "alignment", "mixing", "controls", "latents"])
def test_what_a_method_is_made_of_needs_no_diffusers(name):
    files = [file for file in FILES if unit(file) == name and file not in DIFFUSERS_FILES]
    assert files and not any(n.split(".")[0] in ("diffusers", "transformers") for file in files for n in imports(file))
