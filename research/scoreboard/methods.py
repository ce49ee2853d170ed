"""The attentions that a scoreboard compares, by name: in a plain layer, so that the map is all that differs."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nalaformer.registry import unknown_name

from ..models import attention_names


@dataclass(frozen=True, kw_only=True)
class Method:
    """An attention by name, with options."""

    name: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.name} {json.dumps(self.options)}" if self.options else self.name


def make_method(name: str, **options: Any) -> Method:
    return Method(name=name, options=options)


# learned powers
MILD: dict[str, Any] = {"powers": "mild", "norm_scale": "head"}
METHODS_OF_THE_BOARD: dict[str, Method] = {
    "softmax": make_method("softmax"),
    "relu": make_method("relu"),
    "elu": make_method("elu"),
    "sign_split": make_method("split"),
    "sign_split_contrast": make_method("split", contrast="learned"),
    "flatten_map": make_method("focused"),
    "polaformer_map": make_method("polarity"),
    "polaformerpp_map": make_method("polarity_exp"),
    "mirrorla_map": make_method("mirrorla", gate="none"),
    "nala": make_method("norm_aware"),
    "nala_cosine": make_method("norm_aware", direction="cosine"),
    "nala_contrast": make_method("norm_aware", contrast="learned"),
    "nala_mild": make_method("norm_aware", **MILD),
    "nala_mild_contrast": make_method("norm_aware", **MILD, contrast="learned"),
    "nala_learned": make_method("norm_aware", **MILD, start_gain=2.5),
    "nala_learned_contrast": make_method("norm_aware", **MILD, start_gain=2.5, contrast="learned"),
    "hedgehog": make_method("hedgehog"),
    "hedgehog_contrast": make_method("hedgehog", contrast="learned"),
    "channel_softmax": make_method("channel_softmax"),
    # starts weak: from 0 it recalls a little more and points worse
    "channel_softmax_contrast": make_method("channel_softmax", contrast="learned", contrast_offset=-0.75),
    "mala_map": make_method("mala", gate="none"),
    "rala_map": make_method("rala", gate="none"),
    "mhla_map": make_method("relu", mixed_blocks=[4, 4]),
    "relu_forgetting": make_method("relu", forgets=True),
    "nala_forgetting": make_method("norm_aware", forgets=True),
    "nala_learned_forgetting": make_method("norm_aware", **MILD, start_gain=2.5, contrast="learned", forgets=True),
    "channel_softmax_forgetting": make_method("channel_softmax", contrast="learned", contrast_offset=-0.75, forgets=True),
    "deltanet": make_method("delta"),
    "deltanet_nala": make_method("delta", feature_map="norm_aware"),
    "gated_deltanet": make_method("gated_delta"),
    "gated_deltanet_nala": make_method("gated_delta", feature_map="norm_aware"),
}
"""Baselines under short names; forms of our own are nala_learned, channel_softmax, and all with the learned contrast. The file
of a scoreboard has each in full."""
ALL = "all"
# looks at all queries, later ones too; mixes the states of later blocks as well
BIDIRECTIONAL = ("rala_map", "mhla_map")
# go from token to token
CAUSAL = (
    *("relu_forgetting", "nala_forgetting", "nala_learned_forgetting", "channel_softmax_forgetting"),
    *("deltanet", "deltanet_nala", "gated_deltanet", "gated_deltanet_nala"),
)


def methods_for(*, causal: bool) -> list[Method]:
    """Return the methods for tokens that see all others or, if causal, only earlier ones."""
    left_out = BIDIRECTIONAL if causal else CAUSAL
    return [method for name, method in METHODS_OF_THE_BOARD.items() if name not in left_out]


def short_name(label: str) -> str:
    """The short name of what a file calls in full; the label itself where there is none."""
    return next((name for name, method in METHODS_OF_THE_BOARD.items() if method.label == label), label)


def parse_methods(text: str, *, causal: bool = False) -> list[Method]:
    """Names separated by commas, each with options in braces if it has any: 'softmax, norm_aware {"powers": "mild"}'.

    A short name of METHODS_OF_THE_BOARD stands for its method, "all" for every one of them.
    """
    found: list[Method] = []
    rest = text.strip()
    while rest:
        end = min((place for place in (rest.find(","), rest.find("{")) if place >= 0), default=len(rest))
        name, rest = rest[:end].strip(), rest[end:]
        options: dict[str, Any] = {}
        if rest.startswith("{"):
            try:
                options, used = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"options of {name} must be a JSON object, got {rest}") from error
            rest = rest[used:].lstrip()
        if not name or (rest and not rest.startswith(",")):
            raise ValueError(f"methods are names separated by commas, got {text!r}")
        found += expand_name(name, options, causal=causal)
        rest = rest[1:].strip()
    if not found:
        raise ValueError("methods must name at least one attention")
    return found


def expand_name(name: str, options: dict[str, Any], *, causal: bool) -> Iterable[Method]:
    """The methods that a name with these options stands for."""
    if name == ALL:
        return [make_method(method.name, **(method.options | options)) for method in methods_for(causal=causal)]
    known_names = [*dict.fromkeys([*METHODS_OF_THE_BOARD, *attention_names()])]
    if name not in known_names:
        raise unknown_name("method (of the scoreboard, or an attention)", name, known_names)
    known = METHODS_OF_THE_BOARD.get(name, make_method(name))
    return [make_method(known.name, **(known.options | options))]
