"""What a fresh machine relies on: metadata, the README's commands, imports without jax, settings."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "seal_jax").rglob("*.py"))
PURE = ("types", "envs", "diagnosis", "interface", "chat")


def readme_test_command():
    text = (ROOT / "README.md").read_text("utf-8")
    (block,) = re.findall(r"<!-- test-command -->\s*```\w*\n(.*?)```", text, re.S)
    return block.strip()


def test_layout():
    for path in ("setup.py", "README.md", "LICENSE", ".ci/run", "configs", "experiments", "colab", "seal_jax/py.typed"):
        assert (ROOT / path).exists(), path
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_readme_commands():
    command = readme_test_command()
    assert "\n" not in command
    assert command.startswith("pip install -e '.[test]'") and command.endswith("python -m pytest -q")
    assert "pip install -e . && python -m seal_jax.main --config=configs/quickstart.py" in (
        ROOT / "README.md"
    ).read_text("utf-8")


def test_ci_runs_the_readme_command_and_nothing_else_instead(tmp_path):
    """.ci/run with stand-ins for python: the command that it hands to the shell is the README's, then the linters."""
    tree = tmp_path / "tree"
    (tree / ".ci").mkdir(parents=True)
    (tree / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    (tree / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    tools = tmp_path / "bin"
    tools.mkdir()
    log = tmp_path / "calls"
    for name in ("python3.11", "python3", "python", "pip"):
        # `python -m venv DIR` makes an environment whose activation leaves the stand-ins in front.
        (tools / name).write_text(
            "#!/usr/bin/env bash\n"
            f'[[ "$1" == -c ]] || echo "{name} $*" >> {log}\n'
            'if [[ "$2" == venv ]]; then mkdir -p "$3/bin"; : > "$3/bin/activate"; fi\n'
        )
        (tools / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    env.pop("PYTHON", None)
    done = subprocess.run(["bash", str(tree / ".ci" / "run")], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    calls = [line for line in log.read_text().splitlines() if "venv" not in line and "--version" not in line]
    expected = [part.strip().replace("'", "") for part in readme_test_command().split("&&")]
    assert calls[0] == "python -m pip install --quiet --upgrade pip"
    assert calls[1 : 1 + len(expected)] == expected
    assert [c.split()[2] for c in calls[1 + len(expected) :]] == ["ruff", "ruff", "mypy"]
    assert not list(tmp_path.glob("seal-jax-ci.*")), "the environment is removed at the end"


def test_setup_names_every_import():
    """A module that is imported anywhere in the package is a requirement (or comes with one, or is optional)."""
    tree = ast.parse((ROOT / "setup.py").read_text("utf-8"))
    named = " ".join(n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    distribution = {"orbax": "orbax-checkpoint", "absl": "absl-py", "google": "absl-py"}
    comes_with = {
        "etils",
        "ml_dtypes",
        "huggingface_hub",
        "seal_jax",
    }  # orbax-checkpoint, jax and transformers need them
    optional = {"torch", "bfcl_eval"}  # asked for with the line to run, where they are missing
    missing = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in (n.split(".")[0] for n in names):
                if name in sys.stdlib_module_names or name in comes_with | optional:
                    continue
                if distribution.get(name, name).lower() not in named.lower():
                    missing.add(f"{path.relative_to(ROOT)}: {name}")
    assert not missing


def test_no_evaluation_of_text_and_no_pickle():
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(f"{path}:{node.lineno}")
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
                found += [f"{path}:{node.lineno}" for n in names if n.split(".")[0] in ("pickle", "dill", "marshal")]
    assert not found


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_import_without_jax_and_numpy(room):
    blocked = "jax", "jaxlib", "numpy", "flax", "optax"
    code = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\nimport seal_jax.{room}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_installed_metadata():
    try:
        found = metadata.metadata("seal-jax")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed here")
    assert found["Requires-Python"] == ">=3.11"
    assert "Apache-2.0" in (found["License-Expression"], found["License"])  # the name depends on the setuptools version
    assert {"tpu", "cuda", "test", "gguf"} <= set(found.get_all("Provides-Extra"))


def test_pytest_settings_keep_the_closing_line():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    assert "not slow" in settings["addopts"]
    # One -q stands in the README's command; a second would drop "N passed in S s".
    assert not [o for o in settings["addopts"] if re.fullmatch(r"-q+|--quiet", o)]


def test_no_machine_specific_paths():
    """Nothing that only exists on the machine of who wrote it."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(rb"/home/\w|/Users/\w|/ro" + rb"ot/|/wo" + rb"rk/")
    hits = []
    for name in done.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix in (".py", ".md", ".sh", ".toml", ".ipynb", "") and path.name != "LICENSE":
            hits += [f"{name}:{i}" for i, line in enumerate(path.read_bytes().splitlines(), 1) if pattern.search(line)]
    assert not hits
