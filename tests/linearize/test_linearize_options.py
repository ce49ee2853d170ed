"""Every option of a conversion has the effect that its documentation says, and what is saved is what was learned."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from helpers.converted_models import make_model, short_run
from helpers.option_effects import Effects, options_of_command
from nalaformer.attention.hybrid import HybridSettings
from nalaformer.cli import build_app
from nalaformer.data.text import train_tokenizer
from nalaformer.linearize import LinearizeConfig, Linearized, TokenWindows, Validation, linearize, save, validate
from nalaformer.linearize.finetune import NextToken, with_adapter
from nalaformer.linearize.model_card import cache_bytes
from nalaformer.linearize.report import rows_of
from nalaformer.linearize.saving import claim_folder
from nalaformer.linearize.sharding import is_sharded
from nalaformer.linearize.transfer import AttentionTransfer, TransferModel
from nalaformer.models.hybrid.attention import attend, attention_mode, converted_attentions
from nalaformer.models.hybrid.model import HybridForCausalLM
from nalaformer.recipes import changed

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = Effects(field.name for field in fields(LinearizeConfig))
COMMAND = Effects(options_of_command("linearize"))
SMALL = HybridSettings(chunk_size=8, salient_per_chunk=2)


@pytest.fixture
def windows():
    return TokenWindows(torch.randint(3, 50, (8 * 24,)), length=24)


@pytest.fixture
def tokens():
    return torch.randint(3, 50, (2, 30))


def adapted(**options) -> nn.Module:
    """A converted model under an adapter that changes its logits."""
    pytest.importorskip("peft")
    model = with_adapter(HybridForCausalLM.convert(make_model(), SMALL), LinearizeConfig(**options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


FIGURES = {"loss": 1.0, "teacher_loss": 2.0, "divergence": 0.3, "agreement": 0.4, "accuracy": 0.5, "teacher_accuracy": 0.6}
STAGES = {"transfer": Validation(**FIGURES, tokens=7)}


def result_of(model: nn.Module) -> Linearized:
    return Linearized(model=model, transfer_errors={}, validations=STAGES, config=LinearizeConfig(), windows=16, length=24)


# --- the config ---------------------------------------------------------------------------------------------------------


def test_every_option_of_a_conversion_is_seen_to():
    assert CONFIG.missing() == []


@CONFIG.of("attention", "transfer", "finetune", "merge_adapter", "lora_rank")
@pytest.mark.parametrize("merge", [False, True])
def test_the_stages_that_are_asked_for_run_and_the_adapter_is_merged_or_kept(merge, windows, tmp_path):
    pytest.importorskip("peft")
    stages = {"transfer": short_run(steps=2), "finetune": short_run(steps=3)}
    config = LinearizeConfig(attention=SMALL, lora_rank=3, merge_adapter=merge, **stages)
    result = linearize(make_model(), windows, windows, folder=tmp_path / "both", config=config)
    assert list(result.validations) == ["conversion", "transfer", "finetune"]
    assert sorted(path.name for path in (tmp_path / "both").iterdir() if path.is_dir()) == ["finetune", "transfer"]
    inner = result.model if merge else result.model.get_base_model()
    assert type(inner) is HybridForCausalLM
    assert inner.config.settings == SMALL
    ranks = {value.shape[0] for name, value in result.model.named_parameters() if "lora_A" in name}
    assert ranks == (set() if merge else {3})
    without = linearize(
        make_model(), windows, windows, folder=tmp_path / "none", config=replace(config, transfer=None, finetune=None)
    )
    assert list(without.validations) == ["conversion"]
    assert not without.transfer_errors


@CONFIG.of("lora_rank", "lora_alpha")
@pytest.mark.parametrize(("rank", "alpha"), [(2, 6), (4, 1)])
def test_what_an_adapter_adds_is_scaled_by_alpha_over_rank(rank, alpha):
    model = adapted(lora_rank=rank, lora_alpha=alpha)
    layer = model.get_base_model().host.model.layers[1].self_attn.original.q_proj
    down, up, before = (x.detach().clone() for x in (layer.lora_A.default.weight, layer.lora_B.default.weight, layer.weight))
    assert down.shape[0] == rank
    merged = model.merge_and_unload().host.model.layers[1].self_attn.original.q_proj.weight
    torch.testing.assert_close(merged - before, alpha / rank * up @ down, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "projections"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("phi", {"q_proj", "k_proj", "v_proj", "dense"}),
        ("persimmon", {"query_key_value", "dense"}),
    ],
)
def test_stage_two_learns_all_projections_of_attention_whatever_their_names(family, projections):
    pytest.importorskip("peft")
    adapted = with_adapter(HybridForCausalLM.convert(make_model(family), SMALL), LinearizeConfig())
    learned = {name.split(".lora_A")[0].split("self_attn.")[1] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert learned == {f"original.{name}" for name in projections} | {"hybrid.groups.0.gate"}


@CONFIG.of("layers_at_once")
@pytest.mark.parametrize(
    ("at_once", "runs"), [(0, ["transfer"]), (1, ["transfer_00_00", "transfer_01_01"]), (2, ["transfer"]), (5, ["transfer"])]
)
def test_layers_are_transferred_as_many_at_once_as_asked(at_once, runs, windows, tmp_path):
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=1), finetune=None, layers_at_once=at_once)
    result = linearize(make_model(), windows, windows, folder=tmp_path, config=config)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == runs
    assert list(result.transfer_errors) == ["layer_0", "layer_1"]


@CONFIG.of("finetune_loss")
@pytest.mark.parametrize(("name", "expected"), [("next_token", "loss"), ("teacher", "divergence")])
def test_stage_two_learns_from_the_text_or_from_the_teacher(name, expected, windows, tmp_path):
    pytest.importorskip("peft")
    attention = replace(SMALL, selection="key_norm")
    config = LinearizeConfig(attention=attention, transfer=None, finetune=short_run(steps=1, batch_size=8), finetune_loss=name)
    result = linearize(make_model(), windows, windows, folder=tmp_path, config=config)
    # the first batch is all of the text, and an adapter begins as nothing
    first = json.loads((tmp_path / "finetune" / "log.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(getattr(result.validations["conversion"], expected), rel=1e-3)


@CONFIG.of("cache", "cache_length")
def test_as_many_heads_keep_every_token_as_the_cache_holds(windows, tmp_path):
    attention = replace(SMALL, selection="key_norm", max_salient=4)
    config = LinearizeConfig(attention=attention, transfer=None, finetune=None)

    def number(**options) -> int:
        result = linearize(make_model(), windows, windows, folder=tmp_path, config=replace(config, **options))
        return sum(row.count("full") for row in result.model.config.budget or [])

    assert number() == 0
    assert number(cache=0.5, cache_length=4096) == 1
    assert number(cache=0.85, cache_length=4096) == 3
    # the window of the others weighs less, the longer the text
    assert number(cache=0.85, cache_length=256) == 2
    with pytest.raises(ValueError, match="cache must hold what every head remembers"):
        number(cache=0.1, cache_length=256)


@CONFIG.of("cache", "finetune_loss")
def test_a_run_that_goes_on_has_the_budget_and_the_loss_that_it_began_with(windows, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    config = LinearizeConfig(
        attention=replace(SMALL, max_salient=4),
        transfer=short_run(steps=1),
        finetune=short_run(steps=1),
        layers_at_once=1,
        cache=0.85,
        cache_length=4096,
    )
    first = linearize(make_model(), windows, windows, folder=tmp_path, config=config)
    # all heads of a layer keep every token: nothing is to be learned there
    assert ["full", "full"] in first.model.config.budget
    assert sorted(error > 0 for error in first.transfer_errors.values()) == [False, True]
    # as another device might see the heads
    monkeypatch.setattr("nalaformer.linearize.run.lookup_scores", lambda *_, **__: pytest.fail("was asked again"))
    again = linearize(make_model(), windows, windows, folder=tmp_path, config=config)
    assert again.model.config.budget == first.model.config.budget
    with pytest.raises(ValueError, match="finetune_loss was None and is now 'teacher'"):
        linearize(make_model(), windows, windows, folder=tmp_path, config=replace(config, finetune_loss="teacher"))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"cache was 0.85 and is now 0.5"):
        linearize(make_model(), windows, windows, folder=tmp_path, config=replace(config, cache=0.5))


@CONFIG.of("validation_windows")
@pytest.mark.parametrize(("most", "seen"), [(0, 8), (3, 3), (100, 8)])
def test_the_model_is_measured_on_as_many_windows_as_asked_and_says_so(most, seen, windows, tmp_path):
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=1), finetune=None, validation_windows=most)
    with (tmp_path / "output").open("w") as file:
        console = Console(file=file)
        result = linearize(make_model(), windows, windows, folder=tmp_path / "out", config=config, console=console)
    assert {found.tokens for found in result.validations.values()} == {seen * 23}
    lines = (tmp_path / "output").read_text()
    for stage in ("conversion", "transfer"):
        assert f"{stage}: {seen} windows beside the teacher" in lines


def test_only_the_layers_of_a_transfer_learn():
    model = HybridForCausalLM.convert(make_model(), SMALL)
    learned = TransferModel(model, range(1, 2)).learned()
    assert {name.partition("self_attn.")[0] for name in learned} == {"host.model.layers.1."}
    assert all(".hybrid." in name for name in learned)


@CONFIG.of("shard")
@pytest.mark.parametrize("shard", [False, True])
def test_frozen_weights_are_spread_over_a_group_where_asked(shard, windows, tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=1), finetune=None, shard=shard)
        result = linearize(make_model(), windows, windows, folder=tmp_path, config=config)
        assert is_sharded(result.model) == shard
        assert not any(is_sharded(attention.hybrid) for attention in converted_attentions(result.model))
    finally:
        dist.destroy_process_group()


def test_processes_do_not_wait_for_parameters_that_a_short_text_leaves_out():
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    learning = TransferModel(HybridForCausalLM.convert(make_model(), replace(SMALL, selection="learned")), range(2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        together = DistributedDataParallel(learning)
        # the first lies in the exact window
        for length in (16, 30):
            AttentionTransfer([], [], range(2)).loss(together, torch.randint(3, 50, (2, length))).total.backward()
    finally:
        dist.destroy_process_group()
    assert all(parameter.grad is not None for parameter in learning.learned().values())


# --- the teacher --------------------------------------------------------------------------------------------------------


def test_the_teacher_does_not_drop_out(tokens):
    model = HybridForCausalLM.convert(make_model("phi3", resid_pdrop=0.5, embd_pdrop=0.5), SMALL)
    transfer = TransferModel(model, range(2))
    with torch.no_grad():
        calm = transfer.eval()(tokens)
        for _ in range(2):
            torch.testing.assert_close(transfer.train()(tokens), calm, rtol=0, atol=0)


@torch.no_grad()
def test_every_layer_learns_from_what_softmax_would_have_shown_it(tokens):
    model = HybridForCausalLM.convert(make_model(), SMALL).eval()
    with attention_mode(model, "softmax"):
        expected = model(tokens, use_cache=False).logits
    with attention_mode(model, "transfer") as attentions:
        logits = model(tokens, use_cache=False).logits
        squares = [attention.transferred.teacher_square for attention in attentions]
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert all(square > 0 for square in squares)
    # "transfer" of one layer leaves the others as softmax
    with attention_mode(model, "transfer", range(1)) as attentions:
        model(tokens, use_cache=False)
        assert [attention.transferred is not None for attention in attentions] == [True, False]


# --- what is measured -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_validation_is_what_its_figures_say(tokens):
    model = HybridForCausalLM.convert(make_model(), SMALL).eval()
    targets = torch.randint(3, 50, tokens.shape)
    # nothing is asked of the first half of a row, where student and teacher agree
    targets[:, :15] = -100
    student = model(tokens, use_cache=False).logits.double()
    with attention_mode(model, "softmax"):
        teacher = model(tokens, use_cache=False).logits.double()
    # some right answers, of the student and of the teacher
    targets[0, 16:20], targets[1, 20:23] = student[0, 16:20].argmax(-1), teacher[1, 20:23].argmax(-1)
    found = validate(model, [{"input_ids": row, "targets": to} for row, to in zip(tokens, targets, strict=True)], batch_size=1)
    asked = targets != -100
    mine, other, right = student[asked].log_softmax(-1), teacher[asked].log_softmax(-1), targets[asked]
    expected = {
        "loss": -mine.gather(1, right[:, None]).mean().item(),
        "teacher_loss": -other.gather(1, right[:, None]).mean().item(),
        "divergence": (other.exp() * (other - mine)).sum(-1).mean().item(),
        "agreement": (mine.argmax(-1) == other.argmax(-1)).double().mean().item(),
        "accuracy": (mine.argmax(-1) == right).double().mean().item(),
        "teacher_accuracy": (other.argmax(-1) == right).double().mean().item(),
        "tokens": 30,
    }
    assert expected["agreement"] < 1
    figures = found.figures()
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert figures["perplexity"] == pytest.approx(torch.tensor(expected["loss"]).exp().item(), rel=1e-4)


@torch.no_grad()
def test_the_teacher_of_an_adapted_model_is_the_model_without_its_adapter(tokens):
    model = adapted()
    bare = validate(HybridForCausalLM.convert(make_model(), SMALL), tokens)
    found = validate(model, tokens)
    assert found.teacher_loss == pytest.approx(bare.teacher_loss, rel=1e-5)
    assert found.loss != pytest.approx(bare.loss, rel=1e-3)


def test_the_report_has_the_teacher_and_every_stage_in_its_columns():
    assert rows_of(result_of(nn.Identity())) == [
        ("teacher (softmax)", ["2", "7.389", "0", "1", "0.6"]),
        ("after transfer", ["1", "2.718", "0.3", "0.4", "0.5"]),
    ]


# --- what is learned from -----------------------------------------------------------------------------------------------


def test_windows_are_those_of_the_row_from_its_first_token():
    windows = TokenWindows(torch.arange(11), length=4)
    assert [window.tolist() for window in windows] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_loss_of_stage_two_is_that_of_the_predicted_tokens(tokens):
    model = HybridForCausalLM.convert(make_model(), SMALL).eval()
    targets = torch.randint(3, 50, tokens.shape)
    targets[:, :20] = -100
    loss = NextToken([], []).loss(model, {"input_ids": tokens, "targets": targets})
    logits = model(tokens, use_cache=False).logits
    assert loss.weight == 20
    torch.testing.assert_close(loss.total, nn.functional.cross_entropy(logits[:, 20:].flatten(0, 1), targets[:, 20:].flatten()))
    # without targets, every token but the first is predicted from those before it
    whole = NextToken([], []).loss(model, tokens)
    assert whole.weight == 2 * 29
    torch.testing.assert_close(whole.total, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


def test_the_loss_of_stage_one_is_a_thousand_squared_errors_and_the_scorers(tokens):
    model = HybridForCausalLM.convert(make_model(), replace(SMALL, selection="learned")).eval()
    transfer = TransferModel(model, range(2))
    loss = AttentionTransfer([], [], range(2)).loss(transfer, tokens)
    errors, _, scorers = transfer(tokens)
    assert (scorers > 0).all()
    torch.testing.assert_close(loss.total, 1000 * errors.mean() + scorers.mean())
    loss.total.backward()
    assert all(parameter.grad is not None for parameter in transfer.learned().values())


def test_gates_and_scorers_end_in_the_type_of_the_model_and_maps_in_float32(windows, tmp_path):
    attention = replace(SMALL, selection="learned")
    config = LinearizeConfig(attention=attention, transfer=short_run(steps=1), finetune=None)
    result = linearize(make_model(dtype=torch.bfloat16), windows, windows, folder=tmp_path, config=config)
    hybrid = converted_attentions(result.model)[0].hybrid.parts[0]
    for part, dtype in ((hybrid.gate, torch.bfloat16), (hybrid.scorer, torch.bfloat16), (hybrid.map, torch.float32)):
        assert {parameter.dtype for parameter in part.parameters()} == {dtype}


@pytest.mark.parametrize(("name", "value"), [("softcap", 30.0), ("s_aux", torch.zeros(4)), ("sliding_window", 8)])
def test_attention_of_another_kind_is_refused_where_it_is_called(name, value):
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=f"{name}=.*cannot be converted"):
        attend(nn.Identity(), q, q, q, None, hybrid_call=object(), **{name: value})


# --- what is saved ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_card_says_how_to_load_the_model_and_what_it_remembers(tmp_path):
    settings = replace(SMALL, max_salient=4)
    model = HybridForCausalLM.convert(make_model(), settings, budget=[["salient", "full"], ["salient", "salient"]]).eval()
    save(result_of(model), tmp_path)
    card = (tmp_path / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    # there is no tokenizer beside this one
    names: dict[str, object] = {}
    exec(code.replace('"."', repr(str(tmp_path))).replace("tokenizer = ", "# "), names)  # noqa: S102
    tokens = torch.randint(3, 50, (1, 1024))
    loaded: Any = names["model"]
    measured = loaded(tokens, use_cache=True).past_key_values.nbytes
    own, softmax = cache_bytes(model, 1024)
    # counters of each group of heads come on top
    assert own <= measured <= own + 300
    assert softmax == 2 * 2 * 2 * 1024 * 8 * 4
    assert f"| 1,024 | {own / 2**20:.2f} | {softmax / 2**20:.2f} | {own / softmax:.1%} |" in card


@pytest.mark.parametrize(
    ("card", "config", "expected"),
    [
        (
            "---\nlicense: other\nlicense_name: 'own one'\n---\n# A model\nlicense: mit",
            "{}",
            "license: other, license_name: own one",
        ),
        ("# A model\nlicense: mit", '{"license": "apache-2.0"}', "license: apache-2.0"),
        ("", "{}", "names no license"),
    ],
    ids=["card", "config", "neither"],
)
def test_the_card_has_the_license_that_the_teacher_says_it_has(card, config, expected, tmp_path):
    teacher = tmp_path / "models--some-lab--small-model" / "snapshots" / "0123"
    teacher.mkdir(parents=True)
    (teacher / "README.md").write_text(card)
    (teacher / "config.json").write_text(config)
    save(result_of(HybridForCausalLM.convert(make_model(), SMALL)), tmp_path / "out", teacher=teacher)
    text = (tmp_path / "out" / "README.md").read_text()
    assert expected in text.split("## Teacher and license")[1]
    assert 'base_model: "some-lab/small-model"' in text
    assert ("\nlicense: " in text) == ("no license" not in expected)


@CONFIG.of("merge_adapter")
@torch.no_grad()
def test_a_kept_adapter_is_written_beside_weights_that_do_not_hold_it(tokens, tmp_path):
    peft = pytest.importorskip("peft")
    model = adapted()
    with model.disable_adapter():
        bare = model(tokens).logits
    expected = model(tokens).logits
    assert (expected - bare).abs().max() > 1e-2
    save(result_of(model), tmp_path)
    # saving changes nothing in memory
    assert torch.equal(model(tokens).logits, expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(tokens).logits, bare)
    assert 'PeftModel.from_pretrained(model, folder, subfolder="adapter")' in (tmp_path / "README.md").read_text()
    beside = peft.PeftModel.from_pretrained(loaded, tmp_path, subfolder="adapter").eval()
    torch.testing.assert_close(beside(tokens).logits, expected)


@CONFIG.of("merge_adapter")
@torch.no_grad()
def test_a_merged_adapter_is_in_the_weights_alone(tokens, tmp_path):
    model = adapted()
    expected = model(tokens).logits
    # of an earlier save in the same folder
    save(result_of(model), tmp_path)
    save(result_of(model.merge_and_unload()), tmp_path)
    assert not (tmp_path / "adapter").exists()
    assert "adapter" not in (tmp_path / "README.md").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00002-of-00002.safetensors", "pytorch_model.bin"])
def test_other_weights_of_any_format_are_another_model(name, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / name).write_bytes(b"weights")
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "some"}')
    (out / "runs").rename(tmp_path / "aside")
    claim_folder(out, model=model, data=[text], length=8)
    (tmp_path / "aside").rename(out / "runs")
    claim_folder(out, model=model, data=[text], length=8)
    # of one size: only what is in them differs
    (model / name).write_bytes(b"others!")
    with pytest.raises(ValueError, match=rf"weights was .*{name}"):
        claim_folder(out, model=model, data=[text], length=8)


# --- the command --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    texts = [f"item {number} lies in box {number % 7}." * 3 for number in range(60)]
    tokenizer = train_tokenizer(texts, vocab_size=280)
    tokenizer.save_pretrained(str(folder / "model"))
    make_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(folder / "model")
    for name, part in (("a", texts[:30]), ("b", texts[30:])):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in part))
    return folder


def test_every_option_of_the_command_is_seen_to():
    assert COMMAND.missing() == []


@COMMAND.of("model", "settings", "data", "out", "length", "steps", "finetune_steps", "device")
def test_the_command_does_what_its_options_say(pretrained, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    out, lengths = tmp_path / "out", []

    def noting(model, train_data, eval_data, **options):
        lengths.extend(len(data[0]["input_ids"]) for data in (train_data, eval_data))
        return linearize(model, train_data, eval_data, **options)

    monkeypatch.setattr("nalaformer.linearize.linearize", noting)
    arguments = ["linearize", pretrained / "model", "--data", pretrained / "a.jsonl", "--data", pretrained / "b.jsonl"]
    arguments += ["--out", out, "--length", 32, "--steps", 2, "--finetune-steps", 3, "--device", "cpu"]
    arguments += ["chunk_size=8", "gate=head", "lora_rank=2", "lora_alpha=5", "merge_adapter=false", "finetune.batch_size=3"]
    done = CliRunner().invoke(build_app(), [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    adapter = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (2, 5)
    settings = AutoModelForCausalLM.from_pretrained(out).config.settings
    assert (settings.chunk_size, settings.gate, settings.selection) == (8, "head", "learned")
    made_from = json.loads((out / "made_from.json").read_text())
    assert made_from["length"] == 32
    assert [Path(path).name for path in made_from["data"]] == ["a.jsonl", "b.jsonl"]
    figures = json.loads((out / "runs" / "linearize.json").read_text())
    assert (figures["transfer"]["steps"], figures["finetune"]["steps"]) == (2, 3)
    assert figures["finetune"]["batch_size"] == 3
    for stage, steps in (("transfer", 2), ("finetune", 3)):
        assert figures[stage]["device"] == "cpu"
        rows = [json.loads(line) for line in (out / "runs" / stage / "log.jsonl").read_text().splitlines()]
        assert max(row.get("step", 0) for row in rows) == steps
    assert lengths == [32, 32]


def test_settings_that_may_be_none_are_read_as_what_they_are_else():
    config = changed(LinearizeConfig(), ["cache=0.5", "linear_mass=64"])
    assert (config.cache, config.attention.linear_mass) == (0.5, 64)
    config = changed(config, ["cache=none", "linear_mass=None"])
    assert (config.cache, config.attention.linear_mass) == (None, None)
    with pytest.raises(ValueError, match=r"cache must be a number \(float\) or none, got 'half'"):
        changed(config, ["cache=half"])


@COMMAND.of("dry_run")
def test_a_dry_run_says_what_would_be_done_and_writes_nothing(pretrained, tmp_path):
    arguments = ["linearize", pretrained / "model", "--data", pretrained / "a.jsonl", "--out", tmp_path / "out"]
    arguments += ["--steps", 7, "--finetune-steps", 0, "--device", "cpu", "--dry-run"]
    done = CliRunner().invoke(build_app(), [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "transfer: 7 steps of 8" in done.output
    assert "finetune: left out" in done.output
    assert not (tmp_path / "out").exists()
