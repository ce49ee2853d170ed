"""The diffusion transformer as a diffusers model: configured, saved, loaded and called like its own."""

from os import PathLike
from typing import Any

from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from ...weight_files import check_finite, check_names, without_warnings
from .network import DiffusionTransformer, layout_of
from .objectives import OBJECTIVES


class NaLaDiT(ModelMixin, DiffusionTransformer, ConfigMixin):
    """A DiffusionTransformer that diffusers saves, loads and calls. Arguments are those of the network, and

    objective: the training objective, "ddpm" or "flow"; it decides which samplers fit, and learned_variance.
    height, width: the default size of its images, in its own pixels (those of latents if it generates latents).
    class_names: names of its labels, by which images can be requested.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["ModulatedBlock"]
    _keys_to_ignore_on_load_unexpected: list[str] = []

    @register_to_config
    def __init__(
        self,
        *,
        depth: int = 12,
        dim: int = 384,
        num_heads: int = 6,
        patch_size: int = 2,
        channels: int = 4,
        num_classes: int = 1000,
        class_dropout: float = 0.1,
        mlp_ratio: float = 4.0,
        attention: str = "nalaformer",
        attention_options: dict[str, Any] | None = None,
        objective: str = "ddpm",
        height: int = 32,
        width: int = 32,
        class_names: list[str] | None = None,
    ) -> None:
        # ModelMixin's initializer would call the network's without its arguments
        DiffusionTransformer.__init__(
            self,
            depth=depth,
            dim=dim,
            num_heads=num_heads,
            patch_size=patch_size,
            channels=channels,
            num_classes=num_classes,
            class_dropout=class_dropout,
            learned_variance=OBJECTIVES[objective].learned_variance,
            mlp_ratio=mlp_ratio,
            attention=attention,
            attention_options=attention_options,
        )
        self._gradient_checkpointing_func = None
        if class_names is not None and len(class_names) != num_classes:
            raise ValueError(f"class_names must name each of {num_classes} classes, got {len(class_names)} names")

    @classmethod
    def from_size(cls, name: str, **options: Any) -> "NaLaDiT":
        """Build the published layout of that name, "dit_s2" .. "dit_xl8"; options change it."""
        return cls(**(layout_of(name) | options))

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str], *, output_loading_info: bool = False, **options: Any
    ) -> Any:
        """Load as diffusers does, but reject weights that are missing, unexpected or not finite."""
        with without_warnings("diffusers.models.modeling_utils"):
            model, found = super().from_pretrained(pretrained_model_name_or_path, output_loading_info=True, **options)
        check_names(found["missing_keys"], found["unexpected_keys"], pretrained_model_name_or_path)
        check_finite(model.state_dict(), pretrained_model_name_or_path)
        return (model, found) if output_loading_info else model

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, timestep: Tensor, class_labels: Tensor, return_dict: bool = True
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict with diffusers' DiT signature: images [B, C, H, W], times in 0..1000 [] or [B], labels [B]."""
        times = timestep.expand(len(hidden_states))
        sample = self.predict(hidden_states, times, class_labels)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)
