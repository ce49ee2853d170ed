"""What the sharded test runs on every process: linearize a tiny model, then say what came out."""

import json
import os
import sys
from pathlib import Path

import torch

from nalaformer.attention.hybrid import HybridSettings
from nalaformer.linearize import LinearizeConfig, TokenWindows, linearize
from nalaformer.linearize.sharding import is_sharded
from nalaformer.training import TrainingConfig


def main() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, shard = Path(sys.argv[1]), sys.argv[2] == "shard"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_key_value_heads=2, **sizes))
    windows = TokenWindows(torch.randint(3, 50, (24 * 40,)), length=40)
    # of five windows in batches of two, one process has two batches and the other one
    held_out = TokenWindows(torch.randint(3, 50, (5 * 40,)), length=40)
    training = TrainingConfig(steps=3, batch_size=4, learning_rate=1e-2, weight_decay=0.0, device="cpu")
    config = LinearizeConfig(
        attention=HybridSettings(chunk_size=8, salient_per_chunk=2),
        transfer=training,
        finetune=training,
        layers_at_once=1,
        shard=shard,
    )
    result = linearize(model, windows, held_out, folder=folder, config=config)
    if os.environ.get("RANK", "0") == "0":
        result.model.save_pretrained(folder / "model")
        logits = result.model(windows[0][None], use_cache=False).logits
        figures = {"logits": logits.sum().item(), "is_sharded": is_sharded(result.model)}
        (folder / "result.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
