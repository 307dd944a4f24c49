import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from areal.base.errors import UserError
from areal.config import Config, dump_config, from_message, load_config, overridden
from areal.config.data_section import BenchmarkConfig, RowsConfig
from areal.config.mistakes import other_names
from areal.config.reading import read_yaml
from areal.config.role_sections import EvaluatorConfig, NetworkConfig
from areal.config.roles import ROLES
from areal.config.trainer_section import TrainerConfig
from areal.extensions.desk.settings_list import keys_of

CONFIGS = Path(__file__).parents[2] / "configs"
RUN = {
    "model": "m",
    "steps": 3,
    "batch_size": 4,
    "group_size": 2,
    "data": {"source": "addition"},
    "sampling": {"max_new_tokens": 8},
}


def written(folder, **files):
    for name, values in files.items():
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
    return folder / f"{name}.yaml"


def test_a_file_changes_its_base_at_any_depth(tmp_path):
    (tmp_path / "data").mkdir()
    written(tmp_path / "data", sums={"source": "addition", "options": {"max_digits": 4}, "reward": "addition"})
    written(tmp_path, shared=RUN | {"trainer": {"lr": 1.0e-3, "betas": [0.9, 0.95]}})
    file = written(
        tmp_path,
        mine={
            "base": "shared.yaml",
            "data": {"base": "data/sums.yaml", "options": {"min_digits": 3}},
            "trainer": {"betas": [0.8, 0.9]},
        },
    )
    config = load_config(file, ["steps=5"])
    assert (config.model, config.steps, config.trainer.lr, config.trainer.betas) == ("m", 5, 1.0e-3, (0.8, 0.9))
    assert config.data.options == {"max_digits": 4, "min_digits": 3}
    assert config.rewards == {"addition": 1.0}


def test_of_several_bases_the_later_one_wins(tmp_path):
    written(tmp_path, one={"steps": 1, "name": "one"}, two={"steps": 2})
    file = written(tmp_path, mine=RUN | {"base": ["one.yaml", "two.yaml"], "reward": {"functions": ["addition"]}})
    values = yaml.safe_load(file.read_text())
    del values["steps"]
    file.write_text(yaml.safe_dump(values))
    assert (load_config(file).steps, load_config(file).name) == (2, "one")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"grid": {"seed": [1]}}, "a configuration with a grid is a sweep, areal sweep"),
        ({"trainer": {"wd": 1}}, "Unknown key 'trainer.wd' in .*: `areal config trainer` lists those that are known"),
        ({"guard": {"wd": 1}}, "Unknown key 'guard.wd' in .*: known are effective_sample_size"),
        ({"trainer": {"lr": float("inf")}}, "trainer.lr is inf in .*, but should be a finite number"),
        ({"steps": "three"}, r"steps is 'three' in .*, but should be a valid integer\.$"),
        ({"trainer": {"betas": [1.0, 2.0]}}, r"trainer.betas.0 is 1.0 in .*, but should be less than 1"),
        ({"trainer": {"betas": [0.9, -0.1]}}, r"trainer.betas.1 is -0.1 in .*, but should be greater than or equal"),
        ({"trainer": {"eps_clip": 2}}, r"trainer.eps_clip is 2, but no ratio is below 0.*: set trainer.eps_clip to"),
        ({"trainer": {"warmup_steps": 13}}, r"takes 13 optimizer steps, but there are only 12.*: lower trainer.warmup"),
        (
            {"trainer": {"warmup_steps": 9, "lr_schedule": "linear", "lr_schedule_steps": 2}},
            r"takes 9 optimizer steps, but the schedule ends after 8 .*: raise trainer.lr_schedule_steps or lower",
        ),
        (
            {"sampling": {"max_new_tokens": 8, "temperature": 0.002}},
            r"sampling.temperature is 0.002, but vLLM takes .*: raise it to 0.01",
        ),
        ({"evaluator": {"temperature": 0.009}}, r"evaluator.temperature is 0.009, but vLLM takes"),
        ({"trainer": {"critic": {"warmup_steps": 12}}}, r"takes 12 .* only 12, .*: lower trainer.critic.warmup_steps"),
        (
            {"generator": {"max_model_len": 8}},
            r"max_new_tokens is 8, but generator.max_model_len has room for 8 tokens",
        ),
        ({"trainer": 3}, "trainer is a section, but has a value in .*: `areal config trainer` lists its keys"),
    ],
)
def test_a_key_or_a_number_that_cannot_be_is_one_sentence_with_a_hint(tmp_path, values, sentence):
    with pytest.raises(UserError, match=sentence):
        load_config(written(tmp_path, mine=RUN | {"reward": {"functions": ["addition"]}} | values))


def test_settings_at_the_limit_of_what_can_be_are_taken(tmp_path):
    values = RUN | {"reward": {"functions": ["addition"]}, "generator": {"max_model_len": 9}}
    for trainer in (
        {"warmup_steps": 12, "betas": [0.0, 0.999], "eps_clip": 1.0},
        {"warmup_steps": 20, "lr_schedule_steps": 5},
        {"warmup_steps": 11, "lr_schedule": "cosine", "lr_schedule_steps": 3},
        {"objective": "gmpo", "eps_clip": 1.5},
    ):
        load_config(written(tmp_path, mine=values | {"trainer": trainer}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("5e7", 5e7),
        ("-2E+3", -2000.0),
        (".5e1", 5.0),
        ("3.", 3.0),
        ("1_000.5", 1000.5),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", 1000),
        ("-7", -7),
        ("1:30", "1:30"),
        ("0b11", "0b11"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("'1e-3'", "1e-3"),
        ("1.2.3", "1.2.3"),
        ("-", "-"),
        ("12a", "12a"),
    ],
)
def test_numbers_are_those_of_yaml_1_2_in_files_overrides_and_what_is_written(tmp_path, text, value):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(RUN) + f"reward: {{functions: [addition], options: {{mine: {{x: {text}}}}}}}\n")
    overrides = [f"rollout_manager.workflow_options={{x: {text}}}"]
    config = load_config(file, overrides)
    for options in (config.reward.options["mine"], config.rollout_manager.workflow_options):
        assert (type(options["x"]), options["x"]) == (type(value), value)
    for again in (read_yaml(dump_config(config)), yaml.safe_load(dump_config(config))):  # YAML 1.1, which others read
        assert again["reward"]["options"]["mine"] == {"x": value}


def test_an_override_may_name_a_base(tmp_path):
    part = written(tmp_path, sums={"source": "addition", "reward": "addition"})
    overrides = [
        "model=m",
        "steps=1",
        "batch_size=4",
        "group_size=2",
        "sampling.max_new_tokens=8",
        f"data.base={part}",
        "data.eval_size=2",
    ]
    config = load_config(None, overrides)
    assert (config.data.source, config.data.eval_size) == ("addition", 2)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"mine": {"base": "none.yaml"}}, "no configuration file .*none.yaml: correct the base in .*mine.yaml"),
        ({"one": {"base": "mine.yaml"}, "mine": {"base": "one.yaml"}}, "is a base of itself, by way of .*one.yaml"),
        ({"mine": RUN | {"base": 3}}, "Unknown key 'base' in .*mine.yaml"),
    ],
)
def test_a_base_that_cannot_be_read_is_one_sentence(tmp_path, files, sentence):
    with pytest.raises(UserError, match=sentence):
        load_config(written(tmp_path, **files))


def data_with(*overrides):
    base = ["source=addition", "eval_size=1"]
    return load_config(None, [*base, *overrides], RowsConfig)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"{{ question }} Put the answer in \boxed{}.", r"{{ question }} Put the answer in \boxed{}."),
        (r'"{{ question }} \boxed{}"', r"{{ question }} \boxed{}"),
        ("'it''s {{ a }}: #1'", "it's {{ a }}: #1"),
        ("7", "7"),
        ("null", None),
        ("", ""),
    ],
)
def test_an_override_of_a_text_is_taken_as_it_is(text, value):
    assert data_with(f"prompt_template={text}").prompt_template == value


def test_other_overrides_are_yaml_and_paths_may_begin_with_the_users_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    data = data_with("options={a: '1'}", "chat_template=~/a: b.jinja", "eval_size=3")
    assert (data.options, data.chat_template, data.eval_size) == ({"a": "1"}, Path("/home/me/a: b.jinja"), 3)
    assert evaluator("benchmarks.gsm8k.prompt_template={{ q }}").benchmarks["gsm8k"].prompt_template == "{{ q }}"
    with pytest.raises(UserError, match="has the key 'a' twice, in lines 1 and 1: remove one"):
        data_with("options={a: 1, a: 2}")
    assert load_config(None, ["keys=~/keys"], NetworkConfig).keys == Path("/home/me/keys")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "".join(f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9) if n else 1}]\n" for n in range(10)),
            "stand for more than",
        ),
        ("model: &m {model: *m}", "stand for more than"),
        ("model: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_yaml_that_would_never_be_read_to_its_end_is_refused(tmp_path, text, sentence):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"config.yaml is not YAML: it.* {sentence}"):
        load_config(file, [])


def test_aliases_are_read(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("keys: &k /a\n")
    assert read_yaml("a: &a [1, 2]\nb: [*a, *a]") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    assert load_config(file, [], NetworkConfig).keys == Path("/a")


def test_the_name_of_a_reward_is_one_part_of_a_key_whatever_dots_it_has():
    name, module = "my/judges.py:Judge", "pkg.judges:Judge"
    set_keys = [f"reward.options.{name}.model.size=2", f"reward.functions.{module}=0.5", "reward.options.code.a=1"]
    assert overridden({}, set_keys)["reward"] == {
        "options": {name: {"model": {"size": 2}}, "code": {"a": 1}},
        "functions": {module: 0.5},
    }


def test_another_source_leaves_behind_what_belongs_to_the_old_one(tmp_path):
    values = {
        "source": "hf:one",
        "split": "test",
        "options": {"name": "main"},
        "eval_source": "hf:two",
        "prompt_key": "q",
    }
    file = written(tmp_path, mine={"data": values | {"eval_size": 1}})

    more = ["sampling.max_new_tokens=8", "reward.functions=math"]

    def data(*overrides):
        read = load_config(file, [*overrides, "model=m", "steps=1", "batch_size=4", "group_size=2", *more]).data
        return read.split, read.options, read.eval_source, read.prompt_key

    assert data() == data("data.source=hf:one:train") == ("test", {"name": "main"}, "hf:two", "q")
    assert data("data.source=rows.csv") == ("train", {}, None, "q")
    assert data("data.split=dev", "data.source=hf:other") == ("dev", {}, None, "q")


def test_names_of_other_libraries_are_those_of_the_table_and_lead_to_keys():
    names, keys = other_names(), {key for key, *_ in keys_of(Config)}
    assert {*names.values()} <= keys
    table = (ROOT / "docs" / "examples.md").read_text().split("| here | TRL |")[1].split("\n\n")[0]
    cells = [[*re.findall("`([^`]+)`", cell)] for cell in re.findall(r"^\| ([^|]+) \| (?:[^|]*)", table, re.M)]
    trl = [[*re.findall("`([^`]+)`", cell)] for cell in re.findall(r"^\| [^|]+ \| ([^|]*)", table, re.M)]
    pairs = {name: here[0] for here, there in zip(cells, trl, strict=True) if here for name in there}
    same = {name for name, key in pairs.items() if name == key}
    assert len(pairs) > 15 and len(names.keys() & pairs.keys() - same) > 9
    assert all(names[name] == pairs[name] or name == "loss_type" for name in names.keys() & pairs.keys() - same)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("generator.engine_options.quantisation=fp8", "the closest option that it takes is 'quantization'"),
        ("generator.engine_options.hf_overrides={}", "have to compute the same model"),
        ("generator.engine_options={logits_processors: [x.py]}", "the trainer would not know"),
        ("generator.engine_options.pipeline_parallel_size=2", "devices are counted by generator.tensor"),
        ("generator.engine_options.data_parallel_size=two", "is 'two': set it to a number of devices"),
        ("generator.engine_options.speculative_config={rejection_sample_method: synthetic}", "has not drawn"),
        ("generator.engine_options=fp8", "generator.engine_options is 'fp8'"),
        ("trainer.deepspeed_options.train_batch_size=8", "deepspeed_options does not take 'train_batch_size'"),
        ("trainer.deepspeed_options.comm_logger={}", "the closest option that it takes is 'comms_logger'"),
        ("trainer.deepspeed_options.zero_optimization.stage=3", "zero_optimization.stage cannot be set: set trainer"),
        ("trainer.deepspeed_options.zero_optimization.overlap_com=true", "that it takes is 'overlap_comm'"),
        ("trainer.deepspeed_options.zero_optimization=3", "zero_optimization is 3: write keys and values"),
        ("trainer.deepspeed_options.zero_optimization.offload_param={pin_memory: false}", "set trainer.offload"),
        ("sampling.min_new_tokens=9", "sampling.min_new_tokens is 9 but sampling.max_new_tokens is only 8"),
        ("sampling.stop=['']", "sampling.stop has an empty text"),
        (
            "rollout_manager.tool_call_parser=hermse",
            "Unknown parser 'hermse' in rollout_manager.tool_call_parser: known",
        ),
        ("rollout_manager.reasoning_parser=qwen", "minimax_m3, mistral, muse_glimmer, nemotron_v3, olmo3"),
    ],
)
def test_an_option_that_an_engine_cannot_be_given_is_one_sentence(tmp_path, override, sentence):
    with pytest.raises(UserError) as error:
        load_config(written(tmp_path, mine=RUN | {"reward": {"functions": ["addition"]}}), [override])
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_options_of_the_engines_are_kept_as_they_are(tmp_path):
    options = {"kv_cache_dtype": "fp8", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    zero = {"overlap_comm": False, "stage3_prefetch_bucket_size": 10, "offload_optimizer": {"pin_memory": False}}
    changes = {
        "reward": {"functions": ["addition"]},
        "generator": {"engine_options": options},
        "trainer": {"offload": "optimizer", "deepspeed_options": {"zero_optimization": zero}},
    }
    config = load_config(written(tmp_path, mine=RUN | changes))
    assert config.generator.engine_options == options
    again = Config.model_validate(yaml.safe_load(dump_config(config)))
    assert again.trainer.deepspeed_options == {"zero_optimization": zero}


def test_options_are_checked_without_importing_an_engine():
    code = (
        "import sys; from areal.config.engine_sections import GeneratorConfig;"
        "from areal.config.role_sections import RolloutManagerConfig;"
        "from areal.config.trainer_section import TrainerConfig;"
        "GeneratorConfig(engine_options={'quantization': 'fp8'});"
        "TrainerConfig(deepspeed_options={'zero_optimization': {'overlap_comm': False}});"
        "RolloutManagerConfig(tool_call_parser='mistral', reasoning_parser='qwen3');"
        "sys.exit(bool({'torch', 'vllm', 'deepspeed'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def evaluator(*overrides: str) -> EvaluatorConfig:
    return load_config(None, overrides, EvaluatorConfig)


def test_benchmarks_are_named_or_changed_or_ones_own(tmp_path):
    named = evaluator("benchmarks=[aime24, gsm8k]").benchmarks
    assert (named["aime24"].samples, named["gsm8k"].temperature) == (32, 0)
    assert named["gsm8k"].source == "hf:openai/gsm8k:test" and named["gsm8k"].options == {"name": "main"}
    changed = evaluator("benchmarks.aime24.samples=4", "benchmarks.gsm8k.source=rows.jsonl").benchmarks
    assert changed["aime24"] == named["aime24"].model_copy(update={"samples": 4})
    assert changed["gsm8k"] == named["gsm8k"].model_copy(update={"source": "rows.jsonl", "options": {}})
    variant = evaluator("benchmarks={greedy: {base: aime24, samples: 1, temperature: 0}}").benchmarks["greedy"]
    assert (variant.source, variant.samples) == (named["aime24"].source, 1)
    mine = tmp_path / "mine.yaml"
    mine.write_text("source: rows.jsonl\nprompt_key: q\nreward: math\nsamples: 2\nmax_new_tokens: 9\n")
    benchmarks = evaluator(f"benchmarks=['{mine}']").benchmarks
    assert benchmarks == {
        "mine": BenchmarkConfig(source="rows.jsonl", prompt_key="q", reward="math", samples=2, max_new_tokens=9)
    }


def test_benchmarks_survive_being_written_and_read():
    settings = ["model=m", "steps=0", "batch_size=1", "group_size=1", "data.eval_size=0", "sampling.max_new_tokens=8"]
    benchmarks = "evaluator.benchmarks={livecodebench: {source: lcb.jsonl}, gsm8k: {options: {}, dates: null}}"
    config = load_config(None, [*settings, "trainer.minibatches=1", benchmarks])
    assert config.rewards == {"code": 1.0, "math": 1.0}
    assert str(config.evaluator.benchmarks["livecodebench"].dates[0]) == "2024-08-01"
    assert Config.model_validate(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("benchmarks", "sentence"),
    [
        ("[aime]", "There is no benchmark 'aime' .*: known are aime24, .*write the path of a YAML file"),
        ("[none.yaml]", "There is no benchmark 'none.yaml'"),
        ("{aime24: 3}", "neither a list of names nor a mapping of names to keys"),
        ("3", "neither a list of names nor a mapping"),
        ("{a/b: {source: x.jsonl}}", "The benchmark 'a/b' in evaluator.benchmarks has a name that no file can have"),
        ("{aime24: {sample: 3}}", "Unknown key 'benchmarks.aime24.sample' .*did you mean 'benchmarks.aime24.samples'"),
        ("{aime24: {temperature: 0}}", "has 32 samples, but at temperature 0 they are all the same"),
        ("{m: {source: a.jsonl, eval_source: b.jsonl}}", "has the eval_source 'b.jsonl' too"),
        ("{m: {source: a.jsonl, dates: [2024]}}", "benchmarks.m.dates"),
    ],
)
def test_bad_benchmarks_are_one_sentence(benchmarks, sentence):
    with pytest.raises(UserError, match=sentence):
        evaluator(f"benchmarks={benchmarks}")


def test_only_an_evaluation_alone_needs_no_rows_to_train_on():
    settings = ["model=m", "batch_size=4", "group_size=1", "sampling.max_new_tokens=8", "reward.functions=math"]
    with pytest.raises(UserError, match="data needs either a source or sources"):
        load_config(None, [*settings, "steps=1", "data.eval_size=0", "evaluator.benchmarks=[aime24]"])
    with pytest.raises(UserError, match="there is nothing to evaluate"):
        load_config(None, [*settings, "steps=0", "data.eval_size=0"])
    assert load_config(None, [*settings, "steps=0", "data.source=addition"]).evaluates


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "data needs either a source or sources"),
        ({"source": "addition", "sources": [{"source": "addition"}]}, "data needs either a source or sources"),
        ({"sources": [{"source": "addition"}], "split": "test"}, "data.split has no effect beside data.sources"),
        ({"sources": [{"source": "a", "weight": 1}, {"source": "b"}]}, "some of data.sources have a weight"),
        ({"source": "addition", "prompt_template": "{{ a"}, "data.prompt_template is not a Jinja template"),
        ({"source": "addition", "reward": 3}, "data.reward is neither a name"),
    ],
)
def test_bad_data_is_one_sentence(data, sentence):
    with pytest.raises(UserError, match=sentence):
        load_config(None, [f"{key}={value!r}".replace("'", '"') for key, value in data.items()], RowsConfig)


def test_rewards_may_come_from_the_sources_alone():
    settings = ["model=m", "steps=1", "batch_size=4", "group_size=2", "sampling.max_new_tokens=8"]
    sources = (
        'data.sources=[{source: addition, reward: addition}, {source: "reasoning_gym:leg_counting", reward: math}]'
    )
    config = load_config(None, [*settings, sources])
    assert config.rewards == {"addition": 1.0, "math": 1.0}
    assert Config.model_validate(yaml.safe_load(dump_config(config))) == config
    with pytest.raises(UserError, match="rows of data.source 'addition' have no reward"):
        load_config(None, [*settings, "data.sources=[{source: addition}, {source: x, reward: math}]"])
    settings += ["data.source=addition", "evaluator.benchmarks={sums: {source: addition, size: 8}}"]
    with pytest.raises(UserError, match=r"reward.functions is missing|have no reward"):
        load_config(None, settings)
    agent = "{agent: mine:solve, agent_reward: true}"
    load_config(None, [*settings, "rollout_manager.workflow=agent", f"rollout_manager.workflow_options={agent}"])


def test_turns_need_sequences_that_stop_and_a_state_that_is_on_the_devices():
    with pytest.raises(UserError, match=r"but generator.interrupt is false: leave one of them out"):
        load_config(CONFIGS / "quickstart.yaml", ["colocate=true", "generator.interrupt=false"])
    with pytest.raises(UserError, match=r"but trainer.offload is optimizer: leave out trainer.offload"):
        load_config(CONFIGS / "quickstart.yaml", ["colocate=true", "trainer.offload=optimizer"])


def test_weights_are_offloaded_under_zero_3_only():
    assert load_config(None, ["offload=all", "zero_stage=3"], TrainerConfig).offload == "all"
    with pytest.raises(UserError, match=r"trainer.offload is all, but trainer.zero_stage is 2"):
        load_config(None, ["offload=all", "zero_stage=2"], TrainerConfig)


@pytest.mark.parametrize(
    "file", sorted((CONFIGS / "paper").glob("*-*.yaml")) + sorted(CONFIGS.glob("paper/*[0-9]*.yaml"))
)
def test_the_experiments_of_the_paper_are_configurations(file):
    config = load_config(file)
    assert config.name == file.stem
    assert config.data.max_prompt_tokens == 1024
    assert (config.run_ahead, config.trainer.max_tokens_per_microbatch) == ("max", 32768)
    assert config.rewards.keys() <= {"math", "code"}


WISE = {"scorers": {"wise": {"model": "m"}}}
LIKED = {"scorers": {"liked": {"model": "m", "kind": "reward_model"}}}


def judge_of(kind="judge", url="scorer:big", **functions):
    options = {"judge/strict": {"url": url, "samples": 2}}
    reward = {"functions": {"judge/strict": 1, **functions}, "options": options}
    return {"scorers": {"big": {"model": "m", "kind": kind}}, "reward": reward}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"trainer": {"objective": "distill"}}, "need a teacher: set trainer.teacher to a scorer"),
        ({"trainer": {"teacher": "wise"}}, "trainer.teacher names the scorer 'wise', but scorers has none that gives"),
        ({"trainer": {"reference": "scorer:wise", "kl_coef": 1}}, "trainer.reference names the scorer 'wise'"),
        (WISE, "the scorer 'wise' is not used"),
        (LIKED, "the scorer 'liked' is not used: set reward.functions=liked"),
        (
            LIKED | {"trainer": {"teacher": "liked"}},
            "names the scorer 'liked', but scorers has none that gives log-probs",
        ),
        (
            judge_of(kind="reward_model"),
            "reward judge/strict has the url scorer:big, but scorers has no big of kind judge",
        ),
        (judge_of(url="scorer:bog"), "the scorer 'big' is not used: set reward.options.judge.url=scorer:big"),
        (
            judge_of() | {"scorers": {}},
            "reward judge/strict has the url scorer:big, but scorers has no big of kind judge",
        ),
        (judge_of(big=1), "a scorer cannot have the name 'big', that of a reward"),
        (WISE | {"trainer": {"teacher_key": "t"}}, "trainer.teacher_key needs a teacher for the other rows"),
        ({"scorers": {"addition": {"model": "m"}}, "trainer": {"teacher": "addition"}}, "cannot have the name"),
        (
            WISE | {"trainer": {"teacher": "wise"}, "sampling": {"max_new_tokens": 8, "temperature": 0.9}},
            "gives log-probs at temperature 1: set sampling.temperature=1",
        ),
        (WISE | {"trainer": {"objective": "distill", "teacher": "wise"}, "filter_zero_signal": True}, "teaches with"),
        (WISE | {"trainer": {"objective": "distill", "teacher": "wise"}, "reward": {}}, "have no reward"),
    ],
)
def test_scorers_that_do_not_fit_are_one_sentence(tmp_path, values, sentence):
    with pytest.raises(UserError, match=sentence):
        load_config(written(tmp_path, mine=RUN | {"reward": {"functions": ["addition"]}} | values))


def test_distillation_needs_no_reward_and_then_no_reward_actor_but_a_scorer():
    prompts = {"data": {"source": "addition", "eval_size": 0}}
    config = Config.model_validate(RUN | WISE | prompts | {"trainer": {"objective": "distill", "teacher": "wise"}})
    assert (config.trainer.teacher_coef, config.scorer_uses.used) == (1.0, ["wise"])
    assert {name: role.started(config) for name, role in ROLES.items()} == {
        "trainer": 1,
        "generator": 1,
        "scorer": 1,
        "reward": 0,
        "rollout_manager": 1,
        "gateway": 0,
        "evaluator": 0,
    }
    evaluation = RUN | LIKED | {"steps": 0, "reward": {"functions": {"liked": 1}}}
    assert [ROLES[name].started(Config.model_validate(evaluation)) for name in ("scorer", "reward")] == [1, 0]
    judged = {"functions": {"judge": 0.5, "liked": 0.5}, "options": {"judge": {"url": "policy"}}}
    assert ROLES["reward"].started(Config.model_validate(RUN | LIKED | {"reward": judged})) == 0
    judged = Config.model_validate(RUN | judge_of())
    assert [ROLES[name].started(judged) for name in ("scorer", "reward")] == [1, 0]
    away = Config.model_validate(config.model_dump() | {"scorers": {"wise": {"model": "m", "count": 0}}})
    assert (ROLES["scorer"].started(away), ROLES["scorer"].processes(away)) == (0, 1)


def test_the_configuration_of_a_master_of_another_version_is_refused_in_one_sentence():
    config = Config.model_validate(RUN | {"reward": {"functions": ["addition"]}})
    values = config.model_dump(mode="json")
    assert from_message(values) == config
    with pytest.raises(UserError, match=r"version of this program that the master has: Unknown key 'trainer.new' in "):
        from_message(values | {"trainer": {"new": 1}})


def test_a_path_in_a_file_is_that_of_a_file_beside_it_and_else_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    for name in ("reward.py", "rows.jsonl", "agent.py", "server.py"):
        (tmp_path / "mine" / name).touch()
    options = {"command": "python agent.py --fast", "servers": {"shop": {"args": ["server.py", "other.py"]}}}
    values = {
        "model": "./model",
        "data": {"source": "rows.jsonl", "eval_source": "held_out.jsonl", "system_prompt": "See reward.py"},
        "reward": {"functions": {"reward.py:score": 1, "elsewhere.py:score": 1, "math": 1}},
        "rollout_manager": {"workflow": "agent", "workflow_options": options},
    }
    written(tmp_path / "mine", below=values)
    file = written(tmp_path, run={"base": "mine/below.yaml"})
    sizes = ["steps=1", "batch_size=4", "group_size=2", "sampling.max_new_tokens=1"]
    config = load_config(file.relative_to(tmp_path), sizes)
    assert config.model == "mine/model"
    assert (config.data.source, config.data.eval_source) == ("mine/rows.jsonl", "held_out.jsonl")
    assert config.data.system_prompt == "See reward.py"
    assert {*config.reward.functions} == {"mine/reward.py:score", "elsewhere.py:score", "math"}
    assert config.rollout_manager.workflow_options == {
        "command": "python mine/agent.py --fast",
        "servers": {"shop": {"args": ["mine/server.py", "other.py"]}},
    }


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("lr=1", "did you mean 'trainer.lr' or 'trainer.critic.lr'?"),
        ("trainer_lr=1", "did you mean 'trainer.lr'?"),
        ("temperature=1", "did you mean 'sampling.temperature' or 'evaluator.temperature'?"),
        ("workflow=agent", "did you mean 'rollout_manager.workflow'?"),
        (
            "actor_rollout_ref.rollout.n=8",
            "Unknown key 'actor_rollout_ref.rollout.n' in the overrides: here it is group_size.",
        ),
        ("sampling.temperature=0", "raise sampling.temperature (the overrides)."),
        ("master.address=5555", "which is no address: write tcp://HOST:PORT."),
        ("reward.functions=[math", "close it with ]"),
        ("max_staleness", "write max_staleness=VALUE."),
        ("quickstart", "the configuration is configs/quickstart.yaml."),
        ("rows.jsonl", "rows are data.source=rows.jsonl."),
        ("cfg.json", "a configuration is a file of YAML, cfg.yaml"),
    ],
)
def test_a_mistake_of_a_command_line_is_told_with_what_to_write(override, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    with pytest.raises(UserError, match=re.escape(hint)):
        load_config(CONFIGS / "quickstart.yaml", [override])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: x\n  steps: 3\n", "line 2, 'steps: 3': it is indented further than the line before"),
        ("name: x\ntrainer:\n\tlr: 1\n", "line 3, 'lr: 1': it is indented with a tab"),
    ],
)
def test_a_file_that_is_no_yaml_is_told_with_its_line(text, reason, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=re.escape(reason)):
        load_config(tmp_path / "run.yaml")


def test_a_key_of_a_file_is_not_blamed_on_an_override_that_has_nothing_to_do_with_it(tmp_path):
    file = written(tmp_path, run=RUN | {"sampling": {"max_new_tokens": 8, "temperature": 0}})
    with pytest.raises(UserError, match=re.escape(f"({file}).")):
        load_config(file, ["batch_size=5"])
