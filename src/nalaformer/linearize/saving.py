"""From files to a folder that transformers loads: text in, a converted model out."""

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..atomic_files import clear_disk_errors, is_leftover, sync, sync_tree, unfinished_folder, write_atomically
from ..data.text import NothingToEvaluate, PackedTokens, TokenShards, find_text, fingerprint, load_tokenizer, tokenize_corpus
from ..json_text import parse_json
from .config import LinearizeConfig
from .model_card import model_card
from .run import Linearized

MADE_FROM = "made_from.json"
FINISHED = "finished"
TOKENS, RUNS, ADAPTER = "tokens", "runs", "adapter"
WEIGHTS = ("*.safetensors", "*.bin")


def claim_folder(out: str | Path, *, model: str | Path, data: Sequence[str | Path], length: int) -> None:
    """Note in the folder what is converted with what; `check_folder` says which folders are refused."""
    made_from = check_folder(out, model=model, data=data, length=length)
    Path(out).mkdir(parents=True, exist_ok=True)
    with clear_disk_errors(Path(out)):
        write_atomically(Path(out) / MADE_FROM, (json.dumps(made_from, indent=1) + "\n").encode())


def mark_finished(out: str | Path, config: LinearizeConfig) -> None:
    """Note in a claimed folder that the model, its tokenizer and the report of these settings are there."""
    place = Path(out) / MADE_FROM
    noted = claim_of(out) | {FINISHED: asdict(config)}
    with clear_disk_errors(place):
        write_atomically(place, (json.dumps(noted, indent=1) + "\n").encode())


def is_finished(out: str | Path, config: LinearizeConfig) -> bool:
    """True if `mark_finished` was called with these settings after the last claim, and the weights are still there."""
    if not any(path for pattern in WEIGHTS for path in Path(out).glob(pattern)):
        return False
    return bool(claim_of(out).get(FINISHED) == json.loads(json.dumps(asdict(config))))


def claim_of(out: str | Path) -> dict[str, Any]:
    """Return what `claim_folder` noted in a folder; nothing if it did not, or if that cannot be read."""
    try:
        return dict(parse_json((Path(out) / MADE_FROM).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def check_folder(out: str | Path, *, model: str | Path, data: Sequence[str | Path], length: int) -> dict[str, Any]:
    """What is converted with what; nothing is written.

    Refused are folders whose files would be overwritten, the model's own first of all, and those of another conversion: its
    tokens and checkpoints would be taken for this one's.
    """
    out, model = Path(out), Path(model)
    if out.resolve() == model.resolve():
        raise ValueError(f"the converted model needs a folder of its own, got that of the pretrained one ({out}); name another")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} must be a folder or not exist, got a file; name another")
    is_used = out.is_dir() and not all(map(is_leftover, out.iterdir()))
    if is_used and not (out / MADE_FROM).is_file():
        raise ValueError(
            f"{out} must be new, empty or an earlier conversion's folder, got one with other files; name another, or remove it"
        )
    made_from = description(Path(model), data, length)
    # before tokens and runs there is nothing that could be mistaken
    if any((out / part).exists() for part in (TOKENS, RUNS)):
        try:
            before = dict(parse_json((out / MADE_FROM).read_bytes()))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{out / MADE_FROM} must say what is converted there, got what cannot be read ({error}); name another "
                "folder, or remove this one"
            ) from error
        changes = [
            f"{name} was {before.get(name)}, is {value}" for name, value in made_from.items() if before.get(name) != value
        ]
        if changes:
            raise ValueError(f"{out} holds another conversion: {'; '.join(changes)}; name another folder, or remove it")
    return made_from


def description(model: Path, data: Sequence[str | Path], length: int) -> dict[str, Any]:
    """What tells one conversion from another, whatever its settings: model, text and length of the windows."""
    config = model / "config.json"
    weights = sorted(path for pattern in WEIGHTS for path in model.glob(pattern))
    texts = {}
    for path in map(Path, data):
        inside = sorted(path.rglob("*")) if is_tokenized(data) else find_text([path])
        sizes = [each.stat().st_size for each in inside if each.is_file()]
        texts[str(path.resolve())] = f"{len(sizes)} files, {sum(sizes)} bytes"
    return {
        "model": model.resolve().name,
        "config": sha256(config.read_bytes()).hexdigest()[:16] if config.is_file() else "none",
        "weights": {path.name: f"{path.stat().st_size} bytes, {end_hash(path)}" for path in weights},
        "data": texts,
        "length": length,
    }


def end_hash(path: Path, size: int = 1 << 20) -> str:
    """The hash of the last bytes: models of one architecture have files of one size, and whole files take minutes to read."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return sha256(file.read()).hexdigest()[:16]


def token_windows(
    data: Sequence[str | Path], *, length: int, tokenizer: str | Path, tokens: str | Path
) -> dict[str, PackedTokens]:
    """Windows of "train" and "val": of a folder that `nalaformer tokenize` wrote, or of text files, tokenized into `tokens`.

    Every tenth document of text files or so is for validation; files that were tokenized before are not read again.
    """
    folder = Path(data[0])
    if not is_tokenized(data):
        folder = Path(tokens)
        if not folder.exists():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ValueError("under torchrun the text must be tokens already; write them with `nalaformer tokenize` first")
            try:
                tokenize_corpus(data, folder, tokenizer=tokenizer, val_part=0.1)
            except NothingToEvaluate as error:
                # as a shell takes them: folders may have spaces in their names
                files, model = shlex.join(map(str, data)), shlex.quote(str(tokenizer))
                raise ValueError(
                    "the text must be several documents, of which every tenth or so is for validation, got too few (a .txt "
                    f"file is one); `nalaformer tokenize {files} --txt line --val-part 0.1 --tokenizer {model} --out DIR` "
                    "takes its lines for documents; then --data DIR"
                ) from error
    shards = {split: TokenShards.open(folder / split) for split in ("train", "val")}
    known = fingerprint(load_tokenizer(tokenizer))
    for each in shards.values():
        # tokens that another program wrote need not say whose they are
        if each.tokenizer and each.tokenizer != known:
            raise ValueError(
                f"the tokens must be those of the model's tokenizer, got {each.place}, made with another than that in "
                f"{tokenizer}; write them with `nalaformer tokenize ... --tokenizer {shlex.quote(str(tokenizer))}`"
            )
    return {split: PackedTokens(tokens, length=length) for split, tokens in shards.items()}


def is_tokenized(data: Sequence[str | Path]) -> bool:
    """Whether it is one folder that `nalaformer tokenize` wrote."""
    return len(data) == 1 and all((Path(data[0]) / split).is_dir() for split in ("train", "val"))


def save(
    result: Linearized, folder: str | Path, *, tokenizer: str | Path | None = None, teacher: str | Path | None = None
) -> Path:
    """Write model, and tokenizer where one is given, for AutoModelForCausalLM and AutoTokenizer; an adapter beside them.

    README.md says how to load the model and what it is. teacher: the folder of the pretrained model, for its name and license.
    The result stays as it is. A merged model has no adapter beside it: one of an earlier save would count twice.
    """
    folder = Path(folder)
    model: Any = result.model
    weights = None
    # beside the old files first: a full disk, or a kill, leaves no half of a model
    aside = unfinished_folder(folder / "model")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        with clear_disk_errors(folder):
            if hasattr(model, "unload"):
                model.save_pretrained(aside / ADAPTER)
                model = model.get_base_model()
                # the adapter stays on the model: its layers hold the weights as `base_layer` beside their own
                named = {name.replace(".base_layer.", "."): value for name, value in model.state_dict().items()}
                weights = {name: value for name, value in named.items() if ".lora_" not in name}
            model.save_pretrained(aside, state_dict=weights)
            if tokenizer is not None:
                load_tokenizer(tokenizer).save_pretrained(str(aside))
            card = model_card(
                result,
                model,
                teacher=None if teacher is None else Path(teacher),
                data=[Path(path).name for path in claim_of(folder).get("data", {})],
                has_adapter=weights is not None,
            )
            (aside / "README.md").write_text(card, encoding="utf-8")
            sync_tree(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if (folder / ADAPTER / "adapter_config.json").is_file():
        shutil.rmtree(folder / ADAPTER)
    for path in sorted(aside.iterdir()):
        path.replace(folder / path.name)
    aside.rmdir()
    sync(folder)
    return folder
