"""How the rows of three benchmarks become texts. The rules are the benchmarks': scores compare only if everybody keeps them.

The harness loads this file by its path, so it imports nothing of the package.
"""

import re
from typing import Any

Row = dict[str, Any]

# WikiText's files have spaces around signs; the text that is scored has none
SPACED = {
    " @-@ ": "-",
    " @,@ ": ",",
    " @.@ ": ".",
    " : ": ": ",
    " ; ": "; ",
    " . ": ". ",
    " ! ": "! ",
    " ? ": "? ",
    " , ": ", ",
}
BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
HEADINGS_AND_REST = {
    "= = = =": "====",
    "= = =": "===",
    "= =": "==",
    " \N{DEGREE SIGN} ": "\N{DEGREE SIGN}",
    " \n": "\n",
    "\n ": "\n",
    " N ": " 1 ",
    " 's": "'s",
}


def without_marks(text: str) -> str:
    """HellaSwag's sentences from WikiHow carry marks in brackets: a title becomes a full stop, others go."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def hellaswag_texts(rows: Any) -> Any:
    def texts(row: Row) -> Row:
        begin = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        return {"begin": without_marks(begin), "choices": [without_marks(end) for end in row["endings"]]}

    return rows.map(texts)


def winogrande_answer(row: Row) -> int:
    return int(row["answer"]) - 1


def winogrande_begins(row: Row) -> list[str]:
    """The sentence up to its gap, with either option in it: the options differ before what is scored."""
    before = row["sentence"].split("_", 1)[0]
    return [before + row["option1"], before + row["option2"]]


def winogrande_end(row: Row) -> str:
    return str(row["sentence"]).split("_", 1)[1].strip()


def wikitext_text(row: Row) -> str:
    text = row["page"].replace("s '", "s'")
    for spaced, plain in SPACED.items():
        text = text.replace(spaced, plain)
    for left, right in BRACKETS:
        inside = f"[^{re.escape(right)}]*?"
        text = re.sub(rf"{re.escape(left)}\s*({inside})\s*{re.escape(right)}", rf"{left}\1{right}", text)
    for written, plain in HEADINGS_AND_REST.items():
        text = text.replace(written, plain)
    return str(text)


def wikitext_scores(row: Row, results: tuple[float]) -> dict[str, tuple[float, int]]:
    """Per word and per byte of the page as published, before the spaces went."""
    words, size = len(re.split(r"\s+", row["page"])), len(row["page"].encode())
    return {"word_perplexity": (results[0], words), "byte_perplexity": (results[0], size), "bits_per_byte": (results[0], size)}
