"""Which calls the kernels serve, how they are cut into programs, and what torch and the compiler see of them."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import nalaformer
from helpers.kernel_checks import DEVICE, make, outcome, relative_error
from helpers.places import TESTS
from nalaformer import Rotary
from nalaformer.ops.backend import INTERPRETING

pytestmark = pytest.mark.kernels

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Memory that nothing wrote is NaN: a missing store fails."""


def test_products_in_float32_do_not_slow_the_kernels_down():
    from nalaformer.ops.kernels.linear.call import call_dtypes

    product, value = torch.empty(1), torch.empty(1, dtype=torch.bfloat16)
    assert call_dtypes("softmax", product, product, value) == (torch.bfloat16, torch.bfloat16)
    assert call_dtypes("relu", product, product, value) == (torch.float32, torch.float32)


@pytest.mark.parametrize("longest_whole", [2048, 10])
def test_result_does_not_depend_on_tiles(longest_whole, monkeypatch):
    from nalaformer.ops.kernels.linear import call as calls

    tokens = 150
    monkeypatch.setattr(calls, "WHOLE_TOKENS", longest_whole)
    tensors = make(*[(1, tokens, 1, 8)] * 3)
    arguments = {"heads": 1, "head_dim": 8}
    first = outcome("triton", "norm_aware", torch.float32, tensors, torch.ones(1, tokens, 1, 8, device=DEVICE), **arguments)
    monkeypatch.setattr(calls, "TILES", {kernel: {256: calls.Tile(128, 4, 1)} for kernel in calls.TILES})
    monkeypatch.setattr(calls, "CALLS", {})
    second = outcome("triton", "norm_aware", torch.float32, tensors, torch.ones(1, tokens, 1, 8, device=DEVICE), **arguments)
    for x, y in zip(first, second, strict=True):
        assert relative_error(x, y.double()) < 1e-6


@pytest.mark.parametrize(("name", "contrast"), [("norm_aware", 0.0), ("polarity", 0.0), ("norm_aware", 0.25)])
def test_operator_keeps_the_contract_of_torch_library(name, contrast):
    from nalaformer.ops.kernels.linear import bidirectional_op

    spec = nalaformer.feature_map(name, num_heads=2, head_dim=8).to(DEVICE).kernel_spec(torch.device(DEVICE))
    q, k, v = (x.requires_grad_() for x in make(*[(1, 9, 2, 8)] * 3))
    weight = torch.rand(1, 2, 9 if contrast else 0, device=DEVICE, requires_grad=contrast > 0)
    extended = {"contrast": contrast, "has_weight": contrast > 0}
    settings = spec.settings(streams=spec.parts if name == "polarity" else 1, eps=1e-6, **extended)
    arguments = (q, k, v, spec.parameters.detach(), weight, *[None] * 6, 0, *settings, True)
    # aot_dispatch repeats what tests/test_export.py asks of torch.compile, minutes long in the interpreter
    torch.library.opcheck(
        bidirectional_op.forward, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


def test_products_with_the_mean_query_keep_the_contract_of_torch_library():
    from nalaformer.ops.kernels.linear.global_query_op import forward

    q, k = (x.requires_grad_() for x in make(*[(1, 9, 2, 8)] * 2))
    mask = torch.ones(1, 9, dtype=torch.bool, device=DEVICE)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(forward, (q, k, mask, None, "split", 2), test_utils=checks)


@pytest.mark.parametrize("name", ["focused", "reflection"])
def test_map_across_heads_keeps_the_contract_of_torch_library(name):
    from nalaformer.ops.kernels.linear.cross_head_op import forward

    (x,) = make((1, 9, 2, 8))
    rows = torch.rand(1, 16 if name == "focused" else 32, device=DEVICE, requires_grad=True)
    torch.library.opcheck(
        forward,
        (x.requires_grad_(), rows, name, 3.0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_causal_operator_keeps_the_contract_of_torch_library():
    from nalaformer.ops.kernels.linear import causal_op
    from nalaformer.ops.kernels.linear.step_op import step

    spec = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8).kernel_spec(torch.device(DEVICE))
    parameters, settings = spec.parameters, spec.settings(streams=1, eps=1e-6)
    q, k, v = (x.requires_grad_() for x in make(*[(1, 9, 2, 8)] * 3))
    arguments = (q, k, v, parameters, *[None] * 8, 0, *settings, True, True, False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(causal_op.forward, arguments, test_utils=checks)
    torch.library.opcheck(causal_op.forward, (*arguments[:-1], True), test_utils=checks)
    state = nalaformer.LinearState.empty(1, 2, 16, 8, device=DEVICE)
    token = [x[:, :1].detach() for x in (q, k, v)]
    torch.library.opcheck(
        step, (*token, parameters, *[None] * 4, *state.tensors().values(), None, *settings), test_utils=checks[::2]
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"causal": True, "name": "polarity"}, "a scale per row in causal attention"),
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 160}, "more than 128 channels"),
        ({"head_dim": 80}, "more than 64 channels do not fit on chip unless"),
        (
            {"head_dim": 80, "causal": True},
            "unless all are bfloat16, were verified with these maps alone: norm_aware",
        ),
        ({"samples": 32_768}, "32768 samples of 2 heads are more than a grid holds, 65,535"),
    ],
)
def test_explicit_choice_of_the_kernels_says_why_it_cannot_serve(change, reason):
    head_dim, dtype = change.get("head_dim", 8), change.get("dtype", torch.float32)
    samples = change.get("samples", 1)
    q, k, v = (x.to(dtype).expand(samples, -1, -1, -1) for x in make(*[(1, 9, 2, head_dim)] * 3))
    feature_map = nalaformer.feature_map(change.get("name", "relu"), num_heads=2, head_dim=head_dim)
    with nalaformer.use_backend("triton"), pytest.raises(ValueError, match=f"triton backend cannot serve.*{reason}"):
        nalaformer.linear_attention(q, k, v, feature_map=feature_map, causal=change.get("causal", False))


def test_features_too_wide_for_the_chip_are_refused_with_the_reason():
    # 96 channels, both signs, and the pair lengths of a normalised rotary: 288 features
    q, k, v = make(*[(1, 9, 2, 96)] * 3)
    feature_map = nalaformer.feature_map("split", num_heads=2, head_dim=96).to(DEVICE)
    rotary = Rotary.sequence(9, 96, normalised=True, device=DEVICE)
    with nalaformer.use_backend("triton"), pytest.raises(ValueError, match=r"cannot serve.*288 features"):
        nalaformer.linear_attention(q, k, v, feature_map=feature_map, rotary=rotary)


@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_call_serves_every_number_of_tokens(causal):
    """The second number makes it a symbol, and shapes that follow from it must be those of the launches."""
    feature_map = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8).to(DEVICE)

    def attend(*tensors):
        return nalaformer.linear_attention(*tensors, feature_map=feature_map, causal=causal)

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    with nalaformer.use_backend("triton"):
        for tokens in (40, 70, 300):
            tensors = make(*[(1, tokens, 2, 8)] * 3)
            assert torch.equal(compiled(*tensors), attend(*tensors))
    if causal:
        # with one number, then with any: not one graph for each way to cut the tokens
        assert counter.frame_count == 2


@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_layer_keeps_the_kernels(causal):
    feature_map = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=16)
    graphs = []

    def attend(x):
        return nalaformer.linear_attention(x, x, x, feature_map=feature_map, causal=causal)

    def look(graph, inputs):
        graphs.append(graph)
        return graph

    with nalaformer.use_backend("triton"):
        torch.compile(attend, backend=look, fullgraph=True)(torch.randn(1, 9, 2, 16, device=DEVICE))
    names = [str(node.target) for node in graphs[0].graph.nodes]
    # a plain formula in the graph would be right, and slow
    assert any(name.startswith("nalaformer.causal" if causal else "nalaformer.bidirectional") for name in names)


def attend_to(tokens, feature_map):
    with nalaformer.use_backend("triton"):
        return nalaformer.linear_attention(*make(*[(1, tokens, 1, 8)] * 3), feature_map=feature_map)


def test_a_call_asks_its_map_once_what_the_kernels_compute(monkeypatch):
    feature_map = nalaformer.feature_map("norm_aware", num_heads=1, head_dim=8)
    answer, asked = feature_map.kernel_spec, []
    monkeypatch.setattr(feature_map, "kernel_spec", lambda device: asked.append(device) or answer(device))
    attend_to(5, feature_map)
    assert len(asked) == 1


def test_calls_of_many_shapes_do_not_pile_up(monkeypatch):
    from nalaformer.ops.kernels.common.launch import Bounded
    from nalaformer.ops.kernels.linear import call as calls

    monkeypatch.setattr(Bounded, "MOST", 2)
    monkeypatch.setattr(calls, "CALLS", Bounded())
    relu = nalaformer.feature_map("relu", num_heads=1, head_dim=8)
    for tokens in (3, 4, 5):
        attend_to(tokens, relu)
    assert 0 < len(calls.CALLS) <= 2


@pytest.fixture
def call(monkeypatch):
    """What the launches for some input share."""
    from nalaformer.ops.kernels.linear import call as calls

    monkeypatch.setattr(calls, "CALLS", {})
    attend_to(5, nalaformer.feature_map("relu", num_heads=1, head_dim=8))
    (made,) = (x for x in calls.CALLS.values() if isinstance(x, calls.Call))
    return made


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_tiles_follow_the_wider_of_head_and_values_and_what_the_chip_holds(call, reads_ahead, monkeypatch):
    from nalaformer.ops.kernels.linear import call as calls

    monkeypatch.setattr(calls, "reads_ahead", lambda device: reads_ahead)
    for value_dim, size in ((8, 64), (100, 128)):
        for pairs, tiles in ((0, calls.TILES), (4, calls.ROTARY_TILES)):
            entry = tiles["dk"][size]
            chosen = replace(call, operand=torch.bfloat16, value_dim=value_dim, pairs=pairs).tile("dk")
            assert chosen == (entry if reads_ahead else replace(entry, stages=1))


def test_programs_come_in_full_rounds(call, monkeypatch):
    from nalaformer.ops.kernels.linear import call as calls

    monkeypatch.setattr(calls, "SPREAD", dict.fromkeys(calls.SPREAD, (2, 2)))
    monkeypatch.setattr(calls, "processors", lambda device: 2)
    tile = call.tile("output").tokens
    # four programs at once and six rows: halves of them in three full rounds, not whole ones in two of which one is half empty
    six = replace(call, samples=6, launches={})
    assert six.splits("output", 49 * tile, 1) == (2, 25 * tile)
    # rows that fill a round are not split, nor are tokens that make a step too few
    assert replace(call, samples=4, launches={}).splits("output", 49 * tile, 1) == (1, 49 * tile)
    assert replace(call, launches={}).splits("output", 3 * tile, 1) == (1, 3 * tile)
    # values of 128 channels: sums as large as 32 tokens, twice that for the two steps, whatever the tile
    monkeypatch.setattr(calls, "TILES", {"output": {128: calls.Tile(32, 8, 1)}})
    large = replace(call, value_dim=128, launches={})
    assert large.tile("output").tokens == 16
    assert large.splits("output", 128, 1) == (2, 64)


def test_reflections_across_heads_refuse_other_heads():
    q, k, v = make((1, 9, 4, 8), *[(1, 9, 2, 8)] * 2)
    feature_map = nalaformer.feature_map("reflection", num_heads=2, head_dim=8).to(DEVICE)
    with nalaformer.use_backend("triton"), pytest.raises(ValueError, match=r"made for \(2\), got 4; use cross_head=False"):
        nalaformer.linear_attention(q, k, v, feature_map=feature_map)


@pytest.mark.parametrize(
    ("before", "faults"),
    [
        # what ptxas 12.8 made of the causal kernel in tiles of 64 tokens and one stage, and what ptxas 12.9 made of it
        ("LOP3.LUT R0, R0, R7, RZ, 0xfc, !PT", 1),
        ("IMAD.MOV.U32 R0, RZ, RZ, RZ", 0),
        ("@P0 IMAD.MOV.U32 R0, RZ, RZ, RZ", 1),
        ("CS2R R0, SRZ", 0),
        ("IMAD.MOV.U32 R0, RZ, RZ, RZ ; LDL.64 R0, [R1+0x8]", 1),
        ("CS2R R10, SRZ ; IMAD.MOV.U32 R0, RZ, R11", 1),
        ("IMAD.MOV.U32 R0, RZ, RZ, RZ ; HGMMA.64x64x16.F32.BF16 R1, gdesc[UR8].tnspB, RZ, !UPT", 0),
    ],
)
@pytest.mark.parametrize("shared", ["", "U"], ids=["of threads", "of warps"])
def test_a_descriptor_from_a_register_that_was_not_cleared_is_found(before, faults, shared):
    from nalaformer.ops.kernels.common.machine_code import undefined_descriptors

    if shared:
        before = re.sub(r"\b(IMAD\.MOV\.U32|CS2R) R", "UMOV UR", before).replace("RZ, RZ, RZ", "URZ").replace("SRZ", "URZ")
        before = before.replace(" R", " UR")
    code = [*before.split(" ; "), f"{shared}IADD3 {shared}R61, {shared}P1, {shared}R61, 0x20, {shared}RZ"]
    wanted = f"{shared}IADD3.X {shared}R6, {shared}R0, -0x3ffffff0, {shared}RZ, {shared}P1, !{shared}PT"
    lines = [f"        /*{16 * place:04x}*/                   {line} ;" for place, line in enumerate([*code, wanted, "EXIT"])]
    assert undefined_descriptors("\n".join(lines)) == [wanted] * faults


@pytest.mark.parametrize(
    ("opcode", "register", "offset", "expected"),
    [
        (0x7810, 0x05, 0, True),
        (0x7890, 0x1F, 0, True),
        # the register that is always zero, another instruction, a constant that lies across two instructions
        (0x7810, 0xFF, 0, False),
        (0x7890, 0x3F, 0, False),
        (0x7882, 0x05, 0, False),
        (0x7810, 0x05, 4, False),
    ],
)
def test_machine_code_without_such_sums_is_not_disassembled(opcode, register, offset, expected):
    from nalaformer.ops.kernels.common.machine_code import may_have_descriptors

    instruction = (opcode | 6 << 16 | register << 24 | 0xC0000010 << 32).to_bytes(8, "little") + bytes(8)
    assert may_have_descriptors(bytes(64 + offset) + instruction + bytes(32)) is expected


def test_code_that_cannot_be_looked_at_counts_as_broken(monkeypatch, tmp_path):
    from nalaformer.ops.kernels.common import machine_code

    def missing(cubin):
        raise FileNotFoundError("no cuobjdump")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_code, "may_have_descriptors", lambda cubin: cubin == b"descriptors")
    monkeypatch.setattr(machine_code, "disassemble", missing)
    with pytest.warns(UserWarning, match="no cuobjdump"):
        assert machine_code.is_miscompiled(b"descriptors")
    assert not machine_code.is_miscompiled(b"none")


@pytest.mark.parametrize("faults", [[], ["IADD3.X"]], ids=["right", "broken"])
def test_machine_code_is_disassembled_once(faults, monkeypatch, tmp_path):
    from nalaformer.ops.kernels.common import machine_code

    looked = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_code, "may_have_descriptors", lambda cubin: True)
    monkeypatch.setattr(machine_code, "disassemble", lambda cubin: looked.append(cubin))
    monkeypatch.setattr(machine_code, "undefined_descriptors", lambda code: faults)
    assert [machine_code.is_miscompiled(b"some code") for _ in range(3)] == [bool(faults)] * 3
    assert len(looked) == 1


class Compiled:
    def __init__(self, form):
        self.asm = {"cubin": repr(sorted(form.items())).encode()}


class Assembled:
    """A kernel that compiles to the name of its form."""

    def warmup(self, *arguments, grid, **form):
        return Compiled(form)

    __name__ = "assembled"


@pytest.mark.parametrize(("right", "chosen"), [("4), ('num_stages', 3", None), ("8", 8), ("2", 2)])
def test_a_kernel_that_the_assembler_breaks_takes_another_form(right, chosen, monkeypatch):
    from nalaformer.ops.kernels.common import launch, machine_code

    monkeypatch.setattr(machine_code, "is_miscompiled", lambda cubin: f"('num_warps', {right})" not in cubin.decode())
    table = {"num_stages": 3, "num_warps": 4}
    if chosen is None:
        with pytest.raises(RuntimeError, match="breaks assembled in every form"):
            launch.working_options(Assembled(), (), (1,), table)
    else:
        assert launch.working_options(Assembled(), (), (1,), table)["num_warps"] == chosen


if INTERPRETING:

    @pytest.mark.parametrize(
        ("calls", "kernels"),
        [
            pytest.param(
                "backbone",
                "depthwise_gradient_kernel depthwise_kernel norm_gradient_kernel norm_kernel residual_gradient_kernel "
                "residual_kernel",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                "bidirectional",
                "dk_kernel dq_kernel dsums_kernel feature_gradient_kernel feature_products_kernel feature_sums_kernel "
                "merge_kernel output_kernel query_sums_kernel short_gradient_kernel short_kernel state_kernel "
                "whole_gradient_kernel whole_kernel",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                "causal",
                "causal_dk_kernel causal_dq_kernel causal_dv_kernel causal_kernel causal_whole_gradient_kernel dsums_kernel "
                "prefix_kernel state_kernel",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                "large_heads",
                "dk_kernel dq_kernel dsums_kernel output_kernel query_sums_kernel state_kernel "
                "whole_gradient_kernel whole_kernel",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                "language",
                "cross_entropy_kernel delta_gradient_kernel delta_output_kernel gated_product_gradient_kernel "
                "gated_product_kernel norm_gradient_kernel norm_kernel scan_gradient_kernel scan_kernel "
                "short_convolution_gradient_kernel short_convolution_kernel short_convolution_step_kernel solve_kernel "
                "unit_features_gradient_kernel unit_features_kernel",
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_kernels_compile_for_a_gpu_that_is_not_here(calls, kernels, tmp_path):
        script = TESTS / "compile_kernels.py"
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
        run = subprocess.run([sys.executable, script, calls], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == kernels.split()


class NarrowQueries(nalaformer.FeatureMap):
    """A map that the kernels do not know, with one feature of a query and eight of a key."""

    def query(self, q):
        return q[..., :1].square()

    def key(self, k):
        return k.square()


@pytest.mark.parametrize("causal", [False, True])
def test_features_made_outside_of_the_kernels_have_one_width(causal):
    with nalaformer.use_backend("triton"), pytest.raises(ValueError, match="as many features, got 1 and 8 of NarrowQueries"):
        nalaformer.linear_attention(
            *make(*[(1, 5, 1, 8)] * 3), feature_map=NarrowQueries(num_heads=1, head_dim=8), causal=causal
        )


class Exponential(nalaformer.FeatureMap):
    """A map that the kernels do not know, whose features leave every float type unless each key has a scale."""

    def query(self, q):
        return q.exp()

    def key(self, k, log_scale=0.0):
        return (k - log_scale).exp()

    def key_log_scale(self, k):
        return k.amax(dim=-1, keepdim=True)


@pytest.mark.parametrize("normalised", [False, True])
def test_a_map_of_users_with_scales_of_keys_is_left_to_plain_torch(normalised):
    rotary = Rotary.sequence(9, 8, normalised=normalised, device=DEVICE)
    given = {"feature_map": Exponential(num_heads=2, head_dim=8), "rotary": rotary}
    with nalaformer.use_backend("triton"), pytest.raises(ValueError, match="divides each key by a scale of its own"):
        nalaformer.linear_attention(*make(*[(1, 9, 2, 8)] * 3), **given)
