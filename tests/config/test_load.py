"""`load_config`: what composes, and the one message for each thing that can be wrong in a file or
on the command line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import detect_kind, load_config
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.load import to_yaml

MINIMAL = """
run_name: test
policy:
  model_name: models/tiny
data:
  train_path: data/train.jsonl
"""
REWARD = """
reward:
  functions:
    answer:
      path: nemo_like.environments.math.answer_reward
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """`write(text, name)` puts a file into the working directory and gives its path."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return Path(name)

    return write_file


def message(path: Path, *overrides: str, kind: str = "sft") -> str:
    """What the user is told about a config that does not load."""
    with pytest.raises(ConfigError) as caught:
        load_config(SftRunConfig if kind == "sft" else "grpo", path, overrides)
    return str(caught.value)


def test_schema_defaults_are_the_base_and_every_key_can_be_set_from_the_command_line(
    write: Write,
) -> None:
    path = write(MINIMAL)
    assert load_config(SftRunConfig, path).policy.optimizer.lr == 1e-5
    config = load_config(
        "sft",
        path,
        [
            "policy.optimizer.lr=1e-4",
            "+policy.sequence_packing.enabled=true",
            "++seed=7",
            "policy.generation.stop_strings=['\n',end]",
            "reward.functions.mine.path=my.reward",
            "policy.scheduler={kind: cosine, warmup_steps: 3}",
        ],
    )
    assert config.policy.optimizer.lr == 1e-4
    assert config.policy.sequence_packing.enabled
    assert config.seed == 7
    assert config.policy.generation.stop_strings == ("\n", "end")
    assert config.reward.functions["mine"].path == "my.reward"
    assert (config.policy.scheduler.kind, config.policy.scheduler.warmup_steps) == ("cosine", 3)


def test_the_last_of_file_base_and_command_line_wins(write: Write) -> None:
    write(
        "seed: 1\npolicy: {optimizer: {lr: 1.0, beta1: 0.5}}\nlogger: {num_samples_shown: 9}\n",
        "_base.yaml",
    )
    path = write("defaults: [_base, _self_]\n" + MINIMAL + "  max_train_rows: 5\nseed: 2\n")
    config = load_config(SftRunConfig, path, ["policy.optimizer.lr=3", "policy.optimizer.lr=4"])
    assert (config.seed, config.policy.optimizer.lr, config.policy.optimizer.beta1) == (2, 4.0, 0.5)
    assert (config.logger.num_samples_shown, config.data.max_train_rows) == (9, 5)


def test_a_base_outside_the_folder(write: Write) -> None:
    write(MINIMAL, "_base.yaml")
    path = write("defaults: [../_base]\nseed: 3\n", "mine/run.yaml")
    config = load_config(SftRunConfig, path)
    assert (config.run_name, config.seed) == ("test", 3)
    assert (
        load_config(SftRunConfig, write("defaults: [../_base]\n", "mine/other.yaml")).run_name
        == "test"
    )


def test_a_tilde_goes_back_to_the_default(write: Write) -> None:
    path = write(MINIMAL + REWARD + "sft: {max_num_steps: 9, val_period: 0}\n")
    assert load_config(SftRunConfig, path, ["~sft.max_num_steps"]).sft.max_num_steps is None
    assert load_config(SftRunConfig, path, ["~sft"]).sft.max_num_steps is None
    assert (
        load_config(SftRunConfig, path, ["~policy.generation.top_k"]).policy.generation.top_k
        is None
    )
    assert load_config(SftRunConfig, path, ["~reward.functions.answer"]).reward.functions == {}


def test_interpolation_of_keys_and_of_the_environment(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        MINIMAL.replace("data/train.jsonl", "${oc.env:NEMO_LIKE_DATA,data}/${run_name}.jsonl")
    )
    monkeypatch.delenv("NEMO_LIKE_DATA", raising=False)
    assert load_config(SftRunConfig, path).data.train_path == "data/test.jsonl"
    monkeypatch.setenv("NEMO_LIKE_DATA", "/big")
    assert load_config(SftRunConfig, path, ["run_name=x"]).data.train_path == "/big/x.jsonl"
    assert (
        load_config(SftRunConfig, path, ["sft.max_num_steps=${oc.env:STEPS,20}"]).sft.max_num_steps
        == 20
    )


def test_numbers_as_people_write_them(write: Write) -> None:
    text = "  max_grad_norm: 1\n  optimizer: {lr: 1e-5, eps: '1e-7', weight_decay: 0}\n"
    policy = load_config(SftRunConfig, write(MINIMAL.replace("data:", f"{text}data:"))).policy
    assert (policy.max_grad_norm, policy.optimizer.lr, policy.optimizer.eps) == (1.0, 1e-5, 1e-7)
    assert type(policy.optimizer.weight_decay) is float


@pytest.mark.parametrize(
    ("written", "value"), [("auto", "auto"), ("true", True), ("no", False), ("False", False)]
)
def test_a_switch_is_auto_or_a_boolean(write: Write, written: str, value: object) -> None:
    path = write(f"{MINIMAL}parallel: {{reshard: {written}}}\n")
    switch = load_config(SftRunConfig, path).parallel.reshard
    assert (type(switch), switch) == (type(value), value)


@pytest.mark.parametrize("written", ["007", "1e-3", "no", "2024-01-02", "1_000", "0x1F"])
def test_a_text_key_means_what_is_written(write: Write, written: str) -> None:
    path = write(MINIMAL.replace("run_name: test", f"run_name: {written}"))
    assert load_config(SftRunConfig, path).run_name == written
    assert load_config(SftRunConfig, path, [f"run_name={written}"]).run_name == written


def test_anchors_and_merge_keys(write: Write) -> None:
    path = write(
        MINIMAL
        + "reward:\n  functions:\n    a: &f {path: m.f, weight: 2}\n    b: {<<: *f, path: m.g}\n"
    )
    functions = load_config(SftRunConfig, path).reward.functions
    assert (functions["b"].path, functions["b"].weight) == ("m.g", 2.0)


def test_yaml_output_loads_to_the_same_config(write: Write) -> None:
    config = load_config(
        "grpo", write(MINIMAL + REWARD), [r"policy.generation.stop_strings=['\${','a']"]
    )
    assert config.policy.generation.stop_strings == ("${", "a")
    assert load_config(GrpoRunConfig, write(to_yaml(config), "again.yaml")) == config


@pytest.mark.parametrize("separator", ["\x85", "\u2028", "\u2029"])
def test_rare_line_breaks_survive_yaml(write: Write, separator: str) -> None:
    config = load_config(SftRunConfig, write(MINIMAL), [f"data.system_prompt=a{separator}b"])
    assert config.data.system_prompt == f"a{separator}b"
    assert load_config(SftRunConfig, write(to_yaml(config), "again.yaml")) == config


def test_loading_leaves_the_process_as_it_was(write: Write, tmp_path: Path) -> None:
    import logging

    path = write(MINIMAL)
    handlers = list(logging.getLogger().handlers)
    load_config(SftRunConfig, path)
    assert Path.cwd() == tmp_path
    assert sorted(os.listdir()) == ["run.yaml"]
    assert logging.getLogger().handlers == handlers


def test_the_job_is_told_from_its_sections(write: Write) -> None:
    write("loss_fn: {ratio_clip_max: 0.3}\n", "_base.yaml")
    assert detect_kind(write("defaults: [_base]\n" + MINIMAL)) == "grpo"
    assert detect_kind(write(MINIMAL + "sft: {max_num_steps: 3}\n")) == "sft"
    assert detect_kind(write(MINIMAL), ["grpo.max_num_steps=3"]) == "grpo"
    with pytest.raises(
        ConfigError, match=r"run.yaml has no section .*`sft` has sft; `grpo` has grpo, loss_fn"
    ):
        detect_kind(write(MINIMAL))
    several = (
        "run.yaml and the command line have keys of several jobs: sft of `sft` and {} of `grpo`;"
    )
    with pytest.raises(ConfigError, match=several.format("grpo")):
        detect_kind(write(MINIMAL + "sft: {}\ngrpo: {}\n"))
    with pytest.raises(ConfigError, match=several.format("grpo.max_num_steps")):
        detect_kind(write(MINIMAL + "sft: {}\n"), ["grpo.max_num_steps=3"])


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("sede: 3\n", "unknown key sede; did you mean seed? (run.yaml:7)"),
        (
            "logger:\n  wandb: true\n",
            "unknown key logger.wandb; did you mean logger.wandb_project? (run.yaml:8)",
        ),
        (
            "learning_rate: 1\n",
            "unknown key learning_rate; did you mean policy.optimizer.lr? (run.yaml:7)",
        ),
        ("sft:\n  lr: 1\n", "unknown key sft.lr; did you mean policy.optimizer.lr? (run.yaml:8)"),
        (
            "loss_fn: {}\n",
            (
                "unknown key loss_fn in a config for `sft`: it belongs to `nemo-like grpo`"
                " (run.yaml:7)"
            ),
        ),
        (
            "sft.max_num_steps: 3\n",
            (
                "sft.max_num_steps is one key with dots in it; in YAML write nested sections, dots"
                " are for overrides (run.yaml:7)"
            ),
        ),
        (
            "logger:\n",
            (
                "logger is null; it is a section with keys (tensorboard, wandb_project,"
                " mlflow_experiment, "
            ),
        ),
        ("logger: [1]\n", "logger is [1]; it is a section with keys (tensorboard, "),
        ("seed: fast\n", "seed is 'fast'; it must be an integer of at least 0 (run.yaml:7)"),
        ("seed: 1.5\n", "seed is 1.5; it must be an integer of at least 0 (run.yaml:7)"),
        ("seed: true\n", "seed is true; it must be a number (run.yaml:7)"),
        (
            "cluster: {cpus_per_worker: true}\n",
            "cluster.cpus_per_worker is true; it must be a number",
        ),
        ("resume: maybe\n", "resume is 'maybe'; it must be true or false (run.yaml:7)"),
        ("output_dir: [a]\n", "output_dir is ['a']; it must be a text (run.yaml:7)"),
        (
            "sft: {max_num_steps: x}\n",
            "sft.max_num_steps is 'x'; it must be an integer of at least 1 or null (run.yaml:7)",
        ),
        (
            "cluster:\n  placement_timeout_s: .inf\n",
            "cluster.placement_timeout_s is inf; it must be a finite number above 0 (run.yaml:8)",
        ),
        (
            "cluster:\n  backend: slurm\n",
            "cluster.backend is 'slurm'; it must be one of ray, local (run.yaml:8)",
        ),
        (
            "reward: {functions: {a: m.f}}\n",
            (
                "reward.functions.a is 'm.f'; it is a section with keys (path, weight,"
                " options, grouped, ...) (run.yaml:7)"
            ),
        ),
        (
            "reward: {functions: {a: {weight: 1}}}\n",
            "reward.functions.a.path is not set and has no default; ",
        ),
        (
            "reward: {functions: {a b: {path: m.f}}}\n",
            "reward.functions has the name 'a b'; names start with a letter",
        ),
        (
            "seed: ${nope}\n",
            (
                "seed cannot be resolved: Interpolation key 'nope' not found; for a literal ${"
                " write"
                " \\${ (run.yaml:7)"
            ),
        ),
        (
            "output_dir: ${oc.env:NOT_THERE_}\n",
            "Environment variable 'NOT_THERE_' not found; `export NOT_THERE_=...` sets it",
        ),
        ("output_dir: ${run_name\n", "no viable alternative at input '${run_name'"),
        ("seed: 1\nseed: 2\n", "run.yaml:8 has the key seed again; it is in line 7 already"),
        ("? [a]\n: 1\n", "run.yaml:7 has a list or mapping as a key"),
        (
            "logger:\n\ttensorboard: true\n",
            "run.yaml:8 is not valid YAML: found character '\\t' that cannot start any token",
        ),
        ("seed: [1\n", "run.yaml:8 is not valid YAML"),
        ("defaults: {name: _base}\n", "run.yaml:7 defaults entry is not the path of a YAML file"),
        ("defaults: _bse\n", "run.yaml:7 defaults entry _bse: _bse.yaml does not exist"),
        ("defaults: [_bse]\n", "run.yaml:7 defaults entry _bse: _bse.yaml does not exist"),
        (
            "defaults: [{policy: small}]\n",
            "run.yaml:7 defaults entry is not the path of a YAML file: write `defaults: base.yaml`",
        ),
    ],
)
def test_each_mistake_in_a_file_has_its_message(write: Write, addition: str, expected: str) -> None:
    assert expected in message(write(MINIMAL.lstrip("\n") + "\n" + addition))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "policy.optimzer.lr=1",
            "unknown key policy.optimzer.lr; did you mean policy.optimizer.lr? (the command line)",
        ),
        ("policy.seqence_packing.enabled=true", "did you mean policy.sequence_packing.enabled?"),
        (
            "train_mb_tokens=1",
            "policy.sequence_packing.train_mb_tokens or policy.dynamic_batching.train_mb_tokens?",
        ),
        (
            "policy.optimizer={lr: 1, nope: 3}",
            "unknown key policy.optimizer.nope; policy.optimizer has name, lr",
        ),
        ("~nope", "unknown key nope"),
        ("hydra.run.dir=x", "unknown key hydra.run.dir"),
        (
            "policy.optimizer.lr=fast",
            "policy.optimizer.lr is 'fast'; it must be a number above 0 (the command line)",
        ),
        ("policy.optimizer=3", "policy.optimizer is 3; it is a section with keys (name, "),
        (
            "policy.sequence_packing.algorithm=ffd",
            "concatenative (did you mean first_fit_decreasing?) (the command line)",
        ),
        ("policy.sequence_packing.algorithm=best_fit", "(did you mean best_fit_decreasing?)"),
        (
            "policy.generation.stop_strings=end",
            "stop_strings is 'end'; it must be a list, e.g. ['end']",
        ),
        (
            "~run_name",
            "run_name is not set and has no default; set it in the YAML or with run_name=VALUE",
        ),
        (
            "parallel.reshard=never",
            "parallel.reshard is 'never'; it must be one of auto, true, false",
        ),
        ("seed=null", "seed is null; it must be an integer"),
        ("seed", "override 'seed' does not parse: write seed=VALUE"),
        ("run_name=a=b", "run_name is 'a=b'; it must be a directory name"),
        ("run_name='${'", "no viable alternative at input '${'"),
        ("policy.optimizer.lr=true", "policy.optimizer.lr is true; it must be a number"),
        ("policy.freeze=[a", "override 'policy.freeze=[a' does not parse"),
        ("policy.freeze=a,b", "override 'policy.freeze=a,b' has several values"),
    ],
)
def test_each_mistake_on_the_command_line_has_its_message(
    write: Write, override: str, expected: str
) -> None:
    assert expected in message(write(MINIMAL), override)


def test_what_is_required_is_said_by_its_path(write: Write) -> None:
    text = message(write("policy:\n  train_micro_batch_size: 1\n"))
    assert text.startswith("3 problems:")
    for key in ("run_name", "policy.model_name", "data.train_path"):
        assert f"{key} is not set and has no default" in text
    assert "policy.model_name=VALUE (run.yaml:1)" in text


def test_several_problems_are_told_at_once(write: Write) -> None:
    text = message(write(MINIMAL + "sede: 1\n"), "foo=1", "polcy.model_name=x")
    assert text.startswith("3 problems:")
    assert sorted(re.findall(r"unknown key ([\w.]+)", text)) == ["foo", "polcy.model_name", "sede"]


def test_a_mistake_in_a_base_is_located_in_the_base(write: Write) -> None:
    write("# shared\npolicy:\n  train_global_batch_size: many\n", "bases/shared.yaml")
    path = write("defaults: [bases/shared, _self_]\n" + MINIMAL)
    assert (
        message(path)
        == "policy.train_global_batch_size is 'many'; it must be an integer of at least 1"
        " (bases/shared.yaml:3)"
    )
    assert (
        load_config(
            "sft", path, ["policy.train_global_batch_size=4"]
        ).policy.train_global_batch_size
        == 4
    )


def test_files_that_are_not_there(write: Write) -> None:
    path = write(MINIMAL, "demo_sft.yaml")
    assert (
        message(Path("demo_stf.yaml"))
        == "config file demo_stf.yaml does not exist; did you mean demo_sft.yaml?"
    )
    assert (
        message(Path("no/x.yaml")) == "config file no/x.yaml does not exist, nor does the folder no"
    )
    assert message(path.parent) == "config file . is a directory; name a YAML file in it"
    assert message(write(MINIMAL, "x.yml")) == "config file x.yml must be named .yaml"
    assert "defaults entry demo: demo.yaml does not exist; did you mean demo_sft.yaml?" in message(
        write("defaults: [demo]\n", "y.yaml")
    )


def test_files_that_are_no_config(write: Write, tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert message(Path("binary.yaml")).startswith("binary.yaml is not UTF-8 text at byte 1")
    assert message(write("- a\n- b\n")).startswith(
        "run.yaml is a list; a config is a mapping of sections"
    )
    assert "is not set" in message(write("# nothing\n"))
    assert message(write("a: &a {b: *a}\n")) == "run.yaml contains itself through an alias"
    assert "a single document" in message(write("seed: 1\n---\nseed: 2\n"))


def test_defaults_in_a_circle(write: Write) -> None:
    write("defaults: [b]\n", "a.yaml")
    write("defaults: [c]\n", "b.yaml")
    write("defaults: [a]\n", "c.yaml")
    assert (
        message(Path("a.yaml"))
        == "defaults name each other in a circle: a.yaml -> b.yaml -> c.yaml -> a.yaml"
    )


def test_interpolations_in_a_circle(write: Write) -> None:
    assert "Recursive interpolation" in message(
        write(MINIMAL), "run_name=${output_dir}", "output_dir=${run_name}"
    )


def test_both_batching_modes_are_one_clear_error(write: Write) -> None:
    path = write(MINIMAL.replace("data:", "  dynamic_batching:\n    enabled: true\ndata:"))
    assert message(path, "policy.sequence_packing.enabled=true") == (
        "policy.sequence_packing.enabled and policy.dynamic_batching.enabled are both true, but"
        " exclude each other: set one of them to false (packing is the faster one) (run.yaml:6)"
    )


def test_checks_between_keys_say_where(write: Write) -> None:
    path = write(MINIMAL + REWARD + "grpo:\n  num_prompts_per_step: 6\n")
    text = message(path, "policy.train_global_batch_size=16", kind="grpo")
    assert text.startswith("6 prompts x 4 generations = 24 rows per step")
    assert text.endswith("(the command line)")


def test_config_imports_nothing_heavy_and_is_quick() -> None:
    script = (
        "import sys, nemo_like.config.load, nemo_like.config.check\n"
        "print(*sorted({'torch', 'ray', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
