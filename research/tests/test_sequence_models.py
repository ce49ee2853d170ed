"""Sequence models with every attention, and the task that trains them."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nalaformer.attention import METHODS, build
from nalaformer.feature_maps import FEATURE_MAPS
from nalaformer.recipes import build_model, changed, evaluate_run, make_trainer
from nalaformer.training import TrainingConfig
from nalaformer.training.schedule import make_schedule
from research.models import SEQUENCE_MODELS, RecallModel, SequenceClassifier, sequence_attention, state_size
from research.models.token_embedding import embedding_by_product
from research.recipes import RECIPES
from research.sequence_task import AnswerMetrics, Sequences, SequencesConfig, answer_sums, select_answers
from research.sequences import IGNORE, SEQUENCES, as_tensor, write

pytestmark = pytest.mark.usefixtures("one_thread")
ATTENTIONS = [*METHODS, *FEATURE_MAPS.names()]
LONG_RANGE = [
    *("lra_listops", "lra_listops_sky", "lra_pathfinder", "lra_pathx", "listops_small", "pathfinder_small", "mqar"),
    *("mqar_small", "copying", "induction", "needles", "variables", "pointing", "pointing_control", "majority"),
    *("softmax_teacher", "cue_cells"),
]


def classifier(attention="nalaformer", **options):
    torch.manual_seed(0)
    settings = {"answers": "sequence", "outputs": 5, "length": 23, "vocabulary": 11, "dim": 16, "mlp_dim": 24, "dropout": 0.0}
    return SequenceClassifier(attention=attention, **(settings | options))


def recall(attention="nalaformer", **options):
    torch.manual_seed(0)
    settings = {"answers": "tokens", "outputs": 11, "length": 23, "vocabulary": 11, "dim": 16}
    return RecallModel(attention=attention, **(settings | options))


# ---- models


def test_a_small_backbone_differs_by_the_map_alone_and_counts_what_an_image_costs():
    facts = {"answers": "sequence", "outputs": 10, "length": 28, "channels": 28}
    found = {
        name: SEQUENCE_MODELS["small_backbone"](attention=name, attention_options=options, **facts)
        for name, options in (("relu", {}), ("split", {}), ("softmax", {}), ("mala", {"gate": "none"}))
    }
    assert len({sum(p.numel() for p in model.parameters()) for model in found.values()}) == 1
    costs = {name: model.multiply_adds for name, model in found.items()}
    # stages of 196 and 49 tokens, 64 and 128 channels in heads of 32, two blocks each
    tokens = 196 * 64 + 49 * 128
    assert costs["split"] - costs["relu"] == 2 * (tokens * 2 * 32 + (196 * 2 + 49 * 4) * 32)
    exact = 2 * (2 * 196 * 196 * 64 + 2 * 49 * 49 * 128)
    assert costs["softmax"] - costs["relu"] == exact - 2 * (tokens * 2 * 32 + (196 * 2 + 49 * 4) * 32)
    assert found["mala"](torch.randn(3, 28, 28)).shape == (3, 10)
    assert state_size(found["split"]) == 2 * state_size(found["relu"]) == 2 * 2 * (2 + 4) * 32 * 32
    with pytest.raises(ValueError, match="a backbone names the class of an image"):
        SEQUENCE_MODELS["small_backbone"](answers="sequence", outputs=10, length=28, vocabulary=256)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_method_and_map_classifies_sequences_and_learns(attention):
    model = classifier(attention, is_padded=True)
    tokens, labels = torch.randint(1, 11, (3, 21)), torch.tensor([0, 1, 4])
    tokens[0, 13:] = 0
    assert model(tokens).shape == (3, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        losses.append(torch.nn.functional.cross_entropy(model(tokens), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[0].item() == pytest.approx(np.log(5), abs=0.5)
    assert losses[-1] < 0.3 * losses[0]
    assert all(p.grad is not None for p in model.parameters())


def test_a_causal_recall_model_rejects_weights_from_all_queries():
    with pytest.raises(ValueError, match="looks at all queries, later ones too, and cannot be causal"):
        recall("rala")


@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if name != "rala"])
def test_no_recall_model_sees_later_tokens(attention):
    model = recall(attention)
    tokens = torch.randint(0, 11, (2, 17))
    changed_later = tokens.clone()
    changed_later[:, 9:] = (changed_later[:, 9:] + 1) % 11
    before, after = model(tokens), model(changed_later)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_length_changes_only_the_published_mean(attention):
    model = classifier(attention, is_padded=True, mean_over="visible").double().eval()
    tokens = torch.randint(1, 11, (2, 13))
    padded = torch.cat((tokens, torch.zeros(2, 9, dtype=torch.long)), dim=1)
    assert torch.allclose(model(tokens), model(padded), atol=1e-9)
    published = classifier(attention, is_padded=True).double().eval()
    assert not torch.allclose(published(tokens), published(padded), atol=1e-6)


def test_hidden_zeros_are_a_switch_for_data_without_padding():
    tokens = torch.randint(0, 3, (2, 20))
    assert not torch.allclose(classifier()(tokens), classifier(hide_zero=True)(tokens))


def test_pairs_are_compared_and_their_order_matters():
    model = classifier(answers="pair", outputs=2, is_padded=True)
    pair = torch.randint(1, 11, (3, 2, 20))
    assert model(pair).shape == (3, 2)
    assert not torch.allclose(model(pair), model(pair.flip(1)))


def test_vectors_are_answered_token_by_token_and_only_where_asked():
    model = classifier(answers="tokens", outputs=8, vocabulary=0, channels=7)
    vectors = torch.randn(2, 23, 7)
    at = torch.tensor([[3, 22], [0, 5]])
    everywhere = model(vectors)
    assert everywhere.shape == (2, 23, 8)
    assert torch.allclose(model(vectors, at=at)[1, 1], everywhere[1, 5], atol=1e-6)
    tokens = torch.randint(0, 11, (2, 23))
    assert torch.allclose(recall()(tokens, at=at)[0, 0], recall()(tokens)[0, 3], atol=1e-6)


def test_the_small_protocol_is_the_published_one():
    recipe = RECIPES["lra_listops"]()
    model = build_model(recipe, Sequences(recipe.task).facts())
    assert model.positions.shape == (2048, 64)
    assert len(model.blocks) == 2
    assert model.blocks[0].attention.num_heads == 2
    assert model.blocks[0].attention.head_dim == 32
    assert model.blocks[0].mlp[0].out_features == 128
    assert [layer.out_features for layer in model.head if hasattr(layer, "out_features")] == [128, 10]
    training = recipe.training
    assert (training.steps, training.batch_size, training.learning_rate, training.warmup) == (50_000, 32, 1e-4, 1000)
    assert (training.weight_decay, training.epsilon, training.clip_value, training.schedule) == (0.0, 1e-6, 1.0, "linear")


def test_positions_and_convolutions_inside_attention_are_off_unless_asked_for():
    plain = sequence_attention("nalaformer", dim=16, num_heads=2)
    assert (plain.config.position, plain.config.local_mix, plain.config.gate) == ("none", "none", "silu")
    full = sequence_attention("nalaformer", dim=16, num_heads=2, options={"local_mix": "channels", "direction": "cosine"})
    assert full.local_mix is not None
    assert full.map.direction == "cosine"
    with pytest.raises(ValueError, match="did you mean 'softmax'"):
        sequence_attention("sotfmax", dim=16, num_heads=2)


def test_state_sizes_count_heads_features_and_values_in_all_layers():
    assert state_size(recall("relu")) == 2 * 2 * 8 * 8
    assert state_size(recall("split")) == 2 * 2 * 16 * 8
    assert state_size(recall("softmax")) == 0


def test_models_reject_what_they_cannot_answer():
    with pytest.raises(ValueError, match="use sequence_classifier"):
        recall(answers="sequence")
    with pytest.raises(ValueError, match="at most the 23 tokens"):
        classifier()(torch.zeros(1, 24, dtype=torch.long))
    assert set(SEQUENCE_MODELS.names()) == {"sequence_classifier", "small_backbone", "recall", "one_attention"}


# ---- task


def make_batch(name, count, **options):
    data = SEQUENCES[name](split="train", samples=count, **options)
    return data, {key: as_tensor(array) for key, array in data.batch(range(count)).items()}


class Oracle(torch.nn.Module):
    """Answers an MQAR batch by looking; right for the first `right` samples only."""

    def __init__(self, batch, right):
        super().__init__()
        self.batch, self.right = batch, right

    def forward(self, inputs, at=None):
        logits = torch.zeros(*inputs.shape, 64)
        for row in range(self.right):
            for place in (self.batch["targets"][row] != IGNORE).nonzero()[:, 0]:
                logits[row, place, self.batch["targets"][row, place]] = 9
        logits[self.right :, :, 0] = 1
        return logits if at is None else logits.gather(1, at[..., None].expand(-1, -1, 64))


def test_accuracy_counts_answers_and_every_group_the_same():
    data, batch = make_batch("mqar", 6, vocabulary=64, mixture=[[16, 2], [32, 4]])
    metrics = AnswerMetrics(data.groups, known={"chance": data.chance})
    metrics.update(Oracle(batch, 3), batch)
    result = metrics.result()
    # samples 0 and 2 are of the first kind, 1 of the second
    assert result["accuracy, 16 tokens, 2 pairs"] == pytest.approx(2 / 3)
    assert result["accuracy, 32 tokens, 4 pairs"] == pytest.approx(1 / 3)
    assert result["accuracy"] == pytest.approx(0.5)
    assert result["answers"] == 3 * 2 + 3 * 4
    assert result["chance"] == 2 / 64
    assert next(iter(result)) == "accuracy"


class Shrunk(torch.nn.Module):
    """Answers with a part of the target, or with its mean."""

    def __init__(self, targets, part):
        super().__init__()
        self.targets, self.part = targets, part

    def forward(self, inputs):
        mean = self.targets.mean((0, 1), keepdim=True)
        return mean + self.part * (self.targets - mean)


@pytest.mark.parametrize(("part", "expected"), [(1.0, 1.0), (0.5, 0.75), (0.0, 0.0), (-1.0, -3.0)])
def test_r2_is_1_for_perfect_answers_and_0_for_the_mean(part, expected):
    _, batch = make_batch("softmax_teacher", 6, tokens=7, size=4)
    # a mean that is not zero must not help
    batch["targets"] = batch["targets"] + torch.arange(8.0)
    task = Sequences(SequencesConfig(data="softmax_teacher", data_options={"tokens": 7, "size": 4}))
    metrics = task.metrics()
    for rows in (slice(0, 2), slice(2, 6)):
        some = {name: value[rows] for name, value in batch.items()}
        whole = Shrunk(batch["targets"], part)
        metrics.update(lambda inputs, whole=whole, rows=rows: whole(inputs)[rows], some)
    result = metrics.result()
    assert next(iter(result)) == "R^2"
    assert result["R^2"] == pytest.approx(expected, abs=1e-5)
    mean = batch["targets"].mean((0, 1))
    assert result["loss"] == pytest.approx((1 - part) ** 2 * (batch["targets"] - mean).square().mean().item(), abs=1e-5)
    assert (result["answers"], result["chance"]) == (42, 0)


def test_sums_do_not_depend_on_knowing_the_answer_count():
    data, batch = make_batch("mqar", 6, vocabulary=64, mixture=[[16, 2], [32, 4]])
    asked, known = (answer_sums(Oracle(batch, 3), batch, len(data.groups), most=most) for most in (None, 4))
    assert torch.equal(asked, known)


def test_a_language_is_learned_everywhere_and_judged_at_its_answers():
    options = {"length": 64, "needles": 4, "names": 12, "values": 10, "words": 8}
    data, batch = make_batch("recall_language", 5, **options)
    model = recall(vocabulary=data.facts.vocabulary, outputs=data.facts.vocabulary)
    assert select_answers(model, batch)[1].shape == (5 * 64,)
    logits, targets = select_answers(model, batch, only_answers=True)
    assert (targets != IGNORE).sum() == batch["answers"].sum()
    assert len(logits) == len(targets) < 5 * 64


@pytest.mark.parametrize("name", LONG_RANGE)
def test_every_recipe_describes_a_model_that_fits_its_data(name):
    recipe = changed(RECIPES[name](), ["train_samples=4", "eval_samples=2"])
    task = Sequences(recipe.task)
    model = build_model(recipe, task.facts())
    if name != "lra_pathx":
        batch = {key: as_tensor(array) for key, array in task.train_data.batch(range(2)).items()}
        # an untrained model guesses; of vectors nearly nothing
        guessed = batch["targets"].square().mean() if task.figure.name == "R^2" else np.log(task.facts()["outputs"])
        assert task.loss(model, batch).total.item() == pytest.approx(float(guessed), abs=0.5)


def test_recipes_for_released_files_say_what_is_missing():
    for name in ("lra_text", "lra_retrieval", "lra_image"):
        with pytest.raises(ValueError, match=r"root must be the folder.* name it by data_options="):
            Sequences(RECIPES[name]().task).facts()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("listops", {"shortest": 4, "longest": 24, "max_depth": 3, "max_arguments": 3}),
        ("pathfinder", {"size": 12, "contour": 2, "distractors": 0, "seed_distance": 4}),
        ("pointing", {"keys": 6, "probes": 3, "dimensions": 3}),
        ("pointing_control", {"keys": 56, "probes": 3, "dimensions": 3}),
        ("majority", {"keys": 8, "probes": 3, "dimensions": 3}),
        ("mqar", {"vocabulary": 32, "mixture": [[16, 2]]}),
        ("copying", {"length": 12, "vocabulary": 8}),
        ("induction", {"length": 12, "vocabulary": 8}),
        ("needles", {"length": 48, "needles": 4, "names": 8, "values": 8, "words": 8, "predict": "answers"}),
        ("variables", {"length": 48, "needles": 4, "names": 8, "values": 8, "words": 8, "predict": "answers"}),
    ],
)
def test_a_model_memorizes_a_few_samples(name, options):
    data, batch = make_batch(name, 8, **options)
    facts = vars(data.facts)
    is_vocabulary = facts["answers"] == "tokens" and facts["vocabulary"]
    torch.manual_seed(0)
    model = (RecallModel if is_vocabulary else SequenceClassifier)(attention="softmax", dim=32, dropout=0.0, **facts)
    task = Sequences(SequencesConfig(data=name, data_options=options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(150):
        loss = task.loss(model, batch).total
        if loss.item() < 0.05:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    count, right, _ = answer_sums(model, batch | {"group": torch.zeros(8, dtype=torch.long)}, 1).tolist()
    assert right / count > 0.95


def test_a_recipe_trains_on_written_data_and_is_evaluated_again(tmp_path):
    options = {"shortest": 4, "longest": 24, "max_depth": 3}
    for split, samples in (("train", 32), ("val", 32), ("test", 16)):
        write("listops", tmp_path / "data", split=split, samples=samples, options=options)
    settings = ["steps=3", "batch_size=8", "warmup=1", "device=cpu", f"data={tmp_path / 'data'}", "attention=split"]
    settings.append(f"data_options={json.dumps(options)}")
    outcome = make_trainer(changed(RECIPES["listops_small"](), settings), tmp_path / "run").fit()
    assert outcome.metrics["answers"] == 32
    again = evaluate_run(tmp_path / "run", device="cpu")
    assert again.metrics["accuracy"] == pytest.approx(outcome.metrics["accuracy"])
    assert "chance" in again.metrics
    assert evaluate_run(tmp_path / "run", split="test", device="cpu").metrics["answers"] == 16


# ---- what the protocols ask of the trainer


def test_the_linear_schedule_is_one_cycle():
    config = TrainingConfig(
        steps=50, warmup=10, learning_rate=1.0, schedule="linear", warmup_learning_rate=0.04, min_learning_rate=0.0
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(config, optimizer, steps_per_epoch=7)
    rates = []
    for step in range(50):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(0.04)
    assert rates[10] == pytest.approx(1.0)
    assert rates[30] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(1 / 40)
    steps = np.diff(rates)
    assert np.allclose(steps[:10], steps[0])
    assert np.allclose(steps[10:], steps[10])


def test_the_default_schedule_is_still_the_cosine():
    assert TrainingConfig(steps=1).schedule == "cosine"
    config = TrainingConfig(steps=40, learning_rate=1.0, min_learning_rate=0.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(config, optimizer, steps_per_epoch=7)
    rates = []
    for step in range(40):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([(1 + np.cos(np.pi * step / 40)) / 2 for step in range(40)])
    assert all(later < sooner for sooner, later in pairwise(rates))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"schedule": "linera"}, "did you mean 'linear'"), ({"clip_value": -1.0}, "clip_value"), ({"epsilon": 0.0}, "epsilon")],
)
def test_wrong_protocol_settings_raise(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(steps=1, **options)


@pytest.mark.parametrize("shape", [(3, 9), (5,), (2, 0)], ids=str)
def test_the_embedding_gradient_by_product_equals_torch(shape):
    tokens, weight = torch.randint(0, 7, shape), torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    rows = embedding_by_product(tokens, weight)
    assert torch.equal(rows, F.embedding(tokens, weight))
    given = torch.randn_like(rows)
    torch.testing.assert_close(
        *(torch.autograd.grad((x * given).sum(), weight)[0] for x in (rows, F.embedding(tokens, weight)))
    )


def test_the_embedding_gradient_computes_in_the_autocast_dtype():
    tokens, weight = torch.randint(0, 7, (3, 9)), torch.randn(7, 4, requires_grad=True)
    given = torch.randn(3, 9, 4)
    with torch.autocast("cpu", torch.bfloat16):
        rows = embedding_by_product(tokens, weight)
    assert rows.dtype == torch.float32
    (found,) = torch.autograd.grad((rows * given).sum(), weight)
    (exact,) = torch.autograd.grad((F.embedding(tokens, weight) * given).sum(), weight)
    assert found.dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found, exact, rtol=0.03, atol=0.05)


def test_mixed_states_count_for_each_block():
    model = torch.nn.Sequential(build("linear", dim=16, num_heads=2, mixed_blocks=(2, 3)))
    assert state_size(model) == 6 * 2 * 8 * 8
