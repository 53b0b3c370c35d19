"""pyproject.toml names every package there is, and every third-party module that is imported."""

import ast
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DISTRIBUTIONS = {"PIL": "pillow"}  # module -> distribution, where they differ
INDIRECT = {"huggingface_hub": "diffusers", "tokenizers": "transformers", "typing_extensions": "torch"}


def sources():
    return [*(ROOT / "attnctrl").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]


def names(requirements):
    return {requirement.split("[")[0].split(">")[0].split("=")[0].strip() for requirement in requirements}


def test_every_folder_with_sources_is_a_package_of_the_list():
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "attnctrl").rglob("*.py")}
    there |= {
        ".".join(("attnctrl", *path.parent.relative_to(ROOT).parts)) for path in (ROOT / "pipelines").rglob("*.py")
    }
    setuptools = PROJECT["tool"]["setuptools"]
    assert set(setuptools["packages"]) == there
    assert setuptools["package-dir"] == {"attnctrl.pipelines": "pipelines"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_imported_is_a_dependency(path):
    tree = ast.parse(path.read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level and n.module}
    modules = {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) - {"attnctrl"}
    wanted = {INDIRECT.get(name, DISTRIBUTIONS.get(name, name)) for name in modules}
    assert wanted <= names(PROJECT["project"]["dependencies"])


def test_every_dependency_has_a_lower_bound():
    assert all(">=" in requirement for requirement in PROJECT["project"]["dependencies"])


def test_torchvision_is_not_asked_for():
    extras = PROJECT["project"]["optional-dependencies"]
    assert "torchvision" not in names(PROJECT["project"]["dependencies"]).union(*map(names, extras.values()))
