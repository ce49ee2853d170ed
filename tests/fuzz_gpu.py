"""Random calls of the op on a GPU, output and gradients against the formula in float64: `make fuzz-gpu`.

    python tests/fuzz_gpu.py --minutes 8 --workers 14 --seed 0
    python tests/fuzz_gpu.py --case '{...}'        one case, as a failure prints it

Every head size from 1 to 128 comes before any comes twice, and so do the sizes of values. Compiling is what takes the time, so
each form of a call (sizes, map, type, layout) runs with several numbers of tokens. Prints each failing case, then how near each
type came to its bar, and exits with 1 if a case failed.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch

# without a GPU the interpreter runs the kernels, slowly: for a look at this script
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import nalaformer
from helpers.attention_formula import Turning, formula, formula_weights
from helpers.contrast_formula import rala_weight, weighted_and_contrasted
from helpers.kernel_checks import CAUSAL_MAPS, DEVICE, MAPS
from nalaformer import Rotary

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# maps whose parameters the formula can take in float64; variances are of all tokens, which it does not know
NAMES = [name for name in MAPS if "variance" not in name]
# what rounding to the inputs' type may cost, on top of what plain torch misses float64 by when it rounds as the kernels do
BARS = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 4e-6}
# a wrong result is off by far more than rounding, and a bar without room would cry wolf
ROOM = 3
# a gradient may vanish (of the query, where one key is visible), and what is left of it is rounding: errors count relative to
# its norm, or to this part of the norm that the sizes of its factors suggest
FLOOR = 1e-2
UNSTEADY = 10.0
LAYOUTS = ("contiguous", "one projection", "offset by one", "wide rows")
WEIGHTS = ("given", "global_query")
LARGEST = 128
NAMES_OF_RESULTS = ("out", "dq", "dk", "dv", "ddecay")


def forms(seed: int):
    """Endless forms of calls, without tokens; every size of heads and of values once in 128."""
    chance = random.Random(seed)
    while True:
        sizes, value_sizes = (chance.sample(range(1, LARGEST + 1), LARGEST) for _ in range(2))
        for size, value_size in zip(sizes, value_sizes, strict=True):
            mode = chance.choice(("bidirectional", "causal", "recurrent"))
            name = chance.choice([name for name in NAMES if mode == "bidirectional" or name in CAUSAL_MAPS])
            heads = chance.choice((1, 2, 3, 4))
            value_size = value_size if chance.random() < 0.3 else size
            size -= size % 2 if "pairs" in name or name == "reflection" else 0
            if name.startswith("polarity"):
                value_size += value_size % 2
            packed = mode != "recurrent" and chance.random() < 0.25
            case = {
                "name": name,
                "mode": mode,
                "size": max(size, 2 if "reflection" in name else 1),
                "value_size": value_size,
                "heads": heads,
                "kv_heads": chance.choice([n for n in range(1, heads + 1) if heads % n == 0]),
                "dtype": chance.choice(("bfloat16", "bfloat16", "float16", "float32")),
                "layout": chance.choice(LAYOUTS),
                "packed": packed,
                "masked": not packed and chance.random() < 0.4,
                "rotary": size % 2 == 0 and chance.random() < 0.35,
                "scale": chance.choice((0.1, 1.0, 1.0, 3.0)),
                # a state holds neither; the global query looks at later tokens
                "contrast": None if mode == "recurrent" else chance.choice((None, None, "mean_score", "given")),
                "key_weight": None if mode == "recurrent" else chance.choice((None, None, *WEIGHTS[: 1 + (mode != "causal")])),
                # the greatest decay of a token; 0: none
                "decay": 0.0 if mode == "bidirectional" else chance.choice((0.0, 0.0, 0.02, 0.3, 5.0)),
            }
            if case["decay"]:
                # weights of keys have no causal kernel, and the mean score of keys that fade no meaning
                case |= {"key_weight": None, "contrast": case["contrast"] and "given"}
            yield case


def cases(seed: int, longest: tuple[int, ...] = (40, 400, 2500)):
    """Each form with a few numbers of tokens, up to these."""
    for number, form in enumerate(forms(seed)):
        chance = random.Random(f"{seed} {number}")
        for most in longest:
            yield form | {
                "batch": chance.choice((1, 2, 3)),
                "tokens": chance.randint(1, most),
                "keys": chance.randint(1, most) if form["mode"] == "bidirectional" and not form["packed"] else None,
                "seed": chance.randrange(10**6),
            }


def laid_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of this shape in memory of that layout."""
    *rows, heads, size = shape
    if layout == "one projection":
        return (
            torch.randn(*rows, 3 * heads * size, device=DEVICE)
            .to(dtype)[..., heads * size : 2 * heads * size]
            .unflatten(-1, (heads, size))
        )
    if layout == "offset by one":
        return torch.randn(*rows, heads, size + 1, device=DEVICE).to(dtype)[..., 1:]
    if layout == "wide rows":
        return torch.randn(*rows, heads, size + 8, device=DEVICE).to(dtype)[..., :size]
    return torch.randn(shape, device=DEVICE).to(dtype)


def run(case: dict) -> tuple[str, dict[str, float]]:
    """Which backend served the case, and by how much of its bar each result misses float64."""
    torch.manual_seed(case["seed"])
    dtype, size, heads, kv_heads = DTYPES[case["dtype"]], case["size"], case["heads"], case["kv_heads"]
    tokens, keys = case["tokens"], case["keys"] or case["tokens"]
    feature_map = nalaformer.feature_map(case["name"].split()[0], num_heads=heads, head_dim=size, **MAPS[case["name"]])
    feature_map = feature_map.to(DEVICE)
    for parameter in feature_map.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    batch = () if case["packed"] else (case["batch"],)
    shapes = [(*batch, tokens, heads, size), (*batch, keys, kv_heads, size), (*batch, keys, kv_heads, case["value_size"])]
    inputs = [laid_out(shape, case["layout"], dtype) for shape in shapes]
    inputs = [(x * case["scale"] if place < 2 else x).detach() for place, x in enumerate(inputs)]
    arguments, bounds = {}, None
    if case["packed"]:
        cuts = sorted(random.Random(case["seed"]).choices(range(tokens + 1), k=case["batch"] - 1))
        bounds = torch.tensor([0, *cuts, tokens], device=DEVICE)
        arguments["cu_seqlens"] = bounds
    if case["masked"]:
        arguments["key_mask"] = torch.rand(*batch, keys, device=DEVICE) > 0.3
    if case["rotary"]:
        arguments["rotary"] = positions(case, bounds, keys)
    arguments |= extensions(case, batch, keys)
    upstream = torch.randn(*batch, tokens, heads, case["value_size"], device=DEVICE).to(dtype)
    steady = steady_rows(case, feature_map, inputs, arguments, bounds)
    upstream = upstream * steady.to(dtype)
    exact = exact_results(case, feature_map, inputs, arguments, bounds, upstream)
    with nalaformer.use_backend("reference"):
        in_one = case | {"mode": case["mode"].replace("recurrent", "causal")}
        plain = results(in_one, RoundedFeatures(feature_map, dtype), inputs, arguments, upstream)
    try:
        with nalaformer.use_backend("triton"):
            backend, ours = "triton", results(case, feature_map, inputs, arguments, upstream)
    except ValueError as refusal:
        if "cannot serve this call" not in str(refusal):
            raise
        backend, ours = "refused", results(case, feature_map, inputs, arguments, upstream)
    misses = {}
    _, k, v = (float(x.double().square().mean().sqrt()) for x in inputs)
    # the gradient of a small query is as large as the query is small, so queries count by their size
    weights = steady.double(), inputs[0].double().norm(dim=-1, keepdim=True), 1.0, 1.0, 1.0
    usual = dict(zip(NAMES_OF_RESULTS, (0.0, v, v / k, 0.0, v), strict=True))
    # without decays the last is left out
    for (name, size), weight, *found in zip(usual.items(), weights, ours, plain, exact, strict=False):
        mine, theirs, truth = (x.detach().double() * weight for x in found)
        least = FLOOR * size * float(upstream.norm())
        bar = ROOM * (error(theirs, truth, least) + BARS[case["dtype"]])
        misses[name] = error(mine, truth, least) / bar
    return backend, misses


def error(actual: torch.Tensor, expected: torch.Tensor, least: float) -> float:
    """Normwise, relative to what is expected or to `least`; NaN anywhere makes it NaN, which passes no comparison."""
    return float((actual - expected).norm() / max(float(expected.norm()), least, 1e-6))


class RoundedFeatures:
    """A feature map whose features have the digits that operands of matrix units have in the kernels."""

    def __init__(self, feature_map, dtype: torch.dtype) -> None:
        self.feature_map = feature_map
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32

    def __getattr__(self, name):
        return getattr(self.feature_map, name)

    def rounded(self, features: torch.Tensor) -> torch.Tensor:
        return features + (features.to(self.dtype).to(features.dtype) - features).detach()

    def given(self, q, k, **arguments):
        return self

    def query_streams(self, q):
        streams = self.feature_map.query_streams(q)
        return tuple(features._replace(value=self.rounded(features.value)) for features in streams)

    def key(self, k, log_scale=0.0):
        return self.rounded(self.feature_map.key(k, log_scale))


def extensions(case: dict, batch: tuple[int, ...], keys: int) -> dict:
    """The contrast and the weights of keys of a call."""
    found = {}
    if case.get("contrast"):
        given = torch.rand(*batch, case["tokens"], case["heads"], device=DEVICE)
        found["contrast"] = given if case["contrast"] == "given" else case["contrast"]
    if case.get("key_weight"):
        given = torch.rand(*batch, keys, case["kv_heads"], device=DEVICE) + 0.1
        found["key_weight"] = given if case["key_weight"] == "given" else case["key_weight"]
        if case["key_weight"] == "global_query" and case["masked"]:
            found["query_mask"] = torch.rand(*batch, case["tokens"], device=DEVICE) > 0.3
    if case.get("decay"):
        found["log_decay"] = -case["decay"] * torch.rand(*batch, keys, case["kv_heads"], device=DEVICE)
    return found


def exact_extensions(case: dict, feature_map, q, k, start: int, arguments: dict) -> dict:
    """The same of one sequence (of a batch of them where nothing is packed) as the formula takes it, weights as numbers."""
    found = {}
    for name, tokens in (("contrast", q.shape[1]), ("key_weight", k.shape[1]), ("log_decay", k.shape[1])):
        value = arguments.get(name)
        if isinstance(value, torch.Tensor):
            found[name] = value[None, start : start + tokens] if case["packed"] else value
        elif value == "global_query":
            found[name] = rala_weight(
                feature_map, q, k, key_mask=arguments.get("key_mask"), query_mask=arguments.get("query_mask")
            )
        elif value is not None:
            found[name] = value
    for name in ("key_weight", "log_decay"):
        if name in found:
            found[name] = found[name].repeat_interleave(q.shape[2] // found[name].shape[2], 2)
    return found


def positions(case: dict, bounds: torch.Tensor | None, keys: int) -> Rotary | tuple[Rotary, Rotary]:
    if bounds is not None:
        return Rotary.packed(bounds, case["size"])
    of_q, of_k = (Rotary.sequence(n, case["size"], device=DEVICE) for n in (case["tokens"], keys))
    return (of_q, of_k) if case["mode"] == "bidirectional" else of_q


def results(case: dict, feature_map, inputs, arguments, upstream) -> list[torch.Tensor]:
    """Output and gradients as a user gets them; recurrent: in two pieces and, without gradients, a last step in place."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    wanted = list(inputs)
    if "log_decay" in arguments:
        wanted.append(arguments["log_decay"].detach().requires_grad_())
        arguments = arguments | {"log_decay": wanted[-1]}
    if case["mode"] != "recurrent":
        out = nalaformer.linear_attention(*inputs, feature_map=feature_map, causal=case["mode"] == "causal", **arguments)
        return [out, *torch.autograd.grad(out, wanted, upstream)]
    tokens = case["tokens"]
    state, outputs = None, []
    for start, stop in pairwise(sorted({0, tokens // 3, tokens})):
        here = pieces(arguments, start, stop)
        part, state = nalaformer.recurrent_linear_attention(
            *(x[:, start:stop] for x in inputs), feature_map=feature_map, state=state, **here
        )
        outputs.append(part)
    out = torch.cat(outputs, 1)
    gradients = torch.autograd.grad(out, wanted, upstream)
    if tokens > 1 and "key_mask" not in arguments:
        with torch.no_grad():
            before = pieces(arguments, 0, tokens - 1)
            _, state = nalaformer.recurrent_linear_attention(*(x[:, :-1] for x in inputs), feature_map=feature_map, **before)
            last = pieces(arguments, tokens - 1, tokens)
            step = nalaformer.recurrent_step_(state, *(x[:, -1:] for x in inputs), feature_map=feature_map, **last)
        out = torch.cat((out[:, :-1], step), 1)
    return [out, *gradients]


def pieces(arguments: dict, start: int, stop: int) -> dict:
    """The arguments for tokens start .. stop - 1."""
    here = {}
    if "rotary" in arguments:
        here["rotary"] = arguments["rotary"].tokens(start, stop)
    for name in ("key_mask", "log_decay"):
        if name in arguments:
            here[name] = arguments[name][:, start:stop]
    return here


def samples_of(case: dict, inputs, bounds):
    """q, k and v of every sequence with a batch dimension, and its rotary positions for the formula."""
    samples = [inputs]
    if bounds is not None:
        samples = [[x[None, start:stop] for x in inputs] for start, stop in pairwise(bounds.tolist()) if stop > start]
    for q, k, v in samples:
        turning = None
        if case["rotary"]:
            of_q, of_k = (torch.arange(x.shape[1], device=DEVICE)[:, None] for x in (q, k))
            turning = Turning(of_q, of_k, case["size"], inclusive=False)
        yield q, k, v, turning


def steady_rows(case: dict, feature_map, inputs, arguments, bounds) -> torch.Tensor:
    """Bool [..., N, H, 1]: rows whose weights are no larger than UNSTEADY together.

    Rotary positions turn the numerator alone, so a denominator can be tiny where the numerator is not; such a row magnifies
    every rounding, and would hide all others.
    """
    causal, mask = case["mode"] != "bidirectional", arguments.get("key_mask")
    rows, start = [], 0
    for q, k, _, turning in samples_of(case, inputs, bounds):
        weights = formula_weights(feature_map, q, k, causal=causal, key_mask=mask, turning=turning)
        extended = exact_extensions(case, feature_map, q, k, start, arguments)
        factors = None
        if "key_weight" in extended:
            factors = extended["key_weight"].transpose(1, 2)[:, :, None]
        if "log_decay" in extended:
            decay = extended["log_decay"].double()
            decay = decay if mask is None else torch.where(mask[:, :, None], decay, 0.0)
            passed = decay.transpose(1, 2).cumsum(-1)
            factors = (passed[..., :, None] - passed[..., None, :]).tril().exp()
        if factors is not None:
            # the denominators are those of plain weights
            plain = formula_weights(feature_map, q, k, causal=causal, key_mask=mask)
            totals = [(w * factors).sum(-1, keepdim=True) for w in plain]
            weights = [w * factors / (total + (total == 0)) for w, total in zip(weights, totals, strict=True)]
        start += q.shape[1]
        magnified = torch.stack([w.detach().abs().sum(-1) for w in weights]).amax(0)  # [B, H, N]
        rows.append((magnified <= UNSTEADY).transpose(1, 2)[..., None])
    return rows[0] if bounds is None else torch.cat([x[0] for x in rows])


def exact_results(case: dict, feature_map, inputs, arguments, bounds, upstream) -> list[torch.Tensor]:
    """Output and gradients by the formula in float64; packed sequences one after the other."""
    inputs = [x.detach().double().requires_grad_() for x in inputs]
    wanted = list(inputs)
    if "log_decay" in arguments:
        wanted.append(arguments["log_decay"].detach().double().requires_grad_())
        arguments = arguments | {"log_decay": wanted[-1]}
    causal, mask = case["mode"] != "bidirectional", arguments.get("key_mask")
    outputs, start = [], 0
    for q, k, v, turning in samples_of(case, inputs, bounds):
        extended = exact_extensions(case, feature_map, q, k, start, arguments)
        options = {"causal": causal, "key_mask": mask, "turning": turning}
        if extended:
            outputs.append(weighted_and_contrasted(feature_map, q, k, v, eps=1e-6, **options, **extended))
        else:
            outputs.append(formula(feature_map, q, k, v, **options))
        start += q.shape[1]
    out = outputs[0] if bounds is None else torch.cat([x[0] for x in outputs])
    return [out, *torch.autograd.grad(out, wanted, upstream.double())]


def work(seed: int, share: int, of: int, seconds: float) -> None:
    """A line of JSON per case of this worker's share."""
    stop = time.monotonic() + seconds
    for number, case in enumerate(cases(seed)):
        # the three numbers of tokens of a form share what is compiled
        if number // 3 % of != share:
            continue
        if time.monotonic() > stop:
            return
        try:
            backend, misses = run(case)
            line = {"case": case, "backend": backend, "misses": misses}
        except Exception as error:
            line = {"case": case, "error": f"{type(error).__name__}: {error}"}
            if "CUDA error" in str(error):
                print(json.dumps(line), flush=True)
                return
        print(json.dumps(line), flush=True)


def is_failure(line: dict) -> bool:
    return "error" in line or not all(miss < 1 for miss in line["misses"].values())


def summary(lines: list[dict]) -> None:
    failures = [line for line in lines if is_failure(line)]
    for line in failures:
        found = line.get("error") or {name: round(miss, 3) for name, miss in line["misses"].items()}
        print(f"FAILED {found}\n  python tests/fuzz_gpu.py --case '{json.dumps(line['case'])}'")
    served = [line for line in lines if line.get("backend") == "triton"]
    sizes = {line["case"]["size"] for line in served}
    print(f"{len(lines)} cases, {len(served)} on the kernels in {len(sizes)} head sizes, {len(failures)} failed")
    for dtype in DTYPES:
        of_type = [line["misses"] for line in served if line["case"]["dtype"] == dtype]
        worst = {name: max((miss.get(name, 0.0) for miss in of_type), default=0.0) for name in NAMES_OF_RESULTS}
        print(f"{dtype:9} largest share of the bar: " + "  ".join(f"{name} {miss:.2f}" for name, miss in worst.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="write a line of JSON per case")
    parser.add_argument("--case", type=json.loads, help="run this case alone")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        backend, misses = run(options.case)
        print(backend, {name: round(miss, 3) for name, miss in misses.items()}, "of the bar")
        return int(is_failure({"misses": misses}))
    if options.share is not None:
        work(options.seed, options.share, options.workers, options.minutes * 60)
        return 0
    command = [sys.executable, str(Path(__file__)), f"--minutes={options.minutes}", f"--workers={options.workers}"]
    command.append(f"--seed={options.seed}")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*command, f"--share={share}"], stdout=subprocess.PIPE, text=True, env=environment)
        for share in range(options.workers)
    ]
    with ThreadPoolExecutor(options.workers) as pool:
        printed = pool.map(lambda process: process.communicate()[0], running)
    lines = [json.loads(line) for output in printed for line in output.splitlines()]
    if options.log:
        options.log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary(lines)
    lost = [process.returncode for process in running if process.returncode]
    if lost:
        print(f"{len(lost)} workers ended early with {lost}")
    return int(bool(lost) or any(map(is_failure, lines)))


if __name__ == "__main__":
    sys.exit(main())
