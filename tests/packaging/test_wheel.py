"""What is built from the checkout: the wheel's contents, and one edit by it in an environment of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PROMPTS = ("a red circle left of a blue square", "a green circle left of a blue square")
WHERE = """
import importlib.util
import attnctrl, attnctrl.pipelines, attnctrl.pipelines.prompt_to_prompt
from attnctrl import demo
assert attnctrl.pipelines.PromptToPromptPipeline.__module__ == "attnctrl.pipelines.prompt_to_prompt"
print(attnctrl.__file__)
print(attnctrl.pipelines.__file__)
print(importlib.util.find_spec("pipelines"))
"""


def run(*command, cwd):
    out = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=cwd, timeout=600, env=environment()
    )
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


def environment():
    """Without what would lead to this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def new_environment(folder):
    """A virtual environment that has the dependencies of this one, as links, but not attnctrl, however it is installed
    here."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    links = folder / "dependencies"
    links.mkdir()
    for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(path).iterdir():
            if not entry.name.startswith(("attnctrl", "__editable__")) and entry.suffix != ".pth":
                (links / entry.name).symlink_to(entry)
    Path(site, "dependencies.pth").write_text(str(links))
    return python


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy, for building leaves files behind."""
    copy = tmp_path_factory.mktemp("checkout") / "attnctrl"
    for name in ("attnctrl", "pipelines", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "app.py"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    arguments = ("--no-deps", "--no-build-isolation", "--no-index", "-q")
    run(sys.executable, "-m", "pip", "wheel", *arguments, "-w", folder, checkout, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_its_pipelines_and_the_demo_weights(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"attnctrl/{path.relative_to(ROOT / 'attnctrl')}" for path in (ROOT / "attnctrl").rglob("*.py")}
    sources |= {
        f"attnctrl/pipelines/{path.relative_to(ROOT / 'pipelines')}" for path in (ROOT / "pipelines").rglob("*.py")
    }
    weights = {
        f"attnctrl/{path.relative_to(ROOT / 'attnctrl')}"
        for path in (ROOT / "attnctrl" / "demo" / "weights").rglob("*")
        if path.is_file()
    }
    assert any(name.endswith(".safetensors") for name in weights)
    rest = {name for name in names if ".dist-info/" not in name}
    assert rest == sources | weights | {"attnctrl/py.typed"}
    assert wheel.stat().st_size < 40e6


def test_the_wheel_makes_an_edit_in_an_environment_of_its_own(wheel, tmp_path):
    python = new_environment(tmp_path / "venv")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=tmp_path)
    package, pipelines, outside = run(python, "-c", WHERE, cwd=tmp_path).split()
    assert Path(package).is_relative_to(tmp_path / "venv")
    assert Path(pipelines) == Path(package).parent / "pipelines" / "__init__.py"
    assert outside == "None"
    run(python.parent / "attnctrl", "edit", *PROMPTS, "--steps", 2, "-o", "edit.png", cwd=tmp_path)
    assert Image.open(tmp_path / "edit.png").width > 3 * 256


def test_an_editable_install_reaches_the_pipelines_of_the_checkout(checkout, tmp_path):
    python = new_environment(tmp_path / "venv")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index")
    run(*pip, "--no-build-isolation", "-e", checkout, cwd=tmp_path)
    package, pipelines, _ = run(python, "-c", WHERE, cwd=tmp_path).split()
    assert Path(package) == checkout / "attnctrl" / "__init__.py"
    assert Path(pipelines) == checkout / "pipelines" / "__init__.py"


def test_a_checkout_works_without_being_installed(checkout, tmp_path):
    python = new_environment(tmp_path / "venv")
    package, pipelines = run(python, "-c", WHERE, cwd=checkout).split()[:2]
    assert Path(package) == checkout / "attnctrl" / "__init__.py"
    assert Path(pipelines) == checkout / "pipelines" / "__init__.py"
