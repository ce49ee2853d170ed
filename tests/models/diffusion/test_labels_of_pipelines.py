"""In which forms a pipeline takes the labels of its images."""

import numpy as np
import pytest
import torch

from nalaformer import NaLaDiT, NaLaDiTPipeline

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pipeline():
    torch.manual_seed(0)
    sizes = {"depth": 1, "dim": 16, "num_heads": 2, "patch_size": 2, "channels": 3, "num_classes": 2, "attention": "linear"}
    model = NaLaDiT(**sizes, objective="flow", height=4, width=4, class_names=["circle", "ring"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return NaLaDiTPipeline(model)


@pytest.mark.parametrize("labels", [torch.tensor([1, 0]), np.array([1, 0]), ("ring", np.int64(0)), range(1, -1, -1)])
def test_labels_may_come_as_a_tensor_an_array_or_a_range(pipeline, labels):
    assert torch.equal(pipeline.sample(labels, steps=2), pipeline.sample([1, 0], steps=2))


@pytest.mark.parametrize("labels", ["ring", 1, torch.tensor(1), np.int64(1)])
def test_a_label_that_is_no_list_is_refused_with_the_list_to_write(pipeline, labels):
    with pytest.raises(ValueError, match=r"labels must be a list with one for each image, got .*; write \[.*\] for one image"):
        pipeline.sample(labels)


@pytest.mark.parametrize("label", [0.5, None, "3.5"])
def test_a_label_that_is_neither_name_nor_number_is_refused(pipeline, label):
    with pytest.raises(ValueError, match="unknown label"):
        pipeline.sample([label])
