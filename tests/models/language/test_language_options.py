"""Every option of a language model, of writing with it and of scoring text has the effect that its documentation says."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from helpers.attention_formula import Turning, formula
from helpers.option_effects import Effects, options_of_command
from nalaformer import cli, feature_map
from nalaformer.models.language import NaLaCache, NaLaConfig, NaLaForCausalLM, NaLaForSequenceClassification
from nalaformer.models.language.config import RECURRENT_MIXERS

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = Effects(NaLaConfig.__annotations__)
GENERATE = Effects(options_of_command("generate", "text"))
EVALUATE = Effects(options_of_command("eval", "language"))
# one block whose heads, widths and sizes all differ
SIZES = {"vocab_size": 23, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}


def make(dtype: torch.dtype = torch.float64, **changes) -> NaLaForCausalLM:
    """Small, with weights away from their start."""
    torch.manual_seed(1)
    model = NaLaForCausalLM(NaLaConfig(**(SIZES | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def text(*shape: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], shape)


# --- a whole model written out ------------------------------------------------------------------------------------------


def by_hand(model: NaLaForCausalLM, tokens: Tensor) -> Tensor:
    """Logits of a model of one or more blocks, from its weights and its config alone."""
    config, parts = model.config, model.state_dict()
    x = parts["model.embed_tokens.weight"][tokens]
    for number, mixer in enumerate(config.layer_mixers):
        layer = {name.split(".", 3)[3]: value for name, value in parts.items() if name.startswith(f"model.layers.{number}.")}
        y = rms(x, layer["mixer_norm.weight"], config)
        x = x + (softmax_mixer if mixer == "softmax" else recurrent_mixer)(y, layer, config, mixer)
        y = rms(x, layer["mlp_norm.weight"], config)
        inner = F.silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
        x = x + inner @ layer["mlp.down_proj.weight"].T
    return rms(x, parts["model.norm.weight"], config) @ parts["lm_head.weight"].T


def rms(x: Tensor, weight: Tensor, config: NaLaConfig) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight


def projected(y: Tensor, layer: dict[str, Tensor], config: NaLaConfig, key_heads: int) -> list[Tensor]:
    """q, k, v [B, N, heads, D], after the short convolution where there is one."""
    qkv = y @ layer["mixer.qkv_proj.weight"].T
    weight = layer.get("mixer.convolution.weight")
    if weight is not None:
        assert weight.shape[1] == config.short_convolution
        earlier = [F.pad(qkv, (0, 0, back, 0))[:, : qkv.shape[1]] for back in range(config.short_convolution)]
        qkv = sum(part * weight[:, back] for back, part in enumerate(earlier))
    sizes = [heads * config.head_dim for heads in (config.num_attention_heads, key_heads, key_heads)]
    return [part.unflatten(-1, (-1, config.head_dim)) for part in qkv.split(sizes, -1)]


def turned(x: Tensor, config: NaLaConfig) -> Tensor:
    """Rotary positions from 0: channel pair i as a complex number times exp(i n base^(-2i / D)), D the channels that turn."""
    dim, settings = x.shape[-1], config.rope_parameters
    turning = int(dim * settings["partial_rotary_factor"])
    speeds = torch.zeros(dim // 2).double()
    speeds[: turning // 2] = config.rotary_base ** (-torch.arange(turning // 2).double() * 2 / turning)
    angles = torch.arange(x.shape[1]).double()[:, None] * speeds / settings.get("factor", 1.0)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.exp(1j * angles)[:, None]
    return torch.view_as_real(pairs).flatten(-2)


def softmax_mixer(y: Tensor, layer: dict[str, Tensor], config: NaLaConfig, _: str) -> Tensor:
    sizes = [heads * config.head_dim for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    q, k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in (y @ layer["mixer.qkv_proj.weight"].T).split(sizes, -1))
    q, k = turned(q, config), turned(k, config)
    k, v = (part.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, 2) for part in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / config.head_dim**0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)
    return out @ layer["mixer.o_proj.weight"].T


def recurrent_mixer(y: Tensor, layer: dict[str, Tensor], config: NaLaConfig, mixer: str) -> Tensor:
    heads, dim = config.num_attention_heads, config.head_dim
    phi = feature_map(config.feature_map, num_heads=heads, head_dim=dim, **config.map_options).double()
    phi.load_state_dict({name.removeprefix("mixer.map."): x for name, x in layer.items() if name.startswith("mixer.map.")})
    if mixer in ("linear", "forgetting"):
        q, k, v = projected(y, layer, config, config.num_key_value_heads)
        positions = torch.arange(y.shape[1])[:, None]
        turning = Turning(positions, positions, dim=dim, inclusive=False) if config.linear_rotary else None
        assert config.rotary_base == 10000.0 or turning is None
        if mixer == "linear":
            out = formula(phi, q, k, v, causal=True, turning=turning)
        else:
            out = forgetting_by_hand(phi, q, k, v, log_decay_by_hand(y, layer), turning)
        if config.contrast == "learned":
            out = contrasted_by_hand(out, q, v, log_decay_by_hand(y, layer) if mixer == "forgetting" else None, layer)
    else:
        q, k, v = projected(y, layer, config, heads)
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-12).sqrt() for x in (phi.query(q), phi.key(k)))
        out = delta_by_hand(q, k, F.silu(v), y, layer, gated=mixer == "gated_delta")
    out = rms(out, layer["mixer.norm.weight"], config).flatten(2)
    return (out * F.silu(y @ layer["mixer.g_proj.weight"].T)) @ layer["mixer.o_proj.weight"].T


def log_decay_by_hand(y: Tensor, layer: dict[str, Tensor]) -> Tensor:
    return -layer["mixer.A_log"].exp() * (1 + (y @ layer["mixer.a_proj.weight"].T + layer["mixer.dt_bias"]).exp()).log()


def forgetting_by_hand(phi, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, turning: Turning | None) -> Tensor:
    """out_i = sum_j a_ij rot(phi_q(q_i)).rot(phi_k(k_j)) v_j / (sum_j a_ij phi_q(q_i).phi_k(k_j) + eps), pair by pair.

    a_ij = exp(sum of log_decay from j + 1 to i), j up to i; log_decay [B, N, K] is that of key heads.
    """
    k, v, log_decay = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v, log_decay))
    phi_q, phi_k = phi.query(q), phi.key(k)
    turned_q, turned_k = phi_q, phi_k
    if turning is not None:
        turned_q, turned_k = turning.features(phi_q, turning.of_q), turning.features(phi_k, turning.of_k)
    outputs = []
    for i in range(q.shape[1]):
        above, below = torch.zeros_like(v[:, i]), torch.full_like(v[:, i, :, :1], 1e-6)
        for j in range(i + 1):
            left = log_decay[:, j + 1 : i + 1].sum(1).exp()[..., None]
            above = above + left * (turned_q[:, i] * turned_k[:, j]).sum(-1, keepdim=True) * v[:, j]
            below = below + left * (phi_q[:, i] * phi_k[:, j]).sum(-1, keepdim=True)
        outputs.append(above / below)
    return torch.stack(outputs, 1)


def contrasted_by_hand(out: Tensor, q: Tensor, v: Tensor, log_decay: Tensor | None, layer: dict[str, Tensor]) -> Tensor:
    """out_i + z_i (out_i - mean_i), z = log(1 + exp(a + b |q| / sqrt D)), mean_i = sum_j a_ij v_j / sum_j a_ij."""
    log_decay = torch.zeros_like(v[..., 0]) if log_decay is None else log_decay
    v, log_decay = (x.repeat_interleave(q.shape[2] // v.shape[2], 2) for x in (v, log_decay))
    size = q.square().mean(-1).sqrt()
    strength = (1 + (layer["mixer.contrast.offset"] + layer["mixer.contrast.slope"] * size).exp()).log()
    means = []
    for i in range(q.shape[1]):
        left = torch.stack([log_decay[:, j + 1 : i + 1].sum(1).exp() for j in range(i + 1)], 1)[..., None]
        means.append((left * v[:, : i + 1]).sum(1) / left.sum(1))
    return out + strength[..., None] * (out - torch.stack(means, 1))


def delta_by_hand(q: Tensor, k: Tensor, v: Tensor, y: Tensor, layer: dict[str, Tensor], *, gated: bool) -> Tensor:
    """S <- a S + beta k (v - (a S)^T k)^T;  out = S^T q / sqrt(F), token by token."""
    beta = (y @ layer["mixer.b_proj.weight"].T).sigmoid()
    decay = torch.ones_like(beta)
    if gated:
        decay = log_decay_by_hand(y, layer).exp()
    state, outputs = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
    for n in range(q.shape[1]):
        state = state * decay[:, n, :, None, None]
        wrong = v[:, n] - torch.einsum("bhf,bhfv->bhv", k[:, n], state)
        state = state + beta[:, n, :, None, None] * torch.einsum("bhf,bhv->bhfv", k[:, n], wrong)
        outputs.append(torch.einsum("bhf,bhfv->bhv", q[:, n], state))
    return torch.stack(outputs, 1) / q.shape[-1] ** 0.5


@CONFIG.of(
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "mixers", "feature_map", "map_options", "short_convolution", "linear_rotary", "rotary_base"),
    *("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "contrast"),
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vocab_size": 31, "hidden_size": 8, "intermediate_size": 9, "num_hidden_layers": 2},
        {"num_attention_heads": 3, "head_dim": 6},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
        {"mixers": "softmax", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
        {"mixers": "softmax", "rotary_base": 50.0},
        {"mixers": "softmax", "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.67}},
        {"mixers": "softmax", "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
        {"mixers": "delta"},
        {"mixers": "gated_delta"},
        {"mixers": "forgetting"},
        {"mixers": "forgetting", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "linear_rotary": True},
        {"mixers": ["delta", "softmax", "linear"], "num_hidden_layers": 3},
        {"mixers": ["forgetting", "softmax", "linear"], "num_hidden_layers": 3},
        {"contrast": "learned", "feature_map": "channel_softmax"},
        {"contrast": "learned", "mixers": ["forgetting", "delta", "linear"], "num_hidden_layers": 3},
        {"contrast": "learned", "mixers": "forgetting", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
        {"feature_map": "focused", "map_options": {"power": 2.0}},
        {"map_options": {"lambda_": 2.0, "tau": 0.9}},
        {"mixers": "delta", "feature_map": "elu"},
        {"short_convolution": 0},
        {"short_convolution": 2},
        {"linear_rotary": True},
        {"rms_norm_eps": 0.3},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_model_is_its_formula_whatever_its_settings(changes):
    model, tokens = make(**changes), text(2, 9)
    logits = model(tokens).logits
    assert logits.shape == (2, 9, changes.get("vocab_size", 23))
    expected = by_hand(model, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=1e-9, atol=1e-9)
    assert len(model.model.layers) == changes.get("num_hidden_layers", 1)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied == changes.get("tie_word_embeddings", True)


@CONFIG.of("contrast_offset")
def test_a_contrast_starts_where_its_offset_says(tmp_path):
    for offset in (0.0, -0.75):
        model = NaLaForCausalLM(NaLaConfig.from_size("nano", contrast="learned", contrast_offset=offset, vocab_size=23))
        for layer in model.model.layers:
            assert layer.mixer.contrast.offset.tolist() == [offset] * 2
            assert layer.mixer.contrast.slope.tolist() == [1.0] * 2
    # a model without one goes on with it
    NaLaForCausalLM(NaLaConfig.from_size("nano", vocab_size=23)).save_pretrained(tmp_path)
    loaded = NaLaForCausalLM.from_pretrained(tmp_path, contrast="learned", contrast_offset=-3.0)
    assert loaded.model.layers[1].mixer.contrast.offset.tolist() == [-3.0] * 2


def test_the_file_of_a_cache_knows_whether_its_model_has_a_contrast(tmp_path):
    plain, contrasted = (NaLaConfig.from_size("nano", contrast=contrast, vocab_size=23) for contrast in ("none", "learned"))
    NaLaCache(contrasted).save(tmp_path / "one.safetensors")
    assert NaLaCache.load(tmp_path / "one.safetensors", contrasted).kind["contrast"] == "learned"
    with pytest.raises(ValueError, match="a model with the same mixers and feature map"):
        NaLaCache.load(tmp_path / "one.safetensors", plain)
    # as files of older versions, which know of none
    assert "contrast" not in NaLaCache(plain).kind


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"contrast": "mean_score"}, "unknown contrast"),
        ({"contrast_offset": -1.0}, "contrast_offset is where a learned contrast starts, got -1.0 with contrast='none'"),
        ({"contrast": "learned", "mixers": "delta"}, "a contrast is a part of `linear` and `forgetting` mixers, got 'learned'"),
    ],
)
def test_a_contrast_that_would_do_nothing_is_refused(settings, said):
    with pytest.raises((ValueError, KeyError), match=said):
        NaLaConfig.from_size("nano", **settings)


@CONFIG.of("rotary_base", "linear_rotary")
@torch.no_grad()
def test_the_base_turns_linear_mixers_only_where_rotary_is_on():
    tokens = text(2, 9)
    for linear_rotary in (False, True):
        logits = [make(linear_rotary=linear_rotary, rotary_base=base)(tokens).logits for base in (10.0, 10000.0)]
        assert torch.equal(*logits) != linear_rotary


def test_every_setting_of_a_language_model_is_seen_to():
    assert CONFIG.missing() == []


@CONFIG.of("initializer_range")
@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_new_weights_have_the_spread_that_is_asked_for(spread):
    model = NaLaForCausalLM(NaLaConfig(**(SIZES | {"hidden_size": 64}), initializer_range=spread))
    for weight in (model.model.embed_tokens.weight, model.model.layers[0].mixer.qkv_proj.weight, model.lm_head.weight):
        assert weight.std().item() == pytest.approx(spread, rel=0.1)


@CONFIG.of("logits_in_training")
def test_logits_come_beside_the_loss_of_training_where_the_config_says_so():
    model, tokens = make(), text(2, 9)
    outcomes = []
    for is_training, wants_logits in ((False, False), (True, True), (True, False)):
        model.train(is_training)
        model.config.logits_in_training = wants_logits
        outcomes.append(model(tokens, labels=tokens))
    evaluated, with_logits, without = outcomes
    assert without.logits is None
    torch.testing.assert_close(with_logits.logits, evaluated.logits)
    # transformers' own loss computes in float32
    for out in outcomes:
        torch.testing.assert_close(out.loss.double(), evaluated.loss.double(), rtol=1e-5, atol=0)


@CONFIG.of("use_cache")
@torch.no_grad()
def test_a_cache_is_returned_where_the_config_says_so_and_never_in_training():
    for use_cache in (False, True):
        model = make(use_cache=use_cache)
        assert isinstance(model(text(1, 3)).past_key_values, NaLaCache) == use_cache
        assert model.train()(text(1, 3)).past_key_values is None
        assert isinstance(model(text(1, 3), use_cache=True).past_key_values, NaLaCache)


@CONFIG.of("pad_token_id")
def test_padding_is_embedded_as_zero_and_does_not_decide_a_class():
    assert not NaLaForCausalLM(NaLaConfig(**SIZES, pad_token_id=5)).model.embed_tokens.weight[5].any()
    model = NaLaForSequenceClassification(NaLaConfig(**SIZES, pad_token_id=5, num_labels=3)).double().eval()
    row = torch.tensor([[1, 2, 3, 5, 5]])
    torch.testing.assert_close(model(row).logits, model(row[:, :3]).logits)
    model.config.pad_token_id = None
    assert not torch.allclose(model(row).logits, model(row[:, :3]).logits)


@CONFIG.of("bos_token_id", "eos_token_id")
def test_generation_begins_and_ends_with_the_tokens_of_the_config():
    free = make(bos_token_id=3, pad_token_id=0)
    written = free.generate(max_new_tokens=8, do_sample=False)[0].tolist()
    assert written[0] == 3
    assert len(written) == 9
    stop = written[4]
    ended = make(bos_token_id=3, pad_token_id=0, eos_token_id=stop).generate(max_new_tokens=8, do_sample=False)[0].tolist()
    assert ended == written[: written.index(stop, 1) + 1]


# --- tokens of a call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixers", RECURRENT_MIXERS)
@torch.no_grad()
def test_a_single_padded_token_changes_no_state(mixers):
    model, tokens = make(mixers=mixers, short_convolution=3), text(2, 8)
    mask = torch.ones(2, 8, dtype=torch.int64)
    # the first row pauses twice while the second goes on, one token a call
    mask[0, 4:6] = 0
    cache = NaLaCache(model.config)
    parts = [model(tokens[:, :4], past_key_values=cache).logits]
    for n in range(4, 8):
        parts.append(model(tokens[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=cache).logits)
    logits = torch.cat(parts, 1)
    for row in range(2):
        alone = model(tokens[row : row + 1, mask[row] == 1]).logits[0]
        torch.testing.assert_close(logits[row, mask[row] == 1], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("mixers", ["linear", "softmax"])
@torch.no_grad()
def test_positions_of_padding_begin_no_new_sequence(mixers, padding):
    """Collators give padding position 0 or 1; only a real token at 0 inside a row begins another one."""
    model, tokens = make(mixers=mixers, linear_rotary=True, head_dim=4), text(2, 8)
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    places = torch.where(mask == 1, torch.arange(8), padding)
    logits = model(tokens, attention_mask=mask, position_ids=places).logits
    torch.testing.assert_close(logits[1, :5], model(tokens[1:, :5]).logits[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(logits[0], model(tokens[:1]).logits[0], rtol=0, atol=1e-10)


# --- the command that writes --------------------------------------------------------------------------------------------

WORDS = [*(f"w{number}" for number in range(79)), "."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 80 words, its folder asking for more than the command does, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("writer")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=".", bos_token="w0").save_pretrained(path)
    model = make(torch.float32, vocab_size=80, max_position_embeddings=64)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.top_k = 1
    model.generation_config.do_sample = True
    model.save_pretrained(path)
    return path


@pytest.fixture
def write(folder):
    def write(*options: object, prompt: str = "w1 w2") -> list[str]:
        arguments = ["generate", "text", "--model", folder, "--prompt", prompt, "--device", "cpu", *options]
        done = CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        written, _, about = done.output.strip().rpartition("\n")
        assert re.fullmatch(r"\d+ tokens, [\d.e+]+ tokens/s on cpu, cache [\d.e-]+ MiB", about)
        return written.split()

    return write


def likeliest(folder, prompt: list[int], number: int) -> list[str]:
    """The next words by the model's own logits, up to the one that ends a text and without the one that begins it."""
    model, tokens = AutoModelForCausalLM.from_pretrained(folder), list(prompt)
    for _ in range(number):
        with torch.no_grad():
            tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
        if WORDS[tokens[-1]] == ".":
            break
    return [WORDS[token] for token in tokens if WORDS[token] not in ("w0", ".")]


def test_every_option_of_the_command_that_writes_is_seen_to():
    assert GENERATE.missing() == []


@GENERATE.of("model", "prompt", "max_new_tokens", "device")
def test_the_likeliest_words_follow_the_prompt_whatever_the_folder_asks_for(write, folder):
    expected = likeliest(folder, [1, 2], 12)
    # the second time a word comes, a penalty would turn to another
    assert len(set(expected)) < len(expected)
    assert write("--max-new-tokens", 12) == expected
    assert write("--max-new-tokens", 3) == likeliest(folder, [1, 2], 3)
    assert write("--max-new-tokens", 3, prompt="w7") == likeliest(folder, [7], 3)


@GENERATE.of("temperature", "top_p", "seed")
def test_drawing_narrows_to_the_likeliest_words(write, folder):
    expected = likeliest(folder, [1, 2], 12)
    drawn = ("--max-new-tokens", 12, "--seed", 3)
    assert write(*drawn, "--temperature", 50) != expected
    assert write(*drawn, "--temperature", 0.001) == expected
    assert write(*drawn, "--temperature", 50, "--top-p", 0.001) == expected
    assert write(*drawn, "--temperature", 50) == write(*drawn, "--temperature", 50)
    assert write(*drawn, "--temperature", 50) != write("--max-new-tokens", 12, "--seed", 4, "--temperature", 50)


@GENERATE.of("temperature", "top_p")
def test_any_word_may_come_next_where_all_are_as_likely(folder):
    from nalaformer.evaluation import load_language_model
    from nalaformer.models.language.writing import Writer

    loaded = load_language_model(folder, device="cpu")
    writer = Writer(loaded.model, loaded.tokenizer)
    drawn = {writer.write("w1 w2", max_new_tokens=1, temperature=1e4, seed=seed).text for seed in range(120)}
    # 120 draws of 80 find 62 of them in the mean
    assert len(drawn) > 52


# --- the command that scores --------------------------------------------------------------------------------------------


@pytest.fixture
def score(folder):
    def score(*options: object) -> tuple[str, dict[str, float]]:
        """The title and the figures by name."""
        arguments = ["eval", "language", "--model", folder, "--device", "cpu", *options]
        done = CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        rows = [re.findall(r"[^│┃ ](?:[^│┃]*[^│┃ ])?", line) for line in done.output.splitlines()]
        figures = {row[0]: float(row[1].replace(",", "")) for row in rows if len(row) == 2 and row[0] != "figure"}
        return " ".join(done.output.split()), figures

    return score


@pytest.fixture
def texts(tmp_path):
    """Two files, 30 and 20 words, the text under two names."""
    for name, count in (("a", 30), ("b", 20)):
        row = {"text": " ".join(f"w{7 * n % 79}" for n in range(count)), "other": "w1 w2 w3"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_every_option_of_the_command_that_scores_is_seen_to():
    assert EVALUATE.missing() == []


def nats(folder, words: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Of each word after the start token, in one window."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = torch.tensor([[0, *words]])
    with torch.no_grad():
        return F.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")


@EVALUATE.of("model", "text", "field", "device")
def test_figures_are_those_of_the_files_and_the_field_that_are_named(score, folder, texts):
    long, short = ([7 * n % 79 for n in range(count)] for count in (30, 20))
    _, figures = score("--text", texts / "a.jsonl")
    assert figures["tokens"] == figures["words"] == 30
    assert figures["loss"] == pytest.approx(nats(folder, long).mean().item(), rel=1e-4)
    _, figures = score("--text", texts / "a.jsonl", "--text", texts / "b.jsonl")
    assert (figures["tokens"], figures["documents"]) == (50, 2)
    assert figures["loss"] == pytest.approx(torch.cat((nats(folder, long), nats(folder, short))).mean().item(), rel=1e-4)
    _, figures = score("--text", texts / "a.jsonl", "--field", "other")
    assert figures["loss"] == pytest.approx(nats(folder, [1, 2, 3]).mean().item(), rel=1e-4)


@CONFIG.of("max_position_embeddings")
@EVALUATE.of("window", "stride", "batch_size", "dtype")
def test_windows_strides_and_types_are_those_that_are_asked_for(score, folder, texts):
    words = [7 * n % 79 for n in range(30)]
    # the length that the config names, a quarter of it at a time
    assert "windows of 64, stride 16" in score("--text", texts / "a.jsonl")[0]
    title, figures = score("--text", texts / "a.jsonl", "--window", 4, "--stride", 3)
    assert "windows of 4, stride 3" in title
    # the first window scores three words, each later one three more
    pieces, ids = [nats(folder, words[:3])], [0, *words]
    for start in range(3, 28, 3):
        model = AutoModelForCausalLM.from_pretrained(folder)
        part = torch.tensor([ids[start : start + 4]])
        with torch.no_grad():
            losses = F.cross_entropy(model(part).logits[0, :-1], part[0, 1:], reduction="none")
        pieces.append(losses)
    assert figures["loss"] == pytest.approx(torch.cat(pieces).mean().item(), rel=1e-4)
    # other sums, printed with five digits
    again = score("--text", texts / "a.jsonl", "--window", 4, "--stride", 3, "--batch-size", 1)[1]
    assert again == pytest.approx(figures, rel=3e-4)
    _, halved = score("--text", texts / "a.jsonl", "--dtype", "bfloat16")
    assert halved["loss"] == pytest.approx(nats(folder, words, torch.bfloat16).mean().item(), rel=1e-4)
    assert halved["loss"] != pytest.approx(nats(folder, words).mean().item(), rel=1e-5)


@EVALUATE.of("tasks", "data", "limit", "shots", "window", "batch_size")
def test_tasks_get_the_options_of_the_command(folder, texts, monkeypatch):
    import nalaformer.evaluation

    asked = {}

    def evaluate(loaded, tasks, data, **options):
        asked.update(options, tasks=tasks, data=data)
        return []

    monkeypatch.setattr(nalaformer.evaluation, "evaluate_tasks", evaluate)
    arguments = ["eval", "language", "--model", folder, "--tasks", "piqa, lambada", "--data", texts, "--limit", 3]
    arguments += ["--shots", 2, "--window", 32, "--batch-size", 5, "--device", "cpu"]
    done = CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments], catch_exceptions=False)
    assert asked == {
        "tasks": ["piqa", "lambada"],
        "data": texts,
        "limit": 3,
        "shots": 2,
        "window": 32,
        "batch_size": 5,
    }, done.output
