"""Nothing in the package can run what a model wrote: no evaluators, no unpickling, no shells, checked on the syntax.

What a model says is read by parsers and dispatched to bound methods (seal_jax/envs/execution.py); this keeps it so.
It looks at every module of seal_jax, configs and experiments, and follows imports under other names; a use that is
right is listed in EXCEPTIONS with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("seal_jax", "configs", "experiments") for path in (ROOT / folder).rglob("*.py"))

#: {(file, finding): why it is right}. Every one must still be found.
EXCEPTIONS = {
    ("seal_jax/chat/formats.py", "import by a computed name"): "the name comes from the constant table FORMATS",
    ("seal_jax/envs/bfcl/package.py", "import by a computed name"): "the name comes from the constant CLASS_MODULES",
    ("seal_jax/main.py", "exec_module"): "runs the recipe, a Python file that the user names with --config",
}

#: Built-ins that turn text into running code. Even their names count, since a name can be handed on.
EVALUATORS = frozenset({"eval", "exec", "compile", "__import__", "execfile"})
#: Modules whose loading runs whatever the data says, or which run source text.
MODULES = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "code", "codeop", "runpy"}
)
#: Functions, by their full name, that must not be called whatever their arguments are.
FUNCTIONS = frozenset(
    {
        *("os.system", "os.popen", "os.startfile", "pty.spawn", "subprocess.getoutput", "subprocess.getstatusoutput"),
        *(f"os.{kind}{end}" for kind in ("exec", "spawn") for end in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
        *("os.posix_spawn", "os.posix_spawnp"),
        *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load"),
        *("yaml.unsafe_load_all", "torch.load", "torch.jit.load", "pandas.read_pickle", "types.FunctionType"),
        *("types.CodeType", "timeit.timeit", "timeit.Timer", "typing._eval_type"),
    }
)
#: Keyword arguments that may only be the literal False, in whatever call they stand.
ONLY_FALSE = frozenset({"shell", "allow_pickle", "trust_remote_code"})


def findings(source: str) -> Iterator[tuple[int, str]]:
    """(line, what was found) for every forbidden construct in a module."""
    tree = ast.parse(source)
    full_names = {}  # local name -> what it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                full_names[item.asname or item.name.partition(".")[0]] = (
                    item.name if item.asname else item.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for item in node.names:
                full_names[item.asname or item.name] = f"{node.module}.{item.name}"

    def full_name(node: ast.expr) -> str:
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        name = ".".join([full_names.get(node.id, node.id), *reversed(parts)])
        return name.replace("numpy.", "np.", 1) if name.startswith("numpy.") else name

    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        imported = []
        if isinstance(node, ast.Import):
            imported = [item.name for item in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported = [node.module or "", *(f"{node.module}.{item.name}" for item in node.names)]
        for name in imported:
            if name.partition(".")[0] in MODULES | {"builtins"}:
                yield line, f"module {name.partition('.')[0]}"
            elif name in FUNCTIONS:
                yield line, name
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id in EVALUATORS:
                yield line, node.id
            elif node.id == "__builtins__":
                yield line, "module builtins"
        if isinstance(node, ast.Attribute) and full_name(node) in FUNCTIONS:
            yield line, full_name(node)
        if isinstance(node, ast.Attribute) and node.attr in ("exec_module", "load_module"):
            yield line, node.attr
        if not isinstance(node, ast.Call):
            continue
        called = full_name(node.func)
        if called in ("importlib.import_module", "importlib.__import__"):
            if not (node.args and isinstance(node.args[0], ast.Constant)):
                yield line, "import by a computed name"
        for keyword in node.keywords:
            is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ONLY_FALSE and not is_false:
                yield line, f"{keyword.arg}="
            if keyword.arg is None and called.startswith("subprocess."):
                yield line, "subprocess with ** arguments"
        if called.startswith("subprocess.") and len(node.args) > 8:  # shell is the ninth
            yield line, "shell="
        if called == "np.load" and len(node.args) > 2:
            yield line, "allow_pickle="


def test_no_module_can_run_text_or_unpickle():
    assert len(SOURCES) > 50
    found, excused = [], set()
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        for line, what in findings(path.read_text(encoding="utf-8")):
            if (name, what) in EXCEPTIONS:
                excused.add((name, what))
            else:
                found.append(f"{name}:{line}: {what}")
    assert not found, "\n".join(found)
    assert excused == EXCEPTIONS.keys(), "an exception that is no longer needed"


@pytest.mark.parametrize(
    "source, what",
    [
        ("eval('1')", "eval"),
        ("exec(text, {})", "exec"),
        ("run = eval\nrun('1')", "eval"),
        ("map(exec, texts)", "exec"),
        ("compile(text, '', 'eval')", "compile"),
        ("__import__(name)", "__import__"),
        ("__import__('os')", "__import__"),
        ("import builtins\nbuiltins.eval('1')", "module builtins"),
        ("from builtins import eval as e", "module builtins"),
        ("__builtins__['eval']('1')", "module builtins"),
        ("import importlib\nimportlib.import_module(name)", "import by a computed name"),
        ("from importlib import import_module as load\nload(f'a.{x}')", "import by a computed name"),
        ("import pickle", "module pickle"),
        ("def f():\n    from pickle import loads", "module pickle"),
        ("import marshal as m", "module marshal"),
        ("import shelve", "module shelve"),
        ("import dill", "module dill"),
        ("import cloudpickle", "module cloudpickle"),
        ("from joblib import load", "module joblib"),
        ("import code", "module code"),
        ("import os\nos.system('ls')", "os.system"),
        ("import os as o\no.popen('ls')", "os.popen"),
        ("from os import system", "os.system"),
        ("import os\nos.execvp('sh', a)", "os.execvp"),
        ("import os\nrun = os.system", "os.system"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "shell="),
        ("import subprocess as sp\nsp.Popen('ls', shell=flag)", "shell="),
        ("from subprocess import run\nrun('ls', **options)", "subprocess with ** arguments"),
        ("import subprocess\nsubprocess.Popen(a, 0, None, None, None, None, None, True, True)", "shell="),
        ("from subprocess import getoutput", "subprocess.getoutput"),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", "allow_pickle="),
        ("import numpy\nnumpy.load(f, None, True)", "allow_pickle="),
        ("from numpy import load\nload(f, allow_pickle=flag)", "allow_pickle="),
        ("import yaml\nyaml.load(text, Loader=yaml.SafeLoader)", "yaml.load"),
        ("from yaml import unsafe_load", "yaml.unsafe_load"),
        ("import torch\ntorch.load(f)", "torch.load"),
        ("import pandas as pd\npd.read_pickle(f)", "pandas.read_pickle"),
        ("import timeit\ntimeit.timeit(text)", "timeit.timeit"),
        ("spec.loader.exec_module(module)", "exec_module"),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", "trust_remote_code="),
    ],
)
def test_a_planted_sample_is_found(source, what):
    assert what in [found for _, found in findings(source)]


@pytest.mark.parametrize(
    "source",
    [
        "import ast\nast.literal_eval(text)\nast.parse(text, mode='eval')",
        "import re\nre.compile('a')",
        "model.eval()\nfn.lower().compile()\nconfig.eval.tasks",
        "import importlib\nimportlib.import_module('seal_jax.types')",
        "import subprocess\nsubprocess.run(['ls'], shell=False, check=True)",
        "import numpy as np\nnp.load(f)\nnp.load(f, allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "import os\nos.environ['A']\nos.path.exists(p)",
        "import json\njson.load(f)",
        "def compile(self): ...",
    ],
)
def test_innocent_code_is_not_found(source):
    assert list(findings(source)) == []
