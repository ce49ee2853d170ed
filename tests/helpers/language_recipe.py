"""The recipe of language models, small enough for a second."""

from nalaformer.recipes import RECIPES, changed

DATA = ("window=48", "train_documents=60", "eval_documents=7", "vocab_size=300")
MODEL = 'model_options={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}'
SHORT = (*DATA, MODEL, "steps=10", "warmup=2", "batch_size=4", "eval_every=5", "save_every=5", "device=cpu")


def recipe_of(*settings):
    return changed(RECIPES["lm_tiny"](), [*SHORT, *settings])
