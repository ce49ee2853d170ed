"""transformers' own suites (models, generation, causal language models, training) over our language models.

Qwen3-Next, a model of theirs with layers of both kinds, runs beside ours: what it can and ours cannot is in the table.
`run_peers.py` runs this file with a checkout of transformers on the path; nothing else can import it.
"""

import ast
import importlib
import sys
import types
import unittest
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedConfig, StaticCache
from transformers.models.auto import modeling_auto

from nalaformer.models.language import (
    NaLaConfig,
    NaLaForCausalLM,
    NaLaForQuestionAnswering,
    NaLaForSequenceClassification,
    NaLaForTokenClassification,
    NaLaModel,
    RecurrentLayer,
)


def fill_missing(folder: Path) -> list[str]:
    """Names that the suites import and neither the installed version nor the checkout has: what calls them is skipped."""
    missing = []
    for path in (*folder.glob("*.py"), *folder.glob("generation/*.py")):
        imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
        for node in imports:
            module = node.module or ""
            # a file beside the suites, which a source distribution may lack
            is_beside = node.level == 1 and path.parent == folder and module.isidentifier()
            if is_beside and not (folder / module).exists() and not (folder / f"{module}.py").exists():
                missing += [f"tests.{module}.{name.name}" for name in node.names if not found(f"tests.{module}", name.name)]
            if node.level == 0 and module.split(".")[0] == "transformers":
                missing += [f"{module}.{name.name}" for name in node.names if not found(module, name.name)]
    return missing


def found(module_name: str, name: str) -> bool:
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        module = sys.modules[module_name] = types.ModuleType(module_name)
    try:
        getattr(module, name)
    except AttributeError:
        try:
            importlib.import_module(f"{module_name}.{name}")
        except ImportError:
            setattr(module, name, lambda *_, **__: skip(f"{module_name}.{name} is not in this version of transformers"))
            return False
    return True


def skip(reason: str) -> None:
    raise unittest.SkipTest(reason)


# where `tests` is: the folder of the run, whose tests are those of the checkout
MISSING = fill_missing(Path(importlib.import_module("tests").__path__[0]))
if not hasattr(PreTrainedConfig, "has_no_defaults_at_init"):
    # the suites of some versions ask for it
    PreTrainedConfig.has_no_defaults_at_init = False
# the suites find out by these tables which class has a loss; models from outside are not in them
modeling_auto.MODEL_MAPPING_NAMES["nala"] = "NaLaModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["nala"] = "NaLaForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["nala"] = "NaLaForSequenceClassification"
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES["nala"] = "NaLaForTokenClassification"
modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES["nala"] = "NaLaForQuestionAnswering"

from tests.models.qwen3_next.test_modeling_qwen3_next import Qwen3NextModelTest  # noqa: E402, F401

from tests import causal_lm_tester  # noqa: E402

LAYOUTS = {
    "Linear": {"mixers": "linear", "num_key_value_heads": 1},
    "Delta": {"mixers": "delta"},
    "GatedDelta": {"mixers": "gated_delta"},
    "Hybrid": {"mixers": ["gated_delta", "softmax"]},
    "Softmax": {"mixers": "softmax"},
}


class OverOurModels:
    """What a suite of transformers is told about a model: the classes, and how its cache and its weights look."""

    def setUp(self) -> None:
        super().setUp()
        has_rotary = self.model_tester.get_config().has_rotary
        if "_rope_" in self._testMethodName and not has_rotary:
            self.skipTest("no layer has rotary positions")

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config) -> None:
        assert len(past_key_values) == config.num_hidden_layers
        for layer, kind in zip(past_key_values.layers, config.layer_types, strict=True):
            assert layer.get_seq_length() == seq_length
            if kind == "full_attention":
                room = past_key_values.max_cache_len if isinstance(past_key_values, StaticCache) else seq_length
                shape = (batch_size, config.num_key_value_heads, room, config.head_dim)
                assert layer.keys.shape == layer.values.shape == shape
            else:
                assert isinstance(layer, RecurrentLayer)
                # batch first, and no size that grows with the tokens
                assert layer.tensors
                assert all(tensor.shape[0] == batch_size for tensor in layer.tensors.values())
                assert layer.tensors["state"].shape[-1] in (config.head_dim, config.head_dim // 2)

    def test_attention_outputs(self) -> None:
        """Weights of the exact layers alone, as with other models of both kinds."""
        if not self.has_attentions:
            self.skipTest("no layer has a weight for each pair")
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        heads, length = config.num_attention_heads, self.model_tester.seq_length
        for model_class in self.all_model_classes:
            model = model_class._from_config(config, attn_implementation="eager").eval()
            with torch.no_grad():
                attentions = model(**self._prepare_for_class(inputs, model_class), output_attentions=True).attentions
            assert len(attentions) == config.layer_types.count("full_attention")
            assert {tuple(weights.shape[1:]) for weights in attentions} == {(heads, length, length)}
            torch.testing.assert_close(attentions[0].sum(-1), torch.ones_like(attentions[0].sum(-1)))

    def _check_attentions_for_generate(
        self, batch_size, attentions, prompt_length, output_length, config, decoder_past_key_values
    ) -> None:
        assert isinstance(attentions, tuple)
        assert len(attentions) == output_length - prompt_length
        has_cache = decoder_past_key_values is not None
        for step, weights in enumerate(attentions):
            queries = prompt_length + step if step == 0 or not has_cache else 1
            is_static = isinstance(decoder_past_key_values, StaticCache)
            keys = decoder_past_key_values.max_cache_len if is_static else prompt_length + step
            shape = (batch_size, config.num_attention_heads, queries, keys)
            assert [tuple(each.shape) for each in weights] == [shape] * config.layer_types.count("full_attention")

    def test_can_init_all_missing_weights(self) -> None:
        """Theirs asks the file of the configuration for a year of copyright, to leave old models out."""
        with patch(f"{causal_lm_tester.ModelTesterMixin.__module__}.inspect.getfile", return_value=causal_lm_tester.__file__):
            super().test_can_init_all_missing_weights()

    def test_left_padding_compatibility(self) -> None:
        """Theirs takes models without attention for models without padding."""
        with patch.object(self, "has_attentions", True):
            super().test_left_padding_compatibility()

    def test_custom_4d_attention_mask(self) -> None:
        """A mask for each pair of tokens; where a layer has no pairs, a refusal in the place of another result."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        if set(config.layer_types) == {"full_attention"}:
            super().test_custom_4d_attention_mask()
        else:
            mask = torch.ones(1, 1, *inputs["input_ids"].shape[1:] * 2, dtype=torch.bool)
            with pytest.raises(ValueError, match="a mask for each pair of tokens needs `softmax` mixers alone"):
                NaLaForCausalLM(config)(inputs["input_ids"], attention_mask=mask)


def suite(name: str, options: dict) -> type:
    def start(self, parent) -> None:
        causal_lm_tester.CausalLMModelTester.__init__(self, parent=parent)
        for option, value in options.items():
            setattr(self, option, value)

    classes = {
        "base_model_class": NaLaModel,
        "config_class": NaLaConfig,
        "causal_lm_class": NaLaForCausalLM,
        "sequence_classification_class": NaLaForSequenceClassification,
        "token_classification_class": NaLaForTokenClassification,
        "question_answering_class": NaLaForQuestionAnswering,
    }
    tester = type(f"{name}Tester", (causal_lm_tester.CausalLMModelTester,), classes | {"__init__": start})
    facts = {"model_tester_class": tester, "has_attentions": "softmax" in options["mixers"], "__module__": __name__}
    return type(f"{name}Test", (OverOurModels, causal_lm_tester.CausalLMModelTest, unittest.TestCase), facts)


for _name, _options in LAYOUTS.items():
    globals()[f"{_name}Test"] = suite(_name, _options)
