"""A ViT of timm that is small enough to look into in a moment, and its attention written down from the formula."""

import timm
import torch
from PIL import Image
from torch import Tensor

from nalaformer.analysis.attention_page import Look, Subject, look_into

SIDE, PATCH = 32, 8
# what a hostile file or folder could be called
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">&amp;<b>$\\frac{$"


def small_subject(name: str = "small", *, attention: str = "", depth: int = 2) -> Subject:
    """Class token and 4 x 4 patches, two heads; with weights large enough that attention has a shape."""
    from nalaformer.conversion import convert

    generator = torch.Generator().manual_seed(1)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIDE, patch_size=PATCH, embed_dim=16, depth=depth, num_heads=2, num_classes=0
    )
    if attention:
        convert(model, attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5 * 1.5)
    return Subject(
        name=name, model=model.eval(), prepare=as_input, mean=(0.5,) * 3, spread=(0.5,) * 3, notes=["made up"], is_random=True
    )


def as_input(image: Image.Image) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.resize((SIDE, SIDE)).tobytes()), dtype=torch.uint8)
    return pixels.view(SIDE, SIDE, 3).permute(2, 0, 1) / 127.5 - 1


def small_images(count: int = 2) -> list[tuple[str, Image.Image]]:
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (count, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8).numpy()
    return [(f"{number}.png", Image.fromarray(each)) for number, each in enumerate(pixels)]


def small_look(name: str = "small", *, attention: str = "", images: int = 2, depth: int = 2) -> Look:
    return look_into(small_subject(name, attention=attention, depth=depth), small_images(images))


@torch.no_grad()
def softmax_weights(subject: Subject, image: Image.Image) -> list[Tensor]:
    """Of each layer of an unconverted small ViT, by the formula in float64: softmax(q k^T / sqrt(D)), [H, N, N]."""
    model = subject.model
    inputs: list[Tensor] = []
    hooks = [block.attn.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for block in model.blocks]
    model(subject.prepare(image)[None])
    for hook in hooks:
        hook.remove()
    weights = []
    for block, x in zip(model.blocks, inputs, strict=True):
        heads, size = block.attn.num_heads, block.attn.head_dim
        qkv = x[0].double() @ block.attn.qkv.weight.double().T + block.attn.qkv.bias.double()
        q, k, _ = qkv.view(-1, 3, heads, size).unbind(1)
        weights.append((torch.einsum("ihd,jhd->hij", q, k) / size**0.5).softmax(-1))
    return weights
