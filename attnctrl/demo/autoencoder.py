"""A linear autoencoder of image patches (principal components) behind the interface of `AutoencoderKL`."""

from __future__ import annotations

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle


class PatchAutoencoder(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Every `patch`x`patch` patch of the image becomes `components` numbers, z = (patch - mean) @ encoder.

    With `fold` > 1 the components of one patch are laid out as `fold`x`fold` latent pixels of components / fold^2
    channels, so that FLUX's 2x2 packing puts them into one token again.
    Images are (b, 3, h, w) in [-1, 1], latents (b, components / fold^2, h fold / patch, w fold / patch).
    The latent has no variance: `latent_dist.sample()` and `.mode()` agree to 1e-6."""

    @register_to_config
    def __init__(
        self,
        patch: int = 4,
        components: int = 16,
        fold: int = 1,
        in_channels: int = 3,
        latent_channels: int = 16,
        block_out_channels: tuple[int, ...] = (1, 1, 1),
        scaling_factor: float = 1.0,
        shift_factor: float = 0.0,
    ):
        super().__init__()
        if latent_channels * fold**2 != components:
            raise ValueError(
                f"latent_channels must be components / fold^2 = {components // fold**2}, not {latent_channels}"
            )
        if 2 ** (len(block_out_channels) - 1) * fold != patch:
            raise ValueError(f"block_out_channels must have a length that halves the image {patch // fold}-fold")
        self.patch, self.components, self.fold = patch, components, fold
        size = in_channels * patch**2
        self.mean = nn.Parameter(torch.zeros(size))
        self.encoder = nn.Parameter(torch.zeros(size, components))
        self.decoder = nn.Parameter(torch.zeros(components, size))

    def fit(self, images: Tensor) -> PatchAutoencoder:
        """Set the matrices from images (b, 3, h, w) in [-1, 1].

        Channels are divided by the square root of their deviation (coarse content keeps more signal than fine), then
        all by one number, so that the latents' mean square is 1."""
        patches = self._patches(images.double()).reshape(-1, self.mean.numel())
        mean = patches.mean(0)
        _, values, vectors = torch.linalg.svd(patches - mean, full_matrices=False)
        deviation = values[: self.components] / len(patches) ** 0.5
        vectors = vectors[: self.components]
        scale = deviation.rsqrt() / deviation.mean().sqrt()
        self.mean.data.copy_(mean)
        self.encoder.data.copy_(vectors.T * scale)
        self.decoder.data.copy_(vectors / scale[:, None])
        return self

    def _patches(self, images: Tensor) -> Tensor:
        return pixel_unshuffle(images, self.patch).movedim(1, -1)  # (b, h/p, w/p, 3 p^2)

    def encode(self, x: Tensor, return_dict: bool = True):
        """The posterior of images (b, 3, h, w), as `AutoencoderKL.encode` gives it."""
        latents = pixel_shuffle(((self._patches(x) - self.mean) @ self.encoder).movedim(-1, 1), self.fold)
        moments = torch.cat([latents, torch.full_like(latents, -30.0)], 1)
        posterior = DiagonalGaussianDistribution(moments)
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(self, z: Tensor, return_dict: bool = True, generator: torch.Generator | None = None):
        """Images (b, 3, h, w) of latents, as `AutoencoderKL.decode` gives them."""
        patches = pixel_unshuffle(z, self.fold).movedim(1, -1) @ self.decoder + self.mean
        images = pixel_shuffle(patches.movedim(-1, 1), self.patch)
        return DecoderOutput(sample=images) if return_dict else (images,)

    def forward(self, sample: Tensor, return_dict: bool = True):
        """The reconstruction of images (b, 3, h, w)."""
        return self.decode(self.encode(sample).latent_dist.mode(), return_dict=return_dict)
