"""Every option of the small models of sequences has the effect that its documentation says."""

from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.option_effects import Effects
from nalaformer.attention import configure
from research.models import OneAttention, RecallModel, SequenceClassifier

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSIFIER = Effects(name for name in signature(SequenceClassifier.__init__).parameters if name != "self")
RECALL = Effects(name for name in signature(RecallModel.__init__).parameters if name != "self")
ALONE = Effects(name for name in signature(OneAttention.__init__).parameters if name != "self")
TASK = {"answers": "sequence", "outputs": 3, "length": 9, "vocabulary": 7}
SMALL = {"dim": 8, "depth": 2, "num_heads": 2, "mlp_dim": 10, "dropout": 0.0}


def perturb(model: nn.Module) -> nn.Module:
    """Parameters away from their start, float64, in evaluation mode."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def text(*shape: int) -> Tensor:
    return torch.randint(0, 7, shape)


def encoded_by_hand(model: SequenceClassifier, x: Tensor, visible: Tensor | None) -> Tensor:
    """Tokens after the last norm; attention layers are taken as they are (see test_layer_options.py)."""
    x = model.embedding(x) + model.positions[: x.shape[1]]
    for block in model.blocks:
        x = x + block.attention(norm(x, block.attention_norm), key_mask=visible)
        first, last = block.mlp[0], block.mlp[-1]
        x = x + F.gelu(norm(x, block.mlp_norm) @ first.weight.T + first.bias) @ last.weight.T + last.bias
    return norm(x, model.norm)


def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight + layer.bias


def head(model: SequenceClassifier, x: Tensor) -> Tensor:
    first, _, last = model.head
    return (x @ first.weight.T + first.bias).relu() @ last.weight.T + last.bias


def test_every_sequence_model_option_has_a_test():
    assert (CLASSIFIER.missing(), RECALL.missing(), ALONE.missing()) == ([], [], [])


@CLASSIFIER.of("outputs", "length", "vocabulary", "dim", "depth", "num_heads", "mlp_dim", "attention", "attention_options")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dim": 12, "depth": 1, "num_heads": 3, "mlp_dim": 5, "outputs": 4},
        {"attention": "polaformer", "attention_options": {"position": "table", "alpha": 2.0}},
        {"attention": "elu", "attention_options": {"gate": "silu"}},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_classifier_is_its_formula(changes):
    options = TASK | SMALL | changes
    model, tokens = perturb(SequenceClassifier(**options)), text(2, 9)
    out = model(tokens)
    assert out.shape == (2, options["outputs"])
    torch.testing.assert_close(out, head(model, encoded_by_hand(model, tokens, None).mean(1)), rtol=1e-9, atol=1e-9)
    assert len(model.blocks) == options["depth"]
    name, chosen = options.get("attention", "nalaformer"), options.get("attention_options", {})
    method, parts = ("linear", {"feature_map": name}) if name == "elu" else (name, {})
    expected = configure(method, {"position": "none", "local_mix": "none"} | parts | chosen)
    assert {layer.attention.config == expected and layer.attention.num_heads for layer in model.blocks} == {
        options["num_heads"]
    }
    with pytest.raises(ValueError, match="at most the 9 tokens"):
        model(text(2, 10))


@CLASSIFIER.of("is_padded", "hide_zero", "mean_over")
@pytest.mark.parametrize("mean_over", ["all", "visible"])
@pytest.mark.parametrize("hiding", [{}, {"is_padded": True}, {"hide_zero": True}], ids=str)
@torch.no_grad()
def test_zeros_are_hidden_from_attention_and_from_the_mean_where_asked(hiding, mean_over):
    model = perturb(SequenceClassifier(**TASK, **SMALL, **hiding, mean_over=mean_over))
    tokens = text(2, 9)
    tokens[0, 4:] = 0
    visible = tokens != 0 if hiding else None
    x = encoded_by_hand(model, tokens, visible)
    weight = torch.ones(2, 9, 1) if visible is None or mean_over == "all" else visible[..., None].double()
    torch.testing.assert_close(model(tokens), head(model, (x * weight).sum(1) / weight.sum(1)), rtol=1e-9, atol=1e-9)


@CLASSIFIER.of("most_visible")
@pytest.mark.parametrize("attention", ["softmax", "norm_aware"])
@torch.no_grad()
def test_masked_tokens_may_be_skipped(attention):
    options = TASK | SMALL | {"attention": attention, "hide_zero": True, "mean_over": "visible"}
    model = perturb(SequenceClassifier(**options))
    short = perturb(SequenceClassifier(**options, most_visible=6))
    short.load_state_dict(model.state_dict())
    tokens = torch.tensor([[0, 3, 0, 0, 5, 1, 0, 2, 0], [6, 0, 0, 1, 2, 3, 4, 0, 5], [0, 0, 0, 0, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(short(tokens), model(tokens), rtol=1e-9, atol=1e-9)
    assert short.encode(tokens)[0].shape == (3, 6, 8)
    # one sequence that does not fit spoils no other
    tokens[0] = 1
    found, expected = short(tokens), model(tokens)
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1:], expected[1:], rtol=1e-9, atol=1e-9)
    for missing in ({"hide_zero": False}, {"mean_over": "all"}, {"answers": "tokens"}):
        with pytest.raises(ValueError, match="most_visible=6 leaves out what is hidden: it needs hide_zero=True"):
            SequenceClassifier(**(options | missing), most_visible=6)


@CLASSIFIER.of("answers", "channels")
@torch.no_grad()
def test_answers_follow_tokens_pairs_or_whole_sequences():
    vectors = {"answers": "tokens", "outputs": 3, "length": 9, "channels": 4}
    model, x = perturb(SequenceClassifier(**vectors, **SMALL)), torch.randn(2, 9, 4, dtype=torch.float64)
    torch.testing.assert_close(model(x), head(model, encoded_by_hand(model, x, None)), rtol=1e-9, atol=1e-9)
    model, pairs = perturb(SequenceClassifier(**(TASK | {"answers": "pair"}), **SMALL)), text(2, 2, 9)
    first, second = (encoded_by_hand(model, pairs[:, side], None).mean(1) for side in (0, 1))
    joined = torch.cat((first, second, first * second, first - second), -1)
    torch.testing.assert_close(model(pairs), head(model, joined), rtol=1e-9, atol=1e-9)


@ALONE.of("answers", "outputs", "length", "vocabulary", "channels", "is_padded", "dim", "num_heads", "attention")
@ALONE.of("attention_options")
@pytest.mark.parametrize("changes", [{}, {"dim": 12, "num_heads": 3}, {"attention": "polaformer"}], ids=str)
@torch.no_grad()
def test_one_attention_stands_between_two_projections(changes):
    # length and padding are told to every model; here nothing depends on them
    task = {"answers": "tokens", "outputs": 3, "length": 2, "vocabulary": 0, "channels": 4, "is_padded": True}
    sizes = {"dim": 8, "num_heads": 2, "attention": "elu", "attention_options": {"gate": "silu"}} | changes
    model, x = perturb(OneAttention(**task, **sizes)), torch.randn(2, 9, 4, dtype=torch.float64)
    inside = model.attention(x @ model.embedding.weight.T + model.embedding.bias)
    out = inside @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(x), out, rtol=1e-9, atol=1e-9)
    at = torch.tensor([[0, 5], [8, 2]])
    torch.testing.assert_close(model(x, at=at)[1], out[1, [8, 2]], rtol=1e-9, atol=1e-9)
    method, parts = ("linear", {"feature_map": "elu"}) if sizes["attention"] == "elu" else (sizes["attention"], {})
    expected = configure(method, {"position": "none", "local_mix": "none", "gate": "silu"} | parts)
    assert (model.attention.config, model.attention.num_heads) == (expected, sizes["num_heads"])
    for wrong in ({"answers": "sequence"}, {"vocabulary": 5}):
        with pytest.raises(ValueError, match="one attention alone answers vectors"):
            OneAttention(**(task | wrong))


@CLASSIFIER.of("dropout")
@RECALL.of("dropout")
@torch.no_grad()
def test_dropout_acts_everywhere_and_only_in_training():
    classifier = SequenceClassifier(**TASK, **(SMALL | {"dropout": 0.4}))
    places = [module.p for module in classifier.modules() if isinstance(module, nn.Dropout)]
    assert places == [0.4] * (1 + 2 * 2)
    recall = RecallModel(answers="tokens", outputs=7, length=9, vocabulary=7, dim=8, dropout=0.4)
    for model in (classifier, recall):
        tokens = text(2, 9)
        assert not torch.equal(model.train()(tokens), model(tokens))
        assert torch.equal(model.eval()(tokens), model(tokens))


@RECALL.of("answers", "outputs", "length", "vocabulary", "channels", "is_padded", "dim", "depth", "num_heads")
@RECALL.of("kernel_size", "mlp_ratio", "attention", "attention_options")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kernel_size": 5},
        {"mlp_ratio": 1.5, "depth": 1},
        {"num_heads": 4, "dim": 12, "attention": "flatten", "attention_options": {"power": 5.0}},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_recall_model_is_its_formula(changes):
    sizes = {"dim": 8, "depth": 2, "num_heads": 2} | changes
    # length, channels and padding are told to every model; here nothing depends on them
    task = {"answers": "tokens", "outputs": 7, "length": 3, "vocabulary": 7, "channels": 0, "is_padded": True}
    model, tokens = perturb(RecallModel(**task, **sizes)), text(2, 9)
    x = model.embedding.weight[tokens]
    for layer in model.layers:
        x = x + part_by_hand(layer.layer, norm(x, layer.norm), sizes)
    logits = norm(x, model.norm) @ model.embedding.weight.T
    torch.testing.assert_close(model(tokens), logits, rtol=1e-9, atol=1e-9)
    assert len(model.layers) == sizes["depth"] * (3 if "mlp_ratio" in sizes else 2)


def part_by_hand(part: nn.Module, x: Tensor, sizes: dict) -> Tensor:
    if isinstance(part, nn.Sequential):
        assert part[0].out_features == int(sizes["mlp_ratio"] * sizes["dim"])
        return F.gelu(x @ part[0].weight.T + part[0].bias) @ part[2].weight.T + part[2].bias
    if hasattr(part, "convolution"):
        size = sizes.get("kernel_size", 3)
        weight = part.convolution.weight[:, 0]
        assert weight.shape == (sizes["dim"], size)
        earlier = [F.pad(x, (0, 0, size - 1 - place, 0))[:, : x.shape[1]] * weight[:, place] for place in range(size)]
        return (x @ part.gate.weight.T + part.gate.bias) * (sum(earlier) + part.convolution.bias)
    method = sizes.get("attention", "nalaformer")
    expected = configure(method, {"position": "none", "local_mix": "none", "causal": True} | sizes.get("attention_options", {}))
    assert (part.config, part.num_heads) == (expected, sizes["num_heads"])
    return part(x)
