"""SharedNoise: targets start where the source starts, and the source stays the plain run's."""

import pytest
import torch
from controls.edits import EDITABLE, SOURCE, TARGET, sample
from tiny import VARIANTS

from attnctrl import Rows
from attnctrl.latents import SharedNoise

every = pytest.mark.parametrize("family", EDITABLE, ids=lambda family: family.name)
guided = pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])


@every
@guided
def test_targets_start_from_the_sources_noise(family, cfg):
    """As if the pipeline had been given the source's seed for every row; the source is the plain run's, bit for bit."""
    plain = sample(family, (SOURCE, TARGET), cfg=cfg)
    shared = sample(family, (SOURCE, TARGET), SharedNoise([SOURCE, TARGET]), cfg=cfg)
    same_seed = [torch.Generator().manual_seed(0) for _ in range(2)]
    assert torch.equal(shared[0], plain[0])
    assert torch.equal(shared, sample(family, (SOURCE, TARGET), cfg=cfg, generator=same_seed))
    assert not torch.equal(shared[1], plain[1])


@pytest.mark.parametrize("name", ["sd_img2img", "flux_img2img"])
def test_from_a_picture_the_noise_is_shared_too(name):
    family = VARIANTS[name]
    shared = sample(family, (SOURCE, TARGET), SharedNoise([SOURCE, TARGET]))
    same_seed = [torch.Generator().manual_seed(0) for _ in range(2)]
    torch.testing.assert_close(shared, sample(family, (SOURCE, TARGET), generator=same_seed), rtol=1e-5, atol=1e-5)


def test_each_image_of_each_edit_has_its_own():
    noise = SharedNoise([["a", "b", "c"], ["d", "e"]])
    latents = torch.arange(10.0)[:, None]
    shared = noise.share(latents, Rows.grid(("cond",), 5, 2))
    assert shared.flatten().tolist() == [0, 1, 0, 1, 0, 1, 6, 7, 6, 7]
    assert latents.flatten().tolist() == list(range(10))


def test_another_number_of_prompts_is_an_error():
    with pytest.raises(ValueError, match="made for 3 prompts, the pipeline runs 2"):
        sample(EDITABLE[0], (SOURCE, TARGET), SharedNoise(["a", "b", "c"]))
    with pytest.raises(ValueError, match="an edit needs a source, got \\[\\]"):
        sample(EDITABLE[0], (SOURCE,), SharedNoise([[SOURCE], []]))


def test_a_source_may_be_alone():
    latents = torch.arange(3.0)[:, None]
    assert SharedNoise([["a", "b"], ["c"]]).share(latents, Rows.grid(("cond",), 3, 1)).flatten().tolist() == [0, 0, 2]
