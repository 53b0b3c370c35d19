"""The command line writes one picture, and says in one line what is wrong."""

import subprocess
import sys

import pytest
from PIL import Image

PROMPTS = ("a red circle left of a blue square", "a green circle left of a blue square")


def attnctrl(*arguments, cwd=None):
    command = [sys.executable, "-W", "ignore", "-m", "attnctrl.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


def test_an_edit_is_one_picture_of_three_panels_with_progress(tmp_path):
    out = attnctrl("edit", *PROMPTS, "--steps", 3, "--strength", "green=1.5", "--report", "-o", tmp_path / "edit.png")
    assert out.returncode == 0, out.stderr
    picture = Image.open(tmp_path / "edit.png")
    assert picture.width > 3 * 256 and picture.height > 256
    assert "3/3" in out.stderr  # the progress bar
    assert "PromptToPrompt (edit" in out.stdout and "maps formed: none" in out.stdout


def test_the_same_seed_gives_the_same_picture_and_another_seed_another(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert attnctrl("edit", *PROMPTS, "--steps", 2, "--seed", seed, "-o", tmp_path / f"{name}.png").returncode == 0
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--blend-word", "dog"), "has the words a, red, circle"),
        (("--strength", "green"), "--strength is word=factor"),
        (("--strength", "green=nan"), "--strength is word=factor"),
        (("--strength", "dog=2"), "dog"),
        (("--dtype", "float8"), "--dtype is one of"),
        (("--model", "./nowhere"), "no such folder"),
        (("--cross", "1.5"), "[0, 1]"),
        (("-o", "nowhere/edit.png"), "there is no folder"),
        (("-o", "edit.txt"), "must end like a picture's"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, tmp_path):
    out = attnctrl("edit", *PROMPTS, "--steps", 2, *arguments, cwd=tmp_path)
    assert out.returncode == 2
    assert message in out.stderr and "Traceback" not in out.stderr
    assert not list(tmp_path.iterdir())


def test_version_and_help():
    assert attnctrl("--version").stdout.startswith("attnctrl ")
    assert "edit" in attnctrl("--help").stdout


def test_help_loads_neither_torch_nor_diffusers():
    code = "import sys, attnctrl.cli; print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_public_names_are_there_when_asked_for():
    import attnctrl as package

    assert all(getattr(package, name) is not None for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'attache'"):
        _ = package.attache
