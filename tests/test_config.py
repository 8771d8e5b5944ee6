"""Recipes and bad input: every recipe resolves, and a value that cannot work is one line before anything compiles."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from configs import bfcl, quickstart, toolbox
from seal_jax import main
from seal_jax.assembly import (
    balanced,
    build_mesh,
    build_suite,
    check_prompts,
    check_settings,
    cued_tasks,
    interface_settings,
    learner_settings,
    split_tasks,
)
from seal_jax.chat.formats import get_format
from seal_jax.checkpoints import drop_workdir
from seal_jax.config import default_config, validate
from seal_jax.envs.base import make_suite
from seal_jax.interface import Interface, InterfaceSettings
from seal_jax.run import Run
from seal_jax.types import Call, CallResult

ROOT = Path(__file__).parents[1]


def test_every_recipe_is_valid():
    validate(default_config())
    for setting in (*quickstart.METHODS, "scratch"):
        validate(quickstart.get_config(setting))
    for setting in (*toolbox.ARMS, *toolbox.STARTS):
        validate(toolbox.get_config(setting))
    for backbone in bfcl.BACKBONES:
        config = bfcl.get_config(backbone)
        if backbone == "smollm2_135m":
            with pytest.raises(ValueError, match="config.policy.path is empty"):
                validate(config)
            config.policy.path = "model.gguf"
        validate(config)


def test_arguments_of_recipes_are_checked():
    with pytest.raises(ValueError, match="configs/toolbox.py:fulll is not known; choose one of"):
        toolbox.get_config("fulll")
    with pytest.raises(ValueError, match="configs/bfcl.py:x is not known; choose one of"):
        bfcl.get_config("x")


def check_refused(changes, message):
    """The default config with these changes is refused, in one line that says so."""
    config = default_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message) as error:
        validate(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("rounds", -1, "config.rounds=-1: must be at least 0"),
        ("rollouts", 1, "config.rollouts=1: a group advantage needs at least 2"),
        ("temperature", 0.0, "config.temperature=0.0"),
        ("chat", "tinny", "config.chat='tinny' is not known; choose one of"),
        ("policy.source", "hf", "config.policy.path is empty"),
        ("policy.compute_dtype", "float16", "config.policy.compute_dtype='float16' is not known"),
        ("policy.lora_rank", -1, "config.policy.lora_rank=-1: must be at least 0"),
        ("policy.lora_alpha", 0.0, "config.policy.lora_alpha=0.0 must be above 0"),
        ("interface.exposure", 1.5, "config.interface.exposure=1.5 is a share"),
        ("interface.profile_rate", -1.0, "config.interface.profile_rate=-1.0 is the new round's share"),
        ("interface.profile_rate", 5.0, "config.interface.profile_rate=5.0 is the new round's share"),
        ("reward", "progres", "config.reward='progres' is not known; choose one of"),
        ("interface.anneal_rounds", -1, "config.interface.anneal_rounds=-1: must be at least 0"),
        ("loss.reweight", "papr", "config.loss.reweight='papr' is not known"),
        ("eval.cued", ("missing_call",), r"config.eval.cued=\('missing_call',\) must name some of the failure labels"),
        ("eval.cued", ("pass",), r"config.eval.cued=\('pass',\) must name some of the failure labels"),
        ("eval.cued_tasks", -2, "config.eval.cued_tasks=-2: must be at least -1"),
        ("eval.cued", ("state_mismatch",) * 2, "config.eval.cued=.* each once"),
        ("interface.exposure", 0.01, "config.interface.exposure=0.01 of 8 rollouts is 0 cued rows"),
        ("interface.exposure", 0.99, "config.interface.exposure=0.99 of 8 rollouts is 8 cued rows"),
        ("interface.placement", "inline", "cannot be met; set exposure=1.0 or placement='note'"),
        ("interface.components", ("cap", "nap"), r"config.interface.components holds \['nap'\]"),
        ("buckets.suffix", (256, 128), "must be positive and ascending"),
        ("eval.every", 2, "config.eval.every=2 validates on val, but config.eval.val=0"),
        ("eval.every", -1, "config.eval.every=-1: must be at least 0"),
        ("eval.test", -2, "config.eval.test=-2: must be at least -1"),
        ("rounds", 0, "config.rounds=0 and no split is evaluated: nothing to do"),
        ("checkpoint.every", 0, "config.checkpoint.every=0: must be at least 1"),
        ("checkpoint.keep", 0, "config.checkpoint.keep=0: must be at least 1"),
        ("learner.minibatches", 0, "config.learner.minibatches=0: must be at least 1"),
        ("learner.minibatches", 3, "config.tasks_per_round=16 is not divisible by config.learner.minibatches=3"),
    ],
)
def test_values_that_cannot_work(key, value, message):
    check_refused({key: value}, message)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"buckets.suffix": (48,)},
            r"config.buckets.suffix\[-1\]=48 must be larger than config.limits.max_new_tokens=48",
        ),
        ({"buckets.chunk": (16, 1024)}, r"config.buckets.chunk\[-1\]=1024 is larger than .*suffix\[-1\]=512"),
        (
            {"warm_start.enabled": True, "policy.source": "gguf", "policy.path": "x"},
            "config.warm_start.enabled=True trains random weights or a folder's, but config.policy.source='gguf'",
        ),
        *(
            (
                {"loss.shuffle_labels": True, "loss.reweight": reweight},
                f"config.loss.shuffle_labels=True is for .* config.loss.reweight='{reweight}'; set config",
            )
            for reweight in ("none", "release", "turn")
        ),
        (
            {"interface.anneal_rounds": 4, "interface.exposure": 1.0, "interface.placement": "inline"},
            "config.interface.placement='inline' puts cues .* config.interface.anneal_rounds=4; set anneal_rounds=0",
        ),
        ({"rounds": 0, "eval.test": 4, "eval.before": False}, "config.rounds=0 and config.eval.before=False: nothing"),
        ({"warm_start.enabled": True, "warm_start.demos": 0}, "config.warm_start.demos=0: must be at least 1"),
    ],
)
def test_settings_that_do_not_fit_together(changes, message):
    check_refused(changes, message)


def test_every_part_of_a_schema_cue_can_be_chosen():
    parameters = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}
    doc = {"name": "send", "description": "send it", "parameters": parameters}
    config = default_config()
    assert interface_settings(config) == InterfaceSettings()
    config.interface.placement, config.interface.schema_parts = "inline", ("required",)
    config.interface.exposure = 1.0
    validate(config)
    shown = json.dumps(Interface(("argument_mismatch",), interface_settings(config)).inline([doc]))
    assert "[required]" in shown
    config.interface.schema_parts = ("type",)
    assert "[required]" not in json.dumps(Interface(("argument_mismatch",), interface_settings(config)).inline([doc]))
    config.interface.schema_parts = ("requird",)
    with pytest.raises(ValueError, match="interface.schema_parts holds 'requird'"):
        check_settings(config)


def test_a_cued_evaluation_may_have_a_part_of_test():
    config = toolbox.get_config("half")
    test = split_tasks(config, build_suite(config), "test")
    some = cued_tasks(config, test)
    assert len(some) == 100 and {t.id for t in some} < {t.id for t in test}
    assert set(Counter(t.category for t in some).values()) == {25}
    with pytest.raises(ValueError, match="config.eval.cued_tasks=100 but 40 test tasks are evaluated; lower"):
        cued_tasks(config, test[:40])
    config.eval.cued_tasks = -1
    assert cued_tasks(config, test[:40]) == test[:40]
    config.eval.cued = ()
    assert cued_tasks(config, test) == ()


def test_a_cued_evaluation_shows_the_same_whatever_the_run_trains_with():
    def shown(arm):
        return Run.shown_in_cued_evaluation.fget(SimpleNamespace(config=toolbox.get_config(arm)))

    arms = [shown(arm) for arm in toolbox.ARMS]
    assert all(interface == arms[0] for interface in arms)
    refused = CallResult(Call("add"), "", "tool_error")
    assert arms[0].feedback(refused, ()) and arms[0].note(())


@pytest.mark.parametrize(
    "protocols, message",
    [
        ((), r"config.eval.protocols=\(\) must name one or more of \('seal', 'official'\)"),
        (("seal", "seal"), "must name one or more of .*, each once"),
        (("paper",), r"config.eval.protocols=\('paper',\) must name one"),
        (
            ("seal", "official"),
            "only suite 'bfcl' has an official protocol, and config.suite='toolbox'; set config.eval",
        ),
    ],
)
def test_protocols_that_cannot_be_played(protocols, message):
    check_refused({"eval.protocols": protocols}, message)


def test_the_official_protocol_needs_a_format_that_its_package_has():
    check_refused({"suite": "bfcl", "eval.protocols": ("official",)}, "no handler for config.chat='tiny'")


def test_an_empty_split_is_named():
    config = default_config()
    config.suite_options.test, config.eval.test = 0, -1
    with pytest.raises(
        ValueError, match="config.eval.test=-1 but the suite has no task in split 'test'.*suite_options"
    ):
        split_tasks(config, build_suite(config), "test")


@pytest.fixture(scope="module")
def toolbox_suite():
    return build_suite(default_config())


@pytest.mark.parametrize("split, size", [("test", 400), ("ood", 200), ("val", 100)])
@pytest.mark.parametrize("wanted", [1, 3, 4, 8, 20, 40, 50, 80, 100])
def test_a_part_of_a_split_holds_every_category_alike(toolbox_suite, split, size, wanted):
    config, suite = default_config(), toolbox_suite
    config.eval[split] = wanted
    tasks = split_tasks(config, suite, split)
    counts = Counter(t.category for t in tasks)
    assert len({t.id for t in tasks}) == wanted and max(counts.values()) - min(counts.values()) <= 1
    assert len(counts) == min(4, wanted) and len(suite.tasks(split)) == size
    if wanted >= 40 and wanted < size:  # spread over the split's domains too
        assert {d for t in tasks for d in t.domains} == {d for t in suite.tasks(split) for d in t.domains}


def test_a_part_larger_than_a_category_takes_the_rest_from_the_others():
    tasks = [SimpleNamespace(category=c, domains=("x",), scenario=i, i=i) for i, c in enumerate("aaaaabb")]
    assert [t.i for t in balanced(tasks, 6)] == [0, 1, 2, 3, 5, 6]
    assert balanced(tasks, 7) == tasks


def test_a_part_takes_as_many_scenarios_as_it_can():
    config = toolbox.get_config("vanilla")
    suite = build_suite(config)
    for split, n in (("test", 400), ("val", 100), ("ood", 100)):
        tasks = split_tasks(config, suite, split)
        assert len({t.scenario for t in tasks}) == len(tasks) == n
        assert set(Counter(t.category for t in tasks).values()) == {n // 4}
        places = Counter((t.category, t.domains) for t in tasks)
        assert max(places.values()) - min(places.values()) <= 1
    some = cued_tasks(config, split_tasks(config, suite, "test"))
    assert len({t.scenario for t in some}) == 100


def test_a_suffix_without_room_for_a_message_is_refused():
    config, chat = default_config(), get_format("tiny")
    config.buckets.suffix, config.buckets.chunk = (49,), (16,)
    validate(config)
    with pytest.raises(ValueError, match=r"config.buckets.suffix\[-1\]=49 .* 2 tokens of template"):
        check_prompts(config, [], short_collector(chat))


def short_collector(chat, context=4096, tokens=2):
    """What `check_prompts` reads of a collector, with a tokenizer that makes `tokens` of everything."""
    tokenizer = SimpleNamespace(encode=lambda text: [0] * tokens)
    return SimpleNamespace(chat=chat, tokenizer=tokenizer, limits=SimpleNamespace(max_context=context))


def test_a_prompt_that_fills_the_context_is_refused():
    config, chat = default_config(), get_format("tiny")
    task = build_suite(config).tasks("val")[0]
    assert check_prompts(config, [task], short_collector(chat, context=5)) == 2
    with pytest.raises(ValueError, match="has 2 tokens and leaves no room for an answer in the policy's context of 4"):
        check_prompts(config, [task], short_collector(chat, context=4))


def test_stripping_needs_bare_and_cued_rows():
    config = default_config()
    config.interface.strip_in_update, config.interface.exposure = True, 1.0
    with pytest.raises(ValueError, match="needs bare and cued rows in each group"):
        validate(config)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"loss.clip_low": 1.5}, "loss.clip_low=1.5"),
        ({"loss.w_min": 3.0}, "loss.w_min=3.0"),
        ({"loss.utility": {"passs": 1.0}}, r"config.loss.utility\['passs'\]: no such label"),
        ({"optimizer.learning_rate": -1.0}, "optimizer.learning_rate=-1.0"),
        ({"optimizer.learning_rate": 1e300}, r"config.optimizer.learning_rate=1e\+300 must be at most 1"),
        ({"optimizer.b1": 1.0}, "config.optimizer.b1=1.0 must be at least 0 and below 1"),
        ({"optimizer.b2": 1.5}, "config.optimizer.b2=1.5 must be at least 0 and below 1"),
        ({"optimizer.warmup_steps": -1}, "config.optimizer.warmup_steps=-1 must be at least 0"),
        ({"optimizer.schedule": "linear"}, "optimizer.schedule='linear'"),
        (
            {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 40},
            "optimizer.warmup_steps=40 leaves nothing of a cosine over all 40 steps",
        ),
        ({"learner.prompts_per_micro": 0}, "learner.prompts_per_micro=0"),
        ({"warm_start.enabled": True, "warm_start.epochs": 0}, "config.warm_start.epochs=0 must be at least 1"),
        ({"limits.max_new_tokens": 0}, "config.limits.max_new_tokens=0 must be at least 1"),
        ({"limits.max_steps": 0}, "config.limits.max_steps=0 must be at least 1"),
        ({"interface.max_cues": -1}, "max_cues=-1"),
    ],
)
def test_bad_settings_of_the_parts_are_refused_before_the_policy_is_made(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr("seal_jax.assembly.starting_policy", lambda *_: pytest.fail("the policy was made"))
    config = default_config()
    for key, value in changes.items():
        config.update_from_flattened_dict({key: value})
    validate(config)
    with pytest.raises(ValueError, match=message) as error:
        Run(config, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_start_that_is_refused_leaves_no_workdir_that_it_made(tmp_path, monkeypatch):
    def refuse(*_):
        raise ValueError("bad weights")

    monkeypatch.setattr("seal_jax.assembly.starting_policy", refuse)
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with pytest.raises(ValueError, match="bad weights"):
            Run(default_config(), tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_a_start_that_fails_late_keeps_its_starting_policy(tmp_path):
    for path in ("run/config.json", "run/.lock", "run/start/model", "run/checkpoints/x"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "run/checkpoints/x").unlink()
    drop_workdir(tmp_path / "run")
    assert (tmp_path / "run/config.json").exists() and (tmp_path / "run/start/model").exists()


def test_a_cosine_ends_with_the_run():
    config = default_config()
    config.optimizer.schedule, config.rounds, config.learner.minibatches = "cosine", 5, 2
    assert learner_settings(config)["optimizer"].total_steps == 10
    config.rounds, config.eval.test = 0, -1
    learner_settings(config)  # a run that only evaluates takes no step


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mesh.data": 2, "buckets.groups": (2, 4)}, "config.learner.prompts_per_micro=1 .*multiple of 2"),
        (
            {"mesh.fsdp": -1, "learner.prompts_per_micro": 8},
            r"config.buckets.groups=\(1, 2, 4, 8, 16\) .*multiples of 8",
        ),
        ({"mesh.fsdp": 3}, "config.learner.prompts_per_micro=1 .*multiple of 3"),
        ({"mesh.fsdp": 9}, r"config.mesh=\(1, 9, 1\) needs 9 devices but there are 8"),
    ],
)
def test_sizes_that_do_not_divide_over_the_devices(changes, message):
    config = default_config()
    config.update_from_flattened_dict(changes)
    validate(config)
    with pytest.raises(ValueError, match=message) as error:
        build_mesh(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_accelerator_recipes_fit_any_usual_number_of_devices(devices):
    for backbone in ("qwen25_3b", "qwen25_7b", "toolace2_8b"):
        config = bfcl.get_config(backbone)
        config.mesh.fsdp = devices
        mesh = build_mesh(config)
        assert (1 if mesh is None else mesh.shape["fsdp"]) == devices


@pytest.mark.parametrize("mesh", [{}, {"mesh.fsdp": 4}])
def test_several_processes_need_a_mesh_of_all_their_devices(monkeypatch, mesh):
    monkeypatch.setattr("jax.process_count", lambda: 4)
    config = default_config()
    config.update_from_flattened_dict({"learner.prompts_per_micro": 4, **mesh})
    with pytest.raises(ValueError, match="of the 8 devices of 4 processes; .* set config.mesh.data=-1 or config.mesh"):
        build_mesh(config)


def test_tasks_that_cannot_be_halved_do_not_overlap():
    config = default_config()
    config.overlap_environment = True
    check_settings(config)  # 16 tasks, 2 x 8
    config.buckets.groups = (4, 16)
    with pytest.raises(ValueError, match=r"groups=\(4, 16\) cannot hold 16 tasks as two halves .* add 8 to it"):
        check_settings(config)


def test_dynamic_weights_take_no_utility():
    config = default_config()
    config.loss.reweight, config.loss.utility = "release", {"pass": 0.5}
    with pytest.raises(ValueError, match="config.loss.utility has no effect with config.loss.reweight='release'"):
        validate(config)


def test_the_config_is_locked_except_for_its_open_mappings():
    config = default_config()
    for place in (config, config.buckets, config.warm_start.habits):
        with pytest.raises(AttributeError):
            place.learning_rate = 1.0
    config.suite_options.train = 2
    config.policy.overrides = {"d_model": 16}
    config.loss.utility["pass"] = 0.5
    validate(config)


def test_a_mapping_that_a_recipe_replaces_is_checked():
    config = default_config()
    config.mesh = ConfigDict({"data": 1, "fspd": 1, "tensor": 1})
    with pytest.raises(ValueError, match="config.mesh.fsdp is missing|config.mesh.fspd is not known") as error:
        validate(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("buckets.prompt", ("a",), r"config.buckets.prompt=\('a',\) must hold int only"),
        ("buckets.chunk", (1.5,), r"config.buckets.chunk=\(1.5,\) must hold int only"),
        ("buckets.suffix", None, "config.buckets.suffix=None must be of type tuple"),
        ("interface.pinned", (3,), r"config.interface.pinned=\(3,\) must hold str only"),
        ("rounds", None, "config.rounds=None must be of type int"),
        ("optimizer.learning_rate", float("inf"), "config.optimizer.learning_rate=inf is not a finite number"),
        ("loss.dual_clip", float("nan"), "config.loss.dual_clip=nan is not a finite number"),
        ("loss.w_max", float("inf"), "config.loss.w_max=inf is not a finite number"),
        ("temperature", float("inf"), "config.temperature=inf is not a finite number"),
        ("loss.utility", {"pass": float("nan")}, "config.loss.utility.pass=nan is not a finite number"),
    ],
)
def test_wrong_types_and_numbers_that_are_not_finite(key, value, message):
    check_refused({key: value}, message)


def run_main(*args):
    command = [sys.executable, "-m", "seal_jax.main", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--config.loss.clip=0.1", "unknown setting config.loss.clip; did you mean config.loss.clip_low?"),
        ("--rounds=3", "unknown flag --rounds; did you mean --config.rounds?"),
        ("--config.loss.utility.pass=2", "entries of config.loss.utility that the recipe has not are set in a recipe"),
        ("--config.rollouts=1", "config.rollouts=1"),
    ],
)
def test_the_command_line_answers_in_one_line(tmp_path, flag, message):
    done = run_main("--config=configs/quickstart.py", f"--workdir={tmp_path / 'run'}", flag)
    last = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(last) == 1 and last[0].startswith("error: ") and message in last[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--config.round=2", "unknown setting config.round; did you mean config.rounds?"),
        ("--config.seed.x=2", "unknown setting config.seed.x; did you mean config.seed?"),
        ("--config.qqqqqq=2", "unknown setting config.qqqqqq"),
        ("--config.interface.activate.pass=0.1", "config.interface.activate.pass is no flag: entries of config.inter"),
        ("--config.rounds=2", "None"),
    ],
)
def test_the_name_of_a_setting_is_checked(flag, message):
    assert str(main._misspelt(["main", "--config=x.py", "--workdir=x", flag])).startswith(message)


def test_an_empty_workdir_is_refused():
    done = run_main("--config=configs/quickstart.py", "--workdir=")
    assert done.returncode == 2
    assert done.stderr == "error: --workdir is empty; name a folder, e.g. --workdir=runs/quickstart\n"


@pytest.mark.parametrize(
    "recipe, message",
    [
        (None, "recipe.py: there is no such file"),
        ("def get_config(:\n", "recipe.py: line 1: invalid syntax"),
        ("import no_such_module\n", "recipe.py: line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\n", "recipe.py: it has no get_config()"),
        ("def get_config():\n    pass\n", "recipe.py: get_config() returned NoneType, not a ConfigDict"),
        ("def get_config():\n    raise RuntimeError('a\\nb')\n", "recipe.py: line 2: RuntimeError: a b"),
        (
            "from seal_jax.config import default_config\ndef get_config():\n    c = default_config()\n    c.lr = 3\n",
            'recipe.py: line 4: AttributeError: Key "lr" does not exist',
        ),
        (
            "from seal_jax.config import default_config\ndef get_config():\n    default_config().seed = 'a'\n",
            "recipe.py: line 3: TypeError: Could not override field 'seed'",
        ),
    ],
)
def test_a_recipe_that_does_not_load_is_one_line(tmp_path, recipe, message):
    path = tmp_path / "recipe.py"
    if recipe is not None:
        path.write_text(recipe)
    with pytest.raises(main.RecipeError) as error:
        main.load_recipe(str(path))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_that_is_a_folder_or_lacks_its_argument_is_one_line(tmp_path):
    with pytest.raises(main.RecipeError, match="is a folder"):
        main.load_recipe(str(tmp_path))
    with pytest.raises(main.RecipeError, match="^configs/quickstart.py:foo is not known; choose one of default, paper"):
        main.load_recipe(str(ROOT / "configs/quickstart.py:foo"))


def test_the_command_line_names_a_broken_recipe_in_one_line(tmp_path):
    done = run_main("--config=configs/quickstart.py:foo", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "configs/quickstart.py:foo is not known; choose one of default, paper, vanilla, scratch" in done.stderr


@pytest.mark.parametrize("option", ["tran", "language_hint"])
def test_a_misspelt_suite_option_is_named(option):
    with pytest.raises(ValueError, match=rf"config.suite_options holds \['{option}'\].*'ood', 'seed'") as error:
        make_suite("toolbox", **{option: 1})
    assert "\n" not in str(error.value)


#: The flags of a run in one process.
ALONE = {
    "TOPOLOGY": None,
    "EPISODES": "",
    "DISTRIBUTED": False,
    "COORDINATOR": "",
    "PROCESS_COUNT": 0,
    "PROCESS_ID": -1,
}


@pytest.mark.parametrize("during", ["validate", "start", "disk", "training"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_only_what_fails_before_training_is_cut_to_one_line(tmp_path, monkeypatch, capsys, during, mode):
    class Run:
        def __init__(self, config, workdir):
            if during == "start":
                raise ValueError("no such folder")
            if during == "disk":
                raise NotADirectoryError(20, "Not a directory", str(workdir))

        def __enter__(self):
            raise ValueError("broken in round 7")

        def __exit__(self, *exc):
            pass

    config = default_config()
    config.rollouts = 1 if during == "validate" else 8
    for name, value in {"CONFIG": config, "WORKDIR": tmp_path, "MODE": mode, "CACHE": "", **ALONE}.items():
        monkeypatch.setattr(main, f"_{name}", SimpleNamespace(value=value))
    monkeypatch.setattr(main, "flags", SimpleNamespace(FLAGS=SimpleNamespace(showtraceback=False)))
    monkeypatch.setattr("seal_jax.run.Run", Run)
    if during == "training":
        with pytest.raises(ValueError, match="broken in round 7"):
            main.main([])
        return
    with pytest.raises(SystemExit) as end:
        main.main([])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("saved, kept", [(None, "no checkpoint yet"), (2, "checkpoint of round 2")])
def test_an_interrupt_is_one_line(tmp_path, monkeypatch, capsys, saved, kept):
    class Run:
        def __init__(self, config, workdir):
            self.config, self.workdir, self.round = config, workdir, 3
            self.checkpoints = SimpleNamespace(latest=lambda: saved)

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

    def train(run):
        raise KeyboardInterrupt

    for name, value in {"CONFIG": default_config(), "WORKDIR": tmp_path, "MODE": "train", "CACHE": "", **ALONE}.items():
        monkeypatch.setattr(main, f"_{name}", SimpleNamespace(value=value))
    monkeypatch.setattr(main, "flags", SimpleNamespace(FLAGS=SimpleNamespace(showtraceback=False)))
    monkeypatch.setattr("seal_jax.run.Run", Run)
    monkeypatch.setattr("seal_jax.loop.train", train)
    with pytest.raises(SystemExit) as end:
        main.main([])
    assert end.value.code == 130
    told = f"interrupted after round 3 of 10; {kept} in {tmp_path}; the same command goes on from there\n"
    assert capsys.readouterr().err == told


def test_help_explains_the_flags():
    done = run_main("--help")
    assert "--config.rounds=20" in done.stdout and "--workdir" in done.stdout
