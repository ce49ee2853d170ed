"""Files that are no JSON object of ours, and worse."""

# deeper than any stack; more digits than Python converts; an integer that is none; no UTF-8; no JSON; no object
BOMBS = {
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "long number": b'{"sha256": ' + b"9" * 5000 + b"}",
    "no utf-8": b'{"sha256": "\xff"}',
    "no json": b"{",
    "a list": b"[1]",
    "null": b"null",
}
