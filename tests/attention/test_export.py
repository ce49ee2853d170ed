"""A layer inside other people's tools: torch.compile, torch.export, ONNX."""

from functools import cache

import pytest
import timm
import torch
from torch import nn

import nalaformer
from nalaformer.attention import METHODS, build


class OnImages(nn.Module):
    """A layer the way a network calls it: images in, images out, the grid taken from the input."""

    def __init__(self, name, **options):
        super().__init__()
        self.layer = build(name, dim=16, num_heads=2, **options)

    def forward(self, image):
        batch, channels, height, width = image.shape
        tokens = self.layer(image.flatten(2).transpose(1, 2), (height, width))
        return tokens.transpose(1, 2).reshape(batch, channels, height, width)


def dynamic(multiple=1):
    """Any batch, height and width; sizes in multiples, where a stride needs them."""
    height, width = (multiple * torch.export.Dim(name, min=2, max=256) for name in ("height", "width"))
    return ({0: torch.export.Dim("batch", min=1, max=64), 2: height, 3: width},)


@cache
def exported(name):
    """A layer and its program, traced once for all tests."""
    model = OnImages(name).eval()
    return model, torch.export.export(model, (torch.randn(2, 16, 6, 10),), dynamic_shapes=dynamic())


# positions, streams, gates and norms, reflections: the others are made of the same, and test_traced_programs.py traces them all
QUICK = ("nalaformer", "polaformerpp", "mirrorla")
quick_methods = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)


@quick_methods
def test_exported_program_serves_other_batches_and_grids(name):
    model, program = exported(name)
    for shape in ((2, 16, 6, 10), (1, 16, 9, 4), (3, 16, 14, 14), (5, 16, 40, 41)):
        image = torch.randn(shape)
        torch.testing.assert_close(program.module()(image), model(image), rtol=1e-4, atol=1e-5)


def test_exported_program_with_reduced_keys_serves_other_grids():
    model = OnImages("flatten", key_reduction=2).eval()
    program = torch.export.export(model, (torch.randn(2, 16, 6, 10),), dynamic_shapes=dynamic(multiple=2))
    for shape in ((1, 16, 8, 4), (3, 16, 14, 12)):
        image = torch.randn(shape)
        torch.testing.assert_close(program.module()(image), model(image), rtol=1e-4, atol=1e-5)


def test_exported_windows_serve_the_size_of_their_example():
    model = OnImages("softmax", window=4, shifted=True, position="relative").eval()
    image = torch.randn(2, 16, 6, 10)
    program = torch.export.export(model, (image,))
    torch.testing.assert_close(program.module()(image), model(image), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_exported_backbone_serves_other_sizes():
    size = {"embed_dims": (16, 16, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "projection": 16}
    model = timm.create_model("nalaformer_t", num_classes=3, **size).eval()
    program = torch.export.export(model, (torch.randn(2, 3, 96, 128),), dynamic_shapes=dynamic(multiple=32))
    for shape in ((1, 3, 64, 160), (3, 3, 224, 224)):
        image = torch.randn(shape)
        torch.testing.assert_close(program.module()(image), model(image), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", [name if name == "polaformerpp" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_onnx_runtime_agrees_on_other_batches_and_grids(name, tmp_path):
    import onnxruntime

    model, program = exported(name)
    path = tmp_path / "layer.onnx"
    # most from the program, which is what ONNX begins with; a layer as people pass it is traced on the way
    if name == "nalaformer":
        torch.onnx.export(
            model, (torch.randn(2, 16, 6, 10),), path, verbose=False, input_names=["image"], dynamic_shapes=dynamic()
        )
    else:
        torch.onnx.export(program, (), path, verbose=False, input_names=["image"])
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for shape in ((2, 16, 6, 10), (1, 16, 9, 4), (3, 16, 14, 14)):
        image = torch.randn(shape)
        (out,) = session.run(None, {"image": image.numpy()})
        torch.testing.assert_close(torch.from_numpy(out), model(image).detach(), rtol=1e-4, atol=1e-4)


# aot_eager traces both passes without C++, whose compilation takes half a minute
@pytest.mark.parametrize(
    ("causal", "backend"),
    [(False, "inductor"), (True, "aot_eager"), pytest.param(True, "inductor", marks=pytest.mark.slow)],
)
def test_op_compiles_into_one_graph_forward_and_backward(causal, backend):
    torch.compiler.reset()
    feature_map = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8)
    q, k, v = (torch.randn(2, 140, 2, 8, requires_grad=True) for _ in range(3))

    def attend(q, k, v):
        return nalaformer.linear_attention(q, k, v, feature_map=feature_map, causal=causal)

    expected = attend(q, k, v)
    out = torch.compile(attend, fullgraph=True, backend=backend)(q, k, v)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), cotangent)
    theirs = torch.autograd.grad(expected, (q, k, v), cotangent)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@quick_methods
def test_layer_traces_into_one_graph(name):
    # the eager backend checks for graph breaks without half a minute of C++ compilation per method
    torch.compiler.reset()
    model = OnImages(name)
    image = torch.randn(2, 16, 5, 7)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(image), model(image))


@pytest.mark.slow
def test_a_backbone_compiles_in_one_graph():
    size = {"embed_dims": (16, 16, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "projection": 16}
    model = timm.create_model("nalaformer_t", num_classes=3, **size).eval()
    image = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(image), model(image), rtol=1e-4, atol=1e-5)
