"""Filtered blocks that gradient checkpointing runs a second time."""

import copy
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nalaformer
from helpers.looked_at_models import pyramid, timm_vit

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = {
    "ours": (lambda: pyramid(depths=(1, 3), projection=None), {1: 0.3}, 40),
    "vit": (lambda: timm_vit(depth=4), {1: 0.4, 3: 0.2}, 48),
}


def two_models(name, by):
    """The same filtered model twice, the second with checkpointing, and two batches."""
    make, keep, side = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    other = copy.deepcopy(model)
    other.set_grad_checkpointing(True)
    filters = [nalaformer.filter_tokens(each, keep, by=by) for each in (model, other)]
    return (model, other), filters, [torch.randn(2, 3, side, side) for _ in range(2)]


def gradients(model, batches):
    torch.manual_seed(1)
    sum(model(images).square().sum() for images in batches).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("by", ["attention", "random"])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_changes_no_gradient_of_a_loss_over_two_filtered_passes(name, by):
    (plain, saving), filters, batches = two_models(name, by)
    expected, found = gradients(plain, batches), gradients(saving, batches)
    assert expected.keys() == found.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, atol=1e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}")
    # and the filter tells of the last pass, not of what was computed again
    for place, kept in filters[0].kept.items():
        assert torch.equal(filters[1].kept[place], kept)


def test_two_parts_of_one_tensor_keep_choices_of_their_own():
    (plain, saving), *_ = two_models("vit", "attention")
    tokens = torch.randn(4, 10, plain.embed_dim)

    def found(run):
        parts = [part.requires_grad_() for part in tokens.detach().clone().chunk(2)]
        sum(run(part).square().sum() for part in parts).backward()
        return torch.cat([part.grad for part in parts])

    # both parts lie in the same memory
    expected = found(plain.blocks[1])
    torch.testing.assert_close(found(lambda x: checkpoint(saving.blocks[1], x, use_reentrant=False)), expected)


class Reentrant(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=True)


def test_reentrant_checkpointing_follows_the_choice_of_its_pass():
    (plain, other), _, batches = two_models("vit", "attention")
    batches = [images.requires_grad_() for images in batches]
    expected = gradients(plain, batches)
    other.set_grad_checkpointing(False)
    other.blocks = torch.nn.Sequential(*(Reentrant(block) for block in other.blocks))
    found = gradients(other, batches)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key.replace(".block.", ".")], atol=1e-5, rtol=1e-4)


def test_a_recomputation_from_a_copy_of_its_input_is_refused():
    (_, saving), _, batches = two_models("vit", "attention")
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        loss = saving(batches[0]).sum()
    with pytest.raises(ValueError, match="tensor of its forward pass"):
        loss.backward()


def test_a_filter_remembers_no_choice_of_a_pass_that_is_over():
    (model, _), filters, batches = two_models("ours", "attention")
    counts = []
    # a collection goes through what was made since, and not through all that other tests left
    gc.freeze()
    for images in batches * 2:
        model(images).sum().backward()
        gc.collect()
        counts.append(len(filters[0]._choices._known))
    gc.unfreeze()
    assert counts[-1] == counts[0]
