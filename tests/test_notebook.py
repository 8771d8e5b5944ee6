"""The Colab notebook, executed from first to last cell on a run that is shrunk by flags."""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[1]
#: The smallest run that still does everything: a round on the kept clone, evaluation before and after, figures. One
#: bucket of each kind, because nearly all of its time is compilation.
SHRUNK = (
    "--config.rounds=1 --config.tasks_per_round=2 --config.rollouts=2 --config.eval.test=2 --config.eval.ood=2 "
    "'--config.buckets.suffix=(512,)' '--config.buckets.chunk=(64,)' '--config.buckets.groups=(2,)'"
)


def read():
    return nbformat.read(ROOT / "colab" / "quickstart.ipynb", as_version=4)


@pytest.mark.parametrize("installed", [True, False])
def test_the_first_cell_installs_what_is_not_installed(monkeypatch, installed):
    # The checkout can be imported from where the notebook works, so that an import proves no installation.
    from IPython.core.inputtransformer2 import TransformerManager

    def version(name):
        if not installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    class Shell:
        commands = []

        def system(self, command):
            self.commands.append(command)

    shell = Shell()
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.chdir(ROOT / "colab")
    cell = next(c.source for c in read().cells if "pip install" in c.source)
    exec(TransformerManager().transform_cell(cell), {"get_ipython": lambda: shell})
    assert Path.cwd() == ROOT
    assert [c.split(" -m ")[1] for c in shell.commands] == ([] if installed else ["pip install --quiet -e ."])


def test_quickstart_notebook_runs(tmp_path, monkeypatch):
    # The kernel must be this interpreter, whatever kernels are installed under the name "python3".
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (kernel / "kernel.json").write_text(f'{{"argv": {argv}, "display_name": "test", "language": "python"}}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("SEAL_NOTEBOOK_WORKDIR", str(tmp_path / "run"))
    monkeypatch.setenv("SEAL_NOTEBOOK_FLAGS", SHRUNK)
    # Counts as installed, wherever these tests run from: a test installs nothing.
    (tmp_path / "seal_jax-0.dist-info").mkdir()
    (tmp_path / "seal_jax-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: seal-jax\nVersion: 0\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    # One device (the forced devices of the other tests only cost time here), and quick compiles instead of fast code.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    notebook = read()
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit the notebook without outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT / "colab")}}
    )
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        outputs = [o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", [])]
        pytest.fail(f"{error}\n{''.join(outputs)[-4000:]}")
    shown = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "test: strict success" in shown and "[turn 0: sampled]" in shown
    assert any("image/png" in o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", []))
