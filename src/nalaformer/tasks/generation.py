"""Learning to make images."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..data.generation import GenerationData, GenerationDataConfig, open_generation_data
from ..field_types import check_ranges
from ..models.diffusion import OBJECTIVES, DiffusionTransformer, Objective, layout_of, need_diffusers
from ..models.diffusion.network import check_size
from ..models.diffusion.objectives import TRAINED_STEPS
from ..registry import check_options, unknown_name
from .base import TASKS, Gather, Loss, SummedMetrics

# errors are told for as many equal parts of the noise levels
PARTS = 4
LEVELS = ("uniform", "middle")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(GenerationDataConfig):
    """Which images, what the network is to predict, and how samples are judged in training."""

    objective: str = "flow"
    """"flow": the way from image to noise; "ddpm": the noise, with a learned variance, as DiT was trained."""
    levels: str = "uniform"
    """Noise levels in training: "uniform", as DiT was trained; "middle": the sigmoid of a normal number, where short runs learn
    most about shapes."""
    judged: int = 0
    """Samples that each evaluation draws, for the labels of the first held-out images, and has judged by the data, where it
    can (shapes); needs nalaformer[diffusion]; 0: none."""
    judged_steps: int = 50
    """Steps of the sampler for each of those."""
    judged_guidance: float = 1.0
    """Guidance of those: 1 is none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        OBJECTIVES[self.objective]
        if self.levels not in LEVELS:
            raise unknown_name("noise levels", self.levels, LEVELS)
        check_ranges(self, positive=("judged_steps",), not_negative=("judged",))
        # the sampler would say so after the training
        if self.judged_steps > TRAINED_STEPS:
            raise ValueError(f"judged_steps must lie in 1 .. {TRAINED_STEPS}, got {self.judged_steps}; 50 is usual")
        if self.judged_guidance < 0:
            raise ValueError(f"judged_guidance must not be negative, got {self.judged_guidance}; 1 is none")


@TASKS.register("generation")
class Generation:
    """The error of a prediction at random noise levels; on held-out images at levels and with noise that never change."""

    Config = GenerationConfig

    def __init__(self, config: GenerationConfig) -> None:
        self.config = config
        self.objective: Objective = OBJECTIVES[config.objective]

    @cached_property
    def train_data(self) -> GenerationData:
        return open_generation_data(self.config, "train")

    @cached_property
    def eval_data(self) -> "HeldOut":
        return HeldOut(open_generation_data(self.config, "val"))

    def facts(self) -> dict[str, Any]:
        data = self.train_data
        if self.config.judged:
            need_diffusers()
            if not hasattr(data, "judge"):
                raise ValueError(
                    f"judged={self.config.judged} needs data that judges samples, such as shapes, got {self.config.data}; set "
                    "judged=0 and judge the samples of the trained run"
                )
        facts = {name: getattr(data, name) for name in ("num_classes", "channels", "height", "width")}
        facts |= {"class_names": list(data.class_names), "objective": self.config.objective}
        # which autoencoder made latents, where the data knows
        return facts | {"autoencoder": getattr(data, "autoencoder", "")}

    def notes(self) -> list[str]:
        return self.train_data.notes()

    @staticmethod
    def create_model(name: str, options: dict[str, Any], facts: dict[str, Any]) -> nn.Module:
        """The diffusion transformer of a name such as "dit_s2"; options change its layout."""
        shape: dict[str, Any] = {name: facts[name] for name in ("channels", "num_classes")}
        shape["learned_variance"] = OBJECTIVES[facts["objective"]].learned_variance
        check_options(DiffusionTransformer, options, "a diffusion transformer")
        # what follows from the data is no option: given twice, it is refused
        network = DiffusionTransformer(**(layout_of(name) | options), **shape)
        check_size(facts["height"], facts["width"], network.patch_size)
        return network

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """The objective's loss with fresh noise at random levels; part: "error", its mean square alone."""
        images, labels = batch
        noise, count, device = torch.randn_like(images), len(images), images.device
        is_uniform = self.config.levels == "uniform"
        levels = torch.rand(count, device=device) if is_uniform else torch.randn(count, device=device).sigmoid()
        errors = self.objective.errors(model, images, labels, noise, levels)
        return Loss(total=errors.loss.mean(), weight=len(images), parts={"error": errors.error.mean()})

    def metrics(self) -> "PredictionErrors":
        return PredictionErrors(self)


class HeldOut:
    """Items (image, label, noise, level, index): noise and level follow from the index, so that evaluations compare."""

    def __init__(self, data: GenerationData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int, Tensor, Tensor, int]:
        image, label = self.data[index]
        noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(index))
        # multiples of the golden ratio fill 0..1 evenly, however many there are
        level = math.modf((index + 0.5) * (math.sqrt(5) - 1) / 2)[0]
        return image, label, noise, torch.tensor(level), index


class PredictionErrors(SummedMetrics):
    """How much of its target the network explains, its loss, the error by noise level, and what the data says of samples.

    explained = 1 - error / power of the target, 0 for a network that predicts zero. error_0_25, ...: mean squares at noise
    levels of 0 to 25 percent, and so on.
    """

    def __init__(self, task: Generation) -> None:
        self.task = task
        # of each part: loss, error, power, images
        self.sums = torch.zeros(PARTS, 4, dtype=torch.float64)
        self.samples: list[tuple[int, int, Tensor]] = []

    def update(self, model: nn.Module, batch: tuple[Tensor, ...]) -> None:
        images, labels, noise, levels, indices = batch
        errors = self.task.objective.errors(model, images, labels, noise, levels)
        figures = torch.stack((errors.loss, errors.error, errors.power, torch.ones_like(errors.loss)), dim=1)
        parts = (levels * PARTS).long().clamp(max=PARTS - 1)
        self.sums.index_add_(0, parts.cpu(), figures.double().cpu())
        is_judged = indices < self.task.config.judged
        if is_judged.any():
            self._draw(cast(DiffusionTransformer, model), labels[is_judged], indices[is_judged].tolist(), images.shape[2:])

    def _draw(self, model: DiffusionTransformer, labels: Tensor, indices: list[int], size: torch.Size) -> None:
        from ..models.diffusion.samplers import denoise, to_rgb

        config = self.task.config
        images = denoise(
            model,
            labels,
            objective=config.objective,
            height=size[0],
            width=size[1],
            clip=True,
            steps=config.judged_steps,
            guidance=config.judged_guidance,
            seeds=[(index,) for index in indices],
        )
        self.samples += zip(indices, labels.tolist(), to_rgb(images).cpu(), strict=True)

    def join(self, gather: Gather) -> None:
        super().join(gather)
        self.samples = [sample for part in gather(self.samples) for sample in part]

    def result(self) -> dict[str, float]:
        loss, error, power, count = self.sums.sum(0).tolist()
        if not count:
            raise ValueError("the error of a prediction needs at least one image, got none that could be read")
        figures = {"explained": 1 - error / power, "loss": loss / count}
        for number, (_, part_error, _, part_count) in enumerate(self.sums.tolist()):
            if part_count:
                start, end = (100 * edge // PARTS for edge in (number, number + 1))
                figures[f"error_{start}_{end}"] = part_error / part_count
        if self.samples:
            _, labels, images = zip(*sorted(self.samples, key=lambda sample: sample[0]), strict=True)
            figures |= cast(Any, self.task.eval_data.data).judge(torch.stack(images), torch.tensor(labels))
        return figures
