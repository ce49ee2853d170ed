"""Token filters of blocks whose norm comes after attention, and calls of filter_tokens that cannot be meant."""

import pytest
import timm
import torch
from timm.models.vision_transformer import ResPostBlock

import nalaformer
from helpers.looked_at_models import pyramid, timm_vit

pytestmark = pytest.mark.usefixtures("one_thread")


def post_norm_vit():
    torch.manual_seed(0)
    size = {"img_size": 48, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3, "block_fn": ResPostBlock}
    model = timm.create_model("vit_tiny_patch16_224", **size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        # a norm that turns the order of the scores round where it is taken for the first
        for block in model.blocks:
            block.norm1.weight.neg_()
    return model


@pytest.mark.parametrize("is_converted", [True, False])
def test_a_post_norm_vit_keeps_the_tokens_that_its_attention_looks_at(is_converted):
    model = post_norm_vit()
    model = nalaformer.convert(model) if is_converted else model
    images = torch.randn(4, 3, 48, 48)
    seen = []
    hook = model.blocks[1].attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(images)
    hook.remove()
    attention = model.blocks[1].attn
    if is_converted:
        layer = attention.attention
        q, k, *_ = layer.project(seen[0], (1, 10), None)
        weights = nalaformer.attention_weights(q, k, feature_map=layer.map, rows=[0])[:, :, 0].mean(1)
    else:
        q, k, _ = attention.qkv(seen[0]).reshape(4, 10, 3, 2, 8).unbind(2)
        weights = torch.einsum("bhd,bjhd->bhj", q[:, 0], k).mul(8**-0.5).softmax(-1).mean(1)
    expected = weights[:, 1:].topk(3).indices.sort(1).values + 1
    found = nalaformer.filter_tokens(model, {1: 0.3})
    model(images)
    assert torch.equal(found.kept[1][:, 1:], expected)


def test_blocks_whose_order_is_not_known_are_refused():
    class Unknown(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.attn, self.norm1 = block.attn, block.norm1

    model = nalaformer.convert(timm_vit())
    model.blocks = torch.nn.Sequential(*(Unknown(block) for block in model.blocks))
    with pytest.raises(ValueError, match="whether its norm comes first"):
        nalaformer.filter_tokens(model, {1: 0.3})


@pytest.mark.parametrize(
    ("make", "keep", "message"),
    [
        (timm_vit, 0.5, r"for each block, such as \{1: 0.5\}, got 0.5"),
        (pyramid, [0.5], r"for each stage, such as \{1: 0.5\}, got \[0.5\]"),
        (timm_vit, {1: "half"}, "above 0 and at most 1, got 'half'"),
        (timm_vit, {1: None}, "above 0 and at most 1, got None"),
        (timm_vit, {"blocks.1": 0.5}, "by number, 0 to 1, got 'blocks.1'"),
        (timm_vit, {1.0: 0.5}, "by number, 0 to 1, got 1.0"),
    ],
)
def test_shares_that_name_no_block_or_are_no_numbers_are_refused(make, keep, message):
    with pytest.raises(ValueError, match=message):
        nalaformer.filter_tokens(make(), keep)
