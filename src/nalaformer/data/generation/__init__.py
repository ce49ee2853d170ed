"""Images to learn to generate: generated shapes, folders, .npz files, and latents that were encoded once."""

from .autoencoder import Autoencoder, load_autoencoder
from .base import GENERATION_DATA, GenerationData, GenerationDataConfig, as_pixels, as_values, open_generation_data
from .encoding import encode_images
from .image_folder import FolderImages, square
from .latents import Latents
from .npz_images import NpzFile, NpzImages, unpack_images
from .shape_reader import Unreadable, judge_shapes, parse
from .shapes import PALETTE, SHAPES, Scene, Shapes, Thing, draw_scene, render

__all__ = [
    "GENERATION_DATA",
    "PALETTE",
    "SHAPES",
    "Autoencoder",
    "FolderImages",
    "GenerationData",
    "GenerationDataConfig",
    "Latents",
    "NpzFile",
    "NpzImages",
    "Scene",
    "Shapes",
    "Thing",
    "Unreadable",
    "as_pixels",
    "as_values",
    "draw_scene",
    "encode_images",
    "judge_shapes",
    "load_autoencoder",
    "open_generation_data",
    "parse",
    "render",
    "square",
    "unpack_images",
]
