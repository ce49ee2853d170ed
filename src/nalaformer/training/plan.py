"""What a run is going to do and whether it can: asked before the first step, or instead of it."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..atomic_files import free_bytes, megabytes, refuse_full_disk
from ..data.loading import try_samples, workers_here
from ..folder_lock import refuse_in_use
from .precision import precision_on, slowness_of
from .ranks import find_device
from .settings import refuse_other_origin, refuse_other_settings

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .trainer import Trainer

# of each split, so that a plan of millions of images is a matter of seconds
MOST_TRIED, SECONDS_OF_TRYING = 1_000, 5.0
MOST_NAMED = 10


def plan_lines(trainer: "Trainer") -> list[str]:
    """The run in words; everything that would refuse it does. Nothing is written."""
    config = trainer.config
    refuse_in_use(trainer.folder)
    found = trainer.checkpoints.newest()
    if found is not None:
        refuse_other_run(trainer, found[1])
    refuse_small_disk(trainer)
    done = found[0] if found is not None else 0
    state = f"goes on after step {done}" if done else "new"
    if done >= trainer.total_steps:
        state = "finished"
    parameters = sum(p.numel() for p in trainer.model.parameters())
    learned = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    device = find_device(config.device)
    precision = str(precision_on(device, config.precision)).removeprefix("torch.")
    return [
        f"{trainer.title}: {trainer.total_steps} steps of {config.batch_size}, {trainer.per_epoch} an epoch; {state}",
        f"data: {len(trainer.task.train_data):,} samples to learn from, {len(trainer.task.eval_data):,} to evaluate on",
        *tried_lines(trainer),
        f"model: {type(trainer.model).__name__}, {parameters:,} parameters, of which {learned:,} learn",
        f"device: {device.type}, {precision}",
        f"folder: {trainer.folder}; a checkpoint takes about {megabytes(checkpoint_bytes(trainer))}, "
        f"{megabytes(free_bytes(trainer.folder))} are free",
        *(f"note: {note}" for note in notes_of(trainer, device)),
    ]


def tried_lines(trainer: "Trainer") -> list[str]:
    """What came of reading some samples of each split; what cannot be used is named, and refused where the run would stop."""
    config, counts, rejected = trainer.config, [], []
    for data, use in ((trainer.task.train_data, "to learn from"), (trainer.task.eval_data, "to evaluate on")):
        tried, bad = try_samples(data, seed=config.seed, most=MOST_TRIED, seconds=SECONDS_OF_TRYING)
        counts.append(f"{'all' if tried == len(data) else f'{tried:,}'} {use}")
        rejected += bad
    found = f"{len(rejected)} of these cannot be used" if rejected else "these can be used"
    # one image may give many samples: like the run, count it once
    rejected = list(dict.fromkeys(rejected))
    if rejected and config.on_corrupt == "stop":
        raise ValueError(f"{rejected[0]}; mend it or move it away, or on_corrupt=skip leaves it out")
    # a run that goes on counts those that it has met before
    listed = trainer.read_rejected()
    counted = list(dict.fromkeys([*rejected, *sorted(listed)]))
    if rejected and len(counted) > config.most_corrupt:
        more = f" (and remove {trainer.rejected_path}, which lists {len(listed)} of before)" if listed else ""
        raise ValueError(
            f"at most {config.most_corrupt} samples may be left out, got {len(counted)} that cannot be used, the first: "
            f"{counted[0]}; mend them{more}, move them away, or raise most_corrupt"
        )
    lines = [f"tried: {' and '.join(counts)}; {found}"]
    lines += [f"left out: {line}; mend it or move it away" for line in rejected[:MOST_NAMED]]
    return [*lines, f"left out: {len(rejected) - MOST_NAMED} more"] if len(rejected) > MOST_NAMED else lines


def notes_of(trainer: "Trainer", device: torch.device) -> list[str]:
    """What a reader of the settings would not expect of the run."""
    config, notes = trainer.config, list(trainer.notes)
    if config.cooldown:
        unit = "epochs" if config.epochs else "steps"
        notes.append(
            f"the run takes {trainer.total_steps} steps ({trainer.per_epoch} an epoch): {config.epochs or config.steps:g} "
            f"{unit} and a cool-down of {config.cooldown:g} at the lowest rate; cooldown=0 leaves it out"
        )
    if config.repeats > 1:
        notes.append(
            f"each sample comes {config.repeats} times in a row, so an epoch shows 1/{config.repeats} of them; repeats=1 "
            "shows all"
        )
    warmup = config.in_steps(config.warmup, trainer.per_epoch)
    if warmup > trainer.total_steps:
        notes.append(
            f"the warm-up takes {warmup} steps and the run {trainer.total_steps}, so the learning rate does not reach "
            f"{config.learning_rate:g}; set warmup"
        )
    workers = workers_here(config.workers)
    if workers < config.workers:
        notes.append(f"{workers} processes read data instead of {config.workers}, as many as this machine has cores for")
    slowness = slowness_of(device, precision_on(device, config.precision))
    return [*notes, slowness] if slowness else notes


def refuse_other_run(trainer: "Trainer", checkpoint: "Checkpoint") -> None:
    """A folder holds one run: its settings, its model and its data."""
    refuse_other_settings(checkpoint.state["settings"], trainer.settings, trainer.folder)
    refuse_other_origin(checkpoint.state.get("made_from"), trainer.made_from, trainer.folder)
    ours, theirs = trainer.model.state_dict(), checkpoint.tensors["model"]
    odd = sorted(ours.keys() ^ theirs.keys()) or [name for name in ours if ours[name].shape != theirs[name].shape]
    if odd:
        raise ValueError(
            f"{trainer.folder} holds a run of another model: {odd[0]} is {described(theirs.get(odd[0]))} there and "
            f"{described(ours.get(odd[0]))} here; choose another folder"
        )


def described(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{list(tensor.shape)}"


def refuse_small_disk(trainer: "Trainer") -> None:
    """The newest checkpoint and the one that is being written must fit; what is there already may go."""
    size = checkpoint_bytes(trainer)
    present = len(trainer.checkpoints.steps())
    refuse_full_disk(trainer.folder, max(0, 2 - present) * size, "a run")


def checkpoint_bytes(trainer: "Trainer") -> int:
    """Weights, their average, and two moments of what learns, as AdamW has."""
    weights = sum(value.numel() * value.element_size() for value in trainer.model.state_dict().values())
    moments = sum(2 * p.numel() * p.element_size() for p in trainer.model.parameters() if p.requires_grad)
    return weights * (2 if trainer.config.ema else 1) + moments
