"""Language models in the trainer: what is minimised, what a killed run comes back to, what is left at the end."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from helpers.language_recipe import MODEL, recipe_of
from helpers.places import TESTS
from nalaformer import cli
from nalaformer.data.text import IGNORED, Tales, fingerprint, load_tokenizer, train_tokenizer
from nalaformer.recipes import RECIPES, build_model, changed, evaluate_run, export_run, load_run, make_trainer, recipe_words
from nalaformer.tasks import LanguageConfig, LanguageModelling
from nalaformer.tasks.language import next_token_losses
from nalaformer.training import Checkpoints
from nalaformer.training.log import read_log

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language") / "run"
    make_trainer(recipe_of(), folder).fit()
    return folder


def model_of(task, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return task.create_model("nano", sizes | options, task.facts())


def small_task(**settings):
    config = LanguageConfig(data="tales", window=48, train_documents=40, eval_documents=5, vocab_size=300)
    return LanguageModelling(replace(config, **settings))


def batch_of(data, indices):
    samples = [data[index] for index in indices]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


# ---- what is minimised


@pytest.mark.parametrize("attention", ["linear", "forgetting", "delta", "gated_delta", "softmax"])
def test_documents_that_are_packed_have_the_losses_of_documents_alone(attention):
    task = small_task(packing="whole", window=400)
    model = model_of(task, attention=attention).double().eval()
    data = task.eval_data
    assert any((data[i]["position_ids"] == 0).sum() > 2 for i in range(len(data)))
    packed = sum(next_token_losses(model, batch_of(data, [i]))[0].double() for i in range(len(data)))
    alone = torch.zeros((), dtype=torch.float64)
    (shard,) = data.data.shards
    for start, end in zip([0, *shard.ends[:-1]], shard.ends, strict=True):
        tokens = torch.tensor(shard.tokens[start:end].astype(int))[None]
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        alone += F.cross_entropy(logits[0].double(), tokens[0, 1:], reduction="sum")
    # the losses are summed in float32
    assert packed.item() == pytest.approx(alone.item(), rel=1e-6)


def test_the_loss_is_the_mean_over_predicted_tokens_and_weighs_as_many():
    task = small_task()
    model = model_of(task)
    batch = batch_of(task.train_data, [0, len(task.train_data) - 1])
    loss = task.loss(model, batch)
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits.double()
    kept = batch["targets"] != IGNORED
    # the last window is not full: a mean of the means of rows would be another figure
    assert kept.sum(1)[0] != kept.sum(1)[1]
    expected = -logits.log_softmax(-1)[kept].gather(1, batch["targets"][kept][:, None]).mean()
    assert loss.weight == kept.sum().item()
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_batch_in_which_nothing_is_predicted_weighs_nothing():
    task = small_task()
    batch = batch_of(task.train_data, [0, 1])
    batch["targets"] = torch.full_like(batch["targets"], IGNORED)
    loss = task.loss(model_of(task), batch)
    assert (loss.weight, loss.total.item()) == (0, 0)


def test_a_step_in_which_nothing_is_predicted_is_skipped(tmp_path):
    trainer = make_trainer(recipe_of(), tmp_path)
    loss = trainer.task.loss

    def without_targets(model, batch):
        if trainer.progress.step == 3:
            batch = batch | {"targets": torch.full_like(batch["targets"], IGNORED)}
        return loss(model, batch)

    trainer.task.loss = without_targets
    outcome = trainer.fit()
    assert (outcome.is_finished, outcome.skipped_steps) == (True, 1)


def test_accumulation_changes_nothing_but_rounding(tmp_path):
    for name, parts in (("a", 1), ("b", 4)):
        make_trainer(recipe_of("optimizer=sgd", "steps=4", f"accumulate={parts}"), tmp_path / name).fit()
    ours, theirs = ([row["loss"] for row in read_log(tmp_path / name / "log.jsonl") if row["kind"] == "step"] for name in "ab")
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_perplexity_and_bits_per_byte_are_those_of_the_whole_text():
    task = small_task()
    model = model_of(task).eval()
    metrics = task.metrics()
    for index in range(len(task.eval_data)):
        metrics.update(model, batch_of(task.eval_data, [index]))
    result = metrics.result()
    count = result["tokens"]
    assert count == task.eval_data.data.tokens - task.eval_data.data.documents
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    size = sum(len(tale.encode()) for tale in task.tales("val"))
    assert result["bits_per_byte"] == pytest.approx(result["loss"] * count / size / math.log(2))
    assert next(iter(result)) == "log_likelihood"


def test_a_language_model_learns(tmp_path):
    make_trainer(recipe_of("steps=40", "learning_rate=1e-2", "eval_every=0"), tmp_path).fit()
    losses = [row["loss"] for row in read_log(tmp_path / "log.jsonl") if row["kind"] == "step"]
    # it starts at the uniform guess
    assert losses[0] == pytest.approx(math.log(300), rel=0.05)
    assert losses[-1] < 0.75 * losses[0]


# ---- resume

PROGRAM = """
import sys, time
import torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(1)
from helpers.language_recipe import recipe_of
from nalaformer.recipes import make_trainer
trainer = make_trainer(recipe_of(), sys.argv[2])
loss = trainer.task.loss
def slow(model, batch):
    time.sleep(float(sys.argv[3]))
    return loss(model, batch)
trainer.task.loss = slow
print(trainer.fit().step)
"""


def start(folder, seconds):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(TESTS), str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(trained, tmp_path):
    process = start(tmp_path, 0.3)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        rows = read_log(tmp_path / "log.jsonl")
        if rows and rows[-1]["step"] >= 7:
            break
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert Checkpoints(tmp_path / "checkpoints").steps() == [5]
    make_trainer(recipe_of(), tmp_path).fit()
    assert read_log(tmp_path / "log.jsonl") == read_log(trained / "log.jsonl")
    ours, theirs = (Checkpoints(folder / "checkpoints").load(10) for folder in (tmp_path, trained))
    assert ours.state == theirs.state
    for part in ("model", "optimizer"):
        assert all(torch.equal(value, theirs.tensors[part][name]) for name, value in ours.tensors[part].items())


# ---- names, sizes and tokenizers


def test_attention_names_the_mixers():
    task = small_task()
    assert model_of(task, attention="softmax").config.mixers == "softmax"
    # several are taken in turn
    mixers = model_of(task, attention="gated_delta,softmax", num_hidden_layers=3).config.mixers
    assert mixers == ["gated_delta", "softmax", "gated_delta"]
    with pytest.raises(ValueError, match="unknown mixer 'linaer'; did you mean 'linear'"):
        model_of(task, attention="linaer")
    with pytest.raises(ValueError, match="give one of them"):
        model_of(task, attention="linear", mixers=["softmax", "linear"])
    with pytest.raises(ValueError, match="unknown setting 'mixer'; did you mean 'mixers'"):
        model_of(task, mixer="softmax")
    with pytest.raises(ValueError, match="unknown size 'nan'; did you mean 'nano'"):
        task.create_model("nan", {}, task.facts())


def test_data_that_is_nowhere_says_how_it_is_made(tmp_path):
    with pytest.raises(ValueError, match="data must be a folder that `nalaformer tokenize` wrote, or 'tales', got 'nowhere'"):
        LanguageModelling(LanguageConfig(data="nowhere")).facts()
    (tmp_path / "texts").mkdir()
    with pytest.raises(ValueError, match="texts without tokenizer/; `nalaformer tokenize"):
        LanguageModelling(LanguageConfig(data=str(tmp_path / "texts"))).facts()


def test_a_token_that_ends_documents_is_no_padding():
    """Its embedding would never learn."""
    task = small_task()
    assert task.tokenizer.pad_token_id == task.tokenizer.eos_token_id
    model = model_of(task)
    assert model.get_input_embeddings().padding_idx is None


@pytest.fixture
def corpus(tmp_path):
    """Tokens of a folder, and the command that reads them."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": tale}) + "\n" for tale in Tales(split="train", documents=60)))
    run = CliRunner().invoke(
        cli.build_app(), ["tokenize", str(file), "--train-vocab", "280", "--val-part", "0.2", "--out", str(tmp_path / "tokens")]
    )
    assert run.exit_code == 0, run.output
    return tmp_path / "tokens"


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [(290, r"made with \(280 entries\), got 290"), (280, "another tokenizer of the same size")],
)
def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(corpus, tmp_path, vocab_size, message):
    train_tokenizer(Tales(split="val", documents=9), vocab_size=vocab_size).save_pretrained(str(tmp_path / "other"))
    task = LanguageModelling(LanguageConfig(data=str(corpus), window=32, tokenizer=str(tmp_path / "other")))
    with pytest.raises(ValueError, match=message):
        task.train_data  # noqa: B018


def test_text_is_tokenized_trained_on_evaluated_and_exported(corpus, tmp_path):
    run = lambda *arguments: CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])  # noqa: E731
    settings = ("model=nano", MODEL, "window=32", "steps=4", "warmup=1", "batch_size=4", "precision=float32", "workers=0")
    result = run("train", "lm_text", f"data={corpus}", *settings, "device=cpu", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    result = run("eval", tmp_path / "run", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "bits_per_byte" in result.output
    result = run("export", tmp_path / "run", "--out", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert fingerprint(load_tokenizer(tmp_path / "model")) == fingerprint(load_tokenizer(corpus / "tokenizer"))


# ---- what is left


def test_an_exported_run_is_the_same_model_to_transformers(trained, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = export_run(trained, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)("Ada took the red box.", return_tensors="pt")["input_ids"]
    run = load_run(trained)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, run.model(tokens).logits)
    assert (model.config.eos_token_id, model.config.max_position_embeddings) == (0, 48)


def test_a_run_is_not_exported_with_another_tokenizer_or_over_a_folder(trained, tmp_path):
    train_tokenizer(["x"], vocab_size=257).save_pretrained(str(tmp_path / "other"))
    with pytest.raises(ValueError, match="the tokenizer that it was trained with, got another with 257 entries"):
        export_run(trained, tmp_path / "model", tokenizer=tmp_path / "other")
    with pytest.raises(ValueError, match="must not exist or be an empty folder"):
        export_run(trained, tmp_path / "other")
    assert not (tmp_path / "model").exists()


def test_a_run_of_another_task_is_not_exported(tmp_path):
    recipe = changed(RECIPES["cue_grid"](), ["steps=1", "warmup=0", "batch_size=4", "eval_samples=4", "device=cpu"])
    make_trainer(recipe, tmp_path / "run").fit()
    with pytest.raises(ValueError, match="a run that has learned language can be exported"):
        export_run(tmp_path / "run", tmp_path / "model")


def test_evaluation_of_a_run_gives_the_figures_of_its_training(trained):
    last = [row for row in read_log(trained / "log.jsonl") if row["kind"] == "eval"][-1]
    result = evaluate_run(trained, step=10, device="cpu")
    assert result.metrics["perplexity"] == last["perplexity"]


def test_a_pretrained_folder_is_trained_on_with_its_own_vocabulary(trained, tmp_path, capsys):
    folder = export_run(trained, tmp_path / "model")
    rows = [{"prompt": f"What is {number}? ", "response": "A number."} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["tokenize", tmp_path / "a.jsonl", "--tokenizer", folder, "--val-part", "0.2", "--out", tmp_path / "tokens"]
    assert CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments]).exit_code == 0
    settings = [f"model={folder}", "attention=", f"data={tmp_path / 'tokens'}", "packing=whole", "window=32", "steps=2"]
    settings += ["warmup=0", "batch_size=4", "precision=float32", "workers=0", "device=cpu"]
    recipe = changed(RECIPES["lm_text"](), settings)
    capsys.readouterr()
    trainer = make_trainer(recipe, tmp_path / "run")
    assert "Loading weights" not in capsys.readouterr().err
    before = load_run(trained).model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.fit().is_finished
    with pytest.raises(ValueError, match=r"must know every token of the tokenizer \(400\), got 300"):
        LanguageModelling.create_model(str(folder), {}, trainer.task.facts() | {"vocab_size": 400})
    with pytest.raises(ValueError, match="made with the tokenizer of the model"):
        LanguageModelling.create_model(str(folder), {}, trainer.task.facts() | {"tokenizer": "another"})


def test_activations_can_be_computed_again_instead_of_kept(trained, tmp_path):
    make_trainer(recipe_of("checkpoint_activations=true"), tmp_path).fit()
    ours, theirs = (read_log(folder / "log.jsonl") for folder in (tmp_path, trained))
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-6)


@pytest.mark.parametrize("name", ["nala_lm_340m", "nala_lm_340m_delta", "nala_lm_340m_gated_delta"])
def test_the_recipes_of_the_paper_read_15_billion_tokens_half_a_million_at_a_time(name):
    recipe = RECIPES[name]()
    tokens = recipe.training.batch_size * recipe.task.window
    assert tokens == 2**19
    assert tokens * recipe.training.steps == pytest.approx(15e9, rel=1e-4)
    assert "not measured" in recipe_words(name)
    assert recipe.attention == name.removeprefix("nala_lm_340m").lstrip("_") or recipe.attention == "linear"


@pytest.mark.parametrize("name", [name for name in RECIPES.names() if isinstance(RECIPES[name]().task, LanguageConfig)])
def test_the_model_of_every_recipe_can_be_built(name):
    facts = {"vocab_size": 32_000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "tokenizer": "", "window": 2048}
    with torch.device("meta"):
        model = build_model(RECIPES[name](), facts)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count > 1_000_000
    if name.startswith("nala_lm_340m"):
        assert count == pytest.approx(340e6, rel=0.15)


def test_losses_of_training_and_evaluation_are_the_same():
    """In training the model sums them itself, without the logits of all tokens."""
    task = small_task()
    model, batch, found = model_of(task), batch_of(task.train_data, [0, 1]), []
    for is_training in (True, False):
        model.zero_grad()
        losses, count = next_token_losses(model.train(is_training), batch)
        losses.backward()
        found.append((losses.item(), count.item(), model.lm_head.weight.grad.norm().item()))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
