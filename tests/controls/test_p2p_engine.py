"""Prompt-to-prompt among samplers, adapters and compilers: when it acts, what it costs, what it refuses."""

import diffusers as d
import pytest
import torch
import torch._dynamo
from controls.authors import encoded
from controls.edits import SOURCE, TARGET, edit, pipe_of, sample
from tiny import FAMILIES, VARIANTS
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnctrl import AttentionCall, Rows, Segment, Site, Step, Tokens, attach
from attnctrl.attend import attend
from attnctrl.controls import PromptToPrompt
from attnctrl.latents import LocalBlend

SD, FLUX, SD3 = FAMILIES["sd"], FAMILIES["flux"], FAMILIES["sd3"]


# ---------------------------------------------------------------------------------------------------------- schedules


class Borrowed:
    """Sits behind the edit and notes the steps at which targets came with the source's queries."""

    def __init__(self, kind):
        self.kinds, self.steps = {kind}, set()
        self.sites = "mid" if kind == "self" else "up"

    def attention(self, call, attend):
        target, source = (int(call.table.where(branch="cond", prompt=p)[0]) for p in (1, 0))
        if torch.equal(call.query[target], call.query[source]):
            self.steps.add(call.step.index)
        return attend(call)


@pytest.mark.parametrize(
    "family, scheduler, steps, cross, self_",
    [
        (SD, d.DDIMScheduler, 50, 40, 20),
        (SD, d.PNDMScheduler, 50, 40, 20),  # 51 iterations; the authors' sampler
        (SD, d.PNDMScheduler, 10, 8, 4),  # 11 iterations
        (SD, d.HeunDiscreteScheduler, 5, 8, 3),  # 9 iterations
        (SD, d.DPMSolverMultistepScheduler, 10, 8, 4),
        (VARIANTS["sd_img2img"], d.DDIMScheduler, 20, 8, 4),  # strength 0.5: 10 iterations
    ],
    ids=lambda value: getattr(value, "__name__", str(getattr(value, "name", value))),
)
def test_windows_of_0_8_and_0_4(family, scheduler, steps, cross, self_):
    pipe = pipe_of(family.name)
    own = pipe.scheduler
    pipe.scheduler = scheduler.from_config(own.config, skip_prk_steps=True)
    try:
        seen = Borrowed("cross"), Borrowed("self")
        sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET), *seen, num_inference_steps=steps)
    finally:
        pipe.scheduler = own
    assert [note.steps for note in seen] == [set(range(cross)), set(range(self_))]


def test_a_words_window_replaces_the_default_one():
    family, both = SD, (SOURCE, TARGET)
    all_words = {word: 0.4 for word in TARGET.split()}
    by_word = sample(family, both, edit(family, *both, cross={"default": 0.4, **all_words}))
    assert torch.equal(by_word, sample(family, both, edit(family, *both, cross=0.4)))
    kept = sample(family, both, edit(family, *both, cross=0.8, skip="dog"))
    never = sample(family, both, edit(family, *both, cross={"default": 0.8, "dog": 0.0}))
    assert torch.equal(kept, never) and not torch.equal(kept, sample(family, both, edit(family, *both)))
    unset = sample(family, both, edit(family, *both, cross={"default": None, "dog": 0.2}))
    assert torch.equal(unset, sample(family, both, edit(family, *both, cross={"default": 0.8, "dog": 0.2})))


def test_the_self_limit():
    """The tiny UNet has self sites of latent/1, /2 and /4."""
    runs = {
        limit: sample(SD, (SOURCE, TARGET), edit(SD, SOURCE, TARGET, limit=limit, self_=1.0))
        for limit in (None, 0.25, 4, 0.5, 16, 1.0, 64, 3)
    }
    assert torch.equal(runs[None], runs[0.25]) and torch.equal(runs[0.25], runs[4])
    assert torch.equal(runs[0.5], runs[16]) and torch.equal(runs[1.0], runs[64])
    off = sample(SD, (SOURCE, TARGET), edit(SD, SOURCE, TARGET, self_=0.0))
    assert torch.equal(runs[3], off)
    assert all(not torch.equal(runs[a], runs[b]) for a, b in ((3, 4), (4, 16), (16, 64)))


def test_fewer_sites():
    some = sample(SD, (SOURCE, TARGET), edit(SD, SOURCE, TARGET, sites="up"))
    assert not torch.equal(some, sample(SD, (SOURCE, TARGET), edit(SD, SOURCE, TARGET)))


# ----------------------------------------------------------------------------------------------------------- adapters


def test_with_a_lora():
    peft = pytest.importorskip("peft")
    pipe = SD.build(with_text=True)
    plain = SD.run(pipe, prompts=(SOURCE, TARGET), text=True)
    pipe.unet.add_adapter(
        peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    )
    tuned = SD.run(pipe, prompts=(SOURCE, TARGET), text=True)
    with attach(pipe, PromptToPrompt([SOURCE, TARGET])):
        edited = SD.run(pipe, prompts=(SOURCE, TARGET), text=True)
    assert not torch.equal(plain, tuned)
    assert torch.equal(edited[0], tuned[0]) and not torch.equal(edited[1], tuned[1])
    pipe.unet.disable_adapters()
    assert torch.equal(SD.run(pipe, prompts=(SOURCE, TARGET), text=True), plain)


def test_with_an_ip_adapter():
    """The picture's attention is each row's own: only the text's is edited."""
    pipe, width = SD.build(with_text=True), 12
    g = torch.Generator().manual_seed(0)
    weights = {}
    for i, name in enumerate(pipe.unet.attn_processors):
        if "attn2" in name:
            hidden = pipe.unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
            for part in ("k", "v"):
                weights[f"{i}.to_{part}_ip.weight"] = torch.randn(hidden, 16, generator=g)
    projection = {
        "proj.weight": torch.randn(4 * 16, width, generator=g), "proj.bias": torch.zeros(4 * 16),
        "norm.weight": torch.ones(16), "norm.bias": torch.zeros(16),
    }  # fmt: skip
    pipe.unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": weights}])
    pipe.unet.eval().requires_grad_(False)
    kinds = []

    class Kinds:
        stage, kinds = "observe", {"cross"}

        def attention(self, call, attend):
            kinds.append((call.kind, call.key.shape[2]))
            return attend(call)

    def run(*controls):
        options = {"prompts": (SOURCE, TARGET), "text": True, "num_inference_steps": 4}
        options["ip_adapter_image_embeds"] = [torch.randn(2, 1, width, generator=torch.Generator().manual_seed(1))]
        if not controls:
            return SD.run(pipe, **options)
        with attach(pipe, *controls):
            return SD.run(pipe, **options)

    plain = run()
    edited = run(Kinds(), PromptToPrompt([SOURCE, TARGET]))
    assert {("cross", 77), ("ip", 4)} == set(kinds)
    assert torch.equal(edited[0], plain[0]) and not torch.equal(edited[1], plain[1])
    off = PromptToPrompt([SOURCE, TARGET], cross=0.0, self_=0.0, share_noise=False)
    assert torch.equal(run(off), plain)


# ------------------------------------------------------------------------------------------------------------ compile


@pytest.mark.parametrize("family, graphs", [(SD, 3), (FLUX, 4)], ids=["sd", "flux"])
def test_compiled_the_result_is_the_same_and_graphs_do_not_grow_with_steps(family, graphs):
    """One graph for each state of the windows (both on, cross only, none), and one for a separate uncond call."""
    both, words = (SOURCE, TARGET), ["cat", "dog"]
    windows = {"cross": 0.6, "self_": 0.4, "joint": "exact"}

    def run(pipe, controls, steps):
        with attach(pipe, *controls):
            return [family.run(pipe, prompts=both, text=True, num_inference_steps=steps) for _ in range(2)]

    def controls():
        return LocalBlend([SOURCE, TARGET], words, threshold=0.9), PromptToPrompt([SOURCE, TARGET], **windows)

    eager = run(family.build(with_text=True), controls(), 10)
    torch._dynamo.reset()
    pipe, counter = family.build(with_text=True), CompileCounter()
    name = family.denoisers[0]
    setattr(pipe, name, torch.compile(getattr(pipe, name), fullgraph=True, backend=counter))
    compiled = run(pipe, controls(), 10)
    assert counter.frame_count <= graphs
    first = counter.frame_count
    again = run(pipe, controls(), 20)  # other tables of the same shapes
    assert counter.frame_count == first
    torch._dynamo.reset()
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(again[0], again[1])


# ------------------------------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """Elements of the largest tensor any operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = (x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("kind", ["self", "cross", "joint", "image_qk"])
def test_no_tensor_grows_with_the_square_of_the_tokens(kind, masked):
    prompts = [encoded("a cat on grass", 16), encoded("a hippopotamus on grass", 16)]
    largest, dim, rows = {}, 4, 4
    for pixels in (256, 1024):
        grid = (pixels // 16, 16)
        image, text = Segment("image", 16, pixels, grid), Segment("text", 0, 16)
        n, m = {"self": (pixels, pixels), "cross": (pixels, 16)}.get(kind, (pixels + 16,) * 2)
        queries = Tokens((text, image) if n > pixels else (Segment("image", 0, pixels, grid),))
        keys = queries if n == m else Tokens((text,))
        q, k, v = (torch.randn(rows, 1, size, dim) for size in (n, m, m))
        call = AttentionCall(
            q, k, v, mask=torch.ones(rows, 1, 1, m, dtype=torch.bool) if masked else None,
            kind="joint" if kind == "image_qk" else kind, site=Site(scale=4), step=Step(1, 4), latent=grid,
            rows=Rows.grid(("uncond", "cond"), 2, 1), query_tokens=queries, key_tokens=keys,
        )  # fmt: skip
        windows = {"cross": 1.0 if kind == "image_qk" else {"default": 1.0, "on": 0.2}, "self_": 1.0}
        joint = "image_qk" if kind == "image_qk" else "exact"
        control = PromptToPrompt(prompts, **windows, joint=joint, reweight={"grass": 2.0})
        blend = LocalBlend(prompts, ["cat", "hippopotamus"])
        with Largest() as mode, torch.no_grad():
            blend.attention(call, lambda inner, control=control: control.attention(inner, attend))
        largest[pixels] = mode.elements
        assert mode.elements <= 3 * rows * n * dim
    assert largest[1024] <= 4.2 * largest[256]


# ------------------------------------------------------------------------------------------------------------- errors

HAS = r"'a blue dog on grass' has the words a, blue, dog, on, grass"


@pytest.mark.parametrize(
    "family, settings, message",
    [
        (SD, {"cross": {"fox": 0.4}}, f"No 'fox' in the prompt: {HAS}"),
        (SD, {"reweight": {"fox": 2.0}}, f"No 'fox' in the prompt: {HAS}"),
        (SD, {"skip": ["dog", "fox"]}, f"No 'fox' in the prompt: {HAS}"),
        (SD, {"reweight": {("dog", 1): 2.0}}, "occurrence 1"),
        (FLUX, {"reweight": {"fox": 2.0}}, f"No 'fox' in the prompt: {HAS}"),
        (SD3, {"cross": {"default": 0.5, "dog": 0.2}}, "use joint='exact'"),
        (SD3, {"skip": "dog"}, "use joint='exact'"),
        (FLUX, {"joint": "image_qk", "cross": {"dog": 0.2}}, "use joint='exact'"),
        (SD, {"cross": 1.2}, "A window is a fraction"),
        (SD, {"cross": {"dog": (0.9, 0.1)}}, "A window is a fraction"),
    ],
    ids=str,
)
def test_words_and_windows_that_do_not_fit(family, settings, message):
    ran = []
    handle = getattr(pipe_of(family.name), family.denoisers[0]).register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(ValueError, match=message):
            sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET, **settings))
    finally:
        handle.remove()
    assert not ran


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"prompts": "a cat"}, "not one text"),
        ({"prompts": ["a cat"]}, "at least one target"),
        ({"prompts": [["a cat", "a dog"], "a fox"]}, "mixes"),
        ({"edit": "swap"}, "'auto', 'replace' or 'refine'"),
        ({"joint": "both"}, "'exact', 'image_qk' or None"),
        ({"limit": 0}, "limit is a fraction"),
        ({"self_": 1.5}, "A window is a fraction"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        PromptToPrompt(**{"prompts": ["a cat", "a dog"], **settings})


def test_prompts_that_do_not_fit_the_call():
    with pytest.raises(ValueError, match=r"called with the prompts \['a cat', 'a dog'\], PromptToPrompt was made for"):
        sample(SD, ("a cat", "a dog"), edit(SD, SOURCE, TARGET))
    with pytest.raises(ValueError, match=r"'a red cat on grass' has 5 words, 'a dog' has 2\. Use refine"):
        sample(SD, (SOURCE, "a dog"), edit(SD, SOURCE, "a dog", edit="replace"))
    pipe = pipe_of("sd")
    with (
        pytest.raises(ValueError, match="made for 2 prompts, the pipeline runs 3"),
        attach(pipe, PromptToPrompt([encoded(SOURCE, 8), encoded(TARGET, 8)])),
    ):
        SD.run(pipe, prompts=("a", "b", "c"))
    with (
        pytest.raises(ValueError, match="was encoded to 7 positions, the denoiser's text has 8"),
        attach(pipe, PromptToPrompt([encoded(SOURCE, 7), encoded(TARGET, 7)])),
    ):
        SD.run(pipe, prompts=("a", "b"))
    wan = pipe_of("wan")
    with (
        pytest.raises(ValueError, match="has no tokenizer to find the words"),
        attach(wan, PromptToPrompt([SOURCE, TARGET])),
    ):
        FAMILIES["wan"].run(wan, prompts=("a", "b"))


def test_by_hand_prompts_must_be_encoded():
    q = torch.randn(2, 1, 4, 8)
    k = torch.randn(2, 1, 77, 8)
    with pytest.raises(ValueError, match=r"attnctrl.tokens.encode\(tokenizer, 'a cat'"):
        PromptToPrompt(["a cat", "a dog"]).attention(AttentionCall(q, k, k, kind="cross"), attend)
