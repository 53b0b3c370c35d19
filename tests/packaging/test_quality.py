"""The sources pass the linter, the formatter and the type checker."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["ruff check --no-cache", "ruff format --check --no-cache", "mypy"])
def test_the_sources_pass(command):
    out = subprocess.run(
        [sys.executable, "-m", *command.split()], capture_output=True, text=True, cwd=ROOT, timeout=900
    )
    assert out.returncode == 0, out.stdout + out.stderr
