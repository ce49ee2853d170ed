"""Whole models computed with the authors' published code."""

import json

from safetensors import safe_open

from helpers.places import GOLDEN


def golden(name):
    """Published weights, the configuration in our terms, and input, output, cotangent and gradient."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        meta = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
    weights = {key.split(".", 1)[1]: value for key, value in tensors.items() if key.startswith(("weight.", "buffer."))}
    config = {key: tuple(json.loads(meta[key])) for key in ("embed_dims", "depths", "num_heads", "mlp_ratios")}
    if "flags" in meta:
        # "stages 1,3,4" have a scale
        scaled = [int(stage) for stage in meta["layer_scale"].removeprefix("stages ").split(",")]
        config["layer_scale"] = tuple(1.0 if stage in scaled else None for stage in (1, 2, 3, 4))
        config |= {"attention_stages": meta["flags"], "projection": int(meta["projection"])}
    else:
        config["attention_stages"] = meta["attn_type"].lower().replace("s", "v")
        config["key_reduction"] = tuple(int(digit) for digit in meta["la_sr_ratios"])
        config["softmax_key_reduction"] = tuple(json.loads(meta["sr_ratios"]))
        config["img_size"] = int(meta["img_size"])
    return weights, config, tensors
