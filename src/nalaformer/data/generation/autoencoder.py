"""An AutoencoderKL of diffusers from a folder that the user has: images to latents and back."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...json_text import parse_json
from ...weight_files import check_finite, check_names, without_warnings

KIND = "AutoencoderKL"
WEIGHTS = "diffusion_pytorch_model.safetensors"


class Autoencoder:
    """latent = (encoded - shift) * scale, with the two numbers that its config gives.

    fingerprint: of its config and weights; latents of two autoencoders are not comparable.
    """

    def __init__(self, model: Any, fingerprint: str) -> None:
        self.model, self.fingerprint = model, fingerprint
        self.scale = float(model.config.scaling_factor)
        self.shift = float(model.config.shift_factor or 0.0)
        self.factor = 2 ** (len(model.config.block_out_channels) - 1)

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """[C, h, w] of an image's latents."""
        if height % self.factor or width % self.factor:
            near = " x ".join(str(max(1, round(side / self.factor)) * self.factor) for side in (height, width))
            raise ValueError(
                f"the sides of images must be multiples of {self.factor}, by which the autoencoder reduces them, got "
                f"{height} x {width}; choose another image size, such as {near}"
            )
        return int(self.model.config.latent_channels), height // self.factor, width // self.factor

    @torch.no_grad()
    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 1 or 3, H, W] in [-1, 1] -> mean and deviation, float32 [B, C, h, w] each, scaled."""
        if images.shape[1] == 1:
            images = images.expand(-1, int(self.model.config.in_channels), -1, -1)
        found = self.model.encode(images.to(self.model.device, self.model.dtype)).latent_dist
        return (found.mean.float() - self.shift) * self.scale, found.std.float() * self.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Scaled latents [B, C, h, w] -> float32 [B, 3, H, W], about in [-1, 1]."""
        latents = latents.to(self.model.device, self.model.dtype) / self.scale + self.shift
        return self.model.decode(latents).sample.float()


def load_autoencoder(folder: str | Path, *, device: str = "cpu") -> Autoencoder:
    """The AutoencoderKL of a folder as diffusers saves it: config.json and safetensors. Nothing is downloaded."""
    folder = Path(folder)
    config, weights = folder / "config.json", folder / WEIGHTS
    rule = f"an autoencoder must be the folder of an {KIND} of diffusers"
    if (folder / "model_index.json").is_file():
        raise ValueError(f"{rule}, got {folder}, a whole pipeline; name its part: {folder / 'vae'}")
    if not config.is_file():
        raise ValueError(f"{rule}, got {folder} without config.json; save one there with save_pretrained")
    text = config.read_bytes()
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{config} cannot be read: {error}") from error
    kind = found.get("_class_name") if isinstance(found, dict) else None
    if kind != KIND:
        raise ValueError(f"{rule}, got {kind or 'no _class_name'} in {config}; others have latents of another kind")
    if not weights.is_file():
        raise ValueError(f"{rule} with its weights in {WEIGHTS}, got none in {folder}; save them with safe_serialization=True")
    from diffusers import AutoencoderKL
    from safetensors import SafetensorError

    try:
        with without_warnings("diffusers.models.modeling_utils"):
            model, loaded = AutoencoderKL.from_pretrained(
                str(folder), use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except (OSError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"the autoencoder in {folder} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    check_names(loaded["missing_keys"], loaded["unexpected_keys"], folder)
    check_finite(model.state_dict(), folder)
    digest = hashlib.sha256(text)
    with weights.open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return Autoencoder(model.to(device).eval(), digest.hexdigest())
