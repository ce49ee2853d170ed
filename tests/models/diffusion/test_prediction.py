"""What a sampler asks of a network: as a CUDA graph the same numbers, and never where somebody listens."""

import pytest
import torch

from nalaformer.models.diffusion import DiffusionTransformer
from nalaformer.models.diffusion.prediction import predict_guided, prediction


def network_on(device: str) -> DiffusionTransformer:
    torch.manual_seed(0)
    network = DiffusionTransformer(depth=2, dim=64, num_heads=2, patch_size=2, channels=3, num_classes=4)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return network.to(device).eval()


@pytest.mark.gpu
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@torch.no_grad()
def test_a_replay_predicts_what_the_network_does(guidance):
    network = network_on("cuda")
    labels = torch.tensor([0, 3], device="cuda")
    images = torch.randn(2, 3, 16, 8, device="cuda")
    predict = prediction(network, images, labels, guidance, calls=50)
    assert predict.__name__ == "replay_prediction"
    kept = []
    for time in (900.0, 500.0, 3.0):
        images = torch.randn_like(images)
        time = torch.tensor(time, device="cuda")
        expected = predict_guided(network, images, time, labels, guidance)
        kept.append((predict(images, time), expected))
    # earlier answers stay, as multistep samplers need
    for found, expected in kept:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@torch.no_grad()
def test_hooks_are_called_at_every_step(device):
    network = network_on(device)
    calls = []
    network.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    images, labels = torch.randn(1, 3, 8, 8, device=device), torch.tensor([1], device=device)
    predict = prediction(network, images, labels, 1.0, calls=50)
    for _ in range(3):
        predict(images, torch.tensor(10.0, device=device))
    assert len(calls) == 3
