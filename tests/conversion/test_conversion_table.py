"""The table of what converts, in docs/backbones.md, is what `plan_conversion` says of the models themselves."""

import timm
import torch
import torchvision
import transformers

import nalaformer
from helpers.places import PROJECT

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TIMM = {
    "ViT, DeiT": ("vit_tiny_patch16_224", {"depth": 1}),
    "Swin": ("swin_tiny_patch4_window7_224", {"depths": (1, 1)}),
    "PVTv2": ("pvt_v2_b0", {}),
    "PVTv2-li": ("pvt_v2_b2_li", {"depths": (1, 1, 1, 1)}),
    "EVA": ("eva_giant_patch14_224", {"depth": 1}),
    "EVA-02": ("eva02_tiny_patch14_224", {"depth": 1}),
    "DINOv3": ("vit_small_patch16_dinov3", {"depth": 1}),
    "BEiT": ("beit_base_patch16_224", {"depth": 1}),
    "SwinV2": ("swinv2_tiny_window8_256", {"depths": (1, 1)}),
    "SAM": ("samvit_base_patch16", {"depth": 1}),
}
TRANSFORMERS = {
    "ViT": "ViTModel",
    "DeiT": "DeiTModel",
    "DINOv2": "Dinov2Model",
    "DINOv2 with registers": "Dinov2WithRegistersModel",
    "I-JEPA": "IJepaModel",
    "MAE": "ViTMAEModel",
    "MSN": "ViTMSNModel",
    "CLIP, image encoder": "CLIPVisionModel",
    "CLIP, text encoder": "CLIPTextModel",
    "SigLIP": "SiglipVisionModel",
    "SegFormer": "SegformerModel",
    "Swin": "SwinModel",
    "BEiT": "BeitModel",
    "DINOv3": "DINOv3ViTModel",
}
TORCHVISION = {"ViT": torchvision.models.vit_b_16, "Swin": torchvision.models.swin_t, "SwinV2": torchvision.models.swin_v2_t}


def of_transformers(name):
    kind = getattr(transformers, name)
    known = set(kind.config_class().to_dict())
    return kind(kind.config_class(**{key: value for key, value in SIZE.items() if key in known and name != "SegformerModel"}))


def answer(model) -> str:
    # heads that pool tokens are no layers of the encoder
    found = {layer.obstacle for layer in nalaformer.plan_conversion(model) if "head" not in layer.name}
    assert len(found) == 1
    reason = found.pop()
    return f"stays: {reason}" if reason else "converted"


def test_the_table_in_the_docs_is_what_the_models_say():
    rows = ["| package | model | |", "|---|---|---|"]
    with torch.device("meta"):
        rows += [f"| timm | {title} | {answer(timm.create_model(name, **sizes))} |" for title, (name, sizes) in TIMM.items()]
        rows += [f"| transformers | {title} | {answer(of_transformers(name))} |" for title, name in TRANSFORMERS.items()]
        rows += [f"| torchvision | {title} | {answer(make())} |" for title, make in TORCHVISION.items()]
    expected = "\n".join(rows)
    assert expected in (PROJECT / "docs" / "backbones.md").read_text(), f"the table in docs/backbones.md must read\n{expected}"
