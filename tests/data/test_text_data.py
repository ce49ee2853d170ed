"""Text as it comes: broken lines, odd sizes, documents that must not see each other."""

import json
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
import torch

from nalaformer.atomic_files import atomic_folder
from nalaformer.data import batches_from
from nalaformer.data.text import (
    IGNORED,
    Encoder,
    PackedTokens,
    Reading,
    Shard,
    ShardWriter,
    Tales,
    TokenShards,
    find_text,
    fingerprint,
    load_tokenizer,
    read_documents,
    shards,
    tokenize_corpus,
    train_tokenizer,
)
from nalaformer.data.text.documents import Document


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(Tales(split="train", documents=100), vocab_size=320)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shards_of(*documents, vocab_size=1000, learned=None):
    tokens = np.concatenate([np.array(document, np.uint16) for document in documents])
    mask = None if learned is None else np.concatenate([np.array(part, np.bool_) for part in learned])
    return TokenShards([Shard(tokens, np.cumsum([len(document) for document in documents]), mask)], vocab_size=vocab_size)


# ---- documents


def test_every_kind_of_row_becomes_a_document(tmp_path):
    rows = [
        {"text": "plain"},
        {"prompt": "2 + 2 = ", "response": "4"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    ]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    pieces = [document.pieces for document in read_documents([file])]
    assert pieces[0] == (("plain", True),)
    assert pieces[1] == (("2 + 2 = ", False), ("4", True))
    assert pieces[2] == (("user: hi\n", False), ("assistant:", False), (" hello\n", True))


def test_the_field_of_the_text_has_the_name_that_is_asked_for(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"content": "x", "text": "y"}])
    assert [document.text for document in read_documents([file], Reading(field="content"))] == ["x"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "no JSON: Unterminated string"),
        (b"[1, 2]", "must be a JSON object, got list"),
        (b'{"body": "x"}', "must have \"text\".* got 'body'"),
        (b'{"text": 3}', '"text" must be a string, got int'),
        (b'{"text": "  "}', "the text is empty"),
        (b'{"text": "\xff"}', "can't decode byte 0xff"),
        (b'{"prompt": "x", "response": ""}', "the response is empty"),
        (b'{"messages": [{"role": "user"}]}', '"messages" must be a list of'),
        (b'{"messages": [{"role": "user", "content": "x"}]}', 'the role "assistant" says, got none'),
        (b'{"text": "\\ud800"}', "surrogates not allowed"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number_and_the_others_are_read(tmp_path, line, reason):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n')
    bad = []
    texts = [document.text for document in read_documents([file], Reading(bad=bad.append))]
    assert texts == ["one", "two"]
    assert len(bad) == 1
    assert bad[0].startswith(f"{file}:3: ")
    assert re.search(reason, bad[0])


@pytest.mark.parametrize(("name", "content"), [("a.txt", "one"), ("a.jsonl", '{"text": "one"}')])
def test_the_mark_of_an_encoding_is_no_text(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    for txt in ("file", "line"):
        (document,) = read_documents([tmp_path / name], Reading(txt_document=txt))
        assert document.text == "one"


def test_a_text_file_is_a_document_or_one_for_each_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\r\n")
    whole = list(read_documents([tmp_path / "a.txt"]))
    lines = list(read_documents([tmp_path / "a.txt"], Reading(txt_document="line")))
    assert [document.text for document in whole] == ["one\n\ntwo\r\n"]
    assert [(document.text, document.source[-2:]) for document in lines] == [("one", ":1"), ("two", ":3")]


def test_an_empty_file_and_one_that_is_no_text_are_left_out_and_named(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "binary.txt").write_bytes(b"\x80\x81")
    (tmp_path / "good.txt").write_text("good")
    bad = []
    files = find_text([tmp_path])
    assert [document.text for document in read_documents(files, Reading(bad=bad.append))] == ["good"]
    assert ["binary.txt: 'utf-8'" in bad[0], "empty.jsonl: the file is empty" in bad[1]] == [True, True]


def test_bytes_read_add_up_to_the_size_of_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    write_jsonl(tmp_path / "b.jsonl", [{"text": "é"}, {"no": 1}])
    seen = []
    files = find_text([tmp_path])
    list(read_documents(files, Reading(advance=seen.append)))
    assert sum(seen) == sum(file.stat().st_size for file in files)


# ---- tokenizers


def test_every_text_comes_back_from_its_tokens(tokenizer):
    text = "Ünïcode \x00 \n\n  tabs\t, 語 and 🙂 <|endoftext|>"
    (tokens,) = Encoder(tokenizer).in_memory([text]).shards[0].tokens[None]
    assert tokenizer.decode(tokens[1:-1].tolist()) == text
    # its name in a text is letters: a document cannot end another
    assert tokenizer.eos_token_id not in tokens[1:-1]
    assert tokens[0] == tokens[-1] == tokenizer.eos_token_id


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(str(tmp_path))
    assert fingerprint(load_tokenizer(tmp_path)) == fingerprint(tokenizer)


def test_the_same_corpus_gives_the_same_tokenizer_in_another_process(tokenizer):
    program = (
        "from nalaformer.data.text import *\n"
        "print(fingerprint(train_tokenizer(Tales(split='train', documents=100), vocab_size=320)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.strip() == fingerprint(tokenizer)


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size must exceed 256"):
        train_tokenizer(["x"], vocab_size=256)


def test_what_is_no_tokenizer_is_refused_without_a_download(tmp_path):
    with pytest.raises(ValueError, match="must be a local folder"):
        load_tokenizer("gpt2")
    with pytest.raises(ValueError, match=r"must hold a tokenizer, got none of .*; write one there with save_pretrained$"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("no JSON")
    with pytest.raises(ValueError, match="must hold a tokenizer that transformers can read"):
        load_tokenizer(tmp_path)


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_answers_are_learned_as_the_chat_template_writes_them(tokenizer, tmp_path):
    tokenizer.save_pretrained(str(tmp_path))
    chat = load_tokenizer(tmp_path)
    chat.chat_template = TEMPLATE
    says = lambda role, content: {"role": role, "content": content}  # noqa: E731
    messages = [says("user", "a"), says("assistant", "b"), says("user", "c"), says("assistant", "d")]
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    encoder = Encoder(chat)
    ((_, tokens, learned),) = encoder.encode(read_documents([file], Reading(render=encoder.render)))
    text = chat.decode(tokens)
    assert (
        text
        == "<|endoftext|><|user|>a<|endoftext|><|assistant|>b<|endoftext|><|user|>c<|endoftext|><|assistant|>d<|endoftext|>"
    )
    taught = chat.decode([token for token, is_learned in zip(tokens[1:], learned[1:], strict=True) if is_learned])
    assert taught == "b<|endoftext|>d<|endoftext|>"


@pytest.mark.parametrize(
    ("after", "end"), [("<|endoftext|>\n", "<|endoftext|>\n"), ("", "<|endoftext|>"), ("\n", "\n<|endoftext|>")]
)
def test_a_document_of_a_chat_template_ends_once(tokenizer, tmp_path, after, end):
    tokenizer.save_pretrained(str(tmp_path))
    chat = load_tokenizer(tmp_path)
    chat.chat_template = TEMPLATE.replace("<|endoftext|>", after)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    # in a plain text the name of the end is letters
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}, {"text": "b<|endoftext|>"}])
    encoder = Encoder(chat)
    (_, tokens, learned), (_, plain, _) = encoder.encode(read_documents([file], Reading(render=encoder.render)))
    assert chat.decode(tokens).endswith("<|assistant|>b" + end)
    assert len(tokens) == len(learned)
    assert plain[1:].count(chat.eos_token_id) == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }", "TemplateSyntaxError: "),
        ("{{ messages.__class__.__mro__ }}", "SecurityError: access to attribute '__class__' of 'list' object is unsafe"),
        ("{{ raise_exception('roles must\nalternate') }}", "TemplateError: roles must alternate"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
    ],
)
def test_a_chat_template_that_fails_is_one_sentence(tokenizer, tmp_path, template, message):
    tokenizer.chat_template = template
    try:
        tokenizer.save_pretrained(str(tmp_path / "words"))
    finally:
        tokenizer.chat_template = None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    with pytest.raises(ValueError, match="chat template must write the conversation, got ") as refused:
        tokenize_corpus([file], tmp_path / "out", tokenizer=tmp_path / "words")
    assert f"{file}:1: " in str(refused.value)
    assert message in str(refused.value)
    # of texts it is not asked
    texts = write_jsonl(tmp_path / "b.jsonl", [{"text": str(number)} for number in range(40)])
    assert tokenize_corpus([texts], tmp_path / "out", tokenizer=tmp_path / "words", val_part=0.3).documents["val"]


def test_a_begin_that_the_chat_template_writes_is_not_written_twice(tokenizer, tmp_path):
    tokenizer.save_pretrained(str(tmp_path))
    chat = load_tokenizer(tmp_path)
    chat.add_special_tokens({"bos_token": "<s>"})
    chat.chat_template = "{{ bos_token }}" + TEMPLATE
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}, {"text": "<s>a"}])
    encoder = Encoder(chat)
    (_, tokens, learned), (_, plain, _) = encoder.encode(read_documents([file], Reading(render=encoder.render)))
    # what a model is given where it is asked, its answer, and the end of the document
    asked = chat.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert tokens[: len(asked)] == asked
    assert learned == [False] * len(asked) + [True] * (len(tokens) - len(asked))
    assert chat.decode(tokens[len(asked) :]) == "b<|endoftext|>"
    # in a plain text the name of the begin is letters
    assert plain.count(chat.bos_token_id) == 1


# ---- a corpus


def test_a_corpus_is_written_and_read_back(tmp_path):
    tales = list(Tales(split="train", documents=60))
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": tale} for tale in tales])
    result = tokenize_corpus([file], tmp_path / "out", train_vocab=300, val_part=0.2, shard_tokens=700)
    words = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert result.vocab_size == len(words) == 300
    found = []
    for split in ("train", "val"):
        data = TokenShards.open(tmp_path / "out" / split)
        assert data.tokens == result.tokens[split]
        assert data.documents == result.documents[split] > 0
        assert data.tokenizer == fingerprint(words)
        texts = [
            words.decode(shard.tokens[start + 1 : end - 1].tolist())
            for shard in data.shards
            for start, end in zip([0, *shard.ends[:-1]], shard.ends, strict=True)
        ]
        assert data.bytes == sum(len(text.encode()) for text in texts)
        found += texts
    # several files, and no document lost or in both splits
    assert len(TokenShards.open(tmp_path / "out" / "train").shards) > 2
    assert sorted(found) == sorted(tales)


def test_bad_lines_are_counted_and_listed_and_too_many_stop(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join('{"text": "word word"}\n' for _ in range(50)) + "broken\nbroken\n")
    result = tokenize_corpus([file], tmp_path / "out", train_vocab=260, val_part=0.3, most_bad=2)
    assert [line.split(": ")[0] for line in result.bad] == [f"{file}:51", f"{file}:52"]
    assert (tmp_path / "out" / "bad_lines.txt").read_text().splitlines() == list(result.bad)
    with pytest.raises(ValueError, match=rf"more than 1 lines cannot be read, the last of them {file}:52"):
        tokenize_corpus([file], tmp_path / "other", train_vocab=260, val_part=0.3, most_bad=1)
    # nothing is left of what failed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_a_folder_with_content_is_refused_and_kept(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="must not exist or be an empty folder"):
        tokenize_corpus([tmp_path / "a.txt"], tmp_path / "out", train_vocab=260)
    assert (tmp_path / "out" / "mine").read_text() == "x"


def test_a_corpus_without_documents_for_evaluation_says_what_to_do(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(ValueError, match=r"left for evaluation, got none of 1; .*--val.*--txt line"):
        tokenize_corpus([tmp_path / "a.txt"], tmp_path / "out", train_vocab=260)
    (tmp_path / "b.txt").write_text("three")
    result = tokenize_corpus([tmp_path / "a.txt"], tmp_path / "out", train_vocab=260, val_files=[tmp_path / "b.txt"])
    assert result.documents == {"train": 1, "val": 1}


def test_a_corpus_in_which_nothing_can_be_read_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(
        ValueError, match=r"must hold a document, got none that could be read; the first: .*a\.txt: the file is empty"
    ):
        tokenize_corpus([tmp_path / "a.txt"], tmp_path / "out", train_vocab=260)


def write_half(path, is_inside):
    with atomic_folder(path) as folder:
        (folder / "a").write_text("x")
        is_inside.set()
        time.sleep(60)


def test_a_process_killed_while_writing_leaves_no_folder_of_that_name(tmp_path):
    context = multiprocessing.get_context("fork")
    is_inside = context.Event()
    process = context.Process(target=write_half, args=(tmp_path / "out", is_inside))
    process.start()
    assert is_inside.wait(60)
    process.kill()
    process.join()
    assert not (tmp_path / "out").exists()
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("y")
    assert (tmp_path / "out" / "a").read_text() == "y"


# ---- shards


def test_large_vocabularies_take_32_bits(tmp_path):
    for vocab_size, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32)):
        folder = tmp_path / str(vocab_size)
        writer = ShardWriter(folder, vocab_size=vocab_size)
        writer.add([0, vocab_size - 1])
        writer.close()
        (shard,) = TokenShards.open(folder).shards
        assert shard.tokens.dtype == dtype
        assert shard.tokens.tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize("bad", [[5], [-1]])
def test_tokens_of_another_vocabulary_are_not_written(tmp_path, bad):
    with pytest.raises(ValueError, match=r"below vocab_size \(5\).* another vocabulary"):
        ShardWriter(tmp_path, vocab_size=5).add(bad)


def test_tokens_of_another_vocabulary_are_not_learned():
    data = PackedTokens(shards_of([1, 2, 99], vocab_size=99), length=8)
    with pytest.raises(ValueError, match=r"below vocab_size \(99\), got 99 in memory"):
        data[0]


def test_shards_that_somebody_else_wrote_need_tokens_and_an_index_alone(tmp_path):
    np.save(tmp_path / "tokens_a.npy", np.arange(10, dtype=np.uint16))
    (tmp_path / "index.json").write_text(json.dumps({"format": "nalaformer tokens 1", "vocab_size": 10, "shards": ["a"]}))
    data = TokenShards.open(tmp_path)
    assert (data.tokens, data.documents, data.bytes) == (10, 1, None)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("no index", "got no index.json in it; `nalaformer tokenize` writes"),
        ("cut index", "index.json cannot be read: JSONDecodeError"),
        ("other format", "format 'x' and not"),
        ("no shards", "lists no shards"),
        ("elsewhere", "names a shard outside of its folder"),
        ("lost file", "got no file .*tokens_00000.npy"),
        ("cut file", "tokens_00000.npy must be a whole .npy file"),
        ("pickle", "tokens_00000.npy must be a whole .npy file"),
        ("floats", "tokens must be uint16 or uint32 in one dimension, got float64"),
        ("ends", "ends of documents must rise to the number of tokens"),
        ("learned", "learned must be bool and as long as the tokens"),
    ],
)
def test_every_kind_of_damage_to_shards_is_found(tmp_path, harm, message):
    writer = ShardWriter(tmp_path, vocab_size=10)
    writer.add(range(10))
    writer.close()
    index, tokens = tmp_path / "index.json", tmp_path / "tokens_00000.npy"
    if harm == "no index":
        index.unlink()
    elif harm == "cut index":
        index.write_text(index.read_text()[:20])
    elif harm in ("other format", "no shards", "elsewhere"):
        change = {"other format": {"format": "x"}, "no shards": {"shards": []}, "elsewhere": {"shards": ["../x"]}}[harm]
        index.write_text(json.dumps(json.loads(index.read_text()) | change))
    elif harm == "lost file":
        tokens.unlink()
    elif harm == "cut file":
        tokens.write_bytes(tokens.read_bytes()[:-3])
    elif harm == "pickle":
        np.save(tokens, np.array([print], dtype=object), allow_pickle=True)
    elif harm == "floats":
        np.save(tokens, np.zeros(10))
    elif harm == "ends":
        np.save(tmp_path / "ends_00000.npy", np.array([5, 4, 10]))
    else:
        np.save(tmp_path / "learned_00000.npy", np.ones(9, np.bool_))
    with pytest.raises(ValueError, match=message):
        TokenShards.open(tmp_path)


def test_a_worker_gets_the_place_of_the_tokens_and_not_the_tokens(tmp_path):
    writer = ShardWriter(tmp_path, vocab_size=10)
    writer.add(np.zeros(100_000, int))
    writer.close()
    data = PackedTokens(TokenShards.open(tmp_path), length=8)
    data[0]
    sent = pickle.dumps(data)
    assert len(sent) < 2_000
    assert torch.equal(pickle.loads(sent)[3]["input_ids"], data[3]["input_ids"])  # noqa: S301


# ---- packing


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 100])
def test_every_token_that_follows_another_in_its_document_is_predicted_once(length):
    documents = [[1, 2, 3, 4, 5], [6], [7, 8, 9], list(range(10, 27))]
    data = PackedTokens(shards_of(*documents), length=length)
    pairs = []
    for index in range(len(data)):
        sample = data[index]
        kept = sample["targets"] != IGNORED
        pairs += list(zip(sample["input_ids"][kept].tolist(), sample["targets"][kept].tolist(), strict=True))
    assert pairs == [pair for document in documents for pair in pairwise(document)]
    assert data.predicted == len(pairs)


@pytest.mark.parametrize("packing", ["stream", "whole"])
@pytest.mark.parametrize("length", [2, 5, 7, 30])
def test_positions_begin_again_with_every_document(length, packing):
    # a token says its document and its place in it
    documents = [[100 * number + place for place in range(size)] for number, size in enumerate((3, 1, 7, 2, 5), 1)]
    data = PackedTokens(shards_of(*documents), length=length, packing=packing)
    for index in range(len(data)):
        tokens, positions = (data[index][name].tolist() for name in ("input_ids", "position_ids"))
        size = tokens.index(0) if 0 in tokens else length
        begin = 0
        for place in range(size):
            if place and tokens[place] // 100 != tokens[place - 1] // 100:
                begin = place
            assert positions[place] == place - begin
        # the filling is a sequence of its own
        assert positions[size:] == list(range(length - size))


def test_whole_documents_are_not_cut_and_too_long_ones_are_shortened():
    documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9], list(range(10, 20)), [20]]
    data = PackedTokens(shards_of(*documents), length=5, packing="whole")
    windows = [data[index]["input_ids"].tolist() for index in range(len(data))]
    assert windows == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0], [10, 11, 12, 13, 14], [20, 0, 0, 0, 0]]
    assert data.shortened == 1
    # the last token of the shortened one has a next one
    assert data[2]["targets"].tolist() == [11, 12, 13, 14, 15]


def test_only_responses_are_learned(tokenizer, tmp_path):
    rows = [{"prompt": f"say {word}: ", "response": word} for word in ("red", "blue", "green")]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    tokenize_corpus([file], tmp_path / "out", tokenizer=tmp_path / "tokenizer", val_files=[file])
    data = PackedTokens(TokenShards.open(tmp_path / "out" / "train"), length=64, packing="whole")
    targets = torch.cat([data[index]["targets"] for index in range(len(data))])
    assert tokenizer.decode(targets[targets != IGNORED].tolist()) == "".join(f"{r['response']}<|endoftext|>" for r in rows)
    assert data.predicted is None


def test_the_end_is_learned_where_the_last_piece_is(tokenizer):
    for last in (True, False):
        document = Document(pieces=(("question ", True), ("answer", last)), source="")
        ((_, tokens, learned),) = Encoder(tokenizer).encode([document])
        assert len(tokens) == len(learned)
        assert tokens[-1] == tokenizer.eos_token_id
        assert learned[-2:] == [last, last]


def test_windows_do_not_cross_shards(tmp_path):
    writer = ShardWriter(tmp_path, vocab_size=100, shard_tokens=5)
    for start in (1, 11, 21):
        writer.add(range(start, start + 6))
    writer.close()
    data = PackedTokens(TokenShards.open(tmp_path), length=4)
    assert [data[index]["input_ids"].tolist() for index in range(len(data))] == [
        row for start in (1, 11, 21) for row in ([start, start + 1, start + 2, start + 3], [start + 4, start + 5, 0, 0])
    ]
    with pytest.raises(IndexError):
        data[6]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_resumed_run_are_those_of_a_whole_one(tmp_path, workers):
    writer = ShardWriter(tmp_path, vocab_size=1000)
    for start in range(20):
        writer.add(range(start, start + 37))
    writer.close()
    data = PackedTokens(TokenShards.open(tmp_path), length=16)
    options = {"seed": 3, "batch_size": 4, "last_step": 25}
    whole = [batch.content["input_ids"] for batch in batches_from(0, data, **options)]
    resumed = [batch.content["input_ids"] for batch in batches_from(17, data, workers=workers, **options)]
    assert len(resumed) == 8
    assert all(torch.equal(a, b) for a, b in zip(whole[17:], resumed, strict=True))


# ---- generated text


def test_tales_are_the_same_for_everyone():
    assert Tales(split="train", documents=5)[0].startswith("Snow fell all day. Pia carried the yellow map to the stable.")
    assert Tales(split="train", documents=5, seed=1)[0] != Tales(split="train", documents=5)[0]
    assert not set(Tales(split="train", documents=200)) & set(Tales(split="val", documents=200))


def test_the_answers_in_a_tale_follow_from_it():
    asked = 0
    for tale in Tales(split="val", documents=50):
        facts = re.findall(r"(\w+) (?:took|carried|brought) the (\w+) (\w+) to the (\w+)\.", tale)
        for who, colour, thing, place in facts:
            answers = {
                f"is in the {place}.": rf"Where is the {thing}\? The {thing} (.*?\.)",
                f"{who} has": rf"Who has the {thing}\? (\w+ has)",
            }
            answers[f"is {colour}."] = rf"What colour is the {thing}\? The {thing} (.*?\.)"
            for answer, pattern in answers.items():
                for found in re.findall(pattern, tale):
                    assert found == answer
                    asked += 1
    assert asked > 100


def test_reading_windows_opens_each_file_once(tmp_path, monkeypatch):
    """A file opened for each window could not feed a GPU."""
    writer = ShardWriter(tmp_path, vocab_size=500, shard_tokens=600)
    for _ in range(20):
        writer.add(np.random.default_rng(0).integers(500, size=100))
    writer.close()
    opened = []
    mapped = shards.mapped
    monkeypatch.setattr(shards, "mapped", lambda path: opened.append(path) or mapped(path))
    data = PackedTokens(TokenShards.open(tmp_path), length=32)
    for index in range(len(data)):
        data[index]
    assert len(data) > 50
    assert sorted(opened) == sorted(tmp_path.glob("*.npy"))


class Watched(np.ndarray):
    """An array that notes how many of its entries are asked for."""

    asked: list[int] = []

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.asked.append(np.size(found))
        return found


def test_a_window_reads_its_own_tokens_and_no_others():
    """Shards are larger than memory: a window that looks at all of one starves a GPU."""
    documents = [range(50)] * 200
    shards = shards_of(*documents)
    shards.shards[0].tokens = shards.shards[0].tokens.view(Watched)
    data = PackedTokens(shards, length=64)
    Watched.asked.clear()
    assert data[100]["input_ids"].tolist() == [token % 50 for token in range(6400, 6464)]
    # one more than the window holds, for what follows its last token
    assert sum(Watched.asked) <= 2 * 65


def test_a_text_that_does_not_exist_is_said_to_be_missing(tmp_path):
    from nalaformer.data.text.documents import find_text

    with pytest.raises(ValueError, match=r"and there is no .*missing\.txt"):
        find_text([tmp_path / "missing.txt"])
