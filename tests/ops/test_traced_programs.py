"""torch.jit.trace keeps one side of every branch: a traced program is right on other inputs, or says that it is not."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from nalaformer import FEATURE_MAPS, feature_map, linear_attention
from nalaformer.attention import METHODS, build
from nalaformer.models.language import NaLaConfig, NaLaForCausalLM
from nalaformer.models.vision import build as build_backbone
from nalaformer.ops import delta, interface
from nalaformer.ops.eager import run_eagerly
from nalaformer.ops.features import quotient_with_bounded_gradient

pytestmark = pytest.mark.usefixtures("one_thread")


def traced(model, *example: Tensor):
    with warnings.catch_warnings(), torch.no_grad():
        # torch warns of its own age, and of each size that a check looks at
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, example, check_trace=False)


def inputs(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, num_tokens, 2, 4) for _ in range(3))


def attention_with(name: str, *, causal: bool):
    mapped = feature_map(name, num_heads=2, head_dim=4).requires_grad_(False)
    return lambda q, k, v: linear_attention(q, k, v, feature_map=mapped, causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["all see all", "causal"])
@pytest.mark.parametrize("name", FEATURE_MAPS.names())
@torch.no_grad()
def test_the_op_traced_on_ordinary_numbers_is_right_on_others(name, causal):
    attend = attention_with(name, causal=causal)
    program = traced(attend, *inputs(6))
    zero_query, large_keys, bad_value = inputs(9), inputs(8), inputs(5)
    zero_query[0][0, 2] = 0
    large_keys[1].mul_(200.0)
    bad_value[2][0, 3] = torch.inf
    for given in (inputs(6), inputs(300), zero_query, large_keys, bad_value):
        torch.testing.assert_close(program(*given), attend(*given), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEATURE_MAPS.names())
def test_the_op_recorded_with_gradients_is_what_torch_records_without(name):
    # torch records a second time, without gradients, and compares the programs
    torch.jit.trace(attention_with(name, causal=True), tuple(x.requires_grad_() for x in inputs(6)))


def test_a_program_recorded_without_gradients_bounds_them_all_the_same():
    program = traced(quotient_with_bounded_gradient, torch.randn(3, 4), torch.ones(3, 1))
    given = torch.randn(3, 4, requires_grad=True), torch.tensor([[1.0], [1e-3], [1e-25]], requires_grad=True)
    found, expected = (torch.autograd.grad(call(*given).sum(), given) for call in (program, quotient_with_bounded_gradient))
    for of_program, of_function in zip(found, expected, strict=True):
        torch.testing.assert_close(of_program, of_function)


class OnImages(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, image: Tensor) -> Tensor:
        return self.layer(image.flatten(2).transpose(1, 2), (image.shape[2], image.shape[3]))


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_traced_layer_serves_other_grids(method):
    layer = OnImages(build(method, dim=16, num_heads=2, table_grid=(4, 6)).eval())
    program = traced(layer, torch.randn(1, 16, 4, 6))
    for size in ((4, 6), (3, 8), (9, 5)):
        image = torch.randn(2, 16, *size)
        torch.testing.assert_close(program(image), layer(image), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_traced_windows_refuse_a_grid_that_would_be_cut_otherwise():
    layer = OnImages(build("softmax", dim=16, num_heads=2, window=3, position="relative", shifted=True).eval())
    program = traced(layer, torch.randn(1, 16, 4, 6))
    image = torch.randn(2, 16, 4, 6)
    torch.testing.assert_close(program(image), layer(image), rtol=1e-4, atol=1e-5)
    for size in ((6, 4), (3, 8), (2, 2)):
        with pytest.raises(RuntimeError, match=r"invalid for input of size"):
            program(torch.randn(2, 16, *size))


@pytest.mark.parametrize("name", ["nalaformer_xt", "polaformer_pvt_t", "vit_nala_tiny_patch16"])
@torch.no_grad()
def test_a_traced_backbone_serves_other_sizes(name):
    sizes = {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 8, 8), "num_heads": 1, "mlp_ratios": 1.0, "img_size": 64}
    model = build_backbone(name, num_classes=5, **sizes).eval()
    program = traced(model, torch.randn(1, 3, 64, 64))
    for size in ((64, 64), (45, 70)):
        image = torch.randn(2, 3, *size)
        torch.testing.assert_close(program(image), model(image), rtol=1e-4, atol=1e-5)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(tokens, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize(
    ("mixer", "has_mask"),
    [*((mixer, True) for mixer in ("linear", "forgetting", "delta", "gated_delta", "softmax")), ("linear", False)],
)
@torch.no_grad()
def test_a_traced_language_model_serves_other_lengths_and_padding(mixer, has_mask):
    model = Logits(NaLaForCausalLM(NaLaConfig.from_size("nano", vocab_size=50, mixers=mixer)).eval())
    example = (torch.randint(50, (2, 9)), torch.ones(2, 9, dtype=torch.long))
    program = traced(model, *example[: 1 + has_mask])
    for length in (9, 4, 70):
        given = (torch.randint(50, (3, length)), torch.ones(3, length, dtype=torch.long))
        # padding, where the example had none
        given[1][1, :2] = 0
        real = given[1].bool() if has_mask else slice(None)
        found, expected = (call(*given[: 1 + has_mask])[real] for call in (program, model))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_reads_values_on_the_host_is_not_traced():
    traced = []

    @run_eagerly
    def double_sum(x):
        traced.append(torch.compiler.is_compiling())
        return x * x.sum().item()

    compiled = torch.compile(lambda x: double_sum(x + 1) - 1, backend="eager")
    for size in (3, 5):
        assert compiled(torch.ones(size)).tolist() == [4 * size - 1] * size
    assert traced == [False, False]
    # packed sequences are such functions: traced, every packing would be another program
    assert all(hasattr(packed, "_torchdynamo_disable") for packed in (interface._attend_packed, delta._run_packed))
