"""What the tests of `generate` with decoders share: fixtures that count what decoders do, texts, and both ways of a step.

Test files name this module in `pytest_plugins`, which brings the fixtures.
"""

from dataclasses import replace

import pytest
import torch

from helpers.converted_models import SMALL
from helpers.recorded_graphs import recorded
from nalaformer.models.hybrid import decoder as decoder_module
from nalaformer.models.hybrid import stepping as stepping_module
from nalaformer.models.hybrid.decoder import SteppingDecoder
from nalaformer.models.hybrid.stepping import Stepping

UNCAPPED = replace(SMALL, max_salient=0)
# more than two chunks; the prompt gives the first token, and three steps are the model's
NEW_TOKENS = 20
TAKEN = NEW_TOKENS - 1 - 3
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


@pytest.fixture
def steps(monkeypatch):
    """Counts what decoders do: the steps that they take, and how often they are made."""
    counts = {"taken": 0, "made": 0}
    take, make = SteppingDecoder.step, SteppingDecoder.__init__

    def counted_step(self, *args, **kwargs):
        counts["taken"] += 1
        return take(self, *args, **kwargs)

    def counted_init(self, *args, **kwargs):
        counts["made"] += 1
        make(self, *args, **kwargs)

    monkeypatch.setattr(SteppingDecoder, "step", counted_step)
    monkeypatch.setattr(SteppingDecoder, "__init__", counted_init)
    return counts


@pytest.fixture
def loads(monkeypatch):
    """One entry for each time that a decoder passes on to another cache."""
    found, load = [], stepping_module._Place.load

    def counted(self, cache):
        found.append(1)
        load(self, cache)

    monkeypatch.setattr(stepping_module._Place, "load", counted)
    return found


@pytest.fixture(params=[False, True], ids=["called", "recorded"])
def each_way(request, monkeypatch):
    """Steps as they are called without a GPU, and recorded once and replayed as with one."""
    if not request.param:
        return
    make = SteppingDecoder.__init__
    monkeypatch.setattr(SteppingDecoder, "__init__", lambda self, *a, **given: make(self, *a, **given | {"capture": True}))
    monkeypatch.setattr(decoder_module, "captured", recorded)


def with_steps(model, *, after=3):
    model.stepping = Stepping(after=after, capture=False)
    return model


def prompts():
    """Two samples, the second one padded on its left."""
    tokens = torch.randint(3, 50, (2, 21))
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    return {"input_ids": torch.where(mask.bool(), tokens, 0), "attention_mask": mask}


def both(model, *, after=3, **options):
    """What generate gives with the model's own steps, and with a decoder's."""
    found = []
    for stepping in (None, Stepping(after=after, capture=False)):
        model.stepping = stepping
        torch.manual_seed(5)
        found.append(model.generate(**options))
    return found
