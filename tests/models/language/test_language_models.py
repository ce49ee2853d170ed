"""Language models in transformers: what they compute does not depend on padding, packing, precision or who trains them."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.language_models import LAYOUTS, VOCABULARY, each_layout, make, text
from helpers.products import FULL
from nalaformer.models.language import (
    MIXER_NAMES,
    NaLaConfig,
    NaLaForCausalLM,
    NaLaForSequenceClassification,
    NaLaModel,
)
from nalaformer.models.language.config import DECAY_MIXERS
from nalaformer.training.trainer import checkpoint_activations

pytestmark = pytest.mark.usefixtures("one_thread")


@each_layout
def test_logits_ignore_later_tokens(layout):
    model, tokens = make(layout), text(2, 70)
    with torch.no_grad():
        before = model(tokens).logits
        tokens[:, 50:] = (tokens[:, 50:] + 1) % VOCABULARY
        after = model(tokens).logits
    assert (after[:, 50:] - before[:, 50:]).abs().amax() > 1e-3
    torch.testing.assert_close(after[:, :50], before[:, :50], rtol=0, atol=1e-12)


@each_layout
def test_logits_depend_on_the_order_of_tokens(layout):
    model, tokens = make(layout), text(1, 30)
    turned = torch.cat((tokens[:, :27].flip(1), tokens[:, 27:]), dim=1)
    assert (model(tokens).logits[:, -1] - model(turned).logits[:, -1]).abs().amax() > 1e-6


@each_layout
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_real_token(layout, side):
    model, lengths = make(layout), (70, 33, 1)
    rows = [text(1, length) for length in lengths]
    padded, mask = text(3, 70), torch.zeros(3, 70, dtype=torch.int64)
    places = [slice(70 - n, 70) if side == "left" else slice(0, n) for n in lengths]
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        padded[number, place], mask[number, place] = row[0], 1
    with torch.no_grad():
        together = model(padded, attention_mask=mask).logits
        for number, (row, place) in enumerate(zip(rows, places, strict=True)):
            torch.testing.assert_close(together[number, place], model(row).logits[0], rtol=0, atol=1e-10)


# whether the mask has numbers to look at is asked once for all mixers
COMPILED = LAYOUTS if FULL else ["hybrid"]


@pytest.mark.parametrize(
    ("how", "layout"),
    [*product(("at once", "after a cache"), LAYOUTS), *product(("compiled",), COMPILED)],
)
def test_padding_between_real_tokens_changes_none_of_them(layout, how):
    """A second turn of a padded batch: the rows begin and go on at different tokens."""
    model, rows = make(layout), [text(1, 24), text(1, 19)]
    padded, mask = text(2, 30), torch.zeros(2, 30, dtype=torch.bool)
    # a cut after 13 tokens; the first row has padding behind it, the second in front of both turns
    for number, places in enumerate(([*range(13), *range(17, 28)], [*range(4, 13), *range(20, 30)])):
        padded[number, places], mask[number, places] = rows[number][0], True
    if how == "after a cache":
        with torch.no_grad():
            first = model(padded[:, :13], attention_mask=mask[:, :13], use_cache=True)
            second = model(padded[:, 13:], attention_mask=mask, past_key_values=first.past_key_values)
            token = text(2, 1)
            ended = torch.cat((mask, torch.ones(2, 1, dtype=torch.bool)), dim=1)
            step = model(token, attention_mask=ended, past_key_values=second.past_key_values).logits
        rows = [torch.cat((row, last[None]), dim=1) for row, last in zip(rows, token, strict=True)]
        together, mask = torch.cat((first.logits, second.logits, step), dim=1), ended
    else:
        run = torch.compile(model, backend="eager") if how == "compiled" else model
        together = run(padded, attention_mask=mask, use_cache=False).logits
    for number, row in enumerate(rows):
        torch.testing.assert_close(together[number, mask[number]], model(row).logits[0], rtol=0, atol=1e-10)


@each_layout
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens_q"])
def test_packed_sequences_do_not_see_each_other(layout, how):
    model, lengths = make(layout), (33, 1, 2, 70)
    rows = [text(1, length) for length in lengths]
    packed = torch.cat(rows, dim=1)
    if how == "position_ids":
        places = {how: torch.cat([torch.arange(length) for length in lengths])[None]}
    else:
        places = {how: torch.tensor([0, *lengths]).cumsum(0)}
    with torch.no_grad():
        together = model(packed, **places).logits.split(lengths, dim=1)
        for part, row in zip(together, rows, strict=True):
            torch.testing.assert_close(part, model(row).logits, rtol=0, atol=1e-10)


def test_packing_is_what_the_collator_of_transformers_gives():
    from transformers import DataCollatorWithFlattening

    model = make("hybrid")
    rows = [text(length) for length in (9, 5, 20)]
    batch = DataCollatorWithFlattening()([{"input_ids": row.tolist()} for row in rows])
    alone = sum(model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows) / sum(len(row) - 1 for row in rows)
    torch.testing.assert_close(model(**batch).loss, alone)


def test_packing_with_padding_is_refused():
    model, tokens = make(), text(2, 6)
    positions, mask = torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.tensor([[1] * 6, [1] * 5 + [0]])
    with pytest.raises(ValueError, match="exclude each other"):
        model(tokens, position_ids=positions, attention_mask=mask)
    with pytest.raises(ValueError, match="packed sequences leave no state"):
        model(tokens, position_ids=positions, use_cache=True)


@pytest.mark.parametrize(
    "packing", [{"cu_seq_lens_q": torch.tensor([0, 5, 10])}, {"position_ids": torch.arange(5).repeat(2)[None]}]
)
def test_packing_whose_second_sequence_begins_with_padding_is_refused(packing):
    mask = torch.ones(1, 10, dtype=torch.int64)
    mask[:, 5] = 0
    with pytest.raises(ValueError, match="exclude each other"):
        make()(text(1, 10), attention_mask=mask, use_cache=False, **packing)


def test_packing_after_a_cache_is_refused():
    model = make()
    cache = model(text(1, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="need an empty cache, got cu_seq_lens_q after 4 tokens"):
        model(text(1, 6), past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match="need an empty cache, got position_ids that begin again after 4 tokens"):
        model(text(1, 6), past_key_values=cache, position_ids=torch.tensor([[4, 5, 0, 1, 2, 3]]))
    assert cache.get_seq_length() == 4


@pytest.mark.parametrize("head", [NaLaModel, NaLaForCausalLM, NaLaForSequenceClassification])
def test_packing_that_is_told_by_numbers_of_sequences_alone_is_refused(head):
    from transformers import DataCollatorWithFlattening

    model = head(make().config)
    for told in (False, True):
        collate = DataCollatorWithFlattening(return_position_ids=told, return_seq_idx=True)
        batch = collate([{"input_ids": text(length).tolist()} for length in (9, 5)])
        batch.pop("labels")
        if told:
            model(**batch, use_cache=False)
        else:
            with pytest.raises(ValueError, match="got seq_idx alone"):
                model(**batch, use_cache=False)


@each_layout
def test_half_precision_keeps_a_float32_state_and_stays_near_float64(layout):
    exact = make(layout)
    model, tokens = copy.deepcopy(exact).to(torch.bfloat16), text(2, 40)
    with torch.no_grad():
        expected, out = exact(tokens).logits, model(tokens)
    states = {name: x for name, x in out.past_key_values.tensors().items() if name.endswith(("state", "key_sum"))}
    assert all(x.dtype == torch.float32 for x in states.values())
    # weights of 8 bits through two blocks: rounding alone moves the logits by a few percent
    assert (out.logits - expected).norm() / expected.norm() < 0.05


@each_layout
def test_gradients_are_those_of_finite_differences(layout):
    model, tokens = make(layout).train(), text(1, 9)

    def loss() -> torch.Tensor:
        # transformers computes its loss in float32, too coarse for differences
        return torch.nn.functional.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:])

    loss().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
    direction = [torch.randn_like(p) for p in model.parameters()]
    slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), direction, strict=True))
    losses = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(step * d)
            losses.append(loss())
    torch.testing.assert_close((losses[0] - losses[1]) / 2e-6, slope, rtol=1e-5, atol=1e-8)


@each_layout
def test_gradient_checkpointing_gives_the_same_gradients(layout):
    model, tokens = make(layout).train(), text(2, 20)
    model(tokens, labels=tokens).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    checkpoint_activations(model)
    model(tokens, labels=tokens).loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    assert model(tokens, use_cache=True).past_key_values is None
    cache = model.eval()(tokens).past_key_values
    with pytest.raises(ValueError, match="cannot continue from a cache"):
        model.train()(tokens, past_key_values=cache)


@each_layout
def test_saved_models_are_loaded_by_the_auto_classes(layout, tmp_path):
    model, tokens = make(layout, dtype=torch.float32), text(2, 20)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is NaLaForCausalLM
    assert loaded.config.layer_mixers == model.config.layer_mixers
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is NaLaModel
    torch.testing.assert_close(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state, rtol=0, atol=0)
    halved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert halved.dtype == torch.bfloat16
    decays = [p for name, p in halved.named_parameters() if "A_log" in name or "dt_bias" in name]
    assert all(p.dtype == torch.float32 for p in decays)


def test_untied_embeddings_are_two_matrices(tmp_path):
    model = make(tie_word_embeddings=False, dtype=torch.float32)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.lm_head.weight, model.lm_head.weight, rtol=0, atol=0)


@pytest.mark.parametrize("mixers", MIXER_NAMES)
def test_new_models_start_near_the_loss_of_guessing(mixers):
    model, tokens = NaLaForCausalLM(NaLaConfig.from_size("nano", vocab_size=VOCABULARY, mixers=mixers)), text(4, 50)
    guessing = torch.log(torch.tensor(float(VOCABULARY)))
    assert abs(model(tokens, labels=tokens).loss - guessing) < 0.2


@pytest.mark.parametrize("mixers", DECAY_MIXERS)
def test_new_parameters_of_maps_and_decays_are_not_overwritten(mixers):
    """transformers draws all weights of a new model again; ours must keep the starts that their papers give them."""
    options = {"feature_map": "hedgehog", "mixers": mixers}
    model = NaLaForCausalLM(NaLaConfig.from_size("nano", vocab_size=VOCABULARY, **options))
    for block in model.model.layers:
        assert torch.equal(block.mixer.map.query_weight, torch.eye(32).repeat(2, 1, 1))
        assert block.mixer.A_log.exp().min() >= 1
        assert block.mixer.A_log.exp().max() <= 16
        steps = torch.nn.functional.softplus(block.mixer.dt_bias)
        assert steps.min() >= 0.999e-3
        assert steps.max() <= 0.1001
        assert block.mixer.convolution.weight.abs().max() <= 0.5
        assert block.mixer.convolution.weight.std() > 0.2


@pytest.mark.parametrize(("before", "after"), [("linear", "forgetting"), ("delta", "gated_delta")])
def test_a_saved_model_that_learns_to_forget_gets_the_start_of_new_decays(before, after, tmp_path):
    """Weights that a folder lacks are made by transformers, from memory that may hold anything."""
    saved = make(mixers=before, dtype=torch.float32)
    saved.save_pretrained(tmp_path)
    loaded = NaLaForCausalLM.from_pretrained(tmp_path, mixers=after)
    assert torch.equal(loaded.model.layers[1].mixer.qkv_proj.weight, saved.model.layers[1].mixer.qkv_proj.weight)
    for block in loaded.model.layers:
        rates, steps = block.mixer.A_log.exp(), torch.nn.functional.softplus(block.mixer.dt_bias)
        assert ((rates >= 1) & (rates <= 16)).all()
        assert ((steps >= 0.999e-3) & (steps <= 0.1001)).all()
        assert block.mixer.a_proj.weight.std() < 0.1


@pytest.mark.parametrize("side", ["left", "right"])
def test_sequences_are_classified_by_their_last_real_token(side, tmp_path):
    config = NaLaConfig.from_size("nano", vocab_size=VOCABULARY, num_labels=3, mixers=["delta", "softmax"])
    model = NaLaForSequenceClassification(config).double().eval()
    row, padded, mask = text(1, 7), text(2, 12), torch.ones(2, 12, dtype=torch.int64)
    place = slice(5, 12) if side == "left" else slice(0, 7)
    padded[0, place], mask[0] = row[0], 0
    mask[0, place] = 1
    out = model(padded, attention_mask=mask, labels=torch.tensor([0, 2]))
    torch.testing.assert_close(out.logits[:1], model(row).logits)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, torch.tensor([0, 2])))
    model.float().save_pretrained(tmp_path)
    assert type(AutoModelForSequenceClassification.from_pretrained(tmp_path)) is NaLaForSequenceClassification


# those that decay do all that the others do
@pytest.mark.parametrize("mixers", [["forgetting", "gated_delta"], *([["linear", "softmax"]] * FULL)], ids="+".join)
def test_training_step_is_one_graph(mixers):
    model, tokens = make(mixers=mixers, dtype=torch.float32).train(), text(2, 70)
    torch._dynamo.reset()

    def step(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens, labels=tokens).loss

    expected = step(tokens)
    expected.backward()
    gradient = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    loss = torch.compile(step, backend="aot_eager", fullgraph=True)(tokens)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tokens", [torch.arange(5), torch.zeros(1, 0, dtype=torch.int64)])
def test_tokens_of_another_shape_are_refused(tokens):
    with pytest.raises(ValueError, match=r"input_ids must be \[batch, tokens\] with at least one token.*input_ids\[None\]"):
        make()(tokens)


def test_another_packing_compiles_nothing():
    from torch._dynamo.testing import CompileCounter

    model, counter = make(mixers=["forgetting", "gated_delta"], dtype=torch.float32), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter)
    counts = []
    for cuts in ([6, 24], [3, 9, 18], [1, 2, 7, 20], [5, 5, 5, 5, 10], [29, 1]):
        tokens = text(1, 30)
        positions = torch.cat([torch.arange(length) for length in cuts])[None]
        torch.testing.assert_close(
            compiled(tokens, position_ids=positions).logits, model(tokens, position_ids=positions).logits, rtol=1e-4, atol=1e-5
        )
        counts.append(counter.frame_count)
    assert counts[1] == counts[-1]


def test_adapters_of_peft_learn_and_leave_the_model_alone():
    peft = pytest.importorskip("peft")
    model, tokens = make("hybrid", dtype=torch.float32), text(4, 20)
    before = {name: p.clone() for name, p in model.named_parameters()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["qkv_proj", "o_proj"], task_type="CAUSAL_LM"))
    adapted.train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = adapted(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    after = adapted.unload()
    assert all(torch.equal(p, before[name]) for name, p in after.named_parameters())


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"ignore_index": 3},
        {"shift_labels": torch.arange(22).view(2, 11)},
    ],
)
def test_loss_without_logits_is_that_of_transformers(more):
    model, tokens = make(), text(2, 11)
    tokens[0, 3] = 3
    labels = tokens.clone()
    labels[0, :2] = -100

    def outcome() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(tokens, labels=torch.where(labels < 0, more.get("ignore_index", -100), labels), **more).loss
        loss.backward()
        return [loss.double(), *(parameter.grad for parameter in model.parameters())]

    expected = outcome()
    model.train()
    # transformers computes in float32
    for ours, theirs in zip(outcome(), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("change", ["hook", "adapter", "loss"])
def test_whoever_changed_the_head_or_the_loss_is_asked(change):
    model, tokens = make(dtype=torch.float32).train(), text(2, 11)
    asked = []
    if change == "hook":
        model.lm_head.register_forward_hook(lambda *given: asked.append(change))
    elif change == "adapter":
        inner = model.lm_head
        model.lm_head = torch.nn.Sequential(inner)
        inner.register_forward_hook(lambda *given: asked.append(change))
    else:
        model.loss_function = lambda logits, labels, **more: asked.append(change) or logits.sum()
    model(tokens, labels=tokens).loss.backward()
    assert asked == [change]


def test_hooks_of_projections_and_norms_are_called():
    model, tokens = make(dtype=torch.float32), text(1, 5)
    called = []
    block = model.model.layers[0]
    for name in ("mlp.down_proj", "mlp_norm"):
        block.get_submodule(name).register_forward_hook(lambda *given, name=name: called.append(name))
    expected = make(dtype=torch.float32)
    expected.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits)
    assert called == ["mlp_norm", "mlp.down_proj"]


def test_trainer_of_transformers_evaluates_with_logits(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = make("hybrid", dtype=torch.float32)
    rows = [{"input_ids": row, "labels": row} for row in text(4, 12)]
    arguments = TrainingArguments(
        tmp_path, max_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True, eval_strategy="steps", eval_steps=1
    )
    shapes = []

    def measure(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {}

    Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=measure).train()
    assert shapes == [(4, 12, VOCABULARY)]


def test_trainer_of_transformers_lowers_the_loss(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = make("hybrid", dtype=torch.float32)
    rows = [{"input_ids": row, "labels": row} for row in text(1, 24).expand(32, 24)]
    arguments = TrainingArguments(
        tmp_path, max_steps=10, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True, logging_steps=1
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 2


def test_counted_sizes_are_those_of_the_names():
    counts = {}
    for name in ("340m", "1.3b"):
        for mixers in ("linear", "softmax"):
            with torch.device("meta"):
                model = NaLaForCausalLM(NaLaConfig.from_size(name, mixers=mixers))
            counts[name, mixers] = sum(p.numel() for p in model.parameters())
    assert counts["340m", "linear"] == 366_561_792
    assert counts["340m", "softmax"] == 341_099_520
    assert counts["1.3b", "linear"] == 1_400_016_384
    assert counts["1.3b", "softmax"] == 1_298_761_728


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": "softmaxx"}, "did you mean 'softmax'"),
        ({"mixers": ["linear"]}, "one for each of the 2 layers"),
        ({"feature_map": "norm_awear"}, "did you mean 'norm_aware'"),
        ({"map_options": {"dirction": "split"}}, "did you mean 'direction'"),
        ({"mixers": "delta", "feature_map": "polarity"}, "one stream"),
        ({"hidden_size": 65}, "multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"short_convolution": -1}, "or 0 for none"),
        ({"mixers": "softmax", "head_dim": 5}, "even head_dim"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        NaLaConfig.from_size("nano", **changes)
    with pytest.raises(ValueError, match="unknown size"):
        NaLaConfig.from_size("huge")


def test_wrong_inputs_are_named():
    model, tokens = make(), text(2, 6)
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(tokens, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="position_ids must have"):
        model(tokens, position_ids=torch.arange(5)[None])
    with pytest.raises(ValueError, match="either as input_ids or as inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="cu_seq_lens_q must end"):
        model(tokens, cu_seq_lens_q=torch.tensor([0, 5]))


def test_config_alone_is_known_by_its_model_type():
    assert type(AutoConfig.for_model("nala", vocab_size=7)) is NaLaConfig


@pytest.mark.parametrize("more", ["attention_mask", "position_ids"])
def test_tensors_without_numbers_have_the_shapes_of_a_training_step(more):
    """As whoever estimates memory calls it: nothing looks at numbers that are not there."""
    settings = NaLaConfig.from_size("nano", vocab_size=50, mixers=list(MIXER_NAMES), num_hidden_layers=len(MIXER_NAMES))
    for place in (torch.device("meta"), FakeTensorMode()):
        with place:
            model, tokens = NaLaForCausalLM(settings), torch.ones(2, 70, dtype=torch.int64)
            inputs = {"attention_mask": tokens, "position_ids": torch.arange(70)[None]}
            assert model.eval()(tokens, **{more: inputs[more]}).logits.shape == (2, 70, 50)
            model.train()(tokens, labels=tokens, **{more: inputs[more]}).loss.backward()
            assert model.model.embed_tokens.weight.grad.shape == (50, 64)
