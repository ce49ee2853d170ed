"""A key stands where it is said to stand, and is found by whoever says its digits."""

from types import SimpleNamespace

import pytest
import torch

from nalaformer.evaluation.pass_keys import PHRASES, find_pass_keys, make_pass_keys


class Letters:
    """A tokenizer whose tokens are characters."""

    bos_token_id = 1

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids):
        return "".join(map(chr, ids))


class Speaker(torch.nn.Module):
    """Says the first five digits of each prompt, after a space, and goes on with others; `deaf` ones say zeros."""

    def __init__(self, deaf=()):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.deaf, self.seen = deaf, 0

    def forward(self, input_ids, use_cache, past_key_values=None, logits_to_keep=0):
        if past_key_values is None:
            says = []
            for row in input_ids.tolist():
                digits = [token for token in row if chr(token).isdigit()][:5]
                says.append([32, *([48] * 5 if self.seen in self.deaf else digits), *b"7\n123"])
                self.seen += 1
            past_key_values = [says, 0]
        says, place = past_key_values
        logits = torch.zeros(len(says), 1, 256)
        for row, text in enumerate(says):
            logits[row, 0, text[place]] = 1
        return SimpleNamespace(logits=logits, past_key_values=[says, place + 1])


HAYSTACK = torch.tensor([ord(letter) for letter in "some text without any number, again and again. " * 40])


@pytest.mark.parametrize("phrase", PHRASES)
def test_prompts_have_the_length_and_the_key_where_they_say(phrase):
    keys = make_pass_keys(Letters(), HAYSTACK, length=400, count=8, phrase=phrase, seed=2)
    assert [key.depth for key in keys] == [(number + 0.5) / 8 for number in range(8)]
    assert len({key.answer for key in keys}) == 8
    for key in keys:
        text = Letters().decode(key.tokens.tolist())
        needle = phrase[0].format(key=key.answer)
        assert len(text) == 400
        assert text[0] == "\x01"
        assert text.endswith(phrase[1])
        assert text.count(needle) == 1
        # what surrounds the needle is a stretch of the haystack, uncut
        around = text[1 : -len(phrase[1])].replace(needle, "")
        assert around in Letters().decode(HAYSTACK.tolist())
        assert text.index(needle) - 1 == round(key.depth * len(around))


def test_a_key_is_found_by_its_five_digits_first():
    keys = make_pass_keys(Letters(), HAYSTACK, length=200, count=5, seed=1)
    assert find_pass_keys(Speaker(deaf=(1, 4)), Letters(), keys, batch_size=2) == [True, False, True, True, False]


def test_a_length_without_room_for_the_key_is_refused():
    with pytest.raises(ValueError, match=r"length must leave room for the key .*got length 60"):
        make_pass_keys(Letters(), HAYSTACK, length=60, count=1)
    with pytest.raises(ValueError, match="haystack has 1880, got length 5000"):
        make_pass_keys(Letters(), HAYSTACK, length=5000, count=1)
