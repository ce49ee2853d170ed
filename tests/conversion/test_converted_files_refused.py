"""Files that hold no converted model, or hold it in another way, and what becomes of the model then."""

import pytest
import torch
from safetensors.torch import save_file

import nalaformer
from helpers.vision_hosts import timm_vit

pytestmark = pytest.mark.usefixtures("one_thread")


def converted():
    torch.manual_seed(0)
    return nalaformer.convert(timm_vit(), "linear")


def write_text(path):
    path.write_text("import torch\n" * 20)


def write_nothing(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_text, "it is no file of torch.save"),
        (write_nothing, "it is no file of torch.save"),
        (lambda path: torch.save(converted(), path), r"cannot be read as weights alone: .*; .*save its state dict anew"),
        (lambda path: torch.save([1, 2], path), "must hold a state dict, or one under .*got list"),
        (lambda path: torch.save({"step": 3}, path), "must hold a state dict, or one under .*got dict"),
    ],
)
def test_a_file_that_holds_no_weights_is_refused_in_words(write, message, tmp_path):
    path = tmp_path / "model.pth"
    write(path)
    with pytest.raises(ValueError, match=message):
        nalaformer.load_converted(timm_vit(), path)


def test_a_damaged_safetensors_file_is_refused_in_words(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("no tensors")
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        nalaformer.load_converted(timm_vit(), path)


@pytest.mark.parametrize("front", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("key", ["", "model", "state_dict"])
def test_weights_of_a_wrapped_model_come_back(front, key, tmp_path):
    model, path = converted(), tmp_path / "model.pth"
    state = {f"{front}{name}": value for name, value in model.state_dict().items()}
    content = {key: state, "epoch": 3} if key else state
    torch.save(content, path)
    for source in (path, content):
        back = nalaformer.load_converted(timm_vit(), source).state_dict()
        assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())
    if not key:
        save_file(state, tmp_path / "model.safetensors")
        nalaformer.load_converted(timm_vit(), tmp_path / "model.safetensors")


def test_a_model_that_is_called_module_itself_keeps_its_names():
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.scale = timm_vit(), torch.nn.Linear(2, 2)

    state = nalaformer.convert(Wrapped(), "linear").state_dict()
    back = nalaformer.load_converted(Wrapped(), state).state_dict()
    assert all(torch.equal(back[name], value) for name, value in state.items())


def without_norm(state):
    return {name: value for name, value in state.items() if name != "norm.weight"}


def with_other_head(state):
    return state | {"head.weight": torch.zeros(7, 7)}


@pytest.mark.parametrize("change", [without_norm, with_other_head])
def test_weights_that_do_not_fit_leave_the_model_as_it_was(change):
    model = timm_vit()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layers = [block.attn for block in model.blocks]
    with pytest.raises((ValueError, RuntimeError), match=r"norm\.weight|size mismatch"):
        nalaformer.load_converted(model, change(converted().state_dict()))
    assert [block.attn for block in model.blocks] == layers
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_weights_of_other_names_say_which_they_are():
    with pytest.raises(ValueError, match=r"by the names that this model has, got a\.weight"):
        nalaformer.load_converted(timm_vit(), {"a.weight": torch.zeros(2)})
