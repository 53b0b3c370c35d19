"""The README is true: its Python runs, its commands are the ones that are tested, its pictures are there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)( no-run)?\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PYTHON = [(not mark, code) for language, mark, code in BLOCKS if language == "python"]
COMMANDS = [code.strip() for language, _, code in BLOCKS if language == "sh"]


def test_there_are_blocks_that_run_and_blocks_that_do_not():
    assert {runs for runs, _ in PYTHON} == {True, False}
    assert README.count("```python") == len(PYTHON) and README.count("```sh") == len(COMMANDS)


@pytest.mark.parametrize("runs, code", PYTHON, ids=[f"block {i}" for i in range(len(PYTHON))])
def test_python_blocks_run_or_at_least_compile(runs, code, tmp_path):
    compile(code, "README.md", "exec")
    if runs:
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600
        )
        assert out.returncode == 0, out.stderr
        for name in re.findall(r'save\("(.*?)"\)', code):
            assert Image.open(tmp_path / name).size == (64, 64)


def test_the_edit_command_makes_its_picture(tmp_path):
    install, _, command = COMMANDS[0].partition(" && ")
    assert install == "pip install ."
    name, *arguments = shlex.split(command)
    assert name == "attnctrl"
    code = "from attnctrl.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--steps", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=600,
    )
    assert out.returncode == 0, out.stderr
    assert Image.open(tmp_path / "edit.png").width > 3 * 256


def test_the_test_command_is_the_one_that_is_run_in_ci():
    assert COMMANDS[1] == 'pip install ".[test]" && pytest'
    script = (ROOT / ".ci" / "run").read_text()
    assert [part.split()[-1] for part in COMMANDS[1].split(" && ")] == ['".[test]"', "pytest"]
    assert re.search(r'^pip install (-q )?"\.\[test\]" && pytest$', script, re.MULTILINE)


def test_pictures_are_there_and_small():
    for name in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / name).stat().st_size < 60_000
        assert Image.open(ROOT / name).width > 300
