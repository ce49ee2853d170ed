"""Small models of others with the kinds of attention that are converted."""

import timm
import torch
import torchvision
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


def timm_eva():
    return timm.create_model("eva_giant_patch14_224", img_size=42, embed_dim=32, depth=2, num_heads=2, num_classes=5).eval()


def timm_pvt():
    sizes = {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}
    return timm.create_model("pvt_v2_b0", num_classes=5, **sizes).eval()


def segformer():
    sizes = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]}
    return transformers.SegformerForImageClassification(transformers.SegformerConfig(num_labels=5, **sizes)).eval()


def two_encoders(kind):
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    vision = size | {"image_size": 32, "patch_size": 8}
    config = getattr(transformers, f"{kind}Config")(text_config=size, vision_config=vision, num_labels=5)
    return getattr(transformers, f"{kind}ForImageClassification")(config).eval()


def transformers_swin():
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 64}
    return transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=5, **sizes)).eval()


def torchvision_swin():
    sizes = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    return torchvision.models.SwinTransformer(num_classes=5, **sizes).eval()


def torchvision_vit():
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64, "num_classes": 5}
    return torchvision.models.VisionTransformer(image_size=48, patch_size=16, **sizes).eval()


MODELS = {
    "vit": timm_vit,
    "deit": lambda: timm_vit("deit_tiny_patch16_224"),
    "deit_distilled": lambda: timm_vit("deit_tiny_distilled_patch16_224"),
    "swin": timm_swin,
    "transformers_vit": transformers_vit,
    "transformers_deit": lambda: transformers_vit("DeiT"),
    "transformers_dinov2": lambda: transformers_vit("Dinov2"),
    "transformers_registers": lambda: transformers_vit("Dinov2WithRegisters"),
    "transformers_clip": lambda: two_encoders("CLIP"),
    "transformers_siglip": lambda: two_encoders("Siglip"),
    "transformers_segformer": segformer,
    "eva": timm_eva,
    "pvt": timm_pvt,
    "torchvision_vit": torchvision_vit,
    "transformers_swin": transformers_swin,
    "torchvision_swin": torchvision_swin,
}
SIDES = {"torchvision_swin": 64, "transformers_swin": 64, "swin": 96, "eva": 42, "pvt": 64, "transformers_segformer": 64}


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
    out = model(images.to(next(model.parameters()).dtype))
    return out.logits if hasattr(out, "logits") else out
