"""Attaching and closing: a pipeline with no-op controls computes the same bits, and a closed one is as it was."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Backends
from tiny import FAMILIES, VARIANTS
from torch import Tensor, nn

from attnctrl import attach

CONTROLLED = {name: family for name, family in {**FAMILIES, **VARIANTS}.items() if name != "mochi"}
SD, FLUX = FAMILIES["sd"], FAMILIES["flux"]


# Controls ------------------------------------------------------------------------------------------------------------


class Nothing:
    """Acts on every level and changes nothing; counts its calls."""

    def __init__(self) -> None:
        self.attended = self.denoised = self.stepped = 0

    def attention(self, call, attend):
        self.attended += 1
        return attend(call)

    def denoise(self, call, denoise):
        self.denoised += 1
        return denoise(call)

    def step(self, call, step):
        self.stepped += 1
        return step(call)


class Scaled:
    """Multiplies the output of attention, so that whoever runs it shows."""

    def __init__(self, factor: float = 0.5, sites: str | None = None) -> None:
        self.factor, self.sites = factor, sites

    def attention(self, call, attend):
        return attend(call) * self.factor


class Kinds:
    """Writes down (kind, part, length of the keys) of each operation by site."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[str, int, int]]] = {}

    def attention(self, call, attend):
        self.seen.setdefault(call.site.name, []).append((call.kind, call.part, call.key.shape[2]))
        return attend(call)


# What must be as it was ----------------------------------------------------------------------------------------------


def denoisers(pipe: Any) -> list[nn.Module]:
    return [module for name in ("unet", "transformer", "transformer_2") if (module := getattr(pipe, name, None))]


def state(pipe: Any) -> dict[str, Any]:
    """Types (as ids, since hooked ones equal their own) and attributes of all that `attach` may touch, for ==."""
    modules = {(i, name): module for i, model in enumerate(denoisers(pipe)) for name, module in model.named_modules()}
    return {
        "op": F.scaled_dot_product_attention,
        "backends": dict(Backends._backends),
        "modules": {name: (id(type(module)), tuple(vars(module))) for name, module in modules.items()},
        "processors": {name: id(getattr(module, "processor", None)) for name, module in modules.items()},
        "pipeline": (id(type(pipe)), {name: plain(value) for name, value in vars(pipe).items()}),
        "scheduler": (id(type(pipe.scheduler)), {name: plain(value) for name, value in vars(pipe.scheduler).items()}),
    }


def plain(value: Any) -> Any:
    """Something that == compares by content."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (int, float, str, dict, type(None))) else id(value)


@contextlib.contextmanager
def untouched(pipe: Any, run: Callable[[], Tensor]) -> Iterator[Tensor]:
    """Yields the plain result; after the block, the pipeline computes the same bits and every object is as it was."""
    expected = run()
    before = state(pipe)
    yield expected
    assert torch.equal(run(), expected)
    assert state(pipe) == before


@pytest.fixture(autouse=True)
def nothing_left_behind():
    op, backends = F.scaled_dot_product_attention, dict(Backends._backends)
    yield
    assert F.scaled_dot_product_attention is op
    assert dict(Backends._backends) == backends


# The same bits -------------------------------------------------------------------------------------------------------

PLACES = [
    {},
    {"cfg": False},
    {"images": 2, "prompts": ("a", "b")},
    {"odd": True},
]


@pytest.mark.parametrize("how", PLACES, ids=["cfg", "no_cfg", "two_images", "odd_size"])
@pytest.mark.parametrize("name", CONTROLLED)
def test_controls_that_change_nothing_change_no_bit(name, how):
    family = CONTROLLED[name]
    how = dict(how)
    if how.pop("odd", False):
        how["height"], how["width"] = family.odd_size
    pipe = family.build()
    nothing = Nothing()
    with untouched(pipe, lambda: family.run(pipe, **how)) as expected, attach(pipe, nothing):
        assert torch.equal(family.run(pipe, **how), expected)
    steps = round(family.steps * family.strength)
    calls = steps * (len(family.calls) if how.get("cfg", True) else 1)
    assert nothing.stepped == steps
    assert nothing.denoised == calls
    sites = len(family.sites)
    assert nothing.attended == calls * sites


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mochi"])
def test_controls_that_change_nothing_change_no_bit_in_bfloat16(name):
    family = CONTROLLED[name]
    pipe = family.build(dtype=torch.bfloat16)
    with untouched(pipe, lambda: family.run(pipe)) as expected, attach(pipe, Nothing()):
        assert torch.equal(family.run(pipe), expected)


@pytest.mark.parametrize("name", CONTROLLED)
def test_a_control_that_acts_is_gone_after_closing(name):
    family = CONTROLLED[name]
    pipe = family.build()
    with untouched(pipe, lambda: family.run(pipe)) as expected, attach(pipe, Scaled()):
        assert not torch.equal(family.run(pipe), expected)


@pytest.mark.parametrize("name", [name for name, family in CONTROLLED.items() if family.text])
def test_controls_that_change_nothing_change_no_bit_from_text(name):
    family = CONTROLLED[name]
    pipe = family.build(with_text=True)
    prompts = ("a red cat", "a blue dog")

    def compute():
        return family.run(pipe, prompts=prompts, text=True)

    with untouched(pipe, compute) as expected, attach(pipe, Nothing()) as run:
        assert torch.equal(compute(), expected)
        assert run.prompts == list(prompts)


# Errors and interrupts -----------------------------------------------------------------------------------------------


class Failed(Exception):
    pass


class Fails:
    """Raises at one level, after some calls went well."""

    def __init__(self, level: str, after: int = 0) -> None:
        self.left = after
        setattr(self, level, self._fail)
        if level in ("begin", "begin_run"):
            self.denoise = lambda call, denoise: denoise(call)

    def _fail(self, call: Any, rest: Callable[[Any], Any] | None = None) -> Any:
        if self.left == 0:
            raise Failed
        self.left -= 1
        return None if rest is None else rest(call)


FAILURES = [("attention", 3), ("denoise", 1), ("step", 1), ("begin", 1), ("begin_run", 0)]


@pytest.mark.parametrize("name", ["sd", "flux", "wan22"])
@pytest.mark.parametrize("level, after", FAILURES)
def test_everything_is_restored_after_an_exception_in_a_control(name, level, after):
    family = CONTROLLED[name]
    pipe = family.build()
    control = Fails(level, after)
    with untouched(pipe, lambda: family.run(pipe)), pytest.raises(Failed), attach(pipe, Nothing(), control):
        family.run(pipe)


@pytest.mark.parametrize("level, after", FAILURES)
def test_the_next_run_starts_afresh_after_an_exception_in_a_control(level, after):
    pipe = SD.build()
    indices = []

    class Clock:
        def denoise(self, call, denoise):
            indices.append((call.step.index, call.step.call))
            return denoise(call)

    with untouched(pipe, lambda: SD.run(pipe)) as expected:
        fails = Fails(level, after)
        with attach(pipe, fails, Clock(), Scaled()):
            with pytest.raises(Failed):
                SD.run(pipe)
            indices.clear()
            fails.left = -1  # never again
            controlled = SD.run(pipe)
        assert indices == [(0, 0), (1, 0)]
        assert not torch.equal(controlled, expected)
        with attach(pipe, Scaled()):
            assert torch.equal(SD.run(pipe), controlled)


@pytest.mark.parametrize("name", ["sd", "flux", "wan22"])
def test_everything_is_restored_after_a_keyboard_interrupt(name):
    family = CONTROLLED[name]
    pipe = family.build()

    def interrupt(*_):
        raise KeyboardInterrupt

    with untouched(pipe, lambda: family.run(pipe)), pytest.raises(KeyboardInterrupt), attach(pipe, Scaled()):
        family.run(pipe, callback_on_step_end=interrupt)


def test_everything_is_restored_after_attach_itself_fails():
    class First:
        stage = "kernel"

        def attention(self, call, attend):
            return attend(call)

    class Second(First):
        pass

    pipe = SD.build()
    with untouched(pipe, lambda: SD.run(pipe)):
        with pytest.raises(ValueError, match="First and Second both compute the softmax"):
            attach(pipe, First(), Second())
        with pytest.raises(ValueError, match="given twice"):
            attach(pipe, *[Nothing()] * 2)
        with pytest.raises(TypeError, match="is a class"):
            attach(pipe, Nothing)
        with pytest.raises(TypeError, match="is no control"):
            attach(pipe, object())
        with pytest.raises(ValueError, match="at least one"):
            attach(pipe)


def test_a_second_attach_that_fails_leaves_the_first_open():
    class Kernel:
        stage = "kernel"

        def attention(self, call, attend):
            return attend(call) * 0.5

    pipe = SD.build()
    with untouched(pipe, lambda: SD.run(pipe)) as expected:
        with attach(pipe, Kernel()):
            controlled = SD.run(pipe)
            with pytest.raises(ValueError, match="both compute"):
                attach(pipe, Kernel())
            assert torch.equal(SD.run(pipe), controlled)
        assert not torch.equal(controlled, expected)


# Closing -------------------------------------------------------------------------------------------------------------


def test_closing_twice_does_nothing():
    pipe = SD.build()
    with untouched(pipe, lambda: SD.run(pipe)):
        run = attach(pipe, Scaled())
        run.close()
        run.close()
        other = attach(pipe, Scaled())
        controlled = SD.run(pipe)
        run.close()
        assert torch.equal(SD.run(pipe), controlled)
        other.close()


def test_a_report_can_be_read_after_closing():
    pipe = SD.build()
    with attach(pipe, Nothing()) as run:
        SD.run(pipe)
        before = str(run.report())
    assert str(run.report()) == before
    assert run.report().denoiser_calls == {"unet": SD.steps}


@pytest.mark.parametrize("name", ["sd", "flux"])
@pytest.mark.parametrize("first", [0, 1])
def test_two_runs_on_one_pipeline_close_in_any_order(name, first):
    family = CONTROLLED[name]
    pipe = family.build()
    alone = []
    for factor in (0.5, 0.8):
        with attach(pipe, Scaled(factor)):
            alone.append(family.run(pipe))
    with untouched(pipe, lambda: family.run(pipe)) as expected:
        runs = [attach(pipe, Scaled(0.5)), attach(pipe, Scaled(0.8))]
        both = family.run(pipe)
        runs[first].close()
        assert torch.equal(family.run(pipe), alone[1 - first])
        runs[1 - first].close()
        assert len({plainly(x) for x in (both, expected, *alone)}) == 4


def plainly(x: Tensor) -> tuple[float, ...]:
    return tuple(x.flatten().tolist())


def test_two_pipelines_do_not_see_each_other():
    """One of each family, and two of one family, opened and closed crosswise, in the middle of each other's runs."""
    pipes = [(SD, SD.build()), (SD, SD.build(seed=1)), (FLUX, FLUX.build())]
    expected, alone = [], []
    for family, pipe in pipes:
        expected.append(family.run(pipe))
        with attach(pipe, Scaled()):
            alone.append(family.run(pipe))
    befores = [state(pipe) for _, pipe in pipes]
    first, third = attach(pipes[0][1], Scaled()), attach(pipes[2][1], Scaled())
    results = {}

    def others(*args):
        for i, (family, pipe) in enumerate(pipes[1:], 1):
            results[i] = family.run(pipe)
        return args[-1]

    assert torch.equal(SD.run(pipes[0][1], callback_on_step_end=others), alone[0])
    assert torch.equal(results[1], expected[1])
    assert torch.equal(results[2], alone[2])
    first.close()
    assert torch.equal(FLUX.run(pipes[2][1]), alone[2])
    assert torch.equal(SD.run(pipes[0][1]), expected[0])
    third.close()
    for (family, pipe), plain_result, before in zip(pipes, expected, befores, strict=True):
        assert torch.equal(family.run(pipe), plain_result)
        assert state(pipe) == before


@pytest.mark.parametrize("first", [0, 1])
def test_pipelines_that_share_a_denoiser_warn_and_are_restored_in_any_order(first):
    text, image = SD, VARIANTS["sd_img2img"]
    pipe = text.build()
    other = image.build().__class__.from_pipe(pipe)
    with attach(pipe, Scaled()):
        controlled = text.run(pipe)
    with untouched(pipe, lambda: text.run(pipe)), untouched(other, lambda: image.run(other)):
        runs = [attach(pipe, Scaled())]
        with pytest.warns(UserWarning, match="unet is shared with another attached pipeline"):
            runs.append(attach(other, nothing := Nothing()))
        assert torch.equal(text.run(pipe), controlled)
        assert nothing.denoised == text.steps
        runs[first].close()
        if first == 1:
            assert torch.equal(text.run(pipe), controlled)
        runs[1 - first].close()


def test_a_pipeline_made_while_another_is_attached_shares_its_controls_and_both_are_restored():
    image = VARIANTS["sd_img2img"]
    pipe = SD.build()
    with untouched(pipe, lambda: SD.run(pipe)):
        with attach(pipe, Scaled()):
            other = image.build().__class__.from_pipe(pipe)
            controlled = image.run(other)
        plain_result = image.run(other)
        assert not torch.equal(controlled, plain_result)
        assert "_attnctrl" not in vars(other)


def test_a_bare_denoiser_is_restored():
    pipe = SD.build()
    with untouched(pipe, lambda: SD.run(pipe)) as expected, attach(pipe.unet, Scaled()) as run:
        run.at(0, SD.steps)
        assert not torch.equal(SD.run(pipe), expected)


# Threads -------------------------------------------------------------------------------------------------------------


def test_another_thread_that_runs_a_plain_pipeline_is_never_intercepted():
    """The other pipeline runs inside an attention call of the first, where the op is most surely intercepted."""
    pipe, other = SD.build(), FLUX.build()
    expected = FLUX.run(other)
    results, attended = [], []

    class Starts:
        def attention(self, call, attend):
            attended.append(call.site.denoiser)
            if len(attended) == 1:
                thread = threading.Thread(target=lambda: results.append(FLUX.run(other)))
                thread.start()
                thread.join()
            return attend(call) * 0.5

    with untouched(pipe, lambda: SD.run(pipe)), attach(pipe, Starts()):
        SD.run(pipe)
    assert torch.equal(results[0], expected)
    assert attended == ["unet"] * len(SD.sites) * SD.steps


def test_threads_that_run_their_own_pipelines_with_controls_do_not_mix():
    pipes = [SD.build(), SD.build(seed=1)]
    alone, together, errors = [], {}, []
    for pipe in pipes:
        with attach(pipe, Scaled()):
            alone.append(SD.run(pipe))
    barrier = threading.Barrier(2)

    class Meets:
        def denoise(self, call, denoise):
            barrier.wait(60)
            return denoise(call)

    def work(i):
        try:
            with attach(pipes[i], Scaled(), Meets()):
                together[i] = SD.run(pipes[i])
        except BaseException as error:
            barrier.abort()
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(alone[i], together[i]) for i in range(2))


# What is never reached -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_vae_and_text_encoders_are_never_reached(name):
    family = CONTROLLED[name]
    pipe = family.build(with_text=True)
    names_of_denoisers, names = set(family.denoisers), set()
    inside: list[bool] = []

    class Watches:
        def attention(self, call, attend):
            names.add(call.site.denoiser)
            inside.append(bool(running))
            return attend(call)

    def run():
        return family.run(pipe, prompts=("a red cat",), text=True, output_type="pt")

    running: list[int] = []
    others = {
        key: module
        for key, module in pipe.components.items()
        if isinstance(module, nn.Module) and key not in family.denoisers
    }
    with untouched(pipe, run) as expected:
        assert expected.shape[1] == 3
        for module in (m for model in others.values() for m in model.modules()):
            module.register_forward_pre_hook(lambda *_: running.append(1))
            module.register_forward_hook(lambda *_: running.pop() and None)
        with attach(pipe, Watches()) as handle:
            assert {site.denoiser for site in handle.sites} == names_of_denoisers
            types = {
                key: [type(m).__dict__.get("_attnctrl_base") for m in module.modules()]
                for key, module in others.items()
            }
            assert torch.equal(run(), expected)
    assert inside and not any(inside)
    assert names == names_of_denoisers
    assert {key for key, bases in types.items() if any(bases)} == set()


def test_a_control_on_the_unet_does_not_change_what_the_text_encoder_and_vae_compute():
    pipe = SD.build(with_text=True)
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))

    def parts():
        text = pipe.encode_prompt("a red cat", "cpu", 1, True)
        return [*text, pipe.vae.decode(latents).sample]

    expected, plain_latents = parts(), SD.run(pipe)
    with attach(pipe, Scaled()):
        assert not torch.equal(SD.run(pipe), plain_latents)  # the control acts
        assert all(torch.equal(a, b) for a, b in zip(parts(), expected, strict=True))


# Adapters ------------------------------------------------------------------------------------------------------------


def add_lora(model: nn.Module, name: str = "default") -> None:
    from peft import LoraConfig

    with tiny.seeded(3):
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False), name)


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_lora_may_come_and_go_before_while_and_after_attach(name):
    family = CONTROLLED[name]
    pipe = family.build()
    model = denoisers(pipe)[0]
    expected = family.run(pipe)
    add_lora(model)
    adapted = family.run(pipe)
    assert not torch.equal(adapted, expected)
    with untouched(pipe, lambda: family.run(pipe)), attach(pipe, Nothing()):  # there before
        assert torch.equal(family.run(pipe), adapted)
        model.disable_adapters()
        assert torch.equal(family.run(pipe), expected)
        model.enable_adapters()
        assert torch.equal(family.run(pipe), adapted)
    with attach(pipe, Nothing()):  # deleted while attached
        model.delete_adapters("default")
        assert torch.equal(family.run(pipe), expected)
    assert torch.equal(family.run(pipe), expected)
    with attach(pipe, Nothing()) as run:  # added while attached
        add_lora(model, "later")
        assert torch.equal(family.run(pipe), adapted)
        assert all(site.calls == family.steps * len(family.calls) for site in run.report().sites)
    assert torch.equal(family.run(pipe), adapted)
    model.delete_adapters("later")  # after
    assert torch.equal(family.run(pipe), expected)


def test_controls_act_on_adapted_attention():
    pipe = SD.build()
    with attach(pipe, Scaled()):
        plain_controlled = SD.run(pipe)
        add_lora(pipe.unet)
        controlled = SD.run(pipe)
    assert not torch.equal(controlled, plain_controlled)
    assert not torch.equal(controlled, SD.run(pipe))
    with attach(pipe, Scaled()):
        assert torch.equal(SD.run(pipe), controlled)


IP_TOKENS = 4


def load_ip_adapter(pipe: Any) -> None:
    """A random IP-Adapter on the tiny UNet: image tokens of 16 channels, made of embeddings of 12."""
    from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

    unet = pipe.unet
    with tiny.seeded(5):
        processors = {}
        for name in unet.attn_processors:
            module = unet.get_submodule(name.removesuffix(".processor"))
            if name.endswith("attn2.processor"):
                processor = IPAdapterAttnProcessor2_0(module.inner_dim, module.cross_attention_dim, (IP_TOKENS,))
            else:
                processor = AttnProcessor2_0()
            processors[name] = processor
        unet.set_attn_processor(processors)
        unet.encoder_hid_proj = MultiIPAdapterImageProjection([ImageProjection(12, 16, IP_TOKENS)])
        unet.register_to_config(encoder_hid_dim_type="ip_image_proj")


def run_sd_with_image_prompt(pipe: Any) -> Tensor:
    """Each prompt gets the same picture: one row against, one for it."""
    embeds = torch.randn(2, 1, 12, generator=torch.Generator().manual_seed(1))
    return SD.run(pipe, ip_adapter_image_embeds=[embeds])


def test_operations_of_an_image_prompt_are_told_from_those_of_the_text():
    pipe = SD.build()
    expected = SD.run(pipe)
    load_ip_adapter(pipe)
    kinds = Kinds()
    with untouched(pipe, lambda: run_sd_with_image_prompt(pipe)) as prompted:
        assert not torch.equal(prompted, expected)
        with attach(pipe, kinds):
            assert torch.equal(run_sd_with_image_prompt(pipe), prompted)
    for site, seen in kinds.seen.items():
        if site.endswith("attn1"):
            assert [(kind, part) for kind, part, _ in seen] == [("self", 0)] * SD.steps
        else:
            assert seen == [("cross", 0, tiny.TEXT_LENGTH), ("ip", 1, IP_TOKENS)] * SD.steps
    assert set(kinds.seen) == set(SD.sites)


def test_an_image_prompt_that_came_while_attached_is_seen():
    pipe = SD.build()
    kinds = Kinds()
    with attach(pipe, kinds):
        SD.run(pipe)
        load_ip_adapter(pipe)
        kinds.seen.clear()
        prompted = run_sd_with_image_prompt(pipe)
    assert torch.equal(run_sd_with_image_prompt(pipe), prompted)
    assert {(kind, part) for seen in kinds.seen.values() for kind, part, _ in seen} == {
        ("self", 0), ("cross", 0), ("ip", 1)}  # fmt: skip


# Ways of computing attention -----------------------------------------------------------------------------------------


def test_sliced_attention_is_refused_by_name_and_works_after_disabling():
    pipe = SD.build()
    pipe.disable_attention_slicing()  # sets other processors than the model was made with
    expected, before = SD.run(pipe), state(pipe)
    del before["processors"]
    pipe.enable_attention_slicing()
    with pytest.raises(ValueError, match=r"SlicedAttnProcessor.*disable_attention_slicing"):
        attach(pipe, Scaled())
    pipe.disable_attention_slicing()
    with attach(pipe, Scaled()):
        controlled = SD.run(pipe)
        pipe.enable_attention_slicing()
        with pytest.raises(ValueError, match=r"SlicedAttnProcessor.*disable_attention_slicing"):
            SD.run(pipe)
        pipe.disable_attention_slicing()
        assert torch.equal(SD.run(pipe), controlled)
    assert not torch.equal(controlled, expected)
    assert torch.equal(SD.run(pipe), expected)
    after = state(pipe)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_fused_projections_may_come_and_go_before_while_and_after_attach(name):
    family = CONTROLLED[name]
    fused = family.build()
    denoisers(fused)[0].fuse_qkv_projections()
    pipe = family.build()
    model = denoisers(pipe)[0]
    expected = family.run(pipe)
    with attach(pipe, Scaled()):
        controlled = family.run(pipe)
        model.fuse_qkv_projections()
        torch.testing.assert_close(family.run(pipe), controlled, rtol=1e-3, atol=1e-4)
        model.unfuse_qkv_projections()
        assert torch.equal(family.run(pipe), controlled)
        model.fuse_qkv_projections()
    assert torch.equal(family.run(pipe), family.run(fused))
    with attach(pipe, nothing := Nothing()):
        assert torch.equal(family.run(pipe), family.run(fused))
        assert nothing.attended == len(family.sites) * family.steps * len(family.calls)
        model.unfuse_qkv_projections()
        assert torch.equal(family.run(pipe), expected)
    assert torch.equal(family.run(pipe), expected)


def test_hooks_of_accelerate_work_whichever_came_first():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Counts(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    pipe = SD.build()
    expected = SD.run(pipe)
    site = pipe.unet.get_submodule(SD.sites[0])
    with attach(pipe, Scaled()):
        controlled = SD.run(pipe)

    first = [Counts(), Counts()]
    for module, hook in zip((pipe.unet, site), first, strict=True):
        add_hook_to_module(module, hook)
    with untouched(pipe, lambda: SD.run(pipe)), attach(pipe, Scaled()):
        assert torch.equal(SD.run(pipe), controlled)
        assert [hook.calls for hook in first] == [2 * SD.steps, 2 * SD.steps]
    with attach(pipe, Scaled()):
        for hook in first:
            hook.calls = 0
        assert torch.equal(SD.run(pipe), controlled)
        assert [hook.calls for hook in first] == [SD.steps, SD.steps]
        for module in (pipe.unet, site):  # removed while attached
            remove_hook_from_module(module)
        assert torch.equal(SD.run(pipe), controlled)
    assert torch.equal(SD.run(pipe), expected)

    second = [Counts(), Counts()]
    with attach(pipe, Scaled()):
        for module, hook in zip((pipe.unet, site), second, strict=True):
            add_hook_to_module(module, hook)
        assert torch.equal(SD.run(pipe), controlled)
        assert [hook.calls for hook in second] == [SD.steps, SD.steps]
    assert torch.equal(SD.run(pipe), expected)  # the hooks stay
    assert [hook.calls for hook in second] == [2 * SD.steps, 2 * SD.steps]
    for module in (pipe.unet, site):
        remove_hook_from_module(module)
    assert torch.equal(SD.run(pipe), expected)


@pytest.mark.parametrize("offload_first", [True, False])
def test_offloading_works_whichever_came_first(offload_first):
    from accelerate import cpu_offload_with_hook
    from accelerate.hooks import remove_hook_from_module

    pipe = SD.build()
    expected = SD.run(pipe)
    with attach(pipe, Scaled()):
        controlled = SD.run(pipe)
    if offload_first:
        cpu_offload_with_hook(pipe.unet, "cpu")
    with attach(pipe, Scaled()):
        if not offload_first:
            cpu_offload_with_hook(pipe.unet, "cpu")
        assert torch.equal(SD.run(pipe), controlled)
    assert torch.equal(SD.run(pipe), expected)
    assert hasattr(pipe.unet, "_hf_hook")
    remove_hook_from_module(pipe.unet)
    assert torch.equal(SD.run(pipe), expected)


@pytest.mark.parametrize("cache_first", [True, False])
def test_a_block_cache_computes_the_same_bits_whichever_came_first(cache_first):
    from diffusers import FirstBlockCacheConfig

    pipe = FLUX.build()
    steps = 6

    def run():
        return FLUX.run(pipe, num_inference_steps=steps)

    uncached = run()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    cached = run()
    if cache_first:
        pipe.transformer.disable_cache()
        assert torch.equal(run(), uncached)
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    else:
        pipe.transformer.disable_cache()
    with attach(pipe, nothing := Nothing()):
        if not cache_first:
            pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
        assert torch.equal(run(), cached)
    assert not torch.equal(cached, uncached)
    assert nothing.denoised == 2 * steps
    assert 2 * steps < nothing.attended < 2 * steps * len(FLUX.sites)  # the cache skipped blocks
    pipe.transformer.disable_cache()
    assert torch.equal(run(), uncached)


# What cannot be controlled -------------------------------------------------------------------------------------------


def test_a_control_without_sites_lists_those_of_the_model():
    class Joint:
        kinds = frozenset({"joint"})

        def attention(self, call, attend):
            return attend(call)

    pipe = SD.build()
    with untouched(pipe, lambda: SD.run(pipe)):
        with pytest.raises(ValueError, match=r"Joint acts on joint sites, and none is left.*self.*cross"):
            attach(pipe, Joint())
        with pytest.raises(ValueError, match=r"'nonsense'"):
            attach(pipe, Scaled(sites="nonsense"))
        with pytest.raises(ValueError, match=r"none is left.*self.*cross"):
            control = Scaled()
            control.sites = lambda sites: []
            attach(pipe, control)


def test_a_control_that_was_never_called_warns_on_a_clean_exit_only():
    pipe = SD.build()
    message = "Scaled was attached but never called: the denoiser did not run"
    with pytest.warns(UserWarning, match=message), attach(pipe, Scaled()):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Failed), attach(pipe, Scaled()):
            raise Failed
        with attach(pipe, Scaled()):
            SD.run(pipe)


@pytest.mark.parametrize("name", ["AttnProcessor", "XFormersAttnProcessor"])
def test_processors_that_hide_their_attention_are_refused_by_name(name):
    from diffusers.models import attention_processor

    processor = vars(attention_processor)[name]()
    pipe = SD.build()
    before = dict(pipe.unet.attn_processors)
    with untouched(pipe, lambda: SD.run(pipe)):
        pipe.unet.set_attn_processor(processor)
        with pytest.raises(ValueError, match=rf"cannot be seen under {name}\b.*(set|call)"):
            attach(pipe, Scaled())
        pipe.unet.set_attn_processor(dict(before))
        with attach(pipe, Scaled()):
            pipe.unet.set_attn_processor(processor)
            with pytest.raises(ValueError, match=rf"cannot be seen under {name}\b.*(set|call)"):
                SD.run(pipe)
            pipe.unet.set_attn_processor(dict(before))
            SD.run(pipe)


class ByHand:
    """A processor that diffusers does not know, whose attention is two matrix products."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None):
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (attn.head_to_batch_dim(x) for x in (
            attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source)))  # fmt: skip
        maps = torch.baddbmm(query.new_zeros(()), query, key.transpose(1, 2), beta=0, alpha=attn.scale).softmax(-1)
        return attn.to_out[1](attn.to_out[0](attn.batch_to_head_dim(maps @ value)))


def test_a_processor_that_turns_out_to_hide_its_attention_is_named():
    pipe = SD.build()
    pipe.unet.set_attn_processor(ByHand())
    message = r"down_blocks.*attn1 ran, but no attention operation was seen.*ByHand"
    with untouched(pipe, lambda: SD.run(pipe)), pytest.raises(RuntimeError, match=message), attach(pipe, Scaled()):
        SD.run(pipe)


def test_a_site_that_is_not_controlled_may_hide_its_attention():
    pipe = SD.build()
    processors = {
        name: ByHand() if name.endswith("attn1.processor") else processor
        for name, processor in pipe.unet.attn_processors.items()
    }
    pipe.unet.set_attn_processor(processors)
    control = Scaled()
    control.kinds = {"cross"}
    with untouched(pipe, lambda: SD.run(pipe)) as expected, attach(pipe, control):
        assert not torch.equal(SD.run(pipe), expected)


# Models --------------------------------------------------------------------------------------------------------------


def sana() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import SanaTransformer2DModel

    with tiny.seeded(0):
        model = SanaTransformer2DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2,
            num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=12,
            sample_size=4, mlp_ratio=1.0).eval()  # fmt: skip
        inputs = {
            "hidden_states": torch.randn(2, 4, 4, 4), "encoder_hidden_states": torch.randn(2, 5, 12),
            "timestep": torch.tensor([3, 3]),
        }  # fmt: skip
    return model, inputs


@torch.no_grad()
def test_linear_attention_is_never_among_the_sites():
    model, inputs = sana()
    expected = model(**inputs).sample
    kinds = Kinds()
    with pytest.warns(UserWarning, match="SanaTransformer2DModel"), attach(model, kinds) as run:
        run.at(0, 1)
        assert torch.equal(model(**inputs).sample, expected)
        assert [site.name for site in run.sites] == [f"transformer_blocks.{i}.attn2" for i in range(2)]
    assert kinds.seen == {f"transformer_blocks.{i}.attn2": [("cross", 0, 5)] for i in range(2)}
    assert torch.equal(model(**inputs).sample, expected)

    class Own:
        kinds = frozenset({"self"})

        def attention(self, call, attend):
            return attend(call)

    with pytest.raises(ValueError, match=r"Own acts on self sites.*2 layers of linear attention"):
        attach(model, Own())


def test_mochi_is_refused_with_the_reason():
    family = FAMILIES["mochi"]
    pipe = family.build()
    message = "MochiTransformer3DModel cannot be controlled: it runs one attention"
    with untouched(pipe, lambda: family.run(pipe)), pytest.raises(ValueError, match=message):
        attach(pipe, Nothing())


def test_a_model_that_is_in_no_row_says_what_was_assumed():
    class Segments(Nothing):
        needs = frozenset({"segments"})

    model, _ = sana()
    with pytest.warns(UserWarning, match="not in the table; assumed: .*'hidden_states'") as caught:
        run = attach(model, Nothing())
    assert caught[0].filename == __file__
    assert len(run.report().assumed) >= 3
    assert "assumed: " in str(run.report())
    run.close()
    with pytest.raises(ValueError, match=r"Segments needs segments, which unknown \(SanaTransformer2DModel\) lacks"):
        attach(model, Segments())
    assert "_attnctrl" not in vars(model)


# Backends ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def native_afterwards():
    yield
    from diffusers.models.attention_dispatch import AttentionBackendName

    Backends.set_active_backend(AttentionBackendName.NATIVE)


def kernels(run: Any) -> set[str]:
    return {name for site in run.report().sites for name in site.kernels}


@pytest.mark.parametrize("backend", ["_native_math", "flex"])
@pytest.mark.parametrize("set_first", [True, False])
def test_the_backend_set_on_a_model_computes_at_the_end_of_the_chain(backend, set_first, native_afterwards):
    pipe = FLUX.build()
    steps = {"num_inference_steps": 1}
    expected = FLUX.run(pipe, **steps)
    nothing = Nothing()
    if set_first:
        pipe.transformer.set_attention_backend(backend)
    with attach(pipe, nothing) as run:
        if not set_first:
            pipe.transformer.set_attention_backend(backend)
        result = FLUX.run(pipe, **steps)
        assert kernels(run) == {backend}
        assert backend in str(run.report())
    assert nothing.attended == 2 * len(FLUX.sites)
    assert torch.equal(FLUX.run(pipe, **steps), result)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
    pipe.transformer.set_attention_backend("native")
    with attach(pipe, Nothing()) as run:
        assert torch.equal(FLUX.run(pipe, **steps), expected)
        assert kernels(run) == {"native"}


def test_a_backend_chosen_by_a_context_reaches_the_chain(native_afterwards):
    from diffusers.models.attention_dispatch import attention_backend

    pipe = FLUX.build()
    with untouched(pipe, lambda: FLUX.run(pipe)) as expected:
        with attach(pipe, nothing := Nothing()) as run:
            with attention_backend("_native_math"):
                FLUX.run(pipe)
            assert kernels(run) == {"_native_math"}
            assert torch.equal(FLUX.run(pipe), expected)
            assert kernels(run) == {"_native_math", "native"}
        with attention_backend("_native_math"), attach(pipe, Nothing()) as run:
            FLUX.run(pipe)
        assert kernels(run) == {"_native_math"}
    assert nothing.attended == 2 * FLUX.steps * 2 * len(FLUX.sites)


def test_a_call_that_the_backend_cannot_run_is_computed_by_the_native_kernel_and_the_report_says_why(native_afterwards):
    class Wider:
        def attention(self, call, attend):
            return attend(call.replace(value=F.pad(call.value, (0, 4))))[..., : call.value.shape[-1]]

    pipe = FLUX.build()
    expected = FLUX.run(pipe)
    pipe.transformer.set_attention_backend("_native_math")
    with attach(pipe, Wider()) as run:
        result = FLUX.run(pipe)
    assert kernels(run) == {"native instead of _native_math: the value is not as wide as the query"}
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)


# Copies and imports --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_a_copy_of_a_hooked_denoiser_is_plain(name):
    import copy
    import pickle

    family = CONTROLLED[name]
    pipe, other = family.build(), family.build(seed=1)
    expected = family.run(pipe)
    model = denoisers(pipe)[0]
    fresh = [type(module) for module in model.modules()]
    with attach(pipe, Scaled()):
        controlled = family.run(pipe)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        scheduler = copy.deepcopy(pipe.scheduler)
        for copied in copies:
            assert [type(module) for module in copied.modules()] == fresh
            assert not any("_attnctrl_base" in vars(type(module)) for module in copied.modules())
            assert not any("_attnctrl" in vars(module) for module in copied.modules())
            setattr(other, family.denoisers[0], copied)
            assert torch.equal(family.run(other), expected)
        assert "_attnctrl" not in vars(scheduler) and "_attnctrl_base" not in vars(type(scheduler))
        assert torch.equal(family.run(pipe), controlled)


def test_a_hooked_denoiser_is_saved_as_its_own_class(tmp_path):
    from diffusers import UNet2DConditionModel

    pipe = SD.build()
    with attach(pipe, Scaled()):
        SD.run(pipe)
        assert isinstance(pipe.unet, UNet2DConditionModel)
        pipe.unet.save_pretrained(tmp_path)
    expected = SD.run(pipe)
    pipe.unet = UNet2DConditionModel.from_pretrained(tmp_path)
    assert torch.equal(SD.run(pipe), expected)


def test_importing_changes_nothing():
    import subprocess
    import sys

    code = """if True:
        import torch, diffusers, torch.nn.functional as F
        from diffusers import UNet2DConditionModel, StableDiffusionPipeline, DDIMScheduler
        from diffusers.models.attention_processor import Attention
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry as B
        owners = [torch.nn.Module, UNet2DConditionModel, StableDiffusionPipeline, DDIMScheduler, Attention, F]
        before = F.scaled_dot_product_attention, dict(B._backends), [dict(vars(owner)) for owner in owners]
        import attnctrl
        after = F.scaled_dot_product_attention, dict(B._backends), [dict(vars(owner)) for owner in owners]
        assert before == after
        print("same")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "same", done.stderr


# torch.compile -------------------------------------------------------------------------------------------------------


class PerStep:
    """Its factor depends on the step, and is set before the denoiser runs."""

    def begin(self, call):
        self.factor = torch.tensor(0.5 + 0.25 * call.step.index)

    def attention(self, call, attend):
        return attend(call) * self.factor


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    yield lambda: dynamo.utils.counters["stats"]["unique_graphs"]
    assert not dynamo.utils.counters["graph_break"]
    dynamo.reset()


def shallow_flux() -> Any:
    """One double and one single block: what takes time is tracing."""
    from diffusers import FluxTransformer2DModel

    pipe = FLUX.build()
    with tiny.seeded(0):
        pipe.transformer = FluxTransformer2DModel.from_config(
            {**pipe.transformer.config, "num_layers": 1, "num_single_layers": 1}
        ).eval()
    return pipe


COMPILE: dict[str, Any] = {"backend": "eager", "fullgraph": True}
HOW: dict[str, Callable[[Any], Any]] = {
    "module.compile": lambda pipe: pipe.transformer.compile(**COMPILE),
    "torch.compile": lambda pipe: setattr(pipe, "transformer", torch.compile(pipe.transformer, **COMPILE)),
    "compile_repeated_blocks": lambda pipe: pipe.transformer.compile_repeated_blocks(**COMPILE),
}


@pytest.mark.parametrize("how, compiled_first", [*((how, False) for how in HOW), ("module.compile", True)])
def test_compiled_models_compute_the_same_with_graphs_that_do_not_grow(how, compiled_first, graphs):
    pipe = shallow_flux()

    def run(steps=3):
        return FLUX.run(pipe, cfg=False, num_inference_steps=steps)

    expected = run()
    with attach(pipe, PerStep()):
        controlled = run()
    assert not torch.equal(controlled, expected)
    if compiled_first:
        HOW[how](pipe)
        assert torch.equal(run(), expected)
    with attach(pipe, PerStep()) as handle:
        if not compiled_first:
            HOW[how](pipe)
        assert torch.equal(run(), controlled)
        traced = graphs()
        assert traced > 0
        run(6)
        assert graphs() == traced
        assert all(site.compiled and site.calls == 0 for site in handle.report().sites)
        assert len(handle.report().sites) == 2
    assert torch.equal(run(), expected)
    assert "_attnctrl" not in vars(pipe.transformer)
    model = getattr(pipe.transformer, "_orig_mod", pipe.transformer)
    assert not any("_attnctrl" in vars(module) for module in model.modules())
    assert not any("_attnctrl_base" in vars(type(module)) for module in (pipe.transformer, *model.modules()))
