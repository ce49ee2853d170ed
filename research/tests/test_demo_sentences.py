"""The sentences of the demo, as a newcomer reads them."""

import pytest
import torch

from research.demo import ENTRIES, OURS
from research.demo.diagnose import FACTORS, Diagnosis
from research.demo.report import cells
from research.demo.study import DemoResult, Finding

TIMES = {"softmax": (4.567, 63.14, 1113.2), "linear": (1.0, 2.0, 3.0), "nalaformer": (2.0, 12.0, 97.26)}
SHARPENING = {"softmax": 0.5, "linear": 0.0, "nalaformer": 0.25}
EVEN = (0.9, 0.9, 0.9)


def make_finding(attention, pointing, majority=None):
    grown = tuple(SHARPENING.get(attention, 0.1) if factor <= 0.5 else 0.0 for factor in FACTORS)
    weights = torch.full((16, 32), 1 / 40)
    measured = {"correlation": 0.0, "drop": 0.0, "norms": (), "entropies": (), "grown": grown, "parameters": 1}
    return Finding(
        entry=next(entry for entry in ENTRIES if entry.attention == attention),
        accuracies={"pointing": pointing, "majority": majority or (0.9,) * len(pointing)},
        curves={},
        diagnosis=Diagnosis(**measured, by_nearness=weights, mean_by_nearness=weights[0]),
        milliseconds=TIMES.get(attention, (1.5, 9.0, 88.0)),
    )


def result(nalaformer, linear):
    scores = {"softmax": (0.99,) * len(linear), "linear": linear, "nalaformer": nalaformer}
    found = tuple(make_finding(attention, values) for attention, values in scores.items())
    return DemoResult(found=found, chance={}, steps={}, batch_size=32, seconds=1.0)


@pytest.mark.parametrize(
    ("nalaformer", "linear", "sentence"),
    [
        (
            *((0.87, 0.88, 0.86), (0.78, 0.79, 0.77)),
            "At pointing NaLaFormer (0.87) leads linear (ReLU) (0.78) by 0.07 to 0.11 (95% interval over seeds).",
        ),
        (
            *((0.78, 0.79, 0.77), (0.87, 0.88, 0.86)),
            "At pointing linear (ReLU) (0.87) leads NaLaFormer (0.78) by 0.07 to 0.11 (95% interval over seeds).",
        ),
        (
            *((0.6, 0.9, 0.7), (0.5, 0.9, 0.7)),
            "At pointing 3 seeds show no difference between NaLaFormer (0.73) and linear (ReLU) (0.70).",
        ),
        (
            *((0.9,), (0.1,)),
            "At pointing one seed cannot tell whether NaLaFormer (0.90) and linear (ReLU) (0.10) differ; ask for more with "
            "--seeds.",
        ),
    ],
)
def test_the_leader_is_one_plain_sentence(nalaformer, linear, sentence):
    assert sentence in result(nalaformer, linear).findings()


def test_the_other_findings_are_plain_sentences():
    lines = result((0.87, 0.88), (0.78, 0.79)).findings()
    assert lines[0] == (
        "Pointing needs sharp attention: softmax reaches 0.99. Of the methods that take linear time, NaLaFormer reaches 0.88, "
        "linear (ReLU) 0.79."
    )
    assert lines[-2] == (
        "When queries of the trained networks grow from half to twice their norm, attention sharpens in softmax (by 0.50 "
        "nats), NaLaFormer (by 0.25 nats); it stays as it is in linear (ReLU)."
    )


def with_ours(ours, *, hedgehog, linear=(0.78, 0.79, 0.77), majority=EVEN):
    found = (
        make_finding("softmax", (0.99, 1.0, 1.0)),
        make_finding("linear", linear),
        make_finding("hedgehog", hedgehog),
        make_finding("channel_softmax", ours, majority),
    )
    return DemoResult(found=found, chance={}, steps={}, batch_size=32, seconds=1.0)


def test_our_map_stands_beside_softmax_and_the_best_published_one():
    lines = with_ours((0.936, 0.937, 0.94), hedgehog=(0.949, 0.941, 0.94)).findings()
    assert lines[1:4] == [
        f"At pointing softmax (1.00) leads {OURS.label} (0.94) by 0.04 to 0.07 (95% interval over seeds).",
        f"At pointing 3 seeds show no difference between {OURS.label} (0.94) and Hedgehog (0.94).",
        f"Where sharp lookups matter and softmax costs too much, we recommend {OURS.label}: 3 seeds show no published map in "
        "linear time ahead of it. Hedgehog (0.94) may be as good or better. Where the time of softmax is no matter, it points "
        "better.",
    ]
    assert "it leads the best published map in linear time, Hedgehog (0.90)." in with_ours((0.94,) * 3, hedgehog=EVEN).advice()
    assert lines[-1] == (
        f"A sequence of 1,024 tokens takes one core 4.57 ms with softmax and 1.5 ms with {OURS.label}; one of 16,384 tokens "
        "takes 1,110 ms and 88 ms."
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"hedgehog": (0.96, 0.961, 0.962)},
            f"For sharp lookups in linear time these figures speak for Hedgehog, not for {OURS.label}.",
        ),
        (
            {"hedgehog": EVEN, "linear": (0.9, 0.94, 0.97)},
            f"These figures do not speak for {OURS.label}: it does not lead linear (ReLU) at pointing.",
        ),
        (
            {"hedgehog": EVEN, "majority": (0.7, 0.71, 0.7)},
            f"These figures do not speak for {OURS.label}: softmax leads it at the task that needs flat attention.",
        ),
    ],
    ids=["led", "not sharper", "not flat"],
)
def test_our_map_is_not_recommended_against_the_results(given, sentence):
    found = with_ours((0.936, 0.937, 0.94), **given)
    assert sentence in found.findings()
    assert not found.ours_is_recommended
    assert not any("recommend" in line for line in found.findings())


def test_times_are_written_without_exponents():
    found = result((0.87, 0.88), (0.78, 0.79))
    assert found.findings()[-1] == (
        "A sequence of 1,024 tokens takes one core 4.57 ms with softmax and 2 ms with NaLaFormer; one of 16,384 tokens "
        "takes 1,110 ms and 97.3 ms."
    )
    assert cells(found.found[0])[-1] == "1,113"
