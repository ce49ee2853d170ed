"""What records say of attention, against what the layers computed and against all pairs written out."""

import math
from dataclasses import replace

import pytest
import torch
import torchvision
from torch.utils._python_dispatch import TorchDispatchMode

import nalaformer
from helpers.language_models import make, text
from helpers.looked_at_models import IMAGE_MODELS, TEXT_MODELS, looked_at, pyramid, timm_vit, transformers_vit
from nalaformer.analysis import attention_entropy, attention_layers, effective_rank, entropy_drop, record, rollout, spearman
from nalaformer.analysis.layers import Recorder, call, fit_grid
from nalaformer.analysis.records import LinearRecord, SoftmaxRecord
from nalaformer.attention import Attention, AttentionConfig, build
from nalaformer.attention.windows import Groups

pytestmark = pytest.mark.usefixtures("one_thread")


def dense(found):
    """All pairs, from rows: [B, H, N, M]."""
    return found.rows(torch.arange(found.num_tokens))


def by_tokens(found, x):
    """Values or gathered [B, N, H, V], out of windows."""
    x = x.detach().transpose(1, 2) if found.heads_first else x.detach()
    if found.windows is None or len(x) == found.batch:
        return x
    flat = x.unflatten(0, (found.batch, -1)).flatten(1, 2)
    whole = torch.zeros(found.batch, found.num_tokens, *x.shape[2:])
    for place, token in enumerate(found.windows.flatten().tolist()):
        if token >= 0:
            whole[:, token] = flat[:, place]
    return whole


# padding of timm's windows is attended there, and has no place in the image
@pytest.mark.parametrize(
    "name", [name for name in (*IMAGE_MODELS, *TEXT_MODELS) if name not in ("timm swin", "converted swin")]
)
def test_rows_times_values_is_what_the_layer_gathered(name):
    model, inputs = looked_at(name)
    with torch.no_grad(), Recorder(model, keep_values=True) as recorder:
        call(model, inputs)
    assert len(recorder.records) == len(attention_layers(model))
    for found in recorder.records:
        values, gathered = by_tokens(found, found.values), by_tokens(found, found.gathered)
        values = values.repeat_interleave(found.num_heads // values.shape[2], dim=2)
        if name.startswith("still"):
            # a gate per channel counts by its mean: without it the rows are exact
            found.gate = None
            with torch.no_grad():
                module = model.get_submodule(found.name)
                module.gate = None
                gathered = module(found.q, found.k, values, torch.zeros(2, 27, 32), scale=found.scale)[0]
        expected = torch.einsum("bhij,bjhv->bihv", dense(found), values)
        torch.testing.assert_close(expected, gathered, atol=3e-5, rtol=3e-4)


def test_rows_and_denominators_of_a_layer_that_forgets_are_its_own():
    layer = build("linear", dim=16, num_heads=2, feature_map="relu", causal=True, forgets=True, contrast="learned")
    with torch.no_grad(), Recorder(layer, keep_values=True) as recorder:
        layer(torch.randn(2, 40, 16))
    for found in recorder.records:
        assert (found.log_decay < 0).all()
        gathered = torch.einsum("bhij,bjhv->bihv", dense(found), found.values)
        torch.testing.assert_close(gathered, found.gathered, atol=3e-5, rtol=3e-4)
        passed = found.log_decay.cumsum(1).transpose(1, 2)
        left = torch.exp((passed[..., :, None] - passed[..., None, :]).tril()).tril()
        products = torch.einsum("bihf,bjhf->bhij", found.q.relu(), found.k.relu()) * left
        torch.testing.assert_close(found.log_denominators(), (products.sum(-1) + 1e-6).log(), atol=1e-4, rtol=1e-4)


def test_padding_between_tokens_fades_no_key_of_a_row():
    model, tokens = looked_at("forgetting")
    mask = torch.ones_like(tokens)
    mask[0, 5:20] = 0
    found = record(model, {"input_ids": tokens, "attention_mask": mask})[0]
    assert found.log_decay.shape == (2, 27, 2)
    kept = torch.tensor([*range(5), *range(20, 27)])
    plain = nalaformer.attention_weights(
        found.q[:1, kept],
        found.k[:1, kept],
        feature_map=found.feature_map,
        causal=True,
        log_decay=found.log_decay[:1, kept],
    )
    torch.testing.assert_close(dense(found)[0][:, kept][:, :, kept], plain.detach()[0], atol=1e-5, rtol=1e-4)


def packed(*lengths):
    """Texts of these lengths, the same in one row, and the positions that say so."""
    texts = [text(1, length) for length in lengths]
    places = torch.cat([torch.arange(length) for length in lengths])
    return texts, {"input_ids": torch.cat(texts, dim=1), "position_ids": places[None]}


PACKED_LAYOUTS = (
    *("linear", "linear+polarity", "linear+rotary+grouped", "linear+contrast", "forgetting", "forgetting+rotary+grouped"),
    *("forgetting+contrast+grouped", "softmax"),
)


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_packed_sequences_have_the_weights_of_each_by_itself(layout):
    model = make(layout)
    # rows of three and of two sequences
    (first, inputs), (second, more) = packed(9, 1, 14), packed(17, 7)
    together = record(model, {name: torch.cat((inputs[name], more[name])) for name in inputs})
    alone = [[record(model, one) for one in texts] for texts in (first, second)]
    for number, found in enumerate(together):
        parts = [[records[number] for records in row] for row in alone]
        expected = torch.stack([block_diagonal([dense(part)[0] for part in row]) for row in parts])
        torch.testing.assert_close(dense(found), expected, rtol=1e-10, atol=1e-12)
        logs = [[part.log_denominators().unflatten(-1, (-1, part.num_tokens)) for part in row] for row in parts]
        expected = torch.cat([torch.cat(row, dim=-1) for row in logs]).flatten(2)
        torch.testing.assert_close(found.log_denominators(), expected, rtol=1e-10, atol=1e-10)
        for head, told in enumerate(found.statistics()):
            entropies = [part.statistics()[head].entropy * part.num_tokens for row in parts for part in row]
            assert told.entropy == pytest.approx(sum(entropies) / 48, rel=1e-9)


def block_diagonal(blocks):
    """[H, n, n] each -> [H, N, N]."""
    return torch.stack([torch.block_diag(*heads) for heads in zip(*blocks, strict=True)])


def test_what_is_not_a_number_stays_in_its_packed_sequence():
    _, inputs = packed(9, 1, 14)
    found = record(make("forgetting"), inputs)[0]
    rows, logs = dense(found), found.log_denominators()
    found.k[0, 2] = torch.nan
    assert dense(found)[:, :, 2:9].isnan().any(-1).all()
    assert torch.equal(dense(found)[:, :, 9:], rows[:, :, 9:])
    assert torch.equal(found.log_denominators()[..., 9:], logs[..., 9:])


@pytest.mark.parametrize("name", ["timm swin", "converted swin"])
def test_rows_of_windows_are_those_of_the_windows(name):
    model, images = looked_at(name)
    with torch.no_grad(), Recorder(model, keep_values=True) as recorder:
        model(images)
    assert [found.grid for found in recorder.records] == [(10, 10), (10, 10), (5, 5), (5, 5)]
    for found in recorder.records:
        pieces = found.piece_weights(torch.arange(found.q.shape[1]))
        values, gathered = (x.transpose(1, 2) if found.heads_first else x for x in (found.values, found.gathered))
        expected = torch.einsum("phij,pjhv->pihv", pieces, values)
        torch.testing.assert_close(expected, gathered, atol=3e-5, rtol=3e-4)
        rows = dense(found)
        for place, (i, j) in enumerate(((0, 0), (0, 5), (7, 15))):
            window = min(place, len(found.windows) - 1)
            query, key = found.windows[window, i].item(), found.windows[window, j].item()
            if query >= 0 and key >= 0:
                assert rows[1, 0, query, key].item() == pieces[len(found.windows) + window, 0, i, j].item()


def test_a_token_of_a_window_sees_nothing_outside_it():
    model, images = looked_at("swin")
    found = record(model, images)[0]
    row = found.rows(torch.tensor([0]))[0, 0, 0].view(10, 10)
    assert row[:4, :4].sum().item() == pytest.approx(1, abs=1e-5)
    assert row[4:].abs().sum() + row[:, 4:].abs().sum() == 0


def test_rows_of_two_streams_are_their_mean():
    model = pyramid("polaformer_pvt_t", attention_stages="ll")
    found = record(model, torch.randn(1, 3, 40, 40))[0]
    streams = [
        nalaformer.attention_weights(found.q, found.k, feature_map=found.feature_map, stream=number) for number in (0, 1)
    ]
    torch.testing.assert_close(dense(found), (streams[0] + streams[1]).detach() / 2)
    assert not torch.allclose(streams[0], streams[1])


def test_every_kind_of_layer_is_found_under_its_name():
    model, _ = looked_at("nalaformer")
    found = [(layer.name, layer.kind, layer.method) for layer in attention_layers(model)]
    assert found == [
        ("stages.0.blocks.0.attention", "linear", "norm_aware"),
        ("stages.1.blocks.0.attention", "softmax", "softmax"),
        ("stages.1.blocks.1.attention", "softmax", "softmax"),
    ]
    assert {layer.kind for layer in attention_layers(looked_at("still with budgets")[0])} == {"hybrid"}
    assert attention_layers(torch.nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("name", "grids", "prefix"),
    [
        ("nalaformer", [(10, 10), (5, 5), (5, 5)], 0),
        ("timm vit", [(3, 3)] * 2, 1),
        ("converted vit", [(3, 3)] * 2, 1),
        ("transformers vit", [(3, 3)] * 2, 1),
        ("language", [None, None], 0),
    ],
)
def test_tokens_lie_where_the_image_has_them(name, grids, prefix):
    model, inputs = looked_at(name)
    records = record(model, inputs)
    assert [found.grid for found in records] == grids
    assert {found.prefix for found in records} == {prefix}


@pytest.mark.parametrize(
    ("tokens", "image", "grid"),
    [(196, (224, 224), (14, 14)), (6, (32, 48), (2, 3)), (6, (48, 32), (3, 2)), (7, (64, 64), None), (0, (8, 8), None)],
)
def test_a_grid_has_the_proportions_of_the_image(tokens, image, grid):
    assert fit_grid(tokens, image) == grid


@pytest.mark.parametrize("name", ["nalaformer", "timm vit", "transformers vit", "language", "still"])
def test_recording_leaves_the_model_as_it_was(name):
    model, inputs = looked_at(name)
    model.eval()
    before = [(set(module.__dict__), len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    expected = call(model, inputs)
    model.train()
    record(model, inputs)
    assert all(module.training for module in model.modules())
    model.eval()
    after = [(set(module.__dict__), len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    assert after == before
    out, expected = (getattr(x, "logits", x) for x in (call(model, inputs), expected))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_eager_attention_of_transformers_is_seen_and_stays_eager():
    model = transformers_vit("eager")
    assert len(record(model, {"pixel_values": torch.randn(1, 3, 48, 48)})) == 2
    assert model.config._attn_implementation == "eager"


def test_unfused_attention_of_timm_is_seen_and_stays_unfused():
    model = timm_vit()
    for block in model.blocks:
        block.attn.fused_attn = False
    assert len(record(model, torch.randn(1, 3, 48, 48))) == 2
    assert not any(block.attn.fused_attn for block in model.blocks)


def test_only_the_chosen_layers_are_kept():
    model, images = looked_at("nalaformer")
    assert [found.name for found in record(model, images, ["stages.1.blocks.1.attention"])] == ["stages.1.blocks.1.attention"]
    with pytest.raises(ValueError, match=r"no attention layer 'blocks'; there are stages.0"):
        record(model, images, ["blocks"])


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="no attention layer"):
        record(torch.nn.Linear(2, 2), torch.zeros(1, 2))


class OwnAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qk = torch.nn.Linear(4, 8)

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        return (q @ k.mT).softmax(-1) @ x


def test_a_model_whose_layers_attend_by_their_own_code_is_refused():
    with pytest.raises(ValueError, match="no attention was seen: the layers attend by their own code"):
        record(torch.nn.Sequential(OwnAttention()), torch.randn(1, 3, 4))


def torchs_encoder(**options):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, **options)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_layer_is_recorded_with_both_masks_and_answers_as_before(batch_first):
    model = torchs_encoder(batch_first=batch_first)
    x = torch.randn(3, 5, 16)
    hidden = torch.arange(5).expand(3, -1) >= torch.tensor([[5], [3], [4]])
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    inputs = {"src": x if batch_first else x.transpose(0, 1), "mask": later, "src_key_padding_mask": hidden}
    expected = model(**inputs)
    with torch.no_grad(), Recorder(model, keep_values=True) as recorder:
        out = model(**inputs)
    torch.testing.assert_close(out, expected)
    assert [found.name for found in recorder.records] == ["layers.0.self_attn", "layers.1.self_attn"]
    rows = recorder.records[1].rows(torch.arange(5))
    assert rows.masked_select(later | hidden[:, None, None]).eq(0).all()
    torch.testing.assert_close(rows.sum(-1), torch.ones(3, 2, 5))


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 7}, {"bias": False}])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_weights_of_torchs_layer_are_those_that_it_returns(options, batch):
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, **options).eval()
    q, k, v = torch.randn(*batch, 3, 8), torch.randn(*batch, 5, layer.kdim), torch.randn(*batch, 5, layer.vdim)
    (out, weights), model = layer(q, k, v), torch.nn.ModuleList([layer])
    with torch.no_grad(), Recorder(model) as recorder:
        found = layer(q, k, v)
    torch.testing.assert_close(found, (out, weights))
    rows = recorder.records[0].rows(torch.arange(3)).mean(1)
    torch.testing.assert_close(rows if batch else rows[0], weights)


def test_a_rollout_counts_torchs_layers_beside_others():
    model = torchvision.models.VisionTransformer(48, 16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16).eval()
    model.encoder.layers[1] = timm_vit().blocks[0]
    records = record(model, torch.randn(1, 3, 48, 48))
    assert [found.name for found in records] == [
        "encoder.layers.encoder_layer_0.self_attention",
        "encoder.layers.encoder_layer_1.attn",
    ]
    assert rollout(records).shape == (1, 3, 3)


def test_torchs_layer_with_a_key_that_is_no_token_is_refused_by_name():
    model = torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2, add_bias_kv=True)])
    with pytest.raises(ValueError, match="recorded of keys that are tokens, got 0, a MultiheadAttention with bias_k"):
        record(model, torch.randn(1, 3, 8))


@pytest.mark.parametrize("queries", [torch.tensor([25]), torch.tensor([-1]), torch.tensor([0.5]), torch.tensor([[1]])])
def test_a_token_that_does_not_exist_is_refused(queries):
    model, images = looked_at("nalaformer")
    with pytest.raises(ValueError, match="from 0 to 24"):
        record(model, images)[-1].rows(queries)


# --- statistics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nalaformer", "mirrorla", "reduced keys", "swin", "timm vit"])
def test_statistics_are_those_of_all_pairs(name):
    model, images = looked_at(name)
    for found in record(model, images)[:2]:
        weights = dense(found).double()
        sizes = weights.abs()
        entropy = attention_entropy(sizes).movedim(1, 0).flatten(1)  # [H, B * N]
        where = found.windows
        q, k = (found.q, found.k)
        if where is not None:
            q, k = by_tokens(found, q), by_tokens(found, k)
        norms = q.double().norm(dim=-1).permute(2, 0, 1).flatten(1)
        key_norms = k.double().norm(dim=-1).permute(2, 0, 1).flatten(1)
        received = (sizes / sizes.sum(-1, keepdim=True)).sum(2).movedim(1, 0).flatten(1)
        for head, told in enumerate(found.statistics()):
            assert told.entropy == pytest.approx(entropy[head].mean().item(), rel=1e-4)
            drop = entropy_drop(norms[head], entropy[head]).item()
            assert told.entropy_drop == pytest.approx(drop, abs=1e-4)
            if abs(drop) > 0.03:
                assert told.spearman == pytest.approx(spearman(norms[head], entropy[head]).item(), abs=0.01)
            assert told.key_norm_correlation == pytest.approx(spearman(key_norms[head], received[head]).item(), abs=0.01)
            if where is None:
                assert told.smallest_weight == pytest.approx(weights[:, head].min().item(), abs=1e-6)
                assert told.effective_rank == pytest.approx(effective_rank(weights[:, head]).mean().item(), rel=2e-3)
            assert told.query_norm == pytest.approx(norms[head].mean().item(), rel=1e-5)
            assert told.query_norm_spread == pytest.approx(
                (norms[head].std(correction=0) / norms[head].mean()).item(), rel=1e-4
            )
            assert told.key_norm == pytest.approx(key_norms[head].mean().item(), rel=1e-5)
            assert math.fsum(told.entropies) / len(told.entropies) == pytest.approx(told.entropy, rel=0.05)
            assert list(told.norms) == sorted(told.norms)


def simple(feature_map, q, k, **options):
    phi = nalaformer.feature_map(feature_map, num_heads=q.shape[2], head_dim=q.shape[3], **options)
    return LinearRecord(name="layer", method=feature_map, q=q, k=k, feature_map=phi)


def test_denominators_are_sums_over_the_keys():
    q, k = torch.rand(2, 1, 9, 1, 4)
    found = simple("relu", q, k).statistics()[0]
    sums = torch.einsum("id,jd->i", q[0, :, 0], k[0, :, 0])
    assert found.log_denominators == pytest.approx((sums.min().log().item(), sums.max().log().item()), abs=1e-4)


def test_denominators_in_shifted_windows_are_sums_over_the_part_of_the_window_that_a_token_sees():
    layer = Attention(AttentionConfig(feature_map="relu", window=4, shifted=True), dim=8, num_heads=1)
    # 10 x 10: some parts of padded windows hold padding alone
    found = record(layer, (torch.randn(2, 100, 8), (10, 10)))[0]
    part, real = found.groups.of_tokens, found.key_mask
    sees = (part[:, :, None] == part[:, None]) & real[:, None]
    products = torch.einsum("pid,pjd->pij", found.q[:, :, 0].relu(), found.k[:, :, 0].relu())
    logs = ((products * sees).sum(-1) + 1e-6 * sees.sum(-1)).log()[real]
    assert found.statistics()[0].log_denominators == pytest.approx((logs.min().item(), logs.max().item()), abs=1e-4)


def test_denominators_of_softmax_are_sums_of_exponentials():
    found = record(timm_vit(), torch.randn(1, 3, 48, 48))[0]
    logits = found.scale * torch.einsum("ihd,jhd->hij", found.q[0], found.k[0])
    sums = logits.exp().sum(-1).log()[0]
    told = found.statistics()[0].log_denominators
    assert told == pytest.approx((sums.min().item(), sums.max().item()), abs=1e-4)


def test_half_of_random_products_are_lost_by_relu_and_none_by_polarity_or_elu():
    q, k = torch.randn(2, 1, 64, 2, 8, generator=torch.Generator().manual_seed(0))
    signs = (q[0, :, None] * k[0, None]).double()  # [N, N, H, D]
    expected = (signs.abs() * (signs < 0)).sum((0, 1, 3)) / signs.abs().sum((0, 1, 3))
    for name in ("relu", "split", "norm_aware", "focused"):
        told = [head.lost_products for head in simple(name, q, k).statistics()]
        assert told == pytest.approx(expected.tolist(), abs=1e-6), name
    for name in ("polarity", "elu", "hedgehog"):
        assert [head.lost_products for head in simple(name, q, k).statistics()] == [0, 0], name


def some_see(which):
    """Settings of a record of two rows of 24 tokens, and who sees whom in it: [B, N, N]."""
    everyone, tokens = torch.ones(2, 24, 24, dtype=torch.bool), torch.arange(24)
    mask = torch.stack((tokens < 17, tokens >= 5))
    if which == "padding":
        return {"key_mask": mask}, everyone & mask[:, None] & mask[:, :, None]
    if which == "groups":
        groups = (tokens >= 7).long() + (tokens >= 8).long()
        return {"groups": Groups(groups.expand(2, -1), range(3))}, everyone & (groups[:, None] == groups)
    blocks = tokens // 5
    causal = everyone & (blocks[:, None] >= blocks)
    return {"causal": True, "block": 5, "key_mask": mask}, causal & mask[:, None] & mask[:, :, None]


@pytest.mark.parametrize("which", ["padding", "groups", "causal blocks"])
def test_products_are_lost_among_tokens_that_see_each_other(which):
    q, k = torch.randn(2, 2, 24, 2, 8, generator=torch.Generator().manual_seed(0))
    settings, sees = some_see(which)
    products = (q[:, :, None] * k[:, None]).double() * sees[..., None, None]  # [B, N, N, H, D]
    expected = (products.abs() * (products < 0)).sum((0, 1, 2, 4)) / products.abs().sum((0, 1, 2, 4))
    if "key_mask" in settings:
        # whatever stands there
        q[~settings["key_mask"]] = k[~settings["key_mask"]] = 1e30
    told = [head.lost_products for head in replace(simple("relu", q, k), **settings).statistics()]
    assert told == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize("which", ["padding", "groups", "causal blocks"])
def test_the_smallest_weight_is_that_of_a_key_that_its_query_sees(which):
    settings, sees = some_see(which)
    found = replace(simple("elu", *torch.randn(2, 2, 24, 2, 4)), **settings)
    weights = found.rows(torch.arange(24)).double()
    expected = weights.masked_fill(~sees[:, None], torch.inf).amin((0, 2, 3))
    assert expected.min() > 0
    assert [head.smallest_weight for head in found.statistics()] == pytest.approx(expected.tolist(), rel=1e-6)


def test_keys_that_a_mask_of_numbers_hides_have_no_smallest_weight():
    q, k = torch.randn(2, 1, 5, 1, 4)
    bias = torch.zeros(1, 1, 5, 5)
    bias[..., 3:] = -100
    found = SoftmaxRecord(name="layer", method="softmax", q=q, k=k, scale=0.5, bias=bias)
    assert found.statistics()[0].smallest_weight == found.rows(torch.arange(5))[..., :3].min().item()


@pytest.mark.parametrize("which", ["padding", "causal blocks"])
def test_ranks_are_those_of_the_rows_of_tokens(which):
    q, k = torch.randn(2, 2, 24, 2, 8, generator=torch.Generator().manual_seed(0))
    settings, sees = some_see(which)
    weights = torch.einsum("bihd,bjhd->bhij", q.double().relu(), k.double().relu()) * sees[:, None]
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    told = [head.effective_rank for head in replace(simple("relu", q, k), **settings).statistics()]
    assert told == pytest.approx(effective_rank(weights).mean(0).tolist(), rel=1e-3)


@pytest.mark.parametrize("kind", ["softmax", "linear", "softmax windows", "softmax mixer", "linear mixer"])
def test_padding_is_no_token_in_the_figures_of_any_kind(kind):
    """Six tokens by themselves, and behind six that are hidden."""
    if "mixer" in kind:
        model, tokens = make(kind.split()[0]), text(1, 12)
        settings = {"attention_mask": torch.arange(12)[None] >= 6}
        alone, padded = ({"input_ids": tokens[:, 6:]}, {"input_ids": tokens, **settings})
    else:
        window = {"window": 12} if "windows" in kind else {}
        map_of = {"feature_map": "relu"} if kind == "linear" else {"feature_map": None}
        model = Attention(AttentionConfig(**map_of, **window), dim=16, num_heads=2).double()
        tokens, mask = torch.randn(1, 12, 16, dtype=torch.float64), torch.arange(12)[None] >= 6
        tokens[:, :6] *= 30
        alone, padded = {"x": tokens[:, 6:]}, {"x": tokens, "key_mask": mask}
    for first, second in zip(record(model, alone), record(model, padded), strict=True):
        for one, other in zip(first.statistics(), second.statistics(), strict=True):
            for name in ("entropy", "query_norm", "key_norm", "effective_rank", "log_denominators", "smallest_weight"):
                assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("mixer", ["linear", "forgetting"])
def test_tokens_after_a_cache_are_refused_where_a_state_holds_the_earlier_ones(mixer):
    model, tokens = make(mixer), text(1, 12)
    cache = model(tokens[:, :10], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="holds 10 tokens already; pass all tokens at once"):
        record(model, {"input_ids": tokens[:, 10:], "past_key_values": cache})


def test_the_cosine_direction_sees_opposite_signs_that_the_split_loses():
    q, k = torch.randn(2, 1, 16, 1, 64, generator=torch.Generator().manual_seed(0))
    lost = [simple("norm_aware", q, k, direction=name).statistics()[0].lost_products for name in ("split", "cosine")]
    assert lost[0] > 0.3
    assert lost[1] == 0


def test_rotary_in_the_numerator_alone_shows_as_negative_weight():
    images = torch.randn(1, 3, 40, 40)
    shares = []
    for normalised in (False, True):
        torch.manual_seed(0)
        model = pyramid(attention_options={"normalised_rotary": normalised})
        shares.append(record(model, images)[0].statistics()[0].negative_share)
    assert shares[0] > 0.01
    assert shares[1] == 0


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that a tensor had."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("stages", ["ll", "vv"])
def test_no_step_of_the_analysis_holds_all_pairs(stages):
    model = pyramid(attention_stages=stages, depths=(1, 1), img_size=144)
    tokens = 36 * 36
    with LargestTensor() as seen:
        found = record(model, torch.randn(1, 3, 144, 144), ["stages.0.blocks.0.attention"])[0]
        found.statistics()
        found.pull(torch.ones(1, tokens))
    assert found.num_tokens == tokens
    assert seen.most < tokens**2 / 2
