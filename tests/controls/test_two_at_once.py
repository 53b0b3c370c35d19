"""Two controls at once, and a control beside a LoRA: what each promises alone still holds."""

import pytest
import torch
from controls.edits import SOURCE, TARGET, sample
from engine.test_lifecycle import add_lora
from tiny import FAMILIES

from attnctrl import MissingRows, attach
from attnctrl.controls import CrossImageAttention, PromptToPrompt, StyleAligned, StyleSwap
from attnctrl.latents import LocalBlend

SD, FLUX = FAMILIES["sd"], FAMILIES["flux"]
BOTH = pytest.mark.parametrize("family", [SD, FLUX], ids=lambda family: family.name)
PROMPTS = (SOURCE, TARGET, "a red bird on snow")


def test_prompt_to_prompt_and_style_swap_at_their_own_sites_may_come_in_any_order():
    p2p = lambda: PromptToPrompt(list(PROMPTS[:2]), cross=1.0, self_=0.0)  # noqa: E731 - cross sites
    first = sample(SD, PROMPTS[:2], p2p(), StyleSwap())
    second = sample(SD, PROMPTS[:2], StyleSwap(), p2p())  # self sites
    assert torch.equal(first, second)
    alone = [sample(SD, PROMPTS[:2], control) for control in (p2p(), StyleSwap())]
    plain = sample(SD, PROMPTS[:2])
    for other in alone:
        assert torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])
    assert torch.equal(first[0], plain[0])  # the source and the reference


@BOTH
def test_prompt_to_prompt_with_style_swap_off_is_prompt_to_prompt(family):
    edit = lambda: PromptToPrompt(list(PROMPTS[:2]))  # noqa: E731
    alone = sample(family, PROMPTS[:2], edit())
    assert torch.equal(sample(family, PROMPTS[:2], StyleSwap(steps=(0, 0)), edit()), alone)
    swapped = sample(family, PROMPTS[:2], StyleSwap(), edit())
    assert torch.equal(swapped[0], alone[0]) and not torch.equal(swapped[1], alone[1])


def test_a_control_that_was_handed_no_reference_says_so():
    """Where attention is joint, prompt-to-prompt hands the targets inward alone: style swap goes outside it."""
    with pytest.raises(MissingRows, match="hand inward the rows that others read"):
        sample(FLUX, PROMPTS[:2], PromptToPrompt(list(PROMPTS[:2])), StyleSwap())


@BOTH
def test_local_blend_keeps_the_structure_outside_a_transfer(family):
    """All closed, the output is the structure; all open, it is the transfer; between, some of it is the structure."""
    groups, words = [[SOURCE, TARGET], [PROMPTS[2]]], [["cat"], ["dog"], []]
    transfer = lambda: CrossImageAttention(structure=0, output=1, appearance=2, swap_guidance=1)  # noqa: E731
    blended = lambda threshold: sample(  # noqa: E731
        family, PROMPTS, LocalBlend(groups, words, threshold=threshold, start=0.5), transfer()
    )
    alone, closed, opened = sample(family, PROMPTS, transfer()), blended(1.0), blended(-1.0)
    assert torch.equal(opened, alone)
    assert torch.equal(closed[1], closed[0]) and torch.equal(closed[0], alone[0])
    if family is FLUX:  # on the other's 4x4 maps, max-pooled and untrained, a word is everywhere
        half = blended(0.995)
        same = (half[1] == half[0]).flatten()
        assert same.any() and not same.all() and torch.equal(half[0], alone[0]) and torch.equal(half[2], alone[2])


@BOTH
@pytest.mark.parametrize("make", [StyleSwap, StyleAligned], ids=["swap", "aligned"])
def test_a_control_beside_a_lora(family, make):
    pipe = family.build(with_text=family.text)
    model = pipe.unet if family is SD else pipe.transformer
    arguments = {"num_inference_steps": 3, "prompts": PROMPTS[:2], "text": family.text}
    bare = family.run(pipe, **arguments)
    add_lora(model)
    lora = family.run(pipe, **arguments)
    with attach(pipe, make(steps=(0, 0))):
        off = family.run(pipe, **arguments)
    with attach(pipe, make()):
        on = family.run(pipe, **arguments)
    assert not torch.equal(lora, bare) and torch.equal(off, lora)
    assert not torch.equal(on[1], lora[1])
    torch.testing.assert_close(on[0], lora[0])  # the reference: plain, up to the rounding of a smaller batch
    model.delete_adapters("default")
    assert torch.equal(family.run(pipe, **arguments), bare)
