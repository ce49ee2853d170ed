"""How near an image is to another, as papers on super-resolution measure it: on luma of 8-bit images."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BT601 = (65.481, 128.553, 24.966)
WINDOW, SIGMA = 11, 1.5
# (0.01 * 255)^2 and (0.03 * 255)^2
STABILISERS = (6.5025, 58.5225)
MOST_DB = 100.0
"""What two equal images get: their ratio is infinite."""


def luma(image: Tensor) -> Tensor:
    """Y of BT.601 in 16..235, not rounded: uint8 [3, H, W] -> float64 [H, W]."""
    red, green, blue = image.double() / 255
    return 16 + BT601[0] * red + BT601[1] * green + BT601[2] * blue


def psnr(found: Tensor, wanted: Tensor) -> float:
    """10 log10(255^2 / mean (found - wanted)^2) in dB, of planes [H, W] in 0..255; at most 100."""
    error = (found - wanted).square().mean().item()
    return min(MOST_DB, 10 * math.log10(255**2 / error)) if error else MOST_DB


def ssim(found: Tensor, wanted: Tensor) -> float:
    """Structural similarity (Wang et al. 2004) of planes [H, W] in 0..255: mean over the windows that lie inside.

    (2 m_x m_y + c1)(2 s_xy + c2) / ((m_x^2 + m_y^2 + c1)(s_x^2 + s_y^2 + c2)) with moments under a Gaussian of 11 x 11 pixels.
    """
    if min(found.shape) < WINDOW:
        raise ValueError(f"SSIM needs images of at least {WINDOW} x {WINDOW} pixels, got {tuple(found.shape)}")
    x, y = found, wanted
    mean_x, mean_y, xx, yy, xy = blurred(torch.stack((x, y, x * x, y * y, x * y)))
    variance_x, variance_y, covariance = xx - mean_x**2, yy - mean_y**2, xy - mean_x * mean_y
    c1, c2 = STABILISERS
    alike = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return (alike / ((mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2))).mean().item()


def blurred(planes: Tensor) -> Tensor:
    """[P, H, W] -> [P, H - 10, W - 10]: means under the Gaussian, of windows that lie inside."""
    offsets = torch.arange(WINDOW, dtype=planes.dtype, device=planes.device) - WINDOW // 2
    weights = torch.exp(-0.5 * (offsets / SIGMA) ** 2)
    weights = weights / weights.sum()
    rows = F.conv2d(planes[:, None], weights[None, None, :, None])
    return F.conv2d(rows, weights[None, None, None, :])[:, 0]
