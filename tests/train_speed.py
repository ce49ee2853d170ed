"""Training steps of language models: tokens a second, peak memory, and what the GPU does in a step."""

import argparse
import gc
import time
from typing import Any

import torch
from torch import Tensor

SHAPES = "16x2048,4x8192,1x32768"


def build(name: str, size: str, device: str, *, autocast: bool) -> Any:
    """`linear`, `softmax`, another mixer, or `llama`: transformers' model of the same widths."""
    from nalaformer.models.language import NaLaConfig, NaLaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        if name == "llama":
            from transformers import LlamaConfig, LlamaForCausalLM

            like = NaLaConfig.from_size(size)
            names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
            widths = {name: getattr(like, name) for name in names}
            model: Any = LlamaForCausalLM(LlamaConfig(**widths, tie_word_embeddings=True, max_position_embeddings=32768))
        else:
            model = NaLaForCausalLM(NaLaConfig.from_size(size, mixers=name))
    model.config.use_cache = False
    return model.train() if autocast else model.to(torch.bfloat16).train()


def make_step(model: Any, tokens: Tensor, *, autocast: bool, form: str) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def compute(tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            return model(tokens, labels=tokens).loss

    if form == "blocks":
        for block in model.model.layers:
            block.compile(fullgraph=True)
    call = torch.compile(compute) if form == "whole" else compute

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = call(tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def measure(name: str, form: str, shape: str, options: argparse.Namespace) -> None:
    batch, length = map(int, shape.split("x"))
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    began = time.perf_counter()
    model = build(name, options.size, "cuda", autocast=options.autocast)
    tokens = torch.randint(0, model.config.vocab_size, (batch, length), device="cuda")
    step = make_step(model, tokens, autocast=options.autocast, form=form)
    try:
        first = step().item()
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        warm = time.perf_counter() - began
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(options.steps):
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        seconds = sorted(times)[len(times) // 2]
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"{name:12} {form:7} {shape:9} {batch * length / seconds:10,.0f} tokens/s {1000 * seconds:7.1f} ms{peak:6.1f} GiB"
            f"  first loss {first:.4f}  warm-up {warm:.1f} s",
            flush=True,
        )
        if options.profile == f"{name},{form},{shape}":
            profile(step)
    except Exception as error:
        print(f"{name:12} {form:7} {shape:9} failed: {type(error).__name__}: {str(error)[:1500]}", flush=True)


def profile(step: Any) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        torch.cuda.synchronize()
    events = [event for event in found.key_averages() if event.self_device_time_total > 0 and event.self_cpu_time_total == 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    print(f"  {sum(event.self_device_time_total for event in events) / 1000:8.2f} ms of the GPU in one step")
    for event in events[:45]:
        print(f"  {event.self_device_time_total / 1000:8.2f} ms {event.count:5} x {event.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="linear,softmax,llama")
    parser.add_argument("--forms", default="eager")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--size", default="340m")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", default="")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--plain-when-compiled", action="store_true")
    parser.add_argument("--seconds", type=float, default=140)
    options = parser.parse_args()
    if options.plain_when_compiled:
        import importlib

        from nalaformer.ops.backend import runs_kernels

        for room in ("rms_norm", "gated_linear"):
            module = importlib.import_module(f"nalaformer.ops.{room}")
            module.runs_kernels = lambda x: not torch.compiler.is_compiling() and runs_kernels(x)
    began = time.perf_counter()
    for form in options.forms.split(","):
        for name in options.models.split(","):
            for shape in options.shapes.split(","):
                if time.perf_counter() - began > options.seconds:
                    print(f"{name:12} {form:7} {shape:9} left out: no time")
                    continue
                measure(name, form, shape, options)


if __name__ == "__main__":
    main()
