"""Explanations of a decision by the places of an image that support it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..registry import unknown_name
from .layers import Recorder, attention_layers, for_heads, record
from .maps import as_images, as_map, move_amounts, rollout, spread_keys, start_at
from .records import LayerRecord

EXPLANATIONS = ("decision_aware", "gradient_rollout", "rollout", "integrated_gradients")


def explain(
    model: nn.Module,
    image: Tensor,
    target: int | Tensor | None = None,
    *,
    method: str = "decision_aware",
    steps: int = 32,
    baseline: float = 0.0,
) -> Tensor:
    """Return how much each place of an image supports a class: [h, w], or [B, h, w] for a batch; not negative, sum one.

    image: [3, H, W] or [B, 3, H, W], as the model takes it. target: the class, or one per image; None is the predicted class.
    The map has the grid of the first attention layer. Methods:
    decision_aware: sum over layers and heads of max(0, <v_j, sum_i A_ij g_i>), g_i the gradient of the class's logit by the
        attention output of query i: to first order, the part of the logit that comes from attending to token j.
    gradient_rollout: v <- v + v E, E the mean over heads of max(0, A_ij <g_i, v_j>) (Chefer et al., 2021).
    rollout: attention alone, independent of the class; see `rollout`.
    integrated_gradients: Captum's, over `steps` images between one with all pixels at `baseline` and this one.
    """
    if method not in EXPLANATIONS:
        raise unknown_name("method of explanation", method, EXPLANATIONS)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    images = as_images(image).detach()
    # gradients are needed even if the caller disabled them
    with torch.inference_mode(False):
        # clone, since tensors made in inference mode have no gradients
        images = images.clone()
        if method == "rollout":
            records = record(model, images)
            heat = rollout(records, start_token(records[-1]))
        elif method == "integrated_gradients":
            heat = _integrated_gradients(model, images, target, steps, baseline)
        else:
            heat = _by_flow(model, images, target, method)
    return heat if image.dim() == 4 else heat[0]


def start_token(last: LayerRecord) -> str:
    """Return the token of the last layer that the classifier reads."""
    return "class" if last.prefix else "mean"


def target_classes(logits: Tensor, target: int | Tensor | None) -> Tensor:
    """Return the classes as a tensor [B]."""
    if target is None:
        return logits.argmax(-1)
    rule = f"target must be the number of a class below {logits.shape[-1]}, or one for each of {len(logits)} images"
    try:
        classes = torch.as_tensor(target, device=logits.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{rule}, got {target!r}; only the data knows names of classes") from error
    if classes.is_floating_point() or classes.dtype == torch.bool or classes.shape not in ((), (1,), (len(logits),)):
        raise ValueError(f"{rule}, got {target!r}")
    classes = classes.long().expand(len(logits))
    if not bool(((classes >= 0) & (classes < logits.shape[-1])).all()):
        raise ValueError(f"{rule}, got {classes.tolist()}")
    return classes


def unwrap_logits(output: Any) -> Tensor:
    """Return the logits of an output, which transformers wraps."""
    return getattr(output, "logits", output)


def _by_flow(model: nn.Module, images: Tensor, target: int | Tensor | None, method: str) -> Tensor:
    # the images require gradients, so that a frozen model has a graph too
    images.requires_grad_()
    with torch.enable_grad():
        with Recorder(model, image=(images.shape[2], images.shape[3]), keep_values=True) as recorder:
            logits = unwrap_logits(model(images))
        records = recorder.records
        score = logits.gather(1, target_classes(logits, target)[:, None]).sum()
        gathered = [found.gathered for found in records if found.gathered is not None]
        gradients = torch.autograd.grad(score, gathered, retain_graph=True, allow_unused=True)
        flows = []
        for found, out, gradient in zip(records, gathered, gradients, strict=True):
            # the class may not depend on a layer
            gradient = torch.zeros_like(out) if gradient is None else gradient
            flows.append(decision_flow(found, gradient) if method == "decision_aware" else gradient)
    amounts = torch.zeros_like(start_at(records[-1], "mean"))
    if method == "gradient_rollout":
        amounts = start_at(records[-1], start_token(records[-1]))
    for number in reversed(range(len(records))):
        found = records[number]
        if number + 1 < len(records):
            amounts = move_amounts(amounts, records[number + 1], found)
        step = flows[number] if method == "decision_aware" else gradient_pull(found, flows[number], amounts)
        amounts = amounts + spread_keys(step, found)
    return as_map(amounts, records[0].grid, records[0]).detach()


def decision_flow(found: LayerRecord, gradient: Tensor) -> Tensor:
    """Return sum_h max(0, <v_j, sum_i A_ij g_i>) of each key, [B, M]; gradient g in the layout of the layer's outputs.

    The output is linear in the values, so sum_i A_ij g_i is its gradient: no weight is ever computed.
    """
    assert found.values is not None
    assert found.gathered is not None
    (pulled,) = torch.autograd.grad(found.gathered, found.values, gradient, retain_graph=True)
    products = (pulled * found.values).sum(-1).detach()  # [., S, H] or [., H, S]
    flow = products.clamp(min=0).sum(1 if found.heads_first else 2)
    # some layers split values into windows before they are recorded, some after
    return found.from_windows(flow) if len(flow) == len(found.q) else flow


@torch.no_grad()
def gradient_pull(found: LayerRecord, gradient: Tensor, amounts: Tensor) -> Tensor:
    """Return sum_i amounts_i mean_h max(0, A_ij <g_i, v_j>) of each key, some queries at a time: [B, N] -> [B, M]."""
    assert found.values is not None
    gradient, values = (_in_windows(found, x) for x in (gradient, found.values))
    values = for_heads(values, gradient)
    inside = found.to_windows(amounts)
    total = amounts.new_zeros(found.k.shape[:2])
    for places, weights in found.chunks():
        effect = weights * torch.einsum("pihv,pjhv->phij", gradient[:, places], values)
        total += torch.einsum("pi,pij->pj", inside[:, places], effect.clamp(min=0).mean(1))
    return found.from_windows(total)


def _in_windows(found: LayerRecord, x: Tensor) -> Tensor:
    """Return values or outputs as [P, T, H, V]."""
    x = x.transpose(1, 2) if found.heads_first else x
    if found.windows is None or len(x) == len(found.q):
        return x
    padded = torch.cat((x, torch.zeros_like(x[:, :1])), dim=1)
    return padded[:, found.windows].flatten(0, 1)


def _integrated_gradients(model: nn.Module, images: Tensor, target: int | Tensor | None, steps: int, baseline: float) -> Tensor:
    try:
        from captum.attr import IntegratedGradients
    except ImportError as error:
        raise ImportError("integrated gradients need Captum: pip install 'nalaformer[explain]'") from error
    first = record(model, images, [attention_layers(model)[0].name])[0]
    if first.grid is None:
        raise ValueError(f"{first.name} has no grid: its tokens are no image")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            classes = target_classes(unwrap_logits(model(images)), target)
        attribution = IntegratedGradients(lambda x: unwrap_logits(model(x))).attribute(
            images, baselines=baseline, target=classes, n_steps=steps, internal_batch_size=len(images)
        )
    finally:
        for module, mode in modes:
            module.training = mode
    pixels = attribution.detach().float().sum(1, keepdim=True).clamp(min=0)
    heat = F.adaptive_avg_pool2d(pixels, first.grid)[:, 0]
    return heat / heat.sum((1, 2), keepdim=True).clamp(min=1e-30)
