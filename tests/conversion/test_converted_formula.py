"""Each kind of converted model computes what the original's own code computes with linear attention in the place of softmax."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models import swin_transformer

import nalaformer
from helpers.vision_hosts import MODELS, make, run
from nalaformer.attention import METHODS

pytestmark = pytest.mark.usefixtures("one_thread")


def weights(method: str, q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
    """w_ij = phi_q(q_i).phi_k(k_j) / (their sum over the n keys that i sees + 1e-6 n). q, k [B, H, N, D] -> [B, H, N, N]."""
    config = METHODS[method]
    phi = nalaformer.feature_map(config.feature_map, num_heads=q.shape[1], head_dim=q.shape[-1], **config.map_options).double()
    features = phi.query(q.transpose(1, 2)).transpose(1, 2), phi.key(k.transpose(1, 2)).transpose(1, 2)
    products = features[0] @ features[1].mT
    seen = torch.ones_like(products) if visible is None else visible.to(products.dtype).expand_as(products)
    return products * seen / ((products * seen).sum(-1, keepdim=True) + 1e-6 * seen.sum(-1, keepdim=True))


class LinearInPlaceOfSoftmax:
    """torch's functions, with softmax attention replaced by the formula; `calls` counts the layers."""

    def __init__(self, method: str) -> None:
        self.method, self.calls, self.projected = method, 0, torch.empty(0)

    def __getattr__(self, name: str):
        return getattr(F, name)

    def scaled_dot_product_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_, **__
    ) -> Tensor:
        self.calls += 1
        # masks of shifted windows are added to scores: zero, or far below
        return weights(self.method, q, k, None if attn_mask is None else attn_mask > -50) @ v

    def linear(self, x: Tensor, *weight_and_bias: Tensor) -> Tensor:
        out = F.linear(x, *weight_and_bias)
        if out.shape[-1] == 3 * x.shape[-1]:
            self.projected = out
        return out

    def softmax(self, scores: Tensor, dim: int) -> Tensor:
        """For attention that is written out: q and k are those of the last projection, the mask is what was added to scores."""
        self.calls += 1
        assert dim == -1
        q, k, _ = self.projected.unflatten(-1, (3, scores.shape[1], -1)).permute(2, 0, 3, 1, 4)
        return weights(self.method, q, k, scores - q @ k.mT / q.shape[-1] ** 0.5 > -50)


@pytest.mark.parametrize("method", ["linear", "nalaformer"])
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_is_the_original_with_the_formula_of_linear_attention(name, method, monkeypatch):
    torch.manual_seed(0)
    model = make(name).double()
    for key, parameter in model.named_parameters():
        if "relative_position_bias_table" in key:
            # positions of windows, which linear attention cannot have
            torch.nn.init.zeros_(parameter)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            # timm's own choice for windows is to write them out
            module.fused_attn = True
    functions = LinearInPlaceOfSoftmax(method)
    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", functions.scaled_dot_product_attention)
        patched.setattr(swin_transformer, "F", functions)
        # with gradients: torch's own layer takes another way without
        expected = run(name, model).detach()
    replaced = [layer for layer in nalaformer.plan_conversion(model) if not layer.obstacle]
    assert functions.calls == len(replaced)
    nalaformer.convert(model, method, position="none", local_mix="none")
    with torch.no_grad():
        torch.testing.assert_close(run(name, model), expected, rtol=1e-9, atol=1e-9)
