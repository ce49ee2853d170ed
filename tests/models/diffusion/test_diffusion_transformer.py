"""The diffusion transformer: what DiT computes with softmax, any size and attention, and how it starts."""

import argparse
import inspect
import math

import diffusers
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nalaformer
from helpers.option_effects import Effects
from nalaformer import NaLaDiT, published
from nalaformer.attention import METHODS
from nalaformer.models.diffusion import LAYOUTS, DiffusionTransformer, layout_of
from nalaformer.models.diffusion.network import sin_cos_positions

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {"depth": 2, "dim": 32, "num_heads": 2, "patch_size": 2, "channels": 3, "num_classes": 5}
NETWORK = Effects(name for name in inspect.signature(DiffusionTransformer.__init__).parameters if name != "self")
MODEL = Effects(name for name in inspect.signature(NaLaDiT.__init__).parameters if name not in ("self", *NETWORK.options))


def test_no_option_of_the_network_is_without_a_test_of_its_effect():
    assert [*NETWORK.missing(), *MODEL.missing()] == []


def moved(model):
    """With weights away from their start, where every block is the identity."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def inputs(height=8, width=12, channels=3, batch=2):
    draw = torch.Generator().manual_seed(0)
    times = torch.tensor([3.0, 711.5])[:batch]
    return torch.randn(batch, channels, height, width, generator=draw), times, torch.tensor([1, 4])[:batch]


# ---- DiT


def diffusers_dit():
    size = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "in_channels": 4, "out_channels": 8}
    dit = diffusers.DiTTransformer2DModel(**size, sample_size=8, patch_size=2, num_embeds_ada_norm=5, norm_eps=1e-6)
    for block in dit.transformer_blocks:
        # diffusers divides by 127 where the published model divides by 128
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    return dit


def published_names_of(dit):
    """The weights of diffusers' DiT, under the names of the DiT repository."""
    theirs = dit.state_dict()
    ours = {"pos_embed": dit.pos_embed.pos_embed}
    for part in ("weight", "bias"):
        ours[f"x_embedder.proj.{part}"] = theirs[f"pos_embed.proj.{part}"]
        ours[f"final_layer.adaLN_modulation.1.{part}"] = theirs[f"proj_out_1.{part}"]
        ours[f"final_layer.linear.{part}"] = theirs[f"proj_out_2.{part}"]
        for number in range(2):
            block, new = f"transformer_blocks.{number}", f"blocks.{number}"
            qkv = [theirs[f"{block}.attn1.to_{name}.{part}"] for name in "qkv"]
            ours[f"{new}.attn.qkv.{part}"] = torch.cat(qkv)
            ours[f"{new}.attn.proj.{part}"] = theirs[f"{block}.attn1.to_out.0.{part}"]
            ours[f"{new}.mlp.fc1.{part}"] = theirs[f"{block}.ff.net.0.proj.{part}"]
            ours[f"{new}.mlp.fc2.{part}"] = theirs[f"{block}.ff.net.2.{part}"]
            ours[f"{new}.adaLN_modulation.1.{part}"] = theirs[f"{block}.norm1.linear.{part}"]
        # diffusers keeps an embedding of time and class in every block; the published model has one
        for number, name in ((0, "linear_1"), (2, "linear_2")):
            first = theirs[f"transformer_blocks.0.norm1.emb.timestep_embedder.{name}.{part}"]
            theirs[f"transformer_blocks.1.norm1.emb.timestep_embedder.{name}.{part}"].copy_(first)
            ours[f"t_embedder.mlp.{number}.{part}"] = first
    table = "norm1.emb.class_embedder.embedding_table.weight"
    theirs[f"transformer_blocks.1.{table}"].copy_(theirs[f"transformer_blocks.0.{table}"])
    ours["y_embedder.embedding_table.weight"] = theirs[f"transformer_blocks.0.{table}"]
    return ours


@pytest.fixture(scope="module")
def dit():
    torch.manual_seed(0)
    theirs = moved(diffusers_dit())
    # in float64 what is left is a mistake and no rounding
    return theirs.double(), {name: value.double() for name, value in published_names_of(theirs).items()}


def test_published_weights_compute_what_diffusers_dit_computes(dit):
    theirs, weights = dit
    model = published.load_dit(weights, num_heads=2).double()
    images = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    times, labels = torch.tensor([3, 711]), torch.tensor([1, 4])
    with torch.no_grad():
        expected = theirs(images, timestep=times, class_labels=labels).sample
        # the waves of time are float32 in both
        assert (model(images, times, labels).sample - expected).abs().max() < 1e-5 * expected.abs().max()


def test_published_weights_say_their_sizes(dit):
    config = published.load_dit(dit[1], num_heads=2, class_names=list("abcde")).config
    assert (config.depth, config.dim, config.patch_size, config.channels, config.num_classes) == (2, 32, 2, 4, 5)
    assert (config.height, config.width, config.objective, config.attention) == (8, 8, "ddpm", "softmax")


def test_every_published_name_is_used_and_others_are_refused(dit):
    with pytest.raises(ValueError, match=r"one of a published DiT, got 1 others: blocks\.0\.attn\.q_norm\.weight"):
        published.load_dit(dit[1] | {"blocks.0.attn.q_norm.weight": torch.ones(8)}, num_heads=2)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.fc2\.bias"):
        published.load_dit({name: value for name, value in dit[1].items() if name != "blocks.1.mlp.fc2.bias"}, num_heads=2)
    with pytest.raises(ValueError, match="pos_embed must hold the sines and cosines"):
        published.load_dit(dit[1] | {"pos_embed": dit[1]["pos_embed"].flip(2)}, num_heads=2)
    with pytest.raises(ValueError, match="a DiT of 32 channels cannot be read off its weights, got num_heads=0"):
        published.load_dit(dit[1])
    with pytest.raises(ValueError, match="must be a published DiT's, with x_embedder"):
        published.load_dit({"stem.0.weight": torch.ones(1)})


def test_published_weights_are_read_from_a_file_without_running_code(dit, tmp_path):
    worse = {name: torch.zeros_like(value) for name, value in dit[1].items()}
    torch.save({"model": worse, "ema": dit[1], "args": argparse.Namespace(lr=1e-4)}, tmp_path / "DiT.pt")
    # of a training checkpoint the averaged weights are those that were evaluated
    assert published.load_dit(tmp_path / "DiT.pt", num_heads=2).pixels.weight.any()
    torch.save({"model": dit[1], "run": print}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="cannot be read as weights alone"):
        published.load_dit(tmp_path / "bad.pt", num_heads=2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_have_the_published_number_of_parameters(name):
    # DiT's table 1, in millions, of the XL model with patches of 2; the others follow from depth and width
    with torch.device("meta"):
        network = DiffusionTransformer(**layout_of(name), attention="softmax")
    dim, depth, patch = network.patches.out_channels, len(network.blocks), network.patch_size
    block = dim * 3 * dim + 3 * dim + dim * dim + dim + 8 * dim * dim + 5 * dim + 6 * dim * dim + 6 * dim
    ends = 4 * patch**2 * dim + dim + 256 * dim + dim + dim * dim + dim + 1001 * dim
    last = 2 * dim * dim + 2 * dim + patch**2 * 8 * dim + patch**2 * 8
    assert sum(p.numel() for p in network.parameters()) == depth * block + ends + last
    if name in ("dit_s2", "dit_xl2"):
        millions = sum(p.numel() for p in network.parameters()) / 1e6
        assert millions == pytest.approx({"dit_s2": 33, "dit_xl2": 675}[name], rel=0.01)


# ---- any size, any attention


@pytest.mark.parametrize("method", METHODS)
def test_every_attention_runs_and_learns_on_a_rectangle(method):
    network = moved(DiffusionTransformer(**TINY, attention=method))
    output = network(*inputs())
    assert output.shape == (2, 6, 8, 12)
    output.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


class LargestTensor(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        made = operation(*arguments, **(options or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return made


def test_65536_tokens_make_no_table_of_pairs_of_tokens():
    network = moved(DiffusionTransformer(**(TINY | {"depth": 1, "dim": 16}), mlp_ratio=1.0))
    largest = LargestTensor()
    with torch.no_grad(), largest:
        output = network(*inputs(512, 512, batch=1))
    assert output.isfinite().all()
    # q, k, v and gate side by side
    assert largest.numbers <= 65_536 * 16 * 4


def test_positions_are_those_of_rows_and_columns():
    table = sin_cos_positions(3, 5, 8).unflatten(0, (3, 5))
    # speeds 1 and 1/100, of the column first
    for row, column in ((0, 0), (2, 1), (1, 4)):
        wanted = [f(place * speed) for place in (column, row) for f in (math.sin, math.cos) for speed in (1.0, 0.01)]
        assert table[row, column].tolist() == pytest.approx(wanted, abs=1e-6)


def test_a_patch_of_the_output_lies_where_its_patch_of_the_input_was():
    network = moved(DiffusionTransformer(**TINY, attention="linear"))
    images, times, labels = inputs()
    images.requires_grad_()
    for block in network.blocks:
        # without attention no patch sees another
        torch.nn.init.zeros_(block.attention.projection.weight)
    network(images, times, labels)[0, :, 4:6, 10:12].sum().backward()
    touched = images.grad[0].abs().sum(0) > 0
    expected = torch.zeros(8, 12, dtype=torch.bool)
    expected[4:6, 10:12] = True
    assert torch.equal(touched, expected)


@pytest.mark.parametrize(("height", "width"), [(7, 12), (8, 11), (0, 12)])
def test_sizes_that_the_patch_does_not_divide_are_refused(height, width):
    with pytest.raises(ValueError, match=rf"positive multiples of the patch size, 2, got {height} x {width}; the nearest is"):
        DiffusionTransformer(**TINY)(torch.zeros(1, 3, height, width), torch.zeros(1), torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 34}, "dim must be a multiple of 4"),
        ({"depth": 0}, "depth must be a positive whole number, got 0"),
        ({"class_dropout": 1.0}, "class_dropout must be at least 0 and below 1"),
        ({"attention": "softmaxx"}, "did you mean 'softmax'"),
        ({"attention_options": {"causal": True, "local_mix": "none"}}, "must not be causal"),
    ],
)
def test_networks_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DiffusionTransformer(**(TINY | change))


def test_inputs_that_do_not_fit_are_refused():
    network = DiffusionTransformer(**TINY)
    images, times, labels = inputs()
    with pytest.raises(ValueError, match=r"images must be \[batch, 3, height, width\], got \(2, 4, 8, 12\)"):
        network(torch.zeros(2, 4, 8, 12), times, labels)
    with pytest.raises(ValueError, match=r"one for each of 2 images, got \(1,\) and \(2,\)"):
        network(images, times[:1], labels)
    with pytest.raises(ValueError, match=r"labels must lie in 0 \.\. 4, or 5 for no class, got 1 \.\. 6"):
        network.check_labels(torch.tensor([1, 6]))
    with pytest.raises(ValueError, match=r"got -1 \.\. 2"):
        network.check_labels(torch.tensor([2, -1]))


# ---- options


@NETWORK.of("depth", "dim", "num_heads", "patch_size", "channels", "num_classes", "mlp_ratio")
def test_sizes_are_as_asked_for():
    network = DiffusionTransformer(depth=3, dim=24, num_heads=3, patch_size=4, channels=1, num_classes=7, mlp_ratio=1.5)
    assert len(network.blocks) == 3
    assert network.patches.weight.shape == (24, 1, 4, 4)
    assert network.classes.weight.shape == (8, 24)
    assert network.blocks[0].attention.num_heads == 3
    assert network.blocks[0].fc1.out_features == 36


@NETWORK.of("attention", "attention_options")
def test_attention_is_that_of_the_method_with_its_options():
    config = DiffusionTransformer(**TINY, attention="polaformer", attention_options={"gate": "none"}).blocks[0].attention.config
    assert (config.feature_map, config.gate, config.local_mix) == ("polarity", "none", METHODS["polaformer"].local_mix)


@NETWORK.of("learned_variance")
def test_a_learned_variance_doubles_the_output():
    assert [DiffusionTransformer(**TINY, learned_variance=each)(*inputs()).shape[1] for each in (True, False)] == [6, 3]


@NETWORK.of("class_dropout")
def test_labels_are_dropped_in_training_alone_and_at_their_rate():
    network = moved(DiffusionTransformer(**TINY, class_dropout=0.3))
    labels = torch.zeros(2000, dtype=torch.long)
    assert torch.equal(network._drop_classes(labels), labels)
    network.train()
    dropped = network._drop_classes(labels)
    assert set(dropped.tolist()) == {0, 5}
    # five standard deviations of 2000 draws
    assert (dropped == 5).float().mean().item() == pytest.approx(0.3, abs=0.05)
    without = DiffusionTransformer(**TINY, class_dropout=0.0)
    assert without.no_class is None
    assert without.classes.weight.shape[0] == 5
    with pytest.raises(ValueError, match=r"lie in 0 \.\. 4, got 5 \.\. 5"):
        without.check_labels(torch.tensor([5]))


def test_the_network_starts_as_zero_and_its_blocks_as_the_identity():
    network = DiffusionTransformer(**TINY)
    assert not network(*inputs()).any()
    tokens, condition = torch.randn(2, 24, 32), torch.randn(2, 32)
    assert torch.equal(network.blocks[0](tokens, condition, (4, 6)), tokens)


def test_low_precision_stays_near_float32():
    network = moved(DiffusionTransformer(**TINY))
    sums = []
    network.blocks[1].register_forward_hook(lambda block, inputs, output: sums.append(output.dtype))
    images, times, labels = inputs()
    with torch.no_grad():
        exact = network(images, times, labels)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = network(images, times, labels)
        low = network.bfloat16()(images.bfloat16(), times, labels)
    assert sums == [torch.float32, torch.float32, torch.bfloat16]
    for output in (mixed, low):
        # bfloat16 has steps of 1/256, and errors here are below 0.008
        assert (output.float() - exact).abs().max() < 0.03 * exact.abs().max()


def test_recomputed_activations_change_no_gradient():
    network = moved(DiffusionTransformer(**TINY))
    gradients = []
    for recompute in (False, True):
        network.set_grad_checkpointing(recompute)
        network.zero_grad()
        network(*inputs()).square().sum().backward()
        gradients.append(network.patches.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_feature_maps_and_tables_do_not_decay():
    names = DiffusionTransformer(**TINY, attention="polaformer").no_weight_decay()
    assert {name.split(".attention.")[1] for name in names} == {"map.power", "map.scale", "table.table"}


# ---- as diffusers knows it


@MODEL.of("objective", "height", "width", "class_names")
def test_a_model_is_saved_and_loaded_with_what_it_is_for(tmp_path):
    model = moved(NaLaDiT(**TINY, objective="flow", height=8, width=12, class_names=list("abcde")))
    model.save_pretrained(tmp_path)
    again = nalaformer.NaLaDiT.from_pretrained(tmp_path)
    assert (again.config.objective, again.config.height, again.config.width) == ("flow", 8, 12)
    assert list(again.config.class_names) == list("abcde")
    assert torch.equal(again(*inputs()).sample, model(*inputs(), return_dict=False)[0])
    # a flow has no variance
    assert again(*inputs()).sample.shape[1] == 3
    assert NaLaDiT(**TINY, objective="ddpm")(*inputs()).sample.shape[1] == 6
    with pytest.raises(ValueError, match="class_names must name each of 5 classes, got 1 names"):
        NaLaDiT(**TINY, class_names=["a"])


def test_a_size_by_name_takes_options():
    model = NaLaDiT.from_size("dit_s4", depth=1, num_classes=3, attention="linear")
    assert (model.config.dim, model.config.patch_size, len(model.blocks)) == (384, 4, 1)
    with pytest.raises(ValueError, match="unknown diffusion transformer 'dit_s3'; did you mean"):
        NaLaDiT.from_size("dit_s3")


def test_diffusers_switch_for_recomputing_is_heard():
    model = NaLaDiT(**TINY)
    model.enable_gradient_checkpointing()
    assert model.gradient_checkpointing
    assert model.is_gradient_checkpointing


def test_a_model_and_a_network_have_the_same_weights():
    model, network = NaLaDiT(**TINY), DiffusionTransformer(**TINY)
    network.load_state_dict(model.state_dict())
