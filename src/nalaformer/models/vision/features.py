"""Access to timm's features_only networks inside larger ones."""

from timm.models._features import FeatureGetterNet
from torch import nn


def network_of(features: nn.Module) -> nn.Module:
    """Return timm's network behind its features, with the names of its checkpoints."""
    return features.model if isinstance(features, FeatureGetterNet) else features


def exempt_from_decay(model: nn.Module, network: nn.Module) -> set[str]:
    """Return the names, in the whole model, of the parameters that the inner network exempts from weight decay."""
    exempt: set[str] = getattr(network, "no_weight_decay", set)()
    inside = {parameter: name for name, parameter in model.named_parameters()}
    return {inside[parameter] for name, parameter in network.named_parameters() if name in exempt}
