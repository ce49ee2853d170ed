"""Tokenizers: any folder that transformers can read, or byte-level BPE trained on a corpus."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .documents import Message, Pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# begins and ends documents, and fills what is left of a window
END = "<|endoftext|>"
BYTES = 256
# what tokenizers are mostly kept in
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> "PreTrainedTokenizerBase":
    """Byte-level BPE: every text is encoded without loss, since the 256 bytes are in the vocabulary from the start."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def check_vocab_size(vocab_size: int) -> None:
    if vocab_size <= BYTES:
        raise ValueError(f"vocab_size must exceed {BYTES} (every byte, and {END}), got {vocab_size}")


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local folder; nothing is downloaded and no code of the folder is run."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise ValueError(f"a tokenizer must be a local folder, such as save_pretrained writes, got {folder}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    # whatever a folder holds, transformers' many readers raise accordingly
    except Exception as error:
        if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
            raise ValueError(
                f"{folder} must hold a tokenizer, got none of {', '.join(TOKENIZER_FILES)}; write one there with "
                "save_pretrained"
            ) from error
        raise ValueError(
            f"{folder} must hold a tokenizer that transformers can read: {' '.join(str(error).split())}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"a tokenizer must have an end token (eos_token), got none in {folder}; name it in tokenizer_config.json"
        )
    return tokenizer


def start_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """What a document starts with, so that its first token is predicted too: bos, or eos where there is none."""
    return int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Equal for tokenizers that give the same tokens; sha256 of what they are made of, else of their vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(content.encode()).hexdigest()


def encode(tokenizer: "PreTrainedTokenizerBase", texts: list[str], *, has_markup: bool = False) -> list[list[int]]:
    """Token ids without begin and end. A special token's name in a text is letters, unless the text has markup."""
    if not texts:
        return []
    encoded: Any = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, verbose=False, split_special_tokens=not has_markup
    )
    return list(encoded["input_ids"])


class ChatTemplate:
    """Conversations as the tokenizer's own chat template writes them.

    What the assistant says is what the template adds to the conversation before it and its prompt for an answer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    def __call__(self, messages: list[Message]) -> tuple[Pieces, bool]:
        pieces: list[tuple[str, bool]] = []
        written = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.written(messages[:number], add_generation_prompt=True) if number else written
            answered = self.written(messages[: number + 1], add_generation_prompt=False)
            if not prompt.startswith(written) or not answered.startswith(prompt):
                raise ValueError("the tokenizer's chat template rewrites what was said before; answers cannot be told apart")
            pieces += [(prompt[len(written) :], False), (answered[len(prompt) :], True)]
            written = answered
        return tuple((text, learned) for text, learned in pieces if text), True

    def written(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        except ImportError:
            raise
        # a template is a program: besides what jinja forbids, it may divide by zero
        except Exception as error:
            words = " ".join(str(error).split())
            raise ValueError(
                f"the tokenizer's chat template must write the conversation, got {type(error).__name__}: {words}; mend the "
                "template (chat_template.jinja or tokenizer_config.json), or the conversation"
            ) from error
        assert isinstance(text, str)
        return text
