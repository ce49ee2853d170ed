"""Text to learn from: files of documents, tokenizers, tokens on disk, windows of packed documents, generated tales."""

from .corpus import Encoder, NothingToEvaluate, Tokenized, plan_corpus, tokenize_corpus
from .documents import Document, Reading, find_text, read_documents
from .packing import IGNORED, PackedTokens
from .shards import Shard, ShardWriter, TokenShards
from .tales import Tales
from .tokenizer import fingerprint, load_tokenizer, start_token, train_tokenizer

__all__ = [
    "IGNORED",
    "Document",
    "Encoder",
    "NothingToEvaluate",
    "PackedTokens",
    "Reading",
    "Shard",
    "ShardWriter",
    "Tales",
    "TokenShards",
    "Tokenized",
    "find_text",
    "fingerprint",
    "load_tokenizer",
    "plan_corpus",
    "read_documents",
    "start_token",
    "tokenize_corpus",
    "train_tokenizer",
]
