"""Images to latents, once, in files that a stopped process finds again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...atomic_files import atomic_file, atomic_folder, unfinished_folder, write_atomically
from ..bad_sample import BadSample
from .autoencoder import Autoencoder, load_autoencoder
from .base import SPLITS, GenerationData, GenerationDataConfig, open_generation_data
from .latents import ABOUT, FORMAT, Latents, read_note, shard_path

# what is being encoded, while it is
NOTE = "encoding.json"
# images of one file: what a stopped encoding repeats at most
SHARD = 1024


def encode_images(
    config: GenerationDataConfig,
    autoencoder: str | Path,
    out: str | Path,
    *,
    batch_size: int = 16,
    device: str = "cpu",
    advance: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """Encode the images of both splits with an AutoencoderKL folder into `out`; the same call goes on after a stop.

    Images that cannot be read are left out. advance: told how many more images are done, and of how many.
    Returns what about.json says: among others "counts", latents by split, and "left_out", a line for each image.
    """
    splits = {split: open_generation_data(replace(config, flip=False), split) for split in SPLITS}
    first = splits["train"]
    if isinstance(first, Latents):
        raise ValueError(
            f"images to encode must be pixels, got the latents in {config.data}; name the images they were made of"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    encoder = load_autoencoder(autoencoder, device=device)
    asked: dict[str, Any] = {
        "format": FORMAT,
        "data": str(Path(config.data).absolute()),
        "images": {split: len(data) for split, data in splits.items()},
        "holdout": config.holdout,
        "seed": config.data_seed,
        "autoencoder": encoder.fingerprint,
        "shape": list(encoder.latent_shape(first.height, first.width)),
        "class_names": list(first.class_names),
    }
    with atomic_folder(out, keep_unfinished=True) as aside:
        note = aside / NOTE
        if note.is_file() and read_note(note) != asked:
            raise ValueError(
                f"an encoding goes on with the images and the autoencoder that it was begun with, got others than "
                f"{unfinished_folder(Path(out))} notes; remove that folder to begin anew"
            )
        write_atomically(note, json.dumps(asked).encode())
        counts, shards, left_out = {}, {}, []
        for split, data in splits.items():
            notes = []
            for number, start in enumerate(range(0, len(data), SHARD)):
                places = range(start, min(start + SHARD, len(data)))
                notes.append(encode_shard(encoder, data, places, shard_path(aside, split, number), batch_size))
                if advance is not None:
                    advance(len(places), sum(asked["images"].values()))
            shards[split] = len(notes)
            counts[split] = sum(len(each["labels"]) for each in notes)
            left_out += [line for each in notes for line in each["left_out"]]
        about = asked | {"shards": shards, "counts": counts, "left_out": left_out}
        write_atomically(aside / ABOUT, json.dumps(about, indent=1).encode())
        note.unlink()
    return about


def encode_shard(encoder: Autoencoder, data: GenerationData, places: range, path: Path, batch_size: int) -> dict[str, Any]:
    """Write the latents of these images, then their labels, which say that the shard is whole; one that is stays."""
    note = path.with_suffix(".json")
    if note.is_file():
        return read_note(note)
    images, labels, moments, left_out = [], [], [], []
    for place in places:
        try:
            image, label = data[place]
        except BadSample as error:
            left_out.append(str(error))
        else:
            images.append(image)
            labels.append(label)
        if images and (len(images) == batch_size or place == places[-1]):
            moments.append(torch.stack(encoder.encode(torch.stack(images)), dim=1).half().cpu().numpy())
            images = []
    shape = (0, 2, *encoder.latent_shape(data.height, data.width))
    with atomic_file(path) as aside, aside.open("wb") as file:
        np.save(file, np.concatenate(moments) if moments else np.empty(shape, dtype=np.float16), allow_pickle=False)
    written = {"labels": labels, "left_out": left_out}
    write_atomically(note, json.dumps(written).encode())
    return written
