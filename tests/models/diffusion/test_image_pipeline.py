"""Images from a network: samplers by name, guidance, seeds, latents, and pipelines on disk."""

import inspect
import itertools
import math

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

import nalaformer
from helpers.option_effects import Effects
from helpers.products import FULL
from nalaformer import NaLaDiT, NaLaDiTPipeline
from nalaformer.models.diffusion import OBJECTIVES, DiffusionTransformer
from nalaformer.models.diffusion.samplers import LearnedRangeDDPM, denoise, first_word, make_sampler, set_times, to_rgb

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {"depth": 1, "dim": 16, "num_heads": 2, "patch_size": 2, "channels": 3, "num_classes": 3, "attention": "linear"}
SAMPLERS = [(objective, sampler) for objective in OBJECTIVES.names() for sampler in OBJECTIVES[objective].samplers]
SAMPLE = Effects(name for name in inspect.signature(NaLaDiTPipeline.sample).parameters if name != "self")


def test_no_option_of_sampling_is_without_a_test_of_its_effect():
    assert SAMPLE.missing() == []


def make_model(objective="flow", **options):
    torch.manual_seed(0)
    model = NaLaDiT(**(TINY | {"objective": objective, "height": 4, "width": 6} | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def pipeline():
    return NaLaDiTPipeline(make_model(class_names=["circle", "square", "7"]))


class OneImage(DiffusionTransformer):
    """Knows the one image of each class, and says exactly what a perfect network would."""

    def __init__(self, objective):
        super().__init__(**TINY, learned_variance=OBJECTIVES[objective].learned_variance)
        self.objective = objective
        draw = torch.Generator().manual_seed(5)
        self.known = torch.rand(4, 3, 4, 6, generator=draw) * 1.6 - 0.8
        betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
        self.signal = (1 - betas).cumprod(0)

    def predict(self, images, times, labels):
        known = self.known[labels]
        if self.objective == "flow":
            # x = known + t (noise - known)
            return (images - known) / (times / 1000)[:, None, None, None]
        # a sampler may ask between two steps
        low, rest = times.double().floor().long(), times.double().frac()
        log = self.signal.log()
        signal = (log[low] * (1 - rest) + log[(low + 1).clamp(max=999)] * rest).exp().float()[:, None, None, None]
        noise = (images - signal.sqrt() * known) / (1 - signal).sqrt()
        return torch.cat((noise, torch.zeros_like(noise)), dim=1)


@pytest.mark.parametrize(("objective", "sampler"), SAMPLERS)
@pytest.mark.parametrize("steps", [10, 100])
def test_every_sampler_finds_the_image_that_a_perfect_network_knows(objective, sampler, steps):
    network = OneImage(objective)
    found = denoise(
        network,
        torch.tensor([2, 0]),
        objective=objective,
        height=4,
        width=6,
        clip=False,
        steps=steps,
        sampler=sampler,
        seeds=[(0, 0), (0, 1)],
    )
    assert (found - network.known[[2, 0]]).abs().max() < 2e-4


@pytest.mark.parametrize("steps", [1, 7, 1000, *[600] * FULL])
@pytest.mark.parametrize(("objective", "sampler"), SAMPLERS)
def test_no_number_of_steps_leaves_noise_in_the_image(objective, sampler, steps):
    network = OneImage(objective)
    plain = network.predict

    def with_the_largest_variance(images, times, labels):
        output = plain(images, times, labels)
        output[:, 3:] = 1.0
        return output

    network.predict = with_the_largest_variance
    options = {"objective": objective, "height": 4, "width": 6, "clip": False, "sampler": sampler, "seeds": [(0, 0)]}
    found = denoise(network, torch.tensor([1]), steps=steps, **options)
    assert (found - network.known[1]).abs().max() < 1e-3


@pytest.mark.parametrize("sampler", ["ddim", "dpm_solver", "unipc"])
# these do and do not divide the thousand steps of training
@pytest.mark.parametrize("steps", [103, 400, *[150, 600, 985] * FULL])
def test_deterministic_samplers_keep_the_spread_of_the_data(sampler, steps):
    """Of normal data of deviation s every image is s times the noise that it starts from, in the limit of many steps."""
    network, deviation = OneImage("ddpm"), 0.5
    network.known.zero_()

    def predict(images, times, labels):
        signal = network.signal[times.long()].float()[:, None, None, None]
        noise = (1 - signal).sqrt() * images / (signal * deviation**2 + 1 - signal)
        return torch.cat((noise, torch.zeros_like(noise)), dim=1)

    network.predict = predict
    options = {"objective": "ddpm", "height": 4, "width": 6, "clip": False, "sampler": sampler}
    images = denoise(network, torch.zeros(8, dtype=torch.long), steps=steps, seeds=[(0, i) for i in range(8)], **options)
    start = torch.stack([torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(first_word((0, i)))) for i in range(8)])
    assert (images / start - deviation).abs().max() < 0.03


@pytest.mark.parametrize("sampler", OBJECTIVES["flow"].samplers)
@pytest.mark.parametrize("steps", [1, 2, 7, 61])
def test_steps_of_a_flow_are_equal_and_as_many_as_asked_for(steps, sampler):
    """Of normal data of deviation s the velocity is x (t - (1 - t) s^2) / (t^2 + (1 - t)^2 s^2)."""
    network, variance = OneImage("flow"), 0.25

    def slope(t):
        return (t - (1 - t) * variance) / (t * t + (1 - t) ** 2 * variance)

    network.predict = lambda images, times, labels: images * slope(times[:, None, None, None] / 1000)
    options = {"objective": "flow", "height": 4, "width": 6, "clip": False, "steps": steps, "seeds": [(0, 0)]}
    found = denoise(network, torch.tensor([0]), sampler=sampler, **options)
    start = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(first_word((0, 0))))
    slopes = [slope(1 - step / steps) for step in range(steps)]
    wanted = math.prod(1 - here / steps for here in slopes)
    if sampler == "flow_heun":
        heun = (1 - (here + after * (1 - here / steps)) / 2 / steps for here, after in itertools.pairwise(slopes))
        wanted = math.prod(heun) * (1 - slopes[-1] / steps)
    assert (found / start - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("sampler", OBJECTIVES["ddpm"].samplers)
def test_every_number_of_steps_has_as_many_times_none_below_zero(sampler):
    for steps in range(1, 1001):
        schedule = make_sampler(sampler, "ddpm", clip=False)
        set_times(schedule, steps, torch.device("cpu"))
        times = schedule.timesteps
        assert len(times) == len(times.unique()) == steps
        assert times.min() >= 0


@pytest.mark.parametrize("clip", [False, True])
def test_ddim_is_that_of_diffusers_where_the_steps_divide_a_thousand(clip):
    ours = make_sampler("ddim", "ddpm", clip=clip)
    theirs = diffusers.DDIMScheduler.from_config(ours.config)
    noise, image = torch.randn(2, 1, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    for sampler in (ours, theirs):
        sampler.set_timesteps(50)
    for time in ours.timesteps[[0, 20, 49]]:
        found, wanted = (sampler.step(noise, time, image).prev_sample for sampler in (ours, theirs))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("steps", [10, 250, 1000])
def test_the_learned_variance_lies_between_the_bounds_of_the_step_that_is_taken(steps):
    sampler = make_sampler("ddpm", "ddpm", clip=False)
    sampler.set_timesteps(steps)
    betas = [1e-4 + (0.02 - 1e-4) * step / 999 for step in range(1000)]
    t = sampler.timesteps[steps // 2].item()
    before = t - 1000 // steps
    a, a_before = (math.prod(1 - beta for beta in betas[: step + 1]) for step in (t, before))
    beta = 1 - a / a_before
    bounds = [beta * (1 - a_before) / (1 - a), beta]
    for output, wanted in ((-1.0, bounds[0]), (1.0, bounds[1]), (0.0, math.sqrt(bounds[0] * bounds[1]))):
        found = sampler._get_variance(t, predicted_variance=torch.tensor(output), variance_type="learned_range")
        assert found.exp().item() == pytest.approx(wanted, rel=1e-3)
    if steps == 1000:
        # there diffusers takes the same bounds
        theirs = diffusers.DDPMScheduler.from_config(sampler.config)._get_variance(t, torch.tensor(0.3))
        assert sampler._get_variance(t, torch.tensor(0.3)).item() == pytest.approx(theirs.item(), rel=1e-3)
    assert isinstance(sampler, LearnedRangeDDPM)


@SAMPLE.of("labels")
def test_labels_are_names_or_numbers(pipeline):
    assert [pipeline.number_of(label) for label in ("circle", "square", 1, "1")] == [0, 1, 1, 1]
    # a class that is called by a number is meant by its name
    assert pipeline.number_of("7") == 2
    named, numbered = pipeline.sample(["square", "circle"], steps=2), pipeline.sample([1, 0], steps=2)
    assert named.shape == (2, 3, 4, 6)
    assert named.dtype == torch.uint8
    assert torch.equal(named, numbered)
    with pytest.raises(ValueError, match="unknown label 'cirle'; did you mean 'circle'"):
        pipeline.sample(["cirle"])
    with pytest.raises(ValueError, match=r"labels must lie in 0 \.\. 2, or 3 for no class, got 4 \.\. 4"):
        pipeline.sample([4])


@SAMPLE.of("seed")
def test_images_follow_from_the_seed_and_their_place_alone(pipeline):
    images = pipeline.sample([0, 1, 0], steps=2, seed=7)
    assert torch.equal(images, pipeline.sample([0, 1, 0], steps=2, seed=7))
    assert torch.equal(images[:1], pipeline.sample([0], steps=2, seed=7))
    assert not torch.equal(images[0], images[2])
    assert not torch.equal(images, pipeline.sample([0, 1, 0], steps=2, seed=8))
    with pytest.raises(ValueError, match="seed must not be negative"):
        pipeline.sample([0], seed=-1)


def test_the_ancestral_sampler_follows_from_the_seed_too():
    pipeline = NaLaDiTPipeline(make_model("ddpm"))
    images = pipeline.sample([0, 1], steps=3, sampler="ddpm", seed=1)
    assert torch.equal(images[:1], pipeline.sample([0], steps=3, sampler="ddpm", seed=1))
    assert not torch.equal(images, pipeline.sample([0, 1], steps=3, sampler="ddpm", seed=2))


def test_images_that_are_made_in_parts_are_the_same(pipeline, monkeypatch):
    together = pipeline.sample([0, 1, 2], steps=2)
    monkeypatch.setattr("nalaformer.models.diffusion.samplers.MOST_TOKENS_AT_ONCE", 6)
    assert (together.int() - pipeline.sample([0, 1, 2], steps=2).int()).abs().max() <= 1


@SAMPLE.of("guidance")
def test_guidance_goes_from_no_class_beyond_the_class():
    network, calls = OneImage("flow"), []
    network.known[3] = 0.0
    plain = network.predict
    network.predict = lambda images, times, labels: calls.append(len(images)) or plain(images, times, labels)

    def found(guidance):
        return denoise(
            network,
            torch.tensor([1]),
            objective="flow",
            height=4,
            width=6,
            clip=False,
            steps=1,
            guidance=guidance,
            seeds=[(0, 0)],
        )

    # in one step the image is that of "no class" plus guidance times what the class adds
    for guidance in (0.0, 0.5, 1.0, 3.0):
        torch.testing.assert_close(found(guidance)[0], guidance * network.known[1], rtol=0, atol=1e-4)
    assert calls == [2, 2, 1, 2]
    with pytest.raises(ValueError, match="guidance must not be negative or infinite, got nan"):
        found(float("nan"))
    with pytest.raises(ValueError, match="guidance must not be negative"):
        found(-1.0)


def test_guidance_without_no_class_is_refused():
    pipeline = NaLaDiTPipeline(make_model(class_dropout=0.0))
    assert pipeline.sample([0], steps=1).shape == (1, 3, 4, 6)
    with pytest.raises(ValueError, match=r"trained with class_dropout above 0, got guidance=2\.0"):
        pipeline.sample([0], guidance=2.0)


@SAMPLE.of("steps", "advance")
def test_each_step_is_told(pipeline):
    told = []
    pipeline.sample([0, 1], steps=5, advance=told.append)
    assert told == [2 / 5] * 5
    with pytest.raises(ValueError, match=r"steps must lie in 1 \.\. 1000, got 0"):
        pipeline.sample([0], steps=0)


@SAMPLE.of("sampler")
def test_a_sampler_of_another_objective_is_refused_with_those_that_fit(pipeline):
    images = [pipeline.sample([0], steps=3, sampler=name) for name in ("", "flow_euler", "flow_heun")]
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[1], images[2])
    with pytest.raises(ValueError, match="flow needs one of its samplers, flow_euler, flow_heun, got ddim, which is for ddpm"):
        pipeline.sample([0], sampler="ddim")
    with pytest.raises(ValueError, match="unknown sampler 'flow_eulr'; did you mean 'flow_euler'"):
        pipeline.sample([0], sampler="flow_eulr")


@SAMPLE.of("height", "width")
def test_images_have_the_size_asked_for(pipeline):
    assert pipeline.sample([0], steps=1, height=8, width=2).shape == (1, 3, 8, 2)
    with pytest.raises(ValueError, match="multiples of the patch size, 2, got 5 x 6; the nearest is"):
        pipeline.sample([0], height=5)


def test_a_pipeline_is_saved_and_loaded(pipeline, tmp_path):
    pipeline.save_pretrained(tmp_path)
    again = nalaformer.NaLaDiTPipeline.from_pretrained(tmp_path)
    assert torch.equal(again.sample(["square"], steps=2), pipeline.sample(["square"], steps=2))
    (picture,) = again(["square"], steps=2).images
    assert picture.size == (6, 4)


def change_file(file, *, without="-", **tensors):
    given = {name: value for name, value in load_file(file).items() if name != without}
    save_file(given | tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_a_pipeline_whose_weights_are_not_those_of_its_parts_is_refused(tmp_path, part):
    from nalaformer.recipes import load_pipeline

    NaLaDiTPipeline(make_model(channels=4), small_autoencoder()).save_pretrained(tmp_path)
    assert load_pipeline(tmp_path, device="cpu").sample([0], steps=1).shape == (1, 3, 8, 12)
    file = tmp_path / part / "diffusion_pytorch_model.safetensors"
    first, weight = next(iter(load_file(file).items()))
    change_file(file, **{first: weight * torch.nan})
    with pytest.raises(ValueError, match=f"got NaN or infinity in {first} of"):
        load_pipeline(tmp_path, device="cpu")
    change_file(file, without=first, extra=torch.ones(1))
    with pytest.raises(ValueError, match=f"got none for {first} and others: extra in"):
        load_pipeline(tmp_path, device="cpu")


def small_autoencoder(latent_channels=4):
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1}
    return diffusers.AutoencoderKL(**blocks, **sizes, latent_channels=latent_channels, scaling_factor=0.5).eval()


def test_latents_are_decoded_by_the_autoencoder_that_encoded_them(tmp_path):
    vae = small_autoencoder()
    latent = NaLaDiTPipeline(make_model(channels=4), vae)
    images = latent.sample([0, 1], steps=2)
    assert images.shape == (2, 3, 8, 12)
    made = denoise(
        latent.transformer,
        torch.tensor([0, 1]),
        objective="flow",
        height=4,
        width=6,
        clip=False,
        steps=2,
        seeds=[(0, 0), (0, 1)],
    )
    with torch.no_grad():
        wanted = to_rgb(vae.decode(made / 0.5).sample)
    assert (images.int() - wanted.int()).abs().max() <= 1
    latent.save_pretrained(tmp_path)
    assert torch.equal(NaLaDiTPipeline.from_pretrained(tmp_path).sample([0, 1], steps=2), images)


def test_an_autoencoder_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="4 channels makes latents and needs the autoencoder that encoded them, got none"):
        NaLaDiTPipeline(make_model(channels=4))
    with pytest.raises(ValueError, match="channels of the network's latents, 4, got 3"):
        NaLaDiTPipeline(make_model(channels=4), small_autoencoder(latent_channels=3))
    with pytest.raises(ValueError, match="must be an AutoencoderKL of diffusers, got AutoencoderTiny"):
        NaLaDiTPipeline(make_model(channels=4), diffusers.AutoencoderTiny())


def test_grey_images_become_rgb():
    images = NaLaDiTPipeline(make_model(channels=1)).sample([0], steps=1)
    assert images.shape == (1, 3, 4, 6)
    assert torch.equal(images[:, 0], images[:, 2])
    assert to_rgb(torch.tensor([-1.0, 0.0, 1.0, 2.0]).view(1, 1, 1, 4))[0, 0, 0].tolist() == [0, 128, 255, 255]
