"""Pretrained decoders with hybrid attention: the same function however it is run, and most of the ability kept."""

import copy
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from helpers.converted_models import FAMILIES, SMALL, converted, make_model, short_run  # noqa: E402
from helpers.places import TESTS  # noqa: E402
from helpers.recall_teacher import RecallData, trained_teacher  # noqa: E402
from nalaformer.attention.hybrid import HybridSettings, hybrid_settings  # noqa: E402
from nalaformer.linearize import LinearizeConfig, TokenWindows, linearize, saving, validate, write_report  # noqa: E402
from nalaformer.linearize.compatibility import check_model  # noqa: E402
from nalaformer.linearize.fingerprint import model_fingerprint  # noqa: E402
from nalaformer.linearize.transfer import AttentionTransfer  # noqa: E402
from nalaformer.models.hybrid.attention import attention_mode, converted_attentions  # noqa: E402
from nalaformer.models.hybrid.cache import HybridCache  # noqa: E402
from nalaformer.models.hybrid.model import HybridForCausalLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return converted()


@pytest.fixture
def tokens():
    return torch.randint(3, 50, (2, 45))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_with_every_token_exact_a_family_is_what_it_was(family, tokens):
    original = make_model(family)
    expected = original(tokens).logits
    exact = HybridForCausalLM.convert(copy.deepcopy(original), hybrid_settings("softmax", chunk_size=8)).eval()
    torch.testing.assert_close(exact(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    with attention_mode(exact, "softmax"):
        torch.testing.assert_close(exact(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    hybrid = converted(family)
    assert (hybrid(tokens).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@torch.no_grad()
def test_saved_models_are_loaded_by_the_auto_classes(family, tokens, tmp_path):
    hybrid = converted(family, tie_word_embeddings=family == "llama")
    hybrid.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is HybridForCausalLM
    assert loaded.config.settings == SMALL
    assert torch.equal(loaded(tokens).logits, hybrid(tokens).logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "nala_hybrid"
    assert config["text_config"]["model_type"] == family


@torch.no_grad()
def test_maps_stay_float32_in_a_bfloat16_model(tokens, tmp_path):
    converted(dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    attention = converted_attentions(loaded)[0]
    assert attention.hybrid.map.query_weight.dtype == torch.float32
    assert attention.hybrid.gate.weight.dtype == torch.bfloat16
    assert attention.original.q_proj.weight.dtype == torch.bfloat16
    assert loaded(tokens).logits.dtype == torch.bfloat16
    assert loaded.generate(tokens, max_new_tokens=3, do_sample=False).shape == (2, 48)


@pytest.mark.parametrize("sizes", [[1] * 45, [20, 1, 1, 17, 6]], ids=str)
@torch.no_grad()
def test_prompts_in_pieces_give_the_same_logits(model, tokens, sizes):
    whole = model(tokens, use_cache=False).logits
    cache = HybridCache(model.config)
    pieces = [model(piece, past_key_values=cache).logits for piece in tokens.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-4)
    assert cache.get_seq_length() == 45


def test_greedy_tokens_do_not_depend_on_cache_or_pieces(model, tokens):
    plain = model.generate(tokens, max_new_tokens=30, do_sample=False, use_cache=False)
    assert torch.equal(model.generate(tokens, max_new_tokens=30, do_sample=False), plain)
    assert torch.equal(model.generate(tokens, max_new_tokens=30, do_sample=False, prefill_chunk_size=13), plain)


def test_left_padding_changes_no_generated_token(model, tokens):
    short = tokens[:1, :19]
    padded = torch.cat((torch.zeros(1, 26, dtype=torch.int64), short), 1)
    batch = torch.cat((tokens[1:], padded))
    mask = torch.ones_like(batch)
    mask[1, :26] = 0
    both = model.generate(batch, attention_mask=mask, max_new_tokens=25, do_sample=False)
    assert torch.equal(both[1, 26:], model.generate(short, max_new_tokens=25, do_sample=False)[0])
    assert torch.equal(both[0], model.generate(tokens[1:], max_new_tokens=25, do_sample=False)[0])


@torch.no_grad()
def test_left_padding_changes_no_logits(model, tokens):
    rows = torch.cat((torch.zeros(2, 11, dtype=torch.int64), tokens), 1)
    mask = torch.ones_like(rows)
    mask[:, :11] = 0
    # chunks hold real tokens alone, and so rounding is all that may differ
    whole = model(tokens, use_cache=False).logits
    torch.testing.assert_close(model(rows, attention_mask=mask, use_cache=False).logits[:, 11:], whole, rtol=0, atol=1e-4)
    cache = HybridCache(model.config)
    first = model(rows[:, :30], attention_mask=mask[:, :30], past_key_values=cache).logits[:, 11:]
    second = model(rows[:, 30:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=0, atol=1e-4)


def test_beam_search_and_sampling_are_those_without_a_cache(model, tokens):
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), model.generate(tokens, use_cache=False, **options))
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        drawn.append(model.generate(tokens, max_new_tokens=12, do_sample=True, top_k=5, use_cache=use_cache))
    assert torch.equal(*drawn)


def test_a_conversation_goes_on_with_its_cache(model, tokens):
    first = model.generate(tokens, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    more = torch.cat((first.sequences, torch.randint(3, 50, (2, 7))), 1)
    cached = model.generate(more, past_key_values=first.past_key_values, max_new_tokens=9, do_sample=False)
    assert torch.equal(cached, model.generate(more, max_new_tokens=9, do_sample=False))


@torch.no_grad()
def test_copies_of_a_sample_stand_side_by_side_in_a_repeated_cache(model, tokens):
    cache = HybridCache(model.config)
    model(tokens[:, :30], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    logits = model(tokens[:, 30:].repeat_interleave(2, 0), past_key_values=cache).logits
    whole = model(tokens, use_cache=False).logits[:, 30:]
    torch.testing.assert_close(logits, whole.repeat_interleave(2, 0), rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_cache_does_not_grow_once_it_is_full(model):
    sizes = []
    for length in (100, 400):
        cache = HybridCache(model.config)
        model(torch.randint(3, 50, (1, length)), past_key_values=cache)
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1]


def test_what_a_hybrid_cache_cannot_do_is_refused(model, tokens):
    with pytest.raises(ValueError, match="cannot be cropped"):
        HybridCache(model.config).crop(1)
    with pytest.raises(ValueError, match="must be a HybridCache"):
        model(tokens, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="cache of its own"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match=r"[Aa]ssisted"):
        model.generate(tokens[:1], max_new_tokens=2, assistant_model=make_model())
    with pytest.raises(ValueError, match="packed"):
        model(tokens[:1], position_ids=torch.cat((torch.arange(20), torch.arange(25)))[None], use_cache=False)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"sliding_window": 16}, "sliding window of 16"),
        ("gemma2", {"head_dim": 8}, "sliding_attention|other kinds|caps"),
        ("gpt2", {}, "model.layers"),
    ],
)
def test_other_attention_is_refused_with_its_reason(family, changes, message):
    config = AutoConfig.for_model(family, vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **changes)
    with pytest.raises(ValueError, match=message):
        HybridForCausalLM.convert(AutoModelForCausalLM.from_config(config), SMALL)


def test_a_model_that_attends_otherwise_is_refused(monkeypatch):
    original = make_model()
    attention = original.model.layers[0].self_attn
    forward = attention.forward

    def odd(*args, **kwargs):
        out, weights = forward(*args, **kwargs)
        return (out, weights) if "hybrid_call" in kwargs else (2 * out, weights)

    monkeypatch.setattr(attention, "forward", odd)
    with pytest.raises(ValueError, match="a way of its own"):
        check_model(original)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_is_supported_passes_the_check(family):
    check_model(make_model(family))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("diffllama", {}, "DiffLlamaAttention attends more than once in a pass"),
        ("xglm", {"d_model": 32, "ffn_dim": 32, "num_layers": 2, "attention_heads": 4}, "XGLMAttention attends by itself"),
    ],
)
def test_attention_that_would_be_converted_in_part_or_not_at_all_is_refused(family, changes, message):
    original = make_model(family, **changes)
    with pytest.raises(ValueError, match=message):
        check_model(original)
    # nor does it run where nobody checked
    with pytest.raises(ValueError, match=message):
        HybridForCausalLM.convert(original, SMALL)(torch.arange(9)[None])


def without_padding(monkeypatch, original):
    from nalaformer.models.hybrid import attention

    attend = attention.AttentionPass.attend
    monkeypatch.setattr(
        attention.AttentionPass, "attend", lambda call, q, k, v, mask, scale: attend(call, q, k, v, None, scale)
    )


def without_the_past(monkeypatch, original):
    from nalaformer.models.hybrid.cache import HybridCacheLayer

    attend = HybridCacheLayer.attend

    def forgetful(layer, *args, **kwargs):
        layer.state = None
        return attend(layer, *args, **kwargs)

    monkeypatch.setattr(HybridCacheLayer, "attend", forgetful)


def without_other_chunks(monkeypatch, original):
    from nalaformer.models.hybrid import attention

    attend = attention.AttentionPass.attend

    def chunk_by_chunk(call, q, k, v, mask, scale):
        parts = []
        for pieces in zip(*(x.split(24, dim=1) for x in (q, k, v)), strict=True):
            call.has_attended = False
            parts.append(attend(call, *pieces, None, scale))
        return torch.cat(parts, dim=1)

    monkeypatch.setattr(attention.AttentionPass, "attend", chunk_by_chunk)


def with_a_weight_that_no_config_tells_of(monkeypatch, original):
    original.model.layers[1].self_attn.extra = torch.nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (without_padding, "logits of a padded batch differ by"),
        (without_the_past, "logits of a padded batch, piece by piece with a cache, differ by"),
        (without_other_chunks, "logits of a whole sequence differ by"),
        (with_a_weight_that_no_config_tells_of, r"1 of its tensors would not be what was saved \(.*layers.1.*extra"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_check_sees_what_would_go_wrong_later(fault, message, monkeypatch):
    original = make_model()
    fault(monkeypatch, original)
    with pytest.raises(ValueError, match=message):
        check_model(original)
    assert not converted_attentions(original)


@torch.no_grad()
def test_checking_leaves_a_model_as_it_came(tokens):
    original = make_model()
    before = original(tokens).logits
    check_model(original)
    assert torch.equal(original(tokens).logits, before)
    assert not converted_attentions(original)
    # other models made from the same config are not touched either
    twin = AutoModelForCausalLM.from_config(original.config)
    HybridForCausalLM.convert(original, SMALL)
    twin(tokens)


def test_gradient_checkpointing_gives_the_same_gradients(tokens):
    gradients = []
    for checkpointing in (False, True):
        hybrid = converted(dtype=torch.float64)
        hybrid.train()
        if checkpointing:
            hybrid.gradient_checkpointing_enable()
        hybrid(tokens, labels=tokens).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in hybrid.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-10, atol=1e-12, msg=name)


@pytest.fixture
def windows():
    return TokenWindows(torch.randint(3, 50, (24 * 40,)), length=40)


@pytest.mark.parametrize("layers_at_once", [0, 1])
def test_transfer_learns_maps_and_gates_and_nothing_else(windows, tmp_path, layers_at_once):
    original = make_model()
    before = {name: value.clone() for name, value in original.state_dict().items()}
    config = LinearizeConfig(
        attention=replace(SMALL, max_salient=0, salient_per_chunk=1),
        transfer=short_run(steps=25),
        finetune=None,
        layers_at_once=layers_at_once,
    )
    result = linearize(original, windows, windows, folder=tmp_path, config=config)
    after = result.model.host.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name.replace("self_attn.", "self_attn.original.")], value), name
    assert result.transfer_errors.keys() == {"layer_0", "layer_1"}
    fresh = HybridForCausalLM.convert(make_model(), config.attention)
    start = validate(fresh, windows).divergence
    assert result.validations["transfer"].divergence < start
    figures = json.loads((tmp_path / "linearize.json").read_text())
    assert figures["transfer_errors"] == result.transfer_errors


def test_the_same_call_again_goes_on_where_it_was(windows, tmp_path):
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=6, save_every=3, keep=5), finetune=None)
    whole = linearize(make_model(), windows, windows, folder=tmp_path / "whole", config=config)
    # as if the run had been killed after its first checkpoint
    other = make_model()
    # what was drawn before does not matter
    torch.manual_seed(7)
    linearize(other, windows, windows, folder=tmp_path / "killed", config=config)
    for step in (4, 5, 6):
        folder = tmp_path / "killed" / "transfer" / "checkpoints" / f"step_{step:08d}"
        if folder.exists():
            folder.rename(tmp_path / f"gone_{step}")
    again = linearize(make_model(), windows, windows, folder=tmp_path / "killed", config=config)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_another_model_and_other_data_are_refused_in_a_used_folder(windows, tmp_path):
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=1), finetune=None)
    linearize(make_model(), windows, windows, folder=tmp_path, config=config)
    other = make_model()
    with torch.no_grad():
        # the smallest change: one bit of one weight
        other.model.layers[1].mlp.up_proj.weight.view(torch.int32)[3, 5] ^= 1
    with pytest.raises(ValueError, match=r"made from something else: model was 'LlamaForCausalLM .*choose another folder"):
        linearize(other, windows, windows, folder=tmp_path, config=config)
    changed = TokenWindows(windows.windows.flatten().flip(0), length=40)
    with pytest.raises(ValueError, match="made from something else: train_data was"):
        linearize(make_model(), changed, windows, folder=tmp_path, config=config)
    with pytest.raises(ValueError, match="made from something else: eval_data was"):
        linearize(make_model(), windows, changed, folder=tmp_path, config=config)
    linearize(make_model(), windows, windows, folder=tmp_path, config=config)


def test_an_adapter_is_not_taken_for_one_of_other_maps(windows, tmp_path):
    pytest.importorskip("peft")
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=1), finetune=short_run(steps=1))
    linearize(make_model(), windows, windows, folder=tmp_path, config=config)
    shutil.rmtree(tmp_path / "transfer")
    with pytest.raises(ValueError, match="made from something else: maps was"):
        linearize(make_model(), windows, windows, folder=tmp_path, config=replace(config, transfer=short_run(steps=2)))


def test_values_that_change_places_change_the_fingerprint():
    model = torch.nn.Linear(6, 2)
    before = model_fingerprint(model)
    with torch.no_grad():
        model.weight.copy_(model.weight.flip(1))
    assert model_fingerprint(model) != before
    assert model_fingerprint(model.to(torch.bfloat16)) != before


def test_a_stage_is_saved_when_it_is_interrupted_and_goes_on(windows, tmp_path, monkeypatch):
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=4), finetune=None)
    whole = linearize(make_model(), windows, windows, folder=tmp_path / "whole", config=config)
    loss, seen = AttentionTransfer.loss, []

    def interrupted(self, model, batch):
        seen.append(batch)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(self, model, batch)

    monkeypatch.setattr(AttentionTransfer, "loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        linearize(make_model(), windows, windows, folder=tmp_path / "halves", config=config)
    halves = linearize(make_model(), windows, windows, folder=tmp_path / "halves", config=config)
    assert len(seen) == 4
    for name, value in whole.model.state_dict().items():
        assert torch.equal(halves.model.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("peft", "stage 2 needs peft"),
        ("windows", "an epoch must hold a whole batch"),
        ("eval", "validation needs at least one"),
    ],
)
def test_what_a_later_stage_needs_is_asked_for_before_the_first(windows, tmp_path, monkeypatch, what, message):
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=1), finetune=short_run(steps=1))
    train, held_out = windows, windows
    if what == "peft":
        monkeypatch.setitem(sys.modules, "peft", None)
    elif what == "windows":
        config = replace(config, finetune=short_run(steps=1, batch_size=25))
    else:
        held_out = []
    with pytest.raises((ValueError, ModuleNotFoundError), match=message):
        linearize(make_model(), train, held_out, folder=tmp_path / "out", config=config)
    assert not (tmp_path / "out").exists()


def test_finetuning_lowers_the_loss_and_merges_to_the_same_logits(windows, tmp_path):
    pytest.importorskip("peft")
    config = LinearizeConfig(
        attention=SMALL, transfer=None, finetune=short_run(steps=15, learning_rate=5e-3), merge_adapter=False
    )
    kept = linearize(make_model(), windows, windows, folder=tmp_path, config=config)
    assert kept.validations["finetune"].loss < kept.validations["conversion"].loss
    merged = linearize(make_model(), windows, windows, folder=tmp_path, config=replace(config, merge_adapter=True))
    tokens = windows[0][None]
    with torch.no_grad():
        torch.testing.assert_close(merged.model(tokens).logits, kept.model(tokens).logits, rtol=1e-3, atol=1e-3)
    assert type(merged.model) is HybridForCausalLM
    names = [name for name, parameter in kept.model.named_parameters() if "lora_A" in name]
    assert len(names) == 2 * 5
    assert sum("gate" in name for name in names) == 2


def test_a_learned_selection_needs_the_stage_in_which_it_is_learned(windows, tmp_path):
    learned = replace(SMALL, selection="learned")
    with pytest.raises(ValueError, match=r"learned in the transfer.*'key_norm'"):
        linearize(make_model(), windows, windows, folder=tmp_path, config=LinearizeConfig(attention=learned, transfer=None))
    assert LinearizeConfig().attention.selection == "learned"
    # nobody is chosen, so nothing is to be learned
    nobody = LinearizeConfig(attention=replace(learned, salient_per_chunk=0), transfer=None, finetune=None)
    result = linearize(make_model(), windows, windows, folder=tmp_path, config=nobody)
    assert not any("scorer" in name for name in result.model.state_dict())


def test_report_shows_every_stage_and_layer(windows, tmp_path):
    result = linearize(
        make_model(),
        windows,
        windows,
        folder=tmp_path,
        config=LinearizeConfig(attention=SMALL, transfer=short_run(steps=2), finetune=None),
    )
    page = write_report(result, tmp_path)
    text = (tmp_path / "report.md").read_text()
    for word in ("teacher (softmax)", "after conversion", "after transfer", "perplexity", "| 1 |"):
        assert word in text
    assert "transfer.png" in page.read_text()
    assert (tmp_path / "transfer.png").stat().st_size > 1000


def test_validation_of_a_model_against_itself_is_no_distance(windows):
    exact = HybridForCausalLM.convert(make_model(), hybrid_settings("softmax", chunk_size=8))
    found = validate(exact, windows)
    assert found.divergence == pytest.approx(0, abs=1e-6)
    assert found.agreement == 1
    assert found.loss == pytest.approx(found.teacher_loss, rel=1e-5)


@pytest.fixture(scope="module")
def teacher():
    torch.set_num_threads(1)
    return trained_teacher()


def recovery(teacher, folder, *, steps, method="still", **changes):
    changes = {"chunk_size": 16} | ({"salient_per_chunk": 4} if method == "still" else {}) | changes
    config = LinearizeConfig(
        attention=hybrid_settings(method, **changes),
        transfer=short_run(steps=steps, batch_size=16) if steps else None,
        finetune=None,
    )
    model = copy.deepcopy(teacher)
    result = linearize(model, RecallData(256, seed=1), RecallData(64, seed=2), folder=folder, config=config)
    last = list(result.validations.values())[-1]
    assert last.teacher_accuracy > 0.95
    return last.accuracy / last.teacher_accuracy


def test_a_recalling_model_keeps_its_ability_and_pure_linear_does_not(teacher, tmp_path):
    assert recovery(teacher, tmp_path / "still", steps=0) > 0.9
    assert recovery(teacher, tmp_path / "linear", steps=8, method="linear") < 0.5
    assert recovery(teacher, tmp_path / "window", steps=0, method="window") < 0.5


def test_the_selection_rule_decides(teacher, tmp_path):
    by_norm = recovery(teacher, tmp_path / "norm", steps=0)
    assert by_norm > recovery(teacher, tmp_path / "self", steps=0, selection="self_saliency") + 0.3
    assert by_norm > recovery(teacher, tmp_path / "random", steps=0, selection="random") + 0.3


def test_a_learned_rule_finds_the_facts(teacher, tmp_path):
    assert recovery(teacher, tmp_path, steps=20, selection="learned") > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "shard"])
def test_processes_that_share_the_weights_learn_the_same(kind, tmp_path):
    script = TESTS / "helpers" / "linearize_on_ranks.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    alone = [sys.executable, str(script), str(tmp_path / "alone"), "whole"]
    together = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path / "two"),
        kind,
    ]
    for command in (alone, [sys.executable, *together]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("alone", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def pretrained_folder(tmp_path_factory):
    """A model and its tokenizer as save_pretrained writes them, and text."""
    from nalaformer.data.text import train_tokenizer

    folder = tmp_path_factory.mktemp("pretrained")
    texts = [f"item {number} is {'red' if number % 3 else 'blue'} and lies in box {number % 7}." * 3 for number in range(120)]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    tokenizer.save_pretrained(str(folder / "model"))
    make_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(folder / "model")
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


def test_the_command_writes_a_model_that_transformers_loads(pretrained_folder, tmp_path):
    pytest.importorskip("peft")
    from typer.testing import CliRunner

    from nalaformer.cli import build_app

    # brackets and colons in a name are no markup
    out = tmp_path / "w[/x] :cat:"
    arguments = ["linearize", str(pretrained_folder / "model"), "--data", str(pretrained_folder / "text.jsonl")]
    arguments += ["--out", str(out), "--length", "64", "--steps", "2", "--finetune-steps", "2", "--device", "cpu"]
    done = CliRunner().invoke(build_app(), [*arguments, "chunk_size=8", "selection=received"])
    assert done.exit_code == 0, done.output
    assert "after finetune: perplexity" in done.output
    assert f"model: {out}\n" in done.output
    assert f"report: {out}" in done.output
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.settings == HybridSettings(chunk_size=8, selection="received")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    tokens = tokenizer("item 7 is", return_tensors="pt").input_ids
    assert model.generate(tokens, max_new_tokens=20, do_sample=False).shape[1] > tokens.shape[1]
    writing = ["generate", "text", "--model", str(out), "--prompt", "item 7 is", "--max-new-tokens", "3", "--device", "cpu"]
    written = CliRunner().invoke(build_app(), writing)
    assert re.search(r"\d tokens, .* on cpu, cache [\d.]+ MiB", written.output), written.output
    for name in ("report.html", "report.md", "transfer.png", "runs/linearize.json"):
        assert (out / name).exists()
    with pytest.raises(ValueError, match="got none; name files"):
        CliRunner().invoke(build_app(), ["linearize", "model"], catch_exceptions=False)


def run_command(folder, out, *, model="model", data="text.jsonl", length=64, more=()):
    from typer.testing import CliRunner

    from nalaformer.cli import build_app

    arguments = ["linearize", str(folder / model), "--data", str(folder / data), "--out", str(out), "--length", str(length)]
    arguments += ["selection=key_norm", "--steps", "0", "--finetune-steps", "0", "--device", "cpu", *more]
    return CliRunner().invoke(build_app(), arguments, catch_exceptions=False)


def test_the_command_overwrites_no_folder_but_its_own(pretrained_folder, tmp_path):
    model = pretrained_folder / "model"
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(ValueError, match="a folder of its own"):
        run_command(pretrained_folder, model / ".." / "model")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="got one with other files"):
        run_command(pretrained_folder, tmp_path)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_used_folder_refuses_another_model_other_text_and_another_length(pretrained_folder, tmp_path):
    folder, out = tmp_path, tmp_path / "out"
    shutil.copytree(pretrained_folder, folder, dirs_exist_ok=True)
    assert run_command(folder, out).exit_code == 0
    assert run_command(folder, out).exit_code == 0
    with pytest.raises(ValueError, match="length was 64, is 32"):
        run_command(folder, out, length=32)
    make_model(vocab_size=300, initializer_range=0.01).save_pretrained(folder / "model")
    with pytest.raises(ValueError, match="weights was"):
        run_command(folder, out)
    with (folder / "text.jsonl").open("a") as file:
        file.write('\n{"text": "more"}')
    with pytest.raises(ValueError, match="data was"):
        run_command(folder, out)


def test_a_single_text_is_refused_with_a_remedy_that_works(pretrained_folder, tmp_path):
    from typer.testing import CliRunner

    from nalaformer.cli import build_app

    tmp_path = tmp_path / "a folder"
    shutil.copytree(pretrained_folder / "model", tmp_path / "model")
    (tmp_path / "book.txt").write_text("".join(f"line {number} of the only book.\n" for number in range(200)))
    with pytest.raises(ValueError, match=r"several documents.*--data DIR") as refused:
        run_command(tmp_path, tmp_path / "out", data="book.txt")
    _, *remedy = shlex.split(str(refused.value).split("`")[1].replace("DIR", f"'{tmp_path / 'tokens'}'"))
    assert CliRunner().invoke(build_app(), remedy).exit_code == 0
    # what failed before it had tokens does not keep the folder from other text
    assert run_command(tmp_path, tmp_path / "out", data="tokens").exit_code == 0


def test_what_cannot_be_converted_or_saved_is_refused_before_any_work(pretrained_folder, tmp_path):
    folder, out = tmp_path, tmp_path / "out"
    shutil.copytree(pretrained_folder, folder, dirs_exist_ok=True)
    converted(vocab_size=300).save_pretrained(folder / "hybrid")
    with pytest.raises(ValueError, match="converted already"):
        run_command(folder, out, model="hybrid")
    with pytest.raises(ValueError, match="converted already"):
        linearize(converted(), [], [], folder=out)
    (folder / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="must hold a tokenizer"):
        run_command(folder, out)
    for option in ("--steps", "--finetune-steps"):
        assert run_command(folder, out, more=[option, "-1"]).exit_code == 2
    assert not out.exists()


def test_a_model_of_another_build_and_a_missing_package_are_refused_before_the_text_is_read(
    pretrained_folder, tmp_path, monkeypatch
):
    shutil.copytree(pretrained_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(saving, "tokenize_corpus", lambda *_, **__: pytest.fail("was tokenized"))
    gpt2 = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=300)
    gpt2.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no `model\.layers`"):
        run_command(tmp_path, tmp_path / "out")
    shutil.copytree(pretrained_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        run_command(tmp_path, tmp_path / "out", more=["--steps", "1"])
    monkeypatch.setattr("nalaformer.whole_files.free_bytes", lambda folder: 1000)
    with pytest.raises(ValueError, match="a converted model needs about"):
        run_command(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_window_longer_than_the_text_is_refused_before_the_model_is_loaded(pretrained_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("was loaded"))
    with pytest.raises(ValueError, match="an epoch must hold a whole batch"):
        run_command(pretrained_folder, tmp_path / "out", length=100_000, more=["--steps", "1"])


def test_a_full_disk_in_the_last_save_leaves_no_half_and_the_same_command_ends(pretrained_folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write = saving.sync_tree

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "sync_tree", full)
    with pytest.raises(OSError, match="out could not be written, the disk is full; make room"):
        run_command(pretrained_folder, out)
    assert sorted(path.name for path in out.iterdir()) == ["made_from.json", "runs", "tokens"]
    monkeypatch.setattr(saving, "sync_tree", write)
    assert run_command(pretrained_folder, out).exit_code == 0
    assert AutoModelForCausalLM.from_pretrained(out) is not None


def test_a_claim_that_met_a_full_disk_does_not_keep_the_folder(pretrained_folder, tmp_path):
    (tmp_path / "out").mkdir()
    # what a version before this one, or a kill, has left
    for name in (".made_from.json_123", ".lock"):
        (tmp_path / "out" / name).touch()
    assert run_command(pretrained_folder, tmp_path / "out").exit_code == 0


def test_the_auto_classes_build_the_model_of_its_config():
    # in either order of imports: tests/test_language_models.py
    sizes = {"hidden_size": 16, "vocab_size": 9, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("nala_hybrid", text_config={"model_type": "llama"} | sizes)
    assert type(AutoModelForCausalLM.from_config(config)) is HybridForCausalLM
