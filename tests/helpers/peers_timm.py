"""A plugin of pytest that gives our backbones to timm's own tests of models, in the place of theirs."""

import os

import pytest
import timm

from nalaformer.models.vision import VARIANTS

# one of each family and layout; the sizes differ in nothing that the tests look at
NAMES = (
    *("nalaformer_xt", "nalaformer_t", "nalaformer_xt_linear", "nalaformer_xt_paper", "mirrorla_t", "polaformerpp_b0"),
    *("polaformer_pvt_t", "flatten_pvt_t", "polaformer_swin_t", "flatten_swin_t", "vit_nala_tiny_patch16"),
    *("ravlt_t", "mavit_t"),
)
EXCLUDED = {"torchscript": "TorchScript cannot compile the op, which is Python; torch.export takes the models"}

list_models = timm.list_models


def our_models(*args, **kwargs) -> list[str]:
    chosen = VARIANTS if os.environ.get("PEERS_ALL_NAMES") else NAMES
    # a filter by module asks for files of timm that have a method; ours all have it
    kwargs.pop("module", None)
    return [name for name in list_models(*args, **kwargs) if name in chosen]


timm.list_models = our_models
timm.list_pretrained = lambda *args, **kwargs: []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if any(f"-{name}]" in item.name for name in VARIANTS)]
    for item in ours:
        for part, reason in EXCLUDED.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))
    # tests of timm's own models and layers say nothing about ours
    items[:] = ours


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "base",
        "forward",
        "backward",
        "cfg",
        "cfg_nonstd",
        "torchscript",
        "features",
        "fxforward",
        "fxbackward",
        "timeout",
    ):
        config.addinivalue_line("markers", f"{marker}: of timm's tests")
