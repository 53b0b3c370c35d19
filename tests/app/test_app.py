"""The app without a browser: what a run yields and refuses, cancelling, the form, the page, the command."""

import importlib.util
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tiny import build_flux, build_sd

gr = pytest.importorskip("gradio", reason="the app needs gradio: pip install attnctrl[app]")

from attnctrl.pipelines import PromptToPromptPipeline, ReadyPipeline  # noqa: E402

ROOT = Path(__file__).parents[2]
SOURCE, EDITED = "a red cat on a table", "a red dog on a table"


@pytest.fixture(scope="module")
def app():
    spec = importlib.util.spec_from_file_location("app", ROOT / "app.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["app"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["app"]


@pytest.fixture(scope="module")
def loaded():
    flux = build_flux(with_text=True)
    size = {"height": 64, "width": 64}
    return {
        "tiny": ReadyPipeline(build_sd(with_text=True), size),
        "tiny flux": ReadyPipeline(flux, {**size, "max_sequence_length": 16}),
    }


@pytest.fixture
def models(app, loaded, monkeypatch):
    """The app's models, with two tiny pipelines that are loaded under their names."""
    real = ReadyPipeline.from_pretrained.__func__

    def from_pretrained(cls, name="unet", **kwargs):
        return cls.from_pipe(loaded[name]) if name in loaded else real(cls, name, **kwargs)

    monkeypatch.setattr(ReadyPipeline, "from_pretrained", classmethod(from_pretrained))
    return app.Models()


@pytest.fixture
def settings(app):
    return lambda **changes: app.Settings(
        **{"prompt": SOURCE, "edited": EDITED, "model": "tiny", "steps": 3, **changes}
    )


def finish(run):
    *progress, result = run
    return progress, result


def pixels(image):
    return list(image.convert("RGB").getdata())


def classes(ready):
    """What attaching changes: the classes of the denoiser and of its attention modules, as ids since hooked ones pass
    for their own."""
    return [id(type(module)) for module in ready.pipe.unet.modules()]


def plain(ready):
    """The bits an untouched pipeline makes."""
    call = {"num_inference_steps": 2, "output_type": "latent", **ready.defaults}
    return ready.pipe("a red cat", generator=torch.Generator().manual_seed(0), **call).images


# ----------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("model", ["tiny", "tiny flux"])
def test_a_run_tells_each_step_shows_a_preview_and_ends_with_the_pictures(app, models, settings, model):
    progress, result = finish(app.edit(models, settings(model=model, blend=True, images=2)))
    steps = [news for news in progress if news.total]
    assert [(news.step, news.total) for news in steps] == [(1, 3), (2, 3), (3, 3)]
    previews = [news.preview for news in steps if news.preview]
    assert previews and all(len(pair) == 2 and pair[0].size == (64, 64) for pair in previews)
    assert len(result.source) == len(result.edit) == len(result.masks) == 2
    assert "PromptToPrompt" in result.report and "LocalBlend" in result.report


def test_a_run_is_the_pipeline_call_that_its_code_spells_out(app, models, settings, loaded, tmp_path, monkeypatch):
    chosen = (["cat"], ["dog", "table"])
    _, result = finish(
        app.edit(models, settings(strengths={"red": -1.5}, blend=chosen, seed=5, edit="replace", images=2))
    )
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(result.code, names)
    again = names["result"]
    assert [pixels(image) for image in again.images] == [pixels(image) for image in result.edit]
    assert [pixels(image) for image in again.source] == [pixels(image) for image in result.source]
    assert [pixels(image) for image in again.masks] == [pixels(image) for image in result.masks]
    assert {path.name for path in tmp_path.iterdir()} == {"source.png", "edit.png", "mask.png"}
    other = PromptToPromptPipeline.from_pipe(loaded["tiny"])(SOURCE, EDITED, num_inference_steps=3)
    assert pixels(other.images[0]) != pixels(result.edit[0])


def test_previews_do_not_change_the_picture(app, models, settings, monkeypatch):
    _, shown = finish(app.edit(models, settings()))
    monkeypatch.setattr(app, "preview", lambda ready, latents: None)
    _, hidden = finish(app.edit(models, settings()))
    assert pixels(shown.edit[0]) == pixels(hidden.edit[0])


@pytest.mark.parametrize("how", ["close", "stop"])
def test_a_cancelled_run_leaves_the_pipeline_as_it_was(app, models, settings, loaded, how):
    ready = loaded["tiny"]
    before, untouched = plain(ready), classes(ready)
    stop = threading.Event()
    run = app.edit(models, settings(steps=20), stop)
    next(news for news in run if news.step == 2)
    attached = classes(ready)
    if how == "close":
        run.close()
    else:
        stop.set()
        with pytest.raises(app.Cancelled):
            list(run)
    assert attached != untouched and classes(ready) == untouched
    assert torch.equal(plain(ready), before)
    assert models._lock.acquire(blocking=False)
    models._lock.release()
    finish(app.edit(models, settings()))


def test_a_run_that_fails_leaves_the_pipeline_as_it_was(app, models, settings, loaded, monkeypatch, caplog):
    before = plain(loaded["tiny"])
    with monkeypatch.context() as patch:
        patch.setattr(app, "preview", lambda ready, latents: 1 / 0)
        with pytest.raises(app.Problem, match=r"run failed.*ZeroDivisionError"):
            list(app.edit(models, settings()))
    assert torch.equal(plain(loaded["tiny"]), before)


def test_runs_of_two_users_take_turns_and_each_gets_its_own_pictures(app, models, settings):
    alone = [finish(app.edit(models, settings(seed=seed)))[1] for seed in (1, 2)]
    first = app.edit(models, settings(seed=1))
    next(first)
    second = app.edit(models, settings(seed=2))
    assert next(second).text == "Waiting for another run to end"
    together = [finish(first)[1], finish(second)[1]]
    assert [pixels(run.edit[0]) for run in together] == [pixels(run.edit[0]) for run in alone]


def test_a_model_is_loaded_once_and_the_oldest_of_others_is_forgotten(app, models, settings):
    first, _ = finish(app.edit(models, settings()))
    again, _ = finish(app.edit(models, settings()))
    assert first[0].text == "Loading tiny" and all(news.text.startswith("Step") for news in again)
    finish(app.edit(models, settings(model="tiny flux")))
    assert list(models._loaded) == ["tiny flux"]


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": " "}, "source prompt is empty"),
        ({"edited": ""}, "edited prompt is empty"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"seed": 1.5}, "not 1.5"),
        ({"seed": None}, "not None"),
        ({"seed": 2**63}, "seed must be"),
        ({"steps": 0}, "Steps must be"),
        ({"images": 99}, "number of images must be from 1 to"),
        ({"edit": "replace", "edited": "a dog"}, "equally many words, not 6 and 2"),
        ({"edited": SOURCE, "blend": True}, "prompts are the same"),
        ({"blend": ([], [])}, "No words to blend"),
        ({"blend": (["cat"], ["zebra"])}, "zebra.*has the words a, red, dog"),
        ({"strengths": {"zebra": 2.0}}, "zebra.*has the words a, red, dog"),
        ({"model": "no such/folder or/model"}, "could not be loaded. Give a folder"),
        ({"cross": 1.5}, "A window is a fraction"),
    ],
)
def test_settings_that_do_not_fit_are_a_message_that_says_what_to_do(
    app, models, settings, changes, message, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(app.Problem, match=message) as problem:
        list(app.edit(models, settings(**changes)))
    assert "Traceback" not in str(problem.value) and len(str(problem.value)) < 500


def test_a_server_for_others_lends_only_its_own_models(app, models, settings):
    models.only = frozenset({"unet", "mmdit"})
    with pytest.raises(app.Problem, match="has mmdit, unet"):
        list(app.edit(models, settings()))


def test_the_page_shows_a_problem_as_a_message_without_a_trace(app, models):
    form = {**app.DEFAULTS, "prompt": "", "other": "tiny"}
    with pytest.raises(gr.Error, match="source prompt is empty") as error:
        list(app.show(models, form, {}, "user"))
    assert not error.value.print_exception


# ------------------------------------------------------------------------------------------------------------- the form


def test_words_of_a_prompt_carry_no_punctuation_and_number_their_repeats(app):
    assert app.words_of("A cat, a dog & the cat's  hat, a cat.") == {
        "A": "A",
        "cat": ("cat", 0),
        "a": ("a", 0),
        "dog": "dog",
        "the": "the",
        "cat's": "cat's",
        "hat": "hat",
        "a (2)": ("a", 1),
        "cat (2)": ("cat", 1),
    }
    assert app.words_of("") == {}


def test_the_form_becomes_settings(app):
    form = {**app.DEFAULTS, "edited": "a cat and a hat", "seed": 4.0, "other": " folder "}
    form |= {"strengths": {"a (2)": 2.0, "hat": 1, "gone": 3.0}, "blend": "Chosen words"}
    form |= {"blend_source": ["circle"], "blend_edited": ["a (2)", "typed"]}
    made = app.settings_from(form)
    assert made.strengths == {("a", 1): 2.0}
    assert made.blend == (["circle"], [("a", 1), "typed"])
    assert (made.seed, made.model, made.edit) == (4, "folder", "auto")
    assert app.settings_from({**form, "blend": "Off"}).blend is False
    assert app.settings_from({**form, "blend": "Words that differ"}).blend is True


def test_every_example_fills_the_form_with_settings_that_pass(app):
    names = list(app.DEFAULTS)
    for index, (_, example) in enumerate(app.EXAMPLES):
        *values, refreshed = app.fill(names, index, 7)
        form = dict(zip(names, values, strict=True))
        assert refreshed == 8 and form["prompt"] == example["prompt"]
        for name in ("blend_source", "blend_edited"):
            assert set(form[name]["value"]) <= set(form[name]["choices"])
            form[name] = form[name]["value"]
        made = app.settings_from(form)
        made.check()
        assert app.unknown_words(made.model, made.prompt, made.edited) == []


def test_words_that_a_demo_model_was_never_shown_are_named(app):
    assert app.unknown_words("unet", "a red zebra", "a red Zebra, striped") == ["zebra"]
    assert app.unknown_words("owner/name", "a red zebra") == []


def test_the_page_gets_progress_and_then_pictures_report_and_code(app, models):
    running = {}
    form = {**app.DEFAULTS, "prompt": SOURCE, "edited": EDITED, "other": "tiny", "steps": 3}
    *progress, last = app.show(models, form, running, "user")
    assert any(status.startswith("Step 2 of 3 ▰") for status, *_ in progress)
    status, pictures, report, code = last
    assert status.startswith("Done in") and "PromptToPrompt" in report and "from_pretrained('tiny')" in code
    assert [name for _, name in pictures] == ["source", "edit", "mask"]
    assert min(pictures[0][0].size) >= 256 and running == {}


def test_cancel_stops_the_run_of_that_user_only(app, models):
    running = {}
    form = {**app.DEFAULTS, "prompt": SOURCE, "edited": EDITED, "other": "tiny", "steps": 20}
    shown = app.show(models, form, running, "user")
    next(news for news in shown if news[0].startswith("Step"))
    assert app.stop_run(running, "other") == "No run of yours is going on."
    assert app.stop_run(running, "user") == "Cancelled."
    *_, last = shown
    assert last[0] == "Cancelled." and running == {}


def test_guidance_goes_where_the_pipeline_takes_it(app, loaded):
    assert app.guidance_name(loaded["tiny"]) == "guidance_scale"
    assert app.guidance_name(loaded["tiny flux"]) == "guidance_scale"
    assert app.guidance_name(ReadyPipeline(loaded["tiny flux"].pipe, {"true_cfg_scale": 4.0})) == "true_cfg_scale"


# ----------------------------------------------------------------------------------------------------- page and command


def test_the_page_builds_without_the_network(app, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the page asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    page = app.build()
    labels = {getattr(block, "label", None) for block in page.blocks.values()}
    assert {"Edit by prompt", "Source prompt", "Edited prompt", "Demo model", "Seed"} <= labels
    assert page.analytics_enabled is False
    assert "http" not in "".join(app.theme()._stylesheets)


def test_runs_share_one_place_in_the_queue(app):
    runs = [fn for fn in app.build().fns.values() if fn.concurrency_id == "model"]
    assert len(runs) == 2 and all(fn.concurrency_limit == 1 for fn in runs)


def test_the_command_explains_itself():
    def call(*arguments):
        return subprocess.run([sys.executable, ROOT / "app.py", *arguments], capture_output=True, text=True, timeout=60)

    shown = call("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in ("--model", "--dtype", "--offload", "--host", "--port", "--share"))
    assert "default: 127.0.0.1" in shown.stdout


def test_the_command_listens_on_localhost_and_lends_any_model_there_only(app, monkeypatch):
    launched = []
    monkeypatch.setattr(gr.Blocks, "launch", lambda page, **options: launched.append(options))
    made = []
    monkeypatch.setattr(app, "build", lambda models, model: made.append(models) or gr.Blocks())
    for arguments in ([], ["--share"], ["--host", "0.0.0.0", "--model", "mine"], ["--dtype", "float16"]):
        app.main(arguments)
    assert [options["server_name"] for options in launched] == ["127.0.0.1", "127.0.0.1", "0.0.0.0", "127.0.0.1"]
    assert [options["share"] for options in launched] == [False, True, False, False]
    assert [models.only for models in made] == [None, {"unet", "mmdit"}, {"unet", "mmdit", "mine"}, None]
    assert made[3].dtype == torch.float16
    with pytest.raises(SystemExit):
        app.main(["--dtype", "float65"])
