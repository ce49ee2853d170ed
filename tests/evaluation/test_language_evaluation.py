"""Figures of language models: every token scored once, benchmarks read from local files, no network."""

import json
import math
import re
import socket
import sys
from random import Random

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from helpers.products import FULL
from nalaformer import cli
from nalaformer.data.text import Tales, fingerprint, train_tokenizer
from nalaformer.evaluation import HARNESS_TASKS, LanguageModel, evaluate_tasks, load_language_model, score_text, token_losses
from nalaformer.tasks import LanguageModelling

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


def llama(vocab_size):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, max_position_embeddings=64, **sizes)).eval()


def ours(vocab_size):
    from nalaformer.models.language import NaLaConfig, NaLaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return NaLaForCausalLM(NaLaConfig.from_size("nano", vocab_size=vocab_size, **sizes)).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(Tales(split="train", documents=50), vocab_size=300)


each_model = pytest.mark.parametrize("folder", [ours, llama], ids=["ours", "llama"], indirect=True)


@pytest.fixture(scope="module", params=[ours, llama] if FULL else [ours])
def folder(request, tokenizer, tmp_path_factory):
    """A model that somebody saved."""
    path = tmp_path_factory.mktemp("model")
    request.param(len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(str(path))
    return path


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])


# ---- texts that are longer than the model's


def longer_than_known(kind, folder, tokenizer):
    """A model that was made for 8 tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    sizes |= {
        "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16},
        "gptj": {"rotary_dim": 4},
        "llama": {"intermediate_size": 16},
    }.get(kind, {})
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=None, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gptj"])
def test_a_table_of_positions_ends_every_command_before_its_end(kind, run, tmp_path, tokenizer):
    folder = longer_than_known(kind, tmp_path / "model", tokenizer)
    tokens = len(tokenizer("Ada")["input_ids"])
    write = ("generate", "text", "--model", folder, "--prompt", "Ada", "--device", "cpu", "--max-new-tokens")
    # the last token that is written is not read
    assert run(*write, 9 - tokens).exit_code == 0
    (tmp_path / "a.txt").write_text("Ada took the red box and went home.")
    score = ("eval", "language", "--model", folder, "--text", tmp_path / "a.txt", "--device", "cpu", "--window")
    assert run(*score, 8).exit_code == 0
    for arguments in ((*write, 10 - tokens), (*score, 9)):
        assert re.search("has a table of positions for 8 tokens, got 9", str(run(*arguments).exception))
    loaded = load_language_model(folder, device="cpu")
    with pytest.raises(ValueError, match="a table of positions for 8 tokens, got 20"):
        token_losses(loaded.model, torch.ones(20, dtype=torch.long), window=20, stride=3)
    with pytest.raises(ValueError, match="a table of positions for 8 tokens, got 16"):
        LanguageModelling.create_model(str(folder), {}, {"vocab_size": 9, "window": 16, "tokenizer": fingerprint(tokenizer)})


def test_rotary_positions_beyond_those_of_training_are_noted(run, tmp_path, tokenizer):
    folder = longer_than_known("llama", tmp_path / "model", tokenizer)
    tokens = len(tokenizer("Ada")["input_ids"])
    write = ("generate", "text", "--model", folder, "--prompt", "Ada", "--device", "cpu", "--max-new-tokens")
    assert "was made for" not in run(*write, 9 - tokens).output
    assert "the model was trained for 8 tokens, got 9: expect lower quality" in run(*write, 10 - tokens).output
    (tmp_path / "a.txt").write_text("Ada took the red box and went home.")
    score = ("eval", "language", "--model", folder, "--text", tmp_path / "a.txt", "--device", "cpu")
    assert "was made for" not in run(*score).output
    assert "the model was trained for 8 tokens, got 9: expect lower quality" in run(*score, "--window", 9).output


# ---- perplexity


class Counter(torch.nn.Module):
    """Its logits say how many tokens it saw: the loss of a token is that number."""

    device = torch.device("cpu")

    def forward(self, input_ids, use_cache):
        seen = torch.arange(1, input_ids.shape[1] + 1, dtype=torch.float64)
        # two tokens: -log p(1) = seen
        logits = torch.stack((torch.log1p(-torch.exp(-seen)), -seen), dim=-1).expand(len(input_ids), -1, -1)
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 20, 21, 100])
@pytest.mark.parametrize(("window", "stride"), [(8, 1), (8, 3), (8, 7), (2, 1)])
def test_every_token_is_scored_once_with_enough_context(length, window, stride):
    scored = []
    losses = token_losses(
        Counter(), torch.ones(length, dtype=torch.long), window=window, stride=stride, batch_size=3, advance=scored.append
    )
    assert len(losses) == sum(scored) == length - 1
    seen = losses.round().tolist()
    for place, context in enumerate(seen, 1):
        assert context >= min(place, window - stride)
    assert max(seen) == min(length, window) - 1


def test_strided_losses_are_those_of_each_window_computed_alone(tokenizer):
    model = ours(len(tokenizer))
    tokens = torch.randint(300, (50,))
    window, stride = 16, 5
    expected, scored, start = [], 1, 0
    while scored < len(tokens):
        start = min(start, len(tokens) - window)
        part = tokens[start : start + window][None]
        with torch.no_grad():
            row = F.cross_entropy(model(input_ids=part).logits[0, :-1], part[0, 1:], reduction="none")
        expected.append(row[scored - start - 1 :])
        scored, start = start + window, start + stride
    found = token_losses(model, tokens, window=window, stride=stride, batch_size=4)
    # a batch may add in another order
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-6, atol=1e-6)


@each_model
def test_one_window_over_everything_is_the_plain_perplexity(folder, tmp_path):
    loaded = load_language_model(folder, device="cpu")
    texts = list(Tales(split="val", documents=3))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    score = score_text(loaded, [tmp_path / "a.jsonl"], window=4096, stride=1024)
    nats = tokens = 0
    for text in texts:
        ids = torch.tensor([[loaded.tokenizer.bos_token_id, *loaded.tokenizer(text)["input_ids"]]])
        with torch.no_grad():
            logits = loaded.model(input_ids=ids).logits[0, :-1].double()
        nats += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        tokens += ids.shape[1] - 1
    assert (score.tokens, score.documents) == (tokens, 3)
    assert score.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / sum(len(text.encode()) for text in texts), rel=1e-5)
    assert score.word_perplexity == pytest.approx(math.exp(nats / sum(len(text.split()) for text in texts)), rel=1e-5)


def test_bytes_are_those_of_utf_8_and_words_lie_between_white_space(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "für  Ada\nœuvre"}))
    score = score_text(LanguageModel(model=ours(len(tokenizer)), tokenizer=tokenizer), [tmp_path / "a.jsonl"])
    assert (score.bytes, score.words) == (len("für  Ada\nœuvre") + 2, 3)


@pytest.mark.parametrize("stride", [0, 8, 9])
def test_a_stride_that_skips_tokens_or_leaves_no_context_is_refused(stride):
    with pytest.raises(ValueError, match=r"stride must be at least 1 and below the window \(8\)"):
        token_losses(Counter(), torch.ones(9, dtype=torch.long), window=8, stride=stride)


def test_the_command_prints_the_perplexity_and_what_was_left_out(folder, run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "Ada took the red box to the mill."}\nbroken\n')
    result = run("eval", "language", "--model", folder, "--text", tmp_path / "a.jsonl", "--window", 16, "--stride", 4)
    assert result.exit_code == 0, result.output
    assert "word perplexity" in result.output
    assert "left out:" in result.output
    assert "a.jsonl:2: no JSON" in result.output


def test_a_text_in_which_nothing_can_be_read_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"got none that could be read; the first: .*a\.txt: the file is empty"):
        score_text(LanguageModel(model=Counter(), tokenizer=tokenizer), [tmp_path / "a.txt"])


# ---- models


def test_what_is_no_model_is_refused_without_a_download(tmp_path):
    with pytest.raises(ValueError, match=r"got no config\.json in gpt2; `nalaformer export"):
        load_language_model("gpt2")


def test_a_tokenizer_may_come_from_another_folder(tmp_path, tokenizer):
    llama(300).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(str(tmp_path / "words"))
    loaded = load_language_model(tmp_path / "model", tokenizer=tmp_path / "words", device="cpu")
    assert loaded.tokenizer("Ada took")["input_ids"] == tokenizer("Ada took")["input_ids"]


def test_a_tokenizer_with_more_entries_than_the_model_is_refused(tmp_path, tokenizer):
    llama(290).save_pretrained(tmp_path)
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=r"every token of the tokenizer \(300\), got 290"):
        load_language_model(tmp_path, device="cpu")


# ---- lm-eval

ROWS = {
    "piqa": [
        {"goal": "open a jar", "sol1": "turn the lid", "sol2": "eat the lid", "label": 0},
        {"goal": "close a jar", "sol1": "sing", "sol2": "turn the lid the other way", "label": 1},
    ],
    "hellaswag": [
        {
            "activity_label": "Baking",
            "ctx_a": "A man [title] bakes.",
            "ctx_b": "he",
            "endings": ["eats [step] bread", "x", "y", "z"],
            "label": "0",
        }
    ],
    "winogrande": [
        {"sentence": "The box did not fit the bag as _ was big.", "option1": "the box", "option2": "the bag", "answer": "1"}
    ],
    "arc_easy": [{"question": "What?", "choices": {"text": ["a", "b", "c"], "label": ["A", "B", "C"]}, "answerKey": "B"}],
    "arc_challenge": [{"question": "Why?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}],
    "lambada": [{"text": "Ada took the box and Ada put down the box"}],
    "wikitext": [{"page": " = Title = \n \n It was ( @,@ here ) , and then . \n"}],
}


@pytest.fixture
def rows(tmp_path):
    for task, lines in ROWS.items():
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"the network was asked: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def log_likelihood(loaded, context, answer):
    """Of the answer after the context, tokenized together as the harness does."""
    before = loaded.tokenizer(context)["input_ids"]
    ids = torch.tensor([loaded.tokenizer(context + answer)["input_ids"]])
    with torch.no_grad():
        scores = loaded.model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    return scores[torch.arange(len(before) - 1, ids.shape[1] - 1), ids[0, len(before) :]].sum().item()


@each_model
def test_every_task_runs_on_local_rows_without_network(folder, rows, no_network):
    pytest.importorskip("lm_eval")
    loaded = load_language_model(folder, device="cpu")
    found = {(result.task, result.metric): result for result in evaluate_tasks(loaded, list(ROWS), rows)}
    assert {task for task, _ in found} == set(HARNESS_TASKS)
    assert {result.task: result.samples for result in found.values()} == {task: len(lines) for task, lines in ROWS.items()}

    def best(choices):
        return max(range(len(choices)), key=lambda number: log_likelihood(loaded, *choices[number]))

    right = [
        best([(f"Question: {r['goal']}\nAnswer:", f" {r[s]}") for s in ("sol1", "sol2")]) == r["label"] for r in ROWS["piqa"]
    ]
    assert found["piqa", "acc"].value == sum(right) / 2
    begin, end = "The box did not fit the bag as ", " was big."
    assert found["winogrande", "acc"].value == float(best([(begin + "the box", end), (begin + "the bag", end)]) == 0)
    endings = [" eats bread", " x", " y", " z"]
    assert found["hellaswag", "acc"].value == float(best([("Baking: A man. bakes. He", ending) for ending in endings]) == 0)
    assert found["arc_easy", "acc"].value == float(best([("Question: What?\nAnswer:", f" {x}") for x in "abc"]) == 1)
    assert found["arc_challenge", "acc"].value == float(best([("Question: Why?\nAnswer:", f" {x}") for x in "ab"]) == 1)
    lambada = math.exp(-log_likelihood(loaded, "Ada took the box and Ada put down the", " box"))
    assert found["lambada", "perplexity"].value == pytest.approx(lambada, rel=1e-4)
    page = ROWS["wikitext"][0]["page"]
    ids = torch.tensor(
        [[loaded.tokenizer.bos_token_id, *loaded.tokenizer(" = Title =\n\nIt was (,here), and then.\n")["input_ids"]]]
    )
    with torch.no_grad():
        nats = F.cross_entropy(loaded.model(input_ids=ids).logits[0, :-1].double(), ids[0, 1:], reduction="sum").item()
    # counted as published
    words, size = len(re.split(r"\s+", page)), len(page.encode())
    assert found["wikitext", "bits_per_byte"].value == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found["wikitext", "word_perplexity"].value == pytest.approx(math.exp(nats / words), rel=1e-4)


def test_texts_are_those_that_the_harness_makes_of_the_same_rows():
    """Published scores were made with them."""
    pytest.importorskip("lm_eval")
    from lm_eval.tasks.hellaswag.utils import preprocess
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
    from lm_eval.tasks.winogrande import preprocess_winogrande as winogrande

    from nalaformer.evaluation.harness_tasks import texts

    signs = [
        " @-@ ",
        " @,@ ",
        " : ",
        " ; ",
        " . ",
        " ! ",
        " ? ",
        " , ",
        "( ",
        " )",
        "[",
        "]",
        "{ ",
        "}",
        '"',
        "'",
        " = = ",
        "\n",
        " ",
    ]
    signs += ["s '", " 's", " N ", " \N{DEGREE SIGN} ", "a", "bc", "[title]", " [title]", "[step]", "  ", " = = = = "]
    random = Random(0)
    for _ in range(500):
        text = "".join(random.choices(signs, k=30))
        assert texts.wikitext_text({"page": text}) == wikitext_detokenizer({"page": text})
        assert texts.without_marks(text) == preprocess(text)
    (row,) = ROWS["winogrande"]
    assert texts.winogrande_answer(row) == winogrande.doc_to_text(row)
    assert texts.winogrande_begins(row) == winogrande.doc_to_choice(row)
    assert texts.winogrande_end(row) == winogrande.doc_to_target(row)


def test_wikitext_is_scored_without_the_spaces_of_its_files():
    from nalaformer.evaluation.harness_tasks.texts import wikitext_scores, wikitext_text

    page = ' = A = \n \n It @-@ was " so " ( x ) , 1 @,@ 000 . \n = = B = = \n'
    assert wikitext_text({"page": page}) == ' = A =\n\nIt-was "so" (x), 1,000.\n== B ==\n'
    scores = wikitext_scores({"page": page}, (-10.0,))
    assert scores["word_perplexity"] == (-10.0, len(page.split()) + 2)
    assert scores["bits_per_byte"] == (-10.0, len(page.encode()))


def test_the_command_shows_each_figure_and_honours_the_limit(folder, rows, run, no_network):
    pytest.importorskip("lm_eval")
    result = run(
        "eval", "language", "--model", folder, "--tasks", "piqa,arc_easy", "--data", rows, "--limit", 1, "--device", "cpu"
    )
    assert result.exit_code == 0, result.output
    assert "the first 1 rows only" in result.output
    lines = [line for line in result.output.splitlines() if "│ piqa" in line]
    assert [line.split("│")[-2].strip() for line in lines] == ["1", "1"]


def test_the_window_is_what_a_task_sees_at_once(folder, tmp_path):
    page = " ".join(Tales(split="val", documents=1))
    (tmp_path / "wikitext.jsonl").write_text(json.dumps({"page": page}) + "\n")
    loaded = load_language_model(folder, device="cpu")
    figures = []
    for window in (8, None):
        results = evaluate_tasks(loaded, ["wikitext"], tmp_path, window=window)
        figures.append(next(result.value for result in results if result.metric == "word_perplexity"))
    assert figures[0] != pytest.approx(figures[1], rel=1e-4)


def test_solved_examples_come_from_the_same_file(folder, rows):
    pytest.importorskip("lm_eval")
    loaded = load_language_model(folder, device="cpu")
    results = evaluate_tasks(loaded, ["piqa"], rows, shots=1)
    assert [result.metric for result in results] == ["acc", "acc_norm"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"the task piqa reads .*piqa\.jsonl, got no such file; its rows need the fields goal, sol1, sol2, label"),
        ("", "must hold at least one row, got an empty file"),
        ('{"goal": "x"}\n', r"piqa\.jsonl:1 must have the fields goal, sol1, sol2, label, got none named 'sol1'"),
        ('{"goal": \n', r"piqa\.jsonl:1 must be a JSON object"),
        ("3\n", r"piqa\.jsonl:1 must be a JSON object"),
    ],
)
def test_a_benchmark_that_is_not_whole_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "piqa.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        evaluate_tasks(LanguageModel(model=None, tokenizer=None), ["piqa"], tmp_path)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("piqa", {"label": 2}, "a label 0 or 1"),
        ("hellaswag", {"label": "7"}, "the number of one of them"),
        ("winogrande", {"sentence": "no gap"}, 'a gap "_"'),
        ("arc_easy", {"choices": ["a", "b"]}, "answerKey one of the labels"),
        ("arc_challenge", {"answerKey": "Z"}, "answerKey one of the labels"),
    ],
)
def test_a_row_that_cannot_be_asked_is_named_with_its_line(tmp_path, task, changes, message):
    good = ROWS[task][0]
    (tmp_path / f"{task}.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good | changes) + "\n")
    with pytest.raises(ValueError, match=rf"{task}\.jsonl:2 must have .*{message}"):
        evaluate_tasks(LanguageModel(model=None, tokenizer=None), [task], tmp_path)


def test_an_unknown_task_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="unknown task 'pica'; did you mean 'piqa'"):
        evaluate_tasks(LanguageModel(model=None, tokenizer=None), ["pica"], tmp_path)


# ---- the group of commands


def test_eval_of_a_folder_is_eval_of_a_run(run, tmp_path):
    result = run("eval", tmp_path / "nothing")
    assert isinstance(result.exception, ValueError)
    assert "must be the folder of a run" in str(result.exception)
    result = run("eval", "--device", "cpu", tmp_path / "nothing")
    assert "must be the folder of a run" in str(result.exception)
    result = run("eval", "run", tmp_path / "nothing")
    assert "must be the folder of a run" in str(result.exception)


def test_eval_shows_its_commands(run):
    for arguments in (("eval", "--help"), ("eval",)):
        result = run(*arguments)
        assert "language" in result.output
        assert "run" in result.output


@pytest.mark.parametrize("arguments", [(), ("--tasks", "piqa")])
def test_eval_language_says_what_it_needs(run, arguments, tmp_path):
    result = run("eval", "language", "--model", tmp_path, *arguments)
    assert isinstance(result.exception, ValueError)
    assert "--data FOLDER" in str(result.exception)


@pytest.mark.parametrize(("package", "extra"), [("transformers", "language"), ("lm_eval", "evaluation")])
def test_a_missing_package_names_its_extra(package, extra, monkeypatch):
    def fail(**_):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(cli.app, "build_app", lambda: fail)
    monkeypatch.setattr(sys, "argv", ["nalaformer"])
    with pytest.raises(SystemExit, match=rf"pip install 'nalaformer\[{extra}\]'"):
        cli.main()
