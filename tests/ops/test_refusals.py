"""Wrong types and values of every keyword. Each error says the rule, what came, and the way out.

test_errors.py has the tensors of a call; here are options, settings, states and files.
"""

import math
from dataclasses import fields

import numpy
import pytest
import torch
from safetensors.torch import save_file

import nalaformer
from nalaformer import LinearState, Rotary, linear_attention, published, recurrent_linear_attention, recurrent_step_
from nalaformer.attention import Attention, AttentionConfig, build
from nalaformer.attention.hybrid import HybridSettings, hybrid_settings
from nalaformer.data import Augmentation
from nalaformer.linearize import LinearizeConfig
from nalaformer.models.language import NaLaConfig
from nalaformer.models.vision import VARIANTS, BackboneConfig
from nalaformer.tasks import ClassificationConfig, LanguageConfig
from nalaformer.training import TrainingConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def attend(**changes):
    """A call that works, but for the changes: 2 samples, 7 tokens, 4 heads of 8 channels."""
    made = {name: torch.randn(2, 7, 4, 8) for name in ("q", "k", "v")}
    made |= {"feature_map": nalaformer.feature_map("norm_aware", num_heads=4, head_dim=8)}
    return linear_attention(**(made | changes))


def go_on(state, dtype=torch.float32, tokens=7):
    q = torch.randn(2, tokens, 4, 8, dtype=dtype)
    feature_map = nalaformer.feature_map("norm_aware", num_heads=4, head_dim=8)
    if tokens == 1:
        return recurrent_step_(state, q, q, q, feature_map=feature_map)
    return recurrent_linear_attention(q, q, q, feature_map=feature_map, state=state)


def delta(**changes):
    x = torch.randn(2, 7, 4, 8)
    return nalaformer.delta_rule(**({"q": x, "k": x, "v": x, "beta": x[..., 0].sigmoid()} | changes))


def layer(method="nalaformer", **options):
    return build(method, dim=16, num_heads=2, **options)


def feature_map(name, **options):
    return nalaformer.feature_map(name, **({"num_heads": 4, "head_dim": 8} | options))


def state(dtype=torch.float32, features=16):
    return LinearState.empty(2, 4, features, 8, dtype=dtype)


X = torch.randn(2, 7, 16)
PLAIN, NORMALISED = Rotary.sequence(7, 8), Rotary.sequence(7, 8, normalised=True)
CASES = {
    # the op
    "causal=no": (lambda: attend(causal="no"), "causal must be True or False, got 'no'"),
    "causal=1": (lambda: attend(causal=1), "causal must be True or False, got 1"),
    "eps=inf": (lambda: attend(eps=math.inf), "eps must be a finite number >= 0, got inf; the default is 1e-6"),
    "eps=text": (lambda: attend(eps="small"), "eps must be a finite number >= 0, got 'small'"),
    "eps=None": (lambda: attend(eps=None), "eps must be a finite number >= 0, got None"),
    "key_mask=list": (lambda: attend(key_mask=[[True] * 7] * 2), r"key_mask must be a torch tensor, got list; .*as_tensor"),
    "key_mask=array": (lambda: attend(key_mask=numpy.ones((2, 7), bool)), "key_mask must be a torch tensor, got ndarray"),
    "map's class": (
        lambda: attend(feature_map=nalaformer.feature_maps.NormAware),
        r"feature_map must be a FeatureMap, got the class NormAware itself; make one with nalaformer.feature_map\(",
    ),
    "normalised q alone": (lambda: attend(rotary=(NORMALISED, None)), "normalised=True for q and False for k; make both"),
    "normalised k alone": (lambda: attend(rotary=(PLAIN, NORMALISED)), "normalised=False for q and True for k; make both"),
    "rotaries of two sizes": (lambda: attend(rotary=(PLAIN, Rotary.sequence(7, 4))), "rotate as many channels, got 8 and 4"),
    "heads before tokens": (
        lambda: attend(**{name: torch.randn(2, 4, 7, 8) for name in ("q", "k", "v")}),
        r"made for 4 heads, got 7 .*, or transpose\(1, 2\) tensors that are \[batch, heads, tokens, channels\]",
    ),
    "packed eps": (
        lambda: attend(**{n: torch.randn(8, 4, 8) for n in "qkv"}, cu_seqlens=torch.tensor([0, 8]), eps=-1.0),
        "eps must be a finite number >= 0, got -1.0",
    ),
    "packed list": (
        lambda: attend(q=[1.0], k=torch.randn(8, 4, 8), v=torch.randn(8, 4, 8), cu_seqlens=torch.tensor([0, 8])),
        "q must be a torch tensor, got list",
    ),
    "packed rotary of three": (
        lambda: attend(**{n: torch.randn(7, 4, 8) for n in "qkv"}, cu_seqlens=torch.tensor([0, 7]), rotary=(PLAIN,) * 3),
        "one Rotary or a pair",
    ),
    "rows=0.5": (
        lambda: nalaformer.attention_weights(
            torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2, 4), feature_map=map_of_2(), rows=[0.5]
        ),
        r"rows must be a list of query numbers from 0 to 2, got \[0.5\]",
    ),
    "stream=text": (
        lambda: nalaformer.attention_weights(
            torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2, 4), feature_map=map_of_2(), stream="a"
        ),
        "stream must be below .*, got 'a'",
    ),
    "backend=list": (lambda: nalaformer.set_backend([]), r"unknown backend \[\]; known: auto"),
    # states
    "float64 tokens": (
        lambda: go_on(state(), torch.float64),
        r"summed \(torch.float64\), got torch.float32; convert the tokens, or start from LinearState.empty\(",
    ),
    "float64 step": (lambda: go_on(state(), torch.float64, tokens=1), r"summed \(torch.float64\), got torch.float32"),
    "float64 state": (lambda: go_on(state(torch.float64)), r"summed \(torch.float32\), got torch.float64"),
    "tuple as state": (lambda: go_on((1, 2)), "the state must be a LinearState, got tuple; use the one that"),
    "no state for a step": (lambda: go_on(None, tokens=1), "a step changes a state, got None; start from LinearState.empty"),
    "no states to join": (lambda: LinearState.cat([]), "at least one, got none"),
    "states of two layers": (lambda: LinearState.cat([state(), state(features=8)]), r"got \(2, 4, 16, 8\) and \(2, 4, 8, 8\)"),
    # rotary positions
    "base=0": (lambda: Rotary.sequence(7, 8, base=0), "base of a rotary must be positive and finite, got 0; 10000"),
    "base=nan": (lambda: Rotary.grid(2, 3, 8, base=math.nan), "base of a rotary must be positive and finite, got nan"),
    "base=text": (lambda: Rotary.sequence(7, 8, base="a"), "base of a rotary must be positive and finite, got 'a'"),
    "dim=0": (lambda: Rotary.sequence(7, 0), "even number of channels, got 0; choose an even head_dim"),
    "dim=8.0": (lambda: Rotary.grid(2, 3, 8.0), "channels in multiples of 4, got 8.0"),
    "num_tokens=-1": (lambda: Rotary.sequence(-1, 8), "num_tokens must be a whole number, at least 0, got -1"),
    "width=text": (lambda: Rotary.grid(2, "3", 8), "width must be a whole number, at least 0, got '3'"),
    "start=text": (lambda: Rotary.sequence(7, 8, start="a"), "start must be a whole number, at least 0, got 'a'"),
    "normalised=no": (lambda: Rotary.sequence(7, 8, normalised="no"), "normalised must be True or False, got 'no'"),
    "positions=list": (lambda: Rotary([[0]], torch.ones(1)), "rotary positions must be a torch tensor, got list"),
    "frequencies=square": (lambda: Rotary(torch.zeros(7, 1), torch.ones(2, 2)), r"must be \[pairs\], got shape \(2, 2\)"),
    "packed=list": (lambda: Rotary.packed([0, 3], 8), r"cu_seqlens must be a tensor of integers .*, got list"),
    # feature maps
    "alpha=0": (lambda: feature_map("norm_aware", alpha=0.0), "alpha must be a finite number above 0, .*, got 0.0"),
    "alpha=-1": (lambda: feature_map("norm_aware", alpha=-1, direction="cosine"), "alpha must be .* above 0, .*, got -1"),
    "lambda=nan": (lambda: feature_map("norm_aware", lambda_=math.nan), "lambda_ must be a finite number above 0, .*, got nan"),
    "tau=text": (lambda: feature_map("norm_aware", tau="a"), "tau must be a finite number above 0, .*, got 'a'"),
    "norm_scale=nan": (lambda: feature_map("norm_aware", norm_scale=math.nan), "norm_scale must be a finite .*, got nan"),
    "key_power=inf": (lambda: feature_map("norm_aware", key_power=math.inf), "key_power must be a finite number .*, got inf"),
    "learnable=no": (lambda: feature_map("norm_aware", learnable="no"), "learnable must be True or False, got 'no'"),
    "polarity's alpha": (
        lambda: feature_map("polarity", alpha=math.nan),
        "alpha must be a finite number at least 0, .*, got nan",
    ),
    "power=inf": (lambda: feature_map("focused", power=math.inf), "power must be a finite number at least 1, .*, got inf"),
    "variance=no": (lambda: feature_map("reflection", variance="no"), "variance must be True or False, got 'no'"),
    "num_heads=4.0": (lambda: feature_map("relu", num_heads=4.0), "positive whole numbers, got 4.0 and 8"),
    "map=list": (lambda: feature_map([]), r"unknown feature map \[\]; known: channel_softmax, elu"),
    # layers
    "grid=12": (lambda: layer()(X, 12), r"grid must be \(height, width\), two positive whole numbers, got 12"),
    "grid=floats": (lambda: layer()(X, (1.0, 7.0)), r"two positive whole numbers, got \(1.0, 7.0\)"),
    "x=list": (lambda: layer()([1.0]), "x must be a torch tensor, got list"),
    "x=integers": (lambda: layer()(X.long()), r"x must hold floats, got torch.int64; convert it with .float\(\)"),
    "layer's key_mask": (lambda: layer()(X, key_mask=[[True] * 7] * 2), "key_mask must be a torch tensor, got list"),
    "groups=list": (lambda: layer()(X, groups=[[0] * 7] * 2), "groups must be a torch tensor, got list"),
    "table_grid=7": (
        lambda: layer("flatten", table_grid=7),
        r"table_grid must be \(a whole .*, got 7; the default is \(14, 14\)",
    ),
    "table_grid=(0, 7)": (lambda: layer("flatten", table_grid=(0, 7)), r"table_grid must be .* positive, got \(0, 7\)"),
    "window=-3": (
        lambda: layer("softmax", window=-3),
        "window must be the side of a window .*, or 0 for none, got -3; Swin has 7",
    ),
    "relative and linear": (
        lambda: layer("linear", position="relative"),
        'position="relative" needs the weight of each pair, got the linear relu map; use feature_map=None, or another position',
    ),
    "map_options=list": (lambda: layer("linear", map_options=[1]), r"map_options must be a dictionary, .*, got \[1\]"),
    "dim=text": (lambda: build("linear", dim="16", num_heads=2), "positive multiple of num_heads, got dim '16' and 2 heads"),
    "method=list": (lambda: build([], dim=16, num_heads=2), r"unknown attention \[\]; known: flatten"),
    "config=name": (
        lambda: Attention("linear", dim=16, num_heads=2),
        "must be an AttentionConfig, got 'linear'; attention.build",
    ),
    # the delta rule
    "delta of integers": (lambda: delta(q=torch.ones(2, 7, 4, 8).long()), "q must hold floats, got torch.int64"),
    "delta of lists": (lambda: delta(k=[1.0]), "k must be a torch tensor, got list"),
    "delta without beta": (lambda: delta(beta=None), "beta must be a torch tensor, got NoneType"),
    "delta on two devices": (lambda: delta(v=torch.ones(2, 7, 4, 8, device="meta")), "got q on cpu and v on meta; move it"),
    "scale=nan": (lambda: delta(scale=math.nan), r"scale must be a finite number, got nan; the default is 1/sqrt\(features\)"),
    "scale=text": (lambda: delta(scale="a"), "scale must be a finite number, got 'a'"),
    # settings
    "seed=-1": (lambda: TrainingConfig(steps=1, seed=-1), "seed must not be negative, got -1"),
    "steps=-1": (lambda: TrainingConfig(epochs=1, steps=-1), "steps must not be negative, got -1"),
    "steps=-5": (lambda: TrainingConfig(steps=-5), "steps must not be negative, got -5"),
    "beta2=1": (lambda: TrainingConfig(steps=1, beta2=1.0), "beta2 must be at least 0 and below 1, got 1.0"),
    "data_seed=-1": (lambda: LanguageConfig(data="tales", data_seed=-1), "data_seed must not be negative, got -1"),
    "hybrid's misspelling": (lambda: hybrid_settings(chunk_siz=8), "unknown setting 'chunk_siz'; did you mean 'chunk_size'"),
    "hybrid's map": (lambda: HybridSettings(feature_map="relo"), "unknown feature map 'relo'; did you mean 'relu'"),
    "hybrid's streams": (lambda: HybridSettings(feature_map="polarity"), "must have one stream, got 'polarity'"),
    "hybrid's map option": (
        lambda: HybridSettings(map_options={"a": 1}),
        "unknown option of norm_preserving: 'a'; known: none",
    ),
    "no heads": (lambda: NaLaConfig(num_attention_heads=0), "num_attention_heads must be a positive whole number, got 0"),
    "convert a name": (lambda: nalaformer.convert("vit"), r"model must be a torch module, got str; timm.create_model"),
    "only=[": (lambda: nalaformer.convert(torch.nn.Identity(), only="["), r"only must be a regular expression .*, got '\['"),
}


def map_of_2():
    return nalaformer.feature_map("relu", num_heads=2, head_dim=4)


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_argument_is_refused_with_rule_and_value(case):
    call, message = CASES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# --- settings have the types of their fields ------------------------------------------------------------------------------

STARTS = {
    AttentionConfig: {"feature_map": None},
    HybridSettings: {},
    TrainingConfig: {"steps": 1},
    LinearizeConfig: {},
    ClassificationConfig: {"data": "cue_grid"},
    LanguageConfig: {"data": "tales"},
    Augmentation: {},
    BackboneConfig: {f.name: getattr(VARIANTS["nalaformer_xt"].config, f.name) for f in fields(BackboneConfig)},
}
WRONG = {bool: "no", int: 2.5, float: math.nan, str: 7, dict: [1]}
FIELDS = [(kind, field.name, field.type) for kind in STARTS for field in fields(kind) if field.type in WRONG]


@pytest.mark.parametrize(("kind", "name", "holds"), FIELDS, ids=[f"{kind.__name__}.{name}" for kind, name, _ in FIELDS])
def test_a_setting_of_another_type_is_refused_by_name(kind, name, holds):
    with pytest.raises(ValueError, match=rf"{name}\b.* {WRONG[holds]!r}"):
        kind(**(STARTS[kind] | {name: WRONG[holds]}))


@pytest.mark.parametrize("kind", STARTS, ids=lambda kind: kind.__name__)
def test_the_settings_that_the_errors_start_from_work(kind):
    assert isinstance(kind(**STARTS[kind]), kind)


def test_numpy_numbers_and_lists_pass_for_numbers_and_tuples():
    made = AttentionConfig(feature_map=None, window=numpy.int64(7), table_grid=[3, 4])
    assert (made.window, tuple(made.table_grid)) == (7, (3, 4))
    assert TrainingConfig(steps=1, learning_rate=numpy.float32(0.5), epsilon=1).epsilon == 1


# --- files ----------------------------------------------------------------------------------------------------------------


def test_another_file_is_no_state(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    message = "that LinearState.save wrote, with state, key_sum, count, log_scale, got weight in .*a.safetensors"
    with pytest.raises(ValueError, match=message):
        LinearState.load(tmp_path / "a.safetensors")


def test_a_damaged_file_is_no_state(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"damaged" * 9)
    with pytest.raises(ValueError, match=r"a whole file that LinearState.save wrote, got .*a.safetensors: "):
        LinearState.load(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("names", "what"),
    [(("foo.bar",), "layer"), (("patch_embed.proj.0.weight", "foo.bar"), "model"), (("qkv.weight", "ema.decay"), "layer")],
)
@pytest.mark.parametrize("family", published.FAMILIES)
def test_names_that_no_published_model_has_are_not_passed_on(family, names, what):
    weights = {name: torch.zeros(3, 3, 3, 3) for name in names}
    with pytest.raises(ValueError, match=rf"one of a published {family} {what}, got \d others: .*{names[-1]}"):
        published.translate(weights, family)
