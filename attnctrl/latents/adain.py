"""Statistics of one image's latents for another: per channel, over all pixels or those of an object.

    adain(x, y) = (x - mean(x)) / std(x) * std(y) + mean(y),     std = sqrt(var + eps), var unbiased
Cross-Image Attention (arXiv:2311.03335) applies it after scheduler steps (eps 1e-5; with masks: statistics of each
image's object, written inside the output's); StyleID (arXiv:2312.09008) to the noise it starts from (eps 0); Visual
Style Prompting (arXiv:2402.12974) to the predicted x0, with std + 1e-8 and the noise left as it is.

Latents that are packed into tokens (2x2 pixels of each channel lie in a token's channels) are unpacked for it.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..call import Denoise, DenoiseCall, Prediction, Rows, StepCall, StepFunction, Window, in_window

__all__ = ["ColorCalibration", "LatentAdaIN", "StartAdaIN", "adain", "calibrated"]

Mask = Float[Tensor, "height width"] | Bool[Tensor, "height width"]


def adain(
    content: Float[Tensor, "*b c pixels"],
    style: Float[Tensor, "*b c pixels"],
    content_mask: Bool[Tensor, "pixels"] | None = None,
    style_mask: Bool[Tensor, "pixels"] | None = None,
    eps: float = 1e-5,
) -> Float[Tensor, "*b c pixels"]:
    """`content` with the mean and deviation of `style` per channel; with masks, of the pixels inside, and only there.

    Raises ValueError when a mask has fewer than two pixels, which have no deviation.
    """
    exact = torch.promote_types(content.dtype, torch.float32)
    x, y = content.to(exact), style.to(exact)
    inside = x if content_mask is None else x[..., content_mask]
    model = y if style_mask is None else y[..., style_mask]
    for name, pixels in (("content", inside), ("style", model)):
        if pixels.shape[-1] < 2:
            raise ValueError(f"the {name} has {pixels.shape[-1]} pixels to take a deviation of; two are needed")
    (var, mean), (var_y, mean_y) = (torch.var_mean(z, dim=-1, keepdim=True) for z in (inside, model))
    out = (x - mean) / (var + eps).sqrt() * (var_y + eps).sqrt() + mean_y
    out = out.to(content.dtype)
    return out if content_mask is None else torch.where(content_mask, out, content)


@dataclass(frozen=True)
class LatentAdaIN:
    """After scheduler steps, the output's latents get the appearance image's statistics.

    output, appearance  their prompts in the pipeline call
    masks   (output, appearance): where the object is in each, of any size; the output's is the structure image's
    steps   when: fractions of the run, or two step indices.  The authors' steps 20-100 count the 68 they run

    A mask with fewer than two pixels on the latent's grid counts as none, with a warning.
    """

    output: int = 0
    appearance: int = 1
    masks: tuple[Mask, Mask] | None = None
    steps: Window = (0.3, 1.0)

    def __post_init__(self) -> None:
        if self.masks is not None and [getattr(mask, "ndim", None) for mask in self.masks] != [2, 2]:
            raise ValueError("masks are (output, appearance), two tensors of shape (height, width)")

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        latents = step(call)
        if not in_window(call.step, self.steps):
            return latents
        masks = self._masks(call, latents.device)
        return _rows_adain(latents, call.rows, self.output, self.output, self.appearance, *masks)

    def _masks(self, call: StepCall, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        if self.masks is None:
            return None, None
        if call.grid is None:
            raise ValueError("masks are laid on the latents' grid, which this step does not know")
        own, model = (_on_pixels(mask.to(device), call.grid, call.packed) for mask in self.masks)
        small = [name for name, mask in (("output", own), ("appearance", model)) if int(mask.sum()) < 2]
        if small:
            warnings.warn(f"the mask of the {' and the '.join(small)} is empty on the latents: AdaIN without masks",
                          stacklevel=2)  # fmt: skip
            return None, None
        return own, model


@dataclass(frozen=True)
class ColorCalibration:
    """The predicted clean latents of all images get the reference's statistics per channel, the noise staying theirs.

    reference  the prompt whose colours the others take
    timesteps  only where they lie between these two, as the authors do for real references
    """

    reference: int = 0
    timesteps: tuple[float, float] = (100, 150)

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        low, high = self.timesteps
        if not low < call.step.timestep < high:
            return step(call)
        at = {entry: i for i, entry in enumerate(zip(call.rows.prompt, call.rows.image, strict=True))}
        if self.reference not in call.rows.prompt:
            raise ValueError(f"prompt {self.reference} of {max(call.rows.prompt) + 1} in the pipeline call")
        index = torch.tensor([at[self.reference, image] for image in call.rows.image], device=call.sample.device)
        x0 = call.x0()
        change = calibrated(x0, index) - x0
        level, width = call.step.now, call.sample.shape[1]
        factor = {
            "noise": 0.0,
            "velocity": -level.sigma / math.hypot(level.alpha, level.sigma),
            "x0": 1.0,
            "flow": -1.0,
        }[call.step.predicts]
        prediction = call.prediction
        if prediction.shape[1] == 2 * width and not call.packed:  # the rest is a learned variance
            mean = prediction[:, :width] + factor * change
            prediction = torch.cat((mean, prediction[:, width:]), 1)
        else:
            prediction = prediction + factor * change
        return step(call.replace(sample=call.sample + level.alpha * change, prediction=prediction))


def calibrated(
    x0: Float[Tensor, "images ..."], reference: Int[Tensor, "images"], eps: float = 1e-8
) -> Float[Tensor, "images ..."]:
    """x0 with mean and deviation per channel of the images `reference`; an image that is its own keeps its bits."""
    pixels = _pixels(x0.to(torch.promote_types(x0.dtype, torch.float32)))
    mean, std = pixels.mean(-1, keepdim=True), pixels.std(-1, keepdim=True)
    new = (pixels - mean) / (std + eps) * std[reference] + mean[reference]
    own = reference == torch.arange(len(x0), device=x0.device)
    return torch.where(own.reshape(-1, *(1 for _ in x0.shape[1:])), x0, _from_pixels(new, x0).to(x0.dtype))


@dataclass(frozen=True)
class StartAdaIN:
    """The output starts from the content's noise with the style's statistics.

    In the first iteration only: on what the denoiser sees, and on what the scheduler steps from.

    output, style, content  their prompts in the pipeline call
    eps                     added to the variances; the authors' code has none
    """

    output: int = 0
    style: int = 1
    content: int = 2
    eps: float = 0.0

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        if call.step.index != 0:
            return denoise(call)
        return denoise(call.replace(latents=self._started(call.latents, call.rows.take(range(len(call.latents))))))

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        if call.step.index != 0:
            return step(call)
        return step(call.replace(sample=self._started(call.sample, call.rows)))

    def _started(self, latents: Tensor, rows: Rows) -> Tensor:
        return _rows_adain(latents, rows, self.output, self.content, self.style, eps=self.eps)


def _rows_adain(
    latents: Tensor,
    rows: Rows,
    output: int,
    content: int,
    style: int,
    content_mask: Tensor | None = None,
    style_mask: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`latents` whose rows of prompt `output` are those of `content` with the statistics of `style`, image by image."""
    at = {entry: i for i, entry in enumerate(zip(rows.prompt, rows.image, strict=True))}
    images = [image for prompt, image in at if prompt == output]
    missing = {prompt for prompt in (output, content, style) if prompt not in rows.prompt}
    if missing:
        raise ValueError(f"prompts {sorted(missing)} of {max(rows.prompt) + 1} in the pipeline call")
    index = {p: torch.tensor([at[p, i] for i in images], device=latents.device) for p in (output, content, style)}
    pixels = _pixels(latents)
    new = adain(pixels[index[content]], pixels[index[style]], content_mask, style_mask, eps)
    return latents.index_copy(0, index[output], _from_pixels(new, latents))


def _pixels(latents: Tensor) -> Float[Tensor, "images c pixels"]:
    """Of latents (images, c, *grid), or packed (images, tokens, 4 c)."""
    if latents.ndim == 3:
        return latents.unflatten(-1, (-1, 4)).movedim(2, 1).flatten(2)
    return latents.flatten(2)


def _from_pixels(pixels: Float[Tensor, "images c pixels"], like: Tensor) -> Tensor:
    if like.ndim == 3:
        return pixels.unflatten(-1, (-1, 4)).movedim(1, 2).flatten(2)
    return pixels.unflatten(-1, like.shape[2:])


def _on_pixels(mask: Tensor, grid: tuple[int, ...], packed: bool) -> Bool[Tensor, "pixels"]:
    """The mask at the latents' pixels, the nearest, in the order of `_pixels`; one for all frames."""
    height, width = (2 * size if packed else size for size in grid[-2:])
    found = F.interpolate(mask[None, None].float(), size=(height, width), mode="nearest")[0, 0] > 0.5
    if packed:
        found = found.unflatten(1, (-1, 2)).unflatten(0, (-1, 2)).movedim(1, 2)  # (h, w, 2, 2)
    return found.expand(math.prod(grid[:-2]), *found.shape).flatten()
