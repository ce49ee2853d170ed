"""timm's features_only networks inside larger ones."""

from timm.models._features import FeatureGetterNet
from torch import nn


def network_of(features: nn.Module) -> nn.Module:
    """timm's network behind its features, with the names that its checkpoints have."""
    return features.model if isinstance(features, FeatureGetterNet) else features


def exempt_from_decay(model: nn.Module, network: nn.Module) -> set[str]:
    """What the network exempts from weight decay, by its names in the model around it."""
    exempt: set[str] = getattr(network, "no_weight_decay", set)()
    inside = {parameter: name for name, parameter in model.named_parameters()}
    return {inside[parameter] for name, parameter in network.named_parameters() if name in exempt}
