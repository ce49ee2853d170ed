"""Compute the cross-entropy of rows of logits, which become their own gradients."""

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    logits_ptr,  # [R, V] side by side; overwritten by the gradients of the losses where KEEP
    target_ptr,  # [R] integers
    loss_ptr,  # [R] float32
    classes,  # V
    ignored,  # the target of rows that do not count
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute loss = log sum exp(logits) - logits[target]; its gradient is softmax(logits) - [class = target]."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * classes
    target = tl.load(target_ptr + row)
    place = tl.arange(0, BLOCK)
    if target == ignored:
        tl.store(loss_ptr + row, 0.0)
        if KEEP:
            for first in range(0, classes, BLOCK):
                zeros = tl.zeros((BLOCK,), tl.float32).to(logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + first + place, zeros, mask=first + place < classes)
    else:
        # Each lane has a maximum and a sum, combined at the end. It starts finite: lanes without a class need a difference.
        largest = tl.full((BLOCK,), -1e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        wanted = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, classes, BLOCK):
            inside = first + place < classes
            x = tl.load(logits_ptr + first + place, mask=inside, other=float("-inf")).to(tl.float32)
            wanted += tl.where(first + place == target, x, 0.0)
            higher = tl.maximum(largest, x)
            total = total * tl.exp(largest - higher) + tl.exp(x - higher)
            largest = higher
        top = tl.max(largest, axis=0)
        log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0))
        # an invalid target must not count as a class
        is_class = (target >= 0) & (target < classes)
        loss = tl.where(is_class, log_sum - tl.sum(wanted, axis=0), float("nan"))
        tl.store(loss_ptr + row, loss)
        if KEEP:
            for first in range(0, classes, BLOCK):
                inside = first + place < classes
                x = tl.load(logits_ptr + first + place, mask=inside, other=0.0).to(tl.float32)
                gradient = tl.exp(x - log_sum) - tl.where(first + place == target, 1.0, 0.0)
                tl.store(logits_ptr + first + place, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
