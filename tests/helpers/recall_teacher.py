"""A tiny Llama that answers questions about facts in its text: what conversions are tried on."""

import torch
import torch.nn.functional as F
from torch import Tensor

KEYS, VALUES, FILLER = 16, 8, 16
FIRST_QUESTION = FILLER + KEYS * VALUES
VOCABULARY = FIRST_QUESTION + KEYS + VALUES
LENGTH, FACTS = 96, 12


def recall_batch(size: int, length: int, facts: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Filler with facts, each one token for a key and a value, then a question for every fact; targets are the values."""
    text = torch.randint(0, FILLER, (size, length), generator=random)
    keys = torch.rand(size, KEYS, generator=random).argsort(-1)[:, :facts]
    values = torch.randint(0, VALUES, (size, facts), generator=random)
    places = torch.rand(size, length - facts, generator=random).argsort(-1)[:, :facts]
    text.scatter_(1, places, FILLER + keys * VALUES + values)
    asked = torch.rand(size, facts, generator=random).argsort(-1)
    text[:, length - facts :] = FIRST_QUESTION + keys.gather(1, asked)
    targets = torch.full_like(text, -100)
    targets[:, length - facts :] = FIRST_QUESTION + KEYS + values.gather(1, asked)
    return text, targets


class RecallData:
    """Texts as samples."""

    def __init__(self, samples: int, seed: int) -> None:
        self.texts, self.targets = recall_batch(samples, LENGTH, FACTS, torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[index], "targets": self.targets[index]}


def trained_teacher(steps: int = 160):
    """Two layers, trained from short texts with few facts to long ones with many; a few seconds of one core."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01, betas=(0.9, 0.98))
    facts, length = 3, 16
    for step in range(steps):
        text, targets = recall_batch(32, length, facts, random)
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, step / 50) * (1 - 0.9 * max(0.0, (step / steps - 0.7) / 0.3))
        logits = model(text, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # harder as soon as it is mastered: from the start at full length it learns nothing
        if loss.item() < 0.4 and length < LENGTH:
            facts, length = min(FACTS, facts + 1), min(LENGTH, length + 8)
    return model.eval()
