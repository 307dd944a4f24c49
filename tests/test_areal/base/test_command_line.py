"""The command lines of all tools: their mistakes are told in one sentence, whatever room they are in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import EntryPoint

import pytest
import structlog

import areal
from actors.start.run_command import main as run_main
from areal.__main__ import RUN, command_line, main
from areal.base.command_line import output
from areal.base.processes import ROOT, START


@pytest.fixture(autouse=True)
def logging_as_before():
    """A tool that configures logging in this process, where later tests would log to a closed file."""
    settings = structlog.get_config()
    yield
    structlog.configure(**settings)
    structlog.contextvars.clear_contextvars()


(CHOICES,) = (action.choices for action in command_line()._actions if action.dest == "==SUPPRESS==")
TOOLS = {name: tool for name, tool in CHOICES.items() if name not in RUN}


def test_the_console_script_is_the_module():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert EntryPoint("areal", scripts["areal"], "console_scripts").load() is main


def test_a_clone_that_is_not_installed_has_a_version_too(monkeypatch):
    number, _, commit = areal.__version__.partition("+g")
    assert number == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert not commit or re.fullmatch("[0-9a-f]{10}", commit)
    monkeypatch.setattr("importlib.metadata.Distribution.discover", lambda **where: iter(()))
    assert areal.__version__ == "unknown"


@pytest.mark.parametrize("kept", ["in its file", "packed", "detached", "none", "no clone"])
def test_the_version_of_a_clone_names_its_commit_however_git_keeps_it(tmp_path, kept):
    commit, branch = "0123456789abcdef", "refs/heads/main"
    head = commit if kept == "detached" else f"ref: {branch}"
    files = {
        "in its file": {"HEAD": head, branch: commit, "packed-refs": f"fedcba9876543210 {branch}"},
        "packed": {"HEAD": head, "packed-refs": f"# pack-refs\nfedcba9876543210 refs/heads/old\n{commit} {branch}"},
        "detached": {"HEAD": head},
        "none": {"HEAD": head, "packed-refs": "# pack-refs"},
        "no clone": {},
    }
    for name, text in files[kept].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert areal._commit(tmp_path) == ("" if kept in ("none", "no clone") else "+g0123456789")


def test_every_tool_is_there():
    named = [tool.get_default("tool").split(":") for tool in TOOLS.values()]
    assert all(callable(getattr(import_module(module), name)) for module, name in named)


def test_the_list_of_tools_loads_no_engine():
    code = (
        "import sys, areal.__main__ as m; m.command_line(); sys.exit(bool({'torch', 'zmq', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("verb", ["run", "train"])
def test_a_run_is_started_as_by_run_py(verb, monkeypatch):
    commands = []
    monkeypatch.setattr("os.execv", lambda program, words: commands.append(words) or sys.exit())
    with pytest.raises(SystemExit):
        main([verb, "mine.yaml", "--dry-run", "steps=3"])
    assert commands == [[sys.executable, START, "mine.yaml", "--dry-run", "steps=3"]]
    assert verb in CHOICES


def test_the_keys_of_the_configuration_are_listed(capsys):
    assert main(["config", "staleness", "eta"]) == 0
    output = capsys.readouterr().out
    assert "max_staleness" in output and "most versions between a group's first token" in output
    assert "trainer.lr" not in output
    assert main(["config", "evaluator", "top_p"]) == 0
    assert "evaluator.benchmarks.NAME.top_p" in capsys.readouterr().out


def test_editors_get_the_schema_of_a_configuration_and_anybody_the_version(capsys):
    assert main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"]["max_staleness"]["description"] and "batch_size" in schema["required"]
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == areal.__version__


@pytest.mark.parametrize("tool", ["", *TOOLS])
def test_every_tool_has_help_and_refuses_what_it_does_not_know(tool, capsys):
    for words, status in (([tool, "--help"], 0), ([tool, "--no-such-option"], 2)):
        with pytest.raises(SystemExit) as ended:
            main([word for word in words if word])
        output = capsys.readouterr()
        assert ended.value.code == status and "Traceback" not in output.err
        assert output.out.startswith(f"usage: areal {tool}") if status == 0 else "usage: areal" in output.err


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("no_such_tool", "invalid choice"),
        ("rollout", "there is no tool 'rollout': did you mean 'rollouts'?"),
        ("eval m --benchmarks gsm8k --batch_size 8", "settings have no dashes, write batch_size=8"),
        ("sweep x.yaml --learning-rate=8", "write trainer.lr=8"),
        ("rollouts", "required: RUN_FOLDER"),
        ("rollouts missing --show x", "invalid int value"),
        ("rollouts missing --sort step --random", "not allowed with"),
        ("export missing --output x.jsonl --format other", "invalid choice"),
        ("agent other", "invalid choice"),
        ("plan --devices x --device-memory 80", "invalid int value"),
        ("health --master tcp://127.0.0.1:1 --wait x", "invalid float value"),
        ("keys . --rotate --retire", "not allowed with"),
    ],
)
def test_options_that_cannot_be_are_refused_with_the_usage(command, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("report missing", "missing is not the folder of a run"),
        ("compare missing", "missing is not the folder of a run"),
        ("rollouts missing", "missing is not the folder of a run"),
        ("trace missing", "missing is not the folder of a run"),
        ("track missing", "There is no run in missing"),
        ("dashboard missing", "missing is not the folder of a run"),
        ("quickstart-model file", "file cannot hold a model (File exists)"),
        ("sft --model missing --data missing.jsonl --output out", "no model folder missing"),
        ("replay missing", "missing is not the folder of a run"),
        ("export missing --output x.jsonl", "no rollouts in missing"),
        ("export missing --output x.jsonl --format preference --all", "--all is for --format sft"),
        ("export missing --format model --output model", "missing is not the folder of a run"),
        ("eval missing --benchmarks other", "There is no benchmark 'other'"),
        ("eval missing --benchmarks gsm8k --config missing.yaml", "no configuration file missing.yaml"),
        ("score --reward exact_match --input missing.jsonl", "missing.jsonl cannot be read"),
        ("score --reward exact_match --input file sandbox.cpu_seconds=x", "sandbox.cpu_seconds is 'x'"),
        ("agent try --config missing.yaml", "no configuration file missing.yaml"),
        ("health --master nonsense", "'nonsense' is not an address"),
        (
            "plan --config missing.yaml --devices 8 --device-memory 80"
            " --generation-rate 1 --training-rate 1 --mean-tokens 1",
            "no configuration file missing.yaml",
        ),
        ("selftest --only other", "There is no check 'other'"),
        ("sweep missing.yaml", "no configuration file missing.yaml: correct its path"),
        ("config nonsense", "No key of the configuration has to do with nonsense"),
        ("sweep file", "file must contain keys and values"),
        ("keys missing --rotate", "no keys in missing"),
        ("keys file", "file cannot hold keys (File exists)"),
    ],
)
def test_what_is_missing_or_wrong_is_told_in_a_sentence(command, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(command.split()) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert told in sentence


def test_nothing_that_a_tool_prints_can_steer_the_terminal(capsys):
    from rich.table import Table

    table = Table("name\x1b[2J")
    table.add_row("fork\x9b31m of \x1b]0;title\x07")
    console = output(80)
    console.print(table)
    console.print("fate\x1b[2K: 50 %", highlight=False)
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\x07"} & set(printed)
    assert r"fate\x1b[2K: 50 %" in printed and r"name\x1b[2J" in printed


def test_a_shell_completes_tools_and_the_options_of_a_run(tmp_path, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "areal.bash").write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        function = "F=$(complete -p areal | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
        code = f". ./areal.bash; {function}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        code += f'"$F" areal {words[-1]!r}; echo "${{COMPREPLY[@]}}"'
        return subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True).stdout.split()

    assert {"report", "rollouts"} <= {*completed("areal", "r")}
    assert completed("areal", "run", "--dry") == ["--dry-run"] == completed("areal", "train", "--dry")


def test_a_completion_without_its_library_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "zsh"]) == 2
    assert capsys.readouterr().err == "The completion needs shtab: pip install shtab.\n"


@pytest.mark.parametrize("command", [main, run_main])
def test_a_folder_of_another_user_is_refused_in_a_sentence(command, tmp_path, capsys, monkeypatch):
    folder, user = tmp_path / "nobodys", os.geteuid()
    folder.mkdir(mode=0o700)
    (folder / "config.yaml").touch()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # a run replaces them
    monkeypatch.setattr(sys, "argv", ["run.py", "--resume", str(folder)])
    arguments = [["audit", str(folder)]] if command is main else []
    command(*arguments)  # imports everything
    folder.chmod(0o700 if user == 0 else 0)
    if user == 0:
        os.seteuid(65534)
    try:
        assert command(*arguments) == 2
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("This user has no right to do that (") and str(folder) in line


HIDING = ["actors.py", "protocols.py", "actors/__init__.py", "protocols/__init__.py"]


@pytest.fixture(params=HIDING)
def hiding(request, tmp_path):
    """A file of the user's that has the name of a package of ours."""
    file = tmp_path / request.param
    file.parent.mkdir(exist_ok=True)
    file.touch()
    return file


@pytest.mark.parametrize("command", [["-m", "areal", "ps"], ["-m", "areal", "run", "--help"], [START, "--help"]])
def test_a_file_of_the_users_that_hides_a_package_is_named_in_one_sentence(hiding, command, tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    name = hiding.relative_to(tmp_path).parts[0].removesuffix(".py")
    sentence = f"{hiding} hides the package {name!r} of areal: rename it, or start in another folder.\n"
    assert (done.returncode, done.stderr) == (2, sentence)


def test_a_file_that_hides_no_package_is_no_matter(tmp_path):
    (tmp_path / "trainer.py").touch()
    done = subprocess.run([sys.executable, "-m", "areal", "ps"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_notebook_beside_a_file_that_hides_a_package_shows_the_sentence_alone(tmp_path):
    (tmp_path / "protocols.py").touch()
    cell = "import areal\nareal.train()"
    program = f"from IPython.core.interactiveshell import InteractiveShell as S\nS.instance().run_cell({cell!r})"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert f"UserError: {tmp_path}/protocols.py hides the package 'protocols' of areal: rename it" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr and "File" not in done.stdout
