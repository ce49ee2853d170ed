"""Small models of others with the kinds of attention that are converted."""

import timm
import torch
import transformers


def timm_vit(name="vit_tiny_patch16_224", **options):
    return timm.create_model(name, img_size=48, embed_dim=32, depth=3, num_heads=2, num_classes=5, **options).eval()


def timm_swin():
    size = {"img_size": 96, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    return timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **size).eval()


def transformers_vit(kind="ViT", **options):
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32}
    config = getattr(transformers, f"{kind}Config")(patch_size=8, num_labels=5, **size, **options)
    return getattr(transformers, f"{kind}ForImageClassification")(config).eval()


MODELS = {
    "vit": timm_vit,
    "deit": lambda: timm_vit("deit_tiny_patch16_224"),
    "deit_distilled": lambda: timm_vit("deit_tiny_distilled_patch16_224"),
    "swin": timm_swin,
    "transformers_vit": transformers_vit,
    "transformers_deit": lambda: transformers_vit("DeiT"),
    "transformers_dinov2": lambda: transformers_vit("Dinov2"),
}
SIDES = {"swin": 96}


def make(name):
    """With weights away from their start: a class token of zeros asks nothing and learns nothing."""
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def run(name, model):
    side = SIDES.get(name, 32 if name.startswith("transformers") else 48)
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    out = model(images)
    return out.logits if hasattr(out, "logits") else out
