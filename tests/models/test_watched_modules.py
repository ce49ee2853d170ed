"""Hooks that others put on our modules: fused steps must not pass over them."""

import pytest
import torch
from torch import nn

from helpers.looked_at_models import nala_language, pyramid
from nalaformer.feature_maps import FeatureMap
from nalaformer.models.language.positions import RotaryPositions

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = {
    "backbone": (lambda: pyramid(layer_scale=0.5, drop_path_rate=0.2, drop_rate=0.1), torch.randn(1, 3, 40, 40)),
    "language": (nala_language, torch.randint(1, 30, (1, 7))),
}
# called by their methods, which have names
WITHOUT_CALLS = (nn.ModuleList, FeatureMap, RotaryPositions)


@pytest.mark.parametrize("of_all_modules", [True, False])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_hook_of_every_module_is_called_and_changes_nothing(name, of_all_modules):
    make, inputs = MODELS[name]
    model, called = make().eval(), set()
    before = model(inputs)
    note = lambda module, *_: called.add(module) and None  # noqa: E731
    register = nn.modules.module.register_module_forward_hook
    hooks = [register(note)] if of_all_modules else [module.register_forward_hook(note) for module in model.modules()]
    after = model(inputs)
    for hook in hooks:
        hook.remove()
    left_out = [place for place, module in model.named_modules() if module not in called]
    assert not [place for place in left_out if not isinstance(model.get_submodule(place), WITHOUT_CALLS)]
    torch.testing.assert_close(*((y if name == "backbone" else y.logits) for y in (after, before)), rtol=1e-4, atol=1e-5)
