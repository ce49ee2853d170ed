"""Tiny models of every kind whose attention can be looked at, and inputs for them."""

import timm
import torch
import transformers

import nalaformer
from helpers.converted_models import BUDGET, converted
from nalaformer.models.language import NaLaConfig, NaLaForCausalLM
from nalaformer.models.vision.variants import build

SMALL = {
    "embed_dims": (8, 16),
    "depths": (1, 2),
    "num_heads": (1, 2),
    "mlp_ratios": 2,
    "attention_stages": "lv",
    "key_reduction": 1,
    "softmax_key_reduction": 1,
    "layer_scale": None,
    "num_classes": 3,
    "drop_path_rate": 0.0,
}


def pyramid(variant="nalaformer_xt", **options):
    """Two stages, linear then softmax; 40 pixels make grids of 10 x 10 and 5 x 5."""
    return build(variant, **(SMALL | {"img_size": 40} | options))


def timm_vit(depth=2):
    size = {"img_size": 48, "embed_dim": 16, "depth": depth, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **size)


def timm_swin():
    """Grids of 10 x 10 and 5 x 5 in windows of 4: padded, and shifted in every second block."""
    return timm.models.swin_transformer.SwinTransformer(
        img_size=40, patch_size=4, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(1, 2), num_classes=3
    )


def transformers_vit(implementation="eager"):
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 48}
    config = transformers.ViTConfig(patch_size=16, num_labels=3, **size)
    return transformers.ViTForImageClassification._from_config(config, attn_implementation=implementation)


def nala_language(first="linear", **options):
    return NaLaForCausalLM(NaLaConfig.from_size("nano", vocab_size=30, mixers=[first, "softmax"], **options))


def llama():
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, intermediate_size=16, vocab_size=30))


IMAGE_MODELS = {
    "nalaformer": pyramid,
    "all linear, cosine": lambda: pyramid(attention_stages="ll", attention_options={"direction": "cosine"}),
    "mirrorla": lambda: pyramid(attention="mirrorla"),
    "mala": lambda: pyramid("mavit_t"),
    "rala": lambda: pyramid("ravlt_t"),
    "learned contrast": lambda: pyramid(attention_options={"contrast": "learned"}),
    "flatten pvt": lambda: pyramid("flatten_pvt_t", embed_dims=(8, 16), attention_stages="lv", softmax_key_reduction=(1, 2)),
    "reduced keys": lambda: pyramid("flatten_pvt_t", key_reduction=(3, 1)),
    "swin": lambda: pyramid("flatten_swin_t", softmax_window=4, attention_stages="vl"),
    "timm vit": timm_vit,
    "timm swin": timm_swin,
    "converted vit": lambda: nalaformer.convert(timm_vit()),
    "converted swin": lambda: nalaformer.convert(timm_swin()),
    "transformers vit": transformers_vit,
}
TEXT_MODELS = {
    "language": nala_language,
    "forgetting": lambda: nala_language("forgetting", num_key_value_heads=1),
    "llama": llama,
    "still": lambda: converted(),
    "still with budgets": lambda: converted(budget=BUDGET),
}


def looked_at(name):
    """A model with weights away from their start, and inputs: two images or two texts."""
    torch.manual_seed(0)
    model = (IMAGE_MODELS | TEXT_MODELS)[name]()
    if not name.startswith("still"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    generator = torch.Generator().manual_seed(1)
    if name in TEXT_MODELS:
        return model, torch.randint(1, 30, (2, 27), generator=generator)
    side = 48 if "vit" in name else 40
    return model, torch.randn(2, 3, side, side, generator=generator)
